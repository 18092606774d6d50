/* The inner loops of simd.h, written once; the including file fixes table, name and vector width.
 *
 * The 16 lanes of a reduction are DS4_SIMD_NV vectors of DS4_SIMD_WIDTH floats.  Loops without a
 * reduction are plain C that the compiler vectorises: IEEE arithmetic without contraction gives the
 * same bits however wide it runs.  No include guard: each including file is one instance. */
#include "kernels/cpu/simd.h"

#include "kernels/cpu/math.h"

#include <string.h>

#define DS4_SIMD_NV    (DS4_LANES / DS4_SIMD_WIDTH)
#define DS4_SIMD_TILE  (DS4_SIMD_WIDTH == 4 ? 2 : 4) /* rows that share a load: by registers */
#define DS4_SIMD_ROWS  4   /* rows decoded at once, DS4_SIMD_PIECE values of each: 8 KiB */
#define DS4_SIMD_PIECE 512 /* whole blocks of every format */

typedef float ds4_vf __attribute__((vector_size(4 * DS4_SIMD_WIDTH)));

static inline ds4_vf load(const float *p)
{
    ds4_vf v;

    memcpy(&v, p, sizeof(v));
    return v;
}

static inline void store(float *p, ds4_vf v)
{
    memcpy(p, &v, sizeof(v));
}

static inline float combine_lanes(const float *lane)
{
    float half[DS4_LANES / 2];

    for (int i = 0; i < 8; i++)
        half[i] = lane[i] + lane[i + 8];
    for (int i = 0; i < 4; i++)
        half[i] += half[i + 4];
    for (int i = 0; i < 2; i++)
        half[i] += half[i + 2];
    return half[0] + half[1];
}

#include "kernels/cpu/quant_body.h" /* uses the vectors above */

/* lane[t] += the products of a and row t of x.  n_t is a constant at every call, so the lanes live in
 * registers.  n must be a multiple of DS4_LANES unless it ends the sum. */
static inline __attribute__((always_inline)) void accumulate_tile(const float *a, int32_t n,
                                                                  const float *x, int64_t x_stride,
                                                                  int n_t, float (*lane)[DS4_LANES])
{
    ds4_vf acc[DS4_SIMD_TILE][DS4_SIMD_NV];
    int32_t whole = n - n % DS4_LANES;

#pragma GCC unroll 4
    for (int t = 0; t < n_t; t++) {
#pragma GCC unroll 4
        for (int v = 0; v < DS4_SIMD_NV; v++)
            acc[t][v] = load(lane[t] + v * DS4_SIMD_WIDTH);
    }
    for (int32_t i = 0; i < whole; i += DS4_LANES) {
#pragma GCC unroll 4
        for (int v = 0; v < DS4_SIMD_NV; v++) {
            ds4_vf av = load(a + i + v * DS4_SIMD_WIDTH);
#pragma GCC unroll 4
            for (int t = 0; t < n_t; t++)
                acc[t][v] += av * load(x + t * x_stride + i + v * DS4_SIMD_WIDTH);
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < n_t; t++) {
#pragma GCC unroll 4
        for (int v = 0; v < DS4_SIMD_NV; v++)
            store(lane[t] + v * DS4_SIMD_WIDTH, acc[t][v]);
    }
    for (int t = 0; t < n_t; t++) {
        for (int32_t i = whole; i < n; i++)
            lane[t][i - whole] += a[i] * x[t * x_stride + i];
    }
}

static inline void accumulate(const float *a, int32_t n, const float *x, int64_t x_stride,
                              int32_t n_x, float (*lane)[DS4_LANES])
{
    int32_t t = 0;

    for (; t + DS4_SIMD_TILE <= n_x; t += DS4_SIMD_TILE)
        accumulate_tile(a, n, x + t * x_stride, x_stride, DS4_SIMD_TILE, lane + t);
    for (; t < n_x; t++)
        accumulate_tile(a, n, x + t * x_stride, x_stride, 1, lane + t);
}

static void dot(const float *a, int32_t n, const float *x, int64_t x_stride, int32_t n_x,
                float *out)
{
    for (int32_t t = 0; t < n_x; t += DS4_SIMD_TILE) {
        float lane[DS4_SIMD_TILE][DS4_LANES] = {0};
        int32_t n_t = n_x - t < DS4_SIMD_TILE ? n_x - t : DS4_SIMD_TILE;

        accumulate(a, n, x + t * x_stride, x_stride, n_t, lane);
        for (int32_t j = 0; j < n_t; j++)
            out[t + j] = combine_lanes(lane[j]);
    }
}

/* Rows are decoded piece by piece: a piece of DS4_SIMD_ROWS rows stays in L1 while all inputs pass by,
 * and the lanes of each (input, row) carry on from piece to piece. */
static void product(const struct ds4_rows *w, const void *const *x, int32_t n_x,
                    float (*out)[DS4_TILE_ROWS])
{
    size_t block_elems = (size_t)ds4_dtype_info(w->dtype)->block_elems;
    size_t block_bytes = (size_t)ds4_dtype_info(w->dtype)->block_bytes;

    for (int32_t r0 = 0; r0 < w->n_row; r0 += DS4_SIMD_ROWS) {
        int32_t n_r = w->n_row - r0 < DS4_SIMD_ROWS ? w->n_row - r0 : DS4_SIMD_ROWS;
        float lane[DS4_TILE_INPUTS][DS4_SIMD_ROWS][DS4_LANES];
        float piece[DS4_SIMD_ROWS][DS4_SIMD_PIECE];

        memset(lane, 0, (size_t)n_x * sizeof(lane[0]));
        for (int32_t c = 0; c < w->n_col; c += DS4_SIMD_PIECE) {
            int32_t n = w->n_col - c < DS4_SIMD_PIECE ? w->n_col - c : DS4_SIMD_PIECE;
            const uint8_t *at = w->data + (size_t)c / block_elems * block_bytes;

            for (int32_t r = 0; r < n_r; r++)
                dequant_row(w->dtype, at + (size_t)(r0 + r) * w->row_bytes, n, piece[r]);
            for (int32_t t = 0; t < n_x; t++)
                accumulate((const float *)x[t] + c, n, piece[0], DS4_SIMD_PIECE, n_r, lane[t]);
        }
        for (int32_t t = 0; t < n_x; t++) {
            for (int32_t r = 0; r < n_r; r++)
                out[t][r0 + r] = combine_lanes(lane[t][r]);
        }
    }
}

/* n_v vectors of acc stay in registers while the rows pass by. */
static inline __attribute__((always_inline)) void
axpy_columns(float *acc, int n_v, const float *x, int64_t x_stride, const float *coef, int32_t n_x)
{
    ds4_vf sum[8];

#pragma GCC unroll 8
    for (int v = 0; v < n_v; v++)
        sum[v] = load(acc + v * DS4_SIMD_WIDTH);
    for (int32_t t = 0; t < n_x; t++) {
        ds4_vf c = coef[t] - (ds4_vf){0};

#pragma GCC unroll 8
        for (int v = 0; v < n_v; v++)
            sum[v] += c * load(x + t * x_stride + v * DS4_SIMD_WIDTH);
    }
#pragma GCC unroll 8
    for (int v = 0; v < n_v; v++)
        store(acc + v * DS4_SIMD_WIDTH, sum[v]);
}

static void axpy(float *acc, int32_t n, const float *x, int64_t x_stride, const float *coef,
                 int32_t n_x)
{
    int32_t i = 0;

    for (; i + 8 * DS4_SIMD_WIDTH <= n; i += 8 * DS4_SIMD_WIDTH)
        axpy_columns(acc + i, 8, x + i, x_stride, coef, n_x);
    for (; i + DS4_SIMD_WIDTH <= n; i += DS4_SIMD_WIDTH)
        axpy_columns(acc + i, 1, x + i, x_stride, coef, n_x);
    for (; i < n; i++) {
        for (int32_t t = 0; t < n_x; t++)
            acc[i] += coef[t] * x[t * x_stride + i];
    }
}

static void scale(const float *x, float r, const float *w, int32_t n, float *y)
{
    ds4_vf rv = r - (ds4_vf){0};
    int32_t i = 0;

    for (; i + DS4_SIMD_WIDTH <= n; i += DS4_SIMD_WIDTH)
        store(y + i, w == NULL ? load(x + i) * rv : load(w + i) * (load(x + i) * rv));
    for (; i < n; i++)
        y[i] = w == NULL ? x[i] * r : w[i] * (x[i] * r);
}

static float max_of(const float *z, int32_t n)
{
    float lane[DS4_LANES];
    int32_t whole = n - n % DS4_LANES;

    for (int i = 0; i < DS4_LANES; i++)
        lane[i] = -INFINITY;
    for (int32_t i = 0; i < whole; i += DS4_LANES) {
        for (int j = 0; j < DS4_LANES; j++)
            lane[j] = z[i + j] > lane[j] ? z[i + j] : lane[j];
    }
    for (int32_t i = whole; i < n; i++)
        lane[0] = z[i] > lane[0] ? z[i] : lane[0];
    for (int i = 1; i < DS4_LANES; i++)
        lane[0] = lane[i] > lane[0] ? lane[i] : lane[0];
    return lane[0];
}

static float exp_sum(float *z, int32_t n, float top)
{
    float lane[DS4_LANES] = {0};
    int32_t whole = n - n % DS4_LANES;

    for (int32_t i = 0; i < n; i++)
        z[i] = ds4_expf(z[i] - top);
    for (int32_t i = 0; i < whole; i += DS4_LANES) {
        for (int j = 0; j < DS4_LANES; j++)
            lane[j] += z[i + j];
    }
    for (int32_t i = whole; i < n; i++)
        lane[i - whole] += z[i];
    return combine_lanes(lane);
}

static void pool(const float *restrict g, const float *restrict k, const float *restrict top,
                 int32_t n, float *restrict sum, float *restrict acc)
{
    for (int32_t i = 0; i < n; i++) {
        float e = ds4_expf(g[i] - top[i]);

        sum[i] += e;
        acc[i] += e * k[i];
    }
}

extern const struct ds4_simd DS4_SIMD_TABLE;
const struct ds4_simd DS4_SIMD_TABLE = {
    .name = DS4_SIMD_NAME,
    .dequant = dequant_row,
    .dot = dot,
    .axpy = axpy,
    .scale = scale,
    .max = max_of,
    .exp_sum = exp_sum,
    .pool = pool,
    .product = product,
    .product_act = product_act,
};

/* Cache rows: the checkpoint's rounding, packed storage, and the position-addressed rings (step 9,
 * paper 3.8).
 *
 * Rounding and packing are two steps so that a row is used in the step that made it exactly as it is
 * read back later.  Packing finds a scale of its own from the rounded values: it may be half the one
 * that rounded them (a largest value just above 224 steps rounds to 224), and the codes double, which
 * is still exact.  Blocks with a non-finite value become NaN, never a plausible number. */
#include "kernels/cpu/cpu.h"

#include <math.h>
#include <string.h>

#define DS4_FP8_LEAST_AMAX 1e-4f /* the checkpoint's clamps of a block's largest magnitude */
#define DS4_FP4_LEAST_AMAX (6.0f * 0x1p-126f)

static int32_t block_width(int32_t at, int32_t n, int32_t block)
{
    return n - at < block ? n - at : block;
}

/* The e8m0 code of a block's scale: the power of two with amax / scale <= limit. */
static uint8_t scale_code(const float *x, int32_t n, float least, float limit)
{
    float most = least;
    int finite = 1;

    for (int32_t i = 0; i < n; i++) {
        float magnitude = fabsf(x[i]);

        finite &= magnitude <= 0x1.fffffep127f;
        most = magnitude > most ? magnitude : most;
    }
    return finite ? ds4_e8m0_from_f32(most / limit) : 0xff;
}

static void round_bf16(float *x, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        x[i] = ds4_f32_from_bf16(ds4_bf16_from_f32(x[i]));
}

/* Walsh-Hadamard in natural order times n^-0.5; n a power of two. */
static void hadamard(float *x, int32_t n)
{
    float factor = (float)(1.0 / sqrt((double)n));

    assert(n > 0 && (n & (n - 1)) == 0);
    for (int32_t half = 1; half < n; half *= 2) {
        for (int32_t i = 0; i < n; i += 2 * half) {
            for (int32_t j = i; j < i + half; j++) {
                float a = x[j], b = x[j + half];

                x[j] = a + b;
                x[j + half] = a - b;
            }
        }
    }
    for (int32_t i = 0; i < n; i++)
        x[i] *= factor;
}

static void round_fp8(int32_t nope, float *x)
{
    for (int32_t at = 0; at < nope; at += DS4_FP8_BLOCK) {
        int32_t n = block_width(at, nope, DS4_FP8_BLOCK);
        float s = ds4_f32_from_e8m0(scale_code(x + at, n, DS4_FP8_LEAST_AMAX, DS4_E4M3_MAX));

        for (int32_t i = at; i < at + n; i++)
            x[i] = ds4_f32_from_e4m3(ds4_e4m3_from_f32(x[i] / s)) * s;
    }
    round_bf16(x, nope); /* changes nothing but the width of NaNs */
}

static void round_fp4(int32_t d, float *x)
{
    hadamard(x, d);
    round_bf16(x, d);
    for (int32_t at = 0; at < d; at += DS4_FP4_BLOCK) {
        int32_t n = block_width(at, d, DS4_FP4_BLOCK);
        float s = ds4_f32_from_e8m0(scale_code(x + at, n, DS4_FP4_LEAST_AMAX, DS4_E2M1_MAX));

        for (int32_t i = at; i < at + n; i++)
            x[i] = ds4_f32_from_e2m1(ds4_e2m1_from_f32(x[i] / s)) * s;
    }
}

void ds4_cpu_round_row(enum ds4_row_format format, int32_t d, int32_t d_rope, float *x)
{
    switch (format) {
    case DS4_ROW_F32:
        return;
    case DS4_ROW_BF16:
        round_bf16(x, d);
        return;
    case DS4_ROW_FP8:
        round_fp8(d - d_rope, x);
        round_bf16(x + d - d_rope, d_rope);
        return;
    case DS4_ROW_FP4:
        round_fp4(d, x);
        return;
    }
}

/* ---- storage ------------------------------------------------------------------------------------ */

static void pack_bf16(const float *x, int32_t n, uint8_t *out)
{
    for (int32_t i = 0; i < n; i++) {
        uint16_t h = ds4_bf16_from_f32(x[i]);

        memcpy(out + 2 * (size_t)i, &h, sizeof(h));
    }
}

static void unpack_bf16(const uint8_t *in, int32_t n, float *x)
{
    for (int32_t i = 0; i < n; i++) {
        uint16_t h;

        memcpy(&h, in + 2 * (size_t)i, sizeof(h));
        x[i] = ds4_f32_from_bf16(h);
    }
}

/* Where the bf16 tail of an FP8 row begins. */
static size_t fp8_tail(int32_t nope)
{
    size_t packed = (size_t)nope + ((size_t)nope + DS4_FP8_BLOCK - 1) / DS4_FP8_BLOCK;

    return packed + packed % 2;
}

static void pack_fp8(int32_t d, int32_t d_rope, const float *x, uint8_t *row)
{
    int32_t nope = d - d_rope;
    size_t scales = (size_t)(nope + DS4_FP8_BLOCK - 1) / DS4_FP8_BLOCK;

    memset(row + nope + scales, 0, fp8_tail(nope) - (size_t)nope - scales);
    for (int32_t at = 0; at < nope; at += DS4_FP8_BLOCK) {
        int32_t n = block_width(at, nope, DS4_FP8_BLOCK);
        uint8_t code = scale_code(x + at, n, DS4_FP8_LEAST_AMAX, DS4_E4M3_MAX);
        float s = ds4_f32_from_e8m0(code);

        row[nope + at / DS4_FP8_BLOCK] = code;
        for (int32_t i = at; i < at + n; i++)
            row[i] = ds4_e4m3_from_f32(x[i] / s);
    }
    pack_bf16(x + nope, d_rope, row + fp8_tail(nope));
}

/* Decoding is the hot half: every attention step reads its rows again.  So without branches: the
 * exponent moves to f32's place and an exact product corrects it, subnormals included. */
static void unpack_e4m3(const uint8_t *restrict code, int32_t n, float s, float *restrict x)
{
    for (int32_t i = 0; i < n; i++) {
        uint32_t mag = (uint32_t)(code[i] & 0x7f) << 20, sign = (uint32_t)(code[i] & 0x80) << 24;
        float value = ds4_f32_from_bits(mag) * 0x1p120f;
        uint32_t bits =
            mag == UINT32_C(0x07f00000) ? UINT32_C(0x7fc00000) : ds4_bits_from_f32(value);

        x[i] = ds4_f32_from_bits(bits | sign) * s;
    }
}

static void unpack_fp8(int32_t d, int32_t d_rope, const uint8_t *row, float *x)
{
    int32_t nope = d - d_rope;

    for (int32_t at = 0; at < nope; at += DS4_FP8_BLOCK)
        unpack_e4m3(row + at, block_width(at, nope, DS4_FP8_BLOCK),
                    ds4_f32_from_e8m0(row[nope + at / DS4_FP8_BLOCK]), x + at);
    unpack_bf16(row + fp8_tail(nope), d_rope, x + nope);
}

static void pack_fp4(int32_t d, const float *x, uint8_t *row)
{
    memset(row, 0, (size_t)d / 2);
    for (int32_t at = 0; at < d; at += DS4_FP4_BLOCK) {
        int32_t n = block_width(at, d, DS4_FP4_BLOCK);
        uint8_t code = scale_code(x + at, n, DS4_FP4_LEAST_AMAX, DS4_E2M1_MAX);
        float s = ds4_f32_from_e8m0(code);

        row[d / 2 + at / DS4_FP4_BLOCK] = code;
        for (int32_t i = at; i < at + n; i++)
            row[i / 2] |= (uint8_t)(ds4_e2m1_from_f32(x[i] / s) << 4 * (i % 2));
    }
}

static void unpack_fp4(int32_t d, const uint8_t *row, float *x)
{
    static const float value[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

    for (int32_t at = 0; at < d; at += DS4_FP4_BLOCK) {
        float s = ds4_f32_from_e8m0(row[d / 2 + at / DS4_FP4_BLOCK]);
        int32_t end = at + block_width(at, d, DS4_FP4_BLOCK);

        for (int32_t i = at; i < end; i += 2) {
            x[i] = value[row[i / 2] & 15] * s;
            x[i + 1] = value[row[i / 2] >> 4] * s;
        }
    }
}

void ds4_cpu_pack_row(enum ds4_row_format format, int32_t d, int32_t d_rope, const float *x,
                      void *row)
{
    switch (format) {
    case DS4_ROW_F32:
        memcpy(row, x, (size_t)d * sizeof(*x));
        return;
    case DS4_ROW_BF16:
        pack_bf16(x, d, row);
        return;
    case DS4_ROW_FP8:
        pack_fp8(d, d_rope, x, row);
        return;
    case DS4_ROW_FP4:
        pack_fp4(d, x, row);
        return;
    }
}

void ds4_cpu_unpack_row(enum ds4_row_format format, int32_t d, int32_t d_rope, const void *row,
                        float *x)
{
    switch (format) {
    case DS4_ROW_F32:
        memcpy(x, row, (size_t)d * sizeof(*x));
        return;
    case DS4_ROW_BF16:
        unpack_bf16(row, d, x);
        return;
    case DS4_ROW_FP8:
        unpack_fp8(d, d_rope, row, x);
        return;
    case DS4_ROW_FP4:
        unpack_fp4(d, row, x);
        return;
    }
}

uint8_t *ds4_cpu_page_row(const struct ds4_pages *pages, const struct ds4_batch_entry *entry,
                          int32_t j)
{
    int32_t index = j / pages->rows_per_block, block;

    if (index >= entry->n_block)
        return NULL;
    block = entry->block[index];
    if (block < 0 || block >= pages->n_block)
        return NULL;
    return (uint8_t *)pages->data +
           ((size_t)block * (size_t)pages->rows_per_block + (size_t)(j % pages->rows_per_block)) *
               pages->row_bytes;
}

void ds4_cpu_read_page(const struct ds4_pages *pages, const struct ds4_batch_entry *entry,
                       int32_t j, float *x)
{
    const uint8_t *row = ds4_cpu_page_row(pages, entry, j);

    for (int32_t i = 0; row == NULL && i < pages->d; i++)
        x[i] = NAN;
    if (row != NULL)
        ds4_cpu_unpack_row(pages->format, pages->d, pages->d_rope, row, x);
}

/* ---- operations --------------------------------------------------------------------------------- */

static void round_item(void *ctx, int32_t t, int32_t thread)
{
    const struct ds4_round_args *a = ctx;

    (void)thread;
    ds4_cpu_round_row(a->format, a->x.shape[1], a->d_rope, (float *)a->x.data + t * a->x.stride[0]);
}

void ds4_cpu_round(struct ds4_device *dev, const struct ds4_round_args *a)
{
    assert(a->x.dtype == DS4_DTYPE_F32 && a->x.n_dim == 2);
    if (a->format != DS4_ROW_F32)
        ds4_pool_run(dev->pool, a->x.shape[0], round_item, (void *)a);
}

static void write_entry(void *ctx, int32_t e, int32_t thread)
{
    const struct ds4_ring_write_args *a = ctx;
    const struct ds4_batch_entry *entry = &a->batch->entry[e];
    int32_t end = entry->base_pos + entry->n_row, first;

    (void)thread;
    if (!entry->active)
        return;
    end = end > entry->cap_tok ? entry->cap_tok : end;
    first = end - a->ring.cap > entry->base_pos ? end - a->ring.cap : entry->base_pos;
    for (int32_t pos = first; pos < end; pos++) {
        int64_t row = entry->first_row + (pos - entry->base_pos);

        ds4_cpu_pack_row(a->ring.format, a->ring.d, a->ring.d_rope,
                         (const float *)a->x.data + row * a->x.stride[0],
                         ds4_ring_row(&a->ring, entry->slot, pos));
    }
}

void ds4_cpu_ring_write(struct ds4_device *dev, const struct ds4_ring_write_args *a)
{
    assert(a->x.dtype == DS4_DTYPE_F32 && a->x.shape[1] == a->ring.d);
    ds4_pool_run(dev->pool, a->batch->n_entry, write_entry, (void *)a);
}

struct keep_job {
    struct ds4_device *dev;
    const struct ds4_keep_args *a;
    struct ds4_scratch scratch;
};

static void keep_row(void *ctx, int32_t i, int32_t thread)
{
    const struct keep_job *job = ctx;
    const struct ds4_keep_args *a = job->a;
    const float *x = (const float *)a->x.data + (a->first_row + i) * a->x.stride[0];
    uint8_t *dst = (uint8_t *)a->dst + (size_t)i * ds4_row_bytes(a->format, a->n_col, a->d_rope);
    float *sum = ds4_scratch_of(&job->scratch, thread); /* [n_col] */

    if (a->ape.data != NULL) {
        job->dev->simd->dequant(a->ape.dtype, ds4_weight_row(&a->ape, 0, (a->pos + i) % a->ratio),
                                a->n_col, sum);
        for (int32_t c = 0; c < a->n_col; c++)
            sum[c] = x[c] + sum[c];
        x = sum;
    }
    ds4_cpu_pack_row(a->format, a->n_col, a->d_rope, x, dst);
}

void ds4_cpu_keep(struct ds4_device *dev, const struct ds4_keep_args *a)
{
    struct ds4_need need = {.thread_bytes = (size_t)a->n_col * sizeof(float)};
    struct keep_job job = {dev, a, ds4_cpu_scratch(dev, need)};

    assert(a->x.dtype == DS4_DTYPE_F32 && a->x.shape[1] >= a->n_col);
    assert(a->first_row + a->n_row <= a->x.shape[0]);
    assert(a->ape.data == NULL || a->format == DS4_ROW_F32);
    ds4_pool_run(dev->pool, a->n_row, keep_row, &job);
}

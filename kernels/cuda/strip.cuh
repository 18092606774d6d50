/* Q8_0 weights against 1 to 16 rows on the integer tensor units: y = W x, weights read once.
 *
 * A block makes strips of 16 weight rows.  Stored weights come by cp.async in chunks of 32 units (1,088 bytes a
 * row) and are the A of mma.m16n8k32 as they lie: a unit is exactly its 32 values of k.  B are the inputs, eight
 * rows a tile, which a block keeps in shared memory for all its strips where they fit.  The sums of a unit are
 * exact integers; each gets its two scales and is added to one of 32 partial sums, unit u to number u % 32; warp
 * w of a block owns the numbers w, w + WARPS, ...  In the end the 32 meet in the tree of ds4_warp_sums: a
 * row's bits are those of the streaming kernel for one row, whatever came along.
 * DIGITS 3: f32 inputs as three int8 digits of a fixed-point number with the unit's largest value at 127 * 2^16:
 * the exact form, off by at most 2^-24 of that value.
 * Bytes: the weights, once per 16 rows, and the inputs once per block.  Bound: copy bandwidth; 30 (DIGITS 3: 60)
 * instructions and 15 accesses to shared memory per 544 bytes of weights are a quarter (half) of what an SM can do. */
#ifndef DS4_KERNELS_CUDA_STRIP_CUH
#define DS4_KERNELS_CUDA_STRIP_CUH

#include "kernels/cuda/async.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/product.cuh"
#include "kernels/cuda/unit.cuh"

#define DS4_STRIP_ROWS  16
#define DS4_STRIP_UNITS 32 /* of a chunk: one for each partial sum */
#define DS4_STRIP_CHUNK (DS4_STRIP_UNITS * 34)
/* Between rows in shared memory: any start, and 20 words modulo 32, so that eight rows of four words meet no
 * bank twice. */
#define DS4_STRIP_PITCH (DS4_STRIP_CHUNK + 16)

template <int N8, int DIGITS, int WARPS> struct ds4_strip_shape {
    static constexpr int n = 8 * N8;
    static constexpr int classes = 32 / WARPS;                       /* partial sums of a warp */
    static constexpr int planes = 2 * DIGITS;                        /* 16 bytes of a unit each */
    static constexpr int w_bytes = DS4_STRIP_ROWS * DS4_STRIP_PITCH; /* a stage */
    static constexpr int x_values = DS4_STRIP_UNITS * planes * n * 16;
    static constexpr int x_bytes =
        x_values + DS4_STRIP_UNITS * n * 4; /* a slot: values, then scales */
    static constexpr int part_bytes = WARPS * DS4_STRIP_ROWS * (n + 1) * 4;
};

/* Starts the copy of chunk c of strip `strip`.  ALIGNED: rows are multiples of 16 bytes. */
template <int WARPS, bool ALIGNED>
static __device__ __forceinline__ void ds4_strip_fetch(const uint8_t *w, size_t row_bytes,
                                                       int32_t n_row, int32_t n_unit, int32_t strip,
                                                       int32_t c, uint8_t *stage)
{
    constexpr int each = DS4_STRIP_ROWS / WARPS; /* rows of a warp */
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int bytes = min(DS4_STRIP_CHUNK, 34 * n_unit - c * DS4_STRIP_CHUNK);
    const uint8_t *p[each];

    stage += each * warp * DS4_STRIP_PITCH;
#pragma unroll
    for (int i = 0; i < each; i++)
        p[i] = w + (size_t)min(strip * DS4_STRIP_ROWS + each * warp + i, n_row - 1) * row_bytes +
               c * DS4_STRIP_CHUNK;
    if constexpr (ALIGNED) {
        const int rest =
            1024 + 16 * (lane % 4); /* the last four pieces of each row, in one round */

#pragma unroll
        for (int i = 0; i < each; i++) {
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int at = 512 * k + 16 * lane;

                if (at < bytes)
                    ds4_async_copy(stage + i * DS4_STRIP_PITCH + at, p[i] + at, 16);
            }
        }
        if (lane < 4 * each && rest < bytes)
            ds4_async_copy(stage + lane / 4 * DS4_STRIP_PITCH + rest,
                           (lane < 4 ? p[0] : p[each - 1]) + rest, 16);
    } else {
#pragma unroll
        for (int i = 0; i < each; i++) {
            const int lead = (int)((uintptr_t)p[i] & 15), total = lead + bytes;

            for (int at = 16 * lane; at < total; at += 16 * 32)
                ds4_async_copy(stage + i * DS4_STRIP_PITCH + at, p[i] - lead + at,
                               min(16, total - at));
        }
    }
}

/* Starts the copy of chunk c of the inputs.  Eight lanes bring a unit of eight rows; rows that are not there
 * stay what they were, and so do their sums. */
template <int N8, int DIGITS, int WARPS>
static __device__ __forceinline__ void
ds4_strip_inputs(const struct ds4_product &p, const uint8_t *x, int32_t n_unit_all, int32_t unit0,
                 int32_t n_unit, int32_t c, uint8_t *slot)
{
    using shape = ds4_strip_shape<N8, DIGITS, WARPS>;
    constexpr int U = DS4_STRIP_UNITS;
    const int32_t left = n_unit - c * U, first = unit0 + c * U;

    for (int i = threadIdx.x; i < shape::planes * shape::n * U; i += 32 * WARPS) {
        const int unit = i / 8 % U, plane = i / (8 * U) % shape::planes;
        const int r = i / (8 * U * shape::planes) * 8 + i % 8;

        if (r < p.n && unit < left)
            ds4_async_copy(
                slot + ((unit * shape::planes + plane) * shape::n + r) * 16,
                x + r * p.x.row_bytes + 16 * ((int64_t)n_unit_all * plane + first + unit), 16);
    }
    for (int i = threadIdx.x; i < shape::n * U; i += 32 * WARPS) {
        const int unit = i / 8 % U, r = i / (8 * U) * 8 + i % 8;

        if (r < p.n && unit < left)
            ds4_async_copy4(slot + shape::x_values + (unit * shape::n + r) * 4,
                            x + r * p.x.row_bytes + (int64_t)16 * shape::planes * n_unit_all +
                                8 * (first + unit));
    }
}

/* The sum of a unit as a float, of its digits (high ones first). */
template <int DIGITS>
static __device__ __forceinline__ float ds4_strip_sum(const int (&d)[DIGITS][4], int i)
{
    if constexpr (DIGITS == 1)
        return __fsub_rn(__int_as_float(d[0][i]), 12582912.0f); /* 1.5 * 2^23: see the C below */
    else
        return __fadd_rn(__fmul_rn((float)d[0][i], 65536.0f), (float)(256 * d[1][i] + d[2][i]));
}

/* What lane 4g + t brings of a unit: its words and scales of rows g and g + 8. */
struct ds4_strip_lane {
    uint32_t a[4];
    float s[2];
};

/* Rows at any address. */
static __device__ __forceinline__ struct ds4_strip_lane
ds4_strip_any(const struct ds4_shared_span (&row)[2], int32_t unit)
{
    const int t = threadIdx.x % 4;
    struct ds4_strip_lane l;

#pragma unroll
    for (int r = 0; r < 2; r++) {
        l.a[r] = row[r].u32(34 * unit + 2 + 4 * t);
        l.a[r + 2] = row[r].u32(34 * unit + 18 + 4 * t);
        l.s[r] =
            ds4_f16_of(*(const uint16_t *)((const uint8_t *)row[r].word + row[r].at + 34 * unit));
    }
    return l;
}

/* Rows on multiples of 16 bytes; `at` is the lane's row g, its unit's first byte.  The values of odd units lie on
 * words, those of even ones two bytes behind. */
template <bool ODD>
static __device__ __forceinline__ struct ds4_strip_lane ds4_strip_aligned(const uint8_t *at)
{
    const int t = threadIdx.x % 4;
    struct ds4_strip_lane l;

#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint8_t *const row = at + r * 8 * DS4_STRIP_PITCH;
        const uint32_t *const word = (const uint32_t *)(row + (ODD ? 2 : 0)) + t;

        l.s[r] = ds4_f16_of(*(const uint16_t *)row);
        l.a[r] = ODD ? word[0] : __funnelshift_r(word[0], word[1], 16);
        l.a[r + 2] = ODD ? word[4] : __funnelshift_r(word[4], word[5], 16);
    }
    return l;
}

/* acc += one unit of a strip. */
template <int N8, int DIGITS, int WARPS>
static __device__ __forceinline__ void ds4_strip_unit(const struct ds4_strip_lane &l, int32_t unit,
                                                      const uint8_t *slot, float (&acc)[N8][4])
{
    using shape = ds4_strip_shape<N8, DIGITS, WARPS>;
    const int t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
    const uint8_t *const values = slot + unit * shape::planes * shape::n * 16 + g * 16 + 4 * t;
    const uint8_t *const scales = slot + shape::x_values + unit * shape::n * 4 + 8 * t;
    /* C: an int32 below 2^22 in the mantissa of a float needs no conversion. */
    constexpr int c = DIGITS == 1 ? 0x4b400000 : 0;

#pragma unroll
    for (int j = 0; j < N8; j++) {
        const float2 scale = *(const float2 *)(scales + 32 * j);
        int d[DIGITS][4];

#pragma unroll
        for (int k = 0; k < DIGITS; k++) {
            const uint32_t b0 = *(const uint32_t *)(values + (2 * k * shape::n + 8 * j) * 16);
            const uint32_t b1 = *(const uint32_t *)(values + ((2 * k + 1) * shape::n + 8 * j) * 16);

            ds4_mma_s8(d[k], l.a, b0, b1, c);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float v = l.s[i / 2] * ds4_strip_sum<DIGITS>(d, i);

            acc[j][i] += (i % 2 == 0 ? scale.x : scale.y) * v;
        }
    }
}

/* acc += this warp's units of a staged chunk with `left` units.  A whole one has no branches, so that its units are
 * under way together. */
template <int N8, int DIGITS, int WARPS, bool ALIGNED, bool ODD>
static __device__ __forceinline__ void
ds4_strip_chunk(const uint8_t *stage, const uint32_t (&lead)[2], int32_t left, const uint8_t *slot,
                float (&acc)[32 / WARPS][N8][4])
{
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    const uint8_t *const low = stage + g * DS4_STRIP_PITCH;
    const struct ds4_shared_span row[2] = {
        {(const uint32_t *)low, lead[0], NULL},
        {(const uint32_t *)(low + 8 * DS4_STRIP_PITCH), lead[1], NULL}};

    if (ALIGNED && left >= DS4_STRIP_UNITS) {
#pragma unroll
        for (int k = 0; k < 32 / WARPS; k++)
            ds4_strip_unit<N8, DIGITS, WARPS>(
                ds4_strip_aligned<ODD>(low + 34 * warp + 34 * WARPS * k), warp + WARPS * k, slot,
                acc[k]);
        return;
    }
#pragma unroll
    for (int k = 0; k < 32 / WARPS; k++) {
        if (warp + k * WARPS < left)
            ds4_strip_unit<N8, DIGITS, WARPS>(ds4_strip_any(row, warp + k * WARPS),
                                              warp + k * WARPS, slot, acc[k]);
    }
}

/* The partial sums of a strip become y; the whole block. */
template <int N8, int DIGITS, int WARPS>
static __device__ __forceinline__ void ds4_strip_write(const struct ds4_product &p, int32_t n_row,
                                                       int32_t row0, float *y, int64_t y_stride,
                                                       float (&acc)[32 / WARPS][N8][4], float *part)
{
    using shape = ds4_strip_shape<N8, DIGITS, WARPS>;
    constexpr int pitch = shape::n + 1;
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;

#pragma unroll
    for (int half = shape::classes / 2; half >= 1; half /= 2) {
#pragma unroll
        for (int k = 0; k < half; k++) {
#pragma unroll
            for (int i = 0; i < 4 * N8; i++)
                acc[k][i / 4][i % 4] += acc[k + half][i / 4][i % 4];
        }
    }
#pragma unroll
    for (int i = 0; i < 4 * N8; i++)
        part[(warp * DS4_STRIP_ROWS + g + i % 4 / 2 * 8) * pitch + i / 4 * 8 + 2 * t + i % 2] =
            acc[0][i / 4][i % 4];
    __syncthreads();
    for (int o = threadIdx.x; o < DS4_STRIP_ROWS * shape::n; o += 32 * WARPS) {
        const int row = o % DS4_STRIP_ROWS, n = o / DS4_STRIP_ROWS;
        float v[WARPS];

#pragma unroll
        for (int k = 0; k < WARPS; k++)
            v[k] = part[(k * DS4_STRIP_ROWS + row) * pitch + n];
#pragma unroll
        for (int level = 1; level <= 4; level++) {
            const int half = WARPS >> level;

#pragma unroll
            for (int k = 0; k < WARPS / 2; k++) {
                if (k < half)
                    v[k] += v[k + half];
            }
        }
        if (row0 + row < n_row && n < p.n)
            y[n * y_stride + row0 + row] = v[0];
    }
}

/* Block (x: strips, y: part, z: matrix); n_slot: room for chunks of the inputs, all of them or STAGES. */
template <int N8, int DIGITS, int WARPS, int STAGES, bool ALIGNED>
static __global__ void __launch_bounds__(32 * WARPS)
    ds4_strip_kernel(const __grid_constant__ struct ds4_product p, int32_t n_slot)
{
    using shape = ds4_strip_shape<N8, DIGITS, WARPS>;
    extern __shared__ uint4 ds4_strip_room[];
    uint8_t *const stages = (uint8_t *)ds4_strip_room;
    uint8_t *const slots = stages + STAGES * shape::w_bytes;
    float *const part = (float *)(slots + n_slot * shape::x_bytes);
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    const uint8_t *const w = p.w[blockIdx.z] + (size_t)blockIdx.y * p.part_bytes;
    const int32_t n_row = ds4_product_rows(p, blockIdx.z), n_strip = (n_row + 15) / 16;
    const int32_t n_unit = p.n_col / DS4_UNIT, unit0 = (int32_t)blockIdx.y * p.x.part;
    const int32_t n_chunk = (n_unit + DS4_STRIP_UNITS - 1) / DS4_STRIP_UNITS;
    const bool keep = n_slot == n_chunk;
    int32_t ahead = blockIdx.x, ahead_c = 0;
    int now = 0, next = STAGES - 1;
    const uint8_t *x;

    ds4_release_next();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (ahead < n_strip)
            ds4_strip_fetch<WARPS, ALIGNED>(w, p.row_bytes, n_row, n_unit, ahead, ahead_c,
                                            stages + s * shape::w_bytes);
        ds4_async_commit();
        ahead += ahead_c + 1 == n_chunk ? gridDim.x : 0;
        ahead_c = ahead_c + 1 == n_chunk ? 0 : ahead_c + 1;
    }
    ds4_wait_previous(); /* the weights are on their way, the inputs may not be there yet */
    x = ds4_after(p.x.data);
    for (int32_t c = 0; c < (keep ? n_chunk : STAGES - 1); c++)
        ds4_strip_inputs<N8, DIGITS, WARPS>(p, x, p.x.part * p.n_part, unit0, n_unit, c,
                                            slots + c * shape::x_bytes);
    ds4_async_commit();
    ds4_async_wait<0>();
    for (int32_t strip = blockIdx.x; strip < n_strip; strip += gridDim.x) {
        float acc[shape::classes][N8][4] = {};
        uint32_t lead[2] = {0, 0}; /* rows behind a multiple of 16 bytes */

#pragma unroll
        for (int r = 0; r < 2 && !ALIGNED; r++)
            lead[r] = (uint32_t)((uintptr_t)(w + (size_t)min(strip * DS4_STRIP_ROWS + g + 8 * r,
                                                             n_row - 1) *
                                                     p.row_bytes) &
                                 15);
        for (int32_t c = 0; c < n_chunk; c++) {
            uint8_t *const stage = stages + now * shape::w_bytes;
            const uint8_t *const slot = slots + (keep ? c : now) * shape::x_bytes;

            ds4_async_wait<STAGES - 2>();
            __syncthreads(); /* everyone's copies are there, and everyone has left stage `next` */
            if (ahead < n_strip) {
                ds4_strip_fetch<WARPS, ALIGNED>(w, p.row_bytes, n_row, n_unit, ahead, ahead_c,
                                                stages + next * shape::w_bytes);
                if (!keep)
                    ds4_strip_inputs<N8, DIGITS, WARPS>(p, x, p.x.part * p.n_part, unit0, n_unit,
                                                        ahead_c, slots + next * shape::x_bytes);
                ahead += ahead_c + 1 == n_chunk ? gridDim.x : 0;
                ahead_c = ahead_c + 1 == n_chunk ? 0 : ahead_c + 1;
            }
            ds4_async_commit();
            if (warp % 2 == 1)
                ds4_strip_chunk<N8, DIGITS, WARPS, ALIGNED, true>(
                    stage, lead, n_unit - c * DS4_STRIP_UNITS, slot, acc);
            else
                ds4_strip_chunk<N8, DIGITS, WARPS, ALIGNED, false>(
                    stage, lead, n_unit - c * DS4_STRIP_UNITS, slot, acc);
            now = now + 1 == STAGES ? 0 : now + 1;
            next = next + 1 == STAGES ? 0 : next + 1;
        }
        ds4_strip_write<N8, DIGITS, WARPS>(p, n_row, strip * DS4_STRIP_ROWS,
                                           p.y[blockIdx.z] + (int64_t)blockIdx.y * p.n_row,
                                           ds4_product_stride(p, blockIdx.z), acc, part);
    }
    ds4_async_wait<0>();
}

/* ---- launch ---------------------------------------------------------------------------------------- */

/* Whether weights lie on even addresses, as f16 scales should. */
static inline bool ds4_strip_fit(const struct ds4_product *p)
{
    uintptr_t at = p->row_bytes | p->part_bytes;

    for (int z = 0; z < p->n_w; z++)
        at |= (uintptr_t)p->w[z];
    return p->group == NULL && at % 2 == 0;
}

/* Full waves of blocks, every block with the same number of strips.  The inputs stay in shared memory if that
 * leaves room for `want` blocks an SM or they cannot be streamed. */
template <int N8, int DIGITS, int WARPS, int STAGES, bool ALIGNED>
static void ds4_strip_launch_at(struct ds4_device *dev, const struct ds4_product *p, int want)
{
    using shape = ds4_strip_shape<N8, DIGITS, WARPS>;
    const auto kernel = ds4_strip_kernel<N8, DIGITS, WARPS, STAGES, ALIGNED>;
    const int n_chunk = ds4_div_up(p->n_col / DS4_UNIT, DS4_STRIP_UNITS);
    const int n_strip = ds4_div_up(p->n_row > p->n_row2 ? p->n_row : p->n_row2, DS4_STRIP_ROWS);
    const int others = p->n_part * p->n_w;
    const int fixed = STAGES * shape::w_bytes + shape::part_bytes;
    int limit = 0, per_sm = 0, n_slot = n_chunk, each;

    DS4_CUDA(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, dev->ordinal));
    if (n_chunk > STAGES && fixed + n_chunk * shape::x_bytes + 1024 > (limit + 1024) / want)
        n_slot = STAGES;
    const int bytes = fixed + n_slot * shape::x_bytes;

    DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    DS4_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, 32 * WARPS, bytes));
    per_sm = per_sm < 1 ? 1 : per_sm;
    each = ds4_div_up(n_strip, ds4_div_up(per_sm * dev->n_sm, others));
    DS4_CHAIN(kernel, dim3(ds4_div_up(n_strip, each), p->n_part, p->n_w), 32 * WARPS, bytes, dev,
              *p, n_slot);
}

template <int N8, int DIGITS, int WARPS, int STAGES>
static void ds4_strip_launch(struct ds4_device *dev, const struct ds4_product *p, int want)
{
    uintptr_t at = p->row_bytes | p->part_bytes;

    for (int z = 0; z < p->n_w; z++)
        at |= (uintptr_t)p->w[z];
    if (at % 16 == 0)
        ds4_strip_launch_at<N8, DIGITS, WARPS, STAGES, true>(dev, p, want);
    else
        ds4_strip_launch_at<N8, DIGITS, WARPS, STAGES, false>(dev, p, want);
}

/* Rows in tiles of eight or sixteen. */
template <int DIGITS> static void ds4_strip_run(struct ds4_device *dev, const struct ds4_product *p)
{
    constexpr int most = DIGITS == 1 ? 16 : 8;

    for (int32_t i = 0; i < p->n; i += most) {
        struct ds4_product q = *p;

        q.n = p->n - i < most ? p->n - i : most;
        q.x.data += i * p->x.row_bytes;
        q.y[0] += i * p->y_stride;
        q.y[1] += i * (p->y_stride2 != 0 ? p->y_stride2 : p->y_stride);
        /* Sixteen warps where inputs leave room for one block an SM only (measured on an H200). */
        if (q.n > 8 && p->n_col <= 1024)
            ds4_strip_launch<most / 8, DIGITS, 8, 3>(dev, &q, 1);
        else if (q.n > 8)
            ds4_strip_launch<most / 8, DIGITS, 16, 3>(dev, &q, 1);
        else if (DIGITS == 1 && p->n_col <= 4096)
            ds4_strip_launch<1, DIGITS, 8, 3>(dev, &q, 2);
        else
            ds4_strip_launch<1, DIGITS, 16, 3>(dev, &q, 1);
    }
}

#endif

/* Few rows against stored weights: y = W x, weights read once per tile of inputs.
 *
 * A warp streams its rows in chunks of about 1 KiB through a ring of stages in shared memory (cp.async,
 * 16 bytes a lane, whatever the row's alignment), so the bytes in flight do not depend on registers:
 * 32 warps x 3 to 5 chunks are 100 KiB and more an SM, four times what the memory's latency asks for.  No barrier but
 * the warp's own.  INT8: a lane owns whole units of 32 values, decodes them once and meets every input
 * with dp4a.  EXACT: a lane owns four values of a unit, so that f32 inputs are read 16 bytes a lane
 * without conflicts.
 * Bytes: the weights, once; inputs come from L1.  Bound: copy bandwidth (INT8 up to four inputs).
 * Sums: each lane in rising order, lanes as one fixed tree; equal for every number of inputs. */
#ifndef DS4_KERNELS_CUDA_GEMV_CUH
#define DS4_KERNELS_CUDA_GEMV_CUH

#include "kernels/cuda/async.cuh"
#include "kernels/cuda/product.cuh"
#include "kernels/cuda/unit.cuh"

#define DS4_GEMV_WARPS  4
#define DS4_GEMV_BLOCKS 8 /* on an SM */

/* Units a lane holds in one chunk, so that a chunk has about 1 KiB. */
__host__ __device__ constexpr int ds4_gemv_units(int dtype)
{
    return dtype == DS4_DTYPE_IQ2_XXS ? 4
           : dtype == DS4_DTYPE_Q2_K || dtype == DS4_DTYPE_Q3_K || dtype == DS4_DTYPE_Q4_K ||
                   dtype == DS4_DTYPE_MXFP4 || dtype == DS4_DTYPE_Q4_0
               ? 2
               : 1;
}

template <int D, int R> struct ds4_gemv_shape {
    static constexpr int units = ds4_gemv_units(D); /* of a lane */
    static constexpr int chunk_units = 32 * units;
    static constexpr int chunk_bytes =
        chunk_units * DS4_UNIT / ds4_block_elems(D) * ds4_block_bytes(D);
    static constexpr int room = (chunk_bytes + 15) / 16 * 16 + 32; /* any start, a word to spare */
    /* 44 KiB over four warps, half of that beside the selectors. */
    static constexpr int fit = (D == DS4_DTYPE_IQ2_XXS ? 5632 : 11264) / (R * room);
    /* Q8_0: what eight blocks an SM have room for, which was fastest of 2 to 10 on an H200. */
    static constexpr int most = D != DS4_DTYPE_Q8_0 ? 4 : R == 1 ? 6 : 3;
    static constexpr int stages = fit > most ? most : fit < 2 ? 2 : fit;
};

template <int D, int R> struct ds4_gemv_ring {
    uint4 room[DS4_GEMV_WARPS][ds4_gemv_shape<D, R>::stages][R][ds4_gemv_shape<D, R>::room / 16];
};

/* Sums of v[0..P) over the warp.  Lane l returns the sum of v[l / (32 / P)]; the tree of additions is
 * the butterfly's for every P. */
template <int P> static __device__ __forceinline__ float ds4_warp_sums(float (&v)[P])
{
#pragma unroll
    for (int offset = 16; offset >= 1; offset /= 2) {
        const int half = P * offset / 32; /* values that stay with a lane; 0: one is left */

        if (half == 0) {
            v[0] += __shfl_xor_sync(0xffffffffu, v[0], offset);
            continue;
        }
        const bool upper = (threadIdx.x & offset) != 0;

#pragma unroll
        for (int i = 0; i < half; i++) {
            float keep = upper ? v[i + half] : v[i], give = upper ? v[i] : v[i + half];

            v[i] = keep + __shfl_xor_sync(0xffffffffu, give, offset);
        }
    }
    return v[0];
}

/* One warp's part of a product: rows row0, row0 + row_step, ... (in tiles of R) of one matrix times N
 * packed rows. */
struct ds4_gemv_work {
    const uint8_t *w;
    size_t row_bytes;
    int32_t n_row;
    int32_t n_col;
    int32_t tile0;
    int32_t tile_step;
    int32_t part; /* of the inputs: values or units to skip */
};

/* Starts the copy of chunk c of the R rows of a tile into one stage. */
template <int D, int R>
static __device__ __forceinline__ void
ds4_gemv_fetch(const struct ds4_gemv_work &k, int32_t tile, int32_t c,
               uint4 (*stage)[ds4_gemv_shape<D, R>::room / 16])
{
    using shape = ds4_gemv_shape<D, R>;
    const int lane = threadIdx.x % 32;
    const size_t skip = (size_t)c * shape::chunk_bytes;
    const size_t row_end = (size_t)(k.n_col / ds4_block_elems(D)) * ds4_block_bytes(D);
    const int bytes =
        row_end - skip < shape::chunk_bytes ? (int)(row_end - skip) : shape::chunk_bytes;

#pragma unroll
    for (int r = 0; r < R; r++) {
        const int32_t row = min(tile * R + r, k.n_row - 1);
        const uint8_t *p = k.w + (size_t)row * k.row_bytes + skip;
        const int lead = (int)((uintptr_t)p & 15), total = lead + bytes;

        p -= lead;
        for (int at = 16 * lane; at < total; at += 16 * 32)
            ds4_async_copy((uint8_t *)stage[r] + at, p + at, min(16, total - at));
    }
}

/* The span of row r's chunk in a stage. */
template <int D, int R>
static __device__ __forceinline__ struct ds4_shared_span
ds4_gemv_span(const struct ds4_gemv_work &k, int32_t tile, int32_t c, int r, const uint4 *stage,
              const struct ds4_iq2_room *room)
{
    const int32_t row = min(tile * R + r, k.n_row - 1);
    const uintptr_t p =
        (uintptr_t)k.w + (size_t)row * k.row_bytes + (size_t)c * ds4_gemv_shape<D, R>::chunk_bytes;
    struct ds4_shared_span s = {(const uint32_t *)stage, (uint32_t)(p & 15), room};

    return s;
}

/* acc += one unit of R rows times N int8 inputs. */
template <int D, int N, int R, int A>
static __device__ __forceinline__ void
ds4_gemv_int8_unit(const struct ds4_shared_span (&span)[R], int local, int32_t unit, int32_t n_unit,
                   const uint8_t *const (&x)[A], float (&acc)[R][A])
{
    constexpr int halves = ds4_has_halves(D) ? 2 : 1;
    uint32_t q[R][8];
    float s[R][halves], m[R][halves];

#pragma unroll
    for (int r = 0; r < R; r++) {
        ds4_unit_words<D>(span[r], local, q[r]);
#pragma unroll
        for (int h = 0; h < halves; h++)
            ds4_unit_scale<D>(span[r], local, h, &s[r][h], &m[r][h]);
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        const uint4 a = ds4_load16((const uint4 *)x[n] + unit);
        const uint4 b = ds4_load16((const uint4 *)x[n] + n_unit + unit);
        const uint2 meta = ds4_load8((const uint2 *)((const uint4 *)x[n] + 2 * n_unit) + unit);
        const float d = __uint_as_float(meta.x);

#pragma unroll
        for (int r = 0; r < R; r++) {
            int low = 0, high;
            float v;

            low = __dp4a((int)q[r][0], (int)a.x, low);
            low = __dp4a((int)q[r][1], (int)a.y, low);
            low = __dp4a((int)q[r][2], (int)a.z, low);
            low = __dp4a((int)q[r][3], (int)a.w, low);
            high = halves == 2 ? 0 : low;
            high = __dp4a((int)q[r][4], (int)b.x, high);
            high = __dp4a((int)q[r][5], (int)b.y, high);
            high = __dp4a((int)q[r][6], (int)b.z, high);
            high = __dp4a((int)q[r][7], (int)b.w, high);
            v = s[r][halves - 1] * (float)high;
            if (halves == 2)
                v += s[r][0] * (float)low;
            if (ds4_has_min(D)) {
                const int first = (int16_t)(meta.y & 0xffff), second = (int)meta.y >> 16;

                v -= halves == 2 ? m[r][0] * (float)first + m[r][halves - 1] * (float)second
                                 : m[r][0] * (float)(first + second);
            }
            acc[r][n] += d * v;
        }
    }
}

/* acc += a chunk of R rows times N int8 inputs.  `first` is the chunk's first unit. */
template <int D, int N, int R, int A>
static __device__ __forceinline__ void
ds4_gemv_int8(const struct ds4_gemv_work &k, const struct ds4_shared_span (&span)[R], int32_t first,
              int32_t n_unit_all, const uint8_t *const (&x)[A], float (&acc)[R][A])
{
    const int lane = threadIdx.x % 32;
    const int32_t n_unit = k.n_col / DS4_UNIT;

#pragma unroll 2 /* four units of IQ2_XXS at once would cost half of the warps */
    for (int i = 0; i < ds4_gemv_shape<D, R>::units; i++) {
        const int local = 32 * i + lane;

        if (first + local < n_unit)
            ds4_gemv_int8_unit<D, N, R, A>(span, local, k.part + first + local, n_unit_all, x, acc);
    }
}

/* acc += four values of R rows times N f32 inputs. */
template <int N, int R>
static __device__ __forceinline__ void ds4_gemv_quad(const float4 (&w)[R], const uint4 (&x)[N],
                                                     float (&acc)[R][N])
{
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            acc[r][n] = fmaf(w[r].x, __uint_as_float(x[n].x), acc[r][n]);
            acc[r][n] = fmaf(w[r].y, __uint_as_float(x[n].y), acc[r][n]);
            acc[r][n] = fmaf(w[r].z, __uint_as_float(x[n].z), acc[r][n]);
            acc[r][n] = fmaf(w[r].w, __uint_as_float(x[n].w), acc[r][n]);
        }
    }
}

/* acc += a chunk of R rows times N f32 inputs.  A whole chunk has no branches, so that its loads of the
 * inputs are under way together. */
template <int D, int N, int R>
static __device__ __forceinline__ void
ds4_gemv_exact(const struct ds4_gemv_work &k, const struct ds4_shared_span (&span)[R],
               int32_t first, const uint8_t *const (&x)[N], float (&acc)[R][N])
{
    constexpr int quads = 8 * ds4_gemv_shape<D, R>::units, batch = N > 4 ? 2 : N > 1 ? 4 : 8;
    const int lane = threadIdx.x % 32, j = lane % 8;

    if (DS4_UNIT * (first + ds4_gemv_shape<D, R>::chunk_units) <= k.n_col) {
#pragma unroll 1
        for (int i0 = 0; i0 < quads; i0 += batch) {
            uint4 v[batch][N];

#pragma unroll
            for (int i = 0; i < batch; i++) {
                const int local = 4 * (i0 + i) + lane / 8;

#pragma unroll
                for (int n = 0; n < N; n++)
                    v[i][n] = ds4_load16((const float *)x[n] + k.part + DS4_UNIT * (first + local) +
                                         4 * j);
            }
#pragma unroll
            for (int i = 0; i < batch; i++) {
                float4 w[R];

#pragma unroll
                for (int r = 0; r < R; r++)
                    w[r] = ds4_unit_quad<D>(span[r], 4 * (i0 + i) + lane / 8, j);
                ds4_gemv_quad<N, R>(w, v[i], acc);
            }
        }
        return;
    }
    for (int i = 0; i < quads; i++) {
        const int local = 4 * i + lane / 8;
        const int32_t value = DS4_UNIT * (first + local) + 4 * j;
        uint4 v[N];
        float4 w[R];

        if (value >= k.n_col)
            continue;
#pragma unroll
        for (int n = 0; n < N; n++)
            v[n] = ds4_load16((const float *)x[n] + k.part + value);
#pragma unroll
        for (int r = 0; r < R; r++)
            w[r] = ds4_is_scalar(D) ? ds4_unit_quad_end<D>(span[r], local, j, k.n_col - value)
                                    : ds4_unit_quad<D>(span[r], local, j);
        ds4_gemv_quad<N, R>(w, v, acc);
    }
}

__host__ __device__ constexpr int ds4_gemv_pow2(int n)
{
    return n <= 1 ? 1 : n <= 2 ? 2 : n <= 4 ? 4 : 8;
}

/* N inputs (the last `n_real` .. N - 1 are repeats and not written) times this warp's rows. */
template <int D, bool INT8, int N, int R>
static __device__ __forceinline__ void
ds4_gemv_rows(const struct ds4_gemv_work &k, const uint8_t *const (&inputs)[N], int32_t n_unit_all,
              float *y, int64_t y_stride, int32_t n_real,
              uint4 (*ring)[R][ds4_gemv_shape<D, R>::room / 16], const struct ds4_iq2_room *room)
{
    using shape = ds4_gemv_shape<D, R>;
    constexpr int P = ds4_gemv_pow2(N);
    const int lane = threadIdx.x % 32;
    const int32_t n_tile = (k.n_row + R - 1) / R;
    const int32_t n_unit = (k.n_col + DS4_UNIT - 1) / DS4_UNIT;
    const int32_t n_chunk = (n_unit + shape::chunk_units - 1) / shape::chunk_units;
    int32_t tile = k.tile0, c = 0, next_tile = k.tile0, next_c = 0;
    int now = 0, next = 0;
    float acc[R][N] = {};
    const uint8_t *x[N];

    __syncwarp(); /* another call may still read this warp's ring */
#pragma unroll
    for (int s = 0; s < shape::stages - 1; s++) {
        if (next_tile < n_tile) {
            ds4_gemv_fetch<D, R>(k, next_tile, next_c, ring[next]);
            if (++next_c == n_chunk) {
                next_c = 0;
                next_tile += k.tile_step;
            }
        }
        next++;
        ds4_async_commit();
    }
    ds4_wait_previous(); /* the weights are on their way, the inputs may not be there yet */
#pragma unroll
    for (int n = 0; n < N; n++)
        x[n] = ds4_after(inputs[n]);
    while (tile < n_tile) {
        struct ds4_shared_span span[R];

        if (next_tile < n_tile) {
            ds4_gemv_fetch<D, R>(k, next_tile, next_c, ring[next]);
            if (++next_c == n_chunk) {
                next_c = 0;
                next_tile += k.tile_step;
            }
        }
        next = next + 1 == shape::stages ? 0 : next + 1;
        ds4_async_commit();
        ds4_async_wait<shape::stages - 1>();
        __syncwarp();
#pragma unroll
        for (int r = 0; r < R; r++)
            span[r] = ds4_gemv_span<D, R>(k, tile, c, r, ring[now][r], room);
        if constexpr (INT8)
            ds4_gemv_int8<D, N, R, N>(k, span, c * shape::chunk_units, n_unit_all, x, acc);
        else
            ds4_gemv_exact<D, N, R>(k, span, c * shape::chunk_units, x, acc);
        __syncwarp(); /* before the stage is filled again */
        now = now + 1 == shape::stages ? 0 : now + 1;
        if (++c < n_chunk)
            continue;
#pragma unroll
        for (int r = 0; r < R; r++) {
            float v[P], sum;
            const int n = lane / (32 / P);

#pragma unroll
            for (int i = 0; i < P; i++)
                v[i] = i < N ? acc[r][i] : 0.0f;
            sum = ds4_warp_sums<P>(v);
            if (lane % (32 / P) == 0 && n < n_real && tile * R + r < k.n_row)
                y[n * y_stride + tile * R + r] = sum;
#pragma unroll
            for (int i = 0; i < N; i++)
                acc[r][i] = 0.0f;
        }
        c = 0;
        tile += k.tile_step;
    }
    ds4_async_wait<0>();
}

/* The room filled; the whole block. */
template <class ROOM>
static __device__ __forceinline__ const struct ds4_iq2_room *ds4_gemv_room(ROOM *room)
{
    const struct ds4_iq2_room *const filled = ds4_unit_fill(room);

    if (filled != NULL)
        __syncthreads();
    return filled;
}

template <int D, int R>
static __device__ __forceinline__ struct ds4_gemv_work
ds4_gemv_work_of(const struct ds4_product &p, int32_t part, int32_t x_part)
{
    struct ds4_gemv_work k;

    k.w = p.w[blockIdx.z] + (size_t)part * p.part_bytes;
    k.row_bytes = p.row_bytes;
    k.n_row = ds4_product_rows(p, blockIdx.z);
    k.n_col = p.n_col;
    k.tile0 = blockIdx.x * DS4_GEMV_WARPS + threadIdx.x / 32;
    k.tile_step = gridDim.x * DS4_GEMV_WARPS;
    k.part = x_part;
    return k;
}

/* Dense: exactly N inputs.  Block (x: rows, y: part, z: matrix). */
template <int D, bool INT8, int N, int R>
static __global__ void __launch_bounds__(32 * DS4_GEMV_WARPS,
                                         INT8 &&N == 1 && R == 2 ? DS4_GEMV_BLOCKS : 1)
    ds4_gemv_dense(const __grid_constant__ struct ds4_product p)
{
    __shared__ struct ds4_gemv_ring<D, R> ring;
    __shared__ typename ds4_unit_room<D>::type unit_room;
    const struct ds4_iq2_room *const room = ds4_gemv_room(&unit_room);
    const struct ds4_gemv_work k =
        ds4_gemv_work_of<D, R>(p, blockIdx.y, (int32_t)blockIdx.y * p.x.part);
    const uint8_t *x[N];

    ds4_release_next();
#pragma unroll
    for (int n = 0; n < N; n++)
        x[n] = p.x.data + min(n, p.n - 1) * p.x.row_bytes;
    ds4_gemv_rows<D, INT8, N, R>(k, x, p.x.part * p.n_part, p.y[blockIdx.z] + blockIdx.y * p.n_row,
                                 ds4_product_stride(p, blockIdx.z), p.n,
                                 ring.room[threadIdx.x / 32], room);
}

/* N slots of an expert from `slot` on. */
template <int D, bool INT8, int N>
static __device__ __forceinline__ void
ds4_gemv_slots(const struct ds4_product &p, const struct ds4_gemv_work &k, int32_t slot, int32_t n,
               uint4 (*ring)[1][ds4_gemv_shape<D, 1>::room / 16], const struct ds4_iq2_room *room)
{
    const uint8_t *x[N];

#pragma unroll
    for (int i = 0; i < N; i++) {
        const int32_t s = slot + min(i, n - 1);

        x[i] = p.x.data + (p.src != NULL ? p.src[s] : s) * p.x.row_bytes;
    }
    ds4_gemv_rows<D, INT8, N, 1>(k, x, p.x.part, p.y[blockIdx.z] + slot * p.y_stride, p.y_stride, n,
                                 ring, room);
}

/* Experts: block (x: rows, y: group, z: matrix); a group's slots in tiles of four. */
template <int D, bool INT8>
static __global__ void __launch_bounds__(32 * DS4_GEMV_WARPS, 5)
    ds4_gemv_experts(const __grid_constant__ struct ds4_product p)
{
    ds4_take_turn();
    __shared__ struct ds4_gemv_ring<D, 1> ring;
    __shared__ typename ds4_unit_room<D>::type unit_room;
    const struct ds4_dev_group group = p.group[blockIdx.y];
    const struct ds4_iq2_room *room;
    struct ds4_gemv_work k;

    if (group.n == 0)
        return;
    room = ds4_gemv_room(&unit_room);
    k = ds4_gemv_work_of<D, 1>(p, group.expert, 0);
    for (int32_t i = 0; i < group.n; i += 4) {
        const int32_t n = min(4, group.n - i), slot = group.first + i;

        if (n == 1)
            ds4_gemv_slots<D, INT8, 1>(p, k, slot, n, ring.room[threadIdx.x / 32], room);
        else if (n == 2)
            ds4_gemv_slots<D, INT8, 2>(p, k, slot, n, ring.room[threadIdx.x / 32], room);
        else
            ds4_gemv_slots<D, INT8, 4>(p, k, slot, n, ring.room[threadIdx.x / 32], room);
    }
}

/* ---- launch ---------------------------------------------------------------------------------------- */

/* Blocks along x: about one full wave (`per_sm` blocks an SM) over all parts and matrices, every warp
 * with the same number of row tiles. */
static inline dim3 ds4_gemv_grid_of(const struct ds4_device *dev, const struct ds4_product *p,
                                    int rows, int per_sm)
{
    const int n_tile = ds4_div_up(p->n_row > p->n_row2 ? p->n_row : p->n_row2, rows);
    const int others = p->n_part * p->n_w, wanted = ds4_div_up(per_sm * dev->n_sm, others);
    const int each = ds4_div_up(n_tile, wanted * DS4_GEMV_WARPS);

    return dim3(ds4_div_up(n_tile, each * DS4_GEMV_WARPS), p->n_part, p->n_w);
}

template <int D, bool INT8, int N, int R>
static void ds4_gemv_launch(struct ds4_device *dev, const struct ds4_product *p)
{
    int per_sm =
        0; /* many inputs take registers: a second wave of few blocks would take as long as the first */

    DS4_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, (ds4_gemv_dense<D, INT8, N, R>),
                                                           32 * DS4_GEMV_WARPS, 0));
    per_sm = per_sm < 1 ? 1 : per_sm > DS4_GEMV_BLOCKS ? DS4_GEMV_BLOCKS : per_sm;
    DS4_CHAIN((ds4_gemv_dense<D, INT8, N, R>), ds4_gemv_grid_of(dev, p, R, per_sm),
              32 * DS4_GEMV_WARPS, 0, dev, *p);
}

/* One input: two rows of Q8_0 at once, which share the input's loads, where their pairs are enough for three
 * quarters of the warps. */
template <int D, bool INT8>
static void ds4_gemv_launch_one(struct ds4_device *dev, const struct ds4_product *p)
{
    const int64_t rows = (int64_t)p->n_row * p->n_part * p->n_w;

    if constexpr (D == DS4_DTYPE_Q8_0) {
        if (2 * rows >= (int64_t)3 * DS4_GEMV_BLOCKS * DS4_GEMV_WARPS * dev->n_sm) {
            ds4_gemv_launch<D, INT8, 1, 2>(dev, p);
            return;
        }
    }
    ds4_gemv_launch<D, INT8, 1, 1>(dev, p);
}

/* Any number of inputs: experts in one launch, dense inputs in tiles. */
template <int D, bool INT8>
static void ds4_gemv_run(struct ds4_device *dev, const struct ds4_product *p)
{
    constexpr int R = INT8 ? 2 : 1; /* rows a warp takes at once where inputs are many */

    if (p->group != NULL) {
        DS4_CHAIN((ds4_gemv_experts<D, INT8>), ds4_gemv_grid_of(dev, p, 1, DS4_GEMV_BLOCKS),
                  32 * DS4_GEMV_WARPS, 0, dev, *p);
        return;
    }
    constexpr int tile = INT8 && D == DS4_DTYPE_Q8_0 ? 1 : 8; /* more rows: strip.cuh */

    for (int32_t i = 0; i < p->n; i += tile) {
        struct ds4_product q = *p;

        q.n = p->n - i < tile ? p->n - i : tile;
        q.x.data += i * p->x.row_bytes;
        q.y[0] += i * p->y_stride;
        q.y[1] += i * (p->y_stride2 != 0 ? p->y_stride2 : p->y_stride);
        if constexpr (tile > 1) {
            if (q.n > 6) {
                ds4_gemv_launch<D, INT8, 8, R>(dev, &q);
                continue;
            }
            if (q.n > 4) {
                ds4_gemv_launch<D, INT8, 6, R>(dev, &q);
                continue;
            }
            if (q.n > 1) {
                ds4_gemv_launch<D, INT8, 4, 1>(dev, &q);
                continue;
            }
        }
        ds4_gemv_launch_one<D, INT8>(dev, &q);
    }
}

#endif

/* Many rows against stored weights on tensor cores: bf16 operands, f32 sums (mma.sync m16n8k16).
 *
 * A block of eight warps makes BM weight rows times 64 inputs.  Stored weights arrive by cp.async in chunks of 256
 * values a row, inputs two steps ahead; each step of K (8192 / BM values) every thread decodes one unit of
 * 32 weights to bf16, while another block's products run.  Weights are the mma's A (16 rows), inputs its B (8
 * columns), so few inputs cost little padding; shared rows are 16 bytes longer than a power of two,
 * which keeps ldmatrix and the stores free of bank conflicts.
 *   BM 128, BK  64: experts and large products, warps 4 x 2, 32 x 32 each
 *   BM  32, BK 256: few weight rows or inputs, warps 2 x 4, 16 x 16 each (four times the blocks)
 * Bytes: weights once per 64 inputs, as stored.  Bound: below about 100 inputs the weights' bytes, then
 * shared memory bandwidth (about half of the tensor rate of sm_80). */
#ifndef DS4_KERNELS_CUDA_TILE_CUH
#define DS4_KERNELS_CUDA_TILE_CUH

#include "kernels/cuda/async.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/product.cuh"
#include "kernels/cuda/unit.cuh"

#define DS4_TILE_THREADS 256
#define DS4_TILE_N       64

template <int BM> struct ds4_tile_shape {
    static constexpr int bk = 8192 / BM;
    static constexpr int pitch = bk + 8; /* bf16 values between shared rows */
    static constexpr int warps_m = BM / 32 > 2 ? 4 : 2;
    static constexpr int warps_n = 8 / warps_m;
    static constexpr int wm = BM / warps_m / 16;         /* m16 tiles of a warp */
    static constexpr int wn = DS4_TILE_N / warps_n / 16; /* n16 tiles of a warp */
    static constexpr int w_values = BM * pitch;          /* one stage of weights */
    static constexpr int x_values = DS4_TILE_N * pitch;  /* one of three stages of inputs */
    static constexpr int bytes = (w_values + 3 * x_values) * 2;
};

/* What a block works on. */
struct ds4_tile_work {
    const uint8_t *w; /* matrix of the part or expert */
    int32_t row0;
    int32_t slot0;
    int32_t n; /* inputs of this tile, 1..64 */
    int32_t part;
    float *y;
};

/* Stored weights of a tile on their way: DS4_TILE_CHUNK values of each row a stage.  A chunk is asked for
 * at least two steps before it is used. */
#define DS4_TILE_CHUNK 256
template <int BM> struct ds4_tile_ahead {
    static constexpr int chunks = ds4_tile_shape<BM>::bk < DS4_TILE_CHUNK ? 1 : 2;
    static constexpr int stages = chunks + 1;
};
template <int D> struct ds4_tile_raw {
    static constexpr int bytes =
        ds4_is_scalar(D) ? 0 : DS4_TILE_CHUNK / ds4_block_elems(D) * ds4_block_bytes(D);
    /* Any start, a word to spare; an odd number of 16 bytes spreads rows over the banks. */
    static constexpr int room = ds4_is_scalar(D) ? 0 : (bytes + 35) / 16 / 2 * 32 + 16;
};

/* Starts the copy of the rows' chunk at column k0, a multiple of DS4_TILE_CHUNK. */
template <int D, int BM>
static __device__ __forceinline__ void ds4_tile_fetch_raw(const struct ds4_product &p,
                                                          const struct ds4_tile_work &k, int32_t k0,
                                                          uint8_t *stage)
{
    using raw = ds4_tile_raw<D>;
    constexpr int pieces = raw::room / 16;
    const size_t skip = (size_t)(k0 / ds4_block_elems(D)) * ds4_block_bytes(D);
    const size_t end = (size_t)(p.n_col / ds4_block_elems(D)) * ds4_block_bytes(D);
    const int bytes = end - skip < (size_t)raw::bytes ? (int)(end - skip) : raw::bytes;

    for (int i = threadIdx.x; i < BM * pieces; i += DS4_TILE_THREADS) {
        const int r = i / pieces, at = i % pieces * 16;
        const int32_t row = min(k.row0 + r, p.n_row - 1);
        const uint8_t *from = k.w + (size_t)row * p.row_bytes + skip;
        const int lead = (int)((uintptr_t)from & 15), total = lead + bytes;

        if (at < total)
            ds4_async_copy(stage + r * raw::room + at, from - lead + at, min(16, total - at));
    }
}

/* This thread's unit of the weight tile at column k0, as bf16 pairs; `raw` holds the chunk around k0
 * (scalars are read from memory). */
template <int D, int BM>
static __device__ __forceinline__ void
ds4_tile_decode(const struct ds4_product &p, const struct ds4_tile_work &k, int32_t k0,
                const uint8_t *raw, const struct ds4_iq2_room *room, uint32_t (&pair)[16])
{
    constexpr int units = ds4_tile_shape<BM>::bk / DS4_UNIT;
    const int r = threadIdx.x / units;
    const int32_t row = min(k.row0 + r, p.n_row - 1);
    const int32_t unit = k0 / DS4_UNIT + (int32_t)threadIdx.x % units;
    const uint8_t *stored = k.w + (size_t)row * p.row_bytes;

    if constexpr (ds4_is_scalar(D)) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int32_t left = p.n_col - DS4_UNIT * unit - 4 * j;
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

            if (left > 0)
                v = ds4_unit_quad_end<D>(ds4_span_of(stored), unit, j, left);
            pair[2 * j] = ds4_bf16_pair(v.x, v.y);
            pair[2 * j + 1] = ds4_bf16_pair(v.z, v.w);
        }
    } else {
        const size_t skip = (size_t)(k0 / DS4_TILE_CHUNK) * ds4_tile_raw<D>::bytes;
        const struct ds4_shared_span span = {(const uint32_t *)(raw + r * ds4_tile_raw<D>::room),
                                             (uint32_t)((uintptr_t)(stored + skip) & 15), room};

        if (DS4_UNIT * unit < p.n_col) {
            ds4_unit_pairs<D>(span, unit % (DS4_TILE_CHUNK / DS4_UNIT), pair);
        } else {
#pragma unroll
            for (int i = 0; i < 16; i++)
                pair[i] = 0;
        }
    }
}

/* Stores the unit that ds4_tile_decode made. */
template <int BM>
static __device__ __forceinline__ void ds4_tile_store(__nv_bfloat16 *w, const uint32_t (&pair)[16])
{
    constexpr int units = ds4_tile_shape<BM>::bk / DS4_UNIT;
    uint4 *to = (uint4 *)(w + threadIdx.x / units * ds4_tile_shape<BM>::pitch +
                          threadIdx.x % units * DS4_UNIT);

#pragma unroll
    for (int i = 0; i < 4; i++)
        to[i] = make_uint4(pair[4 * i], pair[4 * i + 1], pair[4 * i + 2], pair[4 * i + 3]);
}

/* Starts the copy of columns k0 .. of the inputs; rows and columns that are not there become zero. */
template <int BM>
static __device__ __forceinline__ void ds4_tile_fetch(const struct ds4_product &p,
                                                      const struct ds4_tile_work &k, int32_t k0,
                                                      __nv_bfloat16 *x)
{
    constexpr int each = ds4_tile_shape<BM>::bk / 8; /* 16-byte pieces of a row */

#pragma unroll
    for (int i = 0; i < DS4_TILE_N * each / DS4_TILE_THREADS; i++) {
        const int piece = i * DS4_TILE_THREADS + threadIdx.x;
        const int n = piece / each, c = piece % each * 8;
        const bool there = n < k.n && k0 + c < p.x.part;
        const int32_t slot = k.slot0 + (n < k.n ? n : 0);
        const int32_t row = p.src != NULL ? p.src[slot] : slot;
        const __nv_bfloat16 *from = (const __nv_bfloat16 *)(p.x.data + row * p.x.row_bytes) +
                                    k.part * p.x.part + (there ? k0 + c : 0);

        ds4_async_copy(x + n * ds4_tile_shape<BM>::pitch + c, from, there ? 16 : 0);
    }
    ds4_async_commit();
}

/* acc += the staged tiles. */
template <int BM>
static __device__ __forceinline__ void
ds4_tile_multiply(const __nv_bfloat16 *w, const __nv_bfloat16 *x, int32_t n,
                  float (&acc)[ds4_tile_shape<BM>::wm][2 * ds4_tile_shape<BM>::wn][4])
{
    using shape = ds4_tile_shape<BM>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int m0 = warp % shape::warps_m * shape::wm * 16,
              n0 = warp / shape::warps_m * shape::wn * 16;
    /* ldmatrix: lanes 0-7, 8-15, 16-23, 24-31 name the rows of four 8 x 8 matrices. */
    const __nv_bfloat16 *a_row = w + (m0 + lane % 16) * shape::pitch + lane / 16 * 8;
    const __nv_bfloat16 *b_row =
        x + (n0 + lane % 8 + lane / 16 * 8) * shape::pitch + lane / 8 % 2 * 8;

    if (n0 >= n)
        return;
#pragma unroll 4
    for (int kk = 0; kk < shape::bk; kk += 16) {
        uint32_t a[shape::wm][4], b[shape::wn][4];

#pragma unroll
        for (int i = 0; i < shape::wm; i++)
            ds4_ldmatrix(a[i], a_row + i * 16 * shape::pitch + kk);
#pragma unroll
        for (int j = 0; j < shape::wn; j++)
            ds4_ldmatrix(b[j], b_row + j * 16 * shape::pitch + kk);
#pragma unroll
        for (int i = 0; i < shape::wm; i++) {
#pragma unroll
            for (int j = 0; j < shape::wn; j++) {
                ds4_mma(acc[i][2 * j], a[i], b[j][0], b[j][1]);
                ds4_mma(acc[i][2 * j + 1], a[i], b[j][2], b[j][3]);
            }
        }
    }
}

template <int BM>
static __device__ __forceinline__ void
ds4_tile_write(const struct ds4_product &p, const struct ds4_tile_work &k,
               const float (&acc)[ds4_tile_shape<BM>::wm][2 * ds4_tile_shape<BM>::wn][4])
{
    using shape = ds4_tile_shape<BM>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int m0 = warp % shape::warps_m * shape::wm * 16,
              n0 = warp / shape::warps_m * shape::wn * 16;

#pragma unroll
    for (int i = 0; i < shape::wm; i++) {
#pragma unroll
        for (int j = 0; j < 2 * shape::wn; j++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int32_t row = k.row0 + m0 + 16 * i + lane / 4 + c / 2 * 8;
                const int n = n0 + 8 * j + lane % 4 * 2 + c % 2;

                if (row < p.n_row && n < k.n)
                    k.y[(k.slot0 + n) * p.y_stride + row] = acc[i][j][c];
            }
        }
    }
}

/* One tile of BM rows times at most 64 inputs over all of K. */
template <int D, int BM>
static __device__ __forceinline__ void
ds4_tile_run(const struct ds4_product &p, const struct ds4_tile_work &k,
             const struct ds4_iq2_room *room, __nv_bfloat16 *space)
{
    using shape = ds4_tile_shape<BM>;
    __nv_bfloat16 *const w = space, *const x = space + shape::w_values;
    uint8_t *const raw = (uint8_t *)(x + 3 * shape::x_values);
    constexpr int stage = BM * ds4_tile_raw<D>::room;
    float acc[shape::wm][2 * shape::wn][4] = {};
    uint32_t pair[16];
    int now = 0;

    constexpr int ahead = ds4_tile_ahead<BM>::chunks, stages = ds4_tile_ahead<BM>::stages;

    /* Groups of copies: the inputs of one step each, and with a chunk's first step a chunk. */
    if constexpr (!ds4_is_scalar(D))
        ds4_tile_fetch_raw<D, BM>(p, k, 0, raw);
    ds4_tile_fetch<BM>(p, k, 0, x);
    if constexpr (!ds4_is_scalar(D) && ahead == 2) {
        if (DS4_TILE_CHUNK < p.n_col)
            ds4_tile_fetch_raw<D, BM>(p, k, DS4_TILE_CHUNK, raw + stage);
    }
    ds4_tile_fetch<BM>(p, k, shape::bk, x + shape::x_values);
    for (int32_t k0 = 0; k0 < p.n_col; k0 += shape::bk) {
        const int32_t chunk = k0 / DS4_TILE_CHUNK;

        ds4_async_wait<1>();
        __syncthreads(); /* everyone's copies are there, and w and the oldest inputs are free */
        if constexpr (!ds4_is_scalar(D)) {
            if (k0 % DS4_TILE_CHUNK == 0 && k0 + ahead * DS4_TILE_CHUNK < p.n_col)
                ds4_tile_fetch_raw<D, BM>(p, k, k0 + ahead * DS4_TILE_CHUNK,
                                          raw + (chunk + ahead) % stages * stage);
        }
        ds4_tile_fetch<BM>(p, k, k0 + 2 * shape::bk, x + (now + 2) % 3 * shape::x_values);
        ds4_tile_decode<D, BM>(p, k, k0, raw + chunk % stages * stage, room, pair);
        ds4_tile_store<BM>(w, pair);
        __syncthreads();
        ds4_tile_multiply<BM>(w, x + now * shape::x_values, k.n, acc);
        now = (now + 1) % 3;
    }
    ds4_async_wait<0>();
    ds4_tile_write<BM>(p, k, acc);
    __syncthreads(); /* before another tile of this block */
}

/* Dense: block (x: rows, y: part, z: inputs * n_w).  Experts: block (x: rows, y: group, z: matrix), a
 * group's inputs in tiles of 64. */
template <int D, int BM>
static __global__ void __launch_bounds__(DS4_TILE_THREADS, 2)
    ds4_tile_kernel(const __grid_constant__ struct ds4_product p)
{
    ds4_take_turn();
    extern __shared__ uint4 ds4_tile_room[];
    __shared__ typename ds4_unit_room<D>::type unit_room;
    __nv_bfloat16 *const space = (__nv_bfloat16 *)ds4_tile_room;
    const struct ds4_iq2_room *room;
    const int z = blockIdx.z % p.n_w;
    struct ds4_tile_work k = {p.w[z], (int32_t)blockIdx.x * BM, 0, 0, 0, p.y[z]};

    if (p.group != NULL && p.group[blockIdx.y].n == 0)
        return;
    room = ds4_unit_fill(&unit_room); /* the first barrier comes before the first use */
    if (p.group != NULL) {
        const struct ds4_dev_group group = p.group[blockIdx.y];

        k.w += (size_t)group.expert * p.part_bytes;
        for (int32_t i = 0; i < group.n; i += DS4_TILE_N) {
            k.slot0 = group.first + i;
            k.n = min(DS4_TILE_N, group.n - i);
            ds4_tile_run<D, BM>(p, k, room, space);
        }
        return;
    }
    k.w += (size_t)blockIdx.y * p.part_bytes;
    k.y += (size_t)blockIdx.y * p.n_row;
    k.part = blockIdx.y;
    k.slot0 = blockIdx.z / p.n_w * DS4_TILE_N;
    k.n = min(DS4_TILE_N, p.n - k.slot0);
    ds4_tile_run<D, BM>(p, k, room, space);
}

template <int D, int BM>
static void ds4_tile_launch(struct ds4_device *dev, const struct ds4_product *p)
{
    constexpr int bytes =
        ds4_tile_shape<BM>::bytes + ds4_tile_ahead<BM>::stages * BM * ds4_tile_raw<D>::room;
    const int z = p->group != NULL ? p->n_w : p->n_w * ds4_div_up(p->n, DS4_TILE_N);

    DS4_CUDA(cudaFuncSetAttribute(ds4_tile_kernel<D, BM>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    DS4_CHAIN((ds4_tile_kernel<D, BM>), dim3(ds4_div_up(p->n_row, BM), p->n_part, z),
              DS4_TILE_THREADS, bytes, dev, *p);
}

/* Tall tiles where they still give every SM work. */
template <int D> static void ds4_tile_dispatch(struct ds4_device *dev, const struct ds4_product *p)
{
    const int64_t inputs = p->group != NULL ? 1 : ds4_div_up(p->n, DS4_TILE_N);
    const int64_t blocks = (int64_t)ds4_div_up(p->n_row, 128) * p->n_part * p->n_w * inputs;

    if (blocks >= 2 * dev->n_sm)
        ds4_tile_launch<D, 128>(dev, p);
    else
        ds4_tile_launch<D, 32>(dev, p);
}

#endif

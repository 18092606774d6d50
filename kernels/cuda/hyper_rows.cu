/* Hyper-connections of many rows: write, mixes, Sinkhorn, read, bound by the streams' bytes.
 *
 * The mixes go over tensor cores and stay those of f32: streams are bf16, and a weight of F16 or BF16 is the
 * exact sum of two bf16 numbers.  A block holds the weights of a slice (128 columns of each of four
 * streams) in shared memory and takes 16 rows at a time; a warp has 32 columns of all four streams, so
 * that the write of the row before happens in registers on the way.  Lane t of a quad takes eight
 * neighbouring columns: the order of K is free as long as both operands agree.  Then a warp a row sums the
 * slices and does the 4 x 4 Sinkhorn by shuffles, and a block a row forms and norms u. */
#include "kernels/cuda/hyper_rows.cuh"

#include "kernels/cuda/mma.cuh"

#define STREAMS     4
#define MIXES       24 /* 4 pre, 4 post, 16 comb */
#define SUMS        (MIXES + 1)
#define COLUMNS     128 /* of a slice */
#define ROWS        16  /* of a turn */
#define MIX_THREADS 128 /* a warp for 32 columns */
#define MIX_WARPS   (MIX_THREADS / 32)
#define TILES       (MIXES / 8)

/* Shared memory of mix_rows_kernel. */
struct mix_room {
    uint4 fn[STREAMS][MIX_WARPS][TILES][2][32]; /* high and low halves, in fragment order */
    float sum[2][MIX_WARPS][ROWS][SUMS];        /* two turns */
};

static __device__ __forceinline__ float low_of(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}

static __device__ __forceinline__ float high_of(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}

/* Eight weights as two bf16 each. */
template <int D>
static __device__ __forceinline__ void split(const uint8_t *from, uint4 *high, uint4 *low)
{
    const uint4 v = __ldg((const uint4 *)from);
    const uint32_t in[4] = {v.x, v.y, v.z, v.w};
    uint32_t h[4], l[4];

#pragma unroll
    for (int i = 0; i < 4; i++) {
        float a = low_of(in[i]), b = high_of(in[i]);

        if (D == DS4_DTYPE_F16) {
            a = __half2float(__ushort_as_half((unsigned short)in[i]));
            b = __half2float(__ushort_as_half((unsigned short)(in[i] >> 16)));
        }
        h[i] = ds4_bf16_pair(a, b);
        l[i] = ds4_bf16_pair(a - low_of(h[i]), b - high_of(h[i]));
    }
    *high = make_uint4(h[0], h[1], h[2], h[3]);
    *low = make_uint4(l[0], l[1], l[2], l[3]);
}

template <int D>
static __device__ __forceinline__ void take_weights(const struct ds4_hyper_rows &a, int32_t first,
                                                    struct mix_room *room)
{
    for (int i = threadIdx.x; i < STREAMS * MIX_WARPS * TILES * 32; i += MIX_THREADS) {
        const int lane = i % 32, tile = i / 32 % TILES, w = i / (32 * TILES) % MIX_WARPS;
        const int k = i / (32 * TILES * MIX_WARPS);
        const int32_t column = first + 32 * w + lane % 4 * 8;

        split<D>(a.fn + (size_t)(8 * tile + lane / 4) * a.row_bytes +
                     2 * ((size_t)k * (size_t)a.d + (size_t)column),
                 &room->fn[k][w][tile][0][lane], &room->fn[k][w][tile][1][lane]);
    }
}

/* Eight columns of the four streams of row t, written first if the step says so; their square. */
static __device__ __forceinline__ float take_row(const struct ds4_hyper_rows &a, int32_t t,
                                                 int32_t column, bool there,
                                                 uint32_t (&v)[STREAMS][4])
{
    uint4 *const from = (uint4 *)((__nv_bfloat16 *)a.x.data + t * a.x.stride + column);
    const int32_t step = a.d / 8;
    float square = 0.0f;

#pragma unroll
    for (int k = 0; k < STREAMS; k++) {
        const uint4 q = from[k * step];

        v[k][0] = q.x, v[k][1] = q.y, v[k][2] = q.z, v[k][3] = q.w;
    }
    if (a.writes) {
        const float4 *const o = (const float4 *)((const float *)a.o.data + t * a.o.stride + column);
        const float4 lo = o[0], hi = o[1], p = *(const float4 *)(a.post + 4 * (int64_t)t);
        const float out[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
        const float post[STREAMS] = {p.x, p.y, p.z, p.w};
        float comb[STREAMS * STREAMS];

#pragma unroll
        for (int j = 0; j < STREAMS; j++) {
            const float4 c = ((const float4 *)(a.comb + 16 * (int64_t)t))[j];

            comb[4 * j] = c.x, comb[4 * j + 1] = c.y, comb[4 * j + 2] = c.z, comb[4 * j + 3] = c.w;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float old[2][STREAMS];

#pragma unroll
            for (int k = 0; k < STREAMS; k++)
                old[0][k] = low_of(v[k][i]), old[1][k] = high_of(v[k][i]);
#pragma unroll
            for (int k = 0; k < STREAMS; k++)
                v[k][i] =
                    ds4_bf16_pair(ds4_hyper_value(post, comb, STREAMS, k, out[2 * i], old[0]),
                                  ds4_hyper_value(post, comb, STREAMS, k, out[2 * i + 1], old[1]));
        }
        if (there) {
#pragma unroll
            for (int k = 0; k < STREAMS; k++)
                from[k * step] = make_uint4(v[k][0], v[k][1], v[k][2], v[k][3]);
        }
    }
#pragma unroll
    for (int k = 0; k < STREAMS; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            square += low_of(v[k][i]) * low_of(v[k][i]);
            square += high_of(v[k][i]) * high_of(v[k][i]);
        }
    }
    return square;
}

/* partial[t][slice][m] = sum over the slice of fn[m] * x, and of x^2 at m = 24.  Block (x: slice, y: rows). */
template <int D>
static __global__ void __launch_bounds__(MIX_THREADS)
    mix_rows_kernel(const __grid_constant__ struct ds4_hyper_rows a)
{
    extern __shared__ uint4 hyper_space[];
    struct mix_room *const room = (struct mix_room *)hyper_space;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t slice = blockIdx.x, n_slice = gridDim.x;
    const int32_t column = slice * COLUMNS + 32 * warp + lane % 4 * 8;
    int turn = 0;

    ds4_release_next();
    take_weights<D>(a, slice * COLUMNS, room);
    ds4_wait_previous();
    __syncthreads();
    for (int32_t i0 = blockIdx.y * ROWS; i0 < a.n_row; i0 += gridDim.y * ROWS, turn ^= 1) {
        float acc[TILES][4] = {}, square[2];
        uint32_t v[2][STREAMS][4];

#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int32_t t = i0 + lane / 4 + 8 * h;

            square[h] = take_row(a, min(t, a.n_row - 1), column, t < a.n_row, v[h]);
            square[h] += __shfl_xor_sync(0xffffffffu, square[h], 1);
            square[h] += __shfl_xor_sync(0xffffffffu, square[h], 2);
        }
#pragma unroll
        for (int k = 0; k < STREAMS; k++) {
            const uint32_t first[4] = {v[0][k][0], v[1][k][0], v[0][k][1], v[1][k][1]};
            const uint32_t second[4] = {v[0][k][2], v[1][k][2], v[0][k][3], v[1][k][3]};

#pragma unroll
            for (int i = 0; i < TILES; i++) {
#pragma unroll
                for (int part = 1; part >= 0; part--) {
                    const uint4 b = room->fn[k][warp][i][part][lane];

                    ds4_mma(acc[i], first, b.x, b.y);
                    ds4_mma(acc[i], second, b.z, b.w);
                }
            }
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            float *const sum = room->sum[turn][warp][lane / 4 + c / 2 * 8];

#pragma unroll
            for (int i = 0; i < TILES; i++)
                sum[8 * i + lane % 4 * 2 + c % 2] = acc[i][c];
        }
        if (lane % 4 == 0) {
            room->sum[turn][warp][lane / 4][MIXES] = square[0];
            room->sum[turn][warp][lane / 4 + 8][MIXES] = square[1];
        }
        __syncthreads(); /* the other turn's sums are read before this one's end */
        for (int i = threadIdx.x; i < ROWS * SUMS; i += MIX_THREADS) {
            const int r = i / SUMS, m = i % SUMS;
            float sum = 0.0f;

            if (i0 + r >= a.n_row)
                continue;
#pragma unroll
            for (int w = 0; w < MIX_WARPS; w++)
                sum += room->sum[turn][w][r][m];
            a.partial[((int64_t)(i0 + r) * n_slice + slice) * SUMS + m] = sum;
        }
    }
}

static __device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* Sums over a row's four lanes, and over a column's, of the 4 x 4 matrix in lanes 0..15 (and again in
 * 16..31). */
static __device__ __forceinline__ float row_sum(float c)
{
    c += __shfl_xor_sync(0xffffffffu, c, 1);
    return c + __shfl_xor_sync(0xffffffffu, c, 2);
}

static __device__ __forceinline__ float column_sum(float c)
{
    c += __shfl_xor_sync(0xffffffffu, c, 4);
    return c + __shfl_xor_sync(0xffffffffu, c, 8);
}

/* pre, post and comb of a row: a warp.  Row softmax plus eps and a column step, then rows and columns in turn;
 * divisions by reciprocal (two units in the last place, which the next step evens out). */
#define FINISH_WARPS 4
static __global__ void __launch_bounds__(32 * FINISH_WARPS)
    finish_rows_kernel(const __grid_constant__ struct ds4_hyper_rows a)
{
    const int32_t i = blockIdx.x * FINISH_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t n_slice = a.d / COLUMNS, m = min(lane, MIXES);
    const float base = lane < MIXES ? __ldg(a.base + lane) : 0.0f;
    const float scale = lane < MIXES ? __ldg(a.scale + (lane < 4 ? 0 : lane < 8 ? 1 : 2)) : 0.0f;
    float sum = 0.0f, square, mix, c, top;

    ds4_take_turn();
    if (i >= a.n_row)
        return;
#pragma unroll 8
    for (int32_t s = 0; s < n_slice; s++)
        sum += a.partial[((int64_t)i * n_slice + s) * SUMS + m];
    square = __shfl_sync(0xffffffffu, sum, MIXES);
    mix = sum * (1.0f / sqrtf(square / (float)(STREAMS * a.d) + a.rms_eps)) * scale + base;
    if (lane < 4)
        a.pre[4 * (int64_t)i + lane] = sigmoid(mix) + a.hyper_eps;
    else if (lane < 8)
        a.post[4 * (int64_t)i + lane - 4] = 2.0f * sigmoid(mix);
    c = __shfl_sync(0xffffffffu, mix, 8 + lane % 16);
    top = fmaxf(c, __shfl_xor_sync(0xffffffffu, c, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    c = expf(c - top);
    c = c * __fdividef(1.0f, row_sum(c)) + a.hyper_eps;
    for (int32_t k = 0; k < a.iters; k++) {
        if (k > 0)
            c *= __fdividef(1.0f, row_sum(c) + a.hyper_eps);
        c *= __fdividef(1.0f, column_sum(c) + a.hyper_eps);
    }
    if (lane < 16)
        a.comb[16 * (int64_t)i + lane] = c;
}

/* u of a row: a block; a thread keeps EACH groups of eight columns, d to 8192. */
#define READ_THREADS 256
#define EACH         4
static __global__ void __launch_bounds__(READ_THREADS)
    read_rows_kernel(const __grid_constant__ struct ds4_hyper_rows a)
{
    __shared__ float shared[32];
    const int32_t t = blockIdx.x;
    const uint4 *const x = (const uint4 *)((const __nv_bfloat16 *)a.x.data + t * a.x.stride);
    float4 *const to = (float4 *)((float *)a.u.data + t * a.u.stride);
    float u[EACH][8], square = 0.0f, factor = 1.0f;
    float4 p;

    ds4_take_turn();
    p = *(const float4 *)(a.pre + 4 * (int64_t)t);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int32_t i = threadIdx.x + e * READ_THREADS;
        const float pre[STREAMS] = {p.x, p.y, p.z, p.w};

#pragma unroll
        for (int c = 0; c < 8; c++)
            u[e][c] = 0.0f;
        if (i >= a.d / 8)
            continue;
#pragma unroll
        for (int k = 0; k < STREAMS; k++) {
            const uint4 q = x[k * (a.d / 8) + i];
            const uint32_t pair[4] = {q.x, q.y, q.z, q.w};

#pragma unroll
            for (int c = 0; c < 4; c++) {
                u[e][2 * c] += pre[k] * low_of(pair[c]);
                u[e][2 * c + 1] += pre[k] * high_of(pair[c]);
            }
        }
#pragma unroll
        for (int c = 0; c < 8; c++)
            square += u[e][c] * u[e][c];
    }
    if (a.norm != NULL)
        factor = 1.0f / sqrtf(ds4_block_sum(square, shared) / (float)a.d + a.rms_eps);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int32_t i = threadIdx.x + e * READ_THREADS;
        float g[8] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};

        if (i >= a.d / 8)
            continue;
        if (a.norm != NULL) {
#pragma unroll
            for (int c = 0; c < 8; c++)
                g[c] = __ldg(a.norm + 8 * i + c);
        }
#pragma unroll
        for (int c = 0; c < 8; c++)
            u[e][c] = a.norm != NULL ? g[c] * (u[e][c] * factor) : u[e][c];
        to[2 * i] = make_float4(u[e][0], u[e][1], u[e][2], u[e][3]);
        to[2 * i + 1] = make_float4(u[e][4], u[e][5], u[e][6], u[e][7]);
    }
}

static bool aligned(const void *p)
{
    return (uintptr_t)p % 16 == 0;
}

bool ds4_cuda_can_hyper_rows(const struct ds4_hyper_rows *a)
{
    const bool in = a->x.bf16 && a->x.stride % 8 == 0 && aligned(a->x.data) &&
                    a->d % COLUMNS == 0 && a->d <= 8 * EACH * READ_THREADS;
    const bool weights = (a->dtype == DS4_DTYPE_F16 || a->dtype == DS4_DTYPE_BF16) &&
                         a->row_bytes % 16 == 0 && aligned(a->fn);
    const bool out = !a->u.bf16 && a->u.stride % 4 == 0 && aligned(a->u.data) && aligned(a->post) &&
                     aligned(a->comb);

    return a->n_row > DS4_HYPER_ROWS && in && weights && out &&
           (!a->writes || (!a->o.bf16 && a->o.stride % 4 == 0 && aligned(a->o.data)));
}

void ds4_cuda_hyper_rows(struct ds4_device *dev, const struct ds4_hyper_rows *a)
{
    const int32_t n_slice = a->d / COLUMNS, turns = ds4_div_up(a->n_row, ROWS);
    const int32_t most = ds4_div_up(4 * dev->n_sm, n_slice);
    const dim3 grid((unsigned)n_slice, (unsigned)(turns < most ? turns : most));
    void (*const mix)(struct ds4_hyper_rows) = a->dtype == DS4_DTYPE_F16
                                                   ? mix_rows_kernel<DS4_DTYPE_F16>
                                                   : mix_rows_kernel<DS4_DTYPE_BF16>;

    DS4_CUDA(cudaFuncSetAttribute(mix, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)sizeof(struct mix_room)));
    DS4_CHAIN(mix, grid, MIX_THREADS, sizeof(struct mix_room), dev, *a);
    DS4_CHAIN(finish_rows_kernel, ds4_div_up(a->n_row, FINISH_WARPS), 32 * FINISH_WARPS, 0, dev,
              *a);
    DS4_CHAIN(read_rows_kernel, a->n_row, READ_THREADS, 0, dev, *a);
}

/* Up to eight rows against matrices of plain numbers (f32, f16, bf16) whose rows are aligned: y = W x.
 *
 * Routers, compressors, the indexer: 0.1 to 16 MB, over in a few microseconds, so the chain of latencies
 * counts and not the bytes.  A block takes R whole rows; a thread takes eight neighbouring values of each,
 * every 8 T values.  The weights go straight to registers and are on their way before the inputs are there;
 * the inputs serve R rows at once.
 * Sums: a thread's in rising order, a warp's as one fixed tree, warps in rising order: the same bits for
 * every R and every number of inputs. */
#ifndef DS4_KERNELS_CUDA_DOTS_CUH
#define DS4_KERNELS_CUDA_DOTS_CUH

#include "kernels/cuda/gemv.cuh"

#define DS4_DOTS_AHEAD 2 /* octets of a row that a thread has under way */

/* Eight neighbouring weights as stored. */
template <int D> struct ds4_octet {
    uint4 v[D == DS4_DTYPE_F32 ? 2 : 1];
};

template <int D>
static __device__ __forceinline__ struct ds4_octet<D> ds4_octet_load(const uint8_t *row,
                                                                     int32_t at) {
    struct ds4_octet<D> o;
    const uint4 *p = (const uint4 *)(row + (size_t)at * ds4_block_bytes(D));

    o.v[0] = __ldg(p);
    if constexpr (D == DS4_DTYPE_F32)
        o.v[1] = __ldg(p + 1);
    return o;
}

/* Values 2j and 2j + 1. */
template <int D>
static __device__ __forceinline__ float2 ds4_octet_pair(const struct ds4_octet<D> &o, int j)
{
    if constexpr (D == DS4_DTYPE_F32) {
        const uint4 v = o.v[j / 2];

        return j % 2 == 0 ? make_float2(__uint_as_float(v.x), __uint_as_float(v.y))
                          : make_float2(__uint_as_float(v.z), __uint_as_float(v.w));
    } else {
        const uint4 v = o.v[0];
        const uint32_t pair = j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w;

        if constexpr (D == DS4_DTYPE_BF16)
            return make_float2(ds4_bits_f32(pair << 16), ds4_bits_f32(pair & 0xffff0000u));
        else
            return make_float2(ds4_f16_of(pair & 0xffff), ds4_f16_of(pair >> 16));
    }
}

/* acc += eight weights times eight inputs. */
template <int D>
static __device__ __forceinline__ void ds4_octet_dot(const struct ds4_octet<D> &w,
                                                     const uint4 (&x)[2], float &acc)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 k = ds4_octet_pair<D>(w, j);
        const uint4 v = x[j / 2];

        acc = fmaf(k.x, __uint_as_float(j % 2 == 0 ? v.x : v.z), acc);
        acc = fmaf(k.y, __uint_as_float(j % 2 == 0 ? v.y : v.w), acc);
    }
}

/* Block (x: R rows, y: part, z: matrix) of T threads; at most N inputs. */
template <int D, int N, int R, int T>
static __global__ void __launch_bounds__(T,
                                         N > 4 ? 512 / T : 1) /* latency: 16 warps an SM at least */
    ds4_dots_kernel(const __grid_constant__ struct ds4_product p)
{
    __shared__ float part[R * N][T / 32];
    const int32_t me = threadIdx.x, warp = me / 32, lane = me % 32, row0 = blockIdx.x * R;
    const uint8_t *w = p.w[blockIdx.z] + (size_t)blockIdx.y * p.part_bytes, *x = p.x.data;
    const int32_t n_row = ds4_product_rows(p, blockIdx.z);
    float acc[R][N] = {};

    ds4_release_next();
    for (int32_t k = 0; k < p.n_col; k += 8 * T * DS4_DOTS_AHEAD) {
        struct ds4_octet<D> v[R][DS4_DOTS_AHEAD];

#pragma unroll
        for (int c = 0; c < DS4_DOTS_AHEAD; c++) {
            const int32_t at = k + 8 * (T * c + me);

#pragma unroll
            for (int r = 0; r < R; r++) {
                v[r][c] = {};
                if (at < p.n_col)
                    v[r][c] =
                        ds4_octet_load<D>(w + (size_t)min(row0 + r, n_row - 1) * p.row_bytes, at);
            }
        }
        ds4_wait_previous(); /* the weights are on their way, the inputs may not be there yet */
        x = ds4_after(x);
#pragma unroll
        for (int c = 0; c < DS4_DOTS_AHEAD; c++) {
            const int32_t at = k + 8 * (T * c + me);

            if (at >= p.n_col)
                continue;
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float *from = (const float *)(x + min(n, p.n - 1) * p.x.row_bytes) +
                                    (int64_t)blockIdx.y * p.x.part + at;
                const uint4 in[2] = {ds4_load16(from), ds4_load16(from + 4)};

#pragma unroll
                for (int r = 0; r < R; r++)
                    ds4_octet_dot<D>(v[r][c], in, acc[r][n]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        const float sum = ds4_warp_sums<N>(acc[r]);

        if (lane % (32 / N) == 0)
            part[r * N + lane / (32 / N)][warp] = sum;
    }
    __syncthreads();
    if (me < R * N) {
        const int32_t row = row0 + me / N, n = me % N;
        float sum = part[me][0];

        for (int i = 1; i < T / 32; i++)
            sum += part[me][i];
        if (n < p.n && row < n_row)
            p.y[blockIdx.z][n * ds4_product_stride(p, blockIdx.z) + blockIdx.y * p.n_row + row] =
                sum;
    }
}

/* Whether rows can be read sixteen bytes at a time. */
static inline bool ds4_dots_fit(const struct ds4_product *p)
{
    uintptr_t at = p->row_bytes | p->part_bytes;

    for (int z = 0; z < p->n_w; z++)
        at |= (uintptr_t)p->w[z];
    return p->group == NULL && p->n_col % 8 == 0 && at % 16 == 0;
}

template <int D, int N, int T>
static void ds4_dots_launch(struct ds4_device *dev, const struct ds4_product *p)
{
    const int32_t n_row = p->n_row > p->n_row2 ? p->n_row : p->n_row2;

    /* Four rows a block once that fills the card. */
    if (n_row * p->n_part * p->n_w >= 8 * dev->n_sm)
        DS4_CHAIN((ds4_dots_kernel<D, N, 4, T>), dim3(ds4_div_up(n_row, 4), p->n_part, p->n_w), T,
                  0, dev, *p);
    else
        DS4_CHAIN((ds4_dots_kernel<D, N, 1, T>), dim3(n_row, p->n_part, p->n_w), T, 0, dev, *p);
}

template <int D, int N>
static void ds4_dots_inputs(struct ds4_device *dev, const struct ds4_product *p)
{
    if (p->n_col <= 1024)
        ds4_dots_launch<D, N, 128>(dev, p);
    else
        ds4_dots_launch<D, N, 256>(dev, p);
}

/* Any number of inputs, in tiles of eight. */
template <int D> static void ds4_dots_run(struct ds4_device *dev, const struct ds4_product *p)
{
    for (int32_t i = 0; i < p->n; i += 8) {
        struct ds4_product q = *p;

        q.n = p->n - i < 8 ? p->n - i : 8;
        q.x.data += i * p->x.row_bytes;
        q.y[0] += i * p->y_stride;
        q.y[1] += i * (p->y_stride2 != 0 ? p->y_stride2 : p->y_stride);
        if (q.n == 1)
            ds4_dots_inputs<D, 1>(dev, &q);
        else if (q.n <= 4)
            ds4_dots_inputs<D, 4>(dev, &q);
        else
            ds4_dots_inputs<D, 8>(dev, &q);
    }
}

#endif

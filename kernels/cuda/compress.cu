/* Compressors: one pooled row per block of `ratio` tokens.
 *
 * A thread block per token: where the token completes a block it pools, norms, rotates, rounds and stores
 * the row; then it keeps the token's k and g + ape in the rings.  The candidates (8 or 128) come from the
 * ring before base_pos and from the step after it, in rising position, so a row does not depend on how
 * the tokens were cut into steps.  An entry so long that its rows would overwrite history another block
 * still reads keeps its rows in launches of their own. */
#include "kernels/cuda/rows.cuh"

/* By value: what the pooling kernel needs. */
struct pool_args {
    struct ds4_dev_batch batch;
    const float *k;
    const float *g;
    int64_t k_stride;
    int64_t g_stride;
    const uint8_t *ape;
    enum ds4_dtype ape_dtype;
    size_t ape_row_bytes;
    int32_t ratio;
    bool overlap;
    bool pools, keeps; /* what this launch does */
    const float *norm;
    float eps;
    const float *freq;
    int32_t d_rope;
    struct ds4_ring ring_k;
    struct ds4_ring ring_g;
    struct ds4_pages pages;
};

/* Not inlined: a kernel that runs once on one SM waits for its instructions, and decoders are long. */
static __device__ __noinline__ float ape_value(enum ds4_dtype dtype, const uint8_t *row, int32_t i)
{
    return ds4_dq(dtype, row, i);
}

/* g + ape of row t of the step. */
__device__ __forceinline__ float gate_of(const struct pool_args &a, int64_t row, int32_t pos,
                                         int32_t i)
{
    return a.g[row * a.g_stride + i] +
           ape_value(a.ape_dtype, a.ape + (size_t)(pos % a.ratio) * a.ape_row_bytes, i);
}

static __device__ __noinline__ float candidate(const struct pool_args &a,
                                               const struct ds4_dev_entry &entry, bool of_g,
                                               int32_t pos, int32_t i)
{
    int64_t row = entry.first_row + (pos - entry.base_pos);

    if (pos < entry.base_pos)
        return ((const float *)ds4_dev_ring_row(of_g ? a.ring_g : a.ring_k, entry.slot, pos))[i];
    return of_g ? gate_of(a, row, pos, i) : a.k[row * a.k_stride + i];
}

#define POOL_THREADS 512
#define POOL_HELD    8 /* candidates whose loads are all under way at once */

/* Value i of a block's softmax-weighted mean over its candidates skip .. n - 1. */
static __device__ __forceinline__ float pool_held(const struct pool_args &a,
                                                  const struct ds4_dev_entry &entry, int32_t from,
                                                  int32_t skip, int32_t n, int32_t i)
{
    float g[POOL_HELD], k[POOL_HELD], top = -INFINITY, sum = 0.0f, value = 0.0f;

#pragma unroll
    for (int32_t c = 0; c < POOL_HELD; c++) {
        const int32_t at = i + (a.overlap && c >= a.ratio ? a.pages.d : 0);
        const bool there = c >= skip && c < n;

        g[c] = there ? candidate(a, entry, true, from + c, at) : -INFINITY;
        k[c] = there ? candidate(a, entry, false, from + c, at) : 0.0f;
    }
#pragma unroll
    for (int32_t c = 0; c < POOL_HELD; c++)
        if (c >= skip && c < n)
            top = fmaxf(top, g[c]);
#pragma unroll
    for (int32_t c = 0; c < POOL_HELD; c++) {
        if (c >= skip && c < n) {
            const float w = expf(g[c] - top);

            sum += w;
            value += w * k[c];
        }
    }
    return value / sum;
}

static __device__ __noinline__ float pool_long(const struct pool_args &a,
                                               const struct ds4_dev_entry &entry, int32_t from,
                                               int32_t skip, int32_t n, int32_t i)
{
    float top = -INFINITY, sum = 0.0f, value = 0.0f;

#pragma unroll 4
    for (int32_t c = skip; c < n; c++)
        top = fmaxf(top, candidate(a, entry, true, from + c,
                                   i + (a.overlap && c >= a.ratio ? a.pages.d : 0)));
#pragma unroll 4
    for (int32_t c = skip; c < n; c++) {
        const int32_t at = i + (a.overlap && c >= a.ratio ? a.pages.d : 0);
        const float w = expf(candidate(a, entry, true, from + c, at) - top);

        sum += w;
        value += w * candidate(a, entry, false, from + c, at);
    }
    return value / sum;
}

/* The same, the same bits, where ape holds plain numbers: the loads of POOL_BATCH candidates are under way at once. */
#define POOL_BATCH 8
template <int D>
static __device__ __noinline__ float pool_plain(const struct pool_args &a,
                                                const struct ds4_dev_entry &entry, int32_t from,
                                                int32_t skip, int32_t n, int32_t i)
{
    float top = -INFINITY, sum = 0.0f, value = 0.0f;

    for (int pass = 0; pass < 2; pass++) {
        for (int32_t c0 = skip; c0 < n; c0 += POOL_BATCH) {
            float g[POOL_BATCH], k[POOL_BATCH];

#pragma unroll
            for (int u = 0; u < POOL_BATCH; u++) {
                const int32_t c = min(c0 + u, n - 1), pos = from + c;
                const int32_t at = i + (a.overlap && c >= a.ratio ? a.pages.d : 0);
                const int64_t row = entry.first_row + (pos - entry.base_pos);
                const bool old = pos < entry.base_pos;
                const float *const gs =
                    old ? (const float *)ds4_dev_ring_row(a.ring_g, entry.slot, pos)
                        : a.g + row * a.g_stride;
                const float *const ks =
                    old ? (const float *)ds4_dev_ring_row(a.ring_k, entry.slot, pos)
                        : a.k + row * a.k_stride;
                const uint8_t *const ape = a.ape + (size_t)(pos % a.ratio) * a.ape_row_bytes;
                const float more = D == DS4_DTYPE_F32 ? ((const float *)ape)[at]
                                                      : __half2float(((const __half *)ape)[at]);

                g[u] = old ? gs[at] : gs[at] + more;
                k[u] = pass == 0 ? 0.0f : ks[at];
            }
#pragma unroll
            for (int u = 0; u < POOL_BATCH; u++) {
                if (c0 + u >= n)
                    continue;
                if (pass == 0) {
                    top = fmaxf(top, g[u]);
                } else {
                    const float w = expf(g[u] - top);

                    sum += w;
                    value += w * k[u];
                }
            }
        }
    }
    return value / sum;
}

/* The row of the block that the token at pos completes. */
__device__ void pool(const struct pool_args &a, const struct ds4_dev_entry &entry, int32_t pos,
                     float *row, float *shared)
{
    const int32_t d = a.pages.d, j = pos / a.ratio;
    const int32_t from = a.overlap ? (j - 1) * a.ratio : j * a.ratio;
    const int32_t skip = a.overlap && j == 0 ? a.ratio : 0;
    const int32_t n = a.overlap ? 2 * a.ratio : a.ratio;
    uint8_t *const page = ds4_dev_page_row(a.pages, a.batch, entry, j);
    float square = 0.0f;

    if (page == NULL)
        return;
    for (int32_t i = threadIdx.x; i < d; i += blockDim.x) {
        const float value =
            n <= POOL_HELD                 ? pool_held(a, entry, from, skip, n, i)
            : a.ape_dtype == DS4_DTYPE_F16 ? pool_plain<DS4_DTYPE_F16>(a, entry, from, skip, n, i)
            : a.ape_dtype == DS4_DTYPE_F32 ? pool_plain<DS4_DTYPE_F32>(a, entry, from, skip, n, i)
                                           : pool_long(a, entry, from, skip, n, i);

        row[i] = value;
        square += value * value;
    }
    square = ds4_block_sum(square, shared);
    for (int32_t i = threadIdx.x; i < d; i += blockDim.x)
        row[i] = a.norm[i] * (row[i] * (1.0f / sqrtf(square / (float)d + a.eps)));
    __syncthreads();
    for (int32_t i = threadIdx.x; i < a.d_rope / 2; i += blockDim.x)
        ds4_dev_rotate(row + d - a.d_rope + 2 * i, a.freq[i], j * a.ratio, false);
    ds4_dev_round_row(a.pages.format, d, a.pages.d_rope, row);
    ds4_dev_pack_row(a.pages.format, d, a.pages.d_rope, row, page);
}

static __global__ void __launch_bounds__(POOL_THREADS, 2)
    compress_kernel(const __grid_constant__ struct pool_args a)
{
    __shared__ float row[DS4_DEV_MAX_ROW];
    __shared__ float shared[32];
    const int32_t t = blockIdx.x;

    ds4_take_turn();
    const struct ds4_dev_entry entry = a.batch.entry[a.batch.entry_of[t]];
    const int32_t pos = a.batch.pos[t], width = a.ring_k.d;

    if (!entry.active || pos >= entry.cap_tok)
        return;
    if (a.pools && (pos + 1) % a.ratio == 0 && pos >= entry.seal_tok)
        pool(a, entry, pos, row, shared);
    /* Only the last cap rows of an entry: older ones would be overwritten, in no fixed order. */
    if (!a.keeps || pos + a.ring_k.cap < entry.base_pos + entry.n_row)
        return;
    float *const to_k = (float *)ds4_dev_ring_row(a.ring_k, entry.slot, pos);
    float *const to_g = (float *)ds4_dev_ring_row(a.ring_g, entry.slot, pos);

    for (int32_t i = threadIdx.x; i < width; i += blockDim.x) {
        to_k[i] = a.k[t * a.k_stride + i];
        to_g[i] = gate_of(a, t, pos, i);
    }
}

size_t ds4_cuda_compress_scratch(const struct ds4_device *dev, const struct ds4_limits *limits)
{
    (void)dev;
    (void)limits;
    return 0;
}

void ds4_cuda_compress(struct ds4_device *dev, const struct ds4_compress_args *a)
{
    struct pool_args args = {dev->batch,
                             (const float *)a->k.data,
                             (const float *)a->g.data,
                             a->k.stride[0],
                             a->g.stride[0],
                             (const uint8_t *)a->ape.data,
                             a->ape.dtype,
                             a->ape.row_bytes,
                             a->ratio,
                             a->overlap,
                             true,
                             true,
                             a->norm,
                             a->eps,
                             a->rope.freq,
                             a->rope.d_rope,
                             a->ring_k,
                             a->ring_g,
                             a->pages};
    const int32_t n = dev->batch.n_tok, need = (a->overlap ? 2 : 1) * a->ratio - 1;

    if (n == 0)
        return;
    if (a->pages.d > DS4_DEV_MAX_ROW)
        ds4_cuda_fatal(__FILE__, __LINE__, "compress", "row wider than shared memory is sized for");
    args.keeps = dev->shape.max_row + need <= a->ring_k.cap;
    DS4_CHAIN(compress_kernel, n, POOL_THREADS, 0, dev, args);
    if (args.keeps)
        return;
    args.pools = false;
    args.keeps = true;
    DS4_CHAIN(compress_kernel, n, POOL_THREADS, 0, dev, args);
}

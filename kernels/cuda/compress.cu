/* Compressors: one pooled row per block of `ratio` tokens.
 *
 * Three launches: g += ape; one block of threads per token that completes a block pools, norms, rotates,
 * rounds and stores its row; the rings take the step's last rows.  The pooling thread block reads its
 * 8 (or 128) candidates from the ring before base_pos and from the step after it, in rising position, so
 * a row does not depend on how the tokens were cut into steps. */
#include "kernels/cuda/rows.cuh"

static __global__ void add_ape_kernel(struct ds4_dev_batch batch, float *g, int64_t stride,
                                      const uint8_t *ape, enum ds4_dtype dtype, size_t row_bytes,
                                      int32_t width, int32_t ratio)
{
    ds4_take_turn();
    const int32_t t = blockIdx.x;

    if (!batch.entry[batch.entry_of[t]].active)
        return;
    ape += (size_t)(batch.pos[t] % ratio) * row_bytes;
    for (int32_t i = threadIdx.x; i < width; i += blockDim.x)
        g[t * stride + i] += ds4_dq(dtype, ape, i);
}

/* By value: what the pooling kernel needs. */
struct pool_args {
    struct ds4_dev_batch batch;
    const float *k;
    const float *g;
    int64_t k_stride;
    int64_t g_stride;
    int32_t ratio;
    bool overlap;
    const float *norm;
    float eps;
    const float *freq;
    int32_t d_rope;
    struct ds4_ring ring_k;
    struct ds4_ring ring_g;
    struct ds4_pages pages;
};

__device__ __forceinline__ float candidate(const struct pool_args &a,
                                           const struct ds4_dev_entry &entry, bool of_g,
                                           int32_t pos, int32_t i)
{
    int64_t row = entry.first_row + (pos - entry.base_pos);

    if (pos < entry.base_pos)
        return ((const float *)ds4_dev_ring_row(of_g ? a.ring_g : a.ring_k, entry.slot, pos))[i];
    return of_g ? a.g[row * a.g_stride + i] : a.k[row * a.k_stride + i];
}

static __global__ void pool_kernel(struct pool_args a)
{
    ds4_take_turn();
    __shared__ float row[DS4_DEV_MAX_ROW];
    __shared__ float shared[32];
    const int32_t t = blockIdx.x, pos = a.batch.pos[t], d = a.pages.d;
    const struct ds4_dev_entry entry = a.batch.entry[a.batch.entry_of[t]];
    const int32_t j = pos / a.ratio, from = a.overlap ? (j - 1) * a.ratio : j * a.ratio;
    const int32_t skip = a.overlap && j == 0 ? a.ratio : 0;
    const int32_t n = a.overlap ? 2 * a.ratio : a.ratio;
    uint8_t *page;
    float square = 0.0f;

    if (!entry.active || (pos + 1) % a.ratio != 0 || pos >= entry.cap_tok)
        return;
    page = ds4_dev_page_row(a.pages, a.batch, entry, j);
    if (page == NULL)
        return;
    for (int32_t i = threadIdx.x; i < d; i += blockDim.x) {
        float top = -INFINITY, sum = 0.0f, value = 0.0f;

        for (int32_t c = skip; c < n; c++)
            top = fmaxf(
                top, candidate(a, entry, true, from + c, i + (a.overlap && c >= a.ratio ? d : 0)));
        for (int32_t c = skip; c < n; c++) {
            int32_t at = i + (a.overlap && c >= a.ratio ? d : 0);
            float w = expf(candidate(a, entry, true, from + c, at) - top);

            sum += w;
            value += w * candidate(a, entry, false, from + c, at);
        }
        value /= sum;
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

size_t ds4_cuda_compress_scratch(const struct ds4_device *dev, const struct ds4_limits *limits)
{
    (void)dev;
    (void)limits;
    return 0;
}

void ds4_cuda_compress(struct ds4_device *dev, const struct ds4_compress_args *a)
{
    const struct pool_args pool = {dev->batch,
                                   (const float *)a->k.data,
                                   (const float *)a->g.data,
                                   a->k.stride[0],
                                   a->g.stride[0],
                                   a->ratio,
                                   a->overlap,
                                   a->norm,
                                   a->eps,
                                   a->rope.freq,
                                   a->rope.d_rope,
                                   a->ring_k,
                                   a->ring_g,
                                   a->pages};
    const struct ds4_ring_write_args keep_k = {a->batch, a->k, a->ring_k};
    const struct ds4_ring_write_args keep_g = {a->batch, a->g, a->ring_g};
    const int32_t n = dev->batch.n_tok;

    if (n == 0)
        return;
    if (a->pages.d > DS4_DEV_MAX_ROW)
        ds4_cuda_fatal(__FILE__, __LINE__, "compress", "row wider than shared memory is sized for");
    DS4_CHAIN(add_ape_kernel, n, 256, 0, dev, dev->batch, (float *)a->g.data, a->g.stride[0],
              (const uint8_t *)a->ape.data, a->ape.dtype, a->ape.row_bytes, a->ape.n_col, a->ratio);
    DS4_CHAIN(pool_kernel, n, 256, 0, dev, pool);
    ds4_cuda_ring_write(dev, &keep_k);
    ds4_cuda_ring_write(dev, &keep_g);
}

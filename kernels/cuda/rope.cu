/* Rotary positions over the tail of every head, with the optional per-head RMS of the query.
 *
 * One block a head and token: bytes 2 * 4 * d_head, latency bound in decode. */
#include "kernels/cuda/rows.cuh"

static __global__ void rope_kernel(struct ds4_dev_batch batch, float *x, int64_t tok_stride,
                                   int64_t head_stride, int32_t d, const float *freq,
                                   int32_t d_rope, bool inverse, bool unit_rms, float eps)
{
    ds4_take_turn();
    __shared__ float shared[32];
    const int32_t t = blockIdx.y;
    float *head = x + t * tok_stride + (int64_t)blockIdx.x * head_stride;
    float factor = 1.0f;

    if (!batch.entry[batch.entry_of[t]].active)
        return;
    if (unit_rms) {
        float square = 0.0f;

        for (int32_t i = threadIdx.x; i < d; i += blockDim.x)
            square += head[i] * head[i];
        square = ds4_block_sum(square, shared);
        factor = 1.0f / sqrtf(square / (float)d + eps);
        for (int32_t i = threadIdx.x; i < d - d_rope; i += blockDim.x)
            head[i] *= factor;
    }
    for (int32_t i = threadIdx.x; i < d_rope / 2; i += blockDim.x) {
        float pair[2] = {head[d - d_rope + 2 * i] * factor, head[d - d_rope + 2 * i + 1] * factor};

        ds4_dev_rotate(pair, freq[i], batch.pos[t], inverse);
        head[d - d_rope + 2 * i] = pair[0];
        head[d - d_rope + 2 * i + 1] = pair[1];
    }
}

void ds4_cuda_rope(struct ds4_device *dev, const struct ds4_rope_args *a)
{
    const bool heads = a->x.n_dim == 3;
    const int32_t n_head = heads ? a->x.shape[1] : 1, d = a->x.shape[heads ? 2 : 1];
    const dim3 grid((unsigned)n_head, (unsigned)dev->batch.n_tok);

    if (dev->batch.n_tok == 0)
        return;
    ds4_dev_spoil(dev, &a->x);
    DS4_CHAIN(rope_kernel, grid, 128, 0, dev, dev->batch, (float *)a->x.data, a->x.stride[0],
              heads ? a->x.stride[1] : 0, d, a->rope.freq, a->rope.d_rope, a->inverse, a->unit_rms,
              a->eps);
}

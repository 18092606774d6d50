/* Rotary positions over the tail of every head, with the optional per-head RMS of the query.
 *
 * One block a head and token: bytes 2 * 4 * d_head, latency bound in decode; many rows take a warp a head,
 * bound by those bytes. */
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

/* Many rows of heads of up to 32 EACH values, in quads: a warp keeps a head in registers.  Without the RMS it
 * touches the rotated quads alone. */
#define HEAD_WARPS 8
#define HEAD_EACH  4 /* quads of a lane */
static __global__ void __launch_bounds__(32 * HEAD_WARPS)
    heads_kernel(struct ds4_dev_batch batch, float *x, int64_t tok_stride, int64_t head_stride,
                 int32_t n_head, int32_t d, const float *freq, int32_t d_rope, bool inverse,
                 bool unit_rms, float eps)
{
    ds4_take_turn();
    const int32_t t = blockIdx.y, h = blockIdx.x * HEAD_WARPS + threadIdx.x / 32;
    const int32_t lane = threadIdx.x % 32, plain = (d - d_rope) / 4;
    float4 *const head = (float4 *)(x + t * tok_stride + (int64_t)h * head_stride);
    float4 v[HEAD_EACH];
    float square = 0.0f, factor = 1.0f;

    if (h >= n_head || !batch.entry[batch.entry_of[t]].active)
        return;
#pragma unroll
    for (int k = 0; k < HEAD_EACH; k++) {
        const int32_t i = lane + 32 * k;

        v[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < d / 4 && (unit_rms || i >= plain))
            v[k] = head[i];
    }
    if (unit_rms) {
#pragma unroll
        for (int k = 0; k < HEAD_EACH; k++)
            square += v[k].x * v[k].x + v[k].y * v[k].y + v[k].z * v[k].z + v[k].w * v[k].w;
        for (int o = 16; o > 0; o /= 2)
            square += __shfl_xor_sync(0xffffffffu, square, o);
        factor = 1.0f / sqrtf(square / (float)d + eps);
    }
#pragma unroll
    for (int k = 0; k < HEAD_EACH; k++) {
        const int32_t i = lane + 32 * k, pair = 2 * (i - plain);
        float out[4] = {v[k].x * factor, v[k].y * factor, v[k].z * factor, v[k].w * factor};

        if (i >= d / 4 || (!unit_rms && i < plain))
            continue;
        if (i >= plain) {
            ds4_dev_rotate(out, freq[pair], batch.pos[t], inverse);
            ds4_dev_rotate(out + 2, freq[pair + 1], batch.pos[t], inverse);
        }
        head[i] = make_float4(out[0], out[1], out[2], out[3]);
    }
}

/* Rows from which heads_kernel runs, and what it can take. */
#define MANY 64
static bool can_keep(const struct ds4_rope_args *a, int32_t n_tok, int32_t d)
{
    return n_tok > MANY && a->x.n_dim == 3 && d <= 128 * HEAD_EACH && d % 4 == 0 &&
           a->rope.d_rope % 4 == 0 && a->x.stride[0] % 4 == 0 && a->x.stride[1] % 4 == 0 &&
           (uintptr_t)a->x.data % 16 == 0;
}

void ds4_cuda_rope(struct ds4_device *dev, const struct ds4_rope_args *a)
{
    const bool heads = a->x.n_dim == 3;
    const int32_t n_head = heads ? a->x.shape[1] : 1, d = a->x.shape[heads ? 2 : 1];
    const dim3 grid((unsigned)n_head, (unsigned)dev->batch.n_tok);

    if (dev->batch.n_tok == 0)
        return;
    ds4_dev_spoil(dev, &a->x);
    if (can_keep(a, dev->batch.n_tok, d)) {
        DS4_CHAIN(heads_kernel, dim3(ds4_div_up(n_head, HEAD_WARPS), grid.y), 32 * HEAD_WARPS, 0,
                  dev, dev->batch, (float *)a->x.data, a->x.stride[0], a->x.stride[1], n_head, d,
                  a->rope.freq, a->rope.d_rope, a->inverse, a->unit_rms, a->eps);
        return;
    }
    DS4_CHAIN(rope_kernel, grid, 128, 0, dev, dev->batch, (float *)a->x.data, a->x.stride[0],
              heads ? a->x.stride[1] : 0, d, a->rope.freq, a->rope.d_rope, a->inverse, a->unit_rms,
              a->eps);
}

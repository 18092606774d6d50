/* y = w * x * rsqrt(mean(x^2) + eps): one block a row, two passes over registers.
 *
 * Bytes: 2 * 4 * d a row; a decode step's row (16 KiB) is latency bound, which is why the callers that
 * matter fuse it.  The square root and the division are the IEEE ones, as on the CPU. */
#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/device.cuh"

#define EACH 8 /* values a thread keeps in registers */

/* Block: a row.  The first EACH values of each thread are loaded once and side by side. */
static __global__ void rmsnorm_kernel(struct ds4_dev_mat x, const float *w, float eps, int32_t d,
                                      struct ds4_dev_mat y)
{
    __shared__ float shared[32];
    const int64_t row = blockIdx.x;
    const int32_t step = blockDim.x;
    float v[EACH], g[EACH], square = 0.0f, factor;

    ds4_release_next();
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int32_t i = threadIdx.x + k * step;

        g[k] = w != NULL && i < d ? __ldg(w + i) : 1.0f; /* a weight */
    }
    ds4_wait_previous();
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int32_t i = threadIdx.x + k * step;

        v[k] = i < d ? ds4_mat_get(x, row, i) : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < EACH; k++)
        square += v[k] * v[k];
    for (int32_t i = threadIdx.x + EACH * step; i < d; i += step) {
        float rest = ds4_mat_get(x, row, i);

        square += rest * rest;
    }
    square = ds4_block_sum(square, shared);
    factor = 1.0f / sqrtf(square / (float)d + eps);
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int32_t i = threadIdx.x + k * step;

        if (i < d)
            ds4_mat_set(y, row, i, g[k] * (v[k] * factor));
    }
    for (int32_t i = threadIdx.x + EACH * step; i < d; i += step)
        ds4_mat_set(y, row, i, (w != NULL ? w[i] : 1.0f) * (ds4_mat_get(x, row, i) * factor));
}

void ds4_cuda_rmsnorm(struct ds4_device *dev, const struct ds4_rmsnorm_args *a)
{
    const int32_t n = a->x.shape[0], d = a->x.shape[1];

    if (n == 0)
        return;
    ds4_dev_spoil(dev, &a->y);
    DS4_CHAIN(rmsnorm_kernel, n,
              d > 2048   ? 512
              : d >= 512 ? 256
                         : 64,
              0, dev, ds4_dev_mat_of(&a->x), a->w, a->eps, d, ds4_dev_mat_of(&a->y));
}

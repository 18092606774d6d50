/* y = w * x * rsqrt(mean(x^2) + eps): one block a row, two passes over registers.
 *
 * Bytes: 2 * 4 * d a row; a decode step's row (16 KiB) is latency bound, which is why the callers that
 * matter fuse it.  The square root and the division are the IEEE ones, as on the CPU. */
#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/device.cuh"

static __global__ void rmsnorm_kernel(struct ds4_dev_mat x, const float *w, float eps, int32_t d,
                                      struct ds4_dev_mat y)
{
    ds4_take_turn();
    __shared__ float shared[32];
    const int64_t row = blockIdx.x;
    float square = 0.0f, factor;

    for (int32_t i = threadIdx.x; i < d; i += blockDim.x) {
        float v = ds4_mat_get(x, row, i);

        square += v * v;
    }
    square = ds4_block_sum(square, shared);
    factor = 1.0f / sqrtf(square / (float)d + eps);
    for (int32_t i = threadIdx.x; i < d; i += blockDim.x) {
        float v = ds4_mat_get(x, row, i) * factor;

        ds4_mat_set(y, row, i, w != NULL ? w[i] * v : v);
    }
}

void ds4_cuda_rmsnorm(struct ds4_device *dev, const struct ds4_rmsnorm_args *a)
{
    const int32_t n = a->x.shape[0], d = a->x.shape[1];

    if (n == 0)
        return;
    DS4_CHAIN(rmsnorm_kernel, n, d >= 512 ? 256 : 64, 0, dev, ds4_dev_mat_of(&a->x), a->w, a->eps,
              d, ds4_dev_mat_of(&a->y));
}

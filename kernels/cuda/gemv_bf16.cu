/* Streaming products of BF16: router, compressors, indexer. */
#include "kernels/cuda/dots.cuh"

void ds4_cuda_exact_bf16(struct ds4_device *dev, const struct ds4_product *p)
{
    if (ds4_dots_fit(p))
        ds4_dots_run<DS4_DTYPE_BF16>(dev, p);
    else
        ds4_gemv_run<DS4_DTYPE_BF16, false>(dev, p);
}

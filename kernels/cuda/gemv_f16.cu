/* Streaming products of F16: router, compressors, indexer. */
#include "kernels/cuda/dots.cuh"

void ds4_cuda_exact_f16(struct ds4_device *dev, const struct ds4_product *p)
{
    if (ds4_dots_fit(p))
        ds4_dots_run<DS4_DTYPE_F16>(dev, p);
    else
        ds4_gemv_run<DS4_DTYPE_F16, false>(dev, p);
}

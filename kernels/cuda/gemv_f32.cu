/* Streaming products of F32: the hyper-connection mixers. */
#include "kernels/cuda/dots.cuh"

void ds4_cuda_exact_f32(struct ds4_device *dev, const struct ds4_product *p)
{
    if (ds4_dots_fit(p))
        ds4_dots_run<DS4_DTYPE_F32>(dev, p);
    else
        ds4_gemv_run<DS4_DTYPE_F32, false>(dev, p);
}

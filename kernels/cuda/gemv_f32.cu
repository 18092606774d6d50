/* Streaming products of F32: the hyper-connection mixers. */
#include "kernels/cuda/gemv.cuh"

void ds4_cuda_exact_f32(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_gemv_run<DS4_DTYPE_F32, false>(dev, p);
}

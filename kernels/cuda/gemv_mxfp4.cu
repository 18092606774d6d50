/* Streaming products of MXFP4: routed experts in the checkpoint's own format. */
#include "kernels/cuda/gemv.cuh"

void ds4_cuda_exact_mxfp4(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_gemv_run<DS4_DTYPE_MXFP4, false>(dev, p);
}

void ds4_cuda_int8_mxfp4(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_gemv_run<DS4_DTYPE_MXFP4, true>(dev, p);
}

/* Streaming products of IQ2_XXS: routed experts (gate and up). */
#include "kernels/cuda/gemv.cuh"

void ds4_cuda_exact_iq2_xxs(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_gemv_run<DS4_DTYPE_IQ2_XXS, false>(dev, p);
}

void ds4_cuda_int8_iq2_xxs(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_gemv_run<DS4_DTYPE_IQ2_XXS, true>(dev, p);
}

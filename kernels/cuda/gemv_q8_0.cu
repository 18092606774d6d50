/* Streaming products of Q8_0: attention, shared experts, head. */
#include "kernels/cuda/gemv.cuh"

void ds4_cuda_exact_q8_0(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_gemv_run<DS4_DTYPE_Q8_0, false>(dev, p);
}

void ds4_cuda_int8_q8_0(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_gemv_run<DS4_DTYPE_Q8_0, true>(dev, p);
}

/* Streaming products of Q2_K: routed experts (down). */
#include "kernels/cuda/gemv.cuh"

void ds4_cuda_exact_q2_k(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_gemv_run<DS4_DTYPE_Q2_K, false>(dev, p);
}

void ds4_cuda_int8_q2_k(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_gemv_run<DS4_DTYPE_Q2_K, true>(dev, p);
}

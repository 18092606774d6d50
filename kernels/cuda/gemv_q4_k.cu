/* Streaming products of Q4_K: routed experts. */
#include "kernels/cuda/gemv.cuh"

void ds4_cuda_exact_q4_k(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_gemv_run<DS4_DTYPE_Q4_K, false>(dev, p);
}

void ds4_cuda_int8_q4_k(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_gemv_run<DS4_DTYPE_Q4_K, true>(dev, p);
}

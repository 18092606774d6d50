/* Streaming products of Q3_K: community files. */
#include "kernels/cuda/gemv.cuh"

void ds4_cuda_exact_q3_k(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_gemv_run<DS4_DTYPE_Q3_K, false>(dev, p);
}

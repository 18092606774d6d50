/* Streaming products of Q5_K: community files. */
#include "kernels/cuda/gemv.cuh"

void ds4_cuda_exact_q5_k(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_gemv_run<DS4_DTYPE_Q5_K, false>(dev, p);
}

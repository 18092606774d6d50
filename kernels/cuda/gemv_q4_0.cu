/* Streaming products of Q4_0: community files. */
#include "kernels/cuda/gemv.cuh"

void ds4_cuda_exact_q4_0(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_gemv_run<DS4_DTYPE_Q4_0, false>(dev, p);
}

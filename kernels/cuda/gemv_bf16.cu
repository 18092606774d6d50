/* Streaming products of BF16: router, compressors, indexer. */
#include "kernels/cuda/gemv.cuh"

void ds4_cuda_exact_bf16(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_gemv_run<DS4_DTYPE_BF16, false>(dev, p);
}

/* Tensor core products of Q4_K. */
#include "kernels/cuda/tile.cuh"

void ds4_cuda_tile_q4_k(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_tile_dispatch<DS4_DTYPE_Q4_K>(dev, p);
}

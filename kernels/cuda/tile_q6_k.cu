/* Tensor core products of Q6_K. */
#include "kernels/cuda/tile.cuh"

void ds4_cuda_tile_q6_k(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_tile_dispatch<DS4_DTYPE_Q6_K>(dev, p);
}

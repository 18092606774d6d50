/* Tensor core products of Q2_K. */
#include "kernels/cuda/tile.cuh"

void ds4_cuda_tile_q2_k(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_tile_dispatch<DS4_DTYPE_Q2_K>(dev, p);
}

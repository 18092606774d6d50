/* Tensor core products of Q4_0. */
#include "kernels/cuda/tile.cuh"

void ds4_cuda_tile_q4_0(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_tile_dispatch<DS4_DTYPE_Q4_0>(dev, p);
}

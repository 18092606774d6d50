/* Tensor core products of Q8_0. */
#include "kernels/cuda/tile.cuh"

void ds4_cuda_tile_q8_0(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_tile_dispatch<DS4_DTYPE_Q8_0>(dev, p);
}

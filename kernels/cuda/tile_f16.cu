/* Tensor core products of F16. */
#include "kernels/cuda/tile.cuh"

void ds4_cuda_tile_f16(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_tile_dispatch<DS4_DTYPE_F16>(dev, p);
}

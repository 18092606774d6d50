/* Tensor core products of F32. */
#include "kernels/cuda/tile.cuh"

void ds4_cuda_tile_f32(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_tile_dispatch<DS4_DTYPE_F32>(dev, p);
}

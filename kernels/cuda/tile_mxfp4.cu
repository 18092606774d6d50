/* Tensor core products of MXFP4. */
#include "kernels/cuda/tile.cuh"

void ds4_cuda_tile_mxfp4(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_tile_dispatch<DS4_DTYPE_MXFP4>(dev, p);
}

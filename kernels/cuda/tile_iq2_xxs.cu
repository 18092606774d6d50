/* Tensor core products of IQ2_XXS. */
#include "kernels/cuda/tile.cuh"

void ds4_cuda_tile_iq2_xxs(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_tile_dispatch<DS4_DTYPE_IQ2_XXS>(dev, p);
}

/* Experts of a prompt's chunk, stored as IQ2_XXS. */
#include "kernels/cuda/slab.cuh"

void ds4_cuda_slab_iq2_xxs(struct ds4_device *dev, const struct ds4_slab *a)
{
    ds4_slab_dispatch<DS4_DTYPE_IQ2_XXS>(dev, a);
}

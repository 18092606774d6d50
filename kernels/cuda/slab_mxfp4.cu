/* Experts of a prompt's chunk, stored as MXFP4. */
#include "kernels/cuda/slab.cuh"

void ds4_cuda_slab_mxfp4(struct ds4_device *dev, const struct ds4_slab *a)
{
    ds4_slab_dispatch<DS4_DTYPE_MXFP4>(dev, a);
}

/* Experts of a prompt's chunk, stored as Q8_0. */
#include "kernels/cuda/slab.cuh"

void ds4_cuda_slab_q8_0(struct ds4_device *dev, const struct ds4_slab *a)
{
    ds4_slab_dispatch<DS4_DTYPE_Q8_0>(dev, a);
}

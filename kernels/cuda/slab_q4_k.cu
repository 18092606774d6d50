/* Experts of a prompt's chunk, stored as Q4_K. */
#include "kernels/cuda/slab.cuh"

void ds4_cuda_slab_q4_k(struct ds4_device *dev, const struct ds4_slab *a)
{
    ds4_slab_dispatch<DS4_DTYPE_Q4_K>(dev, a);
}

/* Decode experts of IQ2_XXS. */
#include "kernels/cuda/experts.cuh"

void ds4_cuda_gate_iq2_xxs(struct ds4_device *dev, const struct ds4_experts *p)
{
    ds4_gate_run<DS4_DTYPE_IQ2_XXS>(dev, p);
}

void ds4_cuda_down_iq2_xxs(struct ds4_device *dev, const struct ds4_experts *p)
{
    ds4_down_run<DS4_DTYPE_IQ2_XXS>(dev, p);
}

/* Decode experts of Q8_0. */
#include "kernels/cuda/experts.cuh"

void ds4_cuda_gate_q8_0(struct ds4_device *dev, const struct ds4_experts *p)
{
    ds4_gate_run<DS4_DTYPE_Q8_0>(dev, p);
}

void ds4_cuda_down_q8_0(struct ds4_device *dev, const struct ds4_experts *p)
{
    ds4_down_run<DS4_DTYPE_Q8_0>(dev, p);
}

/* Decode experts of Q4_K. */
#include "kernels/cuda/experts.cuh"

void ds4_cuda_gate_q4_k(struct ds4_device *dev, const struct ds4_experts *p)
{
    ds4_gate_run<DS4_DTYPE_Q4_K>(dev, p);
}

void ds4_cuda_down_q4_k(struct ds4_device *dev, const struct ds4_experts *p)
{
    ds4_down_run<DS4_DTYPE_Q4_K>(dev, p);
}

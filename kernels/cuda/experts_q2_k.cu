/* Decode experts of Q2_K. */
#include "kernels/cuda/experts.cuh"

void ds4_cuda_gate_q2_k(struct ds4_device *dev, const struct ds4_experts *p)
{
    ds4_gate_run<DS4_DTYPE_Q2_K>(dev, p);
}

void ds4_cuda_down_q2_k(struct ds4_device *dev, const struct ds4_experts *p)
{
    ds4_down_run<DS4_DTYPE_Q2_K>(dev, p);
}

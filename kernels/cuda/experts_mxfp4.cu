/* Decode experts of MXFP4. */
#include "kernels/cuda/experts.cuh"

void ds4_cuda_gate_mxfp4(struct ds4_device *dev, const struct ds4_experts *p)
{
    ds4_gate_run<DS4_DTYPE_MXFP4>(dev, p);
}

void ds4_cuda_down_mxfp4(struct ds4_device *dev, const struct ds4_experts *p)
{
    ds4_down_run<DS4_DTYPE_MXFP4>(dev, p);
}

/* Products of Q8_0, attention, shared experts, head: one row streams, more go to the tensor units. */
#include "kernels/cuda/gemv.cuh"
#include "kernels/cuda/strip.cuh"

void ds4_cuda_exact_q8_0(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_gemv_run<DS4_DTYPE_Q8_0, false>(dev, p);
}

void ds4_cuda_int8_q8_0(struct ds4_device *dev, const struct ds4_product *p)
{
    if (p->n > 1 && ds4_strip_fit(p))
        ds4_strip_run<1>(dev, p);
    else
        ds4_gemv_run<DS4_DTYPE_Q8_0, true>(dev, p);
}

void ds4_cuda_digits_q8_0(struct ds4_device *dev, const struct ds4_product *p)
{
    ds4_strip_run<3>(dev, p);
}

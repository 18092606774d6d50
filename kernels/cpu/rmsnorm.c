/* RMS norm: y = w * (x * r), r = 1 / sqrt(mean(x^2) + eps) (step 9).
 *
 * f32 throughout with one rounding at the store; the mean is the lane sum of squares divided by d. */
#include "kernels/cpu/cpu.h"

#include <math.h>

struct job {
    struct ds4_device *dev;
    const struct ds4_rmsnorm_args *a;
    struct ds4_scratch scratch;
};

static void norm_row(void *ctx, int32_t t, int32_t thread)
{
    const struct job *job = ctx;
    const struct ds4_rmsnorm_args *a = job->a;
    int32_t d = a->x.shape[1];
    float *buf = ds4_scratch_of(&job->scratch, thread);
    const float *x = ds4_cpu_load(&a->x, t * a->x.stride[0], d, buf);
    float square, r;

    job->dev->simd->dot(x, d, x, 0, 1, &square);
    r = 1.0f / sqrtf(square / (float)d + a->eps);
    if (a->y.dtype == DS4_DTYPE_F32) {
        job->dev->simd->scale(x, r, a->w, d, (float *)a->y.data + t * a->y.stride[0]);
        return;
    }
    job->dev->simd->scale(x, r, a->w, d, buf);
    ds4_cpu_store(&a->y, t * a->y.stride[0], d, buf);
}

void ds4_cpu_rmsnorm(struct ds4_device *dev, const struct ds4_rmsnorm_args *a)
{
    struct ds4_need need = {.thread_bytes = (size_t)a->x.shape[1] * sizeof(float)};
    struct job job = {dev, a, ds4_cpu_scratch(dev, need)};

    assert(a->x.n_dim == 2 && a->y.n_dim == 2 && a->x.shape[1] == a->y.shape[1]);
    ds4_pool_run(dev->pool, a->x.shape[0], norm_row, &job);
}

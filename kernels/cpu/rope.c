/* Rotary positions over the tail of every head, with the optional per-head RMS of the query (step 9).
 *
 * The angle is (float)pos * freq rounded to f32, as the checkpoint's own code computes it; sine and
 * cosine are then exact to half an ulp.  One table per row of the step serves all of its heads. */
#include "kernels/cpu/cpu.h"

#include "kernels/cpu/math.h"

struct job {
    struct ds4_device *dev;
    const struct ds4_rope_args *a;
    struct ds4_scratch scratch;
    int32_t n_head;
    int32_t d_head;
    int64_t head_stride;
};

void ds4_cpu_rope_table(const struct ds4_rope *rope, int32_t pos, float *table)
{
    for (int32_t i = 0; i < rope->d_rope / 2; i++)
        ds4_sincosf((float)pos * rope->freq[i], &table[2 * i + 1], &table[2 * i]);
}

void ds4_cpu_rope_apply(const float *table, int32_t d_rope, bool inverse, float *x)
{
    for (int32_t i = 0; i < d_rope; i += 2) {
        float cosine = table[i], sine = inverse ? -table[i + 1] : table[i + 1];
        float x0 = x[i], x1 = x[i + 1];

        x[i] = x0 * cosine - x1 * sine;
        x[i + 1] = x0 * sine + x1 * cosine;
    }
}

static void rotate_token(void *ctx, int32_t t, int32_t thread)
{
    const struct job *job = ctx;
    const struct ds4_rope_args *a = job->a;
    float *table = ds4_scratch_of(&job->scratch, thread);
    int32_t d = job->d_head, d_rope = a->rope.d_rope;

    if (!ds4_cpu_active(a->batch, t))
        return;
    ds4_cpu_rope_table(&a->rope, a->batch->pos[t], table);
    for (int32_t h = 0; h < job->n_head; h++) {
        float *x = (float *)a->x.data + t * a->x.stride[0] + h * job->head_stride; /* [d_head] */

        if (a->unit_rms) {
            float square;

            job->dev->simd->dot(x, d, x, 0, 1, &square);
            job->dev->simd->scale(x, 1.0f / sqrtf(square / (float)d + a->eps), NULL, d, x);
        }
        ds4_cpu_rope_apply(table, d_rope, a->inverse, x + d - d_rope);
    }
}

void ds4_cpu_rope(struct ds4_device *dev, const struct ds4_rope_args *a)
{
    struct ds4_need need = {.thread_bytes = (size_t)a->rope.d_rope * sizeof(float)};
    bool heads = a->x.n_dim == 3; /* [n_tok, d_head] is a single head */
    struct job job = {.dev = dev,
                      .a = a,
                      .scratch = ds4_cpu_scratch(dev, need),
                      .n_head = heads ? a->x.shape[1] : 1,
                      .d_head = a->x.shape[heads ? 2 : 1],
                      .head_stride = heads ? a->x.stride[1] : 0};

    assert(a->x.dtype == DS4_DTYPE_F32 && a->x.shape[0] == a->batch->n_tok);
    assert(a->rope.d_rope <= job.d_head && a->rope.d_rope % 2 == 0);
    ds4_pool_run(dev->pool, a->batch->n_tok, rotate_token, &job);
}

void ds4_cpu_latent(struct ds4_device *dev, const struct ds4_latent_args *a)
{
    const struct ds4_rmsnorm_args q = {.x = a->q, .w = a->q_norm, .eps = a->eps, .y = a->q};
    const struct ds4_rmsnorm_args kv = {.x = a->kv, .w = a->kv_norm, .eps = a->eps, .y = a->kv};
    const struct ds4_rope_args rotate = {.batch = a->batch, .x = a->kv, .rope = a->rope};
    const struct ds4_round_args round = {.x = a->kv, .format = a->format, .d_rope = a->rope.d_rope};

    ds4_cpu_rmsnorm(dev, &q);
    ds4_cpu_rmsnorm(dev, &kv);
    ds4_cpu_rope(dev, &rotate);
    ds4_cpu_round(dev, &round);
}

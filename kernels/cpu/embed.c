/* Embedding: each token's row of the table, copied to all residual streams (step 8).
 *
 * Rows of inactive entries are left alone: their token ids may be anything. */
#include "kernels/cpu/cpu.h"

struct job {
    struct ds4_device *dev;
    const struct ds4_embed_args *a;
    struct ds4_scratch scratch;
};

static void embed_token(void *ctx, int32_t t, int32_t thread)
{
    const struct job *job = ctx;
    const struct ds4_embed_args *a = job->a;
    int32_t token = a->batch->token[t];
    float *row = ds4_scratch_of(&job->scratch, thread); /* [d] */

    if (!ds4_cpu_active(a->batch, t))
        return;
    assert(token >= 0 && token < a->w.n_row);
    job->dev->simd->dequant(a->w.dtype, ds4_weight_row(&a->w, 0, token), a->w.n_col, row);
    for (int32_t k = 0; k < a->x.shape[1]; k++)
        ds4_cpu_store(&a->x, t * a->x.stride[0] + k * a->x.stride[1], a->w.n_col, row);
}

void ds4_cpu_embed(struct ds4_device *dev, const struct ds4_embed_args *a)
{
    struct ds4_need need = {.thread_bytes = (size_t)a->w.n_col * sizeof(float)};
    struct job job = {dev, a, ds4_cpu_scratch(dev, need)};

    ds4_pool_run(dev->pool, a->batch->n_tok, embed_token, &job);
}

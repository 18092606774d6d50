/* Embedding and head (house list, steps 8 and 10; paper 2.1 and 2.5).
 *
 * The head runs only on rows that are sampled: its product is the largest of a decode step.  Streams
 * are collapsed here and nowhere else; stages hand over all of them. */
#include "worker/embed_head.h"

#include "worker/stage_state.h"

#include <assert.h>

void ds4_embed_forward(struct ds4_stage *st)
{
    struct ds4_embed_args a = {
        .batch = &st->batch, .w = st->weights.embed, .x = ds4_stage_residual(st)};

    st->backend->embed(st->dev, &a);
}

void ds4_head_forward(struct ds4_stage *st)
{
    const int32_t n_row = st->batch.n_out;
    const struct ds4_model_shape *m = &st->model;
    const struct ds4_head_weights *w = &st->weights.head;
    struct ds4_tensor h = ds4_tensor_2d(st->buf.head_h, DS4_DTYPE_F32, n_row, m->d_model);
    struct ds4_tensor logits = ds4_tensor_2d(st->buf.logits, DS4_DTYPE_F32, n_row, m->n_vocab);
    struct ds4_hyper_head_args collapse = {.x = ds4_stage_residual(st),
                                           .row = st->batch.out_row,
                                           .n_row = n_row,
                                           .fn = w->fn,
                                           .base = w->base,
                                           .scale = w->scale,
                                           .hyper_eps = m->hyper_eps,
                                           .rms_eps = m->rms_eps,
                                           .h = h};
    struct ds4_rmsnorm_args norm = {.x = h, .w = w->norm, .eps = m->rms_eps, .y = h};
    struct ds4_gemm_args out = {.w = w->out, .n_group = 1, .exact = true, .x = h, .y = logits};

    assert(n_row >= 1 && n_row <= st->plan.head_rows);
    st->backend->hyper_head(st->dev, &collapse);
    st->backend->rmsnorm(st->dev, &norm);
    st->backend->gemm(st->dev, &out);
}

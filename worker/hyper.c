/* Hyper-connections of one half (house list, step 9; paper 2.3 and 2.4).
 *
 * The coefficients are a function of the row itself and stay in f32 between read and write.  The first
 * index of comb is the source stream; transposing it is the classic silent error. */
#include "worker/hyper.h"

#include "worker/stage_state.h"

void ds4_hyper_read(struct ds4_stage *st, const struct ds4_hyper_weights *w, const float *norm,
                    bool write)
{
    const struct ds4_model_shape *m = &st->model;
    struct ds4_hyper_read_args a = {.x = ds4_stage_residual(st), /* [n, n_hyper, d_model] */
                                    .fn = w->fn,
                                    .base = w->base,
                                    .scale = w->scale,
                                    .sinkhorn_iters = m->sinkhorn_iters,
                                    .hyper_eps = m->hyper_eps,
                                    .rms_eps = m->rms_eps,
                                    .norm = norm,
                                    .u = ds4_stage_rows(st, st->buf.h, m->d_model),
                                    .post = st->buf.post,  /* [n, n_hyper] */
                                    .comb = st->buf.comb}; /* [n, n_hyper, n_hyper] */

    if (write)
        a.o = ds4_stage_rows(st, st->buf.y, m->d_model);
    st->backend->hyper_read(st->dev, &a);
}

void ds4_hyper_write(struct ds4_stage *st)
{
    struct ds4_hyper_write_args a = {.o = ds4_stage_rows(st, st->buf.y, st->model.d_model),
                                     .post = st->buf.post,
                                     .comb = st->buf.comb,
                                     .x = ds4_stage_residual(st)};

    st->backend->hyper_write(st->dev, &a);
}

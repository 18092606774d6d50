/* Mixture of experts of one layer (house list, step 9; paper 4).
 *
 * Hash layers take the experts from a table by token id, the others by score plus bias; the weights
 * come from the unbiased scores in both.  The shared expert has its own clamp. */
#include "worker/moe.h"

#include "common/fault.h"
#include "worker/stage_state.h"

void ds4_moe_forward(struct ds4_stage *st, int32_t l)
{
    const struct ds4_model_shape *m = &st->model;
    const struct ds4_layer_weights *w = &st->weights.layer[l];
    struct ds4_route_args route = {
        .batch = &st->batch,
        .logits = ds4_stage_rows(st, st->buf.route_logit, w->router.n_row), /* [n, n_expert] */
        .table = w->route_table,
        .bias = w->route_bias,
        .n_used = m->n_expert_used,
        .scale = m->route_scale,
        .id = st->buf.route_id,          /* [n, n_expert_used] */
        .weight = st->buf.route_weight}; /* [n, n_expert_used] */
    struct ds4_moe_args experts = {.batch = &st->batch,
                                   .x = ds4_stage_rows(st, st->buf.h, m->d_model),
                                   .id = st->buf.route_id,
                                   .weight = st->buf.route_weight,
                                   .n_used = m->n_expert_used,
                                   .gate = w->gate,
                                   .up = w->up,
                                   .down = w->down,
                                   .shared_gate = w->shared_gate,
                                   .shared_up = w->shared_up,
                                   .shared_down = w->shared_down,
                                   .clamp = w->clamp,
                                   .shared_clamp = w->shared_clamp,
                                   .y = ds4_stage_rows(st, st->buf.y, m->d_model)};

    ds4_stage_product(st, &w->router, st->buf.h, st->buf.route_logit, 1, true);
    st->backend->route(st->dev, &route);
    if (DS4_FAULT_POINT(EXPERT_OOB))
        ds4_stage_break_index(st, st->buf.route_id);
    if (l ==
        st->weights.n_layer - 1) { /* one layer speaks for the stage: a small launch per step */
        const struct ds4_spread_args spread = {.batch = &st->batch,
                                               .id = st->buf.route_id,
                                               .n_used = m->n_expert_used,
                                               .n_expert = w->router.n_row,
                                               .count = st->buf.spread};

        st->backend->spread(st->dev, &spread);
    }
    if (st->offload != NULL)
        ds4_offload_moe(st->offload, l, &experts);
    else
        st->backend->moe(st->dev, &experts);
}

/* One layer in paper order (house list, step 9).
 *
 * The residual X is carried in n_hyper parallel streams.  Each half mixes one row per token out of the
 * streams, norms it, transforms it and writes it back to all streams; that write is the next read's first
 * step, so that X is passed over once.  n = st->batch.n_tok. */
#include "worker/layer.h"

#include "worker/attention.h"
#include "worker/hyper.h"
#include "worker/moe.h"
#include "worker/stage_state.h"

void ds4_layer_forward(struct ds4_stage *st, int32_t l)
{
    const struct ds4_layer_weights *w = &st->weights.layer[l];

    /* A read takes the write before it along: y -> X -> h [n, d_model]. */
    ds4_hyper_read(st, &w->hyper_attention, w->attention_norm, l > 0);
    ds4_attention_forward(st, l); /* h -> y, appends to the cache */
    ds4_hyper_read(st, &w->hyper_experts, w->experts_norm, true);
    ds4_moe_forward(st, l); /* h -> y: route, experts, shared expert */
    if (l == st->weights.n_layer - 1)
        ds4_hyper_write(st); /* y -> X */
}

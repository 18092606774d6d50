/* Attention half of a layer: window and compressed rows under one softmax. */
#ifndef DS4_WORKER_ATTENTION_H
#define DS4_WORKER_ATTENTION_H

#include <stdint.h>

struct ds4_stage;

/* st->buf.h [n, d_model], normed -> st->buf.y [n, d_model].  Appends the rows of active entries to the
 * cache of layer `l` under the leases that ds4_kv_append checked. */
void ds4_attention_forward(struct ds4_stage *st, int32_t l);

#endif

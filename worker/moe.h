/* Experts half of a layer. */
#ifndef DS4_WORKER_MOE_H
#define DS4_WORKER_MOE_H

#include <stdint.h>

struct ds4_stage;

/* st->buf.h [n, d_model], normed -> st->buf.y [n, d_model]. */
void ds4_moe_forward(struct ds4_stage *st, int32_t l);

#endif

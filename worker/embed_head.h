/* The two ends of the model: token ids -> residual streams, residual streams -> logits. */
#ifndef DS4_WORKER_EMBED_HEAD_H
#define DS4_WORKER_EMBED_HEAD_H

#include <stdint.h>

struct ds4_stage;

/* First stage: st->batch.token -> st->buf.x, every stream a copy of the embedding. */
void ds4_embed_forward(struct ds4_stage *st);

/* Last stage: logits of n_row chosen rows of the step, row [n_row] their indices (host), n_row <=
 * plan.max_seqs -> st->host_logits [n_row, n_vocab].  Waits for the device. */
void ds4_head_forward(struct ds4_stage *st, const int32_t *row, int32_t n_row);

#endif

/* The two ends of the model: token ids -> residual streams, residual streams -> logits. */
#ifndef DS4_WORKER_EMBED_HEAD_H
#define DS4_WORKER_EMBED_HEAD_H

struct ds4_stage;

/* First stage: st->batch.token -> st->buf.x, every stream a copy of the embedding. */
void ds4_embed_forward(struct ds4_stage *st);

/* Last stage: logits of the step's out rows (at least one) -> st->buf.logits [n_out, n_vocab]. */
void ds4_head_forward(struct ds4_stage *st);

#endif

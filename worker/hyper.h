/* Hyper-connections: how a half of a layer reads from and writes to the residual streams. */
#ifndef DS4_WORKER_HYPER_H
#define DS4_WORKER_HYPER_H

#include <stdbool.h>

struct ds4_stage;
struct ds4_hyper_weights;

/* Mixes the streams of st->buf.x into one row per token, norms it with `norm` [d_model] and leaves it in
 * st->buf.h; keeps the write coefficients in st->buf.post and st->buf.comb for the next write.  `write`: a
 * ds4_hyper_write comes first. */
void ds4_hyper_read(struct ds4_stage *st, const struct ds4_hyper_weights *w, const float *norm,
                    bool write);

/* X_k = post_k * y + sum_j comb_jk X_j with the coefficients of the last read. */
void ds4_hyper_write(struct ds4_stage *st);

#endif

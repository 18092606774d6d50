/* One transformer layer over the rows of the step. */
#ifndef DS4_WORKER_LAYER_H
#define DS4_WORKER_LAYER_H

#include <stdint.h>

struct ds4_stage;

/* Transforms the residual st->buf.x in place and appends the rows' cache entries.  `l` counts the
 * stage's own layers, which come in order: what layer l adds to st->buf.x may be left in st->buf.y for
 * l + 1 to write; after the last layer nothing is.  Queued on the device. */
void ds4_layer_forward(struct ds4_stage *st, int32_t l);

#endif

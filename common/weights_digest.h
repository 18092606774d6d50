/* The identity of a model file: what tells two checkpoints, or two quantisations of one, apart. */
#ifndef DS4_COMMON_WEIGHTS_DIGEST_H
#define DS4_COMMON_WEIGHTS_DIGEST_H

#include "common/weights_file.h"

#include <stdint.h>

#define DS4_WEIGHTS_DIGEST_BYTES 16

/* XXH3-128 over the tensor table (name, type and shape of every tensor, ordered by name) and the first MiB
 * of at most DS4_WEIGHTS_SAMPLES tensors, evenly spread.  Independent of where the file lies
 * and how it is split; reads at most 64 MiB.  DS4_E_IO. */
#define DS4_WEIGHTS_SAMPLES 64
int ds4_weights_digest(const struct ds4_weights_file *wf, uint8_t digest[DS4_WEIGHTS_DIGEST_BYTES],
                       struct ds4_err *err) DS4_MUST_CHECK;

#endif

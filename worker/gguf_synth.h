/* Writes a synthetic model as a GGUF file. */
#ifndef DS4_WORKER_GGUF_SYNTH_H
#define DS4_WORKER_GGUF_SYNTH_H

#include "common/synth.h"

struct ds4_gguf_synth {
    const char *shape; /* "flash" | "tiny" */
    const char *quant; /* "q2" | "mxfp4" | "q8" */
    int32_t first_layer;
    int32_t last_layer; /* inclusive; -1 = the last of the shape */
    uint64_t seed;
};

/* Writes the layers to `path`, the embedding too if they begin at 0, the head if they end at the last.
 * A partial file keeps the shape's block_count and says what it holds in ds4.synth.first_layer and
 * last_layer.  The file appears under its name only when it is whole.  DS4_E_INVALID for a bad request,
 * DS4_E_IO for a full or failing disk. */
int ds4_gguf_synth_write(const struct ds4_gguf_synth *request, const char *path,
                         struct ds4_err *err) DS4_MUST_CHECK;

#endif

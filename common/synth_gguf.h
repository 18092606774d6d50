/* The header that a synthetic model has, or would have, as a GGUF file. */
#ifndef DS4_COMMON_SYNTH_GGUF_H
#define DS4_COMMON_SYNTH_GGUF_H

#include "common/buf.h"
#include "common/synth.h"

#define DS4_SYNTH_HEADER_MAX_BYTES ((size_t)128 << 20)

/* Appends the header of a file with the tensors of `part` to an empty buffer of at most
 * DS4_SYNTH_HEADER_MAX_BYTES, padded so that the data begins at its end; *data_bytes is the padded size
 * of the data.  Tensors lie in the order of ds4_model_each_tensor, each at the next multiple of the
 * alignment.  A part of the layers keeps the shape's block_count and says what it holds in
 * ds4.synth.first_layer and last_layer.  DS4_E_NOMEM. */
int ds4_synth_header(const struct ds4_synth *synth, const struct ds4_model_part *part,
                     struct ds4_buf *out, uint64_t *data_bytes, struct ds4_err *err) DS4_MUST_CHECK;

/* Blocks of a tensor (scalar types: values); n rounded up to the alignment of tensors. */
uint64_t ds4_synth_blocks(const struct ds4_tensor_want *want, enum ds4_dtype dtype);
uint64_t ds4_synth_align(uint64_t n);

#endif

/* Synthetic models: shapes, the recipe of types, and weights from a counter-based generator.
 *
 * Every block of a tensor is a pure function of (seed, tensor name, block index), so a file, a layer or a
 * single row can be made anywhere, in any order, and is the same.  Values have the spread that keeps
 * activations near one, and the router prefers no expert. */
#ifndef DS4_WORKER_SYNTH_H
#define DS4_WORKER_SYNTH_H

#include "common/model.h"
#include "common/model_tensors.h"

enum ds4_synth_quant { DS4_SYNTH_Q2, DS4_SYNTH_MXFP4, DS4_SYNTH_Q8 };

/* "flash" or "tiny"; "q2", "mxfp4" or "q8".  -1 with DS4_E_INVALID and the choices. */
int ds4_synth_shape(const char *name, struct ds4_model_shape *out,
                    struct ds4_err *err) DS4_MUST_CHECK;
int ds4_synth_quant(const char *name, enum ds4_synth_quant *out,
                    struct ds4_err *err) DS4_MUST_CHECK;

/* The type a tensor of this class has in the recipe. */
enum ds4_dtype ds4_synth_dtype(enum ds4_tensor_class class, enum ds4_synth_quant quant);

/* Writes blocks [first, first + n) of the tensor (scalar types: values) to dst, n * block_bytes bytes.
 * Never fails, allocates nothing. */
void ds4_synth_fill(uint64_t seed, const struct ds4_tensor_want *want, enum ds4_dtype dtype,
                    uint64_t first, uint64_t n, uint8_t *dst);

#endif

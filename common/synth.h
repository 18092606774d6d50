/* Synthetic models: shapes, the recipe of types, and weights from a counter-based generator.
 *
 * Every block of a tensor is a pure function of (seed, tensor name, block index), so a file, a layer or a
 * single row can be made anywhere, in any order, and is the same.  Values have the spread that keeps
 * activations near one, and the router prefers no expert. */
#ifndef DS4_COMMON_SYNTH_H
#define DS4_COMMON_SYNTH_H

#include "common/model.h"
#include "common/model_tensors.h"
#include "common/synth_block.h"

#define DS4_SYNTH_PREFIX "synth:"

enum ds4_synth_quant { DS4_SYNTH_Q2, DS4_SYNTH_MXFP4, DS4_SYNTH_Q8 };

/* A synthetic model, whole. */
struct ds4_synth {
    struct ds4_model_shape shape;
    enum ds4_synth_quant quant;
    uint64_t seed;
};

/* True for paths that name a synthetic model instead of a file: "synth:SHAPE:QUANT:SEED". */
bool ds4_synth_is_path(const char *path);
/* Reads such a path.  -1 with DS4_E_INVALID naming the part that is wrong, and the choices. */
int ds4_synth_parse(const char *path, struct ds4_synth *out, struct ds4_err *err) DS4_MUST_CHECK;

/* "flash" or "tiny"; "q2", "mxfp4" or "q8".  -1 with DS4_E_INVALID and the choices. */
int ds4_synth_shape(const char *name, struct ds4_model_shape *out,
                    struct ds4_err *err) DS4_MUST_CHECK;
int ds4_synth_quant(const char *name, enum ds4_synth_quant *out,
                    struct ds4_err *err) DS4_MUST_CHECK;
const char *ds4_synth_quant_name(enum ds4_synth_quant quant);

/* The type a tensor of this class has in the recipe. */
enum ds4_dtype ds4_synth_dtype(enum ds4_tensor_class class, enum ds4_synth_quant quant);

/* What ds4_synth_fill needs to make a tensor. */
void ds4_synth_recipe_of(uint64_t seed, const struct ds4_tensor_want *want, enum ds4_dtype dtype,
                         struct ds4_synth_recipe *out);

#endif

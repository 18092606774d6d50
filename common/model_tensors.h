/* The tensor catalogue: what every layer, the embedding and the head must have in a model file.
 *
 * Names and shapes follow from struct ds4_model_shape alone; the loader checks files against it and
 * ds4-gguf writes files from it. */
#ifndef DS4_COMMON_MODEL_TENSORS_H
#define DS4_COMMON_MODEL_TENSORS_H

#include "common/model.h"
#include "common/weights_file.h"

enum ds4_tensor_class {
    DS4_CLASS_EMBED,
    DS4_CLASS_HEAD,
    DS4_CLASS_NORM,       /* RMS norm gains */
    DS4_CLASS_SINK,       /* attention sinks */
    DS4_CLASS_HYPER_FN,   /* hyper-connection mixers */
    DS4_CLASS_HYPER_VEC,  /* their bases and scales */
    DS4_CLASS_ATTENTION,  /* q, kv and output projections */
    DS4_CLASS_COMPRESSOR, /* main and indexer compressors: kv, gate */
    DS4_CLASS_POSITION,   /* their position bias (ape) */
    DS4_CLASS_INDEXER,    /* q_b, proj */
    DS4_CLASS_ROUTER,     /* gate_inp */
    DS4_CLASS_ROUTER_BIAS,
    DS4_CLASS_HASH, /* token id -> expert ids */
    DS4_CLASS_GATE_UP,
    DS4_CLASS_DOWN,
    DS4_CLASS_SHARED,
    DS4_N_CLASSES
};

/* "embedding", "head", "norm", ... */
const char *ds4_tensor_class_name(enum ds4_tensor_class class);

struct ds4_tensor_want {
    char name[DS4_TENSOR_NAME_BYTES];
    enum ds4_tensor_class class;
    int32_t layer;    /* -1 for the top level */
    int32_t n_expert; /* of that layer; 0 at the top level */
    int32_t n_dims;
    int64_t ne[DS4_GGUF_MAX_DIMS]; /* unused dims are 1 */
};

/* Calls fn for every tensor of the part: embedding, layers in order, then norm, hyper head and head.
 * Stops at the first non-zero return and returns it. */
typedef int (*ds4_tensor_want_fn)(void *arg, const struct ds4_tensor_want *want);
int ds4_model_each_tensor(const struct ds4_model_shape *shape, const struct ds4_model_part *part,
                          ds4_tensor_want_fn fn, void *arg);

/* The classification of a name as it stands in files; -1 if no class has it. */
int ds4_tensor_class_of(const char *name, enum ds4_tensor_class *out);

/* Checks that the file has every tensor of the part with the right shape and a type we compute with,
 * that gate and up of a layer share a type, and that hash tables name existing experts.  The first
 * error ends it: -1 with DS4_E_INVALID naming the tensor, what it is and what was expected. */
int ds4_model_require(const struct ds4_weights_file *wf, const struct ds4_model_shape *shape,
                      const struct ds4_model_part *part, struct ds4_err *err) DS4_MUST_CHECK;

/* The same, but reports every finding and goes on; returns their number. */
typedef void (*ds4_finding_fn)(void *arg, const struct ds4_err *finding);
int32_t ds4_model_check_tensors(const struct ds4_weights_file *wf,
                                const struct ds4_model_shape *shape,
                                const struct ds4_model_part *part, ds4_finding_fn report,
                                void *arg);

#endif

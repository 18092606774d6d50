/* The shape of a model as data: everything the forward pass needs to know besides the weights.
 *
 * Shapes come from the file, never from constants: a value is refused when the product cannot compute
 * it or when it contradicts another value or a tensor, not because it differs from V4 Flash.  Also
 * here: the kind of each layer, the partition of layers into stages, and which release a file is. */
#ifndef DS4_COMMON_MODEL_H
#define DS4_COMMON_MODEL_H

#include "common/choices.h"
#include "common/err.h"

#include <stdbool.h>
#include <stdint.h>

struct ds4_weights_file; /* common/weights_file.h */

#define DS4_MODEL_ARCH       "deepseek4"
#define DS4_MODEL_ARCH_V41   "deepseek41"
#define DS4_MAX_LAYERS       128
#define DS4_MAX_STAGES       64
#define DS4_MAX_HYPER        8
#define DS4_MODEL_NAME_BYTES 128

#define DS4_RATIO_WINDOW 0   /* values of compress_ratios: no compression */
#define DS4_RATIO_CSA    4   /* overlapping groups, selected by the indexer */
#define DS4_RATIO_HCA    128 /* plain groups, all visible */

#define DS4_GATING_SQRT_SOFTPLUS 4 /* the one expert_gating_func that V4 has */

enum ds4_layer_kind { DS4_LAYER_WINDOW, DS4_LAYER_CSA, DS4_LAYER_HCA };

/* Which layers of a model, and whether the embedding and the head belong to them. */
struct ds4_model_part {
    int32_t first_layer;
    int32_t end_layer; /* one past the last */
    bool embed;
    bool head; /* with the final norm and the head's hyper-connection */
};

struct ds4_model_shape {
    char name[DS4_MODEL_NAME_BYTES]; /* general.name, perhaps cut; "" if absent */
    struct ds4_model_part present; /* what the file holds: everything, but for synthesised parts */

    int32_t n_layer; /* without next-token-prediction blocks */
    int32_t n_nextn; /* such blocks the file announces; its tensors may lack them */
    int32_t n_vocab;
    int32_t d_model;
    int32_t n_head;
    int32_t d_head;
    int32_t d_rope; /* the last d_rope of d_head dims rotate */
    int32_t q_rank;
    int32_t o_rank;  /* per output group */
    int32_t n_group; /* output groups; n_head / n_group heads each */
    int32_t window_tok;
    int32_t context_tok; /* trained context */

    int32_t n_index_head;
    int32_t d_index;
    int32_t index_topk;

    int32_t n_hyper; /* residual streams */
    int32_t sinkhorn_iters;
    float hyper_eps;
    float rms_eps;

    float rope_base;          /* layers with ratio 0: no scaling */
    float compress_rope_base; /* the others, with YaRN */
    float yarn_factor;
    int32_t yarn_orig_tok;
    float yarn_beta_fast;
    float yarn_beta_slow;

    int32_t n_expert_used;
    int32_t n_shared;
    int32_t d_expert;
    int32_t n_hash_layer; /* layers [0, n_hash_layer) route by token id */
    float route_scale;

    int32_t ratio[DS4_MAX_LAYERS];      /* DS4_RATIO_* */
    int32_t n_expert[DS4_MAX_LAYERS];   /* pruned files differ by layer */
    float clamp[DS4_MAX_LAYERS];        /* SwiGLU limit of routed experts */
    float clamp_shared[DS4_MAX_LAYERS]; /* of the shared expert */
};

/* Reads and checks the metadata: required keys, ranges, consistency, compress ratios, and the
 * vocabulary if the file has one.  DS4_E_INVALID names the key and the value.  Tensors are checked by
 * ds4_model_require (common/model_tensors.h). */
int ds4_model_read(const struct ds4_weights_file *wf, struct ds4_model_shape *shape,
                   struct ds4_err *err) DS4_MUST_CHECK;

/* The vocabulary in the metadata: n_vocab tokens, types and merges that fit, special ids inside.
 * -1 with DS4_E_INVALID also when it is missing. */
int ds4_model_check_vocab(const struct ds4_weights_file *wf, int32_t n_vocab,
                          struct ds4_err *err) DS4_MUST_CHECK;

static inline enum ds4_layer_kind ds4_model_layer_kind(const struct ds4_model_shape *shape,
                                                       int32_t l)
{
    if (shape->ratio[l] == DS4_RATIO_WINDOW)
        return DS4_LAYER_WINDOW;
    return shape->ratio[l] == DS4_RATIO_CSA ? DS4_LAYER_CSA : DS4_LAYER_HCA;
}

/* Width of a compressor's projection in units of its row: overlapping groups carry two halves. */
static inline int32_t ds4_model_compressor_width(int32_t ratio)
{
    return ratio == DS4_RATIO_CSA ? 2 : 1;
}

static inline struct ds4_model_part ds4_model_all(const struct ds4_model_shape *shape)
{
    struct ds4_model_part part = {0, shape->n_layer, true, true};

    return part;
}

/* ---- partition: layers per stage, in order ----------------------------------------------------- */

struct ds4_partition {
    int32_t n_stage;
    int32_t n_layer[DS4_MAX_STAGES];
};

/* "15,15,13", with or without braces and blanks. */
int ds4_partition_parse(const char *text, struct ds4_partition *out,
                        struct ds4_err *err) DS4_MUST_CHECK;
/* From a list, as settings hold it. */
int ds4_partition_set(const int32_t *n_layer, int32_t n_stage, struct ds4_partition *out,
                      struct ds4_err *err) DS4_MUST_CHECK;
/* Every stage at least one layer, and n_layer in all; the message has the sum and what was expected. */
int ds4_partition_check(const struct ds4_partition *p, int32_t n_layer,
                        struct ds4_err *err) DS4_MUST_CHECK;
/* As even as possible, earlier stages take the rest: 43 over 4 is 11,11,11,10. */
int ds4_partition_even(int32_t n_layer, int32_t n_stage, struct ds4_partition *out,
                       struct ds4_err *err) DS4_MUST_CHECK;
/* The part of one stage; the first has the embedding, the last the head. */
struct ds4_model_part ds4_partition_part(const struct ds4_partition *p, int32_t stage);

/* ---- release: which prompt encoder a checkpoint was trained with ------------------------------- */

/* "", "v4_preview", "v4_0731", "v41". */
const char *ds4_release_name(enum ds4_release release);

/* What the file itself says, UNSET if it says nothing; *why (may be NULL) becomes a static text like
 * "general.name contains \"0731\"".  -1 with DS4_E_INVALID if it contradicts itself. */
int ds4_model_release_of(const struct ds4_weights_file *wf, enum ds4_release *release,
                         const char **why, struct ds4_err *err) DS4_MUST_CHECK;

/* The release to serve: the file may settle it, confirm `configured`, or contradict it.  -1 with
 * DS4_E_INVALID and the choices when it contradicts, or when neither says anything. */
int ds4_model_release(const struct ds4_weights_file *wf, enum ds4_release configured,
                      enum ds4_release *release, struct ds4_err *err) DS4_MUST_CHECK;

#endif

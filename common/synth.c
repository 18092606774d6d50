/* Weights without a checkpoint, for benchmarks and tests at full size.
 *
 * Each tensor has a key (XXH3 of its name under the seed); block i draws from splitmix64 started at a
 * place that follows from key and i, so blocks are independent of each other.  Quantised blocks are
 * drawn directly: random codes under a scale chosen from the root mean square of the code set, so that
 * a weight's deviation is gain / sqrt(row length).  No encoder, no f32 copy. */
#include "common/synth.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

/* ---- shapes ------------------------------------------------------------------------------------ */

struct shape_row {
    const char *name;
    const char *title; /* general.name */
    int32_t n_layer, n_vocab, d_model, n_head, d_head, d_rope, q_rank, o_rank, n_group, window_tok;
    int32_t context_tok, n_index_head, d_index, index_topk, yarn_orig_tok;
    int32_t n_expert, n_expert_used, d_expert, n_hash_layer;
    float clamp;
};

/* Flash: the checkpoint's configuration.  Tiny: the test model's. */
static const struct shape_row shapes[] = {
    {"flash", "synthetic V4 Flash",
     43,      129280,
     4096,    64,
     512,     64,
     1024,    1024,
     8,       128,
     1048576, 64,
     128,     512,
     65536,   256,
     6,       2048,
     3,       10},
    {"tiny", "synthetic ds4-tiny",
     8,      4096,
     256,    8,
     64,     16,
     256,    128,
     2,      128,
     65536,  4,
     32,     64,
     4096,   8,
     3,      256,
     3,      4},
};

int ds4_synth_shape(const char *name, struct ds4_model_shape *out, struct ds4_err *err)
{
    const struct shape_row *row = NULL;

    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        if (strcmp(name, shapes[i].name) == 0)
            row = &shapes[i];
    }
    if (row == NULL)
        return ds4_fail(err, DS4_E_INVALID, "shape \"%.32s\" must be flash or tiny", name);
    *out = (struct ds4_model_shape){
        .n_layer = row->n_layer,
        .n_vocab = row->n_vocab,
        .d_model = row->d_model,
        .n_head = row->n_head,
        .d_head = row->d_head,
        .d_rope = row->d_rope,
        .q_rank = row->q_rank,
        .o_rank = row->o_rank,
        .n_group = row->n_group,
        .window_tok = row->window_tok,
        .context_tok = row->context_tok,
        .n_index_head = row->n_index_head,
        .d_index = row->d_index,
        .index_topk = row->index_topk,
        .n_hyper = 4,
        .sinkhorn_iters = 20,
        .hyper_eps = 1e-6f,
        .rms_eps = 1e-6f,
        .rope_base = 10000,
        .compress_rope_base = 160000,
        .yarn_factor = 16,
        .yarn_orig_tok = row->yarn_orig_tok,
        .yarn_beta_fast = 32,
        .yarn_beta_slow = 1,
        .n_expert_used = row->n_expert_used,
        .n_shared = 1,
        .d_expert = row->d_expert,
        .n_hash_layer = row->n_hash_layer,
        .route_scale = 1.5f,
    };
    memcpy(out->name, row->title, strlen(row->title));
    for (int32_t l = 0; l < row->n_layer; l++) {
        /* Two plain layers, then the compressed kinds take turns. */
        out->ratio[l] = l < 2 ? DS4_RATIO_WINDOW : l % 2 == 0 ? DS4_RATIO_CSA : DS4_RATIO_HCA;
        out->n_expert[l] = row->n_expert;
        out->clamp[l] = row->clamp;
        out->clamp_shared[l] = row->clamp;
    }
    out->present = ds4_model_all(out);
    return 0;
}

static const char *const quant_names[] = {"q2", "mxfp4", "q8"}; /* in enum order */

int ds4_synth_quant(const char *name, enum ds4_synth_quant *out, struct ds4_err *err)
{
    for (size_t i = 0; i < sizeof(quant_names) / sizeof(quant_names[0]); i++) {
        if (strcmp(name, quant_names[i]) == 0) {
            *out = (enum ds4_synth_quant)i;
            return 0;
        }
    }
    return ds4_fail(err, DS4_E_INVALID, "quant \"%.32s\" must be q2, mxfp4 or q8", name);
}

/* The types of the published files that one-machine engines validate. */
enum ds4_dtype ds4_synth_dtype(enum ds4_tensor_class class, enum ds4_synth_quant quant)
{
    switch (class) {
    case DS4_CLASS_EMBED:
    case DS4_CLASS_HYPER_FN:
    case DS4_CLASS_COMPRESSOR:
    case DS4_CLASS_POSITION:
    case DS4_CLASS_INDEXER:
    case DS4_CLASS_ROUTER:
        return DS4_DTYPE_F16;
    case DS4_CLASS_HEAD:
    case DS4_CLASS_ATTENTION:
    case DS4_CLASS_SHARED:
        return DS4_DTYPE_Q8_0;
    case DS4_CLASS_GATE_UP:
    case DS4_CLASS_DOWN:
        if (quant == DS4_SYNTH_MXFP4)
            return DS4_DTYPE_MXFP4;
        if (quant == DS4_SYNTH_Q8)
            return DS4_DTYPE_Q8_0;
        return class == DS4_CLASS_DOWN ? DS4_DTYPE_Q2_K : DS4_DTYPE_IQ2_XXS;
    case DS4_CLASS_HASH:
        return DS4_DTYPE_I32;
    case DS4_CLASS_NORM:
    case DS4_CLASS_SINK:
    case DS4_CLASS_HYPER_VEC:
    case DS4_CLASS_ROUTER_BIAS:
    case DS4_N_CLASSES:
        break;
    }
    return DS4_DTYPE_F32;
}

/* ---- recipes ----------------------------------------------------------------------------------- */

#define RMS_E2M1    2.926f /* the sixteen e2m1 values */
#define RMS_UNIFORM 0.57735f

/* Centre and half-width of the uniform values of a scalar tensor. */
static void set_spread(const struct ds4_tensor_want *want, struct ds4_synth_recipe *r)
{
    r->centre = 0;
    switch (want->class) {
    case DS4_CLASS_NORM:
        r->centre = 1;
        r->half = 0.1f;
        return;
    case DS4_CLASS_SINK:
    case DS4_CLASS_EMBED:
        r->half = 1;
        return;
    case DS4_CLASS_HYPER_VEC: /* bases near 0, scales (ne 3 or 1) well above it */
        r->centre = want->ne[0] == 3 || want->ne[0] == 1 ? 0.5f : 0;
        r->half = r->centre > 0 ? 0.1f : 0.5f;
        return;
    case DS4_CLASS_POSITION:
        r->half = 0.5f;
        return;
    case DS4_CLASS_ROUTER_BIAS: /* below the spread of sqrt(softplus): no expert wins by it */
        r->half = 0.02f;
        return;
    default: /* deviation 1 / sqrt(row) */
        r->half = 1 / (RMS_UNIFORM * sqrtf((float)want->ne[0]));
        return;
    }
}

/* Scale bytes whose mean square is target^2: the power of two below it, or the one above. */
static void set_e8m0(float target, struct ds4_synth_recipe *r)
{
    int exponent;
    float fraction = frexpf(target, &exponent) * 2; /* in [1, 2), target = fraction * 2^(e - 1) */

    r->e8m0 = (uint32_t)(exponent - 1 + 127);
    r->above = (fraction * fraction - 1) / 3;
}

void ds4_synth_recipe_of(uint64_t seed, const struct ds4_tensor_want *want, enum ds4_dtype dtype,
                         struct ds4_synth_recipe *out)
{
    /* Logits a little wider than one, so that sampling has something to choose. */
    float gain = want->class == DS4_CLASS_HEAD ? 2 : 1;

    *out = (struct ds4_synth_recipe){
        .key = XXH3_64bits_withSeed(want->name, strlen(want->name), seed),
        .dtype = dtype,
        .block_bytes = (uint32_t)ds4_dtype_info(dtype)->block_bytes,
        .deviation = gain / sqrtf((float)want->ne[0]),
        .n_used = (uint32_t)want->ne[0],
        .n_expert = (uint32_t)want->n_expert,
    };
    set_spread(want, out);
    set_e8m0(out->deviation / RMS_E2M1, out);
}

/* ---- names ------------------------------------------------------------------------------------- */

bool ds4_synth_is_path(const char *path)
{
    return strncmp(path, DS4_SYNTH_PREFIX, strlen(DS4_SYNTH_PREFIX)) == 0;
}

/* The word up to the next colon into out, cut to its size; returns what follows, NULL without a colon. */
static const char *take_word(const char *p, char *out, size_t cap)
{
    size_t n = strcspn(p, ":");

    snprintf(out, cap, "%.*s", (int)(n < cap ? n : cap - 1), p);
    return p[n] == ':' ? p + n + 1 : NULL;
}

int ds4_synth_parse(const char *path, struct ds4_synth *out, struct ds4_err *err)
{
    const char *p = path + strlen(DS4_SYNTH_PREFIX);
    char shape[40] = "";
    char quant[40] = "";
    uint64_t seed = 0;

    if (!ds4_synth_is_path(path))
        return ds4_fail(err, DS4_E_INVALID, "\"%.64s\" does not begin with " DS4_SYNTH_PREFIX,
                        path);
    p = take_word(p, shape, sizeof(shape));
    if (p != NULL)
        p = take_word(p, quant, sizeof(quant));
    if (p == NULL || *p == '\0')
        return ds4_fail(err, DS4_E_INVALID,
                        "model \"%.64s\" must be " DS4_SYNTH_PREFIX "SHAPE:QUANT:SEED", path);
    for (; *p >= '0' && *p <= '9'; p++) {
        if (seed > (UINT64_MAX - (uint64_t)(*p - '0')) / 10)
            break;
        seed = seed * 10 + (uint64_t)(*p - '0');
    }
    if (*p != '\0')
        return ds4_fail(err, DS4_E_INVALID, "model \"%.64s\": the seed must be a number below 2^64",
                        path);
    out->seed = seed;
    if (ds4_synth_shape(shape, &out->shape, err) != 0 ||
        ds4_synth_quant(quant, &out->quant, err) != 0)
        return ds4_err_wrap(err, "model \"%.64s\"", path);
    return 0;
}

const char *ds4_synth_quant_name(enum ds4_synth_quant quant)
{
    return quant_names[quant];
}

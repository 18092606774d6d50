/* Weights without a checkpoint, for benchmarks and tests at full size.
 *
 * Each tensor has a key (XXH3 of its name under the seed); block i draws from splitmix64 started at
 * key + i, so blocks are independent of each other.  Quantised blocks are drawn directly: random codes
 * under a scale chosen from the root mean square of the code set, so that a weight's deviation is
 * gain / sqrt(row length).  No encoder, no f32 copy. */
#include "worker/synth.h"

#include <math.h>
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

int ds4_synth_quant(const char *name, enum ds4_synth_quant *out, struct ds4_err *err)
{
    static const char *const names[] = {"q2", "mxfp4", "q8"}; /* in enum order */

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (strcmp(name, names[i]) == 0) {
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

/* ---- generator --------------------------------------------------------------------------------- */

/* Root mean squares of a uniformly drawn code. */
#define RMS_I8      73.9f  /* -128..127 */
#define RMS_E2M1    2.926f /* the sixteen e2m1 values */
#define RMS_IQ2     427.0f /* (2 s + 1) over s = 0..15 is 18.47, the codebook's magnitudes 23.12 */
#define RMS_Q2_K    10.15f /* s over 1..15 is 9.07 (15 twice), (v - 1.5) over 0..3 is 1.118 */
#define RMS_UNIFORM 0.57735f

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* Uniform in [-1, 1), from 24 bits. */
static float next_uniform(uint64_t *state)
{
    return (float)(next_random(state) >> 40) * 0x1p-23f - 1.0f;
}

static void store_u16(uint8_t *dst, uint16_t value)
{
    dst[0] = (uint8_t)value;
    dst[1] = (uint8_t)(value >> 8);
}

static void store_u32(uint8_t *dst, uint32_t value)
{
    store_u16(dst, (uint16_t)value);
    store_u16(dst + 2, (uint16_t)(value >> 16));
}

static void random_bytes(uint64_t *state, uint8_t *dst, size_t n)
{
    uint64_t bits;
    size_t part;

    for (size_t i = 0; i < n; i += part) {
        bits = next_random(state);
        part = n - i < sizeof(bits) ? n - i : sizeof(bits);
        for (size_t b = 0; b < part; b++)
            dst[i + b] = (uint8_t)(bits >> (8 * b));
    }
}

/* Centre and half-width of the uniform values of a scalar tensor. */
struct spread {
    float centre;
    float half;
};

static struct spread spread_of(const struct ds4_tensor_want *want)
{
    float by_row = 1 / (RMS_UNIFORM * sqrtf((float)want->ne[0])); /* deviation 1 / sqrt(row) */

    switch (want->class) {
    case DS4_CLASS_NORM:
        return (struct spread){1, 0.1f};
    case DS4_CLASS_SINK:
        return (struct spread){0, 1};
    case DS4_CLASS_HYPER_VEC: /* bases near 0, scales (ne 3 or 1) well above it */
        return want->ne[0] == 3 || want->ne[0] == 1 ? (struct spread){0.5f, 0.1f}
                                                    : (struct spread){0, 0.5f};
    case DS4_CLASS_POSITION:
        return (struct spread){0, 0.5f};
    case DS4_CLASS_ROUTER_BIAS: /* below the spread of sqrt(softplus): no expert wins by it */
        return (struct spread){0, 0.02f};
    case DS4_CLASS_EMBED:
        return (struct spread){0, 1};
    default:
        return (struct spread){0, by_row};
    }
}

/* Experts of token t: distinct, evenly spread (start and stride are drawn per token). */
static int32_t hash_entry(uint64_t key, uint64_t index, const struct ds4_tensor_want *want,
                          int32_t n_expert)
{
    uint64_t n_used = (uint64_t)want->ne[0];
    uint64_t state = key + index / n_used;
    uint64_t start = next_random(&state) % (uint64_t)n_expert;
    uint64_t stride = 1 + next_random(&state) % ((uint64_t)n_expert / n_used);

    return (int32_t)((start + index % n_used * stride) % (uint64_t)n_expert);
}

/* A scale byte whose mean square is target^2: the power of two below it, or the one above. */
static uint8_t pick_e8m0(uint64_t *state, float target)
{
    int exponent;
    float fraction = frexpf(target, &exponent) * 2; /* in [1, 2), target = fraction * 2^(e - 1) */
    float p_above = (fraction * fraction - 1) / 3;
    bool above = (float)(next_random(state) >> 40) * 0x1p-24f < p_above;

    return (uint8_t)(exponent - 1 + 127 + (above ? 1 : 0));
}

static void fill_block(uint64_t *state, const struct ds4_tensor_want *want, enum ds4_dtype dtype,
                       float deviation, uint8_t *dst)
{
    size_t n = (size_t)ds4_dtype_info(dtype)->block_bytes;
    float wobble = 1 + 0.25f * next_uniform(state); /* real scales differ from block to block */
    struct spread spread;

    switch (dtype) {
    case DS4_DTYPE_Q8_0:
        random_bytes(state, dst + 2, n - 2);
        store_u16(dst, ds4_f16_from_f32(deviation * wobble / RMS_I8));
        return;
    case DS4_DTYPE_IQ2_XXS: /* y = d / 8 * (2 s + 1) * magnitude */
        random_bytes(state, dst + 2, n - 2);
        store_u16(dst, ds4_f16_from_f32(deviation * wobble * 8 / RMS_IQ2));
        return;
    case DS4_DTYPE_Q2_K: /* equal nibbles and dmin = 1.5 d centre the four levels on zero */
        random_bytes(state, dst, n - 4);
        for (int g = 0; g < 16; g++) {
            uint8_t s = dst[g] % 15 + 1;

            dst[g] = (uint8_t)(s | s << 4);
        }
        store_u16(dst + 80, ds4_f16_from_f32(deviation * wobble / RMS_Q2_K));
        store_u16(dst + 82, ds4_f16_from_f32(1.5f * deviation * wobble / RMS_Q2_K));
        return;
    case DS4_DTYPE_MXFP4:
        random_bytes(state, dst + 1, n - 1);
        dst[0] = pick_e8m0(state, deviation / RMS_E2M1);
        return;
    default:
        break;
    }
    spread = spread_of(want);
    spread.centre += spread.half * next_uniform(state);
    if (dtype == DS4_DTYPE_F32)
        store_u32(dst, ds4_bits_from_f32(spread.centre));
    else
        store_u16(dst, ds4_f16_from_f32(spread.centre));
}

void ds4_synth_fill(uint64_t seed, const struct ds4_tensor_want *want, enum ds4_dtype dtype,
                    uint64_t first, uint64_t n, uint8_t *dst)
{
    uint64_t key = XXH3_64bits_withSeed(want->name, strlen(want->name), seed);
    size_t block_bytes = (size_t)ds4_dtype_info(dtype)->block_bytes;
    /* Logits a little wider than one, so that sampling has something to choose. */
    float gain = want->class == DS4_CLASS_HEAD ? 2 : 1;
    float deviation = gain / sqrtf((float)want->ne[0]);

    for (uint64_t i = first; i < first + n; i++) {
        uint64_t state =
            key + i * UINT64_C(0xd1342543de82ef95); /* odd: blocks never share a start */

        if (dtype == DS4_DTYPE_I32)
            store_u32(dst, (uint32_t)hash_entry(key, i, want, want->n_expert));
        else
            fill_block(&state, want, dtype, deviation, dst);
        dst += block_bytes;
    }
}

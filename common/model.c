/* Reads a model's shape from metadata and decides what is supported.
 *
 * One table per kind of key says where it goes and its range; what ties values together is checked
 * afterwards in words of its own.  Ranges are what the code can compute (an int32 product stays an
 * int32), not what Flash happens to have.  Sources: the key list of the GGUF converters and the
 * checkpoint's own configuration. */
#include "common/model.h"

#include "common/log.h"
#include "common/weights_file.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define KEY_BYTES 128

#define MAX_DIM          65536
#define MAX_HEADS        1024
#define MAX_VOCAB        (1 << 24)
#define MAX_TOK          (1 << 30)
#define MAX_EXPERTS      4096
#define MAX_EXPERTS_USED 64
#define MAX_TOPK         65536
#define MAX_SINKHORN     1000
#define PRETOKENIZER     "joyai-llm"

struct int_key {
    const char *name;
    size_t offset;
    int32_t min;
    int32_t max;
    bool optional; /* the member keeps its value */
};

struct float_key {
    const char *name;
    size_t offset;
    float min;
    float max;
    bool optional;
};

#define AT(member) offsetof(struct ds4_model_shape, member)

static const struct int_key int_keys[] = {
    {"context_length", AT(context_tok), 1, MAX_TOK, false},
    {"embedding_length", AT(d_model), 1, MAX_DIM, false},
    {"attention.head_count", AT(n_head), 1, MAX_HEADS, false},
    {"attention.key_length", AT(d_head), 2, MAX_DIM, false},
    {"rope.dimension_count", AT(d_rope), 2, MAX_DIM, false},
    {"attention.q_lora_rank", AT(q_rank), 1, MAX_DIM, false},
    {"attention.output_lora_rank", AT(o_rank), 1, MAX_DIM, false},
    {"attention.output_group_count", AT(n_group), 1, MAX_HEADS, false},
    {"attention.sliding_window", AT(window_tok), 1, MAX_DIM, false},
    {"attention.indexer.head_count", AT(n_index_head), 1, MAX_HEADS, false},
    {"attention.indexer.key_length", AT(d_index), 2, MAX_DIM, false},
    {"attention.indexer.top_k", AT(index_topk), 1, MAX_TOPK, false},
    {"rope.scaling.original_context_length", AT(yarn_orig_tok), 1, MAX_TOK, false},
    {"expert_used_count", AT(n_expert_used), 1, MAX_EXPERTS_USED, false},
    {"expert_shared_count", AT(n_shared), 1, MAX_EXPERTS_USED, false},
    {"expert_feed_forward_length", AT(d_expert), 1, MAX_DIM, false},
    {"hash_layer_count", AT(n_hash_layer), 0, DS4_MAX_LAYERS, false},
    {"hyper_connection.count", AT(n_hyper), 1, DS4_MAX_HYPER, false},
    {"hyper_connection.sinkhorn_iterations", AT(sinkhorn_iters), 1, MAX_SINKHORN, false},
    {"nextn_predict_layers", AT(n_nextn), 0, DS4_MAX_LAYERS, true},
};

static const struct float_key float_keys[] = {
    {"attention.layer_norm_rms_epsilon", AT(rms_eps), 0, 1, false},
    {"hyper_connection.epsilon", AT(hyper_eps), 0, 1, false},
    {"rope.freq_base", AT(rope_base), 1, 1e12f, false},
    {"attention.compress_rope_freq_base", AT(compress_rope_base), 1, 1e12f, false},
    {"rope.scaling.factor", AT(yarn_factor), 1, 1e6f, false},
    {"rope.scaling.yarn_beta_fast", AT(yarn_beta_fast), 0, 1e6f, true},
    {"rope.scaling.yarn_beta_slow", AT(yarn_beta_slow), 0, 1e6f, true},
    {"expert_weights_scale", AT(route_scale), 0, 1e6f, false},
};

static const char *full_key(char out[KEY_BYTES], const char *name)
{
    snprintf(out, KEY_BYTES, DS4_MODEL_ARCH ".%s", name);
    return out;
}

static int read_int(const struct ds4_gguf *meta, const char *name, int32_t min, int32_t max,
                    int32_t *out, struct ds4_err *err)
{
    char key[KEY_BYTES];

    return ds4_gguf_get_i32(meta, full_key(key, name), min, max, out, err);
}

static bool has(const struct ds4_gguf *meta, const char *name)
{
    char key[KEY_BYTES];

    return ds4_gguf_has(meta, full_key(key, name));
}

static int read_scalars(const struct ds4_gguf *meta, struct ds4_model_shape *shape,
                        struct ds4_err *err)
{
    char key[KEY_BYTES];
    char *base = (char *)shape;

    for (size_t i = 0; i < sizeof(int_keys) / sizeof(int_keys[0]); i++) {
        const struct int_key *k = &int_keys[i];

        if (k->optional && !has(meta, k->name))
            continue;
        if (read_int(meta, k->name, k->min, k->max, (int32_t *)(base + k->offset), err))
            return -1;
    }
    for (size_t i = 0; i < sizeof(float_keys) / sizeof(float_keys[0]); i++) {
        const struct float_key *k = &float_keys[i];
        float *out = (float *)(base + k->offset);

        full_key(key, k->name);
        if (k->optional && !ds4_gguf_has(meta, key))
            continue;
        if (ds4_gguf_get_f32(meta, key, out, err))
            return -1;
        if (*out < k->min || *out > k->max)
            return ds4_fail(err, DS4_E_INVALID, "metadata key %s is %g, must be in [%g, %g]", key,
                            (double)*out, (double)k->min, (double)k->max);
    }
    return 0;
}

/* Values the product computes in one way only. */
static int check_fixed(const struct ds4_gguf *meta, const struct ds4_model_shape *shape,
                       struct ds4_err *err)
{
    struct ds4_str text;
    char key[KEY_BYTES];
    bool norm;
    int32_t value;

    if (read_int(meta, "attention.head_count_kv", 1, 1, &value, err) ||
        read_int(meta, "expert_gating_func", DS4_GATING_SQRT_SOFTPLUS, DS4_GATING_SQRT_SOFTPLUS,
                 &value, err))
        return -1;
    if (read_int(meta, "attention.value_length", shape->d_head, shape->d_head, &value, err))
        return ds4_err_wrap(err, "keys and values share one row");
    if (ds4_gguf_get_bool(meta, full_key(key, "expert_weights_norm"), &norm, err))
        return -1;
    if (!norm)
        return ds4_fail(err, DS4_E_INVALID, "metadata key %s is false: unsupported", key);
    if (has(meta, "expert_group_count") && read_int(meta, "expert_group_count", 0, 0, &value, err))
        return -1;
    if (!has(meta, "rope.scaling.type"))
        return 0;
    if (ds4_gguf_get_str(meta, full_key(key, "rope.scaling.type"), &text, err))
        return -1;
    if (!ds4_str_equal(text, DS4_STR("yarn")))
        return ds4_fail(err, DS4_E_INVALID, "metadata key %s is \"%.*s\", must be \"yarn\"", key,
                        DS4_STR_ARG(text));
    return 0;
}

/* Layers of the trunk.  A merged next-token block is the last blk and is counted by block_count; a
 * file may announce one and not have it, so its tensor decides. */
static int read_layers(const struct ds4_weights_file *wf, struct ds4_model_shape *shape,
                       struct ds4_err *err)
{
    char name[DS4_TENSOR_NAME_BYTES];
    int32_t n_block;

    if (read_int(ds4_weights_meta(wf), "block_count", 1, DS4_MAX_LAYERS, &n_block, err))
        return -1;
    shape->n_layer = n_block;
    for (int32_t l = n_block - shape->n_nextn; l >= 0 && l < n_block; l++) {
        snprintf(name, sizeof(name), "blk.%" PRId32 ".nextn.eh_proj.weight", l);
        if (ds4_weights_find(wf, name) != NULL) {
            shape->n_layer = l;
            break;
        }
    }
    if (shape->n_layer < 1)
        return ds4_fail(err, DS4_E_INVALID,
                        "block_count %" PRId32 " leaves no layer besides %" PRId32
                        " next-token blocks",
                        n_block, shape->n_nextn);
    if (shape->n_hash_layer > shape->n_layer)
        return ds4_fail(err, DS4_E_INVALID, "hash_layer_count is %" PRId32 " of %" PRId32 " layers",
                        shape->n_hash_layer, shape->n_layer);
    return 0;
}

static int read_ratios(const struct ds4_gguf *meta, struct ds4_model_shape *shape,
                       struct ds4_err *err)
{
    char key[KEY_BYTES];
    const struct ds4_gguf_kv *kv =
        ds4_gguf_get_ints(meta, full_key(key, "attention.compress_ratios"), err);
    int64_t ratio;

    if (kv == NULL)
        return -1;
    if (kv->n < (uint64_t)shape->n_layer)
        return ds4_fail(err, DS4_E_INVALID,
                        "metadata key %s has %" PRIu64 " entries for %" PRId32 " layers", key,
                        kv->n, shape->n_layer);
    for (int32_t l = 0; l < shape->n_layer; l++) {
        ratio = ds4_gguf_int_at(kv, (uint64_t)l);
        if (ratio != DS4_RATIO_WINDOW && ratio != DS4_RATIO_CSA && ratio != DS4_RATIO_HCA)
            return ds4_fail(err, DS4_E_INVALID,
                            "metadata key %s: layer %" PRId32 " has ratio %" PRId64
                            ", must be 0, 4 or 128",
                            key, l, ratio);
        shape->ratio[l] = (int32_t)ratio;
    }
    return 0;
}

/* One value for all layers, or one per layer. */
static int read_clamp(const struct ds4_gguf *meta, const char *name, int32_t n_layer, float *out,
                      struct ds4_err *err)
{
    char key[KEY_BYTES];
    const struct ds4_gguf_kv *kv = ds4_gguf_find(meta, full_key(key, name));
    bool per_layer = kv != NULL && kv->is_array;
    float scalar = 0;

    if (!per_layer) {
        if (ds4_gguf_get_f32(meta, key, &scalar, err))
            return -1;
    } else {
        kv = ds4_gguf_get_floats(meta, key, err);
        if (kv == NULL)
            return -1;
        if (kv->n < (uint64_t)n_layer)
            return ds4_fail(err, DS4_E_INVALID,
                            "metadata key %s has %" PRIu64 " entries for %" PRId32 " layers", key,
                            kv->n, n_layer);
    }
    for (int32_t l = 0; l < n_layer; l++) {
        out[l] = per_layer ? (float)ds4_gguf_float_at(kv, (uint64_t)l) : scalar;
        if (!isfinite(out[l]) || out[l] <= 0)
            return ds4_fail(err, DS4_E_INVALID,
                            "metadata key %s: layer %" PRId32 " has %g, must be above 0", key, l,
                            (double)out[l]);
    }
    return 0;
}

/* Experts of a layer are what its stack holds; the key only speaks for layers without tensors here. */
static int read_experts(const struct ds4_weights_file *wf, struct ds4_model_shape *shape,
                        struct ds4_err *err)
{
    char name[DS4_TENSOR_NAME_BYTES];
    const struct ds4_tensor_info *info;
    int32_t n_expert;

    if (read_int(ds4_weights_meta(wf), "expert_count", 1, MAX_EXPERTS, &n_expert, err))
        return -1;
    for (int32_t l = 0; l < shape->n_layer; l++) {
        snprintf(name, sizeof(name), "blk.%" PRId32 ".ffn_gate_exps.weight", l);
        info = ds4_weights_find(wf, name);
        shape->n_expert[l] = n_expert;
        if (info != NULL && info->ne[2] > n_expert)
            return ds4_fail(err, DS4_E_INVALID,
                            "tensor %s has %" PRId64 " experts, expert_count is %" PRId32, name,
                            info->ne[2], n_expert);
        if (info != NULL)
            shape->n_expert[l] = (int32_t)info->ne[2];
        if (shape->n_expert_used > shape->n_expert[l])
            return ds4_fail(err, DS4_E_INVALID,
                            "expert_used_count is %" PRId32 ", layer %" PRId32 " has %" PRId32
                            " experts",
                            shape->n_expert_used, l, shape->n_expert[l]);
    }
    return 0;
}

/* vocab_size is missing in some files: then the token list says, then the embedding. */
static int read_vocab_size(const struct ds4_weights_file *wf, struct ds4_model_shape *shape,
                           struct ds4_err *err)
{
    const struct ds4_gguf *meta = ds4_weights_meta(wf);
    const struct ds4_gguf_kv *tokens = ds4_gguf_find(meta, "tokenizer.ggml.tokens");
    const struct ds4_tensor_info *embed = ds4_weights_find(wf, "token_embd.weight");

    if (!has(meta, "vocab_size") && tokens != NULL && tokens->n >= 1 && tokens->n <= MAX_VOCAB)
        shape->n_vocab = (int32_t)tokens->n;
    else if (!has(meta, "vocab_size") && embed != NULL && embed->ne[1] <= MAX_VOCAB)
        shape->n_vocab = (int32_t)embed->ne[1];
    else if (read_int(meta, "vocab_size", 1, MAX_VOCAB, &shape->n_vocab, err))
        return -1;
    return tokens == NULL ? 0 : ds4_model_check_vocab(wf, shape->n_vocab, err);
}

static int check_consistent(const struct ds4_model_shape *s, struct ds4_err *err)
{
    if (s->n_head % s->n_group != 0)
        return ds4_fail(err, DS4_E_INVALID,
                        "output_group_count %" PRId32 " does not divide head_count %" PRId32,
                        s->n_group, s->n_head);
    if (s->d_rope % 2 != 0 || s->d_rope > s->d_head || s->d_rope > s->d_index)
        return ds4_fail(err, DS4_E_INVALID,
                        "rope.dimension_count is %" PRId32 ", must be even and at most the key "
                        "lengths %" PRId32 " and %" PRId32,
                        s->d_rope, s->d_head, s->d_index);
    if (s->yarn_beta_slow >= s->yarn_beta_fast)
        return ds4_fail(err, DS4_E_INVALID, "yarn_beta_slow %g is not below yarn_beta_fast %g",
                        (double)s->yarn_beta_slow, (double)s->yarn_beta_fast);
    if ((int64_t)s->n_head * s->d_head > MAX_DIM * 16 ||
        (int64_t)s->n_index_head * s->d_index > MAX_DIM * 16 ||
        (int64_t)s->n_group * s->o_rank > MAX_DIM * 16 ||
        (int64_t)s->n_shared * s->d_expert > MAX_DIM * 16)
        return ds4_fail(err, DS4_E_INVALID, "heads times their length exceed %d", MAX_DIM * 16);
    return 0;
}

/* A synthesised file may hold some layers only and says so; block_count stays that of the shape. */
static int read_present(const struct ds4_gguf *meta, struct ds4_model_shape *shape,
                        struct ds4_err *err)
{
    int32_t last;

    shape->present = ds4_model_all(shape);
    if (!ds4_gguf_has(meta, "ds4.synth.first_layer"))
        return 0;
    if (ds4_gguf_get_i32(meta, "ds4.synth.first_layer", 0, shape->n_layer - 1,
                         &shape->present.first_layer, err) ||
        ds4_gguf_get_i32(meta, "ds4.synth.last_layer", shape->present.first_layer,
                         shape->n_layer - 1, &last, err))
        return -1;
    shape->present.end_layer = last + 1;
    shape->present.embed = shape->present.first_layer == 0;
    shape->present.head = shape->present.end_layer == shape->n_layer;
    return 0;
}

int ds4_model_read(const struct ds4_weights_file *wf, struct ds4_model_shape *shape,
                   struct ds4_err *err)
{
    const struct ds4_gguf *meta = ds4_weights_meta(wf);
    struct ds4_str text;

    memset(shape, 0, sizeof(*shape));
    shape->yarn_beta_fast = 32; /* the checkpoint's values, where a file leaves them out */
    shape->yarn_beta_slow = 1;
    if (ds4_gguf_get_str(meta, "general.architecture", &text, err))
        return -1;
    if (!ds4_str_equal(text, DS4_STR(DS4_MODEL_ARCH)))
        return ds4_fail(err, DS4_E_INVALID,
                        "general.architecture is \"%.*s\": this build serves \"" DS4_MODEL_ARCH
                        "\" only",
                        DS4_STR_ARG(text));
    if (ds4_gguf_has(meta, "general.name")) {
        if (ds4_gguf_get_str(meta, "general.name", &text, err))
            return -1;
        text = ds4_str_head(text, sizeof(shape->name) - 1);
        memcpy(shape->name, text.ptr, text.len);
    }
    if (read_scalars(meta, shape, err) || check_fixed(meta, shape, err) ||
        read_layers(wf, shape, err) || read_ratios(meta, shape, err) ||
        read_clamp(meta, "swiglu_clamp_exp", shape->n_layer, shape->clamp, err) ||
        read_clamp(meta,
                   has(meta, "swiglu_clamp_shexp") ? "swiglu_clamp_shexp" : "swiglu_clamp_exp",
                   shape->n_layer, shape->clamp_shared, err) ||
        read_experts(wf, shape, err) || read_vocab_size(wf, shape, err) ||
        check_consistent(shape, err))
        return -1;
    return read_present(meta, shape, err);
}

/* ---- vocabulary -------------------------------------------------------------------------------- */

static int check_merges(const struct ds4_gguf *meta, struct ds4_err *err)
{
    const struct ds4_gguf_kv *merges = ds4_gguf_get_strings(meta, "tokenizer.ggml.merges", err);

    if (merges == NULL)
        return -1;
    for (uint64_t i = 0; i < merges->n; i++) {
        struct ds4_str merge = ds4_gguf_str_at(merges, i);
        size_t space = ds4_str_find(merge, DS4_STR(" "), 0);

        if (space == DS4_STR_NONE || space == 0 || space == merge.len - 1 ||
            ds4_str_find(merge, DS4_STR(" "), space + 1) != DS4_STR_NONE)
            return ds4_fail(err, DS4_E_INVALID,
                            "tokenizer.ggml.merges: merge %" PRIu64
                            " must be two texts with one space between",
                            i);
    }
    return 0;
}

/* Every tokenizer.ggml.*_token_id, known or not. */
static int check_special_ids(const struct ds4_gguf *meta, int32_t n_vocab, struct ds4_err *err)
{
    char key[KEY_BYTES];
    int32_t id;

    for (size_t i = 0; i < meta->n_kv; i++) {
        struct ds4_str name = meta->kv[i].key;

        if (!ds4_str_starts(name, DS4_STR("tokenizer.ggml.")) ||
            !ds4_str_ends(name, DS4_STR("_token_id")) || name.len >= sizeof(key))
            continue;
        memcpy(key, name.ptr, name.len);
        key[name.len] = '\0';
        if (ds4_gguf_get_i32(meta, key, 0, n_vocab - 1, &id, err))
            return -1;
    }
    return 0;
}

int ds4_model_check_vocab(const struct ds4_weights_file *wf, int32_t n_vocab, struct ds4_err *err)
{
    const struct ds4_gguf *meta = ds4_weights_meta(wf);
    const struct ds4_gguf_kv *tokens = ds4_gguf_get_strings(meta, "tokenizer.ggml.tokens", err);
    const struct ds4_gguf_kv *kinds;
    struct ds4_str text;

    if (tokens == NULL || ds4_gguf_get_str(meta, "tokenizer.ggml.model", &text, err))
        return -1;
    if (!ds4_str_equal(text, DS4_STR("gpt2")))
        return ds4_fail(err, DS4_E_INVALID,
                        "tokenizer.ggml.model is \"%.*s\", must be \"gpt2\" (byte-level BPE)",
                        DS4_STR_ARG(text));
    if (tokens->n != (uint64_t)n_vocab)
        return ds4_fail(err, DS4_E_INVALID,
                        "tokenizer.ggml.tokens has %" PRIu64 " entries, vocab_size is %" PRId32,
                        tokens->n, n_vocab);
    kinds = ds4_gguf_get_ints(meta, "tokenizer.ggml.token_type", err);
    if (kinds == NULL)
        return -1;
    if (kinds->n != tokens->n)
        return ds4_fail(err, DS4_E_INVALID,
                        "tokenizer.ggml.token_type has %" PRIu64 " entries for %" PRIu64 " tokens",
                        kinds->n, tokens->n);
    if (check_special_ids(meta, n_vocab, err))
        return -1;
    if (ds4_gguf_has(meta, "tokenizer.ggml.pre")) {
        if (ds4_gguf_get_str(meta, "tokenizer.ggml.pre", &text, err))
            return -1;
        /* The split rule is fixed by the model; only the name in the file is not. */
        if (!ds4_str_equal(text, DS4_STR(PRETOKENIZER)))
            ds4_log(DS4_LOG_WARN, "model.pretokenizer", "name=%.*s expected=" PRETOKENIZER,
                    DS4_STR_ARG(text));
    }
    return check_merges(meta, err);
}

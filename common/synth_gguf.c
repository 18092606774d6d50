/* The header of a synthetic model as GGUF: metadata, vocabulary, tensor table.
 *
 * The file writer and the model that is never a file (common/weights_file.c) share it, so whatever reads
 * a header reads the same one.  The vocabulary is byte-level with the special tokens where the real one
 * has them: enough to encode any text, one byte per token. */
#include "common/synth_gguf.h"

#include "common/utf8.h"

#include <inttypes.h>
#include <stdio.h>

#define HEADER_MAX_BYTES ((size_t)64 << 20)
#define KEY_BYTES        128
#define N_CONTROL        3 /* begin, end, padding: ids 0, 1, 2 */
#define N_BYTES          256
#define FILE_TYPE_MIXED  0 /* informational; readers go by tensor */

/* Token types of the format. */
enum { TOKEN_NORMAL = 1, TOKEN_CONTROL = 3, TOKEN_USER = 4, TOKEN_UNUSED = 5 };

struct writer {
    struct ds4_buf kv;
    struct ds4_buf table;
    uint32_t n_kv;
    uint32_t n_tensor;
    uint64_t data_bytes; /* padded extent so far */
    enum ds4_synth_quant quant;
};

/* ---- encoding ---------------------------------------------------------------------------------- */

static void put(struct ds4_buf *out, uint64_t value, int n_bytes)
{
    for (int i = 0; i < n_bytes; i++)
        (void)ds4_buf_append_byte(out, (char)(value >> (8 * i)));
}

static void put_text(struct ds4_buf *out, const char *text)
{
    put(out, strlen(text), 8);
    (void)ds4_buf_append_text(out, text);
}

static void begin(struct writer *w, const char *key, enum ds4_gguf_type type)
{
    w->n_kv++;
    put_text(&w->kv, key);
    put(&w->kv, type, 4);
}

static void begin_array(struct writer *w, const char *key, enum ds4_gguf_type type, uint64_t n)
{
    begin(w, key, DS4_GGUF_ARRAY);
    put(&w->kv, type, 4);
    put(&w->kv, n, 8);
}

static void kv_text(struct writer *w, const char *key, const char *value)
{
    begin(w, key, DS4_GGUF_STRING);
    put_text(&w->kv, value);
}

static void kv_u32(struct writer *w, const char *key, uint32_t value)
{
    begin(w, key, DS4_GGUF_U32);
    put(&w->kv, value, 4);
}

static void kv_bool(struct writer *w, const char *key, bool value)
{
    begin(w, key, DS4_GGUF_BOOL);
    put(&w->kv, value, 1);
}

static const char *model_key(char out[KEY_BYTES], const char *name)
{
    snprintf(out, KEY_BYTES, DS4_MODEL_ARCH ".%s", name);
    return out;
}

static void model_u32(struct writer *w, const char *name, int32_t value)
{
    char key[KEY_BYTES];

    kv_u32(w, model_key(key, name), (uint32_t)value);
}

static void model_f32(struct writer *w, const char *name, float value)
{
    char key[KEY_BYTES];

    begin(w, model_key(key, name), DS4_GGUF_F32);
    put(&w->kv, ds4_bits_from_f32(value), 4);
}

static void model_f32s(struct writer *w, const char *name, const float *v, int32_t n)
{
    char key[KEY_BYTES];

    begin_array(w, model_key(key, name), DS4_GGUF_F32, (uint64_t)n);
    for (int32_t i = 0; i < n; i++)
        put(&w->kv, ds4_bits_from_f32(v[i]), 4);
}

static void model_i32s(struct writer *w, const char *name, const int32_t *v, int32_t n)
{
    char key[KEY_BYTES];

    begin_array(w, model_key(key, name), DS4_GGUF_I32, (uint64_t)n);
    for (int32_t i = 0; i < n; i++)
        put(&w->kv, (uint32_t)v[i], 4);
}

/* ---- metadata ---------------------------------------------------------------------------------- */

static void put_shape(struct writer *w, const struct ds4_model_shape *s)
{
    char key[KEY_BYTES];

    model_u32(w, "block_count", s->n_layer);
    model_u32(w, "context_length", s->context_tok);
    model_u32(w, "embedding_length", s->d_model);
    model_u32(w, "vocab_size", s->n_vocab);
    model_u32(w, "attention.head_count", s->n_head);
    model_u32(w, "attention.head_count_kv", 1);
    model_u32(w, "attention.key_length", s->d_head);
    model_u32(w, "attention.value_length", s->d_head);
    model_u32(w, "attention.q_lora_rank", s->q_rank);
    model_u32(w, "attention.output_lora_rank", s->o_rank);
    model_u32(w, "attention.output_group_count", s->n_group);
    model_u32(w, "attention.sliding_window", s->window_tok);
    model_u32(w, "attention.indexer.head_count", s->n_index_head);
    model_u32(w, "attention.indexer.key_length", s->d_index);
    model_u32(w, "attention.indexer.top_k", s->index_topk);
    model_i32s(w, "attention.compress_ratios", s->ratio, s->n_layer);
    model_f32(w, "attention.compress_rope_freq_base", s->compress_rope_base);
    model_f32(w, "attention.layer_norm_rms_epsilon", s->rms_eps);
    model_u32(w, "rope.dimension_count", s->d_rope);
    model_f32(w, "rope.freq_base", s->rope_base);
    kv_text(w, model_key(key, "rope.scaling.type"), "yarn");
    model_f32(w, "rope.scaling.factor", s->yarn_factor);
    model_u32(w, "rope.scaling.original_context_length", s->yarn_orig_tok);
    model_f32(w, "rope.scaling.yarn_beta_fast", s->yarn_beta_fast);
    model_f32(w, "rope.scaling.yarn_beta_slow", s->yarn_beta_slow);
    model_u32(w, "expert_count", s->n_expert[0]);
    model_u32(w, "expert_used_count", s->n_expert_used);
    model_u32(w, "expert_shared_count", s->n_shared);
    model_u32(w, "expert_feed_forward_length", s->d_expert);
    model_f32(w, "expert_weights_scale", s->route_scale);
    kv_bool(w, model_key(key, "expert_weights_norm"), true);
    model_u32(w, "expert_gating_func", DS4_GATING_SQRT_SOFTPLUS);
    model_f32s(w, "swiglu_clamp_exp", s->clamp, s->n_layer);
    model_f32s(w, "swiglu_clamp_shexp", s->clamp_shared, s->n_layer);
    model_u32(w, "hash_layer_count", s->n_hash_layer);
    model_u32(w, "hyper_connection.count", s->n_hyper);
    model_u32(w, "hyper_connection.sinkhorn_iterations", s->sinkhorn_iters);
    model_f32(w, "hyper_connection.epsilon", s->hyper_eps);
    model_u32(w, "nextn_predict_layers", 0);
}

/* Special tokens at the ids of the checkpoint; `small` is where the test model has them, counted from
 * the end of its vocabulary. */
static const struct special {
    const char *text;
    int32_t flash_id;
    int32_t small_from_end;
    int32_t type;
} specials[] = {
    {"<｜fim▁hole｜>", 128800, 11, TOKEN_USER},
    {"<｜fim▁begin｜>", 128801, 10, TOKEN_USER},
    {"<｜fim▁end｜>", 128802, 9, TOKEN_USER},
    {"<｜User｜>", 128803, 16, TOKEN_USER},
    {"<｜Assistant｜>", 128804, 15, TOKEN_USER},
    {"<think>", 128821, 14, TOKEN_USER},
    {"</think>", 128822, 13, TOKEN_USER},
    {"｜DSML｜", 128825, 12, TOKEN_USER},
    {"<｜latest_reminder｜>", 128828, 8, TOKEN_USER},
    {"<｜action｜>", 128829, 7, TOKEN_USER},
    {"<｜query｜>", 128830, 6, TOKEN_USER},
    {"<｜authority｜>", 128831, 5, TOKEN_USER},
    {"<｜domain｜>", 128832, 4, TOKEN_USER},
    {"<｜title｜>", 128836, 3, TOKEN_USER},
    {"<｜read_url｜>", 128845, 2, TOKEN_USER},
};

static const struct special *find_special(int32_t id, int32_t n_vocab)
{
    const struct special *last = &specials[sizeof(specials) / sizeof(specials[0]) - 1];
    bool small = n_vocab <= last->flash_id;

    for (const struct special *s = specials; s <= last; s++) {
        if (id == (small ? n_vocab - s->small_from_end : s->flash_id))
            return s;
    }
    return NULL;
}

/* The byte alphabet of byte-level BPE: printable bytes stand for themselves and come first, the others
 * follow from U+0100 on.  Writes the n-th symbol. */
static void byte_symbol(int32_t n, char out[DS4_UTF8_MAX_BYTES + 1])
{
    static const struct {
        uint32_t first;
        int32_t count;
    } runs[] = {{'!', 94}, {0xa1, 12}, {0xae, 82}, {0x100, 68}};
    size_t len = 0;

    for (size_t i = 0; i < sizeof(runs) / sizeof(runs[0]) && len == 0; i++) {
        if (n < runs[i].count)
            len = ds4_utf8_encode(runs[i].first + (uint32_t)n, out);
        n -= runs[i].count;
    }
    out[len] = '\0';
}

static int32_t put_token(struct ds4_buf *out, int32_t id, int32_t n_vocab)
{
    static const char *const control[N_CONTROL] = {
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜▁pad▁｜>",
    };
    const struct special *special = find_special(id, n_vocab);
    char symbol[DS4_UTF8_MAX_BYTES + 1];
    char filler[64];

    if (id < N_CONTROL) {
        put_text(out, control[id]);
        return TOKEN_CONTROL;
    }
    if (id < N_CONTROL + N_BYTES) {
        byte_symbol(id - N_CONTROL, symbol);
        put_text(out, symbol);
        return TOKEN_NORMAL;
    }
    if (special != NULL) {
        put_text(out, special->text);
        return special->type;
    }
    snprintf(filler, sizeof(filler), "<｜unused▁%" PRId32 "｜>", id);
    put_text(out, filler);
    return TOKEN_UNUSED;
}

static void put_vocab(struct writer *w, int32_t n_vocab)
{
    struct ds4_buf types;

    ds4_buf_init(&types, HEADER_MAX_BYTES);
    kv_text(w, "tokenizer.ggml.model", "gpt2");
    kv_text(w, "tokenizer.ggml.pre", "joyai-llm");
    begin_array(w, "tokenizer.ggml.tokens", DS4_GGUF_STRING, (uint64_t)n_vocab);
    for (int32_t id = 0; id < n_vocab; id++)
        put(&types, (uint32_t)put_token(&w->kv, id, n_vocab), 4);
    begin_array(w, "tokenizer.ggml.token_type", DS4_GGUF_I32, (uint64_t)n_vocab);
    w->kv.failed |= types.failed;
    (void)ds4_buf_append_str(&w->kv, ds4_buf_view(&types));
    begin_array(w, "tokenizer.ggml.merges", DS4_GGUF_STRING, 0);
    kv_u32(w, "tokenizer.ggml.bos_token_id", 0);
    kv_u32(w, "tokenizer.ggml.eos_token_id", 1);
    kv_u32(w, "tokenizer.ggml.padding_token_id", 2);
    kv_bool(w, "tokenizer.ggml.add_bos_token", false);
    kv_bool(w, "tokenizer.ggml.add_eos_token", false);
    ds4_buf_deinit(&types);
}

/* ---- tensors ----------------------------------------------------------------------------------- */

uint64_t ds4_synth_blocks(const struct ds4_tensor_want *want, enum ds4_dtype dtype)
{
    return (uint64_t)(want->ne[0] / ds4_dtype_info(dtype)->block_elems * want->ne[1] * want->ne[2]);
}

uint64_t ds4_synth_align(uint64_t n)
{
    return (n + DS4_GGUF_ALIGNMENT - 1) / DS4_GGUF_ALIGNMENT * DS4_GGUF_ALIGNMENT;
}

static int list_tensor(void *arg, const struct ds4_tensor_want *want)
{
    struct writer *w = arg;
    enum ds4_dtype dtype = ds4_synth_dtype(want->class, w->quant);
    const struct ds4_dtype_info *info = ds4_dtype_info(dtype);

    w->n_tensor++;
    put_text(&w->table, want->name);
    put(&w->table, (uint32_t)want->n_dims, 4);
    for (int32_t d = 0; d < want->n_dims; d++)
        put(&w->table, (uint64_t)want->ne[d], 8);
    put(&w->table, info->gguf_type, 4);
    put(&w->table, w->data_bytes, 8);
    w->data_bytes = ds4_synth_align(w->data_bytes +
                                    ds4_synth_blocks(want, dtype) * (uint64_t)info->block_bytes);
    return 0;
}

static void put_metadata(struct writer *w, const struct ds4_synth *synth,
                         const struct ds4_model_part *part)
{
    kv_text(w, "general.architecture", DS4_MODEL_ARCH);
    kv_text(w, "general.name", synth->shape.name);
    kv_u32(w, "general.file_type", FILE_TYPE_MIXED);
    kv_u32(w, "general.quantization_version", 2);
    kv_u32(w, "general.alignment", DS4_GGUF_ALIGNMENT);
    kv_text(w, "ds4.synth.quant", ds4_synth_quant_name(synth->quant));
    begin(w, "ds4.synth.seed", DS4_GGUF_U64);
    put(&w->kv, synth->seed, 8);
    kv_u32(w, "ds4.synth.first_layer", (uint32_t)part->first_layer);
    kv_u32(w, "ds4.synth.last_layer", (uint32_t)part->end_layer - 1);
    put_shape(w, &synth->shape);
    put_vocab(w, synth->shape.n_vocab);
}

int ds4_synth_header(const struct ds4_synth *synth, const struct ds4_model_part *part,
                     struct ds4_buf *out, uint64_t *data_bytes, struct ds4_err *err)
{
    struct writer w = {.quant = synth->quant};
    int rc = -1;

    ds4_buf_init(&w.kv, HEADER_MAX_BYTES);
    ds4_buf_init(&w.table, HEADER_MAX_BYTES);
    put_metadata(&w, synth, part);
    ds4_model_each_tensor(&synth->shape, part, list_tensor, &w);
    put(out, DS4_GGUF_MAGIC, 4);
    put(out, DS4_GGUF_VERSION, 4);
    put(out, w.n_tensor, 8);
    put(out, w.n_kv, 8);
    if (ds4_buf_check(&w.kv, "metadata", err) != 0 || ds4_buf_check(&w.table, "table", err) != 0)
        goto out;
    (void)ds4_buf_append_str(out, ds4_buf_view(&w.kv));
    (void)ds4_buf_append_str(out, ds4_buf_view(&w.table));
    while (!out->failed && out->len % DS4_GGUF_ALIGNMENT != 0)
        (void)ds4_buf_append_byte(out, 0);
    *data_bytes = w.data_bytes;
    rc = ds4_buf_check(out, "header", err);
out:
    ds4_buf_deinit(&w.table);
    ds4_buf_deinit(&w.kv);
    return rc;
}

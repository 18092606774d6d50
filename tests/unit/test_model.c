/* The shape of ds4-tiny, and what a model must be: one change to its metadata or tensor table per case,
 * and the message names it (rules G13, G18..G21 and G25 of the loader). */
#include "common/model.h"

#include "common/model_tensors.h"
#include "common/weights_file.h"
#include "tests/support/gguf_writer.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define TINY "tests/data/ds4-tiny.gguf"

static int open_tiny(void **state)
{
    struct ds4_err err = {0};

    *state = ds4_weights_open(TINY, DS4_WEIGHTS_MMAP, &err);
    if (*state == NULL)
        print_error("%s\n", err.msg);
    return *state == NULL ? -1 : 0;
}

static int close_tiny(void **state)
{
    ds4_weights_close(*state);
    return 0;
}

static void tiny_has_the_shape_its_readme_says(void **state)
{
    static const int32_t ratio[] = {0, 0, 4, 128, 4, 128, 4, 128};
    struct ds4_err err = {0};
    struct ds4_model_shape s;

    if (ds4_model_read(*state, &s, &err))
        fail_msg("%s", err.msg);
    assert_string_equal(s.name, "ds4-tiny");
    assert_int_equal(s.n_layer, 8);
    assert_int_equal(s.n_vocab, 4096);
    assert_int_equal(s.d_model, 256);
    assert_int_equal(s.n_head, 8);
    assert_int_equal(s.d_head, 64);
    assert_int_equal(s.d_rope, 16);
    assert_int_equal(s.q_rank, 256);
    assert_int_equal(s.o_rank, 128);
    assert_int_equal(s.n_group, 2);
    assert_int_equal(s.window_tok, 128);
    assert_int_equal(s.context_tok, 65536);
    assert_int_equal(s.n_index_head, 4);
    assert_int_equal(s.d_index, 32);
    assert_int_equal(s.index_topk, 64);
    assert_int_equal(s.n_hyper, 4);
    assert_int_equal(s.sinkhorn_iters, 20);
    assert_true(s.rms_eps == 1e-6f && s.hyper_eps == 1e-6f);
    assert_true(s.rope_base == 10000 && s.compress_rope_base == 160000);
    assert_true(s.yarn_factor == 16 && s.yarn_beta_fast == 32 && s.yarn_beta_slow == 1);
    assert_int_equal(s.yarn_orig_tok, 4096);
    assert_int_equal(s.n_expert_used, 3);
    assert_int_equal(s.n_shared, 1);
    assert_int_equal(s.d_expert, 256);
    assert_int_equal(s.n_hash_layer, 3);
    assert_true(s.route_scale == 1.5f);
    assert_int_equal(s.n_nextn, 0);
    for (int l = 0; l < 8; l++) {
        assert_int_equal(s.ratio[l], ratio[l]);
        assert_int_equal(s.n_expert[l], 8);
        assert_true(s.clamp[l] == 4 && s.clamp_shared[l] == 4);
    }
    assert_int_equal(ds4_model_layer_kind(&s, 1), DS4_LAYER_WINDOW);
    assert_int_equal(ds4_model_layer_kind(&s, 2), DS4_LAYER_CSA);
    assert_int_equal(ds4_model_layer_kind(&s, 3), DS4_LAYER_HCA);
}

static int count(void *arg, const struct ds4_tensor_want *want)
{
    (void)want;
    ++*(int *)arg;
    return 0;
}

static void tiny_has_every_tensor_of_the_catalogue_and_no_other(void **state)
{
    struct ds4_err err = {0};
    struct ds4_model_shape s;
    struct ds4_model_part all;
    int n = 0;

    assert_int_equal(ds4_model_read(*state, &s, &err), 0);
    all = ds4_model_all(&s);
    if (ds4_model_require(*state, &s, &all, &err))
        fail_msg("%s", err.msg);
    ds4_model_each_tensor(&s, &all, count, &n);
    assert_int_equal(n, 240);
    assert_int_equal(ds4_weights_n_tensor(*state), 240);
}

/* ---- changed copies of ds4-tiny ---------------------------------------------------------------- */

/* One change.  The copy has the tensor table of ds4-tiny, but zeros (a hole) for data. */
struct change {
    const char *drop_key; /* left out; `add` may write it anew */
    void (*add)(struct ds4_gguf_writer *w);
    const char *tensor; /* NULL, or: this one is ... */
    const char *rename; /* ... called so ("" leaves it out) */
    uint32_t type;      /* ... of this type, if retype */
    bool retype;
    int64_t ne0; /* ... with this row length, if not 0 */
    int64_t ne2;
};

static char copy_path[64];

static void write_changed(const struct ds4_weights_file *tiny, const struct change *c)
{
    const struct ds4_gguf *meta = ds4_weights_meta(tiny);
    struct ds4_gguf_writer w;
    int fd;

    ds4_gguf_writer_init(&w);
    for (size_t i = 0; i < meta->n_kv; i++) {
        if (c->drop_key == NULL || !ds4_str_equal(meta->kv[i].key, ds4_str_view(c->drop_key)))
            ds4_gguf_write_copy(&w, &meta->kv[i]);
    }
    if (c->add != NULL)
        c->add(&w);
    for (size_t i = 0; i < meta->n_tensor; i++) {
        struct ds4_tensor_info t = meta->tensor[i];
        const char *name = t.name;

        if (c->tensor != NULL && strcmp(name, c->tensor) == 0) {
            name = c->rename != NULL ? c->rename : name;
            t.gguf_type = c->retype ? c->type : t.gguf_type;
            t.ne[0] = c->ne0 != 0 ? c->ne0 : t.ne[0];
            t.ne[2] = c->ne2 != 0 ? c->ne2 : t.ne[2];
        }
        if (name[0] != '\0')
            ds4_gguf_write_tensor(&w, name, t.gguf_type, t.n_dims, t.ne);
    }
    snprintf(copy_path, sizeof(copy_path), "/tmp/ds4-test-model-XXXXXX");
    fd = mkstemp(copy_path);
    assert_true(fd >= 0);
    close(fd);
    ds4_gguf_writer_save(&w, copy_path);
    ds4_gguf_writer_deinit(&w);
}

static int read_and_require(const struct ds4_weights_file *wf, struct ds4_model_shape *s,
                            struct ds4_err *err)
{
    if (ds4_model_read(wf, s, err))
        return -1;
    return ds4_model_require(wf, s, &s->present, err);
}

static void expect_change_refused(void *tiny, const struct change *c, const char *words)
{
    struct ds4_err err = {0};
    struct ds4_model_shape s;
    struct ds4_weights_file *wf;
    int rc;

    write_changed(tiny, c);
    wf = ds4_weights_open(copy_path, DS4_WEIGHTS_MMAP, &err);
    unlink(copy_path);
    if (wf == NULL)
        fail_msg("%s", err.msg);
    rc = read_and_require(wf, &s, &err);
    ds4_weights_close(wf);
    if (rc == 0)
        fail_msg("accepted; expected \"%s\"", words);
    assert_int_equal(err.code, DS4_E_INVALID);
    if (strstr(err.msg, words) == NULL)
        fail_msg("\"%s\" does not contain \"%s\"", err.msg, words);
}

static void expect_change_accepted(void *tiny, const struct change *c, struct ds4_model_shape *s)
{
    struct ds4_err err = {0};
    struct ds4_weights_file *wf;

    write_changed(tiny, c);
    wf = ds4_weights_open(copy_path, DS4_WEIGHTS_MMAP, &err);
    unlink(copy_path);
    if (wf == NULL || read_and_require(wf, s, &err))
        fail_msg("%s", err.msg);
    ds4_weights_close(wf);
}

#define A "deepseek4."

static void g18_every_required_key_is_missed_by_name(void **state)
{
    static const char *const keys[] = {
        "general.architecture",
        A "block_count",
        A "context_length",
        A "embedding_length",
        A "attention.head_count",
        A "attention.head_count_kv",
        A "attention.key_length",
        A "attention.value_length",
        A "rope.dimension_count",
        A "attention.q_lora_rank",
        A "attention.output_lora_rank",
        A "attention.output_group_count",
        A "attention.sliding_window",
        A "attention.compress_ratios",
        A "attention.compress_rope_freq_base",
        A "attention.layer_norm_rms_epsilon",
        A "attention.indexer.head_count",
        A "attention.indexer.key_length",
        A "attention.indexer.top_k",
        A "rope.freq_base",
        A "rope.scaling.factor",
        A "rope.scaling.original_context_length",
        A "expert_count",
        A "expert_used_count",
        A "expert_shared_count",
        A "expert_feed_forward_length",
        A "expert_weights_scale",
        A "expert_weights_norm",
        A "expert_gating_func",
        A "swiglu_clamp_exp",
        A "hash_layer_count",
        A "hyper_connection.count",
        A "hyper_connection.sinkhorn_iterations",
        A "hyper_connection.epsilon",
    };
    char words[128];

    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        struct change c = {.drop_key = keys[i]};

        snprintf(words, sizeof(words), "metadata key %s is missing", keys[i]);
        expect_change_refused(*state, &c, words);
    }
}

static void optional_keys_have_defaults(void **state)
{
    static const char *const keys[] = {
        A "vocab_size",
        A "rope.scaling.yarn_beta_fast",
        A "rope.scaling.yarn_beta_slow",
        A "rope.scaling.type",
        A "swiglu_clamp_shexp",
        A "nextn_predict_layers",
        "general.name",
        "general.alignment",
    };
    struct ds4_model_shape s;

    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        struct change c = {.drop_key = keys[i]};

        expect_change_accepted(*state, &c, &s);
        assert_int_equal(s.n_vocab, 4096);
        assert_true(s.yarn_beta_fast == 32 && s.yarn_beta_slow == 1);
        assert_true(s.clamp_shared[7] == 4);
    }
}

/* Values the product cannot compute or that contradict another. */
static void add_arch(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_text(w, "general.architecture", "llama");
}
static void add_v41(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_text(w, "general.architecture", "deepseek41");
}
static void add_layers_as_text(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_text(w, A "block_count", "8");
}
static void add_many_layers(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_u32(w, A "block_count", DS4_MAX_LAYERS + 1);
}
static void add_two_kv_heads(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_u32(w, A "attention.head_count_kv", 2);
}
static void add_softmax_gate(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_u32(w, A "expert_gating_func", 1);
}
static void add_no_norm(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_bool(w, A "expert_weights_norm", 0);
}
static void add_value_length(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_u32(w, A "attention.value_length", 32);
}
static void add_groups(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_u32(w, A "attention.output_group_count", 3);
}
static void add_odd_rope(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_u32(w, A "rope.dimension_count", 15);
}
static void add_linear_rope(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_text(w, A "rope.scaling.type", "linear");
}
static void add_nan_eps(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_f32(w, A "attention.layer_norm_rms_epsilon", __builtin_nanf(""));
}
static void add_negative_scale(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_f32(w, A "expert_weights_scale", -1);
}
static void add_used(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_u32(w, A "expert_used_count", 9);
}
static void add_hash_layers(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_u32(w, A "hash_layer_count", 9);
}
static void add_expert_groups(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_u32(w, A "expert_group_count", 4);
}
static void add_short_clamp(struct ds4_gguf_writer *w)
{
    static const float v[] = {10, 10};

    ds4_gguf_write_f32s(w, A "swiglu_clamp_exp", v, 2);
}
static void add_zero_clamp(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_f32(w, A "swiglu_clamp_exp", 0);
}

static void g18_wrong_values_are_named(void **state)
{
    static const struct {
        const char *key;
        void (*add)(struct ds4_gguf_writer *w);
        const char *words;
    } cases[] = {
        {"general.architecture", add_arch, "general.architecture is \"llama\""},
        {"general.architecture", add_v41, "general.architecture is \"deepseek41\""},
        {A "block_count", add_layers_as_text, "block_count must be an integer, is string"},
        {A "block_count", add_many_layers, "block_count is 129"},
        {A "attention.head_count_kv", add_two_kv_heads, "head_count_kv is 2"},
        {A "expert_gating_func", add_softmax_gate, "expert_gating_func is 1"},
        {A "expert_weights_norm", add_no_norm, "expert_weights_norm is false"},
        {A "attention.value_length", add_value_length, "value_length is 32"},
        {A "attention.output_group_count", add_groups, "output_group_count 3 does not divide"},
        {A "rope.dimension_count", add_odd_rope, "rope.dimension_count is 15"},
        {A "rope.scaling.type", add_linear_rope, "rope.scaling.type is \"linear\""},
        {A "attention.layer_norm_rms_epsilon", add_nan_eps, "layer_norm_rms_epsilon is nan"},
        {A "expert_weights_scale", add_negative_scale, "expert_weights_scale is -1"},
        {A "expert_used_count", add_used, "expert_used_count is 9, layer 0 has 8"},
        {A "hash_layer_count", add_hash_layers, "hash_layer_count is 9 of 8"},
        {"", add_expert_groups, "expert_group_count is 4"},
        {A "swiglu_clamp_exp", add_short_clamp, "swiglu_clamp_exp has 2 entries for 8"},
        {A "swiglu_clamp_exp", add_zero_clamp, "swiglu_clamp_exp: layer 0 has 0"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct change c = {.drop_key = cases[i].key, .add = cases[i].add};

        expect_change_refused(*state, &c, cases[i].words);
    }
}

static void add_wide_integers(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_u64(w, A "block_count", 8);
}
static void add_scalar_clamp(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_f32(w, A "swiglu_clamp_exp", 7);
}

static void other_spellings_of_the_same_value_are_accepted(void **state)
{
    struct change wide = {.drop_key = A "block_count", .add = add_wide_integers};
    struct change scalar = {.drop_key = A "swiglu_clamp_exp", .add = add_scalar_clamp};
    struct ds4_model_shape s;

    expect_change_accepted(*state, &wide, &s);
    assert_int_equal(s.n_layer, 8);
    expect_change_accepted(*state, &scalar, &s);
    assert_true(s.clamp[0] == 7 && s.clamp[7] == 7 && s.clamp_shared[0] == 4);
}

static void g19_tensors_are_named_with_what_was_expected(void **state)
{
    static const struct {
        struct change change;
        const char *words;
    } cases[] = {
        {{.tensor = "blk.5.attn_kv.weight", .rename = ""},
         "tensor blk.5.attn_kv.weight [256, 64] is missing"},
        {{.tensor = "token_embd.weight", .rename = "embd"}, "tensor token_embd.weight"},
        {{.tensor = "output_hc_base.weight", .rename = ""}, "tensor output_hc_base.weight [4]"},
        {{.tensor = "blk.2.indexer.proj.weight", .rename = ""}, "blk.2.indexer.proj.weight"},
        {{.tensor = "blk.3.exp_probs_b.bias", .rename = ""}, "blk.3.exp_probs_b.bias [8]"},
        {{.tensor = "blk.0.ffn_gate_tid2eid.weight", .rename = ""},
         "blk.0.ffn_gate_tid2eid.weight"},
        {{.tensor = "blk.4.attn_q_a.weight", .ne0 = 512},
         "tensor blk.4.attn_q_a.weight is [512, 256], expected [256, 256]"},
        {{.tensor = "blk.4.ffn_down_exps.weight", .ne2 = 7},
         "tensor blk.4.ffn_down_exps.weight is [256, 256, 7], expected [256, 256, 8]"},
        {{.tensor = "blk.6.attn_norm.weight", .retype = true, .type = 27},
         "tensor blk.6.attn_norm.weight has type 27 (I64)"},
        {{.tensor = "blk.6.attn_q_b.weight", .retype = true, .type = 40}, /* G13 */
         "tensor blk.6.attn_q_b.weight has type 40 (unknown)"},
        {{.tensor = "blk.6.attn_q_b.weight", .retype = true, .type = 26},
         "tensor blk.6.attn_q_b.weight has type I32"},
        {{.tensor = "blk.1.ffn_gate_tid2eid.weight", .retype = true, .type = 0},
         "tensor blk.1.ffn_gate_tid2eid.weight has type F32, must be I32"},
        {{.tensor = "blk.1.ffn_up_exps.weight", .retype = true, .type = 39},
         "tensor blk.1.ffn_up_exps.weight is MXFP4, but blk.1.ffn_gate_exps.weight is Q8_0"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        expect_change_refused(*state, &cases[i].change, cases[i].words);
}

static void other_types_of_a_matrix_are_accepted(void **state)
{
    static const uint32_t types[] = {0, 1, 2, 8, 10, 11, 12, 13, 14, 16, 30, 39};
    struct ds4_model_shape s;

    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        struct change c = {.tensor = "blk.2.attn_q_b.weight", .retype = true, .type = types[i]};

        expect_change_accepted(*state, &c, &s);
    }
}

/* The same through the reporting door: all findings, not only the first. */
static void count_finding(void *arg, const struct ds4_err *finding)
{
    (void)finding;
    ++*(int *)arg;
}

static void every_finding_is_reported(void **state)
{
    struct ds4_err err = {0};
    struct ds4_model_shape s;
    struct ds4_model_part part;
    int n = 0;

    assert_int_equal(ds4_model_read(*state, &s, &err), 0);
    part = ds4_model_all(&s);
    assert_int_equal(ds4_model_check_tensors(*state, &s, &part, count_finding, &n), 0);
    s.d_model *= 2; /* now nearly every tensor is wrong */
    assert_true(ds4_model_check_tensors(*state, &s, &part, count_finding, &n) > 100);
    assert_true(n > 100);
}

static void a_part_checks_only_its_own_tensors(void **state)
{
    struct change c = {.tensor = "blk.5.attn_kv.weight", .rename = ""};
    struct ds4_model_part without = {0, 5, true, false};
    struct ds4_model_part with = {5, 8, false, true};
    struct ds4_model_part outside = {5, 9, false, true};
    struct ds4_err err = {0};
    struct ds4_model_shape s;
    struct ds4_weights_file *wf;

    write_changed(*state, &c);
    wf = ds4_weights_open(copy_path, DS4_WEIGHTS_MMAP, &err);
    unlink(copy_path);
    assert_non_null(wf);
    assert_int_equal(ds4_model_read(wf, &s, &err), 0);
    assert_int_equal(ds4_model_require(wf, &s, &without, &err), 0);
    assert_int_equal(ds4_model_require(wf, &s, &with, &err), -1);
    assert_int_equal(ds4_model_require(wf, &s, &outside, &err), -1);
    assert_non_null(strstr(err.msg, "of a model of 8 layers"));
    ds4_weights_close(wf);
}

static void add_few_tokens(struct ds4_gguf_writer *w)
{
    static const char *const v[] = {"a", "b"};

    ds4_gguf_write_texts(w, "tokenizer.ggml.tokens", v, 2);
}
static void add_few_types(struct ds4_gguf_writer *w)
{
    static const int32_t v[] = {1};

    ds4_gguf_write_i32s(w, "tokenizer.ggml.token_type", v, 1);
}
static void add_merge_without_space(struct ds4_gguf_writer *w)
{
    static const char *const v[] = {"a b", "ab"};

    ds4_gguf_write_texts(w, "tokenizer.ggml.merges", v, 2);
}
static void add_merge_with_two_spaces(struct ds4_gguf_writer *w)
{
    static const char *const v[] = {"a b c"};

    ds4_gguf_write_texts(w, "tokenizer.ggml.merges", v, 1);
}
static void add_merge_of_nothing(struct ds4_gguf_writer *w)
{
    static const char *const v[] = {"a "};

    ds4_gguf_write_texts(w, "tokenizer.ggml.merges", v, 1);
}
static void add_big_eos(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_u32(w, "tokenizer.ggml.eos_token_id", 4096);
}
static void add_other_tokenizer(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_text(w, "tokenizer.ggml.model", "llama");
}

static void g20_vocabulary(void **state)
{
    static const struct {
        const char *key;
        void (*add)(struct ds4_gguf_writer *w);
        const char *words;
    } cases[] = {
        {"tokenizer.ggml.tokens", add_few_tokens, "tokens has 2 entries, vocab_size is 4096"},
        {"tokenizer.ggml.token_type", add_few_types, "token_type has 1 entries for 4096 tokens"},
        {"tokenizer.ggml.token_type", NULL, "tokenizer.ggml.token_type is missing"},
        {"tokenizer.ggml.merges", NULL, "tokenizer.ggml.merges is missing"},
        {"tokenizer.ggml.merges", add_merge_without_space, "merge 1 must be two texts"},
        {"tokenizer.ggml.merges", add_merge_with_two_spaces, "merge 0 must be two texts"},
        {"tokenizer.ggml.merges", add_merge_of_nothing, "merge 0 must be two texts"},
        {"tokenizer.ggml.eos_token_id", add_big_eos, "eos_token_id is 4096"},
        {"tokenizer.ggml.model", add_other_tokenizer, "tokenizer.ggml.model is \"llama\""},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct change c = {.drop_key = cases[i].key, .add = cases[i].add};

        expect_change_refused(*state, &c, cases[i].words);
    }
}

static void add_short_ratios(struct ds4_gguf_writer *w)
{
    static const int32_t v[] = {0, 0, 4, 128, 4, 128, 4};

    ds4_gguf_write_i32s(w, A "attention.compress_ratios", v, 7);
}
static void add_negative_ratio(struct ds4_gguf_writer *w)
{
    static const int32_t v[] = {0, 0, 4, 128, 4, 128, 4, -4};

    ds4_gguf_write_i32s(w, A "attention.compress_ratios", v, 8);
}
static void add_other_ratio(struct ds4_gguf_writer *w)
{
    static const int32_t v[] = {0, 2, 4, 128, 4, 128, 4, 128};

    ds4_gguf_write_i32s(w, A "attention.compress_ratios", v, 8);
}
static void add_long_ratios(struct ds4_gguf_writer *w)
{
    static const int32_t v[] = {0, 0, 4, 128, 4, 128, 4, 128, 0};

    ds4_gguf_write_i32s(w, A "attention.compress_ratios", v, 9);
}

static void g21_compress_ratios(void **state)
{
    struct change c = {.drop_key = A "attention.compress_ratios"};
    struct ds4_model_shape s;

    c.add = add_short_ratios;
    expect_change_refused(*state, &c, "compress_ratios has 7 entries for 8 layers");
    c.add = add_negative_ratio;
    expect_change_refused(*state, &c, "compress_ratios: layer 7 has ratio -4");
    c.add = add_other_ratio;
    expect_change_refused(*state, &c, "compress_ratios: layer 1 has ratio 2");
    c.add = add_long_ratios;
    expect_change_accepted(*state, &c, &s);
}

static void g25_hash_tables_name_existing_experts(void **state)
{
    static const int32_t bad[] = {8, -1, INT32_MAX};
    struct change none = {0};
    const struct ds4_tensor_info *info;
    struct ds4_weights_file *wf;
    struct ds4_model_shape s;
    struct ds4_err err = {0};
    const int entry = 3 * 4096 - 1; /* the last one */
    int fd;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        write_changed(*state, &none);
        wf = ds4_weights_open(copy_path, DS4_WEIGHTS_PREAD, &err);
        assert_non_null(wf);
        assert_int_equal(read_and_require(wf, &s, &err), 0);
        info = ds4_weights_find(wf, "blk.2.ffn_gate_tid2eid.weight");
        assert_non_null(info);
        fd = open(copy_path, O_WRONLY);
        assert_true(fd >= 0);
        assert_int_equal(pwrite(fd, &bad[i], 4, (off_t)(info->offset + (uint64_t)entry * 4)), 4);
        close(fd);
        assert_int_equal(read_and_require(wf, &s, &err), -1);
        assert_non_null(strstr(err.msg, "tensor blk.2.ffn_gate_tid2eid.weight: entry 12287"));
        ds4_weights_close(wf);
        unlink(copy_path);
    }
}

/* Pruned files: fewer experts in some layers, everything of the layer agreeing. */
static void a_layer_may_have_fewer_experts_than_announced(void **state)
{
    struct change c = {.tensor = "blk.4.ffn_gate_exps.weight", .ne2 = 6};

    expect_change_refused(*state, &c,
                          "tensor blk.4.ffn_gate_inp.weight is [256, 8], expected "
                          "[256, 6]");
    c.ne2 = 9;
    expect_change_refused(*state, &c, "has 9 experts, expert_count is 8");
}

static void add_nextn(struct ds4_gguf_writer *w)
{
    static const int64_t ne[] = {512, 256};

    ds4_gguf_write_u32(w, A "nextn_predict_layers", 1);
    ds4_gguf_write_tensor(w, "blk.7.nextn.eh_proj.weight", 0, 2, ne);
}
static void add_nextn_key(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_u32(w, A "nextn_predict_layers", 1);
}

static void a_merged_next_token_block_is_no_layer(void **state)
{
    struct change merged = {.drop_key = A "nextn_predict_layers", .add = add_nextn};
    struct change announced = {.drop_key = A "nextn_predict_layers", .add = add_nextn_key};
    struct ds4_model_shape s;

    expect_change_accepted(*state, &merged, &s);
    assert_int_equal(s.n_layer, 7);
    expect_change_accepted(*state, &announced, &s); /* but not in the file */
    assert_int_equal(s.n_layer, 8);
    assert_int_equal(s.n_nextn, 1);
}

static void add_synth_range(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_u32(w, "ds4.synth.first_layer", 2);
    ds4_gguf_write_u32(w, "ds4.synth.last_layer", 4);
}

static void a_partial_file_says_what_it_holds(void **state)
{
    struct change c = {.add = add_synth_range};
    struct ds4_model_part all = {0, 8, true, true};
    struct ds4_err err = {0};
    struct ds4_model_shape s;
    struct ds4_weights_file *wf;

    write_changed(*state, &c);
    wf = ds4_weights_open(copy_path, DS4_WEIGHTS_MMAP, &err);
    unlink(copy_path);
    assert_non_null(wf);
    assert_int_equal(ds4_model_read(wf, &s, &err), 0);
    assert_int_equal(s.n_layer, 8);
    assert_int_equal(s.present.first_layer, 2);
    assert_int_equal(s.present.end_layer, 5);
    assert_false(s.present.embed || s.present.head);
    assert_int_equal(ds4_model_require(wf, &s, &s.present, &err), 0);
    assert_int_equal(ds4_model_require(wf, &s, &all, &err), -1);
    assert_non_null(strstr(err.msg, "the file holds only layers [2, 5)"));
    ds4_weights_close(wf);
}

#define WITH_TINY(test) cmocka_unit_test_setup_teardown(test, open_tiny, close_tiny)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_TINY(tiny_has_the_shape_its_readme_says),
        WITH_TINY(tiny_has_every_tensor_of_the_catalogue_and_no_other),
        WITH_TINY(g18_every_required_key_is_missed_by_name),
        WITH_TINY(optional_keys_have_defaults),
        WITH_TINY(g18_wrong_values_are_named),
        WITH_TINY(other_spellings_of_the_same_value_are_accepted),
        WITH_TINY(g19_tensors_are_named_with_what_was_expected),
        WITH_TINY(other_types_of_a_matrix_are_accepted),
        WITH_TINY(every_finding_is_reported),
        WITH_TINY(a_part_checks_only_its_own_tensors),
        WITH_TINY(g20_vocabulary),
        WITH_TINY(g21_compress_ratios),
        WITH_TINY(g25_hash_tables_name_existing_experts),
        WITH_TINY(a_layer_may_have_fewer_experts_than_announced),
        WITH_TINY(a_merged_next_token_block_is_no_layer),
        WITH_TINY(a_partial_file_says_what_it_holds),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

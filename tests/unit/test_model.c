/* The shape of ds4-tiny, and what a model must be: one change to its metadata or tensor
 * table per case, and the message names it (rules G18, G20 and G21 of the loader). */
#include "common/model.h"

#include "tests/support/changed_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

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
        struct ds4_model_change c = {.drop_key = keys[i]};

        snprintf(words, sizeof(words), "metadata key %s is missing", keys[i]);
        ds4_expect_change_refused(*state, &c, words);
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
        struct ds4_model_change c = {.drop_key = keys[i]};

        ds4_expect_change_accepted(*state, &c, &s);
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
        struct ds4_model_change c = {.drop_key = cases[i].key, .add = cases[i].add};

        ds4_expect_change_refused(*state, &c, cases[i].words);
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
    struct ds4_model_change wide = {.drop_key = A "block_count", .add = add_wide_integers};
    struct ds4_model_change scalar = {.drop_key = A "swiglu_clamp_exp", .add = add_scalar_clamp};
    struct ds4_model_shape s;

    ds4_expect_change_accepted(*state, &wide, &s);
    assert_int_equal(s.n_layer, 8);
    ds4_expect_change_accepted(*state, &scalar, &s);
    assert_true(s.clamp[0] == 7 && s.clamp[7] == 7 && s.clamp_shared[0] == 4);
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
static void add_big_mask(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_i32(w, "tokenizer.ggml.mask_token_id", -1);
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
        {NULL, add_big_mask, "mask_token_id is -1"},
        {"tokenizer.ggml.model", add_other_tokenizer, "tokenizer.ggml.model is \"llama\""},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct ds4_model_change c = {.drop_key = cases[i].key, .add = cases[i].add};

        ds4_expect_change_refused(*state, &c, cases[i].words);
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
    struct ds4_model_change c = {.drop_key = A "attention.compress_ratios"};
    struct ds4_model_shape s;

    c.add = add_short_ratios;
    ds4_expect_change_refused(*state, &c, "compress_ratios has 7 entries for 8 layers");
    c.add = add_negative_ratio;
    ds4_expect_change_refused(*state, &c, "compress_ratios: layer 7 has ratio -4");
    c.add = add_other_ratio;
    ds4_expect_change_refused(*state, &c, "compress_ratios: layer 1 has ratio 2");
    c.add = add_long_ratios;
    ds4_expect_change_accepted(*state, &c, &s);
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
    struct ds4_model_change merged = {.drop_key = A "nextn_predict_layers", .add = add_nextn};
    struct ds4_model_change announced = {.drop_key = A "nextn_predict_layers",
                                         .add = add_nextn_key};
    struct ds4_model_shape s;

    ds4_expect_change_accepted(*state, &merged, &s);
    assert_int_equal(s.n_layer, 7);
    ds4_expect_change_accepted(*state, &announced, &s); /* but not in the file */
    assert_int_equal(s.n_layer, 8);
    assert_int_equal(s.n_nextn, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        DS4_WITH_TINY(tiny_has_the_shape_its_readme_says),
        DS4_WITH_TINY(g18_every_required_key_is_missed_by_name),
        DS4_WITH_TINY(optional_keys_have_defaults),
        DS4_WITH_TINY(g18_wrong_values_are_named),
        DS4_WITH_TINY(other_spellings_of_the_same_value_are_accepted),
        DS4_WITH_TINY(g20_vocabulary),
        DS4_WITH_TINY(g21_compress_ratios),
        DS4_WITH_TINY(a_merged_next_token_block_is_no_layer),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Experts in two places, with the CPU on both sides: the bits of a stage that has them all, whatever lies
 * where, and the plan that decides how many lie on the device. */
#include "worker/offload.h"

#include "tests/support/chain.h"
#include "worker/stage_state.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define TEXT_TOK 150
#define CHUNK    60
#define N_SINGLE 12
#define N_LAST   3

static struct chain_options options_of(const char *model, enum ds4_products products)
{
    return (struct chain_options){
        .model = model, .products = products, .max_step_tok = 64, .context_tok = 512};
}

/* Experts per layer on the device of the last stage under a limit: 8 if all of them are, 0 if the stage cannot be. */
static int32_t residents_under(struct chain_options options, size_t limit)
{
    struct ds4_stage_config config;
    struct ds4_plan plan;
    struct ds4_weights_size size;
    struct ds4_model_shape model;
    struct ds4_err err = {0};
    size_t total;

    options.offload = true;
    options.memory_limit_bytes = limit;
    config = chain_config(&options, options.n_stage > 0 ? options.n_stage - 1 : 0);
    if (ds4_stage_plan(&config, &plan, &size, &model, &total, &err) != 0) {
        assert_int_equal(err.code, DS4_E_NOMEM);
        return 0;
    }
    assert_true(ds4_plan_total(&plan) <= limit);
    return plan.n_resident == 0 ? 8 : plan.n_resident;
}

/* The least limit, but for some KiB, that lets `wanted` experts lie on the device, and not all. */
static size_t limit_for(const struct chain_options *options, int32_t wanted)
{
    size_t low = 0, high = (size_t)1 << 30;

    while (high - low > (size_t)64 << 10) {
        size_t middle = low + (high - low) / 2;

        if (residents_under(*options, middle) >= wanted)
            high = middle;
        else
            low = middle;
    }
    assert_int_equal(residents_under(*options, high), wanted);
    return high;
}

/* Logits after prefill in chunks and single tokens, the last N_LAST of them; then some more tokens, so
 * that residents have moved, and the logits again. */
static void run(const struct chain_options *options, float *out, struct ds4_offload_stats *stats)
{
    struct chain *c = chain_new(options);
    size_t n_vocab = (size_t)chain_n_vocab(c);
    struct ds4_seq_open open = chain_greedy(0, 1, 1, TEXT_TOK);
    int32_t ids[TEXT_TOK + N_SINGLE];

    for (int32_t i = 0; i < TEXT_TOK + N_SINGLE; i++)
        ids[i] = 3 + i * 97 % 256;
    for (int32_t base = 0; base < TEXT_TOK; base += CHUNK) {
        int32_t n = TEXT_TOK - base < CHUNK ? TEXT_TOK - base : CHUNK;
        struct chain_part part = {.base_pos = base, .n_tok = n, .token = ids + base};

        chain_step(c, &open, base == 0 ? 1 : 0, &part, 1);
    }
    chain_logits(c, N_LAST, out);
    for (int32_t i = TEXT_TOK; i < TEXT_TOK + N_SINGLE; i++) {
        struct chain_part part = {.base_pos = i, .n_tok = 1, .token = ids + i};

        chain_step(c, NULL, 0, &part, 1);
        chain_logits(c, 1, out + (size_t)(N_LAST + i - TEXT_TOK) * n_vocab);
    }
    if (stats != NULL)
        ds4_offload_stats(c->stage[c->n_stage - 1]->offload, stats);
    else
        assert_null(c->stage[0]->offload);
    chain_free(c);
}

static void check(const char *model, enum ds4_products products, int32_t wanted)
{
    struct chain_options options = options_of(model, products);
    const size_t n = (size_t)(N_LAST + N_SINGLE) * 4096;
    float *want = calloc(n, sizeof(*want)), *got = calloc(n, sizeof(*got));
    struct ds4_offload_stats stats;

    run(&options, want, NULL);
    options.offload = true;
    options.memory_limit_bytes = limit_for(&options, wanted);
    run(&options, got, &stats);
    if (memcmp(got, want, n * sizeof(*want)) != 0)
        fail_msg("%s with %d experts on the device: other bits", model, wanted);
    assert_true(stats.resident > 0);
    assert_true(stats.host > 0);
    assert_true(stats.streamed > 0); /* 60 rows of three uses over eight experts */
    assert_int_equal(stats.resident + stats.host + stats.streamed, 8 * 3 * (TEXT_TOK + N_SINGLE));
    free(got);
    free(want);
}

static void a_file_gives_the_same_bits_from_two_places(void **state)
{
    (void)state;
    check("tests/data/ds4-tiny.gguf", DS4_PRODUCTS_EXACT, 3);
    check("tests/data/ds4-tiny.gguf", DS4_PRODUCTS_FAST, 5);
}

static void generated_weights_give_the_same_bits_from_two_places(void **state)
{
    (void)state;
    check("synth:tiny:q8:4", DS4_PRODUCTS_EXACT, 4);
    check("synth:tiny:mxfp4:4", DS4_PRODUCTS_FAST, 3);
}

/* Two stages under one limit each, against one stage that has everything. */
static void stages_with_offload_agree_with_one_without(void **state)
{
    struct chain_options options = options_of("synth:tiny:q8:6", DS4_PRODUCTS_EXACT);
    const size_t n = (size_t)(N_LAST + N_SINGLE) * 4096;
    float *want = calloc(n, sizeof(*want)), *got = calloc(n, sizeof(*got));
    struct ds4_offload_stats stats;

    (void)state;
    run(&options, want, NULL);
    options.n_stage = 2;
    options.offload = true;
    options.memory_limit_bytes = limit_for(&options, 4);
    run(&options, got, &stats);
    assert_memory_equal(got, want, n * sizeof(*want));
    assert_true(stats.host > 0);
    free(got);
    free(want);
}

/* One token over and over: its experts move in, and stay. */
static void residents_follow_use(void **state)
{
    struct chain_options options = options_of("synth:tiny:q8:4", DS4_PRODUCTS_EXACT);
    struct ds4_seq_open open = chain_greedy(0, 1, 1, 1);
    struct ds4_offload_stats early = {0}, late = {0}, end;
    const int32_t token = 77;
    struct chain *c;

    (void)state;
    options.offload = true;
    options.memory_limit_bytes = limit_for(&options, 3);
    c = chain_new(&options);
    for (int32_t i = 0; i < 100; i++) {
        struct chain_part part = {.base_pos = i, .n_tok = 1, .token = &token};

        chain_step(c, &open, i == 0 ? 1 : 0, &part, 1);
        if (i == 19)
            ds4_offload_stats(c->stage[0]->offload, &early);
        if (i == 79)
            ds4_offload_stats(c->stage[0]->offload, &late);
    }
    ds4_offload_stats(c->stage[0]->offload, &end);
    assert_true(end.moved > 0);
    assert_true(end.moved < 60); /* they do not come and go */
    assert_true(end.resident - late.resident >
                early.resident); /* of the last twenty and the first */
    assert_int_equal(end.streamed, 0);
    chain_free(c);
}

static void a_plan_that_fits_offloads_nothing(void **state)
{
    struct chain_options options = options_of("synth:tiny:q8:4", DS4_PRODUCTS_EXACT);
    struct chain *c;

    (void)state;
    options.offload = true;
    c = chain_new(&options);
    assert_null(c->stage[0]->offload);
    assert_int_equal(c->stage[0]->plan.n_resident, 0);
    chain_free(c);
}

static void fewer_experts_than_a_token_uses_are_refused(void **state)
{
    struct chain_options options = options_of("synth:tiny:q8:4", DS4_PRODUCTS_EXACT);
    struct ds4_stage_config config;
    struct ds4_plan plan;
    struct ds4_weights_size size;
    struct ds4_model_shape model;
    struct ds4_err err = {0};
    size_t total;

    (void)state;
    options.offload = true;
    options.memory_limit_bytes = limit_for(&options, 3) - ((size_t)256 << 10);
    config = chain_config(&options, 0);
    assert_int_equal(ds4_stage_plan(&config, &plan, &size, &model, &total, &err), -1);
    assert_int_equal(err.code, DS4_E_NOMEM);
    assert_non_null(strstr(err.msg, "even with 3 experts per layer on the device"));
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_file_gives_the_same_bits_from_two_places),
        cmocka_unit_test(generated_weights_give_the_same_bits_from_two_places),
        cmocka_unit_test(stages_with_offload_agree_with_one_without),
        cmocka_unit_test(residents_follow_use),
        cmocka_unit_test(a_plan_that_fits_offloads_nothing),
        cmocka_unit_test(fewer_experts_than_a_token_uses_are_refused),
    };

    chain_take_args(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Tests of worker/rig: cards, cuts, verdicts, and that figures are those of a real start. */
#include "worker/rig.h"

#include "worker/stage_state.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define GIB ((size_t)1 << 30)

static struct ds4_stage_config config_of(const char *model)
{
    return (struct ds4_stage_config){.model_path = model,
                                     .n_stage = 1,
                                     .backend = "cpu",
                                     .device = {.n_thread = 1},
                                     .max_seqs = 8,
                                     .max_step_tok = 520};
}

static int32_t cards_of(const char *text, struct ds4_card *card)
{
    struct ds4_err err = {0};
    int32_t n = ds4_cards_parse(text, card, &err);

    if (n < 0)
        fail_msg("%s", err.msg);
    return n;
}

static struct ds4_rig plan(const struct ds4_stage_config *config, const char *cards)
{
    struct ds4_card card[DS4_MAX_STAGES];
    struct ds4_err err = {0};
    struct ds4_rig rig;

    if (ds4_rig_plan(&rig, config, card, cards_of(cards, card), &err) != 0)
        fail_msg("%s", err.msg);
    return rig;
}

static void cards_are_read_and_bad_ones_refused(void **state)
{
    static const char *const bad[] = {"",   "8,",  ",8",  "8,,8", "0",     "-8",   "8GB",
                                      "8@", "8@0", "8@x", "5000", "8@1e9", "8 ,8", "8@nan"};
    struct ds4_card card[DS4_MAX_STAGES];
    char many[4 * (DS4_MAX_STAGES + 1) + 1] = "8";
    struct ds4_err err = {0};

    (void)state;
    assert_int_equal(ds4_cards_parse("8,10,80@3350.5", card, &err), 3);
    assert_int_equal(card[1].gib, 10);
    assert_true(card[2].gb_per_s == 3350.5);
    assert_true(card[0].gb_per_s > card[1].gb_per_s); /* its memory clock is higher */
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        if (ds4_cards_parse(bad[i], card, &err) != -1)
            fail_msg("\"%s\" was taken", bad[i]);
        assert_int_equal(err.code, DS4_E_INVALID);
    }
    for (size_t i = 0; i < DS4_MAX_STAGES; i++)
        memcpy(many + 1 + 2 * i, ",8", 3);
    assert_int_equal(ds4_cards_parse(many, card, &err), -1);
}

/* 80.8 GB of weights; the published figure for one token is 9.55 GB without the cache. */
static void four_cards_of_64_take_flash_and_every_byte_is_accounted_for(void **state)
{
    const struct ds4_stage_config config = config_of("synth:flash:q2:1");
    struct ds4_rig rig = plan(&config, "64,64,64,64");
    size_t weights = 0, tokens = 0;
    int32_t layers = 0;

    (void)state;
    assert_true(rig.fits);
    assert_int_equal(rig.context_tok, 1048576);
    for (int32_t s = 0; s < 4; s++) {
        const struct ds4_rig_stage *stage = &rig.stage[s];
        size_t classes = 0;

        for (int i = 0; i <= DS4_N_CLASSES; i++)
            classes += stage->weights.class_bytes[i];
        assert_int_equal(classes, stage->weights.device_bytes + stage->weights.mapped_bytes);
        assert_int_equal(stage->plan.spare_bytes, GIB);
        assert_true(ds4_plan_total(&stage->plan) <= ds4_card_usable_bytes(64 * GIB));
        layers += rig.partition.n_layer[s];
        weights += classes;
        tokens += stage->token_bytes;
    }
    assert_int_equal(layers, 43);
    assert_true(weights > (size_t)86714 * 1000000 && weights < (size_t)86725 * 1000000);
    assert_true(tokens > (size_t)9550 * 1000000 && tokens < (size_t)9600 * 1000000);
    ds4_rig_deinit(&rig);
}

/* A stage's sums are those of a loader that walks its layers in one go. */
static void parts_add_up_to_what_a_stage_loads(void **state)
{
    const struct ds4_stage_config config = config_of("synth:tiny:q2:1");
    struct ds4_rig rig = plan(&config, "8,8,8");
    struct ds4_weights_file *file = ds4_weights_open(config.model_path, DS4_WEIGHTS_PREAD, NULL);

    (void)state;
    assert_non_null(file);
    for (int32_t s = 0; s < 3; s++) {
        const struct ds4_weights_request rq = {
            .model = &rig.model, .file = file, .part = ds4_partition_part(&rig.partition, s)};
        struct ds4_weights_size size;

        assert_int_equal(ds4_stage_weights_measure(&rq, &size, NULL), 0);
        assert_memory_equal(&size, &rig.stage[s].weights, sizeof(size));
    }
    ds4_weights_close(file);
    ds4_rig_deinit(&rig);
}

static double slowest(const struct ds4_rig *rig)
{
    double worst = 0;

    for (int32_t s = 0; s < rig->partition.n_stage; s++)
        if (rig->stage[s].token_seconds > worst)
            worst = rig->stage[s].token_seconds;
    return worst;
}

/* Every way to cut eight layers over three cards, one of them slow. */
static void no_other_cut_has_a_faster_slowest_stage(void **state)
{
    struct ds4_stage_config config = config_of("synth:tiny:q8:1");
    static const char *const rigs[] = {"8,8,8", "8@100,8,8", "8,8@20,8", "80,10,8@500"};

    (void)state;
    for (size_t i = 0; i < sizeof(rigs) / sizeof(rigs[0]); i++) {
        struct ds4_rig best;

        config.n_partition = 0;
        best = plan(&config, rigs[i]);
        assert_true(best.fits);
        for (int32_t a = 1; a <= 6; a++) {
            for (int32_t b = 1; a + b <= 7; b++) {
                const int32_t counts[3] = {a, b, 8 - a - b};
                struct ds4_rig other;

                config.partition = counts;
                config.n_partition = 3;
                other = plan(&config, rigs[i]);
                assert_true(other.given);
                assert_true(slowest(&other) >= slowest(&best));
                ds4_rig_deinit(&other);
            }
        }
        ds4_rig_deinit(&best);
    }
}

static const char *advice_with(const struct ds4_rig *rig, const char *words)
{
    for (size_t i = 0; i < sizeof(rig->advice) / sizeof(rig->advice[0]); i++)
        if (strstr(rig->advice[i], words) != NULL)
            return rig->advice[i];
    fail_msg("no advice says \"%s\"; the verdict is \"%s\"", words, rig->verdict);
    return NULL;
}

static void what_would_fit_does_fit(void **state)
{
    struct ds4_stage_config config = config_of("synth:flash:q2:1");
    struct ds4_rig rig = plan(&config, "8,8,8,8");
    char cards[2 * DS4_MAX_STAGES] = "8";
    int32_t n;

    (void)state;
    assert_false(rig.fits);
    assert_non_null(strstr(rig.verdict, "does not fit: stage 0 on a card of 8 GB"));
    n = (int32_t)strtol(advice_with(&rig, "more of 8 GB"), NULL, 10);
    assert_in_range(n, 12, 20);
    advice_with(&rig, "4 card(s) of 32 GB");
    ds4_rig_deinit(&rig);
    for (int32_t i = 1; i < n; i++)
        memcpy(cards + 2 * i - 1, ",8", 3);
    config.context_tok = 8192;
    rig = plan(&config, cards);
    assert_true(rig.fits);
    ds4_rig_deinit(&rig);
    cards[2 * n - 3] = '\0';
    rig = plan(&config, cards);
    assert_false(rig.fits);
    ds4_rig_deinit(&rig);
}

static void a_context_too_long_is_refused_with_one_that_fits(void **state)
{
    struct ds4_stage_config config = config_of("synth:flash:q2:1");
    struct ds4_rig rig;
    int32_t fit;

    (void)state;
    config.context_tok = 1048576;
    rig = plan(&config, "31,31,31");
    assert_false(rig.fits);
    fit = (int32_t)strtol(strstr(advice_with(&rig, "context of "), "context of ") + 11, NULL, 10);
    ds4_rig_deinit(&rig);
    config.context_tok = fit;
    rig = plan(&config, "31,31,31");
    assert_true(rig.fits);
    assert_int_equal(rig.context_tok, fit);
    ds4_rig_deinit(&rig);
}

/* True 8 GB cards: the same bytes as a start would take, fewer experts than the model has, and an
 * estimate that is the host's. */
static void small_cards_keep_what_fits_and_leave_the_rest_to_the_host(void **state)
{
    struct ds4_stage_config config = config_of("synth:flash:q2:1");
    struct ds4_rig rig;
    double fast;

    (void)state;
    rig = plan(&config, "8,8,8,8");
    advice_with(&rig, "gpu.offload = true would");
    fast = rig.token_seconds;
    ds4_rig_deinit(&rig);
    config.offload = true;
    rig = plan(&config, "8,8,8,8");
    assert_true(rig.fits);
    assert_int_equal(rig.context_tok, DS4_PLAN_OFFLOAD_TOK);
    for (int32_t s = 0; s < 4; s++) {
        const struct ds4_rig_stage *stage = &rig.stage[s];

        assert_in_range(stage->plan.n_resident, 6, 255);
        assert_true(ds4_plan_total(&stage->plan) <= ds4_card_usable_bytes(8 * GIB));
        /* One more expert per layer, at about 7 MB, would not have fitted. */
        assert_true(ds4_plan_total(&stage->plan) + (size_t)13 * 7200000 >
                    ds4_card_usable_bytes(8 * GIB));
        assert_true(stage->plan.host_expert_bytes > 15 * GIB);
    }
    assert_true(rig.token_seconds > 3 * fast);
    ds4_rig_deinit(&rig);
    rig = plan(&config, "64,64,64"); /* enough: nothing is left out */
    assert_true(rig.fits);
    assert_int_equal(rig.stage[0].plan.n_resident, 0);
    assert_int_equal(rig.context_tok, 1048576);
    ds4_rig_deinit(&rig);
}

static void a_partition_that_does_not_fit_is_answered_with_one_that_does(void **state)
{
    static const int32_t lopsided[3] = {30, 7, 6};
    struct ds4_stage_config config = config_of("synth:flash:q2:1");
    struct ds4_rig rig;

    (void)state;
    config.partition = lopsided;
    config.n_partition = 3;
    rig = plan(&config, "40,40,40");
    assert_false(rig.fits);
    assert_false(rig.stage[0].fits);
    assert_true(rig.stage[1].fits);
    advice_with(&rig, "cluster.partition = {");
    ds4_rig_deinit(&rig);
}

static void a_start_without_a_partition_takes_the_proposed_one(void **state)
{
    struct ds4_stage_config config = config_of("synth:tiny:q2:3");
    struct ds4_rig rig = plan(&config, "8@50,8,8");
    struct ds4_err err = {0};

    (void)state;
    config.n_stage = 3;
    config.n_card = cards_of("8@50,8,8", config.card);
    for (int32_t s = 0, first = 0; s < 3; s++) {
        struct ds4_stage *st;
        struct ds4_hello hello = {0};

        config.stage = s;
        st = ds4_stage_new(&config, NULL, NULL, &err);
        if (st == NULL)
            fail_msg("%s", err.msg);
        ds4_stage_hello(st, &hello);
        assert_int_equal(hello.first_layer, first);
        first += rig.partition.n_layer[s];
        assert_int_equal(hello.last_layer, first);
        ds4_stage_free(st);
    }
    assert_true(rig.partition.n_layer[0] < rig.partition.n_layer[1]);
    ds4_rig_deinit(&rig);
}

static void a_limit_too_low_stops_the_start_with_the_words_of_the_plan(void **state)
{
    struct ds4_stage_config config = config_of("synth:tiny:q2:3");
    struct ds4_err err = {0};
    struct ds4_rig rig;

    (void)state;
    config.memory_limit_bytes = (size_t)24 << 20;
    assert_int_equal(ds4_rig_plan_here(&rig, &config, &err), 0);
    assert_false(rig.fits);
    assert_null(ds4_stage_new(&config, NULL, NULL, &err));
    assert_int_equal(err.code, DS4_E_NOMEM);
    assert_non_null(strstr(rig.verdict, err.msg));
    ds4_rig_deinit(&rig);
    config.memory_limit_bytes = (size_t)64 << 20;
    assert_int_equal(ds4_rig_plan_here(&rig, &config, &err), 0);
    assert_true(rig.fits);
    assert_int_equal(rig.stage[0].total_bytes, (size_t)64 << 20);
    assert_true(ds4_plan_total(&rig.stage[0].plan) <= (size_t)64 << 20);
    ds4_rig_deinit(&rig);
}

static void table_and_json_say_the_same(void **state)
{
    const struct ds4_stage_config config = config_of("synth:flash:mxfp4:1");
    struct ds4_rig rig = plan(&config, "64,64,64");
    struct ds4_buf table, json;
    char bytes[32];
    const char *at;

    (void)state;
    ds4_buf_init(&table, 1 << 20);
    ds4_buf_init(&json, 1 << 20);
    assert_int_equal(ds4_rig_print(&rig, &table), 0);
    assert_int_equal(ds4_rig_print_json(&rig, &json), 0);
    assert_non_null(strstr(table.ptr, rig.verdict));
    for (int32_t s = 0; s < 3; s++) {
        snprintf(bytes, sizeof(bytes), "\"total\":%zu", ds4_plan_total(&rig.stage[s].plan));
        at = strstr(json.ptr, bytes);
        assert_non_null(at);
        snprintf(bytes, sizeof(bytes), "%zu,%03zu",
                 ds4_plan_total(&rig.stage[s].plan) / 1000 % 1000,
                 ds4_plan_total(&rig.stage[s].plan) % 1000);
        assert_non_null(strstr(table.ptr, bytes));
    }
    ds4_buf_deinit(&json);
    ds4_buf_deinit(&table);
    ds4_rig_deinit(&rig);
}

static void what_is_wrong_in_itself_is_an_error_not_a_verdict(void **state)
{
    struct ds4_stage_config config = config_of("synth:tiny:q2:1");
    static const int32_t counts[2] = {4, 4};
    struct ds4_card card[9];
    struct ds4_err err = {0};
    struct ds4_rig rig;

    (void)state;
    cards_of("8,8,8,8,8,8,8,8,8", card);
    assert_int_equal(ds4_rig_plan(&rig, &config, card, 9, &err), -1); /* eight layers */
    ds4_rig_deinit(&rig);
    config.partition = counts;
    config.n_partition = 2;
    assert_int_equal(ds4_rig_plan(&rig, &config, card, 3, &err), -1);
    ds4_rig_deinit(&rig);
    config.model_path = "tests/data/README.md";
    assert_int_equal(ds4_rig_plan(&rig, &config, card, 2, &err), -1);
    ds4_rig_deinit(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cards_are_read_and_bad_ones_refused),
        cmocka_unit_test(four_cards_of_64_take_flash_and_every_byte_is_accounted_for),
        cmocka_unit_test(parts_add_up_to_what_a_stage_loads),
        cmocka_unit_test(no_other_cut_has_a_faster_slowest_stage),
        cmocka_unit_test(what_would_fit_does_fit),
        cmocka_unit_test(a_context_too_long_is_refused_with_one_that_fits),
        cmocka_unit_test(small_cards_keep_what_fits_and_leave_the_rest_to_the_host),
        cmocka_unit_test(a_partition_that_does_not_fit_is_answered_with_one_that_does),
        cmocka_unit_test(a_start_without_a_partition_takes_the_proposed_one),
        cmocka_unit_test(a_limit_too_low_stops_the_start_with_the_words_of_the_plan),
        cmocka_unit_test(table_and_json_say_the_same),
        cmocka_unit_test(what_is_wrong_in_itself_is_an_error_not_a_verdict),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

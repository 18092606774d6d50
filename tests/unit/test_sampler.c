/* Tests of worker/sampler: each rule of the choice, and that it depends on nothing else. */
#include "worker/sampler.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define N_VOCAB 16
#define N_SLOT  2

struct fixture {
    struct ds4_sampler s;
    struct ds4_seq_open open;
    float logits[N_VOCAB];
    struct ds4_token_entry out;
};

static int set_up(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));

    if (f == NULL || ds4_sampler_init(&f->s, N_VOCAB, N_SLOT, NULL) != 0)
        return -1;
    f->open.seq = 1;
    f->open.n_prompt = 2;
    f->open.max_pos = 1000;
    f->open.n_stop = 1;
    f->open.stop_id[0] = 1;
    f->open.sampling = (struct ds4_sampling){.top_p = 1,
                                             .repetition_penalty = 1,
                                             .n_logprobs = -1,
                                             .think_close_id = -1,
                                             .force_close_at = -1,
                                             .forced_after_id = -1};
    for (int32_t i = 0; i < N_VOCAB; i++)
        f->logits[i] = (float)i / 4; /* the best is 15 */
    *state = f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;

    ds4_sampler_deinit(&f->s);
    free(f);
    return 0;
}

static int32_t pick(struct fixture *f, const int32_t *history, int32_t n)
{
    struct ds4_err err = {0};

    assert_int_equal(ds4_sampler_open(&f->s, &f->open, &err), 0);
    ds4_sampler_pick(&f->s, 0, f->logits, history, n, &f->out);
    assert_int_equal(f->out.n_token, 1);
    assert_true((f->out.flags & DS4_TOKEN_SAMPLED) != 0);
    for (int32_t i = 0; i < N_VOCAB; i++)
        assert_int_equal(f->s.count[i], 0);
    return f->out.token[0];
}

static const int32_t prompt[] = {3, 4};

static void greedy_takes_the_best_and_ties_take_the_lower_id(void **state)
{
    struct fixture *f = *state;

    assert_int_equal(pick(f, prompt, 2), 15);
    f->logits[7] = f->logits[11] = 9;
    assert_int_equal(pick(f, prompt, 2), 7);
}

static void a_row_with_one_nan_or_infinity_gives_no_token(void **state)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    struct fixture *f = *state;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        for (int32_t at = 0; at < N_VOCAB; at += 5) {
            float kept = f->logits[at];

            assert_int_equal(ds4_sampler_open(&f->s, &f->open, NULL), 0);
            f->logits[at] = bad[i];
            ds4_sampler_pick(&f->s, 0, f->logits, prompt, 2, &f->out);
            assert_int_equal(f->out.flags, DS4_TOKEN_NONFINITE | DS4_TOKEN_ENDED);
            assert_int_equal(f->out.n_token, 0);
            assert_int_equal(f->out.n_logprob, 0);
            f->logits[at] = kept;
        }
    }
}

static void a_stop_id_ends_unless_ignored(void **state)
{
    struct fixture *f = *state;

    f->logits[1] = 50;
    assert_int_equal(pick(f, prompt, 2), 1);
    assert_true((f->out.flags & DS4_TOKEN_ENDED) != 0);
    f->open.ignore_stop = true;
    assert_int_equal(pick(f, prompt, 2), 1);
    assert_false((f->out.flags & DS4_TOKEN_ENDED) != 0);
}

static void the_last_allowed_position_ends(void **state)
{
    struct fixture *f = *state;

    f->open.max_pos = 4;
    pick(f, (const int32_t[]){3, 4}, 2);
    assert_false((f->out.flags & DS4_TOKEN_ENDED) != 0);
    pick(f, (const int32_t[]){3, 4, 5}, 3);
    assert_true((f->out.flags & DS4_TOKEN_ENDED) != 0);
}

static void stop_ids_are_masked_before_min_new_tokens(void **state)
{
    struct fixture *f = *state;

    f->logits[1] = 50;
    f->open.sampling.min_new_tok = 2;
    assert_int_equal(pick(f, (const int32_t[]){3, 4}, 2), 15);
    assert_int_equal(pick(f, (const int32_t[]){3, 4, 5}, 3), 15);
    assert_int_equal(pick(f, (const int32_t[]){3, 4, 5, 6}, 4), 1);
}

static void the_think_guard_hides_the_close_and_force_sets_it(void **state)
{
    struct fixture *f = *state;

    f->logits[9] = 50;
    f->open.sampling.think_close_id = 9;
    f->open.sampling.think_close_guard = 1;
    f->open.sampling.force_close_at = 4;
    assert_int_equal(pick(f, (const int32_t[]){3, 4}, 2), 15);
    assert_int_equal(pick(f, (const int32_t[]){3, 4, 5}, 3), 9);
    f->logits[9] = -50;
    assert_int_equal(pick(f, (const int32_t[]){3, 4, 5}, 3), 15);
    assert_int_equal(pick(f, (const int32_t[]){3, 4, 5, 6}, 4), 9);
    assert_int_equal(pick(f, (const int32_t[]){3, 4, 5, 6, 7}, 5), 15);
    /* Thinking that has ended is not ended twice; a close in the prompt is not the sequence's. */
    assert_int_equal(pick(f, (const int32_t[]){3, 4, 9, 6}, 4), 15);
    assert_int_equal(pick(f, (const int32_t[]){9, 4, 5, 6}, 4), 9);
}

static void a_forced_opener_follows_its_trigger_and_nothing_else(void **state)
{
    static const int32_t opener[] = {7, 8, 7};
    struct fixture *f = *state;

    f->open.sampling.n_forced = 3;
    f->open.sampling.forced_id = opener;
    assert_int_equal(pick(f, (const int32_t[]){3, 4}, 2), 7);
    assert_int_equal(pick(f, (const int32_t[]){3, 4, 7}, 3), 8);
    assert_int_equal(pick(f, (const int32_t[]){3, 4, 7, 8}, 4), 7);
    assert_int_equal(pick(f, (const int32_t[]){3, 4, 7, 8, 7}, 5), 15);
    f->open.sampling.forced_after_id = 9;
    assert_int_equal(pick(f, (const int32_t[]){3, 9}, 2), 15); /* in the prompt */
    assert_int_equal(pick(f, (const int32_t[]){3, 4, 5}, 3), 15);
    assert_int_equal(pick(f, (const int32_t[]){3, 4, 5, 9}, 4), 7);
    assert_int_equal(pick(f, (const int32_t[]){3, 4, 5, 9, 7, 8}, 6), 7);
    assert_int_equal(pick(f, (const int32_t[]){3, 4, 5, 9, 7, 8, 7, 9}, 8), 15);
}

static void only_allowed_ids_leave_even_under_a_guard(void **state)
{
    static const int32_t allowed[] = {1, 6};
    struct fixture *f = *state;

    f->open.sampling.n_allowed = 2;
    f->open.sampling.allowed_id = allowed;
    assert_int_equal(pick(f, prompt, 2), 6);
    f->open.sampling.n_allowed = 1; /* the stop id alone, and stop ids are hidden: it gives way */
    f->open.sampling.min_new_tok = 5;
    assert_int_equal(pick(f, prompt, 2), 1);
}

static void bias_moves_the_choice(void **state)
{
    static const int32_t id[] = {2, 15};
    static const float bias[] = {3.0f, -100.0f};
    struct fixture *f = *state;

    f->open.sampling.n_bias = 2;
    f->open.sampling.bias_id = id;
    f->open.sampling.bias = bias;
    assert_int_equal(pick(f, prompt, 2), 2); /* 0.5 + 3 ties with 14 / 4: the lower id */
}

static void presence_and_frequency_see_new_tokens_only(void **state)
{
    struct fixture *f = *state;

    f->open.sampling.presence_penalty = 0.3f;
    assert_int_equal(pick(f, (const int32_t[]){15, 15}, 2), 15); /* prompt does not count */
    assert_int_equal(pick(f, (const int32_t[]){15, 15, 15}, 3), 14);
    f->open.sampling.presence_penalty = 0;
    f->open.sampling.frequency_penalty = 0.2f; /* 15 leads 14 by 0.25 */
    assert_int_equal(pick(f, (const int32_t[]){3, 4, 15}, 3), 15);
    assert_int_equal(pick(f, (const int32_t[]){3, 4, 15, 15}, 4), 14);
}

static void repetition_sees_the_prompt_and_divides_or_multiplies_by_sign(void **state)
{
    struct fixture *f = *state;

    f->open.sampling.repetition_penalty = 1.5f;
    assert_int_equal(pick(f, (const int32_t[]){15, 15}, 2),
                     14); /* once, however often it occurred */
    for (int32_t i = 0; i < N_VOCAB; i++)
        f->logits[i] = -8.0f;
    f->logits[15] = -6.0f; /* -6 * 1.5 = -9 < -8 */
    assert_int_equal(pick(f, (const int32_t[]){15, 3}, 2), 0);
}

static void a_truncated_history_gives_what_a_cold_one_gives(void **state)
{
    struct fixture *f = *state;
    struct ds4_token_entry cold;

    f->open.sampling.presence_penalty = 0.7f;
    f->open.sampling.frequency_penalty = 0.4f;
    f->open.sampling.repetition_penalty = 1.2f;
    f->open.sampling.temperature = 1;
    f->open.sampling.n_logprobs = 3;
    pick(f, (const int32_t[]){3, 4, 15}, 3);
    cold = f->out;
    pick(f, (const int32_t[]){3, 4, 15, 14, 14, 13}, 6);
    pick(f, (const int32_t[]){3, 4, 15}, 3);
    assert_memory_equal(&cold, &f->out, sizeof(cold));
}

/* Share of each id over many positions. */
static void count_draws(struct fixture *f, int32_t n_draw, int32_t *count)
{
    int32_t *history = calloc((size_t)n_draw, sizeof(*history));

    assert_non_null(history);
    memset(count, 0, N_VOCAB * sizeof(*count));
    f->open.max_pos = n_draw + 10;
    for (int32_t n = 0; n < n_draw; n++)
        count[pick(f, history, n)]++;
    free(history);
}

static void draws_follow_the_distribution(void **state)
{
    struct fixture *f = *state;
    int32_t count[N_VOCAB];
    double sum = 0;

    f->open.sampling.temperature = 0.8f;
    f->open.sampling.seed = 42;
    count_draws(f, 20000, count);
    for (int32_t i = 0; i < N_VOCAB; i++)
        sum += exp(f->logits[i] / 0.8);
    for (int32_t i = 0; i < N_VOCAB; i++) {
        double want = 20000 * exp(f->logits[i] / 0.8) / sum;

        assert_true(fabs(count[i] - want) < 5 * sqrt(want) + 1); /* five standard deviations */
    }
}

static void top_k_keeps_k_and_breaks_ties_by_id(void **state)
{
    struct fixture *f = *state;
    int32_t count[N_VOCAB];

    f->open.sampling.temperature = 5;
    f->open.sampling.top_k = 3;
    f->logits[12] = f->logits[13]; /* 15, 14, then 12 before 13 */
    count_draws(f, 500, count);
    for (int32_t i = 0; i < N_VOCAB; i++)
        assert_int_equal(count[i] > 0, i == 15 || i == 14 || i == 12);
}

static void top_p_keeps_the_smallest_set_that_reaches_it(void **state)
{
    struct fixture *f = *state;
    int32_t count[N_VOCAB];

    for (int32_t i = 0; i < N_VOCAB; i++)
        f->logits[i] = -50;
    f->logits[4] = logf(0.5f);
    f->logits[8] = logf(0.3f);
    f->logits[2] = logf(0.2f);
    f->open.sampling.temperature = 1;
    f->open.sampling.top_p = 0.75f;
    count_draws(f, 500, count);
    assert_true(count[4] > 0 && count[8] > 0);
    assert_int_equal(count[4] + count[8], 500);
    f->open.sampling.top_p = 0.85f;
    count_draws(f, 500, count);
    assert_true(count[2] > 0);
    f->open.sampling.top_k = 2; /* of the two left 0.625 is the first's share */
    f->open.sampling.top_p = 0.6f;
    count_draws(f, 200, count);
    assert_int_equal(count[4], 200);
    f->open.sampling.top_p = 0; /* never fewer than one */
    assert_int_equal(pick(f, prompt, 2), 4);
}

static void min_p_drops_what_is_far_below_the_best(void **state)
{
    struct fixture *f = *state;
    int32_t count[N_VOCAB];

    f->open.sampling.temperature = 1;
    f->open.sampling.min_p = 0.5f; /* exp(-0.5) = 0.61 stays, exp(-0.75) = 0.47 goes */
    count_draws(f, 500, count);
    for (int32_t i = 0; i < N_VOCAB; i++)
        assert_int_equal(count[i] > 0, i >= 13);
}

static void same_seed_and_position_give_the_same_token_in_any_slot(void **state)
{
    struct fixture *f = *state;
    struct ds4_token_entry first;

    f->open.sampling.temperature = 2;
    f->open.sampling.seed = 7;
    for (int32_t n = 2; n < 40; n++) {
        int32_t history[40] = {0};

        pick(f, history, n);
        first = f->out;
        f->open.slot = 1;
        assert_int_equal(ds4_sampler_open(&f->s, &f->open, NULL), 0);
        f->open.slot = 0;
        ds4_sampler_pick(&f->s, 1, f->logits, history, n, &f->out);
        assert_int_equal(first.token[0], f->out.token[0]);
    }
}

/* Philox 4x32-10 of counter 0 and key 0, from the Random123 known answers: 6627e8d5 e169c58d ... */
static void uniform_numbers_are_philox(void **state)
{
    double want = (double)((UINT64_C(0x6627e8d5) << 32 | UINT64_C(0xe169c58d)) >> 11) * 0x1p-53;

    (void)state;
    assert_true(ds4_sampler_uniform(0, 0) == want);
    assert_true(ds4_sampler_uniform(0, 1) != want);
    assert_true(ds4_sampler_uniform(1, 0) != want);
}

static void logprobs_are_of_the_raw_row_chosen_first(void **state)
{
    static const int32_t id[] = {2};
    static const float bias[] = {100.0f};
    struct fixture *f = *state;
    double sum = 0;

    f->open.sampling.n_logprobs = 3;
    f->open.sampling.n_bias = 1;
    f->open.sampling.bias_id = id;
    f->open.sampling.bias = bias;
    f->open.sampling.repetition_penalty = 1.5f;
    assert_int_equal(pick(f, prompt, 2), 2);
    for (int32_t i = 0; i < N_VOCAB; i++)
        sum += exp(f->logits[i]);
    assert_int_equal(f->out.n_logprob, 4);
    assert_int_equal(f->out.logprob[0].token, 2);
    for (int32_t i = 1; i < 4; i++)
        assert_int_equal(f->out.logprob[i].token, 16 - i);
    for (int32_t i = 0; i < 4; i++) {
        double want = (double)f->logits[f->out.logprob[i].token] - log(sum);

        assert_true(fabs(f->out.logprob[i].logprob - want) < 1e-6);
    }
    f->open.sampling.n_logprobs = 0;
    pick(f, prompt, 2);
    assert_int_equal(f->out.n_logprob, 1);
}

static void an_open_with_a_bad_id_or_number_is_refused(void **state)
{
    static const int32_t bad_id[] = {N_VOCAB};
    static const int32_t good_id[] = {3};
    static const float nan_bias[] = {NAN};
    struct fixture *f = *state;
    struct ds4_seq_open good = f->open;
    struct ds4_err err = {0};

#define REFUSED(...)                                                                               \
    do {                                                                                           \
        f->open = good;                                                                            \
        __VA_ARGS__;                                                                               \
        assert_int_equal(ds4_sampler_open(&f->s, &f->open, &err), -1);                             \
        assert_int_equal(err.code, DS4_E_PROTOCOL);                                                \
    } while (0)
    REFUSED(f->open.slot = N_SLOT);
    REFUSED(f->open.stop_id[0] = -1);
    REFUSED(f->open.n_stop = DS4_MAX_STOP_IDS + 1);
    REFUSED(f->open.sampling.n_bias = 1; f->open.sampling.bias_id = bad_id;
            f->open.sampling.bias = nan_bias);
    REFUSED(f->open.sampling.n_bias = 1; f->open.sampling.bias_id = good_id;
            f->open.sampling.bias = nan_bias);
    REFUSED(f->open.sampling.n_allowed = 1; f->open.sampling.allowed_id = bad_id);
    REFUSED(f->open.sampling.think_close_id = N_VOCAB);
    REFUSED(f->open.sampling.force_close_at = 3);
    REFUSED(f->open.sampling.temperature = NAN);
    REFUSED(f->open.sampling.top_p = 1.5f);
    REFUSED(f->open.sampling.repetition_penalty = 0);
    REFUSED(f->open.sampling.n_logprobs = DS4_MAX_TOP_LOGPROBS + 1);
#undef REFUSED
}

#define SAMPLER_TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        SAMPLER_TEST(greedy_takes_the_best_and_ties_take_the_lower_id),
        SAMPLER_TEST(a_row_with_one_nan_or_infinity_gives_no_token),
        SAMPLER_TEST(a_stop_id_ends_unless_ignored),
        SAMPLER_TEST(the_last_allowed_position_ends),
        SAMPLER_TEST(stop_ids_are_masked_before_min_new_tokens),
        SAMPLER_TEST(the_think_guard_hides_the_close_and_force_sets_it),
        SAMPLER_TEST(a_forced_opener_follows_its_trigger_and_nothing_else),
        SAMPLER_TEST(only_allowed_ids_leave_even_under_a_guard),
        SAMPLER_TEST(bias_moves_the_choice),
        SAMPLER_TEST(presence_and_frequency_see_new_tokens_only),
        SAMPLER_TEST(repetition_sees_the_prompt_and_divides_or_multiplies_by_sign),
        SAMPLER_TEST(a_truncated_history_gives_what_a_cold_one_gives),
        SAMPLER_TEST(draws_follow_the_distribution),
        SAMPLER_TEST(top_k_keeps_k_and_breaks_ties_by_id),
        SAMPLER_TEST(top_p_keeps_the_smallest_set_that_reaches_it),
        SAMPLER_TEST(min_p_drops_what_is_far_below_the_best),
        SAMPLER_TEST(same_seed_and_position_give_the_same_token_in_any_slot),
        SAMPLER_TEST(uniform_numbers_are_philox),
        SAMPLER_TEST(logprobs_are_of_the_raw_row_chosen_first),
        SAMPLER_TEST(an_open_with_a_bad_id_or_number_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

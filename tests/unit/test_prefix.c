/* The prefix index: token-exact hits, the hot window, and who is evicted. */
#include "router/sched/prefix.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* An entry of n tokens seed, seed + 1, ... that was cut nowhere. */
static void insert(struct ds4_prefix *p, int32_t seed, int32_t n, int64_t used_ns)
{
    struct ds4_prefix_entry entry = {.hi = n, .used_ns = used_ns};

    for (int32_t t = 0; t < n; t++)
        assert_int_equal(DS4_VEC_PUSH(&entry.token, seed + t), 0);
    assert_int_equal(ds4_prefix_insert(p, &entry, NULL), 0);
    assert_null(entry.token.ptr);
}

static void fill(int32_t *token, int32_t seed, int32_t n)
{
    for (int32_t t = 0; t < n; t++)
        token[t] = seed + t;
}

static void hits_are_exact_to_the_token_at_every_length(void **state)
{
    struct ds4_prefix p;
    int32_t prompt[1200];
    struct ds4_prefix_hit hit;

    (void)state;
    for (int32_t n = 40; n <= 1000; n += 37) {
        ds4_prefix_init(&p, 120);
        insert(&p, 5, n, 1);
        fill(prompt, 5, 1200);
        hit = ds4_prefix_find(&p, prompt, n + 1, 0);
        assert_int_equal(hit.index, 0);
        assert_int_equal(hit.start, n);
        prompt[n - 7] = -1;
        hit = ds4_prefix_find(&p, prompt, n + 1, 0);
        assert_int_equal(hit.lcp, n - 7);
        assert_int_equal(hit.start, n - 7);
        ds4_prefix_deinit(&p);
    }
}

static void one_prompt_token_is_always_left_to_run(void **state)
{
    struct ds4_prefix p;
    int32_t prompt[300];
    struct ds4_prefix_hit hit;

    (void)state;
    ds4_prefix_init(&p, 120);
    insert(&p, 1, 300, 1);
    fill(prompt, 1, 300);
    hit = ds4_prefix_find(&p, prompt, 300, 0);
    assert_int_equal(hit.lcp, 300);
    assert_int_equal(hit.start, 299);
    hit = ds4_prefix_find(&p, prompt, 250, 0);
    assert_int_equal(hit.start, 249);
    ds4_prefix_deinit(&p);
}

static void the_hot_window_reaches_back_from_the_highest_position_ever(void **state)
{
    struct ds4_prefix p;
    int32_t prompt[1000];
    struct ds4_prefix_hit hit;

    (void)state;
    ds4_prefix_init(&p, 120);
    insert(&p, 1, 1000, 1);
    fill(prompt, 1, 1000);
    assert_int_equal(ds4_prefix_find(&p, prompt, 881, 0).start, 880);
    hit = ds4_prefix_find(&p, prompt, 880, 0);
    assert_int_equal(hit.start, 0);
    assert_int_equal(hit.index, -1);
    assert_int_equal(hit.lcp, 880);
    /* Written to 1000, cut to 950, regrown to 980: 870 is 130 below what was overwritten. */
    p.entry.ptr[0].token.len = 980;
    assert_int_equal(ds4_prefix_find(&p, prompt, 871, 0).start, 0);
    assert_int_equal(ds4_prefix_find(&p, prompt, 881, 0).start, 880);
    p.entry.ptr[0].install_pos = 900;
    assert_int_equal(ds4_prefix_find(&p, prompt, 881, 0).start, 0);
    assert_int_equal(ds4_prefix_find(&p, prompt, 901, 0).start, 900);
    ds4_prefix_deinit(&p);
}

static void the_longest_of_several_wins_and_salts_keep_apart(void **state)
{
    struct ds4_prefix p;
    int32_t prompt[500];

    (void)state;
    ds4_prefix_init(&p, 120);
    insert(&p, 1, 200, 1);
    insert(&p, 1, 300, 2);
    insert(&p, 2, 500, 3);
    fill(prompt, 1, 500);
    assert_int_equal(ds4_prefix_find(&p, prompt, 500, 0).start, 300);
    p.entry.ptr[1].salt = 9;
    assert_int_equal(ds4_prefix_find(&p, prompt, 500, 0).start, 200);
    assert_int_equal(ds4_prefix_find(&p, prompt, 500, 9).start, 300);
    assert_int_equal(ds4_prefix_find(&p, prompt, 500, 8).index, -1);
    ds4_prefix_deinit(&p);
}

static void a_trifle_in_common_is_no_reason_to_take_an_entry(void **state)
{
    struct ds4_prefix p;
    int32_t prompt[1100];

    (void)state;
    ds4_prefix_init(&p, 2000); /* a window that would allow the cut */
    insert(&p, 1, 1000, 1);
    fill(prompt, 1, 1100);
    prompt[9] = -1;
    assert_int_equal(ds4_prefix_find(&p, prompt, 1100, 0).index, -1);
    fill(prompt, 1, 1100);
    prompt[10] = -1; /* 1 % of it */
    assert_int_equal(ds4_prefix_find(&p, prompt, 1100, 0).start, 10);
    ds4_prefix_deinit(&p);
}

static void the_oldest_goes_first_but_never_the_one_to_keep(void **state)
{
    struct ds4_prefix p;
    struct ds4_prefix_entry taken;

    (void)state;
    ds4_prefix_init(&p, 120);
    assert_int_equal(ds4_prefix_oldest(&p, -1), -1);
    insert(&p, 1, 10, 30);
    insert(&p, 2, 10, 10);
    insert(&p, 3, 10, 20);
    assert_int_equal(ds4_prefix_oldest(&p, -1), 1);
    assert_int_equal(ds4_prefix_oldest(&p, 1), 2);
    taken = ds4_prefix_take(&p, 1);
    assert_int_equal(taken.token.ptr[0], 2);
    DS4_VEC_DEINIT(&taken.token);
    assert_int_equal(p.entry.ptr[1].token.ptr[0], 3);
    taken = ds4_prefix_take(&p, 0);
    DS4_VEC_DEINIT(&taken.token);
    assert_int_equal(ds4_prefix_oldest(&p, 0), -1);
    ds4_prefix_deinit(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hits_are_exact_to_the_token_at_every_length),
        cmocka_unit_test(one_prompt_token_is_always_left_to_run),
        cmocka_unit_test(the_hot_window_reaches_back_from_the_highest_position_ever),
        cmocka_unit_test(the_longest_of_several_wins_and_salts_keep_apart),
        cmocka_unit_test(a_trifle_in_common_is_no_reason_to_take_an_entry),
        cmocka_unit_test(the_oldest_goes_first_but_never_the_one_to_keep),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

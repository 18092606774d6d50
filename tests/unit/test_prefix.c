/* The prefix index: token-exact hits, points, the hot window, sharing, and who is evicted. */
#include "router/sched/prefix.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#define N_BLOCKS 64
#define N_SLOTS  8
#define MAX_TOK  4096

struct rig {
    struct ds4_budget *budget;
    struct ds4_points points;
    struct ds4_prefix prefix;
    int64_t step;
};

/* Host memory for n anchors on one stage whose points all weigh the same. */
static void open_rig(struct rig *r, int32_t n_points)
{
    struct ds4_kv_host host = {
        .n_stage = 1,
        .stage = {{.shape = {.window_tok = 1, .fixed_bytes = 64}, .unit_bytes = 64}},
    };

    *r = (struct rig){.budget = ds4_budget_new(N_BLOCKS, N_SLOTS, MAX_TOK, NULL)};
    assert_non_null(r->budget);
    host.stage[0].max_bytes = (int64_t)n_points * 64;
    ds4_points_init(&r->points, &host, NULL);
    assert_int_equal(ds4_prefix_init(&r->prefix, r->budget, &r->points, N_BLOCKS, 120, NULL), 0);
}

static void assert_sound(const struct rig *r)
{
    struct ds4_err err = {0};

    (void)(ds4_budget_check(r->budget, &err) == 0 && ds4_prefix_check(&r->prefix, &err) == 0 &&
           ds4_points_check(&r->points, &err) == 0);
    assert_string_equal(err.msg, "");
}

static void close_rig(struct rig *r)
{
    struct ds4_budget_sums sums;

    assert_sound(r);
    while (r->prefix.hot.len > 0) {
        struct ds4_hot hot = ds4_prefix_take_hot(&r->prefix, 0);

        ds4_budget_release(r->budget, &hot.lease);
    }
    ds4_prefix_deinit(&r->prefix);
    ds4_budget_sums(r->budget, &sums);
    assert_int_equal(sums.free, N_BLOCKS);
    assert_int_equal(r->points.n_point, 0);
    ds4_points_deinit(&r->points);
    ds4_budget_free(r->budget);
}

static void fill(int32_t *token, int32_t seed, int32_t n)
{
    for (int32_t t = 0; t < n; t++)
        token[t] = seed * 100000 + t;
}

/* Runs the tokens as a sequence would: from what is there, with a point at each of pos[], and keeps the
 * slot if `hot`.  Returns where it started. */
static int32_t run(struct rig *r, const int32_t *token, int32_t n, bool hot, const int32_t *pos,
                   int32_t n_pos)
{
    struct ds4_prefix_hit hit = ds4_prefix_find(&r->prefix, token, n, 0);
    int32_t shared[MAX_TOK / DS4_BLOCK_TOK], first, new_ids;
    struct ds4_kv_ask ask = {.cap_tok = n, .start_tok = hit.start, .shared = shared};
    struct ds4_prefix_node *stand, *end;
    const struct ds4_kv_lease *lease;
    struct ds4_prefix_put put = {.token = token, .n_tok = n, .maker = 1, .odd_end = true};

    hit.start = hit.point == NULL ? 0 : hit.start; /* these tests open a new slot each time */
    hit.node = hit.point == NULL ? NULL : hit.node;
    ask.start_tok = hit.start;
    ds4_prefix_blocks(&hit, shared);
    ds4_prefix_use(&r->prefix, &hit, 0);
    lease = ds4_budget_reserve(r->budget, &ask, NULL);
    assert_non_null(lease);
    ds4_budget_copied(r->budget, lease);
    assert_int_equal(ds4_budget_fill(r->budget, lease, n, &first, &new_ids, NULL), 0);
    assert_int_equal(ds4_budget_may_write(r->budget, lease, hit.start, n, NULL), 0);
    stand = ds4_prefix_stand(&r->prefix, &hit, 0);
    put.block = lease->block;
    end = ds4_prefix_put(&r->prefix, &stand, &put, NULL);
    assert_non_null(end);
    for (int32_t i = 0; i < n_pos; i++) {
        struct ds4_point *point =
            ds4_points_want(&r->points, &(struct ds4_save){.slot = lease->slot}, pos[i],
                            ds4_point_class_at(pos[i]));

        assert_non_null(point);
        ds4_points_posted(&r->points, (int32_t)r->points.wanted.len, ++r->step);
        ds4_points_acked(&r->points, r->step);
        ds4_prefix_attach(&r->prefix, end, point);
    }
    ds4_prefix_leave(&r->prefix, stand);
    if (hot) {
        ds4_budget_park(r->budget, lease);
        assert_int_equal(
            ds4_prefix_keep_hot(
                &r->prefix,
                &(struct ds4_hot){
                    .lease = lease, .node = end, .pos = n, .hi = n, .install_pos = hit.start},
                NULL),
            0);
    } else {
        ds4_budget_release(r->budget, &lease);
    }
    assert_sound(r);
    return hit.start;
}

static void hits_are_exact_to_the_token_at_every_length(void **state)
{
    int32_t prompt[1200];

    (void)state;
    for (int32_t n = 40; n <= 1000; n += 37) {
        struct ds4_prefix_hit hit;
        struct rig r;

        open_rig(&r, 0);
        fill(prompt, 5, 1200);
        run(&r, prompt, n, true, NULL, 0);
        hit = ds4_prefix_find(&r.prefix, prompt, n + 1, 0);
        assert_int_equal(hit.hot, 0);
        assert_int_equal(hit.start, n);
        assert_int_equal(hit.source, DS4_SOURCE_HOT);
        prompt[n - 7] = -1;
        hit = ds4_prefix_find(&r.prefix, prompt, n + 1, 0);
        assert_int_equal(hit.lcp, n - 7);
        assert_int_equal(hit.start, n - 7);
        close_rig(&r);
    }
}

static void one_prompt_token_is_always_left_to_run(void **state)
{
    int32_t prompt[300];
    struct ds4_prefix_hit hit;
    struct rig r;

    (void)state;
    open_rig(&r, 4);
    fill(prompt, 1, 300);
    run(&r, prompt, 300, true, (const int32_t[]){299, 300}, 2);
    hit = ds4_prefix_find(&r.prefix, prompt, 300, 0);
    assert_int_equal(hit.lcp, 300);
    assert_int_equal(hit.start, 299);
    ds4_budget_release(r.budget,
                       &(const struct ds4_kv_lease *){ds4_prefix_take_hot(&r.prefix, 0).lease});
    hit = ds4_prefix_find(&r.prefix, prompt, 300, 0);
    assert_int_equal(hit.start, 299);
    assert_int_equal(hit.source, DS4_SOURCE_TAIL);
    assert_int_equal(ds4_prefix_find(&r.prefix, prompt, 1, 0).start, 0);
    close_rig(&r);
}

static void the_hot_window_and_the_install_bound_a_cut(void **state)
{
    int32_t prompt[1200];
    struct ds4_hot *hot;
    struct rig r;

    (void)state;
    open_rig(&r, 0);
    fill(prompt, 1, 1200);
    run(&r, prompt, 1000, true, NULL, 0);
    hot = &r.prefix.hot.ptr[0];
    for (int32_t m = 860; m < 1000; m++) {
        prompt[m] = -1;
        assert_int_equal(ds4_prefix_find(&r.prefix, prompt, 1100, 0).start, m >= 880 ? m : 0);
        prompt[m] = 100000 + m;
    }
    /* Written to 1000, cut to 950, appended to 980: 870 is gone although 980 - 870 <= 120. */
    hot->install_pos = 950;
    prompt[940] = -1;
    assert_int_equal(ds4_prefix_find(&r.prefix, prompt, 1100, 0).start, 0);
    prompt[940] = 100940;
    prompt[960] = -1;
    assert_int_equal(ds4_prefix_find(&r.prefix, prompt, 1100, 0).start, 960);
    close_rig(&r);
}

static void a_cut_goes_on_from_the_highest_point_it_shares(void **state)
{
    int32_t prompt[1200];
    struct ds4_prefix_hit hit;
    struct rig r;

    (void)state;
    open_rig(&r, 8);
    fill(prompt, 1, 1200);
    run(&r, prompt, 1000, false, (const int32_t[]){128, 640, 512, 999}, 4);
    for (int32_t m = 1; m < 1000; m += 13) {
        prompt[m] = -1;
        hit = ds4_prefix_find(&r.prefix, prompt, 1100, 0);
        assert_int_equal(hit.lcp, m);
        assert_int_equal(hit.start, m >= 999   ? 999
                                    : m >= 640 ? 640
                                    : m >= 512 ? 512
                                    : m >= 128 ? 128
                                               : 0);
        prompt[m] = 100000 + m;
    }
    hit = ds4_prefix_find(&r.prefix, prompt, 1100, 0);
    assert_int_equal(hit.start, 999);
    close_rig(&r);
}

static void another_tenant_finds_nothing(void **state)
{
    int32_t prompt[500];
    struct rig r;

    (void)state;
    open_rig(&r, 2);
    fill(prompt, 1, 500);
    run(&r, prompt, 400, true, (const int32_t[]){384}, 1);
    assert_int_equal(ds4_prefix_find(&r.prefix, prompt, 500, 7).lcp, 0);
    assert_int_equal(ds4_prefix_find(&r.prefix, prompt, 500, 0).lcp, 400);
    close_rig(&r);
}

static void branches_share_blocks_up_to_where_they_part(void **state)
{
    struct ds4_budget_sums sums;
    int32_t prompt[1200];
    struct rig r;

    (void)state;
    open_rig(&r, 8);
    fill(prompt, 1, 1200);
    run(&r, prompt, 1024, false, (const int32_t[]){512, 640}, 2);
    ds4_budget_sums(r.budget, &sums);
    assert_int_equal(sums.cached, 4);
    /* Parts at 700, goes on from 640: in the middle of block 2, of which it gets a copy. */
    for (int32_t t = 700; t < 1024; t++)
        prompt[t] = -t;
    assert_int_equal(run(&r, prompt, 1024, false, NULL, 0), 640);
    ds4_budget_sums(r.budget, &sums);
    assert_int_equal(sums.cached, 6);
    /* Both are there to the end. */
    assert_int_equal(ds4_prefix_find(&r.prefix, prompt, 1024, 0).lcp, 1024);
    fill(prompt, 1, 1200);
    assert_int_equal(ds4_prefix_find(&r.prefix, prompt, 1024, 0).lcp, 1024);
    close_rig(&r);
}

static void a_conversation_that_grows_takes_no_block_twice(void **state)
{
    struct ds4_budget_sums sums;
    int32_t prompt[3000];
    struct rig r;

    (void)state;
    open_rig(&r, 200);
    fill(prompt, 1, 3000);
    for (int32_t n = 50; n < 2900; n += 41) {
        int32_t start = run(&r, prompt, n, false, (const int32_t[]){n}, 1);

        assert_int_equal(start, n == 50 ? 0 : n - 41);
        ds4_budget_sums(r.budget, &sums);
        assert_int_equal(sums.cached, ds4_budget_blocks(n));
        assert_int_equal(r.prefix.n_tok, n);
    }
    close_rig(&r);
}

static void the_least_valuable_leaf_goes_first_and_the_clock_follows(void **state)
{
    struct ds4_prefix_node *victim;
    int32_t a[600], b[600];
    struct rig r;

    (void)state;
    open_rig(&r, 8);
    fill(a, 1, 600);
    fill(b, 2, 600);
    run(&r, a, 512, false, (const int32_t[]){512}, 1);
    run(&r, b, 512, false, NULL, 0);
    run(&r, a, 513, false, NULL, 0);           /* used again */
    (void)ds4_prefix_find(&r.prefix, a, 0, 0); /* protects nothing */
    assert_int_equal(ds4_prefix_reclaimable(&r.prefix), 5);
    while (ds4_prefix_find(&r.prefix, b, 600, 0).lcp > 0) {
        int32_t before = ds4_prefix_find(&r.prefix, b, 600, 0).lcp;

        (void)ds4_prefix_find(&r.prefix, a, 0, 0);
        victim = ds4_prefix_victim(&r.prefix);
        assert_non_null(victim);
        ds4_prefix_evict(&r.prefix, victim);
        assert_sound(&r);
        /* The end of the other branch may go as well: it is one token. */
        assert_true(ds4_prefix_find(&r.prefix, b, 600, 0).lcp <= before);
        assert_true(ds4_prefix_find(&r.prefix, a, 600, 0).lcp >= 512);
    }
    close_rig(&r);
}

static void the_path_of_the_newest_lookup_is_not_evicted(void **state)
{
    int32_t a[600];
    struct rig r;

    (void)state;
    open_rig(&r, 2);
    fill(a, 1, 600);
    run(&r, a, 512, false, (const int32_t[]){512}, 1);
    assert_int_equal(ds4_prefix_find(&r.prefix, a, 600, 0).start, 512);
    assert_int_equal(ds4_prefix_reclaimable(&r.prefix), 0);
    assert_null(ds4_prefix_victim(&r.prefix));
    close_rig(&r);
}

static void boundary_points_outlive_a_flood_of_routine_ones(void **state)
{
    int32_t a[2048];
    struct rig r;
    struct ds4_point *boundary;

    (void)state;
    open_rig(&r, 4);
    fill(a, 1, 2048);
    run(&r, a, 600, false, (const int32_t[]){128}, 1);
    boundary = ds4_points_want(&r.points, &(struct ds4_save){.slot = 0}, 512, DS4_POINT_BOUNDARY);
    ds4_points_posted(&r.points, 1, ++r.step);
    ds4_points_acked(&r.points, r.step);
    /* On its path, as the sequence would hang it. */
    {
        struct ds4_prefix_hit root = {.hot = -1};
        struct ds4_prefix_node *stand = ds4_prefix_stand(&r.prefix, &root, 0);
        /* Everything is there: no block of ours is looked at. */
        const struct ds4_prefix_put put = {
            .token = a, .n_tok = 512, .block = (const int32_t[2]){0}};
        struct ds4_prefix_node *end = ds4_prefix_put(&r.prefix, &stand, &put, NULL);

        assert_non_null(end);
        ds4_prefix_attach(&r.prefix, end, boundary);
        ds4_prefix_leave(&r.prefix, stand);
    }
    for (int32_t i = 0; i < 20; i++) {
        int32_t foreign[300];

        fill(foreign, 10 + i, 300);
        run(&r, foreign, 256, false, (const int32_t[]){128, 256}, 2);
    }
    assert_int_equal(ds4_prefix_find(&r.prefix, a, 600, 0).start, 512);
    assert_true(r.points.n_thinned >= 30);
    close_rig(&r);
}

/* What a refused save had pushed out would be lost for nothing. */
static void a_point_that_finds_no_room_pushes_out_no_other(void **state)
{
    const struct ds4_kv_host host = {
        .n_stage = 1,
        .stage = {{.shape = {.window_tok = 1,
                             .fixed_bytes = 64,
                             .n_group = 1,
                             .group = {{.ratio = 128, .open_bytes = 8}}},
                   .unit_bytes = 64,
                   .max_bytes = 4 * 64}},
    };
    const struct ds4_save from = {.slot = 0};
    struct ds4_point *pinned;
    int32_t a[600];
    struct rig r;

    (void)state;
    open_rig(&r, 0);
    r.points.host = host;
    fill(a, 1, 600);
    run(&r, a, 600, false, (const int32_t[]){128, 256}, 2);
    pinned = ds4_prefix_find(&r.prefix, a, 600, 0).point;
    ds4_points_pin(&r.points, pinned);
    assert_int_equal(r.points.n_point, 2);
    assert_null(
        ds4_points_want(&r.points, &from, 24, DS4_POINT_TAIL)); /* as much as four anchors */
    assert_int_equal(r.points.n_point, 2);
    assert_int_equal(r.points.n_thinned, 0);
    ds4_points_unpin(&r.points, pinned);
    close_rig(&r);
}

/* Somebody was admitted from a point of a sequence whose rows turned out to be bad. */
static void a_point_that_somebody_will_start_from_survives_its_maker(void **state)
{
    struct ds4_prefix_hit hit;
    int32_t a[200];
    struct rig r;

    (void)state;
    open_rig(&r, 4);
    fill(a, 1, 200);
    run(&r, a, 200, false, (const int32_t[]){199}, 1);
    hit = ds4_prefix_find(&r.prefix, a, 200, 0);
    assert_int_equal(hit.start, 199);
    ds4_points_pin(&r.points, hit.point);
    ds4_prefix_unmake(&r.prefix, ds4_prefix_stand(&r.prefix, &hit, 0), 1);
    assert_int_equal(r.points.n_point, 1);
    assert_sound(&r);
    ds4_points_unpin(&r.points, hit.point);
    ds4_prefix_unmake(&r.prefix, ds4_prefix_stand(&r.prefix, &hit, 0), 1);
    assert_int_equal(r.points.n_point, 0);
    close_rig(&r);
}

static void a_trifle_of_a_long_conversation_does_not_take_its_slot(void **state)
{
    int32_t a[4096];
    struct rig r;

    (void)state;
    open_rig(&r, 0);
    fill(a, 1, 4096);
    run(&r, a, 4000, true, NULL, 0);
    r.prefix.hot.ptr[0].hi = 130; /* as if the rings reached back so far */
    for (int32_t t = 27; t < 300; t++)
        a[t] = -1;
    assert_int_equal(ds4_prefix_find(&r.prefix, a, 300, 0).hot, -1);
    close_rig(&r);
}

static void the_slot_idle_for_longest_goes_and_the_sessions_own_before_it(void **state)
{
    int32_t a[200];
    struct rig r;

    (void)state;
    open_rig(&r, 0);
    for (int32_t i = 0; i < 4; i++) {
        fill(a, 10 + i, 150);
        run(&r, a, 150, true, NULL, 0);
        r.prefix.hot.ptr[i].used_ns = 100 - i;
        r.prefix.hot.ptr[i].affinity = (uint64_t)i;
    }
    assert_int_equal(ds4_prefix_coldest(&r.prefix, -1, 0), 3);
    assert_int_equal(ds4_prefix_coldest(&r.prefix, 3, 0), 2);
    assert_int_equal(ds4_prefix_coldest(&r.prefix, -1, 1), 1);
    assert_int_equal(ds4_prefix_coldest(&r.prefix, 1, 1), 3);
    close_rig(&r);
}

static void common_prefix_is_found_at_every_place(void **state)
{
    int32_t a[700], b[700];

    (void)state;
    for (int32_t n = 0; n < 700; n++) {
        fill(a, 1, 700);
        fill(b, 1, 700);
        b[n] = -1;
        assert_int_equal(ds4_prefix_common(a, 700, b, 700), n);
        assert_int_equal(ds4_prefix_common(a, n, b, 700), n);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hits_are_exact_to_the_token_at_every_length),
        cmocka_unit_test(one_prompt_token_is_always_left_to_run),
        cmocka_unit_test(the_hot_window_and_the_install_bound_a_cut),
        cmocka_unit_test(a_cut_goes_on_from_the_highest_point_it_shares),
        cmocka_unit_test(another_tenant_finds_nothing),
        cmocka_unit_test(branches_share_blocks_up_to_where_they_part),
        cmocka_unit_test(a_conversation_that_grows_takes_no_block_twice),
        cmocka_unit_test(the_least_valuable_leaf_goes_first_and_the_clock_follows),
        cmocka_unit_test(the_path_of_the_newest_lookup_is_not_evicted),
        cmocka_unit_test(boundary_points_outlive_a_flood_of_routine_ones),
        cmocka_unit_test(a_point_that_finds_no_room_pushes_out_no_other),
        cmocka_unit_test(a_point_that_somebody_will_start_from_survives_its_maker),
        cmocka_unit_test(a_trifle_of_a_long_conversation_does_not_take_its_slot),
        cmocka_unit_test(the_slot_idle_for_longest_goes_and_the_sessions_own_before_it),
        cmocka_unit_test(common_prefix_is_found_at_every_place),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

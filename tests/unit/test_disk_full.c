/* A disk that is full (kv-cache.md 6, T18 to T20), and all of the disk tier at random: who goes, who stays, and
 * that every answer is that of a lone run whatever happens. */
#include "common/clock.h"
#include "router/sched/engine.h"
#include "tests/support/disk_world.h"
#include "tests/support/sched_asserts.h"

#include <dirent.h>
#include <ftw.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- a full disk ------------------------------------------------------------------------------------ */

/* T18: room for 1.2 conversations, and two of them in turn. */
static void two_conversations_on_a_disk_for_one_do_not_thrash(void **state)
{
    struct world *w = *state;
    int32_t *a = tokens(1, 6000), *b = tokens(2, 6000);
    uint64_t one;

    world_open_rig(w);
    (void)world_ask(w, a, 6000, 5);
    world_settle(w);
    one = world_disk_bytes(w);
    ds4_rig_close(&w->rig);
    ds4_scripted_disk_deinit(&w->disk);
    memset(&w->disk, 0, sizeof(w->disk));
    world_remove_tree(w->dir);
    w->shape.config.disk_bytes = one + one / 5;
    w->shape.n_blocks = 40; /* and one at a time in memory */
    world_open_rig(w);
    for (int32_t i = 0; i < 20; i++) {
        (void)world_ask(w, i % 2 == 0 ? a : b, 6000, 5);
        world_settle(w);
        w->rig.now_ns += 10 * DS4_NS_PER_SEC;
        assert_true(world_disk_bytes(w) <= w->shape.config.disk_bytes);
    }
    assert_true(w->disk.rows_written <= 2 * 6005 + 2 * DS4_EXTENT_TOK);
    assert_true(w->disk.n_read > 0); /* one of them does come back */
    free(a);
    free(b);
}

/* T19: where many conversations begin, routine ones do not push it out. */
static void a_shared_beginning_survives_foreign_conversations(void **state)
{
    struct world *w = *state;
    int32_t *shared = tokens(1, 3000), *foreign;
    const int32_t boundary = 7;

    for (int32_t t = 0; t < 3000; t++)
        shared[t] = shared[t] == boundary ? 8 : shared[t];
    shared[2100] = boundary; /* the first message begins */
    w->shape.config.n_boundary_id = 1;
    w->shape.config.boundary_id[0] = boundary;
    w->shape.config.disk_bytes = 700000; /* a handful of conversations */
    w->shape.n_blocks = 40;
    world_open_rig(w);
    (void)world_ask(w, shared, 3000, 5);
    world_settle(w);
    for (uint32_t i = 0; i < 20; i++) {
        foreign = tokens(50 + i, 5000);
        for (int32_t t = 0; t < 5000; t++)
            foreign[t] = foreign[t] == boundary ? 8 : foreign[t];
        (void)world_ask(w, foreign, 5000, 5);
        world_settle(w);
        w->rig.now_ns += 1000 * DS4_NS_PER_SEC;
        free(foreign);
    }
    assert_true(world_disk_bytes(w) <= w->shape.config.disk_bytes);
    shared[2500] = (shared[2500] + 1) % 5; /* another conversation with that beginning */
    assert_int_equal(world_ask(w, shared, 3000, 5), 2048);
    free(shared);
}

/* T20: what is stored on the way does not evict what the waiting prompt is about to need. */
static void the_commit_a_waiting_prompt_needs_is_not_evicted(void **state)
{
    struct world *w = *state;
    int32_t *wanted = tokens(1, 6000), *big = tokens(2, 12000);
    struct ds4_rig_client *first, *second;

    w->shape.config.max_seqs = 1;
    w->shape.config.disk_bytes = 700000;
    w->shape.n_blocks = 60;
    world_open_rig(w);
    (void)world_ask(w, wanted, 6000, 5);
    world_settle(w);
    w->rig.now_ns += 3600 * DS4_NS_PER_SEC; /* old enough to go */
    ds4_rig_close(&w->rig);
    world_open_rig(w);
    w->rig.now_ns += 7200 * DS4_NS_PER_SEC;
    (void)ds4_rig_turn(&w->rig);
    first = world_submit(w, big, 12000, 5);
    second = world_submit(w, wanted, 6000, 5); /* waits behind it */
    ds4_rig_run(&w->rig);
    assert_int_equal(second->cached, 5999);
    assert_true(ds4_rig_is_right(first, 5) && ds4_rig_is_right(second, 5));
    ds4_rig_client_free(first);
    ds4_rig_client_free(second);
    free(wanted);
    free(big);
}

static void a_cap_that_became_smaller_is_kept_at_the_start(void **state)
{
    struct world *w = *state;

    world_open_rig(w);
    for (uint32_t i = 0; i < 6; i++) {
        int32_t *token = tokens(i, 3000);

        (void)world_ask(w, token, 3000, 5);
        free(token);
    }
    world_settle(w);
    w->shape.config.disk_bytes = world_disk_bytes(w) / 3;
    world_restart(w);
    world_settle(w);
    assert_true(world_disk_bytes(w) <= w->shape.config.disk_bytes);
    assert_true(ds4_catalog_n(w->rig.sched->tier.catalog) > 0);
    for (size_t i = 0; i < w->disk.part.len; i++)
        assert_non_null(ds4_catalog_object(w->rig.sched->tier.catalog, w->disk.part.ptr[i].key,
                                           w->disk.part.ptr[i].tail));
}

/* ---- all of it at random ---------------------------------------------------------------------------- */

static uint32_t pick(uint32_t *x, uint32_t n)
{
    *x = *x * 1664525u + 1013904223u;
    return (*x >> 8) % n;
}

/* Conversations grow, fork, are cut, cancelled; stages fail jobs, generations and routers end; memory and disk are
 * too small for all of it.  Every answer is that of a lone run. */
static void whatever_happens_answers_are_those_of_a_lone_run(void **state)
{
    struct world *w = *state;
    uint32_t x = 4711;

    w->shape.n_blocks = 60;
    w->shape.config.disk_bytes = 900000;
    world_open_rig(w);
    for (int32_t op = 0; op < 600; op++) {
        uint32_t seed = pick(&x, 5);
        int32_t n = 200 + (int32_t)pick(&x, 6000), max_new = 1 + (int32_t)pick(&x, 6);
        int32_t *token = tokens(seed, n);
        struct ds4_rig_client *client;

        if (pick(&x, 3) == 0)
            token[n - 1 - (int32_t)pick(&x, 150)] = (int32_t)pick(&x, DS4_RIG_VOCAB);
        if (pick(&x, 4) == 0) {
            w->disk.fail_kind = (enum ds4_kv_job_of)pick(&x, 3);
            w->disk.fail_after = (int32_t)pick(&x, 4);
            w->disk.fail_stage = (int32_t)pick(&x, 2);
            w->disk.fail_reason = (enum ds4_kv_reason)(1 + pick(&x, DS4_KV_N_REASON - 1));
        }
        client = world_submit(w, token, n, max_new);
        if (pick(&x, 8) == 0) {
            for (uint32_t i = pick(&x, 12); i > 0 && client->req != NULL; i--)
                (void)ds4_rig_turn(&w->rig);
            if (client->req != NULL)
                ds4_sched_cancel(w->rig.sched, client->req, DS4_CANCEL_API, w->rig.now_ns);
        }
        ds4_rig_run(&w->rig);
        assert_int_equal(client->n_done, 1);
        if (client->result.end != DS4_END_CANCELLED)
            assert_true(ds4_rig_is_right(client, max_new));
        ds4_rig_client_free(client);
        free(token);
        w->rig.now_ns += (int64_t)pick(&x, 400) * DS4_NS_PER_SEC;
        if (pick(&x, 3) == 0)
            world_settle(w);
        if (pick(&x, 12) == 0)
            world_lose(w);
        else if (pick(&x, 12) == 0)
            world_restart(w);
        assert_clean(&w->rig);
        assert_true(world_disk_bytes(w) <=
                    w->shape.config.disk_bytes + w->shape.config.disk_bytes / 8);
    }
    print_message("%llu parts written, %llu read, %llu removed\n",
                  (unsigned long long)w->disk.n_written, (unsigned long long)w->disk.n_read,
                  (unsigned long long)w->disk.n_unlinked);
    assert_true(w->disk.n_read > 50);
    w->disk.fail_reason = DS4_KV_OK;
    world_settle(w);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, world_start, world_stop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(two_conversations_on_a_disk_for_one_do_not_thrash),
        TEST(a_shared_beginning_survives_foreign_conversations),
        TEST(the_commit_a_waiting_prompt_needs_is_not_evicted),
        TEST(a_cap_that_became_smaller_is_kept_at_the_start),
        TEST(whatever_happens_answers_are_those_of_a_lone_run),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

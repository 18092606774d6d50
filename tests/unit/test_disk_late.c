/* A disk that falls silent, one that is gone, and one that comes back: what was under way is given up and counted,
 * requests go on without it, nothing is lost, and an answer that comes late harms nobody. */
#include "common/clock.h"
#include "common/metrics.h"
#include "router/sched/engine.h"
#include "tests/support/disk_world.h"
#include "tests/support/sched_asserts.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#define N_TOK   3000
#define LATE_NS (31 * DS4_NS_PER_SEC)

static int start(void **state)
{
    struct world *w;

    assert_int_equal(world_start(state), 0);
    w = *state;
    w->shape.config.metrics = ds4_metrics_new("test", NULL);
    assert_non_null(w->shape.config.metrics);
    return 0;
}

static int stop(void **state)
{
    struct world *w = *state;
    struct ds4_metrics *metrics = w->shape.config.metrics;

    assert_int_equal(world_stop(state), 0);
    ds4_metrics_free(metrics);
    return 0;
}

#define count(w, id, ...)                                                                          \
    ((int)ds4_metric_value((w)->shape.config.metrics, id, ds4_metric_labels(__VA_ARGS__)))

static int32_t n_commits(const struct world *w)
{
    return ds4_catalog_n(w->rig.sched->tier.catalog);
}

static void turns(struct world *w, int32_t n)
{
    while (n-- > 0)
        (void)ds4_rig_turn(&w->rig);
}

/* Jobs are under way and nobody has heard of them for longer than there is time. */
static void wait_too_long(struct world *w)
{
    turns(w, 20);
    assert_true(w->rig.sched->tier.transfer.len > 0);
    assert_false(ds4_tier_is_stalled(w->rig.sched));
    w->rig.now_ns += LATE_NS;
    turns(w, 20);
    assert_true(ds4_tier_is_stalled(w->rig.sched));
}

static void a_save_that_a_stage_never_answers_costs_the_save_and_nothing_else(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, N_TOK), *other = tokens(2, N_TOK);

    world_open_rig(w);
    w->disk.mute = 2;
    assert_int_equal(world_ask(w, token, N_TOK, 5), 0);
    wait_too_long(w);
    assert_null(w->rig.sched->tier.saving);
    assert_int_equal(count(w, DS4_M_KV_DISK_SAVES, "failed"), 1);
    assert_true(count(w, DS4_M_KV_DISK_ABORTS, "1", "save") > 0);
    assert_int_equal(count(w, DS4_M_KV_DISK_ABORTS, "0", "save"), 0);
    assert_int_equal(n_commits(w), 0);
    /* The end does not wait for it, and neither does anybody else. */
    assert_false(ds4_sched_is_saving(w->rig.sched));
    assert_int_equal(world_ask(w, other, N_TOK, 5), 0);
    assert_int_equal(world_ask(w, token, N_TOK, 5), N_TOK - 1); /* memory has it */
    /* It answers after all: what it wrote is removed, and saving goes on. */
    w->disk.mute = 0;
    world_settle(w);
    assert_false(ds4_tier_is_stalled(w->rig.sched));
    assert_true(n_commits(w) > 0);
    assert_int_equal(world_n_files(w, ".w"), 0);
    assert_int_equal(world_n_files(w, ".m"), n_commits(w));
    world_restart(w);
    assert_int_equal(world_ask(w, other, N_TOK, 5), N_TOK - 1);
    free(token);
    free(other);
}

static void blocks_of_a_late_save_are_free_again_and_its_point_is_not(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, N_TOK);
    struct ds4_sched_stats stats;
    int32_t held = 0;

    world_open_rig(w);
    w->disk.silent = true;
    assert_int_equal(world_ask(w, token, N_TOK, 5), 0);
    wait_too_long(w);
    for (size_t i = 0; i < w->rig.sched->tier.transfer.len; i++)
        held += w->rig.sched->tier.transfer.ptr[i]->point != NULL;
    assert_int_equal(held, 1); /* a stage reads the tail's where it lies */
    turns(w, 100);
    w->rig.now_ns += LATE_NS; /* a probe comes back: the rows were copied before it */
    turns(w, 100);
    ds4_sched_stats(w->rig.sched, &stats);
    assert_int_equal(stats.blocks_io, 0);
    for (size_t i = 0; i < w->rig.sched->tier.transfer.len; i++)
        assert_int_equal(w->rig.sched->tier.transfer.ptr[i]->n_block, 0);
    assert_clean(&w->rig);
    w->disk.silent = false;
    world_settle(w);
    free(token);
}

static void
a_restore_that_a_stage_never_answers_is_a_cold_request_and_the_commit_stays(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, N_TOK), *more = tokens(3, N_TOK), n;
    struct ds4_rig_client *client;

    world_open_rig(w);
    assert_int_equal(world_ask(w, token, N_TOK, 5), 0);
    world_restart(w);
    n = n_commits(w);
    w->disk.mute = 1;
    client = world_submit(w, token, N_TOK, 5);
    wait_too_long(w);
    ds4_rig_run(&w->rig);
    assert_int_equal(client->cached, 0);
    assert_true(ds4_rig_is_right(client, 5));
    assert_int_equal(client->n_admitted, 1);
    ds4_rig_client_free(client);
    assert_int_equal(count(w, DS4_M_KV_RESTORES, "disk", "timeout"), 1);
    assert_int_equal(count(w, DS4_M_KV_DISK_REJECTS, "io"), 0);
    assert_true(count(w, DS4_M_KV_DISK_ABORTS, "0", "restore") > 0);
    assert_true(w->rig.sched->points.host.stage[0].held_bytes > 0); /* it may still be filling it */
    /* Nobody asks the silent one a second time. */
    assert_int_equal(world_ask(w, more, N_TOK, 5), 0);
    assert_int_equal(count(w, DS4_M_KV_RESTORES, "disk", "timeout"), 1);
    w->disk.mute = 0;
    world_settle(w);
    w->rig.now_ns += LATE_NS; /* the next step drops what was read in vain: a probe's */
    turns(w, 20);
    assert_int_equal(w->rig.sched->points.host.stage[0].held_bytes, 0);
    assert_int_equal(w->disk.staging.len, 0);
    assert_true(n_commits(w) >= n);
    world_restart(w);
    assert_int_equal(world_ask(w, token, N_TOK, 5), N_TOK - 1);
    assert_int_equal(count(w, DS4_M_KV_RESTORES, "disk", "ok"), 1);
    free(token);
    free(more);
}

static void a_step_that_takes_long_is_not_a_disk_that_is_silent(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, N_TOK);
    struct ds4_rig_client *client;

    world_open_rig(w);
    (void)world_ask(w, token, N_TOK, 5);
    world_restart(w);
    client = world_submit(w, token, N_TOK, 5);
    ds4_sched_pump(w->rig.sched, w->rig.now_ns); /* asks; a job waits behind the steps before it */
    for (size_t i = 0; i < w->rig.sched->tier.transfer.len; i++)
        w->rig.sched->tier.transfer.ptr[i]->after_step = w->rig.sched->next_step + 1;
    w->rig.now_ns += LATE_NS;
    ds4_sched_pump(w->rig.sched, w->rig.now_ns);
    assert_false(ds4_tier_is_stalled(w->rig.sched));
    ds4_rig_run(&w->rig);
    assert_int_equal(client->cached, N_TOK - 1);
    assert_true(ds4_rig_is_right(client, 5));
    ds4_rig_client_free(client);
    free(token);
}

static void a_generation_that_ends_with_a_silent_disk_leaves_nothing_late(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, N_TOK);

    world_open_rig(w);
    w->disk.silent = true;
    (void)world_ask(w, token, N_TOK, 5);
    wait_too_long(w);
    w->disk.silent = false;
    world_lose(w);
    turns(w, 20);
    assert_false(ds4_tier_is_stalled(w->rig.sched));
    assert_int_equal(world_ask(w, token, N_TOK, 5), 0);
    world_restart(w);
    assert_int_equal(world_ask(w, token, N_TOK, 5), N_TOK - 1);
    free(token);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(
            a_save_that_a_stage_never_answers_costs_the_save_and_nothing_else, start, stop),
        cmocka_unit_test_setup_teardown(blocks_of_a_late_save_are_free_again_and_its_point_is_not,
                                        start, stop),
        cmocka_unit_test_setup_teardown(
            a_restore_that_a_stage_never_answers_is_a_cold_request_and_the_commit_stays, start,
            stop),
        cmocka_unit_test_setup_teardown(a_step_that_takes_long_is_not_a_disk_that_is_silent, start,
                                        stop),
        cmocka_unit_test_setup_teardown(
            a_generation_that_ends_with_a_silent_disk_leaves_nothing_late, start, stop),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

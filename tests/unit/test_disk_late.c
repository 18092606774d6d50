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
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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
    assert_false(ds4_tier_is_down(w->rig.sched));
    w->rig.now_ns += LATE_NS;
    turns(w, 20);
    assert_true(ds4_tier_is_down(w->rig.sched));
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
    assert_false(ds4_tier_is_down(w->rig.sched));
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
    assert_false(ds4_tier_is_down(w->rig.sched));
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
    assert_false(ds4_tier_is_down(w->rig.sched));
    assert_int_equal(world_ask(w, token, N_TOK, 5), 0);
    world_restart(w);
    assert_int_equal(world_ask(w, token, N_TOK, 5), N_TOK - 1);
    free(token);
}

/* ---- a folder that is gone -------------------------------------------------------------------------- */

static void move(const char *from, const char *to)
{
    assert_int_equal(rename(from, to), 0);
}

static void assert_state(struct world *w, const char *state, bool troubled)
{
    char trouble[DS4_TROUBLE_BYTES];

    assert_string_equal(ds4_sched_disk_state(w->rig.sched, trouble), state);
    assert_int_equal(trouble[0] != '\0', troubled);
    assert_null(strstr(trouble, "/tmp")); /* people see it who are to see no path */
}

/* Until it is opened again: every failure doubles the wait, up to half a minute. */
static void turn_until(struct world *w, const char *state)
{
    for (int32_t i = 0; i < 1000 && strcmp(ds4_sched_disk_state(w->rig.sched, NULL), state) != 0;
         i++) {
        w->rig.now_ns += DS4_NS_PER_SEC;
        turns(w, 3);
    }
    assert_string_equal(ds4_sched_disk_state(w->rig.sched, NULL), state);
}

static void a_folder_that_is_gone_and_comes_back_is_found_with_all_that_is_in_it(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, N_TOK), *other = tokens(2, N_TOK);
    char away[80];
    int32_t n;

    snprintf(away, sizeof(away), "%s.away", w->dir);
    world_open_rig(w);
    assert_int_equal(world_ask(w, token, N_TOK, 5), 0);
    world_restart(w);
    n = n_commits(w);
    assert_state(w, "ready", false);
    move(w->dir, away);
    /* A restore finds out, the request does not suffer, and no commit is given up for it. */
    assert_int_equal(world_ask(w, token, N_TOK, 5), 0);
    assert_state(w, "lost", true);
    assert_int_equal(world_ask(w, other, N_TOK, 5), 0);
    assert_false(ds4_sched_is_saving(w->rig.sched)); /* an end does not wait for it */
    w->rig.now_ns += 100 * DS4_NS_PER_SEC;
    turns(w, 100);
    assert_state(w, "lost", true);
    assert_int_equal(access(w->dir, F_OK), -1); /* nobody made it anew, on whatever disk that is */
    move(away, w->dir);
    turn_until(w, "ready");
    assert_state(w, "ready", false);
    assert_int_equal(n_commits(w), n);
    world_settle(w); /* and what came meanwhile is kept */
    assert_true(n_commits(w) > n);
    world_restart(w);
    assert_int_equal(world_ask(w, token, N_TOK, 5), N_TOK - 1);
    free(token);
    free(other);
}

static void an_empty_folder_in_its_place_is_begun_anew(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, N_TOK), *other = tokens(2, N_TOK);

    world_open_rig(w);
    assert_int_equal(world_ask(w, token, N_TOK, 5), 0);
    world_settle(w);
    world_remove_tree(w->dir);
    assert_int_equal(world_ask(w, other, N_TOK, 5), 0); /* its save finds out */
    turns(w, 20);
    assert_state(w, "lost", true);
    assert_int_equal(mkdir(w->dir, 0700), 0);
    turn_until(w, "ready");
    assert_int_equal(n_commits(w), 0);
    world_settle(w);
    assert_true(n_commits(w) > 0);
    assert_int_equal(world_n_files(w, ".m"), n_commits(w));
    free(token);
    free(other);
}

static void a_folder_that_is_not_there_at_the_second_generation_is_tried_again(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, N_TOK);
    char away[80];

    snprintf(away, sizeof(away), "%s.away", w->dir);
    world_open_rig(w);
    assert_int_equal(world_ask(w, token, N_TOK, 5), 0);
    world_settle(w);
    move(w->dir, away);
    (void)world_ask(w, token, N_TOK + 0, 6);
    world_lose(w);
    turns(w, 20);
    assert_int_equal(world_ask(w, token, N_TOK, 5), 0);
    turn_until(w, "lost");
    world_lose(w);
    turns(w, 20);
    assert_state(w, "lost", true);
    move(away, w->dir);
    turn_until(w, "ready");
    world_restart(w);
    assert_int_equal(world_ask(w, token, N_TOK, 5), N_TOK - 1);
    free(token);
}

static void saves_that_fail_again_and_again_are_tried_with_pauses_until_they_go_well(void **state)
{
    struct world *w = *state;
    int32_t *token, n = 0;
    int64_t begun_ns;

    world_open_rig(w);
    turns(w, 10);
    begun_ns = w->rig.now_ns;
    for (uint32_t i = 0; i < 300; i++) { /* a talk a second, and no room on a stage */
        w->disk.fail_kind = DS4_SCRIPTED_WRITE;
        w->disk.fail_after = 0;
        w->disk.fail_stage = 1;
        w->disk.fail_reason = DS4_KV_NO_SPACE;
        token = tokens(10 + i, 700);
        assert_int_equal(world_ask(w, token, 700, 2), 0);
        free(token);
        turns(w, 10);
        w->rig.now_ns += DS4_NS_PER_SEC;
    }
    assert_state(w, "failing", true);
    n = count(w, DS4_M_KV_DISK_SAVES, "failed");
    assert_true(n >= 8 && n < 40); /* 1, 2, 4, 8, 16 s, and then twice a minute */
    assert_true(w->rig.now_ns - begun_ns > 290 * DS4_NS_PER_SEC);
    w->disk.fail_reason = DS4_KV_OK;
    turn_until(w, "ready");
    assert_state(w, "ready", false);
    assert_true(n_commits(w) > 0);
    world_settle(w);
}

static int32_t n_denied(const struct world *w)
{
    int32_t n = 0;

    for (int32_t i = 0; i < n_commits(w); i++)
        n += ds4_catalog_at(w->rig.sched->tier.catalog, i)->denied;
    return n;
}

static void what_could_not_be_read_is_tried_again_after_some_minutes(void **state)
{
    static const enum ds4_kv_reason reasons[] = {DS4_KV_IO, DS4_KV_BAD_CRC};
    struct world *w = *state;

    world_open_rig(w);
    for (int32_t i = 0; i < 2; i++) {
        int32_t *token = tokens((uint32_t)i, N_TOK);

        (void)world_ask(w, token, N_TOK, 5);
        world_restart(w);
        w->disk.fail_kind = DS4_SCRIPTED_READ;
        w->disk.fail_after = 0;
        w->disk.fail_stage = 1;
        w->disk.fail_reason = reasons[i];
        assert_int_equal(world_ask(w, token, N_TOK, 5), 0);
        free(token);
        turns(w, 10);
        assert_int_equal(n_denied(w), i == 0); /* what failed a check is not there any more */
        w->rig.now_ns += 200 * DS4_NS_PER_SEC;
        turns(w, 10);
        assert_int_equal(n_denied(w), i == 0);
        w->rig.now_ns += 301 * DS4_NS_PER_SEC;
        turns(w, 10);
        assert_int_equal(n_denied(w), 0);
    }
    assert_int_equal(count(w, DS4_M_KV_RESTORES, "disk", "io"), 1);
    assert_int_equal(count(w, DS4_M_KV_RESTORES, "disk", "corrupt"), 1);
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
        cmocka_unit_test_setup_teardown(
            a_folder_that_is_gone_and_comes_back_is_found_with_all_that_is_in_it, start, stop),
        cmocka_unit_test_setup_teardown(an_empty_folder_in_its_place_is_begun_anew, start, stop),
        cmocka_unit_test_setup_teardown(
            a_folder_that_is_not_there_at_the_second_generation_is_tried_again, start, stop),
        cmocka_unit_test_setup_teardown(
            saves_that_fail_again_and_again_are_tried_with_pauses_until_they_go_well, start, stop),
        cmocka_unit_test_setup_teardown(what_could_not_be_read_is_tried_again_after_some_minutes,
                                        start, stop),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

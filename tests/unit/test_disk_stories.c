/* The disk tier as requests see it (kv-cache.md 3 and 6): saved, lost, restarted, read back, damaged, full.  The
 * scripted stage makes every token depend on every row, so "right" means that each came from its place. */
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

/* ---- saved and read back ---------------------------------------------------------------------------- */

/* T30: a conversation of some length, a longer one, an end, a start: the second one's next turn computes its
 * own tokens and nothing else. */
static void a_conversation_goes_on_after_a_restart(void **state)
{
    struct world *w = *state;
    int32_t *a = tokens(1, 3800), *b = tokens(2, 8000), *next, n, known;

    world_open_rig(w);
    assert_int_equal(world_ask(w, a, 3800, 20), 0);
    assert_int_equal(world_ask(w, b, 8000, 20), 0);
    world_restart(w);
    assert_true(w->rig.sched->tier.scanned);
    next = world_turn(b, 8000, 20, 40, &n);
    known = n - 40 - 1;
    assert_int_equal(world_ask(w, next, n, 20), known);
    assert_int_equal(world_ask(w, a, 3800, 20), 3799); /* the end of its prompt was kept as well */
    assert_true(w->disk.n_read > 0);
    free(a);
    free(b);
    free(next);
}

static void what_memory_had_to_give_up_comes_back_from_disk(void **state)
{
    struct world *w = *state;
    int32_t *first = tokens(1, 12000), *other;

    w->shape.n_blocks = 72; /* one and a half of them */
    world_open_rig(w);
    assert_int_equal(world_ask(w, first, 12000, 10), 0);
    world_settle(w);
    for (uint32_t i = 2; i < 5; i++) {
        other = tokens(i, 12000);
        assert_int_equal(world_ask(w, other, 12000, 10), 0);
        world_settle(w);
        free(other);
    }
    assert_int_equal(world_ask(w, first, 12000, 10), 11999);
    free(first);
}

static void rows_that_memory_still_has_are_not_read(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 6000);
    uint64_t read;

    world_open_rig(w);
    assert_int_equal(world_ask(w, token, 6000, 10), 0);
    world_settle(w);
    /* The slot and every point are gone, the rows are not. */
    while (w->rig.sched->prefix.hot.len > 0)
        ds4_engine_drop_hot(w->rig.sched, 0);
    for (int32_t c = 0; c < DS4_N_POINT_CLASS; c++)
        while (w->rig.sched->points.oldest[c] != NULL)
            ds4_points_drop(&w->rig.sched->points, w->rig.sched->points.oldest[c]);
    read = w->disk.n_read;
    assert_int_equal(world_ask(w, token, 6000, 10), 5999);
    assert_int_equal(w->disk.n_read - read, 1); /* the tail alone */
    free(token);
}

static void every_length_of_a_tail_restores(void **state)
{
    struct world *w = *state;

    world_open_rig(w);
    for (int32_t n = 1900; n < 2200;
         n += n >= 2044 && n < 2053 ? 1 : 23) { /* and about the end of an extent */
        int32_t *token = tokens((uint32_t)n, n);

        assert_int_equal(world_ask(w, token, n, 3), 0);
        world_restart(w);
        assert_int_equal(world_ask(w, token, n, 3), n - 1);
        free(token);
    }
}

static void rows_are_written_once(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(5, 9000), n = 3000;

    world_open_rig(w);
    for (; n <= 9000; n += 1000) {
        (void)world_ask(w, token, n, 2);
        world_settle(w);
    }
    /* Extents once; each commit has a tail of less than an extent. */
    assert_true(w->disk.rows_written <
                9000 + (uint64_t)ds4_catalog_n(w->rig.sched->tier.catalog) * DS4_EXTENT_TOK);
    assert_int_equal(w->disk.n_existed, 0);
    free(token);
}

static void what_is_on_disk_is_not_saved_again_at_the_end(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(5, 2048), n;

    world_open_rig(w);
    for (int32_t i = 0; i < 3; i++) {
        (void)world_ask(w, token, 1000 + 524 * i,
                        2); /* the last one's prompt is two extents long */
        world_settle(w);
        n = ds4_catalog_n(w->rig.sched->tier.catalog);
        world_settle(w);
        assert_int_equal(ds4_catalog_n(w->rig.sched->tier.catalog), n);
    }
    assert_int_equal(world_n_files(w, ".m"), n);
    free(token);
}

static void another_tenant_does_not_get_it(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 3000);
    struct ds4_rig_client *client;

    world_open_rig(w);
    assert_int_equal(world_ask(w, token, 3000, 5), 0);
    world_restart(w);
    client = ds4_rig_client_of(&w->rig, token, 3000, 5);
    client->req->salt = 77;
    assert_int_equal(ds4_rig_submit(client, NULL, NULL), 0);
    ds4_rig_run(&w->rig);
    assert_int_equal(client->cached, 0);
    assert_true(ds4_rig_is_right(client, 5));
    ds4_rig_client_free(client);
    assert_int_equal(w->disk.n_read, 0);
    assert_int_equal(world_ask(w, token, 3000, 5), 2999);
    free(token);
}

static void a_long_prompt_is_saved_on_its_way(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 30000);
    struct ds4_rig_client *client;

    world_open_rig(w);
    client = world_submit(w, token, 30000, 5);
    while (client->progress < 25000)
        assert_true(ds4_rig_turn(&w->rig));
    assert_true(ds4_catalog_n(w->rig.sched->tier.catalog) >= 2);
    ds4_rig_run(&w->rig);
    assert_true(ds4_rig_is_right(client, 5));
    ds4_rig_client_free(client);
    free(token);
}

/* ---- what goes wrong -------------------------------------------------------------------------------- */

/* T17, T16: whatever a read finds, the answer is right, and nobody tries a second time. */
static void a_bad_commit_is_refused_once_and_for_all(void **state)
{
    static const enum ds4_kv_reason reasons[] = {
        DS4_KV_BAD_MAGIC, DS4_KV_BAD_VERSION, DS4_KV_BAD_FINGERPRINT, DS4_KV_BAD_SIZE,
        DS4_KV_BAD_CRC,   DS4_KV_BAD_TOKENS,  DS4_KV_MISSING_PART,    DS4_KV_IO};
    struct world *w = *state;

    world_open_rig(w);
    for (size_t i = 0; i < sizeof(reasons) / sizeof(reasons[0]); i++) {
        int32_t *token = tokens(100 + (uint32_t)i, 3000);
        uint64_t read;

        (void)world_ask(w, token, 3000, 5);
        world_restart(w);
        w->disk.fail_kind = DS4_SCRIPTED_READ;
        w->disk.fail_after = (int32_t)i % 3;
        w->disk.fail_stage = (int32_t)i % 2;
        w->disk.fail_reason = reasons[i];
        assert_int_equal(world_ask(w, token, 3000, 5), 0);
        assert_int_equal(w->disk.fail_reason, DS4_KV_OK); /* it did happen */
        assert_int_equal(w->disk.staging.len + w->rig.sched->tier.restore.len, 0);
        /* With the files in order again, by a router that knows nothing: what failed is not there. */
        world_settle(w);
        world_restart(w);
        read = w->disk.n_read;
        assert_int_equal(world_n_files(w, ".w"), 0);
        (void)world_ask(w, token, 3000, 5);
        assert_true(w->disk.n_read - read < 16);
        free(token);
    }
    assert_true(world_n_files(w, ".bad") > 0);
}

static void what_failed_is_not_read_a_second_time(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 3000);
    int32_t n;

    world_open_rig(w);
    (void)world_ask(w, token, 3000, 5);
    world_restart(w);
    n = ds4_catalog_n(w->rig.sched->tier.catalog);
    w->disk.fail_kind = DS4_SCRIPTED_READ;
    w->disk.fail_stage = 1;
    w->disk.fail_reason = DS4_KV_BAD_CRC; /* of the first extent, which all commits of it need */
    assert_int_equal(world_ask(w, token, 3000, 5), 0);
    assert_int_equal(world_n_files(w, ".bad"), n);
    assert_true(w->disk.n_unlinked > 0);
    world_settle(w);
    world_restart(w); /* what was computed again was saved again */
    assert_int_equal(world_ask(w, token, 3000, 5), 2999);
    free(token);
}

static void a_save_that_one_stage_cannot_do_is_no_commit(void **state)
{
    static const enum ds4_kv_reason reasons[] = {DS4_KV_NO_SPACE, DS4_KV_IO, DS4_KV_REFUSED};
    struct world *w = *state;

    world_open_rig(w);
    for (uint32_t i = 0; i < 9; i++) {
        int32_t *token = tokens(200 + i, 3000);

        w->disk.fail_kind = DS4_SCRIPTED_WRITE;
        w->disk.fail_after = (int32_t)(i % 3);
        w->disk.fail_stage = (int32_t)(i % 2);
        w->disk.fail_reason = reasons[i / 3];
        (void)world_ask(w, token, 3000, 5);
        world_settle(w);
        assert_int_equal(w->disk.fail_reason, DS4_KV_OK);
        assert_int_equal(world_n_files(w, ".w"), 0);
        free(token);
    }
    /* Parts are those of commits and no others. */
    for (size_t i = 0; i < w->disk.part.len; i++)
        assert_non_null(ds4_catalog_object(w->rig.sched->tier.catalog, w->disk.part.ptr[i].key,
                                           w->disk.part.ptr[i].tail));
}

/* T16: the generation ends at every job of a save: the commit is there and right, or is not there. */
static void a_generation_lost_while_saving_leaves_a_commit_or_none(void **state)
{
    struct world *w = *state;

    for (int32_t at = 0; at < 8; at++) {
        int32_t *token = tokens(300 + (uint32_t)at, 3000), cached;
        uint64_t jobs;

        world_open_rig(w);
        (void)world_ask(w, token, 3000, 5);
        jobs = w->disk.n_written + (uint64_t)at;
        for (int32_t i = 0; i < 100 && w->disk.n_written < jobs; i++)
            (void)ds4_rig_turn(&w->rig);
        world_lose(w);
        assert_clean(&w->rig);
        cached = world_ask(w, token, 3000, 5);
        assert_true(cached == 0 || cached > 500);
        world_settle(w);
        assert_int_equal(world_n_files(w, ".w"), 0);
        world_restart(w);
        assert_int_equal(world_ask(w, token, 3000, 5), 2999);
        world_settle(w);
        ds4_rig_close(&w->rig);
        free(token);
    }
    world_open_rig(w);
}

/* The router dies with parts written and no manifest: the next one removes them. */
static void parts_without_a_manifest_are_removed_by_the_next_router(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 3000);

    world_open_rig(w);
    (void)world_ask(w, token, 3000, 5);
    while (w->disk.n_written < 2 || w->rig.sched->tier.saving == NULL ||
           w->rig.sched->tier.saving->storing)
        (void)ds4_rig_turn(&w->rig);
    assert_true(world_n_files(w, ".w") > 0);
    ds4_rig_close(&w->rig); /* nothing is saved on the way */
    world_open_rig(w);
    for (int32_t i = 0; i < 50; i++)
        (void)ds4_rig_turn(&w->rig);
    assert_int_equal(world_n_files(w, ".w"), 0);
    for (size_t i = 0; i < w->disk.part.len; i++)
        assert_non_null(ds4_catalog_object(w->rig.sched->tier.catalog, w->disk.part.ptr[i].key,
                                           w->disk.part.ptr[i].tail));
    (void)world_ask(w, token, 3000, 5);
    free(token);
}

static void a_client_that_goes_while_its_prompt_is_read_leaves_nothing(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 6000);
    struct ds4_rig_client *client;

    world_open_rig(w);
    (void)world_ask(w, token, 6000, 5);
    world_restart(w);
    client = world_submit(w, token, 6000, 5);
    w->disk.silent = true;
    for (int32_t i = 0; i < 5; i++)
        (void)ds4_rig_turn(&w->rig);
    assert_int_equal(w->rig.sched->tier.restore.len, 1);
    ds4_sched_cancel(w->rig.sched, client->req, DS4_CANCEL_DISCONNECT, w->rig.now_ns);
    assert_int_equal(client->n_done, 1);
    assert_int_equal(client->n_admitted, 0);
    ds4_rig_client_free(client);
    w->disk.silent = false;
    world_settle(w);
    assert_int_equal(w->rig.sched->tier.restore.len, 0);
    assert_int_equal(world_ask(w, token, 6000, 5), 5999);
    assert_int_equal(w->disk.staging.len, 0);
    assert_int_equal(w->rig.sched->points.host.stage[0].held_bytes, 0);
    free(token);
}

static void leave_when_admitted(void *owner, int32_t cached_tok)
{
    struct ds4_rig_client *client = owner;

    client->cached = cached_tok;
    ds4_sched_cancel(client->rig->sched, client->req, DS4_CANCEL_DISCONNECT, client->rig->now_ns);
}

/* Everything was read, no step is posted yet: what was read must be dropped, and others must get theirs. */
static void a_client_that_goes_when_its_prompt_has_been_read_blocks_nobody(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 6000);
    struct ds4_rig_client *client;

    world_open_rig(w);
    (void)world_ask(w, token, 6000, 5);
    world_restart(w);
    client = world_submit(w, token, 6000, 5);
    client->req->sink.admitted = leave_when_admitted;
    ds4_rig_run(&w->rig);
    assert_int_equal(client->n_done, 1);
    assert_int_equal(client->cached, 5999); /* it had come from the disk */
    ds4_rig_client_free(client);
    for (int32_t i = 0; i < 3; i++)
        (void)ds4_rig_turn(&w->rig);
    assert_int_equal(w->rig.sched->tier.restore.len, 0);
    assert_int_equal(world_ask(w, token, 6000, 5), 5999);
    assert_int_equal(w->disk.staging.len, 0);
    for (int32_t s = 0; s < 2; s++)
        assert_int_equal(w->rig.sched->points.host.stage[s].held_bytes, 0);
    world_settle(w);
    free(token);
}

static void a_stage_that_does_not_answer_costs_a_cold_prompt(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 6000);
    struct ds4_rig_client *client;

    world_open_rig(w);
    (void)world_ask(w, token, 6000, 5);
    world_restart(w);
    client = world_submit(w, token, 6000, 5);
    w->disk.silent = true;
    for (int32_t i = 0; i < 5; i++)
        (void)ds4_rig_turn(&w->rig);
    w->rig.now_ns += 60 * DS4_NS_PER_SEC;
    ds4_rig_run(&w->rig);
    assert_int_equal(client->cached, 0);
    assert_true(ds4_rig_is_right(client, 5));
    assert_clean(&w->rig);
    ds4_rig_client_free(client);
    w->disk.silent = false; /* the answers come after all */
    world_settle(w);
    (void)world_ask(w, token, 100, 1); /* a step tells the stages what to drop */
    assert_int_equal(w->disk.staging.len, 0);
    assert_int_equal(w->rig.sched->points.host.stage[1].held_bytes, 0);
    free(token);
}

static void a_generation_lost_while_reading_costs_nobody_the_commit(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 6000);
    struct ds4_rig_client *client;

    w->shape.config.replay = true;
    world_open_rig(w);
    (void)world_ask(w, token, 6000, 5);
    world_restart(w);
    client = world_submit(w, token, 6000, 5);
    w->disk.silent = true;
    for (int32_t i = 0; i < 5; i++)
        (void)ds4_rig_turn(&w->rig);
    world_lose(w);
    w->disk.silent = false;
    ds4_rig_run(&w->rig); /* it is read again, and answers */
    assert_int_equal(client->n_admitted, 1);
    assert_int_equal(client->cached, 5999);
    assert_true(ds4_rig_is_right(client, 5));
    assert_true(w->disk.n_read > 0);
    ds4_rig_client_free(client);
    assert_clean(&w->rig);
    free(token);
}

/* ds4 #251: the same file again and again, and each time everything falls. */
static void a_commit_whose_install_ends_two_generations_is_put_away(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 3000);

    world_open_rig(w);
    (void)world_ask(w, token, 3000, 5);
    world_restart(w);
    for (int32_t i = 0; i < 2; i++) {
        struct ds4_rig_client *client;

        (void)ds4_rig_turn(&w->rig); /* the generation's first sign of life */
        client = world_submit(w, token, 3000, 5);
        while (w->rig.sched->tier.suspect == NULL) {
            ds4_sched_pump(w->rig.sched, w->rig.now_ns);
            ds4_rig_disk(&w->rig);
        }
        world_lose(w);
        assert_int_equal(client->n_done, 1);
        ds4_rig_client_free(client);
    }
    assert_int_equal(world_n_files(w, ".bad"), 1);
    (void)world_ask(w, token, 3000, 5);
    free(token);
}

/* T10: no room for the lease, and a commit that would fit it: nothing is read and nothing written. */
static void a_refusal_reads_nothing(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 12000), *other = tokens(2, 8000);
    struct ds4_rig_client *hog, *client;
    uint64_t read;

    w->shape.n_blocks = 60;
    world_open_rig(w);
    (void)world_ask(w, token, 12000, 5);
    world_restart(w);
    hog = world_submit(w, other, 8000, 5);
    while (hog->progress < 1000)
        assert_true(ds4_rig_turn(&w->rig));
    read = w->disk.n_read;
    client = world_submit(w, token, 12000, 5);
    while (hog->progress < 7000)
        assert_true(ds4_rig_turn(&w->rig));
    assert_int_equal(client->n_admitted, 0);
    assert_int_equal(w->disk.n_read, read);
    assert_clean(&w->rig);
    ds4_rig_run(&w->rig);
    assert_int_equal(client->cached, 11999);
    assert_true(ds4_rig_is_right(client, 5) && ds4_rig_is_right(hog, 5));
    ds4_rig_client_free(client);
    ds4_rig_client_free(hog);
    free(token);
    free(other);
}

/* A prompt whose answer had begun waits for the disk in vain: it is computed, whatever the clock of the queue
 * says. */
static void an_answer_that_gave_way_outlives_a_restore_that_fails(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 6000);
    struct ds4_rig_client *client;

    world_open_rig(w);
    (void)world_ask(w, token, 6000, 5);
    world_restart(w);
    client = ds4_rig_client_of(&w->rig, token, 6000, 5);
    for (int32_t t = 0; t < 6000; t++) /* as it is left when its blocks went to another one */
        assert_int_equal(DS4_VEC_PUSH(&client->req->history, token[t]), 0);
    assert_int_equal(ds4_rig_submit(client, NULL, NULL), 0);
    client->req->parked = true;
    w->disk.silent = true;
    for (int32_t i = 0; i < 5; i++)
        (void)ds4_rig_turn(&w->rig);
    assert_int_equal(w->rig.sched->tier.restore.len, 1);
    w->rig.now_ns += 1000 * DS4_NS_PER_SEC;
    ds4_sched_hold(w->rig.sched, true); /* there is no place for it at once */
    for (int32_t i = 0; i < 3; i++)
        (void)ds4_rig_turn(&w->rig);
    ds4_sched_hold(w->rig.sched, false);
    ds4_rig_run(&w->rig);
    assert_int_equal(client->result.reason, DS4_REASON_NONE);
    assert_true(ds4_rig_is_right(client, 5));
    ds4_rig_client_free(client);
    w->disk.silent = false;
    world_settle(w);
    free(token);
}

/* Host memory for the read costs every point, the lease is refused all the same: then the place that a point
 * in memory offered is none any more. */
static void a_point_given_up_for_a_read_is_not_started_from(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 6000);

    w->shape.n_blocks = 26;
    w->shape.n_points = 13;
    world_open_rig(w);
    (void)world_ask(w, token, 6000, 5);
    world_restart(w);
    (void)world_ask(w, token, 5000, 5);
    world_settle(w);
    while (w->rig.sched->prefix.hot.len > 0)
        ds4_engine_drop_hot(w->rig.sched, 0);
    assert_true(w->rig.sched->points.n_point > 0);
    (void)world_ask(w, token, 6000, 5);
    world_settle(w);
    free(token);
}

/* The object is written anew while the removal of its old files is under way: the new ones stay. */
static void a_removal_under_way_spares_what_is_written_anew(void **state)
{
    struct world *w = *state;
    struct ds4_catalog *c;
    int32_t *token = tokens(1, 3000), *next, n;

    world_open_rig(w);
    (void)world_ask(w, token, 3000, 5);
    world_settle(w);
    c = w->rig.sched->tier.catalog;
    while (ds4_catalog_n(c) > 0)
        ds4_tier_drop_commit(w->rig.sched, ds4_catalog_at(c, 0), false);
    for (size_t i = 0; i < w->rig.sched->tier.garbage.len; i++)
        w->rig.sched->tier.garbage.ptr[i]->file = 1; /* the first stage has been told */
    world_settle(w);                                 /* saves the end of the turn again */
    assert_true(ds4_catalog_n(c) > 0);
    world_restart(w);
    next = world_turn(token, 3000, 5, 40, &n);
    assert_int_equal(world_ask(w, next, n, 5), n - 40 - 1);
    assert_int_equal(world_n_files(w, ".bad"), 0);
    free(next);
    free(token);
}

/* The stages come back with another model while the last manifest of the old one is being stored, and while the
 * scan of the old one's folder runs: nothing of it gets into the new catalogue. */
static void another_model_in_the_middle_of_a_save_or_a_scan_is_not_mixed_up(void **state)
{
    struct world *w = *state;
    struct ds4_sched *s;
    int32_t *token = tokens(1, 3000);

    world_open_rig(w);
    s = w->rig.sched;
    (void)world_ask(w, token, 3000, 5);
    while (s->tier.saving == NULL || !s->tier.saving->storing)
        (void)ds4_rig_turn(&w->rig);
    w->rig.host.fingerprint[0] = 1;
    world_lose(w);
    assert_true(s->tier.opening);
    w->rig.host.fingerprint[0] = 2;
    world_lose(w);
    for (int32_t i = 0; i < 3; i++)
        (void)ds4_rig_turn(&w->rig);
    assert_true(s->tier.scanned);
    assert_memory_equal(s->tier.fingerprint, w->rig.host.fingerprint, DS4_ID_BYTES);
    assert_int_equal(ds4_catalog_n(s->tier.catalog), 0);
    assert_clean(&w->rig);
    assert_int_equal(world_ask(w, token, 3000, 5), 0);
    w->rig.host.fingerprint[0] = 0; /* and the old one again */
    world_settle(w);
    world_lose(w);
    for (int32_t i = 0; i < 3; i++)
        (void)ds4_rig_turn(&w->rig);
    assert_true(ds4_catalog_n(s->tier.catalog) > 0);
    assert_clean(&w->rig);
    free(token);
}

static void without_a_folder_no_part_is_written(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 3000);

    world_open_rig(w);
    world_remove_tree(w->dir);
    (void)world_ask(w, token, 3000, 5);
    world_settle(w);
    assert_int_equal(w->disk.n_written, 0);
    assert_int_equal(ds4_catalog_n(w->rig.sched->tier.catalog), 0);
    assert_int_equal(mkdir(w->dir, 0700), 0); /* for the tear-down */
    free(token);
}

/* The manifest is there and the disk thread says it failed: its parts are removed, so it must go as well. */
static void a_commit_that_failed_half_way_leaves_no_manifest(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 3000);
    char path[192], hex[2 * DS4_ID_BYTES + 1];

    world_open_rig(w);
    (void)world_ask(w, token, 3000, 5);
    w->disk.silent = true;
    while (w->rig.sched->tier.saving == NULL || w->rig.sched->tier.saving->n_flight == 0)
        (void)ds4_rig_turn(&w->rig);
    w->disk.silent = false;
    for (int i = 0; i < DS4_ID_BYTES; i++)
        snprintf(hex + 2 * i, 3, "%02x", w->rig.sched->tier.saving->m.commit[i]);
    snprintf(path, sizeof(path), "%s/v1/0000000000000000/man/%s.w", w->dir, hex);
    assert_int_equal(unlink(path), 0); /* what cannot be unlinked is in its place */
    assert_int_equal(mkdir(path, 0700), 0);
    world_settle(w);
    assert_int_equal(world_n_files(w, ".m"), ds4_catalog_n(w->rig.sched->tier.catalog));
    for (size_t i = 0; i < w->disk.part.len; i++)
        assert_non_null(ds4_catalog_object(w->rig.sched->tier.catalog, w->disk.part.ptr[i].key,
                                           w->disk.part.ptr[i].tail));
    free(token);
}

/* A clock that was wrong once must not keep a commit for ever. */
static void a_use_in_the_future_counts_as_one_of_today(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 3000);
    const struct ds4_catalog *c;

    world_open_rig(w);
    (void)world_ask(w, token, 3000, 5);
    world_settle(w);
    c = w->rig.sched->tier.catalog;
    for (int32_t i = 0; i < ds4_catalog_n(c); i++)
        ds4_catalog_at(c, i)->used_ns = i % 2 == 0 ? INT64_MAX : INT64_MIN;
    w->rig.sched->tier.uses_dirty = true;
    world_restart(w);
    c = w->rig.sched->tier.catalog;
    assert_true(ds4_catalog_n(c) > 0);
    for (int32_t i = 0; i < ds4_catalog_n(c); i++)
        assert_true(ds4_catalog_at(c, i)->used_ns >= 0 &&
                    ds4_catalog_at(c, i)->used_ns <= w->rig.now_ns);
    free(token);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, world_start, world_stop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_conversation_goes_on_after_a_restart),
        TEST(what_memory_had_to_give_up_comes_back_from_disk),
        TEST(rows_that_memory_still_has_are_not_read),
        TEST(every_length_of_a_tail_restores),
        TEST(rows_are_written_once),
        TEST(what_is_on_disk_is_not_saved_again_at_the_end),
        TEST(another_tenant_does_not_get_it),
        TEST(a_long_prompt_is_saved_on_its_way),
        TEST(a_bad_commit_is_refused_once_and_for_all),
        TEST(what_failed_is_not_read_a_second_time),
        TEST(a_save_that_one_stage_cannot_do_is_no_commit),
        TEST(a_generation_lost_while_saving_leaves_a_commit_or_none),
        TEST(parts_without_a_manifest_are_removed_by_the_next_router),
        TEST(a_client_that_goes_while_its_prompt_is_read_leaves_nothing),
        TEST(a_client_that_goes_when_its_prompt_has_been_read_blocks_nobody),
        TEST(a_stage_that_does_not_answer_costs_a_cold_prompt),
        TEST(a_generation_lost_while_reading_costs_nobody_the_commit),
        TEST(a_commit_whose_install_ends_two_generations_is_put_away),
        TEST(a_refusal_reads_nothing),
        TEST(an_answer_that_gave_way_outlives_a_restore_that_fails),
        TEST(a_point_given_up_for_a_read_is_not_started_from),
        TEST(a_removal_under_way_spares_what_is_written_anew),
        TEST(another_model_in_the_middle_of_a_save_or_a_scan_is_not_mixed_up),
        TEST(without_a_folder_no_part_is_written),
        TEST(a_commit_that_failed_half_way_leaves_no_manifest),
        TEST(a_use_in_the_future_counts_as_one_of_today),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

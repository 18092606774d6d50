/* The disk tier as requests see it (kv-cache.md 3 and 6): saved, lost, restarted, read back, damaged, full.  The
 * scripted stage makes every token depend on every row, so "right" means that each came from its place. */
#include "common/clock.h"
#include "router/sched/engine.h"
#include "tests/support/sched_rig.h"

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

#define MANY_TURNS 100000

struct world {
    char dir[64];
    struct ds4_scripted_disk disk;
    struct ds4_rig rig;
    struct ds4_rig_shape shape;
};

static const struct ds4_rig_shape roomy = {
    .n_stage = 2,
    .n_blocks = 200,
    .n_slots = 6,
    .context_tok = 32768,
    .n_points = 4000,
    .config = {.max_seqs = 4, .chunk_tok = 512, .disk_no_thread = true, .disk_bytes = 1 << 30},
};

static void open_rig(struct world *w)
{
    w->shape.disk = &w->disk;
    w->shape.config.disk_dir = w->dir;
    ds4_rig_open(&w->rig, &w->shape);
}

static int start(void **state)
{
    struct world *w = calloc(1, sizeof(*w));

    assert_non_null(w);
    snprintf(w->dir, sizeof(w->dir), "/tmp/ds4-disk-XXXXXX");
    assert_non_null(mkdtemp(w->dir));
    w->shape = roomy;
    *state = w;
    return 0;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *where)
{
    (void)st;
    (void)kind;
    (void)where;
    return remove(path);
}

static void remove_tree(const char *path)
{
    assert_int_equal(nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS), 0);
}

static int stop(void **state)
{
    struct world *w = *state;

    ds4_rig_close(&w->rig);
    ds4_scripted_disk_deinit(&w->disk);
    remove_tree(w->dir);
    free(w);
    return 0;
}

static void assert_clean(struct world *w)
{
    struct ds4_sched *s = w->rig.sched;
    struct ds4_err err = {0};

    (void)(ds4_budget_check(s->budget, &err) == 0 && ds4_prefix_check(&s->prefix, &err) == 0 &&
           ds4_points_check(&s->points, &err) == 0 &&
           (s->tier.catalog == NULL || ds4_catalog_check(s->tier.catalog, &err) == 0));
    assert_string_equal(err.msg, "");
    assert_string_equal(w->rig.stage.err.msg, "");
}

/* Everything that is worth it is on disk, and what is not wanted is gone. */
static void settle(struct world *w)
{
    int32_t guard = 0;

    ds4_sched_save_all(w->rig.sched, w->rig.now_ns);
    do
        (void)ds4_rig_turn(&w->rig);
    while ((ds4_sched_is_saving(w->rig.sched) || w->rig.sched->tier.garbage.len > 0 ||
            w->rig.sched->tier.transfer.len > 0 || w->rig.sched->tier.restore.len > 0 ||
            w->rig.stage.queue.len > 0) &&
           ++guard < MANY_TURNS);
    assert_true(guard < MANY_TURNS);
    w->rig.sched->tier.flush = false;
    assert_clean(w);
}

/* Another router on the same folder and the same stages. */
static void restart(struct world *w)
{
    settle(w);
    ds4_rig_close(&w->rig);
    open_rig(w);
    (void)ds4_rig_turn(&w->rig);
}

static int32_t *tokens(uint32_t seed, int32_t n)
{
    int32_t *token = malloc((size_t)n * sizeof(*token));
    uint32_t x = seed * 2654435761u + 1;

    assert_non_null(token);
    for (int32_t t = 0; t < n; t++) {
        x = x * 1664525u + 1013904223u;
        token[t] = (int32_t)((x >> 10) % DS4_RIG_VOCAB);
    }
    return token;
}

static struct ds4_rig_client *submit(struct world *w, const int32_t *token, int32_t n,
                                     int32_t max_new)
{
    struct ds4_rig_client *client = ds4_rig_client_of(&w->rig, token, n, max_new);
    struct ds4_err err = {0};

    assert_int_equal(ds4_rig_submit(client, NULL, &err), 0);
    return client;
}

/* Runs it alone; returns how many prompt tokens were not computed. */
static int32_t ask(struct world *w, const int32_t *token, int32_t n, int32_t max_new)
{
    struct ds4_rig_client *client = submit(w, token, n, max_new);
    int32_t cached;

    ds4_rig_run(&w->rig);
    assert_int_equal(client->result.err.code, DS4_OK);
    assert_true(ds4_rig_is_right(client, max_new));
    assert_int_equal(client->n_admitted, 1);
    cached = client->cached;
    ds4_rig_client_free(client);
    assert_clean(w);
    return cached;
}

static int32_t n_files(struct world *w, const char *suffix)
{
    char path[192];
    struct dirent *entry;
    int32_t n = 0;
    DIR *dir;

    snprintf(path, sizeof(path), "%s/v1/0000000000000000/man", w->dir);
    dir = opendir(path);
    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        size_t len = strlen(entry->d_name), n_suffix = strlen(suffix);

        n += len > n_suffix && strcmp(entry->d_name + len - n_suffix, suffix) == 0;
    }
    if (dir != NULL)
        closedir(dir);
    return n;
}

/* The prompt and what was answered to it, as the next turn sends it: the answer's last token is not computed. */
static int32_t *turn(const int32_t *prompt, int32_t n, int32_t n_answer, int32_t n_more,
                     int32_t *len)
{
    int32_t *all = malloc((size_t)(n + n_answer + n_more) * sizeof(*all));
    int32_t *more = tokens(9000, n_more);

    assert_non_null(all);
    memcpy(all, prompt, (size_t)n * sizeof(*all));
    *len = n;
    while (*len < n + n_answer) {
        all[*len] = ds4_scripted_next(DS4_RIG_VOCAB, all, *len);
        (*len)++;
        if (all[*len - 1] == DS4_RIG_STOP_ID)
            break;
    }
    memcpy(all + *len, more, (size_t)n_more * sizeof(*all));
    *len += n_more;
    free(more);
    return all;
}

/* ---- saved and read back ---------------------------------------------------------------------------- */

/* T30: a conversation of some length, a longer one, an end, a start: the second one's next turn computes its
 * own tokens and nothing else. */
static void a_conversation_goes_on_after_a_restart(void **state)
{
    struct world *w = *state;
    int32_t *a = tokens(1, 3800), *b = tokens(2, 8000), *next, n, known;

    open_rig(w);
    assert_int_equal(ask(w, a, 3800, 20), 0);
    assert_int_equal(ask(w, b, 8000, 20), 0);
    restart(w);
    assert_true(w->rig.sched->tier.scanned);
    next = turn(b, 8000, 20, 40, &n);
    known = n - 40 - 1;
    assert_int_equal(ask(w, next, n, 20), known);
    assert_int_equal(ask(w, a, 3800, 20), 3799); /* the end of its prompt was kept as well */
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
    open_rig(w);
    assert_int_equal(ask(w, first, 12000, 10), 0);
    settle(w);
    for (uint32_t i = 2; i < 5; i++) {
        other = tokens(i, 12000);
        assert_int_equal(ask(w, other, 12000, 10), 0);
        settle(w);
        free(other);
    }
    assert_int_equal(ask(w, first, 12000, 10), 11999);
    free(first);
}

static void rows_that_memory_still_has_are_not_read(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 6000);
    uint64_t read;

    open_rig(w);
    assert_int_equal(ask(w, token, 6000, 10), 0);
    settle(w);
    /* The slot and every point are gone, the rows are not. */
    while (w->rig.sched->prefix.hot.len > 0)
        ds4_engine_drop_hot(w->rig.sched, 0);
    for (int32_t c = 0; c < DS4_N_POINT_CLASS; c++)
        while (w->rig.sched->points.oldest[c] != NULL)
            ds4_points_drop(&w->rig.sched->points, w->rig.sched->points.oldest[c]);
    read = w->disk.n_read;
    assert_int_equal(ask(w, token, 6000, 10), 5999);
    assert_int_equal(w->disk.n_read - read, 1); /* the tail alone */
    free(token);
}

static void every_length_of_a_tail_restores(void **state)
{
    struct world *w = *state;

    open_rig(w);
    for (int32_t n = 1900; n < 2200;
         n += n >= 2044 && n < 2053 ? 1 : 23) { /* and about the end of an extent */
        int32_t *token = tokens((uint32_t)n, n);

        assert_int_equal(ask(w, token, n, 3), 0);
        restart(w);
        assert_int_equal(ask(w, token, n, 3), n - 1);
        free(token);
    }
}

static void rows_are_written_once(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(5, 9000), n = 3000;

    open_rig(w);
    for (; n <= 9000; n += 1000) {
        (void)ask(w, token, n, 2);
        settle(w);
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

    open_rig(w);
    for (int32_t i = 0; i < 3; i++) {
        (void)ask(w, token, 1000 + 524 * i, 2); /* the last one's prompt is two extents long */
        settle(w);
        n = ds4_catalog_n(w->rig.sched->tier.catalog);
        settle(w);
        assert_int_equal(ds4_catalog_n(w->rig.sched->tier.catalog), n);
    }
    assert_int_equal(n_files(w, ".m"), n);
    free(token);
}

static void another_tenant_does_not_get_it(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 3000);
    struct ds4_rig_client *client;

    open_rig(w);
    assert_int_equal(ask(w, token, 3000, 5), 0);
    restart(w);
    client = ds4_rig_client_of(&w->rig, token, 3000, 5);
    client->req->salt = 77;
    assert_int_equal(ds4_rig_submit(client, NULL, NULL), 0);
    ds4_rig_run(&w->rig);
    assert_int_equal(client->cached, 0);
    assert_true(ds4_rig_is_right(client, 5));
    ds4_rig_client_free(client);
    assert_int_equal(w->disk.n_read, 0);
    assert_int_equal(ask(w, token, 3000, 5), 2999);
    free(token);
}

static void a_long_prompt_is_saved_on_its_way(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 30000);
    struct ds4_rig_client *client;

    open_rig(w);
    client = submit(w, token, 30000, 5);
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

    open_rig(w);
    for (size_t i = 0; i < sizeof(reasons) / sizeof(reasons[0]); i++) {
        int32_t *token = tokens(100 + (uint32_t)i, 3000);
        uint64_t read;

        (void)ask(w, token, 3000, 5);
        restart(w);
        w->disk.fail_kind = DS4_SCRIPTED_READ;
        w->disk.fail_after = (int32_t)i % 3;
        w->disk.fail_stage = (int32_t)i % 2;
        w->disk.fail_reason = reasons[i];
        assert_int_equal(ask(w, token, 3000, 5), 0);
        assert_int_equal(w->disk.fail_reason, DS4_KV_OK); /* it did happen */
        assert_int_equal(w->disk.staging.len + w->rig.sched->tier.restore.len, 0);
        /* With the files in order again, by a router that knows nothing: what failed is not there. */
        settle(w);
        restart(w);
        read = w->disk.n_read;
        assert_int_equal(n_files(w, ".w"), 0);
        (void)ask(w, token, 3000, 5);
        assert_true(w->disk.n_read - read < 16);
        free(token);
    }
    assert_true(n_files(w, ".bad") > 0);
}

static void what_failed_is_not_read_a_second_time(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 3000);
    int32_t n;

    open_rig(w);
    (void)ask(w, token, 3000, 5);
    restart(w);
    n = ds4_catalog_n(w->rig.sched->tier.catalog);
    w->disk.fail_kind = DS4_SCRIPTED_READ;
    w->disk.fail_stage = 1;
    w->disk.fail_reason = DS4_KV_BAD_CRC; /* of the first extent, which all commits of it need */
    assert_int_equal(ask(w, token, 3000, 5), 0);
    assert_int_equal(n_files(w, ".bad"), n);
    assert_true(w->disk.n_unlinked > 0);
    settle(w);
    restart(w); /* what was computed again was saved again */
    assert_int_equal(ask(w, token, 3000, 5), 2999);
    free(token);
}

static void a_save_that_one_stage_cannot_do_is_no_commit(void **state)
{
    static const enum ds4_kv_reason reasons[] = {DS4_KV_NO_SPACE, DS4_KV_IO, DS4_KV_REFUSED};
    struct world *w = *state;

    open_rig(w);
    for (uint32_t i = 0; i < 9; i++) {
        int32_t *token = tokens(200 + i, 3000);

        w->disk.fail_kind = DS4_SCRIPTED_WRITE;
        w->disk.fail_after = (int32_t)(i % 3);
        w->disk.fail_stage = (int32_t)(i % 2);
        w->disk.fail_reason = reasons[i / 3];
        (void)ask(w, token, 3000, 5);
        settle(w);
        assert_int_equal(w->disk.fail_reason, DS4_KV_OK);
        assert_int_equal(n_files(w, ".w"), 0);
        free(token);
    }
    /* Parts are those of commits and no others. */
    for (size_t i = 0; i < w->disk.part.len; i++)
        assert_non_null(ds4_catalog_object(w->rig.sched->tier.catalog, w->disk.part.ptr[i].key,
                                           w->disk.part.ptr[i].tail));
}

static void lose(struct world *w)
{
    const struct ds4_err why = {.code = DS4_E_UNAVAILABLE, .msg = "a stage was killed"};

    ds4_sched_stop(w->rig.sched, DS4_REASON_RESTARTED, &why, w->rig.now_ns);
    ds4_rig_start(&w->rig);
}

/* T16: the generation ends at every job of a save: the commit is there and right, or is not there. */
static void a_generation_lost_while_saving_leaves_a_commit_or_none(void **state)
{
    struct world *w = *state;

    for (int32_t at = 0; at < 8; at++) {
        int32_t *token = tokens(300 + (uint32_t)at, 3000), cached;
        uint64_t jobs;

        open_rig(w);
        (void)ask(w, token, 3000, 5);
        jobs = w->disk.n_written + (uint64_t)at;
        for (int32_t i = 0; i < 100 && w->disk.n_written < jobs; i++)
            (void)ds4_rig_turn(&w->rig);
        lose(w);
        assert_clean(w);
        cached = ask(w, token, 3000, 5);
        assert_true(cached == 0 || cached > 500);
        settle(w);
        assert_int_equal(n_files(w, ".w"), 0);
        restart(w);
        assert_int_equal(ask(w, token, 3000, 5), 2999);
        settle(w);
        ds4_rig_close(&w->rig);
        free(token);
    }
    open_rig(w);
}

/* The router dies with parts written and no manifest: the next one removes them. */
static void parts_without_a_manifest_are_removed_by_the_next_router(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 3000);

    open_rig(w);
    (void)ask(w, token, 3000, 5);
    while (w->disk.n_written < 2 || w->rig.sched->tier.saving == NULL ||
           w->rig.sched->tier.saving->storing)
        (void)ds4_rig_turn(&w->rig);
    assert_true(n_files(w, ".w") > 0);
    ds4_rig_close(&w->rig); /* nothing is saved on the way */
    open_rig(w);
    for (int32_t i = 0; i < 50; i++)
        (void)ds4_rig_turn(&w->rig);
    assert_int_equal(n_files(w, ".w"), 0);
    for (size_t i = 0; i < w->disk.part.len; i++)
        assert_non_null(ds4_catalog_object(w->rig.sched->tier.catalog, w->disk.part.ptr[i].key,
                                           w->disk.part.ptr[i].tail));
    (void)ask(w, token, 3000, 5);
    free(token);
}

static void a_client_that_goes_while_its_prompt_is_read_leaves_nothing(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 6000);
    struct ds4_rig_client *client;

    open_rig(w);
    (void)ask(w, token, 6000, 5);
    restart(w);
    client = submit(w, token, 6000, 5);
    w->disk.silent = true;
    for (int32_t i = 0; i < 5; i++)
        (void)ds4_rig_turn(&w->rig);
    assert_int_equal(w->rig.sched->tier.restore.len, 1);
    ds4_sched_cancel(w->rig.sched, client->req, DS4_CANCEL_DISCONNECT, w->rig.now_ns);
    assert_int_equal(client->n_done, 1);
    assert_int_equal(client->n_admitted, 0);
    ds4_rig_client_free(client);
    w->disk.silent = false;
    settle(w);
    assert_int_equal(w->rig.sched->tier.restore.len, 0);
    assert_int_equal(ask(w, token, 6000, 5), 5999);
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

    open_rig(w);
    (void)ask(w, token, 6000, 5);
    restart(w);
    client = submit(w, token, 6000, 5);
    client->req->sink.admitted = leave_when_admitted;
    ds4_rig_run(&w->rig);
    assert_int_equal(client->n_done, 1);
    assert_int_equal(client->cached, 5999); /* it had come from the disk */
    ds4_rig_client_free(client);
    for (int32_t i = 0; i < 3; i++)
        (void)ds4_rig_turn(&w->rig);
    assert_int_equal(w->rig.sched->tier.restore.len, 0);
    assert_int_equal(ask(w, token, 6000, 5), 5999);
    assert_int_equal(w->disk.staging.len, 0);
    for (int32_t s = 0; s < 2; s++)
        assert_int_equal(w->rig.sched->points.host.stage[s].held_bytes, 0);
    settle(w);
    free(token);
}

static void a_stage_that_does_not_answer_costs_a_cold_prompt(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 6000);
    struct ds4_rig_client *client;

    open_rig(w);
    (void)ask(w, token, 6000, 5);
    restart(w);
    client = submit(w, token, 6000, 5);
    w->disk.silent = true;
    for (int32_t i = 0; i < 5; i++)
        (void)ds4_rig_turn(&w->rig);
    w->rig.now_ns += 60 * DS4_NS_PER_SEC;
    ds4_rig_run(&w->rig);
    assert_int_equal(client->cached, 0);
    assert_true(ds4_rig_is_right(client, 5));
    assert_clean(w);
    ds4_rig_client_free(client);
    w->disk.silent = false; /* the answers come after all */
    settle(w);
    (void)ask(w, token, 100, 1); /* a step tells the stages what to drop */
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
    open_rig(w);
    (void)ask(w, token, 6000, 5);
    restart(w);
    client = submit(w, token, 6000, 5);
    w->disk.silent = true;
    for (int32_t i = 0; i < 5; i++)
        (void)ds4_rig_turn(&w->rig);
    lose(w);
    w->disk.silent = false;
    ds4_rig_run(&w->rig); /* it is read again, and answers */
    assert_int_equal(client->n_admitted, 1);
    assert_int_equal(client->cached, 5999);
    assert_true(ds4_rig_is_right(client, 5));
    assert_true(w->disk.n_read > 0);
    ds4_rig_client_free(client);
    assert_clean(w);
    free(token);
}

/* ds4 #251: the same file again and again, and each time everything falls. */
static void a_commit_whose_install_ends_two_generations_is_put_away(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 3000);

    open_rig(w);
    (void)ask(w, token, 3000, 5);
    restart(w);
    for (int32_t i = 0; i < 2; i++) {
        struct ds4_rig_client *client;

        (void)ds4_rig_turn(&w->rig); /* the generation's first sign of life */
        client = submit(w, token, 3000, 5);
        while (w->rig.sched->tier.suspect == NULL) {
            ds4_sched_pump(w->rig.sched, w->rig.now_ns);
            ds4_rig_disk(&w->rig);
        }
        lose(w);
        assert_int_equal(client->n_done, 1);
        ds4_rig_client_free(client);
    }
    assert_int_equal(n_files(w, ".bad"), 1);
    (void)ask(w, token, 3000, 5);
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
    open_rig(w);
    (void)ask(w, token, 12000, 5);
    restart(w);
    hog = submit(w, other, 8000, 5);
    while (hog->progress < 1000)
        assert_true(ds4_rig_turn(&w->rig));
    read = w->disk.n_read;
    client = submit(w, token, 12000, 5);
    while (hog->progress < 7000)
        assert_true(ds4_rig_turn(&w->rig));
    assert_int_equal(client->n_admitted, 0);
    assert_int_equal(w->disk.n_read, read);
    assert_clean(w);
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

    open_rig(w);
    (void)ask(w, token, 6000, 5);
    restart(w);
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
    settle(w);
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
    open_rig(w);
    (void)ask(w, token, 6000, 5);
    restart(w);
    (void)ask(w, token, 5000, 5);
    settle(w);
    while (w->rig.sched->prefix.hot.len > 0)
        ds4_engine_drop_hot(w->rig.sched, 0);
    assert_true(w->rig.sched->points.n_point > 0);
    (void)ask(w, token, 6000, 5);
    settle(w);
    free(token);
}

/* The object is written anew while the removal of its old files is under way: the new ones stay. */
static void a_removal_under_way_spares_what_is_written_anew(void **state)
{
    struct world *w = *state;
    struct ds4_catalog *c;
    int32_t *token = tokens(1, 3000), *next, n;

    open_rig(w);
    (void)ask(w, token, 3000, 5);
    settle(w);
    c = w->rig.sched->tier.catalog;
    while (ds4_catalog_n(c) > 0)
        ds4_tier_drop_commit(w->rig.sched, ds4_catalog_at(c, 0), false);
    for (size_t i = 0; i < w->rig.sched->tier.garbage.len; i++)
        w->rig.sched->tier.garbage.ptr[i]->file = 1; /* the first stage has been told */
    settle(w);                                       /* saves the end of the turn again */
    assert_true(ds4_catalog_n(c) > 0);
    restart(w);
    next = turn(token, 3000, 5, 40, &n);
    assert_int_equal(ask(w, next, n, 5), n - 40 - 1);
    assert_int_equal(n_files(w, ".bad"), 0);
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

    open_rig(w);
    s = w->rig.sched;
    (void)ask(w, token, 3000, 5);
    while (s->tier.saving == NULL || !s->tier.saving->storing)
        (void)ds4_rig_turn(&w->rig);
    w->rig.host.fingerprint[0] = 1;
    lose(w);
    assert_true(s->tier.opening);
    w->rig.host.fingerprint[0] = 2;
    lose(w);
    for (int32_t i = 0; i < 3; i++)
        (void)ds4_rig_turn(&w->rig);
    assert_true(s->tier.scanned);
    assert_memory_equal(s->tier.fingerprint, w->rig.host.fingerprint, DS4_ID_BYTES);
    assert_int_equal(ds4_catalog_n(s->tier.catalog), 0);
    assert_clean(w);
    assert_int_equal(ask(w, token, 3000, 5), 0);
    w->rig.host.fingerprint[0] = 0; /* and the old one again */
    settle(w);
    lose(w);
    for (int32_t i = 0; i < 3; i++)
        (void)ds4_rig_turn(&w->rig);
    assert_true(ds4_catalog_n(s->tier.catalog) > 0);
    assert_clean(w);
    free(token);
}

static void without_a_folder_no_part_is_written(void **state)
{
    struct world *w = *state;
    int32_t *token = tokens(1, 3000);

    open_rig(w);
    remove_tree(w->dir);
    (void)ask(w, token, 3000, 5);
    settle(w);
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

    open_rig(w);
    (void)ask(w, token, 3000, 5);
    w->disk.silent = true;
    while (w->rig.sched->tier.saving == NULL || w->rig.sched->tier.saving->n_flight == 0)
        (void)ds4_rig_turn(&w->rig);
    w->disk.silent = false;
    for (int i = 0; i < DS4_ID_BYTES; i++)
        snprintf(hex + 2 * i, 3, "%02x", w->rig.sched->tier.saving->m.commit[i]);
    snprintf(path, sizeof(path), "%s/v1/0000000000000000/man/%s.w", w->dir, hex);
    assert_int_equal(unlink(path), 0); /* what cannot be unlinked is in its place */
    assert_int_equal(mkdir(path, 0700), 0);
    settle(w);
    assert_int_equal(n_files(w, ".m"), ds4_catalog_n(w->rig.sched->tier.catalog));
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

    open_rig(w);
    (void)ask(w, token, 3000, 5);
    settle(w);
    c = w->rig.sched->tier.catalog;
    for (int32_t i = 0; i < ds4_catalog_n(c); i++)
        ds4_catalog_at(c, i)->used_ns = i % 2 == 0 ? INT64_MAX : INT64_MIN;
    w->rig.sched->tier.uses_dirty = true;
    restart(w);
    c = w->rig.sched->tier.catalog;
    assert_true(ds4_catalog_n(c) > 0);
    for (int32_t i = 0; i < ds4_catalog_n(c); i++)
        assert_true(ds4_catalog_at(c, i)->used_ns >= 0 &&
                    ds4_catalog_at(c, i)->used_ns <= w->rig.now_ns);
    free(token);
}

/* ---- a full disk ------------------------------------------------------------------------------------ */

static uint64_t disk_bytes(const struct world *w)
{
    return ds4_catalog_bytes(w->rig.sched->tier.catalog);
}

/* T18: room for 1.2 conversations, and two of them in turn. */
static void two_conversations_on_a_disk_for_one_do_not_thrash(void **state)
{
    struct world *w = *state;
    int32_t *a = tokens(1, 6000), *b = tokens(2, 6000);
    uint64_t one;

    open_rig(w);
    (void)ask(w, a, 6000, 5);
    settle(w);
    one = disk_bytes(w);
    ds4_rig_close(&w->rig);
    ds4_scripted_disk_deinit(&w->disk);
    memset(&w->disk, 0, sizeof(w->disk));
    remove_tree(w->dir);
    w->shape.config.disk_bytes = one + one / 5;
    w->shape.n_blocks = 40; /* and one at a time in memory */
    open_rig(w);
    for (int32_t i = 0; i < 20; i++) {
        (void)ask(w, i % 2 == 0 ? a : b, 6000, 5);
        settle(w);
        w->rig.now_ns += 10 * DS4_NS_PER_SEC;
        assert_true(disk_bytes(w) <= w->shape.config.disk_bytes);
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
    open_rig(w);
    (void)ask(w, shared, 3000, 5);
    settle(w);
    for (uint32_t i = 0; i < 20; i++) {
        foreign = tokens(50 + i, 5000);
        for (int32_t t = 0; t < 5000; t++)
            foreign[t] = foreign[t] == boundary ? 8 : foreign[t];
        (void)ask(w, foreign, 5000, 5);
        settle(w);
        w->rig.now_ns += 1000 * DS4_NS_PER_SEC;
        free(foreign);
    }
    assert_true(disk_bytes(w) <= w->shape.config.disk_bytes);
    shared[2500] = (shared[2500] + 1) % 5; /* another conversation with that beginning */
    assert_int_equal(ask(w, shared, 3000, 5), 2048);
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
    open_rig(w);
    (void)ask(w, wanted, 6000, 5);
    settle(w);
    w->rig.now_ns += 3600 * DS4_NS_PER_SEC; /* old enough to go */
    ds4_rig_close(&w->rig);
    open_rig(w);
    w->rig.now_ns += 7200 * DS4_NS_PER_SEC;
    (void)ds4_rig_turn(&w->rig);
    first = submit(w, big, 12000, 5);
    second = submit(w, wanted, 6000, 5); /* waits behind it */
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

    open_rig(w);
    for (uint32_t i = 0; i < 6; i++) {
        int32_t *token = tokens(i, 3000);

        (void)ask(w, token, 3000, 5);
        free(token);
    }
    settle(w);
    w->shape.config.disk_bytes = disk_bytes(w) / 3;
    restart(w);
    settle(w);
    assert_true(disk_bytes(w) <= w->shape.config.disk_bytes);
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
    open_rig(w);
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
        client = submit(w, token, n, max_new);
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
            settle(w);
        if (pick(&x, 12) == 0)
            lose(w);
        else if (pick(&x, 12) == 0)
            restart(w);
        assert_clean(w);
        assert_true(disk_bytes(w) <= w->shape.config.disk_bytes + w->shape.config.disk_bytes / 8);
    }
    print_message("%llu parts written, %llu read, %llu removed\n",
                  (unsigned long long)w->disk.n_written, (unsigned long long)w->disk.n_read,
                  (unsigned long long)w->disk.n_unlinked);
    assert_true(w->disk.n_read > 50);
    w->disk.fail_reason = DS4_KV_OK;
    settle(w);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, start, stop)

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
        TEST(two_conversations_on_a_disk_for_one_do_not_thrash),
        TEST(a_shared_beginning_survives_foreign_conversations),
        TEST(the_commit_a_waiting_prompt_needs_is_not_evicted),
        TEST(a_cap_that_became_smaller_is_kept_at_the_start),
        TEST(whatever_happens_answers_are_those_of_a_lone_run),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* A scheduler, its scripted stages and their disk (see the header). */
#include "tests/support/disk_world.h"

#include "router/sched/engine.h"
#include "tests/support/sched_asserts.h"
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

static const struct ds4_rig_shape roomy = {
    .n_stage = 2,
    .n_blocks = 200,
    .n_slots = 6,
    .context_tok = 32768,
    .n_points = 4000,
    .config = {.max_seqs = 4, .chunk_tok = 512, .disk_no_thread = true, .disk_bytes = 1 << 30},
};

void world_open_rig(struct world *w)
{
    w->shape.disk = &w->disk;
    w->shape.config.disk_dir = w->dir;
    ds4_rig_open(&w->rig, &w->shape);
}

int world_start(void **state)
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

void world_remove_tree(const char *path)
{
    assert_int_equal(nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS), 0);
}

int world_stop(void **state)
{
    struct world *w = *state;

    ds4_rig_close(&w->rig);
    ds4_scripted_disk_deinit(&w->disk);
    world_remove_tree(w->dir);
    free(w);
    return 0;
}

/* Everything that is worth it is on disk, and what is not wanted is gone. */
void world_settle(struct world *w)
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
    assert_clean(&w->rig);
}

/* Another router on the same folder and the same stages. */
void world_restart(struct world *w)
{
    world_settle(w);
    ds4_rig_close(&w->rig);
    world_open_rig(w);
    (void)ds4_rig_turn(&w->rig);
}

struct ds4_rig_client *world_submit(struct world *w, const int32_t *token, int32_t n,
                                    int32_t max_new)
{
    return submit(ds4_rig_client_of(&w->rig, token, n, max_new));
}

/* Runs it alone; returns how many prompt tokens were not computed. */
int32_t world_ask(struct world *w, const int32_t *token, int32_t n, int32_t max_new)
{
    struct ds4_rig_client *client = world_submit(w, token, n, max_new);
    int32_t cached;

    ds4_rig_run(&w->rig);
    assert_int_equal(client->result.err.code, DS4_OK);
    assert_true(ds4_rig_is_right(client, max_new));
    assert_int_equal(client->n_admitted, 1);
    cached = client->cached;
    ds4_rig_client_free(client);
    assert_clean(&w->rig);
    return cached;
}

int32_t world_n_files(struct world *w, const char *suffix)
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
int32_t *world_turn(const int32_t *prompt, int32_t n, int32_t n_answer, int32_t n_more,
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

void world_lose(struct world *w)
{
    const struct ds4_err why = {.code = DS4_E_UNAVAILABLE, .msg = "a stage was killed"};

    ds4_sched_stop(w->rig.sched, DS4_REASON_RESTARTED, &why, w->rig.now_ns);
    ds4_rig_start(&w->rig);
}

uint64_t world_disk_bytes(const struct world *w)
{
    return ds4_catalog_bytes(w->rig.sched->tier.catalog);
}

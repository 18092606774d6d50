/* Jobs of the disk tier, seen from the cache (see kv_tier.h).
 *
 * "Staging" is the state between disk and device: host memory that holds a verified part.  It has an id of
 * the router, takes units of the same budget as points, and becomes cache rows and a point in one step,
 * on all stages alike.  There is no way from a file to a block but through here.
 *
 * Invariant: a staging that is LOADING belongs to the disk thread; READY, to the step thread; FAILED, to
 * nobody, its memory is given back already. */
#include "worker/kv_tier.h"

#include "proto/point.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_STAGED 2048 /* extents of 2 Mi tokens */

struct staged {
    uint64_t id; /* 0: the place is free */
    atomic_int state;
    enum ds4_kv_part_kind kind;
    int32_t begin;
    int32_t end;
    struct ds4_kv_blob blob[2]; /* point, rows */
};

enum { POINT, ROWS };

struct ds4_kv_tier {
    struct ds4_kv_tier_config config;
    struct ds4_kv_store *store;
    struct ds4_kv_disk *disk; /* NULL: none */
    void *arena;              /* owned, for rows that are being written */
    size_t arena_bytes;
    struct ds4_kv_host host;
    struct ds4_kv_section *section; /* [max_section] scratch */
    struct ds4_kv_ids ids;          /* staging -> place */
    struct staged staged[MAX_STAGED];
};

static int32_t max_sections(const struct ds4_kv_store *store)
{
    return (DS4_KV_POINT_SECTIONS + DS4_KV_ROW_SECTIONS) * store->kv->shape.n_layer;
}

/* ---- answers ---------------------------------------------------------------------------------------- */

static void refuse(struct ds4_kv_tier *t, uint32_t generation, uint64_t job, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

static void refuse(struct ds4_kv_tier *t, uint32_t generation, uint64_t job, const char *fmt, ...)
{
    struct ds4_kv_done done = {.generation = generation, .job = job, .reason = DS4_KV_REFUSED};
    va_list args;

    va_start(args, fmt);
    vsnprintf(done.text, sizeof(done.text), fmt, args);
    va_end(args);
    if (t->config.done != NULL)
        t->config.done(t->config.done_arg, &done);
}

static void nobody_listens(void *arg, const struct ds4_kv_done *done)
{
    (void)arg;
    (void)done;
}

/* ---- life ------------------------------------------------------------------------------------------- */

static uint32_t row_format_of(const struct ds4_kv_shape *shape)
{
    switch (shape->row_format) {
    case DS4_ROW_FP8:
        return shape->index_format == DS4_ROW_FP4 ? DS4_KV_FORMAT_FP8_FP4 : DS4_KV_FORMAT_FP8;
    case DS4_ROW_BF16:
        return DS4_KV_FORMAT_BF16;
    default:
        return DS4_KV_FORMAT_F32;
    }
}

static int open_disk(struct ds4_kv_tier *t, struct ds4_err *err)
{
    const struct ds4_kv_shape *shape = &t->store->kv->shape;
    struct ds4_kv_disk_config disk = {.dir = t->config.dir,
                                      .row_format = row_format_of(shape),
                                      .first_layer = t->config.first_layer,
                                      .last_layer = t->config.first_layer + shape->n_layer,
                                      .max_section = max_sections(t->store),
                                      .write_mbps = t->config.write_mbps,
                                      .done = t->config.done,
                                      .done_arg = t->config.done_arg};
    size_t unit = t->store->host.unit_bytes;
    int64_t part =
        ds4_unit_round((int64_t)(DS4_PART_BLOCKS * ds4_kv_block_bytes(shape)), (int32_t)unit);

    if (disk.done == NULL)
        disk.done = nobody_listens;
    memcpy(disk.fingerprint, t->config.fingerprint, sizeof(disk.fingerprint));
    t->arena_bytes = (size_t)(DS4_MAX_KV_WRITES * part);
    if (t->arena_bytes > 0) {
        t->arena =
            t->store->backend->alloc_host(t->store->dev, t->arena_bytes, "writes to disk", err);
        if (t->arena == NULL)
            return -1;
    }
    if (ds4_kv_host_init(&t->host, t->arena, unit, (int32_t)(t->arena_bytes / unit), err) != 0)
        return -1;
    ds4_kv_host_reset(&t->host, (int64_t)t->arena_bytes);
    t->disk = ds4_kv_disk_open(&disk, err);
    return t->disk == NULL ? -1 : 0;
}

struct ds4_kv_tier *ds4_kv_tier_open(const struct ds4_kv_tier_config *config, struct ds4_err *err)
{
    struct ds4_kv_tier *t = calloc(1, sizeof(*t));

    if (t == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for the disk tier");
        return NULL;
    }
    t->config = *config;
    t->store = config->store;
    t->section = calloc((size_t)max_sections(t->store), sizeof(*t->section));
    if (t->section == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for the disk tier");
        goto fail;
    }
    if (ds4_kv_ids_init(&t->ids, MAX_STAGED, err) != 0 ||
        (config->dir != NULL && config->dir[0] != 0 && open_disk(t, err) != 0))
        goto fail;
    return t;
fail:
    ds4_kv_tier_close(t);
    return NULL;
}

void ds4_kv_tier_close(struct ds4_kv_tier *t)
{
    if (t == NULL)
        return;
    ds4_kv_disk_close(t->disk);
    ds4_kv_host_deinit(&t->host);
    if (t->arena != NULL)
        t->store->backend->free_host(t->store->dev, t->arena, t->arena_bytes);
    if (t->ids.at != NULL)
        ds4_kv_ids_deinit(&t->ids);
    free(t->section);
    free(t);
}

void ds4_kv_tier_reset(struct ds4_kv_tier *t)
{
    if (t->disk == NULL)
        return;
    ds4_kv_disk_cancel(t->disk);
    ds4_kv_ids_clear(&t->ids);
    for (int32_t i = 0; i < MAX_STAGED; i++)
        t->staged[i].id = 0; /* their units go with the reset of the store's memory */
}

bool ds4_kv_tier_has_disk(const struct ds4_kv_tier *t)
{
    return t->disk != NULL;
}

/* ---- jobs ------------------------------------------------------------------------------------------- */

/* Appends sections to the job: their bytes follow each other in that blob. */
static void add_sections(struct ds4_kv_tier *t, struct ds4_kv_job *job, int32_t n, int32_t blob)
{
    size_t offset = 0;

    for (int32_t s = 0; s < n; s++) {
        job->section[job->n_section++] =
            (struct ds4_kv_job_section){.layer = t->config.first_layer + t->section[s].layer,
                                        .kind = (int32_t)t->section[s].kind,
                                        .rows = t->section[s].rows,
                                        .bytes = t->section[s].bytes,
                                        .blob = blob,
                                        .offset = offset};
        offset += t->section[s].bytes;
    }
}

static void name_part(struct ds4_kv_tier *t, struct ds4_kv_part *part, const uint8_t *key,
                      const uint8_t *commit, enum ds4_kv_part_kind kind, int32_t begin, int32_t end)
{
    const struct ds4_kv_shape *shape = &t->store->kv->shape;

    *part = (struct ds4_kv_part){.kind = kind,
                                 .first_layer = t->config.first_layer,
                                 .last_layer = t->config.first_layer + shape->n_layer,
                                 .begin = begin,
                                 .end = end,
                                 .row_format = row_format_of(shape)};
    memcpy(part->fingerprint, t->config.fingerprint, DS4_ID_BYTES);
    memcpy(part->key, key, DS4_ID_BYTES);
    if (commit != NULL && kind != DS4_KV_EXTENT)
        memcpy(part->commit, commit, DS4_ID_BYTES);
}

static int32_t blocks_of(int32_t begin, int32_t end)
{
    return (end - begin + DS4_BLOCK_TOK - 1) / DS4_BLOCK_TOK;
}

/* ---- rows between device and host -------------------------------------------------------------------- */

static const struct ds4_pages *pages_of(const struct ds4_kv_store *store,
                                        const struct ds4_kv_section *section)
{
    const struct ds4_kv_layer *layer = &store->kv->layer[section->layer];

    return section->kind == DS4_KV_ROWS_INDEX ? &layer->index_rows : &layer->rows;
}

/* Queues copies of a section's rows between the blocks and the blob, from `offset` of it on. */
static void copy_section(struct ds4_kv_store *store, const struct ds4_kv_section *section,
                         const int32_t *block, const struct ds4_kv_host *host,
                         const struct ds4_kv_blob *blob, size_t offset, bool to_device)
{
    const struct ds4_pages *pages = pages_of(store, section);
    struct ds4_kv_cursor cursor = ds4_kv_cursor_at(host, blob, offset);

    for (int32_t row = 0; row < section->rows; row += pages->rows_per_block) {
        int32_t left_rows = section->rows - row;
        int32_t n_row = left_rows < pages->rows_per_block ? left_rows : pages->rows_per_block;
        uint8_t *dev = (uint8_t *)pages->data + (size_t)block[row / pages->rows_per_block] *
                                                    (size_t)pages->rows_per_block *
                                                    pages->row_bytes;
        size_t n;

        for (size_t left = (size_t)n_row * pages->row_bytes; left > 0; left -= n, dev += n) {
            uint8_t *unit = ds4_kv_cursor_next(&cursor, left, &n);

            if (to_device)
                store->backend->upload(store->dev, dev, unit, n);
            else
                store->backend->fetch(store->dev, unit, dev, n);
        }
    }
    store->in_flight = true;
}

static void copy_rows(struct ds4_kv_tier *t, int32_t begin, int32_t end, const int32_t *block,
                      const struct ds4_kv_host *host, const struct ds4_kv_blob *blob,
                      bool to_device)
{
    int32_t n = ds4_kv_row_sections(&t->store->kv->shape, begin, end, t->section);
    size_t offset = 0;

    for (int32_t s = 0; s < n; s++) {
        copy_section(t->store, &t->section[s], block, host, blob, offset, to_device);
        offset += t->section[s].bytes;
    }
    ds4_kv_store_settle(t->store);
}

static int check_blocks(const struct ds4_kv_tier *t, const int32_t *block, int32_t n,
                        struct ds4_err *err)
{
    for (int32_t b = 0; b < n; b++)
        if (block[b] < 0 || block[b] >= t->store->kv->n_block)
            return ds4_fail(err, DS4_E_PROTOCOL, "block id %d, there are %d", block[b],
                            t->store->kv->n_block);
    return 0;
}

/* ---- write ------------------------------------------------------------------------------------------ */

static int check_write(struct ds4_kv_tier *t, const struct ds4_kv_write *w, struct ds4_err *err)
{
    const struct ds4_kv_point *point = ds4_kv_point_find(t->store, w->point);

    if (t->disk == NULL)
        return ds4_fail(err, DS4_E_PROTOCOL, "this stage has no disk tier");
    if (w->n_block != blocks_of(w->begin, w->end))
        return ds4_fail(err, DS4_E_PROTOCOL, "%d blocks for tokens [%d, %d)", w->n_block, w->begin,
                        w->end);
    if (w->kind != DS4_KV_EXTENT && (point == NULL || point->pos != w->end))
        return ds4_fail(err, DS4_E_PROTOCOL, "point %" PRIu64 " is not one at %d", w->point,
                        w->end);
    return check_blocks(t, w->block, w->n_block, err);
}

static int fill_write(struct ds4_kv_tier *t, const struct ds4_kv_write *w, struct ds4_kv_job *job,
                      struct ds4_err *err)
{
    const struct ds4_kv_shape *shape = &t->store->kv->shape;
    int32_t n = ds4_kv_row_sections(shape, w->begin, w->end, t->section);

    if (ds4_kv_host_take(&t->host, ds4_kv_sections_bytes(t->section, n), &job->blob[ROWS], err) !=
        0)
        return ds4_err_wrap(err, "more than %d writes", DS4_MAX_KV_WRITES);
    job->host[ROWS] = &t->host;
    job->give[ROWS] = true;
    add_sections(t, job, n, ROWS);
    copy_rows(t, w->begin, w->end, w->block, &t->host, &job->blob[ROWS], false);
    if (w->kind != DS4_KV_EXTENT) {
        job->host[POINT] = &t->store->host;
        job->blob[POINT] = ds4_kv_point_find(t->store, w->point)->blob;
        n = ds4_kv_point_sections(shape, w->end, t->section);
        add_sections(t, job, n, POINT);
    }
    return 0;
}

void ds4_kv_tier_write(struct ds4_kv_tier *t, const struct ds4_kv_write *w)
{
    struct ds4_kv_job *job;
    struct ds4_err err = {0};

    if (check_write(t, w, &err) != 0) {
        refuse(t, w->generation, w->job, "%s", err.msg);
        return;
    }
    job = ds4_kv_disk_take(t->disk);
    if (job == NULL) {
        refuse(t, w->generation, w->job, "more than %d jobs", DS4_MAX_KV_JOBS);
        return;
    }
    job->kind = DS4_KV_JOB_WRITE;
    job->generation = w->generation;
    job->id = w->job;
    name_part(t, &job->part, w->key, w->commit, w->kind, w->begin, w->end);
    if (fill_write(t, w, job, &err) != 0) {
        ds4_kv_disk_put(t->disk, job);
        refuse(t, w->generation, w->job, "%s", err.msg);
        return;
    }
    ds4_kv_disk_submit(t->disk, job);
}

/* ---- read ------------------------------------------------------------------------------------------- */

/* Places of reads that failed: their ids may be used again. */
static void sweep_failed(struct ds4_kv_tier *t)
{
    for (int32_t i = 0; i < MAX_STAGED; i++)
        if (t->staged[i].id != 0 && atomic_load(&t->staged[i].state) == DS4_KV_STAGED_FAILED) {
            (void)ds4_kv_ids_take(&t->ids, t->staged[i].id);
            t->staged[i].id = 0;
        }
}

static struct staged *new_staged(struct ds4_kv_tier *t, uint64_t id, struct ds4_err *err)
{
    sweep_failed(t);
    for (int32_t i = 0; i < MAX_STAGED; i++) {
        struct staged *s = &t->staged[i];

        if (s->id != 0)
            continue;
        if (ds4_kv_ids_put(&t->ids, id, i, err) != 0)
            return NULL;
        s->id = id;
        atomic_store(&s->state, DS4_KV_STAGED_LOADING);
        memset(s->blob, 0, sizeof(s->blob));
        return s;
    }
    ds4_fail(err, DS4_E_NOMEM, "more than %d parts are staged", MAX_STAGED);
    return NULL;
}

static void free_staged(struct ds4_kv_tier *t, struct staged *s)
{
    for (int b = 0; b < 2; b++)
        ds4_kv_host_give(&t->store->host, &s->blob[b]);
    (void)ds4_kv_ids_take(&t->ids, s->id);
    s->id = 0;
}

/* Takes the memory of a staging and lists what shall go there. */
static int fill_read(struct ds4_kv_tier *t, const struct ds4_kv_read *r, struct staged *s,
                     struct ds4_kv_job *job, struct ds4_err *err)
{
    const struct ds4_kv_shape *shape = &t->store->kv->shape;
    int32_t n = ds4_kv_row_sections(shape, r->begin, r->end, t->section);

    if (ds4_kv_host_take(&t->store->host, ds4_kv_sections_bytes(t->section, n), &s->blob[ROWS],
                         err) != 0)
        return -1;
    add_sections(t, job, n, ROWS);
    if (r->kind != DS4_KV_EXTENT) {
        n = ds4_kv_point_sections(shape, r->end, t->section);
        if (ds4_kv_host_take(&t->store->host, ds4_kv_sections_bytes(t->section, n), &s->blob[POINT],
                             err) != 0)
            return -1;
        add_sections(t, job, n, POINT);
    }
    for (int b = 0; b < 2; b++) {
        job->host[b] = &t->store->host;
        job->blob[b] = s->blob[b];
        job->give[b] = true;
    }
    job->state = &s->state;
    return 0;
}

void ds4_kv_tier_read(struct ds4_kv_tier *t, const struct ds4_kv_read *r)
{
    struct staged *s = NULL;
    struct ds4_kv_job *job = t->disk == NULL ? NULL : ds4_kv_disk_take(t->disk);
    struct ds4_err err = {0};

    if (job == NULL) {
        refuse(t, r->generation, r->job, "no disk tier, or more than %d jobs", DS4_MAX_KV_JOBS);
        return;
    }
    job->kind = DS4_KV_JOB_READ;
    job->generation = r->generation;
    job->id = r->job;
    name_part(t, &job->part, r->key, r->commit, r->kind, r->begin, r->end);
    job->n_ref = r->n_part;
    memcpy(job->ref, r->part, (size_t)r->n_part * sizeof(job->ref[0]));
    s = new_staged(t, r->staging, &err);
    if (s == NULL || fill_read(t, r, s, job, &err) != 0) {
        if (s != NULL)
            free_staged(t, s);
        ds4_kv_disk_put(t->disk, job);
        refuse(t, r->generation, r->job, "%s", err.msg);
        return;
    }
    s->kind = r->kind;
    s->begin = r->begin;
    s->end = r->end;
    ds4_kv_disk_submit(t->disk, job);
}

void ds4_kv_tier_unlink(struct ds4_kv_tier *t, const struct ds4_kv_unlink *u)
{
    struct ds4_kv_job *job = t->disk == NULL ? NULL : ds4_kv_disk_take(t->disk);

    if (job == NULL) {
        refuse(t, u->generation, u->job, "no disk tier, or more than %d jobs", DS4_MAX_KV_JOBS);
        return;
    }
    job->kind = DS4_KV_JOB_UNLINK;
    job->generation = u->generation;
    job->id = u->job;
    name_part(t, &job->part, u->key, NULL, u->kind, 0, 0);
    job->part.first_layer = u->first_layer;
    job->part.last_layer = u->last_layer;
    job->quarantine = u->quarantine;
    ds4_kv_disk_submit(t->disk, job);
}

/* ---- install ---------------------------------------------------------------------------------------- */

static struct staged *find_ready(struct ds4_kv_tier *t, uint64_t id, struct ds4_err *err)
{
    int32_t i = ds4_kv_ids_find(&t->ids, id);

    if (i >= 0 && atomic_load(&t->staged[i].state) == DS4_KV_STAGED_READY)
        return &t->staged[i];
    ds4_fail(err, DS4_E_PROTOCOL, "there is no staging %" PRIu64 " that is ready", id);
    return NULL;
}

static int check_install(struct ds4_kv_tier *t, const struct staged *s, const struct ds4_kv_op *op,
                         struct ds4_err *err)
{
    if (op->n_block != 0 &&
        (op->n_block != blocks_of(s->begin, s->end) || op->first_block != s->begin / DS4_BLOCK_TOK))
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "%d blocks from block %d on for a staging of tokens [%d, %d)", op->n_block,
                        op->first_block, s->begin, s->end);
    if (op->point != 0 && s->kind == DS4_KV_EXTENT)
        return ds4_fail(err, DS4_E_PROTOCOL, "a point out of an extent");
    if (check_blocks(t, op->block, op->n_block, err) != 0)
        return -1;
    for (int32_t b = 0; b < op->n_block; b++)
        if (t->store->kv->users[op->block[b]] > 0)
            return ds4_fail(err, DS4_E_PROTOCOL, "rows from disk into block %d, which is in use",
                            op->block[b]);
    return 0;
}

int ds4_kv_tier_install(struct ds4_kv_tier *t, const struct ds4_kv_op *op, struct ds4_err *err)
{
    struct staged *s = find_ready(t, op->staging, err);

    if (s == NULL || check_install(t, s, op, err) != 0)
        return -1;
    if (op->point != 0 &&
        ds4_kv_point_adopt(t->store, op->point, s->end, &s->blob[POINT], err) != 0)
        return -1;
    if (op->n_block > 0)
        copy_rows(t, s->begin, s->end, op->block, &t->store->host, &s->blob[ROWS], true);
    free_staged(t, s);
    return 0;
}

int ds4_kv_tier_drop(struct ds4_kv_tier *t, uint64_t staging, struct ds4_err *err)
{
    int32_t i = ds4_kv_ids_find(&t->ids, staging);
    int state = i < 0 ? DS4_KV_STAGED_FAILED : atomic_load(&t->staged[i].state);

    /* All stages obey the same step, and some of them may have failed to read it: they hold nothing. */
    if (state == DS4_KV_STAGED_LOADING)
        return ds4_fail(err, DS4_E_PROTOCOL, "staging %" PRIu64 " is being read", staging);
    if (state == DS4_KV_STAGED_READY)
        free_staged(t, &t->staged[i]);
    return 0;
}

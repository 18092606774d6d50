/* The disk tier's life, its jobs at the stages, and its garbage (see tier.h).
 *
 * The catalogue and the folder outlive a generation; jobs, saves and restores do not.  A scan runs beside the
 * first generation and holds nobody up: until it is back, every look-up is a miss.
 * Invariant: at most DS4_MAX_KV_JOBS jobs are unanswered, of them DS4_MAX_KV_WRITES writes; a block is pinned
 * as long as a write of it is. */
#include "router/sched/tier.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/metrics.h"
#include "proto/point.h"
#include "router/sched/engine.h"

#include <inttypes.h>
#include <stdlib.h>

#define USES_EVERY_NS (60 * DS4_NS_PER_SEC)

int ds4_tier_init(struct ds4_sched *s, struct ds4_err *err)
{
    struct ds4_tier *t = &s->tier;
    const struct ds4_sched_config *c = &s->config;
    struct ds4_shelf_config shelf = {.dir = c->disk_dir,
                                     .no_thread = c->disk_no_thread,
                                     .wake = c->disk_wake,
                                     .wake_arg = c->disk_wake_arg};

    t->next_job = 1;
    t->next_staging = 1;
    if (c->disk_bytes == 0 || c->disk_dir == NULL || s->port.send_kv_write == NULL)
        return 0;
    t->max_bytes = c->disk_bytes;
    t->shelf = ds4_shelf_new(&shelf, err);
    return t->shelf == NULL ? -1 : 0;
}

static int64_t unix_ns(const struct ds4_sched *s, int64_t now_ns)
{
    return now_ns + s->config.unix_offset_ns;
}

static void free_garbage(struct ds4_garbage *g)
{
    for (size_t i = 0; i < g->object.len; i++)
        ds4_disk_object_free(g->object.ptr[i]);
    DS4_VEC_DEINIT(&g->object);
    free(g);
}

static void note_uses(struct ds4_sched *s)
{
    struct ds4_tier *t = &s->tier;
    int32_t n = t->catalog == NULL ? 0 : ds4_catalog_n(t->catalog);
    struct ds4_shelf_job *job;
    struct ds4_commit_use *use;

    if (!t->uses_dirty || !t->scanned)
        return;
    t->uses_dirty = false;
    job = ds4_shelf_job_new(DS4_SHELF_USES, NULL, 0);
    use = calloc((size_t)n + 1, sizeof(*use));
    if (job == NULL || use == NULL) {
        ds4_shelf_job_free(job);
        free(use);
        return;
    }
    for (int32_t i = 0; i < n; i++) {
        const struct ds4_commit *commit = ds4_catalog_at(t->catalog, i);

        memcpy(use[i].id, commit->id, DS4_ID_BYTES);
        use[i].hits = commit->hits;
        use[i].used_ns = commit->used_ns;
    }
    job->bytes = use;
    job->n = (size_t)n * sizeof(*use);
    ds4_shelf_submit(t->shelf, job);
}

void ds4_sched_close_disk(struct ds4_sched *s)
{
    struct ds4_tier *t = &s->tier;

    if (t->shelf == NULL)
        return;
    note_uses(s);
    ds4_shelf_free(t->shelf);
    t->shelf = NULL;
    t->works = false;
}

void ds4_tier_deinit(struct ds4_sched *s)
{
    struct ds4_tier *t = &s->tier;

    ds4_sched_close_disk(s);
    for (size_t i = 0; i < t->garbage.len; i++)
        free_garbage(t->garbage.ptr[i]);
    DS4_VEC_DEINIT(&t->garbage);
    DS4_VEC_DEINIT(&t->transfer);
    DS4_VEC_DEINIT(&t->restore);
    DS4_VEC_DEINIT(&t->drop);
    DS4_VEC_DEINIT(&t->queue);
    ds4_save_abandon(s);
    ds4_catalog_free(t->catalog);
    *t = (struct ds4_tier){0};
}

/* ---- generations ------------------------------------------------------------------------------------ */

void ds4_tier_open(struct ds4_sched *s)
{
    struct ds4_tier *t = &s->tier;
    const struct ds4_kv_host *host = &s->points.host;
    struct ds4_shelf_job *job;
    struct ds4_err err = {0};

    ds4_save_abandon(s);
    for (size_t i = 0; i < t->garbage.len; i++) /* of another model: its own start's business */
        free_garbage(t->garbage.ptr[i]);
    t->garbage.len = 0;
    ds4_catalog_free(t->catalog);
    t->scanned = false;
    t->catalog = ds4_catalog_new(t->max_bytes, &err);
    job = ds4_shelf_job_new(DS4_SHELF_OPEN, host->fingerprint, 0);
    if (t->catalog == NULL || job == NULL) {
        ds4_log(DS4_LOG_ERROR, "kv.disk", "error=\"no memory for the disk tier\"");
        ds4_shelf_job_free(job);
        return;
    }
    memcpy(t->fingerprint, host->fingerprint, DS4_ID_BYTES);
    job->local = host->local;
    t->opening = true;
    ds4_shelf_submit(t->shelf, job);
}

void ds4_tier_start(struct ds4_sched *s)
{
    struct ds4_tier *t = &s->tier;
    const struct ds4_kv_host *host = &s->points.host;

    t->works = t->shelf != NULL && host->disk && host->n_stage > 0;
    s->points.watched = t->works && !t->lost;
    if (t->shelf != NULL && !t->works)
        ds4_log(DS4_LOG_WARN, "kv.disk",
                "message=\"nothing is kept on disk: a stage has no disk tier, or no memory for "
                "restore points\"");
    if (t->works && memcmp(t->fingerprint, host->fingerprint, DS4_ID_BYTES) != 0)
        t->scanned = false; /* what is known is of another model */
    if (t->works && !t->opening && !t->scanned && !t->lost)
        ds4_tier_open(s);
}

void ds4_tier_stop(struct ds4_sched *s, bool lost)
{
    struct ds4_tier *t = &s->tier;

    ds4_save_stop(s);
    ds4_restore_stop(s, lost);
    for (size_t i = 0; i < t->transfer.len; i++) {
        free(t->transfer.ptr[i]->file);
        free(t->transfer.ptr[i]);
    }
    t->transfer.len = 0;
    t->n_write = 0;
    t->n_late = 0;
    for (size_t i = 0; i < t->garbage.len; i++) {
        t->garbage.ptr[i]->next = 0; /* from the start: what is gone already is fine */
        t->garbage.ptr[i]->file = 0;
        t->garbage.ptr[i]->n_flight = 0;
    }
    t->works = false;
}

/* ---- jobs of the stages ----------------------------------------------------------------------------- */

bool ds4_tier_can_ask(const struct ds4_sched *s)
{
    return s->tier.transfer.len < DS4_MAX_KV_JOBS;
}

struct ds4_transfer *ds4_tier_transfer(struct ds4_sched *s, enum ds4_transfer_kind kind,
                                       void *owner, int32_t object)
{
    struct ds4_tier *t = &s->tier;
    struct ds4_transfer *transfer;

    if (!ds4_tier_can_ask(s) || (kind == DS4_TRANSFER_WRITE && t->n_write >= DS4_MAX_KV_WRITES))
        return NULL;
    transfer = calloc(1, sizeof(*transfer));
    if (transfer != NULL && kind == DS4_TRANSFER_WRITE)
        transfer->file = calloc((size_t)s->form.n_stage, sizeof(*transfer->file));
    if (transfer == NULL || (kind == DS4_TRANSFER_WRITE && transfer->file == NULL) ||
        DS4_VEC_PUSH(&t->transfer, transfer) != 0) {
        free(transfer != NULL ? transfer->file : NULL);
        free(transfer);
        return NULL;
    }
    transfer->job = t->next_job++;
    transfer->after_step = s->next_step;
    transfer->kind = kind;
    transfer->owner = owner;
    transfer->object = object;
    t->n_write += kind == DS4_TRANSFER_WRITE;
    return transfer;
}

void ds4_tier_forget_transfer(struct ds4_sched *s, struct ds4_transfer *transfer)
{
    struct ds4_tier *t = &s->tier;

    for (size_t i = 0; i < t->transfer.len; i++)
        if (t->transfer.ptr[i] == transfer) {
            t->transfer.ptr[i] = t->transfer.ptr[--t->transfer.len];
            break;
        }
    t->n_write -= transfer->kind == DS4_TRANSFER_WRITE;
    t->n_late -= transfer->late;
    if (transfer->point != NULL)
        ds4_points_unpin(&s->points, transfer->point);
    for (int32_t b = 0; b < transfer->n_block; b++)
        ds4_budget_unpin(s->budget, transfer->block[b]);
    if (transfer->n_block > 0)
        s->head_waits = false; /* there may be room for it now */
    free(transfer->file);
    free(transfer);
}

void ds4_tier_count_reject(struct ds4_sched *s, enum ds4_kv_reason reason)
{
    ds4_metric_add(s->config.metrics, DS4_M_KV_DISK_REJECTS, 1, ds4_kv_reason_text(reason));
}

static void garbage_answered(struct ds4_sched *s, struct ds4_transfer *transfer)
{
    struct ds4_garbage *g = transfer->owner;

    g->n_flight--;
    g->failed |= transfer->reason != DS4_KV_OK;
    ds4_tier_forget_transfer(s, transfer);
}

static void note_answer(struct ds4_sched *s, struct ds4_transfer *transfer, int32_t stage,
                        const struct ds4_kv_done *done)
{
    static const char *const op[] = {"save", "restore", "remove"};

    if (done->reason != DS4_KV_OK) {
        if (transfer->reason == DS4_KV_OK) {
            transfer->reason = done->reason;
            transfer->stage = stage;
            memcpy(transfer->text, done->text, sizeof(transfer->text));
        }
        ds4_metric_add(s->config.metrics, DS4_M_KV_DISK_ABORTS, 1, ds4_metric_stage(stage),
                       op[transfer->kind]);
        return;
    }
    if (transfer->kind == DS4_TRANSFER_WRITE) {
        transfer->file[stage].bytes = done->bytes;
        memcpy(transfer->file[stage].digest, done->digest, DS4_ID_BYTES);
        if (!done->existed)
            transfer->bytes += done->bytes;
    } else {
        transfer->bytes += done->bytes;
    }
    if (transfer->kind != DS4_TRANSFER_UNLINK && !done->existed)
        ds4_metric_add(s->config.metrics, DS4_M_KV_IO_BYTES, (double)done->bytes, "disk",
                       transfer->kind == DS4_TRANSFER_WRITE ? "write" : "read");
}

int ds4_sched_kv_done(struct ds4_sched *s, int32_t stage, const struct ds4_kv_done *done,
                      int64_t now_ns, struct ds4_err *err)
{
    struct ds4_tier *t = &s->tier;
    struct ds4_transfer *transfer = NULL;
    uint64_t all, bit = UINT64_C(1) << stage;

    if (!s->started || done->generation != s->form.generation)
        return ds4_fail(err, DS4_E_PROTOCOL, "a job of generation %u", done->generation);
    for (size_t i = 0; i < t->transfer.len; i++)
        if (t->transfer.ptr[i]->job == done->job)
            transfer = t->transfer.ptr[i];
    if (transfer == NULL || (transfer->answered & bit) != 0)
        return ds4_fail(err, DS4_E_PROTOCOL, "stage %d answers job %" PRIu64 ", nobody asked",
                        stage, done->job);
    transfer->answered |= bit;
    t->heard_ns[stage] = now_ns;
    note_answer(s, transfer, stage, done);
    all = s->form.n_stage == DS4_MAX_STAGES ? UINT64_MAX : (UINT64_C(1) << s->form.n_stage) - 1;
    if (transfer->answered != all)
        return 0;
    if (transfer->owner == NULL) { /* given up before */
        ds4_tier_forget_transfer(s, transfer);
        return 0;
    }
    switch (transfer->kind) {
    case DS4_TRANSFER_WRITE:
        ds4_save_answered(s, transfer, now_ns);
        break;
    case DS4_TRANSFER_READ:
        ds4_restore_answered(s, transfer);
        break;
    case DS4_TRANSFER_UNLINK:
        garbage_answered(s, transfer);
        break;
    }
    return 0;
}

/* ---- garbage ---------------------------------------------------------------------------------------- */

void ds4_tier_discard(struct ds4_sched *s, const uint8_t *id, struct ds4_disk_objects *object)
{
    struct ds4_garbage *g = calloc(1, sizeof(*g));

    if (g == NULL || DS4_VEC_PUSH(&s->tier.garbage, g) != 0) {
        free(g); /* the .w file stays: a later start cleans up */
        for (size_t i = 0; i < object->len; i++)
            ds4_disk_object_free(object->ptr[i]);
        DS4_VEC_DEINIT(object);
        return;
    }
    memcpy(g->id, id, DS4_ID_BYTES);
    g->object = *object;
    *object = (struct ds4_disk_objects){0};
}

void ds4_tier_drop_commit(struct ds4_sched *s, struct ds4_commit *commit, bool quarantine)
{
    struct ds4_tier *t = &s->tier;
    struct ds4_disk_objects garbage = {0};
    struct ds4_shelf_job *job =
        t->shelf == NULL ? NULL : ds4_shelf_job_new(DS4_SHELF_RETIRE, commit->id, 0);
    uint8_t id[DS4_ID_BYTES];

    memcpy(id, commit->id, sizeof(id));
    if (job != NULL) {
        job->quarantine = quarantine;
        ds4_shelf_submit(t->shelf, job);
    }
    ds4_catalog_remove(t->catalog, commit, &garbage);
    ds4_tier_discard(s, id, &garbage);
    t->uses_dirty = true;
}

void ds4_tier_evict(struct ds4_sched *s, struct ds4_commit *commit)
{
    uint64_t before = ds4_catalog_bytes(s->tier.catalog);

    ds4_tier_drop_commit(s, commit, false);
    ds4_metric_add(s->config.metrics, DS4_M_KV_EVICTIONS, 1, "disk", "capacity");
    ds4_metric_add(s->config.metrics, DS4_M_KV_EVICTED_BYTES,
                   (double)(before - ds4_catalog_bytes(s->tier.catalog)), "disk", "capacity");
}

/* In use again, or about to be: its files stay. */
static bool is_wanted(const struct ds4_sched *s, const struct ds4_disk_object *object)
{
    const struct ds4_tier *t = &s->tier;
    bool tail = object->kind != DS4_KV_EXTENT;

    if (ds4_catalog_object(t->catalog, object->key, tail) != NULL)
        return true;
    for (int32_t i = 0; t->saving != NULL && i < t->saving->m.n_object; i++)
        if (memcmp(t->saving->m.object[i].key, object->key, DS4_ID_BYTES) == 0 &&
            (i == t->saving->m.n_object - 1) == tail)
            return true;
    return false;
}

/* Asks for the next file's removal; false: not now. */
static bool remove_next(struct ds4_sched *s, struct ds4_garbage *g)
{
    const struct ds4_disk_object *object = g->object.ptr[g->next];
    struct ds4_kv_unlink unlink = {.generation = s->form.generation, .kind = object->kind};
    struct ds4_transfer *transfer;
    struct ds4_err err = {0};

    /* Asked before every file: a save may have begun to write this object anew since the last one. */
    if (g->file >= object->n_file || is_wanted(s, object)) {
        g->next++;
        g->file = 0;
        return true;
    }
    transfer = ds4_tier_transfer(s, DS4_TRANSFER_UNLINK, g, 0);
    if (transfer == NULL)
        return false;
    unlink.job = transfer->job;
    memcpy(unlink.key, object->key, DS4_ID_BYTES);
    unlink.first_layer = object->file[g->file].first_layer;
    unlink.last_layer = object->file[g->file].last_layer;
    if (s->port.send_kv_unlink(s->port.owner, &unlink, &err) != 0) {
        ds4_tier_forget_transfer(s, transfer); /* the generation is about to end */
        return false;
    }
    g->file++;
    g->n_flight++;
    return true;
}

static void clean_up(struct ds4_sched *s)
{
    struct ds4_tier *t = &s->tier;

    while (t->garbage.len > 0 && t->scanned && !ds4_tier_is_down(s)) {
        struct ds4_garbage *g = t->garbage.ptr[0];
        struct ds4_shelf_job *job;

        /* Half of the jobs are left for saves and restores. */
        while (g->next < g->object.len)
            if (t->transfer.len >= DS4_MAX_KV_JOBS / 2 || !remove_next(s, g))
                return;
        if (g->n_flight > 0)
            return;
        job = g->failed ? NULL : ds4_shelf_job_new(DS4_SHELF_FORGET, g->id, 0);
        if (job != NULL)
            ds4_shelf_submit(t->shelf, job);
        memmove(t->garbage.ptr, t->garbage.ptr + 1, --t->garbage.len * sizeof(*t->garbage.ptr));
        free_garbage(g);
    }
}

/* ---- the scan --------------------------------------------------------------------------------------- */

/* What a .w file names is garbage, but for what is in use. */
static void take_leftover(struct ds4_sched *s, const struct ds4_manifest *m)
{
    struct ds4_disk_objects list = {0};

    for (int32_t i = 0; i < m->n_object; i++) {
        struct ds4_disk_object *object = calloc(1, sizeof(*object));
        size_t n = (size_t)m->object[i].n_file;

        if (object == NULL)
            break;
        memcpy(object->key, m->object[i].key, DS4_ID_BYTES);
        object->kind = i == m->n_object - 1 ? m->kind : DS4_KV_EXTENT;
        object->file = calloc(n, sizeof(*object->file));
        if (object->file == NULL || DS4_VEC_PUSH(&list, object) != 0) {
            ds4_disk_object_free(object);
            break;
        }
        object->n_file = (int32_t)n;
        memcpy(object->file, m->file + m->object[i].first_file, n * sizeof(*object->file));
    }
    ds4_tier_discard(s, m->commit, &list);
}

/* A second list of the same thing, with other files: of no use, and not counted. */
static void leave_out(struct ds4_sched *s, const struct ds4_manifest *m)
{
    struct ds4_shelf_job *job = ds4_shelf_job_new(DS4_SHELF_RETIRE, m->commit, 0);

    if (job == NULL)
        return;
    ds4_shelf_submit(s->tier.shelf, job);
    take_leftover(s, m);
}

/* A time of a file, or of a clock that was wrong once. */
static int64_t past_ns(int64_t at_ns, int64_t now_ns)
{
    return at_ns < 0 || at_ns > now_ns ? now_ns : at_ns;
}

static void take_uses(struct ds4_tier *t, const struct ds4_commit_uses *use, int64_t now_ns)
{
    for (size_t i = 0; i < use->len; i++) {
        struct ds4_commit *commit = ds4_catalog_by_id(t->catalog, use->ptr[i].id);

        if (commit == NULL)
            continue;
        commit->hits = use->ptr[i].hits;
        commit->used_ns = past_ns(use->ptr[i].used_ns, now_ns);
    }
}

static void scanned(struct ds4_sched *s, struct ds4_shelf_job *job, int64_t now_ns)
{
    struct ds4_tier *t = &s->tier;
    struct ds4_folder_scan *scan = &job->scan;

    t->opening = false;
    if (s->started && t->works && memcmp(s->points.host.fingerprint, job->id, DS4_ID_BYTES) != 0) {
        ds4_tier_open(s); /* the stages came back with another model while it ran */
        return;
    }
    if (job->rc != 0) {
        ds4_tier_lost(s, job->err.msg);
        return;
    }
    for (size_t i = 0; i < scan->commit.len; i++) {
        struct ds4_manifest *m = &scan->commit.ptr[i];
        int64_t created_ns = m->created_ns > INT64_MAX ? -1 : (int64_t)m->created_ns;
        struct ds4_err err = {0};

        if (ds4_catalog_add(t->catalog, m, past_ns(created_ns, unix_ns(s, now_ns)), &err) != NULL)
            continue;
        ds4_log(DS4_LOG_WARN, "kv.disk", "error=\"a commit is left out: %s\"", err.msg);
        if (err.code == DS4_E_INVALID)
            leave_out(s, m);
    }
    take_uses(t, &scan->use, unix_ns(s, now_ns));
    for (size_t i = 0; i < scan->leftover.len; i++)
        take_leftover(s, &scan->leftover.ptr[i]);
    for (int32_t r = 0; r < DS4_KV_N_REASON; r++)
        if (scan->n_reject[r] > 0)
            ds4_metric_add(s->config.metrics, DS4_M_KV_DISK_REJECTS, scan->n_reject[r],
                           ds4_kv_reason_text((enum ds4_kv_reason)r));
    t->scanned = true;
    t->shrinking = true;
    ds4_tier_found(s);
    ds4_log(DS4_LOG_INFO, "kv.disk",
            "commits=%d mb=%" PRIu64 " limit_mb=%" PRIu64 " leftovers=%zu orphans=%d",
            ds4_catalog_n(t->catalog), ds4_catalog_bytes(t->catalog) >> 20, t->max_bytes >> 20,
            scan->leftover.len, scan->n_orphan);
}

/* The cap has become smaller since these were stored.  Some in a turn: there may be tens of thousands. */
static void shrink(struct ds4_sched *s, int64_t now_ns)
{
    struct ds4_tier *t = &s->tier;
    struct ds4_commit *victim[DS4_CATALOG_MANY];
    int32_t n = 0;

    if (ds4_catalog_is_over(t->catalog))
        n = ds4_catalog_least(t->catalog, unix_ns(s, now_ns), victim);
    for (int32_t i = 0; i < n && ds4_catalog_is_over(t->catalog); i++)
        ds4_tier_evict(s, victim[i]);
    t->shrinking = n > 0 && ds4_catalog_is_over(t->catalog);
}

/* ---- one turn --------------------------------------------------------------------------------------- */

static void take_answers(struct ds4_sched *s, int64_t now_ns)
{
    struct ds4_shelf_job *job;

    while ((job = ds4_shelf_next(s->tier.shelf)) != NULL) {
        if (job->gone)
            ds4_tier_lost(s, job->err.msg);
        switch (job->kind) {
        case DS4_SHELF_OPEN:
            scanned(s, job, now_ns);
            break;
        case DS4_SHELF_INTEND:
            ds4_save_noted(s, job);
            break;
        case DS4_SHELF_COMMIT:
            ds4_save_stored(s, job, now_ns);
            break;
        case DS4_SHELF_LOAD:
            ds4_restore_loaded(s, job);
            break;
        default:
            if (job->rc != 0)
                ds4_log(DS4_LOG_WARN, "kv.disk", "error=\"%s\"", job->err.msg);
        }
        ds4_shelf_job_free(job);
        s->tier.shelf_ns = now_ns;
    }
}

void ds4_tier_tick(struct ds4_sched *s, int64_t now_ns)
{
    struct ds4_tier *t = &s->tier;

    if (t->shelf == NULL)
        return;
    t->now_ns = now_ns;
    take_answers(s, now_ns);
    ds4_tier_watch(s, now_ns);
    if (t->uses_dirty && now_ns - t->uses_ns >= USES_EVERY_NS) {
        t->uses_ns = now_ns;
        note_uses(s);
    }
    if (!s->started || !t->works || s->failed)
        return;
    ds4_restore_tick(s, now_ns);
    if (t->shrinking && t->scanned)
        shrink(s, now_ns);
    ds4_save_consider(s, now_ns);
    ds4_save_tick(s, now_ns);
    clean_up(s);
}

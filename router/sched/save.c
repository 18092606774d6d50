/* Saving: from a restore point to a commit on disk (see tier.h).
 *
 * What is worth it (kv-cache.md 3.3): the end of a prompt that added enough, the end of a turn, where many
 * conversations begin, and now and then within something long.  Rows are written once: an extent that is
 * in the catalogue is referred to.  Whether there is room is decided before the first byte is written.
 * The blocks of the parts under way are pinned, and the point; the path below it cannot be evicted while
 * its point is pinned, so a save that only waits lets go when somebody needs the room (yield).
 * Invariant: a manifest is stored only when every stage has answered "done" for every object it names. */
#include "common/clock.h"
#include "common/fault.h"
#include "common/log.h"
#include "common/metrics.h"
#include "proto/point.h"
#include "router/sched/engine.h"
#include "router/sched/tier.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

#define PROMPT_TOK   512   /* the end of a prompt: so much must be new */
#define BOUNDARY_TOK 4096  /* where a message begins, after the first one */
#define ROUTINE_TOK  10240 /* anywhere */
#define HEADER_BYTES 4096
#define PAD_BYTES    2048 /* lost per section on average: they begin at pages */
#define ROW_SECTIONS 2    /* of a layer, at most */
#define ALL_SECTIONS 5

static int64_t unix_ns(const struct ds4_sched *s, int64_t now_ns)
{
    return now_ns + s->config.unix_offset_ns;
}

static void skip(struct ds4_sched *s, const char *why)
{
    ds4_metric_add(s->config.metrics, DS4_M_KV_DISK_SKIPS, 1, why);
}

/* ---- what is worth it ------------------------------------------------------------------------------- */

static bool is_worth(const struct ds4_point *point, int32_t known)
{
    int32_t fresh = point->pos - known;

    if (point->pos < DS4_RESTORE_MIN_TOK || fresh <= 0)
        return false;
    if (point->turn_end)
        return true;
    switch (point->class) {
    case DS4_POINT_TAIL:
        return fresh >= PROMPT_TOK;
    case DS4_POINT_BOUNDARY:
        return fresh >= (known == 0 ? PROMPT_TOK : BOUNDARY_TOK);
    default:
        return fresh >= ROUTINE_TOK;
    }
}

/* Cheap: could it be worth it at all? */
static bool may_be_worth(const struct ds4_point *point)
{
    return point->turn_end || point->class >= DS4_POINT_TAIL ||
           (point->pos >= ROUTINE_TOK && point->pos % DS4_ANCHOR_SPARSE_TOK == 0);
}

/* The longest commit of the point's own path, 0: none. */
static int32_t known_pos(const struct ds4_sched *s, const struct ds4_point *point)
{
    const struct ds4_commit *commit;
    int32_t *token = malloc((size_t)point->pos * sizeof(*token)), known = 0;
    XXH128_hash_t root;

    if (token == NULL)
        return point->pos; /* not worth it now */
    root = ds4_prefix_path(point, token);
    commit = ds4_catalog_find(s->tier.catalog, token, point->pos, root, 0);
    if (commit != NULL)
        known = commit->pos;
    free(token);
    return known;
}

/* A queued point that a later one of its path makes superfluous. */
static void drop_superseded(struct ds4_sched *s, const struct ds4_point *point)
{
    struct ds4_tier *t = &s->tier;
    size_t n = 0;

    for (size_t i = 0; i < t->queue.len; i++) {
        struct ds4_point *other = t->queue.ptr[i];

        if ((other->turn_end || other->class < DS4_POINT_TAIL) && other->pos <= point->pos &&
            ds4_prefix_is_above(other->node, point->node))
            ds4_points_unpin(&s->points, other);
        else
            t->queue.ptr[n++] = other;
    }
    t->queue.len = n;
}

static bool is_queued(const struct ds4_tier *t, const struct ds4_point *point)
{
    for (size_t i = 0; i < t->queue.len; i++)
        if (t->queue.ptr[i] == point)
            return true;
    return t->saving != NULL && t->saving->point == point;
}

static void enqueue(struct ds4_sched *s, struct ds4_point *point)
{
    struct ds4_tier *t = &s->tier;

    if (!may_be_worth(point) || !is_worth(point, known_pos(s, point)))
        return;
    if (point->turn_end)
        drop_superseded(s, point);
    if (t->queue.len >= DS4_SAVE_QUEUE || DS4_VEC_PUSH(&t->queue, point) != 0) {
        skip(s, "busy");
        return;
    }
    ds4_points_pin(&s->points, point);
}

void ds4_save_consider(struct ds4_sched *s, int64_t now_ns)
{
    struct ds4_points *p = &s->points;
    size_t n = 0;

    (void)now_ns;
    if (!s->tier.scanned)
        return; /* what is there already is not known yet */
    for (size_t i = 0; i < p->fresh.len; i++) {
        struct ds4_point *point = p->fresh.ptr[i];

        if (point->node == NULL) {
            p->fresh.ptr[n++] = point; /* its rows are not in the index yet */
            continue;
        }
        point->fresh = false;
        enqueue(s, point);
    }
    p->fresh.len = n;
}

bool ds4_save_yield(struct ds4_sched *s)
{
    struct ds4_tier *t = &s->tier;
    bool any = t->queue.len > 0;

    for (size_t i = 0; i < t->queue.len; i++) {
        ds4_points_unpin(&s->points, t->queue.ptr[i]);
        skip(s, "pressure");
    }
    t->queue.len = 0;
    return any;
}

bool ds4_save_is_busy(const struct ds4_sched *s)
{
    const struct ds4_tier *t = &s->tier;

    return t->shelf != NULL && s->started && t->works && !s->failed && !ds4_tier_is_down(s) &&
           (t->scanned || t->opening) &&
           (t->saving != NULL || t->queue.len > 0 || s->points.wanted.len > 0 ||
            s->points.saving.len > 0 || s->points.fresh.len > 0);
}

/* ---- ends of a save --------------------------------------------------------------------------------- */

static void unpin(struct ds4_sched *s, struct ds4_saving *v)
{
    if (v->point != NULL)
        ds4_points_unpin(&s->points, v->point);
    v->point = NULL;
    s->head_waits = false; /* its path may be evicted now */
}

/* Files every stage may have written of an object that is not complete. */
static struct ds4_disk_object *maybe_object(const struct ds4_sched *s, const struct ds4_saving *v,
                                            int32_t i)
{
    struct ds4_disk_object *object = calloc(1, sizeof(*object));
    int32_t n = s->points.host.n_stage;

    if (object != NULL)
        object->file = calloc((size_t)n + 1, sizeof(*object->file));
    if (object == NULL || object->file == NULL) {
        free(object);
        return NULL;
    }
    memcpy(object->key, v->m.object[i].key, DS4_ID_BYTES);
    object->kind = i == v->m.n_object - 1 ? v->m.kind : DS4_KV_EXTENT;
    object->n_file = n;
    for (int32_t f = 0; f < n; f++) {
        object->file[f].first_layer = s->points.host.stage[f].first_layer;
        object->file[f].last_layer = s->points.host.stage[f].last_layer;
    }
    return object;
}

/* The save is over; it came to something or its objects are garbage. */
static void finish(struct ds4_sched *s, bool good)
{
    struct ds4_tier *t = &s->tier;
    struct ds4_saving *v = t->saving;
    struct ds4_disk_objects garbage = {0};

    t->saving = NULL;
    unpin(s, v);
    ds4_catalog_reserve(t->catalog, -v->reserved_bytes);
    for (int32_t i = 0; i < v->m.n_object; i++) {
        struct ds4_disk_object *object;

        if (v->held[i] != NULL) {
            ds4_catalog_let_go(t->catalog, v->held[i], &garbage);
        } else if (i < v->next && !good) {
            object = maybe_object(s, v, i);
            if (object != NULL && DS4_VEC_PUSH(&garbage, object) != 0)
                ds4_disk_object_free(object);
        }
    }
    if (!good) /* and the .w file with them */
        ds4_tier_discard(s, v->m.commit, &garbage);
    DS4_VEC_DEINIT(&garbage);
    ds4_metric_add(s->config.metrics, DS4_M_KV_DISK_SAVES, 1, good ? "ok" : "failed");
    ds4_tier_saved(s, good ? NULL : v->why);
    free(v->held);
    ds4_manifest_deinit(&v->m);
    free(v);
}

void ds4_save_stop(struct ds4_sched *s)
{
    struct ds4_tier *t = &s->tier;

    for (size_t i = 0; i < t->queue.len; i++)
        ds4_points_unpin(&s->points, t->queue.ptr[i]);
    t->queue.len = 0;
    if (t->saving == NULL)
        return;
    if (t->saving->storing) {
        t->saving->point = NULL; /* all parts are there: the manifest's answer decides */
        return;
    }
    finish(s, false);
}

void ds4_save_abandon(struct ds4_sched *s)
{
    struct ds4_saving *v = s->tier.saving;

    if (v == NULL)
        return;
    s->tier.saving = NULL;
    free(v->held); /* the objects are the catalogue's */
    ds4_manifest_deinit(&v->m);
    free(v);
}

/* ---- beginning -------------------------------------------------------------------------------------- */

static void name_objects(struct ds4_saving *v)
{
    XXH128_hash_t key = v->root, floor;
    int32_t at = 0;

    for (; v->m.pos - at >= DS4_CHUNK_TOK; at += DS4_CHUNK_TOK) {
        key = ds4_chain_next(key, v->m.token + at, DS4_CHUNK_TOK);
        if ((at + DS4_CHUNK_TOK) % DS4_EXTENT_TOK == 0)
            memcpy(v->m.object[at / DS4_EXTENT_TOK].key, &key, DS4_ID_BYTES);
    }
    floor = key;
    key = ds4_chain_next(floor, v->m.token + at, v->m.pos - at);
    memcpy(v->m.floor_key, &floor, DS4_ID_BYTES);
    memcpy(v->m.object[v->m.n_object - 1].key, &key, DS4_ID_BYTES);
}

static struct ds4_saving *new_saving(struct ds4_sched *s, struct ds4_point *point)
{
    struct ds4_saving *v = calloc(1, sizeof(*v));
    int32_t n_object = point->pos / DS4_EXTENT_TOK + 1;
    struct ds4_err err = {0};

    if (v == NULL)
        return NULL;
    if (ds4_manifest_init(&v->m, n_object, n_object * DS4_MAX_STAGES, &err) != 0) {
        free(v);
        return NULL;
    }
    v->held = calloc((size_t)n_object, sizeof(struct ds4_disk_object *));
    v->m.token = malloc((size_t)point->pos * sizeof(*v->m.token));
    if (v->held == NULL || v->m.token == NULL ||
        getrandom(v->m.commit, DS4_ID_BYTES, 0) != DS4_ID_BYTES) {
        free(v->held);
        ds4_manifest_deinit(&v->m);
        free(v);
        return NULL;
    }
    v->m.pos = point->pos;
    v->m.kind = point->pos % DS4_ANCHOR_TOK == 0 ? DS4_KV_ANCHOR : DS4_KV_TAIL;
    v->m.shared = point->class == DS4_POINT_BOUNDARY;
    memcpy(v->m.fingerprint, s->tier.fingerprint, DS4_ID_BYTES);
    v->root = ds4_prefix_path(point, v->m.token);
    name_objects(v);
    return v;
}

/* Bytes of an object over all stages: of rows, and for a tail of the point. */
static int64_t bytes_of(const struct ds4_sched *s, const struct ds4_saving *v, int32_t i)
{
    const struct ds4_kv_host *host = &s->points.host;
    bool tail = i == v->m.n_object - 1;
    int32_t rows = tail ? v->m.pos % DS4_EXTENT_TOK : DS4_EXTENT_TOK;
    int64_t bytes = 0;

    if (!tail && s->tier.extent_bytes > 0)
        return s->tier.extent_bytes;
    for (int32_t f = 0; f < host->n_stage; f++) {
        bytes += HEADER_BYTES + host->stage[f].block_bytes * rows / DS4_BLOCK_TOK +
                 (int64_t)PAD_BYTES * (tail ? ALL_SECTIONS : ROW_SECTIONS) *
                     (host->stage[f].last_layer - host->stage[f].first_layer);
        if (tail)
            bytes += ds4_point_bytes(&host->stage[f].shape, v->m.pos);
    }
    return bytes;
}

/* Commits of the same chain that this one makes superfluous, the shortest last. */
static void find_superseded(const struct ds4_sched *s, const struct ds4_saving *v,
                            struct ds4_commits *list)
{
    int32_t below = v->m.pos - 1;
    struct ds4_commit *commit;

    while ((commit = ds4_catalog_find(s->tier.catalog, v->m.token, below, v->root, 0)) != NULL) {
        below = commit->pos - 1;
        if (!commit->shared && DS4_VEC_PUSH(list, commit) != 0)
            return;
    }
}

static bool make_room(struct ds4_sched *s, struct ds4_saving *v, int64_t now_ns)
{
    struct ds4_tier *t = &s->tier;
    struct ds4_commits superseded = {0}, victims = {0};
    struct ds4_catalog_ask ask = {.own_begin = v->m.pos,
                                  .pos = v->m.pos,
                                  .shared = v->m.shared,
                                  .superseded = &superseded,
                                  .now_ns = unix_ns(s, now_ns)};
    bool good;

    for (int32_t i = v->m.n_object - 1; i >= 0; i--) {
        v->held[i] = ds4_catalog_object(t->catalog, v->m.object[i].key, i == v->m.n_object - 1);
        if (v->held[i] != NULL) {
            ds4_catalog_hold(v->held[i]);
            continue;
        }
        ask.bytes += (uint64_t)bytes_of(s, v, i);
        ask.own_begin = i * DS4_EXTENT_TOK;
    }
    ask.bytes += (uint64_t)v->m.pos * sizeof(*v->m.token);
    find_superseded(s, v, &superseded);
    good = ds4_catalog_make_room(t->catalog, &ask, &victims);
    for (size_t i = 0; good && i < victims.len; i++)
        ds4_tier_evict(s, victims.ptr[i]);
    DS4_VEC_DEINIT(&superseded);
    DS4_VEC_DEINIT(&victims);
    if (good) {
        v->reserved_bytes = (int64_t)ask.bytes;
        ds4_catalog_reserve(t->catalog, v->reserved_bytes);
    }
    return good;
}

/* The manifest's list of files: known ones, and where the others will be. */
static void list_files(struct ds4_sched *s, struct ds4_saving *v)
{
    const struct ds4_kv_host *host = &s->points.host;
    int32_t n = 0;

    for (int32_t i = 0; i < v->m.n_object; i++) {
        struct ds4_manifest_object *object = &v->m.object[i];

        object->first_file = n;
        object->n_file = v->held[i] != NULL ? v->held[i]->n_file : host->n_stage;
        for (int32_t f = 0; f < object->n_file; f++) {
            if (v->held[i] != NULL)
                v->m.file[n++] = v->held[i]->file[f];
            else
                v->m.file[n++] = (struct ds4_kv_part_ref){.first_layer = host->stage[f].first_layer,
                                                          .last_layer = host->stage[f].last_layer};
        }
    }
    v->m.n_file = n;
}

/* Hands the manifest to the disk thread; false without memory. */
static bool hand_over(struct ds4_sched *s, struct ds4_saving *v, enum ds4_shelf_kind kind)
{
    struct ds4_shelf_job *job = ds4_shelf_job_new(kind, v->m.commit, 0);
    struct ds4_err err = {0};
    struct ds4_buf out;
    int32_t left_out;

    list_files(s, v);
    left_out = kind == DS4_SHELF_COMMIT && DS4_FAULT_POINT(MANIFEST_MISSING_STAGE);
    v->m.object[v->m.n_object - 1].n_file -= left_out;
    v->m.n_file -= left_out;
    ds4_buf_init(&out, DS4_MANIFEST_MAX_BYTES);
    if (job == NULL || ds4_manifest_write(&v->m, &out, &err) != 0) {
        ds4_buf_deinit(&out);
        ds4_shelf_job_free(job);
        return false;
    }
    v->m.object[v->m.n_object - 1].n_file += left_out;
    v->m.n_file += left_out;
    v->m.bytes = out.len;
    job->bytes = ds4_buf_take(&out, &job->n);
    ds4_shelf_submit(s->tier.shelf, job);
    return true;
}

static void begin(struct ds4_sched *s, struct ds4_point *point, int64_t now_ns)
{
    struct ds4_tier *t = &s->tier;
    struct ds4_saving *v = NULL;

    if (is_worth(point, known_pos(s, point))) /* another save may have come first */
        v = new_saving(s, point);
    if (v == NULL) {
        ds4_points_unpin(&s->points, point);
        return;
    }
    t->saving = v;
    v->point = point;
    v->begun_ns = now_ns;
    v->m.created_ns = (uint64_t)unix_ns(s, now_ns);
    if (!make_room(s, v, now_ns)) {
        struct ds4_disk_objects none = {0};

        for (int32_t i = 0; i < v->m.n_object; i++)
            if (v->held[i] != NULL)
                ds4_catalog_let_go(t->catalog, v->held[i], &none);
        DS4_VEC_DEINIT(&none); /* a commit has each of them */
        skip(s, "value");
        unpin(s, v);
        t->saving = NULL;
        free(v->held);
        ds4_manifest_deinit(&v->m);
        free(v);
        return;
    }
    if (!hand_over(s, v, DS4_SHELF_INTEND))
        v->failed = true;
}

/* ---- writing ---------------------------------------------------------------------------------------- */

static bool write_next(struct ds4_sched *s, struct ds4_saving *v)
{
    bool tail = v->next == v->m.n_object - 1;
    struct ds4_kv_write write = {.generation = s->form.generation,
                                 .kind = tail ? v->m.kind : DS4_KV_EXTENT,
                                 .begin = v->next * DS4_EXTENT_TOK,
                                 .end = tail ? v->m.pos : (v->next + 1) * DS4_EXTENT_TOK,
                                 .point = tail ? v->point->id : 0};
    struct ds4_transfer *transfer = ds4_tier_transfer(s, DS4_TRANSFER_WRITE, v, v->next);
    struct ds4_err err = {0};

    if (transfer == NULL)
        return false;
    memcpy(write.key, v->m.object[v->next].key, DS4_ID_BYTES);
    if (tail)
        memcpy(write.commit, v->m.commit, DS4_ID_BYTES);
    write.job = transfer->job;
    write.n_block = ds4_budget_blocks(write.end - write.begin);
    ds4_prefix_path_blocks(v->point, write.begin, write.end, transfer->block);
    write.block = transfer->block;
    for (int32_t b = 0; b < write.n_block; b++) {
        if (ds4_budget_pin(s->budget, transfer->block[b], &err) != 0)
            break;
        transfer->n_block++;
    }
    if (transfer->n_block < write.n_block ||
        s->port.send_kv_write(s->port.owner, &write, &err) != 0) {
        ds4_log(DS4_LOG_WARN, "kv.save", "error=\"%s\"", err.msg);
        ds4_tier_forget_transfer(s, transfer);
        v->failed = true;
        return false;
    }
    v->next++;
    v->n_flight++;
    return true;
}

void ds4_save_answered(struct ds4_sched *s, struct ds4_transfer *transfer, int64_t now_ns)
{
    struct ds4_tier *t = &s->tier;
    struct ds4_saving *v = transfer->owner;
    int32_t i = transfer->object;
    bool tail = i == v->m.n_object - 1;
    struct ds4_disk_object like = {.kind = tail ? v->m.kind : DS4_KV_EXTENT,
                                   .begin = i * DS4_EXTENT_TOK,
                                   .end = tail ? v->m.pos : (i + 1) * DS4_EXTENT_TOK,
                                   .n_file = s->form.n_stage,
                                   .file = transfer->file};
    struct ds4_err err = {0};

    (void)now_ns;
    v->n_flight--;
    v->written_bytes += transfer->bytes;
    if (transfer->reason != DS4_KV_OK) {
        v->failed = true;
        if (transfer->reason == DS4_KV_IO || transfer->reason == DS4_KV_NO_SPACE)
            snprintf(v->why, sizeof(v->why), "stage %d: %.90s", transfer->stage, transfer->text);
        ds4_log(DS4_LOG_WARN, "kv.save", "stage=%d reason=%s message=\"%s\"", transfer->stage,
                ds4_kv_reason_text(transfer->reason), transfer->text);
    } else {
        for (int32_t f = 0; f < like.n_file; f++) {
            like.file[f].first_layer = s->points.host.stage[f].first_layer;
            like.file[f].last_layer = s->points.host.stage[f].last_layer;
        }
        memcpy(like.key, v->m.object[i].key, DS4_ID_BYTES);
        v->held[i] = ds4_catalog_put_object(t->catalog, &like, &err);
        v->failed |= v->held[i] == NULL;
    }
    if (v->held[i] != NULL) {
        /* It is counted as it is now, not as it was guessed. */
        int64_t guess = bytes_of(s, v, i);

        guess = guess < v->reserved_bytes ? guess : v->reserved_bytes;
        v->reserved_bytes -= guess;
        ds4_catalog_reserve(t->catalog, -guess);
        if (!tail)
            t->extent_bytes = (int64_t)v->held[i]->bytes;
    }
    ds4_tier_forget_transfer(s, transfer);
}

void ds4_save_late(struct ds4_sched *s, struct ds4_transfer *transfer)
{
    struct ds4_saving *v = transfer->owner;

    if (transfer->object == v->m.n_object - 1) {
        transfer->point = v->point;
        ds4_points_pin(&s->points, v->point);
    }
    transfer->owner = NULL;
    v->n_flight--;
    v->failed = true;
}

/* Without a .w file nobody would know of parts that come to nothing: none are written. */
void ds4_save_noted(struct ds4_sched *s, const struct ds4_shelf_job *job)
{
    struct ds4_saving *v = s->tier.saving;

    if (job->rc != 0)
        ds4_log(DS4_LOG_WARN, "kv.save", "error=\"%s\"", job->err.msg);
    if (v == NULL || memcmp(v->m.commit, job->id, DS4_ID_BYTES) != 0)
        return;
    v->noted = true;
    v->failed |= job->rc != 0;
    if (job->rc != 0)
        snprintf(v->why, sizeof(v->why), "manifests: %.90s", job->err.msg);
}

void ds4_save_stored(struct ds4_sched *s, const struct ds4_shelf_job *job, int64_t now_ns)
{
    struct ds4_tier *t = &s->tier;
    struct ds4_saving *v = t->saving;
    struct ds4_commit *commit = NULL;
    struct ds4_err err = job->err;

    if (v == NULL || memcmp(v->m.commit, job->id, DS4_ID_BYTES) != 0)
        return;
    if (job->rc == 0)
        commit = ds4_catalog_add(t->catalog, &v->m, unix_ns(s, now_ns), &err);
    if (commit == NULL)
        ds4_log(DS4_LOG_WARN, "kv.save", "error=\"%s\"", err.msg);
    else
        ds4_log(DS4_LOG_INFO, "kv.save",
                "tokens=%d written_mb=%.1f took_ms=%" PRId64 " commits=%d disk_mb=%" PRIu64,
                v->m.pos, (double)v->written_bytes / 1e6, (now_ns - v->begun_ns) / DS4_NS_PER_MS,
                ds4_catalog_n(t->catalog), ds4_catalog_bytes(t->catalog) >> 20);
    if (job->rc != 0)
        snprintf(v->why, sizeof(v->why), "manifests: %.90s", job->err.msg);
    if (commit == NULL) { /* it may be there all the same, and its parts will not */
        struct ds4_shelf_job *retire = ds4_shelf_job_new(DS4_SHELF_RETIRE, job->id, 0);

        if (retire != NULL)
            ds4_shelf_submit(t->shelf, retire);
    }
    finish(s, commit != NULL);
}

void ds4_save_tick(struct ds4_sched *s, int64_t now_ns)
{
    struct ds4_tier *t = &s->tier;
    struct ds4_saving *v;

    while (t->saving == NULL && t->queue.len > 0 && t->scanned && !t->shrinking &&
           !ds4_tier_is_down(s) && (t->flush || now_ns >= t->save_ns)) {
        struct ds4_point *point = t->queue.ptr[0];

        memmove(t->queue.ptr, t->queue.ptr + 1, --t->queue.len * sizeof(*t->queue.ptr));
        begin(s, point, now_ns);
    }
    v = t->saving;
    if (v != NULL && ds4_tier_is_down(s))
        v->failed = true; /* what it waits for may never come */
    if (v == NULL || v->storing || (!v->noted && !v->failed))
        return;
    while (!v->failed && v->next < v->m.n_object) {
        if (v->held[v->next] != NULL)
            v->next++;
        else if (!write_next(s, v))
            break;
    }
    if (v->n_flight > 0)
        return;
    if (!v->failed && v->next < v->m.n_object)
        return; /* no room for jobs now */
    if (!v->failed && hand_over(s, v, DS4_SHELF_COMMIT)) {
        v->storing = true;
        unpin(s, v);
        return;
    }
    finish(s, false);
}

void ds4_sched_save_all(struct ds4_sched *s, int64_t now_ns)
{
    (void)now_ns;
    s->tier.flush = true;
    if (!s->started || !s->tier.works || !s->tier.scanned)
        return;
    for (int32_t c = 0; c < DS4_N_POINT_LIST; c++)
        for (struct ds4_point *point = s->points.newest[c], *older; point != NULL; point = older) {
            older = point->older; /* what is queued goes to another list */
            if (point->turn_end && point->ready && !point->fresh && point->node != NULL &&
                !is_queued(&s->tier, point))
                enqueue(s, point);
        }
}

bool ds4_sched_is_saving(const struct ds4_sched *s)
{
    return ds4_save_is_busy(s);
}

/* Restoring: from a commit on disk to a running sequence (see tier.h).
 *
 * Order is everything: the lease of every block first, then the stages' host memory, then the manifest's
 * tokens compared with the prompt's, then the parts; the device is written by one step after every stage
 * has verified everything.  A stage that cannot, or is late, ends it for all: lease and memory go back,
 * what other stages have read is dropped, and the request is admitted anew without the disk.
 * A commit that failed a check is never tried again: it leaves the catalogue, with every other one that
 * needs the same object.
 * Invariant: a restore with a sequence holds its lease; host memory is held until every answer is there and
 * the step that installs or drops is posted. */
#include "common/clock.h"
#include "common/log.h"
#include "common/metrics.h"
#include "proto/point.h"
#include "router/sched/engine.h"
#include "router/sched/tier.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define WINDOW       16 /* parts asked for at once */
#define LOG_EVERY_NS (2 * DS4_NS_PER_SEC)
#define MAX_BAD      2 /* generations that ended right after its install */

static int64_t unix_ns(const struct ds4_sched *s, int64_t now_ns)
{
    return now_ns + s->config.unix_offset_ns;
}

/* What became of a restore, in the words of its metric. */
static void count_result(struct ds4_sched *s, const char *result)
{
    ds4_metric_add(s->config.metrics, DS4_M_KV_RESTORES, 1, "disk", result);
}

static const char *result_text(enum ds4_kv_reason reason)
{
    switch (reason) {
    case DS4_KV_MISSING_PART:
        return "missing";
    case DS4_KV_NO_SPACE:
    case DS4_KV_REFUSED:
        return "capacity";
    case DS4_KV_IO:
        return "io";
    case DS4_KV_CANCELLED:
        return "cancelled";
    default:
        return "corrupt";
    }
}

static void miss(struct ds4_sched *s, const char *why)
{
    ds4_metric_add(s->config.metrics, DS4_M_KV_DISK_MISSES, 1, why);
}

/* ---- looking up ------------------------------------------------------------------------------------- */

/* Host memory of one object on one stage, in whole units. */
static int64_t held_of(const struct ds4_sched *s, const struct ds4_disk_object *object,
                       int32_t stage)
{
    const struct ds4_kv_host *host = &s->points.host;
    int32_t unit = host->stage[stage].unit_bytes;
    int64_t bytes = ds4_unit_round(
        ds4_budget_blocks(object->end - object->begin) * host->stage[stage].block_bytes, unit);

    if (object->kind != DS4_KV_EXTENT)
        bytes += ds4_unit_round(ds4_point_bytes(&host->stage[stage].shape, object->end), unit);
    return bytes;
}

static void free_restore(struct ds4_restore *r)
{
    free(r->staging);
    free(r);
}

static struct ds4_restore *new_restore(struct ds4_sched *s, struct ds4_commit *commit,
                                       int32_t first, int64_t now_ns)
{
    struct ds4_restore *r = calloc(1, sizeof(*r));

    if (r == NULL)
        return NULL;
    r->commit = commit;
    r->first = first;
    r->next = first;
    r->begun_ns = r->logged_ns = now_ns;
    r->staging = calloc((size_t)commit->n_object, sizeof(*r->staging));
    if (r->staging == NULL || DS4_VEC_RESERVE(&s->tier.restore, s->tier.restore.len + 1) != 0) {
        free_restore(r);
        return NULL;
    }
    for (int32_t i = first; i < commit->n_object; i++) {
        r->total_bytes += commit->object[i]->bytes;
        for (int32_t f = 0; f < s->points.host.n_stage; f++)
            r->held_bytes[f] += held_of(s, commit->object[i], f);
    }
    return r;
}

struct ds4_restore *ds4_restore_look(struct ds4_sched *s, struct ds4_request *req,
                                     const int32_t *token, int32_t n_tok,
                                     struct ds4_prefix_hit *hit, int64_t now_ns)
{
    struct ds4_tier *t = &s->tier;
    struct ds4_prefix_node *node;
    struct ds4_commit *commit;
    struct ds4_restore *r;
    int32_t first;

    if (t->shelf == NULL || req->no_disk || req->no_cache_reads)
        return NULL;
    if (ds4_tier_is_down(s)) {
        miss(s, "stalled");
        return NULL;
    }
    if (!t->works || !t->scanned) {
        miss(s, "scanning");
        return NULL;
    }
    commit = ds4_catalog_find(t->catalog, token, n_tok - 1, ds4_chain_root(req->salt),
                              hit->run + DS4_RESTORE_MIN_TOK - 1);
    if (commit == NULL) {
        if (n_tok - hit->run > DS4_RESTORE_MIN_TOK)
            miss(s, "none");
        return NULL;
    }
    node = ds4_prefix_rows(&s->prefix, token, commit->pos, req->salt, DS4_EXTENT_TOK);
    first = node == NULL ? 0 : ds4_prefix_end(node) / DS4_EXTENT_TOK;
    if (commit->n_object - first > DS4_RESTORE_MAX_PARTS) {
        miss(s, "no_room");
        return NULL;
    }
    r = new_restore(s, commit, first, now_ns);
    if (r == NULL)
        return NULL;
    hit->start = commit->pos;
    hit->run = commit->pos;
    hit->lcp = hit->lcp > commit->pos ? hit->lcp : commit->pos;
    hit->source = DS4_SOURCE_DISK;
    hit->hot = -1;
    hit->point = NULL;
    hit->node = node;
    r->hit = *hit;
    return r;
}

int32_t ds4_restore_rows(const struct ds4_restore *r)
{
    return r->first * DS4_EXTENT_TOK;
}

void ds4_restore_want(struct ds4_sched *s, const struct ds4_request *req, int64_t now_ns)
{
    struct ds4_tier *t = &s->tier;
    struct ds4_commit *commit;

    if (t->shelf == NULL || !t->scanned || req->no_cache_reads)
        return;
    commit =
        ds4_catalog_find(t->catalog, req->prompt, req->n_prompt - 1, ds4_chain_root(req->salt), 0);
    if (commit != NULL)
        commit->wanted_ns = unix_ns(s, now_ns) + s->config.queue_ms * DS4_NS_PER_MS;
}

/* ---- ends ------------------------------------------------------------------------------------------- */

static bool is_bad(enum ds4_kv_reason reason)
{
    return reason != DS4_KV_OK && reason != DS4_KV_IO && reason != DS4_KV_CANCELLED &&
           reason != DS4_KV_REFUSED && reason != DS4_KV_NO_SPACE;
}

static void unpin(struct ds4_sched *s, struct ds4_commit *commit)
{
    if (--commit->pins == 0 && commit->bad)
        ds4_tier_drop_commit(s, commit, true);
}

/* No request gets it any more; those that are at it will see for themselves. */
static void condemn(struct ds4_sched *s, struct ds4_commit *commit)
{
    commit->denied = true;
    commit->bad = true;
    if (commit->pins == 0)
        ds4_tier_drop_commit(s, commit, true);
}

static void condemn_all(struct ds4_sched *s, struct ds4_commit *commit, int32_t object)
{
    struct ds4_catalog *c = s->tier.catalog;
    const struct ds4_disk_object *bad = object < 0 ? NULL : commit->object[object];

    for (int32_t i = ds4_catalog_n(c) - 1; i >= 0 && bad != NULL; i--) {
        struct ds4_commit *other = ds4_catalog_at(c, i);

        if (other != commit && object < other->n_object && other->object[object] == bad)
            condemn(s, other);
    }
    condemn(s, commit);
}

static void remove_restore(struct ds4_sched *s, struct ds4_restore *r)
{
    struct ds4_tier *t = &s->tier;

    for (size_t i = 0; i < t->restore.len; i++)
        if (t->restore.ptr[i] == r) {
            t->restore.ptr[i] = t->restore.ptr[--t->restore.len];
            break;
        }
    free_restore(r);
}

/* Stagings that some stages have: the next step drops them everywhere, then the memory is free. */
static void give_up(struct ds4_sched *s, struct ds4_restore *r)
{
    struct ds4_tier *t = &s->tier;
    bool any = false;

    for (int32_t i = r->first; i < r->next; i++)
        if (r->staging[i] != 0)
            any |= DS4_VEC_PUSH(&t->drop, r->staging[i]) == 0;
    if (any)
        for (int32_t f = 0; f < s->points.host.n_stage; f++)
            t->drop_held[f] += r->held_bytes[f];
    else
        ds4_points_let_go(&s->points, r->held_bytes);
    unpin(s, r->commit);
    remove_restore(s, r);
}

/* Failed, and nobody is at it any more: the request begins again, without the disk. */
static void start_over(struct ds4_sched *s, struct ds4_restore *r, int64_t now_ns)
{
    struct ds4_seq *seq = r->seq;
    struct ds4_request *req = seq->req;
    struct ds4_err err = {0};

    ds4_log(DS4_LOG_WARN, "kv.restore", "request=%s tokens=%d reason=%s message=\"%s\"", req->id,
            r->commit->pos, ds4_kv_reason_text(r->reason), r->text);
    miss(s, "failed");
    r->seq = NULL;
    seq->req = NULL;
    seq->state = DS4_SEQ_DRAINING;
    s->n_running--;
    ds4_engine_settle(s, seq, now_ns);
    req->no_disk = true;
    req->parked = req->history.len > 0; /* its answer has begun: no time runs out in the queue */
    req->seq = 0;
    if (ds4_request_move(req, DS4_REQUEST_QUEUED, &err) != 0)
        ds4_engine_finish(s, req, DS4_END_ERROR, DS4_REASON_INTERNAL, -1, now_ns, &err);
    else
        ds4_engine_queue_first(s, req);
}

static void fail(struct ds4_sched *s, struct ds4_restore *r, enum ds4_kv_reason reason,
                 const char *text, int32_t object)
{
    if (r->failed)
        return;
    r->failed = true;
    r->reason = reason;
    count_result(s, ds4_tier_is_late(s) && reason == DS4_KV_CANCELLED && r->seq != NULL
                        ? "timeout"
                        : result_text(reason));
    snprintf(r->text, sizeof(r->text), "%s", text);
    if (is_bad(reason) || reason == DS4_KV_IO)
        ds4_tier_count_reject(s, reason);
    if (is_bad(reason))
        condemn_all(s, r->commit, object);
    else if (reason == DS4_KV_IO)
        r->commit->denied = true; /* it may be sound: pardoned after a while (tier_watch.c) */
}

void ds4_restore_forget_seq(struct ds4_sched *s, const struct ds4_seq *seq)
{
    for (size_t i = 0; i < s->tier.restore.len; i++)
        if (s->tier.restore.ptr[i]->seq == seq)
            s->tier.restore.ptr[i]->seq = NULL;
}

static void clear_suspect(struct ds4_sched *s)
{
    struct ds4_commit *commit = s->tier.suspect;

    s->tier.suspect = NULL;
    if (commit != NULL)
        unpin(s, commit);
}

void ds4_restore_acked(struct ds4_sched *s, const struct ds4_seq *seq, bool finite)
{
    struct ds4_commit *commit = s->tier.suspect;

    if (commit == NULL || seq->id != s->tier.suspect_seq)
        return;
    if (!finite) {
        ds4_tier_count_reject(s, DS4_KV_BAD_CRC);
        condemn(s, commit);
    } else {
        commit->n_bad = 0;
    }
    clear_suspect(s);
}

void ds4_restore_stop(struct ds4_sched *s, bool lost)
{
    struct ds4_tier *t = &s->tier;
    struct ds4_commit *commit = t->suspect;

    if (commit != NULL && lost && ++commit->n_bad >= MAX_BAD) {
        ds4_log(DS4_LOG_WARN, "kv.restore",
                "message=\"a commit was installed before two generations ended at once\"");
        condemn(s, commit);
    }
    clear_suspect(s);
    while (t->restore.len > 0) {
        unpin(s, t->restore.ptr[0]->commit);
        remove_restore(s, t->restore.ptr[0]);
    }
    t->drop.len = 0;
    memset(t->drop_held, 0, sizeof(t->drop_held));
}

/* ---- the way of one --------------------------------------------------------------------------------- */

bool ds4_restore_begin(struct ds4_sched *s, struct ds4_restore *r, struct ds4_seq *seq)
{
    struct ds4_tier *t = &s->tier;
    struct ds4_shelf_job *job = ds4_shelf_job_new(DS4_SHELF_LOAD, r->commit->id, seq->id);

    if (job == NULL)
        return false;
    r->seq = seq;
    r->commit->pins++;
    t->restore.ptr[t->restore.len++] = r; /* reserved in new_restore */
    ds4_shelf_submit(t->shelf, job);
    return true;
}

bool ds4_restore_hold(struct ds4_sched *s, struct ds4_restore *r)
{
    if (DS4_VEC_RESERVE(&s->tier.restore, s->tier.restore.len + 1) == 0 &&
        ds4_points_hold(&s->points, r->held_bytes))
        return true;
    miss(s, "no_room");
    count_result(s, "capacity");
    return false;
}

void ds4_restore_cancel(struct ds4_sched *s, struct ds4_restore *r, bool held)
{
    if (r == NULL)
        return;
    if (held)
        ds4_points_let_go(&s->points, r->held_bytes);
    free_restore(r);
}

void ds4_restore_loaded(struct ds4_sched *s, struct ds4_shelf_job *job)
{
    struct ds4_tier *t = &s->tier;
    struct ds4_restore *r = NULL;

    for (size_t i = 0; i < t->restore.len; i++)
        if (t->restore.ptr[i]->seq != NULL && t->restore.ptr[i]->seq->id == job->tag &&
            memcmp(t->restore.ptr[i]->commit->id, job->id, DS4_ID_BYTES) == 0)
            r = t->restore.ptr[i];
    if (r == NULL)
        return;
    if (job->rc != 0)
        fail(s, r, job->reason, job->err.msg, -1);
    else if (job->manifest.pos != r->commit->pos ||
             memcmp(job->manifest.token, r->seq->token.ptr,
                    (size_t)r->commit->pos * sizeof(int32_t)) != 0)
        fail(s, r, DS4_KV_BAD_TOKENS, "the manifest is of other tokens", -1);
    else
        r->checked = true;
}

static bool read_next(struct ds4_sched *s, struct ds4_restore *r)
{
    const struct ds4_disk_object *object = r->commit->object[r->next];
    struct ds4_transfer *transfer = ds4_tier_transfer(s, DS4_TRANSFER_READ, r, r->next);
    struct ds4_kv_read read = {.generation = s->form.generation,
                               .kind = object->kind,
                               .begin = object->begin,
                               .end = object->end,
                               .n_part = object->n_file,
                               .part = object->file};
    struct ds4_err err = {0};

    if (transfer == NULL)
        return false;
    memcpy(read.key, object->key, DS4_ID_BYTES);
    read.job = transfer->job;
    read.staging = s->tier.next_staging++;
    if (s->port.send_kv_read(s->port.owner, &read, &err) != 0) {
        ds4_tier_forget_transfer(s, transfer); /* the generation is about to end */
        fail(s, r, DS4_KV_CANCELLED, err.msg, -1);
        return false;
    }
    r->staging[r->next++] = read.staging;
    r->n_flight++;
    return true;
}

void ds4_restore_answered(struct ds4_sched *s, struct ds4_transfer *transfer)
{
    struct ds4_restore *r = transfer->owner;

    r->n_flight--;
    r->n_read++;
    r->bytes += transfer->bytes;
    if (transfer->reason != DS4_KV_OK)
        fail(s, r, transfer->reason, transfer->text, transfer->object);
    ds4_tier_forget_transfer(s, transfer);
}

static void log_progress(struct ds4_restore *r, int64_t now_ns)
{
    double spent_s = (double)(now_ns - r->begun_ns) / (double)DS4_NS_PER_SEC;
    double rate = spent_s > 0 ? (double)r->bytes / spent_s : 0;
    double left = r->total_bytes > r->bytes ? (double)(r->total_bytes - r->bytes) : 0;

    if (now_ns - r->logged_ns < LOG_EVERY_NS)
        return;
    r->logged_ns = now_ns;
    ds4_log(DS4_LOG_INFO, "kv.restore",
            "tokens=%d done_mb=%.0f of_mb=%.0f mb_per_s=%.0f left_s=%.1f", r->commit->pos,
            (double)r->bytes / 1e6, (double)r->total_bytes / 1e6, rate / 1e6,
            rate > 0 ? left / rate : 0);
}

/* Everything is verified on every stage: its sequence may run. */
static void make_ready(struct ds4_sched *s, struct ds4_restore *r, int64_t now_ns)
{
    struct ds4_seq *seq = r->seq;
    struct ds4_prefix_hit hit = r->hit;
    struct ds4_err err = {0};
    double took_s = (double)(now_ns - r->begun_ns) / (double)DS4_NS_PER_SEC;

    if (ds4_batch_add_prefill(&s->batch, seq, &err) != 0) {
        fail(s, r, DS4_KV_REFUSED, err.msg, -1);
        return;
    }
    r->ready = true;
    seq->reading = false;
    ds4_catalog_use(s->tier.catalog, r->commit, unix_ns(s, now_ns));
    s->tier.uses_dirty = true;
    count_result(s, "ok");
    ds4_metric_observe(s->config.metrics, DS4_M_KV_RESTORE_SECONDS, took_s, "disk");
    ds4_log(DS4_LOG_INFO, "kv.restore", "request=%s tokens=%d read_mb=%.1f took_ms=%.0f",
            seq->req->id, r->commit->pos, (double)r->bytes / 1e6, took_s * 1e3);
    ds4_engine_admitted(s, seq->req, &hit, now_ns); /* the last: it may cancel */
}

static bool has_all(const struct ds4_restore *r)
{
    return r->checked && r->n_flight == 0 && r->next == r->commit->n_object;
}

/* One step of one restore, which may be gone afterwards. */
static void advance(struct ds4_sched *s, struct ds4_restore *r, bool may_install, int64_t now_ns)
{
    if (r->ready && r->seq != NULL)
        return; /* its sequence's first step is about to be posted */
    if (r->seq == NULL && !r->failed)
        fail(s, r, DS4_KV_CANCELLED, "the request is gone", -1);
    if (!r->failed && !has_all(r) && ds4_tier_is_down(s))
        fail(s, r, DS4_KV_CANCELLED,
             ds4_tier_is_late(s) ? "the disk is late" : "the folder is gone",
             -1); /* the commit may be sound */
    while (!r->failed && r->checked && r->n_flight < WINDOW && r->next < r->commit->n_object &&
           read_next(s, r)) {
    }
    if (!r->failed && has_all(r) && may_install)
        make_ready(s, r, now_ns);
    else if (!r->failed)
        log_progress(r, now_ns);
    if (!r->failed)
        return;
    if (r->seq != NULL)
        start_over(s, r, now_ns); /* answers that are still out find nobody */
    if (r->n_flight == 0)
        give_up(s, r);
}

void ds4_restore_tick(struct ds4_sched *s, int64_t now_ns)
{
    struct ds4_tier *t = &s->tier;
    bool may_install = true;

    for (size_t i = 0; i < t->restore.len; i++)
        may_install &= !t->restore.ptr[i]->ready; /* one in a step: operations are limited */
    for (size_t i = t->restore.len; i > 0; i--) {
        struct ds4_restore *r = t->restore.ptr[i - 1];

        advance(s, r, may_install, now_ns);
        /* A callback may have taken any away; the rest comes in the next turn. */
        if (i - 1 < t->restore.len && t->restore.ptr[i - 1] == r)
            may_install &= !r->ready;
        else if (i > t->restore.len + 1)
            return;
    }
}

/* ---- steps ------------------------------------------------------------------------------------------ */

static struct ds4_restore *restore_of(const struct ds4_sched *s, const struct ds4_seq *seq)
{
    for (size_t i = 0; i < s->tier.restore.len; i++)
        if (s->tier.restore.ptr[i]->seq == seq)
            return s->tier.restore.ptr[i];
    return NULL;
}

int32_t ds4_restore_n_ops(const struct ds4_sched *s, const struct ds4_seq *seq)
{
    const struct ds4_restore *r = restore_of(s, seq);

    return r == NULL ? 0 : r->commit->n_object - r->first + 1;
}

int ds4_restore_add_ops(struct ds4_sched *s, struct ds4_seq *seq, struct ds4_step *step,
                        struct ds4_err *err)
{
    const struct ds4_kv_lease *lease = seq->lease;
    struct ds4_restore *r = restore_of(s, seq);
    struct ds4_point *point;
    struct ds4_kv_op *op;

    if (r == NULL)
        return 0;
    ds4_points_let_go(&s->points, r->held_bytes); /* a part of it is the point's from here on */
    point =
        ds4_points_adopt(&s->points, r->commit->pos,
                         r->commit->shared                      ? DS4_POINT_BOUNDARY
                         : r->commit->pos % DS4_ANCHOR_TOK == 0 ? ds4_point_class_at(r->commit->pos)
                                                                : DS4_POINT_TAIL,
                         step->step_no);
    if (point == NULL || DS4_VEC_PUSH(&seq->point, point) != 0)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for a restore point");
    for (int32_t i = r->first; i < r->commit->n_object; i++) {
        const struct ds4_disk_object *object = r->commit->object[i];

        op = ds4_engine_add_op(s, step, DS4_KV_STAGED_INSTALL);
        op->staging = r->staging[i];
        op->first_block = object->begin / DS4_BLOCK_TOK;
        op->n_block = ds4_budget_blocks(object->end - object->begin);
        op->block = lease->block + op->first_block;
        op->point = i == r->commit->n_object - 1 ? point->id : 0;
    }
    op = ds4_engine_add_op(s, step, DS4_KV_INSTALL);
    op->seq = seq->id;
    op->slot = lease->slot;
    op->epoch = lease->epoch;
    op->pos = r->commit->pos;
    op->point = point->id;
    clear_suspect(s);
    s->tier.suspect = r->commit; /* with the pin */
    s->tier.suspect_seq = seq->id;
    remove_restore(s, r);
    return 0;
}

void ds4_restore_add_drops(struct ds4_sched *s, struct ds4_step *step)
{
    struct ds4_tier *t = &s->tier;

    for (int32_t n = 0; t->drop.len > 0 && n < DS4_MAX_STAGED_DROP; n++)
        ds4_engine_add_op(s, step, DS4_KV_STAGED_DROP)->staging = DS4_VEC_POP(&t->drop);
    if (t->drop.len > 0)
        return;
    ds4_points_let_go(&s->points, t->drop_held);
    memset(t->drop_held, 0, sizeof(t->drop_held));
}

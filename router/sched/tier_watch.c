/* Deadlines and health of the disk tier (see tier.h).
 *
 * A disk does not fail, it falls silent: a network mount that is gone, a drive that retries a sector for
 * minutes.  So time is measured from the last word of a stage while it has jobs before it, and not before the
 * steps that were posted ahead of a job are done, for the job waits behind them (those have a watchdog of
 * their own).  Invariant: what a late stage may still read or write, a point or host memory, is not given to
 * anybody else before it has answered or its generation is over; blocks are, once a later step came back,
 * because a stage copies them in the order of its steps. */
#include "common/clock.h"
#include "common/log.h"
#include "common/metrics.h"
#include "router/sched/engine.h"
#include "router/sched/tier.h"

#include <inttypes.h>
#include <stdio.h>

#define FIRST_WAIT_NS DS4_NS_PER_SEC
#define MOST_WAIT_NS  (30 * DS4_NS_PER_SEC)
#define PARDON_NS     (300 * DS4_NS_PER_SEC) /* what could not be read is not tried again for so long */

bool ds4_tier_is_late(const struct ds4_sched *s)
{
    return s->tier.n_late > 0 || s->tier.shelf_late;
}

bool ds4_tier_is_down(const struct ds4_sched *s)
{
    return s->tier.lost || ds4_tier_is_late(s);
}

/* ---- late ------------------------------------------------------------------------------------------- */

static int64_t limit_ns(const struct ds4_sched *s)
{
    return s->config.disk_ms * DS4_NS_PER_MS;
}

/* The first stage that owes an answer and has been silent for too long, -1: none. */
static int32_t late_stage(const struct ds4_sched *s, const struct ds4_transfer *transfer,
                          int64_t now_ns)
{
    for (int32_t f = 0; f < s->form.n_stage; f++) {
        int64_t since_ns =
            s->tier.heard_ns[f] > transfer->reached_ns ? s->tier.heard_ns[f] : transfer->reached_ns;

        if ((transfer->answered >> f & 1) == 0 && now_ns - since_ns > limit_ns(s))
            return f;
    }
    return -1;
}

static void give_up(struct ds4_sched *s, struct ds4_transfer *transfer, int32_t stage)
{
    static const char *const op[] = {"save", "restore", "remove"};

    transfer->late = true;
    s->tier.n_late++;
    s->tier.late_stage = stage;
    ds4_metric_add(s->config.metrics, DS4_M_KV_DISK_ABORTS, 1, ds4_metric_stage(stage),
                   op[transfer->kind]);
    ds4_log(DS4_LOG_WARN, "kv.disk",
            "stage=%d job=%" PRIu64 " op=%s message=\"no answer for %" PRId64 " s\"", stage,
            transfer->job, op[transfer->kind], limit_ns(s) / DS4_NS_PER_SEC);
    if (transfer->kind == DS4_TRANSFER_WRITE)
        ds4_save_late(s, transfer);
}

static void watch_stages(struct ds4_sched *s, int64_t now_ns)
{
    struct ds4_tier *t = &s->tier;
    int64_t done = s->n_posted > 0 ? s->posted[s->first_posted].step_no : s->next_step;

    for (size_t i = 0; i < t->transfer.len; i++) {
        struct ds4_transfer *transfer = t->transfer.ptr[i];
        int32_t stage;

        if (transfer->reached_ns == 0 && done >= transfer->after_step)
            transfer->reached_ns = now_ns;
        if (!transfer->late && transfer->reached_ns != 0) {
            stage = late_stage(s, transfer, now_ns);
            if (stage >= 0)
                give_up(s, transfer, stage);
        }
        /* The step posted next after it came back: the rows were copied long ago. */
        while (transfer->late && done > transfer->after_step && transfer->n_block > 0) {
            ds4_budget_unpin(s->budget, transfer->block[--transfer->n_block]);
            s->head_waits = false;
        }
    }
}

static void watch_shelf(struct ds4_sched *s, int64_t now_ns)
{
    struct ds4_tier *t = &s->tier;

    if (ds4_shelf_n_open(t->shelf) == 0)
        t->shelf_ns = now_ns;
    /* A scan takes as long as there are files. */
    t->shelf_late = !t->opening && now_ns - t->shelf_ns > limit_ns(s);
}

/* ---- lost and found --------------------------------------------------------------------------------- */

void ds4_tier_lost(struct ds4_sched *s, const char *why)
{
    struct ds4_tier *t = &s->tier;

    if (t->lost && t->opening)
        return; /* an answer from before */
    t->wait_ns = !t->lost ? FIRST_WAIT_NS : 2 * t->wait_ns;
    if (t->wait_ns > MOST_WAIT_NS)
        t->wait_ns = MOST_WAIT_NS;
    t->retry_ns = t->now_ns + t->wait_ns;
    if (!t->lost)
        ds4_log(DS4_LOG_ERROR, "kv.disk", "error=\"nothing is kept on disk: %s\"", why);
    t->lost = true;
    t->scanned = false;
    t->uses_dirty = false;
    snprintf(t->trouble, sizeof(t->trouble), "%s", why);
    s->points.watched = false; /* new points are nobody's to look at */
    for (size_t i = 0; i < s->points.fresh.len; i++)
        s->points.fresh.ptr[i]->fresh = false;
    s->points.fresh.len = 0;
}

void ds4_tier_found(struct ds4_sched *s)
{
    struct ds4_tier *t = &s->tier;

    if (t->lost)
        ds4_log(DS4_LOG_WARN, "kv.disk", "message=\"the folder is there again\"");
    t->lost = false;
    t->n_failed = 0;
    t->save_ns = 0;
    t->trouble[0] = '\0';
    s->points.watched = s->started && t->works;
}

/* Whatever holds a commit of the old catalogue has to end first. */
static void open_again(struct ds4_sched *s, int64_t now_ns)
{
    struct ds4_tier *t = &s->tier;

    if (t->lost && !t->opening && t->works && now_ns >= t->retry_ns && t->restore.len == 0 &&
        t->saving == NULL && t->suspect == NULL && t->transfer.len == 0 &&
        ds4_shelf_n_open(t->shelf) == 0)
        ds4_tier_open(s);
}

void ds4_tier_saved(struct ds4_sched *s, const char *why)
{
    struct ds4_tier *t = &s->tier;
    int64_t wait_ns = FIRST_WAIT_NS;

    if (why == NULL) {
        if (t->n_failed > 1)
            ds4_log(DS4_LOG_WARN, "kv.disk", "message=\"saves go well again\"");
        t->n_failed = 0;
        t->save_ns = 0;
        return;
    }
    if (why[0] == '\0' || t->lost)
        return;
    snprintf(t->trouble, sizeof(t->trouble), "%s", why);
    if (++t->n_failed < 2)
        return;
    for (int32_t i = 2; i < t->n_failed && wait_ns < MOST_WAIT_NS; i++)
        wait_ns *= 2;
    t->save_ns = t->now_ns + (wait_ns < MOST_WAIT_NS ? wait_ns : MOST_WAIT_NS);
}

/* A commit that could not be read may be sound: a cable, a mount of one stage's host. */
static void pardon(struct ds4_sched *s, int64_t now_ns)
{
    struct ds4_tier *t = &s->tier;
    bool any = false;

    if (!t->scanned || now_ns < t->pardon_ns)
        return;
    t->pardon_ns = now_ns + PARDON_NS;
    for (int32_t i = 0; i < ds4_catalog_n(t->catalog); i++) {
        struct ds4_commit *commit = ds4_catalog_at(t->catalog, i);

        any |= commit->denied && !commit->bad;
        commit->denied &= commit->bad;
    }
    if (any)
        ds4_log(DS4_LOG_INFO, "kv.disk",
                "message=\"commits that could not be read are tried again\"");
}

const char *ds4_sched_disk_state(const struct ds4_sched *s, char trouble[DS4_TROUBLE_BYTES])
{
    const struct ds4_tier *t = &s->tier;
    char none[DS4_TROUBLE_BYTES], *text = trouble != NULL ? trouble : none;

    text[0] = '\0';
    if (t->shelf == NULL || (s->started && !t->works))
        return "off";
    if (t->lost) {
        snprintf(text, DS4_TROUBLE_BYTES, "disk: %s", t->trouble);
        return "lost";
    }
    if (t->n_late > 0)
        snprintf(text, DS4_TROUBLE_BYTES, "disk: stage %d does not answer", t->late_stage);
    else if (t->shelf_late)
        snprintf(text, DS4_TROUBLE_BYTES, "disk: the manifests' folder does not answer");
    if (text[0] != '\0')
        return "stalled";
    if (t->n_failed > 1) {
        snprintf(text, DS4_TROUBLE_BYTES, "disk: %s", t->trouble);
        return "failing";
    }
    return t->scanned ? "ready" : "opening";
}

/* ---- one turn --------------------------------------------------------------------------------------- */

void ds4_tier_watch(struct ds4_sched *s, int64_t now_ns)
{
    struct ds4_tier *t = &s->tier;

    watch_shelf(s, now_ns);
    if (s->started)
        watch_stages(s, now_ns);
    if (s->started) {
        pardon(s, now_ns);
        open_again(s, now_ns);
    }
    if (ds4_tier_is_late(s) != t->was_late) {
        t->was_late = !t->was_late;
        ds4_log(DS4_LOG_WARN, "kv.disk", "message=\"%s\"",
                t->was_late ? "the disk is silent: nothing is kept or read until it answers"
                            : "the disk answers again");
    }
}

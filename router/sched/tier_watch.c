/* Deadlines of the disk tier (see tier.h).
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

bool ds4_tier_is_stalled(const struct ds4_sched *s)
{
    return s->tier.n_late > 0 || s->tier.shelf_late;
}

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

void ds4_tier_watch(struct ds4_sched *s, int64_t now_ns)
{
    struct ds4_tier *t = &s->tier;

    watch_shelf(s, now_ns);
    if (s->started)
        watch_stages(s, now_ns);
    if (ds4_tier_is_stalled(s) != t->stalled) {
        t->stalled = !t->stalled;
        ds4_log(DS4_LOG_WARN, "kv.disk", "message=\"%s\"",
                t->stalled ? "the disk is silent: nothing is kept or read until it answers"
                           : "the disk answers again");
    }
}

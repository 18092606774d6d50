/* The queue: who waits, who is next, who has waited too long (step 4).
 *
 * Fair by tenant, in tokens: every tenant has an account of what was spent for it, and the request of the
 * one with the smallest account is next, its oldest first.  Waiting counts like tokens (aging), so a
 * busy tenant's request is overtaken for a bounded time only.  An account that was idle starts where the
 * newest admitted one stood: nobody saves up.  This is deficit round robin with a quantum of one token.
 * Accounts are found by hash and two tenants may share one: fairness gets coarser then, nothing else.
 * Invariant: the list is in order of arrival, so the head is the first to run out of time. */
#include "common/clock.h"
#include "common/log.h"
#include "router/sched/engine.h"

#include <stdio.h>

#define DS4_AGING_TOK_PER_S 1000 /* a second of waiting is worth so many tokens */

static int64_t *account_of(struct ds4_sched *s, const struct ds4_request *req)
{
    return &s->spent_tok[req->tenant % DS4_N_ACCOUNT];
}

static int64_t standing(struct ds4_sched *s, const struct ds4_request *req)
{
    int64_t spent = *account_of(s, req);

    return spent > s->spent_floor ? spent : s->spent_floor;
}

void ds4_engine_charge(struct ds4_sched *s, const struct ds4_request *req, int64_t n_tok)
{
    int64_t now = standing(s, req);

    *account_of(s, req) = now + n_tok;
}

void ds4_engine_queue(struct ds4_sched *s, struct ds4_request *req, int64_t now_ns)
{
    req->timing.queued_ns = now_ns;
    req->next = NULL;
    if (s->tail != NULL)
        s->tail->next = req;
    else
        s->head = req;
    s->tail = req;
    s->n_queued++;
    s->head_waits = false; /* it may be somebody else's turn now */
}

void ds4_engine_queue_first(struct ds4_sched *s, struct ds4_request *req)
{
    req->next = s->head;
    s->head = req;
    if (s->tail == NULL)
        s->tail = req;
    s->n_queued++;
    s->head_waits = false;
}

void ds4_engine_unlink(struct ds4_sched *s, struct ds4_request *req)
{
    struct ds4_request **at = &s->head, *before = NULL;

    while (*at != req) {
        before = *at;
        at = &(*at)->next;
    }
    *at = req->next;
    if (s->tail == req)
        s->tail = before;
    if (s->short_of == req)
        s->short_of = NULL;
    req->next = NULL;
    s->n_queued--;
    s->head_waits = false; /* another one may be next now */
}

bool ds4_engine_may_follow(const struct ds4_sched *s, const struct ds4_request *req, int64_t now_ns)
{
    return now_ns - req->timing.queued_ns < s->config.queue_ms * DS4_NS_PER_MS / 2;
}

/* The rows it waits for are being made. */
static bool follows(const struct ds4_sched *s, const struct ds4_request *req, int64_t now_ns)
{
    const struct ds4_seq *seq =
        req->follow_seq == 0 || s->of_slot == NULL || req->follow_slot >= s->form.n_slots
            ? NULL
            : s->of_slot[req->follow_slot];

    return seq != NULL && seq->id == req->follow_seq && seq->state == DS4_SEQ_PREFILL &&
           seq->n_acked < req->follow_tok && ds4_engine_may_follow(s, req, now_ns);
}

int32_t ds4_engine_n_waiting(const struct ds4_sched *s, int64_t now_ns)
{
    int32_t places = s->config.max_seqs - s->n_running, n = s->n_queued;

    for (const struct ds4_request *req = s->head; req != NULL && places > 0; req = req->next)
        if (follows(s, req, now_ns) || req->parked) {
            places--;
            n--;
        }
    return n;
}

struct ds4_request *ds4_engine_next(struct ds4_sched *s, int64_t now_ns)
{
    struct ds4_request *next = NULL;
    int64_t best = 0;

    for (struct ds4_request *req = s->head; req != NULL; req = req->next) {
        int64_t waited_ms = (now_ns - req->timing.queued_ns) / DS4_NS_PER_MS;
        int64_t rank = standing(s, req) - waited_ms * DS4_AGING_TOK_PER_S / 1000;

        if (follows(s, req, now_ns))
            continue;
        if (req->history.len > 0) /* it has begun to answer: before all others */
            rank = INT64_MIN + (req->timing.queued_ns & INT64_MAX) / 2;
        if (next == NULL || rank < best) {
            next = req;
            best = rank;
        }
    }
    return next;
}

void ds4_engine_take(struct ds4_sched *s, struct ds4_request *req, int32_t n_tok)
{
    req->parked = false;
    s->spent_floor = standing(s, req);
    ds4_engine_charge(s, req, n_tok);
    ds4_engine_unlink(s, req);
}

/* One limit for all but those that gave way to others.  Who was refused for memory hears so, with the numbers. */
void ds4_engine_expire(struct ds4_sched *s, int64_t now_ns)
{
    struct ds4_request *req = s->head;

    while (req != NULL && now_ns - req->timing.queued_ns >= s->config.queue_ms * DS4_NS_PER_MS) {
        enum ds4_reason reason = DS4_REASON_QUEUE_TIMEOUT;
        struct ds4_err err = {0};

        if (req->parked) {
            req = req->next;
            continue;
        }
        if (s->short_of == req) {
            reason = DS4_REASON_KV_CAPACITY;
            err = s->shortage;
        } else {
            ds4_fail(&err, DS4_E_TIMEOUT, "no place became free within %d ms", s->config.queue_ms);
        }
        ds4_engine_unlink(s, req);
        ds4_engine_finish(s, req, DS4_END_ERROR, reason, -1, now_ns, &err);
        req = s->head; /* a callback may have changed the queue */
    }
}

void ds4_sched_fail_queue(struct ds4_sched *s, enum ds4_reason reason, const struct ds4_err *why,
                          int64_t now_ns)
{
    while (s->head != NULL) {
        struct ds4_request *req = s->head;

        ds4_engine_unlink(s, req);
        ds4_engine_finish(s, req, DS4_END_ERROR, reason, -1, now_ns, why);
    }
}

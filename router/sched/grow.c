/* Room for what a step writes, and who gives way where there is none (step 5; kv-cache.md 2.4).
 *
 * Without overcommit every block of an admitted sequence is held for it and nothing here ever happens.  With it
 * the cache can run out while answers grow.  Then what is cached goes first, and after it the newest
 * sequence: its rows go to the index, where they stay until somebody needs the room, its request waits
 * before all others with the tokens it has, and goes on from what is left of it.  Nothing is cut short and
 * nothing is said to the client; random numbers are f(seed, position), so the answer is the same.
 * Rejected: copying blocks to host memory, a megabyte for 256 tokens both ways, to save a part of them.
 * Invariant: every pick that is left has the blocks it writes into. */
#include "common/log.h"
#include "router/sched/engine.h"

#include <inttypes.h>

/* The newest that runs and is not among the first n_sure picks, which are going to be posted. */
static struct ds4_seq *newest(const struct ds4_sched *s, int32_t n_sure)
{
    struct ds4_seq *found = NULL;

    for (size_t i = 0; i < s->seqs.len; i++) {
        struct ds4_seq *seq = s->seqs.ptr[i];
        bool sure = seq == s->probe || seq->req == NULL || seq->req->delivering || seq->reading;

        for (int32_t p = 0; p < n_sure && !sure; p++)
            sure = s->pick[p].seq == seq;
        if (!sure && (found == NULL || seq->id > found->id))
            found = seq;
    }
    return found;
}

/* Back into the queue with the tokens it has.  What it has in flight is booked when it comes, and its tokens are
 * sampled again later, the same ones. */
static void give_way(struct ds4_sched *s, struct ds4_seq *seq, int64_t now_ns)
{
    struct ds4_request *req = seq->req;
    struct ds4_err err = {0};

    if (DS4_VEC_RESERVE(&req->history, seq->token.len) != 0 ||
        ds4_request_move(req, DS4_REQUEST_QUEUED, &err) != 0) {
        ds4_fail(&err, DS4_E_NOMEM, "no memory to keep an answer that has to wait");
        ds4_engine_end(s, seq, DS4_END_ERROR, DS4_REASON_INTERNAL, -1, now_ns, &err);
        return;
    }
    memcpy(req->history.ptr, seq->token.ptr, seq->token.len * sizeof(*seq->token.ptr));
    req->history.len = seq->token.len;
    req->parked = true;
    req->seq = 0;
    ds4_batch_remove(&s->batch, seq);
    seq->state = DS4_SEQ_DRAINING;
    seq->req = NULL;
    s->n_running--;
    ds4_count_parked(s->config.metrics, "capacity");
    ds4_log(DS4_LOG_INFO, "sched.park", "request=%s seq=%" PRIu64 " tokens=%zu", req->id, seq->id,
            req->history.len);
    ds4_engine_queue(s, req, now_ns);
    if (seq->n_flight == 0)
        ds4_engine_settle(s, seq, now_ns);
}

/* Picks of a sequence that is going: it may be freed. */
static void forget_picks(struct ds4_sched *s, int32_t n, const struct ds4_seq *seq)
{
    for (int32_t i = 0; i < n; i++)
        if (s->pick[i].seq == seq)
            s->pick[i].seq = NULL;
}

/* Blocks for pick i of n, of which n_sure are covered already; false: not in this step. */
static bool cover(struct ds4_sched *s, int32_t i, int32_t n, int32_t n_sure, int64_t now_ns)
{
    for (;;) {
        const struct ds4_pick *pick = &s->pick[i];
        struct ds4_prefix_node *victim;
        struct ds4_seq *seq;
        struct ds4_err err;
        int32_t first, n_new;
        bool at_once;

        if (pick->seq == NULL)
            return false;
        /* Anything but a lack of blocks is a bug, which fill_entry meets again and reports. */
        if (ds4_budget_fill(s->budget, pick->seq->lease, pick->reach, &first, &n_new, &err) == 0 ||
            err.code != DS4_E_BUSY)
            return true;
        victim = ds4_prefix_victim(&s->prefix);
        if (victim != NULL) {
            ds4_engine_evict(s, victim);
            continue;
        }
        seq = newest(s, n_sure);
        if (seq == NULL)
            return false;
        at_once = seq->n_flight == 0;
        forget_picks(s, n, seq);
        give_way(s, seq, now_ns);
        if (!at_once)
            return false; /* its blocks come with its last step */
    }
}

int32_t ds4_engine_grow(struct ds4_sched *s, int32_t n, int64_t now_ns)
{
    int32_t n_sure = 0;

    for (int32_t i = 0; i < n; i++)
        if (cover(s, i, n, n_sure, now_ns))
            s->pick[n_sure++] = s->pick[i];
    return n_sure;
}

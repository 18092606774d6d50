/* Admission (step 4): may the head of the queue run, and from where?
 *
 * First come, first served, all or nothing: the head gets a slot and the promise of every block its
 * prompt and answer can need, evicting idle prefixes (oldest first, never the one it continues) only
 * when that is enough to admit it; else it waits and so do those behind it.  A waiting prompt therefore
 * never starves behind smaller ones, and nothing admitted runs out later.
 * Invariant: a refused attempt leaves ledger, prefixes and slots as they were. */
#include "common/log.h"
#include "common/metrics.h"
#include "router/sched/engine.h"

#include <inttypes.h>

static void evict(struct ds4_sched *s, int32_t index)
{
    struct ds4_prefix_entry entry = ds4_prefix_take(&s->prefix, index);

    ds4_metric_add(s->config.metrics, DS4_M_KV_EVICTIONS, 1, "hbm", "capacity");
    ds4_engine_close_slot(s, entry.lease->slot);
    ds4_budget_release(s->budget, &entry.lease);
    DS4_VEC_DEINIT(&entry.token);
}

/* Could cap_tok be had if every idle prefix but `keep` went?  Asked first, so that nothing is evicted
 * for a request that cannot be admitted anyway. */
static bool worth_evicting(const struct ds4_sched *s, int32_t cap_tok, int32_t keep)
{
    struct ds4_budget_sums sums;

    ds4_budget_sums(s->budget, &sums);
    if (keep >= 0)
        return ds4_budget_blocks(cap_tok) <= sums.free + sums.cached;
    return ds4_budget_blocks(cap_tok) <= sums.free + sums.cached &&
           sums.slots_free + sums.slots_cached > 0;
}

/* A live lease for the request: the hit's, cut back, or a new one.  NULL: not now.  *hit is changed to
 * what was really used. */
static const struct ds4_kv_lease *get_lease(struct ds4_sched *s, int32_t cap_tok,
                                            struct ds4_prefix_hit *hit, struct ds4_err *err)
{
    const struct ds4_kv_lease *lease;

    for (;;) {
        int32_t victim;

        if (hit->index >= 0) {
            lease = s->prefix.entry.ptr[hit->index].lease;
            if (ds4_budget_resume(s->budget, lease, hit->start, cap_tok, err) == 0)
                return lease;
        } else {
            lease = ds4_budget_reserve(s->budget, cap_tok, err);
            if (lease != NULL)
                return lease;
        }
        victim =
            worth_evicting(s, cap_tok, hit->index) ? ds4_prefix_oldest(&s->prefix, hit->index) : -1;
        if (victim < 0)
            return NULL;
        evict(s, victim);
        if (hit->index == (int32_t)s->prefix.entry.len)
            hit->index = victim; /* take() moved the last entry into the gap */
    }
}

static struct ds4_seq *make_seq(struct ds4_sched *s, struct ds4_request *req,
                                const struct ds4_kv_lease *lease, struct ds4_prefix_hit *hit,
                                struct ds4_err *err)
{
    struct ds4_prefix_entry old = {0};
    struct ds4_seq *seq = ds4_seq_new(s->next_seq, req->prompt, req->n_prompt,
                                      ds4_engine_cap(s, req), hit->start, err);

    if (hit->index >= 0)
        old = ds4_prefix_take(&s->prefix, hit->index);
    DS4_VEC_DEINIT(&old.token);
    if (seq == NULL || ds4_request_move(req, DS4_REQUEST_PREFILL, err) != 0)
        goto fail;
    if (DS4_VEC_PUSH(&s->seqs, seq) != 0) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for a sequence");
        goto fail;
    }
    if (ds4_batch_add_prefill(&s->batch, seq, err) != 0) {
        s->seqs.len--;
        goto fail;
    }
    s->next_seq++;
    seq->hi = old.hi;
    seq->install_pos = old.install_pos;
    seq->lease = lease;
    seq->salt = req->salt;
    seq->req = req;
    req->seq = seq->id;
    s->n_running++;
    return seq;

fail:
    ds4_seq_free(seq);
    ds4_engine_close_slot(s, lease->slot);
    ds4_budget_release(s->budget, &lease);
    return NULL;
}

/* Runs after every sink call: a callback may have asked to cancel its own request. */
static void obey_cancel(struct ds4_sched *s, struct ds4_request *req, int64_t now_ns)
{
    if (req->cancel_asked)
        ds4_sched_cancel(s, req, req->cancel, now_ns);
}

/* The answer before is over for its client, who sends the next turn at once, while its last posted
 * steps are still out: waiting those few steps saves computing the whole conversation again. */
static bool better_one_is_draining(const struct ds4_sched *s, const struct ds4_request *req,
                                   int32_t start)
{
    for (size_t i = 0; i < s->seqs.len; i++) {
        const struct ds4_seq *seq = s->seqs.ptr[i];
        struct ds4_prefix_entry soon = {
            .token = seq->token,
            .hi = seq->n_posted > seq->hi ? seq->n_posted : seq->hi,
            .install_pos = seq->install_pos,
        };

        if (seq->state == DS4_SEQ_DRAINING && seq != s->probe && !seq->spoiled &&
            seq->salt == req->salt &&
            ds4_prefix_start(&s->prefix, &soon, req->prompt, req->n_prompt, NULL) > start)
            return true;
    }
    return false;
}

bool ds4_engine_admit(struct ds4_sched *s, int64_t now_ns)
{
    struct ds4_request *req = s->head;
    enum ds4_reason reason = DS4_REASON_INTERNAL;
    struct ds4_prefix_hit hit = {.index = -1};
    const struct ds4_kv_lease *lease;
    struct ds4_err err = {0};

    if (ds4_engine_fit(s, req, &reason, &err) != 0) {
        ds4_engine_unlink(s, req);
        ds4_engine_finish(s, req, DS4_END_ERROR, reason, -1, now_ns, &err);
        return true;
    }
    if (!req->no_cache_reads) {
        hit = ds4_prefix_find(&s->prefix, req->prompt, req->n_prompt, req->salt);
        if (better_one_is_draining(s, req, hit.start))
            return false;
    }
    lease = get_lease(s, ds4_engine_cap(s, req), &hit, &err);
    if (lease == NULL)
        return false;
    ds4_engine_unlink(s, req);
    if (make_seq(s, req, lease, &hit, &err) == NULL) {
        ds4_engine_finish(s, req, DS4_END_ERROR, DS4_REASON_INTERNAL, -1, now_ns, &err);
        return true;
    }
    req->usage.prompt_tok = req->n_prompt;
    req->usage.cached_tok = hit.start;
    req->timing.admitted_ns = now_ns;
    s->prompt_tok += (uint64_t)(req->n_prompt - hit.start);
    s->cached_tok += (uint64_t)hit.start;
    ds4_count_admitted(s->config.metrics, req, &hit);
    ds4_log(DS4_LOG_DEBUG, "sched.admit", "request=%s seq=%" PRIu64 " prompt=%d common=%d start=%d",
            req->id, req->seq, req->n_prompt, hit.lcp, hit.start);
    if (req->sink.admitted != NULL) {
        req->delivering = true;
        req->sink.admitted(req->sink.owner, hit.start);
        req->delivering = false;
        obey_cancel(s, req, now_ns);
    }
    return true;
}

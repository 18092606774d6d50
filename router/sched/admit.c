/* Admission (step 4): may the next of the queue run, and from where?
 *
 * All or nothing: it gets a slot and the promise of every block its prompt and answer can need,
 * evicting what is cached only when that is enough to admit it; else it waits and so do those behind it.  A
 * waiting prompt therefore never starves behind smaller ones, and nothing admitted runs out later.
 * Invariant: a refused attempt leaves ledger, index and slots as they were. */
#include "common/log.h"
#include "common/metrics.h"
#include "router/sched/engine.h"

#include <inttypes.h>
#include <string.h>

/* What is known of it: the prompt, and what a lost generation had answered. */
struct tokens {
    const int32_t *ptr;
    int32_t n;
};
static struct tokens tokens_of(const struct ds4_request *req)
{
    if (req->history.len > 0)
        return (struct tokens){req->history.ptr, (int32_t)req->history.len};
    return (struct tokens){req->prompt, req->n_prompt};
}

/* Rows that must be had whatever others do: what is known of it, and enough to get on. */
static int32_t firm_of(const struct ds4_sched *s, const struct ds4_request *req)
{
    int32_t cap = ds4_engine_cap(s, req), firm = tokens_of(req).n + DS4_BLOCK_TOK;

    return firm < cap ? firm : cap;
}

/* A live lease for the request: the hit's slot, cut back, or another one.  NULL: not now. */
static const struct ds4_kv_lease *get_lease(struct ds4_sched *s, const struct ds4_request *req,
                                            struct ds4_prefix_hit *hit, struct ds4_err *err)
{
    const struct ds4_kv_ask ask = {
        .cap_tok = ds4_engine_cap(s, req),
        .start_tok = hit->start,
        .firm_tok = firm_of(s, req),
        .shared = s->shared,
    };
    const struct ds4_kv_lease *lease;
    struct ds4_budget_sums before, after;

    ds4_prefix_blocks(hit, s->shared);
    ds4_budget_sums(s->budget, &before);
    if (ds4_engine_make_room(s, &ask, req->affinity, hit, err) != 0) {
        ds4_budget_sums(s->budget, &after);
        if (memcmp(&before, &after, sizeof(before)) != 0)
            ds4_count_broken(s->config.metrics, "I4");
        return NULL;
    }
    if (hit->hot < 0)
        return ds4_budget_reserve(s->budget, &ask, err);
    lease = s->prefix.hot.ptr[hit->hot].lease;
    return ds4_budget_resume(s->budget, lease, &ask, err) == 0 ? lease : NULL;
}

/* What the sequence begins with: a slot that is cut back, a point to be installed, or nothing. */
static void begin(struct ds4_sched *s, struct ds4_seq *seq, const struct ds4_prefix_hit *hit)
{
    if (hit->hot >= 0) {
        struct ds4_hot hot = ds4_prefix_take_hot(&s->prefix, hit->hot);

        /* The state that was to be saved is about to change. */
        ds4_points_forget_slot(&s->points, hot.lease->slot);
        seq->hi = hot.hi;
        seq->install_pos = hot.install_pos;
    } else if (hit->point != NULL) {
        seq->install = hit->point;
        ds4_points_pin(&s->points, seq->install);
        seq->hi = hit->start;
        seq->install_pos = hit->start;
    } else { /* from the disk, by a replay, or from nothing */
        seq->hi = hit->run;
        seq->install_pos = hit->start;
        seq->replay_from = hit->run < hit->start ? hit->run : 0;
    }
}

/* `restore`: it waits for the disk before it is computed; NULL: it runs at once. */
static struct ds4_seq *make_seq(struct ds4_sched *s, struct ds4_request *req,
                                const struct ds4_kv_lease *lease, const struct ds4_prefix_hit *hit,
                                const struct ds4_restore *restore, struct ds4_err *err)
{
    struct tokens known = tokens_of(req);
    struct ds4_seq *seq =
        ds4_seq_new(s->next_seq, known.ptr, known.n, ds4_engine_cap(s, req), hit->run, err);

    if (seq == NULL || ds4_request_move(req, DS4_REQUEST_PREFILL, err) != 0)
        goto fail;
    if (DS4_VEC_PUSH(&s->seqs, seq) != 0) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for a sequence");
        goto fail;
    }
    if (restore == NULL && ds4_batch_add_prefill(&s->batch, seq, err) != 0) {
        s->seqs.len--;
        goto fail;
    }
    s->next_seq++;
    seq->n_prompt = req->n_prompt; /* of a replayed answer, more than the prompt is known */
    seq->paused = req->paused;
    seq->max_draft = s->form.max_draft;
    seq->reading = restore != NULL;
    ds4_engine_seat(s, seq, lease);
    seq->salt = req->salt;
    seq->affinity = req->affinity;
    seq->stand = ds4_prefix_stand(&s->prefix, hit, req->salt);
    ds4_prefix_use(&s->prefix, hit, req->timing.admitted_ns);
    begin(s, seq, hit);
    ds4_engine_find_marks(s, seq);
    seq->req = req;
    req->seq = seq->id;
    s->n_running++;
    return seq;

fail:
    ds4_seq_free(seq);
    if (hit->hot >= 0)
        (void)ds4_prefix_take_hot(&s->prefix, hit->hot);
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
 * steps are still out: waiting those few steps saves computing a part of the conversation again. */
static bool better_one_is_draining(const struct ds4_sched *s, const struct ds4_request *req,
                                   int32_t start)
{
    struct tokens known = tokens_of(req);

    for (size_t i = 0; i < s->seqs.len; i++) {
        const struct ds4_seq *seq = s->seqs.ptr[i];
        int32_t cut;

        if (seq->state != DS4_SEQ_DRAINING || seq == s->probe || seq->spoiled ||
            seq->salt != req->salt)
            continue;
        cut = ds4_prefix_common(seq->token.ptr, (int32_t)seq->token.len, known.ptr, known.n - 1);
        if (cut > start && cut >= seq->install_pos &&
            ds4_seq_reach(seq) - cut <= s->config.hot_window_tok)
            return true;
    }
    return false;
}

/* Somebody is computing what this prompt begins with: waiting for it takes no longer than computing it once
 * more beside it, and leaves the stages to others.  Notes whom to wait for. */
static bool better_one_is_coming(const struct ds4_sched *s, struct ds4_request *req, int32_t run,
                                 int64_t now_ns)
{
    struct tokens known = tokens_of(req);
    int32_t best = run + DS4_ANCHOR_TOK - 1;

    req->follow_seq = 0;
    /* Only points let a second one start from there, and who punishes repetitions starts at 0. */
    if (s->points.host.n_stage == 0 || req->no_cache_reads ||
        req->sampling.repetition_penalty != 1 || !ds4_engine_may_follow(s, req, now_ns))
        return false;
    for (size_t i = 0; i < s->batch.prefill.len; i++) {
        const struct ds4_seq *seq = s->batch.prefill.ptr[i];
        int32_t common;

        if (seq->req == NULL || seq == s->probe || seq->spoiled || seq->salt != req->salt ||
            seq->n_acked >= seq->n_prompt)
            continue;
        common = ds4_prefix_common(seq->token.ptr, seq->n_prompt, known.ptr, known.n - 1);
        /* The whole prompt leaves an exact point, a part of it anchors. */
        if (common < seq->n_prompt - 1)
            common = common / DS4_ANCHOR_TOK * DS4_ANCHOR_TOK;
        if (common <= best || seq->n_acked >= common)
            continue;
        best = common;
        req->follow_seq = seq->id;
        req->follow_slot = seq->slot;
        req->follow_tok = common < seq->n_prompt - 1 ? common : seq->n_prompt;
    }
    return req->follow_seq != 0;
}

/* Nobody runs, so nothing will ever become free by itself: what stands in the way are the rows that the
 * request shares, which a lookup protects even if no place is left to go on from. */
static bool must_start_over(const struct ds4_sched *s, const struct ds4_prefix_hit *hit)
{
    return hit->lcp > 0 && s->seqs.len == (s->probe != NULL ? 1 : 0) && s->points.wanted.len == 0 &&
           s->tier.saving == NULL;
}

/* The last stage samples by what was said before: new tokens or, where repetitions are punished, all of
 * them.  It knows those that ran in the slot, not what lies before a point. */
static int32_t needed_from(const struct ds4_request *req)
{
    return req->sampling.repetition_penalty != 1 ? 0 : req->n_prompt;
}

static bool lacks_history(const struct ds4_sched *s, const struct ds4_request *req,
                          const struct ds4_prefix_hit *hit)
{
    int32_t ran_from = hit->hot >= 0 ? s->prefix.hot.ptr[hit->hot].install_pos : hit->run;

    return ran_from > needed_from(req);
}

void ds4_engine_admitted(struct ds4_sched *s, struct ds4_request *req,
                         const struct ds4_prefix_hit *hit, int64_t now_ns)
{
    if (req->history.len > 0)
        return; /* the client has been told before */
    req->usage.prompt_tok = req->n_prompt;
    req->usage.cached_tok = hit->run;
    s->prompt_tok += (uint64_t)(req->n_prompt - hit->run);
    s->cached_tok += (uint64_t)hit->run;
    ds4_count_admitted(s->config.metrics, req, hit);
    ds4_log(DS4_LOG_DEBUG, "sched.admit", "request=%s seq=%" PRIu64 " prompt=%d common=%d start=%d",
            req->id, req->seq, req->n_prompt, hit->lcp, hit->run);
    if (req->sink.admitted != NULL) {
        req->delivering = true;
        req->sink.admitted(req->sink.owner, hit->run);
        req->delivering = false;
        obey_cancel(s, req, now_ns);
    }
}

/* A lease for what the disk has of the prompt, and the stages' memory to read it into; NULL: not now, and
 * *restore is gone. */
static const struct ds4_kv_lease *get_disk_lease(struct ds4_sched *s, const struct ds4_request *req,
                                                 const struct ds4_prefix_hit *hit,
                                                 struct ds4_restore **restore, struct ds4_err *err)
{
    const struct ds4_kv_lease *lease = NULL;
    struct ds4_prefix_hit rows = *hit;

    rows.start = ds4_restore_rows(*restore);
    if (ds4_restore_hold(s, *restore)) {
        lease = get_lease(s, req, &rows, err);
        if (lease != NULL)
            return lease;
        ds4_restore_cancel(s, *restore, true);
    } else {
        ds4_restore_cancel(s, *restore, false);
    }
    *restore = NULL;
    return NULL;
}

/* The best place in memory from which the last stage learns all it must know. */
static void look_up(struct ds4_sched *s, const struct ds4_request *req, struct ds4_prefix_hit *hit)
{
    struct tokens known = tokens_of(req);
    int32_t most = needed_from(req) < known.n ? needed_from(req) + 1 : known.n;

    *hit = ds4_prefix_find(&s->prefix, known.ptr, req->no_cache_reads ? 0 : known.n, req->salt);
    if (lacks_history(s, req, hit)) /* of one that begins again, the answer is run anew */
        *hit = ds4_prefix_find(&s->prefix, known.ptr, most, req->salt);
    if (lacks_history(s, req, hit))
        *hit = ds4_prefix_find(&s->prefix, known.ptr, 0, req->salt);
}

/* From where the request goes on, and the lease for that. */
static const struct ds4_kv_lease *find_place(struct ds4_sched *s, struct ds4_request *req,
                                             struct ds4_prefix_hit *hit,
                                             struct ds4_restore **restore, int64_t now_ns,
                                             struct ds4_err *err)
{
    struct tokens known = tokens_of(req);
    int32_t most = needed_from(req) < known.n ? needed_from(req) + 1 : known.n;
    const struct ds4_kv_lease *lease;

    *restore = NULL;
    req->follow_seq = 0;
    *hit = ds4_prefix_find(&s->prefix, known.ptr, req->no_cache_reads ? 0 : known.n, req->salt);
    if (!req->no_cache_reads && better_one_is_draining(s, req, hit->start))
        return NULL;
    look_up(s, req, hit);
    if (better_one_is_coming(s, req, hit->run, now_ns))
        return NULL;
    *restore = ds4_restore_look(s, req, known.ptr, most, hit, now_ns);
    if (*restore != NULL) {
        lease = get_disk_lease(s, req, hit, restore, err);
        if (lease != NULL || (err->code == DS4_E_BUSY && !must_start_over(s, hit)))
            return lease;
        look_up(s, req, hit); /* as if there were no disk; its memory may have cost points */
    }
    lease = get_lease(s, req, hit, err);
    if (lease == NULL && (err->code == DS4_E_NOMEM || must_start_over(s, hit))) {
        *hit = ds4_prefix_find(&s->prefix, req->prompt, 0, req->salt);
        lease = get_lease(s, req, hit, err);
    }
    return lease;
}

bool ds4_engine_admit(struct ds4_sched *s, int64_t now_ns)
{
    struct ds4_request *req = ds4_engine_next(s, now_ns);
    enum ds4_reason reason = DS4_REASON_INTERNAL;
    const struct ds4_kv_lease *lease;
    struct ds4_restore *restore;
    struct ds4_prefix_hit hit;
    struct ds4_err err = {0};
    struct ds4_seq *seq;

    if (req == NULL)
        return false;
    if (ds4_engine_fit(s, req, &reason, &err) != 0) {
        ds4_engine_unlink(s, req);
        ds4_engine_finish(s, req, DS4_END_ERROR, reason, -1, now_ns, &err);
        return true;
    }
    lease = find_place(s, req, &hit, &restore, now_ns, &err);
    if (lease == NULL) {
        if (err.code ==
            DS4_OK) /* a better place is about to be there; who follows lets others by */
            return req->follow_seq != 0;
        s->short_of = req;
        s->shortage = err;
        return false;
    }
    ds4_engine_take(s, req, tokens_of(req).n - hit.run);
    if (req->history.len == 0)
        req->timing.admitted_ns = now_ns;
    seq = make_seq(s, req, lease, &hit, restore, &err);
    if (seq == NULL) {
        ds4_restore_cancel(s, restore, true);
        ds4_engine_finish(s, req, DS4_END_ERROR, DS4_REASON_INTERNAL, -1, now_ns, &err);
        return true;
    }
    if (restore == NULL)
        ds4_engine_admitted(s, req, &hit, now_ns);
    else if (!ds4_restore_begin(s, restore, seq)) {
        ds4_restore_cancel(s, restore, true);
        ds4_fail(&err, DS4_E_NOMEM, "no memory to read from disk");
        ds4_engine_end(s, seq, DS4_END_ERROR, DS4_REASON_INTERNAL, -1, now_ns, &err);
    }
    return true;
}

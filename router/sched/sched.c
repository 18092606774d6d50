/* The engine's life: generations, the queue, ends, one turn of the loop (step 4).
 *
 * A request is in the queue, or behind a running sequence, or over; its sequence may outlive it until
 * the posted steps are acknowledged, and its prefix longer than that.
 * Invariant: a lease is held by exactly one of a sequence, an idle prefix, the probe. */
#include "router/sched/sched.h"

#include "common/clock.h"
#include "common/log.h"
#include "proto/point.h"
#include "router/sched/engine.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define DS4_RETRY_MIN_MS 1000
#define DS4_RETRY_MAX_MS 120000
#define DS4_SAVE_IDLE_NS (20 * DS4_NS_PER_MS) /* idle so long: save what is to be saved */
#define DS4_PROBE_TOK    1                    /* positions a probe writes */
#define DS4_CANARY_TOK   128                  /* at most so many of a canary; within one block */

static int32_t or_default(int32_t value, int32_t fallback)
{
    return value > 0 ? value : fallback;
}

struct ds4_sched *ds4_sched_new(const struct ds4_sched_config *config,
                                const struct ds4_sched_port *port, struct ds4_err *err)
{
    struct ds4_sched *s;
    struct ds4_sched_config *c;

    if (config->vocab < 1) {
        ds4_fail(err, DS4_E_INVALID, "a vocabulary of %d ids", config->vocab);
        return NULL;
    }
    s = calloc(1, sizeof(*s));
    if (s == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for the scheduler");
        return NULL;
    }
    s->config = *config;
    c = &s->config;
    c->max_seqs = or_default(c->max_seqs, 8);
    c->default_max_new = or_default(c->default_max_new, 16384);
    c->queue_max = or_default(c->queue_max, 64);
    c->queue_ms = or_default(c->queue_ms, 120000);
    c->chunk_tok = or_default(c->chunk_tok, 512);
    c->hot_window_tok = or_default(c->hot_window_tok, 120);
    c->step_ms = or_default(c->step_ms, 30000);
    c->prefill_ms = or_default(c->prefill_ms, 120000);
    c->probe_ms = or_default(c->probe_ms, 10000);
    c->disk_ms = or_default(c->disk_ms, 30000);
    s->port = *port;
    s->next_seq = 1;
    if (ds4_tier_init(s, err) != 0) {
        free(s);
        return NULL;
    }
    return s;
}

void ds4_sched_set_limits(struct ds4_sched *s, int32_t default_max_new, int32_t queue_max,
                          int32_t queue_ms)
{
    s->config.default_max_new = default_max_new;
    s->config.queue_max = queue_max;
    s->config.queue_ms = queue_ms;
}

void ds4_sched_shape(const struct ds4_sched *s, struct ds4_form *form)
{
    int32_t rows = s->config.chunk_tok, decodes;

    form->max_seqs =
        s->config.max_seqs < DS4_MAX_STEP_ENTRIES ? s->config.max_seqs : DS4_MAX_STEP_ENTRIES;
    if (form->max_draft > s->config.max_draft)
        form->max_draft = s->config.max_draft;
    decodes = ds4_head_rows(form->max_seqs, form->max_draft);
    if (rows > DS4_MAX_STEP_TOK - decodes)
        rows = DS4_MAX_STEP_TOK - decodes;
    form->max_step_tok = rows + decodes;
}

/* ---- one generation ------------------------------------------------------------------------------ */

static void drop_generation(struct ds4_sched *s)
{
    for (size_t i = 0; i < s->seqs.len; i++)
        ds4_seq_free(s->seqs.ptr[i]);
    DS4_VEC_DEINIT(&s->seqs);
    if (s->budget != NULL)
        ds4_prefix_deinit(&s->prefix);
    ds4_points_deinit(&s->points);
    ds4_batch_deinit(&s->batch);
    ds4_budget_free(s->budget);
    s->budget = NULL;
    s->probe = NULL;
    s->probe_lease = NULL;
    s->canary_due = false;
    free(s->slot_open);
    s->slot_open = NULL;
    free(s->of_slot);
    s->of_slot = NULL;
    DS4_VEC_DEINIT(&s->close_slot);
    DS4_VEC_DEINIT(&s->park);
    for (int32_t i = 0; i < DS4_MAX_INFLIGHT; i++)
        free(s->posted[i].entry);
    memset(s->posted, 0, sizeof(s->posted));
    free(s->pick);
    free(s->entry);
    free(s->open);
    free(s->token);
    free(s->op);
    free(s->shared);
    s->op = NULL;
    s->shared = NULL;
    s->pick = NULL;
    s->entry = NULL;
    s->open = NULL;
    s->token = NULL;
    s->n_posted = 0;
    s->first_posted = 0;
    s->work_began_ns = 0; /* what was under way never came back */
    s->n_running = 0;
    s->started = false;
    s->failed = false;
}

static int alloc_step(struct ds4_sched *s)
{
    size_t n = (size_t)s->form.max_seqs;

    s->pick = calloc(n, sizeof(*s->pick));
    s->entry = calloc(n, sizeof(*s->entry));
    s->open = calloc(n, sizeof(*s->open));
    s->token = calloc((size_t)s->form.max_step_tok, sizeof(*s->token));
    s->op = calloc(DS4_MAX_STEP_OPS, sizeof(*s->op));
    s->shared = calloc((size_t)ds4_budget_blocks(s->form.context_tok), sizeof(*s->shared));
    s->slot_open = calloc((size_t)s->form.n_slots, sizeof(*s->slot_open));
    s->of_slot = calloc((size_t)s->form.n_slots, sizeof(struct ds4_seq *));
    if (s->op == NULL || s->shared == NULL || s->pick == NULL || s->entry == NULL ||
        s->open == NULL || s->token == NULL || s->slot_open == NULL || s->of_slot == NULL ||
        DS4_VEC_RESERVE(&s->close_slot, (size_t)s->form.n_slots) != 0 ||
        DS4_VEC_RESERVE(&s->park, DS4_MAX_PARKS) != 0)
        return -1;
    for (int32_t i = 0; i < s->max_inflight; i++) {
        s->posted[i].entry = calloc(n, sizeof(*s->posted[i].entry));
        if (s->posted[i].entry == NULL)
            return -1;
    }
    return 0;
}

int ds4_sched_start(struct ds4_sched *s, const struct ds4_form *form,
                    const struct ds4_kv_host *host, int64_t now_ns, struct ds4_err *err)
{
    const struct ds4_kv_ask probe = {
        .cap_tok = form->context_tok < DS4_CANARY_TOK ? form->context_tok : DS4_CANARY_TOK};
    /* One step runs while the next waits at stage 0, so a single stage needs two. */
    int32_t inflight = or_default(s->config.inflight, form->n_stage > 2 ? form->n_stage : 2);
    int32_t decodes = ds4_head_rows(form->max_seqs, form->max_draft), first, n;

    if (s->started)
        return ds4_fail(err, DS4_E_BUG, "generation %u is still running", s->form.generation);
    if (form->n_slots < 2 || form->max_seqs < 1 || form->max_seqs > DS4_MAX_STEP_ENTRIES ||
        form->max_step_tok <= decodes || form->context_tok < 2)
        return ds4_fail(
            err, DS4_E_INVALID,
            "%d slots, %d sequences and %d rows per step, %d context tokens cannot work",
            form->n_slots, form->max_seqs, form->max_step_tok, form->context_tok);
    s->form = *form;
    s->max_inner = ds4_point_inner_max(form->max_step_tok);
    s->max_inflight = inflight < DS4_MAX_INFLIGHT ? inflight : DS4_MAX_INFLIGHT;
    s->budget = ds4_budget_new(form->n_blocks, form->n_slots, form->context_tok, err);
    if (s->budget == NULL)
        return -1;
    ds4_budget_overcommit(s->budget,
                          (int32_t)((int64_t)form->n_blocks * s->config.overcommit / 100));
    if (host != NULL && host->hot_tok > 0 && host->hot_tok < s->config.hot_window_tok)
        s->config.hot_window_tok = host->hot_tok;
    ds4_points_init(&s->points, host, s->config.metrics);
    if (ds4_prefix_init(&s->prefix, s->budget, &s->points, form->n_blocks, s->config.hot_window_tok,
                        err) != 0) {
        drop_generation(s);
        return -1;
    }
    s->prefix.replay_tok = host != NULL ? host->replay_tok : 0;
    ds4_batch_init(&s->batch, form->n_stage, form->max_seqs, form->max_step_tok,
                   form->max_step_tok - decodes < s->config.chunk_tok ? form->max_step_tok - decodes
                                                                      : s->config.chunk_tok);
    s->batch.max_draft = form->max_draft;
    if (alloc_step(s) != 0) {
        drop_generation(s);
        return ds4_fail(err, DS4_E_NOMEM, "no memory for generation %u", form->generation);
    }
    s->probe_lease = ds4_budget_reserve(s->budget, &probe, err);
    if (s->probe_lease == NULL ||
        ds4_budget_fill(s->budget, s->probe_lease, DS4_PROBE_TOK, &first, &n, err) != 0) {
        drop_generation(s);
        return -1;
    }
    ds4_agree_init(&s->agree, form->n_stage);
    s->head_waits = false;
    s->next_step = 0;
    s->last_ack_ns = now_ns;
    s->last_token_ns = 0;
    s->started = true;
    ds4_tier_start(s);
    return 0;
}

/* ---- ends ---------------------------------------------------------------------------------------- */

static void note_end(struct ds4_sched *s, int64_t now_ns)
{
    if (s->last_done_ns != 0) {
        int64_t gap = now_ns - s->last_done_ns;

        s->done_interval_ns = s->done_interval_ns == 0 ? gap : (3 * s->done_interval_ns + gap) / 4;
    }
    s->last_done_ns = now_ns;
}

void ds4_engine_finish(struct ds4_sched *s, struct ds4_request *req, enum ds4_end end,
                       enum ds4_reason reason, int32_t stop_id, int64_t now_ns,
                       const struct ds4_err *err)
{
    enum ds4_request_state phase = req->state;
    struct ds4_request_result result;

    ds4_request_finish(req, end, reason, stop_id, now_ns, err, &result);
    if (!req->internal) {
        ds4_engine_charge(s, req, result.usage.completion_tok);
        ds4_count_done(s->config.metrics, req, result.end, reason, phase);
        note_end(s, now_ns);
    }
    ds4_request_deliver(req, &result);
}

void ds4_engine_close_slot(struct ds4_sched *s, int32_t slot)
{
    ds4_points_forget_slot(&s->points, slot);
    ds4_engine_unpark(s, slot);
    if (!s->slot_open[slot])
        return;
    s->slot_open[slot] = false;
    assert(s->close_slot.len < s->close_slot.cap); /* reserved for every slot once */
    s->close_slot.ptr[s->close_slot.len++] = slot;
}

void ds4_engine_seat(struct ds4_sched *s, struct ds4_seq *seq, const struct ds4_kv_lease *lease)
{
    seq->lease = lease;
    seq->slot = lease->slot;
    s->of_slot[lease->slot] = seq;
}

void ds4_engine_forget_seq(struct ds4_sched *s, struct ds4_seq *seq)
{
    s->of_slot[seq->slot] = NULL;
    for (size_t i = 0; i < s->seqs.len; i++)
        if (s->seqs.ptr[i] == seq) {
            s->seqs.ptr[i] = s->seqs.ptr[--s->seqs.len];
            break;
        }
    ds4_restore_forget_seq(s, seq);
    ds4_seq_free(seq);
}

void ds4_engine_end(struct ds4_sched *s, struct ds4_seq *seq, enum ds4_end end,
                    enum ds4_reason reason, int32_t stop_id, int64_t now_ns,
                    const struct ds4_err *err)
{
    struct ds4_request *req = seq->req;

    ds4_batch_remove(&s->batch, seq);
    seq->state = DS4_SEQ_DRAINING;
    seq->req = NULL;
    s->n_running--;
    if (seq->n_flight == 0)
        ds4_engine_settle(s, seq, now_ns);
    ds4_engine_finish(s, req, end, reason, stop_id, now_ns, err);
}

void ds4_sched_stop(struct ds4_sched *s, enum ds4_reason reason, const struct ds4_err *why,
                    int64_t now_ns)
{
    struct ds4_seqs seqs = s->seqs;

    if (!s->started)
        return;
    ds4_tier_stop(s, reason == DS4_REASON_RESTARTED);
    /* The generation is gone before the first callback runs, so that nothing a callback does can
     * reach it. */
    s->seqs = (struct ds4_seqs){0};
    drop_generation(s);
    for (size_t i = 0; i < seqs.len; i++) {
        if (seqs.ptr[i]->req != NULL && !seqs.ptr[i]->req->internal)
            ds4_count_preempted(s->config.metrics, "restart");
        if (seqs.ptr[i]->req != NULL)
            ds4_engine_lose(s, seqs.ptr[i], reason, why, now_ns);
        ds4_seq_free(seqs.ptr[i]);
    }
    DS4_VEC_DEINIT(&seqs);
}

/* ---- taking requests --------------------------------------------------------------------------------- */

void ds4_sched_drain(struct ds4_sched *s, bool drained)
{
    s->drained = drained;
}

void ds4_sched_hold(struct ds4_sched *s, bool held)
{
    s->held = held;
}

int32_t ds4_sched_n_running(const struct ds4_sched *s)
{
    return s->n_running;
}

void ds4_sched_free(struct ds4_sched *s)
{
    struct ds4_err why = {.code = DS4_E_UNAVAILABLE, .msg = "the server is stopping"};

    if (s == NULL)
        return;
    ds4_sched_stop(s, DS4_REASON_DRAINING, &why, s->last_ack_ns);
    ds4_sched_fail_queue(s, DS4_REASON_DRAINING, &why, s->last_ack_ns);
    ds4_tier_deinit(s);
    free(s);
}

/* When a place in the queue will probably be free: what the last ends took, times those before. */
static int32_t retry_after_ms(const struct ds4_sched *s)
{
    int64_t ms = s->done_interval_ns / DS4_NS_PER_MS * (s->n_queued + 1);

    if (ms < DS4_RETRY_MIN_MS)
        return DS4_RETRY_MIN_MS;
    return ms > DS4_RETRY_MAX_MS ? DS4_RETRY_MAX_MS : (int32_t)ms;
}

int ds4_engine_fit(const struct ds4_sched *s, struct ds4_request *req, enum ds4_reason *reason,
                   struct ds4_err *err)
{
    int32_t context = s->form.context_tok, left;

    if (context == 0)
        return 0; /* no generation yet */
    *reason = DS4_REASON_CONTEXT;
    req->context_tok = context;
    if (req->history.len >= (size_t)context) {
        *reason = DS4_REASON_RESTARTED;
        return ds4_fail(err, DS4_E_UNAVAILABLE, "%zu tokens do not fit the new context of %d",
                        req->history.len, context);
    }
    if (req->n_prompt >= context)
        return ds4_fail(err, DS4_E_TOO_LONG, "prompt has %d tokens, context is %d tokens",
                        req->n_prompt, context);
    left = context - req->n_prompt;
    if (req->max_new > left) {
        req->max_new = left;
        req->max_new_reduced = true;
    }
    if (s->budget == NULL)
        return 0;
    *reason = DS4_REASON_KV_CAPACITY;
    if (ds4_budget_fits(s->budget, req->n_prompt + req->max_new, err) != 0)
        return -1;
    /* Splices had room in the generation before that this one does not have. */
    if (req->history.len >= (size_t)ds4_engine_cap(s, req)) {
        *reason = DS4_REASON_RESTARTED;
        return ds4_fail(err, DS4_E_UNAVAILABLE, "%zu tokens do not fit the new cache",
                        req->history.len);
    }
    *reason = DS4_REASON_NONE;
    return 0;
}

int32_t ds4_engine_cap(const struct ds4_sched *s, const struct ds4_request *req)
{
    int32_t cap = req->n_prompt + req->max_new, with = cap + ds4_request_splice_room(req);

    if (with > s->form.context_tok)
        with = s->form.context_tok;
    return with > cap && ds4_budget_fits(s->budget, with, NULL) == 0 ? with : cap;
}

static int check_request(struct ds4_sched *s, struct ds4_request *req, int64_t now_ns,
                         enum ds4_reason *reason, int32_t *wait_ms, struct ds4_err *err)
{
    if (s->drained) {
        *reason = DS4_REASON_DRAINING;
        *wait_ms = DS4_RETRY_MIN_MS;
        return ds4_fail(err, DS4_E_UNAVAILABLE, "the server is stopping");
    }
    *reason = DS4_REASON_INVALID;
    if (req->n_prompt < 1)
        return ds4_fail(err, DS4_E_INVALID, "the prompt is empty");
    for (int32_t t = 0; t < req->n_prompt; t++)
        if (req->prompt[t] < 0 || req->prompt[t] >= s->config.vocab)
            return ds4_fail(err, DS4_E_INVALID, "prompt token %d is %d, the vocabulary has %d", t,
                            req->prompt[t], s->config.vocab);
    if (req->max_new <= 0)
        req->max_new = s->config.default_max_new;
    if (req->max_new > INT32_MAX / 2 - req->n_prompt)
        req->max_new = INT32_MAX / 2 - req->n_prompt;
    if (ds4_engine_fit(s, req, reason, err) != 0)
        return -1;
    *reason = DS4_REASON_POISONED;
    if (ds4_engine_check_poison(s, req, now_ns, wait_ms, err) != 0)
        return -1;
    if (ds4_engine_n_waiting(s, now_ns) >= s->config.queue_max) {
        *reason = DS4_REASON_QUEUE_FULL;
        *wait_ms = retry_after_ms(s);
        return ds4_fail(err, DS4_E_BUSY, "%d requests are waiting already", s->n_queued);
    }
    *reason = DS4_REASON_NONE;
    return 0;
}

int ds4_sched_submit(struct ds4_sched *s, struct ds4_request *req, int64_t now_ns,
                     enum ds4_reason *reason, int32_t *wait_ms, struct ds4_err *err)
{
    enum ds4_reason why = DS4_REASON_NONE;
    int32_t wait = 0;
    int rc = check_request(s, req, now_ns, &why, &wait, err);

    if (rc == 0 && req->state == DS4_REQUEST_RECEIVED)
        rc = ds4_request_move(req, DS4_REQUEST_CHECKED, err);
    if (rc == 0)
        rc = ds4_request_move(req, DS4_REQUEST_QUEUED, err);
    if (reason != NULL)
        *reason = why;
    if (wait_ms != NULL)
        *wait_ms = wait;
    if (rc != 0) {
        ds4_count_refused(s->config.metrics, req->api, why);
        return -1;
    }
    ds4_engine_queue(s, req, now_ns);
    ds4_restore_want(s, req, now_ns);
    ds4_count_started(s->config.metrics, req);
    return 0;
}

static struct ds4_seq *seq_of(const struct ds4_sched *s, const struct ds4_request *req)
{
    for (size_t i = 0; i < s->seqs.len; i++)
        if (s->seqs.ptr[i]->req == req)
            return s->seqs.ptr[i];
    return NULL;
}

void ds4_sched_cancel(struct ds4_sched *s, struct ds4_request *req, enum ds4_cancel why,
                      int64_t now_ns)
{
    struct ds4_err err = {.code = DS4_E_CANCELLED};
    struct ds4_seq *seq;

    if (req->state == DS4_REQUEST_DRAINING || req->state == DS4_REQUEST_DONE)
        return;
    req->cancel = why;
    req->cancel_asked = true;
    if (req->delivering)
        return; /* whoever called the sink looks at cancel_asked next */
    snprintf(err.msg, sizeof(err.msg), "cancelled: %s", ds4_cancel_text(why));
    seq = seq_of(s, req);
    if (seq != NULL) {
        ds4_engine_end(s, seq, DS4_END_CANCELLED, DS4_REASON_NONE, -1, now_ns, &err);
    } else if (req->state == DS4_REQUEST_QUEUED) {
        ds4_engine_unlink(s, req);
        ds4_engine_finish(s, req, DS4_END_CANCELLED, DS4_REASON_NONE, -1, now_ns, &err);
    }
}

void ds4_sched_pause(struct ds4_sched *s, struct ds4_request *req, bool paused)
{
    struct ds4_seq *seq = seq_of(s, req);

    req->paused = paused;
    if (seq == NULL || seq->paused == paused)
        return;
    seq->paused = paused;
    if (paused)
        ds4_count_parked(s->config.metrics, "slow_client");
}

/* ---- one turn of the loop ------------------------------------------------------------------------- */

/* A sequence in the probe's place; it belongs to the engine afterwards. */
static struct ds4_seq *start_in_probe_place(struct ds4_sched *s, const int32_t *token, int32_t n,
                                            int32_t max_pos, struct ds4_err *err)
{
    struct ds4_seq *seq = ds4_seq_new(s->next_seq, token, n, max_pos, 0, err);

    if (seq == NULL)
        return NULL;
    if (DS4_VEC_PUSH(&s->seqs, seq) != 0) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for a sequence");
        ds4_seq_free(seq);
        return NULL;
    }
    if (ds4_batch_add_prefill(&s->batch, seq, err) != 0) {
        s->seqs.len--;
        ds4_seq_free(seq);
        return NULL;
    }
    s->next_seq++;
    ds4_budget_renew(s->budget, s->probe_lease);
    ds4_engine_seat(s, seq, s->probe_lease);
    s->probe = seq;
    return seq;
}

/* A step of one token through all stages when nothing else shows that they live, or when states are to be
 * saved, which only a step can do: at once if the next of the queue waits for such a slot, and soon if nobody
 * does, because a slot that is not saved cannot be given up and somebody else's would be instead. */
static void probe(struct ds4_sched *s, int64_t now_ns)
{
    bool at_once = (s->head_waits && s->head != NULL) || s->tier.flush ||
                   now_ns - s->last_ack_ns >= DS4_SAVE_IDLE_NS;
    bool wanted = at_once && s->points.wanted.len > 0;
    int32_t id = 0;

    if (s->n_posted > 0 || s->probe != NULL ||
        (s->last_token_ns != 0 && !wanted &&
         now_ns - s->last_ack_ns < s->config.probe_ms * DS4_NS_PER_MS))
        return;
    (void)start_in_probe_place(s, &id, DS4_PROBE_TOK, DS4_PROBE_TOK + 1, NULL);
}

int ds4_sched_run_canary(struct ds4_sched *s, struct ds4_request *req, int64_t now_ns,
                         struct ds4_err *err)
{
    struct ds4_seq *seq;
    int32_t end = req->n_prompt + req->max_new;

    if (!s->started || s->failed || s->held)
        return ds4_fail(err, DS4_E_UNAVAILABLE, "no generation runs");
    if (end > s->probe_lease->cap_tok)
        return ds4_fail(err, DS4_E_INVALID, "a canary of %d positions, the probe's slot holds %d",
                        end, s->probe_lease->cap_tok);
    s->canary_due = s->probe != NULL || s->n_running >= s->config.max_seqs;
    if (s->canary_due)
        return ds4_fail(err, DS4_E_BUSY, "no place is free");
    if (ds4_request_move(req, DS4_REQUEST_CHECKED, err) != 0 ||
        ds4_request_move(req, DS4_REQUEST_QUEUED, err) != 0 ||
        ds4_request_move(req, DS4_REQUEST_PREFILL, err) != 0)
        return -1;
    seq = start_in_probe_place(s, req->prompt, req->n_prompt, end, err);
    if (seq == NULL)
        return -1;
    req->timing.queued_ns = now_ns;
    req->timing.admitted_ns = now_ns;
    req->seq = seq->id;
    seq->req = req;
    s->n_running++;
    return 0;
}

void ds4_sched_pump(struct ds4_sched *s, int64_t now_ns)
{
    int32_t places = s->config.max_seqs - (s->canary_due ? 1 : 0);

    ds4_engine_expire(s, now_ns);
    ds4_tier_tick(s, now_ns);
    if (!s->started || s->failed)
        return;
    /* A look costs a comparison with every kept prefix: not in every turn of a busy loop. */
    while (!s->held && !s->head_waits && s->head != NULL && s->n_running < places)
        s->head_waits = !ds4_engine_admit(s, now_ns);
    while (ds4_engine_post(s, now_ns)) {
    }
    probe(s, now_ns);
    if (s->probe != NULL)
        ds4_engine_post(s, now_ns);
}

void ds4_sched_stats(const struct ds4_sched *s, struct ds4_sched_stats *stats)
{
    struct ds4_budget_sums sums = {0};

    if (s->budget != NULL)
        ds4_budget_sums(s->budget, &sums);
    *stats = (struct ds4_sched_stats){
        .queued = s->n_queued,
        .idle = (int32_t)s->prefix.hot.len,
        .points = s->points.n_point,
        .point_bytes = ds4_points_used_bytes(&s->points),
        .hbm_bytes = (sums.live + sums.cached + sums.io) * ds4_points_block_bytes(&s->points),
        .host_bytes = ds4_points_all_bytes(&s->points),
        .index_tok = s->prefix.n_tok,
        .commits = s->tier.catalog == NULL ? 0 : ds4_catalog_n(s->tier.catalog),
        .disk_bytes = s->tier.catalog == NULL ? 0 : ds4_catalog_bytes(s->tier.catalog),
        .restoring = (int32_t)s->tier.restore.len,
        .inflight = s->n_posted,
        .steps_posted = s->next_step,
        .steps_done = s->next_step - s->n_posted,
        .last_token_ns = s->last_token_ns,
        .oldest_queued_ns = s->head == NULL ? 0 : s->head->timing.queued_ns,
        .at_work_ns = s->at_work_ns,
        .work_began_ns = s->work_began_ns,
        .max_seqs = s->config.max_seqs,
        .blocks_free = sums.free,
        .blocks_promised = sums.promised,
        .blocks_live = sums.live,
        .blocks_cached = sums.cached,
        .blocks_io = sums.io,
        .blocks_total = sums.total,
        .slots_free = sums.slots_free,
        .slots_used = sums.slots_live + sums.slots_hot,
        .generated_tok = s->generated_tok,
        .prompt_tok = s->prompt_tok,
        .cached_tok = s->cached_tok,
        .prefilled_tok = s->prefilled_tok,
    };
    for (size_t i = 0; i < s->seqs.len; i++) {
        const struct ds4_seq *seq = s->seqs.ptr[i];

        if (seq == s->probe)
            continue;
        stats->prefilling += seq->state == DS4_SEQ_PREFILL;
        stats->decoding += seq->state == DS4_SEQ_DECODE && !seq->paused;
        stats->parked += seq->state == DS4_SEQ_DECODE && seq->paused;
        stats->draining += seq->state == DS4_SEQ_DRAINING;
    }
}

/* The engine's heartbeat: building and posting steps, and booking what comes back (steps 5, 6, 12).
 *
 * Posting: batch.c says who; here the picks become wire entries: the lease's new blocks, an open for
 * a sequence the stages do not know yet, the closes that have piled up.  Closes come first in a step, so
 * a slot can change hands within it.
 * Acknowledging: steps come back in order, entry by entry as posted.  A record that contradicts what was
 * posted means that router and stages disagree about the caches; nothing but a new generation helps.
 * Invariant: a sequence is freed only when no posted entry refers to it (n_flight == 0). */
#include "common/clock.h"
#include "common/log.h"
#include "common/metrics.h"
#include "proto/point.h"
#include "router/sched/engine.h"

#include <assert.h>
#include <inttypes.h>

#define DS4_MIN_MIXED_TOK 128 /* prompts beside decodes advance by at least so much, */
#define DS4_SPREAD_STEPS  8   /* and by this part of what waits */
#define DS4_MAX_DROPS     (DS4_MAX_STEP_OPS / 8) /* of a step: parks, installs, copies need room too */
#define DS4_MAX_BEGIN_OPS                                                                          \
    3 /* of a sequence that begins: rings, a replay, a copy; rows from disk apart */

_Static_assert(DS4_MAX_DROPS + DS4_MAX_STAGED_DROP + DS4_MAX_PARKS + DS4_MAX_BEGIN_OPS +
                       DS4_RESTORE_MAX_PARTS + 1 <=
                   DS4_MAX_STEP_OPS,
               "the largest restore fits into a step of its own");

/* ---- posting ------------------------------------------------------------------------------------- */

static void fill_open(const struct ds4_seq *seq, struct ds4_seq_open *open)
{
    const struct ds4_request *req = seq->req;

    *open = (struct ds4_seq_open){
        .seq = seq->id,
        .slot = seq->lease->slot,
        .epoch = seq->lease->epoch,
        .n_prompt = seq->n_prompt,
        .max_pos = seq->max_pos,
        .max_draft = seq->max_draft,
        .sampling = {.top_p = 1,
                     .repetition_penalty = 1,
                     .n_logprobs = -1,
                     .think_close_id = -1,
                     .force_close_at = -1,
                     .forced_after_id = -1},
    };
    if (req == NULL)
        return; /* a probe: greedy, no stop ids */
    open->sampling = req->sampling;
    /* ignore_stop is about the model's own ids; those of the client still count. */
    for (int32_t i = req->ignore_stop ? req->n_model_stop_id : 0; i < req->n_stop_id; i++)
        open->stop_id[open->n_stop++] = req->stop_id[i];
}

struct ds4_kv_op *ds4_engine_add_op(struct ds4_sched *s, struct ds4_step *step,
                                    enum ds4_kv_op_kind kind)
{
    struct ds4_kv_op *op = &s->op[step->n_op++];

    assert(step->n_op <= DS4_MAX_STEP_OPS);
    *op = (struct ds4_kv_op){.kind = kind};
    return op;
}

/* What the stages must do before a new sequence's first rows: rings from a point, and a copy of the block
 * that the sequence begins in the middle of. */
static int begin_seq(struct ds4_sched *s, struct ds4_seq *seq, struct ds4_step *step,
                     struct ds4_err *err)
{
    const struct ds4_kv_lease *lease = seq->lease;
    struct ds4_kv_op *op;

    if (seq->install != NULL) {
        op = ds4_engine_add_op(s, step, DS4_KV_INSTALL);
        op->seq = seq->id;
        op->slot = lease->slot;
        op->epoch = lease->epoch;
        op->pos = seq->install->pos;
        op->point = seq->install->id;
        ds4_metric_add(s->config.metrics, DS4_M_KV_RESTORES, 1, "host", "ok");
        ds4_metric_add(s->config.metrics, DS4_M_KV_IO_BYTES,
                       (double)ds4_points_bytes_at(&s->points, seq->install->pos), "host", "read");
        ds4_points_unpin(&s->points, seq->install);
        seq->install = NULL;
    }
    if (seq->replay_from > 0) {
        op = ds4_engine_add_op(s, step, DS4_KV_REPLAY);
        op->seq = seq->id;
        op->slot = lease->slot;
        op->epoch = lease->epoch;
        op->pos = seq->install_pos;
        op->from_pos = seq->replay_from;
    }
    if (lease->copy_from >= 0) {
        op = ds4_engine_add_op(s, step, DS4_KV_BLOCK_COPY);
        op->block_src = lease->copy_from;
        op->block_dst = lease->block[lease->start_tok / DS4_BLOCK_TOK];
        ds4_budget_copied(s->budget, lease);
    }
    return ds4_restore_add_ops(s, seq, step, err);
}

/* Points that are to be forgotten; their memory is needed by what is saved in this step. */
static void add_drops(struct ds4_sched *s, struct ds4_step *step)
{
    size_t n = s->points.dropped.len < DS4_MAX_DROPS ? s->points.dropped.len : DS4_MAX_DROPS;

    if (n == 0)
        return;
    for (size_t i = 0; i < n; i++)
        ds4_engine_add_op(s, step, DS4_KV_POINT_DROP)->point = s->points.dropped.ptr[i];
    s->points.dropped.len -= n;
    memmove(s->points.dropped.ptr, s->points.dropped.ptr + n,
            s->points.dropped.len * sizeof(*s->points.dropped.ptr));
}

/* Their blocks are the index's by now, and may go to an entry of this very step. */
static void add_parks(struct ds4_sched *s, struct ds4_step *step)
{
    for (size_t i = 0; i < s->park.len; i++) {
        struct ds4_kv_op *op = ds4_engine_add_op(s, step, DS4_KV_PARK);

        op->seq = s->park.ptr[i].seq;
        op->slot = s->park.ptr[i].slot;
        op->epoch = s->park.ptr[i].epoch;
    }
    s->park.len = 0;
}

static void add_saves(struct ds4_sched *s, struct ds4_step *step)
{
    int32_t n = 0;

    for (; s->points.dropped.len == 0 && n < (int32_t)s->points.wanted.len &&
           step->n_op < DS4_MAX_STEP_OPS;
         n++) {
        const struct ds4_save *save = &s->points.wanted.ptr[n];
        struct ds4_kv_op *op = ds4_engine_add_op(s, step, DS4_KV_POINT_SAVE);

        op->seq = save->seq;
        op->slot = save->slot;
        op->epoch = save->epoch;
        op->pos = save->point->pos;
        op->point = save->point->id;
    }
    ds4_points_posted(&s->points, n, step->step_no);
    if (n > 0)
        s->head_waits = false; /* their slots may be given away now */
}

/* What must hold of every entry before it is posted, by the numbers of kv-cache.md 2.5; NULL: it does.  O(1). */
static const char *broken_invariant(const struct ds4_sched *s, const struct ds4_pick *pick)
{
    const struct ds4_seq *seq = pick->seq;
    int32_t base = pick->base_pos, end = pick->reach;

    if (!ds4_budget_holds(s->budget, seq->lease->slot, seq->lease->epoch))
        return "I2";
    if (seq->req == NULL && seq != s->probe)
        return "I3"; /* nobody is running */
    if (end > s->form.context_tok || end > seq->lease->cap_tok)
        return "I7";
    /* What lies above was written before: this entry cuts back. */
    if (base > 0 && seq->hi > base &&
        (base < seq->install_pos || seq->hi - base > s->config.hot_window_tok))
        return "I8";
    return pick->from_step < 0 && (size_t)base + (size_t)pick->n_tok > seq->token.len ? "I13"
                                                                                      : NULL;
}

static int fill_entry(struct ds4_sched *s, const struct ds4_pick *pick, struct ds4_step *step,
                      struct ds4_step_entry *entry, struct ds4_err *err)
{
    struct ds4_seq *seq = pick->seq;
    int32_t end = pick->reach;
    const char *broken = broken_invariant(s, pick);
    int32_t first, n;

    if (broken != NULL) {
        ds4_count_broken(s->config.metrics, broken);
        return ds4_fail(err, DS4_E_BUG, "invariant %s: sequence %" PRIu64 " rows %d to %d", broken,
                        seq->id, pick->base_pos, end);
    }
    if (ds4_budget_fill(s->budget, seq->lease, end, &first, &n, err) != 0) {
        ds4_count_broken(s->config.metrics, "I1");
        return -1;
    }
    /* Of a replay, the tokens below the install position write no rows. */
    if (end > seq->install_pos &&
        ds4_budget_may_write(s->budget, seq->lease,
                             pick->base_pos > seq->install_pos ? pick->base_pos : seq->install_pos,
                             end, err) != 0) {
        ds4_count_broken(s->config.metrics, "I5");
        return -1;
    }
    if (!seq->opened) {
        fill_open(seq, &s->open[step->n_open++]);
        if (begin_seq(s, seq, step, err) != 0)
            return -1;
        seq->opened = true;
        s->slot_open[seq->lease->slot] = true;
    }
    *entry = (struct ds4_step_entry){
        .seq = seq->id,
        .slot = seq->lease->slot,
        .epoch = seq->lease->epoch,
        .kind = pick->kind,
        .base_pos = pick->base_pos,
        .n_tok = pick->n_tok,
        .sample = pick->sample,
        .from_step = pick->from_step,
        .first_tok = step->n_tok,
        .cap_tok = seq->lease->cap_tok < seq->lease->n_block * DS4_BLOCK_TOK
                       ? seq->lease->cap_tok
                       : seq->lease->n_block * DS4_BLOCK_TOK,
        .first_block = seq->n_block_sent,
        .n_block = seq->lease->n_block - seq->n_block_sent,
        .block = seq->lease->block + seq->n_block_sent,
    };
    seq->n_block_sent = seq->lease->n_block;
    for (int32_t t = 0; t < pick->n_tok; t++)
        s->token[step->n_tok++] =
            pick->from_step >= 0 ? 0 : seq->token.ptr[(size_t)(pick->base_pos + t)];
    return 0;
}

/* After its last prompt row (or the last of a splice) is posted a sequence decodes. */
static int advance(struct ds4_sched *s, struct ds4_seq *seq, struct ds4_err *err)
{
    if (seq->state != DS4_SEQ_PREFILL || seq->n_posted < seq->fill_end)
        return 0;
    if (seq == s->probe && seq->req == NULL) {
        ds4_batch_remove(&s->batch, seq);
        seq->state = DS4_SEQ_DRAINING;
        return 0;
    }
    if (ds4_batch_start_decode(&s->batch, seq, err) != 0)
        return -1;
    seq->state = DS4_SEQ_DECODE;
    return 0;
}

static int build_and_send(struct ds4_sched *s, int32_t n_pick, struct ds4_posted_step *posted,
                          struct ds4_err *err)
{
    struct ds4_step step = {
        .generation = s->form.generation,
        .step_no = s->next_step,
        .n_close = (int32_t)s->close_slot.len,
        .close_slot = s->close_slot.ptr,
        .open = s->open,
        .op = s->op,
        .entry = s->entry,
        .token = s->token,
    };

    s->n_inner = 0;
    for (int32_t i = 0; i < n_pick; i++) {
        ds4_engine_mark_points(s, s->pick[i].seq, &s->pick[i]);
        if (!s->pick[i].seq->opened)
            ds4_engine_unpark(s, s->pick[i].seq->lease->slot);
    }
    if (ds4_budget_is_broken(s->budget)) {
        ds4_count_broken(s->config.metrics, "I9");
        return ds4_fail(err, DS4_E_BUG, "the ledger of cache blocks is out of balance");
    }
    add_drops(s, &step);
    ds4_restore_add_drops(s, &step);
    add_parks(s, &step);
    posted->n_decode = 0;
    posted->n_prompt_row = 0;
    for (int32_t i = 0; i < n_pick; i++) {
        const struct ds4_pick *pick = &s->pick[i];

        if (fill_entry(s, pick, &step, &s->entry[i], err) != 0)
            return -1;
        step.n_entry++;
        posted->entry[i] = (struct ds4_posted_entry){.pick = *pick};
        posted->n_decode += pick->kind != DS4_ENTRY_PREFILL;
        posted->n_prompt_row += pick->kind == DS4_ENTRY_PREFILL ? pick->n_tok : 0;
        if (pick->kind == DS4_ENTRY_DECODE && pick->seq->max_draft > 0 &&
            pick->base_pos + 2 >= pick->seq->max_pos)
            ds4_count_no_room(s->config.metrics);
    }
    posted->n_entry = step.n_entry;
    posted->n_row = step.n_tok;
    ds4_engine_drop_overtaken(s, n_pick);
    add_saves(s, &step);
    if (s->port.send_step(s->port.owner, &step, err) != 0)
        return -1;
    return 0;
}

/* Prompt rows beside decodes (kv-cache.md 4.4): the waiting ones spread over some steps, fewer when the
 * cache is nearly full, so that prompts do not pile up in front of answers that need the room, and no more
 * than the aim for the time between two tokens allows. */
static int32_t mixed_rows(const struct ds4_sched *s)
{
    struct ds4_budget_sums sums;
    int64_t rows, most = s->batch.chunk_tok, aim;

    ds4_budget_sums(s->budget, &sums);
    most = most * (sums.free + sums.cached) / sums.total;
    rows = ds4_batch_waiting_tok(&s->batch) / DS4_SPREAD_STEPS;
    rows = rows < most ? rows : most;
    rows = rows > DS4_MIN_MIXED_TOK ? rows : DS4_MIN_MIXED_TOK;
    if (s->config.itl_ms > 0 && s->row_ns > 0) {
        aim = (int64_t)(((double)s->config.itl_ms * (double)DS4_NS_PER_MS - s->decode_ns) /
                        s->row_ns);
        rows = rows < aim ? rows : aim;
        rows = rows > DS4_CHUNK_ALIGN_TOK ? rows : DS4_CHUNK_ALIGN_TOK;
    }
    return rows < s->batch.chunk_tok ? (int32_t)rows : s->batch.chunk_tok;
}

/* What steps cost: the time since the answer before, or since it was posted. */
static void learn_cost(struct ds4_sched *s, const struct ds4_posted_step *step, int64_t now_ns)
{
    int64_t since = step->posted_ns > s->last_ack_ns ? step->posted_ns : s->last_ack_ns;
    double took = (double)(now_ns - since);
    int32_t prompt_rows = step->n_prompt_row;

    if (prompt_rows == 0)
        s->decode_ns = s->decode_ns == 0 ? took : 0.9 * s->decode_ns + 0.1 * took;
    else if (step->n_decode > 0 && prompt_rows >= DS4_CHUNK_ALIGN_TOK && took > s->decode_ns) {
        double each = (took - s->decode_ns) / prompt_rows;

        s->row_ns = s->row_ns == 0 ? each : 0.9 * s->row_ns + 0.1 * each;
    }
}

/* A step has so many operations and no more: who begins and does not fit in beside rows from the disk begins
 * in a later one.  Alone, everybody fits. */
static int32_t fit_ops(struct ds4_sched *s, int32_t n)
{
    int32_t n_op = DS4_MAX_DROPS + DS4_MAX_STAGED_DROP + (int32_t)s->park.len, kept = 0;

    for (int32_t i = 0; i < n; i++) {
        const struct ds4_seq *seq = s->pick[i].seq;
        int32_t more = seq->opened ? 0 : DS4_MAX_BEGIN_OPS + ds4_restore_n_ops(s, seq);

        if (more > 0 && n_op + more > DS4_MAX_STEP_OPS)
            continue;
        n_op += more;
        s->pick[kept++] = s->pick[i];
    }
    return kept;
}

bool ds4_engine_post(struct ds4_sched *s, int64_t now_ns)
{
    struct ds4_posted_step *posted;
    struct ds4_err err = {0};
    int32_t n;

    if (s->failed || s->n_posted >= s->max_inflight)
        return false;
    s->batch.mixed_tok = mixed_rows(s);
    n = ds4_batch_next(&s->batch, s->next_step, s->pick);
    n = fit_ops(s, ds4_engine_grow(s, n, now_ns));
    if (n == 0)
        return false;
    posted = &s->posted[(s->first_posted + s->n_posted) % s->max_inflight];
    posted->step_no = s->next_step;
    posted->posted_ns = now_ns;
    if (build_and_send(s, n, posted, &err) != 0)
        goto fail;
    s->close_slot.len = 0;
    if (s->n_posted++ == 0)
        s->work_began_ns = now_ns;
    s->next_step++;
    for (int32_t i = 0; i < n; i++)
        ds4_seq_posted(s->pick[i].seq, &s->pick[i], posted->step_no);
    for (int32_t i = 0; i < n; i++)
        if (advance(s, s->pick[i].seq, &err) != 0)
            goto fail;
    return true;

fail:
    /* Half of the stages may have the step: this generation is over, ds4_sched_check_step says so. */
    s->failed = true;
    s->failure = err;
    ds4_log(DS4_LOG_ERROR, "sched.post", "step=%" PRId64 " error=\"%s\"", s->next_step, err.msg);
    return false;
}

int ds4_sched_check_step(const struct ds4_sched *s, int64_t now_ns, struct ds4_err *err)
{
    const struct ds4_posted_step *oldest = &s->posted[s->first_posted];
    int64_t since, limit_ms = s->config.step_ms;

    if (!s->started)
        return 0;
    if (s->failed)
        return ds4_fail(err, s->failure.code, "%s", s->failure.msg);
    if (s->n_posted == 0)
        return 0;
    /* The stages turn to a step when the one before is done. */
    since = oldest->posted_ns > s->last_ack_ns ? oldest->posted_ns : s->last_ack_ns;
    for (int32_t i = 0; i < s->n_posted; i++)
        if (s->posted[(s->first_posted + i) % s->max_inflight].n_prompt_row > 0)
            limit_ms = s->config.prefill_ms;
    if (now_ns - since < limit_ms * DS4_NS_PER_MS)
        return 0;
    return ds4_fail(err, DS4_E_TIMEOUT, "step %" PRId64 " is without answer for %" PRId64 " ms",
                    oldest->step_no, (now_ns - since) / DS4_NS_PER_MS);
}

/* ---- acknowledging ------------------------------------------------------------------------------- */

static void report_progress(struct ds4_sched *s, struct ds4_seq *seq, int64_t now_ns)
{
    struct ds4_request *req = seq->req;

    if (req->sink.progress == NULL || req->history.len > 0)
        return;
    req->delivering = true;
    req->sink.progress(req->sink.owner, seq->n_acked, req->n_prompt, req->usage.cached_tok);
    req->delivering = false;
    if (req->cancel_asked)
        ds4_sched_cancel(s, req, req->cancel, now_ns);
}

/* Can the rows of the known tokens from `keep` on be taken back? */
static bool can_take_back(const struct ds4_sched *s, const struct ds4_seq *seq, int32_t keep)
{
    return keep >= seq->n_prompt && ds4_seq_can_cut(seq, keep, s->config.hot_window_tok);
}

bool ds4_engine_splice(struct ds4_sched *s, struct ds4_seq *seq, int32_t n_drop,
                       const int32_t *token, int32_t n, struct ds4_err *err)
{
    int32_t known = (int32_t)seq->token.len, keep = known - n_drop;

    /* Rows that cannot be taken back stay, although the client has not seen their text. */
    if (!can_take_back(s, seq, keep))
        keep = known;
    if (seq->state != DS4_SEQ_DECODE || keep + n >= seq->max_pos) {
        (void)ds4_fail(err, DS4_E_BUSY, "no position is left for %d tokens", n);
        return false;
    }
    ds4_batch_remove(&s->batch, seq);
    if (ds4_seq_splice(seq, keep, token, n, err) != 0 ||
        ds4_batch_add_prefill(&s->batch, seq, err) != 0)
        return false;
    ds4_engine_cut_points(s, seq, keep);
    for (int32_t i = 0; i < s->n_posted; i++) {
        struct ds4_posted_step *step = &s->posted[(s->first_posted + i) % s->max_inflight];

        for (int32_t e = 0; e < step->n_entry; e++)
            if (step->entry[e].pick.seq == seq)
                step->entry[e].stale = true;
    }
    return true;
}

/* A tripwire took the turn's tokens from the one that fired on: go on with the splice, or, where no
 * position is left for it, end the turn as if its recoveries were used up. */
static void splice(struct ds4_sched *s, struct ds4_seq *seq, const struct ds4_token_entry *entry,
                   const struct ds4_accept *accept, int64_t now_ns)
{
    const struct ds4_splice *how = &accept->splice;
    int32_t n_drop = how->n_drop + entry->n_token - accept->n_used;
    struct ds4_err err = {0};

    /* Behind the token that fired, drafts may have brought the turn's end: of that no stage runs a row, so
     * there is nothing to go on from unless it is taken back. */
    if ((entry->flags & DS4_TOKEN_ENDED) != 0 &&
        !can_take_back(s, seq, (int32_t)seq->token.len - n_drop))
        (void)ds4_fail(&err, DS4_E_BUSY, "the turn has ended behind the place of the splice");
    else if (ds4_engine_splice(s, seq, n_drop, how->text->ptr, (int32_t)how->text->len, &err))
        return;
    seq->req->usage.recovery_tok -= (int32_t)how->text->len;
    if (err.code == DS4_E_BUSY)
        ds4_engine_end(s, seq, DS4_END_REPETITION, DS4_REASON_NONE, -1, now_ns, NULL);
    else
        ds4_engine_end(s, seq, DS4_END_ERROR, DS4_REASON_INTERNAL, -1, now_ns, &err);
}

/* New tokens after which the answer ends: what was asked for, or the last allowed position, which
 * splices bring nearer. */
static int32_t limit_of(const struct ds4_seq *seq, const struct ds4_token_entry *entry)
{
    const struct ds4_request *req = seq->req;
    int32_t left = seq->max_pos - (int32_t)seq->token.len;
    int32_t limit = req->usage.completion_tok + entry->n_token + left;

    return limit < req->max_new ? limit : req->max_new;
}

/* What the request makes of its tokens. */
static void deliver(struct ds4_sched *s, struct ds4_seq *seq, const struct ds4_token_entry *entry,
                    int64_t now_ns, struct ds4_err *err)
{
    struct ds4_request *req = seq->req;
    struct ds4_accept accept;
    int64_t gap_ns = req->timing.last_token_ns == 0 ? 0 : now_ns - req->timing.last_token_ns;

    accept = ds4_request_accept(req, entry, limit_of(seq, entry), now_ns, err);
    if (!req->internal) {
        s->generated_tok += (uint64_t)accept.n_used;
        ds4_count_burst(s->config.metrics, accept.n_used, gap_ns);
    }
    if (accept.tripped)
        ds4_count_trip(s->config.metrics, req, &accept);
    if (req->cancel_asked)
        ds4_sched_cancel(s, req, req->cancel, now_ns);
    else if (accept.verdict == DS4_VERDICT_END)
        ds4_engine_end(s, seq, accept.end, DS4_REASON_NONE, accept.stop_id, now_ns, NULL);
    else if (accept.verdict == DS4_VERDICT_SPLICE)
        splice(s, seq, entry, &accept, now_ns);
    else if (accept.verdict == DS4_VERDICT_FAIL)
        ds4_engine_end(s, seq, DS4_END_ERROR, DS4_REASON_INTERNAL, -1, now_ns, err);
    else if ((entry->flags & DS4_TOKEN_ENDED) != 0 && (entry->flags & DS4_TOKEN_NONFINITE) == 0) {
        /* The stages will run nothing more of it, though nothing here says that it is over. */
        ds4_fail(err, DS4_E_PROTOCOL, "the last stage ended the sequence without a reason");
        ds4_engine_end(s, seq, DS4_END_ERROR, DS4_REASON_INTERNAL, -1, now_ns, err);
    }
}

/* A row of logits was no row of numbers.  Tokens of the rows before it are the client's all the same. */
static void end_nonfinite(struct ds4_sched *s, struct ds4_seq *seq,
                          const struct ds4_token_entry *entry, int64_t now_ns, struct ds4_err *err)
{
    ds4_metric_add(s->config.metrics, DS4_M_TRIPWIRES, 1, "nan_logits");
    if (entry->n_token > 0)
        deliver(s, seq, entry, now_ns, err);
    if (seq->req == NULL || seq->state != DS4_SEQ_DECODE)
        return; /* they ended the answer, or took back what the row was about */
    ds4_fail(err, DS4_E_CORRUPT, "the model produced numbers that are not finite");
    ds4_engine_end(s, seq, DS4_END_ERROR, DS4_REASON_INTERNAL, -1, now_ns, err);
}

/* *err is somewhere to put the words of an end: clearing one per token would cost as much as the rest. */
static void acked_entry(struct ds4_sched *s, const struct ds4_posted_entry *posted,
                        const struct ds4_token_entry *entry, int64_t now_ns, struct ds4_err *err)
{
    struct ds4_seq *seq = posted->pick.seq;

    if (seq->req == NULL) {
        if (seq->n_flight == 0)
            ds4_engine_settle(s, seq, now_ns);
        return;
    }
    if (posted->stale)
        return;
    if (posted->pick.kind == DS4_ENTRY_VERIFY) {
        seq->req->usage.draft_tok += ds4_accepted_drafts(entry) + entry->n_undone;
        seq->req->usage.accepted_tok += ds4_accepted_drafts(entry);
    }
    if ((entry->flags & DS4_TOKEN_NONFINITE) != 0) {
        end_nonfinite(s, seq, entry, now_ns, err);
    } else if ((entry->flags & DS4_TOKEN_SKIPPED) != 0) {
        /* Only what has ended is skipped; waiting for more would be waiting for ever. */
        ds4_fail(err, DS4_E_PROTOCOL, "the stages skipped a running sequence");
        ds4_engine_end(s, seq, DS4_END_ERROR, DS4_REASON_INTERNAL, -1, now_ns, err);
    } else if (entry->n_token > 0) {
        deliver(s, seq, entry, now_ns, err);
    } else if (entry->pos <= seq->n_prompt) {
        report_progress(s, seq, now_ns);
    }
}

int ds4_sched_step_done(struct ds4_sched *s, int32_t stage, const struct ds4_step_done *done,
                        struct ds4_err *err)
{
    if (!s->started || done->generation != s->form.generation || done->step_no >= s->next_step ||
        stage == s->form.n_stage - 1)
        return ds4_fail(err, DS4_E_PROTOCOL, "stage %d answers step %" PRId64 " of generation %u",
                        stage, done->step_no, done->generation);
    return ds4_agree_add(&s->agree, stage, done->step_no, done->pos_digest, err);
}

/* The last stage's own voice among the stages. */
static int agree(struct ds4_sched *s, const struct ds4_tokens_out *out, struct ds4_err *err)
{
    uint32_t digest = 0;

    for (int32_t i = 0; i < out->n_entry; i++)
        digest = ds4_pos_digest(digest, out->entry[i].seq, out->entry[i].epoch,
                                out->entry[i].pos + out->entry[i].n_undone);
    return ds4_agree_add(&s->agree, s->form.n_stage - 1, out->step_no, digest, err);
}

/* Rows that the stages ran: fewer than were posted where there were fewer drafts. */
static int32_t rows_run(const struct ds4_posted_step *posted, const struct ds4_tokens_out *out)
{
    int32_t n = posted->n_row;

    for (int32_t i = 0; i < out->n_entry; i++) {
        const struct ds4_token_entry *entry = &out->entry[i];

        if (posted->entry[i].pick.kind == DS4_ENTRY_VERIFY)
            n -= posted->entry[i].pick.n_tok - 1 - ds4_accepted_drafts(entry) - entry->n_undone;
    }
    return n;
}

int ds4_sched_tokens(struct ds4_sched *s, const struct ds4_tokens_out *out, int64_t now_ns,
                     struct ds4_err *err)
{
    struct ds4_posted_step *posted = &s->posted[s->first_posted];
    struct ds4_err why = {0};
    bool good = false;

    if (!s->started || out->generation != s->form.generation)
        return ds4_fail(err, DS4_E_PROTOCOL, "tokens of generation %u", out->generation);
    if (s->n_posted == 0 || out->step_no != posted->step_no || out->n_entry != posted->n_entry)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "tokens of step %" PRId64 " with %d entries, expected step %" PRId64
                        " with %d",
                        out->step_no, out->n_entry, s->n_posted == 0 ? -1 : posted->step_no,
                        s->n_posted == 0 ? 0 : posted->n_entry);
    /* All of the record is checked before anybody hears of it.  The entries stay in flight until their
     * turn below, so that a callback which ends another sequence of this step cannot free it. */
    for (int32_t i = 0; i < out->n_entry; i++) {
        const struct ds4_posted_entry *p = &posted->entry[i];

        if (p->stale
                ? ds4_seq_acked_stale(p->pick.seq, &p->pick, &out->entry[i], err) != 0
                : ds4_seq_acked(p->pick.seq, &p->pick, s->config.vocab, &out->entry[i], err) != 0)
            return -1;
        good |= (out->entry[i].flags & DS4_TOKEN_NONFINITE) == 0;
    }
    if (agree(s, out, err) != 0)
        return -1;
    ds4_count_step(s->config.metrics, posted->n_entry, posted->n_prompt_row, rows_run(posted, out),
                   now_ns - posted->posted_ns);
    learn_cost(s, posted, now_ns);
    s->first_posted = (s->first_posted + 1) % s->max_inflight;
    s->prefilled_tok += (uint64_t)posted->n_prompt_row;
    s->n_posted--;
    s->at_work_ns += now_ns - s->work_began_ns;
    s->work_began_ns = s->n_posted > 0 ? now_ns : 0;
    s->last_ack_ns = now_ns;
    if (good)
        s->last_token_ns = now_ns;
    ds4_points_acked(&s->points, posted->step_no);
    for (int32_t i = 0; i < out->n_entry; i++) {
        struct ds4_seq *seq = posted->entry[i].pick.seq;

        ds4_count_drafts(s->config.metrics, s->form.n_stage, &out->entry[i]);
        seq->n_flight--;
        seq->n_told = (int32_t)seq->token.len;
        ds4_restore_acked(s, seq, (out->entry[i].flags & DS4_TOKEN_NONFINITE) == 0);
        if (!posted->entry[i].stale)
            ds4_engine_index(s, seq, now_ns);
        acked_entry(s, &posted->entry[i], &out->entry[i], now_ns, &why);
    }
    return 0;
}

/* One step over layers [first, last): the file to read first (house list, steps 8 to 11).
 *
 * begin() turns the step of the wire into the batch that kernels see; every refusal happens there,
 * before any row is written.  forward() is then straight-line: embed or take rows, layers, hand over
 * rows or sample.  Sequences live in slots of the cache (worker/kv_cache.h); what a sequence was given
 * last (`given`) comes from token records, so that a step can say FROM_RING and need no round trip to
 * the router.
 *
 * Invariant: all stages see the same steps and the same records, hence the same active entries with the same
 * rows: how many drafts a VERIFY entry has is known from the record it names, on every stage, before any row
 * of it runs.  After an error the generation is over: nothing runs until the next form. */
#include "worker/stage.h"

#include "common/clock.h"
#include "common/fault.h"
#include "proto/point.h"
#include "worker/embed_head.h"
#include "worker/layer.h"
#include "worker/stage_state.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define SPREAD_EVERY_NS INT64_C(500000000) /* no more often than a heartbeat reports */

size_t ds4_stage_row_bytes(const struct ds4_stage *st)
{
    return st->plan.row_bytes;
}

void ds4_stage_pipe(const struct ds4_stage *st, struct ds4_pipe_config *config)
{
    config->row_bytes = st->plan.row_bytes;
    config->backend = st->backend;
    config->dev = st->dev;
    config->dev_area = st->pipe_area;
}

void *ds4_stage_handoff(struct ds4_stage *st)
{
    return st->buf.x;
}

/* An index out of range that operations handed to each other is no error of a step: memory is broken. */
static void check_device(const struct ds4_stage *st)
{
    const char *wrong = st->backend->wrong(st->dev);

    if (wrong != NULL)
        ds4_backend_fault("worker/stage.c", __LINE__, "indices", wrong);
}

void ds4_stage_settle(struct ds4_stage *st)
{
    st->backend->sync(st->dev);
    check_device(st);
}

bool ds4_stage_is_first(const struct ds4_stage *st)
{
    return st->first;
}

bool ds4_stage_is_last(const struct ds4_stage *st)
{
    return st->last;
}

int32_t ds4_stage_running_layer(const struct ds4_stage *st)
{
    return atomic_load_explicit(&st->running_layer, memory_order_relaxed);
}

/* ---- generations -------------------------------------------------------------------------------- */

static const struct ds4_stage_given nothing_given = {.step_no = -1, .token = -1};

int ds4_stage_form(struct ds4_stage *st, const struct ds4_form *form, struct ds4_err *err)
{
    const struct ds4_plan *plan = &st->plan;

    st->generation = 0;
    st->begun = false;
    if (form->generation == 0 || form->n_stage != st->n_stage)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "generation %" PRIu32 " of %d stages, this is one of %d", form->generation,
                        form->n_stage, st->n_stage);
    if (form->n_blocks < 0 || form->n_blocks > plan->kv.n_block || form->n_slots < 1 ||
        form->n_slots > plan->kv.n_slot)
        return ds4_fail(err, DS4_E_PROTOCOL, "%d blocks and %d slots, this stage has %d and %d",
                        form->n_blocks, form->n_slots, plan->kv.n_block, plan->kv.n_slot);
    if (form->max_seqs < 1 || form->max_seqs > plan->max_seqs || form->max_step_tok < 1 ||
        form->max_step_tok > plan->max_step_tok)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "steps of %d sequences and %d rows, planned for %d and %d", form->max_seqs,
                        form->max_step_tok, plan->max_seqs, plan->max_step_tok);
    if (form->context_tok < 1 || form->context_tok > plan->context_tok)
        return ds4_fail(err, DS4_E_PROTOCOL, "a context of %d tokens, planned for %d",
                        form->context_tok, plan->context_tok);

    if (form->max_draft < 0 || form->max_draft > plan->max_draft)
        return ds4_fail(err, DS4_E_PROTOCOL, "%d drafts at once, planned for %d", form->max_draft,
                        plan->max_draft);
    if (form->host_bytes > (int64_t)plan->n_unit * (int64_t)plan->unit_bytes)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "%" PRId64 " bytes of host memory, this stage has %d units of %zu",
                        form->host_bytes, plan->n_unit, plan->unit_bytes);

    ds4_kv_reset(&st->kv, form->n_slots, form->n_blocks);
    ds4_kv_tier_reset(st->tier);
    ds4_kv_store_reset(&st->store, form->host_bytes);
    st->unfinished = false;
    for (int32_t s = 0; s < plan->kv.n_slot; s++) {
        st->given[s] = nothing_given;
        st->ran_step[s] = -1;
        if (st->last)
            ds4_draft_start(&st->draft, s, 0);
    }
    st->generation = form->generation;
    st->next_step = 0;
    st->noted_step = -1;
    st->max_seqs = form->max_seqs;
    st->max_step_tok = form->max_step_tok;
    return 0;
}

/* ---- token records (step 11) -------------------------------------------------------------------- */

int64_t ds4_stage_needs_record(const struct ds4_stage *st, const struct ds4_step *step)
{
    int64_t newest = -1;

    for (int32_t e = 0; e < step->n_entry; e++)
        if (step->entry[e].from_step > newest)
            newest = step->entry[e].from_step;
    return newest > st->noted_step && newest < step->step_no ? newest : -1;
}

static int32_t slot_of(const struct ds4_stage *st, uint64_t seq, uint32_t epoch)
{
    for (int32_t s = 0; s < st->kv.n_slot; s++) {
        const struct ds4_kv_slot *slot = &st->kv.slot[s];

        if (slot->in_use && slot->seq == seq && slot->epoch == epoch)
            return s;
    }
    return -1; /* closed since: nobody will ask */
}

/* Ids of a record are the last stage's word until here. */
static int check_ids(const struct ds4_stage *st, const int32_t *id, int32_t n, int32_t max,
                     const char *what, struct ds4_err *err)
{
    if (n < 0 || n > max)
        return ds4_fail(err, DS4_E_PROTOCOL, "%d %s, at most %d", n, what, max);
    for (int32_t i = 0; i < n; i++)
        if (id[i] < 0 || id[i] >= st->model.n_vocab)
            return ds4_fail(err, DS4_E_PROTOCOL, "%s: id %d, the vocabulary has %d ids", what,
                            id[i], st->model.n_vocab);
    return 0;
}

static int note_entry(struct ds4_stage *st, const struct ds4_record_entry *entry, int64_t step_no,
                      struct ds4_err *err)
{
    int32_t slot = slot_of(st, entry->seq, entry->epoch);
    struct ds4_stage_given *given;

    if (check_ids(st, entry->token, entry->n_token, 1 + DS4_MAX_DRAFT, "tokens", err) != 0 ||
        check_ids(st, entry->draft, entry->n_draft, DS4_MAX_DRAFT, "drafts", err) != 0)
        return -1;
    if (slot < 0)
        return 0;
    given = &st->given[slot];
    given->step_no = step_no;
    given->flags = entry->flags;
    given->pos = entry->pos;
    given->token = entry->n_token > 0 ? entry->token[entry->n_token - 1] : -1;
    given->n_draft = entry->n_draft;
    memcpy(given->draft, entry->draft, sizeof(given->draft));
    /* Rows of drafts that were wrong, unless a later step has cut the sequence already. */
    if (st->ran_step[slot] == step_no && st->kv.slot[slot].pos > entry->pos)
        return ds4_kv_truncate(&st->kv, &st->kv.slot[slot], entry->pos, err);
    return 0;
}

int ds4_stage_note_record(struct ds4_stage *st, const struct ds4_token_record *record,
                          struct ds4_err *err)
{
    if (record->generation != st->generation || record->step_no != st->noted_step + 1)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "token record of generation %" PRIu32 " step %" PRId64 ", expected %" PRIu32
                        " step %" PRId64,
                        record->generation, record->step_no, st->generation, st->noted_step + 1);
    if (record->n_entry > DS4_MAX_STEP_ENTRIES)
        return ds4_fail(err, DS4_E_PROTOCOL, "token record of %" PRIu32 " entries",
                        record->n_entry);
    for (uint32_t e = 0; e < record->n_entry; e++)
        if (note_entry(st, &record->entry[e], record->step_no, err) != 0)
            return ds4_err_wrap(err, "token record of step %" PRId64, record->step_no);
    st->noted_step = record->step_no;
    return 0;
}

/* ---- begin: the step of the wire -> the batch of the kernels -------------------------------------- */

static int check_step(const struct ds4_stage *st, const struct ds4_step *step, struct ds4_err *err)
{
    if (st->generation == 0 || step->generation != st->generation || step->step_no != st->next_step)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "step %" PRId64 " of generation %" PRIu32 ", expected step %" PRId64
                        " of %" PRIu32,
                        step->step_no, step->generation, st->next_step, st->generation);
    if (step->n_entry < 0 || step->n_entry > st->max_seqs || step->n_tok < 0 ||
        step->n_tok > st->max_step_tok)
        return ds4_fail(err, DS4_E_PROTOCOL, "%d entries and %d rows, formed for %d and %d",
                        step->n_entry, step->n_tok, st->max_seqs, st->max_step_tok);
    if (st->unfinished)
        return ds4_fail(err, DS4_E_BUG, "the step before was not finished");
    return 0;
}

static int open_and_close(struct ds4_stage *st, const struct ds4_step *step, struct ds4_err *err)
{
    for (int32_t i = 0; i < step->n_close; i++)
        if (ds4_kv_close(&st->kv, step->close_slot[i], err) != 0)
            return -1;
    for (int32_t i = 0; i < step->n_open; i++) {
        const struct ds4_seq_open *open = &step->open[i];

        if (ds4_kv_open(&st->kv, open->slot, open->seq, open->epoch, err) != 0)
            return -1;
        if (st->last && ds4_sampler_open(&st->sampler, open, err) != 0)
            return ds4_err_wrap(err, "open of sequence %" PRIu64, open->seq);
        if (st->last)
            ds4_draft_open(&st->draft, open);
        st->given[open->slot] = nothing_given;
        st->ran_step[open->slot] = -1;
    }
    return 0;
}

/* What an entry runs, whoever says it. */
struct rows {
    int32_t base_pos;
    int32_t n; /* 0: the sequence has ended, the entry is a no-op */
    const int32_t *token;
    int32_t own[1 + DS4_MAX_DRAFT]; /* of an entry from the ring */
};

/* Rows that the entry takes of what `given` says. */
static int32_t rows_given(const struct ds4_stage_given *given, const struct ds4_step_entry *entry)
{
    int32_t n_draft = entry->kind == DS4_ENTRY_VERIFY ? entry->n_tok - 1 : 0;

    return 1 + (n_draft < given->n_draft ? n_draft : given->n_draft);
}

static bool has_ended(const struct ds4_stage_given *given)
{
    return (given->flags & (DS4_TOKEN_ENDED | DS4_TOKEN_SKIPPED | DS4_TOKEN_NONFINITE)) != 0;
}

/* Of a FROM_RING entry. */
static int rows_from_ring(const struct ds4_stage *st, const struct ds4_step_entry *entry,
                          struct rows *rows, struct ds4_err *err)
{
    const struct ds4_stage_given *given = &st->given[entry->slot];

    if (entry->kind == DS4_ENTRY_DECODE && entry->n_tok != 1)
        return ds4_fail(err, DS4_E_PROTOCOL, "%d rows from the token of one step", entry->n_tok);
    if (given->step_no != entry->from_step)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "token of step %" PRId64
                        ", the newest record of the sequence is of %" PRId64,
                        entry->from_step, given->step_no);
    rows->n = 0;
    if (has_ended(given))
        return 0;
    if (given->token < 0)
        return ds4_fail(err, DS4_E_PROTOCOL, "step %" PRId64 " sampled nothing for the sequence",
                        entry->from_step);
    if (given->pos < entry->base_pos)
        return ds4_fail(err, DS4_E_PROTOCOL, "base position %d, the sequence is at %d",
                        entry->base_pos, given->pos);
    rows->base_pos = given->pos;
    rows->n = rows_given(given, entry);
    rows->own[0] = given->token;
    memcpy(rows->own + 1, given->draft, (size_t)(rows->n - 1) * sizeof(*rows->own));
    rows->token = rows->own;
    return 0;
}

/* Of an entry that brings its tokens. */
static int rows_from_step(const struct ds4_stage *st, const struct ds4_step *step,
                          const struct ds4_step_entry *entry, struct rows *rows,
                          struct ds4_err *err)
{
    if (entry->kind == DS4_ENTRY_VERIFY)
        return ds4_fail(err, DS4_E_PROTOCOL, "a verify entry that names no step of drafts");
    rows->base_pos = entry->base_pos;
    rows->n = entry->n_tok;
    rows->token = step->token + entry->first_tok;
    for (int32_t t = 0; t < rows->n; t++)
        if (rows->token[t] < 0 || rows->token[t] >= st->model.n_vocab)
            return ds4_fail(err, DS4_E_PROTOCOL, "token id %d, the vocabulary has %d ids",
                            rows->token[t], st->model.n_vocab);
    return 0;
}

/* The last stage keeps every sequence's tokens.  Drafts are kept with them until they are overwritten, but
 * not noted: nobody knows yet whether they are right. */
static void keep_tokens(struct ds4_stage *st, const struct ds4_step_entry *entry,
                        const struct rows *rows)
{
    int32_t *history = st->history + (size_t)entry->slot * (size_t)st->plan.limits.max_context;

    if (entry->from_step < 0)
        ds4_draft_forget(&st->draft, entry->slot, history, rows->base_pos);
    memcpy(history + rows->base_pos, rows->token, (size_t)rows->n * sizeof(*history));
    if (entry->from_step < 0)
        ds4_draft_note(&st->draft, entry->slot, history, rows->base_pos + rows->n);
}

/* Is the entry where the step says, is there a drafter for it, and is it the only one of its slot? */
static int check_entry(const struct ds4_stage *st, const struct ds4_step *step, int32_t e,
                       struct ds4_err *err)
{
    const struct ds4_step_entry *entry = &step->entry[e];

    if (entry->kind == DS4_ENTRY_VERIFY && entry->n_tok > 1 + st->plan.max_draft)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "a verify entry of %d rows, this stage has planned for %d drafts",
                        entry->n_tok, st->plan.max_draft);
    if (entry->n_tok < 1 || entry->first_tok != st->wire_tok ||
        entry->n_tok > step->n_tok - entry->first_tok)
        return ds4_fail(err, DS4_E_PROTOCOL, "%d rows from row %d on, expected row %d of %d",
                        entry->n_tok, entry->first_tok, st->wire_tok, step->n_tok);
    for (int32_t other = 0; other < e; other++)
        if (st->entry[other].slot == entry->slot)
            return ds4_fail(err, DS4_E_PROTOCOL, "slot %d is already in entry %d", entry->slot,
                            other);
    return 0;
}

static int begin_entry(struct ds4_stage *st, const struct ds4_step *step, int32_t e,
                       struct ds4_err *err)
{
    const struct ds4_step_entry *entry = &step->entry[e];
    struct ds4_batch_entry *row = &st->entry[e];
    struct ds4_kv_lease lease = {.seq = entry->seq,
                                 .slot = entry->slot,
                                 .epoch = entry->epoch,
                                 .cap_tok = entry->cap_tok,
                                 .first_block = entry->first_block,
                                 .n_block = entry->n_block,
                                 .block = entry->block};
    int32_t first_row = st->batch.n_tok;
    struct rows rows;

    if (ds4_kv_find(&st->kv, &lease, err) == NULL || check_entry(st, step, e, err) != 0 ||
        (entry->from_step >= 0 ? rows_from_ring(st, entry, &rows, err)
                               : rows_from_step(st, step, entry, &rows, err)) != 0)
        return -1;
    if (rows.n == 0) {
        if (ds4_kv_skip(&st->kv, &lease, 1, row, err) != 0)
            return -1;
        st->token[first_row] = 0;
    } else {
        if (ds4_kv_append(&st->kv, &lease, rows.base_pos, rows.n, row, err) != 0)
            return -1;
        memcpy(st->token + first_row, rows.token, (size_t)rows.n * sizeof(*st->token));
        st->ran_step[entry->slot] = step->step_no;
        if (st->last)
            keep_tokens(st, entry, &rows);
    }
    row->first_row = first_row;
    for (int32_t t = 0; t < row->n_row; t++) {
        st->pos[first_row + t] = row->base_pos + t;
        st->entry_of[first_row + t] = e;
    }
    st->batch.n_tok += row->n_row;
    st->wire_tok += entry->n_tok;
    return 0;
}

int32_t ds4_stage_n_row(const struct ds4_stage *st)
{
    return st->batch.n_tok;
}

int32_t ds4_stage_rows_of(const struct ds4_stage *st, const struct ds4_step *step)
{
    int32_t n = 0;

    for (int32_t e = 0; e < step->n_entry; e++) {
        const struct ds4_step_entry *entry = &step->entry[e];
        int32_t slot = slot_of(st, entry->seq, entry->epoch);

        if (entry->kind != DS4_ENTRY_VERIFY) {
            n += entry->n_tok;
            continue;
        }
        if (slot < 0 || st->given[slot].step_no != entry->from_step)
            return -1;
        n += has_ended(&st->given[slot]) ? 1 : rows_given(&st->given[slot], entry);
    }
    return n;
}

/* The rows whose logits are wanted: the last of each entry that samples, all of one that verifies. */
static int choose_rows(struct ds4_stage *st, const struct ds4_step *step, struct ds4_err *err)
{
    st->batch.n_out = 0;
    st->batch.out_row = st->head_row;
    for (int32_t e = 0; st->last && e < step->n_entry; e++) {
        const struct ds4_batch_entry *entry = &st->entry[e];
        int32_t n = step->entry[e].kind == DS4_ENTRY_VERIFY ? entry->n_row : 1;

        if (!step->entry[e].sample || !entry->active)
            continue;
        if (n > st->plan.head_rows - st->batch.n_out)
            return ds4_fail(err, DS4_E_PROTOCOL, "more than %d rows are to be sampled",
                            st->plan.head_rows);
        for (int32_t t = entry->n_row - n; t < entry->n_row; t++)
            st->head_row[st->batch.n_out++] = entry->first_row + t;
    }
    return 0;
}

int ds4_stage_begin(struct ds4_stage *st, const struct ds4_step *step, struct ds4_err *err)
{
    int result = check_step(st, step, err);

    st->begun = false;
    st->batch.n_tok = 0;
    st->wire_tok = 0;
    st->batch.n_entry = step->n_entry;
    if (result == 0)
        result = open_and_close(st, step, err);
    if (result == 0)
        result = ds4_stage_run_ops(st, step, err);
    for (int32_t e = 0; result == 0 && e < step->n_entry; e++)
        if (begin_entry(st, step, e, err) != 0)
            result = ds4_err_wrap(err, "entry %d of sequence %" PRIu64, e, step->entry[e].seq);
    if (result == 0)
        result = ds4_stage_find_inner(st, step, err);
    if (result == 0 && st->wire_tok != step->n_tok)
        result = ds4_fail(err, DS4_E_PROTOCOL, "%d rows, the entries have %d", step->n_tok,
                          st->wire_tok);
    if (result == 0)
        result = choose_rows(st, step, err);
    if (result != 0) {
        st->generation = 0;
        return ds4_err_wrap(err, "step %" PRId64, step->step_no);
    }
    st->next_step++;
    st->begun = true;
    return 0;
}

/* ---- forward ------------------------------------------------------------------------------------ */

static void run_operations(struct ds4_stage *st)
{
    if (st->first)
        ds4_embed_forward(st);
    for (int32_t l = 0; l < st->weights.n_layer; l++) {
        atomic_store_explicit(&st->running_layer, st->plan.part.first_layer + l,
                              memory_order_relaxed);
        ds4_layer_forward(st, l);
        if (st->sync_layers)
            st->backend->sync(st->dev);
    }
    if (st->batch.n_out > 0)
        ds4_head_forward(st);
}

/* A device that has recorded a step of this shape needs no operation called; one that must stop after each
 * layer, or meet the host's experts there, or keep rows of it for points, records nothing. */
static void run_layers(struct ds4_stage *st)
{
    if (DS4_FAULT_BUILD || st->sync_layers || st->offload != NULL || st->keeper.n > 0) {
        run_operations(st);
        return;
    }
    if (!st->backend->enter(st->dev))
        run_operations(st);
    st->backend->leave(st->dev);
}

/* The newest tokens of an entry: row after row while the draft behind it is what was sampled.  logits [n_row,
 * n_vocab]: rows that follow a wrong draft are somebody else's text, whatever they hold. */
static void sample_rows(struct ds4_stage *st, int32_t slot, int32_t base_pos, int32_t n_row,
                        const float *logits, struct ds4_token_entry *out)
{
    const size_t n_vocab = (size_t)st->model.n_vocab;
    const int32_t *history = st->history + (size_t)slot * (size_t)st->plan.limits.max_context;
    int32_t r = 0;

    for (bool more = true; more; r++) {
        struct ds4_token_entry one;
        int32_t pos = base_pos + r + 1; /* that the row samples for */

        ds4_sampler_pick(&st->sampler, slot, logits + (size_t)r * n_vocab, history, pos, &one);
        out->flags |= one.flags;
        out->pos = pos;
        out->n_logprob = one.n_logprob > 0 ? one.n_logprob : out->n_logprob;
        if (one.n_token > 0) {
            memcpy(out->logprob + out->n_token * out->n_logprob, one.logprob,
                   (size_t)one.n_logprob * sizeof(*one.logprob));
            out->token[out->n_token++] = one.token[0];
        }
        more = r + 1 < n_row && (one.flags & DS4_TOKEN_ENDED) == 0 && history[pos] == one.token[0];
    }
    out->n_undone = n_row - r;
    for (; r < n_row; r++)
        if (!ds4_sampler_is_finite(&st->sampler, logits + (size_t)r * n_vocab))
            out->n_nan_draft++;
}

/* Judges the drafts that were run and makes new ones. */
static void draft(struct ds4_stage *st, int32_t slot, int32_t n_row, struct ds4_token_entry *out,
                  struct ds4_drafts *drafts)
{
    int32_t *history = st->history + (size_t)slot * (size_t)st->plan.limits.max_context;

    drafts->n = 0;
    drafts->n_bad = 0;
    if ((out->flags & DS4_TOKEN_SAMPLED) == 0 || (out->flags & DS4_TOKEN_ENDED) != 0)
        return;
    history[out->pos] = out->token[out->n_token - 1];
    if (ds4_draft_judge(&st->draft, slot, n_row - 1, ds4_accepted_drafts(out), out->pos + 1))
        out->flags |= DS4_TOKEN_QUENCHED;
    ds4_draft_propose(&st->draft, slot, history, out->pos + 1, drafts);
    out->n_bad_draft = drafts->n_bad;
}

/* Samples the entries that ask for it (step 10); out_entry[e] belongs to entry e of the step. */
static void sample(struct ds4_stage *st, const struct ds4_step *step)
{
    size_t n_vocab = (size_t)st->model.n_vocab;
    const float *logits = st->host_logits;

    if (st->batch.n_out > 0)
        st->backend->download(st->dev, st->host_logits, st->buf.logits,
                              (size_t)st->batch.n_out * n_vocab * sizeof(float));
    if (st->batch.n_out > 0 && DS4_FAULT_POINT(NAN_LOGITS))
        st->host_logits[0] = NAN;
    for (int32_t e = 0; e < step->n_entry; e++) {
        const struct ds4_step_entry *entry = &step->entry[e];
        const struct ds4_batch_entry *rows = &st->entry[e];
        struct ds4_token_entry *out = &st->out_entry[e];
        int32_t n = entry->kind == DS4_ENTRY_VERIFY ? rows->n_row : 1;

        memset(out, 0, offsetof(struct ds4_token_entry, logprob));
        out->seq = entry->seq;
        out->epoch = entry->epoch;
        out->pos = st->kv.slot[entry->slot].pos;
        st->drafts[e].n = 0;
        if (!rows->active) {
            out->flags = DS4_TOKEN_SKIPPED;
        } else if (entry->sample) {
            sample_rows(st, entry->slot, rows->base_pos + rows->n_row - n, n, logits, out);
            logits += n_vocab * (size_t)n;
            draft(st, entry->slot, n, out, &st->drafts[e]);
        }
        if ((out->flags & DS4_TOKEN_NONFINITE) != 0)
            atomic_fetch_add_explicit(&st->nonfinite_rows, 1, memory_order_relaxed);
    }
}

static void fill_record(const struct ds4_stage *st, const struct ds4_step *step,
                        struct ds4_token_record *record)
{
    memset(record, 0, sizeof(*record));
    record->generation = step->generation;
    record->n_entry = (uint32_t)step->n_entry;
    record->step_no = step->step_no;
    for (int32_t e = 0; e < step->n_entry; e++) {
        const struct ds4_token_entry *out = &st->out_entry[e];
        struct ds4_record_entry *entry = &record->entry[e];

        entry->seq = out->seq;
        entry->epoch = out->epoch;
        entry->flags = out->flags;
        entry->pos = out->pos;
        entry->n_token = out->n_token;
        for (int32_t i = 0; i < 1 + DS4_MAX_DRAFT; i++)
            entry->token[i] = i < out->n_token ? out->token[i] : -1;
        entry->n_draft = st->drafts[e].n;
        for (int32_t i = 0; i < DS4_MAX_DRAFT; i++)
            entry->draft[i] = i < entry->n_draft ? st->drafts[e].token[i] : -1;
    }
}

/* Brings the counts of experts over, before a step, when the device has nothing to do, and
 * rarely. */
static void read_spread(struct ds4_stage *st, int64_t now_ns)
{
    struct ds4_offload_stats stats;
    uint64_t count[2];

    if (now_ns - st->spread_ns < SPREAD_EVERY_NS)
        return;
    st->spread_ns = now_ns;
    st->backend->download(st->dev, count, st->buf.spread, sizeof(count));
    atomic_store_explicit(&st->spread_steps, count[0], memory_order_relaxed);
    atomic_store_explicit(&st->spread_experts, count[1], memory_order_relaxed);
    if (st->offload == NULL)
        return;
    ds4_offload_stats(st->offload, &stats);
    atomic_store_explicit(&st->uses_on_device, stats.resident, memory_order_relaxed);
    atomic_store_explicit(&st->uses_streamed, stats.streamed, memory_order_relaxed);
    atomic_store_explicit(&st->uses_on_host, stats.host, memory_order_relaxed);
    atomic_store_explicit(&st->experts_moved, stats.moved, memory_order_relaxed);
}

int ds4_stage_forward(struct ds4_stage *st, const struct ds4_step *step, void *rows,
                      struct ds4_token_record *record, struct ds4_tokens_out *out,
                      struct ds4_err *err)
{
    int64_t start_ns = ds4_clock_ns();
    size_t bytes = (size_t)st->batch.n_tok * st->plan.row_bytes;

    if (!st->begun || step->step_no != st->next_step - 1)
        return ds4_fail(err, DS4_E_BUG, "forward of step %" PRId64 ", which has not begun",
                        step->step_no);
    st->begun = false;
    st->unfinished = true;
    if (st->batch.n_tok > 0) {
        read_spread(st, start_ns);
        if (st->offload != NULL)
            ds4_offload_adapt(st->offload);
        st->backend->begin(st->dev, &st->batch);
        if (!st->first && rows != NULL)
            st->backend->upload(st->dev, st->buf.x, rows, bytes);
        run_layers(st);
        if (!st->last && rows != NULL)
            st->backend->download(st->dev, rows, st->buf.x, bytes);
        atomic_store_explicit(&st->running_layer, -1, memory_order_relaxed);
    }
    check_device(st); /* with work under way: of the step before */
    if (!st->last)
        return 0;

    sample(st, step);
    ds4_stage_settle(st);
    fill_record(st, step, record);
    *out = (struct ds4_tokens_out){.generation = step->generation,
                                   .step_no = step->step_no,
                                   .n_entry = step->n_entry,
                                   .entry = st->out_entry,
                                   .compute_ns = ds4_clock_ns() - start_ns};
    return ds4_stage_note_record(st, record, err);
}

int ds4_stage_finish(struct ds4_stage *st, const struct ds4_step *step, struct ds4_step_done *done,
                     struct ds4_err *err)
{
    uint32_t digest = 0;

    if (!st->unfinished || step->step_no != st->next_step - 1)
        return ds4_fail(err, DS4_E_BUG, "finish of step %" PRId64 ", which has not run",
                        step->step_no);
    st->unfinished = false;
    for (int32_t e = 0; e < step->n_entry; e++)
        digest =
            ds4_pos_digest(digest, step->entry[e].seq, step->entry[e].epoch,
                           st->entry[e].base_pos + (st->entry[e].active ? st->entry[e].n_row : 0));
    if (ds4_stage_save_points(st, step, err) != 0) {
        st->generation = 0;
        return ds4_err_wrap(err, "step %" PRId64, step->step_no);
    }
    if (done != NULL)
        *done = (struct ds4_step_done){step->generation, step->step_no, digest};
    return 0;
}

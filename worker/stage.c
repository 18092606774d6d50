/* One step over layers [first, last): the file to read first (house list, steps 8 to 11).
 *
 * begin() turns the step of the wire into the batch that kernels see; every refusal happens there,
 * before any row is written.  forward() is then straight-line: embed or take rows, layers, hand over
 * rows or sample.  Sequences live in slots of the cache (worker/kv_cache.h); what a sequence was given
 * last (`given`) comes from token records, so that a step can say FROM_RING and need no round trip to
 * the router.
 *
 * Invariant: all stages see the same steps and the same records, hence the same active entries.  After an
 * error the generation is over: nothing runs until the next form. */
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

    if (form->host_bytes > (int64_t)plan->n_unit * (int64_t)plan->unit_bytes)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "%" PRId64 " bytes of host memory, this stage has %d units of %zu",
                        form->host_bytes, plan->n_unit, plan->unit_bytes);

    ds4_kv_reset(&st->kv, form->n_slots, form->n_blocks);
    ds4_kv_tier_reset(st->tier);
    ds4_kv_store_reset(&st->store, form->host_bytes);
    st->unfinished = false;
    for (int32_t s = 0; s < plan->kv.n_slot; s++)
        st->given[s] = nothing_given;
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

static struct ds4_stage_given *given_of(struct ds4_stage *st, uint64_t seq, uint32_t epoch)
{
    for (int32_t s = 0; s < st->kv.n_slot; s++) {
        const struct ds4_kv_slot *slot = &st->kv.slot[s];

        if (slot->in_use && slot->seq == seq && slot->epoch == epoch)
            return &st->given[s];
    }
    return NULL; /* closed since: nobody will ask */
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
    for (uint32_t e = 0; e < record->n_entry; e++) {
        const struct ds4_record_entry *entry = &record->entry[e];
        struct ds4_stage_given *given = given_of(st, entry->seq, entry->epoch);
        int32_t token = entry->n_token > 0 ? entry->token[0] : -1;

        if (entry->n_token < 0 || entry->n_token > 1 + DS4_MAX_DRAFT ||
            (entry->n_token > 0 && (token < 0 || token >= st->model.n_vocab)))
            return ds4_fail(err, DS4_E_PROTOCOL,
                            "token record of step %" PRId64 " gives %d tokens, the first %d",
                            record->step_no, entry->n_token, token);
        if (given != NULL)
            *given = (struct ds4_stage_given){record->step_no, entry->flags, token};
    }
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
        st->given[open->slot] = nothing_given;
    }
    return 0;
}

/* The token of a FROM_RING entry: *token = -1 when the sequence ended and the entry is a no-op. */
static int token_given(const struct ds4_stage *st, const struct ds4_step_entry *entry,
                       int32_t *token, struct ds4_err *err)
{
    const struct ds4_stage_given *given = &st->given[entry->slot];

    if (entry->n_tok != 1)
        return ds4_fail(err, DS4_E_PROTOCOL, "%d rows from the token of one step", entry->n_tok);
    if (given->step_no != entry->from_step)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "token of step %" PRId64
                        ", the newest record of the sequence is of %" PRId64,
                        entry->from_step, given->step_no);
    *token = -1;
    if ((given->flags & (DS4_TOKEN_ENDED | DS4_TOKEN_SKIPPED | DS4_TOKEN_NONFINITE)) != 0)
        return 0;
    if (given->token < 0)
        return ds4_fail(err, DS4_E_PROTOCOL, "step %" PRId64 " sampled nothing for the sequence",
                        entry->from_step);
    *token = given->token;
    return 0;
}

/* Copies the entry's ids into the batch; ids were the peer's word until here. */
static int take_tokens(struct ds4_stage *st, const struct ds4_step *step,
                       const struct ds4_step_entry *entry, int32_t given, struct ds4_err *err)
{
    int32_t *token = st->token + entry->first_tok;

    for (int32_t t = 0; t < entry->n_tok; t++) {
        token[t] = entry->from_step >= 0 ? given : step->token[entry->first_tok + t];
        if (token[t] < 0 || token[t] >= st->model.n_vocab)
            return ds4_fail(err, DS4_E_PROTOCOL, "token id %d, the vocabulary has %d ids", token[t],
                            st->model.n_vocab);
    }
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
    int32_t given = 0;

    if (ds4_kv_find(&st->kv, &lease, err) == NULL)
        return -1;
    if (entry->kind == DS4_ENTRY_VERIFY)
        return ds4_fail(err, DS4_E_PROTOCOL, "a verify entry, but there is no drafter");
    if (entry->n_tok < 1 || entry->first_tok != st->batch.n_tok ||
        entry->n_tok > step->n_tok - entry->first_tok)
        return ds4_fail(err, DS4_E_PROTOCOL, "%d rows from row %d on, expected row %d of %d",
                        entry->n_tok, entry->first_tok, st->batch.n_tok, step->n_tok);
    for (int32_t other = 0; other < e; other++)
        if (st->entry[other].slot == entry->slot)
            return ds4_fail(err, DS4_E_PROTOCOL, "slot %d is already in entry %d", entry->slot,
                            other);
    if (entry->from_step >= 0 && token_given(st, entry, &given, err) != 0)
        return -1;
    if (given < 0) {
        if (ds4_kv_skip(&st->kv, &lease, entry->n_tok, row, err) != 0)
            return -1;
        memset(st->token + entry->first_tok, 0, (size_t)entry->n_tok * sizeof(*st->token));
    } else if (take_tokens(st, step, entry, given, err) != 0 ||
               ds4_kv_append(&st->kv, &lease, entry->base_pos, entry->n_tok, row, err) != 0) {
        return -1;
    }
    row->first_row = entry->first_tok;
    for (int32_t t = 0; t < entry->n_tok; t++) {
        st->pos[entry->first_tok + t] = row->base_pos + t;
        st->entry_of[entry->first_tok + t] = e;
    }
    if (st->last && row->active)
        memcpy(st->history + (size_t)entry->slot * (size_t)st->plan.limits.max_context +
                   row->base_pos,
               st->token + entry->first_tok, (size_t)entry->n_tok * sizeof(*st->history));
    st->batch.n_tok += entry->n_tok;
    return 0;
}

int ds4_stage_begin(struct ds4_stage *st, const struct ds4_step *step, struct ds4_err *err)
{
    int result = check_step(st, step, err);

    st->begun = false;
    st->batch.n_tok = 0;
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
    if (result == 0 && st->batch.n_tok != step->n_tok)
        result = ds4_fail(err, DS4_E_PROTOCOL, "%d rows, the entries have %d", step->n_tok,
                          st->batch.n_tok);
    if (result != 0) {
        st->generation = 0;
        return ds4_err_wrap(err, "step %" PRId64, step->step_no);
    }
    st->next_step++;
    st->begun = true;
    return 0;
}

/* ---- forward ------------------------------------------------------------------------------------ */

/* The rows whose logits are wanted: the last of each entry that samples. */
static void choose_rows(struct ds4_stage *st, const struct ds4_step *step)
{
    st->batch.out_row = st->head_row;
    for (int32_t e = 0; st->last && e < step->n_entry; e++)
        if (step->entry[e].sample && st->entry[e].active)
            st->head_row[st->batch.n_out++] = st->entry[e].first_row + st->entry[e].n_row - 1;
}

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

/* Samples the entries that ask for it (step 10); out_entry[e] belongs to entry e of the step. */
static void sample(struct ds4_stage *st, const struct ds4_step *step)
{
    size_t n_vocab = (size_t)st->model.n_vocab;
    int32_t n_row = 0;

    if (st->batch.n_out > 0)
        st->backend->download(st->dev, st->host_logits, st->buf.logits,
                              (size_t)st->batch.n_out * n_vocab * sizeof(float));
    if (st->batch.n_out > 0 && DS4_FAULT_POINT(NAN_LOGITS))
        st->host_logits[0] = NAN;
    for (int32_t e = 0; e < step->n_entry; e++) {
        const struct ds4_step_entry *entry = &step->entry[e];
        struct ds4_token_entry *out = &st->out_entry[e];
        int32_t pos = st->kv.slot[entry->slot].pos;

        memset(out, 0, sizeof(*out));
        out->seq = entry->seq;
        out->epoch = entry->epoch;
        out->pos = pos;
        if (!st->entry[e].active)
            out->flags = DS4_TOKEN_SKIPPED;
        else if (entry->sample)
            ds4_sampler_pick(
                &st->sampler, entry->slot, st->host_logits + n_vocab * (size_t)n_row++,
                st->history + (size_t)entry->slot * (size_t)st->plan.limits.max_context, pos, out);
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
    st->batch.n_out = 0;
    if (st->batch.n_tok > 0) {
        read_spread(st, start_ns);
        if (st->offload != NULL)
            ds4_offload_adapt(st->offload);
        choose_rows(st, step);
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
        digest = ds4_pos_digest(digest, step->entry[e].seq, step->entry[e].epoch,
                                st->kv.slot[step->entry[e].slot].pos);
    if (ds4_stage_save_points(st, step, err) != 0) {
        st->generation = 0;
        return ds4_err_wrap(err, "step %" PRId64, step->step_no);
    }
    if (done != NULL)
        *done = (struct ds4_step_done){step->generation, step->step_no, digest};
    return 0;
}

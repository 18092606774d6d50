/* The scripted stage: executes steps on hashes (see the header). */
#include "tests/support/scripted_stage.h"

#include "proto/check.h"
#include "router/sched/budget.h"

#include <inttypes.h>
#include <stdlib.h>

static uint64_t mix(uint64_t h, int32_t token)
{
    h = (h ^ (uint64_t)(uint32_t)token) * UINT64_C(0x9e3779b97f4a7c15);
    return h ^ (h >> 29);
}

static int32_t pick_token(int32_t vocab, uint64_t h)
{
    return (int32_t)(mix(h, 77) % (uint64_t)vocab);
}

int32_t ds4_scripted_next(int32_t vocab, const int32_t *token, int32_t n)
{
    uint64_t h = 1;

    for (int32_t t = 0; t < n; t++)
        h = mix(h, token[t]);
    return pick_token(vocab, h);
}

static void object(struct ds4_scripted_stage *stage, const char *what, int64_t step, int64_t a,
                   int64_t b)
{
    if (stage->err.code == DS4_OK)
        ds4_fail(&stage->err, DS4_E_PROTOCOL, "step %" PRId64 ": %s (%" PRId64 ", %" PRId64 ")",
                 step, what, a, b);
}

static void free_step(struct ds4_step *step)
{
    for (int32_t i = 0; i < step->n_entry; i++)
        free((void *)step->entry[i].block);
    free(step->open);
    free((void *)step->close_slot);
    free(step->entry);
    free((void *)step->token);
    free(step);
}

static void *copy(const void *src, size_t n, size_t size)
{
    void *dst = malloc(n * size + 1);

    if (dst == NULL)
        abort();
    if (n > 0)
        memcpy(dst, src, n * size);
    return dst;
}

static struct ds4_step *copy_step(const struct ds4_step *step)
{
    struct ds4_step *out = copy(step, 1, sizeof(*step));

    out->open = copy(step->open, (size_t)step->n_open, sizeof(*step->open));
    out->close_slot = copy(step->close_slot, (size_t)step->n_close, sizeof(*step->close_slot));
    out->entry = copy(step->entry, (size_t)step->n_entry, sizeof(*step->entry));
    out->token = copy(step->token, (size_t)step->n_tok, sizeof(*step->token));
    for (int32_t i = 0; i < step->n_entry; i++)
        out->entry[i].block =
            copy(step->entry[i].block, (size_t)step->entry[i].n_block, sizeof(int32_t));
    return out;
}

static void clear(struct ds4_scripted_stage *stage)
{
    for (int32_t s = 0; s < stage->form.n_slots; s++) {
        DS4_VEC_DEINIT(&stage->slot[s].hash);
        DS4_VEC_DEINIT(&stage->slot[s].token);
        free(stage->slot[s].block);
    }
    free(stage->slot);
    free(stage->cell);
    free(stage->answer);
    for (size_t i = 0; i < stage->queue.len; i++)
        free_step(stage->queue.ptr[i]);
    DS4_VEC_DEINIT(&stage->queue);
}

void ds4_scripted_form(struct ds4_scripted_stage *stage, const struct ds4_form *form, int32_t vocab,
                       int32_t hot_window_tok)
{
    struct ds4_err err = stage->err;

    clear(stage);
    *stage = (struct ds4_scripted_stage){
        .form = *form,
        .vocab = vocab,
        .hot_window_tok = hot_window_tok,
        .check_cells = true,
        .err = err,
        .last_close = -1,
        .next = stage->next,
        .next_owner = stage->next_owner,
    };
    stage->slot = calloc((size_t)form->n_slots, sizeof(*stage->slot));
    stage->cell = calloc((size_t)form->n_blocks * DS4_BLOCK_TOK, sizeof(*stage->cell));
    stage->answer = calloc((size_t)form->max_seqs, sizeof(*stage->answer));
    if (stage->slot == NULL || stage->cell == NULL || stage->answer == NULL)
        abort();
    for (int32_t s = 0; s < form->n_slots; s++)
        stage->slot[s].block =
            calloc((size_t)ds4_budget_blocks(form->context_tok), sizeof(int32_t));
}

void ds4_scripted_deinit(struct ds4_scripted_stage *stage)
{
    clear(stage);
    *stage = (struct ds4_scripted_stage){0};
}

int ds4_scripted_send(void *owner, const struct ds4_step *step, struct ds4_err *err)
{
    struct ds4_scripted_stage *stage = owner;

    if (stage->fail_sends > 0) {
        stage->fail_sends--;
        return ds4_fail(err, DS4_E_IO, "the scripted pipe is broken");
    }
    if (ds4_check_step(step, err) != 0)
        object(stage, err->msg, step->step_no, 0, 0);
    if (step->step_no != stage->next_step || step->generation != stage->form.generation)
        object(stage, "out of order", step->step_no, stage->next_step, step->generation);
    stage->next_step = step->step_no + 1;
    if (step->n_entry < 1 || step->n_entry > stage->form.max_seqs ||
        step->n_tok > stage->form.max_step_tok)
        object(stage, "shape", step->step_no, step->n_entry, step->n_tok);
    if (DS4_VEC_PUSH(&stage->queue, copy_step(step)) != 0)
        abort();
    if ((int32_t)stage->queue.len > stage->max_queued)
        stage->max_queued = (int32_t)stage->queue.len;
    return 0;
}

static void close_and_open(struct ds4_scripted_stage *stage, const struct ds4_step *step)
{
    for (int32_t i = 0; i < step->n_close; i++) {
        struct ds4_scripted_slot *slot = &stage->slot[step->close_slot[i]];

        if (!slot->open)
            object(stage, "close of a free slot", step->step_no, step->close_slot[i], 0);
        slot->open = false;
        stage->last_close = step->step_no;
    }
    for (int32_t i = 0; i < step->n_open; i++) {
        const struct ds4_seq_open *open = &step->open[i];
        struct ds4_scripted_slot *slot = &stage->slot[open->slot];

        if (slot->open && slot->epoch == open->epoch)
            object(stage, "open under an old epoch", step->step_no, open->slot, open->epoch);
        if (!slot->open) {
            slot->hi = 0;
            slot->hash.len = 0;
            slot->token.len = 0;
            if (DS4_VEC_PUSH(&slot->hash, 1) != 0)
                abort();
        }
        slot->open = true;
        slot->seq = open->seq;
        slot->epoch = open->epoch;
        slot->how = *open;
        slot->ended_at = -1;
        slot->sampled_at = -1;
        slot->n_block = 0;
    }
}

static uint64_t *cell_of(struct ds4_scripted_stage *stage, const struct ds4_scripted_slot *slot,
                         int32_t pos)
{
    return &stage->cell[(size_t)slot->block[pos / DS4_BLOCK_TOK] * DS4_BLOCK_TOK +
                        (size_t)(pos % DS4_BLOCK_TOK)];
}

static void truncate_to(struct ds4_scripted_stage *stage, struct ds4_scripted_slot *slot,
                        int32_t base, int64_t step)
{
    int32_t pos = (int32_t)slot->hash.len - 1;

    if (base > pos)
        object(stage, "base above the position", step, base, pos);
    else if (base < pos && base != 0 && slot->hi - base > stage->hot_window_tok)
        object(stage, "cut below the hot window", step, base, slot->hi);
    else {
        slot->hash.len = (size_t)base + 1;
        if (stage->next != NULL)
            slot->token.len = (size_t)base;
    }
    if (stage->check_cells)
        for (int32_t p = 0; p < base && p < pos; p++)
            if (*cell_of(stage, slot, p) != slot->hash.ptr[p + 1]) {
                object(stage, "a row was overwritten", step, p, (int64_t)slot->seq);
                break;
            }
}

static bool is_stop(const struct ds4_scripted_slot *slot, int32_t token, int32_t pos)
{
    if (pos >= slot->how.max_pos - 1)
        return true;
    for (int32_t i = 0; i < slot->how.n_stop && !slot->how.ignore_stop; i++)
        if (slot->how.stop_id[i] == token)
            return true;
    return false;
}

static void sample(struct ds4_scripted_stage *stage, struct ds4_scripted_slot *slot,
                   struct ds4_token_entry *out, int64_t step)
{
    int32_t pos = (int32_t)slot->hash.len - 1;
    int32_t token = stage->next != NULL ? stage->next(stage->next_owner, slot)
                                        : pick_token(stage->vocab, slot->hash.ptr[pos]);

    if (slot->seq == stage->nonfinite_seq || token < 0) {
        stage->nonfinite_seq = 0;
        slot->ended_at = step;
        out->flags = DS4_TOKEN_NONFINITE | DS4_TOKEN_ENDED;
        return;
    }
    out->flags |= DS4_TOKEN_SAMPLED;
    out->n_token = 1;
    out->token[0] = token;
    slot->sampled_at = step;
    slot->ended_at = -1; /* the newest record counts: a splice revives a sequence */
    slot->sampled = token;
    if (is_stop(slot, token, pos)) {
        slot->ended_at = step;
        out->flags |= DS4_TOKEN_ENDED;
    }
}

static void run_entry(struct ds4_scripted_stage *stage, const struct ds4_step *step,
                      const struct ds4_step_entry *entry, struct ds4_token_entry *out)
{
    struct ds4_scripted_slot *slot = &stage->slot[entry->slot];

    *out = (struct ds4_token_entry){.seq = entry->seq, .epoch = entry->epoch};
    if (!slot->open || slot->seq != entry->seq || slot->epoch != entry->epoch) {
        object(stage, "entry of a stranger", step->step_no, (int64_t)entry->seq, entry->epoch);
        return;
    }
    for (int32_t i = 0; i < entry->n_block; i++)
        slot->block[entry->first_block + i] = entry->block[i];
    if (entry->first_block > slot->n_block)
        object(stage, "hole in the block table", step->step_no, entry->first_block, slot->n_block);
    if (entry->first_block + entry->n_block > slot->n_block)
        slot->n_block = entry->first_block + entry->n_block;
    if (entry->from_step >= 0 && slot->ended_at >= 0 && slot->ended_at <= entry->from_step) {
        out->flags = DS4_TOKEN_SKIPPED;
        out->pos = (int32_t)slot->hash.len - 1;
        stage->n_skipped++;
        return;
    }
    truncate_to(stage, slot, entry->base_pos, step->step_no);
    if (entry->base_pos + entry->n_tok > entry->cap_tok ||
        entry->cap_tok > slot->n_block * DS4_BLOCK_TOK)
        object(stage, "rows outside the lease", step->step_no, entry->base_pos, entry->cap_tok);
    if (entry->from_step >= 0 && entry->from_step != slot->sampled_at)
        object(stage, "token from the wrong step", step->step_no, entry->from_step,
               slot->sampled_at);
    for (int32_t t = 0; t < entry->n_tok; t++) {
        int32_t pos = entry->base_pos + t;
        int32_t token = entry->from_step >= 0 ? slot->sampled : step->token[entry->first_tok + t];
        uint64_t h = mix(slot->hash.ptr[slot->hash.len - 1], token);

        if (DS4_VEC_PUSH(&slot->hash, h) != 0 ||
            (stage->next != NULL && DS4_VEC_PUSH(&slot->token, token) != 0))
            abort();
        *cell_of(stage, slot, pos) = h;
        stage->n_rows++;
    }
    out->pos = (int32_t)slot->hash.len - 1;
    if (out->pos > slot->hi)
        slot->hi = out->pos;
    if (entry->sample)
        sample(stage, slot, out, step->step_no);
}

bool ds4_scripted_answer(struct ds4_scripted_stage *stage, struct ds4_tokens_out *out)
{
    struct ds4_step *step;

    if (stage->queue.len == 0)
        return false;
    step = stage->queue.ptr[0];
    stage->queue.len--;
    memmove(stage->queue.ptr, stage->queue.ptr + 1, stage->queue.len * sizeof(*stage->queue.ptr));
    close_and_open(stage, step);
    for (int32_t i = 0; i < step->n_entry; i++)
        run_entry(stage, step, &step->entry[i], &stage->answer[i]);
    *out = (struct ds4_tokens_out){
        .generation = step->generation,
        .step_no = step->step_no,
        .n_entry = step->n_entry,
        .entry = stage->answer,
        .compute_ns = 1000,
    };
    free_step(step);
    return true;
}

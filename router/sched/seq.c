/* One running sequence (steps 5 and 12): which entry comes next and what its answer means.
 *
 * All numbers a worker sends are checked here, at birth: a position that is not the posted one means
 * that router and stages no longer agree about the state (invariant I6), which only a new generation
 * cures. */
#include "router/sched/seq.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

struct ds4_seq *ds4_seq_new(uint64_t id, const int32_t *prompt, int32_t n_prompt, int32_t max_pos,
                            int32_t start_pos, struct ds4_err *err)
{
    struct ds4_seq *seq = calloc(1, sizeof(*seq));

    assert(n_prompt > 0 && start_pos >= 0 && start_pos < n_prompt && max_pos > n_prompt);
    if (seq == NULL || DS4_VEC_RESERVE(&seq->token, (size_t)n_prompt + 1) != 0) {
        free(seq);
        ds4_fail(err, DS4_E_NOMEM, "no memory for a sequence of %d tokens", n_prompt);
        return NULL;
    }
    memcpy(seq->token.ptr, prompt, (size_t)n_prompt * sizeof(*prompt));
    seq->token.len = (size_t)n_prompt;
    seq->id = id;
    seq->state = DS4_SEQ_PREFILL;
    seq->n_prompt = n_prompt;
    seq->fill_end = n_prompt;
    seq->max_pos = max_pos;
    seq->n_posted = start_pos;
    seq->n_acked = start_pos;
    seq->hi = start_pos;
    seq->last_step = -1;
    seq->group = -1;
    return seq;
}

void ds4_seq_free(struct ds4_seq *seq)
{
    if (seq == NULL)
        return;
    DS4_VEC_DEINIT(&seq->token);
    DS4_VEC_DEINIT(&seq->point);
    DS4_VEC_DEINIT(&seq->mark);
    free(seq);
}

bool ds4_seq_wants_decode(const struct ds4_seq *seq)
{
    /* An entry at n_posted samples for n_posted + 1, which must be an allowed position. */
    return seq->state == DS4_SEQ_DECODE && !seq->paused && seq->n_posted + 1 < seq->max_pos;
}

bool ds4_seq_can_decode(const struct ds4_seq *seq)
{
    return ds4_seq_wants_decode(seq) && seq->n_posted <= (int32_t)seq->token.len;
}

bool ds4_seq_next_chunk(struct ds4_seq *seq, int32_t max_tok, struct ds4_pick *pick)
{
    int32_t base = seq->n_posted;
    int32_t end = seq->fill_end;

    if (seq->state != DS4_SEQ_PREFILL || base >= end || max_tok < 1)
        return false;
    if (end - base > max_tok) {
        end = base + max_tok;
        if (end / DS4_CHUNK_ALIGN_TOK * DS4_CHUNK_ALIGN_TOK > base)
            end = end / DS4_CHUNK_ALIGN_TOK * DS4_CHUNK_ALIGN_TOK;
    }
    *pick = (struct ds4_pick){
        .seq = seq,
        .kind = DS4_ENTRY_PREFILL,
        .base_pos = base,
        .n_tok = end - base,
        .sample = end == seq->fill_end,
        .from_step = -1,
    };
    return true;
}

void ds4_seq_next_decode(struct ds4_seq *seq, struct ds4_pick *pick)
{
    assert(ds4_seq_can_decode(seq));
    *pick = (struct ds4_pick){
        .seq = seq,
        .kind = DS4_ENTRY_DECODE,
        .base_pos = seq->n_posted,
        .n_tok = 1,
        .sample = true,
        .from_step = seq->n_posted < (int32_t)seq->token.len ? -1 : seq->last_step,
    };
}

void ds4_seq_posted(struct ds4_seq *seq, const struct ds4_pick *pick, int64_t step_no)
{
    assert(pick->base_pos == seq->n_posted);
    seq->n_posted += pick->n_tok;
    seq->n_flight++;
    seq->last_step = step_no;
}

/* Is the record about this sequence, and are the stages where it was posted to bring them? */
static int check_place(const struct ds4_seq *seq, int32_t pos, const struct ds4_token_entry *entry,
                       struct ds4_err *err)
{
    if (entry->seq != seq->id || entry->epoch != seq->lease->epoch)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "sequence %" PRIu64 " epoch %u acknowledged, %" PRIu64 " epoch %u posted",
                        entry->seq, entry->epoch, seq->id, seq->lease->epoch);
    if ((entry->flags & DS4_TOKEN_SKIPPED) == 0 && entry->pos != pos)
        return ds4_fail(err, DS4_E_PROTOCOL, "sequence %" PRIu64 " is at %d, %d was posted",
                        seq->id, entry->pos, pos);
    return 0;
}

int ds4_seq_acked(struct ds4_seq *seq, int32_t base_pos, int32_t n_tok, bool sample, int32_t vocab,
                  const struct ds4_token_entry *entry, struct ds4_err *err)
{
    bool skipped = (entry->flags & DS4_TOKEN_SKIPPED) != 0;
    bool bad_row = (entry->flags & DS4_TOKEN_NONFINITE) != 0;
    int32_t want = sample && !skipped && !bad_row ? 1 : 0;

    if (check_place(seq, base_pos + n_tok, entry, err) != 0)
        return -1;
    if (entry->n_token != want || ((entry->flags & DS4_TOKEN_SAMPLED) != 0) != (want > 0))
        return ds4_fail(err, DS4_E_PROTOCOL, "sequence %" PRIu64 " brought %d tokens instead of %d",
                        seq->id, entry->n_token, want);
    for (int32_t t = 0; t < entry->n_token; t++)
        if (entry->token[t] < 0 || entry->token[t] >= vocab)
            return ds4_fail(err, DS4_E_PROTOCOL, "sequence %" PRIu64 " sampled %d of %d ids",
                            seq->id, entry->token[t], vocab);
    /* A token is news only for the position right after the known ones. */
    if (want > 0 && base_pos + n_tok != (int32_t)seq->token.len)
        return ds4_fail(err, DS4_E_PROTOCOL, "sequence %" PRIu64 " sampled position %d, %zu known",
                        seq->id, base_pos + n_tok, seq->token.len);
    for (int32_t t = 0; t < entry->n_token; t++)
        if (DS4_VEC_PUSH(&seq->token, entry->token[t]) != 0)
            return ds4_fail(err, DS4_E_NOMEM, "no memory for the tokens of a sequence");
    if (!skipped) {
        seq->n_acked = entry->pos;
        if (entry->pos > seq->hi)
            seq->hi = entry->pos;
    }
    if (bad_row)
        seq->spoiled = true;
    return 0;
}

int ds4_seq_acked_stale(struct ds4_seq *seq, int32_t base_pos, int32_t n_tok,
                        const struct ds4_token_entry *entry, struct ds4_err *err)
{
    if (check_place(seq, base_pos + n_tok, entry, err) != 0)
        return -1;
    if ((entry->flags & DS4_TOKEN_SKIPPED) != 0)
        return 0;
    /* Rows behind the cut are none of this sequence's, but they were written. */
    seq->n_acked = entry->pos < seq->cut ? entry->pos : seq->cut;
    if (entry->pos > seq->hi)
        seq->hi = entry->pos;
    if ((entry->flags & DS4_TOKEN_NONFINITE) != 0)
        seq->spoiled = true;
    return 0;
}

bool ds4_seq_can_cut(const struct ds4_seq *seq, int32_t keep, int32_t hot_window_tok)
{
    int32_t hi = seq->n_posted > seq->hi ? seq->n_posted : seq->hi;

    return keep >= seq->n_posted || (keep >= seq->install_pos && hi - keep <= hot_window_tok);
}

int ds4_seq_splice(struct ds4_seq *seq, int32_t keep, const int32_t *token, int32_t n,
                   struct ds4_err *err)
{
    assert(seq->state == DS4_SEQ_DECODE && keep >= seq->n_prompt && n > 0 &&
           keep <= (int32_t)seq->token.len && keep + n < seq->max_pos);
    if (DS4_VEC_RESERVE(&seq->token, (size_t)keep + (size_t)n) != 0)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for the tokens of a sequence");
    memcpy(seq->token.ptr + keep, token, (size_t)n * sizeof(*token));
    seq->token.len = (size_t)keep + (size_t)n;
    seq->fill_end = keep + n;
    seq->cut = keep;
    if (seq->n_posted > keep) {
        /* in flight: those rows will have been written when the next entry runs */
        if (seq->n_posted > seq->hi)
            seq->hi = seq->n_posted;
        seq->n_posted = keep;
    }
    if (seq->n_acked > keep)
        seq->n_acked = keep;
    seq->state = DS4_SEQ_PREFILL;
    return 0;
}

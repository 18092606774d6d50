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
    seq->n_told = n_prompt;
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
        .reach = end,
        .sample = end == seq->fill_end,
        .from_step = -1,
    };
    return true;
}

void ds4_seq_next_decode(struct ds4_seq *seq, int32_t n_draft, struct ds4_pick *pick)
{
    bool known = seq->n_posted < (int32_t)seq->token.len;
    int32_t last_row = seq->max_pos - 2; /* it samples for the last allowed position */

    assert(ds4_seq_can_decode(seq));
    n_draft = n_draft < seq->max_draft ? n_draft : seq->max_draft;
    n_draft = n_draft < last_row - seq->n_posted ? n_draft : last_row - seq->n_posted;
    *pick = (struct ds4_pick){
        .seq = seq,
        .kind = n_draft > 0 ? DS4_ENTRY_VERIFY : DS4_ENTRY_DECODE,
        .base_pos = seq->n_posted,
        .n_tok = 1 + n_draft,
        .reach = seq->n_posted + seq->n_ahead + 1 + n_draft,
        .sample = true,
        .from_step = known && n_draft == 0 ? -1 : seq->last_step,
    };
    if (pick->reach > last_row + 1)
        pick->reach = last_row + 1;
}

int32_t ds4_seq_reach(const struct ds4_seq *seq)
{
    int32_t posted = seq->n_posted + seq->n_ahead;

    return posted > seq->hi ? posted : seq->hi;
}

void ds4_seq_posted(struct ds4_seq *seq, const struct ds4_pick *pick, int64_t step_no)
{
    bool verify = pick->kind == DS4_ENTRY_VERIFY;

    assert(pick->base_pos == seq->n_posted);
    seq->n_posted += verify ? 1 : pick->n_tok;
    seq->n_ahead += verify ? pick->n_tok - 1 : 0;
    seq->n_flight++;
    seq->last_step = step_no;
}

/* Is the record about this sequence? */
static int check_owner(const struct ds4_seq *seq, const struct ds4_token_entry *entry,
                       struct ds4_err *err)
{
    if (entry->seq != seq->id || entry->epoch != seq->lease->epoch)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "sequence %" PRIu64 " epoch %u acknowledged, %" PRIu64 " epoch %u posted",
                        entry->seq, entry->epoch, seq->id, seq->lease->epoch);
    return 0;
}

/* Rows of the entry that were run for certain: those of its tokens, and one that was not a number. */
static int32_t rows_kept(const struct ds4_pick *posted, const struct ds4_token_entry *entry)
{
    if (posted->kind == DS4_ENTRY_PREFILL)
        return posted->n_tok;
    return entry->n_token + ((entry->flags & DS4_TOKEN_NONFINITE) != 0 ? 1 : 0);
}

/* Did the entry run as many rows as it was allowed to, from `base` on, and are the stages where that brings
 * them?  The tokens are those of its rows. */
static int check_rows(const struct ds4_seq *seq, const struct ds4_pick *posted, int32_t base,
                      const struct ds4_token_entry *entry, struct ds4_err *err)
{
    int32_t kept = rows_kept(posted, entry);
    bool bad_row = (entry->flags & DS4_TOKEN_NONFINITE) != 0;
    int32_t most = !posted->sample ? 0 : posted->kind == DS4_ENTRY_VERIFY ? posted->n_tok : 1;
    int32_t least = posted->sample && !bad_row ? 1 : 0;

    if (entry->n_token < least || entry->n_token > most - (bad_row && posted->sample ? 1 : 0) ||
        ((entry->flags & DS4_TOKEN_SAMPLED) != 0) != (entry->n_token > 0))
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "sequence %" PRIu64 " brought %d tokens instead of %d to %d", seq->id,
                        entry->n_token, least, most);
    if (entry->pos != base + kept || base < posted->base_pos ||
        kept + entry->n_undone > posted->n_tok || entry->pos + entry->n_undone > posted->reach)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "sequence %" PRIu64 " is at %d with %d rows undone, %d rows from %d posted",
                        seq->id, entry->pos, entry->n_undone, posted->n_tok, base);
    return 0;
}

static void note_written(struct ds4_seq *seq, const struct ds4_token_entry *entry)
{
    if (entry->pos + entry->n_undone > seq->hi)
        seq->hi = entry->pos + entry->n_undone;
    if ((entry->flags & DS4_TOKEN_NONFINITE) != 0)
        seq->spoiled = true;
}

int ds4_seq_acked(struct ds4_seq *seq, const struct ds4_pick *posted, int32_t vocab,
                  const struct ds4_token_entry *entry, struct ds4_err *err)
{
    bool decode = posted->kind != DS4_ENTRY_PREFILL;
    bool skipped = (entry->flags & DS4_TOKEN_SKIPPED) != 0;
    /* A decode runs the newest token, wherever the drafts before it have got. */
    int32_t base = decode ? (int32_t)seq->token.len - 1 : posted->base_pos;

    if (check_owner(seq, entry, err) != 0)
        return -1;
    if (skipped &&
        (entry->n_token != 0 || entry->n_undone != 0 || (entry->flags & DS4_TOKEN_SAMPLED) != 0))
        return ds4_fail(err, DS4_E_PROTOCOL, "sequence %" PRIu64 " brought %d tokens of a no-op",
                        seq->id, entry->n_token);
    if (!skipped && check_rows(seq, posted, base, entry, err) != 0)
        return -1;
    for (int32_t t = 0; t < entry->n_token; t++)
        if (entry->token[t] < 0 || entry->token[t] >= vocab)
            return ds4_fail(err, DS4_E_PROTOCOL, "sequence %" PRIu64 " sampled %d of %d ids",
                            seq->id, entry->token[t], vocab);
    /* A token is news only for the position right after the known ones. */
    if (!decode && entry->n_token > 0 && entry->pos != (int32_t)seq->token.len)
        return ds4_fail(err, DS4_E_PROTOCOL, "sequence %" PRIu64 " sampled position %d, %zu known",
                        seq->id, entry->pos, seq->token.len);
    for (int32_t t = 0; t < entry->n_token; t++)
        if (DS4_VEC_PUSH(&seq->token, entry->token[t]) != 0)
            return ds4_fail(err, DS4_E_NOMEM, "no memory for the tokens of a sequence");
    if (posted->kind == DS4_ENTRY_VERIFY) {
        seq->n_ahead -= posted->n_tok - 1;
        seq->n_posted += entry->n_token > 0 ? entry->n_token - 1 : 0;
    }
    if (skipped)
        return 0;
    seq->n_acked = entry->pos;
    note_written(seq, entry);
    return 0;
}

int ds4_seq_acked_stale(struct ds4_seq *seq, const struct ds4_pick *posted,
                        const struct ds4_token_entry *entry, struct ds4_err *err)
{
    if (check_owner(seq, entry, err) != 0)
        return -1;
    if ((entry->flags & DS4_TOKEN_SKIPPED) != 0)
        return 0;
    /* Where it began was known to tokens that are gone. */
    if (check_rows(seq, posted, entry->pos - rows_kept(posted, entry), entry, err) != 0)
        return -1;
    /* Rows behind the cut are none of this sequence's, but they were written. */
    seq->n_acked = entry->pos < seq->cut ? entry->pos : seq->cut;
    note_written(seq, entry);
    return 0;
}

bool ds4_seq_can_cut(const struct ds4_seq *seq, int32_t keep, int32_t hot_window_tok)
{
    return keep >= seq->n_posted + seq->n_ahead ||
           (keep >= seq->install_pos && ds4_seq_reach(seq) - keep <= hot_window_tok);
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
    seq->n_told = keep + n;
    seq->fill_end = keep + n;
    seq->cut = keep;
    if (seq->n_posted + seq->n_ahead > keep) {
        /* in flight: those rows will have been written when the next entry runs */
        seq->hi = ds4_seq_reach(seq);
        seq->n_posted = keep;
    }
    seq->n_ahead = 0;
    if (seq->n_acked > keep)
        seq->n_acked = keep;
    seq->state = DS4_SEQ_PREFILL;
    return 0;
}

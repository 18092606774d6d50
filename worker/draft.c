/* Drafts of the last stage (house list, step 10): proposing, checking, resting.
 *
 * What a draft brings and costs: an accepted one saves a step; a row of a wrong one costs a part of a step, more
 * on a card that reads other experts for it than on one that reads the same.  Credit counts in tenths of a
 * step: + 10 per accepted draft, - ROW_COST per draft run.  Three tenths is what a row of a mixture of experts
 * was measured to add to a step of few rows (bench/RESULTS.md); so drafts pay from an acceptance of 0.3 on.
 *
 * Invariant: what leaves propose() is an id of the vocabulary, and never so many that the rows would pass
 * the sequence's last position. */
#include "worker/draft.h"

#include "common/fault.h"

#include <stdlib.h>
#include <string.h>

#define STEP_COST    10 /* of a decode step, by which all is measured */
#define ROW_COST     3
#define FIRST_CREDIT 60  /* two and a half full drafts of 8, all wrong */
#define MOST_CREDIT  200 /* what a long copy earns is soon spent where the text goes on by itself */
#define RETRY_CREDIT 24
#define FIRST_REST   64 /* tokens */
#define LONGEST_REST 1024

static void ngram_start(void *owner, int32_t slot, int32_t from)
{
    ds4_ngram_start(owner, slot, from);
}

static void ngram_note(void *owner, int32_t slot, const int32_t *history, int32_t n)
{
    ds4_ngram_note(owner, slot, history, n);
}

static void ngram_forget(void *owner, int32_t slot, const int32_t *history, int32_t keep)
{
    ds4_ngram_forget(owner, slot, history, keep);
}

static int32_t ngram_propose(void *owner, int32_t slot, const int32_t *history, int32_t n,
                             int32_t max, int32_t *draft)
{
    return ds4_ngram_propose(owner, slot, history, n, max, draft);
}

size_t ds4_draft_bytes(const struct ds4_draft_config *config)
{
    if (config->max == 0)
        return 0;
    return (size_t)config->n_slot * sizeof(struct ds4_draft_seq) +
           ds4_ngram_bytes(config->n_slot, config->max_context);
}

int ds4_draft_init(struct ds4_draft *d, const struct ds4_draft_config *config, struct ds4_err *err)
{
    *d = (struct ds4_draft){.max = config->max, .n_vocab = config->n_vocab};
    if (config->max == 0)
        return 0;
    d->by = (struct ds4_drafter){&d->ngram, ngram_start, ngram_note, ngram_forget, ngram_propose};
    if (ds4_ngram_init(&d->ngram, config->n_slot, config->max_context, config->min_match, err) != 0)
        return -1;
    d->seq = calloc((size_t)config->n_slot, sizeof(*d->seq));
    if (d->seq == NULL) {
        ds4_draft_deinit(d);
        return ds4_fail(err, DS4_E_NOMEM, "no memory for drafts of %d sequences", config->n_slot);
    }
    return 0;
}

void ds4_draft_deinit(struct ds4_draft *d)
{
    ds4_ngram_deinit(&d->ngram);
    free(d->seq);
    memset(d, 0, sizeof(*d));
}

void ds4_draft_open(struct ds4_draft *d, const struct ds4_seq_open *open)
{
    if (d->max == 0)
        return;
    d->seq[open->slot] =
        (struct ds4_draft_seq){.max = open->max_draft < d->max ? open->max_draft : d->max,
                               .max_pos = open->max_pos,
                               .credit = FIRST_CREDIT,
                               .rest = FIRST_REST};
}

void ds4_draft_start(struct ds4_draft *d, int32_t slot, int32_t from)
{
    if (d->max > 0)
        d->by.start(d->by.owner, slot, from);
}

void ds4_draft_note(struct ds4_draft *d, int32_t slot, const int32_t *history, int32_t n)
{
    if (d->max > 0)
        d->by.note(d->by.owner, slot, history, n);
}

void ds4_draft_forget(struct ds4_draft *d, int32_t slot, const int32_t *history, int32_t keep)
{
    if (d->max > 0)
        d->by.forget(d->by.owner, slot, history, keep);
}

void ds4_draft_propose(struct ds4_draft *d, int32_t slot, const int32_t *history, int32_t n,
                       struct ds4_drafts *out)
{
    const struct ds4_draft_seq *q;
    int32_t max, got;

    out->n = 0;
    out->n_bad = 0;
    if (d->max == 0)
        return;
    q = &d->seq[slot];
    max = q->max;
    /* The row of draft i has position n + i and samples for the one after it. */
    if (max > q->max_pos - 1 - n)
        max = q->max_pos - 1 - n;
    if (max < 1 || n < q->rest_until)
        return;
    got = d->by.propose(d->by.owner, slot, history, n, max, out->token);
    got = got < max ? got : max;
    if (got > 0 && DS4_FAULT_POINT(OOV_DRAFT))
        out->token[got - 1] = d->n_vocab;
    while (out->n < got && out->token[out->n] >= 0 && out->token[out->n] < d->n_vocab)
        out->n++;
    out->n_bad = out->n < got ? 1 : 0; /* those behind it were to follow it */
}

bool ds4_draft_judge(struct ds4_draft *d, int32_t slot, int32_t n_draft, int32_t n_accepted,
                     int32_t n)
{
    struct ds4_draft_seq *q;

    if (d->max == 0 || n_draft == 0)
        return false;
    q = &d->seq[slot];
    q->credit += STEP_COST * n_accepted - ROW_COST * n_draft;
    if (q->credit >= MOST_CREDIT) {
        q->credit = MOST_CREDIT;
        q->rest = FIRST_REST;
    }
    if (q->credit >= 0)
        return false;
    q->rest_until = n + q->rest;
    q->rest = 2 * q->rest < LONGEST_REST ? 2 * q->rest : LONGEST_REST;
    q->credit = RETRY_CREDIT;
    return true;
}

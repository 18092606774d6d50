/* Index of token groups (house list, step 10; the drafter of method `ngram`).
 *
 * The chains are a stack: a group is put in at the end and taken out at the end, newest first, so that taking
 * back is exact and needs no search; the hash of a place is made from the tokens again, which is why they
 * must still be there.  Stale places are then never met, and a proposal does not depend on branches that were
 * tried and undone.
 * Rejected: a suffix automaton, exact for any length but thirty times the memory and not to be cut back; one
 * place per group, which a common group of a long prompt points at the wrong file.
 *
 * Invariant: prev[p] <= p for every place in a chain, so that chains end; a hash is trusted for nothing. */
#include "worker/ngram.h"

#include <stdlib.h>
#include <string.h>

#define MIN_HEADS 1024
#define MAX_HEADS 65536

static int32_t heads_for(int32_t max_context)
{
    int32_t n = MIN_HEADS;

    while (n < max_context && n < MAX_HEADS)
        n *= 2;
    return n;
}

size_t ds4_ngram_bytes(int32_t n_slot, int32_t max_context)
{
    return (size_t)n_slot *
           (sizeof(struct ds4_ngram_seq) +
            sizeof(int32_t) * ((size_t)heads_for(max_context) + (size_t)max_context));
}

int ds4_ngram_init(struct ds4_ngram *g, int32_t n_slot, int32_t max_context, int32_t min_match,
                   struct ds4_err *err)
{
    size_t n = (size_t)n_slot;

    *g = (struct ds4_ngram){
        .min_match = min_match, .n_slot = n_slot, .n_head = heads_for(max_context)};
    g->seq = calloc(n, sizeof(*g->seq));
    g->heads = calloc(n * (size_t)g->n_head, sizeof(*g->heads));
    g->prevs = calloc(n * (size_t)max_context, sizeof(*g->prevs));
    if (g->seq == NULL || g->heads == NULL || g->prevs == NULL) {
        ds4_ngram_deinit(g);
        return ds4_fail(err, DS4_E_NOMEM, "no memory for drafts of %d sequences: %zu bytes", n_slot,
                        ds4_ngram_bytes(n_slot, max_context));
    }
    for (size_t s = 0; s < n; s++) {
        g->seq[s].head = g->heads + s * (size_t)g->n_head;
        g->seq[s].prev = g->prevs + s * (size_t)max_context;
    }
    return 0;
}

void ds4_ngram_deinit(struct ds4_ngram *g)
{
    free(g->prevs);
    free(g->heads);
    free(g->seq);
    memset(g, 0, sizeof(*g));
}

/* Of the min_match tokens that end with history[p]. */
static int32_t *head_of(const struct ds4_ngram *g, const struct ds4_ngram_seq *q,
                        const int32_t *history, int32_t p)
{
    uint32_t h = 0;

    for (int32_t i = p - g->min_match + 1; i <= p; i++)
        h = (h ^ (uint32_t)history[i]) * UINT32_C(0x9E3779B1);
    return &q->head[(h ^ h >> 16) & (uint32_t)(g->n_head - 1)];
}

void ds4_ngram_start(struct ds4_ngram *g, int32_t slot, int32_t from)
{
    struct ds4_ngram_seq *q = &g->seq[slot];

    if (q->n > q->from)
        memset(q->head, 0, (size_t)g->n_head * sizeof(*q->head));
    q->from = q->n = from;
}

void ds4_ngram_note(struct ds4_ngram *g, int32_t slot, const int32_t *history, int32_t n)
{
    struct ds4_ngram_seq *q = &g->seq[slot];

    for (; q->n < n; q->n++) {
        int32_t p = q->n;
        int32_t *head;

        if (p - q->from + 1 < g->min_match)
            continue;
        head = head_of(g, q, history, p);
        q->prev[p] = *head;
        *head = p + 1;
    }
}

void ds4_ngram_forget(struct ds4_ngram *g, int32_t slot, const int32_t *history, int32_t keep)
{
    struct ds4_ngram_seq *q = &g->seq[slot];

    if (keep <= q->from) {
        ds4_ngram_start(g, slot, keep);
        return;
    }
    for (; q->n > keep; q->n--) {
        int32_t p = q->n - 1;

        if (p - q->from + 1 >= g->min_match)
            *head_of(g, q, history, p) = q->prev[p];
    }
}

/* How many tokens that end with history[a] are those that end with history[b], a < b. */
static int32_t match_len(const int32_t *history, int32_t from, int32_t a, int32_t b)
{
    int32_t n = 0;

    while (n < DS4_NGRAM_MATCH && a - n >= from && history[a - n] == history[b - n])
        n++;
    return n;
}

int32_t ds4_ngram_propose(struct ds4_ngram *g, int32_t slot, const int32_t *history, int32_t n,
                          int32_t max, int32_t *draft)
{
    const struct ds4_ngram_seq *q = &g->seq[slot];
    int32_t best = 0, at = 0, place;

    ds4_ngram_note(g, slot, history, n);
    if (n - q->from < g->min_match || q->n != n)
        return 0;
    place = q->prev[n - 1]; /* the newest group is the one that is looked for */
    for (int32_t i = 0; i < DS4_NGRAM_TRIES && place > 0 && best < DS4_NGRAM_MATCH; i++) {
        int32_t len = match_len(history, q->from, place - 1, n - 1);

        if (len > best) {
            best = len;
            at = place;
        }
        place = q->prev[place - 1];
    }
    if (best < g->min_match)
        return 0;
    max = max < best ? max : best;
    for (int32_t i = 0; i < max; i++)
        draft[i] = at + i < n ? history[at + i] : draft[at + i - n];
    return max;
}

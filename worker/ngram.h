/* Prompt lookup: what followed the last time the newest tokens stood somewhere in the sequence.
 *
 * Per slot an index of every group of min_match tokens by hash, the places of a group chained from the newest
 * back, as in LZ77.  It costs no weights and no device time, and is right where a model copies: a file that
 * is written again with a few lines changed, a quotation, a name.
 *
 * Memory: ds4_ngram_bytes, all of it taken by init.  Cost: one step of a chain per token noted or forgotten; a
 * proposal looks at DS4_NGRAM_TRIES places of DS4_NGRAM_MATCH tokens at most.  Results are a function of the
 * tokens from the start on, whatever was tried and forgotten in between. */
#ifndef DS4_WORKER_NGRAM_H
#define DS4_WORKER_NGRAM_H

#include "common/err.h"

#include <stddef.h>
#include <stdint.h>

#define DS4_NGRAM_TRIES     32
#define DS4_NGRAM_MATCH     64 /* longer matches are not told apart */
#define DS4_NGRAM_MIN_MATCH 1
#define DS4_NGRAM_MAX_MATCH 16 /* largest min_match */

struct ds4_ngram_seq {
    int32_t from;  /* tokens before it are not known */
    int32_t n;     /* those before it are in the index */
    int32_t *head; /* [n_head] newest place of a hash, plus one; 0 = none */
    int32_t *prev; /* [max_context] place before this one, plus one */
};

struct ds4_ngram {
    int32_t min_match;
    int32_t n_slot;
    int32_t n_head;            /* a power of two */
    struct ds4_ngram_seq *seq; /* [n_slot], owned */
    int32_t *heads;            /* owned */
    int32_t *prevs;            /* owned */
};

size_t ds4_ngram_bytes(int32_t n_slot, int32_t max_context);
/* min_match in [DS4_NGRAM_MIN_MATCH, DS4_NGRAM_MAX_MATCH].  DS4_E_NOMEM. */
int ds4_ngram_init(struct ds4_ngram *g, int32_t n_slot, int32_t max_context, int32_t min_match,
                   struct ds4_err *err) DS4_MUST_CHECK;
void ds4_ngram_deinit(struct ds4_ngram *g);

/* The slot's tokens begin at `from`: what lies before it is somebody else's. */
void ds4_ngram_start(struct ds4_ngram *g, int32_t slot, int32_t from);
/* history[0 .. n) is known, but for what lies before the start.  Fewer than noted before: nothing happens. */
void ds4_ngram_note(struct ds4_ngram *g, int32_t slot, const int32_t *history, int32_t n);
/* Tokens from `keep` on are taken back.  Call it while `history` still holds them. */
void ds4_ngram_forget(struct ds4_ngram *g, int32_t slot, const int32_t *history, int32_t keep);

/* Notes history[0 .. n) and writes up to `max` tokens that may follow; returns how many.  No more than
 * the match is long: a copy is trusted as far ahead as it has been followed.  Behind the end of the history a
 * proposal goes on with itself, so that a period is continued. */
int32_t ds4_ngram_propose(struct ds4_ngram *g, int32_t slot, const int32_t *history, int32_t n,
                          int32_t max, int32_t *draft);

#endif

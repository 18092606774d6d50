/* Speculative decoding: what the last stage proposes, and whether it is worth it.
 *
 * After it has sampled, the last stage proposes up to k tokens to follow.  They travel in the token record to
 * every stage; the sequence's next VERIFY entry runs them behind the newest token, all rows in one step, and
 * the sampler goes through the rows in order: a draft stays if it is the token that its row would have given
 * anyway.  The text is therefore that without drafts, at any temperature and with any penalty; a drafter that is
 * wrong costs rows, never words.
 *
 *   open -> [start] -> note ... -> propose -> (step) -> judge -> propose ...
 *
 * The history of a slot begins where its sequence began to be computed: of what lies before a point the last
 * stage has the rows and not the tokens, so nothing is drafted from there.
 *
 * A sequence whose drafts cost more than they bring rests for a number of tokens, twice as many each
 * time.  That depends on its tokens and drafts alone, so it is the same in every run. */
#ifndef DS4_WORKER_DRAFT_H
#define DS4_WORKER_DRAFT_H

#include "common/err.h"
#include "proto/message.h"
#include "worker/ngram.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Who proposes; all calls about one slot's tokens, see worker/ngram.h.  A test may put its own in. */
struct ds4_drafter {
    void *owner;
    void (*start)(void *owner, int32_t slot, int32_t from);
    void (*note)(void *owner, int32_t slot, const int32_t *history, int32_t n);
    void (*forget)(void *owner, int32_t slot, const int32_t *history, int32_t keep);
    /* Whatever it writes is checked afterwards. */
    int32_t (*propose)(void *owner, int32_t slot, const int32_t *history, int32_t n, int32_t max,
                       int32_t *draft);
};

struct ds4_draft_seq {
    int32_t max;        /* of the open; 0: none are wanted */
    int32_t max_pos;    /* of the open */
    int32_t credit;     /* in tenths of a row, see draft.c */
    int32_t rest;       /* tokens of the next rest */
    int32_t rest_until; /* position; no drafts before it */
};

struct ds4_draft {
    int32_t max; /* drafts at once; 0: there is no drafter, and nothing below is there */
    int32_t n_vocab;
    struct ds4_drafter by;
    struct ds4_ngram ngram;
    struct ds4_draft_seq *seq; /* [n_slot], owned */
};

struct ds4_drafts {
    int32_t n;
    int32_t n_bad; /* dropped: no id of the vocabulary */
    int32_t token[DS4_MAX_DRAFT];
};

struct ds4_draft_config {
    int32_t max;       /* 0: no drafts, and no memory */
    int32_t min_match; /* of the n-gram drafter */
    int32_t n_slot;
    int32_t max_context;
    int32_t n_vocab;
};

/* Host bytes that init takes. */
size_t ds4_draft_bytes(const struct ds4_draft_config *config);
int ds4_draft_init(struct ds4_draft *d, const struct ds4_draft_config *config,
                   struct ds4_err *err) DS4_MUST_CHECK;
void ds4_draft_deinit(struct ds4_draft *d);

/* The slot has a new owner, which begins with full credit. */
void ds4_draft_open(struct ds4_draft *d, const struct ds4_seq_open *open);
/* The slot's tokens before `from` are not in its history. */
void ds4_draft_start(struct ds4_draft *d, int32_t slot, int32_t from);
/* history[0 .. n) is known. */
void ds4_draft_note(struct ds4_draft *d, int32_t slot, const int32_t *history, int32_t n);
/* An entry is about to overwrite the history from `keep` on. */
void ds4_draft_forget(struct ds4_draft *d, int32_t slot, const int32_t *history, int32_t keep);

/* Drafts to follow history[0 .. n), whose last token was just sampled: no more than leave room for a token
 * below the sequence's last position, none while it rests. */
void ds4_draft_propose(struct ds4_draft *d, int32_t slot, const int32_t *history, int32_t n,
                       struct ds4_drafts *out);
/* Of n_draft drafts that were run n_accepted were right; the sequence has n tokens now.  True if it rests
 * from here on. */
bool ds4_draft_judge(struct ds4_draft *d, int32_t slot, int32_t n_draft, int32_t n_accepted,
                     int32_t n);

#endif

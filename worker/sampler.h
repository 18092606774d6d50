/* A row of logits -> a token (house list, step 10), on the host, in one thread.
 *
 * The result depends on the logits, the sampling parameters, the tokens before and (seed, position);
 * not on the batch, earlier calls or time, so a replayed or re-batched sequence gets the same text.
 * A token id is an index of the row by construction: none outside the vocabulary can leave. */
#ifndef DS4_WORKER_SAMPLER_H
#define DS4_WORKER_SAMPLER_H

#include "common/err.h"
#include "proto/message.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Sampling of one slot: a copy of what the open said, in storage that is never reallocated. */
struct ds4_sampler_seq {
    struct ds4_sampling param; /* its arrays point into this struct's storage */
    int32_t n_prompt;
    int32_t n_stop;
    int32_t stop_id[DS4_MAX_STOP_IDS];
    bool ignore_stop;
    int32_t max_pos;
    int32_t *bias_id; /* [DS4_MAX_LOGIT_BIAS] */
    float *bias;      /* [DS4_MAX_LOGIT_BIAS] */
    uint8_t *allowed; /* one bit per id */
    int32_t forced_id[DS4_MAX_FORCED_IDS];
};

struct ds4_sampler {
    int32_t n_vocab;
    int32_t n_slot;
    struct ds4_sampler_seq *seq; /* [n_slot], owned */
    float *logit;                /* [n_vocab] working copy of a row */
    float *weight;               /* [n_vocab] */
    int32_t *order;              /* [n_vocab] candidates */
    int32_t *count;              /* [n_vocab], all zero between calls */
};

/* Host bytes that init takes. */
size_t ds4_sampler_bytes(int32_t n_vocab, int32_t n_slot);
int ds4_sampler_init(struct ds4_sampler *s, int32_t n_vocab, int32_t n_slot,
                     struct ds4_err *err) DS4_MUST_CHECK;
void ds4_sampler_deinit(struct ds4_sampler *s);

/* Takes a copy of the sequence's parameters.  DS4_E_PROTOCOL for an id outside the vocabulary, too
 * many of them, or a number that is not finite or out of range: the router checked all that. */
int ds4_sampler_open(struct ds4_sampler *s, const struct ds4_seq_open *open,
                     struct ds4_err *err) DS4_MUST_CHECK;

/* Picks the token for position n_history.
 *
 *   logits  [n_vocab] f32 of the last row, as the head left them
 *   history [n_history] ids of the sequence; those from n_prompt on are new
 *
 * Order: finite check; logprobs of the raw row; forced token; penalties; bias; masks; greedy, or
 * temperature, min_p, top_k, top_p, draw.  When masks leave nothing, the soft ones (min_new_tok,
 * think_close_guard) give way to `allowed`.  Ties go to the lower id.
 *
 * Fills out's flags (SAMPLED, perhaps ENDED; or NONFINITE, ENDED and no token), n_token, token[0], logprobs; leaves
 * seq, epoch and pos alone. */
void ds4_sampler_pick(struct ds4_sampler *s, int32_t slot, const float *logits,
                      const int32_t *history, int32_t n_history, struct ds4_token_entry *out);

/* Are all values of the row numbers? */
bool ds4_sampler_is_finite(const struct ds4_sampler *s, const float *logits);

/* The uniform number in [0, 1) of a position: Philox 4x32-10 keyed by the seed. */
double ds4_sampler_uniform(uint64_t seed, uint64_t position);

#endif

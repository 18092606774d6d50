/* Which sequences go into the next step (step 5): decodes first, prefill chunks in the room left.
 *
 * Decoding sequences are split over min(stages, sequences) groups whose sizes differ by at most one;
 * a group is one micro-batch.  Membership is sticky: it changes only when somebody joins or leaves.  A
 * group is posted when all its members can be, so it never falls apart into small steps; the group
 * whose last step is oldest goes first.
 *
 * Prompts are computed first come, first served, in consecutive chunks; after `n_stage` chunks in a
 * row a prompt goes to the end of the line, so that a long one delays the others by a bounded number of
 * steps.  Short prompts share a step.
 *
 * With drafts a decode entry may take 1 + max_draft rows; members of a group share the rows a step has for
 * them (ds4_draft_rows) evenly, and what entries may take is charged to the step, though they may take less.  Decisions depend on nothing but the calls: no clock, no chance. */
#ifndef DS4_ROUTER_SCHED_BATCH_H
#define DS4_ROUTER_SCHED_BATCH_H

#include "common/err.h"
#include "common/vec.h"
#include "router/sched/seq.h"

#include <stdbool.h>
#include <stdint.h>

#define DS4_MAX_GROUPS 128

DS4_VEC_TYPE(ds4_seqs, struct ds4_seq *);

struct ds4_batch_group {
    struct ds4_seqs member;
    int64_t last_step; /* -1 never posted */
};

struct ds4_batch {
    int32_t n_stage;
    int32_t max_entry;    /* per step */
    int32_t max_step_tok; /* rows per step */
    int32_t chunk_tok;    /* prompt rows per step */
    int32_t mixed_tok;    /* and of a step that has decodes: at most chunk_tok */
    int32_t max_draft;    /* drafts of a decode entry; 0 until the caller sets it */
    int32_t n_decode;
    int32_t n_group;
    struct ds4_batch_group group[DS4_MAX_GROUPS];
    struct ds4_seqs prefill; /* in order of service */
    int32_t turn;            /* chunks the first of them got in a row */
};

void ds4_batch_init(struct ds4_batch *batch, int32_t n_stage, int32_t max_entry,
                    int32_t max_step_tok, int32_t chunk_tok);
/* Prompt rows that wait to be posted. */
int64_t ds4_batch_waiting_tok(const struct ds4_batch *batch);
void ds4_batch_deinit(struct ds4_batch *batch);

/* Sequences are borrowed until removed.  Adding needs memory; -1 with DS4_E_NOMEM. */
int ds4_batch_add_prefill(struct ds4_batch *batch, struct ds4_seq *seq,
                          struct ds4_err *err) DS4_MUST_CHECK;
/* The prompt is posted: from the prefill line to the smallest decode group. */
int ds4_batch_start_decode(struct ds4_batch *batch, struct ds4_seq *seq,
                           struct ds4_err *err) DS4_MUST_CHECK;
/* From wherever it is; nothing if it is nowhere. */
void ds4_batch_remove(struct ds4_batch *batch, struct ds4_seq *seq);

/* Fills pick[max_entry] for step step_no and returns their number; 0 = nothing to post now.  Books
 * group and turn, not the sequences: the caller posts and calls ds4_seq_posted. */
int32_t ds4_batch_next(struct ds4_batch *batch, int64_t step_no, struct ds4_pick *pick);

#endif

/* One running sequence: its tokens, how much of them is posted and acknowledged, its lease.
 *
 *   token[0 .. len)        known: the prompt, then what was sampled
 *   position < n_acked     state exists on every stage
 *   position < n_posted    state will exist once the posted steps are done
 *
 * The next entry starts at n_posted.  A decode entry may run the newest known token or, from the ring,
 * the one that the sequence's newest posted step is about to sample: n_posted <= len.  Never further.
 *
 * With drafts nobody here knows how far a posted entry will get: a VERIFY entry moves the sequence by one token
 * at least and by n_tok at most.  n_posted is the least, n_ahead what may come on top; both are put right when
 * the entry is acknowledged.  Where an entry starts is said by the record of the one before.
 *
 *   PREFILL -> DECODE -> DRAINING -> (kept for its prefix | closed)
 *      +--------------------^
 *
 * A splice goes back from DECODE to PREFILL: known tokens are replaced from some position on, what was
 * posted beyond is stale, and the new tokens are computed like the end of a prompt.
 *
 * DRAINING: the answer is over, posted steps are still out; their tokens belong to nobody, but the rows
 * they write are counted. */
#ifndef DS4_ROUTER_SCHED_SEQ_H
#define DS4_ROUTER_SCHED_SEQ_H

#include "common/err.h"
#include "proto/message.h"
#include "router/sched/budget.h"
#include "router/sched/prefix.h"

#include <stdbool.h>
#include <stdint.h>

struct ds4_request;

enum ds4_seq_state { DS4_SEQ_PREFILL, DS4_SEQ_DECODE, DS4_SEQ_DRAINING };

struct ds4_seq {
    uint64_t id;
    enum ds4_seq_state state;
    struct ds4_request *req; /* borrowed; NULL once its answer is over, and for probes */
    struct ds4_tokens token; /* owned */
    int32_t n_prompt;
    int32_t
        fill_end; /* known tokens below are computed as prompt rows: n_prompt, or a splice's end */
    int32_t cut;  /* of the newest splice: tokens before it are still the posted ones */
    int32_t max_pos;   /* a token sampled for max_pos - 1 is the last */
    int32_t max_draft; /* drafts per decode entry; 0: none */
    int32_t n_posted;
    int32_t n_ahead; /* drafts of posted entries, not acknowledged */
    int32_t n_acked;
    int32_t n_told; /* later tokens came with a record that was refused: nobody has heard of them */
    int32_t hi;     /* as in struct ds4_hot */
    int32_t install_pos; /* rows below are others' and exist; n_posted may begin below (a replay) */
    int32_t n_flight;    /* posted entries not acknowledged */
    int64_t last_step;   /* newest step with an entry of it, -1 none */
    bool opened;         /* an open was posted */
    bool paused;         /* no further decode entries for now */
    bool spoiled;        /* its rows must not be reused */
    bool reading;        /* its rows come from disk; nothing is computed and nobody was told yet */
    int32_t n_block_sent;
    const struct ds4_kv_lease *lease; /* live; the holder is this sequence */
    uint64_t salt;
    uint64_t affinity;
    int32_t slot;  /* of the lease, kept when that is gone */
    int32_t group; /* decode group, -1 none; kept by batch.c */

    /* What is kept of it (keep.c). */
    struct ds4_prefix_node *stand; /* deepest chunk of its path in the index; NULL: not indexed */
    int32_t n_put;                 /* rows below are in the index */
    int32_t n_anchor;              /* anchors of the answer were thought of up to here */
    struct ds4_point *install;     /* pinned until the step that installs it is posted */
    int32_t replay_from;           /* rings are filled from here to install_pos; 0 = not */
    DS4_VEC(struct ds4_point *) point; /* saved from it, on no node yet */
    DS4_VEC(int32_t) mark;             /* places of the prompt worth a point, rising */
};

/* What a sequence contributes to a step. */
struct ds4_pick {
    struct ds4_seq *seq;
    enum ds4_entry_kind kind;
    int32_t base_pos; /* from the ring: at least */
    int32_t n_tok;    /* of VERIFY: at most */
    int32_t reach;    /* no row is written from this position on */
    bool sample;
    int64_t from_step; /* -1: the token is known */
};

/* A sequence over n_prompt tokens (copied) whose first start_pos are already computed. */
struct ds4_seq *ds4_seq_new(uint64_t id, const int32_t *prompt, int32_t n_prompt, int32_t max_pos,
                            int32_t start_pos, struct ds4_err *err);
/* Frees the tokens; the lease is the scheduler's. */
void ds4_seq_free(struct ds4_seq *seq);

/* Is there a decode entry to post, now or after tokens come: the sequence is in DECODE and its last
 * allowed position is not posted. */
bool ds4_seq_wants_decode(const struct ds4_seq *seq);
/* ... and may it be posted now. */
bool ds4_seq_can_decode(const struct ds4_seq *seq);

/* The next prefill chunk of at most max_tok rows.  It ends at a multiple of DS4_CHUNK_ALIGN_TOK unless it is
 * the last of the prompt (or max_tok is below that number).  False if there is nothing to post or no
 * room for it. */
#define DS4_CHUNK_ALIGN_TOK 128
bool ds4_seq_next_chunk(struct ds4_seq *seq, int32_t max_tok, struct ds4_pick *pick);
/* The next decode entry, with at most n_draft drafts; only if ds4_seq_can_decode. */
void ds4_seq_next_decode(struct ds4_seq *seq, int32_t n_draft, struct ds4_pick *pick);
/* One past the highest position that is written, or may be by what is posted. */
int32_t ds4_seq_reach(const struct ds4_seq *seq);

/* Books a pick as posted in step step_no. */
void ds4_seq_posted(struct ds4_seq *seq, const struct ds4_pick *pick, int64_t step_no);

/* Books the acknowledgement of an entry.  Checks position, epoch, flags and token ids against what was
 * posted; DS4_E_PROTOCOL names what is off.  Appends the sampled tokens; n_flight is the caller's. */
int ds4_seq_acked(struct ds4_seq *seq, const struct ds4_pick *posted, int32_t vocab,
                  const struct ds4_token_entry *entry, struct ds4_err *err) DS4_MUST_CHECK;
/* The same for an entry that a splice has overtaken: its rows count, its tokens do not. */
int ds4_seq_acked_stale(struct ds4_seq *seq, const struct ds4_pick *posted,
                        const struct ds4_token_entry *entry, struct ds4_err *err) DS4_MUST_CHECK;

/* May the newest known tokens from `keep` on be taken back in place: the rows around `keep` are still
 * in the rings although everything posted was written? */
bool ds4_seq_can_cut(const struct ds4_seq *seq, int32_t keep, int32_t hot_window_tok);
/* Replaces the known tokens from `keep` on (n_prompt <= keep) by n others, which must leave room for a
 * token below max_pos.  The next entry starts at `keep` or below and may mean a truncation.  The state
 * becomes PREFILL; entries in flight are stale from now on. */
int ds4_seq_splice(struct ds4_seq *seq, int32_t keep, const int32_t *token, int32_t n,
                   struct ds4_err *err) DS4_MUST_CHECK;

#endif

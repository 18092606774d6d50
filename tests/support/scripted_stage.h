/* A pipeline without a model: takes the scheduler's steps as the last stage would, answers when told to,
 * and objects to everything a correct router would not send.
 *
 * Its "model" is a hash over the tokens of a sequence and over all rows before, so the next token depends on
 * every one of them: a wrong cut, a lost token, a mixed-up slot, a block of somebody else changes the
 * output.  Where an open wants drafts it makes some, as many and as far right as the hash says.  Rows are cells of a plain array, one per block and position, and are always read through the
 * sequence's block table; a slot's own memory, its rings, is the hashes since its last install.  Points
 * keep one hash.  Cuts, saves and installs follow the rings' rule (install position, hot window), and host
 * memory the router's own formula.  The first objection is kept in `err`; tests assert that there is
 * none. */
#ifndef DS4_TESTS_SUPPORT_SCRIPTED_STAGE_H
#define DS4_TESTS_SUPPORT_SCRIPTED_STAGE_H

#include "common/err.h"
#include "common/vec.h"
#include "proto/message.h"
#include "tests/support/scripted_disk.h"

#include <stdbool.h>
#include <stdint.h>

struct ds4_scripted_slot {
    bool open;
    uint64_t seq;
    uint32_t epoch;
    struct ds4_seq_open how; /* its arrays are those below, the others are gone with the step */
    int32_t forced_id[DS4_MAX_FORCED_IDS];
    bool fresh; /* opened, nothing run yet */
    int32_t install_pos;
    int32_t replay_to;      /* > position: rows up to there are run for the rings alone */
    int32_t replay_at;      /* the position then */
    DS4_VEC(uint64_t) hash; /* [n + 1 - install_pos]: hash[p - install_pos] after p tokens */
    DS4_VEC(int32_t) token; /* [n], kept only for `next` */
    uint64_t sum;           /* of the rows below the position */
    int32_t hi;
    int32_t n_block;
    int32_t *block;     /* [blocks of the context] */
    int64_t ended_at;   /* step whose token ended the sequence, -1 */
    int64_t sampled_at; /* newest step that sampled, and what */
    int32_t sampled;
    int32_t n_draft; /* proposed to follow it */
    int32_t draft[DS4_MAX_DRAFT];
};

struct ds4_scripted_point {
    uint64_t id;
    int32_t pos;
    uint64_t hash;
    int32_t *token; /* [pos], only for `next`; owned */
};

struct ds4_scripted_stage {
    struct ds4_form form;
    struct ds4_point_shape
        shape; /* what points weigh; unit_bytes 0: this stage has no host memory */
    int32_t unit_bytes;
    DS4_VEC(struct ds4_scripted_point) point;
    int64_t point_bytes;
    int32_t vocab;
    int32_t hot_window_tok;
    bool check_cells; /* read all cells at every entry; off in benchmarks */
    struct ds4_scripted_slot *slot;
    int32_t *users;                   /* [n_blocks] tables that name the block */
    uint64_t *cell;                   /* [n_blocks * DS4_BLOCK_TOK] */
    DS4_VEC(struct ds4_step *) queue; /* posted, not executed; deep copies */
    int64_t next_step;
    int32_t max_queued;
    struct ds4_token_entry *answer;
    struct ds4_err err;     /* first objection */
    int32_t fail_sends;     /* > 0: that many sends fail */
    uint64_t nonfinite_seq; /* the next row of this sequence is not finite; 0 = none */
    uint64_t n_rows;        /* rows executed */
    /* Replaces the hash as the model: the token that follows slot->token, or -1 for a row that is not
     * finite.  NULL = the hash.  Kept by ds4_scripted_form. */
    int32_t (*next)(void *owner, const struct ds4_scripted_slot *slot);
    void *next_owner;
    uint64_t n_skipped; /* no-op entries */
    int64_t last_close; /* step of the newest close */
    int32_t replay_tok; /* a replay must be at least so long */
    uint64_t n_saves, n_installs, n_copies, n_replays;
    uint64_t n_drafted, n_accepted, n_quenched, n_bad; /* what VERIFY entries brought */
    struct ds4_scripted_disk *disk; /* borrowed; NULL: none.  Kept by ds4_scripted_form. */
};

/* Joins a generation, forgetting everything of the one before but the shape of points.  Zero the struct
 * first. */
void ds4_scripted_form(struct ds4_scripted_stage *stage, const struct ds4_form *form, int32_t vocab,
                       int32_t hot_window_tok);
void ds4_scripted_deinit(struct ds4_scripted_stage *stage);

/* struct ds4_sched_port.send_step */
int ds4_scripted_send(void *stage, const struct ds4_step *step, struct ds4_err *err);

/* Executes the oldest posted step.  False if there is none.  out->entry lives until the next call. */
bool ds4_scripted_answer(struct ds4_scripted_stage *stage, struct ds4_tokens_out *out);

/* The hash of a point, which must be at pos; and a new point. */
uint64_t ds4_scripted_point_hash(struct ds4_scripted_stage *stage, uint64_t id, int32_t pos);
void ds4_scripted_add_point(struct ds4_scripted_stage *stage, uint64_t id, int32_t pos,
                            uint64_t hash);

/* What the model says after these tokens: the reference for every test of equality. */
int32_t ds4_scripted_next(int32_t vocab, const int32_t *token, int32_t n);

#endif

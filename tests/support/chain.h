/* Stages in one process, for tests: what worker/loop.c does with pipes, done with a loop.
 *
 * A chain owns its stages, hands rows from one to the next, delivers token records as stages ask for
 * them, and numbers the steps.  Sequences get slot s and the blocks [s * blocks, (s + 1) * blocks).
 * Every complaint of a stage ends the test, unless a function says otherwise. */
#ifndef DS4_TESTS_SUPPORT_CHAIN_H
#define DS4_TESTS_SUPPORT_CHAIN_H

#include "common/err.h"
#include "worker/stage.h"

#include <pthread.h>
#include <stdint.h>

#define CHAIN_MODEL    "tests/data/ds4-tiny.gguf"
#define CHAIN_MAX      8
#define CHAIN_SEQS     9
#define CHAIN_SLOTS    11 /* CHAIN_SEQS and the spare ones */
#define CHAIN_BLOCKS   64 /* longest block table */
#define CHAIN_STEP_TOK 2600
#define CHAIN_OPS      64
#define CHAIN_ANSWERS  64

struct chain_options {
    const char *model;        /* NULL: CHAIN_MODEL */
    int32_t n_stage;          /* 0: 1 */
    const int32_t *partition; /* NULL: even */
    enum ds4_isa isa;
    enum ds4_auto_switch quant_sim;
    enum ds4_load load;
    enum ds4_products products;
    enum ds4_stream_dtype stream;
    int32_t n_thread;          /* 0: 1; programs of a test run share the cores */
    int32_t context_tok;       /* 0: 3072 */
    int32_t max_step_tok;      /* 0: CHAIN_STEP_TOK */
    int32_t max_draft;         /* 0: none */
    size_t memory_limit_bytes; /* 0: none */
    bool offload;              /* experts beyond it stay on the host */
    int64_t host_bytes;        /* for points; 0: 16 MiB */
    const char *disk_dir;
};

/* Answers of a stage's disk tier. */
struct chain_answers {
    pthread_mutex_t lock; /* guards the others */
    pthread_cond_t told;
    struct ds4_kv_done done[CHAIN_ANSWERS];
    int32_t n;
};

struct chain {
    int32_t n_stage;
    struct ds4_stage *stage[CHAIN_MAX];
    void *rows[CHAIN_MAX]; /* rows[s]: what stage s received last, s > 0 */
    size_t row_bytes;
    int32_t seq_blocks; /* block table of one sequence */
    int64_t step_no;    /* next */
    uint32_t generation;
    struct ds4_token_record *record; /* [n_record], one per step */
    int64_t n_record;
    int64_t cap_record;
    int64_t noted[CHAIN_MAX];  /* records delivered per stage */
    struct ds4_tokens_out out; /* of the last step */
    struct {
        uint64_t seq;
        uint32_t epoch;
    } owner[CHAIN_SLOTS];                     /* of each slot, as opened last */
    int32_t table[CHAIN_SLOTS][CHAIN_BLOCKS]; /* block tables: at first those of the head comment */
    struct ds4_kv_op op[CHAIN_OPS];           /* go with the next step that is built */
    int32_t n_op;
    struct chain_answers answers[CHAIN_MAX];
};

/* One sequence's part of the next step. */
struct chain_part {
    int32_t slot;
    int32_t base_pos;
    int32_t n_tok;
    const int32_t *token; /* NULL: from_step's */
    int64_t from_step;
    int32_t n_draft; /* > 0: a VERIFY entry of from_step's drafts, at most so many */
    bool sample;
};

/* Call first in main.  `--backend NAME` runs a program's tests on another backend (residual streams
 * f32; the cpu is the default), `--only PATTERN` the tests whose name matches. */
void chain_take_args(int argc, char **argv);
bool chain_on_cpu(void);
/* Are n f32 values of rows the same: every bit on the CPU; on a device, whose rounding depends on how many rows
 * a step has, within 2 % of their length. */
bool chain_same_rows(const float *a, const float *b, size_t n);

struct ds4_stage_config chain_config(const struct chain_options *options, int32_t stage);
struct chain *chain_new(const struct chain_options *options);
void chain_free(struct chain *c);
/* A new generation: all sequences gone, steps from 0. */
void chain_form(struct chain *c);

/* Greedy, no stop ids; change what the test is about. */
struct ds4_seq_open chain_greedy(int32_t slot, uint64_t seq, uint32_t epoch, int32_t n_prompt);

/* Runs one step on all stages.  opens [n_open] may be NULL.  Sequence ids and epochs are those of the
 * newest open of each slot. */
void chain_step(struct chain *c, const struct ds4_seq_open *opens, int32_t n_open,
                const struct chain_part *part, int32_t n_part);
/* The same step as plain data, for tests of refusals: builds but does not run. */
struct ds4_step *chain_build(struct chain *c, const struct ds4_seq_open *opens, int32_t n_open,
                             const struct chain_part *part, int32_t n_part);
void chain_run(struct chain *c, struct ds4_step *step);

/* Adds an operation to the next step; save and install take sequence and epoch of the slot's newest open,
 * or of the open that comes with the step. */
void chain_save(struct chain *c, int32_t slot, int32_t pos, uint64_t point);
void chain_install(struct chain *c, int32_t slot, int32_t pos, uint64_t point);
void chain_drop(struct chain *c, uint64_t point);
void chain_copy_block(struct chain *c, int32_t src, int32_t dst);
/* The answer of a stage to a job of the disk tier; waits for it. */
struct ds4_kv_done chain_await(struct chain *c, int32_t stage, uint64_t job);
/* Tries to begin the step on the first stage, which must refuse with that code; the generation is over. */
void chain_refuse(struct chain *c, struct ds4_step *step, enum ds4_code code);

/* Feeds tokens [base, base + n) of `ids` to a slot in chunks; samples after the last one when `sample`;
 * returns the token, or -1. */
int32_t chain_feed(struct chain *c, int32_t slot, const int32_t *ids, int32_t base, int32_t n,
                   int32_t chunk, bool sample);

/* Logits of the last n_row rows of the last step, computed on the last stage: out [n_row, n_vocab]. */
void chain_logits(struct chain *c, int32_t n_row, float *out);
int32_t chain_n_vocab(const struct chain *c);
/* The last stage's residual of the last n_row rows of the last step: out [n_row, row_bytes]. */
void chain_residual(struct chain *c, int32_t n_row, void *out);

#endif

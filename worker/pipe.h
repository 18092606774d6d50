/* The pipe between stages: activations one hop forward, token records from the last stage to all.
 *
 * A table, so that another transport can stand in; there is one: pipe_shm (POSIX shared memory ring on
 * one host, futex waits).  One thread, the step thread, calls everything but abort().  Every wait has a
 * deadline and ends early when the peer dies or abort() is called; no call spins while idle. */
#ifndef DS4_WORKER_PIPE_H
#define DS4_WORKER_PIPE_H

#include "common/clock.h"
#include "common/err.h"
#include "proto/message.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* One sequence's part of a token record; fixed shape whatever happened. */
struct ds4_record_entry {
    uint64_t seq;
    uint32_t epoch;
    uint32_t flags; /* enum ds4_token_flag */
    int32_t pos;
    int32_t n_token;
    int32_t token[1 + DS4_MAX_DRAFT]; /* -1 padded */
};

/* Broadcast once per step, always, even when every entry is a non-final prefill chunk. */
struct ds4_token_record {
    uint32_t generation;
    uint32_t n_entry;
    int64_t step_no;
    uint32_t crc; /* crc32c over the record with this field 0 */
    uint32_t reserved;
    struct ds4_record_entry entry[DS4_MAX_STEP_ENTRIES];
};

struct ds4_pipe; /* opaque; each implementation's own */

struct ds4_pipe_config {
    int32_t stage;
    int32_t n_stage;
    uint32_t generation;
    uint8_t key[DS4_ID_BYTES];
    size_t row_bytes; /* activation bytes of one row: n_hyper * d_model * size of stream dtype */
    int32_t max_step_tok; /* rows per step */
    int32_t max_seqs;     /* entries per record */
    int32_t depth;        /* steps in flight: n_stage */
    /* May be NULL; borrowed while the pipe is open.  Once true, open() and every wait give up with
     * DS4_E_CANCELLED: abort() needs a pipe, and open() has not returned one yet. */
    const atomic_bool *cancel;
};

struct ds4_pipe_ops {
    const char *name; /* "shm" | "nccl" */

    /* Meets the neighbours until the deadline; NULL with DS4_E_TIMEOUT naming the missing stage.
     * One stage alone works without peers. */
    struct ds4_pipe *(*open)(const struct ds4_pipe_config *config, struct ds4_deadline deadline,
                             struct ds4_err *err);
    /* Also removes what only this generation used. */
    void (*close)(struct ds4_pipe *pipe);
    /* From any thread: every wait, now and later, returns DS4_E_CANCELLED. */
    void (*abort)(struct ds4_pipe *pipe);

    /* Sends n_row rows of step step_no to the next stage (not on the last stage).  `rows` is free
     * for reuse on return. */
    int (*send)(struct ds4_pipe *pipe, int64_t step_no, const void *rows, int32_t n_row,
                struct ds4_deadline deadline, struct ds4_err *err);
    /* Receives the rows of step_no from the previous stage (not on stage 0).  DS4_E_PROTOCOL if the
     * peer sent another step or row count. */
    int (*recv)(struct ds4_pipe *pipe, int64_t step_no, void *rows, int32_t n_row,
                struct ds4_deadline deadline, struct ds4_err *err);

    /* Last stage: publishes the record of a step.  Others: takes the next record, in step order; the
     * last stage keeps its own copy itself. */
    int (*publish)(struct ds4_pipe *pipe, const struct ds4_token_record *record,
                   struct ds4_deadline deadline, struct ds4_err *err);
    int (*take)(struct ds4_pipe *pipe, struct ds4_token_record *record,
                struct ds4_deadline deadline, struct ds4_err *err);

    /* 0 while every stage this one exchanges with is there; else -1 as a wait would end.  Never waits:
     * for a stage that is idle, and so in none of the calls above. */
    int (*check)(struct ds4_pipe *pipe, struct ds4_err *err);
};

extern const struct ds4_pipe_ops ds4_pipe_shm;

#endif

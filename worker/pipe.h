/* The pipe between stages: activations one hop forward, token records from the last stage to all.
 *
 * A table with two implementations: pipe_shm (POSIX shared memory ring on one host, futex waits; CPU
 * stages, several stages on one GPU) and pipe_nccl (GPU to GPU, one host or several).  One thread, the
 * step thread, calls everything but abort().  Every wait has a deadline and ends early when the peer
 * dies or abort() is called; no call spins while idle.
 *
 * Rows lie where the stage computes: in the backend's memory if the configuration names one, else in
 * the host's.  send() takes what the work queued on the device so far leaves there; what recv()
 * delivers is seen by work queued afterwards. */
#ifndef DS4_WORKER_PIPE_H
#define DS4_WORKER_PIPE_H

#include "common/clock.h"
#include "common/err.h"
#include "kernels/backend.h"
#include "proto/message.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* One sequence's part of a token record; fixed shape whatever happened. */
struct ds4_record_entry {
    uint64_t seq;
    uint32_t epoch;
    uint32_t flags; /* enum ds4_token_flag */
    int32_t pos;    /* as in struct ds4_token_entry */
    int32_t n_token;
    int32_t token[1 + DS4_MAX_DRAFT]; /* -1 padded */
    int32_t n_draft;                  /* proposed to follow the last of them */
    int32_t draft[DS4_MAX_DRAFT];     /* -1 padded */
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

/* How the first stage's word reaches the others while a pipe opens: through the router. */
struct ds4_pipe_exchange {
    void *owner;
    /* Stage 0, once per open. */
    int (*offer)(void *owner, const struct ds4_pipe_id *id, struct ds4_err *err);
    /* The others: waits for it; DS4_E_TIMEOUT, DS4_E_CANCELLED. */
    int (*await)(void *owner, struct ds4_pipe_id *id, struct ds4_deadline deadline,
                 struct ds4_err *err);
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
    /* Where rows lie; both borrowed while the pipe is open.  NULL: host memory (tests). */
    const struct ds4_backend *backend;
    struct ds4_device *dev;
    void *dev_area; /* area_bytes() of device memory, for pipes that need some; borrowed as well */
    const struct ds4_pipe_exchange *exchange; /* nccl; borrowed for the call */
};

struct ds4_pipe_ops {
    const char *name; /* "shm" | "nccl" */

    /* Device memory that every open with a configuration within these limits gets by with: part of the
     * stage's plan.  Looks at stage, n_stage, row_bytes, max_step_tok, max_seqs and depth. */
    size_t (*area_bytes)(const struct ds4_pipe_config *config);

    /* Meets the neighbours until the deadline; NULL with DS4_E_TIMEOUT naming the missing stage.
     * One stage alone works without peers. */
    struct ds4_pipe *(*open)(const struct ds4_pipe_config *config, struct ds4_deadline deadline,
                             struct ds4_err *err);
    /* Also removes what only this generation used. */
    void (*close)(struct ds4_pipe *pipe);
    /* From any thread: every wait, now and later, returns DS4_E_CANCELLED. */
    void (*abort)(struct ds4_pipe *pipe);

    /* Sends n_row rows of step step_no to the next stage (not on the last stage).  `rows` is free
     * for work queued later. */
    int (*send)(struct ds4_pipe *pipe, int64_t step_no, const void *rows, int32_t n_row,
                struct ds4_deadline deadline, struct ds4_err *err);
    /* Receives the rows of step_no from the previous stage (not on stage 0).  DS4_E_PROTOCOL if the
     * peer sent another step or row count. */
    int (*recv)(struct ds4_pipe *pipe, int64_t step_no, void *rows, int32_t n_row,
                struct ds4_deadline deadline, struct ds4_err *err);
    /* A hint before recv(): the step after the running one is known, its rows may come in beside the
     * work on this one.  In step order, each step at most once, at most one ahead. */
    int (*expect)(struct ds4_pipe *pipe, int64_t step_no, int32_t n_row, struct ds4_err *err);

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

/* "shm" or "nccl"; NULL if not built in. */
const struct ds4_pipe_ops *ds4_pipe_find(const char *name);
extern const struct ds4_pipe_ops ds4_pipe_shm;

/* For implementations. */
int ds4_pipe_check_config(const struct ds4_pipe_config *config, struct ds4_err *err) DS4_MUST_CHECK;
/* Head and max_seqs entries: the same for every step of the generation. */
size_t ds4_pipe_record_bytes(const struct ds4_pipe_config *config);
int ds4_pipe_check_publish(const struct ds4_pipe_config *config,
                           const struct ds4_token_record *record,
                           struct ds4_err *err) DS4_MUST_CHECK;
/* Copies the record with its checksum. */
void ds4_pipe_seal_record(const struct ds4_pipe_config *config,
                          const struct ds4_token_record *record, struct ds4_token_record *to);
/* Checksum (DS4_E_CORRUPT), generation, step and count (DS4_E_PROTOCOL) of a received record. */
int ds4_pipe_check_record(const struct ds4_pipe_config *config, struct ds4_token_record *record,
                          int64_t step_no, struct ds4_err *err) DS4_MUST_CHECK;

#endif

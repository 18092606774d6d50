/* The step thread: the only caller of the stage and of the pipe.
 *
 * The control thread posts commands and takes events; both go through bounded queues (README.md), so
 * neither thread ever waits for the other's work.
 *
 *            load            FORM              first step failing, abort
 *   LOADING ------> IDLE ------------> READY ----------------------------> IDLE (weights stay)
 *                     ^  form failed |
 *                     +--------------+
 *
 * Steps run strictly in step_no order.  What a correct router would not send (a gap, a repeat, a lease
 * that does not cover its rows) ends the process with exit 72.  A pipe that breaks ends the generation
 * only: the stage keeps its weights and waits for the next FORM. */
#ifndef DS4_WORKER_LOOP_H
#define DS4_WORKER_LOOP_H

#include "common/arena.h"
#include "common/buf.h"
#include "common/err.h"
#include "proto/message.h"
#include "worker/pipe.h"
#include "worker/stage.h"

#include <stdbool.h>
#include <stdint.h>

/* Commands that may wait; the router keeps fewer steps than 80 in flight, and so many jobs. */
#define DS4_LOOP_COMMANDS (80 + DS4_MAX_KV_JOBS)
#define DS4_LOOP_EVENTS   80

struct ds4_loop;

struct ds4_loop_config {
    struct ds4_stage_config stage; /* what it points to must live until DS4_LOOP_LOADED */
    const struct ds4_pipe_ops *pipe;
    int32_t depth;        /* steps in flight at most */
    int32_t form_ms;      /* a pipe may take so long to meet its neighbours */
    int32_t pipe_wait_ms; /* last resort of every wait in a step; dead peers are noticed at once */
    int32_t check_ms;     /* an idle stage looks after its neighbours so often; 0 = never */
};

enum ds4_loop_event_kind {
    DS4_LOOP_PLANNED, /* hello */
    DS4_LOOP_LOADED,
    DS4_LOOP_LOAD_FAILED, /* err */
    DS4_LOOP_OFFER,       /* generation, payload: an encoded ds4_pipe_id for the other stages */
    DS4_LOOP_FORMED,      /* generation */
    DS4_LOOP_FORM_FAILED, /* generation, err */
    DS4_LOOP_TOKENS,      /* generation, payload: an encoded ds4_tokens_out */
    DS4_LOOP_STEP_DONE,   /* generation, payload: an encoded ds4_step_done */
    DS4_LOOP_KV_DONE,     /* generation, payload: an encoded ds4_kv_done */
    DS4_LOOP_IDLE,        /* generation that ended, err says why */
    DS4_LOOP_STOPPED      /* the thread is done */
};

struct ds4_loop_event {
    enum ds4_loop_event_kind kind;
    uint32_t generation;
    struct ds4_err err;
    struct ds4_hello hello; /* what ds4_stage_hello fills */
    struct ds4_buf payload; /* owned by the receiver of the event */
};

/* A step or a job of the disk tier, and the arena its arrays live in. */
struct ds4_step_packet {
    struct ds4_arena arena;
    struct ds4_arena_mark empty; /* keeps the first chunk, so that small steps allocate nothing */
    union {
        struct ds4_step step;
        struct ds4_kv_write kv_write;
        struct ds4_kv_read kv_read;
        struct ds4_kv_unlink kv_unlink;
    };
};

enum ds4_loop_job { DS4_LOOP_KV_WRITE, DS4_LOOP_KV_READ, DS4_LOOP_KV_UNLINK };

/* Starts the thread, which loads the stage and then waits for commands.  Copies `config`. */
struct ds4_loop *ds4_loop_new(const struct ds4_loop_config *config,
                              struct ds4_err *err) DS4_MUST_CHECK;
/* Stops after the running step, joins the thread, frees the stage. */
void ds4_loop_free(struct ds4_loop *loop);

/* The loaded stage, for the functions of stage.h that any thread may call; NULL before
 * DS4_LOOP_LOADED. */
const struct ds4_stage *ds4_loop_stage(const struct ds4_loop *loop);

/* Joins a generation, after leaving the one before if there is one. */
int ds4_loop_post_form(struct ds4_loop *loop, const struct ds4_form *form,
                       struct ds4_err *err) DS4_MUST_CHECK;
/* Where stage 0 says that generation's pipe is: what its formation may be waiting for. */
void ds4_loop_give_pipe_id(struct ds4_loop *loop, uint32_t generation,
                           const struct ds4_pipe_id *id);
/* An empty packet to decode a step into; NULL if DS4_LOOP_COMMANDS are out.  Give it back by posting
 * or dropping it. */
struct ds4_step_packet *ds4_loop_take_packet(struct ds4_loop *loop);
void ds4_loop_drop_packet(struct ds4_loop *loop, struct ds4_step_packet *packet);
/* Takes the packet in any case.  DS4_E_PROTOCOL if the queue is full. */
int ds4_loop_post_step(struct ds4_loop *loop, struct ds4_step_packet *packet,
                       struct ds4_err *err) DS4_MUST_CHECK;
/* The same for a job, which runs between the steps posted before and after it. */
int ds4_loop_post_job(struct ds4_loop *loop, enum ds4_loop_job job, struct ds4_step_packet *packet,
                      struct ds4_err *err) DS4_MUST_CHECK;
/* Drops posted commands and the generation, wakes every wait in the pipe. */
void ds4_loop_abort(struct ds4_loop *loop);
/* Stop after the running step, or (drain) after all posted ones; ends with DS4_LOOP_STOPPED. */
void ds4_loop_stop(struct ds4_loop *loop, bool drain);

/* Readable while events wait. */
int ds4_loop_event_fd(const struct ds4_loop *loop);
/* False when there is none. */
bool ds4_loop_next_event(struct ds4_loop *loop, struct ds4_loop_event *event);

enum ds4_loop_phase {
    DS4_PHASE_LOAD,
    DS4_PHASE_COMMAND, /* waiting for one */
    DS4_PHASE_FORM,
    DS4_PHASE_TOKEN, /* waiting for a token record */
    DS4_PHASE_RECV,
    DS4_PHASE_COMPUTE,
    DS4_PHASE_SEND /* rows or record */
};

struct ds4_loop_status {
    enum ds4_loop_phase phase;
    int64_t phase_age_ms;
    bool in_step;
    bool prefill;        /* the running step has a prefill entry */
    int64_t step_no;     /* newest begun in this generation, -1 none */
    int64_t step_age_ms; /* of the running step, 0 if none runs */
    int64_t loaded_bytes;
    int64_t total_bytes;
    uint64_t steps_done;
    double busy_seconds;
    double wait_recv_seconds;
    double wait_token_seconds;
    double wait_command_seconds;
    double wait_send_seconds;
    struct ds4_step_times step_time[DS4_N_TIMED];
    uint64_t sent_bytes;
    uint64_t received_bytes;
};
void ds4_loop_get_status(const struct ds4_loop *loop, struct ds4_loop_status *status);

#endif

/* The step thread (steps 7 to 12): receive step -> stage -> reply.
 *
 * Per step: token records until the step's own needs are met, then rows from the stage before, the
 * forward pass, then rows to the stage after or, on the last stage, the record and the answer.  A
 * decoding sequence's next token comes from the record, not from the router, so with enough steps
 * posted no stage waits for the router between two tokens.
 *
 * Records older than the steps in flight are taken even when no entry asks for them (a long prefill
 * never does): that keeps the record ring from filling up, whatever is in the steps.
 *
 * Numbers for the heartbeat are atomics written by the step thread alone. */
#include "worker/loop.h"

#include "common/clock.h"
#include "common/fault.h"
#include "common/log.h"
#include "common/metrics.h"
#include "common/service.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "worker/fatal.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define N_PHASE        (DS4_PHASE_SEND + 1)
#define FAULT_DELAY_NS (50 * DS4_NS_PER_MS)

enum command_kind { COMMAND_FORM, COMMAND_STEP, COMMAND_JOB };

struct command {
    enum command_kind kind;
    enum ds4_loop_job job;
    struct ds4_form form;
    struct ds4_step_packet *packet;
};

enum stop_mode { STOP_NO, STOP_DRAIN, STOP_NOW };

struct ds4_loop {
    struct ds4_loop_config config;
    pthread_t thread;
    int event_fd;

    pthread_mutex_t lock; /* guards everything down to the blank line */
    pthread_cond_t wake;  /* a command, a stop, a drop, or room for an event */
    struct command command[DS4_LOOP_COMMANDS];
    size_t first_command, n_command;
    struct ds4_loop_event event[DS4_LOOP_EVENTS];
    size_t first_event, n_event;
    struct ds4_step_packet packet[DS4_LOOP_COMMANDS];
    struct ds4_step_packet *free_packet[DS4_LOOP_COMMANDS];
    size_t n_free_packet;
    enum stop_mode stop;
    bool drop;             /* leave the generation before the next command */
    struct ds4_pipe *pipe; /* written by the step thread only, so it reads without the lock */
    struct ds4_pipe_id pipe_id;
    uint32_t pipe_id_generation; /* of pipe_id; 0 = none */

    atomic_bool cancel; /* ends waits in the pipe: set by abort and stop, cleared with `drop` */

    /* The step thread's own. */
    _Atomic(struct ds4_stage *) stage;
    uint32_t generation; /* 0 = none */
    int32_t n_stage;
    int64_t next_step;
    int64_t taken_record; /* newest, -1 none */
    struct ds4_token_record record;
    struct ds4_arena scratch; /* for encoding */

    /* For the heartbeat. */
    atomic_int phase;
    atomic_int_fast64_t phase_start_ns;
    atomic_int_fast64_t phase_total_ns[N_PHASE];
    atomic_bool in_step;
    atomic_bool prefill;
    atomic_int_fast64_t step_no;
    atomic_int_fast64_t step_start_ns;
    atomic_uint_fast64_t steps_done;
    atomic_uint_fast64_t step_bucket[DS4_N_TIMED][DS4_STEP_BUCKETS];
    atomic_int_fast64_t step_total_ns[DS4_N_TIMED];
    atomic_uint_fast64_t sent_bytes;
    atomic_uint_fast64_t received_bytes;
    atomic_int_fast64_t loaded_bytes;
    atomic_int_fast64_t total_bytes;
};

/* ---- phases ---- */

static void enter(struct ds4_loop *loop, enum ds4_loop_phase phase)
{
    int64_t now_ns = ds4_clock_ns();
    int old = atomic_load_explicit(&loop->phase, memory_order_relaxed);

    atomic_fetch_add_explicit(&loop->phase_total_ns[old],
                              now_ns -
                                  atomic_load_explicit(&loop->phase_start_ns, memory_order_relaxed),
                              memory_order_relaxed);
    atomic_store(&loop->phase_start_ns, now_ns);
    atomic_store(&loop->phase, (int)phase);
}

static double total_seconds(const struct ds4_loop *loop, enum ds4_loop_phase phase)
{
    int64_t total_ns = atomic_load(&loop->phase_total_ns[phase]);

    if (atomic_load(&loop->phase) == (int)phase)
        total_ns += ds4_clock_ns() - (int64_t)atomic_load(&loop->phase_start_ns);
    return total_ns > 0 ? (double)total_ns / (double)DS4_NS_PER_SEC : 0;
}

static int64_t age_ms(int64_t start_ns)
{
    int64_t age_ns = ds4_clock_ns() - start_ns;

    return age_ns > 0 ? age_ns / DS4_NS_PER_MS : 0;
}

void ds4_loop_get_status(const struct ds4_loop *loop, struct ds4_loop_status *status)
{
    bool in_step = atomic_load(&loop->in_step);
    /* Before its start: read the other way round, a step that begins between the two would seem as old
     * as the wait before it, and the watchdog would end the process. */
    enum ds4_loop_phase phase = (enum ds4_loop_phase)atomic_load(&loop->phase);

    *status = (struct ds4_loop_status){
        .phase = phase,
        .phase_age_ms = age_ms(atomic_load(&loop->phase_start_ns)),
        .in_step = in_step,
        .prefill = atomic_load(&loop->prefill),
        .step_no = atomic_load(&loop->step_no),
        .step_age_ms = in_step ? age_ms(atomic_load(&loop->step_start_ns)) : 0,
        .loaded_bytes = atomic_load(&loop->loaded_bytes),
        .total_bytes = atomic_load(&loop->total_bytes),
        .steps_done = atomic_load(&loop->steps_done),
        .busy_seconds = total_seconds(loop, DS4_PHASE_COMPUTE),
        .wait_recv_seconds = total_seconds(loop, DS4_PHASE_RECV),
        .wait_token_seconds = total_seconds(loop, DS4_PHASE_TOKEN),
        .wait_command_seconds = total_seconds(loop, DS4_PHASE_COMMAND),
        .wait_send_seconds = total_seconds(loop, DS4_PHASE_SEND),
        .sent_bytes = atomic_load(&loop->sent_bytes),
        .received_bytes = atomic_load(&loop->received_bytes),
    };
    for (int k = 0; k < DS4_N_TIMED; k++) {
        status->step_time[k].seconds =
            (double)atomic_load(&loop->step_total_ns[k]) / (double)DS4_NS_PER_SEC;
        for (int b = 0; b < DS4_STEP_BUCKETS; b++)
            status->step_time[k].bucket[b] = atomic_load(&loop->step_bucket[k][b]);
    }
}

/* A step that is done, by what it computed. */
static void note_step(struct ds4_loop *loop, int64_t compute_ns)
{
    enum ds4_timed_kind kind = atomic_load(&loop->prefill) ? DS4_TIMED_PREFILL : DS4_TIMED_DECODE;
    size_t b = ds4_metric_step_bucket((double)compute_ns / (double)DS4_NS_PER_SEC);

    atomic_fetch_add(&loop->step_bucket[kind][b], 1);
    atomic_fetch_add(&loop->step_total_ns[kind], compute_ns);
    atomic_fetch_add(&loop->steps_done, 1);
}

/* ---- events ---- */

/* Takes event->payload.  Waits for room, which only a control thread that died would not make. */
static void put_event(struct ds4_loop *loop, const struct ds4_loop_event *event)
{
    /* Nobody may read any more after a stop.  Its own event always has a place. */
    size_t room = DS4_LOOP_EVENTS - (event->kind == DS4_LOOP_STOPPED ? 0 : 1);
    uint64_t one = 1;
    ssize_t n;

    pthread_mutex_lock(&loop->lock);
    while (loop->n_event >= room && loop->stop != STOP_NOW)
        pthread_cond_wait(&loop->wake, &loop->lock);
    if (loop->n_event >= room) {
        struct ds4_buf dropped = event->payload;

        pthread_mutex_unlock(&loop->lock);
        ds4_buf_deinit(&dropped);
        return;
    }
    loop->event[(loop->first_event + loop->n_event++) % DS4_LOOP_EVENTS] = *event;
    pthread_mutex_unlock(&loop->lock);
    do {
        n = write(loop->event_fd, &one, sizeof(one));
    } while (n < 0 && errno == EINTR);
}

/* `err` may be NULL. */
static void tell(struct ds4_loop *loop, enum ds4_loop_event_kind kind, uint32_t generation,
                 const struct ds4_err *err)
{
    struct ds4_loop_event event = {.kind = kind, .generation = generation};

    if (err != NULL)
        event.err = *err;
    put_event(loop, &event);
}

bool ds4_loop_next_event(struct ds4_loop *loop, struct ds4_loop_event *event)
{
    bool got = false;
    uint64_t count;

    /* A semaphore eventfd: one read per event; nothing to read is no event. */
    if (read(loop->event_fd, &count, sizeof(count)) != sizeof(count))
        return false;
    pthread_mutex_lock(&loop->lock);
    if (loop->n_event > 0) {
        *event = loop->event[loop->first_event];
        loop->first_event = (loop->first_event + 1) % DS4_LOOP_EVENTS;
        loop->n_event--;
        got = true;
        pthread_cond_broadcast(&loop->wake);
    }
    pthread_mutex_unlock(&loop->lock);
    return got;
}

int ds4_loop_event_fd(const struct ds4_loop *loop)
{
    return loop->event_fd;
}

/* ---- packets and commands ---- */

struct ds4_step_packet *ds4_loop_take_packet(struct ds4_loop *loop)
{
    struct ds4_step_packet *packet = NULL;

    pthread_mutex_lock(&loop->lock);
    if (loop->n_free_packet > 0)
        packet = loop->free_packet[--loop->n_free_packet];
    pthread_mutex_unlock(&loop->lock);
    return packet;
}

static void put_packet_locked(struct ds4_loop *loop, struct ds4_step_packet *packet)
{
    ds4_arena_reset(&packet->arena, packet->empty);
    loop->free_packet[loop->n_free_packet++] = packet;
}

void ds4_loop_drop_packet(struct ds4_loop *loop, struct ds4_step_packet *packet)
{
    pthread_mutex_lock(&loop->lock);
    put_packet_locked(loop, packet);
    pthread_mutex_unlock(&loop->lock);
}

static int post(struct ds4_loop *loop, const struct command *command, struct ds4_err *err)
{
    int rc = 0;

    pthread_mutex_lock(&loop->lock);
    if (loop->n_command == DS4_LOOP_COMMANDS) {
        rc = ds4_fail(err, DS4_E_PROTOCOL, "more than %d commands posted", DS4_LOOP_COMMANDS);
    } else {
        loop->command[(loop->first_command + loop->n_command++) % DS4_LOOP_COMMANDS] = *command;
        pthread_cond_broadcast(&loop->wake);
    }
    pthread_mutex_unlock(&loop->lock);
    return rc;
}

static int post_packet(struct ds4_loop *loop, const struct command *command, struct ds4_err *err)
{
    if (post(loop, command, err)) {
        ds4_loop_drop_packet(loop, command->packet);
        return -1;
    }
    return 0;
}

int ds4_loop_post_step(struct ds4_loop *loop, struct ds4_step_packet *packet, struct ds4_err *err)
{
    struct command command = {.kind = COMMAND_STEP, .packet = packet};

    return post_packet(loop, &command, err);
}

int ds4_loop_post_job(struct ds4_loop *loop, enum ds4_loop_job job, struct ds4_step_packet *packet,
                      struct ds4_err *err)
{
    struct command command = {.kind = COMMAND_JOB, .job = job, .packet = packet};

    return post_packet(loop, &command, err);
}

int ds4_loop_post_form(struct ds4_loop *loop, const struct ds4_form *form, struct ds4_err *err)
{
    struct command command = {.kind = COMMAND_FORM, .form = *form};

    return post(loop, &command, err);
}

static void interrupt_locked(struct ds4_loop *loop)
{
    atomic_store(&loop->cancel, true);
    if (loop->pipe != NULL)
        loop->config.pipe->abort(loop->pipe);
    pthread_cond_broadcast(&loop->wake);
}

void ds4_loop_abort(struct ds4_loop *loop)
{
    pthread_mutex_lock(&loop->lock);
    for (; loop->n_command > 0; loop->n_command--) {
        struct command *command = &loop->command[loop->first_command];

        if (command->kind != COMMAND_FORM)
            put_packet_locked(loop, command->packet);
        loop->first_command = (loop->first_command + 1) % DS4_LOOP_COMMANDS;
    }
    loop->drop = true;
    interrupt_locked(loop);
    pthread_mutex_unlock(&loop->lock);
}

void ds4_loop_stop(struct ds4_loop *loop, bool drain)
{
    pthread_mutex_lock(&loop->lock);
    if (loop->stop != STOP_NOW)
        loop->stop = drain ? STOP_DRAIN : STOP_NOW;
    pthread_cond_broadcast(&loop->wake);
    pthread_mutex_unlock(&loop->lock);
}

void ds4_loop_give_pipe_id(struct ds4_loop *loop, uint32_t generation, const struct ds4_pipe_id *id)
{
    pthread_mutex_lock(&loop->lock);
    loop->pipe_id = *id;
    loop->pipe_id_generation = generation;
    pthread_cond_broadcast(&loop->wake);
    pthread_mutex_unlock(&loop->lock);
}

/* ---- where the pipe is ---- */

/* The exchange of one formation; lives while the pipe opens. */
struct meeting {
    struct ds4_loop *loop;
    uint32_t generation;
};

static int offer_pipe_id(void *owner, const struct ds4_pipe_id *id, struct ds4_err *err)
{
    const struct meeting *meeting = owner;
    struct ds4_loop_event event = {.kind = DS4_LOOP_OFFER, .generation = meeting->generation};

    ds4_buf_init(&event.payload, DS4_MAX_FRAME_BYTES);
    if (ds4_codec_encode_pipe_id(id, &event.payload, err)) {
        ds4_buf_deinit(&event.payload);
        return -1;
    }
    put_event(meeting->loop, &event);
    return 0;
}

static int await_pipe_id(void *owner, struct ds4_pipe_id *id, struct ds4_deadline deadline,
                         struct ds4_err *err)
{
    const struct meeting *meeting = owner;
    struct ds4_loop *loop = meeting->loop;
    struct timespec until = ds4_deadline_timespec(deadline);
    int rc = 0;

    pthread_mutex_lock(&loop->lock);
    while (loop->pipe_id_generation != meeting->generation && !atomic_load(&loop->cancel) &&
           rc == 0)
        rc = pthread_cond_timedwait(&loop->wake, &loop->lock, &until);
    if (loop->pipe_id_generation == meeting->generation) {
        *id = loop->pipe_id;
        rc = 0;
    } else if (atomic_load(&loop->cancel)) {
        rc = ds4_fail(err, DS4_E_CANCELLED, "the formation was aborted");
    } else {
        rc = ds4_fail(err, DS4_E_TIMEOUT, "stage 0 did not say where the pipe is");
    }
    pthread_mutex_unlock(&loop->lock);
    return rc;
}

/* ---- a generation ---- */

static struct ds4_stage *own_stage(struct ds4_loop *loop)
{
    return atomic_load_explicit(&loop->stage, memory_order_relaxed);
}

static void set_pipe(struct ds4_loop *loop, struct ds4_pipe *pipe)
{
    pthread_mutex_lock(&loop->lock);
    loop->pipe = pipe;
    pthread_mutex_unlock(&loop->lock);
}

/* Safe without a generation.  Peers notice the closed pipe at once. */
static void leave_generation(struct ds4_loop *loop)
{
    struct ds4_pipe *pipe = loop->pipe;

    set_pipe(loop, NULL);
    if (pipe != NULL)
        loop->config.pipe->close(pipe);
    loop->generation = 0;
    atomic_store(&loop->step_no, -1);
}

static void lose_generation(struct ds4_loop *loop, const struct ds4_err *why)
{
    uint32_t generation = loop->generation;

    ds4_log(DS4_LOG_WARN, "generation.lost", "generation=%u step=%" PRIdFAST64 " message=\"%s\"",
            generation, atomic_load(&loop->step_no), why->msg);
    leave_generation(loop);
    tell(loop, DS4_LOOP_IDLE, generation, why);
}

static void run_form(struct ds4_loop *loop, const struct ds4_form *form)
{
    struct ds4_stage *stage = own_stage(loop);
    struct ds4_pipe_config config = {
        .stage = loop->config.stage.stage,
        .n_stage = form->n_stage,
        .generation = form->generation,
        .max_step_tok = form->max_step_tok,
        .max_seqs = form->max_seqs,
        .depth = loop->config.depth,
        .cancel = &loop->cancel,
    };
    struct meeting meeting = {loop, form->generation};
    struct ds4_pipe_exchange exchange = {&meeting, offer_pipe_id, await_pipe_id};
    struct ds4_pipe *pipe = NULL;
    struct ds4_err err = {0};
    int rc = 0;

    leave_generation(loop);
    enter(loop, DS4_PHASE_FORM);
    memcpy(config.key, form->pipe_key, sizeof(config.key));
    config.exchange = &exchange;
    ds4_stage_pipe(stage, &config);
    if (form->n_stage != loop->config.stage.n_stage)
        rc = ds4_fail(&err, DS4_E_PROTOCOL, "a generation of %d stages, this is one of %d",
                      (int)form->n_stage, (int)loop->config.stage.n_stage);
    if (rc == 0)
        rc = ds4_stage_form(stage, form, &err);
    if (rc == 0) {
        pipe = loop->config.pipe->open(&config, ds4_deadline_in_ms(loop->config.form_ms), &err);
        rc = pipe == NULL ? -1 : 0;
    }
    if (rc != 0) {
        tell(loop, DS4_LOOP_FORM_FAILED, form->generation, &err);
        return;
    }
    set_pipe(loop, pipe);
    loop->generation = form->generation;
    loop->n_stage = form->n_stage;
    loop->next_step = 0;
    loop->taken_record = -1;
    tell(loop, DS4_LOOP_FORMED, form->generation, NULL);
}

/* ---- a step ---- */

static struct ds4_deadline pipe_deadline(const struct ds4_loop *loop)
{
    return ds4_deadline_in_ms(loop->config.pipe_wait_ms);
}

static int take_records(struct ds4_loop *loop, const struct ds4_step *step, struct ds4_err *err)
{
    struct ds4_stage *stage = own_stage(loop);

    if (ds4_stage_is_last(stage))
        return 0;
    while (loop->taken_record < step->step_no - loop->config.depth ||
           ds4_stage_needs_record(stage, step) >= 0) {
        enter(loop, DS4_PHASE_TOKEN);
        if (loop->config.pipe->take(loop->pipe, &loop->record, pipe_deadline(loop), err) ||
            ds4_stage_note_record(stage, &loop->record, err))
            return ds4_err_wrap(err, "record of step %" PRId64, loop->taken_record + 1);
        loop->taken_record = loop->record.step_no;
    }
    return 0;
}

static int receive_rows(struct ds4_loop *loop, const struct ds4_step *step, struct ds4_err *err)
{
    int32_t n_row = ds4_stage_n_row(own_stage(loop));

    if (ds4_stage_is_first(own_stage(loop)) || n_row == 0)
        return 0;
    enter(loop, DS4_PHASE_RECV);
    if (loop->config.pipe->recv(loop->pipe, step->step_no, ds4_stage_handoff(own_stage(loop)),
                                n_row, pipe_deadline(loop), err))
        return ds4_err_wrap(err, "rows of step %" PRId64, step->step_no);
    atomic_fetch_add(&loop->received_bytes, (uint64_t)n_row * ds4_stage_row_bytes(own_stage(loop)));
    return 0;
}

static int send_rows(struct ds4_loop *loop, const struct ds4_step *step, struct ds4_err *err)
{
    int32_t n_row = ds4_stage_n_row(own_stage(loop));

    if (n_row == 0)
        return 0;
    if (loop->config.pipe->send(loop->pipe, step->step_no + (DS4_FAULT_POINT(ROWS_HEADER) ? 1 : 0),
                                ds4_stage_handoff(own_stage(loop)), n_row, pipe_deadline(loop),
                                err))
        return -1;
    atomic_fetch_add(&loop->sent_bytes, (uint64_t)n_row * ds4_stage_row_bytes(own_stage(loop)));
    return 0;
}

/* The record before the answer: stages must not learn later than the router. */
static int send_results(struct ds4_loop *loop, const struct ds4_step *step,
                        const struct ds4_tokens_out *out, struct ds4_err *err)
{
    struct ds4_loop_event event = {.kind = DS4_LOOP_TOKENS, .generation = loop->generation};

    enter(loop, DS4_PHASE_SEND);
    if (DS4_FAULT_POINT(NCCL_PEER_EXIT))
        raise(SIGKILL);
    if (DS4_FAULT_POINT(NCCL_HANG))
        return 0; /* nothing is sent, everyone waits */
    if (!ds4_stage_is_last(own_stage(loop)))
        return send_rows(loop, step, err);
    if (DS4_FAULT_POINT(RECORD_HEADER))
        loop->record.step_no++;
    if (DS4_FAULT_POINT(TOKEN_DELAY_MS))
        nanosleep(&(struct timespec){.tv_nsec = FAULT_DELAY_NS}, NULL);
    if (loop->config.pipe->publish(loop->pipe, &loop->record, pipe_deadline(loop), err))
        return ds4_err_wrap(err, "publishing step %" PRId64, step->step_no);
    ds4_buf_init(&event.payload, DS4_MAX_FRAME_BYTES);
    if (ds4_codec_encode_tokens(out, &loop->scratch, &event.payload, err)) {
        ds4_buf_deinit(&event.payload);
        return -1;
    }
    put_event(loop, &event);
    return 0;
}

/* The next posted step's rows may come in while this one computes, unless that step waits for this
 * one's token: its rows cannot exist before ours have gone on, and a receive that waits beside our work
 * must not be able to wait for it.  Nor if the record is not here yet that says how many drafts it has. */
static int expect_next(struct ds4_loop *loop, const struct ds4_step *step, struct ds4_err *err)
{
    const struct ds4_step *next = NULL;
    int32_t n_row = 0;

    if (ds4_stage_is_first(own_stage(loop)))
        return 0;
    pthread_mutex_lock(&loop->lock);
    if (loop->n_command > 0 && loop->command[loop->first_command].kind == COMMAND_STEP)
        next = &loop->command[loop->first_command].packet->step;
    if (next != NULL && next->generation == loop->generation &&
        next->step_no == step->step_no + 1 && next->n_tok <= loop->config.stage.max_step_tok)
        n_row = ds4_stage_rows_of(own_stage(loop), next);
    for (int32_t e = 0; n_row > 0 && e < next->n_entry; e++)
        if (next->entry[e].from_step >= step->step_no)
            n_row = 0;
    pthread_mutex_unlock(&loop->lock);
    if (n_row <= 0)
        return 0;
    return loop->config.pipe->expect(loop->pipe, step->step_no + 1, n_row, err);
}

/* Every stage but the last acknowledges the step; the last one has by its tokens.  After the results are
 * on their way: nobody waits for a copy of this stage. */
static int finish_step(struct ds4_loop *loop, const struct ds4_step *step, struct ds4_err *err)
{
    struct ds4_loop_event event = {.kind = DS4_LOOP_STEP_DONE, .generation = loop->generation};
    struct ds4_step_done done;

    enter(loop, DS4_PHASE_COMPUTE);
    if (ds4_stage_finish(own_stage(loop), step, &done, err)) {
        if (err->code == DS4_E_PROTOCOL)
            ds4_fatal_leave(DS4_EXIT_PROTOCOL, "%s", err->msg);
        return -1;
    }
    if (ds4_stage_is_last(own_stage(loop)))
        return 0;
    ds4_buf_init(&event.payload, DS4_MAX_FRAME_BYTES);
    if (ds4_codec_encode_step_done(&done, &event.payload, err)) {
        ds4_buf_deinit(&event.payload);
        return -1;
    }
    put_event(loop, &event);
    return 0;
}

static bool has_prefill(const struct ds4_step *step)
{
    for (int32_t i = 0; i < step->n_entry; i++)
        if (step->entry[i].kind == DS4_ENTRY_PREFILL)
            return true;
    return false;
}

/* What only a wrong router can cause ends the process; what peers or the machine cause, the
 * generation.  `begun`: the error is about the step itself, not about records or rows. */
static int begin_step(struct ds4_loop *loop, const struct ds4_step *step, struct ds4_err *err)
{
    if (step->step_no != loop->next_step)
        ds4_fatal_leave(DS4_EXIT_PROTOCOL,
                        "step %" PRId64 " of generation %u arrived, expected %" PRId64,
                        step->step_no, step->generation, loop->next_step);
    loop->next_step++;
    if (take_records(loop, step, err))
        return -1;
    enter(loop, DS4_PHASE_COMPUTE);
    if (ds4_stage_begin(own_stage(loop), step, err) == 0)
        return 0;
    if (err->code == DS4_E_PROTOCOL)
        ds4_fatal_leave(DS4_EXIT_PROTOCOL, "%s", err->msg);
    return -1;
}

static int execute(struct ds4_loop *loop, const struct ds4_step *step, struct ds4_err *err)
{
    bool last = ds4_stage_is_last(own_stage(loop));
    struct ds4_tokens_out out = {0};

    if (begin_step(loop, step, err) || receive_rows(loop, step, err))
        return -1;
    if (expect_next(loop, step, err))
        return -1;
    enter(loop, DS4_PHASE_COMPUTE);
    if (ds4_stage_forward(own_stage(loop), step, NULL, last ? &loop->record : NULL,
                          last ? &out : NULL, err))
        return -1;
    if (send_results(loop, step, &out, err))
        return -1;
    return finish_step(loop, step, err);
}

/* Nothing is posted.  Then the device's work is waited for, as part of the step: a device that hangs or
 * fails must not look idle. */
static bool is_idle(struct ds4_loop *loop)
{
    bool idle;

    pthread_mutex_lock(&loop->lock);
    idle = loop->n_command == 0;
    pthread_mutex_unlock(&loop->lock);
    return idle;
}

static void run_step(struct ds4_loop *loop, const struct ds4_step *step)
{
    struct ds4_err err = {0};
    int64_t computed_ns = atomic_load(&loop->phase_total_ns[DS4_PHASE_COMPUTE]);
    int rc;

    /* Posted before this side left the generation and the router heard of it. */
    if (step->generation != loop->generation)
        return;
    ds4_fatal_note_step(step);
    atomic_store(&loop->step_start_ns, ds4_clock_ns());
    atomic_store(&loop->step_no, step->step_no);
    atomic_store(&loop->prefill, has_prefill(step));
    atomic_store(&loop->in_step, true);
    rc = execute(loop, step, &err);
    if (rc == 0 && is_idle(loop)) {
        enter(loop, DS4_PHASE_COMPUTE);
        ds4_stage_settle(own_stage(loop));
    }
    atomic_store(&loop->in_step, false);
    if (rc == 0) {
        note_step(loop, atomic_load(&loop->phase_total_ns[DS4_PHASE_COMPUTE]) - computed_ns);
        return;
    }
    lose_generation(loop, &err);
}

/* ---- the thread ---- */

static void note_progress(void *arg, int64_t loaded_bytes, int64_t total_bytes)
{
    struct ds4_loop *loop = arg;

    atomic_store(&loop->loaded_bytes, loaded_bytes);
    atomic_store(&loop->total_bytes, total_bytes);
}

static void note_plan(void *arg, const struct ds4_stage *stage)
{
    struct ds4_loop_event event = {.kind = DS4_LOOP_PLANNED};

    ds4_stage_hello(stage, &event.hello);
    put_event(arg, &event);
}

/* Called by the step thread and the disk thread. */
static void note_job(void *arg, const struct ds4_kv_done *done)
{
    struct ds4_loop_event event = {.kind = DS4_LOOP_KV_DONE, .generation = done->generation};
    struct ds4_err err = {0};

    ds4_buf_init(&event.payload, DS4_MAX_FRAME_BYTES);
    if (ds4_codec_encode_kv_done(done, &event.payload, &err)) {
        ds4_log(DS4_LOG_ERROR, "kv.done", "message=\"%s\"", err.msg);
        ds4_buf_deinit(&event.payload);
        return;
    }
    put_event(arg, &event);
}

static int load(struct ds4_loop *loop, struct ds4_err *err)
{
    struct ds4_stage *stage = ds4_stage_new(&loop->config.stage, note_progress, loop, err);

    if (stage == NULL)
        return -1;
    atomic_store(&loop->stage, stage);
    ds4_fatal_set_stage(stage);
    return 0;
}

enum next { NEXT_COMMAND, NEXT_DROP, NEXT_CHECK, NEXT_STOP };

/* Sleeps until woken; in a generation not longer than check_ms.  False if that time passed. */
static bool wait_locked(struct ds4_loop *loop)
{
    struct timespec at = ds4_deadline_timespec(ds4_deadline_in_ms(loop->config.check_ms));

    if (loop->generation != 0 && loop->config.check_ms > 0)
        return pthread_cond_timedwait(&loop->wake, &loop->lock, &at) != ETIMEDOUT;
    return pthread_cond_wait(&loop->wake, &loop->lock) == 0;
}

static enum next next_command(struct ds4_loop *loop, struct command *command)
{
    enum next next = NEXT_COMMAND;

    pthread_mutex_lock(&loop->lock);
    while (next == NEXT_COMMAND && loop->n_command == 0 && loop->stop == STOP_NO && !loop->drop)
        if (!wait_locked(loop))
            next = NEXT_CHECK;
    if (loop->stop == STOP_NOW || (loop->n_command == 0 && loop->stop == STOP_DRAIN)) {
        next = NEXT_STOP;
    } else if (loop->drop) {
        next = NEXT_DROP;
        loop->drop = false;
        atomic_store(&loop->cancel, false);
    } else if (loop->n_command > 0) {
        next = NEXT_COMMAND;
        *command = loop->command[loop->first_command];
        loop->first_command = (loop->first_command + 1) % DS4_LOOP_COMMANDS;
        loop->n_command--;
    }
    pthread_mutex_unlock(&loop->lock);
    return next;
}

static void run_job(struct ds4_loop *loop, enum ds4_loop_job job,
                    const struct ds4_step_packet *packet)
{
    struct ds4_stage *stage = own_stage(loop);

    enter(loop, DS4_PHASE_COMPUTE);
    switch (job) {
    case DS4_LOOP_KV_WRITE:
        if (packet->kv_write.generation == loop->generation)
            ds4_stage_kv_write(stage, &packet->kv_write);
        break;
    case DS4_LOOP_KV_READ:
        if (packet->kv_read.generation == loop->generation)
            ds4_stage_kv_read(stage, &packet->kv_read);
        break;
    case DS4_LOOP_KV_UNLINK:
        if (packet->kv_unlink.generation == loop->generation)
            ds4_stage_kv_unlink(stage, &packet->kv_unlink);
        break;
    }
}

static void run_command(struct ds4_loop *loop, const struct command *command)
{
    switch (command->kind) {
    case COMMAND_FORM:
        run_form(loop, &command->form);
        break;
    case COMMAND_STEP:
        run_step(loop, &command->packet->step);
        ds4_loop_drop_packet(loop, command->packet);
        break;
    case COMMAND_JOB:
        run_job(loop, command->job, command->packet);
        ds4_loop_drop_packet(loop, command->packet);
        break;
    }
}

static void drop_generation(struct ds4_loop *loop)
{
    struct ds4_err err = {0};
    uint32_t generation = loop->generation;

    if (generation == 0)
        return;
    leave_generation(loop);
    ds4_fail(&err, DS4_E_CANCELLED, "generation %u was aborted", generation);
    tell(loop, DS4_LOOP_IDLE, generation, &err);
}

/* A stage that waits for commands is in no call of the pipe, and would learn last of a dead peer. */
static void check_neighbours(struct ds4_loop *loop)
{
    struct ds4_err err = {0};

    if (loop->config.pipe->check(loop->pipe, &err))
        lose_generation(loop, &err);
}

static void *run(void *arg)
{
    struct ds4_loop *loop = arg;
    struct command command;
    struct ds4_err err = {0};
    enum next next = NEXT_COMMAND;

    if (load(loop, &err)) {
        tell(loop, DS4_LOOP_LOAD_FAILED, 0, &err);
        return NULL;
    }
    tell(loop, DS4_LOOP_LOADED, 0, NULL);
    while (next != NEXT_STOP) {
        enter(loop, DS4_PHASE_COMMAND);
        next = next_command(loop, &command);
        if (next == NEXT_COMMAND)
            run_command(loop, &command);
        else if (next == NEXT_DROP)
            drop_generation(loop);
        else if (next == NEXT_CHECK)
            check_neighbours(loop);
    }
    leave_generation(loop);
    tell(loop, DS4_LOOP_STOPPED, 0, NULL);
    return NULL;
}

/* ---- life ---- */

const struct ds4_stage *ds4_loop_stage(const struct ds4_loop *loop)
{
    return atomic_load(&loop->stage);
}

static void init_arenas(struct ds4_loop *loop)
{
    ds4_arena_init(&loop->scratch, DS4_CODEC_ARENA_BYTES);
    ds4_arena_take(&loop->scratch, 1);
    for (size_t i = 0; i < DS4_LOOP_COMMANDS; i++) {
        struct ds4_step_packet *packet = &loop->packet[i];

        ds4_arena_init(&packet->arena, DS4_CODEC_ARENA_BYTES);
        ds4_arena_take(&packet->arena, 1);
        packet->empty = ds4_arena_mark(&packet->arena);
        put_packet_locked(loop, packet);
    }
}

static void free_storage(struct ds4_loop *loop)
{
    for (size_t i = 0; i < DS4_LOOP_COMMANDS; i++)
        ds4_arena_deinit(&loop->packet[i].arena);
    ds4_arena_deinit(&loop->scratch);
    pthread_cond_destroy(&loop->wake);
    pthread_mutex_destroy(&loop->lock);
    close(loop->event_fd);
    free(loop);
}

struct ds4_loop *ds4_loop_new(const struct ds4_loop_config *config, struct ds4_err *err)
{
    struct ds4_loop *loop = calloc(1, sizeof(*loop));
    pthread_condattr_t attributes;
    int rc;

    if (loop == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for the step thread");
        return NULL;
    }
    loop->config = *config;
    loop->config.stage.pipe = config->pipe;
    loop->config.stage.depth = config->depth;
    loop->config.stage.planned = note_plan;
    loop->config.stage.planned_arg = loop;
    loop->config.stage.kv_done = note_job;
    loop->config.stage.kv_done_arg = loop;
    loop->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE);
    if (loop->event_fd < 0) {
        ds4_fail(err, DS4_E_IO, "eventfd: %s", strerror(errno));
        free(loop);
        return NULL;
    }
    pthread_mutex_init(&loop->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC); /* the clock of deadlines */
    pthread_cond_init(&loop->wake, &attributes);
    pthread_condattr_destroy(&attributes);
    init_arenas(loop);
    atomic_store(&loop->step_no, -1);
    atomic_store(&loop->phase_start_ns, ds4_clock_ns());
    rc = pthread_create(&loop->thread, NULL, run, loop);
    if (rc == 0)
        return loop;
    ds4_fail(err, DS4_E_IO, "step thread: %s", strerror(rc));
    free_storage(loop);
    return NULL;
}

void ds4_loop_free(struct ds4_loop *loop)
{
    struct ds4_loop_event event;

    if (loop == NULL)
        return;
    pthread_mutex_lock(&loop->lock);
    loop->stop = STOP_NOW;
    interrupt_locked(loop);
    pthread_mutex_unlock(&loop->lock);
    pthread_join(loop->thread, NULL);
    ds4_fatal_set_stage(NULL);
    ds4_stage_free(atomic_load(&loop->stage));
    /* Last: the disk thread ends with the stage, and its last job makes an event. */
    while (ds4_loop_next_event(loop, &event))
        ds4_buf_deinit(&event.payload);
    free_storage(loop);
}

/* Control thread (steps 7 and 12).
 *
 * One poll loop over the socket, the step thread's events, signals and fault reports; between two
 * sleeps it does everything that is due.  It never waits for the step thread, so a heartbeat goes out
 * and the watchdog looks even when a step hangs in the driver.  The service manager's watchdog is fed
 * from here, and only while no step is overdue.
 *
 * A generation lives between FORMED and the first failure, ABORT, FORM or lost link.  Events of an
 * older one (the step thread was busy) are told by their number and dropped. */
#include "worker/control.h"

#include "common/clock.h"
#include "common/fault.h"
#include "common/log.h"
#include "common/progress.h"
#include "common/service.h"
#include "proto/codec.h"
#include "worker/card_watch.h"
#include "worker/fatal.h"
#include "worker/nvml.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#define RELEASE_MS      60000 /* for running answers after a SIGTERM, unless the router lets go before */
#define LEAVE_MS        10000 /* for the running step at a stop */
#define LEAVE_HARD_MS   12000
#define LINGER_MS       200 /* for the last frame of a worker */
#define EXTEND_EVERY_MS 20000
#define EXTEND_BY_MS    60000

struct control {
    struct ds4_control_config config;
    struct ds4_wbus *bus;
    struct ds4_loop *loop;
    struct ds4_card_watch *card; /* of the loaded stage; NULL: no card, or nothing to ask */
    struct ds4_card_state card_state;
    int signal_fd;
    struct ds4_frame_gate gate;
    struct ds4_buf in;  /* payload of the frame at hand */
    struct ds4_buf out; /* payload being sent */
    struct ds4_arena scratch;

    enum ds4_worker_state state;
    uint32_t generation; /* being formed or formed; 0 = none */
    char message[128];   /* why the last one ended */
    int64_t started_unix_s;
    struct ds4_progress loading; /* begun while `what` is set */
    bool link_up;
    bool planned; /* `hello` is filled */
    bool loaded;
    struct ds4_hello hello;
    bool welcomed;  /* the router of this link has answered */
    bool announced; /* READY=1 was said */
    struct ds4_deadline heartbeat;
    struct ds4_deadline ping;
    struct ds4_deadline extend;
    bool leaving; /* the step loop was told to stop */
    bool said_stopping;
    struct ds4_deadline release;    /* a stop waits no longer for the router */
    struct ds4_deadline leave;      /* the running step gets no longer */
    struct ds4_deadline leave_hard; /* then the process ends regardless */
    bool done;
    bool thread_ended;
    bool again; /* leaves to be started again */
    int exit_code;
    struct ds4_err *err;

    /* Fault report of another thread, see report_fatal. */
    pthread_t self;
    pthread_mutex_t report_lock; /* guards the two below */
    pthread_cond_t report_sent;
    const struct ds4_fatal_report *report;
    bool sent;
    int report_fd;
};

static const struct ds4_deadline never = {INT64_MAX};

static void finish(struct control *c, int exit_code)
{
    c->done = true;
    c->exit_code = exit_code;
}

/* The end of a worker that was asked to leave. */
static void finish_as_asked(struct control *c)
{
    if (c->again)
        ds4_fail(c->err, DS4_E_UNAVAILABLE, "the router asked for a restart");
    finish(c, c->again ? DS4_EXIT_TEMPORARY : DS4_EXIT_OK);
}

/* ---- sending ---- */

/* A frame that cannot be sent is not an error: without a link there is nobody to tell. */
static void send_frame(struct control *c, enum ds4_frame_kind kind, uint32_t generation,
                       struct ds4_str payload)
{
    struct ds4_err err = {0};

    if (c->link_up && ds4_wbus_send(c->bus, kind, generation, payload, &err))
        ds4_log(DS4_LOG_WARN, "bus.send", "message=\"%s\"", err.msg);
}

static void send_out(struct control *c, enum ds4_frame_kind kind, uint32_t generation, int encoded,
                     const struct ds4_err *err)
{
    if (encoded == 0)
        send_frame(c, kind, generation, ds4_buf_view(&c->out));
    else
        ds4_log(DS4_LOG_ERROR, "bus.encode", "kind=%s message=\"%s\"", ds4_frame_kind_name(kind),
                err->msg);
}

static uint64_t rss_bytes(void)
{
    FILE *file = fopen("/proc/self/statm", "re");
    unsigned long total = 0, resident = 0;

    if (file == NULL)
        return 0;
    if (fscanf(file, "%lu %lu", &total, &resident) != 2)
        resident = 0;
    fclose(file);
    return (uint64_t)resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

static double cpu_seconds(void)
{
    struct rusage usage = {0};

    (void)getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

static void send_health(struct control *c)
{
    const struct ds4_stage *stage = ds4_loop_stage(c->loop);
    struct ds4_loop_status status;
    struct ds4_health health;
    struct ds4_err err = {0};

    c->heartbeat = ds4_deadline_in_ms(c->config.heartbeat_ms);
    if (!c->link_up || !c->planned) /* nothing before HELLO */
        return;
    ds4_loop_get_status(c->loop, &status);
    health = (struct ds4_health){
        .stage = c->config.bus.stage,
        .generation = c->generation,
        .state = c->state,
        .step_no = status.step_no,
        .step_age_ms = status.step_age_ms,
        .loaded_bytes = status.loaded_bytes,
        .total_bytes = status.total_bytes,
        .steps_done = status.steps_done,
        .busy_seconds = status.busy_seconds,
        .wait_recv_seconds = status.wait_recv_seconds,
        .wait_token_seconds = status.wait_token_seconds,
        .wait_command_seconds = status.wait_command_seconds,
        .wait_send_seconds = status.wait_send_seconds,
        .sent_bytes = status.sent_bytes,
        .received_bytes = status.received_bytes,
        .cpu_seconds = cpu_seconds(),
        .started_unix_s = c->started_unix_s,
        .rss_bytes = rss_bytes(),
        .card = c->card_state,
    };
    memcpy(health.step_time, status.step_time, sizeof(health.step_time));
    if (stage != NULL)
        ds4_stage_health(stage, &health);
    snprintf(health.message, sizeof(health.message), "%s", c->message);
    ds4_buf_clear(&c->out);
    send_out(c, DS4_FRAME_HEALTH, c->generation, ds4_codec_encode_health(&health, &c->out, &err),
             &err);
}

static void send_hello(struct control *c)
{
    struct ds4_hello hello = c->hello;
    struct ds4_err err = {0};

    hello.pid = getpid();
    memcpy(hello.boot_id, c->config.bus.boot_id, sizeof(hello.boot_id));
    if (gethostname(hello.host, sizeof(hello.host) - 1) != 0)
        hello.host[0] = 0;
    ds4_buf_clear(&c->out);
    send_out(c, DS4_FRAME_HELLO, 0, ds4_codec_encode_hello(&hello, &c->out, &err), &err);
}

static void set_state(struct control *c, enum ds4_worker_state state, const char *message)
{
    static const char *const text[] = {"starting", "loading",  "idle",  "forming",
                                       "ready",    "draining", "failed"};

    c->state = state;
    snprintf(c->message, sizeof(c->message), "%s", message);
    ds4_log(DS4_LOG_INFO, "state", "state=%s generation=%" PRIu32 " message=\"%s\"", text[state],
            c->generation, message);
    ds4_service_status("%s, generation %" PRIu32 "%s%s", text[state], c->generation,
                       message[0] == 0 ? "" : ": ", message);
    send_health(c);
}

/* ---- leaving ---- */

/* Once, whether a stop waits for running answers first or not. */
static void say_stopping(struct control *c)
{
    if (!c->said_stopping)
        ds4_service_stopping();
    c->said_stopping = true;
}

static void leave(struct control *c, bool drain, const char *why)
{
    if (c->leaving) {
        if (!drain)
            ds4_loop_stop(c->loop, false);
        return;
    }
    c->leaving = true;
    c->release = never;
    say_stopping(c);
    set_state(c, DS4_WORKER_DRAINING, why);
    if (!c->loaded) { /* loading cannot be interrupted, nor needs it be */
        finish_as_asked(c);
        return;
    }
    ds4_loop_stop(c->loop, drain);
    c->leave = ds4_deadline_in_ms(LEAVE_MS);
    c->leave_hard = ds4_deadline_in_ms(LEAVE_HARD_MS);
}

/* The service manager stops this stage, often the router and the other stages too: answers that run may
 * finish.  The router, told by the heartbeat, admits no more and lets go when the last one has. */
static void ask_to_leave(struct control *c)
{
    say_stopping(c);
    set_state(c, DS4_WORKER_DRAINING, "stopped by a signal; running answers may finish");
    c->release = ds4_deadline_in_ms(RELEASE_MS);
}

static void take_signals(struct control *c)
{
    int signal;

    while ((signal = ds4_service_next_signal(c->signal_fd)) != 0) {
        if (signal == SIGHUP && c->config.reload != NULL)
            c->config.reload(c->config.reload_arg);
        if (signal != SIGTERM && signal != SIGINT)
            continue;
        if (c->leaving)
            finish(c, DS4_EXIT_OK);
        else if (c->state == DS4_WORKER_READY && c->link_up)
            ask_to_leave(c);
        else
            leave(c, false, "stopped by a signal");
    }
}

/* A stop that waits for running answers ends with what they run in. */
static void check_release(struct control *c)
{
    if (c->state != DS4_WORKER_DRAINING || c->leaving)
        return;
    if (!c->link_up || c->generation == 0)
        leave(c, false, "stopped by a signal; nothing runs any more");
    else if (ds4_deadline_passed(c->release))
        leave(c, false, "stopped by a signal; running answers took too long");
}

/* ---- generations ---- */

/* The step thread's own event, if it comes, is of a generation we are no longer in. */
static void leave_generation(struct control *c, const char *why)
{
    if (c->generation == 0)
        return;
    ds4_loop_abort(c->loop);
    c->gate.generation = 0;
    c->generation = 0;
    if (c->state != DS4_WORKER_DRAINING)
        set_state(c, DS4_WORKER_IDLE, why);
}

static void send_form_failed(struct control *c, uint32_t generation, const char *reason)
{
    struct ds4_note note;
    struct ds4_err err = {0};

    snprintf(note.text, sizeof(note.text), "%s", reason);
    ds4_buf_clear(&c->out);
    send_out(c, DS4_FRAME_FORM_FAILED, generation, ds4_codec_encode_note(&note, &c->out, &err),
             &err);
}

static void take_form(struct control *c)
{
    struct ds4_form form;
    struct ds4_err err = {0};

    if (ds4_codec_decode_form(ds4_buf_view(&c->in), &c->scratch, &form, &err))
        ds4_fatal_leave(DS4_EXIT_PROTOCOL, "%s", err.msg);
    if (c->state != DS4_WORKER_IDLE && c->state != DS4_WORKER_FORMING &&
        c->state != DS4_WORKER_READY) {
        send_form_failed(c, form.generation,
                         c->loaded ? "the worker is leaving" : "the weights are still loading");
        return;
    }
    leave_generation(c, "a new generation begins");
    if (ds4_loop_post_form(c->loop, &form, &err))
        ds4_fatal_leave(DS4_EXIT_PROTOCOL, "%s", err.msg);
    c->generation = form.generation;
    set_state(c, DS4_WORKER_FORMING, "");
}

static void take_pipe_id(struct control *c, uint32_t generation)
{
    struct ds4_pipe_id id;
    struct ds4_err err = {0};

    if (ds4_codec_decode_pipe_id(ds4_buf_view(&c->in), &c->scratch, &id, &err))
        ds4_fatal_leave(DS4_EXIT_PROTOCOL, "%s", err.msg);
    if (generation == c->generation)
        ds4_loop_give_pipe_id(c->loop, generation, &id);
}

static void take_step(struct control *c)
{
    struct ds4_step_packet *packet = ds4_loop_take_packet(c->loop);
    struct ds4_err err = {0};

    if (packet == NULL)
        ds4_fatal_leave(DS4_EXIT_PROTOCOL, "more than %d steps posted", DS4_LOOP_COMMANDS);
    if (ds4_codec_decode_step(ds4_buf_view(&c->in), c->generation, &packet->arena, &packet->step,
                              &err) ||
        ds4_loop_post_step(c->loop, packet, &err))
        ds4_fatal_leave(DS4_EXIT_PROTOCOL, "%s", err.msg);
}

static void take_job(struct control *c, enum ds4_frame_kind kind)
{
    struct ds4_step_packet *packet = ds4_loop_take_packet(c->loop);
    struct ds4_str in = ds4_buf_view(&c->in);
    enum ds4_loop_job job = DS4_LOOP_KV_WRITE;
    struct ds4_err err = {0};
    int rc;

    if (packet == NULL)
        ds4_fatal_leave(DS4_EXIT_PROTOCOL, "more than %d steps and jobs posted", DS4_LOOP_COMMANDS);
    if (kind == DS4_FRAME_KV_WRITE) {
        rc = ds4_codec_decode_kv_write(in, c->generation, &packet->arena, &packet->kv_write, &err);
    } else if (kind == DS4_FRAME_KV_READ) {
        job = DS4_LOOP_KV_READ;
        rc = ds4_codec_decode_kv_read(in, c->generation, &packet->arena, &packet->kv_read, &err);
    } else {
        job = DS4_LOOP_KV_UNLINK;
        rc =
            ds4_codec_decode_kv_unlink(in, c->generation, &packet->arena, &packet->kv_unlink, &err);
    }
    if (rc != 0 || ds4_loop_post_job(c->loop, job, packet, &err))
        ds4_fatal_leave(DS4_EXIT_PROTOCOL, "%s", err.msg);
}

static void take_refusal(struct control *c)
{
    struct ds4_note note;

    if (ds4_codec_decode_note(ds4_buf_view(&c->in), &c->scratch, &note, c->err))
        finish(c, DS4_EXIT_PROTOCOL);
    else
        finish(c, DS4_EXIT_CONFIG);
    if (c->exit_code == DS4_EXIT_CONFIG)
        ds4_fail(c->err, DS4_E_INVALID, "refused by the router: %s", note.text);
}

static void take_frame(struct control *c, const struct ds4_frame *frame)
{
    c->welcomed = true;
    if (!ds4_frame_admit(&c->gate, frame))
        return;
    if (frame->kind == DS4_FRAME_STEP && DS4_FAULT_POINT(STEP_MSG_DROP))
        return;
    switch (frame->kind) {
    case DS4_FRAME_FORM:
        take_form(c);
        break;
    case DS4_FRAME_STEP:
        take_step(c);
        break;
    case DS4_FRAME_PIPE_ID:
        take_pipe_id(c, frame->generation);
        break;
    case DS4_FRAME_KV_WRITE:
    case DS4_FRAME_KV_READ:
    case DS4_FRAME_KV_UNLINK:
        take_job(c, frame->kind);
        break;
    case DS4_FRAME_ABORT:
        if (frame->generation == c->generation)
            leave_generation(c, "aborted by the router");
        break;
    case DS4_FRAME_DRAIN:
        c->again = c->state != DS4_WORKER_DRAINING;
        leave(c, true, c->again ? "the router asked for a restart" : "the router let go");
        break;
    case DS4_FRAME_STOP:
        leave(c, false, "stopped by the router");
        break;
    case DS4_FRAME_REFUSED:
        take_refusal(c);
        break;
    default: /* WELCOME; what only workers send was refused by frame.c */
        break;
    }
}

/* Only in a build with faults: another message like this one, of the generation before or the same. */
static void inject_frames(struct control *c, const struct ds4_frame *frame)
{
    struct ds4_frame stale = *frame;

    stale.generation--;
    if (DS4_FAULT_POINT(STALE_EPOCH_MSG))
        take_frame(c, &stale);
    if (DS4_FAULT_POINT(STEP_MSG_DUP))
        take_frame(c, frame);
}

static void take_frames(struct control *c)
{
    struct ds4_frame frame;
    struct ds4_err err = {0};
    int rc = 0;

    while (!c->done && (rc = ds4_wbus_recv(c->bus, &frame, &c->in, &err)) > 0) {
        if (frame.kind == DS4_FRAME_STEP)
            inject_frames(c, &frame);
        take_frame(c, &frame);
    }
    if (!c->done && rc < 0)
        ds4_fatal_leave(DS4_EXIT_PROTOCOL, "%s", err.msg);
}

static void take_links(struct control *c)
{
    enum ds4_wbus_link link;

    while ((link = ds4_wbus_next_link(c->bus)) != DS4_WBUS_SAME) {
        c->link_up = link == DS4_WBUS_UP;
        c->welcomed = false;
        c->gate.next_sequence = 0;
        ds4_log(DS4_LOG_INFO, "router.link", "up=%d stale_frames=%" PRIu64 " lost_frames=%" PRIu64,
                c->link_up, c->gate.n_stale, c->gate.n_lost);
        if (!c->link_up) {
            leave_generation(c, "the router is gone");
        } else if (c->planned) {
            send_hello(c);
            send_health(c);
        }
    }
}

/* ---- what the step thread says ---- */

static void load_failed(struct control *c, const struct ds4_err *err)
{
    bool temporary = err->code == DS4_E_BUSY || err->code == DS4_E_TIMEOUT;

    if (c->err != NULL)
        *c->err = *err;
    c->thread_ended = true;
    finish(c, temporary ? DS4_EXIT_TEMPORARY : DS4_EXIT_CONFIG);
}

static void take_generation_event(struct control *c, const struct ds4_loop_event *event)
{
    if (event->generation != c->generation)
        return;
    switch (event->kind) {
    case DS4_LOOP_FORMED:
        c->gate.generation = event->generation;
        send_frame(c, DS4_FRAME_FORMED, c->generation, DS4_STR(""));
        set_state(c, DS4_WORKER_READY, "");
        break;
    case DS4_LOOP_FORM_FAILED:
        send_form_failed(c, event->generation, event->err.msg);
        c->generation = 0;
        if (c->state != DS4_WORKER_DRAINING)
            set_state(c, DS4_WORKER_IDLE, event->err.msg);
        break;
    case DS4_LOOP_OFFER:
        send_frame(c, DS4_FRAME_PIPE_OFFER, c->generation, ds4_buf_view(&event->payload));
        break;
    case DS4_LOOP_TOKENS:
        send_frame(c, DS4_FRAME_TOKENS, c->generation, ds4_buf_view(&event->payload));
        break;
    case DS4_LOOP_KV_DONE:
        send_frame(c, DS4_FRAME_KV_DONE, c->generation, ds4_buf_view(&event->payload));
        break;
    case DS4_LOOP_STEP_DONE:
        send_frame(c, DS4_FRAME_STEP_DONE, c->generation, ds4_buf_view(&event->payload));
        break;
    default: /* DS4_LOOP_IDLE */
        c->gate.generation = 0;
        c->generation = 0;
        if (c->state != DS4_WORKER_DRAINING)
            set_state(c, DS4_WORKER_IDLE, event->err.msg);
        break;
    }
}

/* From here on the heartbeats say what the driver says of the card. */
static void open_card(struct control *c)
{
    char address[DS4_CARD_ADDRESS_BYTES];
    struct ds4_err err = {0};

    ds4_stage_card(ds4_loop_stage(c->loop), address);
    if (address[0] == '\0')
        return;
    c->card = ds4_card_watch_new(DS4_NVML_LIBRARY, address, &err);
    if (c->card == NULL)
        ds4_log(DS4_LOG_WARN, "card.watch", "card=%s message=\"%s\"", address, err.msg);
}

static void take_events(struct control *c)
{
    struct ds4_loop_event event;

    while (!c->done && ds4_loop_next_event(c->loop, &event)) {
        switch (event.kind) {
        case DS4_LOOP_PLANNED:
            c->hello = event.hello;
            c->planned = true;
            if (c->link_up)
                send_hello(c);
            send_health(c);
            break;
        case DS4_LOOP_LOADED:
            c->loaded = true;
            ds4_progress_end(&c->loading);
            open_card(c);
            set_state(c, DS4_WORKER_IDLE, "");
            break;
        case DS4_LOOP_LOAD_FAILED:
            load_failed(c, &event.err);
            break;
        case DS4_LOOP_STOPPED:
            c->thread_ended = true;
            finish_as_asked(c);
            break;
        default:
            take_generation_event(c, &event);
            break;
        }
        ds4_buf_deinit(&event.payload);
    }
}

/* ---- faults ---- */

/* The last frame of this process. */
static void send_report(struct control *c, const struct ds4_fatal_report *report)
{
    struct ds4_err err = {0};

    ds4_buf_clear(&c->out);
    send_out(c, DS4_FRAME_FATAL, report->generation, ds4_codec_encode_fatal(report, &c->out, &err),
             &err);
    ds4_wbus_close(c->bus, LINGER_MS);
    c->bus = NULL;
    c->link_up = false;
}

/* Called by ds4_fatal_leave on the thread that found the fault.  The socket belongs to the control
 * thread: others hand the report over and wait a little. */
static void report_fatal(void *arg, const struct ds4_fatal_report *report)
{
    struct control *c = arg;
    struct timespec until = ds4_deadline_timespec(ds4_deadline_in_ms(2 * LINGER_MS));
    uint64_t one = 1;

    if (pthread_equal(pthread_self(), c->self)) {
        send_report(c, report);
        return;
    }
    pthread_mutex_lock(&c->report_lock);
    c->report = report;
    if (write(c->report_fd, &one, sizeof(one)) == sizeof(one))
        while (!c->sent && pthread_cond_clockwait(&c->report_sent, &c->report_lock, CLOCK_MONOTONIC,
                                                  &until) == 0)
            continue;
    pthread_mutex_unlock(&c->report_lock);
}

static void take_report(struct control *c)
{
    pthread_mutex_lock(&c->report_lock);
    if (c->report != NULL) {
        send_report(c, c->report);
        c->sent = true;
        pthread_cond_signal(&c->report_sent);
    }
    pthread_mutex_unlock(&c->report_lock);
    while (c->sent) /* the other thread ends the process */
        pause();
}

static void watch_step(struct control *c)
{
    struct ds4_loop_status status;
    int32_t limit_ms;

    ds4_loop_get_status(c->loop, &status);
    limit_ms = status.prefill ? c->config.prefill_ms : c->config.step_ms;
    if (status.in_step && status.phase == DS4_PHASE_COMPUTE && status.phase_age_ms > limit_ms)
        ds4_fatal_leave(DS4_EXIT_STUCK, "step %" PRId64 " computes for %" PRId64 " ms, limit %d",
                        status.step_no, status.phase_age_ms, (int)limit_ms);
}

/* The router counts the fault before it is told that this worker leaves. */
static void watch_card(struct control *c)
{
    struct ds4_err err = {0};
    int rc = c->card == NULL ? 0 : ds4_card_watch_get(c->card, &c->card_state, &err);

    if (c->gate.generation != 0 && DS4_FAULT_POINT(CARD_XID)) { /* of a stage that serves */
        c->card_state.told = true;
        c->card_state.xid[DS4_XID_79]++;
        rc = ds4_fail(&err, DS4_E_CORRUPT, "Xid 79: a deliberate fault");
    }
    if (rc == 0)
        return;
    send_health(c);
    ds4_fatal_leave(DS4_EXIT_OPERATOR, "%s", err.msg);
}

/* ---- time ---- */

static void report_loading(struct control *c)
{
    struct ds4_loop_status status;
    char text[160];

    ds4_loop_get_status(c->loop, &status);
    if (c->state != DS4_WORKER_LOADING || status.total_bytes <= 0)
        return;
    if (c->loading.what == NULL)
        ds4_progress_begin(&c->loading, "loading weights", status.total_bytes);
    ds4_progress_update(&c->loading, status.loaded_bytes);
    ds4_progress_text(status.loaded_bytes, status.total_bytes, ds4_clock_ns() - c->loading.began_ns,
                      text, sizeof(text));
    ds4_service_status("loading %s", text);
}

/* READY=1 means: the weights are loaded and a router took our HELLO.  Until then the start is
 * extended, because a router that comes late must not cost the loaded weights. */
static void tell_service_manager(struct control *c)
{
    if (!c->announced && c->welcomed && c->loaded) {
        ds4_service_ready();
        c->announced = true;
        c->extend = never;
        if (ds4_service_watchdog_ms() > 0)
            c->ping = ds4_deadline_in_ms(0);
    }
    if (ds4_deadline_passed(c->extend)) {
        ds4_service_extend_start(EXTEND_BY_MS);
        c->extend = ds4_deadline_in_ms(EXTEND_EVERY_MS);
    }
    if (ds4_deadline_passed(c->ping)) {
        ds4_service_ping();
        c->ping = ds4_deadline_in_ms(ds4_service_watchdog_ms());
    }
}

static void do_what_is_due(struct control *c)
{
    watch_step(c);
    tell_service_manager(c);
    if (ds4_deadline_passed(c->heartbeat)) {
        report_loading(c);
        watch_card(c);
        send_health(c);
    }
    check_release(c);
    if (ds4_deadline_passed(c->leave)) {
        c->leave = never;
        leave_generation(c, "the running step took too long");
    }
    if (ds4_deadline_passed(c->leave_hard))
        finish_as_asked(c);
}

static int32_t sleep_ms(const struct control *c)
{
    const struct ds4_deadline all[] = {c->heartbeat, c->ping,  c->extend,
                                       c->release,   c->leave, c->leave_hard};
    struct ds4_deadline first = never;

    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        if (all[i].at_ns < first.at_ns)
            first = all[i];
    return ds4_deadline_left_ms(first);
}

/* ---- life ---- */

static int open_all(struct control *c, struct ds4_err *err)
{
    c->signal_fd = ds4_service_open_signals(err);
    if (c->signal_fd < 0)
        return DS4_EXIT_TEMPORARY;
    c->report_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (c->report_fd < 0) {
        ds4_fail(err, DS4_E_IO, "eventfd: %s", strerror(errno));
        return DS4_EXIT_TEMPORARY;
    }
    c->bus = ds4_wbus_open(&c->config.bus, err);
    if (c->bus == NULL)
        return DS4_EXIT_CONFIG;
    ds4_fatal_init(c->config.bus.stage);
    ds4_fatal_set_report(report_fatal, c);
    c->loop = ds4_loop_new(&c->config.loop, err);
    return c->loop == NULL ? DS4_EXIT_TEMPORARY : DS4_EXIT_OK;
}

/* Whether joining the step thread is a matter of moments; one that still loads or computes is left to
 * the end of the process. */
static bool can_join(const struct control *c)
{
    struct ds4_loop_status status;

    if (c->thread_ended || c->loop == NULL)
        return true;
    ds4_loop_get_status(c->loop, &status);
    return status.phase == DS4_PHASE_COMMAND;
}

static void close_all(struct control *c)
{
    ds4_fatal_set_report(NULL, NULL);
    ds4_card_watch_free(c->card);
    if (can_join(c))
        ds4_loop_free(c->loop);
    ds4_wbus_close(c->bus, LINGER_MS);
    if (c->report_fd >= 0)
        close(c->report_fd);
    if (c->signal_fd >= 0)
        close(c->signal_fd);
    ds4_buf_deinit(&c->in);
    ds4_buf_deinit(&c->out);
    ds4_arena_deinit(&c->scratch);
}

static void run(struct control *c)
{
    int fd[3] = {c->signal_fd, ds4_loop_event_fd(c->loop), c->report_fd};

    while (!c->done) {
        ds4_wbus_wait(c->bus, fd, sizeof(fd) / sizeof(fd[0]), sleep_ms(c));
        take_report(c);
        take_links(c);
        take_frames(c);
        take_events(c);
        take_signals(c);
        do_what_is_due(c);
    }
    if (c->exit_code == DS4_EXIT_OK || c->again)
        send_frame(c, DS4_FRAME_BYE, c->generation, DS4_STR(""));
}

int ds4_control_run(const struct ds4_control_config *config, struct ds4_err *err)
{
    struct control c = {
        .config = *config,
        .signal_fd = -1,
        .report_fd = -1,
        .self = pthread_self(),
        .started_unix_s = ds4_clock_unix_ns() / DS4_NS_PER_SEC,
        .err = err,
        .heartbeat = {0},
        .extend = {0},
        .ping = never,
        .release = never,
        .leave = never,
        .leave_hard = never,
        .report_lock = PTHREAD_MUTEX_INITIALIZER,
        .report_sent = PTHREAD_COND_INITIALIZER,
    };

    ds4_buf_init(&c.in, DS4_MAX_FRAME_BYTES);
    ds4_buf_init(&c.out, DS4_MAX_FRAME_BYTES);
    ds4_arena_init(&c.scratch, DS4_CODEC_ARENA_BYTES);
    c.exit_code = open_all(&c, err);
    if (c.exit_code == DS4_EXIT_OK) {
        set_state(&c, DS4_WORKER_LOADING, "");
        run(&c);
    }
    close_all(&c);
    return c.exit_code;
}

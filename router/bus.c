/* ZeroMQ in a uv loop (steps 6 and 12).
 *
 * The socket's fd is edge-triggered and stands for "something changed inside", not for "readable": a
 * send may swallow the edge of a message that has arrived.  So after every wake-up, and again
 * after every turn in which we may have sent, ZMQ_EVENTS is asked until there is nothing left.
 * Names are parsed, never trusted: a worker speaks for the stage and boot its name says, and HELLO must say
 * the same.
 * Invariant: a frame reaches the cluster only if envelope, kind, size and payload are all valid. */
#include "router/bus.h"

#include "common/arena.h"
#include "common/buf.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/metrics.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "router/bus_auth.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <uv.h>
#include <zmq.h>

#define DS4_BUS_TICK_MS    100
#define DS4_BUS_LINGER_MS  500
#define DS4_BUS_LOG_BURST  5
#define DS4_BUS_MAX_DRAIN  4096 /* frames per wake-up, so that HTTP gets its turn */
#define DS4_IDENTITY_BYTES 64
#define DS4_N_HANDLES      3

/* The connection of one stage's newest boot. */
struct bus_peer {
    bool known;
    struct ds4_peer peer;
    uint64_t next_sequence; /* of frames to it */
    struct ds4_frame_gate gate;
};

struct ds4_bus {
    struct ds4_cluster *cluster; /* borrowed, NULL = none */
    struct ds4_metrics *metrics;
    void *context;
    void *socket;
    struct ds4_bus_auth *auth; /* NULL with ipc */
    int lock_fd;
    int32_t n_open_handles;
    uv_poll_t poll;
    uv_prepare_t prepare;
    uv_timer_t timer;
    struct bus_peer peer[DS4_MAX_STAGES];
    int32_t n_form_stage; /* stages of the generation being formed or running */
    struct ds4_arena arena;
    struct ds4_buf out;
    struct ds4_log_limit dropped_limit;
};

/* ---- names --------------------------------------------------------------------------------------- */

static size_t write_identity(const struct ds4_peer *peer, char out[DS4_IDENTITY_BYTES])
{
    int n = snprintf(out, DS4_IDENTITY_BYTES, "stage-%d-", peer->stage);

    for (size_t i = 0; i < DS4_ID_BYTES; i++)
        n += snprintf(out + n, DS4_IDENTITY_BYTES - (size_t)n, "%02x", peer->boot_id[i]);
    return (size_t)n;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Only the form that write_identity gives; one name, one spelling. */
static bool read_identity(struct ds4_str name, struct ds4_peer *peer)
{
    struct ds4_str prefix = DS4_STR("stage-");
    char again[DS4_IDENTITY_BYTES];
    size_t i;

    if (!ds4_str_starts(name, prefix))
        return false;
    *peer = (struct ds4_peer){0};
    for (i = prefix.len; i < name.len && i < prefix.len + 3 && name.ptr[i] != '-'; i++) {
        if (name.ptr[i] < '0' || name.ptr[i] > '9')
            return false;
        peer->stage = peer->stage * 10 + (name.ptr[i] - '0');
    }
    if (peer->stage >= DS4_MAX_STAGES || name.len != i + 1 + 2 * (size_t)DS4_ID_BYTES)
        return false;
    i++;
    for (size_t b = 0; b < DS4_ID_BYTES; b++) {
        int high = hex_digit(name.ptr[i + 2 * b]), low = hex_digit(name.ptr[i + 2 * b + 1]);

        if (high < 0 || low < 0)
            return false;
        peer->boot_id[b] = (uint8_t)(high * 16 + low);
    }
    return ds4_str_equal(name, (struct ds4_str){again, write_identity(peer, again)});
}

/* ---- sending ------------------------------------------------------------------------------------- */

static int send_part(struct ds4_bus *bus, const void *bytes, size_t n, int more)
{
    int rc;

    do
        rc = zmq_send(bus->socket, bytes, n, ZMQ_DONTWAIT | more);
    while (rc < 0 && errno == EINTR);
    return rc < 0 ? -1 : 0;
}

static int send_frame(struct ds4_bus *bus, const struct ds4_peer *to, enum ds4_frame_kind kind,
                      uint32_t generation, struct ds4_str payload, struct ds4_err *err)
{
    struct bus_peer *peer = &bus->peer[to->stage];
    struct ds4_frame frame = {
        .kind = kind,
        .generation = generation,
        .payload_bytes = (uint32_t)payload.len,
    };
    uint8_t envelope[DS4_ENVELOPE_BYTES];
    char name[DS4_IDENTITY_BYTES];
    size_t n = write_identity(to, name);

    if (memcmp(peer->peer.boot_id, to->boot_id, DS4_ID_BYTES) == 0)
        frame.sequence = peer->next_sequence++;
    ds4_frame_write(&frame, envelope);
    if (send_part(bus, name, n, ZMQ_SNDMORE) != 0 ||
        send_part(bus, envelope, sizeof(envelope), ZMQ_SNDMORE) != 0 ||
        send_part(bus, payload.ptr, payload.len, 0) != 0) {
        ds4_metric_add(bus->metrics, DS4_M_ZMQ_DROPPED, 1, "full");
        return ds4_fail(err, DS4_E_IO, "could not send %s to stage %d: %s",
                        ds4_frame_kind_name(kind), to->stage, zmq_strerror(errno));
    }
    ds4_metric_add(bus->metrics, DS4_M_ZMQ_MESSAGES, 1, "out");
    return 0;
}

/* For the commands whose loss the heartbeat rules make good. */
static void send_or_log(struct ds4_bus *bus, const struct ds4_peer *to, enum ds4_frame_kind kind,
                        uint32_t generation, struct ds4_str payload)
{
    struct ds4_err err = {0};

    if (send_frame(bus, to, kind, generation, payload, &err) != 0)
        ds4_log_limited(&bus->dropped_limit, DS4_BUS_LOG_BURST, DS4_LOG_WARN, "bus.send",
                        "error=\"%s\"", err.msg);
}

/* What lies in bus->out goes to every stage. */
static int send_to_all(struct ds4_bus *bus, enum ds4_frame_kind kind, uint32_t generation,
                       struct ds4_err *err)
{
    int rc = 0;

    for (int32_t s = 0; s < bus->n_form_stage && rc == 0; s++)
        rc = send_frame(bus, &bus->peer[s].peer, kind, generation, ds4_buf_view(&bus->out), err);
    return rc;
}

static int send_step(void *owner, const struct ds4_step *step, struct ds4_err *err)
{
    struct ds4_bus *bus = owner;
    struct ds4_arena_mark mark = ds4_arena_mark(&bus->arena);
    int rc;

    ds4_buf_clear(&bus->out);
    rc = ds4_codec_encode_step(step, &bus->arena, &bus->out, err);
    ds4_arena_reset(&bus->arena, mark);
    return rc != 0 ? -1 : send_to_all(bus, DS4_FRAME_STEP, step->generation, err);
}

static int send_kv_write(void *owner, const struct ds4_kv_write *write, struct ds4_err *err)
{
    struct ds4_bus *bus = owner;

    ds4_buf_clear(&bus->out);
    if (ds4_codec_encode_kv_write(write, &bus->out, err) != 0)
        return -1;
    return send_to_all(bus, DS4_FRAME_KV_WRITE, write->generation, err);
}

static int send_kv_read(void *owner, const struct ds4_kv_read *read, struct ds4_err *err)
{
    struct ds4_bus *bus = owner;
    struct ds4_arena_mark mark = ds4_arena_mark(&bus->arena);
    int rc;

    ds4_buf_clear(&bus->out);
    rc = ds4_codec_encode_kv_read(read, &bus->arena, &bus->out, err);
    ds4_arena_reset(&bus->arena, mark);
    return rc != 0 ? -1 : send_to_all(bus, DS4_FRAME_KV_READ, read->generation, err);
}

static int send_kv_unlink(void *owner, const struct ds4_kv_unlink *unlink_, struct ds4_err *err)
{
    struct ds4_bus *bus = owner;

    ds4_buf_clear(&bus->out);
    if (ds4_codec_encode_kv_unlink(unlink_, &bus->out, err) != 0)
        return -1;
    return send_to_all(bus, DS4_FRAME_KV_UNLINK, unlink_->generation, err);
}

static int send_welcome(void *owner, const struct ds4_peer *to)
{
    return send_frame(owner, to, DS4_FRAME_WELCOME, 0, DS4_STR(""), NULL);
}

static void send_refused(void *owner, const struct ds4_peer *to, const char *why)
{
    struct ds4_bus *bus = owner;
    struct ds4_note note;

    snprintf(note.text, sizeof(note.text), "%s", why);
    ds4_buf_clear(&bus->out);
    if (ds4_codec_encode_note(&note, &bus->out, NULL) == 0)
        send_or_log(bus, to, DS4_FRAME_REFUSED, 0, ds4_buf_view(&bus->out));
}

static void send_form(void *owner, const struct ds4_peer *to, const struct ds4_form *form)
{
    struct ds4_bus *bus = owner;
    struct ds4_err err = {0};

    bus->n_form_stage = form->n_stage;
    ds4_buf_clear(&bus->out);
    if (ds4_codec_encode_form(form, &bus->out, &err) != 0) {
        ds4_log(DS4_LOG_ERROR, "bus.form", "error=\"%s\"", err.msg);
        return;
    }
    send_or_log(bus, to, DS4_FRAME_FORM, form->generation, ds4_buf_view(&bus->out));
}

static void send_pipe_id(void *owner, const struct ds4_peer *to, uint32_t generation,
                         const struct ds4_pipe_id *id)
{
    struct ds4_bus *bus = owner;

    ds4_buf_clear(&bus->out);
    if (ds4_codec_encode_pipe_id(id, &bus->out, NULL) == 0)
        send_or_log(bus, to, DS4_FRAME_PIPE_ID, generation, ds4_buf_view(&bus->out));
}

static void send_abort(void *owner, const struct ds4_peer *to, uint32_t generation)
{
    send_or_log(owner, to, DS4_FRAME_ABORT, generation, DS4_STR(""));
}

static void send_stop(void *owner, const struct ds4_peer *to, uint32_t generation)
{
    send_or_log(owner, to, DS4_FRAME_STOP, generation, DS4_STR(""));
}

static void send_drain(void *owner, const struct ds4_peer *to, uint32_t generation)
{
    send_or_log(owner, to, DS4_FRAME_DRAIN, generation, DS4_STR(""));
}

struct ds4_sched_port ds4_bus_sched_port(struct ds4_bus *bus)
{
    return (struct ds4_sched_port){
        .owner = bus,
        .send_step = send_step,
        .send_kv_write = send_kv_write,
        .send_kv_read = send_kv_read,
        .send_kv_unlink = send_kv_unlink,
    };
}

struct ds4_cluster_port ds4_bus_cluster_port(struct ds4_bus *bus)
{
    return (struct ds4_cluster_port){
        .owner = bus,
        .send_welcome = send_welcome,
        .send_refused = send_refused,
        .send_form = send_form,
        .send_pipe_id = send_pipe_id,
        .send_abort = send_abort,
        .send_stop = send_stop,
        .send_drain = send_drain,
    };
}

/* ---- receiving ----------------------------------------------------------------------------------- */

static void drop(struct ds4_bus *bus, const char *reason, const struct ds4_err *err)
{
    ds4_metric_add(bus->metrics, DS4_M_ZMQ_DROPPED, 1, reason);
    ds4_log_limited(&bus->dropped_limit, DS4_BUS_LOG_BURST, DS4_LOG_WARN, "bus.drop",
                    "reason=%s error=\"%s\"", reason, err->msg);
}

static int take_hello(struct ds4_bus *bus, const struct ds4_peer *from, struct ds4_str payload,
                      int64_t now_ns, struct ds4_err *err)
{
    struct ds4_hello hello;
    struct bus_peer *peer = &bus->peer[from->stage];

    if (ds4_codec_decode_hello(payload, &bus->arena, &hello, err) != 0)
        return -1;
    if (hello.stage != from->stage || memcmp(hello.boot_id, from->boot_id, DS4_ID_BYTES) != 0)
        return ds4_fail(err, DS4_E_PROTOCOL, "HELLO of stage %d under the name of stage %d",
                        hello.stage, from->stage);
    *peer = (struct bus_peer){.known = true, .peer = *from, .gate = peer->gate};
    ds4_cluster_hello(bus->cluster, from, &hello, now_ns);
    return 0;
}

/* Decodes and hands over one admitted frame. */
static int dispatch(struct ds4_bus *bus, const struct ds4_peer *from, const struct ds4_frame *frame,
                    struct ds4_str payload, struct ds4_err *err)
{
    int64_t now_ns = ds4_clock_ns();
    struct ds4_tokens_out tokens;
    struct ds4_health health;
    struct ds4_step_done step_done;
    struct ds4_kv_done kv_done;
    struct ds4_fatal_report report;
    struct ds4_pipe_id id;
    struct ds4_note note;

    switch (frame->kind) {
    case DS4_FRAME_HELLO:
        return take_hello(bus, from, payload, now_ns, err);
    case DS4_FRAME_HEALTH:
        if (ds4_codec_decode_health(payload, frame->generation, &bus->arena, &health, err) != 0)
            return -1;
        ds4_cluster_health(bus->cluster, from, &health, now_ns);
        return 0;
    case DS4_FRAME_FORMED:
        ds4_cluster_formed(bus->cluster, from, frame->generation, now_ns);
        return 0;
    case DS4_FRAME_FORM_FAILED:
        if (ds4_codec_decode_note(payload, &bus->arena, &note, err) != 0)
            return -1;
        ds4_cluster_form_failed(bus->cluster, from, frame->generation, note.text, now_ns);
        return 0;
    case DS4_FRAME_PIPE_OFFER:
        if (ds4_codec_decode_pipe_id(payload, &bus->arena, &id, err) != 0)
            return -1;
        ds4_cluster_pipe_offer(bus->cluster, from, frame->generation, &id, now_ns);
        return 0;
    case DS4_FRAME_TOKENS:
        if (ds4_codec_decode_tokens(payload, frame->generation, &bus->arena, &tokens, err) != 0)
            return -1;
        ds4_cluster_tokens(bus->cluster, from, &tokens, now_ns);
        return 0;
    case DS4_FRAME_STEP_DONE:
        if (ds4_codec_decode_step_done(payload, frame->generation, &bus->arena, &step_done, err) !=
            0)
            return -1;
        ds4_cluster_step_done(bus->cluster, from, &step_done, now_ns);
        return 0;
    case DS4_FRAME_KV_DONE:
        if (ds4_codec_decode_kv_done(payload, frame->generation, &bus->arena, &kv_done, err) != 0)
            return -1;
        ds4_cluster_kv_done(bus->cluster, from, &kv_done, now_ns);
        return 0;
    case DS4_FRAME_FATAL:
        if (ds4_codec_decode_fatal(payload, frame->generation, &bus->arena, &report, err) != 0)
            return -1;
        ds4_cluster_fatal(bus->cluster, from, &report, now_ns);
        return 0;
    case DS4_FRAME_BYE:
        ds4_cluster_bye(bus->cluster, from, now_ns);
        return 0;
    default:
        return ds4_fail(err, DS4_E_PROTOCOL, "a worker sent %s", ds4_frame_kind_name(frame->kind));
    }
}

static void take_frame(struct ds4_bus *bus, struct ds4_str name, struct ds4_str envelope,
                       struct ds4_str payload)
{
    struct ds4_arena_mark mark = ds4_arena_mark(&bus->arena);
    struct ds4_frame frame;
    struct ds4_peer from;
    struct bus_peer *peer;
    struct ds4_err err = {0};

    ds4_metric_add(bus->metrics, DS4_M_ZMQ_MESSAGES, 1, "in");
    if (!read_identity(name, &from)) {
        ds4_fail(&err, DS4_E_PROTOCOL, "a peer whose name is not that of a stage");
        drop(bus, "unknown_peer", &err);
        return;
    }
    if (ds4_frame_read(envelope.ptr, envelope.len, payload.len, DS4_FROM_WORKER, &frame, &err) !=
        0) {
        drop(bus, "malformed", &err);
        return;
    }
    peer = &bus->peer[from.stage];
    if (frame.kind != DS4_FRAME_HELLO &&
        (!peer->known || memcmp(peer->peer.boot_id, from.boot_id, DS4_ID_BYTES) != 0)) {
        ds4_fail(&err, DS4_E_PROTOCOL, "stage %d sent %s without HELLO", from.stage,
                 ds4_frame_kind_name(frame.kind));
        drop(bus, "unknown_peer", &err);
        return;
    }
    peer->gate.generation = ds4_cluster_generation(bus->cluster);
    if (!ds4_frame_admit(&peer->gate, &frame)) {
        ds4_metric_add(bus->metrics, DS4_M_ZMQ_DROPPED, 1, "generation");
        return;
    }
    if (dispatch(bus, &from, &frame, payload, &err) != 0)
        drop(bus, "malformed", &err);
    ds4_arena_reset(&bus->arena, mark);
}

/* Receives one multipart message: name, envelope, payload.  False when there is none.  Messages of
 * another shape are read to their end and dropped. */
static bool receive(struct ds4_bus *bus)
{
    zmq_msg_t part[3];
    struct ds4_err err = {0};
    int n = 0, more = 1;

    for (int i = 0; i < 3; i++)
        zmq_msg_init(&part[i]);
    while (more) {
        zmq_msg_t extra;
        zmq_msg_t *at = n < 3 ? &part[n] : &extra;

        if (n >= 3)
            zmq_msg_init(&extra);
        if (zmq_msg_recv(at, bus->socket, ZMQ_DONTWAIT) < 0)
            break; /* EAGAIN before the first part; a multipart message arrives whole */
        more = zmq_msg_more(at);
        if (n >= 3)
            zmq_msg_close(&extra);
        n++;
    }
    if (n == 3 && bus->cluster != NULL) {
        take_frame(bus, (struct ds4_str){zmq_msg_data(&part[0]), zmq_msg_size(&part[0])},
                   (struct ds4_str){zmq_msg_data(&part[1]), zmq_msg_size(&part[1])},
                   (struct ds4_str){zmq_msg_data(&part[2]), zmq_msg_size(&part[2])});
    } else if (n > 0 && bus->cluster != NULL) {
        ds4_fail(&err, DS4_E_PROTOCOL, "a message of %d parts", n);
        drop(bus, "malformed", &err);
    }
    for (int i = 0; i < 3; i++)
        zmq_msg_close(&part[i]);
    return n > 0;
}

static bool is_readable(const struct ds4_bus *bus)
{
    int events = 0;
    size_t n = sizeof(events);

    return zmq_getsockopt(bus->socket, ZMQ_EVENTS, &events, &n) == 0 && (events & ZMQ_POLLIN) != 0;
}

static void drain(struct ds4_bus *bus)
{
    int32_t n = 0;

    while (n++ < DS4_BUS_MAX_DRAIN && is_readable(bus) && receive(bus)) {
    }
}

/* ---- loop ---------------------------------------------------------------------------------------- */

static void on_readable(uv_poll_t *handle, int status, int events)
{
    (void)status;
    (void)events;
    drain(handle->data);
}

/* Last thing before the loop sleeps: what HTTP handlers submitted becomes steps, and nothing that
 * arrived meanwhile is slept over (a flood is: until the timer, so that HTTP gets its turn). */
static void on_prepare(uv_prepare_t *handle)
{
    struct ds4_bus *bus = handle->data;

    for (int32_t round = 0; round < 2; round++) {
        drain(bus);
        if (bus->cluster != NULL)
            ds4_cluster_tick(bus->cluster, ds4_clock_ns());
        if (!is_readable(bus))
            break;
    }
}

/* Only wakes the loop; on_prepare does the work. */
static void on_timer(uv_timer_t *handle)
{
    (void)handle;
}

static int make_folder(const char *dir, struct ds4_err *err)
{
    struct stat st;

    if (mkdir(dir, 0700) != 0 && errno != EEXIST)
        return ds4_fail(err, DS4_E_IO, "could not create %s: %s", dir, strerror(errno));
    if (lstat(dir, &st) != 0)
        return ds4_fail(err, DS4_E_IO, "could not look at %s: %s", dir, strerror(errno));
    if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 077) != 0)
        return ds4_fail(err, DS4_E_INVALID,
                        "%s must be a folder of this user that nobody else can enter (mode 0700)",
                        dir);
    return 0;
}

static int take_lock(struct ds4_bus *bus, const char *dir, struct ds4_err *err)
{
    char path[sizeof(((struct sockaddr_un *)NULL)->sun_path)];

    if ((size_t)snprintf(path, sizeof(path), "%s/router.lock", dir) >= sizeof(path))
        return ds4_fail(err, DS4_E_INVALID, "the path %s is too long for a socket", dir);
    bus->lock_fd = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (bus->lock_fd < 0)
        return ds4_fail(err, DS4_E_IO, "could not open %s: %s", path, strerror(errno));
    if (flock(bus->lock_fd, LOCK_EX | LOCK_NB) != 0)
        return ds4_fail(err, DS4_E_BUSY, "another router serves %s", dir);
    return 0;
}

static int choose_endpoint(const struct ds4_bus_config *config, char *endpoint, size_t cap,
                           struct ds4_err *err)
{
    int n = config->endpoint == NULL || config->endpoint[0] == '\0'
                ? snprintf(endpoint, cap, "ipc://%s/router.sock", config->endpoint_dir)
                : snprintf(endpoint, cap, "%s", config->endpoint);

    return (size_t)n < cap
               ? 0
               : ds4_fail(err, DS4_E_INVALID, "the endpoint is longer than %zu bytes", cap - 1);
}

static int demand_keys(struct ds4_bus *bus, const struct ds4_bus_config *config,
                       const char *endpoint, struct ds4_err *err)
{
    if (strncmp(endpoint, "ipc://", strlen("ipc://")) == 0)
        return 0;
    if (config->curve_dir == NULL || config->curve_dir[0] == '\0')
        return ds4_fail(err, DS4_E_INVALID, "endpoint %s needs CURVE keys", endpoint);
    bus->auth = ds4_bus_auth_start(bus->context, bus->socket, config->curve_dir, err);
    return bus->auth == NULL ? -1 : 0;
}

static int bind_socket(struct ds4_bus *bus, const struct ds4_bus_config *config,
                       struct ds4_err *err)
{
    const int on = 1, unlimited = 0, linger = DS4_BUS_LINGER_MS;
    const int64_t max_bytes = (int64_t)DS4_MAX_FRAME_BYTES;
    char endpoint[512];

    if (choose_endpoint(config, endpoint, sizeof(endpoint), err) != 0)
        return -1;
    bus->context = zmq_ctx_new();
    bus->socket = bus->context == NULL ? NULL : zmq_socket(bus->context, ZMQ_ROUTER);
    /* MANDATORY: sending to a worker that is gone is an error, not silence.  HANDOVER: a worker
     * that reconnects under its name takes it over from its dead connection.  No high-water mark:
     * at most `inflight` steps are ever queued for a worker. */
    if (bus->socket == NULL ||
        zmq_setsockopt(bus->socket, ZMQ_ROUTER_MANDATORY, &on, sizeof(on)) != 0 ||
        zmq_setsockopt(bus->socket, ZMQ_ROUTER_HANDOVER, &on, sizeof(on)) != 0 ||
        zmq_setsockopt(bus->socket, ZMQ_SNDHWM, &unlimited, sizeof(unlimited)) != 0 ||
        zmq_setsockopt(bus->socket, ZMQ_RCVHWM, &unlimited, sizeof(unlimited)) != 0 ||
        zmq_setsockopt(bus->socket, ZMQ_LINGER, &linger, sizeof(linger)) != 0 ||
        zmq_setsockopt(bus->socket, ZMQ_MAXMSGSIZE, &max_bytes, sizeof(max_bytes)) != 0)
        return ds4_fail(err, DS4_E_IO, "no socket for %s: %s", endpoint, zmq_strerror(errno));
    if (demand_keys(bus, config, endpoint, err) != 0)
        return -1;
    if (zmq_bind(bus->socket, endpoint) != 0)
        return ds4_fail(err, DS4_E_IO, "could not bind %s: %s", endpoint, zmq_strerror(errno));
    return 0;
}

static int start_handles(struct ds4_bus *bus, uv_loop_t *loop, struct ds4_err *err)
{
    size_t n = sizeof(int);
    int fd, rc;

    if (zmq_getsockopt(bus->socket, ZMQ_FD, &fd, &n) != 0)
        return ds4_fail(err, DS4_E_IO, "no descriptor of the socket: %s", zmq_strerror(errno));
    rc = uv_poll_init(loop, &bus->poll, fd);
    if (rc != 0)
        return ds4_fail(err, DS4_E_IO, "could not watch the socket: %s", uv_strerror(rc));
    uv_prepare_init(loop, &bus->prepare);
    uv_timer_init(loop, &bus->timer);
    bus->n_open_handles = DS4_N_HANDLES;
    bus->poll.data = bus;
    bus->prepare.data = bus;
    bus->timer.data = bus;
    rc = uv_poll_start(&bus->poll, UV_READABLE, on_readable);
    if (rc == 0)
        rc = uv_prepare_start(&bus->prepare, on_prepare);
    if (rc == 0)
        rc = uv_timer_start(&bus->timer, on_timer, DS4_BUS_TICK_MS, DS4_BUS_TICK_MS);
    return rc == 0 ? 0 : ds4_fail(err, DS4_E_IO, "could not start: %s", uv_strerror(rc));
}

struct ds4_bus *ds4_bus_open(struct uv_loop_s *loop, const struct ds4_bus_config *config,
                             struct ds4_err *err)
{
    struct ds4_bus *bus = calloc(1, sizeof(*bus));

    if (bus == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for the bus");
        return NULL;
    }
    bus->metrics = config->metrics;
    bus->lock_fd = -1;
    ds4_arena_init(&bus->arena, DS4_CODEC_ARENA_BYTES);
    ds4_buf_init(&bus->out, DS4_MAX_FRAME_BYTES);
    if (make_folder(config->endpoint_dir, err) != 0 ||
        take_lock(bus, config->endpoint_dir, err) != 0 || bind_socket(bus, config, err) != 0 ||
        start_handles(bus, loop, err) != 0) {
        ds4_bus_close(bus);
        return NULL;
    }
    return bus;
}

void ds4_bus_attach(struct ds4_bus *bus, struct ds4_cluster *cluster)
{
    bus->cluster = cluster;
}

static void free_bus(struct ds4_bus *bus)
{
    /* The fd is the socket's: uv must have let go of it before it is closed. */
    if (bus->socket != NULL)
        zmq_close(bus->socket);
    if (bus->context != NULL) {
        if (bus->auth != NULL) {
            zmq_ctx_shutdown(bus->context);
            ds4_bus_auth_free(bus->auth);
        }
        zmq_ctx_term(bus->context);
    }
    if (bus->lock_fd >= 0)
        close(bus->lock_fd);
    ds4_buf_deinit(&bus->out);
    ds4_arena_deinit(&bus->arena);
    free(bus);
}

static void on_closed(uv_handle_t *handle)
{
    struct ds4_bus *bus = handle->data;

    if (--bus->n_open_handles == 0)
        free_bus(bus);
}

void ds4_bus_close(struct ds4_bus *bus)
{
    if (bus == NULL)
        return;
    bus->cluster = NULL;
    if (bus->n_open_handles == 0) {
        free_bus(bus);
        return;
    }
    uv_close((uv_handle_t *)&bus->poll, on_closed);
    uv_close((uv_handle_t *)&bus->prepare, on_closed);
    uv_close((uv_handle_t *)&bus->timer, on_closed);
}

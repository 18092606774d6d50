/* ZeroMQ side of the worker (steps 7 and 12).
 *
 * ZMQ_IMMEDIATE keeps frames from piling up for a router that is not there.  The socket's monitor
 * tells when the link comes and goes: a new link means HELLO again, a lost one means that the router
 * which knew our generation may be gone.  On tcp, ZeroMQ's own heartbeats find a silent peer. */
#include "worker/bus.h"

#include "common/curve_key.h"
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <zmq.h>

#define MONITOR_ENDPOINT "inproc://ds4-link"
#define RECONNECT_MS     50
#define RECONNECT_MAX_MS 500
#define PEER_PING_MS     1000
#define PEER_SILENT_MS   3000
#define QUEUE_FRAMES     1000
#define IPC_PREFIX       "ipc://"

struct ds4_wbus {
    void *context;
    void *socket;
    void *monitor;
    uint64_t sequence; /* of the next frame on this link */
};

static int zmq_fail(struct ds4_err *err, const char *what)
{
    return ds4_fail(err, DS4_E_IO, "%s: %s", what, zmq_strerror(zmq_errno()));
}

static int set_int(void *socket, int option, int value, struct ds4_err *err)
{
    if (zmq_setsockopt(socket, option, &value, sizeof(value)) != 0)
        return zmq_fail(err, "socket option");
    return 0;
}

static int use_curve(void *socket, const char *dir, struct ds4_err *err)
{
    char server[DS4_CURVE_KEY_CHARS + 1], secret[DS4_CURVE_KEY_CHARS + 1],
        own[DS4_CURVE_KEY_CHARS + 1];

    if (ds4_curve_key_read(dir, "router.public", server, err) ||
        ds4_curve_key_read(dir, "worker.secret", secret, err))
        return -1;
    if (zmq_curve_public(own, secret) != 0 ||
        zmq_setsockopt(socket, ZMQ_CURVE_SERVERKEY, server, sizeof(server)) != 0 ||
        zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, secret, sizeof(secret)) != 0 ||
        zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, own, sizeof(own)) != 0)
        return zmq_fail(err, "CURVE keys");
    return 0;
}

static int set_options(void *socket, const struct ds4_wbus_config *config, struct ds4_err *err)
{
    char identity[64];
    int64_t max_frame = (int64_t)DS4_MAX_FRAME_BYTES;
    int n = snprintf(identity, sizeof(identity), "stage-%" PRId32 "-", config->stage);

    for (size_t i = 0; i < DS4_ID_BYTES; i++)
        n += snprintf(identity + n, sizeof(identity) - (size_t)n, "%02x", config->boot_id[i]);
    if (zmq_setsockopt(socket, ZMQ_ROUTING_ID, identity, (size_t)n) != 0 ||
        zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &max_frame, sizeof(max_frame)) != 0)
        return zmq_fail(err, "socket option");
    if (set_int(socket, ZMQ_LINGER, 0, err) || set_int(socket, ZMQ_IMMEDIATE, 1, err) ||
        set_int(socket, ZMQ_RECONNECT_IVL, RECONNECT_MS, err) ||
        set_int(socket, ZMQ_RECONNECT_IVL_MAX, RECONNECT_MAX_MS, err) ||
        set_int(socket, ZMQ_HEARTBEAT_IVL, PEER_PING_MS, err) ||
        set_int(socket, ZMQ_HEARTBEAT_TIMEOUT, PEER_SILENT_MS, err) ||
        set_int(socket, ZMQ_SNDHWM, QUEUE_FRAMES, err) ||
        set_int(socket, ZMQ_RCVHWM, QUEUE_FRAMES, err))
        return -1;
    if (config->curve_dir != NULL && config->curve_dir[0] != 0)
        return use_curve(socket, config->curve_dir, err);
    if (strncmp(config->endpoint, IPC_PREFIX, strlen(IPC_PREFIX)) != 0)
        return ds4_fail(err, DS4_E_INVALID, "endpoint %s needs CURVE keys", config->endpoint);
    return 0;
}

static int open_sockets(struct ds4_wbus *bus, const struct ds4_wbus_config *config,
                        struct ds4_err *err)
{
    const int events = ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED;

    bus->context = zmq_ctx_new();
    if (bus->context == NULL)
        return zmq_fail(err, "ZeroMQ");
    bus->socket = zmq_socket(bus->context, ZMQ_DEALER);
    bus->monitor = zmq_socket(bus->context, ZMQ_PAIR);
    if (bus->socket == NULL || bus->monitor == NULL)
        return zmq_fail(err, "ZeroMQ socket");
    if (set_options(bus->socket, config, err) || set_int(bus->monitor, ZMQ_LINGER, 0, err))
        return -1;
    if (zmq_socket_monitor(bus->socket, MONITOR_ENDPOINT, events) != 0 ||
        zmq_connect(bus->monitor, MONITOR_ENDPOINT) != 0)
        return zmq_fail(err, "socket monitor");
    if (zmq_connect(bus->socket, config->endpoint) != 0)
        return zmq_fail(err, config->endpoint);
    return 0;
}

struct ds4_wbus *ds4_wbus_open(const struct ds4_wbus_config *config, struct ds4_err *err)
{
    struct ds4_wbus *bus = calloc(1, sizeof(*bus));

    if (bus == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for the bus");
        return NULL;
    }
    if (open_sockets(bus, config, err)) {
        ds4_wbus_close(bus, 0);
        return NULL;
    }
    return bus;
}

void ds4_wbus_close(struct ds4_wbus *bus, int32_t linger_ms)
{
    if (bus == NULL)
        return;
    if (bus->socket != NULL) {
        zmq_setsockopt(bus->socket, ZMQ_LINGER, &(int){linger_ms}, sizeof(int));
        zmq_socket_monitor(bus->socket, NULL, 0);
        zmq_close(bus->socket);
    }
    if (bus->monitor != NULL)
        zmq_close(bus->monitor);
    if (bus->context != NULL)
        zmq_ctx_term(bus->context);
    free(bus);
}

void ds4_wbus_wait(struct ds4_wbus *bus, const int *fd, size_t n_fd, int32_t timeout_ms)
{
    zmq_pollitem_t item[2 + DS4_WBUS_MAX_FDS] = {
        {.socket = bus->socket, .events = ZMQ_POLLIN},
        {.socket = bus->monitor, .events = ZMQ_POLLIN},
    };

    for (size_t i = 0; i < n_fd; i++)
        item[2 + i] = (zmq_pollitem_t){.fd = fd[i], .events = ZMQ_POLLIN};
    zmq_poll(item, (int)(2 + n_fd), timeout_ms);
}

/* One message part into `buf`, or its excess dropped.  1, 0 if nothing waits.  *more: parts follow. */
static int recv_part(void *socket, struct ds4_buf *buf, bool *more, size_t *n)
{
    zmq_msg_t part;
    int rc;

    zmq_msg_init(&part);
    rc = zmq_msg_recv(&part, socket, ZMQ_DONTWAIT);
    if (rc >= 0) {
        *n = zmq_msg_size(&part);
        *more = zmq_msg_more(&part) != 0;
        ds4_buf_clear(buf);
        ds4_buf_append(buf, zmq_msg_data(&part), *n);
    }
    zmq_msg_close(&part);
    return rc >= 0;
}

enum ds4_wbus_link ds4_wbus_next_link(struct ds4_wbus *bus)
{
    char bytes[64];
    struct ds4_buf buf;
    uint16_t event = 0;
    size_t n;
    bool more;

    /* Two parts: event number with value, then the endpoint, which is of no interest. */
    ds4_buf_init(&buf, sizeof(bytes));
    while (event == 0 && recv_part(bus->monitor, &buf, &more, &n)) {
        if (n >= sizeof(event) && buf.len == n)
            memcpy(&event, buf.ptr, sizeof(event));
        while (more && recv_part(bus->monitor, &buf, &more, &n))
            continue;
    }
    ds4_buf_deinit(&buf);
    if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) {
        bus->sequence = 0;
        return DS4_WBUS_UP;
    }
    return event == ZMQ_EVENT_DISCONNECTED ? DS4_WBUS_DOWN : DS4_WBUS_SAME;
}

int ds4_wbus_recv(struct ds4_wbus *bus, struct ds4_frame *frame, struct ds4_buf *payload,
                  struct ds4_err *err)
{
    size_t n_head, n_payload = 0, n_excess, n_part = 1;
    struct ds4_buf head, excess;
    int rc = 0;
    bool more;

    ds4_buf_init(&head, DS4_ENVELOPE_BYTES);
    ds4_buf_init(&excess, 1);
    ds4_buf_clear(payload);
    if (recv_part(bus->socket, &head, &more, &n_head)) {
        if (more && recv_part(bus->socket, payload, &more, &n_payload))
            n_part++;
        while (more && recv_part(bus->socket, &excess, &more, &n_excess))
            n_part++;
        rc = 1;
        if (n_part != 2)
            rc = ds4_fail(err, DS4_E_PROTOCOL, "frame of %zu parts, must be 2", n_part);
        else if (ds4_frame_read(head.ptr, n_head, n_payload, DS4_FROM_ROUTER, frame, err))
            rc = -1;
        else if (payload->len != n_payload)
            rc = ds4_fail(err, DS4_E_NOMEM, "no memory for a frame of %zu bytes", n_payload);
    }
    ds4_buf_deinit(&excess);
    ds4_buf_deinit(&head);
    return rc;
}

int ds4_wbus_send(struct ds4_wbus *bus, enum ds4_frame_kind kind, uint32_t generation,
                  struct ds4_str payload, struct ds4_err *err)
{
    struct ds4_frame frame = {kind, generation, bus->sequence, (uint32_t)payload.len};
    uint8_t envelope[DS4_ENVELOPE_BYTES];

    ds4_frame_write(&frame, envelope);
    /* When the first part is taken, ZeroMQ takes the rest of the message. */
    if (zmq_send(bus->socket, envelope, sizeof(envelope), ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0 ||
        zmq_send(bus->socket, payload.ptr, payload.len, ZMQ_DONTWAIT) < 0)
        return ds4_fail(err, DS4_E_UNAVAILABLE, "%s frame not sent: %s", ds4_frame_kind_name(kind),
                        zmq_strerror(zmq_errno()));
    bus->sequence++;
    return 0;
}

/* CURVE keys of the router's tcp endpoint, and the responder that admits workers by their key.
 *
 * libzmq asks about every new connection on inproc://zeromq.zap.01 (RFC 27): version, request id,
 * domain, address, identity, mechanism, and for CURVE the client's 32-byte key; it wants version, id,
 * status, text, user and metadata back.  Anything that does not look so is refused. */
#include "router/bus_auth.h"

#include "common/curve_key.h"
#include "common/log.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#define KEY_BYTES       32
#define ZAP_ENDPOINT    "inproc://zeromq.zap.01"
#define ZAP_VERSION     "1.0"
#define MAX_FRAMES      16
#define MAX_FRAME_BYTES 256
#define REFUSALS_LOGGED 5

enum zap_frame { ZAP_AT_VERSION, ZAP_AT_ID, ZAP_AT_MECHANISM = 5, ZAP_AT_KEY, ZAP_N_FRAME };

struct ds4_bus_auth {
    void *responder;
    pthread_t thread;
    uint8_t worker_key[KEY_BYTES];
    struct ds4_log_limit refused_limit;
};

struct frame {
    size_t n; /* as sent; above MAX_FRAME_BYTES it is cut, and none of ours */
    uint8_t byte[MAX_FRAME_BYTES];
};

/* ---- files ---- */

static int write_key(const char *dir, const char *name, mode_t mode, const char *key,
                     struct ds4_err *err)
{
    char path[4096];
    int fd, rc = 0;

    if ((size_t)snprintf(path, sizeof(path), "%s/%s", dir, name) >= sizeof(path))
        return ds4_fail(err, DS4_E_INVALID, "name of the key folder is too long");
    fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (fd < 0)
        return ds4_fail(err, errno == EEXIST ? DS4_E_INVALID : DS4_E_IO, "could not create %s: %s",
                        path, strerror(errno));
    if (write(fd, key, DS4_CURVE_KEY_CHARS) != DS4_CURVE_KEY_CHARS || fsync(fd) != 0)
        rc = ds4_fail(err, DS4_E_IO, "could not write %s: %s", path, strerror(errno));
    close(fd);
    return rc;
}

int ds4_bus_auth_make_keys(const char *dir, struct ds4_err *err)
{
    static const char *const who[] = {"router", "worker"};
    char name[32], public_key[DS4_CURVE_KEY_CHARS + 1], secret[DS4_CURVE_KEY_CHARS + 1];

    for (size_t i = 0; i < sizeof(who) / sizeof(who[0]); i++) {
        if (zmq_curve_keypair(public_key, secret) != 0)
            return ds4_fail(err, DS4_E_INVALID, "this libzmq has no CURVE: %s",
                            zmq_strerror(errno));
        snprintf(name, sizeof(name), "%s.secret", who[i]);
        if (write_key(dir, name, 0600, secret, err) != 0)
            return -1;
        snprintf(name, sizeof(name), "%s.public", who[i]);
        if (write_key(dir, name, 0644, public_key, err) != 0)
            return -1;
    }
    return 0;
}

/* ---- the responder ---- */

/* One request; how many frames it had, 0 when the context is going away. */
static int take_request(void *responder, struct frame frame[ZAP_N_FRAME])
{
    int n = 0, more = 1, got;
    size_t more_bytes = sizeof(more);

    while (more) {
        uint8_t bytes[MAX_FRAME_BYTES];

        do
            got = zmq_recv(responder, bytes, sizeof(bytes), 0);
        while (got < 0 && errno == EINTR);
        if (got < 0 || zmq_getsockopt(responder, ZMQ_RCVMORE, &more, &more_bytes) != 0)
            return 0;
        if (n < ZAP_N_FRAME) {
            frame[n].n = (size_t)got;
            memcpy(frame[n].byte, bytes, (size_t)got < sizeof(bytes) ? (size_t)got : sizeof(bytes));
        }
        n++;
    }
    return n;
}

static bool is_text(const struct frame *frame, const char *text)
{
    return frame->n == strlen(text) && memcmp(frame->byte, text, frame->n) == 0;
}

static bool is_worker(const struct ds4_bus_auth *auth, const struct frame *frame, int n)
{
    return n == ZAP_N_FRAME && is_text(&frame[ZAP_AT_VERSION], ZAP_VERSION) &&
           is_text(&frame[ZAP_AT_MECHANISM], "CURVE") && frame[ZAP_AT_KEY].n == KEY_BYTES &&
           memcmp(frame[ZAP_AT_KEY].byte, auth->worker_key, KEY_BYTES) == 0;
}

static void *respond(void *arg)
{
    struct ds4_bus_auth *auth = arg;
    static const struct frame none;
    struct frame frame[ZAP_N_FRAME];
    int n;

    for (;;) {
        bool good;
        size_t id_bytes;

        for (int i = 0; i < ZAP_N_FRAME; i++)
            frame[i] = none;
        n = take_request(auth->responder, frame);
        if (n == 0)
            break;
        good = is_worker(auth, frame, n);
        if (!good)
            ds4_log_limited(&auth->refused_limit, REFUSALS_LOGGED, DS4_LOG_WARN, "bus.refused",
                            "reason=\"a connection without the workers' key\"");
        id_bytes = frame[ZAP_AT_ID].n < MAX_FRAME_BYTES ? frame[ZAP_AT_ID].n : MAX_FRAME_BYTES;
        (void)zmq_send(auth->responder, ZAP_VERSION, strlen(ZAP_VERSION), ZMQ_SNDMORE);
        (void)zmq_send(auth->responder, frame[ZAP_AT_ID].byte, id_bytes, ZMQ_SNDMORE);
        (void)zmq_send(auth->responder, good ? "200" : "400", 3, ZMQ_SNDMORE);
        (void)zmq_send(auth->responder, "", 0, ZMQ_SNDMORE);
        (void)zmq_send(auth->responder, "", 0, ZMQ_SNDMORE);
        (void)zmq_send(auth->responder, "", 0, 0);
    }
    zmq_close(auth->responder);
    return NULL;
}

static int open_responder(struct ds4_bus_auth *auth, void *context, struct ds4_err *err)
{
    const int linger = 0;

    auth->responder = zmq_socket(context, ZMQ_REP);
    if (auth->responder == NULL ||
        zmq_setsockopt(auth->responder, ZMQ_LINGER, &linger, sizeof(linger)) != 0 ||
        zmq_bind(auth->responder, ZAP_ENDPOINT) != 0)
        return ds4_fail(err, DS4_E_IO, "could not bind %s: %s", ZAP_ENDPOINT, zmq_strerror(errno));
    return 0;
}

struct ds4_bus_auth *ds4_bus_auth_start(void *context, void *socket, const char *dir,
                                        struct ds4_err *err)
{
    struct ds4_bus_auth *auth = calloc(1, sizeof(*auth));
    char secret[DS4_CURVE_KEY_CHARS + 1], worker[DS4_CURVE_KEY_CHARS + 1];
    const int on = 1;
    int rc;

    if (auth == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for keys");
        return NULL;
    }
    if (ds4_curve_key_read(dir, "router.secret", secret, err) != 0 ||
        ds4_curve_key_read(dir, "worker.public", worker, err) != 0)
        goto fail;
    if (zmq_z85_decode(auth->worker_key, worker) == NULL ||
        zmq_setsockopt(socket, ZMQ_CURVE_SERVER, &on, sizeof(on)) != 0 ||
        zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, secret, sizeof(secret)) != 0) {
        ds4_fail(err, DS4_E_INVALID, "the keys in %s are not CURVE keys: %s", dir,
                 zmq_strerror(errno));
        goto fail;
    }
    if (open_responder(auth, context, err) != 0)
        goto fail;
    rc = pthread_create(&auth->thread, NULL, respond, auth);
    if (rc == 0)
        return auth;
    ds4_fail(err, DS4_E_IO, "thread for keys: %s", strerror(rc));
fail:
    if (auth->responder != NULL)
        zmq_close(auth->responder);
    free(auth);
    return NULL;
}

void ds4_bus_auth_free(struct ds4_bus_auth *auth)
{
    if (auth == NULL)
        return;
    pthread_join(auth->thread, NULL);
    free(auth);
}

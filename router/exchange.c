/* One HTTP request and its answer (steps 1 and 15).
 *
 * Two owners look at an exchange: the handler until it ends it, and h2o until the request is disposed.
 * The memory goes when both are through and the uv handles have closed.  h2o allows one send at a
 * time, so bytes wait in `out` while `flight` is with h2o; the two buffers swap on `proceed`.
 *
 * h2o 2.2 does not read from an HTTP/1 connection while it answers, so it cannot see a client leave a
 * queued or prefilling request.  We watch a duplicate of the socket for a hang-up: a reset is a client
 * gone at once, a half close is one after half_close_ms (a write that fails tells sooner). */
#include "router/exchange.h"

#include "common/clock.h"
#include "common/metrics.h"
#include "router/exchange_h2o.h"

#include <inttypes.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define DS4_REQUEST_ID_MAX 128
#define DS4_CLIENT_LEFT    499

/* Lives in the h2o request's pool: its disposal tells us the request's end. */
struct anchor {
    h2o_generator_t generator; /* first: h2o hands it back as the generator */
    struct ds4_exchange *x;
};

struct ds4_exchange {
    struct ds4_exchange_host *host;
    h2o_req_t *req; /* NULL once h2o is through with it or the client is gone */
    struct anchor *anchor;
    enum ds4_method method;
    struct ds4_str path;
    struct ds4_str key; /* that was accepted; ptr NULL: none was needed */
    int64_t started_ns;
    const char *endpoint; /* label */
    int status;           /* of the answer, 0 = none yet */
    char id[DS4_REQUEST_ID_MAX + 1];
    bool id_given; /* by the client's header */

    struct ds4_buf out;
    struct ds4_buf flight;
    bool started;
    bool streams;
    bool in_flight;
    bool finishing; /* the handler ended it */
    bool final_sent;
    bool gone;
    bool gone_told;

    ds4_gone_fn on_gone;
    void *gone_owner;
    ds4_drained_fn on_drained;
    void *drained_owner;

    uv_timer_t timer; /* half-close grace, and the deferred gone call */
    uv_poll_t poll;
    int watch_fd;  /* -1: no watch */
    int n_handles; /* open uv handles */
    bool closing;
};

/* ---- life and death --------------------------------------------------------------------------- */

static void on_handle_closed(uv_handle_t *handle)
{
    struct ds4_exchange *x = handle->data;

    if (--x->n_handles > 0)
        return;
    if (x->watch_fd >= 0)
        (void)close(x->watch_fd);
    x->host->n_alive--;
    x->host->n_streaming -= x->streams;
    ds4_exchange_show_connections(x->host);
    ds4_buf_deinit(&x->out);
    ds4_buf_deinit(&x->flight);
    free(x);
}

/* A client that left before there was an answer has got status 499, as proxies write it. */
static void count(const struct ds4_exchange *x)
{
    static const char *const names[] = {"GET", "HEAD", "POST", "DELETE", "OPTIONS"};
    const char *method = "other";
    char code[16];

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (x->method == (enum ds4_method)(1 << i))
            method = names[i];
    (void)snprintf(code, sizeof(code), "%d", x->status == 0 ? DS4_CLIENT_LEFT : x->status);
    ds4_metric_add(x->host->metrics, DS4_M_HTTP_REQUESTS, 1, x->endpoint, method, code);
    ds4_metric_observe(x->host->metrics, DS4_M_HTTP_REQUEST_SECONDS,
                       (double)(ds4_clock_ns() - x->started_ns) / (double)DS4_NS_PER_SEC,
                       x->endpoint);
}

void ds4_exchange_show_connections(const struct ds4_exchange_host *host)
{
    size_t idle = host->n_connections > host->n_alive ? host->n_connections - host->n_alive : 0;

    ds4_metric_set(host->metrics, DS4_M_HTTP_CONNECTIONS, (double)idle, "idle");
    ds4_metric_set(host->metrics, DS4_M_HTTP_CONNECTIONS,
                   (double)(host->n_alive - host->n_streaming), "active");
    ds4_metric_set(host->metrics, DS4_M_HTTP_CONNECTIONS, (double)host->n_streaming, "streaming");
}

static void free_when_done(struct ds4_exchange *x)
{
    if (x->req != NULL || !x->finishing || x->closing)
        return;
    x->closing = true;
    count(x);
    uv_close((uv_handle_t *)&x->timer, on_handle_closed);
    if (x->watch_fd >= 0)
        uv_close((uv_handle_t *)&x->poll, on_handle_closed);
}

static void stop_watching(struct ds4_exchange *x)
{
    if (x->watch_fd >= 0 && !uv_is_closing((uv_handle_t *)&x->poll))
        (void)uv_poll_stop(&x->poll);
}

static void tell_gone(uv_timer_t *timer)
{
    struct ds4_exchange *x = timer->data;

    x->gone = true;
    if (x->gone_told || x->finishing)
        return;
    x->gone_told = true;
    if (x->on_gone != NULL)
        x->on_gone(x->gone_owner);
}

/* The gone call comes from the loop, never from inside a handler's own call. */
static void mark_gone(struct ds4_exchange *x)
{
    if (x->gone || x->final_sent)
        return;
    x->gone = true;
    stop_watching(x);
    if (!x->closing)
        (void)uv_timer_start(&x->timer, tell_gone, 0, 0);
}

static void on_dispose(void *pointer)
{
    struct anchor *anchor = pointer;
    struct ds4_exchange *x = anchor->x;

    x->req = NULL;
    x->anchor = NULL;
    mark_gone(x);
    stop_watching(x);
    free_when_done(x);
}

static void on_stop(h2o_generator_t *generator, h2o_req_t *req)
{
    struct anchor *anchor = (struct anchor *)generator;

    (void)req;
    mark_gone(anchor->x);
}

static void on_hangup(uv_poll_t *poll, int status, int events)
{
    struct ds4_exchange *x = poll->data;

    stop_watching(x);
    if (status < 0)
        mark_gone(x);
    else if ((events & UV_DISCONNECT) != 0 && !x->gone)
        (void)uv_timer_start(&x->timer, tell_gone, x->host->half_close_ms, 0);
}

/* ---- construction ----------------------------------------------------------------------------- */

static enum ds4_method method_of(h2o_iovec_t text)
{
    static const struct {
        struct ds4_str name;
        enum ds4_method method;
    } table[] = {
        {{"GET", 3}, DS4_METHOD_GET},         {{"HEAD", 4}, DS4_METHOD_HEAD},
        {{"POST", 4}, DS4_METHOD_POST},       {{"DELETE", 6}, DS4_METHOD_DELETE},
        {{"OPTIONS", 7}, DS4_METHOD_OPTIONS},
    };

    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++)
        if (ds4_str_equal(table[i].name, (struct ds4_str){text.base, text.len}))
            return table[i].method;
    return DS4_METHOD_OTHER;
}

static struct ds4_str path_of(const h2o_req_t *req)
{
    struct ds4_str path = {req->path_normalized.base, req->path_normalized.len};

    while (path.len > 1 && path.ptr[path.len - 1] == '/')
        path.len--;
    return path;
}

/* The client's own name for the request, if it is one that can stand in a header and a log line. */
static bool take_id(struct ds4_exchange *x, struct ds4_str given)
{
    bool usable = given.len > 0 && given.len <= DS4_REQUEST_ID_MAX;

    for (size_t i = 0; usable && i < given.len; i++)
        usable = given.ptr[i] > ' ' && given.ptr[i] < 0x7f;
    if (!usable)
        return false;
    memcpy(x->id, given.ptr, given.len);
    x->id[given.len] = '\0';
    return true;
}

static void choose_id(struct ds4_exchange *x)
{
    x->id_given = take_id(x, ds4_exchange_header(x, "x-request-id"));
    if (!x->id_given)
        (void)snprintf(x->id, sizeof(x->id), "req-%016" PRIx64 "%08" PRIx64, x->host->id_seed,
                       x->host->next_id++);
}

static void watch_socket(struct ds4_exchange *x, int fd)
{
    x->watch_fd = fd < 0 ? -1 : dup(fd);
    if (x->watch_fd < 0)
        return;
    if (uv_poll_init(x->host->loop, &x->poll, x->watch_fd) != 0) {
        (void)close(x->watch_fd);
        x->watch_fd = -1;
        return;
    }
    x->poll.data = x;
    x->n_handles++;
    (void)uv_poll_start(&x->poll, UV_DISCONNECT, on_hangup);
}

static void on_proceed(h2o_generator_t *generator, h2o_req_t *req);

struct ds4_exchange *ds4_exchange_new(struct ds4_exchange_host *host, h2o_req_t *req, int fd)
{
    struct ds4_exchange *x = calloc(1, sizeof(*x));

    if (x == NULL)
        return NULL;
    x->host = host;
    x->req = req;
    x->method = method_of(req->method);
    x->path = path_of(req);
    x->started_ns = ds4_clock_ns();
    x->endpoint = "other";
    ds4_buf_init(&x->out, host->out_buf_bytes);
    ds4_buf_init(&x->flight, host->out_buf_bytes);
    (void)uv_timer_init(host->loop, &x->timer);
    x->timer.data = x;
    x->n_handles = 1;
    watch_socket(x, fd);
    x->anchor = h2o_mem_alloc_shared(&req->pool, sizeof(*x->anchor), on_dispose);
    *x->anchor = (struct anchor){{on_proceed, on_stop}, x};
    choose_id(x);
    host->n_open++;
    host->n_alive++;
    ds4_exchange_show_connections(host);
    ds4_metric_add(host->metrics, DS4_M_HTTP_BYTES, (double)req->entity.len, "in");
    return x;
}

void ds4_exchange_set_endpoint(struct ds4_exchange *x, const char *endpoint)
{
    x->endpoint = endpoint;
}

/* ---- the request ------------------------------------------------------------------------------ */

enum ds4_method ds4_exchange_method(const struct ds4_exchange *x)
{
    return x->method;
}

struct ds4_str ds4_exchange_path(const struct ds4_exchange *x)
{
    return x->req == NULL ? DS4_STR("") : x->path;
}

struct ds4_str ds4_exchange_body(const struct ds4_exchange *x)
{
    if (x->req == NULL || x->req->entity.base == NULL)
        return DS4_STR("");
    return (struct ds4_str){x->req->entity.base, x->req->entity.len};
}

struct ds4_str ds4_exchange_key(const struct ds4_exchange *x)
{
    return x->req == NULL ? (struct ds4_str){NULL, 0} : x->key;
}

void ds4_exchange_set_key(struct ds4_exchange *x, struct ds4_str key)
{
    x->key = key;
}

struct ds4_str ds4_exchange_header(const struct ds4_exchange *x, const char *name)
{
    const h2o_token_t *token;
    ssize_t at;

    if (x->req == NULL)
        return (struct ds4_str){NULL, 0};
    token = h2o_lookup_token(name, strlen(name));
    if (token != NULL)
        at = h2o_find_header(&x->req->headers, token, -1);
    else
        at = h2o_find_header_by_str(&x->req->headers, name, strlen(name), -1);
    if (at < 0)
        return (struct ds4_str){NULL, 0};
    return (struct ds4_str){x->req->headers.entries[at].value.base,
                            x->req->headers.entries[at].value.len};
}

struct ds4_str ds4_exchange_authority(const struct ds4_exchange *x)
{
    if (x->req == NULL)
        return DS4_STR("");
    return (struct ds4_str){x->req->input.authority.base, x->req->input.authority.len};
}

bool ds4_exchange_peer(const struct ds4_exchange *x, struct sockaddr_storage *peer)
{
    memset(peer, 0, sizeof(*peer));
    return x->req != NULL &&
           x->req->conn->callbacks->get_peername(x->req->conn, (struct sockaddr *)peer) != 0;
}

bool ds4_exchange_is_local(const struct ds4_exchange *x)
{
    struct sockaddr_storage peer;
    struct in6_addr v6;
    struct in_addr v4;

    if (!ds4_exchange_peer(x, &peer))
        return false;
    if (peer.ss_family == AF_INET) {
        memcpy(&v4, &((const struct sockaddr_in *)&peer)->sin_addr, sizeof(v4));
        return (ntohl(v4.s_addr) >> 24) == IN_LOOPBACKNET;
    }
    if (peer.ss_family != AF_INET6)
        return false;
    memcpy(&v6, &((const struct sockaddr_in6 *)&peer)->sin6_addr, sizeof(v6));
    return IN6_IS_ADDR_LOOPBACK(&v6) ||
           (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == IN_LOOPBACKNET);
}

void ds4_exchange_offer_id(struct ds4_exchange *x, struct ds4_str id)
{
    if (!x->id_given)
        (void)take_id(x, id);
}

const char *ds4_exchange_id(const struct ds4_exchange *x)
{
    return x->id;
}

int64_t ds4_exchange_started_ns(const struct ds4_exchange *x)
{
    return x->started_ns;
}

void ds4_exchange_on_gone(struct ds4_exchange *x, ds4_gone_fn gone, void *owner)
{
    x->on_gone = gone;
    x->gone_owner = owner;
}

void ds4_exchange_on_drained(struct ds4_exchange *x, ds4_drained_fn drained, void *owner)
{
    x->on_drained = drained;
    x->drained_owner = owner;
}

bool ds4_exchange_is_gone(const struct ds4_exchange *x)
{
    return x->gone;
}

/* ---- the answer ------------------------------------------------------------------------------- */

void ds4_exchange_set_header(struct ds4_exchange *x, const char *name, const char *value)
{
    h2o_iovec_t name_copy, value_copy;

    if (x->req == NULL || x->started)
        return;
    name_copy = h2o_strdup(&x->req->pool, name, SIZE_MAX);
    value_copy = h2o_strdup(&x->req->pool, value, SIZE_MAX);
    h2o_set_header_by_str(&x->req->pool, &x->req->res.headers, name_copy.base, name_copy.len, 1,
                          value_copy.base, value_copy.len, 1);
}

void ds4_exchange_end_connection(struct ds4_exchange *x)
{
    if (x->req != NULL && !x->started)
        x->req->http1_is_persistent = 0;
}

/* HTTP/1 clients show the phrase to people; h2o adds none for statuses set by a handler. */
static const char *reason_of(int status)
{
    static const struct {
        int status;
        const char *phrase;
    } table[] = {{200, "OK"},
                 {204, "No Content"},
                 {400, "Bad Request"},
                 {401, "Unauthorized"},
                 {403, "Forbidden"},
                 {404, "Not Found"},
                 {405, "Method Not Allowed"},
                 {408, "Request Timeout"},
                 {413, "Content Too Large"},
                 {415, "Unsupported Media Type"},
                 {422, "Unprocessable Content"},
                 {429, "Too Many Requests"},
                 {500, "Internal Server Error"},
                 {503, "Service Unavailable"}};

    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++)
        if (table[i].status == status)
            return table[i].phrase;
    return "Status";
}

static void set_head(struct ds4_exchange *x, int status, const char *content_type, size_t length)
{
    x->status = status;
    x->req->res.status = status;
    x->req->res.reason = reason_of(status);
    x->req->res.content_length = length;
    ds4_exchange_set_header(x, "content-type", content_type);
    ds4_exchange_set_header(x, "x-request-id", x->id);
    if (x->gone || x->host->closing)
        x->req->http1_is_persistent = 0;
    x->started = true;
}

/* Hands what is queued to h2o when it is ready for more. */
static void pump(struct ds4_exchange *x)
{
    struct ds4_buf swap;
    h2o_iovec_t piece;
    bool last;

    if (x->in_flight || x->req == NULL || !x->started || x->final_sent)
        return;
    last = x->finishing;
    if (x->out.len == 0 && !last)
        return;
    ds4_buf_clear(&x->flight);
    swap = x->flight;
    x->flight = x->out;
    x->out = swap;
    piece = h2o_iovec_init(x->flight.ptr, x->flight.len);
    ds4_metric_add(x->host->metrics, DS4_M_HTTP_BYTES, (double)piece.len, "out");
    x->in_flight = true;
    x->final_sent = last;
    h2o_send(x->req, &piece, piece.len > 0 ? 1 : 0,
             last ? H2O_SEND_STATE_FINAL : H2O_SEND_STATE_IN_PROGRESS);
}

static void on_proceed(h2o_generator_t *generator, h2o_req_t *req)
{
    struct ds4_exchange *x = ((struct anchor *)generator)->x;

    (void)req;
    x->in_flight = false;
    pump(x);
    if (!x->in_flight && !x->finishing && x->on_drained != NULL)
        x->on_drained(x->drained_owner);
}

/* Counts the end, lets h2o have the rest; x may be freed on return. */
static void end(struct ds4_exchange *x)
{
    x->finishing = true;
    x->host->n_open--;
    pump(x);
    free_when_done(x);
}

void ds4_exchange_reply(struct ds4_exchange *x, int status, const char *content_type,
                        struct ds4_str body)
{
    h2o_iovec_t copy;

    if (x->req != NULL && !x->started) {
        set_head(x, status, content_type, body.len);
        copy = h2o_strdup(&x->req->pool, body.ptr, body.len);
        ds4_metric_add(x->host->metrics, DS4_M_HTTP_BYTES, (double)body.len, "out");
        x->in_flight = true;
        x->final_sent = true;
        stop_watching(x);
        h2o_start_response(x->req, &x->anchor->generator);
        h2o_send(x->req, &copy, body.len > 0 && x->method != DS4_METHOD_HEAD ? 1 : 0,
                 H2O_SEND_STATE_FINAL);
    }
    end(x);
}

void ds4_exchange_start(struct ds4_exchange *x, int status, const char *content_type)
{
    if (x->req == NULL || x->started)
        return;
    set_head(x, status, content_type, SIZE_MAX);
    x->streams = true;
    x->host->n_streaming++;
    ds4_exchange_show_connections(x->host);
    h2o_start_response(x->req, &x->anchor->generator);
    x->in_flight = true;
    h2o_send(x->req, NULL, 0, H2O_SEND_STATE_IN_PROGRESS); /* the headers leave now */
}

bool ds4_exchange_started(const struct ds4_exchange *x)
{
    return x->started;
}

int ds4_exchange_write(struct ds4_exchange *x, struct ds4_str bytes)
{
    if (x->gone || x->req == NULL || !x->started || x->finishing)
        return -1;
    if (bytes.len > x->host->out_buf_bytes - x->out.len)
        return -1;
    if (ds4_buf_append_str(&x->out, bytes) != 0)
        return -1;
    pump(x);
    return 0;
}

size_t ds4_exchange_backlog(const struct ds4_exchange *x)
{
    return x->out.len + (x->in_flight ? x->flight.len : 0);
}

void ds4_exchange_finish(struct ds4_exchange *x)
{
    end(x);
}

void ds4_exchange_cut(struct ds4_exchange *x)
{
    /* h2o's own write then fails, and it closes its side. */
    if (x->req != NULL && x->watch_fd >= 0)
        (void)shutdown(x->watch_fd, SHUT_RDWR);
}

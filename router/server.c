/* The HTTP side of the router (step 1): listeners, limits, keys, route table.
 *
 * h2o does HTTP/1.1 and h2c, buffers whole bodies up to the limit and answers oversized or broken
 * requests itself; a filter turns those plain-text answers into the dialect's error body, so that a
 * client never meets an error it cannot parse.  Connections are ours (uv_tcp), because the disconnect
 * watch of exchange.c needs the descriptor. */
#include "router/server.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/metrics.h"
#include "common/vec.h"
#include "router/exchange_h2o.h"
#include "router/peers.h"

#include <errno.h>
#include <limits.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/socket.h>

#define DS4_LISTEN_BACKLOG 1024
#define DS4_HEADERS_MAX    (64 << 10) /* names and values of one request, its path included */
#define DS4_KEY_BYTES_MAX  256
#define DS4_KEYS_FILE_MAX  (1 << 20)

struct connection {
    uv_tcp_t tcp; /* first: h2o takes the handle's data member for itself */
    struct ds4_server *server;
    struct connection *next, **at; /* in the server's list, which holds it at *at */
};

/* Where connections come in, and what they find there. */
struct door {
    struct ds4_server *server;
    const struct ds4_route *only; /* NULL: all routes */
    bool open;                    /* asks for no key */
    char listen[DS4_CONFIG_ADDRESS_BYTES];
    int32_t wanted_port;
    int32_t port; /* 0: not open */
    uv_tcp_t listener;
    bool listening;
    h2o_hostconf_t *hosts[2];
    h2o_accept_ctx_t accept;
};

struct route_handler {
    h2o_handler_t super;
    struct door *door;
};

DS4_VEC_TYPE(key_list, struct ds4_str);

struct key_ring {
    char *bytes; /* owns what `keys` view */
    struct key_list keys;
};

struct ds4_server {
    struct ds4_server_config config;
    struct ds4_exchange_host host;
    h2o_globalconf_t global;
    h2o_context_t context;
    struct door main, side;
    struct connection *connections;
    struct key_ring ring;
    struct ds4_peers peers; /* who comes with wrong keys */
};

/* ---- keys ------------------------------------------------------------------------------------- */

/* "key" or "key name" per line; blank lines and lines that start with # are skipped. */
static int parse_keys(struct key_ring *ring, struct ds4_str text, struct ds4_err *err)
{
    struct ds4_str line;
    size_t end, key_len;

    while (text.len > 0) {
        end = ds4_str_find(text, DS4_STR("\n"), 0);
        line = ds4_str_trim(ds4_str_head(text, end == DS4_STR_NONE ? text.len : end));
        text = ds4_str_skip(text, end == DS4_STR_NONE ? text.len : end + 1);
        if (line.len == 0 || line.ptr[0] == '#')
            continue;
        for (key_len = 0; key_len < line.len && line.ptr[key_len] > ' '; key_len++)
            ;
        line = ds4_str_head(line, key_len);
        if (line.len > DS4_KEY_BYTES_MAX)
            return ds4_fail(err, DS4_E_INVALID, "http.keys_file: a key is %zu bytes, at most %d",
                            line.len, DS4_KEY_BYTES_MAX);
        if (DS4_VEC_PUSH(&ring->keys, line) != 0)
            return ds4_fail(err, DS4_E_NOMEM, "http.keys_file: no memory");
    }
    if (ring->keys.len == 0)
        return ds4_fail(err, DS4_E_INVALID, "http.keys_file holds no key");
    return 0;
}

static int read_keys(struct key_ring *ring, const char *path, struct ds4_err *err)
{
    FILE *file = fopen(path, "re");
    bool unread;
    size_t n;

    if (file == NULL)
        return ds4_fail(err, DS4_E_INVALID, "http.keys_file %s: %s", path, strerror(errno));
    ring->bytes = calloc(1, DS4_KEYS_FILE_MAX + 1);
    n = ring->bytes == NULL ? 0 : fread(ring->bytes, 1, DS4_KEYS_FILE_MAX + 1, file);
    unread = ferror(file) != 0;
    (void)fclose(file);
    if (ring->bytes == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "http.keys_file: no memory");
    if (unread)
        return ds4_fail(err, DS4_E_INVALID, "could not read http.keys_file %s", path);
    if (n > DS4_KEYS_FILE_MAX)
        return ds4_fail(err, DS4_E_INVALID, "http.keys_file %s is over 1 MiB", path);
    return parse_keys(ring, (struct ds4_str){ring->bytes, n}, err);
}

static void drop_keys(struct key_ring *ring)
{
    free(ring->bytes);
    DS4_VEC_DEINIT(&ring->keys);
    *ring = (struct key_ring){0};
}

/* The keys of a file, none if it has no name.  -1 leaves *ring empty. */
static int load_keys(const struct ds4_server_config *config, const char *path,
                     struct key_ring *ring, struct ds4_err *err)
{
    *ring = (struct key_ring){0};
    if (path != NULL && path[0] != '\0') {
        if (read_keys(ring, path, err) == 0)
            return 0;
        drop_keys(ring);
        return -1;
    }
    if (config->open || ds4_config_is_loopback(config->listen))
        return 0;
    return ds4_fail(err, DS4_E_INVALID,
                    "http.listen is %s, which is not loopback: set http.keys_file, or http.open = "
                    "true to serve without keys",
                    config->listen);
}

/* Compares against every key in full: the time tells neither which key nor how much of it matched. */
static bool key_matches(const struct ds4_server *server, struct ds4_str given)
{
    bool any = false;

    if (given.ptr == NULL)
        return false;
    for (size_t i = 0; i < server->ring.keys.len; i++) {
        const struct ds4_str key = server->ring.keys.ptr[i];
        unsigned diff = (unsigned)(key.len ^ given.len);

        for (size_t b = 0; b < key.len; b++)
            diff |= (unsigned)((unsigned char)key.ptr[b] ^
                               (unsigned char)(b < given.len ? given.ptr[b] : 0));
        any |= diff == 0;
    }
    return any;
}

static void refuse_key(struct ds4_server *server, struct ds4_exchange *x, const char *reason)
{
    struct sockaddr_storage peer;
    bool limited = ds4_exchange_peer(x, &peer) &&
                   ds4_peers_refused(&server->peers, (struct sockaddr *)&peer, ds4_clock_ns());

    ds4_metric_add(server->config.metrics, DS4_M_AUTH_FAILURES, 1, limited ? "limited" : reason);
    if (limited) {
        server->config.refuse(x, 429, "rate_limited",
                              "too many requests without a valid API key from this address");
        return;
    }
    ds4_exchange_set_header(x, "www-authenticate", "Bearer");
    server->config.refuse(x, 401, "invalid_api_key", "a valid API key is required");
}

/* May this request pass?  If not it is answered: 401, and 429 to one that does not stop. */
static bool authorised(struct ds4_server *server, struct ds4_exchange *x)
{
    struct ds4_str bearer = ds4_exchange_header(x, "authorization");
    struct ds4_str key = ds4_exchange_header(x, "x-api-key");
    bool by_bearer, by_key;

    if (server->ring.keys.len == 0)
        return true;
    if (bearer.len > 7 && strncasecmp(bearer.ptr, "bearer ", 7) == 0)
        bearer = ds4_str_trim(ds4_str_skip(bearer, 7));
    else
        bearer = (struct ds4_str){NULL, 0};
    by_bearer = key_matches(server, bearer);
    by_key = key_matches(server, key);
    if (by_bearer ||
        by_key) { /* whose request it is hangs on this one, not on what stands beside it */
        ds4_exchange_set_key(x, by_bearer ? bearer : key);
        return true;
    }
    refuse_key(server, x, bearer.ptr == NULL && key.ptr == NULL ? "missing" : "invalid");
    return false;
}

/* ---- routes ----------------------------------------------------------------------------------- */

static bool path_matches(const char *pattern, struct ds4_str path)
{
    struct ds4_str want = ds4_str_view(pattern);
    size_t star = ds4_str_find(want, DS4_STR("/*"), 0);
    struct ds4_str tail, rest;
    size_t segment;

    if (star == DS4_STR_NONE)
        return ds4_str_equal(want, path);
    if (!ds4_str_starts(path, ds4_str_head(want, star + 1)))
        return false;
    rest = ds4_str_skip(path, star + 1);
    tail = ds4_str_skip(want, star + 2);
    segment = ds4_str_find(rest, DS4_STR("/"), 0);
    if (segment == DS4_STR_NONE)
        segment = rest.len;
    return segment > 0 && ds4_str_equal(ds4_str_skip(rest, segment), tail);
}

/* The route of a path and method; *allowed collects the methods the path knows. */
static const struct ds4_route *find_route(const struct door *door, struct ds4_str path,
                                          enum ds4_method method, uint32_t *allowed)
{
    const struct ds4_server_config *config = &door->server->config;
    const struct ds4_route *found = NULL;

    *allowed = 0;
    for (size_t i = 0; i < config->n_routes; i++) {
        const struct ds4_route *route = &config->routes[i];
        uint32_t methods = route->methods;

        if (!path_matches(route->path, path) || (door->only != NULL && door->only != route))
            continue;
        if ((methods & DS4_METHOD_GET) != 0)
            methods |= DS4_METHOD_HEAD;
        *allowed |= methods;
        if (found == NULL && (methods & method) != 0)
            found = route;
    }
    return found;
}

static void refuse_method(struct ds4_server *server, struct ds4_exchange *x, uint32_t allowed)
{
    static const struct {
        uint32_t bit;
        const char *name;
    } names[] = {{DS4_METHOD_GET, "GET, "},
                 {DS4_METHOD_HEAD, "HEAD, "},
                 {DS4_METHOD_POST, "POST, "},
                 {DS4_METHOD_DELETE, "DELETE, "}};
    char allow[64] = "";
    size_t used = 0;

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if ((allowed & names[i].bit) != 0)
            used += (size_t)snprintf(allow + used, sizeof(allow) - used, "%s", names[i].name);
    (void)snprintf(allow + used, sizeof(allow) - used, "OPTIONS");
    ds4_exchange_set_header(x, "allow", allow);
    server->config.refuse(x, 405, "method_not_allowed", "this path does not know that method");
}

static void refuse_path(struct ds4_server *server, struct ds4_exchange *x)
{
    char message[256];
    struct ds4_str path = ds4_exchange_path(x);

    if (ds4_str_starts(path, DS4_STR("/v1/v1/")))
        (void)snprintf(message, sizeof(message),
                       "unknown path: base URL must end in /v1 exactly once");
    else
        (void)snprintf(message, sizeof(message), "unknown path %.*s",
                       path.len > 128 ? 128 : (int)path.len, path.ptr);
    server->config.refuse(x, 404, "endpoint_not_supported", message);
}

/* ---- cross-origin requests -------------------------------------------------------------------- */

static bool origin_allowed(const struct ds4_config_texts *list, struct ds4_str origin)
{
    for (int32_t i = 0; i < list->n; i++)
        if (strcmp(list->v[i], "*") == 0 || ds4_str_equal(ds4_str_view(list->v[i]), origin))
            return true;
    return false;
}

static void add_cors_headers(const struct ds4_server *server, struct ds4_exchange *x)
{
    struct ds4_str origin = ds4_exchange_header(x, "origin");
    char copy[256];

    if (origin.len == 0 || origin.len >= sizeof(copy) ||
        !origin_allowed(server->config.cors_origins, origin))
        return;
    memcpy(copy, origin.ptr, origin.len);
    copy[origin.len] = '\0';
    ds4_exchange_set_header(x, "access-control-allow-origin", copy);
    ds4_exchange_set_header(x, "vary", "origin");
    ds4_exchange_set_header(x, "access-control-expose-headers",
                            "x-request-id, retry-after, retry-after-ms, x-ds4-thinking, "
                            "x-ds4-effort, x-ds4-effort-requested, x-ds4-effort-downgraded, "
                            "x-ds4-prompt-tokens, x-ds4-cached-tokens");
}

static void answer_preflight(struct ds4_exchange *x)
{
    struct ds4_str wanted = ds4_exchange_header(x, "access-control-request-headers");
    char copy[512];

    if (wanted.len > 0 && wanted.len < sizeof(copy)) {
        memcpy(copy, wanted.ptr, wanted.len);
        copy[wanted.len] = '\0';
        ds4_exchange_set_header(x, "access-control-allow-headers", copy);
    }
    ds4_exchange_set_header(x, "access-control-allow-methods", "GET, POST, DELETE, OPTIONS");
    ds4_exchange_set_header(x, "access-control-max-age", "86400");
    ds4_exchange_reply(x, 204, "text/plain", DS4_STR(""));
}

/* ---- h2o glue --------------------------------------------------------------------------------- */

static int fd_of(h2o_req_t *req)
{
    h2o_socket_t *sock;
    struct connection *c;
    uv_os_fd_t fd;

    if (req->version >= 0x200)
        return -1;
    sock = req->conn->callbacks->get_socket(req->conn);
    c = sock == NULL ? NULL : sock->on_close.data;
    if (c == NULL || uv_fileno((uv_handle_t *)&c->tcp, &fd) != 0)
        return -1;
    return fd;
}

/* Bodies are read as they come; a compressed one would be "not valid JSON". */
static bool is_encoded(const struct ds4_exchange *x)
{
    struct ds4_str encoding = ds4_exchange_header(x, "content-encoding");

    return encoding.len > 0 && !ds4_str_equal(encoding, DS4_STR("identity")) &&
           ds4_exchange_body(x).len > 0;
}

static size_t header_bytes(const h2o_req_t *req)
{
    size_t sum = req->path.len;

    for (size_t i = 0; i < req->headers.size; i++)
        sum += req->headers.entries[i].name->len + req->headers.entries[i].value.len;
    return sum;
}

static int on_request(h2o_handler_t *self, h2o_req_t *req)
{
    const struct door *door = ((struct route_handler *)self)->door;
    struct ds4_server *server = door->server;
    struct ds4_exchange *x = ds4_exchange_new(&server->host, req, fd_of(req));
    const struct ds4_route *route;
    enum ds4_method method;
    uint32_t allowed;

    if (x == NULL)
        return -1;
    method = ds4_exchange_method(x);
    add_cors_headers(server, x);
    if (method == DS4_METHOD_OPTIONS) {
        answer_preflight(x);
        return 0;
    }
    if (header_bytes(req) > DS4_HEADERS_MAX) {
        server->config.refuse(x, 431, "request_too_large",
                              "the request's headers are larger than 64 KiB");
        return 0;
    }
    route = find_route(door, ds4_exchange_path(x), method, &allowed);
    if (route != NULL && route->endpoint != NULL)
        ds4_exchange_set_endpoint(x, route->endpoint);
    if (ds4_exchange_body(x).len > server->config.max_body_bytes) {
        server->config.refuse(x, 413, "request_too_large",
                              "the request body is larger than the server accepts");
    } else if (route == NULL && allowed == 0) {
        refuse_path(server, x);
    } else if (route == NULL) {
        refuse_method(server, x, allowed);
    } else if (!route->open && !door->open && !authorised(server, x)) {
        return 0;
    } else if (is_encoded(x)) {
        server->config.refuse(x, 415, "unsupported_encoding",
                              "the body has a content-encoding: send it as it is");
    } else {
        route->handle(x, server->config.context);
    }
    return 0;
}

static void on_connection_closed(void *data)
{
    struct connection *c = data;

    *c->at = c->next;
    if (c->next != NULL)
        c->next->at = c->at;
    c->server->host.n_connections--;
    ds4_exchange_show_connections(&c->server->host);
}

static void keep_connection(struct ds4_server *server, struct connection *c)
{
    c->server = server;
    c->next = server->connections;
    c->at = &server->connections;
    if (c->next != NULL)
        c->next->at = &c->next;
    server->connections = c;
    server->host.n_connections++;
    ds4_exchange_show_connections(&server->host);
}

static void free_connection(uv_handle_t *handle)
{
    free((struct connection *)handle);
}

static void on_connection(uv_stream_t *listener, int status)
{
    static struct ds4_log_limit limit;
    struct door *door = listener->data;
    struct ds4_server *server = door->server;
    struct connection *c;
    h2o_socket_t *sock;
    int send_bytes =
        server->config.out_buf_bytes > INT_MAX ? INT_MAX : (int)server->config.out_buf_bytes;

    if (status != 0) {
        ds4_log_limited(&limit, 5, DS4_LOG_WARN, "http.accept", "error=\"%s\"",
                        uv_strerror(status));
        return;
    }
    c = calloc(1, sizeof(*c));
    if (c == NULL)
        return;
    (void)uv_tcp_init(listener->loop, &c->tcp);
    if (uv_accept(listener, (uv_stream_t *)&c->tcp) != 0) {
        uv_close((uv_handle_t *)&c->tcp, free_connection);
        return;
    }
    (void)uv_tcp_nodelay(&c->tcp, 1);
    /* Left to itself the system takes megabytes from us before a slow reader shows. */
    (void)uv_send_buffer_size((uv_handle_t *)&c->tcp, &send_bytes);
    sock = h2o_uv_socket_create((uv_stream_t *)&c->tcp, free_connection);
    sock->on_close.cb = on_connection_closed;
    sock->on_close.data = c;
    keep_connection(server, c);
    h2o_accept(&door->accept, sock);
}

/* ---- answers h2o gives itself ------------------------------------------------------------------- */

static h2o_iovec_t own_error_body(h2o_req_t *req)
{
    struct ds4_str path = {req->input.path.base, req->input.path.len};
    const char *text;

    if (req->res.status == 413 && ds4_str_starts(path, DS4_STR("/v1/messages")))
        text = "{\"type\":\"error\",\"error\":{\"type\":\"request_too_large\",\"message\":"
               "\"the request body is larger than the server accepts\"}}";
    else if (req->res.status == 413)
        text = "{\"error\":{\"message\":\"the request body is larger than the server accepts\","
               "\"type\":\"invalid_request_error\",\"param\":null,\"code\":\"request_too_large\"}}";
    else
        text = "{\"error\":{\"message\":\"the request is not valid HTTP\","
               "\"type\":\"invalid_request_error\",\"param\":null,\"code\":\"invalid_value\"}}";
    return h2o_iovec_init(text, strlen(text));
}

static void send_own_error(h2o_ostream_t *self, h2o_req_t *req, h2o_iovec_t *bufs, size_t n,
                           h2o_send_state_t state)
{
    h2o_iovec_t body = own_error_body(req);

    (void)bufs;
    (void)n;
    h2o_ostream_send_next(self, req, &body, 1, state);
}

/* Ours carry x-request-id; an error without it was made by h2o before any handler ran. */
static void on_setup_ostream(h2o_filter_t *self, h2o_req_t *req, h2o_ostream_t **slot)
{
    ssize_t type;

    (void)self;
    if (req->res.status < 400 ||
        h2o_find_header_by_str(&req->res.headers, "x-request-id", 12, -1) >= 0) {
        h2o_setup_next_ostream(req, slot);
        return;
    }
    type = h2o_find_header(&req->res.headers, H2O_TOKEN_CONTENT_TYPE, -1);
    if (type >= 0)
        req->res.headers.entries[type].value = h2o_iovec_init(H2O_STRLIT("application/json"));
    req->res.content_length = own_error_body(req).len;
    h2o_add_ostream(req, sizeof(h2o_ostream_t), slot)->do_send = send_own_error;
    h2o_setup_next_ostream(req, &(*slot)->next);
}

/* ---- open and close --------------------------------------------------------------------------- */

static int parse_address(const struct door *door, struct sockaddr_storage *address,
                         struct ds4_err *err)
{
    if (door->wanted_port < 0 || door->wanted_port > UINT16_MAX)
        return ds4_fail(err, DS4_E_INVALID, "http.port is %d, must be 0 to 65535",
                        door->wanted_port);
    if (uv_ip4_addr(door->listen, door->wanted_port, (struct sockaddr_in *)address) == 0 ||
        uv_ip6_addr(door->listen, door->wanted_port, (struct sockaddr_in6 *)address) == 0)
        return 0;
    return ds4_fail(err, DS4_E_INVALID, "http.listen is \"%s\", must be an IPv4 or IPv6 address",
                    door->listen);
}

static void set_up_host(struct ds4_server *server, struct door *door, const char *name)
{
    h2o_hostconf_t *host =
        h2o_config_register_host(&server->global, h2o_iovec_init(name, strlen(name)), 65535);
    h2o_pathconf_t *path = h2o_config_register_path(host, "/", 0);
    struct route_handler *handler =
        (struct route_handler *)h2o_create_handler(path, sizeof(*handler));

    handler->super.on_req = on_request;
    handler->door = door;
    h2o_create_filter(path, sizeof(h2o_filter_t))->on_setup_ostream = on_setup_ostream;
    h2o_create_filter(&host->fallback_path, sizeof(h2o_filter_t))->on_setup_ostream =
        on_setup_ostream;
    door->server = server;
    door->hosts[0] = host; /* and no other: what a client calls us by decides nothing */
    door->accept = (h2o_accept_ctx_t){.ctx = &server->context, .hosts = door->hosts};
}

static void set_up_h2o(struct ds4_server *server, uv_loop_t *loop)
{
    h2o_config_init(&server->global);
    server->global.server_name = h2o_iovec_init(H2O_STRLIT("ds4"));
    /* Read somewhat more than is accepted: a client that sends its whole body before it reads would
     * otherwise meet a reset instead of the 413. */
    server->global.max_request_entity_size = 2 * server->config.max_body_bytes;
    server->global.http1.req_timeout = (uint64_t)server->config.request_ms;
    set_up_host(server, &server->main, "default");
    set_up_host(server, &server->side, "side");
    h2o_context_init(&server->context, loop, &server->global);
}

/* On passed_fd if that is a socket, else on an address. */
static int start_listening(struct door *door, int passed_fd, struct ds4_err *err)
{
    struct sockaddr_storage address = {0}, bound = {0};
    int size = sizeof(bound);
    int rc;

    if (parse_address(door, &address, err) != 0)
        return -1;
    (void)uv_tcp_init(door->server->host.loop, &door->listener);
    door->listener.data = door;
    door->listening = true;
    rc = passed_fd > 0 ? uv_tcp_open(&door->listener, passed_fd)
                       : uv_tcp_bind(&door->listener, (const struct sockaddr *)&address, 0);
    if (rc == 0)
        rc = uv_listen((uv_stream_t *)&door->listener, DS4_LISTEN_BACKLOG, on_connection);
    if (rc == 0)
        rc = uv_tcp_getsockname(&door->listener, (struct sockaddr *)&bound, &size);
    if (rc != 0)
        return ds4_fail(err, DS4_E_IO, "could not listen on %s port %d: %s", door->listen,
                        door->wanted_port, uv_strerror(rc));
    door->port = ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port
                                                   : ((struct sockaddr_in *)&bound)->sin_port);
    return 0;
}

static int open_doors(struct ds4_server *server, struct ds4_err *err)
{
    const struct ds4_server_config *c = &server->config;

    (void)snprintf(server->main.listen, sizeof(server->main.listen), "%s", c->listen);
    server->main.wanted_port = c->port;
    if (start_listening(&server->main, c->passed_fd, err) != 0)
        return -1;
    if (c->side_listen == NULL || c->side_listen[0] == '\0')
        return 0;
    (void)snprintf(server->side.listen, sizeof(server->side.listen), "%s", c->side_listen);
    server->side.wanted_port = c->side_port;
    server->side.only = c->side_route;
    server->side.open = c->side_open;
    return start_listening(&server->side, 0, err);
}

struct ds4_server *ds4_server_open(uv_loop_t *loop, const struct ds4_server_config *config,
                                   struct ds4_err *err)
{
    struct ds4_server *server = calloc(1, sizeof(*server));

    if (server == NULL) {
        (void)ds4_fail(err, DS4_E_NOMEM, "no memory for the HTTP server");
        return NULL;
    }
    server->config = *config;
    server->host = (struct ds4_exchange_host){
        .loop = loop,
        .metrics = config->metrics,
        .out_buf_bytes = config->out_buf_bytes,
        .half_close_ms = (uint64_t)(config->half_close_ms < 0 ? 0 : config->half_close_ms),
    };
    (void)getrandom(&server->host.id_seed, sizeof(server->host.id_seed), 0);
    (void)getrandom(&server->peers.seed, sizeof(server->peers.seed), 0);
    if (load_keys(config, config->keys_file, &server->ring, err) != 0)
        goto fail;
    set_up_h2o(server, loop);
    if (open_doors(server, err) == 0)
        return server;
    ds4_server_close(server);
    (void)uv_run(loop, UV_RUN_NOWAIT);
fail:
    ds4_server_free(server);
    return NULL;
}

int32_t ds4_server_port(const struct ds4_server *server)
{
    return server->main.port;
}

int32_t ds4_server_side_port(const struct ds4_server *server)
{
    return server->side.port;
}

int ds4_server_read_keys(struct ds4_server *server, const char *keys_file, struct ds4_err *err)
{
    struct key_ring ring;

    if (load_keys(&server->config, keys_file, &ring, err) != 0)
        return -1;
    drop_keys(&server->ring);
    server->ring = ring;
    return 0;
}

void ds4_server_drain(struct ds4_server *server)
{
    server->host.closing = true;
}

static void close_door(struct door *door)
{
    if (!door->listening)
        return;
    door->listening = false;
    uv_close((uv_handle_t *)&door->listener, NULL);
}

void ds4_server_stop_listening(struct ds4_server *server)
{
    close_door(&server->main);
    close_door(&server->side);
}

size_t ds4_server_n_open(const struct ds4_server *server)
{
    return server->host.n_open;
}

size_t ds4_server_n_unsent(const struct ds4_server *server)
{
    return server->host.n_alive;
}

void ds4_server_cut_connections(struct ds4_server *server)
{
    uv_os_fd_t fd;

    for (struct connection *c = server->connections; c != NULL; c = c->next)
        if (uv_fileno((uv_handle_t *)&c->tcp, &fd) == 0)
            (void)shutdown(fd, SHUT_RDWR);
}

size_t ds4_server_n_connections(const struct ds4_server *server)
{
    return server->host.n_connections;
}

void ds4_server_close(struct ds4_server *server)
{
    if (server == NULL)
        return;
    ds4_server_stop_listening(server);
    h2o_context_dispose(&server->context);
    h2o_config_dispose(&server->global);
}

void ds4_server_free(struct ds4_server *server)
{
    if (server == NULL)
        return;
    drop_keys(&server->ring);
    free(server);
}

/* The HTTP side of the router (step 1): h2o set-up, listeners, route table, body limits, keys.
 *
 * Routes are matched on the path without query and without a trailing slash.  A route's handler runs
 * on the loop thread with a complete request: known method, authorised, body within limits.  What the
 * server answers itself (404, 405 with Allow, 401, 413, OPTIONS) is formatted by `refuse`, so that
 * each dialect's error body is used. */
#ifndef DS4_ROUTER_SERVER_H
#define DS4_ROUTER_SERVER_H

#include "common/config.h"
#include "common/err.h"
#include "router/exchange.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ds4_server;
struct ds4_metrics;
struct uv_loop_s;

struct ds4_route {
    const char *path; /* "/v1/models"; one segment "*" matches any one segment */
    uint32_t methods; /* enum ds4_method bits */
    bool open;        /* no key needed */
    void (*handle)(struct ds4_exchange *x, void *context);
    const char *endpoint; /* label of the metrics */
};

/* Refusals of the server itself.  `code` is the string of the error table, e.g. "invalid_api_key". */
typedef void (*ds4_refuse_fn)(struct ds4_exchange *x, int status, const char *code,
                              const char *message);

struct ds4_server_config {
    const char *listen;      /* address; loopback unless keys are set or `open` */
    int32_t port;            /* 0 = any free port, see ds4_server_port */
    int passed_fd;           /* a socket that listens there already, taken over; 0 = open one */
    bool open;               /* allow a public address without keys */
    const char *side_listen; /* a second address, with side_route alone; NULL or "" = none */
    int32_t side_port;
    bool side_open;                     /* no key needed there */
    const struct ds4_route *side_route; /* one of `routes` */
    const char *keys_file; /* one key per line, "key" or "key name"; NULL or "" = no keys */
    size_t max_body_bytes;
    size_t out_buf_bytes;  /* backlog limit of one stream */
    int32_t request_ms;    /* head and body of a request, or the next one, may take so long */
    int32_t half_close_ms; /* a client that closed its sending side is gone after this time */
    const struct ds4_config_texts *cors_origins; /* empty = off; "*" = any; read at every request */
    const struct ds4_route *routes;
    size_t n_routes;
    void *context;               /* passed to handlers */
    struct ds4_metrics *metrics; /* borrowed; NULL = none */
    ds4_refuse_fn refuse;
};

/* Opens the listener on `loop` (borrowed; must outlive the server).  config's tables are borrowed,
 * keys are read now.  NULL with DS4_E_INVALID (a public address without keys, a bad address, an
 * unreadable key file) or DS4_E_IO (port taken: the message names address and port). */
struct ds4_server *ds4_server_open(struct uv_loop_s *loop, const struct ds4_server_config *config,
                                   struct ds4_err *err);
int32_t ds4_server_port(const struct ds4_server *server);
int32_t ds4_server_side_port(const struct ds4_server *server); /* 0 = there is none */
/* Reads the keys anew, from another file or none.  -1 as at the opening, and the old ones stay. */
int ds4_server_read_keys(struct ds4_server *server, const char *keys_file,
                         struct ds4_err *err) DS4_MUST_CHECK;
/* From now on an answer ends its connection.  New ones are still accepted: whoever comes is told that
 * the server stops, instead of waiting for its successor. */
void ds4_server_drain(struct ds4_server *server);
/* Stops accepting; open connections go on. */
void ds4_server_stop_listening(struct ds4_server *server);
/* Exchanges that have not ended. */
size_t ds4_server_n_open(const struct ds4_server *server);
/* Exchanges whose answer is not wholly with the system yet, the open ones included. */
size_t ds4_server_n_unsent(const struct ds4_server *server);
/* Closes every connection under whatever runs on it; they are gone after some turns of the loop. */
void ds4_server_cut_connections(struct ds4_server *server);
size_t ds4_server_n_connections(const struct ds4_server *server);
/* Once no connection is left: closes the handles.  The loop must turn once more before the free. */
void ds4_server_close(struct ds4_server *server);
void ds4_server_free(struct ds4_server *server);

#endif

/* The joint between server.c and exchange.c: the only header that shows h2o types. */
#ifndef DS4_ROUTER_EXCHANGE_H2O_H
#define DS4_ROUTER_EXCHANGE_H2O_H

#include "router/exchange.h"

#include <h2o.h>

/* What all exchanges of one server share; owned by the server. */
struct ds4_exchange_host {
    uv_loop_t *loop;
    size_t out_buf_bytes;
    uint64_t half_close_ms;
    bool closing; /* an answer ends its connection */
    struct ds4_metrics *metrics;
    size_t n_connections;
    size_t n_open;      /* exchanges that have not ended */
    size_t n_alive;     /* exchanges whose memory still exists */
    size_t n_streaming; /* of them: streams that have begun */
    uint64_t next_id;
    uint64_t id_seed;
};

/* Makes the exchange of a request.  `fd` is the connection's socket, or -1 when h2o itself notices a
 * client that leaves (HTTP/2 reads on while it answers).  NULL: no memory, nothing was sent. */
struct ds4_exchange *ds4_exchange_new(struct ds4_exchange_host *host, h2o_req_t *req, int fd);

/* The metrics' label for what was asked; "other" until this is called. */
void ds4_exchange_set_endpoint(struct ds4_exchange *x, const char *endpoint);
/* The key of the request's headers that was accepted; a view as long-lived as they are. */
void ds4_exchange_set_key(struct ds4_exchange *x, struct ds4_str key);
/* Sets the gauges of connections; to be called when a number of the host has changed. */
void ds4_exchange_show_connections(const struct ds4_exchange_host *host);

#endif

/* One HTTP request and its answer (step 1 and 15), without showing h2o to the handlers.
 *
 * A handler gets an exchange and must end it exactly once: ds4_exchange_reply() for a whole answer, or
 * ds4_exchange_start() + ds4_exchange_write()* + ds4_exchange_finish() for a stream.  It may do so
 * later; until then the exchange stays valid.  When the client goes away first, `gone` is called once
 * (from the loop, never from inside a call of the handler) and later writes are dropped silently; the
 * handler still has to end the exchange.  After the ending call the exchange must not be touched.
 * Everything runs on the loop thread. */
#ifndef DS4_ROUTER_EXCHANGE_H
#define DS4_ROUTER_EXCHANGE_H

#include "common/buf.h"
#include "common/str.h"

#include <stdbool.h>
#include <stdint.h>

struct ds4_exchange;
struct sockaddr_storage;

enum ds4_method {
    DS4_METHOD_GET = 1,
    DS4_METHOD_HEAD = 2,
    DS4_METHOD_POST = 4,
    DS4_METHOD_DELETE = 8,
    DS4_METHOD_OPTIONS = 16,
    DS4_METHOD_OTHER = 32
};

/* Called once when the client is gone before the exchange was ended. */
typedef void (*ds4_gone_fn)(void *owner);
/* Called when a stream's backlog fell to zero (see ds4_exchange_backlog). */
typedef void (*ds4_drained_fn)(void *owner);

/* The request; views are valid until the exchange ends. */
enum ds4_method ds4_exchange_method(const struct ds4_exchange *x);
struct ds4_str
ds4_exchange_path(const struct ds4_exchange *x); /* without query and trailing slash */
struct ds4_str ds4_exchange_body(const struct ds4_exchange *x);
/* A request header by its lower-case name; an empty view with ptr NULL if absent. */
struct ds4_str ds4_exchange_header(const struct ds4_exchange *x, const char *name);
/* What the client calls this server: the Host header, or HTTP/2's :authority. */
struct ds4_str ds4_exchange_authority(const struct ds4_exchange *x);
/* The client's address; false when it is unknown. */
bool ds4_exchange_peer(const struct ds4_exchange *x, struct sockaddr_storage *peer);
/* The connection comes from this machine: 127.0.0.0/8 or ::1. */
bool ds4_exchange_is_local(const struct ds4_exchange *x);
/* The API key that let the request in, as in the server's list; ptr NULL: no key was needed. */
struct ds4_str ds4_exchange_key(const struct ds4_exchange *x);
/* The request's id: the client's x-request-id if it is 1..128 printable characters, else ours. */
const char *ds4_exchange_id(const struct ds4_exchange *x);
/* The same from the body (request_id), which a header outranks.  Before anything has been answered. */
void ds4_exchange_offer_id(struct ds4_exchange *x, struct ds4_str id);
/* Monotonic time at which the request was complete. */
int64_t ds4_exchange_started_ns(const struct ds4_exchange *x);

void ds4_exchange_on_gone(struct ds4_exchange *x, ds4_gone_fn gone, void *owner);
void ds4_exchange_on_drained(struct ds4_exchange *x, ds4_drained_fn drained, void *owner);
bool ds4_exchange_is_gone(const struct ds4_exchange *x);

/* The connection ends with this answer; before reply or start. */
void ds4_exchange_end_connection(struct ds4_exchange *x);
/* Sets a response header (copied) before reply or start, instead of an earlier value; name lower-case. */
void ds4_exchange_set_header(struct ds4_exchange *x, const char *name, const char *value);

/* The whole answer.  Body is copied; HEAD requests get its length only.  Ends the exchange. */
void ds4_exchange_reply(struct ds4_exchange *x, int status, const char *content_type,
                        struct ds4_str body);

/* Status line and headers of a stream; nothing may fail with another status afterwards. */
void ds4_exchange_start(struct ds4_exchange *x, int status, const char *content_type);
bool ds4_exchange_started(const struct ds4_exchange *x);
/* Queues bytes (copied).  Returns -1 when the client is gone or the backlog would pass the server's
 * out_buf limit (nothing is queued then); never blocks. */
int ds4_exchange_write(struct ds4_exchange *x, struct ds4_str bytes);
/* Bytes queued and not yet taken by the socket. */
size_t ds4_exchange_backlog(const struct ds4_exchange *x);
/* Ends a stream after what is queued.  Ends the exchange. */
void ds4_exchange_finish(struct ds4_exchange *x);
/* Closes the client's connection, so that nobody takes what was sent for a whole answer and a reader
 * that stopped does not hold it for ever; the exchange still has to be finished.  An HTTP/2 connection is
 * left alone: others use it. */
void ds4_exchange_cut(struct ds4_exchange *x);

#endif

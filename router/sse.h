/* A server-sent-event stream on an exchange (step 15): framing, keep-alive, slow readers.
 *
 * One `data:` line per event, a blank line after it, LF line ends, flushed at once.  When nothing was
 * sent for ping_ms the owner's `ping` decides what keeps the client alive (a comment, or an event of
 * its dialect).  Backlog above out_buf_bytes makes the stream congested: `pause` is called and the
 * owner must stop producing; what it still sends is accepted up to the exchange's hard limit.
 * `resume` follows when the backlog is gone; after slow_client_ms of congestion, or when the client
 * leaves, `gone` is called once.  The owner ends the stream with ds4_sse_close() in every case. */
#ifndef DS4_ROUTER_SSE_H
#define DS4_ROUTER_SSE_H

#include "router/exchange.h"

struct ds4_sse;
struct uv_loop_s;

struct ds4_sse_config {
    struct uv_loop_s *loop;
    int64_t start_ms; /* the headers leave after this time at the latest; 0 = no limit */
    int64_t ping_ms;  /* 0 = never */
    int64_t slow_client_ms;
    size_t out_buf_bytes;
    void (*ping)(void *owner);
    void (*pause)(void *owner);                    /* may be NULL */
    void (*resume)(void *owner);                   /* may be NULL */
    void (*gone)(void *owner, const char *reason); /* "disconnect" | "slow_client" */
    void *owner;
};

/* Takes over the exchange's gone and drained callbacks.  Headers are sent by ds4_sse_start(); until
 * then the owner may still answer with ds4_exchange_reply() after ds4_sse_abandon().  NULL: no
 * memory. */
struct ds4_sse *ds4_sse_new(struct ds4_exchange *x, const struct ds4_sse_config *config);

/* Sends status 200 and the event-stream headers; later calls do nothing. */
void ds4_sse_start(struct ds4_sse *sse);
bool ds4_sse_started(const struct ds4_sse *sse);

/* Events; `json` must hold no line break.  Starts the stream if needed.  Silently dropped once the
 * client is gone. */
void ds4_sse_send_data(struct ds4_sse *sse, struct ds4_str json);
void ds4_sse_send_event(struct ds4_sse *sse, const char *event, struct ds4_str json);
void ds4_sse_send_comment(struct ds4_sse *sse, const char *text);

/* Frees the stream object and hands the exchange back, un-ended and without callbacks. */
struct ds4_exchange *ds4_sse_abandon(struct ds4_sse *sse);
/* Ends the stream and its exchange, frees. */
void ds4_sse_close(struct ds4_sse *sse);

#endif

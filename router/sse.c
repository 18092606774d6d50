/* A server-sent-event stream on an exchange (step 15).
 *
 * One timer serves three clocks: before the headers it runs towards start_ms, while the stream is
 * congested towards slow_client_ms, else towards the next ping.  Sending anything restarts it, so a
 * busy stream costs no extra frames.  A client found too slow is cut off in the middle: an end in good
 * order would make half an answer look whole.  The timer's memory must outlive uv_close, hence the
 * object is freed from the close callback. */
#include "router/sse.h"

#include <stdlib.h>

#include <uv.h>

struct ds4_sse {
    struct ds4_sse_config config;
    struct ds4_exchange *x;
    uv_timer_t timer;
    bool congested;
    bool gone;
    bool too_slow;  /* `gone` because of that */
    bool gone_owed; /* the timer still has to tell */
};

static void on_timer(uv_timer_t *timer);

static void restart_timer(struct ds4_sse *sse)
{
    int64_t ms = sse->congested ? sse->config.slow_client_ms : sse->config.ping_ms;

    if (sse->gone)
        return;
    if (!ds4_sse_started(sse))
        ms = sse->config.start_ms;
    if (ms > 0)
        (void)uv_timer_start(&sse->timer, on_timer, (uint64_t)ms, 0);
    else
        (void)uv_timer_stop(&sse->timer);
}

static void tell_gone(struct ds4_sse *sse, const char *reason)
{
    if (sse->gone)
        return;
    sse->gone = true;
    (void)uv_timer_stop(&sse->timer);
    sse->config.gone(sse->config.owner, reason);
}

/* A frame did not fit.  Whoever sends is in the middle of its work on this stream: the owner hears of it
 * from the loop, never from inside its own send, which may be the last thing it does before it frees
 * itself. */
static void cut_off(struct ds4_sse *sse)
{
    sse->gone = true;
    sse->too_slow = true;
    sse->gone_owed = true;
    (void)uv_timer_start(&sse->timer, on_timer, 0, 0);
}

static void on_timer(uv_timer_t *timer)
{
    struct ds4_sse *sse = timer->data;

    if (sse->gone_owed) {
        sse->config.gone(sse->config.owner, "slow_client");
        return;
    }
    if (sse->congested) {
        sse->too_slow = true;
        tell_gone(sse, "slow_client");
        return;
    }
    if (!ds4_sse_started(sse)) {
        ds4_sse_start(sse);
        return;
    }
    restart_timer(sse);
    sse->config.ping(sse->config.owner);
}

static void on_gone(void *owner)
{
    tell_gone(owner, "disconnect");
}

static void on_drained(void *owner)
{
    struct ds4_sse *sse = owner;

    if (!sse->congested)
        return;
    sse->congested = false;
    restart_timer(sse);
    if (sse->config.resume != NULL)
        sse->config.resume(sse->config.owner);
}

struct ds4_sse *ds4_sse_new(struct ds4_exchange *x, const struct ds4_sse_config *config)
{
    struct ds4_sse *sse = calloc(1, sizeof(*sse));

    if (sse == NULL)
        return NULL;
    sse->config = *config;
    sse->x = x;
    (void)uv_timer_init(config->loop, &sse->timer);
    sse->timer.data = sse;
    ds4_exchange_on_gone(x, on_gone, sse);
    ds4_exchange_on_drained(x, on_drained, sse);
    restart_timer(sse);
    return sse;
}

void ds4_sse_start(struct ds4_sse *sse)
{
    if (ds4_exchange_started(sse->x))
        return;
    ds4_exchange_set_header(sse->x, "cache-control", "no-cache");
    ds4_exchange_set_header(sse->x, "x-accel-buffering", "no");
    ds4_exchange_start(sse->x, 200, "text/event-stream");
    restart_timer(sse);
}

bool ds4_sse_started(const struct ds4_sse *sse)
{
    return ds4_exchange_started(sse->x);
}

static void send_frame(struct ds4_sse *sse, const char *lead, const char *event,
                       struct ds4_str text)
{
    struct ds4_buf frame;

    if (sse->gone)
        return;
    ds4_sse_start(sse);
    ds4_buf_init(&frame, SIZE_MAX / 2);
    if (event != NULL)
        (void)ds4_buf_appendf(&frame, "event: %s\n", event);
    (void)ds4_buf_append_text(&frame, lead);
    (void)ds4_buf_append_str(&frame, text);
    (void)ds4_buf_append_text(&frame, "\n\n");
    /* A frame that could not be queued whole would make the stream lie: the client is cut off. */
    if ((frame.failed || ds4_exchange_write(sse->x, ds4_buf_view(&frame)) != 0) &&
        !ds4_exchange_is_gone(sse->x)) {
        ds4_buf_deinit(&frame);
        cut_off(sse);
        return;
    }
    ds4_buf_deinit(&frame);
    if (!sse->congested && ds4_exchange_backlog(sse->x) > sse->config.out_buf_bytes) {
        sse->congested = true;
        restart_timer(sse);
        if (sse->config.pause != NULL)
            sse->config.pause(sse->config.owner);
    } else if (!sse->congested) {
        restart_timer(sse);
    }
}

void ds4_sse_send_data(struct ds4_sse *sse, struct ds4_str json)
{
    send_frame(sse, "data: ", NULL, json);
}

void ds4_sse_send_event(struct ds4_sse *sse, const char *event, struct ds4_str json)
{
    send_frame(sse, "data: ", event, json);
}

void ds4_sse_send_comment(struct ds4_sse *sse, const char *text)
{
    send_frame(sse, ": ", NULL, ds4_str_view(text));
}

static void free_sse(uv_handle_t *handle)
{
    free(handle->data);
}

struct ds4_exchange *ds4_sse_abandon(struct ds4_sse *sse)
{
    struct ds4_exchange *x = sse->x;

    ds4_exchange_on_gone(x, NULL, NULL);
    ds4_exchange_on_drained(x, NULL, NULL);
    sse->gone = true;
    uv_close((uv_handle_t *)&sse->timer, free_sse);
    return x;
}

void ds4_sse_close(struct ds4_sse *sse)
{
    if (sse->too_slow)
        ds4_exchange_cut(sse->x);
    ds4_exchange_finish(ds4_sse_abandon(sse));
}

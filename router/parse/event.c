/* Step 14: the event list.  Appends never report failure one by one: `failed` is sticky and the
 * parser's feed looks at it once at its end. */
#include "router/parse/event.h"

void ds4_events_init(struct ds4_events *events, size_t max_text_bytes)
{
    *events = (struct ds4_events){0};
    ds4_buf_init(&events->text, max_text_bytes);
}

void ds4_events_deinit(struct ds4_events *events)
{
    DS4_VEC_DEINIT(&events->list);
    ds4_buf_deinit(&events->text);
}

struct ds4_event *ds4_events_push(struct ds4_events *events, enum ds4_event_kind kind,
                                  uint32_t call)
{
    struct ds4_event *event;

    if (events->list.len == events->list.cap &&
        DS4_VEC_RESERVE(&events->list, events->list.len + 1) != 0) {
        events->failed = true;
        return NULL;
    }
    event = &events->list.ptr[events->list.len++];
    event->kind = kind;
    event->call = call;
    event->text_at = events->text.len;
    event->text_len = 0;
    return event;
}

void ds4_events_push_begin(struct ds4_events *events, uint32_t call, const char *id,
                           struct ds4_str name)
{
    struct ds4_event *event = ds4_events_push(events, DS4_EVENT_CALL_BEGIN, call);

    if (event == NULL)
        return;
    memcpy(event->id, id, sizeof(event->id));
    if (ds4_buf_append_str(&events->text, name) != 0)
        events->failed = true;
    else
        event->text_len = name.len;
}

void ds4_events_push_end(struct ds4_events *events, uint32_t call, bool incomplete)
{
    struct ds4_event *event = ds4_events_push(events, DS4_EVENT_CALL_END, call);

    if (event != NULL)
        event->incomplete = incomplete;
}

void ds4_events_push_finish(struct ds4_events *events, const struct ds4_finish *finish)
{
    struct ds4_event *event = ds4_events_push(events, DS4_EVENT_FINISH, 0);

    if (event != NULL)
        event->finish = *finish;
}

const char *ds4_finish_name(enum ds4_finish_reason reason)
{
    switch (reason) {
    case DS4_FINISH_STOP:
        return "stop";
    case DS4_FINISH_LENGTH:
        return "length";
    case DS4_FINISH_TOOL_CALLS:
        return "tool_calls";
    }
    return "stop";
}

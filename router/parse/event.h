/* What the parser says about one turn: a list of events that the caller empties after each feed.
 *
 * The texts of one list lie in one buffer; ds4_event_text gives a view that lives until the next
 * append or clear.  Adjacent pieces of the same kind are merged, so a feed rarely yields more than
 * one or two events.  Concatenated over the turn, the pieces of reasoning, content and of each call's
 * arguments are the final values; nothing is ever taken back. */
#ifndef DS4_ROUTER_PARSE_EVENT_H
#define DS4_ROUTER_PARSE_EVENT_H

#include "common/buf.h"
#include "common/str.h"
#include "common/vec.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DS4_CALL_ID_CHARS 29 /* "call_" and 24 letters or digits */

enum ds4_event_kind {
    DS4_EVENT_REASONING,  /* text */
    DS4_EVENT_CONTENT,    /* text */
    DS4_EVENT_CALL_BEGIN, /* call, id, text = the tool's name */
    DS4_EVENT_CALL_ARGS,  /* call, text = a piece of the arguments' JSON */
    DS4_EVENT_CALL_END,   /* call, incomplete */
    DS4_EVENT_FINISH,     /* finish: the last event of the turn */
};

enum ds4_finish_reason {
    DS4_FINISH_STOP,
    DS4_FINISH_LENGTH,
    DS4_FINISH_TOOL_CALLS,
};

struct ds4_finish {
    enum ds4_finish_reason reason;
    bool truncated_tool_args;    /* a call is incomplete: its arguments are deliberately not JSON */
    bool truncated_in_reasoning; /* the length limit came before </think> */
    bool stop_string;            /* a stop string of the request ended the turn */
    struct ds4_str stop_text;    /* that string, borrowed from the parser's configuration */
    bool pseudo_tag; /* tools declared, none called, call-like markup left in the text */
};

struct ds4_event {
    enum ds4_event_kind kind;
    uint32_t call; /* 0, 1, .. in order of appearance */
    size_t text_at;
    size_t text_len;
    union {
        char id[DS4_CALL_ID_CHARS + 1]; /* DS4_EVENT_CALL_BEGIN */
        bool incomplete;                /* DS4_EVENT_CALL_END */
        struct ds4_finish finish;       /* DS4_EVENT_FINISH */
    };
};

/* Owns the events and their texts. */
struct ds4_events {
    DS4_VEC(struct ds4_event) list;
    struct ds4_buf text;
    bool failed; /* memory ran out; cleared by ds4_events_clear */
};

void ds4_events_init(struct ds4_events *events, size_t max_text_bytes);
void ds4_events_deinit(struct ds4_events *events);
/* Empties the list, keeps its memory. */
static inline void ds4_events_clear(struct ds4_events *events)
{
    events->list.len = 0;
    events->failed = false;
    ds4_buf_clear(&events->text);
}

/* A new event without text at the end of the list; NULL when memory is out. */
struct ds4_event *ds4_events_push(struct ds4_events *events, enum ds4_event_kind kind,
                                  uint32_t call);

/* Room for n bytes more of such text, which the caller fills at once; NULL when memory is out.  Inline,
 * like the append of a few bytes, because every sampled token comes here. */
static inline char *ds4_events_extend(struct ds4_events *events, enum ds4_event_kind kind,
                                      uint32_t call, size_t n)
{
    size_t n_event = events->list.len;
    struct ds4_event *event = NULL;
    char *dst;

    if (n_event > 0)
        event = &events->list.ptr[n_event - 1];
    if (event == NULL || event->kind != kind || event->call != call) {
        if (n_event == events->list.cap || events->list.ptr == NULL) {
            event = ds4_events_push(events, kind, call);
        } else {
            event = &events->list.ptr[events->list.len++];
            event->kind = kind;
            event->call = call;
            event->text_at = events->text.len;
            event->text_len = 0;
        }
    }
    dst = event == NULL ? NULL : ds4_buf_reserve(&events->text, n);
    if (dst == NULL) {
        events->failed = true;
        return NULL;
    }
    event->text_len += n;
    ds4_buf_commit(&events->text, n);
    return dst;
}

/* Appends a text piece; an empty one is nothing. */
static inline void ds4_events_push_text(struct ds4_events *events, enum ds4_event_kind kind,
                                        uint32_t call, struct ds4_str text)
{
    char *dst = text.len == 0 ? NULL : ds4_events_extend(events, kind, call, text.len);

    if (dst != NULL)
        ds4_buf_copy_few(dst, text.ptr, text.len);
}
void ds4_events_push_begin(struct ds4_events *events, uint32_t call, const char *id,
                           struct ds4_str name);
void ds4_events_push_end(struct ds4_events *events, uint32_t call, bool incomplete);
void ds4_events_push_finish(struct ds4_events *events, const struct ds4_finish *finish);

static inline struct ds4_str ds4_event_text(const struct ds4_events *events,
                                            const struct ds4_event *event)
{
    return (struct ds4_str){ds4_buf_view(&events->text).ptr + event->text_at, event->text_len};
}

/* "stop", "length", "tool_calls". */
const char *ds4_finish_name(enum ds4_finish_reason reason);

#endif

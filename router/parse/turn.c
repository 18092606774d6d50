/* Step 14: adding up events.  Trusts their order (a call begins before its arguments), which the
 * parser guarantees. */
#include "router/parse/turn.h"

#include <assert.h>

void ds4_turn_init(struct ds4_turn *turn, size_t max_bytes)
{
    *turn = (struct ds4_turn){.max_bytes = max_bytes};
    ds4_buf_init(&turn->reasoning, max_bytes);
    ds4_buf_init(&turn->content, max_bytes);
}

void ds4_turn_deinit(struct ds4_turn *turn)
{
    ds4_buf_deinit(&turn->reasoning);
    ds4_buf_deinit(&turn->content);
    for (size_t i = 0; i < turn->calls.len; i++) {
        ds4_buf_deinit(&turn->calls.ptr[i].name);
        ds4_buf_deinit(&turn->calls.ptr[i].arguments);
    }
    DS4_VEC_DEINIT(&turn->calls);
}

static int begin_call(struct ds4_turn *turn, const struct ds4_event *e, struct ds4_str name,
                      struct ds4_err *err)
{
    struct ds4_turn_call call = {0};

    memcpy(call.id, e->id, sizeof(call.id));
    ds4_buf_init(&call.name, turn->max_bytes);
    ds4_buf_init(&call.arguments, turn->max_bytes);
    if (ds4_buf_append_str(&call.name, name) != 0)
        return ds4_buf_check(&call.name, "tool name", err);
    if (DS4_VEC_PUSH(&turn->calls, call) != 0) {
        ds4_buf_deinit(&call.name);
        return ds4_fail(err, DS4_E_NOMEM, "could not allocate a call");
    }
    return 0;
}

static int append(struct ds4_buf *buf, struct ds4_str text, const char *what, struct ds4_err *err)
{
    (void)ds4_buf_append_str(buf, text);
    return ds4_buf_check(buf, what, err);
}

static int add(struct ds4_turn *turn, const struct ds4_event *e, struct ds4_str text,
               struct ds4_err *err)
{
    switch (e->kind) {
    case DS4_EVENT_REASONING:
        return append(&turn->reasoning, text, "reasoning", err);
    case DS4_EVENT_CONTENT:
        return append(&turn->content, text, "content", err);
    case DS4_EVENT_CALL_BEGIN:
        assert(e->call == turn->calls.len);
        return begin_call(turn, e, text, err);
    case DS4_EVENT_CALL_ARGS:
        assert(e->call < turn->calls.len);
        return append(&turn->calls.ptr[e->call].arguments, text, "arguments", err);
    case DS4_EVENT_CALL_END:
        assert(e->call < turn->calls.len);
        turn->calls.ptr[e->call].incomplete = e->incomplete;
        return 0;
    case DS4_EVENT_FINISH:
        turn->finished = true;
        turn->finish = e->finish;
        return 0;
    }
    return 0;
}

int ds4_turn_add(struct ds4_turn *turn, const struct ds4_events *events, struct ds4_err *err)
{
    for (size_t i = 0; i < events->list.len; i++) {
        const struct ds4_event *e = &events->list.ptr[i];
        if (add(turn, e, ds4_event_text(events, e), err) != 0)
            return -1;
    }
    return 0;
}

/* Step 14: the strict grammar, a block of calls inside a known wrapper.
 *
 * Here the markup is believed: calls are announced when their opener is complete, arguments stream,
 * undeclared names are reported (the client answers "unknown tool" and the model recovers).  What the
 * model forgets - closers of any level, a name, the parameters' tags - is made good where it cannot
 * be misread.  Invariant: text of a block reaches the client only as arguments, except for text after
 * the last call of a block that is never closed. */
#include "router/parse/state.h"

/* ---- calls ---------------------------------------------------------------------------------- */

static void send_args(struct ds4_stream *s, struct ds4_str text)
{
    ds4_events_push_text(s->out, DS4_EVENT_CALL_ARGS, s->call.index, text);
}

static void start_call(struct ds4_stream *s, const struct ds4_marker *m)
{
    struct ds4_marker_attrs attrs = ds4_marker_read_attrs(m->attrs);
    struct ds4_str name = ds4_str_trim(attrs.name);

    s->call = (struct ds4_call){.mode = DS4_CALL_STREAM, .fresh = true};
    s->holder = DS4_HOLDER_CALL;
    ds4_args_clear(&s->args);
    ds4_args_clear(&s->seen);
    ds4_args_clear(&s->members);
    if (name.len == 0) {
        s->call.mode = DS4_CALL_NAMELESS;
    } else {
        s->call.tool = ds4_state_find_tool(s, name);
        if (s->call.tool == NULL)
            ds4_state_count(s, DS4_RULE_UNDECLARED);
        s->call.index = ds4_state_announce(s, name);
    }
    s->state = DS4_STATE_CALL;
}

/* The one declared tool that has all collected names as properties and gets all it requires. */
static const struct ds4_tool *infer_tool(const struct ds4_stream *s)
{
    const struct ds4_tool *found = NULL;

    for (size_t t = 0; t < s->n_tools; t++) {
        const struct ds4_tool *tool = &s->tools[t];
        bool fits = true;
        for (size_t i = 0; fits && i < s->args.list.len; i++)
            fits = ds4_tool_find(tool, ds4_args_name(&s->args, i)) != NULL;
        for (size_t i = 0; fits && i < tool->n_required; i++)
            fits = ds4_args_has(&s->args, tool->required[i]);
        if (!fits)
            continue;
        if (found != NULL)
            return NULL;
        found = tool;
    }
    return found;
}

/* The collected parameters as one object: the wrapped one, if a single parameter stands for it. */
static void send_collected(struct ds4_stream *s)
{
    ds4_buf_clear(&s->text);
    if (!ds4_args_unwrap(&s->text, &s->args, s->call.tool))
        s->rules_used[DS4_RULE_COERCED_PARAM] += ds4_args_write(&s->text, &s->args, s->call.tool);
    if (s->text.failed)
        s->failed = true;
    send_args(s, ds4_buf_view(&s->text));
}

static void end_call(struct ds4_stream *s)
{
    s->state = DS4_STATE_BLOCK;
    switch (s->call.mode) {
    case DS4_CALL_STREAM:
        send_args(s, s->call.n_written == 0 ? DS4_STR("{}") : DS4_STR("}"));
        break;
    case DS4_CALL_HELD:
        send_collected(s);
        break;
    case DS4_CALL_NAMELESS:
        s->call.tool = infer_tool(s);
        if (s->call.tool == NULL) {
            ds4_buf_clear(&s->junk);
            ds4_state_count(s, DS4_RULE_REJECTED_AMBIGUOUS);
            return;
        }
        ds4_state_count(s, DS4_RULE_RECOVERED_NAMELESS);
        s->call.index = ds4_state_announce(s, s->call.tool->name);
        if (s->call.has_json)
            send_args(s, ds4_buf_view(&s->junk));
        else
            send_collected(s);
        ds4_buf_clear(&s->junk);
        break;
    case DS4_CALL_DONE:
        break;
    }
    ds4_events_push_end(s->out, s->call.index, false);
    s->n_complete++;
}

void ds4_dsml_cut_call(struct ds4_stream *s)
{
    ds4_state_count(s, DS4_RULE_TRUNCATED);
    s->incomplete = true;
    if (s->call.mode != DS4_CALL_NAMELESS)
        ds4_events_push_end(s->out, s->call.index, true);
    s->state = DS4_STATE_ENDED;
}

/* ---- parameters ----------------------------------------------------------------------------- */

static void write_param(struct ds4_stream *s, struct ds4_str name, struct ds4_str text,
                        enum ds4_arg_form form)
{
    ds4_buf_clear(&s->text);
    ds4_args_write_key(&s->text, s->call.n_written == 0, name);
    if (ds4_args_write_value(&s->text, s->call.tool, name, text, form))
        ds4_state_count(s, DS4_RULE_COERCED_PARAM);
    if (s->text.failed)
        s->failed = true;
    send_args(s, ds4_buf_view(&s->text));
    s->call.n_written++;
}

void ds4_dsml_take_param(struct ds4_stream *s, struct ds4_str text, enum ds4_arg_form form)
{
    struct ds4_str name = ds4_buf_view(&s->param.name);

    switch (s->call.mode) {
    case DS4_CALL_STREAM:
        write_param(s, name, text, form);
        break;
    case DS4_CALL_HELD:
    case DS4_CALL_NAMELESS:
        if (!s->call.has_json && !ds4_args_add(&s->args, name, text, form))
            ds4_state_count(s, DS4_RULE_DUP_PARAM);
        break;
    case DS4_CALL_DONE:
        break;
    }
}

void ds4_dsml_take_json(struct ds4_stream *s, struct ds4_str text)
{
    ds4_args_clear(&s->args);
    if (!ds4_args_object_keys(text, &s->args)) {
        ds4_args_clear(&s->args);
        return;
    }
    if (s->call.mode == DS4_CALL_NAMELESS) {
        s->call.has_json = true;
        if (ds4_buf_append_str(&s->junk, text) != 0)
            s->failed = true;
        return;
    }
    send_args(s, text);
    s->call.mode = DS4_CALL_DONE;
}

/* A parameter opener inside the call: decides whether its value streams, waits or is dropped. */
static void start_param(struct ds4_stream *s, const struct ds4_marker *m)
{
    struct ds4_param *p = &s->param;
    struct ds4_str name;

    ds4_value_start(s, m, s->scan + m->len);
    s->pos = s->scan;
    s->call.fresh = false;
    name = ds4_buf_view(&p->name);
    if (p->nameless || s->call.mode == DS4_CALL_DONE || s->call.mode == DS4_CALL_NAMELESS)
        return;
    if (!ds4_args_add(&s->seen, name, (struct ds4_str){"", 0}, DS4_ARG_READY)) {
        ds4_state_count(s, DS4_RULE_DUP_PARAM);
        p->nameless = true;
        return;
    }
    if (s->call.mode == DS4_CALL_HELD) { /* a second parameter: the first was no wrapper */
        s->call.mode = DS4_CALL_STREAM;
        write_param(s, ds4_args_name(&s->args, 0), ds4_args_text(&s->args, 0),
                    s->args.list.ptr[0].form);
    } else if (s->call.n_written == 0 && ds4_args_may_wrap(s->call.tool, name)) {
        s->call.mode = DS4_CALL_HELD;
        return;
    }
    p->streamed = p->form == DS4_ARG_STRING;
}

enum ds4_step ds4_dsml_call(struct ds4_stream *s)
{
    enum ds4_marker_status got;
    struct ds4_marker m;

    if (!ds4_state_skip_blanks(s)) {
        s->pos = s->scan;
        return DS4_STEP_WAIT;
    }
    s->pos = s->scan;
    if (*ds4_state_at(s, s->pos) != '<') {
        const char *from = ds4_state_at(s, s->pos), *lt;
        if (s->call.fresh && *from == '{') {
            s->call.fresh = false;
            s->param.begin = s->pos;
            s->state = DS4_STATE_JSON;
            return DS4_STEP_AGAIN;
        }
        s->call.fresh = false;
        lt = memchr(from, '<', ds4_state_end(s) - s->pos);
        ds4_state_consume(s, lt == NULL ? ds4_state_end(s) : s->pos + (size_t)(lt - from));
        return DS4_STEP_AGAIN;
    }
    got = ds4_state_marker(s, s->pos, &m);
    if (got == DS4_MARKER_PARTIAL)
        return DS4_STEP_WAIT;
    if (got == DS4_MARKER_NONE) {
        s->call.fresh = false;
        ds4_state_consume(s, s->pos + 1);
        return DS4_STEP_AGAIN;
    }
    switch (m.kind) {
    case DS4_MARKER_PARAMETER:
        start_param(s, &m);
        break;
    case DS4_MARKER_CLOSE_INVOKE:
        ds4_state_consume(s, s->pos + m.len);
        end_call(s);
        break;
    case DS4_MARKER_INVOKE:
    case DS4_MARKER_CLOSE_WRAPPER:
        end_call(s); /* the tag itself is the block's business */
        break;
    case DS4_MARKER_TURN:
        ds4_state_end_turn(s);
        break;
    default:
        s->call.fresh = false;
        ds4_state_consume(s, s->pos + m.len);
        break;
    }
    return DS4_STEP_AGAIN;
}

/* ---- block ---------------------------------------------------------------------------------- */

void ds4_dsml_start_block(struct ds4_stream *s)
{
    ds4_state_count(s, s->wrapper.exact ? DS4_RULE_BLOCK_EXACT : DS4_RULE_BLOCK_NEAR);
    ds4_channel_start_call(s);
    ds4_buf_clear(&s->junk);
    s->state = DS4_STATE_BLOCK;
}

/* Text between invokes waits: another invoke or the closer drops it.  Too much of it means that the
 * block was left long ago. */
static void keep_junk(struct ds4_stream *s, size_t to)
{
    size_t room = s->hold_max_bytes - s->junk.len;

    if (to - s->pos > room) {
        to = s->pos + room;
        s->state = DS4_STATE_TEXT;
    }
    if (ds4_buf_append_str(&s->junk, ds4_state_view(s, s->pos, to)) != 0)
        s->failed = true;
    ds4_state_consume(s, to);
    if (s->state == DS4_STATE_TEXT) {
        ds4_channel_text(s, ds4_buf_view(&s->junk));
        ds4_buf_clear(&s->junk);
    }
}

enum ds4_step ds4_dsml_block(struct ds4_stream *s)
{
    const char *from = ds4_state_at(s, s->pos), *lt;
    size_t n = ds4_state_end(s) - s->pos;
    enum ds4_marker_status got;
    struct ds4_marker m;

    if (n == 0)
        return DS4_STEP_WAIT;
    lt = memchr(from, '<', n);
    if (lt == NULL || lt > from) {
        keep_junk(s, lt == NULL ? ds4_state_end(s) : s->pos + (size_t)(lt - from));
        return DS4_STEP_AGAIN;
    }
    got = ds4_state_marker(s, s->pos, &m);
    if (got == DS4_MARKER_PARTIAL)
        return DS4_STEP_WAIT;
    if (got == DS4_MARKER_NONE) {
        keep_junk(s, s->pos + 1);
        return DS4_STEP_AGAIN;
    }
    switch (m.kind) {
    case DS4_MARKER_INVOKE:
        ds4_buf_clear(&s->junk);
        start_call(s, &m);
        ds4_state_consume(s, s->pos + m.len);
        break;
    case DS4_MARKER_CLOSE_WRAPPER:
        ds4_buf_clear(&s->junk);
        ds4_state_consume(s, s->pos + m.len);
        s->state = DS4_STATE_TEXT;
        break;
    case DS4_MARKER_CLOSE_INVOKE:
    case DS4_MARKER_CLOSE_PARAMETER:
        ds4_state_count(s, DS4_RULE_STRAY_CLOSER);
        ds4_state_consume(s, s->pos + m.len);
        break;
    case DS4_MARKER_THINK_OPEN:
    case DS4_MARKER_THINK_CLOSE:
        ds4_state_consume(s, s->pos + m.len);
        break;
    case DS4_MARKER_TURN:
        ds4_state_end_turn(s);
        break;
    case DS4_MARKER_PARAMETER:
    case DS4_MARKER_WRAPPER:
        keep_junk(s, s->pos + m.len);
        break;
    }
    return DS4_STEP_AGAIN;
}

/* ---- end of stream -------------------------------------------------------------------------- */

static bool lacks_arguments(const struct ds4_stream *s)
{
    return s->call.mode == DS4_CALL_STREAM && s->call.n_written == 0 && s->call.tool != NULL &&
           s->call.tool->n_required > 0;
}

static void end_block(struct ds4_stream *s)
{
    if (!s->cut_short) {
        if (ds4_buf_append_str(&s->junk, ds4_state_view(s, s->pos, ds4_state_end(s))) != 0)
            s->failed = true;
        if (ds4_str_trim(ds4_buf_view(&s->junk)).len > 0)
            ds4_channel_text(s, ds4_buf_view(&s->junk));
    }
    ds4_buf_clear(&s->junk);
}

void ds4_dsml_end(struct ds4_stream *s)
{
    struct ds4_str body;

    if (s->state == DS4_STATE_JSON && !s->cut_short) {
        body = ds4_str_trim(ds4_state_view(s, s->param.begin, ds4_state_end(s)));
        ds4_dsml_take_json(s, body);
        if (s->call.mode == DS4_CALL_DONE || s->call.has_json)
            s->state = DS4_STATE_CALL;
    }
    if (s->state == DS4_STATE_BLOCK)
        end_block(s);
    else if (s->state == DS4_STATE_CALL && !s->cut_short && !lacks_arguments(s))
        end_call(s);
    else
        ds4_dsml_cut_call(s);
    s->state = DS4_STATE_ENDED;
}

/* Step 14: parameters and their values, in a strict call and in a recovery candidate alike.
 *
 * A value is everything up to the first tag that can end one; any other tag in it is data.  The scan
 * never looks at a byte twice, except for the tag it waits on.  Only a string="true" value of a
 * strict call is sent while it is read; what may still turn out to be syntax is kept back: the
 * beginning of a tag and one newline before it. */
#include "common/json_write.h"
#include "router/parse/state.h"

static bool plain_ends(const struct ds4_stream *s, const struct ds4_param *p)
{
    return p->plain || (s->holder == DS4_HOLDER_CANDIDATE && s->candidate.opener_plain);
}

static const struct ds4_tool *tool_of(const struct ds4_stream *s)
{
    return s->holder == DS4_HOLDER_CANDIDATE ? s->candidate.tool : s->call.tool;
}

/* Where the reading goes on when the value is over. */
static enum ds4_parse_state state_around(const struct ds4_stream *s)
{
    return s->holder == DS4_HOLDER_CANDIDATE ? DS4_STATE_CANDIDATE : DS4_STATE_CALL;
}

static enum ds4_arg_form form_of(enum ds4_string_attr string)
{
    switch (string) {
    case DS4_STRING_TRUE:
        return DS4_ARG_STRING;
    case DS4_STRING_FALSE:
        return DS4_ARG_JSON;
    case DS4_STRING_UNSET:
        break;
    }
    return DS4_ARG_UNTYPED;
}

static void read_param(struct ds4_stream *s, struct ds4_param *p, const struct ds4_marker *m,
                       size_t begin)
{
    struct ds4_marker_attrs attrs = ds4_marker_read_attrs(m->attrs);

    ds4_buf_clear(&p->name);
    if (ds4_buf_append_str(&p->name, attrs.name) != 0)
        s->failed = true;
    p->form = form_of(attrs.string);
    p->plain = m->plain;
    p->nameless = !attrs.has_name;
    p->bare = p->streamed = p->opened = false;
    p->begin = begin;
}

void ds4_value_start(struct ds4_stream *s, const struct ds4_marker *m, size_t begin)
{
    read_param(s, &s->param, m, begin);
    s->scan = begin;
    s->state = DS4_STATE_VALUE;
}

void ds4_value_start_bare(struct ds4_stream *s, struct ds4_str name, enum ds4_string_attr string)
{
    struct ds4_param *p = &s->param;

    ds4_buf_clear(&p->name);
    if (ds4_buf_append_str(&p->name, name) != 0)
        s->failed = true;
    p->form = form_of(string);
    p->plain = s->candidate.opener_plain;
    p->bare = true;
    p->nameless = p->streamed = p->opened = false;
    p->begin = s->scan;
    s->state = DS4_STATE_VALUE;
}

/* Looks for the end of the value from scan on.  FULL: *m ends it and stands at *at.  PARTIAL: the text
 * from *at on may.  NONE: no end in sight, *at is the end of the text. */
static enum ds4_marker_status find_end(struct ds4_stream *s, bool plain, struct ds4_marker *m,
                                       size_t *at)
{
    size_t end = ds4_state_end(s);

    while (s->scan < end) {
        const char *from = ds4_state_at(s, s->scan), *lt = memchr(from, '<', end - s->scan);
        enum ds4_marker_status got;

        if (lt == NULL) {
            s->scan = end;
            break;
        }
        s->scan += (size_t)(lt - from);
        got = ds4_state_marker(s, s->scan, m);
        *at = s->scan;
        if (got == DS4_MARKER_FULL && ds4_marker_ends_value(m, plain))
            return got;
        if (got == DS4_MARKER_PARTIAL)
            return got;
        s->scan++;
    }
    *at = end;
    return DS4_MARKER_NONE;
}

static void open_string(struct ds4_stream *s)
{
    if (s->param.opened)
        return;
    s->param.opened = true;
    ds4_args_write_key(&s->text, s->call.n_written == 0, ds4_buf_view(&s->param.name));
    (void)ds4_buf_append_byte(&s->text, '"');
}

static void send_text(struct ds4_stream *s)
{
    if (s->text.failed)
        s->failed = true;
    ds4_events_push_text(s->out, DS4_EVENT_CALL_ARGS, s->call.index, ds4_buf_view(&s->text));
    ds4_buf_clear(&s->text);
}

/* Sends the value up to `to`. */
static void stream_value(struct ds4_stream *s, size_t to)
{
    if (to <= s->param.begin)
        return;
    ds4_buf_clear(&s->text);
    open_string(s);
    (void)ds4_jw_append_escaped(&s->text, ds4_state_view(s, s->param.begin, to));
    send_text(s);
    s->pos = s->param.begin = to;
}

static void finish_streamed(struct ds4_stream *s, size_t to)
{
    stream_value(s, to);
    ds4_buf_clear(&s->text);
    open_string(s);
    (void)ds4_buf_append_byte(&s->text, '"');
    send_text(s);
    s->call.n_written++;
}

static void take_value(struct ds4_stream *s, struct ds4_str text, enum ds4_arg_form form)
{
    struct ds4_param *p = &s->param;

    s->state = state_around(s);
    if (s->holder == DS4_HOLDER_CALL) {
        if (!p->nameless)
            ds4_dsml_take_param(s, text, form);
        return;
    }
    s->candidate.saw_value = true;
    if (p->bare)
        text = ds4_str_trim(text);
    if (!ds4_args_add(&s->args, ds4_buf_view(&p->name), text, form))
        ds4_state_count(s, DS4_RULE_DUP_PARAM);
}

/* The object parameter is complete (or another tag ended it). */
static void close_nested(struct ds4_stream *s)
{
    ds4_buf_clear(&s->object);
    ds4_args_write(&s->object, &s->members, NULL);
    if (s->object.failed || s->members.failed)
        s->failed = true;
    take_value(s, ds4_buf_view(&s->object), DS4_ARG_READY);
}

static void end_value(struct ds4_stream *s, const struct ds4_marker *m, size_t at)
{
    struct ds4_param *p = s->state == DS4_STATE_NESTED_VALUE ? &s->member : &s->param;
    size_t to = at, next = at;
    struct ds4_str text;

    if (m->kind == DS4_MARKER_CLOSE_PARAMETER)
        next = at + m->len;
    else if (to > p->begin && *ds4_state_at(s, to - 1) == '\n')
        to--;
    text = ds4_state_view(s, p->begin, to);
    if (p == &s->member) {
        if (!p->nameless && !ds4_args_add(&s->members, ds4_buf_view(&p->name), text,
                                          p->form == DS4_ARG_UNTYPED ? DS4_ARG_STRING : p->form))
            ds4_state_count(s, DS4_RULE_DUP_PARAM);
        s->state = DS4_STATE_NESTED;
    } else if (p->streamed) {
        finish_streamed(s, to);
        s->state = DS4_STATE_CALL;
    } else {
        take_value(s, text, p->form);
    }
    s->scan = next;
    if (s->holder == DS4_HOLDER_CALL)
        s->pos = next;
}

/* A DSML parameter that says nothing of strings and holds a parameter first is an object. */
static bool starts_nested(const struct ds4_stream *s, const struct ds4_marker *m, size_t at)
{
    const struct ds4_param *p = &s->param;
    const struct ds4_property *prop;

    if (s->state != DS4_STATE_VALUE || m->kind != DS4_MARKER_PARAMETER || m->plain || p->plain ||
        p->bare || p->form != DS4_ARG_UNTYPED)
        return false;
    if (s->holder == DS4_HOLDER_CANDIDATE && s->candidate.tool == NULL)
        return false;
    prop = ds4_tool_find(tool_of(s), ds4_buf_view(&p->name));
    return (prop == NULL || prop->types != DS4_TYPE_STRING) &&
           ds4_str_trim(ds4_state_view(s, p->begin, at)).len == 0;
}

/* More than the hold allows was undecided with the text up to `upto` known.  A candidate is text then;
 * an argument beyond all reason cuts its call and ends the message. */
static bool too_long(struct ds4_stream *s, size_t upto)
{
    if (s->holder == DS4_HOLDER_CANDIDATE) {
        if (upto - s->candidate.begin <= s->hold_max_bytes)
            return false;
        ds4_repair_release(s, DS4_RULE_REJECTED_UNCLOSED);
        return true;
    }
    if (upto - s->pos + s->members.bytes.len <= s->hold_max_bytes)
        return false;
    ds4_dsml_cut_call(s);
    return true;
}

/* The same when the tag at `at` has just become complete: before its last byte it was undecided. */
static bool too_long_at(struct ds4_stream *s, const struct ds4_marker *m, size_t at)
{
    return too_long(s, at + m->len - 1);
}

static enum ds4_step wait_or_give_up(struct ds4_stream *s)
{
    return too_long(s, ds4_state_end(s)) ? DS4_STEP_AGAIN : DS4_STEP_WAIT;
}

enum ds4_step ds4_value_read(struct ds4_stream *s)
{
    struct ds4_param *p = s->state == DS4_STATE_NESTED_VALUE ? &s->member : &s->param;
    struct ds4_marker m;
    size_t at;

    if (find_end(s, plain_ends(s, p), &m, &at) == DS4_MARKER_FULL) {
        if (!p->streamed && too_long_at(s, &m, at))
            return DS4_STEP_AGAIN;
        if (starts_nested(s, &m, at)) {
            ds4_args_clear(&s->members);
            s->state = DS4_STATE_NESTED;
            s->scan = at;
        } else {
            end_value(s, &m, at);
        }
        return DS4_STEP_AGAIN;
    }
    if (p->streamed) {
        if (at > p->begin && *ds4_state_at(s, at - 1) == '\n')
            at--;
        stream_value(s, at);
        return DS4_STEP_WAIT;
    }
    return wait_or_give_up(s);
}

enum ds4_step ds4_value_nested(struct ds4_stream *s)
{
    enum ds4_marker_status got = DS4_MARKER_NONE;
    struct ds4_marker m;

    if (!ds4_state_skip_blanks(s))
        return wait_or_give_up(s);
    if (*ds4_state_at(s, s->scan) == '<')
        got = ds4_state_marker(s, s->scan, &m);
    if (got == DS4_MARKER_PARTIAL)
        return wait_or_give_up(s);
    if (got == DS4_MARKER_FULL && too_long_at(s, &m, s->scan))
        return DS4_STEP_AGAIN;
    if (got == DS4_MARKER_FULL && m.kind == DS4_MARKER_PARAMETER) {
        size_t begin = s->scan + m.len;
        read_param(s, &s->member, &m, begin);
        s->scan = begin;
        s->state = DS4_STATE_NESTED_VALUE;
    } else if (got == DS4_MARKER_FULL && (ds4_marker_ends_value(&m, plain_ends(s, &s->param)) ||
                                          (m.kind == DS4_MARKER_CLOSE_WRAPPER && !m.plain))) {
        close_nested(s);
        if (m.kind == DS4_MARKER_CLOSE_PARAMETER)
            s->scan += m.len;
        if (s->holder == DS4_HOLDER_CALL)
            s->pos = s->scan;
    } else if (s->holder == DS4_HOLDER_CANDIDATE) {
        close_nested(s); /* prose: the candidate sees it next and is released */
    } else {
        s->scan++;
    }
    return DS4_STEP_AGAIN;
}

enum ds4_step ds4_value_json(struct ds4_stream *s)
{
    struct ds4_marker m;
    struct ds4_str text;
    size_t at;

    if (find_end(s, true, &m, &at) != DS4_MARKER_FULL)
        return wait_or_give_up(s);
    if (too_long_at(s, &m, at))
        return DS4_STEP_AGAIN;
    text = ds4_str_trim(ds4_state_view(s, s->param.begin, at));
    if (s->holder == DS4_HOLDER_CALL) {
        s->state = DS4_STATE_CALL;
        ds4_dsml_take_json(s, text);
        s->pos = at;
        return DS4_STEP_AGAIN;
    }
    ds4_args_clear(&s->args);
    if (!ds4_args_object_keys(text, &s->args)) {
        ds4_repair_release(s, DS4_RULE_REJECTED_PROSE);
        return DS4_STEP_AGAIN;
    }
    s->state = DS4_STATE_CANDIDATE;
    s->candidate.has_json = s->candidate.saw_value = true;
    s->candidate.json_at = s->base + (size_t)(text.ptr - s->in.ptr);
    s->candidate.json_len = text.len;
    return DS4_STEP_AGAIN;
}

/* Step 14: text that needs no machine, read where it lies.
 *
 * Nearly every token is plain text of a channel, or of an argument that streams, and holds nothing that
 * could be markup.  Such text goes from the caller's view to the events in one step: its bytes are
 * looked at once, for their classes, and copied once.  A '<' that no marker goes on from is plain as well;
 * the beginning of a marker waits in the buffer, and the byte behind it refutes most of them.  Invariant:
 * what is done here is exactly what the machine would do; whatever is not clear at a glance is left to it. */
#include "common/json_write.h"
#include "router/parse/state.h"
#include "router/text/byte_class.h"
#include "router/text/vocab.h"

#define MAX_HELD_BYTES  3 /* a newline, and "</" */
#define MAX_QUICK_BYTES 32

/* Text of the current channel; `classes` are its own: those of what stands behind it would make blanks
 * visible. */
static void put_text(struct ds4_stream *s, struct ds4_str text, unsigned classes)
{
    struct ds4_channel *ch = &s->channels[s->channel];
    bool reasoning = s->channel == DS4_CHANNEL_REASONING;

    if ((classes & DS4_BYTE_NEWLINE) != 0 || ch->line_ticks >= 0 || ch->hold.len > 0 || ch->blank ||
        (!reasoning && s->stop.n_strings > 0)) {
        ds4_channel_text(s, text);
        return;
    }
    if ((classes & DS4_BYTE_VISIBLE) != 0)
        s->last = DS4_LAST_OTHER;
    ch->empty = false;
    ch->last = text.ptr[text.len - 1];
    if ((classes & (DS4_BYTE_LT | DS4_BYTE_D)) != 0 || ch->pseudo_left != NULL)
        ds4_channel_suspect(s, ch, text);
    ds4_events_push_text(s->out, reasoning ? DS4_EVENT_REASONING : DS4_EVENT_CONTENT, 0, text);
}

/* More of a string that streams. */
static void put_string(struct ds4_stream *s, struct ds4_str text, unsigned classes)
{
    if ((classes & DS4_BYTE_ESCAPED) != 0) {
        ds4_buf_clear(&s->text);
        (void)ds4_jw_append_escaped(&s->text, text);
        if (s->text.failed)
            s->failed = true;
        text = ds4_buf_view(&s->text);
    }
    ds4_events_push_text(s->out, DS4_EVENT_CALL_ARGS, s->call.index, text);
}

/* What waits is out, and n bytes of the caller's text as well. */
static void move_on(struct ds4_stream *s, size_t n)
{
    s->base = ds4_state_end(s) + n;
    ds4_buf_clear(&s->in);
    ds4_state_consume(s, s->base);
    s->param.begin = s->base;
}

/* What waits ahead of `text` - the beginning of a tag, in a string a newline before it - is no syntax. */
static bool held_is_plain(const struct ds4_stream *s, struct ds4_str held, struct ds4_str text,
                          bool string)
{
    if (string && held.ptr[0] == '\n')
        held = ds4_str_skip(held, 1);
    if (held.len == 0)
        return text.ptr[0] != '<';
    if (held.len == 1 && text.ptr[0] == '/')
        text = ds4_str_skip(text, 1);
    else if (held.len != 1 && (held.len != 2 || held.ptr[1] != '/'))
        return false;
    return text.len > 0 && ds4_marker_refuted(text, &s->rules);
}

/* The first '<' of the text that the machine must look at; its length if there is none.  *waits: nothing
 * can be said before more text comes. */
static size_t find_markup(const struct ds4_stream *s, struct ds4_str text, bool string, bool *waits)
{
    size_t at = 0;

    while (at < text.len) {
        const char *lt = memchr(text.ptr + at, '<', text.len - at);
        enum ds4_marker_status got;
        struct ds4_marker m;

        if (lt == NULL)
            return text.len;
        at = (size_t)(lt - text.ptr);
        got = ds4_marker_scan(ds4_str_skip(text, at), &s->rules, &m);
        *waits = got == DS4_MARKER_PARTIAL;
        if (*waits ||
            (got == DS4_MARKER_FULL && (!string || ds4_marker_ends_value(&m, s->param.plain))))
            return at;
        at++;
    }
    return at;
}

struct ds4_str ds4_direct_read(struct ds4_stream *s, struct ds4_str text)
{
    bool string = s->state == DS4_STATE_VALUE && s->param.streamed && s->param.opened,
         waits = false;
    struct ds4_str held = ds4_state_view(s, s->pos, ds4_state_end(s));
    unsigned classes;
    size_t n, out;

    if (!string && s->state != DS4_STATE_TEXT)
        return text;
    if (held.len > 0) {
        if (held.len > MAX_HELD_BYTES || !held_is_plain(s, held, text, string))
            return text;
        if (string)
            put_string(s, held, DS4_BYTE_ESCAPED);
        else
            put_text(s, held, DS4_BYTE_LT | DS4_BYTE_VISIBLE);
    }
    classes = ds4_byte_classes(text);
    n = (classes & DS4_BYTE_LT) == 0 ? text.len : find_markup(s, text, string, &waits);
    out = string && n > 0 && text.ptr[n - 1] == '\n' ? n - 1 : n;
    move_on(s, out);
    if (out < text.len)
        classes = ds4_byte_classes(ds4_str_head(text, out));
    if (out > 0 && string)
        put_string(s, ds4_str_head(text, out), classes);
    else if (out > 0)
        put_text(s, ds4_str_head(text, out), classes);
    text = ds4_str_skip(text, out);
    if (s->state == DS4_STATE_ENDED || text.len == 0)
        return (struct ds4_str){"", 0};
    if (!waits && n < text.len + out)
        return text;
    if (ds4_buf_append_str(&s->in, text) != 0)
        s->failed = true;
    s->scan = s->base + (n - out);
    return (struct ds4_str){"", 0};
}

/* ---- quick ---------------------------------------------------------------------------------- */

/* Neither a marker nor a pseudo tag goes on with `rest` behind '<' or '</'. */
static inline bool is_no_tag(const struct ds4_stream *s, struct ds4_str rest)
{
    return ds4_marker_refuted(rest, &s->rules) && ds4_pseudo_refuted(rest);
}

/* What may go out of a text with a '<': all of it, or all but a '<' or '</' at its end.  False: it must be
 * looked at closely. */
static inline bool quick_len(const struct ds4_stream *s, struct ds4_str text, size_t *n)
{
    for (size_t i = 0; i < text.len; i++) {
        size_t next = i + 1;

        if (text.ptr[i] != '<')
            continue;
        if (next < text.len && text.ptr[next] == '/')
            next++;
        if (next == text.len) {
            *n = i;
            return true;
        }
        if (!is_no_tag(s, ds4_str_skip(text, next)))
            return false;
    }
    *n = text.len;
    return true;
}

/* A value that is needed whole grows by text without any '<'. */
static bool hoard(struct ds4_stream *s, struct ds4_str text, unsigned classes)
{
    if ((classes & DS4_BYTE_LT) != 0 || text.len > s->quiet_room)
        return false;
    s->quiet_room -= text.len;
    s->scan += text.len;
    if (ds4_buf_append_few(&s->in, text) != 0)
        s->failed = true;
    return !s->failed;
}

/* The text, `held` bytes of a tag's beginning before it, n bytes of it; the rest waits. */
static inline __attribute__((always_inline)) void put_quick(struct ds4_stream *s,
                                                            struct ds4_str text, size_t held,
                                                            size_t n, bool slack,
                                                            struct ds4_events *out)
{
    bool string = s->quiet == DS4_QUIET_STRING;
    char *dst = ds4_events_extend(out, s->quiet_kind, string ? s->call.index : 0, held + n);

    if (dst == NULL)
        return;
    if (held > 0)
        dst[0] = '<';
    if (held > 1)
        dst[1] = '/';
    if (slack && n <= DS4_TOKEN_SLACK_BYTES &&
        out->text.cap - out->text.len > DS4_TOKEN_SLACK_BYTES)
        memcpy(dst, text.ptr,
               DS4_TOKEN_SLACK_BYTES); /* one move for any length; the end is overwritten */
    else
        ds4_buf_copy_few(dst + held, text.ptr, n);
    out->text.ptr[out->text.len] = '\0';
    s->base = s->pos = s->scan = s->param.begin = s->base + held + n;
    if (!string)
        s->channels[s->channel].last = n > 0 ? text.ptr[n - 1] : dst[held - 1];
}

/* The escape of a byte as JSON has it; NUL for the bytes that need their number. */
static char escape_letter(char c)
{
    switch (c) {
    case '"':
    case '\\':
        return c;
    case '\n':
        return 'n';
    case '\t':
        return 't';
    case '\r':
        return 'r';
    default:
        return '\0';
    }
}

/* A string grows by bytes that JSON escapes, or a newline waits: the last one is kept back. */
static __attribute__((noinline)) bool quick_escaped(struct ds4_stream *s, struct ds4_str text,
                                                    struct ds4_events *out)
{
    size_t held = s->in.len, n = text.len, len = 0;
    char escaped[2 * (MAX_QUICK_BYTES + 1)];

    if (n > MAX_QUICK_BYTES)
        return false;
    if (text.ptr[n - 1] == '\n')
        n--;
    if (held > 0) {
        escaped[len++] = '\\';
        escaped[len++] = 'n';
    }
    for (size_t i = 0; i < n; i++) {
        char c = text.ptr[i];
        if ((ds4_byte_class[(unsigned char)c] & DS4_BYTE_ESCAPED) != 0) {
            c = escape_letter(c);
            if (c == '\0')
                return false;
            escaped[len++] = '\\';
        }
        escaped[len++] = c;
    }
    ds4_events_push_text(out, DS4_EVENT_CALL_ARGS, s->call.index, (struct ds4_str){escaped, len});
    s->base = s->pos = s->param.begin = s->base + held + n;
    ds4_buf_clear(&s->in);
    if (n < text.len && ds4_buf_append_byte(&s->in, '\n') != 0)
        s->failed = true;
    s->scan = s->base + s->in.len;
    return true;
}

/* A '<' waits or comes. */
static __attribute__((noinline)) bool quick_lt(struct ds4_stream *s, struct ds4_str text,
                                               struct ds4_events *out)
{
    struct ds4_channel *ch = &s->channels[s->channel];
    size_t held = s->in.len, n = text.len;

    if (held > 0 && s->in.ptr[0] == '\n')
        return false;
    if (held > 0) {
        struct ds4_str rest = ds4_str_skip(text, held == 1 && text.ptr[0] == '/');
        if (rest.len == 0 || !is_no_tag(s, rest))
            return false;
    }
    if (!quick_len(s, text, &n))
        return false;
    if (held + n > 0)
        put_quick(s, text, held, n, false, out);
    ds4_buf_clear(&s->in);
    if (n < text.len && ds4_buf_append_few(&s->in, ds4_str_skip(text, n)) != 0)
        s->failed = true;
    if (s->quiet == DS4_QUIET_TEXT && held + n > 0)
        ch->pseudo_left = ch->last == '<' ? ds4_pseudo_after_lt : NULL;
    if (held > 0 || (ds4_byte_classes(ds4_str_head(text, n)) & DS4_BYTE_VISIBLE) != 0)
        s->last = DS4_LAST_OTHER;
    return true;
}

/* A line of a channel ends, or a newline waits before its next one: it waits for text that follows. */
static __attribute__((noinline)) bool quick_line(struct ds4_stream *s, struct ds4_str text,
                                                 unsigned classes, struct ds4_events *out)
{
    struct ds4_channel *ch = &s->channels[s->channel];
    size_t held = ch->hold.len, n = text.len;
    char *dst;

    if (text.ptr[n - 1] == '\n')
        n--;
    if (memchr(text.ptr, '\n', n) != NULL)
        return false;
    /* Blanks and backticks at the start of a line may begin a fence. */
    if (held > 0 && ((classes & DS4_BYTE_VISIBLE) == 0 || memchr(text.ptr, '`', n) != NULL))
        return false;
    if (n > 0) {
        dst = ds4_events_extend(out, s->quiet_kind, 0, held + n);
        if (dst == NULL)
            return true;
        if (held > 0)
            dst[0] = '\n';
        ds4_buf_copy_few(dst + held, text.ptr, n);
        ch->last = text.ptr[n - 1];
    }
    ds4_buf_clear(&ch->hold);
    if (n < text.len && ds4_buf_append_byte(&ch->hold, '\n') != 0)
        s->failed = true;
    s->base = s->pos = s->scan = s->param.begin = s->base + text.len;
    if ((classes & DS4_BYTE_VISIBLE) != 0)
        s->last = DS4_LAST_OTHER;
    return true;
}

bool ds4_direct_quick(struct ds4_stream *s, struct ds4_str text, unsigned classes, bool slack,
                      struct ds4_events *out)
{
    const struct ds4_channel *ch = &s->channels[s->channel];
    bool string = s->quiet == DS4_QUIET_STRING;

    if (s->quiet == DS4_QUIET_HOARD)
        return hoard(s, text, classes);
    if ((classes & s->loud) != 0)
        return false;
    if (s->in.len == 0 && (string || ch->hold.len == 0) &&
        (classes & (DS4_BYTE_LT | s->escaped)) == 0) {
        put_quick(s, text, 0, text.len, slack, out);
        if ((classes & DS4_BYTE_VISIBLE) != 0)
            s->last = DS4_LAST_OTHER;
        return true;
    }
    if (string && (classes & DS4_BYTE_LT) == 0 && (s->in.len == 0 || s->in.ptr[0] == '\n'))
        return quick_escaped(s, text, out);
    if (!string && (classes & DS4_BYTE_LT) == 0 && s->in.len == 0)
        return quick_line(s, text, classes, out);
    return (classes & s->escaped) == 0 && (string || ch->hold.len == 0) && quick_lt(s, text, out);
}

/* Text that waits is '<', '</' or nothing. */
static bool holds_lt(const struct ds4_stream *s)
{
    const char *in = s->in.ptr;

    return s->in.len == 0 || (s->pos == s->base && in[0] == '<' &&
                              (s->in.len == 1 || (s->in.len == 2 && in[1] == '/')));
}

/* Or, in a string, one newline. */
static bool holds_newline(const struct ds4_stream *s)
{
    return s->pos == s->base && s->in.len == 1 && s->in.ptr[0] == '\n';
}

/* A channel holds one newline and nothing else waits. */
static bool waits_for_line(const struct ds4_stream *s, const struct ds4_channel *ch)
{
    return s->in.len == 0 && ch->hold.len == 1 && ch->hold.ptr[0] == '\n';
}

/* How much a value that is not sent yet may still grow; 0 if it has a tag at its end. */
static size_t room_of_hoard(const struct ds4_stream *s)
{
    size_t have = s->holder == DS4_HOLDER_CANDIDATE
                      ? ds4_state_end(s) - s->candidate.begin
                      : ds4_state_end(s) - s->pos + s->members.bytes.len;

    return s->scan != ds4_state_end(s) || have >= s->hold_max_bytes ? 0 : s->hold_max_bytes - have;
}

void ds4_direct_settle(struct ds4_stream *s)
{
    const struct ds4_channel *ch = &s->channels[s->channel];
    bool reasoning = s->channel == DS4_CHANNEL_REASONING;

    s->quiet = DS4_QUIET_NOT;
    if (s->config->raw || s->config->machine_only || s->failed)
        return;
    if (s->state == DS4_STATE_TEXT && holds_lt(s) && !ch->empty && !ch->blank &&
        ch->line_ticks < 0 && (ch->hold.len == 0 || waits_for_line(s, ch)) &&
        (ch->pseudo_left == NULL || s->in.len > 0) && (reasoning || s->stop.n_strings == 0)) {
        s->quiet = DS4_QUIET_TEXT;
        s->loud = DS4_BYTE_D;
        s->escaped = DS4_BYTE_NEWLINE;
        s->quiet_kind = reasoning ? DS4_EVENT_REASONING : DS4_EVENT_CONTENT;
    } else if (s->state == DS4_STATE_VALUE && s->param.streamed) {
        if (s->param.opened && (holds_lt(s) || holds_newline(s))) {
            s->quiet = DS4_QUIET_STRING;
            s->loud = 0;
            s->escaped = DS4_BYTE_ESCAPED;
            s->quiet_kind = DS4_EVENT_CALL_ARGS;
        }
    } else if (s->state == DS4_STATE_VALUE || s->state == DS4_STATE_NESTED_VALUE ||
               s->state == DS4_STATE_JSON) {
        s->quiet_room = room_of_hoard(s);
        if (s->quiet_room > 0)
            s->quiet = DS4_QUIET_HOARD;
    }
}

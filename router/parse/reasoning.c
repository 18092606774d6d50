/* Step 14: the two text channels, reasoning and content.
 *
 * Which blanks are text is known only later: newlines before a call are syntax, newlines before more
 * text are text.  So each channel holds its trailing newlines (content also holds all blanks while it
 * has nothing else, at its start and after a call) and lets them go with the next other character.
 * Content then passes the stop strings.  Whatever is emitted updates what the gates ask about: the
 * last byte and the open code fence. */
#include "router/parse/state.h"

#define FENCE_TICKS 3

void ds4_channel_init(struct ds4_stream *s)
{
    for (size_t c = 0; c < DS4_N_CHANNELS; c++) {
        s->channels[c] = (struct ds4_channel){.empty = true};
        ds4_buf_init(&s->channels[c].hold, SIZE_MAX / 2);
    }
    s->channels[DS4_CHANNEL_CONTENT].blank = true;
    ds4_buf_init(&s->stop_held, SIZE_MAX / 2);
}

void ds4_channel_deinit(struct ds4_stream *s)
{
    for (size_t c = 0; c < DS4_N_CHANNELS; c++)
        ds4_buf_deinit(&s->channels[c].hold);
    ds4_buf_deinit(&s->stop_held);
}

/* One byte at the start of a line, behind blanks and backticks at most. */
static void track_line_start(struct ds4_channel *ch, char c)
{
    if (c == '\n') {
        ch->line_ticks = 0;
    } else if (c != '`') {
        if (ch->line_ticks > 0 || !ds4_state_is_blank(c))
            ch->line_ticks = -1;
    } else if (++ch->line_ticks == FENCE_TICKS) {
        ch->fence_open = !ch->fence_open;
        ch->line_ticks = -1;
    }
}

/* Lines that begin with three backticks after blanks open and close a fence in turn. */
static void track_lines(struct ds4_channel *ch, struct ds4_str text)
{
    while (text.len > 0) {
        const char *newline;

        if (ch->line_ticks >= 0) {
            track_line_start(ch, text.ptr[0]);
            text = ds4_str_skip(text, 1);
            continue;
        }
        newline = memchr(text.ptr, '\n', text.len);
        if (newline == NULL)
            return;
        text = ds4_str_skip(text, (size_t)(newline - text.ptr) + 1);
        ch->line_ticks = 0;
    }
}

/* Text that looks like a call although tools were declared is counted when no call is made: DSML, <bash,
 * `<call ` and <thinking>.  `left` is what the text so far still lacks of such a tag (NULL: it ends with
 * the beginning of none); '<' and 'D' occur in them only at the start, and no two begin with the same
 * letter, so one byte decides. */
static const struct ds4_str pseudo_tags[] = {{"bash", 4}, {"call ", 5}, {"thinking>", 9}};
#define N_PSEUDO_TAGS (sizeof(pseudo_tags) / sizeof(pseudo_tags[0]))
const char ds4_pseudo_after_lt[] = "";

bool ds4_pseudo_refuted(struct ds4_str rest)
{
    for (size_t i = 0; i < N_PSEUDO_TAGS; i++)
        if (rest.ptr[0] == pseudo_tags[i].ptr[0] &&
            (ds4_str_starts(rest, pseudo_tags[i]) || ds4_str_starts(pseudo_tags[i], rest)))
            return false;
    return true;
}

static const char *pseudo_step(const char *left, char c)
{
    if (c == '<')
        return ds4_pseudo_after_lt;
    if (c == 'D')
        return "SML";
    if (left == NULL)
        return NULL;
    if (left == ds4_pseudo_after_lt) {
        for (size_t i = 0; i < N_PSEUDO_TAGS; i++)
            if (c == pseudo_tags[i].ptr[0])
                return pseudo_tags[i].ptr + 1;
        return NULL;
    }
    return *left == c ? left + 1 : NULL;
}

void ds4_channel_suspect(struct ds4_stream *s, struct ds4_channel *ch, struct ds4_str text)
{
    const char *left = ch->pseudo_left;

    if (!s->rules.dsml || s->pseudo_tag)
        return;
    for (size_t i = 0; i < text.len; i++) {
        left = pseudo_step(left, text.ptr[i]);
        if (left != NULL && left != ds4_pseudo_after_lt && *left == '\0') {
            s->pseudo_tag = true;
            left = NULL;
            break;
        }
    }
    ch->pseudo_left = left;
}

static void send(struct ds4_stream *s, enum ds4_channel_kind kind, struct ds4_str text)
{
    ds4_channel_suspect(s, &s->channels[kind], text);
    ds4_events_push_text(
        s->out, kind == DS4_CHANNEL_REASONING ? DS4_EVENT_REASONING : DS4_EVENT_CONTENT, 0, text);
}

/* Content on its way out: what may be the beginning of a stop string waits in stop_held. */
static void pass_stops(struct ds4_stream *s, struct ds4_str text)
{
    struct ds4_stop_result r = ds4_stop_feed(&s->stop, text);
    size_t have = s->stop_held.len + r.used, out = have - r.held;

    if (out >= s->stop_held.len) {
        send(s, DS4_CHANNEL_CONTENT, ds4_buf_view(&s->stop_held));
        out -= s->stop_held.len;
        ds4_buf_clear(&s->stop_held);
        send(s, DS4_CHANNEL_CONTENT, ds4_str_head(text, out));
        if (ds4_buf_append(&s->stop_held, text.ptr + out, r.used - out) != 0)
            s->failed = true;
    } else {
        send(s, DS4_CHANNEL_CONTENT, ds4_str_head(ds4_buf_view(&s->stop_held), out));
        ds4_buf_consume(&s->stop_held, out);
        if (ds4_buf_append_str(&s->stop_held, text) != 0)
            s->failed = true;
    }
    if (!r.hit)
        return;
    if (s->config->keep_stop)
        send(s, DS4_CHANNEL_CONTENT, ds4_buf_view(&s->stop_held));
    ds4_buf_clear(&s->stop_held);
    ds4_stop_reset(&s->stop);
    s->stop_hit = true;
    s->stop_text = r.text;
}

/* No stop string spans a call or a think tag: what was held is text. */
static void release_stop_held(struct ds4_stream *s)
{
    send(s, DS4_CHANNEL_CONTENT, ds4_buf_view(&s->stop_held));
    ds4_buf_clear(&s->stop_held);
    ds4_stop_reset(&s->stop);
}

static void emit(struct ds4_stream *s, enum ds4_channel_kind kind, struct ds4_str text)
{
    struct ds4_channel *ch = &s->channels[kind];

    if (text.len == 0 || s->stop_hit)
        return;
    ch->empty = false;
    ch->last = text.ptr[text.len - 1];
    track_lines(ch, text);
    if (kind == DS4_CHANNEL_CONTENT && s->stop.n_strings > 0)
        pass_stops(s, text);
    else
        send(s, kind, text);
}

static void emit_hold(struct ds4_stream *s, enum ds4_channel_kind kind)
{
    struct ds4_channel *ch = &s->channels[kind];

    if (ch->hold.len == 0)
        return;
    emit(s, kind, ds4_buf_view(&ch->hold));
    ds4_buf_clear(&ch->hold);
}

void ds4_channel_restart(struct ds4_stream *s)
{
    ds4_channel_finish(s);
    for (size_t c = 0; c < DS4_N_CHANNELS; c++) {
        struct ds4_buf hold = s->channels[c].hold;

        ds4_buf_clear(&hold);
        s->channels[c] = (struct ds4_channel){.empty = true, .hold = hold};
    }
    s->channels[DS4_CHANNEL_CONTENT].blank = true;
    s->n_text_invokes = s->n_text_params = s->n_text_wrappers = 0;
    s->channel = s->config->starts_in_reasoning ? DS4_CHANNEL_REASONING : DS4_CHANNEL_CONTENT;
}

void ds4_channel_text(struct ds4_stream *s, struct ds4_str text)
{
    struct ds4_channel *ch = &s->channels[s->channel];
    size_t body = text.len, visible;

    while (body > 0 && text.ptr[body - 1] == '\n')
        body--;
    for (visible = body; visible > 0 && ds4_state_is_blank(text.ptr[visible - 1]);)
        visible--;
    if (visible > 0)
        s->last = DS4_LAST_OTHER;
    if (ch->blank) {
        if (visible == 0)
            body = 0;
        else
            ch->blank = false;
    }
    if (body > 0) {
        emit_hold(s, s->channel);
        emit(s, s->channel, ds4_str_head(text, body));
    }
    if (body < text.len && ds4_buf_append_str(&ch->hold, ds4_str_skip(text, body)) != 0)
        s->failed = true;
    if (s->stop_hit)
        s->state = DS4_STATE_ENDED;
}

void ds4_channel_raw(struct ds4_stream *s, struct ds4_str text)
{
    emit(s, DS4_CHANNEL_CONTENT, text);
    if (s->stop_hit)
        s->state = DS4_STATE_ENDED;
}

void ds4_channel_open_think(struct ds4_stream *s)
{
    if (s->channel == DS4_CHANNEL_CONTENT)
        release_stop_held(s);
    s->channel = DS4_CHANNEL_REASONING;
}

void ds4_channel_close_think(struct ds4_stream *s)
{
    if (s->channel != DS4_CHANNEL_REASONING)
        return;
    emit_hold(s, DS4_CHANNEL_REASONING);
    s->n_text_invokes = s->n_text_params = s->n_text_wrappers = 0;
    s->channel = DS4_CHANNEL_CONTENT;
}

void ds4_channel_start_call(struct ds4_stream *s)
{
    release_stop_held(s);
    for (size_t c = 0; c < DS4_N_CHANNELS; c++)
        ds4_buf_clear(&s->channels[c].hold);
    s->n_text_invokes = s->n_text_params = s->n_text_wrappers = 0;
    s->channels[DS4_CHANNEL_CONTENT].blank = true;
    s->channel = DS4_CHANNEL_CONTENT;
    s->last = DS4_LAST_OTHER;
    s->wait_closer = false;
    s->called = true;
}

void ds4_channel_drop_newlines(struct ds4_stream *s)
{
    struct ds4_buf *hold = &s->channels[s->channel].hold;

    while (hold->len > 0 && hold->ptr[hold->len - 1] == '\n')
        ds4_buf_truncate(hold, hold->len - 1);
}

void ds4_channel_drop_blanks(struct ds4_stream *s)
{
    if (s->channels[DS4_CHANNEL_CONTENT].blank)
        ds4_buf_clear(&s->channels[DS4_CHANNEL_CONTENT].hold);
}

bool ds4_channel_at_line_start(const struct ds4_stream *s)
{
    const struct ds4_channel *ch = &s->channels[s->channel];

    if (ch->hold.len > 0)
        return ch->hold.ptr[ch->hold.len - 1] == '\n';
    return ch->empty || ch->last == '\n';
}

void ds4_channel_finish(struct ds4_stream *s)
{
    emit_hold(s, DS4_CHANNEL_REASONING);
    if (!s->called || !s->channels[DS4_CHANNEL_CONTENT].blank)
        emit_hold(s, DS4_CHANNEL_CONTENT);
    release_stop_held(s);
}

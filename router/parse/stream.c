/* Step 14: the driver of the output parser, and plain text with its tags.
 *
 * Undecided text waits in one buffer; each state either makes progress or asks for more.  The result
 * cannot depend on how the text was cut, because a state decides only on what no further text can
 * change: a tag is taken when complete, and waited for exactly as long as it can still become one.
 * The diagram of the states is in state.h. */
#include "router/parse/state.h"
#include "router/text/byte_class.h"

#include <assert.h>
#include <stdlib.h>

/* Consumed text is dropped when it is at least this much and half of the buffer: linear in total. */
#define COMPACT_BYTES 4096
#define FEW_BYTES     4 /* or when hardly anything is behind it */

/* ---- set-up --------------------------------------------------------------------------------- */

static int init_tools(struct ds4_stream *s, struct ds4_err *err)
{
    const struct ds4_parse_config *config = s->config;

    if (config->calls_mode == DS4_CALLS_AS_TEXT || config->n_tools == 0)
        return 0;
    s->tools = calloc(config->n_tools, sizeof(*s->tools));
    if (s->tools == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "could not allocate %zu tools", config->n_tools);
    for (size_t i = 0; i < config->n_tools; i++) {
        const struct ds4_parse_tool *tool = &config->tools[i];
        if (tool->name.len == 0)
            continue;
        if (ds4_tool_init(&s->tools[s->n_tools], tool->name, tool->parameters, err) != 0)
            return -1;
        s->n_tools++;
    }
    return 0;
}

struct ds4_stream *ds4_stream_new(const struct ds4_parse_config *config, struct ds4_err *err)
{
    struct ds4_stream *s = calloc(1, sizeof(*s));

    if (s == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "could not allocate a parser");
        return NULL;
    }
    s->config = config;
    s->hold_max_bytes =
        config->hold_max_bytes == 0 ? DS4_DSML_HOLD_MAX_BYTES : config->hold_max_bytes;
    ds4_buf_init(&s->in, SIZE_MAX / 2);
    ds4_buf_init(&s->param.name, SIZE_MAX / 2);
    ds4_buf_init(&s->member.name, SIZE_MAX / 2);
    ds4_buf_init(&s->text, SIZE_MAX / 2);
    ds4_buf_init(&s->object, SIZE_MAX / 2);
    ds4_buf_init(&s->junk, SIZE_MAX / 2);
    ds4_args_init(&s->args, SIZE_MAX / 2);
    ds4_args_init(&s->seen, SIZE_MAX / 2);
    ds4_args_init(&s->members, SIZE_MAX / 2);
    ds4_channel_init(s);
    s->channel = config->starts_in_reasoning ? DS4_CHANNEL_REASONING : DS4_CHANNEL_CONTENT;
    if (ds4_stop_init(&s->stop, config->stops, config->n_stops, err) != 0 ||
        init_tools(s, err) != 0) {
        ds4_stream_free(s);
        return NULL;
    }
    s->rules = ds4_marker_rules_make(s->n_tools > 0, !config->no_plain_xml);
    return s;
}

void ds4_stream_free(struct ds4_stream *s)
{
    if (s == NULL)
        return;
    for (size_t i = 0; i < s->n_tools; i++)
        ds4_tool_deinit(&s->tools[i]);
    free(s->tools);
    ds4_stop_deinit(&s->stop);
    ds4_channel_deinit(s);
    ds4_args_deinit(&s->args);
    ds4_args_deinit(&s->seen);
    ds4_args_deinit(&s->members);
    ds4_buf_deinit(&s->in);
    ds4_buf_deinit(&s->param.name);
    ds4_buf_deinit(&s->member.name);
    ds4_buf_deinit(&s->text);
    ds4_buf_deinit(&s->object);
    ds4_buf_deinit(&s->junk);
    free(s);
}

/* ---- shared with the other states ----------------------------------------------------------- */

const struct ds4_tool *ds4_state_find_tool(const struct ds4_stream *s, struct ds4_str name)
{
    for (size_t i = 0; i < s->n_tools; i++)
        if (ds4_str_equal(s->tools[i].name, name))
            return &s->tools[i];
    return NULL;
}

/* "call_" and 24 letters or digits.  Bytes that would make some letters likelier are thrown away; a
 * source that yields nothing else (a broken one) still ends the loop. */
static void make_id(struct ds4_stream *s, char id[DS4_CALL_ID_CHARS + 1])
{
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
    enum { N_LETTERS = sizeof(letters) - 1, FAIR = 256 - 256 % N_LETTERS, MAX_DRAWS = 64 };
    unsigned char bytes[32];
    int n = 5;

    memcpy(id, "call_", 5);
    for (int draw = 0; n < DS4_CALL_ID_CHARS; draw++) {
        s->config->random(s->config->random_ctx, bytes, sizeof(bytes));
        for (size_t i = 0; i < sizeof(bytes) && n < DS4_CALL_ID_CHARS; i++)
            if (bytes[i] < FAIR || draw > MAX_DRAWS)
                id[n++] = letters[bytes[i] % N_LETTERS];
    }
    id[n] = '\0';
}

uint32_t ds4_state_announce(struct ds4_stream *s, struct ds4_str name)
{
    char id[DS4_CALL_ID_CHARS + 1];

    make_id(s, id);
    ds4_events_push_begin(s->out, s->n_calls, id, name);
    return s->n_calls++;
}

/* ---- text ----------------------------------------------------------------------------------- */

/* The tag at pos is text. */
static void pass(struct ds4_stream *s, size_t len)
{
    struct ds4_str tag = ds4_state_view(s, s->pos, s->pos + len);

    ds4_state_consume(s, s->pos + len);
    ds4_channel_text(s, tag);
}

/* The tag at pos vanishes. */
static void absorb(struct ds4_stream *s, size_t len)
{
    ds4_state_count(s, DS4_RULE_STRAY_CLOSER);
    ds4_state_consume(s, s->pos + len);
}

/* T5, T6: a closer in plain text.  It belongs to an opener that became text, or to nothing. */
static void text_closer(struct ds4_stream *s, const struct ds4_marker *m)
{
    const struct ds4_channel *ch = &s->channels[s->channel];
    size_t *n_text = m->kind == DS4_MARKER_CLOSE_INVOKE ? &s->n_text_invokes : &s->n_text_params;

    if (m->plain && !(m->kind == DS4_MARKER_CLOSE_WRAPPER && s->wait_closer && ch->blank)) {
        pass(s, m->len);
    } else if (m->kind != DS4_MARKER_CLOSE_WRAPPER) {
        if (*n_text == 0) {
            absorb(s, m->len);
            return;
        }
        (*n_text)--;
        pass(s, m->len);
        if (m->kind == DS4_MARKER_CLOSE_INVOKE)
            s->last = DS4_LAST_REJECTED;
    } else if (s->wait_closer) {
        s->wait_closer = false;
        ds4_channel_drop_blanks(s);
        absorb(s, m->len);
    } else if (s->n_text_wrappers > 0) {
        s->n_text_wrappers--;
        pass(s, m->len);
    } else if (s->last == DS4_LAST_REJECTED || !ds4_marker_word_closes(m->word)) {
        pass(s, m->len);
    } else {
        absorb(s, m->len);
    }
}

static void text_tag(struct ds4_stream *s, const struct ds4_marker *m)
{
    switch (m->kind) {
    case DS4_MARKER_TURN:
        ds4_state_end_turn(s);
        break;
    case DS4_MARKER_THINK_OPEN:
        ds4_state_consume(s, s->pos + m->len);
        ds4_channel_open_think(s);
        break;
    case DS4_MARKER_THINK_CLOSE:
        ds4_state_consume(s, s->pos + m->len);
        ds4_channel_close_think(s);
        break;
    case DS4_MARKER_INVOKE:
    case DS4_MARKER_PARAMETER:
        ds4_repair_start_candidate(s, m, s->pos, false);
        break;
    case DS4_MARKER_WRAPPER:
        ds4_repair_start_wrapper(s, m);
        break;
    case DS4_MARKER_CLOSE_INVOKE:
    case DS4_MARKER_CLOSE_PARAMETER:
    case DS4_MARKER_CLOSE_WRAPPER:
        text_closer(s, m);
        break;
    }
}

static enum ds4_step step_text(struct ds4_stream *s)
{
    size_t n = ds4_state_end(s) - s->pos;
    struct ds4_marker m;
    const char *lt;

    if (n == 0)
        return DS4_STEP_WAIT;
    lt = memchr(ds4_state_at(s, s->pos), '<', n);
    if (lt == NULL) {
        pass(s, n);
        return DS4_STEP_WAIT;
    }
    if (lt > ds4_state_at(s, s->pos)) {
        pass(s, (size_t)(lt - ds4_state_at(s, s->pos)));
        return DS4_STEP_AGAIN;
    }
    switch (ds4_state_marker(s, s->pos, &m)) {
    case DS4_MARKER_PARTIAL:
        return DS4_STEP_WAIT;
    case DS4_MARKER_NONE:
        lt = memchr(lt + 1, '<', n - 1);
        pass(s, lt == NULL ? n : (size_t)(lt - ds4_state_at(s, s->pos)));
        return DS4_STEP_AGAIN;
    case DS4_MARKER_FULL:
        text_tag(s, &m);
        return DS4_STEP_AGAIN;
    }
    return DS4_STEP_WAIT;
}

/* ---- the machine ---------------------------------------------------------------------------- */

static void run(struct ds4_stream *s)
{
    enum ds4_step step = DS4_STEP_AGAIN;

    while (step == DS4_STEP_AGAIN && !s->failed) {
        switch (s->state) {
        case DS4_STATE_TEXT:
            step = step_text(s);
            break;
        case DS4_STATE_WRAPPER:
            step = ds4_repair_wrapper(s);
            break;
        case DS4_STATE_CANDIDATE:
            step = ds4_repair_candidate(s);
            break;
        case DS4_STATE_BLOCK:
            step = ds4_dsml_block(s);
            break;
        case DS4_STATE_CALL:
            step = ds4_dsml_call(s);
            break;
        case DS4_STATE_VALUE:
        case DS4_STATE_NESTED_VALUE:
            step = ds4_value_read(s);
            break;
        case DS4_STATE_NESTED:
            step = ds4_value_nested(s);
            break;
        case DS4_STATE_JSON:
            step = ds4_value_json(s);
            break;
        case DS4_STATE_ENDED:
            ds4_state_consume(s, ds4_state_end(s));
            step = DS4_STEP_WAIT;
            break;
        }
    }
}

/* T8 at the end of the stream: the beginning of a tag is text, unless the length limit cut markup. */
static void end_text(struct ds4_stream *s)
{
    struct ds4_str rest = ds4_state_view(s, s->pos, ds4_state_end(s));

    if (s->cut_short && s->rules.dsml && ds4_str_find(rest, DS4_STR("DSML"), 0) != DS4_STR_NONE) {
        ds4_state_count(s, DS4_RULE_TRUNCATED);
        ds4_channel_drop_newlines(s);
        ds4_state_consume(s, ds4_state_end(s));
    } else if (rest.len > 0) {
        pass(s, 1); /* the '<'; behind it another tag may begin */
        return;
    }
    s->state = DS4_STATE_ENDED;
}

/* No more text comes: every state gives up waiting until nothing is left. */
static void end_stream(struct ds4_stream *s, bool cut_short)
{
    s->cut_short = cut_short;
    while (s->state != DS4_STATE_ENDED && !s->failed) {
        run(s);
        switch (s->state) {
        case DS4_STATE_TEXT:
            end_text(s);
            break;
        case DS4_STATE_WRAPPER:
        case DS4_STATE_CANDIDATE:
            ds4_repair_end(s);
            break;
        case DS4_STATE_BLOCK:
        case DS4_STATE_CALL:
            ds4_dsml_end(s);
            break;
        case DS4_STATE_VALUE:
        case DS4_STATE_JSON:
        case DS4_STATE_NESTED:
        case DS4_STATE_NESTED_VALUE:
            if (s->holder == DS4_HOLDER_CANDIDATE)
                ds4_repair_end(s);
            else
                ds4_dsml_end(s);
            break;
        case DS4_STATE_ENDED:
            break;
        }
    }
    ds4_channel_finish(s);
}

void ds4_state_end_turn(struct ds4_stream *s)
{
    /* The marker and what follows never existed: the text before it ends the stream. */
    ds4_buf_truncate(&s->in, s->pos - s->base);
    s->turn_over = true;
    s->cut_short = false;
}

/* ---- public --------------------------------------------------------------------------------- */

static int check(const struct ds4_stream *s, const struct ds4_events *out, struct ds4_err *err)
{
    if (out->failed || out->text.failed)
        return ds4_fail(err, DS4_E_TOO_LONG, "parsed text exceeds its buffer");
    if (s->failed)
        return ds4_fail(err, DS4_E_NOMEM, "could not allocate parser memory");
    return 0;
}

/* Everything but plain text that goes where the last text went; apart, so that this costs no more. */
static __attribute__((noinline)) int feed(struct ds4_stream *s, struct ds4_str text,
                                          struct ds4_events *out, struct ds4_err *err)
{
    if (s->state == DS4_STATE_ENDED)
        return 0;
    s->out = out;
    if (s->config->raw) {
        ds4_channel_raw(s, text);
        s->out = NULL;
        return check(s, out, err);
    }
    if (!s->config->machine_only)
        text = ds4_direct_read(s, text);
    if (text.len == 0) {
        ds4_direct_settle(s);
        s->out = NULL;
        return check(s, out, err);
    }
    if (ds4_buf_append_str(&s->in, text) != 0)
        s->failed = true;
    run(s);
    if (s->turn_over)
        end_stream(s, false);
    if (s->pos - s->base == s->in.len) {
        s->base = s->pos;
        ds4_buf_clear(&s->in);
    } else if (s->pos > s->base &&
               (s->in.len - (s->pos - s->base) <= FEW_BYTES ||
                (s->pos - s->base >= COMPACT_BYTES && (s->pos - s->base) * 2 > s->in.len))) {
        ds4_buf_consume(&s->in, s->pos - s->base);
        s->base = s->pos;
    }
    ds4_direct_settle(s);
    s->out = NULL;
    return check(s, out, err);
}

int ds4_stream_feed(struct ds4_stream *s, struct ds4_str text, struct ds4_events *out,
                    struct ds4_err *err)
{
    if (text.len == 0)
        return 0;
    if (s->quiet != DS4_QUIET_NOT && ds4_direct_quick(s, text, ds4_byte_classes(text), false, out))
        return out->failed ? check(s, out, err) : 0;
    return feed(s, text, out, err);
}

int ds4_stream_feed_token(struct ds4_stream *s, struct ds4_str text, unsigned classes,
                          struct ds4_events *out, struct ds4_err *err)
{
    if (text.len == 0)
        return 0;
    if (s->quiet != DS4_QUIET_NOT && ds4_direct_quick(s, text, classes, true, out))
        return out->failed ? check(s, out, err) : 0;
    return feed(s, text, out, err);
}

bool ds4_stream_ended(const struct ds4_stream *s)
{
    return s->state == DS4_STATE_ENDED;
}

enum ds4_stream_place ds4_stream_place(const struct ds4_stream *s)
{
    if (s->state != DS4_STATE_TEXT)
        return DS4_PLACE_MARKUP;
    if (s->channels[s->channel].fence_open)
        return DS4_PLACE_FENCE;
    return s->channel == DS4_CHANNEL_REASONING ? DS4_PLACE_REASONING : DS4_PLACE_CONTENT;
}

size_t ds4_stream_undecided(const struct ds4_stream *s)
{
    return s->state == DS4_STATE_TEXT ? ds4_state_end(s) - s->pos : 0;
}

void ds4_stream_take_back(struct ds4_stream *s, size_t n_bytes)
{
    assert(n_bytes <= ds4_stream_undecided(s));
    if (n_bytes == 0)
        return;
    ds4_buf_truncate(&s->in, s->in.len - n_bytes);
    ds4_direct_settle(s);
}

int ds4_stream_reopen(struct ds4_stream *s, struct ds4_events *out, struct ds4_err *err)
{
    assert(s->state == DS4_STATE_TEXT);
    s->quiet = DS4_QUIET_NOT;
    s->out = out;
    pass(s, ds4_stream_undecided(s));
    if (s->state == DS4_STATE_TEXT) {
        ds4_channel_restart(s);
        s->wait_closer = false;
        s->last = DS4_LAST_OTHER;
    }
    s->out = NULL;
    return check(s, out, err);
}

int ds4_stream_finish(struct ds4_stream *s, enum ds4_engine_finish engine, struct ds4_events *out,
                      struct ds4_err *err)
{
    struct ds4_finish finish = {.reason = DS4_FINISH_STOP};

    s->out = out;
    if (!s->turn_over && !s->stop_hit)
        end_stream(s, engine == DS4_ENGINE_LENGTH);
    finish.stop_string = s->stop_hit;
    finish.stop_text = s->stop_text;
    finish.truncated_tool_args = s->incomplete;
    finish.pseudo_tag = s->pseudo_tag && s->n_calls == 0;
    finish.truncated_in_reasoning =
        s->cut_short && !s->stop_hit && s->channel == DS4_CHANNEL_REASONING;
    if (s->incomplete || (s->cut_short && !s->stop_hit))
        finish.reason = DS4_FINISH_LENGTH;
    else if (!s->stop_hit && s->n_complete > 0 && s->config->calls_mode != DS4_CALLS_NAMED)
        finish.reason = DS4_FINISH_TOOL_CALLS;
    ds4_events_push_finish(out, &finish);
    s->out = NULL;
    return check(s, out, err);
}

bool ds4_stream_expects_calls(const struct ds4_stream *s)
{
    return s->rules.dsml;
}

uint32_t ds4_stream_n_calls(const struct ds4_stream *s, uint32_t *n_complete)
{
    if (n_complete != NULL)
        *n_complete = s->n_complete;
    return s->n_calls;
}

const uint64_t *ds4_stream_rules(const struct ds4_stream *s)
{
    return s->rules_used;
}

const char *ds4_parse_rule_name(enum ds4_parse_rule rule)
{
    static const char *const names[] = {
#define DS4_PARSE_RULE_NAME(rule_, name) [rule_] = name,
        DS4_PARSE_RULES(DS4_PARSE_RULE_NAME)
#undef DS4_PARSE_RULE_NAME
    };

    return names[rule];
}

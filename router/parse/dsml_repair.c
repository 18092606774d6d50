/* Step 14: calls outside a strict block, each tolerated deviation behind its gate.
 *
 * A bare invoke or parameter tag, or one behind an unfamiliar wrapper, opens a candidate.  Nothing of
 * it is emitted while it is undecided.  It ends in one of three ways:
 *
 *   release  its body is no call: the opener becomes text and scanning goes on right behind it
 *   reject   it is a call, but a gate fails: the whole span becomes text
 *   commit   it is a call
 *
 * A release makes the text behind the opener be read again.  That stays linear because a later
 * parameter tag on the same path must meet the same dead end: doomed_until remembers where that is,
 * and such a tag is released unread.  (The paths agree because every tag that could end a value of
 * the later candidate also ended one of the earlier; plain openers, for which more tags end a value,
 * are remembered apart.) */
#include "router/parse/state.h"

/* ---- wrapper opener ------------------------------------------------------------------------- */

void ds4_repair_start_wrapper(struct ds4_stream *s, const struct ds4_marker *m)
{
    const bool spaced = s->config->spaced_tags;

    s->wrapper = (struct ds4_wrapper){
        .begin = s->pos,
        .end = s->pos + m->len,
        .dsml = !m->plain,
        .known = !m->plain && m->exact_prefix && ds4_marker_word_known(m->word),
        .exact = !m->plain && m->exact_prefix && m->sep == (spaced ? ' ' : '\0') &&
                 m->attrs.len == 0 &&
                 ds4_str_equal(m->word, spaced ? DS4_STR("calls") : DS4_STR("tool_calls")),
    };
    s->scan = s->wrapper.end;
    s->state = DS4_STATE_WRAPPER;
}

static void wrapper_is_text(struct ds4_stream *s)
{
    struct ds4_str tag = ds4_state_view(s, s->wrapper.begin, s->wrapper.end);

    ds4_state_consume(s, s->wrapper.end);
    s->state = DS4_STATE_TEXT;
    s->n_text_wrappers++;
    ds4_channel_text(s, tag);
}

/* Letters, digits, _ . : / - and anything beyond ASCII, 1 to 128 characters. */
static bool is_identifier(struct ds4_str name)
{
    size_t n_chars = 0;

    for (size_t i = 0; i < name.len; i++) {
        unsigned char c = (unsigned char)name.ptr[i];
        bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        if (c < 0x80 && !letter && !(c >= '0' && c <= '9') && strchr("_.:/-", c) == NULL)
            return false;
        n_chars += (c & 0xc0) != 0x80;
    }
    return n_chars >= 1 && n_chars <= 128;
}

static bool opens_strict_block(const struct ds4_stream *s, const struct ds4_marker *m)
{
    struct ds4_str name = ds4_str_trim(ds4_marker_read_attrs(m->attrs).name);

    return name.len == 0 || ds4_state_find_tool(s, name) != NULL || is_identifier(name);
}

static void empty_block(struct ds4_stream *s, const struct ds4_marker *m)
{
    ds4_state_count(s, DS4_RULE_EMPTY_BLOCK);
    ds4_channel_drop_newlines(s);
    ds4_state_consume(s, s->scan + m->len);
    s->state = DS4_STATE_TEXT;
}

enum ds4_step ds4_repair_wrapper(struct ds4_stream *s)
{
    enum ds4_marker_status got = DS4_MARKER_NONE;
    struct ds4_marker m;
    bool more = ds4_state_skip_blanks(s);

    if (s->scan - s->wrapper.begin > s->hold_max_bytes) {
        wrapper_is_text(s);
        return DS4_STEP_AGAIN;
    }
    if (!more)
        return DS4_STEP_WAIT;
    if (*ds4_state_at(s, s->scan) == '<')
        got = ds4_state_marker(s, s->scan, &m);
    if (got == DS4_MARKER_PARTIAL)
        return DS4_STEP_WAIT;
    if (got == DS4_MARKER_FULL && m.kind == DS4_MARKER_CLOSE_WRAPPER && !m.plain &&
        s->wrapper.dsml && ds4_marker_word_closes(m.word)) {
        empty_block(s, &m);
    } else if (got == DS4_MARKER_FULL && m.kind == DS4_MARKER_INVOKE && s->wrapper.known) {
        if (opens_strict_block(s, &m)) {
            ds4_state_consume(s, s->scan);
            ds4_dsml_start_block(s);
        } else {
            wrapper_is_text(s);
        }
    } else if (got == DS4_MARKER_FULL &&
               (m.kind == DS4_MARKER_INVOKE || m.kind == DS4_MARKER_PARAMETER)) {
        ds4_repair_start_candidate(s, &m, s->scan, true);
    } else {
        wrapper_is_text(s);
    }
    return DS4_STEP_AGAIN;
}

/* ---- release, reject, commit ---------------------------------------------------------------- */

void ds4_repair_release(struct ds4_stream *s, enum ds4_parse_rule why)
{
    struct ds4_candidate *c = &s->candidate;
    struct ds4_str tags = ds4_state_view(s, c->begin, c->opener_end);

    ds4_state_count(s, why);
    if (s->scan > s->doomed_until[c->opener_plain])
        s->doomed_until[c->opener_plain] = s->scan;
    if (c->wrapper_dsml)
        s->n_text_wrappers++;
    if (!c->opener_plain && c->opener_invoke)
        s->n_text_invokes++;
    if (!c->opener_plain && !c->opener_invoke)
        s->n_text_params++;
    ds4_state_consume(s, c->opener_end);
    s->state = DS4_STATE_TEXT;
    ds4_channel_text(s, tags);
}

static void reject(struct ds4_stream *s, size_t end, enum ds4_parse_rule why)
{
    struct ds4_str span = ds4_state_view(s, s->candidate.begin, end);

    ds4_state_count(s, why);
    ds4_state_consume(s, end);
    s->state = DS4_STATE_TEXT;
    ds4_channel_text(s, span);
    s->last = DS4_LAST_REJECTED;
}

static void commit(struct ds4_stream *s, size_t end, const struct ds4_tool *tool)
{
    static const enum ds4_parse_rule rules[] = {
        [DS4_CANDIDATE_INVOKE] = DS4_RULE_RECOVERED_INVOKE,
        [DS4_CANDIDATE_FUSED] = DS4_RULE_RECOVERED_FUSED,
        [DS4_CANDIDATE_HEADLESS] = DS4_RULE_RECOVERED_HEADLESS,
    };
    uint32_t index;

    ds4_state_count(s, rules[s->candidate.kind]);
    ds4_channel_start_call(s);
    s->wait_closer = true;
    index = ds4_state_announce(s, tool->name);
    ds4_events_push_text(s->out, DS4_EVENT_CALL_ARGS, index, ds4_buf_view(&s->text));
    ds4_events_push_end(s->out, index, false);
    s->n_complete++;
    ds4_state_consume(s, end);
    s->state = DS4_STATE_TEXT;
}

/* ---- gates ---------------------------------------------------------------------------------- */

/* The one declared tool whose properties include every parameter (gate G2). */
static const struct ds4_tool *covering_tool(const struct ds4_stream *s)
{
    const struct ds4_tool *found = NULL;

    for (size_t t = 0; t < s->n_tools; t++) {
        size_t i = 0;
        while (i < s->args.list.len &&
               ds4_tool_find(&s->tools[t], ds4_args_name(&s->args, i)) != NULL)
            i++;
        if (i < s->args.list.len)
            continue;
        if (found != NULL)
            return NULL;
        found = &s->tools[t];
    }
    return found;
}

/* The arguments' text goes to s->text, the names that count as given to s->seen (gate G3). */
static void write_arguments(struct ds4_stream *s, const struct ds4_tool *tool)
{
    const struct ds4_candidate *c = &s->candidate;
    struct ds4_str body = {0};

    ds4_buf_clear(&s->text);
    ds4_args_clear(&s->seen);
    if (c->has_json)
        body = ds4_state_view(s, c->json_at, c->json_at + c->json_len);
    if (c->has_json)
        (void)ds4_buf_append_str(&s->text, body);
    if (c->has_json || ds4_args_unwrap(&s->text, &s->args, tool)) {
        (void)ds4_args_object_keys(ds4_buf_view(&s->text), &s->seen);
    } else {
        s->rules_used[DS4_RULE_COERCED_PARAM] += ds4_args_write(&s->text, &s->args, tool);
        for (size_t i = 0; i < s->args.list.len; i++)
            (void)ds4_args_add(&s->seen, ds4_args_name(&s->args, i), (struct ds4_str){"", 0},
                               DS4_ARG_READY);
    }
    if (s->text.failed || s->args.failed || s->seen.failed)
        s->failed = true;
}

/* The body is complete and ends at `end`: G1 to G5. */
static void close_candidate(struct ds4_stream *s, size_t end)
{
    const struct ds4_candidate *c = &s->candidate;
    const struct ds4_tool *tool = c->tool;

    if (c->kind == DS4_CANDIDATE_HEADLESS)
        tool = covering_tool(s);
    if (tool == NULL || c->ambiguous) {
        reject(s, end, DS4_RULE_REJECTED_AMBIGUOUS);
        return;
    }
    write_arguments(s, tool);
    for (size_t i = 0; i < tool->n_required; i++)
        if (!ds4_args_has(&s->seen, tool->required[i])) {
            reject(s, end, DS4_RULE_REJECTED_REQUIRED);
            return;
        }
    if (tool->n_required == 0 && s->seen.list.len == 0 && !c->at_line_start) {
        reject(s, end, DS4_RULE_REJECTED_INLINE);
        return;
    }
    commit(s, end, tool);
}

/* ---- candidate ------------------------------------------------------------------------------ */

static bool is_property(const struct ds4_stream *s, struct ds4_str name)
{
    for (size_t t = 0; t < s->n_tools; t++)
        if (ds4_tool_find(&s->tools[t], name) != NULL)
            return true;
    return false;
}

/* What the opener is, or why it is none: DS4_N_PARSE_RULES if it is one. */
static enum ds4_parse_rule classify(struct ds4_stream *s, const struct ds4_marker *m, size_t at)
{
    struct ds4_marker_attrs attrs = ds4_marker_read_attrs(m->attrs);
    struct ds4_candidate *c = &s->candidate;

    if (s->config->no_recovery || s->channels[s->channel].fence_open)
        return DS4_RULE_REJECTED_FENCE;
    c->tool = attrs.has_name ? ds4_state_find_tool(s, ds4_str_trim(attrs.name)) : NULL;
    if (c->opener_invoke)
        return c->tool == NULL ? DS4_RULE_REJECTED_UNDECLARED : DS4_N_PARSE_RULES;
    if (s->n_text_invokes > 0 || (!m->plain && s->n_text_params > 0) ||
        at < s->doomed_until[m->plain])
        return DS4_RULE_REJECTED_PROSE;
    c->kind = c->tool != NULL ? DS4_CANDIDATE_FUSED : DS4_CANDIDATE_HEADLESS;
    if (c->tool == NULL && !(attrs.has_name && is_property(s, attrs.name)))
        return DS4_RULE_REJECTED_UNDECLARED;
    return DS4_N_PARSE_RULES;
}

void ds4_repair_start_candidate(struct ds4_stream *s, const struct ds4_marker *m, size_t at,
                                bool with_wrapper)
{
    struct ds4_candidate *c = &s->candidate;
    enum ds4_parse_rule why;

    *c = (struct ds4_candidate){
        .kind = DS4_CANDIDATE_INVOKE,
        .begin = with_wrapper ? s->wrapper.begin : at,
        .opener_end = at + m->len,
        .wrapper_dsml = with_wrapper && s->wrapper.dsml,
        .opener_plain = m->plain,
        .opener_invoke = m->kind == DS4_MARKER_INVOKE,
        .at_line_start = ds4_channel_at_line_start(s),
    };
    s->scan = at;
    why = classify(s, m, at);
    if (why != DS4_N_PARSE_RULES) {
        ds4_repair_release(s, why);
        return;
    }
    s->holder = DS4_HOLDER_CANDIDATE;
    ds4_args_clear(&s->args);
    ds4_args_clear(&s->members);
    if (c->kind == DS4_CANDIDATE_HEADLESS) {
        ds4_value_start(s, m, c->opener_end);
        return;
    }
    if (c->kind == DS4_CANDIDATE_FUSED)
        c->bare_string = ds4_marker_read_attrs(m->attrs).string;
    s->scan = c->opener_end;
    s->state = DS4_STATE_CANDIDATE;
}

/* Something else than a tag stands at scan: the bare value of a FUSED call, a JSON body, or prose. */
static void read_untagged(struct ds4_stream *s)
{
    struct ds4_candidate *c = &s->candidate;

    if (c->kind == DS4_CANDIDATE_INVOKE && !c->saw_value && *ds4_state_at(s, s->scan) == '{') {
        s->param.begin = s->scan;
        s->state = DS4_STATE_JSON;
    } else if (c->kind == DS4_CANDIDATE_FUSED && !c->saw_value) {
        const struct ds4_str *primary = ds4_tool_primary(c->tool);
        c->ambiguous = primary == NULL;
        ds4_value_start_bare(s, primary == NULL ? (struct ds4_str){"", 0} : *primary,
                             c->bare_string);
    } else {
        ds4_repair_release(s, DS4_RULE_REJECTED_PROSE);
    }
}

enum ds4_step ds4_repair_candidate(struct ds4_stream *s)
{
    enum ds4_marker_status got = DS4_MARKER_NONE;
    struct ds4_candidate *c = &s->candidate;
    size_t upto = ds4_state_end(s);
    struct ds4_marker m;
    bool more = ds4_state_skip_blanks(s);

    if (more && *ds4_state_at(s, s->scan) == '<')
        got = ds4_state_marker(s, s->scan, &m);
    if (got == DS4_MARKER_FULL)
        upto = s->scan + m.len - 1;
    if (!more || got != DS4_MARKER_NONE) {
        if (upto - c->begin > s->hold_max_bytes) {
            ds4_repair_release(s, DS4_RULE_REJECTED_UNCLOSED);
            return DS4_STEP_AGAIN;
        }
        if (got != DS4_MARKER_FULL)
            return DS4_STEP_WAIT;
    }
    if (got == DS4_MARKER_NONE) {
        read_untagged(s);
        return DS4_STEP_AGAIN;
    }
    switch (m.kind) {
    case DS4_MARKER_PARAMETER:
        if (c->has_json || !ds4_marker_read_attrs(m.attrs).has_name)
            ds4_repair_release(s, DS4_RULE_REJECTED_PROSE);
        else
            ds4_value_start(s, &m, s->scan + m.len);
        break;
    case DS4_MARKER_CLOSE_PARAMETER:
        s->scan += m.len;
        break;
    case DS4_MARKER_CLOSE_INVOKE:
        close_candidate(s, s->scan + m.len);
        break;
    case DS4_MARKER_CLOSE_WRAPPER:
        close_candidate(s, s->scan);
        break;
    default:
        ds4_repair_release(s, DS4_RULE_REJECTED_PROSE);
        break;
    }
    return DS4_STEP_AGAIN;
}

/* ---- end of stream -------------------------------------------------------------------------- */

void ds4_repair_end(struct ds4_stream *s)
{
    if (s->state == DS4_STATE_WRAPPER) {
        bool nothing = s->scan == ds4_state_end(s);
        if (s->wrapper.dsml && (nothing || s->cut_short)) {
            ds4_state_count(s, DS4_RULE_TRUNCATED);
            ds4_channel_drop_newlines(s);
            ds4_state_consume(s, ds4_state_end(s));
            s->state = DS4_STATE_TEXT;
        } else {
            wrapper_is_text(s);
        }
        return;
    }
    if (!s->cut_short) {
        s->scan = ds4_state_end(s);
        ds4_repair_release(s, DS4_RULE_REJECTED_UNCLOSED);
        return;
    }
    ds4_state_count(s, DS4_RULE_TRUNCATED);
    ds4_channel_drop_newlines(s);
    ds4_state_consume(s, ds4_state_end(s));
    s->state = DS4_STATE_TEXT;
}

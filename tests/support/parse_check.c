/* The parser's promises as one function, for the unit tests and the fuzzer. */
#include "tests/support/parse_check.h"

#include "common/json_text.h"
#include "router/text/byte_class.h"
#include "router/text/vocab.h"

#include <stdio.h>
#include <stdlib.h>

#define MAX_TEXT_BYTES ((size_t)1 << 28)
#define MAX_PIECE      40

uint64_t parse_check_random(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

void parse_check_fill(void *ctx, void *out, size_t n)
{
    unsigned char *bytes = out;

    for (size_t i = 0; i < n; i++)
        bytes[i] = (unsigned char)parse_check_random(ctx);
}

int parse_check_whole(const struct ds4_parse_config *config, struct ds4_str text,
                      enum ds4_engine_finish engine, struct ds4_turn *turn)
{
    struct ds4_stream *s = ds4_stream_new(config, NULL);
    struct ds4_events events;
    int rc = -1;

    ds4_events_init(&events, MAX_TEXT_BYTES);
    if (s != NULL && ds4_stream_feed(s, text, &events, NULL) == 0 &&
        ds4_stream_finish(s, engine, &events, NULL) == 0)
        rc = ds4_turn_add(turn, &events, NULL);
    ds4_events_deinit(&events);
    ds4_stream_free(s);
    return rc;
}

static bool is_prefix(const struct ds4_buf *part, const struct ds4_buf *all)
{
    return ds4_str_starts(ds4_buf_view(all), ds4_buf_view(part));
}

static const char *compare_prefix(const struct ds4_turn *part, const struct ds4_turn *all)
{
    if (!is_prefix(&part->reasoning, &all->reasoning))
        return "reasoning is no prefix of its final value";
    if (!is_prefix(&part->content, &all->content))
        return "content is no prefix of its final value";
    if (part->calls.len > all->calls.len)
        return "a call was announced that is not in the result";
    for (size_t i = 0; i < part->calls.len; i++) {
        if (!ds4_str_equal(ds4_buf_view(&part->calls.ptr[i].name),
                           ds4_buf_view(&all->calls.ptr[i].name)))
            return "a call changed its name";
        if (!is_prefix(&part->calls.ptr[i].arguments, &all->calls.ptr[i].arguments))
            return "arguments are no prefix of their final value";
    }
    return NULL;
}

static const char *compare_final(const struct ds4_turn *a, const struct ds4_turn *b)
{
    const char *wrong = compare_prefix(a, b);

    if (wrong != NULL)
        return wrong;
    if (a->reasoning.len != b->reasoning.len || a->content.len != b->content.len)
        return "the text is shorter when cut into pieces";
    if (a->calls.len != b->calls.len)
        return "fewer calls when cut into pieces";
    for (size_t i = 0; i < a->calls.len; i++)
        if (a->calls.ptr[i].arguments.len != b->calls.ptr[i].arguments.len ||
            a->calls.ptr[i].incomplete != b->calls.ptr[i].incomplete)
            return "a call differs when cut into pieces";
    if (a->finish.reason != b->finish.reason || a->finish.stop_string != b->finish.stop_string ||
        a->finish.pseudo_tag != b->finish.pseudo_tag ||
        a->finish.truncated_tool_args != b->finish.truncated_tool_args ||
        a->finish.truncated_in_reasoning != b->finish.truncated_in_reasoning)
        return "the finish differs when cut into pieces";
    return NULL;
}

static const char *check_arguments(const struct ds4_turn *turn)
{
    for (size_t i = 0; i < turn->calls.len; i++) {
        struct ds4_str text = ds4_buf_view(&turn->calls.ptr[i].arguments);
        if (turn->calls.ptr[i].incomplete)
            continue;
        if (text.len == 0 || text.ptr[0] != '{' || !ds4_jt_valid(text, DS4_JT_MAX_DEPTH))
            return "the arguments of a complete call are not a JSON object";
    }
    return NULL;
}

/* The end of a piece that starts at `from`, moved on to the next character. */
static size_t next_cut(struct ds4_str text, size_t from, uint64_t *seed)
{
    uint64_t r = parse_check_random(seed);
    size_t to = from + 1 + (size_t)((r & 1) != 0 ? 0 : (r >> 1) % MAX_PIECE);

    while (to < text.len && ((unsigned char)text.ptr[to] & 0xc0) == 0x80)
        to++;
    return to < text.len ? to : text.len;
}

/* Every other small piece goes the way of a token: with its classes, and bytes behind it that are not its own. */
static int feed_piece(struct ds4_stream *s, struct ds4_str piece, size_t from,
                      struct ds4_events *events)
{
    char token[2 * DS4_TOKEN_SLACK_BYTES];

    if (piece.len > DS4_TOKEN_SLACK_BYTES || from % 2 != 0)
        return ds4_stream_feed(s, piece, events, NULL);
    memset(token, '<', sizeof(token));
    memcpy(token, piece.ptr, piece.len);
    piece.ptr = token;
    return ds4_stream_feed_token(s, piece, ds4_byte_classes(piece), events, NULL);
}

static const char *feed_pieces(struct ds4_stream *s, struct ds4_str text, uint64_t seed,
                               struct ds4_turn *turn, const struct ds4_turn *whole)
{
    const char *wrong = NULL;
    struct ds4_events events;

    ds4_events_init(&events, MAX_TEXT_BYTES);
    for (size_t from = 0, to; from < text.len && wrong == NULL; from = to) {
        to = next_cut(text, from, &seed);
        if (feed_piece(s, (struct ds4_str){text.ptr + from, to - from}, from, &events) != 0 ||
            ds4_turn_add(turn, &events, NULL) != 0)
            wrong = "feeding failed";
        else
            wrong = compare_prefix(turn, whole);
        ds4_events_clear(&events);
    }
    ds4_events_deinit(&events);
    return wrong;
}

static bool has_complete_call(const struct ds4_parse_config *config, struct ds4_str text)
{
    struct ds4_parse_config plain = *config;
    struct ds4_turn turn;
    bool found = false;

    plain.starts_in_reasoning = false;
    plain.n_stops = 0;
    ds4_turn_init(&turn, MAX_TEXT_BYTES);
    if (parse_check_whole(&plain, text, DS4_ENGINE_STOP, &turn) == 0)
        for (size_t i = 0; i < turn.calls.len; i++)
            found = found || !turn.calls.ptr[i].incomplete;
    ds4_turn_deinit(&turn);
    return found;
}

const char *parse_check_leak(const struct ds4_parse_config *config, struct ds4_str text,
                             struct ds4_str content)
{
    static const struct ds4_str opener = {"DSML\xef\xbd\x9cinvoke name=", 19};
    static const struct ds4_str closer = {"DSML\xef\xbd\x9cinvoke>", 14};
    const size_t before = 4; /* "<" and a bar */
    size_t at = 0, end;

    while ((at = ds4_str_find(content, opener, at)) != DS4_STR_NONE) {
        struct ds4_str call;

        end = ds4_str_find(content, closer, at);
        if (end == DS4_STR_NONE || at < before)
            return NULL;
        call = ds4_str_head(ds4_str_skip(content, at - before), end + closer.len - at + before);
        if (ds4_str_find(text, call, 0) != DS4_STR_NONE && has_complete_call(config, call) &&
            has_complete_call(config, content))
            return "a complete call is left in the content";
        at = end;
    }
    return NULL;
}

const char *parse_check(const struct ds4_parse_config *config, struct ds4_str text,
                        enum ds4_engine_finish engine, uint64_t seed)
{
    struct ds4_stream *s = ds4_stream_new(config, NULL);
    struct ds4_turn whole, pieces;
    struct ds4_events events;
    const char *wrong;

    ds4_events_init(&events, MAX_TEXT_BYTES);
    ds4_turn_init(&whole, MAX_TEXT_BYTES);
    ds4_turn_init(&pieces, MAX_TEXT_BYTES);
    if (s == NULL || parse_check_whole(config, text, engine, &whole) != 0)
        wrong = "parsing failed";
    else
        wrong = feed_pieces(s, text, seed, &pieces, &whole);
    if (wrong == NULL && (ds4_stream_finish(s, engine, &events, NULL) != 0 ||
                          ds4_turn_add(&pieces, &events, NULL) != 0))
        wrong = "finishing failed";
    if (wrong == NULL)
        wrong = compare_final(&pieces, &whole);
    if (wrong == NULL)
        wrong = check_arguments(&whole);
    if (wrong == NULL)
        wrong = parse_check_leak(config, text, ds4_buf_view(&whole.content));
    ds4_turn_deinit(&whole);
    ds4_turn_deinit(&pieces);
    ds4_events_deinit(&events);
    ds4_stream_free(s);
    return wrong;
}

/* Two parsers that must not differ. */
struct pair {
    struct ds4_stream *s[2];
    struct ds4_events events[2];
};

static bool same_event(const struct ds4_event *a, const struct ds4_event *b)
{
    if (a->kind != b->kind || a->call != b->call)
        return false;
    switch (a->kind) {
    case DS4_EVENT_CALL_BEGIN:
        return memcmp(a->id, b->id, sizeof(a->id)) == 0;
    case DS4_EVENT_CALL_END:
        return a->incomplete == b->incomplete;
    case DS4_EVENT_FINISH:
        return a->finish.reason == b->finish.reason &&
               a->finish.truncated_tool_args == b->finish.truncated_tool_args &&
               a->finish.truncated_in_reasoning == b->finish.truncated_in_reasoning &&
               a->finish.stop_string == b->finish.stop_string &&
               a->finish.pseudo_tag == b->finish.pseudo_tag &&
               ds4_str_equal(a->finish.stop_text, b->finish.stop_text);
    default:
        return true;
    }
}

static const char *compare_pair(const struct pair *p)
{
    const struct ds4_events *a = &p->events[0], *b = &p->events[1];
    uint32_t n_complete[2];

    if (a->list.len != b->list.len)
        return "the short way gives another number of events";
    for (size_t i = 0; i < a->list.len; i++) {
        const struct ds4_event *x = &a->list.ptr[i], *y = &b->list.ptr[i];
        if (!same_event(x, y))
            return "the short way gives another event";
        if (!ds4_str_equal(ds4_event_text(a, x), ds4_event_text(b, y)))
            return "the short way gives another text";
    }
    if (ds4_stream_place(p->s[0]) != ds4_stream_place(p->s[1]))
        return "the short way ends in another place";
    if (ds4_stream_undecided(p->s[0]) != ds4_stream_undecided(p->s[1]))
        return "the short way waits for other text";
    if (ds4_stream_ended(p->s[0]) != ds4_stream_ended(p->s[1]))
        return "the short way does not end with the machine";
    if (ds4_stream_n_calls(p->s[0], &n_complete[0]) !=
            ds4_stream_n_calls(p->s[1], &n_complete[1]) ||
        n_complete[0] != n_complete[1])
        return "the short way counts other calls";
    if (memcmp(ds4_stream_rules(p->s[0]), ds4_stream_rules(p->s[1]),
               DS4_N_PARSE_RULES * sizeof(uint64_t)) != 0)
        return "the short way counts other deviations";
    return NULL;
}

/* What a tripwire does between two tokens. */
static const char *disturb(struct pair *p, uint64_t *seed)
{
    uint64_t r = parse_check_random(seed);
    size_t undecided = ds4_stream_undecided(p->s[1]), n = (size_t)(r >> 8) % (undecided + 1);

    if (r % 16 > 1 || ds4_stream_place(p->s[1]) == DS4_PLACE_MARKUP || ds4_stream_ended(p->s[1]) ||
        undecided != ds4_stream_undecided(p->s[0]))
        return NULL;
    for (int i = 0; i < 2; i++) {
        ds4_stream_take_back(p->s[i], n);
        if (r % 16 == 1 && ds4_stream_reopen(p->s[i], &p->events[i], NULL) != 0)
            return "reopening failed";
    }
    return NULL;
}

const char *parse_check_direct(const struct ds4_parse_config *config, struct ds4_str text,
                               enum ds4_engine_finish engine, uint64_t seed)
{
    struct ds4_parse_config each[2] = {*config, *config};
    uint64_t ids[2] = {seed, seed};
    bool disturbed = (parse_check_random(&seed) & 3) == 0;
    struct pair p = {0};
    const char *wrong = NULL;

    each[1].machine_only = true;
    for (int i = 0; i < 2; i++) {
        each[i].random = parse_check_fill;
        each[i].random_ctx = &ids[i];
        ds4_events_init(&p.events[i], MAX_TEXT_BYTES);
        p.s[i] = ds4_stream_new(&each[i], NULL);
        if (p.s[i] == NULL)
            wrong = "no parser";
    }
    for (size_t from = 0, to; from < text.len && wrong == NULL; from = to) {
        struct ds4_str piece;

        to = next_cut(text, from, &seed);
        piece = (struct ds4_str){text.ptr + from, to - from};
        for (int i = 0; i < 2; i++)
            if (feed_piece(p.s[i], piece, from, &p.events[i]) != 0)
                wrong = "feeding failed";
        if (wrong == NULL && disturbed)
            wrong = disturb(&p, &seed);
        if (wrong == NULL)
            wrong = compare_pair(&p);
        if (parse_check_random(&seed) % 4 != 0) {
            ds4_events_clear(&p.events[0]);
            ds4_events_clear(&p.events[1]);
        }
    }
    for (int i = 0; i < 2 && wrong == NULL; i++)
        if (ds4_stream_finish(p.s[i], engine, &p.events[i], NULL) != 0)
            wrong = "finishing failed";
    if (wrong == NULL)
        wrong = compare_pair(&p);
    for (int i = 0; i < 2; i++) {
        ds4_events_deinit(&p.events[i]);
        ds4_stream_free(p.s[i]);
    }
    return wrong;
}

#define LITERAL(s)                                                                                 \
    {                                                                                              \
        (s), sizeof(s) - 1                                                                         \
    }

const struct ds4_parse_tool parse_check_tools[3] = {
    {LITERAL("bash"), LITERAL("{\"properties\": {\"command\": {\"type\": \"string\"}, \"timeout\": "
                              "{\"type\": \"number\"}}, "
                              "\"required\": [\"command\"]}")},
    {LITERAL("edit"), LITERAL("{\"properties\": {\"path\": {\"type\": \"string\"}, \"edits\": "
                              "{\"type\": \"object\"}, \"opt\": "
                              "{\"type\": [\"boolean\", \"null\"]}}, \"required\": [\"path\"]}")},
    {LITERAL("now"), LITERAL("{}")},
};

const char *parse_check_read(const char *text, enum ds4_engine_finish engine,
                             uint64_t rules[DS4_N_PARSE_RULES])
{
    static char answer[1 << 16];
    uint64_t ids = 1;
    struct ds4_parse_config config = {
        .tools = parse_check_tools, .n_tools = 3, .random = parse_check_fill, .random_ctx = &ids};
    struct ds4_stream *s = ds4_stream_new(&config, NULL);
    struct ds4_events events;
    struct ds4_turn t;
    int n;

    ds4_events_init(&events, MAX_TEXT_BYTES);
    ds4_turn_init(&t, MAX_TEXT_BYTES);
    if (s == NULL || ds4_stream_feed(s, ds4_str_view(text), &events, NULL) != 0 ||
        ds4_stream_finish(s, engine, &events, NULL) != 0 || ds4_turn_add(&t, &events, NULL) != 0)
        abort();
    n = snprintf(answer, sizeof(answer), "%.*s|%.*s|", (int)t.reasoning.len, t.reasoning.ptr,
                 (int)t.content.len, t.content.ptr);
    for (size_t i = 0; i < t.calls.len; i++)
        n += snprintf(answer + n, sizeof(answer) - (size_t)n, "%s(%.*s%s", t.calls.ptr[i].name.ptr,
                      (int)t.calls.ptr[i].arguments.len, t.calls.ptr[i].arguments.ptr,
                      t.calls.ptr[i].incomplete ? "..." : ")");
    snprintf(answer + n, sizeof(answer) - (size_t)n, "|%s", ds4_finish_name(t.finish.reason));
    if (rules != NULL)
        memcpy(rules, ds4_stream_rules(s), DS4_N_PARSE_RULES * sizeof(*rules));
    ds4_turn_deinit(&t);
    ds4_events_deinit(&events);
    ds4_stream_free(s);
    return answer;
}

/* ds4-text parse and stream: the output parser behind a line-wise JSON interface.
 *
 * The chunks of a case may cut characters; like the detokenizer in the server, this side keeps back
 * an unfinished character, so the parser always sees whole ones.  Call ids come from a fixed seed:
 * the tool's output is a function of its input. */
#include "router/text_parse.h"

#include "common/arena.h"
#include "common/json_text.h"
#include "common/json_write.h"
#include "common/utf8.h"
#include "router/parse/stream.h"
#include "router/parse/turn.h"

#include <stdint.h>

#define MAX_CASE_BYTES   ((size_t)1 << 30)
#define MAX_RANDOM_CHUNK 24
#define ID_SEED          UINT64_C(0x6473342d74657874)
#define REPLACEMENT      DS4_STR("\xef\xbf\xbd")

/* ---- seeded numbers (splitmix64) ------------------------------------------------------------ */

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static void fill_random(void *ctx, void *out, size_t n)
{
    unsigned char *bytes = out;

    for (size_t i = 0; i < n; i++)
        bytes[i] = (unsigned char)next_random(ctx);
}

/* ---- the case ------------------------------------------------------------------------------- */

struct parse_case {
    struct ds4_arena arena;
    const struct ds4_jt_node *root;
    struct ds4_parse_config config;
    enum ds4_engine_finish engine;
    uint64_t id_state;
};

static struct ds4_str string_member(const struct ds4_jt_node *obj, const char *key)
{
    const struct ds4_jt_node *node = ds4_jt_find(obj, key);

    return node != NULL && node->type == DS4_JT_STRING ? node->str : (struct ds4_str){"", 0};
}

static const struct ds4_jt_node *list_member(const struct ds4_jt_node *obj, const char *key)
{
    const struct ds4_jt_node *node = ds4_jt_find(obj, key);

    return node != NULL && node->type == DS4_JT_ARRAY ? node : NULL;
}

static int read_tools(struct parse_case *c, struct ds4_err *err)
{
    const struct ds4_jt_node *list = list_member(c->root, "tools");
    struct ds4_parse_tool *tools;
    size_t n = 0;

    if (list == NULL || list->n_children == 0)
        return 0;
    tools = ds4_arena_take_array(&c->arena, (size_t)list->n_children, sizeof(*tools));
    if (tools == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "could not allocate %d tools", list->n_children);
    for (const struct ds4_jt_node *t = list->first; t != NULL; t = t->next) {
        const struct ds4_jt_node *function = ds4_jt_find(t, "function");
        const struct ds4_jt_node *schema = ds4_jt_find(function, "parameters");
        tools[n].name = string_member(function, "name");
        if (schema != NULL)
            tools[n].parameters = schema->raw;
        n++;
    }
    c->config.tools = tools;
    c->config.n_tools = n;
    return 0;
}

static int read_stops(struct parse_case *c, struct ds4_err *err)
{
    const struct ds4_jt_node *list = list_member(c->root, "stop");
    struct ds4_str *stops;
    size_t n = 0;

    if (list == NULL || list->n_children == 0)
        return 0;
    stops = ds4_arena_take_array(&c->arena, (size_t)list->n_children, sizeof(*stops));
    if (stops == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "could not allocate %d stop strings", list->n_children);
    for (const struct ds4_jt_node *t = list->first; t != NULL; t = t->next)
        if (t->type == DS4_JT_STRING)
            stops[n++] = t->str;
    c->config.stops = stops;
    c->config.n_stops = n;
    return 0;
}

static enum ds4_calls_mode read_tool_choice(const struct ds4_jt_node *root)
{
    const struct ds4_jt_node *node = ds4_jt_find(root, "tool_choice");

    if (node == NULL || node->type == DS4_JT_NULL)
        return DS4_CALLS_PARSED;
    if (node->type == DS4_JT_OBJECT || ds4_str_equal(node->str, DS4_STR("named")))
        return DS4_CALLS_NAMED;
    return ds4_str_equal(node->str, DS4_STR("none")) ? DS4_CALLS_AS_TEXT : DS4_CALLS_PARSED;
}

static int read_case(struct parse_case *c, struct ds4_str line,
                     const struct ds4_text_parse_options *options, struct ds4_err *err)
{
    *c = (struct parse_case){.id_state = ID_SEED};
    ds4_arena_init(&c->arena, MAX_CASE_BYTES);
    c->root = ds4_jt_parse(line, DS4_JT_MAX_DEPTH, &c->arena, err);
    if (c->root == NULL)
        return -1;
    if (c->root->type != DS4_JT_OBJECT)
        return ds4_fail(err, DS4_E_INVALID, "a case must be an object");
    c->engine = ds4_str_equal(string_member(c->root, "engine_finish"), DS4_STR("length"))
                    ? DS4_ENGINE_LENGTH
                    : DS4_ENGINE_STOP;
    c->config.starts_in_reasoning =
        ds4_str_equal(string_member(c->root, "mode"), DS4_STR("thinking"));
    c->config.spaced_tags = options->spaced_tags;
    c->config.calls_mode = read_tool_choice(c->root);
    c->config.random = fill_random;
    c->config.random_ctx = &c->id_state;
    if (read_tools(c, err) != 0)
        return -1;
    return read_stops(c, err);
}

/* ---- feeding -------------------------------------------------------------------------------- */

struct feeder {
    struct ds4_stream *stream;
    struct ds4_events events;
    struct ds4_turn turn;
    struct ds4_buf held; /* an unfinished character */
};

/* Storage first: a feeder may be torn down before its stream exists. */
static void feeder_init(struct feeder *f)
{
    *f = (struct feeder){0};
    ds4_events_init(&f->events, MAX_CASE_BYTES);
    ds4_turn_init(&f->turn, MAX_CASE_BYTES);
    ds4_buf_init(&f->held, MAX_CASE_BYTES);
}

static void feeder_deinit(struct feeder *f)
{
    ds4_stream_free(f->stream);
    ds4_events_deinit(&f->events);
    ds4_turn_deinit(&f->turn);
    ds4_buf_deinit(&f->held);
}

static int collect(struct feeder *f, struct ds4_err *err)
{
    int rc = ds4_turn_add(&f->turn, &f->events, err);

    ds4_events_clear(&f->events);
    return rc;
}

/* Feeds a chunk that may cut characters. */
static int feed(struct feeder *f, struct ds4_str chunk, struct ds4_err *err)
{
    struct ds4_str whole;

    (void)ds4_buf_append_str(&f->held, chunk);
    if (ds4_buf_check(&f->held, "chunk", err) != 0)
        return -1;
    whole = ds4_buf_view(&f->held);
    whole.len -= ds4_utf8_cut_tail(whole);
    if (ds4_stream_feed(f->stream, whole, &f->events, err) != 0)
        return -1;
    ds4_buf_consume(&f->held, whole.len);
    return collect(f, err);
}

static int finish(struct feeder *f, enum ds4_engine_finish engine, struct ds4_err *err)
{
    if (f->held.len > 0 && ds4_stream_feed(f->stream, REPLACEMENT, &f->events, err) != 0)
        return -1;
    if (ds4_stream_finish(f->stream, engine, &f->events, err) != 0)
        return -1;
    return collect(f, err);
}

/* ---- writing -------------------------------------------------------------------------------- */

static void write_calls(struct ds4_jw *w, const struct ds4_turn *t, const char *key, bool final)
{
    ds4_jw_key(w, key);
    ds4_jw_array(w);
    for (size_t i = 0; i < t->calls.len; i++) {
        ds4_jw_object(w);
        ds4_jw_key(w, "name");
        ds4_jw_str(w, ds4_buf_view(&t->calls.ptr[i].name));
        ds4_jw_key(w, "arguments");
        ds4_jw_str(w, ds4_buf_view(&t->calls.ptr[i].arguments));
        if (final && t->calls.ptr[i].incomplete) {
            ds4_jw_key(w, "incomplete");
            ds4_jw_bool(w, true);
        }
        ds4_jw_end(w);
    }
    ds4_jw_end(w);
}

static void write_texts(struct ds4_jw *w, const struct ds4_turn *t)
{
    ds4_jw_key(w, "reasoning");
    ds4_jw_str(w, ds4_buf_view(&t->reasoning));
    ds4_jw_key(w, "content");
    ds4_jw_str(w, ds4_buf_view(&t->content));
}

/* The members of a final answer; the object is open. */
static void write_final(struct ds4_jw *w, const struct ds4_turn *t)
{
    write_texts(w, t);
    write_calls(w, t, "tool_calls", true);
    ds4_jw_key(w, "finish_reason");
    ds4_jw_text(w, ds4_finish_name(t->finish.reason));
}

static void write_rules(struct ds4_jw *w, const struct ds4_stream *s)
{
    const uint64_t *used = ds4_stream_rules(s);

    ds4_jw_key(w, "rules");
    ds4_jw_object(w);
    for (int rule = 0; rule < DS4_N_PARSE_RULES; rule++)
        if (used[rule] > 0) {
            ds4_jw_key(w, ds4_parse_rule_name((enum ds4_parse_rule)rule));
            ds4_jw_int(w, (int64_t)used[rule]);
        }
    ds4_jw_end(w);
}

/* ---- parse ---------------------------------------------------------------------------------- */

static int feed_split(struct feeder *f, struct ds4_str text, const struct ds4_jt_node *offsets,
                      struct ds4_err *err)
{
    size_t from = 0;

    for (const struct ds4_jt_node *n = offsets->first; n != NULL; n = n->next) {
        double offset = ds4_jt_double(n);
        if (n->type != DS4_JT_NUMBER || !(offset >= (double)from && offset <= (double)text.len))
            return ds4_fail(err, DS4_E_INVALID, "split must hold rising offsets up to %zu",
                            text.len);
        if (feed(f, ds4_str_head(ds4_str_skip(text, from), (size_t)offset - from), err) != 0)
            return -1;
        from = (size_t)offset;
    }
    return feed(f, ds4_str_skip(text, from), err);
}

static int feed_random(struct feeder *f, struct ds4_str text, uint64_t seed, struct ds4_err *err)
{
    while (text.len > 0) {
        size_t n = 1 + (size_t)(next_random(&seed) % MAX_RANDOM_CHUNK);
        if (feed(f, ds4_str_head(text, n), err) != 0)
            return -1;
        text = ds4_str_skip(text, n);
    }
    return 0;
}

static int parse_output(struct feeder *f, const struct parse_case *c, struct ds4_err *err)
{
    const struct ds4_jt_node *text = ds4_jt_find(c->root, "model_output");
    const struct ds4_jt_node *split = list_member(c->root, "split");
    const struct ds4_jt_node *seed = ds4_jt_find(c->root, "seed");
    int rc;

    if (text == NULL || text->type != DS4_JT_STRING)
        return ds4_fail(err, DS4_E_INVALID, "model_output must be a string");
    if (split != NULL)
        rc = feed_split(f, text->str, split, err);
    else if (seed != NULL && seed->type == DS4_JT_NUMBER)
        rc = feed_random(f, text->str, (uint64_t)(int64_t)ds4_jt_double(seed), err);
    else
        rc = feed(f, text->str, err);
    return rc != 0 ? rc : finish(f, c->engine, err);
}

int ds4_text_parse_case(struct ds4_str line, const struct ds4_text_parse_options *options,
                        struct ds4_buf *out, struct ds4_err *err)
{
    struct parse_case c;
    struct feeder f;
    struct ds4_jw w;
    int rc = -1;

    feeder_init(&f);
    if (read_case(&c, line, options, err) != 0)
        goto done;
    f.stream = ds4_stream_new(&c.config, err);
    if (f.stream == NULL || parse_output(&f, &c, err) != 0)
        goto done;
    ds4_jw_init(&w, out);
    ds4_jw_object(&w);
    write_final(&w, &f.turn);
    if (options->rules)
        write_rules(&w, f.stream);
    ds4_jw_end(&w);
    rc = ds4_buf_check(out, "answer", err);
done:
    feeder_deinit(&f);
    ds4_arena_deinit(&c.arena);
    return rc;
}

/* ---- stream --------------------------------------------------------------------------------- */

static int stream_steps(struct feeder *f, const struct parse_case *c, struct ds4_jw *w,
                        struct ds4_err *err)
{
    const struct ds4_jt_node *steps = list_member(c->root, "steps");

    if (steps == NULL)
        return ds4_fail(err, DS4_E_INVALID, "steps must be a list");
    ds4_jw_key(w, "states");
    ds4_jw_array(w);
    for (const struct ds4_jt_node *n = steps->first; n != NULL; n = n->next) {
        if (feed(f, string_member(n, "chunk"), err) != 0)
            return -1;
        ds4_jw_object(w);
        write_texts(w, &f->turn);
        write_calls(w, &f->turn, "calls", false);
        ds4_jw_end(w);
    }
    ds4_jw_end(w);
    return finish(f, c->engine, err);
}

int ds4_text_stream_case(struct ds4_str line, const struct ds4_text_parse_options *options,
                         struct ds4_buf *out, struct ds4_err *err)
{
    size_t before = out->len;
    struct parse_case c;
    struct feeder f;
    struct ds4_jw w;
    int rc = -1;

    feeder_init(&f);
    if (read_case(&c, line, options, err) != 0)
        goto done;
    f.stream = ds4_stream_new(&c.config, err);
    if (f.stream == NULL)
        goto done;
    ds4_jw_init(&w, out);
    ds4_jw_object(&w);
    if (stream_steps(&f, &c, &w, err) != 0)
        goto done;
    ds4_jw_key(&w, "final");
    ds4_jw_object(&w);
    write_final(&w, &f.turn);
    ds4_jw_end(&w);
    ds4_jw_end(&w);
    rc = ds4_buf_check(out, "answer", err);
done:
    if (rc != 0)
        ds4_buf_truncate(out, before);
    feeder_deinit(&f);
    ds4_arena_deinit(&c.arena);
    return rc;
}

/* ---- tripwire ------------------------------------------------------------------------------- */

static void write_soup(struct ds4_jw *w, struct ds4_str window)
{
    size_t n_signatures, n_optional;
    const struct ds4_str *signatures = ds4_soup_signatures(&n_signatures, &n_optional);
    uint32_t found = ds4_soup_find(window, n_signatures - n_optional);

    ds4_jw_key(w, "soup");
    ds4_jw_array(w);
    for (size_t i = 0; i < n_signatures; i++)
        if ((found >> i & 1) != 0)
            ds4_jw_str(w, signatures[i]);
    ds4_jw_end(w);
}

static void write_fuzzy(struct ds4_jw *w, const char *key, const struct ds4_fuzzy_hit *hit)
{
    ds4_jw_key(w, key);
    if (!hit->hit) {
        ds4_jw_null(w);
        return;
    }
    ds4_jw_object(w);
    ds4_jw_key(w, "prefix");
    ds4_jw_text(w, hit->prefix);
    ds4_jw_key(w, "top_count");
    ds4_jw_int(w, (int64_t)hit->top_count);
    ds4_jw_key(w, "lines");
    ds4_jw_int(w, (int64_t)hit->n_lines);
    ds4_jw_end(w);
}

static void write_lines(struct ds4_jw *w, struct ds4_str window, ds4_count_tokens_fn count_tokens,
                        void *ctx)
{
    struct ds4_str exact = ds4_exact_find(window, count_tokens, ctx);
    struct ds4_fuzzy_hit fuzzy_15 = {0}, fuzzy_6 = {0};
    struct ds4_loop_knobs knobs;

    ds4_loop_knobs_default(&knobs);
    if (exact.len == 0) {
        fuzzy_15 = ds4_fuzzy_find(window, &knobs);
        knobs.fuzzy_min_hits = 6;
        fuzzy_6 = ds4_fuzzy_find(window, &knobs);
    }
    ds4_jw_key(w, "exact_line");
    if (exact.len > 0)
        ds4_jw_str(w, exact);
    else
        ds4_jw_null(w);
    write_fuzzy(w, "fuzzy_15", &fuzzy_15);
    write_fuzzy(w, "fuzzy_6", &fuzzy_6);
}

int ds4_text_tripwire_case(struct ds4_str line, ds4_count_tokens_fn count_tokens, void *ctx,
                           struct ds4_buf *out, struct ds4_err *err)
{
    const struct ds4_jt_node *root, *window;
    struct ds4_arena arena;
    struct ds4_jw w;
    int rc = -1;

    ds4_arena_init(&arena, MAX_CASE_BYTES);
    root = ds4_jt_parse(line, DS4_JT_MAX_DEPTH, &arena, err);
    if (root == NULL)
        goto done;
    window = ds4_jt_find(root, "window");
    if (window == NULL || window->type != DS4_JT_STRING) {
        rc = ds4_fail(err, DS4_E_INVALID, "window must be a string");
        goto done;
    }
    ds4_jw_init(&w, out);
    ds4_jw_object(&w);
    write_soup(&w, window->str);
    write_lines(&w, window->str, count_tokens, ctx);
    ds4_jw_end(&w);
    rc = ds4_buf_check(out, "answer", err);
done:
    ds4_arena_deinit(&arena);
    return rc;
}

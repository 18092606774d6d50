/* The output parser against its vectors, under many ways of cutting the text, and under mutation. */
#include "router/parse/stream.h"

#include "common/arena.h"
#include "common/json_text.h"
#include "common/json_write.h"
#include "router/text_parse.h"
#include "tests/support/parse_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define ARENA_BYTES      ((size_t)256 << 20)
#define ANSWER_BYTES     ((size_t)1 << 24)
#define N_RANDOM_SPLITS  20
#define N_MUTATION_EDITS 4

/* The long form has more: test_stream 200000. */
static int n_mutations = 20000;

struct vectors {
    struct ds4_arena arena;
    char *text;
    const struct ds4_jt_node *cases;
};

static void open_vectors(struct vectors *v, const char *path)
{
    struct ds4_err err = {0};
    const struct ds4_jt_node *root;
    FILE *file = fopen(path, "rb");
    size_t n;

    if (file == NULL)
        fail_msg("cannot open %s", path);
    v->text = malloc(1 << 20);
    n = fread(v->text, 1, 1 << 20, file);
    fclose(file);
    ds4_arena_init(&v->arena, ARENA_BYTES);
    root = ds4_jt_parse((struct ds4_str){v->text, n}, DS4_JT_MAX_DEPTH, &v->arena, &err);
    if (root == NULL)
        fail_msg("%s: %s", path, err.msg);
    v->cases = ds4_jt_find(root, "cases");
    assert_non_null(v->cases);
}

static void close_vectors(struct vectors *v)
{
    ds4_arena_deinit(&v->arena);
    free(v->text);
}

/* Equal as JSON values: order of keys in objects does not matter. */
static bool same(const struct ds4_jt_node *a, const struct ds4_jt_node *b)
{
    const struct ds4_jt_node *x, *y;

    if (a == NULL || b == NULL || a->type != b->type || a->n_children != b->n_children)
        return false;
    if (a->type == DS4_JT_STRING)
        return ds4_str_equal(a->str, b->str);
    if (a->type == DS4_JT_NUMBER)
        return ds4_str_equal(a->raw, b->raw);
    for (x = a->first, y = b->first; x != NULL; x = x->next, y = y->next)
        if (!same(x, a->type == DS4_JT_OBJECT ? ds4_jt_find_str(b, x->key) : y))
            return false;
    return true;
}

/* Runs one case with `extra` members put in front and compares with what it expects. */
static void expect_case(const struct ds4_jt_node *node, const char *extra, bool spaced)
{
    struct ds4_text_parse_options options = {.spaced_tags = spaced};
    const struct ds4_jt_node *name = ds4_jt_find(node, "name");
    struct ds4_err err = {0};
    struct ds4_arena arena;
    struct ds4_buf line, answer;

    ds4_arena_init(&arena, ARENA_BYTES);
    ds4_buf_init(&line, ANSWER_BYTES);
    ds4_buf_init(&answer, ANSWER_BYTES);
    assert_int_equal(ds4_buf_appendf(&line, "{%s", extra), 0);
    assert_int_equal(ds4_buf_append_str(&line, ds4_str_skip(node->raw, 1)), 0);
    if (ds4_text_parse_case(ds4_buf_view(&line), &options, &answer, &err) != 0)
        fail_msg("%.*s: %s", DS4_STR_ARG(name->str), err.msg);
    if (!same(ds4_jt_parse(ds4_buf_view(&answer), DS4_JT_MAX_DEPTH, &arena, NULL),
              ds4_jt_find(node, "expect")))
        fail_msg("%.*s %s\n got %s\nwant %.*s", DS4_STR_ARG(name->str), extra, answer.ptr,
                 DS4_STR_ARG(ds4_jt_find(node, "expect")->raw));
    ds4_buf_deinit(&line);
    ds4_buf_deinit(&answer);
    ds4_arena_deinit(&arena);
}

/* "split": at every character, or at every byte. */
static void split_everywhere(const struct ds4_jt_node *node, bool bytes, struct ds4_buf *out)
{
    struct ds4_str text = ds4_jt_find(node, "model_output")->str;
    const char *comma = "";

    ds4_buf_clear(out);
    assert_int_equal(ds4_buf_append_text(out, "\"split\": ["), 0);
    for (size_t i = 1; i < text.len; i++) {
        if (!bytes && ((unsigned char)text.ptr[i] & 0xc0) == 0x80)
            continue;
        assert_int_equal(ds4_buf_appendf(out, "%s%zu", comma, i), 0);
        comma = ",";
    }
    assert_int_equal(ds4_buf_append_text(out, "], "), 0);
}

static void expect_file(const char *path, bool spaced)
{
    struct vectors v;
    struct ds4_buf extra;

    open_vectors(&v, path);
    ds4_buf_init(&extra, ANSWER_BYTES);
    for (const struct ds4_jt_node *c = v.cases->first; c != NULL; c = c->next) {
        expect_case(c, "", spaced);
        split_everywhere(c, false, &extra);
        expect_case(c, extra.ptr, spaced);
        split_everywhere(c, true, &extra);
        expect_case(c, extra.ptr, spaced);
        for (int seed = 0; seed < N_RANDOM_SPLITS; seed++) {
            ds4_buf_clear(&extra);
            assert_int_equal(ds4_buf_appendf(&extra, "\"seed\": %d, ", seed), 0);
            expect_case(c, extra.ptr, spaced);
        }
    }
    ds4_buf_deinit(&extra);
    close_vectors(&v);
}

static void v4_outputs_parse_the_same_however_they_are_cut(void **state)
{
    (void)state;
    expect_file("tests/data/dsml/parse_v4.json", false);
}

static void v41_outputs_parse_the_same_however_they_are_cut(void **state)
{
    (void)state;
    expect_file("tests/data/dsml/parse_v41.json", true);
}

/* ---- timeliness ------------------------------------------------------------------------------ */

static bool text_reached(const struct ds4_jt_node *have, const struct ds4_jt_node *min)
{
    return have != NULL && ds4_str_starts(have->str, min->str);
}

static bool state_reached(const struct ds4_jt_node *have, const struct ds4_jt_node *min)
{
    const struct ds4_jt_node *call = ds4_jt_find(have, "calls")->first;

    if (!text_reached(ds4_jt_find(have, "reasoning"), ds4_jt_find(min, "reasoning")) ||
        !text_reached(ds4_jt_find(have, "content"), ds4_jt_find(min, "content")))
        return false;
    for (const struct ds4_jt_node *m = ds4_jt_find(min, "calls")->first; m != NULL; m = m->next) {
        if (call == NULL ||
            !ds4_str_equal(ds4_jt_find(call, "name")->str, ds4_jt_find(m, "name")->str) ||
            !text_reached(ds4_jt_find(call, "arguments"), ds4_jt_find(m, "arguments")))
            return false;
        call = call->next;
    }
    return true;
}

static void text_is_out_as_soon_as_it_is_certain(void **state)
{
    struct ds4_text_parse_options options = {0};
    struct vectors v;

    (void)state;
    open_vectors(&v, "tests/data/dsml/stream.json");
    for (const struct ds4_jt_node *c = v.cases->first; c != NULL; c = c->next) {
        const struct ds4_jt_node *answer, *have;
        struct ds4_buf out;
        int step = 0;

        ds4_buf_init(&out, ANSWER_BYTES);
        assert_int_equal(ds4_text_stream_case(c->raw, &options, &out, NULL), 0);
        answer = ds4_jt_parse(ds4_buf_view(&out), DS4_JT_MAX_DEPTH, &v.arena, NULL);
        assert_non_null(answer);
        have = ds4_jt_find(answer, "states")->first;
        for (const struct ds4_jt_node *s = ds4_jt_find(c, "steps")->first; s != NULL; s = s->next) {
            assert_non_null(have);
            if (!state_reached(have, ds4_jt_find(s, "min")))
                fail_msg("%.*s step %d: %.*s", DS4_STR_ARG(ds4_jt_find(c, "name")->str), step,
                         DS4_STR_ARG(have->raw));
            have = have->next;
            step++;
        }
        assert_true(same(ds4_jt_find(answer, "final"), ds4_jt_find(c, "final")));
        ds4_buf_deinit(&out);
    }
    close_vectors(&v);
}

/* The text of a case's steps, fed again in pieces of 1 to 12 characters. */
static void append_random_steps(const struct ds4_jt_node *steps, uint64_t seed, struct ds4_buf *out)
{
    struct ds4_buf text;
    struct ds4_str rest;

    ds4_buf_init(&text, ANSWER_BYTES);
    for (const struct ds4_jt_node *s = steps->first; s != NULL; s = s->next)
        assert_int_equal(ds4_buf_append_str(&text, ds4_jt_find(s, "chunk")->str), 0);
    assert_int_equal(ds4_buf_append_text(out, "\"steps\": ["), 0);
    for (rest = ds4_buf_view(&text); rest.len > 0;) {
        size_t n = 1 + (size_t)(parse_check_random(&seed) % 12);

        while (n < rest.len && ((unsigned char)rest.ptr[n] & 0xc0) == 0x80)
            n++;
        assert_int_equal(ds4_buf_append_text(out, "{\"chunk\": "), 0);
        assert_int_equal(ds4_jw_append_string(out, ds4_str_head(rest, n)), 0);
        rest = ds4_str_skip(rest, n);
        assert_int_equal(ds4_buf_append_text(out, rest.len > 0 ? "}, " : "}"), 0);
    }
    assert_int_equal(ds4_buf_append_text(out, "]"), 0);
    ds4_buf_deinit(&text);
}

static void streams_end_the_same_however_they_are_cut(void **state)
{
    struct ds4_text_parse_options options = {0};
    struct vectors v;

    (void)state;
    open_vectors(&v, "tests/data/dsml/stream.json");
    for (const struct ds4_jt_node *c = v.cases->first; c != NULL; c = c->next)
        for (uint64_t seed = 1; seed <= N_RANDOM_SPLITS; seed++) {
            struct ds4_buf line, out;

            ds4_buf_init(&line, ANSWER_BYTES);
            ds4_buf_init(&out, ANSWER_BYTES);
            /* The last member of a name counts. */
            assert_int_equal(ds4_buf_append(&line, c->raw.ptr, c->raw.len - 1), 0);
            assert_int_equal(ds4_buf_append_text(&line, ", "), 0);
            append_random_steps(ds4_jt_find(c, "steps"), seed, &line);
            assert_int_equal(ds4_buf_append_text(&line, "}"), 0);
            assert_int_equal(ds4_text_stream_case(ds4_buf_view(&line), &options, &out, NULL), 0);
            if (!same(
                    ds4_jt_find(ds4_jt_parse(ds4_buf_view(&out), DS4_JT_MAX_DEPTH, &v.arena, NULL),
                                "final"),
                    ds4_jt_find(c, "final")))
                fail_msg("%.*s seed %d", DS4_STR_ARG(ds4_jt_find(c, "name")->str), (int)seed);
            ds4_buf_deinit(&line);
            ds4_buf_deinit(&out);
        }
    close_vectors(&v);
}

/* ---- mutation -------------------------------------------------------------------------------- */

static const char *const pieces[] = {
    "<",
    ">",
    "</",
    "\n",
    "\n\n",
    " ",
    "{",
    "}",
    "\"",
    "```\n",
    "x",
    "{}",
    "{\"city\": \"a\"}",
    "<think>",
    "</think>",
    "<\xef\xbd\x9cUser\xef\xbd\x9c>",
    "<\xef\xbd\x9c"
    "DSML\xef\xbd\x9ctool_calls>",
    "</\xef\xbd\x9c"
    "DSML\xef\xbd\x9ctool_calls>",
    "<\xef\xbd\x9c"
    "DSML\xef\xbd\x9c calls>",
    "<|DSML|toolkit>",
    "</|DSML|toolkit>",
    "<\xef\xbd\x9c"
    "DSML\xef\xbd\x9cinvoke name=\"bash\">",
    "<\xef\xbd\x9c"
    "DSML\xef\xbd\x9cinvoke>",
    "</\xef\xbd\x9c"
    "DSML\xef\xbd\x9cinvoke>",
    "</\xef\xbd\x9c"
    "DSML\xef\xbd\x9cparameter>",
    "<\xef\xbd\x9c"
    "DSML\xef\xbd\x9cparameter name=\"command\" string=\"true\">",
    "<\xef\xbd\x9c"
    "DSML\xef\xbd\x9cparameter name=\"city\">",
    "<\xef\xbd\x9c"
    "DSML\xef\xbd\x9cparameter name=\"timeout\" string=\"false\">",
    "<\xef\xbd\x9c"
    "DSML\xef\xbd\x9cparameter name=\"arguments\" string=\"false\">",
    "<invoke name=\"bash\">",
    "</invoke>",
    "<parameter name=\"command\">",
    "</parameter>",
    "<parameter name=\"bash\">",
    "<tool_calls>",
    "</tool_calls>",
    "END",
    "\xe4\xbd\xa0",
};
#define N_PIECES (sizeof(pieces) / sizeof(pieces[0]))

static size_t at_character(struct ds4_str text, size_t at)
{
    while (at < text.len && ((unsigned char)text.ptr[at] & 0xc0) == 0x80)
        at++;
    return at;
}

/* Cuts, doubles or inserts at a random place. */
static void edit(struct ds4_buf *buf, uint64_t *seed)
{
    struct ds4_str text = ds4_buf_view(buf);
    size_t a = at_character(text, (size_t)(parse_check_random(seed) % (text.len + 1)));
    size_t b = at_character(text, a + (size_t)(parse_check_random(seed) % 60));
    const char *piece = pieces[parse_check_random(seed) % N_PIECES];
    struct ds4_buf out;

    b = b < text.len ? b : text.len;
    ds4_buf_init(&out, ANSWER_BYTES);
    (void)ds4_buf_append_str(&out, ds4_str_head(text, a));
    switch (parse_check_random(seed) % 4) {
    case 0: /* drop a..b */
        break;
    case 1: /* a..b twice */
        (void)ds4_buf_append(&out, text.ptr + a, b - a);
        b = a;
        break;
    default:
        (void)ds4_buf_append_text(&out, piece);
        b = a;
        break;
    }
    (void)ds4_buf_append_str(&out, ds4_str_skip(text, b));
    ds4_buf_deinit(buf);
    *buf = out;
}

static struct ds4_str tool_schema(const struct ds4_jt_node *tool)
{
    const struct ds4_jt_node *p = ds4_jt_find(ds4_jt_find(tool, "function"), "parameters");

    return p == NULL ? (struct ds4_str){"", 0} : p->raw;
}

static void mutate(const struct ds4_jt_node *node, uint64_t seed)
{
    struct ds4_parse_tool tools[8];
    struct ds4_str stop = DS4_STR("END");
    uint64_t ids = seed;
    struct ds4_parse_config config = {
        .tools = tools, .stops = &stop, .random = parse_check_fill, .random_ctx = &ids};
    const char *wrong;
    struct ds4_buf text;

    for (const struct ds4_jt_node *t = ds4_jt_find(node, "tools")->first; t != NULL; t = t->next)
        tools[config.n_tools++] =
            (struct ds4_parse_tool){.name = ds4_jt_find(ds4_jt_find(t, "function"), "name")->str,
                                    .parameters = tool_schema(t)};
    config.starts_in_reasoning = (parse_check_random(&seed) & 1) != 0;
    config.n_stops = parse_check_random(&seed) % 2;
    if (parse_check_random(&seed) % 4 == 0)
        config.hold_max_bytes = 40 + parse_check_random(&seed) % 200;
    ds4_buf_init(&text, ANSWER_BYTES);
    (void)ds4_buf_append_str(&text, ds4_jt_find(node, "model_output")->str);
    for (int n = 1 + (int)(parse_check_random(&seed) % N_MUTATION_EDITS); n > 0; n--)
        edit(&text, &seed);
    for (int engine = 0; engine < 2; engine++) {
        wrong = parse_check(&config, ds4_buf_view(&text), (enum ds4_engine_finish)engine, seed);
        if (wrong != NULL)
            fail_msg("%s\nengine %d hold %zu stops %zu reasoning %d text:\n%s", wrong, engine,
                     config.hold_max_bytes, config.n_stops, config.starts_in_reasoning, text.ptr);
    }
    ds4_buf_deinit(&text);
}

static void mutated_outputs_parse_the_same_however_they_are_cut(void **state)
{
    static const char *const files[] = {"tests/data/dsml/parse_v4.json",
                                        "tests/data/dsml/parse_v41.json"};
    uint64_t seed = 1;

    (void)state;
    for (int f = 0; f < 2; f++) {
        struct vectors v;
        int n = 0;

        open_vectors(&v, files[f]);
        while (n < n_mutations / 2)
            for (const struct ds4_jt_node *c = v.cases->first; c != NULL && n < n_mutations / 2;
                 c = c->next, n++)
                mutate(c, parse_check_random(&seed));
        close_vectors(&v);
    }
}

static void a_call_left_in_the_content_is_noticed(void **state)
{
    uint64_t ids = 1;
    const struct ds4_parse_config config = {
        .tools = parse_check_tools, .n_tools = 3, .random = parse_check_fill, .random_ctx = &ids};
    const struct ds4_str call = DS4_STR("Now:\n<｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n");
    const struct ds4_str fenced =
        DS4_STR("```\n<｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n```\n");

    (void)state;
    assert_non_null(parse_check_leak(&config, call, call));
    assert_null(parse_check_leak(&config, fenced, fenced));
    assert_null(parse_check_leak(&config, DS4_STR("other text"), call));
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(v4_outputs_parse_the_same_however_they_are_cut),
        cmocka_unit_test(v41_outputs_parse_the_same_however_they_are_cut),
        cmocka_unit_test(text_is_out_as_soon_as_it_is_certain),
        cmocka_unit_test(streams_end_the_same_however_they_are_cut),
        cmocka_unit_test(a_call_left_in_the_content_is_noticed),
        cmocka_unit_test(mutated_outputs_parse_the_same_however_they_are_cut),
    };

    if (argc > 1)
        n_mutations = (int)strtol(argv[1], NULL, 10);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

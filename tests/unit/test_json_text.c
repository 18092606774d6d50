/* JSON text: strict reading, duplicates, Python's printing. */
#include "common/json_text.h"

#include <stdio.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define ARENA_BYTES ((size_t)16 << 20)

static int start(void **state)
{
    static struct ds4_arena arena;

    ds4_arena_init(&arena, ARENA_BYTES);
    *state = &arena;
    return 0;
}

static int stop(void **state)
{
    ds4_arena_deinit(*state);
    return 0;
}

/* Expected values: json.dumps(json.loads(text), ensure_ascii=False) of Python 3.11. */
static void dumps_prints_as_python_does(void **state)
{
    static const char *const cases[][2] = {
        {"{\"a\":1,\"b\":[true,false,null]}", "{\"a\": 1, \"b\": [true, false, null]}"},
        {" [ ] ", "[]"},
        {"{ }", "{}"},
        {"{\"a\":1,\"b\":2,\"a\":{\"c\":3}}", "{\"a\": {\"c\": 3}, \"b\": 2}"},
        {"{\"\":1,\"x\":0,\"\":2,\"\":[3]}", "{\"\": [3], \"x\": 0}"},
        {"123456789012345678901234567890", "123456789012345678901234567890"},
        {"-0", "0"},
        {"-0.0", "-0.0"},
        {"[1e3,1E-7,1e16,1e15,1e22]", "[1000.0, 1e-07, 1e+16, 1000000000000000.0, 1e+22]"},
        {"[0.0001,0.00001,5e-324]", "[0.0001, 1e-05, 5e-324]"},
        {"[1e400,-1e400,1e-400]", "[Infinity, -Infinity, 0.0]"},
        {"[1.0,100,1.10,0.1e1]", "[1.0, 100, 1.1, 1.0]"},
        {"\"\\u0041\\/\\u00e9\\ud83d\\ude00\"", "\"A/\xc3\xa9\xf0\x9f\x98\x80\""},
        {"\"\\b\\f\\n\\r\\t\\u0000\\u001F\\u007f\"", "\"\\b\\f\\n\\r\\t\\u0000\\u001f\x7f\""},
        {"\"\\u2028\\\"\\\\\"", "\"\xe2\x80\xa8\\\"\\\\\""},
        {"\"\\ud800\"", "\"\xef\xbf\xbd\""},
    };
    struct ds4_buf out;
    const struct ds4_jt_node *node;
    struct ds4_err err = {0};

    ds4_buf_init(&out, 4096);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        node = ds4_jt_parse(ds4_str_view(cases[i][0]), DS4_JT_MAX_DEPTH, *state, &err);
        assert_non_null(node);
        ds4_buf_clear(&out);
        assert_int_equal(ds4_jt_dump(node, &out), 0);
        assert_string_equal(out.ptr, cases[i][1]);
    }
    ds4_buf_deinit(&out);
}

static void what_rfc_8259_forbids_is_refused(void **state)
{
    static const char *const cases[] = {
        "",
        " ",
        "[",
        "]",
        "[}",
        "{\"a\":1]",
        "[1,]",
        "{\"a\":1,}",
        "{,}",
        "[1 2]",
        "01",
        "-01",
        "1.",
        ".5",
        "+1",
        "-",
        "1e",
        "1e+",
        "0x1",
        "NaN",
        "Infinity",
        "-Infinity",
        "nul",
        "truex",
        "'a'",
        "\"a",
        "\"\\x\"",
        "\"\\u12\"",
        "\"\\u12g4\"",
        "{\"a\"}",
        "{\"a\":}",
        "{1:2}",
        "[1]x",
        "\"a\tb\"",
        "\"\xff\"",
        "\xef\xbb\xbf"
        "1",
        "\"\\",
        "[1,,2]",
        "// c\n1",
        "\"\xed\xa0\x80\"",
    };
    struct ds4_err err;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        err = (struct ds4_err){0};
        if (ds4_jt_parse(ds4_str_view(cases[i]), DS4_JT_MAX_DEPTH, *state, &err) != NULL)
            fail_msg("accepted: %s", cases[i]);
        assert_int_equal(err.code, DS4_E_INVALID);
        assert_false(ds4_jt_valid(ds4_str_view(cases[i]), DS4_JT_MAX_DEPTH));
    }
    assert_false(ds4_jt_valid((struct ds4_str){"1\0", 2}, DS4_JT_MAX_DEPTH));
    assert_false(ds4_jt_valid((struct ds4_str){"\"\\\0\"", 4}, DS4_JT_MAX_DEPTH));
}

static void depth_is_limited_as_asked(void **state)
{
    char text[2 * (DS4_JT_MAX_DEPTH + 1)];
    struct ds4_err err = {0};

    for (int32_t depth = 1; depth <= DS4_JT_MAX_DEPTH + 1; depth++) {
        struct ds4_str s = {text, (size_t)(2 * depth)};

        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        assert_int_equal(ds4_jt_valid(s, DS4_JT_ARGUMENT_DEPTH), depth <= DS4_JT_ARGUMENT_DEPTH);
        assert_int_equal(ds4_jt_valid(s, DS4_JT_MAX_DEPTH), depth <= DS4_JT_MAX_DEPTH);
        assert_int_equal(ds4_jt_valid(s, INT32_MAX), depth <= DS4_JT_MAX_DEPTH);
    }
    assert_null(ds4_jt_parse(DS4_STR("[[[1]]]"), 2, *state, &err));
    assert_string_equal(err.msg, "JSON nests deeper than 2 levels");
}

static void nodes_keep_the_text_and_the_duplicates(void **state)
{
    const struct ds4_jt_node *root = ds4_jt_parse(
        DS4_STR(" {\"a\" : 1.50 , \"b\":[ 1 ,\"x\\n\"], \"a\":{} } "), 8, *state, NULL);
    const struct ds4_jt_node *a = root->first, *b = a->next, *again = b->next;

    assert_int_equal(root->n_children, 3);
    assert_true(
        ds4_str_equal(root->raw, DS4_STR("{\"a\" : 1.50 , \"b\":[ 1 ,\"x\\n\"], \"a\":{} }")));
    assert_true(ds4_str_equal(a->raw, DS4_STR("1.50")));
    assert_ptr_equal(a->counts, again);
    assert_null(again->counts);
    assert_ptr_equal(b->counts, b);
    assert_true(ds4_str_equal(b->raw, DS4_STR("[ 1 ,\"x\\n\"]")));
    assert_true(ds4_str_equal(b->last->str, DS4_STR("x\n")));
    assert_ptr_equal(b->last->parent, b);
    assert_ptr_equal(ds4_jt_find(root, "a"), again);
    assert_null(ds4_jt_find(root, "c"));
    assert_null(ds4_jt_find(b, "a"));
    assert_null(ds4_jt_find(NULL, "a"));
    assert_true(ds4_jt_double(a) == 1.5);
    assert_true(ds4_jt_double(b) == 0);
}

static void keys_are_equal_after_decoding(void **state)
{
    const struct ds4_jt_node *root =
        ds4_jt_parse(DS4_STR("{\"\\u0061\": 1, \"a\": 2, \"a\\u0000\": 3}"), 8, *state, NULL);

    assert_true(ds4_jt_double(ds4_jt_find(root, "a")) == 2);
    assert_true(ds4_jt_double(ds4_jt_find_str(root, (struct ds4_str){"a\0", 2})) == 3);
}

static void many_members_are_resolved(void **state)
{
    const int32_t n = 20000, n_keys = 7000;
    struct ds4_buf text;
    const struct ds4_jt_node *root;
    struct ds4_err err = {0};
    int32_t counted = 0;
    char key[16];

    ds4_buf_init(&text, (size_t)1 << 20);
    for (int32_t i = 0; i < n; i++)
        (void)ds4_buf_appendf(&text, "%s\"k%d\":%d", i == 0 ? "{" : ",", i % n_keys, i);
    (void)ds4_buf_append_byte(&text, '}');
    root = ds4_jt_parse(ds4_buf_view(&text), 2, *state, &err);
    assert_non_null(root);
    for (const struct ds4_jt_node *m = root->first; m != NULL; m = m->next)
        counted += m->counts != NULL;
    assert_int_equal(counted, n_keys);
    (void)snprintf(key, sizeof(key), "k%d", 5999);
    assert_true(ds4_jt_double(ds4_jt_find(root, key)) == 5999 + 2 * n_keys);
    assert_true(ds4_jt_double(ds4_jt_find(root, "k6000")) == 6000 + n_keys);
    ds4_buf_deinit(&text);
}

static void a_full_arena_is_an_error_not_a_crash(void **state)
{
    struct ds4_arena small;
    struct ds4_err err = {0};

    (void)state;
    ds4_arena_init(&small, 300);
    assert_null(ds4_jt_parse(DS4_STR("[1,2,3,4,5,6,7,8]"), 8, &small, &err));
    assert_int_equal(err.code, DS4_E_TOO_LONG);
    ds4_arena_deinit(&small);
}

static void a_full_buffer_stops_the_dump(void **state)
{
    const struct ds4_jt_node *root = ds4_jt_parse(DS4_STR("[1,[2,[3]]]"), 8, *state, NULL);
    struct ds4_buf out;

    ds4_buf_init(&out, 5);
    assert_int_equal(ds4_jt_dump(root, &out), -1);
    ds4_buf_deinit(&out);
}

static void long_numbers_read_exactly(void **state)
{
    const struct ds4_jt_node *root = ds4_jt_parse(
        DS4_STR(
            "0.1000000000000000055511151231257827021181583404541015625000000000000000000000001"),
        1, *state, NULL);

    /* 0.1 is the double nearest to this text; one digit less precision would not change it, but a
     * text cut at the point would read 0. */
    assert_true(ds4_jt_double(root) == 0.1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(dumps_prints_as_python_does, start, stop),
        cmocka_unit_test_setup_teardown(what_rfc_8259_forbids_is_refused, start, stop),
        cmocka_unit_test_setup_teardown(depth_is_limited_as_asked, start, stop),
        cmocka_unit_test_setup_teardown(nodes_keep_the_text_and_the_duplicates, start, stop),
        cmocka_unit_test_setup_teardown(keys_are_equal_after_decoding, start, stop),
        cmocka_unit_test_setup_teardown(many_members_are_resolved, start, stop),
        cmocka_unit_test_setup_teardown(a_full_arena_is_an_error_not_a_crash, start, stop),
        cmocka_unit_test_setup_teardown(a_full_buffer_stops_the_dump, start, stop),
        cmocka_unit_test_setup_teardown(long_numbers_read_exactly, start, stop),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

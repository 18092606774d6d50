/* Arguments as JSON text: forms, coercion by schema, duplicates, wrapped objects. */
#include "router/parse/args.h"

#include "common/json_text.h"

#include <stdio.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define MAX_BYTES ((size_t)1 << 20)

static const char schema[] =
    "{\"type\": \"object\", \"properties\": {"
    "\"s\": {\"type\": \"string\"},"
    "\"n\": {\"type\": \"number\"},"
    "\"i\": {\"type\": \"integer\"},"
    "\"b\": {\"type\": \"boolean\"},"
    "\"sn\": {\"type\": [\"string\", \"null\"]},"
    "\"any\": {},"
    "\"e\": {\"enum\": [true, null]},"
    "\"alt\": {\"anyOf\": [{\"type\": \"string\"}, {\"oneOf\": [{\"type\": \"integer\"}]}]},"
    "\"bad\": 7},"
    "\"required\": [\"n\", \"s\"]}";

static int start(void **state)
{
    static struct ds4_tool tool;

    *state = &tool;
    return ds4_tool_init(&tool, DS4_STR("t"), ds4_str_view(schema), NULL);
}

static int stop(void **state)
{
    ds4_tool_deinit(*state);
    return 0;
}

static void value_is(const struct ds4_tool *tool, const char *name, const char *text,
                     enum ds4_arg_form form, const char *want)
{
    struct ds4_buf out;

    ds4_buf_init(&out, MAX_BYTES);
    (void)ds4_args_write_value(&out, tool, ds4_str_view(name), ds4_str_view(text), form);
    if (strcmp(out.ptr, want) != 0)
        fail_msg("%s=%s: got %s, want %s", name, text, out.ptr, want);
    ds4_buf_deinit(&out);
}

static void json_values_keep_their_spelling(void **state)
{
    value_is(*state, "n", " 1.50 ", DS4_ARG_JSON, "1.50");
    value_is(*state, "any", "\n{\"a\" : [1,2]}\n", DS4_ARG_JSON, "{\"a\" : [1,2]}");
    value_is(*state, "s", "12", DS4_ARG_JSON, "12");
    value_is(*state, "any", "1e5", DS4_ARG_UNTYPED, "1e5");
}

static void string_true_is_a_string_whatever_the_schema_says(void **state)
{
    value_is(*state, "n", " 5 ", DS4_ARG_STRING, "\" 5 \"");
    value_is(*state, "any", "a\"\\\n\x01", DS4_ARG_STRING, "\"a\\\"\\\\\\n\\u0001\"");
}

static void the_schema_decides_when_the_json_is_none(void **state)
{
    value_is(*state, "b", "True", DS4_ARG_JSON, "true");
    value_is(*state, "b", "FALSE", DS4_ARG_UNTYPED, "false");
    value_is(*state, "sn", "None", DS4_ARG_JSON, "null");
    value_is(*state, "sn", "NIL", DS4_ARG_JSON, "null");
    value_is(*state, "s", "None", DS4_ARG_JSON, "\"None\"");
    value_is(*state, "e", "True", DS4_ARG_JSON, "true");
    value_is(*state, "e", "none", DS4_ARG_JSON, "null");
    value_is(*state, "n", "True", DS4_ARG_JSON, "\"True\"");
    value_is(*state, "any", "True", DS4_ARG_JSON, "\"True\"");
    value_is(*state, "bad", "True", DS4_ARG_JSON, "\"True\"");
    value_is(*state, "nowhere", "yes", DS4_ARG_UNTYPED, "\"yes\"");
    value_is(*state, "s", "7", DS4_ARG_UNTYPED, "\"7\"");
    value_is(*state, "sn", "7", DS4_ARG_UNTYPED, "7");
}

static void nearly_numbers_become_numbers(void **state)
{
    static const char *const cases[][2] = {{"+0644", "644"},     {".5", "0.5"}, {"5.", "5"},
                                           {"-007.50", "-7.50"}, {"+0", "0"},   {"-.25", "-0.25"},
                                           {"000", "0"}};
    static const char *const strings[] = {".", "+", "", "1.2.3", "0x10", "1,000", "--1", "1 2"};
    char want[32];

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        value_is(*state, i % 2 ? "n" : "i", cases[i][0], DS4_ARG_JSON, cases[i][1]);
    value_is(*state, "alt", "+7", DS4_ARG_JSON, "7");
    for (size_t i = 0; i < sizeof(strings) / sizeof(strings[0]); i++) {
        snprintf(want, sizeof(want), "\"%s\"", strings[i]);
        value_is(*state, "n", strings[i], DS4_ARG_JSON, want);
    }
}

static void json_deeper_than_128_is_a_string(void **state)
{
    char text[2 * 129 + 1] = {0}, want[2 * 129 + 3] = {0};

    memset(text, '[', 128);
    memset(text + 128, ']', 128);
    value_is(*state, "any", text, DS4_ARG_JSON, text);
    memset(text, '[', 129);
    memset(text + 129, ']', 129);
    snprintf(want, sizeof(want), "\"%s\"", text);
    value_is(*state, "any", text, DS4_ARG_JSON, want);
}

static void object_is(const struct ds4_args *args, const struct ds4_tool *tool, const char *want)
{
    struct ds4_buf out;

    ds4_buf_init(&out, MAX_BYTES);
    (void)ds4_args_write(&out, args, tool);
    assert_string_equal(out.ptr, want);
    ds4_buf_deinit(&out);
}

static void the_first_of_two_values_stays(void **state)
{
    struct ds4_args args;

    ds4_args_init(&args, MAX_BYTES);
    object_is(&args, *state, "{}");
    assert_true(ds4_args_add(&args, DS4_STR("s"), DS4_STR("a"), DS4_ARG_STRING));
    assert_true(ds4_args_add(&args, DS4_STR(""), DS4_STR("1"), DS4_ARG_JSON));
    assert_false(ds4_args_add(&args, DS4_STR("s"), DS4_STR("b"), DS4_ARG_STRING));
    object_is(&args, *state, "{\"s\": \"a\", \"\": 1}");
    ds4_args_deinit(&args);
}

static void many_names_are_found_again(void **state)
{
    struct ds4_args args;
    char name[16];

    (void)state;
    ds4_args_init(&args, MAX_BYTES);
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < 3000; i++) {
            snprintf(name, sizeof(name), "k%d", i);
            assert_int_equal(ds4_args_add(&args, ds4_str_view(name), DS4_STR("v"), DS4_ARG_STRING),
                             round == 0);
        }
    ds4_args_clear(&args);
    assert_false(ds4_args_has(&args, DS4_STR("k1")));
    ds4_args_deinit(&args);
}

/* The unwrapped object, or "" if nothing was unwrapped. */
static void unwraps_to(const struct ds4_tool *tool, const char *name, const char *text,
                       enum ds4_arg_form form, const char *want)
{
    struct ds4_args args;
    struct ds4_buf out;

    ds4_buf_init(&out, MAX_BYTES);
    ds4_args_init(&args, MAX_BYTES);
    assert_true(ds4_args_add(&args, ds4_str_view(name), ds4_str_view(text), form));
    assert_int_equal(ds4_args_unwrap(&out, &args, tool), want[0] != '\0');
    assert_string_equal(out.ptr == NULL ? "" : out.ptr, want);
    ds4_args_deinit(&args);
    ds4_buf_deinit(&out);
}

static void a_lone_wrapper_argument_is_opened(void **state)
{
    unwraps_to(*state, "arguments", " {\"s\": 1, \"n\":2} ", DS4_ARG_JSON, "{\"s\": 1, \"n\":2}");
    unwraps_to(*state, "input", "{\"s\":1}", DS4_ARG_STRING, "{\"s\":1}");
    unwraps_to(*state, "input", "\"{\\\"s\\\":1}\"", DS4_ARG_UNTYPED, "{\"s\":1}");
    unwraps_to(*state, "arguments", "{\"foreign\": 1}", DS4_ARG_JSON, "");
    unwraps_to(*state, "arguments", "[1]", DS4_ARG_JSON, "");
    unwraps_to(*state, "arguments", "{\"s\":", DS4_ARG_JSON, "");
    unwraps_to(*state, "s", "{\"s\":1}", DS4_ARG_JSON, "");
    unwraps_to(NULL, "arguments", "{\"s\":1}", DS4_ARG_JSON, "");
}

static void the_primary_parameter_is_the_first_required_string(void **state)
{
    static const char *const cases[][2] = {
        {"{\"properties\": {\"a\": {\"type\": \"number\"}}, \"required\": [\"z\", \"a\"]}", "a"},
        {"{\"properties\": {\"a\": {\"type\": \"number\"}, \"b\": {\"type\": \"string\"}}}", "b"},
        {"{\"properties\": {\"a\": {\"type\": \"number\"}}}", "a"},
        {"{\"required\": [\"z\"]}", "z"},
        {"{\"properties\": {\"a\": {}}, \"required\": [\"a\"]}", "a"},
    };
    struct ds4_tool tool;

    assert_true(ds4_str_equal(*ds4_tool_primary(*state), DS4_STR("s")));
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(ds4_tool_init(&tool, DS4_STR("t"), ds4_str_view(cases[i][0]), NULL), 0);
        assert_true(ds4_str_equal(*ds4_tool_primary(&tool), ds4_str_view(cases[i][1])));
        ds4_tool_deinit(&tool);
    }
}

static void a_malformed_schema_requires_nothing(void **state)
{
    static const char *const schemas[] = {"",
                                          "{",
                                          "[]",
                                          "null",
                                          "{\"required\": \"a\"}",
                                          "{\"required\": [\"a\", 3], \"properties\": []}"};
    struct ds4_tool tool;

    (void)state;
    for (size_t i = 0; i < sizeof(schemas) / sizeof(schemas[0]); i++) {
        assert_int_equal(ds4_tool_init(&tool, DS4_STR("t"), ds4_str_view(schemas[i]), NULL), 0);
        assert_int_equal(tool.n_required, 0);
        assert_int_equal(tool.n_properties, 0);
        assert_null(ds4_tool_primary(&tool));
        ds4_tool_deinit(&tool);
    }
}

/* anyOf nested 12 deep around a boolean: read to depth 8, no further, and without recursion. */
static void alternatives_are_read_to_depth_eight(void **state)
{
    struct ds4_tool tool;
    struct ds4_buf text;

    (void)state;
    ds4_buf_init(&text, MAX_BYTES);
    for (int depth = 7; depth <= 12; depth++) {
        ds4_buf_clear(&text);
        (void)ds4_buf_append_text(&text, "{\"properties\":{\"p\":");
        for (int d = 0; d < depth; d++)
            (void)ds4_buf_append_text(&text, "{\"anyOf\":[");
        (void)ds4_buf_append_text(&text, "{\"type\":\"boolean\"}");
        for (int d = 0; d < depth; d++)
            (void)ds4_buf_append_text(&text, "]}");
        (void)ds4_buf_append_text(&text, "}}");
        assert_int_equal(ds4_tool_init(&tool, DS4_STR("t"), ds4_buf_view(&text), NULL), 0);
        assert_int_equal(tool.properties[0].types, depth <= 8 ? DS4_TYPE_BOOLEAN : 0);
        ds4_tool_deinit(&tool);
    }
    ds4_buf_deinit(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(json_values_keep_their_spelling, start, stop),
        cmocka_unit_test_setup_teardown(string_true_is_a_string_whatever_the_schema_says, start,
                                        stop),
        cmocka_unit_test_setup_teardown(the_schema_decides_when_the_json_is_none, start, stop),
        cmocka_unit_test_setup_teardown(nearly_numbers_become_numbers, start, stop),
        cmocka_unit_test_setup_teardown(json_deeper_than_128_is_a_string, start, stop),
        cmocka_unit_test_setup_teardown(the_first_of_two_values_stays, start, stop),
        cmocka_unit_test(many_names_are_found_again),
        cmocka_unit_test_setup_teardown(a_lone_wrapper_argument_is_opened, start, stop),
        cmocka_unit_test_setup_teardown(the_primary_parameter_is_the_first_required_string, start,
                                        stop),
        cmocka_unit_test(a_malformed_schema_requires_nothing),
        cmocka_unit_test(alternatives_are_read_to_depth_eight),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

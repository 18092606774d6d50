/* The strict grammar: what a block yields when the model forgets things, and when it is cut. */
#include "tests/support/parse_check.h"

#include <stdio.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define OPEN   "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"bash\">\n"
#define EDIT   "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"edit\">\n"
#define STRING "<｜DSML｜parameter name=\"command\" string=\"true\">"
#define JSON   "<｜DSML｜parameter name=\"timeout\" string=\"false\">"
#define INPUT  "<｜DSML｜parameter name=\"input\" string=\"false\">{\"command\": \"a\"}" PARAM
#define PARAM  "</｜DSML｜parameter>"
#define INVOKE "</｜DSML｜invoke>"
#define BLOCK  "</｜DSML｜tool_calls>"
#define CLOSE  "\n" INVOKE "\n" BLOCK

static uint64_t rules[DS4_N_PARSE_RULES];

static void reads(const char *text, const char *want)
{
    assert_string_equal(parse_check_read(text, DS4_ENGINE_STOP, rules), want);
}

static void cut_reads(const char *text, const char *want)
{
    assert_string_equal(parse_check_read(text, DS4_ENGINE_LENGTH, rules), want);
}

static void a_plain_block_uses_no_other_rule(void **state)
{
    (void)state;
    reads("Hm.\n\n" OPEN STRING "ls" PARAM CLOSE, "|Hm.|bash({\"command\": \"ls\"})|tool_calls");
    for (int r = 0; r < DS4_N_PARSE_RULES; r++)
        assert_int_equal(rules[r], r == DS4_RULE_BLOCK_EXACT);
}

static void another_spelling_of_the_wrapper_is_counted(void **state)
{
    (void)state;
    reads("<｜DSML｜ calls><｜DSML｜invoke name=\"now\">" INVOKE BLOCK, "||now({})|tool_calls");
    assert_int_equal(rules[DS4_RULE_BLOCK_NEAR], 1);
    assert_int_equal(rules[DS4_RULE_BLOCK_EXACT], 0);
}

static void a_value_keeps_everything_but_the_newline_before_a_foreign_terminator(void **state)
{
    (void)state;
    reads(OPEN STRING "\n a \n\n" PARAM CLOSE,
          "||bash({\"command\": \"\\n a \\n\\n\"})|tool_calls");
    reads(OPEN STRING "a\n\n" CLOSE, "||bash({\"command\": \"a\\n\\n\"})|tool_calls");
    reads(OPEN STRING "a\n" INVOKE BLOCK, "||bash({\"command\": \"a\"})|tool_calls");
    reads(OPEN STRING INVOKE BLOCK, "||bash({\"command\": \"\"})|tool_calls");
}

static void any_other_tag_in_a_value_is_data(void **state)
{
    (void)state;
    reads(OPEN STRING "<think></｜DSML｜x><｜DSML｜tool_calls></invoke><｜User｜>" PARAM CLOSE,
          "||bash({\"command\": \"<think></｜DSML｜x><｜DSML｜tool_calls></invoke><｜User｜>\"})"
          "|tool_calls");
}

static void a_parameter_opened_in_plain_form_ends_in_plain_form(void **state)
{
    (void)state;
    reads(OPEN "<parameter name=\"command\">a</parameter>\n</invoke></tool_calls> b",
          "| b|bash({\"command\": \"a\"})|tool_calls");
    reads(OPEN "<parameter name=\"command\">a" PARAM CLOSE,
          "||bash({\"command\": \"a\"})|tool_calls");
}

static void a_repeated_parameter_is_dropped_and_counted(void **state)
{
    (void)state;
    reads(OPEN STRING "a" PARAM JSON "1" PARAM STRING "b" PARAM JSON "2" PARAM CLOSE,
          "||bash({\"command\": \"a\", \"timeout\": 1})|tool_calls");
    assert_int_equal(rules[DS4_RULE_DUP_PARAM], 2);
}

static void a_parameter_without_a_name_vanishes(void **state)
{
    (void)state;
    reads(OPEN "<｜DSML｜parameter string=\"true\">x" PARAM STRING "a" PARAM CLOSE,
          "||bash({\"command\": \"a\"})|tool_calls");
}

static void a_value_the_schema_decides_is_counted(void **state)
{
    (void)state;
    reads(OPEN STRING "a" PARAM JSON "+05" PARAM CLOSE,
          "||bash({\"command\": \"a\", \"timeout\": 5})|tool_calls");
    assert_int_equal(rules[DS4_RULE_COERCED_PARAM], 1);
}

static void a_first_parameter_that_wraps_is_unwrapped_only_alone(void **state)
{
    (void)state;
    reads(OPEN INPUT CLOSE, "||bash({\"command\": \"a\"})|tool_calls");
    reads(OPEN INPUT JSON "1" PARAM CLOSE,
          "||bash({\"input\": {\"command\": \"a\"}, \"timeout\": 1})|tool_calls");
}

static void a_json_body_stands_for_the_parameters_only_at_the_start(void **state)
{
    (void)state;
    reads(OPEN " {\"command\": \"a\",\"x\" : 1} " CLOSE,
          "||bash({\"command\": \"a\",\"x\" : 1})|tool_calls");
    reads(OPEN "{\"command\": }" STRING "b" PARAM CLOSE, "||bash({\"command\": \"b\"})|tool_calls");
    reads(OPEN "x {\"command\": \"a\"}" CLOSE, "||bash({})|tool_calls");
}

static void loose_parameters_under_an_object_become_its_members(void **state)
{
    (void)state;
    reads(
        EDIT "<｜DSML｜parameter name=\"path\">p" PARAM "<｜DSML｜parameter name=\"edits\">\n"
             "<｜DSML｜parameter name=\"a\">1" PARAM
             "<｜DSML｜parameter name=\"b\" string=\"false\">2" PARAM PARAM
             "<｜DSML｜parameter name=\"opt\" string=\"false\">True" PARAM CLOSE,
        "||edit({\"path\": \"p\", \"edits\": {\"a\": \"1\", \"b\": 2}, \"opt\": true})|tool_calls");
    /* A string parameter holds no members: its value ends where the next parameter begins. */
    reads(OPEN "<｜DSML｜parameter name=\"command\">\n" JSON "1" PARAM CLOSE,
          "||bash({\"command\": \"\", \"timeout\": 1})|tool_calls");
}

static void a_nameless_invoke_is_inferred_or_nothing(void **state)
{
    (void)state;
    reads("<｜DSML｜tool_calls><｜DSML｜invoke>" JSON "1" PARAM STRING "a" PARAM CLOSE,
          "||bash({\"timeout\": 1, \"command\": \"a\"})|tool_calls");
    assert_int_equal(rules[DS4_RULE_RECOVERED_NAMELESS], 1);
    reads("<｜DSML｜tool_calls><｜DSML｜invoke>" JSON "1" PARAM CLOSE, "|||stop");
    assert_int_equal(rules[DS4_RULE_REJECTED_AMBIGUOUS], 1);
}

/* The tool that needs nothing was called with nothing: the body was read and forgotten. */
static void a_nameless_json_body_keeps_its_arguments(void **state)
{
    static const char opener[] = "<｜DSML｜tool_calls>\n<｜DSML｜invoke>\n";
    char text[512];

    (void)state;
    (void)snprintf(text, sizeof(text), "%s{\"command\": \"a\", \"timeout\": 2}" CLOSE, opener);
    reads(text, "||bash({\"command\": \"a\", \"timeout\": 2})|tool_calls");
    assert_int_equal(rules[DS4_RULE_RECOVERED_NAMELESS], 1);
    (void)snprintf(text, sizeof(text), "%s{\"command\": \"a\"}\n" JSON "3" PARAM, opener);
    reads(text, "||bash({\"command\": \"a\"})|tool_calls");
    (void)snprintf(text, sizeof(text), "%s{\"where\": \"a\"}" CLOSE, opener);
    reads(text, "|||stop");
    (void)snprintf(text, sizeof(text), "%s{}" CLOSE, opener);
    reads(text, "||now({})|tool_calls");
}

static void a_turn_marker_between_parameters_closes_the_call(void **state)
{
    (void)state;
    reads(OPEN STRING "a" PARAM "<｜end▁of▁sentence｜>" JSON "1" PARAM CLOSE,
          "||bash({\"command\": \"a\"})|tool_calls");
}

static void text_after_an_unclosed_block_is_content_unless_cut(void **state)
{
    (void)state;
    reads(OPEN STRING "a" PARAM INVOKE "\nDone </think>so.",
          "|\nDone so.|bash({\"command\": \"a\"})|tool_calls");
    cut_reads(OPEN STRING "a" PARAM INVOKE "\nDone.", "||bash({\"command\": \"a\"})|length");
    reads(OPEN STRING "a" PARAM INVOKE " x " BLOCK " y",
          "| y|bash({\"command\": \"a\"})|tool_calls");
}

static void a_cut_call_stays_unterminated(void **state)
{
    (void)state;
    cut_reads(OPEN, "||bash(...|length");
    reads(OPEN, "||bash(...|length");
    cut_reads(OPEN STRING "a\n</｜DSML｜para", "||bash({\"command\": \"a...|length");
    reads(OPEN STRING "a" PARAM JSON "12", "||bash({\"command\": \"a\"...|length");
    reads(OPEN "{\"command\": \"a", "||bash(...|length");
    reads(OPEN "{\"command\": \"a\"}\n", "||bash({\"command\": \"a\"})|tool_calls");
    reads("<｜DSML｜tool_calls><｜DSML｜invoke name=\"now\">", "||now({})|tool_calls");
    cut_reads("<｜DSML｜tool_calls><｜DSML｜invoke name=\"now\">", "||now(...|length");
    assert_int_equal(rules[DS4_RULE_TRUNCATED], 1);
}

static void an_argument_beyond_the_hold_ends_the_message(void **state)
{
    static char value[3000];
    uint64_t ids = 1;
    struct ds4_parse_config config = {.tools = parse_check_tools,
                                      .n_tools = 3,
                                      .hold_max_bytes = 1000,
                                      .random = parse_check_fill,
                                      .random_ctx = &ids};
    struct ds4_turn turn;
    struct ds4_buf text;

    (void)state;
    memset(value, '1', sizeof(value) - 1);
    ds4_buf_init(&text, 1 << 16);
    (void)ds4_buf_appendf(&text, "%s%s%s%s%s%s", OPEN, STRING, "a" PARAM, JSON, value, PARAM CLOSE);
    ds4_turn_init(&turn, 1 << 16);
    assert_int_equal(parse_check_whole(&config, ds4_buf_view(&text), DS4_ENGINE_STOP, &turn), 0);
    assert_int_equal(turn.finish.reason, DS4_FINISH_LENGTH);
    assert_true(turn.finish.truncated_tool_args);
    assert_string_equal(turn.calls.ptr[0].arguments.ptr, "{\"command\": \"a\"");
    assert_null(parse_check(&config, ds4_buf_view(&text), DS4_ENGINE_STOP, 7));
    ds4_turn_deinit(&turn);
    ds4_buf_deinit(&text);
}

static void call_ids_differ_and_have_the_promised_form(void **state)
{
    uint64_t ids = 1;
    struct ds4_parse_config config = {
        .tools = parse_check_tools, .n_tools = 3, .random = parse_check_fill, .random_ctx = &ids};
    struct ds4_turn turn;

    (void)state;
    ds4_turn_init(&turn, 1 << 16);
    assert_int_equal(
        parse_check_whole(
            &config,
            DS4_STR(OPEN STRING "a" PARAM INVOKE "<｜DSML｜invoke name=\"now\">" INVOKE BLOCK),
            DS4_ENGINE_STOP, &turn),
        0);
    assert_int_equal(turn.calls.len, 2);
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(strlen(turn.calls.ptr[i].id), DS4_CALL_ID_CHARS);
        assert_memory_equal(turn.calls.ptr[i].id, "call_", 5);
        assert_int_equal(strspn(turn.calls.ptr[i].id + 5, "abcdefghijklmnopqrstuvwxyz"
                                                          "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"),
                         24);
    }
    assert_string_not_equal(turn.calls.ptr[0].id, turn.calls.ptr[1].id);
    ds4_turn_deinit(&turn);
}

/* Between members a closer of any word ends the object; the call once waited for one it knew and was cut. */
static void any_closer_ends_an_object_of_loose_parameters(void **state)
{
    static const char start[] =
        EDIT "<｜DSML｜parameter name=\"path\" string=\"true\">a" PARAM
             "<｜DSML｜parameter name=\"edits\">\n<｜DSML｜parameter name=\"x\">1" PARAM "\n";
    static const char *const closers[] = {CLOSE, BLOCK, "</｜DSML｜tools>", "</｜DSML｜ calls>"};
    char text[1024];

    (void)state;
    for (size_t i = 0; i < sizeof(closers) / sizeof(closers[0]); i++) {
        (void)snprintf(text, sizeof(text), "%s%s", start, closers[i]);
        reads(text, "||edit({\"path\": \"a\", \"edits\": {\"x\": \"1\"}})|tool_calls");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plain_block_uses_no_other_rule),
        cmocka_unit_test(another_spelling_of_the_wrapper_is_counted),
        cmocka_unit_test(a_value_keeps_everything_but_the_newline_before_a_foreign_terminator),
        cmocka_unit_test(any_other_tag_in_a_value_is_data),
        cmocka_unit_test(a_parameter_opened_in_plain_form_ends_in_plain_form),
        cmocka_unit_test(a_repeated_parameter_is_dropped_and_counted),
        cmocka_unit_test(a_parameter_without_a_name_vanishes),
        cmocka_unit_test(a_value_the_schema_decides_is_counted),
        cmocka_unit_test(a_first_parameter_that_wraps_is_unwrapped_only_alone),
        cmocka_unit_test(a_json_body_stands_for_the_parameters_only_at_the_start),
        cmocka_unit_test(loose_parameters_under_an_object_become_its_members),
        cmocka_unit_test(a_nameless_invoke_is_inferred_or_nothing),
        cmocka_unit_test(a_nameless_json_body_keeps_its_arguments),
        cmocka_unit_test(any_closer_ends_an_object_of_loose_parameters),
        cmocka_unit_test(a_turn_marker_between_parameters_closes_the_call),
        cmocka_unit_test(text_after_an_unclosed_block_is_content_unless_cut),
        cmocka_unit_test(a_cut_call_stays_unterminated),
        cmocka_unit_test(an_argument_beyond_the_hold_ends_the_message),
        cmocka_unit_test(call_ids_differ_and_have_the_promised_form),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

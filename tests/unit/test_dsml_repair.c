/* Calls outside a strict block: each tolerated shape passes its gates or stays text, whole. */
#include "tests/support/parse_check.h"

#include <stdio.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define BASH   "<｜DSML｜invoke name=\"bash\">"
#define NOW    "<｜DSML｜invoke name=\"now\">"
#define STRING "<｜DSML｜parameter name=\"command\" string=\"true\">"
#define PARAM  "</｜DSML｜parameter>"
#define INVOKE "</｜DSML｜invoke>"
#define BLOCK  "</｜DSML｜tool_calls>"
#define CALL   BASH STRING "a" PARAM INVOKE
#define CALLED "bash({\"command\": \"a\"})"

static uint64_t rules[DS4_N_PARSE_RULES];

static void reads(const char *text, const char *want)
{
    assert_string_equal(parse_check_read(text, DS4_ENGINE_STOP, rules), want);
}

static void cut_reads(const char *text, const char *want)
{
    assert_string_equal(parse_check_read(text, DS4_ENGINE_LENGTH, rules), want);
}

/* The text comes out as it went in, and the rule was used. */
static void stays_text(const char *text, enum ds4_parse_rule rule)
{
    char want[2048];

    (void)snprintf(want, sizeof(want), "|%s||stop", text);
    reads(text, want);
    assert_true(rules[rule] > 0);
}

static void a_bare_call_swallows_its_outer_closer_once(void **state)
{
    (void)state;
    reads("x\n" CALL "\n" BLOCK "\n\ny", "|x\n\ny|" CALLED "|tool_calls");
    reads(CALL "</function_calls>y", "|y|" CALLED "|tool_calls");
    reads(CALL " y</tool_calls>", "| y</tool_calls>|" CALLED "|tool_calls");
    reads(CALL CALL BLOCK "y", "|y|" CALLED CALLED "|tool_calls");
    assert_int_equal(rules[DS4_RULE_RECOVERED_INVOKE], 2);
}

static void what_follows_the_tag_decides(void **state)
{
    (void)state;
    stays_text("Use " BASH " now", DS4_RULE_REJECTED_PROSE);
    stays_text("Use " BASH "<｜DSML｜tool_calls> x", DS4_RULE_REJECTED_PROSE);
    stays_text("Use " BASH STRING "a" PARAM " or " INVOKE, DS4_RULE_REJECTED_PROSE);
    stays_text("Use <｜DSML｜invoke name=\"bas\">" STRING "a" PARAM INVOKE,
               DS4_RULE_REJECTED_UNDECLARED);
    reads("Use " BASH "</think>.", "|Use " BASH ".||stop");
}

/* Only blanks lie between the text closer and the wrapper's: it is text, too.  The blanks once counted as text
 * when they came with the closer in a piece of their own, and the closer vanished. */
static void blanks_that_come_with_a_closer_are_still_blanks(void **state)
{
    static const char text[] = "Use " BASH "th" INVOKE "  " BLOCK " y";
    uint64_t ids = 1;
    const struct ds4_parse_config config = {
        .tools = parse_check_tools, .n_tools = 3, .random = parse_check_fill, .random_ctx = &ids};

    (void)state;
    reads(text, "|Use " BASH "th" INVOKE "  " BLOCK " y||stop");
    for (uint64_t seed = 0; seed < 1000; seed++) {
        const char *wrong = parse_check(&config, DS4_STR(text), DS4_ENGINE_STOP, seed);
        if (wrong != NULL)
            fail_msg("seed %d: %s", (int)seed, wrong);
    }
}

static void gates_keep_the_whole_span_as_text(void **state)
{
    (void)state;
    stays_text(BASH "<｜DSML｜parameter name=\"timeout\">1" PARAM INVOKE BLOCK,
               DS4_RULE_REJECTED_REQUIRED);
    stays_text("Write " NOW INVOKE, DS4_RULE_REJECTED_INLINE);
    stays_text("```\n" CALL "\n", DS4_RULE_REJECTED_FENCE);
    stays_text("<｜DSML｜parameter name=\"command\">a" PARAM, DS4_RULE_REJECTED_UNCLOSED);
    reads("```\nx\n```\n" CALL, "|```\nx\n```|" CALLED "|tool_calls");
    reads("Write\n" NOW INVOKE, "|Write|now({})|tool_calls");
}

static void closers_of_openers_that_became_text_are_text(void **state)
{
    (void)state;
    reads("a " BASH " b" INVOKE INVOKE "c", "|a " BASH " b" INVOKE "c||stop");
    assert_int_equal(rules[DS4_RULE_STRAY_CLOSER], 1);
    reads("a <｜DSML｜tool_calls> b" BLOCK BLOCK, "|a <｜DSML｜tool_calls> b" BLOCK "||stop");
    reads("a</｜DSML｜x>", "|a</｜DSML｜x>||stop");
}

/* A wrapper opener quoted as plain XML lost the closer that the text quoted with it. */
static void the_closer_of_a_plain_wrapper_that_became_text_is_text(void **state)
{
    (void)state;
    reads("a <tool_calls> b" BLOCK BLOCK "c", "|a <tool_calls> b" BLOCK "c||stop");
    reads("a <function_calls>" INVOKE BLOCK, "|a <function_calls>" BLOCK "||stop");
}

static void a_tool_name_in_a_parameter_tag_is_the_invoke(void **state)
{
    (void)state;
    reads("<parameter name=\"bash\">\n a b \n</parameter><parameter name=\"timeout\">5</parameter>"
          "</invoke>",
          "||bash({\"command\": \"a b\", \"timeout\": 5})|tool_calls");
    reads("<｜DSML｜parameter name=\"bash\">" STRING "a" PARAM INVOKE, "||" CALLED "|tool_calls");
    assert_int_equal(rules[DS4_RULE_RECOVERED_FUSED], 1);
    stays_text("<parameter name=\"now\">x</parameter></invoke>", DS4_RULE_REJECTED_AMBIGUOUS);
}

static void parameters_without_opener_find_their_tool(void **state)
{
    (void)state;
    reads(STRING "a" PARAM INVOKE BLOCK, "||" CALLED "|tool_calls");
    assert_int_equal(rules[DS4_RULE_RECOVERED_HEADLESS], 1);
    stays_text("<｜DSML｜parameter name=\"path\">p" PARAM
               "<｜DSML｜parameter name=\"command\">c" PARAM INVOKE,
               DS4_RULE_REJECTED_AMBIGUOUS);
    stays_text("<parameter name=\"foo\">x</parameter>", DS4_RULE_REJECTED_UNDECLARED);
}

static void a_json_body_is_taken_and_gated(void **state)
{
    (void)state;
    reads(BASH "{\"command\":\"a\"}" INVOKE, "||bash({\"command\":\"a\"})|tool_calls");
    reads("<invoke name=\"bash\">\n{\"input\": 1, \"command\": 2}\n</invoke>",
          "||bash({\"input\": 1, \"command\": 2})|tool_calls");
    stays_text(BASH "{\"timeout\":1}" INVOKE, DS4_RULE_REJECTED_REQUIRED);
    stays_text(BASH "{oops}" INVOKE, DS4_RULE_REJECTED_PROSE);
}

static void a_wrapped_object_passes_the_gate_of_its_own_keys(void **state)
{
    (void)state;
    reads(BASH "<｜DSML｜parameter name=\"arguments\">{\"command\": \"a\"}" PARAM INVOKE,
          "||" CALLED "|tool_calls");
    stays_text(BASH "<｜DSML｜parameter name=\"arguments\">{\"timeout\": 1}" PARAM INVOKE,
               DS4_RULE_REJECTED_REQUIRED);
}

static void foreign_wrappers_need_the_gate(void **state)
{
    (void)state;
    reads("x\n<|DSML|tool_calls>\n" CALL "\n</|DSML|tool_calls>", "|x|" CALLED "|tool_calls");
    reads("<function_calls><invoke name=\"bash\"><parameter name=\"command\">a</parameter></invoke>"
          "</function_calls>",
          "||" CALLED "|tool_calls");
    stays_text("x\n<|DSML|toolkit>\n<|DSML|invoke name=\"zip\"></|DSML|invoke></|DSML|toolkit>",
               DS4_RULE_REJECTED_UNDECLARED);
}

static void a_quoted_template_stays_text(void **state)
{
    (void)state;
    stays_text("<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"$TOOL_NAME\">\n...\n" INVOKE
               "\n" BLOCK,
               DS4_RULE_REJECTED_UNDECLARED);
}

static void empty_blocks_vanish_with_the_newlines_before(void **state)
{
    (void)state;
    reads("a\n\n<｜DSML｜tool_calls>\n</｜DSML｜function_calls>b", "|ab||stop");
    assert_int_equal(rules[DS4_RULE_EMPTY_BLOCK], 1);
    reads("a\n<｜DSML｜tool_calls>\n", "|a||stop");
    reads("a\n<tool_calls>\n", "|a\n<tool_calls>\n||stop");
}

static void a_cut_candidate_is_dropped_with_the_newlines_before(void **state)
{
    (void)state;
    cut_reads("a\n\n" BASH STRING "x", "|a||length");
    cut_reads("a\n\n<|DSML|toolkit>\n<|DS", "|a||length");
    cut_reads("a\n<｜DSML｜inv", "|a||length");
    cut_reads("a\n<｜D", "|a\n<｜D||length");
    cut_reads("a\n<tool_calls>\n<inv", "|a\n<tool_calls>\n<inv||length");
    stays_text("a\n\n" BASH STRING "x", DS4_RULE_REJECTED_UNCLOSED);
    reads("a\n<｜DSML｜tool_calls>\n<｜DSML｜inv", "|a\n<｜DSML｜tool_calls>\n<｜DSML｜inv||stop");
}

static void a_candidate_beyond_the_hold_is_text(void **state)
{
    uint64_t ids = 1;
    struct ds4_parse_config config = {
        .tools = parse_check_tools, .n_tools = 3, .random = parse_check_fill, .random_ctx = &ids};
    struct ds4_str text = DS4_STR("x\n" CALL);
    struct ds4_turn turn;

    (void)state;
    for (config.hold_max_bytes = text.len - 20; config.hold_max_bytes < text.len + 2;
         config.hold_max_bytes++) {
        ds4_turn_init(&turn, 1 << 16);
        assert_int_equal(parse_check_whole(&config, text, DS4_ENGINE_STOP, &turn), 0);
        /* The last byte of the closer decides: until then all before it was undecided. */
        assert_int_equal(turn.calls.len, config.hold_max_bytes >= text.len - 3);
        for (uint64_t seed = 0; seed < 20; seed++)
            assert_null(parse_check(&config, text, DS4_ENGINE_STOP, seed));
        ds4_turn_deinit(&turn);
    }
}

static void knobs_switch_recovery_off(void **state)
{
    uint64_t ids = 1;
    struct ds4_parse_config config = {.tools = parse_check_tools,
                                      .n_tools = 3,
                                      .no_recovery = true,
                                      .random = parse_check_fill,
                                      .random_ctx = &ids};
    struct ds4_str bare = DS4_STR(CALL), block = DS4_STR("<｜DSML｜tool_calls>" CALL BLOCK),
                   xml = DS4_STR("<invoke name=\"bash\"><parameter name=\"command\">a</parameter>"
                                 "</invoke>");
    const struct ds4_str *texts[] = {&bare, &block, &xml, &xml};
    static const size_t n_calls[] = {0, 1, 0, 1};

    (void)state;
    for (size_t i = 0; i < 4; i++) {
        struct ds4_turn turn;
        config.no_recovery = i < 2;
        config.no_plain_xml = i == 2;
        ds4_turn_init(&turn, 1 << 16);
        assert_int_equal(parse_check_whole(&config, *texts[i], DS4_ENGINE_STOP, &turn), 0);
        assert_int_equal(turn.calls.len, n_calls[i]);
        if (n_calls[i] == 0)
            assert_true(ds4_str_equal(ds4_buf_view(&turn.content), *texts[i]));
        ds4_turn_deinit(&turn);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_bare_call_swallows_its_outer_closer_once),
        cmocka_unit_test(what_follows_the_tag_decides),
        cmocka_unit_test(blanks_that_come_with_a_closer_are_still_blanks),
        cmocka_unit_test(gates_keep_the_whole_span_as_text),
        cmocka_unit_test(closers_of_openers_that_became_text_are_text),
        cmocka_unit_test(the_closer_of_a_plain_wrapper_that_became_text_is_text),
        cmocka_unit_test(a_tool_name_in_a_parameter_tag_is_the_invoke),
        cmocka_unit_test(parameters_without_opener_find_their_tool),
        cmocka_unit_test(a_json_body_is_taken_and_gated),
        cmocka_unit_test(a_wrapped_object_passes_the_gate_of_its_own_keys),
        cmocka_unit_test(foreign_wrappers_need_the_gate),
        cmocka_unit_test(a_quoted_template_stays_text),
        cmocka_unit_test(empty_blocks_vanish_with_the_newlines_before),
        cmocka_unit_test(a_cut_candidate_is_dropped_with_the_newlines_before),
        cmocka_unit_test(a_candidate_beyond_the_hold_is_text),
        cmocka_unit_test(knobs_switch_recovery_off),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

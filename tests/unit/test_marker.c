/* The tag scanner: what is a marker, what may become one, what is text. */
#include "router/parse/marker.h"

#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static struct ds4_marker_rules all;

static struct ds4_marker full(const char *text)
{
    struct ds4_marker m = {0};

    if (ds4_marker_scan(ds4_str_view(text), &all, &m) != DS4_MARKER_FULL)
        fail_msg("no marker: %s", text);
    return m;
}

static void is_text(const char *text, const struct ds4_marker_rules *rules)
{
    struct ds4_marker m;

    if (ds4_marker_scan(ds4_str_view(text), rules, &m) != DS4_MARKER_NONE)
        fail_msg("not plain text: %s", text);
}

static void every_spelling_of_a_tag_is_the_same_tag(void **state)
{
    static const char *const invokes[] = {"<｜DSML｜invoke>",  "<｜DSML｜ invoke name=\"x\">",
                                          "<｜DSML｜_invoke>", "<|DSML|invoke>",
                                          "<DSML｜invoke >",   "<｜DSMLinvoke>",
                                          "<│DSML❘ invoke>",   "<DSML|_invoke\n>",
                                          "<invoke name=\"\">"};

    (void)state;
    for (size_t i = 0; i < sizeof(invokes) / sizeof(invokes[0]); i++) {
        struct ds4_marker m = full(invokes[i]);
        assert_int_equal(m.kind, DS4_MARKER_INVOKE);
        assert_int_equal(m.len, strlen(invokes[i]));
        assert_int_equal(m.exact_prefix, i < 3);
    }
}

static void kinds_follow_the_word(void **state)
{
    (void)state;
    assert_int_equal(full("<think>").kind, DS4_MARKER_THINK_OPEN);
    assert_int_equal(full("</think>x").kind, DS4_MARKER_THINK_CLOSE);
    assert_int_equal(full("<｜end▁of▁sentence｜>").kind, DS4_MARKER_TURN);
    assert_int_equal(full("<｜latest_reminder｜>").kind, DS4_MARKER_TURN);
    assert_int_equal(full("<｜DSML｜parameter name=\"a\">").kind, DS4_MARKER_PARAMETER);
    assert_int_equal(full("<｜DSML｜toolkit>").kind, DS4_MARKER_WRAPPER);
    assert_int_equal(full("<｜DSML｜invokes>").kind, DS4_MARKER_WRAPPER);
    assert_int_equal(full("</｜DSML｜ calls\n>").kind, DS4_MARKER_CLOSE_WRAPPER);
    assert_int_equal(full("</｜DSML｜invoke>").kind, DS4_MARKER_CLOSE_INVOKE);
    assert_int_equal(full("</parameter>").kind, DS4_MARKER_CLOSE_PARAMETER);
    assert_int_equal(full("<function_calls>").kind, DS4_MARKER_WRAPPER);
}

static void lookalikes_are_text(void **state)
{
    static const char *const texts[] = {
        "<DSMLinvoke>",         /* both bars missing */
        "<｜DSML｜tool calls>", /* a wrapper has no attributes */
        "<｜DSML｜1x>",
        "<｜DSML｜invoke/>",
        "<｜DSML｜  invoke>", /* two blanks */
        "<｜DSML｜invoke <",
        "<invoke>", /* plain XML without attributes */
        "<invoke >",
        "<tool_calls >",
        "<thinking>",
        "<｜user｜>",
        "</｜DSML｜invoke name=\"x\">",
        "< think>",
    };

    (void)state;
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
        is_text(texts[i], &all);
}

static void every_prefix_of_a_marker_may_become_one(void **state)
{
    static const char *const tags[] = {"<think>",
                                       "</think>",
                                       "<｜begin▁of▁sentence｜>",
                                       "<｜DSML｜ invoke name=\"x\" string='true'>",
                                       "<DSML│parameter name=\"x\">",
                                       "<❘DSML_calls  >",
                                       "</|DSML|function_calls>",
                                       "</｜DSMLx>",
                                       "<parameter name=\"x\">",
                                       "</tool_call>",
                                       "<calls>"};
    struct ds4_marker m;

    (void)state;
    for (size_t i = 0; i < sizeof(tags) / sizeof(tags[0]); i++)
        for (size_t n = 1; n < strlen(tags[i]); n++)
            assert_int_equal(ds4_marker_scan((struct ds4_str){tags[i], n}, &all, &m),
                             DS4_MARKER_PARTIAL);
}

static void without_tools_only_think_tags_and_turns_exist(void **state)
{
    const struct ds4_marker_rules none = ds4_marker_rules_make(false, true),
                                  no_xml = ds4_marker_rules_make(true, false);
    struct ds4_marker m;

    (void)state;
    is_text("<｜DSML｜invoke>", &none);
    is_text("<｜D", &none);
    is_text("</invoke>", &none);
    assert_int_equal(ds4_marker_scan(DS4_STR("<｜"), &none, &m), DS4_MARKER_PARTIAL);
    assert_int_equal(ds4_marker_scan(DS4_STR("<think>"), &none, &m), DS4_MARKER_FULL);
    is_text("<invoke name=\"x\">", &no_xml);
    assert_int_equal(ds4_marker_scan(DS4_STR("</invoke>"), &no_xml, &m), DS4_MARKER_FULL);
}

static void too_long_a_tag_is_text_complete_or_not(void **state)
{
    char text[700] = "<invoke name=\"";
    size_t head = strlen(text);
    struct ds4_marker m;

    (void)state;
    memset(text + head, 'x', sizeof(text) - head);
    assert_int_equal(ds4_marker_scan((struct ds4_str){text, DS4_MARKER_MAX_CHARS}, &all, &m),
                     DS4_MARKER_PARTIAL);
    assert_int_equal(ds4_marker_scan((struct ds4_str){text, DS4_MARKER_MAX_CHARS + 1}, &all, &m),
                     DS4_MARKER_NONE);
    text[DS4_MARKER_MAX_CHARS] = '>';
    assert_int_equal(ds4_marker_scan((struct ds4_str){text, sizeof(text)}, &all, &m),
                     DS4_MARKER_FULL);
    text[DS4_MARKER_MAX_CHARS] = 'x';
    text[DS4_MARKER_MAX_CHARS + 1] = '>';
    assert_int_equal(ds4_marker_scan((struct ds4_str){text, sizeof(text)}, &all, &m),
                     DS4_MARKER_NONE);
}

static struct ds4_marker_attrs attrs(const char *text)
{
    return ds4_marker_read_attrs(ds4_str_view(text));
}

static void attributes_come_in_any_order_and_quote(void **state)
{
    struct ds4_marker_attrs a = attrs(" string='TRUE' name=\"a 'b' string=\" ");

    (void)state;
    assert_int_equal(a.string, DS4_STRING_TRUE);
    assert_true(ds4_str_equal(a.name, DS4_STR("a 'b' string=")));
    a = attrs(" name= \"x\" name=\"y\" other=\"name='z'\" string=\"true|false\"");
    assert_true(ds4_str_equal(a.name, DS4_STR("x")));
    assert_int_equal(a.string, DS4_STRING_UNSET);
    assert_false(attrs(" name=x string=\"false").has_name);
    assert_true(attrs(" name=\"\"").has_name);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_spelling_of_a_tag_is_the_same_tag),
        cmocka_unit_test(kinds_follow_the_word),
        cmocka_unit_test(lookalikes_are_text),
        cmocka_unit_test(every_prefix_of_a_marker_may_become_one),
        cmocka_unit_test(without_tools_only_think_tags_and_turns_exist),
        cmocka_unit_test(too_long_a_tag_is_text_complete_or_not),
        cmocka_unit_test(attributes_come_in_any_order_and_quote),
    };

    all = ds4_marker_rules_make(true, true);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

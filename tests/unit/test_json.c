/* Request JSON: limits, tolerated input, getters that name the path. */
#include "common/json.h"

#include "common/buf.h"

#include <float.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static struct ds4_json *parse(const char *text)
{
    struct ds4_err err = {0};
    struct ds4_json *doc = ds4_json_parse(ds4_str_view(text), &err);

    if (doc == NULL)
        fail_msg("%s: %s", text, err.msg);
    return doc;
}

static void bad_text_is_refused_with_its_place(void **state)
{
    static const struct {
        struct ds4_str text;
        const char *message;
    } cases[] = {
        {{"", 0}, "line 1, column 0"},
        {{"{\n\"a\": }", 8}, "line 2, column 6"},
        {{"[1,]", 4}, "line 1, column 4"},
        {{"[1] x", 5}, "line 1, column 5"},
        {{"[NaN]", 5}, "line 1"},
        {{"{\"a\": \"\xff\"}", 10}, "line 1"},
        {{"\"\xed\xa0\x80\"", 5}, "line 1"},
        {{"\"a\nb\"", 5}, "line 1"},
        {{"[\"\\u12\"]", 8}, "line 1"},
        {{"[12345678901234567890e]", 23}, "line 1"},
        {{"{\"a\\u0000b\": 1}", 15}, "line 1"},
        {{"[01e400]", 8}, "line 1"},
        {{"[1.e400]", 8}, "line 1"},
        {{"[-.1e400]", 9}, "line 1"},
        {{"[1\0]", 4}, "NUL at byte 2"},
        {{"\"\\ud800", 7}, "line 1"},
        {{"\"\\", 2}, "line 1"},
    };
    struct ds4_err err;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        err = (struct ds4_err){0};
        if (ds4_json_parse(cases[i].text, &err) != NULL)
            fail_msg("case %zu was accepted", i);
        assert_int_equal(err.code, DS4_E_INVALID);
        assert_non_null(strstr(err.msg, cases[i].message));
    }
}

static void nesting_is_limited(void **state)
{
    char text[2 * (DS4_JSON_MAX_DEPTH + 1)];
    struct ds4_err err = {0};
    struct ds4_json *doc;

    (void)state;
    memset(text, '[', DS4_JSON_MAX_DEPTH);
    memset(text + DS4_JSON_MAX_DEPTH, ']', DS4_JSON_MAX_DEPTH);
    doc = ds4_json_parse((struct ds4_str){text, (size_t)2 * DS4_JSON_MAX_DEPTH}, &err);
    assert_non_null(doc);
    ds4_json_free(doc);
    memset(text, '[', DS4_JSON_MAX_DEPTH + 1);
    memset(text + DS4_JSON_MAX_DEPTH + 1, ']', DS4_JSON_MAX_DEPTH + 1);
    assert_null(ds4_json_parse((struct ds4_str){text, sizeof(text)}, &err));
    assert_string_equal(err.msg, "JSON nests deeper than 256 levels");
}

static void brackets_inside_strings_are_not_nesting(void **state)
{
    struct ds4_buf text;
    struct ds4_json *doc;

    (void)state;
    ds4_buf_init(&text, 4096);
    (void)ds4_buf_append_text(&text, "[\"\\\"");
    for (int i = 0; i < 1000; i++)
        (void)ds4_buf_append_byte(&text, '[');
    (void)ds4_buf_append_text(&text, "\"]");
    doc = parse(text.ptr);
    assert_int_equal(ds4_json_str(ds4_json_at(doc, 0)).len, 1001);
    ds4_json_free(doc);
    ds4_buf_deinit(&text);
}

static void half_surrogates_read_as_replacement_characters(void **state)
{
    static const struct {
        const char *text;
        const char *value;
    } cases[] = {
        {"\"\\ud800\"", "\xef\xbf\xbd"},
        {"\"\\udc00x\"", "\xef\xbf\xbdx"},
        {"\"\\uD83D\\uDE00\"", "\xf0\x9f\x98\x80"},
        {"\"\\ud83d\\ud83d\\ude00\"", "\xef\xbf\xbd\xf0\x9f\x98\x80"},
        {"\"\\ud83d \\ude00\"", "\xef\xbf\xbd \xef\xbf\xbd"},
        {"\"\\\\ud800\"", "\\ud800"},
        {"\"\\ud83d\\n\"", "\xef\xbf\xbd\n"},
    };
    struct ds4_json *doc;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        doc = parse(cases[i].text);
        assert_true(ds4_str_equal(ds4_json_str(doc), ds4_str_view(cases[i].value)));
        ds4_json_free(doc);
    }
}

static void numbers_out_of_range_become_doubles(void **state)
{
    struct ds4_json *doc = parse("[9223372036854775807, 9223372036854775808, -9223372036854775809, "
                                 "123456789012345678901234567890, 1e400, -1e400, 1.5, \"1e400\"]");
    char digits[401];

    (void)state;
    assert_int_equal(ds4_json_type(ds4_json_at(doc, 0)), DS4_JSON_INT);
    assert_true(ds4_json_int(ds4_json_at(doc, 0)) == INT64_MAX);
    assert_int_equal(ds4_json_type(ds4_json_at(doc, 1)), DS4_JSON_DOUBLE);
    assert_true(ds4_json_double(ds4_json_at(doc, 1)) == 0x1p63);
    assert_true(ds4_json_double(ds4_json_at(doc, 2)) == -0x1p63);
    assert_true(ds4_json_double(ds4_json_at(doc, 3)) == 123456789012345678901234567890.0);
    assert_true(ds4_json_double(ds4_json_at(doc, 4)) == DBL_MAX);
    assert_true(ds4_json_double(ds4_json_at(doc, 5)) == -DBL_MAX);
    assert_true(ds4_json_double(ds4_json_at(doc, 6)) == 1.5);
    assert_true(ds4_str_equal(ds4_json_str(ds4_json_at(doc, 7)), DS4_STR("1e400")));
    ds4_json_free(doc);
    memset(digits, '9', sizeof(digits) - 1);
    digits[sizeof(digits) - 1] = '\0';
    doc = parse(digits);
    assert_true(ds4_json_double(doc) == DBL_MAX);
    ds4_json_free(doc);
    doc = parse("99999999999999999999");
    assert_true(ds4_json_double(doc) == 1e20);
    ds4_json_free(doc);
}

static void the_last_of_equal_keys_wins(void **state)
{
    struct ds4_json *doc = parse("{\"a\": 1, \"b\": 2, \"a\": 3}");

    (void)state;
    assert_int_equal(ds4_json_int(ds4_json_find(doc, "a")), 3);
    assert_int_equal(ds4_json_len(doc), 2);
    ds4_json_free(doc);
}

static void strings_may_hold_nul(void **state)
{
    struct ds4_json *doc = parse("\"a\\u0000b\"");

    (void)state;
    assert_int_equal(ds4_json_str(doc).len, 3);
    assert_memory_equal(ds4_json_str(doc).ptr, "a\0b", 3);
    ds4_json_free(doc);
}

static void absent_and_null_leave_the_default(void **state)
{
    struct ds4_json *doc = parse("{\"n\": null}");
    int64_t number = 7;
    double real = 0.5;
    bool flag = true;
    struct ds4_str text = DS4_STR("old");
    const struct ds4_json *list = NULL;

    (void)state;
    assert_int_equal(ds4_json_get_int(doc, "", "n", 0, 1, &number, NULL), 0);
    assert_int_equal(ds4_json_get_int(doc, "", "x", 0, 1, &number, NULL), 0);
    assert_int_equal(ds4_json_get_double(doc, "", "n", 0, 1, &real, NULL), 0);
    assert_int_equal(ds4_json_get_bool(doc, "", "x", &flag, NULL), 0);
    assert_int_equal(ds4_json_get_str(doc, "", "n", &text, NULL), 0);
    assert_int_equal(ds4_json_get_array(doc, "", "n", &list, NULL), 0);
    assert_int_equal(ds4_json_get_object(NULL, "", "n", &list, NULL), 0);
    assert_int_equal(number, 7);
    assert_true(real == 0.5 && flag && list == NULL);
    assert_string_equal(text.ptr, "old");
    assert_null(ds4_json_find(doc, "n"));
    assert_non_null(ds4_json_find_raw(doc, "n"));
    assert_null(ds4_json_find_raw(doc, "x"));
    ds4_json_free(doc);
}

static void wrong_types_name_the_path(void **state)
{
    struct ds4_json *doc = parse("{\"s\": 1, \"i\": \"x\", \"f\": 1.5, \"o\": [], \"big\": 1e30}");
    struct ds4_err err = {0};
    struct ds4_str text;
    int64_t number;
    double real;
    bool flag;
    const struct ds4_json *value;

    (void)state;
    assert_int_equal(ds4_json_get_str(doc, "messages[2]", "s", &text, &err), -1);
    assert_string_equal(err.msg, "messages[2].s must be a string, not number");
    assert_int_equal(ds4_json_get_int(doc, "", "i", 0, 9, &number, &err), -1);
    assert_string_equal(err.msg, "i must be an integer, not string");
    assert_int_equal(ds4_json_get_int(doc, NULL, "f", 0, 9, &number, &err), -1);
    assert_string_equal(err.msg, "f is 1.5, must be an integer from 0 to 9");
    assert_int_equal(ds4_json_get_int(doc, "", "big", 0, 9, &number, &err), -1);
    assert_int_equal(ds4_json_get_int(doc, "", "s", 2, 9, &number, &err), -1);
    assert_string_equal(err.msg, "s is 1, must be from 2 to 9");
    assert_int_equal(ds4_json_get_double(doc, "", "f", 0, 1, &real, &err), -1);
    assert_string_equal(err.msg, "f is 1.5, must be from 0 to 1");
    assert_int_equal(ds4_json_get_bool(doc, "", "s", &flag, &err), -1);
    assert_string_equal(err.msg, "s must be a boolean, not number");
    assert_int_equal(ds4_json_get_object(doc, "", "o", &value, &err), -1);
    assert_string_equal(err.msg, "o must be an object, not array");
    assert_int_equal(ds4_json_get_array(doc, "", "s", &value, &err), -1);
    assert_string_equal(err.msg, "s must be an array, not number");
    assert_int_equal(err.code, DS4_E_INVALID);
    ds4_json_free(doc);
}

static void integral_doubles_are_integers(void **state)
{
    struct ds4_json *doc = parse("{\"a\": 3.0, \"b\": 1e2, \"c\": 4}");
    int64_t number = 0;
    double real = 0;

    (void)state;
    assert_int_equal(ds4_json_get_int(doc, "", "a", 0, 9, &number, NULL), 0);
    assert_int_equal(number, 3);
    assert_int_equal(ds4_json_get_int(doc, "", "b", 0, 100, &number, NULL), 0);
    assert_int_equal(number, 100);
    assert_int_equal(ds4_json_get_double(doc, "", "c", 0, 9, &real, NULL), 0);
    assert_true(real == 4.0);
    ds4_json_free(doc);
}

static void members_come_in_the_order_of_the_text(void **state)
{
    struct ds4_json *doc = parse("{\"z\": 1, \"a\": null, \"m\": [2, 3]}");
    struct ds4_buf seen;

    (void)state;
    ds4_buf_init(&seen, 64);
    for (struct ds4_json_member m = ds4_json_first(doc); m.value != NULL; m = ds4_json_next(m))
        (void)ds4_buf_append_str(&seen, m.key);
    assert_string_equal(seen.ptr, "zam");
    assert_int_equal(ds4_json_len(ds4_json_find(doc, "m")), 2);
    assert_null(ds4_json_at(ds4_json_find(doc, "m"), 2));
    assert_int_equal(ds4_json_len(ds4_json_find(doc, "z")), 0);
    assert_null(ds4_json_first(ds4_json_find(doc, "m")).value);
    ds4_buf_deinit(&seen);
    ds4_json_free(doc);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_text_is_refused_with_its_place),
        cmocka_unit_test(nesting_is_limited),
        cmocka_unit_test(brackets_inside_strings_are_not_nesting),
        cmocka_unit_test(half_surrogates_read_as_replacement_characters),
        cmocka_unit_test(numbers_out_of_range_become_doubles),
        cmocka_unit_test(the_last_of_equal_keys_wins),
        cmocka_unit_test(strings_may_hold_nul),
        cmocka_unit_test(absent_and_null_leave_the_default),
        cmocka_unit_test(wrong_types_name_the_path),
        cmocka_unit_test(integral_doubles_are_integers),
        cmocka_unit_test(members_come_in_the_order_of_the_text),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

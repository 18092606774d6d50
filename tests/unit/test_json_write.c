/* Writing JSON: escapes, doubles as Python prints them, structure. */
#include "common/json_write.h"

#include "common/json_text.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static int start(void **state)
{
    static struct ds4_buf buf;

    ds4_buf_init(&buf, (size_t)1 << 20);
    *state = &buf;
    return 0;
}

static int stop(void **state)
{
    ds4_buf_deinit(*state);
    return 0;
}

/* repr() of Python 3.11. */
static void doubles_print_shortest(void **state)
{
    static const struct {
        double value;
        const char *text;
    } cases[] = {
        {0.0, "0.0"},
        {-0.0, "-0.0"},
        {1.0, "1.0"},
        {0.1, "0.1"},
        {0.30000000000000004, "0.30000000000000004"},
        {100.0, "100.0"},
        {123456789.125, "123456789.125"},
        {1e15, "1000000000000000.0"},
        {9999999999999998.0, "9999999999999998.0"},
        {1e16, "1e+16"},
        {1.5e300, "1.5e+300"},
        {0.0001, "0.0001"},
        {0.00012345, "0.00012345"},
        {0.00001, "1e-05"},
        {5e-324, "5e-324"},
        {2.2250738585072014e-308, "2.2250738585072014e-308"},
        {1.7976931348623157e308, "1.7976931348623157e+308"},
        {0x1p-44, "5.684341886080802e-14"},
        {0x1p-1074 * 3, "1.5e-323"},
        {9007199254740993.0, "9007199254740992.0"},
        {-2.5, "-2.5"},
        {INFINITY, "Infinity"},
        {-INFINITY, "-Infinity"},
        {NAN, "NaN"},
    };
    struct ds4_buf *out = *state;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ds4_buf_clear(out);
        assert_int_equal(ds4_jw_append_double(out, cases[i].value), 0);
        assert_string_equal(out->ptr, cases[i].text);
    }
}

static void every_power_of_two_reads_back(void **state)
{
    struct ds4_buf *out = *state;

    for (int e = -1074; e < 1024; e++) {
        ds4_buf_clear(out);
        assert_int_equal(ds4_jw_append_double(out, ldexp(1, e)), 0);
        assert_true(strtod(out->ptr, NULL) == ldexp(1, e));
    }
}

static void strings_are_escaped_as_python_does(void **state)
{
    struct ds4_buf *out = *state;
    char all[0x80];

    for (int i = 0; i < 0x80; i++)
        all[i] = (char)i;
    assert_int_equal(ds4_jw_append_string(out, (struct ds4_str){all, sizeof(all)}), 0);
    assert_string_equal(
        out->ptr,
        "\"\\u0000\\u0001\\u0002\\u0003\\u0004\\u0005\\u0006\\u0007\\b\\t\\n\\u000b\\f\\r\\u000e"
        "\\u000f\\u0010\\u0011\\u0012\\u0013\\u0014\\u0015\\u0016\\u0017\\u0018\\u0019\\u001a"
        "\\u001b\\u001c\\u001d\\u001e\\u001f !\\\"#$%&'()*+,-./0123456789:;<=>?@"
        "ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\\\]^_`abcdefghijklmnopqrstuvwxyz{|}~\x7f\"");
}

static void invalid_bytes_become_replacement_characters(void **state)
{
    struct ds4_buf *out = *state;

    assert_int_equal(ds4_jw_append_escaped(out, DS4_STR("a\xff\"\xe4\xb8\n\xc3\xa9")), 0);
    assert_string_equal(out->ptr, "a\xef\xbf\xbd\\\"\xef\xbf\xbd\\n\xc3\xa9");
}

static void pieces_join_to_the_whole(void **state)
{
    struct ds4_buf *out = *state;
    struct ds4_str s = DS4_STR("say \"hi\"\n\\ \x01 \xc3\xa9 end");
    struct ds4_buf whole;

    ds4_buf_init(&whole, 4096);
    (void)ds4_jw_append_escaped(&whole, s);
    for (size_t cut = 0; cut <= s.len; cut++) {
        if (cut < s.len && (s.ptr[cut] & 0xc0) == 0x80)
            continue;
        ds4_buf_clear(out);
        (void)ds4_jw_append_escaped(out, ds4_str_head(s, cut));
        (void)ds4_jw_append_escaped(out, ds4_str_skip(s, cut));
        assert_string_equal(out->ptr, whole.ptr);
    }
    ds4_buf_deinit(&whole);
}

static void the_writer_sets_commas_and_colons(void **state)
{
    struct ds4_buf *out = *state;
    struct ds4_jw w;

    ds4_jw_init(&w, out);
    ds4_jw_object(&w);
    ds4_jw_key(&w, "a");
    ds4_jw_array(&w);
    ds4_jw_end(&w);
    ds4_jw_key(&w, "b");
    ds4_jw_array(&w);
    ds4_jw_int(&w, INT64_MIN);
    ds4_jw_object(&w);
    ds4_jw_end(&w);
    ds4_jw_double(&w, 0.5);
    ds4_jw_double(&w, NAN);
    ds4_jw_null(&w);
    ds4_jw_bool(&w, true);
    ds4_jw_raw(&w, DS4_STR("{\"raw\": 1}"));
    ds4_jw_end(&w);
    ds4_jw_key_str(&w, DS4_STR("c\""));
    ds4_jw_text(&w, "x\ny");
    ds4_jw_key(&w, "d");
    ds4_jw_text(&w, NULL);
    ds4_jw_key(&w, "e");
    ds4_jw_bool(&w, false);
    assert_false(ds4_jw_done(&w));
    ds4_jw_end(&w);
    assert_true(ds4_jw_done(&w));
    assert_string_equal(out->ptr, "{\"a\":[],\"b\":[-9223372036854775808,{},0.5,null,null,true,"
                                  "{\"raw\": 1}],\"c\\\"\":\"x\\ny\",\"d\":null,\"e\":false}");
    assert_true(ds4_jt_valid(ds4_buf_view(out), DS4_JT_MAX_DEPTH));
}

static void the_deepest_level_still_knows_its_kind(void **state)
{
    struct ds4_buf *out = *state;
    struct ds4_jw w;

    ds4_jw_init(&w, out);
    for (int i = 0; i < DS4_JW_MAX_DEPTH; i++) {
        if (i % 2 == 1)
            ds4_jw_object(&w);
        else
            ds4_jw_array(&w);
        if (i % 2 == 1)
            ds4_jw_key(&w, "k");
    }
    ds4_jw_int(&w, 1);
    while (w.depth > 0)
        ds4_jw_end(&w);
    assert_true(ds4_jt_valid(ds4_buf_view(out), DS4_JT_MAX_DEPTH));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(doubles_print_shortest, start, stop),
        cmocka_unit_test_setup_teardown(every_power_of_two_reads_back, start, stop),
        cmocka_unit_test_setup_teardown(strings_are_escaped_as_python_does, start, stop),
        cmocka_unit_test_setup_teardown(invalid_bytes_become_replacement_characters, start, stop),
        cmocka_unit_test_setup_teardown(pieces_join_to_the_whole, start, stop),
        cmocka_unit_test_setup_teardown(the_writer_sets_commas_and_colons, start, stop),
        cmocka_unit_test_setup_teardown(the_deepest_level_still_knows_its_kind, start, stop),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* UTF-8: table 3-7 of Unicode, replacement by maximal subparts, unfinished tails. */
#include "common/utf8.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* Lengths and replacement counts as Python 3.11 gives them for bytes.decode(errors="replace"). */
static const struct {
    const char *bytes;
    size_t valid_len;
    size_t cut_tail;
    const char *replaced;
} cases[] = {
    {"", 0, 0, ""},
    {"plain ascii, more than eight bytes", 34, 0, "plain ascii, more than eight bytes"},
    {"\xc3\xa9t\xc3\xa9", 5, 0, "\xc3\xa9t\xc3\xa9"},
    {"a\xf0\x9f\x98\x80z", 6, 0, "a\xf0\x9f\x98\x80z"},
    {"\x80", 0, 0, "\xef\xbf\xbd"},
    {"ab\xc3", 2, 1, "ab\xef\xbf\xbd"},
    {"\xe4\xb8", 0, 2, "\xef\xbf\xbd"},
    {"\xf0\x9f\x98", 0, 3, "\xef\xbf\xbd"},
    {"\xf0\x9f\x98q", 0, 0, "\xef\xbf\xbdq"},
    {"\xc0\x80", 0, 0, "\xef\xbf\xbd\xef\xbf\xbd"},
    {"\xe0\x80\x80", 0, 0, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
    {"\xed\xa0\x80", 0, 0, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
    {"\xed\xa0", 0, 0, "\xef\xbf\xbd\xef\xbf\xbd"},
    {"\xf4\x90\x80\x80", 0, 0, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
    {"\xf5z", 0, 0, "\xef\xbf\xbdz"},
    {"\xe4\xb8\xe4\xb8\xad", 0, 0, "\xef\xbf\xbd\xe4\xb8\xad"},
    {"12345678\xff", 8, 0, "12345678\xef\xbf\xbd"},
    {"1234567\xc3\xa9\xe2\x82", 9, 2, "1234567\xc3\xa9\xef\xbf\xbd"},
};

static void every_case_is_measured_and_replaced_as_python_does(void **state)
{
    struct ds4_buf out;
    struct ds4_str s;

    (void)state;
    ds4_buf_init(&out, 4096);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        s = ds4_str_view(cases[i].bytes);
        assert_int_equal(ds4_utf8_valid_len(s), cases[i].valid_len);
        assert_int_equal(ds4_utf8_valid(s), cases[i].valid_len == s.len);
        assert_int_equal(ds4_utf8_cut_tail(s), cases[i].cut_tail);
        ds4_buf_clear(&out);
        assert_int_equal(ds4_utf8_append_replaced(&out, s), 0);
        assert_true(ds4_str_equal(ds4_buf_view(&out), ds4_str_view(cases[i].replaced)));
    }
    ds4_buf_deinit(&out);
}

static void every_code_point_survives_encode_and_decode(void **state)
{
    char bytes[DS4_UTF8_MAX_BYTES];
    struct ds4_utf8_char c;
    size_t n;

    (void)state;
    for (uint32_t code = 0; code <= 0x110000; code++) {
        n = ds4_utf8_encode(code, bytes);
        if ((code >= 0xd800 && code <= 0xdfff) || code > 0x10ffff) {
            assert_int_equal(n, 0);
            continue;
        }
        c = ds4_utf8_decode((struct ds4_str){bytes, n});
        if (c.kind != DS4_UTF8_CHAR || c.code != code || c.n_bytes != n)
            fail_msg("U+%04X does not survive", code);
        for (size_t cut = 1; cut < n; cut++) {
            c = ds4_utf8_decode((struct ds4_str){bytes, cut});
            if (c.kind != DS4_UTF8_CUT || ds4_utf8_cut_tail((struct ds4_str){bytes, cut}) != cut)
                fail_msg("U+%04X cut after %zu bytes is misread", code, cut);
        }
    }
}

/* What a stream holds back may turn out to be a character or not: the text of the first part plus the
 * text of held bytes and rest must equal the text of the whole. */
static void holding_back_an_unfinished_tail_never_changes_the_text(void **state)
{
    struct ds4_buf whole, parts;
    char bytes[3] = {0, 0, 'x'};
    struct ds4_str s = {bytes, 3}, head;
    size_t kept;

    (void)state;
    ds4_buf_init(&whole, 64);
    ds4_buf_init(&parts, 64);
    for (int pair = 0; pair < 256 * 256; pair++) {
        bytes[0] = (char)(pair / 256);
        bytes[1] = (char)(pair % 256);
        for (size_t split = 1; split <= 2; split++) {
            ds4_buf_clear(&whole);
            ds4_buf_clear(&parts);
            head = ds4_str_head(s, split);
            kept = split - ds4_utf8_cut_tail(head);
            assert_int_equal(ds4_utf8_append_replaced(&whole, s), 0);
            assert_int_equal(ds4_utf8_append_replaced(&parts, ds4_str_head(s, kept)), 0);
            assert_int_equal(ds4_utf8_append_replaced(&parts, ds4_str_skip(s, kept)), 0);
            assert_true(ds4_str_equal(ds4_buf_view(&whole), ds4_buf_view(&parts)));
        }
    }
    ds4_buf_deinit(&whole);
    ds4_buf_deinit(&parts);
}

static void an_empty_text_has_no_character(void **state)
{
    struct ds4_utf8_char c = ds4_utf8_decode((struct ds4_str){NULL, 0});

    (void)state;
    assert_int_equal(c.kind, DS4_UTF8_CUT);
    assert_int_equal(c.n_bytes, 0);
}

static void a_full_buffer_is_reported(void **state)
{
    struct ds4_buf out;

    (void)state;
    ds4_buf_init(&out, 4);
    assert_int_equal(ds4_utf8_append_replaced(&out, DS4_STR("ab\xff")), -1);
    ds4_buf_deinit(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_case_is_measured_and_replaced_as_python_does),
        cmocka_unit_test(every_code_point_survives_encode_and_decode),
        cmocka_unit_test(holding_back_an_unfinished_tail_never_changes_the_text),
        cmocka_unit_test(an_empty_text_has_no_character),
        cmocka_unit_test(a_full_buffer_is_reported),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

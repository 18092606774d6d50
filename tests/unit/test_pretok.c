/* The pieces of the pre-tokenizer, case by case as the model's regular expressions cut them. */
#include "router/text/pretok.h"

#include "common/utf8.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#define N_RANDOM 5000

/* Cuts `text` and joins the pieces with '|' for reading. */
static void assert_pieces(const char *text, const char *want)
{
    struct ds4_pretok it;
    struct ds4_str piece;
    char got[512];
    size_t n = 0;

    ds4_pretok_init(&it, ds4_str_view(text));
    while (ds4_pretok_next(&it, &piece)) {
        if (n > 0)
            got[n++] = '|';
        assert_true(n + piece.len + 2 < sizeof(got));
        memcpy(got + n, piece.ptr, piece.len);
        n += piece.len;
    }
    got[n] = '\0';
    assert_string_equal(got, want);
}

static void numbers_of_any_script_go_in_threes(void **state)
{
    (void)state;
    assert_pieces("1234567", "123|456|7");
    assert_pieces("abc123", "abc|123");
    assert_pieces("x12y", "x|12|y");
    assert_pieces("٣٤٥٦", "٣٤٥|٦");
    assert_pieces("½Ⅷ2x", "½Ⅷ2|x");
    assert_pieces("3.14", "3|.|14");
}

static void cjk_runs_stand_alone(void **state)
{
    (void)state;
    assert_pieces("你好world", "你好|world");
    assert_pieces("a你b", "a|你|b");
    assert_pieces("ア・イ", "ア|・|イ");
    assert_pieces("한국어", "한국어");
    assert_pieces(" 你", " |你");
    assert_pieces("。你", "。|你");
    assert_pieces("你!ok", "你|!ok");
}

static void words_take_one_leading_character(void **state)
{
    (void)state;
    assert_pieces(" hello world", " hello| world");
    assert_pieces("\thello", "\thello");
    assert_pieces("  hello", " | hello");
    assert_pieces("\nhello", "\n|hello");
    assert_pieces("e\xCC\x81t", "e\xCC\x81t");
    assert_pieces("\xCC\x81", "\xCC\x81");
    assert_pieces("\xE2\x80\x8D"
                  "a",
                  "\xE2\x80\x8D"
                  "a");
}

static void ascii_punctuation_takes_ascii_letters(void **state)
{
    (void)state;
    assert_pieces(".com", ".com");
    assert_pieces("(foo)", "(foo|)");
    assert_pieces(".é", ".|é");
    assert_pieces(".aé", ".a|é");
    assert_pieces("don't", "don|'t");
    assert_pieces("...abc", "...|abc");
    assert_pieces(" .abc", " .|abc");
}

static void punctuation_takes_a_blank_before_and_newlines_behind(void **state)
{
    (void)state;
    assert_pieces("x ;\n\ny", "x| ;\n\n|y");
    assert_pieces("  ->\r\nz", " | ->\r\n|z");
    assert_pieces("};\n  a", "};\n| | a");
    assert_pieces("€5", "€|5");
}

static void blanks_end_at_newlines_or_leave_the_last_for_the_word(void **state)
{
    (void)state;
    assert_pieces("a   b", "a|  | b");
    assert_pieces("a \n \n b", "a| \n \n| b");
    assert_pieces("a  ", "a|  ");
    assert_pieces("a  1", "a|  |1");
    assert_pieces("a 1", "a| |1");
    assert_pieces(" \t\n\t x", " \t\n|\t| x");
    assert_pieces("\xE3\x80\x80\xE3\x80\x80x", "\xE3\x80\x80|\xE3\x80\x80x");
    assert_pieces("\xC2\x85\xC2\x85!", "\xC2\x85|\xC2\x85|!");
}

static void characters_without_a_rule_gather_between_matches(void **state)
{
    (void)state;
    assert_pieces("\xEE\x80\x80\xEE\x80\x80 x", "\xEE\x80\x80\xEE\x80\x80| x");
    assert_pieces("\x01\x02.", "\x01\x02|.");
    assert_pieces("\x01\x02"
                  "a",
                  "\x01|\x02"
                  "a");
    assert_pieces("\x01"
                  "7",
                  "\x01|7");
}

static void pieces_join_to_the_text_for_any_bytes(void **state)
{
    unsigned seed = 1;
    char text[64];

    (void)state;
    for (int round = 0; round < N_RANDOM; round++) {
        size_t n = (size_t)rand_r(&seed) % sizeof(text);
        struct ds4_pretok it;
        struct ds4_str piece;
        const char *at = text;

        for (size_t i = 0; i < n; i++)
            text[i] =
                (char)(round % 2 ? rand_r(&seed) : " \n.a1\xE4\xBD\xA0\x80"[rand_r(&seed) % 9]);
        ds4_pretok_init(&it, (struct ds4_str){text, n});
        while (ds4_pretok_next(&it, &piece)) {
            assert_ptr_equal(piece.ptr, at);
            assert_true(piece.len > 0);
            at += piece.len;
        }
        assert_ptr_equal(at, text + n);
    }
}

static void empty_text_has_no_piece(void **state)
{
    struct ds4_pretok it;
    struct ds4_str piece;

    (void)state;
    ds4_pretok_init(&it, (struct ds4_str){NULL, 0});
    assert_false(ds4_pretok_next(&it, &piece));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_of_any_script_go_in_threes),
        cmocka_unit_test(cjk_runs_stand_alone),
        cmocka_unit_test(words_take_one_leading_character),
        cmocka_unit_test(ascii_punctuation_takes_ascii_letters),
        cmocka_unit_test(punctuation_takes_a_blank_before_and_newlines_behind),
        cmocka_unit_test(blanks_end_at_newlines_or_leave_the_last_for_the_word),
        cmocka_unit_test(characters_without_a_rule_gather_between_matches),
        cmocka_unit_test(pieces_join_to_the_text_for_any_bytes),
        cmocka_unit_test(empty_text_has_no_piece),
    };

    return cmocka_run_group_tests_name("pretok", tests, NULL, NULL);
}

/* A prompt knows which of its text is ours. */
#include "router/text/prompt.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

#define PROMPT_BYTES ((size_t)1 << 20)
#define BOS          "<｜begin▁of▁sentence｜>"

static const struct ds4_str no_suffix = {NULL, 0};

static void assert_span(const struct ds4_prompt *prompt, size_t i, const char *text)
{
    struct ds4_bpe_span span = prompt->literals.ptr[i];

    assert_true(i < prompt->literals.len);
    assert_true(ds4_str_equal(
        ds4_str_head(ds4_str_skip(ds4_prompt_view(prompt), span.start), span.end - span.start),
        ds4_str_view(text)));
}

static void adjoining_literals_share_a_span(void **state)
{
    struct ds4_prompt prompt;

    (void)state;
    ds4_prompt_init(&prompt, PROMPT_BYTES);
    ds4_prompt_literal(&prompt, DS4_STR("</"));
    ds4_prompt_literal(&prompt, DS4_STR("think>"));
    ds4_prompt_content(&prompt, DS4_STR("text"));
    ds4_prompt_literal(&prompt, DS4_STR(""));
    ds4_prompt_content(&prompt, DS4_STR("more"));
    ds4_prompt_literal(&prompt, DS4_STR("end"));
    assert_int_equal(ds4_prompt_check(&prompt, NULL), 0);
    assert_string_equal(prompt.text.ptr, "</think>textmoreend");
    assert_int_equal(prompt.literals.len, 2);
    assert_span(&prompt, 0, "</think>");
    assert_span(&prompt, 1, "end");
    ds4_prompt_deinit(&prompt);
}

static void a_completion_begins_with_one_bos(void **state)
{
    struct ds4_prompt prompt;

    (void)state;
    ds4_prompt_init(&prompt, PROMPT_BYTES);
    ds4_prompt_completion(&prompt, DS4_STR("hello"), no_suffix, false);
    assert_string_equal(prompt.text.ptr, BOS "hello");
    assert_span(&prompt, 0, BOS);
    ds4_prompt_deinit(&prompt);
    ds4_prompt_init(&prompt, PROMPT_BYTES);
    ds4_prompt_completion(&prompt, DS4_STR(BOS "<｜User｜>x"), no_suffix, true);
    assert_string_equal(prompt.text.ptr, BOS "<｜User｜>x");
    assert_span(&prompt, 0, BOS "<｜User｜>x");
    ds4_prompt_deinit(&prompt);
}

static void a_suffix_makes_it_fill_in_the_middle(void **state)
{
    struct ds4_prompt prompt;

    (void)state;
    ds4_prompt_init(&prompt, PROMPT_BYTES);
    ds4_prompt_completion(&prompt, DS4_STR("a = "), DS4_STR("\n"), false);
    assert_string_equal(prompt.text.ptr, BOS "<｜fim▁begin｜>a = <｜fim▁hole｜>\n<｜fim▁end｜>");
    assert_int_equal(prompt.literals.len, 3);
    ds4_prompt_deinit(&prompt);
}

static void a_full_prompt_fails_at_the_check(void **state)
{
    struct ds4_prompt prompt;
    struct ds4_err err = {0};

    (void)state;
    ds4_prompt_init(&prompt, 8);
    ds4_prompt_literal(&prompt, DS4_STR("1234567"));
    ds4_prompt_content(&prompt, DS4_STR("89"));
    ds4_prompt_literal(&prompt, DS4_STR("x"));
    assert_int_equal(ds4_prompt_check(&prompt, &err), -1);
    assert_int_equal(err.code, DS4_E_TOO_LONG);
    ds4_prompt_deinit(&prompt);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(adjoining_literals_share_a_span),
        cmocka_unit_test(a_completion_begins_with_one_bos),
        cmocka_unit_test(a_suffix_makes_it_fill_in_the_middle),
        cmocka_unit_test(a_full_prompt_fails_at_the_check),
    };

    return cmocka_run_group_tests_name("prompt", tests, NULL, NULL);
}

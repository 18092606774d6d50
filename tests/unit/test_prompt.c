/* A prompt knows which of its text is ours. */
#include "router/text/prompt.h"

#include "router/text/vocab_load.h"

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

static void sampled_tokens_stand_in_the_prompt_as_they_are(void **state)
{
    /* Not what the encoder makes of the text. */
    static const struct ds4_str pieces[] = {DS4_STR("h"), DS4_STR("e"), DS4_STR("llo")};
    struct ds4_vocab *vocab = ds4_vocab_load("tests/data/ds4-tiny.gguf", NULL, NULL);
    struct ds4_bpe *bpe = ds4_bpe_new(vocab, NULL);
    struct ds4_ids odd = {0}, want = {0}, got = {0};
    struct ds4_prompt prompt;

    (void)state;
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(ds4_bpe_encode(bpe, pieces[i], DS4_BPE_PLAIN, &odd, NULL), 0);
    ds4_prompt_init(&prompt, PROMPT_BYTES);
    for (int turn = 0; turn < 2; turn++) {
        ds4_prompt_literal(&prompt, DS4_STR("<｜User｜>"));
        ds4_prompt_content(&prompt, DS4_STR("hello</think>"));
        ds4_prompt_literal(&prompt, DS4_STR("<think>"));
        ds4_prompt_exact(&prompt, DS4_STR("hello"), odd.ptr, (int32_t)odd.len);
        ds4_prompt_literal(&prompt, DS4_STR("<｜end▁of▁sentence｜>"));
    }
    for (int turn = 0; turn < 2; turn++) {
        assert_int_equal(ds4_bpe_encode(bpe, DS4_STR("<｜User｜>"), DS4_BPE_SPECIAL, &want, NULL),
                         0);
        assert_int_equal(ds4_bpe_encode(bpe, DS4_STR("hello</think>"), DS4_BPE_PLAIN, &want, NULL),
                         0);
        assert_int_equal(ds4_bpe_encode(bpe, DS4_STR("<think>"), DS4_BPE_SPECIAL, &want, NULL), 0);
        for (size_t i = 0; i < odd.len; i++)
            assert_int_equal(DS4_VEC_PUSH(&want, odd.ptr[i]), 0);
        assert_int_equal(
            ds4_bpe_encode(bpe, DS4_STR("<｜end▁of▁sentence｜>"), DS4_BPE_SPECIAL, &want, NULL), 0);
    }
    assert_int_equal(ds4_prompt_encode(&prompt, bpe, DS4_SPECIALS_PLAIN, &got, NULL), 0);
    assert_int_equal(got.len, want.len);
    assert_memory_equal(got.ptr, want.ptr, got.len * sizeof(*got.ptr));
    ds4_prompt_deinit(&prompt);
    DS4_VEC_DEINIT(&odd);
    DS4_VEC_DEINIT(&want);
    DS4_VEC_DEINIT(&got);
    ds4_bpe_free(bpe);
    ds4_vocab_free(vocab);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(adjoining_literals_share_a_span),
        cmocka_unit_test(a_completion_begins_with_one_bos),
        cmocka_unit_test(a_suffix_makes_it_fill_in_the_middle),
        cmocka_unit_test(a_full_prompt_fails_at_the_check),
        cmocka_unit_test(sampled_tokens_stand_in_the_prompt_as_they_are),
    };

    return cmocka_run_group_tests_name("prompt", tests, NULL, NULL);
}

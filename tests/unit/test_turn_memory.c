/* The turn memory: sampled tokens come back for the same bytes in the same place, and nowhere else. */
#include "router/turn_memory.h"

#include "router/text/vocab.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define PROMPT_BYTES ((size_t)1 << 20)

static const int32_t ids[] = {7, 7, 7};

/* header, tag, turn, end token, as a template writes them */
static void add_turn(struct ds4_prompt *prompt, enum ds4_special tag, const char *text,
                     bool as_text)
{
    void (*structure)(struct ds4_prompt *, struct ds4_str) =
        as_text ? ds4_prompt_content : ds4_prompt_literal;

    structure(prompt, ds4_special_text(DS4_SPECIAL_ASSISTANT));
    structure(prompt, ds4_special_text(tag));
    ds4_prompt_content(prompt, ds4_str_view(text));
    structure(prompt, ds4_special_text(DS4_SPECIAL_EOS));
}

static void a_turn_gets_its_sampled_tokens_where_it_was_said(void **state)
{
    struct ds4_turn_memory *m = ds4_turn_memory_new(NULL);
    struct ds4_prompt prompt;

    (void)state;
    assert_non_null(m);
    ds4_turn_memory_put(m, DS4_STR("eee"), ids, 3);
    ds4_prompt_init(&prompt, PROMPT_BYTES);
    ds4_prompt_literal(&prompt, ds4_special_text(DS4_SPECIAL_BOS));
    ds4_prompt_literal(&prompt, ds4_special_text(DS4_SPECIAL_USER));
    ds4_prompt_content(&prompt, DS4_STR("eee"));
    add_turn(&prompt, DS4_SPECIAL_THINK_CLOSE, "eee", false);
    add_turn(&prompt, DS4_SPECIAL_THINK_CLOSE, "eeee", false);
    add_turn(&prompt, DS4_SPECIAL_THINK_OPEN, "eee", false);
    /* A client's text that looks like structure is none. */
    add_turn(&prompt, DS4_SPECIAL_THINK_CLOSE, "eee", true);
    ds4_prompt_literal(&prompt, ds4_special_text(DS4_SPECIAL_ASSISTANT));
    assert_int_equal(ds4_turn_memory_restore(m, &prompt, NULL), 2);
    assert_int_equal(prompt.exact.len, 2);
    for (size_t e = 0; e < 2; e++) {
        struct ds4_prompt_exact exact = prompt.exact.ptr[e];

        assert_memory_equal(prompt.text.ptr + exact.start, "eee", 3);
        assert_int_equal(exact.end - exact.start, 3);
        assert_memory_equal(exact.id, ids, sizeof(ids));
    }
    assert_int_equal(ds4_turn_memory_restore(m, &prompt, NULL), 0); /* they are known already */
    ds4_prompt_deinit(&prompt);
    ds4_turn_memory_free(m);
}

static void a_turn_with_a_tag_of_its_own_is_one_stretch(void **state)
{
    struct ds4_turn_memory *m = ds4_turn_memory_new(NULL);
    struct ds4_prompt prompt;
    size_t literals = 0;

    (void)state;
    assert_non_null(m);
    ds4_turn_memory_put(m, DS4_STR("why</think>so"), ids, 3);
    ds4_prompt_init(&prompt, PROMPT_BYTES);
    ds4_prompt_literal(&prompt, ds4_special_text(DS4_SPECIAL_ASSISTANT));
    ds4_prompt_literal(&prompt, ds4_special_text(DS4_SPECIAL_THINK_OPEN));
    ds4_prompt_content(&prompt, DS4_STR("why"));
    ds4_prompt_literal(&prompt, ds4_special_text(DS4_SPECIAL_THINK_CLOSE));
    ds4_prompt_content(&prompt, DS4_STR("so"));
    ds4_prompt_literal(&prompt, ds4_special_text(DS4_SPECIAL_EOS));
    assert_int_equal(ds4_turn_memory_restore(m, &prompt, NULL), 1);
    for (size_t i = 0; i < prompt.literals.len; i++) {
        assert_true(prompt.literals.ptr[i].end <= prompt.exact.ptr[0].start ||
                    prompt.literals.ptr[i].start >= prompt.exact.ptr[0].end);
        literals += prompt.literals.ptr[i].end - prompt.literals.ptr[i].start;
    }
    assert_int_equal(literals + strlen("why</think>so"), prompt.text.len);
    ds4_prompt_deinit(&prompt);
    ds4_turn_memory_free(m);
}

static void it_is_bounded_and_the_newest_tokens_of_a_text_count(void **state)
{
    struct ds4_turn_memory *m = ds4_turn_memory_new(NULL);
    static char big[DS4_TURN_MEMORY_TURN_BYTES + 1];
    static const int32_t other[] = {8, 8};
    struct ds4_prompt prompt;
    char text[32];

    (void)state;
    assert_non_null(m);
    memset(big, 'x', sizeof(big));
    ds4_turn_memory_put(m, (struct ds4_str){big, sizeof(big)}, ids, 3);
    assert_int_equal(ds4_turn_memory_count(m), 0);
    for (int32_t i = 0; i < 3 * DS4_TURN_MEMORY_TURNS; i++) {
        (void)snprintf(text, sizeof(text), "turn %d", i);
        ds4_turn_memory_put(m, ds4_str_view(text), ids, 3);
    }
    assert_int_equal(ds4_turn_memory_count(m), DS4_TURN_MEMORY_TURNS);
    for (size_t i = 0; i < 100; i++) {
        big[0] = (char)('a' + i % 26);
        big[1] = (char)('a' + i / 26);
        ds4_turn_memory_put(m, (struct ds4_str){big, DS4_TURN_MEMORY_TURN_BYTES - 64}, ids, 3);
    }
    assert_true(ds4_turn_memory_bytes(m) <= DS4_TURN_MEMORY_BYTES);
    ds4_turn_memory_put(m, DS4_STR("eee"), ids, 3);
    ds4_turn_memory_put(m, DS4_STR("eee"), other, 2);
    ds4_prompt_init(&prompt, PROMPT_BYTES);
    add_turn(&prompt, DS4_SPECIAL_THINK_CLOSE, "eee", false);
    assert_int_equal(ds4_turn_memory_restore(m, &prompt, NULL), 1);
    assert_int_equal(prompt.exact.ptr[0].n_id, 2);
    ds4_prompt_deinit(&prompt);
    ds4_turn_memory_free(m);
}

/* Each turn was looked for from the first one on: a prompt of 100,000 held the router for minutes. */
static void a_prompt_of_very_many_turns_takes_no_time(void **state)
{
    enum { TURNS = 100000, LIMIT_S = 60 };
    struct ds4_turn_memory *m = ds4_turn_memory_new(NULL);
    struct ds4_prompt prompt;
    size_t exact = 0, before = 0;

    (void)state;
    assert_non_null(m);
    ds4_turn_memory_put(m, DS4_STR("eee"), ids, 3);
    ds4_turn_memory_put(m, DS4_STR("why</think>so"), ids, 3);
    ds4_prompt_init(&prompt, PROMPT_BYTES << 5);
    for (int i = 0; i < TURNS; i++) {
        ds4_prompt_literal(&prompt, ds4_special_text(DS4_SPECIAL_USER));
        ds4_prompt_content(&prompt, DS4_STR("a"));
        if (i % 3 > 0) {
            add_turn(&prompt, DS4_SPECIAL_THINK_CLOSE, i % 3 == 1 ? "eee" : "e", false);
            continue;
        }
        ds4_prompt_literal(&prompt, ds4_special_text(DS4_SPECIAL_ASSISTANT));
        ds4_prompt_literal(&prompt, ds4_special_text(DS4_SPECIAL_THINK_OPEN));
        ds4_prompt_content(&prompt, DS4_STR("why"));
        ds4_prompt_literal(&prompt, ds4_special_text(DS4_SPECIAL_THINK_CLOSE));
        ds4_prompt_content(&prompt, DS4_STR("so"));
        ds4_prompt_literal(&prompt, ds4_special_text(DS4_SPECIAL_EOS));
    }
    alarm(LIMIT_S);
    assert_int_equal(ds4_turn_memory_restore(m, &prompt, NULL), (2 * TURNS + 2) / 3);
    assert_int_equal(ds4_turn_memory_restore(m, &prompt, NULL), 0);
    alarm(0);
    assert_int_equal(prompt.exact.len, (2 * TURNS + 2) / 3);
    for (size_t i = 0; i < prompt.literals.len; i++) {
        struct ds4_bpe_span span = prompt.literals.ptr[i];

        assert_true(span.start < span.end && (i == 0 || span.start > before));
        while (exact < prompt.exact.len && prompt.exact.ptr[exact].end <= span.start)
            exact++;
        assert_true(exact == prompt.exact.len || prompt.exact.ptr[exact].start >= span.end);
        before = span.end;
    }
    ds4_prompt_deinit(&prompt);
    ds4_turn_memory_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_turn_gets_its_sampled_tokens_where_it_was_said),
        cmocka_unit_test(a_turn_with_a_tag_of_its_own_is_one_stretch),
        cmocka_unit_test(a_prompt_of_very_many_turns_takes_no_time),
        cmocka_unit_test(it_is_bounded_and_the_newest_tokens_of_a_text_count),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

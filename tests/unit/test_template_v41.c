/* The V4.1 encoder against prompts made from the published reference, and the 1017 variant. */
#include "router/text/template.h"

#include "tests/support/text_vectors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

#define N_CASE       91
#define ARENA_BYTES  ((size_t)64 << 20)
#define PROMPT_BYTES ((size_t)16 << 20)

static void prompts_equal_the_reference_byte_for_byte(void **state)
{
    size_t n_case;

    (void)state;
    assert_int_equal(text_vectors_render("tests/data/encoding/render_v41.json", &n_case), 0);
    assert_true(n_case >= N_CASE);
}

/* user, call with reasoning, its result: a tool loop without declared tools. */
static void render_loop(bool results_no_boundary, struct ds4_prompt *prompt)
{
    struct ds4_arena arena;
    struct ds4_call call = {
        .id = DS4_STR("c"), .name = DS4_STR("now"), .kind = DS4_ARGUMENTS_RAW, .raw = DS4_STR("x")};
    struct ds4_message messages[] = {
        {.role = DS4_ROLE_USER, .content = DS4_STR("q")},
        {.role = DS4_ROLE_ASSISTANT, .reasoning = DS4_STR("why"), .calls = &call, .n_call = 1},
        {.role = DS4_ROLE_TOOL, .tool_call_id = DS4_STR("c"), .content = DS4_STR("r")},
    };
    struct ds4_chat chat = {.release = DS4_RELEASE_V41,
                            .thinking = true,
                            .results_no_boundary = results_no_boundary,
                            .messages = messages,
                            .n_message = 3};

    ds4_arena_init(&arena, ARENA_BYTES);
    ds4_prompt_init(prompt, PROMPT_BYTES);
    assert_int_equal(ds4_template_render(&chat, &arena, prompt, NULL), 0);
    ds4_arena_deinit(&arena);
}

static void results_end_the_history_unless_1017_says_otherwise(void **state)
{
    struct ds4_prompt september, october;

    (void)state;
    render_loop(false, &september);
    render_loop(true, &october);
    assert_null(strstr(september.text.ptr, "why"));
    assert_non_null(strstr(october.text.ptr, "<think>why</think>"));
    assert_true(ds4_str_ends(ds4_prompt_view(&october), DS4_STR("<｜Assistant｜><think>")));
    ds4_prompt_deinit(&september);
    ds4_prompt_deinit(&october);
}

static void the_stable_part_ends_behind_the_system_message(void **state)
{
    struct ds4_arena arena;
    struct ds4_prompt prompt;
    struct ds4_message messages[] = {
        {.role = DS4_ROLE_SYSTEM, .content = DS4_STR("S")},
        {.role = DS4_ROLE_USER, .content = DS4_STR("q")},
    };
    struct ds4_chat chat = {.release = DS4_RELEASE_V41, .messages = messages, .n_message = 2};

    (void)state;
    ds4_arena_init(&arena, ARENA_BYTES);
    ds4_prompt_init(&prompt, PROMPT_BYTES);
    assert_int_equal(ds4_template_render(&chat, &arena, &prompt, NULL), 0);
    assert_true(ds4_str_ends(ds4_str_head(ds4_prompt_view(&prompt), prompt.stable_bytes),
                             DS4_STR("<｜System｜>S")));
    assert_false(prompt.in_reasoning);
    ds4_prompt_deinit(&prompt);
    ds4_arena_deinit(&arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prompts_equal_the_reference_byte_for_byte),
        cmocka_unit_test(results_end_the_history_unless_1017_says_otherwise),
        cmocka_unit_test(the_stable_part_ends_behind_the_system_message),
    };

    return cmocka_run_group_tests_name("template_v41", tests, NULL, NULL);
}

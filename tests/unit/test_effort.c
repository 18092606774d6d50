/* Effort resolution: who decides, what is refused, what is reported. */
#include "router/text/effort.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

#define ARENA_BYTES ((size_t)1 << 20)

static struct ds4_arena arena;

static const struct ds4_jt_node *json(const char *text)
{
    const struct ds4_jt_node *node = ds4_jt_parse(ds4_str_view(text), 16, &arena, NULL);

    assert_non_null(node);
    return node;
}

static struct ds4_effort_policy policy(enum ds4_release release)
{
    return (struct ds4_effort_policy){.release = release,
                                      .default_effort = DS4_THINK_HIGH,
                                      .context_tok = 1048576,
                                      .max_min_context = 393216};
}

static void add(struct ds4_effort_wish *wish, enum ds4_effort_priority priority, const char *value)
{
    assert_int_equal(ds4_effort_add_value(wish, priority, json(value), DS4_RELEASE_V41, NULL), 0);
}

static struct ds4_effort resolve(const struct ds4_effort_wish *wish)
{
    struct ds4_effort_policy p = policy(DS4_RELEASE_V4_0731);

    return ds4_effort_resolve(wish, &p);
}

static void nothing_said_means_the_servers_default(void **state)
{
    struct ds4_effort_wish wish = {0};
    struct ds4_effort effort = resolve(&wish);

    (void)state;
    assert_true(effort.thinking);
    assert_int_equal(effort.level, DS4_EFFORT_HIGH);
    assert_false(effort.is_requested);
    assert_false(effort.from_request);
}

static void names_map_as_published(void **state)
{
    static const struct {
        const char *word;
        enum ds4_effort_level level;
    } cases[] = {
        {"\"minimal\"", DS4_EFFORT_LOW}, {"\"low\"", DS4_EFFORT_LOW},
        {"\"medium\"", DS4_EFFORT_HIGH}, {"\"high\"", DS4_EFFORT_HIGH},
        {"\"xhigh\"", DS4_EFFORT_HIGH},  {"\"max\"", DS4_EFFORT_MAX},
        {"\"ultra\"", DS4_EFFORT_MAX},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct ds4_effort_wish wish = {0};

        add(&wish, DS4_EFFORT_BY_EFFORT, cases[i].word);
        assert_int_equal(resolve(&wish).level, cases[i].level);
        assert_true(resolve(&wish).from_request);
    }
}

static void none_means_off(void **state)
{
    struct ds4_effort_wish wish = {0};
    struct ds4_effort effort;

    (void)state;
    add(&wish, DS4_EFFORT_BY_EFFORT, "\"none\"");
    effort = resolve(&wish);
    assert_false(effort.thinking);
    assert_true(ds4_str_equal(effort.applied.word, DS4_STR("none")));
    assert_true(ds4_str_equal(effort.requested.word, DS4_STR("none")));
}

static void unknown_words_and_types_are_refused(void **state)
{
    static const char *const bad[] = {"\"banana\"", "\"\"", "\"High\"", "true", "[]",
                                      "0",          "101",  "33.0",     "1e1",  "-5"};
    struct ds4_effort_wish wish = {0};
    struct ds4_err err = {0};

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(
            ds4_effort_add_value(&wish, DS4_EFFORT_BY_EFFORT, json(bad[i]), DS4_RELEASE_V41, &err),
            -1);
        assert_int_equal(err.code, DS4_E_INVALID);
        assert_non_null(strstr(err.msg, "minimal, low, medium, high, xhigh, max, ultra"));
    }
    assert_int_equal(
        ds4_effort_add_value(&wish, DS4_EFFORT_BY_EFFORT, json("40"), DS4_RELEASE_V4_0731, &err),
        -1);
    assert_int_equal(
        ds4_effort_add_value(&wish, DS4_EFFORT_BY_EFFORT, json("null"), DS4_RELEASE_V4_0731, &err),
        0);
    assert_false(wish.has_first);
}

static void off_wins_at_equal_priority(void **state)
{
    struct ds4_effort_wish wish = {0};

    (void)state;
    ds4_effort_add_switch(&wish, DS4_EFFORT_BY_THINKING, true);
    ds4_effort_add_switch(&wish, DS4_EFFORT_BY_THINKING, false);
    assert_false(resolve(&wish).thinking);
}

static void a_higher_priority_decides(void **state)
{
    struct ds4_effort_wish on = {0}, off = {0}, effort = {0};

    (void)state;
    ds4_effort_add_switch(&on, DS4_EFFORT_BY_KWARGS, true);
    ds4_effort_add_switch(&on, DS4_EFFORT_BY_THINKING, false);
    assert_true(resolve(&on).thinking);
    add(&off, DS4_EFFORT_BY_EFFORT, "\"max\"");
    ds4_effort_add_switch(&off, DS4_EFFORT_BY_THINKING, false);
    assert_false(resolve(&off).thinking);
    assert_true(ds4_str_equal(resolve(&off).requested.word, DS4_STR("max")));
    add(&effort, DS4_EFFORT_BY_KWARGS, "\"low\"");
    add(&effort, DS4_EFFORT_BY_EFFORT, "\"max\"");
    ds4_effort_add_switch(&effort, DS4_EFFORT_BY_THINKING, false);
    assert_true(resolve(&effort).thinking);
    assert_int_equal(resolve(&effort).level, DS4_EFFORT_LOW);
}

static void max_needs_its_context_and_says_so(void **state)
{
    struct ds4_effort_wish wish = {0};
    struct ds4_effort_policy p = policy(DS4_RELEASE_V4_0731);
    struct ds4_effort effort;

    (void)state;
    add(&wish, DS4_EFFORT_BY_EFFORT, "\"max\"");
    p.context_tok = p.max_min_context - 1;
    effort = ds4_effort_resolve(&wish, &p);
    assert_int_equal(effort.level, DS4_EFFORT_HIGH);
    assert_true(effort.downgraded);
    assert_string_equal(effort.why, "context 393215 < 393216");
    p.context_tok++;
    assert_false(ds4_effort_resolve(&wish, &p).downgraded);
    p.context_tok = 1;
    p.max_min_context = 0;
    assert_int_equal(ds4_effort_resolve(&wish, &p).level, DS4_EFFORT_MAX);
}

static void numbers_are_budgets_of_v41(void **state)
{
    struct ds4_effort_wish wish = {0};
    struct ds4_effort_policy p = policy(DS4_RELEASE_V41);
    struct ds4_effort effort;

    (void)state;
    add(&wish, DS4_EFFORT_BY_EFFORT, "100");
    p.context_tok = 4096; /* the floor is about the word max */
    effort = ds4_effort_resolve(&wish, &p);
    assert_int_equal(effort.level, DS4_EFFORT_BUDGET);
    assert_int_equal(effort.budget, 100);
    assert_int_equal(effort.applied.number, 100);
    assert_false(effort.downgraded);
}

static void the_preview_has_no_low(void **state)
{
    struct ds4_effort_wish wish = {0};
    struct ds4_effort_policy p = policy(DS4_RELEASE_V4_PREVIEW);

    (void)state;
    add(&wish, DS4_EFFORT_BY_EFFORT, "\"low\"");
    assert_int_equal(ds4_effort_resolve(&wish, &p).level, DS4_EFFORT_HIGH);
    assert_false(ds4_effort_resolve(&wish, &p).downgraded);
}

static void a_token_budget_selects_an_effort_only_if_none_is_given(void **state)
{
    static const struct {
        const char *budget;
        enum ds4_effort_level level;
    } cases[] = {{"4095", DS4_EFFORT_LOW},
                 {"4096", DS4_EFFORT_HIGH},
                 {"24575", DS4_EFFORT_HIGH},
                 {"24576", DS4_EFFORT_MAX}};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct ds4_effort_wish wish = {0};

        assert_int_equal(ds4_effort_add_budget(&wish, json(cases[i].budget), NULL), 0);
        assert_int_equal(resolve(&wish).level, cases[i].level);
        add(&wish, DS4_EFFORT_BY_EFFORT, "\"high\"");
        assert_int_equal(resolve(&wish).level, DS4_EFFORT_HIGH);
    }
}

static void thinking_objects_are_read_by_type(void **state)
{
    struct ds4_effort_wish wish = {0};
    struct ds4_err err = {0};

    (void)state;
    assert_int_equal(ds4_effort_add_thinking(&wish, DS4_EFFORT_BY_THINKING,
                                             json("{\"type\":\"enabled\",\"budget_tokens\":1024}"),
                                             true, NULL),
                     0);
    assert_true(wish.on[DS4_EFFORT_BY_THINKING]);
    assert_int_equal(wish.budget_tok, 1024);
    wish = (struct ds4_effort_wish){0};
    assert_int_equal(ds4_effort_add_thinking(&wish, DS4_EFFORT_BY_THINKING,
                                             json("{\"type\":\"adaptive\"}"), true, NULL),
                     0);
    assert_false(wish.on[DS4_EFFORT_BY_THINKING] || wish.off[DS4_EFFORT_BY_THINKING]);
    assert_int_equal(ds4_effort_add_thinking(&wish, DS4_EFFORT_BY_THINKING,
                                             json("{\"type\":\"maybe\"}"), true, &err),
                     -1);
    assert_int_equal(ds4_effort_add_thinking(&wish, DS4_EFFORT_BY_KWARGS,
                                             json("{\"type\":\"enabled\"}"), false, &err),
                     -1);
    assert_int_equal(
        ds4_effort_add_thinking(&wish, DS4_EFFORT_BY_THINKING, json("\"true\""), true, &err), -1);
}

static void model_names_may_carry_a_wish(void **state)
{
    struct ds4_effort_wish chat = {0}, max = {0}, plain = {0};

    (void)state;
    ds4_effort_add_model(&chat, DS4_STR("deepseek-chat"));
    assert_false(resolve(&chat).thinking);
    ds4_effort_add_model(&max, DS4_STR("flash:max"));
    assert_int_equal(resolve(&max).level, DS4_EFFORT_MAX);
    ds4_effort_add_model(&plain, DS4_STR("flash"));
    assert_false(resolve(&plain).from_request);
}

static int make(void **state)
{
    (void)state;
    ds4_arena_init(&arena, ARENA_BYTES);
    return 0;
}

static int drop(void **state)
{
    (void)state;
    ds4_arena_deinit(&arena);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_said_means_the_servers_default),
        cmocka_unit_test(names_map_as_published),
        cmocka_unit_test(none_means_off),
        cmocka_unit_test(unknown_words_and_types_are_refused),
        cmocka_unit_test(off_wins_at_equal_priority),
        cmocka_unit_test(a_higher_priority_decides),
        cmocka_unit_test(max_needs_its_context_and_says_so),
        cmocka_unit_test(numbers_are_budgets_of_v41),
        cmocka_unit_test(the_preview_has_no_low),
        cmocka_unit_test(a_token_budget_selects_an_effort_only_if_none_is_given),
        cmocka_unit_test(thinking_objects_are_read_by_type),
        cmocka_unit_test(model_names_may_carry_a_wish),
    };

    return cmocka_run_group_tests_name("effort", tests, make, drop);
}

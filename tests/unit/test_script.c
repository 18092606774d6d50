/* Rules of the scripted stage. */
#include "tests/support/script.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

static struct ds4_script parsed(const char *text)
{
    struct ds4_script script;
    struct ds4_err err = {0};

    if (ds4_script_parse(&script, ds4_str_view(text), &err) != 0)
        fail_msg("%s", err.msg);
    return script;
}

static void says(struct ds4_script *script, const char *prompt, const char *want)
{
    struct ds4_buf out;
    const struct ds4_script_rule *rule = ds4_script_match(script, ds4_str_view(prompt));

    ds4_buf_init(&out, 4096);
    assert_int_equal(ds4_script_say(rule, ds4_str_view(prompt), &out), 0);
    assert_int_equal(ds4_buf_append_byte(&out, 0), 0);
    assert_string_equal(out.ptr, want);
    ds4_buf_deinit(&out);
}

static void first_rule_that_fits_speaks(void **state)
{
    struct ds4_script script =
        parsed("{\"rules\": [{\"contains\": \"a\", \"lacks\": \"b\", \"text\": \"1\"},"
               "{\"last\": \"c\", \"text\": \"2\"}, {\"turn\": 2, \"text\": \"3\"}]}");

    (void)state;
    says(&script, "a", "1");
    says(&script, "ab", "ok");
    says(&script, "ac<｜User｜>b", "ok");
    says(&script, "ab<｜User｜>c", "2");
    says(&script, "b<｜User｜>x<｜Assistant｜>y<｜User｜><｜Assistant｜>", "3");
    ds4_script_deinit(&script);
}

static void thinking_is_said_only_where_the_prompt_opened_it(void **state)
{
    struct ds4_script script =
        parsed("{\"rules\": [{\"last\": \"raw\", \"raw\": true, \"text\": \"r\"},"
               "{\"thinking\": \"hm {turn}\", \"text\": \"t {turn}\"}]}");

    (void)state;
    says(&script, "<｜Assistant｜><think>", "hm 1</think>t 1");
    says(&script, "<｜Assistant｜></think>", "t 1");
    says(&script, "raw<｜Assistant｜><think>", "r");
    ds4_script_deinit(&script);
}

static void rule_is_used_up_after_its_times(void **state)
{
    struct ds4_script script = parsed("{\"rules\": [{\"times\": 1, \"text\": \"once\"}]}");

    (void)state;
    says(&script, "", "once");
    says(&script, "", "ok");
    ds4_script_deinit(&script);
}

static void misspelt_members_are_refused(void **state)
{
    static const char *const bad[] = {
        "{\"rules\": [{\"txt\": \"\"}]}",  "{\"rule\": []}",  "{\"rules\": [3]}",
        "{\"rules\": [{\"die_at\": -1}]}", "{\"rules\": {}}", "{\"rules\": [{\"repeat\": true}]}",
    };
    struct ds4_script script;
    struct ds4_err err = {0};

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(ds4_script_parse(&script, ds4_str_view(bad[i]), &err), -1);
    assert_int_equal(ds4_script_load(&script, "/nonexistent", &err), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_rule_that_fits_speaks),
        cmocka_unit_test(thinking_is_said_only_where_the_prompt_opened_it),
        cmocka_unit_test(rule_is_used_up_after_its_times),
        cmocka_unit_test(misspelt_members_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

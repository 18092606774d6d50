/* Layers into stages. */
#include "common/model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static void expect_parsed(const char *text, int32_t n, const int32_t *counts)
{
    struct ds4_err err = {0};
    struct ds4_partition p;

    if (ds4_partition_parse(text, &p, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(p.n_stage, n);
    assert_memory_equal(p.n_layer, counts, (size_t)n * sizeof(*counts));
}

static void lists_are_read_with_or_without_braces(void **state)
{
    static const int32_t three[] = {15, 15, 13};
    static const int32_t one[] = {43};

    (void)state;
    expect_parsed("15,15,13", 3, three);
    expect_parsed("{15, 15, 13}", 3, three);
    expect_parsed(" { 15 ,15,\t13 } ", 3, three);
    expect_parsed("43", 1, one);
}

static void what_is_no_list_is_refused(void **state)
{
    static const char *const texts[] = {
        "",       "{}",     "15,,13", "15,13,", ",15", "15 13", "{15,13",
        "15,13}", "a",      "15,x",   "-1,44",  "1.5", "{15}x", "99999999999999999999",
        "0,43",   "{{15}}",
    };
    struct ds4_partition p = {.n_stage = 77};
    struct ds4_err err = {0};

    (void)state;
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        if (ds4_partition_parse(texts[i], &p, &err) == 0)
            fail_msg("\"%s\" was accepted", texts[i]);
        assert_int_equal(err.code, DS4_E_INVALID);
        assert_int_equal(p.n_stage, 77);
    }
}

static void more_stages_than_the_limit_are_refused(void **state)
{
    char text[2 * (DS4_MAX_STAGES + 1) + 1];
    struct ds4_partition p;
    struct ds4_err err = {0};

    (void)state;
    for (int i = 0; i <= DS4_MAX_STAGES; i++)
        memcpy(text + 2 * i, "1,", 2);
    text[2 * DS4_MAX_STAGES - 1] = '\0';
    assert_int_equal(ds4_partition_parse(text, &p, &err), 0);
    assert_int_equal(p.n_stage, DS4_MAX_STAGES);
    text[2 * DS4_MAX_STAGES - 1] = ',';
    text[2 * DS4_MAX_STAGES + 1] = '\0';
    assert_int_equal(ds4_partition_parse(text, &p, &err), -1);
}

static void a_wrong_sum_names_sum_and_expected(void **state)
{
    struct ds4_partition p;
    struct ds4_err err = {0};

    (void)state;
    assert_int_equal(ds4_partition_parse("15,15,12", &p, &err), 0);
    assert_int_equal(ds4_partition_check(&p, 42, &err), 0);
    assert_int_equal(ds4_partition_check(&p, 43, &err), -1);
    assert_int_equal(err.code, DS4_E_INVALID);
    assert_non_null(strstr(err.msg, "15+15+12 has 42 layers, the model has 43"));
}

static void an_even_split_gives_the_rest_to_the_first(void **state)
{
    struct ds4_partition p;
    struct ds4_err err = {0};

    (void)state;
    for (int32_t n = 1; n <= 43; n++) {
        assert_int_equal(ds4_partition_even(43, n, &p, &err), 0);
        assert_int_equal(p.n_stage, n);
        assert_int_equal(ds4_partition_check(&p, 43, &err), 0);
        for (int32_t s = 1; s < n; s++)
            assert_in_range(p.n_layer[s - 1] - p.n_layer[s], 0, 1);
        assert_in_range(p.n_layer[0] - p.n_layer[n - 1], 0, 1);
    }
    assert_int_equal(ds4_partition_even(43, 4, &p, &err), 0);
    assert_int_equal(p.n_layer[2], 11);
    assert_int_equal(p.n_layer[3], 10);
    assert_int_equal(ds4_partition_even(43, 0, &p, &err), -1);
    assert_int_equal(ds4_partition_even(2, 3, &p, &err), -1);
    assert_non_null(strstr(err.msg, "2 layers over 3 stages"));
}

static void parts_are_contiguous_and_ends_have_embedding_and_head(void **state)
{
    static const int32_t counts[] = {15, 15, 13};
    struct ds4_partition p;
    struct ds4_err err = {0};
    struct ds4_model_part part;

    (void)state;
    assert_int_equal(ds4_partition_set(counts, 3, &p, &err), 0);
    part = ds4_partition_part(&p, 0);
    assert_true(part.first_layer == 0 && part.end_layer == 15 && part.embed && !part.head);
    part = ds4_partition_part(&p, 1);
    assert_true(part.first_layer == 15 && part.end_layer == 30 && !part.embed && !part.head);
    part = ds4_partition_part(&p, 2);
    assert_true(part.first_layer == 30 && part.end_layer == 43 && !part.embed && part.head);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists_are_read_with_or_without_braces),
        cmocka_unit_test(what_is_no_list_is_refused),
        cmocka_unit_test(more_stages_than_the_limit_are_refused),
        cmocka_unit_test(a_wrong_sum_names_sum_and_expected),
        cmocka_unit_test(an_even_split_gives_the_rest_to_the_first),
        cmocka_unit_test(parts_are_contiguous_and_ends_have_embedding_and_head),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

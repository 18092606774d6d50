/* Answers against JSON schemas: cases from the keywords' definitions in JSON Schema 2020-12. */
#include "router/parse/conform.h"

#include "common/buf.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct row {
    const char *schema;
    const char *good; /* answers, one a line */
    const char *bad;
};

static void check(const char *schema, const char *answers, int want)
{
    while (*answers != '\0') {
        size_t n = strcspn(answers, "\n");
        struct ds4_err err = {0};

        if (ds4_conform(ds4_str_view(schema), (struct ds4_str){answers, n}, &err) != want)
            fail_msg("%s\n%.*s\n%s", schema, (int)n, answers, err.msg);
        answers += n + (answers[n] == '\n');
    }
}

static void keywords_mean_what_json_schema_says(void **state)
{
    static const struct row rows[] = {
        {"{\"type\":\"object\"}", "{}\n {\"a\":1} ", "[]\nnull\n{\n{} {}\nyes"},
        {"", "{}\n{\"a\":[]}", "[]\n3\nx"},
        {"true", "1\nnull", "x"},
        {"false", "", "1"},
        {"{\"type\":\"integer\"}", "3\n-0\n2.0\n1e3", "2.5\n\"3\"\n1e999"},
        {"{\"type\":[\"string\",\"null\"]}", "\"\"\nnull", "false\n0"},
        {"{\"enum\":[1,\"a\",{\"b\":[1,2]}]}", "1\n1.0\n\"a\"\n{\"b\":[1,2]}",
         "2\n\"b\"\n{\"b\":[2,1]}"},
        {"{\"const\":null}", "null", "0"},
        {"{\"minimum\":2,\"exclusiveMaximum\":5}", "2\n4.9\n\"text\"", "1.9\n5"},
        {"{\"multipleOf\":0.1}", "0.3\n7\n-0.2", "0.35"},
        {"{\"minLength\":2,\"maxLength\":3}", "\"ab\"\n\"äöü\"\n\"\\u00e4b\"",
         "\"a\"\n\"abcd\"\n\"\""},
        {"{\"properties\":{\"a\":{\"type\":\"number\"}},\"required\":[\"a\"],"
         "\"additionalProperties\":false}",
         "{\"a\":1}\n{\"a\":\"x\",\"a\":2}", "{}\n{\"a\":\"1\"}\n{\"a\":1,\"b\":2}"},
        {"{\"additionalProperties\":{\"type\":\"string\"},\"maxProperties\":2,\"minProperties\":1}",
         "{\"x\":\"\"}", "{}\n{\"x\":1}\n{\"a\":\"\",\"b\":\"\",\"c\":\"\"}"},
        {"{\"propertyNames\":{\"maxLength\":1}}", "{\"a\":1}", "{\"ab\":1}"},
        {"{\"items\":{\"type\":\"integer\"},\"minItems\":1,\"maxItems\":2}", "[1]\n[1,2]",
         "[]\n[1,2,3]\n[1.5]"},
        {"{\"prefixItems\":[{\"type\":\"string\"}],\"items\":false}", "[]\n[\"a\"]",
         "[1]\n[\"a\",1]"},
        {"{\"uniqueItems\":true}", "[1,2]\n[[1],[2]]", "[1,1.0]\n[{\"a\":1},{\"a\":1}]"},
        {"{\"anyOf\":[{\"type\":\"string\"},{\"minimum\":3}]}", "\"a\"\n3", "2"},
        {"{\"oneOf\":[{\"type\":\"integer\"},{\"minimum\":3}]}", "2\n3.5", "3\n1.5"},
        {"{\"allOf\":[{\"minimum\":1},{\"maximum\":2}],\"not\":{\"const\":1.5}}", "1\n2",
         "0\n3\n1.5"},
        {"{\"if\":{\"type\":\"string\"},\"then\":{\"minLength\":1},\"else\":{\"const\":0}}",
         "\"a\"\n0", "\"\"\n1"},
        {"{\"$defs\":{\"tree\":{\"type\":\"object\",\"properties\":{\"kids\":{\"type\":\"array\","
         "\"items\":{\"$ref\":\"#/$defs/tree\"}}}}},\"$ref\":\"#/$defs/tree\"}",
         "{}\n{\"kids\":[{},{\"kids\":[]}]}", "{\"kids\":[{\"kids\":[3]}]}\n[]"},
        {"{\"title\":\"t\",\"format\":\"date\",\"x-own\":1}", "1\n\"no date\"", ""},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        check(rows[i].schema, rows[i].good, 0);
        check(rows[i].schema, rows[i].bad, -1);
    }
}

static void errors_name_the_place(void **state)
{
    static const struct {
        const char *schema, *answer, *message;
    } rows[] = {
        {"{\"properties\":{\"a\":{\"items\":{\"type\":\"number\"}}}}", "{\"a\":[1,\"x\"]}",
         "a[1] must be of type number"},
        {"{\"required\":[\"city\"]}", "{}", "the answer lacks the member city"},
        {"{\"additionalProperties\":false}", "{\"x\":1}",
         "the answer has a member that the schema does not allow, x"},
        {"{\"maximum\":3}", "4", "the answer is above what the schema allows, 3"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct ds4_err err = {0};

        assert_int_equal(
            ds4_conform(ds4_str_view(rows[i].schema), ds4_str_view(rows[i].answer), &err), -1);
        assert_string_equal(err.msg, rows[i].message);
    }
}

static void schema_check(const char *schema, int want)
{
    struct ds4_arena arena;
    struct ds4_err err = {0};
    const struct ds4_jt_node *root;

    ds4_arena_init(&arena, 1 << 20);
    root = ds4_jt_parse(ds4_str_view(schema), DS4_JT_MAX_DEPTH, &arena, &err);
    assert_non_null(root);
    if (ds4_conform_check_schema(root, &err) != want)
        fail_msg("%s: %s", schema, err.msg);
    ds4_arena_deinit(&arena);
}

static void what_cannot_be_checked_is_refused_beforehand(void **state)
{
    (void)state;
    schema_check("{\"properties\":{\"a\":{\"pattern\":\"^a\"}}}", -1);
    schema_check("{\"anyOf\":[{\"contains\":{}}]}", -1);
    schema_check("{\"$ref\":\"http://example.com/s\"}", -1);
    schema_check("{\"$ref\":\"#/$defs/none\"}", -1);
    schema_check("{\"items\":{\"patternProperties\":{}}}", -1);
    /* Not keywords here: names of properties, values. */
    schema_check("{\"properties\":{\"pattern\":{\"type\":\"string\"},\"contains\":{}}}", 0);
    schema_check("{\"enum\":[{\"pattern\":1}],\"default\":{\"$ref\":\"x\"}}", 0);
    schema_check("{\"$defs\":{\"pattern\":{}},\"$ref\":\"#/$defs/pattern\"}", 0);
    schema_check("true", 0);
}

static void endless_schemas_are_given_up(void **state)
{
    struct ds4_err err = {0};
    char list[4096] = "[0";

    (void)state;
    assert_int_equal(ds4_conform(DS4_STR("{\"$ref\":\"#\"}"), DS4_STR("1"), &err), -1);
    assert_int_equal(err.code, DS4_E_TOO_LONG);
    err = (struct ds4_err){0};
    assert_int_equal(
        ds4_conform(DS4_STR("{\"anyOf\":[{\"not\":{\"$ref\":\"#\"}},{\"not\":{\"$ref\":"
                            "\"#\"}},{\"$ref\":\"#\"}]}"),
                    DS4_STR("1"), &err),
        -1);
    assert_int_equal(err.code, DS4_E_TOO_LONG);
    for (int i = 1; i < 500; i++)
        (void)snprintf(list + strlen(list), sizeof(list) - strlen(list), ",%d", i);
    strncat(list, "]", sizeof(list) - strlen(list) - 1);
    err = (struct ds4_err){0};
    assert_int_equal(ds4_conform(DS4_STR("{\"uniqueItems\":true}"), ds4_str_view(list), &err), 0);
}

/* Text around n pieces with commas between; % in a piece is its number, ~ that from the end.  The
 * caller frees it. */
static struct ds4_str repeated(const char *before, const char *piece, int n, const char *after)
{
    struct ds4_buf out;
    struct ds4_str text;

    ds4_buf_init(&out, (size_t)1 << 24);
    (void)ds4_buf_append_text(&out, before);
    for (int i = 0; i < n; i++) {
        (void)ds4_buf_append_text(&out, i == 0 ? "" : ",");
        for (const char *p = piece; *p != '\0'; p++)
            if (*p == '%' || *p == '~')
                (void)ds4_buf_appendf(&out, "%d", *p == '%' ? i : n - 1 - i);
            else
                (void)ds4_buf_append_byte(&out, (unsigned char)*p);
    }
    (void)ds4_buf_append_text(&out, after);
    assert_int_equal(ds4_buf_check(&out, "text", NULL), 0);
    text.ptr = ds4_buf_take(&out, &text.len);
    return text;
}

/* Each took seconds on the loop that serves everybody, and grew with the square of its size. */
static void large_schemas_do_not_hold_up_the_router(void **state)
{
    struct {
        struct ds4_str schema, answer;
    } rows[] = {
        {repeated("{\"properties\":{", "\"k%\":{}", 40000, "}}"),
         repeated("{", "\"x%\":1", 10000, "}")},
        {repeated("{\"required\":[", "\"x9999\"", 40000, "]}"),
         repeated("{", "\"x%\":1", 10000, "}")},
        {repeated("{\"anyOf\":[", "{\"minProperties\":1}", 40000, "]}"),
         repeated("{", "\"x%\":1", 10000, "}")},
        {repeated("{\"enum\":[{", "\"k%\":0", 10000, "}]}"), repeated("{", "\"k~\":0", 10000, "}")},
        {repeated("{\"anyOf\":[", "{\"minLength\":2}", 1000, "]}"),
         repeated("\"", "abcdefgh", 100000, "\"")},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct ds4_err err = {0};

        assert_int_equal(ds4_conform(rows[i].schema, rows[i].answer, &err), -1);
        if (err.code != DS4_E_TOO_LONG)
            fail_msg("row %zu: %s", i, err.msg);
        free((char *)rows[i].schema.ptr);
        free((char *)rows[i].answer.ptr);
    }
}

/* The same before the request is taken: every reference is looked up. */
static void many_references_do_not_hold_up_the_router(void **state)
{
    struct ds4_str defs = repeated("{\"$defs\":{", "\"k%\":{}", 20000, "},\"anyOf\":[");
    struct ds4_str text = repeated(defs.ptr, "{\"$ref\":\"#/$defs/k~\"}", 20000, "]}");
    struct ds4_err err = {0};
    struct ds4_arena arena;
    const struct ds4_jt_node *root;

    (void)state;
    ds4_arena_init(&arena, (size_t)1 << 28);
    root = ds4_jt_parse(text, DS4_JT_MAX_DEPTH, &arena, &err);
    assert_non_null(root);
    assert_int_equal(ds4_conform_check_schema(root, &err), -1);
    assert_int_equal(err.code, DS4_E_TOO_LONG);
    ds4_arena_deinit(&arena);
    free((char *)defs.ptr);
    free((char *)text.ptr);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keywords_mean_what_json_schema_says),
        cmocka_unit_test(errors_name_the_place),
        cmocka_unit_test(what_cannot_be_checked_is_refused_beforehand),
        cmocka_unit_test(endless_schemas_are_given_up),
        cmocka_unit_test(large_schemas_do_not_hold_up_the_router),
        cmocka_unit_test(many_references_do_not_hold_up_the_router),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

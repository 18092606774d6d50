/* Settings: defaults, file syntax, messages with file and line, printing that loads back. */
#include "common/config.h"

#include "common/config_table.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static int start(void **state)
{
    static struct ds4_config config;

    *state = &config;
    return ds4_config_init(&config, NULL);
}

static int stop(void **state)
{
    ds4_config_deinit(*state);
    return 0;
}

static int parse(struct ds4_config *config, const char *text, struct ds4_err *err)
{
    return ds4_config_parse(config, ds4_str_view(text), "t.conf", err);
}

static void defaults_are_those_of_the_design(void **state)
{
    const struct ds4_config *config = *state;

    assert_string_equal(config->http.listen, "127.0.0.1");
    assert_int_equal(config->http.port, 8000);
    assert_int_equal(config->http.max_body, 64 << 20);
    assert_true(config->http.any_model);
    assert_int_equal(config->model.release, DS4_RELEASE_UNSET);
    assert_int_equal(config->sched.max_seqs, 8);
    assert_int_equal(config->sched.default_max_new, 16384);
    assert_int_equal(config->sched.queue_max, 64);
    assert_int_equal(config->sched.queue_s, 120);
    assert_true(config->sampling.temperature == 1.0 && config->sampling.top_p == 1.0);
    assert_int_equal(config->think.default_effort, DS4_THINK_HIGH);
    assert_int_equal(config->think.max_min_context, 393216);
    assert_int_equal(config->cluster.partition.n, 0);
    assert_int_equal(ds4_config_check(config, NULL), 0);
}

static void a_file_sets_what_it_names(void **state)
{
    struct ds4_config *config = *state;

    assert_int_equal(parse(config,
                           "# comment\n"
                           "http {\n  listen = \"::1\"\n  port = 0\n  any_model = no\n"
                           "  cors_origins = {\"https://a\", \"b\"}\n}\n"
                           "cluster { partition = {15, 15, 13} pipe = shm }\n"
                           "sampling { top_p = 0.95 }\n"
                           "think { default = max }\n"
                           "http { max_n = 3 }\n"
                           "log { level = debug }",
                           NULL),
                     0);
    assert_string_equal(config->http.listen, "::1");
    assert_int_equal(config->http.port, 0);
    assert_false(config->http.any_model);
    assert_int_equal(config->http.cors_origins.n, 2);
    assert_string_equal(config->http.cors_origins.v[1], "b");
    assert_int_equal(config->http.max_n, 3);
    assert_int_equal(config->cluster.partition.n, 3);
    assert_int_equal(config->cluster.partition.v[2], 13);
    assert_int_equal(config->cluster.pipe, DS4_PIPE_SHM);
    assert_int_equal(ds4_config_stages(config), 3);
    assert_true(config->sampling.top_p == 0.95);
    assert_int_equal(config->think.default_effort, DS4_THINK_MAX);
    assert_int_equal(config->sched.max_seqs, 8);
}

static void faults_are_named_with_file_and_line(void **state)
{
    static const char *const cases[][2] = {
        {"http {\n  prt = 1\n}", "t.conf:2: no such option 'prt'"},
        {"htp { }", "t.conf:1: no such option 'htp'"},
        {"http {\n  port = 70000 }",
         "t.conf:2: http.port is '70000', must be an integer from 0 to 65535"},
        {"http { port = x1 }", "t.conf:1: http.port is 'x1', must be an integer from 0 to 65535"},
        {"http { port = 1.5 }", "t.conf:1: http.port is '1.5', must be an integer"},
        {"http { port = 99999999999999999999 }", "t.conf:1: http.port is"},
        {"http { port = \"\" }", "t.conf:1: http.port is ''"},
        {"sampling {\n\n top_p = nan }", "t.conf:3: sampling.top_p is 'nan', must be a number"},
        {"http { open = maybe }", "t.conf:1: http.open is 'maybe', must be true or false"},
        {"model {\n release = v5\n}",
         "t.conf:2: model.release is 'v5', must be one of |v4_preview|v4_0731|v41"},
        {"cluster { partition = {1,\n-2} }", "t.conf:2: cluster.partition is '-2'"},
        {"http { port = 1", "the file ends inside a section"},
        {"cluster { partition = {1, 2", "the file ends inside a section"},
        {"http { listen = \"x }", "the file ends inside a section"},
        {"http { port = 1 }\n/* x", "t.conf: a comment is not closed"},
        {"http { port = 1 } }", "t.conf:1: unexpected closing brace"},
        {"http { port }", "t.conf:1: missing equal sign after option 'port'"},
        {"port = 1", "t.conf:1: no such option 'port'"},
    };
    struct ds4_err err;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        err = (struct ds4_err){0};
        if (parse(*state, cases[i][0], &err) == 0)
            fail_msg("accepted: %s", cases[i][0]);
        assert_int_equal(err.code, DS4_E_INVALID);
        if (strstr(err.msg, cases[i][1]) == NULL)
            fail_msg("'%s' instead of '%s'", err.msg, cases[i][1]);
    }
}

static void a_nul_byte_does_not_hide_the_rest(void **state)
{
    struct ds4_err err = {0};

    assert_int_equal(ds4_config_parse(*state, (struct ds4_str){"http { }\0 x", 11}, "t.conf", &err),
                     -1);
    assert_string_equal(err.msg, "t.conf: holds a NUL byte");
}

static void a_missing_file_is_an_error_with_its_path(void **state)
{
    struct ds4_err err = {0};

    assert_int_equal(ds4_config_load(*state, "tests/data/no-such.conf", &err), -1);
    assert_int_equal(err.code, DS4_E_IO);
    assert_string_equal(err.msg,
                        "could not open tests/data/no-such.conf: No such file or directory");
    assert_int_equal(ds4_config_load(*state, "tests", &err), -1);
    assert_int_equal(err.code, DS4_E_IO);
}

static void a_file_is_read_from_disk(void **state)
{
    struct ds4_config *config = *state;
    char path[] = "/tmp/ds4-test-config-XXXXXX";
    int fd = mkstemp(path);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, "http { port = 1234 }\n", 21), 21);
    assert_int_equal(close(fd), 0);
    assert_int_equal(ds4_config_load(config, path, NULL), 0);
    assert_int_equal(config->http.port, 1234);
    assert_int_equal(unlink(path), 0);
}

static void too_many_items_are_refused(void **state)
{
    struct ds4_buf text;
    struct ds4_err err = {0};

    ds4_buf_init(&text, 4096);
    (void)ds4_buf_append_text(&text, "cluster { partition = {1");
    for (int i = 0; i < DS4_CONFIG_MAX_ITEMS; i++)
        (void)ds4_buf_append_text(&text, ", 1");
    (void)ds4_buf_append_text(&text, "} }");
    assert_int_equal(parse(*state, text.ptr, &err), -1);
    assert_string_equal(err.msg, "t.conf:1: cluster.partition has more than 64 items");
    ds4_buf_deinit(&text);
}

static void set_reads_one_setting(void **state)
{
    struct ds4_config *config = *state;
    struct ds4_err err = {0};

    assert_int_equal(ds4_config_set(config, "http.port", "8001", NULL), 0);
    assert_int_equal(config->http.port, 8001);
    assert_int_equal(ds4_config_set(config, "cluster.partition", "{ 4, 5 }", NULL), 0);
    assert_int_equal(config->cluster.partition.n, 2);
    assert_int_equal(config->cluster.partition.v[1], 5);
    assert_int_equal(ds4_config_set(config, "cluster.partition", "", NULL), 0);
    assert_int_equal(config->cluster.partition.n, 0);
    assert_int_equal(ds4_config_set(config, "model.aliases", "a,b", NULL), 0);
    assert_string_equal(config->model.aliases.v[1], "b");
    assert_int_equal(ds4_config_set(config, "http.prt", "1", &err), -1);
    assert_string_equal(err.msg, "no setting is named 'http.prt'");
    assert_int_equal(ds4_config_set(config, "port", "1", &err), -1);
    assert_int_equal(ds4_config_set(config, "http.port", "-1", &err), -1);
    assert_string_equal(err.msg, "http.port is '-1', must be an integer from 0 to 65535");
}

static void contradictions_are_found(void **state)
{
    static const char *const cases[][2] = {
        {"http { listen = 0.0.0.0 }", "http.listen is 0.0.0.0, a public address"},
        {"metrics { listen = \"127.0.0.1\" }",
         "metrics.listen is \"127.0.0.1\", must be address:port"},
        {"metrics { listen = \"127.0.0.1:\" }", "must be address:port"},
        {"metrics { listen = \"127.0.0.1:+1\" }", "must be address:port"},
        {"metrics { listen = \"127.0.0.1:65536\" }", "must be address:port"},
        {"metrics { listen = \"localhost:9401\" }", "must be address:port"},
        {"metrics { listen = \"::1:9401\" }", "must be address:port"},
        {"metrics { listen = \"[127.0.0.1]:9401\" }", "must be address:port"},
        {"metrics { listen = \":9401\" }", "must be address:port"},
        {"metrics { listen = \"0.0.0.0:9401\" }",
         "metrics.listen is 0.0.0.0:9401, a public address"},
        {"http { listen = \"::\" }", "http.listen is ::, a public address"},
        {"http { open = false } cluster { steps_endpoint = \"tcp://10.0.0.1:7000\" }", "curve_dir"},
        {"cluster { steps_endpoint = \"\" partition = {1, 2} stages = 3 }", "cluster.stages is 3"},
        {"cluster { stages = 2 lost_ms = 600 heartbeat_ms = 500 }", "cluster.lost_ms"},
        {"sampling { top_p = 0 }", "sampling.top_p"},
    };
    struct ds4_config config;
    struct ds4_err err = {0};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(ds4_config_init(&config, NULL), 0);
        assert_int_equal(parse(&config, cases[i][0], NULL), 0);
        assert_int_equal(ds4_config_check(&config, &err), -1);
        if (strstr(err.msg, cases[i][1]) == NULL)
            fail_msg("'%s' instead of '%s'", err.msg, cases[i][1]);
        ds4_config_deinit(&config);
    }
}

static void keys_or_an_explicit_word_allow_a_public_address(void **state)
{
    struct ds4_config *config = *state;

    assert_int_equal(parse(config, "http { listen = 10.0.0.1 keys_file = /etc/ds4/keys }", NULL),
                     0);
    assert_int_equal(ds4_config_check(config, NULL), 0);
    assert_int_equal(parse(config, "metrics { listen = \"0.0.0.0:9401\" }", NULL), 0);
    assert_int_equal(ds4_config_check(config, NULL), 0);
    assert_int_equal(parse(config, "http { keys_file = \"\" open = true }", NULL), 0);
    assert_int_equal(ds4_config_check(config, NULL), -1);
    assert_int_equal(parse(config, "metrics { open = true }", NULL), 0);
    assert_int_equal(ds4_config_check(config, NULL), 0);
    assert_int_equal(parse(config, "metrics { open = false listen = \"[::1]:0\" }", NULL), 0);
    assert_int_equal(ds4_config_check(config, NULL), 0);
}

static void what_is_printed_loads_back(void **state)
{
    struct ds4_config *config = *state, again;
    struct ds4_buf first, second;

    ds4_buf_init(&first, (size_t)1 << 20);
    ds4_buf_init(&second, (size_t)1 << 20);
    assert_int_equal(ds4_config_set(config, "model.path", "a\"b\\c${HOME}\n\xc3\xa9 'x'", NULL), 0);
    assert_int_equal(ds4_config_set(config, "cluster.partition", "15,15,13", NULL), 0);
    assert_int_equal(ds4_config_set(config, "sampling.top_p", "0.123456789012345", NULL), 0);
    assert_int_equal(ds4_config_set(config, "sampling.temperature", "1e2", NULL), 0);
    assert_int_equal(ds4_config_set(config, "model.release", "v41", NULL), 0);
    assert_int_equal(ds4_config_print(config, &first), 0);
    assert_int_equal(ds4_config_init(&again, NULL), 0);
    assert_int_equal(ds4_config_parse(&again, ds4_buf_view(&first), "printed", NULL), 0);
    assert_string_equal(again.model.path, config->model.path);
    assert_true(again.sampling.top_p == 0.123456789012345);
    assert_true(again.sampling.temperature == 100); /* %g says 1e+02, which did not read back */
    assert_int_equal(ds4_config_print(&again, &second), 0);
    assert_string_equal(first.ptr, second.ptr);
    ds4_config_deinit(&again);
    ds4_buf_deinit(&first);
    ds4_buf_deinit(&second);
}

static void the_table_is_in_order(void **state)
{
    const struct ds4_setting *row;
    bool seen_elsewhere;

    (void)state;
    for (size_t i = 0; i < ds4_n_settings; i++) {
        row = &ds4_settings[i];
        assert_true(row->doc[0] != '\0');
        if (row->type == DS4_SETTING_INT32 || row->type == DS4_SETTING_INTS)
            assert_true(row->min >= INT32_MIN && row->max <= INT32_MAX);
        if (row->type == DS4_SETTING_INT32 || row->type == DS4_SETTING_INT64 ||
            row->type == DS4_SETTING_DOUBLE)
            assert_true(row->min < row->max);
        assert_int_equal(row->type == DS4_SETTING_CHOICE, row->choices != NULL);
        /* Sections stand together and no option appears twice. */
        seen_elsewhere = false;
        for (size_t k = 0; k < i; k++) {
            if (strcmp(ds4_settings[k].section, row->section) != 0)
                continue;
            assert_string_not_equal(ds4_settings[k].option, row->option);
            seen_elsewhere = strcmp(row[-1].section, row->section) != 0;
        }
        assert_false(seen_elsewhere);
    }
}

static void only_addresses_of_this_host_are_loopback(void **state)
{
    (void)state;
    assert_true(ds4_config_is_loopback("127.0.0.1"));
    assert_true(ds4_config_is_loopback("127.9.8.7"));
    assert_true(ds4_config_is_loopback("::1"));
    assert_false(ds4_config_is_loopback("127.0.0.1.example.org"));
    assert_false(ds4_config_is_loopback("0.0.0.0"));
    assert_false(ds4_config_is_loopback("::"));
    assert_false(ds4_config_is_loopback("10.127.0.1"));
}

static void choices_have_names(void **state)
{
    (void)state;
    assert_string_equal(ds4_config_choice("model.release", DS4_RELEASE_V4_0731), "v4_0731");
    assert_string_equal(ds4_config_choice("model.release", DS4_RELEASE_UNSET), "");
    assert_string_equal(ds4_config_choice("think.default", DS4_THINK_OFF), "off");
    assert_string_equal(ds4_config_choice("parse.reasoning_field", DS4_REASONING_SHORT),
                        "reasoning");
    assert_string_equal(ds4_config_choice("worker.isa", DS4_ISA_AVX512), "avx512");
    assert_string_equal(ds4_config_choice("worker.isa", 99), "");
    assert_string_equal(ds4_config_choice("http.port", 0), "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(defaults_are_those_of_the_design, start, stop),
        cmocka_unit_test_setup_teardown(a_file_sets_what_it_names, start, stop),
        cmocka_unit_test_setup_teardown(faults_are_named_with_file_and_line, start, stop),
        cmocka_unit_test_setup_teardown(a_nul_byte_does_not_hide_the_rest, start, stop),
        cmocka_unit_test_setup_teardown(a_missing_file_is_an_error_with_its_path, start, stop),
        cmocka_unit_test_setup_teardown(a_file_is_read_from_disk, start, stop),
        cmocka_unit_test_setup_teardown(too_many_items_are_refused, start, stop),
        cmocka_unit_test_setup_teardown(set_reads_one_setting, start, stop),
        cmocka_unit_test(contradictions_are_found),
        cmocka_unit_test_setup_teardown(keys_or_an_explicit_word_allow_a_public_address, start,
                                        stop),
        cmocka_unit_test_setup_teardown(what_is_printed_loads_back, start, stop),
        cmocka_unit_test(the_table_is_in_order),
        cmocka_unit_test(only_addresses_of_this_host_are_loopback),
        cmocka_unit_test(choices_have_names),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* What a reload takes over, and what it only names. */
#include "common/config.h"

#include "common/config_table.h"

#include <stdio.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define NAME_BYTES ((size_t)16384)

struct fixture {
    struct ds4_config running, fresh;
    struct ds4_buf taken, left;
};

static int start(void **state)
{
    static struct fixture f;

    ds4_buf_init(&f.taken, NAME_BYTES);
    ds4_buf_init(&f.left, NAME_BYTES);
    *state = &f;
    return ds4_config_init(&f.running, NULL) | ds4_config_init(&f.fresh, NULL);
}

static int stop(void **state)
{
    struct fixture *f = *state;

    ds4_config_deinit(&f->running);
    ds4_config_deinit(&f->fresh);
    ds4_buf_deinit(&f->taken);
    ds4_buf_deinit(&f->left);
    return 0;
}

static void set(struct ds4_config *config, const char *setting, const char *text)
{
    assert_int_equal(ds4_config_set(config, setting, text, NULL), 0);
}

static void take(struct fixture *f)
{
    ds4_config_take_live(&f->running, &f->fresh, &f->taken, &f->left);
    assert_false(f->taken.failed || f->left.failed);
}

static void equal_settings_change_nothing(void **state)
{
    struct fixture *f = *state;

    set(&f->running, "model.aliases", "a,b");
    set(&f->fresh, "model.aliases", "{a, b}");
    set(&f->running, "cluster.partition", "15,15,13");
    set(&f->fresh, "cluster.partition", "15, 15, 13");
    take(f);
    assert_int_equal(f->taken.len, 0);
    assert_int_equal(f->left.len, 0);
}

static void every_type_is_taken_over(void **state)
{
    struct fixture *f = *state;

    set(&f->fresh, "http.any_model", "false");
    set(&f->fresh, "http.ping_ms", "100");
    set(&f->fresh, "parse.dsml_hold_max", "4096");
    set(&f->fresh, "sampling.top_p", "0.95");
    set(&f->fresh, "log.level", "debug");
    set(&f->fresh, "http.keys_file", "/keys");
    set(&f->fresh, "model.aliases", "x,y");
    take(f);
    assert_false(f->running.http.any_model);
    assert_int_equal(f->running.http.ping_ms, 100);
    assert_int_equal(f->running.parse.dsml_hold_max, 4096);
    assert_true(f->running.sampling.top_p == 0.95);
    assert_int_equal(f->running.log.level, 3);
    assert_string_equal(f->running.http.keys_file, "/keys");
    assert_int_equal(f->running.model.aliases.n, 2);
    assert_string_equal(f->running.model.aliases.v[1], "y");
    assert_string_equal(f->fresh.http.keys_file, ""); /* the old one, to be freed with it */
    assert_int_equal(f->left.len, 0);
}

static void what_needs_a_restart_is_named_and_left(void **state)
{
    struct fixture *f = *state;

    set(&f->fresh, "model.context", "4096");
    set(&f->fresh, "cluster.partition", "1,2");
    set(&f->fresh, "model.path", "other.gguf");
    set(&f->fresh, "think.default", "max");
    take(f);
    assert_true(ds4_str_equal(ds4_buf_view(&f->taken), DS4_STR(" think.default")));
    assert_true(ds4_str_equal(ds4_buf_view(&f->left),
                              DS4_STR(" model.path model.context cluster.partition")));
    assert_int_equal(f->running.model.context, 0);
    assert_string_equal(f->running.model.path, "");
    assert_int_equal(f->running.cluster.partition.n, 0);
}

/* What decides memory, layers or the wire must not change under a running generation. */
static void no_setting_that_shapes_state_is_reloadable(void **state)
{
    static const char *const fixed[] = {
        "model.path",      "model.context", "model.release",    "cluster.stages", "sched.max_seqs",
        "sched.chunk_tok", "kv.blocks",     "kv.quant_sim",     "worker.backend", "numerics.stream",
        "http.listen",     "http.port",     "cluster.partition"};
    const struct ds4_setting *row;
    char name[128];
    size_t n = 0;

    (void)state;
    for (size_t i = 0; i < ds4_n_settings; i++) {
        row = &ds4_settings[i];
        (void)snprintf(name, sizeof(name), "%s.%s", row->section, row->option);
        for (size_t k = 0; k < sizeof(fixed) / sizeof(fixed[0]); k++) {
            if (strcmp(name, fixed[k]) != 0)
                continue;
            assert_false(row->live);
            n++;
        }
    }
    assert_int_equal(n, sizeof(fixed) / sizeof(fixed[0]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(equal_settings_change_nothing, start, stop),
        cmocka_unit_test_setup_teardown(every_type_is_taken_over, start, stop),
        cmocka_unit_test_setup_teardown(what_needs_a_restart_is_named_and_left, start, stop),
        cmocka_unit_test(no_setting_that_shapes_state_is_reloadable),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* worker/settings.c: from the settings file to the parts of a worker. */
#include "worker/settings.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static int fill(const char *text, int32_t stage, struct ds4_config *config,
                struct ds4_worker_settings *out, struct ds4_err *err)
{
    if (ds4_config_init(config, err) ||
        ds4_config_parse(config, ds4_str_view(text), "test.conf", err))
        fail_msg("%s", err->msg);
    return ds4_worker_settings_fill(config, stage, out, err);
}

static void every_part_gets_its_settings(void **state)
{
    static const char text[] = "model { path = \"m.gguf\"\n context = 4096 }\n"
                               "cluster { partition = {3, 5}\n endpoint_dir = \"/run/x\"\n"
                               " heartbeat_ms = 250\n form_ms = 7000 }\n"
                               "sched { max_seqs = 6\n chunk_tok = 700\n inflight = 4 }\n"
                               "kv { blocks = 99\n hot_window = 64\n host_mb = 6 }\n"
                               "worker { threads = 3\n load = \"pread\" }\n"
                               "watchdog { step_s = 9\n prefill_s = 11 }\n";
    struct ds4_worker_settings settings, again;
    struct ds4_config config;
    struct ds4_err err = {0};

    (void)state;
    if (fill(text, 1, &config, &settings, &err))
        fail_msg("%s", err.msg);
    assert_string_equal(settings.stage.model_path, "m.gguf");
    assert_int_equal(settings.stage.stage, 1);
    assert_int_equal(settings.stage.n_stage, 2);
    assert_int_equal(settings.stage.n_partition, 2);
    assert_int_equal(settings.stage.partition[1], 5);
    assert_int_equal(settings.stage.context_tok, 4096);
    assert_int_equal(settings.stage.max_seqs, 6);
    assert_int_equal(settings.stage.max_step_tok, 706);
    assert_int_equal(settings.stage.n_blocks, 99);
    assert_int_equal(settings.stage.hot_window_tok, 64);
    assert_int_equal(settings.stage.host_bytes, 3 << 20); /* half of it: two stages */
    assert_int_equal(settings.stage.device.n_thread, 3);
    assert_int_equal(settings.stage.load, DS4_LOAD_PREAD);
    assert_string_equal(settings.stage.backend, "cpu");
    assert_string_equal(settings.control.bus.endpoint, "ipc:///run/x/router.sock");
    assert_int_equal(settings.control.bus.stage, 1);
    assert_int_equal(settings.control.heartbeat_ms, 250);
    assert_int_equal(settings.control.loop.check_ms, 250);
    assert_int_equal(settings.control.loop.form_ms, 7000);
    assert_int_equal(settings.control.loop.depth, 5);
    assert_int_equal(settings.control.step_ms, 9000);
    assert_int_equal(settings.control.prefill_ms, 11000);
    assert_true(settings.control.loop.pipe_wait_ms > 2 * 11000);
    if (ds4_worker_settings_fill(&config, 1, &again, &err))
        fail_msg("%s", err.msg);
    assert_memory_not_equal(settings.control.bus.boot_id, again.control.bus.boot_id, DS4_ID_BYTES);
    ds4_config_deinit(&config);
}

static void products_are_exact_on_a_processor_and_fast_on_a_card_unless_told(void **state)
{
    static const struct {
        const char *text;
        enum ds4_products want;
    } cases[] = {
        {"worker { backend = \"cpu\" }\n", DS4_PRODUCTS_EXACT},
        {"worker { backend = \"cuda\" }\n", DS4_PRODUCTS_FAST},
        {"worker { backend = \"cuda\" }\nnumerics { products = \"exact\" }\n", DS4_PRODUCTS_EXACT},
        {"worker { backend = \"cpu\" }\nnumerics { products = \"fast\" }\n", DS4_PRODUCTS_FAST},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct ds4_worker_settings settings;
        struct ds4_config config;
        struct ds4_err err = {0};
        char text[160];

        snprintf(text, sizeof(text), "model { path = \"m\" }\n%s", cases[i].text);
        if (fill(text, 0, &config, &settings, &err))
            fail_msg("%s", err.msg);
        assert_int_equal(settings.stage.device.products, cases[i].want);
        ds4_config_deinit(&config);
    }
}

static void cards_of_the_settings_reach_their_stage(void **state)
{
    static const char text[] = "model { path = \"m\" }\ncluster { stages = 3 }\n"
                               "gpu { device = {\"0\", \"0000:65:00.0\", \"GPU-1\"}\n"
                               " memory_limit_mb = {8192}\n self_test = false\n"
                               " cards = {\"64\", \"10\", \"80@3350\"} }\n";
    static const char *const wrong[] = {
        "gpu { device = {\"0\", \"1\"} }\n",
        "gpu { memory_limit_mb = {1, 2} }\n",
        "gpu { cards = {\"64\"} }\n",
    };
    struct ds4_worker_settings settings;
    struct ds4_config config;
    struct ds4_err err = {0};

    (void)state;
    if (fill(text, 1, &config, &settings, &err) || ds4_config_check(&config, &err))
        fail_msg("%s", err.msg);
    assert_string_equal(settings.stage.device.card, "0000:65:00.0");
    assert_int_equal(settings.stage.device.ordinal, 1);
    assert_int_equal(settings.stage.memory_limit_bytes, (size_t)8192 << 20);
    assert_false(settings.stage.self_test);
    assert_int_equal(settings.stage.n_card, 3);
    assert_int_equal(settings.stage.card[1].gib, 10);
    assert_true(settings.stage.card[2].gb_per_s == 3350);
    ds4_config_deinit(&config);
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        if (ds4_config_init(&config, &err) ||
            ds4_config_parse(&config, ds4_str_view("cluster { stages = 3 }"), "a", &err) ||
            ds4_config_parse(&config, ds4_str_view(wrong[i]), "b", &err))
            fail_msg("%s", err.msg);
        assert_int_equal(ds4_config_check(&config, &err), -1);
        assert_non_null(strstr(err.msg, "the cluster has 3 stages"));
        ds4_config_deinit(&config);
    }
    assert_int_equal(
        fill("model { path = \"m\" }\ngpu { cards = {\"8,8\"} }\n", 0, &config, &settings, &err),
        -1);
    assert_non_null(strstr(err.msg, "must be one card"));
    ds4_config_deinit(&config);
}

static void no_words_about_cards_mean_the_next_one_whole_and_tested(void **state)
{
    struct ds4_worker_settings settings;
    struct ds4_config config;
    struct ds4_err err = {0};

    (void)state;
    assert_int_equal(
        fill("model { path = \"m\" }\ncluster { stages = 4 }\n", 2, &config, &settings, &err), 0);
    assert_null(settings.stage.device.card);
    assert_int_equal(settings.stage.device.ordinal, 2);
    assert_int_equal(settings.stage.memory_limit_bytes, 0);
    assert_int_equal(settings.stage.n_card, 0);
    assert_true(settings.stage.self_test);
    ds4_config_deinit(&config);
}

static void rows_per_step_stay_below_the_wire_limit(void **state)
{
    struct ds4_worker_settings settings;
    struct ds4_config config;
    struct ds4_err err = {0};

    (void)state;
    assert_int_equal(fill("model { path = \"m\" }\nsched { chunk_tok = 65536\n max_seqs = 1024 }\n"
                          "watchdog { prefill_s = 3600 }\ncluster { stages = 64 }\n",
                          63, &config, &settings, &err),
                     0);
    assert_int_equal(settings.stage.max_seqs, DS4_MAX_STEP_ENTRIES);
    assert_int_equal(settings.stage.max_step_tok, DS4_MAX_STEP_TOK);
    assert_int_equal(settings.control.loop.depth, DS4_MAX_STAGES);
    assert_true(settings.control.loop.pipe_wait_ms > 0);
    ds4_config_deinit(&config);
}

static void what_cannot_work_is_named(void **state)
{
    static const struct {
        const char *text;
        int32_t stage;
        const char *word;
    } rows[] = {
        {"model { path = \"m\" }\ncluster { stages = 2 }\n", 2, "stages 0 to 1"},
        {"model { path = \"m\" }\n", -1, "--stage is -1"},
        {"cluster { stages = 2 }\n", 0, "model.path"},
        {"model { path = \"m\" }\ncluster { pipe = \"nccl\" }\n", 0, "cluster.pipe"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct ds4_worker_settings settings;
        struct ds4_config config;
        struct ds4_err err = {0};

        assert_int_equal(fill(rows[i].text, rows[i].stage, &config, &settings, &err), -1);
        assert_int_equal(err.code, DS4_E_INVALID);
        if (strstr(err.msg, rows[i].word) == NULL)
            fail_msg("%s", err.msg);
        ds4_config_deinit(&config);
    }
}

static void an_endpoint_too_long_is_refused(void **state)
{
    char text[1200];
    struct ds4_worker_settings settings;
    struct ds4_config config;
    struct ds4_err err = {0};

    (void)state;
    snprintf(text, sizeof(text), "model { path = \"m\" }\ncluster { endpoint_dir = \"/%0900d\" }\n",
             0);
    assert_int_equal(fill(text, 0, &config, &settings, &err), -1);
    assert_non_null(strstr(err.msg, "endpoint_dir"));
    ds4_config_deinit(&config);
}

static void nccl_is_told_the_settings_unless_the_environment_says_otherwise(void **state)
{
    struct ds4_worker_settings settings;
    struct ds4_config config;
    struct ds4_err err = {0};

    (void)state;
    assert_int_equal(fill("model { path = \"m\" }\n"
                          "nccl { interface = \"eth7\"\n channels = 0\n shm = false }\n",
                          0, &config, &settings, &err),
                     0);
    setenv("NCCL_DEBUG", "INFO", 1);
    unsetenv("NCCL_MAX_CTAS");
    assert_int_equal(ds4_worker_settings_environment(&config, &err), 0);
    assert_string_equal(getenv("NCCL_SOCKET_IFNAME"), "eth7");
    assert_string_equal(getenv("NCCL_P2P_DISABLE"), "1");
    assert_string_equal(getenv("NCCL_SHM_DISABLE"), "1");
    assert_string_equal(getenv("NCCL_NVLS_ENABLE"), "0");
    assert_string_equal(getenv("NCCL_DEBUG"), "INFO");
    assert_null(getenv("NCCL_MAX_CTAS"));
    ds4_config_deinit(&config);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_part_gets_its_settings),
        cmocka_unit_test(products_are_exact_on_a_processor_and_fast_on_a_card_unless_told),
        cmocka_unit_test(cards_of_the_settings_reach_their_stage),
        cmocka_unit_test(no_words_about_cards_mean_the_next_one_whole_and_tested),
        cmocka_unit_test(rows_per_step_stay_below_the_wire_limit),
        cmocka_unit_test(what_cannot_work_is_named),
        cmocka_unit_test(an_endpoint_too_long_is_refused),
        cmocka_unit_test(nccl_is_told_the_settings_unless_the_environment_says_otherwise),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

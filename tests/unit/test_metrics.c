/* Metrics: series, histograms, labels outside their lists, exposition. */
#include "common/metrics.h"

#include "common/metrics_family.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static int start(void **state)
{
    *state = ds4_metrics_new("ds4-tiny", NULL);
    return *state == NULL ? -1 : 0;
}

static int stop(void **state)
{
    ds4_metrics_free(*state);
    return 0;
}

/* The exposition; the caller frees it. */
static char *render(const struct ds4_metrics *m, enum ds4_metrics_format format)
{
    struct ds4_buf out;

    ds4_buf_init(&out, (size_t)8 << 20);
    assert_int_equal(ds4_metrics_render(m, format, &out), 0);
    return ds4_buf_take(&out, NULL);
}

static void assert_shows(const struct ds4_metrics *m, const char *line)
{
    char *text = render(m, DS4_METRICS_PROMETHEUS);

    if (strstr(text, line) == NULL)
        fail_msg("missing: %s in\n%s", line, text);
    free(text);
}

static void assert_hides(const struct ds4_metrics *m, const char *line)
{
    char *text = render(m, DS4_METRICS_PROMETHEUS);

    if (strstr(text, line) != NULL)
        fail_msg("present: %s", line);
    free(text);
}

static void counters_count_per_series(void **state)
{
    struct ds4_metrics *m = *state;

    ds4_metric_add(m, DS4_M_FINISH, 1, "chat", "stop");
    ds4_metric_add(m, DS4_M_FINISH, 2, "messages", "cancelled");
    ds4_metric_add(m, DS4_M_FINISH, 1, "chat", "stop");
    assert_true(ds4_metric_value(m, DS4_M_FINISH, ds4_metric_labels("chat", "stop")) == 2);
    assert_true(ds4_metric_value(m, DS4_M_FINISH, ds4_metric_labels("messages", "cancelled")) == 2);
    assert_true(ds4_metric_value(m, DS4_M_FINISH, ds4_metric_labels("chat", "eos")) == 0);
    assert_shows(m, "ds4_finish_total{model=\"ds4-tiny\",api=\"chat\",reason=\"stop\"} 2\n");
    assert_shows(m,
                 "ds4_finish_total{model=\"ds4-tiny\",api=\"messages\",reason=\"cancelled\"} 2\n");
    assert_hides(m, "reason=\"eos\"");
}

static void small_counters_start_at_zero_and_large_ones_unseen(void **state)
{
    assert_shows(*state, "ds4_decode_steps_total{model=\"ds4-tiny\"} 0\n");
    assert_shows(*state, "ds4_reforms_total{model=\"ds4-tiny\",result=\"failed\"} 0\n");
    assert_hides(*state, "ds4_http_requests_total");
    assert_hides(*state, "ds4_ready");
}

static void histograms_are_cumulative(void **state)
{
    struct ds4_metrics *m = *state;

    ds4_metric_observe(m, DS4_M_BATCH_SEQUENCES, 1, "decode");
    ds4_metric_observe(m, DS4_M_BATCH_SEQUENCES, 2.5, "decode");
    ds4_metric_observe(m, DS4_M_BATCH_SEQUENCES, 2000000, "decode");
    ds4_metric_observe(m, DS4_M_BATCH_SEQUENCES, NAN, "decode");
    assert_true(ds4_metric_value(m, DS4_M_BATCH_SEQUENCES, ds4_metric_labels("decode")) == 3);
    assert_shows(m, "# TYPE ds4_batch_sequences histogram\n"
                    "ds4_batch_sequences_bucket{model=\"ds4-tiny\",kind=\"decode\",le=\"1\"} 1\n"
                    "ds4_batch_sequences_bucket{model=\"ds4-tiny\",kind=\"decode\",le=\"2\"} 1\n"
                    "ds4_batch_sequences_bucket{model=\"ds4-tiny\",kind=\"decode\",le=\"5\"} 2\n");
    assert_shows(m, "le=\"1048576\"} 2\n"
                    "ds4_batch_sequences_bucket{model=\"ds4-tiny\",kind=\"decode\",le=\"+Inf\"} "
                    "3\n"
                    "ds4_batch_sequences_sum{model=\"ds4-tiny\",kind=\"decode\"} 2000003.5\n"
                    "ds4_batch_sequences_count{model=\"ds4-tiny\",kind=\"decode\"} 3\n");
}

static void values_outside_the_lists_are_counted_not_shown(void **state)
{
    struct ds4_metrics *m = *state;

    ds4_metric_add(m, DS4_M_HTTP_REQUESTS, 1, "chat", "BREW", "418");
    assert_shows(m, "endpoint=\"chat\",method=\"other\",code=\"other\"} 1\n");
    ds4_metric_add(m, DS4_M_FINISH, 1, "chat", "\"} 1\nforged 1");
    ds4_metric_add(m, DS4_M_FINISH, 1, "chat");
    ds4_metric_add(m, DS4_M_FINISH, 1, "chat", "stop", "more");
    assert_true(ds4_metric_value(m, DS4_M_UNKNOWN_LABELS, ds4_metric_labels()) == 3);
    assert_hides(m, "forged");
}

static void a_state_is_one_of_its_list(void **state)
{
    struct ds4_metrics *m = *state;

    ds4_metric_choose(m, DS4_M_STATE, "loading");
    ds4_metric_choose(m, DS4_M_STATE, "ready");
    assert_shows(m, "state=\"loading\"} 0\n");
    assert_shows(m, "state=\"ready\"} 1\n");
    ds4_metric_choose(m, DS4_M_WORKER_STATE, ds4_metric_stage(3), "failed");
    assert_shows(m, "stage=\"3\",state=\"failed\"} 1\n");
    assert_shows(m, "stage=\"3\",state=\"ready\"} 0\n");
    assert_hides(m, "stage=\"2\"");
}

static void a_hidden_gauge_comes_back_when_set(void **state)
{
    struct ds4_metrics *m = *state;

    ds4_metric_set(m, DS4_M_WORKER_UP, 1, ds4_metric_stage(0));
    assert_shows(m, "ds4_worker_up{model=\"ds4-tiny\",stage=\"0\"} 1\n");
    ds4_metric_hide(m, DS4_M_WORKER_UP, ds4_metric_stage(0));
    assert_hides(m, "ds4_worker_up");
    ds4_metric_set(m, DS4_M_WORKER_UP, 0, ds4_metric_stage(0));
    assert_shows(m, "ds4_worker_up{model=\"ds4-tiny\",stage=\"0\"} 0\n");
}

static void info_texts_are_escaped(void **state)
{
    struct ds4_metrics *m = *state;
    const struct ds4_metric_pair pairs[] = {{"version", "0.1"}, {"commit", "a\"b\\c\nd"}};

    assert_int_equal(ds4_metrics_set_info(m, DS4_M_BUILD_INFO, -1, pairs, 1, NULL), 0);
    assert_int_equal(ds4_metrics_set_info(m, DS4_M_BUILD_INFO, -1, pairs, 2, NULL), 0);
    assert_shows(m, "# TYPE ds4_build_info gauge\n"
                    "ds4_build_info{model=\"ds4-tiny\",version=\"0.1\",commit=\"a\\\"b\\\\c\\nd\"} "
                    "1\n# HELP");
}

static void no_registry_means_no_metrics(void **state)
{
    (void)state;
    ds4_metric_add(NULL, DS4_M_FINISH, 1, "chat", "stop");
    ds4_metric_set(NULL, DS4_M_READY, 1);
    ds4_metric_observe(NULL, DS4_M_QUEUE_SECONDS, 1, "chat");
    ds4_metric_choose(NULL, DS4_M_STATE, "ready");
    ds4_metric_hide(NULL, DS4_M_READY);
    ds4_metrics_read_process(NULL);
    assert_int_equal(ds4_metrics_set_info(NULL, DS4_M_BUILD_INFO, -1, NULL, 0, NULL), 0);
    ds4_metrics_free(NULL);
}

#define N_THREADS 4
#define N_ADDS    20000

static void *add_many(void *arg)
{
    for (int i = 0; i < N_ADDS; i++) {
        ds4_metric_add((struct ds4_metrics *)arg, DS4_M_DECODE_STEPS, 1);
        ds4_metric_observe((struct ds4_metrics *)arg, DS4_M_STEP_GAP_SECONDS, 0.5);
    }
    return NULL;
}

static void threads_lose_no_observation(void **state)
{
    pthread_t threads[N_THREADS];

    for (int i = 0; i < N_THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, add_many, *state), 0);
    for (int i = 0; i < N_THREADS; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    assert_true(ds4_metric_value(*state, DS4_M_DECODE_STEPS, ds4_metric_labels()) ==
                N_THREADS * N_ADDS);
    assert_true(ds4_metric_value(*state, DS4_M_STEP_GAP_SECONDS, ds4_metric_labels()) ==
                N_THREADS * N_ADDS);
    assert_shows(*state, "ds4_step_gap_seconds_sum{model=\"ds4-tiny\"} 40000\n");
}

static void the_process_is_measured(void **state)
{
    ds4_metrics_read_process(*state);
    assert_true(ds4_metric_value(*state, DS4_M_PROCESS_RSS, ds4_metric_labels()) > 100000);
    assert_true(ds4_metric_value(*state, DS4_M_PROCESS_FDS, ds4_metric_labels()) >= 3);
    assert_true(ds4_metric_value(*state, DS4_M_PROCESS_START, ds4_metric_labels()) > 1e9);
}

/* Touches every series of every metric, the most that a scrape can be. */
static void touch_everything(struct ds4_metrics *m)
{
    const struct ds4_metric_pair pair = {"version", "1"};

    for (int id = 0; id < DS4_N_METRICS; id++) {
        if (m->families[id].type == DS4_METRIC_INFO)
            assert_int_equal(ds4_metrics_set_info(m, (enum ds4_metric)id, -1, &pair, 1, NULL), 0);
        for (size_t s = 0; s < m->families[id].n_series; s++)
            atomic_store(&m->families[id].touched[s], true);
    }
}

static void a_full_exposition_is_accepted_by_promtool(void **state)
{
    char *text;
    size_t written = 0;
    ssize_t n;
    int pipe_fd[2], status = -1;
    pid_t child;

    touch_everything(*state);
    ds4_metrics_show_aliases(*state, false); /* promtool wants colons in recording rules only */
    text = render(*state, DS4_METRICS_PROMETHEUS);
    assert_null(strstr(text, "vllm:"));
    assert_int_equal(pipe(pipe_fd), 0);
    child = fork();
    if (child == 0) {
        (void)dup2(pipe_fd[0], STDIN_FILENO);
        (void)close(pipe_fd[0]);
        (void)close(pipe_fd[1]);
        (void)execlp("promtool", "promtool", "check", "metrics", (char *)NULL);
        _exit(127);
    }
    (void)close(pipe_fd[0]);
    (void)signal(SIGPIPE, SIG_IGN); /* promtool may be missing: nobody reads */
    while (written < strlen(text)) {
        n = write(pipe_fd[1], text + written, strlen(text) - written);
        if (n <= 0)
            break;
        written += (size_t)n;
    }
    (void)close(pipe_fd[1]);
    assert_int_equal(waitpid(child, &status, 0), child);
    free(text);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
        print_message("promtool is not installed\n");
        skip();
    }
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void aliases_carry_vllms_labels_and_buckets(void **state)
{
    char *text;

    ds4_metric_observe((struct ds4_metrics *)*state, DS4_M_VLLM_TTFT, 1.7, NULL);
    ds4_metric_set((struct ds4_metrics *)*state, DS4_M_VLLM_SUCCESS, 3, "stop");
    text = render(*state, DS4_METRICS_PROMETHEUS);
    assert_non_null(strstr(text, "vllm:time_to_first_token_seconds_bucket{engine=\"0\","
                                 "model_name=\"ds4-tiny\",le=\"2.5\"} 1\n"));
    assert_non_null(strstr(text, "vllm:time_to_first_token_seconds_bucket{engine=\"0\","
                                 "model_name=\"ds4-tiny\",le=\"1\"} 0\n"));
    assert_null(strstr(text, "vllm:time_to_first_token_seconds_bucket{engine=\"0\","
                             "model_name=\"ds4-tiny\",le=\"2\"}"));
    assert_non_null(strstr(text, "vllm:request_success_total{engine=\"0\","
                                 "model_name=\"ds4-tiny\",finished_reason=\"stop\"} 3\n"));
    free(text);
}

static void numbers_are_written_whole_where_they_are(void **state)
{
    static const struct {
        double value;
        const char *text;
    } cases[] = {
        {0, " 0\n"},       {-12, " -12\n"},      {9007199254740991.0, " 9007199254740991\n"},
        {0.25, " 0.25\n"}, {1e300, " 1e+300\n"}, {-0.5, " -0.5\n"}};
    struct ds4_metrics *m = *state;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char want[128], *text;

        ds4_metric_set(m, DS4_M_QUEUE_DEPTH, cases[i].value, NULL);
        text = render(m, DS4_METRICS_PROMETHEUS);
        (void)snprintf(want, sizeof(want), "ds4_queue_depth{model=\"ds4-tiny\"}%s", cases[i].text);
        assert_non_null(strstr(text, want));
        free(text);
    }
}

static void a_histogram_can_be_set_as_a_whole(void **state)
{
    uint64_t bucket[DS4_METRIC_STEP_BUCKETS] = {
        [0] = 2, [4] = 1, [DS4_METRIC_STEP_BUCKETS - 1] = 3};
    struct ds4_metrics *m = *state;
    char *text;

    assert_int_equal(ds4_metric_step_bucket(0.0005), 0);
    assert_int_equal(ds4_metric_step_bucket(0.012), 4);
    assert_int_equal(ds4_metric_step_bucket(31), DS4_METRIC_STEP_BUCKETS - 1);
    ds4_metric_set_histogram(m, DS4_M_STAGE_STEP_SECONDS, bucket, DS4_METRIC_STEP_BUCKETS, 99.5,
                             ds4_metric_labels("2", "decode"));
    ds4_metric_set_histogram(m, DS4_M_STAGE_STEP_SECONDS, bucket, 7, 1,
                             ds4_metric_labels("3", "decode")); /* another list: ignored */
    text = render(m, DS4_METRICS_PROMETHEUS);
    assert_non_null(strstr(text, "ds4_stage_step_seconds_bucket{model=\"ds4-tiny\",stage=\"2\","
                                 "kind=\"decode\",le=\"0.008\"} 2\n"));
    assert_non_null(strstr(text, "stage=\"2\",kind=\"decode\",le=\"0.012\"} 3\n"));
    assert_non_null(strstr(text, "stage=\"2\",kind=\"decode\",le=\"+Inf\"} 6\n"));
    assert_non_null(strstr(text, "ds4_stage_step_seconds_sum{model=\"ds4-tiny\",stage=\"2\","
                                 "kind=\"decode\"} 99.5\n"));
    assert_null(strstr(text, "stage=\"3\""));
    free(text);
}

static void openmetrics_differs_where_it_must(void **state)
{
    char *text;

    ds4_metric_add((struct ds4_metrics *)*state, DS4_M_DECODE_STEPS, 1);
    text = render(*state, DS4_METRICS_OPENMETRICS);
    assert_non_null(strstr(text, "# TYPE ds4_decode_steps counter\n"
                                 "ds4_decode_steps_total{model=\"ds4-tiny\"} 1\n"));
    assert_string_equal(text + strlen(text) - 6, "# EOF\n");
    free(text);
}

static void names_follow_the_conventions(void **state)
{
    const struct ds4_metrics *m = *state;
    const char *name;

    for (int id = 0; id < DS4_N_METRICS; id++) {
        name = m->families[id].name;
        assert_true(strncmp(name, "ds4_", 4) == 0 || strncmp(name, "process_", 8) == 0 ||
                    strncmp(name, "vllm:", 5) == 0);
        if (strcmp(name, "vllm:iteration_tokens_total") != 0) /* a histogram there */
            assert_int_equal(m->families[id].type == DS4_METRIC_COUNTER,
                             ds4_str_ends(ds4_str_view(name), DS4_STR("_total")));
        assert_int_equal(m->families[id].type == DS4_METRIC_INFO,
                         ds4_str_ends(ds4_str_view(name), DS4_STR("_info")));
        assert_int_equal(m->families[id].type == DS4_METRIC_HISTOGRAM,
                         m->families[id].buckets->n > 0);
        for (size_t b = 1; b < m->families[id].buckets->n; b++)
            assert_true(m->families[id].buckets->le[b - 1] < m->families[id].buckets->le[b]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(counters_count_per_series, start, stop),
        cmocka_unit_test_setup_teardown(small_counters_start_at_zero_and_large_ones_unseen, start,
                                        stop),
        cmocka_unit_test_setup_teardown(histograms_are_cumulative, start, stop),
        cmocka_unit_test_setup_teardown(values_outside_the_lists_are_counted_not_shown, start,
                                        stop),
        cmocka_unit_test_setup_teardown(a_state_is_one_of_its_list, start, stop),
        cmocka_unit_test_setup_teardown(a_hidden_gauge_comes_back_when_set, start, stop),
        cmocka_unit_test_setup_teardown(info_texts_are_escaped, start, stop),
        cmocka_unit_test(no_registry_means_no_metrics),
        cmocka_unit_test_setup_teardown(threads_lose_no_observation, start, stop),
        cmocka_unit_test_setup_teardown(the_process_is_measured, start, stop),
        cmocka_unit_test_setup_teardown(a_full_exposition_is_accepted_by_promtool, start, stop),
        cmocka_unit_test_setup_teardown(aliases_carry_vllms_labels_and_buckets, start, stop),
        cmocka_unit_test_setup_teardown(numbers_are_written_whole_where_they_are, start, stop),
        cmocka_unit_test_setup_teardown(a_histogram_can_be_set_as_a_whole, start, stop),
        cmocka_unit_test_setup_teardown(openmetrics_differs_where_it_must, start, stop),
        cmocka_unit_test_setup_teardown(names_follow_the_conventions, start, stop),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Log lines: shape, control bytes, levels, cutting, rate limit. */
#include "common/log.h"

#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* stderr points into a datagram socket while a test runs: each write(2) is one message. */
struct capture {
    int old_stderr;
    int fd[2];
};

static int start(void **state)
{
    static struct capture capture;

    capture.old_stderr = dup(STDERR_FILENO);
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, capture.fd) != 0 ||
        dup2(capture.fd[1], STDERR_FILENO) < 0)
        return -1;
    *state = &capture;
    ds4_log_set_level(DS4_LOG_INFO);
    ds4_log_set_name(NULL);
    return 0;
}

static int stop(void **state)
{
    struct capture *capture = *state;

    (void)dup2(capture->old_stderr, STDERR_FILENO);
    (void)close(capture->old_stderr);
    (void)close(capture->fd[0]);
    (void)close(capture->fd[1]);
    return 0;
}

/* The next write as text; "" if there was none. */
static const char *next_line(struct capture *capture)
{
    static char line[8192];
    ssize_t n = recv(capture->fd[0], line, sizeof(line) - 1, MSG_DONTWAIT);

    line[n < 0 ? 0 : n] = '\0';
    return line;
}

/* The line without its time, which has a fixed length. */
static const char *next_text(struct capture *capture)
{
    const char *line = next_line(capture);

    return strlen(line) < 25 ? line : line + 25;
}

static void a_line_has_time_level_name_event_and_text(void **state)
{
    const char *line;
    int year, month, day, hour, minute, second, ms;

    ds4_log_set_name("stage0");
    ds4_log(DS4_LOG_WARN, "kv.refuse", "seq=%d need_bytes=%zu", 7, (size_t)4096);
    line = next_line(*state);
    assert_int_equal(sscanf(line, "%4d-%2d-%2dT%2d:%2d:%2d.%3dZ ", &year, &month, &day, &hour,
                            &minute, &second, &ms),
                     7);
    assert_string_equal(line + 25, "warn stage0 kv.refuse seq=7 need_bytes=4096\n");
    assert_string_equal(next_line(*state), "");
}

static void control_bytes_cannot_forge_a_line(void **state)
{
    ds4_log(DS4_LOG_ERROR, "x", "name=%s", "a\nb\r\x1b[31m\x7f\xc3\xa9");
    assert_string_equal(next_text(*state), "error x name=a?b??[31m?\xc3\xa9\n");
}

static void lines_below_the_level_are_not_written(void **state)
{
    ds4_log(DS4_LOG_DEBUG, "x", "%s", "");
    assert_string_equal(next_line(*state), "");
    ds4_log_set_level(DS4_LOG_DEBUG);
    assert_true(ds4_log_enabled(DS4_LOG_DEBUG));
    ds4_log(DS4_LOG_DEBUG, "x", "%s", "y");
    assert_string_equal(next_text(*state), "debug x y\n");
    ds4_log_set_level(DS4_LOG_ERROR);
    assert_false(ds4_log_enabled(DS4_LOG_WARN));
}

static void long_text_is_cut_and_marked(void **state)
{
    char text[6000];
    const char *line;

    memset(text, 'a', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    ds4_log(DS4_LOG_INFO, "x", "%s", text);
    line = next_line(*state);
    assert_int_equal(strlen(line), 4095);
    assert_string_equal(line + strlen(line) - 5, "a...\n");
}

static void levels_have_names(void **state)
{
    enum ds4_log_level level;

    (void)state;
    assert_int_equal(ds4_log_parse_level("warn", &level), 0);
    assert_int_equal(level, DS4_LOG_WARN);
    assert_int_equal(ds4_log_parse_level("debug", &level), 0);
    assert_int_equal(level, DS4_LOG_DEBUG);
    assert_int_equal(ds4_log_parse_level("loud", &level), -1);
}

static void a_flood_is_limited_and_counted(void **state)
{
    static struct ds4_log_limit limit;
    int n = 0;

    for (int i = 0; i < 100; i++)
        ds4_log_limited(&limit, 3, DS4_LOG_WARN, "peer.bad", "i=%d", i);
    while (next_line(*state)[0] != '\0')
        n++;
    assert_int_equal(n, 3);
    assert_int_equal(limit.left_out, 97);
    limit.window_start_ns -= INT64_C(2000000000); /* as if two seconds had passed */
    ds4_log_limited(&limit, 3, DS4_LOG_WARN, "peer.bad", "i=%d", 100);
    assert_string_equal(next_text(*state), "warn peer.bad left_out=97\n");
    assert_string_equal(next_text(*state), "warn peer.bad i=100\n");
    assert_int_equal(limit.left_out, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_line_has_time_level_name_event_and_text, start, stop),
        cmocka_unit_test_setup_teardown(control_bytes_cannot_forge_a_line, start, stop),
        cmocka_unit_test_setup_teardown(lines_below_the_level_are_not_written, start, stop),
        cmocka_unit_test_setup_teardown(long_text_is_cut_and_marked, start, stop),
        cmocka_unit_test(levels_have_names),
        cmocka_unit_test_setup_teardown(a_flood_is_limited_and_counted, start, stop),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

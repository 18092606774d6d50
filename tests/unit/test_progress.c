/* Progress of long work: what a line says, and when it is said. */
#include "common/progress.h"

#include "common/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define MIB ((int64_t)1 << 20)
#define GIB ((int64_t)1 << 30)

static void assert_text(int64_t done, int64_t total, double seconds, const char *want)
{
    char text[160];

    ds4_progress_text(done, total, (int64_t)(seconds * (double)DS4_NS_PER_SEC), text, sizeof(text));
    assert_string_equal(text, want);
}

static void a_line_tells_share_amount_rate_and_time_left(void **state)
{
    (void)state;
    assert_text(8 * GIB, 32 * GIB, 10, "25 %, 8.0 of 32.0 GiB, 819.2 MiB/s, 30 s left");
    assert_text(GIB, 80 * GIB, 20, "1 %, 1.0 of 80.0 GiB, 51.2 MiB/s, 26 min left");
    assert_text(GIB, 800 * GIB, 60, "0 %, 1.0 of 800.0 GiB, 17.1 MiB/s, 13.3 h left");
    assert_text(32 * GIB, 32 * GIB, 10, "100 %, 32.0 of 32.0 GiB, 3.2 GiB/s, 0 s left");
    assert_text(300, 1000, 1, "30 %, 300.0 of 1000.0 B, 300.0 B/s, 2 s left");
}

static void there_is_no_rate_before_there_is_one(void **state)
{
    (void)state;
    assert_text(0, 4 * MIB, 5, "0 %, 0.0 of 4.0 MiB");
    assert_text(MIB, 4 * MIB, 0.1, "25 %, 1.0 of 4.0 MiB");
    assert_text(0, 0, 3, "0 %");
}

/* stderr of the calls between `began` and the end of the test. */
static char *what_was_written(int64_t began_ago_ms, bool terminal, int n_update)
{
    char *text = calloc(1, 8192);
    FILE *file = tmpfile();
    int saved = dup(STDERR_FILENO);
    struct ds4_progress p;

    assert_non_null(text);
    assert_non_null(file);
    assert_true(dup2(fileno(file), STDERR_FILENO) >= 0);
    ds4_progress_begin(&p, "loading weights", 100 * MIB);
    assert_false(p.terminal); /* a file is none */
    p.terminal = terminal;
    p.began_ns -= began_ago_ms * DS4_NS_PER_MS;
    p.next_ns -= began_ago_ms * DS4_NS_PER_MS;
    for (int i = 1; i <= n_update; i++)
        ds4_progress_update(&p, i * MIB);
    ds4_progress_end(&p);
    (void)fflush(stderr);
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    (void)close(saved);
    rewind(file);
    (void)fread(text, 1, 8191, file);
    (void)fclose(file);
    return text;
}

static int count(const char *text, const char *part)
{
    int n = 0;

    while ((text = strstr(text, part)) != NULL) {
        n++;
        text += strlen(part);
    }
    return n;
}

static void short_work_is_silent(void **state)
{
    char *text = what_was_written(0, false, 50);

    (void)state;
    assert_string_equal(text, "");
    free(text);
}

static void a_journal_gets_few_lines_and_no_bar(void **state)
{
    char *text = what_was_written(5000, false, 50);

    (void)state;
    assert_int_equal(count(text, "\n"), 2); /* one on the way, one at the end */
    assert_non_null(
        strstr(text, "progress what=\"loading weights\" done=\"1 %, 1.0 of 100.0 MiB, "));
    assert_non_null(strstr(text, " bytes=52428800 "));
    assert_null(strchr(text, '\r'));
    free(text);
}

static void a_terminal_gets_a_bar_that_goes_away(void **state)
{
    char *text = what_was_written(5000, true, 50);

    (void)state;
    assert_non_null(strstr(text, "\r\033[Kloading weights [..............................] 1 %"));
    assert_int_equal(count(text, "\n"), 1);
    assert_true(count(text, "\r\033[K") >= 2); /* the last removes it */
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_line_tells_share_amount_rate_and_time_left),
        cmocka_unit_test(there_is_no_rate_before_there_is_one),
        cmocka_unit_test(short_work_is_silent),
        cmocka_unit_test(a_journal_gets_few_lines_and_no_bar),
        cmocka_unit_test(a_terminal_gets_a_bar_that_goes_away),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

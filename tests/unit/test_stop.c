/* Stop strings over chunks. */
#include "router/parse/stop.h"

#include "tests/support/parse_check.h"

#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define N_RANDOM  2000
#define TEXT_MAX  64
#define N_STRINGS 3

/* What goes out of `text` when it is fed in pieces of `piece` bytes. */
static void expect_out(const struct ds4_str *strings, size_t n, const char *text, size_t piece,
                       const char *want, bool want_hit)
{
    size_t out = 0, fed = 0, held = 0;
    struct ds4_stop stop;
    bool hit = false;

    assert_int_equal(ds4_stop_init(&stop, strings, n, NULL), 0);
    while (fed < strlen(text) && !hit) {
        struct ds4_stop_result r =
            ds4_stop_feed(&stop, ds4_str_head(ds4_str_view(text + fed), piece));
        fed += r.used;
        assert_true(r.held <= fed);
        assert_true(fed - r.held >= out);
        out = fed - r.held;
        held = r.held;
        hit = r.hit;
    }
    if (!hit)
        out += held; /* the end of the text releases what was held */
    assert_int_equal(hit, want_hit);
    assert_int_equal(out, strlen(want));
    assert_memory_equal(text, want, out);
    ds4_stop_deinit(&stop);
}

static void text_is_cut_before_the_stop_string(void **state)
{
    const struct ds4_str strings[] = {DS4_STR("END"), DS4_STR("")};

    (void)state;
    for (size_t piece = 1; piece < 12; piece++) {
        expect_out(strings, 2, "abcENDx", piece, "abc", true);
        expect_out(strings, 2, "abEENDx", piece, "abE", true);
        expect_out(strings, 2, "abcEN", piece, "abcEN", false);
        expect_out(strings, 2, "abcENnD", piece, "abcENnD", false);
    }
}

static void the_string_that_is_complete_first_wins(void **state)
{
    const struct ds4_str strings[] = {DS4_STR("abcd"), DS4_STR("bc"), DS4_STR("aabc")};

    (void)state;
    for (size_t piece = 1; piece < 8; piece++) {
        expect_out(strings, 2, "xabcd", piece, "xa", true);
        expect_out(strings, 3, "xaabcd", piece, "x", true);
    }
}

static void overlapping_beginnings_are_held_long_enough(void **state)
{
    const struct ds4_str strings[] = {DS4_STR("aab"), DS4_STR("\n\n")};

    (void)state;
    for (size_t piece = 1; piece < 8; piece++) {
        expect_out(strings, 2, "aaaab", piece, "aa", true);
        expect_out(strings, 2, "x\ny\n\nz", piece, "x\ny", true);
    }
}

/* The automaton against a search by hand, over a two-letter alphabet. */
static void random_texts_agree_with_a_plain_search(void **state)
{
    uint64_t seed = 1;

    (void)state;
    for (int round = 0; round < N_RANDOM; round++) {
        char text[TEXT_MAX + 1] = {0}, needles[N_STRINGS][8] = {{0}}, want[TEXT_MAX + 1] = {0};
        struct ds4_str strings[N_STRINGS];
        size_t n_out = TEXT_MAX, end = TEXT_MAX + 1;

        for (size_t i = 0; i < TEXT_MAX; i++)
            text[i] = "ab"[parse_check_random(&seed) & 1];
        for (size_t k = 0; k < N_STRINGS; k++) {
            const char *at;
            size_t n = 3 + parse_check_random(&seed) % 5;
            for (size_t i = 0; i < n; i++)
                needles[k][i] = "ab"[parse_check_random(&seed) & 1];
            strings[k] = (struct ds4_str){needles[k], n};
            at = strstr(text, needles[k]);
            if (at == NULL || (size_t)(at - text) + n > end)
                continue;
            if ((size_t)(at - text) + n < end || (size_t)(at - text) < n_out)
                n_out = (size_t)(at - text);
            end = (size_t)(at - text) + n;
        }
        memcpy(want, text, n_out);
        expect_out(strings, N_STRINGS, text, 1 + parse_check_random(&seed) % 9, want,
                   end <= TEXT_MAX);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_is_cut_before_the_stop_string),
        cmocka_unit_test(the_string_that_is_complete_first_wins),
        cmocka_unit_test(overlapping_beginnings_are_held_long_enough),
        cmocka_unit_test(random_texts_agree_with_a_plain_search),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

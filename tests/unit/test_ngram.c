/* The n-gram drafter's index: what it proposes, that taking back is exact, what it costs. */
#include "worker/ngram.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define MAX 4096

static void init(struct ds4_ngram *g, int32_t min_match)
{
    assert_int_equal(ds4_ngram_init(g, 2, MAX, min_match, NULL), 0);
}

static void what_followed_the_longest_and_newest_match_is_proposed(void **state)
{
    /* 1 2 3 stands three times; behind 9 1 2 3 it goes on with 7 */
    static const int32_t text[] = {9, 1, 2, 3, 7, 8, 5, 1, 2, 3, 4, 6, 9, 1, 2, 3};
    struct ds4_ngram g;
    int32_t draft[8];

    (void)state;
    init(&g, 3);
    assert_int_equal(ds4_ngram_propose(&g, 0, text, 16, 8, draft), 4); /* as long as the match */
    assert_memory_equal(draft, text + 4, 4 * sizeof(*draft));
    assert_int_equal(ds4_ngram_propose(&g, 0, text, 16, 2, draft), 2);
    ds4_ngram_start(&g, 0, 1); /* without the 9 both match alike: the newest */
    assert_int_equal(ds4_ngram_propose(&g, 0, text, 16, 8, draft), 3);
    assert_memory_equal(draft, text + 10, 3 * sizeof(*draft));
    assert_int_equal(ds4_ngram_propose(&g, 1, text, 4, 8, draft),
                     0); /* another slot knows nothing */
    ds4_ngram_deinit(&g);
}

static void a_period_is_continued_behind_the_end(void **state)
{
    static const int32_t text[] = {5, 6, 5, 6, 5, 6, 5, 6};
    static const int32_t more[] = {5, 6, 5, 6, 5, 6};
    struct ds4_ngram g;
    int32_t draft[6];

    (void)state;
    init(&g, 3);
    assert_int_equal(ds4_ngram_propose(&g, 0, text, 8, 6, draft), 6);
    assert_memory_equal(draft, more, sizeof(more));
    ds4_ngram_deinit(&g);
}

static void nothing_before_the_start_is_looked_at(void **state)
{
    static const int32_t text[] = {1, 2, 3, 4, 1, 2, 3};
    struct ds4_ngram g;
    int32_t draft[4];

    (void)state;
    init(&g, 3);
    ds4_ngram_start(&g, 0, 1); /* 1 2 3 is not whole behind it */
    assert_int_equal(ds4_ngram_propose(&g, 0, text, 7, 4, draft), 0);
    ds4_ngram_start(&g, 0, 0);
    assert_int_equal(ds4_ngram_propose(&g, 0, text, 7, 4, draft), 3);
    assert_memory_equal(draft, text + 3, 3 * sizeof(*draft));
    ds4_ngram_deinit(&g);
}

static uint64_t dice(uint64_t *seed)
{
    *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *seed >> 33;
}

/* The rule, without an index: the places of the newest group from the back, so many of them. */
static int32_t naive(const int32_t *text, int32_t n, int32_t min_match, int32_t max, int32_t *draft)
{
    int32_t best = 0, at = 0, tries = 0;

    for (int32_t p = n - 2; p - min_match + 1 >= 0 && tries < DS4_NGRAM_TRIES; p--) {
        int32_t len = 0;

        while (len < DS4_NGRAM_MATCH && p - len >= 0 && text[p - len] == text[n - 1 - len])
            len++;
        if (len < min_match)
            continue;
        tries++;
        if (len > best) {
            best = len;
            at = p + 1;
        }
        if (best == DS4_NGRAM_MATCH)
            break;
    }
    max = max < best ? max : best;
    for (int32_t i = 0; i < max; i++)
        draft[i] = at + i < n ? text[at + i] : draft[at + i - n];
    return max;
}

static void proposals_are_those_of_a_search_whatever_was_taken_back(void **state)
{
    static int32_t text[MAX];
    uint64_t seed = 3;
    int32_t n_proposed = 0;

    (void)state;
    for (int32_t min_match = 1; min_match <= 5; min_match += 2) {
        struct ds4_ngram g;
        int32_t n = 0;

        init(&g, min_match);
        for (int32_t i = 0; i < 3000; i++) {
            int32_t a[8], b[8], got;

            if (n > MAX - 50 || dice(&seed) % 40 == 0) { /* back by some, or to nothing */
                int32_t keep = dice(&seed) % 30 == 0 ? 0 : n - (int32_t)(dice(&seed) % 120);

                keep = keep > 0 ? keep : 0;
                ds4_ngram_forget(&g, 0, text, keep);
                n = keep;
            }
            for (int32_t more = 1 + (int32_t)(dice(&seed) % 5); more > 0 && n < MAX; more--, n++) {
                bool again = n > 40 && dice(&seed) % 4 != 0;

                text[n] = again ? text[n - 37] : (int32_t)(dice(&seed) % 9);
            }
            if (dice(&seed) % 2 == 0)
                ds4_ngram_note(&g, 0, text, n);
            got = ds4_ngram_propose(&g, 0, text, n, 8, a);
            /* Another group of the same hash takes one of the tries: never here, with 4096 heads. */
            assert_int_equal(got, naive(text, n, min_match, 8, b));
            assert_memory_equal(a, b, (size_t)got * sizeof(*a));
            n_proposed += got;
        }
        ds4_ngram_deinit(&g);
    }
    assert_true(n_proposed > 10000);
}

/* Tokens that are all alike make one chain of everything: only so many places of it are looked at. */
static void a_text_of_one_token_costs_a_bounded_search(void **state)
{
    static int32_t text[MAX];
    struct ds4_ngram g;
    int32_t draft[8];

    (void)state;
    init(&g, 3);
    for (int32_t n = 1; n <= MAX; n++) {
        int32_t got = ds4_ngram_propose(&g, 0, text, n, 8, draft);

        assert_int_equal(got, n < 4 ? 0 : n - 1 < 8 ? n - 1 : 8);
    }
    ds4_ngram_deinit(&g);
}

static void its_memory_is_what_it_says(void **state)
{
    (void)state;
    for (int32_t context = 256; context <= 1 << 20; context *= 8) {
        size_t heads = context < 1024 ? 1024 : context > 65536 ? 65536 : (size_t)context;
        size_t bytes = 3 * (sizeof(struct ds4_ngram_seq) + 4 * heads + 4 * (size_t)context);
        struct ds4_ngram g;

        assert_true(ds4_ngram_bytes(3, context) == bytes);
        assert_int_equal(ds4_ngram_init(&g, 3, context, 3, NULL), 0);
        assert_true((size_t)g.n_head == heads);
        g.seq[2].head[heads - 1] =
            1; /* the last of each: seen by a sanitizer if it were too little */
        g.seq[2].prev[context - 1] = 1;
        ds4_ngram_deinit(&g);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_followed_the_longest_and_newest_match_is_proposed),
        cmocka_unit_test(a_period_is_continued_behind_the_end),
        cmocka_unit_test(nothing_before_the_start_is_looked_at),
        cmocka_unit_test(proposals_are_those_of_a_search_whatever_was_taken_back),
        cmocka_unit_test(a_text_of_one_token_costs_a_bounded_search),
        cmocka_unit_test(its_memory_is_what_it_says),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

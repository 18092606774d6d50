/* Repetition tripwires: detectors against their vectors, streaks, recoveries. */
#include "router/parse/loop_guard.h"

#include "common/arena.h"
#include "common/json_text.h"
#include "router/text_parse.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define ARENA_BYTES  ((size_t)16 << 20)
#define ANSWER_BYTES ((size_t)1 << 20)
#define MANY_TOK     5000

/* Stands in for a tokenizer: a run of letters, a digit or a punctuation mark is one token. */
static size_t count_words(void *ctx, struct ds4_str text)
{
    size_t n = 0;

    (void)ctx;
    for (size_t i = 0; i < text.len; i++) {
        unsigned char c = (unsigned char)text.ptr[i];
        bool in_word = i > 0 && isalpha((unsigned char)text.ptr[i - 1]);
        n += isalpha(c) ? !in_word : !isspace(c);
    }
    return n;
}

static struct ds4_arena arena;
static char *file_text;
static const struct ds4_jt_node *vectors;

static int open_vectors(void **state)
{
    FILE *file = fopen("tests/data/dsml/tripwire.json", "rb");
    size_t n;

    (void)state;
    if (file == NULL)
        return -1;
    file_text = malloc(1 << 20);
    n = fread(file_text, 1, 1 << 20, file);
    fclose(file);
    ds4_arena_init(&arena, ARENA_BYTES);
    vectors = ds4_jt_parse((struct ds4_str){file_text, n}, DS4_JT_MAX_DEPTH, &arena, NULL);
    return vectors == NULL ? -1 : 0;
}

static int close_vectors(void **state)
{
    (void)state;
    ds4_arena_deinit(&arena);
    free(file_text);
    return 0;
}

static bool same(const struct ds4_jt_node *a, const struct ds4_jt_node *b)
{
    if (a == NULL || b == NULL || a->type != b->type || a->n_children != b->n_children)
        return false;
    if (a->type == DS4_JT_STRING)
        return ds4_str_equal(a->str, b->str);
    if (a->type == DS4_JT_NUMBER)
        return ds4_str_equal(a->raw, b->raw);
    for (const struct ds4_jt_node *x = a->first, *y = b->first; x != NULL; x = x->next, y = y->next)
        if (!same(x, a->type == DS4_JT_OBJECT ? ds4_jt_find_str(b, x->key) : y))
            return false;
    return true;
}

static void detectors_agree_with_the_vectors(void **state)
{
    static const char *const keys[] = {"soup", "exact_line", "fuzzy_15", "fuzzy_6"};

    (void)state;
    for (const struct ds4_jt_node *c = ds4_jt_find(vectors, "cases")->first; c != NULL;
         c = c->next) {
        const struct ds4_jt_node *answer;
        struct ds4_buf out;

        ds4_buf_init(&out, ANSWER_BYTES);
        assert_int_equal(ds4_text_tripwire_case(c->raw, count_words, NULL, &out, NULL), 0);
        answer = ds4_jt_parse(ds4_buf_view(&out), DS4_JT_MAX_DEPTH, &arena, NULL);
        for (size_t k = 0; k < 4; k++)
            if (!same(ds4_jt_find(answer, keys[k]), ds4_jt_find(c, keys[k])))
                fail_msg("%.*s %s: %s", DS4_STR_ARG(ds4_jt_find(c, "name")->str), keys[k], out.ptr);
        ds4_buf_deinit(&out);
    }
}

static void signature_list_is_the_vectors_list(void **state)
{
    const struct ds4_jt_node *meta = ds4_jt_find(vectors, "meta");
    const struct ds4_jt_node *node = ds4_jt_find(meta, "signatures")->first;
    size_t n, n_optional;
    const struct ds4_str *list = ds4_soup_signatures(&n, &n_optional);

    (void)state;
    for (size_t i = 0; i < n; i++) {
        if (i == n - n_optional) {
            assert_null(node);
            node = ds4_jt_find(meta, "signatures_optional")->first;
        }
        assert_non_null(node);
        assert_true(ds4_str_equal(list[i], node->str));
        node = node->next;
    }
    assert_null(node);
}

/* A line of the vectors' lists must be ignored by the detector that the list belongs to. */
static void whitelisted_lines_and_stop_words_never_hit(void **state)
{
    const struct ds4_jt_node *meta = ds4_jt_find(vectors, "meta");
    struct ds4_loop_knobs knobs;
    struct ds4_buf window;

    (void)state;
    ds4_loop_knobs_default(&knobs);
    ds4_buf_init(&window, ANSWER_BYTES);
    for (const struct ds4_jt_node *n = ds4_jt_find(meta, "line_whitelist")->first; n != NULL;
         n = n->next) {
        ds4_buf_clear(&window);
        for (int i = 0; i < 9; i++)
            assert_int_equal(ds4_buf_appendf(&window, " %.*s\r\n", DS4_STR_ARG(n->str)), 0);
        assert_int_equal(ds4_exact_find(ds4_buf_view(&window), count_words, NULL).len, 0);
    }
    for (const struct ds4_jt_node *n = ds4_jt_find(meta, "stopwords")->first; n != NULL;
         n = n->next) {
        ds4_buf_clear(&window);
        for (int i = 0; i < 20; i++)
            assert_int_equal(ds4_buf_appendf(&window, "One two %.*s x%d\n", DS4_STR_ARG(n->str), i),
                             0);
        assert_false(ds4_fuzzy_find(ds4_buf_view(&window), &knobs).hit);
    }
    ds4_buf_deinit(&window);
}

static void recovery_texts_are_the_vectors_texts(void **state)
{
    const struct ds4_jt_node *meta = ds4_jt_find(vectors, "meta");
    const struct ds4_jt_node *reopen = ds4_jt_find(meta, "reopen_text_ours");

    (void)state;
    assert_true(ds4_str_equal(ds4_recovery_text(DS4_RECOVERY_NUDGE, true),
                              ds4_jt_find(meta, "nudge_text")->str));
    assert_true(ds4_str_equal(ds4_recovery_text(DS4_RECOVERY_REOPEN, true),
                              ds4_jt_find(reopen, "thinking")->str));
    assert_true(ds4_str_equal(ds4_recovery_text(DS4_RECOVERY_REOPEN, false),
                              ds4_jt_find(reopen, "chat")->str));
}

static void the_line_that_occurs_most_often_is_reported(void **state)
{
    const char *window = "b\na\nb\na\nb\na\nb\na\nb\na\na\n";
    struct ds4_str line = ds4_exact_find(ds4_str_view(window), count_words, NULL);

    (void)state;
    assert_int_equal(line.len, 1);
    assert_int_equal(line.ptr[0], 'a');
}

/* ---- a sequence ------------------------------------------------------------------------------ */

struct fixture {
    struct ds4_loop_knobs knobs;
    struct ds4_loop_guard guard;
};

static int start(void **state)
{
    static struct fixture f;

    ds4_loop_knobs_default(&f.knobs);
    ds4_loop_guard_init(&f.guard, &f.knobs, count_words, NULL);
    *state = &f;
    return 0;
}

static int stop(void **state)
{
    struct fixture *f = *state;

    ds4_loop_guard_deinit(&f->guard);
    return 0;
}

/* Feeds `text` as one token `times` times; the number of the token that trips, or 0. */
static int feed(struct fixture *f, const char *text, int times, struct ds4_trip *trip)
{
    for (int i = 1; i <= times; i++) {
        assert_int_equal(ds4_loop_guard_add(&f->guard, ds4_str_view(text), trip, NULL), 0);
        if (trip->kind != DS4_TRIP_NONE)
            return i;
    }
    return 0;
}

static void repeated_line_trips_after_six_blocks_in_a_row(void **state)
{
    struct fixture *f = *state;
    struct ds4_trip trip;

    /* Block 1 ends with five lines: the first hit; the sixth hit comes with token 30. */
    assert_int_equal(feed(f, "Grep.\n", MANY_TOK, &trip), 30);
    assert_int_equal(trip.kind, DS4_TRIP_EXACT);
    assert_string_equal(trip.evidence, "Grep.");
}

static void the_streak_ends_when_the_lines_leave_the_window(void **state)
{
    struct fixture *f = *state;
    struct ds4_trip trip;
    char line[32];

    f->knobs.streak = 100;
    assert_int_equal(feed(f, "Grep.\n", 25, &trip), 0);
    assert_int_equal(f->guard.line_streak, 5);
    for (int i = 0; i < 300; i++) {
        snprintf(line, sizeof(line), "step %d\n", i);
        assert_int_equal(feed(f, line, 1, &trip), 0);
    }
    assert_int_equal(f->guard.line_streak, 0);
}

static void one_mention_of_a_tag_never_trips(void **state)
{
    struct fixture *f = *state;
    struct ds4_trip trip;
    char word[32];

    assert_int_equal(feed(f, "<thinking>", 1, &trip), 0);
    for (int i = 0; i < MANY_TOK; i++) {
        snprintf(word, sizeof(word), " w%d", i);
        assert_int_equal(feed(f, word, 1, &trip), 0);
    }
}

static void tags_in_twelve_blocks_in_a_row_trip(void **state)
{
    struct fixture *f = *state;
    struct ds4_trip trip;

    assert_int_equal(feed(f, " <call x", MANY_TOK, &trip), 60);
    assert_int_equal(trip.kind, DS4_TRIP_SOUP);
    assert_string_equal(trip.evidence, "<call ");
}

static void a_tag_split_over_tokens_is_seen(void **state)
{
    struct fixture *f = *state;
    struct ds4_trip trip;
    int n = 0;

    while (n < MANY_TOK && feed(f, "<refe", 1, &trip) == 0 && feed(f, "rence", 1, &trip) == 0)
        n++;
    assert_true(n < MANY_TOK);
    assert_string_equal(trip.evidence, "<reference");
}

static void recovery_is_granted_twice_and_resets_streaks(void **state)
{
    struct fixture *f = *state;
    struct ds4_trip trip;

    for (int n = 0; n < 2; n++) {
        assert_true(feed(f, "Grep.\n", MANY_TOK, &trip) > 0);
        assert_int_equal(ds4_loop_guard_recover(&f->guard), DS4_RECOVERY_NUDGE);
        assert_int_equal(f->guard.line_streak, 0);
        /* the lines before the splice count no more */
        assert_int_equal(feed(f, "Grep.\n", 4, &trip), 0);
        assert_int_equal(feed(f, "word ", 100, &trip), 0);
    }
    assert_true(feed(f, "Grep.\n", MANY_TOK, &trip) > 0);
    assert_int_equal(ds4_loop_guard_recover(&f->guard), DS4_RECOVERY_OFF);
}

static void window_memory_stays_bounded(void **state)
{
    struct fixture *f = *state;
    struct ds4_trip trip;
    char word[32];

    for (int i = 0; i < MANY_TOK; i++) {
        snprintf(word, sizeof(word), " w%d", i);
        assert_int_equal(feed(f, word, 1, &trip), 0);
    }
    assert_true(f->guard.token_bytes.len < 400);
    assert_true(f->guard.text.len < 4000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(detectors_agree_with_the_vectors),
        cmocka_unit_test(signature_list_is_the_vectors_list),
        cmocka_unit_test(whitelisted_lines_and_stop_words_never_hit),
        cmocka_unit_test(recovery_texts_are_the_vectors_texts),
        cmocka_unit_test(the_line_that_occurs_most_often_is_reported),
        cmocka_unit_test_setup_teardown(repeated_line_trips_after_six_blocks_in_a_row, start, stop),
        cmocka_unit_test_setup_teardown(the_streak_ends_when_the_lines_leave_the_window, start,
                                        stop),
        cmocka_unit_test_setup_teardown(one_mention_of_a_tag_never_trips, start, stop),
        cmocka_unit_test_setup_teardown(tags_in_twelve_blocks_in_a_row_trip, start, stop),
        cmocka_unit_test_setup_teardown(a_tag_split_over_tokens_is_seen, start, stop),
        cmocka_unit_test_setup_teardown(recovery_is_granted_twice_and_resets_streaks, start, stop),
        cmocka_unit_test_setup_teardown(window_memory_stays_bounded, start, stop),
    };

    return cmocka_run_group_tests(tests, open_vectors, close_vectors);
}

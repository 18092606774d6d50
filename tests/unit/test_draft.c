/* What is proposed of what a drafter says, and when a sequence goes without. */
#include "worker/draft.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#define VOCAB 50

/* Says 1, 2, 3, ... with one id replaced. */
struct teller {
    int32_t bad_at; /* -1: none */
    int32_t bad;
    int32_t most; /* that it was asked for */
};

static void none(void *owner, int32_t slot, int32_t from)
{
    (void)owner;
    (void)slot;
    (void)from;
}

static void none_of(void *owner, int32_t slot, const int32_t *history, int32_t n)
{
    (void)owner;
    (void)slot;
    (void)history;
    (void)n;
}

static int32_t tell(void *owner, int32_t slot, const int32_t *history, int32_t n, int32_t max,
                    int32_t *draft)
{
    struct teller *t = owner;

    (void)slot;
    (void)history;
    (void)n;
    t->most = max;
    for (int32_t i = 0; i < max; i++)
        draft[i] = i == t->bad_at ? t->bad : i + 1;
    return max;
}

static void open_with(struct ds4_draft *d, struct teller *t, int32_t max, int32_t max_pos)
{
    const struct ds4_draft_config config = {
        .max = 8, .min_match = 3, .n_slot = 2, .max_context = 512, .n_vocab = VOCAB};
    const struct ds4_seq_open open = {.slot = 1, .max_draft = max, .max_pos = max_pos};

    assert_int_equal(ds4_draft_init(d, &config, NULL), 0);
    d->by = (struct ds4_drafter){t, none, none_of, none_of, tell};
    ds4_draft_open(d, &open);
}

static void no_more_is_asked_for_than_the_sequence_wants_and_has_room_for(void **state)
{
    struct teller t = {.bad_at = -1};
    struct ds4_draft d;
    struct ds4_drafts out;

    (void)state;
    open_with(&d, &t, 5, 100);
    ds4_draft_propose(&d, 1, NULL, 20, &out);
    assert_int_equal(out.n, 5);
    /* 97 tokens are known: rows at 96, 97, 98 sample for 97, 98, 99, the last allowed position */
    ds4_draft_propose(&d, 1, NULL, 97, &out);
    assert_int_equal(out.n, 2);
    ds4_draft_propose(&d, 1, NULL, 99, &out);
    assert_int_equal(out.n, 0);
    ds4_draft_propose(&d, 0, NULL, 20, &out); /* a slot nobody opened with drafts */
    assert_int_equal(out.n, 0);
    ds4_draft_deinit(&d);
}

static void ids_outside_the_vocabulary_never_leave(void **state)
{
    static const int32_t ids[] = {-1, VOCAB, INT32_MAX, INT32_MIN};

    (void)state;
    for (size_t i = 0; i < 4; i++)
        for (int32_t at = 0; at < 8; at++) {
            struct teller t = {.bad_at = at, .bad = ids[i]};
            struct ds4_draft d;
            struct ds4_drafts out;

            open_with(&d, &t, 8, 400);
            ds4_draft_propose(&d, 1, NULL, 20, &out);
            assert_int_equal(out.n, at);
            assert_int_equal(out.n_bad, 1);
            for (int32_t k = 0; k < out.n; k++)
                assert_int_equal(out.token[k], k + 1);
            ds4_draft_deinit(&d);
        }
}

/* Tokens without drafts after n of them; 0: it does not rest. */
static int32_t rest_after(struct ds4_draft *d, int32_t n)
{
    struct ds4_drafts out;
    int32_t rest = 0;

    for (;; rest++) {
        ds4_draft_propose(d, 1, NULL, n + rest, &out);
        if (out.n > 0)
            return rest;
    }
}

static void wrong_drafts_are_quenched_and_tried_again_later_and_later(void **state)
{
    struct teller t = {.bad_at = -1};
    struct ds4_draft d;
    int32_t n = 10, rest = 64;

    (void)state;
    open_with(&d, &t, 8, 1 << 20);
    assert_false(ds4_draft_judge(&d, 1, 8, 0, n));
    assert_false(ds4_draft_judge(&d, 1, 8, 0, n));
    assert_true(ds4_draft_judge(&d, 1, 8, 0, n));
    for (int32_t i = 0; i < 8; i++) {
        assert_int_equal(rest_after(&d, n), rest);
        n += rest;
        assert_false(ds4_draft_judge(&d, 1, 8, 0, n)); /* one try is not enough */
        assert_true(ds4_draft_judge(&d, 1, 8, 0, n));
        rest = 2 * rest < 1024 ? 2 * rest : 1024;
    }
    /* a copy that is followed makes all good */
    n += 1024;
    for (int32_t i = 0; i < 10; i++)
        assert_false(ds4_draft_judge(&d, 1, 8, 8, n));
    for (int32_t i = 0; i < 8; i++)
        assert_false(ds4_draft_judge(&d, 1, 8, 0, n));
    assert_true(ds4_draft_judge(&d, 1, 8, 0, n));
    assert_int_equal(rest_after(&d, n), 64);
    ds4_draft_deinit(&d);
}

static void three_right_of_ten_keep_a_sequence_drafting(void **state)
{
    struct teller t = {.bad_at = -1};
    struct ds4_draft d;

    (void)state;
    open_with(&d, &t, 5, 1 << 20);
    for (int32_t i = 0; i < 1000; i++)
        assert_false(ds4_draft_judge(&d, 1, 5, 1 + i % 2, 10 + i));
    ds4_draft_deinit(&d);
}

static void without_drafts_there_is_no_memory_and_no_draft(void **state)
{
    const struct ds4_draft_config config = {.n_slot = 2, .max_context = 512, .n_vocab = VOCAB};
    const struct ds4_seq_open open = {.slot = 1, .max_draft = 8, .max_pos = 100};
    struct ds4_draft d;
    struct ds4_drafts out;

    (void)state;
    assert_true(ds4_draft_bytes(&config) == 0);
    assert_int_equal(ds4_draft_init(&d, &config, NULL), 0);
    ds4_draft_open(&d, &open);
    ds4_draft_start(&d, 1, 0);
    ds4_draft_note(&d, 1, NULL, 10);
    ds4_draft_forget(&d, 1, NULL, 5);
    ds4_draft_propose(&d, 1, NULL, 10, &out);
    assert_int_equal(out.n, 0);
    ds4_draft_deinit(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_more_is_asked_for_than_the_sequence_wants_and_has_room_for),
        cmocka_unit_test(ids_outside_the_vocabulary_never_leave),
        cmocka_unit_test(wrong_drafts_are_quenched_and_tried_again_later_and_later),
        cmocka_unit_test(three_right_of_ten_keep_a_sequence_drafting),
        cmocka_unit_test(without_drafts_there_is_no_memory_and_no_draft),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

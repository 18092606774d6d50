/* One sequence: its chunks, its run-ahead, and answers that contradict it. */
#include "router/sched/seq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#define VOCAB 100

static const struct ds4_kv_lease lease = {.slot = 3, .epoch = 8};

static struct ds4_seq *fresh(int32_t n_prompt, int32_t max_pos, int32_t start)
{
    static int32_t prompt[20000];
    struct ds4_seq *seq = ds4_seq_new(7, prompt, n_prompt, max_pos, start, NULL);

    assert_non_null(seq);
    seq->lease = &lease;
    return seq;
}

static void chunks_end_at_absolute_multiples_of_128(void **state)
{
    static const int32_t starts[] = {0, 1, 127, 128, 500, 4095};
    static const int32_t rooms[] = {128, 200, 256, 1000, 8192};

    (void)state;
    for (size_t s = 0; s < sizeof(starts) / sizeof(starts[0]); s++)
        for (size_t r = 0; r < sizeof(rooms) / sizeof(rooms[0]); r++) {
            struct ds4_seq *seq = fresh(10001, 10100, starts[s]);
            struct ds4_pick pick;
            int32_t at = starts[s];

            while (ds4_seq_next_chunk(seq, rooms[r], &pick)) {
                assert_int_equal(pick.base_pos, at);
                assert_in_range(pick.n_tok, 1, rooms[r]);
                at += pick.n_tok;
                assert_true(at % DS4_CHUNK_ALIGN_TOK == 0 || at == 10001);
                assert_int_equal(pick.sample, at == 10001);
                ds4_seq_posted(seq, &pick, 0);
            }
            assert_int_equal(at, 10001);
            ds4_seq_free(seq);
        }
}

static void a_small_room_still_moves_a_prompt(void **state)
{
    struct ds4_seq *seq = fresh(300, 400, 0);
    struct ds4_pick pick;

    (void)state;
    assert_false(ds4_seq_next_chunk(seq, 0, &pick));
    assert_true(ds4_seq_next_chunk(seq, 20, &pick));
    assert_int_equal(pick.n_tok, 20);
    ds4_seq_free(seq);
}

/* An entry as it was posted: a prompt's, or from position 10 on a decode of one token. */
static struct ds4_pick entry_at(int32_t base, int32_t n, bool sample)
{
    return (struct ds4_pick){.kind = base < 10 ? DS4_ENTRY_PREFILL : DS4_ENTRY_DECODE,
                             .base_pos = base,
                             .n_tok = n,
                             .reach = base + n,
                             .sample = sample,
                             .from_step = -1};
}

static int acked(struct ds4_seq *seq, int32_t base, int32_t n, bool sample,
                 const struct ds4_token_entry *entry, struct ds4_err *err)
{
    struct ds4_pick posted = entry_at(base, n, sample);

    return ds4_seq_acked(seq, &posted, VOCAB, entry, err);
}

static void acknowledge(struct ds4_seq *seq, int32_t base, int32_t n, int32_t token)
{
    struct ds4_token_entry entry = {
        .seq = 7,
        .epoch = 8,
        .pos = base + n,
        .flags = DS4_TOKEN_SAMPLED,
        .n_token = 1,
        .token = {token},
    };

    assert_int_equal(acked(seq, base, n, true, &entry, NULL), 0);
    seq->n_flight--;
}

static void a_decode_runs_at_most_one_step_ahead(void **state)
{
    struct ds4_seq *seq = fresh(10, 20, 0);
    struct ds4_pick pick;

    (void)state;
    assert_true(ds4_seq_next_chunk(seq, 100, &pick));
    ds4_seq_posted(seq, &pick, 40);
    assert_false(ds4_seq_can_decode(seq)); /* still in prefill */
    seq->state = DS4_SEQ_DECODE;
    assert_true(ds4_seq_can_decode(seq));
    ds4_seq_next_decode(seq, 0, &pick);
    assert_int_equal(pick.base_pos, 10);
    assert_int_equal((int)pick.from_step, 40);
    ds4_seq_posted(seq, &pick, 44);
    assert_false(ds4_seq_can_decode(seq));
    assert_true(ds4_seq_wants_decode(seq));
    acknowledge(seq, 0, 10, 55);
    assert_true(ds4_seq_can_decode(seq));
    ds4_seq_next_decode(seq, 0, &pick);
    assert_int_equal((int)pick.from_step, 44);
    acknowledge(seq, 10, 1, 56); /* before the next one is posted: the token is known */
    ds4_seq_next_decode(seq, 0, &pick);
    assert_int_equal((int)pick.from_step, -1);
    assert_int_equal(pick.base_pos, 11);
    assert_int_equal(seq->token.ptr[11], 56);
    ds4_seq_free(seq);
}

static void nothing_is_posted_for_positions_past_the_limit(void **state)
{
    struct ds4_seq *seq = fresh(10, 12, 0); /* two new tokens: one decode entry */
    struct ds4_pick pick;

    (void)state;
    assert_true(ds4_seq_next_chunk(seq, 100, &pick));
    ds4_seq_posted(seq, &pick, 0);
    seq->state = DS4_SEQ_DECODE;
    ds4_seq_next_decode(seq, 0, &pick);
    ds4_seq_posted(seq, &pick, 1);
    acknowledge(seq, 0, 10, 1);
    acknowledge(seq, 10, 1, 2);
    assert_false(ds4_seq_wants_decode(seq));
    ds4_seq_free(seq);
}

static void answers_that_contradict_the_posted_entry_are_refused(void **state)
{
    struct ds4_seq *seq = fresh(10, 20, 0);
    const struct ds4_token_entry good = {
        .seq = 7, .epoch = 8, .pos = 10, .flags = DS4_TOKEN_SAMPLED, .n_token = 1, .token = {9}};
    struct ds4_token_entry bad[9];
    struct ds4_err err = {0};

    (void)state;
    for (int32_t i = 0; i < 9; i++)
        bad[i] = good;
    bad[0].seq = 8;
    bad[1].epoch = 9;
    bad[2].pos = 11;
    bad[3].n_token = 0;
    bad[4].n_token = 2;
    bad[5].flags = 0;
    bad[6].token[0] = VOCAB;
    bad[7].token[0] = -1;
    bad[8].flags = DS4_TOKEN_SAMPLED | DS4_TOKEN_SKIPPED;
    for (int32_t i = 0; i < 9; i++) {
        assert_int_equal(acked(seq, 0, 10, true, &bad[i], &err), -1);
        assert_int_equal(err.code, DS4_E_PROTOCOL);
        assert_int_equal((int)seq->token.len, 10);
        assert_int_equal(seq->n_acked, 0);
    }
    assert_int_equal(acked(seq, 0, 10, false, &good, &err), -1); /* no sample asked */
    assert_int_equal(acked(seq, 0, 10, true, &good, &err), 0);
    assert_int_equal(seq->n_acked, 10);
    assert_int_equal(seq->hi, 10);
    ds4_seq_free(seq);
}

static void a_no_op_counts_as_nothing_and_a_bad_row_spoils(void **state)
{
    struct ds4_seq *seq = fresh(10, 20, 0);
    struct ds4_token_entry entry = {.seq = 7, .epoch = 8, .pos = 10};

    (void)state;
    acknowledge(seq, 0, 10, 4);
    entry.flags = DS4_TOKEN_SKIPPED;
    assert_int_equal(acked(seq, 10, 1, true, &entry, NULL), 0);
    assert_int_equal(seq->n_acked, 10);
    assert_int_equal(seq->hi, 10);
    assert_false(seq->spoiled);
    entry.flags = DS4_TOKEN_NONFINITE;
    entry.pos = 11;
    assert_int_equal(acked(seq, 10, 1, true, &entry, NULL), 0);
    assert_true(seq->spoiled);
    ds4_seq_free(seq);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_end_at_absolute_multiples_of_128),
        cmocka_unit_test(a_small_room_still_moves_a_prompt),
        cmocka_unit_test(a_decode_runs_at_most_one_step_ahead),
        cmocka_unit_test(nothing_is_posted_for_positions_past_the_limit),
        cmocka_unit_test(answers_that_contradict_the_posted_entry_are_refused),
        cmocka_unit_test(a_no_op_counts_as_nothing_and_a_bad_row_spoils),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Batch formation: balanced sticky groups, chunks in a row, nobody starves. */
#include "router/sched/batch.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define MAX_ENTRY 16

static int32_t prompt[100000];

/* A sequence in decode, its prompt acknowledged, one token known. */
static struct ds4_seq *decoding(uint64_t id)
{
    struct ds4_seq *seq = ds4_seq_new(id, prompt, 4, 10000, 0, NULL);

    assert_non_null(seq);
    assert_int_equal(DS4_VEC_PUSH(&seq->token, 1), 0);
    seq->n_posted = 4;
    seq->n_acked = 4;
    seq->state = DS4_SEQ_DECODE;
    return seq;
}

static struct ds4_seq *prefilling(uint64_t id, int32_t n)
{
    struct ds4_seq *seq = ds4_seq_new(id, prompt, n, n + 100, 0, NULL);

    assert_non_null(seq);
    return seq;
}

/* Posts what the batch picks; returns the number of picks. */
static int32_t post(struct ds4_batch *b, int64_t step, struct ds4_pick *pick)
{
    int32_t n = ds4_batch_next(b, step, pick);

    for (int32_t i = 0; i < n; i++)
        ds4_seq_posted(pick[i].seq, &pick[i], step);
    return n;
}

/* The tokens of everything posted arrive. */
static void settle(struct ds4_seq **seq, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        while (seq[i]->state == DS4_SEQ_DECODE && (int32_t)seq[i]->token.len <= seq[i]->n_posted)
            assert_int_equal(DS4_VEC_PUSH(&seq[i]->token, 1), 0);
}

static void assert_balanced(const struct ds4_batch *b)
{
    size_t least = SIZE_MAX, most = 0;
    int32_t total = 0;

    for (int32_t g = 0; g < b->n_group; g++) {
        size_t len = b->group[g].member.len;

        least = len < least ? len : least;
        most = len > most ? len : most;
        total += (int32_t)len;
        for (size_t i = 0; i < len; i++)
            assert_int_equal(b->group[g].member.ptr[i]->group, g);
    }
    assert_int_equal(total, b->n_decode);
    assert_true(b->n_decode == 0 || (least >= 1 && most - least <= 1));
    assert_true(most <= (size_t)b->max_entry);
}

static void groups_stay_balanced_through_joins_and_leaves(void **state)
{
    (void)state;
    for (int32_t n_stage = 1; n_stage <= 5; n_stage++) {
        struct ds4_seq *seq[60] = {0};
        struct ds4_batch b;
        uint32_t x = (uint32_t)n_stage;

        ds4_batch_init(&b, n_stage, MAX_ENTRY, 1024, 512);
        for (int32_t i = 0; i < 3000; i++) {
            int32_t s;

            x = x * 1664525u + 1013904223u;
            s = (int32_t)(x >> 8) % 60;
            if (seq[s] == NULL) {
                seq[s] = decoding((uint64_t)s);
                assert_int_equal(ds4_batch_start_decode(&b, seq[s], NULL), 0);
            } else {
                ds4_batch_remove(&b, seq[s]);
                ds4_seq_free(seq[s]);
                seq[s] = NULL;
            }
            assert_balanced(&b);
            if (b.n_decode >= n_stage && b.n_decode <= MAX_ENTRY * n_stage)
                assert_int_equal(b.n_group, n_stage);
        }
        for (int32_t s = 0; s < 60; s++)
            if (seq[s] != NULL) {
                ds4_batch_remove(&b, seq[s]);
                ds4_seq_free(seq[s]);
            }
        assert_int_equal(b.n_decode, 0);
        assert_int_equal(b.n_group, 0);
        ds4_batch_deinit(&b);
    }
}

static void every_stage_gets_a_group_and_each_its_turn(void **state)
{
    struct ds4_pick pick[MAX_ENTRY];
    struct ds4_seq *seq[8];
    struct ds4_batch b;
    int32_t count[8] = {0};

    (void)state;
    ds4_batch_init(&b, 4, MAX_ENTRY, 1024, 512);
    for (int32_t s = 0; s < 8; s++) {
        seq[s] = decoding((uint64_t)s);
        assert_int_equal(ds4_batch_start_decode(&b, seq[s], NULL), 0);
    }
    for (int64_t step = 0; step < 400; step++) {
        int32_t n = post(&b, step, pick);

        assert_int_equal(n, 2);
        for (int32_t i = 0; i < n; i++)
            count[pick[i].seq->id]++;
        settle(seq, 8);
    }
    for (int32_t s = 0; s < 8; s++) {
        assert_int_equal(count[s], 100);
        ds4_batch_remove(&b, seq[s]);
        ds4_seq_free(seq[s]);
    }
    ds4_batch_deinit(&b);
}

static void a_group_is_posted_whole_or_not_at_all(void **state)
{
    struct ds4_pick pick[MAX_ENTRY];
    struct ds4_seq *seq[3];
    struct ds4_batch b;

    (void)state;
    ds4_batch_init(&b, 1, MAX_ENTRY, 1024, 512);
    for (int32_t s = 0; s < 3; s++)
        seq[s] = decoding((uint64_t)s);
    assert_int_equal(ds4_batch_start_decode(&b, seq[0], NULL), 0);
    assert_int_equal(ds4_batch_start_decode(&b, seq[1], NULL), 0);
    assert_int_equal(post(&b, 0, pick), 2); /* known tokens */
    assert_int_equal(post(&b, 1, pick), 2); /* from the ring */
    assert_int_equal(post(&b, 2, pick), 0); /* not further */
    assert_int_equal(ds4_batch_start_decode(&b, seq[2], NULL), 0);
    assert_int_equal(post(&b, 2, pick), 0); /* the newcomer waits for the others */
    settle(seq, 2);
    assert_int_equal(post(&b, 2, pick), 3);
    seq[1]->paused = true; /* one that does not want to holds nobody up */
    settle(seq, 3);
    assert_int_equal(post(&b, 3, pick), 2);
    for (int32_t s = 0; s < 3; s++) {
        ds4_batch_remove(&b, seq[s]);
        ds4_seq_free(seq[s]);
    }
    ds4_batch_deinit(&b);
}

static void decodes_come_first_and_a_chunk_fills_the_rest(void **state)
{
    struct ds4_pick pick[MAX_ENTRY];
    struct ds4_seq *d = decoding(1), *p = prefilling(2, 5000);
    struct ds4_batch b;
    int32_t at = 0;

    (void)state;
    ds4_batch_init(&b, 2, MAX_ENTRY, 520, 512);
    assert_int_equal(ds4_batch_start_decode(&b, d, NULL), 0);
    assert_int_equal(ds4_batch_add_prefill(&b, p, NULL), 0);
    for (int64_t step = 0; step < 5; step++) {
        assert_int_equal(post(&b, step, pick), 2);
        assert_int_equal(pick[0].kind, DS4_ENTRY_DECODE);
        assert_int_equal(pick[1].base_pos, at);
        assert_int_equal(pick[1].n_tok, 512);
        at += 512;
        settle(&d, 1);
    }
    ds4_batch_remove(&b, d);
    ds4_batch_remove(&b, p);
    ds4_seq_free(d);
    ds4_seq_free(p);
    ds4_batch_deinit(&b);
}

static void a_prompt_gets_as_many_chunks_in_a_row_as_there_are_stages(void **state)
{
    struct ds4_pick pick[MAX_ENTRY];
    struct ds4_seq *p[3];
    struct ds4_batch b;
    static const uint64_t order[] = {0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 1};

    (void)state;
    ds4_batch_init(&b, 3, MAX_ENTRY, 300, 256);
    for (int32_t s = 0; s < 3; s++) {
        p[s] = prefilling((uint64_t)s, 50000);
        assert_int_equal(ds4_batch_add_prefill(&b, p[s], NULL), 0);
    }
    for (size_t i = 0; i < sizeof(order) / sizeof(order[0]); i++) {
        assert_int_equal(post(&b, (int64_t)i, pick), 1);
        assert_int_equal((int)pick[0].seq->id, (int)order[i]);
    }
    for (int32_t s = 0; s < 3; s++) {
        ds4_batch_remove(&b, p[s]);
        ds4_seq_free(p[s]);
    }
    ds4_batch_deinit(&b);
}

static void short_prompts_share_a_step(void **state)
{
    struct ds4_pick pick[MAX_ENTRY];
    struct ds4_seq *p[6];
    struct ds4_batch b;

    (void)state;
    ds4_batch_init(&b, 2, MAX_ENTRY, 600, 512);
    for (int32_t s = 0; s < 6; s++) {
        p[s] = prefilling((uint64_t)s, s == 4 ? 400 : 100);
        assert_int_equal(ds4_batch_add_prefill(&b, p[s], NULL), 0);
    }
    assert_int_equal(post(&b, 0, pick), 4); /* the fifth would have to be cut */
    for (int32_t s = 0; s < 4; s++)
        assert_true(pick[s].sample);
    for (int32_t s = 0; s < 4; s++)
        ds4_batch_remove(&b, p[s]);
    assert_int_equal(post(&b, 1, pick), 2);
    for (int32_t s = 4; s < 6; s++)
        ds4_batch_remove(&b, p[s]);
    for (int32_t s = 0; s < 6; s++)
        ds4_seq_free(p[s]);
    ds4_batch_deinit(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_stay_balanced_through_joins_and_leaves),
        cmocka_unit_test(every_stage_gets_a_group_and_each_its_turn),
        cmocka_unit_test(a_group_is_posted_whole_or_not_at_all),
        cmocka_unit_test(decodes_come_first_and_a_chunk_fills_the_rest),
        cmocka_unit_test(a_prompt_gets_as_many_chunks_in_a_row_as_there_are_stages),
        cmocka_unit_test(short_prompts_share_a_step),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

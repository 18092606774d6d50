/* The ledger: all or nothing, held promises, refusals that change nothing. */
#include "router/sched/budget.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static struct ds4_budget *fresh(int32_t n_blocks, int32_t n_slots)
{
    struct ds4_err err = {0};
    struct ds4_budget *b = ds4_budget_new(n_blocks, n_slots, 100 * DS4_BLOCK_TOK, &err);

    assert_non_null(b);
    return b;
}

static void assert_sums(const struct ds4_budget *b, int32_t free_n, int32_t promised, int32_t live,
                        int32_t cached)
{
    struct ds4_budget_sums sums;
    struct ds4_err err = {0};

    ds4_budget_sums(b, &sums);
    assert_int_equal(sums.free, free_n);
    assert_int_equal(sums.promised, promised);
    assert_int_equal(sums.live, live);
    assert_int_equal(sums.cached, cached);
    assert_int_equal(sums.free + sums.promised + sums.live + sums.cached, sums.total);
    assert_int_equal(ds4_budget_check(b, &err), 0);
}

/* From nothing. */
static const struct ds4_kv_lease *try_reserve(struct ds4_budget *b, int32_t tok,
                                              struct ds4_err *err)
{
    return ds4_budget_reserve(b, &(const struct ds4_kv_ask){.cap_tok = tok}, err);
}

static const struct ds4_kv_lease *reserve(struct ds4_budget *b, int32_t tok)
{
    const struct ds4_kv_lease *lease = try_reserve(b, tok, NULL);

    assert_non_null(lease);
    return lease;
}

static void a_promise_decays_as_blocks_are_filled(void **state)
{
    struct ds4_budget *b = fresh(10, 2);
    const struct ds4_kv_lease *lease = reserve(b, 4 * DS4_BLOCK_TOK);
    int32_t first, n;

    (void)state;
    assert_sums(b, 6, 4, 0, 0);
    assert_int_equal(ds4_budget_fill(b, lease, 1, &first, &n, NULL), 0);
    assert_int_equal(first, 0);
    assert_int_equal(n, 1);
    assert_int_equal(ds4_budget_fill(b, lease, DS4_BLOCK_TOK, &first, &n, NULL), 0);
    assert_int_equal(n, 0);
    assert_int_equal(ds4_budget_fill(b, lease, 4 * DS4_BLOCK_TOK, &first, &n, NULL), 0);
    assert_int_equal(first, 1);
    assert_int_equal(n, 3);
    assert_sums(b, 6, 0, 4, 0);
    assert_int_equal(ds4_budget_fill(b, lease, 4 * DS4_BLOCK_TOK + 1, &first, &n, NULL), -1);
    assert_sums(b, 6, 0, 4, 0);
    ds4_budget_release(b, &lease);
    assert_null(lease);
    assert_sums(b, 10, 0, 0, 0);
    ds4_budget_free(b);
}

static void refused_reserve_leaves_no_lease_and_no_trace(void **state)
{
    struct ds4_budget *b = fresh(10, 2);
    const struct ds4_kv_lease *held = reserve(b, 7 * DS4_BLOCK_TOK);
    uint64_t before = ds4_budget_digest(b);
    struct ds4_err err = {0};

    (void)state;
    assert_null(try_reserve(b, 3 * DS4_BLOCK_TOK + 1, &err));
    assert_int_equal(err.code, DS4_E_BUSY);
    assert_non_null(strstr(err.msg, "need 4 cache blocks"));
    assert_non_null(strstr(err.msg, "3 blocks free, 7 promised"));
    assert_true(before == ds4_budget_digest(b));
    assert_non_null(try_reserve(b, 3 * DS4_BLOCK_TOK, &err));
    before = ds4_budget_digest(b);
    assert_null(try_reserve(b, 1, &err)); /* no slot either */
    assert_true(before == ds4_budget_digest(b));
    ds4_budget_release(b, &held);
    ds4_budget_free(b);
}

static void what_can_never_fit_is_another_error_than_busy(void **state)
{
    struct ds4_budget *b = fresh(10, 2);
    struct ds4_err err = {0};

    (void)state;
    assert_null(try_reserve(b, 10 * DS4_BLOCK_TOK + 1, &err));
    assert_int_equal(err.code, DS4_E_INVALID);
    assert_non_null(strstr(err.msg, "needs 11 cache blocks"));
    assert_non_null(strstr(err.msg, "there are 10 in all"));
    assert_null(try_reserve(b, 0, &err));
    assert_int_equal(err.code, DS4_E_INVALID);
    assert_null(try_reserve(b, -5, &err));
    assert_sums(b, 10, 0, 0, 0);
    ds4_budget_free(b);
}

static void a_thousand_refusals_leave_the_ledger_bit_identical(void **state)
{
    struct ds4_budget *b = fresh(20, 4);
    const struct ds4_kv_lease *a = reserve(b, 12 * DS4_BLOCK_TOK);
    int32_t first, n;
    uint64_t before;

    (void)state;
    assert_int_equal(ds4_budget_fill(b, a, 2000, &first, &n, NULL), 0);
    before = ds4_budget_digest(b);
    for (int32_t i = 0; i < 1000; i++)
        assert_null(try_reserve(b, (9 + i % 30) * DS4_BLOCK_TOK, NULL));
    assert_true(before == ds4_budget_digest(b));
    ds4_budget_release(b, &a);
    ds4_budget_free(b);
}

/* The state of the first tok positions goes to the index and the slot stays hot. */
static void keep(struct ds4_budget *b, const struct ds4_kv_lease *lease, int32_t tok,
                 int32_t *block)
{
    int32_t n = ds4_budget_blocks(tok);

    for (int32_t i = 0; i < n; i++) {
        int32_t rows = i < n - 1 ? DS4_BLOCK_TOK : tok - i * DS4_BLOCK_TOK;

        block[i] = lease->block[i];
        assert_int_equal(ds4_budget_share(b, block[i], rows, NULL), 0);
    }
    ds4_budget_park(b, lease);
}

static void a_kept_prefix_is_resumed_under_a_new_epoch(void **state)
{
    struct ds4_budget *b = fresh(10, 2);
    const struct ds4_kv_lease *lease = reserve(b, 6 * DS4_BLOCK_TOK);
    struct ds4_kv_ask ask = {.cap_tok = 5 * DS4_BLOCK_TOK, .start_tok = 2 * DS4_BLOCK_TOK};
    uint32_t epoch = lease->epoch;
    int32_t first, n, block[10];

    (void)state;
    assert_int_equal(ds4_budget_fill(b, lease, 4 * DS4_BLOCK_TOK, &first, &n, NULL), 0);
    keep(b, lease, 2 * DS4_BLOCK_TOK + 1, block);
    assert_sums(b, 7, 0, 0, 3);
    assert_false(ds4_budget_holds(b, lease->slot, epoch));
    assert_int_equal(ds4_budget_fill(b, lease, 1, &first, &n, NULL), -1); /* not live */
    ask.shared = block;
    assert_int_equal(ds4_budget_resume(b, lease, &ask, NULL), 0);
    assert_sums(b, 4, 3, 2, 1);
    assert_int_not_equal(lease->epoch, epoch);
    assert_true(ds4_budget_holds(b, lease->slot, lease->epoch));
    assert_false(ds4_budget_holds(b, lease->slot, epoch));
    assert_int_equal(lease->block[1], block[1]);
    ds4_budget_release(b, &lease);
    for (int32_t i = 0; i < 3; i++)
        ds4_budget_unshare(b, block[i]);
    assert_sums(b, 10, 0, 0, 0);
    ds4_budget_free(b);
}

static void a_refused_resume_leaves_the_slot_hot(void **state)
{
    struct ds4_budget *b = fresh(10, 3);
    const struct ds4_kv_lease *lease = reserve(b, 3 * DS4_BLOCK_TOK), *other;
    struct ds4_kv_ask ask = {.cap_tok = 7 * DS4_BLOCK_TOK, .start_tok = DS4_BLOCK_TOK};
    struct ds4_err err = {0};
    int32_t first, n, block[3];
    uint64_t before;

    (void)state;
    assert_int_equal(ds4_budget_fill(b, lease, 3 * DS4_BLOCK_TOK, &first, &n, NULL), 0);
    keep(b, lease, 3 * DS4_BLOCK_TOK, block);
    other = reserve(b, 5 * DS4_BLOCK_TOK);
    before = ds4_budget_digest(b);
    ask.shared = block;
    assert_int_equal(ds4_budget_resume(b, lease, &ask, &err), -1);
    assert_int_equal(err.code, DS4_E_BUSY);
    assert_non_null(strstr(err.msg, "need 6 cache blocks"));
    assert_non_null(strstr(err.msg, "2 blocks free, 5 promised, 3 reclaimable"));
    ask.cap_tok = 11 * DS4_BLOCK_TOK;
    assert_int_equal(ds4_budget_resume(b, lease, &ask, &err), -1);
    assert_int_equal(err.code, DS4_E_INVALID);
    assert_true(before == ds4_budget_digest(b));
    assert_int_equal(lease->state, DS4_LEASE_HOT);
    ask.cap_tok = 3 * DS4_BLOCK_TOK;
    assert_int_equal(ds4_budget_resume(b, lease, &ask, &err), 0);
    assert_sums(b, 0, 7, 1, 2);
    ds4_budget_release(b, &lease);
    ds4_budget_release(b, &other);
    ds4_budget_free(b);
}

static void two_sequences_share_the_blocks_of_a_prefix(void **state)
{
    struct ds4_budget *b = fresh(20, 4);
    const struct ds4_kv_lease *first = reserve(b, 4 * DS4_BLOCK_TOK), *one, *two;
    struct ds4_kv_ask ask = {.cap_tok = 6 * DS4_BLOCK_TOK, .start_tok = 4 * DS4_BLOCK_TOK};
    int32_t at, n, block[4];

    (void)state;
    assert_int_equal(ds4_budget_fill(b, first, 4 * DS4_BLOCK_TOK, &at, &n, NULL), 0);
    keep(b, first, 4 * DS4_BLOCK_TOK, block);
    ds4_budget_release(b, &first);
    assert_sums(b, 16, 0, 0, 4);
    ask.shared = block;
    one = ds4_budget_reserve(b, &ask, NULL);
    two = ds4_budget_reserve(b, &ask, NULL);
    assert_non_null(one);
    assert_non_null(two);
    assert_sums(b, 12, 4, 4, 0); /* two new ones each, four in common */
    for (int32_t i = 0; i < 4; i++)
        ds4_budget_unshare(b, block[i]);
    ds4_budget_release(b, &one);
    assert_sums(b, 14, 2, 4, 0); /* still the other's */
    ds4_budget_release(b, &two);
    assert_sums(b, 20, 0, 0, 0);
    ds4_budget_free(b);
}

static void who_starts_inside_a_block_takes_the_pen_or_a_copy(void **state)
{
    struct ds4_budget *b = fresh(20, 4);
    const struct ds4_kv_lease *first = reserve(b, DS4_BLOCK_TOK), *one, *two, *cut;
    struct ds4_kv_ask ask = {.cap_tok = 2 * DS4_BLOCK_TOK, .start_tok = 100};
    struct ds4_err err = {0};
    int32_t at, n, block[1];

    (void)state;
    assert_int_equal(ds4_budget_fill(b, first, 100, &at, &n, NULL), 0);
    keep(b, first, 100, block);
    ds4_budget_release(b, &first);
    ask.shared = block;
    assert_int_equal(ds4_budget_need(b, &ask), 1);
    one = ds4_budget_reserve(b, &ask, NULL); /* goes on where it ended */
    assert_int_equal(one->block[0], block[0]);
    assert_int_equal(one->copy_from, -1);
    assert_int_equal(ds4_budget_may_write(b, one, 100, 101, &err), 0);
    assert_int_equal(ds4_budget_may_write(b, one, 99, 100, &err), -1); /* shared */
    assert_int_equal(ds4_budget_need(b, &ask), 2);
    two = ds4_budget_reserve(b, &ask, NULL); /* the pen is taken */
    assert_int_equal(two->copy_from, block[0]);
    assert_int_not_equal(two->block[0], block[0]);
    assert_int_equal(ds4_budget_may_write(b, two, 100, 101, &err), 0);
    ask.start_tok = 60; /* rows 60 to 99 are somebody's */
    ds4_budget_release(b, &one);
    cut = ds4_budget_reserve(b, &ask, NULL);
    assert_int_equal(cut->copy_from, block[0]);
    /* The source lives until it is copied, whoever drops it. */
    ds4_budget_unshare(b, block[0]);
    ds4_budget_copied(b, two);
    ds4_budget_copied(b, two);
    assert_int_equal(ds4_budget_check(b, &err), 0);
    assert_false(ds4_budget_is_cached(b, block[0]));
    ds4_budget_copied(b, cut);
    ds4_budget_release(b, &two);
    ds4_budget_release(b, &cut);
    assert_sums(b, 20, 0, 0, 0);
    ds4_budget_free(b);
}

static void a_block_that_nobody_holds_cannot_be_shared(void **state)
{
    struct ds4_budget *b = fresh(4, 2);
    struct ds4_kv_ask ask = {.cap_tok = 300, .start_tok = 256, .shared = (const int32_t[]){2}};
    struct ds4_err err = {0};
    uint64_t before = ds4_budget_digest(b);

    (void)state;
    assert_null(ds4_budget_reserve(b, &ask, &err));
    assert_int_equal(err.code, DS4_E_BUG);
    assert_int_equal(ds4_budget_share(b, 1, 10, &err), -1);
    assert_int_equal(ds4_budget_pin(b, -1, &err), -1);
    assert_true(before == ds4_budget_digest(b));
    ds4_budget_free(b);
}

static void rows_outside_the_lease_may_not_be_written(void **state)
{
    struct ds4_budget *b = fresh(8, 2);
    const struct ds4_kv_lease *lease = reserve(b, 300);
    int32_t at, n;

    (void)state;
    assert_int_equal(ds4_budget_may_write(b, lease, 0, 1, NULL), -1); /* no block yet */
    assert_int_equal(ds4_budget_fill(b, lease, 10, &at, &n, NULL), 0);
    assert_int_equal(ds4_budget_may_write(b, lease, 0, 256, NULL), 0);
    assert_int_equal(ds4_budget_may_write(b, lease, 0, 257, NULL), -1);
    assert_int_equal(ds4_budget_fill(b, lease, 300, &at, &n, NULL), 0);
    assert_int_equal(ds4_budget_may_write(b, lease, 256, 300, NULL), 0);
    assert_int_equal(ds4_budget_may_write(b, lease, 256, 301, NULL), -1);
    assert_int_equal(ds4_budget_may_write(b, lease, -1, 3, NULL), -1);
    ds4_budget_release(b, &lease);
    ds4_budget_free(b);
}

static void a_transfer_keeps_a_block_alive(void **state)
{
    struct ds4_budget *b = fresh(4, 2);
    const struct ds4_kv_lease *lease = reserve(b, 256);
    struct ds4_budget_sums sums;
    int32_t at, n, id;

    (void)state;
    assert_int_equal(ds4_budget_fill(b, lease, 256, &at, &n, NULL), 0);
    id = lease->block[0];
    assert_int_equal(ds4_budget_pin(b, id, NULL), 0);
    ds4_budget_release(b, &lease);
    ds4_budget_sums(b, &sums);
    assert_int_equal(sums.io, 1);
    assert_int_equal(sums.free, 3);
    ds4_budget_unpin(b, id);
    assert_sums(b, 4, 0, 0, 0);
    ds4_budget_free(b);
}

static void release_is_idempotent_and_epochs_never_repeat(void **state)
{
    struct ds4_budget *b = fresh(4, 1);
    uint32_t last = 0;

    (void)state;
    for (int32_t i = 0; i < 100; i++) {
        const struct ds4_kv_lease *lease = reserve(b, 4 * DS4_BLOCK_TOK);

        assert_true(lease->epoch > last);
        last = lease->epoch;
        ds4_budget_renew(b, lease);
        assert_true(lease->epoch > last);
        last = lease->epoch;
        ds4_budget_release(b, &lease);
        ds4_budget_release(b, &lease);
        assert_sums(b, 4, 0, 0, 0);
    }
    assert_false(ds4_budget_holds(b, 0, last));
    assert_false(ds4_budget_holds(b, -1, last));
    assert_false(ds4_budget_holds(b, 1, last));
    ds4_budget_free(b);
}

/* Many random transitions against the recount of ds4_budget_check, which knows nothing of the sums. */
static void random_transitions_keep_the_books(void **state)
{
    struct ds4_budget *b = fresh(40, 8);
    const struct ds4_kv_lease *lease[8] = {0};
    int32_t kept[8][16], kept_tok[8] = {0};
    uint32_t x = 5;
    int32_t n_granted = 0, n_refused = 0;

    (void)state;
    for (int32_t i = 0; i < 20000; i++) {
        int32_t s, tok, first, n;

        x = x * 1664525u + 1013904223u;
        s = (int32_t)(x >> 10) % 8;
        tok = 1 + (int32_t)((x >> 13) % (14 * DS4_BLOCK_TOK));
        if (lease[s] != NULL && lease[s]->state == DS4_LEASE_LIVE && x >> 30 != 0) {
            tok = tok < lease[s]->cap_tok ? tok : lease[s]->cap_tok;
            assert_int_equal(ds4_budget_fill(b, lease[s], tok, &first, &n, NULL), 0);
            if (x >> 31 == 0)
                ds4_budget_copied(b, lease[s]);
        } else if (lease[s] != NULL && lease[s]->state == DS4_LEASE_LIVE && kept_tok[s] == 0) {
            kept_tok[s] = lease[s]->n_block * DS4_BLOCK_TOK - (int32_t)(x >> 5) % 200;
            if (kept_tok[s] > lease[s]->cap_tok)
                kept_tok[s] = lease[s]->cap_tok;
            kept_tok[s] = lease[s]->n_block == 0 ? 0 : kept_tok[s];
            keep(b, lease[s], kept_tok[s], kept[s]);
        } else if (lease[s] != NULL) {
            ds4_budget_release(b, &lease[s]);
        } else {
            /* From what this or the next one has left behind. */
            int32_t of = (x >> 29) == 0 ? (s + 1) % 8 : s;
            int32_t start = kept_tok[of] > 0 ? (int32_t)(x >> 3) % kept_tok[of] : 0;
            struct ds4_kv_ask ask = {
                .cap_tok = start + tok, .start_tok = start, .shared = kept[of]};

            lease[s] = ds4_budget_reserve(b, &ask, NULL);
            n_granted += lease[s] != NULL;
            n_refused += lease[s] == NULL;
            if (lease[s] == NULL) {
                for (int32_t k = 0; k < ds4_budget_blocks(kept_tok[of]); k++)
                    ds4_budget_unshare(b, kept[of][k]);
                kept_tok[of] = 0;
            }
        }
        assert_int_equal(ds4_budget_check(b, NULL), 0);
    }
    assert_true(n_granted > 500 && n_refused > 500);
    for (int32_t s = 0; s < 8; s++)
        ds4_budget_release(b, &lease[s]);
    for (int32_t s = 0; s < 8; s++)
        for (int32_t k = 0; k < ds4_budget_blocks(kept_tok[s]); k++)
            ds4_budget_unshare(b, kept[s][k]);
    assert_sums(b, 40, 0, 0, 0);
    ds4_budget_free(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_promise_decays_as_blocks_are_filled),
        cmocka_unit_test(refused_reserve_leaves_no_lease_and_no_trace),
        cmocka_unit_test(what_can_never_fit_is_another_error_than_busy),
        cmocka_unit_test(a_thousand_refusals_leave_the_ledger_bit_identical),
        cmocka_unit_test(a_kept_prefix_is_resumed_under_a_new_epoch),
        cmocka_unit_test(a_refused_resume_leaves_the_slot_hot),
        cmocka_unit_test(two_sequences_share_the_blocks_of_a_prefix),
        cmocka_unit_test(who_starts_inside_a_block_takes_the_pen_or_a_copy),
        cmocka_unit_test(a_block_that_nobody_holds_cannot_be_shared),
        cmocka_unit_test(rows_outside_the_lease_may_not_be_written),
        cmocka_unit_test(a_transfer_keeps_a_block_alive),
        cmocka_unit_test(release_is_idempotent_and_epochs_never_repeat),
        cmocka_unit_test(random_transitions_keep_the_books),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

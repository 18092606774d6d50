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

static const struct ds4_kv_lease *reserve(struct ds4_budget *b, int32_t tok)
{
    const struct ds4_kv_lease *lease = ds4_budget_reserve(b, tok, NULL);

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
    assert_null(ds4_budget_reserve(b, 3 * DS4_BLOCK_TOK + 1, &err));
    assert_int_equal(err.code, DS4_E_BUSY);
    assert_non_null(strstr(err.msg, "need 4 cache blocks"));
    assert_non_null(strstr(err.msg, "3 blocks free, 7 promised"));
    assert_true(before == ds4_budget_digest(b));
    assert_non_null(ds4_budget_reserve(b, 3 * DS4_BLOCK_TOK, &err));
    before = ds4_budget_digest(b);
    assert_null(ds4_budget_reserve(b, 1, &err)); /* no slot either */
    assert_true(before == ds4_budget_digest(b));
    ds4_budget_release(b, &held);
    ds4_budget_free(b);
}

static void what_can_never_fit_is_another_error_than_busy(void **state)
{
    struct ds4_budget *b = fresh(10, 2);
    struct ds4_err err = {0};

    (void)state;
    assert_null(ds4_budget_reserve(b, 10 * DS4_BLOCK_TOK + 1, &err));
    assert_int_equal(err.code, DS4_E_INVALID);
    assert_non_null(strstr(err.msg, "needs 11 cache blocks"));
    assert_non_null(strstr(err.msg, "there are 10 in all"));
    assert_null(ds4_budget_reserve(b, 0, &err));
    assert_int_equal(err.code, DS4_E_INVALID);
    assert_null(ds4_budget_reserve(b, -5, &err));
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
        assert_null(ds4_budget_reserve(b, (9 + i % 30) * DS4_BLOCK_TOK, NULL));
    assert_true(before == ds4_budget_digest(b));
    ds4_budget_release(b, &a);
    ds4_budget_free(b);
}

static void a_kept_prefix_is_resumed_under_a_new_epoch(void **state)
{
    struct ds4_budget *b = fresh(10, 2);
    const struct ds4_kv_lease *lease = reserve(b, 6 * DS4_BLOCK_TOK);
    uint32_t epoch = lease->epoch;
    int32_t first, n, kept;

    (void)state;
    assert_int_equal(ds4_budget_fill(b, lease, 4 * DS4_BLOCK_TOK, &first, &n, NULL), 0);
    kept = lease->block[1];
    assert_int_equal(ds4_budget_retain(b, lease, 2 * DS4_BLOCK_TOK + 1, NULL), 0);
    assert_sums(b, 7, 0, 0, 3);
    assert_false(ds4_budget_holds(b, lease->slot, epoch));
    assert_int_equal(ds4_budget_fill(b, lease, 1, &first, &n, NULL), -1); /* not live */
    assert_int_equal(ds4_budget_resume(b, lease, 2 * DS4_BLOCK_TOK, 5 * DS4_BLOCK_TOK, NULL), 0);
    assert_sums(b, 5, 3, 2, 0);
    assert_int_not_equal(lease->epoch, epoch);
    assert_true(ds4_budget_holds(b, lease->slot, lease->epoch));
    assert_false(ds4_budget_holds(b, lease->slot, epoch));
    assert_int_equal(lease->block[1], kept);
    ds4_budget_release(b, &lease);
    assert_sums(b, 10, 0, 0, 0);
    ds4_budget_free(b);
}

static void a_refused_resume_leaves_the_prefix_cached(void **state)
{
    struct ds4_budget *b = fresh(10, 3);
    const struct ds4_kv_lease *lease = reserve(b, 3 * DS4_BLOCK_TOK), *other;
    struct ds4_err err = {0};
    int32_t first, n;
    uint64_t before;

    (void)state;
    assert_int_equal(ds4_budget_fill(b, lease, 3 * DS4_BLOCK_TOK, &first, &n, NULL), 0);
    assert_int_equal(ds4_budget_retain(b, lease, 3 * DS4_BLOCK_TOK, NULL), 0);
    other = reserve(b, 5 * DS4_BLOCK_TOK);
    before = ds4_budget_digest(b);
    assert_int_equal(ds4_budget_resume(b, lease, DS4_BLOCK_TOK, 7 * DS4_BLOCK_TOK, &err), -1);
    assert_int_equal(err.code, DS4_E_BUSY);
    assert_int_equal(ds4_budget_resume(b, lease, DS4_BLOCK_TOK, 11 * DS4_BLOCK_TOK, &err), -1);
    assert_int_equal(err.code, DS4_E_INVALID);
    assert_true(before == ds4_budget_digest(b));
    /* It counts its own dropped blocks: 2 free, 2 given up by the cut, 1 kept. */
    assert_int_equal(ds4_budget_resume(b, lease, DS4_BLOCK_TOK, 5 * DS4_BLOCK_TOK, &err), 0);
    assert_sums(b, 0, 9, 1, 0);
    ds4_budget_release(b, &lease);
    ds4_budget_release(b, &other);
    assert_sums(b, 10, 0, 0, 0);
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
    int32_t cached_tok[8] = {0};
    uint32_t x = 5;
    int32_t n_granted = 0, n_refused = 0;

    (void)state;
    for (int32_t i = 0; i < 20000; i++) {
        int32_t s, tok, first, n;

        x = x * 1664525u + 1013904223u;
        s = (int32_t)(x >> 10) % 8;
        tok = 1 + (int32_t)((x >> 13) % (14 * DS4_BLOCK_TOK));
        if (lease[s] == NULL) {
            lease[s] = ds4_budget_reserve(b, tok, NULL);
            n_granted += lease[s] != NULL;
            n_refused += lease[s] == NULL;
        } else if (lease[s]->state == DS4_LEASE_CACHED) {
            int32_t keep = cached_tok[s] / 2;

            if (x >> 30 == 0 || ds4_budget_resume(b, lease[s], keep, keep + tok, NULL) != 0)
                ds4_budget_release(b, &lease[s]);
        } else if (x >> 30 == 0) {
            cached_tok[s] = lease[s]->n_block * DS4_BLOCK_TOK;
            assert_int_equal(ds4_budget_retain(b, lease[s], cached_tok[s], NULL), 0);
        } else {
            tok = tok < lease[s]->cap_tok ? tok : lease[s]->cap_tok;
            assert_int_equal(ds4_budget_fill(b, lease[s], tok, &first, &n, NULL), 0);
        }
        assert_int_equal(ds4_budget_check(b, NULL), 0);
    }
    assert_true(n_granted > 500 && n_refused > 500);
    for (int32_t s = 0; s < 8; s++)
        ds4_budget_release(b, &lease[s]);
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
        cmocka_unit_test(a_refused_resume_leaves_the_prefix_cached),
        cmocka_unit_test(release_is_idempotent_and_epochs_never_repeat),
        cmocka_unit_test(random_transitions_keep_the_books),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

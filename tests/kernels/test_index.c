/* Selection and the lightning indexer. */
#include "kernels/cpu/cpu.h"
#include "tests/support/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define MAX_N   3000
#define D       64
#define N_HEAD  3
#define N_TOK   70
#define TOP_K   9
#define RATIO   4
#define POS     900 /* of the first query: 225 visible rows */
#define N_BLOCK 4

/* The k-th place by counting: i is chosen if fewer than k others go before it. */
static bool chosen(const float *score, int32_t n, int32_t k, int32_t i)
{
    int32_t before = 0;

    for (int32_t j = 0; j < n; j++) {
        bool nan_i = isnan(score[i]), nan_j = isnan(score[j]);
        bool greater = nan_i ? !nan_j : !nan_j && score[j] > score[i];
        bool equal = nan_i ? nan_j : score[j] == score[i];

        before += j != i && (greater || (equal && j < i));
    }
    return before < k;
}

static void top_k_is_exact_with_ties_to_the_lower_index(void **state)
{
    static float score[MAX_N];
    static int32_t sel[MAX_N];
    uint32_t seed = 3;

    (void)state;
    for (int round = 0; round < 200; round++) {
        int32_t n = (int32_t)(ds4_test_next(&seed) % 300) + 1;
        int32_t k = (int32_t)(ds4_test_next(&seed) % 40) + 1, n_sel, at = 0;

        ds4_test_fill(score, (size_t)n, (uint32_t)round, 2.0f);
        for (int32_t i = 0; i < n; i++) {
            if (round % 2 == 0)
                score[i] = rintf(score[i] * 2.0f); /* ties, and zeros of both signs */
            if (round % 5 == 0 && ds4_test_next(&seed) % 4 == 0)
                score[i] = ds4_test_next(&seed) % 2 == 0 ? NAN : -NAN;
            if (round % 7 == 0 && ds4_test_next(&seed) % 4 == 0)
                score[i] = ds4_test_next(&seed) % 2 == 0 ? INFINITY : -INFINITY;
        }
        n_sel = ds4_cpu_top_k(score, n, k, sel);
        assert_int_equal(n_sel, n < k ? n : k);
        for (int32_t i = 0; i < n; i++) {
            if (chosen(score, n, k, i))
                assert_int_equal(sel[at++], i); /* rising */
        }
        assert_int_equal(at, n_sel);
    }
}

static void all_nan_scores_still_give_valid_rows(void **state)
{
    float score[20];
    int32_t sel[20];

    (void)state;
    for (int i = 0; i < 20; i++)
        score[i] = NAN;
    assert_int_equal(ds4_cpu_top_k(score, 20, 5, sel), 5);
    for (int i = 0; i < 5; i++)
        assert_int_equal(sel[i], i);
}

struct world {
    float q[N_TOK * N_HEAD * D], w[N_TOK * N_HEAD], key[(POS + N_TOK) / RATIO * D];
    int32_t sel[N_TOK * TOP_K], n_sel[N_TOK];
    uint8_t pages[5 * DS4_BLOCK_TOK / RATIO * D * 4];
};
static const int32_t table[N_BLOCK] = {3, 0, 4, 1};

static void fill(struct world *w, enum ds4_row_format format)
{
    size_t row_bytes = ds4_row_bytes(format, D, 0);

    memset(w, 0, sizeof(*w));
    ds4_test_fill(w->q, N_TOK * N_HEAD * D, 1, 1.0f);
    ds4_test_fill(w->w, N_TOK * N_HEAD, 2, 1.0f); /* negative ones too */
    ds4_test_fill(w->key, (POS + N_TOK) / RATIO * D, 3, 1.0f);
    for (int32_t j = 0; j < (POS + N_TOK) / RATIO; j++) {
        int32_t per_block = DS4_BLOCK_TOK / RATIO;

        if (j % 7 == 3) /* exact ties */
            memcpy(w->key + j * D, w->key + (j - 1) * D, D * sizeof(float));
        else
            ds4_cpu_round_row(format, D, 0, w->key + j * D);
        ds4_cpu_pack_row(format, D, 0, w->key + j * D,
                         w->pages + (size_t)(table[j / per_block] * per_block + j % per_block) *
                                        row_bytes);
    }
}

static void run(struct ds4_device *dev, struct world *w, enum ds4_row_format format, int32_t from,
                int32_t to)
{
    int32_t n = to - from;
    struct ds4_test_batch b;
    struct ds4_index_args a = {
        .batch = &b.batch,
        .q = ds4_tensor_3d(w->q + from * N_HEAD * D, DS4_DTYPE_F32, n, N_HEAD, D),
        .w = ds4_tensor_2d(w->w + from * N_HEAD, DS4_DTYPE_F32, n, N_HEAD),
        .pages = {w->pages, 5, DS4_BLOCK_TOK / RATIO, D, 0, format, ds4_row_bytes(format, D, 0)},
        .ratio = RATIO,
        .top_k = TOP_K,
        .sel = w->sel + from * TOP_K,
        .n_sel = w->n_sel + from};

    ds4_test_batch_init(&b);
    ds4_test_batch_add(&b, 0, POS + from, n, table, N_BLOCK);
    ds4_test_cpu()->index(dev, &a);
}

/* Chosen rows must all score at least as high as the others, up to rounding; between exact ties the
 * lower row must have been taken. */
static void selection_follows_the_score_formula(void **state)
{
    static struct world w, first;
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    static const enum ds4_row_format formats[] = {DS4_ROW_F32, DS4_ROW_FP4, DS4_ROW_BF16};

    (void)state;
    for (size_t f = 0; f < 3; f++) {
        fill(&w, formats[f]);
        for (int v = 0; v < n_dev; v++) {
            run(devs[v].dev, &w, formats[f], 0, N_TOK);
            if (v == 0)
                first = w;
            assert_memory_equal(w.sel, first.sel, sizeof(w.sel));
        }
        for (int32_t t = 0; t < N_TOK; t++) { /* alone: rows are shared out over the threads */
            memset(w.sel + t * TOP_K, 0xff, TOP_K * sizeof(int32_t));
            run(devs[t % n_dev].dev, &w, formats[f], t, t + 1);
        }
        assert_memory_equal(w.sel, first.sel, sizeof(w.sel));
        for (int32_t t = 0; t < N_TOK; t++) {
            int32_t visible = (POS + t + 1) / RATIO;
            double score[(POS + N_TOK) / RATIO], least = INFINITY;
            bool in[(POS + N_TOK) / RATIO + 1] = {false};

            assert_int_equal(w.n_sel[t], TOP_K);
            for (int32_t j = 0; j < visible; j++) {
                score[j] = 0.0;
                for (int32_t h = 0; h < N_HEAD; h++) {
                    double p = 0.0;

                    for (int32_t i = 0; i < D; i++)
                        p += (double)w.q[(t * N_HEAD + h) * D + i] * w.key[j * D + i];
                    score[j] += w.w[t * N_HEAD + h] * fmax(p, 0.0);
                }
            }
            for (int i = 0; i < TOP_K; i++) {
                int32_t j = w.sel[t * TOP_K + i];

                assert_true(j >= 0 && j < visible && (i == 0 || j > w.sel[t * TOP_K + i - 1]));
                in[j] = true;
                least = fmin(least, score[j]);
            }
            for (int32_t j = 0; j < visible; j++) {
                if (!in[j] && score[j] > least + 1e-5)
                    fail_msg("query %d leaves out row %d", t, j);
                if (j % 7 == 3 && in[j]) /* a copy of the row before it */
                    assert_true(in[j - 1]);
            }
        }
    }
    ds4_test_close(devs, n_dev);
}

static void few_rows_are_all_selected_and_block_tables_bound_them(void **state)
{
    static struct world w;
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    struct ds4_test_batch b;
    struct ds4_index_args a = {
        .batch = &b.batch,
        .q = ds4_tensor_3d(w.q, DS4_DTYPE_F32, 40, N_HEAD, D),
        .w = ds4_tensor_2d(w.w, DS4_DTYPE_F32, 40, N_HEAD),
        .pages = {w.pages, 5, DS4_BLOCK_TOK / RATIO, D, 0, DS4_ROW_F32, D * 4},
        .ratio = RATIO,
        .top_k = TOP_K,
        .sel = w.sel,
        .n_sel = w.n_sel};

    (void)state;
    fill(&w, DS4_ROW_F32);
    ds4_test_batch_init(&b);
    ds4_test_batch_add(&b, 0, 0, 30, table, N_BLOCK);
    ds4_test_batch_add(&b, 1, 400, 5, table, 0); /* no blocks: nothing to see */
    ds4_test_batch_add(&b, 2, 400, 5, table, 1)->active = false;
    ds4_test_cpu()->index(devs[n_dev - 1].dev, &a);
    for (int32_t t = 0; t < 30; t++) {
        int32_t n = (t + 1) / RATIO;

        assert_int_equal(w.n_sel[t], n);
        for (int32_t i = 0; i < n; i++)
            assert_int_equal(w.sel[t * TOP_K + i], i);
    }
    for (int32_t t = 30; t < 40; t++)
        assert_int_equal(w.n_sel[t], 0);
    ds4_test_close(devs, n_dev);
}

static void nan_queries_select_rows_that_exist(void **state)
{
    static struct world w;
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);

    (void)state;
    fill(&w, DS4_ROW_F32);
    for (int i = 0; i < N_HEAD * D; i++)
        w.q[i] = NAN;
    run(devs[0].dev, &w, DS4_ROW_F32, 0, 1);
    assert_int_equal(w.n_sel[0], TOP_K);
    for (int i = 0; i < TOP_K; i++)
        assert_int_equal(w.sel[i], i);
    ds4_test_close(devs, n_dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(top_k_is_exact_with_ties_to_the_lower_index),
        cmocka_unit_test(all_nan_scores_still_give_valid_rows),
        cmocka_unit_test(selection_follows_the_score_formula),
        cmocka_unit_test(few_rows_are_all_selected_and_block_tables_bound_them),
        cmocka_unit_test(nan_queries_select_rows_that_exist),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

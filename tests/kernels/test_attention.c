/* Attention: against a double-precision softmax, equal bits for every cut into steps, and what a query
 * may see. */
#include "kernels/cpu/cpu.h"
#include "tests/support/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define N_TOK     200
#define MAX_HEAD  5
#define MAX_D     80
#define D_ROPE    16
#define CAP       64
#define N_BLOCK   1
#define TOP_K     7
#define TOLERANCE 3e-6 /* f32 products, exp and a weighted sum of values below 2 */

struct shape {
    int32_t n_head, d, window, ratio;
    bool selected;
    enum ds4_row_format format;
};

static const struct shape shapes[] = {
    {5, 80, 17, 0, false, DS4_ROW_F32}, {3, 64, 32, 4, false, DS4_ROW_F32},
    {2, 48, 1, 8, false, DS4_ROW_F32},  {5, 64, 16, 4, true, DS4_ROW_F32},
    {4, 80, 33, 4, true, DS4_ROW_FP8},  {1, 32, 20, 16, false, DS4_ROW_BF16},
};
#define N_SHAPES (sizeof(shapes) / sizeof(shapes[0]))

struct world {
    float q[N_TOK * MAX_HEAD * MAX_D], kv[N_TOK * MAX_D], rows[DS4_BLOCK_TOK * MAX_D];
    float sink[MAX_HEAD], o[N_TOK * MAX_HEAD * MAX_D];
    int32_t sel[N_TOK * TOP_K], n_sel[N_TOK];
    uint8_t pages[2 * DS4_BLOCK_TOK * MAX_D * 4], ring[2 * CAP * MAX_D * 4];
};

static const int32_t table[N_BLOCK] = {1};

static void fill(const struct shape *s, struct world *w)
{
    size_t row_bytes = ds4_row_bytes(s->format, s->d, D_ROPE);
    uint32_t seed = 77;

    memset(w, 0, sizeof(*w));
    memset(w->ring, 0xff,
           sizeof(w->ring)); /* NaN in every format but FP8's scales: 0xff is NaN too */
    ds4_test_fill(w->q, N_TOK * MAX_HEAD * MAX_D, 1, 2.0f);
    ds4_test_fill(w->kv, N_TOK * MAX_D, 2, 1.5f);
    ds4_test_fill(w->rows, DS4_BLOCK_TOK * MAX_D, 3, 1.5f);
    ds4_test_fill(w->sink, MAX_HEAD, 4, 3.0f);
    for (int32_t t = 0; t < N_TOK; t++)
        ds4_cpu_round_row(s->format, s->d, D_ROPE, w->kv + t * s->d);
    for (int32_t j = 0; s->ratio > 0 && j < DS4_BLOCK_TOK / s->ratio; j++) {
        ds4_cpu_round_row(s->format, s->d, D_ROPE, w->rows + j * s->d);
        ds4_cpu_pack_row(s->format, s->d, D_ROPE, w->rows + j * s->d,
                         w->pages + (size_t)(DS4_BLOCK_TOK / s->ratio + j) * row_bytes);
    }
    for (int32_t t = 0; s->ratio > 0 && t < N_TOK; t++) { /* rising, distinct, visible */
        for (int32_t j = 0; j < (t + 1) / s->ratio && w->n_sel[t] < TOP_K; j++) {
            if ((t + 1) / s->ratio <= TOP_K || ds4_test_next(&seed) % 3 == 0)
                w->sel[t * TOP_K + w->n_sel[t]++] = j;
        }
    }
}

static void step(struct ds4_device *dev, const struct shape *s, struct world *w, int32_t from,
                 int32_t to)
{
    int32_t n = to - from, width = s->n_head * s->d;
    size_t row_bytes = ds4_row_bytes(s->format, s->d, D_ROPE);
    struct ds4_test_batch b;
    struct ds4_attention_args a = {
        .batch = &b.batch,
        .q = ds4_tensor_3d(w->q + from * width, DS4_DTYPE_F32, n, s->n_head, s->d),
        .kv = ds4_tensor_2d(w->kv + from * s->d, DS4_DTYPE_F32, n, s->d),
        .ring = {w->ring, 2, CAP, s->d, D_ROPE, s->format, row_bytes},
        .pages = {s->ratio > 0 ? w->pages : NULL, 2, s->ratio > 0 ? DS4_BLOCK_TOK / s->ratio : 1,
                  s->d, D_ROPE, s->format, row_bytes},
        .ratio = s->ratio,
        .window_tok = s->window,
        .sel = s->selected ? w->sel + from * TOP_K : NULL,
        .n_sel = s->selected ? w->n_sel + from : NULL,
        .top_k = TOP_K,
        .sink = w->sink,
        .o = ds4_tensor_3d(w->o + from * width, DS4_DTYPE_F32, n, s->n_head, s->d)};
    struct ds4_ring_write_args keep;

    ds4_test_batch_init(&b);
    ds4_test_batch_add(&b, 1, from, n, table, N_BLOCK);
    ds4_test_cpu()->attention(dev, &a);
    keep = (struct ds4_ring_write_args){&b.batch, a.kv, a.ring};
    ds4_test_cpu()->ring_write(dev, &keep);
}

static void reference(const struct shape *s, const struct world *w, int32_t p, int32_t h, double *o)
{
    const float *list[N_TOK + DS4_BLOCK_TOK], *q = w->q + (p * s->n_head + h) * s->d;
    double z[N_TOK + DS4_BLOCK_TOK], top = w->sink[h], sum;
    int n = 0;

    for (int32_t i = p - s->window + 1; i <= p; i++) {
        if (i >= 0)
            list[n++] = w->kv + i * s->d;
    }
    if (s->selected) {
        for (int32_t i = 0; i < w->n_sel[p]; i++)
            list[n++] = w->rows + w->sel[p * TOP_K + i] * s->d;
    } else if (s->ratio > 0) {
        for (int32_t j = 0; j < (p + 1) / s->ratio; j++)
            list[n++] = w->rows + j * s->d;
    }
    for (int i = 0; i < n; i++) {
        z[i] = 0.0;
        for (int32_t c = 0; c < s->d; c++)
            z[i] += (double)q[c] * list[i][c];
        z[i] /= sqrt((double)s->d);
        top = fmax(top, z[i]);
    }
    sum = exp(w->sink[h] - top);
    memset(o, 0, (size_t)s->d * sizeof(*o));
    for (int i = 0; i < n; i++) {
        sum += exp(z[i] - top);
        for (int32_t c = 0; c < s->d; c++)
            o[c] += exp(z[i] - top) * list[i][c];
    }
    for (int32_t c = 0; c < s->d; c++)
        o[c] /= sum;
}

static void every_query_matches_one_softmax_over_window_and_rows(void **state)
{
    static struct world w;
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);

    (void)state;
    for (size_t i = 0; i < N_SHAPES; i++) {
        const struct shape *s = &shapes[i];

        fill(s, &w);
        step(devs[n_dev - 1].dev, s, &w, 0, N_TOK);
        for (int32_t p = 0; p < N_TOK; p++) {
            for (int32_t h = 0; h < s->n_head; h++) {
                double want[MAX_D];

                reference(s, &w, p, h, want);
                ds4_test_close_to(w.o + (p * s->n_head + h) * s->d, want, (size_t)s->d, TOLERANCE,
                                  1.0, "o");
            }
        }
    }
    ds4_test_close(devs, n_dev);
}

static void any_cut_into_steps_gives_the_same_bits(void **state)
{
    static struct world whole, cut;
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    uint32_t seed = 5;

    (void)state;
    for (size_t i = 0; i < N_SHAPES; i++) {
        fill(&shapes[i], &whole);
        step(devs[0].dev, &shapes[i], &whole, 0, N_TOK);
        for (int round = 0; round < 2 * n_dev; round++) {
            uint32_t longest = round < n_dev ? 1 : 70;

            fill(&shapes[i], &cut);
            for (int32_t at = 0, n; at < N_TOK; at += n) {
                n = (int32_t)(ds4_test_next(&seed) % longest) + 1;
                n = n < N_TOK - at ? n : N_TOK - at;
                step(devs[round % n_dev].dev, &shapes[i], &cut, at, at + n);
            }
            ds4_test_same_bits(cut.o, whole.o, sizeof(cut.o) / sizeof(float),
                               devs[round % n_dev].name);
        }
    }
    ds4_test_close(devs, n_dev);
}

static void a_huge_sink_leaves_nothing_and_overflows_nothing(void **state)
{
    static struct world w;
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);

    (void)state;
    fill(&shapes[1], &w);
    for (int h = 0; h < MAX_HEAD; h++)
        w.sink[h] = h % 2 == 0 ? 3e38f : -3e38f;
    step(devs[0].dev, &shapes[1], &w, 0, 40);
    for (int i = 0; i < 40 * 3 * 64; i++) {
        assert_true(isfinite(w.o[i]));
        if (i / 64 % 3 % 2 == 0)
            assert_true(w.o[i] == 0.0f);
    }
    ds4_test_close(devs, n_dev);
}

static void a_nan_row_shows_in_every_query_that_sees_it_and_no_other(void **state)
{
    static struct world w;
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    const struct shape *s = &shapes[0]; /* window 17, no compressed rows */

    (void)state;
    fill(s, &w);
    w.kv[50 * s->d] = NAN;
    step(devs[n_dev - 1].dev, s, &w, 0, N_TOK);
    for (int32_t p = 0; p < N_TOK; p++)
        assert_int_equal(isnan(w.o[p * s->n_head * s->d]) != 0, p >= 50 && p < 50 + s->window);
    ds4_test_close(devs, n_dev);
}

static void a_step_without_rows_is_fine(void **state)
{
    static struct world w;
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);

    (void)state;
    fill(&shapes[1], &w);
    for (int v = 0; v < n_dev; v++)
        step(devs[v].dev, &shapes[1], &w, 0, 0);
    assert_true(w.o[0] == 0.0f);
    ds4_test_close(devs, n_dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_query_matches_one_softmax_over_window_and_rows),
        cmocka_unit_test(any_cut_into_steps_gives_the_same_bits),
        cmocka_unit_test(a_huge_sink_leaves_nothing_and_overflows_nothing),
        cmocka_unit_test(a_step_without_rows_is_fine),
        cmocka_unit_test(a_nan_row_shows_in_every_query_that_sees_it_and_no_other),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

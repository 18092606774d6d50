/* Compressors: against a double-precision pooling, equal bits for every cut of the sequence into
 * steps, and nothing written outside the lease. */
#include "kernels/cpu/cpu.h"
#include "tests/support/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define N_TOK     300
#define MAX_D     64
#define MAX_RATIO 16
#define CAP       32 /* ring rows: at least two blocks */
#define D_ROPE    8
#define N_BLOCK   2
#define TOLERANCE 4e-6 /* exp, a norm and a rotation in f32 */

struct shape {
    int32_t d, ratio;
    bool overlap;
    enum ds4_row_format format;
};

static const struct shape shapes[] = {
    {64, 4, true, DS4_ROW_F32}, {32, 16, false, DS4_ROW_F32},  {64, 4, true, DS4_ROW_FP8},
    {64, 4, true, DS4_ROW_FP4}, {64, 16, false, DS4_ROW_BF16}, {16, 1, false, DS4_ROW_F32},
    {24, 2, true, DS4_ROW_F32},
};
#define N_SHAPES (sizeof(shapes) / sizeof(shapes[0]))

struct world {
    float k[N_TOK * 2 * MAX_D], g[N_TOK * 2 * MAX_D];
    float ape[MAX_RATIO * 2 * MAX_D], norm[MAX_D], freq[D_ROPE / 2];
    float ring_k[2 * CAP * 2 * MAX_D], ring_g[2 * CAP * 2 * MAX_D];
    uint8_t pages[3 * DS4_BLOCK_TOK * MAX_D * 4];
};

static const int32_t table[N_BLOCK] = {2, 0}; /* blocks of the sequence, not in order */

static void fill(struct world *w)
{
    memset(w, 0, sizeof(*w));
    ds4_test_fill(w->k, N_TOK * 2 * MAX_D, 1, 2.0f);
    ds4_test_fill(w->g, N_TOK * 2 * MAX_D, 2, 6.0f);
    ds4_test_fill(w->ape, MAX_RATIO * 2 * MAX_D, 3, 1.0f);
    ds4_test_fill(w->norm, MAX_D, 4, 1.5f);
    ds4_test_fill(w->freq, D_ROPE / 2, 5, 1.0f);
    memset(w->pages, 0xee, sizeof(w->pages));
    memset(w->ring_k, 0xff,
           sizeof(w->ring_k)); /* NaN: history that does not exist must not be read */
    memset(w->ring_g, 0xff, sizeof(w->ring_g));
}

static struct ds4_compress_args args_of(const struct shape *s, struct world *w,
                                        const struct ds4_test_batch *b, int32_t first, int32_t n)
{
    int32_t c = s->overlap ? 2 : 1, width = c * s->d;
    struct ds4_compress_args a = {
        .batch = &b->batch,
        .k = ds4_tensor_2d(w->k + first * width, DS4_DTYPE_F32, n, width),
        .g = ds4_tensor_2d(w->g + first * width, DS4_DTYPE_F32, n, width),
        .ape = {w->ape, DS4_DTYPE_F32, 1, s->ratio, width, (size_t)width * 4},
        .ratio = s->ratio,
        .overlap = s->overlap,
        .norm = w->norm,
        .eps = 1e-6f,
        .rope = {w->freq, D_ROPE},
        .ring_k = {w->ring_k, 2, CAP, width, 0, DS4_ROW_F32, (size_t)width * 4},
        .ring_g = {w->ring_g, 2, CAP, width, 0, DS4_ROW_F32, (size_t)width * 4},
        .pages = {w->pages, 3, DS4_BLOCK_TOK / s->ratio, s->d, D_ROPE, s->format,
                  ds4_row_bytes(s->format, s->d, D_ROPE)}};

    return a;
}

/* Feeds tokens [from, to) of slot 1 as one step. */
static void step(struct ds4_device *dev, const struct shape *s, struct world *w, int32_t from,
                 int32_t to)
{
    struct ds4_test_batch b;
    struct ds4_compress_args a;

    ds4_test_batch_init(&b);
    ds4_test_batch_add(&b, 1, from, to - from, table, N_BLOCK);
    a = args_of(s, w, &b, from, to - from);
    ds4_test_cpu()->compress(dev, &a);
}

static const uint8_t *page_row(const struct shape *s, const struct world *w, int32_t j)
{
    int32_t per_block = DS4_BLOCK_TOK / s->ratio;

    return w->pages + ((size_t)(table[j / per_block] * per_block + j % per_block)) *
                          ds4_row_bytes(s->format, s->d, D_ROPE);
}

/* The text's words in double precision; g must still be without the position table. */
static void reference(const struct shape *s, const struct world *w, int32_t j, double *row)
{
    int32_t d = s->d, r = s->ratio, width = (s->overlap ? 2 : 1) * d;
    double square = 0.0;

    for (int32_t i = 0; i < d; i++) {
        double sum = 0.0, acc = 0.0;

        for (int32_t p = (s->overlap && j > 0 ? j - 1 : j) * r; p < (j + 1) * r; p++) {
            int32_t column = s->overlap && p >= j * r ? d + i : i;
            double e = exp((double)w->g[p * width + column] + w->ape[p % r * width + column]);

            sum += e;
            acc += e * w->k[p * width + column];
        }
        row[i] = acc / sum;
        square += row[i] * row[i];
    }
    for (int32_t i = 0; i < d; i++)
        row[i] *= w->norm[i] / sqrt(square / d + 1e-6);
    for (int32_t i = 0; i < D_ROPE / 2; i++) {
        double angle = (double)((float)(j * r) * w->freq[i]);
        double *x = row + d - D_ROPE + 2 * i, x0 = x[0], x1 = x[1];

        x[0] = x0 * cos(angle) - x1 * sin(angle);
        x[1] = x0 * sin(angle) + x1 * cos(angle);
    }
}

static void rows_match_the_pooling_formula(void **state)
{
    static struct world w, original;
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);

    (void)state;
    for (size_t i = 0; i < N_SHAPES; i++) {
        const struct shape *s = &shapes[i];

        if (s->format != DS4_ROW_F32)
            continue;
        fill(&w);
        original = w;
        step(devs[0].dev, s, &w, 0, N_TOK);
        for (int32_t j = 0; j < N_TOK / s->ratio; j++) {
            double want[MAX_D];
            float got[MAX_D];

            ds4_cpu_unpack_row(s->format, s->d, D_ROPE, page_row(s, &w, j), got);
            reference(s, &original, j, want);
            ds4_test_close_to(got, want, (size_t)s->d, TOLERANCE, 2.0, "row");
        }
    }
    ds4_test_close(devs, n_dev);
}

static void any_cut_into_steps_gives_the_same_bits(void **state)
{
    static struct world whole, cut;
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    uint32_t seed = 11;

    (void)state;
    for (size_t i = 0; i < N_SHAPES; i++) {
        fill(&whole);
        step(devs[0].dev, &shapes[i], &whole, 0, N_TOK);
        for (int round = 0; round < 12; round++) {
            int32_t longest = round == 0 ? 1 : (int32_t)(ds4_test_next(&seed) % 90) + 1;

            fill(&cut);
            for (int32_t at = 0, n; at < N_TOK; at += n) {
                n = (int32_t)(ds4_test_next(&seed) % (uint32_t)longest) + 1;
                n = n < N_TOK - at ? n : N_TOK - at;
                step(devs[round % n_dev].dev, &shapes[i], &cut, at, at + n);
            }
            assert_memory_equal(cut.pages, whole.pages, sizeof(whole.pages));
            assert_memory_equal(cut.ring_k, whole.ring_k, sizeof(whole.ring_k));
            assert_memory_equal(cut.ring_g, whole.ring_g, sizeof(whole.ring_g));
        }
    }
    ds4_test_close(devs, n_dev);
}

static void overlap_of_block_zero_ignores_the_ring(void **state)
{
    static struct world w;
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    float row[MAX_D];

    (void)state;
    fill(&w); /* rings hold NaN */
    step(devs[0].dev, &shapes[0], &w, 0, 4);
    ds4_cpu_unpack_row(DS4_ROW_F32, shapes[0].d, D_ROPE, page_row(&shapes[0], &w, 0), row);
    for (int i = 0; i < shapes[0].d; i++)
        assert_true(isfinite(row[i]));
    ds4_test_close(devs, n_dev);
}

static void nothing_is_written_beyond_lease_or_block_table(void **state)
{
    static struct world w;
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    const struct shape *s = &shapes[0];

    (void)state;
    for (int mode = 0; mode < 3; mode++) {
        struct ds4_test_batch b;
        struct ds4_compress_args a;
        struct ds4_batch_entry *e;
        size_t row_bytes = ds4_row_bytes(s->format, s->d, D_ROPE);

        fill(&w);
        ds4_test_batch_init(&b);
        e = ds4_test_batch_add(&b, 1, 0, N_TOK, table, N_BLOCK);
        if (mode == 0)
            e->cap_tok = 10; /* two whole blocks of four */
        else if (mode == 1)
            e->n_block = 0;
        else
            e->active = false;
        a = args_of(s, &w, &b, 0, N_TOK);
        ds4_test_cpu()->compress(devs[n_dev - 1].dev, &a);
        for (int32_t j = 0; j < N_TOK / s->ratio; j++) {
            bool written = page_row(s, &w, j)[0] != 0xee || page_row(s, &w, j)[1] != 0xee;

            assert_int_equal(written, mode == 0 && j < 2);
        }
        for (size_t i = 0; i < sizeof(w.pages); i++) { /* block 1 belongs to somebody else */
            size_t row = i / row_bytes;

            if (row >= 64 && row < 128)
                assert_int_equal(w.pages[i], 0xee);
        }
        for (int32_t pos = 10; pos < CAP; pos++) {
            float cell = w.ring_k[(CAP + pos) * 2 * s->d];

            if (mode != 1)
                assert_true(isnan(cell));
        }
    }
    ds4_test_close(devs, n_dev);
}

static void entries_of_one_step_do_not_mix(void **state)
{
    static struct world one, two;
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    const struct shape *s = &shapes[0];
    static const int32_t other_table[1] = {1};
    struct ds4_test_batch b;
    struct ds4_compress_args a;

    (void)state;
    fill(&one);
    step(devs[0].dev, s, &one, 0, 100);
    fill(&two);
    ds4_test_batch_init(&b);
    ds4_test_batch_add(&b, 1, 0, 100, table, N_BLOCK);
    ds4_test_batch_add(&b, 0, 0, 101, other_table, 1);
    a = args_of(s, &two, &b, 0, 201);
    ds4_test_cpu()->compress(devs[n_dev - 1].dev, &a);
    for (int32_t j = 0; j < 25; j++)
        assert_memory_equal(page_row(s, &one, j), page_row(s, &two, j),
                            ds4_row_bytes(s->format, s->d, D_ROPE));
    ds4_test_close(devs, n_dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_match_the_pooling_formula),
        cmocka_unit_test(any_cut_into_steps_gives_the_same_bits),
        cmocka_unit_test(overlap_of_block_zero_ignores_the_ring),
        cmocka_unit_test(nothing_is_written_beyond_lease_or_block_table),
        cmocka_unit_test(entries_of_one_step_do_not_mix),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

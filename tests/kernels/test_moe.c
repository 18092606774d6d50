/* Expert choice and the experts. */
#include "kernels/cpu/cpu.h"
#include "tests/support/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define N_EXPERT  20
#define N_USED    6
#define MAX_TOK   21
#define SCALE     1.5f
#define VOCAB     64
#define TOLERANCE 4e-6 /* relative to the largest output: two products and silu in f32 */

static double strength(double logit)
{
    return sqrt(logit > 30.0 ? logit : log1p(exp(logit)));
}

struct routing {
    float logits[MAX_TOK * N_EXPERT], bias[N_EXPERT], weight[MAX_TOK * N_USED];
    int32_t id[MAX_TOK * N_USED], table[VOCAB * N_USED];
};

static void route(struct ds4_device *dev, struct routing *r, const struct ds4_test_batch *b,
                  bool hash, bool biased)
{
    const struct ds4_route_args a = {.batch = &b->batch,
                                     .logits =
                                         ds4_tensor_2d(r->logits, DS4_DTYPE_F32, MAX_TOK, N_EXPERT),
                                     .table = hash ? r->table : NULL,
                                     .bias = biased ? r->bias : NULL,
                                     .n_used = N_USED,
                                     .scale = SCALE,
                                     .id = r->id,
                                     .weight = r->weight};

    ds4_test_cpu()->route(dev, &a);
}

static void batch_of(struct ds4_test_batch *b, int32_t n)
{
    ds4_test_batch_init(b);
    ds4_test_batch_add(b, 0, 0, n, NULL, 0);
}

static void chosen_experts_are_the_strongest_and_weights_sum_to_the_scale(void **state)
{
    static struct routing r;
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    struct ds4_test_batch b;

    (void)state;
    batch_of(&b, MAX_TOK);
    for (int biased = 0; biased < 2; biased++) {
        ds4_test_fill(r.logits, MAX_TOK * N_EXPERT, 1, 5.0f);
        ds4_test_fill(r.bias, N_EXPERT, 2, 1.0f);
        for (int e = 0; e < N_EXPERT; e++)
            r.logits[e] = 0.25f; /* token 0: all equal, lower ids win */
        for (int v = 0; v < n_dev; v++)
            route(devs[v].dev, &r, &b, false, biased);
        for (int t = 0; t < MAX_TOK; t++) {
            const int32_t *id = r.id + t * N_USED;
            const float *l = r.logits + t * N_EXPERT;
            double sum = 0.0, least = INFINITY, want[N_USED];

            for (int i = 0; i < N_USED; i++) {
                assert_true(id[i] >= 0 && id[i] < N_EXPERT && (i == 0 || id[i] > id[i - 1]));
                sum += strength(l[id[i]]);
                least = fmin(least, strength(l[id[i]]) + (biased ? r.bias[id[i]] : 0.0f));
            }
            for (int e = 0; e < N_EXPERT; e++) {
                bool in = false;

                for (int i = 0; i < N_USED; i++)
                    in |= id[i] == e;
                if (!in)
                    assert_true(strength(l[e]) + (biased ? r.bias[e] : 0.0f) <= least + 1e-6);
            }
            for (int i = 0; i < N_USED; i++)
                want[i] = SCALE * strength(l[id[i]]) / sum; /* without the bias */
            ds4_test_close_to(r.weight + t * N_USED, want, N_USED, 1e-6, 0.1, "weight");
            if (t == 0 && !biased) {
                for (int i = 0; i < N_USED; i++)
                    assert_int_equal(id[i], i);
            }
        }
    }
    ds4_test_close(devs, n_dev);
}

static void hash_layers_take_ids_by_token_and_weights_from_the_gate(void **state)
{
    static struct routing r;
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    struct ds4_test_batch b;

    (void)state;
    batch_of(&b, MAX_TOK);
    ds4_test_fill(r.logits, MAX_TOK * N_EXPERT, 4, 3.0f);
    for (int i = 0; i < VOCAB; i++) {
        for (int k = 0; k < N_USED; k++)
            r.table[i * N_USED + k] = (i + 3 * (N_USED - k)) % N_EXPERT; /* unordered */
    }
    r.table[5 * N_USED] = 1000; /* a damaged table: weight 0, and no read outside */
    r.table[5 * N_USED + 1] = -7;
    for (int t = 0; t < MAX_TOK; t++)
        b.token[t] = (t * 5) % VOCAB;
    route(devs[0].dev, &r, &b, true, false);
    for (int t = 0; t < MAX_TOK; t++) {
        double sum = 0.0;
        bool seen[N_EXPERT] = {false};

        if (b.token[t] == 5) {
            assert_int_equal(r.id[t * N_USED], -7);
            assert_int_equal(r.id[t * N_USED + N_USED - 1], 1000);
            assert_true(r.weight[t * N_USED] == 0.0f && r.weight[t * N_USED + N_USED - 1] == 0.0f);
            continue;
        }
        for (int i = 0; i < N_USED; i++) {
            seen[r.id[t * N_USED + i]] = true;
            sum += strength(r.logits[t * N_EXPERT + r.id[t * N_USED + i]]);
        }
        for (int i = 0; i < N_USED; i++) {
            int32_t id = r.id[t * N_USED + i];
            double want = SCALE * strength(r.logits[t * N_EXPERT + id]) / sum;

            assert_true(seen[r.table[b.token[t] * N_USED + i]]);
            assert_true(i == 0 || id > r.id[t * N_USED + i - 1]);
            ds4_test_close_to(&r.weight[t * N_USED + i], &want, 1, 1e-6, 0.1, "weight");
        }
    }
    ds4_test_close(devs, n_dev);
}

static void non_finite_logits_choose_valid_ids(void **state)
{
    static struct routing r;
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    struct ds4_test_batch b;

    (void)state;
    batch_of(&b, MAX_TOK);
    for (int i = 0; i < MAX_TOK * N_EXPERT; i++)
        r.logits[i] = bad[(i / N_EXPERT + i % 2) % 3];
    route(devs[0].dev, &r, &b, false, false);
    for (int i = 0; i < MAX_TOK * N_USED; i++) {
        assert_true(r.id[i] >= 0 && r.id[i] < N_EXPERT);
        assert_true(i % N_USED == 0 || r.id[i] > r.id[i - 1]);
    }
    ds4_test_close(devs, n_dev);
}

/* ---- experts ------------------------------------------------------------------------------------ */

struct shape {
    int32_t d, d_expert, d_shared;
    enum ds4_dtype gate, up, down, shared;
};
static const struct shape shapes[] = {
    {64, 96, 32, DS4_DTYPE_F32, DS4_DTYPE_F32, DS4_DTYPE_F32, DS4_DTYPE_F32},
    {37, 41, 300, DS4_DTYPE_F32, DS4_DTYPE_F32, DS4_DTYPE_F32, DS4_DTYPE_F32},
    {256, 256, 256, DS4_DTYPE_IQ2_XXS, DS4_DTYPE_Q8_0, DS4_DTYPE_Q2_K, DS4_DTYPE_Q8_0},
    {64, 64, 64, DS4_DTYPE_MXFP4, DS4_DTYPE_MXFP4, DS4_DTYPE_MXFP4, DS4_DTYPE_F16},
};
#define N_SHAPES (sizeof(shapes) / sizeof(shapes[0]))

/* Quantised weights are random blocks with small scales; f32 ones are random. */
static struct ds4_weight make_weight(enum ds4_dtype dtype, int32_t n_stack, int32_t n_row,
                                     int32_t n_col, uint32_t seed)
{
    struct ds4_weight w = {.dtype = dtype, .n_stack = n_stack, .n_row = n_row, .n_col = n_col};
    const struct ds4_dtype_info *info = ds4_dtype_info(dtype);
    uint16_t d = ds4_f16_from_f32(dtype == DS4_DTYPE_Q8_0 ? 0.002f : 0.02f);
    size_t bytes;
    uint8_t *data;

    assert_int_equal(ds4_dtype_row_bytes(dtype, n_col, &w.row_bytes, NULL), 0);
    bytes = w.row_bytes * (size_t)n_row * (size_t)n_stack;
    data = malloc(bytes);
    w.data = data;
    if (dtype == DS4_DTYPE_F32) {
        ds4_test_fill((float *)(void *)data, bytes / 4, seed, 0.6f);
        return w;
    }
    for (size_t i = 0; i < bytes; i++)
        data[i] = (uint8_t)(ds4_test_next(&seed) >> 9);
    for (size_t b = 0; b < bytes; b += (size_t)info->block_bytes) {
        uint16_t half = ds4_f16_from_f32((float)data[b] / 256.0f - 0.5f);

        if (dtype == DS4_DTYPE_F16)
            memcpy(data + b, &half, 2);
        else if (dtype == DS4_DTYPE_MXFP4)
            data[b] = 125;
        else if (dtype == DS4_DTYPE_Q2_K)
            memcpy(data + b + 80, (uint16_t[2]){d, d}, 4);
        else
            memcpy(data + b, &d, 2);
    }
    return w;
}

struct world {
    struct shape s;
    struct ds4_weight w[6]; /* gate, up, down, shared gate, up, down */
    float x[MAX_TOK * 256], y[MAX_TOK * 256], weight[MAX_TOK * N_USED];
    int32_t id[MAX_TOK * N_USED];
};

static void make_world(struct world *w, const struct shape *s)
{
    uint32_t seed = 9;

    memset(w, 0, sizeof(*w));
    w->s = *s;
    w->w[0] = make_weight(s->gate, N_EXPERT, s->d_expert, s->d, 1);
    w->w[1] = make_weight(s->up, N_EXPERT, s->d_expert, s->d, 2);
    w->w[2] = make_weight(s->down, N_EXPERT, s->d, s->d_expert, 3);
    w->w[3] = make_weight(s->shared, 1, s->d_shared, s->d, 4);
    w->w[4] = make_weight(s->shared, 1, s->d_shared, s->d, 5);
    w->w[5] = make_weight(s->shared, 1, s->d, s->d_shared, 6);
    ds4_test_fill(w->x, MAX_TOK * 256, 7, 4.0f); /* reaches the clamp */
    ds4_test_fill(w->weight, MAX_TOK * N_USED, 8, 0.6f);
    for (int t = 0; t < MAX_TOK; t++) {
        int32_t id = (int32_t)(ds4_test_next(&seed) % 4);

        for (int i = 0; i < N_USED; i++) {
            w->id[t * N_USED + i] = id;
            id += 1 + (int32_t)(ds4_test_next(&seed) % 3);
        }
    }
}

static void free_world(struct world *w)
{
    for (int i = 0; i < 6; i++)
        free((void *)w->w[i].data);
}

static void run(struct ds4_device *dev, struct world *w, const struct ds4_test_batch *b,
                int32_t first)
{
    int32_t n = b->batch.n_tok;
    const struct ds4_moe_args a = {
        .batch = &b->batch,
        .x = ds4_tensor_2d(w->x + first * w->s.d, DS4_DTYPE_F32, n, w->s.d),
        .id = w->id + first * N_USED,
        .weight = w->weight + first * N_USED,
        .n_used = N_USED,
        .gate = w->w[0],
        .up = w->w[1],
        .down = w->w[2],
        .shared_gate = w->w[3],
        .shared_up = w->w[4],
        .shared_down = w->w[5],
        .clamp = 10.0f,
        .shared_clamp = 5.0f,
        .y = ds4_tensor_2d(w->y + first * w->s.d, DS4_DTYPE_F32, n, w->s.d)};

    ds4_test_cpu()->moe(dev, &a);
}

static void add_expert(const struct ds4_weight *w, int32_t e, const float *x, double weight,
                       double clamp, double *y)
{
    const struct ds4_simd *simd = ds4_simd_find(DS4_ISA_SCALAR);
    float row[512];
    double m[512];

    for (int32_t r = 0; r < w[0].n_row; r++) {
        double g = 0.0, u = 0.0;

        simd->dequant(w[0].dtype, ds4_weight_row(&w[0], e, r), w[0].n_col, row);
        for (int32_t i = 0; i < w[0].n_col; i++)
            g += (double)row[i] * x[i];
        simd->dequant(w[1].dtype, ds4_weight_row(&w[1], e, r), w[1].n_col, row);
        for (int32_t i = 0; i < w[1].n_col; i++)
            u += (double)row[i] * x[i];
        g = fmin(g, clamp);
        u = fmin(fmax(u, -clamp), clamp);
        m[r] = g / (1.0 + exp(-g)) * u * weight;
    }
    for (int32_t r = 0; r < w[2].n_row; r++) {
        simd->dequant(w[2].dtype, ds4_weight_row(&w[2], e, r), w[2].n_col, row);
        for (int32_t i = 0; i < w[2].n_col; i++)
            y[r] += (double)row[i] * m[i];
    }
}

static void check(const struct world *w, double tolerance)
{
    for (int32_t t = 0; t < MAX_TOK; t++) {
        double want[256] = {0}, most = 0.0;

        for (int i = 0; i < N_USED; i++)
            add_expert(w->w, w->id[t * N_USED + i], w->x + t * w->s.d,
                       (double)w->weight[t * N_USED + i], 10.0, want);
        add_expert(w->w + 3, 0, w->x + t * w->s.d, 1.0, 5.0, want);
        for (int32_t i = 0; i < w->s.d; i++)
            most = fmax(most, fabs(want[i]));
        assert_true(most > 0.1);
        for (int32_t i = 0; i < w->s.d; i++) {
            double error = fabs((double)w->y[t * w->s.d + i] - want[i]);

            if (!(error <= tolerance * most))
                fail_msg("token %d value %d: error %g of %g", t, i, error, most);
        }
    }
}

static void run_shapes(enum ds4_products products, double tolerance)
{
    static struct world w;
    static float first[MAX_TOK * 256];
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, products);
    struct ds4_test_batch b;

    for (size_t i = 0; i < N_SHAPES; i++) {
        size_t n = (size_t)(MAX_TOK * shapes[i].d);

        make_world(&w, &shapes[i]);
        for (int v = 0; v < n_dev; v++) {
            batch_of(&b, MAX_TOK);
            memset(w.y, 0xff, sizeof(w.y));
            run(devs[v].dev, &w, &b, 0);
            if (v == 0)
                memcpy(first, w.y, sizeof(first));
            ds4_test_same_bits(w.y, first, n, devs[v].name);
        }
        check(&w, tolerance);
        for (int32_t t = 0, len; t < MAX_TOK; t += len) { /* in other company */
            len = t % 3 + 1 < MAX_TOK - t ? t % 3 + 1 : MAX_TOK - t;
            batch_of(&b, len);
            run(devs[t % n_dev].dev, &w, &b, t);
        }
        ds4_test_same_bits(w.y, first, n, "small steps");
        free_world(&w);
    }
    ds4_test_close(devs, n_dev);
}

static void experts_match_the_formula_in_any_company(void **state)
{
    (void)state;
    run_shapes(DS4_PRODUCTS_EXACT, TOLERANCE);
}

/* Int8 blocks lose up to 1/254 of a block's largest value twice in a row. */
static void fast_experts_are_near_in_any_company(void **state)
{
    (void)state;
    run_shapes(DS4_PRODUCTS_FAST, 0.03);
}

static void inactive_rows_and_ids_out_of_range_are_skipped(void **state)
{
    static struct world w;
    static float first[MAX_TOK * 256];
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    struct ds4_test_batch b;

    (void)state;
    make_world(&w, &shapes[0]);
    batch_of(&b, MAX_TOK);
    run(devs[0].dev, &w, &b, 0);
    memcpy(first, w.y, sizeof(first));
    ds4_test_batch_init(&b);
    ds4_test_batch_add(&b, 0, 0, 5, NULL, 0);
    ds4_test_batch_add(&b, 1, 0, 6, NULL, 0)->active = false;
    ds4_test_batch_add(&b, 2, 0, MAX_TOK - 11, NULL, 0);
    for (int i = 5 * N_USED; i < 11 * N_USED; i++)
        w.id[i] = 1 << 30;
    memset(w.y, 0, sizeof(w.y));
    run(devs[n_dev - 1].dev, &w, &b, 0);
    for (int t = 0; t < MAX_TOK; t++) {
        for (int i = 0; i < shapes[0].d; i++) {
            float got = w.y[t * shapes[0].d + i];

            assert_true(got == (t >= 5 && t < 11 ? 0.0f : first[t * shapes[0].d + i]));
        }
    }
    free_world(&w);
    ds4_test_close(devs, n_dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chosen_experts_are_the_strongest_and_weights_sum_to_the_scale),
        cmocka_unit_test(hash_layers_take_ids_by_token_and_weights_from_the_gate),
        cmocka_unit_test(non_finite_logits_choose_valid_ids),
        cmocka_unit_test(experts_match_the_formula_in_any_company),
        cmocka_unit_test(fast_experts_are_near_in_any_company),
        cmocka_unit_test(inactive_rows_and_ids_out_of_range_are_skipped),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

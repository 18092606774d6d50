/* Hyper-connections: the published self-check, double-precision references, stream dtypes. */
#include "kernels/cpu/cpu.h"
#include "tests/support/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define N         4
#define N_MIX     (N * (N + 2))
#define MAX_D     300
#define MAX_TOK   5
#define ITERS     20
#define EPS       1e-6f
#define TOLERANCE 3e-6 /* f32 through a product, exp and 20 normalisations */

static double sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

/* From the published steps: softmax, eps, columns, then rows and columns 19 times. */
static void sinkhorn(double c[N][N])
{
    for (int it = 0; it < ITERS; it++) {
        for (int j = 0; j < N; j++) {
            double sum = 0.0;

            for (int k = 0; k < N; k++)
                sum += it == 0 ? exp(c[j][k]) : c[j][k];
            for (int k = 0; k < N; k++)
                c[j][k] = it == 0 ? exp(c[j][k]) / sum + 1e-6 : c[j][k] / (sum + 1e-6);
        }
        for (int k = 0; k < N; k++) {
            double sum = 0.0;

            for (int j = 0; j < N; j++)
                sum += c[j][k];
            for (int j = 0; j < N; j++)
                c[j][k] /= sum + 1e-6;
        }
    }
}

/* The mixes of the self-check come out of the operation if every stream holds ones: then the norm
 * factor is 1 / sqrt(1 + eps), and fn can carry mix / n_values in every column. */
static void published_self_check(void **state)
{
    enum { D = 1 };
    static const double mix[N_MIX] = {0.5,   -1,   0.25,  2,     0.1,  0.2,   -0.3, 0.4,
                                      -1.25, 0.5,  -0.5,  1.25,  0.25, -0.75, 1,    0,
                                      -1,    0.75, -0.25, -1.25, 0.5,  -0.5,  1.25, 0.25};
    static const double pre[N] = {0.5866186, 0.4013133, 0.5560149, 0.7502611};
    static const double post[N] = {0.9127226, 0.9251403, 0.8633600, 0.9500416};
    static const double comb[N * N] = {
        0.2717667, 0.2312079, 0.0296612, 0.4673632, 0.3619734, 0.2717672, 0.2919113, 0.0743471,
        0.0743484, 0.4673622, 0.4430175, 0.0152709, 0.2919105, 0.0296617, 0.2354090, 0.4430178};
    static const double written[N] = {11.5136270, 11.5468788, 11.5177726, 11.9343576};
    const float scale[3] = {0.5f, 0.25f, 1.5f};
    float base[N_MIX], fn[N_MIX * N], got_post[N], got_comb[N * N], u, o = 10.0f;
    float x[N] = {1.0f, 2.0f, 3.0f, 4.0f}; /* sum 10, mean square 7.5 */
    double want_u = 0.0;
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    struct ds4_hyper_read_args read = {
        .x = ds4_tensor_3d(x, DS4_DTYPE_F32, 1, N, D),
        .fn = {fn, DS4_DTYPE_F32, 1, N_MIX, N * D, N * D * sizeof(float)},
        .base = base,
        .scale = scale,
        .sinkhorn_iters = ITERS,
        .hyper_eps = EPS,
        .rms_eps = EPS,
        .u = ds4_tensor_2d(&u, DS4_DTYPE_F32, 1, D),
        .post = got_post,
        .comb = got_comb};
    struct ds4_hyper_write_args write = {.o = ds4_tensor_2d(&o, DS4_DTYPE_F32, 1, D),
                                         .post = got_post,
                                         .comb = got_comb,
                                         .x = read.x};

    (void)state;
    for (int i = 0; i < N_MIX; i++) {
        base[i] = i < 4 ? 0.1f : i < 8 ? -0.2f : (i - 8) % 5 == 0 ? 2.0f : 0.0f;
        for (int j = 0; j < N; j++) /* fn . x times the norm factor = mix */
            fn[i * N + j] = (float)(mix[i] * sqrt(7.5 + 1e-6) / 10.0);
    }
    ds4_test_cpu()->hyper_read(devs[0].dev, &read);
    for (int j = 0; j < N; j++)
        want_u += pre[j] * (j + 1);
    ds4_test_close_to(got_post, post, N, 1e-6, 0.1, "post");
    ds4_test_close_to(got_comb, comb, N * N, 1e-6, 0.1, "comb");
    ds4_test_close_to(&u, &want_u, 1, 1e-6, 0.1, "u");
    ds4_test_cpu()->hyper_write(devs[0].dev, &write);
    ds4_test_close_to(x, written, N, 1e-6, 0.1, "X'");
    ds4_test_close(devs, n_dev);
}

static float at(const struct ds4_tensor *t, int64_t i)
{
    return t->dtype == DS4_DTYPE_F32 ? ((const float *)t->data)[i]
                                     : ds4_f32_from_bf16(((const uint16_t *)t->data)[i]);
}

struct state {
    float fn[N_MIX * N * MAX_D], base[N_MIX], scale[3];
    float f32[MAX_TOK * N * MAX_D];
    uint16_t bf16[MAX_TOK * N * MAX_D];
    float u[MAX_TOK * MAX_D], post[MAX_TOK * N], comb[MAX_TOK * N * N];
};

static void fill(struct state *s)
{
    ds4_test_fill(s->fn, N_MIX * N * MAX_D, 1, 0.1f);
    ds4_test_fill(s->base, N_MIX, 2, 1.0f);
    ds4_test_fill(s->scale, 3, 3, 1.0f);
    ds4_test_fill(s->f32, MAX_TOK * N * MAX_D, 4, 2.0f);
    for (int i = 0; i < MAX_TOK * N * MAX_D; i++)
        s->bf16[i] = ds4_bf16_from_f32(s->f32[i]);
}

static void check_read(const struct ds4_hyper_read_args *a, int32_t d, int32_t n_tok,
                       const struct state *s)
{
    for (int32_t t = 0; t < n_tok; t++) {
        double square = 0.0, m[N_MIX] = {0}, c[N][N], post[N], r, u;

        for (int32_t i = 0; i < N * d; i++) {
            double x = at(&a->x, (int64_t)t * N * d + i);

            square += x * x;
            for (int k = 0; k < N_MIX; k++)
                m[k] += s->fn[k * N * d + i] * x;
        }
        r = 1.0 / sqrt(square / (N * d) + 1e-6);
        for (int j = 0; j < N; j++) {
            post[j] = 2.0 * sigmoid(m[N + j] * r * s->scale[1] + s->base[N + j]);
            for (int k = 0; k < N; k++)
                c[j][k] = m[2 * N + N * j + k] * r * s->scale[2] + s->base[2 * N + N * j + k];
        }
        sinkhorn(c);
        ds4_test_close_to(s->post + t * N, post, N, TOLERANCE, 1.0, "post");
        ds4_test_close_to(s->comb + t * N * N, &c[0][0], N * N, TOLERANCE, 1.0, "comb");
        for (int32_t i = 0; i < d; i++) {
            u = 0.0;
            for (int j = 0; j < N; j++)
                u += (sigmoid(m[j] * r * s->scale[0] + s->base[j]) + 1e-6) *
                     at(&a->x, ((int64_t)t * N + j) * d + i);
            ds4_test_close_to(s->u + t * d + i, &u, 1, TOLERANCE, 4.0, "u");
        }
    }
}

static void read_matches_the_formula_for_both_stream_types(void **state)
{
    static struct state s, first;
    static const int32_t widths[] = {1, 16, 37, 256, MAX_D};
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_FAST); /* mixes are exact whatever the mode */

    (void)state;
    for (size_t w = 0; w < sizeof(widths) / sizeof(widths[0]); w++) {
        for (int half = 0; half < 2; half++) {
            int32_t d = widths[w];
            struct ds4_hyper_read_args a = {
                .x = half ? ds4_tensor_3d(s.bf16, DS4_DTYPE_BF16, MAX_TOK, N, d)
                          : ds4_tensor_3d(s.f32, DS4_DTYPE_F32, MAX_TOK, N, d),
                .fn = {s.fn, DS4_DTYPE_F32, 1, N_MIX, N * d, (size_t)(N * d) * sizeof(float)},
                .base = s.base,
                .scale = s.scale,
                .sinkhorn_iters = ITERS,
                .hyper_eps = EPS,
                .rms_eps = EPS,
                .u = ds4_tensor_2d(s.u, DS4_DTYPE_F32, MAX_TOK, d),
                .post = s.post,
                .comb = s.comb};

            fill(&s);
            for (int v = 0; v < n_dev; v++) {
                ds4_test_cpu()->hyper_read(devs[v].dev, &a);
                if (v == 0)
                    first = s;
                ds4_test_same_bits(s.u, first.u, (size_t)(MAX_TOK * d), devs[v].name);
                ds4_test_same_bits(s.comb, first.comb, MAX_TOK * N * N, devs[v].name);
                ds4_test_same_bits(s.post, first.post, MAX_TOK * N, devs[v].name);
            }
            check_read(&a, d, MAX_TOK, &s);
        }
    }
    ds4_test_close(devs, n_dev);
}

static void write_mixes_sources_into_destinations(void **state)
{
    static struct state s, before;
    static float o[MAX_TOK * MAX_D];
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);

    (void)state;
    for (int half = 0; half < 2; half++) {
        int32_t d = MAX_D; /* more than one chunk */
        struct ds4_hyper_write_args a = {
            .o = ds4_tensor_2d(o, DS4_DTYPE_F32, MAX_TOK, d),
            .post = s.post,
            .comb = s.comb,
            .x = half ? ds4_tensor_3d(s.bf16, DS4_DTYPE_BF16, MAX_TOK, N, d)
                      : ds4_tensor_3d(s.f32, DS4_DTYPE_F32, MAX_TOK, N, d)};
        struct ds4_tensor old = a.x;

        for (int v = 0; v < n_dev; v++) {
            fill(&s);
            ds4_test_fill(s.post, MAX_TOK * N, 5, 1.0f);
            ds4_test_fill(s.comb, MAX_TOK * N * N, 6, 1.0f);
            ds4_test_fill(o, MAX_TOK * MAX_D, 7, 3.0f);
            before = s;
            ds4_test_cpu()->hyper_write(devs[v].dev, &a);
            old.data = half ? (void *)before.bf16 : (void *)before.f32;
            for (int64_t i = 0; i < (int64_t)MAX_TOK * N * d; i++) {
                int64_t t = i / (N * d), k = i / d % N, c = i % d;
                double want = (double)s.post[t * N + k] * o[t * d + c];
                float got = at(&a.x, i);

                for (int64_t j = 0; j < N; j++)
                    want += (double)s.comb[(t * N + j) * N + k] * at(&old, (t * N + j) * d + c);
                ds4_test_close_to(&got, &want, 1, half ? 0x1p-8 : 1e-6, half ? 1e-2 : 10.0, "X'");
            }
        }
    }
    ds4_test_close(devs, n_dev);
}

static void head_reads_the_chosen_rows(void **state)
{
    static struct state s;
    static const int32_t row[3] = {4, 0, 4};
    static float h[3 * MAX_D], first[3 * MAX_D];
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    struct ds4_hyper_head_args a = {
        .x = ds4_tensor_3d(s.f32, DS4_DTYPE_F32, MAX_TOK, N, MAX_D),
        .row = row,
        .n_row = 3,
        .fn = {s.fn, DS4_DTYPE_F32, 1, N, N * MAX_D, N * MAX_D * sizeof(float)},
        .base = s.base,
        .scale = s.scale,
        .hyper_eps = EPS,
        .rms_eps = EPS,
        .h = ds4_tensor_2d(h, DS4_DTYPE_F32, 3, MAX_D)};

    (void)state;
    fill(&s);
    for (int v = 0; v < n_dev; v++) {
        ds4_test_cpu()->hyper_head(devs[v].dev, &a);
        if (v == 0)
            memcpy(first, h, sizeof(h));
        ds4_test_same_bits(h, first, 3 * MAX_D, devs[v].name);
    }
    for (int i = 0; i < 3; i++) {
        const float *x = s.f32 + row[i] * N * MAX_D;
        double square = 0.0, m[N] = {0};

        for (int k = 0; k < N * MAX_D; k++) {
            square += (double)x[k] * x[k];
            for (int j = 0; j < N; j++)
                m[j] += (double)s.fn[j * N * MAX_D + k] * x[k];
        }
        for (int c = 0; c < MAX_D; c++) {
            double want = 0.0;

            for (int j = 0; j < N; j++)
                want +=
                    (sigmoid(m[j] / sqrt(square / (N * MAX_D) + 1e-6) * s.scale[0] + s.base[j]) +
                     1e-6) *
                    x[j * MAX_D + c];
            ds4_test_close_to(h + i * MAX_D + c, &want, 1, TOLERANCE, 4.0, "h");
        }
    }
    ds4_test_close(devs, n_dev);
}

static void non_finite_streams_do_not_hide(void **state)
{
    static struct state s;
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    struct ds4_hyper_read_args a = {.x = ds4_tensor_3d(s.f32, DS4_DTYPE_F32, 2, N, 16),
                                    .fn = {s.fn, DS4_DTYPE_F32, 1, N_MIX, N * 16, N * 16 * 4},
                                    .base = s.base,
                                    .scale = s.scale,
                                    .sinkhorn_iters = ITERS,
                                    .hyper_eps = EPS,
                                    .rms_eps = EPS,
                                    .u = ds4_tensor_2d(s.u, DS4_DTYPE_F32, 2, 16),
                                    .post = s.post,
                                    .comb = s.comb};

    (void)state;
    fill(&s);
    s.f32[5] = NAN;
    ds4_test_cpu()->hyper_read(devs[0].dev, &a);
    assert_true(isnan(s.u[0]));
    for (int i = 0; i < 16; i++)
        assert_true(isfinite(s.u[16 + i])); /* and do not spread to other rows */
    ds4_test_close(devs, n_dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_self_check),
        cmocka_unit_test(read_matches_the_formula_for_both_stream_types),
        cmocka_unit_test(write_mixes_sources_into_destinations),
        cmocka_unit_test(head_reads_the_chosen_rows),
        cmocka_unit_test(non_finite_streams_do_not_hide),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Products: against double precision, and the same bits for every batch, thread count, instruction
 * set and view. */
#include "kernels/cpu/cpu.h"
#include "tests/support/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* f32 sums of up to 8192 products in 16 lanes, relative to the sum of magnitudes. */
#define DS4_EXACT_TOLERANCE 2e-6

struct shape {
    enum ds4_dtype dtype;
    int32_t n_row, n_col, n_group, n_tok;
};

static const struct shape shapes[] = {
    {DS4_DTYPE_F32, 24, 4096, 1, 3},     {DS4_DTYPE_F32, 7, 33, 1, 5},
    {DS4_DTYPE_F32, 1, 1, 1, 1},         {DS4_DTYPE_F16, 64, 100, 2, 9},
    {DS4_DTYPE_BF16, 30, 257, 3, 4},     {DS4_DTYPE_Q8_0, 130, 512, 1, 17},
    {DS4_DTYPE_Q8_0, 64, 1024, 4, 2},    {DS4_DTYPE_Q4_0, 33, 96, 1, 8},
    {DS4_DTYPE_MXFP4, 48, 2048, 1, 1},   {DS4_DTYPE_Q2_K, 20, 512, 1, 3},
    {DS4_DTYPE_Q3_K, 20, 512, 2, 3},     {DS4_DTYPE_Q4_K, 19, 768, 1, 11},
    {DS4_DTYPE_Q5_K, 20, 256, 1, 3},     {DS4_DTYPE_Q6_K, 20, 512, 1, 3},
    {DS4_DTYPE_IQ2_XXS, 40, 4096, 1, 9}, {DS4_DTYPE_F32, 5, 8192, 1, 2},
};
#define DS4_N_SHAPES (sizeof(shapes) / sizeof(shapes[0]))

/* Random blocks whose f16 scales are moderate. */
static struct ds4_weight make_weight(const struct shape *s, uint32_t seed)
{
    static const int offsets[DS4_N_DTYPES][2] = {
        [DS4_DTYPE_Q8_0] = {0, -1},   [DS4_DTYPE_Q4_0] = {0, -1},   [DS4_DTYPE_Q2_K] = {80, 82},
        [DS4_DTYPE_Q3_K] = {108, -1}, [DS4_DTYPE_Q4_K] = {0, 2},    [DS4_DTYPE_Q5_K] = {0, 2},
        [DS4_DTYPE_Q6_K] = {208, -1}, [DS4_DTYPE_IQ2_XXS] = {0, -1}};
    const struct ds4_dtype_info *info = ds4_dtype_info(s->dtype);
    struct ds4_weight w = {.dtype = s->dtype, .n_stack = 1, .n_row = s->n_row, .n_col = s->n_col};
    uint32_t state = seed + 99;
    uint8_t *data;
    size_t bytes;

    assert_int_equal(ds4_dtype_row_bytes(s->dtype, s->n_col, &w.row_bytes, NULL), 0);
    bytes = w.row_bytes * (size_t)s->n_row;
    data = malloc(bytes);
    for (size_t i = 0; i < bytes; i++)
        data[i] = (uint8_t)(ds4_test_next(&state) >> 13);
    for (size_t b = 0; b < bytes; b += (size_t)info->block_bytes) {
        uint16_t d = ds4_f16_from_f32((float)(ds4_test_next(&state) % 1000 + 1) * 1e-4f);
        float value = (float)(ds4_test_next(&state) >> 8) * 0x1p-23f - 1.0f;
        uint16_t half =
            s->dtype == DS4_DTYPE_F16 ? ds4_f16_from_f32(value) : ds4_bf16_from_f32(value);

        if (s->dtype == DS4_DTYPE_F32)
            memcpy(data + b, &value, 4);
        else if (info->block_elems == 1)
            memcpy(data + b, &half, 2);
        else if (s->dtype == DS4_DTYPE_MXFP4)
            data[b] = (uint8_t)(120 + data[b] % 8);
        else
            for (int i = 0; i < 2; i++)
                if (offsets[s->dtype][i] >= 0)
                    memcpy(data + b + offsets[s->dtype][i], &d, 2);
    }
    w.data = data;
    return w;
}

/* Double-precision products and their sums of magnitudes; values from the tested decoder. */
static void reference(const struct shape *s, const struct ds4_weight *w, const float *x,
                      int64_t x_stride, double *y, double *magnitude)
{
    float *row = malloc((size_t)s->n_col * sizeof(*row));

    for (int32_t r = 0; r < s->n_row; r++) {
        int32_t group = r / (s->n_row / s->n_group);

        ds4_simd_find(DS4_ISA_SCALAR)->dequant(w->dtype, ds4_weight_row(w, 0, r), s->n_col, row);
        for (int32_t t = 0; t < s->n_tok; t++) {
            double sum = 0.0, abs_sum = 0.0;

            for (int32_t i = 0; i < s->n_col; i++) {
                double p = (double)row[i] * x[t * x_stride + group * s->n_col + i];

                sum += p;
                abs_sum += fabs(p);
            }
            y[t * s->n_row + r] = sum;
            magnitude[t * s->n_row + r] = abs_sum;
        }
    }
    free(row);
}

static struct ds4_gemm_args args_of(const struct shape *s, const struct ds4_weight *w, float *x,
                                    int64_t x_stride, float *y, int64_t y_stride)
{
    struct ds4_gemm_args a = {.w = *w,
                              .n_group = s->n_group,
                              .x = ds4_tensor_2d(x, DS4_DTYPE_F32, s->n_tok, s->n_group * s->n_col),
                              .y = ds4_tensor_2d(y, DS4_DTYPE_F32, s->n_tok, s->n_row)};

    a.x.stride[0] = x_stride;
    a.y.stride[0] = y_stride;
    return a;
}

/* Runs every shape on every device; the views are strided and off alignment. */
static void run_shapes(enum ds4_products products, double tolerance)
{
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, products);

    for (size_t i = 0; i < DS4_N_SHAPES; i++) {
        const struct shape *s = &shapes[i];
        struct ds4_weight w = make_weight(s, (uint32_t)i);
        int64_t xs = s->n_group * s->n_col + 3, ys = s->n_row + 5;
        size_t n_y = (size_t)(s->n_tok * ys) + 1, n = (size_t)(s->n_tok * s->n_row);
        float *x = malloc(((size_t)(s->n_tok * xs) + 1) * sizeof(float));
        float *y = calloc(n_y, sizeof(float)), *first = calloc(n_y, sizeof(float));
        double *want = malloc(n * sizeof(double)), *magnitude = malloc(n * sizeof(double));

        ds4_test_fill(x, (size_t)(s->n_tok * xs) + 1, (uint32_t)i, 3.0f);
        reference(s, &w, x + 1, xs, want, magnitude);
        for (int v = 0; v < n_dev; v++) {
            struct ds4_gemm_args a = args_of(s, &w, x + 1, xs, y + 1, ys);

            ds4_test_cpu()->gemm(devs[v].dev, &a);
            if (v == 0)
                memcpy(first, y, n_y * sizeof(float));
            ds4_test_same_bits(y, first, n_y, devs[v].name);
        }
        for (int32_t t = 0; t < s->n_tok; t++) {
            struct shape one = *s;
            struct ds4_gemm_args a;

            for (int32_t r = 0; r < s->n_row; r++) {
                double error = fabs((double)y[1 + t * ys + r] - want[t * s->n_row + r]);

                if (!(error <= tolerance * magnitude[t * s->n_row + r]))
                    fail_msg("%s [%d][%d]: error %g of %g", ds4_dtype_name(s->dtype), t, r, error,
                             magnitude[t * s->n_row + r]);
            }
            one.n_tok = 1; /* alone, a row gives what it gave in company */
            a = args_of(&one, &w, x + 1 + t * xs, xs, y + 1 + t * ys, ys);
            ds4_test_cpu()->gemm(devs[n_dev - 1].dev, &a);
        }
        ds4_test_same_bits(y, first, n_y, "one row at a time");
        free((void *)w.data);
        free(x);
        free(y);
        free(first);
        free(want);
        free(magnitude);
    }
    ds4_test_close(devs, n_dev);
}

static void exact_products_are_right_and_independent_of_company(void **state)
{
    (void)state;
    run_shapes(DS4_PRODUCTS_EXACT, DS4_EXACT_TOLERANCE);
}

/* An int8 block loses at most half a step of amax / 127 per value: 1/254 of amax; for values spread
 * evenly that is below 1/127 of the sum of magnitudes even if all errors pulled one way. */
static void fast_products_are_near_and_independent_of_company(void **state)
{
    (void)state;
    run_shapes(DS4_PRODUCTS_FAST, 1.0 / 127.0);
}

static void exact_flag_overrules_fast_products(void **state)
{
    const struct shape s = {DS4_DTYPE_Q8_0, 64, 256, 1, 3};
    struct ds4_test_dev exact[DS4_TEST_MAX_DEVS], fast[DS4_TEST_MAX_DEVS];
    int n = ds4_test_open(exact, DS4_PRODUCTS_EXACT), m = ds4_test_open(fast, DS4_PRODUCTS_FAST);
    struct ds4_weight w = make_weight(&s, 1);
    float x[3 * 256], y[3 * 64], z[3 * 64];
    struct ds4_gemm_args a = args_of(&s, &w, x, 256, y, 64);

    (void)state;
    ds4_test_fill(x, 3 * 256, 1, 1.0f);
    ds4_test_cpu()->gemm(exact[0].dev, &a);
    a.y.data = z;
    ds4_test_cpu()->gemm(fast[0].dev, &a);
    assert_memory_not_equal(y, z, sizeof(y));
    a.exact = true;
    ds4_test_cpu()->gemm(fast[0].dev, &a);
    ds4_test_same_bits(z, y, 3 * 64, "exact");
    free((void *)w.data);
    ds4_test_close(exact, n);
    ds4_test_close(fast, m);
}

/* The stated order, written as plainly as possible. */
static void sums_run_in_sixteen_lanes_and_a_fixed_tree(void **state)
{
    static const int32_t lengths[] = {1, 15, 16, 17, 100, 512, 4096};
    static float a[4096], x[4096];

    (void)state;
    ds4_test_fill(a, 4096, 1, 1.0f);
    ds4_test_fill(x, 4096, 2, 1.0f);
    for (size_t l = 0; l < sizeof(lengths) / sizeof(lengths[0]); l++) {
        volatile float lane[16] = {0}; /* volatile: no wider evaluation, no reordering */

        for (int32_t i = 0; i < lengths[l]; i++) {
            volatile float p = a[i] * x[i];

            lane[i % 16] = lane[i % 16] + p;
        }
        for (int half = 8; half > 0; half /= 2) {
            for (int i = 0; i < half; i++)
                lane[i] = lane[i] + lane[i + half];
        }
        for (int isa = DS4_ISA_SCALAR; isa <= DS4_ISA_AVX512; isa++) {
            const struct ds4_simd *simd = ds4_simd_find((enum ds4_isa)isa);
            float got, want = lane[0];

            if (simd == NULL)
                continue;
            simd->dot(a, lengths[l], x, 0, 1, &got);
            ds4_test_same_bits(&got, &want, 1, simd->name);
        }
    }
}

static void activations_become_the_expected_blocks(void **state)
{
    float x[256] = {0};
    struct ds4_act32 small;
    struct ds4_act256 super;

    (void)state;
    ds4_cpu_act_quantise(DS4_ACT_32, x, 32, &small);
    ds4_cpu_act_quantise(DS4_ACT_256, x, 256, &super);
    assert_true(small.d == 0.0f && super.d == 0.0f && small.q[0] == 0 && super.q[0] == 0);
    x[3] = -127.0f;
    x[4] = 2.5f; /* a tie: to the even neighbour */
    x[5] = 127.0f;
    ds4_cpu_act_quantise(DS4_ACT_32, x, 32, &small);
    assert_true(small.d == 1.0f && small.q[3] == -127 && small.q[4] == 2 && small.q[5] == 127);
    ds4_cpu_act_quantise(DS4_ACT_256, x, 256, &super); /* first extreme is -127: keeps its sign */
    assert_true(super.d == 1.0f && super.q[3] == -127 && super.q[4] == 2 && super.q[5] == 127);
    assert_int_equal(super.bsum[0], 2);
    x[3] = 127.0f;
    x[5] = 0.0f;
    ds4_cpu_act_quantise(DS4_ACT_256, x, 256, &super);
    assert_true(super.d == -1.0f && super.q[3] == -127);
    x[3] = NAN;
    ds4_cpu_act_quantise(DS4_ACT_32, x, 32, &small);
    ds4_cpu_act_quantise(DS4_ACT_256, x, 256, &super);
    assert_true(isnan(small.d) && isnan(super.d));
    x[3] = INFINITY;
    ds4_cpu_act_quantise(DS4_ACT_32, x, 32, &small);
    assert_true(isnan(small.d));
    x[3] = 0x1p-149f;
    x[4] = 0.0f;
    ds4_cpu_act_quantise(DS4_ACT_32, x, 32, &small);
    ds4_cpu_act_quantise(DS4_ACT_256, x, 256, &super);
    assert_true(small.d == 0.0f && super.d == 0.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exact_products_are_right_and_independent_of_company),
        cmocka_unit_test(fast_products_are_near_and_independent_of_company),
        cmocka_unit_test(exact_flag_overrules_fast_products),
        cmocka_unit_test(sums_run_in_sixteen_lanes_and_a_fixed_tree),
        cmocka_unit_test(activations_become_the_expected_blocks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

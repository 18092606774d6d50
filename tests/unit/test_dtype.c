/* Scalar conversions against a slow reference: the nearest value of the format, ties to even. */
#include "common/dtype.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* Deterministic bits: splitmix64. */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static void every_f16_survives_a_round_trip(void **state)
{
    (void)state;
    for (uint32_t x = 0; x <= 0xffff; x++) {
        float f = ds4_f32_from_f16((uint16_t)x);

        if (isnan(f)) {
            assert_true((x & 0x7c00) == 0x7c00 && (x & 0x3ff) != 0);
            assert_true(isnan(ds4_f32_from_f16(ds4_f16_from_f32(f))));
        } else {
            assert_int_equal(ds4_f16_from_f32(f), x);
        }
    }
    assert_true(ds4_f32_from_f16(0x3c00) == 1.0f);
    assert_true(ds4_f32_from_f16(0x0001) == 0x1p-24f);
    assert_true(ds4_f32_from_f16(0x7bff) == 65504.0f);
    assert_true(ds4_f32_from_f16(0xfc00) == -INFINITY);
}

/* Values between and on the middle of two neighbours go where round-to-nearest-even says. */
static void f16_rounds_to_nearest_even(void **state)
{
    (void)state;
    for (uint32_t x = 0; x < 0x7bff; x++) {
        float low = ds4_f32_from_f16((uint16_t)x);
        float high = ds4_f32_from_f16((uint16_t)(x + 1));
        float middle = (low + high) / 2; /* exact in f32 */

        assert_int_equal(ds4_f16_from_f32(middle), x % 2 == 0 ? x : x + 1);
        assert_int_equal(ds4_f16_from_f32(nextafterf(middle, low)), x);
        assert_int_equal(ds4_f16_from_f32(nextafterf(middle, high)), x + 1);
        assert_int_equal(ds4_f16_from_f32(-middle), 0x8000 | (x % 2 == 0 ? x : x + 1));
    }
    assert_int_equal(ds4_f16_from_f32(65519.996f), 0x7bff);
    assert_int_equal(ds4_f16_from_f32(65520.0f), 0x7c00);
    assert_int_equal(ds4_f16_from_f32(-1e30f), 0xfc00);
}

static void every_bf16_survives_and_rounds_to_even(void **state)
{
    (void)state;
    for (uint32_t x = 0; x <= 0xffff; x++) {
        float f = ds4_f32_from_bf16((uint16_t)x);

        if (isnan(f))
            assert_true(isnan(ds4_f32_from_bf16(ds4_bf16_from_f32(f))));
        else
            assert_int_equal(ds4_bf16_from_f32(f), x);
    }
    assert_int_equal(ds4_bf16_from_f32(ds4_f32_from_bits(0x3f808000)), 0x3f80);
    assert_int_equal(ds4_bf16_from_f32(ds4_f32_from_bits(0x3f818000)), 0x3f82);
    assert_int_equal(ds4_bf16_from_f32(ds4_f32_from_bits(0x3f808001)), 0x3f81);
    assert_int_equal(ds4_bf16_from_f32(ds4_f32_from_bits(0x7f7fffff)), 0x7f80);
}

static void a_nan_with_only_low_bits_stays_a_nan(void **state)
{
    float nan = ds4_f32_from_bits(0x7f800001);

    (void)state;
    assert_true(isnan(ds4_f32_from_bf16(ds4_bf16_from_f32(nan))));
    assert_true(isnan(ds4_f32_from_f16(ds4_f16_from_f32(nan))));
    assert_int_equal(ds4_e4m3_from_f32(nan), 0x7f);
    assert_int_equal(ds4_e8m0_from_f32(nan), 0xff);
}

/* The definition: exponent 0 is man * 2^-9, otherwise (1 + man/8) * 2^(exp - 7). */
static double e4m3_by_definition(int code)
{
    int exponent = code >> 3 & 15;
    int man = code & 7;
    double mag = exponent == 0 ? man * 0x1p-9 : (1 + man / 8.0) * ldexp(1, exponent - 7);

    return (code & 0x80) != 0 ? -mag : mag;
}

static void every_e4m3_decodes_as_defined(void **state)
{
    (void)state;
    for (int code = 0; code < 256; code++) {
        float f = ds4_f32_from_e4m3((uint8_t)code);

        if ((code & 0x7f) == 0x7f) {
            assert_true(isnan(f));
            continue;
        }
        assert_true((double)f == e4m3_by_definition(code));
        assert_int_equal(ds4_e4m3_from_f32(f), code);
    }
    assert_true(ds4_f32_from_e4m3(0x7e) == DS4_E4M3_MAX);
}

static void e4m3_rounds_to_nearest_even_and_saturates(void **state)
{
    (void)state;
    for (int code = 0; code < 0x7e; code++) {
        float low = ds4_f32_from_e4m3((uint8_t)code);
        float high = ds4_f32_from_e4m3((uint8_t)(code + 1));
        float middle = (low + high) / 2;

        assert_int_equal(ds4_e4m3_from_f32(middle), code % 2 == 0 ? code : code + 1);
        assert_int_equal(ds4_e4m3_from_f32(nextafterf(middle, low)), code);
        assert_int_equal(ds4_e4m3_from_f32(nextafterf(middle, high)), code + 1);
    }
    assert_int_equal(ds4_e4m3_from_f32(1e9f), 0x7e);
    assert_int_equal(ds4_e4m3_from_f32(-INFINITY), 0xfe);
}

static void e8m0_is_a_power_of_two_and_rounds_up(void **state)
{
    (void)state;
    for (int code = 0; code < 255; code++) {
        float f = ds4_f32_from_e8m0((uint8_t)code);

        assert_true((double)f == ldexp(1, code - 127));
        assert_int_equal(ds4_e8m0_from_f32(f), code);
        if (code < 254)
            assert_int_equal(ds4_e8m0_from_f32(nextafterf(f, INFINITY)), code + 1);
    }
    assert_true(isnan(ds4_f32_from_e8m0(255)));
    assert_int_equal(ds4_e8m0_from_f32(0), 0);
    assert_int_equal(ds4_e8m0_from_f32(-5), 0);
    assert_int_equal(ds4_e8m0_from_f32(INFINITY), 255);
    assert_int_equal(ds4_e8m0_from_f32(0x1.8p127f), 255);
}

static void e2m1_has_sixteen_values_and_rounds_to_even(void **state)
{
    static const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

    (void)state;
    for (int code = 0; code < 8; code++) {
        assert_true(ds4_f32_from_e2m1((uint8_t)code) == values[code]);
        assert_true(ds4_f32_from_e2m1((uint8_t)(code | 8)) == -values[code]);
        assert_int_equal(ds4_e2m1_from_f32(values[code]), code);
        assert_int_equal(ds4_e2m1_from_f32(-values[code]), code | 8);
    }
    for (int code = 0; code < 7; code++) {
        float middle = (values[code] + values[code + 1]) / 2;

        assert_int_equal(ds4_e2m1_from_f32(middle), code % 2 == 0 ? code : code + 1);
        assert_int_equal(ds4_e2m1_from_f32(nextafterf(middle, 0)), code);
        assert_int_equal(ds4_e2m1_from_f32(nextafterf(middle, 9)), code + 1);
    }
    assert_int_equal(ds4_e2m1_from_f32(100), 7);
    assert_int_equal(ds4_e2m1_from_f32(-INFINITY), 15);
}

/* Random f32 bits: the result is never farther away than any neighbour. */
static void no_neighbour_is_nearer(void **state)
{
    uint64_t seed = 1;

    (void)state;
    for (int i = 0; i < 200000; i++) {
        float x = ds4_f32_from_bits((uint32_t)next_random(&seed));
        uint16_t h;
        double d;

        if (!(fabsf(x) < 65504)) /* larger and NaN have their own tests */
            continue;
        h = ds4_f16_from_f32(x);
        d = fabs((double)ds4_f32_from_f16(h) - (double)x);
        assert_true(d <= fabs((double)ds4_f32_from_f16((uint16_t)(h + 1)) - (double)x));
        if ((h & 0x7fff) != 0)
            assert_true(d <= fabs((double)ds4_f32_from_f16((uint16_t)(h - 1)) - (double)x));
    }
}

static void rows_are_whole_blocks(void **state)
{
    struct ds4_err err = {0};
    size_t n = 0;

    (void)state;
    assert_int_equal(ds4_dtype_row_bytes(DS4_DTYPE_Q2_K, 4096, &n, &err), 0);
    assert_int_equal(n, 4096 / 256 * 84);
    assert_int_equal(ds4_dtype_row_bytes(DS4_DTYPE_MXFP4, 64, &n, &err), 0);
    assert_int_equal(n, 34);
    assert_int_equal(ds4_dtype_row_bytes(DS4_DTYPE_F32, 3, &n, &err), 0);
    assert_int_equal(n, 12);
    assert_int_equal(ds4_dtype_row_bytes(DS4_DTYPE_Q8_0, 33, &n, &err), -1);
    assert_int_equal(err.code, DS4_E_INVALID);
    assert_non_null(strstr(err.msg, "Q8_0"));
    assert_int_equal(ds4_dtype_row_bytes(DS4_DTYPE_F32, 0, &n, &err), -1);
    assert_int_equal(ds4_dtype_row_bytes(DS4_DTYPE_F32, -4, &n, &err), -1);
    assert_int_equal(ds4_dtype_row_bytes(DS4_DTYPE_F32, INT64_MAX, &n, &err), -1);
    assert_int_equal(n, 12); /* untouched by failures */
}

static void ids_of_files_map_both_ways(void **state)
{
    enum ds4_dtype dtype;

    (void)state;
    for (int i = 0; i < DS4_N_DTYPES; i++) {
        const struct ds4_dtype_info *info = ds4_dtype_info((enum ds4_dtype)i);

        assert_int_equal(ds4_dtype_from_gguf(info->gguf_type, &dtype), 0);
        assert_int_equal(dtype, i);
        assert_string_equal(ds4_dtype_name(dtype), info->name);
    }
    assert_int_equal(ds4_dtype_from_gguf(3, &dtype), -1);
    assert_int_equal(ds4_dtype_from_gguf(UINT32_MAX, &dtype), -1);
    assert_string_equal(ds4_dtype_name((enum ds4_dtype)DS4_N_DTYPES), "?");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_f16_survives_a_round_trip),
        cmocka_unit_test(f16_rounds_to_nearest_even),
        cmocka_unit_test(every_bf16_survives_and_rounds_to_even),
        cmocka_unit_test(a_nan_with_only_low_bits_stays_a_nan),
        cmocka_unit_test(every_e4m3_decodes_as_defined),
        cmocka_unit_test(e4m3_rounds_to_nearest_even_and_saturates),
        cmocka_unit_test(e8m0_is_a_power_of_two_and_rounds_up),
        cmocka_unit_test(e2m1_has_sixteen_values_and_rounds_to_even),
        cmocka_unit_test(no_neighbour_is_nearer),
        cmocka_unit_test(rows_are_whole_blocks),
        cmocka_unit_test(ids_of_files_map_both_ways),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

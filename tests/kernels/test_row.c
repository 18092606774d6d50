/* Cache rounding bit for bit, packing without loss, and the ring's write rule. */
#include "kernels/cpu/cpu.h"
#include "tests/support/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void fp8_example_of_the_checkpoint(void **state)
{
    float x[64] = {0.1f, -0.37f, 1.9f, -7.25f, 0.003f};
    const float want[64] = {0.1015625f, -0.375f, 1.875f, -7.0f, 0.0029296875f};

    (void)state;
    ds4_cpu_round_row(DS4_ROW_FP8, 64, 0, x);
    ds4_test_same_bits(x, want, 64, "fp8");
}

/* The example is about the rounding alone: transform the input first, so that the operation's own
 * Hadamard transform (its own inverse) gives the example's values back. */
static void fp4_example_of_the_checkpoint(void **state)
{
    static const double example[5] = {0.1, -0.37, 1.9, -7.25, 0.003};
    const float want[32] = {0.0f, 0.0f, 2.0f, -8.0f, 0.0f};
    float x[32];

    (void)state;
    for (unsigned int i = 0; i < 32; i++) {
        double sum = 0.0;

        for (unsigned int j = 0; j < 5; j++)
            sum += __builtin_parity(i & j) ? -example[j] : example[j];
        x[i] = (float)(sum / sqrt(32.0));
    }
    ds4_cpu_round_row(DS4_ROW_FP4, 32, 0, x);
    for (int i = 0; i < 32; i++)
        assert_true(x[i] == want[i]);
}

/* Nearest of a list, ties to the even place in it. */
static double nearest(double x, const double *grid, int n)
{
    int best = 0;

    for (int i = 1; i < n; i++) {
        double a = fabs(x - grid[i]), b = fabs(x - grid[best]);

        if (a < b || (a == b && i % 2 == 0))
            best = i;
    }
    return grid[best];
}

static double power_at_least(double x)
{
    int exponent;
    double fraction = frexp(x, &exponent);

    return ldexp(1.0, fraction == 0.5 ? exponent - 1 : exponent);
}

/* Straight from the text: amax with its clamp, a power of two, the nearest code. */
static void simulate(double *x, int n, double least, double limit, const double *grid, int n_grid)
{
    double most = least, s;

    for (int i = 0; i < n; i++)
        most = fmax(most, fabs(x[i]));
    s = power_at_least((double)((float)most / (float)limit));
    for (int i = 0; i < n; i++)
        x[i] = copysign(nearest(fabs(x[i]) / s, grid, n_grid), x[i]) * s;
}

static void e4m3_grid(double *grid) /* 0 .. 448 in order of code: 127 values */
{
    for (int code = 0; code < 127; code++)
        grid[code] = code < 8 ? code * 0x1p-9 : ldexp(1.0 + code % 8 / 8.0, code / 8 - 7);
}

static void fp8_rounding_is_the_nearest_code_everywhere(void **state)
{
    static const int32_t shapes[][2] = {{512, 64}, {128, 64}, {100, 10}, {65, 0}, {1, 0}};
    double grid[127];

    (void)state;
    e4m3_grid(grid);
    for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++) {
        int32_t d = shapes[s][0], d_rope = shapes[s][1], nope = d - d_rope;

        for (uint32_t seed = 0; seed < 40; seed++) {
            float x[512];
            double want[512];

            ds4_test_fill(x, (size_t)d, seed, ldexpf(1.0f, (int)seed - 25));
            if (seed % 3 == 0)
                x[0] *= 300.0f; /* most of the block becomes subnormal codes */
            for (int32_t i = 0; i < d; i++)
                want[i] = x[i];
            for (int32_t at = 0; at < nope; at += 64)
                simulate(want + at, nope - at < 64 ? nope - at : 64, 1e-4f, 448.0, grid, 127);
            for (int32_t i = nope; i < d; i++)
                want[i] = (double)ds4_f32_from_bf16(ds4_bf16_from_f32(x[i]));
            ds4_cpu_round_row(DS4_ROW_FP8, d, d_rope, x);
            for (int32_t i = 0; i < d; i++) {
                if ((double)x[i] != want[i])
                    fail_msg("d %d seed %u [%d]: %a, expected %a", d, seed, i, (double)x[i],
                             want[i]);
            }
        }
    }
}

static void fp4_rounding_is_hadamard_bf16_and_the_nearest_code(void **state)
{
    static const double grid[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};
    static const int32_t sizes[] = {128, 64, 32, 16};

    (void)state;
    for (size_t s = 0; s < 4; s++) {
        int32_t d = sizes[s];

        for (uint32_t seed = 0; seed < 30; seed++) {
            float x[128];
            double want[128];
            int off = 0;

            /* Small integers: the transform is exact in f32, so the reference has no rounding of its
             * own before the factor. */
            ds4_test_fill(x, (size_t)d, seed, 100.0f);
            for (int32_t i = 0; i < d; i++)
                x[i] = rintf(x[i]);
            for (int32_t i = 0; i < d; i++) {
                float sum = 0.0f;

                for (int32_t j = 0; j < d; j++)
                    sum += __builtin_parity((unsigned int)(i & j)) ? -x[j] : x[j];
                want[i] = (double)ds4_f32_from_bf16(
                    ds4_bf16_from_f32(sum * (float)(1.0 / sqrt((double)d))));
            }
            for (int32_t at = 0; at < d; at += 32)
                simulate(want + at, d - at < 32 ? d - at : 32, 6 * 0x1p-126, 6.0, grid, 8);
            ds4_cpu_round_row(DS4_ROW_FP4, d, 0, x);
            for (int32_t i = 0; i < d; i++)
                off += (double)x[i] != want[i];
            assert_int_equal(off, 0);
        }
    }
}

static void rounded_rows_survive_storage_bit_for_bit(void **state)
{
    static const struct {
        enum ds4_row_format format;
        int32_t d, d_rope;
        size_t bytes;
    } rows[] = {
        {DS4_ROW_F32, 512, 64, 2048}, {DS4_ROW_BF16, 512, 64, 1024}, {DS4_ROW_FP8, 512, 64, 584},
        {DS4_ROW_FP8, 128, 64, 194},  {DS4_ROW_FP8, 100, 10, 112},   {DS4_ROW_FP4, 128, 64, 68},
        {DS4_ROW_FP4, 64, 32, 34},    {DS4_ROW_FP4, 16, 8, 9},
    };

    (void)state;
    for (size_t r = 0; r < sizeof(rows) / sizeof(rows[0]); r++) {
        int32_t d = rows[r].d, d_rope = rows[r].d_rope;

        assert_int_equal(ds4_row_bytes(rows[r].format, d, d_rope), rows[r].bytes);
        for (uint32_t seed = 0; seed < 200; seed++) {
            float x[512], back[512];
            uint8_t packed[2048 + 1];

            ds4_test_fill(x, (size_t)d, seed,
                          ldexpf(1.0f + (float)seed / 200.0f, (int)seed / 4 - 25));
            if (seed == 0)
                memset(x, 0, sizeof(x));
            if (seed == 1)
                x[0] = 229.0f; /* just above 224 steps: packs with half the scale */
            ds4_cpu_round_row(rows[r].format, d, d_rope, x);
            packed[rows[r].bytes] = 0xa5;
            ds4_cpu_pack_row(rows[r].format, d, d_rope, x, packed);
            assert_int_equal(packed[rows[r].bytes], 0xa5);
            ds4_cpu_unpack_row(rows[r].format, d, d_rope, packed, back);
            ds4_test_same_bits(back, x, (size_t)d, "row");
        }
    }
}

/* All 256 codes under several scales, against the scalar conversions. */
static void every_code_decodes_like_the_scalar_conversion(void **state)
{
    static const uint8_t scales[] = {0, 1, 105, 127, 140, 254};

    (void)state;
    for (size_t s = 0; s < sizeof(scales); s++) {
        float factor = ds4_f32_from_e8m0(scales[s]);

        for (int first = 0; first < 256; first += 64) {
            uint8_t row[64 + 2], nibbles[32 + 2];
            float x[64], y[64];

            for (int i = 0; i < 64; i++)
                row[i] = (uint8_t)(first + i);
            row[64] = scales[s];
            for (int i = 0; i < 32; i++)
                nibbles[i] = (uint8_t)(first + i);
            nibbles[32] = nibbles[33] = scales[s];
            ds4_cpu_unpack_row(DS4_ROW_FP8, 64, 0, row, x);
            ds4_cpu_unpack_row(DS4_ROW_FP4, 64, 0, nibbles, y);
            for (int i = 0; i < 64; i++) {
                float want = ds4_f32_from_e4m3(row[i]) * factor;
                float pair = ds4_f32_from_e2m1(nibbles[i / 2] >> 4 * (i % 2) & 15) * factor;

                if (isnan(want))
                    assert_true(isnan(x[i]));
                else
                    ds4_test_same_bits(&x[i], &want, 1, "e4m3");
                ds4_test_same_bits(&y[i], &pair, 1, "e2m1");
            }
        }
    }
}

static void non_finite_values_become_nan_and_stay_so(void **state)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        for (int format = DS4_ROW_FP8; format <= DS4_ROW_FP4; format++) {
            float x[128], back[128];
            uint8_t packed[256];

            ds4_test_fill(x, 128, 5, 1.0f);
            x[7] = bad[i];
            ds4_cpu_round_row((enum ds4_row_format)format, 128, 0, x);
            assert_true(isnan(x[7]));
            ds4_cpu_pack_row((enum ds4_row_format)format, 128, 0, x, packed);
            ds4_cpu_unpack_row((enum ds4_row_format)format, 128, 0, packed, back);
            assert_true(isnan(back[7]));
        }
    }
}

/* Writes steps of every length at every start and checks each cell of the ring. */
static void ring_keeps_the_last_rows_below_the_lease(void **state)
{
    enum { CAP = 8, D = 4, MAX_ROWS = 20 };
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n = ds4_test_open(devs, DS4_PRODUCTS_EXACT);

    (void)state;
    for (int32_t n_row = 1; n_row <= MAX_ROWS; n_row++) {
        for (int32_t base = 0; base < 10; base += 3) {
            for (int32_t cut = 0; cut <= n_row; cut += 2) {
                struct ds4_test_batch b;
                float x[MAX_ROWS * D], cells[3 * CAP * D];
                struct ds4_ring_write_args args = {
                    &b.batch,
                    ds4_tensor_2d(x, DS4_DTYPE_F32, n_row, D),
                    {cells, 3, CAP, D, 0, DS4_ROW_F32, D * sizeof(float)}};

                ds4_test_batch_init(&b);
                ds4_test_batch_add(&b, 1, base, n_row, NULL, 0)->cap_tok = base + n_row - cut;
                ds4_test_fill(x, MAX_ROWS * D, 1, 1.0f);
                memset(cells, 0, sizeof(cells));
                ds4_test_cpu()->ring_write(devs[n - 1].dev, &args);
                for (int32_t i = 0; i < CAP; i++) {
                    int32_t newest = -1;

                    for (int32_t pos = base; pos < base + n_row - cut; pos++)
                        newest = pos % CAP == i ? pos : newest;
                    for (int32_t k = 0; k < D; k++) {
                        float want = newest < 0 ? 0.0f : x[(newest - base) * D + k];

                        assert_true(cells[(CAP + i) * D + k] == want);
                        assert_true(cells[i * D + k] == 0.0f);
                        assert_true(cells[(2 * CAP + i) * D + k] == 0.0f);
                    }
                }
            }
        }
    }
    ds4_test_close(devs, n);
}

static void inactive_entries_write_nothing(void **state)
{
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    struct ds4_test_batch b;
    float x[4] = {1, 2, 3, 4}, cells[16] = {0};
    struct ds4_ring_write_args args = {
        &b.batch, ds4_tensor_2d(x, DS4_DTYPE_F32, 1, 4), {cells, 1, 4, 4, 0, DS4_ROW_F32, 16}};

    (void)state;
    ds4_test_batch_init(&b);
    ds4_test_batch_add(&b, 0, 2, 1, NULL, 0)->active = false;
    ds4_test_cpu()->ring_write(devs[0].dev, &args);
    for (int i = 0; i < 16; i++)
        assert_true(cells[i] == 0.0f);
    ds4_test_close(devs, n);
}

/* What is kept beside a ring is what the ring would hold: same packing, gates with their part by position. */
static void kept_rows_are_those_of_a_ring(void **state)
{
    enum { D = 48, D_ROPE = 16, N = 5, RATIO = 4 };
    static const enum ds4_row_format format[] = {DS4_ROW_F32, DS4_ROW_BF16, DS4_ROW_FP8};
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    float x[N * D], ape[RATIO * D], sum[2 * (D / 2)];
    uint8_t kept[N * D * 4], want[D * 4];

    (void)state;
    ds4_test_fill(x, N * D, 1, 1.0f);
    ds4_test_fill(ape, RATIO * D, 2, 1.0f);
    for (size_t f = 0; f < sizeof(format) / sizeof(format[0]); f++) {
        size_t bytes = ds4_row_bytes(format[f], D, D_ROPE);
        struct ds4_keep_args a = {.x = ds4_tensor_2d(x, DS4_DTYPE_F32, N, D),
                                  .first_row = 1,
                                  .n_row = N - 2,
                                  .n_col = D,
                                  .format = format[f],
                                  .d_rope = D_ROPE,
                                  .dst = kept};

        memset(kept, 0xee, sizeof(kept));
        ds4_test_cpu()->keep(devs[n - 1].dev, &a);
        for (int32_t t = 0; t < N - 2; t++) {
            ds4_cpu_pack_row(format[f], D, D_ROPE, x + (1 + t) * D, want);
            assert_memory_equal(kept + (size_t)t * bytes, want, bytes);
        }
        assert_int_equal(kept[(N - 2) * bytes], 0xee);
    }
    {
        struct ds4_keep_args a = {.x = ds4_tensor_2d(x, DS4_DTYPE_F32, N, D),
                                  .first_row = 2,
                                  .n_row = 2,
                                  .n_col = D / 2,
                                  .pos = 7, /* 7 % 4 = 3, then 0 */
                                  .ape = {ape, DS4_DTYPE_F32, 1, RATIO, D, D * sizeof(float)},
                                  .ratio = RATIO,
                                  .format = DS4_ROW_F32,
                                  .dst = kept};

        ds4_test_cpu()->keep(devs[0].dev, &a);
        for (int32_t t = 0; t < 2; t++)
            for (int32_t i = 0; i < D / 2; i++)
                sum[t * (D / 2) + i] = x[(2 + t) * D + i] + ape[(t == 0 ? 3 : 0) * D + i];
        assert_memory_equal(kept, sum, sizeof(sum));
    }
    ds4_test_close(devs, n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp8_example_of_the_checkpoint),
        cmocka_unit_test(fp4_example_of_the_checkpoint),
        cmocka_unit_test(fp8_rounding_is_the_nearest_code_everywhere),
        cmocka_unit_test(fp4_rounding_is_hadamard_bf16_and_the_nearest_code),
        cmocka_unit_test(rounded_rows_survive_storage_bit_for_bit),
        cmocka_unit_test(every_code_decodes_like_the_scalar_conversion),
        cmocka_unit_test(non_finite_values_become_nan_and_stay_so),
        cmocka_unit_test(ring_keeps_the_last_rows_below_the_lease),
        cmocka_unit_test(inactive_entries_write_nothing),
        cmocka_unit_test(kept_rows_are_those_of_a_ring),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

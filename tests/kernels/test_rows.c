/* The operations on single rows: embedding, RMS norm, rotary positions; and the device itself. */
#include "kernels/cpu/cpu.h"
#include "tests/support/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define MAX_ROWS 9
#define MAX_D    600

static void embedding_copies_the_row_to_every_stream(void **state)
{
    enum { VOCAB = 10, D = 64, N_HYPER = 4, N = 6 };
    static uint8_t table[VOCAB * 68];
    static float x[N * N_HYPER * D];
    static uint16_t half[N * N_HYPER * D];
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    struct ds4_test_batch b;
    struct ds4_embed_args a = {.batch = &b.batch,
                               .w = {table, DS4_DTYPE_Q8_0, 1, VOCAB, D, 68},
                               .x = ds4_tensor_3d(x, DS4_DTYPE_F32, N, N_HYPER, D)};
    struct ds4_embed_args a_half = a;

    (void)state;
    for (size_t i = 0; i < sizeof(table); i++)
        table[i] = (uint8_t)(i % 34 == 1 ? 0x3c : i % 34 == 0 ? 0 : i * 7); /* scale 1.0 */
    a_half.x = ds4_tensor_3d(half, DS4_DTYPE_BF16, N, N_HYPER, D);
    ds4_test_batch_init(&b);
    ds4_test_batch_add(&b, 0, 0, 4, NULL, 0);
    ds4_test_batch_add(&b, 1, 0, 2, NULL, 0)->active = false;
    for (int t = 0; t < 4; t++)
        b.token[t] = (t * 3) % VOCAB;
    b.token[4] = -1; /* inactive rows may hold anything */
    b.token[5] = 1 << 30;
    for (int v = 0; v < n_dev; v++) {
        memset(x, 0, sizeof(x));
        ds4_test_cpu()->embed(devs[v].dev, &a);
        ds4_test_cpu()->embed(devs[v].dev, &a_half);
        for (int i = 0; i < N * N_HYPER * D; i++) {
            int t = i / (N_HYPER * D), c = i % D;
            float want =
                t < 4 ? (float)(int8_t)table[b.token[t] * 68 + c / 32 * 34 + 2 + c % 32] : 0.0f;

            assert_true(x[i] == want);
            assert_true(ds4_f32_from_bf16(half[i]) == want); /* int8 values fit bf16 */
        }
    }
    ds4_test_close(devs, n_dev);
}

static void rms_norm_matches_its_formula_for_every_view(void **state)
{
    static const int32_t widths[] = {1, 3, 16, 31, 128, 577, MAX_D};
    static float x[MAX_ROWS * (MAX_D + 7) + 1], y[MAX_ROWS * (MAX_D + 7) + 1], w[MAX_D];
    static float first[MAX_ROWS * (MAX_D + 7) + 1];
    static uint16_t half[MAX_ROWS * MAX_D];
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);

    (void)state;
    ds4_test_fill(w, MAX_D, 2, 2.0f);
    for (size_t i = 0; i < sizeof(widths) / sizeof(widths[0]); i++) {
        for (int mode = 0; mode < 4; mode++) { /* weights or ones; f32 or bf16 out */
            int32_t d = widths[i];
            struct ds4_rmsnorm_args a = {
                .x = ds4_tensor_2d(x + 1, DS4_DTYPE_F32, MAX_ROWS, d),
                .w = mode % 2 == 0 ? w : NULL,
                .eps = 1e-6f,
                .y = mode < 2 ? ds4_tensor_2d(y + 1, DS4_DTYPE_F32, MAX_ROWS, d)
                              : ds4_tensor_2d(half, DS4_DTYPE_BF16, MAX_ROWS, d)};

            a.x.stride[0] = d + 7;
            if (mode < 2)
                a.y.stride[0] = d + 5;
            ds4_test_fill(x, sizeof(x) / sizeof(float), (uint32_t)i, 3.0f);
            for (int v = 0; v < n_dev; v++) {
                ds4_test_cpu()->rmsnorm(devs[v].dev, &a);
                if (v == 0)
                    memcpy(first, y, sizeof(y));
                ds4_test_same_bits(y, first, sizeof(y) / sizeof(float), devs[v].name);
            }
            for (int32_t t = 0; t < MAX_ROWS; t++) {
                const float *row = x + 1 + t * (d + 7);
                double square = 0.0;

                for (int32_t c = 0; c < d; c++)
                    square += (double)row[c] * row[c];
                for (int32_t c = 0; c < d; c++) {
                    double want =
                        (mode % 2 == 0 ? (double)w[c] : 1.0) * row[c] / sqrt(square / d + 1e-6);
                    float got =
                        mode < 2 ? y[1 + t * (d + 5) + c] : ds4_f32_from_bf16(half[t * d + c]);

                    ds4_test_close_to(&got, &want, 1, mode < 2 ? 1e-6 : 0x1p-8, 1e-6, "y");
                }
            }
        }
    }
    ds4_test_close(devs, n_dev);
}

static void rms_norm_works_in_place(void **state)
{
    float x[3 * 50], y[3 * 50];
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    struct ds4_rmsnorm_args a = {.x = ds4_tensor_2d(x, DS4_DTYPE_F32, 3, 50),
                                 .eps = 1e-6f,
                                 .y = ds4_tensor_2d(y, DS4_DTYPE_F32, 3, 50)};

    (void)state;
    for (int v = 0; v < n_dev; v++) {
        ds4_test_fill(x, 150, 1, 1.0f);
        a.y.data = y;
        ds4_test_cpu()->rmsnorm(devs[v].dev, &a);
        a.y.data = x;
        ds4_test_cpu()->rmsnorm(devs[v].dev, &a);
        ds4_test_same_bits(x, y, 150, devs[v].name);
    }
    ds4_test_close(devs, n_dev);
}

/* Frequencies of a ratio-0 layer and the largest positions; every head, both directions. */
static void rotation_is_exact_at_any_position_and_undoes_itself(void **state)
{
    enum { N = 5, HEADS = 3, D = 80, D_ROPE = 64 };
    static const int32_t positions[N] = {0, 1, 127, 65535, 1048575};
    static float x[N * HEADS * D], original[N * HEADS * D], freq[D_ROPE / 2];
    struct ds4_test_dev devs[DS4_TEST_MAX_DEVS];
    int n_dev = ds4_test_open(devs, DS4_PRODUCTS_EXACT);
    struct ds4_test_batch b;

    (void)state;
    for (int i = 0; i < D_ROPE / 2; i++)
        freq[i] = (float)pow(10000.0, -2.0 * i / D_ROPE);
    for (int unit = 0; unit < 2; unit++) {
        struct ds4_rope_args a = {.batch = &b.batch,
                                  .x = ds4_tensor_3d(x, DS4_DTYPE_F32, N, HEADS, D),
                                  .rope = {freq, D_ROPE},
                                  .unit_rms = unit,
                                  .eps = 1e-6f};

        ds4_test_batch_init(&b);
        ds4_test_batch_add(&b, 0, 0, N, NULL, 0);
        memcpy(b.pos, positions, sizeof(positions));
        for (int v = 0; v < n_dev; v++) {
            ds4_test_fill(x, N * HEADS * D, 4, 2.0f);
            memcpy(original, x, sizeof(x));
            ds4_test_cpu()->rope(devs[v].dev, &a);
            for (int r = 0; r < N * HEADS; r++) {
                const float *in = original + r * D;
                double square = 0.0, want[D], factor;

                for (int i = 0; i < D; i++)
                    square += (double)in[i] * in[i];
                factor = unit ? 1.0 / sqrt(square / D + 1e-6) : 1.0;
                for (int i = 0; i < D; i++)
                    want[i] = in[i] * factor;
                for (int i = 0; i < D_ROPE / 2; i++) {
                    double angle = (double)((float)positions[r / HEADS] * freq[i]);
                    double *p = want + D - D_ROPE + 2 * i, x0 = p[0], x1 = p[1];

                    p[0] = x0 * cos(angle) - x1 * sin(angle);
                    p[1] = x0 * sin(angle) + x1 * cos(angle);
                }
                ds4_test_close_to(x + r * D, want, D, 1e-6, 1.0, "rotated");
            }
            if (unit)
                continue;
            a.inverse = true;
            ds4_test_cpu()->rope(devs[v].dev, &a);
            a.inverse = false;
            for (int i = 0; i < N * HEADS * D; i++)
                assert_true(fabsf(x[i] - original[i]) < 1e-6f);
        }
    }
    ds4_test_close(devs, n_dev);
}

static void count(void *ctx, int32_t item, int32_t thread)
{
    ((int32_t *)ctx)[item] += 1 + 0 * thread;
}

static void every_item_of_a_pool_runs_once(void **state)
{
    static int32_t done[5000];

    (void)state;
    for (int32_t n_thread = 1; n_thread <= 5; n_thread++) {
        struct ds4_pool *pool = ds4_pool_new(n_thread, NULL);

        assert_non_null(pool);
        assert_int_equal(ds4_pool_threads(pool), n_thread);
        for (int round = 0; round < 300; round++) {
            int32_t n = round % 10 == 0 ? 5000 : round % 7;

            memset(done, 0, sizeof(done));
            ds4_pool_run(pool, n, count, done);
            for (int32_t i = 0; i < 5000; i++)
                assert_int_equal(done[i], i < n);
        }
        ds4_pool_free(pool);
    }
    ds4_pool_free(NULL);
}

static void device_refuses_what_the_machine_lacks(void **state)
{
    const struct ds4_backend *cpu = ds4_test_cpu();
    struct ds4_device_config config = {.n_thread = -1};
    struct ds4_err err = {0};
    struct ds4_device *dev;
    size_t free_bytes, total_bytes;
    uint8_t *memory;

    (void)state;
    assert_null(cpu->open(&config, &err));
    assert_int_equal(err.code, DS4_E_INVALID);
    config.n_thread = 2;
    config.isa = (enum ds4_isa)99;
    assert_null(cpu->open(&config, &err));
    assert_int_equal(err.code, DS4_E_INVALID);
    config.isa = DS4_ISA_AUTO;
    dev = cpu->open(&config, &err);
    assert_non_null(dev);
    assert_non_null(strstr(cpu->describe(dev), "2 threads"));
    cpu->memory(dev, &free_bytes, &total_bytes);
    assert_true(free_bytes > 0 && free_bytes <= total_bytes);
    assert_null(cpu->alloc(dev, SIZE_MAX / 2, "the impossible", &err));
    assert_int_equal(err.code, DS4_E_NOMEM);
    assert_non_null(strstr(err.msg, "the impossible"));
    memory = cpu->alloc(dev, 1000, "a little", &err);
    assert_non_null(memory);
    assert_int_equal((uintptr_t)memory % 256, 0);
    for (int i = 0; i < 1000; i++)
        assert_int_equal(memory[i], 0);
    cpu->close(dev);
    assert_null(ds4_backend_find("tpu"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(embedding_copies_the_row_to_every_stream),
        cmocka_unit_test(rms_norm_matches_its_formula_for_every_view),
        cmocka_unit_test(rms_norm_works_in_place),
        cmocka_unit_test(rotation_is_exact_at_any_position_and_undoes_itself),
        cmocka_unit_test(every_item_of_a_pool_runs_once),
        cmocka_unit_test(device_refuses_what_the_machine_lacks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

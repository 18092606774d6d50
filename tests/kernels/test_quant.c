/* Weight blocks against vectors made with ggml and a second implementation: values bit for bit, exact
 * and int8 products within 2e-6 of the sum of magnitudes, the same bits on every instruction set. */
#include "common/json.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/iq2_grid.h"
#include "tests/support/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define DS4_TEST_MAX_BYTES 16384
#define DS4_DOT_TOLERANCE  2e-6 /* of the sum of magnitudes: f32 rounding of 512 terms in 16 lanes */

static const enum ds4_isa all_isa[] = {DS4_ISA_SCALAR, DS4_ISA_AVX2, DS4_ISA_AVX512};

static struct ds4_json *load(const char *name)
{
    struct ds4_err err = {0};
    struct ds4_json *doc;
    char path[128], *text;
    long size;
    FILE *f;

    snprintf(path, sizeof(path), "tests/data/quants/%s.json", name);
    f = fopen(path, "r");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    size = ftell(f);
    rewind(f);
    text = malloc((size_t)size);
    assert_int_equal(fread(text, 1, (size_t)size, f), size);
    fclose(f);
    doc = ds4_json_parse((struct ds4_str){text, (size_t)size}, &err);
    free(text);
    if (doc == NULL)
        fail_msg("%s: %s", path, err.msg);
    return doc;
}

static size_t hex(const struct ds4_json *obj, const char *key, uint8_t *out)
{
    struct ds4_str s = ds4_json_str(ds4_json_find(obj, key));

    assert_true(s.len > 0 && s.len / 2 <= DS4_TEST_MAX_BYTES);
    for (size_t i = 0; i < s.len / 2; i++) {
        unsigned int byte;

        assert_int_equal(sscanf(s.ptr + 2 * i, "%2x", &byte), 1);
        out[i] = (uint8_t)byte;
    }
    return s.len / 2;
}

static const struct {
    const char *name;
    enum ds4_dtype dtype;
} formats[] = {
    {"f32", DS4_DTYPE_F32},   {"f16", DS4_DTYPE_F16},         {"bf16", DS4_DTYPE_BF16},
    {"q8_0", DS4_DTYPE_Q8_0}, {"q4_0", DS4_DTYPE_Q4_0},       {"q2_k", DS4_DTYPE_Q2_K},
    {"q3_k", DS4_DTYPE_Q3_K}, {"q4_k", DS4_DTYPE_Q4_K},       {"q5_k", DS4_DTYPE_Q5_K},
    {"q6_k", DS4_DTYPE_Q6_K}, {"iq2_xxs", DS4_DTYPE_IQ2_XXS}, {"mxfp4", DS4_DTYPE_MXFP4},
};
#define DS4_N_FORMATS (sizeof(formats) / sizeof(formats[0]))

static enum ds4_dtype dtype_named(struct ds4_str name)
{
    for (size_t i = 0; i < DS4_N_FORMATS; i++) {
        if (strlen(formats[i].name) == name.len && memcmp(formats[i].name, name.ptr, name.len) == 0)
            return formats[i].dtype;
    }
    fail_msg("no format %.*s", (int)name.len, name.ptr);
    return DS4_N_DTYPES;
}

/* Equal, both NaN, or zeros of any sign. */
static bool same_value(float a, float b)
{
    return a == b || (isnan(a) && isnan(b));
}

static void every_block_decodes_to_the_expected_bits(void **state)
{
    static uint8_t block[DS4_TEST_MAX_BYTES];
    static float want[DS4_TEST_MAX_BYTES / 4], got[DS4_TEST_MAX_BYTES];

    (void)state;
    for (size_t f = 0; f < DS4_N_FORMATS; f++) {
        struct ds4_json *doc = load(formats[f].name);
        const struct ds4_json *blocks = ds4_json_find(doc, "blocks");

        assert_true(ds4_json_len(blocks) > 0);
        for (size_t b = 0; b < ds4_json_len(blocks); b++) {
            size_t bytes = hex(ds4_json_at(blocks, b), "block_hex", block), row_bytes;
            size_t n = hex(ds4_json_at(blocks, b), "f32_le_hex", (uint8_t *)want) / 4;

            assert_int_equal(ds4_dtype_row_bytes(formats[f].dtype, (int64_t)n, &row_bytes, NULL),
                             0);
            assert_int_equal(bytes, row_bytes);
            for (size_t i = 0; i < 3; i++) {
                const struct ds4_simd *simd = ds4_simd_find(all_isa[i]);

                if (simd == NULL)
                    continue;
                simd->dequant(formats[f].dtype, block, (int32_t)n, got);
                for (size_t j = 0; j < n; j++) {
                    if (!same_value(got[j], want[j]))
                        fail_msg("%s block %zu value %zu on %s: %a, expected %a", formats[f].name,
                                 b, j, simd->name, (double)got[j], (double)want[j]);
                }
            }
        }
        ds4_json_free(doc);
    }
}

static void exact_products_stay_within_rounding(void **state)
{
    static uint8_t weight[DS4_TEST_MAX_BYTES];
    static float x[DS4_TEST_MAX_BYTES / 4], w[512];
    struct ds4_json *doc = load("dot_products");
    const struct ds4_json *rows = ds4_json_find(doc, "rows");

    (void)state;
    assert_true(ds4_json_len(rows) >= 9);
    for (size_t r = 0; r < ds4_json_len(rows); r++) {
        const struct ds4_json *row = ds4_json_at(rows, r);
        enum ds4_dtype dtype = dtype_named(ds4_json_str(ds4_json_find(row, "weight_type")));
        double want = ds4_json_double(ds4_json_find(row, "dot_exact_f32_act"));
        double sum = ds4_json_double(ds4_json_find(row, "abs_sum"));

        hex(row, "weight_hex", weight);
        assert_int_equal(hex(row, "x_f32_le_hex", (uint8_t *)x), 4 * 512);
        for (size_t i = 0; i < 3; i++) {
            const struct ds4_simd *simd = ds4_simd_find(all_isa[i]);
            float got;

            if (simd == NULL)
                continue;
            simd->dequant(dtype, weight, 512, w);
            simd->dot(w, 512, x, 512, 1, &got);
            if (!(fabs((double)got - want) <= DS4_DOT_TOLERANCE * sum))
                fail_msg("row %zu on %s: %.9g, expected %.9g", r, simd->name, (double)got, want);
        }
    }
    ds4_json_free(doc);
}

/* The vector's activation blocks (f16 scale by 32) in our form (f32 scale). */
static void read_act(enum ds4_act_kind kind, const uint8_t *bytes, void *act)
{
    struct ds4_act32 *small = act;
    struct ds4_act256 *super = act;

    if (kind == DS4_ACT_256) {
        for (int b = 0; b < 2; b++, bytes += 292) {
            memcpy(&super[b].d, bytes, 4);
            memcpy(super[b].q, bytes + 4, 256);
            memcpy(super[b].bsum, bytes + 260, 32);
        }
        return;
    }
    for (int b = 0; b < 16; b++, bytes += 34) {
        uint16_t d;

        memcpy(&d, bytes, 2);
        small[b].d = ds4_f32_from_f16(d);
        memcpy(small[b].q, bytes + 2, 32);
    }
}

static void integer_products_agree_with_their_definition(void **state)
{
    static uint8_t weight[DS4_TEST_MAX_BYTES], bytes[DS4_TEST_MAX_BYTES];
    static struct ds4_act256 act[16]; /* room for either kind */
    struct ds4_json *doc = load("dot_products");
    const struct ds4_json *rows = ds4_json_find(doc, "rows");

    (void)state;
    for (size_t r = 0; r < ds4_json_len(rows); r++) {
        const struct ds4_json *row = ds4_json_at(rows, r);
        enum ds4_dtype dtype = dtype_named(ds4_json_str(ds4_json_find(row, "weight_type")));
        double want = ds4_json_double(ds4_json_find(row, "dot_quantized_act"));
        double sum = ds4_json_double(ds4_json_find(row, "abs_sum"));
        const void *ptr[1] = {act};

        hex(row, "weight_hex", weight);
        hex(row, "act_hex", bytes);
        assert_int_not_equal(ds4_cpu_act_kind(dtype), DS4_ACT_NONE);
        read_act(ds4_cpu_act_kind(dtype), bytes, act);
        for (size_t i = 0; i < 3; i++) {
            const struct ds4_simd *simd = ds4_simd_find(all_isa[i]);
            struct ds4_rows w = {dtype, weight, 0, 1, 512};
            float out[1][DS4_TILE_ROWS], got;

            if (simd == NULL)
                continue;
            simd->product_act(&w, ptr, 1, out);
            got = out[0][0];
            if (!(fabs((double)got - want) <= DS4_DOT_TOLERANCE * sum))
                fail_msg("row %zu on %s: %.9g, expected %.9g", r, simd->name, (double)got, want);
        }
    }
    ds4_json_free(doc);
}

/* Random bytes are valid blocks of every format (scales included: NaN and infinity occur). */
static void random_blocks_give_the_same_bits_on_every_instruction_set(void **state)
{
    static uint8_t row[4096 * 4];
    static float x[3 * 1024], want[1024], got[1024];
    uint32_t seed = 7;

    (void)state;
    for (size_t i = 0; i < sizeof(row); i++)
        row[i] = (uint8_t)(ds4_test_next(&seed) >> 11);
    ds4_test_fill(x, 3 * 1024, 3, 2.0f);
    for (size_t f = 0; f < DS4_N_FORMATS; f++) {
        enum ds4_dtype dtype = formats[f].dtype;
        enum ds4_act_kind kind = ds4_cpu_act_kind(dtype);
        static uint8_t act[3][4608] __attribute__((aligned(64)));
        const void *ptr[3] = {act[0], act[1], act[2]};
        float sum[2][3][DS4_TILE_ROWS] = {{{0}}};
        struct ds4_rows rows = {dtype, row + 1, 0, 1, 1024};

        for (int t = 0; t < 3; t++)
            ds4_cpu_act_quantise(kind, x + 1024 * t, 1024, act[t]);
        for (size_t i = 0; i < 3; i++) {
            const struct ds4_simd *simd = ds4_simd_find(all_isa[i]);

            if (simd == NULL)
                continue;
            simd->dequant(dtype, row + 1, 1024, i == 0 ? want : got); /* unaligned */
            if (kind != DS4_ACT_NONE)
                simd->product_act(&rows, ptr, 3, sum[i != 0]);
            if (i == 0)
                continue;
            for (int j = 0; j < 1024; j++) {
                if (!isnan(want[j]))
                    ds4_test_same_bits(&got[j], &want[j], 1, formats[f].name);
                else
                    assert_true(isnan(got[j]));
            }
            for (int t = 0; t < 3; t++)
                assert_true(same_value(sum[0][t][0], sum[1][t][0]));
        }
    }
}

static void codebook_is_the_published_one(void **state)
{
    FILE *f = fopen("tests/data/quants/iq2xxs_grid.txt", "r");
    int n = 0;
    char line[256];

    (void)state;
    assert_non_null(f);
    ds4_iq2_tables_init();
    while (fgets(line, sizeof(line), f) != NULL) {
        unsigned int index, code, m[8];

        if (sscanf(line, "%u %x %u %u %u %u %u %u %u %u", &index, &code, &m[0], &m[1], &m[2], &m[3],
                   &m[4], &m[5], &m[6], &m[7]) != 10)
            continue;
        assert_int_equal(index, n);
        assert_int_equal(ds4_iq2_codes[n], code);
        for (int j = 0; j < 8; j++)
            assert_int_equal(ds4_iq2_grid[n] >> 8 * j & 0xff, m[j]);
        n++;
    }
    fclose(f);
    assert_int_equal(n, DS4_IQ2_CODES);
    for (int i = 0; i < DS4_IQ2_SIGNS; i++)
        assert_int_equal(__builtin_popcountll(ds4_iq2_sign[i]) % 16, 0); /* even count of minus */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_block_decodes_to_the_expected_bits),
        cmocka_unit_test(exact_products_stay_within_rounding),
        cmocka_unit_test(integer_products_agree_with_their_definition),
        cmocka_unit_test(random_blocks_give_the_same_bits_on_every_instruction_set),
        cmocka_unit_test(codebook_is_the_published_one),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

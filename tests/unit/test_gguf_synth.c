/* Synthetic models: the recipe's published sizes, files that load, weights that are sane and spread. */
#include "worker/gguf_synth.h"

#include "kernels/cpu/simd.h"
#include "router/text/vocab.h"
#include "router/text/vocab_load.h"
#include "worker/gguf_check.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

static void print_finding(void *arg, const struct ds4_err *finding)
{
    (void)arg;
    print_error("%s\n", finding->msg);
}

static char out_path[64];

static int make_path(void **state)
{
    int fd;

    (void)state;
    snprintf(out_path, sizeof(out_path), "/tmp/ds4-test-synth-XXXXXX");
    fd = mkstemp(out_path);
    if (fd < 0)
        return -1;
    return close(fd);
}

static int remove_path(void **state)
{
    (void)state;
    return unlink(out_path);
}

/* ---- recipe ------------------------------------------------------------------------------------ */

struct sum {
    enum ds4_synth_quant quant;
    uint64_t n;
    uint64_t bytes; /* padded to the alignment, as the published numbers are */
};

static int add_tensor(void *arg, const struct ds4_tensor_want *want)
{
    struct sum *sum = arg;
    size_t row = 0;
    uint64_t bytes;

    assert_int_equal(
        ds4_dtype_row_bytes(ds4_synth_dtype(want->class, sum->quant), want->ne[0], &row, NULL), 0);
    bytes = row * (uint64_t)want->ne[1] * (uint64_t)want->ne[2];
    sum->n++;
    sum->bytes += (bytes + 31) / 32 * 32;
    return 0;
}

static uint64_t part_bytes(const struct ds4_model_shape *s, enum ds4_synth_quant quant,
                           struct ds4_model_part part, uint64_t n)
{
    struct sum sum = {quant, 0, 0};

    ds4_model_each_tensor(s, &part, add_tensor, &sum);
    assert_int_equal(sum.n, n);
    return sum.bytes;
}

/* Tensor counts and byte sums of the published files: the catalogue and the recipe in one. */
static void flash_has_the_published_sizes(void **state)
{
    struct ds4_model_shape s;
    struct ds4_model_part all = {0, 43, true, true};
    struct ds4_model_part l1 = {1, 2, false, false};
    struct ds4_model_part l2 = {2, 3, false, false};
    struct ds4_model_part l3 = {3, 4, false, false};
    struct ds4_model_part l4 = {4, 5, false, false};

    (void)state;
    assert_int_equal(ds4_synth_shape("flash", &s, NULL), 0);
    assert_true(part_bytes(&s, DS4_SYNTH_Q2, all, 1328) == UINT64_C(86714777664));
    assert_true(part_bytes(&s, DS4_SYNTH_MXFP4, all, 1328) == UINT64_C(155971125312));
    assert_true(part_bytes(&s, DS4_SYNTH_Q2, l1, 24) == UINT64_C(1959129600));
    assert_true(part_bytes(&s, DS4_SYNTH_Q2, l2, 34) == UINT64_C(1997415424));
    assert_true(part_bytes(&s, DS4_SYNTH_Q2, l3, 28) == UINT64_C(1964549632));
    assert_true(part_bytes(&s, DS4_SYNTH_Q2, l4, 34) == UINT64_C(1994313728));
}

static void tiny_is_the_shape_of_the_test_model(void **state)
{
    struct ds4_err err = {0};
    struct ds4_weights_file *wf =
        ds4_weights_open("tests/data/ds4-tiny.gguf", DS4_WEIGHTS_PREAD, &err);
    struct ds4_model_shape real;
    struct ds4_model_shape synth;

    (void)state;
    assert_non_null(wf);
    assert_int_equal(ds4_model_read(wf, &real, &err), 0);
    assert_int_equal(ds4_synth_shape("tiny", &synth, &err), 0);
    memset(real.name, 0, sizeof(real.name));
    memset(synth.name, 0, sizeof(synth.name));
    assert_memory_equal(&real, &synth, sizeof(real));
    ds4_weights_close(wf);
}

/* ---- files ------------------------------------------------------------------------------------- */

static void every_recipe_gives_a_file_without_findings(void **state)
{
    static const char *const quants[] = {"q2", "mxfp4", "q8"};
    struct ds4_err err = {0};

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        struct ds4_gguf_synth request = {"tiny", quants[i], 0, -1, 7};

        if (ds4_gguf_synth_write(&request, out_path, &err))
            fail_msg("%s", err.msg);
        assert_int_equal(ds4_gguf_check(out_path, true, print_finding, NULL), 0);
    }
}

static void a_partial_file_loads_for_its_layers(void **state)
{
    struct ds4_gguf_synth request = {"tiny", "q2", 2, 7, 7};
    struct ds4_model_part whole = {0, 8, true, true};
    struct ds4_model_part tail = {5, 8, false, true};
    struct ds4_err err = {0};
    struct ds4_weights_file *wf;
    struct ds4_model_shape s;

    (void)state;
    if (ds4_gguf_synth_write(&request, out_path, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(ds4_gguf_check(out_path, true, print_finding, NULL), 0);
    wf = ds4_weights_open(out_path, DS4_WEIGHTS_MMAP, &err);
    assert_non_null(wf);
    assert_int_equal(ds4_model_read(wf, &s, &err), 0);
    assert_int_equal(s.n_layer, 8);
    assert_int_equal(s.present.first_layer, 2);
    assert_int_equal(s.present.end_layer, 8);
    assert_false(s.present.embed);
    assert_true(s.present.head);
    assert_int_equal(ds4_model_require(wf, &s, &tail, &err), 0);
    assert_int_equal(ds4_model_require(wf, &s, &whole, &err), -1);
    ds4_weights_close(wf);
}

/* A layer has the same bytes whatever else is in the file. */
static void the_same_seed_gives_the_same_layer_anywhere(void **state)
{
    static const char name[] = "blk.3.ffn_down_exps.weight";
    struct ds4_gguf_synth request = {"tiny", "q2", 0, -1, 7};
    struct ds4_err err = {0};
    static uint8_t bytes[2][4096];

    (void)state;
    for (int i = 0; i < 2; i++) {
        struct ds4_weights_file *wf;

        request.first_layer = i == 0 ? 0 : 3;
        assert_int_equal(ds4_gguf_synth_write(&request, out_path, &err), 0);
        wf = ds4_weights_open(out_path, DS4_WEIGHTS_PREAD, &err);
        assert_non_null(wf);
        assert_int_equal(ds4_weights_read(wf, ds4_weights_find(wf, name), 84 * 100,
                                          sizeof(bytes[i]), bytes[i], &err),
                         0);
        ds4_weights_close(wf);
    }
    assert_memory_equal(bytes[0], bytes[1], sizeof(bytes[0]));
}

static void bad_requests_are_named(void **state)
{
    static const struct {
        struct ds4_gguf_synth request;
        const char *words;
    } cases[] = {
        {{"huge", "q2", 0, -1, 1}, "shape \"huge\" must be flash or tiny"},
        {{"tiny", "q3", 0, -1, 1}, "quant \"q3\" must be q2, mxfp4 or q8"},
        {{"tiny", "q2", 0, 8, 1}, "layers 0-8 of shape tiny, must lie in 0-7"},
        {{"tiny", "q2", 5, 4, 1}, "layers 5-4 of shape tiny"},
    };
    struct ds4_err err = {0};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(ds4_gguf_synth_write(&cases[i].request, out_path, &err), -1);
        if (strstr(err.msg, cases[i].words) == NULL)
            fail_msg("\"%s\" does not contain \"%s\"", err.msg, cases[i].words);
    }
    assert_int_equal(ds4_gguf_synth_write(&(struct ds4_gguf_synth){"tiny", "q2", 0, -1, 1},
                                          "/proc/no/way", &err),
                     -1);
    assert_int_equal(err.code, DS4_E_IO);
}

static void the_vocabulary_encodes_any_byte(void **state)
{
    struct ds4_gguf_synth request = {"tiny", "q8", 3, 3, 1};
    struct ds4_err err = {0};
    struct ds4_vocab *vocab;

    (void)state;
    assert_int_equal(ds4_gguf_synth_write(&request, out_path, &err), 0);
    vocab = ds4_vocab_load(out_path, NULL, &err);
    if (vocab == NULL)
        fail_msg("%s", err.msg);
    ds4_vocab_free(vocab);
}

/* ---- weights ----------------------------------------------------------------------------------- */

struct take {
    const char *name;
    struct ds4_tensor_want want;
};

static int take_named(void *arg, const struct ds4_tensor_want *want)
{
    struct take *take = arg;

    if (strcmp(want->name, take->name) != 0)
        return 0;
    take->want = *want;
    return 1;
}

static struct ds4_tensor_want flash_tensor(const char *name)
{
    struct ds4_model_shape s;
    struct ds4_model_part all;
    struct take take = {.name = name};

    assert_int_equal(ds4_synth_shape("flash", &s, NULL), 0);
    all = ds4_model_all(&s);
    assert_int_equal(ds4_model_each_tensor(&s, &all, take_named, &take), 1);
    return take.want;
}

static void fill(uint64_t seed, const struct ds4_tensor_want *want, enum ds4_dtype dtype,
                 uint64_t first, uint64_t n, uint8_t *dst)
{
    struct ds4_synth_recipe recipe;

    ds4_synth_recipe_of(seed, want, dtype, &recipe);
    ds4_synth_fill(&recipe, first, n, dst);
}

static void blocks_do_not_depend_on_how_they_are_asked_for(void **state)
{
    struct ds4_tensor_want want = flash_tensor("blk.7.ffn_gate_exps.weight");
    uint8_t whole[66 * 50];
    uint8_t piece[66 * 7];

    (void)state;
    fill(3, &want, DS4_DTYPE_IQ2_XXS, 1000, 50, whole);
    fill(3, &want, DS4_DTYPE_IQ2_XXS, 1020, 7, piece);
    assert_memory_equal(whole + 66 * 20, piece, sizeof(piece));
    fill(4, &want, DS4_DTYPE_IQ2_XXS, 1020, 7, piece);
    assert_memory_not_equal(whole + 66 * 20, piece, sizeof(piece));
}

/* Decoded by the kernels: mean near 0, deviation 1 / sqrt(row length) within the wobble of the scales. */
static void quantised_weights_keep_activations_near_one(void **state)
{
    static const struct {
        const char *name;
        enum ds4_dtype dtype;
    } cases[] = {
        {"blk.9.ffn_gate_exps.weight", DS4_DTYPE_IQ2_XXS},
        {"blk.9.ffn_down_exps.weight", DS4_DTYPE_Q2_K},
        {"blk.9.ffn_down_exps.weight", DS4_DTYPE_MXFP4},
        {"blk.9.ffn_up_exps.weight", DS4_DTYPE_Q8_0},
        {"blk.9.attn_q_b.weight", DS4_DTYPE_Q8_0},
    };
    const struct ds4_simd *simd = ds4_simd_find(DS4_ISA_SCALAR);
    static uint8_t raw[64 * 4096 * 2];
    static float row[4096];

    (void)state;
    assert_non_null(simd);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct ds4_tensor_want want = flash_tensor(cases[i].name);
        const struct ds4_dtype_info *info = ds4_dtype_info(cases[i].dtype);
        int32_t n = (int32_t)want.ne[0];
        size_t row_bytes = (size_t)(n / info->block_elems * info->block_bytes);
        double sum = 0;
        double square = 0;

        fill(5, &want, cases[i].dtype, 12345, 64 * row_bytes / (size_t)info->block_bytes, raw);
        for (int r = 0; r < 64; r++) {
            simd->dequant(cases[i].dtype, raw + (size_t)r * row_bytes, n, row);
            for (int32_t k = 0; k < n; k++) {
                sum += (double)row[k];
                square += (double)row[k] * (double)row[k];
            }
        }
        square *= (double)n / (64.0 * n); /* mean square in units of 1 / n */
        sum *= sqrt((double)n) / (64.0 * n);
        if (!(square > 0.85 && square < 1.2) || !(fabs(sum) < 0.02))
            fail_msg("%s %s: mean square %g, mean %g", cases[i].name, info->name, square, sum);
    }
}

static void hash_rows_name_distinct_experts_and_use_all(void **state)
{
    struct ds4_tensor_want want = flash_tensor("blk.1.ffn_gate_tid2eid.weight");
    static uint8_t table[6 * 4096 * 4];
    int used[256] = {0};

    (void)state;
    fill(1, &want, DS4_DTYPE_I32, 0, 6 * 4096, table);
    for (int t = 0; t < 4096; t++) {
        bool seen[256] = {false};

        for (int k = 0; k < 6; k++) {
            int32_t e;

            memcpy(&e, table + (t * 6 + k) * 4, 4);
            assert_in_range(e, 0, 255);
            assert_false(seen[e]);
            seen[e] = true;
            used[e]++;
        }
    }
    for (int e = 0; e < 256; e++)
        assert_in_range(used[e], 48, 192); /* 96 on average */
}

/* Random activations through the router of a layer: every expert is among the top six sometimes, none
 * far more often than its share. */
static void the_router_spreads_over_all_experts(void **state)
{
    enum { D = 4096, N_EXPERT = 256, N_TOK = 256, N_USED = 6 };
    struct ds4_tensor_want want = flash_tensor("blk.9.ffn_gate_inp.weight");
    uint8_t *raw = malloc((size_t)2 * D * N_EXPERT);
    float *w = malloc(sizeof(float) * D * N_EXPERT);
    float *x = malloc(sizeof(float) * D);
    int used[N_EXPERT] = {0};
    uint32_t seed = 1;
    double square = 0;

    (void)state;
    assert_non_null(raw);
    assert_non_null(w);
    assert_non_null(x);
    fill(1, &want, DS4_DTYPE_F16, 0, (uint64_t)D * N_EXPERT, raw);
    for (int i = 0; i < D * N_EXPERT; i++)
        w[i] = ds4_f32_from_f16((uint16_t)(raw[2 * i] | raw[2 * i + 1] << 8));
    for (int t = 0; t < N_TOK; t++) {
        float logit[N_EXPERT];

        for (int i = 0; i < D; i++) {
            seed = seed * 1664525u + 1013904223u;
            x[i] = (float)(seed >> 8) * 0x1p-23f - 1;
            x[i] *= 1.732f; /* deviation 1 */
        }
        for (int e = 0; e < N_EXPERT; e++) {
            logit[e] = 0;
            for (int i = 0; i < D; i++)
                logit[e] += w[e * D + i] * x[i];
            square += (double)logit[e] * (double)logit[e];
        }
        for (int k = 0; k < N_USED; k++) {
            int best = 0;

            for (int e = 1; e < N_EXPERT; e++)
                best = logit[e] > logit[best] ? e : best;
            used[best]++;
            logit[best] = -INFINITY;
        }
    }
    for (int e = 0; e < N_EXPERT; e++)
        assert_in_range(used[e], 1, 24); /* 6 on average */
    square /= (double)N_TOK * N_EXPERT;
    assert_true(square > 0.8 && square < 1.25); /* logits of deviation one */
    free(raw);
    free(w);
    free(x);
}

#define WITH_PATH(test) cmocka_unit_test_setup_teardown(test, make_path, remove_path)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(flash_has_the_published_sizes),
        cmocka_unit_test(tiny_is_the_shape_of_the_test_model),
        WITH_PATH(every_recipe_gives_a_file_without_findings),
        WITH_PATH(a_partial_file_loads_for_its_layers),
        WITH_PATH(the_same_seed_gives_the_same_layer_anywhere),
        WITH_PATH(bad_requests_are_named),
        WITH_PATH(the_vocabulary_encodes_any_byte),
        cmocka_unit_test(blocks_do_not_depend_on_how_they_are_asked_for),
        cmocka_unit_test(quantised_weights_keep_activations_near_one),
        cmocka_unit_test(hash_rows_name_distinct_experts_and_use_all),
        cmocka_unit_test(the_router_spreads_over_all_experts),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Synthetic models by name: the path that names one, the file it stands for, and the same bits from
 * stages however the layers are cut. */
#include "common/synth.h"

#include "common/weights_digest.h"
#include "kernels/backend.h"
#include "tests/support/chain.h"
#include "worker/gguf_synth.h"
#include "worker/stage_state.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define MODEL    "synth:tiny:q2:7"
#define TEXT_TOK 40
#define N_LAST   5

static void names_are_read_and_wrong_parts_named(void **state)
{
    static const struct {
        const char *path;
        const char *words;
    } bad[] = {
        {"synth:tiny:q2", "must be synth:SHAPE:QUANT:SEED"},
        {"synth:tiny", "must be synth:SHAPE:QUANT:SEED"},
        {"synth:", "must be synth:SHAPE:QUANT:SEED"},
        {"synth:tiny:q2:", "must be synth:SHAPE:QUANT:SEED"},
        {"synth:huge:q2:1", "shape \"huge\" must be flash or tiny"},
        {"synth:tiny:q3:1", "quant \"q3\" must be q2, mxfp4 or q8"},
        {"synth:tiny:q2:-1", "the seed must be a number"},
        {"synth:tiny:q2:1x", "the seed must be a number"},
        {"synth:tiny:q2:18446744073709551616", "the seed must be a number below 2^64"},
    };
    struct ds4_synth synth;
    struct ds4_err err = {0};

    (void)state;
    assert_int_equal(ds4_synth_parse("synth:flash:mxfp4:18446744073709551615", &synth, &err), 0);
    assert_int_equal(synth.shape.n_layer, 43);
    assert_int_equal(synth.quant, DS4_SYNTH_MXFP4);
    assert_true(synth.seed == UINT64_MAX);
    assert_false(ds4_synth_is_path("model.gguf"));
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_true(ds4_synth_is_path(bad[i].path));
        assert_null(ds4_weights_open(bad[i].path, DS4_WEIGHTS_MMAP, &err));
        assert_int_equal(err.code, DS4_E_INVALID);
        if (strstr(err.msg, bad[i].words) == NULL)
            fail_msg("\"%s\" does not contain \"%s\"", err.msg, bad[i].words);
    }
}

static void a_name_stands_for_the_file_of_the_same_recipe(void **state)
{
    const struct ds4_gguf_synth request = {"tiny", "q2", 0, -1, 7};
    char path[] = "/tmp/ds4-test-synth-XXXXXX";
    int fd = mkstemp(path);
    struct ds4_weights_file *file, *made;
    uint8_t digest[2][DS4_WEIGHTS_DIGEST_BYTES];
    static uint8_t a[70000], b[70000];

    (void)state;
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(ds4_gguf_synth_write(&request, path, NULL), 0);
    file = ds4_weights_open(path, DS4_WEIGHTS_PREAD, NULL);
    made = ds4_weights_open(MODEL, DS4_WEIGHTS_PREAD, NULL);
    assert_non_null(file);
    assert_non_null(made);
    assert_int_equal(ds4_weights_digest(file, digest[0], NULL), 0);
    assert_int_equal(ds4_weights_digest(made, digest[1], NULL), 0);
    assert_memory_equal(digest[0], digest[1], sizeof(digest[0]));
    assert_int_equal(ds4_weights_n_tensor(file), ds4_weights_n_tensor(made));
    for (size_t i = 0; i < ds4_weights_n_tensor(file); i++) {
        const struct ds4_tensor_info *info = ds4_weights_at(made, i);
        uint64_t at = info->bytes / 3; /* inside a block, mostly */
        size_t n = info->bytes - at < sizeof(a) ? (size_t)(info->bytes - at) : sizeof(a);

        assert_int_equal(ds4_weights_read(made, info, at, n, a, NULL), 0);
        assert_int_equal(ds4_weights_read(file, ds4_weights_at(file, i), at, n, b, NULL), 0);
        if (memcmp(a, b, n) != 0)
            fail_msg("tensor %s differs", info->name);
        assert_null(ds4_weights_recipe(file, ds4_weights_at(file, i)));
        assert_int_equal(ds4_weights_read(made, info, info->bytes, 1, a, NULL), -1);
    }
    ds4_weights_close(made);
    ds4_weights_close(file);
    unlink(path);
}

static void a_device_makes_the_bytes_that_reading_gives(void **state)
{
    static const char *const models[] = {"synth:tiny:q2:1", "synth:tiny:mxfp4:1",
                                         "synth:tiny:q8:1"};
    const struct ds4_backend *cpu = ds4_backend_find("cpu");
    const struct ds4_device_config config = {.n_thread = 3};
    struct ds4_device *dev = cpu->open(&config, NULL);

    (void)state;
    assert_non_null(dev);
    for (size_t m = 0; m < sizeof(models) / sizeof(models[0]); m++) {
        struct ds4_weights_file *wf = ds4_weights_open(models[m], DS4_WEIGHTS_PREAD, NULL);

        assert_non_null(wf);
        for (size_t i = 0; i < ds4_weights_n_tensor(wf); i++) {
            const struct ds4_tensor_info *info = ds4_weights_at(wf, i);
            const struct ds4_synth_recipe *recipe = ds4_weights_recipe(wf, info);
            uint8_t *made = malloc((size_t)info->bytes);
            uint8_t *read = malloc((size_t)info->bytes);

            assert_true(recipe->block_bytes <= DS4_SYNTH_MAX_BLOCK_BYTES);
            cpu->synth(dev, recipe, info->bytes / recipe->block_bytes, made);
            assert_int_equal(ds4_weights_read(wf, info, 0, (size_t)info->bytes, read, NULL), 0);
            assert_memory_equal(made, read, (size_t)info->bytes);
            free(read);
            free(made);
        }
        ds4_weights_close(wf);
    }
    cpu->close(dev);
}

/* Logits of the last rows of a short text, on n_stage stages. */
static void run(int32_t n_stage, float *out)
{
    const struct chain_options options = {.model = MODEL, .n_stage = n_stage, .context_tok = 512};
    struct chain *c = chain_new(&options);
    struct ds4_seq_open open = chain_greedy(0, 1, 1, TEXT_TOK);
    int32_t ids[TEXT_TOK];
    struct chain_part part = {.n_tok = TEXT_TOK, .token = ids};
    uint64_t count[2];

    for (int32_t i = 0; i < TEXT_TOK; i++)
        ids[i] = 3 + i * 97 % 256;
    chain_step(c, &open, 1, &part, 1);
    chain_logits(c, N_LAST, out);
    /* Eight experts, 40 tokens of three each: routing that left one out would be no spread. */
    for (int32_t s = 0; s < n_stage; s++) {
        struct ds4_stage *st = c->stage[s];

        st->backend->download(st->dev, count, st->buf.spread, sizeof(count));
        assert_int_equal(count[0], 1);
        assert_int_equal(count[1], 8);
    }
    chain_free(c);
}

static void stages_of_a_synthetic_model_agree_to_the_bit(void **state)
{
    static const int32_t counts[] = {2, 3, 8};
    const size_t n = (size_t)N_LAST * 4096;
    float *want = calloc(n, sizeof(*want));
    float *got = calloc(n, sizeof(*got));

    (void)state;
    run(1, want);
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        run(counts[i], got);
        assert_memory_equal(got, want, n * sizeof(*want));
    }
    free(got);
    free(want);
}

static void spread_counts_distinct_experts_of_active_rows(void **state)
{
    const struct ds4_backend *cpu = ds4_backend_find("cpu");
    const struct ds4_device_config config = {.n_thread = 1};
    struct ds4_device *dev = cpu->open(&config, NULL);
    struct ds4_batch_entry entry[2] = {{.n_row = 2, .active = true}, {.first_row = 2, .n_row = 1}};
    const int32_t entry_of[3] = {0, 0, 1};
    const struct ds4_batch batch = {.n_tok = 3, .entry_of = entry_of, .n_entry = 2, .entry = entry};
    const int32_t id[6] = {1, 5, 5, 9, 200, 201}; /* the third row is a no-op */
    uint64_t count[2] = {10, 100};
    const struct ds4_spread_args args = {&batch, id, 2, 256, count};

    (void)state;
    assert_non_null(dev);
    cpu->spread(dev, &args);
    assert_int_equal(count[0], 11);
    assert_int_equal(count[1], 103);
    cpu->close(dev);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_read_and_wrong_parts_named),
        cmocka_unit_test(a_name_stands_for_the_file_of_the_same_recipe),
        cmocka_unit_test(a_device_makes_the_bytes_that_reading_gives),
        cmocka_unit_test(stages_of_a_synthetic_model_agree_to_the_bit),
        cmocka_unit_test(spread_counts_distinct_experts_of_active_rows),
    };

    chain_take_args(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

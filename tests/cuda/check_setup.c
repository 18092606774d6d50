/* What a CUDA device does before its first step, on a machine with a GPU: synthetic weights, the probe
 * of its rates, the test of its memory.
 *
 *   check_setup [DEVICE]
 *
 * A plain program, because machines lent for GPU work have no test library.  Generated weights must be
 * the CPU's to the byte.  One line a case, last "N passed, N failed". */
#include "kernels/backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define N_BLOCK   100003 /* not a multiple of anything the kernel likes */
#define BIG_BYTES ((size_t)4 << 30)

static int n_passed, n_failed;
static const struct ds4_backend *cuda;
static struct ds4_device *dev;

static void verdict(bool ok, const char *what)
{
    printf("%s  %s\n", ok ? "ok  " : "FAIL", what);
    n_passed += ok;
    n_failed += !ok;
}

static void die(const char *what)
{
    fprintf(stderr, "check_setup: %s\n", what);
    exit(2);
}

static double seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void *take(size_t bytes)
{
    struct ds4_err err = {DS4_OK, ""};
    void *data = cuda->alloc(dev, bytes, "check", &err);

    if (data == NULL)
        die(err.msg);
    return data;
}

/* ---- synthetic weights -------------------------------------------------------------------------- */

static struct ds4_synth_recipe recipe_of(enum ds4_dtype dtype)
{
    struct ds4_synth_recipe r = {.key = UINT64_C(0x123456789abcdef0) + (uint64_t)dtype,
                                 .dtype = dtype,
                                 .block_bytes = (uint32_t)ds4_dtype_info(dtype)->block_bytes,
                                 .deviation = 0.015625f,
                                 .centre = 0.3f,
                                 .half = 0.7f,
                                 .e8m0 = 119,
                                 .above = 0.37f,
                                 .n_used = 6,
                                 .n_expert = 256};
    return r;
}

static void check_synth(enum ds4_dtype dtype)
{
    const struct ds4_synth_recipe r = recipe_of(dtype);
    const size_t bytes = (size_t)N_BLOCK * r.block_bytes;
    uint8_t *want = malloc(bytes), *got = malloc(bytes);
    void *data = take(bytes);
    char what[96];

    if (want == NULL || got == NULL)
        die("out of memory");
    ds4_synth_fill(&r, 0, N_BLOCK, want);
    cuda->synth(dev, &r, N_BLOCK, data);
    cuda->download(dev, got, data, bytes);
    snprintf(what, sizeof(what), "synthetic %s is the CPU's to the byte", ds4_dtype_name(dtype));
    verdict(memcmp(want, got, bytes) == 0, what);
    free(got);
    free(want);
}

static void time_synth(enum ds4_dtype dtype)
{
    const struct ds4_synth_recipe r = recipe_of(dtype);
    void *data = take(BIG_BYTES);
    double begin;

    cuda->sync(dev);
    begin = seconds();
    cuda->synth(dev, &r, BIG_BYTES / r.block_bytes, data);
    cuda->sync(dev);
    printf("      4 GiB of %s in %.1f ms\n", ds4_dtype_name(dtype), (seconds() - begin) * 1e3);
}

static void check_spread(void)
{
    struct ds4_batch_entry entry[2] = {{.n_row = 2, .active = true},
                                       {.slot = 1, .first_row = 2, .n_row = 1}};
    const int32_t zero[3] = {0, 0, 0}, entry_of[3] = {0, 0, 1};
    const struct ds4_batch batch = {
        .n_tok = 3, .token = zero, .pos = zero, .entry_of = entry_of, .n_entry = 2, .entry = entry};
    const int32_t id[6] = {1, 5, 5, 9, 200, 201}; /* the third row is a no-op */
    uint64_t count[2] = {10, 100};
    int32_t *dev_id = take(sizeof(id));
    uint64_t *dev_count = take(sizeof(count));
    const struct ds4_spread_args args = {&batch, dev_id, 2, 256, dev_count};

    cuda->upload(dev, dev_id, id, sizeof(id));
    cuda->upload(dev, dev_count, count, sizeof(count));
    cuda->begin(dev, &batch);
    cuda->spread(dev, &args);
    cuda->download(dev, count, dev_count, sizeof(count));
    verdict(count[0] == 11 && count[1] == 103, "spread counts distinct experts of active rows");
}

/* ---- probe and memory test ---------------------------------------------------------------------- */

static void check_probe(void)
{
    struct ds4_probe p;
    double begin = seconds(), took;

    cuda->probe(dev, &p);
    took = (seconds() - begin) * 1e3;
    printf(
        "      verdict %d, memory %.0f GB/s, link %.2f there %.2f back GB/s, %.1f TFLOPS, tensor "
        "product %.0f cycles, dp4a/dp2a %.2f, %.0f MHz, in %.0f ms\n",
        (int)p.verdict, p.memory_bytes_per_s / 1e9, p.link_bytes_per_s / 1e9,
        p.back_bytes_per_s / 1e9, p.flops / 1e12, p.mma_cycles, p.dp4a_per_dp2a, p.clock_hz / 1e6,
        took);
    verdict(p.verdict == DS4_PROBE_FULL,
            "the probe finds full arithmetic (false on a locked card)");
    verdict(p.memory_bytes_per_s > 1e11 && p.memory_bytes_per_s < 1e14 &&
                p.link_bytes_per_s > 1e8 && p.link_bytes_per_s < 1e12 && p.flops > 1e11 &&
                p.flops < 1e15 && p.mma_cycles > 8 && p.clock_hz > 3e8 && p.clock_hz < 4e9,
            "the probe's rates are those of a card");
    verdict(took < 100, "the probe takes less than 100 ms");
}

static void check_patterns(size_t bytes, size_t wrong_at)
{
    struct ds4_memory_faults faults = {.n = 0};
    uint8_t *data = take(bytes);
    uint64_t word;
    double begin;

    begin = seconds();
    cuda->pattern_write(dev, data, bytes, 7);
    cuda->pattern_check(dev, data, bytes, 7, &faults);
    printf("      %.1f MiB written and read in %.1f ms\n", (double)bytes / (1 << 20),
           (seconds() - begin) * 1e3);
    verdict(faults.n == 0, "memory keeps a pattern");
    cuda->download(dev, &word, data + wrong_at, sizeof(word));
    word ^= 1u << 19;
    cuda->upload(dev, data + wrong_at, &word, sizeof(word));
    cuda->sync(dev);
    cuda->pattern_check(dev, data, bytes, 7, &faults);
    verdict(faults.n == 1 && faults.at[0] == wrong_at, "a flipped bit is found where it is");
    cuda->pattern_write(dev, data, bytes, 0);
    faults.n = 0;
    cuda->pattern_check(dev, data, bytes, 0, &faults);
    cuda->download(dev, &word, data + wrong_at, sizeof(word));
    verdict(faults.n == 0 && word == 0, "the last pattern is zeros");
}

static void check_cards(void)
{
    static const char *const bad[] = {"99", "-1", "GPU-none", "ffff:ff:1f.0", "first"};
    struct ds4_device_config config = {.card = NULL};

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct ds4_err err = {DS4_OK, ""};
        char what[400];

        config.card = bad[i];
        verdict(cuda->open(&config, &err) == NULL && err.code == DS4_E_INVALID,
                (snprintf(what, sizeof(what), "%s", err.msg), what));
    }
}

int main(int argc, char **argv)
{
    const struct ds4_device_config config = {.ordinal =
                                                 argc > 1 ? (int32_t)strtol(argv[1], NULL, 10) : 0};
    static const enum ds4_dtype dtypes[] = {DS4_DTYPE_F32,  DS4_DTYPE_F16,  DS4_DTYPE_I32,
                                            DS4_DTYPE_Q8_0, DS4_DTYPE_Q2_K, DS4_DTYPE_IQ2_XXS,
                                            DS4_DTYPE_MXFP4};
    struct ds4_err err = {DS4_OK, ""};

    cuda = ds4_backend_find("cuda");
    if (cuda == NULL)
        die("no CUDA in this build: make CUDA=1 gpu");
    dev = cuda->open(&config, &err);
    if (dev == NULL)
        die(err.msg);
    printf("%s\n", cuda->describe(dev));
    for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++)
        check_synth(dtypes[i]);
    time_synth(DS4_DTYPE_IQ2_XXS);
    time_synth(DS4_DTYPE_Q8_0);
    check_spread();
    check_probe();
    check_patterns(((size_t)1 << 20) + 8,
                   (size_t)1 << 20); /* an odd number of words, the last one */
    check_patterns((size_t)4 << 30, ((size_t)3 << 30) + 8);
    check_cards();
    cuda->close(dev);
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed == 0 ? 0 : 1;
}

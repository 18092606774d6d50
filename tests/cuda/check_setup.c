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

/* ---- experts in pieces --------------------------------------------------------------------------- */

#define N_TOK    5
#define N_USED   3
#define N_EXPERT 8
#define D        256
#define D_EXPERT 128

static struct ds4_weight random_weight(uint64_t key, int32_t n_stack, int32_t n_row, int32_t n_col)
{
    struct ds4_synth_recipe r = recipe_of(DS4_DTYPE_Q8_0);
    struct ds4_weight w = {.dtype = DS4_DTYPE_Q8_0,
                           .n_stack = n_stack,
                           .n_row = n_row,
                           .n_col = n_col,
                           .row_bytes = (size_t)n_col / 32 * r.block_bytes};
    const size_t bytes = (size_t)n_stack * (size_t)n_row * w.row_bytes;
    void *data = take(bytes);

    r.key = key;
    cuda->synth(dev, &r, bytes / r.block_bytes, data);
    w.data = data;
    return w;
}

static void set_scratch(void)
{
    const struct ds4_limits limits = {.max_tok = 64,
                                      .max_context = 4096,
                                      .d_model = D,
                                      .n_hyper = 4,
                                      .n_head = 8,
                                      .d_head = 64,
                                      .n_index_head = 4,
                                      .d_index = 32,
                                      .top_k = 64,
                                      .n_expert = N_EXPERT,
                                      .n_used = N_USED,
                                      .d_expert = D_EXPERT,
                                      .max_cols = 4 * D};
    const size_t bytes = cuda->scratch_bytes(dev, &limits);

    verdict(bytes == cuda->scratch_bytes(NULL, &limits), "scratch needs no device to be known");
    cuda->set_scratch(dev, take(bytes), bytes);
}

/* Even experts in one call, odd ones in another, joined: the bits of one call for all. */
static void check_pieces(void)
{
    struct ds4_batch_entry entry = {.n_row = N_TOK, .active = true};
    const int32_t zero[N_TOK] = {0};
    const struct ds4_batch batch = {.n_tok = N_TOK,
                                    .token = zero,
                                    .pos = zero,
                                    .entry_of = zero,
                                    .n_entry = 1,
                                    .entry = &entry};
    int32_t id[3][N_TOK * N_USED];
    float x[N_TOK * D], weight[N_TOK * N_USED], y[2][N_TOK * D];
    struct ds4_moe_args a = {.batch = &batch, .n_used = N_USED, .clamp = 10, .shared_clamp = 10};
    int32_t *dev_id = take(sizeof(id[0]));
    float *dev_x = take(sizeof(x)), *dev_y = take(sizeof(y[0]));

    for (int i = 0; i < N_TOK * N_USED; i++) {
        id[0][i] = i % N_USED * 2 + i / N_USED % 3; /* rising within a token */
        id[1][i] = id[0][i] % 2 == 0 ? id[0][i] : DS4_EXPERT_ELSEWHERE;
        id[2][i] = id[0][i] % 2 == 1 ? id[0][i] : DS4_EXPERT_ELSEWHERE;
        weight[i] = 0.1f + 0.07f * (float)i;
    }
    for (int i = 0; i < N_TOK * D; i++)
        x[i] = (float)(i * 37 % 101 - 50) * 0.03f;
    a.gate = random_weight(1, N_EXPERT, D_EXPERT, D);
    a.up = random_weight(2, N_EXPERT, D_EXPERT, D);
    a.down = random_weight(3, N_EXPERT, D, D_EXPERT);
    a.shared_gate = random_weight(4, 1, D_EXPERT, D);
    a.shared_up = random_weight(5, 1, D_EXPERT, D);
    a.shared_down = random_weight(6, 1, D, D_EXPERT);
    a.x = ds4_tensor_2d(dev_x, DS4_DTYPE_F32, N_TOK, D);
    a.y = ds4_tensor_2d(dev_y, DS4_DTYPE_F32, N_TOK, D);
    a.part = take(sizeof(float) * N_TOK * N_USED * D);
    a.id = dev_id;
    a.weight = take(sizeof(weight));
    cuda->upload(dev, dev_x, x, sizeof(x));
    cuda->upload(dev, (void *)(uintptr_t)a.weight, weight, sizeof(weight));
    for (int pass = 0; pass < 3; pass++) {
        cuda->upload(dev, dev_id, id[pass], sizeof(id[pass]));
        cuda->begin(dev, &batch);
        if (pass == 0)
            cuda->moe(dev, &a);
        else
            cuda->moe_uses(dev, &a);
        if (pass == 0)
            cuda->download(dev, y[0], dev_y, sizeof(y[0]));
        cuda->sync(dev);
    }
    cuda->upload(dev, dev_id, id[0], sizeof(id[0]));
    cuda->moe_join(dev, &a);
    cuda->download(dev, y[1], dev_y, sizeof(y[1]));
    verdict(memcmp(y[0], y[1], sizeof(y[0])) == 0 && y[0][7] != 0.0f && y[0][7] == y[0][7],
            "experts in two pieces give the bits of one");
    verdict(cuda->wrong(dev) == NULL, "an expert elsewhere is not a wrong id");
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
    set_scratch();
    check_pieces();
    cuda->close(dev);
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed == 0 ? 0 : 1;
}

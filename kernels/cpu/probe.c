/* Start-up measurements on the host: how fast memory streams and the kernels multiply, and patterns for
 * the memory test.
 *
 * Host memory has its own checks, so nothing is tested here unasked; the patterns are what the GPU's are
 * compared with.  All threads of the pool measure together, as they compute. */
#include "kernels/cpu/cpu.h"

#include "common/clock.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PIECE_BYTES  ((size_t)1 << 20)
#define PAGE_BYTES   4096
#define PROBE_PIECES 32 /* 32 MiB: about 10 ms to make and read */
#define N_PASS       2  /* the best counts: the first also wakes clocks and threads ... */
#define PASS_NS                                                                                    \
    INT64_C(8000000) /* ... unless it took so long: a start must not wait for a figure */
#define PRODUCT_COLS 1024
#define PRODUCT_RUNS 100

/* ---- rates -------------------------------------------------------------------------------------- */

/* Nanoseconds of n items by all threads, the better of two passes. */
static int64_t best_pass(struct ds4_device *dev, int32_t n, ds4_pool_fn fn, void *ctx)
{
    int64_t best_ns = INT64_MAX;

    for (int pass = 0; pass < N_PASS && (pass == 0 || best_ns < PASS_NS); pass++) {
        int64_t begin_ns = ds4_clock_ns();
        int64_t spent_ns;

        ds4_pool_run(dev->pool, n, fn, ctx);
        spent_ns = ds4_clock_ns() - begin_ns;
        best_ns = spent_ns < best_ns ? spent_ns : best_ns;
    }
    return best_ns;
}

struct reading {
    const uint8_t *data;
    uint64_t sum[PROBE_PIECES]; /* so that the reads are not left out */
};

/* Makes the pages there are: the kernel fills them. */
static void touch_piece(void *ctx, int32_t item, int32_t thread)
{
    uint8_t *piece = (uint8_t *)ctx + (size_t)item * PIECE_BYTES;

    (void)thread;
    for (size_t i = 0; i < PIECE_BYTES; i += PAGE_BYTES)
        piece[i] = 1;
}

static void read_piece(void *ctx, int32_t item, int32_t thread)
{
    struct reading *r = ctx;
    const uint8_t *at = r->data + (size_t)item * PIECE_BYTES;
    uint64_t sum[8] = {0};

    (void)thread;
    for (size_t i = 0; i < PIECE_BYTES; i += sizeof(sum)) {
        uint64_t line[8];

        memcpy(line, at + i, sizeof(line));
        for (int k = 0; k < 8; k++)
            sum[k] += line[k];
    }
    r->sum[item] = sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

static double measure_memory(struct ds4_device *dev)
{
    const size_t bytes = PROBE_PIECES * PIECE_BYTES;
    struct reading r = {.data = NULL};
    int64_t best_ns;
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (data == MAP_FAILED)
        return 0;
    (void)madvise(data, bytes, MADV_HUGEPAGE); /* fewer faults; as good without */
    ds4_pool_run(dev->pool, PROBE_PIECES, touch_piece, data);
    r.data = data;
    best_ns = best_pass(dev, PROBE_PIECES, read_piece, &r);
    munmap(data, bytes);
    return best_ns > 0 ? (double)bytes * 1e9 / (double)best_ns : 0;
}

struct multiplying {
    const struct ds4_simd *simd;
    float w[DS4_TILE_ROWS * PRODUCT_COLS];
    float x[PRODUCT_COLS];
};

static void multiply(void *ctx, int32_t item, int32_t thread)
{
    const struct multiplying *m = ctx;
    const struct ds4_rows rows = {DS4_DTYPE_F32, (const uint8_t *)m->w,
                                  PRODUCT_COLS * sizeof(float), DS4_TILE_ROWS, PRODUCT_COLS};
    const void *x = m->x;
    float out[1][DS4_TILE_ROWS];

    (void)item;
    (void)thread;
    for (int run = 0; run < PRODUCT_RUNS; run++)
        m->simd->product(&rows, &x, 1, out);
}

/* The kernels' own inner loop, from the first cache level. */
static double measure_products(struct ds4_device *dev)
{
    struct multiplying *m = calloc(1, sizeof(*m)); /* what is multiplied does not matter */
    int32_t n = ds4_pool_threads(dev->pool);
    double flop = 2.0 * DS4_TILE_ROWS * PRODUCT_COLS * PRODUCT_RUNS * n;
    int64_t best_ns;

    if (m == NULL)
        return 0;
    m->simd = dev->simd;
    best_ns = best_pass(dev, n, multiply, m);
    free(m);
    return best_ns > 0 ? flop * 1e9 / (double)best_ns : 0;
}

void ds4_cpu_probe(struct ds4_device *dev, struct ds4_probe *out)
{
    *out = (struct ds4_probe){.verdict = DS4_PROBE_FULL,
                              .memory_bytes_per_s = measure_memory(dev),
                              .flops = measure_products(dev)};
}

/* ---- patterns ----------------------------------------------------------------------------------- */

struct pattern {
    uint64_t *word;
    size_t n_word;
    uint64_t seed;
    struct ds4_memory_faults *faults; /* NULL: write */
};

/* Every word its own value, so that memory that answers for another address shows. */
static uint64_t word_of(uint64_t seed, uint64_t i)
{
    uint64_t z = (seed + i) * UINT64_C(0x9e3779b97f4a7c15);

    if (seed == 0)
        return 0;
    z = (z ^ z >> 32) * UINT64_C(0xd6e8feb86659fd93);
    return z ^ z >> 32;
}

static void pattern_piece(void *ctx, int32_t item, int32_t thread)
{
    const struct pattern *p = ctx;
    const size_t piece = PIECE_BYTES / sizeof(uint64_t);
    size_t first = (size_t)item * piece;
    size_t end = p->n_word - first < piece ? p->n_word : first + piece;

    (void)thread;
    for (size_t i = first; i < end; i++) {
        uint64_t k;

        if (p->faults == NULL) {
            p->word[i] = word_of(p->seed, i);
        } else if (p->word[i] != word_of(p->seed, i)) {
            k = __atomic_fetch_add(&p->faults->n, 1, __ATOMIC_RELAXED);
            if (k < DS4_MEMORY_FAULTS_KEPT)
                p->faults->at[k] = i * sizeof(uint64_t);
        }
    }
}

static void run_pattern(struct ds4_device *dev, struct pattern *p)
{
    size_t n = (p->n_word * sizeof(uint64_t) + PIECE_BYTES - 1) / PIECE_BYTES;

    ds4_pool_run(dev->pool, (int32_t)n, pattern_piece, p);
}

void ds4_cpu_pattern_write(struct ds4_device *dev, void *area, size_t bytes, uint64_t seed)
{
    struct pattern p = {area, bytes / sizeof(uint64_t), seed, NULL};

    run_pattern(dev, &p);
}

void ds4_cpu_pattern_check(struct ds4_device *dev, const void *area, size_t bytes, uint64_t seed,
                           struct ds4_memory_faults *faults)
{
    struct pattern p = {(uint64_t *)area, bytes / sizeof(uint64_t), seed, faults};

    run_pattern(dev, &p);
}

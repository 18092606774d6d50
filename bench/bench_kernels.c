/* Speed of products with quantised weights at the shapes of V4 Flash, beside a copy of the same bytes.
 *
 *   bench_kernels [ROUNDS]
 *
 * One activation row meets one weight matrix, as in decoding a single stream, and then 16 rows as in a
 * small prefill.  What bounds a matvec is reading the weights once, so the figure is GB/s of weight
 * bytes, median and spread; a memcpy of as many bytes shows what the machine's memory gives.  Calls
 * rotate over copies of the weights that together exceed the caches.  Figures of a shared machine
 * vary: compare only lines of one run. */
#include "common/clock.h"
#include "kernels/backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef DS4_COMMIT
#define DS4_COMMIT "unknown"
#endif
#define MAX_ROUNDS    101
#define ROTATED_BYTES ((size_t)192 << 20) /* above every cache we meet */
#define MAX_COPIES    64
#define MAX_TOK       16

struct shape {
    const char *what;
    enum ds4_dtype dtype;
    int32_t n_row, n_col;
};

static const struct shape shapes[] = {
    {"q_b       ", DS4_DTYPE_Q8_0, 32768, 1024},
    {"output_b  ", DS4_DTYPE_Q8_0, 4096, 8192},
    {"expert w1x6", DS4_DTYPE_IQ2_XXS, 6 * 2048, 4096},
    {"expert w2x6", DS4_DTYPE_Q2_K, 6 * 4096, 2048},
    {"expert w1x6", DS4_DTYPE_MXFP4, 6 * 2048, 4096},
    {"expert w1x6", DS4_DTYPE_Q4_K, 6 * 2048, 4096},
    {"hyper fn  ", DS4_DTYPE_F16, 24, 16384},
};

static int compare_double(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void report(double *gb_s, int n)
{
    qsort(gb_s, (size_t)n, sizeof(*gb_s), compare_double);
    printf("%7.2f GB/s (%.2f..%.2f)", gb_s[n / 2], gb_s[0], gb_s[n - 1]);
}

/* Moderate scales in every block, so that no product is infinite. */
static void fill_weights(uint8_t *data, size_t bytes, enum ds4_dtype dtype)
{
    const struct ds4_dtype_info *info = ds4_dtype_info(dtype);
    uint32_t state = 1;

    for (size_t i = 0; i < bytes; i++) {
        state = state * 1664525u + 1013904223u;
        data[i] = (uint8_t)(state >> 24);
    }
    for (size_t b = 0; b + (size_t)info->block_bytes <= bytes; b += (size_t)info->block_bytes) {
        uint16_t scale[2] = {ds4_f16_from_f32(0.01f), ds4_f16_from_f32(0.01f)};

        if (dtype == DS4_DTYPE_MXFP4)
            data[b] = 120;
        else if (dtype == DS4_DTYPE_Q2_K)
            memcpy(data + b + 80, scale, 4);
        else if (dtype == DS4_DTYPE_Q4_K)
            memcpy(data + b, scale, 4);
        else
            memcpy(data + b, scale, 2);
    }
}

struct run {
    const struct ds4_backend *cpu;
    struct ds4_device *dev;
    const struct shape *shape;
    uint8_t *weights;
    size_t bytes; /* of one copy */
    int n_copy;
    float *x, *y;
    int rounds;
};

static void time_gemm(const struct run *r, int32_t n_tok)
{
    const struct shape *s = r->shape;
    double gb_s[MAX_ROUNDS];

    for (int i = -1; i < r->rounds; i++) {
        struct ds4_gemm_args a = {.w = {r->weights + (size_t)((i + 1) % r->n_copy) * r->bytes,
                                        s->dtype, 1, s->n_row, s->n_col,
                                        r->bytes / (size_t)s->n_row},
                                  .n_group = 1,
                                  .x = ds4_tensor_2d(r->x, DS4_DTYPE_F32, n_tok, s->n_col),
                                  .y = ds4_tensor_2d(r->y, DS4_DTYPE_F32, n_tok, s->n_row)};
        int64_t start = ds4_clock_ns();

        r->cpu->gemm(r->dev, &a);
        if (i >= 0) /* the first call warms up */
            gb_s[i] = (double)r->bytes / (double)(ds4_clock_ns() - start);
    }
    report(gb_s, r->rounds);
}

static void time_memcpy(const struct run *r)
{
    double gb_s[MAX_ROUNDS];
    uint8_t *to = malloc(r->bytes);

    if (to == NULL)
        return;
    memset(to, 1, r->bytes);
    for (int i = 0; i < r->rounds; i++) {
        int64_t start = ds4_clock_ns();

        memcpy(to, r->weights + (size_t)(i % r->n_copy) * r->bytes, r->bytes);
        gb_s[i] = (double)r->bytes / (double)(ds4_clock_ns() - start);
    }
    printf("  memcpy, one thread        ");
    report(gb_s, r->rounds);
    printf("\n");
    free(to);
}

static struct ds4_device *open_device(const struct ds4_backend *cpu, enum ds4_isa isa,
                                      enum ds4_products products, int32_t n_thread)
{
    const struct ds4_device_config config = {
        .n_thread = n_thread, .isa = isa, .products = products};
    const struct ds4_limits limits = {.max_tok = MAX_TOK, .max_cols = 16384, .d_model = 4096};
    struct ds4_device *dev = cpu->open(&config, NULL);
    size_t bytes;
    void *scratch;

    if (dev == NULL)
        return NULL;
    bytes = cpu->scratch_bytes(dev, &limits);
    scratch = cpu->alloc(dev, bytes, "scratch", NULL);
    if (scratch == NULL) {
        cpu->close(dev);
        return NULL;
    }
    cpu->set_scratch(dev, scratch, bytes);
    return dev;
}

static void time_devices(struct run *r)
{
    static const char *const isa_name[] = {"auto", "scalar", "avx2", "avx512"};
    static const char *const products_name[] = {"exact", "fast"};

    for (int isa = DS4_ISA_SCALAR; isa <= DS4_ISA_AVX512; isa++) {
        for (int products = DS4_PRODUCTS_EXACT; products <= DS4_PRODUCTS_FAST; products++) {
            for (int32_t n_thread = 1; n_thread >= 0; n_thread--) { /* 0: all cores */
                r->dev =
                    open_device(r->cpu, (enum ds4_isa)isa, (enum ds4_products)products, n_thread);
                if (r->dev == NULL)
                    continue; /* the machine lacks the instruction set */
                printf("  %-6s %-5s %s  1 row ", isa_name[isa], products_name[products],
                       n_thread == 1 ? "1 thread " : "all cores");
                time_gemm(r, 1);
                printf("   %d rows ", MAX_TOK);
                time_gemm(r, MAX_TOK);
                printf("\n");
                fflush(stdout);
                r->cpu->close(r->dev);
            }
        }
    }
}

int main(int argc, char **argv)
{
    struct run r = {.cpu = ds4_backend_find("cpu"), .rounds = 9};
    struct ds4_device *dev = open_device(r.cpu, DS4_ISA_AUTO, DS4_PRODUCTS_EXACT, 0);

    if (argc > 1)
        r.rounds = (int)strtol(argv[1], NULL, 10);
    if (dev == NULL || r.rounds < 1 || r.rounds > MAX_ROUNDS) {
        fprintf(stderr, "usage: bench_kernels [ROUNDS 1..%d]\n", MAX_ROUNDS);
        return 1;
    }
    printf("machine: %s\ncommit: %s\n", r.cpu->describe(dev), DS4_COMMIT);
    r.cpu->close(dev);
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        const struct shape *s = &shapes[i];
        size_t row_bytes;

        if (ds4_dtype_row_bytes(s->dtype, s->n_col, &row_bytes, NULL) != 0)
            return 1;
        r.shape = s;
        r.bytes = row_bytes * (size_t)s->n_row;
        r.n_copy = (int)(ROTATED_BYTES / r.bytes) + 1;
        r.n_copy = r.n_copy > MAX_COPIES ? MAX_COPIES : r.n_copy;
        r.weights = malloc((size_t)r.n_copy * r.bytes);
        r.x = malloc((size_t)MAX_TOK * (size_t)s->n_col * sizeof(float));
        r.y = malloc((size_t)MAX_TOK * (size_t)s->n_row * sizeof(float));
        if (r.weights == NULL || r.x == NULL || r.y == NULL)
            return 1;
        fill_weights(r.weights, (size_t)r.n_copy * r.bytes, s->dtype);
        for (int32_t j = 0; j < MAX_TOK * s->n_col; j++)
            r.x[j] = (float)(j % 17 - 8) * 0.1f;
        printf("%s %s [%d, %d], %.1f MB\n", s->what, ds4_dtype_name(s->dtype), s->n_row, s->n_col,
               (double)r.bytes / 1e6);
        time_memcpy(&r);
        time_devices(&r);
        free(r.weights);
        free(r.x);
        free(r.y);
    }
    return 0;
}

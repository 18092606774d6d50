/* Speed of the CUDA backend's products and experts at the shapes of V4 Flash.
 *
 *   bench_cuda [DEVICE]
 *
 * Each line times one operation as a captured graph of several calls that rotate over weights (or
 * routings) larger together than the L2, so launches cost what they cost in a served step.  Bytes are
 * the weights that must be read, once; "of copy" compares with a device-to-device copy counted as bytes
 * read plus written.  Median of the replays, and their range. */
#include "kernels/cuda/device.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDS        21
#define CALLS         16 /* in one graph */
#define ROTATED_BYTES ((size_t)600 << 20)
#define MAX_TOK       2048
#define N_EXPERT      256
#define N_USED        6
#define D_MODEL       4096
#define D_EXPERT      2048

static const struct ds4_backend *cuda;
static double copy_gb_s;
static uint32_t seed = 1;

static void die(const char *what)
{
    fprintf(stderr, "bench_cuda: %s\n", what);
    exit(2);
}

static uint32_t next(void)
{
    seed = seed * 1664525u + 1013904223u;
    return seed >> 4;
}

static float uniform(float scale)
{
    return ((float)(next() & 0xffffff) * 0x1p-23f - 1.0f) * scale;
}

static void *take(struct ds4_device *dev, size_t bytes)
{
    struct ds4_err err = {};
    void *p = cuda->alloc(dev, bytes, "bench", &err);

    if (p == NULL)
        die(err.msg);
    return p;
}

/* ---- data ----------------------------------------------------------------------------------------- */

/* Random blocks with small scales; a few MiB repeated over the whole. */
static void fill_weight(struct ds4_device *dev, void *dst, size_t bytes, enum ds4_dtype dtype)
{
    static const int scale_at[DS4_N_DTYPES][2] = {
        {-1, -1}, {-1, -1},  {-1, -1}, {-1, -1}, {-1, -1},  {0, -1}, {0, -1},
        {80, 82}, {108, -1}, {0, 2},   {0, 2},   {208, -1}, {0, -1}, {-1, -1}};
    const size_t block = (size_t)ds4_dtype_info(dtype)->block_bytes;
    const size_t n = bytes < block << 15 ? bytes : block << 15;
    uint8_t *host = (uint8_t *)malloc(n);

    for (size_t i = 0; i < n; i++)
        host[i] = (uint8_t)(next() >> 9);
    for (size_t b = 0; b < n; b += block) {
        uint16_t half = ds4_f16_from_f32((float)(next() % 1000 + 1) * 1e-5f);

        if (dtype == DS4_DTYPE_MXFP4)
            host[b] = (uint8_t)(116 + host[b] % 4);
        if (dtype == DS4_DTYPE_F16)
            memcpy(host + b, &half, 2);
        for (int i = 0; i < 2; i++) {
            if (scale_at[dtype][i] >= 0)
                memcpy(host + b + scale_at[dtype][i], &half, 2);
        }
    }
    cuda->upload(dev, dst, host, n);
    cuda->sync(dev);
    for (size_t have = n; have < bytes; have *= 2)
        DS4_CUDA(cudaMemcpyAsync((uint8_t *)dst + have, dst,
                                 bytes - have < have ? bytes - have : have,
                                 cudaMemcpyDeviceToDevice, dev->stream));
    cuda->sync(dev);
    free(host);
}

static float *random_rows(struct ds4_device *dev, size_t n)
{
    float *host = (float *)malloc(n * sizeof(float)), *x = (float *)take(dev, n * sizeof(float));

    for (size_t i = 0; i < n; i++)
        host[i] = uniform(1.0f);
    cuda->upload(dev, x, host, n * sizeof(float));
    cuda->sync(dev);
    free(host);
    return x;
}

static void begin(struct ds4_device *dev, int32_t n)
{
    static int32_t zero[MAX_TOK], pos[MAX_TOK];
    static struct ds4_batch_entry entry;
    static struct ds4_batch batch;

    entry.n_row = n;
    entry.active = true;
    entry.cap_tok = MAX_TOK;
    batch = ds4_batch{n, zero, pos, zero, 1, &entry};
    cuda->begin(dev, &batch);
    cuda->sync(dev);
}

/* ---- time ----------------------------------------------------------------------------------------- */

static int compare_float(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;

    return (x > y) - (x < y);
}

/* Runs call(ctx, i) for i < CALLS as one graph; prints microseconds a call. */
static void measure(struct ds4_device *dev, const char *what, int32_t n, double bytes, double flops,
                    void (*call)(void *ctx, int i), void *ctx)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t start, stop;
    float us[ROUNDS];

    DS4_CUDA(cudaEventCreate(&start));
    DS4_CUDA(cudaEventCreate(&stop));
    call(ctx, 0); /* modules load, libraries choose */
    cuda->sync(dev);
    DS4_CUDA(cudaStreamBeginCapture(dev->stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < CALLS; i++)
        call(ctx, i);
    DS4_CUDA(cudaStreamEndCapture(dev->stream, &graph));
    DS4_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (int r = -2; r < ROUNDS; r++) {
        float ms;

        DS4_CUDA(cudaEventRecord(start, dev->stream));
        DS4_CUDA(cudaGraphLaunch(exec, dev->stream));
        DS4_CUDA(cudaEventRecord(stop, dev->stream));
        DS4_CUDA(cudaEventSynchronize(stop));
        DS4_CUDA(cudaEventElapsedTime(&ms, start, stop));
        if (r >= 0)
            us[r] = ms * 1e3f / CALLS;
    }
    qsort(us, ROUNDS, sizeof(us[0]), compare_float);
    printf(
        "%-34s x %-5d %9.2f us (%.2f..%.2f)  %8.2f MB %7.0f GB/s %5.1f %% of copy %7.1f TFLOP/s\n",
        what, n, us[ROUNDS / 2], us[0], us[ROUNDS - 1], bytes * 1e-6, bytes / us[ROUNDS / 2] * 1e-3,
        100.0 * bytes / us[ROUNDS / 2] * 1e-3 / copy_gb_s, flops / us[ROUNDS / 2] * 1e-6);
    DS4_CUDA(cudaGraphExecDestroy(exec));
    DS4_CUDA(cudaGraphDestroy(graph));
    DS4_CUDA(cudaEventDestroy(start));
    DS4_CUDA(cudaEventDestroy(stop));
}

static void measure_copy(struct ds4_device *dev)
{
    const size_t bytes = (size_t)1 << 30;
    uint8_t *a = (uint8_t *)take(dev, bytes), *b = (uint8_t *)take(dev, bytes);
    cudaEvent_t start, stop;
    float ms[ROUNDS];

    DS4_CUDA(cudaEventCreate(&start));
    DS4_CUDA(cudaEventCreate(&stop));
    for (int r = -2; r < ROUNDS; r++) {
        float t;

        DS4_CUDA(cudaEventRecord(start, dev->stream));
        DS4_CUDA(cudaMemcpyAsync(a, b, bytes, cudaMemcpyDeviceToDevice, dev->stream));
        DS4_CUDA(cudaEventRecord(stop, dev->stream));
        DS4_CUDA(cudaEventSynchronize(stop));
        DS4_CUDA(cudaEventElapsedTime(&t, start, stop));
        if (r >= 0)
            ms[r] = t;
    }
    qsort(ms, ROUNDS, sizeof(ms[0]), compare_float);
    copy_gb_s = 2.0 * (double)bytes / ms[ROUNDS / 2] * 1e-6;
    printf("copy of 1 GiB: %.0f GB/s read plus written\n", copy_gb_s);
}

static struct ds4_device *open_device(int32_t ordinal, enum ds4_products products)
{
    struct ds4_device_config config = {};
    struct ds4_limits l = {};
    struct ds4_err err = {};
    struct ds4_device *dev;
    size_t bytes;

    config.ordinal = ordinal;
    config.products = products;
    dev = cuda->open(&config, &err);
    if (dev == NULL)
        die(err.msg);
    l.max_tok = MAX_TOK;
    l.max_context = 1 << 14;
    l.d_model = D_MODEL;
    l.n_hyper = 4;
    l.n_head = 64;
    l.d_head = 512;
    l.n_index_head = 64;
    l.d_index = 128;
    l.top_k = 512;
    l.n_expert = N_EXPERT;
    l.n_used = N_USED;
    l.d_expert = D_EXPERT;
    l.max_cols = 32768;
    bytes = cuda->scratch_bytes(dev, &l);
    cuda->set_scratch(dev, take(dev, bytes), bytes);
    return dev;
}

/* ---- products --------------------------------------------------------------------------------------- */

struct gemm_shape {
    const char *what;
    enum ds4_dtype dtype;
    int32_t n_row, n_col, n_group;
    bool exact;
};

static const struct gemm_shape gemm_shapes[] = {
    {"q_a    Q8_0 [1024,4096]", DS4_DTYPE_Q8_0, 1024, 4096, 1, false},
    {"q_b    Q8_0 [32768,1024]", DS4_DTYPE_Q8_0, 32768, 1024, 1, false},
    {"o_a    Q8_0 [8192,4096]/8", DS4_DTYPE_Q8_0, 8192, 4096, 8, false},
    {"o_b    Q8_0 [4096,8192]", DS4_DTYPE_Q8_0, 4096, 8192, 1, false},
    {"head   Q8_0 [129280,4096]", DS4_DTYPE_Q8_0, 129280, 4096, 1, false},
    {"head   Q8_0 [129280,4096] exact", DS4_DTYPE_Q8_0, 129280, 4096, 1, true},
    {"router F16 [256,4096] exact", DS4_DTYPE_F16, 256, 4096, 1, true},
    {"compr. F16 [1024,4096] exact", DS4_DTYPE_F16, 1024, 4096, 1, true},
};

struct gemm_call {
    struct ds4_device *dev;
    struct ds4_gemm_args a;
    const uint8_t *w;
    size_t bytes;
    int n_copy;
};

static void call_gemm(void *ctx, int i)
{
    struct gemm_call *c = (struct gemm_call *)ctx;

    c->a.w.data = c->w + (size_t)(i % c->n_copy) * c->bytes;
    cuda->gemm(c->dev, &c->a);
}

static void bench_gemm(struct ds4_device *dev, const struct gemm_shape *s, const int32_t *rows)
{
    struct gemm_call c = {};
    struct ds4_err err = {};
    float *x = random_rows(dev, (size_t)MAX_TOK * s->n_col * s->n_group);
    float *y = (float *)take(dev, sizeof(float) * (size_t)MAX_TOK * s->n_row);

    c.dev = dev;
    c.a.w.dtype = s->dtype;
    c.a.w.n_stack = 1;
    c.a.w.n_row = s->n_row;
    c.a.w.n_col = s->n_col;
    c.a.n_group = s->n_group;
    c.a.exact = s->exact;
    if (ds4_dtype_row_bytes(s->dtype, s->n_col, &c.a.w.row_bytes, &err) != 0)
        die(err.msg);
    c.bytes = c.a.w.row_bytes * (size_t)s->n_row;
    c.n_copy = (int)(ROTATED_BYTES / c.bytes) + 1;
    c.n_copy = c.n_copy > CALLS ? CALLS : c.n_copy;
    c.w = (const uint8_t *)take(dev, c.bytes * (size_t)c.n_copy);
    fill_weight(dev, (void *)c.w, c.bytes * (size_t)c.n_copy, s->dtype);
    for (; *rows > 0; rows++) {
        if (s->n_row > 100000 && *rows > 64)
            continue; /* the head never sees a whole chunk */
        begin(dev, *rows);
        c.a.x = ds4_tensor_2d(x, DS4_DTYPE_F32, *rows, s->n_col * s->n_group);
        c.a.y = ds4_tensor_2d(y, DS4_DTYPE_F32, *rows, s->n_row);
        measure(dev, s->what, *rows, (double)c.bytes, 2.0 * *rows * s->n_row * s->n_col, call_gemm,
                &c);
    }
}

/* ---- experts ---------------------------------------------------------------------------------------- */

struct moe_call {
    struct ds4_device *dev;
    struct ds4_moe_args a;
    const int32_t *id; /* CALLS routings */
    size_t n_use;
};

static void call_moe(void *ctx, int i)
{
    struct moe_call *c = (struct moe_call *)ctx;

    c->a.id = c->id + (size_t)i * c->n_use;
    cuda->moe(c->dev, &c->a);
}

static struct ds4_weight make_weight(struct ds4_device *dev, enum ds4_dtype dtype, int32_t n_stack,
                                     int32_t n_row, int32_t n_col)
{
    struct ds4_weight w = {NULL, dtype, n_stack, n_row, n_col, 0};
    struct ds4_err err = {};
    void *data;

    if (ds4_dtype_row_bytes(dtype, n_col, &w.row_bytes, &err) != 0)
        die(err.msg);
    data = take(dev, w.row_bytes * (size_t)n_row * (size_t)n_stack);
    fill_weight(dev, data, w.row_bytes * (size_t)n_row * (size_t)n_stack, dtype);
    w.data = data;
    return w;
}

/* Distinct rising ids per token, spread over all experts; returns the experts touched on average. */
static double route(struct ds4_device *dev, struct moe_call *c, int32_t n)
{
    const size_t total = CALLS * c->n_use;
    int32_t *host = (int32_t *)malloc(total * sizeof(*host)), *id;
    long touched = 0;

    for (int i = 0; i < CALLS; i++) {
        bool seen[N_EXPERT] = {};

        for (int32_t t = 0; t < n; t++) {
            bool mine[N_EXPERT] = {};
            int32_t *at = host + (size_t)i * c->n_use + (size_t)t * N_USED;

            for (int k = 0; k < N_USED;) {
                uint32_t e = next() % N_EXPERT;

                k += !mine[e];
                touched += !seen[e];
                mine[e] = seen[e] = true;
            }
            for (int32_t e = 0; e < N_EXPERT; e++) {
                if (mine[e])
                    *at++ = e;
            }
        }
    }
    id = (int32_t *)take(dev, total * sizeof(*id));
    cuda->upload(dev, id, host, total * sizeof(*id));
    cuda->sync(dev);
    free(host);
    c->id = id;
    return (double)touched / CALLS;
}

static double bytes_of(const struct ds4_weight *w)
{
    return (double)w->row_bytes * w->n_row;
}

static void bench_moe(struct ds4_device *dev, const char *what, enum ds4_dtype gate,
                      enum ds4_dtype down, const int32_t *rows)
{
    struct moe_call c = {};
    float *x = random_rows(dev, (size_t)MAX_TOK * D_MODEL);
    float *weight = random_rows(dev, (size_t)MAX_TOK * N_USED);

    c.dev = dev;
    c.a.gate = make_weight(dev, gate, N_EXPERT, D_EXPERT, D_MODEL);
    c.a.up = make_weight(dev, gate, N_EXPERT, D_EXPERT, D_MODEL);
    c.a.down = make_weight(dev, down, N_EXPERT, D_MODEL, D_EXPERT);
    c.a.shared_gate = make_weight(dev, DS4_DTYPE_Q8_0, 1, D_EXPERT, D_MODEL);
    c.a.shared_up = make_weight(dev, DS4_DTYPE_Q8_0, 1, D_EXPERT, D_MODEL);
    c.a.shared_down = make_weight(dev, DS4_DTYPE_Q8_0, 1, D_MODEL, D_EXPERT);
    c.a.n_used = N_USED;
    c.a.clamp = c.a.shared_clamp = 10.0f;
    c.a.weight = weight;
    for (; *rows > 0; rows++) {
        const double one = bytes_of(&c.a.gate) + bytes_of(&c.a.up) + bytes_of(&c.a.down);
        const double shared =
            bytes_of(&c.a.shared_gate) + bytes_of(&c.a.shared_up) + bytes_of(&c.a.shared_down);
        double touched;
        char line[96];

        c.n_use = (size_t)*rows * N_USED;
        touched = route(dev, &c, *rows);
        begin(dev, *rows);
        c.a.x = ds4_tensor_2d(x, DS4_DTYPE_F32, *rows, D_MODEL);
        c.a.y =
            ds4_tensor_2d(random_rows(dev, (size_t)*rows * D_MODEL), DS4_DTYPE_F32, *rows, D_MODEL);
        snprintf(line, sizeof(line), "%s, %.1f experts", what, touched);
        measure(dev, line, *rows, touched * one + shared,
                6.0 * *rows * (N_USED + 1) * (double)D_MODEL * D_EXPERT, call_moe, &c);
    }
}

int main(int argc, char **argv)
{
    static const int32_t dense[] = {1, 2, 4, 6, 8, 16, 64, 256, 2048, 0};
    static const int32_t experts[] = {1, 2, 6, 16, 64, 256, 2048, 0};
    const int32_t ordinal = argc > 1 ? (int32_t)strtol(argv[1], NULL, 10) : 0;
    struct ds4_device *dev;

    setvbuf(stdout, NULL, _IOLBF, 0);
    cuda = ds4_backend_find("cuda");
    if (cuda == NULL)
        die("built without CUDA");
    dev = open_device(ordinal, DS4_PRODUCTS_FAST);
    printf("%s\n", cuda->describe(dev));
    measure_copy(dev);
    cuda->close(dev);
    dev = open_device(ordinal, DS4_PRODUCTS_FAST);
    bench_moe(dev, "experts IQ2_XXS/Q2_K", DS4_DTYPE_IQ2_XXS, DS4_DTYPE_Q2_K, experts);
    cuda->close(dev);
    dev = open_device(ordinal, DS4_PRODUCTS_FAST);
    bench_moe(dev, "experts MXFP4", DS4_DTYPE_MXFP4, DS4_DTYPE_MXFP4, experts);
    cuda->close(dev);
    dev = open_device(ordinal, DS4_PRODUCTS_FAST);
    bench_moe(dev, "experts Q4_K", DS4_DTYPE_Q4_K, DS4_DTYPE_Q4_K, experts);
    cuda->close(dev);
    for (size_t i = 0; i < sizeof(gemm_shapes) / sizeof(gemm_shapes[0]); i++) {
        dev = open_device(ordinal, DS4_PRODUCTS_FAST);
        bench_gemm(dev, &gemm_shapes[i], dense);
        cuda->close(dev);
    }
    return 0;
}

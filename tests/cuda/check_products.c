/* Products, experts and embedding of the CUDA backend against the CPU's, on a machine with a GPU.
 *
 *   check_products [DEVICE]
 *
 * A plain program, because machines lent for GPU work have no test library.  Every case draws fresh
 * weights and inputs, poisons the output, runs twice (the same bits must come back) and compares by
 * relative L2 norm with the CPU's exact products.  One line a case, last "N passed, N failed". */
#include "kernels/backend.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* f32 sums in another order: about sqrt(n) roundings of 2^-24. */
#define EXACT_TOLERANCE 1e-5
/* int8 inputs by blocks of 32 (about 0.7 %), or bf16 weights and inputs (about 0.3 %). */
#define FAST_TOLERANCE 1.5e-2
#define POISON         0xff /* a NaN: what stays unwritten is no number */
#define MAX_TOK        2100
#define MAX_ENTRY      3

static int n_passed, n_failed;
static const struct ds4_backend *cpu, *cuda;
static struct ds4_device *cpu_dev, *exact_dev, *fast_dev;

static void verdict(bool ok, const char *what, double error)
{
    printf("%s  %-76s error %.2e\n", ok ? "ok  " : "FAIL", what, error);
    n_passed += ok;
    n_failed += !ok;
}

static void die(const char *what)
{
    fprintf(stderr, "check_products: %s\n", what);
    exit(2);
}

/* ---- numbers ------------------------------------------------------------------------------------ */

static uint32_t seed = 1;

static uint32_t next(void)
{
    seed = seed * 1664525u + 1013904223u;
    return seed >> 4;
}

static float uniform(float scale)
{
    return ((float)(next() & 0xffffff) * 0x1p-23f - 1.0f) * scale;
}

static void fill(float *x, size_t n, float scale)
{
    for (size_t i = 0; i < n; i++)
        x[i] = uniform(scale);
}

/* Random blocks with moderate scales. */
static void fill_weight(uint8_t *data, size_t bytes, enum ds4_dtype dtype)
{
    static const int scale_at[DS4_N_DTYPES][2] = {
        [DS4_DTYPE_Q8_0] = {0, -1},   [DS4_DTYPE_Q4_0] = {0, -1},   [DS4_DTYPE_Q2_K] = {80, 82},
        [DS4_DTYPE_Q3_K] = {108, -1}, [DS4_DTYPE_Q4_K] = {0, 2},    [DS4_DTYPE_Q5_K] = {0, 2},
        [DS4_DTYPE_Q6_K] = {208, -1}, [DS4_DTYPE_IQ2_XXS] = {0, -1}};
    const struct ds4_dtype_info *info = ds4_dtype_info(dtype);

    for (size_t i = 0; i < bytes; i++)
        data[i] = (uint8_t)(next() >> 9);
    for (size_t b = 0; b < bytes; b += (size_t)info->block_bytes) {
        float value = uniform(1.0f);
        uint16_t half = dtype == DS4_DTYPE_F16 ? ds4_f16_from_f32(value) : ds4_bf16_from_f32(value);

        if (dtype == DS4_DTYPE_F32)
            memcpy(data + b, &value, 4);
        else if (info->block_elems == 1)
            memcpy(data + b, &half, 2);
        else if (dtype == DS4_DTYPE_MXFP4)
            data[b] = (uint8_t)(118 + data[b] % 6);
        else
            for (int i = 0; i < 2; i++) {
                half = ds4_f16_from_f32((float)(next() % 1000 + 1) * 1e-4f);
                if (scale_at[dtype][i] >= 0)
                    memcpy(data + b + scale_at[dtype][i], &half, 2);
            }
    }
}

/* |a - b| / |b|; infinite when one is finite where the other is not, or nothing is left. */
static double distance(const float *a, const float *b, size_t n)
{
    double error = 0.0, norm = 0.0;

    for (size_t i = 0; i < n; i++) {
        if (!isfinite(a[i]) || !isfinite(b[i])) {
            if (isfinite(a[i]) != isfinite(b[i]))
                return INFINITY;
            continue;
        }
        error += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return norm > 0.0 ? sqrt(error / norm) : error > 0.0 ? INFINITY : 0.0;
}

/* ---- devices ------------------------------------------------------------------------------------ */

static void *must(void *p)
{
    return p != NULL ? p : (die("out of memory"), NULL);
}

static struct ds4_device *open_device(const struct ds4_backend *b, int32_t ordinal,
                                      enum ds4_products products)
{
    const struct ds4_device_config config = {.ordinal = ordinal, .products = products};
    const struct ds4_limits limits = {.max_tok = MAX_TOK,
                                      .max_context = 4096,
                                      .d_model = 1024,
                                      .n_hyper = 4,
                                      .n_head = 8,
                                      .d_head = 128,
                                      .n_index_head = 8,
                                      .d_index = 128,
                                      .top_k = 64,
                                      .n_expert = 256,
                                      .n_used = 8,
                                      .d_expert = 1024,
                                      .max_cols = 8192};
    struct ds4_err err = {0};
    struct ds4_device *dev = b->open(&config, &err);
    size_t bytes;
    void *scratch;

    if (dev == NULL)
        die(err.msg);
    bytes = b->scratch_bytes(dev, &limits);
    scratch = b->alloc(dev, bytes, "scratch", &err);
    if (scratch == NULL)
        die(err.msg);
    b->set_scratch(dev, scratch, bytes);
    return dev;
}

/* A copy of n bytes in the backend's memory, `lead` bytes off alignment. */
static void *place(const struct ds4_backend *b, struct ds4_device *dev, const void *host, size_t n,
                   size_t lead)
{
    struct ds4_err err = {0};
    uint8_t *p = b->alloc(dev, n + lead, "check", &err);

    if (p == NULL)
        die(err.msg);
    b->upload(dev, p + lead, host, n);
    b->sync(dev);
    return p + lead;
}

/* ---- batches ------------------------------------------------------------------------------------ */

struct rows {
    struct ds4_batch batch;
    struct ds4_batch_entry entry[MAX_ENTRY];
    int32_t token[MAX_TOK], pos[MAX_TOK], entry_of[MAX_TOK];
};

/* One active entry; with `holes` an inactive one in the middle. */
static struct rows *make_rows(int32_t n, int32_t n_vocab, bool holes)
{
    struct rows *r = must(calloc(1, sizeof(*r)));
    int32_t n_entry = holes && n >= 3 ? 3 : 1, at = 0;

    for (int32_t e = 0; e < n_entry; e++) {
        int32_t end = e == n_entry - 1 ? n : n * (e + 1) / 3;

        r->entry[e] = (struct ds4_batch_entry){
            .slot = e, .first_row = at, .n_row = end - at, .active = e != 1, .cap_tok = 4096};
        for (; at < end; at++) {
            r->token[at] = (int32_t)(next() % (uint32_t)n_vocab);
            r->pos[at] = at - r->entry[e].first_row;
            r->entry_of[at] = e;
        }
    }
    r->batch = (struct ds4_batch){.n_tok = n,
                                  .token = r->token,
                                  .pos = r->pos,
                                  .entry_of = r->entry_of,
                                  .n_entry = n_entry,
                                  .entry = r->entry};
    return r;
}

static bool is_active(const struct rows *r, int32_t t)
{
    return r->entry[r->entry_of[t]].active;
}

/* ---- gemm --------------------------------------------------------------------------------------- */

struct gemm_case {
    enum ds4_dtype dtype;
    int32_t n_row, n_col, n_group;
    int32_t w_lead, x_lead, x_pad, y_pad; /* bytes, values */
    bool x_bf16, damage;
};

static const struct gemm_case gemm_cases[] = {
    {DS4_DTYPE_F32, 24, 4096, 1, 0, 0, 0, 0, false, false},
    {DS4_DTYPE_F32, 7, 33, 1, 4, 1, 3, 5, false, false},
    {DS4_DTYPE_F32, 1, 1, 1, 0, 0, 0, 0, false, false},
    {DS4_DTYPE_F16, 256, 1024, 1, 0, 0, 0, 0, false, false},
    {DS4_DTYPE_F16, 64, 100, 2, 2, 0, 0, 0, false, false},
    {DS4_DTYPE_BF16, 30, 257, 3, 2, 1, 0, 1, false, false},
    {DS4_DTYPE_BF16, 96, 512, 1, 0, 0, 0, 0, true, false},
    {DS4_DTYPE_Q8_0, 130, 512, 1, 0, 0, 0, 0, false, false},
    {DS4_DTYPE_Q8_0, 1024, 4096, 1, 0, 0, 0, 0, true, false},
    {DS4_DTYPE_Q8_0, 520, 1024, 8, 0, 0, 0, 0, false, false},
    {DS4_DTYPE_Q8_0, 65, 96, 1, 2, 1, 3, 5, false, false},
    {DS4_DTYPE_Q8_0, 17003, 96, 1, 2, 0, 0, 0, false, false}, /* two rows a warp: bits as of one */
    {DS4_DTYPE_Q8_0, 37, 4096, 1, 34, 0, 0, 0, false, true},
    {DS4_DTYPE_Q4_0, 33, 96, 1, 2, 0, 0, 0, false, false},
    {DS4_DTYPE_Q2_K, 259, 2048, 1, 0, 0, 0, 0, false, false},
    {DS4_DTYPE_Q2_K, 20, 512, 1, 4, 1, 1, 1, false, true},
    {DS4_DTYPE_Q3_K, 20, 512, 2, 2, 0, 0, 0, false, false},
    {DS4_DTYPE_Q4_K, 130, 768, 1, 0, 0, 0, 0, false, false},
    {DS4_DTYPE_Q4_K, 19, 256, 1, 16, 0, 0, 0, true, false},
    {DS4_DTYPE_Q5_K, 20, 256, 1, 0, 0, 0, 0, false, false},
    {DS4_DTYPE_Q6_K, 36, 1280, 1, 2, 0, 0, 0, false, false},
    {DS4_DTYPE_IQ2_XXS, 200, 4096, 1, 0, 0, 0, 0, false, false},
    {DS4_DTYPE_IQ2_XXS, 41, 768, 1, 2, 1, 1, 1, false, true},
    {DS4_DTYPE_MXFP4, 130, 2048, 1, 0, 0, 0, 0, false, false},
    {DS4_DTYPE_MXFP4, 47, 160, 1, 17, 0, 0, 0, false, false},
};
static const int32_t row_counts[] = {1, 2, 3, 6, 8, 9, 33, 64, 513};

/* Runs a product into poisoned memory and brings y back, n rows of y_stride. */
static void run_gemm(const struct ds4_backend *b, struct ds4_device *dev,
                     const struct ds4_gemm_args *a, const struct rows *r, float *y)
{
    size_t bytes = sizeof(float) * (size_t)(a->x.shape[0] * a->y.stride[0]);

    memset(y, POISON, bytes);
    b->upload(dev, a->y.data, y, bytes);
    b->begin(dev, &r->batch);
    b->gemm(dev, a);
    b->sync(dev);
    b->download(dev, y, a->y.data, bytes);
}

/* Views of one case in one backend's memory. */
static struct ds4_gemm_args gemm_args(const struct ds4_backend *b, struct ds4_device *dev,
                                      const struct gemm_case *c, int32_t n, bool exact,
                                      const void *w, size_t row_bytes, const void *x,
                                      size_t x_bytes)
{
    const enum ds4_dtype x_dtype = c->x_bf16 ? DS4_DTYPE_BF16 : DS4_DTYPE_F32;
    const size_t x_size = c->x_bf16 ? 2 : 4, y_stride = (size_t)(c->n_row + c->y_pad);
    float *blank = must(calloc((size_t)n * y_stride, sizeof(float)));
    struct ds4_gemm_args a = {.n_group = c->n_group, .exact = exact};

    a.w = (struct ds4_weight){.dtype = c->dtype,
                              .n_stack = 1,
                              .n_row = c->n_row,
                              .n_col = c->n_col,
                              .row_bytes = row_bytes};
    a.w.data = place(b, dev, w, row_bytes * (size_t)c->n_row, (size_t)c->w_lead);
    a.x = ds4_tensor_2d(place(b, dev, x, x_bytes, x_size * (size_t)c->x_lead), x_dtype, n,
                        c->n_group * c->n_col);
    a.x.stride[0] += c->x_pad;
    a.y = ds4_tensor_2d(place(b, dev, blank, sizeof(float) * (size_t)n * y_stride,
                              sizeof(float) * (size_t)(c->y_pad > 0)),
                        DS4_DTYPE_F32, n, c->n_row);
    a.y.stride[0] = (int64_t)y_stride;
    free(blank);
    return a;
}

/* Rows alone give the bits they gave in company. */
static bool rows_stand_alone(struct ds4_device *dev, const struct ds4_gemm_args *a,
                             const struct rows *r, const float *y)
{
    float *one = must(malloc(sizeof(float) * (size_t)a->y.stride[0]));
    bool same = true;

    for (int32_t t = 0; t < a->x.shape[0]; t++) {
        struct ds4_gemm_args b = *a;
        size_t size = a->x.dtype == DS4_DTYPE_BF16 ? 2 : 4;

        b.x.data = (uint8_t *)a->x.data + (size_t)t * (size_t)a->x.stride[0] * size;
        b.x.shape[0] = b.y.shape[0] = 1;
        run_gemm(cuda, dev, &b, r, one);
        same &= memcmp(one, y + t * a->y.stride[0], sizeof(float) * (size_t)a->w.n_row) == 0;
    }
    free(one);
    return same;
}

static void check_gemm_on(struct ds4_device *dev, const struct gemm_case *c, int32_t n,
                          const struct ds4_gemm_args *a, const struct rows *r, const float *want)
{
    const bool fast = dev == fast_dev;
    const size_t y_stride = (size_t)a->y.stride[0], n_y = (size_t)n * y_stride;
    float *y = must(malloc(sizeof(float) * n_y)), *again = must(malloc(sizeof(float) * n_y));
    bool same, alone = true;
    double error;
    char what[160];

    run_gemm(cuda, dev, a, r, y);
    run_gemm(cuda, dev, a, r, again);
    same = memcmp(y, again, sizeof(float) * n_y) == 0;
    error = distance(y, want, n_y);
    if (n <= 8)
        alone = rows_stand_alone(dev, a, r, y);
    snprintf(what, sizeof(what), "gemm %-5s %-7s [%d,%d]/%d x %d%s%s%s", fast ? "fast" : "exact",
             ds4_dtype_name(c->dtype), c->n_row, c->n_col, c->n_group, n,
             c->damage ? " with NaN and Inf" : "", same ? "" : " (bits differ from run to run)",
             alone ? "" : " (a row depends on its company)");
    verdict(same && alone && error <= (fast ? FAST_TOLERANCE : EXACT_TOLERANCE), what, error);
    free(again);
    free(y);
}

static void check_gemm(const struct gemm_case *c, int32_t n)
{
    const size_t x_stride = (size_t)(c->n_group * c->n_col + c->x_pad), n_x = (size_t)n * x_stride;
    const size_t n_y = (size_t)n * (size_t)(c->n_row + c->y_pad), x_size = c->x_bf16 ? 2 : 4;
    struct rows *r = make_rows(n, 16, false);
    float *x = must(malloc(sizeof(float) * n_x)), *want = must(malloc(sizeof(float) * n_y));
    uint16_t *half = must(malloc(sizeof(uint16_t) * n_x));
    const void *stored = c->x_bf16 ? (const void *)half : x;
    struct ds4_gemm_args a;
    struct ds4_err err = {0};
    size_t row_bytes;
    uint8_t *w;

    if (ds4_dtype_row_bytes(c->dtype, c->n_col, &row_bytes, &err) != 0)
        die(err.msg);
    w = must(malloc(row_bytes * (size_t)c->n_row));
    fill_weight(w, row_bytes * (size_t)c->n_row, c->dtype);
    fill(x, n_x, 3.0f);
    if (c->damage) {
        x[(size_t)(n / 2) * x_stride + 40] = NAN;
        x[(size_t)(n - 1) * x_stride + 7] = INFINITY;
    }
    for (size_t i = 0; c->x_bf16 && i < n_x; i++)
        half[i] = ds4_bf16_from_f32(x[i]);
    a = gemm_args(cpu, cpu_dev, c, n, true, w, row_bytes, stored, n_x * x_size);
    run_gemm(cpu, cpu_dev, &a, r, want);
    a = gemm_args(cuda, exact_dev, c, n, false, w, row_bytes, stored, n_x * x_size);
    check_gemm_on(exact_dev, c, n, &a, r, want);
    a = gemm_args(cuda, fast_dev, c, n, false, w, row_bytes, stored, n_x * x_size);
    check_gemm_on(fast_dev, c, n, &a, r, want);
    free(w);
    free(want);
    free(half);
    free(x);
    free(r);
}

/* ---- experts -------------------------------------------------------------------------------------- */

struct moe_case {
    enum ds4_dtype gate, up, down, shared;
    int32_t n_expert, n_used, d, d_expert, d_shared;
    bool odd_ids; /* out of range and twice the same */
};

static const struct moe_case moe_cases[] = {
    {DS4_DTYPE_IQ2_XXS, DS4_DTYPE_IQ2_XXS, DS4_DTYPE_Q2_K, DS4_DTYPE_Q8_0, 32, 6, 512, 256, 256,
     false},
    {DS4_DTYPE_MXFP4, DS4_DTYPE_MXFP4, DS4_DTYPE_MXFP4, DS4_DTYPE_Q8_0, 256, 6, 256, 128, 128,
     false},
    {DS4_DTYPE_Q4_K, DS4_DTYPE_Q4_K, DS4_DTYPE_Q4_K, DS4_DTYPE_Q8_0, 20, 6, 256, 512, 256, true},
    {DS4_DTYPE_Q8_0, DS4_DTYPE_Q8_0, DS4_DTYPE_Q8_0, DS4_DTYPE_Q8_0, 8, 3, 256, 256, 256, true},
    {DS4_DTYPE_IQ2_XXS, DS4_DTYPE_Q4_K, DS4_DTYPE_Q6_K, DS4_DTYPE_Q8_0, 9, 3, 256, 256, 768, true},
    {DS4_DTYPE_BF16, DS4_DTYPE_BF16, DS4_DTYPE_BF16, DS4_DTYPE_F16, 8, 2, 64, 96, 32, true},
    {DS4_DTYPE_F32, DS4_DTYPE_F32, DS4_DTYPE_F32, DS4_DTYPE_F32, 5, 2, 36, 20, 12, false},
};
static const int32_t moe_rows[] = {1, 6, 64, 65, 513, 2100};

static struct ds4_weight stack(const struct ds4_backend *b, struct ds4_device *dev,
                               const uint8_t *data, enum ds4_dtype dtype, int32_t n_stack,
                               int32_t n_row, int32_t n_col)
{
    struct ds4_weight w = {.dtype = dtype, .n_stack = n_stack, .n_row = n_row, .n_col = n_col};
    struct ds4_err err = {0};

    if (ds4_dtype_row_bytes(dtype, n_col, &w.row_bytes, &err) != 0)
        die(err.msg);
    w.data = place(b, dev, data, w.row_bytes * (size_t)n_row * (size_t)n_stack, 0);
    return w;
}

static uint8_t *random_stack(enum ds4_dtype dtype, int32_t n_stack, int32_t n_row, int32_t n_col)
{
    struct ds4_err err = {0};
    size_t row_bytes;
    uint8_t *data;

    if (ds4_dtype_row_bytes(dtype, n_col, &row_bytes, &err) != 0)
        die(err.msg);
    data = must(malloc(row_bytes * (size_t)n_row * (size_t)n_stack));
    fill_weight(data, row_bytes * (size_t)n_row * (size_t)n_stack, dtype);
    return data;
}

/* Host side of a case. */
struct moe_data {
    uint8_t *gate, *up, *down, *s_gate, *s_up, *s_down;
    float *x, *weight;
    int32_t *id;
};

static void route_rows(const struct moe_case *c, int32_t n, struct moe_data *m)
{
    m->id = must(malloc(sizeof(int32_t) * (size_t)(n * c->n_used)));
    m->weight = must(malloc(sizeof(float) * (size_t)(n * c->n_used)));
    for (int32_t i = 0; i < n * c->n_used; i++) {
        int32_t k = i % c->n_used;

        /* Rising: one of n_expert / n_used in each stripe. */
        m->id[i] =
            k * (c->n_expert / c->n_used) + (int32_t)(next() % (uint32_t)(c->n_expert / c->n_used));
        m->weight[i] = 0.1f + fabsf(uniform(0.5f));
        if (c->odd_ids && i % 7 == 3) {
            m->id[i] = i % 2 == 0 ? -1 - i : c->n_expert + i;
            m->weight[i] = 0.0f;
        } else if (c->odd_ids && k > 0 && i % 5 == 1) {
            m->id[i] = m->id[i - 1];
        }
    }
}

static struct moe_data moe_data(const struct moe_case *c, int32_t n)
{
    struct moe_data m;

    m.gate = random_stack(c->gate, c->n_expert, c->d_expert, c->d);
    m.up = random_stack(c->up, c->n_expert, c->d_expert, c->d);
    m.down = random_stack(c->down, c->n_expert, c->d, c->d_expert);
    m.s_gate = random_stack(c->shared, 1, c->d_shared, c->d);
    m.s_up = random_stack(c->shared, 1, c->d_shared, c->d);
    m.s_down = random_stack(c->shared, 1, c->d, c->d_shared);
    m.x = must(malloc(sizeof(float) * (size_t)(n * c->d)));
    fill(m.x, (size_t)(n * c->d), 0.3f);
    route_rows(c, n, &m);
    return m;
}

static void run_moe(const struct ds4_backend *b, struct ds4_device *dev,
                    const struct ds4_moe_args *a, float *y)
{
    size_t bytes = sizeof(float) * (size_t)(a->batch->n_tok * a->down.n_row);

    memset(y, POISON, bytes);
    b->upload(dev, a->y.data, y, bytes);
    b->begin(dev, a->batch);
    b->moe(dev, a);
    b->sync(dev);
    b->download(dev, y, a->y.data, bytes);
}

static struct ds4_moe_args moe_args(const struct ds4_backend *b, struct ds4_device *dev,
                                    const struct moe_case *c, int32_t n, const struct moe_data *m,
                                    const struct rows *r)
{
    const size_t x_bytes = sizeof(float) * (size_t)(n * c->d), n_use = (size_t)(n * c->n_used);
    struct ds4_moe_args a = {
        .batch = &r->batch, .n_used = c->n_used, .clamp = 10.0f, .shared_clamp = 7.0f};

    a.gate = stack(b, dev, m->gate, c->gate, c->n_expert, c->d_expert, c->d);
    a.up = stack(b, dev, m->up, c->up, c->n_expert, c->d_expert, c->d);
    a.down = stack(b, dev, m->down, c->down, c->n_expert, c->d, c->d_expert);
    a.shared_gate = stack(b, dev, m->s_gate, c->shared, 1, c->d_shared, c->d);
    a.shared_up = stack(b, dev, m->s_up, c->shared, 1, c->d_shared, c->d);
    a.shared_down = stack(b, dev, m->s_down, c->shared, 1, c->d, c->d_shared);
    a.x = ds4_tensor_2d(place(b, dev, m->x, x_bytes, 0), DS4_DTYPE_F32, n, c->d);
    a.y = ds4_tensor_2d(place(b, dev, m->x, x_bytes, 0), DS4_DTYPE_F32, n, c->d);
    a.id = place(b, dev, m->id, sizeof(int32_t) * n_use, 0);
    a.weight = place(b, dev, m->weight, sizeof(float) * n_use, 0);
    return a;
}

/* Tokens alone give the bits they gave in company: to 16 they do, and to 64 where all experts stream. */
static bool tokens_stand_alone(struct ds4_device *dev, const struct moe_case *c,
                               const struct ds4_moe_args *a, const struct rows *r, const float *y)
{
    struct rows *alone = make_rows(1, 16, false);
    float *one = must(malloc(sizeof(float) * (size_t)c->d));
    bool same = true;

    for (int32_t t = 0; t < a->batch->n_tok; t++) {
        struct ds4_moe_args b = *a;

        if (!is_active(r, t))
            continue;
        b.batch = &alone->batch;
        b.x.data = (float *)a->x.data + (size_t)t * (size_t)c->d;
        b.x.shape[0] = b.y.shape[0] = 1;
        b.id = a->id + t * c->n_used;
        b.weight = a->weight + t * c->n_used;
        run_moe(cuda, dev, &b, one);
        same &= memcmp(one, y + (size_t)t * (size_t)c->d, sizeof(float) * (size_t)c->d) == 0;
    }
    free(one), free(alone);
    return same;
}

static void check_moe(const struct moe_case *c, int32_t n)
{
    struct rows *r = make_rows(n, 16, true);
    struct moe_data m = moe_data(c, n);
    const size_t n_y = (size_t)(n * c->d);
    float *want = must(malloc(sizeof(float) * n_y)), *y = must(malloc(sizeof(float) * n_y));
    float *again = must(malloc(sizeof(float) * n_y));
    struct ds4_moe_args a = moe_args(cpu, cpu_dev, c, n, &m, r);
    const bool fused = c->gate == c->up && c->shared == DS4_DTYPE_Q8_0;

    run_moe(cpu, cpu_dev, &a, want);
    for (int fast = 0; fast < 2; fast++) {
        struct ds4_device *dev = fast ? fast_dev : exact_dev;
        bool same, kept = true, alone = true;
        double error;
        char what[160];

        a = moe_args(cuda, dev, c, n, &m, r);
        run_moe(cuda, dev, &a, y);
        run_moe(cuda, dev, &a, again);
        same = memcmp(y, again, sizeof(float) * n_y) == 0;
        for (int32_t t = 0; t < n; t++) {
            const uint8_t *row = (const uint8_t *)(y + (size_t)t * (size_t)c->d);

            for (size_t i = 0; !is_active(r, t) && i < sizeof(float) * (size_t)c->d; i++)
                kept &= row[i] == POISON;
        }
        if (n <= 16 || (fast && n <= 64 && fused))
            alone = tokens_stand_alone(dev, c, &a, r, y);
        /* Inactive rows are poison in both and do not count. */
        error = distance(y, want, n_y);
        snprintf(what, sizeof(what), "moe  %-5s %s/%s/%s %d of %d, d %d, d_expert %d x %d%s%s%s%s",
                 fast ? "fast" : "exact", ds4_dtype_name(c->gate), ds4_dtype_name(c->up),
                 ds4_dtype_name(c->down), c->n_used, c->n_expert, c->d, c->d_expert, n,
                 c->odd_ids ? " odd ids" : "", same ? "" : " (bits differ)",
                 kept ? "" : " (inactive row written)",
                 alone ? "" : " (a token depends on its company)");
        verdict(same && kept && alone && error <= (fast ? 2 * FAST_TOLERANCE : 2 * EXACT_TOLERANCE),
                what, error);
    }
    free(m.gate), free(m.up), free(m.down), free(m.s_gate), free(m.s_up), free(m.s_down);
    free(m.x), free(m.weight), free(m.id);
    free(want), free(y), free(again), free(r);
}

/* ---- embedding ------------------------------------------------------------------------------------ */

static void check_embed(enum ds4_dtype dtype, enum ds4_dtype stream)
{
    enum { N_VOCAB = 50, D = 512, N_HYPER = 4, N = 7 };
    const size_t size = stream == DS4_DTYPE_BF16 ? 2 : 4, bytes = size * N * N_HYPER * D;
    struct rows *r = make_rows(N, N_VOCAB, true);
    uint8_t *data = random_stack(dtype, 1, N_VOCAB, D);
    uint8_t *out[2] = {must(malloc(bytes)), must(malloc(bytes))};
    char what[160];

    for (int i = 0; i < 2; i++) {
        const struct ds4_backend *b = i == 0 ? cpu : cuda;
        struct ds4_device *dev = i == 0 ? cpu_dev : exact_dev;
        struct ds4_embed_args a = {.batch = &r->batch,
                                   .w = stack(b, dev, data, dtype, 1, N_VOCAB, D)};

        memset(out[i], POISON, bytes);
        a.x = ds4_tensor_3d(place(b, dev, out[i], bytes, 0), stream, N, N_HYPER, D);
        b->begin(dev, &r->batch);
        b->embed(dev, &a);
        b->sync(dev);
        b->download(dev, out[i], a.x.data, bytes);
    }
    snprintf(what, sizeof(what), "embed %s to %s, same bits as the CPU", ds4_dtype_name(dtype),
             ds4_dtype_name(stream));
    verdict(memcmp(out[0], out[1], bytes) == 0, what, 0.0);
    free(out[0]), free(out[1]), free(data), free(r);
}

/* The devices' allocations live until close: a fresh set for every family keeps their number small. */
static void open_all(int32_t ordinal)
{
    cpu_dev = open_device(cpu, 0, DS4_PRODUCTS_EXACT);
    exact_dev = open_device(cuda, ordinal, DS4_PRODUCTS_EXACT);
    fast_dev = open_device(cuda, ordinal, DS4_PRODUCTS_FAST);
}

static void close_all(void)
{
    cuda->close(fast_dev);
    cuda->close(exact_dev);
    cpu->close(cpu_dev);
}

int main(int argc, char **argv)
{
    const int32_t ordinal = argc > 1 ? (int32_t)strtol(argv[1], NULL, 10) : 0;

    cpu = ds4_backend_find("cpu");
    cuda = ds4_backend_find("cuda");
    if (cuda == NULL)
        die("built without CUDA");
    for (size_t i = 0; i < sizeof(gemm_cases) / sizeof(gemm_cases[0]); i++) {
        open_all(ordinal);
        if (i == 0)
            printf("%s\n%s\n", cpu->describe(cpu_dev), cuda->describe(exact_dev));
        for (size_t k = 0; k < sizeof(row_counts) / sizeof(row_counts[0]); k++)
            check_gemm(&gemm_cases[i], row_counts[k]);
        close_all();
    }
    for (size_t i = 0; i < sizeof(moe_cases) / sizeof(moe_cases[0]); i++) {
        open_all(ordinal);
        for (size_t k = 0; k < sizeof(moe_rows) / sizeof(moe_rows[0]); k++)
            check_moe(&moe_cases[i], moe_rows[k]);
        close_all();
    }
    open_all(ordinal);
    for (int stream = 0; stream < 2; stream++) {
        check_embed(DS4_DTYPE_F16, stream == 0 ? DS4_DTYPE_F32 : DS4_DTYPE_BF16);
        check_embed(DS4_DTYPE_Q8_0, stream == 0 ? DS4_DTYPE_F32 : DS4_DTYPE_BF16);
        check_embed(DS4_DTYPE_IQ2_XXS, stream == 0 ? DS4_DTYPE_F32 : DS4_DTYPE_BF16);
    }
    close_all();
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed == 0 ? 0 : 1;
}

/* Every operation of the CUDA backend but products (check_products.c) against the CPU's, over one table
 * of steps: one token, several sequences, holes, long chunks, history in the rings, odd widths.
 *
 *   check_ops [DEVICE]
 *
 * A plain program, because machines lent for GPU work have no test library.  Both backends get the same
 * bytes, outputs are poisoned, the CUDA operation runs twice and must give the same bits, and results
 * are compared by relative L2 norm.  One line a case, last "N passed, N failed". */
#include "kernels/backend.h"
#include "tests/cuda/twin.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXACT_TOLERANCE 1e-5   /* f32 sums in another order */
#define FAST_TOLERANCE  1.5e-2 /* bf16 operands */
#define MAX_TOK         700
#define MAX_ENTRY       8
#define MAX_BLOCK       64
#define N_SLOT          10
#define N_VOCAB         64

/* ---- steps ------------------------------------------------------------------------------------------ */

/* {position, rows}: rows < 0: an inactive entry of -rows rows. */
struct step {
    const char *name;
    int32_t n_entry;
    int32_t entry[MAX_ENTRY][2];
};
static const struct step steps[] = {
    {"one token at 0", 1, {{0, 1}}},
    {"one token at 700", 1, {{700, 1}}},
    {"block end, 3 sequences", 3, {{127, 1}, {0, -1}, {1023, 1}}},
    {"6 rows", 1, {{250, 6}}},
    {"mixed, a hole", 4, {{3, 5}, {511, 2}, {9, -3}, {126, 130}}},
    {"chunk of 600 from 0", 1, {{0, 600}}},
    {"chunk of 300 at 400", 2, {{400, 300}, {2500, 1}}},
};
#define N_STEP (sizeof(steps) / sizeof(steps[0]))

struct world {
    struct ds4_batch batch;
    struct ds4_batch_entry entry[MAX_ENTRY];
    int32_t token[MAX_TOK], pos[MAX_TOK], entry_of[MAX_TOK];
    int32_t block[MAX_ENTRY][MAX_BLOCK];
    int32_t out_row[MAX_ENTRY];
};

static struct world *make_world(const struct step *s)
{
    struct world *w = must(calloc(1, sizeof(*w)));
    int32_t n = 0, n_block = 0;

    for (int32_t e = 0; e < s->n_entry; e++) {
        int32_t rows = abs(s->entry[e][1]), base = s->entry[e][0];
        int32_t need = (base + rows) / DS4_BLOCK_TOK + 1;

        for (int32_t b = 0; b < need; b++)
            w->block[e][b] = (7 * n_block++ + 3) % (MAX_ENTRY * MAX_BLOCK);
        w->entry[e] = (struct ds4_batch_entry){.slot = (3 * e + 1) % N_SLOT,
                                               .base_pos = base,
                                               .first_row = n,
                                               .n_row = rows,
                                               .active = s->entry[e][1] > 0,
                                               .cap_tok = need * DS4_BLOCK_TOK,
                                               .block = w->block[e],
                                               .n_block = need};
        w->out_row[e] = n + rows - 1;
        for (int32_t t = 0; t < rows; t++, n++) {
            w->token[n] = (int32_t)(next() % N_VOCAB);
            w->pos[n] = base + t;
            w->entry_of[n] = e;
        }
    }
    w->batch = (struct ds4_batch){n,          w->token, w->pos,     w->entry_of,
                                  s->n_entry, w->entry, s->n_entry, w->out_row};
    return w;
}

/* Packed rows of n random values of d, as the CPU stores them. */
static uint8_t *packed_rows(enum ds4_row_format format, int32_t d, int32_t d_rope, int32_t n)
{
    const size_t row_bytes = ds4_row_bytes(format, d, d_rope);
    uint8_t *out = must(calloc((size_t)n, row_bytes));
    float *x = random_floats((size_t)n * (size_t)d, 1.5f);
    int32_t *pos = must(malloc(sizeof(int32_t) * (size_t)n)),
            *of = must(calloc((size_t)n, sizeof(int32_t)));
    struct ds4_batch_entry e = {.n_row = n, .active = true, .cap_tok = n};
    struct ds4_batch batch = {
        .n_tok = n, .token = of, .pos = pos, .entry_of = of, .n_entry = 1, .entry = &e};
    struct ds4_round_args round = {ds4_tensor_2d(x, DS4_DTYPE_F32, n, d), format, d_rope};
    struct ds4_ring_write_args write = {&batch, round.x, {out, 1, n, d, d_rope, format, row_bytes}};

    for (int32_t i = 0; i < n; i++)
        pos[i] = i;
    cpu->round(cpu_dev, &round);
    cpu->ring_write(cpu_dev, &write);
    free(x), free(pos), free(of);
    return out;
}

static struct twin twin_ring(struct ds4_ring *ring, int32_t cap, int32_t d, int32_t d_rope,
                             enum ds4_row_format format)
{
    uint8_t *rows = packed_rows(format, d, d_rope, N_SLOT * cap);
    struct twin t;

    *ring =
        (struct ds4_ring){NULL, N_SLOT, cap, d, d_rope, format, ds4_row_bytes(format, d, d_rope)};
    t = twin_of(rows, ring->row_bytes * (size_t)(N_SLOT * cap));
    free(rows);
    return t;
}

static struct twin twin_pages(struct ds4_pages *pages, int32_t ratio, int32_t d, int32_t d_rope,
                              enum ds4_row_format format)
{
    const int32_t per = DS4_BLOCK_TOK / ratio, n_block = MAX_ENTRY * MAX_BLOCK;
    uint8_t *rows = packed_rows(format, d, d_rope, n_block * per);
    struct twin t;

    *pages =
        (struct ds4_pages){NULL, n_block, per, d, d_rope, format, ds4_row_bytes(format, d, d_rope)};
    t = twin_of(rows, pages->row_bytes * (size_t)(n_block * per));
    free(rows);
    return t;
}

static void begin(const struct world *w)
{
    cpu->begin(cpu_dev, &w->batch);
    cuda->begin(now, &w->batch);
}

/* Runs op on the CPU once and on the GPU twice from the same memory; false if the GPU's bits differ.
 * restore: what the operation changes in place. */
static bool run_twice(const struct world *w, void (*on_cpu)(struct ds4_device *, const void *),
                      const void *cpu_args, void (*on_cuda)(struct ds4_device *, const void *),
                      const void *cuda_args, struct twin *const *out, int n_out)
{
    void *before[4], *first[4];
    bool same = true;

    for (int i = 0; i < n_out; i++)
        before[i] = fetch(cuda, out[i]);
    begin(w);
    on_cpu(cpu_dev, cpu_args);
    on_cuda(now, cuda_args);
    cuda->sync(now);
    for (int i = 0; i < n_out; i++) {
        first[i] = fetch(cuda, out[i]);
        cuda->upload(now, out[i]->cuda, before[i], out[i]->bytes);
    }
    cuda->sync(now);
    cuda->begin(now, &w->batch);
    on_cuda(now, cuda_args);
    cuda->sync(now);
    for (int i = 0; i < n_out; i++) {
        void *second = fetch(cuda, out[i]);

        same &= memcmp(first[i], second, out[i]->bytes) == 0;
        free(second), free(first[i]), free(before[i]);
    }
    return same;
}

#define OP(name)                                                                                   \
    static void name##_on_cpu(struct ds4_device *dev, const void *a)                               \
    {                                                                                              \
        cpu->name(dev, a);                                                                         \
    }                                                                                              \
    static void name##_on_cuda(struct ds4_device *dev, const void *a)                              \
    {                                                                                              \
        cuda->name(dev, a);                                                                        \
    }
OP(rmsnorm)
OP(hyper_read)
OP(hyper_write)
OP(hyper_head)
OP(rope)
OP(latent)
OP(round)
OP(ring_write)
OP(keep)
OP(compress)
OP(index)
OP(attention)
OP(route)
#define RUN(name, w, a, b, out, n) run_twice(w, name##_on_cpu, a, name##_on_cuda, b, out, n)

static double tolerance(void)
{
    return now == fast_dev ? FAST_TOLERANCE : EXACT_TOLERANCE;
}

static void label(char *where, size_t size, const struct step *s, const char *more, bool same)
{
    snprintf(where, size, "%s, %s%s%s", now == fast_dev ? "fast" : "exact", s->name, more,
             same ? "" : " (bits differ from run to run)");
}

/* ---- rows ------------------------------------------------------------------------------------------- */

static void check_rmsnorm(const struct step *s, struct world *w, int32_t d)
{
    const int32_t n = w->batch.n_tok;
    struct twin x = twin_random((size_t)n * (size_t)d, 2.0f), y = twin_poison(x.bytes);
    struct twin g = twin_random((size_t)d, 1.0f), *out[] = {&y};
    struct ds4_rmsnorm_args a = {ds4_tensor_2d(x.cpu, DS4_DTYPE_F32, n, d), g.cpu, 1e-6f,
                                 ds4_tensor_2d(y.cpu, DS4_DTYPE_F32, n, d)},
                            b = a;
    char where[128];
    bool same;

    b.x.data = x.cuda, b.w = g.cuda, b.y.data = y.cuda;
    same = RUN(rmsnorm, w, &a, &b, out, 1);
    label(where, sizeof(where), s, d == 4096 ? ", d 4096" : "", same);
    verdict(same && twin_distance(&y, DS4_DTYPE_F32) <= EXACT_TOLERANCE,
            twin_distance(&y, DS4_DTYPE_F32), "rmsnorm", where);
}

static struct twin twin_weight(struct ds4_weight *w, int32_t n_row, int32_t n_col)
{
    uint16_t *x = must(malloc(2 * (size_t)n_row * (size_t)n_col));
    struct twin t;

    for (size_t i = 0; i < (size_t)n_row * (size_t)n_col; i++)
        x[i] = ds4_f16_from_f32(uniform(0.05f));
    *w = (struct ds4_weight){NULL, DS4_DTYPE_F16, 1, n_row, n_col, 2 * (size_t)n_col};
    t = twin_of(x, 2 * (size_t)n_row * (size_t)n_col);
    free(x);
    return t;
}

/* Residual streams in f32 or bf16. */
static struct twin twin_streams(enum ds4_dtype dtype, size_t n)
{
    float *x = random_floats(n, 2.0f);
    uint16_t *h = must(malloc(2 * n));
    struct twin t;

    for (size_t i = 0; i < n; i++)
        h[i] = ds4_bf16_from_f32(x[i]);
    t = dtype == DS4_DTYPE_BF16 ? twin_of(h, 2 * n) : twin_of(x, 4 * n);
    free(x), free(h);
    return t;
}

static void check_hyper(const struct step *s, struct world *w, int32_t n_hyper, int32_t d,
                        enum ds4_dtype dtype)
{
    const int32_t n = w->batch.n_tok, n_mix = n_hyper * (n_hyper + 2);
    struct twin x = twin_streams(dtype, (size_t)n * (size_t)(n_hyper * d));
    struct twin base = twin_random((size_t)n_mix, 0.5f), scale = twin_random(3, 1.0f);
    struct twin norm = twin_random((size_t)d, 1.0f), u = twin_poison(4 * (size_t)(n * d));
    struct twin post = twin_poison(4 * (size_t)(n * n_hyper));
    struct twin comb = twin_poison(4 * (size_t)(n * n_hyper * n_hyper));
    struct twin *out[] = {&u, &post, &comb}, *streams[] = {&x};
    struct ds4_hyper_read_args a = {.x = ds4_tensor_3d(x.cpu, dtype, n, n_hyper, d),
                                    .base = base.cpu,
                                    .scale = scale.cpu,
                                    .sinkhorn_iters = 20,
                                    .hyper_eps = 1e-6f,
                                    .rms_eps = 1e-6f,
                                    .norm = norm.cpu,
                                    .u = ds4_tensor_2d(u.cpu, DS4_DTYPE_F32, n, d),
                                    .post = post.cpu,
                                    .comb = comb.cpu};
    struct twin fn = twin_weight(&a.fn, n_mix, n_hyper * d);
    struct ds4_hyper_read_args b = a;
    struct ds4_hyper_write_args wa = {a.u, post.cpu, comb.cpu, a.x}, wb = wa;
    double error;
    char where[128];
    bool same;

    a.fn.data = fn.cpu;
    b.x.data = x.cuda, b.fn = a.fn, b.fn.data = fn.cuda, b.base = base.cuda;
    b.scale = scale.cuda, b.norm = norm.cuda, b.u.data = u.cuda;
    b.post = post.cuda, b.comb = comb.cuda;
    same = RUN(hyper_read, w, &a, &b, out, 3);
    error = fmax(twin_distance(&u, DS4_DTYPE_F32),
                 fmax(twin_distance(&post, DS4_DTYPE_F32), twin_distance(&comb, DS4_DTYPE_F32)));
    label(where, sizeof(where), s, d == 4096 ? ", d 4096" : "", same);
    verdict(same && error <= EXACT_TOLERANCE, error, "hyper_read", where);

    wb.o.data = u.cuda, wb.post = post.cuda, wb.comb = comb.cuda, wb.x.data = x.cuda;
    same = RUN(hyper_write, w, &wa, &wb, streams, 1);
    error = twin_distance(&x, dtype);
    verdict(same && error <= (dtype == DS4_DTYPE_BF16 ? 1e-4 : EXACT_TOLERANCE), error,
            "hyper_write", where);
}

/* A read that takes the write before it along: the CPU's numbers, and the bits of the two operations. */
static void check_turn(const struct step *s, struct world *w, int32_t n_hyper, int32_t d,
                       enum ds4_dtype dtype)
{
    const int32_t n = w->batch.n_tok, n_mix = n_hyper * (n_hyper + 2);
    struct twin x = twin_streams(dtype, (size_t)n * (size_t)(n_hyper * d));
    struct twin base = twin_random((size_t)n_mix, 0.5f), scale = twin_random(3, 1.0f);
    struct twin o = twin_random((size_t)(n * d), 2.0f), u = twin_poison(4 * (size_t)(n * d));
    struct twin post = twin_random((size_t)(n * n_hyper), 1.0f);
    struct twin comb = twin_random((size_t)(n * n_hyper * n_hyper), 0.5f);
    struct twin *out[] = {&x, &u, &post, &comb};
    struct ds4_hyper_read_args a = {.x = ds4_tensor_3d(x.cpu, dtype, n, n_hyper, d),
                                    .o = ds4_tensor_2d(o.cpu, DS4_DTYPE_F32, n, d),
                                    .base = base.cpu,
                                    .scale = scale.cpu,
                                    .sinkhorn_iters = 20,
                                    .hyper_eps = 1e-6f,
                                    .rms_eps = 1e-6f,
                                    .u = ds4_tensor_2d(u.cpu, DS4_DTYPE_F32, n, d),
                                    .post = post.cpu,
                                    .comb = comb.cpu};
    struct twin fn = twin_weight(&a.fn, n_mix, n_hyper * d);
    struct ds4_hyper_read_args b = a;
    void *before[4], *together[4];
    double error;
    char where[128];
    bool same;

    a.fn.data = fn.cpu;
    b.x.data = x.cuda, b.fn = a.fn, b.fn.data = fn.cuda, b.base = base.cuda;
    b.o.data = o.cuda, b.scale = scale.cuda, b.u.data = u.cuda;
    b.post = post.cuda, b.comb = comb.cuda;
    for (int i = 0; i < 4; i++)
        before[i] = fetch(cuda, out[i]);
    same = RUN(hyper_read, w, &a, &b, out, 4);
    error = fmax(fmax(twin_distance(&x, dtype), twin_distance(&u, DS4_DTYPE_F32)),
                 fmax(twin_distance(&post, DS4_DTYPE_F32), twin_distance(&comb, DS4_DTYPE_F32)));
    for (int i = 0; i < 4; i++) {
        together[i] = fetch(cuda, out[i]);
        cuda->upload(now, out[i]->cuda, before[i], out[i]->bytes);
    }
    cuda->sync(now);
    {
        const struct ds4_hyper_write_args write = {b.o, b.post, b.comb, b.x};

        b.o.data = NULL;
        cuda->begin(now, &w->batch);
        cuda->hyper_write(now, &write);
        cuda->hyper_read(now, &b);
        cuda->sync(now);
    }
    for (int i = 0; i < 4; i++) {
        void *apart = fetch(cuda, out[i]);

        same &= memcmp(apart, together[i], out[i]->bytes) == 0;
        free(apart), free(together[i]), free(before[i]);
    }
    label(where, sizeof(where), s, d == 4096 ? ", d 4096" : "", same);
    verdict(same && error <= (dtype == DS4_DTYPE_BF16 ? 2e-4 : EXACT_TOLERANCE), error,
            "hyper_read, o", where);
}

static void check_head(const struct step *s, struct world *w, int32_t n_hyper, int32_t d)
{
    const int32_t n = w->batch.n_tok, n_out = w->batch.n_out;
    struct twin x = twin_random((size_t)n * (size_t)(n_hyper * d), 2.0f);
    struct twin base = twin_random((size_t)n_hyper, 0.5f), scale = twin_random(1, 1.0f);
    struct twin h = twin_poison(4 * (size_t)(n_out * d)), *out[] = {&h};
    struct ds4_hyper_head_args a = {.x = ds4_tensor_3d(x.cpu, DS4_DTYPE_F32, n, n_hyper, d),
                                    .row = w->out_row,
                                    .n_row = n_out,
                                    .base = base.cpu,
                                    .scale = scale.cpu,
                                    .hyper_eps = 1e-6f,
                                    .rms_eps = 1e-6f,
                                    .h = ds4_tensor_2d(h.cpu, DS4_DTYPE_F32, n_out, d)};
    struct twin fn = twin_weight(&a.fn, n_hyper, n_hyper * d);
    struct ds4_hyper_head_args b = a;
    double error;
    char where[128];
    bool same;

    a.fn.data = fn.cpu;
    b.fn = a.fn, b.fn.data = fn.cuda, b.x.data = x.cuda, b.base = base.cuda;
    b.scale = scale.cuda, b.h.data = h.cuda;
    same = RUN(hyper_head, w, &a, &b, out, 1);
    error = twin_distance(&h, DS4_DTYPE_F32);
    label(where, sizeof(where), s, "", same);
    verdict(same && error <= EXACT_TOLERANCE, error, "hyper_head", where);
}

static struct twin twin_freq(int32_t d_rope)
{
    float *f = must(malloc(sizeof(float) * (size_t)d_rope));
    struct twin t;

    for (int32_t i = 0; i < d_rope / 2; i++)
        f[i] = powf(10000.0f, -2.0f * (float)i / (float)d_rope);
    t = twin_of(f, sizeof(float) * (size_t)(d_rope / 2));
    free(f);
    return t;
}

static void check_rope(const struct step *s, struct world *w, int32_t n_head, int32_t d,
                       int32_t d_rope, bool unit)
{
    const int32_t n = w->batch.n_tok;
    struct twin x = twin_random((size_t)(n * n_head * d), 2.0f), freq = twin_freq(d_rope);
    struct twin *out[] = {&x};
    struct ds4_rope_args a = {&w->batch,
                              ds4_tensor_3d(x.cpu, DS4_DTYPE_F32, n, n_head, d),
                              {freq.cpu, d_rope},
                              !unit,
                              unit,
                              1e-6f},
                         b = a;
    char where[128];
    bool same;

    b.x.data = x.cuda, b.rope.freq = freq.cuda;
    same = RUN(rope, w, &a, &b, out, 1);
    label(where, sizeof(where), s, unit ? ", unit rms" : ", inverse", same);
    verdict(same && twin_distance(&x, DS4_DTYPE_F32) <= EXACT_TOLERANCE,
            twin_distance(&x, DS4_DTYPE_F32), "rope", where);
}

/* The step's rows kept beside the rings: packed as they are, and in f32 with the gates' part. */
static void check_keep(const struct step *s, struct world *w, struct twin *x, int32_t d,
                       int32_t d_rope, enum ds4_row_format format)
{
    const int32_t n = w->batch.n_tok, ratio = 4;
    struct twin ape = twin_random((size_t)(ratio * d), 1.0f);
    struct ds4_keep_args a = {.x = ds4_tensor_2d(x->cpu, DS4_DTYPE_F32, n, d),
                              .n_row = n,
                              .n_col = d,
                              .pos = 3,
                              .ratio = ratio,
                              .format = format,
                              .d_rope = d_rope};
    char where[128];
    bool same;

    for (int gates = 0; gates < 2; gates++) {
        struct ds4_keep_args b;
        struct twin store, *out[] = {&store};

        if (gates) {
            a.format = DS4_ROW_F32;
            a.n_col = d / 2;
            a.ape = (struct ds4_weight){ape.cpu, DS4_DTYPE_F32, 1, ratio, d, 4 * (size_t)d};
        }
        store = twin_poison((size_t)n * ds4_row_bytes(a.format, a.n_col, d_rope));
        b = a;
        a.dst = store.cpu;
        b.x.data = x->cuda, b.dst = store.cuda;
        b.ape.data = gates ? ape.cuda : NULL;
        same = RUN(keep, w, &a, &b, out, 1);
        label(where, sizeof(where), s, gates ? ", gates" : ", rows", same);
        verdict(same && twin_bytes_differ(&store) == 0.0, twin_bytes_differ(&store), "keep", where);
    }
}

static void check_latent(const struct step *s, struct world *w, int32_t d_q, int32_t d_kv,
                         enum ds4_row_format format)
{
    enum { D_ROPE = 64 };
    const int32_t n = w->batch.n_tok;
    struct twin q = twin_random((size_t)(n * d_q), 2.0f),
                kv = twin_random((size_t)(n * d_kv), 2.0f);
    struct twin q_norm = twin_random((size_t)d_q, 1.0f), kv_norm = twin_random((size_t)d_kv, 1.0f);
    struct twin freq = twin_freq(D_ROPE), *out[] = {&q, &kv};
    struct ds4_latent_args a = {&w->batch,          ds4_tensor_2d(q.cpu, DS4_DTYPE_F32, n, d_q),
                                q_norm.cpu,         ds4_tensor_2d(kv.cpu, DS4_DTYPE_F32, n, d_kv),
                                kv_norm.cpu,        1e-6f,
                                {freq.cpu, D_ROPE}, format},
                           b = a;
    double error, rounded;
    char where[128];
    bool same;

    b.q.data = q.cuda, b.q_norm = q_norm.cuda, b.kv.data = kv.cuda, b.kv_norm = kv_norm.cuda;
    b.rope.freq = freq.cuda;
    same = RUN(latent, w, &a, &b, out, 2);
    error = twin_distance(&q, DS4_DTYPE_F32);
    rounded = twin_distance(&kv, DS4_DTYPE_F32);
    label(where, sizeof(where), s, format == DS4_ROW_F32 ? ", f32" : ", FP8", same);
    /* A value on the edge of a step may fall to the other side. */
    verdict(same && error <= EXACT_TOLERANCE &&
                rounded <= (format == DS4_ROW_F32 ? EXACT_TOLERANCE : 5e-3),
            fmax(error, rounded), "latent", where);
}

/* What an operation packs for the products that follow: the same bits as of a copy of its rows. */
static void check_kept(const struct step *s, struct world *w)
{
    enum { D = 1024, N_ROW = 64 };
    const int32_t n = w->batch.n_tok;
    struct twin q = twin_random((size_t)n * D, 2.0f), kv = twin_random((size_t)n * D, 2.0f);
    struct twin norm = twin_random(D, 1.0f), y = twin_poison(4 * (size_t)n * N_ROW);
    struct twin z = twin_poison(y.bytes), copy = twin_poison(q.bytes);
    uint8_t *blocks = must(calloc(N_ROW, D / 32 * 34));
    struct ds4_latent_args a = {&w->batch, ds4_tensor_2d(q.cuda, DS4_DTYPE_F32, n, D),
                                norm.cuda, ds4_tensor_2d(kv.cuda, DS4_DTYPE_F32, n, D),
                                norm.cuda, 1e-6f,
                                {NULL, 0}, DS4_ROW_F32};
    struct ds4_gemm_args g = {.w = {NULL, DS4_DTYPE_Q8_0, 1, N_ROW, D, D / 32 * 34},
                              .n_group = 1,
                              .x = a.q,
                              .y = ds4_tensor_2d(y.cuda, DS4_DTYPE_F32, n, N_ROW)};
    struct ds4_rmsnorm_args again = {a.q, norm.cuda, 1e-6f, a.q};
    struct twin weight;
    void *first, *second;
    char where[128];
    bool same = true;

    for (int32_t i = 0; i < N_ROW * D / 32 * 34; i++)
        blocks[i] = i % 34 == 0 ? 0 : i % 34 == 1 ? 0x2c : (uint8_t)next();
    weight = twin_of(blocks, (size_t)N_ROW * (D / 32 * 34));
    g.w.data = weight.cuda;
    cuda->begin(now, &w->batch);
    cuda->latent(now, &a);
    cuda->copy_rows(now, copy.cuda, q.bytes, q.cuda, q.bytes, q.bytes, 1);
    for (int round = 0; round < 2;
         round++) { /* then the rows change, and what was packed is stale */
        g.x.data = q.cuda, g.y.data = y.cuda;
        cuda->gemm(now, &g);
        g.x.data = copy.cuda, g.y.data = z.cuda;
        cuda->gemm(now, &g);
        cuda->sync(now);
        first = fetch(cuda, &y), second = fetch(cuda, &z);
        same &= memcmp(first, second, y.bytes) == 0;
        free(first), free(second);
        cuda->rmsnorm(now, &again);
        cuda->copy_rows(now, copy.cuda, q.bytes, q.cuda, q.bytes, q.bytes, 1);
    }
    label(where, sizeof(where), s, "", same);
    verdict(same, same ? 0.0 : 1.0, "kept rows", where);
    free(blocks);
}

static void check_round(const struct step *s, struct world *w, int32_t d, int32_t d_rope,
                        enum ds4_row_format format)
{
    const int32_t n = w->batch.n_tok;
    struct twin x = twin_random((size_t)(n * d), 3.0f), *out[] = {&x};
    struct ds4_round_args a = {ds4_tensor_2d(x.cpu, DS4_DTYPE_F32, n, d), format, d_rope}, b = a;
    struct ds4_ring ring;
    struct twin store = twin_ring(&ring, 256, d, d_rope, format), *kept[] = {&store};
    struct ds4_ring_write_args wa = {&w->batch, a.x, ring}, wb = wa;
    char where[128];
    bool same;

    b.x.data = x.cuda;
    same = RUN(round, w, &a, &b, out, 1);
    label(where, sizeof(where), s, format == DS4_ROW_FP4 ? ", FP4" : ", FP8", same);
    /* A value on the edge of a step may fall to the other side after a Hadamard in another order. */
    verdict(same && twin_distance(&x, DS4_DTYPE_F32) <= (format == DS4_ROW_FP4 ? 2e-2 : 0.0),
            twin_distance(&x, DS4_DTYPE_F32), "round", where);
    {
        float *rounded = fetch(cpu, &x);

        cuda->upload(now, x.cuda, rounded, x.bytes);
        cuda->sync(now);
        free(rounded);
    }
    wa.ring.data = store.cpu;
    wb.x.data = x.cuda, wb.ring.data = store.cuda;
    same = RUN(ring_write, w, &wa, &wb, kept, 1);
    verdict(same && twin_bytes_differ(&store) == 0.0, twin_bytes_differ(&store), "ring_write",
            where);
    show_difference(&store, ring.row_bytes);
    check_keep(s, w, &x, d, d_rope, format);
}

/* ---- sequence state --------------------------------------------------------------------------------- */

static void check_compress(const struct step *s, struct world *w, int32_t ratio, int32_t d,
                           enum ds4_row_format format)
{
    const int32_t n = w->batch.n_tok, width = ratio == 4 ? 2 * d : d, d_rope = 64;
    struct twin k = twin_random((size_t)(n * width), 1.0f),
                g = twin_random((size_t)(n * width), 1.0f);
    struct twin ape = twin_random((size_t)(ratio * width), 1.0f),
                norm = twin_random((size_t)d, 1.0f);
    struct twin freq = twin_freq(d_rope);
    struct ds4_compress_args a = {
        .batch = &w->batch,
        .k = ds4_tensor_2d(k.cpu, DS4_DTYPE_F32, n, width),
        .g = ds4_tensor_2d(g.cpu, DS4_DTYPE_F32, n, width),
        .ape = {ape.cpu, DS4_DTYPE_F32, 1, ratio, width, 4 * (size_t)width},
        .ratio = ratio,
        .overlap = ratio == 4,
        .norm = norm.cpu,
        .eps = 1e-6f,
        .rope = {freq.cpu, d_rope}};
    struct twin rk = twin_ring(&a.ring_k, ratio == 4 ? 128 : 256, width, 0, DS4_ROW_F32);
    struct twin rg = twin_ring(&a.ring_g, ratio == 4 ? 128 : 256, width, 0, DS4_ROW_F32);
    struct twin pages = twin_pages(&a.pages, ratio, d, d_rope, format);
    struct twin *out[] = {&rk, &rg, &pages, &g};
    struct ds4_compress_args b = a;
    double error;
    char where[128];
    bool same;

    a.ring_k.data = rk.cpu, a.ring_g.data = rg.cpu, a.pages.data = pages.cpu;
    b.k.data = k.cuda, b.g.data = g.cuda, b.ape.data = ape.cuda, b.norm = norm.cuda;
    b.rope.freq = freq.cuda, b.ring_k.data = rk.cuda, b.ring_g.data = rg.cuda;
    b.pages.data = pages.cuda;
    same = RUN(compress, w, &a, &b, out, 4);
    error = fmax(twin_distance(&rk, DS4_DTYPE_F32), twin_distance(&rg, DS4_DTYPE_F32));
    label(where, sizeof(where), s, ratio == 4 ? ", ratio 4" : ", ratio 128", same);
    verdict(same && error <= EXACT_TOLERANCE, error, "compress rings", where);
    /* Exact rows differ by roundings; packed ones by single codes. */
    error =
        format == DS4_ROW_F32 ? twin_distance(&pages, DS4_DTYPE_F32) : twin_bytes_differ(&pages);
    verdict(error <= (format == DS4_ROW_F32 ? EXACT_TOLERANCE : 2e-3), error, "compress rows",
            where);
}

static void check_index(const struct step *s, struct world *w, int32_t n_head, int32_t d,
                        int32_t top_k, enum ds4_row_format format, bool rotate)
{
    const int32_t n = w->batch.n_tok;
    struct twin q = twin_random((size_t)(n * n_head * d), 1.0f);
    struct twin g = twin_random((size_t)(n * n_head), 1.0f);
    struct twin sel = twin_poison(4 * (size_t)(n * top_k)), n_sel = twin_poison(4 * (size_t)n);
    struct twin *out[] = {&sel, &n_sel, &q}, freq = twin_freq(d / 2);
    struct ds4_round_args round = {ds4_tensor_2d(q.cpu, DS4_DTYPE_F32, n * n_head, d), format, 0};
    struct ds4_index_args a = {.batch = &w->batch,
                               .q = ds4_tensor_3d(q.cpu, DS4_DTYPE_F32, n, n_head, d),
                               .w = ds4_tensor_2d(g.cpu, DS4_DTYPE_F32, n, n_head),
                               .ratio = 4,
                               .top_k = top_k,
                               .sel = sel.cpu,
                               .n_sel = n_sel.cpu};
    struct twin pages = twin_pages(&a.pages, 4, d, 0, format);
    struct ds4_index_args b = a;
    int32_t *x, *y, *nx, *ny, wrong = 0, all = 0;
    char where[128];
    float *rounded;
    bool same;

    if (!rotate)
        cpu->round(cpu_dev, &round); /* the same rounded queries on both */
    rounded = fetch(cpu, &q);
    cuda->upload(now, q.cuda, rounded, q.bytes);
    cuda->sync(now);
    a.pages.data = pages.cpu;
    if (rotate)
        a.rope = (struct ds4_rope){freq.cpu, d / 2}, b.rope = (struct ds4_rope){freq.cuda, d / 2};
    b.q.data = q.cuda, b.w.data = g.cuda, b.pages.data = pages.cuda;
    b.sel = sel.cuda, b.n_sel = n_sel.cuda;
    same = RUN(index, w, &a, &b, out, 3);
    x = fetch(cuda, &sel), y = fetch(cpu, &sel), nx = fetch(cuda, &n_sel), ny = fetch(cpu, &n_sel);
    for (int32_t t = 0; t < n; t++) {
        if (!w->entry[w->entry_of[t]].active)
            continue;
        wrong += nx[t] != ny[t] ? top_k : 0;
        for (int32_t i = 0; i < ny[t] && nx[t] == ny[t]; i++, all++) {
            bool found = false;

            for (int32_t j = 0; j < nx[t] && !found; j++)
                found = x[t * top_k + j] == y[t * top_k + i];
            wrong += !found;
        }
    }
    label(where, sizeof(where), s, rotate ? ", rotated" : "", same);
    /* Scores next to the cut may change places when sums have another order, or queries another rounding. */
    verdict(same && wrong <= all / (rotate ? 50 : 500), (double)wrong / (all + 1), "index", where);
    free(x), free(y), free(nx), free(ny), free(rounded);
}

static void check_attention(const struct step *s, struct world *w, int32_t n_head, int32_t d,
                            int32_t ratio, bool select, enum ds4_row_format format, bool damage,
                            bool finish)
{
    enum { TOP_K = 96 };
    const int32_t n = w->batch.n_tok, d_rope = 64;
    struct twin q = twin_random((size_t)(n * n_head * d), 1.0f);
    struct twin o = twin_poison(q.bytes), sink = twin_random((size_t)n_head, 2.0f);
    struct twin kv = twin_random((size_t)(n * d), 1.5f), sel, n_sel, pages = {0};
    struct twin freq = twin_freq(d_rope), *out[] = {&o, NULL};
    int32_t *chosen = must(calloc((size_t)(n * TOP_K), 4)), *count = must(calloc((size_t)n, 4));
    struct ds4_round_args round = {ds4_tensor_2d(kv.cpu, DS4_DTYPE_F32, n, d), format, d_rope};
    struct ds4_attention_args a = {.batch = &w->batch,
                                   .q = ds4_tensor_3d(q.cpu, DS4_DTYPE_F32, n, n_head, d),
                                   .kv = round.x,
                                   .ratio = ratio,
                                   .window_tok = 128,
                                   .top_k = select ? TOP_K : 0,
                                   .sink = sink.cpu,
                                   .o = ds4_tensor_3d(o.cpu, DS4_DTYPE_F32, n, n_head, d)};
    struct twin ring = twin_ring(&a.ring, 256, d, d_rope, format);
    struct ds4_attention_args b;
    float *rounded;
    char where[128], more[80];
    double error;
    bool same;

    cpu->round(cpu_dev, &round);
    if (damage)
        ((float *)kv.cpu)[d / 2] = NAN; /* row 0: its query and those that see it */
    rounded = fetch(cpu, &kv);
    cuda->upload(now, kv.cuda, rounded, kv.bytes);
    cuda->sync(now);
    for (int32_t t = 0; t < n; t++) {
        int32_t visible = ratio > 0 ? (w->pos[t] + 1) / ratio : 0;

        for (int32_t j = 0; j < visible && count[t] < TOP_K; j++)
            if (visible <= TOP_K || next() % 3 == 0)
                chosen[t * TOP_K + count[t]++] = j;
    }
    sel = twin_of(chosen, 4 * (size_t)(n * TOP_K)), n_sel = twin_of(count, 4 * (size_t)n);
    if (ratio > 0)
        pages = twin_pages(&a.pages, ratio, d, d_rope, format);
    b = a;
    a.ring.data = ring.cpu, a.pages.data = pages.cpu;
    b.q.data = q.cuda, b.kv.data = kv.cuda, b.ring.data = ring.cuda, b.pages.data = pages.cuda;
    b.sink = sink.cuda, b.o.data = o.cuda;
    out[1] = &ring;
    if (finish) {
        a.rope = (struct ds4_rope){freq.cpu, d_rope}, b.rope = (struct ds4_rope){freq.cuda, d_rope};
        a.store = b.store = true;
    }
    if (select) {
        a.sel = sel.cpu, a.n_sel = n_sel.cpu;
        b.sel = sel.cuda, b.n_sel = n_sel.cuda;
    }
    same = RUN(attention, w, &a, &b, out, 2) && twin_bytes_differ(&ring) == 0.0;
    error = twin_distance(&o, DS4_DTYPE_F32);
    snprintf(more, sizeof(more), ", %d x %d, ratio %d%s, %s%s", n_head, d, ratio,
             select ? " selected" : "",
             format == DS4_ROW_F32    ? "f32"
             : format == DS4_ROW_BF16 ? "bf16"
                                      : "fp8",
             damage   ? ", NaN"
             : finish ? ", rotated and stored"
                      : "");
    label(where, sizeof(where), s, more, same);
    verdict(same && error <= tolerance(), error, "attention", where);
    free(chosen), free(count), free(rounded);
}

static void check_route(const struct step *s, struct world *w, int32_t n_expert, bool table)
{
    enum { N_USED = 6 };
    const int32_t n = w->batch.n_tok;
    struct twin logits = twin_random((size_t)(n * n_expert), 3.0f);
    struct twin bias = twin_random((size_t)n_expert, 0.3f), ids;
    struct twin id = twin_poison(4 * (size_t)(n * N_USED)), weight = twin_poison(id.bytes);
    struct twin *out[] = {&id, &weight};
    int32_t lists[N_VOCAB * N_USED];
    struct ds4_route_args a = {.batch = &w->batch,
                               .logits = ds4_tensor_2d(logits.cpu, DS4_DTYPE_F32, n, n_expert),
                               .n_used = N_USED,
                               .scale = 1.5f},
                          b;
    double error;
    char where[128];
    bool same;

    for (int32_t i = 0; i < N_VOCAB * N_USED; i++)
        lists[i] = (i % N_USED * 7 + i / N_USED) % n_expert;
    ids = twin_of(lists, sizeof(lists));
    b = a;
    a.id = id.cpu, a.weight = weight.cpu;
    b.logits.data = logits.cuda, b.id = id.cuda, b.weight = weight.cuda;
    if (table)
        a.table = ids.cpu, b.table = ids.cuda;
    else
        a.bias = bias.cpu, b.bias = bias.cuda;
    same = RUN(route, w, &a, &b, out, 2);
    error = fmax(twin_bytes_differ(&id), twin_distance(&weight, DS4_DTYPE_F32));
    label(where, sizeof(where), s, table ? ", table" : ", bias", same);
    verdict(same && error <= EXACT_TOLERANCE, error, "route", where);
}

/* ---- all -------------------------------------------------------------------------------------------- */

static struct ds4_device *open_device(const struct ds4_backend *b, int32_t ordinal,
                                      enum ds4_products products)
{
    const struct ds4_device_config config = {.ordinal = ordinal, .products = products};
    const struct ds4_limits limits = {.max_tok = MAX_TOK,
                                      .max_context = 8192,
                                      .d_model = 4096,
                                      .n_hyper = 4,
                                      .n_head = 64,
                                      .d_head = 512,
                                      .n_index_head = 64,
                                      .d_index = 128,
                                      .top_k = 512,
                                      .n_expert = 256,
                                      .n_used = 6,
                                      .d_expert = 256,
                                      .max_cols = 4096};
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

static void check_step(const struct step *s)
{
    struct world *w = make_world(s);

    check_rmsnorm(s, w, 4096);
    check_rmsnorm(s, w, 37);
    check_hyper(s, w, 4, 4096, DS4_DTYPE_BF16);
    check_hyper(s, w, 4, 512, DS4_DTYPE_F32);
    check_hyper(s, w, 4, 256, DS4_DTYPE_F32);
    check_hyper(s, w, 3, 100, DS4_DTYPE_F32);
    check_turn(s, w, 4, 4096, DS4_DTYPE_BF16);
    check_turn(s, w, 4, 512, DS4_DTYPE_F32);
    check_turn(s, w, 4, 256, DS4_DTYPE_F32);
    check_turn(s, w, 3, 100, DS4_DTYPE_F32);
    check_head(s, w, 4, 256);
    check_latent(s, w, 1024, 512, DS4_ROW_FP8);
    check_latent(s, w, 96, 80, DS4_ROW_F32);
    check_kept(s, w);
    check_rope(s, w, 8, 128, 64, true);
    check_rope(s, w, 3, 80, 32, false);
    check_round(s, w, 512, 64, DS4_ROW_FP8);
    check_round(s, w, 128, 64, DS4_ROW_FP4);
    check_compress(s, w, 4, 128, DS4_ROW_F32);
    check_compress(s, w, 4, 512, DS4_ROW_FP8);
    check_compress(s, w, 128, 128, DS4_ROW_F32);
    check_index(s, w, 5, 64, 16, DS4_ROW_F32, false);
    check_index(s, w, 64, 128, 100, DS4_ROW_FP4, false);
    check_index(s, w, 64, 128, 100, DS4_ROW_FP4, true);
    check_route(s, w, 256, false);
    check_route(s, w, 70, true);
    check_attention(s, w, 8, 128, 4, true, DS4_ROW_BF16, false, false);
    check_attention(s, w, 8, 128, 0, false, DS4_ROW_F32, false, false);
    check_attention(s, w, 5, 80, 16, false, DS4_ROW_F32, false, false);
    check_attention(s, w, 8, 128, 4, false, DS4_ROW_BF16, true, false);
    check_attention(s, w, 64, 512, 4, true, DS4_ROW_FP8, false, false);
    check_attention(s, w, 64, 512, 128, false, DS4_ROW_FP8, false, false);
    check_attention(s, w, 64, 512, 4, true, DS4_ROW_FP8, false, true);
    check_attention(s, w, 8, 128, 4, false, DS4_ROW_BF16, false, true);
    check_attention(s, w, 5, 80, 16, false, DS4_ROW_F32, false, true);
    free(w);
}

int main(int argc, char **argv)
{
    const int32_t ordinal = argc > 1 ? (int32_t)strtol(argv[1], NULL, 10) : 0;

    cpu = ds4_backend_find("cpu");
    cuda = ds4_backend_find("cuda");
    if (cuda == NULL)
        die("built without CUDA");
    for (int fast = 0; fast < 2; fast++) {
        for (size_t i = 0; i < N_STEP; i++) {
            cpu_dev = open_device(cpu, 0, DS4_PRODUCTS_EXACT);
            exact_dev = open_device(cuda, ordinal, DS4_PRODUCTS_EXACT);
            fast_dev = open_device(cuda, ordinal, DS4_PRODUCTS_FAST);
            now = fast ? fast_dev : exact_dev;
            check_step(&steps[i]);
            cuda->close(fast_dev);
            cuda->close(exact_dev);
            cpu->close(cpu_dev);
        }
    }
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed == 0 ? 0 : 1;
}

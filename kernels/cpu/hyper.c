/* Hyper-connections: reading one row out of the residual streams, writing one back, and the head's
 * last read (step 9, paper 2.3 to 2.5).
 *
 * The mixing weights come from one exact product over the whole state; the norm factor multiplies its
 * result, as in the checkpoint's code.  comb[j][k]: j is the source stream, k the destination. */
#include "kernels/cpu/cpu.h"

#include "kernels/cpu/math.h"

#include <math.h>
#include <string.h>

#define DS4_HYPER_CHUNK                                                                            \
    256 /* dims written at once: all old streams are read before any is replaced */

struct read_job {
    struct ds4_device *dev;
    const struct ds4_hyper_read_args *a;
    struct ds4_scratch scratch;
    float *mix; /* [n_tok, (2 + n_hyper) * n_hyper] */
};

struct head_job {
    struct ds4_device *dev;
    const struct ds4_hyper_head_args *a;
    struct ds4_scratch scratch;
    float *mix; /* [n_row, n_hyper] */
};

struct ds4_need ds4_cpu_hyper_need(int32_t n_tok, int32_t n_hyper, int32_t d)
{
    struct ds4_need need = ds4_cpu_gemm_need(0, n_hyper * d, n_hyper * d);

    need.shared_bytes = (size_t)n_tok * (size_t)(n_hyper * (n_hyper + 2)) * sizeof(float);
    return need;
}

static void row_step(float *c, int32_t n, float eps)
{
    for (int32_t j = 0; j < n; j++) {
        float sum = 0.0f;

        for (int32_t k = 0; k < n; k++)
            sum += c[j * n + k];
        for (int32_t k = 0; k < n; k++)
            c[j * n + k] /= sum + eps;
    }
}

static void column_step(float *c, int32_t n, float eps)
{
    for (int32_t k = 0; k < n; k++) {
        float sum = 0.0f;

        for (int32_t j = 0; j < n; j++)
            sum += c[j * n + k];
        for (int32_t j = 0; j < n; j++)
            c[j * n + k] /= sum + eps;
    }
}

/* Row softmax (the first row step) plus eps, then columns; then rows and columns in turn. */
static void sinkhorn(float *c, int32_t n, int32_t iters, float eps)
{
    for (int32_t j = 0; j < n; j++) {
        float *row = c + j * n, top = row[0], sum = 0.0f;

        for (int32_t k = 1; k < n; k++)
            top = row[k] > top ? row[k] : top;
        for (int32_t k = 0; k < n; k++) {
            row[k] = ds4_expf(row[k] - top);
            sum += row[k];
        }
        for (int32_t k = 0; k < n; k++)
            row[k] = row[k] / sum + eps;
    }
    column_step(c, n, eps);
    for (int32_t i = 1; i < iters; i++) {
        row_step(c, n, eps);
        column_step(c, n, eps);
    }
}

/* 1 / sqrt(mean(x^2) + eps) over the n values of one row's streams. */
static float norm_factor(const struct ds4_simd *simd, const float *x, int32_t n, float eps)
{
    float square;

    simd->dot(x, n, x, 0, 1, &square);
    return 1.0f / sqrtf(square / (float)n + eps);
}

static void read_token(void *ctx, int32_t t, int32_t thread)
{
    const struct read_job *job = ctx;
    const struct ds4_hyper_read_args *a = job->a;
    const struct ds4_simd *simd = job->dev->simd;
    int32_t n = a->x.shape[1], d = a->x.shape[2];
    const float *x = ds4_cpu_load(&a->x, t * a->x.stride[0], n * d,
                                  ds4_scratch_of(&job->scratch, thread)); /* [n, d] */
    const float *m = job->mix + (int64_t)t * n * (n + 2);
    float *post = a->post + (int64_t)t * n, *comb = a->comb + (int64_t)t * n * n;
    float *u = (float *)a->u.data + t * a->u.stride[0];
    float r = norm_factor(simd, x, n * d, a->rms_eps), pre[DS4_MAX_HYPER];

    for (int32_t j = 0; j < n; j++) {
        pre[j] = ds4_sigmoid(m[j] * r * a->scale[0] + a->base[j]) + a->hyper_eps;
        post[j] = 2.0f * ds4_sigmoid(m[n + j] * r * a->scale[1] + a->base[n + j]);
    }
    for (int32_t i = 0; i < n * n; i++)
        comb[i] = m[2 * n + i] * r * a->scale[2] + a->base[2 * n + i];
    sinkhorn(comb, n, a->sinkhorn_iters, a->hyper_eps);
    memset(u, 0, (size_t)d * sizeof(*u));
    simd->axpy(u, d, x, d, pre, n);
}

void ds4_cpu_hyper_read(struct ds4_device *dev, const struct ds4_hyper_read_args *a)
{
    int32_t n_tok = a->x.shape[0], n = a->x.shape[1], d = a->x.shape[2];
    struct ds4_scratch scratch = ds4_cpu_scratch(dev, ds4_cpu_hyper_need(n_tok, n, d));
    struct read_job job = {dev, a, scratch, (float *)(void *)scratch.shared};
    struct ds4_exact_args mix = {
        .w = &a->fn, .n_group = 1, .x = &a->x, .n = n_tok, .y = job.mix, .y_stride = n * (n + 2)};

    assert(n <= DS4_MAX_HYPER && a->fn.n_row == n * (n + 2) && a->fn.n_col == n * d);
    assert(a->x.stride[1] == d && a->u.dtype == DS4_DTYPE_F32);
    if (a->o.data != NULL) {
        struct ds4_hyper_write_args write = {
            .o = a->o, .post = a->post, .comb = a->comb, .x = a->x};

        ds4_cpu_hyper_write(dev, &write);
    }
    ds4_cpu_exact(dev, &mix, &scratch);
    ds4_pool_run(dev->pool, n_tok, read_token, &job);
    if (a->norm != NULL) {
        struct ds4_rmsnorm_args norm = {.x = a->u, .w = a->norm, .eps = a->rms_eps, .y = a->u};

        ds4_cpu_rmsnorm(dev, &norm);
    }
}

struct write_job {
    struct ds4_device *dev;
    const struct ds4_hyper_write_args *a;
};

static void write_token(void *ctx, int32_t t, int32_t thread)
{
    const struct write_job *job = ctx;
    const struct ds4_hyper_write_args *a = job->a;
    int32_t n = a->x.shape[1], d = a->x.shape[2];
    const float *o = (const float *)a->o.data + t * a->o.stride[0];
    const float *post = a->post + (int64_t)t * n, *comb = a->comb + (int64_t)t * n * n;

    (void)thread;
    for (int32_t at = 0; at < d; at += DS4_HYPER_CHUNK) {
        int32_t width = d - at < DS4_HYPER_CHUNK ? d - at : DS4_HYPER_CHUNK;
        float old[DS4_MAX_HYPER * DS4_HYPER_CHUNK], next[DS4_HYPER_CHUNK];

        for (int32_t j = 0; j < n; j++) {
            const float *row =
                ds4_cpu_load(&a->x, t * a->x.stride[0] + j * a->x.stride[1] + at, width, next);

            memcpy(old + j * DS4_HYPER_CHUNK, row, (size_t)width * sizeof(*row));
        }
        for (int32_t k = 0; k < n; k++) {
            float column[DS4_MAX_HYPER];

            for (int32_t j = 0; j < n; j++)
                column[j] = comb[j * n + k];
            job->dev->simd->scale(o + at, post[k], NULL, width, next);
            job->dev->simd->axpy(next, width, old, DS4_HYPER_CHUNK, column, n);
            ds4_cpu_store(&a->x, t * a->x.stride[0] + k * a->x.stride[1] + at, width, next);
        }
    }
}

void ds4_cpu_hyper_write(struct ds4_device *dev, const struct ds4_hyper_write_args *a)
{
    struct write_job job = {dev, a};

    assert(a->x.shape[1] <= DS4_MAX_HYPER && a->o.dtype == DS4_DTYPE_F32);
    ds4_pool_run(dev->pool, a->x.shape[0], write_token, &job);
}

static void head_row(void *ctx, int32_t i, int32_t thread)
{
    const struct head_job *job = ctx;
    const struct ds4_hyper_head_args *a = job->a;
    const struct ds4_simd *simd = job->dev->simd;
    int32_t n = a->x.shape[1], d = a->x.shape[2];
    const float *x = ds4_cpu_load(&a->x, a->row[i] * a->x.stride[0], n * d,
                                  ds4_scratch_of(&job->scratch, thread));
    float *h = (float *)a->h.data + i * a->h.stride[0];
    float r = norm_factor(simd, x, n * d, a->rms_eps), pre[DS4_MAX_HYPER];

    for (int32_t j = 0; j < n; j++) {
        float m = job->mix[(int64_t)i * n + j] * r;

        pre[j] = ds4_sigmoid(m * a->scale[0] + a->base[j]) + a->hyper_eps;
    }
    memset(h, 0, (size_t)d * sizeof(*h));
    simd->axpy(h, d, x, d, pre, n);
}

void ds4_cpu_hyper_head(struct ds4_device *dev, const struct ds4_hyper_head_args *a)
{
    int32_t n = a->x.shape[1], d = a->x.shape[2];
    struct ds4_scratch scratch = ds4_cpu_scratch(dev, ds4_cpu_hyper_need(a->n_row, n, d));
    struct head_job job = {dev, a, scratch, (float *)(void *)scratch.shared};
    struct ds4_exact_args mix = {.w = &a->fn,
                                 .n_group = 1,
                                 .x = &a->x,
                                 .row = a->row,
                                 .n = a->n_row,
                                 .y = job.mix,
                                 .y_stride = n};

    assert(n <= DS4_MAX_HYPER && a->fn.n_row == n && a->fn.n_col == n * d);
    assert(a->x.stride[1] == d && a->h.dtype == DS4_DTYPE_F32);
    ds4_cpu_exact(dev, &mix, &scratch);
    ds4_pool_run(dev->pool, a->n_row, head_row, &job);
}

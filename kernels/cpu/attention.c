/* Attention of one layer over window and compressed rows (step 9, paper 3.9).
 *
 * Exact two-pass softmax: all products first, their maximum (the sink included), then exponentials
 * and the weighted sum.  Rows are listed window first in rising position, then compressed rows
 * rising; sums run in that order, so a result depends on the query's position and never on how the
 * step was cut.  Keys and values are the same row, one for all heads: a tile of rows is decoded once
 * and meets all heads of the item. */
#include "kernels/cpu/cpu.h"

#include "kernels/cpu/math.h"

#include <math.h>
#include <string.h>

#define DS4_ATTENTION_TILE   64          /* rows decoded at once */
#define DS4_ATTENTION_FLOATS (64 * 1024) /* scores of an item, unless one head needs more */

struct job {
    struct ds4_device *dev;
    const struct ds4_attention_args *a;
    struct ds4_scratch scratch;
    int32_t heads_per_item;
    int32_t items_per_tok;
    float scale;
};

/* The rows one query sees. */
struct view {
    const struct ds4_batch_entry *entry;
    const int32_t *sel; /* NULL: compressed rows 0, 1, ... */
    int32_t first_pos;
    int32_t n_window;
    int32_t n_row; /* window and compressed */
};

struct ds4_need ds4_cpu_attention_need(int32_t n_row, int32_t d_head)
{
    size_t scores = n_row > DS4_ATTENTION_FLOATS ? (size_t)n_row : DS4_ATTENTION_FLOATS;
    struct ds4_need need = {.thread_bytes =
                                (scores + DS4_ATTENTION_TILE * (size_t)d_head) * sizeof(float)};

    return need;
}

static struct view view_of(const struct ds4_attention_args *a, int32_t t)
{
    int32_t pos = a->batch->pos[t], n = 0;
    struct view v = {.entry = &a->batch->entry[a->batch->entry_of[t]]};

    v.first_pos = pos - a->window_tok + 1 > 0 ? pos - a->window_tok + 1 : 0;
    v.n_window = pos - v.first_pos + 1;
    if (a->ratio > 0 && a->sel != NULL) {
        v.sel = a->sel + (int64_t)t * a->top_k;
        n = a->n_sel[t];
    } else if (a->ratio > 0) {
        int64_t stored = (int64_t)v.entry->n_block * a->pages.rows_per_block;

        n = (pos + 1) / a->ratio;
        n = n < stored ? n : (int32_t)stored;
    }
    v.n_row = v.n_window + n;
    return v;
}

static void fetch_row(const struct ds4_attention_args *a, const struct view *v, int32_t i,
                      float *row)
{
    int32_t d = a->kv.shape[1];

    if (i < v->n_window) {
        int32_t pos = v->first_pos + i;
        int64_t own = v->entry->first_row + (pos - v->entry->base_pos);

        if (pos >= v->entry->base_pos)
            memcpy(row, (const float *)a->kv.data + own * a->kv.stride[0],
                   (size_t)d * sizeof(*row));
        else
            ds4_cpu_unpack_row(a->ring.format, d, a->ring.d_rope,
                               ds4_ring_row(&a->ring, v->entry->slot, pos), row);
    } else {
        int32_t j = i - v->n_window;

        ds4_cpu_read_page(&a->pages, v->entry, v->sel != NULL ? v->sel[j] : j, row);
    }
}

/* Decodes the rows from `first` on into tile; returns how many. */
static int32_t fetch_tile(const struct ds4_attention_args *a, const struct view *v, int32_t first,
                          float *tile)
{
    int32_t n = v->n_row - first;

    n = n < DS4_ATTENTION_TILE ? n : DS4_ATTENTION_TILE;
    for (int32_t i = 0; i < n; i++)
        fetch_row(a, v, first + i, tile + (int64_t)i * a->kv.shape[1]);
    return n;
}

/* z [n_row]: products in, weights out; returns 1 / denominator. */
static float soften(const struct ds4_simd *simd, float *z, int32_t n, float scale, float sink)
{
    float top, sum;

    simd->scale(z, scale, NULL, n, z);
    top = simd->max(z, n);
    top = sink > top ? sink : top;
    sum = simd->exp_sum(z, n, top);
    return 1.0f / (sum + ds4_expf(sink - top));
}

/* A query may read the compressed rows that closed at or before it. */
static void check_selection(const struct job *job, const struct view *v, int32_t t)
{
    int32_t visible = (job->a->batch->pos[t] + 1) / job->a->ratio;

    for (int32_t i = 0; i < v->n_row - v->n_window; i++)
        if (v->sel[i] < 0 || v->sel[i] >= visible)
            atomic_store(&job->dev->wrong, "a selected row is out of range");
}

static void attend(void *ctx, int32_t item, int32_t thread)
{
    const struct job *job = ctx;
    const struct ds4_attention_args *a = job->a;
    const struct ds4_simd *simd = job->dev->simd;
    int32_t t = item / job->items_per_tok, n_head = a->q.shape[1], d = a->kv.shape[1];
    int32_t h0 = item % job->items_per_tok * job->heads_per_item;
    int32_t h1 = h0 + job->heads_per_item < n_head ? h0 + job->heads_per_item : n_head;
    float *tile = ds4_scratch_of(&job->scratch, thread); /* [DS4_ATTENTION_TILE, d] */
    float *z = tile + (int64_t)DS4_ATTENTION_TILE * d;   /* [heads, n_row] */
    const float *q = (const float *)a->q.data + t * a->q.stride[0];
    float *o = (float *)a->o.data + t * a->o.stride[0];
    struct view v;

    if (!ds4_cpu_active(a->batch, t))
        return;
    v = view_of(a, t);
    if (v.sel != NULL && h0 == 0)
        check_selection(job, &v, t);
    for (int32_t first = 0; first < v.n_row; first += DS4_ATTENTION_TILE) {
        int32_t n = fetch_tile(a, &v, first, tile);

        for (int32_t h = h0; h < h1; h++)
            simd->dot(q + h * a->q.stride[1], d, tile, d, n,
                      z + (int64_t)(h - h0) * v.n_row + first);
    }
    for (int32_t h = h0; h < h1; h++)
        memset(o + h * a->o.stride[1], 0, (size_t)d * sizeof(*o));
    for (int32_t h = h0; h < h1; h++) {
        float *w = z + (int64_t)(h - h0) * v.n_row;
        float inverse = soften(simd, w, v.n_row, job->scale, a->sink[h]);

        simd->scale(w, inverse, NULL, v.n_row, w);
    }
    for (int32_t first = 0; first < v.n_row; first += DS4_ATTENTION_TILE) {
        int32_t n = fetch_tile(a, &v, first, tile);

        for (int32_t h = h0; h < h1; h++)
            simd->axpy(o + h * a->o.stride[1], d, tile, d, z + (int64_t)(h - h0) * v.n_row + first,
                       n);
    }
}

static int32_t heads_that_fit(int32_t n_row)
{
    return n_row < DS4_ATTENTION_FLOATS && n_row > 0 ? DS4_ATTENTION_FLOATS / n_row : 1;
}

void ds4_cpu_attention(struct ds4_device *dev, const struct ds4_attention_args *a)
{
    int32_t n_tok = a->batch->n_tok, n_head = a->q.shape[1], most = 1;
    int32_t threads = ds4_pool_threads(dev->pool), share;
    struct job job = {.dev = dev, .a = a};

    assert(a->q.dtype == DS4_DTYPE_F32 && a->kv.dtype == DS4_DTYPE_F32 &&
           a->o.dtype == DS4_DTYPE_F32 && a->q.n_dim == 3 && a->o.n_dim == 3);
    assert(a->ratio == 0 || a->pages.data != NULL);
    if (n_tok == 0)
        return;
    for (int32_t t = 0; t < n_tok; t++) {
        int32_t n = ds4_cpu_active(a->batch, t) ? view_of(a, t).n_row : 0;

        most = n > most ? n : most;
    }
    /* All heads of a query share the decoded rows, unless there are too few queries. */
    share = n_tok >= threads ? n_head : (n_head * n_tok + threads - 1) / threads;
    job.heads_per_item = heads_that_fit(most);
    if (job.heads_per_item > share)
        job.heads_per_item = share;
    job.items_per_tok = (n_head + job.heads_per_item - 1) / job.heads_per_item;
    job.scale = (float)(1.0 / sqrt((double)a->kv.shape[1]));
    job.scratch = ds4_cpu_scratch(dev, ds4_cpu_attention_need(most, a->kv.shape[1]));
    ds4_pool_run(dev->pool, n_tok * job.items_per_tok, attend, &job);
    if (a->rope.freq != NULL) {
        struct ds4_rope_args back = {
            .batch = a->batch, .x = a->o, .rope = a->rope, .inverse = true};

        ds4_cpu_rope(dev, &back);
    }
    if (a->store) {
        struct ds4_ring_write_args write = {.batch = a->batch, .x = a->kv, .ring = a->ring};

        ds4_cpu_ring_write(dev, &write);
    }
}

/* Lightning indexer: which compressed rows a query attends to (step 9, paper 3.7).
 *
 * score_j = sum over heads, rising, of w_h * max(0, q_h . key_j), in f32; the top_k largest, ties to
 * the lower row, written in rising order so that attention adds them in one fixed order.  With few
 * queries the rows are shared out, with many the queries; a score does not know the difference. */
#include "kernels/cpu/cpu.h"

#define DS4_INDEX_TILE 64 /* keys decoded at once */

struct job {
    struct ds4_device *dev;
    const struct ds4_index_args *a;
    struct ds4_scratch scratch;
    int32_t tok;   /* the query whose rows are shared out */
    int32_t n_row; /* its visible rows */
};

struct ds4_need ds4_cpu_index_need(int32_t n_row, int32_t d)
{
    struct ds4_need need;

    need.shared_bytes = (size_t)n_row * sizeof(float);
    need.thread_bytes = ((size_t)n_row + DS4_INDEX_TILE * (size_t)d) * sizeof(float);
    return need;
}

/* Rows j < (pos + 1) / ratio, as far as the block table reaches. */
static int32_t visible_rows(const struct ds4_index_args *a, int32_t t)
{
    const struct ds4_batch_entry *entry = &a->batch->entry[a->batch->entry_of[t]];
    int32_t n = (a->batch->pos[t] + 1) / a->ratio;
    int64_t stored = (int64_t)entry->n_block * a->pages.rows_per_block;

    return n < stored ? n : (int32_t)stored;
}

/* score[j - first] for rows first .. first + n - 1 of query t; keys [DS4_INDEX_TILE, d]. */
static void score_tile(const struct job *job, int32_t t, int32_t first, int32_t n, float *keys,
                       float *score)
{
    const struct ds4_index_args *a = job->a;
    const struct ds4_batch_entry *entry = &a->batch->entry[a->batch->entry_of[t]];
    const float *w = (const float *)a->w.data + t * a->w.stride[0];
    int32_t d = a->pages.d;
    float product[DS4_INDEX_TILE];

    for (int32_t i = 0; i < n; i++) {
        ds4_cpu_read_page(&a->pages, entry, first + i, keys + (int64_t)i * d);
        score[i] = 0.0f;
    }
    for (int32_t h = 0; h < a->q.shape[1]; h++) {
        const float *q = (const float *)a->q.data + t * a->q.stride[0] + h * a->q.stride[1];

        job->dev->simd->dot(q, d, keys, d, n, product);
        for (int32_t i = 0; i < n; i++)
            score[i] += w[h] * (product[i] < 0.0f ? 0.0f : product[i]); /* a NaN stays one */
    }
}

static int32_t tile_width(int32_t first, int32_t n)
{
    return n - first < DS4_INDEX_TILE ? n - first : DS4_INDEX_TILE;
}

static void score_shared(void *ctx, int32_t item, int32_t thread)
{
    const struct job *job = ctx;
    int32_t first = item * DS4_INDEX_TILE;

    score_tile(job, job->tok, first, tile_width(first, job->n_row),
               ds4_scratch_of(&job->scratch, thread), (float *)(void *)job->scratch.shared + first);
}

static void select_token(void *ctx, int32_t t, int32_t thread)
{
    const struct job *job = ctx;
    const struct ds4_index_args *a = job->a;
    float *keys = ds4_scratch_of(&job->scratch, thread);
    float *score = keys + (int64_t)DS4_INDEX_TILE * a->pages.d;
    int32_t n;

    if (!ds4_cpu_active(a->batch, t)) {
        a->n_sel[t] = 0;
        return;
    }
    n = visible_rows(a, t);
    for (int32_t first = 0; n > a->top_k && first < n; first += DS4_INDEX_TILE)
        score_tile(job, t, first, tile_width(first, n), keys, score + first);
    a->n_sel[t] = ds4_cpu_top_k(score, n, a->top_k, a->sel + (int64_t)t * a->top_k);
}

/* One query over all threads; worth it only when there is something to choose from. */
static void select_wide(struct job *job, int32_t t)
{
    const struct ds4_index_args *a = job->a;

    if (!ds4_cpu_active(a->batch, t) || visible_rows(a, t) <= a->top_k) {
        select_token(job, t, 0);
        return;
    }
    job->tok = t;
    job->n_row = visible_rows(a, t);
    ds4_pool_run(job->dev->pool, (job->n_row + DS4_INDEX_TILE - 1) / DS4_INDEX_TILE, score_shared,
                 job);
    a->n_sel[t] = ds4_cpu_top_k((const float *)(void *)job->scratch.shared, job->n_row, a->top_k,
                                a->sel + (int64_t)t * a->top_k);
}

/* The queries as the keys are stored. */
static void make_queries(struct ds4_device *dev, const struct ds4_index_args *a)
{
    const struct ds4_rope_args rotate = {.batch = a->batch, .x = a->q, .rope = a->rope};
    const struct ds4_round_args round = {
        .x = ds4_tensor_2d(a->q.data, DS4_DTYPE_F32, a->batch->n_tok * a->q.shape[1], a->pages.d),
        .format = a->pages.format,
        .d_rope = a->rope.d_rope};

    assert(a->q.stride[1] == a->pages.d && a->q.stride[0] == a->q.shape[1] * a->q.stride[1]);
    ds4_cpu_rope(dev, &rotate);
    ds4_cpu_round(dev, &round);
}

void ds4_cpu_index(struct ds4_device *dev, const struct ds4_index_args *a)
{
    int32_t n_tok = a->batch->n_tok, most = 1;
    struct job job = {.dev = dev, .a = a};

    assert(a->q.dtype == DS4_DTYPE_F32 && a->w.dtype == DS4_DTYPE_F32);
    assert(a->q.shape[2] == a->pages.d && a->ratio >= 1 && a->top_k >= 1);
    if (a->rope.freq != NULL)
        make_queries(dev, a);
    for (int32_t t = 0; t < n_tok; t++) {
        int32_t n = ds4_cpu_active(a->batch, t) ? visible_rows(a, t) : 0;

        most = n > most ? n : most;
    }
    job.scratch = ds4_cpu_scratch(dev, ds4_cpu_index_need(most, a->pages.d));
    if (n_tok >= ds4_pool_threads(dev->pool)) {
        ds4_pool_run(dev->pool, n_tok, select_token, &job);
        return;
    }
    for (int32_t t = 0; t < n_tok; t++)
        select_wide(&job, t);
}

/* Compressors: one pooled row per block of `ratio` tokens (step 9, paper 3.6).
 *
 * One routine finishes a row for prefill, decode and verification alike: candidates in rising
 * position, one softmax per dimension, norm, rotation at the block's first position, cache rounding.
 * A row so depends on its own candidates only, however the tokens were cut into steps.  Candidates
 * before an entry's base_pos come from the rings, the others from the step; the rings are updated
 * last, because a long step would overwrite history that its first blocks need. */
#include "kernels/cpu/cpu.h"

#include <math.h>
#include <string.h>

struct job {
    struct ds4_device *dev;
    const struct ds4_compress_args *a;
    struct ds4_scratch scratch;
};

/* The step's token range of one entry in blocks: those whose last token lies in it. */
static int32_t first_block(const struct ds4_batch_entry *entry, int32_t ratio)
{
    return entry->base_pos / ratio;
}

static int32_t n_block_done(const struct ds4_batch_entry *entry, int32_t ratio)
{
    if (!entry->active)
        return 0;
    return (entry->base_pos + entry->n_row) / ratio - first_block(entry, ratio);
}

struct ds4_need ds4_cpu_compress_need(int32_t d)
{
    struct ds4_need need = {.thread_bytes = 4 * (size_t)d * sizeof(float)};

    return need;
}

static void add_ape(void *ctx, int32_t t, int32_t thread)
{
    const struct job *job = ctx;
    const struct ds4_compress_args *a = job->a;
    float *g = (float *)a->g.data + t * a->g.stride[0]; /* [c * d] */
    float *ape = ds4_scratch_of(&job->scratch, thread); /* [c * d] */

    if (!ds4_cpu_active(a->batch, t))
        return;
    job->dev->simd->dequant(a->ape.dtype, ds4_weight_row(&a->ape, 0, a->batch->pos[t] % a->ratio),
                            a->ape.n_col, ape);
    for (int32_t i = 0; i < a->ape.n_col; i++)
        g[i] += ape[i];
}

struct candidate {
    const float *k;
    const float *g;
};

static struct candidate find(const struct ds4_compress_args *a, const struct ds4_batch_entry *entry,
                             int32_t pos, int32_t offset)
{
    int64_t row = entry->first_row + (pos - entry->base_pos);
    struct candidate c;

    if (pos < entry->base_pos) {
        c.k = (const float *)(const void *)ds4_ring_row(&a->ring_k, entry->slot, pos) + offset;
        c.g = (const float *)(const void *)ds4_ring_row(&a->ring_g, entry->slot, pos) + offset;
    } else {
        c.k = (const float *)a->k.data + row * a->k.stride[0] + offset;
        c.g = (const float *)a->g.data + row * a->g.stride[0] + offset;
    }
    return c;
}

/* Candidate i of block j: with overlap the previous block's tokens with the first half of their
 * columns, then the block's own with the second. */
static struct candidate candidate_of(const struct ds4_compress_args *a,
                                     const struct ds4_batch_entry *entry, int32_t j, int32_t i)
{
    int32_t d = a->pages.d;

    if (!a->overlap)
        return find(a, entry, j * a->ratio + i, 0);
    return find(a, entry, (j - 1) * a->ratio + i, i < a->ratio ? 0 : d);
}

/* row [d] = the pooled, normed, rotated and rounded row of block j.  work [3 * d]. */
static void finish_row(const struct job *job, const struct ds4_batch_entry *entry, int32_t j,
                       float *row, float *work)
{
    const struct ds4_compress_args *a = job->a;
    const struct ds4_simd *simd = job->dev->simd;
    int32_t d = a->pages.d, last = a->overlap ? 2 * a->ratio : a->ratio;
    int32_t first = a->overlap && j == 0 ? a->ratio : 0; /* block 0 has no left half */
    float *top = work, *sum = work + d, *table = work + 2 * (int64_t)d, square;

    for (int32_t i = 0; i < d; i++)
        top[i] = -INFINITY;
    for (int32_t c = first; c < last; c++) {
        const float *g = candidate_of(a, entry, j, c).g;

        for (int32_t i = 0; i < d; i++)
            top[i] = g[i] > top[i] ? g[i] : top[i];
    }
    memset(sum, 0, (size_t)d * sizeof(*sum));
    memset(row, 0, (size_t)d * sizeof(*row));
    for (int32_t c = first; c < last; c++) {
        struct candidate at = candidate_of(a, entry, j, c);

        simd->pool(at.g, at.k, top, d, sum, row);
    }
    for (int32_t i = 0; i < d; i++)
        row[i] /= sum[i];
    simd->dot(row, d, row, 0, 1, &square);
    simd->scale(row, 1.0f / sqrtf(square / (float)d + a->eps), a->norm, d, row);
    ds4_cpu_rope_table(&a->rope, j * a->ratio, table);
    ds4_cpu_rope_apply(table, a->rope.d_rope, false, row + d - a->rope.d_rope);
    ds4_cpu_round_row(a->pages.format, d, a->pages.d_rope, row);
}

static void finish_block(void *ctx, int32_t item, int32_t thread)
{
    const struct job *job = ctx;
    const struct ds4_compress_args *a = job->a;
    const struct ds4_batch_entry *entry = a->batch->entry;
    float *work = ds4_scratch_of(&job->scratch, thread);
    uint8_t *page;
    int32_t j;

    for (; item >= n_block_done(entry, a->ratio); entry++)
        item -= n_block_done(entry, a->ratio);
    j = first_block(entry, a->ratio) + item;
    page = ds4_cpu_page_row(&a->pages, entry, j);
    if ((j + 1) * a->ratio > entry->cap_tok || (j + 1) * a->ratio <= entry->seal_tok ||
        page == NULL)
        return; /* completed by a token beyond the lease, or long ago */
    finish_row(job, entry, j, work, work + a->pages.d);
    ds4_cpu_pack_row(a->pages.format, a->pages.d, a->pages.d_rope, work, page);
}

void ds4_cpu_compress(struct ds4_device *dev, const struct ds4_compress_args *a)
{
    struct job job = {dev, a, ds4_cpu_scratch(dev, ds4_cpu_compress_need(a->pages.d))};
    struct ds4_ring_write_args keep_k = {a->batch, a->k, a->ring_k};
    struct ds4_ring_write_args keep_g = {a->batch, a->g, a->ring_g};
    int32_t n = 0;

    assert(a->k.dtype == DS4_DTYPE_F32 && a->g.dtype == DS4_DTYPE_F32);
    assert(a->ring_k.format == DS4_ROW_F32 && a->ring_g.format == DS4_ROW_F32);
    assert(a->ape.n_col == (a->overlap ? 2 : 1) * a->pages.d && a->ape.n_row == a->ratio);
    for (int32_t e = 0; e < a->batch->n_entry; e++)
        n += n_block_done(&a->batch->entry[e], a->ratio);
    ds4_pool_run(dev->pool, a->batch->n_tok, add_ape, &job);
    ds4_pool_run(dev->pool, n, finish_block, &job);
    ds4_cpu_ring_write(dev, &keep_k);
    ds4_cpu_ring_write(dev, &keep_g);
}

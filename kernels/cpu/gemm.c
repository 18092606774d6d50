/* Products with a weight matrix (step 9).
 *
 * EXACT: a tile of weight rows is dequantised and meets the f32 activations of DS4_TILE_INPUTS rows of
 * the step; a result depends on its own row only.  FAST: activations become int8 blocks once per call,
 * products are integer sums per block.  Work is split over tiles of weight rows; a tile never crosses
 * a group of the block-diagonal product. */
#include "kernels/cpu/cpu.h"

#include <string.h>

#define DS4_ITEMS_WANTED 4 /* tiles per thread, for balance */

struct job {
    struct ds4_device *dev;
    const struct ds4_exact_args *a;
    struct ds4_scratch scratch;
    enum ds4_act_kind kind;
    size_t act_bytes;   /* of one row's blocks, all groups */
    size_t group_bytes; /* of one group's part */
    int32_t tile_rows;
    int32_t tiles_per_group;
    int32_t rows_per_group;
};

struct ds4_need ds4_cpu_gemm_need(int32_t n_tok, int32_t n_col_all, int32_t n_col)
{
    size_t small = ds4_cpu_act_bytes(DS4_ACT_32, n_col_all);
    size_t super = ds4_cpu_act_bytes(DS4_ACT_256, n_col_all);
    struct ds4_need need;

    need.shared_bytes = (size_t)n_tok * ds4_cpu_align(small > super ? small : super);
    need.thread_bytes = DS4_TILE_INPUTS * (size_t)n_col * sizeof(float);
    return need;
}

static void plan_tiles(struct job *job)
{
    const struct ds4_weight *w = job->a->w;
    int32_t share = w->n_row / (ds4_pool_threads(job->dev->pool) * DS4_ITEMS_WANTED);

    job->rows_per_group = w->n_row / job->a->n_group;
    job->tile_rows = share < 4 ? 4 : share > DS4_TILE_ROWS ? DS4_TILE_ROWS : share;
    job->tiles_per_group = (job->rows_per_group + job->tile_rows - 1) / job->tile_rows;
}

/* Input i of a group: its int8 blocks, or its f32 values, converted into buf if need be. */
static const void *input_of(const struct job *job, int32_t group, int32_t i, float *buf)
{
    const struct ds4_exact_args *a = job->a;
    int32_t n_col = a->w->n_col;
    int64_t at = (a->row != NULL ? a->row[i] : i) * a->x->stride[0];

    if (job->kind != DS4_ACT_NONE)
        return job->scratch.shared + (size_t)i * job->act_bytes + (size_t)group * job->group_bytes;
    return ds4_cpu_load(a->x, at + (int64_t)group * n_col, n_col, buf);
}

static void multiply_tile(void *ctx, int32_t item, int32_t thread)
{
    const struct job *job = ctx;
    const struct ds4_exact_args *a = job->a;
    int32_t group = item / job->tiles_per_group, n_col = a->w->n_col;
    int32_t first = item % job->tiles_per_group * job->tile_rows;
    int32_t n_row = job->rows_per_group - first;
    struct ds4_rows rows;
    float *converted = ds4_scratch_of(&job->scratch, thread); /* [DS4_TILE_INPUTS, n_col] */

    n_row = n_row > job->tile_rows ? job->tile_rows : n_row;
    first += group * job->rows_per_group;
    rows = ds4_cpu_rows(a->w, 0, first, n_row);
    for (int32_t i = 0; i < a->n; i += DS4_TILE_INPUTS) {
        int32_t n = a->n - i < DS4_TILE_INPUTS ? a->n - i : DS4_TILE_INPUTS;
        const void *in[DS4_TILE_INPUTS];
        float out[DS4_TILE_INPUTS][DS4_TILE_ROWS];

        for (int32_t j = 0; j < n; j++)
            in[j] = input_of(job, group, i + j, converted + (int64_t)j * n_col);
        ds4_cpu_multiply(job->dev->simd, job->kind, &rows, in, n, out);
        for (int32_t j = 0; j < n; j++)
            memcpy(a->y + (i + j) * a->y_stride + first, out[j], (size_t)n_row * sizeof(float));
    }
}

static void run(struct job *job)
{
    plan_tiles(job);
    ds4_pool_run(job->dev->pool, job->a->n_group * job->tiles_per_group, multiply_tile, job);
}

void ds4_cpu_exact(struct ds4_device *dev, const struct ds4_exact_args *a,
                   const struct ds4_scratch *scratch)
{
    struct job job = {.dev = dev, .a = a, .scratch = *scratch, .kind = DS4_ACT_NONE};

    run(&job);
}

static void quantise_row(void *ctx, int32_t i, int32_t thread)
{
    const struct job *job = ctx;
    const struct ds4_exact_args *a = job->a;
    int32_t n_col = a->w->n_col;

    for (int32_t g = 0; g < a->n_group; g++) {
        const float *x = ds4_cpu_load(a->x, i * a->x->stride[0] + (int64_t)g * n_col, n_col,
                                      ds4_scratch_of(&job->scratch, thread));

        ds4_cpu_act_quantise(job->kind, x, n_col,
                             job->scratch.shared + (size_t)i * job->act_bytes +
                                 (size_t)g * job->group_bytes);
    }
}

void ds4_cpu_gemm(struct ds4_device *dev, const struct ds4_gemm_args *a)
{
    int32_t n_col_all = a->w.n_col * a->n_group;
    struct ds4_exact_args e = {.w = &a->w,
                               .n_group = a->n_group,
                               .x = &a->x,
                               .n = a->x.shape[0],
                               .y = a->y.data,
                               .y_stride = a->y.stride[0]};
    struct job job = {.dev = dev, .a = &e, .kind = DS4_ACT_NONE};

    assert(a->n_group >= 1 && a->w.n_row % a->n_group == 0 && a->w.n_stack == 1);
    assert(a->y.dtype == DS4_DTYPE_F32 && a->x.shape[0] == a->y.shape[0]);
    job.scratch = ds4_cpu_scratch(dev, ds4_cpu_gemm_need(e.n, n_col_all, a->w.n_col));
    if (dev->products == DS4_PRODUCTS_FAST && !a->exact)
        job.kind = ds4_cpu_act_kind(a->w.dtype);
    if (job.kind != DS4_ACT_NONE) {
        job.group_bytes = ds4_cpu_act_bytes(job.kind, a->w.n_col);
        job.act_bytes = ds4_cpu_align(job.group_bytes * (size_t)a->n_group);
        ds4_pool_run(dev->pool, e.n, quantise_row, &job);
    }
    run(&job);
    if (a->w2.data != NULL) {
        struct ds4_gemm_args second = *a;

        assert(a->n_group == 1);
        second.w = a->w2, second.y = a->y2, second.w2.data = NULL;
        ds4_cpu_gemm(dev, &second);
    }
}

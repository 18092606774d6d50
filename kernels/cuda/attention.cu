/* Attention of one layer: window and compressed rows in one pass, sinks, one latent row as K and V.
 *
 * A block serves 8 heads of one query, a warp each: the query sits in registers, tiles of 16 decoded
 * rows in shared memory are scored and folded into a running softmax (maximum, sum, accumulator).  Rows
 * come in position order, then compressed rows ascending, so the bits depend on the query alone.  The
 * sink enters last, in the denominator only.  Each row is decoded once per 8 heads: 584 B become
 * 8 * 2 * 512 multiply-adds, so the kernel is bound by f32 arithmetic, not by memory. */
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/rows.cuh"

#define ATT_HEADS   8  /* per block: one warp each */
#define ATT_TILE    16 /* rows decoded at a time */
#define ATT_MAX_DIM 512
#define ATT_LANE    (ATT_MAX_DIM / 32) /* values of a row a lane holds */

/* Decodes row i of the query's view into shared memory; the whole block works. */
__device__ __forceinline__ void fetch(const struct ds4_attend &a, const struct ds4_dev_entry &entry,
                                      int32_t t, int32_t first, int32_t n_window, int32_t i,
                                      float *row, int32_t thread, int32_t n_thread)
{
    const uint8_t *stored;
    int32_t j;

    if (i < n_window) {
        int32_t pos = first + i;

        if (pos >= entry.base_pos) {
            const float *own = a.kv + (entry.first_row + (pos - entry.base_pos)) * a.kv_tok;

            for (int32_t c = thread; c < a.d; c += n_thread)
                row[c] = own[c];
            return;
        }
        stored = ds4_dev_ring_row(a.ring, entry.slot, pos);
        for (int32_t c = thread; c < a.d; c += n_thread)
            row[c] = ds4_row_get(a.ring.format, a.d, a.ring.d_rope, stored, c);
        return;
    }
    j = i - n_window;
    if (a.sel != NULL) {
        j = a.sel[(int64_t)t * a.top_k + j];
        if (j < 0 || j >= (a.batch.pos[t] + 1) / a.ratio) {
            *a.batch.wrong = DS4_DEV_WRONG_ROW;
            j = 0;
        }
    }
    stored = ds4_dev_page_row(a.pages, a.batch, entry, j);
    for (int32_t c = thread; c < a.d; c += n_thread)
        row[c] =
            stored == NULL ? 0.0f : ds4_row_get(a.pages.format, a.d, a.pages.d_rope, stored, c);
}

static __global__ void __launch_bounds__(32 * ATT_HEADS) attention_kernel(struct ds4_attend a)
{
    ds4_take_turn();
    __shared__ float tile[ATT_TILE][ATT_MAX_DIM];
    const int32_t t = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t h = blockIdx.x * ATT_HEADS + warp, pos = a.batch.pos[t];
    const struct ds4_dev_entry entry = a.batch.entry[a.batch.entry_of[t]];
    const int32_t first = max(0, pos - a.window + 1), n_window = pos - first + 1;
    const int32_t visible = a.ratio == 0 ? 0 : (pos + 1) / a.ratio;
    const int32_t n = n_window + (a.sel != NULL ? a.n_sel[t] : visible);
    const bool live = h < a.n_head;
    float q[ATT_LANE], acc[ATT_LANE], top = -INFINITY, sum = 0.0f, inverse;

    if (!entry.active)
        return;
    for (int32_t c = 0; c < ATT_LANE; c++) {
        int32_t at = c * 32 + lane;

        acc[c] = 0.0f;
        q[c] = live && at < a.d ? a.q[t * a.q_tok + h * a.q_head + at] : 0.0f;
    }
    for (int32_t from = 0; from < n; from += ATT_TILE) {
        int32_t rows = min(ATT_TILE, n - from);
        float z[ATT_TILE], most = top, shrink;

        __syncthreads();
        /* Two rows per warp, so that the gathers of a tile overlap. */
        for (int32_t r = warp; r < rows; r += ATT_HEADS)
            fetch(a, entry, t, first, n_window, from + r, tile[r], lane, 32);
        __syncthreads();
        for (int32_t r = 0; r < rows; r++) {
            float dot = 0.0f;

            for (int32_t c = 0; c < ATT_LANE; c++)
                if (c * 32 + lane < a.d)
                    dot += q[c] * tile[r][c * 32 + lane];
            for (int o = 16; o > 0; o /= 2)
                dot += __shfl_xor_sync(0xffffffffu, dot, o);
            z[r] = dot * a.scale;
            most = fmaxf(most, z[r]);
        }
        shrink = top == -INFINITY ? 0.0f : expf(top - most);
        sum *= shrink;
        for (int32_t c = 0; c < ATT_LANE; c++)
            acc[c] *= shrink;
        for (int32_t r = 0; r < rows; r++) {
            float w = expf(z[r] - most);

            sum += w;
            for (int32_t c = 0; c < ATT_LANE; c++)
                if (c * 32 + lane < a.d)
                    acc[c] += w * tile[r][c * 32 + lane];
        }
        top = most;
    }
    if (!live)
        return;
    inverse = ds4_attend_factor(top, sum, a.sink[h]);
    for (int32_t c = 0; c < ATT_LANE; c++)
        if (c * 32 + lane < a.d)
            a.o[t * a.o_tok + h * a.o_head + c * 32 + lane] = acc[c] * inverse;
}

size_t ds4_cuda_attention_scratch(const struct ds4_device *dev, const struct ds4_limits *limits)
{
    const size_t one = ds4_cuda_attend_scratch(dev, limits);
    const size_t many = ds4_cuda_attend_rows_scratch(limits);

    return one > many ? one : many;
}

void ds4_cuda_attention(struct ds4_device *dev, const struct ds4_attention_args *a)
{
    const int32_t n_head = a->q.shape[1], d = a->kv.shape[1];
    struct ds4_attend args = {dev->batch,
                              (const float *)a->q.data,
                              a->q.stride[0],
                              a->q.stride[1],
                              (const float *)a->kv.data,
                              a->kv.stride[0],
                              (float *)a->o.data,
                              a->o.stride[0],
                              a->o.stride[1],
                              n_head,
                              d,
                              a->ring,
                              a->pages,
                              a->ratio,
                              a->window_tok,
                              a->sel,
                              a->n_sel,
                              a->top_k,
                              a->sink,
                              (float)(1.0 / sqrt((double)d))};
    const struct ds4_rope_args back = {a->batch, a->o, a->rope, true, false, 0.0f};
    const struct ds4_ring_write_args write = {a->batch, a->kv, a->ring};
    const dim3 grid((unsigned)ds4_div_up(n_head, ATT_HEADS), (unsigned)dev->batch.n_tok);

    if (dev->batch.n_tok == 0)
        return;
    if (d > ATT_MAX_DIM)
        ds4_cuda_fatal(__FILE__, __LINE__, "attention", "heads wider than the kernel is sized for");
    ds4_dev_spoil(dev, &a->o);
    if (dev->products == DS4_PRODUCTS_FAST && ds4_cuda_can_attend(&args) &&
        (a->rope.freq == NULL || a->rope.d_rope == a->ring.d_rope)) {
        args.freq = a->rope.freq;
        args.store = a->store;
        if (ds4_cuda_attend_rows(dev, &args)) {
            if (a->store)
                ds4_cuda_ring_write(dev, &write);
            return;
        }
        if (ds4_cuda_attend(dev, &args, &a->o))
            return;
    } else {
        DS4_CHAIN(attention_kernel, grid, 32 * ATT_HEADS, 0, dev, args);
    }
    if (a->rope.freq != NULL)
        ds4_cuda_rope(dev, &back);
    if (a->store)
        ds4_cuda_ring_write(dev, &write);
}

/* Lightning indexer: scores of the visible compressed rows, then the exact top_k of them.
 *
 * Queries are taken as many at a time as the score buffer holds (64 at the longest context), so that a long
 * prompt needs no context-squared memory.  Exact: a block scores 64 rows of one query, keys are decoded
 * once, the heads' products are summed in head order.  Fast: a warp holds the query's 64 heads as
 * fragments and multiplies eight rows at a time on the tensor cores; FP4 values are bf16 values, so
 * nothing is lost.  Selection is a radix search over order-preserving keys
 * (four passes of 8 bits) and an ordered compaction: no sorting, ties to the lower row, the same bits
 * every run, NaN never chosen before a number. */
#include "kernels/cuda/index_rows.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/rows.cuh"

#define INDEX_QUERIES 64  /* of the longest context: sizes the buffer */
#define INDEX_MOST    512 /* per round */
#define INDEX_ROWS    64  /* per block */
#define INDEX_THREADS 256
#define INDEX_MAX_DIM 128

struct index_args {
    struct ds4_dev_batch batch;
    const float *q;
    int64_t q_tok, q_head;
    const float *w;
    int64_t w_tok;
    int32_t n_head;
    struct ds4_pages pages;
    int32_t ratio;
    int32_t top_k;
    int32_t *sel;
    int32_t *n_sel;
    float *score; /* [queries of a round, max_rows] */
    int64_t max_rows;
    int32_t first; /* token of this round's query 0 */
};

__device__ __forceinline__ int32_t visible_rows(const struct index_args &a, int32_t t)
{
    return (a.batch.pos[t] + 1) / a.ratio;
}

/* One head of one query, rotated and rounded as the keys are stored.  Block (x: head, y: token). */
#define QUERY_THREADS 64
static __global__ void __launch_bounds__(QUERY_THREADS)
    query_kernel(struct ds4_dev_batch batch, float *q, int64_t q_tok, int64_t q_head, int32_t d,
                 const float *freq, int32_t d_rope, enum ds4_row_format format)
{
    __shared__ float row[INDEX_MAX_DIM];
    const int32_t t = blockIdx.y;
    float *const mine = q + t * q_tok + blockIdx.x * q_head;

    ds4_take_turn();
    for (int32_t i = threadIdx.x; i < d; i += QUERY_THREADS)
        row[i] = mine[i];
    __syncthreads();
    if (batch.entry[batch.entry_of[t]].active)
        for (int32_t i = threadIdx.x; i < d_rope / 2; i += QUERY_THREADS)
            ds4_dev_rotate(row + d - d_rope + 2 * i, freq[i], batch.pos[t], false);
    ds4_dev_round_row(format, d, d_rope, row);
    for (int32_t i = threadIdx.x; i < d; i += QUERY_THREADS)
        mine[i] = row[i];
}

/* The same, the same bits, for FP4 rows of 128: a warp a head, four neighbouring values a lane, no barrier.
 * Block (x: two heads, y: token). */
static __global__ void __launch_bounds__(QUERY_THREADS)
    query_fp4_kernel(struct ds4_dev_batch batch, float *q, int64_t q_tok, int64_t q_head,
                     int32_t n_head, const float *freq, int32_t d_rope)
{
    const int32_t t = blockIdx.y, head = blockIdx.x * (QUERY_THREADS / 32) + threadIdx.x / 32;
    const int32_t lane = threadIdx.x % 32, pair = (4 * lane - (128 - d_rope)) / 2;
    float *const mine = q + t * q_tok + min(head, n_head - 1) * q_head + 4 * lane;
    float x[4], most = 6.0f * 0x1p-126f, s;
    bool finite = true;

    ds4_take_turn();
#pragma unroll
    for (int k = 0; k < 4; k++)
        x[k] = mine[k];
    if (4 * lane >= 128 - d_rope && batch.entry[batch.entry_of[t]].active) {
        ds4_dev_rotate(x, freq[pair], batch.pos[t], false);
        ds4_dev_rotate(x + 2, freq[pair + 1], batch.pos[t], false);
    }
#pragma unroll
    for (int half = 1; half < 4; half *= 2) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float a = x[k], b = x[(k + half) & 3];

            if ((k & half) == 0) {
                x[k] = a + b;
                x[(k + half) & 3] = a - b;
            }
        }
    }
#pragma unroll
    for (int half = 1; half < 32; half *= 2) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float other = __shfl_xor_sync(0xffffffffu, x[k], half);

            x[k] = (lane & half) == 0 ? x[k] + other : other - x[k];
        }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        x[k] = ds4_dev_bf16(x[k] * (float)(1.0 / sqrt(128.0)));
        finite &= fabsf(x[k]) <= 3.402823466e38f;
        most = fmaxf(most, fabsf(x[k]));
    }
#pragma unroll
    for (int o = 1; o < DS4_DEV_FP4_BLOCK / 4; o *= 2) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, o));
        finite &= __shfl_xor_sync(0xffffffffu, (int)finite, o) != 0;
    }
    s = ds4_e8m0(finite ? ds4_e8m0_of(most / 6.0f) : 0xff);
    if (head >= n_head)
        return;
#pragma unroll
    for (int k = 0; k < 4; k++)
        mine[k] = ds4_e2m1(ds4_e2m1_of(x[k] / s)) * s;
}

static __global__ void score_kernel(struct index_args a)
{
    ds4_take_turn();
    __shared__ float key[INDEX_ROWS][INDEX_MAX_DIM + 1];
    const int32_t t = a.first + blockIdx.y, d = a.pages.d;
    const struct ds4_dev_entry entry = a.batch.entry[a.batch.entry_of[t]];
    const int32_t n = visible_rows(a, t), from = blockIdx.x * INDEX_ROWS;
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *score = a.score + (int64_t)blockIdx.y * a.max_rows;

    if (!entry.active || n <= a.top_k || from >= n)
        return;
    for (int32_t r = warp; r < INDEX_ROWS && from + r < n; r += INDEX_THREADS / 32) {
        const uint8_t *stored = ds4_dev_page_row(a.pages, a.batch, entry, from + r);

        for (int32_t c = lane; c < d; c += 32)
            key[r][c] =
                stored == NULL ? 0.0f : ds4_row_get(a.pages.format, d, a.pages.d_rope, stored, c);
    }
    __syncthreads();
    for (int32_t r = warp; r < INDEX_ROWS && from + r < n; r += INDEX_THREADS / 32) {
        float sum = 0.0f;

        for (int32_t h = 0; h < a.n_head; h++) {
            const float *q = a.q + t * a.q_tok + h * a.q_head;
            float dot = 0.0f;

            for (int32_t c = lane; c < d; c += 32)
                dot += q[c] * key[r][c];
            for (int o = 16; o > 0; o /= 2)
                dot += __shfl_xor_sync(0xffffffffu, dot, o);
            /* A NaN product must stay one: fmaxf would turn it into 0. */
            sum += a.w[t * a.w_tok + h] * (dot < 0.0f ? 0.0f : dot);
        }
        if (lane == 0)
            score[from + r] = sum;
    }
}

/* ---- fast scores ------------------------------------------------------------------------------------ */

#define TILE_DIM   128
#define TILE_HEADS 64
#define TILE_ROWS  8 /* of a warp at a time */
#define TILE_PITCH (TILE_DIM + 8)

/* Four lanes a row, 32 values each: one FP4 block. */
static __device__ __forceinline__ void decode_key(const struct ds4_pages &pages, const uint8_t *row,
                                                  int part, __nv_bfloat16 *to)
{
    uint2 *const out = (uint2 *)to;
    float scale;

    if (row == NULL) {
        for (int i = 0; i < 8; i++)
            out[i] = make_uint2(0, 0);
        return;
    }
    if (pages.format != DS4_ROW_FP4) {
        for (int i = 0; i < 8; i++) {
            float v[4];

            for (int k = 0; k < 4; k++)
                v[k] =
                    ds4_row_get(pages.format, TILE_DIM, pages.d_rope, row, 32 * part + 4 * i + k);
            out[i] = make_uint2(ds4_bf16_pair(v[0], v[1]), ds4_bf16_pair(v[2], v[3]));
        }
        return;
    }
    scale = ds4_e8m0(row[TILE_DIM / 2 + part]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t w = *(const uint32_t *)(row + 16 * part + 4 * i);
        float v[8];

#pragma unroll
        for (int k = 0; k < 8; k++)
            v[k] = ds4_e2m1(w >> 4 * k & 15) * scale;
        out[2 * i] = make_uint2(ds4_bf16_pair(v[0], v[1]), ds4_bf16_pair(v[2], v[3]));
        out[2 * i + 1] = make_uint2(ds4_bf16_pair(v[4], v[5]), ds4_bf16_pair(v[6], v[7]));
    }
}

/* Block (x: rows_per_block rows, y: query); each warp its own eight rows at a time. */
static __global__ void __launch_bounds__(INDEX_THREADS)
    tile_score_kernel(const __grid_constant__ struct index_args a, int32_t rows_per_block)
{
    __shared__ __align__(16) __nv_bfloat16 q[TILE_HEADS * TILE_PITCH];
    __shared__ __align__(16) __nv_bfloat16 keys[INDEX_THREADS / 32][TILE_ROWS * TILE_PITCH];
    __shared__ float weight[TILE_HEADS];
    const int32_t t = a.first + blockIdx.y, from = blockIdx.x * rows_per_block;
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *score = a.score + (int64_t)blockIdx.y * a.max_rows;
    uint32_t f[TILE_HEADS / 16][TILE_DIM / 16][4];

    ds4_take_turn();
    const struct ds4_dev_entry entry = a.batch.entry[a.batch.entry_of[t]];
    const int32_t n = visible_rows(a, t), to = min(n, from + rows_per_block);

    if (!entry.active || n <= a.top_k || from >= n)
        return;
    for (int i = threadIdx.x; i < TILE_HEADS * TILE_DIM / 4; i += INDEX_THREADS) {
        const int h = i / (TILE_DIM / 4), c = i % (TILE_DIM / 4) * 4;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

        if (h < a.n_head)
            v = *(const float4 *)(a.q + t * a.q_tok + h * a.q_head + c);
        *(uint2 *)(q + h * TILE_PITCH + c) =
            make_uint2(ds4_bf16_pair(v.x, v.y), ds4_bf16_pair(v.z, v.w));
    }
    if (threadIdx.x < TILE_HEADS)
        weight[threadIdx.x] = (int)threadIdx.x < a.n_head ? a.w[t * a.w_tok + threadIdx.x] : 0.0f;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILE_HEADS / 16; i++) {
#pragma unroll
        for (int k = 0; k < TILE_DIM / 16; k++)
            ds4_ldmatrix(f[i][k], q + (16 * i + lane % 16) * TILE_PITCH + 16 * k + lane / 16 * 8);
    }
    for (int32_t r0 = from + warp * TILE_ROWS; r0 < to; r0 += INDEX_THREADS / 32 * TILE_ROWS) {
        const int32_t r = r0 + lane / 4;
        float c[TILE_HEADS / 16][4] = {}, low = 0.0f, high = 0.0f;

        __syncwarp();
        decode_key(a.pages, r < to ? ds4_dev_page_row(a.pages, a.batch, entry, r) : NULL, lane % 4,
                   keys[warp] + lane / 4 * TILE_PITCH + lane % 4 * 32);
        __syncwarp();
#pragma unroll
        for (int k = 0; k < TILE_DIM / 32; k++) {
            uint32_t b[4];

            ds4_ldmatrix(b, keys[warp] + lane % 8 * TILE_PITCH + 32 * k + lane / 8 * 8);
#pragma unroll
            for (int i = 0; i < TILE_HEADS / 16; i++) {
                ds4_mma(c[i], f[i][2 * k], b[0], b[1]);
                ds4_mma(c[i], f[i][2 * k + 1], b[2], b[3]);
            }
        }
#pragma unroll
        for (int i = 0; i < TILE_HEADS / 16; i++) {
            const float w0 = weight[16 * i + lane / 4], w1 = weight[16 * i + 8 + lane / 4];

            /* A NaN product must stay one: fmaxf would turn it into 0. */
            low += w0 * (c[i][0] < 0.0f ? 0.0f : c[i][0]) + w1 * (c[i][2] < 0.0f ? 0.0f : c[i][2]);
            high += w0 * (c[i][1] < 0.0f ? 0.0f : c[i][1]) + w1 * (c[i][3] < 0.0f ? 0.0f : c[i][3]);
        }
        for (int o = 4; o < 32; o *= 2) {
            low += __shfl_xor_sync(0xffffffffu, low, o);
            high += __shfl_xor_sync(0xffffffffu, high, o);
        }
        if (lane < 4) {
            if (r0 + 2 * lane < to)
                score[r0 + 2 * lane] = low;
            if (r0 + 2 * lane + 1 < to)
                score[r0 + 2 * lane + 1] = high;
        }
    }
}

static bool can_tile(const struct ds4_device *dev, const struct index_args *a)
{
    return dev->products == DS4_PRODUCTS_FAST && a->pages.d == TILE_DIM &&
           a->n_head <= TILE_HEADS && a->q_tok % 4 == 0 && a->q_head % 4 == 0 &&
           (uintptr_t)a->q % 16 == 0 &&
           (a->pages.format != DS4_ROW_FP4 ||
            (a->pages.row_bytes % 4 == 0 && (uintptr_t)a->pages.data % 4 == 0));
}

/* ---- selection ---------------------------------------------------------------------------------------- */

__device__ __forceinline__ uint32_t key_of(float score)
{
    uint32_t bits = __float_as_uint(score + 0.0f);

    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0;
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

/* Exclusive sums over the block of words, or of two counts packed in one (each below 2^16). */
__device__ __forceinline__ uint32_t block_scan(uint32_t mine, uint32_t *shared, uint32_t *total)
{
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t sum = mine, before = 0, all = 0;

    for (int o = 1; o < 32; o *= 2) {
        uint32_t other = __shfl_up_sync(0xffffffffu, sum, o);

        if (lane >= o)
            sum += other;
    }
    __syncthreads();
    if (lane == 31)
        shared[warp] = sum;
    __syncthreads();
    for (int32_t w = 0; w < INDEX_THREADS / 32; w++) {
        before += w < warp ? shared[w] : 0;
        all += shared[w];
    }
    *total = all;
    return before + sum - mine;
}

/* The key of rank k and how many equal to it are among the k largest; the whole block works.  Thread i
 * counts digit 255 - i, so that the rank falls to the one thread whose running sum passes it. */
__device__ uint32_t kth_key(const float *score, int32_t n, int32_t k, int32_t *n_equal,
                            uint32_t *shared)
{
    __shared__ uint32_t count[256];
    __shared__ uint32_t digit;
    __shared__ int32_t rest;
    uint32_t prefix = 0;
    int32_t left = k;

    for (int shift = 24; shift >= 0; shift -= 8) {
        const uint32_t mask = shift == 24 ? 0 : 0xffffffffu << (shift + 8);
        uint32_t mine, above, all;

        count[threadIdx.x] = 0;
        __syncthreads();
        for (int32_t i = threadIdx.x; i < n; i += INDEX_THREADS) {
            const uint32_t key = key_of(score[i]);

            if ((key & mask) == prefix)
                atomicAdd(&count[key >> shift & 255], 1u); /* integers: order does not matter */
        }
        __syncthreads();
        mine = count[255 - threadIdx.x];
        above = block_scan(mine, shared, &all);
        if ((int32_t)above < left && (int32_t)(above + mine) >= left) {
            digit = 255 - threadIdx.x;
            rest = left - (int32_t)above;
        }
        __syncthreads();
        prefix |= digit << shift;
        left = rest;
    }
    *n_equal = left;
    return prefix;
}

static __global__ void select_kernel(struct index_args a)
{
    ds4_take_turn();
    __shared__ uint32_t shared[32];
    const int32_t t = a.first + blockIdx.x, n = visible_rows(a, t);
    const float *score = a.score + (int64_t)blockIdx.x * a.max_rows;
    int32_t *sel = a.sel + (int64_t)t * a.top_k;
    int32_t n_equal = 0, taken = 0, equal = 0;
    uint32_t least;

    if (!a.batch.entry[a.batch.entry_of[t]].active) {
        if (threadIdx.x == 0)
            a.n_sel[t] = 0;
        return;
    }
    if (threadIdx.x == 0)
        a.n_sel[t] = min(n, a.top_k);
    if (n <= a.top_k) {
        for (int32_t i = threadIdx.x; i < n; i += INDEX_THREADS)
            sel[i] = i;
        return;
    }
    least = kth_key(score, n, a.top_k, &n_equal, shared);
    for (int32_t from = 0; from < n; from += INDEX_THREADS) {
        int32_t i = from + threadIdx.x;
        uint32_t key = i < n ? key_of(score[i]) : 0, total, at;
        bool above = i < n && key > least, same = i < n && key == least;

        at = block_scan((uint32_t)above << 16 | (uint32_t)same, shared, &total);
        /* Rows above the threshold, and the first n_equal of those at it, in rising order. */
        if (above || (same && equal + (int32_t)(at & 0xffff) < n_equal))
            sel[taken + equal + (int32_t)(at >> 16) +
                min((int32_t)(at & 0xffff), n_equal - equal)] = i;
        taken += (int32_t)(total >> 16);
        equal = min(n_equal, equal + (int32_t)(total & 0xffff));
    }
}

size_t ds4_cuda_index_scratch(const struct ds4_device *dev, const struct ds4_limits *limits)
{
    (void)dev;
    return (size_t)INDEX_QUERIES * (size_t)(limits->max_context / 4 + 1) * sizeof(float) + 512 +
           ds4_cuda_index_key_room(limits);
}

void ds4_cuda_index(struct ds4_device *dev, const struct ds4_index_args *a)
{
    struct index_args args = {dev->batch,
                              (const float *)a->q.data,
                              a->q.stride[0],
                              a->q.stride[1],
                              (const float *)a->w.data,
                              a->w.stride[0],
                              a->q.shape[1],
                              a->pages,
                              a->ratio,
                              a->top_k,
                              a->sel,
                              a->n_sel,
                              NULL,
                              0,
                              0};
    size_t used = dev->stream == dev->main_stream ? 0 : dev->scratch_bytes / 2;
    const bool tile = can_tile(dev, &args);
    struct ds4_index_rows many = {dev->batch,
                                  args.q,
                                  args.q_tok,
                                  args.q_head,
                                  args.w,
                                  args.w_tok,
                                  args.n_head,
                                  a->pages,
                                  a->ratio,
                                  a->top_k,
                                  NULL,
                                  0,
                                  0,
                                  0,
                                  dev->shape.n_entry,
                                  dev->shape.horizon / a->ratio,
                                  NULL};
    const size_t key_bytes =
        tile && many.n_page > a->top_k ? ds4_cuda_index_key_bytes(&dev->shape, a->ratio) : 0;
    int32_t queries, rows;
    size_t room;

    if (dev->batch.n_tok == 0)
        return;
    if (a->pages.d > INDEX_MAX_DIM)
        ds4_cuda_fatal(__FILE__, __LINE__, "index", "keys wider than the kernel is sized for");
    ds4_dev_spoil(dev, &a->q);
    if (a->rope.freq != NULL && a->pages.format == DS4_ROW_FP4 && a->pages.d == 128 &&
        a->rope.d_rope % 4 == 0)
        DS4_CHAIN(query_fp4_kernel, dim3(ds4_div_up(args.n_head, 2), dev->batch.n_tok),
                  QUERY_THREADS, 0, dev, dev->batch, (float *)a->q.data, args.q_tok, args.q_head,
                  args.n_head, a->rope.freq, a->rope.d_rope);
    else if (a->rope.freq != NULL)
        DS4_CHAIN(query_kernel, dim3(args.n_head, dev->batch.n_tok), QUERY_THREADS, 0, dev,
                  dev->batch, (float *)a->q.data, args.q_tok, args.q_head, a->pages.d, a->rope.freq,
                  a->rope.d_rope, a->pages.format);
    if (key_bytes > 0) {
        many.keys = (__nv_bfloat16 *)ds4_dev_carve(dev, key_bytes, &used);
        ds4_cuda_index_keys(dev, &many);
    }
    room = (dev->scratch_bytes - used) / sizeof(float) - 64; /* alignment */
    /* By the shape of the step, so that its launches can be replayed. */
    args.max_rows = dev->shape.horizon / a->ratio;
    args.max_rows = args.max_rows > (int64_t)room ? (int64_t)room : args.max_rows;
    queries = (int32_t)(room / (size_t)args.max_rows);
    queries = queries > INDEX_MOST ? INDEX_MOST : queries;
    queries = queries > dev->batch.n_tok ? dev->batch.n_tok : queries;
    args.score = DS4_CARVE(dev, float, queries *args.max_rows, &used);
    rows = tile && queries >= 32 ? 512 : INDEX_ROWS;
    for (args.first = 0; args.first < dev->batch.n_tok; args.first += queries) {
        const int32_t left = dev->batch.n_tok - args.first;
        const unsigned n = (unsigned)(left < queries ? left : queries);
        const dim3 grid((unsigned)ds4_div_up(args.max_rows, rows), n);

        if (key_bytes > 0) {
            many.score = args.score, many.max_rows = args.max_rows;
            many.first = args.first, many.n_query = (int32_t)n;
            ds4_cuda_index_scores(dev, &many);
        } else if (args.max_rows > a->top_k && tile)
            DS4_CHAIN(tile_score_kernel, grid, INDEX_THREADS, 0, dev, args, rows);
        else if (args.max_rows > a->top_k)
            DS4_CHAIN(score_kernel, grid, INDEX_THREADS, 0, dev, args);
        DS4_CHAIN(select_kernel, n, INDEX_THREADS, 0, dev, args);
    }
}

/* Index scores of a prompt's chunk on tensor cores.
 *
 * Every key that the chunk's queries may see is decoded to bf16 once (exactly: FP4 values are bf16 values).  Then
 * eight warps take eight queries over the same keys: a warp holds its query's 64 heads as fragments, 64
 * keys at a time come by cp.async one tile ahead, and the heads' products are rectified, weighted and summed
 * in a fixed order.  Lane t of a quad has eight neighbouring values of a key: the order of K is free as long
 * as both operands agree.  Bound: the tensor units. */
#include "kernels/cuda/index_rows.cuh"

#include "kernels/cuda/async.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/rows.cuh"

#define DIM       128
#define HEADS     64
#define THREADS   256
#define QUERIES   (THREADS / 32)
#define TILE      64  /* keys */
#define PER_ROUND 512 /* keys of a block */
#define PLANE                                                                                      \
    (TILE * 64 + 32) /* bytes: a quarter of the tile's keys; the odd 32 spread the copies' banks */
#define MANY     64  /* more queries than this */
#define MAX_KEYS (256 * 1024)

size_t ds4_cuda_index_key_bytes(const struct ds4_dev_shape *shape, int32_t ratio)
{
    const int64_t n = (int64_t)shape->n_entry * (shape->horizon / ratio);

    return shape->n_tok > MANY && n > 0 && n <= MAX_KEYS ? (size_t)n * DIM * sizeof(__nv_bfloat16)
                                                         : 0;
}

size_t ds4_cuda_index_key_room(const struct ds4_limits *l)
{
    return l->max_tok > MANY ? (size_t)MAX_KEYS * DIM * sizeof(__nv_bfloat16) : 0;
}

/* A warp a key. */
static __global__ void __launch_bounds__(THREADS)
    keys_kernel(const __grid_constant__ struct ds4_index_rows a)
{
    const int64_t i = (int64_t)blockIdx.x * QUERIES + threadIdx.x / 32;
    const int32_t e = (int32_t)(i / a.n_page), j = (int32_t)(i % a.n_page), lane = threadIdx.x % 32;
    const uint8_t *row;
    float v[4];

    ds4_take_turn();
    if (e >= a.n_entry)
        return;
    const struct ds4_dev_entry entry = a.batch.entry[e];

    if (!entry.active || j >= (entry.base_pos + entry.n_row) / a.ratio)
        return;
    row = ds4_dev_page_row(a.pages, a.batch, entry, j);
#pragma unroll
    for (int k = 0; k < 4; k++)
        v[k] = row == NULL ? 0.0f
                           : ds4_row_get(a.pages.format, DIM, a.pages.d_rope, row, 4 * lane + k);
    ((uint2 *)(a.keys + i * DIM))[lane] =
        make_uint2(ds4_bf16_pair(v[0], v[1]), ds4_bf16_pair(v[2], v[3]));
}

/* The query's heads: values 32 kk + 8t .. of rows g and g + 8 of tile i, two products' fragments. */
static __device__ __forceinline__ void load_query(const struct ds4_index_rows &a, int32_t t,
                                                  uint32_t (&f)[HEADS / 16][DIM / 32][2][4],
                                                  float (&weight)[HEADS / 16][2])
{
    const int lane = threadIdx.x % 32;

#pragma unroll
    for (int i = 0; i < HEADS / 16; i++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int32_t head = 16 * i + 8 * r + lane / 4;
            const bool there = head < a.n_head;
            const float4 *const from =
                (const float4 *)(a.q + t * a.q_tok + (there ? head : 0) * a.q_head) + lane % 4 * 2;

            weight[i][r] = there ? a.w[t * a.w_tok + head] : 0.0f;
#pragma unroll
            for (int k = 0; k < DIM / 32; k++) {
                const float4 low = from[8 * k], high = from[8 * k + 1];

                f[i][k][0][r] = there ? ds4_bf16_pair(low.x, low.y) : 0;
                f[i][k][0][2 + r] = there ? ds4_bf16_pair(low.z, low.w) : 0;
                f[i][k][1][r] = there ? ds4_bf16_pair(high.x, high.y) : 0;
                f[i][k][1][2 + r] = there ? ds4_bf16_pair(high.z, high.w) : 0;
            }
        }
    }
}

/* Starts the copy of keys from .. of entry e; those from `to` on stay what they were, and nobody stores their
 * scores. */
static __device__ __forceinline__ void fetch(const struct ds4_index_rows &a, int32_t e,
                                             int32_t from, int32_t to, uint8_t *stage)
{
    const int c = threadIdx.x % 16;

#pragma unroll
    for (int i = 0; i < TILE * 16 / THREADS; i++) {
        const int r = threadIdx.x / 16 + i * (THREADS / 16);

        if (from + r < to)
            ds4_async_copy(stage + c / 4 * PLANE + r * 64 + c % 4 * 16,
                           a.keys + ((int64_t)e * a.n_page + from + r) * DIM + 8 * c, 16);
    }
    ds4_async_commit();
}

/* Scores of eight keys against the query, as lanes 0..3 store them: keys 2 lane and 2 lane + 1. */
static __device__ __forceinline__ float2 score(const uint32_t (&f)[HEADS / 16][DIM / 32][2][4],
                                               const float (&weight)[HEADS / 16][2],
                                               const uint8_t *keys)
{
    float c[HEADS / 16][4] = {}, low = 0.0f, high = 0.0f;

#pragma unroll
    for (int k = 0; k < DIM / 32; k++) {
        const uint4 b = ((const uint4 *)(keys + k * PLANE))[threadIdx.x % 32];

#pragma unroll
        for (int i = 0; i < HEADS / 16; i++)
            ds4_mma(c[i], f[i][k][0], b.x, b.y);
#pragma unroll
        for (int i = 0; i < HEADS / 16; i++)
            ds4_mma(c[i], f[i][k][1], b.z, b.w);
    }
#pragma unroll
    for (int i = 0; i < HEADS / 16; i++) {
        /* A NaN product must stay one: fmaxf would turn it into 0. */
        low += weight[i][0] * (c[i][0] < 0.0f ? 0.0f : c[i][0]) +
               weight[i][1] * (c[i][2] < 0.0f ? 0.0f : c[i][2]);
        high += weight[i][0] * (c[i][1] < 0.0f ? 0.0f : c[i][1]) +
                weight[i][1] * (c[i][3] < 0.0f ? 0.0f : c[i][3]);
    }
#pragma unroll
    for (int o = 4; o < 32; o *= 2) {
        low += __shfl_xor_sync(0xffffffffu, low, o);
        high += __shfl_xor_sync(0xffffffffu, high, o);
    }
    return make_float2(low, high);
}

/* Block (x: PER_ROUND keys, y: eight queries, a warp each). */
static __global__ void __launch_bounds__(THREADS, 1)
    scores_kernel(const __grid_constant__ struct ds4_index_rows a)
{
    __shared__ __align__(16) uint8_t stage[2][DIM / 32 * PLANE];
    __shared__ int32_t want[QUERIES]; /* keys of each query */
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t i0 = blockIdx.y * QUERIES, i = i0 + warp, from = blockIdx.x * PER_ROUND;
    const int32_t last = a.first + min(i0 + QUERIES, a.n_query) - 1;
    const int32_t t = min(a.first + i, last);
    float *const to = a.score + (int64_t)i * a.max_rows;
    uint32_t f[HEADS / 16][DIM / 32][2][4];
    float weight[HEADS / 16][2];

    ds4_take_turn();
    const int32_t mine = a.batch.entry_of[t], visible = (a.batch.pos[t] + 1) / a.ratio;
    const bool scores = i < a.n_query && a.batch.entry[mine].active && visible > a.top_k;

    if (lane == 0)
        want[warp] = scores ? min(visible, from + PER_ROUND) : 0;
    load_query(a, t, f, weight);
    /* Queries of one block may belong to several entries, one after the other. */
    for (int32_t e = a.batch.entry_of[a.first + i0]; e <= a.batch.entry_of[last]; e++) {
        int32_t end = 0;
        int now = 0;

        __syncthreads(); /* `want` is there, and the entry before has been read */
        for (int k = 0; k < QUERIES; k++)
            if (a.batch.entry_of[min(a.first + i0 + k, last)] == e)
                end = max(end, want[k]);
        if (from >= end)
            continue;
        fetch(a, e, from, end, stage[0]);
        for (int32_t at = from; at < end; at += TILE, now ^= 1) {
            ds4_async_wait<0>();
            __syncthreads(); /* the tile is there, and the other stage has been read */
            if (at + TILE < end)
                fetch(a, e, at + TILE, end, stage[now ^ 1]);
            if (mine != e)
                continue;
            for (int32_t r = at; r < min(at + TILE, want[warp]); r += 8) {
                const float2 two = score(f, weight, stage[now] + (r - at) * 64);

                if (lane < 4 && r + 2 * lane < want[warp])
                    to[r + 2 * lane] = two.x;
                if (lane < 4 && r + 2 * lane + 1 < want[warp])
                    to[r + 2 * lane + 1] = two.y;
            }
        }
    }
}

void ds4_cuda_index_keys(struct ds4_device *dev, const struct ds4_index_rows *a)
{
    DS4_CHAIN(keys_kernel, ds4_div_up((int64_t)a->n_entry * a->n_page, QUERIES), THREADS, 0, dev,
              *a);
}

void ds4_cuda_index_scores(struct ds4_device *dev, const struct ds4_index_rows *a)
{
    const dim3 grid((unsigned)ds4_div_up(a->max_rows, PER_ROUND),
                    (unsigned)ds4_div_up(a->n_query, QUERIES));

    DS4_CHAIN(scores_kernel, grid, THREADS, 0, dev, *a);
}

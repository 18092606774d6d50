/* Attention of a prompt's chunk on tensor cores: 64 heads of a query against tiles of 32 rows, d = 512.
 *
 * A first kernel decodes every row that the chunk's queries may see to bf16, once (stored rows are bf16 values,
 * so exactly).  Then tiles come by cp.async two ahead, and nothing but products is left: eight warps are 4
 * groups of 16 heads times 2 halves of d.  A warp holds its queries' and its outputs' half in registers;
 * the two warps of a group swap their halves of S = Q K^T through shared memory, each does the softmax of
 * all of it in registers (f32, P rounded to bf16) and adds P times its half of the same rows to O.
 * Work a tile: 64 x 32 x 512 x 2 multiply-adds; shared memory feeds them at about the tensor units' rate. */
#include "kernels/cuda/async.cuh"
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/meet.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/rows.cuh"

#define D       512
#define HALF    (D / 2)
#define HEADS   64
#define TILE    32 /* rows */
#define STAGES  3
#define PITCH   (D + 8) /* bf16 values between rows: no bank conflicts */
#define THREADS 256
#define MANY    64 /* more queries than this */
/* Decoded rows beyond a step's own that scratch has room for. */
#define MAX_STORED (64 * 1024)

/* By value, besides struct ds4_attend. */
struct decoded {
    __nv_bfloat16
        *row; /* [n_tok] own; [n_entry, n_ring] before the step; [n_entry, n_page] compressed */
    int32_t n_tok, n_entry, n_ring, n_page;
};

static __device__ __forceinline__ int64_t ring_index(const struct decoded &x, int32_t e,
                                                     int32_t back)
{
    return x.n_tok + (int64_t)e * x.n_ring + x.n_ring - back;
}

static __device__ __forceinline__ int64_t page_index(const struct decoded &x, int32_t e, int32_t j)
{
    return x.n_tok + (int64_t)x.n_entry * x.n_ring + (int64_t)e * x.n_page + j;
}

/* A warp a row. */
static __global__ void __launch_bounds__(THREADS)
    decode_rows_kernel(const __grid_constant__ struct ds4_attend a, struct decoded x)
{
    const int64_t i = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int64_t ring0 = x.n_tok, page0 = ring0 + (int64_t)x.n_entry * x.n_ring;
    __nv_bfloat16 *const to = x.row + i * D;
    const uint8_t *stored = NULL;
    enum ds4_row_format format = a.ring.format;
    int32_t d_rope = a.ring.d_rope;

    ds4_take_turn();
    if (i < ring0) {
        const float *own = a.kv + i * a.kv_tok;

        for (int c = lane; c < D; c += 32)
            to[c] = __float2bfloat16_rn(own[c]);
        return;
    }
    if (i < page0) {
        const int32_t e = (int32_t)(i - ring0) / x.n_ring;
        const struct ds4_dev_entry entry = a.batch.entry[e];
        const int32_t pos = entry.base_pos - x.n_ring + (int32_t)(i - ring0) % x.n_ring;

        if (!entry.active || pos < 0)
            return;
        stored = ds4_dev_ring_row(a.ring, entry.slot, pos);
    } else {
        const int64_t k = i - page0;
        const int32_t e = x.n_page == 0 ? x.n_entry : (int32_t)(k / x.n_page);
        struct ds4_dev_entry entry;

        if (e >= x.n_entry)
            return;
        entry = a.batch.entry[e];
        if (!entry.active || k % x.n_page >= (entry.base_pos + entry.n_row) / a.ratio)
            return;
        stored = ds4_dev_page_row(a.pages, a.batch, entry, (int32_t)(k % x.n_page));
        format = a.pages.format;
        d_rope = a.pages.d_rope;
    }
    for (int c = lane; c < D; c += 32)
        to[c] =
            __float2bfloat16_rn(stored == NULL ? 0.0f : ds4_row_get(format, D, d_rope, stored, c));
}

/* What a block needs to find its query's rows. */
struct view {
    int32_t t, e, pos, first, n_window, n;
    struct ds4_dev_entry entry;
};

/* The number that sel has for row i of the view, to be asked for early. */
static __device__ __forceinline__ int32_t chosen(const struct ds4_attend &a, const struct view &v,
                                                 int32_t i)
{
    return a.sel != NULL && i >= v.n_window && i < v.n
               ? a.sel[(int64_t)v.t * a.top_k + i - v.n_window]
               : i - v.n_window;
}

/* Starts the copy of row i of the view: eight lanes a row, and zeros behind the last. */
static __device__ __forceinline__ void fetch(const struct ds4_attend &a, const struct decoded &x,
                                             const struct view &v, int32_t i, int32_t j,
                                             __nv_bfloat16 *to)
{
    const int part = threadIdx.x % 8;
    int64_t at = 0;

    if (i < v.n_window) {
        const int32_t ahead = v.first + i - v.entry.base_pos;

        at = ahead >= 0 ? v.entry.first_row + ahead : ring_index(x, v.e, -ahead);
    } else if (i < v.n) {
        if (j < 0 || j >= (v.pos + 1) / a.ratio) {
            *a.batch.wrong = DS4_DEV_WRONG_ROW;
            j = 0;
        }
        at = page_index(x, v.e, j);
    }
#pragma unroll
    for (int c = 0; c < D / 64; c++)
        ds4_async_copy(to + 64 * c + 8 * part, x.row + at * D + 64 * c + 8 * part,
                       i < v.n ? 16 : 0);
}

/* The half of 16 heads' queries as A fragments. */
static __device__ __forceinline__ void load_queries(const struct ds4_attend &a, int32_t t,
                                                    int32_t head0, int half,
                                                    uint32_t (&q)[HALF / 16][4])
{
    const int lane = threadIdx.x % 32;

#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t head = head0 + lane / 4 + 8 * r;
        const bool there = head < a.n_head;
        const float *const from =
            a.q + t * a.q_tok + (there ? head : 0) * a.q_head + half * HALF + lane % 4 * 2;

#pragma unroll
        for (int k = 0; k < HALF / 16; k++) {
            const float2 low = *(const float2 *)(from + 16 * k);
            const float2 high = *(const float2 *)(from + 16 * k + 8);

            q[k][r] = there ? ds4_bf16_pair(low.x, low.y) : 0;
            q[k][2 + r] = there ? ds4_bf16_pair(high.x, high.y) : 0;
        }
    }
}

/* This half's S of 16 heads: tile j has rows 8j .. */
static __device__ __forceinline__ void score(const uint32_t (&q)[HALF / 16][4],
                                             const __nv_bfloat16 *rows, float (&s)[TILE / 8][4])
{
    const int lane = threadIdx.x % 32;
    const __nv_bfloat16 *const b_row = rows + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 8;

#pragma unroll
    for (int k = 0; k < HALF / 16; k++) {
#pragma unroll
        for (int j = 0; j < TILE / 16; j++) {
            uint32_t b[4];

            ds4_ldmatrix(b, b_row + 16 * j * PITCH + 16 * k);
            ds4_mma(s[2 * j], q[k], b[0], b[1]);
            ds4_mma(s[2 * j + 1], q[k], b[2], b[3]);
        }
    }
}

/* Running softmax of 16 heads, a quad of lanes two of them: s becomes P. */
static __device__ __forceinline__ void soften(float (&s)[TILE / 8][4], float scale, int32_t rows,
                                              float (&top)[2], float (&sum)[2], float (&shrink)[2])
{
    const int c0 = threadIdx.x % 4 * 2;

#pragma unroll
    for (int r = 0; r < 2; r++) {
        float most = top[r], mine = 0.0f;

#pragma unroll
        for (int i = 0; i < TILE / 4; i++) {
            float *const z = &s[i / 2][2 * r + i % 2];

            *z = 8 * (i / 2) + c0 + i % 2 < rows ? *z * scale : -INFINITY;
            most = fmaxf(most, *z);
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        /* -inf: nothing but NaN so far, which the products carry on. */
        shrink[r] = most == -INFINITY ? 1.0f : expf(top[r] - most);
#pragma unroll
        for (int i = 0; i < TILE / 4; i++) {
            float *const z = &s[i / 2][2 * r + i % 2];

            *z = 8 * (i / 2) + c0 + i % 2 < rows ? expf(*z - most) : 0.0f;
            mine += *z;
        }
        mine += __shfl_xor_sync(0xffffffffu, mine, 1);
        mine += __shfl_xor_sync(0xffffffffu, mine, 2);
        sum[r] = sum[r] * shrink[r] + mine;
        top[r] = most;
    }
}

/* O = shrink * O + P K for this warp's half of the columns. */
static __device__ __forceinline__ void add_values(const float (&p)[TILE / 8][4],
                                                  const __nv_bfloat16 *rows,
                                                  const float (&shrink)[2], float (&o)[HALF / 8][4])
{
    const int lane = threadIdx.x % 32;

    if (!__all_sync(0xffffffffu, shrink[0] == 1.0f && shrink[1] == 1.0f)) {
#pragma unroll
        for (int j = 0; j < HALF / 8; j++) {
            o[j][0] *= shrink[0];
            o[j][1] *= shrink[0];
            o[j][2] *= shrink[1];
            o[j][3] *= shrink[1];
        }
    }
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
        const uint32_t a[4] = {ds4_bf16_pair(p[2 * k][0], p[2 * k][1]),
                               ds4_bf16_pair(p[2 * k][2], p[2 * k][3]),
                               ds4_bf16_pair(p[2 * k + 1][0], p[2 * k + 1][1]),
                               ds4_bf16_pair(p[2 * k + 1][2], p[2 * k + 1][3])};

#pragma unroll
        for (int j = 0; j < HALF / 16; j++) {
            uint32_t b[4];

            ds4_ldmatrix_t(b, rows + (16 * k + lane % 8 + lane / 8 % 2 * 8) * PITCH + 16 * j +
                                  lane / 16 * 8);
            ds4_mma(o[2 * j], a, b[0], b[1]);
            ds4_mma(o[2 * j + 1], a, b[2], b[3]);
        }
    }
}

/* The finished half of 16 heads, rotated back if the step says so. */
static __device__ __forceinline__ void write_heads(const struct ds4_attend &a, int32_t t,
                                                   int32_t pos, int32_t head0, int half,
                                                   const float (&top)[2], const float (&sum)[2],
                                                   const float (&o)[HALF / 8][4])
{
    const int lane = threadIdx.x % 32;

#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t head = head0 + lane / 4 + 8 * r;
        float *const to = a.o + t * a.o_tok + head * a.o_head;
        float factor;

        if (head >= a.n_head)
            continue;
        factor = ds4_attend_factor(top[r], sum[r], a.sink[head]);
#pragma unroll
        for (int j = 0; j < HALF / 8; j++) {
            const int32_t c = half * HALF + 8 * j + lane % 4 * 2, tail = c - (D - a.ring.d_rope);
            float pair[2] = {o[j][2 * r] * factor, o[j][2 * r + 1] * factor};

            if (a.freq != NULL && tail >= 0)
                ds4_dev_rotate(pair, a.freq[tail / 2], pos, true);
            *(float2 *)(to + c) = make_float2(pair[0], pair[1]);
        }
    }
}

struct room {
    __nv_bfloat16 rows[STAGES][TILE][PITCH];
    float4 half[2][4][2][TILE / 8][32]; /* S: of every other tile, by group and half of d */
};

/* Block (x: query, the last first: it has the most rows; y: heads). */
static __global__ void __launch_bounds__(THREADS, 1)
    attend_rows_kernel(const __grid_constant__ struct ds4_attend a, struct decoded x)
{
    extern __shared__ uint4 attend_space[];
    struct room *const room = (struct room *)attend_space;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp % 4, half = warp / 4;
    const int32_t head0 = blockIdx.y * HEADS + 16 * group;
    const int row = threadIdx.x / 8;
    float o[HALF / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    uint32_t q[HALF / 16][4];
    struct view v;
    int32_t next, stage = 0, parity = 0;

    ds4_take_turn();
    v.t = gridDim.x - 1 - blockIdx.x;
    v.e = a.batch.entry_of[v.t];
    v.entry = a.batch.entry[v.e];
    v.pos = a.batch.pos[v.t];
    v.first = max(0, v.pos - a.window + 1);
    v.n_window = v.pos - v.first + 1;
    v.n = v.n_window + (a.sel != NULL ? a.n_sel[v.t] : a.ratio == 0 ? 0 : (v.pos + 1) / a.ratio);
    if (!v.entry.active)
        return;
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        fetch(a, x, v, TILE * i + row, chosen(a, v, TILE * i + row), &room->rows[i][row][0]);
        ds4_async_commit();
    }
    next = chosen(a, v, TILE * (STAGES - 1) + row);
    load_queries(a, v.t, head0, half, q);
    for (int32_t at = 0; at < v.n; at += TILE) {
        const int32_t ahead = at + TILE * (STAGES - 1) + row;
        float s[TILE / 8][4] = {}, shrink[2];

        ds4_async_wait<STAGES - 2>();
        __syncthreads(); /* the tile is there, and the one before has been used */
        fetch(a, x, v, ahead, next, &room->rows[(stage + STAGES - 1) % STAGES][row][0]);
        ds4_async_commit();
        next = chosen(a, v, ahead + TILE);
        score(q, &room->rows[stage][0][half * HALF], s);
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
            room->half[parity][group][half][j][lane] =
                make_float4(s[j][0], s[j][1], s[j][2], s[j][3]);
        ds4_meet(1 + group, 64); /* the group's other half */
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
            const float4 other = room->half[parity][group][1 - half][j][lane];

            s[j][0] += other.x;
            s[j][1] += other.y;
            s[j][2] += other.z;
            s[j][3] += other.w;
        }
        soften(s, a.scale, v.n - at, top, sum, shrink);
        add_values(s, &room->rows[stage][0][half * HALF], shrink, o);
        stage = (stage + 1) % STAGES;
        parity ^= 1;
    }
    ds4_async_wait<0>();
    write_heads(a, v.t, v.pos, head0, half, top, sum, o);
}

/* ---- launch ------------------------------------------------------------------------------------------ */

size_t ds4_cuda_attend_rows_scratch(const struct ds4_limits *l)
{
    return l->d_head == D && l->max_tok > MANY
               ? ((size_t)l->max_tok + MAX_STORED) * D * sizeof(__nv_bfloat16) + 256
               : 0;
}

bool ds4_cuda_attend_rows(struct ds4_device *dev, const struct ds4_attend *a)
{
    const struct ds4_dev_shape *const shape = &dev->shape;
    struct decoded x = {NULL, shape->n_tok, shape->n_entry, a->window - 1,
                        a->ratio == 0 ? 0 : shape->horizon / a->ratio};
    const int64_t stored = (int64_t)x.n_entry * ((int64_t)x.n_ring + x.n_page);
    size_t used = 0;

    if (a->d != D || a->window < 2 || x.n_tok <= MANY || stored > MAX_STORED)
        return false;
    x.row = DS4_CARVE(dev, __nv_bfloat16, (x.n_tok + stored) * D, &used);
    DS4_CHAIN(decode_rows_kernel, ds4_div_up(x.n_tok + stored, THREADS / 32), THREADS, 0, dev, *a,
              x);
    DS4_CUDA(cudaFuncSetAttribute(attend_rows_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)sizeof(struct room)));
    DS4_CHAIN(attend_rows_kernel, dim3(x.n_tok, ds4_div_up(a->n_head, HEADS)), THREADS,
              sizeof(struct room), dev, *a, x);
    return true;
}

/* Attention on tensor cores: all heads of a query against tiles of 32 rows (fast mode, bf16 or FP8 rows).
 *
 * One latent row serves every head as key and value, so a query's heads are the rows of two matrix
 * products: S = Q K^T [64, 32] and O += P K [64, d].  A block of eight warps serves 64 heads of one query (16
 * where that leaves most of the card idle) and one share of its rows: Q lies in shared memory as bf16, a tile's rows are fetched into registers
 * while the previous tile is multiplied, decoded to bf16 (exactly: stored rows are bf16 values) and used
 * twice.  S is summed in two halves of d, the softmax runs in f32, P is rounded to bf16 as in the
 * checkpoint's own code, O stays in registers (d / 8 columns a warp).
 * Few queries: a query's rows are shared out over blocks as the step's shape says, and a second kernel
 * folds the shares in their order.  Work a tile: 64 x 32 x d x 2 multiply-adds for 32 rows of 584 B:
 * prefill is bound by shared memory feeding the tensor cores, decode by latency. */
#include "kernels/cuda/act.cuh"
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/rows.cuh"

#define HEADS      64 /* of a block; of a query or two, FEW */
#define FEW        16
#define TILE       32 /* rows decoded at a time */
#define THREADS    256
#define MAX_SHARES 64
#define PART       64 /* values of a row that one thread decodes */

template <int D, int H> struct shape {
    static constexpr int pitch = D + 8;            /* bf16 values between rows: no bank conflicts */
    static constexpr int s_pitch = TILE + 4;       /* f32 */
    static constexpr int p_pitch = TILE + 8;       /* bf16 */
    static constexpr int columns = D / 8;          /* of O, a warp */
    static constexpr int m_warps = H > 32 ? 2 : 1; /* S: warps side by side over heads, */
    static constexpr int k_warps = 4 / m_warps;    /* and over d; two over rows */
    static constexpr int m_tiles = H / 16;         /* of all heads */
    static constexpr size_t q_bytes = sizeof(__nv_bfloat16) * H * pitch;
    static constexpr size_t k_bytes = sizeof(__nv_bfloat16) * TILE * pitch;
    static constexpr size_t s_bytes = sizeof(float) * k_warps * H * s_pitch;
    static constexpr size_t p_bytes = sizeof(__nv_bfloat16) * H * p_pitch;
    static constexpr size_t bytes = q_bytes + k_bytes + s_bytes + p_bytes + sizeof(float) * H;
};

/* What a thread holds of the next tile: PART values of one row. */
struct piece {
    uint2 word[16];
    const float *own; /* of this step, not stored yet */
    float scale;      /* FP8 */
    bool there, fp8;
};

/* Row i of the query's view, values PART * part ... */
static __device__ __forceinline__ void fetch(const struct ds4_attend &a,
                                             const struct ds4_dev_entry &entry, int32_t t,
                                             int32_t first, int32_t n_window, int32_t n, int32_t i,
                                             int part, struct piece *p)
{
    const uint8_t *row = NULL;
    enum ds4_row_format format = a.ring.format;

    p->own = NULL;
    p->there = false;
    if (i >= n)
        return;
    if (i < n_window) {
        const int32_t pos = first + i;

        if (pos >= entry.base_pos) {
            p->own = a.kv + (entry.first_row + (pos - entry.base_pos)) * a.kv_tok + PART * part;
            p->there = true;
            return;
        }
        row = ds4_dev_ring_row(a.ring, entry.slot, pos);
    } else {
        int32_t j = i - n_window;

        if (a.sel != NULL) {
            j = a.sel[(int64_t)t * a.top_k + j];
            if (j < 0 || j >= (a.batch.pos[t] + 1) / a.ratio) {
                *a.batch.wrong = DS4_DEV_WRONG_ROW;
                j = 0;
            }
        }
        row = ds4_dev_page_row(a.pages, a.batch, entry, j);
        format = a.pages.format;
        if (row == NULL)
            return;
    }
    p->there = true;
    p->fp8 = format == DS4_ROW_FP8 && PART * (part + 1) < a.d;
    if (p->fp8) {
        const uint2 *from = (const uint2 *)(row + PART * part);

#pragma unroll
        for (int k = 0; k < 8; k++)
            p->word[k] = from[k];
        p->scale = ds4_e8m0(row[a.d - PART + part]);
    } else {
        const int32_t nope = a.d - PART, tail = nope + (nope / PART + 1) / 2 * 2;
        const uint2 *from = (const uint2 *)(row + (format == DS4_ROW_FP8 ? tail : 2 * PART * part));

#pragma unroll
        for (int k = 0; k < 16; k++)
            p->word[k] = from[k];
    }
}

/* e4m3 in byte k of w, times 2^-120. */
static __device__ __forceinline__ float small_e4m3(uint32_t w, int k)
{
    const uint32_t v = k == 0 ? w << 24 : k == 1 ? w << 16 : k == 2 ? w << 8 : w;

    return ds4_bits_f32((v & 0x80000000u) | (v >> 4 & 0x07f00000u));
}

/* Decodes a piece into shared memory. */
static __device__ __forceinline__ void place(const struct piece &p, __nv_bfloat16 *to)
{
    uint2 *const out = (uint2 *)to;

    if (!p.there) {
        for (int k = 0; k < 16; k++)
            out[k] = make_uint2(0, 0);
    } else if (p.own != NULL) {
#pragma unroll 4
        for (int k = 0; k < 16; k++) {
            const float4 v = ((const float4 *)p.own)[k];

            out[k] = make_uint2(ds4_bf16_pair(v.x, v.y), ds4_bf16_pair(v.z, v.w));
        }
    } else if (p.fp8) {
        const float scale = p.scale * 0x1p60f; /* in two steps: no factor overflows */

#pragma unroll
        for (int k = 0; k < 16; k++) {
            const uint32_t w = k % 2 == 0 ? p.word[k / 2].x : p.word[k / 2].y;
            float v[4];

#pragma unroll
            for (int b = 0; b < 4; b++)
                v[b] = small_e4m3(w, b) * 0x1p60f * scale;
            out[k] = make_uint2(ds4_bf16_pair(v[0], v[1]), ds4_bf16_pair(v[2], v[3]));
        }
    } else {
#pragma unroll
        for (int k = 0; k < 16; k++)
            out[k] = p.word[k];
    }
}

/* Part of S = Q K^T: warps are 2 (heads) x 2 (rows) x 2 (halves of d), or 1 x 2 x 4. */
template <int D, int H>
static __device__ __forceinline__ void score(const __nv_bfloat16 *q, const __nv_bfloat16 *k,
                                             float *s)
{
    using sh = shape<D, H>;
    constexpr int tiles = sh::m_tiles / sh::m_warps, width = D / sh::k_warps;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int m0 = warp % sh::m_warps * 32, n0 = warp / sh::m_warps % 2 * 16;
    const int part = warp / (2 * sh::m_warps);
    const __nv_bfloat16 *a_row = q + (m0 + lane % 16) * sh::pitch + part * width + lane / 16 * 8;
    const __nv_bfloat16 *b_row =
        k + (n0 + lane % 8 + lane / 16 * 8) * sh::pitch + part * width + lane / 8 % 2 * 8;
    float acc[tiles][2][4] = {};

#pragma unroll 4
    for (int kk = 0; kk < width; kk += 16) {
        uint32_t a[tiles][4], b[4];

#pragma unroll
        for (int i = 0; i < tiles; i++)
            ds4_ldmatrix(a[i], a_row + 16 * i * sh::pitch + kk);
        ds4_ldmatrix(b, b_row + kk);
#pragma unroll
        for (int i = 0; i < tiles; i++) {
            ds4_mma(acc[i][0], a[i], b[0], b[1]);
            ds4_mma(acc[i][1], a[i], b[2], b[3]);
        }
    }
    s += part * H * sh::s_pitch;
#pragma unroll
    for (int i = 0; i < tiles; i++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int c = 0; c < 4; c++)
                s[(m0 + 16 * i + lane / 4 + c / 2 * 8) * sh::s_pitch + n0 + 8 * j + lane % 4 * 2 +
                  c % 2] = acc[i][j][c];
        }
    }
}

/* Four threads a head: running maximum and sum, P as bf16, and what O must be scaled by.  Whole warps call. */
template <int D, int H>
static __device__ __forceinline__ void soften(const float *s, float scale, int32_t rows, float *top,
                                              float *sum, __nv_bfloat16 *p, float *shrink)
{
    using sh = shape<D, H>;
    const int head = threadIdx.x / 4, c0 = threadIdx.x % 4 * 8;
    const float *mine = s + head * sh::s_pitch + c0;
    float z[8], most = *top, mine_sum = 0.0f, factor;

#pragma unroll
    for (int c = 0; c < 8; c++) {
        float dot = mine[c] + mine[H * sh::s_pitch + c];

        if (sh::k_warps == 4)
            dot += mine[2 * H * sh::s_pitch + c] + mine[3 * H * sh::s_pitch + c];
        z[c] = c0 + c < rows ? dot * scale : -INFINITY;
        most = fmaxf(most, z[c]);
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    /* -inf: nothing but NaN so far, which the products carry on. */
    factor = most == -INFINITY ? 1.0f : expf(*top - most);
#pragma unroll
    for (int c = 0; c < 8; c++) {
        z[c] = c0 + c < rows ? expf(z[c] - most) : 0.0f;
        mine_sum += z[c];
    }
    mine_sum += __shfl_xor_sync(0xffffffffu, mine_sum, 1);
    mine_sum += __shfl_xor_sync(0xffffffffu, mine_sum, 2);
    *sum = *sum * factor + mine_sum;
    *top = most;
    *(uint4 *)(p + head * sh::p_pitch + c0) =
        make_uint4(ds4_bf16_pair(z[0], z[1]), ds4_bf16_pair(z[2], z[3]), ds4_bf16_pair(z[4], z[5]),
                   ds4_bf16_pair(z[6], z[7]));
    if (threadIdx.x % 4 == 0)
        shrink[head] = factor;
}

/* O = shrink * O + P K for this warp's columns. */
template <int D, int H>
static __device__ __forceinline__ void
add_values(const __nv_bfloat16 *p, const __nv_bfloat16 *k, const float *shrink, int32_t n_head,
           float (&o)[shape<D, H>::m_tiles][shape<D, H>::columns / 8][4])
{
    using sh = shape<D, H>;
    const int lane = threadIdx.x % 32, n0 = threadIdx.x / 32 * sh::columns;

#pragma unroll
    for (int i = 0; i < sh::m_tiles; i++) {
        const float low = shrink[16 * i + lane / 4], high = shrink[16 * i + 8 + lane / 4];

        if (__all_sync(0xffffffffu, low == 1.0f && high == 1.0f))
            continue;
#pragma unroll
        for (int j = 0; j < sh::columns / 8; j++) {
            o[i][j][0] *= low;
            o[i][j][1] *= low;
            o[i][j][2] *= high;
            o[i][j][3] *= high;
        }
    }
#pragma unroll
    for (int kk = 0; kk < TILE; kk += 16) {
        uint32_t a[sh::m_tiles][4];

#pragma unroll
        for (int i = 0; i < sh::m_tiles; i++)
            ds4_ldmatrix(a[i], p + (16 * i + lane % 16) * sh::p_pitch + kk + lane / 16 * 8);
#pragma unroll
        for (int j = 0; j < sh::columns / 16; j++) {
            uint32_t b[4];

            ds4_ldmatrix_t(b, k + (kk + lane % 8 + lane / 8 % 2 * 8) * sh::pitch + n0 + 16 * j +
                                  lane / 16 * 8);
#pragma unroll
            for (int i = 0; i < sh::m_tiles; i++) {
                if (16 * i < n_head) { /* the same for the whole block */
                    ds4_mma(o[i][2 * j], a[i], b[0], b[1]);
                    ds4_mma(o[i][2 * j + 1], a[i], b[2], b[3]);
                }
            }
        }
    }
}

/* Heads head0 .. of query t, as bf16. */
template <int D, int H>
static __device__ __forceinline__ void load_queries(const struct ds4_attend &a, int32_t t,
                                                    int32_t head0, __nv_bfloat16 *q)
{
#pragma unroll 8
    for (int i = threadIdx.x; i < H * D / 4; i += THREADS) {
        const int head = i / (D / 4), c = i % (D / 4) * 4;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

        if (head0 + head < a.n_head)
            v = *(const float4 *)(a.q + t * a.q_tok + (head0 + head) * a.q_head + c);
        *(uint2 *)(q + head * shape<D, H>::pitch + c) =
            make_uint2(ds4_bf16_pair(v.x, v.y), ds4_bf16_pair(v.z, v.w));
    }
}

/* The share as it is, for the fold; or the finished row when there is one share. */
template <int D, int H>
static __device__ __forceinline__ void
write_share(const struct ds4_attend &a, int32_t t, int32_t head0, const float *top,
            const float *sum, const float (&o)[shape<D, H>::m_tiles][shape<D, H>::columns / 8][4])
{
    using sh = shape<D, H>;
    const int lane = threadIdx.x % 32, n0 = threadIdx.x / 32 * sh::columns;

#pragma unroll
    for (int i = 0; i < sh::m_tiles; i++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int head = 16 * i + 8 * r + lane / 4;
            const int64_t at = ((int64_t)t * a.n_head + head0 + head) * a.n_share + blockIdx.x;
            float *to = a.share + at * D, factor = 1.0f;

            if (head0 + head >= a.n_head)
                continue;
            if (a.n_share == 1) {
                to = a.o + t * a.o_tok + (head0 + head) * a.o_head;
                factor = ds4_attend_factor(top[head], sum[head], a.sink[head0 + head]);
            }
#pragma unroll
            for (int j = 0; j < sh::columns / 8; j++)
                *(float2 *)(to + n0 + 8 * j + lane % 4 * 2) =
                    make_float2(o[i][j][2 * r] * factor, o[i][j][2 * r + 1] * factor);
        }
    }
    if (a.n_share > 1 && threadIdx.x < H && head0 + (int)threadIdx.x < a.n_head)
        a.state[((int64_t)t * a.n_head + head0 + threadIdx.x) * a.n_share + blockIdx.x] =
            make_float2(top[threadIdx.x], sum[threadIdx.x]);
}

/* Block (x: share of the rows, y: query, z: heads). */
template <int D, int H>
static __global__ void __launch_bounds__(THREADS, H == HEADS ? 1 : 2)
    attend_kernel(const __grid_constant__ struct ds4_attend a)
{
    using sh = shape<D, H>;
    extern __shared__ uint4 attend_room[];
    __nv_bfloat16 *const q = (__nv_bfloat16 *)attend_room, *const k = q + H * sh::pitch;
    float *const s = (float *)(k + TILE * sh::pitch);
    __nv_bfloat16 *const p = (__nv_bfloat16 *)(s + sh::k_warps * H * sh::s_pitch);
    float *const shrink = (float *)(p + H * sh::p_pitch);
    const int32_t t = blockIdx.y, head0 = blockIdx.z * H;
    const int row = threadIdx.x / 8, part = threadIdx.x % 8;
    float o[sh::m_tiles][sh::columns / 8][4] = {}, top = -INFINITY, sum = 0.0f;

    ds4_take_turn();
    const struct ds4_dev_entry entry = a.batch.entry[a.batch.entry_of[t]];
    const int32_t pos = a.batch.pos[t];
    const int32_t first = max(0, pos - a.window + 1), n_window = pos - first + 1;
    const int32_t visible = a.ratio == 0 ? 0 : (pos + 1) / a.ratio;
    const int32_t n_all = n_window + (a.sel != NULL ? a.n_sel[t] : visible);
    const int32_t from = blockIdx.x * a.share_rows;
    const int32_t n =
        blockIdx.x + 1 == (unsigned)a.n_share ? n_all : min(n_all, from + a.share_rows);
    struct piece piece;

    if (!entry.active)
        return;
    if (part < D / PART)
        fetch(a, entry, t, first, n_window, n, from + row, part, &piece);
    load_queries<D, H>(a, t, head0, q);
    for (int32_t at = from; at < n; at += TILE) {
        __syncthreads(); /* the tile before has been used */
        if (part < D / PART) {
            place(piece, k + row * sh::pitch + PART * part);
            fetch(a, entry, t, first, n_window, n, at + TILE + row, part, &piece);
        }
        __syncthreads();
        score<D, H>(q, k, s);
        __syncthreads();
        if (threadIdx.x < 4 * H)
            soften<D, H>(s, a.scale, min(TILE, n - at), &top, &sum, p, shrink);
        __syncthreads();
        add_values<D, H>(p, k, shrink, a.n_head - head0, o);
    }
    __syncthreads();
    if (threadIdx.x % 4 == 0 && threadIdx.x < 4 * H) { /* s is free */
        s[threadIdx.x / 4] = top;
        s[H + threadIdx.x / 4] = sum;
    }
    __syncthreads();
    write_share<D, H>(a, t, head0, s, s + H, o);
}

/* Folds the shares of one head of one query, and does what follows: rotates it back, packs it; one block
 * more a query stores its row in the ring, which every share has read.  Block (x: head or that, y: query) of d
 * threads: a quarter of them has every fourth share, four values a thread, and the quarters meet in shared
 * memory in their order. */
#define FOLDS 4
static __global__ void __launch_bounds__(512)
    fold_kernel(const __grid_constant__ struct ds4_attend a)
{
    __shared__ float4 part[FOLDS - 1][512 / 4];
    __shared__ float weight[MAX_SHARES];
    const int32_t head = blockIdx.x, t = blockIdx.y, n_quarter = a.d / 4, lane = threadIdx.x % 32;
    const int32_t quarter = threadIdx.x / n_quarter, mine = threadIdx.x % n_quarter, c = 4 * mine;
    const int64_t at = ((int64_t)t * a.n_head + head) * a.n_share;
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float2 state[MAX_SHARES / 32];
    float top = -INFINITY, sum = 0.0f, factor;

    ds4_take_turn();
    const struct ds4_dev_entry entry = a.batch.entry[a.batch.entry_of[t]];

    if (!entry.active)
        return;
    if (head == a.n_head) {
        ds4_dev_store_row(a.batch, entry, t, a.kv + t * a.kv_tok, a.ring);
        return;
    }
    /* Every warp: lane l looks after shares l and l + 32. */
#pragma unroll
    for (int k = 0; k < MAX_SHARES / 32; k++) {
        state[k] = make_float2(-INFINITY, 0.0f);
        if (32 * k + lane < a.n_share)
            state[k] = a.state[at + 32 * k + lane];
        top = fmaxf(top, state[k].x);
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2)
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, i));
#pragma unroll
    for (int k = 0; k < MAX_SHARES / 32; k++) {
        /* No rows, no weight; a share of NaN has a sum that is no number. */
        factor = state[k].x == -INFINITY && state[k].y == 0.0f ? 0.0f : expf(state[k].x - top);
        sum += state[k].y * factor;
        if (threadIdx.x < 32)
            weight[32 * k + lane] = factor;
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, i);
    __syncthreads();
#pragma unroll 6
    for (int32_t i = quarter; i < a.n_share; i += FOLDS) {
        const float4 v = *(const float4 *)(a.share + (at + i) * a.d + c);

        factor = weight[i];
        o.x += v.x * factor;
        o.y += v.y * factor;
        o.z += v.z * factor;
        o.w += v.w * factor;
    }
    if (quarter > 0)
        part[quarter - 1][mine] = o;
    __syncthreads();
    if (quarter > 0)
        return;
#pragma unroll
    for (int i = 0; i < FOLDS - 1; i++) {
        const float4 v = part[i][mine];

        o = make_float4(o.x + v.x, o.y + v.y, o.z + v.z, o.w + v.w);
    }
    factor = ds4_attend_factor(top, sum, a.sink[head]);
    o = make_float4(o.x * factor, o.y * factor, o.z * factor, o.w * factor);
    if (a.freq != NULL && c >= a.d - a.ring.d_rope) {
        const int32_t i = (c - (a.d - a.ring.d_rope)) / 2, pos = a.batch.pos[t];
        float low[2] = {o.x, o.y}, high[2] = {o.z, o.w};

        ds4_dev_rotate(low, a.freq[i], pos, true);
        ds4_dev_rotate(high, a.freq[i + 1], pos, true);
        o = make_float4(low[0], low[1], high[0], high[1]);
    }
    *(float4 *)(a.o + t * a.o_tok + head * a.o_head + c) = o;
    if (a.packed != NULL) {
        const int32_t n_unit = a.n_head * a.d / DS4_UNIT_VALUES;

        ds4_pack_quad(o, (head * a.d + c) / DS4_UNIT_VALUES, n_unit,
                      a.packed + t * ds4_packed_row_bytes(n_unit));
    }
}

/* ---- launch ------------------------------------------------------------------------------------------ */

#define MAX_SMS 160 /* counted: scratch is the same for every card */

bool ds4_cuda_can_attend(const struct ds4_attend *a)
{
    const int32_t d_rope = a->ring.d_rope;
    const bool ring = a->ring.format == DS4_ROW_BF16 || a->ring.format == DS4_ROW_FP8;
    const bool pages = a->ratio == 0 || a->pages.format == a->ring.format;

    return ring && pages && (a->d == 512 || a->d == 128) && d_rope == PART && a->q_tok % 4 == 0 &&
           a->q_head % 4 == 0 && a->kv_tok % 4 == 0 && a->o_tok % 4 == 0 && a->o_head % 4 == 0 &&
           ((uintptr_t)a->q | (uintptr_t)a->kv | (uintptr_t)a->o | (uintptr_t)a->ring.data) % 16 ==
               0 &&
           a->ring.row_bytes % 8 == 0 &&
           (a->ratio == 0 || ((uintptr_t)a->pages.data % 16 == 0 && a->pages.row_bytes % 8 == 0));
}

/* Shares by the shape of the step: about a block an SM; heads to a block: few if their blocks, one tile each,
 * have room side by side. */
static int share_out(const struct ds4_device *dev, struct ds4_attend *a)
{
    const int32_t n_sm = dev->n_sm < MAX_SMS ? dev->n_sm : MAX_SMS, n_tok = dev->shape.n_tok;
    const int32_t per_share = n_tok * ds4_div_up(a->n_head, HEADS);
    const int32_t visible = a->ratio == 0    ? 0
                            : a->sel != NULL ? a->top_k
                                             : dev->shape.horizon / a->ratio;
    const int32_t tiles = ds4_div_up((int64_t)a->window + visible, TILE);
    const bool few = tiles > 1 && tiles <= MAX_SHARES &&
                     (int64_t)n_tok * ds4_div_up(a->n_head, FEW) * tiles <= 2 * n_sm;
    int32_t want = few ? tiles : n_sm / per_share;

    want = want > tiles ? tiles : want;
    want = want > MAX_SHARES ? MAX_SHARES : want;
    want = want < 1 ? 1 : want;
    a->share_rows = ds4_div_up(tiles, want) * TILE;
    a->n_share = ds4_div_up(tiles * TILE, a->share_rows);
    return few ? FEW : HEADS;
}

template <int D, int H> static void launch(struct ds4_device *dev, const struct ds4_attend *a)
{
    const dim3 grid(a->n_share, dev->shape.n_tok, ds4_div_up(a->n_head, H));

    DS4_CUDA(cudaFuncSetAttribute((attend_kernel<D, H>),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)shape<D, H>::bytes));
    DS4_CHAIN((attend_kernel<D, H>), grid, THREADS, (shape<D, H>::bytes), dev, *a);
}

size_t ds4_cuda_attend_scratch(const struct ds4_device *dev, const struct ds4_limits *l)
{
    /* share_out: no more blocks than SMs share rows. */
    (void)dev;
    return ((size_t)MAX_SMS + MAX_SHARES) * HEADS * ((size_t)l->d_head + 2) * sizeof(float) + 1024;
}

bool ds4_cuda_attend(struct ds4_device *dev, struct ds4_attend *a, const struct ds4_tensor *o)
{
    const int32_t n_tok = dev->shape.n_tok, heads = share_out(dev, a);
    size_t used = 0;

    if (a->n_share > 1) {
        const int64_t n = (int64_t)n_tok * a->n_head * a->n_share;

        a->share = DS4_CARVE(dev, float, n * a->d, &used);
        a->state = DS4_CARVE(dev, float2, n, &used);
    }
    if (a->d == 512 && heads == FEW)
        launch<512, FEW>(dev, a);
    else if (a->d == 512)
        launch<512, HEADS>(dev, a);
    else if (heads == FEW)
        launch<128, FEW>(dev, a);
    else
        launch<128, HEADS>(dev, a);
    if (a->n_share == 1)
        return false;
    a->packed = ds4_dev_keep(dev, DS4_DEV_KEEP_HEADS, o);
    DS4_CHAIN(fold_kernel, dim3(a->n_head + (a->store ? 1 : 0), n_tok), a->d, 0, dev, *a);
    return true;
}

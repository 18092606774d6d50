/* Experts of a decode step of 2 to 64 tokens: gate, up and middle; down, a row for each slot.
 *
 * Tokens rarely share an expert (six tokens touch 32 of 256, 64 tokens 190 of them), so what counts is to
 * decode every touched expert once and to keep the memory busy; tensor units would idle: with one or two
 * inputs of eight they need as many instructions as dp4a does.  Eight warps, a group, make 32 rows of an
 * expert for A of its slots at once, each warp four rows side by side that share the inputs' loads.  A warp's
 * weights come through a ring in shared memory that runs on from unit of work to unit of work.
 * IQ2_XXS: one block fills an SM, so that its groups share tables with a bank for every lane.
 * A lane's units, their sums and the tree over the lanes are those of gemv.cuh and of the kernels for one
 * token: the same bits.
 * Bytes: touched experts, once per A of their slots.  Bound: instructions (70 for 32 x 32 values). */
#ifndef DS4_KERNELS_CUDA_EXPERTS_ROWS_CUH
#define DS4_KERNELS_CUDA_EXPERTS_ROWS_CUH

#include "kernels/cuda/act.cuh"
#include "kernels/cuda/experts_args.cuh"
#include "kernels/cuda/gemv.cuh"
#include "kernels/cuda/meet.cuh"
#include "kernels/cuda/mma.cuh"

#define DS4_ROWS_WARPS 8 /* of a group */
#define DS4_ROWS_SLAB  32
#define DS4_ROWS_WIDE  4 /* rows of a warp */

/* Two groups an SM, with 128 registers a thread: three with 80 spill and are slower. */
#define DS4_ROWS_GROUPS 2

template <int D> struct ds4_rows_shape {
    static constexpr bool shared_tables = D == DS4_DTYPE_IQ2_XXS;
    static constexpr int groups = shared_tables ? DS4_ROWS_GROUPS : 1; /* of a block */
    static constexpr int blocks = shared_tables ? 1 : DS4_ROWS_GROUPS; /* of an SM */
    static constexpr int units = shared_tables ? 2 : 1;                /* of a lane in a chunk */
    static constexpr int chunk_units = 32 * units;
    static constexpr int chunk_bytes =
        chunk_units * DS4_UNIT / ds4_block_elems(D) * ds4_block_bytes(D);
    static constexpr int room = (chunk_bytes + 15) / 16 * 16 + 32; /* any start, a word to spare */
    static constexpr int stage = DS4_ROWS_WIDE * room;
    static constexpr int fit = 7424 / stage;
    static constexpr int stages = fit > 4 ? 4 : fit < 2 ? 2 : fit;
    static constexpr int table_bytes =
        shared_tables ? (int)sizeof(typename ds4_unit_room<D>::wide) : 0;
    static constexpr int group_bytes = DS4_ROWS_WARPS * stages * stage;
};

/* Starts the copy of chunk c of a warp's rows.  The few pieces of each row behind a multiple of 32 go in one
 * round. */
template <int D>
static __device__ __forceinline__ void ds4_rows_fetch(const uint8_t *const (&row)[DS4_ROWS_WIDE],
                                                      int32_t n_col, int32_t c, uint8_t *stage)
{
    using shape = ds4_rows_shape<D>;
    constexpr int pieces = shape::room / 16, rest = pieces % 32, full = pieces / 32;
    constexpr bool joined = rest <= 8;
    const int lane = threadIdx.x % 32;
    const size_t skip = (size_t)c * shape::chunk_bytes;
    const size_t row_end = (size_t)(n_col / ds4_block_elems(D)) * ds4_block_bytes(D);
    const int bytes =
        row_end - skip < shape::chunk_bytes ? (int)(row_end - skip) : shape::chunk_bytes;

#pragma unroll
    for (int r = 0; r < DS4_ROWS_WIDE; r++) {
        const uint8_t *p = row[r] + skip;
        const int lead = (int)((uintptr_t)p & 15), total = lead + bytes;

#pragma unroll
        for (int k = 0; k < full + !joined; k++) {
            const int at = 16 * (32 * k + lane);

            if (at < total)
                ds4_async_copy(stage + r * shape::room + at, p - lead + at, min(16, total - at));
        }
    }
    if constexpr (joined) {
        const int r = lane / 8, at = 16 * (32 * full + lane % 8);
        const uint8_t *p = (r < 2 ? r == 0 ? row[0] : row[1] : r == 2 ? row[2] : row[3]) + skip;
        const int lead = (int)((uintptr_t)p & 15), total = lead + bytes;

        if (at < total)
            ds4_async_copy(stage + r * shape::room + at, p - lead + at, min(16, total - at));
    }
}

/* A row's bytes in a stage. */
struct ds4_rows_span {
    const uint32_t *word;
    uint32_t at;
};

/* A packed input's unit. */
struct ds4_rows_input {
    uint4 low, high;
    uint2 meta;

    __device__ __forceinline__ ds4_rows_input(const uint8_t *x, int32_t unit, int32_t n_unit)
    {
        low = ds4_load16((const uint4 *)x + unit);
        high = ds4_load16((const uint4 *)x + n_unit + unit);
        meta = ds4_load8((const uint2 *)((const uint4 *)x + 2 * n_unit) + unit);
    }
};

/* One unit of a row of IQ2_XXS; dot() gives the bits of ds4_gemv_int8_unit with fewer loads. */
struct ds4_rows_iq2 {
    uint32_t select[4];
    float s;

    __device__ __forceinline__ ds4_rows_iq2(const struct ds4_rows_span &span,
                                            const struct ds4_iq2_wide *room, int local)
    {
        const uint32_t from = span.at + local / 8 * 66, at = from + 2 + local % 8 * 8;
        const uint32_t shift = (at & 3) * 8, *const word = span.word + (at >> 2);
        const uint32_t middle = word[1], index = __funnelshift_r(word[0], middle, shift);
        const uint32_t sign = __funnelshift_r(middle, word[2], shift);
        const float d = ds4_f16_of(*(const uint16_t *)((const uint8_t *)span.word + from));

        /* 0.25 * (0.5 + k): a power of two may come first. */
        s = __fmul_rn(d, __fadd_rn(0.125f, __fmul_rn(0.25f, (float)(sign >> 28))));
        select[0] = ds4_iq2_select<0>(room, index, sign);
        select[1] = ds4_iq2_select<1>(room, index, sign);
        select[2] = ds4_iq2_select<2>(room, index, sign);
        select[3] = ds4_iq2_select<3>(room, index, sign);
    }
    __device__ __forceinline__ void dot(const struct ds4_rows_input &x, float &acc) const
    {
        const uint32_t in[8] = {x.low.x,  x.low.y,  x.low.z,  x.low.w,
                                x.high.x, x.high.y, x.high.z, x.high.w};
        int sum = 0x4b400000; /* the mantissa of 1.5 * 2^23 takes an integer below 2^22 */

#pragma unroll
        for (int j = 0; j < 8; j++)
            sum = __dp4a((int)ds4_iq2_bytes(select[j / 2] >> 16 * (j % 2)), (int)in[j], sum);
        const float v = s * __fsub_rn(__int_as_float(sum), 12582912.0f);

        acc += __uint_as_float(x.meta.x) * v;
    }
};

/* The same of Q2_K on a multiple of four bytes.  Values stay where they are in their bytes, 4^k times too large;
 * the integer sums make that good. */
struct ds4_rows_q2 {
    uint32_t q[8];
    float s[2], m[2];
    uint32_t shift;

    __device__ __forceinline__ ds4_rows_q2(const struct ds4_rows_span &span, const void *,
                                           int local)
    {
        const uint32_t v = local % 8, *const word = span.word + span.at / 4 + local / 8 * 21;
        const uint32_t two = ((const uint16_t *)word)[v], both = word[20];
        const float d = ds4_f16_of(both & 0xffff), least = ds4_f16_of(both >> 16);

        shift = 2 * (v % 4);
        s[0] = __fmul_rn(d, (float)(two & 15));
        s[1] = __fmul_rn(d, (float)(two >> 8 & 15));
        m[0] = __fmul_rn(least, (float)(two >> 4 & 15));
        m[1] = __fmul_rn(least, (float)(two >> 12));
#pragma unroll
        for (int j = 0; j < 8; j++)
            q[j] = word[4 + 8 * (v / 4) + j] & 0x03030303u << shift;
    }
    __device__ __forceinline__ void dot(const struct ds4_rows_input &x, float &acc) const
    {
        const int first = (int16_t)(x.meta.y & 0xffff), second = (int)x.meta.y >> 16;
        int low = 0, high = 0;
        float v;

        low = ds4_dot_us(q[0], x.low.x, low);
        low = ds4_dot_us(q[1], x.low.y, low);
        low = ds4_dot_us(q[2], x.low.z, low);
        low = ds4_dot_us(q[3], x.low.w, low);
        high = ds4_dot_us(q[4], x.high.x, high);
        high = ds4_dot_us(q[5], x.high.y, high);
        high = ds4_dot_us(q[6], x.high.z, high);
        high = ds4_dot_us(q[7], x.high.w, high);
        v = s[1] * (float)(high >> shift);
        v += s[0] * (float)(low >> shift);
        v -= m[0] * (float)first + m[1] * (float)second;
        acc += __uint_as_float(x.meta.x) * v;
    }
};

/* acc += one unit of four rows times N inputs, decoded by Unit.  Up to two inputs stay in registers and rows take
 * turns; of more, two rows stay and inputs take turns. */
template <class Unit, int N, int A, class ROOM>
static __device__ __forceinline__ void
ds4_rows_unit(const struct ds4_rows_span (&span)[DS4_ROWS_WIDE], const ROOM *room, int local,
              int32_t unit, int32_t n_unit, const uint8_t *const (&x)[A],
              float (&acc)[DS4_ROWS_WIDE][A])
{
    if constexpr (N <= 2) {
        const struct ds4_rows_input first(x[0], unit, n_unit), second(x[N - 1], unit, n_unit);

#pragma unroll
        for (int r = 0; r < DS4_ROWS_WIDE; r++) {
            const Unit w(span[r], room, local);

            w.dot(first, acc[r][0]);
            if (N == 2)
                w.dot(second, acc[r][1]);
        }
    } else {
#pragma unroll
        for (int r = 0; r < DS4_ROWS_WIDE; r += 2) {
            const Unit w(span[r], room, local), v(span[r + 1], room, local);

#pragma unroll
            for (int n = 0; n < N; n++) {
                /* Loaded anew for the second pair: the compiler would rather spill. */
                const struct ds4_rows_input in(ds4_after(x[n]), unit, n_unit);

                w.dot(in, acc[r][n]);
                v.dot(in, acc[r + 1][n]);
            }
        }
    }
}

/* acc += a chunk of four rows times N inputs. */
template <int D, int N, int A, class ROOM>
static __device__ __forceinline__ void
ds4_rows_chunk(const struct ds4_rows_span (&span)[DS4_ROWS_WIDE], const ROOM *room, int32_t first,
               int32_t n_unit, const uint8_t *const (&x)[A], float (&acc)[DS4_ROWS_WIDE][A])
{
#pragma unroll 1
    for (int i = 0; i < ds4_rows_shape<D>::units; i++) {
        const int local = 32 * i + threadIdx.x % 32;

        if (first + local >= n_unit)
            break;
        if constexpr (D == DS4_DTYPE_IQ2_XXS) {
            ds4_rows_unit<struct ds4_rows_iq2, N, A>(span, room, local, first + local, n_unit, x,
                                                     acc);
        } else {
            if (D == DS4_DTYPE_Q2_K &&
                ((span[0].at | span[1].at | span[2].at | span[3].at) & 3) == 0) {
                ds4_rows_unit<struct ds4_rows_q2, N, A>(span, room, local, first + local, n_unit, x,
                                                        acc);
                continue;
            }
#pragma unroll
            for (int r = 0; r < DS4_ROWS_WIDE; r += 2) {
                const struct ds4_shared_span two[2] = {{span[r].word, span[r].at, NULL},
                                                       {span[r + 1].word, span[r + 1].at, NULL}};
                const uint8_t *in[A];

#pragma unroll
                for (int n = 0; n < A; n++)
                    in[n] = ds4_after(x[n]);
                ds4_gemv_int8_unit<D, N, 2, A>(two, local, first + local, n_unit, in,
                                               (float(&)[2][A])acc[r]);
            }
        }
    }
}

/* Streams a list of items through one warp's ring.  An item is four rows and up to A packed inputs; Items is a
 * cursor: valid(), next(), rows(row), n(), input(i).  done(item, sum) gets each item's sums in turn: lane l those
 * of row l / 8, input l % 8 / (8 / A). */
template <int D, int A, class Items, class ROOM, class Done>
static __device__ __forceinline__ void ds4_rows_stream(Items use, int32_t n_col, uint8_t *ring,
                                                       const ROOM *room, Done done)
{
    using shape = ds4_rows_shape<D>;
    constexpr int R = DS4_ROWS_WIDE;
    const int32_t n_unit = n_col / DS4_UNIT;
    const int32_t n_chunk = (n_unit + shape::chunk_units - 1) / shape::chunk_units;
    Items ahead = use;
    const uint8_t *later[R];
    int32_t c_ahead = 0;
    int now = 0, next = 0;

    if (ahead.valid())
        ahead.rows(later);
    const auto fetch = [&] {
        if (ahead.valid()) {
            ds4_rows_fetch<D>(later, n_col, c_ahead, ring + next * shape::stage);
            if (++c_ahead == n_chunk) {
                c_ahead = 0;
                ahead.next();
                if (ahead.valid())
                    ahead.rows(later);
            }
        }
        next = next + 1 == shape::stages ? 0 : next + 1;
        ds4_async_commit();
    };

    for (int s = 0; s < shape::stages - 1; s++)
        fetch();
    for (; use.valid(); use.next()) {
        const int n = use.n();
        const uint8_t *row[R], *x[A];
        float acc[R][A] = {}, v[R * A];
        uint32_t at[R];

        use.rows(row);
#pragma unroll
        for (int r = 0; r < R; r++)
            at[r] = (uint32_t)(uintptr_t)row[r] & 15; /* a chunk is a multiple of sixteen bytes */
#pragma unroll
        for (int i = 0; i < A; i++)
            x[i] = use.input(min(i, n - 1));
        for (int32_t c = 0; c < n_chunk; c++) {
            struct ds4_rows_span span[R];
            const int32_t first = c * shape::chunk_units;

            ds4_async_wait<shape::stages - 2>();
            __syncwarp(); /* the stage is there, and all lanes have left the one before it */
            fetch();
#pragma unroll
            for (int r = 0; r < R; r++)
                span[r] = ds4_rows_span{
                    (const uint32_t *)(ring + now * shape::stage + r * shape::room), at[r]};
            if (n == 1)
                ds4_rows_chunk<D, 1, A>(span, room, first, n_unit, x, acc);
            else if (A == 2 || n == 2)
                ds4_rows_chunk<D, 2, A>(span, room, first, n_unit, x, acc);
            else
                ds4_rows_chunk<D, A, A>(span, room, first, n_unit, x, acc);
            now = now + 1 == shape::stages ? 0 : now + 1;
        }
#pragma unroll
        for (int i = 0; i < R * A; i++)
            v[i] = acc[i / A][i % A];
        done(use, ds4_warp_sums<R * A>(v));
    }
    ds4_async_wait<0>();
}

/* Slots i .. i + A - 1 of a touched expert, slab of 32 rows: a group's work, `step` apart. */
struct ds4_rows_work {
    const struct ds4_dev_group *list;
    int32_t n_group;
    int32_t n_slab;
    int32_t u; /* list entry * n_slab + slab */
    int32_t step;
    int32_t slab;
    int32_t i;
    struct ds4_dev_group group;

    __device__ void enter(void)
    {
        const int32_t g = u / n_slab;

        i = 0;
        slab = u - g * n_slab;
        group.n = 0;
        if (g < n_group)
            group = list[g]; /* touched experts come first */
    }
    __device__ bool valid(void) const
    {
        return i < group.n;
    }
    __device__ void advance(int slots)
    {
        i += slots;
        if (i < group.n)
            return;
        u += step;
        enter();
    }
};

template <int D>
static __device__ __forceinline__ struct ds4_rows_work ds4_rows_work_of(const struct ds4_experts &p,
                                                                        int32_t n_slab)
{
    const int32_t group = threadIdx.x / (32 * DS4_ROWS_WARPS);
    struct ds4_rows_work work = {p.group, p.n_group, n_slab,
                                 (int32_t)(group * gridDim.x + blockIdx.x)};

    work.step = gridDim.x * (blockDim.x / (32 * DS4_ROWS_WARPS));
    work.enter();
    return work;
}

/* The tables, if D has some, and this warp's ring behind them; the whole block. */
template <int D>
static __device__ __forceinline__ const typename ds4_unit_room<D>::wide *
ds4_rows_room(uint4 *space, uint8_t **ring)
{
    using shape = ds4_rows_shape<D>;
    using wide = typename ds4_unit_room<D>::wide;
    const wide *room = NULL;

    *ring =
        (uint8_t *)space + shape::table_bytes + threadIdx.x / 32 * (shape::stages * shape::stage);
    if constexpr (shape::shared_tables) {
        room = ds4_unit_fill((wide *)space);
        __syncthreads();
    }
    return room;
}

/* ---- gate, up, middle ------------------------------------------------------------------------------- */

/* Two rows of gate and up each, twice for a slab. */
template <int A> struct ds4_rows_gate_items {
    struct ds4_rows_work work;
    const struct ds4_experts *p;
    int32_t pair;

    __device__ bool valid(void) const
    {
        return work.valid();
    }
    __device__ void next(void)
    {
        pair ^= 1;
        if (pair == 0)
            work.advance(A);
    }
    __device__ void rows(const uint8_t *(&r)[DS4_ROWS_WIDE]) const
    {
        const int32_t row =
            DS4_ROWS_SLAB * work.slab + threadIdx.x / 32 % DS4_ROWS_WARPS * 4 + 2 * pair;
        const size_t skip = ((size_t)work.group.expert * p->d_expert + row) * p->gate_row_bytes;

        r[0] = p->gate + skip;
        r[1] = p->up + skip;
        r[2] = r[0] + p->gate_row_bytes;
        r[3] = r[1] + p->gate_row_bytes;
    }
    __device__ int n(void) const
    {
        return min(A, work.group.n - work.i);
    }
    __device__ const uint8_t *input(int k) const
    {
        return p->x.data + p->token[work.group.first + work.i + k] * p->x.row_bytes;
    }
};

template <int D, int A>
static __global__ void __launch_bounds__(32 * DS4_ROWS_WARPS * ds4_rows_shape<D>::groups,
                                         ds4_rows_shape<D>::blocks)
    ds4_rows_gate_kernel(const __grid_constant__ struct ds4_experts p)
{
    extern __shared__ uint4 ds4_rows_space[];
    __shared__ float middles[ds4_rows_shape<D>::groups][2][A][DS4_ROWS_SLAB];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = warp / DS4_ROWS_WARPS, member = warp % DS4_ROWS_WARPS;
    const int32_t n_shared = p.d_shared / DS4_ROWS_SLAB;
    uint8_t *ring;
    const auto room = ds4_rows_room<D>(ds4_rows_space, &ring);
    struct ds4_rows_gate_items<A> items = {
    };
    int turn = 0; /* which of two middles: the other may still be read */

    ds4_take_turn();
    items.work = ds4_rows_work_of<D>(p, p.d_expert / DS4_ROWS_SLAB);
    items.p = &p;
    ds4_rows_stream<D, A>(
        items, p.d, ring, room, [&](const struct ds4_rows_gate_items<A> &item, float gate) {
            const float up = __shfl_xor_sync(0xffffffffu, gate, 8);
            const int k = lane % 8 / (8 / A), n = item.n();
            const int32_t slot = item.work.group.first + item.work.i;
            float(*const middle)[DS4_ROWS_SLAB] = middles[group][turn];

            if (lane % 16 < 8 && lane % (8 / A) == 0 && k < n)
                middle[k][4 * member + 2 * item.pair + lane / 16] =
                    ds4_middle_value(gate, up, p.clamp, p.weight[slot + k]);
            if (item.pair == 0)
                return;
            ds4_meet(1 + group, 32 * DS4_ROWS_WARPS);
            if (member < n)
                ds4_pack_unit(middle[member][lane], item.work.slab, p.middle.part,
                              (uint8_t *)p.middle.data + (slot + member) * p.middle.row_bytes);
            turn ^= 1;
        });
    for (int32_t i = blockIdx.x * (blockDim.x / 32) + warp; i < p.n_tok * n_shared;
         i += gridDim.x * (blockDim.x / 32)) {
        const int32_t t = i / n_shared, unit = i % n_shared;
        const int64_t at = (int64_t)t * p.d_shared + DS4_ROWS_SLAB * unit + lane;

        ds4_pack_unit(ds4_middle_value(p.shared_gate[at], p.shared_up[at], p.shared_clamp, 1.0f),
                      unit, p.shared_middle.part,
                      (uint8_t *)p.shared_middle.data + t * p.shared_middle.row_bytes);
    }
}

/* ---- down ----------------------------------------------------------------------------------------------- */

template <int A> struct ds4_rows_down_items {
    struct ds4_rows_work work;
    const struct ds4_experts *p;

    __device__ bool valid(void) const
    {
        return work.valid();
    }
    __device__ void next(void)
    {
        work.advance(A);
    }
    __device__ int32_t row(int r) const
    {
        return DS4_ROWS_SLAB * work.slab + threadIdx.x / 32 % DS4_ROWS_WARPS * 4 + r;
    }
    __device__ void rows(const uint8_t *(&r)[DS4_ROWS_WIDE]) const
    {
#pragma unroll
        for (int i = 0; i < DS4_ROWS_WIDE; i++)
            r[i] = p->down +
                   ((size_t)work.group.expert * p->d + min(row(i), p->d - 1)) * p->down_row_bytes;
    }
    __device__ int n(void) const
    {
        return min(A, work.group.n - work.i);
    }
    __device__ const uint8_t *input(int k) const
    {
        return p->middle.data + (work.group.first + work.i + k) * p->middle.row_bytes;
    }
};

template <int D, int A>
static __global__ void __launch_bounds__(32 * DS4_ROWS_WARPS * ds4_rows_shape<D>::groups,
                                         ds4_rows_shape<D>::blocks)
    ds4_rows_down_kernel(const __grid_constant__ struct ds4_experts p)
{
    extern __shared__ uint4 ds4_rows_space[];
    const int lane = threadIdx.x % 32;
    uint8_t *ring;
    const auto room = ds4_rows_room<D>(ds4_rows_space, &ring);
    struct ds4_rows_down_items<A> items = {
    };

    ds4_take_turn();
    items.work = ds4_rows_work_of<D>(p, (p.d + DS4_ROWS_SLAB - 1) / DS4_ROWS_SLAB);
    items.p = &p;
    ds4_rows_stream<D, A>(
        items, p.d_expert, ring, room, [&](const struct ds4_rows_down_items<A> &item, float sum) {
            const int k = lane % 8 / (8 / A);
            const int32_t row = item.row(lane / 8);

            if (lane % (8 / A) == 0 && k < item.n() && row < p.d)
                p.part[(int64_t)(item.work.group.first + item.work.i + k) * p.d + row] = sum;
        });
}

/* ---- launch ---------------------------------------------------------------------------------------------- */

template <int D, class Kernel>
static void ds4_rows_launch(struct ds4_device *dev, const struct ds4_experts *p, Kernel kernel,
                            int n_slab)
{
    using shape = ds4_rows_shape<D>;
    const int units = p->n_group * n_slab, room = shape::blocks * dev->n_sm;
    int limit = 0, groups = shape::groups, bytes;

    DS4_CUDA(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, dev->ordinal));
    while (groups > 1 && shape::table_bytes + groups * shape::group_bytes + 4096 > limit)
        groups--;
    bytes = shape::table_bytes + groups * shape::group_bytes;
    DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    DS4_CHAIN(kernel, units < room ? units : room, 32 * DS4_ROWS_WARPS * groups, bytes, dev, *p);
}

template <int D> static void ds4_rows_gate_run(struct ds4_device *dev, const struct ds4_experts *p)
{
    const int n_slab = p->d_expert / DS4_ROWS_SLAB;

    if (p->n_tok <= 16)
        ds4_rows_launch<D>(dev, p, ds4_rows_gate_kernel<D, 2>, n_slab);
    else
        ds4_rows_launch<D>(dev, p, ds4_rows_gate_kernel<D, 4>, n_slab);
}

template <int D> static void ds4_rows_down_run(struct ds4_device *dev, const struct ds4_experts *p)
{
    const int n_slab = ds4_div_up(p->d, DS4_ROWS_SLAB);

    if (p->n_tok <= 16)
        ds4_rows_launch<D>(dev, p, ds4_rows_down_kernel<D, 2>, n_slab);
    else
        ds4_rows_launch<D>(dev, p, ds4_rows_down_kernel<D, 4>, n_slab);
}

#endif

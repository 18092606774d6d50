/* Experts of a step of one token in two launches: gate, up and middle; then down, summed over experts.  More
 * tokens: experts_rows.cuh.
 *
 *   1. a block makes 32 middle values of one expert's slot: a warp streams a gate row and the up row
 *      beside it past the input, so that the two sums meet in its lanes; the block's 32 values
 *      are one packed unit of the down product.  The shared expert's middle row is packed on the side.
 *   2. two warps make two rows of y: they stream those rows of the shared expert, then of every
 *      touched expert in rising order.  Nothing is written but y, and the order of the sums is fixed.
 * Weights come through the rings of gemv.cuh, one pipeline over all experts of a warp.
 * Bytes: touched experts and the shared expert, once.  Bound: memory, IQ2_XXS the decoding. */
#ifndef DS4_KERNELS_CUDA_EXPERTS_CUH
#define DS4_KERNELS_CUDA_EXPERTS_CUH

#include "kernels/cuda/act.cuh"
#include "kernels/cuda/experts_args.cuh"
#include "kernels/cuda/experts_rows.cuh"
#include "kernels/cuda/gemv.cuh"

#define DS4_EXPERT_WARPS 8
#define DS4_EXPERT_ROWS  2 /* streamed side by side */
#define DS4_EXPERT_SLAB  32

template <int D> struct ds4_expert_ring {
    using shape = ds4_gemv_shape<D, DS4_EXPERT_ROWS>;
    static constexpr int fit = 7168 / (DS4_EXPERT_ROWS * shape::room); /* 56 KiB over eight warps */
    static constexpr int stages = fit > 4 ? 4 : fit < 3 ? 3 : fit;
    static constexpr int words = stages * DS4_EXPERT_ROWS * shape::room / 16; /* uint4 a warp */
};

/* Starts the copy of chunk c of two rows of a matrix of n_col columns. */
template <int D>
static __device__ __forceinline__ void
ds4_expert_fetch(const uint8_t *const (&row)[DS4_EXPERT_ROWS], int32_t n_col, int32_t c,
                 uint4 *stage)
{
    using shape = ds4_gemv_shape<D, DS4_EXPERT_ROWS>;
    const size_t skip = (size_t)c * shape::chunk_bytes;
    const size_t row_end = (size_t)(n_col / ds4_block_elems(D)) * ds4_block_bytes(D);
    const int bytes =
        row_end - skip < shape::chunk_bytes ? (int)(row_end - skip) : shape::chunk_bytes;

#pragma unroll
    for (int r = 0; r < DS4_EXPERT_ROWS; r++) {
        const uint8_t *p = row[r] + skip;
        const int lead = (int)((uintptr_t)p & 15), total = lead + bytes;

        for (int at = 16 * (threadIdx.x % 32); at < total; at += 16 * 32)
            ds4_async_copy((uint8_t *)stage + r * shape::room + at, p - lead + at,
                           min(16, total - at));
    }
}

/* Streams a list of items through one warp's ring.  An item is a pair of rows and a packed input;
 * Items is a cursor: valid(), next(), rows(row), input().  sink(item, acc) gets the lane's
 * partial sums acc[row][0] of each item in turn.  The first copies start before the previous kernel
 * has ended if the cursor needs nothing of it. */
template <int D, class Items, class Sink>
static __device__ __forceinline__ void ds4_expert_stream(Items use, int32_t n_col, uint4 *ring,
                                                         const struct ds4_iq2_room *room, Sink sink)
{
    using shape = ds4_gemv_shape<D, DS4_EXPERT_ROWS>;
    constexpr int R = DS4_EXPERT_ROWS;
    constexpr int stages = ds4_expert_ring<D>::stages, stage = R * shape::room / 16;
    const int32_t n_unit = n_col / DS4_UNIT;
    const int32_t n_chunk = (n_unit + shape::chunk_units - 1) / shape::chunk_units;
    struct ds4_gemv_work k = {};
    Items ahead = use;
    int32_t c_ahead = 0;
    int now = 0, next = 0;

    k.n_col = n_col;
    __syncwarp();
    for (int s = 0; s < stages - 1; s++) {
        if (ahead.valid()) {
            const uint8_t *row[R];

            ahead.rows(row);
            ds4_expert_fetch<D>(row, n_col, c_ahead, ring + next * stage);
            if (++c_ahead == n_chunk) {
                c_ahead = 0;
                ahead.next();
            }
        }
        next++;
        ds4_async_commit();
    }
    ds4_wait_previous();
    for (; use.valid(); use.next()) {
        const uint8_t *row[R], *const x[1] = {ds4_after(use.input())};
        float acc[R][1] = {};

        use.rows(row);
        for (int32_t c = 0; c < n_chunk; c++) {
            struct ds4_shared_span span[R];

            if (ahead.valid()) {
                const uint8_t *later[R];

                ahead.rows(later);
                ds4_expert_fetch<D>(later, n_col, c_ahead, ring + next * stage);
                if (++c_ahead == n_chunk) {
                    c_ahead = 0;
                    ahead.next();
                }
            }
            next = next + 1 == stages ? 0 : next + 1;
            ds4_async_commit();
            ds4_async_wait<stages - 1>();
            __syncwarp();
#pragma unroll
            for (int r = 0; r < R; r++)
                span[r] = ds4_shared_span{
                    (const uint32_t *)((const uint8_t *)(ring + now * stage) + r * shape::room),
                    (uint32_t)((uintptr_t)(row[r] + (size_t)c * shape::chunk_bytes) & 15), room};
            ds4_gemv_int8<D, 1, R, 1>(k, span, c * shape::chunk_units, n_unit, x, acc);
            __syncwarp(); /* before the stage is filled again */
            now = now + 1 == stages ? 0 : now + 1;
        }
        sink(use, acc);
    }
    ds4_async_wait<0>();
}

/* Sums over the warp of acc: lane l gets row l / 16. */
static __device__ __forceinline__ float ds4_expert_sums(const float (&acc)[DS4_EXPERT_ROWS][1])
{
    float v[DS4_EXPERT_ROWS] = {acc[0][0], acc[1][0]};

    return ds4_warp_sums<DS4_EXPERT_ROWS>(v);
}

/* ---- gate, up, middle ------------------------------------------------------------------------------- */

/* Four row pairs of an expert. */
struct ds4_gate_items {
    const uint8_t *gate, *up; /* row 0 of this warp */
    size_t row_bytes;
    const uint8_t *x;
    int32_t row;

    __device__ bool valid(void) const
    {
        return row < DS4_EXPERT_SLAB / DS4_EXPERT_WARPS;
    }
    __device__ void next(void)
    {
        row++;
    }
    __device__ void rows(const uint8_t *(&r)[DS4_EXPERT_ROWS]) const
    {
        r[0] = gate + (size_t)row * row_bytes;
        r[1] = up + (size_t)row * row_bytes;
    }
    __device__ const uint8_t *input(void) const
    {
        return x;
    }
};

/* One slab of the expert of slot `slot`, by the whole block. */
template <int D>
static __device__ __forceinline__ void
ds4_gate_slab(const struct ds4_experts &p, int32_t expert, float weight, int32_t slot, int32_t slab,
              uint4 *ring, const struct ds4_iq2_room *room, float (&middle)[DS4_EXPERT_SLAB])
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const size_t skip =
        ((size_t)expert * p.d_expert + DS4_EXPERT_SLAB * slab + 4 * warp) * p.gate_row_bytes;
    const struct ds4_gate_items items = {p.gate + skip, p.up + skip, p.gate_row_bytes, p.x.data, 0};

    ds4_expert_stream<D>(items, p.d, ring, room, [&](const struct ds4_gate_items &item, auto &acc) {
        const float gate = ds4_expert_sums(acc), up = __shfl_xor_sync(0xffffffffu, gate, 16);

        if (lane == 0)
            middle[4 * warp + item.row] = ds4_middle_value(gate, up, p.clamp, weight);
    });
    __syncthreads();
    if (warp == 0)
        ds4_pack_unit(middle[lane], slab, p.middle.part,
                      (uint8_t *)p.middle.data + slot * p.middle.row_bytes);
    __syncthreads(); /* before middle is written again */
}

template <int D>
static __global__ void __launch_bounds__(32 * DS4_EXPERT_WARPS, 3)
    ds4_gate_kernel(const __grid_constant__ struct ds4_experts p)
{
    extern __shared__ uint4 ds4_gate_room[];
    __shared__ typename ds4_unit_room<D>::type unit_room;
    __shared__ float middle[DS4_EXPERT_SLAB];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t n_slab = p.d_expert / DS4_EXPERT_SLAB, n_shared = p.d_shared / DS4_EXPERT_SLAB;
    const struct ds4_iq2_room *const room = ds4_gemv_room(&unit_room);
    struct ds4_one_slots slots;

    ds4_take_turn();
    slots = ds4_one_slots_of(p);
    for (int32_t u = blockIdx.x; u < slots.n * n_slab; u += gridDim.x) {
        const int32_t slot = u / n_slab;

        ds4_gate_slab<D>(p, __shfl_sync(0xffffffffu, slots.expert, slot),
                         __shfl_sync(0xffffffffu, slots.weight, slot), slot, u % n_slab,
                         ds4_gate_room + warp * ds4_expert_ring<D>::words, room, middle);
    }
    for (int32_t i = blockIdx.x * DS4_EXPERT_WARPS + warp; i < p.n_tok * n_shared;
         i += gridDim.x * DS4_EXPERT_WARPS) {
        const int32_t t = i / n_shared, unit = i % n_shared;
        const int64_t at = (int64_t)t * p.d_shared + DS4_EXPERT_SLAB * unit + lane;

        ds4_pack_unit(ds4_middle_value(p.shared_gate[at], p.shared_up[at], p.shared_clamp, 1.0f),
                      unit, p.shared_middle.part,
                      (uint8_t *)p.shared_middle.data + t * p.shared_middle.row_bytes);
    }
}

/* ---- down ----------------------------------------------------------------------------------------------- */

/* A step of one token: two warps share two rows, one with the shared expert and the first third of the
 * slots.  A lane holds one slot's expert, so that no address waits for memory. */
#define DS4_ONE_PAIRS (DS4_EXPERT_WARPS / 2)

struct ds4_one_items {
    const uint8_t *w; /* row 0 of this warp in expert 0 */
    size_t second;    /* bytes to its row 1 */
    size_t expert_bytes;
    int32_t expert; /* of the lane's slot */
    const uint8_t *x;
    int64_t x_bytes;
    int32_t slot;
    int32_t end;

    __device__ bool valid(void) const
    {
        return slot < end;
    }
    __device__ void next(void)
    {
        slot++;
    }
    __device__ void rows(const uint8_t *(&r)[DS4_EXPERT_ROWS]) const
    {
        r[0] = w + (size_t)__shfl_sync(0xffffffffu, expert, slot) * expert_bytes;
        r[1] = r[0] + second;
    }
    __device__ const uint8_t *input(void) const
    {
        return x + slot * x_bytes;
    }
};

/* The sums are those of experts_rows.cuh and moe.cu, in their order. */
template <int D, int S>
static __global__ void __launch_bounds__(32 * DS4_EXPERT_WARPS, 4)
    ds4_down_one_kernel(const __grid_constant__ struct ds4_experts p)
{
    extern __shared__ uint4 ds4_down_room[];
    __shared__ typename ds4_unit_room<D>::type unit_room;
    __shared__ float part[DS4_ONE_PAIRS][DS4_EXPERT_ROWS][DS4_ONE_SLOTS + 1];
    constexpr int words = ds4_expert_ring<D>::words > ds4_expert_ring<S>::words
                              ? ds4_expert_ring<D>::words
                              : ds4_expert_ring<S>::words;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = warp / 2;
    const int32_t row0 = (blockIdx.x * DS4_ONE_PAIRS + pair) * DS4_EXPERT_ROWS;
    const int32_t low = min(row0, p.d - 1), high = min(row0 + 1, p.d - 1);
    const int32_t first = (p.n_used + 1) / 3;
    uint4 *const ring = ds4_down_room + warp * words;
    const struct ds4_iq2_room *const room = ds4_gemv_room(&unit_room);
    struct ds4_one_items items = {};
    struct ds4_one_slots slots;
    const auto keep = [&](const struct ds4_one_items &item, auto &acc, int32_t at) {
        const float v = ds4_expert_sums(acc);

        if (lane % 16 == 0)
            part[pair][lane / 16][item.slot + at] = v;
    };

    ds4_release_next();
    if (warp % 2 == 0) {
        items.w = p.shared_down + low * p.shared_row_bytes;
        items.second = (high - low) * p.shared_row_bytes;
        items.x = p.shared_middle.data;
        items.end = 1;
        ds4_expert_stream<S>(
            items, p.d_shared, ring, room,
            [&](const struct ds4_one_items &item, auto &acc) { keep(item, acc, 0); });
    }
    ds4_wait_previous();
    slots = ds4_one_slots_of(p);
    items.expert = slots.expert;
    items.w = p.down + low * p.down_row_bytes;
    items.second = (high - low) * p.down_row_bytes;
    items.expert_bytes = (size_t)p.d * p.down_row_bytes;
    items.x = p.middle.data;
    items.x_bytes = p.middle.row_bytes;
    items.slot = warp % 2 == 0 ? 0 : first;
    items.end = warp % 2 == 0 ? min(first, slots.n) : slots.n;
    ds4_expert_stream<D>(items, p.d_expert, ring, room,
                         [&](const struct ds4_one_items &item, auto &acc) { keep(item, acc, 1); });
    __syncthreads();
    if (threadIdx.x < DS4_ONE_PAIRS * DS4_EXPERT_ROWS) {
        const int32_t q = threadIdx.x / DS4_EXPERT_ROWS, r = threadIdx.x % DS4_EXPERT_ROWS;
        const int32_t row = (blockIdx.x * DS4_ONE_PAIRS + q) * DS4_EXPERT_ROWS + r;
        float sum = 0.0f;

        for (int32_t i = 0; i <= slots.n; i++)
            sum += part[q][r][i];
        if (row < p.d && p.batch.entry[p.batch.entry_of[0]].active)
            ds4_mat_set(p.y, 0, row, sum);
    }
}

/* ---- launch ---------------------------------------------------------------------------------------------- */

template <int D> static void ds4_gate_run(struct ds4_device *dev, const struct ds4_experts *p)
{
    constexpr int bytes = DS4_EXPERT_WARPS * ds4_expert_ring<D>::words * 16;
    const int units = p->n_group * (p->d_expert / DS4_EXPERT_SLAB), room = 3 * dev->n_sm;

    if (p->id == NULL) {
        ds4_rows_gate_run<D>(dev, p);
        return;
    }
    DS4_CUDA(cudaFuncSetAttribute(ds4_gate_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  bytes));
    DS4_CHAIN(ds4_gate_kernel<D>, units < room ? units : room, 32 * DS4_EXPERT_WARPS, bytes, dev,
              *p);
}

template <int D> static void ds4_down_run(struct ds4_device *dev, const struct ds4_experts *p)
{
    constexpr int S = DS4_DTYPE_Q8_0;
    constexpr int words = ds4_expert_ring<D>::words > ds4_expert_ring<S>::words
                              ? ds4_expert_ring<D>::words
                              : ds4_expert_ring<S>::words;
    constexpr int bytes = DS4_EXPERT_WARPS * words * 16;
    const auto kernel = ds4_down_one_kernel<D, S>;

    if (p->id == NULL) {
        ds4_rows_down_run<D>(dev, p);
        return;
    }
    DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    DS4_CHAIN(kernel, ds4_div_up(p->d, DS4_ONE_PAIRS * DS4_EXPERT_ROWS), 32 * DS4_EXPERT_WARPS,
              bytes, dev, *p);
}

#endif

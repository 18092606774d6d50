/* Experts of a prompt's chunk on tensor cores: bf16 operands, f32 sums (mma.sync m16n8k16).
 *
 * A block of eight warps makes 256 weight rows of one expert times its inputs, 64 at a time: every stored weight
 * is decoded once for all of them.  A warp owns 32 rows and decodes them straight into the mma's A registers,
 * so weights pass shared memory as stored and never as bf16.  That fits because the order of K is free as
 * long as both operands agree: of 128 values lane t of a quad takes the whole unit t (32 values) of its
 * row, eight values in each of four slices, and the inputs' planes hold for each slice the eight values of
 * the four units side by side, 16 bytes a lane.
 *   GATED: 128 rows of gate and the same of up; the middle leaves in bf16, packed for the down product
 *   else:  256 rows of one matrix; f32 leaves
 * Stored chunks and inputs arrive by cp.async one step of 128 values ahead.
 * Bound: the decoders' integer instructions (a third of the time; without them the products bind). */
#ifndef DS4_KERNELS_CUDA_SLAB_CUH
#define DS4_KERNELS_CUDA_SLAB_CUH

#include "kernels/cuda/async.cuh"
#include "kernels/cuda/experts_args.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/unit.cuh"

#define DS4_SLAB_THREADS 256
#define DS4_SLAB_N       64  /* inputs at once */
#define DS4_SLAB_K       128 /* values a step: four units, a quad's */
#define DS4_SLAB_ROWS    256 /* stored rows of a block */
#define DS4_SLAB_PLANE                                                                             \
    (DS4_SLAB_N * 64 + 32) /* bytes of a slice; the odd 32 spread the copies' banks */
#define DS4_SLAB_X     (4 * DS4_SLAB_PLANE) /* one of two stages of inputs */
#define DS4_SLAB_PITCH (128 + 8)            /* bf16 values between staged middle rows */

/* Stored bytes of a row on their way: a chunk of 256 values, of the formats with small blocks 128. */
template <int D> struct ds4_slab_raw {
    static constexpr int values = ds4_block_elems(D) > 32 ? 256 : DS4_SLAB_K;
    static constexpr int steps = values / DS4_SLAB_K;
    static constexpr int bytes = values / ds4_block_elems(D) * ds4_block_bytes(D);
    static constexpr int lead = ds4_block_bytes(D) % 4 == 0   ? 12
                                : ds4_block_bytes(D) % 2 == 0 ? 14
                                                              : 15;
    static constexpr int pieces = (lead + bytes + 15) / 16;
    /* An odd number of 16 bytes spreads rows over the banks. */
    static constexpr int room =
        pieces / 2 * 32 + 16 < pieces * 16 ? pieces / 2 * 32 + 48 : pieces / 2 * 32 + 16;
    static constexpr int stage = DS4_SLAB_ROWS * room + 16; /* a word behind the last may be read */
};

/* ---- decoders: a lane's unit, eight values at a time ---------------------------------------------------- */

template <int D> struct ds4_slab_room {
};

/* IQ2_XXS selectors by code and by sign bits; copies lie side by side, so that lanes meet in a bank less. */
#define DS4_SLAB_CODE_COPIES 16
#define DS4_SLAB_SIGN_COPIES 8
template <> struct ds4_slab_room<DS4_DTYPE_IQ2_XXS> {
    uint32_t select[DS4_IQ2_CODES * DS4_SLAB_CODE_COPIES];
    uint32_t sign[DS4_IQ2_SIGNS * DS4_SLAB_SIGN_COPIES];
};

template <int D> static __device__ __forceinline__ void ds4_slab_fill(struct ds4_slab_room<D> *room)
{
    if constexpr (D == DS4_DTYPE_IQ2_XXS) {
        for (int i = threadIdx.x; i < DS4_IQ2_CODES * DS4_SLAB_CODE_COPIES; i += DS4_SLAB_THREADS)
            room->select[i] = __ldg(ds4_dev_iq2_nibbles.select + i / DS4_SLAB_CODE_COPIES);
        for (int i = threadIdx.x; i < DS4_IQ2_SIGNS * DS4_SLAB_SIGN_COPIES; i += DS4_SLAB_THREADS)
            room->sign[i] = __ldg(ds4_dev_iq2_nibbles.sign + i / DS4_SLAB_SIGN_COPIES);
    }
}

/* One unit as a lane keeps it: what its four slices share.  The bits are those of ds4_unit_pairs. */
template <int D> struct ds4_slab_unit {
    static constexpr int halves = ds4_has_halves(D) ? 2 : 1;
    struct ds4_shared_span span;
    uint32_t u;
    float s[halves], m[halves];

    /* Of unit u of the chunk that `at` has; a unit that is not there is zeros. */
    __device__ __forceinline__ void take(const struct ds4_shared_span &at, uint32_t unit,
                                         bool there)
    {
        span = at;
        u = unit;
#pragma unroll
        for (int h = 0; h < halves; h++) {
            s[h] = m[h] = 0.0f;
            if (there)
                ds4_unit_scale<D>(span, u, h, &s[h], &m[h]);
        }
    }

    /* Values 8 slice .. 8 slice + 7. */
    __device__ __forceinline__ void pairs(const struct ds4_slab_room<D> *room, int slice,
                                          uint32_t (&pair)[4]) const
    {
        const int h = slice / 2 * (halves - 1);

        (void)room;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t q = ds4_unit_word<D>(span, u, 2 * slice + i) ^ 0x80808080u;
            float v[4];

#pragma unroll
            for (int k = 0; k < 4; k++) {
                v[k] = __fmul_rn(s[h], ds4_byte_f32(q, k));
                if (ds4_has_min(D))
                    v[k] = __fsub_rn(v[k], m[h]);
            }
            pair[2 * i] = ds4_bf16_pair(v[0], v[1]);
            pair[2 * i + 1] = ds4_bf16_pair(v[2], v[3]);
        }
    }
};

template <> struct ds4_slab_unit<DS4_DTYPE_IQ2_XXS> {
    uint32_t index, sign;
    uint2 level;

    __device__ __forceinline__ void take(const struct ds4_shared_span &at, uint32_t unit,
                                         bool there)
    {
        float s, m;

        index = at.u32(2 + 8 * unit);
        sign = at.u32(6 + 8 * unit);
        ds4_unit_scale<DS4_DTYPE_IQ2_XXS>(at, unit, 0, &s, &m);
        if (!there)
            s = 0.0f;
        level = ds4_levels(__fmul_rn(s, 8.0f), __fmul_rn(s, 25.0f), __fmul_rn(s, 43.0f), 0.0f);
    }

    __device__ __forceinline__ void pairs(const struct ds4_slab_room<DS4_DTYPE_IQ2_XXS> *room,
                                          int slice, uint32_t (&pair)[4]) const
    {
        constexpr uint32_t code_words = DS4_SLAB_CODE_COPIES, sign_words = DS4_SLAB_SIGN_COPIES;
        const uint32_t lane = threadIdx.x % 32;
        const uint32_t select =
            room->select[(index >> 8 * slice & 255) * code_words + lane * code_words / 32] |
            room->sign[(sign >> 7 * slice & 127) * sign_words + lane * sign_words / 32];
        const uint32_t minus = level.y ^ 0x80808080u;

#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t low = __byte_perm(level.x, level.x, select >> 16 * i);
            const uint32_t high = __byte_perm(level.y, minus, select >> 16 * i);

            pair[2 * i] = __byte_perm(low, high, 0x5140);
            pair[2 * i + 1] = __byte_perm(low, high, 0x7362);
        }
    }
};

template <> struct ds4_slab_unit<DS4_DTYPE_Q2_K> {
    const uint32_t *word;
    uint32_t shift, level_shift;
    uint2 level[2];

    __device__ __forceinline__ void take(const struct ds4_shared_span &at, uint32_t unit,
                                         bool there)
    {
        const uint32_t from = at.at + 16 + 32 * (unit / 4);

        word = at.word + (from >> 2);
        shift = (from & 3) * 8;
        level_shift = 2 * (unit % 4);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float s, m;

            ds4_unit_scale<DS4_DTYPE_Q2_K>(at, unit, h, &s, &m);
            if (!there)
                s = m = 0.0f;
            level[h] =
                ds4_levels(__fsub_rn(__fmul_rn(s, 0.0f), m), __fsub_rn(s, m),
                           __fsub_rn(__fmul_rn(s, 2.0f), m), __fsub_rn(__fmul_rn(s, 3.0f), m));
        }
    }

    __device__ __forceinline__ void pairs(const struct ds4_slab_room<DS4_DTYPE_Q2_K> *room,
                                          int slice, uint32_t (&pair)[4]) const
    {
        const uint32_t *const w = word + 2 * slice;
        const uint32_t raw[3] = {w[0], w[1], w[2]};
        const uint2 v = level[slice / 2];

        (void)room;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t four = __funnelshift_r(raw[i], raw[i + 1], shift);
            /* Value v as nibbles v and v + 4: its low and its high byte. */
            const uint32_t select = (four >> level_shift & 0x03030303u) * 0x11u + 0x40404040u;

            pair[2 * i] = __byte_perm(v.x, v.y, select);
            pair[2 * i + 1] = __byte_perm(v.x, v.y, select >> 16);
        }
    }
};

/* ---- copies ----------------------------------------------------------------------------------------------- */

/* What a block works on. */
struct ds4_slab_work {
    const uint8_t *w[2]; /* matrices of the expert; not GATED: the first */
    int32_t row0;
    int32_t slot0;
    int32_t n; /* inputs of this pass, 1..64 */
};

/* Where stored row r of the block begins. */
template <bool GATED>
static __device__ __forceinline__ const uint8_t *ds4_slab_row(const struct ds4_product &p,
                                                              const struct ds4_slab_work &k, int r)
{
    const int32_t row = min(k.row0 + (GATED ? r % 128 : r), p.n_row - 1);

    return k.w[GATED ? r / 128 : 0] + (size_t)row * p.row_bytes;
}

/* Starts the copy of the block's rows' chunk. */
template <int D, bool GATED>
static __device__ __forceinline__ void ds4_slab_fetch_raw(const struct ds4_product &p,
                                                          const struct ds4_slab_work &k,
                                                          int32_t chunk, uint8_t *stage)
{
    using raw = ds4_slab_raw<D>;
    const int32_t skip = chunk * raw::bytes;
    const int32_t end = p.n_col / ds4_block_elems(D) * ds4_block_bytes(D);
    const int32_t bytes = min(end - skip, raw::bytes);

    for (int i = threadIdx.x; i < DS4_SLAB_ROWS * raw::pieces; i += DS4_SLAB_THREADS) {
        const int r = i / raw::pieces, at = i % raw::pieces * 16;
        const uint8_t *from = ds4_slab_row<GATED>(p, k, r) + skip;
        const int lead = (int)((uintptr_t)from & 15), total = lead + bytes;

        if (at < total)
            ds4_async_copy(stage + r * raw::room + at, from - lead + at, min(16, total - at));
    }
}

/* Starts the copy of values k0 .. of the inputs into their planes: value 32 t + 8 s + i of a row is value i
 * of lane t in plane s.  Values behind a row's end become zero; rows that are not there stay what they
 * were, for they are columns of the product that nobody writes. */
static __device__ __forceinline__ void ds4_slab_fetch(const struct ds4_product &p, int32_t n,
                                                      int32_t k0, const uint8_t *const *row,
                                                      uint8_t *x)
{
    const int c = threadIdx.x % 16, n0 = threadIdx.x / 16;
    const bool there = k0 + 8 * c < p.x.part;

#pragma unroll
    for (int i = 0; i < DS4_SLAB_N / 16; i++) {
        const int m = n0 + 16 * i;

        if (m < n)
            ds4_async_copy(x + c % 4 * DS4_SLAB_PLANE + m * 64 + c / 4 * 16,
                           row[m] + (there ? 2 * (k0 + 8 * c) : 0), there ? 16 : 0);
    }
}

/* ---- one pass --------------------------------------------------------------------------------------------- */

/* acc += the staged step: tile i, inputs 8j.  NT: eights of inputs. */
template <int D, int NT>
static __device__ __forceinline__ void ds4_slab_multiply(const struct ds4_slab_unit<D> (&unit)[4],
                                                         const struct ds4_slab_room<D> *room,
                                                         const uint8_t *x, float (&acc)[2][NT][4])
{
    const int lane = threadIdx.x % 32;

#pragma unroll
    for (int s = 0; s < 4; s++) {
        const uint4 *const plane = (const uint4 *)(x + s * DS4_SLAB_PLANE) + lane;
        uint32_t a[4][4];

#pragma unroll
        for (int r = 0; r < 4; r++)
            unit[r].pairs(room, s, a[r]);
#pragma unroll
        for (int j = 0; j < NT; j += 2) {
            uint4 b[2];

            b[0] = plane[32 * j];
            if (j + 1 < NT)
                b[1] = plane[32 * (j + 1)];
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int tile = i % 2, jj = j + i / 2;
                    const uint32_t quad[4] = {a[2 * tile][2 * half], a[2 * tile + 1][2 * half],
                                              a[2 * tile][2 * half + 1],
                                              a[2 * tile + 1][2 * half + 1]};

                    if (jj < NT)
                        ds4_mma(acc[tile][jj < NT ? jj : 0], quad,
                                half == 0 ? b[i / 2].x : b[i / 2].z,
                                half == 0 ? b[i / 2].y : b[i / 2].w);
                }
            }
        }
    }
}

/* f32 rows; a quad of lanes with one column each writes 32 bytes a row. */
template <int NT>
static __device__ __forceinline__ void ds4_slab_write(const struct ds4_product &p, float *y,
                                                      const struct ds4_slab_work &k,
                                                      const float (&acc)[2][NT][4])
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < NT; j++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int32_t row = k.row0 + 32 * warp + 16 * i + lane / 4 + c / 2 * 8;
                const int n = 8 * j + lane % 4 * 2 + c % 2;

                if (row < p.n_row && n < k.n)
                    y[(k.slot0 + n) * p.y_stride + row] = acc[i][j][c];
            }
        }
    }
}

/* Middle rows in bf16 through `stage`, zeros behind the last value. */
template <int NT>
static __device__ __forceinline__ void
ds4_slab_write_middle(const struct ds4_slab &a, const struct ds4_slab_work &k,
                      const float (&acc)[2][NT][4], __nv_bfloat16 *stage)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

#pragma unroll
    for (int j = 0; j < NT; j++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int row = 16 * warp + lane / 4 + c / 2 * 8, n = 8 * j + lane % 4 * 2 + c % 2;
            const float weight = a.weight[k.slot0 + (n < k.n ? n : 0)];
            const float v = ds4_middle_value(acc[0][j][c], acc[1][j][c], a.clamp, weight);

            stage[n * DS4_SLAB_PITCH + row] =
                __float2bfloat16_rn(k.row0 + row < a.p.n_row ? v : 0.0f);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < k.n * 16; i += DS4_SLAB_THREADS) {
        const int n = i / 16, c = i % 16 * 8;

        if (k.row0 + c < a.middle.part)
            *(uint4 *)(a.middle.data + (k.slot0 + n) * a.middle.row_bytes + 2 * (k.row0 + c)) =
                *(const uint4 *)(stage + n * DS4_SLAB_PITCH + c);
    }
}

/* All of K for k.n inputs, at most 8 NT. */
template <int D, bool GATED, int NT>
static __device__ __forceinline__ void
ds4_slab_run(const struct ds4_slab &a, float *y, const struct ds4_slab_work &k,
             const struct ds4_slab_room<D> *room, const uint8_t *const *row, uint8_t *space)
{
    using raw = ds4_slab_raw<D>;
    const struct ds4_product &p = a.p;
    uint8_t *const x = space, *const stored = space + 2 * DS4_SLAB_X;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int r0 = (GATED ? 16 : 32) * warp + lane / 4;
    const int32_t n_step = (p.n_col + DS4_SLAB_K - 1) / DS4_SLAB_K;
    float acc[2][NT][4] = {};
    uint32_t lead = 0; /* a byte a row of this lane: where it begins within 16 bytes */

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int r = r0 + (GATED ? i / 2 * 128 : i / 2 * 16) + i % 2 * 8;

        lead |= ((uint32_t)(uintptr_t)ds4_slab_row<GATED>(p, k, r) & 15) << 8 * i;
    }
    ds4_slab_fetch_raw<D, GATED>(p, k, 0, stored);
    ds4_slab_fetch(p, k.n, 0, row, x);
    ds4_async_commit();
    for (int32_t step = 0; step < n_step; step++) {
        const int32_t chunk = step / raw::steps;
        const uint32_t u = step % raw::steps * 4 + lane % 4;
        const bool there = step * DS4_SLAB_K + lane % 4 * DS4_UNIT < p.n_col;
        struct ds4_slab_unit<D> unit[4];

        ds4_async_wait<0>();
        __syncthreads(); /* everyone's copies are there, and what the next ones overwrite is free */
        if (step + 1 < n_step) {
            if (step % raw::steps == 0 && (chunk + 1) * raw::values < p.n_col)
                ds4_slab_fetch_raw<D, GATED>(p, k, chunk + 1,
                                             stored + (chunk + 1) % 2 * raw::stage);
            ds4_slab_fetch(p, k.n, (step + 1) * DS4_SLAB_K, row, x + (step + 1) % 2 * DS4_SLAB_X);
            ds4_async_commit();
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = r0 + (GATED ? i / 2 * 128 : i / 2 * 16) + i % 2 * 8;
            const uint32_t at = ((lead >> 8 * i) + (uint32_t)(chunk * raw::bytes)) & 15;

            unit[i].take(
                {(const uint32_t *)(stored + chunk % 2 * raw::stage + r * raw::room), at, NULL}, u,
                there);
        }
        ds4_slab_multiply<D, NT>(unit, room, x + step % 2 * DS4_SLAB_X, acc);
    }
    __syncthreads(); /* the stages are free: for the middle, or the next pass */
    if constexpr (GATED) {
        ds4_slab_write_middle<NT>(a, k, acc, (__nv_bfloat16 *)x);
        __syncthreads();
    } else {
        ds4_slab_write<NT>(p, y, k, acc);
    }
}

/* Block (x: rows, y: group, z: matrix, 0 if GATED). */
template <int D, bool GATED>
static __global__ void __launch_bounds__(DS4_SLAB_THREADS, 2)
    ds4_slab_kernel(const __grid_constant__ struct ds4_slab a)
{
    ds4_take_turn();
    extern __shared__ uint4 ds4_slab_space[];
    __shared__ const uint8_t *row[DS4_SLAB_N];
    const struct ds4_product &p = a.p;
    const struct ds4_dev_group group = p.group[blockIdx.y];
    const size_t skip = (size_t)group.expert * p.part_bytes;
    uint8_t *const space = (uint8_t *)ds4_slab_space;
    struct ds4_slab_room<D> *const room =
        (struct ds4_slab_room<D> *)(space + 2 * DS4_SLAB_X + 2 * ds4_slab_raw<D>::stage);
    struct ds4_slab_work k = {{p.w[GATED ? 0 : blockIdx.z] + skip, GATED ? p.w[1] + skip : NULL},
                              (int32_t)blockIdx.x * (GATED ? 128 : 256),
                              0,
                              0};

    if (group.n == 0)
        return;
    ds4_slab_fill<D>(room); /* barriers come before the first use */
    for (int32_t i = 0; i < group.n; i += DS4_SLAB_N) {
        k.slot0 = group.first + i;
        k.n = min(DS4_SLAB_N, group.n - i);
        if (threadIdx.x < DS4_SLAB_N) {
            const int32_t slot = k.slot0 + min((int32_t)threadIdx.x, k.n - 1);

            row[threadIdx.x] = p.x.data + (p.src != NULL ? p.src[slot] : slot) * p.x.row_bytes;
        }
        __syncthreads();
        if (k.n <= 32)
            ds4_slab_run<D, GATED, 4>(a, p.y[blockIdx.z], k, room, row, space);
        else if (k.n <= 48)
            ds4_slab_run<D, GATED, 6>(a, p.y[blockIdx.z], k, room, row, space);
        else if (k.n <= 56)
            ds4_slab_run<D, GATED, 7>(a, p.y[blockIdx.z], k, room, row, space);
        else
            ds4_slab_run<D, GATED, 8>(a, p.y[blockIdx.z], k, room, row, space);
    }
}

template <int D, bool GATED>
static void ds4_slab_launch(struct ds4_device *dev, const struct ds4_slab *a)
{
    constexpr int room = D == DS4_DTYPE_IQ2_XXS ? (int)sizeof(struct ds4_slab_room<D>) : 0;
    constexpr int bytes = 2 * DS4_SLAB_X + 2 * ds4_slab_raw<D>::stage + room;
    const struct ds4_product &p = a->p;

    DS4_CUDA(cudaFuncSetAttribute(ds4_slab_kernel<D, GATED>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    DS4_CHAIN((ds4_slab_kernel<D, GATED>),
              dim3(ds4_div_up(p.n_row, GATED ? 128 : 256), p.n_part, GATED ? 1 : p.n_w),
              DS4_SLAB_THREADS, bytes, dev, *a);
}

template <int D> static void ds4_slab_dispatch(struct ds4_device *dev, const struct ds4_slab *a)
{
    if (a->middle.data != NULL)
        ds4_slab_launch<D, true>(dev, a);
    else
        ds4_slab_launch<D, false>(dev, a);
}

#endif

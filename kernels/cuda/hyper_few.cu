/* Hyper-connections of few rows on cards with clusters (sm_90): write, mixes, Sinkhorn, read and norm of a row
 * in one kernel instead of two.
 *
 * Eight blocks share a row, each with an eighth of the columns of all four streams, which stay in registers
 * from the write to the read.  The mixing matrix is on its way to shared memory before the state is there.
 * Blocks exchange the 25 partial sums, then their squares of u, through each other's shared memory; every
 * block adds them up in the same order, so all get the same bits.  One warp more in block 0 makes post and
 * comb, which nobody waits for until the next write. */
#include "kernels/cuda/act.cuh"
#include "kernels/cuda/hyper_few.cuh"
#include "kernels/cuda/unit.cuh"

#define BLOCKS   8   /* of a cluster */
#define WARPS    8   /* that own columns, two a lane */
#define THREADS  256 /* of these; one warp more */
#define N_MIX    24  /* 4 pre, 4 post, 16 comb */
#define MIXES    3   /* of a warp */
#define MAX_ROWS 16

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
static __device__ __forceinline__ void arrive(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

static __device__ __forceinline__ void await(void)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* *p in the shared memory of block `rank` of the cluster. */
static __device__ __forceinline__ void put(const float *p, int rank, float v)
{
    uint32_t at = (uint32_t)__cvta_generic_to_shared(p);

    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}

template <int D> static __device__ __forceinline__ float2 pair_of(uint32_t v)
{
    if constexpr (D == DS4_DTYPE_BF16)
        return make_float2(ds4_bits_f32(v << 16), ds4_bits_f32(v & 0xffff0000u));
    else
        return make_float2(ds4_f16_of(v & 0xffff), ds4_f16_of(v >> 16));
}

/* Two neighbouring values of the streams, B: bf16. */
template <bool B> static __device__ __forceinline__ float2 load_pair(const void *row, int64_t i)
{
    if constexpr (B)
        return pair_of<DS4_DTYPE_BF16>(*(const uint32_t *)((const __nv_bfloat16 *)row + i));
    else
        return *(const float2 *)((const float *)row + i);
}

/* Stores them, rounded if need be, and returns what was stored. */
template <bool B>
static __device__ __forceinline__ float2 store_pair(void *row, int64_t i, float2 v)
{
    if constexpr (B) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(v.x, v.y);
        const uint32_t bits = *(const uint32_t *)&both;

        *(uint32_t *)((__nv_bfloat16 *)row + i) = bits;
        return pair_of<DS4_DTYPE_BF16>(bits);
    } else {
        *(float2 *)((float *)row + i) = v;
        return v;
    }
}

/* The columns of this thread, after the write: x[j] are columns c and c + 1 of stream j. */
template <bool B>
static __device__ __forceinline__ void take_columns(const struct ds4_hyper_few &p, int64_t t,
                                                    int32_t c, float2 (&x)[4])
{
    uint8_t *const row = (uint8_t *)p.x.data + t * p.x.stride * (B ? 2 : 4);
    float2 old[4], out;

#pragma unroll
    for (int j = 0; j < 4; j++)
        x[j] = old[j] = load_pair<B>(row, (int64_t)j * p.d + c);
    if (p.o.data == NULL)
        return;
    out = *(const float2 *)((const float *)p.o.data + t * p.o.stride + c);
    const float4 post = *(const float4 *)(p.post + 4 * t);
    const float4 *const comb = (const float4 *)(p.comb + 16 * t); /* [j] has k = 0 .. 3 */

#pragma unroll
    for (int k = 0; k < 4; k++) /* as write_value of hyper.cu */
        x[k] = make_float2(__fmul_rn((&post.x)[k], out.x), __fmul_rn((&post.x)[k], out.y));
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float4 mix = comb[j];

#pragma unroll
        for (int k = 0; k < 4; k++) {
            x[k].x = __fadd_rn(x[k].x, __fmul_rn((&mix.x)[k], old[j].x));
            x[k].y = __fadd_rn(x[k].y, __fmul_rn((&mix.x)[k], old[j].y));
        }
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
        x[k] = store_pair<B>(row, (int64_t)k * p.d + c, x[k]);
}

/* Starts the copy of fn's columns c0 .. c0 + width - 1 of every stream and mix; the whole block. */
static __device__ __forceinline__ void fetch_mixes(const struct ds4_hyper_few &p, int32_t c0,
                                                   int32_t width, uint4 *room)
{
#pragma unroll 1
    for (int32_t line = threadIdx.x / 32; line < 4 * N_MIX; line += WARPS + 1) {
        const uint8_t *const from =
            p.fn + line / 4 * p.row_bytes + 2 * ((size_t)(line % 4) * p.d + c0);

        for (int32_t i = threadIdx.x % 32; i < width / 8; i += 32)
            ds4_async_copy(room + line * (width / 8) + i, from + 16 * i, 16);
    }
    ds4_async_commit();
}

/* This warp's three mixes over the block's columns x[j][pair]: lane 0 has the sums. */
template <int D>
static __device__ __forceinline__ void warp_mixes(const uint32_t *fn, const float2 *x, int32_t n,
                                                  float (&sum)[MIXES])
{
    const int lane = threadIdx.x % 32;

#pragma unroll
    for (int m = 0; m < MIXES; m++)
        sum[m] = 0.0f;
#pragma unroll 4
    for (int32_t i = lane; i < n; i += 32) {
        const float2 v = x[i];

#pragma unroll
        for (int m = 0; m < MIXES; m++) {
            const float2 k = pair_of<D>(fn[m * n + i]);

            sum[m] += v.x * k.x;
            sum[m] += v.y * k.y;
        }
    }
#pragma unroll
    for (int o = 16; o > 0; o /= 2) {
#pragma unroll
        for (int m = 0; m < MIXES; m++)
            sum[m] += __shfl_xor_sync(0xffffffffu, sum[m], o);
    }
}

static __device__ __forceinline__ float warp_sum(float v)
{
#pragma unroll
    for (int o = 16; o > 0; o /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}

/* post and comb of row t, by one warp. */
static __device__ __forceinline__ void write_mixes(const struct ds4_hyper_few &p, int64_t t,
                                                   const float *mix)
{
    const int lane = threadIdx.x % 32;
    float c[16];

    if (lane < 4)
        p.post[4 * t + lane] = 2.0f * ds4_sigmoid(mix[4 + lane]);
#pragma unroll
    for (int j = 0; j < 16; j++)
        c[j] = mix[8 + j];
    ds4_sinkhorn4(c, p.iters, p.hyper_eps);
#pragma unroll
    for (int j = 0; j < 16; j++)
        if (lane == j)
            p.comb[16 * t + j] = c[j];
}

/* u * factor * norm of two columns, stored and packed: the warp has two units. */
static __device__ __forceinline__ void write_u(const struct ds4_hyper_few &p, int64_t t, int32_t c0,
                                               float2 out)
{
    const int lane = threadIdx.x % 32;

#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        const int from = 16 * half + lane / 2;
        const float even = __shfl_sync(0xffffffffu, out.x, from);
        const float odd = __shfl_sync(0xffffffffu, out.y, from);
        const float v = lane % 2 == 0 ? even : odd;
        const int32_t c = c0 + 32 * half + lane;

        ((float *)p.u.data)[t * p.u.stride + c] = v;
        if (p.packed != NULL)
            ds4_pack_unit(v, c / DS4_UNIT_VALUES, p.d / DS4_UNIT_VALUES,
                          p.packed + t * ds4_packed_row_bytes(p.d / DS4_UNIT_VALUES));
    }
}
#endif

/* Cluster of eight blocks (x) a row (y).  Warp w has 64 columns and mixes 3w to 3w + 2; one warp more the
 * squares, then post and comb.  Loops stay short: what runs once waits for its instructions. */
template <int D, bool B>
static __global__ void __launch_bounds__(THREADS + 32)
    few_kernel(const __grid_constant__ struct ds4_hyper_few p)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ uint4 few_room[];
    __shared__ float2 held[4 * THREADS];
    __shared__ float all[BLOCKS][32]; /* written by all blocks of the cluster */
    __shared__ float squares[BLOCKS * WARPS];
    __shared__ float mix[N_MIX];
    const int32_t rank = blockIdx.x, width = p.d / BLOCKS, n_pair = width / 2, n = 4 * n_pair;
    const int me = threadIdx.x, warp = me / 32, lane = me % 32;
    const bool mine = me < n_pair; /* whole warps */
    const int32_t c = rank * width + 2 * me;
    const int64_t t = blockIdx.y;
    float2 x[4] = {}, norm = make_float2(1.0f, 1.0f), u = make_float2(0.0f, 0.0f);
    float base = 0.0f, scale = 0.0f, sum = 0.0f, square = 0.0f;

    ds4_release_next();
    arrive(); /* the cluster is there before its memory is written */
    fetch_mixes(p, rank * width, width, few_room);
    if (mine && p.norm != NULL)
        norm = make_float2(__ldg(p.norm + c), __ldg(p.norm + c + 1));
    if (me < N_MIX) {
        base = __ldg(p.base + me);
        scale = __ldg(p.scale + (me < 4 ? 0 : me < 8 ? 1 : 2));
    }
    ds4_wait_previous();
    if (mine) {
        take_columns<B>(p, t, c, x);
#pragma unroll
        for (int j = 0; j < 4; j++)
            held[j * n_pair + me] = x[j];
    }
    ds4_async_wait<0>();
    __syncthreads();
    await();
    if (warp < WARPS) {
        float v[MIXES];

        warp_mixes<D>((const uint32_t *)few_room + MIXES * warp * n, held, n, v);
#pragma unroll
        for (int m = 0; m < MIXES; m++)
            if (lane < BLOCKS)
                put(&all[rank][MIXES * warp + m], lane, v[m]);
    } else {
#pragma unroll 4
        for (int32_t i = lane; i < n; i += 32) {
            const float2 v = held[i];

            square += v.x * v.x;
            square += v.y * v.y;
        }
        square = warp_sum(square);
        if (lane < BLOCKS)
            put(&all[rank][N_MIX], lane, square);
    }
    arrive();
    await();
    if (me < N_MIX) {
        square = 0.0f;
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            sum += all[i][me];
            square += all[i][N_MIX];
        }
        mix[me] = sum * (1.0f / sqrtf(square / (float)(4 * p.d) + p.rms_eps)) * scale + base;
    }
    __syncthreads();
    if (warp == WARPS) {
        arrive();
        if (rank == 0)
            write_mixes(p, t, mix);
        await();
        return;
    }
    sum = ds4_sigmoid(mix[lane % 4]) + p.hyper_eps;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float pre = __shfl_sync(0xffffffffu, sum, j);

        u.x += pre * x[j].x;
        u.y += pre * x[j].y;
    }
    square = warp_sum(u.x * u.x + u.y * u.y);
    if (lane < BLOCKS)
        put(&squares[WARPS * rank + warp], lane, square);
    arrive();
    await();
    square = warp_sum(squares[lane] + squares[32 + lane]);
    if (p.norm != NULL) {
        const float factor = 1.0f / sqrtf(square / (float)p.d + p.rms_eps);

        u = make_float2(norm.x * (u.x * factor), norm.y * (u.y * factor));
    }
    if (mine)
        write_u(p, t, rank * width + 64 * warp, u);
#endif
}

bool ds4_cuda_can_hyper_few(const struct ds4_device *dev, const struct ds4_hyper_few *p)
{
    return dev->overlap && /* made for sm_90 */ p->n_row <= MAX_ROWS &&
           (p->dtype == DS4_DTYPE_F16 || p->dtype == DS4_DTYPE_BF16) && p->post != NULL &&
           p->d % (64 * BLOCKS) == 0 && p->d <= 2 * THREADS * BLOCKS && p->row_bytes % 16 == 0 &&
           p->x.stride % 2 == 0 && !p->u.bf16 && !p->o.bf16 && p->o.stride % 2 == 0 &&
           ((uintptr_t)p->fn | (uintptr_t)p->post | (uintptr_t)p->comb) % 16 == 0 &&
           ((uintptr_t)p->x.data | (uintptr_t)p->o.data) % 8 == 0;
}

void ds4_cuda_hyper_few(struct ds4_device *dev, const struct ds4_hyper_few *p)
{
    const size_t bytes = (size_t)N_MIX * 4 * 2 * (size_t)(p->d / BLOCKS);
    const bool f16 = p->dtype == DS4_DTYPE_F16;
    const auto kernel =
        p->x.bf16 ? f16 ? few_kernel<DS4_DTYPE_F16, true> : few_kernel<DS4_DTYPE_BF16, true>
        : f16 ? few_kernel<DS4_DTYPE_F16, false>
                  : few_kernel<DS4_DTYPE_BF16, false>;

    DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    DS4_CHAIN_CLUSTER(kernel, dim3(BLOCKS, (unsigned)p->n_row), BLOCKS, THREADS + 32, bytes, dev,
                      *p);
}

/* Synthetic weights made on the device, and how wide a step's routing spreads over them.
 *
 * A thread makes one block with the arithmetic of common/synth_body.h, a thread block writes its 128
 * blocks through shared memory so that stores are whole sectors.  Bytes written once, nothing read; bound
 * by integer arithmetic (eight bytes a draw), and used at start-up only. */
#include "kernels/cuda/device.cuh"

#define SYNTH_FN               static __device__ inline
#define SYNTH_HALF(x)          synth_half(x)
#define SYNTH_MUL_ADD(a, b, c) __fadd_rn(__fmul_rn(a, b), c)

/* The bits pass through a register that the compiler cannot look into: it knows of a half's two bytes
 * stored one by one, and stores wrong ones (nvcc 13.0, sm_90). */
static __device__ inline uint16_t synth_half(float x)
{
    uint32_t bits = __half_as_ushort(__float2half_rn(x));

    asm volatile("" : "+r"(bits));
    return (uint16_t)bits;
}

#include "common/synth_body.h"

#define SYNTH_THREADS  128
#define SYNTH_GRID     4096
#define SPREAD_THREADS 256

static __global__ void synth_kernel(struct ds4_synth_recipe recipe, uint64_t n_block, uint8_t *dst)
{
    __shared__ uint8_t tile[SYNTH_THREADS * DS4_SYNTH_MAX_BLOCK_BYTES];
    const uint32_t size = recipe.block_bytes;

    for (uint64_t first = (uint64_t)blockIdx.x * SYNTH_THREADS; first < n_block;
         first += (uint64_t)gridDim.x * SYNTH_THREADS) {
        const uint64_t rest = n_block - first;
        const uint32_t n = rest < SYNTH_THREADS ? (uint32_t)rest : SYNTH_THREADS;

        if (threadIdx.x < n)
            synth_block(&recipe, first + threadIdx.x, tile + threadIdx.x * size);
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < n * size; i += SYNTH_THREADS)
            dst[first * size + i] = tile[i];
        __syncthreads();
    }
}

void ds4_cuda_synth(struct ds4_device *dev, const struct ds4_synth_recipe *recipe, uint64_t n_block,
                    void *dst)
{
    const uint64_t want = (n_block + SYNTH_THREADS - 1) / SYNTH_THREADS;

    if (n_block == 0)
        return;
    DS4_LAUNCH(synth_kernel, (unsigned)(want < SYNTH_GRID ? want : SYNTH_GRID), SYNTH_THREADS, 0,
               dev->stream, *recipe, n_block, (uint8_t *)dst);
}

/* One block: experts mark a word each, then the marks are counted. */
static __global__ void spread_kernel(struct ds4_dev_batch batch, const int32_t *id, int32_t n_used,
                                     int32_t n_expert, unsigned long long *count)
{
    ds4_take_turn();
    __shared__ uint8_t seen[DS4_SPREAD_MAX_EXPERTS];
    int n = 0;

    for (int32_t e = threadIdx.x; e < n_expert; e += SPREAD_THREADS)
        seen[e] = 0;
    __syncthreads();
    for (int32_t i = threadIdx.x; i < batch.n_tok * n_used; i += SPREAD_THREADS) {
        const int32_t e = id[i];

        if (batch.entry[batch.entry_of[i / n_used]].active && e >= 0 && e < n_expert)
            seen[e] = 1;
    }
    __syncthreads();
    for (int32_t e0 = 0; e0 < n_expert; e0 += SPREAD_THREADS) {
        const int32_t e = e0 + (int32_t)threadIdx.x;

        n += __syncthreads_count(e < n_expert && seen[e]);
    }
    if (threadIdx.x == 0) {
        count[0] += 1;
        count[1] += (unsigned long long)n;
    }
}

void ds4_cuda_spread(struct ds4_device *dev, const struct ds4_spread_args *a)
{
    if (dev->batch.n_tok == 0)
        return;
    if (a->n_expert > DS4_SPREAD_MAX_EXPERTS)
        ds4_cuda_fatal(__FILE__, __LINE__, "spread", "more experts than the kernel is sized for");
    DS4_CHAIN(spread_kernel, 1, SPREAD_THREADS, 0, dev, dev->batch, a->id, a->n_used, a->n_expert,
              (unsigned long long *)a->count);
}

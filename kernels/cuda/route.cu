/* Expert choice: strengths sqrt(softplus(logit)), ids by table or by the largest of strength + bias.
 *
 * One block a token, one expert a thread slot; n_used rounds of a block-wide maximum (ties to the lower
 * id, NaN last).  Ids come out distinct, in range and ascending whatever the logits hold. */
#include "kernels/cuda/rows.cuh"

#define ROUTE_THREADS    256
#define ROUTE_MAX_USED   32
#define ROUTE_MAX_EXPERT 1024

__device__ __forceinline__ float softplus(float x)
{
    return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

/* Order of scores as unsigned keys; NaN lowest. */
__device__ __forceinline__ uint32_t key_of(float score)
{
    uint32_t bits = __float_as_uint(score + 0.0f);

    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0;
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

/* The largest of (key, lower id first) over the block; every thread gets it. */
__device__ __forceinline__ uint64_t block_best(uint64_t best, uint64_t *shared)
{
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    for (int o = 16; o > 0; o /= 2)
        best = max(best, __shfl_xor_sync(0xffffffffu, best, o));
    __syncthreads();
    if (lane == 0)
        shared[warp] = best;
    __syncthreads();
    best = lane < ROUTE_THREADS / 32 ? shared[lane] : 0;
    for (int o = 16; o > 0; o /= 2)
        best = max(best, __shfl_xor_sync(0xffffffffu, best, o));
    return best;
}

static __global__ void route_kernel(struct ds4_dev_batch batch, const float *logits, int64_t stride,
                                    int32_t n_expert, const int32_t *table, const float *bias,
                                    int32_t n_used, float scale, int32_t *id, float *weight)
{
    ds4_take_turn();
    __shared__ float strength[ROUTE_MAX_EXPERT];
    __shared__ uint64_t key[ROUTE_MAX_EXPERT];
    __shared__ uint64_t shared[32];
    __shared__ int32_t chosen[ROUTE_MAX_USED];
    const int32_t t = blockIdx.x;

    if (!batch.entry[batch.entry_of[t]].active)
        return;
    for (int32_t e = threadIdx.x; e < n_expert; e += blockDim.x) {
        float s = sqrtf(softplus(logits[t * stride + e]));

        strength[e] = s;
        key[e] = (uint64_t)key_of(bias != NULL ? s + bias[e] : s) << 32 | (uint32_t)~e;
    }
    __syncthreads();
    for (int32_t u = 0; u < n_used; u++) {
        uint64_t best = 0;

        if (table != NULL) {
            if (threadIdx.x == 0)
                chosen[u] = table[(int64_t)batch.token[t] * n_used + u];
            continue;
        }
        for (int32_t e = threadIdx.x; e < n_expert; e += blockDim.x)
            best = max(best, key[e]);
        best = block_best(best, shared);
        if (threadIdx.x == 0) {
            chosen[u] = (int32_t) ~(uint32_t)best;
            key[chosen[u]] = 0; /* taken; a NaN's key still holds its id and ranks above */
        }
        __syncthreads();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0.0f;

        for (int32_t i = 1; i < n_used; i++) {
            int32_t value = chosen[i], j = i;

            for (; j > 0 && chosen[j - 1] > value; j--)
                chosen[j] = chosen[j - 1];
            chosen[j] = value;
        }
        for (int32_t u = 0; u < n_used; u++)
            sum += chosen[u] >= 0 && chosen[u] < n_expert ? strength[chosen[u]] : 0.0f;
        for (int32_t u = 0; u < n_used; u++) {
            float s = chosen[u] >= 0 && chosen[u] < n_expert ? strength[chosen[u]] : 0.0f;

            id[(int64_t)t * n_used + u] = chosen[u];
            weight[(int64_t)t * n_used + u] = s / (sum + 1e-20f) * scale;
        }
    }
}

void ds4_cuda_route(struct ds4_device *dev, const struct ds4_route_args *a)
{
    const int32_t n_expert = a->logits.shape[1];

    if (dev->batch.n_tok == 0)
        return;
    if (n_expert > ROUTE_MAX_EXPERT || a->n_used > ROUTE_MAX_USED)
        ds4_cuda_fatal(__FILE__, __LINE__, "route", "more experts than the kernel is sized for");
    DS4_CHAIN(route_kernel, dev->batch.n_tok, ROUTE_THREADS, 0, dev, dev->batch,
              (const float *)a->logits.data, a->logits.stride[0], n_expert, a->table, a->bias,
              a->n_used, a->scale, a->id, a->weight);
}

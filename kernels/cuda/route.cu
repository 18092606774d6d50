/* Expert choice: strengths sqrt(softplus(logit)), ids by table or by the largest of strength + bias.
 *
 * One block a token makes the keys; its first warp then takes the largest n_used times (ties to the lower
 * id, NaN last), two warp reductions each, without a barrier.  Ids come out distinct, in range and ascending
 * whatever the logits hold. */
#include "kernels/cuda/rows.cuh"

#define ROUTE_THREADS    256
#define ROUTE_MAX_USED   32
#define ROUTE_MAX_EXPERT 1024

__device__ __forceinline__ float softplus(float x)
{
    return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

/* Order of scores as unsigned keys from 1 on; NaN lowest, 0 is what has been taken. */
__device__ __forceinline__ uint32_t key_of(float score)
{
    uint32_t bits = __float_as_uint(score + 0.0f);

    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 1;
    return ((bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u) + 1;
}

/* The lane's largest key among experts lane, lane + 32, ..., the lowest of equals. */
__device__ __forceinline__ void best_of(const uint32_t *key, int32_t n_expert, uint32_t *best,
                                        int32_t *id)
{
    *best = 0;
    *id = INT32_MAX;
#pragma unroll 8
    for (int32_t e = threadIdx.x % 32; e < n_expert; e += 32) {
        const uint32_t k = key[e];

        if (k > *best) {
            *best = k;
            *id = e;
        }
    }
}

/* Expert u of the n_used with the largest keys, in lane u; one warp.  Takes them out of `key`. */
__device__ __forceinline__ int32_t take_best(uint32_t *key, int32_t n_expert, int32_t n_used)
{
    const int32_t lane = threadIdx.x % 32;
    int32_t mine = INT32_MAX, id;
    uint32_t best;

    best_of(key, n_expert, &best, &id);
    for (int32_t u = 0; u < n_used; u++) {
        const uint32_t most = __reduce_max_sync(0xffffffffu, best);
        const uint32_t from =
            __reduce_min_sync(0xffffffffu, best == most ? (uint32_t)id : (uint32_t)INT32_MAX);

        if (lane == u)
            mine = (int32_t)from;
        if ((uint32_t)id == from) {
            key[from] = 0;
            best_of(key, n_expert, &best, &id);
        }
    }
    return mine;
}

static __global__ void route_kernel(struct ds4_dev_batch batch, const float *logits, int64_t stride,
                                    int32_t n_expert, const int32_t *table, const float *bias,
                                    int32_t n_used, float scale, int32_t *id, float *weight)
{
    __shared__ float strength[ROUTE_MAX_EXPERT];
    __shared__ uint32_t key[ROUTE_MAX_EXPERT];
    __shared__ int32_t chosen[ROUTE_MAX_USED];
    const int32_t t = blockIdx.x, lane = threadIdx.x;
    int32_t mine = INT32_MAX, rank = 0;
    float sum = 0.0f;

    ds4_take_turn();
    if (!batch.entry[batch.entry_of[t]].active)
        return;
    for (int32_t e = threadIdx.x; e < n_expert; e += blockDim.x) {
        float s = sqrtf(softplus(logits[t * stride + e]));

        strength[e] = s;
        key[e] = key_of(bias != NULL ? s + bias[e] : s);
    }
    __syncthreads();
    if (lane >= 32)
        return;
    if (table == NULL)
        mine = take_best(key, n_expert, n_used);
    else if (lane < n_used)
        mine = table[(int64_t)batch.token[t] * n_used + lane];
    for (int32_t u = 0; u < n_used; u++) {
        const int32_t other = __shfl_sync(0xffffffffu, mine, u);

        rank += other < mine || (other == mine && u < lane);
    }
    if (lane < n_used)
        chosen[rank] = mine;
    __syncwarp();
    for (int32_t u = 0; u < n_used; u++)
        sum += chosen[u] >= 0 && chosen[u] < n_expert ? strength[chosen[u]] : 0.0f;
    if (lane < n_used) {
        const int32_t e = chosen[lane];

        id[(int64_t)t * n_used + lane] = e;
        weight[(int64_t)t * n_used + lane] =
            (e >= 0 && e < n_expert ? strength[e] : 0.0f) / (sum + 1e-20f) * scale;
    }
}

void ds4_cuda_route(struct ds4_device *dev, const struct ds4_route_args *a)
{
    const int32_t n_expert = a->logits.shape[1];

    if (dev->batch.n_tok == 0)
        return;
    if (n_expert > ROUTE_MAX_EXPERT || a->n_used > ROUTE_MAX_USED || a->n_used > n_expert)
        ds4_cuda_fatal(__FILE__, __LINE__, "route", "more experts than the kernel is sized for");
    DS4_CHAIN(route_kernel, dev->batch.n_tok, ROUTE_THREADS, 0, dev, dev->batch,
              (const float *)a->logits.data, a->logits.stride[0], n_expert, a->table, a->bias,
              a->n_used, a->scale, a->id, a->weight);
}

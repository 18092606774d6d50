/* A layer's two latent rows after their products, in one launch: the query's rank is normed (and packed for the
 * products that follow), the cache row is normed, rotated and rounded.
 *
 * One block a row of either kind.  Bytes: a few KiB a token; in decode all latency, which is why the five steps
 * are one kernel with its weights on their way before its turn. */
#include "kernels/cuda/act.cuh"
#include "kernels/cuda/rows.cuh"

#define THREADS 256
#define EACH    8 /* values a thread keeps in registers */

/* By value. */
struct latent {
    struct ds4_dev_batch batch;
    float *q, *kv;
    int64_t q_stride, kv_stride;
    const float *q_norm, *kv_norm;
    int32_t d_q, d_kv;
    float eps;
    const float *freq;
    int32_t d_rope;
    enum ds4_row_format format;
    uint8_t *packed; /* of q; NULL: not */
};

/* row = w * x * rsqrt(mean(x^2) + eps); a thread's values are those at threadIdx.x + k * THREADS. */
static __device__ __forceinline__ void norm_row(const float *x, const float *w, int32_t d,
                                                float eps, float *shared, float *row)
{
    float g[EACH], square = 0.0f, factor;

#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int32_t i = threadIdx.x + k * THREADS;

        g[k] = i < d ? __ldg(w + i) : 0.0f; /* a weight */
    }
    ds4_wait_previous();
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < d; i += THREADS) {
        const float v = x[i];

        row[i] = v;
        square += v * v;
    }
    square = ds4_block_sum(square, shared);
    factor = 1.0f / sqrtf(square / (float)d + eps);
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int32_t i = threadIdx.x + k * THREADS;

        if (i < d)
            row[i] = g[k] * (row[i] * factor);
    }
}

/* Block (x: 0 query, 1 cache row; y: token).  Loops stay short: what runs once waits for its instructions. */
static __global__ void __launch_bounds__(THREADS)
    latent_kernel(const __grid_constant__ struct latent a)
{
    __shared__ float row[EACH * THREADS];
    __shared__ float shared[32];
    const int32_t t = blockIdx.y, n_unit = a.d_q / DS4_UNIT_VALUES;
    float *const q = a.q + t * a.q_stride, *const kv = a.kv + t * a.kv_stride;

    ds4_release_next();
    if (blockIdx.x == 0) {
        norm_row(q, a.q_norm, a.d_q, a.eps, shared, row);
#pragma unroll 1
        for (int32_t i = threadIdx.x; i < a.d_q; i += THREADS) {
            q[i] = row[i];
            if (a.packed != NULL) /* whole warps: d_q is a multiple of 32 */
                ds4_pack_unit(row[i], i / DS4_UNIT_VALUES, n_unit,
                              a.packed + t * ds4_packed_row_bytes(n_unit));
        }
        return;
    }
    norm_row(kv, a.kv_norm, a.d_kv, a.eps, shared, row);
    __syncthreads();
    if (a.batch.entry[a.batch.entry_of[t]].active)
#pragma unroll 1
        for (int32_t i = threadIdx.x; i < a.d_rope / 2; i += THREADS)
            ds4_dev_rotate(row + a.d_kv - a.d_rope + 2 * i, a.freq[i], a.batch.pos[t], false);
    ds4_dev_round_row(a.format, a.d_kv, a.d_rope, row);
    for (int32_t i = threadIdx.x; i < a.d_kv; i += THREADS)
        kv[i] = row[i];
}

/* Wider rows than the kernel keeps: one operation after the other. */
static void one_by_one(struct ds4_device *dev, const struct ds4_latent_args *a)
{
    const struct ds4_rmsnorm_args q = {a->q, a->q_norm, a->eps, a->q};
    const struct ds4_rmsnorm_args kv = {a->kv, a->kv_norm, a->eps, a->kv};
    const struct ds4_rope_args rotate = {a->batch, a->kv, a->rope, false, false, a->eps};
    const struct ds4_round_args round = {a->kv, a->format, a->rope.d_rope};

    ds4_cuda_rmsnorm(dev, &q);
    ds4_cuda_rmsnorm(dev, &kv);
    ds4_cuda_rope(dev, &rotate);
    ds4_cuda_round(dev, &round);
}

void ds4_cuda_latent(struct ds4_device *dev, const struct ds4_latent_args *a)
{
    const int32_t n = dev->batch.n_tok, d_q = a->q.shape[1], d_kv = a->kv.shape[1];
    struct latent args = {dev->batch,
                          (float *)a->q.data,
                          (float *)a->kv.data,
                          a->q.stride[0],
                          a->kv.stride[0],
                          a->q_norm,
                          a->kv_norm,
                          d_q,
                          d_kv,
                          a->eps,
                          a->rope.freq,
                          a->rope.d_rope,
                          a->format,
                          NULL};

    if (n == 0)
        return;
    if (d_q > EACH * THREADS || d_kv > EACH * THREADS) {
        one_by_one(dev, a);
        return;
    }
    ds4_dev_spoil(dev, &a->q);
    ds4_dev_spoil(dev, &a->kv);
    args.packed = ds4_dev_keep(dev, DS4_DEV_KEEP_RANK, &a->q);
    DS4_CHAIN(latent_kernel, dim3(2, n), THREADS, 0, dev, args);
}

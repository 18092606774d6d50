/* Hyper-connections of a prompt's chunk: what hyper.cu hands to the kernels of hyper_rows.cu. */
#ifndef DS4_KERNELS_CUDA_HYPER_ROWS_CUH
#define DS4_KERNELS_CUDA_HYPER_ROWS_CUH

#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/device.cuh"

#define DS4_HYPER_ROWS 64 /* more rows than this */

/* By value; four bf16 streams, all rows of the step, aligned. */
struct ds4_hyper_rows {
    struct ds4_dev_mat x; /* streams: stride between tokens; a token's are contiguous */
    int32_t n_row;
    int32_t d;
    bool writes; /* X' from o, post and comb first */
    struct ds4_dev_mat o;
    const uint8_t *fn; /* F16 or BF16, 24 rows */
    enum ds4_dtype dtype;
    size_t row_bytes;
    const float *base;
    const float *scale;
    int32_t iters;
    float hyper_eps;
    float rms_eps;
    const float *norm; /* NULL: none */
    float *post;
    float *comb;
    struct ds4_dev_mat u;
    float *partial; /* [n_row, d / 128, 25] */
    float *pre;     /* [n_row, 4] */
};

/* Whether `a` is what the kernels take; needs no scratch yet. */
bool ds4_cuda_can_hyper_rows(const struct ds4_hyper_rows *a);
void ds4_cuda_hyper_rows(struct ds4_device *dev, const struct ds4_hyper_rows *a);

/* The write half: X'_k = post_k * o + sum_j comb_jk X_j.  No fused multiply-adds, so that a row has the same
 * bits whichever kernel writes it. */
__device__ __forceinline__ float ds4_hyper_value(const float *post, const float *comb, int32_t n,
                                                 int32_t k, float out, const float *old)
{
    float sum = __fmul_rn(post[k], out);

    for (int32_t j = 0; j < n; j++)
        sum = __fadd_rn(sum, __fmul_rn(comb[j * n + k], old[j]));
    return sum;
}

#endif

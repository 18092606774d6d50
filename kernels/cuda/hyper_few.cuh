/* What the kernels of hyper-connections share, and those of few rows (hyper_few.cu). */
#ifndef DS4_KERNELS_CUDA_HYPER_FEW_CUH
#define DS4_KERNELS_CUDA_HYPER_FEW_CUH

#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/device.cuh"

static __device__ __forceinline__ float ds4_sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

static __device__ __forceinline__ float ds4_reciprocal(float x)
{
    float r;

    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

/* row[j] or (ROWS false) column[k] divided by what the sums of its line of the scaled matrix come to. */
template <bool ROWS>
static __device__ __forceinline__ void ds4_even_out(const float (&c)[16], float (&mine)[4],
                                                    const float (&other)[4], float eps)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float a[4], sum;

#pragma unroll
        for (int k = 0; k < 4; k++)
            a[k] = ROWS ? c[4 * j + k] : c[4 * k + j];
        sum = (a[0] * other[0] + a[1] * other[1]) + (a[2] * other[2] + a[3] * other[3]);
        mine[j] *= ds4_reciprocal(mine[j] * sum + eps);
    }
}

/* Sinkhorn for four streams in one thread's registers (row softmax plus eps and a column step, then rows and
 * columns in turn), as a chain of factors of rows and columns: a step is
 * four sums of products and four reciprocals (an ulp, which the next step evens out).  All that another
 * kernel waits for is this chain. */
static __device__ __forceinline__ void ds4_sinkhorn4(float (&c)[16], int32_t iters, float eps)
{
    float row[4] = {1.0f, 1.0f, 1.0f, 1.0f}, column[4] = {1.0f, 1.0f, 1.0f, 1.0f};

#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float top = fmaxf(fmaxf(c[4 * j], c[4 * j + 1]), fmaxf(c[4 * j + 2], c[4 * j + 3]));
        float r;

#pragma unroll
        for (int k = 0; k < 4; k++)
            c[4 * j + k] = expf(c[4 * j + k] - top);
        r = ds4_reciprocal((c[4 * j] + c[4 * j + 1]) + (c[4 * j + 2] + c[4 * j + 3]));
#pragma unroll
        for (int k = 0; k < 4; k++)
            c[4 * j + k] = c[4 * j + k] * r + eps;
    }
    ds4_even_out<false>(c, column, row, eps);
#pragma unroll 1
    for (int32_t i = 1; i < iters; i++) {
        ds4_even_out<true>(c, row, column, eps);
        ds4_even_out<false>(c, column, row, eps);
    }
#pragma unroll
    for (int j = 0; j < 16; j++)
        c[j] *= row[j / 4] * column[j % 4];
}

/* By value: the write of the sub-layer before, the mixes, Sinkhorn, the read and its norm, of four streams. */
struct ds4_hyper_few {
    struct ds4_dev_mat x; /* [n_row, 4, d]; a row's streams are contiguous */
    int32_t n_row;
    int32_t d;
    struct ds4_dev_mat o; /* written to the streams first; data NULL: not */
    const uint8_t *fn;    /* [24, 4 * d] */
    enum ds4_dtype dtype;
    size_t row_bytes;
    const float *base;
    const float *scale;
    int32_t iters;
    float hyper_eps;
    float rms_eps;
    const float *norm;
    float *post; /* of the write before, then of this read */
    float *comb;
    struct ds4_dev_mat u;
    uint8_t *packed; /* u once more, for int8 products; NULL: not */
};

bool ds4_cuda_can_hyper_few(const struct ds4_device *dev, const struct ds4_hyper_few *p);
void ds4_cuda_hyper_few(struct ds4_device *dev, const struct ds4_hyper_few *p);

#endif

/* Attention as its two kernels see it: the exact one (attention.cu) and that on tensor cores. */
#ifndef DS4_KERNELS_CUDA_ATTENTION_CUH
#define DS4_KERNELS_CUDA_ATTENTION_CUH

#include "kernels/cuda/device.cuh"

/* By value: everything but the grid. */
struct ds4_attend {
    struct ds4_dev_batch batch;
    const float *q;
    int64_t q_tok, q_head; /* strides */
    const float *kv;
    int64_t kv_tok;
    float *o;
    int64_t o_tok, o_head;
    int32_t n_head;
    int32_t d;
    struct ds4_ring ring;
    struct ds4_pages pages;
    int32_t ratio;
    int32_t window;
    const int32_t *sel;
    const int32_t *n_sel;
    int32_t top_k;
    const float *sink;
    float scale;

    /* Tensor cores only: a query's rows in n_share pieces of share_rows, the last one takes the rest. */
    int32_t n_share;
    int32_t share_rows;
    float *share;  /* [n_tok, n_head, n_share, d], not yet divided by the sum */
    float2 *state; /* [n_tok, n_head, n_share] maximum and sum */

    /* What the fold of shares does besides. */
    const float *freq; /* o is rotated back; NULL: not */
    bool store;        /* the ring takes the rows kv */
    uint8_t *packed;   /* o once more, for int8 products; NULL: not */
};

/* What a head's sum of values is multiplied by in the end.  Sink and rows against their common maximum,
 * so that a large sink cannot overflow. */
static __device__ __forceinline__ float ds4_attend_factor(float top, float sum, float sink)
{
    const float most = fmaxf(top, sink);

    return expf(top - most) / (sum * expf(top - most) + expf(sink - most));
}

/* Whether shapes, formats and alignment suit the tensor cores. */
bool ds4_cuda_can_attend(const struct ds4_attend *a);
/* False: o is not rotated back yet, nor are rows stored.  o: where a->o is, to be kept if it gets packed. */
bool ds4_cuda_attend(struct ds4_device *dev, struct ds4_attend *a, const struct ds4_tensor *o);
/* Many queries at once (attention_rows.cu), of what ds4_cuda_can_attend: o is rotated back.  False: not for this
 * step. */
bool ds4_cuda_attend_rows(struct ds4_device *dev, const struct ds4_attend *a);
size_t ds4_cuda_attend_rows_scratch(const struct ds4_limits *limits);
size_t ds4_cuda_attend_scratch(const struct ds4_device *dev, const struct ds4_limits *limits);

#endif

/* Embedding: each token's row of the table, copied to all residual streams (step 8).
 *
 * Block (x: values, y: token); a value is decoded once and stored n_hyper times.  Bytes: the row as
 * stored plus n_hyper rows written; a few microseconds for any step.  Rows of inactive entries are left
 * alone: their token ids may be anything. */
#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/device.cuh"

#define THREADS 256

static __global__ void embed_kernel(struct ds4_dev_batch batch, struct ds4_weight w, void *x,
                                    bool bf16, int32_t n_hyper, int64_t stride_tok,
                                    int64_t stride_hyper)
{
    ds4_take_turn();
    const int32_t i = blockIdx.x * THREADS + threadIdx.x, t = blockIdx.y;
    const int32_t token = batch.token[t];
    float v;

    /* An id outside the table is a bug upstream; reading foreign memory would hide it. */
    if (i >= w.n_col || !batch.entry[batch.entry_of[t]].active || token < 0 || token >= w.n_row)
        return;
    v = ds4_dq(w.dtype, (const uint8_t *)w.data + (size_t)token * w.row_bytes, i);
    for (int32_t k = 0; k < n_hyper; k++) {
        const int64_t at = t * stride_tok + k * stride_hyper + i;

        if (bf16)
            ((__nv_bfloat16 *)x)[at] = __float2bfloat16_rn(v);
        else
            ((float *)x)[at] = v;
    }
}

void ds4_cuda_embed(struct ds4_device *dev, const struct ds4_embed_args *a)
{
    const dim3 grid(ds4_div_up(a->w.n_col, THREADS), dev->batch.n_tok);

    if (dev->batch.n_tok == 0)
        return;
    DS4_CHAIN(embed_kernel, grid, THREADS, 0, dev, dev->batch, a->w, a->x.data,
              a->x.dtype == DS4_DTYPE_BF16, a->x.shape[1], a->x.stride[0], a->x.stride[1]);
}

/* Cache rounding in place, and storing a step's rows into the rings: one block a row.
 *
 * A row is taken into shared memory, rounded or packed there (rows.cuh), and written once.  What points keep of
 * a step (keep) is stored the same way beside the rings. */
#include "kernels/cuda/rows.cuh"

static __global__ void round_kernel(float *x, int64_t stride, int32_t d, int32_t d_rope,
                                    enum ds4_row_format format)
{
    ds4_take_turn();
    __shared__ float row[DS4_DEV_MAX_ROW];
    float *mine = x + (int64_t)blockIdx.x * stride;

    for (int32_t i = threadIdx.x; i < d; i += blockDim.x)
        row[i] = mine[i];
    ds4_dev_round_row(format, d, d_rope, row);
    for (int32_t i = threadIdx.x; i < d; i += blockDim.x)
        mine[i] = row[i];
}

void ds4_cuda_round(struct ds4_device *dev, const struct ds4_round_args *a)
{
    const int32_t n = a->x.shape[0], d = a->x.shape[1];

    if (n == 0 || a->format == DS4_ROW_F32)
        return;
    if (d > DS4_DEV_MAX_ROW)
        ds4_cuda_fatal(__FILE__, __LINE__, "round", "row wider than shared memory is sized for");
    ds4_dev_spoil(dev, &a->x);
    /* Narrow rows come by the hundred thousand: a thread takes two values, and more rows share an SM. */
    DS4_CHAIN(round_kernel, n, d <= 128 ? 64 : 256, 0, dev, (float *)a->x.data, a->x.stride[0], d,
              a->d_rope, a->format);
}

static __global__ void ring_write_kernel(struct ds4_dev_batch batch, const float *x, int64_t stride,
                                         struct ds4_ring ring)
{
    ds4_take_turn();
    const int32_t t = blockIdx.x;

    ds4_dev_store_row(batch, batch.entry[batch.entry_of[t]], t, x + (int64_t)t * stride, ring);
}

void ds4_cuda_ring_write(struct ds4_device *dev, const struct ds4_ring_write_args *a)
{
    if (dev->batch.n_tok == 0)
        return;
    DS4_CHAIN(ring_write_kernel, dev->batch.n_tok, 256, 0, dev, dev->batch,
              (const float *)a->x.data, a->x.stride[0], a->ring);
}

/* By value: rows to keep. */
struct keep {
    const float *x; /* the first of them */
    int64_t stride;
    int32_t n_col;
    int32_t pos;
    const uint8_t *ape; /* NULL: none */
    enum ds4_dtype ape_dtype;
    size_t ape_row_bytes;
    int32_t ratio;
    enum ds4_row_format format;
    int32_t d_rope;
    uint8_t *dst;
    size_t row_bytes;
};

static __global__ void keep_kernel(const __grid_constant__ struct keep a)
{
    ds4_take_turn();
    const float *x = a.x + (int64_t)blockIdx.x * a.stride;
    uint8_t *const dst = a.dst + (size_t)blockIdx.x * a.row_bytes;

    if (a.format != DS4_ROW_F32) {
        ds4_dev_pack_row(a.format, a.n_col, a.d_rope, x, dst);
        return;
    }
    const uint8_t *const ape =
        a.ape == NULL ? NULL
                      : a.ape + (size_t)((a.pos + (int32_t)blockIdx.x) % a.ratio) * a.ape_row_bytes;

    /* Sections follow each other without gaps, and packed rows need not end at a multiple of 4. */
    for (int32_t i = threadIdx.x; i < a.n_col; i += blockDim.x) {
        const float value = ape == NULL ? x[i] : x[i] + ds4_dq(a.ape_dtype, ape, i);

        memcpy(dst + 4 * (size_t)i, &value, sizeof(value));
    }
}

void ds4_cuda_keep(struct ds4_device *dev, const struct ds4_keep_args *a)
{
    const struct keep args = {(const float *)a->x.data + a->first_row * a->x.stride[0],
                              a->x.stride[0],
                              a->n_col,
                              a->pos,
                              (const uint8_t *)a->ape.data,
                              a->ape.dtype,
                              a->ape.row_bytes,
                              a->ratio,
                              a->format,
                              a->d_rope,
                              (uint8_t *)a->dst,
                              ds4_row_bytes(a->format, a->n_col, a->d_rope)};

    if (a->n_row > 0)
        DS4_CHAIN(keep_kernel, a->n_row, 256, 0, dev, args);
}

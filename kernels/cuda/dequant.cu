/* Weight rows to f32 or bf16, for products of many rows that a library multiplies.
 *
 * A thread decodes four values and stores 16 (8) bytes.  Bytes a value: its block's share plus 4 (2)
 * written; bound: copy bandwidth, a few percent of the product it prepares. */
#include "kernels/cuda/product.cuh"
#include "kernels/cuda/unit.cuh"

#define THREADS 256

static __device__ __forceinline__ void store(float *dst, float4 v)
{
    *(float4 *)dst = v;
}

static __device__ __forceinline__ void store(__nv_bfloat16 *dst, float4 v)
{
    const __nv_bfloat162 low = __floats2bfloat162_rn(v.x, v.y);
    const __nv_bfloat162 high = __floats2bfloat162_rn(v.z, v.w);

    *(uint2 *)dst = make_uint2(*(const uint32_t *)&low, *(const uint32_t *)&high);
}

/* Block (x: values of a row, y: row); stride is a multiple of 32. */
template <int D, class T>
static __global__ void dequant_kernel(const uint8_t *w, size_t row_bytes, int32_t n_col,
                                      int32_t stride, int32_t row0, T *dst)
{
    const int32_t i = 4 * (blockIdx.x * THREADS + threadIdx.x);
    const int64_t row = row0 + (int64_t)blockIdx.y;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    if (i >= stride)
        return;
    if (i < n_col)
        v = ds4_unit_quad_end<D>(ds4_span_of(w + (size_t)row * row_bytes), i / DS4_UNIT,
                                 i % DS4_UNIT / 4, n_col - i);
    store(dst + row * stride + i, v);
}

template <int D>
static void run(struct ds4_device *dev, const uint8_t *w, size_t row_bytes, int32_t n_row,
                int32_t n_col, int32_t stride, bool bf16, void *dst)
{
    for (int32_t row = 0; row < n_row; row += 65535) { /* the limit of a grid's y */
        const dim3 grid(ds4_div_up(stride, 4 * THREADS), n_row - row < 65535 ? n_row - row : 65535);

        if (bf16)
            DS4_LAUNCH((dequant_kernel<D, __nv_bfloat16>), grid, THREADS, 0, dev->stream, w,
                       row_bytes, n_col, stride, row, (__nv_bfloat16 *)dst);
        else
            DS4_LAUNCH((dequant_kernel<D, float>), grid, THREADS, 0, dev->stream, w, row_bytes,
                       n_col, stride, row, (float *)dst);
    }
}

void ds4_cuda_dequant(struct ds4_device *dev, enum ds4_dtype dtype, const uint8_t *w,
                      size_t row_bytes, int32_t n_row, int32_t n_col, int32_t stride, bool bf16,
                      void *dst)
{
    switch (dtype) {
#define DS4_CASE(name, type)                                                                       \
    case type:                                                                                     \
        run<type>(dev, w, row_bytes, n_row, n_col, stride, bf16, dst);                             \
        return;
        DS4_PRODUCT_FNS(DS4_CASE)
#undef DS4_CASE
    case DS4_DTYPE_I8:
    case DS4_DTYPE_I32:
    case DS4_N_DTYPES:
        break; /* tables, never products */
    }
    ds4_cuda_fatal(__FILE__, __LINE__, "dequant", "not a weight dtype");
}

/* Activations packed for products: f32, bf16, or int8 blocks (forms of product.cuh).
 *
 * int8: d = amax / 127 per 32 values, q = rint(x * (1 / d)), as on the CPU; a block with a value that is
 * not finite gets a NaN scale, so its products are NaN and never a plausible number.  A warp packs a
 * unit.  Bytes: 4 to 6 a value, one pass. */
#include "kernels/cuda/act.cuh"
#include "kernels/cuda/product.cuh"

#define THREADS 256

/* One thread a value; block (x: values of a row, y: row). */
template <class T>
static __global__ void pack_kernel(struct ds4_dev_mat x, int32_t n_col, int32_t part,
                                   int32_t n_part, T *dst)
{
    ds4_take_turn();
    const int32_t i = blockIdx.x * THREADS + threadIdx.x, c = i % part;
    const int64_t row = blockIdx.y;

    if (i < part * n_part)
        dst[row * part * n_part + i] =
            (T)(c < n_col ? ds4_mat_get(x, row, i / part * n_col + c) : 0.0f);
}

static __global__ void pack_int8_kernel(struct ds4_dev_mat x, int32_t n_unit, uint8_t *dst,
                                        int64_t row_bytes)
{
    ds4_take_turn();
    const int32_t unit = (blockIdx.x * THREADS + threadIdx.x) / 32;
    const int64_t row = blockIdx.y;

    if (unit < n_unit)
        ds4_pack_unit(ds4_mat_get(x, row, unit * DS4_UNIT_VALUES + threadIdx.x % 32), unit, n_unit,
                      dst + row * row_bytes);
}

struct ds4_packed ds4_cuda_packed_at(enum ds4_form form, int32_t n_part, int32_t n_col,
                                     const void *dst)
{
    struct ds4_packed p = {(const uint8_t *)dst, 0, 0};

    switch (form) {
    case DS4_FORM_EXACT:
        p.part = ds4_pad(n_col, 32);
        p.row_bytes = (int64_t)p.part * n_part * 4;
        break;
    case DS4_FORM_INT8:
        p.part = n_col / DS4_UNIT_VALUES;
        p.row_bytes = (int64_t)p.part * n_part * DS4_UNIT_BYTES;
        break;
    case DS4_FORM_TILE:
        p.part = ds4_pad(n_col, 64);
        p.row_bytes = (int64_t)p.part * n_part * 2;
        break;
    }
    p.row_bytes = (p.row_bytes + 15) / 16 * 16;
    return p;
}

size_t ds4_cuda_packed_bytes(int64_t n, int32_t n_part, int32_t n_col)
{
    /* f32 padded to 64 bounds every form. */
    return (size_t)n * (size_t)n_part * (size_t)ds4_pad(n_col, 64) * 4;
}

struct ds4_packed ds4_cuda_pack(struct ds4_device *dev, enum ds4_form form, struct ds4_dev_mat x,
                                int32_t n, int32_t n_part, int32_t n_col, void *dst)
{
    struct ds4_packed p = ds4_cuda_packed_at(form, n_part, n_col, dst);
    const dim3 values(ds4_div_up((int64_t)p.part * n_part, THREADS), n);
    const dim3 units(ds4_div_up((int64_t)p.part * n_part * 32, THREADS), n);

    switch (form) {
    case DS4_FORM_EXACT:
        if (!x.bf16 && n_col % 4 == 0 && x.stride % 4 == 0 && (uintptr_t)x.data % 16 == 0) {
            p.data = (const uint8_t *)x.data; /* as it is */
            p.row_bytes = x.stride * 4;
            p.part = n_col;
            break;
        }
        DS4_CHAIN(pack_kernel<float>, values, THREADS, 0, dev, x, n_col, p.part, n_part,
                  (float *)dst);
        break;
    case DS4_FORM_INT8:
        DS4_CHAIN(pack_int8_kernel, units, THREADS, 0, dev, x, p.part * n_part, (uint8_t *)dst,
                  p.row_bytes);
        break;
    case DS4_FORM_TILE:
        DS4_CHAIN(pack_kernel<__nv_bfloat16>, values, THREADS, 0, dev, x, n_col, p.part, n_part,
                  (__nv_bfloat16 *)dst);
        break;
    }
    return p;
}

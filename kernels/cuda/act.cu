/* Activations packed for products: f32, bf16, int8 blocks, three digits (forms of product.cuh).
 *
 * int8: d = amax / 127 per 32 values, q = rint(x * (1 / d)), as on the CPU; a block with a value that is
 * not finite gets a NaN scale, so its products are NaN and never a plausible number.  A warp packs a
 * unit.  Bytes: 4 to 6 a value, one pass. */
#include "kernels/cuda/act.cuh"
#include "kernels/cuda/mma.cuh"
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

/* The same for whole rows of aligned f32, eight values a thread. */
static __global__ void pack_eight_kernel(const float *x, int64_t stride, int32_t n_col, uint4 *dst)
{
    ds4_take_turn();
    const int32_t i = blockIdx.x * THREADS + threadIdx.x;
    const int64_t row = blockIdx.y;

    if (i < n_col / 8) {
        const float4 *const from = (const float4 *)(x + row * stride) + 2 * i;
        const float4 a = from[0], b = from[1];

        dst[row * (n_col / 8) + i] = make_uint4(ds4_bf16_pair(a.x, a.y), ds4_bf16_pair(a.z, a.w),
                                                ds4_bf16_pair(b.x, b.y), ds4_bf16_pair(b.z, b.w));
    }
}

template <bool DIGITS>
static __global__ void pack_int8_kernel(struct ds4_dev_mat x, int32_t n_unit, uint8_t *dst,
                                        int64_t row_bytes)
{
    ds4_take_turn();
    const int32_t unit = (blockIdx.x * THREADS + threadIdx.x) / 32;
    const int64_t row = blockIdx.y;

    if (unit >= n_unit)
        return;
    const float v = ds4_mat_get(x, row, unit * DS4_UNIT_VALUES + threadIdx.x % 32);

    if (DIGITS)
        ds4_pack_digits(v, unit, n_unit, dst + row * row_bytes);
    else
        ds4_pack_unit(v, unit, n_unit, dst + row * row_bytes);
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
    case DS4_FORM_DIGITS:
        p.part = n_col / DS4_UNIT_VALUES;
        p.row_bytes = (int64_t)p.part * n_part * DS4_DIGITS_BYTES;
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

/* ---- kept rows ----------------------------------------------------------------------------------------- */

static size_t tensor_bytes(const struct ds4_tensor *t)
{
    return (size_t)t->shape[0] * (size_t)t->stride[0] * (t->dtype == DS4_DTYPE_BF16 ? 2 : 4);
}

void ds4_dev_spoil_bytes(struct ds4_device *dev, const void *data, size_t bytes)
{
    const uint8_t *const from = (const uint8_t *)data;

    for (int i = 0; i < DS4_DEV_N_KEEP; i++) {
        struct ds4_dev_kept *k = &dev->kept[i];
        const uint8_t *const rows = (const uint8_t *)k->from;

        if (rows != NULL && from < rows + 4 * (size_t)k->n * (size_t)k->n_col &&
            rows < from + bytes)
            k->from = NULL;
    }
}

void ds4_dev_spoil(struct ds4_device *dev, const struct ds4_tensor *rows)
{
    ds4_dev_spoil_bytes(dev, rows->data, tensor_bytes(rows));
}

uint8_t *ds4_dev_keep(struct ds4_device *dev, enum ds4_dev_keep what, const struct ds4_tensor *rows)
{
    const int32_t n = rows->shape[0], n_col = (int32_t)rows->stride[0];
    struct ds4_dev_kept *k = &dev->kept[what];
    const int32_t width = rows->shape[1] * (rows->n_dim == 3 ? rows->shape[2] : 1);

    if (dev->products == DS4_PRODUCTS_EXACT || n > DS4_DEV_KEEP_ROWS || width != n_col ||
        n_col % DS4_UNIT_VALUES != 0 ||
        n * ds4_packed_row_bytes(n_col / DS4_UNIT_VALUES) > (int64_t)DS4_DEV_KEEP_BYTES)
        return NULL;
    k->from = rows->data;
    k->n = n;
    k->n_col = n_col;
    return k->packed;
}

/* The packed form of the first n rows of x, NULL if it is not kept. */
static const uint8_t *find_kept(const struct ds4_device *dev, const struct ds4_dev_mat *x,
                                int32_t n, int32_t n_col)
{
    for (int i = 0; i < DS4_DEV_N_KEEP; i++) {
        const struct ds4_dev_kept *k = &dev->kept[i];

        if (k->from == x->data && !x->bf16 && n <= k->n && n_col == k->n_col && x->stride == n_col)
            return k->packed;
    }
    return NULL;
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
    const uint8_t *kept;

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
    case DS4_FORM_DIGITS:
        DS4_CHAIN(pack_int8_kernel<true>, units, THREADS, 0, dev, x, p.part * n_part,
                  (uint8_t *)dst, p.row_bytes);
        break;
    case DS4_FORM_INT8:
        kept = find_kept(dev, &x, n, n_part * n_col);
        if (kept != NULL) {
            p.data = kept;
            break;
        }
        DS4_CHAIN(pack_int8_kernel<false>, units, THREADS, 0, dev, x, p.part * n_part,
                  (uint8_t *)dst, p.row_bytes);
        break;
    case DS4_FORM_TILE:
        if (!x.bf16 && p.part == n_col && x.stride % 4 == 0 && (uintptr_t)x.data % 16 == 0) {
            DS4_CHAIN(pack_eight_kernel, dim3(ds4_div_up((int64_t)n_col * n_part, 8 * THREADS), n),
                      THREADS, 0, dev, (const float *)x.data, x.stride, n_col * n_part,
                      (uint4 *)dst);
            break;
        }
        DS4_CHAIN(pack_kernel<__nv_bfloat16>, values, THREADS, 0, dev, x, n_col, p.part, n_part,
                  (__nv_bfloat16 *)dst);
        break;
    }
    return p;
}

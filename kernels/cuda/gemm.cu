/* Products with a weight matrix (step 9): y = W x.
 *
 * Which kernel runs follows from dtype, rows and mode alone (so a captured step can be replayed):
 *   EXACT  to 32 rows: stored weights stream past f32 inputs (Q8_0: digits), eight at a time; more: the
 *          weights become f32, piece by piece, and cuBLAS multiplies (pedantic: no TF32)
 *   FAST   what must be exact, to 32 rows: as EXACT; more rows as the others (a prompt's rows in bf16)
 *          to 16 rows: int8 inputs, integer sums; formats without an int8 kernel stay EXACT
 *          to 255 rows: bf16 tiles straight from the stored weights (tile.cuh)
 *          more: bf16 weights, piece by piece, and cuBLAS with f32 sums
 * Bound: the weights' bytes to about 100 rows, the tensor units beyond. */
#include "kernels/cuda/digits.cuh"
#include "kernels/cuda/product.cuh"

#define MAX_CHUNK      2048 /* rows packed at once: bounds scratch */
#define EXACT_MAX_ROWS 32
#define TILE_MAX_ROWS  255

static bool has_int8(enum ds4_dtype dtype)
{
    return dtype == DS4_DTYPE_Q8_0 || dtype == DS4_DTYPE_Q2_K || dtype == DS4_DTYPE_Q4_K ||
           dtype == DS4_DTYPE_IQ2_XXS || dtype == DS4_DTYPE_MXFP4;
}

enum ds4_form ds4_cuda_form(enum ds4_dtype dtype, int32_t n, int32_t n_stream, bool exact)
{
    if (!exact && n > n_stream)
        return DS4_FORM_TILE;
    return !exact && has_int8(dtype) ? DS4_FORM_INT8 : DS4_FORM_EXACT;
}

/* ---- kernels by dtype ------------------------------------------------------------------------------ */

static ds4_product_fn kernel_of(enum ds4_form form, enum ds4_dtype dtype)
{
    if (form == DS4_FORM_DIGITS)
        return ds4_cuda_digits_q8_0;
    if (form == DS4_FORM_INT8) {
        switch (dtype) {
        case DS4_DTYPE_Q8_0:
            return ds4_cuda_int8_q8_0;
        case DS4_DTYPE_Q2_K:
            return ds4_cuda_int8_q2_k;
        case DS4_DTYPE_Q4_K:
            return ds4_cuda_int8_q4_k;
        case DS4_DTYPE_IQ2_XXS:
            return ds4_cuda_int8_iq2_xxs;
        case DS4_DTYPE_MXFP4:
            return ds4_cuda_int8_mxfp4;
        default:
            break;
        }
    } else {
        switch (dtype) {
#define DS4_CASE(name, type)                                                                       \
    case type:                                                                                     \
        return form == DS4_FORM_EXACT ? ds4_cuda_exact_##name : ds4_cuda_tile_##name;
            DS4_PRODUCT_FNS(DS4_CASE)
#undef DS4_CASE
        default:
            break;
        }
    }
    ds4_cuda_fatal(__FILE__, __LINE__, "product", "not a weight dtype");
}

/* ---- many rows: decode a piece, let cuBLAS multiply -------------------------------------------------- */

/* Rows row0 .. of n_part parts, already decoded with row stride ld, times all inputs. */
static void multiply(struct ds4_device *dev, const struct ds4_product *p, int z, int32_t part,
                     int32_t n_part, int32_t row0, int32_t n_row, bool bf16, const void *w,
                     int32_t ld)
{
    const cudaDataType_t type = bf16 ? CUDA_R_16BF : CUDA_R_32F;
    const size_t size = bf16 ? 2 : 4;
    const uint8_t *x = p->x.data + (size_t)part * (size_t)p->x.part * size;
    float *y = p->y[z] + (size_t)part * (size_t)p->n_row + row0;
    const float one = 1.0f, zero = 0.0f;

    /* Column-major view: y^T [n_row, n] = (w^T)^T [n_row, n_col] * x^T [n_col, n].  Pedantic math would
     * keep bf16 off the tensor units; the default never uses TF32 for f32. */
    if (bf16)
        DS4_CUBLAS(cublasSetMathMode(dev->blas, CUBLAS_DEFAULT_MATH));
    DS4_CUBLAS(cublasGemmStridedBatchedEx(
        dev->blas, CUBLAS_OP_T, CUBLAS_OP_N, n_row, p->n, p->n_col, &one, w, type, ld,
        (long long)p->n_row * ld, x, type, (int)(p->x.row_bytes / (int64_t)size), p->x.part, &zero,
        y, CUDA_R_32F, (int)p->y_stride, p->n_row, n_part,
        bf16 ? CUBLAS_COMPUTE_32F : CUBLAS_COMPUTE_32F_PEDANTIC, CUBLAS_GEMM_DEFAULT));
    if (bf16)
        DS4_CUBLAS(cublasSetMathMode(dev->blas, CUBLAS_PEDANTIC_MATH));
}

static void run_blas(struct ds4_device *dev, const struct ds4_product *p, bool bf16, size_t used)
{
    const int32_t ld = ds4_pad(p->n_col, 64);
    const size_t row_room = (size_t)ld * (bf16 ? 2 : 4);
    const bool whole = row_room * (size_t)p->n_row * (size_t)p->n_part <= DS4_WEIGHT_ROOM;
    int32_t step = (int32_t)(DS4_WEIGHT_ROOM / row_room);
    void *w = ds4_dev_carve(dev, DS4_WEIGHT_ROOM, &used);

    step = step < p->n_row ? step : p->n_row;
    if (step == 0)
        ds4_cuda_fatal(__FILE__, __LINE__, "gemm", "one row of weights is larger than its room");
    DS4_CUBLAS(
        cublasSetWorkspace(dev->blas, ds4_dev_carve(dev, DS4_BLAS_ROOM, &used), DS4_BLAS_ROOM));
    for (int z = 0; z < p->n_w; z++) {
        if (whole) {
            ds4_cuda_dequant(dev, p->dtype, p->w[z], p->row_bytes, p->n_row * p->n_part, p->n_col,
                             ld, bf16, w);
            multiply(dev, p, z, 0, p->n_part, 0, p->n_row, bf16, w, ld);
            continue;
        }
        for (int32_t part = 0; part < p->n_part; part++) {
            for (int32_t row = 0; row < p->n_row; row += step) {
                const int32_t n = p->n_row - row < step ? p->n_row - row : step;

                ds4_cuda_dequant(dev, p->dtype,
                                 p->w[z] + (size_t)part * p->part_bytes +
                                     (size_t)row * p->row_bytes,
                                 p->row_bytes, n, p->n_col, ld, bf16, w);
                multiply(dev, p, z, part, 1, row, n, bf16, w, ld);
            }
        }
    }
}

void ds4_cuda_product(struct ds4_device *dev, enum ds4_form form, const struct ds4_product *p,
                      size_t used)
{
    const int32_t max = form == DS4_FORM_EXACT ? EXACT_MAX_ROWS : TILE_MAX_ROWS;

    if (p->group == NULL && form != DS4_FORM_INT8 && form != DS4_FORM_DIGITS && p->n > max)
        run_blas(dev, p, form == DS4_FORM_TILE, used);
    else
        kernel_of(form, p->dtype)(dev, p);
}

/* ---- the operation --------------------------------------------------------------------------------- */

/* Parts are padded to 64 values each; sixteen parts at most are padded at all. */
#define PART_SLACK (16 * 64)

size_t ds4_cuda_gemm_scratch(const struct ds4_device *dev, const struct ds4_limits *limits)
{
    const int32_t n = limits->max_tok < MAX_CHUNK ? limits->max_tok : MAX_CHUNK;

    (void)dev;
    return ds4_cuda_packed_bytes(n, 1, limits->max_cols + PART_SLACK) + DS4_WEIGHT_ROOM +
           DS4_BLAS_ROOM + 4096;
}

/* Few exact rows of Q8_0 go as digits, if its scales lie on even addresses and the rows of any such step find
 * room. */
static enum ds4_form form_of(const struct ds4_gemm_args *a, int32_t n, bool exact)
{
    const enum ds4_form form = ds4_cuda_form(a->w.dtype, n, DS4_GEMV_MAX_ROWS, exact);
    const uintptr_t at = (uintptr_t)a->w.data | (uintptr_t)a->w2.data;
    const size_t bytes =
        EXACT_MAX_ROWS *
        (size_t)ds4_cuda_packed_at(DS4_FORM_DIGITS, a->n_group, a->w.n_col, NULL).row_bytes;

    if (form == DS4_FORM_EXACT && a->w.dtype == DS4_DTYPE_Q8_0 && n <= EXACT_MAX_ROWS &&
        at % 2 == 0 && bytes <= DS4_DIGITS_ROOM)
        return DS4_FORM_DIGITS;
    return form;
}

/* Whether both matrices can stream in one launch. */
static bool can_pair(const struct ds4_gemm_args *a, enum ds4_form form, int32_t n)
{
    const bool streams = form != DS4_FORM_TILE && (form != DS4_FORM_EXACT || n <= EXACT_MAX_ROWS);

    return streams && a->w2.dtype == a->w.dtype && a->w2.n_col == a->w.n_col &&
           a->w2.row_bytes == a->w.row_bytes;
}

void ds4_cuda_gemm(struct ds4_device *dev, const struct ds4_gemm_args *a)
{
    const int32_t n_all = a->x.shape[0];
    const bool exact = dev->products == DS4_PRODUCTS_EXACT || (a->exact && n_all <= EXACT_MAX_ROWS);
    const enum ds4_form form = form_of(a, n_all, exact);
    const bool pair = a->w2.data != NULL && can_pair(a, form, n_all);
    struct ds4_product p = {};

    ds4_dev_spoil(dev, &a->y);
    p.dtype = a->w.dtype;
    p.w[0] = (const uint8_t *)a->w.data;
    p.n_w = 1;
    p.row_bytes = a->w.row_bytes;
    p.n_part = a->n_group;
    p.n_row = a->w.n_row / a->n_group;
    p.n_col = a->w.n_col;
    p.part_bytes = (size_t)p.n_row * p.row_bytes;
    p.y_stride = a->y.stride[0];
    if (pair) {
        ds4_dev_spoil(dev, &a->y2);
        p.n_w = 2;
        p.w[1] = (const uint8_t *)a->w2.data;
        p.n_row2 = a->w2.n_row;
        p.y_stride2 = a->y2.stride[0];
    }
    for (int32_t i = 0; i < n_all; i += MAX_CHUNK) {
        struct ds4_dev_mat x = ds4_dev_mat_of(&a->x);
        size_t used = 0;
        void *room;

        p.n = n_all - i < MAX_CHUNK ? n_all - i : MAX_CHUNK;
        x.data = (uint8_t *)x.data + i * x.stride * (x.bf16 ? 2 : 4);
        room = form == DS4_FORM_DIGITS
                   ? ds4_digits_room(dev)
                   : ds4_dev_carve(dev, ds4_cuda_packed_bytes(p.n, p.n_part, p.n_col), &used);
        p.x = ds4_cuda_pack(dev, form, x, p.n, p.n_part, p.n_col, room);
        p.y[0] = (float *)a->y.data + i * p.y_stride;
        if (pair)
            p.y[1] = (float *)a->y2.data + i * p.y_stride2;
        ds4_cuda_product(dev, form, &p, used);
    }
    if (a->w2.data != NULL && !pair) {
        struct ds4_gemm_args second = *a;

        second.w = a->w2, second.y = a->y2, second.w2.data = NULL;
        ds4_cuda_gemm(dev, &second);
    }
}

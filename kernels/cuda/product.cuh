/* Products of weight matrices with packed activations: what gemm.cu and moe.cu share.
 *
 * A product is one matrix, a block-diagonal row of them, or the expert stack of a mixture; inputs are
 * packed once per call in the form the kernel wants.  Four kernels:
 *   EXACT  f32 inputs, f32 sums, weights as stored           gemv.cuh, dots.cuh
 *   DIGITS the same of Q8_0: inputs as three int8 digits     strip.cuh
 *   INT8   int8 inputs, integer sums per 32 (or 16) values   gemv.cuh, strip.cuh
 *   TILE   bf16 inputs and weights on tensor cores           tile.cuh
 * In the first three a row's bits do not depend on the other rows of the call or on their number. */
#ifndef DS4_KERNELS_CUDA_PRODUCT_CUH
#define DS4_KERNELS_CUDA_PRODUCT_CUH

#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/device.cuh"

enum ds4_form { DS4_FORM_EXACT, DS4_FORM_DIGITS, DS4_FORM_INT8, DS4_FORM_TILE };

/* The uses of one expert: slots first .. first + n - 1.  Unused entries have n = 0. */
struct ds4_dev_group {
    int32_t expert;
    int32_t first;
    int32_t n;
};

/* One packed input row holds n_group parts of n_col values each, padded with zeros.
 *   EXACT  f32, part stride pad32(n_col) (or the caller's own rows when they fit)
 *   INT8   three planes over all units: 16 bytes of values 0..15, 16 bytes of values 16..31, then
 *          {f32 scale, two i16 sums of 16} per unit, so that a warp's 16-byte loads are contiguous
 *   DIGITS the same with six planes, those of the high digits first, and no sums
 *   TILE   bf16, part stride pad64(n_col) */
struct ds4_packed {
    const uint8_t *data;
    int64_t row_bytes;
    int32_t part; /* values (units for INT8, DIGITS) between the parts of a row */
};

/* y[z][slot][part * n_row + r] = W[z][part or expert][r] . x[src[slot]][part], z < n_w.
 * Dense: group NULL, n slots, n_part parts.  Experts: group [n_part], slots from the groups. */
struct ds4_product {
    enum ds4_dtype dtype;
    const uint8_t *w[2];
    int32_t n_w;
    size_t row_bytes;
    size_t part_bytes; /* between the matrices of parts or experts */
    int32_t n_row;     /* of one part */
    int32_t n_col;
    int32_t n_part;
    struct ds4_packed x;
    int32_t n; /* dense: slots; experts: an upper bound of all slots */
    const struct ds4_dev_group *group;
    const int32_t *src; /* slot -> packed row; NULL: the slot itself */
    float *y[2];
    int64_t y_stride;
    /* Streaming kernels, dense, n_w 2: rows and stride of the second matrix; 0: as the first. */
    int32_t n_row2;
    int64_t y_stride2;
};

static __host__ __device__ __forceinline__ int32_t ds4_product_rows(const struct ds4_product &p,
                                                                    int z)
{
    return z == 1 && p.n_row2 != 0 ? p.n_row2 : p.n_row;
}

static __device__ __forceinline__ int64_t ds4_product_stride(const struct ds4_product &p, int z)
{
    return z == 1 && p.y_stride2 != 0 ? p.y_stride2 : p.y_stride;
}

/* Rows up to which a dense product streams the stored weights. */
#define DS4_GEMV_MAX_ROWS 16

static inline int32_t ds4_pad(int32_t n, int32_t to)
{
    return (n + to - 1) / to * to;
}

/* The kernel for n slots of `dtype`; a function of these alone. */
enum ds4_form ds4_cuda_form(enum ds4_dtype dtype, int32_t n, int32_t n_stream, bool exact);

/* Bytes of n packed rows in the largest form. */
size_t ds4_cuda_packed_bytes(int64_t n, int32_t n_part, int32_t n_col);

/* Packs n rows of x (n_part * n_col values) into dst.  EXACT returns x itself where it fits. */
struct ds4_packed ds4_cuda_pack(struct ds4_device *dev, enum ds4_form form, struct ds4_dev_mat x,
                                int32_t n, int32_t n_part, int32_t n_col, void *dst);

/* Layout of n_part * n_col values in `form` at dst, without packing anything. */
struct ds4_packed ds4_cuda_packed_at(enum ds4_form form, int32_t n_part, int32_t n_col,
                                     const void *dst);

/* Runs p in the form its inputs were packed for.  Dense TILE products of many rows go through cuBLAS
 * and carve room for bf16 weights from scratch behind *used. */
void ds4_cuda_product(struct ds4_device *dev, enum ds4_form form, const struct ds4_product *p,
                      size_t used);

/* What a dense product of many rows carves. */
#define DS4_WEIGHT_ROOM ((size_t)64 << 20)
#define DS4_BLAS_ROOM   ((size_t)32 << 20)

/* w as bf16 or f32 rows of `stride` values, zeros behind n_col. */
void ds4_cuda_dequant(struct ds4_device *dev, enum ds4_dtype dtype, const uint8_t *w,
                      size_t row_bytes, int32_t n_row, int32_t n_col, int32_t stride, bool bf16,
                      void *dst);

/* ---- kernels, one instance file per format ------------------------------------------------------ */

typedef void (*ds4_product_fn)(struct ds4_device *dev, const struct ds4_product *p);

#define DS4_PRODUCT_FNS(X)                                                                         \
    X(f32, DS4_DTYPE_F32)                                                                          \
    X(f16, DS4_DTYPE_F16)                                                                          \
    X(bf16, DS4_DTYPE_BF16)                                                                        \
    X(q8_0, DS4_DTYPE_Q8_0)                                                                        \
    X(q4_0, DS4_DTYPE_Q4_0)                                                                        \
    X(q2_k, DS4_DTYPE_Q2_K)                                                                        \
    X(q3_k, DS4_DTYPE_Q3_K)                                                                        \
    X(q4_k, DS4_DTYPE_Q4_K)                                                                        \
    X(q5_k, DS4_DTYPE_Q5_K)                                                                        \
    X(q6_k, DS4_DTYPE_Q6_K)                                                                        \
    X(iq2_xxs, DS4_DTYPE_IQ2_XXS)                                                                  \
    X(mxfp4, DS4_DTYPE_MXFP4)
#define DS4_DECLARE(name, dtype)                                                                   \
    void ds4_cuda_exact_##name(struct ds4_device *dev, const struct ds4_product *p);               \
    void ds4_cuda_tile_##name(struct ds4_device *dev, const struct ds4_product *p);
DS4_PRODUCT_FNS(DS4_DECLARE)
#undef DS4_DECLARE
void ds4_cuda_digits_q8_0(struct ds4_device *dev, const struct ds4_product *p);
void ds4_cuda_int8_q8_0(struct ds4_device *dev, const struct ds4_product *p);
void ds4_cuda_int8_q2_k(struct ds4_device *dev, const struct ds4_product *p);
void ds4_cuda_int8_q4_k(struct ds4_device *dev, const struct ds4_product *p);
void ds4_cuda_int8_iq2_xxs(struct ds4_device *dev, const struct ds4_product *p);
void ds4_cuda_int8_mxfp4(struct ds4_device *dev, const struct ds4_product *p);

#endif

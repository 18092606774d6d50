/* The inner loops of the CPU backend, once per instruction set.
 *
 * simd_body.h is compiled three times (simd_scalar.c, simd_avx2.c, simd_avx512.c) into three of these
 * tables.  All tables give the same bits: every reduction runs in DS4_LANES lanes (element i adds to
 * lane i % 16, in rising i), products and sums are rounded separately, and the lanes are combined as
 * the tree 16 -> 8 -> 4 -> 2 -> 1 (lane i += lane i + half).  An element that is not there adds +0.
 *
 * Pointers need no alignment.  No function allocates or keeps state. */
#ifndef DS4_KERNELS_CPU_SIMD_H
#define DS4_KERNELS_CPU_SIMD_H

#include "common/choices.h"
#include "common/dtype.h"

#include <stddef.h>
#include <stdint.h>

#define DS4_LANES 16

/* Activations as int8 blocks (fast products): by 32 for Q8_0, Q4_0 and MXFP4 weights, by 256 for the
 * K-quants and IQ2_XXS.  value = d * q; bsum[k] is the sum of q[16k .. 16k + 15]. */
struct ds4_act32 {
    float d;
    int8_t q[32];
};
struct ds4_act256 {
    float d;
    int8_t q[256];
    int16_t bsum[16];
};

/* Some rows of a weight matrix, row_bytes apart. */
#define DS4_TILE_ROWS 16
struct ds4_rows {
    enum ds4_dtype dtype;
    const uint8_t *data;
    size_t row_bytes;
    int32_t n_row; /* <= DS4_TILE_ROWS */
    int32_t n_col;
};

/* Inputs that share the decoding of a weight. */
#define DS4_TILE_INPUTS 16

struct ds4_simd {
    const char *name; /* "scalar" | "avx2" | "avx512" */

    /* out[i] = value i of a row of n values stored as `dtype`. */
    void (*dequant)(enum ds4_dtype dtype, const void *row, int32_t n, float *out);

    /* out[t] = sum_i a[i] * x[t * x_stride + i] for t < n_x, i < n. */
    void (*dot)(const float *a, int32_t n, const float *x, int64_t x_stride, int32_t n_x,
                float *out);

    /* acc[i] += coef[t] * x[t * x_stride + i], t = 0, 1, .. n_x - 1 one after the other. */
    void (*axpy)(float *acc, int32_t n, const float *x, int64_t x_stride, const float *coef,
                 int32_t n_x);

    /* y[i] = w[i] * (x[i] * r), or x[i] * r when w is NULL. */
    void (*scale)(const float *x, float r, const float *w, int32_t n, float *y);

    /* The largest of z[0..n); NaNs are passed over; -inf when there is nothing else. */
    float (*max)(const float *z, int32_t n);

    /* z[i] = e^(z[i] - top); returns the sum. */
    float (*exp_sum)(float *z, int32_t n, float top);

    /* One candidate of a softmax per dimension: e = e^(g - top); sum += e; acc += e * k. */
    void (*pool)(const float *g, const float *k, const float *top, int32_t n, float *sum,
                 float *acc);

    /* out[t][r] = row r times input t < n_x <= DS4_TILE_INPUTS.  product: x[t] points to n_col f32
     * values, a row is dequantised and added like any sum.  product_act: x[t] points to the n_col / 32
     * or n_col / 256 activation blocks of the weight's kind; block b adds to lane b % 16. */
    void (*product)(const struct ds4_rows *w, const void *const *x, int32_t n_x,
                    float (*out)[DS4_TILE_ROWS]);
    void (*product_act)(const struct ds4_rows *w, const void *const *x, int32_t n_x,
                        float (*out)[DS4_TILE_ROWS]);
};

/* The table of an instruction set, DS4_ISA_AUTO = the best this machine has; NULL if it lacks it. */
const struct ds4_simd *ds4_simd_find(enum ds4_isa isa);

#endif

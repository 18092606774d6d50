/* A view of numbers in device memory; never ownership.
 *
 * shape[0] is the outermost (slowest) dimension; stride is in elements, the innermost stride is 1.
 * Quantised weights are described by struct ds4_weight instead: their rows are block arrays without a
 * per-element address. */
#ifndef DS4_KERNELS_TENSOR_H
#define DS4_KERNELS_TENSOR_H

#include "common/dtype.h"

#include <stddef.h>
#include <stdint.h>

struct ds4_tensor {
    void *data;
    enum ds4_dtype dtype;
    int32_t n_dim;
    int32_t shape[4];
    int64_t stride[4];
};

/* A weight matrix [n_stack, n_row, n_col] as stored in the model file: row-major, each row an array
 * of blocks of `dtype`.  n_stack is 1 but for expert stacks.  y = W x maps n_col inputs to n_row
 * outputs.  Borrows its bytes. */
struct ds4_weight {
    const void *data;
    enum ds4_dtype dtype;
    int32_t n_stack;
    int32_t n_row;
    int32_t n_col;
    size_t row_bytes;
};

/* Dense views over contiguous memory. */
static inline struct ds4_tensor ds4_tensor_2d(void *data, enum ds4_dtype dtype, int32_t n,
                                              int32_t d)
{
    struct ds4_tensor t = {data, dtype, 2, {n, d}, {d, 1}};
    return t;
}

static inline struct ds4_tensor ds4_tensor_3d(void *data, enum ds4_dtype dtype, int32_t n,
                                              int32_t m, int32_t d)
{
    struct ds4_tensor t = {data, dtype, 3, {n, m, d}, {(int64_t)m * d, d, 1}};
    return t;
}

#endif

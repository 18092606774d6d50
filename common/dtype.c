/* The table behind common/dtype.h.
 *
 * One row per format that a kernel can read or write; ids and sizes are those of ggml, which defines
 * the file format.  Formats that only occur in foreign files have a size table in common/gguf.c and no
 * dtype: nothing in the product computes with them. */
#include "common/dtype.h"

#include <stddef.h>

static const struct ds4_dtype_info table[DS4_N_DTYPES] = {
    [DS4_DTYPE_F32] = {"F32", 0, 1, 4},
    [DS4_DTYPE_F16] = {"F16", 1, 1, 2},
    [DS4_DTYPE_BF16] = {"BF16", 30, 1, 2},
    [DS4_DTYPE_I8] = {"I8", 24, 1, 1},
    [DS4_DTYPE_I32] = {"I32", 26, 1, 4},
    [DS4_DTYPE_Q8_0] = {"Q8_0", 8, 32, 34},
    [DS4_DTYPE_Q4_0] = {"Q4_0", 2, 32, 18},
    [DS4_DTYPE_Q2_K] = {"Q2_K", 10, 256, 84},
    [DS4_DTYPE_Q3_K] = {"Q3_K", 11, 256, 110},
    [DS4_DTYPE_Q4_K] = {"Q4_K", 12, 256, 144},
    [DS4_DTYPE_Q5_K] = {"Q5_K", 13, 256, 176},
    [DS4_DTYPE_Q6_K] = {"Q6_K", 14, 256, 210},
    [DS4_DTYPE_IQ2_XXS] = {"IQ2_XXS", 16, 256, 66},
    [DS4_DTYPE_MXFP4] = {"MXFP4", 39, 32, 17},
};

const struct ds4_dtype_info *ds4_dtype_info(enum ds4_dtype dtype)
{
    return &table[dtype];
}

const char *ds4_dtype_name(enum ds4_dtype dtype)
{
    return (unsigned int)dtype < DS4_N_DTYPES ? table[dtype].name : "?";
}

int ds4_dtype_from_gguf(uint32_t gguf_type, enum ds4_dtype *out)
{
    for (int i = 0; i < DS4_N_DTYPES; i++) {
        if (table[i].gguf_type == gguf_type) {
            *out = (enum ds4_dtype)i;
            return 0;
        }
    }
    return -1;
}

int ds4_dtype_row_bytes(enum ds4_dtype dtype, int64_t n, size_t *out, struct ds4_err *err)
{
    const struct ds4_dtype_info *info = &table[dtype];

    if (n <= 0 || n % info->block_elems != 0)
        return ds4_fail(err, DS4_E_INVALID,
                        "a row of %lld values is no multiple of %s's block of %d", (long long)n,
                        info->name, info->block_elems);
    return ds4_mul_size((size_t)(n / info->block_elems), (size_t)info->block_bytes, "row bytes",
                        out, err);
}

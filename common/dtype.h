/* Number formats of weights and caches: names, block sizes, and exact host conversion of scalars.
 *
 * A row of n values of a dtype is n / block_elems blocks of block_bytes, without padding.  Whole blocks
 * are decoded by the kernels; here are only sizes and the scalar formats.  All conversions work on bits,
 * so they give the same result on every machine; "RNE" is round to nearest, ties to even. */
#ifndef DS4_COMMON_DTYPE_H
#define DS4_COMMON_DTYPE_H

#include "common/err.h"

#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

enum ds4_dtype {
    DS4_DTYPE_F32,
    DS4_DTYPE_F16,
    DS4_DTYPE_BF16,
    DS4_DTYPE_I8,
    DS4_DTYPE_I32,
    DS4_DTYPE_Q8_0,
    DS4_DTYPE_Q4_0,
    DS4_DTYPE_Q2_K,
    DS4_DTYPE_Q3_K,
    DS4_DTYPE_Q4_K,
    DS4_DTYPE_Q5_K,
    DS4_DTYPE_Q6_K,
    DS4_DTYPE_IQ2_XXS,
    DS4_DTYPE_MXFP4,
    DS4_N_DTYPES
};

struct ds4_dtype_info {
    const char *name;    /* "Q8_0" */
    uint32_t gguf_type;  /* id in GGUF files */
    int32_t block_elems; /* 1 for scalars */
    int32_t block_bytes;
};

/* The table's row; dtype must be below DS4_N_DTYPES. */
const struct ds4_dtype_info *ds4_dtype_info(enum ds4_dtype dtype);

/* The name, or "?" for a value outside the table. */
const char *ds4_dtype_name(enum ds4_dtype dtype);

/* The dtype of a GGUF type id; 0 or -1 (not one of ours). */
int ds4_dtype_from_gguf(uint32_t gguf_type, enum ds4_dtype *out);

/* Bytes of one row of n values.  -1 with DS4_E_INVALID if n is no positive multiple of the block or
 * the size overflows. */
int ds4_dtype_row_bytes(enum ds4_dtype dtype, int64_t n, size_t *out,
                        struct ds4_err *err) DS4_MUST_CHECK;

/* ---- bits ------------------------------------------------------------------------------------- */

static inline uint32_t ds4_bits_from_f32(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static inline float ds4_f32_from_bits(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof(x));
    return x;
}

/* Shifts right and rounds to nearest even; 1 <= shift <= 31. */
static inline uint32_t ds4_shift_rne(uint32_t value, uint32_t shift)
{
    uint32_t half = UINT32_C(1) << (shift - 1);
    uint32_t rest = value & ((UINT32_C(1) << shift) - 1);
    uint32_t kept = value >> shift;

    return kept + (rest > half || (rest == half && (kept & 1) != 0));
}

/* ---- bf16: the upper half of an f32 ------------------------------------------------------------ */

static inline float ds4_f32_from_bf16(uint16_t x)
{
    return ds4_f32_from_bits((uint32_t)x << 16);
}

/* RNE; overflow gives infinity; a NaN stays one (quiet). */
static inline uint16_t ds4_bf16_from_f32(float x)
{
    uint32_t bits = ds4_bits_from_f32(x);

    if ((bits & UINT32_C(0x7fffffff)) > UINT32_C(0x7f800000))
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* ---- f16: sign 1, exponent 5 (bias 15), fraction 10 --------------------------------------------- */

static inline float ds4_f32_from_f16(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000) << 16;
    uint32_t rest = x & 0x7fff;

    if (rest >= 0x7c00) /* infinity, NaN */
        return ds4_f32_from_bits(sign | UINT32_C(0x7f800000) | (rest & 0x3ff) << 13);
    if (rest < 0x400) /* zero, subnormal: rest * 2^-24 is exact */
        return ds4_f32_from_bits(sign | ds4_bits_from_f32((float)rest * 0x1p-24f));
    return ds4_f32_from_bits(sign | (rest + ((127 - 15) << 10)) << 13);
}

/* RNE with subnormals; from 65520 on infinity; a NaN stays one (quiet). */
static inline uint16_t ds4_f16_from_f32(float x)
{
    uint32_t bits = ds4_bits_from_f32(x);
    uint32_t sign = bits >> 16 & 0x8000;
    uint32_t mag = bits & UINT32_C(0x7fffffff);
    uint32_t exponent = mag >> 23;

    if (mag > UINT32_C(0x7f800000))
        return (uint16_t)(sign | 0x7e00 | (mag >> 13 & 0x3ff));
    if (mag >= UINT32_C(0x477ff000)) /* 65520: rounds past the largest f16 */
        return (uint16_t)(sign | 0x7c00);
    if (exponent >
        127 - 15) /* normal: a carry out of the fraction steps the exponent, as it should */
        return (uint16_t)(sign | ds4_shift_rne(mag - ((127 - 15) << 23), 13));
    if (exponent < 127 - 25) /* below half of the smallest subnormal */
        return (uint16_t)sign;
    return (uint16_t)(sign | ds4_shift_rne((mag & 0x7fffff) | 0x800000, 126 - exponent));
}

/* ---- e4m3fn: sign 1, exponent 4 (bias 7), fraction 3; no infinity, 0x7f and 0xff are NaN ---------- */

#define DS4_E4M3_MAX 448.0f

static inline float ds4_f32_from_e4m3(uint8_t x)
{
    uint32_t sign = (uint32_t)(x & 0x80) << 24;
    uint32_t rest = x & 0x7f;

    if (rest == 0x7f)
        return ds4_f32_from_bits(sign | UINT32_C(0x7fc00000));
    if (rest < 8)
        return ds4_f32_from_bits(sign | ds4_bits_from_f32((float)rest * 0x1p-9f));
    return ds4_f32_from_bits(sign | (rest + ((127 - 7) << 3)) << 20);
}

/* RNE with subnormals; magnitudes above 448 (infinity too) saturate to 448, as the checkpoint's
 * quantiser clamps before it casts; NaN gives NaN. */
static inline uint8_t ds4_e4m3_from_f32(float x)
{
    uint32_t bits = ds4_bits_from_f32(x);
    uint32_t sign = bits >> 24 & 0x80;
    uint32_t mag = bits & UINT32_C(0x7fffffff);
    uint32_t exponent = mag >> 23;

    if (mag > UINT32_C(0x7f800000))
        return (uint8_t)(sign | 0x7f);
    if (mag >= UINT32_C(0x43e00000)) /* 448 */
        return (uint8_t)(sign | 0x7e);
    if (exponent > 127 - 7)
        return (uint8_t)(sign | ds4_shift_rne(mag - ((127 - 7) << 23), 20));
    if (exponent < 127 - 10)
        return (uint8_t)sign;
    return (uint8_t)(sign | ds4_shift_rne((mag & 0x7fffff) | 0x800000, 141 - exponent));
}

/* ---- e8m0: a power of two, 2^(x - 127); 255 is NaN ----------------------------------------------- */

static inline float ds4_f32_from_e8m0(uint8_t x)
{
    if (x == 0) /* 2^-127 is subnormal */
        return ds4_f32_from_bits(UINT32_C(0x00400000));
    if (x == 0xff)
        return ds4_f32_from_bits(UINT32_C(0x7fc00000));
    return ds4_f32_from_bits((uint32_t)x << 23);
}

/* The smallest power of two that is not below x: block scales are rounded up so that no value of the
 * block leaves the range.  x <= 2^-127 (zero and negative too) gives 0; above 2^127 and NaN give 255. */
static inline uint8_t ds4_e8m0_from_f32(float x)
{
    uint32_t bits = ds4_bits_from_f32(x);

    if ((bits & UINT32_C(0x7fffffff)) > UINT32_C(0x7f800000))
        return 0xff;
    if ((bits & UINT32_C(0x80000000)) != 0 || bits <= UINT32_C(0x00400000))
        return 0;
    return (uint8_t)((bits + 0x7fffff) >> 23);
}

/* ---- e2m1: sign 1, exponent 2 (bias 1), fraction 1: 0 .5 1 1.5 2 3 4 6 --------------------------- */

#define DS4_E2M1_MAX 6.0f

/* Code in the low four bits; the others are ignored. */
static inline float ds4_f32_from_e2m1(uint8_t x)
{
    uint32_t sign = (uint32_t)(x & 8) << 28;
    uint32_t rest = x & 7;

    if (rest < 2)
        return ds4_f32_from_bits(sign | (rest != 0 ? UINT32_C(0x3f000000) : 0));
    return ds4_f32_from_bits(sign | (rest + ((127 - 1) << 1)) << 22);
}

/* RNE (a tie takes the even code); magnitudes above 6 saturate; there is no NaN code: NaN gives 6 with
 * its sign, so callers check for it before. */
static inline uint8_t ds4_e2m1_from_f32(float x)
{
    uint32_t bits = ds4_bits_from_f32(x);
    uint32_t sign = bits >> 28 & 8;
    uint32_t mag = bits & UINT32_C(0x7fffffff);
    uint32_t exponent = mag >> 23;

    if (mag >= UINT32_C(0x40c00000)) /* 6 */
        return (uint8_t)(sign | 7);
    if (exponent > 127 - 1)
        return (uint8_t)(sign | ds4_shift_rne(mag - ((127 - 1) << 23), 22));
    if (exponent < 127 - 2)
        return (uint8_t)sign;
    return (uint8_t)(sign | ds4_shift_rne((mag & 0x7fffff) | 0x800000, 149 - exponent));
}

#ifdef __cplusplus
}
#endif

#endif

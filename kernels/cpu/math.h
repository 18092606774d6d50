/* exp, log1p, sine, cosine, sigmoid and softplus as fixed sequences of IEEE operations.
 *
 * libm's results differ between versions and between its own instruction-set variants; these do not:
 * only +, -, *, /, square root, comparisons and bit moves, no fused multiply-add
 * (-ffp-contract=off), no table, no branch on the data, so that a compiler may vectorise a loop over
 * them without changing a bit.  Bounds are measured by tests/kernels/test_math.c. */
#ifndef DS4_KERNELS_CPU_MATH_H
#define DS4_KERNELS_CPU_MATH_H

#include "common/dtype.h"

#include <math.h>
#include <stdint.h>

/* Adding and subtracting 1.5 * 2^23 (2^52) rounds to the nearest integer, ties to even, and leaves
 * that integer in the low bits of the sum. */
#define DS4_ROUND_MAGIC_F 0x1.8p23f
#define DS4_ROUND_MAGIC_D 0x1.8p52

static inline float ds4_rint_f32(float x)
{
    return (x + DS4_ROUND_MAGIC_F) - DS4_ROUND_MAGIC_F; /* |x| < 2^22 */
}

/* e^x, at most 1.5 ulp; 0 below -104, infinity above 88.73, NaN for NaN. */
static inline float ds4_expf(float x)
{
    /* ln 2 in two parts: the first has 16 bits, so n * DS4_LN2_HI is exact. */
    const float ln2_hi = 0x1.62e4p-1f, ln2_lo = 0x1.7f7d1cp-20f, log2e = 0x1.715476p0f;
    float bounded = x < -110.0f ? -110.0f : x;
    float shifted, n, r, p;
    uint32_t k, half;

    bounded = bounded > 100.0f ? 100.0f : bounded; /* a NaN passes both */
    shifted = bounded * log2e + DS4_ROUND_MAGIC_F;
    n = shifted - DS4_ROUND_MAGIC_F;
    r = (bounded - n * ln2_hi) - n * ln2_lo; /* |r| <= 0.3466 */
    p = 0x1.a01a02p-13f * r + 0x1.6c16c2p-10f;
    p = p * r + 0x1.111112p-7f;
    p = p * r + 0x1.555556p-5f;
    p = p * r + 0x1.555556p-3f;
    p = p * r + 0.5f;
    p = (p * r) * r + r;
    p = p + 1.0f;
    /* 2^k as two factors: k from -159 to 144 leaves the range of one. */
    k = ds4_bits_from_f32(shifted) - ds4_bits_from_f32(DS4_ROUND_MAGIC_F);
    half = (uint32_t)((int32_t)k >> 1);
    p = p * ds4_f32_from_bits((half + 127) << 23);
    return p * ds4_f32_from_bits((k - half + 127) << 23);
}

/* log(1 + y) for 0 <= y <= 1 (NaN for NaN), at most 2 ulp. */
static inline float ds4_log1p_unit(float y)
{
    /* u = 1 + y loses the low part of y; rest / u puts it back.  For u above sqrt 2 halve the
     * argument: log u = log(u / 2) + log 2. */
    float u = 1.0f + y;
    float rest = y - (u - 1.0f);
    int big = u > 0x1.6a09e6p0f;
    float f = big ? u * 0.5f - 1.0f : u - 1.0f; /* exact; |f| <= 0.4143 */
    float s = f / (2.0f + f);
    float z = s * s;
    /* log((1 + s) / (1 - s)) = 2s + s^3 (2/3 + 2/5 z + 2/7 z^2 + ...) */
    float p = 0x1.3b13b2p-3f * z + 0x1.745d18p-3f;
    float half_square = (0.5f * f) * f;

    p = p * z + 0x1.c71c72p-3f;
    p = p * z + 0x1.24924ap-2f;
    p = p * z + 0x1.99999ap-2f;
    p = p * z + 0x1.555556p-1f;
    p = p * z;
    /* f - (f^2 / 2 - s (f^2 / 2 + p)) keeps the leading term exact. */
    p = half_square - (s * (half_square + p) + rest / u);
    return big ? 0x1.62e4p-1f + (f - (p - 0x1.7f7d1cp-20f)) : f - p;
}

static inline float ds4_sigmoid(float x)
{
    return 1.0f / (1.0f + ds4_expf(-x));
}

/* x * sigmoid(x) */
static inline float ds4_silu(float x)
{
    return x / (1.0f + ds4_expf(-x));
}

/* log(1 + e^x) without overflow: max(x, 0) + log1p(e^-|x|). */
static inline float ds4_softplus(float x)
{
    float magnitude = x < 0.0f ? -x : x;
    float positive = x > 0.0f ? x : 0.0f;

    return positive + ds4_log1p_unit(ds4_expf(-magnitude));
}

/* Sine and cosine of an f32 angle: reduction by pi/2 in three parts of 33 bits and polynomials in
 * double, one rounding at the end; below 0.51 ulp of f32 for |x| < 1.6e6 (positions go to 2^20 and the
 * largest frequency is 1).  Infinite or NaN angles give NaN. */
static inline void ds4_sincosf(float angle, float *sine, float *cosine)
{
    const double two_over_pi = 0x1.45f306dc9c883p-1;
    const double part_1 = 0x1.921fb544p0, part_2 = 0x1.0b4611a6p-34, part_3 = 0x1.3198a2e037073p-69;
    double x = (double)angle;
    double shifted = x * two_over_pi + DS4_ROUND_MAGIC_D;
    double n = shifted - DS4_ROUND_MAGIC_D;
    double r = ((x - n * part_1) - n * part_2) - n * part_3;
    double z = r * r;
    double s, c;
    uint64_t bits;

    s = -0x1.ae64567f544e4p-26 + z * 0x1.6124613a86d09p-33; /* 1/11!, 1/13! */
    s = 0x1.71de3a556c734p-19 + z * s;
    s = -0x1.a01a01a01a01ap-13 + z * s;
    s = 0x1.1111111111111p-7 + z * s;
    s = -0x1.5555555555555p-3 + z * s;
    s = r + (r * z) * s;
    c = -0x1.93974a8c07c9dp-37 + z * 0x1.ae7f3e733b81fp-45; /* 1/14!, 1/16! */
    c = 0x1.1eed8eff8d898p-29 + z * c;
    c = -0x1.27e4fb7789f5cp-22 + z * c;
    c = 0x1.a01a01a01a01ap-16 + z * c;
    c = -0x1.6c16c16c16c17p-10 + z * c;
    c = 0x1.5555555555555p-5 + z * c;
    c = 1.0 - (0.5 * z - (z * z) * c);
    memcpy(&bits, &shifted, sizeof(bits));
    switch (bits & 3) {
    case 0:
        *sine = (float)s;
        *cosine = (float)c;
        break;
    case 1:
        *sine = (float)c;
        *cosine = (float)-s;
        break;
    case 2:
        *sine = (float)-s;
        *cosine = (float)-c;
        break;
    default:
        *sine = (float)-c;
        *cosine = (float)s;
        break;
    }
}

#endif

/* Weight blocks for the product kernels, in units of 32 consecutive values.
 *
 * Every quantised format is read as eight words of four int8 values with one scale (and minimum) per 16
 * or 32: value = s * q - m, in the grouping of the CPU's decoder, so the values are its values bit for
 * bit.  Bytes come through a "span": aligned words behind an arbitrary byte address, because block
 * strides of 17, 34, 66 bytes align nothing.  One reader per format serves the f32 product, the int8
 * product, the bf16 tiles and the dequantiser; the compiler shares what neighbouring words have in
 * common. */
#ifndef DS4_KERNELS_CUDA_UNIT_CUH
#define DS4_KERNELS_CUDA_UNIT_CUH

#include "kernels/cuda/dequant.cuh"

#define DS4_UNIT 32

/* Bytes staged in shared memory; up to four bytes behind the last may be read (and are ignored). */
struct ds4_shared_span {
    const uint32_t *word;
    uint32_t at;
    const uint64_t *grid; /* IQ2_XXS */

    __device__ __forceinline__ uint32_t u32(uint32_t o) const
    {
        uint32_t a = at + o;

        return __funnelshift_r(word[a >> 2], word[(a >> 2) + 1], (a & 3) * 8);
    }
    __device__ __forceinline__ uint32_t u16(uint32_t o) const
    {
        return u32(o) & 0xffff;
    }
    __device__ __forceinline__ uint32_t u8(uint32_t o) const
    {
        return ((const uint8_t *)word)[at + o];
    }
};

/* Bytes in global memory; no word is touched that holds none of the bytes asked for. */
struct ds4_global_span {
    const uint32_t *word;
    uint32_t at;
    const uint64_t *grid;

    __device__ __forceinline__ uint32_t wide(uint32_t o, uint32_t last) const
    {
        uint32_t a = at + o;

        return __funnelshift_r(__ldg(word + (a >> 2)), __ldg(word + ((a + last) >> 2)),
                               (a & 3) * 8);
    }
    __device__ __forceinline__ uint32_t u32(uint32_t o) const
    {
        return wide(o, 3);
    }
    __device__ __forceinline__ uint32_t u16(uint32_t o) const
    {
        return wide(o, 1) & 0xffff;
    }
    __device__ __forceinline__ uint32_t u8(uint32_t o) const
    {
        return __ldg((const uint8_t *)word + at + o);
    }
};

static __device__ __forceinline__ struct ds4_global_span ds4_span_of(const uint8_t *p)
{
    uint32_t at = (uint32_t)((uintptr_t)p & 3);
    struct ds4_global_span s = {(const uint32_t *)(p - at), at, ds4_dev_iq2.vector};

    return s;
}

/* ---- sizes ------------------------------------------------------------------------------------- */

__host__ __device__ constexpr int ds4_block_elems(int dtype)
{
    return dtype == DS4_DTYPE_F32 || dtype == DS4_DTYPE_F16 || dtype == DS4_DTYPE_BF16      ? 1
           : dtype == DS4_DTYPE_Q8_0 || dtype == DS4_DTYPE_Q4_0 || dtype == DS4_DTYPE_MXFP4 ? 32
                                                                                            : 256;
}

__host__ __device__ constexpr int ds4_block_bytes(int dtype)
{
    return dtype == DS4_DTYPE_F32                              ? 4
           : dtype == DS4_DTYPE_F16 || dtype == DS4_DTYPE_BF16 ? 2
           : dtype == DS4_DTYPE_Q8_0                           ? 34
           : dtype == DS4_DTYPE_Q4_0                           ? 18
           : dtype == DS4_DTYPE_MXFP4                          ? 17
           : dtype == DS4_DTYPE_Q2_K                           ? 84
           : dtype == DS4_DTYPE_Q3_K                           ? 110
           : dtype == DS4_DTYPE_Q4_K                           ? 144
           : dtype == DS4_DTYPE_Q5_K                           ? 176
           : dtype == DS4_DTYPE_Q6_K                           ? 210
                                                               : 66; /* IQ2_XXS */
}

__host__ __device__ constexpr bool ds4_is_scalar(int dtype)
{
    return ds4_block_elems(dtype) == 1;
}

/* Two scales per unit (16 values each) or one. */
__host__ __device__ constexpr bool ds4_has_halves(int dtype)
{
    return dtype == DS4_DTYPE_Q2_K || dtype == DS4_DTYPE_Q3_K || dtype == DS4_DTYPE_Q6_K;
}

__host__ __device__ constexpr bool ds4_has_min(int dtype)
{
    return dtype == DS4_DTYPE_Q2_K || dtype == DS4_DTYPE_Q4_K || dtype == DS4_DTYPE_Q5_K;
}

/* ---- int8 words ------------------------------------------------------------------------------------ */

/* Per byte v - bias, for bytes below 128 that hold v: the borrow stops at bit 7. */
static __device__ __forceinline__ uint32_t ds4_sub4(uint32_t v, uint32_t bias)
{
    return ((v | 0x80808080u) - bias) ^ 0x80808080u;
}

static __device__ __forceinline__ float ds4_f16_of(uint32_t bits)
{
    return __half2float(__ushort_as_half((unsigned short)bits));
}

/* Sixteen-entry byte table, doubled e2m1 values, at the four low (or high) nibbles of q. */
static __device__ __forceinline__ uint32_t ds4_fp4_word(uint32_t q, bool high)
{
    uint32_t side = 0x32103210u | (q & 0x88888888u) >> 1, index = q & 0x77777777u, part[2];

#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t plus = __byte_perm(0x03020100u, 0x0c080604u, index >> 16 * i);
        uint32_t minus = __byte_perm(0xfdfeff00u, 0xf4f8fafcu, index >> 16 * i);

        part[i] = __byte_perm(plus, minus, side >> 16 * i);
    }
    return __byte_perm(part[0], part[1], high ? 0x7531 : 0x6420);
}

/* Four signed bytes of the IQ2_XXS vector: bit k of sign negates byte k.  No byte is zero, so the sum
 * carries nowhere. */
static __device__ __forceinline__ uint32_t ds4_iq2_word(uint32_t bytes, uint32_t sign)
{
    uint32_t one = sign * 0x00204081u & 0x01010101u;

    return (bytes ^ one * 0xff) + one;
}

/* Values 4j .. 4j + 3 of unit u as int8. */
template <int D, class S>
static __device__ __forceinline__ uint32_t ds4_unit_word(const S &b, uint32_t u, uint32_t j)
{
    const uint32_t v = u % 8, h = v / 4, s = v % 4, super = u / 8 * ds4_block_bytes(D);

    if (D == DS4_DTYPE_Q8_0)
        return b.u32(34 * u + 2 + 4 * j);
    if (D == DS4_DTYPE_Q4_0)
        return ds4_sub4(b.u32(18 * u + 2 + 4 * (j % 4)) >> (j < 4 ? 0 : 4) & 0x0f0f0f0fu,
                        0x08080808u);
    if (D == DS4_DTYPE_MXFP4)
        return ds4_fp4_word(b.u32(17 * u + 1 + 4 * (j % 4)), j >= 4);
    if (D == DS4_DTYPE_Q2_K)
        return b.u32(super + 16 + 32 * h + 4 * j) >> 2 * s & 0x03030303u;
    if (D == DS4_DTYPE_Q3_K) {
        uint32_t high = b.u32(super + 4 * j) >> v & 0x01010101u;
        uint32_t low = b.u32(super + 32 + 32 * h + 4 * j) >> 2 * s & 0x03030303u;

        return ds4_sub4(low | high << 2, 0x04040404u);
    }
    if (D == DS4_DTYPE_Q4_K)
        return b.u32(super + 16 + 32 * (v / 2) + 4 * j) >> 4 * (v & 1) & 0x0f0f0f0fu;
    if (D == DS4_DTYPE_Q5_K) {
        uint32_t high = b.u32(super + 16 + 4 * j) >> v & 0x01010101u;

        return (b.u32(super + 48 + 32 * (v / 2) + 4 * j) >> 4 * (v & 1) & 0x0f0f0f0fu) | high << 4;
    }
    if (D == DS4_DTYPE_Q6_K) {
        uint32_t low = b.u32(super + 64 * h + 32 * (s & 1) + 4 * j) >> 4 * (s >> 1) & 0x0f0f0f0fu;
        uint32_t high = b.u32(super + 128 + 32 * h + 4 * j) >> 2 * s & 0x03030303u;

        return ds4_sub4(low | high << 4, 0x20202020u);
    }
    if (D == DS4_DTYPE_IQ2_XXS) {
        uint32_t index = b.u32(super + 2 + 8 * v) >> 8 * (j / 2) & 255;
        uint32_t sign = b.u32(super + 6 + 8 * v) >> 7 * (j / 2) & 127;

        sign |= (uint32_t)(__popc(sign) & 1) << 7;
        return ds4_iq2_word(((const uint32_t *)b.grid)[2 * index + j % 2],
                            sign >> 4 * (j % 2) & 15);
    }
    return 0;
}

/* Scale and minimum of one half (values 16 half .. 16 half + 15) of unit u. */
template <int D, class S>
static __device__ __forceinline__ void ds4_unit_scale(const S &b, uint32_t u, uint32_t half,
                                                      float *scale, float *min)
{
    const uint32_t v = u % 8, super = u / 8 * ds4_block_bytes(D), g = 2 * v + half;

    *min = 0.0f;
    if (D == DS4_DTYPE_Q8_0)
        *scale = ds4_f16_of(b.u16(34 * u));
    if (D == DS4_DTYPE_Q4_0)
        *scale = ds4_f16_of(b.u16(18 * u));
    if (D == DS4_DTYPE_MXFP4) {
        uint32_t e = b.u8(17 * u);

        *scale = ds4_bits_f32(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    }
    if (D == DS4_DTYPE_Q2_K) {
        uint32_t d = b.u32(super + 80), sc = b.u8(super + g);

        *scale = __fmul_rn(ds4_f16_of(d & 0xffff), (float)(sc & 15));
        *min = __fmul_rn(ds4_f16_of(d >> 16), (float)(sc >> 4));
    }
    if (D == DS4_DTYPE_Q3_K) {
        uint32_t low = b.u8(super + 96 + g % 8) >> (g < 8 ? 0 : 4) & 15;
        uint32_t high = b.u8(super + 104 + g % 4) >> 2 * (g / 4) & 3;

        *scale = __fmul_rn(ds4_f16_of(b.u16(super + 108)), (float)((int)(low | high << 4) - 32));
    }
    if (D == DS4_DTYPE_Q4_K || D == DS4_DTYPE_Q5_K) {
        uint32_t d = b.u32(super), first = b.u8(super + 4 + v % 4),
                 second = b.u8(super + 8 + v % 4);
        uint32_t third = b.u8(super + 12 + v % 4);
        uint32_t sc = v < 4 ? first & 63 : (third & 15) | first >> 6 << 4;
        uint32_t m = v < 4 ? second & 63 : third >> 4 | second >> 6 << 4;

        *scale = __fmul_rn(ds4_f16_of(d & 0xffff), (float)sc);
        *min = __fmul_rn(ds4_f16_of(d >> 16), (float)m);
    }
    if (D == DS4_DTYPE_Q6_K)
        *scale = __fmul_rn(ds4_f16_of(b.u16(super + 208)), (float)(int8_t)b.u8(super + 192 + g));
    if (D == DS4_DTYPE_IQ2_XXS) {
        float d =
            __fmul_rn(ds4_f16_of(b.u16(super)), 0.5f + (float)(b.u32(super + 6 + 8 * v) >> 28));

        *scale = __fmul_rn(d, 0.25f);
    }
}

/* The eight words of unit u.  Q8_0: neighbouring words share their loads, which the compiler cannot see. */
template <int D>
static __device__ __forceinline__ void ds4_unit_words(const struct ds4_shared_span &b, uint32_t u,
                                                      uint32_t (&q)[8])
{
    if constexpr (D == DS4_DTYPE_Q8_0) {
        const uint32_t at = b.at + 34 * u + 2, shift = (at & 3) * 8;
        const uint32_t *const word = b.word + (at >> 2);
        uint32_t low = word[0];

#pragma unroll
        for (int j = 0; j < 8; j++) {
            const uint32_t high = word[j + 1];

            q[j] = __funnelshift_r(low, high, shift);
            low = high;
        }
    } else if constexpr (D == DS4_DTYPE_IQ2_XXS) {
        const uint32_t at = u / 8 * ds4_block_bytes(D) + 2 + 8 * (u % 8);
        const uint32_t index = b.u32(at), sign = b.u32(at + 4);

#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint2 v = ((const uint2 *)b.grid)[index >> 8 * j & 255];
            uint32_t s = sign >> 7 * j & 127;

            s |= (uint32_t)(__popc(s) & 1) << 7;
            q[2 * j] = ds4_iq2_word(v.x, s & 15);
            q[2 * j + 1] = ds4_iq2_word(v.y, s >> 4);
        }
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++)
            q[j] = ds4_unit_word<D>(b, u, j);
    }
}

/* ---- f32 values ------------------------------------------------------------------------------------ */

/* Byte k of q as a float: the byte becomes the low mantissa of 2^23, exactly (and faster than a
 * conversion instruction). */
static __device__ __forceinline__ float ds4_byte_f32(uint32_t biased, int k)
{
    return __fsub_rn(ds4_bits_f32(__byte_perm(biased, 0x4b000000u, 0x7440 + k)), 8388736.0f);
}

/* All values of unit u of a quantised format; as ds4_unit_quad, four by four. */
template <int D>
static __device__ __forceinline__ void ds4_unit_values(const struct ds4_shared_span &b, uint32_t u,
                                                       float (&v)[DS4_UNIT])
{
    constexpr int halves = ds4_has_halves(D) ? 2 : 1;
    uint32_t q[8];
    float s[halves], m[halves];

    ds4_unit_words<D>(b, u, q);
#pragma unroll
    for (int h = 0; h < halves; h++)
        ds4_unit_scale<D>(b, u, h, &s[h], &m[h]);
#pragma unroll
    for (int i = 0; i < DS4_UNIT; i++) {
        const int h = i / 16 * (halves - 1);

        v[i] = __fmul_rn(s[h], ds4_byte_f32(q[i / 4] ^ 0x80808080u, i % 4));
        if (ds4_has_min(D))
            v[i] = __fsub_rn(v[i], m[h]);
    }
}

/* Values 4j .. 4j + 3 of unit u. */
template <int D, class S>
static __device__ __forceinline__ float4 ds4_unit_quad(const S &b, uint32_t u, uint32_t j)
{
    float v[4];

    if (D == DS4_DTYPE_F32) {
#pragma unroll
        for (int k = 0; k < 4; k++)
            v[k] = ds4_bits_f32(b.u32(128 * u + 16 * j + 4 * k));
    } else if (D == DS4_DTYPE_F16 || D == DS4_DTYPE_BF16) {
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
            uint32_t pair = b.u32(64 * u + 8 * j + 2 * k);

            v[k] = D == DS4_DTYPE_F16 ? ds4_f16_of(pair & 0xffff) : ds4_bits_f32(pair << 16);
            v[k + 1] =
                D == DS4_DTYPE_F16 ? ds4_f16_of(pair >> 16) : ds4_bits_f32(pair & 0xffff0000u);
        }
    } else {
        uint32_t q = ds4_unit_word<D>(b, u, j) ^ 0x80808080u;
        float s, m;

        ds4_unit_scale<D>(b, u, j / 4, &s, &m);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            v[k] = __fmul_rn(s, ds4_byte_f32(q, k));
            if (ds4_has_min(D))
                v[k] = __fsub_rn(v[k], m);
        }
    }
    return make_float4(v[0], v[1], v[2], v[3]);
}

/* The same with zeros from value n_left on: the ragged end of a row of scalars.  Reads nothing there. */
template <int D, class S>
static __device__ __forceinline__ float4 ds4_unit_quad_end(const S &b, uint32_t u, uint32_t j,
                                                           int32_t n_left)
{
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};

    if (n_left >= 4)
        return ds4_unit_quad<D>(b, u, j);
    if (ds4_is_scalar(D)) {
        for (int k = 0; k < 3 && k < n_left; k++) {
            uint32_t o = (uint32_t)ds4_block_bytes(D) * (DS4_UNIT * u + 4 * j + k);

            v[k] = D == DS4_DTYPE_F32   ? ds4_bits_f32(b.u32(o))
                   : D == DS4_DTYPE_F16 ? ds4_f16_of(b.u16(o))
                                        : ds4_bits_f32(b.u16(o) << 16);
        }
    }
    return make_float4(v[0], v[1], v[2], v[3]);
}

#endif

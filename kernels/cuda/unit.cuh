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

/* The IQ2_XXS selectors in shared memory.  Lanes look up different entries, and with one copy of each a bank
 * would serve 3.5 lanes one after the other: copies lie side by side, two lanes share one (of the signs,
 * four). */
#define DS4_IQ2_COPIES 16
#define DS4_IQ2_TWINS  8 /* copies of the signs */
template <int COPIES, int TWINS> struct ds4_iq2_tables {
    uint32_t select[DS4_IQ2_CODES * COPIES];
    uint32_t sign[DS4_IQ2_SIGNS * TWINS];
};
struct ds4_iq2_room : ds4_iq2_tables<DS4_IQ2_COPIES, DS4_IQ2_TWINS> {
};
/* A bank for every lane: 48 KiB, for blocks that fill an SM. */
struct ds4_iq2_wide : ds4_iq2_tables<32, 32> {
};
struct ds4_no_room {
};

/* What a block of threads keeps in shared memory to decode D. */
template <int D> struct ds4_unit_room {
    using type = struct ds4_no_room;
    using wide = struct ds4_no_room;
};
template <> struct ds4_unit_room<DS4_DTYPE_IQ2_XXS> {
    using type = struct ds4_iq2_room;
    using wide = struct ds4_iq2_wide;
};

/* Fills it; a barrier must follow. */
template <int COPIES, int TWINS>
static __device__ __forceinline__ void ds4_iq2_fill(struct ds4_iq2_tables<COPIES, TWINS> *room)
{
    for (int i = threadIdx.x; i < DS4_IQ2_CODES * COPIES; i += blockDim.x)
        room->select[i] = __ldg(ds4_dev_iq2_nibbles.select + i / COPIES);
    for (int i = threadIdx.x; i < DS4_IQ2_SIGNS * TWINS; i += blockDim.x)
        room->sign[i] = __ldg(ds4_dev_iq2_nibbles.sign + i / TWINS);
}

static __device__ __forceinline__ const struct ds4_iq2_room *
ds4_unit_fill(struct ds4_iq2_room *room)
{
    ds4_iq2_fill(room);
    return room;
}

static __device__ __forceinline__ const struct ds4_iq2_wide *
ds4_unit_fill(struct ds4_iq2_wide *room)
{
    ds4_iq2_fill(room);
    return room;
}

static __device__ __forceinline__ const struct ds4_iq2_room *ds4_unit_fill(struct ds4_no_room *room)
{
    (void)room;
    return NULL;
}

/* Selectors of the eight values of group j of a unit: levels of its code, signs of its seven bits. */
template <int j>
static __device__ __forceinline__ uint32_t ds4_iq2_select(const struct ds4_iq2_room *room,
                                                          uint32_t index, uint32_t sign)
{
    const uint32_t lane = threadIdx.x % 32, mine = lane / 2 * 4, twin = lane / 4 * 4;
    const uint32_t i = j == 0 ? index << 6 : index >> (8 * j > 6 ? 8 * j - 6 : 0);
    const uint32_t s = j == 0 ? sign << 5 : sign >> (7 * j > 5 ? 7 * j - 5 : 0);

    return *(const uint32_t *)((const uint8_t *)room->select + ((i & 0x3fc0) | mine)) |
           *(const uint32_t *)((const uint8_t *)room->sign + ((s & 0xfe0) | twin));
}

/* The same from a bank of the lane's own. */
template <int j>
static __device__ __forceinline__ uint32_t ds4_iq2_select(const struct ds4_iq2_wide *room,
                                                          uint32_t index, uint32_t sign)
{
    const uint32_t mine = threadIdx.x % 32 * 4;
    const uint32_t i = j == 0 ? index << 7 : index >> (8 * j > 7 ? 8 * j - 7 : 0);
    const uint32_t s = j == 0 ? sign << 7 : sign >> (7 * j > 7 ? 7 * j - 7 : 0);

    return *(const uint32_t *)((const uint8_t *)room->select + ((i & 0x7f80) | mine)) |
           *(const uint32_t *)((const uint8_t *)room->sign + ((s & 0x3f80) | mine));
}

/* Bytes staged in shared memory; up to four bytes behind the last may be read (and are ignored). */
struct ds4_shared_span {
    const uint32_t *word;
    uint32_t at;
    const struct ds4_iq2_room *room; /* IQ2_XXS */

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

/* Selectors by code and sign bits, from where the span has them. */
static __device__ __forceinline__ uint32_t ds4_iq2_pick(const struct ds4_shared_span &b,
                                                        uint32_t index, uint32_t sign)
{
    const uint32_t lane = threadIdx.x % 32;

    return b.room->select[index * DS4_IQ2_COPIES + lane / 2] |
           b.room->sign[sign * DS4_IQ2_TWINS + lane / 4];
}

static __device__ __forceinline__ uint32_t ds4_iq2_pick(const struct ds4_global_span &b,
                                                        uint32_t index, uint32_t sign)
{
    (void)b;
    return __ldg(ds4_dev_iq2_nibbles.select + index) | __ldg(ds4_dev_iq2_nibbles.sign + sign);
}

static __device__ __forceinline__ struct ds4_global_span ds4_span_of(const uint8_t *p)
{
    uint32_t at = (uint32_t)((uintptr_t)p & 3);
    struct ds4_global_span s = {(const uint32_t *)(p - at), at};

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

/* Four signed bytes of an IQ2_XXS vector by the low four nibbles of its selectors: 8, 25, 43 or minus. */
static __device__ __forceinline__ uint32_t ds4_iq2_bytes(uint32_t select)
{
    return __byte_perm(0x002b1908u, 0x00d5e7f8u, select);
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

        return ds4_iq2_bytes(ds4_iq2_pick(b, index, sign) >> 16 * (j % 2));
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

/* The eight words of unit u.  Q8_0, Q2_K: neighbouring words share their loads, which the compiler cannot
 * see. */
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
        const uint32_t select[4] = {
            ds4_iq2_select<0>(b.room, index, sign), ds4_iq2_select<1>(b.room, index, sign),
            ds4_iq2_select<2>(b.room, index, sign), ds4_iq2_select<3>(b.room, index, sign)};

#pragma unroll
        for (int j = 0; j < 4; j++) {
            q[2 * j] = ds4_iq2_bytes(select[j]);
            q[2 * j + 1] = ds4_iq2_bytes(select[j] >> 16);
        }
    } else if constexpr (D == DS4_DTYPE_Q2_K) {
        const uint32_t v = u % 8, s = 2 * (v % 4);
        const uint32_t at = b.at + u / 8 * ds4_block_bytes(D) + 16 + 32 * (v / 4);
        const uint32_t shift = (at & 3) * 8, *const word = b.word + (at >> 2);
        uint32_t low = word[0];

#pragma unroll
        for (int j = 0; j < 8; j++) {
            const uint32_t high = word[j + 1];

            q[j] = __funnelshift_r(low, high, shift) >> s & 0x03030303u;
            low = high;
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

/* Four bf16 values as bytes: low ones in x, high ones in y, for a byte permute to choose from. */
static __device__ __forceinline__ uint2 ds4_levels(float a, float b, float c, float d)
{
    const __nv_bfloat162 low = __floats2bfloat162_rn(a, b), high = __floats2bfloat162_rn(c, d);
    const uint32_t x = *(const uint32_t *)&low, y = *(const uint32_t *)&high;

    return make_uint2(__byte_perm(x, y, 0x6420), __byte_perm(x, y, 0x7531));
}

/* All values of unit u of a quantised format as bf16 pairs: the bits of rounding ds4_unit_values.  The formats
 * of few levels round those and permute bytes: 1.5 instructions a value instead of five. */
template <int D>
static __device__ __forceinline__ void ds4_unit_pairs(const struct ds4_shared_span &b, uint32_t u,
                                                      uint32_t (&pair)[16])
{
    if constexpr (D == DS4_DTYPE_IQ2_XXS) {
        const uint32_t at = u / 8 * ds4_block_bytes(D) + 2 + 8 * (u % 8);
        const uint32_t index = b.u32(at), sign = b.u32(at + 4);
        const uint32_t select[4] = {
            ds4_iq2_select<0>(b.room, index, sign), ds4_iq2_select<1>(b.room, index, sign),
            ds4_iq2_select<2>(b.room, index, sign), ds4_iq2_select<3>(b.room, index, sign)};
        float s, m;
        uint2 level;
        uint32_t minus;

        ds4_unit_scale<D>(b, u, 0, &s, &m);
        level = ds4_levels(__fmul_rn(s, 8.0f), __fmul_rn(s, 25.0f), __fmul_rn(s, 43.0f), 0.0f);
        minus = level.y ^ 0x80808080u;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t four = select[i / 2] >> 16 * (i % 2);
            const uint32_t low = __byte_perm(level.x, level.x, four);
            const uint32_t high = __byte_perm(level.y, minus, four);

            pair[2 * i] = __byte_perm(low, high, 0x5140);
            pair[2 * i + 1] = __byte_perm(low, high, 0x7362);
        }
    } else if constexpr (D == DS4_DTYPE_Q2_K) {
        uint32_t q[8];
        uint2 level[2];

        ds4_unit_words<D>(b, u, q);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float s, m;

            ds4_unit_scale<D>(b, u, h, &s, &m);
            level[h] =
                ds4_levels(__fsub_rn(__fmul_rn(s, 0.0f), m), __fsub_rn(s, m),
                           __fsub_rn(__fmul_rn(s, 2.0f), m), __fsub_rn(__fmul_rn(s, 3.0f), m));
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint2 v = level[i / 4];
            /* Value v as nibbles v and v + 4: its low and its high byte. */
            const uint32_t select = q[i] * 0x11u + 0x40404040u;

            pair[2 * i] = __byte_perm(v.x, v.y, select);
            pair[2 * i + 1] = __byte_perm(v.x, v.y, select >> 16);
        }
    } else {
        float v[DS4_UNIT];

        ds4_unit_values<D>(b, u, v);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const __nv_bfloat162 two = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);

            pair[i] = *(const uint32_t *)&two;
        }
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

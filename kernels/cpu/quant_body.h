/* Weight blocks: to f32 values, and times int8 activations.  Part of simd_body.h.
 *
 * Every 256-wide format is first unpacked to the same form, small integers q with an integer scale
 * (and min) per 16:  value = (d * scale) * q - (dmin * min).  One unpacker per format thus serves both
 * the exact and the fast products, and the f32 groupings are those of ggml, bit for bit.  (IQ2_XXS:
 * (d * (0.5 + s)) * 0.25 * grid = ((d / 8) * (2s + 1)) * grid; powers of two round nothing.)
 *
 * Blocks have odd strides (17, 34, 66 bytes): bytes are read as bytes, words through memcpy. */
#include "kernels/cpu/iq2_grid.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

#define DS4_SUPER   256 /* values of a K-quant block */
#define DS4_GROUP   16  /* values under one scale in the unpacked form */
#define DS4_N_GROUP (DS4_SUPER / DS4_GROUP)
#define DS4_SMALL   32 /* values of a Q8_0, Q4_0 or MXFP4 block */

struct unpacked {
    float d;
    float dmin;
    int32_t scale[DS4_N_GROUP];
    int32_t min[DS4_N_GROUP];
    int8_t q[DS4_SUPER];
};

static inline float read_f16(const uint8_t *p)
{
    uint16_t h;

    memcpy(&h, p, sizeof(h));
    return ds4_f32_from_f16(h);
}

/* ---- sixteen at a time --------------------------------------------------------------------------
 * The integers of a block pass through memory between decoding and use.  They are written and read in
 * these pieces: a load wider than the store before it would wait for the cache. */

typedef int8_t ds4_v16b __attribute__((vector_size(16)));
typedef int16_t ds4_v16h __attribute__((vector_size(32)));
typedef int32_t ds4_vi __attribute__((vector_size(4 * DS4_SIMD_WIDTH)));

static inline ds4_v16b load_16b(const void *p)
{
    ds4_v16b v;

    memcpy(&v, p, sizeof(v));
    return v;
}

static inline void store_16b(int8_t *p, ds4_v16b v)
{
    memcpy(p, &v, sizeof(v));
}

/* The low and the high four bits of sixteen bytes. */
static inline ds4_v16b low_nibbles(ds4_v16b v)
{
    return v & 15;
}

static inline ds4_v16b high_nibbles(ds4_v16b v)
{
    return v >> 4 & 15;
}

/* table[index] for sixteen indices below 16. */
static inline ds4_v16b look_up_16(ds4_v16b table, ds4_v16b index)
{
    return (ds4_v16b)_mm_shuffle_epi8((__m128i)table, (__m128i)index);
}

/* One vector of signed bytes as integers: the one conversion that gcc 12 takes apart byte by byte. */
static inline ds4_vi widen(const int8_t *q)
{
#if DS4_SIMD_WIDTH == 16
    return (ds4_vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)q));
#elif DS4_SIMD_WIDTH == 8
    return (ds4_vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)q));
#else
    int32_t four;

    memcpy(&four, q, sizeof(four));
    return (ds4_vi)_mm_cvtepi8_epi32(_mm_cvtsi32_si128(four));
#endif
}

/* y[i] = d * q[i], minus m if the format has mins; 16 values. */
static inline __attribute__((always_inline)) void widen_16(const int8_t *q, float d, int has_min,
                                                           float m, float *y)
{
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += DS4_SIMD_WIDTH) {
        ds4_vf v = d * __builtin_convertvector(widen(q + i), ds4_vf);

        store(y + i, has_min ? v - m : v);
    }
}

/* y[i] = scale * q[i]; 16 values. */
static inline void scale_16(const int8_t *q, int32_t scale, int16_t *y)
{
    ds4_v16h v = __builtin_convertvector(load_16b(q), ds4_v16h) * (int16_t)scale;

    memcpy(y, &v, sizeof(v));
}

/* ---- 256-wide formats --------------------------------------------------------------------------- */

static void unpack_q2_k(const uint8_t *b, struct unpacked *u)
{
    const uint8_t *scales = b, *q = b + 16;

    u->d = read_f16(b + 80);
    u->dmin = read_f16(b + 82);
    for (int g = 0; g < DS4_N_GROUP; g++) {
        u->scale[g] = scales[g] & 15;
        u->min[g] = scales[g] >> 4;
    }
    for (int h = 0; h < 2; h++) {
        for (int s = 0; s < 4; s++) {
            for (int l = 0; l < 32; l++)
                u->q[128 * h + 32 * s + l] = (int8_t)(q[32 * h + l] >> 2 * s & 3);
        }
    }
}

static void unpack_q3_k(const uint8_t *b, struct unpacked *u)
{
    const uint8_t *mask = b, *q = b + 32, *s6 = b + 96;

    u->d = read_f16(b + 108);
    for (int g = 0; g < DS4_N_GROUP; g++) {
        int low = g < 8 ? s6[g] & 15 : s6[g - 8] >> 4;
        int high = s6[8 + g % 4] >> 2 * (g / 4) & 3;

        u->scale[g] = (low | high << 4) - 32;
    }
    for (int h = 0; h < 2; h++) {
        for (int s = 0; s < 4; s++) {
            for (int l = 0; l < 32; l++) {
                int high = mask[l] >> (4 * h + s) & 1; /* set: nothing to subtract */

                u->q[128 * h + 32 * s + l] = (int8_t)((q[32 * h + l] >> 2 * s & 3) + 4 * high - 4);
            }
        }
    }
}

/* The eight 6-bit scales and mins that Q4_K and Q5_K keep in 12 bytes. */
static inline void unpack_scales_k4(const uint8_t *s6, struct unpacked *u)
{
    for (int g = 0; g < 8; g++) {
        int scale, min;

        if (g < 4) {
            scale = s6[g] & 63;
            min = s6[g + 4] & 63;
        } else {
            scale = (s6[g + 4] & 15) | s6[g - 4] >> 6 << 4;
            min = s6[g + 4] >> 4 | s6[g] >> 6 << 4;
        }
        u->scale[2 * g] = u->scale[2 * g + 1] = scale;
        u->min[2 * g] = u->min[2 * g + 1] = min;
    }
}

static void unpack_q4_k(const uint8_t *b, struct unpacked *u)
{
    const uint8_t *q = b + 16;

    u->d = read_f16(b);
    u->dmin = read_f16(b + 2);
    unpack_scales_k4(b + 4, u);
    for (int p = 0; p < 4; p++) {
        for (int l = 0; l < 32; l++) {
            u->q[64 * p + l] = (int8_t)(q[32 * p + l] & 15);
            u->q[64 * p + 32 + l] = (int8_t)(q[32 * p + l] >> 4);
        }
    }
}

static void unpack_q5_k(const uint8_t *b, struct unpacked *u)
{
    const uint8_t *high = b + 16, *q = b + 48;

    u->d = read_f16(b);
    u->dmin = read_f16(b + 2);
    unpack_scales_k4(b + 4, u);
    for (int p = 0; p < 4; p++) {
        for (int l = 0; l < 32; l++) {
            u->q[64 * p + l] = (int8_t)((q[32 * p + l] & 15) | (high[l] >> 2 * p & 1) << 4);
            u->q[64 * p + 32 + l] =
                (int8_t)(q[32 * p + l] >> 4 | (high[l] >> (2 * p + 1) & 1) << 4);
        }
    }
}

static void unpack_q6_k(const uint8_t *b, struct unpacked *u)
{
    const uint8_t *low = b, *high = b + 128;

    u->d = read_f16(b + 208);
    for (int g = 0; g < DS4_N_GROUP; g++)
        u->scale[g] = (b[192 + g] ^ 128) - 128; /* a signed byte */
    for (int h = 0; h < 2; h++) {
        for (int k = 0; k < 4; k++) {
            for (int l = 0; l < 32; l++) {
                int v = (low[64 * h + 32 * (k & 1) + l] >> 4 * (k >> 1) & 15) |
                        (high[32 * h + l] >> 2 * k & 3) << 4;

                u->q[128 * h + 32 * k + l] = (int8_t)(v - 32);
            }
        }
    }
}

/* Eight signed values.  Negation of all bytes at once: no byte is 0, so no carry leaves one. */
static inline uint64_t iq2_bytes(uint8_t code, uint32_t signs)
{
    uint64_t minus = ds4_iq2_sign[signs & 127];

    return (ds4_iq2_grid[code] ^ minus) + (minus & UINT64_C(0x0101010101010101));
}

static void unpack_iq2_xxs(const uint8_t *b, struct unpacked *u)
{
    u->d = read_f16(b) * 0.125f;
    for (int g = 0; g < 8; g++) {
        const uint8_t *group = b + 2 + 8 * g;
        uint32_t w;

        memcpy(&w, group + 4, sizeof(w));
        u->scale[2 * g] = u->scale[2 * g + 1] = (int32_t)(2 * (w >> 28) + 1);
        for (int l = 0; l < 4; l += 2) {
            uint64_t pair[2] = {iq2_bytes(group[l], w >> 7 * l),
                                iq2_bytes(group[l + 1], w >> 7 * (l + 1))};

            memcpy(u->q + 32 * g + 8 * l, pair, sizeof(pair));
        }
    }
}

/* True if the format has a min per group. */
static inline __attribute__((always_inline)) int unpack(enum ds4_dtype dtype, const uint8_t *b,
                                                        struct unpacked *u)
{
    switch (dtype) {
    case DS4_DTYPE_Q2_K:
        unpack_q2_k(b, u);
        return 1;
    case DS4_DTYPE_Q3_K:
        unpack_q3_k(b, u);
        return 0;
    case DS4_DTYPE_Q4_K:
        unpack_q4_k(b, u);
        return 1;
    case DS4_DTYPE_Q5_K:
        unpack_q5_k(b, u);
        return 1;
    case DS4_DTYPE_Q6_K:
        unpack_q6_k(b, u);
        return 0;
    default: /* the callers' switches leave only this one */
        unpack_iq2_xxs(b, u);
        return 0;
    }
}

static inline __attribute__((always_inline)) void
dequant_super(enum ds4_dtype dtype, size_t block_bytes, const uint8_t *row, int32_t n, float *out)
{
    for (int32_t i = 0; i < n; i += DS4_SUPER, row += block_bytes) {
        struct unpacked u;
        int has_min = unpack(dtype, row, &u);

        for (int g = 0; g < DS4_N_GROUP; g++) {
            float d = u.d * (float)u.scale[g];
            float m = has_min ? u.dmin * (float)u.min[g] : 0.0f;

            widen_16(u.q + DS4_GROUP * g, d, has_min, m, out + i + DS4_GROUP * g);
        }
    }
}

/* ---- 32-wide formats ---------------------------------------------------------------------------- */

static const ds4_v16b mxfp4_value = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* 2^(e - 128): half the block scale, because the table above holds doubled values. */
static inline float mxfp4_scale(uint8_t e)
{
    return ds4_f32_from_bits(e < 2 ? UINT32_C(0x00200000) << e : (uint32_t)(e - 1) << 23);
}

/* The scale of one block; *q points to its 32 integers, in the block itself or in room. */
static inline __attribute__((always_inline)) float
unpack_small(enum ds4_dtype dtype, const uint8_t *b, int8_t *room, const int8_t **q)
{
    switch (dtype) {
    case DS4_DTYPE_Q8_0:
        *q = (const int8_t *)b + 2;
        return read_f16(b);
    case DS4_DTYPE_Q4_0:
        store_16b(room, low_nibbles(load_16b(b + 2)) - 8);
        store_16b(room + 16, high_nibbles(load_16b(b + 2)) - 8);
        return read_f16(b);
    default: /* MXFP4 */
        store_16b(room, look_up_16(mxfp4_value, low_nibbles(load_16b(b + 1))));
        store_16b(room + 16, look_up_16(mxfp4_value, high_nibbles(load_16b(b + 1))));
        return mxfp4_scale(b[0]);
    }
}

static inline __attribute__((always_inline)) void
dequant_small(enum ds4_dtype dtype, size_t block_bytes, const uint8_t *row, int32_t n, float *out)
{
    for (int32_t i = 0; i < n; i += DS4_SMALL, row += block_bytes) {
        int8_t room[DS4_SMALL];
        const int8_t *q = room;
        float d = unpack_small(dtype, row, room, &q);

        widen_16(q, d, 0, 0.0f, out + i);
        widen_16(q + 16, d, 0, 0.0f, out + i + 16);
    }
}

static void dequant_f16(const uint8_t *row, int32_t n, float *out)
{
    for (int32_t i = 0; i < n; i++) {
        uint16_t h;
        uint32_t mag, sign;
        float value;

        memcpy(&h, row + 2 * (size_t)i, sizeof(h));
        /* The exponent moves to f32's place and is corrected by an exact product, which also makes
         * subnormals right; infinities and NaNs get the exponent they need. */
        mag = (uint32_t)(h & 0x7fff) << 13;
        sign = (uint32_t)(h & 0x8000) << 16;
        value = ds4_f32_from_bits(mag) * 0x1p112f;
        mag = mag >= UINT32_C(0x0f800000) ? mag | UINT32_C(0x7f800000) : ds4_bits_from_f32(value);
        out[i] = ds4_f32_from_bits(mag | sign);
    }
}

static void dequant_bf16(const uint8_t *row, int32_t n, float *out)
{
    for (int32_t i = 0; i < n; i++) {
        uint16_t h;

        memcpy(&h, row + 2 * (size_t)i, sizeof(h));
        out[i] = ds4_f32_from_bf16(h);
    }
}

static void dequant_row(enum ds4_dtype dtype, const void *row, int32_t n, float *out)
{
    size_t bytes = (size_t)ds4_dtype_info(dtype)->block_bytes;

    switch (dtype) {
    case DS4_DTYPE_F32:
        memcpy(out, row, (size_t)n * sizeof(*out));
        return;
    case DS4_DTYPE_F16:
        dequant_f16(row, n, out);
        return;
    case DS4_DTYPE_BF16:
        dequant_bf16(row, n, out);
        return;
    case DS4_DTYPE_Q8_0:
        dequant_small(DS4_DTYPE_Q8_0, bytes, row, n, out);
        return;
    case DS4_DTYPE_Q4_0:
        dequant_small(DS4_DTYPE_Q4_0, bytes, row, n, out);
        return;
    case DS4_DTYPE_MXFP4:
        dequant_small(DS4_DTYPE_MXFP4, bytes, row, n, out);
        return;
    case DS4_DTYPE_Q2_K:
        dequant_super(DS4_DTYPE_Q2_K, bytes, row, n, out);
        return;
    case DS4_DTYPE_Q3_K:
        dequant_super(DS4_DTYPE_Q3_K, bytes, row, n, out);
        return;
    case DS4_DTYPE_Q4_K:
        dequant_super(DS4_DTYPE_Q4_K, bytes, row, n, out);
        return;
    case DS4_DTYPE_Q5_K:
        dequant_super(DS4_DTYPE_Q5_K, bytes, row, n, out);
        return;
    case DS4_DTYPE_Q6_K:
        dequant_super(DS4_DTYPE_Q6_K, bytes, row, n, out);
        return;
    case DS4_DTYPE_IQ2_XXS:
        dequant_super(DS4_DTYPE_IQ2_XXS, bytes, row, n, out);
        return;
    case DS4_DTYPE_I8:
    case DS4_DTYPE_I32:
    case DS4_N_DTYPES:
        break; /* tables, never products */
    }
    memset(out, 0, (size_t)n * sizeof(*out));
}

/* ---- int8 products ------------------------------------------------------------------------------ */

/* 16-bit factors with 32-bit sums are one instruction on every x86-64. */
static inline int32_t int_dot(const int16_t *a, const int8_t *b, int n)
{
    int32_t sum = 0;

    for (int i = 0; i < n; i++) {
        int16_t wide = b[i]; /* NOLINT(bugprone-signed-char-misuse): b holds signed numbers */

        sum += (int32_t)a[i] * (int32_t)wide;
    }
    return sum;
}

/* scaled[i] = scale * q: at most 43 * 31 (IQ2_XXS), 32 * 127 (Q6_K); the sum below stays under 2^28. */
static inline void scale_values(const struct unpacked *u, int16_t *scaled)
{
    for (int g = 0; g < DS4_N_GROUP; g++)
        scale_16(u->q + DS4_GROUP * g, u->scale[g], scaled + DS4_GROUP * g);
}

/* da * (d * sum scale * (q . a) - dmin * sum min * bsum); the integers are exact. */
static inline float super_dot(const struct unpacked *u, const int16_t *scaled, int has_min,
                              const struct ds4_act256 *a)
{
    int32_t sum = int_dot(scaled, a->q, DS4_SUPER), min_sum = 0;

    if (!has_min)
        return a->d * (u->d * (float)sum);
    for (int g = 0; g < DS4_N_GROUP; g++)
        min_sum += u->min[g] * a->bsum[g];
    return a->d * (u->d * (float)sum - u->dmin * (float)min_sum);
}

static inline __attribute__((always_inline)) void
row_act_super(enum ds4_dtype dtype, size_t block_bytes, const uint8_t *row, int32_t n_col,
              const void *const *act, int32_t n_x, float (*lane)[DS4_LANES])
{
    for (int32_t b = 0; b < n_col / DS4_SUPER; b++) {
        struct unpacked u;
        int16_t scaled[DS4_SUPER];
        int has_min = unpack(dtype, row + (size_t)b * block_bytes, &u);

        scale_values(&u, scaled);
        for (int32_t t = 0; t < n_x; t++) {
            const struct ds4_act256 *a = act[t];

            lane[t][b % DS4_LANES] += super_dot(&u, scaled, has_min, a + b);
        }
    }
}

static inline __attribute__((always_inline)) void
row_act_small(enum ds4_dtype dtype, size_t block_bytes, const uint8_t *row, int32_t n_col,
              const void *const *act, int32_t n_x, float (*lane)[DS4_LANES])
{
    for (int32_t b = 0; b < n_col / DS4_SMALL; b++) {
        int8_t room[DS4_SMALL];
        const int8_t *q = room;
        int16_t wide[DS4_SMALL];
        float d = unpack_small(dtype, row + (size_t)b * block_bytes, room, &q);

        scale_16(q, 1, wide);
        scale_16(q + 16, 1, wide + 16);
        for (int32_t t = 0; t < n_x; t++) {
            const struct ds4_act32 *a = act[t];

            lane[t][b % DS4_LANES] += (d * a[b].d) * (float)int_dot(wide, a[b].q, DS4_SMALL);
        }
    }
}

static void row_act(enum ds4_dtype dtype, const uint8_t *row, int32_t n_col, const void *const *act,
                    int32_t n_x, float (*lane)[DS4_LANES])
{
    size_t bytes = (size_t)ds4_dtype_info(dtype)->block_bytes;

    switch (dtype) {
    case DS4_DTYPE_Q8_0:
        row_act_small(DS4_DTYPE_Q8_0, bytes, row, n_col, act, n_x, lane);
        return;
    case DS4_DTYPE_Q4_0:
        row_act_small(DS4_DTYPE_Q4_0, bytes, row, n_col, act, n_x, lane);
        return;
    case DS4_DTYPE_MXFP4:
        row_act_small(DS4_DTYPE_MXFP4, bytes, row, n_col, act, n_x, lane);
        return;
    case DS4_DTYPE_Q2_K:
        row_act_super(DS4_DTYPE_Q2_K, bytes, row, n_col, act, n_x, lane);
        return;
    case DS4_DTYPE_Q3_K:
        row_act_super(DS4_DTYPE_Q3_K, bytes, row, n_col, act, n_x, lane);
        return;
    case DS4_DTYPE_Q4_K:
        row_act_super(DS4_DTYPE_Q4_K, bytes, row, n_col, act, n_x, lane);
        return;
    case DS4_DTYPE_Q5_K:
        row_act_super(DS4_DTYPE_Q5_K, bytes, row, n_col, act, n_x, lane);
        return;
    case DS4_DTYPE_Q6_K:
        row_act_super(DS4_DTYPE_Q6_K, bytes, row, n_col, act, n_x, lane);
        return;
    case DS4_DTYPE_IQ2_XXS:
        row_act_super(DS4_DTYPE_IQ2_XXS, bytes, row, n_col, act, n_x, lane);
        return;
    default: /* scalars have no int8 form; callers keep them exact */
        return;
    }
}

static void product_act(const struct ds4_rows *w, const void *const *x, int32_t n_x,
                        float (*out)[DS4_TILE_ROWS])
{
    for (int32_t r = 0; r < w->n_row; r++) {
        float lane[DS4_TILE_INPUTS][DS4_LANES];

        memset(lane, 0, (size_t)n_x * sizeof(lane[0]));
        row_act(w->dtype, w->data + (size_t)r * w->row_bytes, w->n_col, x, n_x, lane);
        for (int32_t t = 0; t < n_x; t++)
            out[t][r] = combine_lanes(lane[t]);
    }
}

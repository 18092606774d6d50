/* Decoding stored numbers on the device: scalars, block formats element by element, cache rows.
 *
 * ds4_dq() is the general accessor: any dtype, any element, no alignment assumed (block strides of 17,
 * 18, 34, 66, 84, 110 and 210 bytes leave none).  Speed paths of gemm.cu and moe.cu read whole blocks in
 * their own way and are checked against it.  Values equal the CPU's decoding bit for bit. */
#ifndef DS4_KERNELS_CUDA_DEQUANT_CUH
#define DS4_KERNELS_CUDA_DEQUANT_CUH

#include "kernels/backend.h"
#include "kernels/iq2_codes.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

/* Codebook of IQ2_XXS as bytes, made by the compiler.  In global memory, not __constant__: lanes look
 * up different entries, and constant memory would serve them one by one. */
struct ds4_iq2_table {
    uint64_t vector[DS4_IQ2_CODES];
};

static constexpr struct ds4_iq2_table ds4_iq2_make(void)
{
    constexpr uint16_t code[DS4_IQ2_CODES] = {DS4_IQ2_CODE_LIST};
    constexpr uint64_t magnitude[4] = {8, 25, 43, 0}; /* level 3 does not occur */
    struct ds4_iq2_table t = {};

    for (int i = 0; i < DS4_IQ2_CODES; i++) {
        for (int j = 0; j < 8; j++)
            t.vector[i] |= magnitude[code[i] >> 2 * j & 3] << 8 * j;
    }
    return t;
}

static __device__ const struct ds4_iq2_table ds4_dev_iq2 = ds4_iq2_make();

/* The same as byte-permute selectors: nibble k of select[i] is the level of value k (of three), nibble k of
 * sign[s] is 4 where value k is negative: bit k of s, and of the seventh's parity for the eighth. */
#define DS4_IQ2_SIGNS 128
struct ds4_iq2_nibbles {
    uint32_t select[DS4_IQ2_CODES];
    uint32_t sign[DS4_IQ2_SIGNS];
};

static constexpr struct ds4_iq2_nibbles ds4_iq2_nibbles_make(void)
{
    constexpr uint16_t code[DS4_IQ2_CODES] = {DS4_IQ2_CODE_LIST};
    struct ds4_iq2_nibbles t = {};

    for (int i = 0; i < DS4_IQ2_CODES; i++) {
        for (int j = 0; j < 8; j++)
            t.select[i] |= (uint32_t)(code[i] >> 2 * j & 3) << 4 * j;
    }
    for (int i = 0; i < DS4_IQ2_SIGNS; i++) {
        int n = 0;

        for (int j = 0; j < 7; j++) {
            t.sign[i] |= (uint32_t)(i >> j & 1) << (4 * j + 2);
            n += i >> j & 1;
        }
        t.sign[i] |= (uint32_t)(n & 1) << 30;
    }
    return t;
}

static __device__ const struct ds4_iq2_nibbles ds4_dev_iq2_nibbles = ds4_iq2_nibbles_make();

__device__ __forceinline__ float ds4_bits_f32(uint32_t bits)
{
    return __uint_as_float(bits);
}

__device__ __forceinline__ uint16_t ds4_load_u16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

__device__ __forceinline__ uint32_t ds4_load_u32(const uint8_t *p)
{
    return (uint32_t)ds4_load_u16(p) | (uint32_t)ds4_load_u16(p + 2) << 16;
}

__device__ __forceinline__ float ds4_load_f16(const uint8_t *p)
{
    return __half2float(__ushort_as_half(ds4_load_u16(p)));
}

__device__ __forceinline__ float ds4_e8m0(uint8_t x)
{
    return x == 0      ? ds4_bits_f32(0x00400000u)
           : x == 0xff ? ds4_bits_f32(0x7fc00000u)
                       : ds4_bits_f32((uint32_t)x << 23);
}

__device__ __forceinline__ float ds4_e4m3(uint8_t x)
{
    uint32_t rest = x & 0x7f;
    float magnitude = rest == 0x7f ? ds4_bits_f32(0x7fc00000u)
                      : rest < 8   ? (float)rest * 0x1p-9f
                                   : ds4_bits_f32((rest + ((127 - 7) << 3)) << 20);

    return (x & 0x80) ? -magnitude : magnitude;
}

__device__ __forceinline__ float ds4_e2m1(uint8_t code)
{
    /* 0 .5 1 1.5 2 3 4 6: doubled and packed four bits each. */
    float magnitude = 0.5f * (float)(0xc8643210u >> 4 * (code & 7) & 15);

    return (code & 8) ? -magnitude : magnitude;
}

/* Six-bit scale and minimum of sub-block g of Q4_K and Q5_K. */
__device__ __forceinline__ void ds4_k_scale(const uint8_t *s, int g, int *sc, int *m)
{
    if (g < 4) {
        *sc = s[g] & 63;
        *m = s[g + 4] & 63;
    } else {
        *sc = (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
        *m = (s[g + 4] >> 4) | (s[g] >> 6) << 4;
    }
}

__device__ __forceinline__ float ds4_dq_q2_k(const uint8_t *b, int i)
{
    int h = i / 128, s = i % 128 / 32, l = i % 32, g = i / 16;
    int v = b[16 + 32 * h + l] >> 2 * s & 3;

    return __fsub_rn(__fmul_rn(__fmul_rn(ds4_load_f16(b + 80), (float)(b[g] & 15)), (float)v),
                     __fmul_rn(ds4_load_f16(b + 82), (float)(b[g] >> 4)));
}

__device__ __forceinline__ float ds4_dq_q3_k(const uint8_t *b, int i)
{
    int h = i / 128, s = i % 128 / 32, l = i % 32, g = i / 16;
    int v = (b[32 + 32 * h + l] >> 2 * s & 3) - ((b[l] >> (4 * h + s) & 1) ? 0 : 4);
    int low = g < 8 ? b[96 + g] & 15 : b[96 + g - 8] >> 4;
    int sc = (low | (b[96 + 8 + g % 4] >> 2 * (g / 4) & 3) << 4) - 32;

    return __fmul_rn(__fmul_rn(ds4_load_f16(b + 108), (float)sc), (float)v);
}

__device__ __forceinline__ float ds4_dq_q45_k(const uint8_t *b, int i, bool five)
{
    int g = i / 32, l = i % 32, sc, m;
    const uint8_t *q = b + (five ? 48 : 16);
    int v = q[32 * (g / 2) + l] >> 4 * (g & 1) & 15;

    if (five && (b[16 + l] >> g & 1))
        v += 16;
    ds4_k_scale(b + 4, g, &sc, &m);
    return __fsub_rn(__fmul_rn(__fmul_rn(ds4_load_f16(b), (float)sc), (float)v),
                     __fmul_rn(ds4_load_f16(b + 2), (float)m));
}

__device__ __forceinline__ float ds4_dq_q6_k(const uint8_t *b, int i)
{
    int h = i / 128, k = i % 128 / 32, l = i % 32;
    int low = b[64 * h + 32 * (k & 1) + l] >> 4 * (k >> 1) & 15;
    int high = b[128 + 32 * h + l] >> 2 * k & 3;

    return __fmul_rn(__fmul_rn(ds4_load_f16(b + 208), (float)(int8_t)b[192 + i / 16]),
                     (float)((low | high << 4) - 32));
}

__device__ __forceinline__ float ds4_dq_iq2_xxs(const uint8_t *b, int i)
{
    const uint8_t *group = b + 2 + 8 * (i / 32);
    uint32_t w = ds4_load_u32(group + 4);
    int l = i % 32 / 8, j = i % 8;
    uint32_t sign = w >> 7 * l & 127;
    float db = __fmul_rn(__fmul_rn(ds4_load_f16(b), 0.5f + (float)(w >> 28)), 0.25f);
    float v = __fmul_rn(db, (float)(ds4_dev_iq2.vector[group[l]] >> 8 * j & 255));

    sign |= (uint32_t)(__popc(sign) & 1) << 7;
    return (sign >> j & 1) ? -v : v;
}

__device__ __forceinline__ float ds4_dq_mxfp4(const uint8_t *b, int i)
{
    uint8_t code = i < 16 ? b[1 + i] & 15 : b[1 + i - 16] >> 4;
    uint32_t half = b[0] < 2 ? 0x00200000u << b[0] : (uint32_t)(b[0] - 1) << 23;
    float v = (float)(0xc8643210u >> 4 * (code & 7) & 15);

    return __fmul_rn((code & 8) ? -v : v, ds4_bits_f32(half));
}

/* Element i of a row of any dtype. */
__device__ __forceinline__ float ds4_dq(enum ds4_dtype dtype, const uint8_t *row, int64_t i)
{
    switch (dtype) {
    case DS4_DTYPE_F32:
        return ds4_bits_f32(ds4_load_u32(row + 4 * i));
    case DS4_DTYPE_F16:
        return ds4_load_f16(row + 2 * i);
    case DS4_DTYPE_BF16:
        return ds4_bits_f32((uint32_t)ds4_load_u16(row + 2 * i) << 16);
    case DS4_DTYPE_Q8_0:
        row += i / 32 * 34;
        return __fmul_rn(ds4_load_f16(row), (float)(int8_t)row[2 + i % 32]);
    case DS4_DTYPE_Q4_0:
        row += i / 32 * 18;
        i %= 32;
        return __fmul_rn(ds4_load_f16(row),
                         (float)((i < 16 ? row[2 + i] & 15 : row[2 + i - 16] >> 4) - 8));
    case DS4_DTYPE_Q2_K:
        return ds4_dq_q2_k(row + i / 256 * 84, (int)(i % 256));
    case DS4_DTYPE_Q3_K:
        return ds4_dq_q3_k(row + i / 256 * 110, (int)(i % 256));
    case DS4_DTYPE_Q4_K:
        return ds4_dq_q45_k(row + i / 256 * 144, (int)(i % 256), false);
    case DS4_DTYPE_Q5_K:
        return ds4_dq_q45_k(row + i / 256 * 176, (int)(i % 256), true);
    case DS4_DTYPE_Q6_K:
        return ds4_dq_q6_k(row + i / 256 * 210, (int)(i % 256));
    case DS4_DTYPE_IQ2_XXS:
        return ds4_dq_iq2_xxs(row + i / 256 * 66, (int)(i % 256));
    case DS4_DTYPE_MXFP4:
        return ds4_dq_mxfp4(row + i / 32 * 17, (int)(i % 32));
    case DS4_DTYPE_I8:
    case DS4_DTYPE_I32:
    case DS4_N_DTYPES:
        break;
    }
    return ds4_bits_f32(0x7fc00000u);
}

/* ---- activations ---------------------------------------------------------------------------------- */

/* A strided f32 or bf16 matrix of activations, by value. */
struct ds4_dev_mat {
    void *data;
    int64_t stride; /* elements between rows */
    int32_t bf16;
};

static inline struct ds4_dev_mat ds4_dev_mat_of(const struct ds4_tensor *t)
{
    struct ds4_dev_mat m = {t->data, t->stride[0], t->dtype == DS4_DTYPE_BF16};

    return m;
}

__device__ __forceinline__ float ds4_mat_get(const struct ds4_dev_mat &m, int64_t row, int64_t i)
{
    if (m.bf16)
        return __bfloat162float(((const __nv_bfloat16 *)m.data)[row * m.stride + i]);
    return ((const float *)m.data)[row * m.stride + i];
}

__device__ __forceinline__ void ds4_mat_set(const struct ds4_dev_mat &m, int64_t row, int64_t i,
                                            float v)
{
    if (m.bf16)
        ((__nv_bfloat16 *)m.data)[row * m.stride + i] = __float2bfloat16_rn(v);
    else
        ((float *)m.data)[row * m.stride + i] = v;
}

/* ---- reductions ------------------------------------------------------------------------------------- */

/* Sum over the block, the same value in every thread; a fixed tree, so the same bits every run.
 * `shared` holds 32 floats; blockDim.x is a multiple of 32. */
__device__ __forceinline__ float ds4_block_sum(float v, float *shared)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = blockDim.x / 32;

    for (int o = 16; o > 0; o /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, o);
    __syncthreads();
    if (lane == 0)
        shared[warp] = v;
    __syncthreads();
    v = lane < n ? shared[lane] : 0.0f;
    for (int o = 16; o > 0; o /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}

__device__ __forceinline__ float ds4_block_max(float v, float *shared)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = blockDim.x / 32;

    for (int o = 16; o > 0; o /= 2)
        v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
    __syncthreads();
    if (lane == 0)
        shared[warp] = v;
    __syncthreads();
    v = lane < n ? shared[lane] : -INFINITY;
    for (int o = 16; o > 0; o /= 2)
        v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
}

/* ---- cache rows ---------------------------------------------------------------------------------------- */

/* Value i of a stored row (formats of backend.h). */
__device__ __forceinline__ float ds4_row_get(enum ds4_row_format format, int32_t d, int32_t d_rope,
                                             const uint8_t *row, int32_t i)
{
    int32_t nope = d - d_rope, tail;

    switch (format) {
    case DS4_ROW_F32:
        return ((const float *)row)[i];
    case DS4_ROW_BF16:
        return __bfloat162float(((const __nv_bfloat16 *)row)[i]);
    case DS4_ROW_FP8:
        if (i < nope)
            return ds4_e4m3(row[i]) * ds4_e8m0(row[nope + i / 64]);
        tail = nope + (nope + 63) / 64;
        tail += tail % 2;
        return ds4_bits_f32((uint32_t)ds4_load_u16(row + tail + 2 * (i - nope)) << 16);
    case DS4_ROW_FP4:
        return ds4_e2m1(row[i / 2] >> 4 * (i % 2) & 15) * ds4_e8m0(row[d / 2 + i / 32]);
    }
    return 0.0f;
}

#endif

/* Cache rows on the device: rounding in shared memory, packing, addresses (formats of backend.h).
 *
 * A row under work lies in shared memory as d f32 values; all threads of the block take part.  Rounding
 * and packing are two steps, as on the CPU: a step uses its own rows exactly as they are read back. */
#ifndef DS4_KERNELS_CUDA_ROWS_CUH
#define DS4_KERNELS_CUDA_ROWS_CUH

#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/device.cuh"

#define DS4_DEV_FP8_BLOCK 64
#define DS4_DEV_FP4_BLOCK 32
#define DS4_DEV_MAX_ROW   1024 /* values of a row that shared memory is sized for */

/* The smallest power of two not below x, as its e8m0 code. */
__device__ __forceinline__ uint8_t ds4_e8m0_of(float x)
{
    uint32_t bits = __float_as_uint(x);

    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0xff;
    if ((bits & 0x80000000u) != 0 || bits <= 0x00400000u)
        return 0;
    return (uint8_t)((bits + 0x7fffffu) >> 23);
}

__device__ __forceinline__ uint32_t ds4_dev_shift_rne(uint32_t value, uint32_t shift)
{
    uint32_t half = 1u << (shift - 1), rest = value & ((1u << shift) - 1), kept = value >> shift;

    return kept + (rest > half || (rest == half && (kept & 1) != 0));
}

__device__ __forceinline__ uint8_t ds4_e4m3_of(float x)
{
    uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80, mag = bits & 0x7fffffffu;
    uint32_t exponent = mag >> 23;

    if (mag > 0x7f800000u)
        return (uint8_t)(sign | 0x7f);
    if (mag >= 0x43e00000u)
        return (uint8_t)(sign | 0x7e);
    if (exponent > 127 - 7)
        return (uint8_t)(sign | ds4_dev_shift_rne(mag - ((127u - 7) << 23), 20));
    if (exponent < 127 - 10)
        return (uint8_t)sign;
    return (uint8_t)(sign | ds4_dev_shift_rne((mag & 0x7fffffu) | 0x800000u, 141 - exponent));
}

/* Nearest of 0 .5 1 1.5 2 3 4 6, ties to the even code. */
__device__ __forceinline__ uint8_t ds4_e2m1_of(float x)
{
    float m = fabsf(x);
    uint8_t code = m <= 0.25f   ? 0
                   : m < 0.75f  ? 1
                   : m <= 1.25f ? 2
                   : m < 1.75f  ? 3
                   : m <= 2.5f  ? 4
                   : m < 3.5f   ? 5
                   : m <= 5.0f  ? 6
                                : 7;

    return x < 0.0f || (x == 0.0f && signbit(x)) ? code | 8 : code;
}

__device__ __forceinline__ float ds4_dev_bf16(float x)
{
    return __bfloat162float(__float2bfloat16_rn(x));
}

/* Scale code of x[0, n), computed by every lane of one warp. */
__device__ __forceinline__ uint8_t ds4_warp_scale(const float *x, int32_t n, float least,
                                                  float limit)
{
    float most = least;
    int finite = 1;

    for (int32_t i = threadIdx.x % 32; i < n; i += 32) {
        float magnitude = fabsf(x[i]);

        finite &= magnitude <= 3.402823466e38f;
        most = fmaxf(most, magnitude);
    }
    for (int o = 16; o > 0; o /= 2) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, o));
        finite &= __shfl_xor_sync(0xffffffffu, finite, o);
    }
    return finite ? ds4_e8m0_of(most / limit) : 0xff;
}

/* Hadamard transform of the d values in shared memory times d^-0.5; the whole block works. */
__device__ __forceinline__ void ds4_dev_hadamard(float *x, int32_t d)
{
    for (int32_t half = 1; half < d; half *= 2) {
        __syncthreads();
        for (int32_t i = threadIdx.x; i < d / 2; i += blockDim.x) {
            int32_t at = i / half * 2 * half + i % half;
            float a = x[at], b = x[at + half];

            x[at] = a + b;
            x[at + half] = a - b;
        }
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < d; i += blockDim.x)
        x[i] *= (float)(1.0 / sqrt((double)d));
    __syncthreads();
}

/* Rounds the row in place.  blockDim.x is a multiple of 32. */
__device__ __forceinline__ void ds4_dev_round_row(enum ds4_row_format format, int32_t d,
                                                  int32_t d_rope, float *x)
{
    const int32_t warp = threadIdx.x / 32, n_warp = blockDim.x / 32, lane = threadIdx.x % 32;
    const int32_t nope = format == DS4_ROW_FP8 ? d - d_rope : d;
    const int32_t block = format == DS4_ROW_FP8 ? DS4_DEV_FP8_BLOCK : DS4_DEV_FP4_BLOCK;

    __syncthreads();
    if (format == DS4_ROW_F32)
        return;
    if (format == DS4_ROW_FP4)
        ds4_dev_hadamard(x, d);
    if (format == DS4_ROW_FP4 || format == DS4_ROW_BF16)
        for (int32_t i = threadIdx.x; i < d; i += blockDim.x)
            x[i] = ds4_dev_bf16(x[i]);
    __syncthreads();
    if (format == DS4_ROW_BF16)
        return;
    for (int32_t at = warp * block; at < nope; at += n_warp * block) {
        int32_t n = min(block, nope - at);
        bool fp8 = format == DS4_ROW_FP8;
        float s = ds4_e8m0(
            ds4_warp_scale(x + at, n, fp8 ? 1e-4f : 6.0f * 0x1p-126f, fp8 ? 448.0f : 6.0f));

        for (int32_t i = at + lane; i < at + n; i += 32)
            x[i] = fp8 ? ds4_dev_bf16(ds4_e4m3(ds4_e4m3_of(x[i] / s)) * s)
                       : ds4_e2m1(ds4_e2m1_of(x[i] / s)) * s;
    }
    for (int32_t i = nope + threadIdx.x; i < d; i += blockDim.x)
        x[i] = ds4_dev_bf16(x[i]);
    __syncthreads();
}

/* Stores a rounded row.  The whole block works; no two blocks may hold the same row. */
__device__ __forceinline__ void ds4_dev_pack_row(enum ds4_row_format format, int32_t d,
                                                 int32_t d_rope, const float *x, uint8_t *row)
{
    const int32_t warp = threadIdx.x / 32, n_warp = blockDim.x / 32, lane = threadIdx.x % 32;
    const int32_t nope = d - d_rope;
    const int32_t end =
        nope + (nope + DS4_DEV_FP8_BLOCK - 1) / DS4_DEV_FP8_BLOCK; /* of the scales */
    const int32_t tail = end + end % 2;

    if (format == DS4_ROW_F32) {
        for (int32_t i = threadIdx.x; i < d; i += blockDim.x)
            ((float *)row)[i] = x[i];
    } else if (format == DS4_ROW_BF16) {
        for (int32_t i = threadIdx.x; i < d; i += blockDim.x)
            ((__nv_bfloat16 *)row)[i] = __float2bfloat16_rn(x[i]);
    } else if (format == DS4_ROW_FP8) {
        for (int32_t at = warp * DS4_DEV_FP8_BLOCK; at < nope; at += n_warp * DS4_DEV_FP8_BLOCK) {
            int32_t n = min(DS4_DEV_FP8_BLOCK, nope - at);
            uint8_t code = ds4_warp_scale(x + at, n, 1e-4f, 448.0f);

            for (int32_t i = at + lane; i < at + n; i += 32)
                row[i] = ds4_e4m3_of(x[i] / ds4_e8m0(code));
            if (lane == 0)
                row[nope + at / DS4_DEV_FP8_BLOCK] = code;
        }
        if (threadIdx.x == 0 && end < tail)
            row[end] = 0; /* every byte of a row is written: points are compared as bytes */
        /* Rows and tail are even.  (Two stores of a byte each, nvcc 13.0 for sm_90 gave h >> 14 for the
         * low one.) */
        for (int32_t i = threadIdx.x; i < d_rope; i += blockDim.x)
            *(uint16_t *)(row + tail + 2 * i) =
                __bfloat16_as_ushort(__float2bfloat16_rn(x[nope + i]));
    } else {
        for (int32_t at = warp * DS4_DEV_FP4_BLOCK; at < d; at += n_warp * DS4_DEV_FP4_BLOCK) {
            uint8_t code = ds4_warp_scale(x + at, DS4_DEV_FP4_BLOCK, 6.0f * 0x1p-126f, 6.0f);
            uint8_t mine = ds4_e2m1_of(x[at + lane] / ds4_e8m0(code));
            uint8_t next = (uint8_t)__shfl_down_sync(0xffffffffu, (int)mine, 1);

            if (lane % 2 == 0)
                row[(at + lane) / 2] = (uint8_t)(mine | next << 4);
            if (lane == 0)
                row[d / 2 + at / DS4_DEV_FP4_BLOCK] = code;
        }
    }
}

__device__ __forceinline__ uint8_t *ds4_dev_ring_row(const struct ds4_ring &ring, int32_t slot,
                                                     int32_t pos)
{
    return (uint8_t *)ring.data + ((int64_t)slot * ring.cap + pos % ring.cap) * ring.row_bytes;
}

/* Stores row t of the step, which is its entry's, into a ring: only the last cap rows of an entry, older ones
 * would be overwritten, in no fixed order.  The whole block works. */
__device__ __forceinline__ void ds4_dev_store_row(const struct ds4_dev_batch &batch,
                                                  const struct ds4_dev_entry &entry, int32_t t,
                                                  const float *x, const struct ds4_ring &ring)
{
    const int32_t pos = batch.pos[t];

    if (entry.active && pos < entry.cap_tok && pos + ring.cap >= entry.base_pos + entry.n_row)
        ds4_dev_pack_row(ring.format, ring.d, ring.d_rope, x,
                         ds4_dev_ring_row(ring, entry.slot, pos));
}

/* Row j of a sequence; NULL beyond its block table. */
__device__ __forceinline__ uint8_t *ds4_dev_page_row(const struct ds4_pages &pages,
                                                     const struct ds4_dev_batch &batch,
                                                     const struct ds4_dev_entry &entry, int32_t j)
{
    int32_t at = j / pages.rows_per_block, block;

    if (at >= entry.n_block)
        return NULL;
    block = batch.block[entry.first_block + at];
    if (block < 0 || block >= pages.n_block)
        return NULL;
    return (uint8_t *)pages.data +
           ((int64_t)block * pages.rows_per_block + j % pages.rows_per_block) * pages.row_bytes;
}

/* Rotates the pair (2i, 2i + 1) of the tail; the angle is rounded to f32 once, then reduced exactly. */
__device__ __forceinline__ void ds4_dev_rotate(float *pair, float freq, int32_t pos, bool inverse)
{
    float s, c, x0 = pair[0], x1 = pair[1];

    sincosf(__fmul_rn((float)pos, freq), &s, &c);
    if (inverse)
        s = -s;
    pair[0] = __fsub_rn(__fmul_rn(x0, c), __fmul_rn(x1, s));
    pair[1] = __fadd_rn(__fmul_rn(x0, s), __fmul_rn(x1, c));
}

#endif

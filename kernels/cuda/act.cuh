/* One warp packs 32 values into int8 with an f32 scale and the sums of its halves. */
#ifndef DS4_KERNELS_CUDA_ACT_CUH
#define DS4_KERNELS_CUDA_ACT_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#define DS4_UNIT_VALUES 32
#define DS4_UNIT_BYTES  40 /* two planes of 16, then scale and sums */

/* Bytes between packed rows of n_unit units. */
static __host__ __device__ __forceinline__ int64_t ds4_packed_row_bytes(int32_t n_unit)
{
    return ((int64_t)n_unit * DS4_UNIT_BYTES + 15) / 16 * 16;
}

/* Lane l brings value l of unit `unit` of a row of n_unit units; all lanes call. */
static __device__ __forceinline__ void ds4_pack_unit(float x, int32_t unit, int32_t n_unit,
                                                     uint8_t *row)
{
    const int lane = threadIdx.x % 32, half = lane / 16;
    /* Magnitudes compare as their bits; infinities and NaNs come out on top. */
    const uint32_t most = __reduce_max_sync(0xffffffffu, __float_as_uint(fabsf(x)));
    float d = __uint_as_float(most) / 127.0f, inverse = 1.0f / d;
    int q = 0, sum, other;

    if (most >= 0x7f800000u)
        d = __uint_as_float(0x7fc00000u);
    else if (!(inverse <= 0x1.fffffep127f)) /* zero, or so small that the inverse overflows */
        d = 0.0f;
    else
        q = __float2int_rn(x * inverse);
    sum = __reduce_add_sync(half == 0 ? 0x0000ffffu : 0xffff0000u, q);
    other = __shfl_sync(0xffffffffu, sum, 16);
    row[(int64_t)16 * (n_unit * half + unit) + lane % 16] = (uint8_t)q;
    if (lane == 0)
        ((uint2 *)(row + (int64_t)32 * n_unit))[unit] =
            make_uint2(__float_as_uint(d), ((uint32_t)sum & 0xffff) | (uint32_t)other << 16);
}

#define DS4_DIGITS_BYTES 104 /* six planes of 16, then the scale */

/* The same as three digits, q = (high * 256 + middle) * 256 + low of 127 * 2^16 for the largest. */
static __device__ __forceinline__ void ds4_pack_digits(float x, int32_t unit, int32_t n_unit,
                                                       uint8_t *row)
{
    const int lane = threadIdx.x % 32, half = lane / 16;
    const uint32_t most = __reduce_max_sync(0xffffffffu, __float_as_uint(fabsf(x)));
    float d = __uint_as_float(most) / 8323072.0f, inverse = 1.0f / d;
    int q = 0;

    if (most >= 0x7f800000u)
        d = __uint_as_float(0x7fc00000u);
    else if (!(inverse <= 0x1.fffffep127f)) /* zero, or so small that the inverse overflows */
        d = 0.0f;
    else
        q = __float2int_rn(x * inverse);
#pragma unroll
    for (int k = 2; k >= 0; k--) {
        const int digit = (int8_t)q;

        row[(int64_t)16 * (n_unit * (2 * k + half) + unit) + lane % 16] = (uint8_t)digit;
        q = (q - digit) >> 8;
    }
    if (lane == 0)
        ((uint2 *)(row + (int64_t)96 * n_unit))[unit] = make_uint2(__float_as_uint(d), 0);
}

/* As ds4_pack_unit, the same bytes, by eight neighbouring lanes with four values each: lane l of the eight brings
 * values 4l .. 4l + 3.  Whole warps call. */
static __device__ __forceinline__ void ds4_pack_quad(float4 x, int32_t unit, int32_t n_unit,
                                                     uint8_t *row)
{
    const int l = threadIdx.x % 8;
    uint32_t most = max(max(__float_as_uint(fabsf(x.x)), __float_as_uint(fabsf(x.y))),
                        max(__float_as_uint(fabsf(x.z)), __float_as_uint(fabsf(x.w))));
    float d, inverse;
    int q[4] = {0, 0, 0, 0}, sum, other;

#pragma unroll
    for (int o = 1; o < 8; o *= 2)
        most = max(most, __shfl_xor_sync(0xffffffffu, most, o));
    d = __uint_as_float(most) / 127.0f;
    inverse = 1.0f / d;
    if (most >= 0x7f800000u) {
        d = __uint_as_float(0x7fc00000u);
    } else if (!(inverse <= 0x1.fffffep127f)) {
        d = 0.0f;
    } else {
        q[0] = __float2int_rn(x.x * inverse);
        q[1] = __float2int_rn(x.y * inverse);
        q[2] = __float2int_rn(x.z * inverse);
        q[3] = __float2int_rn(x.w * inverse);
    }
    sum = q[0] + q[1] + q[2] + q[3];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    other = __shfl_xor_sync(0xffffffffu, sum, 4);
    *(uint32_t *)(row + (int64_t)16 * (n_unit * (l / 4) + unit) + l % 4 * 4) =
        ((uint32_t)q[0] & 255) | ((uint32_t)q[1] & 255) << 8 | ((uint32_t)q[2] & 255) << 16 |
        (uint32_t)q[3] << 24;
    if (l == 0)
        ((uint2 *)(row + (int64_t)32 * n_unit))[unit] =
            make_uint2(__float_as_uint(d), ((uint32_t)sum & 0xffff) | (uint32_t)other << 16);
}

#endif

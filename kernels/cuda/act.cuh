/* One warp packs 32 values into int8 with an f32 scale and the sums of its halves. */
#ifndef DS4_KERNELS_CUDA_ACT_CUH
#define DS4_KERNELS_CUDA_ACT_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#define DS4_UNIT_VALUES 32
#define DS4_UNIT_BYTES  40 /* two planes of 16, then scale and sums */

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

#endif

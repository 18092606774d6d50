/* Room for exact rows packed as digits (product.cuh): behind the scratch that operations carve, because exact
 * products may stand on the side, beside operations that use all of that. */
#ifndef DS4_KERNELS_CUDA_DIGITS_CUH
#define DS4_KERNELS_CUDA_DIGITS_CUH

#include "kernels/cuda/device.cuh"

#define DS4_DIGITS_ROOM ((size_t)2 << 20) /* 32 rows of 20,000 values */

/* One room for the main stream, one for the side. */
static inline void *ds4_digits_room(const struct ds4_device *dev)
{
    return dev->scratch + dev->scratch_bytes +
           (dev->stream == dev->side_stream ? DS4_DIGITS_ROOM : 0);
}

#endif

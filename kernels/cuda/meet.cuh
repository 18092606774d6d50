/* Barriers of some warps of a block. */
#ifndef DS4_KERNELS_CUDA_MEET_CUH
#define DS4_KERNELS_CUDA_MEET_CUH

/* For n threads, whole warps, under a number of their own (1 .. 15). */
static __device__ __forceinline__ void ds4_meet(int id, int n)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory");
}

#endif

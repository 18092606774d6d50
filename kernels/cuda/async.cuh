/* Copies from global to shared memory that run behind a thread's back (cp.async, 16 bytes each). */
#ifndef DS4_KERNELS_CUDA_ASYNC_CUH
#define DS4_KERNELS_CUDA_ASYNC_CUH

#include <cuda_runtime.h>
#include <stdint.h>

/* `bytes` (0..16) are read from the 16-byte aligned `from`; the rest of the 16 at `to` becomes zero. */
static __device__ __forceinline__ void ds4_async_copy(void *to, const void *from, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
}

/* Closes a group of copies, empty or not. */
static __device__ __forceinline__ void ds4_async_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most `left` of this thread's groups are on their way; other threads' need a barrier. */
template <int left> static __device__ __forceinline__ void ds4_async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

#endif

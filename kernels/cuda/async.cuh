/* What runs behind a thread's back: copies from global to shared memory (cp.async), and the start of a
 * kernel before its predecessor has ended. */
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

/* Eight (four) bytes, both addresses aligned to as much. */
static __device__ __forceinline__ void ds4_async_copy8(void *to, const void *from)
{
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 8;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
        "l"(from)
        : "memory");
}

static __device__ __forceinline__ void ds4_async_copy4(void *to, const void *from)
{
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
        "l"(from)
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

/* A kernel launched by DS4_CHAIN may start while its predecessor runs (sm_90).  Until this returns it
 * may touch nothing but weights; afterwards all earlier kernels' writes are there.  Every thread calls
 * both, release first, or ds4_take_turn, before it returns: a kernel that ended without waiting would let
 * its successor overtake its predecessor.  What an earlier kernel wrote is read by plain loads, never by
 * __ldg: the read-only path may keep lines from before the wait. */
static __device__ __forceinline__ void ds4_wait_previous(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* A pointer that the compiler may not use before this point: loads through it stay behind a wait. */
template <class T> static __device__ __forceinline__ T *ds4_after(T *p)
{
    asm volatile("" : "+l"(p));
    return p;
}

/* Plain loads of 16 and 8 bytes that the compiler may move freely, past copies and barriers too: for what
 * does not change while the kernel runs, through a pointer from ds4_after. */
static __device__ __forceinline__ uint4 ds4_load16(const void *p)
{
    uint4 v;

    asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p));
    return v;
}

static __device__ __forceinline__ uint2 ds4_load8(const void *p)
{
    uint2 v;

    asm("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

/* The next kernel may start as soon as there is room for its blocks. */
static __device__ __forceinline__ void ds4_release_next(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

static __device__ __forceinline__ void ds4_take_turn(void)
{
    ds4_release_next();
    ds4_wait_previous();
}

#endif

/* Tensor core instructions of sm_80: fragments from shared memory, products of bf16 and of int8. */
#ifndef DS4_KERNELS_CUDA_MMA_CUH
#define DS4_KERNELS_CUDA_MMA_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

/* Four 8 x 8 matrices; lanes 0-7, 8-15, 16-23, 24-31 name the rows of one each (16 bytes, aligned). */
static __device__ __forceinline__ void ds4_ldmatrix(uint32_t (&r)[4], const __nv_bfloat16 *p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(p))
                 : "memory");
}

/* The same with each 8 x 8 matrix transposed. */
static __device__ __forceinline__ void ds4_ldmatrix_t(uint32_t (&r)[4], const __nv_bfloat16 *p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(p))
                 : "memory");
}

static __device__ __forceinline__ void ds4_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* d = c + a b on int8, 16 x 8 x 32; every element of C is c.  Lane 4g + t brings of A the bytes 4t .. 4t + 3 of
 * row g, of row g + 8, and the same sixteen bytes on; of B those bytes of column g; it gets rows g (d[0], d[1])
 * and g + 8 of columns 2t and 2t + 1. */
static __device__ __forceinline__ void ds4_mma_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                  uint32_t b1, int c)
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c));
}

/* c + the products of four unsigned with four signed bytes. */
static __device__ __forceinline__ int ds4_dot_us(uint32_t a, uint32_t b, int c)
{
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(c) : "r"(a), "r"(b));
    return c;
}

static __device__ __forceinline__ uint32_t ds4_bf16_pair(float low, float high)
{
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);

    return *(const uint32_t *)&v;
}

#endif

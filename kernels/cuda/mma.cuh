/* Tensor core instructions of sm_80 on bf16: fragments from shared memory, and products. */
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

static __device__ __forceinline__ uint32_t ds4_bf16_pair(float low, float high)
{
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);

    return *(const uint32_t *)&v;
}

#endif

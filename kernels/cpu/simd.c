/* Chooses the table of inner loops.  The only place that asks the processor what it is. */
#include "kernels/cpu/simd.h"

#include "kernels/cpu/iq2_grid.h"

extern const struct ds4_simd ds4_simd_scalar, ds4_simd_avx2, ds4_simd_avx512;

static int has_avx2(void)
{
    return __builtin_cpu_supports("avx2");
}

static int has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

const struct ds4_simd *ds4_simd_find(enum ds4_isa isa)
{
    ds4_iq2_tables_init();
    switch (isa) {
    case DS4_ISA_AUTO:
        return has_avx512() ? &ds4_simd_avx512 : has_avx2() ? &ds4_simd_avx2 : &ds4_simd_scalar;
    case DS4_ISA_SCALAR:
        return &ds4_simd_scalar;
    case DS4_ISA_AVX2:
        return has_avx2() ? &ds4_simd_avx2 : NULL;
    case DS4_ISA_AVX512:
        return has_avx512() ? &ds4_simd_avx512 : NULL;
    }
    return NULL;
}

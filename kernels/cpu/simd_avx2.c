/* The inner loops for AVX2; this file alone is compiled with -mavx2 (Makefile). */
#define DS4_SIMD_TABLE ds4_simd_avx2
#define DS4_SIMD_NAME  "avx2"
#define DS4_SIMD_WIDTH 8
#include "kernels/cpu/simd_body.h"

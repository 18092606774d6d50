/* The inner loops for AVX-512 F, BW, DQ, VL; this file alone is compiled with them (Makefile). */
#define DS4_SIMD_TABLE ds4_simd_avx512
#define DS4_SIMD_NAME  "avx512"
#define DS4_SIMD_WIDTH 16
#include "kernels/cpu/simd_body.h"

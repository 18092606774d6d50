/* The inner loops for the baseline of the build (x86-64-v2: four floats at a time). */
#define DS4_SIMD_TABLE ds4_simd_scalar
#define DS4_SIMD_NAME  "scalar"
#define DS4_SIMD_WIDTH 4
#include "kernels/cpu/simd_body.h"

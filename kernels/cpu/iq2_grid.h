/* Codebook of IQ2_XXS: 256 vectors of eight magnitudes and 128 sign patterns, as bytes of a u64
 * (element j in bits 8j..8j+7). */
#ifndef DS4_KERNELS_CPU_IQ2_GRID_H
#define DS4_KERNELS_CPU_IQ2_GRID_H

#include "kernels/iq2_codes.h"

#include <stdint.h>

#define DS4_IQ2_SIGNS 128

/* Two bits per element: level 0, 1, 2 = magnitude 8, 25, 43.  Strictly rising. */
extern const uint16_t ds4_iq2_codes[DS4_IQ2_CODES];

/* Filled by ds4_iq2_tables_init, constant afterwards. */
extern uint64_t ds4_iq2_grid[DS4_IQ2_CODES];
extern uint64_t ds4_iq2_sign[DS4_IQ2_SIGNS]; /* 0xff bytes where the sign is minus */

/* Any thread, any number of times; ds4_simd_find calls it. */
void ds4_iq2_tables_init(void);

#endif

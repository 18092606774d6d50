/* Tables made from the IQ2_XXS codebook at start.
 *
 * Magnitudes: the byte form of the 256 codes.  Signs: seven stored bits, the eighth makes the number of
 * minus signs even. */
#include "kernels/cpu/iq2_grid.h"

#include <pthread.h>

const uint16_t ds4_iq2_codes[DS4_IQ2_CODES] = {DS4_IQ2_CODE_LIST};

uint64_t ds4_iq2_grid[DS4_IQ2_CODES];
uint64_t ds4_iq2_sign[DS4_IQ2_SIGNS];

static void make_tables(void)
{
    static const uint8_t magnitude[4] = {8, 25, 43, 0}; /* level 3 does not occur */

    for (int i = 0; i < DS4_IQ2_CODES; i++) {
        uint64_t bytes = 0;

        for (int j = 0; j < 8; j++)
            bytes |= (uint64_t)magnitude[ds4_iq2_codes[i] >> 2 * j & 3] << 8 * j;
        ds4_iq2_grid[i] = bytes;
    }
    for (unsigned int i = 0; i < DS4_IQ2_SIGNS; i++) {
        unsigned int bits = i | (unsigned int)__builtin_parity(i) << 7;
        uint64_t mask = 0;

        for (int j = 0; j < 8; j++)
            mask |= (bits >> j & 1) != 0 ? UINT64_C(0xff) << 8 * j : 0;
        ds4_iq2_sign[i] = mask;
    }
}

void ds4_iq2_tables_init(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, make_tables);
}

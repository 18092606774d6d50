/* The generator on the host.
 *
 * synth_body.h holds the arithmetic; compiled here without fused multiply-adds, as all of the house is.
 * Kept apart from synth.c, which knows models and hashing: programs that only make blocks need this. */
#include "common/synth_block.h"

#include <string.h>

#define SYNTH_FN               static inline
#define SYNTH_HALF(x)          ds4_f16_from_f32(x)
#define SYNTH_MUL_ADD(a, b, c) ((a) * (b) + (c))
#include "common/synth_body.h"

void ds4_synth_fill(const struct ds4_synth_recipe *recipe, uint64_t first, uint64_t n, uint8_t *dst)
{
    for (uint64_t i = 0; i < n; i++)
        synth_block(recipe, first + i, dst + i * recipe->block_bytes);
}

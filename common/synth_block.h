/* The generator behind synthetic weights: one block of a tensor from a recipe and the block's index.
 *
 * A recipe is plain numbers, so that a device can be handed one and make the same bytes itself: blocks
 * are pure functions of (recipe, index), in any order, anywhere.  Recipes come from common/synth.h. */
#ifndef DS4_COMMON_SYNTH_BLOCK_H
#define DS4_COMMON_SYNTH_BLOCK_H

#include "common/dtype.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DS4_SYNTH_MAX_BLOCK_BYTES 84

struct ds4_synth_recipe {
    uint64_t key; /* of the tensor under the seed */
    enum ds4_dtype dtype;
    uint32_t block_bytes; /* 66 IQ2_XXS, 84 Q2_K, 34 Q8_0, 17 MXFP4, 4 F32 and I32, 2 F16 */
    float deviation;      /* of a weight, blocks: 1 / sqrt(row length), the head's twice that */
    float centre;         /* scalars: uniform in centre +- half */
    float half;
    uint32_t e8m0;     /* MXFP4: scale byte below the target ... */
    float above;       /* ... and the share of blocks that take the next one */
    uint32_t n_used;   /* I32, hash tables: entries per row ... */
    uint32_t n_expert; /* ... and what they choose from */
};

/* Blocks [first, first + n) (scalar types: values) to dst, n * block_bytes bytes. */
void ds4_synth_fill(const struct ds4_synth_recipe *recipe, uint64_t first, uint64_t n,
                    uint8_t *dst);

#ifdef __cplusplus
}
#endif

#endif

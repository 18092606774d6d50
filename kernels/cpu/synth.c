/* Synthetic weights, and how wide a step's routing spreads over them.
 *
 * Blocks depend on nothing but the recipe and their number, so threads take pieces of a tensor in any
 * order. */
#include "kernels/cpu/cpu.h"

#include <string.h>

#define PIECE_BLOCKS 4096

struct job {
    const struct ds4_synth_recipe *recipe;
    uint64_t n_block;
    uint8_t *dst;
};

static void fill_piece(void *ctx, int32_t piece, int32_t thread)
{
    const struct job *job = ctx;
    uint64_t first = (uint64_t)piece * PIECE_BLOCKS;
    uint64_t n = job->n_block - first < PIECE_BLOCKS ? job->n_block - first : PIECE_BLOCKS;

    (void)thread;
    ds4_synth_fill(job->recipe, first, n, job->dst + first * job->recipe->block_bytes);
}

void ds4_cpu_synth(struct ds4_device *dev, const struct ds4_synth_recipe *recipe, uint64_t n_block,
                   void *dst)
{
    struct job job = {recipe, n_block, dst};

    ds4_pool_run(dev->pool, (int32_t)((n_block + PIECE_BLOCKS - 1) / PIECE_BLOCKS), fill_piece,
                 &job);
}

void ds4_cpu_spread(struct ds4_device *dev, const struct ds4_spread_args *a)
{
    bool seen[DS4_SPREAD_MAX_EXPERTS] = {false};
    uint64_t n = 0;

    (void)dev;
    assert(a->n_expert <= DS4_SPREAD_MAX_EXPERTS);
    for (int32_t t = 0; t < a->batch->n_tok; t++) {
        if (!ds4_cpu_active(a->batch, t))
            continue;
        for (int32_t i = 0; i < a->n_used; i++) {
            int32_t id = a->id[t * a->n_used + i];

            if (id >= 0 && id < a->n_expert) /* the experts themselves report others */
                seen[id] = true;
        }
    }
    for (int32_t e = 0; e < a->n_expert; e++)
        n += seen[e];
    a->count[0]++;
    a->count[1] += n;
}

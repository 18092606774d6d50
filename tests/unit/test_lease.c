/* No write without a lease: all cache memory of the stages is filled with a pattern, and after steps of every
 * kind it has changed where their leases allow it and nowhere else.  What is refused changes nothing. */
#include "tests/support/chain.h"
#include "tests/support/golden.h"
#include "worker/stage_state.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define GOLDEN "tests/data/model/ds4-tiny-golden.safetensors"
#define CANARY 0xa5

static struct golden *golden;
static const int32_t *ids;

static int open_text(void **state)
{
    (void)state;
    golden = golden_open(GOLDEN);
    ids = golden_get(golden, "long_ids", "I32").data;
    return 0;
}

static int close_text(void **state)
{
    (void)state;
    golden_close(golden);
    return 0;
}

/* The CPU's device memory is ours to look at. */
static struct chain *new_chain(void)
{
    const struct chain_options options = {.quant_sim = DS4_ON, .n_stage = 2, .context_tok = 1024};
    struct chain *c = chain_new(&options);

    for (int32_t s = 0; s < c->n_stage; s++)
        for (int32_t l = 0; l < c->stage[s]->kv.shape.n_layer; l++) {
            struct ds4_kv_layer *layer = &c->stage[s]->kv.layer[l];
            struct ds4_ring *ring[] = {&layer->window, &layer->comp_k, &layer->comp_g,
                                       &layer->index_k, &layer->index_g};
            struct ds4_pages *pages[] = {&layer->rows, &layer->index_rows};

            for (int i = 0; i < 5; i++)
                if (ring[i]->data != NULL)
                    memset(ring[i]->data, CANARY,
                           (size_t)ring[i]->n_slot * (size_t)ring[i]->cap * ring[i]->row_bytes);
            for (int i = 0; i < 2; i++)
                if (pages[i]->data != NULL)
                    memset(pages[i]->data, CANARY,
                           (size_t)pages[i]->n_block * (size_t)pages[i]->rows_per_block *
                               pages[i]->row_bytes);
        }
    return c;
}

static bool is_canary(const void *at, size_t bytes)
{
    const uint8_t *b = at;

    return bytes == 0 || (b[0] == CANARY && memcmp(b, b + 1, bytes - 1) == 0);
}

/* What may have been written: rings of slots in use, and of block b the rows that tokens below rows[b] close. */
static void check(const struct chain *c, const bool *slot, const int32_t *rows)
{
    for (int32_t s = 0; s < c->n_stage; s++)
        for (int32_t l = 0; l < c->stage[s]->kv.shape.n_layer; l++) {
            const struct ds4_kv_layer *layer = &c->stage[s]->kv.layer[l];
            const struct ds4_ring *ring[] = {&layer->window, &layer->comp_k, &layer->comp_g,
                                             &layer->index_k, &layer->index_g};
            const struct ds4_pages *pages[] = {&layer->rows, &layer->index_rows};
            int32_t ratio = c->stage[s]->kv.shape.layer[l].ratio;

            for (int i = 0; i < 5; i++)
                for (int32_t k = 0; ring[i]->data != NULL && k < ring[i]->n_slot; k++) {
                    size_t bytes = (size_t)ring[i]->cap * ring[i]->row_bytes;

                    if (!slot[k] && !is_canary((uint8_t *)ring[i]->data + (size_t)k * bytes, bytes))
                        fail_msg("stage %d layer %d: ring %d of slot %d was written", s, l, i, k);
                }
            for (int i = 0; i < 2; i++)
                for (int32_t b = 0; pages[i]->data != NULL && b < pages[i]->n_block; b++) {
                    size_t bytes = (size_t)pages[i]->rows_per_block * pages[i]->row_bytes;
                    size_t used = (size_t)(rows[b] / ratio) * pages[i]->row_bytes;

                    if (!is_canary((uint8_t *)pages[i]->data + (size_t)b * bytes + used,
                                   bytes - used))
                        fail_msg("stage %d layer %d: block %d was written beyond row %d", s, l, b,
                                 rows[b] / ratio);
                }
        }
}

static void reopen(struct chain *c, int32_t slot)
{
    struct ds4_seq_open open =
        chain_greedy(slot, 100 + (uint64_t)slot, c->owner[slot].epoch + 1, 1);

    chain_step(c, &open, 1, NULL, 0);
}

/* rows[]: tokens [0, n) of the slot's sequence lie in its blocks. */
static void allow(const struct chain *c, int32_t slot, int32_t n, int32_t *rows)
{
    for (int32_t b = 0; n > 0; b++, n -= DS4_BLOCK_TOK) {
        int32_t here = n < DS4_BLOCK_TOK ? n : DS4_BLOCK_TOK;

        if (rows[c->table[slot][b]] < here)
            rows[c->table[slot][b]] = here;
    }
}

static void rows_are_written_where_a_lease_covers_them_and_nowhere_else(void **state)
{
    struct chain *c = new_chain();
    int32_t n_block = c->stage[0]->kv.shape.n_block;
    int32_t *rows = calloc((size_t)n_block, sizeof(*rows));
    bool slot[CHAIN_SLOTS] = {false};
    const struct chain_part two[] = {{.slot = 2, .base_pos = 300, .n_tok = 1, .token = ids + 300},
                                     {.slot = 5, .base_pos = 37, .n_tok = 130, .token = ids + 37}};

    (void)state;
    assert_non_null(rows);
    check(c, slot, rows);
    slot[2] = slot[5] = true;
    reopen(c, 2);
    reopen(c, 5);
    chain_feed(c, 2, ids, 0, 300, 300, false);
    allow(c, 2, 300, rows);
    check(c, slot, rows);
    chain_feed(c, 5, ids, 0, 37, 37, false);
    chain_step(c, NULL, 0, two, 2); /* a decode beside a chunk */
    allow(c, 2, 301, rows);
    allow(c, 5, 167, rows);
    check(c, slot, rows);
    chain_save(c, 2, 301, 7); /* a point reads only */
    chain_step(c, NULL, 0, NULL, 0);
    chain_feed(c, 2, ids + 900 - 250, 250, 9, 9, false); /* cut back */
    check(c, slot, rows);
    chain_install(c, 6, 301, 7);
    slot[6] = true;
    reopen(c, 6);
    check(c, slot, rows);
    chain_copy_block(c, c->table[2][1], c->table[6][1]);
    allow(c, 6, 0, rows);
    rows[c->table[6][1]] = 301 - DS4_BLOCK_TOK;
    chain_step(c, NULL, 0, NULL, 0);
    check(c, slot, rows);
    free(rows);
    chain_free(c);
}

/* Leases that do not cover the rows, blocks there are not, epochs of yesterday: not one byte. */
static void what_a_lease_does_not_cover_is_refused_before_a_byte_is_written(void **state)
{
    (void)state;
    for (int kind = 0; kind < 6; kind++) {
        struct chain *c = new_chain();
        int32_t n_block = c->stage[0]->kv.shape.n_block;
        int32_t *rows = calloc((size_t)n_block, sizeof(*rows));
        bool slot[CHAIN_SLOTS] = {false};
        struct chain_part part = {.slot = 2, .n_tok = 200, .token = ids};
        int32_t bad_block = n_block;
        struct ds4_step *step;

        assert_non_null(rows);
        reopen(c, 2);
        step = chain_build(c, NULL, 0, &part, 1);
        switch (kind) {
        case 0: /* one row too few */
            step->entry[0].cap_tok = 199;
            break;
        case 1: /* more rows than its blocks hold */
            step->entry[0].n_block = 1;
            step->entry[0].cap_tok = DS4_BLOCK_TOK + 1;
            break;
        case 2:
            step->entry[0].epoch--;
            break;
        case 3:
            step->entry[0].slot = 3; /* not opened */
            break;
        case 4:
            step->entry[0].n_block = 1;
            step->entry[0].block = &bad_block;
            step->entry[0].cap_tok = DS4_BLOCK_TOK;
            break;
        default:
            step->entry[0].base_pos = 1; /* beyond where the sequence stands */
        }
        chain_refuse(c, step, DS4_E_PROTOCOL);
        check(c, slot, rows);
        free(rows);
        chain_free(c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_written_where_a_lease_covers_them_and_nowhere_else),
        cmocka_unit_test(what_a_lease_does_not_cover_is_refused_before_a_byte_is_written),
    };

    return cmocka_run_group_tests(tests, open_text, close_text);
}

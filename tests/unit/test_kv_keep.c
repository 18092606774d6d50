/* Rings that come from elsewhere than the end of a step.  Points inside a chunk (worker/kv_keep.c): byte for byte those that chunks ending there would have left, and
 * what goes on from them is what a run that never went further would be.  `--long 1`: more places. */
#include "proto/point.h"
#include "tests/support/chain.h"
#include "tests/support/golden.h"
#include "worker/stage_state.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define GOLDEN    "tests/data/model/ds4-tiny-golden.safetensors"
#define SUFFIX    9
#define SUFFIX_AT 1500

static struct golden *golden;
static const int32_t *ids;
static bool all; /* --long 1 */

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

static void *take(size_t bytes)
{
    void *p = calloc(bytes, 1);

    assert_non_null(p);
    return p;
}

static void reopen(struct chain *c, int32_t slot, int32_t pos, uint64_t point)
{
    struct ds4_seq_open open =
        chain_greedy(slot, 100 + (uint64_t)slot, c->owner[slot].epoch + 1, 1);

    if (pos > 0)
        chain_install(c, slot, pos, point);
    chain_step(c, &open, 1, NULL, 0);
}

/* All bytes of a point of one stage. */
static uint8_t *bytes_of(struct ds4_stage *st, uint64_t id, size_t *n)
{
    const struct ds4_kv_point *point = ds4_kv_point_find(&st->store, id);
    struct ds4_kv_cursor cursor;
    uint8_t *whole, *at;
    size_t piece;

    assert_non_null(point);
    ds4_kv_store_settle(&st->store);
    *n = point->blob.bytes;
    whole = at = take(*n);
    cursor = ds4_kv_cursor_at(&st->store.host, &point->blob, 0);
    for (uint8_t *unit = ds4_kv_cursor_next(&cursor, *n, &piece); piece > 0;
         unit = ds4_kv_cursor_next(&cursor, *n, &piece)) {
        memcpy(at, unit, piece);
        at += piece;
    }
    return whole;
}

/* Slot 0 runs [0, from) and then [from, to) at once with points inside; slot 1 stops at each of them. */
static void compare(int32_t from, int32_t to, int32_t n_stage, enum ds4_auto_switch quant_sim)
{
    const struct chain_options options = {
        .quant_sim = quant_sim, .n_stage = n_stage, .host_bytes = 128 << 20};
    struct chain *c = chain_new(&options);
    int32_t first = (from / DS4_ANCHOR_TOK + 1) * DS4_ANCHOR_TOK, n_point = 0;

    reopen(c, 0, 0, 0);
    reopen(c, 1, 0, 0);
    if (from > 0) {
        chain_feed(c, 0, ids, 0, from, from, false);
        chain_feed(c, 1, ids, 0, from, from, false);
    }
    for (int32_t a = first; a < to; a += DS4_ANCHOR_TOK)
        chain_save(c, 0, a, 1000 + (uint64_t)a);
    chain_feed(c, 0, ids, from, to - from, to - from, false);
    for (int32_t a = first, at = from; a < to; at = a, a += DS4_ANCHOR_TOK) {
        chain_save(c, 1, a, 2000 + (uint64_t)a);
        chain_feed(c, 1, ids, at, a - at, a - at, false);
        for (int32_t s = 0; s < c->n_stage; s++) {
            size_t n, n_want;
            uint8_t *got = bytes_of(c->stage[s], 1000 + (uint64_t)a, &n);
            uint8_t *want = bytes_of(c->stage[s], 2000 + (uint64_t)a, &n_want);

            assert_int_equal(n, n_want);
            if (memcmp(got, want, n) != 0)
                fail_msg("point at %d of a chunk over [%d, %d), stage %d of %d", a, from, to, s,
                         n_stage);
            free(got);
            free(want);
        }
        n_point++;
    }
    assert_true(n_point >= 2);
    chain_free(c);
}

static void points_inside_a_chunk_are_those_of_chunks_that_end_there(void **state)
{
    (void)state;
    compare(60, 300, 2,
            DS4_ON); /* packed rows; windows that begin in the rings; the last place hot */
    if (!all)
        return;
    compare(100, 400, 2, DS4_OFF);
    compare(0, 641, 2, DS4_OFF);
    compare(256, 700, 1, DS4_ON);
    compare(127, 400, 1, DS4_ON); /* one row of the first block is in the step */
    compare(1, 1400, 1, DS4_OFF); /* longer than every ring */
}

static void what_goes_on_from_inside_a_chunk_is_a_run_that_ended_there(void **state)
{
    const struct chain_options options = {
        .quant_sim = DS4_ON, .n_stage = 2, .host_bytes = 128 << 20};
    struct chain *c = chain_new(&options);
    size_t bytes = SUFFIX * c->row_bytes;
    uint8_t *want = take(bytes), *got = take(bytes);

    (void)state;
    for (int32_t a = 128; a <= (all ? 512 : 128); a += 128) {
        chain_form(c);
        reopen(c, 0, 0, 0);
        reopen(c, 1, 0, 0);
        chain_feed(c, 1, ids, 0, a, a, false);
        chain_feed(c, 1, ids + SUFFIX_AT - a, a, SUFFIX, SUFFIX, false);
        chain_residual(c, SUFFIX, want);
        chain_save(c, 0, a, 7);
        chain_feed(c, 0, ids, 0, a + 128, a + 128, false);
        reopen(c, 0, a, 7);
        chain_feed(c, 0, ids + SUFFIX_AT - a, a, SUFFIX, SUFFIX, false);
        chain_residual(c, SUFFIX, got);
        assert_memory_equal(got, want, bytes);
    }
    free(got);
    free(want);
    chain_free(c);
}

static void poison_rings(struct chain *c)
{
    static uint8_t nan[1 << 20];
    struct ds4_stage *st;

    memset(nan, 0xff, sizeof(nan));
    for (int32_t s = 0; s < c->n_stage; s++) {
        st = c->stage[s];
        for (size_t at = 0; at < st->plan.rings_bytes; at += sizeof(nan)) {
            size_t left = st->plan.rings_bytes - at;

            st->backend->upload(st->dev, (uint8_t *)st->kv.layer[0].window.data + at, nan,
                                left < sizeof(nan) ? left : sizeof(nan));
        }
        st->backend->sync(st->dev);
    }
}

/* O5: rows exist, rings do not.  (window - 1) x layers tokens are run for the rings alone; what follows equals
 * a run that never lost them, and no row below has changed. */
static void a_replay_over_rows_that_exist_makes_exact_rings(void **state)
{
    const struct chain_options options = {.quant_sim = DS4_ON, .n_stage = 2};
    struct chain *c = chain_new(&options);
    const struct ds4_kv_shape *shape = &c->stage[0]->kv.shape;
    int32_t need = (shape->window_tok - 1) * (shape->n_layer + c->stage[1]->kv.shape.n_layer);
    int32_t m = need + 150, from = (m - need) / DS4_ANCHOR_TOK * DS4_ANCHOR_TOK;
    size_t bytes = SUFFIX * c->row_bytes, pages = c->stage[0]->plan.pages_bytes;
    uint8_t *want = take(bytes), *got = take(bytes);
    uint8_t *before = take(pages), *after = take(pages);
    void *at = NULL;

    (void)state;
    for (int32_t l = 0; l < shape->n_layer && at == NULL; l++)
        at = c->stage[0]->kv.layer[l].rows.data;
    assert_non_null(at);
    assert_true(m + SUFFIX < SUFFIX_AT);
    reopen(c, 0, 0, 0);
    chain_feed(c, 0, ids, 0, m, m, false);
    chain_feed(c, 0, ids + SUFFIX_AT - m, m, SUFFIX, SUFFIX, false);
    chain_residual(c, SUFFIX, want);
    poison_rings(c);
    memcpy(before, at, pages); /* the CPU's device memory is ours */
    c->op[c->n_op++] = (struct ds4_kv_op){.kind = DS4_KV_REPLAY,
                                          .seq = c->owner[0].seq,
                                          .slot = 0,
                                          .epoch = c->owner[0].epoch + 1,
                                          .from_pos = from,
                                          .pos = m};
    reopen(c, 0, 0, 0);
    chain_feed(c, 0, ids, from, m - from, 300, false);
    memcpy(after, at, pages);
    assert_memory_equal(before, after, pages);
    chain_feed(c, 0, ids + SUFFIX_AT - m, m, SUFFIX, SUFFIX, false);
    chain_residual(c, SUFFIX, got);
    assert_memory_equal(got, want, bytes);
    /* There is no state below m to be cut back to. */
    assert_false(ds4_kv_reaches(&c->stage[0]->kv, &c->stage[0]->kv.slot[0], m - 1));
    assert_true(ds4_kv_reaches(&c->stage[0]->kv, &c->stage[0]->kv.slot[0], m));
    free(before);
    free(after);
    free(got);
    free(want);
    chain_free(c);
}

/* Only multiples of an anchor's length, only inside the entry, only as many as there are areas. */
static void a_place_that_no_chunk_passes_is_refused(void **state)
{
    static const int32_t wrong[] = {129, 256, 384, 1};
    const struct chain_options options = {.max_step_tok = 256};
    struct chain *c = chain_new(&options);
    struct chain_part part = {.n_tok = 256, .token = ids};

    (void)state;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        chain_form(c);
        reopen(c, 0, 0, 0);
        if (wrong[i] == 256) { /* reached at the end: nothing wrong with it */
            chain_save(c, 0, wrong[i], 1);
            chain_step(c, NULL, 0, &part, 1);
            continue;
        }
        chain_save(c, 0, wrong[i], 1);
        chain_refuse(c, chain_build(c, NULL, 0, &part, 1), DS4_E_PROTOCOL);
    }
    chain_form(c);
    reopen(c, 0, 0, 0);
    for (uint64_t i = 0; i <= (uint64_t)ds4_point_inner_max(256); i++)
        chain_save(c, 0, 128, 1 + i);
    chain_refuse(c, chain_build(c, NULL, 0, &part, 1), DS4_E_PROTOCOL);
    chain_free(c);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(points_inside_a_chunk_are_those_of_chunks_that_end_there),
        cmocka_unit_test(what_goes_on_from_inside_a_chunk_is_a_run_that_ended_there),
        cmocka_unit_test(a_replay_over_rows_that_exist_makes_exact_rings),
        cmocka_unit_test(a_place_that_no_chunk_passes_is_refused),
    };

    chain_take_args(argc, argv);
    for (int i = 1; i + 1 < argc; i += 2)
        all |= strcmp(argv[i], "--long") == 0;
    return cmocka_run_group_tests(tests, open_text, close_text);
}

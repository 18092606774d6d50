/* Tests of worker/kv_cache: geometry, leases, and what a truncation may undo. */
#include "worker/kv_cache.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define N_SLOT       3
#define N_BLOCK      10
#define TABLE_BLOCKS 6
#define HOT          120

static const struct ds4_kv_layer_shape layers[] = {
    {.ratio = 0}, {.ratio = 4, .overlap = true, .indexer = true}, {.ratio = 128}, {.ratio = 16}};

static struct ds4_kv_shape flash_shape(enum ds4_row_format row, enum ds4_row_format index)
{
    struct ds4_kv_shape shape = {.n_layer = 4,
                                 .layer = layers,
                                 .d_head = 512,
                                 .d_rope = 64,
                                 .d_index = 128,
                                 .window_tok = 128,
                                 .hot_tok = HOT,
                                 .row_format = row,
                                 .index_format = index,
                                 .n_slot = N_SLOT,
                                 .n_block = N_BLOCK,
                                 .table_blocks = TABLE_BLOCKS};
    return shape;
}

struct fixture {
    struct ds4_kv kv;
    void *rings;
    void *pages;
};

static int set_up(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));
    struct ds4_kv_shape shape = flash_shape(DS4_ROW_FP8, DS4_ROW_FP4);

    if (f == NULL)
        return -1;
    f->rings = calloc(1, ds4_kv_rings_bytes(&shape));
    f->pages = calloc(1, ds4_kv_pages_bytes(&shape));
    *state = f;
    return f->rings == NULL || f->pages == NULL ||
           ds4_kv_init(&f->kv, &shape, f->rings, f->pages, NULL);
}

static int tear_down(void **state)
{
    struct fixture *f = *state;

    ds4_kv_deinit(&f->kv);
    free(f->pages);
    free(f->rings);
    free(f);
    return 0;
}

static const int32_t blocks[] = {7, 2, 9, 0};

static struct ds4_kv_lease lease_of(int32_t slot, uint32_t epoch)
{
    struct ds4_kv_lease lease = {.seq = 100 + (uint64_t)slot,
                                 .slot = slot,
                                 .epoch = epoch,
                                 .cap_tok = 4 * DS4_BLOCK_TOK,
                                 .n_block = 4,
                                 .block = blocks};
    return lease;
}

static void open_slot(struct fixture *f, int32_t slot, uint32_t epoch)
{
    assert_int_equal(ds4_kv_open(&f->kv, slot, 100 + (uint64_t)slot, epoch, NULL), 0);
}

static int append(struct fixture *f, int32_t base, int32_t n, struct ds4_err *err)
{
    struct ds4_kv_lease lease = lease_of(0, 1);
    struct ds4_batch_entry entry;

    return ds4_kv_append(&f->kv, &lease, base, n, &entry, err);
}

#define assert_protocol(call)                                                                      \
    do {                                                                                           \
        struct ds4_err err = {0};                                                                  \
        assert_int_equal((call), -1);                                                              \
        assert_int_equal(err.code, DS4_E_PROTOCOL);                                                \
    } while (0)

static void flash_rows_have_the_published_sizes(void **state)
{
    struct fixture *f = *state;
    const struct ds4_kv_layer *csa = &f->kv.layer[1];
    const struct ds4_kv_layer *hca = &f->kv.layer[2];

    assert_int_equal(csa->window.row_bytes, 584);
    assert_int_equal(csa->rows.row_bytes, 584);
    assert_int_equal(csa->index_rows.row_bytes, 68);
    assert_int_equal(csa->rows.rows_per_block, 64);
    assert_int_equal(hca->rows.rows_per_block, 2);
    assert_int_equal(csa->comp_k.row_bytes, 1024 * 4);
    assert_int_equal(csa->index_k.row_bytes, 256 * 4);
    assert_int_equal(hca->comp_k.row_bytes, 512 * 4);
    assert_null(hca->index_rows.data);
    assert_null(f->kv.layer[0].rows.data);
    /* One CSA, one HCA and one layer of ratio 16 per block of 256 tokens. */
    assert_int_equal(ds4_kv_block_bytes(&f->kv.shape), 64 * (584 + 68) + 2 * 584 + 16 * 584);
}

static void rings_hold_the_hot_window_beside_what_the_next_token_needs(void **state)
{
    struct fixture *f = *state;

    assert_int_equal(f->kv.layer[0].window.cap, 256);
    assert_int_equal(f->kv.layer[1].comp_k.cap, 128);
    assert_int_equal(f->kv.layer[1].index_g.cap, 128);
    assert_int_equal(f->kv.layer[2].comp_g.cap, 256);
    assert_int_equal(f->kv.layer[3].comp_g.cap, 256); /* 15 + 120, rounded up */
}

static void areas_do_not_overlap_and_stay_inside(void **state)
{
    struct fixture *f = *state;
    const uint8_t *end = (uint8_t *)f->rings + ds4_kv_rings_bytes(&f->kv.shape);
    const uint8_t *at = f->rings;

    for (int32_t l = 0; l < 4; l++) {
        const struct ds4_ring *ring[] = {&f->kv.layer[l].window, &f->kv.layer[l].comp_k,
                                         &f->kv.layer[l].comp_g, &f->kv.layer[l].index_k,
                                         &f->kv.layer[l].index_g};

        for (int i = 0; i < 5; i++) {
            if (ring[i]->data == NULL)
                continue;
            assert_true((const uint8_t *)ring[i]->data >= at);
            assert_int_equal((uintptr_t)ring[i]->data % 16, 0);
            at = (const uint8_t *)ring[i]->data +
                 (size_t)ring[i]->n_slot * (size_t)ring[i]->cap * ring[i]->row_bytes;
        }
    }
    assert_true(at <= end);
}

static void an_append_gives_what_kernels_may_write(void **state)
{
    struct fixture *f = *state;
    struct ds4_kv_lease lease = lease_of(0, 1);
    struct ds4_batch_entry entry;

    open_slot(f, 0, 1);
    assert_int_equal(ds4_kv_append(&f->kv, &lease, 0, 300, &entry, NULL), 0);
    assert_true(entry.active);
    assert_int_equal(entry.base_pos, 0);
    assert_int_equal(entry.n_row, 300);
    assert_int_equal(entry.cap_tok, 1024);
    assert_int_equal(entry.n_block, 4);
    assert_memory_equal(entry.block, blocks, sizeof(blocks));
    assert_int_equal(f->kv.slot[0].pos, 300);
    assert_int_equal(f->kv.slot[0].hi, 300);
}

static void a_write_outside_the_lease_is_refused(void **state)
{
    struct fixture *f = *state;
    struct ds4_kv_lease lease = lease_of(0, 1);
    struct ds4_batch_entry entry;

    open_slot(f, 0, 1);
    lease.cap_tok = 100;
    assert_int_equal(ds4_kv_append(&f->kv, &lease, 0, 100, &entry, NULL), 0);
    assert_protocol(ds4_kv_append(&f->kv, &lease, 100, 1, &entry, &err));
    assert_protocol(ds4_kv_append(&f->kv, &lease, 0, 101, &entry, &err));
    assert_protocol(ds4_kv_append(&f->kv, &lease, -1, 1, &entry, &err));
    assert_protocol(ds4_kv_append(&f->kv, &lease, 100, 0, &entry, &err));
    assert_protocol(ds4_kv_append(&f->kv, &lease, 100, INT32_MAX, &entry, &err));
    lease.cap_tok = 4 * DS4_BLOCK_TOK + 1; /* more than its blocks hold */
    assert_protocol(ds4_kv_append(&f->kv, &lease, 100, 1, &entry, &err));
}

static void a_lease_of_another_owner_is_refused(void **state)
{
    struct fixture *f = *state;
    struct ds4_kv_lease lease = lease_of(0, 1);
    struct ds4_batch_entry entry;

    assert_protocol(ds4_kv_append(&f->kv, &lease, 0, 1, &entry, &err)); /* nobody opened it */
    open_slot(f, 0, 1);
    lease.epoch = 2;
    assert_protocol(ds4_kv_append(&f->kv, &lease, 0, 1, &entry, &err));
    lease.epoch = 1;
    lease.seq++;
    assert_protocol(ds4_kv_append(&f->kv, &lease, 0, 1, &entry, &err));
    lease.seq--;
    lease.slot = N_SLOT;
    assert_protocol(ds4_kv_append(&f->kv, &lease, 0, 1, &entry, &err));
    lease.slot = -1;
    assert_protocol(ds4_kv_append(&f->kv, &lease, 0, 1, &entry, &err));
    ds4_kv_reset(&f->kv, 1, N_BLOCK); /* a generation with fewer slots */
    assert_protocol(ds4_kv_open(&f->kv, 1, 5, 5, &err));
}

static void block_tables_are_checked_and_grow_at_their_end(void **state)
{
    static const int32_t bad[] = {N_BLOCK};
    static const int32_t negative[] = {-1};
    static const int32_t more[] = {5};
    struct fixture *f = *state;
    struct ds4_kv_lease lease = lease_of(0, 1);
    struct ds4_batch_entry entry;

    open_slot(f, 0, 1);
    lease.n_block = 1;
    lease.cap_tok = DS4_BLOCK_TOK;
    assert_int_equal(ds4_kv_append(&f->kv, &lease, 0, 1, &entry, NULL), 0);
    lease.first_block = 2; /* a hole */
    assert_protocol(ds4_kv_append(&f->kv, &lease, 1, 1, &entry, &err));
    lease.first_block = 1;
    lease.block = bad;
    assert_protocol(ds4_kv_append(&f->kv, &lease, 1, 1, &entry, &err));
    lease.block = negative;
    assert_protocol(ds4_kv_append(&f->kv, &lease, 1, 1, &entry, &err));
    lease.block = more;
    lease.cap_tok = 2 * DS4_BLOCK_TOK;
    assert_int_equal(ds4_kv_append(&f->kv, &lease, 1, 1, &entry, NULL), 0);
    assert_int_equal(entry.n_block, 2);
    assert_int_equal(entry.block[0], 7);
    assert_int_equal(entry.block[1], 5);
    lease.n_block = TABLE_BLOCKS;
    assert_protocol(ds4_kv_append(&f->kv, &lease, 2, 1, &entry, &err));
}

static void truncation_reaches_back_the_hot_window_and_no_further(void **state)
{
    struct fixture *f = *state;

    open_slot(f, 0, 1);
    assert_int_equal(append(f, 0, 1000, NULL), 0);
    assert_protocol(append(f, 1001, 1, &err)); /* ahead of the sequence */
    assert_protocol(append(f, 1000 - HOT - 1, 1, &err));
    assert_int_equal(append(f, 1000 - HOT, 1, NULL), 0);
    assert_int_equal(f->kv.slot[0].pos, 1000 - HOT + 1);
    assert_int_equal(f->kv.slot[0].hi, 1000);
}

/* Rows written beyond the cut have overwritten older slots: hi never falls. */
static void an_abandoned_branch_limits_later_truncations(void **state)
{
    struct fixture *f = *state;

    open_slot(f, 0, 1);
    assert_int_equal(append(f, 0, 1000, NULL), 0);
    assert_int_equal(append(f, 950, 30, NULL), 0); /* at 980 now */
    assert_protocol(append(f, 870, 1, &err)); /* 980 - 870 fits the window, 1000 - 870 does not */
    assert_int_equal(append(f, 900, 1, NULL), 0);
}

static void position_zero_is_always_legal_and_starts_afresh(void **state)
{
    struct fixture *f = *state;

    open_slot(f, 0, 1);
    assert_int_equal(append(f, 0, 1000, NULL), 0);
    assert_int_equal(append(f, 0, 10, NULL), 0);
    assert_int_equal(f->kv.slot[0].hi, 10);
    assert_int_equal(append(f, 5, 1, NULL), 0);
}

static void stacked_truncations_stay_legal_inside_the_window(void **state)
{
    struct fixture *f = *state;
    int32_t pos = 500;

    open_slot(f, 0, 1);
    assert_int_equal(append(f, 0, pos, NULL), 0);
    for (int32_t round = 0; round < 50; round++) {
        int32_t back = 1 + round * 7 % 20;

        pos -= back;
        assert_int_equal(append(f, pos, back + 1, NULL), 0);
        pos += back + 1;
    }
    assert_int_equal(f->kv.slot[0].pos, pos);
}

static void a_new_owner_of_a_used_slot_keeps_rows_but_not_the_table(void **state)
{
    struct fixture *f = *state;
    struct ds4_kv_lease lease = lease_of(0, 2);
    struct ds4_batch_entry entry;

    open_slot(f, 0, 1);
    assert_int_equal(append(f, 0, 200, NULL), 0);
    assert_protocol(ds4_kv_open(&f->kv, 0, 100, 1, &err)); /* the same epoch again */
    open_slot(f, 0, 2);
    lease.n_block = 0;
    assert_protocol(ds4_kv_append(&f->kv, &lease, 150, 1, &entry, &err));
    lease.n_block = 4;
    assert_int_equal(ds4_kv_append(&f->kv, &lease, 150, 1, &entry, NULL), 0);
    assert_int_equal(f->kv.slot[0].pos, 151);
    assert_int_equal(f->kv.slot[0].hi, 200);
}

static void a_closed_slot_starts_at_zero(void **state)
{
    struct fixture *f = *state;

    open_slot(f, 0, 1);
    assert_int_equal(append(f, 0, 200, NULL), 0);
    assert_int_equal(ds4_kv_close(&f->kv, 0, NULL), 0);
    assert_protocol(ds4_kv_close(&f->kv, 0, &err));
    open_slot(f, 0, 1);
    assert_protocol(append(f, 150, 1, &err));
    assert_int_equal(append(f, 0, 1, NULL), 0);
}

static void a_skipped_entry_moves_nothing_but_takes_the_table(void **state)
{
    struct fixture *f = *state;
    struct ds4_kv_lease lease = lease_of(0, 1);
    struct ds4_batch_entry entry;

    open_slot(f, 0, 1);
    lease.n_block = 1;
    lease.cap_tok = DS4_BLOCK_TOK;
    assert_int_equal(ds4_kv_append(&f->kv, &lease, 0, 256, &entry, NULL), 0);
    lease.first_block = 1;
    lease.block = blocks + 1;
    assert_int_equal(ds4_kv_skip(&f->kv, &lease, 1, &entry, NULL), 0);
    assert_false(entry.active);
    assert_int_equal(entry.cap_tok, 0);
    assert_int_equal(f->kv.slot[0].pos, 256);
    assert_int_equal(f->kv.slot[0].n_block, 2);
}

static void shapes_that_cannot_be_stored_are_refused(void **state)
{
    static const struct ds4_kv_layer_shape odd[] = {{.ratio = 3}};
    struct ds4_kv_shape shape = flash_shape(DS4_ROW_FP8, DS4_ROW_FP4);
    struct ds4_err err = {0};

    (void)state;
    assert_int_equal(ds4_kv_check_shape(&shape, &err), 0);
    shape.d_index = 48;
    assert_int_equal(ds4_kv_check_shape(&shape, &err), -1);
    assert_int_equal(err.code, DS4_E_INVALID);
    shape.d_index = 128;
    shape.n_layer = 1;
    shape.layer = odd;
    assert_int_equal(ds4_kv_check_shape(&shape, &err), -1);
    shape.layer = layers;
    shape.hot_tok = 0;
    assert_int_equal(ds4_kv_check_shape(&shape, &err), -1);
}

#define KV_TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        KV_TEST(flash_rows_have_the_published_sizes),
        KV_TEST(rings_hold_the_hot_window_beside_what_the_next_token_needs),
        KV_TEST(areas_do_not_overlap_and_stay_inside),
        KV_TEST(an_append_gives_what_kernels_may_write),
        KV_TEST(a_write_outside_the_lease_is_refused),
        KV_TEST(a_lease_of_another_owner_is_refused),
        KV_TEST(block_tables_are_checked_and_grow_at_their_end),
        KV_TEST(truncation_reaches_back_the_hot_window_and_no_further),
        KV_TEST(an_abandoned_branch_limits_later_truncations),
        KV_TEST(position_zero_is_always_legal_and_starts_afresh),
        KV_TEST(stacked_truncations_stay_legal_inside_the_window),
        KV_TEST(a_new_owner_of_a_used_slot_keeps_rows_but_not_the_table),
        KV_TEST(a_closed_slot_starts_at_zero),
        KV_TEST(a_skipped_entry_moves_nothing_but_takes_the_table),
        cmocka_unit_test(shapes_that_cannot_be_stored_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

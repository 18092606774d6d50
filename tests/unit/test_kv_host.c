/* worker/kv_host.c, kv_ids.c and kv_layout.c: units are never lost and never given twice; ids are found
 * whatever was removed; what a point and a part weigh is what the plan says, for any layer table. */
#include "proto/point.h"
#include "worker/kv_host.h"
#include "worker/kv_ids.h"
#include "worker/kv_layout.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define UNIT   64
#define N_UNIT 100
#define N_BLOB 40

static uint64_t random_state = 5;

static uint32_t next(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33);
}

/* ---- units ---- */

static void fill(const struct ds4_kv_host *host, const struct ds4_kv_blob *blob, uint8_t value)
{
    struct ds4_kv_cursor cursor = ds4_kv_cursor_at(host, blob, 0);
    size_t n, sum = 0;
    uint8_t *at;

    while (at = ds4_kv_cursor_next(&cursor, blob->bytes, &n), n > 0) {
        memset(at, value, n);
        sum += n;
    }
    assert_int_equal(sum, blob->bytes);
}

static void check(const struct ds4_kv_host *host, const struct ds4_kv_blob *blob, uint8_t value)
{
    size_t offset = blob->bytes == 0 ? 0 : next() % blob->bytes, sum = offset, n;
    struct ds4_kv_cursor cursor = ds4_kv_cursor_at(host, blob, offset);
    uint8_t *at;

    while (at = ds4_kv_cursor_next(&cursor, 1 + next() % 100, &n), n > 0) {
        for (size_t i = 0; i < n; i++)
            assert_int_equal(at[i], value);
        sum += n;
    }
    assert_int_equal(sum, blob->bytes);
}

static void units_are_never_lost_nor_given_twice(void **state)
{
    struct ds4_kv_host host;
    struct ds4_kv_blob blob[N_BLOB] = {0};
    uint8_t *arena = malloc((size_t)N_UNIT * UNIT);
    int64_t used = 0;
    struct ds4_err err = {0};

    (void)state;
    assert_int_equal(ds4_kv_host_init(&host, arena, UNIT, N_UNIT, &err), 0);
    ds4_kv_host_reset(&host, 90 * UNIT + 1);
    for (int round = 0; round < 20000; round++) {
        int i = (int)(next() % N_BLOB);

        if (blob[i].n_unit > 0) {
            check(&host, &blob[i], (uint8_t)i);
            used -= blob[i].n_unit;
            ds4_kv_host_give(&host, &blob[i]);
            assert_int_equal(blob[i].n_unit, 0);
        } else {
            size_t bytes = next() % (12 * UNIT);
            int64_t need = ds4_unit_round((int64_t)bytes, UNIT) / UNIT;
            int rc = ds4_kv_host_take(&host, bytes, &blob[i], &err);

            assert_int_equal(rc, used + need > 90 ? -1 : 0); /* the budget, not the arena */
            if (rc != 0)
                assert_int_equal(err.code, DS4_E_NOMEM);
            used += blob[i].n_unit;
            fill(&host, &blob[i], (uint8_t)i);
        }
        assert_int_equal(ds4_kv_host_used_bytes(&host), used * UNIT);
    }
    ds4_kv_host_reset(&host, (int64_t)N_UNIT * UNIT * 2);
    assert_int_equal(ds4_kv_host_take(&host, N_UNIT * UNIT, &blob[0], &err), 0);
    assert_int_equal(ds4_kv_host_take(&host, 1, &blob[1], &err), -1);
    ds4_kv_host_deinit(&host);
    free(arena);
}

/* ---- ids ---- */

static void ids_are_found_whatever_was_removed(void **state)
{
    enum { MAX = 300, SPACE = 2000 };
    struct ds4_kv_ids ids;
    int32_t want[SPACE];
    int32_t n = 0;
    struct ds4_err err = {0};

    (void)state;
    memset(want, 0xff, sizeof(want));
    assert_int_equal(ds4_kv_ids_init(&ids, MAX, &err), 0);
    for (int round = 0; round < 100000; round++) {
        uint64_t id = 1 + next() % (SPACE - 1);

        if (want[id] >= 0) {
            assert_int_equal(ds4_kv_ids_put(&ids, id, 1, &err), -1);
            assert_int_equal(err.code, DS4_E_PROTOCOL);
            assert_int_equal(ds4_kv_ids_take(&ids, id), want[id]);
            want[id] = -1;
            n--;
        } else if (n == MAX) {
            assert_int_equal(ds4_kv_ids_put(&ids, id, 1, &err), -1);
            assert_int_equal(err.code, DS4_E_NOMEM);
            assert_int_equal(ds4_kv_ids_take(&ids, id), -1);
        } else {
            want[id] = round;
            assert_int_equal(ds4_kv_ids_put(&ids, id, round, &err), 0);
            n++;
        }
        id = 1 + next() % (SPACE - 1);
        assert_int_equal(ds4_kv_ids_find(&ids, id), want[id]);
    }
    assert_int_equal(ds4_kv_ids_put(&ids, 0, 1, &err), -1);
    assert_int_equal(ds4_kv_ids_find(&ids, 0), -1);
    ds4_kv_ids_clear(&ids);
    for (uint64_t id = 1; id < SPACE; id++)
        assert_int_equal(ds4_kv_ids_find(&ids, id), -1);
    ds4_kv_ids_deinit(&ids);
}

/* ---- layout ---- */

static struct ds4_kv_layer_shape layers[64];

static struct ds4_kv_shape shape_of(int32_t n_layer)
{
    return (struct ds4_kv_shape){.n_layer = n_layer,
                                 .layer = layers,
                                 .d_head = 512,
                                 .d_rope = 64,
                                 .d_index = 128,
                                 .window_tok = 128,
                                 .hot_tok = 120,
                                 .row_format = DS4_ROW_FP8,
                                 .index_format = DS4_ROW_FP4,
                                 .n_slot = 1,
                                 .n_block = 4,
                                 .table_blocks = 4};
}

static struct ds4_kv_shape flash(void)
{
    for (int32_t l = 0; l < 43; l++)
        layers[l] = (struct ds4_kv_layer_shape){
            .ratio = l < 2        ? 0
                     : l % 2 == 0 ? 4
                                  : 128,
            .overlap = l >= 2 && l % 2 == 0,
            .indexer = l >= 2 && l % 2 == 0,
        };
    return shape_of(43);
}

/* Rows of 584 B; indexer rows of 68 B, since those are stored as FP4 (design 2.12): 3,514.25 B per token
 * where the table with FP8 indexer rows says 3,850.25. */
static void state_of_flash_weighs_what_the_plan_says(void **state)
{
    struct ds4_kv_shape shape = flash();
    struct ds4_kv_section section[DS4_KV_POINT_SECTIONS * 43];
    struct ds4_point_shape point;
    int64_t a = 0, i = 0, b = 0;
    int32_t n = ds4_kv_row_sections(&shape, 0, 1024, section);

    (void)state;
    for (int32_t s = 0; s < n; s++) {
        a += section[s].kind == DS4_KV_ROWS_OVERLAP ? (int64_t)section[s].bytes : 0;
        i += section[s].kind == DS4_KV_ROWS_INDEX ? (int64_t)section[s].bytes : 0;
        b += section[s].kind == DS4_KV_ROWS_PLAIN ? (int64_t)section[s].bytes : 0;
    }
    assert_int_equal(a, 3066 * 1024);
    assert_int_equal(i, 357 * 1024);
    assert_int_equal(b * 4, 365 * 1024);                                            /* 91.25 */
    assert_int_equal(4 * (int64_t)ds4_kv_sections_bytes(section, n), 14057 * 1024); /* 3514.25 */
    assert_int_equal(ds4_kv_sections_bytes(section, n), 4 * ds4_kv_block_bytes(&shape));

    assert_int_equal(ds4_kv_point_shape(&shape, &point, NULL), 0);
    assert_int_equal(point.row_bytes, 25112);
    assert_int_equal(ds4_point_bytes(&point, 128), 3619304);
    assert_int_equal(point.n_group, 2);
    assert_int_equal(point.group[0].open_bytes + point.group[1].open_bytes, 296960);
    assert_in_range(ds4_point_bytes_max(&point), 14000000, 15099494); /* "<= 14.4 MiB" */
    assert_int_equal(ds4_kv_unit_bytes(&point), 65536);
}

/* Any table: ratios that divide a block, with and without overlap and indexer. */
static void the_formula_of_hello_equals_the_sections(void **state)
{
    static const int32_t ratios[] = {0, 1, 2, 4, 16, 128, 256};

    (void)state;
    for (int round = 0; round < 200; round++) {
        struct ds4_kv_shape shape = shape_of(1 + (int32_t)(next() % 30));
        struct ds4_kv_section section[DS4_KV_POINT_SECTIONS * 64];
        struct ds4_point_shape point;

        shape.window_tok = 1 + (int32_t)(next() % 200);
        for (int32_t l = 0; l < shape.n_layer; l++) {
            layers[l].ratio = ratios[next() % 7];
            layers[l].overlap = layers[l].ratio > 0 && next() % 2 == 0;
            layers[l].indexer = layers[l].ratio > 0 && next() % 2 == 0;
        }
        assert_int_equal(ds4_kv_point_shape(&shape, &point, NULL), 0);
        for (int i = 0; i < 50; i++) {
            int32_t pos = (int32_t)(next() % 1000);
            int32_t n = ds4_kv_point_sections(&shape, pos, section);

            assert_int_equal(ds4_kv_sections_bytes(section, n), ds4_point_bytes(&point, pos));
            assert_true(ds4_point_bytes(&point, pos) <= ds4_point_bytes_max(&point));
        }
    }
}

static void too_many_ratios_are_refused(void **state)
{
    struct ds4_kv_shape shape = shape_of(9);
    struct ds4_point_shape point;
    struct ds4_err err = {0};

    (void)state;
    for (int32_t l = 0; l < 9; l++)
        layers[l] = (struct ds4_kv_layer_shape){.ratio = 1 << l};
    assert_int_equal(ds4_kv_point_shape(&shape, &point, &err), -1);
    assert_int_equal(err.code, DS4_E_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(units_are_never_lost_nor_given_twice),
        cmocka_unit_test(ids_are_found_whatever_was_removed),
        cmocka_unit_test(state_of_flash_weighs_what_the_plan_says),
        cmocka_unit_test(the_formula_of_hello_equals_the_sections),
        cmocka_unit_test(too_many_ratios_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

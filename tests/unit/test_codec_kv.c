/* proto/codec_kv.c, and what codec.c and check.c know of the sequence state: operations inside steps, step
 * acknowledgements, jobs of the disk tier.  Random legal messages come back equal; each field out of range
 * is refused by name. */
#include "proto/check.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "proto/point.h"
#include "tests/support/wire.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define N_RANDOM 300

static const struct ds4_kv_op any_op[] = {
    {.kind = DS4_KV_POINT_SAVE, .seq = 5, .slot = 3, .epoch = 7, .pos = 129, .point = 11},
    {.kind = DS4_KV_POINT_DROP, .point = UINT64_MAX},
    {.kind = DS4_KV_INSTALL, .seq = 5, .slot = 3, .epoch = 7, .pos = 128, .point = 11},
    {.kind = DS4_KV_BLOCK_COPY, .block_src = 0, .block_dst = 9},
    {.kind = DS4_KV_STAGED_INSTALL,
     .staging = 4,
     .point = 12,
     .first_block = 8,
     .n_block = 2,
     .block = (const int32_t[]){5, 0}},
    {.kind = DS4_KV_STAGED_DROP, .staging = 4},
    {.kind = DS4_KV_PARK, .seq = 5, .slot = 3, .epoch = 7},
    {.kind = DS4_KV_REPLAY, .seq = 5, .slot = 3, .epoch = 7, .pos = 7000, .from_pos = 1408},
};
#define N_ANY (int32_t)(sizeof(any_op) / sizeof(any_op[0]))

static void operations_of_every_kind_come_back_equal(void **state)
{
    struct ds4_wire_fixture *f = *state;
    struct ds4_kv_op op[N_ANY];
    struct ds4_step in = {.generation = 1, .n_op = N_ANY, .op = op}, out;
    struct ds4_err err = {0};

    memcpy(op, any_op, sizeof(op));
    ds4_wire_start_over(f);
    if (ds4_codec_encode_step(&in, &f->arena, &f->buf, &err) ||
        ds4_codec_decode_step(ds4_buf_view(&f->buf), 1, &f->arena, &out, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(out.n_op, N_ANY);
    for (int32_t i = 0; i < N_ANY; i++) {
        const struct ds4_kv_op *a = &any_op[i], *b = &out.op[i];

        assert_true(a->kind == b->kind && a->seq == b->seq && a->slot == b->slot &&
                    a->epoch == b->epoch && a->pos == b->pos && a->point == b->point &&
                    a->staging == b->staging && a->block_src == b->block_src &&
                    a->block_dst == b->block_dst && a->first_block == b->first_block &&
                    a->n_block == b->n_block && a->from_pos == b->from_pos);
        for (int32_t n = 0; n < a->n_block; n++)
            assert_int_equal(a->block[n], b->block[n]);
    }
}

static void the_most_operations_fit_one_step(void **state)
{
    struct ds4_wire_fixture *f = *state;
    struct ds4_kv_op *op = calloc(DS4_MAX_STEP_OPS + 1, sizeof(*op));
    struct ds4_step in = {.generation = 1, .n_op = DS4_MAX_STEP_OPS, .op = op}, out;
    struct ds4_err err = {0};

    for (int32_t i = 0; i <= DS4_MAX_STEP_OPS; i++)
        op[i] = any_op[4];
    ds4_wire_start_over(f);
    if (ds4_codec_encode_step(&in, &f->arena, &f->buf, &err) ||
        ds4_codec_decode_step(ds4_buf_view(&f->buf), 1, &f->arena, &out, &err))
        fail_msg("%s", err.msg);
    in.n_op++;
    assert_int_equal(ds4_check_step(&in, &err), -1);
    free(op);
}

#define OP_REFUSED(which, field, value, word)                                                      \
    do {                                                                                           \
        struct ds4_kv_op op = any_op[which];                                                       \
        struct ds4_step step = {.generation = 1, .n_op = 1, .op = &op};                            \
        struct ds4_err e = {0};                                                                    \
                                                                                                   \
        assert_int_equal(ds4_check_step(&step, &e), 0);                                            \
        op.field = (value);                                                                        \
        assert_int_equal(ds4_check_step(&step, &e), -1);                                           \
        assert_int_equal(e.code, DS4_E_PROTOCOL);                                                  \
        if (strstr(e.msg, word) == NULL)                                                           \
            fail_msg("%s = %s: %s", #field, #value, e.msg);                                        \
    } while (0)

static void each_field_of_an_operation_out_of_range_is_named(void **state)
{
    const struct ds4_step none = {.generation = 1, .n_op = 1};
    struct ds4_err err = {0};

    (void)state;
    assert_int_equal(ds4_check_step(&none, &err), -1);
    OP_REFUSED(0, kind, (enum ds4_kv_op_kind)(DS4_KV_REPLAY + 1), "kind");
    OP_REFUSED(0, point, 0, "point");
    OP_REFUSED(0, pos, 0, "pos");
    OP_REFUSED(0, pos, DS4_MAX_POS + 1, "pos");
    OP_REFUSED(0, slot, DS4_MAX_SLOTS, "slot");
    OP_REFUSED(1, point, 0, "point");
    OP_REFUSED(2, point, 0, "point");
    OP_REFUSED(2, pos, -1, "pos");
    OP_REFUSED(2, slot, -1, "slot");
    OP_REFUSED(3, block_src, -1, "block_src");
    OP_REFUSED(3, block_dst, INT32_MAX, "block_dst");
    OP_REFUSED(3, block_dst, 0, "onto itself");
    OP_REFUSED(4, staging, 0, "staging");
    OP_REFUSED(4, first_block, -1, "first_block");
    OP_REFUSED(4, n_block, DS4_PART_BLOCKS + 1, "n_block");
    OP_REFUSED(4, block, ((const int32_t[]){3, -1}), "block");
    OP_REFUSED(5, staging, 0, "staging");
    OP_REFUSED(7, slot, -1, "slot");
    OP_REFUSED(7, pos, 0, "pos");
    OP_REFUSED(7, from_pos, -1, "from_pos");
    OP_REFUSED(7, from_pos, 7000, "from_pos");
}

static void random_jobs_come_back_equal(void **state)
{
    struct ds4_wire_fixture *f = *state;

    for (int i = 0; i < N_RANDOM; i++) {
        int32_t block[DS4_PART_BLOCKS];
        struct ds4_kv_part_ref part[4];
        struct ds4_kv_write write = {.generation = 3,
                                     .job = ds4_wire_next(f),
                                     .n_block = ds4_wire_pick(f, 0, 4)},
                            w;
        struct ds4_kv_read read = {.generation = 3, .job = ds4_wire_next(f), .part = part}, r;
        struct ds4_kv_unlink gone = {.generation = 3, .job = ds4_wire_next(f)}, u;
        struct ds4_err err = {0};

        write.kind = (enum ds4_kv_part_kind)ds4_wire_pick(f, DS4_KV_EXTENT, DS4_KV_TAIL);
        write.begin = ds4_wire_pick(f, 0, 1000) * DS4_EXTENT_TOK;
        write.end =
            write.begin + (write.kind == DS4_KV_EXTENT ? DS4_EXTENT_TOK
                                                       : ds4_wire_pick(f, 1, DS4_EXTENT_TOK - 1));
        write.point = write.kind == DS4_KV_EXTENT ? 0 : ds4_wire_next(f) | 1;
        write.block = block;
        ds4_wire_pick_id(f, write.key);
        ds4_wire_pick_id(f, write.commit);
        for (int b = 0; b < DS4_PART_BLOCKS; b++)
            block[b] = ds4_wire_pick(f, 0, 1 << 20);
        ds4_wire_start_over(f);
        if (ds4_codec_encode_kv_write(&write, &f->buf, &err) ||
            ds4_codec_decode_kv_write(ds4_buf_view(&f->buf), 3, &f->arena, &w, &err))
            fail_msg("%s", err.msg);
        assert_true(w.job == write.job && w.kind == write.kind && w.begin == write.begin &&
                    w.end == write.end && w.point == write.point && w.n_block == write.n_block);
        assert_memory_equal(w.key, write.key, sizeof(w.key));
        assert_memory_equal(w.commit, write.commit, sizeof(w.commit));
        if (w.n_block > 0)
            assert_memory_equal(w.block, block, (size_t)w.n_block * sizeof(block[0]));

        read.staging = ds4_wire_next(f) | 1;
        read.kind = write.kind;
        read.begin = write.begin;
        read.end = write.end;
        read.n_part = ds4_wire_pick(f, 1, 4);
        ds4_wire_pick_id(f, read.key);
        memset(part, 0, sizeof(part));
        for (int32_t p = 0; p < read.n_part; p++) {
            part[p].first_layer = ds4_wire_pick(f, 0, 40);
            part[p].last_layer = part[p].first_layer + ds4_wire_pick(f, 1, 20);
            part[p].bytes = ds4_wire_next(f) >> 40;
            ds4_wire_pick_id(f, part[p].digest);
        }
        ds4_wire_start_over(f);
        if (ds4_codec_encode_kv_read(&read, &f->arena, &f->buf, &err) ||
            ds4_codec_decode_kv_read(ds4_buf_view(&f->buf), 3, &f->arena, &r, &err))
            fail_msg("%s", err.msg);
        assert_true(r.job == read.job && r.staging == read.staging && r.kind == read.kind &&
                    r.begin == read.begin && r.end == read.end && r.n_part == read.n_part);
        assert_memory_equal(r.key, read.key, sizeof(r.key));
        for (int32_t p = 0; p < r.n_part; p++) {
            assert_true(r.part[p].first_layer == part[p].first_layer &&
                        r.part[p].last_layer == part[p].last_layer &&
                        r.part[p].bytes == part[p].bytes);
            assert_memory_equal(r.part[p].digest, part[p].digest, DS4_ID_BYTES);
        }

        gone.kind = write.kind;
        gone.first_layer = part[0].first_layer;
        gone.last_layer = part[0].last_layer;
        gone.quarantine = ds4_wire_next(f) & 1;
        ds4_wire_pick_id(f, gone.key);
        ds4_wire_start_over(f);
        if (ds4_codec_encode_kv_unlink(&gone, &f->buf, &err) ||
            ds4_codec_decode_kv_unlink(ds4_buf_view(&f->buf), 3, &f->arena, &u, &err))
            fail_msg("%s", err.msg);
        assert_true(u.job == gone.job && u.kind == gone.kind && u.first_layer == gone.first_layer &&
                    u.last_layer == gone.last_layer && u.quarantine == gone.quarantine);
        assert_memory_equal(u.key, gone.key, sizeof(u.key));
    }
}

static void random_answers_come_back_equal(void **state)
{
    struct ds4_wire_fixture *f = *state;

    for (int i = 0; i < N_RANDOM; i++) {
        struct ds4_step_done step = {9, ds4_wire_pick(f, 0, INT32_MAX), (uint32_t)ds4_wire_next(f)},
                             s;
        struct ds4_kv_done done = {.generation = 9, .job = ds4_wire_next(f)}, d;
        struct ds4_err err = {0};

        done.reason = (enum ds4_kv_reason)ds4_wire_pick(f, 0, DS4_KV_N_REASON - 1);
        done.existed = ds4_wire_next(f) & 1;
        done.bytes = ds4_wire_next(f) >> 34;
        done.duration_ns = (int64_t)(ds4_wire_next(f) >> 1);
        ds4_wire_pick_id(f, done.digest);
        memset(done.text, 'x', (size_t)ds4_wire_pick(f, 0, sizeof(done.text) - 1));
        ds4_wire_start_over(f);
        if (ds4_codec_encode_step_done(&step, &f->buf, &err) ||
            ds4_codec_decode_step_done(ds4_buf_view(&f->buf), 9, &f->arena, &s, &err))
            fail_msg("%s", err.msg);
        assert_true(s.generation == 9 && s.step_no == step.step_no &&
                    s.pos_digest == step.pos_digest);
        ds4_wire_start_over(f);
        if (ds4_codec_encode_kv_done(&done, &f->buf, &err) ||
            ds4_codec_decode_kv_done(ds4_buf_view(&f->buf), 9, &f->arena, &d, &err))
            fail_msg("%s", err.msg);
        assert_true(d.job == done.job && d.reason == done.reason && d.existed == done.existed &&
                    d.bytes == done.bytes && d.duration_ns == done.duration_ns);
        assert_memory_equal(d.digest, done.digest, sizeof(d.digest));
        assert_string_equal(d.text, done.text);
    }
}

#define EACH_REFUSED(type, legal, check, field, value)                                             \
    do {                                                                                           \
        struct type m = legal;                                                                     \
        struct ds4_err err = {0};                                                                  \
                                                                                                   \
        if (check(&m, &err) != 0)                                                                  \
            fail_msg("%s", err.msg);                                                               \
        m.field = (value);                                                                         \
        assert_int_equal(check(&m, &err), -1);                                                     \
        assert_int_equal(err.code, DS4_E_PROTOCOL);                                                \
    } while (0)

static void each_field_of_a_job_out_of_range_is_refused(void **state)
{
    static const int32_t block[] = {0, -1};
    struct ds4_kv_part_ref part = {.last_layer = 4}, empty = {.first_layer = 4, .last_layer = 4};
    const struct ds4_kv_write write = {.generation = 1,
                                       .kind = DS4_KV_EXTENT,
                                       .begin = 1024,
                                       .end = 2048,
                                       .n_block = 1,
                                       .block = block};
    const struct ds4_kv_write tail = {.generation = 1, .kind = DS4_KV_TAIL, .end = 5, .point = 1};
    const struct ds4_kv_read read = {.generation = 1,
                                     .staging = 1,
                                     .kind = DS4_KV_ANCHOR,
                                     .end = 128,
                                     .n_part = 1,
                                     .part = &part};
    const struct ds4_kv_unlink gone = {.generation = 1, .kind = DS4_KV_TAIL, .last_layer = 1};
    const struct ds4_kv_done done = {.generation = 1};
    const struct ds4_step_done step = {.generation = 1};

    (void)state;
    EACH_REFUSED(ds4_kv_write, write, ds4_check_kv_write, generation, 0);
    EACH_REFUSED(ds4_kv_write, write, ds4_check_kv_write, kind, (enum ds4_kv_part_kind)0);
    EACH_REFUSED(ds4_kv_write, write, ds4_check_kv_write, begin, 1000);
    EACH_REFUSED(ds4_kv_write, write, ds4_check_kv_write, begin, -1024);
    EACH_REFUSED(ds4_kv_write, write, ds4_check_kv_write, end, 2047);
    EACH_REFUSED(ds4_kv_write, write, ds4_check_kv_write, point, 1);
    EACH_REFUSED(ds4_kv_write, write, ds4_check_kv_write, flags, 1);
    EACH_REFUSED(ds4_kv_write, write, ds4_check_kv_write, n_block, 2);
    EACH_REFUSED(ds4_kv_write, write, ds4_check_kv_write, n_block, DS4_PART_BLOCKS + 1);
    EACH_REFUSED(ds4_kv_write, tail, ds4_check_kv_write, point, 0);
    EACH_REFUSED(ds4_kv_write, tail, ds4_check_kv_write, end, 0);
    EACH_REFUSED(ds4_kv_write, tail, ds4_check_kv_write, end, 1024);
    EACH_REFUSED(ds4_kv_read, read, ds4_check_kv_read, generation, 0);
    EACH_REFUSED(ds4_kv_read, read, ds4_check_kv_read, staging, 0);
    EACH_REFUSED(ds4_kv_read, read, ds4_check_kv_read, kind, (enum ds4_kv_part_kind)4);
    EACH_REFUSED(ds4_kv_read, read, ds4_check_kv_read, end, 1024);
    EACH_REFUSED(ds4_kv_read, read, ds4_check_kv_read, n_part, 0);
    EACH_REFUSED(ds4_kv_read, read, ds4_check_kv_read, part, NULL);
    EACH_REFUSED(ds4_kv_read, read, ds4_check_kv_read, part, &empty);
    EACH_REFUSED(ds4_kv_unlink, gone, ds4_check_kv_unlink, generation, 0);
    EACH_REFUSED(ds4_kv_unlink, gone, ds4_check_kv_unlink, kind, (enum ds4_kv_part_kind)4);
    EACH_REFUSED(ds4_kv_unlink, gone, ds4_check_kv_unlink, first_layer, -1);
    EACH_REFUSED(ds4_kv_unlink, gone, ds4_check_kv_unlink, last_layer, 0);
    EACH_REFUSED(ds4_kv_done, done, ds4_check_kv_done, generation, 0);
    EACH_REFUSED(ds4_kv_done, done, ds4_check_kv_done, reason, DS4_KV_N_REASON);
    EACH_REFUSED(ds4_kv_done, done, ds4_check_kv_done, bytes, UINT64_MAX);
    EACH_REFUSED(ds4_kv_done, done, ds4_check_kv_done, bytes, (UINT64_C(1) << 30) + 1);
    EACH_REFUSED(ds4_kv_done, done, ds4_check_kv_done, duration_ns, -1);
    EACH_REFUSED(ds4_kv_done, done, ds4_check_kv_done, text[0], '\n');
    EACH_REFUSED(ds4_step_done, step, ds4_check_step_done, generation, 0);
    EACH_REFUSED(ds4_step_done, step, ds4_check_step_done, step_no, -1);
}

/* ---- hello ---- */

static const struct ds4_hello flash_hello = {
    .n_stage = 1,
    .n_layer = 43,
    .last_layer = 43,
    .pid = 1,
    .hot_tok = 120,
    .host_bytes = INT64_C(8) << 30,
    .unit_bytes = 65536,
    .block_bytes = 985664,
    .point = {.window_tok = 128,
              .row_bytes = 25112,
              .n_group = 2,
              .group = {{4, 107520, 215040}, {128, 0, 81920}}}};

static void what_a_stage_offers_for_points_comes_back_equal(void **state)
{
    struct ds4_wire_fixture *f = *state;
    struct ds4_hello in = flash_hello, out;
    struct ds4_err err = {0};

    ds4_wire_pick_id(f, in.kv_fingerprint);
    in.disk = true;
    memset(&out, 0, sizeof(out));
    ds4_wire_start_over(f);
    if (ds4_codec_encode_hello(&in, &f->buf, &err) ||
        ds4_codec_decode_hello(ds4_buf_view(&f->buf), &f->arena, &out, &err))
        fail_msg("%s", err.msg);
    assert_memory_equal(&in, &out, sizeof(in));
}

static void each_offer_out_of_range_is_refused(void **state)
{
    (void)state;
    EACH_REFUSED(ds4_hello, flash_hello, ds4_check_hello, hot_tok, -1);
    EACH_REFUSED(ds4_hello, flash_hello, ds4_check_hello, host_bytes, -1);
    EACH_REFUSED(ds4_hello, flash_hello, ds4_check_hello, unit_bytes, 0);
    EACH_REFUSED(ds4_hello, flash_hello, ds4_check_hello, unit_bytes, 3);
    EACH_REFUSED(ds4_hello, flash_hello, ds4_check_hello, block_bytes, -1);
    EACH_REFUSED(ds4_hello, flash_hello, ds4_check_hello, point.window_tok, 0);
    EACH_REFUSED(ds4_hello, flash_hello, ds4_check_hello, point.row_bytes, -1);
    EACH_REFUSED(ds4_hello, flash_hello, ds4_check_hello, point.fixed_bytes, -1);
    EACH_REFUSED(ds4_hello, flash_hello, ds4_check_hello, point.n_group, DS4_POINT_GROUPS + 1);
    EACH_REFUSED(ds4_hello, flash_hello, ds4_check_hello, point.group[1].ratio, 0);
    EACH_REFUSED(ds4_hello, flash_hello, ds4_check_hello, point.group[1].open_bytes, -1);
    EACH_REFUSED(ds4_hello, flash_hello, ds4_check_hello, point.group[0].prev_bytes, -1);
}

/* ---- weights of points ---- */

static void flash_points_weigh_what_the_plan_says(void **state)
{
    const struct ds4_point_shape *flash = &flash_hello.point;

    (void)state;
    /* An anchor at a multiple of 128: 127 rows and the previous halves, 3,619,304 B. */
    assert_int_equal(ds4_point_bytes(flash, 128), 3619304);
    assert_int_equal(ds4_point_bytes(flash, 1 << 20), 3619304);
    assert_int_equal(ds4_point_bytes(flash, 0), 0);
    /* One token: its window row and both kinds of open block. */
    assert_int_equal(ds4_point_bytes(flash, 1), 25112 + 215040 + 81920);
    /* The largest: 127 open tokens of the wide blocks, 3 of the narrow. */
    assert_int_equal(ds4_point_bytes(flash, 255), 3619304 + 3 * 215040 + 127 * 81920);
    assert_int_equal(ds4_point_bytes_max(flash), ds4_point_bytes(flash, 255));
    for (int32_t pos = 0; pos < 1000; pos++)
        assert_true(ds4_point_bytes(flash, pos) <= ds4_point_bytes_max(flash));
}

static void bytes_are_rounded_up_to_whole_units(void **state)
{
    (void)state;
    assert_int_equal(ds4_unit_round(0, 4096), 0);
    assert_int_equal(ds4_unit_round(1, 4096), 4096);
    assert_int_equal(ds4_unit_round(4096, 4096), 4096);
    assert_int_equal(ds4_unit_round((INT64_C(5) << 32) + 1, 4096), (INT64_C(5) << 32) + 4096);
}

static void the_position_digest_sees_every_member(void **state)
{
    uint32_t one = ds4_pos_digest(0, 1, 2, 3);

    (void)state;
    assert_int_equal(one, ds4_pos_digest(0, 1, 2, 3));
    assert_int_not_equal(one, ds4_pos_digest(0, 2, 2, 3));
    assert_int_not_equal(one, ds4_pos_digest(0, 1, 3, 3));
    assert_int_not_equal(one, ds4_pos_digest(0, 1, 2, 4));
    assert_int_not_equal(ds4_pos_digest(one, 9, 9, 9), ds4_pos_digest(0, 9, 9, 9));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(operations_of_every_kind_come_back_equal),
        cmocka_unit_test(the_most_operations_fit_one_step),
        cmocka_unit_test(each_field_of_an_operation_out_of_range_is_named),
        cmocka_unit_test(random_jobs_come_back_equal),
        cmocka_unit_test(random_answers_come_back_equal),
        cmocka_unit_test(each_field_of_a_job_out_of_range_is_refused),
        cmocka_unit_test(what_a_stage_offers_for_points_comes_back_equal),
        cmocka_unit_test(each_offer_out_of_range_is_refused),
        cmocka_unit_test(flash_points_weigh_what_the_plan_says),
        cmocka_unit_test(bytes_are_rounded_up_to_whole_units),
        cmocka_unit_test(the_position_digest_sees_every_member),
    };

    return cmocka_run_group_tests(tests, ds4_wire_set_up, ds4_wire_tear_down);
}

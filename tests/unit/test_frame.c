/* proto/frame.c: the envelope. */
#include "proto/frame.h"

#include "proto/message.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static void write_step(uint8_t envelope[DS4_ENVELOPE_BYTES])
{
    struct ds4_frame frame = {DS4_FRAME_STEP, 7, 0x1122334455667788, 99};

    ds4_frame_write(&frame, envelope);
}

static void the_layout_is_the_documented_one(void **state)
{
    static const uint8_t want[DS4_ENVELOPE_BYTES] = {'D',  'S',  '4',  'W',  DS4_WIRE_VERSION,
                                                     0,    68,   0,    7,    0,
                                                     0,    0,    0x88, 0x77, 0x66,
                                                     0x55, 0x44, 0x33, 0x22, 0x11,
                                                     99,   0,    0,    0};
    uint8_t envelope[DS4_ENVELOPE_BYTES];

    (void)state;
    write_step(envelope);
    assert_memory_equal(envelope, want, sizeof(want));
}

static void every_kind_comes_back_from_its_sender_only(void **state)
{
    static const struct {
        enum ds4_frame_kind kind;
        const char *name;
    } rows[] = {
#define ROW(kind, text, number, sender) {kind, text},
        DS4_FRAME_KINDS(ROW)
#undef ROW
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct ds4_frame in = {rows[i].kind, 3, 5, 0}, out = {0};
        uint8_t envelope[DS4_ENVELOPE_BYTES];
        struct ds4_err err = {0};
        bool from_router = (int)rows[i].kind >= 64;

        ds4_frame_write(&in, envelope);
        assert_int_equal(ds4_frame_read(envelope, sizeof(envelope), 0,
                                        from_router ? DS4_FROM_ROUTER : DS4_FROM_WORKER, &out,
                                        &err),
                         0);
        assert_int_equal(out.kind, in.kind);
        assert_int_equal(out.generation, 3);
        assert_int_equal(out.sequence, 5);
        assert_string_equal(ds4_frame_kind_name(out.kind), rows[i].name);
        assert_int_equal(ds4_frame_read(envelope, sizeof(envelope), 0,
                                        from_router ? DS4_FROM_WORKER : DS4_FROM_ROUTER, &out,
                                        &err),
                         -1);
        assert_int_equal(err.code, DS4_E_PROTOCOL);
    }
}

static void refuse(const uint8_t *envelope, size_t n, size_t n_payload, const char *word)
{
    struct ds4_frame out = {DS4_FRAME_BYE, 1, 2, 3};
    struct ds4_err err = {0};

    assert_int_equal(ds4_frame_read(envelope, n, n_payload, DS4_FROM_ROUTER, &out, &err), -1);
    assert_int_equal(err.code, DS4_E_PROTOCOL);
    assert_non_null(strstr(err.msg, word));
    assert_int_equal(out.kind, DS4_FRAME_BYE);
}

static void each_malformed_field_is_refused(void **state)
{
    uint8_t envelope[DS4_ENVELOPE_BYTES];
    struct ds4_frame big = {DS4_FRAME_STEP, 7, 0, (uint32_t)DS4_MAX_FRAME_BYTES + 1};

    (void)state;
    write_step(envelope);
    refuse(envelope, DS4_ENVELOPE_BYTES - 1, 99, "envelope");
    refuse(envelope, 0, 99, "envelope");
    refuse(envelope, DS4_ENVELOPE_BYTES, 98, "announces 99");
    for (int i = 0; i < 4; i++) {
        write_step(envelope);
        envelope[i] ^= 0x20;
        refuse(envelope, DS4_ENVELOPE_BYTES, 99, "magic");
    }
    write_step(envelope);
    envelope[6] = 64;
    refuse(envelope, DS4_ENVELOPE_BYTES, 99, "unknown frame kind 64");
    write_step(envelope);
    envelope[7] = 1;
    refuse(envelope, DS4_ENVELOPE_BYTES, 99, "unknown frame kind");
    ds4_frame_write(&big, envelope);
    refuse(envelope, DS4_ENVELOPE_BYTES, DS4_MAX_FRAME_BYTES + 1, "at most");
}

static void versions_refuse_each_other_by_name(void **state)
{
    uint8_t envelope[DS4_ENVELOPE_BYTES];
    char words[64];

    (void)state;
    snprintf(words, sizeof(words), "router speaks wire version %d", DS4_WIRE_VERSION + 1);
    write_step(envelope);
    envelope[4] = DS4_WIRE_VERSION + 1;
    envelope[6] = 200; /* a kind this version does not know must not hide the reason */
    refuse(envelope, DS4_ENVELOPE_BYTES, 99, words);
}

static void frames_of_another_generation_are_dropped_and_counted(void **state)
{
    struct ds4_frame_gate gate = {.generation = 5};
    struct ds4_frame step = {DS4_FRAME_STEP, 5, 0, 0};

    (void)state;
    assert_true(ds4_frame_admit(&gate, &step));
    step.sequence = 1;
    step.generation = 4;
    assert_false(ds4_frame_admit(&gate, &step));
    step.sequence = 2;
    step.generation = 6;
    assert_false(ds4_frame_admit(&gate, &step));
    assert_int_equal(gate.n_stale, 2);
    step.sequence = 3;
    step.kind = DS4_FRAME_FORM;
    assert_true(ds4_frame_admit(&gate, &step));
    assert_int_equal(gate.n_lost, 0);
}

static void acknowledgements_and_jobs_mean_something_in_their_generation_only(void **state)
{
    static const enum ds4_frame_kind kinds[] = {DS4_FRAME_STEP_DONE, DS4_FRAME_KV_WRITE,
                                                DS4_FRAME_KV_READ, DS4_FRAME_KV_UNLINK,
                                                DS4_FRAME_KV_DONE};
    struct ds4_frame_gate gate = {.generation = 5};

    (void)state;
    for (uint64_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        struct ds4_frame frame = {kinds[i], 5, 2 * i, 0};

        assert_true(ds4_frame_admit(&gate, &frame));
        frame.generation = 4;
        frame.sequence++;
        assert_false(ds4_frame_admit(&gate, &frame));
        assert_int_equal(gate.n_stale, i + 1);
    }
}

static void no_step_passes_before_a_generation_is_formed(void **state)
{
    struct ds4_frame_gate gate = {0};
    struct ds4_frame step = {DS4_FRAME_STEP, 0, 0, 0};

    (void)state;
    assert_false(ds4_frame_admit(&gate, &step));
    assert_int_equal(gate.n_stale, 1);
}

static void lost_frames_are_counted_and_a_new_count_is_not_a_loss(void **state)
{
    struct ds4_frame_gate gate = {0};
    struct ds4_frame frame = {DS4_FRAME_HEALTH, 0, 0, 0};

    (void)state;
    assert_true(ds4_frame_admit(&gate, &frame));
    frame.sequence = 4; /* 1, 2, 3 never came */
    assert_true(ds4_frame_admit(&gate, &frame));
    assert_int_equal(gate.n_lost, 3);
    frame.sequence = 0;
    assert_true(ds4_frame_admit(&gate, &frame));
    frame.sequence = 1;
    assert_true(ds4_frame_admit(&gate, &frame));
    assert_int_equal(gate.n_lost, 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_layout_is_the_documented_one),
        cmocka_unit_test(every_kind_comes_back_from_its_sender_only),
        cmocka_unit_test(each_malformed_field_is_refused),
        cmocka_unit_test(versions_refuse_each_other_by_name),
        cmocka_unit_test(frames_of_another_generation_are_dropped_and_counted),
        cmocka_unit_test(acknowledgements_and_jobs_mean_something_in_their_generation_only),
        cmocka_unit_test(no_step_passes_before_a_generation_is_formed),
        cmocka_unit_test(lost_frames_are_counted_and_a_new_count_is_not_a_loss),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

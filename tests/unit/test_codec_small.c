/* proto/codec.c and proto/check.c, messages of a fixed size: they come back equal, and what is out of
 * range, too long or not printable is refused. */
#include "proto/codec.h"

#include "proto/check.h"
#include "proto/frame.h"
#include "tests/support/wire.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define N_RANDOM 300

static void pick_hello(struct ds4_wire_fixture *f, struct ds4_hello *hello)
{
    memset(hello, 0, sizeof(*hello));
    hello->n_stage = ds4_wire_pick(f, 1, DS4_MAX_STAGES);
    hello->stage = ds4_wire_pick(f, 0, hello->n_stage - 1);
    hello->n_layer = ds4_wire_pick(f, 1, 60);
    hello->first_layer = ds4_wire_pick(f, 0, hello->n_layer - 1);
    hello->last_layer = ds4_wire_pick(f, hello->first_layer + 1, hello->n_layer);
    hello->max_blocks = ds4_wire_pick(f, 0, 1 << 20);
    hello->max_slots = ds4_wire_pick(f, 0, DS4_MAX_SLOTS);
    hello->max_context = ds4_wire_pick(f, 0, DS4_MAX_POS);
    hello->pid = ds4_wire_pick(f, 1, INT32_MAX);
    ds4_wire_pick_id(f, hello->boot_id);
    ds4_wire_pick_id(f, hello->model_digest);
    ds4_wire_pick_text(f, hello->backend, sizeof(hello->backend));
    ds4_wire_pick_text(f, hello->device, sizeof(hello->device));
    ds4_wire_pick_text(f, hello->host, sizeof(hello->host));
}

static void pick_step_times(struct ds4_wire_fixture *f, struct ds4_health *health)
{
    health->wait_send_seconds = ds4_wire_pick_real(f, 0, 1e6F);
    for (int k = 0; k < DS4_N_TIMED; k++) {
        health->step_time[k].seconds = ds4_wire_pick_real(f, 0, 1e6F);
        for (int b = 0; b < DS4_STEP_BUCKETS; b++)
            health->step_time[k].bucket[b] = ds4_wire_next(f);
    }
    health->sent_bytes = ds4_wire_next(f);
    health->received_bytes = ds4_wire_next(f);
    health->cpu_seconds = ds4_wire_pick_real(f, 0, 1e6F);
    health->started_unix_s = (int64_t)(ds4_wire_next(f) >> 1);
}

/* What a stage says of its device. */
static void pick_device(struct ds4_wire_fixture *f, struct ds4_health *h)
{
    h->probe = ds4_wire_pick(f, 0, DS4_MAX_PROBE);
    h->memory_bytes_per_s = ds4_wire_pick_real(f, 0, 1e12F);
    h->link_bytes_per_s = ds4_wire_pick_real(f, 0, 1e12F);
    h->link_latency_s = ds4_wire_pick_real(f, 0, 10);
    h->flops = ds4_wire_pick_real(f, 0, 1e15F);
    h->uses_on_device = ds4_wire_next(f);
    h->uses_streamed = ds4_wire_next(f);
    h->uses_on_host = ds4_wire_next(f);
    h->experts_moved = ds4_wire_next(f);
    h->card.told = ds4_wire_pick(f, 0, 1) == 1;
    for (int32_t i = 0; h->card.told && i < DS4_N_CARD_SENSOR; i++)
        h->card.value[i] = ds4_wire_pick_real(f, -1, 1e9F);
    for (int32_t i = 0; h->card.told && i < DS4_N_XID; i++)
        h->card.xid[i] = ds4_wire_next(f);
}

static void random_small_messages_come_back_equal(void **state)
{
    struct ds4_wire_fixture *f = *state;
    struct ds4_buf again;

    ds4_buf_init(&again, DS4_MAX_FRAME_BYTES);

    for (int i = 0; i < N_RANDOM; i++) {
        struct ds4_hello hello, hello_out;
        struct ds4_form form, form_out;
        struct ds4_health health, health_out;
        struct ds4_fatal_report fatal, fatal_out = {0};
        struct ds4_note note, note_out;
        struct ds4_err err = {0};

        memset(&hello_out, 0, sizeof(hello_out));
        memset(&form, 0, sizeof(form));
        memset(&health, 0, sizeof(health));
        memset(&fatal, 0, sizeof(fatal));
        ds4_wire_start_over(f);
        pick_hello(f, &hello);
        if (ds4_codec_encode_hello(&hello, &f->buf, &err) ||
            ds4_codec_decode_hello(ds4_wire_payload(f), &f->arena, &hello_out, &err))
            fail_msg("%s", err.msg);
        assert_memory_equal(&hello, &hello_out, sizeof(hello));

        ds4_buf_clear(&f->buf);
        form = (struct ds4_form){(uint32_t)ds4_wire_pick(f, 1, INT32_MAX),
                                 ds4_wire_pick(f, 1, DS4_MAX_STAGES),
                                 ds4_wire_pick(f, 1, 1 << 20),
                                 ds4_wire_pick(f, 1, DS4_MAX_SLOTS),
                                 ds4_wire_pick(f, 1, DS4_MAX_STEP_ENTRIES),
                                 ds4_wire_pick(f, 1, DS4_MAX_STEP_TOK),
                                 ds4_wire_pick(f, 1, DS4_MAX_POS),
                                 {0},
                                 ds4_wire_pick(f, 0, INT32_MAX),
                                 ds4_wire_pick(f, 0, DS4_MAX_DRAFT)};
        ds4_wire_pick_id(f, form.pipe_key);
        if (ds4_codec_encode_form(&form, &f->buf, &err) ||
            ds4_codec_decode_form(ds4_wire_payload(f), &f->arena, &form_out, &err))
            fail_msg("%s", err.msg);
        assert_memory_equal(&form, &form_out, sizeof(form));

        ds4_buf_clear(&f->buf);
        health.stage = ds4_wire_pick(f, 0, DS4_MAX_STAGES - 1);
        health.generation = (uint32_t)ds4_wire_next(f);
        health.state = (enum ds4_worker_state)ds4_wire_pick(f, 0, DS4_WORKER_FAILED);
        health.step_no = ds4_wire_pick(f, -1, INT32_MAX);
        health.step_age_ms = ds4_wire_pick(f, 0, INT32_MAX);
        health.loaded_bytes = (int64_t)(ds4_wire_next(f) >> 1);
        health.total_bytes = (int64_t)(ds4_wire_next(f) >> 1);
        health.steps_done = ds4_wire_next(f);
        health.busy_seconds = ds4_wire_pick_real(f, 0, 1e6F);
        health.wait_recv_seconds = ds4_wire_pick_real(f, 0, 1e6F);
        health.wait_token_seconds = ds4_wire_pick_real(f, 0, 1e6F);
        health.wait_command_seconds = ds4_wire_pick_real(f, 0, 1e6F);
        pick_step_times(f, &health);
        health.nonfinite_rows = ds4_wire_next(f);
        health.rss_bytes = ds4_wire_next(f);
        health.weights_bytes = ds4_wire_next(f);
        health.kv_bytes = ds4_wire_next(f);
        health.expert_steps = ds4_wire_next(f);
        health.experts_touched = ds4_wire_next(f);
        pick_device(f, &health);
        ds4_wire_pick_text(f, health.message, sizeof(health.message));
        if (ds4_codec_encode_health(&health, &f->buf, &err) ||
            ds4_codec_decode_health(ds4_wire_payload(f), health.generation, &f->arena, &health_out,
                                    &err))
            fail_msg("%s", err.msg);
        ds4_buf_clear(&again);
        assert_int_equal(ds4_codec_encode_health(&health_out, &again, &err), 0);
        assert_int_equal(again.len, f->buf.len);
        assert_memory_equal(again.ptr, f->buf.ptr, again.len);
        assert_string_equal(health.message, health_out.message);

        ds4_buf_clear(&f->buf);
        fatal.stage = ds4_wire_pick(f, 0, DS4_MAX_STAGES - 1);
        fatal.generation = (uint32_t)ds4_wire_next(f);
        fatal.exit_code = ds4_wire_pick(f, 0, 255);
        fatal.step_no = ds4_wire_pick(f, -1, INT32_MAX);
        fatal.layer = ds4_wire_pick(f, -1, 60);
        ds4_wire_pick_text(f, fatal.message, sizeof(fatal.message));
        if (ds4_codec_encode_fatal(&fatal, &f->buf, &err) ||
            ds4_codec_decode_fatal(ds4_wire_payload(f), fatal.generation, &f->arena, &fatal_out,
                                   &err))
            fail_msg("%s", err.msg);
        assert_int_equal(fatal.step_no, fatal_out.step_no);
        assert_int_equal(fatal.layer, fatal_out.layer);
        assert_int_equal(fatal.exit_code, fatal_out.exit_code);
        assert_string_equal(fatal.message, fatal_out.message);

        ds4_buf_clear(&f->buf);
        ds4_wire_pick_text(f, note.text, sizeof(note.text));
        if (ds4_codec_encode_note(&note, &f->buf, &err) ||
            ds4_codec_decode_note(ds4_wire_payload(f), &f->arena, &note_out, &err))
            fail_msg("%s", err.msg);
        assert_string_equal(note.text, note_out.text);
        assert_int_equal(f->arena.used_bytes, 0);
    }
    ds4_buf_deinit(&again);
}

static void pipe_ids_of_1_to_256_bytes_come_back_equal_and_others_are_refused(void **state)
{
    static const uint8_t none[] = {0x0a, 0};
    struct ds4_wire_fixture *f = *state;
    struct ds4_pipe_id in = {0}, out;
    struct ds4_err err = {0};
    uint8_t longer[3 + DS4_MAX_PIPE_ID + 1] = {0x0a, 0x81, 0x02}; /* field 1, 257 bytes */

    for (int32_t n = 1; n <= DS4_MAX_PIPE_ID; n++) {
        ds4_buf_clear(&f->buf);
        in.byte[n - 1] = (uint8_t)(n * 7);
        in.n_byte = n;
        assert_int_equal(ds4_codec_encode_pipe_id(&in, &f->buf, &err), 0);
        assert_int_equal(ds4_codec_decode_pipe_id(ds4_wire_payload(f), &f->arena, &out, &err), 0);
        assert_memory_equal(&in, &out, sizeof(in));
    }
    for (int32_t n = -1; n <= DS4_MAX_PIPE_ID + 1; n += DS4_MAX_PIPE_ID + 2) {
        in.n_byte = n;
        assert_int_equal(ds4_codec_encode_pipe_id(&in, &f->buf, &err), -1);
    }
    assert_int_equal(ds4_codec_decode_pipe_id((struct ds4_str){(const char *)none, sizeof(none)},
                                              &f->arena, &out, &err),
                     -1);
    assert_int_equal(ds4_codec_decode_pipe_id(DS4_STR(""), &f->arena, &out, &err), -1);
    assert_int_equal(err.code, DS4_E_PROTOCOL);
    assert_int_equal(
        ds4_codec_decode_pipe_id((struct ds4_str){(const char *)longer, sizeof(longer)}, &f->arena,
                                 &out, &err),
        -1);
    assert_int_equal(f->arena.used_bytes, 0);
}

static void text_that_the_wire_does_not_carry_becomes_question_marks(void **state)
{
    struct ds4_wire_fixture *f = *state;
    struct ds4_note in = {"caf\xc3\xa9\n"}, out;
    struct ds4_err err = {0};

    ds4_wire_start_over(f);
    assert_int_equal(ds4_codec_encode_note(&in, &f->buf, &err), 0);
    assert_int_equal(ds4_codec_decode_note(ds4_wire_payload(f), &f->arena, &out, &err), 0);
    assert_string_equal(out.text, "caf???");
}

static void text_is_refused_when_too_long_or_not_printable(void **state)
{
    struct ds4_wire_fixture *f = *state;
    char bytes[3 + 256] = {0x0a, (char)0x80, 0x02};
    struct ds4_note out;
    struct ds4_err err = {0};

    memset(bytes + 3, 'x', 256);
    assert_int_equal(
        ds4_codec_decode_note((struct ds4_str){bytes, sizeof(bytes)}, &f->arena, &out, &err), -1);
    bytes[1] = (char)0xff;
    bytes[2] = 1;
    assert_int_equal(ds4_codec_decode_note((struct ds4_str){bytes, 3 + 255}, &f->arena, &out, &err),
                     0);
    bytes[9] = 0;
    assert_int_equal(ds4_codec_decode_note((struct ds4_str){bytes, 3 + 255}, &f->arena, &out, &err),
                     -1);
    bytes[9] = '\n';
    assert_int_equal(ds4_codec_decode_note((struct ds4_str){bytes, 3 + 255}, &f->arena, &out, &err),
                     -1);
}

#define EACH_REFUSED(type, legal, check, field, value)                                             \
    do {                                                                                           \
        struct type m = legal;                                                                     \
        struct ds4_err err = {0};                                                                  \
                                                                                                   \
        assert_int_equal(check(&m, &err), 0);                                                      \
        m.field = (value);                                                                         \
        assert_int_equal(check(&m, &err), -1);                                                     \
        assert_int_equal(err.code, DS4_E_PROTOCOL);                                                \
    } while (0)

static void each_small_message_field_out_of_range_is_refused(void **state)
{
    const struct ds4_hello hello = {.n_stage = 2, .n_layer = 4, .last_layer = 4, .pid = 1};
    const struct ds4_form form = {1, 1, 1, 1, 1, 1, 1, {0}, 0, 0};
    const struct ds4_health health = {.step_no = -1};
    const struct ds4_health hot = {.step_no = -1, .card.told = true};
    const struct ds4_fatal_report fatal = {.layer = -1};

    (void)state;
    EACH_REFUSED(ds4_hello, hello, ds4_check_hello, stage, 2);
    EACH_REFUSED(ds4_hello, hello, ds4_check_hello, n_stage, DS4_MAX_STAGES + 1);
    EACH_REFUSED(ds4_hello, hello, ds4_check_hello, first_layer, 4);
    EACH_REFUSED(ds4_hello, hello, ds4_check_hello, last_layer, 5);
    EACH_REFUSED(ds4_hello, hello, ds4_check_hello, last_layer, 0);
    EACH_REFUSED(ds4_hello, hello, ds4_check_hello, n_layer, 0);
    EACH_REFUSED(ds4_hello, hello, ds4_check_hello, max_blocks, -1);
    EACH_REFUSED(ds4_hello, hello, ds4_check_hello, max_slots, DS4_MAX_SLOTS + 1);
    EACH_REFUSED(ds4_hello, hello, ds4_check_hello, max_context, -1);
    EACH_REFUSED(ds4_hello, hello, ds4_check_hello, pid, 0);
    EACH_REFUSED(ds4_hello, hello, ds4_check_hello, device[0], '\n');
    EACH_REFUSED(ds4_form, form, ds4_check_form, generation, 0);
    EACH_REFUSED(ds4_form, form, ds4_check_form, n_stage, 0);
    EACH_REFUSED(ds4_form, form, ds4_check_form, n_blocks, 0);
    EACH_REFUSED(ds4_form, form, ds4_check_form, n_slots, 0);
    EACH_REFUSED(ds4_form, form, ds4_check_form, max_seqs, DS4_MAX_STEP_ENTRIES + 1);
    EACH_REFUSED(ds4_form, form, ds4_check_form, max_step_tok, DS4_MAX_STEP_TOK + 1);
    EACH_REFUSED(ds4_form, form, ds4_check_form, context_tok, 0);
    EACH_REFUSED(ds4_form, form, ds4_check_form, host_bytes, -1);
    EACH_REFUSED(ds4_health, health, ds4_check_health, stage, -1);
    EACH_REFUSED(ds4_health, health, ds4_check_health, state, (enum ds4_worker_state)7);
    EACH_REFUSED(ds4_health, health, ds4_check_health, step_no, -2);
    EACH_REFUSED(ds4_health, health, ds4_check_health, step_age_ms, -1);
    EACH_REFUSED(ds4_health, health, ds4_check_health, wait_send_seconds, -1.0);
    EACH_REFUSED(ds4_health, health, ds4_check_health, cpu_seconds, -1.0);
    EACH_REFUSED(ds4_health, health, ds4_check_health, started_unix_s, -1);
    EACH_REFUSED(ds4_health, health, ds4_check_health, loaded_bytes, -1);
    EACH_REFUSED(ds4_health, health, ds4_check_health, total_bytes, -1);
    EACH_REFUSED(ds4_health, health, ds4_check_health, busy_seconds, NAN);
    EACH_REFUSED(ds4_health, health, ds4_check_health, wait_recv_seconds, -1);
    EACH_REFUSED(ds4_health, health, ds4_check_health, wait_token_seconds, INFINITY);
    EACH_REFUSED(ds4_health, health, ds4_check_health, wait_command_seconds, NAN);
    EACH_REFUSED(ds4_health, health, ds4_check_health, message[0], '\x7f');
    EACH_REFUSED(ds4_health, hot, ds4_check_health, card.value[DS4_CARD_CORE_C], NAN);
    EACH_REFUSED(ds4_health, hot, ds4_check_health, card.value[DS4_CARD_USED_BYTES], -2.0);
    EACH_REFUSED(ds4_fatal_report, fatal, ds4_check_fatal, stage, DS4_MAX_STAGES);
    EACH_REFUSED(ds4_fatal_report, fatal, ds4_check_fatal, exit_code, 256);
    EACH_REFUSED(ds4_fatal_report, fatal, ds4_check_fatal, step_no, -2);
    EACH_REFUSED(ds4_fatal_report, fatal, ds4_check_fatal, layer, -2);
    EACH_REFUSED(ds4_fatal_report, fatal, ds4_check_fatal, message[0], '\t');
}

static void ids_of_another_length_are_refused(void **state)
{
    struct ds4_wire_fixture *f = *state;
    static const char form[] = {0x08, 1, 0x10, 1, 0x18, 1, 0x20, 1,   0x28, 1,
                                0x30, 1, 0x38, 1, 0x42, 3, 'a',  'b', 'c'};
    struct ds4_form out;
    struct ds4_err err = {0};

    assert_int_equal(
        ds4_codec_decode_form((struct ds4_str){form, sizeof(form)}, &f->arena, &out, &err), -1);
    assert_non_null(strstr(err.msg, "pipe_key"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_small_messages_come_back_equal),
        cmocka_unit_test(pipe_ids_of_1_to_256_bytes_come_back_equal_and_others_are_refused),
        cmocka_unit_test(text_that_the_wire_does_not_carry_becomes_question_marks),
        cmocka_unit_test(text_is_refused_when_too_long_or_not_printable),
        cmocka_unit_test(each_small_message_field_out_of_range_is_refused),
        cmocka_unit_test(ids_of_another_length_are_refused),
    };

    return cmocka_run_group_tests(tests, ds4_wire_set_up, ds4_wire_tear_down);
}

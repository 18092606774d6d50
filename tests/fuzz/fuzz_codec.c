/* Any bytes as any payload: no crash, bounded memory, and what decodes encodes to bytes that decode to
 * the same again (the second encoding is compared: the first input may have unknown fields or an
 * unusual order).  The first byte picks the message. */
#include "proto/codec.h"
#include "proto/frame.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct ds4_arena arena;
static struct ds4_buf first, second;

static int recode(unsigned which, struct ds4_str in, struct ds4_buf *out)
{
    struct ds4_step step;
    struct ds4_tokens_out tokens;
    struct ds4_hello hello;
    struct ds4_form form;
    struct ds4_health health;
    struct ds4_fatal_report fatal;
    struct ds4_note note;
    struct ds4_step_done step_done;
    struct ds4_kv_write kv_write;
    struct ds4_kv_read kv_read;
    struct ds4_kv_unlink kv_unlink;
    struct ds4_kv_done kv_done;
    struct ds4_pipe_id id;

    switch (which) {
    case 0:
        return ds4_codec_decode_step(in, 1, &arena, &step, NULL) ||
               ds4_codec_encode_step(&step, &arena, out, NULL);
    case 1:
        return ds4_codec_decode_tokens(in, 1, &arena, &tokens, NULL) ||
               ds4_codec_encode_tokens(&tokens, &arena, out, NULL);
    case 2:
        return ds4_codec_decode_hello(in, &arena, &hello, NULL) ||
               ds4_codec_encode_hello(&hello, out, NULL);
    case 3:
        return ds4_codec_decode_form(in, &arena, &form, NULL) ||
               ds4_codec_encode_form(&form, out, NULL);
    case 4:
        return ds4_codec_decode_health(in, 1, &arena, &health, NULL) ||
               ds4_codec_encode_health(&health, out, NULL);
    case 5:
        return ds4_codec_decode_fatal(in, 1, &arena, &fatal, NULL) ||
               ds4_codec_encode_fatal(&fatal, out, NULL);
    case 6:
        return ds4_codec_decode_note(in, &arena, &note, NULL) ||
               ds4_codec_encode_note(&note, out, NULL);
    case 7:
        return ds4_codec_decode_step_done(in, 1, &arena, &step_done, NULL) ||
               ds4_codec_encode_step_done(&step_done, out, NULL);
    case 8:
        return ds4_codec_decode_kv_write(in, 1, &arena, &kv_write, NULL) ||
               ds4_codec_encode_kv_write(&kv_write, out, NULL);
    case 9:
        return ds4_codec_decode_kv_read(in, 1, &arena, &kv_read, NULL) ||
               ds4_codec_encode_kv_read(&kv_read, &arena, out, NULL);
    case 10:
        return ds4_codec_decode_kv_unlink(in, 1, &arena, &kv_unlink, NULL) ||
               ds4_codec_encode_kv_unlink(&kv_unlink, out, NULL);
    case 12:
        return ds4_codec_decode_pipe_id(in, &arena, &id, NULL) ||
               ds4_codec_encode_pipe_id(&id, out, NULL);
    default:
        return ds4_codec_decode_kv_done(in, 1, &arena, &kv_done, NULL) ||
               ds4_codec_encode_kv_done(&kv_done, out, NULL);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    unsigned which;

    if (size == 0)
        return 0;
    which = data[0] % 13;
    if (arena.max_bytes == 0) {
        ds4_arena_init(&arena, (size_t)2 * DS4_CODEC_ARENA_BYTES);
        ds4_buf_init(&first, DS4_MAX_FRAME_BYTES);
        ds4_buf_init(&second, DS4_MAX_FRAME_BYTES);
    }
    ds4_arena_reset(&arena, (struct ds4_arena_mark){0});
    ds4_buf_clear(&first);
    ds4_buf_clear(&second);
    if (recode(which, (struct ds4_str){(const char *)data + 1, size - 1}, &first))
        return 0;
    if (recode(which, ds4_buf_view(&first), &second))
        abort();
    if (first.len != second.len || (first.len > 0 && memcmp(first.ptr, second.ptr, first.len) != 0))
        abort();
    return 0;
}

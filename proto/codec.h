/* Structs of proto/message.h <-> payload bytes of a frame (proto/frame.h).
 *
 * Encoders append one payload to `out` (its maximum should be DS4_MAX_FRAME_BYTES or more).  The
 * message is checked first (proto/check.h), so what cannot be decoded cannot be sent; text that is not
 * printable ASCII is sent with '?' in its place.  -1 leaves `out` unchanged: DS4_E_PROTOCOL from the
 * checks, DS4_E_TOO_LONG above the frame maximum, DS4_E_NOMEM.
 *
 * Decoders take any bytes.  `generation` comes from the envelope and is stored in the struct.  -1 with
 * DS4_E_PROTOCOL for anything malformed or out of range, with DS4_E_NOMEM when the arena is too small
 * for what the bytes unpack to (a peer can make 4 MiB unpack to much more: the arena's maximum is the
 * guard; DS4_CODEC_ARENA_BYTES holds every legal message).  *out is valid only after 0.
 *
 * ds4_step, ds4_tokens_out, ds4_kv_write and ds4_kv_read are decoded into the arena: their arrays live
 * until it is reset.  All other uses of an arena here are scratch, given back before returning. */
#ifndef DS4_PROTO_CODEC_H
#define DS4_PROTO_CODEC_H

#include "common/arena.h"
#include "common/buf.h"
#include "proto/message.h"

#define DS4_CODEC_ARENA_BYTES ((size_t)32 << 20)

int ds4_codec_encode_step(const struct ds4_step *step, struct ds4_arena *scratch,
                          struct ds4_buf *out, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_codec_decode_step(struct ds4_str payload, uint32_t generation, struct ds4_arena *arena,
                          struct ds4_step *out, struct ds4_err *err) DS4_MUST_CHECK;

int ds4_codec_encode_tokens(const struct ds4_tokens_out *tokens, struct ds4_arena *scratch,
                            struct ds4_buf *out, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_codec_decode_tokens(struct ds4_str payload, uint32_t generation, struct ds4_arena *arena,
                            struct ds4_tokens_out *out, struct ds4_err *err) DS4_MUST_CHECK;

int ds4_codec_encode_step_done(const struct ds4_step_done *done, struct ds4_buf *out,
                               struct ds4_err *err) DS4_MUST_CHECK;
int ds4_codec_decode_step_done(struct ds4_str payload, uint32_t generation,
                               struct ds4_arena *scratch, struct ds4_step_done *out,
                               struct ds4_err *err) DS4_MUST_CHECK;

int ds4_codec_encode_hello(const struct ds4_hello *hello, struct ds4_buf *out,
                           struct ds4_err *err) DS4_MUST_CHECK;
int ds4_codec_decode_hello(struct ds4_str payload, struct ds4_arena *scratch, struct ds4_hello *out,
                           struct ds4_err *err) DS4_MUST_CHECK;

/* The form's generation is in the payload: it is the one being joined, the envelope repeats it. */
int ds4_codec_encode_form(const struct ds4_form *form, struct ds4_buf *out,
                          struct ds4_err *err) DS4_MUST_CHECK;
int ds4_codec_decode_form(struct ds4_str payload, struct ds4_arena *scratch, struct ds4_form *out,
                          struct ds4_err *err) DS4_MUST_CHECK;

int ds4_codec_encode_health(const struct ds4_health *health, struct ds4_buf *out,
                            struct ds4_err *err) DS4_MUST_CHECK;
int ds4_codec_decode_health(struct ds4_str payload, uint32_t generation, struct ds4_arena *scratch,
                            struct ds4_health *out, struct ds4_err *err) DS4_MUST_CHECK;

int ds4_codec_encode_fatal(const struct ds4_fatal_report *report, struct ds4_buf *out,
                           struct ds4_err *err) DS4_MUST_CHECK;
int ds4_codec_decode_fatal(struct ds4_str payload, uint32_t generation, struct ds4_arena *scratch,
                           struct ds4_fatal_report *out, struct ds4_err *err) DS4_MUST_CHECK;

int ds4_codec_encode_pipe_id(const struct ds4_pipe_id *id, struct ds4_buf *out,
                             struct ds4_err *err) DS4_MUST_CHECK;
int ds4_codec_decode_pipe_id(struct ds4_str payload, struct ds4_arena *scratch,
                             struct ds4_pipe_id *out, struct ds4_err *err) DS4_MUST_CHECK;

int ds4_codec_encode_note(const struct ds4_note *note, struct ds4_buf *out,
                          struct ds4_err *err) DS4_MUST_CHECK;
int ds4_codec_decode_note(struct ds4_str payload, struct ds4_arena *scratch, struct ds4_note *out,
                          struct ds4_err *err) DS4_MUST_CHECK;

/* ds4_kv_write and ds4_kv_read are decoded into the arena, as steps are. */
int ds4_codec_encode_kv_write(const struct ds4_kv_write *write, struct ds4_buf *out,
                              struct ds4_err *err) DS4_MUST_CHECK;
int ds4_codec_decode_kv_write(struct ds4_str payload, uint32_t generation, struct ds4_arena *arena,
                              struct ds4_kv_write *out, struct ds4_err *err) DS4_MUST_CHECK;

int ds4_codec_encode_kv_read(const struct ds4_kv_read *read, struct ds4_arena *scratch,
                             struct ds4_buf *out, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_codec_decode_kv_read(struct ds4_str payload, uint32_t generation, struct ds4_arena *arena,
                             struct ds4_kv_read *out, struct ds4_err *err) DS4_MUST_CHECK;

int ds4_codec_encode_kv_unlink(const struct ds4_kv_unlink *unlink, struct ds4_buf *out,
                               struct ds4_err *err) DS4_MUST_CHECK;
int ds4_codec_decode_kv_unlink(struct ds4_str payload, uint32_t generation,
                               struct ds4_arena *scratch, struct ds4_kv_unlink *out,
                               struct ds4_err *err) DS4_MUST_CHECK;

int ds4_codec_encode_kv_done(const struct ds4_kv_done *done, struct ds4_buf *out,
                             struct ds4_err *err) DS4_MUST_CHECK;
int ds4_codec_decode_kv_done(struct ds4_str payload, uint32_t generation, struct ds4_arena *scratch,
                             struct ds4_kv_done *out, struct ds4_err *err) DS4_MUST_CHECK;

#endif

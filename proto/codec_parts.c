/* What every message needs on its way through protobuf-c (see codec.c for the idea): an allocator over an
 * arena with a hard maximum, and the conversions of text, ids and counts, which are where bytes of a
 * peer become our numbers. */
#include "proto/codec_parts.h"

#include "proto/frame.h"

#include <string.h>

/* ---- memory ---- */

struct unpack_memory {
    struct ds4_arena *arena;
    bool full; /* protobuf-c returns the same NULL for bad bytes and for no memory */
};

static void *unpack_alloc(void *data, size_t n)
{
    struct unpack_memory *memory = data;
    void *taken = ds4_arena_take(memory->arena, n);

    if (taken == NULL)
        memory->full = true;
    return taken;
}

static void unpack_free(void *data, void *taken)
{
    (void)data;
    (void)taken;
}

/* The unpacked tree in `arena`, or NULL. */
void *ds4_codec_unpack(const ProtobufCMessageDescriptor *type, const char *what,
                       struct ds4_str payload, struct ds4_arena *arena, struct ds4_err *err)
{
    struct unpack_memory memory = {arena, false};
    ProtobufCAllocator allocator = {unpack_alloc, unpack_free, &memory};
    ProtobufCMessage *message;

    if (payload.len > DS4_MAX_FRAME_BYTES) {
        ds4_fail(err, DS4_E_PROTOCOL, "%s of %zu bytes, at most %zu", what, payload.len,
                 DS4_MAX_FRAME_BYTES);
        return NULL;
    }
    message =
        protobuf_c_message_unpack(type, &allocator, payload.len, (const uint8_t *)payload.ptr);
    if (memory.full)
        ds4_fail(err, DS4_E_NOMEM, "%s of %zu bytes unpacks to more than %zu", what, payload.len,
                 arena->max_bytes);
    else if (message == NULL)
        ds4_fail(err, DS4_E_PROTOCOL, "malformed %s of %zu bytes", what, payload.len);
    return message;
}

int ds4_codec_pack(const ProtobufCMessage *message, const char *what, struct ds4_buf *out,
                   struct ds4_err *err)
{
    size_t n = protobuf_c_message_get_packed_size(message);
    char *at;

    if (n > DS4_MAX_FRAME_BYTES)
        return ds4_fail(err, DS4_E_TOO_LONG, "%s of %zu bytes, at most %zu", what, n,
                        DS4_MAX_FRAME_BYTES);
    at = ds4_buf_reserve(out, n);
    if (at == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no room for a %s of %zu bytes", what, n);
    protobuf_c_message_pack(message, (uint8_t *)at);
    ds4_buf_commit(out, n);
    return 0;
}

int ds4_codec_no_memory(const char *what, struct ds4_err *err)
{
    return ds4_fail(err, DS4_E_NOMEM, "no memory to convert a %s", what);
}

/* ---- fixed-size parts ---- */

/* Borrows text after replacing, in place, what the wire does not carry. */
ProtobufCBinaryData ds4_codec_put_text(char *text, size_t cap)
{
    size_t len = strnlen(text, cap);

    for (size_t i = 0; i < len; i++)
        if (text[i] < ' ' || text[i] > '~')
            text[i] = '?';
    return (ProtobufCBinaryData){len, (uint8_t *)text};
}

int ds4_codec_get_text(const char *what, ProtobufCBinaryData from, char *to, size_t cap,
                       struct ds4_err *err)
{
    if (from.len >= cap)
        return ds4_fail(err, DS4_E_PROTOCOL, "%s of %zu bytes, at most %zu", what, from.len,
                        cap - 1);
    if (from.len > 0 && memchr(from.data, 0, from.len) != NULL)
        return ds4_fail(err, DS4_E_PROTOCOL, "%s holds a NUL", what);
    memset(to, 0, cap);
    if (from.len > 0)
        memcpy(to, from.data, from.len);
    return 0;
}

ProtobufCBinaryData ds4_codec_put_id(const uint8_t id[DS4_ID_BYTES])
{
    return (ProtobufCBinaryData){DS4_ID_BYTES, (uint8_t *)(uintptr_t)id};
}

int ds4_codec_get_id(const char *what, ProtobufCBinaryData from, uint8_t to[DS4_ID_BYTES],
                     struct ds4_err *err)
{
    if (from.len != DS4_ID_BYTES)
        return ds4_fail(err, DS4_E_PROTOCOL, "%s of %zu bytes, must be %d", what, from.len,
                        DS4_ID_BYTES);
    memcpy(to, from.data, DS4_ID_BYTES);
    return 0;
}

/* A count of the wire against what its array may hold, before it becomes an int32_t. */
int ds4_codec_get_count(const char *what, size_t n, int32_t max, int32_t *out, struct ds4_err *err)
{
    if (n > (size_t)max)
        return ds4_fail(err, DS4_E_PROTOCOL, "%zu of %s, at most %d", n, what, (int)max);
    *out = (int32_t)n;
    return 0;
}

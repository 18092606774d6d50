/* Parts shared by the files that read generated code (codec.c, codec_kv.c); not for others. */
#ifndef DS4_PROTO_CODEC_PARTS_H
#define DS4_PROTO_CODEC_PARTS_H

#include "common/arena.h"
#include "common/buf.h"
#include "common/str.h"
#include "proto/message.h"

#include <protobuf-c/protobuf-c.h>

/* The unpacked tree in `arena`, or NULL with DS4_E_PROTOCOL or DS4_E_NOMEM naming `what`. */
void *ds4_codec_unpack(const ProtobufCMessageDescriptor *type, const char *what,
                       struct ds4_str payload, struct ds4_arena *arena, struct ds4_err *err);

/* Appends the packed message to `out`, which stays as it was after -1. */
int ds4_codec_pack(const ProtobufCMessage *message, const char *what, struct ds4_buf *out,
                   struct ds4_err *err) DS4_MUST_CHECK;

/* DS4_E_NOMEM; returns -1. */
int ds4_codec_no_memory(const char *what, struct ds4_err *err);

/* Borrows text after replacing, in place, what the wire does not carry. */
ProtobufCBinaryData ds4_codec_put_text(char *text, size_t cap);
int ds4_codec_get_text(const char *what, ProtobufCBinaryData from, char *to, size_t cap,
                       struct ds4_err *err) DS4_MUST_CHECK;

ProtobufCBinaryData ds4_codec_put_id(const uint8_t id[DS4_ID_BYTES]);
int ds4_codec_get_id(const char *what, ProtobufCBinaryData from, uint8_t to[DS4_ID_BYTES],
                     struct ds4_err *err) DS4_MUST_CHECK;

/* A count of the wire against what its array may hold, before it becomes an int32_t. */
int ds4_codec_get_count(const char *what, size_t n, int32_t max, int32_t *out,
                        struct ds4_err *err) DS4_MUST_CHECK;

#endif

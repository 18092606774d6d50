/* The manifest: the commit record of what the stages keep on disk of one prefix (kv-cache.md 3.1).
 *
 * A commit is the state after the first `pos` tokens: extents of DS4_EXTENT_TOK tokens each, one tail with
 * the rest of the rows and the rings' contents, all by chain key (router/sched/chain.h).  Each is one file
 * or more, by layers.  Little endian:
 *
 *   off  type    field
 *     0  u8[8]   magic "DS4KVM\0\1"
 *     8  u32     format version, 1
 *    12  u32     flags: bit 0, many conversations may begin so
 *    16  u8[16]  fingerprint of the model's cache
 *    32  u8[16]  commit id, random
 *    48  u8[16]  chain key of the last whole chunk below `pos`
 *    64  u64     created, unix ns
 *    72  u32     pos
 *    76  u32     kind of the tail: enum ds4_kv_part_kind
 *    80  u32     objects: pos / DS4_EXTENT_TOK extents and the tail
 *    84  u32     files of all objects
 *    88  ...     objects: u8[16] key, u32 files, u32 0
 *        ...     files, in the objects' order: u32 first, u32 last layer (inclusive), u64 bytes, u8[16] digest
 *        u32     crc32c of everything before; with it, a look-up knows all it needs
 *        u32[]   the tokens, `pos` of them
 *        u32     crc32c of the tokens
 *
 * Pure: bytes in, struct out, and back. */
#ifndef DS4_ROUTER_DISK_MANIFEST_H
#define DS4_ROUTER_DISK_MANIFEST_H

#include "common/buf.h"
#include "common/err.h"
#include "proto/message.h"

#include <stdbool.h>
#include <stdint.h>

#define DS4_MANIFEST_MAX_BYTES ((size_t)160 << 20) /* 2 Mi positions on 64 stages */

/* An extent or a tail, and the files it is in. */
struct ds4_manifest_object {
    uint8_t key[DS4_ID_BYTES];
    int32_t first_file;
    int32_t n_file;
};

struct ds4_manifest {
    bool shared; /* many conversations may begin so */
    uint8_t fingerprint[DS4_ID_BYTES];
    uint8_t commit[DS4_ID_BYTES];
    uint8_t floor_key[DS4_ID_BYTES];
    uint64_t created_ns;
    int32_t pos;
    enum ds4_kv_part_kind kind;
    int32_t n_object;
    struct ds4_manifest_object *object; /* owned */
    int32_t n_file;
    struct ds4_kv_part_ref *file; /* owned */
    int32_t *token;               /* [pos], owned; NULL: only the head was read */
    uint64_t bytes;               /* of the whole file */
};

void ds4_manifest_deinit(struct ds4_manifest *m);

/* Room for that many, zeroed.  -1 with DS4_E_NOMEM; `m` is zeroed first. */
int ds4_manifest_init(struct ds4_manifest *m, int32_t n_object, int32_t n_file,
                      struct ds4_err *err) DS4_MUST_CHECK;

/* Appends the whole file to `out`; m->token is required. */
int ds4_manifest_write(const struct ds4_manifest *m, struct ds4_buf *out,
                       struct ds4_err *err) DS4_MUST_CHECK;

/* Bytes of the head, from the first DS4_MANIFEST_FIXED_BYTES; 0 with *reason if they are not those of a
 * manifest of file_bytes. */
#define DS4_MANIFEST_FIXED_BYTES 88
size_t ds4_manifest_peek(const uint8_t *bytes, size_t n, uint64_t file_bytes,
                         enum ds4_kv_reason *reason, struct ds4_err *err);
/* Reads a head (n = what peek said), or with tokens (n = the file).  Everything is checked: counts, ranges,
 * checksums, that the objects are those of `pos`.  On -1, DS4_E_CORRUPT with *reason or DS4_E_NOMEM, nothing
 * is held. */
int ds4_manifest_read(const uint8_t *bytes, size_t n, struct ds4_manifest *m,
                      enum ds4_kv_reason *reason, struct ds4_err *err) DS4_MUST_CHECK;

#endif

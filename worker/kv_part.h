/* The part file: what one stage keeps of an extent or a tail (plan 3.2).  Little endian; sections start
 * at multiples of 4096.
 *
 *   off  type     field
 *     0  u8[8]    magic "DS4KVP\0\1"
 *     8  u32      format version, 1
 *    12  u32      header bytes, a multiple of 4096
 *    16  u8[32]   fingerprint (the last 16 are 0)
 *    48  u8[16]   key
 *    64  u8[16]   commit, 0 for extents
 *    80  u32      kind: enum ds4_kv_part_kind
 *    84  u32 u32  first and last layer, inclusive
 *    92  u32 u32  token begin and end
 *   100  u32      row format: enum ds4_kv_row_format
 *   104  u32      number of sections
 *   108  u32      flags (bit 0 drafter rows, bit 1 logits: never set yet)
 *   112  u64      payload bytes
 *   120  u64      created, unix ns
 *   128  ...      sections: u16 layer, u16 kind, u32 rows, u64 offset, u64 bytes, u32 crc32c, u32 0
 *   end - 4  u32  crc32c of the header before it
 *
 * Nothing here touches files or memory of the cache: bytes in, struct out, and back. */
#ifndef DS4_WORKER_KV_PART_H
#define DS4_WORKER_KV_PART_H

#include "common/err.h"
#include "proto/message.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DS4_KV_PART_ALIGN        4096
#define DS4_KV_PART_MAX_SECTIONS 4096
#define DS4_KV_PART_MAX_HEADER   (DS4_KV_PART_ALIGN * 33) /* of that many sections */
#define DS4_KV_PATH_BYTES        512

/* New packings get new numbers. */
enum ds4_kv_row_format {
    DS4_KV_FORMAT_F32 = 1,
    DS4_KV_FORMAT_BF16 = 2,
    DS4_KV_FORMAT_FP8 = 3,    /* indexer rows FP8 as well; never written here */
    DS4_KV_FORMAT_FP8_FP4 = 4 /* 584 and 68 bytes for Flash */
};

struct ds4_kv_part_section {
    uint16_t layer; /* of the model */
    uint16_t kind;  /* enum ds4_kv_section_kind */
    uint32_t rows;
    uint64_t offset; /* in the file */
    uint64_t bytes;
    uint32_t crc;
};

struct ds4_kv_part {
    uint8_t fingerprint[DS4_ID_BYTES];
    uint8_t key[DS4_ID_BYTES];
    uint8_t commit[DS4_ID_BYTES];
    enum ds4_kv_part_kind kind;
    int32_t first_layer;
    int32_t last_layer; /* exclusive */
    int32_t begin;
    int32_t end;
    uint32_t row_format;
    uint32_t flags;
    uint64_t payload_bytes;
    uint64_t created_ns;
    int32_t n_section;
    struct ds4_kv_part_section *section; /* the caller's array */
};

/* Bytes of a header with n_section sections. */
size_t ds4_kv_part_header_bytes(int32_t n_section);
/* Places the sections, whose bytes are set, behind the header and each other, and sets payload_bytes.
 * Returns the size of the file. */
uint64_t ds4_kv_part_place(struct ds4_kv_part *part);
/* Writes the header, ds4_kv_part_header_bytes, to `out`. */
void ds4_kv_part_write(const struct ds4_kv_part *part, uint8_t *out);

/* The header's size from its first DS4_KV_PART_ALIGN bytes; 0 with *reason and err if they are not those
 * of a part. */
size_t ds4_kv_part_peek(const uint8_t *bytes, size_t n, enum ds4_kv_reason *reason,
                        struct ds4_err *err);
/* Reads a header of `n` bytes of a file of file_bytes: magic, version, sizes, checksum, every range, that
 * sections lie inside the file and do not overlap.  part->section has room for max_section.  -1 with
 * DS4_E_CORRUPT and *reason. */
int ds4_kv_part_read(const uint8_t *bytes, size_t n, uint64_t file_bytes, int32_t max_section,
                     struct ds4_kv_part *part, enum ds4_kv_reason *reason,
                     struct ds4_err *err) DS4_MUST_CHECK;

/* That `part` is what `want` names: fingerprint, format, kind, key, token range, layers.  Not the commit: the
 * same key has the same content, whoever wrote it, and a manifest names its file by the digest.  Sections
 * are not compared. */
int ds4_kv_part_match(const struct ds4_kv_part *part, const struct ds4_kv_part *want,
                      enum ds4_kv_reason *reason, struct ds4_err *err) DS4_MUST_CHECK;

/* The section of a layer and kind, or NULL. */
const struct ds4_kv_part_section *ds4_kv_part_find(const struct ds4_kv_part *part, int32_t layer,
                                                   int32_t kind);

/* XXH3-128 of a header: it holds the checksums of all the rest. */
void ds4_kv_part_digest(const uint8_t *header, size_t n, uint8_t digest[DS4_ID_BYTES]);

/* DIR/v1/FINGERPRINT/{ext|tail}/KE/KEY.sFIRST-LAST, last layer inclusive; false if it is too long. */
bool ds4_kv_part_path(char path[DS4_KV_PATH_BYTES], const char *dir,
                      const struct ds4_kv_part *part);

#endif

/* Headers of part files (see kv_part.h for the format).
 *
 * Written and read byte by byte, as wire envelopes are.  Reading trusts nothing: the checksum says that
 * the bytes are those that were written, the ranges say that what was written can be used.  Upstream
 * restores were "verified" by their maximum position only while private state was missing; here every
 * section is looked up by layer and kind, with the exact rows it must have (kv_disk.c).
 *
 * Invariant: what ds4_kv_part_read accepts has sections inside the file, in order, without overlap. */
#include "worker/kv_part.h"

#include "common/crc32c.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

static const uint8_t magic[8] = {'D', 'S', '4', 'K', 'V', 'P', 0, 1};

enum {
    AT_VERSION = 8,
    AT_HEADER = 12,
    AT_FINGERPRINT = 16,
    AT_KEY = 48,
    AT_COMMIT = 64,
    AT_KIND = 80,
    AT_FIRST = 84,
    AT_LAST = 88,
    AT_BEGIN = 92,
    AT_END = 96,
    AT_FORMAT = 100,
    AT_SECTIONS = 104,
    AT_FLAGS = 108,
    AT_PAYLOAD = 112,
    AT_CREATED = 120,
    AT_TABLE = 128,
    SECTION_BYTES = 32,
    CRC_BYTES = 4,
    VERSION = 1
};

static void put(uint8_t *at, uint64_t value, size_t n)
{
    for (size_t i = 0; i < n; i++)
        at[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t get(const uint8_t *at, size_t n)
{
    uint64_t value = 0;

    for (size_t i = 0; i < n; i++)
        value |= (uint64_t)at[i] << (8 * i);
    return value;
}

static uint64_t align_up(uint64_t n)
{
    return (n + DS4_KV_PART_ALIGN - 1) / DS4_KV_PART_ALIGN * DS4_KV_PART_ALIGN;
}

size_t ds4_kv_part_header_bytes(int32_t n_section)
{
    return (size_t)align_up(AT_TABLE + (uint64_t)n_section * SECTION_BYTES + CRC_BYTES);
}

uint64_t ds4_kv_part_place(struct ds4_kv_part *part)
{
    uint64_t at = ds4_kv_part_header_bytes(part->n_section);

    part->payload_bytes = 0;
    for (int32_t s = 0; s < part->n_section; s++) {
        part->section[s].offset = at;
        part->payload_bytes += part->section[s].bytes;
        at += align_up(part->section[s].bytes);
    }
    return at;
}

void ds4_kv_part_write(const struct ds4_kv_part *part, uint8_t *out)
{
    size_t n = ds4_kv_part_header_bytes(part->n_section);

    memset(out, 0, n);
    memcpy(out, magic, sizeof(magic));
    put(out + AT_VERSION, VERSION, 4);
    put(out + AT_HEADER, n, 4);
    memcpy(out + AT_FINGERPRINT, part->fingerprint, DS4_ID_BYTES);
    memcpy(out + AT_KEY, part->key, DS4_ID_BYTES);
    memcpy(out + AT_COMMIT, part->commit, DS4_ID_BYTES);
    put(out + AT_KIND, (uint64_t)part->kind, 4);
    put(out + AT_FIRST, (uint64_t)part->first_layer, 4);
    put(out + AT_LAST, (uint64_t)part->last_layer - 1, 4);
    put(out + AT_BEGIN, (uint64_t)part->begin, 4);
    put(out + AT_END, (uint64_t)part->end, 4);
    put(out + AT_FORMAT, part->row_format, 4);
    put(out + AT_SECTIONS, (uint64_t)part->n_section, 4);
    put(out + AT_FLAGS, part->flags, 4);
    put(out + AT_PAYLOAD, part->payload_bytes, 8);
    put(out + AT_CREATED, part->created_ns, 8);
    for (int32_t s = 0; s < part->n_section; s++) {
        const struct ds4_kv_part_section *section = &part->section[s];
        uint8_t *at = out + AT_TABLE + (size_t)s * SECTION_BYTES;

        put(at, section->layer, 2);
        put(at + 2, section->kind, 2);
        put(at + 4, section->rows, 4);
        put(at + 8, section->offset, 8);
        put(at + 16, section->bytes, 8);
        put(at + 24, section->crc, 4);
    }
    put(out + n - CRC_BYTES, ds4_crc32c(0, out, n - CRC_BYTES), CRC_BYTES);
}

/* ---- reading ---------------------------------------------------------------------------------------- */

static int bad(enum ds4_kv_reason *out, enum ds4_kv_reason reason, struct ds4_err *err,
               const char *what, uint64_t value)
{
    *out = reason;
    return ds4_fail(err, DS4_E_CORRUPT, "part header: %s %" PRIu64, what, value);
}

size_t ds4_kv_part_peek(const uint8_t *bytes, size_t n, enum ds4_kv_reason *reason,
                        struct ds4_err *err)
{
    uint64_t header;

    if (n < DS4_KV_PART_ALIGN) {
        (void)bad(reason, DS4_KV_BAD_SIZE, err, "bytes", n);
        return 0;
    }
    if (memcmp(bytes, magic, sizeof(magic)) != 0) {
        (void)bad(reason, DS4_KV_BAD_MAGIC, err, "magic", get(bytes, 8));
        return 0;
    }
    if (get(bytes + AT_VERSION, 4) != VERSION) {
        (void)bad(reason, DS4_KV_BAD_VERSION, err, "version", get(bytes + AT_VERSION, 4));
        return 0;
    }
    header = get(bytes + AT_HEADER, 4);
    if (header < DS4_KV_PART_ALIGN || header > DS4_KV_PART_MAX_HEADER ||
        header % DS4_KV_PART_ALIGN != 0) {
        (void)bad(reason, DS4_KV_BAD_SIZE, err, "size of", header);
        return 0;
    }
    return (size_t)header;
}

static int read_fields(const uint8_t *bytes, struct ds4_kv_part *part, enum ds4_kv_reason *reason,
                       struct ds4_err *err)
{
    uint64_t kind = get(bytes + AT_KIND, 4), first = get(bytes + AT_FIRST, 4);
    uint64_t last = get(bytes + AT_LAST, 4), begin = get(bytes + AT_BEGIN, 4);
    uint64_t end = get(bytes + AT_END, 4);

    if (kind < DS4_KV_EXTENT || kind > DS4_KV_TAIL)
        return bad(reason, DS4_KV_BAD_TOKENS, err, "kind", kind);
    if (last >= UINT16_MAX || first > last)
        return bad(reason, DS4_KV_MISSING_PART, err, "last layer", last);
    if (end > DS4_MAX_POS || begin > end)
        return bad(reason, DS4_KV_BAD_TOKENS, err, "token end", end);
    memcpy(part->fingerprint, bytes + AT_FINGERPRINT, DS4_ID_BYTES);
    memcpy(part->key, bytes + AT_KEY, DS4_ID_BYTES);
    memcpy(part->commit, bytes + AT_COMMIT, DS4_ID_BYTES);
    part->kind = (enum ds4_kv_part_kind)kind;
    part->first_layer = (int32_t)first;
    part->last_layer = (int32_t)last + 1;
    part->begin = (int32_t)begin;
    part->end = (int32_t)end;
    part->row_format = (uint32_t)get(bytes + AT_FORMAT, 4);
    part->flags = (uint32_t)get(bytes + AT_FLAGS, 4);
    part->payload_bytes = get(bytes + AT_PAYLOAD, 8);
    part->created_ns = get(bytes + AT_CREATED, 8);
    for (int i = DS4_ID_BYTES; i < 2 * DS4_ID_BYTES; i++)
        if (bytes[AT_FINGERPRINT + i] != 0)
            return bad(reason, DS4_KV_BAD_FINGERPRINT, err, "fingerprint byte", (uint64_t)i);
    return 0;
}

static int read_section(const uint8_t *at, uint64_t file_bytes, uint64_t *next, uint64_t *payload,
                        struct ds4_kv_part_section *out, enum ds4_kv_reason *reason,
                        struct ds4_err *err)
{
    *out = (struct ds4_kv_part_section){
        .layer = (uint16_t)get(at, 2),
        .kind = (uint16_t)get(at + 2, 2),
        .rows = (uint32_t)get(at + 4, 4),
        .offset = get(at + 8, 8),
        .bytes = get(at + 16, 8),
        .crc = (uint32_t)get(at + 24, 4),
    };
    if (out->offset % DS4_KV_PART_ALIGN != 0 || out->offset < *next || out->offset > file_bytes ||
        out->bytes > file_bytes - out->offset)
        return bad(reason, DS4_KV_BAD_SIZE, err, "section at", out->offset);
    *next = out->offset + out->bytes;
    *payload += out->bytes;
    return 0;
}

int ds4_kv_part_read(const uint8_t *bytes, size_t n, uint64_t file_bytes, int32_t max_section,
                     struct ds4_kv_part *part, enum ds4_kv_reason *reason, struct ds4_err *err)
{
    struct ds4_kv_part_section *section = part->section;
    uint64_t n_section, next = n, payload = 0;
    size_t header = ds4_kv_part_peek(bytes, n, reason, err);

    if (header == 0)
        return -1;
    if (header != n || n > file_bytes)
        return bad(reason, DS4_KV_BAD_SIZE, err, "size of", header);
    if (get(bytes + n - CRC_BYTES, CRC_BYTES) != ds4_crc32c(0, bytes, n - CRC_BYTES))
        return bad(reason, DS4_KV_BAD_CRC, err, "checksum", get(bytes + n - CRC_BYTES, CRC_BYTES));
    *part = (struct ds4_kv_part){.section = section};
    n_section = get(bytes + AT_SECTIONS, 4);
    if (n_section > (uint64_t)max_section || ds4_kv_part_header_bytes((int32_t)n_section) != n)
        return bad(reason, DS4_KV_BAD_SIZE, err, "number of sections", n_section);
    if (read_fields(bytes, part, reason, err) != 0)
        return -1;
    part->n_section = (int32_t)n_section;
    for (int32_t s = 0; s < part->n_section; s++)
        if (read_section(bytes + AT_TABLE + (size_t)s * SECTION_BYTES, file_bytes, &next, &payload,
                         &section[s], reason, err) != 0)
            return -1;
    if (payload != part->payload_bytes)
        return bad(reason, DS4_KV_BAD_SIZE, err, "payload", part->payload_bytes);
    return 0;
}

int ds4_kv_part_match(const struct ds4_kv_part *part, const struct ds4_kv_part *want,
                      enum ds4_kv_reason *reason, struct ds4_err *err)
{
    if (memcmp(part->fingerprint, want->fingerprint, DS4_ID_BYTES) != 0)
        return bad(reason, DS4_KV_BAD_FINGERPRINT, err, "fingerprint", get(part->fingerprint, 8));
    if (part->row_format != want->row_format)
        return bad(reason, DS4_KV_BAD_FINGERPRINT, err, "row format", part->row_format);
    if (part->kind != want->kind || memcmp(part->key, want->key, DS4_ID_BYTES) != 0)
        return bad(reason, DS4_KV_BAD_TOKENS, err, "key of another part, kind", part->kind);
    if (part->begin != want->begin || part->end != want->end)
        return bad(reason, DS4_KV_BAD_TOKENS, err, "token end", (uint64_t)part->end);
    if (part->first_layer != want->first_layer || part->last_layer != want->last_layer)
        return bad(reason, DS4_KV_MISSING_PART, err, "first layer", (uint64_t)part->first_layer);
    return 0;
}

const struct ds4_kv_part_section *ds4_kv_part_find(const struct ds4_kv_part *part, int32_t layer,
                                                   int32_t kind)
{
    for (int32_t s = 0; s < part->n_section; s++)
        if (part->section[s].layer == layer && part->section[s].kind == kind)
            return &part->section[s];
    return NULL;
}

void ds4_kv_part_digest(const uint8_t *header, size_t n, uint8_t digest[DS4_ID_BYTES])
{
    XXH128_canonical_t canonical;

    XXH128_canonicalFromHash(&canonical, XXH3_128bits(header, n));
    memcpy(digest, canonical.digest, DS4_ID_BYTES);
}

static void put_hex(char *out, const uint8_t *bytes, size_t n)
{
    static const char digit[] = "0123456789abcdef";

    for (size_t i = 0; i < n; i++) {
        out[2 * i] = digit[bytes[i] >> 4];
        out[2 * i + 1] = digit[bytes[i] & 15];
    }
    out[2 * n] = 0;
}

bool ds4_kv_part_path(char path[DS4_KV_PATH_BYTES], const char *dir, const struct ds4_kv_part *part)
{
    char fingerprint[2 * DS4_ID_BYTES + 1], key[2 * DS4_ID_BYTES + 1];
    int n;

    put_hex(fingerprint, part->fingerprint, DS4_ID_BYTES / 2);
    put_hex(key, part->key, DS4_ID_BYTES);
    n = snprintf(path, DS4_KV_PATH_BYTES, "%s/v1/%s/%s/%.2s/%s.s%d-%d", dir, fingerprint,
                 part->kind == DS4_KV_EXTENT ? "ext" : "tail", key, key, (int)part->first_layer,
                 (int)part->last_layer - 1);
    return n > 0 && n < DS4_KV_PATH_BYTES;
}

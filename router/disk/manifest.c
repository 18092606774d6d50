/* Manifest bytes (see the header).
 *
 * Head and tokens have a checksum each, so that a start can look at thousands of manifests without reading
 * what the conversations said.  Counts are checked against the file's size before anything is allocated.
 * Invariant: what was read has exactly the objects its position demands, and every object has a file. */
#include "router/disk/manifest.h"

#include "common/crc32c.h"

#include <stdlib.h>
#include <string.h>

#define VERSION      1
#define OBJECT_BYTES 24
#define FILE_BYTES   32
#define CRC_BYTES    4
#define SHARED_FLAG  1
#define MAX_FILES    (64 * 2049) /* every stage has one, of every extent of the longest context */

static const uint8_t magic[8] = {'D', 'S', '4', 'K', 'V', 'M', 0, 1};

static void put_u32(uint8_t *at, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(value >> (8 * i));
}

static void put_u64(uint8_t *at, uint64_t value)
{
    put_u32(at, (uint32_t)value);
    put_u32(at + 4, (uint32_t)(value >> 32));
}

static uint32_t get_u32(const uint8_t *at)
{
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static uint64_t get_u64(const uint8_t *at)
{
    return get_u32(at) | (uint64_t)get_u32(at + 4) << 32;
}

static size_t head_bytes(size_t n_object, size_t n_file)
{
    return DS4_MANIFEST_FIXED_BYTES + n_object * OBJECT_BYTES + n_file * FILE_BYTES + CRC_BYTES;
}

void ds4_manifest_deinit(struct ds4_manifest *m)
{
    free(m->object);
    free(m->file);
    free(m->token);
    *m = (struct ds4_manifest){0};
}

int ds4_manifest_init(struct ds4_manifest *m, int32_t n_object, int32_t n_file, struct ds4_err *err)
{
    *m = (struct ds4_manifest){.n_object = n_object, .n_file = n_file};
    m->object = calloc((size_t)n_object + 1, sizeof(*m->object));
    m->file = calloc((size_t)n_file + 1, sizeof(*m->file));
    if (m->object != NULL && m->file != NULL)
        return 0;
    ds4_manifest_deinit(m);
    return ds4_fail(err, DS4_E_NOMEM, "no memory for a manifest of %d files", n_file);
}

/* ---- writing ---------------------------------------------------------------------------------------- */

static void write_head(const struct ds4_manifest *m, uint8_t *out)
{
    uint8_t *at = out + DS4_MANIFEST_FIXED_BYTES;

    memcpy(out, magic, sizeof(magic));
    put_u32(out + 8, VERSION);
    put_u32(out + 12, m->shared ? SHARED_FLAG : 0);
    memcpy(out + 16, m->fingerprint, DS4_ID_BYTES);
    memcpy(out + 32, m->commit, DS4_ID_BYTES);
    memcpy(out + 48, m->floor_key, DS4_ID_BYTES);
    put_u64(out + 64, m->created_ns);
    put_u32(out + 72, (uint32_t)m->pos);
    put_u32(out + 76, (uint32_t)m->kind);
    put_u32(out + 80, (uint32_t)m->n_object);
    put_u32(out + 84, (uint32_t)m->n_file);
    for (int32_t i = 0; i < m->n_object; i++, at += OBJECT_BYTES) {
        memcpy(at, m->object[i].key, DS4_ID_BYTES);
        put_u32(at + 16, (uint32_t)m->object[i].n_file);
        put_u32(at + 20, 0);
    }
    for (int32_t i = 0; i < m->n_file; i++, at += FILE_BYTES) {
        put_u32(at, (uint32_t)m->file[i].first_layer);
        put_u32(at + 4, (uint32_t)m->file[i].last_layer - 1);
        put_u64(at + 8, m->file[i].bytes);
        memcpy(at + 16, m->file[i].digest, DS4_ID_BYTES);
    }
    put_u32(at, ds4_crc32c(0, out, (size_t)(at - out)));
}

int ds4_manifest_write(const struct ds4_manifest *m, struct ds4_buf *out, struct ds4_err *err)
{
    size_t head = head_bytes((size_t)m->n_object, (size_t)m->n_file);
    size_t n = head + (size_t)m->pos * 4 + CRC_BYTES;
    uint8_t *at = (uint8_t *)ds4_buf_reserve(out, n);

    if (at == NULL)
        return ds4_buf_check(out, "a manifest", err);
    write_head(m, at);
    for (int32_t t = 0; t < m->pos; t++)
        put_u32(at + head + 4 * (size_t)t, (uint32_t)m->token[t]);
    put_u32(at + n - CRC_BYTES, ds4_crc32c(0, at + head, n - head - CRC_BYTES));
    ds4_buf_commit(out, n);
    return 0;
}

/* ---- reading ---------------------------------------------------------------------------------------- */

static int bad(enum ds4_kv_reason *reason, enum ds4_kv_reason why, struct ds4_err *err,
               const char *what)
{
    *reason = why;
    return ds4_fail(err, DS4_E_CORRUPT, "%s", what);
}

size_t ds4_manifest_peek(const uint8_t *bytes, size_t n, uint64_t file_bytes,
                         enum ds4_kv_reason *reason, struct ds4_err *err)
{
    uint32_t pos, n_object, n_file;
    size_t head;

    if (n < DS4_MANIFEST_FIXED_BYTES) {
        (void)bad(reason, DS4_KV_BAD_SIZE, err, "a manifest that ends in its head");
        return 0;
    }
    if (memcmp(bytes, magic, sizeof(magic)) != 0) {
        (void)bad(reason, DS4_KV_BAD_MAGIC, err, "not a manifest");
        return 0;
    }
    if (get_u32(bytes + 8) != VERSION) {
        (void)bad(reason, DS4_KV_BAD_VERSION, err, "a manifest of another version");
        return 0;
    }
    pos = get_u32(bytes + 72);
    n_object = get_u32(bytes + 80);
    n_file = get_u32(bytes + 84);
    head = pos > DS4_MAX_POS || n_object > DS4_MAX_POS || n_file > MAX_FILES
               ? 0
               : head_bytes(n_object, n_file);
    if (head == 0 || pos == 0 || n_object != pos / DS4_EXTENT_TOK + 1 || n_file < n_object ||
        file_bytes != head + (uint64_t)pos * 4 + CRC_BYTES) {
        (void)bad(reason, DS4_KV_BAD_SIZE, err, "a manifest whose counts do not fit");
        return 0;
    }
    return head;
}

static int read_lists(const uint8_t *bytes, struct ds4_manifest *m, enum ds4_kv_reason *reason,
                      struct ds4_err *err)
{
    const uint8_t *at = bytes + DS4_MANIFEST_FIXED_BYTES;
    int32_t next = 0;

    for (int32_t i = 0; i < m->n_object; i++, at += OBJECT_BYTES) {
        uint32_t n = get_u32(at + 16);

        if (n < 1 || n > DS4_MAX_STAGES || (int32_t)n > m->n_file - next)
            return bad(reason, DS4_KV_BAD_SIZE, err, "an object of a manifest has no files");
        memcpy(m->object[i].key, at, DS4_ID_BYTES);
        m->object[i].first_file = next;
        m->object[i].n_file = (int32_t)n;
        next += (int32_t)n;
    }
    if (next != m->n_file)
        return bad(reason, DS4_KV_BAD_SIZE, err, "a manifest with files of nothing");
    for (int32_t i = 0; i < m->n_file; i++, at += FILE_BYTES) {
        struct ds4_kv_part_ref *file = &m->file[i];
        uint32_t first = get_u32(at), last = get_u32(at + 4);

        if (first > last || last >= UINT16_MAX)
            return bad(reason, DS4_KV_BAD_SIZE, err, "a file of a manifest has no layers");
        file->first_layer = (int32_t)first;
        file->last_layer = (int32_t)last + 1;
        file->bytes = get_u64(at + 8);
        if (file->bytes > INT64_MAX / (2 * (uint64_t)MAX_FILES))
            return bad(reason, DS4_KV_BAD_SIZE, err, "a file of a manifest is too large");
        memcpy(file->digest, at + 16, DS4_ID_BYTES);
    }
    return 0;
}

static int read_tokens(const uint8_t *bytes, struct ds4_manifest *m, enum ds4_kv_reason *reason,
                       struct ds4_err *err)
{
    size_t n = (size_t)m->pos * 4;

    if (get_u32(bytes + n) != ds4_crc32c(0, bytes, n))
        return bad(reason, DS4_KV_BAD_CRC, err, "checksum of a manifest's tokens");
    m->token = malloc(n);
    if (m->token == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for %d tokens", m->pos);
    for (int32_t t = 0; t < m->pos; t++)
        m->token[t] = (int32_t)get_u32(bytes + 4 * (size_t)t);
    return 0;
}

int ds4_manifest_read(const uint8_t *bytes, size_t n, struct ds4_manifest *m,
                      enum ds4_kv_reason *reason, struct ds4_err *err)
{
    size_t head;
    uint64_t whole;
    uint32_t kind;

    *m = (struct ds4_manifest){0};
    *reason = DS4_KV_BAD_SIZE;
    if (n < DS4_MANIFEST_FIXED_BYTES)
        return ds4_fail(err, DS4_E_CORRUPT, "a manifest of %zu bytes", n);
    whole = head_bytes(get_u32(bytes + 80), get_u32(bytes + 84)) +
            (uint64_t)get_u32(bytes + 72) * 4 + CRC_BYTES;
    head = ds4_manifest_peek(bytes, n, whole, reason, err);
    if (head == 0)
        return -1;
    if (n != head && n != whole)
        return bad(reason, DS4_KV_BAD_SIZE, err, "a manifest of another length than it says");
    if (get_u32(bytes + head - CRC_BYTES) != ds4_crc32c(0, bytes, head - CRC_BYTES))
        return bad(reason, DS4_KV_BAD_CRC, err, "checksum of a manifest");
    kind = get_u32(bytes + 76);
    if ((kind != DS4_KV_ANCHOR && kind != DS4_KV_TAIL) ||
        (get_u32(bytes + 12) & ~(uint32_t)SHARED_FLAG) != 0)
        return bad(reason, DS4_KV_BAD_VERSION, err, "a manifest of a kind not known here");
    if (ds4_manifest_init(m, (int32_t)get_u32(bytes + 80), (int32_t)get_u32(bytes + 84), err) != 0)
        return -1;
    m->shared = (get_u32(bytes + 12) & SHARED_FLAG) != 0;
    memcpy(m->fingerprint, bytes + 16, DS4_ID_BYTES);
    memcpy(m->commit, bytes + 32, DS4_ID_BYTES);
    memcpy(m->floor_key, bytes + 48, DS4_ID_BYTES);
    m->created_ns = get_u64(bytes + 64);
    m->pos = (int32_t)get_u32(bytes + 72);
    m->kind = (enum ds4_kv_part_kind)kind;
    m->bytes = whole;
    if (read_lists(bytes, m, reason, err) != 0 ||
        (n == whole && read_tokens(bytes + head, m, reason, err) != 0)) {
        ds4_manifest_deinit(m);
        return -1;
    }
    return 0;
}

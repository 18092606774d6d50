/* GGUF from the other side: what the reader takes apart, put together byte by byte.
 *
 * Independent of common/gguf.c on purpose (only type sizes are shared), so that a misreading there does
 * not hide behind the same mistake here. */
#include "tests/support/gguf_writer.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_BYTES ((size_t)1 << 30)

static void need(int ok)
{
    if (!ok) {
        perror("gguf_writer");
        abort();
    }
}

static void put(struct ds4_buf *out, const void *bytes, size_t n)
{
    need(ds4_buf_append(out, bytes, n) == 0);
}

static void put_le(struct ds4_buf *out, uint64_t value, int n)
{
    for (int i = 0; i < n; i++)
        need(ds4_buf_append_byte(out, (char)(value >> (8 * i))) == 0);
}

void ds4_gguf_put_u16(struct ds4_buf *out, uint16_t value)
{
    put_le(out, value, 2);
}

void ds4_gguf_put_u32(struct ds4_buf *out, uint32_t value)
{
    put_le(out, value, 4);
}

void ds4_gguf_put_u64(struct ds4_buf *out, uint64_t value)
{
    put_le(out, value, 8);
}

void ds4_gguf_put_f32(struct ds4_buf *out, float value)
{
    put_le(out, ds4_bits_from_f32(value), 4);
}

void ds4_gguf_put_text(struct ds4_buf *out, const char *text)
{
    ds4_gguf_put_u64(out, strlen(text));
    put(out, text, strlen(text));
}

void ds4_gguf_put_prefix(struct ds4_buf *out, uint64_t n_tensor, uint64_t n_kv)
{
    put(out, "GGUF", 4);
    ds4_gguf_put_u32(out, 3);
    ds4_gguf_put_u64(out, n_tensor);
    ds4_gguf_put_u64(out, n_kv);
}

void ds4_gguf_writer_init(struct ds4_gguf_writer *w)
{
    memset(w, 0, sizeof(*w));
    ds4_buf_init(&w->kv, MAX_BYTES);
    ds4_buf_init(&w->tensors, MAX_BYTES);
}

void ds4_gguf_writer_deinit(struct ds4_gguf_writer *w)
{
    ds4_buf_deinit(&w->kv);
    ds4_buf_deinit(&w->tensors);
}

static struct ds4_buf *begin(struct ds4_gguf_writer *w, const char *key, uint32_t type)
{
    w->n_kv++;
    ds4_gguf_put_text(&w->kv, key);
    ds4_gguf_put_u32(&w->kv, type);
    return &w->kv;
}

static struct ds4_buf *begin_array(struct ds4_gguf_writer *w, const char *key, uint32_t type,
                                   uint64_t n)
{
    begin(w, key, DS4_GGUF_ARRAY);
    ds4_gguf_put_u32(&w->kv, type);
    ds4_gguf_put_u64(&w->kv, n);
    return &w->kv;
}

void ds4_gguf_write_u16(struct ds4_gguf_writer *w, const char *key, uint16_t value)
{
    ds4_gguf_put_u16(begin(w, key, DS4_GGUF_U16), value);
}

void ds4_gguf_write_u32(struct ds4_gguf_writer *w, const char *key, uint32_t value)
{
    ds4_gguf_put_u32(begin(w, key, DS4_GGUF_U32), value);
}

void ds4_gguf_write_i32(struct ds4_gguf_writer *w, const char *key, int32_t value)
{
    ds4_gguf_put_u32(begin(w, key, DS4_GGUF_I32), (uint32_t)value);
}

void ds4_gguf_write_u64(struct ds4_gguf_writer *w, const char *key, uint64_t value)
{
    ds4_gguf_put_u64(begin(w, key, DS4_GGUF_U64), value);
}

void ds4_gguf_write_f32(struct ds4_gguf_writer *w, const char *key, float value)
{
    ds4_gguf_put_f32(begin(w, key, DS4_GGUF_F32), value);
}

void ds4_gguf_write_bool(struct ds4_gguf_writer *w, const char *key, uint8_t value)
{
    put(begin(w, key, DS4_GGUF_BOOL), &value, 1);
}

void ds4_gguf_write_text(struct ds4_gguf_writer *w, const char *key, const char *value)
{
    ds4_gguf_put_text(begin(w, key, DS4_GGUF_STRING), value);
}

void ds4_gguf_write_i32s(struct ds4_gguf_writer *w, const char *key, const int32_t *v, uint64_t n)
{
    struct ds4_buf *out = begin_array(w, key, DS4_GGUF_I32, n);

    for (uint64_t i = 0; i < n; i++)
        ds4_gguf_put_u32(out, (uint32_t)v[i]);
}

void ds4_gguf_write_f32s(struct ds4_gguf_writer *w, const char *key, const float *v, uint64_t n)
{
    struct ds4_buf *out = begin_array(w, key, DS4_GGUF_F32, n);

    for (uint64_t i = 0; i < n; i++)
        ds4_gguf_put_f32(out, v[i]);
}

void ds4_gguf_write_texts(struct ds4_gguf_writer *w, const char *key, const char *const *v,
                          uint64_t n)
{
    struct ds4_buf *out = begin_array(w, key, DS4_GGUF_STRING, n);

    for (uint64_t i = 0; i < n; i++)
        ds4_gguf_put_text(out, v[i]);
}

void ds4_gguf_write_copy(struct ds4_gguf_writer *w, const struct ds4_gguf_kv *kv)
{
    w->n_kv++;
    ds4_gguf_put_u64(&w->kv, kv->key.len);
    put(&w->kv, kv->key.ptr, kv->key.len);
    if (kv->is_array) {
        ds4_gguf_put_u32(&w->kv, DS4_GGUF_ARRAY);
        ds4_gguf_put_u32(&w->kv, kv->type);
        ds4_gguf_put_u64(&w->kv, kv->n);
    } else {
        ds4_gguf_put_u32(&w->kv, kv->type);
    }
    if (kv->type != DS4_GGUF_STRING) {
        put(&w->kv, kv->data, (size_t)kv->n * ds4_gguf_type_bytes(kv->type));
        return;
    }
    for (uint64_t i = 0; i < kv->n; i++) {
        struct ds4_str s = ds4_gguf_str_at(kv, i);

        ds4_gguf_put_u64(&w->kv, s.len);
        put(&w->kv, s.ptr, s.len);
    }
}

static uint64_t align_up(uint64_t n)
{
    return (n + DS4_GGUF_ALIGNMENT - 1) / DS4_GGUF_ALIGNMENT * DS4_GGUF_ALIGNMENT;
}

void ds4_gguf_write_tensor(struct ds4_gguf_writer *w, const char *name, uint32_t type, int n_dims,
                           const int64_t *ne)
{
    int32_t block_elems = 1;
    int32_t block_bytes = 0;
    uint64_t bytes = 1;

    w->n_tensor++;
    ds4_gguf_put_text(&w->tensors, name);
    ds4_gguf_put_u32(&w->tensors, (uint32_t)n_dims);
    for (int d = 0; d < n_dims; d++) {
        ds4_gguf_put_u64(&w->tensors, (uint64_t)ne[d]);
        bytes *= (uint64_t)ne[d];
    }
    if (ds4_gguf_tensor_type_size(type, &block_elems, &block_bytes) != 0)
        block_bytes = 0;
    bytes = bytes / (uint64_t)block_elems * (uint64_t)block_bytes;
    ds4_gguf_put_u32(&w->tensors, type);
    ds4_gguf_put_u64(&w->tensors, w->data_bytes);
    w->last_bytes = w->data_bytes + bytes;
    /* A tensor of unknown size still needs a place of its own. */
    w->data_bytes = align_up(w->last_bytes + (bytes == 0));
}

void ds4_gguf_writer_header(const struct ds4_gguf_writer *w, struct ds4_buf *out)
{
    ds4_gguf_put_prefix(out, w->n_tensor, w->n_kv);
    put(out, w->kv.ptr, w->kv.len);
    put(out, w->tensors.ptr, w->tensors.len);
    while (out->len % DS4_GGUF_ALIGNMENT != 0)
        put(out, "", 1);
}

uint64_t ds4_gguf_writer_save(const struct ds4_gguf_writer *w, const char *path)
{
    struct ds4_buf header;
    uint64_t data_offset;
    int fd;

    ds4_buf_init(&header, MAX_BYTES);
    ds4_gguf_writer_header(w, &header);
    data_offset = header.len;
    fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    need(fd >= 0);
    need(write(fd, header.ptr, header.len) == (ssize_t)header.len);
    need(ftruncate(fd, (off_t)(data_offset + w->last_bytes)) == 0);
    close(fd);
    ds4_buf_deinit(&header);
    return data_offset;
}

void ds4_gguf_memory_file(const void *bytes, size_t n, char path[32], int *fd)
{
    *fd = memfd_create("gguf", MFD_CLOEXEC);
    need(*fd >= 0);
    need(n == 0 || write(*fd, bytes, n) == (ssize_t)n);
    snprintf(path, 32, "/proc/self/fd/%d", *fd);
}

/* A growable byte buffer with a hard maximum.
 *
 * The buffer owns its bytes.  Appending past the maximum, or when memory is out, fails and leaves
 * the content as it was; from then on `failed` is set and every later append fails as well, so a
 * writer of many pieces may check once at the end (ds4_buf_check).  ptr is NUL-terminated after any
 * successful append (the NUL is not counted in len). */
#ifndef DS4_COMMON_BUF_H
#define DS4_COMMON_BUF_H

#include "common/err.h"
#include "common/str.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

struct ds4_buf {
    char *ptr;
    size_t len;
    size_t cap;
    size_t max_bytes;
    bool failed;
    bool no_memory; /* why it failed: memory, not the maximum */
};

/* Storage is the caller's; no allocation happens before the first append. */
void ds4_buf_init(struct ds4_buf *buf, size_t max_bytes);
void ds4_buf_deinit(struct ds4_buf *buf);

/* Room for n more bytes at the end; returns where to write, or NULL.  Call ds4_buf_commit after. */
char *ds4_buf_grow(struct ds4_buf *buf, size_t n); /* reserve, where the memory is too small */
static inline char *ds4_buf_reserve(struct ds4_buf *buf, size_t n)
{
    if (buf->failed || n >= buf->cap - buf->len || n > buf->max_bytes - buf->len)
        return ds4_buf_grow(buf, n);
    return buf->ptr + buf->len;
}

static inline void ds4_buf_commit(struct ds4_buf *buf, size_t n)
{
    buf->len += n;
    buf->ptr[buf->len] = '\0';
}

/* 0 or -1 (no err: see ds4_buf_check).  `src` may be NULL when n is 0 and must not point into buf.
 * Inline because every sampled token passes three of them. */
static inline int ds4_buf_append(struct ds4_buf *buf, const void *src, size_t n)
{
    char *dst = ds4_buf_reserve(buf, n);

    if (dst == NULL)
        return -1;
    if (n > 0)
        memcpy(dst, src, n);
    ds4_buf_commit(buf, n);
    return 0;
}

/* memcpy for what is a few bytes more often than not: two moves that may overlap, and no call. */
static inline void ds4_buf_copy_few(char *dst, const char *src, size_t n)
{
    if (n > 2 * sizeof(uint64_t)) {
        memcpy(dst, src, n);
    } else if (n >= sizeof(uint64_t)) {
        uint64_t head, tail;
        memcpy(&head, src, sizeof(head));
        memcpy(&tail, src + n - sizeof(tail), sizeof(tail));
        memcpy(dst, &head, sizeof(head));
        memcpy(dst + n - sizeof(tail), &tail, sizeof(tail));
    } else if (n >= sizeof(uint32_t)) {
        uint32_t head, tail;
        memcpy(&head, src, sizeof(head));
        memcpy(&tail, src + n - sizeof(tail), sizeof(tail));
        memcpy(dst, &head, sizeof(head));
        memcpy(dst + n - sizeof(tail), &tail, sizeof(tail));
    } else if (n > 0) {
        char first = src[0], middle = src[n / 2], last = src[n - 1];
        dst[0] = first;
        dst[n / 2] = middle;
        dst[n - 1] = last;
    }
}

/* The same for texts of a token's size. */
static inline int ds4_buf_append_few(struct ds4_buf *buf, struct ds4_str s)
{
    char *dst = ds4_buf_reserve(buf, s.len);

    if (dst == NULL)
        return -1;
    ds4_buf_copy_few(dst, s.ptr, s.len);
    ds4_buf_commit(buf, s.len);
    return 0;
}

static inline int ds4_buf_append_str(struct ds4_buf *buf, struct ds4_str s)
{
    return ds4_buf_append(buf, s.ptr, s.len);
}

static inline int ds4_buf_append_byte(struct ds4_buf *buf, char byte)
{
    return ds4_buf_append(buf, &byte, 1);
}

int ds4_buf_append_text(struct ds4_buf *buf, const char *text);
int ds4_buf_appendf(struct ds4_buf *buf, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

/* Drops bytes from the front (consume) or the end (truncate); n is clamped to len. */
void ds4_buf_consume(struct ds4_buf *buf, size_t n);
void ds4_buf_truncate(struct ds4_buf *buf, size_t len);
/* Empties the buffer, keeps its memory, clears `failed`. */
static inline void ds4_buf_clear(struct ds4_buf *buf)
{
    buf->failed = false;
    buf->no_memory = false;
    buf->len = 0;
    if (buf->ptr != NULL)
        buf->ptr[0] = '\0';
}

/* 0, or -1 with DS4_E_TOO_LONG (maximum reached) or DS4_E_NOMEM if any append failed. */
int ds4_buf_check(const struct ds4_buf *buf, const char *what, struct ds4_err *err) DS4_MUST_CHECK;

static inline struct ds4_str ds4_buf_view(const struct ds4_buf *buf)
{
    return (struct ds4_str){buf->ptr == NULL ? "" : buf->ptr, buf->len};
}

/* Moves the bytes out (NUL-terminated, free() them) and leaves an empty buffer; NULL if failed.  */
char *ds4_buf_take(struct ds4_buf *buf, size_t *len);

#endif

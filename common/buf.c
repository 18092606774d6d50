/* A growable byte buffer with a hard maximum.
 *
 * Growth doubles, so n appends cost O(total bytes).  The maximum is checked before memory is asked
 * for: a peer that sends without end meets DS4_E_TOO_LONG, not the kernel's memory killer. */
#include "common/buf.h"

#include <stdio.h>
#include <stdlib.h>

#define DS4_BUF_FIRST_BYTES 256

void ds4_buf_init(struct ds4_buf *buf, size_t max_bytes)
{
    *buf = (struct ds4_buf){.max_bytes = max_bytes};
}

void ds4_buf_deinit(struct ds4_buf *buf)
{
    free(buf->ptr);
    *buf = (struct ds4_buf){.max_bytes = buf->max_bytes};
}

char *ds4_buf_grow(struct ds4_buf *buf, size_t n)
{
    size_t need, cap;
    char *grown;

    if (buf->failed || n > buf->max_bytes - buf->len) {
        buf->failed = true;
        return NULL;
    }
    need = buf->len + n + 1;
    if (need <= buf->cap)
        return buf->ptr + buf->len;
    cap = buf->cap == 0 ? DS4_BUF_FIRST_BYTES : buf->cap;
    while (cap < need)
        cap = cap > SIZE_MAX / 2 ? need : cap * 2;
    grown = realloc(buf->ptr, cap);
    if (grown == NULL) {
        buf->failed = true;
        buf->no_memory = true;
        return NULL;
    }
    buf->ptr = grown;
    buf->cap = cap;
    return buf->ptr + buf->len;
}

int ds4_buf_append_text(struct ds4_buf *buf, const char *text)
{
    return ds4_buf_append(buf, text, strlen(text));
}

int ds4_buf_appendf(struct ds4_buf *buf, const char *fmt, ...)
{
    va_list args;
    char *dst;
    int n;

    va_start(args, fmt);
    n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    if (n < 0) {
        buf->failed = true;
        return -1;
    }
    dst = ds4_buf_reserve(buf, (size_t)n);
    if (dst == NULL)
        return -1;
    va_start(args, fmt);
    (void)vsnprintf(dst, (size_t)n + 1, fmt, args);
    va_end(args);
    ds4_buf_commit(buf, (size_t)n);
    return 0;
}

void ds4_buf_consume(struct ds4_buf *buf, size_t n)
{
    if (n >= buf->len) {
        ds4_buf_truncate(buf, 0);
        return;
    }
    memmove(buf->ptr, buf->ptr + n, buf->len - n);
    ds4_buf_truncate(buf, buf->len - n);
}

void ds4_buf_truncate(struct ds4_buf *buf, size_t len)
{
    if (buf->ptr == NULL || len > buf->len)
        return;
    buf->len = len;
    buf->ptr[len] = '\0';
}

int ds4_buf_check(const struct ds4_buf *buf, const char *what, struct ds4_err *err)
{
    if (!buf->failed)
        return 0;
    if (buf->no_memory)
        return ds4_fail(err, DS4_E_NOMEM, "%s: no memory past %zu bytes", what, buf->len);
    return ds4_fail(err, DS4_E_TOO_LONG, "%s: longer than %zu bytes", what, buf->max_bytes);
}

char *ds4_buf_take(struct ds4_buf *buf, size_t *len)
{
    char *taken;

    if (buf->failed || (buf->ptr == NULL && ds4_buf_append(buf, NULL, 0) != 0))
        return NULL;
    taken = buf->ptr;
    if (len != NULL)
        *len = buf->len;
    *buf = (struct ds4_buf){.max_bytes = buf->max_bytes};
    return taken;
}

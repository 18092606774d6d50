/* The bounded cursor behind the GGUF reader.
 *
 * It owns a growing copy of the file's first bytes, read with pread: a file that shrinks meanwhile gives
 * an error and not a signal.  Every read compares n with what is left of the *file*, never position + n
 * with its size, so no length can wrap around. */
#include "common/gguf_cursor.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

#define GROW_BYTES (256u << 10)

int ds4_gguf_cursor_fail(const struct ds4_gguf_cursor *c, struct ds4_err *err, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    ds4_vfail(err, DS4_E_CORRUPT, fmt, args);
    va_end(args);
    if (c->name[0] != '\0')
        return ds4_err_wrap(err, "%s %s", c->unit, c->name);
    return ds4_err_wrap(err, "%s %" PRIu64, c->unit, c->index);
}

void ds4_gguf_cursor_set_name(struct ds4_gguf_cursor *c, struct ds4_str name)
{
    struct ds4_str head = ds4_str_head(name, sizeof(c->name) - 1);

    memcpy(c->name, head.ptr, head.len);
    c->name[head.len] = '\0';
}

static int fill(struct ds4_gguf_cursor *c, size_t want, struct ds4_err *err)
{
    size_t cap = c->cap < GROW_BYTES ? GROW_BYTES : c->cap;
    uint8_t *grown;
    ssize_t got;

    while (cap < want)
        cap *= 2;
    if (cap > c->file_bytes)
        cap = (size_t)c->file_bytes;
    grown = realloc(c->bytes, cap);
    if (grown == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "out of memory for a header of %zu bytes", cap);
    c->bytes = grown;
    c->cap = cap;
    while (c->filled < cap) {
        got = pread(c->fd, c->bytes + c->filled, cap - c->filled, (off_t)c->filled);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return ds4_fail(err, DS4_E_IO, "could not read the header: %s", strerror(errno));
        if (got == 0)
            return ds4_fail(err, DS4_E_IO, "the file shrank while it was read");
        c->filled += (size_t)got;
    }
    return 0;
}

const uint8_t *ds4_gguf_cursor_take(struct ds4_gguf_cursor *c, uint64_t n, const char *what,
                                    struct ds4_err *err)
{
    const uint8_t *at;

    if (n > ds4_gguf_cursor_left(c)) {
        ds4_gguf_cursor_fail(c, err,
                             "truncated at %s: needs %" PRIu64 " bytes, %" PRIu64 " are left", what,
                             n, ds4_gguf_cursor_left(c));
        return NULL;
    }
    if (n > DS4_GGUF_MAX_HEADER_BYTES - c->pos) {
        ds4_gguf_cursor_fail(c, err, "the header exceeds %u bytes at %s", DS4_GGUF_MAX_HEADER_BYTES,
                             what);
        return NULL;
    }
    if (c->pos + n > c->filled && fill(c, c->pos + (size_t)n, err))
        return NULL;
    at = c->bytes + c->pos;
    c->pos += (size_t)n;
    return at;
}

int ds4_gguf_cursor_u32(struct ds4_gguf_cursor *c, const char *what, uint32_t *out,
                        struct ds4_err *err)
{
    const uint8_t *p = ds4_gguf_cursor_take(c, sizeof(*out), what, err);

    if (p == NULL)
        return -1;
    *out = ds4_gguf_load_u32(p);
    return 0;
}

int ds4_gguf_cursor_u64(struct ds4_gguf_cursor *c, const char *what, uint64_t *out,
                        struct ds4_err *err)
{
    const uint8_t *p = ds4_gguf_cursor_take(c, sizeof(*out), what, err);

    if (p == NULL)
        return -1;
    *out = ds4_gguf_load_u64(p);
    return 0;
}

int ds4_gguf_cursor_str(struct ds4_gguf_cursor *c, const char *what, uint64_t max, size_t *at,
                        size_t *len, struct ds4_err *err)
{
    uint64_t n;

    if (ds4_gguf_cursor_u64(c, what, &n, err))
        return -1;
    if (n > ds4_gguf_cursor_left(c))
        return ds4_gguf_cursor_fail(
            c, err, "truncated at %s: its length is %" PRIu64 " bytes, %" PRIu64 " are left", what,
            n, ds4_gguf_cursor_left(c));
    if (n > max)
        return ds4_gguf_cursor_fail(
            c, err, "%s has a length of %" PRIu64 " bytes, the limit is %" PRIu64, what, n, max);
    *at = c->pos;
    *len = (size_t)n;
    return ds4_gguf_cursor_take(c, n, what, err) == NULL ? -1 : 0;
}

/* A bounded cursor over the start of a file; used by common/gguf.c only.
 *
 * unit, index and name say what is being read and go in front of every message. */
#ifndef DS4_COMMON_GGUF_CURSOR_H
#define DS4_COMMON_GGUF_CURSOR_H

#include "common/gguf.h"

struct ds4_gguf_cursor {
    int fd;
    uint64_t file_bytes;
    uint8_t *bytes; /* owned until it moves into struct ds4_gguf */
    size_t filled;
    size_t cap;
    size_t pos;
    const char *unit;                 /* what is being read: "header", "metadata entry", "tensor" */
    uint64_t index;                   /* which of them */
    char name[DS4_TENSOR_NAME_BYTES]; /* its name, once known, perhaps cut */
};

static inline uint64_t ds4_gguf_cursor_left(const struct ds4_gguf_cursor *c)
{
    return c->file_bytes - c->pos;
}

static inline uint32_t ds4_gguf_load_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t ds4_gguf_load_u64(const uint8_t *p)
{
    return (uint64_t)ds4_gguf_load_u32(p) | (uint64_t)ds4_gguf_load_u32(p + 4) << 32;
}

/* DS4_E_CORRUPT with unit and name (or index) before the message; returns -1. */
int ds4_gguf_cursor_fail(const struct ds4_gguf_cursor *c, struct ds4_err *err, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

void ds4_gguf_cursor_set_name(struct ds4_gguf_cursor *c, struct ds4_str name);

/* The next n bytes; the pointer is good until the next call.  NULL if the file ends before or the header
 * grows beyond its limit; `what` names the piece in the message. */
const uint8_t *ds4_gguf_cursor_take(struct ds4_gguf_cursor *c, uint64_t n, const char *what,
                                    struct ds4_err *err) DS4_MUST_CHECK;
int ds4_gguf_cursor_u32(struct ds4_gguf_cursor *c, const char *what, uint32_t *out,
                        struct ds4_err *err) DS4_MUST_CHECK;
int ds4_gguf_cursor_u64(struct ds4_gguf_cursor *c, const char *what, uint64_t *out,
                        struct ds4_err *err) DS4_MUST_CHECK;
/* A string of at most max bytes; *at is the offset of its bytes in the copy. */
int ds4_gguf_cursor_str(struct ds4_gguf_cursor *c, const char *what, uint64_t max, size_t *at,
                        size_t *len, struct ds4_err *err) DS4_MUST_CHECK;

#endif

/* A string view: pointer and length, never owns, may hold NUL bytes, is not NUL-terminated. */
#ifndef DS4_COMMON_STR_H
#define DS4_COMMON_STR_H

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

struct ds4_str {
    const char *ptr;
    size_t len;
};

/* A view of a string literal. */
#define DS4_STR(literal) ((struct ds4_str){(literal), sizeof(literal) - 1})
/* For printf: `"%.*s", DS4_STR_ARG(s)`. */
#define DS4_STR_ARG(s) (int)((s).len > 512 ? 512 : (s).len), (s).ptr

static inline struct ds4_str ds4_str_view(const char *text)
{
    return (struct ds4_str){text, text == NULL ? 0 : strlen(text)};
}

static inline bool ds4_str_equal(struct ds4_str a, struct ds4_str b)
{
    return a.len == b.len && (a.len == 0 || memcmp(a.ptr, b.ptr, a.len) == 0);
}

static inline bool ds4_str_starts(struct ds4_str s, struct ds4_str prefix)
{
    return s.len >= prefix.len && (prefix.len == 0 || memcmp(s.ptr, prefix.ptr, prefix.len) == 0);
}

static inline bool ds4_str_ends(struct ds4_str s, struct ds4_str suffix)
{
    return s.len >= suffix.len &&
           (suffix.len == 0 || memcmp(s.ptr + s.len - suffix.len, suffix.ptr, suffix.len) == 0);
}

/* The view without its first n bytes; empty if n is past the end. */
static inline struct ds4_str ds4_str_skip(struct ds4_str s, size_t n)
{
    if (n > s.len)
        n = s.len;
    return (struct ds4_str){s.ptr + n, s.len - n};
}

/* The first n bytes at most. */
static inline struct ds4_str ds4_str_head(struct ds4_str s, size_t n)
{
    return (struct ds4_str){s.ptr, n < s.len ? n : s.len};
}

/* Offset of the first `needle` in `s` at or after `from`, or -1 cast to size_t (DS4_STR_NONE). */
#define DS4_STR_NONE ((size_t)-1)
static inline size_t ds4_str_find(struct ds4_str s, struct ds4_str needle, size_t from)
{
    const char *hit;

    if (from > s.len || needle.len > s.len - from)
        return DS4_STR_NONE;
    if (needle.len == 0)
        return from;
    if (needle.len > s.len - from) /* also: an empty text may have no pointer */
        return DS4_STR_NONE;
    hit = memmem(s.ptr + from, s.len - from, needle.ptr, needle.len);
    return hit == NULL ? DS4_STR_NONE : (size_t)(hit - s.ptr);
}

/* Without ASCII blanks (space, \t, \n, \r, \v, \f) at both ends. */
static inline struct ds4_str ds4_str_trim(struct ds4_str s)
{
    while (s.len > 0 && (s.ptr[0] == ' ' || (s.ptr[0] >= '\t' && s.ptr[0] <= '\r'))) {
        s.ptr++;
        s.len--;
    }
    while (s.len > 0 &&
           (s.ptr[s.len - 1] == ' ' || (s.ptr[s.len - 1] >= '\t' && s.ptr[s.len - 1] <= '\r')))
        s.len--;
    return s;
}

#endif

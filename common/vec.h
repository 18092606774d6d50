/* Typed growable arrays.
 *
 *   DS4_VEC(int32_t) ids = {0};
 *   if (DS4_VEC_PUSH(&ids, 7) != 0) ...no memory...
 *   for (size_t i = 0; i < ids.len; i++) use(ids.ptr[i]);
 *   DS4_VEC_DEINIT(&ids);
 *
 * The vector owns its elements' storage, not what they point to. */
#ifndef DS4_COMMON_VEC_H
#define DS4_COMMON_VEC_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DS4_VEC(type)                                                                              \
    struct {                                                                                       \
        type *ptr;                                                                                 \
        size_t len;                                                                                \
        size_t cap;                                                                                \
    }

/* A named vector type, so that functions can take it: DS4_VEC_TYPE(ds4_ids, int32_t); declares
 * struct ds4_ids. */
#define DS4_VEC_TYPE(name, type)                                                                   \
    struct name {                                                                                  \
        type *ptr;                                                                                 \
        size_t len;                                                                                \
        size_t cap;                                                                                \
    }

/* Room for `want` elements in all; 0 or -1.  Moves *ptr. */
static inline int ds4_vec_grow(void **ptr, size_t *cap, size_t want, size_t size)
{
    size_t next = *cap == 0 ? 8 : *cap;
    void *grown;

    if (want <= *cap)
        return 0;
    while (next < want) {
        if (next > SIZE_MAX / 2)
            return -1;
        next *= 2;
    }
    if (next > SIZE_MAX / size)
        return -1;
    grown = realloc(*ptr, next * size);
    if (grown == NULL)
        return -1;
    *ptr = grown;
    *cap = next;
    return 0;
}

#define DS4_VEC_RESERVE(v, n) ds4_vec_grow((void **)&(v)->ptr, &(v)->cap, (n), sizeof(*(v)->ptr))
#define DS4_VEC_PUSH(v, ...)                                                                       \
    (DS4_VEC_RESERVE((v), (v)->len + 1) != 0 ? -1 : ((v)->ptr[(v)->len++] = (__VA_ARGS__), 0))
#define DS4_VEC_POP(v)         ((v)->ptr[--(v)->len])
#define DS4_VEC_TRUNCATE(v, n) ((v)->len = (n))
#define DS4_VEC_DEINIT(v)      (free((v)->ptr), (v)->ptr = NULL, (v)->len = (v)->cap = 0)

#endif

/* A bump allocator: one per request, one per step.  The arena owns everything taken from it; nothing
 * is freed alone.  A hard maximum bounds what a request may take. */
#ifndef DS4_COMMON_ARENA_H
#define DS4_COMMON_ARENA_H

#include "common/str.h"

#include <stddef.h>

struct ds4_arena_chunk;

struct ds4_arena {
    struct ds4_arena_chunk *chunks; /* newest first */
    size_t used_bytes;              /* over all chunks */
    size_t max_bytes;
};

struct ds4_arena_mark {
    struct ds4_arena_chunk *chunk;
    size_t chunk_used;
    size_t used_bytes;
};

void ds4_arena_init(struct ds4_arena *arena, size_t max_bytes);
void ds4_arena_deinit(struct ds4_arena *arena);

/* n zeroed bytes aligned to 16, or NULL when the maximum or memory is reached. */
void *ds4_arena_take(struct ds4_arena *arena, size_t n);
/* count * size with an overflow check. */
void *ds4_arena_take_array(struct ds4_arena *arena, size_t count, size_t size);
/* A NUL-terminated copy; .ptr is NULL on failure. */
struct ds4_str ds4_arena_copy(struct ds4_arena *arena, struct ds4_str s);

/* mark() remembers the fill level, reset() frees everything taken since. */
struct ds4_arena_mark ds4_arena_mark(const struct ds4_arena *arena);
void ds4_arena_reset(struct ds4_arena *arena, struct ds4_arena_mark mark);

#endif

/* A bump allocator over a list of chunks.
 *
 * A chunk is at least DS4_ARENA_CHUNK_BYTES, or as large as the request that opened it.  Reset frees
 * whole chunks newer than the mark, so a step's arena settles on the chunks its largest step needs
 * only within that step; the first chunk stays. */
#include "common/arena.h"

#include <stdalign.h>
#include <stdint.h>
#include <stdlib.h>

#define DS4_ARENA_CHUNK_BYTES ((size_t)16384)
#define DS4_ARENA_ALIGN       ((size_t)16)

struct ds4_arena_chunk {
    struct ds4_arena_chunk *older;
    size_t used;
    size_t cap;
    alignas(16) unsigned char bytes[];
};

void ds4_arena_init(struct ds4_arena *arena, size_t max_bytes)
{
    *arena = (struct ds4_arena){.max_bytes = max_bytes};
}

void ds4_arena_deinit(struct ds4_arena *arena)
{
    ds4_arena_reset(arena, (struct ds4_arena_mark){0});
}

void *ds4_arena_take(struct ds4_arena *arena, size_t n)
{
    struct ds4_arena_chunk *chunk = arena->chunks;
    size_t need, cap;
    void *taken;

    if (n > arena->max_bytes || arena->max_bytes - n < arena->used_bytes)
        return NULL;
    need = (n + DS4_ARENA_ALIGN - 1) / DS4_ARENA_ALIGN * DS4_ARENA_ALIGN;
    if (chunk == NULL || chunk->cap - chunk->used < need) {
        cap = need > DS4_ARENA_CHUNK_BYTES ? need : DS4_ARENA_CHUNK_BYTES;
        chunk = malloc(sizeof(*chunk) + cap);
        if (chunk == NULL)
            return NULL;
        *chunk = (struct ds4_arena_chunk){.older = arena->chunks, .cap = cap};
        arena->chunks = chunk;
    }
    taken = chunk->bytes + chunk->used;
    chunk->used += need;
    arena->used_bytes += need;
    memset(taken, 0, need);
    return taken;
}

void *ds4_arena_take_array(struct ds4_arena *arena, size_t count, size_t size)
{
    size_t n;

    if (__builtin_mul_overflow(count, size, &n))
        return NULL;
    return ds4_arena_take(arena, n);
}

struct ds4_str ds4_arena_copy(struct ds4_arena *arena, struct ds4_str s)
{
    char *copy = s.len == SIZE_MAX ? NULL : ds4_arena_take(arena, s.len + 1);

    if (copy == NULL)
        return (struct ds4_str){NULL, 0};
    if (s.len > 0)
        memcpy(copy, s.ptr, s.len);
    return (struct ds4_str){copy, s.len};
}

struct ds4_arena_mark ds4_arena_mark(const struct ds4_arena *arena)
{
    return (struct ds4_arena_mark){arena->chunks, arena->chunks == NULL ? 0 : arena->chunks->used,
                                   arena->used_bytes};
}

void ds4_arena_reset(struct ds4_arena *arena, struct ds4_arena_mark mark)
{
    struct ds4_arena_chunk *chunk;

    while (arena->chunks != mark.chunk) {
        chunk = arena->chunks;
        arena->chunks = chunk->older;
        free(chunk);
    }
    if (arena->chunks != NULL)
        arena->chunks->used = mark.chunk_used;
    arena->used_bytes = mark.used_bytes;
}

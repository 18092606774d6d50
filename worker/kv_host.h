/* Host memory for points and stagings: a fixed arena given away in units of one size.
 *
 * Anything is a chain of units, so memory cannot fragment: what the router counts (bytes rounded up to
 * units, proto/point.h) is exactly what fits, and below the budget of the generation nothing fails.
 * Nothing is allocated after init.  Thread-safe: the step thread and the disk thread both take and give. */
#ifndef DS4_WORKER_KV_HOST_H
#define DS4_WORKER_KV_HOST_H

#include "common/err.h"

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

/* A chain of units that holds `bytes` bytes; n_unit 0 holds nothing and is all zero. */
struct ds4_kv_blob {
    int32_t first;
    int32_t n_unit;
    size_t bytes;
};

struct ds4_kv_host {
    uint8_t *base; /* [n_unit, unit_bytes], borrowed */
    size_t unit_bytes;
    int32_t n_unit;
    int32_t *next;        /* [n_unit], owned: chain of a blob, or of the free units */
    pthread_mutex_t lock; /* guards the members below, and `next` of free units */
    int32_t first_free;   /* of units that were used before; -1: none */
    int32_t n_fresh;      /* units from there on were never used, nor was their `next` */
    int32_t n_used;
    int32_t n_limit; /* units of the generation's budget, <= n_unit */
};

/* The arena at `base`, which must outlive *host.  DS4_E_NOMEM for the chain table. */
int ds4_kv_host_init(struct ds4_kv_host *host, void *base, size_t unit_bytes, int32_t n_unit,
                     struct ds4_err *err) DS4_MUST_CHECK;
void ds4_kv_host_deinit(struct ds4_kv_host *host);

/* Everything is free, whatever was held; at most `budget_bytes` may be taken from now on. */
void ds4_kv_host_reset(struct ds4_kv_host *host, int64_t budget_bytes);

/* DS4_E_NOMEM, with need and free, if the budget does not allow it. */
int ds4_kv_host_take(struct ds4_kv_host *host, size_t bytes, struct ds4_kv_blob *blob,
                     struct ds4_err *err) DS4_MUST_CHECK;
/* Gives the units back and clears *blob. */
void ds4_kv_host_give(struct ds4_kv_host *host, struct ds4_kv_blob *blob);

int64_t ds4_kv_host_used_bytes(struct ds4_kv_host *host);

/* Walks a blob in order: memory from `at` on is contiguous for `left` bytes. */
struct ds4_kv_cursor {
    const struct ds4_kv_host *host;
    int32_t unit;
    size_t used; /* bytes of the unit behind the cursor */
    size_t left; /* bytes of the blob ahead */
};
/* The cursor at `offset` <= blob->bytes. */
struct ds4_kv_cursor ds4_kv_cursor_at(const struct ds4_kv_host *host,
                                      const struct ds4_kv_blob *blob, size_t offset);
/* The next piece of at most `max` bytes; *n is its length, 0 at the end of the blob. */
uint8_t *ds4_kv_cursor_next(struct ds4_kv_cursor *cursor, size_t max, size_t *n);

#endif

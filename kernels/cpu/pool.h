/* Threads that share the work of one operation.
 *
 * A pool of 1 has no threads: the caller does everything.  Work is a count of items; which thread does
 * which item is open, so an item may write only its own part of the result. */
#ifndef DS4_KERNELS_CPU_POOL_H
#define DS4_KERNELS_CPU_POOL_H

#include "common/err.h"

#include <stdint.h>

struct ds4_pool;

/* thread: 0 .. n_thread - 1, for per-thread scratch; 0 is the caller. */
typedef void (*ds4_pool_fn)(void *ctx, int32_t item, int32_t thread);

/* n_thread counts the caller.  NULL with DS4_E_NOMEM or DS4_E_UNAVAILABLE (no more threads). */
struct ds4_pool *ds4_pool_new(int32_t n_thread, struct ds4_err *err) DS4_MUST_CHECK;
void ds4_pool_free(struct ds4_pool *pool);

int32_t ds4_pool_threads(const struct ds4_pool *pool);

/* Calls fn for every item in 0 .. n_item - 1 and returns when all are done.  One caller at a time; fn
 * must not call it again. */
void ds4_pool_run(struct ds4_pool *pool, int32_t n_item, ds4_pool_fn fn, void *ctx);

#endif

/* The number of the newest generation, kept in a small file: a router that comes back must not use one
 * again, whatever its clock says (kv-cache.md 5.3). */
#ifndef DS4_ROUTER_GENERATION_H
#define DS4_ROUTER_GENERATION_H

#include "common/err.h"

#include <stdint.h>

/* *generation is what the file says, 0 if there is none.  DS4_E_CORRUPT if it says something else than a
 * number, DS4_E_IO. */
int ds4_generation_load(const char *path, uint32_t *generation, struct ds4_err *err) DS4_MUST_CHECK;

/* On 0 the number is on disk: written beside, synced, renamed. */
int ds4_generation_store(const char *path, uint32_t generation, struct ds4_err *err) DS4_MUST_CHECK;

#endif

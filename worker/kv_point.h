/* Points: what a sequence needs to go on at a position, kept in host memory under an id of the router.
 *
 * A point and the compressed rows below its position are the whole state of [0, pos) (kv_layout.h lists
 * the sections).  Saving gathers the ring rows into one device area and queues copies to host units,
 * behind the step that wrote them and without waiting; installing goes the other way.  One thread (the
 * step thread) calls everything here; a point's host memory may be read by the disk thread after
 * ds4_kv_store_settle, as long as the router keeps it. */
#ifndef DS4_WORKER_KV_POINT_H
#define DS4_WORKER_KV_POINT_H

#include "common/err.h"
#include "kernels/backend.h"
#include "worker/kv_cache.h"
#include "worker/kv_host.h"
#include "worker/kv_ids.h"
#include "worker/kv_layout.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ds4_kv_point {
    int32_t pos;
    struct ds4_kv_blob blob; /* sections of ds4_kv_point_sections, without gaps */
};

struct ds4_kv_store {
    const struct ds4_backend *backend; /* borrowed, as dev, kv and area */
    struct ds4_device *dev;
    struct ds4_kv *kv;
    uint8_t *area; /* device, ds4_kv_store_area_bytes */
    struct ds4_point_shape shape;
    struct ds4_kv_host host;
    struct ds4_kv_ids ids;      /* id -> index into point */
    struct ds4_kv_point *point; /* [n_unit], owned */
    int32_t *free_point;        /* stack of indices that were used before, owned */
    int32_t n_free;
    int32_t n_fresh;                /* indices from there on were never used */
    struct ds4_kv_section *section; /* [DS4_KV_POINT_SECTIONS * n_layer], owned scratch */
    bool in_flight;                 /* copies from or to host units are queued */
};

/* Device bytes of the area in which points are gathered. */
size_t ds4_kv_store_area_bytes(const struct ds4_kv_shape *shape);

/* `arena` (borrowed) has n_unit units of ds4_kv_unit_bytes.  DS4_E_NOMEM for the host tables,
 * DS4_E_INVALID as ds4_kv_point_shape. */
int ds4_kv_store_init(struct ds4_kv_store *store, const struct ds4_backend *backend,
                      struct ds4_device *dev, struct ds4_kv *kv, void *area, void *arena,
                      int32_t n_unit, struct ds4_err *err) DS4_MUST_CHECK;
void ds4_kv_store_deinit(struct ds4_kv_store *store);
/* A new generation: no points, and a budget for them. */
void ds4_kv_store_reset(struct ds4_kv_store *store, int64_t budget_bytes);

/* Waits for queued copies: host units may be read, written or given away by anyone after. */
void ds4_kv_store_settle(struct ds4_kv_store *store);

/* Keeps the state of `slot` at pos under `id`.  DS4_E_PROTOCOL: pos out of reach (ds4_kv_reaches) or the
 * id in use; DS4_E_NOMEM above the budget.  Nothing is kept after -1. */
int ds4_kv_point_save(struct ds4_kv_store *store, int32_t slot, int32_t pos, uint64_t id,
                      struct ds4_err *err) DS4_MUST_CHECK;
/* The pieces of a save, for what gathers elsewhere (kv_keep.h): memory and id for a point at pos; its bytes,
 * queued from `area` on the device; the first `bytes` bytes of ring rows of positions [from, from + n),
 * packed from `at` on, returning the next free byte. */
int ds4_kv_point_take(struct ds4_kv_store *store, int32_t pos, uint64_t id,
                      struct ds4_err *err) DS4_MUST_CHECK;
void ds4_kv_point_fetch(struct ds4_kv_store *store, uint64_t id, uint8_t *area);
uint8_t *ds4_kv_gather_rows(struct ds4_kv_store *store, const struct ds4_ring *ring, int32_t slot,
                            int32_t from, int32_t n, size_t bytes, uint8_t *at);
/* DS4_E_PROTOCOL if there is no such point. */
int ds4_kv_point_drop(struct ds4_kv_store *store, uint64_t id, struct ds4_err *err) DS4_MUST_CHECK;
/* Fills the rings of `slot` and lets it stand at `pos`, which must be the point's own.  DS4_E_PROTOCOL. */
int ds4_kv_point_install(struct ds4_kv_store *store, int32_t slot, int32_t pos, uint64_t id,
                         struct ds4_err *err) DS4_MUST_CHECK;

/* Lets `slot` stand at from_pos with rings of zeros, to be replayed up to pos (ds4_kv_replay). */
int ds4_kv_point_replay(struct ds4_kv_store *store, int32_t slot, int32_t from_pos, int32_t pos,
                        struct ds4_err *err) DS4_MUST_CHECK;

/* The point of an id, or NULL. */
struct ds4_kv_point *ds4_kv_point_find(struct ds4_kv_store *store, uint64_t id);
/* Takes a filled blob as the point `id`.  On -1 (as save) the blob stays the caller's. */
int ds4_kv_point_adopt(struct ds4_kv_store *store, uint64_t id, int32_t pos,
                       struct ds4_kv_blob *blob, struct ds4_err *err) DS4_MUST_CHECK;

/* Copies all rows of a block, every layer, on the device.  DS4_E_PROTOCOL for an id outside the
 * generation's blocks, or a `dst` that a sequence's table names (its rows would change under it). */
int ds4_kv_block_copy(struct ds4_kv_store *store, int32_t src, int32_t dst,
                      struct ds4_err *err) DS4_MUST_CHECK;

#endif

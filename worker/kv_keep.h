/* Points inside a chunk: the state at multiples of DS4_ANCHOR_TOK that a long entry passes by.
 *
 * The rings reach a hot window back from where a step ends, so a chunk of 512 tokens leaves one anchor there
 * and three places whose rows are gone when it is over.  Those are gathered while the layers run: rows of
 * the step from its buffers, older ones from the rings before the step changes them.  The bytes are those of
 * a point saved at the same place by a chunk that ended there.
 *
 *   begin -> add (each place) -> per layer: inputs (compressor), inputs (indexer), window -> save (each)
 *
 * Step thread only.  A step that has places must run its operations one by one: nothing recorded, nothing
 * beside. */
#ifndef DS4_WORKER_KV_KEEP_H
#define DS4_WORKER_KV_KEEP_H

#include "common/err.h"
#include "kernels/backend.h"
#include "proto/point.h"
#include "worker/kv_point.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ds4_kv_kept {
    uint64_t id;
    int32_t slot;
    int32_t pos;
    int32_t base_pos;  /* of its entry: earlier rows are in the rings */
    int32_t first_row; /* of its entry in the step */
    uint8_t *area;
    uint8_t *at; /* where the sections of the running layer begin */
};

struct ds4_kv_keeper {
    struct ds4_kv_store *store; /* borrowed */
    uint8_t *area;              /* device, ds4_kv_keeper_bytes, borrowed */
    size_t area_bytes;          /* of one place */
    int32_t n_area;
    int32_t n;
    struct ds4_kv_kept kept[DS4_MAX_INNER_POINTS];
};

/* Device bytes for all places that one step of max_step_tok rows may have. */
size_t ds4_kv_keeper_bytes(const struct ds4_kv_shape *shape, int32_t max_step_tok);
void ds4_kv_keeper_init(struct ds4_kv_keeper *keeper, struct ds4_kv_store *store, void *area,
                        int32_t max_step_tok);

/* A new step: no places yet. */
void ds4_kv_keeper_begin(struct ds4_kv_keeper *keeper);
/* Point `id` is to be kept at `pos`, inside of the rows of `entry`.  DS4_E_PROTOCOL: no anchor's place, not
 * inside, or more places than areas. */
int ds4_kv_keeper_add(struct ds4_kv_keeper *keeper, const struct ds4_batch_entry *entry,
                      int32_t pos, uint64_t id, struct ds4_err *err) DS4_MUST_CHECK;

/* k, g [n_tok, c * d] f32 of layer l's compressor (or of its indexer's), before the backend's compress.
 * ape [ratio, c * d]. */
void ds4_kv_keeper_inputs(struct ds4_kv_keeper *keeper, int32_t l, bool index, struct ds4_tensor k,
                          struct ds4_tensor g, const struct ds4_weight *ape);
/* kv [n_tok, d_head] f32 as layer l's ring is to take it, before it does. */
void ds4_kv_keeper_window(struct ds4_kv_keeper *keeper, int32_t l, struct ds4_tensor kv);

/* Was `id` gathered in this step? */
bool ds4_kv_keeper_has(const struct ds4_kv_keeper *keeper, uint64_t id);
/* Makes it a point, after all layers.  Errors as ds4_kv_point_save. */
int ds4_kv_keeper_save(struct ds4_kv_keeper *keeper, uint64_t id,
                       struct ds4_err *err) DS4_MUST_CHECK;

#endif

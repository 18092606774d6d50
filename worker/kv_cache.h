/* The sequence state of one stage: rings, paged rows, and who may write them.
 *
 * Per layer, by the layer's ratio alone:
 *   window      ring of the last rows (key = value), every layer
 *   comp_k/_g   rings of compressor inputs in f32, layers with a ratio
 *   index_k/_g  the same for the indexer's own compressor, layers with an indexer
 *   rows        paged compressed rows;  index_rows  paged indexer keys
 *
 * A ring holds what the next token needs plus the hot window: the row of position p is at p % cap, so
 * there is no search and nothing to free.  That is what makes truncation free: the state after m
 * tokens is still there as long as hi - m <= hot_tok, hi being one past the highest position ever
 * written since the sequence started (it never falls; an abandoned branch has overwritten older rows).
 * Compressed rows need nothing: visibility is computed from the query's position, and a stale row is
 * rewritten before it becomes visible again.
 *
 * A write without a lease cannot be expressed: kernels write only for entries of the step's batch,
 * and only ds4_kv_append makes an active entry. */
#ifndef DS4_WORKER_KV_CACHE_H
#define DS4_WORKER_KV_CACHE_H

#include "common/err.h"
#include "kernels/backend.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DS4_HOT_WINDOW_TOK 120 /* with it every ring of Flash is a power of two: 256, 128, 256 */

/* What the cache of a layer is made of. */
struct ds4_kv_layer_shape {
    int32_t ratio; /* 0: window only */
    bool overlap;  /* blocks look back one block */
    bool indexer;
};

struct ds4_kv_shape {
    int32_t n_layer;
    const struct ds4_kv_layer_shape *layer; /* [n_layer], borrowed for the life of the cache */
    int32_t d_head;
    int32_t d_rope;
    int32_t d_index;
    int32_t window_tok;
    int32_t hot_tok;
    enum ds4_row_format row_format;
    enum ds4_row_format index_format;
    int32_t n_slot;
    int32_t n_block;
    int32_t table_blocks; /* longest block table of a sequence */
};

struct ds4_kv_layer {
    struct ds4_ring window; /* rows of d_head */
    struct ds4_ring comp_k; /* rows of c * d_head f32, c = 2 with overlap */
    struct ds4_ring comp_g;
    struct ds4_ring index_k; /* rows of c * d_index f32 */
    struct ds4_ring index_g;
    struct ds4_pages rows;       /* rows of d_head */
    struct ds4_pages index_rows; /* rows of d_index */
};

struct ds4_kv_slot {
    bool in_use;
    uint64_t seq;
    uint32_t epoch;
    int32_t pos;         /* tokens whose state exists */
    int32_t hi;          /* one past the highest position written since install_pos */
    int32_t install_pos; /* where the rings' history begins; 0 = cold start */
    int32_t seal_tok;    /* compressed rows closed below are there already: a replay's; else 0 */
    bool fresh;          /* opened, no entry since: a point may be installed */
    int32_t n_block;
    int32_t *block; /* [table_blocks] */
};

/* The right to write positions < cap_tok of a slot, as the step grants it.  The table takes n_block
 * ids from index first_block on and ends there; n_block 0 leaves it alone. */
struct ds4_kv_lease {
    uint64_t seq;
    int32_t slot;
    uint32_t epoch;
    int32_t cap_tok;
    int32_t first_block;
    int32_t n_block;
    const int32_t *block;
};

struct ds4_kv {
    struct ds4_kv_shape shape;
    struct ds4_kv_layer *layer; /* [n_layer], owned */
    struct ds4_kv_slot *slot;   /* [shape.n_slot], owned */
    int32_t *tables;            /* [n_slot, table_blocks], owned */
    int32_t *users;             /* [n_block] entries of tables that name the block, owned */
    int32_t n_slot;             /* of the generation, <= shape.n_slot */
    int32_t n_block;            /* of the generation, <= shape.n_block */
};

/* DS4_E_INVALID if a ratio does not divide DS4_BLOCK_TOK or a row format does not fit the widths. */
int ds4_kv_check_shape(const struct ds4_kv_shape *shape, struct ds4_err *err) DS4_MUST_CHECK;

/* Geometry of one layer, without memory: members the layer does not have stay zero. */
struct ds4_kv_layer ds4_kv_layer_geometry(const struct ds4_kv_shape *shape, int32_t layer);

/* Device bytes of all rings and of all pages; of one block over all layers. */
size_t ds4_kv_rings_bytes(const struct ds4_kv_shape *shape);
size_t ds4_kv_pages_bytes(const struct ds4_kv_shape *shape);
size_t ds4_kv_block_bytes(const struct ds4_kv_shape *shape);

/* Carves the layers' rings and pages out of two device areas of those sizes (borrowed).  Owns its host tables.  DS4_E_NOMEM. */
int ds4_kv_init(struct ds4_kv *kv, const struct ds4_kv_shape *shape, void *rings, void *pages,
                struct ds4_err *err) DS4_MUST_CHECK;
void ds4_kv_deinit(struct ds4_kv *kv);

/* A new generation: every slot free.  n_slot and n_block must not exceed the shape's. */
void ds4_kv_reset(struct ds4_kv *kv, int32_t n_slot, int32_t n_block);

/* Binds a slot and empties its block table.  A free one starts at position 0; one in use keeps its rows
 * under the new sequence and epoch, and the new lease must name the blocks they lie in.
 * DS4_E_PROTOCOL: no such slot, or the epoch is not newer than that in use. */
int ds4_kv_open(struct ds4_kv *kv, int32_t slot, uint64_t seq, uint32_t epoch,
                struct ds4_err *err) DS4_MUST_CHECK;

/* The slot, which is in use, names no blocks any more: they may be somebody else's.  Its rings stay. */
void ds4_kv_park(struct ds4_kv *kv, int32_t slot);
/* Frees a slot in use. */
int ds4_kv_close(struct ds4_kv *kv, int32_t slot, struct ds4_err *err) DS4_MUST_CHECK;

/* The slot a lease names, after checking that it is in use by that sequence and epoch. */
struct ds4_kv_slot *ds4_kv_find(struct ds4_kv *kv, const struct ds4_kv_lease *lease,
                                struct ds4_err *err);

/* A slot that was opened and has seen no entry since stands at `pos`: its rings were filled for it
 * (worker/kv_point.h).  DS4_E_PROTOCOL if it has seen one. */
int ds4_kv_install(struct ds4_kv_slot *slot, int32_t pos, struct ds4_err *err) DS4_MUST_CHECK;

/* The same at from_pos, before rows that exist up to `pos`: entries fill the rings, the rows stay, and from
 * `pos` on everything is as after an install there.  The rings must hold something finite. */
int ds4_kv_replay(struct ds4_kv_slot *slot, int32_t from_pos, int32_t pos,
                  struct ds4_err *err) DS4_MUST_CHECK;

/* True if the rings still hold what the next token at m needs: install_pos <= m <= pos and hi - m <= hot
 * window.  Invariant I8; truncation, and saving a point, ask for nothing else. */
bool ds4_kv_reaches(const struct ds4_kv *kv, const struct ds4_kv_slot *slot, int32_t m);

/* Makes the state that of m processed tokens.  Legal for m = 0, and for install_pos <= m <= pos with
 * hi - m <= hot_tok; DS4_E_PROTOCOL otherwise. */
int ds4_kv_truncate(struct ds4_kv *kv, struct ds4_kv_slot *slot, int32_t m,
                    struct ds4_err *err) DS4_MUST_CHECK;

/* Takes the block table of the lease, truncates to base_pos, checks that rows [base_pos, base_pos +
 * n_tok) lie below cap_tok and cap_tok within the table, and advances the sequence.  Fills what
 * kernels may write: *entry, all members but first_row; it borrows the slot's table.
 * A block that another table names as well is not written (invariant I5: the router copies first).
 * DS4_E_PROTOCOL names what is wrong; the slot is then undefined. */
int ds4_kv_append(struct ds4_kv *kv, const struct ds4_kv_lease *lease, int32_t base_pos,
                  int32_t n_tok, struct ds4_batch_entry *entry, struct ds4_err *err) DS4_MUST_CHECK;

/* An entry of the same shape that writes nothing and moves nothing; the lease's table is taken all the
 * same, because the router counts it as sent. */
int ds4_kv_skip(struct ds4_kv *kv, const struct ds4_kv_lease *lease, int32_t n_tok,
                struct ds4_batch_entry *entry, struct ds4_err *err) DS4_MUST_CHECK;

#endif

/* Sequence state of one stage (house list, step 9): where rows live, and the checks that stand before
 * every write.
 *
 * The idea is the over-sized, position-addressed ring: capacity = history the next token needs + hot
 * window, rounded up to a power of two.  Undoing n - m <= hot tokens is then setting a number, any
 * number of times, and bit-exact, which neither whole-state snapshots nor single-use rollback planes
 * give (upstream llama.cpp #25452, #25588).  The proof needs three facts kept here: slot of p is
 * p % cap, hi never falls, install_pos bounds the history.
 *
 * Invariant: for every slot in use 0 <= install_pos <= pos <= hi (pos < install_pos during a replay, when
 * there is no state to cut back to) and every table entry is < n_block;
 * users[b] is the number of table entries that are b. */
#include "worker/kv_cache.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define AREA_ALIGN 256 /* as the backend's own allocations */

static size_t align_up(size_t n)
{
    return (n + AREA_ALIGN - 1) / AREA_ALIGN * AREA_ALIGN;
}

/* The smallest power of two that holds need_tok rows of history beside the hot window. */
static int32_t ring_cap(const struct ds4_kv_shape *shape, int32_t need_tok)
{
    int32_t cap = 1;

    while (cap < need_tok + shape->hot_tok)
        cap *= 2;
    return cap;
}

static struct ds4_ring ring_of(const struct ds4_kv_shape *shape, int32_t need_tok, int32_t d,
                               int32_t d_rope, enum ds4_row_format format)
{
    struct ds4_ring ring = {.n_slot = shape->n_slot,
                            .cap = ring_cap(shape, need_tok),
                            .d = d,
                            .d_rope = d_rope,
                            .format = format,
                            .row_bytes = ds4_row_bytes(format, d, d_rope)};
    return ring;
}

static struct ds4_pages pages_of(const struct ds4_kv_shape *shape, int32_t ratio, int32_t d,
                                 enum ds4_row_format format)
{
    struct ds4_pages pages = {.n_block = shape->n_block,
                              .rows_per_block = DS4_BLOCK_TOK / ratio,
                              .d = d,
                              .d_rope = shape->d_rope,
                              .format = format,
                              .row_bytes = ds4_row_bytes(format, d, shape->d_rope)};
    return pages;
}

struct ds4_kv_layer ds4_kv_layer_geometry(const struct ds4_kv_shape *shape, int32_t l)
{
    const struct ds4_kv_layer_shape *ls = &shape->layer[l];
    struct ds4_kv_layer layer = {0};
    int32_t width, need_tok;

    layer.window =
        ring_of(shape, shape->window_tok - 1, shape->d_head, shape->d_rope, shape->row_format);
    if (ls->ratio == 0)
        return layer;
    width = ls->overlap ? 2 : 1;
    need_tok = ls->overlap ? 2 * ls->ratio - 1 : ls->ratio - 1;
    layer.comp_k = ring_of(shape, need_tok, width * shape->d_head, 0, DS4_ROW_F32);
    layer.comp_g = layer.comp_k;
    layer.rows = pages_of(shape, ls->ratio, shape->d_head, shape->row_format);
    if (ls->indexer) {
        layer.index_k = ring_of(shape, need_tok, width * shape->d_index, 0, DS4_ROW_F32);
        layer.index_g = layer.index_k;
        layer.index_rows = pages_of(shape, ls->ratio, shape->d_index, shape->index_format);
    }
    return layer;
}

static size_t ring_bytes(const struct ds4_ring *ring)
{
    return align_up((size_t)ring->n_slot * (size_t)ring->cap * ring->row_bytes);
}

static size_t pages_block_bytes(const struct ds4_pages *pages)
{
    return (size_t)pages->rows_per_block * pages->row_bytes;
}

static size_t pages_bytes(const struct ds4_pages *pages)
{
    return align_up((size_t)pages->n_block * pages_block_bytes(pages));
}

size_t ds4_kv_rings_bytes(const struct ds4_kv_shape *shape)
{
    size_t bytes = 0;

    for (int32_t l = 0; l < shape->n_layer; l++) {
        struct ds4_kv_layer layer = ds4_kv_layer_geometry(shape, l);

        bytes += ring_bytes(&layer.window);
        bytes += ring_bytes(&layer.comp_k) + ring_bytes(&layer.comp_g);
        bytes += ring_bytes(&layer.index_k) + ring_bytes(&layer.index_g);
    }
    return bytes;
}

size_t ds4_kv_pages_bytes(const struct ds4_kv_shape *shape)
{
    size_t bytes = 0;

    for (int32_t l = 0; l < shape->n_layer; l++) {
        struct ds4_kv_layer layer = ds4_kv_layer_geometry(shape, l);

        bytes += pages_bytes(&layer.rows) + pages_bytes(&layer.index_rows);
    }
    return bytes;
}

size_t ds4_kv_block_bytes(const struct ds4_kv_shape *shape)
{
    size_t bytes = 0;

    for (int32_t l = 0; l < shape->n_layer; l++) {
        struct ds4_kv_layer layer = ds4_kv_layer_geometry(shape, l);

        bytes += pages_block_bytes(&layer.rows) + pages_block_bytes(&layer.index_rows);
    }
    return bytes;
}

int ds4_kv_check_shape(const struct ds4_kv_shape *shape, struct ds4_err *err)
{
    if (shape->hot_tok < 1 || shape->hot_tok > 65536)
        return ds4_fail(err, DS4_E_INVALID, "hot window of %d tokens, must be in [1, 65536]",
                        shape->hot_tok);
    if (shape->index_format == DS4_ROW_FP4 &&
        (shape->d_index % 32 != 0 || (shape->d_index & (shape->d_index - 1)) != 0))
        return ds4_fail(err, DS4_E_INVALID,
                        "indexer width %d cannot be stored as FP4: not a power of two above 31",
                        shape->d_index);
    if (shape->row_format == DS4_ROW_FP8 && shape->d_head <= shape->d_rope)
        return ds4_fail(err, DS4_E_INVALID, "head width %d has no part without rotation",
                        shape->d_head);
    for (int32_t l = 0; l < shape->n_layer; l++) {
        int32_t ratio = shape->layer[l].ratio;

        if (ratio < 0 || (ratio > 0 && DS4_BLOCK_TOK % ratio != 0))
            return ds4_fail(err, DS4_E_INVALID, "compress ratio %d does not divide a block of %d",
                            ratio, DS4_BLOCK_TOK);
    }
    return 0;
}

static void carve_ring(struct ds4_ring *ring, uint8_t **at)
{
    ring->data = *at;
    *at += ring_bytes(ring);
}

static void carve_pages(struct ds4_pages *pages, uint8_t **at)
{
    pages->data = *at;
    *at += pages_bytes(pages);
}

int ds4_kv_init(struct ds4_kv *kv, const struct ds4_kv_shape *shape, void *rings, void *pages,
                struct ds4_err *err)
{
    uint8_t *ring_at = rings;
    uint8_t *page_at = pages;

    memset(kv, 0, sizeof(*kv));
    kv->shape = *shape;
    kv->layer = calloc((size_t)shape->n_layer, sizeof(*kv->layer));
    kv->slot = calloc((size_t)shape->n_slot, sizeof(*kv->slot));
    kv->tables = calloc((size_t)shape->n_slot * (size_t)shape->table_blocks, sizeof(*kv->tables));
    kv->users = calloc(shape->n_block > 0 ? (size_t)shape->n_block : 1, sizeof(*kv->users));
    if (kv->layer == NULL || kv->slot == NULL || kv->tables == NULL || kv->users == NULL) {
        ds4_kv_deinit(kv);
        return ds4_fail(err, DS4_E_NOMEM, "no memory for block tables of %d slots", shape->n_slot);
    }
    for (int32_t l = 0; l < shape->n_layer; l++) {
        struct ds4_kv_layer *layer = &kv->layer[l];

        *layer = ds4_kv_layer_geometry(shape, l);
        carve_ring(&layer->window, &ring_at);
        if (shape->layer[l].ratio > 0) {
            carve_ring(&layer->comp_k, &ring_at);
            carve_ring(&layer->comp_g, &ring_at);
            carve_pages(&layer->rows, &page_at);
        }
        if (shape->layer[l].indexer) {
            carve_ring(&layer->index_k, &ring_at);
            carve_ring(&layer->index_g, &ring_at);
            carve_pages(&layer->index_rows, &page_at);
        }
    }
    for (int32_t s = 0; s < shape->n_slot; s++)
        kv->slot[s].block = kv->tables + (size_t)s * (size_t)shape->table_blocks;
    ds4_kv_reset(kv, shape->n_slot, shape->n_block);
    return 0;
}

void ds4_kv_deinit(struct ds4_kv *kv)
{
    free(kv->users);
    free(kv->tables);
    free(kv->slot);
    free(kv->layer);
    memset(kv, 0, sizeof(*kv));
}

/* The table ends at n_block: blocks behind are no longer used through it. */
static void cut_table(struct ds4_kv *kv, struct ds4_kv_slot *slot, int32_t n_block)
{
    for (int32_t b = n_block; b < slot->n_block; b++)
        kv->users[slot->block[b]]--;
    if (n_block < slot->n_block)
        slot->n_block = n_block;
}

static void clear_slot(struct ds4_kv *kv, struct ds4_kv_slot *slot)
{
    int32_t *block = slot->block;

    cut_table(kv, slot, 0);
    memset(slot, 0, sizeof(*slot));
    slot->block = block;
}

void ds4_kv_reset(struct ds4_kv *kv, int32_t n_slot, int32_t n_block)
{
    kv->n_slot = n_slot;
    kv->n_block = n_block;
    for (int32_t s = 0; s < kv->shape.n_slot; s++)
        clear_slot(kv, &kv->slot[s]);
}

int ds4_kv_open(struct ds4_kv *kv, int32_t slot, uint64_t seq, uint32_t epoch, struct ds4_err *err)
{
    struct ds4_kv_slot *s;

    if (slot < 0 || slot >= kv->n_slot)
        return ds4_fail(err, DS4_E_PROTOCOL, "open of slot %d, there are %d", slot, kv->n_slot);
    s = &kv->slot[slot];
    if (s->in_use && epoch <= s->epoch)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "open of slot %d with epoch %" PRIu32 ", it is in use with %" PRIu32, slot,
                        epoch, s->epoch);
    s->in_use = true;
    s->seq = seq;
    s->epoch = epoch;
    s->fresh = true;
    cut_table(kv, s, 0); /* the new owner's lease brings its own table */
    return 0;
}

void ds4_kv_park(struct ds4_kv *kv, int32_t slot)
{
    cut_table(kv, &kv->slot[slot], 0);
}

int ds4_kv_close(struct ds4_kv *kv, int32_t slot, struct ds4_err *err)
{
    if (slot < 0 || slot >= kv->n_slot || !kv->slot[slot].in_use)
        return ds4_fail(err, DS4_E_PROTOCOL, "close of slot %d, which is not in use", slot);
    clear_slot(kv, &kv->slot[slot]);
    return 0;
}

struct ds4_kv_slot *ds4_kv_find(struct ds4_kv *kv, const struct ds4_kv_lease *lease,
                                struct ds4_err *err)
{
    struct ds4_kv_slot *slot;

    if (lease->slot < 0 || lease->slot >= kv->n_slot || !kv->slot[lease->slot].in_use) {
        ds4_fail(err, DS4_E_PROTOCOL, "slot %d is not in use", lease->slot);
        return NULL;
    }
    slot = &kv->slot[lease->slot];
    if (slot->seq != lease->seq || slot->epoch != lease->epoch) {
        ds4_fail(err, DS4_E_PROTOCOL,
                 "lease of sequence %" PRIu64 " epoch %" PRIu32
                 " on slot %d, which belongs to %" PRIu64 " epoch %" PRIu32,
                 lease->seq, lease->epoch, lease->slot, slot->seq, slot->epoch);
        return NULL;
    }
    return slot;
}

int ds4_kv_install(struct ds4_kv_slot *slot, int32_t pos, struct ds4_err *err)
{
    if (!slot->fresh)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "install at %d into a slot of sequence %" PRIu64 " that has run", pos,
                        slot->seq);
    slot->pos = slot->hi = slot->install_pos = pos;
    slot->seal_tok = 0;
    return 0;
}

int ds4_kv_replay(struct ds4_kv_slot *slot, int32_t from_pos, int32_t pos, struct ds4_err *err)
{
    if (from_pos < 0 || from_pos >= pos)
        return ds4_fail(err, DS4_E_PROTOCOL, "replay from %d to %d", from_pos, pos);
    if (ds4_kv_install(slot, from_pos, err) != 0)
        return ds4_err_wrap(err, "replay");
    slot->install_pos = slot->seal_tok = pos;
    return 0;
}

bool ds4_kv_reaches(const struct ds4_kv *kv, const struct ds4_kv_slot *slot, int32_t m)
{
    return m >= slot->install_pos && m <= slot->pos && slot->hi - m <= kv->shape.hot_tok;
}

int ds4_kv_truncate(struct ds4_kv *kv, struct ds4_kv_slot *slot, int32_t m, struct ds4_err *err)
{
    if (m == 0) {
        slot->pos = slot->hi = slot->install_pos = slot->seal_tok = 0;
        return 0;
    }
    if (m < 0 || m > slot->pos)
        return ds4_fail(err, DS4_E_PROTOCOL, "base position %d, the sequence is at %d", m,
                        slot->pos);
    if (!ds4_kv_reaches(kv, slot, m))
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "cannot truncate to %d: highest written %d, installed at %d, hot window %d",
                        m, slot->hi, slot->install_pos, kv->shape.hot_tok);
    slot->pos = m;
    return 0;
}

static int take_table(struct ds4_kv *kv, struct ds4_kv_slot *slot, const struct ds4_kv_lease *lease,
                      struct ds4_err *err)
{
    if (lease->n_block == 0)
        return 0;
    if (lease->first_block < 0 || lease->first_block > slot->n_block || lease->n_block < 0 ||
        lease->n_block > kv->shape.table_blocks - lease->first_block)
        return ds4_fail(
            err, DS4_E_PROTOCOL,
            "block table of slot %d: %d ids from index %d, the table has %d of at most %d",
            lease->slot, lease->n_block, lease->first_block, slot->n_block, kv->shape.table_blocks);
    cut_table(kv, slot, lease->first_block);
    for (int32_t b = 0; b < lease->n_block; b++) {
        if (lease->block[b] < 0 || lease->block[b] >= kv->n_block)
            return ds4_fail(err, DS4_E_PROTOCOL,
                            "block id %d in the table of slot %d, there are %d", lease->block[b],
                            lease->slot, kv->n_block);
        kv->users[lease->block[b]]++;
        slot->block[slot->n_block++] = lease->block[b];
    }
    return 0;
}

static int check_unshared(const struct ds4_kv *kv, const struct ds4_kv_slot *slot, int32_t base_pos,
                          int32_t n_tok, struct ds4_err *err)
{
    int32_t begin = base_pos > slot->seal_tok ? base_pos : slot->seal_tok;

    if (begin >= base_pos + n_tok)
        return 0; /* a replay: nothing is written */
    for (int32_t b = begin / DS4_BLOCK_TOK; b <= (base_pos + n_tok - 1) / DS4_BLOCK_TOK; b++)
        if (kv->users[slot->block[b]] > 1)
            return ds4_fail(err, DS4_E_PROTOCOL,
                            "rows [%d, %d + %d) of sequence %" PRIu64
                            " would change block %d, which %d tables name",
                            base_pos, base_pos, n_tok, slot->seq, slot->block[b],
                            kv->users[slot->block[b]]);
    return 0;
}

int ds4_kv_append(struct ds4_kv *kv, const struct ds4_kv_lease *lease, int32_t base_pos,
                  int32_t n_tok, struct ds4_batch_entry *entry, struct ds4_err *err)
{
    struct ds4_kv_slot *slot = ds4_kv_find(kv, lease, err);

    if (slot == NULL || take_table(kv, slot, lease, err) != 0)
        return -1;
    if (lease->cap_tok < 0 || lease->cap_tok > slot->n_block * DS4_BLOCK_TOK)
        return ds4_fail(err, DS4_E_PROTOCOL, "lease of %d tokens on slot %d, its %d blocks hold %d",
                        lease->cap_tok, lease->slot, slot->n_block, slot->n_block * DS4_BLOCK_TOK);
    if (n_tok < 1 || base_pos < 0 || n_tok > lease->cap_tok - base_pos)
        return ds4_fail(err, DS4_E_PROTOCOL, "rows [%d, %d + %d) on slot %d, the lease ends at %d",
                        base_pos, base_pos, n_tok, lease->slot, lease->cap_tok);
    if (base_pos != slot->pos && ds4_kv_truncate(kv, slot, base_pos, err) != 0)
        return -1;
    if (check_unshared(kv, slot, base_pos, n_tok, err) != 0)
        return -1;
    slot->fresh = false;
    slot->pos = base_pos + n_tok;
    if (slot->hi < slot->pos)
        slot->hi = slot->pos;
    *entry = (struct ds4_batch_entry){.slot = lease->slot,
                                      .base_pos = base_pos,
                                      .n_row = n_tok,
                                      .active = true,
                                      .cap_tok = lease->cap_tok,
                                      .seal_tok = slot->seal_tok,
                                      .block = slot->block,
                                      .n_block = slot->n_block};
    return 0;
}

int ds4_kv_skip(struct ds4_kv *kv, const struct ds4_kv_lease *lease, int32_t n_tok,
                struct ds4_batch_entry *entry, struct ds4_err *err)
{
    struct ds4_kv_slot *slot = ds4_kv_find(kv, lease, err);

    if (slot == NULL || take_table(kv, slot, lease, err) != 0)
        return -1;
    *entry = (struct ds4_batch_entry){.slot = lease->slot,
                                      .base_pos = slot->pos,
                                      .n_row = n_tok,
                                      .active = false,
                                      .block = slot->block,
                                      .n_block = slot->n_block};
    return 0;
}

/* Points inside a chunk (see kv_keep.h; house list, step 9).
 *
 * Chunks of one anchor's length would need none of this and would read every weight four times as often;
 * rings that hold a whole chunk cost 110 MiB a slot for the compressors' inputs alone.  What an anchor needs
 * of a layer is 127 window rows and, where blocks overlap, 4 tokens' inputs: gathered as they are made.
 *
 * Invariant: `at` of every place walks through its area in the order of kv_layout.h, a layer at a time. */
#include "worker/kv_keep.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#define FAR_TOK (1 << 20) /* as far out as any anchor is large */

static size_t align_up(size_t n)
{
    return (n + 255) / 256 * 256;
}

/* Of the largest anchor: a ratio above DS4_ANCHOR_TOK has open blocks at every other one. */
static size_t place_bytes(const struct ds4_kv_shape *shape)
{
    struct ds4_point_shape point;
    int64_t even, odd;

    if (ds4_kv_point_shape(shape, &point, NULL) != 0)
        return 0; /* ds4_kv_store_init says so */
    even = ds4_point_bytes(&point, FAR_TOK);
    odd = ds4_point_bytes(&point, FAR_TOK + DS4_ANCHOR_TOK);
    return align_up((size_t)(even > odd ? even : odd));
}

size_t ds4_kv_keeper_bytes(const struct ds4_kv_shape *shape, int32_t max_step_tok)
{
    return place_bytes(shape) * (size_t)ds4_point_inner_max(max_step_tok);
}

void ds4_kv_keeper_init(struct ds4_kv_keeper *keeper, struct ds4_kv_store *store, void *area,
                        int32_t max_step_tok)
{
    *keeper = (struct ds4_kv_keeper){
        .store = store,
        .area = area,
        .area_bytes = place_bytes(&store->kv->shape),
        .n_area = area == NULL ? 0 : ds4_point_inner_max(max_step_tok),
    };
}

void ds4_kv_keeper_begin(struct ds4_kv_keeper *keeper)
{
    keeper->n = 0;
}

int ds4_kv_keeper_add(struct ds4_kv_keeper *keeper, const struct ds4_batch_entry *entry,
                      int32_t pos, uint64_t id, struct ds4_err *err)
{
    struct ds4_kv_kept *kept;
    uint8_t *area;

    if (pos % DS4_ANCHOR_TOK != 0 || pos <= entry->base_pos ||
        pos >= entry->base_pos + entry->n_row)
        return ds4_fail(err, DS4_E_PROTOCOL, "point %" PRIu64 " at %d of an entry over [%d, %d)",
                        id, pos, entry->base_pos, entry->base_pos + entry->n_row);
    if (keeper->n == keeper->n_area)
        return ds4_fail(err, DS4_E_PROTOCOL, "more than %d points inside the entries of a step",
                        keeper->n_area);
    area = keeper->area + (size_t)keeper->n * keeper->area_bytes;
    kept = &keeper->kept[keeper->n++];
    *kept = (struct ds4_kv_kept){.id = id,
                                 .slot = entry->slot,
                                 .pos = pos,
                                 .base_pos = entry->base_pos,
                                 .first_row = entry->first_row,
                                 .area = area,
                                 .at = area};
    return 0;
}

/* Rows of positions [from, from + n), their first n_col values: from `ring` those before the entry, from x
 * (plus ape) its own.  Returns the next free byte. */
static uint8_t *keep_rows(struct ds4_kv_keeper *keeper, const struct ds4_kv_kept *kept,
                          const struct ds4_ring *ring, struct ds4_keep_args *a, int32_t from,
                          int32_t n, uint8_t *at)
{
    size_t bytes = ds4_row_bytes(ring->format, a->n_col, ring->d_rope);
    int32_t before = kept->base_pos > from ? kept->base_pos - from : 0;

    before = before < n ? before : n;
    at = ds4_kv_gather_rows(keeper->store, ring, kept->slot, from, before, bytes, at);
    a->first_row = kept->first_row + (from + before - kept->base_pos);
    a->n_row = n - before;
    a->pos = from + before;
    a->format = ring->format;
    a->d_rope = ring->d_rope;
    a->dst = at;
    if (a->n_row > 0)
        keeper->store->backend->keep(keeper->store->dev, a);
    return at + (size_t)a->n_row * bytes;
}

static const struct ds4_kv_layer_shape *layer_shape(const struct ds4_kv_keeper *keeper, int32_t l)
{
    return &keeper->store->kv->shape.layer[l];
}

static int32_t window_rows(const struct ds4_kv_keeper *keeper, int32_t pos)
{
    int32_t rows = keeper->store->kv->shape.window_tok - 1;

    return rows < pos ? rows : pos;
}

/* Bytes of a layer's sections before the indexer's inputs, or of all three. */
static size_t layer_bytes(const struct ds4_kv_keeper *keeper, int32_t l, int32_t pos, bool all)
{
    const struct ds4_kv_layer *layer = &keeper->store->kv->layer[l];
    const struct ds4_kv_layer_shape *ls = layer_shape(keeper, l);
    size_t bytes = (size_t)window_rows(keeper, pos) * layer->window.row_bytes;

    if (ls->ratio > 0)
        bytes += ds4_kv_inputs_bytes(&layer->comp_k, ls, pos);
    if (all && ls->indexer)
        bytes += ds4_kv_inputs_bytes(&layer->index_k, ls, pos);
    return bytes;
}

void ds4_kv_keeper_inputs(struct ds4_kv_keeper *keeper, int32_t l, bool index, struct ds4_tensor k,
                          struct ds4_tensor g, const struct ds4_weight *ape)
{
    const struct ds4_kv_layer *layer = &keeper->store->kv->layer[l];
    const struct ds4_kv_layer_shape *ls = layer_shape(keeper, l);
    const struct ds4_ring *ring_k = index ? &layer->index_k : &layer->comp_k;
    const struct ds4_ring *ring_g = index ? &layer->index_g : &layer->comp_g;

    for (int32_t i = 0; i < keeper->n; i++) {
        const struct ds4_kv_kept *kept = &keeper->kept[i];
        int32_t open = kept->pos % ls->ratio;
        struct ds4_keep_args of_k = {.x = k, .n_col = ring_k->d / 2, .ratio = ls->ratio};
        struct ds4_keep_args of_g = {.x = g, .n_col = ring_g->d / 2, .ratio = ls->ratio};
        uint8_t *at = kept->at;

        of_g.ape = *ape;
        at += index ? layer_bytes(keeper, l, kept->pos, false)
                    : (size_t)window_rows(keeper, kept->pos) * layer->window.row_bytes;
        if (ls->overlap && kept->pos >= ls->ratio) {
            int32_t from = kept->pos - open - ls->ratio;

            at = keep_rows(keeper, kept, ring_k, &of_k, from, ls->ratio, at);
            at = keep_rows(keeper, kept, ring_g, &of_g, from, ls->ratio, at);
        }
        of_k.n_col = ring_k->d;
        of_g.n_col = ring_g->d;
        at = keep_rows(keeper, kept, ring_k, &of_k, kept->pos - open, open, at);
        (void)keep_rows(keeper, kept, ring_g, &of_g, kept->pos - open, open, at);
    }
}

void ds4_kv_keeper_window(struct ds4_kv_keeper *keeper, int32_t l, struct ds4_tensor kv)
{
    const struct ds4_ring *ring = &keeper->store->kv->layer[l].window;

    for (int32_t i = 0; i < keeper->n; i++) {
        struct ds4_kv_kept *kept = &keeper->kept[i];
        int32_t rows = window_rows(keeper, kept->pos);
        struct ds4_keep_args of_kv = {.x = kv, .n_col = ring->d};

        (void)keep_rows(keeper, kept, ring, &of_kv, kept->pos - rows, rows, kept->at);
        kept->at += layer_bytes(keeper, l, kept->pos, true);
    }
}

static struct ds4_kv_kept *find(const struct ds4_kv_keeper *keeper, uint64_t id)
{
    for (int32_t i = 0; i < keeper->n; i++)
        if (keeper->kept[i].id == id)
            return (struct ds4_kv_kept *)&keeper->kept[i];
    return NULL;
}

bool ds4_kv_keeper_has(const struct ds4_kv_keeper *keeper, uint64_t id)
{
    return find(keeper, id) != NULL;
}

int ds4_kv_keeper_save(struct ds4_kv_keeper *keeper, uint64_t id, struct ds4_err *err)
{
    const struct ds4_kv_kept *kept = find(keeper, id);

    assert(kept->at == kept->area + ds4_point_bytes(&keeper->store->shape, kept->pos));
    if (ds4_kv_point_take(keeper->store, kept->pos, id, err) != 0)
        return -1;
    ds4_kv_point_fetch(keeper->store, id, kept->area);
    return 0;
}

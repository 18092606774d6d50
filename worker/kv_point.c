/* Saving and installing points (see kv_point.h; the plan's "exact tail" and, at multiples of every ratio,
 * "anchor").
 *
 * Rings are position-addressed, so a section is at most two strided pieces of a ring (before and after
 * its wrap).  They are gathered in one device area first: the bus then sees few large copies instead of
 * a hundred small ones, and scattering back is the same list of pieces read in the other direction.
 *
 * Invariant: the queue of the device orders everything.  A save is behind the step whose rows it takes
 * and before the next one; host memory is touched by others only after settle. */
#include "worker/kv_point.h"

#include "common/fault.h"
#include "proto/point.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum direction { GATHER, SCATTER };

/* One pass over the rings of a slot. */
struct pass {
    struct ds4_kv_store *store;
    enum direction direction;
    int32_t slot;
    uint8_t *at; /* next byte of the device area */
};

static size_t align_up(size_t n)
{
    return (n + 255) / 256 * 256;
}

size_t ds4_kv_store_area_bytes(const struct ds4_kv_shape *shape)
{
    struct ds4_point_shape point;

    if (ds4_kv_point_shape(shape, &point, NULL) != 0)
        return 0; /* ds4_kv_store_init says so */
    return align_up((size_t)ds4_point_bytes_max(&point));
}

int ds4_kv_store_init(struct ds4_kv_store *store, const struct ds4_backend *backend,
                      struct ds4_device *dev, struct ds4_kv *kv, void *area, void *arena,
                      int32_t n_unit, struct ds4_err *err)
{
    size_t n_section = DS4_KV_POINT_SECTIONS * (size_t)kv->shape.n_layer;
    size_t n_point = n_unit > 0 ? (size_t)n_unit : 1; /* a point takes at least one unit */

    memset(store, 0, sizeof(*store));
    store->backend = backend;
    store->dev = dev;
    store->kv = kv;
    store->area = area;
    if (ds4_kv_point_shape(&kv->shape, &store->shape, err) != 0 ||
        ds4_kv_host_init(&store->host, arena, (size_t)ds4_kv_unit_bytes(&store->shape), n_unit,
                         err) != 0 ||
        ds4_kv_ids_init(&store->ids, n_unit, err) != 0)
        goto fail;
    store->point = calloc(n_point, sizeof(*store->point));
    store->free_point = calloc(n_point, sizeof(*store->free_point));
    store->section = calloc(n_section, sizeof(*store->section));
    if (store->point == NULL || store->free_point == NULL || store->section == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for a table of %d points", n_unit);
        goto fail;
    }
    ds4_kv_store_reset(store, 0);
    return 0;
fail:
    ds4_kv_store_deinit(store);
    return -1;
}

void ds4_kv_store_deinit(struct ds4_kv_store *store)
{
    free(store->section);
    free(store->free_point);
    free(store->point);
    ds4_kv_ids_deinit(&store->ids);
    ds4_kv_host_deinit(&store->host);
    memset(store, 0, sizeof(*store));
}

void ds4_kv_store_reset(struct ds4_kv_store *store, int64_t budget_bytes)
{
    ds4_kv_store_settle(store);
    ds4_kv_ids_clear(&store->ids);
    store->n_free = 0;
    store->n_fresh = 0;
    ds4_kv_host_reset(&store->host, budget_bytes);
}

void ds4_kv_store_settle(struct ds4_kv_store *store)
{
    if (!store->in_flight)
        return;
    store->backend->sync(store->dev);
    store->in_flight = false;
}

/* ---- rings <-> device area ------------------------------------------------------------------------ */

/* The first `bytes` bytes of each ring row of positions [from, from + n), packed in the area. */
static void pass_rows(struct pass *pass, const struct ds4_ring *ring, int32_t from, int32_t n,
                      size_t bytes)
{
    const struct ds4_backend *backend = pass->store->backend;

    while (n > 0) {
        int32_t first = from % ring->cap;
        int32_t run = n < ring->cap - first ? n : ring->cap - first;
        uint8_t *row = (uint8_t *)ring->data +
                       ((size_t)pass->slot * (size_t)ring->cap + (size_t)first) * ring->row_bytes;

        if (pass->direction == GATHER)
            backend->copy_rows(pass->store->dev, pass->at, bytes, row, ring->row_bytes, bytes, run);
        else
            backend->copy_rows(pass->store->dev, row, ring->row_bytes, pass->at, bytes, bytes, run);
        pass->at += (size_t)run * bytes;
        from += run;
        n -= run;
    }
}

uint8_t *ds4_kv_gather_rows(struct ds4_kv_store *store, const struct ds4_ring *ring, int32_t slot,
                            int32_t from, int32_t n, size_t bytes, uint8_t *at)
{
    struct pass pass = {store, GATHER, slot, at};

    pass_rows(&pass, ring, from, n, bytes);
    return pass.at;
}

/* Inputs of one compressor at pos: see kv_layout.h for the order. */
static void pass_inputs(struct pass *pass, const struct ds4_ring *k, const struct ds4_ring *g,
                        const struct ds4_kv_layer_shape *ls, int32_t pos)
{
    int32_t open = pos % ls->ratio;

    if (ls->overlap && pos >= ls->ratio) {
        pass_rows(pass, k, pos - open - ls->ratio, ls->ratio, k->row_bytes / 2);
        pass_rows(pass, g, pos - open - ls->ratio, ls->ratio, g->row_bytes / 2);
    }
    pass_rows(pass, k, pos - open, open, k->row_bytes);
    pass_rows(pass, g, pos - open, open, g->row_bytes);
}

static void pass_slot(struct ds4_kv_store *store, enum direction direction, int32_t slot,
                      int32_t pos)
{
    const struct ds4_kv *kv = store->kv;
    struct pass pass = {store, direction, slot, store->area};
    int32_t window = kv->shape.window_tok - 1 < pos ? kv->shape.window_tok - 1 : pos;

    for (int32_t l = 0; l < kv->shape.n_layer; l++) {
        const struct ds4_kv_layer_shape *ls = &kv->shape.layer[l];
        const struct ds4_kv_layer *layer = &kv->layer[l];

        pass_rows(&pass, &layer->window, pos - window, window, layer->window.row_bytes);
        if (ls->ratio > 0)
            pass_inputs(&pass, &layer->comp_k, &layer->comp_g, ls, pos);
        if (ls->indexer)
            pass_inputs(&pass, &layer->index_k, &layer->index_g, ls, pos);
    }
    assert(pass.at == store->area + ds4_point_bytes(&store->shape, pos));
}

/* ---- device area <-> host units --------------------------------------------------------------------- */

static void move_area(struct ds4_kv_store *store, enum direction direction,
                      const struct ds4_kv_blob *blob, uint8_t *area)
{
    struct ds4_kv_cursor cursor = ds4_kv_cursor_at(&store->host, blob, 0);
    uint8_t *at = area;
    size_t n;

    store->in_flight = true;
    for (uint8_t *unit = ds4_kv_cursor_next(&cursor, blob->bytes, &n); n > 0;
         unit = ds4_kv_cursor_next(&cursor, blob->bytes, &n)) {
        if (direction == GATHER)
            store->backend->fetch(store->dev, unit, at, n);
        else
            store->backend->upload(store->dev, at, unit, n);
        at += n;
    }
}

/* ---- points ---------------------------------------------------------------------------------------- */

struct ds4_kv_point *ds4_kv_point_find(struct ds4_kv_store *store, uint64_t id)
{
    int32_t i = ds4_kv_ids_find(&store->ids, id);

    return i < 0 ? NULL : &store->point[i];
}

int ds4_kv_point_adopt(struct ds4_kv_store *store, uint64_t id, int32_t pos,
                       struct ds4_kv_blob *blob, struct ds4_err *err)
{
    int32_t i;

    if (store->n_free == 0 && store->n_fresh == store->host.n_unit)
        return ds4_fail(err, DS4_E_NOMEM, "more than %d points", store->host.n_unit);
    i = store->n_free > 0 ? store->free_point[store->n_free - 1] : store->n_fresh;
    if (ds4_kv_ids_put(&store->ids, id, i, err) != 0)
        return ds4_err_wrap(err, "point");
    if (store->n_free > 0)
        store->n_free--;
    else
        store->n_fresh++;
    store->point[i] = (struct ds4_kv_point){pos, *blob};
    memset(blob, 0, sizeof(*blob));
    return 0;
}

int ds4_kv_point_take(struct ds4_kv_store *store, int32_t pos, uint64_t id, struct ds4_err *err)
{
    struct ds4_kv_blob blob;

    if (DS4_FAULT_POINT(HOST_ANCHOR_ALLOC_FAIL))
        return ds4_fail(err, DS4_E_NOMEM, "point at %d: deliberate fault", pos);
    if (ds4_kv_host_take(&store->host, (size_t)ds4_point_bytes(&store->shape, pos), &blob, err) !=
        0)
        return ds4_err_wrap(err, "point at %d", pos);
    if (ds4_kv_point_adopt(store, id, pos, &blob, err) != 0) {
        ds4_kv_host_give(&store->host, &blob);
        return -1;
    }
    return 0;
}

void ds4_kv_point_fetch(struct ds4_kv_store *store, uint64_t id, uint8_t *area)
{
    move_area(store, GATHER, &ds4_kv_point_find(store, id)->blob, area);
}

int ds4_kv_point_save(struct ds4_kv_store *store, int32_t slot, int32_t pos, uint64_t id,
                      struct ds4_err *err)
{
    const struct ds4_kv_slot *s = &store->kv->slot[slot];

    if (pos < 1 || !ds4_kv_reaches(store->kv, s, pos))
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "point at %d of slot %d, which stands at %d: highest written %d, "
                        "installed at %d, hot window %d",
                        pos, slot, s->pos, s->hi, s->install_pos, store->kv->shape.hot_tok);
    if (ds4_kv_point_take(store, pos, id, err) != 0)
        return -1;
    pass_slot(store, GATHER, slot, pos);
    ds4_kv_point_fetch(store, id, store->area);
    return 0;
}

int ds4_kv_point_drop(struct ds4_kv_store *store, uint64_t id, struct ds4_err *err)
{
    int32_t i = ds4_kv_ids_take(&store->ids, id);

    if (i < 0)
        return ds4_fail(err, DS4_E_PROTOCOL, "there is no point %" PRIu64, id);
    ds4_kv_store_settle(store); /* its units may be in a queued copy */
    ds4_kv_host_give(&store->host, &store->point[i].blob);
    store->free_point[store->n_free++] = i;
    return 0;
}

int ds4_kv_point_install(struct ds4_kv_store *store, int32_t slot, int32_t pos, uint64_t id,
                         struct ds4_err *err)
{
    const struct ds4_kv_point *point = ds4_kv_point_find(store, id);

    if (point == NULL)
        return ds4_fail(err, DS4_E_PROTOCOL, "there is no point %" PRIu64, id);
    if (point->pos != pos)
        return ds4_fail(err, DS4_E_PROTOCOL, "install at %d of point %" PRIu64 ", which is at %d",
                        pos, id, point->pos);
    if (ds4_kv_install(&store->kv->slot[slot], pos, err) != 0)
        return -1;
    if (DS4_FAULT_POINT(INSTALL_COPY_FAIL))
        return ds4_fail(err, DS4_E_IO, "install of point %" PRIu64 ": deliberate fault", id);
    move_area(store, SCATTER, &point->blob, store->area);
    pass_slot(store, SCATTER, slot, pos);
    return 0;
}

/* Rows that the replay's first entries read and that are nobody's: any finite value does, because what they
 * touch is overwritten before `pos`; what another sequence left might be NaN. */
int ds4_kv_point_replay(struct ds4_kv_store *store, int32_t slot, int32_t from_pos, int32_t pos,
                        struct ds4_err *err)
{
    static const uint8_t zeros[1 << 16];
    size_t bytes = (size_t)ds4_point_bytes(&store->shape, from_pos);

    if (ds4_kv_replay(&store->kv->slot[slot], from_pos, pos, err) != 0)
        return -1;
    for (size_t at = 0, n; at < bytes; at += n) {
        n = bytes - at < sizeof(zeros) ? bytes - at : sizeof(zeros);
        store->backend->upload(store->dev, store->area + at, zeros, n);
    }
    pass_slot(store, SCATTER, slot, from_pos);
    return 0;
}

/* ---- blocks ---------------------------------------------------------------------------------------- */

static void copy_pages(struct ds4_kv_store *store, const struct ds4_pages *pages, int32_t src,
                       int32_t dst)
{
    size_t bytes = (size_t)pages->rows_per_block * pages->row_bytes;
    uint8_t *data = pages->data;

    if (bytes > 0)
        store->backend->copy_rows(store->dev, data + (size_t)dst * bytes, bytes,
                                  data + (size_t)src * bytes, bytes, bytes, 1);
}

int ds4_kv_block_copy(struct ds4_kv_store *store, int32_t src, int32_t dst, struct ds4_err *err)
{
    const struct ds4_kv *kv = store->kv;

    if (src < 0 || src >= kv->n_block || dst < 0 || dst >= kv->n_block || src == dst)
        return ds4_fail(err, DS4_E_PROTOCOL, "copy of block %d to %d, there are %d", src, dst,
                        kv->n_block);
    if (kv->users[dst] > 0)
        return ds4_fail(err, DS4_E_PROTOCOL, "copy of block %d to %d, which a sequence uses", src,
                        dst);
    for (int32_t l = 0; l < kv->shape.n_layer; l++) {
        copy_pages(store, &kv->layer[l].rows, src, dst);
        copy_pages(store, &kv->layer[l].index_rows, src, dst);
    }
    return 0;
}

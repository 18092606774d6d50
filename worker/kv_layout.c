/* Sections of points and parts (see kv_layout.h).
 *
 * Geometry comes from ds4_kv_layer_geometry, the function that carves rings and pages, so that a section
 * and the memory it is copied from cannot disagree.  The anchor of the plan (127 rows and 640 x 2 x 4 x 4 B
 * per overlapping layer) is not a form of its own: at a multiple of every ratio the open blocks are
 * empty, and of the block before only the first halves are kept at any position. */
#include "worker/kv_layout.h"

#include "proto/point.h"

#include <assert.h>

#define MIN_UNIT      4096
#define MAX_UNIT      65536
#define UNITS_PER_ROW 64 /* an anchor is about so many units: at most 1/128 is lost to rounding */
#define MANY_TOK      (1 << 20)

static int32_t smaller(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

size_t ds4_kv_inputs_bytes(const struct ds4_ring *ring, const struct ds4_kv_layer_shape *ls,
                           int32_t pos)
{
    size_t bytes = 2 * (size_t)(pos % ls->ratio) * ring->row_bytes;

    if (ls->overlap && pos >= ls->ratio)
        bytes += (size_t)ls->ratio * ring->row_bytes; /* half of 2 * ratio rows */
    return bytes;
}

static int32_t open_rows(int32_t ratio, bool overlap, int32_t pos)
{
    return pos % ratio + (overlap && pos >= ratio ? ratio : 0);
}

int32_t ds4_kv_point_sections(const struct ds4_kv_shape *shape, int32_t pos,
                              struct ds4_kv_section *out)
{
    int32_t n = 0;

    for (int32_t l = 0; l < shape->n_layer; l++) {
        const struct ds4_kv_layer_shape *ls = &shape->layer[l];
        struct ds4_kv_layer layer = ds4_kv_layer_geometry(shape, l);
        int32_t rows = smaller(pos, shape->window_tok - 1);

        out[n++] =
            (struct ds4_kv_section){l, DS4_KV_WINDOW, rows, (size_t)rows * layer.window.row_bytes};
        if (ls->ratio == 0)
            continue;
        rows = open_rows(ls->ratio, ls->overlap, pos);
        out[n++] = (struct ds4_kv_section){l, ls->overlap ? DS4_KV_OPEN_OVERLAP : DS4_KV_OPEN_PLAIN,
                                           rows, ds4_kv_inputs_bytes(&layer.comp_k, ls, pos)};
        if (ls->indexer)
            out[n++] = (struct ds4_kv_section){l, DS4_KV_OPEN_INDEX, rows,
                                               ds4_kv_inputs_bytes(&layer.index_k, ls, pos)};
    }
    return n;
}

int32_t ds4_kv_row_sections(const struct ds4_kv_shape *shape, int32_t begin, int32_t end,
                            struct ds4_kv_section *out)
{
    int32_t n = 0;

    assert(begin % DS4_BLOCK_TOK == 0 && end >= begin);
    for (int32_t l = 0; l < shape->n_layer; l++) {
        const struct ds4_kv_layer_shape *ls = &shape->layer[l];
        struct ds4_kv_layer layer = ds4_kv_layer_geometry(shape, l);
        int32_t rows;

        if (ls->ratio == 0)
            continue;
        rows = end / ls->ratio - begin / ls->ratio;
        out[n++] = (struct ds4_kv_section){l, ls->overlap ? DS4_KV_ROWS_OVERLAP : DS4_KV_ROWS_PLAIN,
                                           rows, (size_t)rows * layer.rows.row_bytes};
        if (ls->indexer)
            out[n++] = (struct ds4_kv_section){l, DS4_KV_ROWS_INDEX, rows,
                                               (size_t)rows * layer.index_rows.row_bytes};
    }
    return n;
}

size_t ds4_kv_sections_bytes(const struct ds4_kv_section *section, int32_t n)
{
    size_t bytes = 0;

    for (int32_t s = 0; s < n; s++)
        bytes += section[s].bytes;
    return bytes;
}

static struct ds4_point_group *group_of(struct ds4_point_shape *out, int32_t ratio)
{
    for (int32_t g = 0; g < out->n_group; g++)
        if (out->group[g].ratio == ratio)
            return &out->group[g];
    if (out->n_group == DS4_POINT_GROUPS)
        return NULL;
    out->group[out->n_group].ratio = ratio;
    return &out->group[out->n_group++];
}

int ds4_kv_point_shape(const struct ds4_kv_shape *shape, struct ds4_point_shape *out,
                       struct ds4_err *err)
{
    *out = (struct ds4_point_shape){.window_tok = shape->window_tok};
    for (int32_t l = 0; l < shape->n_layer; l++) {
        const struct ds4_kv_layer_shape *ls = &shape->layer[l];
        struct ds4_kv_layer layer = ds4_kv_layer_geometry(shape, l);
        struct ds4_point_group *group;
        int64_t row_bytes = (int64_t)(layer.comp_k.row_bytes + layer.index_k.row_bytes);

        out->row_bytes += (int64_t)layer.window.row_bytes;
        if (ls->ratio == 0)
            continue;
        group = group_of(out, ls->ratio);
        if (group == NULL)
            return ds4_fail(err, DS4_E_INVALID, "more than %d different compress ratios",
                            DS4_POINT_GROUPS);
        group->open_bytes += 2 * row_bytes;
        if (ls->overlap)
            group->prev_bytes += row_bytes;
    }
    return 0;
}

int32_t ds4_kv_unit_bytes(const struct ds4_point_shape *point)
{
    int64_t anchor = ds4_point_bytes(point, MANY_TOK);
    int32_t unit = MIN_UNIT;

    while (unit < MAX_UNIT && unit < anchor / UNITS_PER_ROW)
        unit *= 2;
    return unit;
}

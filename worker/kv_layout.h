/* What a point and a disk part are made of: sections, one per layer and kind of state, in one order for
 * memory and file.  All of it follows from the layer table (any ratio, with or without overlap and
 * indexer); nothing here knows a model.
 *
 * A point holds per layer: window rows; inputs of the compressor; inputs of the indexer's compressor.
 * Rows hold per layer: compressed rows; indexer rows.  Within a section:
 *
 *   window   rows of positions [max(0, pos - (window_tok - 1)), pos), as the ring stores them
 *   inputs   for the block before the open one, where blocks overlap: first halves of k, token by token,
 *            then first halves of g (the halves that the open block still reads); then of the open block
 *            k, token by token, then g; all f32
 *   rows     row j of the sequence for tokens [begin, end): begin / ratio <= j < end / ratio */
#ifndef DS4_WORKER_KV_LAYOUT_H
#define DS4_WORKER_KV_LAYOUT_H

#include "common/err.h"
#include "proto/message.h"
#include "worker/kv_cache.h"

#include <stddef.h>
#include <stdint.h>

/* The numbers are those of the part file. */
enum ds4_kv_section_kind {
    DS4_KV_WINDOW = 1,       /* R */
    DS4_KV_ROWS_OVERLAP = 2, /* A */
    DS4_KV_ROWS_INDEX = 3,   /* I */
    DS4_KV_ROWS_PLAIN = 4,   /* B */
    DS4_KV_OPEN_OVERLAP = 5, /* Xc */
    DS4_KV_OPEN_INDEX = 6,   /* Xi */
    DS4_KV_OPEN_PLAIN = 7    /* Xh */
};

#define DS4_KV_POINT_SECTIONS 3 /* of one layer at most */
#define DS4_KV_ROW_SECTIONS   2

struct ds4_kv_section {
    int32_t layer; /* index into the stage's layers */
    enum ds4_kv_section_kind kind;
    int32_t rows; /* window and rows: rows; inputs: tokens */
    size_t bytes;
};

/* The sections of a point at `pos`; out [DS4_KV_POINT_SECTIONS * n_layer].  Returns their number. */
int32_t ds4_kv_point_sections(const struct ds4_kv_shape *shape, int32_t pos,
                              struct ds4_kv_section *out);
/* The sections of the compressed rows of tokens [begin, end), begin a multiple of DS4_BLOCK_TOK;
 * out [DS4_KV_ROW_SECTIONS * n_layer]. */
int32_t ds4_kv_row_sections(const struct ds4_kv_shape *shape, int32_t begin, int32_t end,
                            struct ds4_kv_section *out);
/* Bytes of one compressor's inputs at pos: k and g, whose rings both have `ring`'s rows; ls->ratio > 0. */
size_t ds4_kv_inputs_bytes(const struct ds4_ring *ring, const struct ds4_kv_layer_shape *ls,
                           int32_t pos);
size_t ds4_kv_sections_bytes(const struct ds4_kv_section *section, int32_t n);

/* The formula of HELLO for the stage's points; DS4_E_INVALID if the layers have more than
 * DS4_POINT_GROUPS different ratios. */
int ds4_kv_point_shape(const struct ds4_kv_shape *shape, struct ds4_point_shape *out,
                       struct ds4_err *err) DS4_MUST_CHECK;

/* The unit of the stage's host memory: a small part of an anchor. */
int32_t ds4_kv_unit_bytes(const struct ds4_point_shape *point);

#endif

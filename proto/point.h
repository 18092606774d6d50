/* What points weigh: the one formula by which the router keeps its ledger and the worker its memory.
 *
 * A point is the state that a sequence at `pos` cannot recompute from its compressed rows: the newest
 * window_tok - 1 window rows and, per kind of compressor, the inputs of the open block (pos % ratio
 * tokens) and of the block before it where blocks overlap (the half of its columns that is still
 * needed).  At a multiple of every ratio the open blocks are empty: the small form falls out. */
#ifndef DS4_PROTO_POINT_H
#define DS4_PROTO_POINT_H

#include "proto/message.h"

/* Bytes of a point at pos >= 0; exact, before rounding up to units. */
int64_t ds4_point_bytes(const struct ds4_point_shape *shape, int32_t pos);
/* The most any position needs. */
int64_t ds4_point_bytes_max(const struct ds4_point_shape *shape);

/* n bytes rounded up to whole units of a stage's host memory (HELLO's unit_bytes, a power of two).  Points
 * and stagings take whole units; a staged tail's rows and its point are rounded apart. */
int64_t ds4_unit_round(int64_t bytes, int32_t unit_bytes);

/* Points that a step of at most max_step_tok rows can save inside of its entries. */
int32_t ds4_point_inner_max(int32_t max_step_tok);

/* Continues a digest (0 at first) with one entry's sequence, epoch and position after the step. */
uint32_t ds4_pos_digest(uint32_t digest, uint64_t seq, uint32_t epoch, int32_t pos);

/* "crc"; "?" outside the table. */
const char *ds4_kv_reason_text(enum ds4_kv_reason reason);

#endif

/* Weights of points, and the small functions both sides must compute alike (see point.h).
 *
 * The formula is closed over the groups of equal ratio that HELLO lists, so the router needs no layer
 * table; the worker lays out its points by the same groups and asserts that both agree. */
#include "proto/point.h"

#include "common/crc32c.h"

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

int64_t ds4_point_bytes(const struct ds4_point_shape *shape, int32_t pos)
{
    int64_t bytes = shape->fixed_bytes + shape->row_bytes * min64(pos, shape->window_tok - 1);

    for (int32_t g = 0; g < shape->n_group; g++) {
        const struct ds4_point_group *group = &shape->group[g];
        int32_t open_tok = pos % group->ratio;

        bytes += open_tok * group->open_bytes;
        if (pos >= group->ratio)
            bytes += group->ratio * group->prev_bytes;
    }
    return bytes;
}

int64_t ds4_point_bytes_max(const struct ds4_point_shape *shape)
{
    int64_t bytes = shape->fixed_bytes + shape->row_bytes * (shape->window_tok - 1);

    for (int32_t g = 0; g < shape->n_group; g++) {
        const struct ds4_point_group *group = &shape->group[g];

        bytes += (group->ratio - 1) * group->open_bytes + group->ratio * group->prev_bytes;
    }
    return bytes;
}

int64_t ds4_unit_round(int64_t bytes, int32_t unit_bytes)
{
    return (bytes + unit_bytes - 1) / unit_bytes * unit_bytes;
}

int32_t ds4_point_inner_max(int32_t max_step_tok)
{
    int32_t n = max_step_tok / DS4_ANCHOR_TOK;

    return n < DS4_MAX_INNER_POINTS ? n : DS4_MAX_INNER_POINTS;
}

uint32_t ds4_pos_digest(uint32_t digest, uint64_t seq, uint32_t epoch, int32_t pos)
{
    uint8_t bytes[16];

    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(seq >> (8 * i));
    for (int i = 0; i < 4; i++) {
        bytes[8 + i] = (uint8_t)(epoch >> (8 * i));
        bytes[12 + i] = (uint8_t)((uint32_t)pos >> (8 * i));
    }
    return ds4_crc32c(digest, bytes, sizeof(bytes));
}

const char *ds4_kv_reason_text(enum ds4_kv_reason reason)
{
    static const char *const text[] = {
#define REASON_TEXT(name, word) word,
        DS4_KV_REASONS(REASON_TEXT)
#undef REASON_TEXT
    };

    return (unsigned)reason < DS4_KV_N_REASON ? text[reason] : "?";
}

/* Memory and random values for the tests of the codec; see the header. */
#include "tests/support/wire.h"

#include "proto/codec.h"
#include "proto/frame.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

int ds4_wire_set_up(void **state)
{
    struct ds4_wire_fixture *f = calloc(1, sizeof(*f));

    ds4_arena_init(&f->arena, DS4_CODEC_ARENA_BYTES);
    ds4_arena_init(&f->made, DS4_CODEC_ARENA_BYTES);
    ds4_buf_init(&f->buf, DS4_MAX_FRAME_BYTES);
    f->random = 42;
    *state = f;
    return 0;
}

int ds4_wire_tear_down(void **state)
{
    struct ds4_wire_fixture *f = *state;

    ds4_arena_deinit(&f->arena);
    ds4_arena_deinit(&f->made);
    ds4_buf_deinit(&f->buf);
    free(f);
    return 0;
}

void ds4_wire_start_over(struct ds4_wire_fixture *f)
{
    ds4_arena_reset(&f->arena, (struct ds4_arena_mark){0});
    ds4_arena_reset(&f->made, (struct ds4_arena_mark){0});
    ds4_buf_clear(&f->buf);
}

/* splitmix64 */
uint64_t ds4_wire_next(struct ds4_wire_fixture *f)
{
    uint64_t z = f->random += 0x9e3779b97f4a7c15;

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

int32_t ds4_wire_pick(struct ds4_wire_fixture *f, int32_t min, int32_t max)
{
    return (int32_t)(min + (int64_t)(ds4_wire_next(f) % (uint64_t)((int64_t)max - min + 1)));
}

float ds4_wire_pick_real(struct ds4_wire_fixture *f, float min, float max)
{
    return min + (max - min) * (float)(ds4_wire_next(f) >> 40) / (float)(1 << 24);
}

int32_t *ds4_wire_pick_ids(struct ds4_wire_fixture *f, int32_t n, int32_t max)
{
    int32_t *ids = ds4_arena_take_array(&f->made, (size_t)n, sizeof(*ids));

    assert_non_null(ids);
    for (int32_t i = 0; i < n; i++)
        ids[i] = ds4_wire_pick(f, 0, max);
    return ids;
}

void ds4_wire_pick_text(struct ds4_wire_fixture *f, char *text, size_t cap)
{
    size_t len = (size_t)ds4_wire_pick(f, 0, (int32_t)cap - 1);

    memset(text, 0, cap);
    for (size_t i = 0; i < len; i++)
        text[i] = (char)ds4_wire_pick(f, ' ', '~');
}

void ds4_wire_pick_id(struct ds4_wire_fixture *f, uint8_t id[DS4_ID_BYTES])
{
    for (int i = 0; i < DS4_ID_BYTES; i++)
        id[i] = (uint8_t)ds4_wire_next(f);
}

struct ds4_str ds4_wire_payload(const struct ds4_wire_fixture *f)
{
    return ds4_buf_view(&f->buf);
}

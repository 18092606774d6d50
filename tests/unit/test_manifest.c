/* Manifest bytes: what was written comes back, and nothing else is believed. */
#include "common/crc32c.h"
#include "router/disk/manifest.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define N_STAGE 3

static void fill(struct ds4_manifest *m, int32_t pos)
{
    int32_t n_object = pos / DS4_EXTENT_TOK + 1;
    struct ds4_err err = {0};

    assert_int_equal(ds4_manifest_init(m, n_object, n_object * N_STAGE, &err), 0);
    m->pos = pos;
    m->kind = DS4_KV_TAIL;
    m->shared = pos % 2 == 0;
    m->created_ns = UINT64_C(1796050685000000001);
    memset(m->fingerprint, 3, DS4_ID_BYTES);
    memset(m->commit, 4, DS4_ID_BYTES);
    memset(m->floor_key, 5, DS4_ID_BYTES);
    for (int32_t i = 0; i < n_object; i++) {
        memset(m->object[i].key, 10 + i, DS4_ID_BYTES);
        m->object[i].first_file = i * N_STAGE;
        m->object[i].n_file = N_STAGE;
        for (int32_t f = 0; f < N_STAGE; f++) {
            struct ds4_kv_part_ref *file = &m->file[i * N_STAGE + f];

            file->first_layer = 15 * f;
            file->last_layer = 15 * f + 15;
            file->bytes = 1000003 * (uint64_t)(i + 1) + (uint64_t)f;
            memset(file->digest, 100 + f, DS4_ID_BYTES);
        }
    }
    m->token = malloc((size_t)pos * sizeof(*m->token));
    assert_non_null(m->token);
    for (int32_t t = 0; t < pos; t++)
        m->token[t] = (t * 7919) % 129280;
}

static struct ds4_buf bytes_of(const struct ds4_manifest *m)
{
    struct ds4_buf out;
    struct ds4_err err = {0};

    ds4_buf_init(&out, DS4_MANIFEST_MAX_BYTES);
    assert_int_equal(ds4_manifest_write(m, &out, &err), 0);
    return out;
}

static void assert_same(const struct ds4_manifest *a, const struct ds4_manifest *b)
{
    assert_int_equal(a->pos, b->pos);
    assert_int_equal(a->kind, b->kind);
    assert_int_equal(a->shared, b->shared);
    assert_true(a->created_ns == b->created_ns);
    assert_memory_equal(a->fingerprint, b->fingerprint, DS4_ID_BYTES);
    assert_memory_equal(a->commit, b->commit, DS4_ID_BYTES);
    assert_memory_equal(a->floor_key, b->floor_key, DS4_ID_BYTES);
    assert_int_equal(a->n_object, b->n_object);
    assert_int_equal(a->n_file, b->n_file);
    assert_memory_equal(a->object, b->object, (size_t)a->n_object * sizeof(*a->object));
    assert_memory_equal(a->file, b->file, (size_t)a->n_file * sizeof(*a->file));
}

static void what_is_written_comes_back(void **state)
{
    static const int32_t pos[] = {1, 255, 1023, 1024, 1025, 2048, 5000};

    (void)state;
    for (size_t i = 0; i < sizeof(pos) / sizeof(pos[0]); i++) {
        struct ds4_manifest m, again;
        enum ds4_kv_reason reason;
        struct ds4_err err = {0};
        struct ds4_buf out;
        size_t head;

        fill(&m, pos[i]);
        out = bytes_of(&m);
        head =
            ds4_manifest_peek((uint8_t *)out.ptr, DS4_MANIFEST_FIXED_BYTES, out.len, &reason, &err);
        assert_true(head > DS4_MANIFEST_FIXED_BYTES && head < out.len);
        assert_int_equal(ds4_manifest_read((uint8_t *)out.ptr, out.len, &again, &reason, &err), 0);
        assert_same(&m, &again);
        assert_memory_equal(m.token, again.token, (size_t)m.pos * sizeof(*m.token));
        assert_int_equal(again.bytes, out.len);
        ds4_manifest_deinit(&again);
        /* The head alone: all a start needs to know. */
        assert_int_equal(ds4_manifest_read((uint8_t *)out.ptr, head, &again, &reason, &err), 0);
        assert_same(&m, &again);
        assert_null(again.token);
        ds4_manifest_deinit(&again);
        ds4_manifest_deinit(&m);
        ds4_buf_deinit(&out);
    }
}

static void the_first_bytes_are_those_of_the_format(void **state)
{
    struct ds4_manifest m;
    struct ds4_buf out;

    (void)state;
    fill(&m, 1500);
    out = bytes_of(&m);
    assert_memory_equal(out.ptr, "DS4KVM\0\1\1\0\0\0\1\0\0\0", 16);
    assert_memory_equal(out.ptr + 72, "\xdc\5\0\0\3\0\0\0\2\0\0\0\6\0\0\0",
                        16); /* 1500, tail, 2, 6 */
    assert_memory_equal(out.ptr + 88 + 16, "\3\0\0\0", 4);
    assert_int_equal(out.len, 88 + 2 * 24 + 6 * 32 + 4 + 1500 * 4 + 4);
    ds4_manifest_deinit(&m);
    ds4_buf_deinit(&out);
}

static void a_flipped_bit_anywhere_is_found(void **state)
{
    struct ds4_manifest m, again;
    struct ds4_buf out;

    (void)state;
    fill(&m, 1100);
    out = bytes_of(&m);
    for (size_t i = 0; i < out.len; i++)
        for (int bit = 0; bit < 8; bit += 3) {
            enum ds4_kv_reason reason = DS4_KV_OK;

            out.ptr[i] ^= (char)(1 << bit);
            assert_int_equal(ds4_manifest_read((uint8_t *)out.ptr, out.len, &again, &reason, NULL),
                             -1);
            assert_true(reason == DS4_KV_BAD_MAGIC || reason == DS4_KV_BAD_VERSION ||
                        reason == DS4_KV_BAD_SIZE || reason == DS4_KV_BAD_CRC);
            out.ptr[i] ^= (char)(1 << bit);
        }
    ds4_manifest_deinit(&m);
    ds4_buf_deinit(&out);
}

static void every_shorter_file_is_refused(void **state)
{
    struct ds4_manifest m, again;
    enum ds4_kv_reason reason;
    struct ds4_buf out;
    size_t head;

    (void)state;
    fill(&m, 1100);
    out = bytes_of(&m);
    head = ds4_manifest_peek((uint8_t *)out.ptr, out.len, out.len, &reason, NULL);
    for (size_t n = 0; n < out.len; n++) {
        assert_int_equal(ds4_manifest_peek((uint8_t *)out.ptr, n, n, &reason, NULL), 0);
        if (n != head) /* which is one on purpose */
            assert_int_equal(ds4_manifest_read((uint8_t *)out.ptr, n, &again, &reason, NULL), -1);
    }
    assert_int_equal(ds4_manifest_peek((uint8_t *)out.ptr, out.len, out.len + 1, &reason, NULL), 0);
    ds4_manifest_deinit(&m);
    ds4_buf_deinit(&out);
}

/* Checksums protect from accidents; counts are checked whatever they say. */
static void counts_that_cannot_be_are_refused_under_a_right_checksum(void **state)
{
    static const struct {
        size_t at;
        uint32_t value;
    } lies[] = {
        {12, 2},
        {72, 0},
        {72, UINT32_MAX},
        {76, 1},
        {76, 9},
        {80, 3},
        {84, 5},
        {84, UINT32_MAX},
        {88 + 16, 0},
        {88 + 16, 65},
        {88 + 24 + 16, 4},
        {88 + 48, 90},
        {88 + 48 + 4, UINT32_MAX},
        {88 + 48 + 12, UINT32_MAX},
    };
    struct ds4_manifest m, again;
    struct ds4_buf out;

    (void)state;
    fill(&m, 1500);
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        enum ds4_kv_reason reason = DS4_KV_OK;
        size_t head = 88 + 2 * 24 + 6 * 32;
        uint32_t crc;

        out = bytes_of(&m);
        memcpy(out.ptr + lies[i].at, &lies[i].value, 4);
        crc = ds4_crc32c(0, out.ptr, head);
        memcpy(out.ptr + head, &crc, 4);
        assert_int_equal(ds4_manifest_read((uint8_t *)out.ptr, out.len, &again, &reason, NULL), -1);
        assert_int_not_equal(reason, DS4_KV_OK);
        ds4_buf_deinit(&out);
    }
    ds4_manifest_deinit(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_written_comes_back),
        cmocka_unit_test(the_first_bytes_are_those_of_the_format),
        cmocka_unit_test(a_flipped_bit_anywhere_is_found),
        cmocka_unit_test(every_shorter_file_is_refused),
        cmocka_unit_test(counts_that_cannot_be_are_refused_under_a_right_checksum),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

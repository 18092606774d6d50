/* Reader of safetensors: u64 header length, JSON header {name: {dtype, shape, data_offsets}}, data. */
#include "tests/support/golden.h"

#include "common/json.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct golden {
    char *bytes;
    size_t n_bytes;
    size_t data_at; /* offset of the data section */
    struct ds4_json *header;
};

char *golden_read_file(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    char *bytes;
    long size;

    if (f == NULL)
        fail_msg("cannot open %s", path);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    size = ftell(f);
    assert_true(size >= 0);
    rewind(f);
    bytes = malloc((size_t)size + 1);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, (size_t)size, f), (size_t)size);
    bytes[size] = '\0';
    fclose(f);
    *n = (size_t)size;
    return bytes;
}

struct golden *golden_open(const char *path)
{
    struct golden *g = calloc(1, sizeof(*g));
    struct ds4_err err = {0};
    struct ds4_str text;
    uint64_t n_header;

    assert_non_null(g);
    g->bytes = golden_read_file(path, &g->n_bytes);
    assert_true(g->n_bytes >= sizeof(n_header));
    memcpy(&n_header, g->bytes, sizeof(n_header));
    assert_true(n_header <= g->n_bytes - sizeof(n_header));
    text.ptr = g->bytes + sizeof(n_header);
    text.len = (size_t)n_header;
    g->data_at = sizeof(n_header) + (size_t)n_header;
    g->header = ds4_json_parse(text, &err);
    if (g->header == NULL)
        fail_msg("%s: %s", path, err.msg);
    return g;
}

void golden_close(struct golden *g)
{
    ds4_json_free(g->header);
    free(g->bytes);
    free(g);
}

struct golden_tensor golden_get(const struct golden *g, const char *name, const char *dtype)
{
    const struct ds4_json *entry = ds4_json_find(g->header, name);
    const struct ds4_json *shape = ds4_json_find(entry, "shape");
    const struct ds4_json *span = ds4_json_find(entry, "data_offsets");
    struct ds4_str type = ds4_json_str(ds4_json_find(entry, "dtype"));
    struct golden_tensor t = {.n = 1};
    size_t from, to;

    if (entry == NULL)
        fail_msg("no golden tensor %s", name);
    assert_int_equal(type.len, strlen(dtype));
    assert_memory_equal(type.ptr, dtype, type.len);
    assert_true(ds4_json_len(shape) <= GOLDEN_MAX_DIMS);
    t.n_dims = (int32_t)ds4_json_len(shape);
    for (int32_t i = 0; i < t.n_dims; i++) {
        t.shape[i] = ds4_json_int(ds4_json_at(shape, (size_t)i));
        t.n *= (size_t)t.shape[i];
    }
    from = (size_t)ds4_json_int(ds4_json_at(span, 0));
    to = (size_t)ds4_json_int(ds4_json_at(span, 1));
    assert_true(from <= to && to <= g->n_bytes - g->data_at);
    assert_int_equal(to - from, t.n * 4);
    t.data = g->bytes + g->data_at + from;
    assert_int_equal((uintptr_t)t.data % 4, 0);
    return t;
}

double golden_rel_l2(const float *a, const float *b, size_t n)
{
    double diff = 0;
    double norm = 0;

    for (size_t i = 0; i < n; i++) {
        diff += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        norm += (double)b[i] * (double)b[i];
    }
    return norm > 0 ? sqrt(diff / norm) : sqrt(diff);
}

/* Reads the header of a GGUF file with one bounded cursor.
 *
 * Counts are checked against the smallest possible entry before anything is allocated for them, so
 * memory stays within a small multiple of the file's own size.  Views are kept as offsets while the
 * cursor's copy may still move and become pointers at the end (settle).  Duplicates and overlaps are
 * found by sorting, not by hashing: no input makes that slow. */
#include "common/gguf.h"

#include "common/gguf_cursor.h"
#include "common/vec.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define MIN_KV_BYTES     14 /* 8 length, 1 key byte, 4 type, 1 value */
#define MIN_TENSOR_BYTES 33 /* 8 length, 1 name byte, 4 dims, 8 ne, 4 type, 8 offset */
#define LENGTH_BYTES     8  /* of a string */

static bool printable(struct ds4_str s)
{
    for (size_t i = 0; i < s.len; i++) {
        if (s.ptr[i] < 0x20 || s.ptr[i] > 0x7e) /* outside printable ASCII */
            return false;
    }
    return true;
}

/* ---- metadata ---------------------------------------------------------------------------------- */

/* An entry while the header copy may still move. */
struct raw_kv {
    size_t key_at;
    size_t key_len;
    enum ds4_gguf_type type;
    bool is_array;
    uint64_t n;
    size_t data_at;
    uint32_t *str_at; /* owned */
};

DS4_VEC_TYPE(raw_kvs, struct raw_kv);
DS4_VEC_TYPE(tensors, struct ds4_tensor_info);

static int take_bools(struct ds4_gguf_cursor *c, uint64_t n, struct ds4_err *err)
{
    const uint8_t *p = ds4_gguf_cursor_take(c, n, "its value", err);

    if (p == NULL)
        return -1;
    for (uint64_t i = 0; i < n; i++) {
        if (p[i] > 1)
            return ds4_gguf_cursor_fail(c, err, "a bool has the value %d", p[i]);
    }
    return 0;
}

static int take_strings(struct ds4_gguf_cursor *c, struct raw_kv *kv, struct ds4_err *err)
{
    size_t at;
    size_t len;

    if (kv->n > ds4_gguf_cursor_left(c) / LENGTH_BYTES)
        return ds4_gguf_cursor_fail(
            c, err, "truncated at its value: %" PRIu64 " strings do not fit in %" PRIu64 " bytes",
            kv->n, ds4_gguf_cursor_left(c));
    kv->str_at = malloc(kv->n == 0 ? 1 : (size_t)kv->n * sizeof(*kv->str_at));
    if (kv->str_at == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "out of memory for %" PRIu64 " strings", kv->n);
    for (uint64_t i = 0; i < kv->n; i++) {
        kv->str_at[i] = (uint32_t)(c->pos - kv->data_at);
        if (ds4_gguf_cursor_str(c, "a string of the array", DS4_GGUF_MAX_STRING_BYTES, &at, &len,
                                err))
            return -1;
    }
    return 0;
}

static int take_value(struct ds4_gguf_cursor *c, struct raw_kv *kv, struct ds4_err *err)
{
    uint64_t bytes;
    size_t at;
    size_t len;

    kv->data_at = c->pos;
    if (kv->type == DS4_GGUF_STRING && kv->is_array)
        return take_strings(c, kv, err);
    if (kv->type == DS4_GGUF_STRING)
        return ds4_gguf_cursor_str(c, "its value", DS4_GGUF_MAX_STRING_BYTES, &at, &len, err);
    if (kv->type == DS4_GGUF_BOOL)
        return take_bools(c, kv->n, err);
    if (__builtin_mul_overflow(kv->n, (uint64_t)ds4_gguf_type_bytes(kv->type), &bytes))
        return ds4_gguf_cursor_fail(
            c, err, "the size of an array of %" PRIu64 " elements overflows", kv->n);
    return ds4_gguf_cursor_take(c, bytes, "its value", err) == NULL ? -1 : 0;
}

static int take_type(struct ds4_gguf_cursor *c, const char *what, enum ds4_gguf_type *out,
                     struct ds4_err *err)
{
    uint32_t type;

    if (ds4_gguf_cursor_u32(c, what, &type, err))
        return -1;
    if (type >= DS4_GGUF_N_TYPES)
        return ds4_gguf_cursor_fail(c, err, "%s is %" PRIu32 ", which is unknown", what, type);
    *out = (enum ds4_gguf_type)type;
    return 0;
}

static int take_kv(struct ds4_gguf_cursor *c, struct raw_kv *kv, struct ds4_err *err)
{
    struct ds4_str key;

    memset(kv, 0, sizeof(*kv));
    c->name[0] = '\0';
    if (ds4_gguf_cursor_str(c, "the key", DS4_GGUF_MAX_KEY_BYTES, &kv->key_at, &kv->key_len, err))
        return -1;
    key = (struct ds4_str){(const char *)c->bytes + kv->key_at, kv->key_len};
    if (key.len == 0)
        return ds4_gguf_cursor_fail(c, err, "the key is empty");
    if (!printable(key))
        return ds4_gguf_cursor_fail(c, err, "the key has bytes outside printable ASCII");
    ds4_gguf_cursor_set_name(c, key);
    if (take_type(c, "the value type", &kv->type, err))
        return -1;
    kv->n = 1;
    kv->is_array = kv->type == DS4_GGUF_ARRAY;
    if (kv->is_array) {
        if (take_type(c, "the element type", &kv->type, err))
            return -1;
        if (kv->type == DS4_GGUF_ARRAY)
            return ds4_gguf_cursor_fail(c, err, "arrays of arrays are not supported");
        if (ds4_gguf_cursor_u64(c, "the element count", &kv->n, err))
            return -1;
        if (kv->n > ds4_gguf_cursor_left(c))
            return ds4_gguf_cursor_fail(c, err,
                                        "truncated at its value: %" PRIu64
                                        " elements do not fit in %" PRIu64 " bytes",
                                        kv->n, ds4_gguf_cursor_left(c));
        if (kv->n > DS4_GGUF_MAX_ARRAY)
            return ds4_gguf_cursor_fail(c, err,
                                        "an array has %" PRIu64 " elements, the limit is %u", kv->n,
                                        DS4_GGUF_MAX_ARRAY);
    }
    return take_value(c, kv, err);
}

static int take_kvs(struct ds4_gguf_cursor *c, uint64_t n, struct raw_kvs *kvs, struct ds4_err *err)
{
    struct raw_kv kv;

    c->unit = "metadata entry";
    for (c->index = 0; c->index < n; c->index++) {
        if (take_kv(c, &kv, err)) {
            free(kv.str_at);
            return -1;
        }
        if (DS4_VEC_PUSH(kvs, kv)) {
            free(kv.str_at);
            return ds4_fail(err, DS4_E_NOMEM, "out of memory for %" PRIu64 " entries", n);
        }
    }
    return 0;
}

/* ---- tensor table ------------------------------------------------------------------------------ */

/* Fills type, sizes and usability from the id; the extent is checked once the data offset is known. */
static int size_tensor(struct ds4_gguf_cursor *c, struct ds4_tensor_info *t, struct ds4_err *err)
{
    const char *type = ds4_gguf_tensor_type_name(t->gguf_type);
    int32_t block_elems;
    int32_t block_bytes;
    uint64_t elems = 1;

    for (int32_t d = 0; d < t->n_dims; d++) {
        if (__builtin_mul_overflow(elems, (uint64_t)t->ne[d], &elems) || elems > INT64_MAX)
            return ds4_gguf_cursor_fail(c, err, "the number of its elements overflows");
    }
    t->dtype = DS4_N_DTYPES;
    t->usable = ds4_dtype_from_gguf(t->gguf_type, &t->dtype) == 0;
    if (ds4_gguf_tensor_type_size(t->gguf_type, &block_elems, &block_bytes))
        return 0;
    if (t->ne[0] % block_elems != 0)
        return ds4_gguf_cursor_fail(
            c, err, "its rows of %" PRId64 " values are no multiple of %s's block of %d", t->ne[0],
            type, block_elems);
    if (__builtin_mul_overflow(elems / (uint64_t)block_elems, (uint64_t)block_bytes, &t->bytes))
        return ds4_gguf_cursor_fail(c, err, "its size overflows");
    return 0;
}

static int take_tensor(struct ds4_gguf_cursor *c, struct ds4_tensor_info *t, struct ds4_err *err)
{
    struct ds4_str name;
    size_t at;
    size_t len;
    uint32_t n_dims;
    uint64_t ne;

    memset(t, 0, sizeof(*t));
    c->name[0] = '\0';
    if (ds4_gguf_cursor_str(c, "the name", DS4_TENSOR_NAME_BYTES - 1, &at, &len, err))
        return -1;
    name = (struct ds4_str){(const char *)c->bytes + at, len};
    if (name.len == 0)
        return ds4_gguf_cursor_fail(c, err, "the name is empty");
    if (!printable(name))
        return ds4_gguf_cursor_fail(c, err, "the name has bytes outside printable ASCII");
    memcpy(t->name, name.ptr, name.len);
    ds4_gguf_cursor_set_name(c, name);
    if (ds4_gguf_cursor_u32(c, "the number of dimensions", &n_dims, err))
        return -1;
    if (n_dims == 0 || n_dims > DS4_GGUF_MAX_DIMS)
        return ds4_gguf_cursor_fail(c, err, "it has %" PRIu32 " dimensions, must be 1 to %d",
                                    n_dims, DS4_GGUF_MAX_DIMS);
    t->n_dims = (int32_t)n_dims;
    for (int d = 0; d < DS4_GGUF_MAX_DIMS; d++) {
        ne = 1;
        if (d < t->n_dims && ds4_gguf_cursor_u64(c, "a dimension", &ne, err))
            return -1;
        if (ne == 0 || ne > INT64_MAX)
            return ds4_gguf_cursor_fail(c, err, "dimension %d is %" PRIu64, d, ne);
        t->ne[d] = (int64_t)ne;
    }
    if (ds4_gguf_cursor_u32(c, "the type", &t->gguf_type, err) ||
        ds4_gguf_cursor_u64(c, "the offset", &t->offset, err))
        return -1;
    return size_tensor(c, t, err);
}

static int take_tensors(struct ds4_gguf_cursor *c, uint64_t n, struct tensors *tensors,
                        struct ds4_err *err)
{
    struct ds4_tensor_info t;

    c->unit = "tensor";
    for (c->index = 0; c->index < n; c->index++) {
        if (take_tensor(c, &t, err))
            return -1;
        if (DS4_VEC_PUSH(tensors, t))
            return ds4_fail(err, DS4_E_NOMEM, "out of memory for %" PRIu64 " tensors", n);
    }
    return 0;
}

/* Alignment, start and extent of one tensor; turns its offset into one from the file's start. */
static int place_tensor(const struct ds4_gguf *g, struct ds4_tensor_info *t, struct ds4_err *err)
{
    uint64_t begin;

    if (t->offset % g->alignment != 0)
        return ds4_fail(err, DS4_E_CORRUPT,
                        "tensor %s: its offset %" PRIu64 " is no multiple of %" PRIu32, t->name,
                        t->offset, g->alignment);
    if (__builtin_add_overflow(g->data_offset, t->offset, &begin))
        return ds4_fail(err, DS4_E_CORRUPT, "tensor %s: its offset %" PRIu64 " overflows", t->name,
                        t->offset);
    if (begin > g->file_bytes || t->bytes > g->file_bytes - begin)
        return ds4_fail(err, DS4_E_CORRUPT,
                        "tensor %s: truncated: its %" PRIu64 " bytes at %" PRIu64
                        " end past the file's %" PRIu64,
                        t->name, t->bytes, begin, g->file_bytes);
    t->offset = begin;
    return 0;
}

static int compare_offset(const void *a, const void *b)
{
    const struct ds4_tensor_info *x = *(const struct ds4_tensor_info *const *)a;
    const struct ds4_tensor_info *y = *(const struct ds4_tensor_info *const *)b;

    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

static int compare_name(const void *a, const void *b)
{
    const struct ds4_tensor_info *x = *(const struct ds4_tensor_info *const *)a;
    const struct ds4_tensor_info *y = *(const struct ds4_tensor_info *const *)b;

    return strcmp(x->name, y->name);
}

/* No two tensors share a byte; one of unknown size counts as one byte.  Holes are only counted. */
static int check_overlap(struct ds4_gguf *g, const struct ds4_tensor_info **order,
                         struct ds4_err *err)
{
    const struct ds4_tensor_info *prev = NULL;
    uint64_t end = g->data_offset;

    qsort(order, g->n_tensor, sizeof(*order), compare_offset);
    for (size_t i = 0; i < g->n_tensor; i++) {
        if (prev != NULL && order[i]->offset < end)
            return ds4_fail(err, DS4_E_CORRUPT, "tensors %s and %s overlap", prev->name,
                            order[i]->name);
        if (order[i]->offset - end >= g->alignment)
            g->n_holes++;
        prev = order[i];
        end = prev->offset + (prev->bytes == 0 ? 1 : prev->bytes);
    }
    return 0;
}

static int check_tensors(struct ds4_gguf *g, struct ds4_err *err)
{
    const struct ds4_tensor_info **order;
    int rc = -1;

    if (g->n_tensor == 0)
        return 0;
    if (g->data_offset > g->file_bytes)
        return ds4_fail(err, DS4_E_CORRUPT,
                        "truncated: the data section begins at %" PRIu64 ", the file has %" PRIu64
                        " bytes",
                        g->data_offset, g->file_bytes);
    order = malloc(g->n_tensor * sizeof(*order));
    if (order == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "out of memory for %zu tensors", g->n_tensor);
    for (size_t i = 0; i < g->n_tensor; i++) {
        if (place_tensor(g, &g->tensor[i], err))
            goto out;
        if (i > 0 && g->tensor[i].offset < g->tensor[i - 1].offset)
            g->n_reordered++;
        order[i] = &g->tensor[i];
    }
    qsort(order, g->n_tensor, sizeof(*order), compare_name);
    for (size_t i = 1; i < g->n_tensor; i++) {
        if (strcmp(order[i]->name, order[i - 1]->name) == 0) {
            ds4_fail(err, DS4_E_CORRUPT, "tensor %s occurs twice", order[i]->name);
            goto out;
        }
    }
    rc = check_overlap(g, order, err);
out:
    free(order);
    return rc;
}

/* ---- the whole header -------------------------------------------------------------------------- */

/* A count is refused before anything is allocated for it. */
static int check_count(const struct ds4_gguf_cursor *c, const char *what, uint64_t n, uint64_t max,
                       uint64_t min_bytes, struct ds4_err *err)
{
    if (n > max)
        return ds4_fail(err, DS4_E_CORRUPT, "%s is %" PRIu64 ", the limit is %" PRIu64, what, n,
                        max);
    if (n > ds4_gguf_cursor_left(c) / min_bytes)
        return ds4_fail(err, DS4_E_CORRUPT,
                        "truncated: %s is %" PRIu64 ", which does not fit in %" PRIu64 " bytes",
                        what, n, ds4_gguf_cursor_left(c));
    return 0;
}

static int take_prefix(struct ds4_gguf_cursor *c, struct ds4_gguf *g, uint64_t *n_tensor,
                       uint64_t *n_kv, struct ds4_err *err)
{
    const uint8_t *p = ds4_gguf_cursor_take(c, DS4_GGUF_PREFIX_BYTES, "header", err);

    if (p == NULL)
        return -1;
    if (ds4_gguf_load_u32(p) != DS4_GGUF_MAGIC)
        return ds4_fail(err, DS4_E_CORRUPT, "bad magic %02x %02x %02x %02x: this is no GGUF file",
                        p[0], p[1], p[2], p[3]);
    g->version = ds4_gguf_load_u32(p + 4);
    if ((g->version & 0xffff) == 0 && g->version != 0)
        return ds4_fail(err, DS4_E_CORRUPT,
                        "version 0x%08" PRIx32 ": the file is byte-swapped (big-endian)",
                        g->version);
    if (g->version < DS4_GGUF_MIN_VERSION || g->version > DS4_GGUF_VERSION)
        return ds4_fail(err, DS4_E_CORRUPT, "version %" PRIu32 " is not supported, must be 2 or 3",
                        g->version);
    *n_tensor = ds4_gguf_load_u64(p + 8);
    *n_kv = ds4_gguf_load_u64(p + 16);
    if (check_count(c, "kv_count", *n_kv, DS4_GGUF_MAX_KV, MIN_KV_BYTES, err))
        return -1;
    return check_count(c, "tensor_count", *n_tensor, DS4_GGUF_MAX_TENSORS, MIN_TENSOR_BYTES, err);
}

static int compare_key(const void *a, const void *b, void *arg)
{
    const struct ds4_gguf_kv *kv = arg;
    struct ds4_str x = kv[*(const uint32_t *)a].key;
    struct ds4_str y = kv[*(const uint32_t *)b].key;
    int order = memcmp(x.ptr, y.ptr, x.len < y.len ? x.len : y.len);

    if (order != 0)
        return order;
    return x.len < y.len ? -1 : x.len > y.len;
}

/* Moves the copy and the entries into *g, offsets becoming pointers, and indexes the keys. */
static int settle(struct ds4_gguf_cursor *c, struct raw_kvs *raw, struct ds4_gguf *g,
                  struct ds4_err *err)
{
    uint8_t *exact = realloc(c->bytes, c->pos);
    struct ds4_str key;

    g->header = exact != NULL ? exact : c->bytes;
    g->header_bytes = c->pos;
    c->bytes = NULL;
    g->kv = calloc(raw->len + 1, sizeof(*g->kv));
    g->kv_order = calloc(raw->len + 1, sizeof(*g->kv_order));
    if (g->kv == NULL || g->kv_order == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "out of memory for %zu metadata entries", raw->len);
    for (size_t i = 0; i < raw->len; i++) {
        const struct raw_kv *from = &raw->ptr[i];

        g->kv[i] = (struct ds4_gguf_kv){
            {(const char *)g->header + from->key_at, from->key_len},
            from->type,
            from->is_array,
            from->n,
            g->header + from->data_at,
            from->str_at,
        };
        g->kv_order[i] = (uint32_t)i;
    }
    g->n_kv = raw->len;
    raw->len = 0; /* the string tables moved */
    qsort_r(g->kv_order, g->n_kv, sizeof(*g->kv_order), compare_key, g->kv);
    for (size_t i = 1; i < g->n_kv; i++) {
        key = g->kv[g->kv_order[i]].key;
        if (ds4_str_equal(key, g->kv[g->kv_order[i - 1]].key))
            return ds4_fail(err, DS4_E_CORRUPT, "metadata key %.*s occurs twice", DS4_STR_ARG(key));
    }
    return 0;
}

static int read_alignment(struct ds4_gguf *g, struct ds4_err *err)
{
    const struct ds4_gguf_kv *kv = ds4_gguf_find(g, "general.alignment");

    g->alignment = DS4_GGUF_ALIGNMENT;
    if (kv == NULL)
        return 0;
    if (kv->type != DS4_GGUF_U32 || kv->is_array)
        return ds4_fail(err, DS4_E_CORRUPT, "general.alignment must be u32, is %s%s",
                        kv->is_array ? "an array of " : "", ds4_gguf_type_name(kv->type));
    g->alignment = ds4_gguf_load_u32(kv->data);
    if (g->alignment < DS4_GGUF_MIN_ALIGNMENT || g->alignment > DS4_GGUF_MAX_ALIGNMENT ||
        (g->alignment & (g->alignment - 1)) != 0)
        return ds4_fail(err, DS4_E_CORRUPT,
                        "general.alignment is %" PRIu32 ", must be a power of two in [%d, %d]",
                        g->alignment, DS4_GGUF_MIN_ALIGNMENT, DS4_GGUF_MAX_ALIGNMENT);
    return 0;
}

int ds4_gguf_read(int fd, struct ds4_gguf *gguf, struct ds4_err *err)
{
    struct ds4_gguf_cursor c = {.fd = fd, .unit = "file", .name = "header"};
    struct raw_kvs raw = {0};
    struct tensors tensors = {0};
    struct stat st;
    uint64_t n_tensor = 0;
    uint64_t n_kv = 0;
    int rc = -1;

    memset(gguf, 0, sizeof(*gguf));
    if (fstat(fd, &st) != 0)
        return ds4_fail(err, DS4_E_IO, "could not stat the file: %s", strerror(errno));
    if (!S_ISREG(st.st_mode))
        return ds4_fail(err, DS4_E_INVALID, "this is no regular file");
    c.file_bytes = (uint64_t)st.st_size;
    gguf->file_bytes = c.file_bytes;
    if (take_prefix(&c, gguf, &n_tensor, &n_kv, err) || take_kvs(&c, n_kv, &raw, err) ||
        take_tensors(&c, n_tensor, &tensors, err) || settle(&c, &raw, gguf, err) ||
        read_alignment(gguf, err))
        goto out;
    gguf->tensor = tensors.ptr;
    gguf->n_tensor = tensors.len;
    tensors.ptr = NULL;
    gguf->data_offset =
        ((uint64_t)gguf->header_bytes + gguf->alignment - 1) & ~((uint64_t)gguf->alignment - 1);
    rc = check_tensors(gguf, err);
out:
    for (size_t i = 0; i < raw.len; i++)
        free(raw.ptr[i].str_at);
    DS4_VEC_DEINIT(&raw);
    DS4_VEC_DEINIT(&tensors);
    free(c.bytes);
    if (rc != 0)
        ds4_gguf_deinit(gguf);
    return rc;
}

void ds4_gguf_deinit(struct ds4_gguf *gguf)
{
    for (size_t i = 0; i < gguf->n_kv; i++)
        free((void *)gguf->kv[i].str_at);
    free(gguf->kv);
    free(gguf->kv_order);
    free(gguf->tensor);
    free(gguf->header);
    memset(gguf, 0, sizeof(*gguf));
}

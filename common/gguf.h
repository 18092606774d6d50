/* The header of one GGUF file (version 2 or 3): metadata and tensor table, checked and indexed.
 *
 * Everything here is bytes of a stranger: counts, lengths, offsets and types are checked before they
 * are used, and an error names the entry it is about.  struct ds4_gguf owns a copy of the header, so
 * metadata stays readable when the file shrinks or goes away; every view and pointer obtained from it
 * lives until ds4_gguf_deinit.  The tensor data itself is the business of common/weights_file.h. */
#ifndef DS4_COMMON_GGUF_H
#define DS4_COMMON_GGUF_H

#include "common/dtype.h"
#include "common/err.h"
#include "common/str.h"

#include <stdbool.h>
#include <stdint.h>

#define DS4_GGUF_MAGIC            UINT32_C(0x46554747) /* "GGUF" */
#define DS4_GGUF_MIN_VERSION      2
#define DS4_GGUF_VERSION          3
#define DS4_GGUF_PREFIX_BYTES     24 /* magic, version, two counts */
#define DS4_GGUF_ALIGNMENT        32 /* unless general.alignment says otherwise */
#define DS4_GGUF_MIN_ALIGNMENT    8
#define DS4_GGUF_MAX_ALIGNMENT    65536
#define DS4_GGUF_MAX_KV           65536
#define DS4_GGUF_MAX_TENSORS      1048576
#define DS4_GGUF_MAX_KEY_BYTES    65535
#define DS4_GGUF_MAX_STRING_BYTES (64u << 20)
#define DS4_GGUF_MAX_ARRAY        (16u << 20)
#define DS4_GGUF_MAX_HEADER_BYTES (512u << 20)
#define DS4_GGUF_MAX_DIMS         4
#define DS4_TENSOR_NAME_BYTES     64 /* with the NUL */

enum ds4_gguf_type {
    DS4_GGUF_U8,
    DS4_GGUF_I8,
    DS4_GGUF_U16,
    DS4_GGUF_I16,
    DS4_GGUF_U32,
    DS4_GGUF_I32,
    DS4_GGUF_F32,
    DS4_GGUF_BOOL,
    DS4_GGUF_STRING,
    DS4_GGUF_ARRAY,
    DS4_GGUF_U64,
    DS4_GGUF_I64,
    DS4_GGUF_F64,
    DS4_GGUF_N_TYPES
};

/* One metadata entry.  A scalar is an array of one element whose is_array is false. */
struct ds4_gguf_kv {
    struct ds4_str key;
    enum ds4_gguf_type type; /* of the elements; never DS4_GGUF_ARRAY */
    bool is_array;
    uint64_t n;             /* elements */
    const uint8_t *data;    /* packed, little-endian; strings: u64 length, bytes, u64 length, ... */
    const uint32_t *str_at; /* string arrays: offset of element i's length field from data */
};

/* One tensor.  ne[0] is the contiguous dimension; unused dims are 1. */
struct ds4_tensor_info {
    char name[DS4_TENSOR_NAME_BYTES];
    bool usable; /* false: a type we cannot compute with; dtype is then DS4_N_DTYPES */
    enum ds4_dtype dtype;
    uint32_t gguf_type;
    int32_t n_dims;
    int64_t ne[DS4_GGUF_MAX_DIMS];
    int32_t shard;   /* index of the file in a split set */
    uint64_t offset; /* of the first byte in that file */
    uint64_t bytes;  /* 0 if the type's size is unknown */
};

struct ds4_gguf {
    uint32_t version;
    uint32_t alignment;
    uint64_t file_bytes;    /* when it was read */
    uint64_t data_offset;   /* start of the data section */
    struct ds4_gguf_kv *kv; /* in file order */
    size_t n_kv;
    struct ds4_tensor_info *tensor; /* in file order */
    size_t n_tensor;
    size_t n_holes;     /* gaps before a tensor beyond its alignment: odd, but legal */
    size_t n_reordered; /* tensors that begin before the one listed ahead of them */
    uint8_t *header;    /* owned copy of the file's first header_bytes */
    size_t header_bytes;
    uint32_t *kv_order; /* indices of kv sorted by key */
};

/* Reads and checks the header of an open regular file.  DS4_E_CORRUPT for bad content, DS4_E_IO for a
 * failing read, DS4_E_NOMEM.  On failure *gguf needs no deinit. */
int ds4_gguf_read(int fd, struct ds4_gguf *gguf, struct ds4_err *err) DS4_MUST_CHECK;
void ds4_gguf_deinit(struct ds4_gguf *gguf);

/* Name and block size of a GGUF tensor type, for those we cannot use as well.  NULL and -1 when the id
 * is unknown, removed, or given different meanings by different forks (40 and above). */
const char *ds4_gguf_tensor_type_name(uint32_t gguf_type);
int ds4_gguf_tensor_type_size(uint32_t gguf_type, int32_t *block_elems, int32_t *block_bytes);

/* "u32", "string", ... */
const char *ds4_gguf_type_name(enum ds4_gguf_type type);

/* ---- metadata by key --------------------------------------------------------------------------
 * The entry, or NULL. */
const struct ds4_gguf_kv *ds4_gguf_find(const struct ds4_gguf *gguf, const char *key);
static inline bool ds4_gguf_has(const struct ds4_gguf *gguf, const char *key)
{
    return ds4_gguf_find(gguf, key) != NULL;
}

/* Scalars.  -1 with DS4_E_INVALID naming the key if it is missing, of another kind, or out of range;
 * *out is untouched then.  Files differ in the width of their integers, so an integer key may have any
 * integer type and a float key f32 or f64 (finite).  A bool may be an integer 0 or 1. */
int ds4_gguf_get_i64(const struct ds4_gguf *gguf, const char *key, int64_t min, int64_t max,
                     int64_t *out, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_gguf_get_i32(const struct ds4_gguf *gguf, const char *key, int32_t min, int32_t max,
                     int32_t *out, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_gguf_get_u64(const struct ds4_gguf *gguf, const char *key, uint64_t *out,
                     struct ds4_err *err) DS4_MUST_CHECK;
int ds4_gguf_get_f32(const struct ds4_gguf *gguf, const char *key, float *out,
                     struct ds4_err *err) DS4_MUST_CHECK;
int ds4_gguf_get_bool(const struct ds4_gguf *gguf, const char *key, bool *out,
                      struct ds4_err *err) DS4_MUST_CHECK;
int ds4_gguf_get_str(const struct ds4_gguf *gguf, const char *key, struct ds4_str *out,
                     struct ds4_err *err) DS4_MUST_CHECK;

/* The entry as an array whose elements are integers (floats, strings); NULL with DS4_E_INVALID naming
 * the key if it is missing or something else. */
const struct ds4_gguf_kv *ds4_gguf_get_ints(const struct ds4_gguf *gguf, const char *key,
                                            struct ds4_err *err) DS4_MUST_CHECK;
const struct ds4_gguf_kv *ds4_gguf_get_floats(const struct ds4_gguf *gguf, const char *key,
                                              struct ds4_err *err) DS4_MUST_CHECK;
const struct ds4_gguf_kv *ds4_gguf_get_strings(const struct ds4_gguf *gguf, const char *key,
                                               struct ds4_err *err) DS4_MUST_CHECK;

/* Element i < kv->n of an entry of the fitting kind; O(1), never fails.  Scalars are element 0.
 * A u64 above INT64_MAX reads as INT64_MAX; a bool reads as 0 or 1. */
int64_t ds4_gguf_int_at(const struct ds4_gguf_kv *kv, uint64_t i);
double ds4_gguf_float_at(const struct ds4_gguf_kv *kv, uint64_t i);
struct ds4_str ds4_gguf_str_at(const struct ds4_gguf_kv *kv, uint64_t i);

static inline bool ds4_gguf_is_int(enum ds4_gguf_type type)
{
    return type <= DS4_GGUF_I32 || type == DS4_GGUF_U64 || type == DS4_GGUF_I64;
}

static inline bool ds4_gguf_is_float(enum ds4_gguf_type type)
{
    return type == DS4_GGUF_F32 || type == DS4_GGUF_F64;
}

/* Bytes of a scalar; 0 for strings and arrays. */
size_t ds4_gguf_type_bytes(enum ds4_gguf_type type);

#endif

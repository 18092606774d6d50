/* Metadata of a GGUF file by key: lookup and typed getters over the entries that gguf.c checked.
 *
 * Writers disagree about integer widths (one file has u32 where the next has u64 or i32), so an integer
 * is read from any integer type and then range-checked; the message always names the key. */
#include "common/gguf.h"

#include <inttypes.h>
#include <math.h>

const struct ds4_gguf_kv *ds4_gguf_find(const struct ds4_gguf *gguf, const char *key)
{
    struct ds4_str want = ds4_str_view(key);
    size_t low = 0;
    size_t high = gguf->n_kv;

    while (low < high) {
        size_t mid = low + (high - low) / 2;
        const struct ds4_gguf_kv *kv = &gguf->kv[gguf->kv_order[mid]];
        size_t common = kv->key.len < want.len ? kv->key.len : want.len;
        int order = memcmp(kv->key.ptr, want.ptr, common);

        if (order == 0 && kv->key.len == want.len)
            return kv;
        if (order < 0 || (order == 0 && kv->key.len < want.len))
            low = mid + 1;
        else
            high = mid;
    }
    return NULL;
}

/* ---- elements ---------------------------------------------------------------------------------- */

static uint64_t load(const struct ds4_gguf_kv *kv, uint64_t i)
{
    size_t n = ds4_gguf_type_bytes(kv->type);
    const uint8_t *p = kv->data + i * n;
    uint64_t value = 0;

    for (size_t b = 0; b < n; b++)
        value |= (uint64_t)p[b] << (8 * b);
    return value;
}

int64_t ds4_gguf_int_at(const struct ds4_gguf_kv *kv, uint64_t i)
{
    uint64_t raw = load(kv, i);

    switch (kv->type) {
    case DS4_GGUF_I8:
        return (int8_t)raw;
    case DS4_GGUF_I16:
        return (int16_t)raw;
    case DS4_GGUF_I32:
        return (int32_t)raw;
    case DS4_GGUF_I64:
        return (int64_t)raw;
    default:
        return raw > INT64_MAX ? INT64_MAX : (int64_t)raw;
    }
}

double ds4_gguf_float_at(const struct ds4_gguf_kv *kv, uint64_t i)
{
    uint64_t raw = load(kv, i);
    double value;

    if (kv->type == DS4_GGUF_F32)
        return (double)ds4_f32_from_bits((uint32_t)raw);
    memcpy(&value, &raw, sizeof(value));
    return value;
}

struct ds4_str ds4_gguf_str_at(const struct ds4_gguf_kv *kv, uint64_t i)
{
    const uint8_t *p = kv->data + (kv->is_array ? kv->str_at[i] : 0);
    uint64_t len = 0;

    for (int b = 0; b < 8; b++) /* u64 length, checked when the file was read */
        len |= (uint64_t)p[b] << (8 * b);
    return (struct ds4_str){(const char *)p + sizeof(len), (size_t)len};
}

/* ---- typed getters ----------------------------------------------------------------------------- */

static const struct ds4_gguf_kv *get(const struct ds4_gguf *gguf, const char *key,
                                     struct ds4_err *err)
{
    const struct ds4_gguf_kv *kv = ds4_gguf_find(gguf, key);

    if (kv == NULL)
        ds4_fail(err, DS4_E_INVALID, "metadata key %s is missing", key);
    return kv;
}

static int fail_kind(const struct ds4_gguf_kv *kv, const char *want, struct ds4_err *err)
{
    return ds4_fail(err, DS4_E_INVALID, "metadata key %.*s must be %s, is %s%s",
                    DS4_STR_ARG(kv->key), want, kv->is_array ? "an array of " : "",
                    ds4_gguf_type_name(kv->type));
}

int ds4_gguf_get_i64(const struct ds4_gguf *gguf, const char *key, int64_t min, int64_t max,
                     int64_t *out, struct ds4_err *err)
{
    const struct ds4_gguf_kv *kv = get(gguf, key, err);
    int64_t value;

    if (kv == NULL)
        return -1;
    if (kv->is_array || !ds4_gguf_is_int(kv->type))
        return fail_kind(kv, "an integer", err);
    value = ds4_gguf_int_at(kv, 0);
    if (value < min || value > max)
        return ds4_fail(err, DS4_E_INVALID,
                        "metadata key %s is %" PRId64 ", must be in [%" PRId64 ", %" PRId64 "]",
                        key, value, min, max);
    *out = value;
    return 0;
}

int ds4_gguf_get_i32(const struct ds4_gguf *gguf, const char *key, int32_t min, int32_t max,
                     int32_t *out, struct ds4_err *err)
{
    int64_t value;

    if (ds4_gguf_get_i64(gguf, key, min, max, &value, err))
        return -1;
    *out = (int32_t)value;
    return 0;
}

int ds4_gguf_get_u64(const struct ds4_gguf *gguf, const char *key, uint64_t *out,
                     struct ds4_err *err)
{
    const struct ds4_gguf_kv *kv = get(gguf, key, err);
    int64_t value;

    if (kv == NULL)
        return -1;
    if (kv->is_array || !ds4_gguf_is_int(kv->type))
        return fail_kind(kv, "an integer", err);
    value = ds4_gguf_int_at(kv, 0);
    if (value < 0)
        return ds4_fail(err, DS4_E_INVALID, "metadata key %s is %" PRId64 ", must not be negative",
                        key, value);
    *out = kv->type == DS4_GGUF_U64 ? load(kv, 0) : (uint64_t)value;
    return 0;
}

int ds4_gguf_get_f32(const struct ds4_gguf *gguf, const char *key, float *out, struct ds4_err *err)
{
    const struct ds4_gguf_kv *kv = get(gguf, key, err);
    float value;

    if (kv == NULL)
        return -1;
    if (kv->is_array || !ds4_gguf_is_float(kv->type))
        return fail_kind(kv, "a float", err);
    value = (float)ds4_gguf_float_at(kv, 0);
    if (!isfinite(value))
        return ds4_fail(err, DS4_E_INVALID, "metadata key %s is %g, must be finite", key,
                        (double)value);
    *out = value;
    return 0;
}

int ds4_gguf_get_bool(const struct ds4_gguf *gguf, const char *key, bool *out, struct ds4_err *err)
{
    const struct ds4_gguf_kv *kv = get(gguf, key, err);

    if (kv == NULL)
        return -1;
    if (kv->is_array || (kv->type != DS4_GGUF_BOOL && !ds4_gguf_is_int(kv->type)) ||
        ds4_gguf_int_at(kv, 0) < 0 || ds4_gguf_int_at(kv, 0) > 1)
        return fail_kind(kv, "a bool", err);
    *out = ds4_gguf_int_at(kv, 0) == 1;
    return 0;
}

int ds4_gguf_get_str(const struct ds4_gguf *gguf, const char *key, struct ds4_str *out,
                     struct ds4_err *err)
{
    const struct ds4_gguf_kv *kv = get(gguf, key, err);

    if (kv == NULL)
        return -1;
    if (kv->is_array || kv->type != DS4_GGUF_STRING)
        return fail_kind(kv, "a string", err);
    *out = ds4_gguf_str_at(kv, 0);
    return 0;
}

static bool is_string(enum ds4_gguf_type type)
{
    return type == DS4_GGUF_STRING;
}

static const struct ds4_gguf_kv *get_array(const struct ds4_gguf *gguf, const char *key,
                                           bool (*is_kind)(enum ds4_gguf_type type),
                                           const char *kind, struct ds4_err *err)
{
    const struct ds4_gguf_kv *kv = get(gguf, key, err);

    if (kv != NULL && (!kv->is_array || !is_kind(kv->type))) {
        fail_kind(kv, kind, err);
        return NULL;
    }
    return kv;
}

const struct ds4_gguf_kv *ds4_gguf_get_ints(const struct ds4_gguf *gguf, const char *key,
                                            struct ds4_err *err)
{
    return get_array(gguf, key, ds4_gguf_is_int, "an array of integers", err);
}

const struct ds4_gguf_kv *ds4_gguf_get_floats(const struct ds4_gguf *gguf, const char *key,
                                              struct ds4_err *err)
{
    return get_array(gguf, key, ds4_gguf_is_float, "an array of floats", err);
}

const struct ds4_gguf_kv *ds4_gguf_get_strings(const struct ds4_gguf *gguf, const char *key,
                                               struct ds4_err *err)
{
    return get_array(gguf, key, is_string, "an array of strings", err);
}

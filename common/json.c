/* jansson behind the house's getters.
 *
 * jansson 2.14 refuses three things that clients do send: half surrogate pairs in escapes (JavaScript
 * cuts strings inside an emoji), integers beyond int64, and numbers beyond a double; and its depth
 * limit of 2048 is fixed.  So the text is scanned once before: depth is counted, and where one of the
 * three occurs a patched copy is parsed instead.  The scan never judges syntax: what it does not
 * understand it leaves for jansson to complain about with line and column. */
#include "common/json.h"

#include "common/buf.h"
#include "common/utf8.h"

#include <jansson.h>

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DS4_JSON_MAX_DOUBLE_TEXT "1.7976931348623157e308"
#define DS4_JSON_ESCAPE_BYTES    6  /* \uXXXX */
#define DS4_JSON_SAFE_DIGITS     18 /* every integer of so many characters fits int64 */
#define DS4_JSON_PATH_BYTES      192

/* The scan's state: bytes before `copied` are in `patched` already; an empty `patched` with copied
 * 0 means that nothing had to be changed so far. */
struct scan {
    struct ds4_str text;
    size_t copied;
    struct ds4_buf patched;
};

static void patch(struct scan *scan, size_t at, size_t n_old, const char *replacement)
{
    (void)ds4_buf_append(&scan->patched, scan->text.ptr + scan->copied, at - scan->copied);
    (void)ds4_buf_append_text(&scan->patched, replacement);
    scan->copied = at + n_old;
}

/* The value of \uXXXX at offset i, or -1. */
static int32_t read_escape(struct ds4_str text, size_t i)
{
    int32_t code = 0;
    char c;

    if (text.len - i < DS4_JSON_ESCAPE_BYTES || text.ptr[i] != '\\' || text.ptr[i + 1] != 'u')
        return -1;
    for (size_t k = 2; k < DS4_JSON_ESCAPE_BYTES; k++) {
        c = text.ptr[i + k];
        if (c >= '0' && c <= '9')
            code = code * 16 + (c - '0');
        else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f')
            code = code * 16 + ((c | 0x20) - 'a' + 10);
        else
            return -1;
    }
    return code;
}

static bool is_high_surrogate(int32_t code)
{
    return code >= 0xd800 && code <= 0xdbff;
}

static bool is_low_surrogate(int32_t code)
{
    return code >= 0xdc00 && code <= 0xdfff;
}

/* Walks the string whose opening quote is at i; returns the offset after its closing quote. */
static size_t scan_string(struct scan *scan, size_t i)
{
    struct ds4_str text = scan->text;
    int32_t code;

    i++;
    while (i < text.len && text.ptr[i] != '"') {
        if (text.ptr[i] != '\\') {
            i++;
            continue;
        }
        code = read_escape(text, i);
        if (is_high_surrogate(code) && i + DS4_JSON_ESCAPE_BYTES < text.len &&
            is_low_surrogate(read_escape(text, i + DS4_JSON_ESCAPE_BYTES))) {
            i += (size_t)2 * DS4_JSON_ESCAPE_BYTES;
            continue;
        }
        if (is_high_surrogate(code) || is_low_surrogate(code))
            patch(scan, i, DS4_JSON_ESCAPE_BYTES, "\\uFFFD");
        i += code >= 0 ? DS4_JSON_ESCAPE_BYTES : 2;
    }
    return i < text.len ? i + 1 : text.len;
}

static size_t skip_digits(struct ds4_str text, size_t i)
{
    while (i < text.len && text.ptr[i] >= '0' && text.ptr[i] <= '9')
        i++;
    return i;
}

/* The end of the number at i as RFC 8259 spells it, or i if it is none. */
static size_t number_end(struct ds4_str text, size_t i, bool *is_real)
{
    size_t first = i + (text.ptr[i] == '-');
    size_t end = skip_digits(text, first), part;

    *is_real = false;
    if (end == first || (text.ptr[first] == '0' && end > first + 1))
        return i;
    if (end < text.len && text.ptr[end] == '.') {
        *is_real = true;
        part = end + 1;
        end = skip_digits(text, part);
        if (end == part)
            return i;
    }
    if (end < text.len && (text.ptr[end] | 0x20) == 'e') {
        *is_real = true;
        part = end + 1;
        part += part < text.len && (text.ptr[part] == '+' || text.ptr[part] == '-');
        end = skip_digits(text, part);
        if (end == part)
            return i;
    }
    return end;
}

/* Walks the number at i and patches it if it is out of range; returns the offset after it. */
static size_t scan_number(struct scan *scan, size_t i)
{
    const char *first = scan->text.ptr + i;
    bool is_real, is_wide;
    size_t end = number_end(scan->text, i, &is_real);
    double value;

    if (end == i)
        return i + 1;
    errno = 0;
    is_wide =
        !is_real && end - i > DS4_JSON_SAFE_DIGITS && (strtoll(first, NULL, 10), errno == ERANGE);
    if (!is_real && !is_wide)
        return end;
    /* The text is a terminated copy, and what follows a number does not continue one. */
    value = strtod(first, NULL);
    if (isinf(value))
        patch(scan, i, end - i,
              value < 0 ? "-" DS4_JSON_MAX_DOUBLE_TEXT : DS4_JSON_MAX_DOUBLE_TEXT);
    else if (is_wide)
        patch(scan, end, 0, "e0");
    return end;
}

/* One pass over the text; -1 when it nests too deep. */
static int scan_text(struct scan *scan, struct ds4_err *err)
{
    struct ds4_str text = scan->text;
    size_t i = 0;
    int32_t depth = 0;

    while (i < text.len) {
        switch (text.ptr[i]) {
        case '"':
            i = scan_string(scan, i);
            continue;
        case '[':
        case '{':
            if (++depth > DS4_JSON_MAX_DEPTH)
                return ds4_fail(err, DS4_E_INVALID, "JSON nests deeper than %d levels",
                                DS4_JSON_MAX_DEPTH);
            break;
        case ']':
        case '}':
            depth--;
            break;
        default:
            if (text.ptr[i] == '-' || (text.ptr[i] >= '0' && text.ptr[i] <= '9')) {
                i = scan_number(scan, i);
                continue;
            }
            break;
        }
        i++;
    }
    return 0;
}

/* jansson's message cut to whole characters: it quotes the input and limits bytes. */
static int fail_parse(const json_error_t *error, struct ds4_err *err)
{
    struct ds4_str text = ds4_str_view(error->text);

    if (json_error_code(error) == json_error_out_of_memory)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for the JSON body");
    text.len = ds4_utf8_valid_len(text);
    return ds4_fail(err, DS4_E_INVALID, "invalid JSON at line %d, column %d: %.*s", error->line,
                    error->column, DS4_STR_ARG(text));
}

struct ds4_json *ds4_json_parse(struct ds4_str text, struct ds4_err *err)
{
    struct scan scan = {0};
    struct ds4_buf terminated;
    struct ds4_str source;
    const char *nul = text.len == 0 ? NULL : memchr(text.ptr, '\0', text.len);
    json_error_t error;
    json_t *doc = NULL;

    /* jansson 2.14 skips NUL bytes between tokens. */
    if (nul != NULL) {
        (void)ds4_fail(err, DS4_E_INVALID, "invalid JSON: NUL at byte %zu",
                       (size_t)(nul - text.ptr));
        return NULL;
    }

    /* A number may be the last thing in the text, and strtod wants an end. */
    ds4_buf_init(&terminated, text.len);
    ds4_buf_init(&scan.patched, SIZE_MAX / 2);
    if (ds4_buf_append_str(&terminated, text) != 0) {
        (void)ds4_fail(err, DS4_E_NOMEM, "no memory for the JSON body");
        goto out;
    }
    scan.text = ds4_buf_view(&terminated);
    if (scan_text(&scan, err) != 0)
        goto out;
    source = scan.text;
    if (scan.patched.len > 0) {
        patch(&scan, scan.text.len, 0, "");
        if (ds4_buf_check(&scan.patched, "JSON body", err) != 0)
            goto out;
        source = ds4_buf_view(&scan.patched);
    }
    doc = json_loadb(source.ptr, source.len, JSON_ALLOW_NUL | JSON_DECODE_ANY, &error);
    if (doc == NULL)
        (void)fail_parse(&error, err);
out:
    ds4_buf_deinit(&scan.patched);
    ds4_buf_deinit(&terminated);
    return (struct ds4_json *)doc;
}

/* ---- values -------------------------------------------------------------------------------- */

static const json_t *raw(const struct ds4_json *value)
{
    return (const json_t *)value;
}

void ds4_json_free(struct ds4_json *doc)
{
    json_decref((json_t *)doc);
}

enum ds4_json_type ds4_json_type(const struct ds4_json *value)
{
    if (value == NULL)
        return DS4_JSON_NULL;
    switch (json_typeof(raw(value))) {
    case JSON_OBJECT:
        return DS4_JSON_OBJECT;
    case JSON_ARRAY:
        return DS4_JSON_ARRAY;
    case JSON_STRING:
        return DS4_JSON_STRING;
    case JSON_INTEGER:
        return DS4_JSON_INT;
    case JSON_REAL:
        return DS4_JSON_DOUBLE;
    case JSON_TRUE:
    case JSON_FALSE:
        return DS4_JSON_BOOL;
    case JSON_NULL:
        break;
    }
    return DS4_JSON_NULL;
}

const char *ds4_json_type_name(const struct ds4_json *value)
{
    static const char *const names[] = {
        [DS4_JSON_NULL] = "null",     [DS4_JSON_BOOL] = "boolean",  [DS4_JSON_INT] = "number",
        [DS4_JSON_DOUBLE] = "number", [DS4_JSON_STRING] = "string", [DS4_JSON_ARRAY] = "array",
        [DS4_JSON_OBJECT] = "object",
    };

    return names[ds4_json_type(value)];
}

bool ds4_json_bool(const struct ds4_json *value)
{
    return json_is_true(raw(value));
}

int64_t ds4_json_int(const struct ds4_json *value)
{
    return json_integer_value(raw(value));
}

double ds4_json_double(const struct ds4_json *value)
{
    return json_number_value(raw(value));
}

struct ds4_str ds4_json_str(const struct ds4_json *value)
{
    if (!json_is_string(raw(value)))
        return (struct ds4_str){"", 0};
    return (struct ds4_str){json_string_value(raw(value)), json_string_length(raw(value))};
}

const struct ds4_json *ds4_json_find_raw(const struct ds4_json *obj, const char *key)
{
    return (const struct ds4_json *)json_object_get(raw(obj), key);
}

const struct ds4_json *ds4_json_find(const struct ds4_json *obj, const char *key)
{
    const struct ds4_json *value = ds4_json_find_raw(obj, key);

    return ds4_json_type(value) == DS4_JSON_NULL ? NULL : value;
}

/* ---- typed members ------------------------------------------------------------------------- */

struct path {
    char text[DS4_JSON_PATH_BYTES];
};

static struct path join_path(const char *path, const char *key)
{
    struct path whole;
    bool at_top = path == NULL || path[0] == '\0';

    (void)snprintf(whole.text, sizeof(whole.text), "%s%s%s", at_top ? "" : path, at_top ? "" : ".",
                   key);
    return whole;
}

static int fail_type(const struct ds4_json *value, const char *path, const char *key,
                     const char *wanted, struct ds4_err *err)
{
    return ds4_fail(err, DS4_E_INVALID, "%s must be %s, not %s", join_path(path, key).text, wanted,
                    ds4_json_type_name(value));
}

int ds4_json_get_bool(const struct ds4_json *obj, const char *path, const char *key, bool *out,
                      struct ds4_err *err)
{
    const struct ds4_json *value = ds4_json_find(obj, key);

    if (value == NULL)
        return 0;
    if (ds4_json_type(value) != DS4_JSON_BOOL)
        return fail_type(value, path, key, "a boolean", err);
    *out = ds4_json_bool(value);
    return 0;
}

/* The value as int64; false if it has a fraction or does not fit. */
static bool to_int(const struct ds4_json *value, int64_t *out)
{
    double real;

    if (ds4_json_type(value) == DS4_JSON_INT) {
        *out = ds4_json_int(value);
        return true;
    }
    real = ds4_json_double(value);
    if (real != floor(real) || real < -0x1p63 || real >= 0x1p63)
        return false;
    *out = (int64_t)real;
    return true;
}

int ds4_json_get_int(const struct ds4_json *obj, const char *path, const char *key, int64_t min,
                     int64_t max, int64_t *out, struct ds4_err *err)
{
    const struct ds4_json *value = ds4_json_find(obj, key);
    int64_t number;

    if (value == NULL)
        return 0;
    if (ds4_json_type(value) != DS4_JSON_INT && ds4_json_type(value) != DS4_JSON_DOUBLE)
        return fail_type(value, path, key, "an integer", err);
    if (!to_int(value, &number))
        return ds4_fail(err, DS4_E_INVALID, "%s is %g, must be an integer from %lld to %lld",
                        join_path(path, key).text, ds4_json_double(value), (long long)min,
                        (long long)max);
    if (number < min || number > max)
        return ds4_fail(err, DS4_E_INVALID, "%s is %lld, must be from %lld to %lld",
                        join_path(path, key).text, (long long)number, (long long)min,
                        (long long)max);
    *out = number;
    return 0;
}

int ds4_json_get_double(const struct ds4_json *obj, const char *path, const char *key, double min,
                        double max, double *out, struct ds4_err *err)
{
    const struct ds4_json *value = ds4_json_find(obj, key);
    double number;

    if (value == NULL)
        return 0;
    if (ds4_json_type(value) != DS4_JSON_INT && ds4_json_type(value) != DS4_JSON_DOUBLE)
        return fail_type(value, path, key, "a number", err);
    number = ds4_json_double(value);
    if (!(number >= min && number <= max))
        return ds4_fail(err, DS4_E_INVALID, "%s is %g, must be from %g to %g",
                        join_path(path, key).text, number, min, max);
    *out = number;
    return 0;
}

int ds4_json_get_str(const struct ds4_json *obj, const char *path, const char *key,
                     struct ds4_str *out, struct ds4_err *err)
{
    const struct ds4_json *value = ds4_json_find(obj, key);

    if (value == NULL)
        return 0;
    if (ds4_json_type(value) != DS4_JSON_STRING)
        return fail_type(value, path, key, "a string", err);
    *out = ds4_json_str(value);
    return 0;
}

int ds4_json_get_array(const struct ds4_json *obj, const char *path, const char *key,
                       const struct ds4_json **out, struct ds4_err *err)
{
    const struct ds4_json *value = ds4_json_find(obj, key);

    if (value == NULL)
        return 0;
    if (ds4_json_type(value) != DS4_JSON_ARRAY)
        return fail_type(value, path, key, "an array", err);
    *out = value;
    return 0;
}

int ds4_json_get_object(const struct ds4_json *obj, const char *path, const char *key,
                        const struct ds4_json **out, struct ds4_err *err)
{
    const struct ds4_json *value = ds4_json_find(obj, key);

    if (value == NULL)
        return 0;
    if (ds4_json_type(value) != DS4_JSON_OBJECT)
        return fail_type(value, path, key, "an object", err);
    *out = value;
    return 0;
}

/* ---- lists --------------------------------------------------------------------------------- */

size_t ds4_json_len(const struct ds4_json *value)
{
    switch (ds4_json_type(value)) {
    case DS4_JSON_ARRAY:
        return json_array_size(raw(value));
    case DS4_JSON_OBJECT:
        return json_object_size(raw(value));
    default:
        return 0;
    }
}

const struct ds4_json *ds4_json_at(const struct ds4_json *array, size_t i)
{
    return (const struct ds4_json *)json_array_get(raw(array), i);
}

/* jansson's iterators take a mutable object although reading does not change it. */
static struct ds4_json_member member_at(const struct ds4_json *obj, void *pos)
{
    if (pos == NULL)
        return (struct ds4_json_member){.obj = obj};
    return (struct ds4_json_member){
        .key = {json_object_iter_key(pos), json_object_iter_key_len(pos)},
        .value = (const struct ds4_json *)json_object_iter_value(pos),
        .obj = obj,
        .pos = pos,
    };
}

struct ds4_json_member ds4_json_first(const struct ds4_json *obj)
{
    return member_at(obj, json_object_iter((json_t *)(uintptr_t)obj));
}

struct ds4_json_member ds4_json_next(struct ds4_json_member member)
{
    return member_at(member.obj,
                     json_object_iter_next((json_t *)(uintptr_t)member.obj, member.pos));
}

/* JSON of requests: parse once, then ask for members by name; every complaint names the path.
 *
 * Limits and readings: valid UTF-8 only; nesting at most DS4_JSON_MAX_DEPTH; a duplicate key keeps the
 * last value; integers beyond int64 become doubles and doubles beyond the range become the largest
 * one; an escape that is half of a surrogate pair reads as U+FFFD; strings may hold U+0000, keys may
 * not.  Number text, duplicate keys and exact spelling are lost here: whatever ends up in a prompt
 * (tool schemas, arguments) is read with common/json_text.h instead.
 *
 * A document is owned by the caller of ds4_json_parse; every value and string obtained from it is
 * borrowed and lives as long as the document.  A value pointer of NULL means "absent" and is accepted
 * everywhere; JSON null counts as absent in all getters. */
#ifndef DS4_COMMON_JSON_H
#define DS4_COMMON_JSON_H

#include "common/err.h"
#include "common/str.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DS4_JSON_MAX_DEPTH 256

struct ds4_json; /* a value; jansson's json_t underneath */

enum ds4_json_type {
    DS4_JSON_NULL, /* also: absent */
    DS4_JSON_BOOL,
    DS4_JSON_INT,
    DS4_JSON_DOUBLE,
    DS4_JSON_STRING,
    DS4_JSON_ARRAY,
    DS4_JSON_OBJECT,
};

/* The document, or NULL with DS4_E_INVALID naming line and column (DS4_E_NOMEM when memory is out).
 * Any value may stand at the top.  Free with ds4_json_free. */
struct ds4_json *ds4_json_parse(struct ds4_str text, struct ds4_err *err) DS4_MUST_CHECK;
void ds4_json_free(struct ds4_json *doc);

enum ds4_json_type ds4_json_type(const struct ds4_json *value);
/* "null", "boolean", "number", "string", "array", "object": the words of error messages. */
const char *ds4_json_type_name(const struct ds4_json *value);

/* Plain readings of one value; the caller knows the type (a wrong one gives false, 0, an empty view). */
bool ds4_json_bool(const struct ds4_json *value);
int64_t ds4_json_int(const struct ds4_json *value);
double ds4_json_double(const struct ds4_json *value); /* an integer converts */
struct ds4_str ds4_json_str(const struct ds4_json *value);

/* The member; NULL if obj is no object, or the member is missing or null. */
const struct ds4_json *ds4_json_find(const struct ds4_json *obj, const char *key);
/* The member even if null; NULL only when missing. */
const struct ds4_json *ds4_json_find_raw(const struct ds4_json *obj, const char *key);

/* Typed members.  `path` is where obj stands ("" at the top, "messages[2]"), used in messages only:
 * "messages[2].role must be a string, not a number".  Absent or null: 0 and *out stays as it was, so
 * callers put the default there first.  Wrong type: -1 with DS4_E_INVALID.
 * _int takes integral doubles (3.0) as well; _int and _double check min <= value <= max. */
int ds4_json_get_bool(const struct ds4_json *obj, const char *path, const char *key, bool *out,
                      struct ds4_err *err) DS4_MUST_CHECK;
int ds4_json_get_int(const struct ds4_json *obj, const char *path, const char *key, int64_t min,
                     int64_t max, int64_t *out, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_json_get_double(const struct ds4_json *obj, const char *path, const char *key, double min,
                        double max, double *out, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_json_get_str(const struct ds4_json *obj, const char *path, const char *key,
                     struct ds4_str *out, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_json_get_array(const struct ds4_json *obj, const char *path, const char *key,
                       const struct ds4_json **out, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_json_get_object(const struct ds4_json *obj, const char *path, const char *key,
                        const struct ds4_json **out, struct ds4_err *err) DS4_MUST_CHECK;

/* Number of elements or members; 0 for any other value. */
size_t ds4_json_len(const struct ds4_json *value);
/* Element i, or NULL outside the array. */
const struct ds4_json *ds4_json_at(const struct ds4_json *array, size_t i);

/* for (struct ds4_json_member m = ds4_json_first(obj); m.value != NULL; m = ds4_json_next(m)) ...
 * Members come in the order of the text; null values are visited too. */
struct ds4_json_member {
    struct ds4_str key;
    const struct ds4_json *value;
    const struct ds4_json *obj;
    void *pos;
};
struct ds4_json_member ds4_json_first(const struct ds4_json *obj);
struct ds4_json_member ds4_json_next(struct ds4_json_member member);

#endif

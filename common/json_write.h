/* Writing JSON: strings and numbers as Python prints them, and a writer that keeps the structure valid.
 *
 * Everything appends to a buffer that the caller owns.  Failing appends stick in the buffer, so a
 * sequence of calls may be checked once at its end (ds4_buf_check). */
#ifndef DS4_COMMON_JSON_WRITE_H
#define DS4_COMMON_JSON_WRITE_H

#include "common/buf.h"
#include "common/str.h"

#include <stdbool.h>
#include <stdint.h>

/* The string in quotes, escaped as json.dumps does: \" \\ \n \r \t \b \f, other control bytes as
 * \u00xx, everything else raw.  Invalid UTF-8 becomes U+FFFD, so the result is always valid JSON. */
int ds4_jw_append_string(struct ds4_buf *out, struct ds4_str s);
/* The same without quotes: strings sent piece by piece.  A piece must not end inside a character. */
int ds4_jw_append_escaped(struct ds4_buf *out, struct ds4_str s);
/* repr(float): shortest text that reads back the same; Infinity, -Infinity, NaN. */
int ds4_jw_append_double(struct ds4_buf *out, double value);

#define DS4_JW_MAX_DEPTH 64

/* Compact JSON ("," and ":") into a buffer.  The writer sets the commas; a value where a key belongs, a
 * key outside an object, or an end too many is a bug of the caller and asserted.  Failing appends
 * stick in the buffer (ds4_buf_check), so calls return nothing.
 *
 *   struct ds4_jw w;
 *   ds4_jw_init(&w, &buf);
 *   ds4_jw_object(&w);
 *   ds4_jw_key(&w, "id");
 *   ds4_jw_str(&w, id);
 *   ds4_jw_end(&w);
 *   assert(ds4_jw_done(&w)); */
struct ds4_jw {
    struct ds4_buf *out; /* borrowed */
    uint64_t objects;    /* bit d: level d is an object */
    int32_t depth;       /* open levels */
    bool has_items;      /* the innermost level has an item before this place */
    bool has_key;        /* a key waits for its value */
};

void ds4_jw_init(struct ds4_jw *w, struct ds4_buf *out);
void ds4_jw_object(struct ds4_jw *w);
void ds4_jw_array(struct ds4_jw *w);
void ds4_jw_end(struct ds4_jw *w); /* of the innermost object or array */
void ds4_jw_key(struct ds4_jw *w, const char *key);
void ds4_jw_key_str(struct ds4_jw *w, struct ds4_str key);
void ds4_jw_str(struct ds4_jw *w, struct ds4_str s);
void ds4_jw_text(struct ds4_jw *w, const char *text); /* NULL writes null */
void ds4_jw_int(struct ds4_jw *w, int64_t value);
void ds4_jw_double(struct ds4_jw *w, double value); /* not finite: null */
void ds4_jw_bool(struct ds4_jw *w, bool value);
void ds4_jw_null(struct ds4_jw *w);
/* A whole JSON value that is known to be valid. */
void ds4_jw_raw(struct ds4_jw *w, struct ds4_str json);
/* One whole value was written and every level is closed. */
bool ds4_jw_done(const struct ds4_jw *w);

#endif

/* JSON as text: a reader that keeps number text, key order and duplicates, and Python's way of printing
 * what it read.  Writing from values is common/json_write.h.
 *
 * Tool schemas and arguments travel through prompts and model output, where every digit, order and
 * spelling matters.  common/json.h is the friendlier reader for everything else of a request.
 *
 * Ownership: nodes live in the caller's arena and borrow the text they were read from. */
#ifndef DS4_COMMON_JSON_TEXT_H
#define DS4_COMMON_JSON_TEXT_H

#include "common/arena.h"
#include "common/buf.h"
#include "common/err.h"
#include "common/str.h"

#include <stdbool.h>
#include <stdint.h>

#define DS4_JT_MAX_DEPTH      512 /* of anything read here */
#define DS4_JT_ARGUMENT_DEPTH 128 /* of tool-call arguments */

/* ---- reading ------------------------------------------------------------------------------- */

enum ds4_jt_type {
    DS4_JT_NULL,
    DS4_JT_FALSE,
    DS4_JT_TRUE,
    DS4_JT_NUMBER,
    DS4_JT_STRING,
    DS4_JT_ARRAY,
    DS4_JT_OBJECT,
};

/* One value.  Members of an object are its children in the order of the text, duplicates included:
 *
 *   for (const struct ds4_jt_node *m = obj->first; m != NULL; m = m->next)
 *       if (m->counts != NULL)
 *           use(m->key, m->counts);
 *
 * `counts` is what Python's dict would hold at this place: the member itself, or the last one with the
 * same key, or NULL if an earlier place stands for this one already.  Elements count for themselves. */
struct ds4_jt_node {
    enum ds4_jt_type type;
    int32_t n_children; /* of an array or object, duplicates included */
    struct ds4_str raw; /* the value's text without blanks around it */
    struct ds4_str key; /* of a member, escapes decoded */
    struct ds4_str str; /* of a string, escapes decoded (half of a surrogate pair: U+FFFD) */
    struct ds4_jt_node *parent;
    struct ds4_jt_node *first, *last; /* children */
    struct ds4_jt_node *next;         /* sibling */
    struct ds4_jt_node *counts;
};

/* Strict RFC 8259, one value with blanks around it, valid UTF-8, at most max_depth (<= 512) levels.
 * NULL with DS4_E_INVALID naming the byte, or DS4_E_TOO_LONG when the arena is full. */
const struct ds4_jt_node *ds4_jt_parse(struct ds4_str text, int32_t max_depth,
                                       struct ds4_arena *arena, struct ds4_err *err) DS4_MUST_CHECK;
/* Whether ds4_jt_parse would accept the text; allocates nothing. */
bool ds4_jt_valid(struct ds4_str text, int32_t max_depth);

/* The value of the last member with this key; NULL if missing, or obj is NULL or no object. */
const struct ds4_jt_node *ds4_jt_find(const struct ds4_jt_node *obj, const char *key);
const struct ds4_jt_node *ds4_jt_find_str(const struct ds4_jt_node *obj, struct ds4_str key);

/* The number as a double (infinite on overflow); 0 for anything but a number. */
double ds4_jt_double(const struct ds4_jt_node *node);
/* The same JSON value: members in any order, 1 is 1.0. */
bool ds4_jt_same(const struct ds4_jt_node *a, const struct ds4_jt_node *b);
/* The same for texts of strangers: members in another order are searched, which is quadratic.  Each value
 * and each member walked takes one from *work; below 0 it stops and says no. */
bool ds4_jt_same_within(const struct ds4_jt_node *a, const struct ds4_jt_node *b, int64_t *work);

/* ---- printing as Python does --------------------------------------------------------------- */

/* json.dumps(json.loads(text), ensure_ascii=False): ", " and ": ", a duplicate key at its first place
 * with its last value, integers digit by digit (-0 is 0), other numbers as repr(float), Infinity on
 * overflow.  0, or -1 when out is full (ds4_buf_check). */
int ds4_jt_dump(const struct ds4_jt_node *node, struct ds4_buf *out);

#endif

/* Stop strings over a stream: how much of the text may go out, and where it must be cut.
 *
 * One Knuth-Morris-Pratt automaton per string, so the cost is one step per byte and string and a
 * border between chunks means nothing.  The string that is complete first wins; among several that
 * end at the same byte the longest (a chunk-independent reading of "the first stop string"). */
#ifndef DS4_ROUTER_PARSE_STOP_H
#define DS4_ROUTER_PARSE_STOP_H

#include "common/err.h"
#include "common/str.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ds4_stop_string {
    struct ds4_str text; /* borrowed */
    uint32_t *fail;      /* [text.len]: longest proper border of text[0..i] */
    uint32_t matched;
};

/* Owns its tables, borrows the strings' bytes. */
struct ds4_stop {
    struct ds4_stop_string *strings;
    size_t n_strings;
};

/* Empty strings are skipped.  0, or -1 with DS4_E_NOMEM / DS4_E_INVALID (a string of 4 GiB). */
int ds4_stop_init(struct ds4_stop *stop, const struct ds4_str *strings, size_t n_strings,
                  struct ds4_err *err) DS4_MUST_CHECK;
void ds4_stop_deinit(struct ds4_stop *stop);

struct ds4_stop_result {
    bool hit;
    struct ds4_str text; /* hit: the stop string, borrowed as it was given */
    size_t used;         /* bytes of the text looked at: all, or up to the end of the stop string */
    size_t
        held; /* bytes before `used` that are (hit: the whole, else the beginning of) a stop string;
                  * may reach back into earlier texts */
};

/* Advances over `text`. */
struct ds4_stop_result ds4_stop_feed(struct ds4_stop *stop, struct ds4_str text);
/* Forgets what has been matched so far. */
void ds4_stop_reset(struct ds4_stop *stop);

#endif

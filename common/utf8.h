/* UTF-8 as Unicode's table 3-7 defines it: no overlong forms, no surrogates, nothing above U+10FFFF.
 *
 * Pure functions over views; they own nothing.  A byte sequence that is not a character is measured
 * as its *maximal subpart*: the longest prefix that could still have become one (at least one byte).
 * That is the unit which the WHATWG decoder and Python's errors="replace" turn into one U+FFFD. */
#ifndef DS4_COMMON_UTF8_H
#define DS4_COMMON_UTF8_H

#include "common/buf.h"
#include "common/str.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DS4_UTF8_MAX_BYTES   4
#define DS4_UTF8_REPLACEMENT UINT32_C(0xfffd)

enum ds4_utf8_kind {
    DS4_UTF8_CHAR, /* a whole, valid character */
    DS4_UTF8_BAD,  /* a maximal subpart that no further byte can complete */
    DS4_UTF8_CUT,  /* the text ends inside a character that is valid so far */
};

struct ds4_utf8_char {
    enum ds4_utf8_kind kind;
    uint32_t code;    /* of the character; DS4_UTF8_REPLACEMENT unless kind is DS4_UTF8_CHAR */
    uint32_t n_bytes; /* to step over, 1..4; 0 only for an empty text */
};

/* The character at the start of `s`.  An empty `s` gives {DS4_UTF8_CUT, U+FFFD, 0}. */
struct ds4_utf8_char ds4_utf8_decode(struct ds4_str s);

/* Writes the character and returns its length; 0 for a surrogate or a code above U+10FFFF. */
size_t ds4_utf8_encode(uint32_t code, char out[DS4_UTF8_MAX_BYTES]);

/* Length of the longest valid prefix, which ends at a character. */
size_t ds4_utf8_valid_len(struct ds4_str s);

static inline bool ds4_utf8_valid(struct ds4_str s)
{
    return ds4_utf8_valid_len(s) == s.len;
}

/* How many bytes at the end are the beginning of an unfinished character: 0..3.  A stream keeps back
 * that many; what precedes them never changes its meaning.  Looks at the last 3 bytes only. */
size_t ds4_utf8_cut_tail(struct ds4_str s);

/* Appends `s` with every maximal subpart replaced by U+FFFD (an unfinished tail is one of them).
 * 0, or -1 when buf is full (see ds4_buf_check). */
int ds4_utf8_append_replaced(struct ds4_buf *buf, struct ds4_str s);

#endif

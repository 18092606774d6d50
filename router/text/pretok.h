/* Pre-tokenizer: cuts text into the pieces that byte-pair encoding then merges, each on its own.
 *
 * The pieces are exactly those of the model's three Split patterns (numbers in groups of three; runs
 * of CJK and kana; words, punctuation and blanks), in order, without gaps: their concatenation is the
 * text.  The iterator borrows the text, allocates nothing and looks at each byte a bounded number of
 * times.  Text should be valid UTF-8; a stray byte is treated as an unassigned character. */
#ifndef DS4_ROUTER_TEXT_PRETOK_H
#define DS4_ROUTER_TEXT_PRETOK_H

#include "common/str.h"

#include <stdbool.h>
#include <stdint.h>

struct ds4_pretok {
    const uint8_t *pos;
    const uint8_t *text_end;
    const uint8_t *run_end; /* end of the CJK run being cut, else text_end */
    uint8_t class_mask;     /* hides the CJK bit inside a CJK run */
};

/* Prepares the Unicode class table on first use (about 10 ms, once per process, thread safe). */
void ds4_pretok_init(struct ds4_pretok *it, struct ds4_str text);

/* The next piece, or false at the end of the text. */
bool ds4_pretok_next(struct ds4_pretok *it, struct ds4_str *piece);

#endif

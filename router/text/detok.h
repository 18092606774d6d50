/* Detokenizer: token ids -> text of one sequence, released in whole characters.
 *
 * A token may end inside a UTF-8 character; its bytes are held until the next token completes them.
 * Bytes that can never become a character turn into U+FFFD, one per maximal invalid subpart, as
 * Python's errors="replace" and the WHATWG decoder do. */
#ifndef DS4_ROUTER_TEXT_DETOK_H
#define DS4_ROUTER_TEXT_DETOK_H

#include "common/buf.h"
#include "common/err.h"
#include "router/text/vocab.h"

#define DS4_DETOK_HELD_BYTES 3 /* an unfinished character has at most three bytes */

struct ds4_detok {
    const struct ds4_vocab *vocab; /* borrowed */
    bool skip_hidden;
    uint8_t n_held;
    char held[DS4_DETOK_HELD_BYTES];
};

/* skip_hidden: BOS, EOS, padding and placeholders give no text (what a client reads); without it
 * every token gives its text (what a tool that inverts tokenisation needs). */
void ds4_detok_init(struct ds4_detok *detok, const struct ds4_vocab *vocab, bool skip_hidden);

/* Appends the text that token `id` completes.  -1 with DS4_E_CORRUPT for an id outside the vocabulary
 * (nothing is appended), or when out is full. */
int ds4_detok_push(struct ds4_detok *detok, int32_t id, struct ds4_buf *out,
                   struct ds4_err *err) DS4_MUST_CHECK;

/* The same as a view, which costs no copy for a token that is whole characters: of the vocabulary, or of
 * `scratch`, until the next call. */
static inline int ds4_detok_next(struct ds4_detok *detok, int32_t id, struct ds4_buf *scratch,
                                 struct ds4_str *text, struct ds4_err *err)
{
    const struct ds4_vocab *vocab = detok->vocab;
    int rc = 0;

    if (detok->n_held == 0 && ds4_vocab_has(vocab, id) &&
        (vocab->traits[id] & (DS4_TOKEN_WHOLE | DS4_TOKEN_HIDDEN)) == DS4_TOKEN_WHOLE) {
        *text = ds4_vocab_piece(vocab, id);
        return 0;
    }
    ds4_buf_clear(scratch);
    rc = ds4_detok_push(detok, id, scratch, err);
    *text = ds4_buf_view(scratch);
    return rc;
}

/* End of the sequence: an incomplete tail becomes one U+FFFD.  The state is then as after init. */
int ds4_detok_finish(struct ds4_detok *detok, struct ds4_buf *out,
                     struct ds4_err *err) DS4_MUST_CHECK;

#endif

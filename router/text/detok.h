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
    char joined[DS4_TOKEN_SLACK_BYTES]; /* the character that ds4_detok_next has completed */
};

/* skip_hidden: BOS, EOS, padding and placeholders give no text (what a client reads); without it
 * every token gives its text (what a tool that inverts tokenisation needs). */
void ds4_detok_init(struct ds4_detok *detok, const struct ds4_vocab *vocab, bool skip_hidden);

/* Appends the text that token `id` completes.  -1 with DS4_E_CORRUPT for an id outside the vocabulary
 * (nothing is appended), or when out is full. */
int ds4_detok_push(struct ds4_detok *detok, int32_t id, struct ds4_buf *out,
                   struct ds4_err *err) DS4_MUST_CHECK;

/* What a token completes. */
struct ds4_detok_text {
    struct ds4_str text; /* DS4_TOKEN_SLACK_BYTES may be read from its beginning */
    unsigned classes;    /* of its bytes, enum ds4_byte_class */
};

/* The rest of ds4_detok_next. */
int ds4_detok_next_part(struct ds4_detok *detok, int32_t id, struct ds4_buf *scratch,
                        struct ds4_detok_text *out, struct ds4_err *err) DS4_MUST_CHECK;

/* The same as a view, which costs no copy for a token that is whole characters: of the vocabulary, of
 * `scratch` or of *detok, until the next call. */
static inline int ds4_detok_next(struct ds4_detok *detok, int32_t id, struct ds4_buf *scratch,
                                 struct ds4_detok_text *out, struct ds4_err *err)
{
    const struct ds4_vocab *vocab = detok->vocab;
    unsigned traits = ds4_vocab_has(vocab, id) ? vocab->traits[id] : 0;

    if (detok->n_held == 0 && (traits & (DS4_TOKEN_WHOLE | DS4_TOKEN_HIDDEN)) == DS4_TOKEN_WHOLE) {
        out->text = ds4_vocab_piece(vocab, id);
        out->classes = traits >> DS4_TOKEN_CLASS;
        return 0;
    }
    return ds4_detok_next_part(detok, id, scratch, out, err);
}

/* End of the sequence: an incomplete tail becomes one U+FFFD.  The state is then as after init. */
int ds4_detok_finish(struct ds4_detok *detok, struct ds4_buf *out,
                     struct ds4_err *err) DS4_MUST_CHECK;

#endif

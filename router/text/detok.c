/* Detokenizer.  Step 13 of the request path.
 *
 * The state is the unfinished character, at most three bytes, so a sequence can be copied, truncated
 * and resumed.  Invariant: `held` is a prefix of a valid character, and all text before it is out. */
#include "router/text/detok.h"

#include "common/utf8.h"
#include "router/text/byte_class.h"

#include <string.h>

void ds4_detok_init(struct ds4_detok *detok, const struct ds4_vocab *vocab, bool skip_hidden)
{
    *detok = (struct ds4_detok){.vocab = vocab, .skip_hidden = skip_hidden};
}

/* Completes the held character byte by byte.  Returns how many bytes of `piece` it used. */
static size_t resolve_held(struct ds4_detok *detok, struct ds4_str piece, struct ds4_buf *out)
{
    char joined[DS4_UTF8_MAX_BYTES + DS4_DETOK_HELD_BYTES];
    size_t held = detok->n_held;
    size_t used = 0;

    memcpy(joined, detok->held, sizeof(detok->held));
    while (used < piece.len) {
        struct ds4_utf8_char c;

        joined[held + used] = piece.ptr[used];
        used++;
        c = ds4_utf8_decode((struct ds4_str){joined, held + used});
        if (c.kind == DS4_UTF8_CUT)
            continue;
        detok->n_held = 0;
        if (c.kind == DS4_UTF8_CHAR) {
            ds4_buf_append(out, joined, held + used);
            return used;
        }
        /* The new byte does not continue the character: it starts something of its own. */
        ds4_utf8_append_replaced(out, (struct ds4_str){joined, c.n_bytes});
        return used - 1;
    }
    memcpy(detok->held, joined, sizeof(detok->held));
    detok->n_held = (uint8_t)(held + used);
    return used;
}

/* Most tokens that are no whole characters: the beginning of one, or continuation bytes that with what is
 * held are one, or still none.  Two held bytes say all about the bytes behind them.  *n_joined: the bytes of
 * the character in detok->joined, 0 if there is none yet.  False, and nothing done, in any other case. */
static inline bool join(struct ds4_detok *detok, struct ds4_str piece, unsigned traits,
                        size_t *n_joined)
{
    size_t held = detok->n_held, n = held + piece.len;
    size_t n_char = (unsigned char)detok->held[0] >= 0xf0 ? 4 : 3;

    *n_joined = 0;
    if (held == 0 && (traits & DS4_TOKEN_CUT) != 0) {
        for (size_t i = 0; i < piece.len; i++)
            detok->held[i] = piece.ptr[i];
        detok->n_held = (uint8_t)piece.len;
        return true;
    }
    if (held < 2 || n > n_char)
        return false;
    memcpy(detok->joined, detok->held, sizeof(detok->held));
    for (size_t i = 0; i < piece.len; i++) {
        if (((unsigned char)piece.ptr[i] & 0xc0) != 0x80)
            return false;
        detok->joined[held + i] = piece.ptr[i];
    }
    memcpy(detok->held, detok->joined, sizeof(detok->held));
    detok->n_held = n == n_char ? 0 : (uint8_t)n;
    *n_joined = n == n_char ? n : 0;
    return true;
}

int ds4_detok_push(struct ds4_detok *detok, int32_t id, struct ds4_buf *out, struct ds4_err *err)
{
    struct ds4_str piece = ds4_vocab_piece(detok->vocab, id);
    unsigned traits;
    size_t cut;

    if (!ds4_vocab_has(detok->vocab, id))
        return ds4_fail(err, DS4_E_CORRUPT, "token id %d is outside the vocabulary of %d", id,
                        detok->vocab->n_token);
    traits = detok->vocab->traits[id];
    if (detok->skip_hidden && (traits & DS4_TOKEN_HIDDEN))
        return 0;
    if (detok->n_held == 0 && (traits & DS4_TOKEN_WHOLE)) { /* almost every token */
        if (ds4_buf_append_str(out, piece) != 0)
            return ds4_buf_check(out, "detokenised text", err);
        return 0;
    }
    if (join(detok, piece, traits, &cut)) {
        (void)ds4_buf_append(out, detok->joined, cut);
        return ds4_buf_check(out, "detokenised text", err);
    }
    if (detok->n_held > 0)
        piece = ds4_str_skip(piece, resolve_held(detok, piece, out));
    cut = ds4_utf8_cut_tail(piece);
    if (cut > 0) {
        memcpy(detok->held, piece.ptr + piece.len - cut, cut);
        detok->n_held = (uint8_t)cut;
        piece.len -= cut;
    }
    ds4_utf8_append_replaced(out, piece);
    return ds4_buf_check(out, "detokenised text", err);
}

int ds4_detok_next_part(struct ds4_detok *detok, int32_t id, struct ds4_buf *scratch,
                        struct ds4_detok_text *out, struct ds4_err *err)
{
    size_t n_joined;

    if (ds4_vocab_has(detok->vocab, id) && (detok->vocab->traits[id] & DS4_TOKEN_HIDDEN) == 0 &&
        join(detok, ds4_vocab_piece(detok->vocab, id), detok->vocab->traits[id], &n_joined)) {
        out->text = (struct ds4_str){detok->joined, n_joined};
        out->classes = ds4_byte_class[(unsigned char)detok->joined[0]];
        return 0;
    }
    ds4_buf_clear(scratch);
    if (ds4_buf_reserve(scratch, DS4_TOKEN_SLACK_BYTES) == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for the text of a token");
    if (ds4_detok_push(detok, id, scratch, err) != 0)
        return -1;
    out->text = ds4_buf_view(scratch);
    out->classes = ds4_byte_classes(out->text);
    return 0;
}

int ds4_detok_finish(struct ds4_detok *detok, struct ds4_buf *out, struct ds4_err *err)
{
    ds4_utf8_append_replaced(out, (struct ds4_str){detok->held, detok->n_held});
    detok->n_held = 0;
    return ds4_buf_check(out, "detokenised text", err);
}

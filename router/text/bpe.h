/* Byte-pair encoder: text -> token ids.
 *
 * An encoder is the scratch space and piece cache of one thread; it borrows the vocabulary, which
 * must outlive it.  The result depends on the text alone, never on what the cache holds. */
#ifndef DS4_ROUTER_TEXT_BPE_H
#define DS4_ROUTER_TEXT_BPE_H

#include "common/err.h"
#include "common/str.h"
#include "router/text/vocab.h"

struct ds4_bpe;

enum ds4_bpe_specials {
    DS4_BPE_PLAIN,   /* "<think>" is seven characters: text of users, tools and files */
    DS4_BPE_SPECIAL, /* added tokens in the text become their ids: text of our own making */
};

/* About 4 MiB.  NULL with DS4_E_NOMEM. */
struct ds4_bpe *ds4_bpe_new(const struct ds4_vocab *vocab, struct ds4_err *err);
void ds4_bpe_free(struct ds4_bpe *bpe);

/* Appends the ids of `text` (valid UTF-8) to *ids, which the caller owns.  No BOS or EOS is added.
 * Time O(n log n) for any text, memory O(longest piece).  Fails with DS4_E_NOMEM, or DS4_E_TOO_LONG
 * for a text of 2 GiB or more; *ids may then hold part of the result. */
int ds4_bpe_encode(struct ds4_bpe *bpe, struct ds4_str text, enum ds4_bpe_specials specials,
                   struct ds4_ids *ids, struct ds4_err *err) DS4_MUST_CHECK;

/* The bytes [start, end) of a text. */
struct ds4_bpe_span {
    size_t start, end;
};

/* The same, with added tokens recognised only where they lie wholly inside one of the spans (rising,
 * disjoint).  The text between them is merged across span borders, as one text. */
int ds4_bpe_encode_spans(struct ds4_bpe *bpe, struct ds4_str text, const struct ds4_bpe_span *spans,
                         size_t n_span, struct ds4_ids *ids, struct ds4_err *err) DS4_MUST_CHECK;

/* The vocabulary this encoder was made for. */
const struct ds4_vocab *ds4_bpe_vocab(const struct ds4_bpe *bpe);

#endif

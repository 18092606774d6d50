/* The vocabulary: token ids, their bytes, the merge table and the added tokens.
 *
 * Built once (vocab_load.h reads a GGUF or a tokenizer.json), immutable afterwards, so every thread
 * may read it.  The fields are public to the folder router/text only.
 *
 * Two kinds of token have text.  A normal token is a byte string that merging produces.  An added
 * token (control or user-defined: BOS, <think>, ...) is matched in the text before merging and is
 * never the result of a merge.  Special tokens are found by their text, never by number: the ids
 * differ between models. */
#ifndef DS4_ROUTER_TEXT_VOCAB_H
#define DS4_ROUTER_TEXT_VOCAB_H

#include "common/err.h"
#include "common/str.h"
#include "common/vec.h"

#include <stdbool.h>
#include <stdint.h>

DS4_VEC_TYPE(ds4_ids, int32_t);

/* X(name, text): the added tokens that this program knows by name. */
#define DS4_SPECIALS(X)                                                                            \
    X(BOS, "<｜begin▁of▁sentence｜>")                                                              \
    X(EOS, "<｜end▁of▁sentence｜>")                                                                \
    X(PAD, "<｜▁pad▁｜>")                                                                          \
    X(USER, "<｜User｜>")                                                                          \
    X(ASSISTANT, "<｜Assistant｜>")                                                                \
    X(SYSTEM, "<｜System｜>")                                                                      \
    X(THINK_OPEN, "<think>")                                                                       \
    X(THINK_CLOSE, "</think>")                                                                     \
    X(DSML, "｜DSML｜")                                                                            \
    X(LATEST_REMINDER, "<｜latest_reminder｜>")                                                    \
    X(FIM_BEGIN, "<｜fim▁begin｜>")                                                                \
    X(FIM_HOLE, "<｜fim▁hole｜>")                                                                  \
    X(FIM_END, "<｜fim▁end｜>")

enum ds4_special {
#define DS4_SPECIAL_ENUM(name, text) DS4_SPECIAL_##name,
    DS4_SPECIALS(DS4_SPECIAL_ENUM)
#undef DS4_SPECIAL_ENUM
        DS4_N_SPECIAL
};

enum ds4_token_kind {
    DS4_TOKEN_ABSENT = 0, /* a hole in the id range or an unused entry: no text, never produced */
    DS4_TOKEN_NORMAL,
    DS4_TOKEN_ADDED,
};

/* One entry of the table to build: text as in the file (normal tokens in the byte alphabet). */
struct ds4_vocab_entry {
    struct ds4_str text;
    enum ds4_token_kind kind;
};

struct ds4_vocab_pair {
    struct ds4_str left, right; /* in the byte alphabet */
};

struct ds4_merge {
    int32_t left, right, result;
};

struct ds4_merge_slot {
    uint32_t tag;    /* part of the pair's hash, so that most misses end here */
    uint32_t rank_1; /* rank + 1; 0 = empty */
};

struct ds4_vocab {
    int32_t n_token;
    int32_t n_merge;
    char *bytes;                  /* all tokens, back to back; DS4_TOKEN_SLACK_BYTES behind them */
    uint32_t *offset;             /* [n_token + 1] into bytes */
    uint8_t *kind;                /* [n_token] enum ds4_token_kind */
    uint16_t *traits;             /* [n_token] bits DS4_TOKEN_*, above them the bytes' classes */
    int32_t byte_id[256];         /* the token of each single byte */
    uint32_t *byte_pair_rank;     /* [65536] rank of two adjacent bytes, DS4_NO_RANK if none */
    struct ds4_merge *merges;     /* [n_merge] in rank order */
    struct ds4_merge_slot *slots; /* open addressing over (left, right) */
    uint32_t slot_mask;
    int32_t *added; /* [n_added] ids sorted by bytes */
    int32_t n_added;
    uint8_t added_first2[65536 / 8]; /* bit b0 << 8 | b1: some added token starts so */
    bool added_first[256];
    int32_t special[DS4_N_SPECIAL]; /* -1 when the vocabulary lacks it */
};

#define DS4_NO_RANK      UINT32_MAX
#define DS4_TOKEN_WHOLE  1 /* the bytes are valid UTF-8 on their own */
#define DS4_TOKEN_HIDDEN 2 /* see ds4_vocab_is_hidden */
#define DS4_TOKEN_CUT    4 /* the bytes are the beginning of one character */
#define DS4_TOKEN_CLASS  8 /* shift of enum ds4_byte_class */

/* So many bytes may be read from where a token begins, however short it is. */
#define DS4_TOKEN_SLACK_BYTES 16

/* Builds a vocabulary; borrows entries and pairs for the call only.  Errors (DS4_E_CORRUPT) name the
 * index: text outside the byte alphabet, a repeated token, a byte without token, a merge of unknown
 * parts or result. */
struct ds4_vocab *ds4_vocab_new(const struct ds4_vocab_entry *entries, size_t n_entry,
                                const struct ds4_vocab_pair *pairs, size_t n_pair,
                                struct ds4_err *err);
void ds4_vocab_free(struct ds4_vocab *vocab);

/* True for an id inside the table; everything else must be refused before it is used as an index. */
static inline bool ds4_vocab_has(const struct ds4_vocab *vocab, int32_t id)
{
    return id >= 0 && id < vocab->n_token;
}

/* The bytes of a token (an added token: its text); empty for an id without text or out of range. */
static inline struct ds4_str ds4_vocab_piece(const struct ds4_vocab *vocab, int32_t id)
{
    if (!ds4_vocab_has(vocab, id))
        return (struct ds4_str){"", 0};
    return (struct ds4_str){vocab->bytes + vocab->offset[id],
                            vocab->offset[id + 1] - vocab->offset[id]};
}

/* BOS, EOS, padding and placeholders: tokens without meaning to a reader of the output. */
static inline bool ds4_vocab_is_hidden(const struct ds4_vocab *vocab, int32_t id)
{
    return ds4_vocab_has(vocab, id) && (vocab->traits[id] & DS4_TOKEN_HIDDEN);
}

/* The added token with exactly this text, or -1. */
int32_t ds4_vocab_find_added(const struct ds4_vocab *vocab, struct ds4_str text);

/* Id of a special token, -1 if the vocabulary lacks it, and its text. */
int32_t ds4_vocab_special(const struct ds4_vocab *vocab, enum ds4_special which);
struct ds4_str ds4_special_text(enum ds4_special which);

/* Fails (DS4_E_CORRUPT, naming the text) unless the tokens a chat needs are there: BOS, EOS, user,
 * assistant, both think tags; `system` for releases that have a system token. */
int ds4_vocab_require_chat(const struct ds4_vocab *vocab, bool system,
                           struct ds4_err *err) DS4_MUST_CHECK;

/* Length and id of the longest added token at the start of [p, p + n); 0 if none. */
size_t ds4_vocab_match_added(const struct ds4_vocab *vocab, const char *p, size_t n, int32_t *id);

/* Rank of the merge of (left, right), or DS4_NO_RANK. */
static inline uint32_t ds4_vocab_pair_hash(int32_t left, int32_t right, uint32_t *tag)
{
    uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9E3779B97F4A7C15u;

    h ^= h >> 29;
    h *= 0xBF58476D1CE4E5B9u;
    *tag = (uint32_t)h;
    return (uint32_t)(h >> 32);
}

static inline uint32_t ds4_vocab_rank(const struct ds4_vocab *vocab, int32_t left, int32_t right)
{
    uint32_t tag;
    uint32_t i = ds4_vocab_pair_hash(left, right, &tag) & vocab->slot_mask;

    for (;; i = (i + 1) & vocab->slot_mask) {
        struct ds4_merge_slot slot = vocab->slots[i];

        if (slot.rank_1 == 0)
            return DS4_NO_RANK;
        if (slot.tag == tag && vocab->merges[slot.rank_1 - 1].left == left &&
            vocab->merges[slot.rank_1 - 1].right == right)
            return slot.rank_1 - 1;
    }
}

#endif

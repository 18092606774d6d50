/* Vocabulary tables.  Step 3 and 13 of the request path read them.
 *
 * Merges are keyed by the pair of token ids.  A table keyed by the joined text (as tiktoken has it)
 * gives the same result on all texts tried, but only the pair is right by definition.  Added tokens
 * are kept sorted by their bytes: the candidates at a position are a range that each further byte
 * narrows, so the longest match needs no trie.
 *
 * Everything here comes from a file, so every index is checked and named in the error. */
#include "router/text/vocab.h"

#include "common/utf8.h"
#include "router/text/byte_class.h"

#include <stdlib.h>

#define MAX_TOKEN       (1 << 24)
#define N_BYTE          256
#define N_BYTE_PAIR     65536
#define ALPHABET_SHIFT  256 /* bytes without a printable character are U+0100 + n, in byte order */
#define N_SHIFTED       68
#define MIN_SLOTS_SHIFT 4

/* Open addressing from bytes to id; only needed while building. */
struct text_table {
    uint32_t *id_1; /* id + 1; 0 = empty */
    uint32_t mask;
};

static const struct ds4_str special_texts[DS4_N_SPECIAL] = {
#define DS4_SPECIAL_TEXT(name, text) {text, sizeof(text) - 1},
    DS4_SPECIALS(DS4_SPECIAL_TEXT)
#undef DS4_SPECIAL_TEXT
};

static bool byte_is_printable(int byte)
{
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

static void shifted_bytes(uint8_t shifted[N_SHIFTED])
{
    int n = 0;

    for (int byte = 0; byte < N_BYTE; byte++)
        if (!byte_is_printable(byte))
            shifted[n++] = (uint8_t)byte;
}

/* Text in the byte alphabet -> bytes at `out` (room for text.len).  Returns the count, or -1 when a
 * character lies outside the alphabet, which is all within U+0021..U+0143. */
static ptrdiff_t decode_alphabet(struct ds4_str text, const uint8_t shifted[N_SHIFTED], char *out)
{
    size_t n = 0;

    for (size_t i = 0; i < text.len; i++) {
        int c = (uint8_t)text.ptr[i];

        if (c >= 0x80) {
            if (c < 0xC2 || c > 0xC5 || i + 1 == text.len ||
                ((uint8_t)text.ptr[i + 1] & 0xC0) != 0x80)
                return -1;
            c = (c & 0x1F) << 6 | (text.ptr[++i] & 0x3F);
        }
        if (c >= ALPHABET_SHIFT + N_SHIFTED)
            return -1;
        if (c >= ALPHABET_SHIFT)
            c = shifted[c - ALPHABET_SHIFT];
        else if (!byte_is_printable(c))
            return -1;
        out[n++] = (char)c;
    }
    return (ptrdiff_t)n;
}

static uint32_t hash_bytes(struct ds4_str s)
{
    uint64_t h = 0xCBF29CE484222325u;

    for (size_t i = 0; i < s.len; i++)
        h = (h ^ (uint8_t)s.ptr[i]) * 0x100000001B3u;
    return (uint32_t)(h ^ h >> 32);
}

/* The id with these bytes, or -1; *slot is where it is or would go. */
static int32_t table_find(const struct text_table *table, const struct ds4_vocab *vocab,
                          struct ds4_str bytes, uint32_t *slot)
{
    uint32_t i = hash_bytes(bytes) & table->mask;

    for (; table->id_1[i] != 0; i = (i + 1) & table->mask) {
        int32_t id = (int32_t)(table->id_1[i] - 1);

        if (ds4_str_equal(ds4_vocab_piece(vocab, id), bytes)) {
            *slot = i;
            return id;
        }
    }
    *slot = i;
    return -1;
}

/* A power of two with at least twice the room. */
static uint32_t slots_for(size_t n)
{
    uint32_t slots = 1u << MIN_SLOTS_SHIFT;

    while (slots < 2 * n)
        slots *= 2;
    return slots;
}

static bool is_special_text(struct ds4_str text)
{
    for (int s = 0; s < DS4_N_SPECIAL; s++)
        if (ds4_str_equal(text, special_texts[s]))
            return true;
    return false;
}

/* Fills bytes, offset and kind. */
static int store_tokens(struct ds4_vocab *vocab, const struct ds4_vocab_entry *entries,
                        struct ds4_err *err)
{
    uint8_t shifted[N_SHIFTED];
    size_t total = 0;

    shifted_bytes(shifted);
    for (int32_t id = 0; id < vocab->n_token; id++)
        if (ds4_add_size(total, entries[id].text.len, "vocabulary text", &total, err))
            return -1;
    if (total > UINT32_MAX)
        return ds4_fail(err, DS4_E_CORRUPT, "vocabulary text has %zu bytes, too many", total);
    vocab->bytes = calloc(total + DS4_TOKEN_SLACK_BYTES, 1);
    if (vocab->bytes == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for %zu bytes of vocabulary", total);
    total = 0;
    for (int32_t id = 0; id < vocab->n_token; id++) {
        struct ds4_str text = entries[id].text;
        enum ds4_token_kind kind = entries[id].kind;
        ptrdiff_t n = (ptrdiff_t)text.len;

        vocab->offset[id] = (uint32_t)total;
        if (kind != DS4_TOKEN_ABSENT && text.len == 0)
            return ds4_fail(err, DS4_E_CORRUPT, "token %d is empty", id);
        if (kind == DS4_TOKEN_NORMAL && is_special_text(text))
            kind = DS4_TOKEN_ADDED;
        if (kind == DS4_TOKEN_NORMAL) {
            n = decode_alphabet(text, shifted, vocab->bytes + total);
            if (n < 0) /* no merge can make it: some converters mark added tokens as normal */
                kind = DS4_TOKEN_ADDED;
        }
        if (kind == DS4_TOKEN_ABSENT) {
            n = 0;
        } else if (kind == DS4_TOKEN_ADDED) {
            n = (ptrdiff_t)text.len;
            memcpy(vocab->bytes + total, text.ptr, text.len);
        }
        vocab->kind[id] = (uint8_t)kind;
        total += (size_t)n;
    }
    vocab->offset[vocab->n_token] = (uint32_t)total;
    return 0;
}

static int index_tokens(struct ds4_vocab *vocab, struct text_table *table, struct ds4_err *err)
{
    for (int32_t id = 0; id < vocab->n_token; id++) {
        struct ds4_str bytes = ds4_vocab_piece(vocab, id);
        uint32_t slot;
        int32_t twin;

        if (vocab->kind[id] == DS4_TOKEN_ABSENT)
            continue;
        twin = table_find(table, vocab, bytes, &slot);
        if (twin >= 0)
            return ds4_fail(err, DS4_E_CORRUPT, "token %d repeats token %d", id, twin);
        table->id_1[slot] = (uint32_t)id + 1;
        vocab->n_added += vocab->kind[id] == DS4_TOKEN_ADDED;
    }
    for (int byte = 0; byte < N_BYTE; byte++) {
        char c = (char)byte;
        uint32_t slot;
        int32_t id = table_find(table, vocab, (struct ds4_str){&c, 1}, &slot);

        if (id < 0 || vocab->kind[id] != DS4_TOKEN_NORMAL)
            return ds4_fail(err, DS4_E_CORRUPT, "no token for the byte 0x%02x", (unsigned)byte);
        vocab->byte_id[byte] = id;
    }
    return 0;
}

/* Resolves one side of merge `rank` to a normal token. */
static int find_part(const struct ds4_vocab *vocab, const struct text_table *table, size_t rank,
                     struct ds4_str bytes, const char *what, int32_t *id, struct ds4_err *err)
{
    uint32_t slot;

    *id = table_find(table, vocab, bytes, &slot);
    if (*id < 0 || vocab->kind[*id] != DS4_TOKEN_NORMAL)
        return ds4_fail(err, DS4_E_CORRUPT, "merge %zu: its %s is no token", rank, what);
    return 0;
}

static int store_merge(struct ds4_vocab *vocab, const struct text_table *table, size_t rank,
                       const struct ds4_vocab_pair *pair, const uint8_t *shifted, char *scratch,
                       struct ds4_err *err)
{
    struct ds4_merge *merge = &vocab->merges[rank];
    ptrdiff_t n_left = decode_alphabet(pair->left, shifted, scratch);
    ptrdiff_t n_right = n_left < 0 ? -1 : decode_alphabet(pair->right, shifted, scratch + n_left);
    uint32_t tag, i;

    if (n_left <= 0 || n_right <= 0)
        return ds4_fail(err, DS4_E_CORRUPT, "merge %zu has a side outside the byte alphabet", rank);
    if (find_part(vocab, table, rank, (struct ds4_str){scratch, (size_t)n_left}, "left side",
                  &merge->left, err) ||
        find_part(vocab, table, rank, (struct ds4_str){scratch + n_left, (size_t)n_right},
                  "right side", &merge->right, err) ||
        find_part(vocab, table, rank, (struct ds4_str){scratch, (size_t)(n_left + n_right)},
                  "result", &merge->result, err))
        return -1;
    if (ds4_vocab_rank(vocab, merge->left, merge->right) != DS4_NO_RANK)
        return ds4_fail(err, DS4_E_CORRUPT, "merge %zu repeats an earlier merge", rank);
    i = ds4_vocab_pair_hash(merge->left, merge->right, &tag) & vocab->slot_mask;
    while (vocab->slots[i].rank_1 != 0)
        i = (i + 1) & vocab->slot_mask;
    vocab->slots[i] = (struct ds4_merge_slot){tag, (uint32_t)rank + 1};
    return 0;
}

static int store_merges(struct ds4_vocab *vocab, const struct text_table *table,
                        const struct ds4_vocab_pair *pairs, struct ds4_err *err)
{
    uint8_t shifted[N_SHIFTED];
    size_t longest = 0;
    char *scratch;
    int rc = 0;

    shifted_bytes(shifted);
    for (int32_t r = 0; r < vocab->n_merge; r++)
        if (pairs[r].left.len + pairs[r].right.len > longest)
            longest = pairs[r].left.len + pairs[r].right.len;
    scratch = malloc(longest + 1);
    if (scratch == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for a merge of %zu bytes", longest);
    for (int32_t r = 0; r < vocab->n_merge && rc == 0; r++)
        rc = store_merge(vocab, table, (size_t)r, &pairs[r], shifted, scratch, err);
    free(scratch);
    for (int i = 0; i < N_BYTE_PAIR && rc == 0; i++)
        vocab->byte_pair_rank[i] =
            ds4_vocab_rank(vocab, vocab->byte_id[i / N_BYTE], vocab->byte_id[i % N_BYTE]);
    return rc;
}

static int compare_added(const void *a, const void *b, void *vocab)
{
    struct ds4_str x = ds4_vocab_piece(vocab, *(const int32_t *)a);
    struct ds4_str y = ds4_vocab_piece(vocab, *(const int32_t *)b);
    int order = memcmp(x.ptr, y.ptr, x.len < y.len ? x.len : y.len);

    return order != 0 ? order : (x.len > y.len) - (x.len < y.len);
}

static void index_added(struct ds4_vocab *vocab)
{
    int32_t n = 0;

    for (int32_t id = 0; id < vocab->n_token; id++)
        if (vocab->kind[id] == DS4_TOKEN_ADDED)
            vocab->added[n++] = id;
    qsort_r(vocab->added, (size_t)n, sizeof(*vocab->added), compare_added, vocab);
    for (int32_t a = 0; a < n; a++) {
        struct ds4_str text = ds4_vocab_piece(vocab, vocab->added[a]);
        unsigned b0 = (uint8_t)text.ptr[0];

        vocab->added_first[b0] = true;
        if (text.len > 1) {
            unsigned pair = b0 << 8 | (uint8_t)text.ptr[1];

            vocab->added_first2[pair / 8] |= (uint8_t)(1u << pair % 8);
        } else {
            memset(vocab->added_first2 + b0 * (N_BYTE / 8), 0xFF, N_BYTE / 8);
        }
    }
    for (int s = 0; s < DS4_N_SPECIAL; s++)
        vocab->special[s] = ds4_vocab_find_added(vocab, special_texts[s]);
}

/* Placeholders are told by their text: the `special` flags of public files disagree. */
static bool is_placeholder(struct ds4_str text)
{
    return ds4_str_find(text, DS4_STR("place▁holder"), 0) != DS4_STR_NONE ||
           ds4_str_find(text, DS4_STR("place_holder"), 0) != DS4_STR_NONE ||
           ds4_str_find(text, DS4_STR("reserved▁"), 0) != DS4_STR_NONE;
}

static void set_traits(struct ds4_vocab *vocab)
{
    for (int32_t id = 0; id < vocab->n_token; id++) {
        struct ds4_str piece = ds4_vocab_piece(vocab, id);

        vocab->traits[id] = ds4_utf8_valid(piece) ? DS4_TOKEN_WHOLE : 0;
        if (piece.len > 0 && ds4_utf8_cut_tail(piece) == piece.len)
            vocab->traits[id] |= DS4_TOKEN_CUT;
        vocab->traits[id] |= (uint16_t)(ds4_byte_classes(piece) << DS4_TOKEN_CLASS);
        if (vocab->kind[id] == DS4_TOKEN_ADDED &&
            (id == vocab->special[DS4_SPECIAL_BOS] || id == vocab->special[DS4_SPECIAL_EOS] ||
             id == vocab->special[DS4_SPECIAL_PAD] || is_placeholder(piece)))
            vocab->traits[id] |= DS4_TOKEN_HIDDEN;
    }
}

struct ds4_vocab *ds4_vocab_new(const struct ds4_vocab_entry *entries, size_t n_entry,
                                const struct ds4_vocab_pair *pairs, size_t n_pair,
                                struct ds4_err *err)
{
    struct ds4_vocab *vocab = NULL;
    struct text_table table = {0};

    if (n_entry == 0 || n_entry > MAX_TOKEN || n_pair > MAX_TOKEN) {
        ds4_fail(err, DS4_E_CORRUPT, "a vocabulary of %zu tokens and %zu merges is out of range",
                 n_entry, n_pair);
        return NULL;
    }
    vocab = calloc(1, sizeof(*vocab));
    if (vocab == NULL)
        goto no_memory;
    vocab->n_token = (int32_t)n_entry;
    vocab->n_merge = (int32_t)n_pair;
    vocab->slot_mask = slots_for(n_pair) - 1;
    table.mask = slots_for(n_entry) - 1;
    vocab->offset = calloc(n_entry + 1, sizeof(*vocab->offset));
    vocab->kind = calloc(n_entry, sizeof(*vocab->kind));
    vocab->traits = calloc(n_entry, sizeof(*vocab->traits));
    vocab->merges = calloc(n_pair + 1, sizeof(*vocab->merges));
    vocab->slots = calloc((size_t)vocab->slot_mask + 1, sizeof(*vocab->slots));
    vocab->byte_pair_rank = calloc(N_BYTE_PAIR, sizeof(*vocab->byte_pair_rank));
    table.id_1 = calloc((size_t)table.mask + 1, sizeof(*table.id_1));
    if (vocab->offset == NULL || vocab->kind == NULL || vocab->traits == NULL ||
        vocab->merges == NULL || vocab->slots == NULL || vocab->byte_pair_rank == NULL ||
        table.id_1 == NULL)
        goto no_memory;
    if (store_tokens(vocab, entries, err) || index_tokens(vocab, &table, err) ||
        store_merges(vocab, &table, pairs, err))
        goto fail;
    vocab->added = calloc((size_t)vocab->n_added + 1, sizeof(*vocab->added));
    if (vocab->added == NULL)
        goto no_memory;
    index_added(vocab);
    set_traits(vocab);
    free(table.id_1);
    return vocab;

no_memory:
    ds4_fail(err, DS4_E_NOMEM, "no memory for a vocabulary of %zu tokens", n_entry);
fail:
    free(table.id_1);
    ds4_vocab_free(vocab);
    return NULL;
}

void ds4_vocab_free(struct ds4_vocab *vocab)
{
    if (vocab == NULL)
        return;
    free(vocab->bytes);
    free(vocab->offset);
    free(vocab->kind);
    free(vocab->traits);
    free(vocab->merges);
    free(vocab->slots);
    free(vocab->byte_pair_rank);
    free(vocab->added);
    free(vocab);
}

/* The first index in [from, to) of `added` whose byte at `depth` is >= c (`after`: > c); tokens that
 * end at `depth` sort first. */
static int32_t narrow(const struct ds4_vocab *vocab, int32_t from, int32_t to, size_t depth, int c)
{
    while (from < to) {
        int32_t mid = from + (to - from) / 2;
        struct ds4_str text = ds4_vocab_piece(vocab, vocab->added[mid]);
        int byte = depth < text.len ? (uint8_t)text.ptr[depth] : -1;

        if (byte < c)
            from = mid + 1;
        else
            to = mid;
    }
    return from;
}

size_t ds4_vocab_match_added(const struct ds4_vocab *vocab, const char *p, size_t n, int32_t *id)
{
    int32_t from = 0, to = vocab->n_added;
    size_t best = 0;

    for (size_t depth = 0; depth < n && from < to; depth++) {
        int c = (uint8_t)p[depth];

        from = narrow(vocab, from, to, depth, c);
        to = narrow(vocab, from, to, depth, c + 1);
        if (from < to && ds4_vocab_piece(vocab, vocab->added[from]).len == depth + 1) {
            best = depth + 1;
            *id = vocab->added[from];
        }
    }
    return best;
}

int32_t ds4_vocab_find_added(const struct ds4_vocab *vocab, struct ds4_str text)
{
    int32_t id = -1;

    return ds4_vocab_match_added(vocab, text.ptr, text.len, &id) == text.len ? id : -1;
}

int32_t ds4_vocab_special(const struct ds4_vocab *vocab, enum ds4_special which)
{
    return vocab->special[which];
}

struct ds4_str ds4_special_text(enum ds4_special which)
{
    return special_texts[which];
}

int ds4_vocab_require_chat(const struct ds4_vocab *vocab, bool system, struct ds4_err *err)
{
    static const enum ds4_special needed[] = {
        DS4_SPECIAL_BOS,       DS4_SPECIAL_EOS,        DS4_SPECIAL_USER,
        DS4_SPECIAL_ASSISTANT, DS4_SPECIAL_THINK_OPEN, DS4_SPECIAL_THINK_CLOSE,
    };

    for (size_t i = 0; i < sizeof(needed) / sizeof(needed[0]); i++)
        if (vocab->special[needed[i]] < 0)
            return ds4_fail(err, DS4_E_CORRUPT, "the vocabulary lacks the token %s",
                            special_texts[needed[i]].ptr);
    if (system && vocab->special[DS4_SPECIAL_SYSTEM] < 0)
        return ds4_fail(err, DS4_E_CORRUPT, "the vocabulary lacks the token %s",
                        special_texts[DS4_SPECIAL_SYSTEM].ptr);
    return 0;
}

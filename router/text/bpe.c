/* Byte-pair encoding.  Step 3 of the request path.
 *
 * Added tokens are cut out first (longest at each position, leftmost), what lies between goes through
 * the pre-tokenizer, and each piece is merged: always the adjacent pair of the lowest rank, leftmost
 * on ties, until no pair is in the table.
 *
 * Words repeat, so short pieces are answered from a direct-mapped cache of 64-byte lines: one memory
 * access for a word seen before.  Merging itself scans the ranks of a short piece (they fit in L1) and
 * uses a heap over a linked list for a long one, so a megabyte of one letter stays O(n log n). */
#include "router/text/bpe.h"

#include "router/text/pretok.h"

#include <assert.h>
#include <stdlib.h>

#define CACHE_LINES      65536
#define CACHE_MAX_BYTES  40 /* longest cached piece */
#define CACHE_MAX_IDS    5  /* most ids of a cached piece */
#define CACHE_WORD_BYTES 8
#define SHORT_PIECE      96 /* up to here scanning for the lowest rank beats the heap */
#define MAX_TEXT_BYTES   ((size_t)INT32_MAX)

/* One cached piece; the bytes behind n_bytes are zero so that keys compare by words. */
struct cache_line {
    uint64_t key[CACHE_MAX_BYTES / CACHE_WORD_BYTES];
    uint8_t n_bytes; /* 0 = empty */
    uint8_t n_id;
    int32_t id[CACHE_MAX_IDS];
};
_Static_assert(sizeof(struct cache_line) == 64,
               "a cache line of the piece cache is one of the CPU");

/* A symbol of a long piece; dead ones keep their place in the array. */
struct symbol {
    int32_t id; /* -1 = merged into its left neighbour */
    int32_t prev, next;
    uint32_t rank; /* of (this, next) */
};

struct ds4_bpe {
    const struct ds4_vocab *vocab;
    struct cache_line *cache;
    DS4_VEC(struct symbol) symbols;
    DS4_VEC(uint64_t) heap; /* rank << 32 | position: lowest rank first, then leftmost */
};

struct ds4_bpe *ds4_bpe_new(const struct ds4_vocab *vocab, struct ds4_err *err)
{
    struct ds4_bpe *bpe = calloc(1, sizeof(*bpe));

    if (bpe != NULL)
        bpe->cache =
            aligned_alloc(sizeof(struct cache_line), CACHE_LINES * sizeof(struct cache_line));
    if (bpe == NULL || bpe->cache == NULL) {
        ds4_bpe_free(bpe);
        ds4_fail(err, DS4_E_NOMEM, "no memory for an encoder");
        return NULL;
    }
    memset(bpe->cache, 0, CACHE_LINES * sizeof(struct cache_line));
    bpe->vocab = vocab;
    return bpe;
}

void ds4_bpe_free(struct ds4_bpe *bpe)
{
    if (bpe == NULL)
        return;
    free(bpe->cache);
    DS4_VEC_DEINIT(&bpe->symbols);
    DS4_VEC_DEINIT(&bpe->heap);
    free(bpe);
}

const struct ds4_vocab *ds4_bpe_vocab(const struct ds4_bpe *bpe)
{
    return bpe->vocab;
}

static inline uint32_t initial_rank(const struct ds4_vocab *vocab, uint8_t left, uint8_t right)
{
    return vocab->byte_pair_rank[(unsigned)left << 8 | right];
}

/* Merges a piece of 1..SHORT_PIECE bytes; writes at most n ids to out and returns how many. */
static int merge_short(const struct ds4_vocab *vocab, const uint8_t *piece, int n,
                       int32_t out[SHORT_PIECE])
{
    uint32_t rank[SHORT_PIECE]; /* of (i, i + 1); the last is DS4_NO_RANK */

    for (int i = 0; i < n; i++) {
        out[i] = vocab->byte_id[piece[i]];
        rank[i] = i + 1 < n ? initial_rank(vocab, piece[i], piece[i + 1]) : DS4_NO_RANK;
    }
    for (;;) {
        uint64_t best = UINT64_MAX; /* rank << 32 | position: its minimum needs no branch */
        int at;

        for (int i = 0; i + 1 < n; i++) {
            uint64_t key = (uint64_t)rank[i] << 32 | (uint32_t)i;

            best = key < best ? key : best;
        }
        if (best >> 32 == DS4_NO_RANK)
            return n;
        at = (int)(uint32_t)best;
        out[at] = vocab->merges[best >> 32].result;
        n--;
        memmove(out + at + 1, out + at + 2, (size_t)(n - at - 1) * sizeof(*out));
        memmove(rank + at, rank + at + 1, (size_t)(n - at) * sizeof(*rank));
        if (at + 1 < n)
            rank[at] = ds4_vocab_rank(vocab, out[at], out[at + 1]);
        if (at > 0)
            rank[at - 1] = ds4_vocab_rank(vocab, out[at - 1], out[at]);
    }
}

static int heap_push(struct ds4_bpe *bpe, uint32_t rank, int32_t pos)
{
    uint64_t key = (uint64_t)rank << 32 | (uint32_t)pos;
    size_t i = bpe->heap.len;

    if (rank == DS4_NO_RANK)
        return 0;
    if (DS4_VEC_PUSH(&bpe->heap, key) != 0)
        return -1;
    while (i > 0 && bpe->heap.ptr[(i - 1) / 2] > key) {
        bpe->heap.ptr[i] = bpe->heap.ptr[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    bpe->heap.ptr[i] = key;
    return 0;
}

static uint64_t heap_pop(struct ds4_bpe *bpe)
{
    uint64_t *heap = bpe->heap.ptr;
    uint64_t top = heap[0];
    uint64_t key = DS4_VEC_POP(&bpe->heap);
    size_t n = bpe->heap.len;
    size_t i = 0;

    for (size_t child = 1; child < n; child = 2 * i + 1) {
        if (child + 1 < n && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= key)
            break;
        heap[i] = heap[child];
        i = child;
    }
    if (n > 0)
        heap[i] = key;
    return top;
}

/* Looks the pair (pos, next) up again after one of its sides changed. */
static int rerank(struct ds4_bpe *bpe, int32_t pos)
{
    struct symbol *s = &bpe->symbols.ptr[pos];

    s->rank =
        s->next < 0 ? DS4_NO_RANK : ds4_vocab_rank(bpe->vocab, s->id, bpe->symbols.ptr[s->next].id);
    return heap_push(bpe, s->rank, pos);
}

/* Fills the list and the heap from the bytes of a long piece. */
static int load_symbols(struct ds4_bpe *bpe, const uint8_t *piece, int32_t n)
{
    bpe->heap.len = 0;
    if (DS4_VEC_RESERVE(&bpe->symbols, (size_t)n) != 0)
        return -1;
    for (int32_t i = 0; i < n; i++) {
        bool last = i + 1 == n;

        bpe->symbols.ptr[i] = (struct symbol){
            .id = bpe->vocab->byte_id[piece[i]],
            .prev = i - 1,
            .next = last ? -1 : i + 1,
            .rank = last ? DS4_NO_RANK : initial_rank(bpe->vocab, piece[i], piece[i + 1]),
        };
        if (heap_push(bpe, bpe->symbols.ptr[i].rank, i) != 0)
            return -1;
    }
    return 0;
}

static int merge_long(struct ds4_bpe *bpe, const uint8_t *piece, int32_t n, struct ds4_ids *ids)
{
    if (load_symbols(bpe, piece, n) != 0)
        return -1;
    while (bpe->heap.len > 0) {
        uint64_t top = heap_pop(bpe);
        int32_t pos = (int32_t)(uint32_t)top;
        struct symbol *s = &bpe->symbols.ptr[pos];
        struct symbol *gone;

        if (s->id < 0 || s->rank != (uint32_t)(top >> 32))
            continue; /* an entry that a later merge made stale */
        gone = &bpe->symbols.ptr[s->next];
        s->id = bpe->vocab->merges[s->rank].result;
        s->next = gone->next;
        gone->id = -1;
        if (s->next >= 0)
            bpe->symbols.ptr[s->next].prev = pos;
        if (rerank(bpe, pos) != 0 || (s->prev >= 0 && rerank(bpe, s->prev) != 0))
            return -1;
    }
    for (int32_t i = 0; i >= 0; i = bpe->symbols.ptr[i].next)
        if (DS4_VEC_PUSH(ids, bpe->symbols.ptr[i].id) != 0)
            return -1;
    return 0;
}

static inline int append_ids(struct ds4_ids *ids, const int32_t *id, int n)
{
    if (ids->len + (size_t)n > ids->cap && DS4_VEC_RESERVE(ids, ids->len + (size_t)n) != 0)
        return -1;
    for (int i = 0; i < n; i++)
        ids->ptr[ids->len + (size_t)i] = id[i];
    ids->len += (size_t)n;
    return 0;
}

static int merge_piece(struct ds4_bpe *bpe, const uint8_t *piece, size_t n, struct ds4_ids *ids)
{
    int32_t out[SHORT_PIECE];

    if (n > SHORT_PIECE)
        return merge_long(bpe, piece, (int32_t)n, ids);
    return append_ids(ids, out, merge_short(bpe->vocab, piece, (int)n, out));
}

/* Up to eight bytes, zero-padded.  Inside the text a whole word is read and masked (the bytes lie in
 * the word's low end: x86-64 only), which is several times faster than a copy of unknown length. */
static inline uint64_t load_word(const uint8_t *p, size_t n, const uint8_t *text_end)
{
    uint64_t word = 0;

    if (text_end - p >= CACHE_WORD_BYTES) {
        memcpy(&word, p, CACHE_WORD_BYTES);
        return n >= CACHE_WORD_BYTES ? word : word & ((UINT64_C(1) << 8 * n) - 1);
    }
    memcpy(&word, p, n < CACHE_WORD_BYTES ? n : CACHE_WORD_BYTES);
    return word;
}

/* The piece as zero-padded words; returns how many words and mixes them into *hash. */
static inline size_t load_key(const uint8_t *piece, size_t n, const uint8_t *text_end,
                              uint64_t *key, uint64_t *hash)
{
    size_t n_word = (n + CACHE_WORD_BYTES - 1) / CACHE_WORD_BYTES;
    uint64_t h = n;

    for (size_t w = 0; w < n_word; w++) {
        key[w] = load_word(piece + w * CACHE_WORD_BYTES, n - w * CACHE_WORD_BYTES, text_end);
        h = (h ^ key[w]) * 0x9E3779B97F4A7C15u;
        h ^= h >> 32;
    }
    *hash = h;
    return n_word;
}

static inline int encode_piece(struct ds4_bpe *bpe, const uint8_t *piece, size_t n,
                               const uint8_t *text_end, struct ds4_ids *ids)
{
    uint64_t key[CACHE_MAX_BYTES / CACHE_WORD_BYTES];
    struct cache_line *line;
    uint64_t hash;
    size_t n_word, before = ids->len;

    if (n == 1)
        return append_ids(ids, &bpe->vocab->byte_id[piece[0]], 1);
    if (n > CACHE_MAX_BYTES)
        return merge_piece(bpe, piece, n, ids);
    n_word = load_key(piece, n, text_end, key, &hash);
    line = &bpe->cache[hash % CACHE_LINES];
    if (line->n_bytes == n) {
        size_t same = 0;

        while (same < n_word && line->key[same] == key[same])
            same++;
        if (same == n_word)
            return append_ids(ids, line->id, line->n_id);
    }
    if (merge_piece(bpe, piece, n, ids) != 0)
        return -1;
    if (ids->len - before <= CACHE_MAX_IDS) {
        memcpy(line->key, key, n_word * sizeof(*key));
        line->n_bytes = (uint8_t)n;
        line->n_id = (uint8_t)(ids->len - before);
        memcpy(line->id, ids->ptr + before, line->n_id * sizeof(*line->id));
    }
    return 0;
}

/* A stretch without added tokens. */
static int encode_plain(struct ds4_bpe *bpe, struct ds4_str text, struct ds4_ids *ids)
{
    const uint8_t *end = (const uint8_t *)text.ptr + text.len;
    struct ds4_pretok it;
    struct ds4_str piece;

    ds4_pretok_init(&it, text);
    while (ds4_pretok_next(&it, &piece))
        if (encode_piece(bpe, (const uint8_t *)piece.ptr, piece.len, end, ids) != 0)
            return -1;
    return 0;
}

/* Start of the next added token inside [from, to), `to` if none; sets *id and *n_bytes. */
static size_t find_added(const struct ds4_vocab *vocab, struct ds4_str text, size_t from, size_t to,
                         int32_t *id, size_t *n_bytes)
{
    const uint8_t *p = (const uint8_t *)text.ptr;

    for (size_t i = from; i < to; i++) {
        unsigned pair;

        if (!vocab->added_first[p[i]])
            continue;
        pair = (unsigned)p[i] << 8 | (i + 1 < to ? p[i + 1] : 0);
        if (i + 1 < to && !(vocab->added_first2[pair / 8] >> pair % 8 & 1))
            continue;
        *n_bytes = ds4_vocab_match_added(vocab, text.ptr + i, to - i, id);
        if (*n_bytes > 0)
            return i;
    }
    return to;
}

int ds4_bpe_encode_spans(struct ds4_bpe *bpe, struct ds4_str text, const struct ds4_bpe_span *spans,
                         size_t n_span, struct ds4_ids *ids, struct ds4_err *err)
{
    size_t done = 0; /* bytes encoded */

    if (text.len >= MAX_TEXT_BYTES)
        return ds4_fail(err, DS4_E_TOO_LONG, "a text of %zu bytes cannot be tokenised", text.len);
    for (size_t s = 0; s < n_span; s++) {
        size_t from = spans[s].start;

        assert(from >= done && spans[s].end <= text.len);
        while (from < spans[s].end) {
            size_t n_bytes = 0;
            int32_t id = -1;
            size_t hit = find_added(bpe->vocab, text, from, spans[s].end, &id, &n_bytes);

            if (n_bytes == 0)
                break;
            if (encode_plain(bpe, (struct ds4_str){text.ptr + done, hit - done}, ids) != 0 ||
                DS4_VEC_PUSH(ids, id) != 0)
                goto no_memory;
            done = from = hit + n_bytes;
        }
    }
    if (encode_plain(bpe, ds4_str_skip(text, done), ids) == 0)
        return 0;
no_memory:
    return ds4_fail(err, DS4_E_NOMEM, "no memory for the ids of %zu bytes", text.len);
}

int ds4_bpe_encode(struct ds4_bpe *bpe, struct ds4_str text, enum ds4_bpe_specials specials,
                   struct ds4_ids *ids, struct ds4_err *err)
{
    struct ds4_bpe_span whole = {0, text.len};

    return ds4_bpe_encode_spans(bpe, text, &whole, specials == DS4_BPE_SPECIAL, ids, err);
}

/* Bounded LRU of texts.
 *
 * Chained hash table of a size fixed at start (two buckets per entry, so chains stay short) and a list
 * in order of use through the same nodes.  The hash is seeded: keys come from clients. */
#include "router/api/text_store.h"

#include <stdlib.h>
#include <sys/random.h>
#include <xxhash.h>

#define DS4_OPAQUE_VERSION    1
#define DS4_OPAQUE_KEY_BYTES  16
#define DS4_STORE_MAX_BUCKETS ((size_t)1 << 20)

struct entry {
    struct entry *chain;
    struct entry *newer, *older;
    uint64_t hash;
    int64_t stored_ns;
    size_t key_len;
    size_t text_len;
    char bytes[]; /* key, then text */
};

struct ds4_text_store {
    size_t max_entries;
    size_t max_bytes;
    int64_t max_age_ns;
    uint64_t seed;
    size_t n;
    size_t used_bytes;
    struct entry *newest, *oldest;
    size_t n_bucket; /* a power of two */
    struct entry *bucket[];
};

struct ds4_text_store *ds4_text_store_new(size_t max_entries, size_t max_bytes, int64_t max_age_ns,
                                          struct ds4_err *err)
{
    struct ds4_text_store *store;
    size_t n_bucket = 16;

    while (n_bucket < max_entries * 2 && n_bucket < DS4_STORE_MAX_BUCKETS)
        n_bucket *= 2;
    store = calloc(1, sizeof(*store) + n_bucket * sizeof(struct entry *));
    if (store == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for a store of %zu texts", max_entries);
        return NULL;
    }
    store->max_entries = max_entries;
    store->max_bytes = max_bytes;
    store->max_age_ns = max_age_ns;
    store->n_bucket = n_bucket;
    (void)getrandom(&store->seed, sizeof(store->seed), 0);
    return store;
}

void ds4_text_store_free(struct ds4_text_store *store)
{
    if (store == NULL)
        return;
    while (store->oldest != NULL) {
        struct entry *next = store->oldest->newer;

        free(store->oldest);
        store->oldest = next;
    }
    free(store);
}

/* ---- one entry ----------------------------------------------------------------------------------- */

static size_t size_of(const struct entry *entry)
{
    return sizeof(*entry) + entry->key_len + entry->text_len;
}

static struct entry **place_of(struct ds4_text_store *store, struct ds4_str key, uint64_t *hash)
{
    struct entry **at;

    *hash = XXH3_64bits_withSeed(key.ptr, key.len, store->seed);
    at = &store->bucket[*hash & (store->n_bucket - 1)];
    while (*at != NULL && ((*at)->hash != *hash || (*at)->key_len != key.len ||
                           memcmp((*at)->bytes, key.ptr, key.len) != 0))
        at = &(*at)->chain;
    return at;
}

static void unlink_use(struct ds4_text_store *store, struct entry *entry)
{
    *(entry->newer != NULL ? &entry->newer->older : &store->newest) = entry->older;
    *(entry->older != NULL ? &entry->older->newer : &store->oldest) = entry->newer;
    entry->newer = entry->older = NULL;
}

static void link_newest(struct ds4_text_store *store, struct entry *entry)
{
    entry->older = store->newest;
    *(store->newest != NULL ? &store->newest->newer : &store->oldest) = entry;
    store->newest = entry;
}

/* `at` is the pointer in the chain that leads to the entry. */
static void drop(struct ds4_text_store *store, struct entry **at)
{
    struct entry *entry = *at;

    *at = entry->chain;
    unlink_use(store, entry);
    store->n--;
    store->used_bytes -= size_of(entry);
    free(entry);
}

static void drop_oldest(struct ds4_text_store *store)
{
    struct entry **at = &store->bucket[store->oldest->hash & (store->n_bucket - 1)];

    while (*at != store->oldest)
        at = &(*at)->chain;
    drop(store, at);
}

/* ---- public --------------------------------------------------------------------------------------- */

int ds4_text_store_put(struct ds4_text_store *store, struct ds4_str key, struct ds4_str text,
                       int64_t now_ns)
{
    struct entry *entry;
    uint64_t hash;
    struct entry **at = place_of(store, key, &hash);
    size_t room = store->max_bytes;

    if (*at != NULL)
        drop(store, at);
    if (store->max_entries == 0 || room < sizeof(*entry) || key.len > room - sizeof(*entry) ||
        text.len > room - sizeof(*entry) - key.len)
        return -1;
    entry = malloc(sizeof(*entry) + key.len + text.len);
    if (entry == NULL)
        return -1;
    *entry =
        (struct entry){.hash = hash, .stored_ns = now_ns, .key_len = key.len, .text_len = text.len};
    memcpy(entry->bytes, key.ptr, key.len);
    if (text.len > 0)
        memcpy(entry->bytes + key.len, text.ptr, text.len);
    while (store->n > 0 && (store->n >= store->max_entries ||
                            store->used_bytes + size_of(entry) > store->max_bytes))
        drop_oldest(store);
    at = &store->bucket[hash & (store->n_bucket - 1)];
    entry->chain = *at;
    *at = entry;
    link_newest(store, entry);
    store->n++;
    store->used_bytes += size_of(entry);
    return 0;
}

struct ds4_str ds4_text_store_get(struct ds4_text_store *store, struct ds4_str key, int64_t now_ns)
{
    uint64_t hash;
    struct entry **at = place_of(store, key, &hash);
    struct entry *entry = *at;

    if (entry == NULL)
        return (struct ds4_str){NULL, 0};
    if (store->max_age_ns > 0 && now_ns - entry->stored_ns > store->max_age_ns) {
        drop(store, at);
        return (struct ds4_str){NULL, 0};
    }
    unlink_use(store, entry);
    link_newest(store, entry);
    return (struct ds4_str){entry->bytes + entry->key_len, entry->text_len};
}

bool ds4_text_store_remove(struct ds4_text_store *store, struct ds4_str key)
{
    uint64_t hash;
    struct entry **at = place_of(store, key, &hash);

    if (*at == NULL)
        return false;
    drop(store, at);
    return true;
}

size_t ds4_text_store_count(const struct ds4_text_store *store)
{
    return store->n;
}

size_t ds4_text_store_bytes(const struct ds4_text_store *store)
{
    return store->used_bytes;
}

void ds4_text_store_opaque(char token[DS4_OPAQUE_CHARS + 1])
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    unsigned char raw[18] = {DS4_OPAQUE_VERSION}; /* 17 bytes and one for the last group */
    char *out = token;

    if (getrandom(raw + 1, DS4_OPAQUE_KEY_BYTES, 0) != DS4_OPAQUE_KEY_BYTES)
        abort(); /* a predictable token would be worse; the kernel does not fail below 256 bytes */
    for (size_t i = 0; i < sizeof(raw); i += 3) {
        uint32_t group = (uint32_t)raw[i] << 16 | (uint32_t)raw[i + 1] << 8 | raw[i + 2];

        *out++ = digits[group >> 18];
        *out++ = digits[group >> 12 & 63];
        *out++ = digits[group >> 6 & 63];
        *out++ = digits[group & 63];
    }
    out[-1] = '='; /* 17 bytes leave one place of the last group empty */
    *out = '\0';
}

/* Names of token prefixes: a chain of hashes over chunks of DS4_CHUNK_TOK tokens.
 *
 *   key of a root   = H(salt)                      nothing is shared between salts
 *   key of a chunk  = H(key before, its tokens)    so it stands for everything before it, too
 *
 * A pure function of salt and tokens: what is kept on disk under such a name is found again by another
 * process.  Equal names are never taken for equal tokens: who finds one compares. */
#ifndef DS4_ROUTER_SCHED_CHAIN_H
#define DS4_ROUTER_SCHED_CHAIN_H

#include <stdint.h>
#include <string.h>

#include <xxhash.h>

#define DS4_CHUNK_TOK 128

static inline XXH128_hash_t ds4_chain_root(uint64_t salt)
{
    return XXH3_128bits(&salt, sizeof(salt));
}

/* n tokens more, at most a chunk of them; none: the key stays. */
static inline XXH128_hash_t ds4_chain_next(XXH128_hash_t key, const int32_t *token, int32_t n)
{
    unsigned char text[sizeof(key) + DS4_CHUNK_TOK * sizeof(*token)];

    if (n == 0)
        return key;
    memcpy(text, &key, sizeof(key));
    memcpy(text + sizeof(key), token, (size_t)n * sizeof(*token));
    return XXH3_128bits(text, sizeof(key) + (size_t)n * sizeof(*token));
}

#endif

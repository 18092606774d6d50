/* A bounded memory of texts by key: stored responses, reasoning that comes back as an opaque token.
 *
 * The least recently used entry leaves first when a limit is reached; entries older than the maximum
 * age are not found.  The store owns copies.  Loop thread only. */
#ifndef DS4_ROUTER_API_TEXT_STORE_H
#define DS4_ROUTER_API_TEXT_STORE_H

#include "common/err.h"
#include "common/str.h"

#include <stdbool.h>
#include <stdint.h>

struct ds4_text_store;

/* Limits: entries, bytes of keys and texts, age in nanoseconds (0 = none).  max_entries 0 keeps nothing.
 * NULL with DS4_E_NOMEM. */
struct ds4_text_store *ds4_text_store_new(size_t max_entries, size_t max_bytes, int64_t max_age_ns,
                                          struct ds4_err *err) DS4_MUST_CHECK;
void ds4_text_store_free(struct ds4_text_store *store);

/* Keeps a copy of text under key, instead of what stood there.  -1: the text alone passes a limit, or
 * memory is out; nothing is kept under key then. */
int ds4_text_store_put(struct ds4_text_store *store, struct ds4_str key, struct ds4_str text,
                       int64_t now_ns);
/* The text, borrowed until the next call on the store; counts as a use.  ptr NULL if not found. */
struct ds4_str ds4_text_store_get(struct ds4_text_store *store, struct ds4_str key, int64_t now_ns);
/* False if there was none. */
bool ds4_text_store_remove(struct ds4_text_store *store, struct ds4_str key);

size_t ds4_text_store_count(const struct ds4_text_store *store);
size_t ds4_text_store_bytes(const struct ds4_text_store *store);

/* A fresh opaque token for a text that clients carry: base64 of a version byte and 128 random bits.
 * Nobody can guess another's. */
#define DS4_OPAQUE_CHARS 24
void ds4_text_store_opaque(char token[DS4_OPAQUE_CHARS + 1]);

#endif

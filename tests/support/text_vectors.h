/* For the tests of router/text: vector files and the real 128k vocabulary.
 *
 * The vocabulary is a download (`make vocab`), too large to keep in the tree.  It is expected at
 * build/vocab/tokenizer.json; a file build/vocab/NONE says that this machine does without it on
 * purpose, and only then may a test skip. */
#ifndef DS4_TESTS_SUPPORT_TEXT_VECTORS_H
#define DS4_TESTS_SUPPORT_TEXT_VECTORS_H

#include "common/json.h"
#include "router/text/vocab.h"

#include <stdbool.h>

/* The parsed file; prints why and returns NULL when it cannot be read.  Free with ds4_json_free. */
struct ds4_json *text_vectors_open(const char *path);

enum text_vectors_release { TEXT_VECTORS_V3, TEXT_VECTORS_V4, TEXT_VECTORS_V41 };

/* The 128k vocabulary with the overlay of that release, loaded once per program and shared.  NULL
 * with *skip = true when build/vocab/NONE exists, NULL with a message otherwise. */
const struct ds4_vocab *text_vectors_vocab(enum text_vectors_release release, bool *skip);

/* Frees what text_vectors_vocab loaded. */
void text_vectors_free(void);

/* Hexadecimal text -> bytes at `out`; returns the count. */
size_t text_vectors_unhex(struct ds4_str hex, char *out, size_t max_bytes);

#endif

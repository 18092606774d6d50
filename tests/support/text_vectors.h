/* For the tests of router/text: vector files and the real 128k vocabulary.
 *
 * The vocabulary is a download (`make check` fetches it), too large to keep in the tree.  It is expected at
 * build/vocab/tokenizer.json; a file build/vocab/NONE says that this machine does without it on
 * purpose, and only then may a test skip. */
#ifndef DS4_TESTS_SUPPORT_TEXT_VECTORS_H
#define DS4_TESTS_SUPPORT_TEXT_VECTORS_H

#include "common/arena.h"
#include "common/json.h"
#include "common/json_text.h"
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

/* A whole file as JSON text nodes, and what they live in. */
struct text_cases {
    struct ds4_arena arena;
    char *text;
    const struct ds4_jt_node *root;
    const struct ds4_jt_node *cases; /* root's list "cases" */
};
bool text_cases_open(struct text_cases *file, const char *path);
void text_cases_close(struct text_cases *file);

/* Runs every case of a file through `ds4-text render` and compares prompt and effort, or that a case
 * with `error` is refused.  Returns how many failed (each is printed); *n_case is how many there were. */
size_t text_vectors_render(const char *path, size_t *n_case);

#endif

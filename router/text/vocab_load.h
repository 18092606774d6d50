/* Reads a vocabulary from a model file: the tokenizer arrays of a GGUF, or a tokenizer.json. */
#ifndef DS4_ROUTER_TEXT_VOCAB_LOAD_H
#define DS4_ROUTER_TEXT_VOCAB_LOAD_H

#include "common/err.h"
#include "router/text/vocab.h"

#include <stdbool.h>

/* Added tokens to lay over a tokenizer.json that lacks them, as a JSON file with the objects
 * `overlay_v4` and, for V4.1, `overlay_v41`. */
struct ds4_vocab_overlay {
    const char *path;
    bool v41;
};

/* The kind of file is told by its first bytes.  `overlay` may be NULL; it is refused for a GGUF, whose
 * table is complete.  NULL with DS4_E_IO, or DS4_E_CORRUPT naming the array and index. */
struct ds4_vocab *ds4_vocab_load(const char *path, const struct ds4_vocab_overlay *overlay,
                                 struct ds4_err *err);

#endif

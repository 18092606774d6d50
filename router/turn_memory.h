/* The turn memory: what the model sampled, by the text it makes.
 *
 * A model may say a text in other tokens than the tokenizer would ("e", "e" instead of "ee"); sent back by
 * its client, the text is tokenised anew and the cached conversation parts from there on.  Turns of which
 * that is true are remembered under their text, and a prompt that holds the same bytes between an
 * assistant's header and its end token gets the sampled tokens.  The bytes are the same either way, so a
 * mix-up could cost a cache hit and nothing else.
 *
 * Bounded by entries and bytes, least recently used goes first.  Pure; loop thread only. */
#ifndef DS4_ROUTER_TURN_MEMORY_H
#define DS4_ROUTER_TURN_MEMORY_H

#include "common/err.h"
#include "common/str.h"
#include "router/text/prompt.h"

#include <stddef.h>
#include <stdint.h>

#define DS4_TURN_MEMORY_TURNS      1024
#define DS4_TURN_MEMORY_BYTES      ((size_t)32 << 20)
#define DS4_TURN_MEMORY_TURN_BYTES ((size_t)1 << 20) /* a longer turn is not remembered */

struct ds4_turn_memory;

struct ds4_turn_memory *ds4_turn_memory_new(struct ds4_err *err) DS4_MUST_CHECK;
void ds4_turn_memory_free(struct ds4_turn_memory *memory);

/* Copies the text and its tokens; the newest of equal texts counts. */
void ds4_turn_memory_put(struct ds4_turn_memory *memory, struct ds4_str text, const int32_t *id,
                         int32_t n_id);

/* Marks the turns of a rendered prompt that are known; returns how many.  Their ids are borrowed from the
 * memory: encode the prompt before the next put.  -1 with DS4_E_NOMEM. */
int32_t ds4_turn_memory_restore(struct ds4_turn_memory *memory, struct ds4_prompt *prompt,
                                struct ds4_err *err) DS4_MUST_CHECK;

size_t ds4_turn_memory_count(const struct ds4_turn_memory *memory);
size_t ds4_turn_memory_bytes(const struct ds4_turn_memory *memory);

#endif

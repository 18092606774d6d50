/* Hygiene of old assistant turns: markup that an earlier server let slip into their content.
 *
 * A client that stored "<think>plan</think>Visible" or a raw tool-call block as content sends it back
 * for ever, and the model imitates what it reads.  Both functions change one message in place; new
 * text lives in the arena.  They return 0, or -1 with DS4_E_TOO_LONG when the arena is full. */
#ifndef DS4_ROUTER_TEXT_HYGIENE_H
#define DS4_ROUTER_TEXT_HYGIENE_H

#include "common/arena.h"
#include "common/err.h"
#include "router/text/template.h"

/* R4: content up to the last </think> becomes the reasoning (without think tags) if the message has
 * none, and is discarded otherwise.  *n_split counts changed messages. */
int ds4_hygiene_split_think(struct ds4_message *message, struct ds4_arena *arena, size_t *n_split,
                            struct ds4_err *err) DS4_MUST_CHECK;

/* R5: complete and strictly well-formed call blocks in the content of a message without calls become
 * its calls; the block and the newlines before it are removed.  Everything less stays text. */
int ds4_hygiene_lift_calls(struct ds4_message *message, struct ds4_arena *arena, size_t *n_lifted,
                           struct ds4_err *err) DS4_MUST_CHECK;

#endif

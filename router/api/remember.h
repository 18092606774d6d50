/* Between answers and the tool memory: turns with calls are kept when they end, and restored when they
 * come back in a history. */
#ifndef DS4_ROUTER_API_REMEMBER_H
#define DS4_ROUTER_API_REMEMBER_H

#include "router/api/answer.h"
#include "router/api/chat_prompt.h"

/* The choice has ended well: keeps its turn if it called tools. */
void ds4_remember_turn(const struct ds4_choice *choice);

/* Restores the turns of a conversation that is about to be normalised; prompt->replayed counts what was
 * found.  -1 with *err when the arena is full. */
int ds4_remember_restore(const struct ds4_api_context *context, struct ds4_arena *arena,
                         struct ds4_chat_prompt *prompt, struct ds4_err *err) DS4_MUST_CHECK;

/* Adds prompt->replayed to the metrics. */
void ds4_remember_count(const struct ds4_chat_prompt *prompt, enum ds4_api api,
                        struct ds4_metrics *metrics);

#endif

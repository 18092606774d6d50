/* Log-probabilities of a choice: which channel a token belongs to, and the JSON items.
 *
 * Tokens arrive before the text they produce.  A token waits until the next piece of text tells its
 * channel; tokens that turn out to be markup are dropped. */
#ifndef DS4_ROUTER_API_LOGPROBS_H
#define DS4_ROUTER_API_LOGPROBS_H

#include "common/json_write.h"
#include "router/api/answer.h"

/* Assigns choice->undecided by these events to the content or reasoning items. */
void ds4_logprobs_decide(struct ds4_choice *choice, const struct ds4_events *events);

/* Writes {"content":[..],"reasoning_content":[..]} from the collected items, or null when the request
 * asked for none, and forgets them. */
void ds4_logprobs_take(struct ds4_choice *choice, struct ds4_jw *w);

#endif

/* How requests of /v1/messages are read (steps 2 and 3). */
#ifndef DS4_ROUTER_API_ANTHROPIC_REQUEST_H
#define DS4_ROUTER_API_ANTHROPIC_REQUEST_H

#include "router/api/answer.h"
#include "router/api/chat_prompt.h"
#include "router/api/intake.h"

/* Body of the answer's exchange -> choice 0, prompt tokenised, parser ready.  -1 with *error. */
int ds4_anthropic_request_parse(struct ds4_answer *answer, struct ds4_api_error *error);

/* The way of a body to its prompt, also for count_tokens.  *out is initialised. */
int ds4_anthropic_prompt_build(const struct ds4_api_context *context, struct ds4_body *body,
                               struct ds4_chat_prompt *out, struct ds4_api_error *error);

#endif

/* How chat requests are read (steps 2 and 3): members, messages, tools, effort -> canonical request. */
#ifndef DS4_ROUTER_API_CHAT_REQUEST_H
#define DS4_ROUTER_API_CHAT_REQUEST_H

#include "router/api/answer.h"
#include "router/api/chat_prompt.h"

/* Body of the answer's exchange -> one request per choice, prompt tokenised, parser ready.  -1 with
 * *error. */
int ds4_chat_request_parse(struct ds4_answer *answer, struct ds4_api_error *error);

/* A chat body's way to its prompt, also used by /apply-template and /tokenize.  `root` is the request
 * object; *out is initialised; everything borrows from root and the arena. */
int ds4_chat_prompt_build(const struct ds4_api_context *context, const struct ds4_jt_node *root,
                          struct ds4_arena *arena, struct ds4_chat_prompt *out,
                          struct ds4_api_error *error);

#endif

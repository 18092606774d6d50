/* How chat requests are read (steps 2 and 3): members, messages, tools, effort -> canonical request. */
#ifndef DS4_ROUTER_API_CHAT_REQUEST_H
#define DS4_ROUTER_API_CHAT_REQUEST_H

#include "router/api/answer.h"

/* Body of the answer's exchange -> one request per choice, prompt tokenised, parser ready.  -1 with
 * *error. */
int ds4_chat_request_parse(struct ds4_answer *answer, struct ds4_api_error *error);

#endif

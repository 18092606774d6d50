/* Dialect of /v1/responses. */
#ifndef DS4_ROUTER_API_OPENAI_RESPONSES_H
#define DS4_ROUTER_API_OPENAI_RESPONSES_H

#include "common/buf.h"
#include "router/api/dialect.h"

extern const struct ds4_dialect ds4_dialect_responses;

/* The response object of a running or finished answer of this dialect, with this status. */
void ds4_responses_write(struct ds4_answer *answer, const char *status, struct ds4_buf *out);
/* Ends it as cancelled.  The answer must not be touched afterwards. */
void ds4_responses_cancel(struct ds4_answer *answer);

/* Handler of /v1/responses/input_tokens; needs no worker. */
void ds4_input_tokens_handle(struct ds4_exchange *x, void *context);

#endif

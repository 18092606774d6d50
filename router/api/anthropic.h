/* Dialect of /v1/messages, and the count of tokens beside it. */
#ifndef DS4_ROUTER_API_ANTHROPIC_H
#define DS4_ROUTER_API_ANTHROPIC_H

#include "router/api/dialect.h"

extern const struct ds4_dialect ds4_dialect_anthropic;

/* Handler of /v1/messages/count_tokens; context is struct ds4_api_context.  Needs no worker. */
void ds4_count_tokens_handle(struct ds4_exchange *x, void *context);

#endif

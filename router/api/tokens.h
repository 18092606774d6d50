/* /tokenize, /detokenize, /apply-template: what the model would see. */
#ifndef DS4_ROUTER_API_TOKENS_H
#define DS4_ROUTER_API_TOKENS_H

#include "router/exchange.h"

/* Handlers; `context` is struct ds4_api_context. */
void ds4_tokenize_handle(struct ds4_exchange *x, void *context);
void ds4_detokenize_handle(struct ds4_exchange *x, void *context);
void ds4_apply_template_handle(struct ds4_exchange *x, void *context);

#endif

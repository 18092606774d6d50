/* GET /v1/models and /v1/models/{id}. */
#ifndef DS4_ROUTER_API_MODELS_H
#define DS4_ROUTER_API_MODELS_H

#include "common/str.h"
#include "router/api/context.h"
#include "router/exchange.h"

#include <stdbool.h>

void ds4_models_handle(struct ds4_exchange *x, void *context);
void ds4_model_handle(struct ds4_exchange *x, void *context);

/* Whether a request for this model name is served: the served name, an alias, any name when
 * http.any_model is on, and the empty one. */
bool ds4_models_serves(const struct ds4_api_context *context, struct ds4_str name);

#endif

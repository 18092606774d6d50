/* The route table: path -> endpoint, and the body of what the server refuses itself. */
#ifndef DS4_ROUTER_API_ROUTES_H
#define DS4_ROUTER_API_ROUTES_H

#include "router/api/context.h"
#include "router/server.h"

/* The table, static; whether /metrics needs a key depends on the settings. */
const struct ds4_route *ds4_routes(const struct ds4_api_context *context, size_t *n);

/* The one of them that is /metrics. */
const struct ds4_route *ds4_routes_metrics(void);

/* ds4_refuse_fn: the dialect follows from the path. */
void ds4_routes_refuse(struct ds4_exchange *x, int status, const char *code, const char *message);

#endif

/* /health and its names, /livez, /version, /metrics: what the outside may believe about this router. */
#ifndef DS4_ROUTER_API_HEALTH_H
#define DS4_ROUTER_API_HEALTH_H

#include "router/exchange.h"

/* Handlers; `context` is struct ds4_api_context. */
void ds4_ready_handle(struct ds4_exchange *x, void *context); /* readiness: 200 or 503 */
void ds4_health_handle(struct ds4_exchange *x,
                       void *context);                        /* the same, or as health.mode says */
void ds4_livez_handle(struct ds4_exchange *x, void *context); /* the event loop turns */
void ds4_version_handle(struct ds4_exchange *x, void *context);
void ds4_metrics_handle(struct ds4_exchange *x, void *context);

#endif

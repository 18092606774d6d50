/* GET /v1/stats: the rig in one JSON object, for the status page and for people with curl. */
#ifndef DS4_ROUTER_API_STATS_H
#define DS4_ROUTER_API_STATS_H

#include "router/exchange.h"

/* Handler; `context` is struct ds4_api_context.  Copies what the loop thread knows; times are ages in
 * seconds, rates are over ten seconds, null where nothing can be said. */
void ds4_stats_handle(struct ds4_exchange *x, void *context);

#endif

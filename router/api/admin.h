/* What an operator may do through HTTP: drain, undrain, restart a stage.
 *
 * Only from this machine, and with a key where keys are set.  A browser on this machine visits foreign
 * pages, which may send requests here: one whose Origin is not this server, or that calls this server by
 * another name than a loopback one, is refused, and so is what came through a proxy. */
#ifndef DS4_ROUTER_API_ADMIN_H
#define DS4_ROUTER_API_ADMIN_H

#include "router/exchange.h"

/* Handlers; `context` is struct ds4_api_context.  202 with {"status":...} when it is under way. */
void ds4_admin_drain_handle(struct ds4_exchange *x, void *context);   /* POST /admin/drain */
void ds4_admin_undrain_handle(struct ds4_exchange *x, void *context); /* POST /admin/undrain */
void ds4_admin_restart_handle(struct ds4_exchange *x, void *context); /* /admin/stage/N/restart */

#endif

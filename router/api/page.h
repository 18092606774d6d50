/* GET /: the status page.  Its source is router/page; the build makes one HTML file of it. */
#ifndef DS4_ROUTER_API_PAGE_H
#define DS4_ROUTER_API_PAGE_H

#include "router/exchange.h"

/* Handler; `context` is struct ds4_api_context.  A client that asks for JSON gets what /version says. */
void ds4_page_handle(struct ds4_exchange *x, void *context);

#endif

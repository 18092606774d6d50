/* The status page: one self-contained file, the same for everybody.
 *
 * It holds no data of the rig, so it needs no key; what it shows it asks /v1/stats for, which does.
 * The policy allows the page's own style and script by their digests and nothing else: no other host, no
 * frame around it, no script that a model or a tool may write into an answer. */
#include "router/api/page.h"

#include "router/api/health.h"

#include <router/page_data.h>

void ds4_page_handle(struct ds4_exchange *x, void *context)
{
    struct ds4_str accept = ds4_exchange_header(x, "accept");

    if (accept.ptr != NULL &&
        ds4_str_find(accept, DS4_STR("application/json"), 0) != DS4_STR_NONE) {
        ds4_version_handle(x, context);
        return;
    }
    ds4_exchange_set_header(x, "content-security-policy", ds4_page_policy);
    ds4_exchange_set_header(x, "x-content-type-options", "nosniff");
    ds4_exchange_set_header(x, "referrer-policy", "no-referrer");
    ds4_exchange_set_header(x, "cache-control", "no-cache");
    ds4_exchange_reply(x, 200, "text/html; charset=utf-8",
                       (struct ds4_str){(const char *)ds4_page_html, sizeof(ds4_page_html)});
}

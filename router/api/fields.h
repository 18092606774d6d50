/* Members of request bodies that nobody reads: counted, so that "it is accepted" is never mistaken for
 * "it works". */
#ifndef DS4_ROUTER_API_FIELDS_H
#define DS4_ROUTER_API_FIELDS_H

#include "common/json.h"
#include "router/request.h"

struct ds4_metrics;

/* Counts the top members of a request body that this dialect accepts without honouring
 * (ds4_param_ignored_total) and those it does not know (ds4_request_unknown_fields_total). */
void ds4_fields_count(struct ds4_metrics *m, enum ds4_api api, const struct ds4_json *body);

#endif

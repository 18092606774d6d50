/* The member `ds4` of answers: effort asked and applied, why the answer ended, what was reduced.  Things
 * that have no place in the dialects' own words; off with http.ds4_field = false. */
#ifndef DS4_ROUTER_API_SIDE_FIELD_H
#define DS4_ROUTER_API_SIDE_FIELD_H

#include "common/json_write.h"
#include "router/api/answer.h"

/* Writes the key and its object into the open object of w.  Choice 0 must be done. */
void ds4_side_field_write(const struct ds4_answer *answer, struct ds4_jw *w);

/* Writes `usage` of chat and completions, summed over the choices. */
void ds4_usage_write(const struct ds4_answer *answer, struct ds4_jw *w);

#endif

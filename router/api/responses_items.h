/* Items of a response: the parts of an answer as /v1/responses shows them. */
#ifndef DS4_ROUTER_API_RESPONSES_ITEMS_H
#define DS4_ROUTER_API_RESPONSES_ITEMS_H

#include "common/json_write.h"
#include "router/api/answer.h"

struct ds4_response_tool;

/* The tool a call meant, NULL for a call of something undeclared. */
const struct ds4_response_tool *ds4_response_tool_of(const struct ds4_choice *choice, size_t part);
/* A call of a tool that takes one text. */
bool ds4_response_is_custom(const struct ds4_choice *choice, size_t part);
bool ds4_response_is_reasoning(const struct ds4_choice *choice, size_t part);
/* The choice ended for length: the last item is incomplete. */
bool ds4_response_is_cut(const struct ds4_choice *choice);

/* Once per part, when it is complete: names its reasoning, takes its log-probabilities. */
void ds4_response_decide_extra(struct ds4_choice *choice, size_t part);

/* Writers; the first one a member, the others a value.  Item: `whole`, or the empty one that announces
 * it.  Output: an output_text part.  Input: the text a custom tool is called with. */
void ds4_response_write_id(const struct ds4_choice *choice, size_t part, const char *key,
                           struct ds4_jw *w);
void ds4_response_write_item(const struct ds4_choice *choice, size_t part, bool whole,
                             struct ds4_jw *w);
void ds4_response_write_text(const char *type, struct ds4_str text, struct ds4_jw *w);
void ds4_response_write_output(const struct ds4_choice *choice, size_t part, struct ds4_str text,
                               struct ds4_jw *w);
void ds4_response_write_input(struct ds4_str arguments, struct ds4_jw *w);

#endif

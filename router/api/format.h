/* Answers that were to be JSON (response_format, guided_json, text.format, output_config.format).
 *
 * The sampler does not enforce a schema; it is part of the prompt, and the finished text is checked.  What
 * is wrong with it stands in the member ds4.format of the answer and in
 * ds4_grammar_failures_total{action="abandoned"}: the text itself is sent as it is. */
#ifndef DS4_ROUTER_API_FORMAT_H
#define DS4_ROUTER_API_FORMAT_H

#include "common/json_write.h"
#include "router/api/answer.h"
#include "router/api/chat_prompt.h"

/* Copies what the prompt's conversation asks for.  -1 with schema_unsupported for a schema whose promises
 * cannot be checked. */
int ds4_format_read(struct ds4_answer *answer, const struct ds4_chat_prompt *prompt,
                    struct ds4_api_error *error);

/* Fills choice->format_problem; the choice is done and did not fail.  A turn that called tools owes no
 * JSON. */
void ds4_format_check(struct ds4_choice *choice);

/* The member "format" of the object ds4: null where nothing was asked for, else {valid, problem}. */
void ds4_format_write(const struct ds4_answer *answer, struct ds4_jw *w);

#endif

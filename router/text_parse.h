/* The parsing half of ds4-text: one JSON line in, one JSON line out.
 *
 * Each function reads one case and appends the answer without a line end.  Unknown members are
 * ignored.  -1 with DS4_E_INVALID for a line that is no case; `out` is then as it was. */
#ifndef DS4_ROUTER_TEXT_PARSE_H
#define DS4_ROUTER_TEXT_PARSE_H

#include "common/buf.h"
#include "common/err.h"
#include "common/str.h"
#include "router/parse/loop_guard.h"

#include <stdbool.h>
#include <stddef.h>

struct ds4_text_parse_options {
    bool spaced_tags; /* release v41 */
    bool rules;       /* add "rules": {name: count} to the answer of `parse` */
};

/* {mode, engine_finish, tool_choice, stop, tools, model_output, split | seed}
 *  -> {reasoning, content, tool_calls: [{name, arguments, incomplete}], finish_reason} */
int ds4_text_parse_case(struct ds4_str line, const struct ds4_text_parse_options *options,
                        struct ds4_buf *out, struct ds4_err *err) DS4_MUST_CHECK;

/* {mode, engine_finish, tools, steps: [{chunk}]} -> {states: [{reasoning, content, calls}], final} */
int ds4_text_stream_case(struct ds4_str line, const struct ds4_text_parse_options *options,
                         struct ds4_buf *out, struct ds4_err *err) DS4_MUST_CHECK;

/* {window} -> {soup, exact_line, fuzzy_15, fuzzy_6}: the fuzzy detector with 15 and with 6 hits, null
 * where the exact one has hit already. */
int ds4_text_tripwire_case(struct ds4_str line, ds4_count_tokens_fn count_tokens, void *ctx,
                           struct ds4_buf *out, struct ds4_err *err) DS4_MUST_CHECK;

#endif

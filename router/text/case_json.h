/* Reads the encoder-level form of a conversation: what the reference encoder's own callers pass.
 *
 *   {encoder, thinking_mode, reasoning_effort, options {drop_thinking, add_default_bos_token, context},
 *    messages}
 *
 * Nothing is normalised: tools, response_format, task and wo_eos sit on the messages, and what the
 * reference refuses is refused.  Used by the ds4-text tool and by conformance tests. */
#ifndef DS4_ROUTER_TEXT_CASE_JSON_H
#define DS4_ROUTER_TEXT_CASE_JSON_H

#include "common/arena.h"
#include "common/err.h"
#include "common/json_text.h"
#include "router/text/template.h"

/* Fills *chat from the object `root`; borrows from it and the arena.  DS4_E_INVALID names the place. */
int ds4_case_json_read(const struct ds4_jt_node *root, struct ds4_arena *arena,
                       struct ds4_chat *chat, struct ds4_err *err) DS4_MUST_CHECK;

#endif

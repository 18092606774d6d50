/* Reads the OpenAI chat form of a request (messages, tools, effort fields) into a conversation.
 *
 * Only what reaches the prompt is read here; sampling, streaming and the rest belong to the dialect.
 *
 * vLLM's guided_json and structured_outputs.json are read as response_format json_schema is: there is no
 * grammar, so the schema is rendered and the answer checked, and the answer says whether it conforms.  A
 * choice or a regular expression (guided_choice, guided_regex) cannot go that way: the encoders have words
 * for a schema only, so the model would not be told, and a check alone would be a promise broken most of the
 * time.  Like a strict schema they are refused with schema_unsupported, naming the member. */
#ifndef DS4_ROUTER_TEXT_CHAT_JSON_H
#define DS4_ROUTER_TEXT_CHAT_JSON_H

#include "common/arena.h"
#include "common/err.h"
#include "common/json_text.h"
#include "router/text/normalise.h"

#define DS4_MAX_TOOLS 512

/* `root` is the request object.  Fills *out (whatever it held) for `release`; everything borrows from
 * root and the arena.  `media` says what becomes of parts that hold no text (tool results show them as
 * R2 has it in any case).  Errors: DS4_E_INVALID with *param naming the place, or DS4_E_TOO_LONG when the
 * arena is full (param->path is then empty).  The caller resolves the effort from out->wish and calls
 * ds4_normalise. */
int ds4_chat_json_read(const struct ds4_jt_node *root, enum ds4_release release,
                       enum ds4_media media, struct ds4_arena *arena, struct ds4_conversation *out,
                       struct ds4_param *param, struct ds4_err *err) DS4_MUST_CHECK;

/* The same for dialects that read messages and tools themselves; out->chat.release and out->tools are
 * set.  Effort: every field of the priority list.  Tool choice: the forms of all dialects. */
int ds4_chat_json_read_effort(const struct ds4_jt_node *root, struct ds4_arena *arena,
                              struct ds4_conversation *out, struct ds4_param *param,
                              struct ds4_err *err) DS4_MUST_CHECK;
int ds4_chat_json_read_tool_choice(const struct ds4_jt_node *root, struct ds4_arena *arena,
                                   struct ds4_conversation *out, struct ds4_param *param,
                                   struct ds4_err *err) DS4_MUST_CHECK;

#endif

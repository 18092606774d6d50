/* A conversation on its way to prompt tokens (step 3), whatever dialect it came in. */
#ifndef DS4_ROUTER_API_CHAT_PROMPT_H
#define DS4_ROUTER_API_CHAT_PROMPT_H

#include "common/arena.h"
#include "router/api/context.h"
#include "router/api/error.h"
#include "router/text/normalise.h"
#include "router/text/prompt.h"
#include "router/tool_memory.h"

/* The dialect fills `conversation` (chat.release, chat.messages, tools, wish, ...); rendering fills the
 * rest. */
struct ds4_chat_prompt {
    struct ds4_conversation conversation;
    struct ds4_effort effort;
    struct ds4_prompt prompt;
    struct ds4_ids ids;
    struct {
        size_t calls[DS4_REPLAY_MISSING + 1]; /* of the history, by how they were restored */
        size_t without_reasoning;             /* turns that came back without theirs */
    } replayed;
};

void ds4_chat_prompt_init(struct ds4_chat_prompt *prompt);
void ds4_chat_prompt_deinit(struct ds4_chat_prompt *prompt);

/* Resolves the effort, normalises, renders, encodes.  Conversation and prompt borrow from the arena.
 * -1 with *error. */
int ds4_chat_prompt_render(const struct ds4_api_context *context, struct ds4_arena *arena,
                           struct ds4_chat_prompt *prompt, struct ds4_api_error *error);

/* Every tool result must answer a call that stands before it.  `member` names the list in messages.
 * -1 with unknown_tool_call_id. */
int ds4_chat_prompt_check_results(const struct ds4_chat_prompt *prompt, const char *member,
                                  struct ds4_api_error *error);

#endif

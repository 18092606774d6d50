/* The V4.1 encoder.  Step 3 of the request path.
 *
 * Against V4: system messages have a token and may come anywhere (each later one is a boundary and
 * opens a turn), effort is a number that is always stated when thinking, tag names begin with a space,
 * and there is no developer role.  The 1017 variant does not let a turn of tool results end the
 * history; its code was not published, so it is a setting. */
#include "router/text/template.h"

#include "router/text/literals.h"
#include "router/text/vocab.h"

#include <stdio.h>

#define BUDGET_LOW  50
#define BUDGET_HIGH 75
#define BUDGET_MAX  100

static bool only_results(const struct ds4_message *message)
{
    for (size_t b = 0; b < message->n_block; b++)
        if (!message->blocks[b].is_result)
            return false;
    return true;
}

static bool is_boundary(const struct ds4_chat *chat, size_t i)
{
    const struct ds4_message *message = &chat->messages[i];

    if (message->role == DS4_ROLE_USER)
        return !(chat->results_no_boundary && only_results(message));
    return message->role == DS4_ROLE_SYSTEM && i > 0;
}

static int check_effort(const struct ds4_chat *chat, struct ds4_err *err)
{
    if (chat->effort == DS4_EFFORT_BUDGET &&
        (chat->effort_budget < 1 || chat->effort_budget > BUDGET_MAX))
        return ds4_fail(err, DS4_E_INVALID, "effort is %d, must be 1 to %d", chat->effort_budget,
                        BUDGET_MAX);
    return 0;
}

static int32_t budget(const struct ds4_chat *chat)
{
    switch (chat->effort) {
    case DS4_EFFORT_BUDGET:
        return chat->effort_budget;
    case DS4_EFFORT_LOW:
        return BUDGET_LOW;
    case DS4_EFFORT_MAX:
        return BUDGET_MAX;
    default:
        return BUDGET_HIGH;
    }
}

static void render_prefix(const struct ds4_chat *chat, size_t i, struct ds4_prompt *prompt)
{
    bool effort = i == 0 && chat->thinking;
    char text[sizeof(DS4_LIT_EFFORT_V41) + 8];

    if (effort || chat->messages[i].role == DS4_ROLE_SYSTEM)
        ds4_prompt_literal(prompt, ds4_special_text(DS4_SPECIAL_SYSTEM));
    if (effort) {
        int n = snprintf(text, sizeof(text), DS4_LIT_EFFORT_V41, budget(chat));

        ds4_prompt_literal(prompt, (struct ds4_str){text, (size_t)n});
    }
}

static int render_developer(const struct ds4_chat *chat, size_t i, struct ds4_prompt *prompt,
                            struct ds4_err *err)
{
    (void)chat;
    (void)prompt;
    return ds4_fail(err, DS4_E_INVALID, "message %zu: v41 has no developer role", i);
}

#define VIEW(literal)                                                                              \
    {                                                                                              \
        literal, sizeof(literal) - 1                                                               \
    }

const struct ds4_encoder ds4_encoder_v41 = {
    .tools_before = VIEW(DS4_LIT_V41_TOOLS_BEFORE),
    .calls_open = VIEW(DS4_LIT_V41_CALLS_OPEN),
    .calls_close = VIEW(DS4_LIT_V41_CALLS_CLOSE),
    .invoke_open = VIEW(DS4_LIT_V41_INVOKE_OPEN),
    .invoke_close = VIEW(DS4_LIT_V41_INVOKE_CLOSE),
    .param_open = VIEW(DS4_LIT_V41_PARAM_OPEN),
    .param_close = VIEW(DS4_LIT_V41_PARAM_CLOSE),
    .is_boundary = is_boundary,
    .check_effort = check_effort,
    .render_prefix = render_prefix,
    .render_developer = render_developer,
    .user_keeps_fields = true,
};

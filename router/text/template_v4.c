/* The V4 encoders: April preview and 0731.  Step 3 of the request path.
 *
 * The two differ in the effort text alone.  The preview knows high (nothing) and max; 0731 gave max's
 * text to high, wrote a stronger one for max, and made low (nothing) its default.  A system message has
 * no marker of its own, which is why requests turn later ones into user messages. */
#include "router/text/template.h"

#include "router/text/literals.h"
#include "router/text/vocab.h"

static bool is_boundary(const struct ds4_chat *chat, size_t i)
{
    return chat->messages[i].role == DS4_ROLE_USER || chat->messages[i].role == DS4_ROLE_DEVELOPER;
}

static int check_effort(const struct ds4_chat *chat, struct ds4_err *err)
{
    bool preview = chat->release == DS4_RELEASE_V4_PREVIEW;

    if (chat->effort == DS4_EFFORT_BUDGET || (preview && chat->effort == DS4_EFFORT_LOW))
        return ds4_fail(err, DS4_E_INVALID, "the %s encoder knows no effort %s",
                        preview ? "v4_preview" : "v4_0731",
                        chat->effort == DS4_EFFORT_LOW ? "low" : "in numbers");
    return 0;
}

static void render_prefix(const struct ds4_chat *chat, size_t i, struct ds4_prompt *prompt)
{
    bool preview = chat->release == DS4_RELEASE_V4_PREVIEW;

    if (i > 0 || !chat->thinking)
        return;
    if (chat->effort == (preview ? DS4_EFFORT_MAX : DS4_EFFORT_HIGH))
        ds4_prompt_literal(prompt, DS4_STR(DS4_LIT_EFFORT_THOROUGH));
    else if (!preview && chat->effort == DS4_EFFORT_MAX)
        ds4_prompt_literal(prompt, DS4_STR(DS4_LIT_EFFORT_0731_MAX));
}

static int render_developer(const struct ds4_chat *chat, size_t i, struct ds4_prompt *prompt,
                            struct ds4_err *err)
{
    const struct ds4_message *message = &chat->messages[i];

    if (message->content.len == 0)
        return ds4_fail(err, DS4_E_INVALID, "a developer message must have content");
    ds4_prompt_literal(prompt, ds4_special_text(DS4_SPECIAL_USER));
    ds4_template_system_body(&ds4_encoder_v4, message, prompt);
    return 0;
}

#define VIEW(literal)                                                                              \
    {                                                                                              \
        literal, sizeof(literal) - 1                                                               \
    }

const struct ds4_encoder ds4_encoder_v4 = {
    .tools_before = VIEW(DS4_LIT_V4_TOOLS_BEFORE),
    .calls_open = VIEW(DS4_LIT_V4_CALLS_OPEN),
    .calls_close = VIEW(DS4_LIT_V4_CALLS_CLOSE),
    .invoke_open = VIEW(DS4_LIT_V4_INVOKE_OPEN),
    .invoke_close = VIEW(DS4_LIT_V4_INVOKE_CLOSE),
    .param_open = VIEW(DS4_LIT_V4_PARAM_OPEN),
    .param_close = VIEW(DS4_LIT_V4_PARAM_CLOSE),
    .is_boundary = is_boundary,
    .check_effort = check_effort,
    .render_prefix = render_prefix,
    .render_developer = render_developer,
    .user_keeps_fields = false,
};

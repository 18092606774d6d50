/* Conversation -> prompt tokens (step 3).
 *
 * Every dialect comes through here, so the same conversation gives the same tokens whichever endpoint
 * it is sent to: prefixes are shared between dialects. */
#include "router/api/chat_prompt.h"

#include "common/clock.h"
#include "common/metrics.h"
#include "router/api/remember.h"
#include "router/turn_memory.h"

#define DS4_PROMPT_BYTES ((size_t)128 << 20)

void ds4_chat_prompt_init(struct ds4_chat_prompt *prompt)
{
    *prompt = (struct ds4_chat_prompt){0};
    ds4_prompt_init(&prompt->prompt, DS4_PROMPT_BYTES);
}

void ds4_chat_prompt_deinit(struct ds4_chat_prompt *prompt)
{
    ds4_prompt_deinit(&prompt->prompt);
    DS4_VEC_DEINIT(&prompt->ids);
}

/* The context the effort floor is compared with: what is configured, else what the file was made for. */
static int64_t context_of(const struct ds4_api_context *context)
{
    return context->config->model.context > 0 ? context->config->model.context
                                              : context->shape->context_tok;
}

int ds4_chat_prompt_render(const struct ds4_api_context *context, struct ds4_arena *arena,
                           struct ds4_chat_prompt *prompt, struct ds4_api_error *error)
{
    const struct ds4_config *config = context->config;
    const struct ds4_effort_policy policy = {
        .release = context->release,
        .default_effort = config->think.default_effort,
        .context_tok = context_of(context),
        .max_min_context = config->think.max_min_context,
    };
    int64_t begin_ns = ds4_clock_ns(), rendered_ns;
    struct ds4_err err = {0};

    prompt->effort = ds4_effort_resolve(&prompt->conversation.wish, &policy);
    prompt->conversation.chat.escape_param_close = config->prompt.escape_param_close;
    if (ds4_remember_restore(context, arena, prompt, &err) != 0 ||
        ds4_normalise(&prompt->conversation, &prompt->effort, arena, &err) != 0 ||
        ds4_template_render(&prompt->conversation.chat, arena, &prompt->prompt, &err) != 0 ||
        (context->turn_memory != NULL &&
         ds4_turn_memory_restore(context->turn_memory, &prompt->prompt, &err) < 0))
        return ds4_api_fail_err(error, "messages", &err);
    rendered_ns = ds4_clock_ns();
    if (ds4_prompt_encode(&prompt->prompt, context->bpe, config->prompt.content_specials,
                          &prompt->ids, &err) != 0)
        return ds4_api_fail_err(error, "messages", &err);
    ds4_metric_observe(context->metrics, DS4_M_RENDER_SECONDS,
                       (double)(rendered_ns - begin_ns) / (double)DS4_NS_PER_SEC, NULL);
    ds4_metric_observe(context->metrics, DS4_M_TOKENIZE_SECONDS,
                       (double)(ds4_clock_ns() - rendered_ns) / (double)DS4_NS_PER_SEC, NULL);
    return 0;
}

static bool is_called(const struct ds4_chat *chat, size_t before, struct ds4_str id)
{
    for (size_t i = 0; i < before; i++)
        for (size_t c = 0; c < chat->messages[i].n_call; c++)
            if (ds4_str_equal(chat->messages[i].calls[c].id, id))
                return true;
    return false;
}

int ds4_chat_prompt_check_results(const struct ds4_chat_prompt *prompt, const char *member,
                                  struct ds4_api_error *error)
{
    const struct ds4_chat *chat = &prompt->conversation.chat;

    for (size_t i = 0; i < chat->n_message; i++) {
        const struct ds4_message *m = &chat->messages[i];

        if (m->role == DS4_ROLE_TOOL && m->tool_call_id.len > 0 &&
            !is_called(chat, i, m->tool_call_id))
            return ds4_api_fail(error, "unknown_tool_call_id", member,
                                "%s: no call \"%.*s\" stands before its result", member,
                                m->tool_call_id.len > 64 ? 64 : (int)m->tool_call_id.len,
                                m->tool_call_id.ptr);
    }
    return 0;
}

/* Conversation -> prompt tokens (step 3).
 *
 * Every dialect comes through here, so the same conversation gives the same tokens whichever endpoint
 * it is sent to: prefixes are shared between dialects. */
#include "router/api/chat_prompt.h"

#include "common/clock.h"
#include "common/metrics.h"
#include "common/vec.h"
#include "router/api/remember.h"
#include "router/turn_memory.h"

#include <stdlib.h>
#include <string.h>

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

struct called {
    struct ds4_str id;
    size_t message; /* that calls it */
};

DS4_VEC_TYPE(called_list, struct called);

static int compare_calls(const void *left, const void *right)
{
    const struct called *a = left, *b = right;
    size_t n = a->id.len < b->id.len ? a->id.len : b->id.len;
    int order = n > 0 ? memcmp(a->id.ptr, b->id.ptr, n) : 0;

    if (order != 0)
        return order;
    if (a->id.len != b->id.len)
        return a->id.len < b->id.len ? -1 : 1;
    return (a->message > b->message) - (a->message < b->message);
}

/* All calls in order: a result is found by halving, since both may number many thousands. */
static int list_calls(const struct ds4_chat *chat, struct called_list *list)
{
    for (size_t i = 0; i < chat->n_message; i++)
        for (size_t c = 0; c < chat->messages[i].n_call; c++)
            if (DS4_VEC_PUSH(list, (struct called){chat->messages[i].calls[c].id, i}) != 0)
                return -1;
    if (list->len > 0)
        qsort(list->ptr, list->len, sizeof(*list->ptr), compare_calls);
    return 0;
}

/* The first call of that id stands before the message. */
static bool is_called(const struct called_list *list, size_t before, struct ds4_str id)
{
    const struct called want = {id, 0};
    size_t low = 0, high = list->len;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (compare_calls(&list->ptr[middle], &want) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low < list->len && ds4_str_equal(list->ptr[low].id, id) &&
           list->ptr[low].message < before;
}

int ds4_chat_prompt_check_results(const struct ds4_chat_prompt *prompt, const char *member,
                                  struct ds4_api_error *error)
{
    const struct ds4_chat *chat = &prompt->conversation.chat;
    struct called_list list = {0};
    int rc = 0;

    if (list_calls(chat, &list) != 0)
        rc = ds4_api_fail(error, "internal_error", NULL, "no memory for the calls");
    for (size_t i = 0; rc == 0 && i < chat->n_message; i++) {
        const struct ds4_message *m = &chat->messages[i];

        if (m->role == DS4_ROLE_TOOL && m->tool_call_id.len > 0 &&
            !is_called(&list, i, m->tool_call_id))
            rc = ds4_api_fail(error, "unknown_tool_call_id", member,
                              "%s: no call \"%.*s\" stands before its result", member,
                              m->tool_call_id.len > 64 ? 64 : (int)m->tool_call_id.len,
                              m->tool_call_id.ptr);
    }
    DS4_VEC_DEINIT(&list);
    return rc;
}

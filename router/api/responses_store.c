/* Kept responses (Responses dialect). */
#include "router/api/responses_store.h"

#include "common/clock.h"
#include "router/api/answer.h"
#include "router/api/node.h"
#include "router/api/openai_responses.h"
#include "router/api/text_store.h"

#include <stdio.h>

#define DS4_STORED_BYTES  ((size_t)256 << 20)
#define DS4_STORED_PREFIX DS4_STR("resp_")

static int not_found(struct ds4_api_error *error, struct ds4_str id)
{
    return ds4_api_fail(error, "response_not_found", NULL,
                        "response or item \"%.*s\" is not kept here (any more): send the full "
                        "input instead",
                        id.len > 64 ? 64 : (int)id.len, id.ptr);
}

void ds4_responses_store_put(const struct ds4_api_context *context, struct ds4_str id,
                             struct ds4_str response, struct ds4_str items)
{
    struct ds4_buf text;

    ds4_buf_init(&text, DS4_STORED_BYTES);
    (void)ds4_buf_append_text(&text, "{\"response\":");
    (void)ds4_buf_append_str(&text, response);
    (void)ds4_buf_append_text(&text, ",\"items\":[");
    (void)ds4_buf_append_str(&text, items);
    (void)ds4_buf_append_text(&text, "]}");
    if (!text.failed)
        (void)ds4_text_store_put(context->responses, id, ds4_buf_view(&text), ds4_clock_ns());
    ds4_buf_deinit(&text);
}

/* The kept object, read into the arena. */
static const struct ds4_jt_node *load(const struct ds4_api_context *context, struct ds4_str id,
                                      struct ds4_arena *arena, struct ds4_api_error *error)
{
    struct ds4_str text = ds4_text_store_get(context->responses, id, ds4_clock_ns());
    const struct ds4_jt_node *node;
    struct ds4_err err = {0};

    if (text.ptr == NULL) {
        (void)not_found(error, id);
        return NULL;
    }
    text = ds4_arena_copy(arena, text);
    node = text.ptr == NULL ? NULL : ds4_jt_parse(text, DS4_JT_MAX_DEPTH, arena, &err);
    if (node == NULL)
        (void)ds4_api_fail(error, "request_too_large", NULL, "the conversation is too long");
    return node;
}

const struct ds4_jt_node *ds4_responses_store_items(const struct ds4_api_context *context,
                                                    struct ds4_str id, struct ds4_arena *arena,
                                                    struct ds4_api_error *error)
{
    const struct ds4_jt_node *kept = load(context, id, arena, error);
    const struct ds4_jt_node *output = ds4_node_find(ds4_node_find(kept, "response"), "output");
    struct ds4_jt_node *items;

    if (kept == NULL)
        return NULL;
    items = ds4_arena_take(arena, sizeof(*items));
    if (items == NULL) {
        (void)ds4_api_fail(error, "request_too_large", NULL, "the conversation is too long");
        return NULL;
    }
    /* The two lists become one: the last input item is followed by the first output item. */
    *items = *ds4_node_find(kept, "items");
    if (output != NULL && output->first != NULL) {
        if (items->last != NULL)
            items->last->next = output->first;
        else
            items->first = output->first;
        items->last = output->last;
        items->n_children += output->n_children;
    }
    return items;
}

/* "rs_X_2" is an item of "resp_X". */
const struct ds4_jt_node *ds4_responses_store_item(const struct ds4_api_context *context,
                                                   struct ds4_str id, struct ds4_arena *arena,
                                                   struct ds4_api_error *error)
{
    size_t from = ds4_str_find(id, DS4_STR("_"), 0);
    size_t to = from == DS4_STR_NONE ? from : ds4_str_find(id, DS4_STR("_"), from + 1);
    const struct ds4_jt_node *kept, *output;
    char response[DS4_ANSWER_ID_BYTES];

    if (to != DS4_STR_NONE && to - from < sizeof(response) - DS4_STORED_PREFIX.len) {
        (void)snprintf(response, sizeof(response), "resp_%.*s", (int)(to - from - 1),
                       id.ptr + from + 1);
        kept = load(context, ds4_str_view(response), arena, error);
        output = ds4_node_find(ds4_node_find(kept, "response"), "output");
        for (const struct ds4_jt_node *item = output == NULL ? NULL : output->first; item != NULL;
             item = item->next)
            if (ds4_node_is(ds4_node_find(item, "id"), DS4_JT_STRING) &&
                ds4_str_equal(ds4_node_find(item, "id")->str, id))
                return item;
    }
    (void)not_found(error, id);
    return NULL;
}

/* ---- endpoints ---------------------------------------------------------------------------------------- */

/* The ID in /v1/responses/ID or /v1/responses/ID/cancel. */
static struct ds4_str id_of_path(struct ds4_exchange *x)
{
    struct ds4_str path = ds4_exchange_path(x);
    size_t at = ds4_str_find(path, DS4_STR("responses/"), 0);
    struct ds4_str id = ds4_str_skip(path, at == DS4_STR_NONE ? path.len : at + 10);

    return ds4_str_head(id, ds4_str_find(id, DS4_STR("/"), 0));
}

static void refuse(struct ds4_exchange *x, const struct ds4_api_error *error)
{
    ds4_api_error_reply(error, DS4_STYLE_OPENAI, x);
}

static struct ds4_answer *running(const struct ds4_api_context *context, struct ds4_str id)
{
    return ds4_str_starts(id, DS4_STORED_PREFIX) ? ds4_answer_find(context, id) : NULL;
}

void ds4_responses_get_handle(struct ds4_exchange *x, void *context)
{
    struct ds4_str id = id_of_path(x);
    struct ds4_answer *answer = running(context, id);
    struct ds4_api_error error = {0};
    const struct ds4_jt_node *kept;
    struct ds4_arena arena;
    struct ds4_buf body;

    if (answer != NULL) {
        ds4_buf_init(&body, DS4_STORED_BYTES);
        ds4_responses_write(answer, "in_progress", &body);
        ds4_exchange_reply(x, 200, "application/json", ds4_buf_view(&body));
        ds4_buf_deinit(&body);
        return;
    }
    ds4_arena_init(&arena, DS4_STORED_BYTES * 4);
    kept = load(context, id, &arena, &error);
    if (kept != NULL)
        ds4_exchange_reply(x, 200, "application/json", ds4_node_find(kept, "response")->raw);
    else
        refuse(x, &error);
    ds4_arena_deinit(&arena);
}

void ds4_responses_delete_handle(struct ds4_exchange *x, void *context)
{
    const struct ds4_api_context *api = context;
    struct ds4_str id = id_of_path(x);
    struct ds4_api_error error;
    char text[160];

    if (!ds4_text_store_remove(api->responses, id)) {
        (void)not_found(&error, id);
        refuse(x, &error);
        return;
    }
    (void)snprintf(text, sizeof(text), "{\"id\":\"%.*s\",\"object\":\"response\",\"deleted\":true}",
                   id.len > 64 ? 64 : (int)id.len, id.ptr);
    ds4_exchange_reply(x, 200, "application/json", ds4_str_view(text));
}

void ds4_responses_cancel_handle(struct ds4_exchange *x, void *context)
{
    const struct ds4_api_context *api = context;
    struct ds4_str id = id_of_path(x);
    struct ds4_answer *answer = running(context, id);
    struct ds4_api_error error;
    struct ds4_buf body;

    if (answer == NULL) {
        if (ds4_text_store_get(api->responses, id, ds4_clock_ns()).ptr != NULL)
            (void)ds4_api_fail(&error, "invalid_value", NULL, "the response is finished");
        else
            (void)not_found(&error, id);
        refuse(x, &error);
        return;
    }
    ds4_buf_init(&body, DS4_STORED_BYTES);
    ds4_responses_write(answer, "cancelled", &body);
    ds4_exchange_reply(x, 200, "application/json", ds4_buf_view(&body));
    ds4_buf_deinit(&body);
    ds4_responses_cancel(answer);
}

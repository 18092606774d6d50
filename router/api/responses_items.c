/* Items of a response (step 15): reasoning, messages, calls, whole or as they are announced. */
#include "router/api/responses_items.h"

#include "common/clock.h"
#include "common/json.h"
#include "router/api/parts.h"
#include "router/api/responses_request.h"
#include "router/api/text_store.h"

#include <stdio.h>

#define DS4_ITEM_BYTES ((size_t)256 << 20)

static struct ds4_response *state_of(const struct ds4_answer *answer)
{
    return answer->state;
}

/* The tool the model meant: the name it was shown, else a name that only one namespace has.  Clients
 * refuse a call whose namespace is missing. */
const struct ds4_response_tool *ds4_response_tool_of(const struct ds4_choice *choice, size_t part)
{
    const struct ds4_response *response = state_of(choice->answer);
    const struct ds4_answer_call *call = ds4_parts_call(choice, part);
    const struct ds4_response_tool *bare = NULL;
    size_t n_bare = 0;

    for (size_t t = 0; call != NULL && t < response->n_tool; t++) {
        if (ds4_str_equal(response->tool[t].shown, ds4_buf_view(&call->name)))
            return &response->tool[t];
        if (ds4_str_equal(response->tool[t].name, ds4_buf_view(&call->name))) {
            bare = &response->tool[t];
            n_bare++;
        }
    }
    return n_bare == 1 ? bare : NULL;
}

bool ds4_response_is_custom(const struct ds4_choice *choice, size_t part)
{
    const struct ds4_response_tool *tool = ds4_response_tool_of(choice, part);

    return tool != NULL && tool->is_custom;
}

bool ds4_response_is_reasoning(const struct ds4_choice *choice, size_t part)
{
    return choice->parts.ptr[part].kind == DS4_EVENT_REASONING;
}

/* "rs_X_2" for part 2 of "resp_X": unguessable as the response's own id, and leads back to it. */
void ds4_response_write_id(const struct ds4_choice *choice, size_t part, const char *key,
                           struct ds4_jw *w)
{
    const char *prefix = ds4_parts_call(choice, part) != NULL
                             ? (ds4_response_is_custom(choice, part) ? "ctc" : "fc")
                             : (ds4_response_is_reasoning(choice, part) ? "rs" : "msg");
    char id[DS4_ANSWER_ID_BYTES + 32];

    (void)snprintf(id, sizeof(id), "%s_%s_%zu", prefix, choice->answer->id + strlen("resp_"), part);
    ds4_jw_key(w, key);
    ds4_jw_text(w, id);
}

static struct ds4_str extra_of(const struct ds4_choice *choice, size_t part)
{
    for (const struct ds4_response_extra *e = state_of(choice->answer)->extras; e != NULL;
         e = e->next)
        if (e->part == part)
            return e->text;
    return (struct ds4_str){NULL, 0};
}

/* Once per part, when it is complete. */
void ds4_response_decide_extra(struct ds4_choice *choice, size_t part)
{
    struct ds4_response *response = state_of(choice->answer);
    char token[DS4_OPAQUE_CHARS + 1];
    struct ds4_response_extra *extra;

    if (ds4_parts_call(choice, part) != NULL ||
        (ds4_response_is_reasoning(choice, part) && !response->encrypted))
        return;
    extra = ds4_arena_take(&choice->req->arena, sizeof(*extra));
    if (extra == NULL)
        return; /* the answer goes on without it */
    *extra = (struct ds4_response_extra){.part = part, .next = response->extras};
    if (ds4_response_is_reasoning(choice, part)) {
        ds4_text_store_opaque(token);
        (void)ds4_text_store_put(choice->answer->context->reasoning, ds4_str_view(token),
                                 ds4_parts_text(choice, part), ds4_clock_ns());
        extra->text = ds4_arena_copy(&choice->req->arena, ds4_str_view(token));
    } else if (choice->wants_logprobs) {
        extra->text = ds4_arena_copy(&choice->req->arena, ds4_buf_view(&choice->logprobs_content));
        ds4_buf_clear(&choice->logprobs_content);
    }
    response->extras = extra;
}

void ds4_response_write_text(const char *type, struct ds4_str text, struct ds4_jw *w)
{
    ds4_jw_object(w);
    ds4_jw_key(w, "type");
    ds4_jw_text(w, type);
    ds4_jw_key(w, "text");
    ds4_jw_str(w, text);
    ds4_jw_end(w);
}

void ds4_response_write_output(const struct ds4_choice *choice, size_t part, struct ds4_str text,
                               struct ds4_jw *w)
{
    struct ds4_str logprobs = extra_of(choice, part);
    struct ds4_buf list;

    ds4_jw_object(w);
    ds4_jw_key(w, "type");
    ds4_jw_text(w, "output_text");
    ds4_jw_key(w, "text");
    ds4_jw_str(w, text);
    ds4_jw_key(w, "annotations");
    ds4_jw_array(w);
    ds4_jw_end(w);
    if (logprobs.ptr != NULL) {
        ds4_buf_init(&list, DS4_ITEM_BYTES);
        (void)ds4_buf_append_byte(&list, '[');
        (void)ds4_buf_append_str(&list, logprobs);
        (void)ds4_buf_append_byte(&list, ']');
        ds4_jw_key(w, "logprobs");
        ds4_jw_raw(w, ds4_buf_view(&list));
        ds4_buf_deinit(&list);
    }
    ds4_jw_end(w);
}

static void write_reasoning_item(const struct ds4_choice *choice, size_t part, bool whole,
                                 struct ds4_jw *w)
{
    struct ds4_str text = ds4_parts_text(choice, part);
    struct ds4_str token = extra_of(choice, part);

    ds4_jw_text(w, "reasoning");
    ds4_response_write_id(choice, part, "id", w);
    ds4_jw_key(w, "summary");
    ds4_jw_array(w);
    if (whole && state_of(choice->answer)->summary)
        ds4_response_write_text("summary_text", text, w);
    ds4_jw_end(w);
    ds4_jw_key(w, "content");
    ds4_jw_array(w);
    if (whole)
        ds4_response_write_text("reasoning_text", text, w);
    ds4_jw_end(w);
    ds4_jw_key(w, "encrypted_content");
    if (whole && token.ptr != NULL)
        ds4_jw_str(w, token);
    else
        ds4_jw_null(w);
}

/* The one text that a custom tool is called with. */
void ds4_response_write_input(struct ds4_str arguments, struct ds4_jw *w)
{
    struct ds4_err err = {0};
    struct ds4_json *json = ds4_json_parse(arguments, &err);
    const struct ds4_json *input = ds4_json_find(json, "input");

    ds4_jw_str(w, ds4_json_type(input) == DS4_JSON_STRING ? ds4_json_str(input) : arguments);
    ds4_json_free(json);
}

static void write_call_item(const struct ds4_choice *choice, size_t part, bool whole,
                            struct ds4_jw *w)
{
    const struct ds4_answer_call *call = ds4_parts_call(choice, part);
    const struct ds4_response_tool *tool = ds4_response_tool_of(choice, part);
    bool custom = ds4_response_is_custom(choice, part);

    ds4_jw_text(w, custom ? "custom_tool_call" : "function_call");
    ds4_response_write_id(choice, part, "id", w);
    ds4_jw_key(w, "call_id");
    ds4_jw_text(w, call->id);
    ds4_jw_key(w, "name");
    ds4_jw_str(w, tool != NULL ? tool->name : ds4_buf_view(&call->name));
    if (tool != NULL && tool->space.len > 0) {
        ds4_jw_key(w, "namespace");
        ds4_jw_str(w, tool->space);
    }
    ds4_jw_key(w, custom ? "input" : "arguments");
    if (!whole)
        ds4_jw_text(w, "");
    else if (custom)
        ds4_response_write_input(ds4_buf_view(&call->arguments), w);
    else
        ds4_jw_str(w, ds4_buf_view(&call->arguments));
    ds4_jw_key(w, "status");
    ds4_jw_text(w, !whole ? "in_progress" : call->incomplete ? "incomplete" : "completed");
}

bool ds4_response_is_cut(const struct ds4_choice *choice)
{
    return choice->done &&
           (choice->result.end == DS4_END_LENGTH || choice->result.end == DS4_END_CONTEXT ||
            choice->finish.reason == DS4_FINISH_LENGTH);
}

/* `whole`: the complete item, else the empty one that announces it. */
void ds4_response_write_item(const struct ds4_choice *choice, size_t part, bool whole,
                             struct ds4_jw *w)
{
    bool cut = ds4_response_is_cut(choice) && part + 1 == choice->parts.len;

    ds4_jw_object(w);
    ds4_jw_key(w, "type");
    if (ds4_parts_call(choice, part) != NULL) {
        write_call_item(choice, part, whole, w);
    } else if (ds4_response_is_reasoning(choice, part)) {
        write_reasoning_item(choice, part, whole, w);
    } else {
        ds4_jw_text(w, "message");
        ds4_response_write_id(choice, part, "id", w);
        ds4_jw_key(w, "role");
        ds4_jw_text(w, "assistant");
        ds4_jw_key(w, "status");
        ds4_jw_text(w, !whole ? "in_progress" : cut ? "incomplete" : "completed");
        ds4_jw_key(w, "content");
        ds4_jw_array(w);
        if (whole)
            ds4_response_write_output(choice, part, ds4_parts_text(choice, part), w);
        ds4_jw_end(w);
    }
    ds4_jw_end(w);
}

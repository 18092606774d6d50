/* Reads Responses requests into a conversation (step 2).
 *
 * Input is a flat list of items; neighbouring reasoning, assistant text and calls are one turn of the
 * assistant, which ends where somebody else speaks.  Tools in a namespace and tools called with plain
 * text exist for the client only: the model sees functions under one unique name each.  Items and tools
 * of kinds we do not have are passed over, never an error: clients send whole lists of them. */
#include "router/api/responses_request.h"

#include "common/clock.h"
#include "common/json_write.h"
#include "router/api/node.h"
#include "router/api/params.h"
#include "router/api/responses_store.h"
#include "router/api/text_store.h"
#include "router/text/chat_json.h"

#include <stdio.h>

#define DS4_TEXT_BYTES ((size_t)256 << 20) /* the arena sets the real limit */

struct reader {
    const struct ds4_api_context *api;
    struct ds4_arena *arena;
    const struct ds4_jt_node *root;
    struct ds4_conversation *out;
    struct ds4_response *response;
    struct ds4_api_error *error;
    DS4_VEC(const struct ds4_jt_node *) items;
    struct ds4_call *calls; /* of all turns, one behind the other */
    size_t n_call;
    struct ds4_message *turn; /* the assistant's, while it may go on */
};

static int too_long(struct reader *r)
{
    return ds4_api_fail(r->error, "request_too_large", NULL, "the conversation is too long");
}

static int must_be(struct reader *r, const char *path, const char *what)
{
    return ds4_api_fail(r->error, "invalid_value", path, "%s must be %s", path, what);
}

static int keep(struct reader *r, struct ds4_buf *text, struct ds4_str *out)
{
    *out = text->failed ? (struct ds4_str){NULL, 0} : ds4_arena_copy(r->arena, ds4_buf_view(text));
    ds4_buf_deinit(text);
    return out->ptr != NULL ? 0 : too_long(r);
}

static struct ds4_str str_of(const struct ds4_jt_node *obj, const char *key)
{
    const struct ds4_jt_node *node = ds4_node_find(obj, key);

    return ds4_node_is(node, DS4_JT_STRING) ? node->str : DS4_STR("");
}

static struct ds4_str raw_of(const struct ds4_jt_node *obj, const char *key)
{
    const struct ds4_jt_node *node = ds4_node_find(obj, key);

    return node == NULL ? (struct ds4_str){NULL, 0} : node->raw;
}

/* ---- tools ------------------------------------------------------------------------------------------- */

static int add_tool(struct reader *r, const struct ds4_jt_node *tool, struct ds4_str space,
                    const char *path)
{
    struct ds4_response_tool *entry = &r->response->tool[r->response->n_tool];
    const struct ds4_jt_node *inner = ds4_node_find(tool, "function");
    const struct ds4_jt_node *form = ds4_node_is(inner, DS4_JT_OBJECT) ? inner : tool;
    struct ds4_str description = raw_of(form, "description");
    struct ds4_str parameters = raw_of(form, "parameters");
    struct ds4_str json;
    struct ds4_buf text;
    struct ds4_err err = {0};
    struct ds4_jw w;

    *entry = (struct ds4_response_tool){
        .name = str_of(form, "name"),
        .space = space,
        .is_custom = ds4_node_is_word(ds4_node_find(tool, "type"), "custom"),
    };
    if (entry->name.len == 0)
        return must_be(r, path, "a tool with a name");
    ds4_buf_init(&text, DS4_TEXT_BYTES);
    (void)ds4_buf_append_str(&text, space);
    (void)ds4_buf_append_text(&text, space.len > 0 ? "." : "");
    (void)ds4_buf_append_str(&text, entry->name);
    if (keep(r, &text, &entry->shown) != 0)
        return -1;
    if (entry->is_custom)
        parameters = DS4_STR("{\"type\": \"object\", \"properties\": {\"input\": {\"type\": "
                             "\"string\"}}, \"required\": [\"input\"]}");
    ds4_buf_init(&text, DS4_TEXT_BYTES);
    ds4_jw_init(&w, &text);
    ds4_jw_object(&w);
    ds4_jw_key(&w, "name");
    ds4_jw_str(&w, entry->shown);
    if (description.ptr != NULL) {
        ds4_jw_key(&w, "description");
        ds4_jw_raw(&w, description);
    }
    if (parameters.ptr != NULL) {
        ds4_jw_key(&w, "parameters");
        ds4_jw_raw(&w, parameters);
    }
    ds4_jw_end(&w);
    if (keep(r, &text, &json) != 0)
        return -1;
    r->out->tools[r->out->n_tool] = ds4_jt_parse(json, DS4_JT_MAX_DEPTH, r->arena, &err);
    if (r->out->tools[r->out->n_tool++] == NULL)
        return ds4_api_fail_err(r->error, path, &err);
    r->response->n_tool++;
    return 0;
}

static bool is_callable(const struct ds4_jt_node *tool)
{
    const struct ds4_jt_node *type = ds4_node_find(tool, "type");

    return (ds4_node_is_word(type, "function") || ds4_node_is_word(type, "custom")) &&
           !ds4_node_is(ds4_node_find(tool, "defer_loading"), DS4_JT_TRUE);
}

static const struct ds4_jt_node *members_of(const struct ds4_jt_node *tool)
{
    const struct ds4_jt_node *list = ds4_node_is_word(ds4_node_find(tool, "type"), "namespace")
                                         ? ds4_node_find(tool, "tools")
                                         : NULL;

    return ds4_node_is(list, DS4_JT_ARRAY) ? list : NULL;
}

static int read_tools(struct reader *r)
{
    const struct ds4_jt_node *tools = ds4_node_find(r->root, "tools");
    char path[32];
    size_t n = 1, t = 0;

    if (tools == NULL)
        return 0;
    if (tools->type != DS4_JT_ARRAY)
        return must_be(r, "tools", "a list");
    for (const struct ds4_jt_node *tool = tools->first; tool != NULL; tool = tool->next)
        n += 1 + (members_of(tool) == NULL ? 0 : (size_t)members_of(tool)->n_children);
    if (n > DS4_MAX_TOOLS)
        return must_be(r, "tools", "a list of at most 512 tools");
    r->out->tools = ds4_arena_take_array(r->arena, n, sizeof(*r->out->tools));
    r->response->tool = ds4_arena_take_array(r->arena, n, sizeof(*r->response->tool));
    if (r->out->tools == NULL || r->response->tool == NULL)
        return too_long(r);
    for (const struct ds4_jt_node *tool = tools->first; tool != NULL; tool = tool->next) {
        const struct ds4_jt_node *members = members_of(tool);

        (void)snprintf(path, sizeof(path), "tools[%zu]", t++);
        if (tool->type != DS4_JT_OBJECT)
            return must_be(r, path, "an object");
        if (is_callable(tool)) {
            if (add_tool(r, tool, DS4_STR(""), path) != 0)
                return -1;
        } else if (members == NULL) {
            r->out->counts.ignored_tools++;
        }
        for (const struct ds4_jt_node *m = members == NULL ? NULL : members->first; m != NULL;
             m = m->next)
            if (is_callable(m) && add_tool(r, m, str_of(tool, "name"), path) != 0)
                return -1;
    }
    return 0;
}

/* ---- items ------------------------------------------------------------------------------------------- */

static struct ds4_message *add_message(struct reader *r, enum ds4_role role)
{
    struct ds4_chat *chat = &r->out->chat;
    struct ds4_message *message = &chat->messages[chat->n_message++];

    message->role = role;
    message->content = DS4_STR("");
    r->turn = NULL;
    return message;
}

/* The assistant's turn that neighbouring items share. */
static struct ds4_message *turn_of(struct reader *r)
{
    if (r->turn == NULL) {
        struct ds4_message *message = add_message(r, DS4_ROLE_ASSISTANT);

        message->calls = &r->calls[r->n_call];
        r->turn = message;
    }
    return r->turn;
}

/* Appends to a text of a turn, behind an empty line if there is one already. */
static int extend(struct reader *r, struct ds4_str *text, struct ds4_str more)
{
    struct ds4_buf joined;

    if (text->len == 0 || more.len == 0) {
        *text = text->len == 0 ? more : *text;
        return 0;
    }
    ds4_buf_init(&joined, DS4_TEXT_BYTES);
    ds4_normalise_append_part(&joined, 0, *text, false);
    ds4_normalise_append_part(&joined, 1, more, false);
    return keep(r, &joined, text);
}

/* A text or parts with text.  `lenient`: parts without text leave a mark (results of tools). */
static int read_content(struct reader *r, const struct ds4_jt_node *content, const char *path,
                        bool lenient, struct ds4_str *out)
{
    static const char *const texts[] = {"input_text",   "output_text",    "text",
                                        "summary_text", "reasoning_text", "refusal"};
    struct ds4_buf text;
    size_t p = 0;

    *out = DS4_STR("");
    if (ds4_node_is(content, DS4_JT_STRING))
        *out = content->str;
    if (content == NULL || content->type == DS4_JT_STRING)
        return 0;
    if (content->type != DS4_JT_ARRAY)
        return must_be(r, path, "a string or a list of parts");
    ds4_buf_init(&text, DS4_TEXT_BYTES);
    for (const struct ds4_jt_node *part = content->first; part != NULL; part = part->next) {
        const struct ds4_jt_node *type = ds4_node_find(part, "type");
        const struct ds4_jt_node *value =
            ds4_node_find(part, ds4_node_is_word(type, "refusal") ? "refusal" : "text");
        bool known = false;

        for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
            known = known || ds4_node_is_word(type, texts[i]);
        if (known && ds4_node_is(value, DS4_JT_STRING)) {
            ds4_normalise_append_part(&text, p++, value->str, false);
            continue;
        }
        if (lenient && !known && ds4_node_is(type, DS4_JT_STRING)) {
            ds4_normalise_append_part(&text, p++, type->str, true);
            continue;
        }
        if (!known && ds4_node_is(type, DS4_JT_STRING) &&
            r->api->config->http.drop_media == DS4_MEDIA_PLACEHOLDER &&
            ds4_normalise_media_kind(type->str).len > 0) {
            ds4_normalise_append_omitted(&text, p++, ds4_normalise_media_kind(type->str));
            continue;
        }
        ds4_buf_deinit(&text);
        if (known || !ds4_node_is(type, DS4_JT_STRING))
            return must_be(r, path, "a list of parts, each with a type and a text");
        return ds4_api_fail(r->error, "unsupported_value", path,
                            "%s holds \"%.*s\": this model reads text only", path,
                            type->str.len > 64 ? 64 : (int)type->str.len, type->str.ptr);
    }
    return keep(r, &text, out);
}

static int read_message(struct reader *r, const struct ds4_jt_node *item, const char *path)
{
    const struct ds4_jt_node *role = ds4_node_find(item, "role");
    enum ds4_role kind =
        ds4_node_is(role, DS4_JT_STRING) ? ds4_normalise_role(role->str) : DS4_ROLE_UNKNOWN;
    struct ds4_str text;
    char place[64];

    if (kind != DS4_ROLE_SYSTEM && kind != DS4_ROLE_USER && kind != DS4_ROLE_ASSISTANT)
        return must_be(r, path, "a message of user, assistant, system or developer");
    (void)snprintf(place, sizeof(place), "%s.content", path);
    if (read_content(r, ds4_node_find(item, "content"), place, false, &text) != 0)
        return -1;
    if (kind == DS4_ROLE_ASSISTANT)
        return extend(r, &turn_of(r)->content, text);
    add_message(r, kind)->content = text;
    return 0;
}

/* The text as it was, else what its token stands for, else its summary. */
static int read_reasoning(struct reader *r, const struct ds4_jt_node *item, const char *path)
{
    struct ds4_str token = str_of(item, "encrypted_content");
    struct ds4_str text, known;

    if (read_content(r, ds4_node_find(item, "content"), path, true, &text) != 0)
        return -1;
    if (text.len == 0 && token.len > 0) {
        known = ds4_text_store_get(r->api->reasoning, token, ds4_clock_ns());
        if (known.ptr != NULL)
            text = ds4_arena_copy(r->arena, known);
        if (known.ptr != NULL && text.ptr == NULL)
            return too_long(r);
    }
    if (text.len == 0 && read_content(r, ds4_node_find(item, "summary"), path, true, &text) != 0)
        return -1;
    return extend(r, &turn_of(r)->reasoning, text);
}

/* A call of any kind: `arguments` is a JSON value or text, `input` a plain text. */
static int read_call(struct reader *r, const struct ds4_jt_node *item, const char *path,
                     const struct ds4_jt_node *arguments, const struct ds4_jt_node *input)
{
    struct ds4_call *call = &turn_of(r)->calls[r->turn->n_call++];
    struct ds4_str space = str_of(item, "namespace");
    struct ds4_str name = str_of(item, "name");
    struct ds4_str json;
    struct ds4_buf text;
    struct ds4_err err = {0};
    struct ds4_jw w;

    r->n_call++;
    if (name.len == 0 && ds4_node_is_word(ds4_node_find(item, "type"), "local_shell_call"))
        name = DS4_STR("local_shell");
    call->id = str_of(item, "call_id");
    if (name.len == 0 || call->id.len == 0)
        return must_be(r, path, "a call with call_id and name");
    ds4_buf_init(&text, DS4_TEXT_BYTES);
    (void)ds4_buf_append_str(&text, space);
    (void)ds4_buf_append_text(&text, space.len > 0 ? "." : "");
    (void)ds4_buf_append_str(&text, name);
    if (keep(r, &text, &call->name) != 0)
        return -1;
    if (input != NULL) {
        ds4_buf_init(&text, DS4_TEXT_BYTES);
        ds4_jw_init(&w, &text);
        ds4_jw_object(&w);
        ds4_jw_key(&w, "input");
        ds4_jw_str(&w, input->type == DS4_JT_STRING ? input->str : input->raw);
        ds4_jw_end(&w);
        if (keep(r, &text, &json) != 0)
            return -1;
        arguments = ds4_jt_parse(json, DS4_JT_MAX_DEPTH, r->arena, &err);
        if (arguments == NULL)
            return ds4_api_fail_err(r->error, path, &err);
    }
    if (ds4_normalise_arguments(arguments, r->arena, call, &r->out->counts, &err) != 0)
        return ds4_api_fail_err(r->error, path, &err);
    return 0;
}

static int read_output(struct reader *r, const struct ds4_jt_node *item, const char *path)
{
    const struct ds4_jt_node *output = ds4_node_find(item, "output");
    struct ds4_message *message = add_message(r, DS4_ROLE_TOOL);
    char place[64];

    message->tool_call_id = str_of(item, "call_id");
    if (message->tool_call_id.len == 0)
        return must_be(r, path, "an output with a call_id");
    (void)snprintf(place, sizeof(place), "%s.output", path);
    if (ds4_node_is(output, DS4_JT_OBJECT)) {
        message->content = output->raw;
        return 0;
    }
    return read_content(r, output, place, true, &message->content);
}

static int read_item(struct reader *r, const struct ds4_jt_node *item, size_t i)
{
    const struct ds4_jt_node *type = ds4_node_find(item, "type");
    char path[48];

    (void)snprintf(path, sizeof(path), "input[%zu]", i);
    if (item->type != DS4_JT_OBJECT)
        return must_be(r, path, "an object");
    if ((type == NULL && ds4_node_find(item, "role") != NULL) || ds4_node_is_word(type, "message"))
        return read_message(r, item, path);
    if (!ds4_node_is(type, DS4_JT_STRING))
        return must_be(r, path, "an item with a type");
    if (ds4_node_is_word(type, "reasoning"))
        return read_reasoning(r, item, path);
    if (ds4_node_is_word(type, "function_call"))
        return read_call(r, item, path, ds4_node_find(item, "arguments"), NULL);
    if (ds4_node_is_word(type, "custom_tool_call"))
        return read_call(r, item, path, NULL, ds4_node_find(item, "input"));
    if (ds4_node_is_word(type, "local_shell_call"))
        return read_call(r, item, path, ds4_node_find(item, "action"), NULL);
    if (ds4_node_is_word(type, "function_call_output") ||
        ds4_node_is_word(type, "custom_tool_call_output") ||
        ds4_node_is_word(type, "local_shell_call_output"))
        return read_output(r, item, path);
    return 0; /* of a kind we do not have: passed over */
}

/* Puts the items of earlier turns and of this one into r->items. */
static int gather(struct reader *r)
{
    const struct ds4_jt_node *input = ds4_node_find(r->root, "input");
    struct ds4_buf text;

    if (r->response->previous.ptr != NULL) {
        const struct ds4_jt_node *stored =
            ds4_responses_store_items(r->api, r->response->previous, r->arena, r->error);

        if (stored == NULL)
            return -1;
        for (const struct ds4_jt_node *item = stored->first; item != NULL; item = item->next)
            if (DS4_VEC_PUSH(&r->items, item) != 0)
                return too_long(r);
    }
    if (ds4_node_is(input, DS4_JT_ARRAY)) {
        for (const struct ds4_jt_node *item = input->first; item != NULL; item = item->next) {
            const struct ds4_jt_node *use = item;

            if (ds4_node_is_word(ds4_node_find(item, "type"), "item_reference"))
                use = ds4_responses_store_item(r->api, str_of(item, "id"), r->arena, r->error);
            if (use == NULL)
                return -1;
            if (DS4_VEC_PUSH(&r->items, use) != 0)
                return too_long(r);
        }
    } else if (input != NULL && input->type != DS4_JT_STRING) {
        return must_be(r, "input", "a string or a list of items");
    }
    ds4_buf_init(&text, DS4_TEXT_BYTES);
    for (size_t i = 0; i < r->items.len; i++) {
        (void)ds4_buf_append_text(&text, i > 0 ? "," : "");
        (void)ds4_buf_append_str(&text, r->items.ptr[i]->raw);
    }
    if (ds4_node_is(input, DS4_JT_STRING)) {
        (void)ds4_buf_append_text(&text, r->items.len > 0 ? "," : "");
        (void)ds4_buf_append_text(&text, "{\"type\":\"message\",\"role\":\"user\",\"content\":");
        (void)ds4_buf_append_str(&text, input->raw);
        (void)ds4_buf_append_byte(&text, '}');
    }
    return keep(r, &text, &r->response->items);
}

static int read_input(struct reader *r)
{
    const struct ds4_jt_node *input = ds4_node_find(r->root, "input");
    struct ds4_str instructions = str_of(r->root, "instructions");
    struct ds4_chat *chat = &r->out->chat;
    size_t n;

    if (gather(r) != 0)
        return -1;
    n = r->items.len + 2; /* instructions, input as a string */
    chat->messages = ds4_arena_take_array(r->arena, n, sizeof(*chat->messages));
    r->calls = ds4_arena_take_array(r->arena, n, sizeof(*r->calls));
    if (chat->messages == NULL || r->calls == NULL)
        return too_long(r);
    if (instructions.len > 0)
        add_message(r, DS4_ROLE_SYSTEM)->content = instructions;
    for (size_t i = 0; i < r->items.len; i++)
        if (read_item(r, r->items.ptr[i], i) != 0)
            return -1;
    if (ds4_node_is(input, DS4_JT_STRING))
        add_message(r, DS4_ROLE_USER)->content = input->str;
    if (chat->n_message == 0 || r->response->items.len == 0)
        return ds4_api_fail(r->error, "missing_field", "input", "input must hold a message");
    return 0;
}

/* ---- the rest ------------------------------------------------------------------------------------------- */

static int read_format(struct reader *r)
{
    const struct ds4_jt_node *format = ds4_node_find(ds4_node_find(r->root, "text"), "format");
    const struct ds4_jt_node *type = ds4_node_find(format, "type");
    const struct ds4_jt_node *schema = ds4_node_find(format, "schema");

    if (format == NULL || ds4_node_is_word(type, "text"))
        return 0;
    r->out->answer_json = true;
    if (ds4_node_is_word(type, "json_object"))
        return 0;
    if (!ds4_node_is_word(type, "json_schema"))
        return must_be(r, "text.format.type", "text, json_object or json_schema");
    if (!ds4_node_is(schema, DS4_JT_OBJECT))
        return must_be(r, "text.format.schema", "an object");
    if (ds4_node_is(ds4_node_find(format, "strict"), DS4_JT_TRUE))
        return ds4_api_fail(r->error, "schema_unsupported", "text.format.strict",
                            "strict schemas are not enforced by this server: send the schema "
                            "without \"strict\": true");
    r->out->answer_schema = schema;
    return 0;
}

/* What ignoring would change is refused. */
static int check_offered(struct reader *r)
{
    const struct ds4_jt_node *truncation = ds4_node_find(r->root, "truncation");

    if (ds4_node_is(ds4_node_find(r->root, "background"), DS4_JT_TRUE))
        return ds4_api_fail(r->error, "unsupported_value", "background",
                            "background responses are not offered");
    if (ds4_node_find(r->root, "conversation") != NULL)
        return ds4_api_fail(r->error, "unsupported_value", "conversation",
                            "conversation is not offered: send the items as input");
    if (ds4_node_find(r->root, "prompt") != NULL)
        return ds4_api_fail(r->error, "unsupported_value", "prompt",
                            "prompt: no stored prompts are kept here, send instructions and input");
    if (truncation != NULL && !ds4_node_is_word(truncation, "disabled"))
        return ds4_api_fail(r->error, "unsupported_value", "truncation",
                            "truncation must be disabled");
    return 0;
}

static bool includes(const struct ds4_jt_node *root, const char *word)
{
    const struct ds4_jt_node *list = ds4_node_find(root, "include");

    for (const struct ds4_jt_node *n = ds4_node_is(list, DS4_JT_ARRAY) ? list->first : NULL;
         n != NULL; n = n->next)
        if (ds4_node_is_word(n, word))
            return true;
    return false;
}

/* What the response shows of its request. */
static int read_shown(struct reader *r)
{
    struct ds4_response *out = r->response;
    const struct ds4_jt_node *reasoning = ds4_node_find(r->root, "reasoning");
    const struct ds4_jt_node *previous = ds4_node_find(r->root, "previous_response_id");
    const struct ds4_jt_node *instructions = ds4_node_find(r->root, "instructions");
    const struct ds4_jt_node *include = ds4_node_find(r->root, "include");

    if (instructions != NULL && instructions->type != DS4_JT_STRING)
        return must_be(r, "instructions", "a string");
    if (include != NULL && include->type != DS4_JT_ARRAY)
        return must_be(r, "include", "a list");
    out->store = !ds4_node_is(ds4_node_find(r->root, "store"), DS4_JT_FALSE);
    out->summary_wish = raw_of(reasoning, "summary");
    if (out->summary_wish.ptr == NULL)
        out->summary_wish = raw_of(reasoning, "generate_summary");
    out->summary =
        out->summary_wish.ptr != NULL && !ds4_str_equal(out->summary_wish, DS4_STR("\"none\""));
    out->effort = raw_of(reasoning, "effort");
    out->encrypted = includes(r->root, "reasoning.encrypted_content");
    out->instructions = raw_of(r->root, "instructions");
    out->tools = raw_of(r->root, "tools");
    out->tool_choice = raw_of(r->root, "tool_choice");
    out->metadata = raw_of(r->root, "metadata");
    out->text = raw_of(r->root, "text");
    out->max_output_tokens = raw_of(r->root, "max_output_tokens");
    if (previous != NULL && previous->type != DS4_JT_STRING)
        return must_be(r, "previous_response_id", "a string");
    if (previous != NULL)
        out->previous = previous->str;
    return 0;
}

int ds4_responses_prompt_build(const struct ds4_api_context *context, struct ds4_body *body,
                               struct ds4_response *response, struct ds4_chat_prompt *out,
                               struct ds4_api_error *error)
{
    struct ds4_conversation *c = &out->conversation;
    struct reader r = {context, &body->arena, body->root, c, response, error, {0}, NULL, 0, NULL};
    struct ds4_param param;
    struct ds4_err err = {0};
    int rc = -1;

    *c = (struct ds4_conversation){.chat = {.release = context->release}};
    if (check_offered(&r) == 0 && read_shown(&r) == 0 && read_tools(&r) == 0 && read_input(&r) == 0)
        rc = read_format(&r);
    DS4_VEC_DEINIT(&r.items);
    if (rc != 0)
        return -1;
    if (ds4_chat_json_read_tool_choice(body->root, &body->arena, c, &param, &err) != 0 ||
        ds4_chat_json_read_effort(body->root, &body->arena, c, &param, &err) != 0)
        return ds4_api_fail(error, param.code, param.path, "%s", err.msg);
    if (ds4_chat_prompt_check_results(out, "input", error) != 0)
        return -1;
    return ds4_chat_prompt_render(context, &body->arena, out, error);
}

/* Copies what outlives the body into the request's arena. */
static int adopt(struct ds4_response *response, struct ds4_arena *arena)
{
    struct ds4_str *texts[] = {&response->previous, &response->instructions,
                               &response->tools,    &response->tool_choice,
                               &response->metadata, &response->text,
                               &response->effort,   &response->max_output_tokens,
                               &response->items,    &response->summary_wish};
    struct ds4_response_tool *tool =
        ds4_arena_take_array(arena, response->n_tool + 1, sizeof(*tool));
    bool failed = tool == NULL;

    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        if (texts[i]->ptr == NULL)
            continue;
        *texts[i] = ds4_arena_copy(arena, *texts[i]);
        failed = failed || texts[i]->ptr == NULL;
    }
    for (size_t t = 0; t < response->n_tool && !failed; t++) {
        tool[t] = response->tool[t];
        tool[t].shown = ds4_arena_copy(arena, tool[t].shown);
        tool[t].name = ds4_arena_copy(arena, tool[t].name);
        tool[t].space = ds4_arena_copy(arena, tool[t].space);
        failed = tool[t].shown.ptr == NULL || tool[t].name.ptr == NULL || tool[t].space.ptr == NULL;
    }
    response->tool = tool;
    return failed ? -1 : 0;
}

/* Log-probabilities are asked for by an include. */
static int read_logprobs(const struct ds4_body *body, struct ds4_request *req,
                         struct ds4_api_error *error)
{
    struct ds4_err err = {0};
    int64_t top = 0;

    if (ds4_json_get_int(body->json, "", "top_logprobs", 0, DS4_MAX_TOP_LOGPROBS, &top, &err) != 0)
        return ds4_api_fail(error, "invalid_value", "top_logprobs", "%s", err.msg);
    if (includes(body->root, "message.output_text.logprobs"))
        req->sampling.n_logprobs = (int32_t)top;
    return 0;
}

static int read(struct ds4_answer *answer, struct ds4_body *body, struct ds4_chat_prompt *prompt,
                struct ds4_api_error *error)
{
    static const struct ds4_param_names names = {"stop", {"max_output_tokens"}};
    struct ds4_request *first = ds4_answer_add_request(answer, 0, error);
    struct ds4_response *response;

    if (first == NULL)
        return -1;
    response = ds4_arena_take(&first->arena, sizeof(*response));
    if (response == NULL)
        return ds4_api_fail(error, "internal_error", NULL, "no memory for the response");
    if (ds4_intake_model(body->json, answer->context, first, error) != 0 ||
        ds4_params_refuse(body->json, answer->dialect->api, error) != 0 ||
        ds4_intake_switch(body->json, "", "stream", &answer->stream, error) != 0 ||
        ds4_intake_switch(body->json, "", "parallel_tool_calls", &answer->parallel_calls, error) !=
            0 ||
        ds4_params_read(body->json, answer->context, &names, first, error) != 0 ||
        read_logprobs(body, first, error) != 0 ||
        ds4_responses_prompt_build(answer->context, body, response, prompt, error) != 0)
        return -1;
    if (adopt(response, &first->arena) != 0)
        return ds4_api_fail(error, "internal_error", NULL, "no memory for the response");
    answer->state = response;
    return ds4_intake_chat(answer, body->json, prompt, 1, error);
}

int ds4_responses_request_parse(struct ds4_answer *answer, struct ds4_api_error *error)
{
    return ds4_intake_run(answer, read, error);
}

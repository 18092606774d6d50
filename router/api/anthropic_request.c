/* Reads Messages requests into a conversation (step 2).
 *
 * What real clients were seen to send decides the details: a pseudo header as first system block whose
 * value changes from request to request (dropped, or every prompt would differ from its start), system
 * messages between the others, results and text mixed in one user message, markers of caching that
 * move every turn (ignored: they must not change a token).  Tools are rewritten to the function form,
 * so that the same tool reads the same in every dialect. */
#include "router/api/anthropic_request.h"

#include "common/clock.h"
#include "common/json_write.h"
#include "common/metrics.h"
#include "router/api/node.h"
#include "router/api/params.h"
#include "router/api/text_store.h"
#include "router/text/chat_json.h"

#include <stdio.h>

#define DS4_TEXT_BYTES ((size_t)256 << 20) /* the arena sets the real limit */
/* Blocks that begin so are about the client's billing, not for the model. */
#define DS4_PSEUDO_HEADER DS4_STR("x-anthropic-")
/* In front of the result of a tool that failed: the prompt has no other place for the flag. */
#define DS4_ERROR_MARK DS4_STR("Error: ")

struct reader {
    const struct ds4_api_context *api;
    struct ds4_arena *arena;
    const struct ds4_jt_node *root;
    struct ds4_conversation *out;
    struct ds4_api_error *error;
};

/* ---- small helpers ---------------------------------------------------------------------------------- */

static int too_long(struct reader *r)
{
    return ds4_api_fail(r->error, "request_too_large", NULL, "the conversation is too long");
}

static int must_be(struct reader *r, const char *path, const char *what)
{
    return ds4_api_fail(r->error, "invalid_value", path, "%s must be %s", path, what);
}

/* A block that holds no text: refused, or a mark in the text where the setting says so. */
static int not_read(struct reader *r, const char *path, struct ds4_str type, struct ds4_buf *text)
{
    struct ds4_str kind = ds4_normalise_media_kind(type);

    if (r->api->config->http.drop_media == DS4_MEDIA_PLACEHOLDER && kind.len > 0) {
        ds4_normalise_append_omitted(text, text->len > 0, kind);
        return 0;
    }
    return ds4_api_fail(r->error, "unsupported_value", path,
                        "%s is \"%.*s\": this model reads text only", path,
                        type.len > 64 ? 64 : (int)type.len, type.ptr);
}

/* Moves a buffer's text into the arena. */
static int keep(struct reader *r, struct ds4_buf *text, struct ds4_str *out)
{
    *out = text->failed ? (struct ds4_str){NULL, 0} : ds4_arena_copy(r->arena, ds4_buf_view(text));
    ds4_buf_deinit(text);
    return out->ptr != NULL ? 0 : too_long(r);
}

/* Type of a block at `path`; empty with *error set if it has none. */
static struct ds4_str type_of(struct reader *r, const struct ds4_jt_node *block, const char *path)
{
    const struct ds4_jt_node *type = ds4_node_find(block, "type");

    if (ds4_node_is(type, DS4_JT_STRING) && type->str.len > 0)
        return type->str;
    (void)must_be(r, path, "an object with a type");
    return DS4_STR("");
}

/* A text block's text, after an empty line if it is not the first. */
static int append_text(struct reader *r, const struct ds4_jt_node *block, const char *path,
                       struct ds4_buf *out)
{
    const struct ds4_jt_node *text = ds4_node_find(block, "text");

    if (!ds4_node_is(text, DS4_JT_STRING))
        return must_be(r, path, "a text block with a string");
    ds4_normalise_append_part(out, out->len > 0, text->str, false);
    return 0;
}

/* Content that holds text only: a string or text blocks. */
static int read_plain(struct reader *r, const struct ds4_jt_node *content, const char *path,
                      bool is_system, struct ds4_str *out)
{
    struct ds4_buf text;
    char place[96];
    size_t b = 0;

    *out = DS4_STR("");
    if (ds4_node_is(content, DS4_JT_STRING))
        *out = content->str;
    if (content == NULL || ds4_node_is(content, DS4_JT_STRING))
        return 0;
    if (content->type != DS4_JT_ARRAY)
        return must_be(r, path, "a string or a list of blocks");
    ds4_buf_init(&text, DS4_TEXT_BYTES);
    for (const struct ds4_jt_node *block = content->first; block != NULL;
         block = block->next, b++) {
        struct ds4_str type;
        const struct ds4_jt_node *value = ds4_node_find(block, "text");
        int rc = 0;

        (void)snprintf(place, sizeof(place), "%s[%zu]", path, b);
        type = type_of(r, block, place);
        if (is_system && ds4_node_is(value, DS4_JT_STRING) &&
            ds4_str_starts(value->str, DS4_PSEUDO_HEADER))
            ds4_metric_add(r->api->metrics, DS4_M_PROMPT_STRIPPED, 1, "billing_header");
        else if (ds4_str_equal(type, DS4_STR("text")))
            rc = append_text(r, block, place, &text);
        else
            rc = type.len == 0 ? -1 : not_read(r, place, type, &text);
        if (rc != 0) {
            ds4_buf_deinit(&text);
            return -1;
        }
    }
    return keep(r, &text, out);
}

/* ---- tool results --------------------------------------------------------------------------------------- */

/* The declared tool of this name, deferred ones included: they are known through a reference only. */
static const struct ds4_jt_node *find_tool(const struct reader *r, struct ds4_str name)
{
    const struct ds4_jt_node *tools = ds4_node_find(r->root, "tools");

    for (const struct ds4_jt_node *t = tools == NULL ? NULL : tools->first; t != NULL; t = t->next)
        if (ds4_node_is(ds4_node_find(t, "name"), DS4_JT_STRING) &&
            ds4_str_equal(ds4_node_find(t, "name")->str, name))
            return t;
    return NULL;
}

/* {name, description, parameters}: the function form of a tool, as JSON. */
static void write_function(const struct ds4_jt_node *tool, struct ds4_buf *out)
{
    const struct ds4_jt_node *description = ds4_node_find(tool, "description");
    const struct ds4_jt_node *schema = ds4_node_find(tool, "input_schema");
    struct ds4_jw w;

    ds4_jw_init(&w, out);
    ds4_jw_object(&w);
    ds4_jw_key(&w, "name");
    ds4_jw_str(&w, ds4_node_find(tool, "name")->str);
    if (description != NULL) {
        ds4_jw_key(&w, "description");
        ds4_jw_raw(&w, description->raw);
    }
    if (schema != NULL) {
        ds4_jw_key(&w, "parameters");
        ds4_jw_raw(&w, schema->raw);
    }
    ds4_jw_end(&w);
}

/* Our "call_x" went out as "toolu_x": the memory of calls knows it by its own name. */
static int read_id(struct reader *r, struct ds4_str id, struct ds4_str *out)
{
    struct ds4_buf text;

    *out = id;
    if (!ds4_str_starts(id, DS4_STR("toolu_")))
        return 0;
    ds4_buf_init(&text, DS4_TEXT_BYTES);
    (void)ds4_buf_append_text(&text, "call_");
    (void)ds4_buf_append_str(&text, ds4_str_skip(id, strlen("toolu_")));
    return keep(r, &text, out);
}

static int append_result_block(struct reader *r, const struct ds4_jt_node *block, const char *path,
                               struct ds4_buf *out)
{
    struct ds4_str type = type_of(r, block, path);
    const struct ds4_jt_node *name = ds4_node_find(block, "tool_name");
    const struct ds4_jt_node *tool;

    if (type.len == 0)
        return -1;
    if (ds4_str_equal(type, DS4_STR("text")))
        return append_text(r, block, path, out);
    if (!ds4_str_equal(type, DS4_STR("tool_reference"))) {
        ds4_normalise_append_part(out, out->len > 0, type, true);
        return 0;
    }
    tool = ds4_node_is(name, DS4_JT_STRING) ? find_tool(r, name->str) : NULL;
    if (tool == NULL)
        return must_be(r, path, "a reference to a declared tool");
    ds4_normalise_append_part(out, out->len > 0, DS4_STR(""), false);
    write_function(tool, out);
    return 0;
}

static int read_result(struct reader *r, const struct ds4_jt_node *block, const char *path,
                       struct ds4_message *message)
{
    const struct ds4_jt_node *id = ds4_node_find(block, "tool_use_id");
    const struct ds4_jt_node *content = ds4_node_find(block, "content");
    const struct ds4_jt_node *flag = ds4_node_find(block, "is_error");
    struct ds4_buf text;
    char place[128];
    size_t b = 0;
    int rc = 0;

    if (!ds4_node_is(id, DS4_JT_STRING))
        return must_be(r, path, "a tool_result with a tool_use_id");
    if (content != NULL && content->type != DS4_JT_STRING && content->type != DS4_JT_ARRAY)
        return must_be(r, path, "a tool_result whose content is a string or a list of blocks");
    message->role = DS4_ROLE_TOOL;
    if (read_id(r, id->str, &message->tool_call_id) != 0)
        return -1;
    ds4_buf_init(&text, DS4_TEXT_BYTES);
    if (ds4_node_is(content, DS4_JT_STRING))
        (void)ds4_buf_append_str(&text, content->str);
    for (const struct ds4_jt_node *part = content == NULL ? NULL : content->first;
         part != NULL && rc == 0; part = part->next) {
        (void)snprintf(place, sizeof(place), "%s.content[%zu]", path, b++);
        rc = append_result_block(r, part, place, &text);
    }
    if (rc != 0) {
        ds4_buf_deinit(&text);
        return -1;
    }
    if (flag != NULL && flag->type == DS4_JT_TRUE &&
        !ds4_str_starts(ds4_buf_view(&text), DS4_ERROR_MARK)) {
        struct ds4_buf marked;

        ds4_buf_init(&marked, DS4_TEXT_BYTES);
        (void)ds4_buf_append_str(&marked, DS4_ERROR_MARK);
        (void)ds4_buf_append_str(&marked, ds4_buf_view(&text));
        ds4_buf_deinit(&text);
        text = marked;
    }
    return keep(r, &text, &message->content);
}

/* ---- messages --------------------------------------------------------------------------------------------- */

static struct ds4_message *add_message(struct reader *r, enum ds4_role role)
{
    struct ds4_chat *chat = &r->out->chat;
    struct ds4_message *message = &chat->messages[chat->n_message++];

    message->role = role;
    message->content = DS4_STR("");
    return message;
}

/* Results first, each a message of its own; then the text. */
static int read_user(struct reader *r, const struct ds4_jt_node *content, const char *path)
{
    struct ds4_buf text;
    char place[96];
    size_t b = 0, n_result = 0;
    int rc = 0;

    ds4_buf_init(&text, DS4_TEXT_BYTES);
    for (const struct ds4_jt_node *block = content->first; block != NULL && rc == 0;
         block = block->next) {
        struct ds4_str type;

        (void)snprintf(place, sizeof(place), "%s[%zu]", path, b++);
        type = type_of(r, block, place);
        if (ds4_str_equal(type, DS4_STR("text"))) {
            rc = append_text(r, block, place, &text);
        } else if (ds4_str_equal(type, DS4_STR("tool_result"))) {
            n_result++;
            rc = read_result(r, block, place, add_message(r, DS4_ROLE_TOOL));
        } else {
            rc = type.len == 0 ? -1 : not_read(r, place, type, &text);
        }
    }
    if (rc != 0 || (text.len == 0 && n_result > 0)) {
        ds4_buf_deinit(&text);
        return rc;
    }
    return keep(r, &text, &add_message(r, DS4_ROLE_USER)->content);
}

/* The thinking a block carries, or what its opaque token stands for. */
static void append_thinking(struct reader *r, const struct ds4_jt_node *block, const char *text_key,
                            const char *token_key, struct ds4_buf *out)
{
    const struct ds4_jt_node *text = text_key == NULL ? NULL : ds4_node_find(block, text_key);
    const struct ds4_jt_node *token = ds4_node_find(block, token_key);
    struct ds4_str known = ds4_node_is(text, DS4_JT_STRING) ? text->str : DS4_STR("");

    if (known.len == 0 && ds4_node_is(token, DS4_JT_STRING))
        known = ds4_text_store_get(r->api->reasoning, token->str, ds4_clock_ns());
    if (known.len > 0)
        ds4_normalise_append_part(out, out->len > 0, known, false);
}

static int read_call(struct reader *r, const struct ds4_jt_node *block, const char *path,
                     struct ds4_call *call)
{
    const struct ds4_jt_node *id = ds4_node_find(block, "id");
    const struct ds4_jt_node *name = ds4_node_find(block, "name");
    struct ds4_err err = {0};

    if (!ds4_node_is(id, DS4_JT_STRING) || !ds4_node_is(name, DS4_JT_STRING) || name->str.len == 0)
        return must_be(r, path, "a tool_use with id and name");
    if (read_id(r, id->str, &call->id) != 0)
        return -1;
    call->name = name->str;
    if (ds4_normalise_arguments(ds4_node_find(block, "input"), r->arena, call, &r->out->counts,
                                &err) != 0)
        return ds4_api_fail_err(r->error, path, &err);
    return 0;
}

/* One block of an assistant message. */
static int read_assistant_block(struct reader *r, const struct ds4_jt_node *block, const char *path,
                                struct ds4_message *message, struct ds4_buf *text,
                                struct ds4_buf *thinking)
{
    struct ds4_str type = type_of(r, block, path);

    if (type.len == 0)
        return -1;
    if (ds4_str_equal(type, DS4_STR("text")))
        return append_text(r, block, path, text);
    if (ds4_str_equal(type, DS4_STR("tool_use")))
        return read_call(r, block, path, &message->calls[message->n_call++]);
    if (ds4_str_equal(type, DS4_STR("thinking")))
        append_thinking(r, block, "thinking", "signature", thinking);
    else if (ds4_str_equal(type, DS4_STR("redacted_thinking")))
        append_thinking(r, block, NULL, "data", thinking);
    else
        return not_read(r, path, type, text);
    return 0;
}

static int read_assistant(struct reader *r, const struct ds4_jt_node *content, const char *path)
{
    struct ds4_message *message = add_message(r, DS4_ROLE_ASSISTANT);
    struct ds4_buf text, thinking;
    char place[96];
    size_t b = 0;
    int rc = 0;

    message->calls =
        ds4_arena_take_array(r->arena, (size_t)content->n_children + 1, sizeof(*message->calls));
    if (message->calls == NULL)
        return too_long(r);
    ds4_buf_init(&text, DS4_TEXT_BYTES);
    ds4_buf_init(&thinking, DS4_TEXT_BYTES);
    for (const struct ds4_jt_node *block = content->first; block != NULL && rc == 0;
         block = block->next) {
        (void)snprintf(place, sizeof(place), "%s[%zu]", path, b++);
        rc = read_assistant_block(r, block, place, message, &text, &thinking);
    }
    if (rc == 0 && keep(r, &text, &message->content) == 0 &&
        keep(r, &thinking, &message->reasoning) == 0)
        return 0;
    ds4_buf_deinit(&text);
    ds4_buf_deinit(&thinking);
    return -1;
}

static int read_message(struct reader *r, const struct ds4_jt_node *node, size_t i)
{
    const struct ds4_jt_node *role = ds4_node_find(node, "role");
    const struct ds4_jt_node *content = ds4_node_find(node, "content");
    enum ds4_role kind;
    char path[64];

    (void)snprintf(path, sizeof(path), "messages[%zu]", i);
    if (node->type != DS4_JT_OBJECT)
        return must_be(r, path, "an object");
    (void)snprintf(path, sizeof(path), "messages[%zu].role", i);
    if (ds4_node_is_word(role, "user"))
        kind = DS4_ROLE_USER;
    else if (ds4_node_is_word(role, "assistant"))
        kind = DS4_ROLE_ASSISTANT;
    else if (ds4_node_is_word(role, "system"))
        kind = DS4_ROLE_SYSTEM;
    else
        return must_be(r, path, "user, assistant or system");
    (void)snprintf(path, sizeof(path), "messages[%zu].content", i);
    if (content != NULL && content->type == DS4_JT_ARRAY && kind == DS4_ROLE_USER)
        return read_user(r, content, path);
    if (content != NULL && content->type == DS4_JT_ARRAY && kind == DS4_ROLE_ASSISTANT)
        return read_assistant(r, content, path);
    return read_plain(r, content, path, kind == DS4_ROLE_SYSTEM, &add_message(r, kind)->content);
}

/* An upper bound: a message, and one for each block that may be a result; the system prompt. */
static size_t count_messages(const struct ds4_jt_node *list)
{
    size_t n = 1;

    for (const struct ds4_jt_node *node = list->first; node != NULL; node = node->next) {
        const struct ds4_jt_node *content = ds4_node_find(node, "content");

        n += 1 + (content == NULL ? 0 : (size_t)content->n_children);
    }
    return n;
}

static int read_messages(struct reader *r)
{
    const struct ds4_jt_node *list = ds4_node_find(r->root, "messages");
    const struct ds4_jt_node *system = ds4_node_find(r->root, "system");
    struct ds4_chat *chat = &r->out->chat;
    struct ds4_str text;
    size_t i = 0;

    if (list == NULL || list->type != DS4_JT_ARRAY || list->n_children == 0)
        return must_be(r, "messages", "a non-empty list");
    chat->messages = ds4_arena_take_array(r->arena, count_messages(list), sizeof(*chat->messages));
    if (chat->messages == NULL)
        return too_long(r);
    if (read_plain(r, system, "system", true, &text) != 0)
        return -1;
    if (text.len > 0)
        add_message(r, DS4_ROLE_SYSTEM)->content = text;
    for (const struct ds4_jt_node *node = list->first; node != NULL; node = node->next)
        if (read_message(r, node, i++) != 0)
            return -1;
    /* A last message of the assistant is the beginning of the answer, in this dialect always. */
    r->out->continue_last = chat->messages[chat->n_message - 1].role == DS4_ROLE_ASSISTANT &&
                            chat->messages[chat->n_message - 1].n_call == 0;
    return 0;
}

/* ---- tools and the rest ---------------------------------------------------------------------------------------- */

/* Tools that run on the vendor's servers have a dated type and no schema; deferred ones wait for a
 * reference. */
static bool is_rendered(struct reader *r, const struct ds4_jt_node *tool)
{
    const struct ds4_jt_node *deferred = ds4_node_find(tool, "defer_loading");

    if (ds4_node_find(tool, "input_schema") == NULL && ds4_node_find(tool, "type") != NULL &&
        !ds4_node_is_word(ds4_node_find(tool, "type"), "custom")) {
        r->out->counts.ignored_tools++;
        return false;
    }
    return deferred == NULL || deferred->type != DS4_JT_TRUE;
}

static int add_tool(struct reader *r, const struct ds4_jt_node *tool)
{
    struct ds4_err err = {0};
    struct ds4_str json;
    struct ds4_buf text;

    ds4_buf_init(&text, DS4_TEXT_BYTES);
    write_function(tool, &text);
    if (keep(r, &text, &json) != 0)
        return -1;
    r->out->tools[r->out->n_tool] = ds4_jt_parse(json, DS4_JT_MAX_DEPTH, r->arena, &err);
    if (r->out->tools[r->out->n_tool] == NULL)
        return ds4_api_fail_err(r->error, "tools", &err);
    r->out->n_tool++;
    return 0;
}

static int read_tools(struct reader *r)
{
    const struct ds4_jt_node *tools = ds4_node_find(r->root, "tools");
    char path[48];
    size_t t = 0;

    if (tools == NULL)
        return 0;
    if (tools->type != DS4_JT_ARRAY || tools->n_children > DS4_MAX_TOOLS)
        return must_be(r, "tools", "a list of at most 512 tools");
    r->out->tools =
        ds4_arena_take_array(r->arena, (size_t)tools->n_children + 1, sizeof(*r->out->tools));
    if (r->out->tools == NULL)
        return too_long(r);
    for (const struct ds4_jt_node *tool = tools->first; tool != NULL; tool = tool->next, t++) {
        const struct ds4_jt_node *name = ds4_node_find(tool, "name");

        if (!is_rendered(r, tool))
            continue;
        (void)snprintf(path, sizeof(path), "tools[%zu].name", t);
        if (!ds4_node_is(name, DS4_JT_STRING) || name->str.len == 0)
            return must_be(r, path, "a non-empty string");
        if (add_tool(r, tool) != 0)
            return -1;
    }
    return 0;
}

/* output_config.format, or output_format as it was called before: the answer's schema. */
static int read_format(struct reader *r)
{
    const struct ds4_jt_node *now =
        ds4_node_find(ds4_node_find(r->root, "output_config"), "format");
    const struct ds4_jt_node *format = now != NULL ? now : ds4_node_find(r->root, "output_format");
    const struct ds4_jt_node *schema = ds4_node_find(format, "schema");

    if (format == NULL)
        return 0;
    if (!ds4_node_is_word(ds4_node_find(format, "type"), "json_schema"))
        return must_be(r, now != NULL ? "output_config.format.type" : "output_format.type",
                       "json_schema");
    if (schema == NULL || schema->type != DS4_JT_OBJECT)
        return must_be(r, now != NULL ? "output_config.format.schema" : "output_format.schema",
                       "an object");
    r->out->answer_schema = schema;
    r->out->answer_json = true;
    return 0;
}

int ds4_anthropic_prompt_build(const struct ds4_api_context *context, struct ds4_body *body,
                               struct ds4_chat_prompt *out, struct ds4_api_error *error)
{
    struct ds4_conversation *c = &out->conversation;
    struct reader r = {context, &body->arena, body->root, c, error};
    struct ds4_param param;
    struct ds4_err err = {0};

    *c = (struct ds4_conversation){.chat = {.release = context->release}};
    if (read_messages(&r) != 0 || read_tools(&r) != 0 || read_format(&r) != 0)
        return -1;
    if (ds4_chat_json_read_tool_choice(body->root, &body->arena, c, &param, &err) != 0 ||
        ds4_chat_json_read_effort(body->root, &body->arena, c, &param, &err) != 0)
        return ds4_api_fail(error, param.code, param.path, "%s", err.msg);
    if (context->config->anthropic.absent_thinking == DS4_ABSENT_OFF &&
        ds4_node_find(body->root, "thinking") == NULL)
        ds4_effort_add_switch(&c->wish, DS4_EFFORT_BY_THINKING, false);
    if (ds4_chat_prompt_check_results(out, "messages", error) != 0)
        return -1;
    return ds4_chat_prompt_render(context, &body->arena, out, error);
}

static int read(struct ds4_answer *answer, struct ds4_body *body, struct ds4_chat_prompt *prompt,
                struct ds4_api_error *error)
{
    static const struct ds4_param_names names = {
        .stop = "stop_sequences",
        .limits = {"max_tokens"},
    };
    struct ds4_request *first = ds4_answer_add_request(answer, 0, error);
    const struct ds4_json *choice = ds4_json_find(body->json, "tool_choice");
    bool one_call = false;

    if (first == NULL || ds4_intake_model(body->json, answer->context, first, error) != 0 ||
        ds4_params_refuse(body->json, answer->dialect->api, error) != 0 ||
        ds4_intake_switch(body->json, "", "stream", &answer->stream, error) != 0 ||
        ds4_intake_switch(choice, "tool_choice", "disable_parallel_tool_use", &one_call, error) !=
            0 ||
        ds4_params_read(body->json, answer->context, &names, first, error) != 0 ||
        ds4_anthropic_prompt_build(answer->context, body, prompt, error) != 0)
        return -1;
    answer->parallel_calls = !one_call;
    return ds4_intake_chat(answer, body->json, prompt, 1, error);
}

int ds4_anthropic_request_parse(struct ds4_answer *answer, struct ds4_api_error *error)
{
    return ds4_intake_run(answer, read, error);
}

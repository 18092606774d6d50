/* Encoder-level JSON -> chat.
 *
 * Types that the reference would choke on (a user's content that is no string, a call without a name)
 * are errors here; a value it reads as false (null, "", 0, an empty list) counts as absent, as in
 * Python.  Arguments follow the release: V4 parses a JSON string and nothing else, V4.1 also takes an
 * object and a string that was encoded twice. */
#include "router/text/case_json.h"

#include "common/buf.h"
#include "router/text/literals.h"

#define MAX_CONTENT_BYTES ((size_t)256 << 20)
#define MAX_BUDGET_DIGITS 9

struct reader {
    struct ds4_arena *arena;
    struct ds4_chat *chat;
    struct ds4_err *err;
    size_t i; /* message being read, for errors */
};

static int bad(const struct reader *r, const char *what)
{
    return ds4_fail(r->err, DS4_E_INVALID, "message %zu: %s", r->i, what);
}

static int too_long(const struct reader *r)
{
    return ds4_fail(r->err, DS4_E_TOO_LONG, "the conversation is too long");
}

static bool is_null(const struct ds4_jt_node *node)
{
    return node == NULL || node->type == DS4_JT_NULL;
}

/* Python's truth of a value. */
static bool is_true(const struct ds4_jt_node *node)
{
    if (node == NULL)
        return false;
    switch (node->type) {
    case DS4_JT_NULL:
    case DS4_JT_FALSE:
        return false;
    case DS4_JT_NUMBER:
        return ds4_jt_double(node) != 0;
    case DS4_JT_STRING:
        return node->str.len > 0;
    case DS4_JT_ARRAY:
    case DS4_JT_OBJECT:
        return node->n_children > 0;
    default:
        return true;
    }
}

static enum ds4_role read_role(struct ds4_str name)
{
    static const struct {
        struct ds4_str name;
        enum ds4_role role;
    } roles[] = {
        {DS4_STR("system"), DS4_ROLE_SYSTEM},
        {DS4_STR("user"), DS4_ROLE_USER},
        {DS4_STR("assistant"), DS4_ROLE_ASSISTANT},
        {DS4_STR("tool"), DS4_ROLE_TOOL},
        {DS4_STR("developer"), DS4_ROLE_DEVELOPER},
        {DS4_STR("latest_reminder"), DS4_ROLE_LATEST_REMINDER},
        {DS4_STR("direct_search_results"), DS4_ROLE_SEARCH_RESULT},
    };

    for (size_t i = 0; i < sizeof(roles) / sizeof(roles[0]); i++)
        if (ds4_str_equal(name, roles[i].name))
            return roles[i].role;
    return DS4_ROLE_UNKNOWN;
}

/* A string or something that Python's `or ""` replaces. */
static int read_text(const struct reader *r, const struct ds4_jt_node *node, const char *what,
                     struct ds4_str *out)
{
    *out = DS4_STR("");
    if (!is_true(node))
        return 0;
    if (node->type != DS4_JT_STRING)
        return bad(r, what);
    *out = node->str;
    return 0;
}

/* A tool result's list: texts and "[Unsupported TYPE]", joined. */
static int read_result_list(const struct reader *r, const struct ds4_jt_node *list,
                            struct ds4_str *out)
{
    struct ds4_buf text;
    int rc = 0;

    ds4_buf_init(&text, MAX_CONTENT_BYTES);
    for (const struct ds4_jt_node *part = list->first; part != NULL && rc == 0; part = part->next) {
        const struct ds4_jt_node *type = ds4_jt_find(part, "type");
        const struct ds4_jt_node *value = ds4_jt_find(part, "text");

        if (part->type != DS4_JT_OBJECT) {
            rc = bad(r, "a part of the content is no object");
            break;
        }
        if (part != list->first)
            ds4_buf_append_text(&text, DS4_LIT_BLOCK_JOIN);
        if (type == NULL || type->type != DS4_JT_STRING ||
            !ds4_str_equal(type->str, DS4_STR("text"))) {
            ds4_buf_append_text(&text, DS4_LIT_UNSUPPORTED_OPEN);
            ds4_buf_append_str(&text, is_null(type)                 ? DS4_STR("None")
                                      : type->type == DS4_JT_STRING ? type->str
                                                                    : type->raw);
            ds4_buf_append_byte(&text, ']');
        } else if (value != NULL && value->type != DS4_JT_STRING) {
            rc = bad(r, "the text of a part is no string");
        } else if (value != NULL) {
            ds4_buf_append_str(&text, value->str);
        }
    }
    if (rc == 0) {
        *out = ds4_arena_copy(r->arena, ds4_buf_view(&text));
        if (text.failed || out->ptr == NULL)
            rc = too_long(r);
    }
    ds4_buf_deinit(&text);
    return rc;
}

static int read_content(const struct reader *r, const struct ds4_jt_node *content,
                        struct ds4_message *message)
{
    if (message->role == DS4_ROLE_TOOL && is_true(content) && content->type == DS4_JT_ARRAY)
        return read_result_list(r, content, &message->content);
    if (message->role == DS4_ROLE_USER && content != NULL && content->type != DS4_JT_STRING)
        return bad(r, "the content of a user must be a string");
    return read_text(r, content, "the content must be a string", &message->content);
}

/* ---- calls --------------------------------------------------------------------------------------- */

/* The object in a JSON text, one more level of string deep on V4.1; NULL if there is none.  *is_json
 * tells whether the text was JSON at all. */
static const struct ds4_jt_node *object_in(const struct reader *r, struct ds4_str text,
                                           bool *is_json)
{
    const struct ds4_jt_node *node = ds4_jt_parse(text, DS4_JT_MAX_DEPTH, r->arena, NULL);

    *is_json = node != NULL;
    if (node != NULL && node->type == DS4_JT_STRING && r->chat->release == DS4_RELEASE_V41)
        node = ds4_jt_parse(node->str, DS4_JT_MAX_DEPTH, r->arena, NULL);
    return node != NULL && node->type == DS4_JT_OBJECT ? node : NULL;
}

static int read_arguments(const struct reader *r, const struct ds4_jt_node *value,
                          struct ds4_call *call)
{
    bool v41 = r->chat->release == DS4_RELEASE_V41;
    bool is_json;

    if (value == NULL)
        return bad(r, "a call has no arguments");
    call->node = value;
    call->kind = DS4_ARGUMENTS_VALUE;
    if (v41 && value->type == DS4_JT_OBJECT)
        call->kind = DS4_ARGUMENTS_MEMBERS;
    if (value->type != DS4_JT_STRING)
        return 0;
    call->node = object_in(r, value->str, &is_json);
    call->kind = call->node != NULL ? DS4_ARGUMENTS_MEMBERS : DS4_ARGUMENTS_RAW;
    call->raw = value->str;
    if (call->node == NULL && is_json && !v41)
        return bad(r, "the arguments of a call are no object");
    return 0;
}

static int read_call(const struct reader *r, const struct ds4_jt_node *node, struct ds4_call *call)
{
    const struct ds4_jt_node *function = ds4_jt_find(node, "function");
    const struct ds4_jt_node *name = ds4_jt_find(function, "name");
    const struct ds4_jt_node *id = ds4_jt_find(node, "id");

    if (name == NULL || name->type != DS4_JT_STRING)
        return bad(r, "a call has no function name");
    if (!is_true(id))
        id = ds4_jt_find(function, "id");
    if (is_true(id) && id->type == DS4_JT_STRING)
        call->id = id->str;
    call->name = name->str;
    return read_arguments(r, ds4_jt_find(function, "arguments"), call);
}

static int read_calls(const struct reader *r, const struct ds4_jt_node *list,
                      struct ds4_message *message)
{
    if (!is_true(list))
        return 0;
    if (list->type != DS4_JT_ARRAY)
        return bad(r, "tool_calls must be a list");
    message->calls =
        ds4_arena_take_array(r->arena, (size_t)list->n_children, sizeof(*message->calls));
    if (message->calls == NULL)
        return too_long(r);
    for (const struct ds4_jt_node *call = list->first; call != NULL; call = call->next)
        if (read_call(r, call, &message->calls[message->n_call++]))
            return -1;
    return 0;
}

/* ---- messages ------------------------------------------------------------------------------------ */

static int read_tools(const struct reader *r, const struct ds4_jt_node *list,
                      struct ds4_message *message)
{
    if (!is_true(list))
        return 0;
    if (list->type != DS4_JT_ARRAY)
        return bad(r, "tools must be a list");
    message->tools =
        ds4_arena_take_array(r->arena, (size_t)list->n_children, sizeof(*message->tools));
    if (message->tools == NULL)
        return too_long(r);
    for (const struct ds4_jt_node *tool = list->first; tool != NULL; tool = tool->next) {
        const struct ds4_jt_node *function = ds4_jt_find(tool, "function");

        if (function == NULL)
            return bad(r, "a tool has no function");
        message->tools[message->n_tool++] = function;
    }
    return 0;
}

static int read_message(struct reader *r, const struct ds4_jt_node *node,
                        struct ds4_message *message)
{
    const struct ds4_jt_node *role = ds4_jt_find(node, "role");
    const struct ds4_jt_node *task = ds4_jt_find(node, "task");
    const struct ds4_jt_node *format = ds4_jt_find(node, "response_format");

    if (role == NULL || role->type != DS4_JT_STRING)
        return bad(r, "the role must be a string");
    message->role_text = role->str;
    message->role = read_role(role->str);
    if (!is_null(task)) {
        if (task->type != DS4_JT_STRING)
            return bad(r, "the task must be a string");
        message->task = task->str;
    }
    message->response_format = is_true(format) ? format : NULL;
    message->wo_eos = is_true(ds4_jt_find(node, "wo_eos"));
    if (message->role == DS4_ROLE_UNKNOWN || message->role == DS4_ROLE_SEARCH_RESULT)
        return 0; /* refused when rendered, dropped unread before the last boundary */
    if (read_content(r, ds4_jt_find(node, "content"), message) ||
        read_text(r, ds4_jt_find(node, "tool_call_id"), "tool_call_id must be a string",
                  &message->tool_call_id) ||
        read_text(r, ds4_jt_find(node, "reasoning_content"), "reasoning_content must be a string",
                  &message->reasoning) ||
        read_tools(r, ds4_jt_find(node, "tools"), message))
        return -1;
    return message->role == DS4_ROLE_ASSISTANT
               ? read_calls(r, ds4_jt_find(node, "tool_calls"), message)
               : 0;
}

static int read_list(struct reader *r, const struct ds4_jt_node *list)
{
    if (is_null(list))
        return 0;
    if (list->type != DS4_JT_ARRAY)
        return ds4_fail(r->err, DS4_E_INVALID, "messages and context must be lists");
    for (const struct ds4_jt_node *node = list->first; node != NULL; node = node->next, r->i++)
        if (read_message(r, node, &r->chat->messages[r->chat->n_message++]))
            return -1;
    return 0;
}

/* ---- the case ------------------------------------------------------------------------------------ */

static int read_effort(const struct ds4_jt_node *value, struct ds4_chat *chat, struct ds4_err *err)
{
    if (is_null(value))
        return 0;
    if (value->type == DS4_JT_STRING && ds4_str_equal(value->str, DS4_STR("low")))
        chat->effort = DS4_EFFORT_LOW;
    else if (value->type == DS4_JT_STRING && ds4_str_equal(value->str, DS4_STR("high")))
        chat->effort = DS4_EFFORT_HIGH;
    else if (value->type == DS4_JT_STRING && ds4_str_equal(value->str, DS4_STR("max")))
        chat->effort = DS4_EFFORT_MAX;
    else if (value->type == DS4_JT_NUMBER && value->raw.len < MAX_BUDGET_DIGITS &&
             strcspn(value->raw.ptr, ".eE") >= value->raw.len) {
        chat->effort = DS4_EFFORT_BUDGET;
        chat->effort_budget = (int32_t)ds4_jt_double(value);
    } else {
        return ds4_fail(err, DS4_E_INVALID, "the reasoning effort is unknown to the encoder");
    }
    return 0;
}

static int read_mode(const struct ds4_jt_node *root, struct ds4_chat *chat, struct ds4_err *err)
{
    const struct ds4_jt_node *encoder = ds4_jt_find(root, "encoder");
    const struct ds4_jt_node *mode = ds4_jt_find(root, "thinking_mode");

    chat->release = encoder != NULL && encoder->type == DS4_JT_STRING
                        ? ds4_release_parse(encoder->str)
                        : DS4_RELEASE_UNSET;
    if (chat->release == DS4_RELEASE_UNSET)
        return ds4_fail(err, DS4_E_INVALID, "encoder must be v4_preview, v4_0731 or v41");
    if (mode == NULL || mode->type != DS4_JT_STRING)
        return ds4_fail(err, DS4_E_INVALID, "thinking_mode must be chat or thinking");
    chat->thinking = ds4_str_equal(mode->str, DS4_STR("thinking"));
    if (!chat->thinking && !ds4_str_equal(mode->str, DS4_STR("chat")))
        return ds4_fail(err, DS4_E_INVALID, "thinking_mode must be chat or thinking");
    return read_effort(ds4_jt_find(root, "reasoning_effort"), chat, err);
}

int ds4_case_json_read(const struct ds4_jt_node *root, struct ds4_arena *arena,
                       struct ds4_chat *chat, struct ds4_err *err)
{
    const struct ds4_jt_node *options = ds4_jt_find(root, "options");
    const struct ds4_jt_node *context = ds4_jt_find(options, "context");
    const struct ds4_jt_node *messages = ds4_jt_find(root, "messages");
    const struct ds4_jt_node *drop = ds4_jt_find(options, "drop_thinking");
    const struct ds4_jt_node *bos = ds4_jt_find(options, "add_default_bos_token");
    struct reader r = {arena, chat, err, 0};
    size_t n = 1;

    *chat = (struct ds4_chat){0};
    if (read_mode(root, chat, err))
        return -1;
    if (messages == NULL || messages->type != DS4_JT_ARRAY)
        return ds4_fail(err, DS4_E_INVALID, "messages must be a list");
    n += (size_t)messages->n_children;
    if (context != NULL && context->type == DS4_JT_ARRAY)
        n += (size_t)context->n_children;
    chat->messages = ds4_arena_take_array(arena, n, sizeof(*chat->messages));
    if (chat->messages == NULL)
        return too_long(&r);
    if (read_list(&r, context))
        return -1;
    chat->n_context = chat->n_message;
    chat->keep_reasoning = drop != NULL && !is_true(drop);
    chat->no_bos = bos != NULL && !is_true(bos);
    return read_list(&r, messages);
}

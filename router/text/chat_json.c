/* OpenAI chat JSON -> conversation.  Step 2 of the request path.
 *
 * null always means absent; a wrong type is an error that names its path, never coerced.  Unknown
 * members are ignored.  A duplicate key counts with its last value, as everywhere. */
#include "router/text/chat_json.h"

#include <stdarg.h>
#include <stdio.h>

#define MAX_CONTENT_BYTES ((size_t)256 << 20) /* the arena sets the real limit */

struct reader {
    struct ds4_arena *arena;
    enum ds4_media media;
    struct ds4_conversation *out;
    struct ds4_param *param;
    struct ds4_err *err;
};

#define INVALID            "invalid_value"
#define UNSUPPORTED        "unsupported_value"
#define SCHEMA_UNSUPPORTED "schema_unsupported"

/* Fails at a place: "messages[2].role must be a string". */
static int bad(struct reader *r, const char *code, const char *why, const char *path, ...)
    __attribute__((format(printf, 4, 5)));
static int bad_value(struct reader *r, const char *code, struct ds4_str value, const char *why,
                     const char *path, ...) __attribute__((format(printf, 5, 6)));

static int bad(struct reader *r, const char *code, const char *why, const char *path, ...)
{
    va_list args;

    va_start(args, path);
    vsnprintf(r->param->path, sizeof(r->param->path), path, args);
    va_end(args);
    r->param->code = code;
    return ds4_fail(r->err, DS4_E_INVALID, "%s %s", r->param->path, why);
}

/* The same for a text that is at fault itself: the message quotes the start of it. */
static int bad_value(struct reader *r, const char *code, struct ds4_str value, const char *why,
                     const char *path, ...)
{
    va_list args;

    va_start(args, path);
    vsnprintf(r->param->path, sizeof(r->param->path), path, args);
    va_end(args);
    r->param->code = code;
    return ds4_fail(r->err, DS4_E_INVALID, "%s is \"%.*s\": %s", r->param->path,
                    value.len > 64 ? 64 : (int)value.len, value.ptr, why);
}

static int too_long(struct reader *r)
{
    return ds4_fail(r->err, DS4_E_TOO_LONG, "the conversation is too long");
}

/* The member, NULL if absent or null. */
static const struct ds4_jt_node *find(const struct ds4_jt_node *obj, const char *key)
{
    const struct ds4_jt_node *node = ds4_jt_find(obj, key);

    return node == NULL || node->type == DS4_JT_NULL ? NULL : node;
}

static bool is_type(const struct ds4_jt_node *node, enum ds4_jt_type type)
{
    return node != NULL && node->type == type;
}

/* ---- content (R2) -------------------------------------------------------------------------------- */

/* One part of message i's content list. */
static int read_part(struct reader *r, const struct ds4_jt_node *part, size_t i, size_t p,
                     bool is_result, struct ds4_buf *text)
{
    const struct ds4_jt_node *type = find(part, "type");
    const struct ds4_jt_node *value;
    bool is_refusal;

    if (part->type != DS4_JT_OBJECT)
        return bad(r, INVALID, "must be an object", "messages[%zu].content[%zu]", i, p);
    if (!is_type(type, DS4_JT_STRING))
        return bad(r, INVALID, "must be a string", "messages[%zu].content[%zu].type", i, p);
    is_refusal = ds4_str_equal(type->str, DS4_STR("refusal"));
    if (!is_refusal && !ds4_str_equal(type->str, DS4_STR("text")) &&
        !ds4_str_equal(type->str, DS4_STR("input_text")) &&
        !ds4_str_equal(type->str, DS4_STR("output_text"))) {
        struct ds4_str kind = ds4_normalise_media_kind(type->str);

        if (!is_result && r->media == DS4_MEDIA_PLACEHOLDER && kind.len > 0) {
            ds4_normalise_append_omitted(text, p, kind);
            return 0;
        }
        if (!is_result)
            return bad_value(r, UNSUPPORTED, type->str, "this model reads text only",
                             "messages[%zu].content[%zu].type", i, p);
        ds4_normalise_append_part(text, p, type->str, true);
        return 0;
    }
    value = find(part, is_refusal ? "refusal" : "text");
    if (!is_type(value, DS4_JT_STRING))
        return bad(r, INVALID, "must be a string", "messages[%zu].content[%zu].%s", i, p,
                   is_refusal ? "refusal" : "text");
    ds4_normalise_append_part(text, p, value->str, false);
    return 0;
}

static int read_content(struct reader *r, const struct ds4_jt_node *content, size_t i,
                        struct ds4_message *message)
{
    struct ds4_buf text;
    size_t p = 0;
    int rc = 0;

    message->content = DS4_STR("");
    if (content == NULL)
        return 0;
    if (content->type == DS4_JT_STRING) {
        message->content = content->str;
        return 0;
    }
    if (content->type != DS4_JT_ARRAY)
        return bad(r, INVALID, "must be a string or a list of parts", "messages[%zu].content", i);
    ds4_buf_init(&text, MAX_CONTENT_BYTES);
    for (const struct ds4_jt_node *part = content->first; part != NULL && rc == 0;
         part = part->next)
        rc = read_part(r, part, i, p++, message->role == DS4_ROLE_TOOL, &text);
    if (rc == 0) {
        message->content = ds4_arena_copy(r->arena, ds4_buf_view(&text));
        if (text.failed || message->content.ptr == NULL)
            rc = too_long(r);
    }
    ds4_buf_deinit(&text);
    return rc;
}

/* ---- messages ------------------------------------------------------------------------------------ */

/* A string member into *out, untouched if absent. */
static int read_str(struct reader *r, const struct ds4_jt_node *message, size_t i, const char *key,
                    struct ds4_str *out)
{
    const struct ds4_jt_node *node = find(message, key);

    if (node == NULL)
        return 0;
    if (node->type != DS4_JT_STRING)
        return bad(r, INVALID, "must be a string", "messages[%zu].%s", i, key);
    *out = node->str;
    return 0;
}

/* R3: the first of the names that holds text. */
static int read_reasoning(struct reader *r, const struct ds4_jt_node *node, size_t i,
                          struct ds4_message *message)
{
    static const char *const names[] = {"reasoning_content", "reasoning", "reasoning_text"};

    for (size_t n = 0; n < sizeof(names) / sizeof(names[0]); n++)
        if (message->reasoning.len == 0 && read_str(r, node, i, names[n], &message->reasoning))
            return -1;
    return 0;
}

/* {name, arguments} of a call; `place` is its path inside the message. */
static int read_function(struct reader *r, const struct ds4_jt_node *function, size_t i,
                         const char *place, struct ds4_call *call)
{
    const struct ds4_jt_node *name = find(function, "name");

    if (!is_type(function, DS4_JT_OBJECT))
        return bad(r, INVALID, "must be an object", "messages[%zu].%s", i, place);
    if (!is_type(name, DS4_JT_STRING) || name->str.len == 0)
        return bad(r, INVALID, "must be a non-empty string", "messages[%zu].%s.name", i, place);
    call->name = name->str;
    return ds4_normalise_arguments(find(function, "arguments"), r->arena, call, &r->out->counts,
                                   r->err);
}

static int read_call(struct reader *r, const struct ds4_jt_node *node, size_t i, size_t c,
                     struct ds4_call *call)
{
    const struct ds4_jt_node *function = find(node, "function");
    const struct ds4_jt_node *id = find(node, "id");
    char place[48];

    if (node->type != DS4_JT_OBJECT)
        return bad(r, INVALID, "must be an object", "messages[%zu].tool_calls[%zu]", i, c);
    if (id == NULL)
        id = find(function, "id");
    if (id != NULL && id->type != DS4_JT_STRING)
        return bad(r, INVALID, "must be a string", "messages[%zu].tool_calls[%zu].id", i, c);
    if (id != NULL)
        call->id = id->str;
    snprintf(place, sizeof(place), "tool_calls[%zu].function", c);
    return read_function(r, function, i, place, call);
}

static int read_calls(struct reader *r, const struct ds4_jt_node *node, size_t i,
                      struct ds4_message *message)
{
    const struct ds4_jt_node *calls = find(node, "tool_calls");
    const struct ds4_jt_node *legacy = find(node, "function_call");
    size_t n_call = calls != NULL ? (size_t)calls->n_children : legacy != NULL;

    if (calls != NULL && calls->type != DS4_JT_ARRAY)
        return bad(r, INVALID, "must be a list", "messages[%zu].tool_calls", i);
    if (n_call == 0)
        return 0;
    message->calls = ds4_arena_take_array(r->arena, n_call, sizeof(*message->calls));
    if (message->calls == NULL)
        return too_long(r);
    if (calls == NULL) {
        message->n_call = 1;
        return read_function(r, legacy, i, "function_call", &message->calls[0]);
    }
    for (const struct ds4_jt_node *call = calls->first; call != NULL; call = call->next) {
        if (read_call(r, call, i, message->n_call, &message->calls[message->n_call]))
            return -1;
        message->n_call++;
    }
    return 0;
}

static int read_message(struct reader *r, const struct ds4_jt_node *node, size_t i,
                        struct ds4_message *message)
{
    const struct ds4_jt_node *role = find(node, "role");

    if (node->type != DS4_JT_OBJECT)
        return bad(r, INVALID, "must be an object", "messages[%zu]", i);
    if (!is_type(role, DS4_JT_STRING))
        return bad(r, INVALID, "must be a string", "messages[%zu].role", i);
    message->role_text = role->str;
    message->role = ds4_normalise_role(role->str);
    if (message->role == DS4_ROLE_UNKNOWN)
        return bad_value(r, INVALID, role->str,
                         "must be system, developer, user, assistant or tool", "messages[%zu].role",
                         i);
    if (read_content(r, find(node, "content"), i, message))
        return -1;
    if (message->role == DS4_ROLE_TOOL)
        return read_str(r, node, i, "tool_call_id", &message->tool_call_id);
    if (message->role != DS4_ROLE_ASSISTANT)
        return 0;
    if (read_reasoning(r, node, i, message))
        return -1;
    return read_calls(r, node, i, message);
}

static int read_messages(struct reader *r, const struct ds4_jt_node *root)
{
    const struct ds4_jt_node *list = find(root, "messages");
    struct ds4_chat *chat = &r->out->chat;

    if (!is_type(list, DS4_JT_ARRAY) || list->n_children == 0)
        return bad(r, INVALID, "must be a non-empty list", "messages");
    chat->messages =
        ds4_arena_take_array(r->arena, (size_t)list->n_children, sizeof(*chat->messages));
    if (chat->messages == NULL)
        return too_long(r);
    for (const struct ds4_jt_node *node = list->first; node != NULL; node = node->next) {
        if (read_message(r, node, chat->n_message, &chat->messages[chat->n_message]))
            return -1;
        chat->n_message++;
    }
    return 0;
}

/* R11: `prefix` on the last message or `continue_final_message`; `add_generation_prompt`: false says that
 * no turn is to be opened, which goes without saying where one is continued. */
static int read_continue(struct reader *r, const struct ds4_jt_node *root)
{
    const struct ds4_jt_node *flag = find(root, "continue_final_message");
    const struct ds4_jt_node *header = find(root, "add_generation_prompt");
    const struct ds4_jt_node *prefix = find(find(root, "messages")->last, "prefix");
    const struct ds4_chat *chat = &r->out->chat;
    size_t last = chat->n_message - 1;
    bool is_assistant = chat->messages[last].role == DS4_ROLE_ASSISTANT;

    if (flag != NULL && flag->type != DS4_JT_TRUE && flag->type != DS4_JT_FALSE)
        return bad(r, INVALID, "must be true or false", "continue_final_message");
    if (header != NULL && header->type != DS4_JT_TRUE && header->type != DS4_JT_FALSE)
        return bad(r, INVALID, "must be true or false", "add_generation_prompt");
    if (prefix != NULL && prefix->type != DS4_JT_TRUE && prefix->type != DS4_JT_FALSE)
        return bad(r, INVALID, "must be true or false", "messages[%zu].prefix", last);
    if (is_type(flag, DS4_JT_TRUE) && !is_assistant)
        return bad(r, INVALID, "needs a last message of the assistant", "continue_final_message");
    r->out->continue_last =
        is_assistant && (is_type(flag, DS4_JT_TRUE) || is_type(prefix, DS4_JT_TRUE));
    r->out->no_turn = is_type(header, DS4_JT_FALSE) && !r->out->continue_last;
    return 0;
}

/* ---- tools, tool_choice, response_format ---------------------------------------------------------- */

/* Tools of other types than function and deferred ones are not rendered. */
static bool is_rendered_tool(struct reader *r, const struct ds4_jt_node *tool)
{
    const struct ds4_jt_node *type = find(tool, "type");

    if (is_type(type, DS4_JT_STRING) && !ds4_str_equal(type->str, DS4_STR("function"))) {
        r->out->counts.ignored_tools++;
        return false;
    }
    return !is_type(find(tool, "defer_loading"), DS4_JT_TRUE);
}

static int read_tools(struct reader *r, const struct ds4_jt_node *root)
{
    const struct ds4_jt_node *tools = find(root, "tools");
    bool legacy = tools == NULL && find(root, "functions") != NULL;
    const char *key = legacy ? "functions" : "tools";
    size_t t = 0;

    if (legacy)
        tools = find(root, "functions");
    if (tools == NULL)
        return 0;
    if (tools->type != DS4_JT_ARRAY)
        return bad(r, INVALID, "must be a list", "%s", key);
    if (tools->n_children > DS4_MAX_TOOLS)
        return bad(r, INVALID, "has too many entries, at most 512", "%s", key);
    r->out->tools =
        ds4_arena_take_array(r->arena, (size_t)tools->n_children + 1, sizeof(*r->out->tools));
    if (r->out->tools == NULL)
        return too_long(r);
    for (const struct ds4_jt_node *tool = tools->first; tool != NULL; tool = tool->next, t++) {
        const struct ds4_jt_node *function = legacy ? tool : find(tool, "function");
        const struct ds4_jt_node *name = find(function, "name");

        if (tool->type != DS4_JT_OBJECT)
            return bad(r, INVALID, "must be an object", "%s[%zu]", key, t);
        if (!legacy && !is_rendered_tool(r, tool))
            continue;
        if (!is_type(function, DS4_JT_OBJECT))
            return bad(r, INVALID, "must be an object", "tools[%zu].function", t);
        if (!is_type(name, DS4_JT_STRING) || name->str.len == 0)
            return bad(r, INVALID, "must be a non-empty string", "%s[%zu]%s.name", key, t,
                       legacy ? "" : ".function");
        r->out->tools[r->out->n_tool++] = function;
    }
    return 0;
}

static bool is_declared(const struct ds4_conversation *out, struct ds4_str name)
{
    for (size_t t = 0; t < out->n_tool; t++)
        if (ds4_str_equal(find(out->tools[t], "name")->str, name))
            return true;
    return false;
}

static int set_tool_choice(struct reader *r, struct ds4_str word)
{
    if (ds4_str_equal(word, DS4_STR("auto")))
        r->out->tool_choice = DS4_TOOL_CHOICE_AUTO;
    else if (ds4_str_equal(word, DS4_STR("none")))
        r->out->tool_choice = DS4_TOOL_CHOICE_NONE;
    else if (ds4_str_equal(word, DS4_STR("required")) || ds4_str_equal(word, DS4_STR("any")))
        r->out->tool_choice = DS4_TOOL_CHOICE_REQUIRED;
    else
        return bad(r, INVALID, "must be none, auto, required or name a function", "tool_choice");
    return 0;
}

/* {type: function, function: {name}}, {type: function | tool, name}, {type: allowed_tools, mode}. */
static int read_choice_value(struct reader *r, const struct ds4_jt_node *root)
{
    const struct ds4_jt_node *choice = find(root, "tool_choice");
    const struct ds4_jt_node *type = find(choice, "type");
    const struct ds4_jt_node *name;

    if (choice == NULL)
        choice = find(root, "function_call");
    if (choice == NULL)
        return 0;
    if (choice->type == DS4_JT_STRING)
        return set_tool_choice(r, choice->str);
    if (choice->type != DS4_JT_OBJECT)
        return bad(r, INVALID, "must be a string or an object", "tool_choice");
    if (is_type(type, DS4_JT_STRING) && ds4_str_equal(type->str, DS4_STR("allowed_tools"))) {
        const struct ds4_jt_node *allowed = find(choice, "allowed_tools");
        const struct ds4_jt_node *mode = find(allowed != NULL ? allowed : choice, "mode");
        const struct ds4_jt_node *list = find(allowed != NULL ? allowed : choice, "tools");

        for (const struct ds4_jt_node *t = is_type(list, DS4_JT_ARRAY) ? list->first : NULL;
             t != NULL; t = t->next) {
            const struct ds4_jt_node *inner = find(t, "function");

            name = find(inner != NULL ? inner : t, "name");
            if (name != NULL && (name->type != DS4_JT_STRING || !is_declared(r->out, name->str)))
                return bad(r, INVALID, "must name declared tools", "tool_choice.tools");
        }
        return set_tool_choice(r, is_type(mode, DS4_JT_STRING) ? mode->str : DS4_STR("auto"));
    }
    name = find(find(choice, "function"), "name");
    if (name == NULL)
        name = find(choice, "name");
    if (name == NULL && is_type(type, DS4_JT_STRING))
        return set_tool_choice(r, type->str);
    if (!is_type(name, DS4_JT_STRING) || !is_declared(r->out, name->str))
        return bad(r, INVALID, "must name a declared tool", "tool_choice");
    r->out->tool_choice = DS4_TOOL_CHOICE_NAMED;
    r->out->tool_name = name->str;
    return 0;
}

/* A call cannot be demanded of a model that was shown no tool. */
static int read_tool_choice(struct reader *r, const struct ds4_jt_node *root)
{
    if (read_choice_value(r, root))
        return -1;
    if (r->out->tool_choice == DS4_TOOL_CHOICE_REQUIRED && r->out->n_tool == 0)
        return bad(r, INVALID, "demands a call, but no tool is declared", "tool_choice");
    return 0;
}

/* R9; {type: json_object, schema} is llama-server's way of saying json_schema. */
static int read_response_format(struct reader *r, const struct ds4_jt_node *root)
{
    const struct ds4_jt_node *format = find(root, "response_format");
    const struct ds4_jt_node *type = find(format, "type");
    const struct ds4_jt_node *schema;

    if (format == NULL)
        return 0;
    if (format->type != DS4_JT_OBJECT)
        return bad(r, INVALID, "must be an object", "response_format");
    if (!is_type(type, DS4_JT_STRING))
        return bad(r, INVALID, "must be a string", "response_format.type");
    if (ds4_str_equal(type->str, DS4_STR("text")))
        return 0;
    if (ds4_str_equal(type->str, DS4_STR("json_object"))) {
        schema = find(format, "schema");
    } else if (ds4_str_equal(type->str, DS4_STR("json_schema"))) {
        format = find(format, "json_schema");
        if (!is_type(format, DS4_JT_OBJECT))
            return bad(r, INVALID, "must be an object", "response_format.json_schema");
        schema = find(format, "schema");
    } else {
        return bad(r, INVALID, "must be text, json_object or json_schema", "response_format.type");
    }
    if (schema != NULL && schema->type != DS4_JT_OBJECT)
        return bad(r, INVALID, "must be an object", "response_format.json_schema.schema");
    r->out->answer_schema = schema;
    r->out->answer_json = true;
    return 0;
}

/* ---- vLLM's names for the form of an answer ------------------------------------------------------- */

/* The schema that stands for `path` (static): an object, or a string that holds one. */
static int read_schema(struct reader *r, const struct ds4_jt_node *schema, const char *path)
{
    if (schema->type == DS4_JT_STRING) {
        schema = ds4_jt_parse(schema->str, DS4_JT_MAX_DEPTH, r->arena, r->err);
        if (schema == NULL && r->err != NULL && r->err->code == DS4_E_TOO_LONG)
            return too_long(r);
    }
    if (!is_type(schema, DS4_JT_OBJECT))
        return bad(r, INVALID, "must be a JSON schema: an object, or a string holding one", "%s",
                   path);
    if (r->out->answer_json)
        return bad(r, INVALID, "asks for a form of the answer where another is asked for", "%s",
                   path);
    r->out->answer_schema = schema;
    r->out->answer_json = true;
    r->out->answer_param = path;
    return 0;
}

/* What only a grammar could keep.  The schema's way, to show the model what is asked for and look at the
 * answer, is closed: no encoder has words for a pattern or a choice. */
static int refuse_guide(struct reader *r, const struct ds4_jt_node *obj, const char *key,
                        const char *code, const char *prefix)
{
    return find(obj, key) == NULL ? 0
                                  : bad(r, code, "needs a grammar, which this server does not have",
                                        "%s%s", prefix, key);
}

static int read_guides(struct reader *r, const struct ds4_jt_node *root)
{
    static const char inside[] = "structured_outputs.";
    const struct ds4_jt_node *guided = find(root, "guided_json");
    const struct ds4_jt_node *all = find(root, "structured_outputs");
    const struct ds4_jt_node *json = find(all, "json"), *object = find(all, "json_object");

    if (all != NULL && all->type != DS4_JT_OBJECT)
        return bad(r, INVALID, "must be an object", "structured_outputs");
    if (object != NULL && object->type != DS4_JT_TRUE && object->type != DS4_JT_FALSE)
        return bad(r, INVALID, "must be a boolean", "structured_outputs.json_object");
    if (refuse_guide(r, root, "guided_grammar", UNSUPPORTED, "") ||
        refuse_guide(r, root, "guided_choice", SCHEMA_UNSUPPORTED, "") ||
        refuse_guide(r, root, "guided_regex", SCHEMA_UNSUPPORTED, "") ||
        refuse_guide(r, all, "grammar", UNSUPPORTED, inside) ||
        refuse_guide(r, all, "structural_tag", UNSUPPORTED, inside) ||
        refuse_guide(r, all, "choice", SCHEMA_UNSUPPORTED, inside) ||
        refuse_guide(r, all, "regex", SCHEMA_UNSUPPORTED, inside))
        return -1;
    if (guided != NULL && read_schema(r, guided, "guided_json"))
        return -1;
    if (json != NULL && read_schema(r, json, "structured_outputs.json"))
        return -1;
    if (is_type(object, DS4_JT_TRUE)) {
        if (r->out->answer_json)
            return bad(r, INVALID, "asks for a form of the answer where another is asked for",
                       "structured_outputs.json_object");
        r->out->answer_json = true;
    }
    return 0;
}

/* ---- effort (R13, R14) --------------------------------------------------------------------------- */

/* An effort function filled r->err: put the place in front. */
static int bad_effort(struct reader *r, const char *path)
{
    snprintf(r->param->path, sizeof(r->param->path), "%s", path);
    r->param->code = INVALID;
    return ds4_err_wrap(r->err, "%s", path);
}

static int read_switches(struct reader *r, const struct ds4_jt_node *root)
{
    static const struct {
        const char *parent, *key, *path;
        enum ds4_effort_priority priority;
        bool object_too;
    } switches[] = {
        {"chat_template_kwargs", "thinking", "chat_template_kwargs.thinking", DS4_EFFORT_BY_KWARGS,
         false},
        {"chat_template_kwargs", "enable_thinking", "chat_template_kwargs.enable_thinking",
         DS4_EFFORT_BY_KWARGS, false},
        {NULL, "thinking", "thinking", DS4_EFFORT_BY_THINKING, true},
        {NULL, "think", "think", DS4_EFFORT_BY_THINKING, false},
        {NULL, "enable_thinking", "enable_thinking", DS4_EFFORT_BY_THINKING, false},
        {"reasoning", "enabled", "reasoning.enabled", DS4_EFFORT_BY_EFFORT, false},
    };

    for (size_t s = 0; s < sizeof(switches) / sizeof(switches[0]); s++) {
        const struct ds4_jt_node *parent =
            switches[s].parent == NULL ? root : find(root, switches[s].parent);

        if (ds4_effort_add_thinking(&r->out->wish, switches[s].priority,
                                    find(parent, switches[s].key), switches[s].object_too, r->err))
            return bad_effort(r, switches[s].path);
    }
    return 0;
}

static int read_efforts(struct reader *r, const struct ds4_jt_node *root)
{
    static const struct {
        const char *parent, *key, *path;
        enum ds4_effort_priority priority;
    } efforts[] = {
        {"chat_template_kwargs", "reasoning_effort", "chat_template_kwargs.reasoning_effort",
         DS4_EFFORT_BY_KWARGS},
        {NULL, "reasoning_effort", "reasoning_effort", DS4_EFFORT_BY_EFFORT},
        {"reasoning", "effort", "reasoning.effort", DS4_EFFORT_BY_EFFORT},
        {"output_config", "effort", "output_config.effort", DS4_EFFORT_BY_EFFORT},
    };

    for (size_t e = 0; e < sizeof(efforts) / sizeof(efforts[0]); e++) {
        const struct ds4_jt_node *parent =
            efforts[e].parent == NULL ? root : find(root, efforts[e].parent);

        if (parent != NULL && parent->type != DS4_JT_OBJECT)
            return bad(r, INVALID, "must be an object", "%s", efforts[e].parent);
        if (ds4_effort_add_value(&r->out->wish, efforts[e].priority, find(parent, efforts[e].key),
                                 r->out->chat.release, r->err))
            return bad_effort(r, efforts[e].path);
    }
    return 0;
}

static int read_wish(struct reader *r, const struct ds4_jt_node *root)
{
    const struct ds4_jt_node *model = find(root, "model");

    if (read_efforts(r, root) || read_switches(r, root))
        return -1;
    if (ds4_effort_add_budget(&r->out->wish, find(root, "thinking_token_budget"), r->err))
        return bad_effort(r, "thinking_token_budget");
    if (ds4_effort_add_budget(&r->out->wish, find(find(root, "reasoning"), "max_tokens"), r->err))
        return bad_effort(r, "reasoning.max_tokens");
    if (model != NULL && model->type != DS4_JT_STRING)
        return bad(r, INVALID, "must be a string", "model");
    if (model != NULL)
        ds4_effort_add_model(&r->out->wish, model->str);
    return 0;
}

int ds4_chat_json_read(const struct ds4_jt_node *root, enum ds4_release release,
                       enum ds4_media media, struct ds4_arena *arena, struct ds4_conversation *out,
                       struct ds4_param *param, struct ds4_err *err)
{
    struct reader r = {arena, media, out, param, err};

    *out = (struct ds4_conversation){.chat = {.release = release}};
    *param = (struct ds4_param){.code = INVALID};
    if (root == NULL || root->type != DS4_JT_OBJECT)
        return ds4_fail(err, DS4_E_INVALID, "the request must be an object");
    if (read_messages(&r, root) || read_continue(&r, root) || read_tools(&r, root) ||
        read_tool_choice(&r, root) || read_response_format(&r, root) || read_guides(&r, root))
        return -1;
    return read_wish(&r, root);
}

int ds4_chat_json_read_effort(const struct ds4_jt_node *root, struct ds4_arena *arena,
                              struct ds4_conversation *out, struct ds4_param *param,
                              struct ds4_err *err)
{
    struct reader r = {arena, DS4_MEDIA_REFUSE, out, param, err};

    *param = (struct ds4_param){.code = INVALID};
    return read_wish(&r, root);
}

int ds4_chat_json_read_tool_choice(const struct ds4_jt_node *root, struct ds4_arena *arena,
                                   struct ds4_conversation *out, struct ds4_param *param,
                                   struct ds4_err *err)
{
    struct reader r = {arena, DS4_MEDIA_REFUSE, out, param, err};

    *param = (struct ds4_param){.code = INVALID};
    return read_tool_choice(&r, root);
}

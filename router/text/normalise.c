/* Request normalisation.  Step 2 to 3 of the request path.
 *
 * Kept apart from the encoders because these are our rules, not the checkpoint's: they make every
 * request renderable and keep the prompt's beginning stable from turn to turn (a later system message
 * stays at its place, tools go to the first one, nothing is sorted). */
#include "router/text/normalise.h"

#include "router/text/hygiene.h"
#include "router/text/literals.h"

enum ds4_role ds4_normalise_role(struct ds4_str role)
{
    static const struct {
        struct ds4_str name;
        enum ds4_role role;
    } roles[] = {
        {DS4_STR("system"), DS4_ROLE_SYSTEM},
        {DS4_STR("developer"), DS4_ROLE_SYSTEM},
        {DS4_STR("user"), DS4_ROLE_USER},
        {DS4_STR("assistant"), DS4_ROLE_ASSISTANT},
        {DS4_STR("tool"), DS4_ROLE_TOOL},
        {DS4_STR("function"), DS4_ROLE_TOOL},
        {DS4_STR("latest_reminder"), DS4_ROLE_LATEST_REMINDER},
    };

    for (size_t i = 0; i < sizeof(roles) / sizeof(roles[0]); i++)
        if (ds4_str_equal(role, roles[i].name))
            return roles[i].role;
    return DS4_ROLE_UNKNOWN;
}

void ds4_normalise_append_part(struct ds4_buf *out, size_t i, struct ds4_str text, bool unsupported)
{
    if (i > 0)
        ds4_buf_append_text(out, DS4_LIT_BLOCK_JOIN);
    if (unsupported)
        ds4_buf_append_text(out, DS4_LIT_UNSUPPORTED_OPEN);
    ds4_buf_append_str(out, text);
    if (unsupported)
        ds4_buf_append_byte(out, ']');
}

struct ds4_str ds4_normalise_media_kind(struct ds4_str type)
{
    static const struct ds4_str kinds[] = {DS4_STR("image"), DS4_STR("audio"), DS4_STR("video"),
                                           DS4_STR("document"), DS4_STR("file")};

    for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++)
        if (ds4_str_find(type, kinds[k], 0) != DS4_STR_NONE)
            return kinds[k];
    return DS4_STR("");
}

void ds4_normalise_append_omitted(struct ds4_buf *out, size_t i, struct ds4_str kind)
{
    if (i > 0)
        ds4_buf_append_text(out, DS4_LIT_BLOCK_JOIN);
    ds4_buf_append_byte(out, '[');
    ds4_buf_append_str(out, kind);
    ds4_buf_append_text(out, " omitted]");
}

/* ---- R6 ------------------------------------------------------------------------------------------ */

/* Parses; a text that is no JSON gives *out = NULL, a full arena is an error. */
static int parse(struct ds4_str text, struct ds4_arena *arena, const struct ds4_jt_node **out,
                 struct ds4_err *err)
{
    struct ds4_err why = {0};

    *out = ds4_jt_parse(text, DS4_JT_MAX_DEPTH, arena, &why);
    if (*out == NULL && why.code != DS4_E_INVALID)
        return ds4_fail(err, why.code, "%s", why.msg);
    return 0;
}

/* The object that a text holds, at most one level of string encoding deep; NULL if it holds none. */
static int find_object(struct ds4_str text, struct ds4_arena *arena, const struct ds4_jt_node **out,
                       struct ds4_err *err)
{
    if (parse(text, arena, out, err))
        return -1;
    if (*out != NULL && (*out)->type == DS4_JT_STRING && parse((*out)->str, arena, out, err))
        return -1;
    if (*out != NULL && (*out)->type != DS4_JT_OBJECT)
        *out = NULL;
    return 0;
}

int ds4_normalise_arguments(const struct ds4_jt_node *value, struct ds4_arena *arena,
                            struct ds4_call *call, struct ds4_normalise_counts *counts,
                            struct ds4_err *err)
{
    struct ds4_str text = DS4_STR("{}");

    call->kind = DS4_ARGUMENTS_MEMBERS;
    if (value != NULL && value->type == DS4_JT_OBJECT) {
        call->node = value;
        return 0;
    }
    if (value != NULL && value->type != DS4_JT_NULL) {
        text = value->type == DS4_JT_STRING ? value->str : value->raw;
        if (ds4_str_trim(text).len == 0)
            text = DS4_STR("{}");
    }
    if (find_object(text, arena, &call->node, err))
        return -1;
    if (call->node == NULL) {
        call->kind = DS4_ARGUMENTS_RAW;
        call->raw = text;
        counts->bad_arguments++;
    }
    return 0;
}

/* ---- the list ------------------------------------------------------------------------------------ */

static int clean_history(struct ds4_conversation *conversation, struct ds4_arena *arena,
                         struct ds4_err *err)
{
    struct ds4_chat *chat = &conversation->chat;

    for (size_t i = 0; i < chat->n_message; i++) {
        struct ds4_message *message = &chat->messages[i];

        if (message->role != DS4_ROLE_ASSISTANT)
            continue;
        if (ds4_hygiene_split_think(message, arena, &conversation->counts.split_think, err) ||
            ds4_hygiene_lift_calls(message, arena, &conversation->counts.lifted_calls, err))
            return -1;
    }
    return 0;
}

/* R7: the V4 encoders would print a later system message without any marker. */
static void move_late_systems(struct ds4_chat *chat)
{
    if (chat->release == DS4_RELEASE_V41)
        return;
    for (size_t i = 1; i < chat->n_message; i++)
        if (chat->messages[i].role == DS4_ROLE_SYSTEM)
            chat->messages[i].role = DS4_ROLE_USER;
}

/* R8, R9: tools and answer schema belong to a system message at the front. */
static int attach_to_system(struct ds4_conversation *conversation, struct ds4_arena *arena,
                            struct ds4_err *err)
{
    struct ds4_chat *chat = &conversation->chat;

    if (conversation->n_tool == 0 && conversation->answer_schema == NULL)
        return 0;
    if (chat->messages[0].role != DS4_ROLE_SYSTEM) {
        struct ds4_message *longer =
            ds4_arena_take_array(arena, chat->n_message + 1, sizeof(*longer));

        if (longer == NULL)
            return ds4_fail(err, DS4_E_TOO_LONG, "the conversation is too long");
        longer[0] = (struct ds4_message){.role = DS4_ROLE_SYSTEM, .content = DS4_STR("")};
        memcpy(longer + 1, chat->messages, chat->n_message * sizeof(*longer));
        chat->messages = longer;
        chat->n_message++;
    }
    chat->messages[0].tools = conversation->tools;
    chat->messages[0].n_tool = conversation->n_tool;
    chat->messages[0].response_format = conversation->answer_schema;
    return 0;
}

/* R11, R12: how the prompt ends. */
static void set_end(struct ds4_conversation *conversation)
{
    struct ds4_chat *chat = &conversation->chat;
    struct ds4_message *last = &chat->messages[chat->n_message - 1];

    chat->no_turn = conversation->no_turn;
    if (last->role == DS4_ROLE_ASSISTANT && conversation->continue_last) {
        last->wo_eos = true;
        last->open_reasoning = chat->thinking && last->reasoning.len > 0 &&
                               last->content.len == 0 && last->n_call == 0;
    } else {
        /* a later system message of V4.1 opens a turn by itself */
        chat->new_turn = last->role == DS4_ROLE_ASSISTANT ||
                         (last->role == DS4_ROLE_SYSTEM && chat->n_message == 1);
    }
}

int ds4_normalise(struct ds4_conversation *conversation, const struct ds4_effort *effort,
                  struct ds4_arena *arena, struct ds4_err *err)
{
    struct ds4_chat *chat = &conversation->chat;

    if (chat->n_message == 0)
        return ds4_fail(err, DS4_E_INVALID, "messages must not be empty");
    chat->thinking = effort->thinking;
    chat->effort = effort->level;
    chat->effort_budget = effort->budget;
    if (clean_history(conversation, arena, err))
        return -1;
    move_late_systems(chat);
    if (attach_to_system(conversation, arena, err))
        return -1;
    set_end(conversation);
    return 0;
}

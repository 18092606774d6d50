/* What the prompt encoders share.  Step 3 of the request path: messages -> prompt.
 *
 * The reference works in passes over the list, and so do we, in its order:
 *   P1 merge    tool results and user texts that follow each other become one user turn of blocks
 *   P2 order    results inside a turn follow the order of the calls they answer
 *   P3 drop?    old reasoning is dropped unless some message declares tools
 *   P4 drop     before the last boundary only user-like messages and bare assistants stay
 * then each message is its prefix, its body and perhaps the header of the next turn.  Mind the two
 * comparisons with the boundary L: an assistant keeps its reasoning if i > L, a header opens thinking if
 * i >= L.  Context and messages are merged apart: what was sent cannot grow. */
#include "router/text/template.h"

#include "router/text/literals.h"
#include "router/text/vocab.h"

#include <stdlib.h>

#define NO_BOUNDARY ((size_t)-1)

/* One render: the chat, what P3 and P4 decided, and where text goes. */
struct render {
    const struct ds4_encoder *encoder;
    struct ds4_chat *chat;
    struct ds4_prompt *prompt;
    bool drop;       /* P3 */
    size_t boundary; /* L, NO_BOUNDARY if none */
};

static void special(struct ds4_prompt *prompt, enum ds4_special which)
{
    ds4_prompt_literal(prompt, ds4_special_text(which));
}

enum ds4_release ds4_release_parse(struct ds4_str text)
{
    if (ds4_str_equal(text, DS4_STR("v4_preview")))
        return DS4_RELEASE_V4_PREVIEW;
    if (ds4_str_equal(text, DS4_STR("v4_0731")) || ds4_str_equal(text, DS4_STR("v4")))
        return DS4_RELEASE_V4_0731;
    return ds4_str_equal(text, DS4_STR("v41")) ? DS4_RELEASE_V41 : DS4_RELEASE_UNSET;
}

/* ---- P1 ------------------------------------------------------------------------------------------ */

/* Merges messages [from, to) in place at *n_out.  Blocks are taken from `pool`, in order, so the
 * blocks of one turn are neighbours. */
static void merge_range(const struct render *r, size_t from, size_t to, struct ds4_block *pool,
                        size_t *n_pool, size_t *n_out)
{
    struct ds4_message *list = r->chat->messages;
    size_t first_out = *n_out;

    for (size_t i = from; i < to; i++) {
        struct ds4_message message = list[i];
        bool is_tool = message.role == DS4_ROLE_TOOL;
        struct ds4_message *last = *n_out > first_out ? &list[*n_out - 1] : NULL;

        if (!is_tool && message.role != DS4_ROLE_USER) {
            list[(*n_out)++] = message;
            continue;
        }
        pool[*n_pool] = (struct ds4_block){message.content, message.tool_call_id, is_tool};
        if (last != NULL && last->n_block > 0 && (is_tool || last->task.ptr == NULL)) {
            last->n_block++;
        } else {
            struct ds4_message turn = {.role = DS4_ROLE_USER};

            if (!is_tool) {
                turn = message;
                if (!r->encoder->user_keeps_fields)
                    turn.n_tool = 0;
            }
            turn.blocks = &pool[*n_pool];
            turn.n_block = 1;
            list[(*n_out)++] = turn;
        }
        (*n_pool)++;
    }
}

static int merge(struct render *r, struct ds4_arena *arena, struct ds4_err *err)
{
    struct ds4_chat *chat = r->chat;
    struct ds4_block *pool =
        ds4_arena_take_array(arena, chat->n_message + 1, sizeof(struct ds4_block));
    size_t n_pool = 0, n_out = 0, n_context;

    if (pool == NULL)
        return ds4_fail(err, DS4_E_TOO_LONG, "%zu messages are too many", chat->n_message);
    merge_range(r, 0, chat->n_context, pool, &n_pool, &n_out);
    n_context = n_out;
    merge_range(r, chat->n_context, chat->n_message, pool, &n_pool, &n_out);
    chat->n_context = n_context;
    chat->n_message = n_out;
    return 0;
}

/* ---- P2 ------------------------------------------------------------------------------------------ */

/* A call's id and its place in the turn. */
struct place {
    struct ds4_str id;
    size_t position;
};

/* A result, where it should stand and where it stood (to keep equal ones in order). */
struct placed {
    struct ds4_block block;
    size_t position;
    size_t slot;
};

static int compare_str(struct ds4_str a, struct ds4_str b)
{
    size_t n = a.len < b.len ? a.len : b.len;
    int order = n == 0 ? 0 : memcmp(a.ptr, b.ptr, n);

    return order != 0 ? order : (a.len > b.len) - (a.len < b.len);
}

/* By id; the later of two calls with one id first, because it is the one that counts. */
static int compare_places(const void *a, const void *b)
{
    const struct place *x = a, *y = b;
    int order = compare_str(x->id, y->id);

    return order != 0 ? order : (x->position < y->position) - (x->position > y->position);
}

static int compare_placed(const void *a, const void *b)
{
    const struct placed *x = a, *y = b;

    if (x->position != y->position)
        return x->position < y->position ? -1 : 1;
    return (x->slot > y->slot) - (x->slot < y->slot);
}

/* The place of the call with this id; an unknown id counts as the first call. */
static size_t find_place(const struct place *places, size_t n, struct ds4_str id)
{
    size_t from = 0, to = n;

    while (from < to) {
        size_t mid = from + (to - from) / 2;

        if (compare_str(places[mid].id, id) < 0)
            from = mid + 1;
        else
            to = mid;
    }
    return from < n && ds4_str_equal(places[from].id, id) ? places[from].position : 0;
}

/* Sorts the results of a turn over the slots that results occupy; texts stay where they are. */
static int order_results(struct ds4_message *turn, const struct ds4_message *caller,
                         struct ds4_arena *arena, struct ds4_err *err)
{
    struct place *places = ds4_arena_take_array(arena, caller->n_call, sizeof(*places));
    struct placed *results = ds4_arena_take_array(arena, turn->n_block, sizeof(*results));
    size_t n_place = 0, n_result = 0;

    if (places == NULL || results == NULL)
        return ds4_fail(err, DS4_E_TOO_LONG, "%zu tool results are too many", turn->n_block);
    for (size_t c = 0; c < caller->n_call; c++)
        if (caller->calls[c].id.len > 0)
            places[n_place++] = (struct place){caller->calls[c].id, c};
    if (n_place == 0)
        return 0;
    qsort(places, n_place, sizeof(*places), compare_places);
    for (size_t b = 0; b < turn->n_block; b++)
        if (turn->blocks[b].is_result)
            results[n_result++] = (struct placed){
                turn->blocks[b], find_place(places, n_place, turn->blocks[b].id), b};
    qsort(results, n_result, sizeof(*results), compare_placed);
    for (size_t b = 0, next = 0; b < turn->n_block; b++)
        if (turn->blocks[b].is_result)
            turn->blocks[b] = results[next++].block;
    return 0;
}

static int order_all_results(struct ds4_chat *chat, struct ds4_arena *arena, struct ds4_err *err)
{
    const struct ds4_message *caller = NULL;

    for (size_t i = 0; i < chat->n_message; i++) {
        struct ds4_message *message = &chat->messages[i];

        if (message->role == DS4_ROLE_ASSISTANT && message->n_call > 0)
            caller = message;
        else if (message->n_block > 1 && caller != NULL &&
                 order_results(message, caller, arena, err))
            return -1;
    }
    return 0;
}

/* ---- P3, P4 -------------------------------------------------------------------------------------- */

static bool any_tools(const struct ds4_chat *chat)
{
    for (size_t i = 0; i < chat->n_message; i++)
        if (chat->messages[i].n_tool > 0)
            return true;
    return false;
}

static size_t last_boundary(const struct render *r)
{
    for (size_t i = r->chat->n_message; i > 0; i--)
        if (r->encoder->is_boundary(r->chat, i - 1))
            return i - 1;
    return NO_BOUNDARY;
}

static void drop_history(struct render *r)
{
    struct ds4_chat *chat = r->chat;
    size_t last = last_boundary(r);
    size_t n_out = 0, n_context = 0;

    for (size_t i = 0; i < chat->n_message && last != NO_BOUNDARY; i++) {
        struct ds4_message message = chat->messages[i];

        if (i < last && (message.role == DS4_ROLE_DEVELOPER || message.role == DS4_ROLE_UNKNOWN))
            continue;
        if (i < last && message.role == DS4_ROLE_ASSISTANT)
            message.reasoning.len = 0;
        n_context += i < chat->n_context;
        chat->messages[n_out++] = message;
    }
    if (last != NO_BOUNDARY) {
        chat->n_message = n_out;
        chat->n_context = n_context;
    }
    r->boundary = last_boundary(r);
}

/* ---- bodies -------------------------------------------------------------------------------------- */

void ds4_template_system_body(const struct ds4_encoder *encoder, const struct ds4_message *message,
                              struct ds4_prompt *prompt)
{
    ds4_prompt_content(prompt, message->content);
    if (message->n_tool > 0) {
        ds4_prompt_literal(prompt, DS4_STR(DS4_LIT_TOOLS_JOIN));
        ds4_prompt_literal(prompt, encoder->tools_before);
        for (size_t t = 0; t < message->n_tool; t++) {
            if (t > 0)
                ds4_prompt_literal(prompt, DS4_STR(DS4_LIT_SCHEMA_JOIN));
            ds4_prompt_json(prompt, message->tools[t]);
        }
        ds4_prompt_literal(prompt, DS4_STR(DS4_LIT_TOOLS_AFTER));
    }
    if (message->response_format != NULL) {
        ds4_prompt_literal(prompt, DS4_STR(DS4_LIT_RESPONSE_FORMAT));
        ds4_prompt_json(prompt, message->response_format);
    }
}

static void render_user(const struct ds4_message *message, struct ds4_prompt *prompt)
{
    special(prompt, DS4_SPECIAL_USER);
    for (size_t b = 0; b < message->n_block; b++) {
        const struct ds4_block *block = &message->blocks[b];

        if (b > 0)
            ds4_prompt_literal(prompt, DS4_STR(DS4_LIT_BLOCK_JOIN));
        if (block->is_result)
            ds4_prompt_literal(prompt, DS4_STR(DS4_LIT_RESULT_OPEN));
        ds4_prompt_content(prompt, block->text);
        if (block->is_result)
            ds4_prompt_literal(prompt, DS4_STR(DS4_LIT_RESULT_CLOSE));
    }
}

/* A string value.  The reference writes it raw, so a closing tag inside breaks the markup; the setting
 * escape_param_close trades that exactness for safety. */
static void render_value(const struct render *r, struct ds4_str text)
{
    struct ds4_str close = r->encoder->param_close;

    while (r->chat->escape_param_close) {
        size_t hit = ds4_str_find(text, close, 0);

        if (hit == DS4_STR_NONE)
            break;
        ds4_prompt_content(r->prompt, ds4_str_head(text, hit));
        ds4_prompt_content(r->prompt, DS4_STR("&lt;"));
        ds4_prompt_content(r->prompt, ds4_str_skip(close, 1));
        text = ds4_str_skip(text, hit + close.len);
    }
    ds4_prompt_content(r->prompt, text);
}

static void param_head(const struct render *r, struct ds4_str name, bool is_string)
{
    ds4_prompt_literal(r->prompt, r->encoder->param_open);
    ds4_prompt_content(r->prompt, name);
    ds4_prompt_literal(r->prompt, DS4_STR(DS4_LIT_PARAM_KIND));
    ds4_prompt_literal(r->prompt, is_string ? DS4_STR("true") : DS4_STR("false"));
    ds4_prompt_literal(r->prompt, DS4_STR(DS4_LIT_PARAM_OPEN_END));
}

static void render_param(const struct render *r, struct ds4_str name,
                         const struct ds4_jt_node *value)
{
    bool is_string = value->type == DS4_JT_STRING;

    param_head(r, name, is_string);
    if (is_string)
        render_value(r, value->str);
    else
        ds4_prompt_json(r->prompt, value);
    ds4_prompt_literal(r->prompt, r->encoder->param_close);
}

static void render_call(const struct render *r, const struct ds4_call *call)
{
    bool first = true;

    ds4_prompt_literal(r->prompt, r->encoder->invoke_open);
    ds4_prompt_content(r->prompt, call->name);
    ds4_prompt_literal(r->prompt, DS4_STR(DS4_LIT_INVOKE_OPEN_END));
    if (call->kind == DS4_ARGUMENTS_RAW) {
        param_head(r, DS4_STR("arguments"), true);
        render_value(r, call->raw);
        ds4_prompt_literal(r->prompt, r->encoder->param_close);
    } else if (call->kind == DS4_ARGUMENTS_VALUE) {
        render_param(r, DS4_STR("arguments"), call->node);
    } else {
        for (const struct ds4_jt_node *m = call->node->first; m != NULL; m = m->next) {
            if (m->counts == NULL)
                continue;
            if (!first)
                ds4_prompt_literal(r->prompt, DS4_STR(DS4_LIT_PARAM_JOIN));
            render_param(r, m->key, m->counts);
            first = false;
        }
    }
    ds4_prompt_literal(r->prompt, r->encoder->invoke_close);
}

/* An old turn without any reasoning whose empty think block is left out (setting empty_think). */
static bool is_closed_turn(const struct render *r, size_t i)
{
    return r->chat->empty_think_closed && i < r->chat->n_message &&
           r->chat->messages[i].role == DS4_ROLE_ASSISTANT &&
           r->chat->messages[i].reasoning.len == 0 && !r->chat->messages[i].wo_eos;
}

static void render_assistant(const struct render *r, size_t i)
{
    const struct ds4_message *message = &r->chat->messages[i];
    bool after_task = i > 0 && r->chat->messages[i - 1].task.ptr != NULL;
    bool in_history = r->drop && r->boundary != NO_BOUNDARY && i <= r->boundary;

    bool thinks = r->chat->thinking && !after_task && !in_history && !is_closed_turn(r, i);

    if (message->exact != NULL && message->exact->text.len > 0 && !after_task &&
        message->exact->in_reasoning == thinks && !message->wo_eos) {
        ds4_prompt_exact(r->prompt, message->exact->text, message->exact->id, message->exact->n_id);
        special(r->prompt, DS4_SPECIAL_EOS);
        return;
    }
    if (thinks) {
        ds4_prompt_content(r->prompt, message->reasoning);
        if (message->open_reasoning) {
            r->prompt->in_reasoning = true;
            return;
        }
        special(r->prompt, DS4_SPECIAL_THINK_CLOSE);
    }
    ds4_prompt_content(r->prompt, message->content);
    if (message->n_call > 0) {
        ds4_prompt_literal(r->prompt, r->encoder->calls_open);
        for (size_t c = 0; c < message->n_call; c++) {
            if (c > 0)
                ds4_prompt_literal(r->prompt, DS4_STR(DS4_LIT_INVOKE_JOIN));
            render_call(r, &message->calls[c]);
        }
        ds4_prompt_literal(r->prompt, r->encoder->calls_close);
    }
    if (!message->wo_eos)
        special(r->prompt, DS4_SPECIAL_EOS);
    else
        r->prompt->in_reasoning = false;
}

static int render_body(const struct render *r, size_t i, struct ds4_err *err)
{
    const struct ds4_message *message = &r->chat->messages[i];

    switch (message->role) {
    case DS4_ROLE_SYSTEM:
        ds4_template_system_body(r->encoder, message, r->prompt);
        return 0;
    case DS4_ROLE_DEVELOPER:
        return r->encoder->render_developer(r->chat, i, r->prompt, err);
    case DS4_ROLE_USER:
        render_user(message, r->prompt);
        return 0;
    case DS4_ROLE_LATEST_REMINDER:
        special(r->prompt, DS4_SPECIAL_LATEST_REMINDER);
        ds4_prompt_content(r->prompt, message->content);
        return 0;
    case DS4_ROLE_ASSISTANT:
        render_assistant(r, i);
        return 0;
    default:
        return ds4_fail(err, DS4_E_INVALID, "role \"%.*s\" cannot be rendered",
                        DS4_STR_ARG(message->role_text));
    }
}

/* ---- headers ------------------------------------------------------------------------------------- */

/* <｜Assistant｜> and the think tag; the state the next turn starts in. */
static void open_turn(const struct render *r, bool think)
{
    special(r->prompt, DS4_SPECIAL_ASSISTANT);
    special(r->prompt, think ? DS4_SPECIAL_THINK_OPEN : DS4_SPECIAL_THINK_CLOSE);
    r->prompt->in_reasoning = think;
}

static int render_task(const struct render *r, struct ds4_str task, struct ds4_err *err)
{
    static const struct {
        struct ds4_str name, token;
    } tasks[] = {
        {DS4_STR("query"), DS4_STR(DS4_LIT_TASK_QUERY)},
        {DS4_STR("authority"), DS4_STR(DS4_LIT_TASK_AUTHORITY)},
        {DS4_STR("domain"), DS4_STR(DS4_LIT_TASK_DOMAIN)},
        {DS4_STR("title"), DS4_STR(DS4_LIT_TASK_TITLE)},
        {DS4_STR("read_url"), DS4_STR(DS4_LIT_TASK_READ_URL)},
    };

    if (ds4_str_equal(task, DS4_STR("action"))) {
        open_turn(r, r->chat->thinking);
        ds4_prompt_literal(r->prompt, DS4_STR(DS4_LIT_TASK_ACTION));
        return 0;
    }
    for (size_t t = 0; t < sizeof(tasks) / sizeof(tasks[0]); t++) {
        if (ds4_str_equal(task, tasks[t].name)) {
            ds4_prompt_literal(r->prompt, tasks[t].token);
            return 0;
        }
    }
    return ds4_fail(err, DS4_E_INVALID, "task \"%.*s\" is unknown", DS4_STR_ARG(task));
}

/* Whether message i calls for an assistant's turn: users, developers, and what else is a boundary. */
static bool calls_for_answer(const struct render *r, size_t i)
{
    enum ds4_role role = r->chat->messages[i].role;

    return role == DS4_ROLE_USER || r->encoder->is_boundary(r->chat, i);
}

static int render_transition(const struct render *r, size_t i, struct ds4_err *err)
{
    const struct ds4_chat *chat = r->chat;

    if (i + 1 < chat->n_message && chat->messages[i + 1].role != DS4_ROLE_ASSISTANT &&
        chat->messages[i + 1].role != DS4_ROLE_LATEST_REMINDER)
        return 0;
    if (chat->messages[i].task.ptr != NULL)
        return render_task(r, chat->messages[i].task, err);
    if (calls_for_answer(r, i) && !(chat->no_turn && i + 1 == chat->n_message)) {
        bool current = !r->drop || r->boundary == NO_BOUNDARY || i >= r->boundary;

        open_turn(r, chat->thinking && current && !is_closed_turn(r, i + 1));
    }
    return 0;
}

int ds4_template_render(struct ds4_chat *chat, struct ds4_arena *arena, struct ds4_prompt *prompt,
                        struct ds4_err *err)
{
    struct render r = {
        .encoder = chat->release == DS4_RELEASE_V41 ? &ds4_encoder_v41 : &ds4_encoder_v4,
        .chat = chat,
        .prompt = prompt,
        .boundary = NO_BOUNDARY,
    };

    if (r.encoder->check_effort(chat, err) || merge(&r, arena, err) ||
        order_all_results(chat, arena, err))
        return -1;
    r.drop = !chat->keep_reasoning && !any_tools(chat);
    r.boundary = last_boundary(&r);
    if (!chat->no_bos && chat->n_context == 0)
        special(prompt, DS4_SPECIAL_BOS);
    if (chat->thinking && r.drop)
        drop_history(&r);
    for (size_t i = chat->n_context; i < chat->n_message; i++) {
        r.encoder->render_prefix(chat, i, prompt);
        if (render_body(&r, i, err))
            return -1;
        if (i == 0 && chat->messages[0].role == DS4_ROLE_SYSTEM)
            prompt->stable_bytes = prompt->text.len;
        if (render_transition(&r, i, err))
            return -1;
    }
    if (chat->new_turn && !chat->no_turn)
        open_turn(&r, chat->thinking);
    return ds4_prompt_check(prompt, err);
}

void ds4_template_call_opener(enum ds4_release release, struct ds4_str name,
                              struct ds4_prompt *prompt)
{
    const struct ds4_encoder *encoder =
        release == DS4_RELEASE_V41 ? &ds4_encoder_v41 : &ds4_encoder_v4;

    ds4_prompt_literal(prompt, encoder->calls_open);
    ds4_prompt_literal(prompt, encoder->invoke_open);
    if (name.len == 0)
        return;
    ds4_prompt_content(prompt, name);
    ds4_prompt_literal(prompt, DS4_STR(DS4_LIT_INVOKE_OPEN_END));
}

/* The tool memory (steps 2 and 15): turns as sampled, by the id of their first call.
 *
 * A turn is one text of the LRU store: a head of lengths, then the ids, then the texts, so that bounds
 * and eviction need no second bookkeeping.  The head is read back with memcpy and only this file writes
 * it.  Only the first call's id is a key: a turn whose first call is gone has been edited anyway. */
#include "router/tool_memory.h"

#include "router/api/text_store.h"

#include <stdlib.h>
#include <string.h>

#define DS4_TURN_BYTES (DS4_TOOL_MEMORY_BYTES / 4)
#define DS4_TURN_CALLS 4096

struct ds4_tool_memory {
    struct ds4_text_store *store;
};

/* How a turn lies in the store: head, ids, then the lengths and texts of reasoning, content, the exact
 * text, and of id, name, arguments of each call. */
struct head {
    uint32_t n_id;
    uint32_t n_call;
    uint32_t in_reasoning;
};

struct ds4_tool_memory *ds4_tool_memory_new(size_t max_turns, size_t max_bytes, struct ds4_err *err)
{
    struct ds4_tool_memory *memory = calloc(1, sizeof(*memory));

    if (memory == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for the tool memory");
        return NULL;
    }
    memory->store = ds4_text_store_new(max_turns, max_bytes, 0, err);
    if (memory->store == NULL) {
        free(memory);
        return NULL;
    }
    return memory;
}

void ds4_tool_memory_free(struct ds4_tool_memory *memory)
{
    if (memory == NULL)
        return;
    ds4_text_store_free(memory->store);
    free(memory);
}

size_t ds4_tool_memory_count(const struct ds4_tool_memory *memory)
{
    return ds4_text_store_count(memory->store);
}

size_t ds4_tool_memory_bytes(const struct ds4_tool_memory *memory)
{
    return ds4_text_store_bytes(memory->store);
}

/* ---- writing and reading a turn -------------------------------------------------------------------- */

static void put_text(struct ds4_buf *out, struct ds4_str text)
{
    uint64_t len = text.len;

    (void)ds4_buf_append(out, (const char *)&len, sizeof(len));
    (void)ds4_buf_append_str(out, text);
}

static struct ds4_str take_text(struct ds4_str *in)
{
    uint64_t len;
    struct ds4_str text;

    memcpy(&len, in->ptr, sizeof(len));
    *in = ds4_str_skip(*in, sizeof(len));
    text = ds4_str_head(*in, (size_t)len);
    *in = ds4_str_skip(*in, (size_t)len);
    return text;
}

void ds4_tool_memory_put(struct ds4_tool_memory *memory, const struct ds4_tool_turn *turn,
                         int64_t now_ns)
{
    struct head head = {
        .n_id = (uint32_t)turn->exact.n_id,
        .n_call = (uint32_t)turn->n_call,
        .in_reasoning = turn->exact.in_reasoning,
    };
    struct ds4_buf out;

    if (turn->n_call == 0 || turn->n_call > DS4_TURN_CALLS)
        return;
    ds4_buf_init(&out, DS4_TURN_BYTES);
    (void)ds4_buf_append(&out, (const char *)&head, sizeof(head));
    (void)ds4_buf_append(&out, (const char *)turn->exact.id,
                         (size_t)turn->exact.n_id * sizeof(*turn->exact.id));
    put_text(&out, turn->reasoning);
    put_text(&out, turn->content);
    put_text(&out, turn->exact.text);
    for (size_t c = 0; c < turn->n_call; c++) {
        put_text(&out, turn->calls[c].id);
        put_text(&out, turn->calls[c].name);
        put_text(&out, turn->calls[c].arguments);
    }
    if (!out.failed)
        (void)ds4_text_store_put(memory->store, turn->calls[0].id, ds4_buf_view(&out), now_ns);
    ds4_buf_deinit(&out);
}

static int read_turn(struct ds4_str in, struct ds4_arena *arena, struct ds4_tool_turn *turn,
                     struct ds4_err *err)
{
    struct ds4_tool_call *calls;
    struct head head;
    int32_t *ids;

    memcpy(&head, in.ptr, sizeof(head));
    in = ds4_str_skip(in, sizeof(head));
    ids = ds4_arena_take_array(arena, head.n_id, sizeof(*ids));
    calls = ds4_arena_take_array(arena, head.n_call, sizeof(*calls));
    if (ids == NULL || calls == NULL)
        return ds4_fail(err, DS4_E_TOO_LONG, "the conversation is too long");
    memcpy(ids, in.ptr, head.n_id * sizeof(*ids));
    in = ds4_str_skip(in, head.n_id * sizeof(*ids));
    turn->exact = (struct ds4_exact_turn){
        .id = ids, .n_id = (int32_t)head.n_id, .in_reasoning = head.in_reasoning != 0};
    turn->reasoning = take_text(&in);
    turn->content = take_text(&in);
    turn->exact.text = take_text(&in);
    for (size_t c = 0; c < head.n_call; c++) {
        calls[c].id = take_text(&in);
        calls[c].name = take_text(&in);
        calls[c].arguments = take_text(&in);
    }
    turn->calls = calls;
    turn->n_call = head.n_call;
    return 0;
}

/* ---- is it the same turn? ---------------------------------------------------------------------------- */

static bool same_call(const struct ds4_call *call, const struct ds4_tool_call *known,
                      struct ds4_arena *arena)
{
    const struct ds4_jt_node *arguments;

    if (!ds4_str_equal(call->id, known->id) || !ds4_str_equal(call->name, known->name))
        return false;
    if (call->kind == DS4_ARGUMENTS_RAW)
        return ds4_str_equal(call->raw, known->arguments);
    arguments = ds4_jt_parse(known->arguments, DS4_JT_MAX_DEPTH, arena, NULL);
    return arguments != NULL && ds4_jt_same(call->node, arguments);
}

/* Blanks at the ends of a text are lost on the way through some clients. */
static bool same_text(struct ds4_str a, struct ds4_str b)
{
    return ds4_str_equal(ds4_str_trim(a), ds4_str_trim(b));
}

static bool same_turn(const struct ds4_message *message, const struct ds4_tool_turn *turn,
                      struct ds4_arena *arena)
{
    if (message->n_call != turn->n_call || !same_text(message->content, turn->content) ||
        (message->reasoning.len > 0 && !same_text(message->reasoning, turn->reasoning)))
        return false;
    for (size_t c = 0; c < turn->n_call; c++)
        if (!same_call(&message->calls[c], &turn->calls[c], arena))
            return false;
    return true;
}

const char *ds4_replay_text(enum ds4_replay replay)
{
    static const char *const text[] = {"exact", "canonical", "edited", "missing"};

    return text[replay];
}

int ds4_tool_memory_restore(struct ds4_tool_memory *memory, struct ds4_message *message,
                            struct ds4_arena *arena, int64_t now_ns, enum ds4_replay *replay,
                            struct ds4_err *err)
{
    struct ds4_tool_turn turn;
    struct ds4_exact_turn *exact;
    struct ds4_str stored = {NULL, 0};

    *replay = DS4_REPLAY_MISSING;
    if (message->n_call > 0 && message->calls[0].id.len > 0)
        stored = ds4_text_store_get(memory->store, message->calls[0].id, now_ns);
    if (stored.ptr == NULL)
        return 0;
    stored = ds4_arena_copy(arena, stored);
    exact = ds4_arena_take(arena, sizeof(*exact));
    if (stored.ptr == NULL || exact == NULL)
        return ds4_fail(err, DS4_E_TOO_LONG, "the conversation is too long");
    if (read_turn(stored, arena, &turn, err) != 0)
        return -1;
    *replay = same_turn(message, &turn, arena) ? DS4_REPLAY_CANONICAL : DS4_REPLAY_EDITED;
    if (message->reasoning.len == 0)
        message->reasoning = turn.reasoning;
    if (*replay == DS4_REPLAY_EDITED || turn.exact.n_id == 0)
        return 0;
    *replay = DS4_REPLAY_EXACT;
    *exact = turn.exact;
    message->exact = exact;
    return 0;
}

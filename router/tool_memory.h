/* The tool memory: assistant turns that called tools, as they were sampled.
 *
 * Clients send a turn back without its reasoning, or with its arguments written anew; rendered from
 * that, the next prompt would differ from the cached tokens in the middle of the conversation, and the
 * model would see old turns that did not think.  A turn is remembered under the id of its first call.
 * When it comes back saying the same thing, its very tokens are put into the prompt.
 *
 * Bounded by turns and bytes, least recently used goes first.  Pure; loop thread only. */
#ifndef DS4_ROUTER_TOOL_MEMORY_H
#define DS4_ROUTER_TOOL_MEMORY_H

#include "common/arena.h"
#include "common/err.h"
#include "common/str.h"
#include "router/text/template.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DS4_TOOL_MEMORY_TURNS 4096
#define DS4_TOOL_MEMORY_BYTES ((size_t)64 << 20)

struct ds4_tool_memory;

struct ds4_tool_memory *ds4_tool_memory_new(size_t max_turns, size_t max_bytes,
                                            struct ds4_err *err) DS4_MUST_CHECK;
void ds4_tool_memory_free(struct ds4_tool_memory *memory);

struct ds4_tool_call {
    struct ds4_str id;
    struct ds4_str name;
    struct ds4_str arguments; /* the JSON that the client got */
};

struct ds4_tool_turn {
    struct ds4_str reasoning;
    struct ds4_str content;
    const struct ds4_tool_call *calls; /* at least one */
    size_t n_call;
    struct ds4_exact_turn exact; /* n_id 0: only the texts are known */
};

/* Copies the turn.  One that alone passes the bounds is not kept. */
void ds4_tool_memory_put(struct ds4_tool_memory *memory, const struct ds4_tool_turn *turn,
                         int64_t now_ns);

/* How an assistant turn of the history was restored. */
enum ds4_replay {
    DS4_REPLAY_EXACT,     /* known and unchanged: message->exact is set */
    DS4_REPLAY_CANONICAL, /* known and unchanged, but its tokens are not */
    DS4_REPLAY_EDITED,    /* known, but the client changed names, arguments, content or reasoning */
    DS4_REPLAY_MISSING,   /* not known */
};
/* "exact" | "canonical" | "edited" | "missing" */
const char *ds4_replay_text(enum ds4_replay replay);

/* Restores an assistant message with calls: reasoning where the client left it out, and the tokens if
 * nothing else was changed.  Arguments are compared as JSON values.  What is set lives in the arena.
 * -1 with DS4_E_TOO_LONG when that is full. */
int ds4_tool_memory_restore(struct ds4_tool_memory *memory, struct ds4_message *message,
                            struct ds4_arena *arena, int64_t now_ns, enum ds4_replay *replay,
                            struct ds4_err *err) DS4_MUST_CHECK;

size_t ds4_tool_memory_count(const struct ds4_tool_memory *memory);
size_t ds4_tool_memory_bytes(const struct ds4_tool_memory *memory);

#endif

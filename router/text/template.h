/* Messages -> prompt, as the checkpoints' own encoders do it.
 *
 * Two levels meet here.  A *chat* is what an encoder is given: a list of messages with their attributes.
 * Requests become chats by the rules of normalise.h; the encoders below follow the reference exactly
 * and trim, repair or invent nothing.  What the reference refuses, they refuse (DS4_E_INVALID).
 *
 * All strings are borrowed views (usually into the request and its arena); nodes are JSON text read
 * with common/json_text.h, so numbers and key order reach the prompt as they were written. */
#ifndef DS4_ROUTER_TEXT_TEMPLATE_H
#define DS4_ROUTER_TEXT_TEMPLATE_H

#include "common/arena.h"
#include "common/choices.h"
#include "common/err.h"
#include "common/json_text.h"
#include "common/str.h"
#include "router/text/prompt.h"

#include <stdbool.h>
#include <stdint.h>

enum ds4_role {
    DS4_ROLE_SYSTEM,
    DS4_ROLE_USER,
    DS4_ROLE_ASSISTANT,
    DS4_ROLE_TOOL,
    DS4_ROLE_LATEST_REMINDER,
    DS4_ROLE_DEVELOPER,     /* V4's search pipeline; requests never map to it */
    DS4_ROLE_SEARCH_RESULT, /* direct_search_results: kept in history, refused when rendered */
    DS4_ROLE_UNKNOWN,
};

/* One part of a user turn after merging. */
struct ds4_block {
    struct ds4_str text;
    struct ds4_str id; /* of a tool result: the call it answers */
    bool is_result;
};

enum ds4_arguments_kind {
    DS4_ARGUMENTS_MEMBERS, /* `node` is an object: one parameter per member */
    DS4_ARGUMENTS_RAW,     /* `raw` is no JSON object: one parameter "arguments", a string */
    DS4_ARGUMENTS_VALUE,   /* `node` is another value: one parameter "arguments", JSON */
};

struct ds4_call {
    struct ds4_str id; /* empty = none */
    struct ds4_str name;
    enum ds4_arguments_kind kind;
    const struct ds4_jt_node *node;
    struct ds4_str raw;
};

/* An assistant's turn as it was sampled, from behind its header to its end token. */
struct ds4_exact_turn {
    const int32_t *id; /* [n_id] */
    int32_t n_id;
    struct ds4_str text;
    bool in_reasoning; /* the header opened a think block */
};

struct ds4_message {
    enum ds4_role role;
    struct ds4_str role_text;    /* for the error about an unknown role */
    struct ds4_str content;      /* null reads as "" */
    struct ds4_str tool_call_id; /* of a tool message */
    struct ds4_str reasoning;    /* of an assistant */
    struct ds4_str task;         /* ptr NULL = none */
    struct ds4_call *calls;
    size_t n_call;
    const struct ds4_jt_node **tools; /* the `function` object of each declared tool */
    size_t n_tool;
    const struct ds4_jt_node *response_format; /* the schema, NULL = none */
    struct ds4_block *blocks;                  /* filled by the encoder for user turns */
    size_t n_block;
    /* Put in place of the body that would be rendered, wherever the header before it is the one it was
     * sampled behind; NULL = none. */
    const struct ds4_exact_turn *exact;
    bool wo_eos;         /* no end of turn: the model continues this message */
    bool open_reasoning; /* and continues inside its reasoning */
};

/* Effort as an encoder takes it. */
enum ds4_effort_level {
    DS4_EFFORT_UNSET, /* the release's own default: nothing for the preview, low, 75 */
    DS4_EFFORT_LOW,
    DS4_EFFORT_HIGH,
    DS4_EFFORT_MAX,
    DS4_EFFORT_BUDGET, /* V4.1 only */
};

struct ds4_chat {
    enum ds4_release release;
    bool thinking;
    enum ds4_effort_level effort;
    int32_t effort_budget; /* 1..100 with DS4_EFFORT_BUDGET */
    struct ds4_message *messages;
    size_t n_message;
    size_t n_context;         /* the first so many were sent before: not rendered, no BOS */
    bool keep_reasoning;      /* the reference's drop_thinking = False */
    bool no_bos;              /* the reference's add_default_bos_token = False */
    bool new_turn;            /* open an assistant turn even if the last message calls for none */
    bool no_turn;             /* open none behind the last message, whatever it calls for */
    bool empty_think_closed;  /* old turns without reasoning: "</think>" for "<think></think>" */
    bool results_no_boundary; /* V4.1 1017: turns of tool results only do not end the history */
    bool escape_param_close;  /* argument values cannot close their parameter */
};

/* "v4_preview" | "v4_0731" | "v41"; "v4" reads as V4_0731.  DS4_RELEASE_UNSET for anything else. */
enum ds4_release ds4_release_parse(struct ds4_str text);

/* Renders the chat into *prompt (initialised, empty).  Reorders and annotates chat->messages, so a
 * chat is rendered once.  The arena holds what merging needs.  Errors: DS4_E_INVALID where the
 * reference raises, DS4_E_TOO_LONG when prompt or arena is full. */
int ds4_template_render(struct ds4_chat *chat, struct ds4_arena *arena, struct ds4_prompt *prompt,
                        struct ds4_err *err) DS4_MUST_CHECK;

/* Appends the beginning of a call as the model would write it: block, invoke and, unless `name` is
 * empty, the name with the end of the opener. */
void ds4_template_call_opener(enum ds4_release release, struct ds4_str name,
                              struct ds4_prompt *prompt);

/* ---- between template.c and the two encoders ------------------------------------------------------ */

/* What differs between the encoders; one table each in template_v4.c and template_v41.c. */
struct ds4_encoder {
    struct ds4_str tools_before;
    struct ds4_str calls_open, calls_close;
    struct ds4_str invoke_open, invoke_close;
    struct ds4_str param_open, param_close;
    /* Message i ends a stretch of history: what came before it loses its reasoning. */
    bool (*is_boundary)(const struct ds4_chat *chat, size_t i);
    /* Checks chat->effort; called once, first. */
    int (*check_effort)(const struct ds4_chat *chat, struct ds4_err *err);
    /* Whatever precedes the body of message i: effort text, system token. */
    void (*render_prefix)(const struct ds4_chat *chat, size_t i, struct ds4_prompt *prompt);
    /* The developer message i, where the release has that role. */
    int (*render_developer)(const struct ds4_chat *chat, size_t i, struct ds4_prompt *prompt,
                            struct ds4_err *err);
    /* A user turn keeps its own attributes (tools count although they are not rendered). */
    bool user_keeps_fields;
};

extern const struct ds4_encoder ds4_encoder_v4;
extern const struct ds4_encoder ds4_encoder_v41;

/* Content, tools block and response format of a system or developer message. */
void ds4_template_system_body(const struct ds4_encoder *encoder, const struct ds4_message *message,
                              struct ds4_prompt *prompt);

#endif

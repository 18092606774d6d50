/* Request normalisation: what clients send -> the chat that an encoder is given.
 *
 * Every dialect fills a struct ds4_conversation with the helpers below (roles, content parts and
 * arguments mean the same everywhere), then calls ds4_normalise once.  The rules are numbered R1..R16
 * in the project's encoding specification; this file names the ones it carries out.
 *
 * Strings are borrowed from the request's text or live in its arena. */
#ifndef DS4_ROUTER_TEXT_NORMALISE_H
#define DS4_ROUTER_TEXT_NORMALISE_H

#include "common/arena.h"
#include "common/buf.h"
#include "common/err.h"
#include "common/json_text.h"
#include "common/str.h"
#include "router/text/effort.h"
#include "router/text/template.h"

#include <stdbool.h>

enum ds4_tool_choice {
    DS4_TOOL_CHOICE_AUTO,
    DS4_TOOL_CHOICE_NONE, /* tools stay in the prompt, the answer is not parsed for calls (R10) */
    DS4_TOOL_CHOICE_REQUIRED,
    DS4_TOOL_CHOICE_NAMED,
};

/* What was repaired; each has its metric. */
struct ds4_normalise_counts {
    size_t bad_arguments; /* arguments that were no JSON object (R6) */
    size_t ignored_tools; /* declared tools of a type other than function */
    size_t split_think;   /* messages with think markup in their content (R4) */
    size_t lifted_calls;  /* calls found in content (R5) */
};

struct ds4_conversation {
    struct ds4_chat chat; /* release and messages by the dialect; the rest by ds4_normalise */
    const struct ds4_jt_node **tools; /* the function object of each declared tool */
    size_t n_tool;
    enum ds4_tool_choice tool_choice;
    struct ds4_str tool_name;                /* with DS4_TOOL_CHOICE_NAMED */
    const struct ds4_jt_node *answer_schema; /* of a JSON-schema response format, NULL = none */
    bool answer_json;                        /* a response format of JSON, with a schema or not */
    const char *answer_param; /* the member that asked, NULL = the dialect's own; static storage */
    bool continue_last;       /* the last message is an assistant's, to be continued (R11) */
    bool no_turn;             /* the prompt ends with the last message: nobody is to answer */
    struct ds4_effort_wish wish;
    struct ds4_normalise_counts counts;
};

/* Where in the request an error lies, for error bodies: "messages[2].content[0].type". */
struct ds4_param {
    char path[128];
    const char *code; /* "invalid_value" | "unsupported_value" | "schema_unsupported" */
};

/* R1.  DS4_ROLE_UNKNOWN for a role that requests may not use. */
enum ds4_role ds4_normalise_role(struct ds4_str role);

/* "image" for a part of type image_url, input_image or the like, also audio, video, document and file: what
 * a client shows a model that cannot see it.  Empty for other types. */
struct ds4_str ds4_normalise_media_kind(struct ds4_str type);
/* Appends "[KIND omitted]" as part number i of a content list. */
void ds4_normalise_append_omitted(struct ds4_buf *out, size_t i, struct ds4_str kind);

/* R2: appends part number i of a content list, an empty line between parts.  `unsupported`: text is the
 * type of a part that has no text, and "[Unsupported TYPE]" is appended (tool results only). */
void ds4_normalise_append_part(struct ds4_buf *out, size_t i, struct ds4_str text,
                               bool unsupported);

/* R6: fills the argument members of *call from a JSON value (a string holding JSON, an object, null). */
int ds4_normalise_arguments(const struct ds4_jt_node *value, struct ds4_arena *arena,
                            struct ds4_call *call, struct ds4_normalise_counts *counts,
                            struct ds4_err *err) DS4_MUST_CHECK;

/* R4, R5, R7, R8, R9, R11, R12, and the resolved effort: makes conversation->chat ready to render. */
int ds4_normalise(struct ds4_conversation *conversation, const struct ds4_effort *effort,
                  struct ds4_arena *arena, struct ds4_err *err) DS4_MUST_CHECK;

#endif

/* How requests of /v1/responses are read (steps 2 and 3). */
#ifndef DS4_ROUTER_API_RESPONSES_REQUEST_H
#define DS4_ROUTER_API_RESPONSES_REQUEST_H

#include "router/api/answer.h"
#include "router/api/chat_prompt.h"
#include "router/api/intake.h"

/* A tool whose name for the model differs from the client's, or whose calls have another form. */
struct ds4_response_tool {
    struct ds4_str shown; /* to the model: "space.name" */
    struct ds4_str name;
    struct ds4_str space; /* empty = none */
    bool is_custom;       /* called with one text instead of arguments */
};

/* What the answer says about one part of itself, decided when the part is complete. */
struct ds4_response_extra {
    size_t part;
    struct ds4_str
        text; /* reasoning: its opaque token; text: its log-probabilities as JSON items */
    struct ds4_response_extra *next;
};

/* What a response shows of its request, and where its stream is: answer->state. */
struct ds4_response {
    bool store;
    bool summary;   /* reasoning is shown as its summary too */
    bool encrypted; /* and named by an opaque token */
    bool started;   /* response.created is sent */
    bool cancelled;
    int64_t sequence;        /* number of the next event */
    struct ds4_str previous; /* previous_response_id, ptr NULL = none */
    /* Members shown as they came, JSON; ptr NULL = absent. */
    struct ds4_str instructions, tools, tool_choice, metadata, text, max_output_tokens;
    struct ds4_str effort, summary_wish;
    struct ds4_str items; /* all input items, those of earlier turns first: JSON, comma-separated */
    struct ds4_response_tool *tool;
    size_t n_tool;
    struct ds4_response_extra *extras;
};

/* Body of the answer's exchange -> choice 0 and answer->state.  -1 with *error. */
int ds4_responses_request_parse(struct ds4_answer *answer, struct ds4_api_error *error);

/* The way of a body to its prompt, also for /v1/responses/input_tokens; `response` and what it points to
 * come from the body's arena. */
int ds4_responses_prompt_build(const struct ds4_api_context *context, struct ds4_body *body,
                               struct ds4_response *response, struct ds4_chat_prompt *out,
                               struct ds4_api_error *error);

#endif

/* Reasoning effort: what the client said where, what applies, and what is reported about it.
 *
 * A dialect collects everything the request says into a struct ds4_effort_wish; one rule for all
 * dialects turns it into the applied effort.  Nothing is ever lowered silently: the result says what
 * was asked, what applies, and why they differ. */
#ifndef DS4_ROUTER_TEXT_EFFORT_H
#define DS4_ROUTER_TEXT_EFFORT_H

#include "common/choices.h"
#include "common/err.h"
#include "common/json_text.h"
#include "common/str.h"
#include "router/text/template.h"

#include <stdbool.h>
#include <stdint.h>

/* Where a request can speak, highest priority first; fields of one priority share a line. */
enum ds4_effort_priority {
    DS4_EFFORT_BY_KWARGS,   /* chat_template_kwargs.{thinking, enable_thinking, reasoning_effort} */
    DS4_EFFORT_BY_THINKING, /* thinking, think, enable_thinking */
    DS4_EFFORT_BY_EFFORT,   /* reasoning_effort, reasoning.effort, output_config.effort */
    DS4_EFFORT_BY_MODEL,    /* the model name's suffix */
    DS4_N_EFFORT_PRIORITY
};

/* The effort a request names: a word of the list, or a budget of 1..100 on V4.1. */
struct ds4_effort_value {
    struct ds4_str word; /* empty with a number */
    int32_t number;      /* 0 with a word */
};

/* Everything a request said; zero-initialise, then add.  `first` is what is reported as requested. */
struct ds4_effort_wish {
    bool on[DS4_N_EFFORT_PRIORITY];
    bool off[DS4_N_EFFORT_PRIORITY];
    bool has_first, has_level;
    struct ds4_effort_value first; /* the first value given, in the order of priorities */
    struct ds4_effort_value level; /* the first value that is not "none" */
    bool has_budget;
    int64_t budget_tok; /* hard cap on reasoning tokens */
};

struct ds4_effort_policy {
    enum ds4_release release;
    enum ds4_effort_setting default_effort;
    int64_t context_tok;     /* what this server is configured for */
    int64_t max_min_context; /* below it max becomes high; 0 = no floor */
};

struct ds4_effort {
    bool thinking;
    enum ds4_effort_level level; /* for the encoder; UNSET when not thinking */
    int32_t budget;              /* with DS4_EFFORT_BUDGET */
    bool is_requested;
    struct ds4_effort_value requested;
    struct ds4_effort_value applied; /* "none" when not thinking */
    bool from_request;               /* else the server's default decided */
    bool downgraded;
    char why[64]; /* of a downgrade: "context 131072 < 393216" */
};

/* Adds one field.  Absent (NULL) and null say nothing.  -1 with DS4_E_INVALID: wrong type, unknown word
 * (the message lists the valid ones), number outside 1..100 or on a release without numbers. */
int ds4_effort_add_value(struct ds4_effort_wish *wish, enum ds4_effort_priority priority,
                         const struct ds4_jt_node *value, enum ds4_release release,
                         struct ds4_err *err) DS4_MUST_CHECK;
void ds4_effort_add_switch(struct ds4_effort_wish *wish, enum ds4_effort_priority priority,
                           bool on);
/* A boolean, or with `object_too` {type: enabled | disabled | adaptive | auto, budget_tokens?}. */
int ds4_effort_add_thinking(struct ds4_effort_wish *wish, enum ds4_effort_priority priority,
                            const struct ds4_jt_node *value, bool object_too,
                            struct ds4_err *err) DS4_MUST_CHECK;
int ds4_effort_add_budget(struct ds4_effort_wish *wish, const struct ds4_jt_node *value,
                          struct ds4_err *err) DS4_MUST_CHECK;
/* Suffixes of a model name: -chat, :nothink, -reasoner, :think, :max. */
void ds4_effort_add_model(struct ds4_effort_wish *wish, struct ds4_str model);

/* A server's default by name: off, or a word of the list.  0, or -1 for any other text. */
int ds4_effort_parse_setting(struct ds4_str word, enum ds4_effort_setting *out) DS4_MUST_CHECK;

/* Applies the rules; cannot fail. */
struct ds4_effort ds4_effort_resolve(const struct ds4_effort_wish *wish,
                                     const struct ds4_effort_policy *policy);

#endif

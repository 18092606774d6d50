/* An HTTP request on its way to its answer: one exchange, one to n choices, streamed or whole.
 *
 *   parse --refused--> error reply
 *     | submit every choice
 *   waiting --all done--> whole body            (not streamed)
 *     | admitted, or queued too long: headers
 *   streaming --all done--> closing frames
 *     | a choice failed: error frame;  client gone: every choice is cancelled
 *
 * The answer frees itself, its requests included, when the exchange has ended and every choice is
 * done.  Loop thread only. */
#ifndef DS4_ROUTER_API_ANSWER_H
#define DS4_ROUTER_API_ANSWER_H

#include "common/vec.h"
#include "router/api/context.h"
#include "router/api/dialect.h"
#include "router/exchange.h"
#include "router/parse/event.h"
#include "router/request.h"

#define DS4_ANSWER_ID_BYTES 48
#define DS4_MAX_CHOICES     16

/* A tool call as it comes in. */
struct ds4_answer_call {
    char id[DS4_CALL_ID_CHARS + 1];
    struct ds4_buf name;
    struct ds4_buf arguments;
    bool incomplete;
};

/* A stretch of the answer; see api/parts.h. */
struct ds4_answer_part {
    enum ds4_event_kind kind; /* REASONING | CONTENT | CALL_BEGIN */
    size_t at, len;           /* of a text: where it lies in `reasoning` or `content` */
    uint32_t call;
};

/* A token with its log-probabilities: the chosen one first, then the top ones. */
struct ds4_scored_token {
    int32_t token;
    int32_t n_logprob;
    struct ds4_logprob logprob[1 + DS4_MAX_TOP_LOGPROBS];
};

struct ds4_choice {
    struct ds4_answer *answer;
    int32_t index;
    struct ds4_request *req; /* owned */
    bool submitted;
    bool begun;
    bool done;
    struct ds4_request_result result; /* valid when done; views into req */
    struct ds4_finish finish;         /* valid when done without error */
    /* What is wrong with an answer that was to be JSON; empty = nothing.  Valid like finish. */
    char format_problem[sizeof(((struct ds4_err *)NULL)->msg)];

    /* What was said so far; streams keep it as well (memory of tool calls, the log line). */
    struct ds4_buf reasoning;
    struct ds4_buf content;
    DS4_VEC(struct ds4_answer_call) calls;
    DS4_VEC(int32_t) tokens; /* all of the turn, its stop id too */
    DS4_VEC(struct ds4_answer_part) parts;
    size_t n_part_opened; /* a stream's place in the list */
    bool part_open;

    /* Log-probabilities as comma-separated JSON items not yet sent, and tokens whose channel is not
     * known yet. */
    bool wants_logprobs;
    int32_t n_echo; /* sampled tokens that belong to the prompt: echo with log-probabilities */
    struct ds4_buf logprobs_content;
    struct ds4_buf logprobs_reasoning;
    DS4_VEC(struct ds4_scored_token) undecided;
};

struct ds4_answer {
    const struct ds4_api_context *context;
    const struct ds4_dialect *dialect;
    struct ds4_exchange *x; /* NULL once ended */
    struct ds4_sse *sse;    /* streams only */
    char id[DS4_ANSWER_ID_BYTES];
    int64_t created_unix_s;
    int32_t n_choice;
    int32_t n_per_prompt; /* choices that share a prompt; 0: all do */
    struct ds4_choice choice[DS4_MAX_CHOICES];
    bool stream;
    bool include_usage;
    bool continuous_usage;
    bool include_reasoning;
    bool return_progress;
    bool parallel_calls;
    bool wants_json;              /* the text is to be one JSON value ... */
    struct ds4_str answer_schema; /* ... of this schema; empty: an object */
    void *state;                  /* the dialect's own, in the arena of choice 0's request */
    struct ds4_buf notes;         /* JSON items of ds4.downgrades, comma-separated */
    char progress_text[96];       /* keep-alive comment during prefill */

    struct ds4_api_error failure; /* of the first choice that failed */
    bool failed;
    bool paused; /* the client reads too slowly */
    bool cancelling;
    int32_t n_open; /* choices the scheduler holds */
    bool in_start;
    struct ds4_answer *next, **link; /* list of running answers */
};

/* Starts an answer for the exchange: takes it over and ends it. */
void ds4_answer_start(const struct ds4_api_context *context, const struct ds4_dialect *dialect,
                      struct ds4_exchange *x);

/* Makes choice[index].req: a fresh request of the dialect with id, times and effort-independent
 * members set.  NULL with *error. */
struct ds4_request *ds4_answer_add_request(struct ds4_answer *answer, int32_t index,
                                           struct ds4_api_error *error);
/* Adds {"what":..,"from":..,"to":..,"why":..} to ds4.downgrades; from and to are JSON values. */
void ds4_answer_note(struct ds4_answer *answer, const char *what, const char *from, const char *to,
                     const char *why);

/* Cancels what still runs; the answer ends with an error.  Other answers of the loop are not touched. */
void ds4_answer_cancel(struct ds4_answer *answer);
/* The running answer with this id, NULL if there is none. */
struct ds4_answer *ds4_answer_find(const struct ds4_api_context *context, struct ds4_str id);

/* Sums over the choices: the tokens of each prompt once, completions of all. */
struct ds4_usage ds4_answer_usage(const struct ds4_answer *answer);

#endif

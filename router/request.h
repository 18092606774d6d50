/* One canonical request: what every dialect is turned into (step 2) and what its answer is made from.
 *
 * Life.  A dialect makes a request, fills it, gives it to ds4_sched_submit() and then only listens to
 * its sink.  When submit succeeded, `done` is called exactly once, whatever happens; from then on the
 * scheduler has forgotten the request and the owner frees it (inside `done` if it likes).  When submit
 * failed, `done` is never called and the owner frees it as well.
 *
 *                              +------------+
 *                              v            | (the generation was lost)
 *   RECEIVED -> CHECKED -> QUEUED -> PREFILL -> DECODE -> DRAINING -> DONE
 *       |          |          |         |                   ^
 *       +----------+----------+---------+-------------------+
 *
 * DRAINING: the outcome is decided, the last events are being delivered; tokens and cancellations
 * that come now change nothing.  Any other transition is DS4_E_BUG and leaves the state as it was.
 *
 * Everything runs on the loop thread.  The arena owns what the fields point to, unless said otherwise. */
#ifndef DS4_ROUTER_REQUEST_H
#define DS4_ROUTER_REQUEST_H

#include "common/arena.h"
#include "common/buf.h"
#include "common/err.h"
#include "common/str.h"
#include "common/vec.h"
#include "proto/message.h"
#include "router/parse/event.h"
#include "router/recovery.h"

#include <stdbool.h>
#include <stdint.h>

struct ds4_stream;       /* router/parse/stream.h */
struct ds4_parse_config; /* router/parse/stream.h */
struct ds4_detok;        /* router/text/detok.h */
struct ds4_vocab;        /* router/text/vocab.h */

#define DS4_MAX_STOP_TEXTS   16
#define DS4_REQUEST_ID_BYTES 132

enum ds4_api { DS4_API_CHAT, DS4_API_COMPLETIONS, DS4_API_RESPONSES, DS4_API_MESSAGES };
#define DS4_N_API 4
/* "chat" | "completions" | "responses" | "messages": the metric label. */
const char *ds4_api_text(enum ds4_api api);

enum ds4_request_state {
    DS4_REQUEST_RECEIVED,
    DS4_REQUEST_CHECKED,
    DS4_REQUEST_QUEUED,
    DS4_REQUEST_PREFILL,
    DS4_REQUEST_DECODE,
    DS4_REQUEST_DRAINING,
    DS4_REQUEST_DONE
};

/* Why a request ended.  X(name, metric label).  Dialects map these to their own words. */
#define DS4_ENDS(X)                                                                                \
    X(DS4_END_EOS, "eos")               /* a stop id of the model */                               \
    X(DS4_END_STOP, "stop")             /* a stop string or stop id of the client */               \
    X(DS4_END_TOOL_CALLS, "tool_calls") /* complete calls, then the end of the turn */             \
    X(DS4_END_LENGTH, "length")         /* max_new reached */                                      \
    X(DS4_END_CONTEXT, "context")       /* the context is full: "length" to clients */             \
    X(DS4_END_REPETITION, "repetition") /* a tripwire: "stop" to clients, ds4.stop_detail */       \
    X(DS4_END_ERROR, "error")           /* see result.err and result.reason */                     \
    X(DS4_END_CANCELLED, "cancelled")

enum ds4_end {
#define DS4_END_ENUM(name, text) name,
    DS4_ENDS(DS4_END_ENUM)
#undef DS4_END_ENUM
        DS4_N_END
};
const char *ds4_end_text(enum ds4_end end);

/* The stable word of a refusal or failure that this side of the house produces; the string is the
 * `code` member of error bodies, api/error.c gives each its HTTP status.  X(name, code). */
#define DS4_REASONS(X)                                                                             \
    X(DS4_REASON_NONE, "")                                                                         \
    X(DS4_REASON_INVALID, "invalid_value")                                                         \
    X(DS4_REASON_CONTEXT, "context_length_exceeded")                                               \
    X(DS4_REASON_QUEUE_FULL, "queue_full")        /* 429 */                                        \
    X(DS4_REASON_QUEUE_TIMEOUT, "queue_timeout")  /* 408 */                                        \
    X(DS4_REASON_KV_CAPACITY, "kv_capacity")      /* 429; DS4_E_INVALID: can never fit, 400 */     \
    X(DS4_REASON_LOADING, "loading")              /* 503 */                                        \
    X(DS4_REASON_DRAINING, "draining")            /* 503 */                                        \
    X(DS4_REASON_RESTARTED, "pipeline_restarted") /* 503 */                                        \
    X(DS4_REASON_STAGE_DOWN, "stage_down")        /* 503 */                                        \
    X(DS4_REASON_POISONED, "poisoned_request")    /* 503 */                                        \
    X(DS4_REASON_UNSATISFIED, "tool_choice_unsatisfied") /* 500 */                                 \
    X(DS4_REASON_INTERNAL, "internal_error")             /* 500 */

enum ds4_reason {
#define DS4_REASON_ENUM(name, text) name,
    DS4_REASONS(DS4_REASON_ENUM)
#undef DS4_REASON_ENUM
        DS4_N_REASON
};
const char *ds4_reason_text(enum ds4_reason reason);

/* Why somebody cancelled. */
enum ds4_cancel {
    DS4_CANCEL_DISCONNECT,
    DS4_CANCEL_API,
    DS4_CANCEL_SLOW_CLIENT,
    DS4_CANCEL_SHUTDOWN
};
#define DS4_N_CANCEL 4
const char *ds4_cancel_text(enum ds4_cancel cancel);

/* What was asked and what was done about reasoning effort (never silently different). */
struct ds4_request_effort {
    struct ds4_str requested; /* the client's word in lower case; empty = none given */
    struct ds4_str applied;   /* "off" | "low" | "high" | "max" */
    struct ds4_str source;    /* the field that decided, "default" if none */
    bool thinking;
    bool downgraded;
    struct ds4_str why; /* of the downgrade */
};

struct ds4_usage {
    int32_t prompt_tok;
    int32_t completion_tok; /* reasoning, content and markup */
    int32_t reasoning_tok;  /* of them inside the think block */
    int32_t cached_tok;     /* of the prompt: not computed again */
    int32_t recovery_tok;   /* spliced in against repetition; the client does not see them */
    int32_t draft_tok; /* drafts that were run for it; those that were right are among the above */
    int32_t accepted_tok; /* of them right */
};

/* Monotonic times; 0 = did not happen. */
struct ds4_timing {
    int64_t received_ns;
    int64_t queued_ns;
    int64_t admitted_ns;
    int64_t first_token_ns;
    int64_t last_token_ns;
    int64_t done_ns;
};

struct ds4_request_result {
    enum ds4_end end;
    struct ds4_err err;     /* code DS4_OK unless end is ERROR or CANCELLED */
    enum ds4_reason reason; /* of an error */
    int32_t retry_after_ms; /* of a 429 or 503; 0 = none */
    struct ds4_usage usage;
    struct ds4_timing timing;
    int32_t stop_id; /* the id that ended the turn, -1 if none */
};

/* Where the answer goes.  NULL members are skipped.  Called on the loop thread, never from inside
 * ds4_sched_submit.  Pointers are borrowed for the call. */
struct ds4_request_sink {
    void *owner;
    /* The request got its lease: cached_tok tokens of the prompt need no computing. */
    void (*admitted)(void *owner, int32_t cached_tok);
    /* Prompt tokens that exist, cached ones included. */
    void (*progress)(void *owner, int32_t done_tok, int32_t total_tok, int32_t cached_tok);
    /* One sampled token with its log-probabilities, before the events it causes. */
    void (*token)(void *owner, const struct ds4_token_entry *entry, int32_t index);
    /* New pieces of the parsed answer, never an empty list; the last list ends with DS4_EVENT_FINISH
     * unless the request fails or is cancelled. */
    void (*events)(void *owner, const struct ds4_events *events);
    /* Exactly once, last. */
    void (*done)(void *owner, const struct ds4_request_result *result);
};

/* Behind what the prompt makes the model begin. */
enum ds4_turn_start {
    DS4_TURN_CONTINUED, /* a text or message that was begun before */
    DS4_TURN_PLAIN,     /* a turn without thinking */
    DS4_TURN_THINKING   /* an open think block */
};

struct ds4_request {
    struct ds4_arena arena; /* owned: everything below that is a view or an array */
    enum ds4_request_state state;

    /* Who asks, and how the answer is wanted. */
    enum ds4_api api;
    char id[DS4_REQUEST_ID_BYTES]; /* for people and logs, NUL-terminated */
    int64_t created_unix_s;
    struct ds4_str model; /* as the client wrote it */
    bool stream;
    int32_t n_choice; /* the client's n; each choice is a request of its own with the same prompt */
    int32_t choice;   /* 0 .. n_choice - 1 */

    /* The prompt. */
    const int32_t *prompt; /* [n_prompt] */
    int32_t n_prompt;
    enum ds4_turn_start turn_start;
    bool internal;       /* the house's own: not counted (ds4_sched_run_canary) */
    uint64_t salt;       /* prefixes are shared only between equal salts; 0 = everybody */
    bool no_cache_reads; /* cache_prompt: false */
    bool no_disk;        /* what was read from disk for it was no good */
    uint64_t tenant;     /* who pays: fairness of the queue; 0 = everybody */
    uint64_t affinity;   /* whose session: which slot to give up; 0 = not said */

    /* What is generated.  max_new <= 0: the server's default.  submit lowers it to what the context
     * leaves and sets max_new_reduced. */
    int32_t max_new;
    int32_t max_new_asked; /* the client's number, 0 = none */
    bool max_new_reduced;
    int32_t context_tok;          /* set by submit: the cluster's limit */
    struct ds4_sampling sampling; /* arrays live in the arena; range-checked by the dialect */
    bool ignore_stop;
    int32_t n_stop_id; /* the model's stop ids first: n_model_stop_id of them */
    int32_t n_model_stop_id;
    int32_t stop_id[DS4_MAX_STOP_IDS];
    int32_t n_stop_text;
    bool keep_stop_text;                          /* the one that ends the turn is shown */
    struct ds4_str stop_text[DS4_MAX_STOP_TEXTS]; /* matched by the stream parser on content only */

    bool one_call;  /* the turn ends behind its first complete call; needs a parser */
    bool must_call; /* a turn that the model ends without any call is an error; needs a parser */

    struct ds4_request_effort effort;

    /* Tokens -> bytes -> events, set by ds4_request_set_parser.  Without them tokens are counted and
     * given to sink.token only. */
    struct ds4_detok *detok;   /* in the arena */
    struct ds4_stream *parser; /* owned */
    struct ds4_events *events; /* owned; what the current token brought */
    struct ds4_buf text;       /* the same as text */
    struct ds4_finish finish;  /* the parser's last word, once the answer is over without error */
    struct ds4_watch *watch;   /* in the arena; NULL: no tripwires */
    struct ds4_request_sink sink;

    /* Kept by this module and the scheduler; read-only for everybody else. */
    uint64_t seq; /* sequence that runs it, 0 = none */
    struct ds4_usage usage;
    struct ds4_timing timing;
    DS4_VEC(int32_t)
    history;             /* owned: prompt and answer so far, of one that begins again; else empty */
    uint64_t follow_seq; /* waits in the queue for the prompt rows below follow_tok of this one; */
    int32_t follow_slot; /* 0 = none */
    int32_t follow_tok;
    bool parked;      /* waits because it gave way: for as long as it takes */
    int32_t n_replay; /* generations it has survived */
    bool paused;
    bool delivering; /* inside a sink callback */
    bool cancel_asked;
    enum ds4_cancel cancel;
    struct ds4_request *next; /* the scheduler's queue */
};

/* A zeroed request with sane sampling (temperature 1, everything else off, no logprobs), state RECEIVED; NULL
 * when memory is out.  arena_max_bytes bounds what it may hold. */
struct ds4_request *ds4_request_new(enum ds4_api api, int64_t received_ns, size_t arena_max_bytes,
                                    struct ds4_err *err);
/* NULL is fine.  Never while the scheduler holds it (between submit and done). */
void ds4_request_free(struct ds4_request *req);

/* Copies n ids into the arena as the prompt. */
int ds4_request_set_prompt(struct ds4_request *req, const int32_t *ids, int32_t n,
                           struct ds4_err *err) DS4_MUST_CHECK;

/* How the answer is read: a detokenizer over `vocab` (borrowed for the request's life) and a stream
 * parser.  `config` and what it points to must live in the arena. */
int ds4_request_set_parser(struct ds4_request *req, const struct ds4_vocab *vocab,
                           const struct ds4_parse_config *config,
                           struct ds4_err *err) DS4_MUST_CHECK;

/* Tripwires over the answer; after ds4_request_set_parser.  `recovery` is borrowed for the request's
 * life. */
int ds4_request_set_watch(struct ds4_request *req, const struct ds4_recovery *recovery,
                          struct ds4_err *err) DS4_MUST_CHECK;
/* Positions beyond prompt and max_new that splices may take. */
int32_t ds4_request_splice_room(const struct ds4_request *req);

/* The only way to change `state`.  0, or -1 with DS4_E_BUG naming both states. */
int ds4_request_move(struct ds4_request *req, enum ds4_request_state to,
                     struct ds4_err *err) DS4_MUST_CHECK;
const char *ds4_request_state_text(enum ds4_request_state state);

/* What a token record did to the request. */
enum ds4_verdict {
    DS4_VERDICT_GO,     /* the sequence continues */
    DS4_VERDICT_END,    /* it ends as `end` says; later tokens of the sequence are to be dropped */
    DS4_VERDICT_SPLICE, /* it goes on with other tokens, see `splice` */
    DS4_VERDICT_FAIL    /* it ends with an error */
};
struct ds4_accept {
    enum ds4_verdict verdict;
    enum ds4_end end;
    int32_t n_used;  /* tokens of the entry that belong to the answer */
    int32_t stop_id; /* -1 if none */
    bool tripped;    /* a tripwire fired: END for repetition, or SPLICE */
    /* With SPLICE: the newest n_drop of the used tokens and all that come after them are taken back,
     * `text` takes their place. */
    struct ds4_splice splice;
};

/* Steps 13 and 14: checks the record, turns its tokens into events, gives them to the sink.  A stop
 * id is counted but produces no text.  Never calls `done`.  `limit` is the number of new tokens after
 * which the answer ends for length. */
struct ds4_accept ds4_request_accept(struct ds4_request *req, const struct ds4_token_entry *entry,
                                     int32_t limit, int64_t now_ns, struct ds4_err *err);

/* The outcome is decided: flushes what the parser holds back (unless end is ERROR or CANCELLED), moves to
 * DRAINING, fills *result.  A parser may turn EOS into TOOL_CALLS, and a failure of the flush into an
 * error.  err may be NULL for ends that are no errors. */
void ds4_request_finish(struct ds4_request *req, enum ds4_end end, enum ds4_reason reason,
                        int32_t stop_id, int64_t now_ns, const struct ds4_err *err,
                        struct ds4_request_result *result);
/* DONE: calls `done`.  The request must not be touched afterwards. */
void ds4_request_deliver(struct ds4_request *req, const struct ds4_request_result *result);

#endif

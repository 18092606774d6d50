/* The output parser: the text of one turn in, events out (step 14).
 *
 * One parser for all releases: spaced (V4.1) and unspaced (V4) DSML tags are the same to it.  It is a
 * pure function of its input: no sockets, clocks or globals; the bytes may come in pieces of any size
 * and the concatenated result is the same for every way of cutting them.  What has been emitted is
 * never taken back: emitted reasoning, content and arguments are prefixes of their final values.
 *
 *     struct ds4_stream *s = ds4_stream_new(&config, &err);
 *     while (more text)
 *         if (ds4_stream_feed(s, piece, &events, &err) != 0) ...
 *     ds4_stream_finish(s, DS4_ENGINE_STOP, &events, &err);
 *     ds4_stream_free(s);
 *
 * Time is linear in the text, however it is cut.  Memory is bounded by config.hold_max_bytes a few
 * times over: undecided text, collected arguments. */
#ifndef DS4_ROUTER_PARSE_STREAM_H
#define DS4_ROUTER_PARSE_STREAM_H

#include "common/err.h"
#include "common/str.h"
#include "router/parse/event.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DS4_DSML_HOLD_MAX_BYTES ((size_t)8 << 20)

enum ds4_calls_mode {
    DS4_CALLS_PARSED,  /* also: required */
    DS4_CALLS_AS_TEXT, /* tools are in the prompt, but output is not parsed for calls */
    DS4_CALLS_NAMED,
};

struct ds4_parse_tool {
    struct ds4_str name;       /* an empty one declares nothing */
    struct ds4_str parameters; /* raw JSON of the schema, or empty */
};

/* Deviations from the strict grammar and what became of them.  A name `a.b` is the metric
 * ds4_dsml_a_total with the value b of its one label; without a dot there is no label. */
#define DS4_PARSE_RULES(X)                                                                         \
    X(DS4_RULE_BLOCK_EXACT, "blocks.exact")                                                        \
    X(DS4_RULE_BLOCK_NEAR, "blocks.near")                                                          \
    X(DS4_RULE_RECOVERED_INVOKE, "recovered.invoke")                                               \
    X(DS4_RULE_RECOVERED_FUSED, "recovered.fused")                                                 \
    X(DS4_RULE_RECOVERED_HEADLESS, "recovered.headless")                                           \
    X(DS4_RULE_RECOVERED_NAMELESS, "recovered.nameless")                                           \
    X(DS4_RULE_REJECTED_UNDECLARED, "rejected.undeclared")                                         \
    X(DS4_RULE_REJECTED_REQUIRED, "rejected.required")                                             \
    X(DS4_RULE_REJECTED_AMBIGUOUS, "rejected.ambiguous")                                           \
    X(DS4_RULE_REJECTED_FENCE, "rejected.fence")                                                   \
    X(DS4_RULE_REJECTED_PROSE, "rejected.prose")                                                   \
    X(DS4_RULE_REJECTED_UNCLOSED, "rejected.unclosed")                                             \
    X(DS4_RULE_REJECTED_INLINE, "rejected.inline")                                                 \
    X(DS4_RULE_STRAY_CLOSER, "stray_closers")                                                      \
    X(DS4_RULE_EMPTY_BLOCK, "empty_blocks")                                                        \
    X(DS4_RULE_UNDECLARED, "undeclared")                                                           \
    X(DS4_RULE_DUP_PARAM, "dup_params")                                                            \
    X(DS4_RULE_TRUNCATED, "truncated")                                                             \
    X(DS4_RULE_COERCED_PARAM, "coerced_params")

enum ds4_parse_rule {
#define DS4_PARSE_RULE_ENUM(rule, name) rule,
    DS4_PARSE_RULES(DS4_PARSE_RULE_ENUM)
#undef DS4_PARSE_RULE_ENUM
        DS4_N_PARSE_RULES
};

/* Borrowed, with all it points to, for the stream's life. */
struct ds4_parse_config {
    bool starts_in_reasoning; /* the prompt ends inside an open <think> */
    bool spaced_tags;         /* V4.1: what counts as exact in the metrics; changes nothing else */
    bool raw; /* nothing is markup: every byte is content, only stop strings count */
    enum ds4_calls_mode calls_mode;
    const struct ds4_parse_tool *tools;
    size_t n_tools;
    const struct ds4_str *stops; /* matched in content only */
    size_t n_stops;
    bool keep_stop;        /* the stop string that ended the turn is its last text */
    bool no_recovery;      /* only blocks with a known wrapper are calls (knob dsml_recovery off) */
    bool no_plain_xml;     /* <invoke ..> and kin are text (knob dsml_heal_xml off) */
    bool machine_only;     /* nothing goes past the machine (direct.c): slower, the same result */
    size_t hold_max_bytes; /* 0: DS4_DSML_HOLD_MAX_BYTES */
    /* Fills out[0..n) with random bytes for call ids: unguessable in production, seeded in tests. */
    void (*random)(void *ctx, void *out, size_t n);
    void *random_ctx;
};

struct ds4_stream;

/* NULL with DS4_E_NOMEM, or DS4_E_INVALID for an absurd stop string. */
struct ds4_stream *ds4_stream_new(const struct ds4_parse_config *config,
                                  struct ds4_err *err) DS4_MUST_CHECK;
void ds4_stream_free(struct ds4_stream *stream);

/* Appends events to `out`.  `text` is valid UTF-8 cut between characters (the detokenizer's job); it
 * is borrowed for the call.  After ds4_stream_ended text is ignored.  -1: DS4_E_NOMEM, or
 * DS4_E_TOO_LONG when `out` is full; the turn cannot go on then. */
int ds4_stream_feed(struct ds4_stream *stream, struct ds4_str text, struct ds4_events *out,
                    struct ds4_err *err) DS4_MUST_CHECK;

/* The same for the text of one token, of which more is known (ds4_detok_next): the classes of its bytes, and
 * that DS4_TOKEN_SLACK_BYTES may be read from its beginning. */
int ds4_stream_feed_token(struct ds4_stream *stream, struct ds4_str text, unsigned classes,
                          struct ds4_events *out, struct ds4_err *err) DS4_MUST_CHECK;

/* The message is over though the engine may go on: a stop string or a turn marker came. */
bool ds4_stream_ended(const struct ds4_stream *stream);

/* Where the next text goes, and whether a code fence is open there: what the loop guard may look at. */
enum ds4_stream_place {
    DS4_PLACE_REASONING,
    DS4_PLACE_CONTENT,
    DS4_PLACE_FENCE,  /* reasoning or content inside a code fence */
    DS4_PLACE_MARKUP, /* a call, or text that may still become one */
};
enum ds4_stream_place ds4_stream_place(const struct ds4_stream *stream);

/* Text at the end that is not decided yet: the beginning of a tag.  0 inside markup. */
size_t ds4_stream_undecided(const struct ds4_stream *stream);
/* The last n_bytes of the undecided text were never there. */
void ds4_stream_take_back(struct ds4_stream *stream, size_t n_bytes);
/* The model starts a new turn within the same answer: what is undecided becomes text, and parsing goes
 * on as at the start.  Calls keep counting.  Only outside of markup. */
int ds4_stream_reopen(struct ds4_stream *stream, struct ds4_events *out,
                      struct ds4_err *err) DS4_MUST_CHECK;

enum ds4_engine_finish {
    DS4_ENGINE_STOP,   /* an end token */
    DS4_ENGINE_LENGTH, /* max_tokens or the context limit */
};

/* Decides everything undecided; appends DS4_EVENT_FINISH last.  To be called once. */
int ds4_stream_finish(struct ds4_stream *stream, enum ds4_engine_finish engine,
                      struct ds4_events *out, struct ds4_err *err) DS4_MUST_CHECK;

/* Tools are declared and calls of them are read. */
bool ds4_stream_expects_calls(const struct ds4_stream *stream);
/* Calls announced so far; *n_complete (may be NULL): of them those that are whole. */
uint32_t ds4_stream_n_calls(const struct ds4_stream *stream, uint32_t *n_complete);
/* How often each rule has been used so far; [DS4_N_PARSE_RULES]. */
const uint64_t *ds4_stream_rules(const struct ds4_stream *stream);
/* "rejected.fence", "dup_params"; static storage. */
const char *ds4_parse_rule_name(enum ds4_parse_rule rule);

#endif

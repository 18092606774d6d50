/* The inside of the parser, shared by stream.c, direct.c, reasoning.c, dsml.c, dsml_value.c and
 * dsml_repair.c; nobody else includes it.
 *
 * Offsets are absolute positions in the turn's text.  `pos` is where the undecided text begins, `scan`
 * how far it has been looked at; bytes before pos may be dropped from `in` at any time.
 *
 *                    WRAPPER or bare tag that passes no gate: text again, behind the tag
 *                  +-------------------------------------------------+
 *                  v                                                 |
 *      +-------> TEXT --wrapper--> WRAPPER --invoke, param--> CANDIDATE <--> VALUE, JSON, NESTED
 *      |          | \--bare invoke, param--------------------^   |
 *      |          |                   | known word + invoke      | gates passed: a call
 *      |          |                   v                          v
 *      |          |     BLOCK <--> CALL <--> VALUE, JSON, NESTED  TEXT (content)
 *      |          |       | wrapper closer
 *      +----------|-------+
 *                 +--turn marker, stop string--> ENDED <-- end of stream, from everywhere
 *
 * VALUE, JSON and NESTED serve both a strict call and a candidate: `holder` says which. */
#ifndef DS4_ROUTER_PARSE_STATE_H
#define DS4_ROUTER_PARSE_STATE_H

#include "common/buf.h"
#include "router/parse/args.h"
#include "router/parse/event.h"
#include "router/parse/marker.h"
#include "router/parse/schema.h"
#include "router/parse/stop.h"
#include "router/parse/stream.h"

enum ds4_parse_state {
    DS4_STATE_TEXT,         /* reasoning or content */
    DS4_STATE_WRAPPER,      /* behind a wrapper opener: what follows decides */
    DS4_STATE_CANDIDATE,    /* bare call, between its parameters; nothing is emitted */
    DS4_STATE_BLOCK,        /* strict block, between invokes */
    DS4_STATE_CALL,         /* strict call, between parameters */
    DS4_STATE_VALUE,        /* inside a parameter's value */
    DS4_STATE_JSON,         /* inside a {...} body that stands for the parameters */
    DS4_STATE_NESTED,       /* inside an object parameter, between its members */
    DS4_STATE_NESTED_VALUE, /* inside a member's value */
    DS4_STATE_ENDED,        /* the message is over; further text is ignored */
};

/* Where the next text goes if it is plain (direct.c).  Unless it is NOT, the buffer holds nothing but the
 * beginning of a tag ('<' or '</') or, in a string, a newline; a channel may hold a newline instead; in a
 * hoard the buffer has the text so far. */
enum ds4_quiet {
    DS4_QUIET_NOT, /* the machine must see it */
    DS4_QUIET_TEXT,
    DS4_QUIET_STRING, /* of a call whose arguments stream */
    DS4_QUIET_HOARD,  /* a value that is needed whole */
};

enum ds4_step {
    DS4_STEP_AGAIN, /* progress was made: look again */
    DS4_STEP_WAIT,  /* more text is needed */
};

enum ds4_channel_kind { DS4_CHANNEL_REASONING, DS4_CHANNEL_CONTENT, DS4_N_CHANNELS };

struct ds4_channel {
    struct ds4_buf hold; /* blanks that are text only if more text follows */
    bool blank;          /* content: nothing but blanks since the start or the last call */
    bool empty;          /* nothing emitted yet */
    char last;           /* last byte emitted */
    bool fence_open;     /* odd number of lines that start with three backticks */
    int line_ticks; /* backticks at the start of the current line; -1: the line began otherwise */
    const char *pseudo_left; /* what a pseudo tag at the end of the text lacks; NULL: none there */
};

/* What the last thing emitted was, blanks aside: decides whether a wrapper closer is text. */
enum ds4_last_emitted { DS4_LAST_OTHER, DS4_LAST_REJECTED };

struct ds4_wrapper {
    size_t begin, end;
    bool dsml;  /* not the plain XML form */
    bool known; /* exact prefix and a known word: needs no gate */
    bool exact; /* the very spelling of the release */
};

enum ds4_candidate_kind {
    DS4_CANDIDATE_INVOKE,
    DS4_CANDIDATE_FUSED,    /* <parameter name="a_tool">: really the invoke opener */
    DS4_CANDIDATE_HEADLESS, /* the first parameter of a call without opener */
};

struct ds4_candidate {
    enum ds4_candidate_kind kind;
    size_t begin;      /* of the wrapper if there is one, else of the opener */
    size_t opener_end; /* text behind it is scanned again after a release */
    bool wrapper_dsml; /* a DSML wrapper was swallowed */
    bool opener_plain;
    bool opener_invoke; /* the opener tag is an invoke, not a parameter */
    bool at_line_start;
    bool has_json;  /* json_at, json_len: the body is this object */
    bool saw_value; /* a parameter, bare value or JSON body has been read */
    bool ambiguous; /* a bare value that no parameter can take */
    size_t json_at, json_len;
    enum ds4_string_attr bare_string; /* of a FUSED opener */
    const struct ds4_tool *tool;      /* NULL for HEADLESS */
};

enum ds4_call_mode {
    DS4_CALL_STREAM,   /* announced; parameters go out as they come */
    DS4_CALL_HELD,     /* announced; the first parameter may stand for the whole object */
    DS4_CALL_NAMELESS, /* collected; announced at its end if one tool fits */
    DS4_CALL_DONE,     /* a JSON body was the arguments; further parameters are ignored */
};

struct ds4_call {
    enum ds4_call_mode mode;
    uint32_t index;
    bool fresh;    /* nothing but blanks since the opener */
    bool has_json; /* nameless: its JSON body waits in `junk`, the keys in `args` */
    size_t n_written;
    const struct ds4_tool *tool; /* NULL if undeclared or nameless */
};

enum ds4_holder { DS4_HOLDER_CALL, DS4_HOLDER_CANDIDATE };

/* The parameter whose value is being read. */
struct ds4_param {
    struct ds4_buf name;
    enum ds4_arg_form form;
    bool plain;    /* plain closers end it, too */
    bool nameless; /* its value is dropped */
    bool bare;     /* the value right behind a FUSED opener */
    bool streamed; /* goes out while it is read */
    bool opened;   /* streamed: key and quote are out */
    size_t begin;
};

struct ds4_stream {
    const struct ds4_parse_config *config;
    struct ds4_events *out; /* only during feed and finish */
    struct ds4_tool *tools; /* the declared ones with a name */
    size_t n_tools;
    struct ds4_marker_rules rules;
    size_t hold_max_bytes;

    struct ds4_buf in; /* text from `base` on */
    size_t base;
    size_t pos;
    size_t scan;
    bool turn_over; /* a turn marker has ended the message */
    bool cut_short; /* the stream ends because of the length limit */
    bool failed;    /* memory ran out */

    enum ds4_quiet quiet;
    unsigned loud;    /* classes of bytes that are not plain there */
    unsigned escaped; /* and of bytes that go out otherwise: escaped, or after a wait */
    enum ds4_event_kind quiet_kind; /* of the event that quiet text goes to */
    size_t quiet_room;              /* a hoard may grow by so much */

    enum ds4_parse_state state;
    enum ds4_channel_kind channel;
    struct ds4_channel channels[DS4_N_CHANNELS];
    struct ds4_stop stop;
    struct ds4_buf stop_held; /* content that may be the beginning of a stop string */
    bool stop_hit;
    struct ds4_str stop_text; /* the string that was hit */
    bool pseudo_tag;          /* the text holds something like a call */

    size_t n_text_invokes; /* openers that became text and may have closers */
    size_t n_text_params;
    size_t n_text_wrappers;
    enum ds4_last_emitted last;
    bool wait_closer; /* a recovered call's outer closer may still come */
    bool called;      /* a call has started in this turn */

    struct ds4_wrapper wrapper;
    struct ds4_candidate candidate;
    /* Parameters before this offset (DSML, plain) lead to the same dead end as an earlier candidate. */
    size_t doomed_until[2];
    enum ds4_holder holder;
    struct ds4_call call;
    struct ds4_param param;  /* on the top level */
    struct ds4_param member; /* inside an object parameter */
    struct ds4_args args;    /* of a candidate, or of a call that is not streamed */
    struct ds4_args seen;    /* names of a streamed call */
    struct ds4_args members; /* of an object parameter */
    struct ds4_buf text;     /* scratch: JSON on its way out */
    struct ds4_buf object;   /* scratch: JSON of an object parameter */
    struct ds4_buf junk;     /* text between the invokes of a block */
    uint32_t n_calls;        /* announced */
    uint32_t n_complete;
    bool incomplete; /* a call was cut */
    uint64_t rules_used[DS4_N_PARSE_RULES];
};

static inline const char *ds4_state_at(const struct ds4_stream *s, size_t offset)
{
    return s->in.ptr + (offset - s->base);
}

static inline size_t ds4_state_end(const struct ds4_stream *s)
{
    return s->base + s->in.len;
}

static inline struct ds4_str ds4_state_view(const struct ds4_stream *s, size_t from, size_t to)
{
    return (struct ds4_str){s->in.ptr == NULL ? "" : ds4_state_at(s, from), to - from};
}

static inline void ds4_state_consume(struct ds4_stream *s, size_t to)
{
    s->pos = s->scan = to;
}

static inline bool ds4_state_is_blank(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* Moves scan over blanks; false if the text ends there. */
static inline bool ds4_state_skip_blanks(struct ds4_stream *s)
{
    size_t end = ds4_state_end(s);

    while (s->scan < end && ds4_state_is_blank(*ds4_state_at(s, s->scan)))
        s->scan++;
    return s->scan < end;
}

/* The tag at offset `at`, where a '<' stands. */
static inline enum ds4_marker_status ds4_state_marker(const struct ds4_stream *s, size_t at,
                                                      struct ds4_marker *out)
{
    return ds4_marker_scan(ds4_state_view(s, at, ds4_state_end(s)), &s->rules, out);
}

static inline void ds4_state_count(struct ds4_stream *s, enum ds4_parse_rule rule)
{
    s->rules_used[rule]++;
}

/* direct.c: reads what can be read where it lies, without the buffer; returns the rest. */
struct ds4_str ds4_direct_read(struct ds4_stream *s, struct ds4_str text);
/* The same for the most frequent cases alone, unless s->quiet says NOT; false: nothing was done.  `slack`: as
 * for ds4_stream_feed_token. */
bool ds4_direct_quick(struct ds4_stream *s, struct ds4_str text, unsigned classes, bool slack,
                      struct ds4_events *out);
/* To be called when the state has changed: sets s->quiet. */
void ds4_direct_settle(struct ds4_stream *s);

/* stream.c: the declared tool of that name, or NULL; announcing and closing calls. */
const struct ds4_tool *ds4_state_find_tool(const struct ds4_stream *s, struct ds4_str name);
uint32_t ds4_state_announce(struct ds4_stream *s, struct ds4_str name);
/* The message ends here as if an end token had come; what follows is ignored. */
void ds4_state_end_turn(struct ds4_stream *s);

/* reasoning.c: the two text channels. */
void ds4_channel_init(struct ds4_stream *s);
/* A new turn: what the channels hold goes out, both begin anew. */
void ds4_channel_restart(struct ds4_stream *s);
void ds4_channel_deinit(struct ds4_stream *s);
/* Text of the current channel; may end the message (stop string). */
void ds4_channel_text(struct ds4_stream *s, struct ds4_str text);
/* Text that is content whatever it looks like, blanks included. */
void ds4_channel_raw(struct ds4_stream *s, struct ds4_str text);
/* Text on its way out is looked at for pseudo tags; pseudo_left is this after a '<'. */
extern const char ds4_pseudo_after_lt[];
/* No pseudo tag goes on with `rest` behind '<'. */
bool ds4_pseudo_refuted(struct ds4_str rest);
void ds4_channel_suspect(struct ds4_stream *s, struct ds4_channel *ch, struct ds4_str text);
void ds4_channel_open_think(struct ds4_stream *s);
void ds4_channel_close_think(struct ds4_stream *s);
/* A call starts: held blanks are syntax, reasoning is over. */
void ds4_channel_start_call(struct ds4_stream *s);
/* Markup vanished: the newlines held before it go, too. */
void ds4_channel_drop_newlines(struct ds4_stream *s);
/* The same for all blanks of the content since the last call. */
void ds4_channel_drop_blanks(struct ds4_stream *s);
bool ds4_channel_at_line_start(const struct ds4_stream *s);
void ds4_channel_finish(struct ds4_stream *s);

/* dsml_repair.c: everything tolerated outside a strict block. */
void ds4_repair_start_wrapper(struct ds4_stream *s, const struct ds4_marker *m);
enum ds4_step ds4_repair_wrapper(struct ds4_stream *s);
/* `m` stands at offset `at`; with_wrapper: s->wrapper was read before it. */
void ds4_repair_start_candidate(struct ds4_stream *s, const struct ds4_marker *m, size_t at,
                                bool with_wrapper);
enum ds4_step ds4_repair_candidate(struct ds4_stream *s);
/* The body is no call: its opener becomes text, scanning continues behind it. */
void ds4_repair_release(struct ds4_stream *s, enum ds4_parse_rule why);
/* The stream ends inside a candidate or behind a wrapper opener. */
void ds4_repair_end(struct ds4_stream *s);

/* dsml.c: the strict grammar. */
void ds4_dsml_start_block(struct ds4_stream *s);
enum ds4_step ds4_dsml_block(struct ds4_stream *s);
enum ds4_step ds4_dsml_call(struct ds4_stream *s);
/* A complete parameter of a call that collects or writes whole values. */
void ds4_dsml_take_param(struct ds4_stream *s, struct ds4_str text, enum ds4_arg_form form);
void ds4_dsml_take_json(struct ds4_stream *s, struct ds4_str text);
/* The stream ends inside a block or call. */
void ds4_dsml_end(struct ds4_stream *s);
/* The open call stays incomplete and ends the message. */
void ds4_dsml_cut_call(struct ds4_stream *s);

/* dsml_value.c: parameters and their values. */
void ds4_value_start(struct ds4_stream *s, const struct ds4_marker *m, size_t begin);
/* The value at scan has no tag of its own: it belongs to the parameter `name`. */
void ds4_value_start_bare(struct ds4_stream *s, struct ds4_str name, enum ds4_string_attr string);
enum ds4_step ds4_value_read(struct ds4_stream *s);
enum ds4_step ds4_value_nested(struct ds4_stream *s);
enum ds4_step ds4_value_json(struct ds4_stream *s);

#endif

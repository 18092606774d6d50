/* What a running answer does when a tripwire of parse/loop_guard.h fires: which text the guard sees,
 * which tokens are taken back, what is spliced in, and when the turn ends instead.
 *
 * Tokens reach the client as soon as they are parsed, so what can be taken back is the beginning of a
 * tag that the parser still holds, and tokens of the same record that it has not seen.
 *
 * Text sent stays sent.  The spliced tokens are the model's to read and nobody else's: they are no
 * completion tokens and never reach the parser. */
#ifndef DS4_ROUTER_RECOVERY_H
#define DS4_ROUTER_RECOVERY_H

#include "common/err.h"
#include "router/parse/loop_guard.h"
#include "router/text/vocab.h"

#include <stdbool.h>
#include <stdint.h>

struct ds4_bpe;
struct ds4_events;
struct ds4_stream;

/* Shared by all requests. */
struct ds4_recovery {
    struct ds4_loop_knobs knobs;
    struct ds4_bpe *bpe;    /* borrowed; counts tokens of suspicious lines */
    struct ds4_ids text[2]; /* owned: what is spliced in outside and inside of thinking mode */
    int32_t max_tok;        /* the longer of them */
};

/* Encodes what the knobs' mode splices in: a nudge as plain text, a reopened turn with its specials.
 * `text` replaces the built-in text unless it is empty. */
int ds4_recovery_init(struct ds4_recovery *recovery, const struct ds4_loop_knobs *knobs,
                      struct ds4_str text, struct ds4_bpe *bpe, struct ds4_err *err) DS4_MUST_CHECK;
void ds4_recovery_deinit(struct ds4_recovery *recovery);
/* Positions that the splices of one turn can take. */
int32_t ds4_recovery_room(const struct ds4_recovery *recovery);

#define DS4_WATCH_TAIL_TOK 16 /* an unclosed tag has at most so many tokens */

/* One turn under watch.  Owns its window; borrows the rest. */
struct ds4_watch {
    const struct ds4_recovery *recovery;
    struct ds4_loop_guard guard;
    bool thinking;                           /* the turn began inside a think block */
    uint32_t tail_bytes[DS4_WATCH_TAIL_TOK]; /* raw text of the newest tokens, a ring */
    uint64_t n_seen;
    struct ds4_trip last; /* the newest trip */
};

void ds4_watch_init(struct ds4_watch *watch, const struct ds4_recovery *recovery, bool thinking);
void ds4_watch_deinit(struct ds4_watch *watch);

/* What the parser had said before a token was fed. */
struct ds4_watch_mark {
    size_t n_event;
    size_t n_text;
    bool is_text; /* it was in reasoning or content, outside a code fence */
};
struct ds4_watch_mark ds4_watch_before(const struct ds4_stream *parser,
                                       const struct ds4_events *events);
/* The token is fed; raw_bytes is its text's length.  *fired: watch->last says what. */
int ds4_watch_after(struct ds4_watch *watch, const struct ds4_watch_mark *mark, size_t raw_bytes,
                    const struct ds4_stream *parser, const struct ds4_events *events, bool *fired,
                    struct ds4_err *err) DS4_MUST_CHECK;

/* What to do about watch->last. */
struct ds4_splice {
    enum ds4_recovery_mode mode; /* OFF: end the turn */
    const struct ds4_ids *text;
    int32_t n_drop; /* newest tokens whose whole text the parser held: taken back */
};
/* Takes one recovery from the turn's budget if there is one and makes the parser ready for what the
 * model says next. */
int ds4_watch_recover(struct ds4_watch *watch, struct ds4_stream *parser, struct ds4_events *events,
                      struct ds4_splice *splice, struct ds4_err *err) DS4_MUST_CHECK;

/* "control_soup" | "repeat_line" | "fuzzy_phrase": metric label and ds4.repetition.detector. */
const char *ds4_trip_text(enum ds4_trip_kind kind);

#endif

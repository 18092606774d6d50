/* Repetition tripwires: three ways in which a turn degenerates, seen in the text of its last tokens.
 *
 *   soup    invented control tags (`<reference`, `<call `, ...) in block after block
 *   exact   one short line again and again
 *   fuzzy   many lines with the same opening words and one topic word ("Let me check the repro.")
 *
 * The detectors are pure functions of a window of text.  struct ds4_loop_guard adds what a sequence
 * must remember: the window, and how many blocks in a row have hit.  It decides nothing about the
 * sequence; splicing a nudge or ending the turn is the scheduler's business.
 *
 * Only text that the parser calls reasoning or content belongs in here, outside code fences and never
 * arguments: a file full of "}," lines trips the exact detector (see ds4_stream_place). */
#ifndef DS4_ROUTER_PARSE_LOOP_GUARD_H
#define DS4_ROUTER_PARSE_LOOP_GUARD_H

#include "common/buf.h"
#include "common/err.h"
#include "common/str.h"
#include "common/vec.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DS4_SOUP_MAX_SIGNATURES 23 /* 20 and 3 optional ones */

enum ds4_recovery_mode {
    DS4_RECOVERY_OFF,
    DS4_RECOVERY_NUDGE,  /* append the nudge text, the turn goes on */
    DS4_RECOVERY_REOPEN, /* end the turn and open a new one in the same request */
};

struct ds4_loop_knobs {
    bool soup;
    bool soup_optional; /* the three optional signatures, too */
    int32_t soup_streak;
    int32_t soup_total;
    bool repetition;
    int32_t block_tok;  /* tokens between two looks */
    int32_t window_tok; /* what the line detectors see, at least */
    int32_t streak;     /* blocks in a row that fire */
    bool fuzzy;
    int32_t fuzzy_min_lines;
    int32_t fuzzy_min_hits;
    int32_t fuzzy_prefix_words;
    double fuzzy_overlap;
    enum ds4_recovery_mode recovery;
    int32_t recovery_max; /* per turn */
};

void ds4_loop_knobs_default(struct ds4_loop_knobs *knobs);

/* ---- detectors ------------------------------------------------------------------------------ */

/* The signatures, their optional part behind the others; n_signatures counts both. */
const struct ds4_str *ds4_soup_signatures(size_t *n_signatures, size_t *n_optional);
/* Bit i is set if signature i is in the window; `n_signatures` of the list are looked for. */
uint32_t ds4_soup_find(struct ds4_str window, size_t n_signatures);

/* Tokens of a text; for the rule that an exact hit has at most six. */
typedef size_t (*ds4_count_tokens_fn)(void *ctx, struct ds4_str text);

/* The line that occurs most often, if it occurs at least five times, has at most 28 characters and six
 * tokens; an empty view if there is none.  The view lies in `window`. */
struct ds4_str ds4_exact_find(struct ds4_str window, ds4_count_tokens_fn count_tokens, void *ctx);

struct ds4_fuzzy_hit {
    bool hit;
    char prefix[64];  /* the shared opening, lower case; cut if longer */
    size_t top_count; /* lines with the most frequent topic word */
    size_t n_lines;   /* lines with this opening */
};
struct ds4_fuzzy_hit ds4_fuzzy_find(struct ds4_str window, const struct ds4_loop_knobs *knobs);

/* ---- a sequence ----------------------------------------------------------------------------- */

enum ds4_trip_kind {
    DS4_TRIP_NONE,
    DS4_TRIP_SOUP,
    DS4_TRIP_EXACT,
    DS4_TRIP_FUZZY,
};

struct ds4_trip {
    enum ds4_trip_kind kind;
    char evidence[64]; /* the signature, the line or the opening */
};

/* Owns its window; borrows knobs and ctx for its life. */
struct ds4_loop_guard {
    const struct ds4_loop_knobs *knobs;
    ds4_count_tokens_fn count_tokens;
    void *ctx;
    struct ds4_buf text;           /* of the last tokens */
    DS4_VEC(uint32_t) token_bytes; /* of each token in text */
    int32_t n_new;                 /* tokens since the last look */
    int32_t soup_streak[DS4_SOUP_MAX_SIGNATURES];
    int32_t soup_total[DS4_SOUP_MAX_SIGNATURES];
    int32_t line_streak; /* blocks in a row with an exact or fuzzy hit */
    int32_t n_recovered;
};

void ds4_loop_guard_init(struct ds4_loop_guard *guard, const struct ds4_loop_knobs *knobs,
                         ds4_count_tokens_fn count_tokens, void *ctx);
void ds4_loop_guard_deinit(struct ds4_loop_guard *guard);

/* One generated token and the visible text it released (which may be empty).  Looks every block_tok
 * tokens; trip->kind is DS4_TRIP_NONE unless a tripwire fires now.  0, or -1 DS4_E_NOMEM. */
int ds4_loop_guard_add(struct ds4_loop_guard *guard, struct ds4_str text, struct ds4_trip *trip,
                       struct ds4_err *err) DS4_MUST_CHECK;
/* Looks at the tokens since the last look: at the end of the text. */
void ds4_loop_guard_look(struct ds4_loop_guard *guard, struct ds4_trip *trip);

/* Takes one recovery from the turn's budget, empties the window and resets the streaks (totals stay).
 * DS4_RECOVERY_OFF: recovery is off or used up, end the turn. */
enum ds4_recovery_mode ds4_loop_guard_recover(struct ds4_loop_guard *guard);

/* What is spliced in; `thinking` is the current mode of the conversation. */
struct ds4_str ds4_recovery_text(enum ds4_recovery_mode mode, bool thinking);

#endif

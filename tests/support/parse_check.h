/* What must hold of the output parser for any text and any way of cutting it. */
#ifndef DS4_TESTS_SUPPORT_PARSE_CHECK_H
#define DS4_TESTS_SUPPORT_PARSE_CHECK_H

#include "router/parse/stream.h"
#include "router/parse/turn.h"

/* Parses `text` (valid UTF-8) as one piece into `turn`, which the caller has initialised. */
int parse_check_whole(const struct ds4_parse_config *config, struct ds4_str text,
                      enum ds4_engine_finish engine, struct ds4_turn *turn);

/* Parses `text` whole and in pieces drawn from `seed`.  NULL if
 *   - both give the same reasoning, content, calls and finish,
 *   - after every piece the values so far are prefixes of the final ones,
 *   - the arguments of every complete call are one JSON object,
 *   - no complete call is left in the content (parse_check_leak);
 * else what is wrong, as static text. */
const char *parse_check(const struct ds4_parse_config *config, struct ds4_str text,
                        enum ds4_engine_finish engine, uint64_t seed);

/* Feeds the same random pieces to two parsers, one of which may take no short way (machine_only), now and
 * then takes undecided text back or reopens the turn, and finishes.  NULL if after every piece both have
 * said the very same events, wait in the same place for as much text and have counted the same; else what
 * differs, as static text. */
const char *parse_check_direct(const struct ds4_parse_config *config, struct ds4_str text,
                               enum ds4_engine_finish engine, uint64_t seed);

/* A call that the model wrote in one piece must not be left in the content: from an opener to the next
 * closer, as it stood in the text, and still a call where it stands now.  (What was taken out between
 * two pieces may make them look like one: that is no leak.)  NULL, or what is wrong. */
const char *parse_check_leak(const struct ds4_parse_config *config, struct ds4_str text,
                             struct ds4_str content);

/* Three tools: bash (command, timeout; command required), edit (path, edits, opt; path required) and
 * now (nothing). */
extern const struct ds4_parse_tool parse_check_tools[3];

/* The result of `text` in content with these tools, on one line:
 * "reasoning|content|name(arguments)...|finish"; an incomplete call ends in "(arguments...". The answer is
 * static storage, overwritten by the next call.  `rules` (may be NULL) gets the counters. */
const char *parse_check_read(const char *text, enum ds4_engine_finish engine,
                             uint64_t rules[DS4_N_PARSE_RULES]);

/* splitmix64. */
uint64_t parse_check_random(uint64_t *state);
/* A `random` for struct ds4_parse_config; ctx is a uint64_t. */
void parse_check_fill(void *ctx, void *out, size_t n);

#endif

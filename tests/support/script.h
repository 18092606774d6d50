/* What a scripted stage says: a JSON file of rules, the first that fits a prompt speaks.
 *
 *   {"never_ready": false,        // answers no FORM: the cluster stays in its formation
 *    "ms_per_ktok": 0,            // time a prompt takes
 *    "celsius": 0,                // above 0: the stage has a card of this temperature, slowed by heat from 85 on
 *    "rules": [{
 *      "contains": "...",         // the prompt has this text
 *      "lacks": "...",            // and not this one
 *      "last": "...",             // this one stands after the last user marker
 *      "turn": 2,                 // so many assistant markers: the model's second turn
 *      "times": 1,                // the rule is used up after so many prompts
 *      "thinking": "...",         // said first where the prompt opened the think block, which is then closed
 *      "text": "...",             // {turn} becomes the number of the turn; markup becomes its tokens
 *      "raw": false,              // true: `text` alone is said, whether a think block is open or not
 *      "repeat": false,           // true: over and over, without an end
 *      "prefill_ms": 0, "step_ms": 0,  // besides ms_per_ktok; of every token
 *      "die_at": 0,               // the process kills itself before token n of the answer; 0 = in prefill
 *      "hang_at": 0,              // it never answers the step of token n
 *      "nan_at": 0}]}             // the row of token n is not finite
 *
 * All members are optional.  Where no rule fits, the stage says "ok". */
#ifndef DS4_TESTS_SUPPORT_SCRIPT_H
#define DS4_TESTS_SUPPORT_SCRIPT_H

#include "common/buf.h"
#include "common/err.h"
#include "common/json.h"
#include "common/str.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DS4_SCRIPT_NEVER INT64_MAX

struct ds4_script_rule {
    struct ds4_str contains, lacks, last; /* empty = fits */
    int64_t turn;                         /* 0 = any */
    int64_t times;                        /* left */
    struct ds4_str thinking, text;
    bool raw, repeat;
    int64_t prefill_ms, step_ms;
    int64_t die_at, hang_at, nan_at; /* DS4_SCRIPT_NEVER */
};

struct ds4_script {
    struct ds4_json *doc; /* owns the rules' texts */
    struct ds4_script_rule *rule;
    size_t n_rule;
    bool never_ready;
    int64_t ms_per_ktok;
    int64_t celsius;
};

/* -1 with DS4_E_IO or DS4_E_INVALID naming the member; unknown members are refused. */
int ds4_script_load(struct ds4_script *script, const char *path,
                    struct ds4_err *err) DS4_MUST_CHECK;
int ds4_script_parse(struct ds4_script *script, struct ds4_str text,
                     struct ds4_err *err) DS4_MUST_CHECK;
void ds4_script_deinit(struct ds4_script *script);

/* The rule for a prompt as text, special tokens included; one use of it is spent.  Never NULL. */
const struct ds4_script_rule *ds4_script_match(struct ds4_script *script, struct ds4_str prompt);

/* Appends what the rule says after this prompt, without an end marker. */
int ds4_script_say(const struct ds4_script_rule *rule, struct ds4_str prompt,
                   struct ds4_buf *out) DS4_MUST_CHECK;

#endif

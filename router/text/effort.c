/* Effort resolution.  Step 2 to 3 of the request path.
 *
 * On and off are settled first: the highest priority that says anything decides, and at equal priority
 * "off" wins; an effort counts as "on", the effort "none" as "off".  Then the effort is the first one
 * named, else what the token budget suggests, else the server's default.  Names outside the list are
 * errors, never a fallback: an agent whose effort is dropped drifts into loops without a trace. */
#include "router/text/effort.h"

#include <inttypes.h>
#include <stdio.h>

#define BUDGET_LOW_BELOW  4096  /* reasoning tokens below which a budget means low */
#define BUDGET_HIGH_BELOW 24576 /* ... and below which it means high */
#define MAX_NUMBER        100
#define NUMBER_DIGITS     3

#define VALID_WORDS "none, minimal, low, medium, high, xhigh, max, ultra"

static const struct {
    struct ds4_str word;
    enum ds4_effort_level level; /* UNSET = off */
} words[] = {
    {DS4_STR("none"), DS4_EFFORT_UNSET}, {DS4_STR("minimal"), DS4_EFFORT_LOW},
    {DS4_STR("low"), DS4_EFFORT_LOW},    {DS4_STR("medium"), DS4_EFFORT_HIGH},
    {DS4_STR("high"), DS4_EFFORT_HIGH},  {DS4_STR("xhigh"), DS4_EFFORT_HIGH},
    {DS4_STR("max"), DS4_EFFORT_MAX},    {DS4_STR("ultra"), DS4_EFFORT_MAX},
};

#define N_WORD (sizeof(words) / sizeof(words[0]))

static bool is_absent(const struct ds4_jt_node *value)
{
    return value == NULL || value->type == DS4_JT_NULL;
}

/* A JSON integer without sign, fraction or exponent, at most `digits` long; -1 otherwise. */
static int64_t plain_integer(const struct ds4_jt_node *value, size_t digits)
{
    int64_t n = 0;

    if (value->type != DS4_JT_NUMBER || value->raw.len > digits)
        return -1;
    for (size_t i = 0; i < value->raw.len; i++) {
        if (value->raw.ptr[i] < '0' || value->raw.ptr[i] > '9')
            return -1;
        n = n * 10 + (value->raw.ptr[i] - '0');
    }
    return n;
}

static int read_value(const struct ds4_jt_node *value, enum ds4_release release,
                      struct ds4_effort_value *out, struct ds4_err *err)
{
    const char *numbers = release == DS4_RELEASE_V41 ? ", or 1 to 100" : "";

    *out = (struct ds4_effort_value){0};
    if (value->type == DS4_JT_STRING) {
        for (size_t w = 0; w < N_WORD; w++) {
            if (ds4_str_equal(value->str, words[w].word)) {
                out->word = words[w].word;
                return 0;
            }
        }
        return ds4_fail(err, DS4_E_INVALID, "effort \"%.*s\" is unknown, must be one of %s%s",
                        (int)(value->str.len < 32 ? value->str.len : 32), value->str.ptr,
                        VALID_WORDS, numbers);
    }
    if (value->type == DS4_JT_NUMBER && release == DS4_RELEASE_V41) {
        int64_t n = plain_integer(value, NUMBER_DIGITS);

        if (n >= 1 && n <= MAX_NUMBER) {
            out->number = (int32_t)n;
            return 0;
        }
    }
    return ds4_fail(err, DS4_E_INVALID, "effort must be one of %s%s", VALID_WORDS, numbers);
}

int ds4_effort_add_value(struct ds4_effort_wish *wish, enum ds4_effort_priority priority,
                         const struct ds4_jt_node *value, enum ds4_release release,
                         struct ds4_err *err)
{
    struct ds4_effort_value read;
    bool none;

    if (is_absent(value))
        return 0;
    if (read_value(value, release, &read, err))
        return -1;
    none = ds4_str_equal(read.word, words[0].word);
    ds4_effort_add_switch(wish, priority, !none);
    if (!wish->has_first)
        wish->first = read;
    wish->has_first = true;
    if (!none && !wish->has_level) {
        wish->level = read;
        wish->has_level = true;
    }
    return 0;
}

void ds4_effort_add_switch(struct ds4_effort_wish *wish, enum ds4_effort_priority priority, bool on)
{
    if (on)
        wish->on[priority] = true;
    else
        wish->off[priority] = true;
}

int ds4_effort_add_budget(struct ds4_effort_wish *wish, const struct ds4_jt_node *value,
                          struct ds4_err *err)
{
    int64_t n;

    if (is_absent(value))
        return 0;
    n = plain_integer(value, 9);
    if (n < 0)
        return ds4_fail(err, DS4_E_INVALID, "a token budget must be a whole number");
    if (!wish->has_budget)
        wish->budget_tok = n;
    wish->has_budget = true;
    return 0;
}

int ds4_effort_add_thinking(struct ds4_effort_wish *wish, enum ds4_effort_priority priority,
                            const struct ds4_jt_node *value, bool object_too, struct ds4_err *err)
{
    const struct ds4_jt_node *type;

    if (is_absent(value))
        return 0;
    if (value->type == DS4_JT_TRUE || value->type == DS4_JT_FALSE) {
        ds4_effort_add_switch(wish, priority, value->type == DS4_JT_TRUE);
        return 0;
    }
    if (!object_too || value->type != DS4_JT_OBJECT)
        return ds4_fail(err, DS4_E_INVALID, "must be true or false%s",
                        object_too ? ", or an object with a type" : "");
    type = ds4_jt_find(value, "type");
    if (type == NULL || type->type != DS4_JT_STRING)
        return ds4_fail(err, DS4_E_INVALID, "type must be a string");
    if (ds4_str_equal(type->str, DS4_STR("enabled")))
        ds4_effort_add_switch(wish, priority, true);
    else if (ds4_str_equal(type->str, DS4_STR("disabled")))
        ds4_effort_add_switch(wish, priority, false);
    else if (!ds4_str_equal(type->str, DS4_STR("adaptive")) &&
             !ds4_str_equal(type->str, DS4_STR("auto")))
        return ds4_fail(err, DS4_E_INVALID, "type must be enabled, disabled, adaptive or auto");
    return ds4_effort_add_budget(wish, ds4_jt_find(value, "budget_tokens"), err);
}

void ds4_effort_add_model(struct ds4_effort_wish *wish, struct ds4_str model)
{
    if (ds4_str_ends(model, DS4_STR("-chat")) || ds4_str_ends(model, DS4_STR(":nothink")))
        ds4_effort_add_switch(wish, DS4_EFFORT_BY_MODEL, false);
    else if (ds4_str_ends(model, DS4_STR("-reasoner")) || ds4_str_ends(model, DS4_STR(":think")))
        ds4_effort_add_switch(wish, DS4_EFFORT_BY_MODEL, true);
    else if (ds4_str_ends(model, DS4_STR(":max"))) {
        ds4_effort_add_switch(wish, DS4_EFFORT_BY_MODEL, true);
        if (!wish->has_level)
            wish->level.word = DS4_STR("max");
        wish->has_level = true;
    }
}

static enum ds4_effort_level level_of(struct ds4_str word)
{
    for (size_t w = 0; w < N_WORD; w++)
        if (ds4_str_equal(word, words[w].word))
            return words[w].level;
    return DS4_EFFORT_UNSET;
}

int ds4_effort_parse_setting(struct ds4_str word, enum ds4_effort_setting *out)
{
    static const enum ds4_effort_setting settings[] = {
        [DS4_EFFORT_UNSET] = DS4_THINK_OFF,
        [DS4_EFFORT_LOW] = DS4_THINK_LOW,
        [DS4_EFFORT_HIGH] = DS4_THINK_HIGH,
        [DS4_EFFORT_MAX] = DS4_THINK_MAX,
    };
    bool off = ds4_str_equal(word, DS4_STR("off"));
    bool known = off;

    for (size_t w = 0; w < N_WORD; w++)
        known = known || ds4_str_equal(word, words[w].word);
    if (!known)
        return -1;
    *out = settings[level_of(word)];
    return 0;
}

static struct ds4_str word_of(enum ds4_effort_level level)
{
    switch (level) {
    case DS4_EFFORT_LOW:
        return DS4_STR("low");
    case DS4_EFFORT_HIGH:
        return DS4_STR("high");
    case DS4_EFFORT_MAX:
        return DS4_STR("max");
    default:
        return DS4_STR("none");
    }
}

static bool is_thinking(const struct ds4_effort_wish *wish, const struct ds4_effort_policy *policy)
{
    for (int p = 0; p < DS4_N_EFFORT_PRIORITY; p++) {
        if (wish->off[p])
            return false;
        if (wish->on[p])
            return true;
    }
    return policy->default_effort != DS4_THINK_OFF;
}

/* A server that does not think by default, asked to think without an effort, uses high. */
static enum ds4_effort_level default_level(const struct ds4_effort_policy *policy)
{
    switch (policy->default_effort) {
    case DS4_THINK_LOW:
        return DS4_EFFORT_LOW;
    case DS4_THINK_MAX:
        return DS4_EFFORT_MAX;
    default:
        return DS4_EFFORT_HIGH;
    }
}

static enum ds4_effort_level budget_level(int64_t budget_tok)
{
    if (budget_tok < BUDGET_LOW_BELOW)
        return DS4_EFFORT_LOW;
    return budget_tok < BUDGET_HIGH_BELOW ? DS4_EFFORT_HIGH : DS4_EFFORT_MAX;
}

struct ds4_effort ds4_effort_resolve(const struct ds4_effort_wish *wish,
                                     const struct ds4_effort_policy *policy)
{
    struct ds4_effort effort = {
        .thinking = is_thinking(wish, policy),
        .is_requested = wish->has_first,
        .requested = wish->first,
        .from_request = wish->has_first,
    };

    if (!effort.thinking) {
        effort.applied.word = DS4_STR("none");
        return effort;
    }
    if (wish->has_level && wish->level.number > 0) {
        effort.level = DS4_EFFORT_BUDGET;
        effort.budget = effort.applied.number = wish->level.number;
        return effort;
    }
    if (wish->has_level || wish->has_budget) {
        effort.from_request = true;
        effort.level =
            wish->has_level ? level_of(wish->level.word) : budget_level(wish->budget_tok);
    } else {
        effort.level = default_level(policy);
    }
    if (policy->release == DS4_RELEASE_V4_PREVIEW && effort.level == DS4_EFFORT_LOW)
        effort.level = DS4_EFFORT_HIGH; /* the same prompt: the preview has no low */
    if (effort.level == DS4_EFFORT_MAX && policy->context_tok < policy->max_min_context) {
        effort.level = DS4_EFFORT_HIGH;
        effort.downgraded = true;
        snprintf(effort.why, sizeof(effort.why), "context %" PRId64 " < %" PRId64,
                 policy->context_tok, policy->max_min_context);
    }
    effort.applied.word = word_of(effort.level);
    return effort;
}

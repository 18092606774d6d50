/* Rules of a scripted stage: reading, matching, what is said (see the header). */
#include "tests/support/script.h"

#include <stdio.h>
#include <stdlib.h>

#define MAX_FILE_BYTES (16u << 20)
#define MAX_RULES      10000
#define MAX_MS         INT64_C(3600000)
#define MAX_CELSIUS    INT64_C(1000)
#define MAX_TOKEN      INT64_C(1000000)

static const struct ds4_str user_mark = {"<｜User｜>", sizeof("<｜User｜>") - 1};
static const struct ds4_str assistant_mark = {"<｜Assistant｜>", sizeof("<｜Assistant｜>") - 1};
static const struct ds4_str think_open = {"<think>", sizeof("<think>") - 1};
static const struct ds4_str think_close = {"</think>", sizeof("</think>") - 1};
static const struct ds4_str turn_hole = {"{turn}", sizeof("{turn}") - 1};

static const struct ds4_script_rule fallback = {
    .text = {"ok", 2},
    .die_at = DS4_SCRIPT_NEVER,
    .hang_at = DS4_SCRIPT_NEVER,
    .nan_at = DS4_SCRIPT_NEVER,
};

static int read_rule(const struct ds4_json *at, const char *path, struct ds4_script_rule *rule,
                     struct ds4_err *err)
{
    *rule = fallback;
    rule->text = DS4_STR("");
    rule->times = INT64_MAX;
    if (ds4_json_get_str(at, path, "contains", &rule->contains, err) ||
        ds4_json_get_str(at, path, "lacks", &rule->lacks, err) ||
        ds4_json_get_str(at, path, "last", &rule->last, err) ||
        ds4_json_get_str(at, path, "thinking", &rule->thinking, err) ||
        ds4_json_get_str(at, path, "text", &rule->text, err) ||
        ds4_json_get_bool(at, path, "raw", &rule->raw, err) ||
        ds4_json_get_bool(at, path, "repeat", &rule->repeat, err) ||
        ds4_json_get_int(at, path, "turn", 1, MAX_TOKEN, &rule->turn, err) ||
        ds4_json_get_int(at, path, "times", 0, MAX_TOKEN, &rule->times, err) ||
        ds4_json_get_int(at, path, "prefill_ms", 0, MAX_MS, &rule->prefill_ms, err) ||
        ds4_json_get_int(at, path, "step_ms", 0, MAX_MS, &rule->step_ms, err) ||
        ds4_json_get_int(at, path, "die_at", 0, MAX_TOKEN, &rule->die_at, err) ||
        ds4_json_get_int(at, path, "hang_at", 0, MAX_TOKEN, &rule->hang_at, err) ||
        ds4_json_get_int(at, path, "nan_at", 0, MAX_TOKEN, &rule->nan_at, err))
        return -1;
    if (rule->repeat && rule->text.len == 0)
        return ds4_fail(err, DS4_E_INVALID, "%s repeats nothing", path);
    return 0;
}

/* A misspelt member would be a rule that silently does something else. */
static int refuse_unknown(const struct ds4_json *at, const char *path, const char *const *known,
                          struct ds4_err *err)
{
    for (struct ds4_json_member m = ds4_json_first(at); m.value != NULL; m = ds4_json_next(m)) {
        size_t k = 0;

        while (known[k] != NULL && !ds4_str_equal(m.key, ds4_str_view(known[k])))
            k++;
        if (known[k] == NULL)
            return ds4_fail(err, DS4_E_INVALID, "%s has an unknown member %.*s", path,
                            DS4_STR_ARG(m.key));
    }
    return 0;
}

static int read_rules(struct ds4_script *script, struct ds4_err *err)
{
    static const char *const known[] = {"contains", "lacks",  "last",    "turn",   "times",
                                        "thinking", "text",   "raw",     "repeat", "prefill_ms",
                                        "step_ms",  "die_at", "hang_at", "nan_at", NULL};
    const struct ds4_json *rules = NULL;

    if (ds4_json_get_array(script->doc, "", "rules", &rules, err) != 0)
        return -1;
    script->n_rule = ds4_json_len(rules);
    if (script->n_rule > MAX_RULES)
        return ds4_fail(err, DS4_E_INVALID, "%zu rules, at most %d", script->n_rule, MAX_RULES);
    script->rule = calloc(script->n_rule + 1, sizeof(*script->rule));
    if (script->rule == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for %zu rules", script->n_rule);
    for (size_t r = 0; r < script->n_rule; r++) {
        const struct ds4_json *at = ds4_json_at(rules, r);
        char path[32];

        (void)snprintf(path, sizeof(path), "rules[%zu]", r);
        if (ds4_json_type(at) != DS4_JSON_OBJECT)
            return ds4_fail(err, DS4_E_INVALID, "%s must be an object", path);
        if (refuse_unknown(at, path, known, err) || read_rule(at, path, &script->rule[r], err))
            return -1;
    }
    return 0;
}

int ds4_script_parse(struct ds4_script *script, struct ds4_str text, struct ds4_err *err)
{
    static const char *const known[] = {"never_ready", "ms_per_ktok", "celsius", "rules", NULL};

    *script = (struct ds4_script){.doc = ds4_json_parse(text, err)};
    if (script->doc == NULL)
        return -1;
    if (refuse_unknown(script->doc, "the script", known, err) ||
        ds4_json_get_bool(script->doc, "", "never_ready", &script->never_ready, err) ||
        ds4_json_get_int(script->doc, "", "ms_per_ktok", 0, MAX_MS, &script->ms_per_ktok, err) ||
        ds4_json_get_int(script->doc, "", "celsius", 0, MAX_CELSIUS, &script->celsius, err) ||
        read_rules(script, err)) {
        ds4_script_deinit(script);
        return -1;
    }
    return 0;
}

int ds4_script_load(struct ds4_script *script, const char *path, struct ds4_err *err)
{
    FILE *file = fopen(path, "re");
    struct ds4_buf text;
    char part[4096];
    size_t n;
    int rc = -1;

    if (file == NULL)
        return ds4_fail(err, DS4_E_IO, "could not open %s", path);
    ds4_buf_init(&text, MAX_FILE_BYTES);
    while ((n = fread(part, 1, sizeof(part), file)) > 0)
        (void)ds4_buf_append(&text, part, n);
    if (ferror(file))
        (void)ds4_fail(err, DS4_E_IO, "could not read %s", path);
    else if (ds4_buf_check(&text, path, err) == 0)
        rc = ds4_script_parse(script, ds4_buf_view(&text), err);
    ds4_buf_deinit(&text);
    fclose(file);
    return rc;
}

void ds4_script_deinit(struct ds4_script *script)
{
    free(script->rule);
    ds4_json_free(script->doc);
    *script = (struct ds4_script){0};
}

static int64_t count(struct ds4_str text, struct ds4_str needle)
{
    int64_t n = 0;
    size_t at = 0;

    while ((at = ds4_str_find(text, needle, at)) != DS4_STR_NONE) {
        n++;
        at += needle.len;
    }
    return n;
}

static struct ds4_str after_last_user(struct ds4_str prompt)
{
    size_t from = 0, at;

    while ((at = ds4_str_find(prompt, user_mark, from)) != DS4_STR_NONE)
        from = at + user_mark.len;
    return ds4_str_skip(prompt, from);
}

static bool has(struct ds4_str text, struct ds4_str needle)
{
    return ds4_str_find(text, needle, 0) != DS4_STR_NONE;
}

const struct ds4_script_rule *ds4_script_match(struct ds4_script *script, struct ds4_str prompt)
{
    struct ds4_str last = after_last_user(prompt);
    int64_t turn = count(prompt, assistant_mark);

    for (size_t r = 0; r < script->n_rule; r++) {
        struct ds4_script_rule *rule = &script->rule[r];

        if (rule->times == 0 || (rule->turn != 0 && rule->turn != turn) ||
            !has(prompt, rule->contains) || !has(last, rule->last) ||
            (rule->lacks.len > 0 && has(prompt, rule->lacks)))
            continue;
        rule->times--;
        return rule;
    }
    return &fallback;
}

static void fill_turn(struct ds4_buf *out, struct ds4_str text, int64_t turn)
{
    size_t at;

    while ((at = ds4_str_find(text, turn_hole, 0)) != DS4_STR_NONE) {
        (void)ds4_buf_append_str(out, ds4_str_head(text, at));
        (void)ds4_buf_appendf(out, "%lld", (long long)turn);
        text = ds4_str_skip(text, at + turn_hole.len);
    }
    (void)ds4_buf_append_str(out, text);
}

int ds4_script_say(const struct ds4_script_rule *rule, struct ds4_str prompt, struct ds4_buf *out)
{
    int64_t turn = count(prompt, assistant_mark);

    if (!rule->raw && ds4_str_ends(prompt, think_open)) {
        fill_turn(out, rule->thinking, turn);
        (void)ds4_buf_append_str(out, think_close);
    }
    fill_turn(out, rule->text, turn);
    return out->failed ? -1 : 0;
}

/* Step 14: the three detectors behind the loop guard, and their word lists.
 *
 * Pure functions of one window, a few hundred bytes to a few kilobytes long; they run once per block
 * of tokens.  Lines and words are views into the window; hashing is not worth it at this size, but
 * the lists are sorted so that a pathological window stays n log n.  Signatures, stop words and
 * thresholds are those of the field-tested launcher of the CMP 170HX project; see the test that
 * compares them with the vectors. */
#include "router/parse/loop_guard.h"

#include <stdio.h>
#include <stdlib.h>

#define EXACT_MIN_COUNT 5
#define EXACT_MAX_CHARS 28
#define EXACT_MAX_TOK   6
#define TOPIC_MIN_CHARS 3

static const struct ds4_str signatures[DS4_SOUP_MAX_SIGNATURES] = {
    {"<reference", 10},
    {"<tool_calls", 11},
    {"<tool-call-name", 15},
    {"<dies_cmd_wrapper", 17},
    {"<empty-tool-call", 16},
    {"<original_code_end", 18},
    {"<commit_begin", 13},
    {"text_placeholder", 16},
    {"<edit-path", 10},
    {"<source>placeholder", 19},
    {"<original_output", 16},
    {"<Write ", 7},
    {"<bash_command", 13},
    {"<call ", 6},
    {"<answer>", 8},
    {"<analyze>", 9},
    {"<thinking>", 10},
    {"</assistant>", 12},
    {"<assistant_unitsummary>", 23},
    {"<system-reminder>", 17},
    /* optional */
    {"<system-remember>", 17},
    {"<tool_use>", 10},
    {"<tool_name>", 11},
};
#define N_OPTIONAL 3

static const struct ds4_str stop_words[] = {
    {"a", 1},  {"an", 2},   {"and", 3}, {"at", 2},   {"for", 3},  {"i", 1},  {"in", 2},
    {"is", 2}, {"it", 2},   {"let", 3}, {"me", 2},   {"now", 3},  {"of", 2}, {"on", 2},
    {"or", 2}, {"that", 4}, {"the", 3}, {"then", 4}, {"this", 4}, {"to", 2}, {"will", 4},
};

static const struct ds4_str whitelist[] = {
    {"***", 3}, {"--", 2}, {"---", 3}, {"---...", 6}, {"==", 2}, {"===", 3}, {"___", 3}, {"```", 3},
};

#define PUNCTUATION ".,!?;:\"')](["

const struct ds4_str *ds4_soup_signatures(size_t *n_signatures, size_t *n_optional)
{
    *n_signatures = DS4_SOUP_MAX_SIGNATURES;
    *n_optional = N_OPTIONAL;
    return signatures;
}

uint32_t ds4_soup_find(struct ds4_str window, size_t n_signatures)
{
    uint32_t found = 0;

    if (memchr(window.ptr, '<', window.len) == NULL &&
        ds4_str_find(window, DS4_STR("text_placeholder"), 0) == DS4_STR_NONE)
        return 0;
    for (size_t i = 0; i < n_signatures; i++)
        if (ds4_str_find(window, signatures[i], 0) != DS4_STR_NONE)
            found |= UINT32_C(1) << i;
    return found;
}

/* ---- lines ---------------------------------------------------------------------------------- */

static bool in_list(struct ds4_str s, const struct ds4_str *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (ds4_str_equal(s, list[i]))
            return true;
    return false;
}

static size_t count_chars(struct ds4_str s)
{
    size_t n = 0;

    for (size_t i = 0; i < s.len; i++)
        n += ((unsigned char)s.ptr[i] & 0xc0) != 0x80;
    return n;
}

/* The next line of *rest, stripped; false at the end.  \n, \r\n and \r end lines; that the middle of
 * \r\n makes an empty line does not matter, since empty lines are ignored. */
static bool next_line(struct ds4_str *rest, struct ds4_str *line)
{
    while (rest->len > 0) {
        size_t n = 0;
        while (n < rest->len && rest->ptr[n] != '\n' && rest->ptr[n] != '\r')
            n++;
        *line = ds4_str_trim(ds4_str_head(*rest, n));
        *rest = ds4_str_skip(*rest, n + 1);
        if (line->len > 0 && !in_list(*line, whitelist, sizeof(whitelist) / sizeof(whitelist[0])))
            return true;
    }
    return false;
}

static int compare_str(struct ds4_str a, struct ds4_str b)
{
    size_t n = a.len < b.len ? a.len : b.len;
    int order = n == 0 ? 0 : memcmp(a.ptr, b.ptr, n);

    return order != 0 ? order : (a.len > b.len) - (a.len < b.len);
}

/* By text; equal texts in the order of the window, so that the first of a run is the earliest. */
static int compare_lines(const void *a, const void *b)
{
    const struct ds4_str *x = a, *y = b;
    int order = compare_str(*x, *y);

    return order != 0 ? order : (x->ptr > y->ptr) - (x->ptr < y->ptr);
}

DS4_VEC_TYPE(lines, struct ds4_str);

struct ds4_str ds4_exact_find(struct ds4_str window, ds4_count_tokens_fn count_tokens, void *ctx)
{
    struct ds4_str best = {0}, line;
    struct lines lines = {0};
    size_t best_count = 0;

    while (next_line(&window, &line))
        if (count_chars(line) <= EXACT_MAX_CHARS && DS4_VEC_PUSH(&lines, line) != 0)
            break;
    if (lines.len > 1)
        qsort(lines.ptr, lines.len, sizeof(*lines.ptr), compare_lines);
    for (size_t i = 0, end; i < lines.len; i = end) {
        for (end = i; end < lines.len && ds4_str_equal(lines.ptr[end], lines.ptr[i]);)
            end++;
        if (end - i < EXACT_MIN_COUNT || end - i < best_count ||
            (end - i == best_count && lines.ptr[i].ptr > best.ptr) ||
            count_tokens(ctx, lines.ptr[i]) > EXACT_MAX_TOK)
            continue;
        best = lines.ptr[i];
        best_count = end - i;
    }
    DS4_VEC_DEINIT(&lines);
    return best;
}

/* ---- fuzzy ---------------------------------------------------------------------------------- */

static struct ds4_str next_word(struct ds4_str *rest)
{
    size_t n = 0;
    struct ds4_str word;

    *rest = ds4_str_trim(*rest);
    while (n < rest->len && rest->ptr[n] != ' ' && !(rest->ptr[n] >= '\t' && rest->ptr[n] <= '\r'))
        n++;
    word = ds4_str_head(*rest, n);
    *rest = ds4_str_skip(*rest, n);
    return word;
}

static struct ds4_str strip_punctuation(struct ds4_str word)
{
    while (word.len > 0 && strchr(PUNCTUATION, word.ptr[0]) != NULL && word.ptr[0] != '\0')
        word = ds4_str_skip(word, 1);
    while (word.len > 0 && strchr(PUNCTUATION, word.ptr[word.len - 1]) != NULL &&
           word.ptr[word.len - 1] != '\0')
        word.len--;
    return word;
}

struct opened_line {
    struct ds4_str line;
    struct ds4_str rest; /* behind the opening words */
    struct ds4_buf *openings;
    size_t opening_at, opening_len; /* the opening words joined by one space */
};
DS4_VEC_TYPE(opened_lines, struct opened_line);

static struct ds4_str opening_of(const struct opened_line *l)
{
    return (struct ds4_str){l->openings->ptr + l->opening_at, l->opening_len};
}

static int compare_openings(const void *a, const void *b)
{
    const struct opened_line *x = a, *y = b;
    int order = compare_str(opening_of(x), opening_of(y));

    return order != 0 ? order : (x->line.ptr > y->line.ptr) - (x->line.ptr < y->line.ptr);
}

static int split_opening(struct ds4_buf *openings, int n_words, struct opened_line *l)
{
    l->openings = openings;
    l->opening_at = openings->len;
    l->rest = l->line;
    for (int w = 0; w < n_words; w++) {
        struct ds4_str word = next_word(&l->rest);
        if (word.len == 0)
            break;
        if ((w > 0 && ds4_buf_append_byte(openings, ' ') != 0) ||
            ds4_buf_append_str(openings, word) != 0)
            return -1;
    }
    l->opening_len = openings->len - l->opening_at;
    return 0;
}

struct topic {
    struct ds4_str word;
    size_t line;
};
DS4_VEC_TYPE(topics, struct topic);

static int compare_topics(const void *a, const void *b)
{
    const struct topic *x = a, *y = b;
    int order = compare_str(x->word, y->word);

    return order != 0 ? order : (x->line > y->line) - (x->line < y->line);
}

/* In how many of the lines the most frequent topic word occurs. */
static size_t top_topic(const struct opened_line *lines, size_t n_lines)
{
    struct topics topics = {0};
    size_t top = 0;

    for (size_t i = 0; i < n_lines; i++) {
        struct ds4_str rest = lines[i].rest, word;
        while ((word = next_word(&rest)).len > 0) {
            word = strip_punctuation(word);
            if (count_chars(word) < TOPIC_MIN_CHARS ||
                in_list(word, stop_words, sizeof(stop_words) / sizeof(stop_words[0])))
                continue;
            if (DS4_VEC_PUSH(&topics, (struct topic){word, i}) != 0)
                break;
        }
    }
    if (topics.len > 1)
        qsort(topics.ptr, topics.len, sizeof(*topics.ptr), compare_topics);
    for (size_t i = 0, end, n; i < topics.len; i = end) {
        for (end = i, n = 0;
             end < topics.len && ds4_str_equal(topics.ptr[end].word, topics.ptr[i].word); end++)
            n += end == i || topics.ptr[end].line != topics.ptr[end - 1].line;
        if (n > top)
            top = n;
    }
    DS4_VEC_DEINIT(&topics);
    return top;
}

/* Of the openings that hit, the one that comes first in the window. */
static struct ds4_fuzzy_hit search_openings(const struct opened_lines *lines,
                                            const struct ds4_loop_knobs *knobs)
{
    struct ds4_fuzzy_hit best = {0};
    const char *first = NULL;

    for (size_t i = 0, end, n, top; i < lines->len; i = end) {
        struct ds4_str opening = opening_of(&lines->ptr[i]);
        for (end = i; end < lines->len && ds4_str_equal(opening_of(&lines->ptr[end]), opening);)
            end++;
        n = end - i;
        if (n < (size_t)knobs->fuzzy_min_hits || (first != NULL && lines->ptr[i].line.ptr > first))
            continue;
        top = top_topic(&lines->ptr[i], n);
        if (top == 0 || (double)top / (double)n < knobs->fuzzy_overlap)
            continue;
        first = lines->ptr[i].line.ptr;
        best = (struct ds4_fuzzy_hit){.hit = true, .top_count = top, .n_lines = n};
        snprintf(best.prefix, sizeof(best.prefix), "%.*s", DS4_STR_ARG(opening));
    }
    return best;
}

struct ds4_fuzzy_hit ds4_fuzzy_find(struct ds4_str window, const struct ds4_loop_knobs *knobs)
{
    struct ds4_fuzzy_hit out = {0};
    struct opened_lines lines = {0};
    struct opened_line l = {0};
    struct ds4_buf lower, openings;
    struct ds4_str rest;

    ds4_buf_init(&lower, SIZE_MAX / 2);
    ds4_buf_init(&openings, SIZE_MAX / 2);
    if (ds4_buf_append_str(&lower, window) != 0)
        goto done;
    for (size_t i = 0; i < lower.len; i++)
        if (lower.ptr[i] >= 'A' && lower.ptr[i] <= 'Z')
            lower.ptr[i] = (char)(lower.ptr[i] - 'A' + 'a');
    rest = ds4_buf_view(&lower);
    while (next_line(&rest, &l.line))
        if (split_opening(&openings, knobs->fuzzy_prefix_words, &l) != 0 ||
            DS4_VEC_PUSH(&lines, l) != 0)
            goto done;
    if (lines.len < (size_t)knobs->fuzzy_min_lines || lines.len == 0)
        goto done;
    qsort(lines.ptr, lines.len, sizeof(*lines.ptr), compare_openings);
    out = search_openings(&lines, knobs);
done:
    DS4_VEC_DEINIT(&lines);
    ds4_buf_deinit(&lower);
    ds4_buf_deinit(&openings);
    return out;
}

/* ---- recovery texts ------------------------------------------------------------------------- */

#define TURN_END                                                                                   \
    "<\xef\xbd\x9c"                                                                                \
    "end\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c><\xef\xbd\x9cUser\xef\xbd\x9c>go"           \
    "<\xef\xbd\x9c"                                                                                \
    "Assistant\xef\xbd\x9c>"

struct ds4_str ds4_recovery_text(enum ds4_recovery_mode mode, bool thinking)
{
    switch (mode) {
    case DS4_RECOVERY_OFF:
        break;
    case DS4_RECOVERY_NUDGE:
        return DS4_STR("\n\nStop repeating yourself. Make the tool call now.\n\n");
    case DS4_RECOVERY_REOPEN:
        return thinking ? DS4_STR(TURN_END "<think>") : DS4_STR(TURN_END "</think>");
    }
    return (struct ds4_str){"", 0};
}

/* Step 14: recognising one tag of the model's markup.
 *
 * A hand-written descent over the shapes listed in marker.h.  The one invariant that the streaming
 * parser rests on: PARTIAL is answered exactly when some continuation of the text is a marker, so the
 * parser may wait on PARTIAL and need not wait on anything else.  Running out of text inside a shape
 * is therefore PARTIAL, and the first byte that no shape allows is NONE. */
#include "router/parse/marker.h"

#include <string.h>
#include <strings.h>

#define WORD_MAX_CHARS 32
#define DSML           "DSML"

/* Longest first where one is a prefix of another; U+FF5C and U+2581 spelled out. */
static const struct {
    struct ds4_str text;
    enum ds4_marker_kind kind;
} literals[] = {
    {{"<think>", 7}, DS4_MARKER_THINK_OPEN},
    {{"</think>", 8}, DS4_MARKER_THINK_CLOSE},
    {{"<\xef\xbd\x9c"
      "end\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>",
      27},
     DS4_MARKER_TURN},
    {{"<\xef\xbd\x9c"
      "begin\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>",
      29},
     DS4_MARKER_TURN},
    {{"<\xef\xbd\x9cUser\xef\xbd\x9c>", 12}, DS4_MARKER_TURN},
    {{"<\xef\xbd\x9c"
      "Assistant\xef\xbd\x9c>",
      17},
     DS4_MARKER_TURN},
    {{"<\xef\xbd\x9cSystem\xef\xbd\x9c>", 14}, DS4_MARKER_TURN},
    {{"<\xef\xbd\x9clatest_reminder\xef\xbd\x9c>", 23}, DS4_MARKER_TURN},
};

static const struct ds4_str bars[] = {
    {"\xef\xbd\x9c", 3}, /* U+FF5C, the real one */
    {"|", 1},
    {"\xe2\x94\x82", 3}, /* U+2502 */
    {"\xe2\x9d\x98", 3}, /* U+2758 */
};

static const struct ds4_str known_words[] = {
    {"tool_calls", 10}, {"toolcalls", 9}, {"tool_call", 9}, {"calls", 5}, {"function_calls", 14},
};
#define N_KNOWN_WORDS   4
#define N_CLOSING_WORDS 5

/* Words of the plain XML openers and closers. */
static const struct ds4_str xml_openers[] = {
    {"invoke", 6}, {"parameter", 9}, {"tool_calls", 10}, {"calls", 5}, {"function_calls", 14},
};
static const struct ds4_str xml_closers[] = {
    {"invoke", 6}, {"parameter", 9}, {"tool_calls", 10},     {"toolcalls", 9},
    {"calls", 5},  {"tool_call", 9}, {"function_calls", 14},
};
#define N_OF(a) (sizeof(a) / sizeof((a)[0]))

static bool is_letter(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static bool is_blank(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static bool word_in(struct ds4_str word, const struct ds4_str *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (ds4_str_equal(word, list[i]))
            return true;
    return false;
}

bool ds4_marker_word_known(struct ds4_str word)
{
    return word_in(word, known_words, N_KNOWN_WORDS);
}

bool ds4_marker_word_closes(struct ds4_str word)
{
    return word_in(word, known_words, N_CLOSING_WORDS);
}

bool ds4_marker_ends_value(const struct ds4_marker *m, bool plain)
{
    if (m->plain && !plain)
        return false;
    switch (m->kind) {
    case DS4_MARKER_INVOKE:
    case DS4_MARKER_PARAMETER:
    case DS4_MARKER_CLOSE_INVOKE:
    case DS4_MARKER_CLOSE_PARAMETER:
        return true;
    case DS4_MARKER_CLOSE_WRAPPER:
        return ds4_marker_word_closes(m->word);
    default:
        return false;
    }
}

/* `want` at text[at]: FULL, PARTIAL if the text ends inside it, else NONE. */
static enum ds4_marker_status match(struct ds4_str text, size_t at, struct ds4_str want)
{
    struct ds4_str rest = ds4_str_skip(text, at);

    if (ds4_str_starts(rest, want))
        return DS4_MARKER_FULL;
    return ds4_str_starts(want, rest) ? DS4_MARKER_PARTIAL : DS4_MARKER_NONE;
}

static enum ds4_marker_status match_literal(struct ds4_str text, struct ds4_marker *out)
{
    enum ds4_marker_status best = DS4_MARKER_NONE;

    for (size_t i = 0; i < N_OF(literals); i++) {
        enum ds4_marker_status got;

        if (text.ptr[1] != literals[i].text.ptr[1])
            continue;
        got = match(text, 0, literals[i].text);
        if (got == DS4_MARKER_FULL) {
            *out = (struct ds4_marker){.kind = literals[i].kind, .len = literals[i].text.len};
            return got;
        }
        if (got == DS4_MARKER_PARTIAL)
            best = got;
    }
    return best;
}

/* A bar at *at, stepped over.  `which` is its index in bars[]. */
static enum ds4_marker_status match_bar(struct ds4_str text, size_t *at, size_t *which)
{
    enum ds4_marker_status best = DS4_MARKER_NONE;

    for (size_t i = 0; i < N_OF(bars); i++) {
        enum ds4_marker_status got = match(text, *at, bars[i]);
        if (got == DS4_MARKER_FULL) {
            *at += bars[i].len;
            *which = i;
            return got;
        }
        if (got == DS4_MARKER_PARTIAL)
            best = got;
    }
    return best;
}

/* PFX SEP at *at.  Also FULL for a prefix without a first bar; NONE if both are missing. */
static enum ds4_marker_status match_prefix(struct ds4_str text, size_t *at, struct ds4_marker *out)
{
    size_t first = 1, second = 1;
    enum ds4_marker_status before, word, after;

    before = match_bar(text, at, &first);
    if (before == DS4_MARKER_PARTIAL)
        return DS4_MARKER_PARTIAL;
    word = match(text, *at, DS4_STR(DSML));
    if (word != DS4_MARKER_FULL)
        return word;
    *at += strlen(DSML);
    after = match_bar(text, at, &second);
    if (after == DS4_MARKER_PARTIAL)
        return DS4_MARKER_PARTIAL;
    if (before == DS4_MARKER_NONE && after == DS4_MARKER_NONE)
        return DS4_MARKER_NONE;
    out->exact_prefix =
        before == DS4_MARKER_FULL && after == DS4_MARKER_FULL && first == 0 && second == 0;
    if (*at < text.len && (text.ptr[*at] == ' ' || text.ptr[*at] == '_'))
        out->sep = text.ptr[(*at)++];
    return DS4_MARKER_FULL;
}

/* From `at`, where the word has ended: blanks or attributes, then '>'. */
static enum ds4_marker_status match_rest(struct ds4_str text, size_t at, bool attrs_allowed,
                                         struct ds4_marker *out)
{
    size_t n_chars = 0, p;

    if (at < text.len && text.ptr[at] != '>' && !is_blank(text.ptr[at]))
        return DS4_MARKER_NONE;
    for (p = at; p < text.len && text.ptr[p] != '>'; p++)
        if (text.ptr[p] == '<' || (!attrs_allowed && !is_blank(text.ptr[p])))
            return DS4_MARKER_NONE;
    for (size_t i = 0; i < p; i++)
        n_chars += ((unsigned char)text.ptr[i] & 0xc0) != 0x80;
    if (n_chars > DS4_MARKER_MAX_CHARS)
        return DS4_MARKER_NONE;
    if (p == text.len)
        return DS4_MARKER_PARTIAL;
    out->attrs = (struct ds4_str){text.ptr + at, p - at};
    out->len = p + 1;
    return DS4_MARKER_FULL;
}

static enum ds4_marker_status match_dsml(struct ds4_str text, bool closing, struct ds4_marker *out)
{
    size_t at = closing ? 2 : 1, end;
    enum ds4_marker_status got = match_prefix(text, &at, out);
    bool tag;

    if (got != DS4_MARKER_FULL)
        return got;
    for (end = at; end < text.len && end - at <= WORD_MAX_CHARS; end++)
        if (!is_letter(text.ptr[end]) &&
            (end == at || (text.ptr[end] != '_' && text.ptr[end] != '-')))
            break;
    if (end - at > WORD_MAX_CHARS)
        return DS4_MARKER_NONE;
    if (end == text.len)
        return DS4_MARKER_PARTIAL;
    if (end == at)
        return DS4_MARKER_NONE;
    out->word = (struct ds4_str){text.ptr + at, end - at};
    tag = true;
    if (ds4_str_equal(out->word, DS4_STR("invoke")))
        out->kind = closing ? DS4_MARKER_CLOSE_INVOKE : DS4_MARKER_INVOKE;
    else if (ds4_str_equal(out->word, DS4_STR("parameter")))
        out->kind = closing ? DS4_MARKER_CLOSE_PARAMETER : DS4_MARKER_PARAMETER;
    else {
        out->kind = closing ? DS4_MARKER_CLOSE_WRAPPER : DS4_MARKER_WRAPPER;
        tag = false;
    }
    return match_rest(text, end, tag && !closing, out);
}

/* `<invoke ATTR>` and its kin: an opener without attributes is prose about XML, not a call. */
static enum ds4_marker_status match_xml(struct ds4_str text, bool closing, struct ds4_marker *out)
{
    const struct ds4_str *list = closing ? xml_closers : xml_openers;
    size_t n = closing ? N_OF(xml_closers) : N_OF(xml_openers), at = closing ? 2 : 1, end;
    enum ds4_marker_status got;
    bool has_attrs;

    for (end = at; end < text.len && (is_letter(text.ptr[end]) || text.ptr[end] == '_'); end++)
        if (end - at >= WORD_MAX_CHARS)
            return DS4_MARKER_NONE;
    out->word = (struct ds4_str){text.ptr + at, end - at};
    if (end == text.len) {
        for (size_t i = 0; i < n; i++)
            if (ds4_str_starts(list[i], out->word))
                return DS4_MARKER_PARTIAL;
        return DS4_MARKER_NONE;
    }
    if (!word_in(out->word, list, n))
        return DS4_MARKER_NONE;
    out->plain = true;
    has_attrs =
        !closing && (ds4_str_equal(out->word, list[0]) || ds4_str_equal(out->word, list[1]));
    if (ds4_str_equal(out->word, list[0]))
        out->kind = closing ? DS4_MARKER_CLOSE_INVOKE : DS4_MARKER_INVOKE;
    else if (ds4_str_equal(out->word, list[1]))
        out->kind = closing ? DS4_MARKER_CLOSE_PARAMETER : DS4_MARKER_PARAMETER;
    else
        out->kind = closing ? DS4_MARKER_CLOSE_WRAPPER : DS4_MARKER_WRAPPER;
    if (out->kind == DS4_MARKER_WRAPPER && text.ptr[end] != '>')
        return DS4_MARKER_NONE;
    got = match_rest(text, end, has_attrs, out);
    if (got == DS4_MARKER_FULL && has_attrs && ds4_str_trim(out->attrs).len == 0)
        return DS4_MARKER_NONE;
    return got;
}

/* One begins with the other: what is missing may still come.  Most differ early. */
static inline bool agree(struct ds4_str a, struct ds4_str b)
{
    size_t n = a.len < b.len ? a.len : b.len, i = 0;

    while (i < n && a.ptr[i] == b.ptr[i])
        i++;
    return i == n;
}

/* What a literal has behind '<' or '</'. */
static inline struct ds4_str behind(struct ds4_str literal)
{
    size_t n = literal.ptr[1] == '/' ? 2 : 1;

    return (struct ds4_str){literal.ptr + n, literal.len - n};
}

static void add_first(struct ds4_marker_rules *rules, struct ds4_str text)
{
    unsigned char c = (unsigned char)text.ptr[0];

    rules->first[c / 32] |= UINT32_C(1) << (c % 32);
}

/* This and ds4_marker_word_refuted go by the very tables that the shapes are matched with: a new tag cannot
 * be forgotten here. */
struct ds4_marker_rules ds4_marker_rules_make(bool dsml, bool plain_xml)
{
    struct ds4_marker_rules rules = {.dsml = dsml, .plain_xml = plain_xml};

    for (size_t i = 0; i < N_OF(literals); i++)
        add_first(&rules, behind(literals[i].text));
    if (!dsml)
        return rules;
    add_first(&rules, DS4_STR(DSML));
    for (size_t i = 0; i < N_OF(bars); i++)
        add_first(&rules, bars[i]);
    for (size_t i = 0; i < N_OF(xml_openers); i++)
        add_first(&rules, xml_openers[i]);
    for (size_t i = 0; i < N_OF(xml_closers); i++)
        add_first(&rules, xml_closers[i]);
    return rules;
}

bool ds4_marker_word_refuted(struct ds4_str rest)
{
    if (rest.ptr[0] == DSML[0])
        return false;
    for (size_t i = 0; i < N_OF(bars); i++)
        if (rest.ptr[0] == bars[i].ptr[0])
            return false;
    for (size_t i = 0; i < N_OF(literals); i++)
        if (agree(rest, behind(literals[i].text)))
            return false;
    for (size_t i = 0; i < N_OF(xml_openers); i++)
        if (agree(rest, xml_openers[i]))
            return false;
    for (size_t i = 0; i < N_OF(xml_closers); i++)
        if (agree(rest, xml_closers[i]))
            return false;
    return true;
}

enum ds4_marker_status ds4_marker_scan(struct ds4_str text, const struct ds4_marker_rules *rules,
                                       struct ds4_marker *out)
{
    enum ds4_marker_status best, got;
    bool closing;

    if (text.len == 1) /* what ends a token of source code more often than not */
        return DS4_MARKER_PARTIAL;
    closing = text.ptr[1] == '/';
    if (text.len > (closing ? 2 : 1) &&
        ds4_marker_refuted(ds4_str_skip(text, closing ? 2 : 1), rules))
        return DS4_MARKER_NONE;
    best = match_literal(text, out);
    if (best == DS4_MARKER_FULL || !rules->dsml)
        return best;

    *out = (struct ds4_marker){0};
    got = match_dsml(text, closing, out);
    if (got == DS4_MARKER_FULL)
        return got;
    if (got == DS4_MARKER_PARTIAL)
        best = got;
    if (closing || rules->plain_xml) {
        *out = (struct ds4_marker){0};
        got = match_xml(text, closing, out);
        if (got == DS4_MARKER_FULL)
            return got;
        if (got == DS4_MARKER_PARTIAL)
            best = got;
    }
    return best;
}

/* The quoted value at *at, which is stepped over; false if there is no closing quote. */
static bool read_quoted(struct ds4_str attrs, size_t *at, struct ds4_str *value)
{
    const char *begin = attrs.ptr + *at + 1, *end;

    end = memchr(begin, attrs.ptr[*at], attrs.len - *at - 1);
    if (end == NULL)
        return false;
    *value = (struct ds4_str){begin, (size_t)(end - begin)};
    *at = (size_t)(end - attrs.ptr) + 1;
    return true;
}

static bool equal_nocase(struct ds4_str a, struct ds4_str b)
{
    return a.len == b.len && strncasecmp(a.ptr, b.ptr, a.len) == 0;
}

struct ds4_marker_attrs ds4_marker_read_attrs(struct ds4_str attrs)
{
    struct ds4_marker_attrs out = {0};
    bool has_string = false;
    size_t at = 0;

    while (at < attrs.len) {
        size_t begin;
        struct ds4_str key, value;

        while (at < attrs.len && is_blank(attrs.ptr[at]))
            at++;
        begin = at;
        while (at < attrs.len && attrs.ptr[at] != '=' && !is_blank(attrs.ptr[at]))
            at++;
        key = (struct ds4_str){attrs.ptr + begin, at - begin};
        if (at == attrs.len || attrs.ptr[at] != '=')
            continue;
        at++;
        while (at < attrs.len && is_blank(attrs.ptr[at]))
            at++;
        if (at == attrs.len || (attrs.ptr[at] != '"' && attrs.ptr[at] != '\''))
            continue;
        if (!read_quoted(attrs, &at, &value))
            break;
        if (ds4_str_equal(key, DS4_STR("name")) && !out.has_name) {
            out.has_name = true;
            out.name = value;
        } else if (ds4_str_equal(key, DS4_STR("string")) && !has_string) {
            has_string = true;
            if (equal_nocase(value, DS4_STR("true")))
                out.string = DS4_STRING_TRUE;
            else if (equal_nocase(value, DS4_STR("false")))
                out.string = DS4_STRING_FALSE;
        }
    }
    return out;
}

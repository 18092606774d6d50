/* One markup tag at the head of a text: what it is, or that it may still become one.
 *
 * A pure scanner over a view that begins with '<'; owns nothing, remembers nothing.  Spaced and
 * unspaced tags are the same thing to it: V4 writes `<｜DSML｜invoke`, V4.1 `<｜DSML｜ invoke`.
 *
 *   BAR  U+FF5C, U+007C, U+2502 or U+2758        PFX  BAR DSML BAR, or exactly one bar missing
 *   SEP  nothing, one space or one underscore     WORD letter, then up to 31 letters, '_' or '-'
 *
 *   <think> </think>                              THINK_OPEN, THINK_CLOSE
 *   EOS BOS User Assistant System reminder        TURN
 *   < PFX SEP invoke|parameter [blank attrs] >    INVOKE, PARAMETER
 *   < PFX SEP WORD blanks >                       WRAPPER
 *   </ PFX SEP WORD blanks >                      CLOSE_INVOKE, CLOSE_PARAMETER, CLOSE_WRAPPER
 *   the plain XML forms, without PFX SEP          the same kinds, with `plain` set
 *
 * Attributes hold neither '<' nor '>'.  A tag has at most DS4_MARKER_MAX_CHARS characters before its
 * '>': a longer one is text, whatever it looks like, so that a stream never waits without end. */
#ifndef DS4_ROUTER_PARSE_MARKER_H
#define DS4_ROUTER_PARSE_MARKER_H

#include "common/str.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DS4_MARKER_MAX_CHARS 512

enum ds4_marker_status {
    DS4_MARKER_NONE,    /* the '<' is text */
    DS4_MARKER_PARTIAL, /* all of the view is the beginning of a marker */
    DS4_MARKER_FULL,
};

enum ds4_marker_kind {
    DS4_MARKER_THINK_OPEN,
    DS4_MARKER_THINK_CLOSE,
    DS4_MARKER_TURN,
    DS4_MARKER_INVOKE,
    DS4_MARKER_PARAMETER,
    DS4_MARKER_WRAPPER,
    DS4_MARKER_CLOSE_INVOKE,
    DS4_MARKER_CLOSE_PARAMETER,
    DS4_MARKER_CLOSE_WRAPPER,
};

struct ds4_marker {
    enum ds4_marker_kind kind;
    bool plain;           /* XML form, without the DSML prefix */
    bool exact_prefix;    /* PFX is ｜DSML｜ with two U+FF5C */
    size_t len;           /* bytes from '<' to '>' inclusive */
    char sep;             /* ' ', '_' or NUL for none */
    struct ds4_str word;  /* borrowed from the text */
    struct ds4_str attrs; /* between the word and '>'; borrowed */
};

/* Which tags exist.  Think tags and turn markers always do. */
struct ds4_marker_rules {
    bool dsml;         /* DSML tags and plain closers: tools are declared */
    bool plain_xml;    /* <invoke ..>, <parameter ..>, <tool_calls> as openers */
    uint32_t first[8]; /* set of the bytes that some tag goes on with behind '<' or '</' */
};
struct ds4_marker_rules ds4_marker_rules_make(bool dsml, bool plain_xml);

/* The rest of ds4_marker_refuted. */
bool ds4_marker_word_refuted(struct ds4_str rest);

/* No marker goes on with `rest` behind '<' or '</': true of most '<' of prose and code.  False says
 * nothing; `rest` is not empty. */
static inline bool ds4_marker_refuted(struct ds4_str rest, const struct ds4_marker_rules *rules)
{
    unsigned char c = (unsigned char)rest.ptr[0];

    return (rules->first[c / 32] >> (c % 32) & 1) == 0 || ds4_marker_word_refuted(rest);
}

/* Looks at the tag that starts at text.ptr[0] == '<'.  *out is filled for DS4_MARKER_FULL only. */
enum ds4_marker_status ds4_marker_scan(struct ds4_str text, const struct ds4_marker_rules *rules,
                                       struct ds4_marker *out);

/* tool_calls, toolcalls, tool_call, calls: a wrapper opener with one of them needs no gate. */
bool ds4_marker_word_known(struct ds4_str word);
/* One of those or function_calls: as a closer it ends a value. */
bool ds4_marker_word_closes(struct ds4_str word);

/* The text of a marker that `ds4_marker_scan` found ends a parameter value: a parameter or invoke tag
 * or a wrapper closer with a familiar word; plain forms only if `plain`. */
bool ds4_marker_ends_value(const struct ds4_marker *m, bool plain);

enum ds4_string_attr {
    DS4_STRING_UNSET, /* absent, or neither true nor false */
    DS4_STRING_TRUE,
    DS4_STRING_FALSE,
};

struct ds4_marker_attrs {
    bool has_name;
    struct ds4_str name; /* verbatim, not trimmed, entities not decoded; borrowed */
    enum ds4_string_attr string;
};

/* Reads `name` and `string` out of a tag's attributes: any order, single or double quotes, the first
 * of each counts, everything else is skipped. */
struct ds4_marker_attrs ds4_marker_read_attrs(struct ds4_str attrs);

#endif

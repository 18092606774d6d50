/* Reading JSON text into nodes, printing it as Python does.
 *
 * The reader is a loop, not a recursion: the path to the current value is a bit stack (object or
 * array) and, when nodes are wanted, the parent pointers.  So depth costs one bit and hostile nesting
 * costs nothing.  Duplicate keys are resolved when an object closes, by sorting its members: linear
 * search would make 100,000 members quadratic.  Steps 2, 3 and 14. */
#include "common/json_text.h"

#include "common/json_write.h"
#include "common/utf8.h"

#include <stdlib.h>
#include <string.h>

#define DS4_JT_WORD_BITS    64
#define DS4_JT_NUMBER_BYTES 64 /* longer number texts are copied to the heap for strtod */
#define DS4_JT_ESCAPE_BYTES 6  /* \uXXXX */

struct reader {
    const char *start, *at, *end;
    struct ds4_arena *arena; /* NULL: only check */
    struct ds4_err *err;
    int32_t depth, max_depth;
    uint64_t objects[DS4_JT_MAX_DEPTH / DS4_JT_WORD_BITS]; /* bit d: level d is an object */
    struct ds4_jt_node *parent;
};

static int fail_at(struct reader *r, const char *what)
{
    if (r->at == r->end)
        return ds4_fail(r->err, DS4_E_INVALID, "invalid JSON: the text ends where %s belongs",
                        what);
    return ds4_fail(r->err, DS4_E_INVALID, "invalid JSON at byte %zu: %s expected",
                    (size_t)(r->at - r->start), what);
}

static int fail_full(struct reader *r)
{
    return ds4_fail(r->err, DS4_E_TOO_LONG, "JSON of %zu bytes needs more memory than allowed",
                    (size_t)(r->end - r->start));
}

static void skip_blanks(struct reader *r)
{
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\t' || *r->at == '\n' || *r->at == '\r'))
        r->at++;
}

static bool next_is(const struct reader *r, char c)
{
    return r->at < r->end && *r->at == c;
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* ---- strings ------------------------------------------------------------------------------- */

/* The value of the four hex digits at p, or -1. */
static int32_t read_hex(const char *p)
{
    int32_t code = 0;

    for (int i = 0; i < 4; i++) {
        if (is_digit(p[i]))
            code = code * 16 + (p[i] - '0');
        else if ((p[i] | 0x20) >= 'a' && (p[i] | 0x20) <= 'f')
            code = code * 16 + ((p[i] | 0x20) - 'a' + 10);
        else
            return -1;
    }
    return code;
}

/* Checks the string at r->at and steps over it; *inner is the text between the quotes. */
static int lex_string(struct reader *r, struct ds4_str *inner, bool *has_escape)
{
    const char *first = r->at + 1;

    *has_escape = false;
    for (r->at = first; r->at < r->end && *r->at != '"'; r->at++) {
        if ((unsigned char)*r->at < ' ')
            return fail_at(r, "no control character");
        if (*r->at != '\\')
            continue;
        *has_escape = true;
        r->at++;
        if (r->at == r->end)
            break;
        if (*r->at == 'u') {
            if (r->end - r->at < DS4_JT_ESCAPE_BYTES - 1 || read_hex(r->at + 1) < 0)
                return fail_at(r, "\\u with four hex digits");
            r->at += 4;
        } else if (strchr("\"\\/bfnrt", *r->at) == NULL || *r->at == '\0') {
            return fail_at(r, "an escape");
        }
    }
    if (r->at == r->end)
        return fail_at(r, "a closing quote");
    *inner = (struct ds4_str){first, (size_t)(r->at - first)};
    r->at++;
    return 0;
}

/* Decodes the escape whose backslash is at p (checked by lex_string); returns the bytes read. */
static size_t decode_escape(const char *p, const char *end, char *out, size_t *n_out)
{
    static const char plain[] = "\"\"\\\\//b\bf\fn\nr\rt\t"; /* pairs: escape, character */
    int32_t code, low;

    if (p[1] != 'u') {
        for (size_t i = 0; i + 1 < sizeof(plain); i += 2) {
            if (plain[i] == p[1])
                out[(*n_out)++] = plain[i + 1];
        }
        return 2;
    }
    code = read_hex(p + 2);
    if (code >= 0xd800 && code <= 0xdbff && end - p >= 2 * DS4_JT_ESCAPE_BYTES && p[6] == '\\' &&
        p[7] == 'u') {
        low = read_hex(p + 8);
        if (low >= 0xdc00 && low <= 0xdfff) {
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
            *n_out += ds4_utf8_encode((uint32_t)code, out + *n_out);
            return (size_t)2 * DS4_JT_ESCAPE_BYTES;
        }
    }
    if (code >= 0xd800 && code <= 0xdfff)
        code = DS4_UTF8_REPLACEMENT;
    *n_out += ds4_utf8_encode((uint32_t)code, out + *n_out);
    return DS4_JT_ESCAPE_BYTES;
}

/* Reads the string at r->at; *out is decoded if the reader makes nodes. */
static int read_string(struct reader *r, struct ds4_str *out)
{
    const char *p, *end;
    char *decoded;
    bool has_escape;
    size_t n = 0;

    if (lex_string(r, out, &has_escape) != 0)
        return -1;
    if (!has_escape || r->arena == NULL)
        return 0;
    /* No escape is shorter than what it stands for. */
    decoded = ds4_arena_take(r->arena, out->len + 1);
    if (decoded == NULL)
        return fail_full(r);
    end = out->ptr + out->len;
    for (p = out->ptr; p < end;) {
        if (*p == '\\')
            p += decode_escape(p, end, decoded, &n);
        else
            decoded[n++] = *p++;
    }
    *out = (struct ds4_str){decoded, n};
    return 0;
}

/* ---- numbers and words --------------------------------------------------------------------- */

static void skip_digits(struct reader *r)
{
    while (r->at < r->end && is_digit(*r->at))
        r->at++;
}

static int lex_number(struct reader *r)
{
    if (next_is(r, '-'))
        r->at++;
    if (r->at == r->end || !is_digit(*r->at))
        return fail_at(r, "a value");
    if (*r->at == '0')
        r->at++;
    else
        skip_digits(r);
    if (next_is(r, '.')) {
        r->at++;
        if (r->at == r->end || !is_digit(*r->at))
            return fail_at(r, "a digit");
        skip_digits(r);
    }
    if (next_is(r, 'e') || next_is(r, 'E')) {
        r->at++;
        if (next_is(r, '+') || next_is(r, '-'))
            r->at++;
        if (r->at == r->end || !is_digit(*r->at))
            return fail_at(r, "a digit");
        skip_digits(r);
    }
    return 0;
}

static int lex_word(struct reader *r, struct ds4_str word)
{
    if (!ds4_str_starts((struct ds4_str){r->at, (size_t)(r->end - r->at)}, word))
        return fail_at(r, "a value");
    r->at += word.len;
    return 0;
}

/* ---- nodes --------------------------------------------------------------------------------- */

/* A child of r->parent (or the root); *out stays NULL when the reader only checks. */
static int add_node(struct reader *r, struct ds4_str key, struct ds4_jt_node **out)
{
    struct ds4_jt_node *node, *parent = r->parent;

    *out = NULL;
    if (r->arena == NULL)
        return 0;
    node = ds4_arena_take(r->arena, sizeof(*node));
    if (node == NULL)
        return fail_full(r);
    node->key = key;
    node->parent = parent;
    node->counts = node;
    if (parent != NULL) {
        if (parent->last == NULL)
            parent->first = node;
        else
            parent->last->next = node;
        parent->last = node;
        parent->n_children++;
    }
    *out = node;
    return 0;
}

static int compare_members(const void *a, const void *b)
{
    const struct ds4_jt_node *x = *(struct ds4_jt_node *const *)a;
    const struct ds4_jt_node *y = *(struct ds4_jt_node *const *)b;
    size_t shorter = x->key.len < y->key.len ? x->key.len : y->key.len;
    int order = shorter == 0 ? 0 : memcmp(x->key.ptr, y->key.ptr, shorter);

    if (order != 0)
        return order;
    if (x->key.len != y->key.len)
        return x->key.len < y->key.len ? -1 : 1;
    return x->raw.ptr < y->raw.ptr ? -1 : 1; /* equal keys stay in the order of the text */
}

/* Points the first of equal keys to the last of them. */
static int resolve_duplicates(struct reader *r, struct ds4_jt_node *obj)
{
    struct ds4_arena_mark mark = ds4_arena_mark(r->arena);
    struct ds4_jt_node **members, *first;
    int32_t n = 0;

    if (obj->n_children < 2)
        return 0;
    members = ds4_arena_take_array(r->arena, (size_t)obj->n_children, sizeof(struct ds4_jt_node *));
    if (members == NULL)
        return fail_full(r);
    for (struct ds4_jt_node *m = obj->first; m != NULL; m = m->next)
        members[n++] = m;
    qsort(members, (size_t)n, sizeof(struct ds4_jt_node *), compare_members);
    first = members[0];
    for (int32_t i = 1; i < n; i++) {
        if (!ds4_str_equal(first->key, members[i]->key)) {
            first = members[i];
            continue;
        }
        first->counts = members[i];
        members[i]->counts = NULL;
    }
    ds4_arena_reset(r->arena, mark);
    return 0;
}

/* ---- the loop ------------------------------------------------------------------------------ */

static bool in_object(const struct reader *r)
{
    int32_t level = r->depth - 1;

    return (r->objects[level / DS4_JT_WORD_BITS] >> (level % DS4_JT_WORD_BITS) & 1) != 0;
}

static int open_level(struct reader *r, struct ds4_jt_node *node, bool is_object)
{
    uint64_t bit = UINT64_C(1) << (r->depth % DS4_JT_WORD_BITS);
    uint64_t *word = &r->objects[r->depth / DS4_JT_WORD_BITS];

    if (r->depth == r->max_depth)
        return ds4_fail(r->err, DS4_E_INVALID, "JSON nests deeper than %d levels", r->max_depth);
    *word = is_object ? *word | bit : *word & ~bit;
    r->depth++;
    r->parent = node;
    return 0;
}

/* Steps over the bracket at r->at, which closes the innermost level. */
static int close_level(struct reader *r)
{
    struct ds4_jt_node *node = r->parent;

    r->at++;
    r->depth--;
    if (node == NULL)
        return 0;
    r->parent = node->parent;
    node->raw.len = (size_t)(r->at - node->raw.ptr);
    return node->type == DS4_JT_OBJECT ? resolve_duplicates(r, node) : 0;
}

static int read_scalar(struct reader *r, enum ds4_jt_type *type, struct ds4_str *str)
{
    switch (*r->at) {
    case '"':
        *type = DS4_JT_STRING;
        return read_string(r, str);
    case 't':
        *type = DS4_JT_TRUE;
        return lex_word(r, DS4_STR("true"));
    case 'f':
        *type = DS4_JT_FALSE;
        return lex_word(r, DS4_STR("false"));
    case 'n':
        *type = DS4_JT_NULL;
        return lex_word(r, DS4_STR("null"));
    default:
        *type = DS4_JT_NUMBER;
        return lex_number(r);
    }
}

/* Reads one value, or opens it (*opened) if it is an array or object that is not empty.  In an object
 * the key comes first. */
static int read_item(struct reader *r, struct ds4_jt_node **node, bool *opened)
{
    struct ds4_str key = {0}, str = {0};
    enum ds4_jt_type type;
    const char *first;

    *opened = false;
    skip_blanks(r);
    if (r->depth > 0 && in_object(r)) {
        if (!next_is(r, '"'))
            return fail_at(r, "a key");
        if (read_string(r, &key) != 0)
            return -1;
        skip_blanks(r);
        if (!next_is(r, ':'))
            return fail_at(r, "':'");
        r->at++;
        skip_blanks(r);
    }
    if (r->at == r->end)
        return fail_at(r, "a value");
    if (add_node(r, key, node) != 0)
        return -1;
    first = r->at;
    if (*r->at == '{' || *r->at == '[') {
        type = *r->at == '{' ? DS4_JT_OBJECT : DS4_JT_ARRAY;
        if (*node != NULL) {
            (*node)->type = type;
            (*node)->raw.ptr = first;
        }
        if (open_level(r, *node, type == DS4_JT_OBJECT) != 0)
            return -1;
        r->at++;
        skip_blanks(r);
        *opened = !next_is(r, type == DS4_JT_OBJECT ? '}' : ']');
        return *opened ? 0 : close_level(r);
    }
    if (read_scalar(r, &type, &str) != 0)
        return -1;
    if (*node != NULL) {
        (*node)->type = type;
        (*node)->str = str;
        (*node)->raw = (struct ds4_str){first, (size_t)(r->at - first)};
    }
    return 0;
}

/* After a value: closes levels until a comma announces the next item.  *more is false at the end. */
static int read_separators(struct reader *r, bool *more)
{
    *more = false;
    while (r->depth > 0) {
        skip_blanks(r);
        if (next_is(r, ',')) {
            r->at++;
            *more = true;
            return 0;
        }
        if (!next_is(r, in_object(r) ? '}' : ']'))
            return fail_at(r, in_object(r) ? "',' or '}'" : "',' or ']'");
        if (close_level(r) != 0)
            return -1;
    }
    skip_blanks(r);
    return r->at == r->end ? 0 : fail_at(r, "the end");
}

static int read_text(struct reader *r, struct ds4_jt_node **root)
{
    struct ds4_jt_node *node = NULL;
    bool opened = false, more = true;
    size_t valid = ds4_utf8_valid_len((struct ds4_str){r->start, (size_t)(r->end - r->start)});

    *root = NULL;
    if (r->start + valid != r->end)
        return ds4_fail(r->err, DS4_E_INVALID, "invalid UTF-8 at byte %zu", valid);
    while (more) {
        if (read_item(r, &node, &opened) != 0)
            return -1;
        if (*root == NULL)
            *root = node;
        if (!opened && read_separators(r, &more) != 0)
            return -1;
    }
    return 0;
}

static struct reader start_reader(struct ds4_str text, int32_t max_depth, struct ds4_arena *arena,
                                  struct ds4_err *err)
{
    const char *start = text.len == 0 ? "" : text.ptr;

    return (struct reader){
        .start = start,
        .at = start,
        .end = start + text.len,
        .arena = arena,
        .err = err,
        .max_depth = max_depth < DS4_JT_MAX_DEPTH ? max_depth : DS4_JT_MAX_DEPTH,
    };
}

const struct ds4_jt_node *ds4_jt_parse(struct ds4_str text, int32_t max_depth,
                                       struct ds4_arena *arena, struct ds4_err *err)
{
    struct reader r = start_reader(text, max_depth, arena, err);
    struct ds4_jt_node *root;

    return read_text(&r, &root) == 0 ? root : NULL;
}

bool ds4_jt_valid(struct ds4_str text, int32_t max_depth)
{
    struct reader r = start_reader(text, max_depth, NULL, NULL);
    struct ds4_jt_node *root;

    return read_text(&r, &root) == 0;
}

const struct ds4_jt_node *ds4_jt_find_str(const struct ds4_jt_node *obj, struct ds4_str key)
{
    if (obj == NULL || obj->type != DS4_JT_OBJECT)
        return NULL;
    for (const struct ds4_jt_node *m = obj->first; m != NULL; m = m->next) {
        if (ds4_str_equal(m->key, key))
            return m->counts; /* the first place of a key always has one */
    }
    return NULL;
}

const struct ds4_jt_node *ds4_jt_find(const struct ds4_jt_node *obj, const char *key)
{
    return ds4_jt_find_str(obj, ds4_str_view(key));
}

/* strtod on a view; 0 or -1 when memory is out. */
static int to_double(struct ds4_str text, double *out)
{
    char small[DS4_JT_NUMBER_BYTES], *large;

    if (text.len < sizeof(small)) {
        memcpy(small, text.ptr, text.len);
        small[text.len] = '\0';
        *out = strtod(small, NULL);
        return 0;
    }
    large = strndup(text.ptr, text.len);
    if (large == NULL)
        return -1;
    *out = strtod(large, NULL);
    free(large);
    return 0;
}

double ds4_jt_double(const struct ds4_jt_node *node)
{
    double value = 0;

    if (node == NULL || node->type != DS4_JT_NUMBER || to_double(node->raw, &value) != 0)
        return 0;
    return value;
}

/* The members that count, whatever their order; mostly it is the same, so each is looked for where
 * the other object's walk stands before it is searched. */
static bool same_members(const struct ds4_jt_node *a, const struct ds4_jt_node *b, int64_t *work)
{
    const struct ds4_jt_node *at = b->first;
    size_t n_a = 0, n_b = 0;

    for (const struct ds4_jt_node *m = b->first; m != NULL; m = m->next)
        n_b += m->counts != NULL;
    for (const struct ds4_jt_node *m = a->first; m != NULL; m = m->next) {
        const struct ds4_jt_node *other;

        if (m->counts == NULL)
            continue;
        n_a++;
        while (at != NULL && at->counts == NULL)
            at = at->next;
        if (at != NULL && ds4_str_equal(at->key, m->key)) {
            other = at->counts;
            at = at->next;
        } else {
            *work -= b->n_children;
            other = *work < 0 ? NULL : ds4_jt_find_str(b, m->key);
        }
        if (other == NULL || !ds4_jt_same_within(m->counts, other, work))
            return false;
    }
    return n_a == n_b;
}

/* Nesting is bounded by the reader. */
bool ds4_jt_same_within(const struct ds4_jt_node *a, const struct ds4_jt_node *b, int64_t *work)
{
    if (a->type != b->type || --*work < 0)
        return false;
    switch (a->type) {
    case DS4_JT_NULL:
    case DS4_JT_FALSE:
    case DS4_JT_TRUE:
        return true;
    case DS4_JT_NUMBER: /* 1.0 and 1 are one number to the clients that write them anew */
        return ds4_str_equal(a->raw, b->raw) || ds4_jt_double(a) == ds4_jt_double(b);
    case DS4_JT_STRING:
        return ds4_str_equal(a->str, b->str);
    case DS4_JT_ARRAY:
        if (a->n_children != b->n_children)
            return false;
        for (a = a->first, b = b->first; a != NULL; a = a->next, b = b->next)
            if (!ds4_jt_same_within(a, b, work))
                return false;
        return true;
    case DS4_JT_OBJECT:
        return same_members(a, b, work);
    }
    return false;
}

bool ds4_jt_same(const struct ds4_jt_node *a, const struct ds4_jt_node *b)
{
    int64_t work = INT64_MAX;

    return ds4_jt_same_within(a, b, &work);
}

/* ---- printing ------------------------------------------------------------------------------ */

static int dump_number(struct ds4_str raw, struct ds4_buf *out)
{
    double value;

    if (memchr(raw.ptr, '.', raw.len) == NULL && memchr(raw.ptr, 'e', raw.len) == NULL &&
        memchr(raw.ptr, 'E', raw.len) == NULL)
        return ds4_buf_append_str(out, ds4_str_equal(raw, DS4_STR("-0")) ? DS4_STR("0") : raw);
    if (to_double(raw, &value) != 0) {
        out->failed = true;
        return -1;
    }
    return ds4_jw_append_double(out, value);
}

/* Recursion is bounded by DS4_JT_MAX_DEPTH, which the reader enforced. */
int ds4_jt_dump(const struct ds4_jt_node *node, struct ds4_buf *out)
{
    bool is_object = node->type == DS4_JT_OBJECT, is_first = true;

    if (node->type == DS4_JT_STRING)
        return ds4_jw_append_string(out, node->str);
    if (node->type == DS4_JT_NUMBER)
        return dump_number(node->raw, out);
    if (node->type != DS4_JT_ARRAY && !is_object)
        return ds4_buf_append_str(out, node->raw);
    (void)ds4_buf_append_byte(out, is_object ? '{' : '[');
    for (const struct ds4_jt_node *child = node->first; child != NULL; child = child->next) {
        if (child->counts == NULL)
            continue;
        if (!is_first)
            (void)ds4_buf_append_text(out, ", ");
        is_first = false;
        if (is_object) {
            (void)ds4_jw_append_string(out, child->key);
            (void)ds4_buf_append_text(out, ": ");
        }
        if (ds4_jt_dump(child->counts, out) != 0)
            return -1;
    }
    return ds4_buf_append_byte(out, is_object ? '}' : ']');
}

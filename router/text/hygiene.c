/* Hygiene of old assistant turns.  Step 2 to 3 of the request path (rules R4 and R5).
 *
 * The block reader here is strict on purpose and shares nothing with router/parse: that one guesses
 * what a model meant, this one must be sure before it rewrites what a client said.  Accepted is what
 * the encoders write, in either spelling, with any blanks between tags. */
#include "router/text/hygiene.h"

#include "common/buf.h"
#include "common/json_write.h"
#include "router/text/vocab.h"

#define MAX_TEXT_BYTES ((size_t)256 << 20) /* the arena sets the real limit */
#define MAX_FAILED                                                                                 \
    64 /* openers without a block, after which a message is left alone: each costs a scan */

/* The tags of one spelling. */
struct spelling {
    struct ds4_str open, close;
    struct ds4_str invoke, invoke_close;
    struct ds4_str param, param_close;
};

static const struct spelling spellings[] = {
    {DS4_STR("<｜DSML｜tool_calls>"), DS4_STR("</｜DSML｜tool_calls>"),
     DS4_STR("<｜DSML｜invoke name=\""), DS4_STR("</｜DSML｜invoke>"),
     DS4_STR("<｜DSML｜parameter name=\""), DS4_STR("</｜DSML｜parameter>")},
    {DS4_STR("<｜DSML｜ calls>"), DS4_STR("</｜DSML｜ calls>"), DS4_STR("<｜DSML｜ invoke name=\""),
     DS4_STR("</｜DSML｜ invoke>"), DS4_STR("<｜DSML｜ parameter name=\""),
     DS4_STR("</｜DSML｜ parameter>")},
};

#define N_SPELLING (sizeof(spellings) / sizeof(spellings[0]))

/* A cursor over the content, and the calls read so far (NULL while only checking). */
struct reader {
    const struct spelling *tags;
    struct ds4_str rest;
    struct ds4_arena *arena;
    struct ds4_call *calls;
    size_t n_call;
    struct ds4_err *err;
    bool no_memory;
};

/* ---- R4 ------------------------------------------------------------------------------------------ */

static size_t last_occurrence(struct ds4_str text, struct ds4_str needle)
{
    size_t hit = ds4_str_find(text, needle, 0);
    size_t last = DS4_STR_NONE;

    while (hit != DS4_STR_NONE) {
        last = hit;
        hit = ds4_str_find(text, needle, hit + needle.len);
    }
    return last;
}

static int copy_out(struct ds4_buf *buf, struct ds4_arena *arena, struct ds4_str *out,
                    struct ds4_err *err)
{
    int rc = ds4_buf_check(buf, "message", err);

    if (rc == 0) {
        *out = ds4_arena_copy(arena, ds4_buf_view(buf));
        if (out->ptr == NULL)
            rc = ds4_fail(err, DS4_E_TOO_LONG, "the conversation is too long");
    }
    ds4_buf_deinit(buf);
    return rc;
}

static int without_think_tags(struct ds4_str text, struct ds4_arena *arena, struct ds4_str *out,
                              struct ds4_err *err)
{
    struct ds4_str open = ds4_special_text(DS4_SPECIAL_THINK_OPEN);
    struct ds4_str close = ds4_special_text(DS4_SPECIAL_THINK_CLOSE);
    struct ds4_buf buf;

    ds4_buf_init(&buf, MAX_TEXT_BYTES);
    while (text.len > 0) {
        size_t hit = ds4_str_find(text, DS4_STR("<"), 0);

        if (hit == DS4_STR_NONE)
            hit = text.len;
        ds4_buf_append_str(&buf, ds4_str_head(text, hit));
        text = ds4_str_skip(text, hit);
        if (ds4_str_starts(text, open)) {
            text = ds4_str_skip(text, open.len);
        } else if (ds4_str_starts(text, close)) {
            text = ds4_str_skip(text, close.len);
        } else {
            ds4_buf_append_str(&buf, ds4_str_head(text, 1));
            text = ds4_str_skip(text, 1);
        }
    }
    return copy_out(&buf, arena, out, err);
}

int ds4_hygiene_split_think(struct ds4_message *message, struct ds4_arena *arena, size_t *n_split,
                            struct ds4_err *err)
{
    struct ds4_str close = ds4_special_text(DS4_SPECIAL_THINK_CLOSE);
    size_t hit = last_occurrence(message->content, close);

    if (hit == DS4_STR_NONE)
        return 0;
    if (message->reasoning.len == 0 &&
        without_think_tags(ds4_str_head(message->content, hit), arena, &message->reasoning, err))
        return -1;
    message->content = ds4_str_skip(message->content, hit + close.len);
    (*n_split)++;
    return 0;
}

/* ---- R5 ------------------------------------------------------------------------------------------ */

static void skip_blanks(struct reader *r)
{
    while (r->rest.len > 0 && (r->rest.ptr[0] == ' ' || r->rest.ptr[0] == '\n' ||
                               r->rest.ptr[0] == '\r' || r->rest.ptr[0] == '\t'))
        r->rest = ds4_str_skip(r->rest, 1);
}

static bool take(struct reader *r, struct ds4_str text)
{
    if (!ds4_str_starts(r->rest, text))
        return false;
    r->rest = ds4_str_skip(r->rest, text.len);
    return true;
}

/* Everything up to `end`, which is consumed. */
static bool take_until(struct reader *r, struct ds4_str end, struct ds4_str *out)
{
    size_t hit = ds4_str_find(r->rest, end, 0);

    if (hit == DS4_STR_NONE)
        return false;
    *out = ds4_str_head(r->rest, hit);
    r->rest = ds4_str_skip(r->rest, hit + end.len);
    return true;
}

/* A name between quotes: not empty and without markup. */
static bool take_name(struct reader *r, struct ds4_str end, struct ds4_str *name)
{
    return take_until(r, end, name) && name->len > 0 && memchr(name->ptr, '<', name->len) == NULL &&
           memchr(name->ptr, '>', name->len) == NULL && memchr(name->ptr, '"', name->len) == NULL;
}

static bool read_param(struct reader *r, struct ds4_buf *json)
{
    struct ds4_str name, kind, value;
    bool is_string;

    if (!take_name(r, DS4_STR("\" string=\""), &name) || !take_until(r, DS4_STR("\">"), &kind))
        return false;
    is_string = ds4_str_equal(kind, DS4_STR("true"));
    if ((!is_string && !ds4_str_equal(kind, DS4_STR("false"))) ||
        !take_until(r, r->tags->param_close, &value) ||
        (!is_string && !ds4_jt_valid(value, DS4_JT_ARGUMENT_DEPTH)))
        return false;
    if (json->len > 1)
        ds4_buf_append_text(json, ", ");
    ds4_jw_append_string(json, name);
    ds4_buf_append_text(json, ": ");
    if (is_string)
        ds4_jw_append_string(json, value);
    else
        ds4_buf_append_str(json, value);
    return true;
}

/* Reads the arguments collected as `json`; NULL if a name is repeated, which is not well-formed. */
static const struct ds4_jt_node *read_arguments(struct reader *r, const struct ds4_buf *json)
{
    struct ds4_str text = ds4_arena_copy(r->arena, ds4_buf_view(json));
    const struct ds4_jt_node *node = text.ptr == NULL || json->failed
                                         ? NULL
                                         : ds4_jt_parse(text, DS4_JT_MAX_DEPTH, r->arena, r->err);

    if (node == NULL) {
        r->no_memory = true;
        return NULL;
    }
    for (const struct ds4_jt_node *m = node->first; m != NULL; m = m->next)
        if (m->counts != m)
            return NULL;
    return node;
}

/* Adds a call.  The counting pass judges exactly as the storing one, or its count would be wrong. */
static bool add_call(struct reader *r, struct ds4_str name, const struct ds4_buf *json)
{
    struct ds4_arena_mark mark = ds4_arena_mark(r->arena);
    const struct ds4_jt_node *node = read_arguments(r, json);

    if (node == NULL)
        return false;
    if (r->calls != NULL)
        r->calls[r->n_call] =
            (struct ds4_call){.name = name, .kind = DS4_ARGUMENTS_MEMBERS, .node = node};
    else
        ds4_arena_reset(r->arena, mark);
    r->n_call++;
    return true;
}

static bool read_invoke(struct reader *r)
{
    struct ds4_buf json;
    struct ds4_str name;
    bool ok = true;

    if (!take(r, r->tags->invoke) || !take_name(r, DS4_STR("\">"), &name))
        return false;
    ds4_buf_init(&json, MAX_TEXT_BYTES);
    ds4_buf_append_byte(&json, '{');
    skip_blanks(r);
    while (ok && take(r, r->tags->param)) {
        ok = read_param(r, &json);
        skip_blanks(r);
    }
    ok = ok && take(r, r->tags->invoke_close);
    ds4_buf_append_byte(&json, '}');
    ok = ok && add_call(r, name, &json);
    ds4_buf_deinit(&json);
    return ok;
}

/* The block at rest: its opener, one or more invokes, its closer. */
static bool read_block(struct reader *r)
{
    size_t before = r->n_call;

    if (!take(r, r->tags->open))
        return false;
    do {
        skip_blanks(r);
        if (take(r, r->tags->close))
            return r->n_call > before;
    } while (read_invoke(r));
    return false;
}

/* Start of the next block opener of any spelling at or behind `from`. */
static size_t next_opener(struct ds4_str text, size_t from, const struct spelling **tags)
{
    size_t best = DS4_STR_NONE;

    for (size_t s = 0; s < N_SPELLING; s++) {
        size_t hit = ds4_str_find(text, spellings[s].open, from);

        if (hit != DS4_STR_NONE && (best == DS4_STR_NONE || hit < best)) {
            best = hit;
            *tags = &spellings[s];
        }
    }
    return best;
}

/* One pass over the content.  Without r->calls it only counts; with them it fills them and puts the
 * remaining text into *kept. */
static void scan(struct reader *r, struct ds4_str text, struct ds4_buf *kept)
{
    size_t done = 0, from = 0, n_failed = 0, hit;

    r->n_call = 0;
    while (n_failed < MAX_FAILED && !r->no_memory &&
           (hit = next_opener(text, from, &r->tags)) != DS4_STR_NONE) {
        size_t n_call = r->n_call;
        size_t end = hit;

        r->rest = ds4_str_skip(text, hit);
        if (!read_block(r)) {
            r->n_call = n_call;
            n_failed++;
            from = hit + r->tags->open.len;
            continue;
        }
        while (end > done && text.ptr[end - 1] == '\n')
            end--;
        ds4_buf_append(kept, text.ptr + done, end - done);
        done = from = text.len - r->rest.len;
    }
    ds4_buf_append_str(kept, ds4_str_skip(text, done));
}

int ds4_hygiene_lift_calls(struct ds4_message *message, struct ds4_arena *arena, size_t *n_lifted,
                           struct ds4_err *err)
{
    struct reader r = {.arena = arena, .err = err};
    struct ds4_buf kept;
    size_t n_call;

    if (message->n_call > 0)
        return 0;
    ds4_buf_init(&kept, MAX_TEXT_BYTES);
    scan(&r, message->content, &kept);
    n_call = r.n_call;
    if (n_call == 0) {
        ds4_buf_deinit(&kept);
        return 0;
    }
    r.calls = ds4_arena_take_array(arena, n_call, sizeof(*r.calls));
    ds4_buf_clear(&kept);
    if (r.calls == NULL)
        r.no_memory = true;
    else
        scan(&r, message->content, &kept);
    if (r.no_memory) {
        ds4_buf_deinit(&kept);
        return ds4_fail(err, DS4_E_TOO_LONG, "the conversation is too long");
    }
    message->calls = r.calls;
    message->n_call = r.n_call;
    *n_lifted += r.n_call;
    return copy_out(&kept, arena, &message->content, err);
}

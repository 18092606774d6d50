/* Step 14: arguments of a call as JSON text.
 *
 * The model states per value whether it is a string; where it does not, or where its JSON is not
 * JSON, the schema decides, and if that does not help either the raw text becomes a string.  So the
 * result is valid JSON for any input (splicing the model's text unchecked, as others do, is not). */
#include "router/parse/args.h"

#include "common/arena.h"
#include "common/json_text.h"
#include "common/json_write.h"

#include <stdlib.h>
#include <strings.h>

#define FIRST_SLOTS 16
/* DOM of a wrapper argument or JSON body: about 120 bytes a value, two input bytes at least. */
#define MAX_DOM_BYTES ((size_t)1 << 30)

void ds4_args_init(struct ds4_args *args, size_t max_bytes)
{
    *args = (struct ds4_args){0};
    ds4_buf_init(&args->bytes, max_bytes);
}

void ds4_args_deinit(struct ds4_args *args)
{
    DS4_VEC_DEINIT(&args->list);
    ds4_buf_deinit(&args->bytes);
    free(args->slots);
    args->slots = NULL;
    args->n_slots = 0;
}

void ds4_args_clear(struct ds4_args *args)
{
    args->list.len = 0;
    args->failed = false;
    ds4_buf_clear(&args->bytes);
    if (args->n_slots > 0)
        memset(args->slots, 0, args->n_slots * sizeof(*args->slots));
}

struct ds4_str ds4_args_name(const struct ds4_args *args, size_t i)
{
    return (struct ds4_str){args->bytes.ptr + args->list.ptr[i].name_at,
                            args->list.ptr[i].name_len};
}

struct ds4_str ds4_args_text(const struct ds4_args *args, size_t i)
{
    return (struct ds4_str){args->bytes.ptr + args->list.ptr[i].text_at,
                            args->list.ptr[i].text_len};
}

/* FNV-1a: names are short and there are few. */
static size_t hash(struct ds4_str s)
{
    uint64_t h = UINT64_C(14695981039346656037);

    for (size_t i = 0; i < s.len; i++)
        h = (h ^ (unsigned char)s.ptr[i]) * UINT64_C(1099511628211);
    return (size_t)(h ^ (h >> 32));
}

/* The slot of `name`, or the free one where it belongs.  There is always a free slot. */
static size_t *find_slot(const struct ds4_args *args, struct ds4_str name)
{
    size_t mask = args->n_slots - 1, i = hash(name) & mask;

    while (args->slots[i] != 0 && !ds4_str_equal(ds4_args_name(args, args->slots[i] - 1), name))
        i = (i + 1) & mask;
    return &args->slots[i];
}

static int grow_slots(struct ds4_args *args)
{
    size_t n = args->n_slots == 0 ? FIRST_SLOTS : args->n_slots * 2;
    size_t *slots;

    if (args->list.len * 2 < args->n_slots)
        return 0;
    slots = calloc(n, sizeof(*slots));
    if (slots == NULL)
        return -1;
    free(args->slots);
    args->slots = slots;
    args->n_slots = n;
    for (size_t i = 0; i < args->list.len; i++)
        *find_slot(args, ds4_args_name(args, i)) = i + 1;
    return 0;
}

bool ds4_args_has(const struct ds4_args *args, struct ds4_str name)
{
    return args->list.len > 0 && *find_slot(args, name) != 0;
}

bool ds4_args_add(struct ds4_args *args, struct ds4_str name, struct ds4_str text,
                  enum ds4_arg_form form)
{
    struct ds4_arg arg = {.name_at = args->bytes.len, .name_len = name.len, .form = form};

    if (ds4_args_has(args, name))
        return false;
    arg.text_at = arg.name_at + name.len;
    arg.text_len = text.len;
    if (grow_slots(args) != 0 || ds4_buf_append_str(&args->bytes, name) != 0 ||
        ds4_buf_append_str(&args->bytes, text) != 0 || DS4_VEC_PUSH(&args->list, arg) != 0) {
        args->failed = true;
        return true;
    }
    *find_slot(args, name) = args->list.len;
    return true;
}

static bool equal_nocase(struct ds4_str a, const char *b)
{
    return a.len == strlen(b) && strncasecmp(a.ptr, b, a.len) == 0;
}

/* A decimal literal, JSON's or nearly (+7, 007, 5., .5), as a JSON number. */
static bool write_number(struct ds4_buf *out, struct ds4_str t)
{
    size_t whole = 0, fraction = 0, at = 0;
    bool negative = false;

    if (t.len > 0 && (t.ptr[0] == '+' || t.ptr[0] == '-')) {
        negative = t.ptr[0] == '-';
        t = ds4_str_skip(t, 1);
    }
    while (whole < t.len && t.ptr[whole] >= '0' && t.ptr[whole] <= '9')
        whole++;
    at = whole;
    if (at < t.len && t.ptr[at] == '.') {
        at++;
        while (at + fraction < t.len && t.ptr[at + fraction] >= '0' && t.ptr[at + fraction] <= '9')
            fraction++;
    }
    if (at + fraction != t.len || whole + fraction == 0)
        return false;
    while (whole > 1 && t.ptr[0] == '0') {
        t = ds4_str_skip(t, 1);
        whole--;
        at--;
    }
    if (negative)
        (void)ds4_buf_append_byte(out, '-');
    if (whole == 0)
        (void)ds4_buf_append_byte(out, '0');
    (void)ds4_buf_append_str(out, ds4_str_head(t, fraction > 0 ? at + fraction : whole));
    return true;
}

bool ds4_args_write_value(struct ds4_buf *out, const struct ds4_tool *tool, struct ds4_str name,
                          struct ds4_str text, enum ds4_arg_form form)
{
    const struct ds4_property *p = ds4_tool_find(tool, name);
    unsigned types = p == NULL ? 0 : p->types;
    struct ds4_str t = ds4_str_trim(text);

    if (form == DS4_ARG_READY) {
        (void)ds4_buf_append_str(out, text);
        return false;
    }
    if (form == DS4_ARG_STRING || (form == DS4_ARG_UNTYPED && types == DS4_TYPE_STRING)) {
        (void)ds4_jw_append_string(out, text);
        return false;
    }
    if (ds4_jt_valid(t, DS4_JT_ARGUMENT_DEPTH)) {
        (void)ds4_buf_append_str(out, t);
        return false;
    }
    if ((types & DS4_TYPE_NULL) != 0 &&
        (equal_nocase(t, "none") || equal_nocase(t, "null") || equal_nocase(t, "nil")))
        (void)ds4_buf_append_text(out, "null");
    else if ((types & DS4_TYPE_BOOLEAN) != 0 && equal_nocase(t, "true"))
        (void)ds4_buf_append_text(out, "true");
    else if ((types & DS4_TYPE_BOOLEAN) != 0 && equal_nocase(t, "false"))
        (void)ds4_buf_append_text(out, "false");
    else if ((types & DS4_TYPE_NUMBER) == 0 || !write_number(out, t))
        (void)ds4_jw_append_string(out, text);
    return true;
}

void ds4_args_write_key(struct ds4_buf *out, bool first, struct ds4_str name)
{
    (void)ds4_buf_append_text(out, first ? "{" : ", ");
    (void)ds4_jw_append_string(out, name);
    (void)ds4_buf_append_text(out, ": ");
}

size_t ds4_args_write(struct ds4_buf *out, const struct ds4_args *args, const struct ds4_tool *tool)
{
    size_t n_coerced = 0;

    if (args->list.len == 0)
        (void)ds4_buf_append_byte(out, '{');
    for (size_t i = 0; i < args->list.len; i++) {
        struct ds4_str name = ds4_args_name(args, i);
        ds4_args_write_key(out, i == 0, name);
        n_coerced +=
            ds4_args_write_value(out, tool, name, ds4_args_text(args, i), args->list.ptr[i].form);
    }
    (void)ds4_buf_append_byte(out, '}');
    return n_coerced;
}

bool ds4_args_may_wrap(const struct ds4_tool *tool, struct ds4_str name)
{
    return tool != NULL && tool->n_properties > 0 && ds4_tool_find(tool, name) == NULL &&
           (ds4_str_equal(name, DS4_STR("arguments")) || ds4_str_equal(name, DS4_STR("input")));
}

/* The object's text, or an empty view: `text` is an object, or a JSON string that holds one. */
static struct ds4_str object_text(struct ds4_str text, enum ds4_arg_form form,
                                  const struct ds4_tool *tool, struct ds4_arena *arena)
{
    const struct ds4_jt_node *node = ds4_jt_parse(text, DS4_JT_ARGUMENT_DEPTH, arena, NULL);

    if (node != NULL && node->type == DS4_JT_STRING && form != DS4_ARG_STRING)
        node = ds4_jt_parse(node->str, DS4_JT_ARGUMENT_DEPTH, arena, NULL);
    if (node == NULL || node->type != DS4_JT_OBJECT)
        return (struct ds4_str){0};
    for (const struct ds4_jt_node *m = node->first; m != NULL; m = m->next)
        if (ds4_tool_find(tool, m->key) == NULL)
            return (struct ds4_str){0};
    return node->raw;
}

bool ds4_args_unwrap(struct ds4_buf *out, const struct ds4_args *args, const struct ds4_tool *tool)
{
    struct ds4_arena arena;
    struct ds4_str object;

    if (args->list.len != 1 || !ds4_args_may_wrap(tool, ds4_args_name(args, 0)))
        return false;
    ds4_arena_init(&arena, MAX_DOM_BYTES);
    object = object_text(ds4_args_text(args, 0), args->list.ptr[0].form, tool, &arena);
    if (object.len > 0)
        (void)ds4_buf_append_str(out, object);
    ds4_arena_deinit(&arena);
    return object.len > 0;
}

bool ds4_args_object_keys(struct ds4_str text, struct ds4_args *keys)
{
    const struct ds4_jt_node *node;
    struct ds4_arena arena;
    bool is_object;

    ds4_arena_init(&arena, MAX_DOM_BYTES);
    node = ds4_jt_parse(text, DS4_JT_ARGUMENT_DEPTH, &arena, NULL);
    is_object = node != NULL && node->type == DS4_JT_OBJECT;
    for (const struct ds4_jt_node *m = is_object ? node->first : NULL; m != NULL; m = m->next)
        (void)ds4_args_add(keys, m->key, (struct ds4_str){"", 0}, DS4_ARG_READY);
    ds4_arena_deinit(&arena);
    return is_object;
}

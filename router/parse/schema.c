/* Step 14: tool schemas, read tolerantly.
 *
 * The schema's DOM lives in an arena only while it is read; what is kept is flat: property names with
 * a set of type bits, and the required names.  Whatever is not of the expected shape is skipped. */
#include "router/parse/schema.h"

#include "common/arena.h"
#include "common/json_text.h"

#include <stdlib.h>

/* anyOf inside anyOf: deeper than anyone writes by hand. */
#define MAX_ALTERNATIVE_DEPTH 8
/* The DOM costs about 120 bytes a value; request bodies are limited long before this. */
#define MAX_DOM_BYTES ((size_t)256 << 20)

static unsigned type_bit(struct ds4_str name)
{
    static const struct {
        struct ds4_str name;
        unsigned bit;
    } types[] = {
        {{"null", 4}, DS4_TYPE_NULL},      {{"boolean", 7}, DS4_TYPE_BOOLEAN},
        {{"integer", 7}, DS4_TYPE_NUMBER}, {{"number", 6}, DS4_TYPE_NUMBER},
        {{"string", 6}, DS4_TYPE_STRING},  {{"array", 5}, DS4_TYPE_OTHER},
        {{"object", 6}, DS4_TYPE_OTHER},
    };

    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
        if (ds4_str_equal(name, types[i].name))
            return types[i].bit;
    return 0;
}

static unsigned value_bit(const struct ds4_jt_node *value)
{
    switch (value->type) {
    case DS4_JT_NULL:
        return DS4_TYPE_NULL;
    case DS4_JT_FALSE:
    case DS4_JT_TRUE:
        return DS4_TYPE_BOOLEAN;
    case DS4_JT_NUMBER:
        return DS4_TYPE_NUMBER;
    case DS4_JT_STRING:
        return DS4_TYPE_STRING;
    default:
        return DS4_TYPE_OTHER;
    }
}

/* What one schema says itself, its alternatives aside. */
static unsigned own_types(const struct ds4_jt_node *schema)
{
    const struct ds4_jt_node *type = ds4_jt_find(schema, "type");
    const struct ds4_jt_node *values = ds4_jt_find(schema, "enum");
    unsigned bits = 0;

    if (type != NULL && type->type == DS4_JT_STRING)
        bits |= type_bit(type->str);
    if (type != NULL && type->type == DS4_JT_ARRAY)
        for (const struct ds4_jt_node *t = type->first; t != NULL; t = t->next)
            if (t->type == DS4_JT_STRING)
                bits |= type_bit(t->str);
    if (values != NULL && values->type == DS4_JT_ARRAY)
        for (const struct ds4_jt_node *v = values->first; v != NULL; v = v->next)
            bits |= value_bit(v);
    return bits;
}

/* The next schema in a walk over anyOf, oneOf, allOf and their elements; a walk instead of a recursion.
 * `stack` holds the element at each depth and the keyword it came from. */
struct alternative {
    const struct ds4_jt_node *schema;
    const struct ds4_jt_node *element; /* of the list being walked; NULL: take the next keyword */
    int keyword;
};

static unsigned all_types(const struct ds4_jt_node *schema)
{
    static const char *const keywords[] = {"anyOf", "oneOf", "allOf"};
    struct alternative stack[MAX_ALTERNATIVE_DEPTH + 1];
    unsigned bits = own_types(schema);
    int depth = 0;

    stack[0] = (struct alternative){.schema = schema};
    while (depth >= 0) {
        struct alternative *top = &stack[depth];
        const struct ds4_jt_node *child = top->element;

        if (child == NULL) {
            const struct ds4_jt_node *list;
            if (top->keyword == 3) {
                depth--;
                continue;
            }
            list = ds4_jt_find(top->schema, keywords[top->keyword++]);
            top->element = list != NULL && list->type == DS4_JT_ARRAY ? list->first : NULL;
            continue;
        }
        top->element = child->next;
        if (child->type != DS4_JT_OBJECT || depth == MAX_ALTERNATIVE_DEPTH)
            continue;
        bits |= own_types(child);
        stack[++depth] = (struct alternative){.schema = child};
    }
    return bits;
}

static bool is_string_or_any(const struct ds4_jt_node *schema)
{
    const struct ds4_jt_node *type = ds4_jt_find(schema, "type");

    return type == NULL ||
           (type->type == DS4_JT_STRING && ds4_str_equal(type->str, DS4_STR("string")));
}

static bool all_strings(const struct ds4_jt_node *list)
{
    if (list == NULL || list->type != DS4_JT_ARRAY)
        return false;
    for (const struct ds4_jt_node *n = list->first; n != NULL; n = n->next)
        if (n->type != DS4_JT_STRING)
            return false;
    return true;
}

static struct ds4_str keep(char **bytes, struct ds4_str s)
{
    struct ds4_str out = {*bytes, s.len};

    if (s.len > 0)
        memcpy(*bytes, s.ptr, s.len);
    *bytes += s.len;
    return out;
}

/* Counts first, so that three allocations hold everything. */
static int fill(struct ds4_tool *tool, struct ds4_str name, const struct ds4_jt_node *schema,
                struct ds4_err *err)
{
    const struct ds4_jt_node *props = ds4_jt_find(schema, "properties");
    const struct ds4_jt_node *required = ds4_jt_find(schema, "required");
    size_t n_props = 0, n_required = 0, n_bytes = name.len;
    char *next;

    if (props != NULL && props->type != DS4_JT_OBJECT)
        props = NULL;
    if (!all_strings(required))
        required = NULL;
    for (const struct ds4_jt_node *p = props == NULL ? NULL : props->first; p != NULL; p = p->next)
        if (p->counts != NULL) {
            n_props++;
            n_bytes += p->key.len;
        }
    for (const struct ds4_jt_node *r = required == NULL ? NULL : required->first; r != NULL;
         r = r->next) {
        n_required++;
        n_bytes += r->str.len;
    }
    tool->bytes = malloc(n_bytes + 1);
    tool->properties = calloc(n_props + 1, sizeof(*tool->properties));
    tool->required = calloc(n_required + 1, sizeof(*tool->required));
    if (tool->bytes == NULL || tool->properties == NULL || tool->required == NULL) {
        ds4_tool_deinit(tool);
        return ds4_fail(err, DS4_E_NOMEM, "could not allocate a tool's schema");
    }
    next = tool->bytes;
    tool->name = keep(&next, name);
    for (const struct ds4_jt_node *p = props == NULL ? NULL : props->first; p != NULL; p = p->next)
        if (p->counts != NULL)
            tool->properties[tool->n_properties++] = (struct ds4_property){
                .name = keep(&next, p->key),
                .types = all_types(p->counts),
                .string_or_any = is_string_or_any(p->counts),
            };
    for (const struct ds4_jt_node *r = required == NULL ? NULL : required->first; r != NULL;
         r = r->next)
        tool->required[tool->n_required++] = keep(&next, r->str);
    return 0;
}

int ds4_tool_init(struct ds4_tool *tool, struct ds4_str name, struct ds4_str parameters,
                  struct ds4_err *err)
{
    const struct ds4_jt_node *schema = NULL;
    struct ds4_arena arena;
    int rc;

    *tool = (struct ds4_tool){0};
    ds4_arena_init(&arena, MAX_DOM_BYTES);
    if (parameters.len > 0)
        schema = ds4_jt_parse(parameters, DS4_JT_MAX_DEPTH, &arena, NULL);
    rc = fill(tool, name, schema, err);
    ds4_arena_deinit(&arena);
    return rc;
}

void ds4_tool_deinit(struct ds4_tool *tool)
{
    free(tool->bytes);
    free(tool->properties);
    free(tool->required);
    *tool = (struct ds4_tool){0};
}

const struct ds4_property *ds4_tool_find(const struct ds4_tool *tool, struct ds4_str name)
{
    if (tool == NULL)
        return NULL;
    for (size_t i = 0; i < tool->n_properties; i++)
        if (ds4_str_equal(tool->properties[i].name, name))
            return &tool->properties[i];
    return NULL;
}

const struct ds4_str *ds4_tool_primary(const struct ds4_tool *tool)
{
    const struct ds4_property *p;

    for (size_t i = 0; i < tool->n_required; i++) {
        p = ds4_tool_find(tool, tool->required[i]);
        if (p != NULL && p->string_or_any)
            return &p->name;
    }
    for (size_t i = 0; i < tool->n_required; i++) {
        p = ds4_tool_find(tool, tool->required[i]);
        if (p != NULL)
            return &p->name;
    }
    for (size_t i = 0; i < tool->n_properties; i++)
        if ((tool->properties[i].types & DS4_TYPE_STRING) != 0)
            return &tool->properties[i].name;
    if (tool->n_properties > 0)
        return &tool->properties[0].name;
    return tool->n_required > 0 ? &tool->required[0] : NULL;
}

/* Step 14, behind the parser: an answer against its JSON schema (see the header).
 *
 * One recursion over schema and value together; `quiet` while an alternative is only tried.  A schema
 * may refer to itself, alternatives multiply, and members are found by walking: depth is bounded, and
 * whatever walks pays for its length out of one purse, so that the loop stands still for a fraction of a
 * second at most.  Once it is empty the answer counts as not checkable. */
#include "router/parse/conform.h"

#include <math.h>
#include <stdio.h>

#define DS4_CONFORM_DEPTH       128
#define DS4_CONFORM_WORK        ((int64_t)1 << 26) /* members looked at, at some 5 ns each */
#define DS4_STEP_WORK           16
#define DS4_CONFORM_ARENA_BYTES ((size_t)1 << 30)
#define DS4_PATH_BYTES          128

struct check {
    const struct ds4_jt_node *root;
    struct ds4_err *err;
    int64_t left; /* of DS4_CONFORM_WORK */
    int32_t depth;
    int32_t quiet;
    bool gave_up;
    char path[DS4_PATH_BYTES];
    size_t n_path;
};

static bool accept(struct check *c, const struct ds4_jt_node *schema,
                   const struct ds4_jt_node *value);

/* Keywords whose promise is not checked. */
static const char *const unchecked[] = {
    "pattern",          "patternProperties", "unevaluatedProperties", "unevaluatedItems",
    "dependentSchemas", "dependentRequired", "dependencies",          "contains",
    "minContains",      "maxContains",       "additionalItems",       "$dynamicRef",
    "$recursiveRef",
};

/* ---- small things --------------------------------------------------------------------------------- */

static bool no(struct check *c, const char *what, struct ds4_str detail)
{
    if (c->quiet == 0 && !c->gave_up)
        (void)ds4_fail(c->err, DS4_E_INVALID, "%.*s %s%.*s",
                       c->n_path > 0 ? (int)c->n_path : (int)sizeof("the answer") - 1,
                       c->n_path > 0 ? c->path : "the answer", what, DS4_STR_ARG(detail));
    return false;
}

static bool no_more(struct check *c)
{
    if (!c->gave_up)
        (void)ds4_fail(c->err, DS4_E_TOO_LONG, "the schema is too much work to check");
    c->gave_up = true;
    return false;
}

static bool pay(struct check *c, size_t work)
{
    c->left -= (int64_t)work;
    return c->left >= 0 || no_more(c);
}

/* NULL as well when there is no more to pay with. */
static const struct ds4_jt_node *find_str(struct check *c, const struct ds4_jt_node *obj,
                                          struct ds4_str key)
{
    return obj != NULL && pay(c, (size_t)obj->n_children) ? ds4_jt_find_str(obj, key) : NULL;
}

static const struct ds4_jt_node *find(struct check *c, const struct ds4_jt_node *obj,
                                      const char *key)
{
    return find_str(c, obj, ds4_str_view(key));
}

static double number(struct check *c, const struct ds4_jt_node *node)
{
    return pay(c, node->raw.len) ? ds4_jt_double(node) : 0;
}

static bool is(const struct ds4_jt_node *node, enum ds4_jt_type type)
{
    return node != NULL && node->type == type;
}

static bool is_bool(const struct ds4_jt_node *node)
{
    return is(node, DS4_JT_FALSE) || is(node, DS4_JT_TRUE);
}

static size_t n_characters(struct check *c, struct ds4_str s)
{
    size_t n = 0;

    if (!pay(c, s.len / 4))
        return 0;
    for (size_t i = 0; i < s.len; i++)
        n += ((unsigned char)s.ptr[i] & 0xC0u) != 0x80u;
    return n;
}

/* Members that count, or elements. */
static size_t n_values(struct check *c, const struct ds4_jt_node *node)
{
    size_t n = 0;

    if (!pay(c, (size_t)node->n_children))
        return 0;
    for (const struct ds4_jt_node *m = node->first; m != NULL; m = m->next)
        n += node->type == DS4_JT_ARRAY || m->counts != NULL;
    return n;
}

/* Texts are compared up to the shorter's end; members may stand in any order. */
static bool equal(struct check *c, const struct ds4_jt_node *a, const struct ds4_jt_node *b)
{
    bool same = pay(c, DS4_STEP_WORK + (a->raw.len < b->raw.len ? a->raw.len : b->raw.len)) &&
                ds4_jt_same_within(a, b, &c->left);

    return pay(c, 0) && same;
}

/* Steps into a member or an element and back. */
static bool accept_at(struct check *c, const struct ds4_jt_node *schema,
                      const struct ds4_jt_node *value, struct ds4_str key, size_t index)
{
    size_t before = c->n_path;
    size_t room = sizeof(c->path) - before;
    int n = key.ptr != NULL ? snprintf(c->path + before, room, "%s%.*s", before > 0 ? "." : "",
                                       key.len > 48 ? 48 : (int)key.len, key.ptr)
                            : snprintf(c->path + before, room, "[%zu]", index);
    bool good;

    if (n > 0 && (size_t)n < room)
        c->n_path += (size_t)n;
    good = accept(c, schema, value);
    c->n_path = before;
    return good;
}

/* ---- by type -------------------------------------------------------------------------------------- */

static bool is_of_type(struct check *c, const struct ds4_jt_node *value, struct ds4_str type)
{
    static const char *const names[] = {
        [DS4_JT_NULL] = "null",     [DS4_JT_FALSE] = "boolean", [DS4_JT_TRUE] = "boolean",
        [DS4_JT_NUMBER] = "number", [DS4_JT_STRING] = "string", [DS4_JT_ARRAY] = "array",
        [DS4_JT_OBJECT] = "object",
    };

    double n;

    if (ds4_str_equal(type, DS4_STR("integer"))) {
        n = is(value, DS4_JT_NUMBER) ? number(c, value) : NAN;
        return isfinite(n) && n == floor(n);
    }
    return ds4_str_equal(type, ds4_str_view(names[value->type]));
}

static bool check_type(struct check *c, const struct ds4_jt_node *type,
                       const struct ds4_jt_node *value)
{
    if (is(type, DS4_JT_STRING) && !is_of_type(c, value, type->str))
        return no(c, "must be of type ", type->str);
    if (!is(type, DS4_JT_ARRAY))
        return true;
    if (!pay(c, (size_t)type->n_children))
        return false;
    for (const struct ds4_jt_node *t = type->first; t != NULL; t = t->next)
        if (t->type == DS4_JT_STRING && is_of_type(c, value, t->str))
            return true;
    return no(c, "must be of one of the types ", type->raw);
}

static bool check_values(struct check *c, const struct ds4_jt_node *schema,
                         const struct ds4_jt_node *value)
{
    const struct ds4_jt_node *list = find(c, schema, "enum");
    const struct ds4_jt_node *only = find(c, schema, "const");
    const struct ds4_jt_node *one;

    if (only != NULL && !equal(c, only, value))
        return no(c, "must be ", only->raw);
    if (!is(list, DS4_JT_ARRAY))
        return true;
    for (one = list->first; one != NULL; one = one->next)
        if (equal(c, one, value))
            return true;
    return no(c, "must be one of ", list->raw);
}

/* A bound of the schema against a number; an absent or odd bound is none. */
static bool within(struct check *c, const struct ds4_jt_node *schema, const char *key, double value,
                   int sign, bool open)
{
    const struct ds4_jt_node *bound = find(c, schema, key);
    double over;

    if (!is(bound, DS4_JT_NUMBER))
        return true;
    over = sign * (value - number(c, bound));
    if (over < 0 || (!open && over == 0))
        return true;
    return no(c,
              sign > 0 ? "is above what the schema allows, " : "is below what the schema allows, ",
              bound->raw);
}

static bool check_number(struct check *c, const struct ds4_jt_node *schema, double value)
{
    const struct ds4_jt_node *step = find(c, schema, "multipleOf");
    double times, of;

    if (!within(c, schema, "maximum", value, 1, false) ||
        !within(c, schema, "minimum", value, -1, false) ||
        !within(c, schema, "exclusiveMaximum", value, 1, true) ||
        !within(c, schema, "exclusiveMinimum", value, -1, true))
        return false;
    of = is(step, DS4_JT_NUMBER) ? number(c, step) : 0;
    if (of <= 0)
        return true;
    times = value / of;
    /* 0.3 is a multiple of 0.1 to everybody but a double. */
    if (fabs(times - nearbyint(times)) <= 1e-9 * fmax(1.0, fabs(times)))
        return true;
    return no(c, "must be a multiple of ", step->raw);
}

static bool check_properties(struct check *c, const struct ds4_jt_node *schema,
                             const struct ds4_jt_node *value)
{
    const struct ds4_jt_node *properties = find(c, schema, "properties");
    const struct ds4_jt_node *more = find(c, schema, "additionalProperties");
    const struct ds4_jt_node *names = find(c, schema, "propertyNames");

    for (const struct ds4_jt_node *m = value->first; m != NULL; m = m->next) {
        const struct ds4_jt_node *known = find_str(c, properties, m->key);
        struct ds4_jt_node name = {.type = DS4_JT_STRING, .str = m->key};

        if (m->counts == NULL)
            continue;
        if (names != NULL && !accept(c, names, &name))
            return false;
        if (known == NULL && is(more, DS4_JT_FALSE))
            return no(c, "has a member that the schema does not allow, ", m->key);
        known = known != NULL ? known : more;
        if (known != NULL && !accept_at(c, known, m->counts, m->key, 0))
            return false;
    }
    return true;
}

static bool check_object(struct check *c, const struct ds4_jt_node *schema,
                         const struct ds4_jt_node *value)
{
    const struct ds4_jt_node *required = find(c, schema, "required");

    if (is(required, DS4_JT_ARRAY))
        for (const struct ds4_jt_node *r = required->first; r != NULL; r = r->next)
            if (r->type == DS4_JT_STRING && find_str(c, value, r->str) == NULL)
                return no(c, "lacks the member ", r->str);
    return within(c, schema, "maxProperties", (double)n_values(c, value), 1, false) &&
           within(c, schema, "minProperties", (double)n_values(c, value), -1, false) &&
           check_properties(c, schema, value);
}

static bool check_array(struct check *c, const struct ds4_jt_node *schema,
                        const struct ds4_jt_node *value)
{
    const struct ds4_jt_node *items = find(c, schema, "items");
    const struct ds4_jt_node *prefix = find(c, schema, "prefixItems");
    const struct ds4_jt_node *place;
    bool unique = is(find(c, schema, "uniqueItems"), DS4_JT_TRUE);
    size_t i = 0;

    if (prefix == NULL && is(items, DS4_JT_ARRAY)) { /* how older drafts wrote prefixItems */
        prefix = items;
        items = NULL;
    }
    place = prefix != NULL && prefix->type == DS4_JT_ARRAY ? prefix->first : NULL;
    if (!within(c, schema, "maxItems", (double)n_values(c, value), 1, false) ||
        !within(c, schema, "minItems", (double)n_values(c, value), -1, false))
        return false;
    for (const struct ds4_jt_node *v = value->first; v != NULL; v = v->next, i++) {
        const struct ds4_jt_node *s = place != NULL ? place : items;

        if (s != NULL && !accept_at(c, s, v, (struct ds4_str){NULL, 0}, i))
            return false;
        for (const struct ds4_jt_node *u = value->first; unique && u != v; u = u->next)
            if (equal(c, u, v))
                return no(c, "has equal elements", DS4_STR(""));
        place = place != NULL ? place->next : NULL;
    }
    return true;
}

/* ---- combinations --------------------------------------------------------------------------------- */

static bool tries(struct check *c, const struct ds4_jt_node *schema,
                  const struct ds4_jt_node *value)
{
    bool good;

    c->quiet++;
    good = accept(c, schema, value);
    c->quiet--;
    return good;
}

static size_t n_accepting(struct check *c, const struct ds4_jt_node *list,
                          const struct ds4_jt_node *value)
{
    size_t n = 0;

    for (const struct ds4_jt_node *s = list->first; s != NULL; s = s->next)
        n += tries(c, s, value);
    return n;
}

static bool check_combinations(struct check *c, const struct ds4_jt_node *schema,
                               const struct ds4_jt_node *value)
{
    const struct ds4_jt_node *all = find(c, schema, "allOf");
    const struct ds4_jt_node *any = find(c, schema, "anyOf");
    const struct ds4_jt_node *one = find(c, schema, "oneOf");
    const struct ds4_jt_node *none = find(c, schema, "not");
    const struct ds4_jt_node *when = find(c, schema, "if");

    if (is(all, DS4_JT_ARRAY))
        for (const struct ds4_jt_node *s = all->first; s != NULL; s = s->next)
            if (!accept(c, s, value))
                return false;
    if (is(any, DS4_JT_ARRAY) && n_accepting(c, any, value) == 0)
        return no(c, "fits none of the alternatives of anyOf", DS4_STR(""));
    if (is(one, DS4_JT_ARRAY) && n_accepting(c, one, value) != 1)
        return no(c, "must fit exactly one alternative of oneOf", DS4_STR(""));
    if (none != NULL && tries(c, none, value))
        return no(c, "fits what the schema excludes with not", DS4_STR(""));
    if (when != NULL) {
        const struct ds4_jt_node *then = find(c, schema, tries(c, when, value) ? "then" : "else");

        return then == NULL || accept(c, then, value);
    }
    return true;
}

/* The schema a "#/a/b" points to; NULL if there is none. */
static const struct ds4_jt_node *resolve(struct check *c, struct ds4_str ref)
{
    const struct ds4_jt_node *at = c->root;

    if (ref.len == 0 || ref.ptr[0] != '#' || !pay(c, ref.len))
        return NULL;
    ref = ds4_str_skip(ref, 1);
    while (at != NULL && ref.len > 0) {
        size_t end;

        if (ref.ptr[0] != '/')
            return NULL;
        end = ds4_str_find(ref, DS4_STR("/"), 1);
        if (end == DS4_STR_NONE)
            end = ref.len;
        at = find_str(c, at, ds4_str_skip(ds4_str_head(ref, end), 1));
        ref = ds4_str_skip(ref, end);
    }
    return at;
}

static bool accept_own(struct check *c, const struct ds4_jt_node *schema,
                       const struct ds4_jt_node *value)
{
    size_t n;

    if (!check_type(c, find(c, schema, "type"), value) || !check_values(c, schema, value))
        return false;
    switch (value->type) {
    case DS4_JT_NUMBER:
        return check_number(c, schema, number(c, value));
    case DS4_JT_STRING:
        n = n_characters(c, value->str);
        return within(c, schema, "maxLength", (double)n, 1, false) &&
               within(c, schema, "minLength", (double)n, -1, false);
    case DS4_JT_OBJECT:
        return check_object(c, schema, value);
    case DS4_JT_ARRAY:
        return check_array(c, schema, value);
    default:
        return true;
    }
}

static bool accept(struct check *c, const struct ds4_jt_node *schema,
                   const struct ds4_jt_node *value)
{
    const struct ds4_jt_node *ref = find(c, schema, "$ref");
    bool good = true;

    if (c->gave_up || c->depth >= DS4_CONFORM_DEPTH || !pay(c, DS4_STEP_WORK))
        return no_more(c);
    if (is_bool(schema))
        return schema->type == DS4_JT_TRUE || no(c, "is not allowed", DS4_STR(""));
    c->depth++;
    if (is(ref, DS4_JT_STRING)) {
        const struct ds4_jt_node *target = resolve(c, ref->str);

        good = target != NULL ? accept(c, target, value) : no(c, "has no schema at ", ref->str);
    }
    good = good && accept_own(c, schema, value) && check_combinations(c, schema, value);
    c->depth--;
    return good && !c->gave_up;
}

/* ---- public --------------------------------------------------------------------------------------- */

static bool has_schemas_only(struct ds4_str key)
{
    return ds4_str_equal(key, DS4_STR("properties")) || ds4_str_equal(key, DS4_STR("$defs")) ||
           ds4_str_equal(key, DS4_STR("definitions"));
}

static bool holds_values(struct ds4_str key)
{
    return ds4_str_equal(key, DS4_STR("enum")) || ds4_str_equal(key, DS4_STR("const")) ||
           ds4_str_equal(key, DS4_STR("default")) || ds4_str_equal(key, DS4_STR("examples"));
}

static int check_keyword(struct check *c, const struct ds4_jt_node *member)
{
    bool found;

    for (size_t i = 0; i < sizeof(unchecked) / sizeof(unchecked[0]); i++)
        if (ds4_str_equal(member->key, ds4_str_view(unchecked[i])))
            return ds4_fail(c->err, DS4_E_INVALID, "the schema uses %s, which is not supported",
                            unchecked[i]);
    if (!ds4_str_equal(member->key, DS4_STR("$ref")))
        return 0;
    found = member->type == DS4_JT_STRING && resolve(c, member->str) != NULL;
    if (!found && !c->gave_up)
        (void)ds4_fail(c->err, DS4_E_INVALID, "the schema's $ref %.*s points to nothing in it",
                       DS4_STR_ARG(member->raw));
    return found ? 0 : -1;
}

/* A walk in the order of the text.  `names` of properties are no keywords, values of enum no schemas. */
int ds4_conform_check_schema(const struct ds4_jt_node *schema, struct ds4_err *err)
{
    struct check c = {.root = schema, .err = err, .left = DS4_CONFORM_WORK};
    const struct ds4_jt_node *at = schema;

    while (at != NULL) {
        const struct ds4_jt_node *up = at->parent;
        bool names =
            up != NULL && up != schema && up->type == DS4_JT_OBJECT && has_schemas_only(up->key);

        if (at != schema && up != NULL && up->type == DS4_JT_OBJECT && !names &&
            check_keyword(&c, at))
            return -1;
        if (at->first != NULL && (at == schema || names || !holds_values(at->key))) {
            at = at->first;
            continue;
        }
        while (at != NULL && at != schema && at->next == NULL)
            at = at->parent;
        at = at == NULL || at == schema ? NULL : at->next;
    }
    return 0;
}

int ds4_conform(struct ds4_str schema, struct ds4_str text, struct ds4_err *err)
{
    struct check c = {.err = err, .left = DS4_CONFORM_WORK};
    const struct ds4_jt_node *value;
    struct ds4_arena arena;
    struct ds4_err why = {0};
    int rc = -1;

    ds4_arena_init(&arena, DS4_CONFORM_ARENA_BYTES);
    value = ds4_jt_parse(text, DS4_JT_MAX_DEPTH, &arena, &why);
    c.root = schema.len > 0 ? ds4_jt_parse(schema, DS4_JT_MAX_DEPTH, &arena, err) : NULL;
    if (value == NULL)
        (void)ds4_fail(err, DS4_E_INVALID, "the answer is not JSON: %s", why.msg);
    else if (schema.len == 0)
        rc = value->type == DS4_JT_OBJECT || no(&c, "must be an object", DS4_STR("")) ? 0 : -1;
    else if (c.root != NULL)
        rc = accept(&c, c.root, value) ? 0 : -1;
    ds4_arena_deinit(&arena);
    return rc;
}

/* What the parser must know of a declared tool: its properties, their types, what is required.
 *
 * Read once per request from the raw text of the tool's `parameters`.  A malformed schema means "no
 * requirement", never an error: the client's schema is not the model's fault. */
#ifndef DS4_ROUTER_PARSE_SCHEMA_H
#define DS4_ROUTER_PARSE_SCHEMA_H

#include "common/err.h"
#include "common/str.h"
#include "common/vec.h"

#include <stdbool.h>
#include <stddef.h>

/* Types of a property as a set of bits, through `type`, type lists, enum, anyOf, oneOf and allOf. */
#define DS4_TYPE_NULL    1u
#define DS4_TYPE_BOOLEAN 2u
#define DS4_TYPE_NUMBER  4u /* number or integer */
#define DS4_TYPE_STRING  8u
#define DS4_TYPE_OTHER   16u /* array, object */

struct ds4_property {
    struct ds4_str name;
    unsigned types;     /* 0: the schema does not say */
    bool string_or_any; /* its own `type` is "string", or it has none */
};

/* Owns everything it points to, the strings included. */
struct ds4_tool {
    struct ds4_str name;
    struct ds4_property *properties;
    size_t n_properties;
    struct ds4_str *required; /* empty unless the schema's `required` is a list of strings */
    size_t n_required;
    char *bytes; /* storage of all strings */
};

/* `parameters` is the JSON text of the tool's parameter schema, or empty.  0, or -1 DS4_E_NOMEM. */
int ds4_tool_init(struct ds4_tool *tool, struct ds4_str name, struct ds4_str parameters,
                  struct ds4_err *err) DS4_MUST_CHECK;
void ds4_tool_deinit(struct ds4_tool *tool);

/* NULL if the tool (which may be NULL) has no such property. */
const struct ds4_property *ds4_tool_find(const struct ds4_tool *tool, struct ds4_str name);

/* The parameter that a value without a name belongs to; NULL if the tool names none. */
const struct ds4_str *ds4_tool_primary(const struct ds4_tool *tool);

#endif

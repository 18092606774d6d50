/* Does an answer conform to the JSON schema that the client asked for?
 *
 * Checked are type, enum, const, numbers' bounds and multipleOf, strings' lengths, objects' properties,
 * required, additionalProperties, propertyNames and sizes, arrays' items, prefixItems, sizes and
 * uniqueItems, anyOf, oneOf, allOf, not, if/then/else, boolean schemas and $ref into the same schema.
 * Keywords that only describe (title, format, default, ...) and unknown ones promise nothing, as JSON
 * Schema has it.  Keywords that promise something this does not check are refused beforehand. */
#ifndef DS4_ROUTER_PARSE_CONFORM_H
#define DS4_ROUTER_PARSE_CONFORM_H

#include "common/err.h"
#include "common/json_text.h"
#include "common/str.h"

/* 0, or -1 with DS4_E_INVALID naming the keyword that cannot be checked ("pattern", "$ref" elsewhere), or
 * DS4_E_TOO_LONG for more references into larger objects than are followed. */
int ds4_conform_check_schema(const struct ds4_jt_node *schema, struct ds4_err *err) DS4_MUST_CHECK;

/* 0 if `text` is one JSON value that `schema`, JSON text as well, accepts; an empty schema accepts every
 * object.  -1 with DS4_E_INVALID saying where it does not: "items[3].price must be a number", or
 * DS4_E_TOO_LONG when schema and text together are too much work to check. */
int ds4_conform(struct ds4_str schema, struct ds4_str text, struct ds4_err *err) DS4_MUST_CHECK;

#endif

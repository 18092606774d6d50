/* The parameters of one call and the JSON text they make (`{"k": v, "k2": v2}`).
 *
 * Separators and escapes are those of Python's json.dumps with ensure_ascii off, because that is what
 * the prompt encoder renders history with: a call that goes out and comes back keeps its tokens.
 * Whatever the model wrote, the text is valid JSON. */
#ifndef DS4_ROUTER_PARSE_ARGS_H
#define DS4_ROUTER_PARSE_ARGS_H

#include "common/buf.h"
#include "common/str.h"
#include "common/vec.h"
#include "router/parse/marker.h"
#include "router/parse/schema.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How a value is spelled. */
enum ds4_arg_form {
    DS4_ARG_UNTYPED, /* no string attribute: the schema decides */
    DS4_ARG_STRING,  /* string="true": a string whatever it looks like */
    DS4_ARG_JSON,    /* string="false" */
    DS4_ARG_READY,   /* JSON already, written as it is */
};

struct ds4_arg {
    size_t name_at, name_len;
    size_t text_at, text_len;
    enum ds4_arg_form form;
};

/* A call's parameters, first come first kept.  Owns its bytes. */
struct ds4_args {
    DS4_VEC(struct ds4_arg) list;
    struct ds4_buf bytes;
    size_t *slots; /* open addressing over list: index + 1, 0 for free */
    size_t n_slots;
    bool failed; /* memory ran out or the maximum was reached; sticky until clear */
};

void ds4_args_init(struct ds4_args *args, size_t max_bytes);
void ds4_args_deinit(struct ds4_args *args);
void ds4_args_clear(struct ds4_args *args);

/* false: a parameter of this name is there already, nothing was added. */
bool ds4_args_add(struct ds4_args *args, struct ds4_str name, struct ds4_str text,
                  enum ds4_arg_form form);
bool ds4_args_has(const struct ds4_args *args, struct ds4_str name);
struct ds4_str ds4_args_name(const struct ds4_args *args, size_t i);
struct ds4_str ds4_args_text(const struct ds4_args *args, size_t i);

/* Appends the value as JSON.  `tool` may be NULL.  true if the schema had to decide because the text
 * was not the JSON it claimed to be. */
bool ds4_args_write_value(struct ds4_buf *out, const struct ds4_tool *tool, struct ds4_str name,
                          struct ds4_str text, enum ds4_arg_form form);
/* Appends `{"name": ` or `, "name": `. */
void ds4_args_write_key(struct ds4_buf *out, bool first, struct ds4_str name);
/* Appends the object; `{}` if empty.  Returns how many values the schema decided. */
size_t ds4_args_write(struct ds4_buf *out, const struct ds4_args *args,
                      const struct ds4_tool *tool);

/* A parameter that may stand for the whole object: named `arguments` or `input`, not a property of a
 * tool that has properties. */
bool ds4_args_may_wrap(const struct ds4_tool *tool, struct ds4_str name);
/* If the only parameter is such a wrapper and holds an object (or a string with one) whose keys are
 * all properties, appends that object's text and returns true. */
bool ds4_args_unwrap(struct ds4_buf *out, const struct ds4_args *args, const struct ds4_tool *tool);

/* The text is one JSON object; its keys (decoded) are added to `keys` with empty texts. */
bool ds4_args_object_keys(struct ds4_str text, struct ds4_args *keys);

#endif

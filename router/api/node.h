/* Looking into request bodies read as text: null counts as absent everywhere. */
#ifndef DS4_ROUTER_API_NODE_H
#define DS4_ROUTER_API_NODE_H

#include "common/json_text.h"

/* The member, NULL if absent or null, or if obj is NULL or no object. */
static inline const struct ds4_jt_node *ds4_node_find(const struct ds4_jt_node *obj,
                                                      const char *key)
{
    const struct ds4_jt_node *node = ds4_jt_find(obj, key);

    return node == NULL || node->type == DS4_JT_NULL ? NULL : node;
}

static inline bool ds4_node_is(const struct ds4_jt_node *node, enum ds4_jt_type type)
{
    return node != NULL && node->type == type;
}

static inline bool ds4_node_is_word(const struct ds4_jt_node *node, const char *word)
{
    return ds4_node_is(node, DS4_JT_STRING) && ds4_str_equal(node->str, ds4_str_view(word));
}

#endif

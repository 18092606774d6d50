/* What prefix.c (look-up, tree) and prefix_room.c (hot slots, eviction, the check) share.  Nobody else
 * includes this. */
#ifndef DS4_ROUTER_SCHED_PREFIX_NODE_H
#define DS4_ROUTER_SCHED_PREFIX_NODE_H

#include "router/sched/prefix.h"

#include <xxhash.h>

#define DS4_NO_BLOCK (-1)

struct ds4_prefix_node {
    struct ds4_prefix_node *parent; /* NULL: a root, which has no tokens */
    struct ds4_prefix_node *child;  /* first of a list */
    struct ds4_prefix_node *prev, *next;
    struct ds4_prefix_node *leaf_prev, *leaf_next;
    struct ds4_prefix_node *hash_next;
    XXH128_hash_t key; /* chain hash up to its end; of a part of a chunk: not set */
    struct ds4_point *point;
    uint64_t maker;
    uint64_t stamp; /* the newest lookup whose prompt has all of its tokens */
    uint64_t guard; /* ... or some of them: not to be evicted now */
    uint64_t sweep; /* n_free_child is of this count of reclaimable blocks */
    double value;
    double hits; /* at hit_ns, halves with time */
    int64_t hit_ns;
    int32_t begin;
    int32_t n; /* tokens: DS4_CHUNK_TOK if full, 0 for a root */
    int32_t block;
    int32_t refs; /* sequences that stand on it */
    int32_t n_child;
    int32_t n_free_child;
    int32_t token[DS4_CHUNK_TOK];
};

static inline int32_t ds4_node_end(const struct ds4_prefix_node *node)
{
    return node->begin + node->n;
}

static inline bool ds4_node_is_full(const struct ds4_prefix_node *node)
{
    return node->n == DS4_CHUNK_TOK;
}

/* An admitted request is going to start from one of its points. */
static inline bool ds4_node_is_pinned(const struct ds4_prefix_node *node)
{
    for (const struct ds4_point *point = node->point; point != NULL; point = point->next)
        if (point->pins > 0)
            return true;
    return false;
}

/* Takes a node without children out, with its points and its reference to the block. */
void ds4_node_remove(struct ds4_prefix *prefix, struct ds4_prefix_node *leaf);
/* The full chunk with these tokens behind `parent`, NULL if there is none. */
struct ds4_prefix_node *ds4_node_find(const struct ds4_prefix *prefix,
                                      const struct ds4_prefix_node *parent, XXH128_hash_t key,
                                      const int32_t *token);

#endif

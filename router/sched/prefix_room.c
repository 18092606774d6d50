/* Room in the prefix index: hot slots, which node goes first, and the recount (step 4).
 *
 * Nodes go leaf first, the one of least value: what it would cost to compute its tokens again, times how
 * often they were wanted, above a clock that stands at the newest victim's value, so that what nobody asks
 * for grows old (GreedyDual-Size with frequency).
 * Invariant: reclaimable() counts exactly what evicting every victim in turn would free, so that a request
 * that cannot be admitted evicts nothing. */
#include "router/sched/prefix_node.h"

/* ---- hot slots ------------------------------------------------------------------------------------- */

int ds4_prefix_keep_hot(struct ds4_prefix *p, const struct ds4_hot *hot, struct ds4_err *err)
{
    if (DS4_VEC_PUSH(&p->hot, *hot) != 0)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for a hot slot");
    return 0;
}

struct ds4_hot ds4_prefix_take_hot(struct ds4_prefix *p, int32_t index)
{
    struct ds4_hot hot = p->hot.ptr[index];

    p->hot.ptr[index] = p->hot.ptr[--p->hot.len];
    return hot;
}

int32_t ds4_prefix_coldest(const struct ds4_prefix *p, int32_t keep, uint64_t affinity)
{
    int32_t coldest = -1;
    bool own = false;

    for (int32_t i = 0; i < (int32_t)p->hot.len; i++) {
        const struct ds4_hot *hot = &p->hot.ptr[i];
        bool mine = affinity != 0 && hot->affinity == affinity;

        if (i == keep || ds4_points_waits_for(p->points, hot->lease->slot) || (own && !mine))
            continue;
        if (coldest < 0 || (mine && !own) || hot->used_ns < p->hot.ptr[coldest].used_ns)
            coldest = i;
        own |= mine;
    }
    return coldest;
}

int32_t ds4_prefix_hot_on(const struct ds4_prefix *p, const struct ds4_prefix_node *node)
{
    for (int32_t i = 0; i < (int32_t)p->hot.len; i++)
        if (p->hot.ptr[i].node == node)
            return i;
    return -1;
}

/* ---- eviction -------------------------------------------------------------------------------------- */

static bool in_use(const struct ds4_prefix *p, const struct ds4_prefix_node *node)
{
    return node->refs > 0 || node->stamp == p->stamp || node->guard == p->stamp ||
           ds4_node_is_pinned(node);
}

int32_t ds4_prefix_reclaimable(struct ds4_prefix *p)
{
    int32_t n = 0;

    p->sweep++;
    memset(p->scratch, 0, (size_t)p->n_blocks * sizeof(*p->scratch));
    /* Up from each leaf; the last free child of a node goes on to it.  A block is free once all nodes
     * that have it are. */
    for (struct ds4_prefix_node *leaf = p->leaf; leaf != NULL; leaf = leaf->leaf_next) {
        struct ds4_prefix_node *node = leaf;

        while (node->parent != NULL && !in_use(p, node)) {
            p->scratch[node->block]++;
            if (ds4_budget_is_cached(p->budget, node->block) &&
                p->scratch[node->block] == ds4_budget_index_refs(p->budget, node->block))
                n++;
            node = node->parent;
            if (node->sweep != p->sweep) {
                node->sweep = p->sweep;
                node->n_free_child = 0;
            }
            if (++node->n_free_child < node->n_child)
                break;
        }
    }
    return n;
}

struct ds4_prefix_node *ds4_prefix_victim(const struct ds4_prefix *p)
{
    struct ds4_prefix_node *victim = NULL;

    for (struct ds4_prefix_node *node = p->leaf; node != NULL; node = node->leaf_next)
        if ((victim == NULL || node->value < victim->value) && !in_use(p, node))
            victim = node;
    return victim;
}

void ds4_prefix_evict(struct ds4_prefix *p, struct ds4_prefix_node *victim)
{
    if (victim->value > p->clock)
        p->clock = victim->value;
    ds4_node_remove(p, victim);
}

/* ---- the check ------------------------------------------------------------------------------------- */

static const struct ds4_prefix_node *next_node(const struct ds4_prefix_node *node)
{
    if (node->child != NULL)
        return node->child;
    while (node != NULL && node->next == NULL)
        node = node->parent;
    return node == NULL ? NULL : node->next;
}

static int check_node(const struct ds4_prefix *p, const struct ds4_prefix_node *node,
                      struct ds4_err *err)
{
    int32_t n_child = 0;

    for (const struct ds4_prefix_node *child = node->child; child != NULL; child = child->next)
        n_child++;
    if (n_child != node->n_child || node->refs < 0 || (n_child > 0 && !ds4_node_is_full(node)))
        return ds4_fail(err, DS4_E_BUG, "node at %d: %d children, %d counted, %d references",
                        node->begin, n_child, node->n_child, node->refs);
    if (node->begin != ds4_node_end(node->parent) || node->n < 1 || node->n > DS4_CHUNK_TOK)
        return ds4_fail(err, DS4_E_BUG, "node at %d has %d tokens after %d", node->begin, node->n,
                        ds4_node_end(node->parent));
    if (ds4_node_is_full(node) && ds4_node_find(p, node->parent, node->key, node->token) != node)
        return ds4_fail(err, DS4_E_BUG, "node at %d is not found by its tokens", node->begin);
    for (const struct ds4_point *point = node->point; point != NULL; point = point->next)
        if (point->node != node || point->pos <= node->begin || point->pos > ds4_node_end(node))
            return ds4_fail(err, DS4_E_BUG, "node at %d has a point at %d", node->begin,
                            point->pos);
    return 0;
}

int ds4_prefix_check(const struct ds4_prefix *p, struct ds4_err *err)
{
    int64_t n_tok = 0;
    int32_t n_node = 0;

    memset(p->scratch, 0, (size_t)p->n_blocks * sizeof(*p->scratch));
    for (uint32_t i = 0; i < p->n_bucket; i++)
        for (const struct ds4_prefix_node *root = p->bucket[i]; root != NULL;
             root = root->hash_next)
            for (const struct ds4_prefix_node *node = root->parent == NULL ? next_node(root) : NULL;
                 node != NULL; node = next_node(node)) {
                if (check_node(p, node, err) != 0)
                    return -1;
                n_tok += node->n;
                n_node++;
                p->scratch[node->block]++;
            }
    for (int32_t b = 0; b < p->n_blocks; b++)
        if (p->scratch[b] != ds4_budget_index_refs(p->budget, b))
            return ds4_fail(err, DS4_E_BUG, "block %d: %d nodes have it, the ledger says %d", b,
                            p->scratch[b], ds4_budget_index_refs(p->budget, b));
    if (n_tok != p->n_tok || n_node != p->n_node)
        return ds4_fail(err, DS4_E_BUG, "%d nodes of %lld tokens, the books say %d of %lld", n_node,
                        (long long)n_tok, p->n_node, (long long)p->n_tok);
    return 0;
}

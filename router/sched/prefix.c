/* The prefix index (step 4).
 *
 * The rule for cutting back a hot slot (m = the cut): m >= install_pos and hi - m <= hot window.  `hi`
 * never falls while a sequence keeps its slot, so cuts compose: what an abandoned branch overwrote stays
 * overwritten.
 *
 * Two chunks lie in one block.  Branches that part inside a block have a copy of it each, so the block of
 * the deepest chunk of a path has the rows of the whole path that lie in it.
 * Rejected: edges of any length with splits (a split in the middle of a block would need a reference for
 * each half, and every eviction a merge), rounding hits to blocks (short prompts would never hit). */
#include "router/sched/prefix.h"

#include "router/sched/prefix_node.h"

#include <stdlib.h>

#define DS4_PREFIX_COMPARE_TOK 256 /* tokens per memcmp: small enough to find the spot quickly */
#define DS4_PREFIX_TRIFLE_TOK  64  /* a common part of so much is always worth having, */
#define DS4_PREFIX_TRIFLE_PART 100 /* and of less, if it is this part of the entry */
#define DS4_HIT_HALF_LIFE_NS   (INT64_C(6) * 3600 * 1000000000)
#define DS4_DEPTH_DOUBLES_TOK  65536.0 /* so deep, a token costs twice as much to compute */
#define DS4_BOOST              4.0     /* where branches part, and where messages begin */

const char *ds4_kv_source_text(enum ds4_kv_source source)
{
    static const char *const text[] = {"cold", "hot", "tail", "anchor", "replay", "disk"};

    return text[source];
}

int32_t ds4_prefix_common(const int32_t *a, int32_t n_a, const int32_t *b, int32_t n_b)
{
    int32_t n = n_a < n_b ? n_a : n_b;
    int32_t t = 0;

    while (t + DS4_PREFIX_COMPARE_TOK <= n &&
           memcmp(a + t, b + t, DS4_PREFIX_COMPARE_TOK * sizeof(*a)) == 0)
        t += DS4_PREFIX_COMPARE_TOK;
    while (t < n && a[t] == b[t])
        t++;
    return t;
}

/* ---- the table of full chunks and roots ------------------------------------------------------------ */

static XXH128_hash_t chunk_key(const struct ds4_prefix_node *parent, const int32_t *token)
{
    return ds4_chain_next(parent->key, token, DS4_CHUNK_TOK);
}

static struct ds4_prefix_node **bucket_of(const struct ds4_prefix *p, XXH128_hash_t key)
{
    return &p->bucket[key.low64 & (p->n_bucket - 1)];
}

static void hash_add(struct ds4_prefix *p, struct ds4_prefix_node *node)
{
    struct ds4_prefix_node **bucket = bucket_of(p, node->key);

    node->hash_next = *bucket;
    *bucket = node;
}

static void hash_remove(struct ds4_prefix *p, struct ds4_prefix_node *node)
{
    struct ds4_prefix_node **at = bucket_of(p, node->key);

    while (*at != node)
        at = &(*at)->hash_next;
    *at = node->hash_next;
}

static struct ds4_prefix_node *find_root(const struct ds4_prefix *p, uint64_t salt)
{
    XXH128_hash_t key = ds4_chain_root(salt);
    struct ds4_prefix_node *node = *bucket_of(p, key);

    while (node != NULL && (node->parent != NULL || !XXH128_isEqual(node->key, key)))
        node = node->hash_next;
    return node;
}

struct ds4_prefix_node *ds4_node_find(const struct ds4_prefix *p,
                                      const struct ds4_prefix_node *parent, XXH128_hash_t key,
                                      const int32_t *token)
{
    struct ds4_prefix_node *node = *bucket_of(p, key);

    while (node != NULL && (node->parent != parent || !XXH128_isEqual(node->key, key) ||
                            memcmp(node->token, token, sizeof(node->token)) != 0))
        node = node->hash_next;
    return node;
}

/* ---- the tree -------------------------------------------------------------------------------------- */

static void leaf_add(struct ds4_prefix *p, struct ds4_prefix_node *node)
{
    node->leaf_prev = NULL;
    node->leaf_next = p->leaf;
    if (p->leaf != NULL)
        p->leaf->leaf_prev = node;
    p->leaf = node;
}

static void leaf_remove(struct ds4_prefix *p, struct ds4_prefix_node *node)
{
    *(node->leaf_prev != NULL ? &node->leaf_prev->leaf_next : &p->leaf) = node->leaf_next;
    if (node->leaf_next != NULL)
        node->leaf_next->leaf_prev = node->leaf_prev;
}

static void revalue(const struct ds4_prefix *p, struct ds4_prefix_node *node)
{
    double each = 1 + (double)node->begin / DS4_DEPTH_DOUBLES_TOK;
    bool boost = node->n_child >= 2;

    for (const struct ds4_point *point = node->point; point != NULL; point = point->next)
        boost |= point->class == DS4_POINT_BOUNDARY;
    node->value = p->clock + (node->hits + 1) * each * (boost ? DS4_BOOST : 1);
}

static void link_child(struct ds4_prefix *p, struct ds4_prefix_node *parent,
                       struct ds4_prefix_node *node)
{
    if (parent->n_child++ == 0 && parent->parent != NULL)
        leaf_remove(p, parent);
    node->parent = parent;
    node->prev = NULL;
    node->next = parent->child;
    if (parent->child != NULL)
        parent->child->prev = node;
    parent->child = node;
    leaf_add(p, node);
    if (parent->n_child == 2)
        revalue(p, parent); /* a place where branches part */
}

/* A root without children that nobody stands on is of no use. */
static void drop_empty_root(struct ds4_prefix *p, struct ds4_prefix_node *node)
{
    if (node->parent != NULL || node->n_child > 0 || node->refs > 0)
        return;
    hash_remove(p, node);
    free(node);
}

/* Its root stays, even childless. */
static void remove_leaf(struct ds4_prefix *p, struct ds4_prefix_node *node)
{
    struct ds4_prefix_node *parent = node->parent;

    while (node->point != NULL)
        ds4_points_drop(p->points, node->point);
    leaf_remove(p, node);
    *(node->prev != NULL ? &node->prev->next : &parent->child) = node->next;
    if (node->next != NULL)
        node->next->prev = node->prev;
    if (--parent->n_child == 0 && parent->parent != NULL)
        leaf_add(p, parent);
    if (ds4_node_is_full(node))
        hash_remove(p, node);
    ds4_budget_unshare(p->budget, node->block);
    p->n_tok -= node->n;
    p->n_node--;
    free(node);
}

void ds4_node_remove(struct ds4_prefix *p, struct ds4_prefix_node *node)
{
    struct ds4_prefix_node *parent = node->parent;

    remove_leaf(p, node);
    drop_empty_root(p, parent);
}

int ds4_prefix_init(struct ds4_prefix *p, struct ds4_budget *budget, struct ds4_points *points,
                    int32_t n_blocks, int32_t hot_window_tok, struct ds4_err *err)
{
    *p = (struct ds4_prefix){
        .budget = budget,
        .points = points,
        .n_blocks = n_blocks,
        .hot_window_tok = hot_window_tok,
        .n_bucket = 64,
    };
    while (p->n_bucket < (uint32_t)n_blocks * (DS4_BLOCK_TOK / DS4_CHUNK_TOK))
        p->n_bucket *= 2;
    p->bucket = calloc(p->n_bucket, sizeof(struct ds4_prefix_node *));
    p->scratch = calloc((size_t)n_blocks, sizeof(*p->scratch));
    if (p->bucket != NULL && p->scratch != NULL)
        return 0;
    ds4_prefix_deinit(p);
    return ds4_fail(err, DS4_E_NOMEM, "no memory for an index of %d blocks", n_blocks);
}

void ds4_prefix_deinit(struct ds4_prefix *p)
{
    while (p->leaf != NULL)
        ds4_node_remove(p, p->leaf);
    for (uint32_t i = 0; i < p->n_bucket && p->bucket != NULL; i++)
        while (p->bucket[i] != NULL) { /* roots that sequences still stand on */
            struct ds4_prefix_node *root = p->bucket[i];

            p->bucket[i] = root->hash_next;
            free(root);
        }
    free(p->bucket);
    free(p->scratch);
    DS4_VEC_DEINIT(&p->hot);
    *p = (struct ds4_prefix){0};
}

/* ---- looking up ------------------------------------------------------------------------------------ */

static void better(struct ds4_prefix_hit *hit, struct ds4_prefix_node *node,
                   struct ds4_point *point)
{
    if (!point->ready || point->pos <= hit->start)
        return;
    hit->start = point->pos;
    hit->point = point;
    hit->node = node;
    hit->hot = -1;
    hit->source = point->pos % DS4_ANCHOR_TOK == 0 ? DS4_SOURCE_ANCHOR : DS4_SOURCE_TAIL;
}

/* Points of the node at or below `most`. */
static void look_at_points(struct ds4_prefix_hit *hit, struct ds4_prefix_node *node, int32_t most)
{
    for (struct ds4_point *point = node->point; point != NULL; point = point->next)
        if (point->pos <= most)
            better(hit, node, point);
}

/* Tokens the prompt shares with the path of a slot, or -1 if they part too far back for its rings.  The
 * path of the prompt carries the stamp. */
static int32_t common_with_hot(const struct ds4_prefix *p, const struct ds4_hot *hot,
                               const int32_t *prompt, int32_t n_prompt)
{
    const struct ds4_prefix_node *node = hot->node;

    /* The hot window is no longer than a chunk, so two chunks reach as far back as any cut can. */
    for (int32_t up = 0; up < 3 && node != NULL; up++, node = node->parent) {
        int32_t common;

        if (node->stamp == p->stamp)
            return hot->pos < ds4_node_end(node) ? hot->pos : ds4_node_end(node);
        if (node->parent == NULL)
            return -1;
        if (node->parent->stamp != p->stamp)
            continue;
        common = node->begin + ds4_prefix_common(node->token, node->n, prompt + node->begin,
                                                 n_prompt - node->begin);
        return hot->pos < common ? hot->pos : common;
    }
    return -1;
}

static void look_at_hot(const struct ds4_prefix *p, const int32_t *prompt, int32_t n_prompt,
                        struct ds4_prefix_hit *hit)
{
    for (size_t i = 0; i < p->hot.len; i++) {
        const struct ds4_hot *hot = &p->hot.ptr[i];
        int32_t common = common_with_hot(p, hot, prompt, n_prompt);
        int32_t cut = common < n_prompt ? common : n_prompt - 1;
        struct ds4_prefix_node *node = hot->node;

        if (cut < 1 || cut < hit->start || (cut == hit->start && hit->hot >= 0) ||
            cut < hot->install_pos || hot->hi - cut > p->hot_window_tok)
            continue;
        if (cut < DS4_PREFIX_TRIFLE_TOK && cut < hot->pos / DS4_PREFIX_TRIFLE_PART)
            continue;
        while (node->begin >= cut)
            node = node->parent;
        hit->start = cut;
        hit->source = DS4_SOURCE_HOT;
        hit->hot = (int32_t)i;
        hit->point = NULL;
        hit->node = node;
    }
}

/* The last resort before 0 where rows exist but no rings anywhere near: a part of the prompt is run again for
 * its rings alone (kv-cache.md 1.5, O5).  `node` has the row most - 1. */
static void look_at_replay(const struct ds4_prefix *p, struct ds4_prefix_node *node, int32_t most,
                           struct ds4_prefix_hit *hit)
{
    int32_t from = (most - p->replay_tok) / DS4_ANCHOR_TOK * DS4_ANCHOR_TOK;

    if (p->replay_tok == 0 || most <= p->replay_tok || from <= hit->start)
        return;
    while (node->parent != NULL && node->begin >= most)
        node = node->parent;
    *hit = (struct ds4_prefix_hit){.lcp = hit->lcp,
                                   .start = most,
                                   .run = from,
                                   .source = DS4_SOURCE_REPLAY,
                                   .hot = -1,
                                   .node = node};
}

struct ds4_prefix_hit ds4_prefix_find(struct ds4_prefix *p, const int32_t *prompt, int32_t n_prompt,
                                      uint64_t salt)
{
    struct ds4_prefix_hit hit = {.hot = -1};
    struct ds4_prefix_node *node = find_root(p, salt), *next, *longest;
    int32_t most;

    p->stamp++;
    if (node == NULL)
        return hit;
    node->stamp = p->stamp;
    while (n_prompt - ds4_node_end(node) >= DS4_CHUNK_TOK &&
           (next = ds4_node_find(p, node, chunk_key(node, prompt + ds4_node_end(node)),
                                 prompt + ds4_node_end(node))) != NULL) {
        node = next;
        node->stamp = p->stamp;
    }
    hit.lcp = ds4_node_end(node);
    longest = node;
    for (next = node->child; next != NULL; next = next->next) {
        int32_t common = next->begin + ds4_prefix_common(next->token, next->n, prompt + next->begin,
                                                         n_prompt - next->begin);

        if (common > next->begin)
            next->guard = p->stamp;
        if (common > hit.lcp) {
            hit.lcp = common;
            longest = next;
        }
        look_at_points(&hit, next, common < n_prompt ? common : n_prompt - 1);
    }
    most = hit.lcp < n_prompt ? hit.lcp : n_prompt - 1;
    for (next = node; next != NULL && ds4_node_end(next) > hit.start; next = next->parent)
        look_at_points(&hit, next, most);
    look_at_hot(p, prompt, n_prompt, &hit);
    if (hit.hot >= 0) /* which may end on a branch of its own */
        p->hot.ptr[hit.hot].node->guard = p->stamp;
    hit.run = hit.start;
    look_at_replay(p, longest, most, &hit);
    return hit;
}

static double decay(double hits, int64_t age_ns)
{
    for (; age_ns >= DS4_HIT_HALF_LIFE_NS && hits > 0.01; age_ns -= DS4_HIT_HALF_LIFE_NS)
        hits /= 2;
    return hits;
}

void ds4_prefix_use(struct ds4_prefix *p, const struct ds4_prefix_hit *hit, int64_t now_ns)
{
    struct ds4_prefix_node *node = hit->node;

    if (hit->point != NULL)
        ds4_points_touch(p->points, hit->point);
    for (; node != NULL && node->parent != NULL; node = node->parent) {
        node->hits = decay(node->hits, now_ns - node->hit_ns) + 1;
        node->hit_ns = now_ns;
        revalue(p, node);
    }
}

void ds4_prefix_blocks(const struct ds4_prefix_hit *hit, int32_t *block)
{
    int32_t next = ds4_budget_blocks(hit->start) - 1;

    for (const struct ds4_prefix_node *node = hit->node; node != NULL && next >= 0;
         node = node->parent)
        if (node->begin / DS4_BLOCK_TOK == next)
            block[next--] = node->block;
}

/* ---- paths ------------------------------------------------------------------------------------------ */

struct ds4_prefix_node *ds4_prefix_rows(const struct ds4_prefix *p, const int32_t *token,
                                        int32_t n_tok, uint64_t salt, int32_t align)
{
    struct ds4_prefix_node *node = find_root(p, salt), *next;

    while (node != NULL && n_tok - ds4_node_end(node) >= DS4_CHUNK_TOK &&
           (next = ds4_node_find(p, node, chunk_key(node, token + ds4_node_end(node)),
                                 token + ds4_node_end(node))) != NULL)
        node = next;
    while (node != NULL && ds4_node_end(node) % align != 0)
        node = node->parent;
    return node != NULL && node->parent != NULL ? node : NULL;
}

int32_t ds4_prefix_end(const struct ds4_prefix_node *node)
{
    return ds4_node_end(node);
}

XXH128_hash_t ds4_prefix_path(const struct ds4_point *point, int32_t *token)
{
    const struct ds4_prefix_node *node = point->node;

    for (; node->parent != NULL; node = node->parent) {
        int32_t end = ds4_node_end(node) < point->pos ? ds4_node_end(node) : point->pos;

        memcpy(token + node->begin, node->token, (size_t)(end - node->begin) * sizeof(*token));
    }
    return node->key;
}

void ds4_prefix_path_blocks(const struct ds4_point *point, int32_t begin, int32_t end,
                            int32_t *block)
{
    int32_t next = ds4_budget_blocks(end) - 1, first = begin / DS4_BLOCK_TOK;

    for (const struct ds4_prefix_node *node = point->node; node != NULL && next >= first;
         node = node->parent)
        if (node->begin < end && node->begin / DS4_BLOCK_TOK == next)
            block[next-- - first] = node->block;
}

bool ds4_prefix_is_above(const struct ds4_prefix_node *node, const struct ds4_prefix_node *below)
{
    while (below != NULL && below != node && below->begin >= node->begin)
        below = below->parent;
    return below == node;
}

/* ---- standing and putting -------------------------------------------------------------------------- */

struct ds4_prefix_node *ds4_prefix_stand(struct ds4_prefix *p, const struct ds4_prefix_hit *hit,
                                         uint64_t salt)
{
    struct ds4_prefix_node *node = hit->node != NULL ? hit->node : find_root(p, salt);

    while (node != NULL && node->parent != NULL &&
           (ds4_node_end(node) > hit->start || !ds4_node_is_full(node)))
        node = node->parent;
    if (node == NULL) {
        node = calloc(1, sizeof(*node));
        if (node == NULL)
            return NULL;
        node->key = ds4_chain_root(salt);
        node->block = DS4_NO_BLOCK;
        hash_add(p, node);
    }
    node->refs++;
    return node;
}

void ds4_prefix_leave(struct ds4_prefix *p, struct ds4_prefix_node *node)
{
    if (node == NULL)
        return;
    node->refs--;
    drop_empty_root(p, node);
}

/* Gives the node the block of `put`, rows below its end immutable. */
static int take_block(struct ds4_prefix *p, struct ds4_prefix_node *node,
                      const struct ds4_prefix_put *put, struct ds4_err *err)
{
    int32_t block = put->block[node->begin / DS4_BLOCK_TOK], old = node->block;

    if (ds4_budget_share(p->budget, block, node->begin % DS4_BLOCK_TOK + node->n, err) != 0)
        return -1;
    node->block = block;
    if (old != DS4_NO_BLOCK)
        ds4_budget_unshare(p->budget, old);
    return 0;
}

/* A part of a chunk that these tokens go on with becomes as long as they are. */
static int grow(struct ds4_prefix *p, struct ds4_prefix_node *node,
                const struct ds4_prefix_put *put, int32_t n, struct ds4_err *err)
{
    int32_t before = node->n;

    memcpy(node->token, put->token + node->begin, (size_t)n * sizeof(*node->token));
    node->n = n;
    if (take_block(p, node, put, err) != 0) {
        node->n = before;
        return -1;
    }
    p->n_tok += n - before;
    if (ds4_node_is_full(node)) {
        node->key = chunk_key(node->parent, node->token);
        hash_add(p, node);
    }
    return 0;
}

static struct ds4_prefix_node *new_node(struct ds4_prefix *p, struct ds4_prefix_node *parent,
                                        const struct ds4_prefix_put *put, int32_t n,
                                        struct ds4_err *err)
{
    struct ds4_prefix_node *node = calloc(1, sizeof(*node));

    if (node == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for a node of the index");
        return NULL;
    }
    node->begin = ds4_node_end(parent);
    node->parent = parent;
    node->block = DS4_NO_BLOCK;
    node->maker = put->maker;
    node->hit_ns = put->now_ns;
    if (grow(p, node, put, n, err) != 0) {
        free(node);
        return NULL;
    }
    p->n_node++;
    link_child(p, parent, node);
    revalue(p, node);
    return node;
}

/* The chunk of n tokens after `parent`: found, grown or made. */
static struct ds4_prefix_node *put_chunk(struct ds4_prefix *p, struct ds4_prefix_node *parent,
                                         const struct ds4_prefix_put *put, int32_t n,
                                         struct ds4_err *err)
{
    const int32_t *token = put->token + ds4_node_end(parent);
    struct ds4_prefix_node *node = NULL;

    if (n == DS4_CHUNK_TOK)
        node = ds4_node_find(p, parent, chunk_key(parent, token), token);
    if (node != NULL) {
        /* What goes on in the next chunk has this one's rows in its block: no need for two. */
        if (node->n_child == 0 && put->n_tok > ds4_node_end(node) &&
            node->begin / DS4_BLOCK_TOK == ds4_node_end(node) / DS4_BLOCK_TOK &&
            take_block(p, node, put, err) != 0)
            return NULL;
        return node;
    }
    for (node = parent->child; node != NULL; node = node->next)
        if (node->n >= n && ds4_prefix_common(node->token, node->n, token, n) == n)
            return node; /* a longer one covers it */
    for (node = parent->child; node != NULL; node = node->next)
        if (ds4_prefix_common(node->token, node->n, token, n) == node->n)
            return grow(p, node, put, n, err) == 0 ? node : NULL;
    return new_node(p, parent, put, n, err);
}

struct ds4_prefix_node *ds4_prefix_put(struct ds4_prefix *p, struct ds4_prefix_node **from,
                                       const struct ds4_prefix_put *put, struct ds4_err *err)
{
    struct ds4_prefix_node *node = *from, *last = *from;

    while (put->n_tok - ds4_node_end(node) >= DS4_CHUNK_TOK) {
        last = put_chunk(p, node, put, DS4_CHUNK_TOK, err);
        if (last == NULL)
            return NULL;
        node->refs--;
        node = last;
        node->refs++;
        *from = node;
    }
    if (put->odd_end && put->n_tok > ds4_node_end(node))
        last = put_chunk(p, node, put, put->n_tok - ds4_node_end(node), err);
    return last;
}

void ds4_prefix_attach(struct ds4_prefix *p, struct ds4_prefix_node *node, struct ds4_point *point)
{
    while (node->parent != NULL && node->begin >= point->pos)
        node = node->parent;
    for (const struct ds4_point *other = node->point; other != NULL; other = other->next)
        if (other->pos == point->pos) {
            ds4_points_drop(p->points, point);
            return;
        }
    if (node->parent == NULL || ds4_node_end(node) < point->pos) {
        ds4_points_drop(p->points, point);
        return;
    }
    ds4_points_hang(p->points, point, node);
    point->next = node->point;
    node->point = point;
}

void ds4_prefix_detach(struct ds4_point *point)
{
    struct ds4_point **at = &point->node->point;

    while (*at != point)
        at = &(*at)->next;
    *at = point->next;
    point->node = NULL;
}

void ds4_prefix_thin(struct ds4_prefix *p, struct ds4_prefix_node *node, int32_t pos, bool tails)
{
    int32_t dense_from = pos - DS4_ANCHOR_DENSE_TOK;

    /* What lies further back was thinned when it fell out of the zone. */
    for (; node != NULL && ds4_node_end(node) > dense_from - DS4_ANCHOR_DENSE_TOK;
         node = node->parent) {
        struct ds4_point *next;

        for (struct ds4_point *point = node->point; point != NULL; point = next) {
            bool old = point->class == DS4_POINT_DENSE && point->pos <= dense_from;

            next = point->next;
            if (tails && node->n_child < 2)
                old |= point->class == DS4_POINT_TAIL && point->pos < pos;
            if (old && point->pins == 0)
                ds4_points_drop(p->points, point);
        }
    }
}

static bool is_unused_of(const struct ds4_prefix *p, const struct ds4_prefix_node *node,
                         uint64_t maker)
{
    return !ds4_node_is_pinned(node) && node->parent != NULL && node->n_child == 0 &&
           node->refs == 0 && node->maker == maker && ds4_prefix_hot_on(p, node) < 0;
}

void ds4_prefix_unmake(struct ds4_prefix *p, struct ds4_prefix_node *node, uint64_t maker)
{
    struct ds4_prefix_node *next;

    if (node == NULL)
        return;
    for (struct ds4_prefix_node *child = node->child; child != NULL; child = next) {
        next = child->next;
        if (is_unused_of(p, child, maker))
            ds4_node_remove(p, child);
    }
    node->refs--;
    while (is_unused_of(p, node, maker)) {
        next = node->parent;
        remove_leaf(p, node);
        node = next;
    }
    drop_empty_root(p, node);
}

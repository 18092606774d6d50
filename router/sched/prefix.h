/* The prefix index: what is cached, token for token, and from where a prompt can be computed.
 *
 * A tree of chunks.  A node holds up to DS4_CHUNK_TOK tokens and the one block that has their rows; only a
 * full chunk has children, so nodes end at multiples of DS4_CHUNK_TOK, and at the odd ends of what was run.
 * Full chunks are found by a chain hash (of the parent's and their own tokens, seeded with the tenant's
 * salt) and then compared: a hash alone is never trusted.  Hits are exact to the token.
 *
 * Rows are of use only where the rings can be had as well.  Two kinds of places: hot slots, which can be
 * cut back by the hot window, and restore points (point.h) in the stages' memory.  A lookup answers with
 * the highest such place that the prompt shares.
 *
 * Eviction is by value (GreedyDual-Size with frequency): leaf first, the cheapest to compute again
 * first, never a node that somebody stands on or the prompt that is being admitted needs. */
#ifndef DS4_ROUTER_SCHED_PREFIX_H
#define DS4_ROUTER_SCHED_PREFIX_H

#include "common/err.h"
#include "common/vec.h"
#include "router/sched/budget.h"
#include "router/sched/chain.h"
#include "router/sched/point.h"

#include <stdbool.h>
#include <stdint.h>

DS4_VEC_TYPE(ds4_tokens, int32_t);

struct ds4_prefix_node; /* prefix.c */

/* A finished sequence that keeps its slot: the rings hold the state after the first `pos` tokens of the
 * path that ends in `node`, and can be cut back to install_pos or hi - hot window, whichever is higher. */
struct ds4_hot {
    const struct ds4_kv_lease *lease; /* hot; the entry's holder releases or resumes it */
    struct ds4_prefix_node *node;
    uint64_t seq; /* the sequence the slot is open for */
    int32_t pos;
    int32_t hi;
    int32_t install_pos;
    uint64_t affinity; /* of the session, 0 = unknown */
    int64_t used_ns;
};

enum ds4_kv_source {
    DS4_SOURCE_COLD,
    DS4_SOURCE_HOT,
    DS4_SOURCE_TAIL,
    DS4_SOURCE_ANCHOR,
    DS4_SOURCE_REPLAY,
    DS4_SOURCE_DISK
};
/* "cold" | "hot" | "tail" | "anchor" | "replay" | "disk": metric label. */
const char *ds4_kv_source_text(enum ds4_kv_source source);

struct ds4_prefix {
    struct ds4_budget *budget; /* borrowed */
    struct ds4_points *points; /* borrowed */
    int32_t hot_window_tok;
    int32_t replay_tok;              /* of struct ds4_kv_host; 0: no replays */
    struct ds4_prefix_node **bucket; /* [n_bucket] full chunks and roots by chain hash */
    uint32_t n_bucket;               /* a power of two */
    struct ds4_prefix_node *leaf;    /* list of those without children */
    DS4_VEC(struct ds4_hot) hot;
    uint64_t stamp; /* marks the path of the newest lookup */
    uint64_t sweep;
    double clock;  /* value of the newest victim */
    int64_t n_tok; /* cached */
    int32_t n_node;
    int32_t *scratch; /* [n_blocks] */
    int32_t n_blocks;
};

struct ds4_prefix_hit {
    int32_t lcp;   /* tokens the prompt shares with anything cached */
    int32_t start; /* rows from here on are made: 0 <= start < n_prompt */
    int32_t run; /* tokens from here on are computed: start, or less where rings are filled anew */
    enum ds4_kv_source source;
    int32_t hot;                  /* index of the slot to go on with, -1 = none */
    struct ds4_point *point;      /* to be installed, NULL = none */
    struct ds4_prefix_node *node; /* has the row start - 1; NULL if start is 0 */
};

/* `budget` and `points` are borrowed.  -1 with DS4_E_NOMEM. */
int ds4_prefix_init(struct ds4_prefix *prefix, struct ds4_budget *budget, struct ds4_points *points,
                    int32_t n_blocks, int32_t hot_window_tok, struct ds4_err *err) DS4_MUST_CHECK;
/* Frees the nodes; ledger and points are to be freed with it, leases are the caller's. */
void ds4_prefix_deinit(struct ds4_prefix *prefix);

/* From where the prompt can be computed.  At least one prompt token is left to run.  A hot slot is not
 * worth taking when the common part is a trifle of it: a short side request must not eat a long
 * conversation.  The path is protected from eviction until the next lookup. */
struct ds4_prefix_hit ds4_prefix_find(struct ds4_prefix *prefix, const int32_t *prompt,
                                      int32_t n_prompt, uint64_t salt);
/* The hit is used: its path gains value. */
void ds4_prefix_use(struct ds4_prefix *prefix, const struct ds4_prefix_hit *hit, int64_t now_ns);
/* The blocks of positions below start of a hit: block[ds4_budget_blocks(hit->start)]. */
void ds4_prefix_blocks(const struct ds4_prefix_hit *hit, int32_t *block);

/* The deepest node of these tokens whose rows all exist, at a multiple of `align` (itself one of
 * DS4_CHUNK_TOK); NULL: not so much.  Looks and touches nothing. */
struct ds4_prefix_node *ds4_prefix_rows(const struct ds4_prefix *prefix, const int32_t *token,
                                        int32_t n_tok, uint64_t salt, int32_t align);
int32_t ds4_prefix_end(const struct ds4_prefix_node *node);
/* The path to a point that hangs on its node: tokens[point->pos], the name of its root. */
XXH128_hash_t ds4_prefix_path(const struct ds4_point *point, int32_t *token);
/* The blocks of rows [begin, end) of that path; begin is a multiple of DS4_BLOCK_TOK. */
void ds4_prefix_path_blocks(const struct ds4_point *point, int32_t begin, int32_t end,
                            int32_t *block);
/* Is `node` on the way to `below`, or it? */
bool ds4_prefix_is_above(const struct ds4_prefix_node *node, const struct ds4_prefix_node *below);

/* Where a running sequence stands: the deepest full chunk below its start, or the root of its salt.  NULL if
 * memory is out: then it cannot be cached.  Held until ds4_prefix_leave or moved by ds4_prefix_put. */
struct ds4_prefix_node *ds4_prefix_stand(struct ds4_prefix *prefix,
                                         const struct ds4_prefix_hit *hit, uint64_t salt);
void ds4_prefix_leave(struct ds4_prefix *prefix, struct ds4_prefix_node *node);

/* Rows that exist now: the tokens of a sequence from the chunk after `from` on. */
struct ds4_prefix_put {
    const int32_t *token; /* from position 0 */
    int32_t n_tok;        /* rows below exist */
    const int32_t *block; /* the sequence's table */
    uint64_t maker;       /* its id */
    int64_t now_ns;
    bool odd_end; /* the last, unfinished chunk as well */
};
/* Adds full chunks, moves *from to the deepest and returns the node that has the last row, NULL with
 * DS4_E_NOMEM or DS4_E_BUG; what was added until then stays. */
struct ds4_prefix_node *ds4_prefix_put(struct ds4_prefix *prefix, struct ds4_prefix_node **from,
                                       const struct ds4_prefix_put *put, struct ds4_err *err);
/* Hangs a point of this path, at or below the end of `node`.  One already there wins. */
void ds4_prefix_attach(struct ds4_prefix *prefix, struct ds4_prefix_node *node,
                       struct ds4_point *point);
void ds4_prefix_detach(struct ds4_point *point);
/* Points of the path to `node` that have outlived their use once it reached `pos`: dense anchors that lie
 * far back, and, if `tails`, exact tails below it. */
void ds4_prefix_thin(struct ds4_prefix *prefix, struct ds4_prefix_node *node, int32_t pos,
                     bool tails);
/* Leaves, and takes out what this maker made of the path and nobody else uses: its rows are not to be
 * trusted. */
void ds4_prefix_unmake(struct ds4_prefix *prefix, struct ds4_prefix_node *node, uint64_t maker);

/* Keeps a slot; *hot is copied. */
int ds4_prefix_keep_hot(struct ds4_prefix *prefix, const struct ds4_hot *hot,
                        struct ds4_err *err) DS4_MUST_CHECK;
struct ds4_hot ds4_prefix_take_hot(struct ds4_prefix *prefix, int32_t index);
/* Which slot to give up, `keep` (-1 = none) excepted: one of the same session first, which has moved on, else
 * the one idle for longest; slots whose state is still to be saved are not ripe.  -1 if there is none. */
int32_t ds4_prefix_coldest(const struct ds4_prefix *prefix, int32_t keep, uint64_t affinity);
/* The slots whose state hangs on this node; -1 = none. */
int32_t ds4_prefix_hot_on(const struct ds4_prefix *prefix, const struct ds4_prefix_node *node);

/* Blocks that eviction could free now. */
int32_t ds4_prefix_reclaimable(struct ds4_prefix *prefix);
/* The node of least value; NULL if all are in use. */
struct ds4_prefix_node *ds4_prefix_victim(const struct ds4_prefix *prefix);
/* Takes a victim out, its points too; no slot may hang on it any more. */
void ds4_prefix_evict(struct ds4_prefix *prefix, struct ds4_prefix_node *victim);

/* Recounts the tree against the ledger: DS4_E_BUG names what is off. */
int ds4_prefix_check(const struct ds4_prefix *prefix, struct ds4_err *err) DS4_MUST_CHECK;

/* Length of the common prefix. */
int32_t ds4_prefix_common(const int32_t *a, int32_t n_a, const int32_t *b, int32_t n_b);

#endif

/* The ledger of the KV cache: the only place that grants blocks and slots, for all stages at once.
 *
 * A block is DS4_BLOCK_TOK tokens of every layer, a slot is one set of rings; ids are valid on every
 * stage.  A grant is all or nothing and is a value: without a lease there is nothing to put into a
 * step.  The lease promises every block up to its cap; the promise is held, and decays as positions
 * are filled with real block ids, so a sequence that was admitted never runs out.
 *
 *   FREE --reserve--> LIVE --retain--> CACHED --resume--> LIVE
 *     ^                 |                |
 *     +-----release-----+----release-----+
 *
 * Ledger: n_blocks = free + promised + live + cached; it is checked after every transition, and a
 * refusal changes nothing.  Pure; O(1) per call beyond the blocks that move. */
#ifndef DS4_ROUTER_SCHED_BUDGET_H
#define DS4_ROUTER_SCHED_BUDGET_H

#include "common/err.h"

#include <stdbool.h>
#include <stdint.h>

#define DS4_BLOCK_TOK 256

struct ds4_budget;

enum ds4_lease_state { DS4_LEASE_FREE, DS4_LEASE_LIVE, DS4_LEASE_CACHED };

/* Permission to write positions 0 .. cap_tok - 1 of one slot.  Owned by the budget; whoever got it
 * from reserve holds it until release. */
struct ds4_kv_lease {
    enum ds4_lease_state state;
    int32_t slot;
    uint32_t epoch; /* differs between any two grants of the slot */
    int32_t cap_tok;
    int32_t n_block;      /* ids given so far */
    const int32_t *block; /* [n_block], position p lies in block[p / DS4_BLOCK_TOK] */
    int32_t n_promised;   /* ids still to come */
};

struct ds4_budget_sums {
    int32_t total, free, promised, live, cached;
    int32_t slots_total, slots_free, slots_live, slots_cached;
};

/* An empty ledger.  max_tok bounds the cap of one lease.  NULL with DS4_E_INVALID or DS4_E_NOMEM. */
struct ds4_budget *ds4_budget_new(int32_t n_blocks, int32_t n_slots, int32_t max_tok,
                                  struct ds4_err *err);
void ds4_budget_free(struct ds4_budget *budget);

/* Blocks that cap_tok positions need. */
int32_t ds4_budget_blocks(int32_t cap_tok);

/* Could `cap_tok` positions ever be granted?  -1 with DS4_E_INVALID naming need and total. */
int ds4_budget_fits(const struct ds4_budget *budget, int32_t cap_tok,
                    struct ds4_err *err) DS4_MUST_CHECK;

/* One slot and the promise of all blocks, or NULL: DS4_E_INVALID as above, or DS4_E_BUSY naming need,
 * free, promised and what eviction could give. */
const struct ds4_kv_lease *ds4_budget_reserve(struct ds4_budget *budget, int32_t cap_tok,
                                              struct ds4_err *err) DS4_MUST_CHECK;

/* Turns promises into ids until positions below upto_tok are covered.  *first is the index of the first
 * new id, *n their number (0 if covered already).  Cannot fail for upto_tok <= cap_tok of a live
 * lease; anything else is DS4_E_BUG. */
int ds4_budget_fill(struct ds4_budget *budget, const struct ds4_kv_lease *lease, int32_t upto_tok,
                    int32_t *first, int32_t *n, struct ds4_err *err) DS4_MUST_CHECK;

/* LIVE -> CACHED: keeps the blocks of the first keep_tok positions, gives everything else back. */
int ds4_budget_retain(struct ds4_budget *budget, const struct ds4_kv_lease *lease, int32_t keep_tok,
                      struct ds4_err *err) DS4_MUST_CHECK;

/* CACHED -> LIVE under a new epoch: keeps the blocks of the first keep_tok positions, promises the rest
 * up to cap_tok.  DS4_E_BUSY or DS4_E_INVALID as for reserve; refused, the lease stays cached and
 * unchanged. */
int ds4_budget_resume(struct ds4_budget *budget, const struct ds4_kv_lease *lease, int32_t keep_tok,
                      int32_t cap_tok, struct ds4_err *err) DS4_MUST_CHECK;

/* A new epoch for a live lease whose cache is about to be written from position 0 again. */
void ds4_budget_renew(struct ds4_budget *budget, const struct ds4_kv_lease *lease);

/* Everything back; *lease becomes NULL.  Releasing NULL is fine, so release is idempotent. */
void ds4_budget_release(struct ds4_budget *budget, const struct ds4_kv_lease **lease);

/* True if slot and epoch name a live lease. */
bool ds4_budget_holds(const struct ds4_budget *budget, int32_t slot, uint32_t epoch);

void ds4_budget_sums(const struct ds4_budget *budget, struct ds4_budget_sums *sums);

/* Recounts everything from the leases and the free list.  -1 with DS4_E_BUG naming what is off; also
 * when any transition since birth left the sums wrong. */
int ds4_budget_check(const struct ds4_budget *budget, struct ds4_err *err) DS4_MUST_CHECK;

/* A number that changes when any part of the ledger does: refusals must leave it alone. */
uint64_t ds4_budget_digest(const struct ds4_budget *budget);

#endif

/* The ledger of the KV cache: the only place that grants blocks and slots, for all stages at once.
 *
 * A block is DS4_BLOCK_TOK tokens of every layer, a slot is one set of rings; ids are valid on every
 * stage.  A grant is all or nothing and is a value: without a lease there is nothing to put into a
 * step.  The lease promises every block up to its cap; the promise is held, and decays as positions
 * are filled with real block ids, so a sequence that was admitted never runs out.
 *
 *   FREE --reserve--> LIVE --park--> HOT --resume--> LIVE
 *     ^                 |             |
 *     +-----release-----+---release---+
 *
 * Slots and blocks are separate.  A block lives as long as somebody refers to it: leases, nodes of the
 * prefix index (ds4_budget_share), transfers (ds4_budget_pin).  A HOT lease holds a slot whose rings are
 * worth keeping, and no blocks: those are the index's by then.
 *
 * Shared rows are immutable (invariant I5).  A block has at most one writer, the lease it was filled for,
 * and rows below its seal are somebody else's too; ds4_budget_may_write says so in O(1) per step.  Who
 * starts in the middle of a block takes over the pen if nobody holds it and nothing lies behind the
 * place, and else gets a block of his own and an order to copy.
 *
 * Overcommit (off unless ds4_budget_overcommit says otherwise): more may be promised than there is, but never
 * of what an ask calls firm; a fill beyond that can then be refused for now, and somebody has to give way.
 *
 * Ledger: n_blocks = free + promised + live + cached + io; it is checked after every transition, and a
 * refusal changes nothing.  Pure; O(1) per call beyond the blocks that move. */
#ifndef DS4_ROUTER_SCHED_BUDGET_H
#define DS4_ROUTER_SCHED_BUDGET_H

#include "common/err.h"

#include <stdbool.h>
#include <stdint.h>

#define DS4_BLOCK_TOK 256

struct ds4_budget;

enum ds4_lease_state { DS4_LEASE_FREE, DS4_LEASE_LIVE, DS4_LEASE_HOT };

/* Permission to write positions start_tok .. cap_tok - 1 of one slot.  Owned by the budget; whoever got
 * it from reserve holds it until release. */
struct ds4_kv_lease {
    enum ds4_lease_state state;
    int32_t slot;
    uint32_t epoch; /* differs between any two grants of the slot */
    int32_t start_tok;
    int32_t cap_tok;
    int32_t n_block;      /* ids given so far, shared ones included */
    const int32_t *block; /* [n_block], position p lies in block[p / DS4_BLOCK_TOK] */
    int32_t n_promised;   /* ids still to come */
    int32_t n_firm;       /* of them those that exist for certain */
    int32_t copy_from; /* >= 0: block[start_tok / DS4_BLOCK_TOK] must first become a copy of it */
};

/* What is wanted: rows up to cap_tok, of which those below start_tok exist already in cached blocks. */
struct ds4_kv_ask {
    int32_t cap_tok;
    int32_t start_tok; /* 0 = nothing exists */
    int32_t firm_tok;  /* rows below are certain even with overcommit; 0 = all */
    const int32_t
        *shared; /* [blocks of start_tok]: the cached blocks, the one cut by start_tok last */
};

struct ds4_budget_sums {
    int32_t total, free, promised, live, cached, io;
    int32_t over; /* promised beyond what there is */
    int32_t slots_total, slots_free, slots_live, slots_hot;
};

/* An empty ledger.  max_tok bounds the cap of one lease.  NULL with DS4_E_INVALID or DS4_E_NOMEM. */
struct ds4_budget *ds4_budget_new(int32_t n_blocks, int32_t n_slots, int32_t max_tok,
                                  struct ds4_err *err);
void ds4_budget_free(struct ds4_budget *budget);

/* So many blocks may be promised beyond those there are. */
void ds4_budget_overcommit(struct ds4_budget *budget, int32_t n_blocks);

/* Blocks that cap_tok positions need. */
int32_t ds4_budget_blocks(int32_t cap_tok);

/* Could `cap_tok` positions ever be granted?  -1 with DS4_E_INVALID naming need and total. */
int ds4_budget_fits(const struct ds4_budget *budget, int32_t cap_tok,
                    struct ds4_err *err) DS4_MUST_CHECK;

/* Blocks that are not there yet: what has to be free for `ask`. */
int32_t ds4_budget_need(const struct ds4_budget *budget, const struct ds4_kv_ask *ask);
/* How many more than now would have to be free for `ask` to be granted; <= 0: none. */
int32_t ds4_budget_short(const struct ds4_budget *budget, const struct ds4_kv_ask *ask);

/* One slot and the promise of all blocks, or NULL: DS4_E_INVALID as above, DS4_E_BUSY naming need, free,
 * promised and what eviction could give, DS4_E_BUG for shared blocks nobody holds. */
const struct ds4_kv_lease *ds4_budget_reserve(struct ds4_budget *budget,
                                              const struct ds4_kv_ask *ask,
                                              struct ds4_err *err) DS4_MUST_CHECK;

/* HOT -> LIVE on the same slot under a new epoch; errors as for reserve, and refused the lease stays
 * hot. */
int ds4_budget_resume(struct ds4_budget *budget, const struct ds4_kv_lease *lease,
                      const struct ds4_kv_ask *ask, struct ds4_err *err) DS4_MUST_CHECK;

/* The copy that lease->copy_from orders is posted: the source is not needed any more. */
void ds4_budget_copied(struct ds4_budget *budget, const struct ds4_kv_lease *lease);

/* Turns promises into ids until positions below upto_tok are covered.  *first is the index of the first
 * new id, *n their number (0 if covered already).  Without overcommit it cannot fail for upto_tok <= cap_tok
 * of a live lease; with it, DS4_E_BUSY: no block is free now, those given so far stay.  Anything else is
 * DS4_E_BUG. */
int ds4_budget_fill(struct ds4_budget *budget, const struct ds4_kv_lease *lease, int32_t upto_tok,
                    int32_t *first, int32_t *n, struct ds4_err *err) DS4_MUST_CHECK;

/* May rows begin .. end - 1 be written under this lease?  -1 with DS4_E_BUG: outside of the lease (I1),
 * or a row that others read (I5). */
int ds4_budget_may_write(const struct ds4_budget *budget, const struct ds4_kv_lease *lease,
                         int32_t begin, int32_t end, struct ds4_err *err) DS4_MUST_CHECK;

/* LIVE -> HOT: every block and promise goes back, the slot stays. */
void ds4_budget_park(struct ds4_budget *budget, const struct ds4_kv_lease *lease);

/* A new epoch for a live lease whose cache is about to be written from position 0 again. */
void ds4_budget_renew(struct ds4_budget *budget, const struct ds4_kv_lease *lease);

/* Everything back; *lease becomes NULL.  Releasing NULL is fine, so release is idempotent. */
void ds4_budget_release(struct ds4_budget *budget, const struct ds4_kv_lease **lease);

/* The index refers to a block that is in use: its first `rows` rows are immutable from now on. */
int ds4_budget_share(struct ds4_budget *budget, int32_t block, int32_t rows,
                     struct ds4_err *err) DS4_MUST_CHECK;
void ds4_budget_unshare(struct ds4_budget *budget, int32_t block);

/* A transfer refers to a block that is in use. */
int ds4_budget_pin(struct ds4_budget *budget, int32_t block, struct ds4_err *err) DS4_MUST_CHECK;
void ds4_budget_unpin(struct ds4_budget *budget, int32_t block);

int32_t ds4_budget_index_refs(const struct ds4_budget *budget, int32_t block);
/* Only the index refers to it: dropping those references frees it. */
bool ds4_budget_is_cached(const struct ds4_budget *budget, int32_t block);

/* True if slot and epoch name a live lease (I2). */
bool ds4_budget_holds(const struct ds4_budget *budget, int32_t slot, uint32_t epoch);

void ds4_budget_sums(const struct ds4_budget *budget, struct ds4_budget_sums *sums);

/* Recounts everything from the leases and the free list.  -1 with DS4_E_BUG naming what is off; also
 * when any transition since birth left the sums wrong. */
int ds4_budget_check(const struct ds4_budget *budget, struct ds4_err *err) DS4_MUST_CHECK;
/* The cheap part of it: did any transition so far leave the sums wrong (I9)? */
bool ds4_budget_is_broken(const struct ds4_budget *budget);

/* A number that changes when any part of the ledger does: refusals must leave it alone (I4). */
uint64_t ds4_budget_digest(const struct ds4_budget *budget);

#endif

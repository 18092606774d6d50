/* The KV ledger (step 4).
 *
 * Ids live on a stack; counters say how many of the ids on the stack are already promised.  Every
 * transition moves ids between the stack and one lease's table and moves the same number between two
 * counters, then check_sums() compares the counters with the stack: two books that must agree.
 * Invariant: n_free_id + live + cached == n_blocks and promised <= n_free_id, so a fill of a promised
 * block always finds an id.  A broken sum is remembered (`broken`), never asserted away: the caller
 * sees it in ds4_budget_check and the metric of invariant failures. */
#include "router/sched/budget.h"

#include <assert.h>
#include <stdlib.h>
#include <xxhash.h>

struct ds4_budget {
    int32_t n_blocks;
    int32_t n_slots;
    int32_t max_tok;
    int32_t table_len; /* blocks of max_tok: row length of `table` */
    int32_t promised;
    int32_t live;
    int32_t cached;
    int32_t slots_live;
    int32_t slots_cached;
    bool broken;
    int32_t n_free_id;
    int32_t *free_id;           /* stack */
    int32_t *table;             /* [n_slots][table_len] */
    struct ds4_kv_lease *lease; /* [n_slots], lease[s].slot == s */
};

static void check_sums(struct ds4_budget *b)
{
    if (b->n_free_id + b->live + b->cached != b->n_blocks || b->promised < 0 ||
        b->promised > b->n_free_id || b->slots_live + b->slots_cached > b->n_slots)
        b->broken = true;
    assert(!b->broken);
}

static struct ds4_kv_lease *own(struct ds4_budget *b, const struct ds4_kv_lease *lease)
{
    struct ds4_kv_lease *mine = &b->lease[lease->slot];

    assert(mine == lease);
    return mine;
}

static int32_t *table_of(const struct ds4_budget *b, const struct ds4_kv_lease *lease)
{
    return b->table + (size_t)lease->slot * (size_t)b->table_len;
}

/* Gives back ids from the end of the lease's table until `keep` remain; returns how many. */
static int32_t drop_ids(struct ds4_budget *b, struct ds4_kv_lease *lease, int32_t keep)
{
    const int32_t *table = table_of(b, lease);
    int32_t n = 0;

    while (lease->n_block > keep) {
        b->free_id[b->n_free_id++] = table[--lease->n_block];
        n++;
    }
    return n;
}

int32_t ds4_budget_blocks(int32_t cap_tok)
{
    return cap_tok <= 0 ? 0 : (cap_tok - 1) / DS4_BLOCK_TOK + 1;
}

struct ds4_budget *ds4_budget_new(int32_t n_blocks, int32_t n_slots, int32_t max_tok,
                                  struct ds4_err *err)
{
    struct ds4_budget *b;

    if (n_blocks < 1 || n_slots < 1 || max_tok < 1) {
        ds4_fail(err, DS4_E_INVALID, "a cache of %d blocks, %d slots and %d tokens cannot work",
                 n_blocks, n_slots, max_tok);
        return NULL;
    }
    b = calloc(1, sizeof(*b));
    if (b == NULL)
        goto nomem;
    b->n_blocks = n_blocks;
    b->n_slots = n_slots;
    b->max_tok = max_tok;
    b->table_len = ds4_budget_blocks(max_tok);
    b->free_id = calloc((size_t)n_blocks, sizeof(*b->free_id));
    b->table = calloc((size_t)n_slots * (size_t)b->table_len, sizeof(*b->table));
    b->lease = calloc((size_t)n_slots, sizeof(*b->lease));
    if (b->free_id == NULL || b->table == NULL || b->lease == NULL)
        goto nomem;
    /* Highest id at the bottom, so ids are handed out from 0: easier to read in logs. */
    for (int32_t i = 0; i < n_blocks; i++)
        b->free_id[i] = n_blocks - 1 - i;
    b->n_free_id = n_blocks;
    for (int32_t s = 0; s < n_slots; s++) {
        b->lease[s].slot = s;
        b->lease[s].block = table_of(b, &b->lease[s]);
    }
    return b;

nomem:
    ds4_budget_free(b);
    ds4_fail(err, DS4_E_NOMEM, "no memory for a ledger of %d blocks", n_blocks);
    return NULL;
}

void ds4_budget_free(struct ds4_budget *b)
{
    if (b == NULL)
        return;
    free(b->free_id);
    free(b->table);
    free(b->lease);
    free(b);
}

int ds4_budget_fits(const struct ds4_budget *b, int32_t cap_tok, struct ds4_err *err)
{
    int32_t need = ds4_budget_blocks(cap_tok);

    if (need < 1 || need > b->n_blocks || need > b->table_len)
        return ds4_fail(err, DS4_E_INVALID,
                        "the request needs %d cache blocks for %d tokens, there are %d in all",
                        need, cap_tok, need > b->n_blocks ? b->n_blocks : b->table_len);
    return 0;
}

static int refuse_busy(const struct ds4_budget *b, int32_t need, int32_t reclaimable,
                       struct ds4_err *err)
{
    return ds4_fail(err, DS4_E_BUSY,
                    "need %d cache blocks and a slot: %d blocks free, %d promised, %d reclaimable, "
                    "%d of %d slots free",
                    need, b->n_free_id - b->promised, b->promised, reclaimable,
                    b->n_slots - b->slots_live - b->slots_cached, b->n_slots);
}

const struct ds4_kv_lease *ds4_budget_reserve(struct ds4_budget *b, int32_t cap_tok,
                                              struct ds4_err *err)
{
    int32_t need = ds4_budget_blocks(cap_tok);
    struct ds4_kv_lease *lease = NULL;

    if (ds4_budget_fits(b, cap_tok, err) != 0)
        return NULL;
    for (int32_t s = 0; s < b->n_slots && lease == NULL; s++)
        if (b->lease[s].state == DS4_LEASE_FREE)
            lease = &b->lease[s];
    if (lease == NULL || need > b->n_free_id - b->promised) {
        refuse_busy(b, need, b->cached, err);
        return NULL;
    }
    lease->state = DS4_LEASE_LIVE;
    lease->epoch++;
    lease->cap_tok = cap_tok;
    lease->n_block = 0;
    lease->n_promised = need;
    b->promised += need;
    b->slots_live++;
    check_sums(b);
    return lease;
}

int ds4_budget_fill(struct ds4_budget *b, const struct ds4_kv_lease *held, int32_t upto_tok,
                    int32_t *first, int32_t *n, struct ds4_err *err)
{
    struct ds4_kv_lease *lease = own(b, held);
    int32_t want = ds4_budget_blocks(upto_tok);
    int32_t *table = table_of(b, lease);

    *first = lease->n_block;
    *n = 0;
    if (lease->state != DS4_LEASE_LIVE || upto_tok > lease->cap_tok)
        return ds4_fail(err, DS4_E_BUG, "slot %d: %d tokens wanted, the lease covers %d",
                        lease->slot, upto_tok, lease->state == DS4_LEASE_LIVE ? lease->cap_tok : 0);
    while (lease->n_block < want) {
        assert(lease->n_promised > 0 && b->n_free_id > 0);
        table[lease->n_block++] = b->free_id[--b->n_free_id];
        lease->n_promised--;
        b->promised--;
        b->live++;
        (*n)++;
    }
    check_sums(b);
    return 0;
}

int ds4_budget_retain(struct ds4_budget *b, const struct ds4_kv_lease *held, int32_t keep_tok,
                      struct ds4_err *err)
{
    struct ds4_kv_lease *lease = own(b, held);

    if (lease->state != DS4_LEASE_LIVE || ds4_budget_blocks(keep_tok) > lease->n_block)
        return ds4_fail(err, DS4_E_BUG, "slot %d: cannot retain %d tokens of %d blocks",
                        lease->slot, keep_tok, lease->n_block);
    b->promised -= lease->n_promised;
    lease->n_promised = 0;
    b->live -= drop_ids(b, lease, ds4_budget_blocks(keep_tok));
    b->live -= lease->n_block;
    b->cached += lease->n_block;
    lease->cap_tok = keep_tok;
    lease->state = DS4_LEASE_CACHED;
    b->slots_live--;
    b->slots_cached++;
    check_sums(b);
    return 0;
}

int ds4_budget_resume(struct ds4_budget *b, const struct ds4_kv_lease *held, int32_t keep_tok,
                      int32_t cap_tok, struct ds4_err *err)
{
    struct ds4_kv_lease *lease = own(b, held);
    int32_t need = ds4_budget_blocks(cap_tok);
    int32_t keep = ds4_budget_blocks(keep_tok);
    int32_t give, take;

    if (lease->state != DS4_LEASE_CACHED || keep > lease->n_block || keep_tok > cap_tok)
        return ds4_fail(err, DS4_E_BUG, "slot %d: cannot resume %d tokens of %d blocks",
                        lease->slot, keep_tok, lease->n_block);
    if (ds4_budget_fits(b, cap_tok, err) != 0)
        return -1;
    give = lease->n_block - keep;
    take = need - keep;
    if (take > b->n_free_id - b->promised + give)
        return refuse_busy(b, need, b->cached - lease->n_block, err);
    b->cached -= drop_ids(b, lease, keep);
    b->cached -= lease->n_block;
    b->live += lease->n_block;
    b->promised += take;
    lease->n_promised = take;
    lease->cap_tok = cap_tok;
    lease->epoch++;
    lease->state = DS4_LEASE_LIVE;
    b->slots_cached--;
    b->slots_live++;
    check_sums(b);
    return 0;
}

void ds4_budget_renew(struct ds4_budget *b, const struct ds4_kv_lease *held)
{
    assert(held->state == DS4_LEASE_LIVE);
    own(b, held)->epoch++;
}

void ds4_budget_release(struct ds4_budget *b, const struct ds4_kv_lease **held)
{
    struct ds4_kv_lease *lease;
    int32_t n;

    if (*held == NULL)
        return;
    lease = own(b, *held);
    *held = NULL;
    n = drop_ids(b, lease, 0);
    if (lease->state == DS4_LEASE_LIVE) {
        b->live -= n;
        b->promised -= lease->n_promised;
        b->slots_live--;
    } else if (lease->state == DS4_LEASE_CACHED) {
        b->cached -= n;
        b->slots_cached--;
    }
    lease->n_promised = 0;
    lease->cap_tok = 0;
    lease->state = DS4_LEASE_FREE;
    check_sums(b);
}

bool ds4_budget_holds(const struct ds4_budget *b, int32_t slot, uint32_t epoch)
{
    return slot >= 0 && slot < b->n_slots && b->lease[slot].state == DS4_LEASE_LIVE &&
           b->lease[slot].epoch == epoch;
}

void ds4_budget_sums(const struct ds4_budget *b, struct ds4_budget_sums *sums)
{
    *sums = (struct ds4_budget_sums){
        .total = b->n_blocks,
        .free = b->n_free_id - b->promised,
        .promised = b->promised,
        .live = b->live,
        .cached = b->cached,
        .slots_total = b->n_slots,
        .slots_free = b->n_slots - b->slots_live - b->slots_cached,
        .slots_live = b->slots_live,
        .slots_cached = b->slots_cached,
    };
}

/* Marks `id` as seen; false if it is out of range or was seen before. */
static bool see(uint8_t *seen, int32_t n, int32_t id)
{
    if (id < 0 || id >= n || seen[id] != 0)
        return false;
    seen[id] = 1;
    return true;
}

int ds4_budget_check(const struct ds4_budget *b, struct ds4_err *err)
{
    int32_t promised = 0, live = 0, cached = 0;
    uint8_t *seen;
    bool twice = false;

    if (b->broken)
        return ds4_fail(err, DS4_E_BUG, "the ledger was out of balance");
    seen = calloc((size_t)b->n_blocks, 1);
    if (seen == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory to recount %d blocks", b->n_blocks);
    for (int32_t i = 0; i < b->n_free_id; i++)
        twice |= !see(seen, b->n_blocks, b->free_id[i]);
    for (int32_t s = 0; s < b->n_slots; s++) {
        const struct ds4_kv_lease *lease = &b->lease[s];

        for (int32_t i = 0; i < lease->n_block; i++)
            twice |= !see(seen, b->n_blocks, lease->block[i]);
        promised += lease->n_promised;
        if (lease->state == DS4_LEASE_LIVE)
            live += lease->n_block;
        else if (lease->state == DS4_LEASE_CACHED)
            cached += lease->n_block;
    }
    free(seen);
    if (twice)
        return ds4_fail(err, DS4_E_BUG, "a cache block has two owners");
    if (promised != b->promised || live != b->live || cached != b->cached ||
        b->n_free_id + live + cached != b->n_blocks || promised > b->n_free_id)
        return ds4_fail(err, DS4_E_BUG,
                        "ledger: %d free, %d promised, %d live, %d cached of %d blocks",
                        b->n_free_id - promised, promised, live, cached, b->n_blocks);
    return 0;
}

uint64_t ds4_budget_digest(const struct ds4_budget *b)
{
    XXH64_hash_t h = XXH3_64bits(b->free_id, (size_t)b->n_free_id * sizeof(*b->free_id));
    int32_t counts[] = {b->promised,   b->live,         b->cached,
                        b->slots_live, b->slots_cached, b->n_free_id};

    h = XXH3_64bits_withSeed(counts, sizeof(counts), h);
    for (int32_t s = 0; s < b->n_slots; s++) {
        const struct ds4_kv_lease *lease = &b->lease[s];
        int32_t words[] = {(int32_t)lease->state, lease->slot,    (int32_t)lease->epoch,
                           lease->cap_tok,        lease->n_block, lease->n_promised};

        h = XXH3_64bits_withSeed(words, sizeof(words), h);
        h = XXH3_64bits_withSeed(lease->block, (size_t)lease->n_block * sizeof(int32_t), h);
    }
    return h;
}

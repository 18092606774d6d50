/* The KV ledger (step 4).
 *
 * Ids live on a stack; counters say how many of the ids on the stack are already promised.  Every block
 * carries its references, counted by kind; a change of them moves the block between the classes free,
 * live, cached and io, and nothing else does (`refer`).  Then check_sums() compares the class counters
 * with the stack: two books that must agree.
 * Invariant: n_free_id + live + cached + io == n_blocks, firm <= n_free_id and promised <= n_free_id + extra, so a
 * fill of a firm block always finds an id, and of any promised one without overcommit (extra = 0).  A broken sum is remembered (`broken`), never asserted away: the
 * caller sees it in ds4_budget_is_broken and the metric of invariant failures. */
#include "router/sched/budget.h"

#include "common/fault.h"

#include <assert.h>
#include <stdlib.h>
#include <xxhash.h>

#define DS4_NO_WRITER (-1)

/* Who refers to a block. */
enum block_ref { REF_LEASE, REF_INDEX, REF_IO, N_REF };
enum block_class { CLASS_FREE, CLASS_LIVE, CLASS_CACHED, CLASS_IO, N_CLASS };

struct block {
    int32_t refs[N_REF];
    int32_t writer; /* slot of the lease that may write it */
    int32_t sealed; /* rows below belong to others too */
};

struct ds4_budget {
    int32_t n_blocks;
    int32_t n_slots;
    int32_t max_tok;
    int32_t table_len; /* blocks of max_tok: row length of `table` */
    int32_t promised;
    int32_t firm;           /* of them those that must exist: <= n_free_id */
    int32_t extra;          /* promised may exceed n_free_id by so many */
    int32_t count[N_CLASS]; /* blocks of each class but free: those are n_free_id */
    int32_t slots_live;
    int32_t slots_hot;
    bool broken;
    int32_t n_free_id;
    int32_t *free_id;           /* stack */
    struct block *block;        /* [n_blocks] */
    int32_t *table;             /* [n_slots][table_len] */
    struct ds4_kv_lease *lease; /* [n_slots], lease[s].slot == s */
};

static void check_sums(struct ds4_budget *b)
{
    if (b->n_free_id + b->count[CLASS_LIVE] + b->count[CLASS_CACHED] + b->count[CLASS_IO] !=
            b->n_blocks ||
        b->firm < 0 || b->firm > b->promised || b->firm > b->n_free_id ||
        b->promised > b->n_free_id + b->extra || b->slots_live + b->slots_hot > b->n_slots)
        b->broken = true;
    assert(!b->broken);
}

static enum block_class class_of(const struct block *block)
{
    if (block->refs[REF_LEASE] > 0)
        return CLASS_LIVE;
    if (block->refs[REF_INDEX] > 0)
        return CLASS_CACHED;
    return block->refs[REF_IO] > 0 ? CLASS_IO : CLASS_FREE;
}

/* Adds `n` references of a kind.  A block nobody refers to any more goes back to the stack. */
static void refer(struct ds4_budget *b, int32_t id, enum block_ref kind, int32_t n)
{
    struct block *block = &b->block[id];
    enum block_class before = class_of(block), after;

    block->refs[kind] += n;
    if (block->refs[kind] < 0)
        b->broken = true;
    after = class_of(block);
    if (before == after)
        return;
    if (before != CLASS_FREE)
        b->count[before]--;
    if (after != CLASS_FREE) {
        b->count[after]++;
        return;
    }
    block->writer = DS4_NO_WRITER;
    block->sealed = 0;
    b->free_id[b->n_free_id++] = id;
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

static int32_t take_id(struct ds4_budget *b, const struct ds4_kv_lease *lease)
{
    int32_t id = b->free_id[--b->n_free_id];

    refer(b, id, REF_LEASE, 1);
    b->block[id].writer = lease->slot;
    return id;
}

void ds4_budget_overcommit(struct ds4_budget *b, int32_t n_blocks)
{
    b->extra = n_blocks;
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
    b->block = calloc((size_t)n_blocks, sizeof(*b->block));
    b->table = calloc((size_t)n_slots * (size_t)b->table_len, sizeof(*b->table));
    b->lease = calloc((size_t)n_slots, sizeof(*b->lease));
    if (b->free_id == NULL || b->block == NULL || b->table == NULL || b->lease == NULL)
        goto nomem;
    /* Highest id at the bottom, so ids are handed out from 0: easier to read in logs. */
    for (int32_t i = 0; i < n_blocks; i++) {
        b->free_id[i] = n_blocks - 1 - i;
        b->block[i].writer = DS4_NO_WRITER;
    }
    b->n_free_id = n_blocks;
    for (int32_t s = 0; s < n_slots; s++) {
        b->lease[s].slot = s;
        b->lease[s].copy_from = -1;
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
    free(b->block);
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

static int refuse_busy(const struct ds4_budget *b, int32_t need, struct ds4_err *err)
{
    return ds4_fail(err, DS4_E_BUSY,
                    "need %d cache blocks and a slot: %d blocks free, %d promised, %d reclaimable, "
                    "%d of %d slots free",
                    need, b->promised < b->n_free_id ? b->n_free_id - b->promised : 0, b->promised,
                    b->count[CLASS_CACHED], b->n_slots - b->slots_live - b->slots_hot, b->n_slots);
}

/* Blocks that start_tok leaves whole: they are read and never written. */
static int32_t whole_blocks(const struct ds4_kv_ask *ask)
{
    return ask->start_tok / DS4_BLOCK_TOK;
}

/* The block start_tok lies in the middle of can be written on if nobody else writes it and nothing of
 * others lies behind start_tok. */
static bool can_take_pen(const struct ds4_budget *b, const struct ds4_kv_ask *ask)
{
    int32_t rows = ask->start_tok % DS4_BLOCK_TOK;
    const struct block *last;

    if (rows == 0)
        return false;
    last = &b->block[ask->shared[whole_blocks(ask)]];
    return last->writer == DS4_NO_WRITER && last->sealed <= rows;
}

int32_t ds4_budget_need(const struct ds4_budget *b, const struct ds4_kv_ask *ask)
{
    return ds4_budget_blocks(ask->cap_tok) - whole_blocks(ask) - (can_take_pen(b, ask) ? 1 : 0);
}

/* Of the need, what must not be promised twice. */
static int32_t firm_need(const struct ds4_budget *b, const struct ds4_kv_ask *ask)
{
    int32_t firm = ds4_budget_need(b, ask), later = ask->cap_tok - ask->firm_tok;

    if (ask->firm_tok > 0 && later > 0)
        firm -= ds4_budget_blocks(ask->cap_tok) - ds4_budget_blocks(ask->firm_tok);
    return firm > 0 ? firm : 0;
}

int32_t ds4_budget_short(const struct ds4_budget *b, const struct ds4_kv_ask *ask)
{
    int32_t all = ds4_budget_need(b, ask) - (b->n_free_id - b->promised + b->extra);
    int32_t firm = firm_need(b, ask) - (b->n_free_id - b->firm);

    return all > firm ? all : firm;
}

static int check_ask(const struct ds4_budget *b, const struct ds4_kv_ask *ask, struct ds4_err *err)
{
    if (ds4_budget_fits(b, ask->cap_tok, err) != 0)
        return -1;
    if (ask->start_tok < 0 || ask->start_tok >= ask->cap_tok)
        return ds4_fail(err, DS4_E_BUG, "%d of %d rows exist already", ask->start_tok,
                        ask->cap_tok);
    for (int32_t i = 0; i < ds4_budget_blocks(ask->start_tok); i++)
        if (ask->shared[i] < 0 || ask->shared[i] >= b->n_blocks ||
            class_of(&b->block[ask->shared[i]]) == CLASS_FREE)
            return ds4_fail(err, DS4_E_BUG, "block %d of a shared prefix is not held by anybody",
                            ask->shared[i]);
    return 0;
}

/* The grant itself: cannot fail any more. */
static void grant(struct ds4_budget *b, struct ds4_kv_lease *lease, const struct ds4_kv_ask *ask)
{
    int32_t *table = table_of(b, lease);
    int32_t need = ds4_budget_need(b, ask), whole = whole_blocks(ask);
    int32_t firm = firm_need(b, ask);

    lease->state = DS4_LEASE_LIVE;
    lease->epoch++;
    lease->start_tok = ask->start_tok;
    lease->cap_tok = ask->cap_tok;
    lease->n_block = 0;
    lease->copy_from = -1;
    for (; lease->n_block < whole; lease->n_block++) {
        table[lease->n_block] = ask->shared[lease->n_block];
        refer(b, table[lease->n_block], REF_LEASE, 1);
    }
    if (can_take_pen(b, ask)) {
        table[lease->n_block++] = ask->shared[whole];
        refer(b, ask->shared[whole], REF_LEASE, 1);
        b->block[ask->shared[whole]].writer = lease->slot;
    } else if (ask->start_tok % DS4_BLOCK_TOK != 0) {
        lease->copy_from = ask->shared[whole];
        refer(b, lease->copy_from, REF_IO, 1); /* nobody may free it before the copy (I14) */
        table[lease->n_block++] = take_id(b, lease);
        need--;
        firm -= firm > 0;
    }
    lease->n_promised = need;
    b->promised += need;
    lease->n_firm = firm;
    b->firm += firm;
    b->slots_live++;
    check_sums(b);
}

/* Only a build with faults has copies that fail: their blocks are part of the need. */
static int check_copy(const struct ds4_budget *b, const struct ds4_kv_ask *ask, struct ds4_err *err)
{
    if (ask->start_tok % DS4_BLOCK_TOK == 0 || can_take_pen(b, ask) || !DS4_FAULT_POINT(COW_FAIL))
        return 0;
    return ds4_fail(err, DS4_E_NOMEM, "block %d could not be copied",
                    ask->shared[whole_blocks(ask)]);
}

const struct ds4_kv_lease *ds4_budget_reserve(struct ds4_budget *b, const struct ds4_kv_ask *ask,
                                              struct ds4_err *err)
{
    struct ds4_kv_lease *lease = NULL;

    if (check_ask(b, ask, err) != 0 || check_copy(b, ask, err) != 0)
        return NULL;
    for (int32_t s = 0; s < b->n_slots && lease == NULL; s++)
        if (b->lease[s].state == DS4_LEASE_FREE)
            lease = &b->lease[s];
    if (lease == NULL || ds4_budget_short(b, ask) > 0 || DS4_FAULT_POINT(RESERVE_FAIL)) {
        refuse_busy(b, ds4_budget_need(b, ask), err);
        return NULL;
    }
    grant(b, lease, ask);
    return lease;
}

int ds4_budget_resume(struct ds4_budget *b, const struct ds4_kv_lease *held,
                      const struct ds4_kv_ask *ask, struct ds4_err *err)
{
    struct ds4_kv_lease *lease = own(b, held);

    if (lease->state != DS4_LEASE_HOT)
        return ds4_fail(err, DS4_E_BUG, "slot %d is not hot", lease->slot);
    if (check_ask(b, ask, err) != 0 || check_copy(b, ask, err) != 0)
        return -1;
    if (ds4_budget_short(b, ask) > 0 || DS4_FAULT_POINT(RESERVE_FAIL))
        return refuse_busy(b, ds4_budget_need(b, ask), err);
    b->slots_hot--;
    grant(b, lease, ask);
    return 0;
}

void ds4_budget_copied(struct ds4_budget *b, const struct ds4_kv_lease *held)
{
    struct ds4_kv_lease *lease = own(b, held);
    int32_t source = lease->copy_from;

    if (source < 0)
        return;
    lease->copy_from = -1;
    refer(b, source, REF_IO, -1);
    check_sums(b);
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
        bool firm = lease->n_firm > 0;

        if (lease->n_promised < 1 || (b->extra == 0 && b->n_free_id < 1)) {
            b->broken = true;
            return ds4_fail(err, DS4_E_BUG, "slot %d: a promised block is missing", lease->slot);
        }
        if ((!firm && b->n_free_id <= b->firm) || DS4_FAULT_POINT(GROW_FAIL))
            return ds4_fail(err, DS4_E_BUSY, "slot %d: no cache block is free for position %d",
                            lease->slot, lease->n_block * DS4_BLOCK_TOK);
        lease->n_firm -= firm;
        b->firm -= firm;
        lease->n_promised--;
        b->promised--;
        table[lease->n_block++] = take_id(b, lease);
        (*n)++;
    }
    check_sums(b);
    return 0;
}

int ds4_budget_may_write(const struct ds4_budget *b, const struct ds4_kv_lease *lease,
                         int32_t begin, int32_t end, struct ds4_err *err)
{
    if (lease->state != DS4_LEASE_LIVE || begin < 0 || end > lease->cap_tok ||
        ds4_budget_blocks(end) > lease->n_block)
        return ds4_fail(err, DS4_E_BUG, "slot %d: rows %d to %d, the lease covers %d and %d blocks",
                        lease->slot, begin, end, lease->cap_tok, lease->n_block);
    for (int32_t i = begin / DS4_BLOCK_TOK; i < ds4_budget_blocks(end); i++) {
        const struct block *block = &b->block[lease->block[i]];
        int32_t row = begin > i * DS4_BLOCK_TOK ? begin % DS4_BLOCK_TOK : 0;

        if (block->writer != lease->slot || row < block->sealed)
            return ds4_fail(err, DS4_E_BUG, "slot %d: row %d of block %d is shared up to %d",
                            lease->slot, row, lease->block[i], block->sealed);
    }
    return 0;
}

/* All ids and promises of a live lease go back. */
static void give_back(struct ds4_budget *b, struct ds4_kv_lease *lease)
{
    const int32_t *table = table_of(b, lease);

    if (lease->copy_from >= 0)
        refer(b, lease->copy_from, REF_IO, -1);
    lease->copy_from = -1;
    /* From the end, so that ids come off the stack in the order they were given. */
    while (lease->n_block > 0) {
        int32_t id = table[--lease->n_block];

        if (b->block[id].writer == lease->slot)
            b->block[id].writer = DS4_NO_WRITER;
        refer(b, id, REF_LEASE, -1);
    }
    b->promised -= lease->n_promised;
    b->firm -= lease->n_firm;
    lease->n_promised = 0;
    lease->n_firm = 0;
    lease->cap_tok = 0;
    lease->start_tok = 0;
    b->slots_live--;
}

void ds4_budget_park(struct ds4_budget *b, const struct ds4_kv_lease *held)
{
    struct ds4_kv_lease *lease = own(b, held);

    assert(lease->state == DS4_LEASE_LIVE);
    give_back(b, lease);
    lease->state = DS4_LEASE_HOT;
    b->slots_hot++;
    check_sums(b);
}

void ds4_budget_renew(struct ds4_budget *b, const struct ds4_kv_lease *held)
{
    assert(held->state == DS4_LEASE_LIVE);
    own(b, held)->epoch++;
}

void ds4_budget_release(struct ds4_budget *b, const struct ds4_kv_lease **held)
{
    struct ds4_kv_lease *lease;

    if (*held == NULL)
        return;
    lease = own(b, *held);
    *held = NULL;
    if (lease->state == DS4_LEASE_LIVE)
        give_back(b, lease);
    else if (lease->state == DS4_LEASE_HOT)
        b->slots_hot--;
    lease->state = DS4_LEASE_FREE;
    check_sums(b);
}

static int refer_to_used(struct ds4_budget *b, int32_t id, enum block_ref kind, struct ds4_err *err)
{
    if (id < 0 || id >= b->n_blocks || class_of(&b->block[id]) == CLASS_FREE)
        return ds4_fail(err, DS4_E_BUG, "block %d is not in use", id);
    refer(b, id, kind, 1);
    check_sums(b);
    return 0;
}

int ds4_budget_share(struct ds4_budget *b, int32_t id, int32_t rows, struct ds4_err *err)
{
    if (refer_to_used(b, id, REF_INDEX, err) != 0)
        return -1;
    if (rows > b->block[id].sealed)
        b->block[id].sealed = rows;
    return 0;
}

void ds4_budget_unshare(struct ds4_budget *b, int32_t id)
{
    refer(b, id, REF_INDEX, -1);
    check_sums(b);
}

int ds4_budget_pin(struct ds4_budget *b, int32_t id, struct ds4_err *err)
{
    return refer_to_used(b, id, REF_IO, err);
}

void ds4_budget_unpin(struct ds4_budget *b, int32_t id)
{
    refer(b, id, REF_IO, -1);
    check_sums(b);
}

int32_t ds4_budget_index_refs(const struct ds4_budget *b, int32_t id)
{
    return b->block[id].refs[REF_INDEX];
}

bool ds4_budget_is_cached(const struct ds4_budget *b, int32_t id)
{
    return class_of(&b->block[id]) == CLASS_CACHED;
}

bool ds4_budget_holds(const struct ds4_budget *b, int32_t slot, uint32_t epoch)
{
    return slot >= 0 && slot < b->n_slots && b->lease[slot].state == DS4_LEASE_LIVE &&
           b->lease[slot].epoch == epoch;
}

void ds4_budget_sums(const struct ds4_budget *b, struct ds4_budget_sums *sums)
{
    int32_t over = b->promised > b->n_free_id ? b->promised - b->n_free_id : 0;

    *sums = (struct ds4_budget_sums){
        .total = b->n_blocks,
        .free = b->n_free_id - b->promised + over,
        .promised = b->promised - over,
        .over = over,
        .live = b->count[CLASS_LIVE],
        .cached = b->count[CLASS_CACHED],
        .io = b->count[CLASS_IO],
        .slots_total = b->n_slots,
        .slots_free = b->n_slots - b->slots_live - b->slots_hot,
        .slots_live = b->slots_live,
        .slots_hot = b->slots_hot,
    };
}

bool ds4_budget_is_broken(const struct ds4_budget *b)
{
    return b->broken;
}

/* Compares every block with the references the leases have on it. */
static int check_blocks(const struct ds4_budget *b, int32_t *lease_refs, struct ds4_err *err)
{
    int32_t count[N_CLASS] = {0};

    for (int32_t i = 0; i < b->n_free_id; i++) {
        int32_t id = b->free_id[i];

        if (id < 0 || id >= b->n_blocks || lease_refs[id] != 0 ||
            class_of(&b->block[id]) != CLASS_FREE)
            return ds4_fail(err, DS4_E_BUG, "cache block %d is free and in use", id);
        lease_refs[id] = -1;
    }
    for (int32_t id = 0; id < b->n_blocks; id++) {
        const struct block *block = &b->block[id];

        if (lease_refs[id] < 0)
            lease_refs[id] = 0; /* on the stack once */
        else if (class_of(block) == CLASS_FREE)
            return ds4_fail(err, DS4_E_BUG, "cache block %d is lost", id);
        if (block->refs[REF_LEASE] != lease_refs[id] || block->refs[REF_INDEX] < 0 ||
            block->refs[REF_IO] < 0 || block->sealed < 0 || block->sealed > DS4_BLOCK_TOK)
            return ds4_fail(err, DS4_E_BUG, "cache block %d: %d references, %d leases have it", id,
                            block->refs[REF_LEASE], lease_refs[id]);
        count[class_of(block)]++;
    }
    for (int32_t c = CLASS_LIVE; c < N_CLASS; c++)
        if (count[c] != b->count[c])
            return ds4_fail(err, DS4_E_BUG, "class %d has %d blocks, the books say %d", c, count[c],
                            b->count[c]);
    return 0;
}

int ds4_budget_check(const struct ds4_budget *b, struct ds4_err *err)
{
    int32_t promised = 0, firm = 0, live = 0, hot = 0;
    int32_t *lease_refs;
    int rc;

    if (b->broken)
        return ds4_fail(err, DS4_E_BUG, "the ledger was out of balance");
    lease_refs = calloc((size_t)b->n_blocks, sizeof(*lease_refs));
    if (lease_refs == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory to recount %d blocks", b->n_blocks);
    for (int32_t s = 0; s < b->n_slots; s++) {
        const struct ds4_kv_lease *lease = &b->lease[s];

        for (int32_t i = 0; i < lease->n_block; i++)
            lease_refs[lease->block[i]]++;
        promised += lease->n_promised;
        firm += lease->n_firm;
        live += lease->state == DS4_LEASE_LIVE;
        hot += lease->state == DS4_LEASE_HOT;
    }
    rc = check_blocks(b, lease_refs, err);
    free(lease_refs);
    if (rc == 0 &&
        (promised != b->promised || promised > b->n_free_id + b->extra || firm != b->firm ||
         firm > b->n_free_id || live != b->slots_live || hot != b->slots_hot))
        rc = ds4_fail(err, DS4_E_BUG, "ledger: %d promised, %d slots live, %d hot; books: %d %d %d",
                      promised, live, hot, b->promised, b->slots_live, b->slots_hot);
    return rc;
}

uint64_t ds4_budget_digest(const struct ds4_budget *b)
{
    XXH64_hash_t h = XXH3_64bits(b->free_id, (size_t)b->n_free_id * sizeof(*b->free_id));
    int32_t counts[] = {b->promised, b->firm, b->slots_live, b->slots_hot, b->n_free_id};

    h = XXH3_64bits_withSeed(counts, sizeof(counts), h);
    h = XXH3_64bits_withSeed(b->count, sizeof(b->count), h);
    h = XXH3_64bits_withSeed(b->block, (size_t)b->n_blocks * sizeof(*b->block), h);
    for (int32_t s = 0; s < b->n_slots; s++) {
        const struct ds4_kv_lease *lease = &b->lease[s];
        int32_t words[] = {(int32_t)lease->state, lease->slot,     (int32_t)lease->epoch,
                           lease->cap_tok,        lease->n_block,  lease->n_promised,
                           lease->start_tok,      lease->copy_from};

        h = XXH3_64bits_withSeed(words, sizeof(words), h);
        h = XXH3_64bits_withSeed(lease->block, (size_t)lease->n_block * sizeof(int32_t), h);
    }
    return h;
}

/* Random operations on the sequence state against a naive model: append, cut back, save, drop, restore into
 * any slot (fork and park), copy-on-write, clear, and what must be refused.
 *
 * No model computes.  What a layer would store for a position is made from a hash of all tokens up to it,
 * so that a row of another history, however it got there, is seen.  After each operation a sequence is
 * checked: every ring row and input that its next token would read, and its compressed rows; the ledger of
 * host memory is checked too.  `--long 1` makes 100,000 operations. */
#include "common/crc32c.h"
#include "proto/point.h"
#include "worker/kv_point.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define N_SLOT    5
#define N_BLOCK   40
#define MAX_BLOCK 6
#define MAX_TOK   (MAX_BLOCK * DS4_BLOCK_TOK)
#define N_POINT   24
#define N_UNIT    400
#define HOT       120
#define WINDOW    128

static const struct ds4_kv_layer_shape layers[] = {
    {.ratio = 0}, {.ratio = 4, .overlap = true, .indexer = true}, {.ratio = 128}, {.ratio = 2}};

/* A history: hash[p] is that of the tokens [0, p). */
struct history {
    int32_t n;
    uint64_t hash[MAX_TOK + 1];
    int32_t n_block;
    int32_t block[MAX_BLOCK];
};

struct fixture {
    struct ds4_kv_shape shape;
    struct ds4_kv kv;
    struct ds4_kv_store store;
    uint8_t *rings, *pages, *area, *arena;
    struct history seq[N_SLOT];
    int32_t hi[N_SLOT], install[N_SLOT];
    bool open[N_SLOT];
    uint32_t epoch[N_SLOT];
    struct history point[N_POINT]; /* n 0: none; its id is its index + 1 */
    int32_t refs[N_BLOCK];         /* sequences and points that name the block */
    uint64_t random;
};

static int32_t n_op = 6000;

static uint64_t mix(uint64_t z)
{
    z += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

static int32_t pick(struct fixture *f, int32_t n)
{
    f->random = mix(f->random);
    return (int32_t)(f->random % (uint64_t)n);
}

/* ---- what a layer stores ------------------------------------------------------------------------------ */

static void make_row(uint8_t *row, size_t bytes, uint64_t hash, int32_t layer, int what)
{
    uint64_t key = mix(hash + (uint64_t)layer * 16 + (uint64_t)what);

    for (size_t i = 0; i < bytes; i += 8, key = key * 6364136223846793005u + 1)
        memcpy(row + i, &key, 8);
}

static void check_row(const uint8_t *row, size_t bytes, uint64_t hash, int32_t layer, int what,
                      int32_t at)
{
    uint8_t want[4096];

    make_row(want, bytes, hash, layer, what);
    if (memcmp(row, want, bytes) != 0)
        fail_msg("layer %d, kind %d: row %d is of another history", layer, what, at);
}

static uint8_t *ring_row(const struct ds4_ring *ring, int32_t slot, int32_t pos)
{
    return (uint8_t *)ring->data +
           ((size_t)slot * (size_t)ring->cap + (size_t)(pos % ring->cap)) * ring->row_bytes;
}

static uint8_t *page_row(const struct ds4_pages *pages, const int32_t *block, int32_t row)
{
    return (uint8_t *)pages->data +
           ((size_t)block[row / pages->rows_per_block] * (size_t)pages->rows_per_block +
            (size_t)(row % pages->rows_per_block)) *
               pages->row_bytes;
}

static const struct ds4_ring *input_ring(const struct ds4_kv_layer *layer, int i)
{
    const struct ds4_ring *ring[] = {&layer->comp_k, &layer->comp_g, &layer->index_k,
                                     &layer->index_g};

    return ring[i];
}

/* Token p of a slot goes through all layers. */
static void compute(struct fixture *f, int32_t slot, int32_t p)
{
    const struct history *h = &f->seq[slot];

    for (int32_t l = 0; l < f->shape.n_layer; l++) {
        const struct ds4_kv_layer *layer = &f->kv.layer[l];
        const struct ds4_pages *pages[] = {&layer->rows, &layer->index_rows};
        int32_t ratio = layers[l].ratio;

        make_row(ring_row(&layer->window, slot, p), layer->window.row_bytes, h->hash[p + 1], l, 0);
        for (int i = 0; i < 4 && ratio > 0; i++)
            if (input_ring(layer, i)->cap > 0)
                make_row(ring_row(input_ring(layer, i), slot, p), input_ring(layer, i)->row_bytes,
                         h->hash[p + 1], l, 1 + i);
        for (int i = 0; i < 2 && ratio > 0 && (p + 1) % ratio == 0; i++)
            if (pages[i]->data != NULL)
                make_row(page_row(pages[i], h->block, p / ratio), pages[i]->row_bytes,
                         h->hash[p + 1], l, 5 + i);
    }
}

static void check_inputs(struct fixture *f, int32_t slot, int32_t l)
{
    const struct history *h = &f->seq[slot];
    int32_t ratio = layers[l].ratio, open = h->n - h->n % ratio;

    for (int i = 0; i < 4; i++) {
        const struct ds4_ring *ring = input_ring(&f->kv.layer[l], i);

        if (ring->cap == 0)
            continue;
        for (int32_t p = open; p < h->n; p++)
            check_row(ring_row(ring, slot, p), ring->row_bytes, h->hash[p + 1], l, 1 + i, p);
        for (int32_t p = open - ratio; layers[l].overlap && p >= 0 && p < open; p++)
            check_row(ring_row(ring, slot, p), ring->row_bytes / 2, h->hash[p + 1], l, 1 + i, p);
    }
}

/* All that the next token of the slot would read. */
static void check_slot(struct fixture *f, int32_t slot)
{
    const struct history *h = &f->seq[slot];

    assert_int_equal(f->kv.slot[slot].pos, h->n);
    for (int32_t l = 0; l < f->shape.n_layer; l++) {
        const struct ds4_kv_layer *layer = &f->kv.layer[l];
        const struct ds4_pages *pages[] = {&layer->rows, &layer->index_rows};
        int32_t first = h->n > WINDOW - 1 ? h->n - (WINDOW - 1) : 0;

        for (int32_t p = first; p < h->n; p++)
            check_row(ring_row(&layer->window, slot, p), layer->window.row_bytes, h->hash[p + 1], l,
                      0, p);
        if (layers[l].ratio == 0)
            continue;
        check_inputs(f, slot, l);
        for (int i = 0; i < 2; i++)
            for (int32_t row = 0; pages[i]->data != NULL && row < h->n / layers[l].ratio; row++)
                check_row(page_row(pages[i], h->block, row), pages[i]->row_bytes,
                          h->hash[(row + 1) * layers[l].ratio], l, 5 + i, row);
    }
}

/* ---- blocks ------------------------------------------------------------------------------------------- */

static int32_t free_block(const struct fixture *f)
{
    for (int32_t b = 0; b < N_BLOCK; b++)
        if (f->refs[b] == 0)
            return b;
    return -1;
}

static void share(struct fixture *f, struct history *to, const struct history *from, int32_t n)
{
    to->n = n;
    memcpy(to->hash, from->hash, ((size_t)n + 1) * sizeof(to->hash[0]));
    to->n_block = (n + DS4_BLOCK_TOK - 1) / DS4_BLOCK_TOK;
    for (int32_t b = 0; b < to->n_block; b++)
        f->refs[to->block[b] = from->block[b]]++;
}

static void let_go(struct fixture *f, struct history *h)
{
    for (int32_t b = 0; b < h->n_block; b++)
        f->refs[h->block[b]]--;
    h->n = h->n_block = 0;
}

static struct ds4_kv_lease lease_of(const struct fixture *f, int32_t slot)
{
    const struct history *h = &f->seq[slot];

    return (struct ds4_kv_lease){.seq = (uint64_t)slot,
                                 .slot = slot,
                                 .epoch = f->epoch[slot],
                                 .cap_tok = h->n_block * DS4_BLOCK_TOK,
                                 .n_block = h->n_block,
                                 .block = h->block};
}

/* ---- operations --------------------------------------------------------------------------------------- */

static void do_close(struct fixture *f, int32_t slot)
{
    if (!f->open[slot])
        return;
    assert_int_equal(ds4_kv_close(&f->kv, slot, NULL), 0);
    let_go(f, &f->seq[slot]);
    f->open[slot] = false;
}

static void do_open(struct fixture *f, int32_t slot)
{
    do_close(f, slot);
    assert_int_equal(ds4_kv_open(&f->kv, slot, (uint64_t)slot, ++f->epoch[slot], NULL), 0);
    f->open[slot] = true;
    f->hi[slot] = f->install[slot] = 0;
    f->seq[slot].n = 0;
    f->seq[slot].hash[0] = 1;
}

/* Blocks for [n, n + k): those that are missing, and copies of those that others name.  False: no room. */
static bool make_room(struct fixture *f, int32_t slot, int32_t k)
{
    struct history *h = &f->seq[slot];

    for (int32_t b = h->n / DS4_BLOCK_TOK; b <= (h->n + k - 1) / DS4_BLOCK_TOK; b++) {
        int32_t own = free_block(f);

        if (b < h->n_block && f->refs[h->block[b]] == 1)
            continue;
        if (own < 0)
            return false;
        if (b < h->n_block) {
            assert_int_equal(ds4_kv_block_copy(&f->store, h->block[b], own, NULL), 0);
            f->refs[h->block[b]]--;
        } else {
            h->n_block++;
        }
        h->block[b] = own;
        f->refs[own]++;
    }
    return true;
}

static void do_append(struct fixture *f, int32_t slot)
{
    struct history *h = &f->seq[slot];
    int32_t k = 1 + pick(f, pick(f, 8) == 0 ? 400 : 12);
    struct ds4_kv_lease lease;
    struct ds4_batch_entry entry;
    struct ds4_err err = {0};

    if (h->n + k > MAX_TOK || !make_room(f, slot, k))
        return;
    lease = lease_of(f, slot);
    if (ds4_kv_append(&f->kv, &lease, h->n, k, &entry, &err) != 0)
        fail_msg("%s", err.msg);
    for (int32_t t = 0; t < k; t++) {
        h->hash[h->n + 1] =
            mix(h->hash[h->n] ^ (uint64_t)pick(f, 3)); /* tokens of a small alphabet */
        compute(f, slot, h->n++);
    }
    if (f->hi[slot] < h->n)
        f->hi[slot] = h->n;
}

static void do_cut(struct fixture *f, int32_t slot)
{
    struct history *h = &f->seq[slot];
    int32_t m = h->n - pick(f, 160);
    bool legal;

    if (m < 1)
        return;
    legal = m >= f->install[slot] && f->hi[slot] - m <= HOT;
    assert_int_equal(ds4_kv_truncate(&f->kv, &f->kv.slot[slot], m, NULL), legal ? 0 : -1);
    if (legal)
        h->n = m;
}

static int64_t ledger(const struct fixture *f)
{
    int64_t bytes = 0;

    for (int32_t i = 0; i < N_POINT; i++)
        if (f->point[i].n > 0)
            bytes += ds4_unit_round(ds4_point_bytes(&f->store.shape, f->point[i].n),
                                    (int32_t)f->store.host.unit_bytes);
    return bytes;
}

static void do_save(struct fixture *f, int32_t slot, int32_t i)
{
    const struct history *h = &f->seq[slot];
    int32_t m = h->n - pick(f, pick(f, 2) == 0 ? 1 : 140);
    int64_t need;
    bool legal, fits;

    if (m < 1 || f->point[i].n > 0)
        return;
    need = ds4_unit_round(ds4_point_bytes(&f->store.shape, m), (int32_t)f->store.host.unit_bytes);
    legal = m >= f->install[slot] && f->hi[slot] - m <= HOT;
    fits = ledger(f) + need <= (int64_t)N_UNIT * (int64_t)f->store.host.unit_bytes;
    assert_int_equal(ds4_kv_point_save(&f->store, slot, m, (uint64_t)i + 1, NULL),
                     legal && fits ? 0 : -1);
    if (legal && fits)
        share(f, &f->point[i], h, m);
}

static void do_drop(struct fixture *f, int32_t i)
{
    bool there = f->point[i].n > 0;

    assert_int_equal(ds4_kv_point_drop(&f->store, (uint64_t)i + 1, NULL), there ? 0 : -1);
    let_go(f, &f->point[i]);
}

static void do_restore(struct fixture *f, int32_t slot, int32_t i)
{
    const struct history *from = &f->point[i];
    struct ds4_err err = {0};

    if (from->n == 0)
        return;
    do_open(f, slot);
    if (ds4_kv_point_install(&f->store, slot, from->n, (uint64_t)i + 1, &err) != 0)
        fail_msg("%s", err.msg);
    share(f, &f->seq[slot], from, from->n);
    f->hi[slot] = f->install[slot] = from->n;
}

static uint32_t canary(const struct fixture *f)
{
    uint32_t crc = ds4_crc32c(0, f->rings, ds4_kv_rings_bytes(&f->shape));

    return ds4_crc32c(crc, f->pages, ds4_kv_pages_bytes(&f->shape));
}

/* A block that another sequence's table names, or -1. */
static int32_t block_of_others(const struct fixture *f, int32_t slot)
{
    for (int32_t s = 0; s < N_SLOT; s++)
        if (s != slot && f->kv.slot[s].n_block > 0)
            return f->kv.slot[s].block[f->kv.slot[s].n_block - 1];
    return -1;
}

static int32_t n_shared; /* refused writes into shared blocks */

/* Rows beyond the lease, into a shared block, of another epoch; a second point of an id; copies onto blocks
 * in use: refused, and not a byte has changed. */
static void do_wrong(struct fixture *f, int32_t slot)
{
    const struct history *h = &f->seq[slot];
    struct ds4_kv_lease lease = lease_of(f, slot);
    struct ds4_batch_entry entry;
    uint32_t before = canary(f);
    int32_t b = h->n / DS4_BLOCK_TOK;

    lease.n_block = 0; /* the table stays */
    if (h->n_block > 0 && f->kv.slot[slot].n_block > 0) {
        lease.cap_tok = h->n;
        assert_int_equal(ds4_kv_append(&f->kv, &lease, h->n, 1, &entry, NULL), -1);
        lease.epoch--;
        assert_int_equal(ds4_kv_append(&f->kv, &lease, h->n, 1, &entry, NULL), -1);
        assert_int_equal(
            ds4_kv_block_copy(&f->store, (h->block[0] + 1) % N_BLOCK, h->block[0], NULL), -1);
    }
    if (b < MAX_BLOCK && h->n_block > 0 && block_of_others(f, slot) >= 0) {
        int32_t table[MAX_BLOCK];

        memcpy(table, h->block, sizeof(table));
        table[b] = block_of_others(f, slot); /* as if nobody had made a copy */
        lease = lease_of(f, slot);
        lease.block = table;
        lease.n_block = b + 1;
        lease.cap_tok = (b + 1) * DS4_BLOCK_TOK;
        assert_int_equal(ds4_kv_append(&f->kv, &lease, h->n, 1, &entry, NULL), -1);
        lease = lease_of(f, slot); /* a refused entry leaves its table behind */
        assert_int_equal(ds4_kv_skip(&f->kv, &lease, 1, &entry, NULL), 0);
        n_shared++;
    }
    for (int32_t i = 0; i < N_POINT; i++)
        if (f->point[i].n > 0 && h->n > 0)
            assert_int_equal(ds4_kv_point_save(&f->store, slot, h->n, (uint64_t)i + 1, NULL), -1);
    assert_int_equal(before, canary(f));
}

static void step(struct fixture *f)
{
    int32_t slot = pick(f, N_SLOT), i = pick(f, N_POINT), what = pick(f, 100);

    if (!f->open[slot])
        do_open(f, slot);
    if (what < 45)
        do_append(f, slot);
    else if (what < 60)
        do_cut(f, slot);
    else if (what < 75)
        do_save(f, slot, i);
    else if (what < 82)
        do_drop(f, i);
    else if (what < 94)
        do_restore(f, slot, i);
    else if (what < 97)
        do_wrong(f, slot);
    else
        do_close(f, slot);
    if (f->open[slot])
        check_slot(f, slot);
    slot = pick(f, N_SLOT); /* and a bystander */
    if (f->open[slot])
        check_slot(f, slot);
    assert_int_equal(ds4_kv_host_used_bytes(&f->store.host), ledger(f));
}

static void any_history_reads_back_whatever_was_done_before(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));
    const struct ds4_device_config config = {.n_thread = 1};
    const struct ds4_backend *cpu = ds4_backend_find("cpu");
    struct ds4_device *dev = cpu->open(&config, NULL);
    struct ds4_point_shape point;
    size_t unit;

    (void)state;
    f->shape = (struct ds4_kv_shape){.n_layer = 4,
                                     .layer = layers,
                                     .d_head = 4,
                                     .d_rope = 2,
                                     .d_index = 2,
                                     .window_tok = WINDOW,
                                     .hot_tok = HOT,
                                     .n_slot = N_SLOT,
                                     .n_block = N_BLOCK,
                                     .table_blocks = MAX_BLOCK};
    assert_int_equal(ds4_kv_point_shape(&f->shape, &point, NULL), 0);
    unit = (size_t)ds4_kv_unit_bytes(&point);
    f->rings = calloc(1, ds4_kv_rings_bytes(&f->shape));
    f->pages = calloc(1, ds4_kv_pages_bytes(&f->shape));
    f->area = calloc(1, ds4_kv_store_area_bytes(&f->shape));
    f->arena = calloc(N_UNIT, unit);
    assert_int_equal(ds4_kv_init(&f->kv, &f->shape, f->rings, f->pages, NULL), 0);
    assert_int_equal(
        ds4_kv_store_init(&f->store, cpu, dev, &f->kv, f->area, f->arena, N_UNIT, NULL), 0);
    ds4_kv_store_reset(&f->store, (int64_t)N_UNIT * (int64_t)unit);
    f->random = 11;
    for (int32_t i = 0; i < n_op; i++)
        step(f);
    assert_true(n_shared > 0);
    for (int32_t s = 0; s < N_SLOT; s++)
        do_close(f, s);
    for (int32_t i = 0; i < N_POINT; i++)
        if (f->point[i].n > 0)
            do_drop(f, i);
    assert_int_equal(ds4_kv_host_used_bytes(&f->store.host), 0);
    for (int32_t b = 0; b < N_BLOCK; b++) {
        assert_int_equal(f->refs[b], 0);
        assert_int_equal(f->kv.users[b], 0);
    }
    ds4_kv_store_deinit(&f->store);
    ds4_kv_deinit(&f->kv);
    cpu->close(dev);
    free(f->arena);
    free(f->area);
    free(f->pages);
    free(f->rings);
    free(f);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_history_reads_back_whatever_was_done_before),
    };

    if (argc == 3 && strcmp(argv[1], "--long") == 0)
        n_op = 100000;
    return cmocka_run_group_tests(tests, NULL, NULL);
}

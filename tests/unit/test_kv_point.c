/* Points (worker/kv_point.c, stage_kv.c): a sequence cut back to any position and continued otherwise is
 * equal, bit for bit, to one that never went further.
 *
 * The oracle does not use the product's rollback: one cold sequence is fed token by token, and before each
 * other continuation all cache memory of the stage is set aside by memcpy and put back after.  `--long 1`
 * cuts at every position instead of a choice that has all boundaries. */
#include "common/fault.h"
#include "proto/point.h"
#include "tests/support/chain.h"
#include "tests/support/golden.h"
#include "worker/stage_state.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define GOLDEN      "tests/data/model/ds4-tiny-golden.safetensors"
#define LONG_TOK    700
#define SHORT_TOK   330
#define HOT         120
#define ANCHOR      128
#define SUFFIX_TOK  9
#define SUFFIX_AT   1500
#define BIG_CHUNK   1024
#define POINT_AT(a) (uint64_t)(1000 + (a)) /* ids of anchors */

static bool every_position;
static int32_t n_tok = SHORT_TOK;

/* Positions whose suffix is compared: around every multiple of 128, all remainders of 4, and some. */
static bool is_cut(int32_t m)
{
    int32_t r = (m + 2) % ANCHOR;

    return every_position || r <= 3 || m % 97 < 1 || m < 3 || m > n_tok - 2 ||
           (m >= n_tok - HOT - 1 && m <= n_tok - HOT + 1);
}

static struct {
    struct golden *g;
    const int32_t *ids;
    const int32_t *suffix;
    size_t n_value;
    float *want; /* [n_tok + 1, SUFFIX_TOK, n_value]: the suffix after each prefix */
} text;

/* ---- helpers -------------------------------------------------------------------------------------- */

static void *take(size_t n, size_t bytes)
{
    void *p = calloc(n, bytes);

    assert_non_null(p);
    return p;
}

/* Opens a slot anew at the state of a point (0: from nothing), whatever it held. */
static void reopen(struct chain *c, int32_t slot, int32_t pos, uint64_t point)
{
    struct ds4_seq_open open =
        chain_greedy(slot, 100 + (uint64_t)slot, c->owner[slot].epoch + 1, 1);

    if (pos > 0)
        chain_install(c, slot, pos, point);
    chain_step(c, &open, 1, NULL, 0);
}

static void feed(struct chain *c, int32_t slot, const int32_t *ids, int32_t base, int32_t n)
{
    if (n > 0)
        chain_feed(c, slot, ids - base, base, n, BIG_CHUNK, false);
}

/* Feeds the text [from, to) and saves a point at every multiple of ANCHOR on the way. */
static void feed_with_anchors(struct chain *c, int32_t slot, int32_t from, int32_t to)
{
    while (from < to) {
        int32_t next = (from / ANCHOR + 1) * ANCHOR;
        int32_t end = next < to ? next : to;

        if (end == next)
            chain_save(c, slot, end, POINT_AT(end));
        feed(c, slot, text.ids + from, from, end - from);
        from = end;
    }
}

static void run_suffix(struct chain *c, int32_t slot, int32_t m)
{
    feed(c, slot, text.suffix, m, SUFFIX_TOK);
}

/* Device memory becomes NaN (all bytes 0xff are one in every format of rows). */
static void poison(struct ds4_stage *st, void *at, size_t bytes)
{
    static uint8_t *ff;
    static size_t n;

    if (bytes > n) {
        free(ff);
        ff = take(n = bytes, 1);
        memset(ff, 0xff, n);
    }
    st->backend->upload(st->dev, at, ff, bytes);
    st->backend->sync(st->dev);
}

static uint8_t *rings_of(const struct ds4_stage *st)
{
    return st->kv.layer[0].window.data;
}

static uint8_t *pages_of(const struct ds4_stage *st)
{
    for (int32_t l = 0; l < st->kv.shape.n_layer; l++)
        if (st->kv.layer[l].rows.data != NULL)
            return st->kv.layer[l].rows.data;
    return NULL;
}

/* Every ring of a slot becomes NaN: what is read later came out of a point or was written since. */
static void poison_rings(struct chain *c, int32_t slot)
{
    for (int32_t s = 0; s < c->n_stage; s++)
        for (int32_t l = 0; l < c->stage[s]->kv.shape.n_layer; l++) {
            const struct ds4_kv_layer *layer = &c->stage[s]->kv.layer[l];
            const struct ds4_ring *ring[] = {&layer->window, &layer->comp_k, &layer->comp_g,
                                             &layer->index_k, &layer->index_g};

            for (int i = 0; i < 5; i++) {
                size_t bytes = (size_t)ring[i]->cap * ring[i]->row_bytes;

                if (bytes > 0)
                    poison(c->stage[s], (uint8_t *)ring[i]->data + (size_t)slot * bytes, bytes);
            }
        }
}

/* Compressed rows that tokens from m on close are stale: NaN. */
static void poison_rows(struct chain *c, int32_t slot, int32_t m)
{
    for (int32_t s = 0; s < c->n_stage; s++)
        for (int32_t l = 0; l < c->stage[s]->kv.shape.n_layer; l++) {
            const struct ds4_kv_layer *layer = &c->stage[s]->kv.layer[l];
            const struct ds4_pages *pages[] = {&layer->rows, &layer->index_rows};
            int32_t ratio = c->stage[s]->kv.shape.layer[l].ratio;

            for (int i = 0; i < 2 && ratio > 0; i++)
                for (int32_t row = m / ratio;
                     pages[i]->data != NULL && row < c->seq_blocks * pages[i]->rows_per_block;
                     row++) {
                    size_t at = (size_t)c->table[slot][row / pages[i]->rows_per_block] *
                                    (size_t)pages[i]->rows_per_block +
                                (size_t)(row % pages[i]->rows_per_block);

                    poison(c->stage[s], (uint8_t *)pages[i]->data + at * pages[i]->row_bytes,
                           pages[i]->row_bytes);
                }
        }
}

/* ---- oracle --------------------------------------------------------------------------------------- */

static void make_oracle(void)
{
    struct chain_options options = {.quant_sim = DS4_OFF};
    struct chain *c;
    struct ds4_stage *st;
    size_t rings, pages;
    uint8_t *kept_rings, *kept_pages;

    options.context_tok = 768;
    c = chain_new(&options);
    st = c->stage[0];
    text.n_value = c->row_bytes / sizeof(float);
    text.want = take(((size_t)n_tok + 1) * SUFFIX_TOK * text.n_value, sizeof(float));
    rings = st->plan.rings_bytes;
    pages = st->plan.pages_bytes;
    kept_rings = take(rings, 1);
    kept_pages = take(pages, 1);
    reopen(c, 0, 0, 0);
    for (int32_t m = 0, next; m <= n_tok; m = next) {
        struct ds4_kv_slot kept = st->kv.slot[0];

        next = m + 1;
        while (next < n_tok && !is_cut(next))
            next++;
        st->backend->download(st->dev, kept_rings, rings_of(st), rings);
        st->backend->download(st->dev, kept_pages, pages_of(st), pages);
        run_suffix(c, 0, m);
        chain_residual(c, SUFFIX_TOK, text.want + (size_t)m * SUFFIX_TOK * text.n_value);
        st->backend->upload(st->dev, rings_of(st), kept_rings, rings);
        st->backend->upload(st->dev, pages_of(st), kept_pages, pages);
        st->backend->sync(st->dev);
        kept.n_block = st->kv.slot[0].n_block; /* the first step brought the table */
        st->kv.slot[0] = kept;
        if (m < n_tok)
            feed(c, 0, text.ids + m, m, next - m);
    }
    free(kept_pages);
    free(kept_rings);
    chain_free(c);
}

/* The suffix after the first m tokens, as a cold run has it: [SUFFIX_TOK, n_value].  All of them are made
 * for the first test that asks. */
static const float *wanted(int32_t m)
{
    if (text.want == NULL)
        make_oracle();
    return text.want + (size_t)m * SUFFIX_TOK * text.n_value;
}

static void check_suffix(const char *what, struct chain *c, int32_t m)
{
    const float *want = wanted(m);
    float *got = take(SUFFIX_TOK * text.n_value, sizeof(*got));

    chain_residual(c, SUFFIX_TOK, got);
    if (!chain_same_rows(got, want, SUFFIX_TOK * text.n_value))
        fail_msg("%s: cut at %d differs from a cold run", what, m);
    free(got);
}

static int open_text(void **state)
{
    struct golden_tensor ids;

    (void)state;
    text.g = golden_open(GOLDEN);
    ids = golden_get(text.g, "long_ids", "I32");
    text.ids = ids.data;
    text.suffix = text.ids + SUFFIX_AT;
    assert_true(ids.n >= SUFFIX_AT + SUFFIX_TOK);
    return 0;
}

static int close_text(void **state)
{
    (void)state;
    free(text.want);
    golden_close(text.g);
    return 0;
}

static void the_oracle_agrees_with_plain_cold_runs(void **state)
{
    static const int32_t cut[] = {0, 1, 255};
    struct chain_options options = {.quant_sim = DS4_OFF};
    struct chain *c = chain_new(&options);

    (void)state;
    for (size_t i = 0; i < sizeof(cut) / sizeof(cut[0]); i++) {
        chain_form(c);
        reopen(c, 0, 0, 0);
        feed(c, 0, text.ids, 0, cut[i]);
        run_suffix(c, 0, cut[i]);
        check_suffix("cold", c, cut[i]);
    }
    chain_free(c);
}

/* ---- T02, T04: every position ------------------------------------------------------------------------ */

/* From high to low: what a cut leaves behind lies above it.  Tokens fed again beyond the suffix: none
 * within the hot window, else those from the anchor on. */
static void a_cut_at_every_position_equals_a_cold_run(void **state)
{
    struct chain_options options = {.quant_sim = DS4_OFF, .n_stage = 2};
    struct chain *c = chain_new(&options);

    (void)state;
    reopen(c, 0, 0, 0);
    feed_with_anchors(c, 0, 0, n_tok);
    for (int32_t m = n_tok; m >= 0; m--) {
        int32_t a = m / ANCHOR * ANCHOR;

        if (!is_cut(m))
            continue;
        if (n_tok - m <= HOT) { /* in place */
            int32_t from = (n_tok - HOT) / ANCHOR * ANCHOR;

            reopen(c, 0, from, POINT_AT(from));
            feed(c, 0, text.ids + from, from, n_tok - from);
        } else { /* the anchor below, and what lies between */
            poison_rings(c, 0);
            reopen(c, 0, a, POINT_AT(a));
            poison_rows(c, 0, a);
            feed(c, 0, text.ids + a, a, m - a);
        }
        poison_rows(c, 0, m);
        run_suffix(c, 0, m);
        check_suffix(n_tok - m <= HOT ? "hot window" : "anchor", c, m);
        assert_int_equal(c->stage[0]->kv.slot[0].pos, m + SUFFIX_TOK);
    }
    chain_free(c);
}

/* Exact tails: any position is as good as an anchor, and nothing is fed again.  Every other point is of a
 * position behind the newest. */
static void a_point_at_any_position_continues_like_a_cold_run(void **state)
{
    struct chain_options options = {
        .quant_sim = DS4_OFF, .n_stage = 3, .host_bytes = 512 << 20}; /* 700 points */
    struct chain *c = chain_new(&options);
    int32_t pos = 0, n = 0;

    (void)state;
    reopen(c, 0, 0, 0);
    for (int32_t m = 1; m <= n_tok; m++) {
        if (!is_cut(m))
            continue;
        feed(c, 0, text.ids + pos, pos, m - pos);
        pos = m;
        if (n++ % 2 == 0 && m + HOT <= n_tok) {
            feed(c, 0, text.suffix, m, SUFFIX_TOK); /* the branch that the point must not see */
            chain_save(c, 0, m, POINT_AT(m));
            chain_step(c, NULL, 0, NULL, 0);
        } else {
            chain_save(c, 0, m, POINT_AT(m));
            chain_step(c, NULL, 0, NULL, 0);
        }
    }
    for (int32_t m = pos; m >= 1; m--) {
        if (!is_cut(m))
            continue;
        poison_rings(c, 0);
        reopen(c, 0, m, POINT_AT(m));
        poison_rows(c, 0, m);
        run_suffix(c, 0, m);
        check_suffix("tail", c, m);
    }
    chain_free(c);
}

/* ---- T03 -------------------------------------------------------------------------------------------- */

static void stacked_cuts_fall_back_to_anchors_when_the_hot_window_ends(void **state)
{
    struct chain_options options = {.quant_sim = DS4_OFF};
    struct chain *c = chain_new(&options);
    int32_t pos = 230, n_hot = 0, n_anchor = 0;
    uint32_t random = 11;

    (void)state;
    reopen(c, 0, 0, 0);
    feed_with_anchors(c, 0, 0, pos);
    for (int32_t round = 0; round < 50; round++) {
        int32_t m, ahead, a;

        random = random * 1664525 + 1013904223;
        m = pos - 1 - (int32_t)(random >> 16) % 20;
        ahead = (int32_t)(random >> 8) % 16;
        a = m / ANCHOR * ANCHOR;
        /* An abandoned branch raises the highest position; now and then beyond the hot window. */
        feed(c, 0, text.ids + SUFFIX_AT + round, pos, round % 9 == 8 ? HOT : 2);
        if (!ds4_kv_reaches(&c->stage[0]->kv, &c->stage[0]->kv.slot[0], m)) {
            poison_rings(c, 0);
            reopen(c, 0, a, POINT_AT(a));
            feed(c, 0, text.ids + a, a, m - a);
            n_anchor++;
        } else {
            n_hot++;
        }
        if (is_cut(m)) {
            run_suffix(c, 0, m);
            check_suffix("stacked", c, m);
        }
        feed(c, 0, text.ids + m, m, ahead); /* truncates what was run */
        pos = m + ahead;
    }
    assert_true(n_hot > 20 && n_anchor > 3);
    chain_free(c);
}

/* ---- T05 -------------------------------------------------------------------------------------------- */

static void a_point_on_a_ring_wrap_survives_three_more_wraps(void **state)
{
    struct chain_options options = {.quant_sim = DS4_ON};
    struct chain *c = chain_new(&options);
    const int32_t wrap = 256, end = 256 + 3 * 256 + 3;
    size_t bytes = (size_t)(end - wrap) * c->row_bytes;
    uint8_t *want = take(bytes, 1), *got = take(bytes, 1);
    struct chain_part rest = {.base_pos = wrap, .n_tok = end - wrap, .token = text.ids + wrap};

    (void)state;
    assert_int_equal(c->stage[0]->kv.layer[0].window.cap, wrap);
    reopen(c, 0, 0, 0);
    chain_save(c, 0, wrap, 1);
    feed(c, 0, text.ids, 0, wrap);
    chain_step(c, NULL, 0, &rest, 1);
    chain_residual(c, end - wrap, want);
    poison_rings(c, 0);
    reopen(c, 0, wrap, 1);
    poison_rows(c, 0, wrap);
    chain_step(c, NULL, 0, &rest, 1);
    chain_residual(c, end - wrap, got);
    assert_memory_equal(want, got, bytes);
    free(got);
    free(want);
    chain_free(c);
}

/* ---- T07 -------------------------------------------------------------------------------------------- */

static void clearing_one_sequence_leaves_the_others_alone(void **state)
{
    struct chain_options options = {.quant_sim = DS4_OFF};
    struct chain *c = chain_new(&options);
    const int32_t m = 291; /* is_cut */
    int32_t a = 0;
    struct ds4_step *step;

    (void)state;
    reopen(c, 0, 0, 0);
    reopen(c, 1, 0, 0);
    feed(c, 0, text.ids + 37, 0, 200);
    for (int32_t pos = 0; pos < m; pos += 97) {
        feed(c, 1, text.ids + pos, pos, 90);
        feed(c, 1, text.ids + pos + 90, pos + 90, 7);
        if (pos < 200) { /* slot 0 goes, comes back, and runs on */
            step = chain_build(c, NULL, 0, NULL, 0);
            step->n_close = 1;
            step->close_slot = &a;
            chain_run(c, step);
            reopen(c, 0, 0, 0);
            feed(c, 0, text.ids + pos + 1, 0, 60);
        }
    }
    run_suffix(c, 1, m);
    check_suffix("beside a cleared sequence", c, m);
    chain_free(c);
}

/* ---- fork ------------------------------------------------------------------------------------------- */

/* The parent's next rows against a sequence that was never forked. */
static void check_parent(struct chain *c, int32_t pos)
{
    struct chain_options options = {.quant_sim = DS4_OFF};
    struct chain *cold = chain_new(&options);
    size_t bytes = SUFFIX_TOK * c->row_bytes;
    uint8_t *want = take(bytes, 1), *got = take(bytes, 1);

    reopen(cold, 0, 0, 0);
    feed(cold, 0, text.ids, 0, pos);
    run_suffix(cold, 0, pos);
    chain_residual(cold, SUFFIX_TOK, want);
    run_suffix(c, 0, pos);
    chain_residual(c, SUFFIX_TOK, got);
    assert_true(chain_same_rows((const float *)(const void *)want, (const float *)(const void *)got,
                                bytes / sizeof(float)));
    free(got);
    free(want);
    chain_free(cold);
}

/* The child shares the parent's full blocks, takes a copy of the one that its position cuts, and starts
 * from a point; both go on. */
static void check_fork(int32_t m, int32_t n_stage)
{
    struct chain_options options = {.quant_sim = DS4_OFF, .n_stage = n_stage};
    struct chain *c = chain_new(&options);
    int32_t cut = m / DS4_BLOCK_TOK;
    const float *want = wanted(m);
    float *row = take(text.n_value, sizeof(*row));

    reopen(c, 0, 0, 0);
    chain_save(c, 0, m, 1);
    feed(c, 0, text.ids, 0, m);
    feed(c, 0, text.ids + m, m, 30); /* the parent is ahead before the child exists */
    for (int32_t b = 0; b < cut; b++)
        c->table[1][b] = c->table[0][b];
    if (m % DS4_BLOCK_TOK != 0)
        chain_copy_block(c, c->table[0][cut], c->table[1][cut]);
    poison_rings(c, 1);
    reopen(c, 1, m, 1);
    poison_rows(c, 1, (m / DS4_BLOCK_TOK + 1) * DS4_BLOCK_TOK);
    for (int32_t t = 0; t < SUFFIX_TOK; t++) { /* in turns, in the same steps */
        struct chain_part part[] = {
            {.slot = 0, .base_pos = m + 30 + t, .n_tok = 1, .token = text.ids + m + 30 + t},
            {.slot = 1, .base_pos = m + t, .n_tok = 1, .token = text.suffix + t}};

        chain_step(c, NULL, 0, part, 2);
        chain_residual(c, 1, row);
        if (!chain_same_rows(row, want + (size_t)t * text.n_value, text.n_value))
            fail_msg("fork at %d: token %d of the child differs", m, t);
    }
    check_parent(c, m + 30 + SUFFIX_TOK);
    free(row);
    chain_free(c);
}

static void parent_and_child_of_a_fork_both_go_on(void **state)
{
    static const int32_t at[] = {2, 126, 256, 291};

    (void)state;
    for (size_t i = 0; i < sizeof(at) / sizeof(at[0]); i++)
        check_fork(at[i], 1 + (int32_t)i % 3);
}

/* ---- refusals --------------------------------------------------------------------------------------- */

static void copy_cache(struct ds4_stage *st, uint8_t *rings, uint8_t *pages)
{
    st->backend->download(st->dev, rings, rings_of(st), st->plan.rings_bytes);
    st->backend->download(st->dev, pages, pages_of(st), st->plan.pages_bytes);
}

/* Slot 0 stands at 125; point 1 is at 90.  All cache memory is kept aside. */
static struct chain *refusal_rig(uint8_t **rings, uint8_t **pages)
{
    struct chain_options options = {.quant_sim = DS4_OFF, .context_tok = 768};
    static struct chain *c;

    if (c == NULL)
        c = chain_new(&options);
    chain_form(c);
    reopen(c, 0, 0, 0);
    chain_save(c, 0, 90, 1);
    feed(c, 0, text.ids, 0, 90);
    feed(c, 0, text.ids + 90, 90, 35);
    *rings = take(c->stage[0]->plan.rings_bytes, 1);
    *pages = take(c->stage[0]->plan.pages_bytes, 1);
    copy_cache(c->stage[0], *rings, *pages);
    return c;
}

/* No byte of the cache has changed. */
static void check_untouched(struct chain *c, uint8_t *rings, uint8_t *pages)
{
    const struct ds4_plan *plan = &c->stage[0]->plan;
    uint8_t *now_rings = take(plan->rings_bytes, 1), *now_pages = take(plan->pages_bytes, 1);

    copy_cache(c->stage[0], now_rings, now_pages);
    assert_memory_equal(rings, now_rings, plan->rings_bytes);
    assert_memory_equal(pages, now_pages, plan->pages_bytes);
    free(now_rings);
    free(now_pages);
    free(rings);
    free(pages);
}

enum wrong {
    UNKNOWN_POINT,
    OTHER_POSITION,
    SLOT_HAS_RUN,
    OTHER_EPOCH,
    OTHER_SEQ,
    COPY_OUTSIDE,
    COPY_ONTO_USED,
    DROP_UNKNOWN,
    NO_STAGING,
    SHARED_BLOCK,
    BEYOND_LEASE,
    LEASE_BEYOND_TABLE,
    STALE_LEASE,
    BLOCK_OUTSIDE,
    CUT_TOO_DEEP,
    ABOVE_POSITION,
    N_WRONG
};

static struct ds4_step *build_wrong(struct chain *c, enum wrong wrong)
{
    struct ds4_seq_open open = chain_greedy(1, 7, 1, 1);
    struct chain_part part = {.slot = 1, .base_pos = 0, .n_tok = 1, .token = text.ids};
    struct chain_part again = {.slot = 0, .base_pos = 125, .n_tok = 1, .token = text.ids};
    bool opens = wrong != SLOT_HAS_RUN;
    struct ds4_step *step;

    switch (wrong) {
    case UNKNOWN_POINT:
        chain_install(c, 1, 90, 99);
        break;
    case OTHER_POSITION:
        chain_install(c, 1, 89, 1);
        break;
    case SLOT_HAS_RUN:
        chain_install(c, 0, 90, 1);
        break;
    case COPY_OUTSIDE:
        chain_copy_block(c, 0, c->stage[0]->kv.n_block);
        break;
    case COPY_ONTO_USED:
        chain_copy_block(c, 8, c->table[0][0]);
        break;
    case DROP_UNKNOWN:
        chain_drop(c, 2);
        break;
    case NO_STAGING:
        c->op[c->n_op++] = (struct ds4_kv_op){.kind = DS4_KV_STAGED_INSTALL, .staging = 5};
        break;
    case BEYOND_LEASE:
    case LEASE_BEYOND_TABLE:
    case STALE_LEASE:
        step = chain_build(c, NULL, 0, &again, 1);
        if (wrong == BEYOND_LEASE)
            step->entry[0].cap_tok = 125;
        else if (wrong == LEASE_BEYOND_TABLE)
            step->entry[0].cap_tok = c->seq_blocks * DS4_BLOCK_TOK + 1;
        else
            step->entry[0].epoch--;
        return step;
    case BLOCK_OUTSIDE:
        c->table[0][1] = c->stage[0]->kv.n_block;
        return chain_build(c, NULL, 0, &again, 1);
    case CUT_TOO_DEEP:
    case ABOVE_POSITION:
        again.base_pos = wrong == CUT_TOO_DEEP ? 4 : 126;
        return chain_build(c, NULL, 0, &again, 1);
    case SHARED_BLOCK:
        c->table[1][0] = c->table[0][0];
        return chain_build(c, &open, 1, &part, 1);
    default:
        chain_install(c, 1, 90, 1);
        break;
    }
    return chain_build(c, &open, opens ? 1 : 0, NULL, 0);
}

static void what_is_refused_changes_no_byte(void **state)
{
    (void)state;
    for (int wrong = 0; wrong < N_WRONG; wrong++) {
        uint8_t *rings, *pages;
        struct chain *c = refusal_rig(&rings, &pages);
        struct ds4_step *step = build_wrong(c, (enum wrong)wrong);

        if (wrong == OTHER_EPOCH)
            step->op[0].epoch++;
        if (wrong == OTHER_SEQ)
            step->op[0].seq++;
        chain_refuse(c, step, DS4_E_PROTOCOL);
        check_untouched(c, rings, pages);
    }
}

static int save_alone(struct chain *c, int32_t pos, uint64_t point, struct ds4_err *err)
{
    struct ds4_token_record *record = take(1, sizeof(*record));
    struct ds4_step *step;
    int rc;

    chain_save(c, 0, pos, point);
    step = chain_build(c, NULL, 0, NULL, 0);
    assert_int_equal(ds4_stage_begin(c->stage[0], step, err), 0);
    assert_int_equal(ds4_stage_forward(c->stage[0], step, NULL, record, &c->out, err), 0);
    rc = ds4_stage_finish(c->stage[0], step, NULL, err);
    c->step_no++;
    free(record);
    return rc;
}

static void a_point_out_of_reach_is_refused(void **state)
{
    static const int32_t bad[] = {126, 4, 1};
    uint8_t *rings, *pages;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct chain *c = refusal_rig(&rings, &pages);
        struct ds4_err err = {0};
        int64_t used = ds4_kv_host_used_bytes(&c->stage[0]->store.host);

        assert_int_equal(save_alone(c, 5, 2, &err), 0); /* 125 - 120 is just in reach */
        assert_int_equal(save_alone(c, bad[i], 3, &err), -1);
        assert_int_equal(err.code, DS4_E_PROTOCOL);
        assert_true(ds4_kv_host_used_bytes(&c->stage[0]->store.host) > used);
        check_untouched(c, rings, pages);
    }
}

static void an_id_in_use_is_refused_and_costs_nothing(void **state)
{
    uint8_t *rings, *pages;
    struct chain *c = refusal_rig(&rings, &pages);
    int64_t used = ds4_kv_host_used_bytes(&c->stage[0]->store.host);
    struct ds4_err err = {0};

    (void)state;
    assert_int_equal(save_alone(c, 110, 1, &err), -1);
    assert_int_equal(err.code, DS4_E_PROTOCOL);
    assert_int_equal(ds4_kv_host_used_bytes(&c->stage[0]->store.host), used);
    check_untouched(c, rings, pages);
}

/* ---- memory ----------------------------------------------------------------------------------------- */

/* The ledger of the router: bytes by the formula of HELLO, rounded up to units. */
static void what_the_router_counts_fits_exactly(void **state)
{
    struct chain_options options = {.quant_sim = DS4_OFF, .host_bytes = 1 << 20};
    struct chain *c = chain_new(&options);
    struct ds4_stage *st = c->stage[0];
    struct ds4_hello hello = {0};
    int64_t used = 0;
    struct ds4_err err = {0};
    uint64_t id = 1;

    (void)state;
    ds4_stage_hello(st, &hello);
    assert_true(hello.host_bytes > 0 && hello.host_bytes <= options.host_bytes);
    reopen(c, 0, 0, 0);
    for (int32_t pos = 1;; pos++, id++) {
        int64_t bytes = ds4_unit_round(ds4_point_bytes(&hello.point, pos), hello.unit_bytes);

        feed(c, 0, text.ids + pos - 1, pos - 1, 1);
        if (used + bytes > hello.host_bytes) {
            assert_int_equal(save_alone(c, pos, id, &err), -1);
            assert_int_equal(err.code, DS4_E_NOMEM);
            break;
        }
        chain_save(c, 0, pos, id);
        chain_step(c, NULL, 0, NULL, 0);
        used += bytes;
        assert_int_equal(ds4_kv_host_used_bytes(&st->store.host), used);
        if (pos % 3 == 0) { /* holes in the arena do not cost anything */
            uint64_t gone = id - 1;

            used -= ds4_unit_round(ds4_point_bytes(&hello.point, pos - 1), hello.unit_bytes);
            chain_drop(c, gone);
            chain_step(c, NULL, 0, NULL, 0);
        }
    }
    assert_true(id > 10);
    chain_form(c); /* a new generation has no points */
    assert_int_equal(ds4_kv_host_used_bytes(&st->store.host), 0);
    assert_null(ds4_kv_point_find(&st->store, 1));
    chain_free(c);
}

#ifdef DS4_FAULTS

static void set_fault(const char *fault)
{
    struct ds4_err err = {0};

    if (ds4_fault_set(fault, 0, &err) != 0)
        fail_msg("%s", err.msg);
}

static void each_fault_of_a_point_is_an_error_that_holds_nothing(void **state)
{
    uint8_t *rings, *pages;
    struct chain *c = refusal_rig(&rings, &pages);
    int64_t used = ds4_kv_host_used_bytes(&c->stage[0]->store.host);
    struct ds4_seq_open open = chain_greedy(1, 7, 1, 1);
    struct ds4_err err = {0};

    (void)state;
    set_fault("host_anchor_alloc_fail:1:0");
    assert_int_equal(save_alone(c, 120, 3, &err), -1);
    assert_int_equal(err.code, DS4_E_NOMEM);
    assert_null(ds4_kv_point_find(&c->stage[0]->store, 3));
    assert_int_equal(ds4_kv_host_used_bytes(&c->stage[0]->store.host), used);
    free(rings);
    free(pages);
    c = refusal_rig(&rings, &pages);
    set_fault("install_copy_fail:1:0");
    chain_install(c, 1, 90, 1);
    chain_refuse(c, chain_build(c, &open, 1, NULL, 0), DS4_E_IO);
    check_untouched(c, rings, pages);
    set_fault(NULL);
}

#endif

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_oracle_agrees_with_plain_cold_runs),
        cmocka_unit_test(a_cut_at_every_position_equals_a_cold_run),
        cmocka_unit_test(a_point_at_any_position_continues_like_a_cold_run),
        cmocka_unit_test(stacked_cuts_fall_back_to_anchors_when_the_hot_window_ends),
        cmocka_unit_test(a_point_on_a_ring_wrap_survives_three_more_wraps),
        cmocka_unit_test(clearing_one_sequence_leaves_the_others_alone),
        cmocka_unit_test(parent_and_child_of_a_fork_both_go_on),
        cmocka_unit_test(what_is_refused_changes_no_byte),
        cmocka_unit_test(a_point_out_of_reach_is_refused),
        cmocka_unit_test(an_id_in_use_is_refused_and_costs_nothing),
        cmocka_unit_test(what_the_router_counts_fits_exactly),
#ifdef DS4_FAULTS
        cmocka_unit_test(each_fault_of_a_point_is_an_error_that_holds_nothing),
#endif
    };

    chain_take_args(argc, argv);
    for (int i = 1; i + 1 < argc; i += 2)
        every_position |= strcmp(argv[i], "--long") == 0;
    if (every_position)
        n_tok = LONG_TOK;
    return cmocka_run_group_tests(tests, open_text, close_text);
}

/* The CPU's promise: what a token computes does not depend on how its sequence was cut into steps, on
 * the partition into stages, on neighbours in the batch, on instruction set, threads or the way weights
 * are read, nor on tokens that were taken back.  All comparisons are of bits.
 *
 * The reference is TEXT_TOK tokens of the golden text in one step on one stage.  Compared are the
 * residual streams of every row after the last layer, and the logits of the rows at the end.  The text
 * passes every kind of boundary several times: ring wraps (128, 256), block ends of both ratios, page
 * ends, the point where the indexer begins to select (260).  With `--backend cuda` a device's narrower
 * promise is checked instead. */
#include "tests/support/chain.h"
#include "tests/support/golden.h"
#include "worker/stage_state.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define GOLDEN     "tests/data/model/ds4-tiny-golden.safetensors"
#define N_LAST     9 /* rows whose logits are compared */
#define BIG_CHUNK  512
#define TEXT_TOK   820
#define EARLY_TOK  400 /* small chunks run over [0, EARLY_TOK) and the last LATE_TOK tokens */
#define LATE_TOK   90
#define KEPT_TOK   300  /* a sequence that is cut back */
#define SUFFIX_TOK 9    /* its other continuation ... */
#define SUFFIX_AT  1500 /* ... and where in the golden text that is taken from */

static struct {
    struct golden *g;
    const int32_t *ids;
    int32_t n;
    size_t n_vocab;
    size_t n_value;      /* of a residual row */
    float *plain;        /* [n, n_value] reference, quant_sim off */
    float *quant;        /* the same with quant_sim on */
    float *plain_logits; /* [N_LAST, n_vocab] */
    float *quant_logits;
    float *got; /* [n, n_value] */
    float *got_logits;
} text;

/* ---- helpers ------------------------------------------------------------------------------------ */

static float *take_floats(size_t n)
{
    float *p = calloc(n, sizeof(*p));

    assert_non_null(p);
    return p;
}

static void open_slot(struct chain *c, int32_t slot, uint32_t epoch, const int32_t *ids, int32_t n)
{
    struct ds4_seq_open open = chain_greedy(slot, 1000 + (uint64_t)slot, epoch, 1);
    struct chain_part part = {.slot = slot, .n_tok = n, .token = ids};

    chain_step(c, &open, 1, &part, 1);
}

/* One part of the text in one step; its rows go to their place in `got`. */
static void run_part(struct chain *c, int32_t base, int32_t n)
{
    struct chain_part part = {.base_pos = base, .n_tok = n, .token = text.ids + base};

    if (base == 0)
        open_slot(c, 0, 1, text.ids, n);
    else
        chain_step(c, NULL, 0, &part, 1);
    chain_residual(c, n, text.got + (size_t)base * text.n_value);
}

static void run_text(struct chain *c, int32_t from, int32_t to, int32_t chunk)
{
    for (int32_t base = from; base < to; base += chunk)
        run_part(c, base, to - base < chunk ? to - base : chunk);
}

static void check_rows(const char *what, const float *got, const float *want, int32_t n,
                       size_t n_value)
{
    for (int32_t t = 0; t < n; t++)
        if (memcmp(got + (size_t)t * n_value, want + (size_t)t * n_value, n_value * sizeof(*got)) !=
            0)
            fail_msg("%s: row %d differs", what, t);
}

/* Compares the whole of `got` and the logits of the last rows with the reference. */
static void check_text(const char *what, struct chain *c, bool quant)
{
    int32_t n_last = c->stage[0]->batch.n_tok < N_LAST ? c->stage[0]->batch.n_tok : N_LAST;
    const float *logits = quant ? text.quant_logits : text.plain_logits;

    check_rows(what, text.got, quant ? text.quant : text.plain, text.n, text.n_value);
    chain_logits(c, n_last, text.got_logits);
    check_rows(what, text.got_logits, logits + (size_t)(N_LAST - n_last) * text.n_vocab, n_last,
               text.n_vocab);
}

static void run_whole(const char *what, const struct chain_options *options, int32_t chunk)
{
    struct chain *c = chain_new(options);

    run_text(c, 0, text.n, chunk);
    check_text(what, c, options->quant_sim == DS4_ON);
    chain_free(c);
}

/* Small chunks where boundaries are dense, big ones between. */
static void run_small(const char *what, const struct chain_options *options, int32_t chunk)
{
    struct chain *c = chain_new(options);

    run_text(c, 0, EARLY_TOK, chunk);
    run_text(c, EARLY_TOK, text.n - LATE_TOK, BIG_CHUNK);
    run_text(c, text.n - LATE_TOK, text.n, chunk);
    check_text(what, c, options->quant_sim == DS4_ON);
    chain_free(c);
}

static void run_reference(enum ds4_auto_switch quant_sim, float **rows, float **logits)
{
    struct chain_options options = {.quant_sim = quant_sim};
    struct chain *c = chain_new(&options);

    text.n_value = c->row_bytes / sizeof(float);
    text.n_vocab = (size_t)chain_n_vocab(c);
    if (text.got == NULL) {
        text.got = take_floats((size_t)text.n * text.n_value);
        text.got_logits = take_floats(N_LAST * text.n_vocab);
    }
    *rows = take_floats((size_t)text.n * text.n_value);
    *logits = take_floats(N_LAST * text.n_vocab);
    run_part(c, 0, text.n);
    memcpy(*rows, text.got, (size_t)text.n * c->row_bytes);
    chain_logits(c, N_LAST, *logits);
    chain_free(c);
}

static int run_references(void **state)
{
    struct golden_tensor ids;

    (void)state;
    text.g = golden_open(GOLDEN);
    ids = golden_get(text.g, "long_ids", "I32");
    text.ids = ids.data;
    assert_true(ids.n >= SUFFIX_AT + SUFFIX_TOK);
    text.n = TEXT_TOK;
    run_reference(DS4_OFF, &text.plain, &text.plain_logits);
    run_reference(DS4_ON, &text.quant, &text.quant_logits);
    return 0;
}

static int free_references(void **state)
{
    (void)state;
    free(text.plain);
    free(text.quant);
    free(text.plain_logits);
    free(text.quant_logits);
    free(text.got);
    free(text.got_logits);
    golden_close(text.g);
    return 0;
}

/* ---- cuts --------------------------------------------------------------------------------------- */

static void chunks_equal_the_whole(void **state)
{
    struct chain_options options = {.quant_sim = DS4_OFF};

    (void)state;
    run_whole("chunk 512", &options, 512);
    run_whole("chunk 64", &options, 64);
    run_small("chunk 7", &options, 7);
}

static void single_tokens_equal_the_whole(void **state)
{
    struct chain_options options = {.quant_sim = DS4_OFF};

    (void)state;
    run_small("chunk 1", &options, 1);
}

static void partitions_equal_one_stage(void **state)
{
    static const int32_t odd[] = {1, 5, 2};
    static const int32_t n_stage[] = {2, 4, 8};
    struct chain_options options = {.quant_sim = DS4_OFF, .n_stage = 3, .partition = odd};

    (void)state;
    run_whole("1,5,2", &options, BIG_CHUNK);
    options.partition = NULL;
    for (size_t i = 0; i < sizeof(n_stage) / sizeof(n_stage[0]); i++) {
        options.n_stage = n_stage[i];
        run_whole("even partition", &options, BIG_CHUNK);
    }
}

static void instruction_sets_threads_and_loading_do_not_matter(void **state)
{
    static const enum ds4_isa isa[] = {DS4_ISA_SCALAR, DS4_ISA_AVX2, DS4_ISA_AVX512};
    struct chain_options options = {.quant_sim = DS4_OFF};

    (void)state;
    for (size_t i = 0; i < sizeof(isa) / sizeof(isa[0]); i++) {
        struct ds4_device_config config = {.n_thread = 1, .isa = isa[i]};
        struct ds4_device *dev = ds4_backend_find("cpu")->open(&config, NULL);

        if (dev == NULL) {
            print_message("instruction set %d: not on this machine\n", (int)isa[i]);
            continue;
        }
        ds4_backend_find("cpu")->close(dev);
        options.isa = isa[i];
        run_whole("instruction set", &options, BIG_CHUNK);
    }
    options.isa = DS4_ISA_AUTO;
    options.n_thread = 3;
    options.load = DS4_LOAD_PREAD;
    run_whole("three threads, weights read", &options, BIG_CHUNK);
}

/* ---- neighbours --------------------------------------------------------------------------------- */

/* Eight others in every step, of changing sizes and at other places of the text, some starting afresh
 * now and then; the subject is sometimes first and sometimes last in the step. */
static void neighbours_do_not_matter(void **state)
{
    struct chain_options options = {.quant_sim = DS4_OFF};
    struct chain *c = chain_new(&options);
    int32_t other_pos[CHAIN_SEQS] = {0};
    int32_t pos = 0;

    (void)state;
    for (int32_t round = 0; pos < text.n; round++) {
        struct ds4_seq_open open[CHAIN_SEQS];
        struct chain_part part[CHAIN_SEQS];
        int32_t n_open = 0;
        int32_t at = round % 2 == 0 ? 0 : CHAIN_SEQS - 1; /* the subject's place */
        int32_t row = 0;
        int32_t n = text.n - pos < 97 ? text.n - pos : 97;

        for (int32_t e = 0; e < CHAIN_SEQS; e++) {
            int32_t slot = e == at ? 0 : at == 0 ? e : e + 1;
            int32_t n_tok = slot == 0 ? n : 1 + (round * 5 + slot * 11) % 23;
            int32_t *at_pos = slot == 0 ? &pos : &other_pos[slot];

            if (slot > 0 && *at_pos + n_tok > 300)
                *at_pos = 0;
            if (round == 0)
                open[n_open++] = chain_greedy(slot, 50 + (uint64_t)slot, 1, 1);
            part[e] = (struct chain_part){.slot = slot,
                                          .base_pos = *at_pos,
                                          .n_tok = n_tok,
                                          .token = text.ids + slot * 251 + *at_pos};
            if (slot == 0)
                part[e].token = text.ids + pos;
            else
                *at_pos += n_tok;
        }
        chain_step(c, open, n_open, part, CHAIN_SEQS);
        for (int32_t e = at; e < CHAIN_SEQS; e++)
            row += part[e].n_tok; /* rows from the subject's first to the end */
        memcpy(text.got + (size_t)pos * text.n_value,
               (const float *)c->stage[0]->buf.x +
                   (size_t)(c->stage[0]->batch.n_tok - row) * text.n_value,
               (size_t)n * c->row_bytes);
        pos += n;
    }
    check_rows("beside others", text.got, text.plain, text.n, text.n_value);
    chain_free(c);
}

/* ---- cache rounding ----------------------------------------------------------------------------- */

static void rounded_caches_keep_the_promise_too(void **state)
{
    struct chain_options options = {.quant_sim = DS4_ON};

    (void)state;
    assert_memory_not_equal(text.plain, text.quant, (size_t)text.n * text.n_value * sizeof(float));
    run_whole("rounded, chunk 64", &options, 64);
    run_small("rounded, chunk 7", &options, 7);
    options.n_stage = 3;
    run_whole("rounded, 3 stages", &options, BIG_CHUNK);
    options.n_stage = 8;
    options.isa = DS4_ISA_SCALAR;
    run_whole("rounded, 8 stages, scalar", &options, 2 * BIG_CHUNK);
}

/* ---- other modes of the CPU ----------------------------------------------------------------------- */

/* The first EARLY_TOK tokens on one stage in one step, and on three stages in chunks of 9. */
static void check_mode(const char *what, const struct chain_options *mode)
{
    struct chain_options options = *mode;
    struct chain *c = chain_new(&options);
    uint8_t *want = calloc(EARLY_TOK, c->row_bytes);
    uint8_t *got = calloc(EARLY_TOK, c->row_bytes);

    assert_non_null(want);
    assert_non_null(got);
    open_slot(c, 0, 1, text.ids, EARLY_TOK);
    chain_residual(c, EARLY_TOK, want);
    assert_memory_not_equal(want, text.plain, EARLY_TOK * c->row_bytes); /* the mode is on */
    chain_free(c);

    options.n_stage = 3;
    c = chain_new(&options);
    open_slot(c, 0, 1, text.ids, 4);
    chain_residual(c, 4, got);
    for (int32_t base = 4; base < EARLY_TOK; base += 9) {
        struct chain_part part = {.base_pos = base, .token = text.ids + base};

        part.n_tok = EARLY_TOK - base < 9 ? EARLY_TOK - base : 9;
        chain_step(c, NULL, 0, &part, 1);
        chain_residual(c, part.n_tok, got + (size_t)base * c->row_bytes);
    }
    for (size_t t = 0; t < EARLY_TOK; t++)
        if (memcmp(got + t * c->row_bytes, want + t * c->row_bytes, c->row_bytes) != 0)
            fail_msg("%s: row %zu differs", what, t);
    chain_free(c);
    free(got);
    free(want);
}

static void fast_products_and_bf16_streams_keep_the_promise_too(void **state)
{
    struct chain_options fast = {.quant_sim = DS4_OFF, .products = DS4_PRODUCTS_FAST};
    struct chain_options bf16 = {.quant_sim = DS4_OFF, .stream = DS4_STREAM_BF16};

    (void)state;
    check_mode("fast products", &fast);
    check_mode("bf16 streams", &bf16);
}

/* ---- truncation --------------------------------------------------------------------------------- */

/* Rows that must not be read after a truncation to m become NaN: compressed rows from m / ratio on. */
static void poison_pages(const struct ds4_pages *pages, const struct ds4_kv_slot *slot, int32_t row)
{
    for (; row < slot->n_block * pages->rows_per_block; row++) {
        size_t at =
            (size_t)slot->block[row / pages->rows_per_block] * (size_t)pages->rows_per_block +
            (size_t)(row % pages->rows_per_block);
        float *values = (float *)((uint8_t *)pages->data + at * pages->row_bytes);

        for (int32_t i = 0; i < pages->d; i++)
            values[i] = NAN;
    }
}

/* The same for ring rows of positions from m on; older ones they overwrote are gone either way. */
static void poison_ring(const struct ds4_ring *ring, int32_t slot, int32_t m, int32_t hi)
{
    for (int32_t p = m; p < hi; p++) {
        size_t at = (size_t)slot * (size_t)ring->cap + (size_t)(p % ring->cap);
        float *values = (float *)((uint8_t *)ring->data + at * ring->row_bytes);

        for (int32_t i = 0; i < ring->d; i++)
            values[i] = NAN;
    }
}

static void poison_after(struct chain *c, int32_t m)
{
    for (int32_t s = 0; s < c->n_stage; s++) {
        const struct ds4_kv *kv = &c->stage[s]->kv;

        for (int32_t l = 0; l < kv->shape.n_layer; l++) {
            const struct ds4_kv_layer *layer = &kv->layer[l];
            int32_t ratio = kv->shape.layer[l].ratio;

            poison_ring(&layer->window, 0, m, kv->slot[0].hi);
            if (ratio == 0)
                continue;
            poison_ring(&layer->comp_k, 0, m, kv->slot[0].hi);
            poison_ring(&layer->comp_g, 0, m, kv->slot[0].hi);
            poison_pages(&layer->rows, &kv->slot[0], m / ratio);
            if (!kv->shape.layer[l].indexer)
                continue;
            poison_ring(&layer->index_k, 0, m, kv->slot[0].hi);
            poison_ring(&layer->index_g, 0, m, kv->slot[0].hi);
            poison_pages(&layer->index_rows, &kv->slot[0], m / ratio);
        }
    }
}

/* Runs the other continuation from m on; rows [SUFFIX_TOK, n_value] to out. */
static void run_suffix(struct chain *c, int32_t m, float *out)
{
    struct chain_part part = {.base_pos = m, .n_tok = SUFFIX_TOK, .token = text.ids + SUFFIX_AT};

    chain_step(c, NULL, 0, &part, 1);
    chain_residual(c, SUFFIX_TOK, out);
}

static void a_truncated_sequence_continues_like_a_cold_one(void **state)
{
    static const int32_t cut[] = {180, 191, 192, 193, 253, 254, 255,
                                  256, 257, 262, 290, 297, 299, 300};
    struct chain_options options = {.quant_sim = DS4_OFF};
    struct chain *cold = chain_new(&options);
    struct chain *c;
    float *want = take_floats(SUFFIX_TOK * text.n_value);
    float *got = take_floats(SUFFIX_TOK * text.n_value);

    (void)state;
    options.n_stage = 3;
    c = chain_new(&options);
    for (size_t i = 0; i < sizeof(cut) / sizeof(cut[0]); i++) {
        chain_form(cold);
        open_slot(cold, 0, 1, text.ids, cut[i]);
        run_suffix(cold, cut[i], want);
        chain_form(c);
        open_slot(c, 0, 1, text.ids, KEPT_TOK);
        poison_after(c, cut[i]);
        run_suffix(c, cut[i], got);
        check_rows("truncated", got, want, SUFFIX_TOK, text.n_value);
    }
    chain_free(c);
    free(got);
    free(want);
    chain_free(cold);
}

static void stacked_truncations_leave_no_trace(void **state)
{
    struct chain_options options = {.quant_sim = DS4_ON};
    struct chain *c = chain_new(&options);
    int32_t pos = 240;

    (void)state;
    run_part(c, 0, pos);
    for (int32_t round = 0; round < 40; round++) {
        int32_t back = 1 + round * 7 % 20;
        int32_t ahead = round * 13 % 25;

        struct chain_part wrong = {
            .base_pos = pos - back, .n_tok = back, .token = text.ids + SUFFIX_AT + round};

        chain_step(c, NULL, 0, &wrong, 1); /* a branch that is abandoned */
        run_part(c, pos - back, back + ahead);
        pos += ahead;
    }
    run_text(c, pos, text.n, BIG_CHUNK);
    check_text("stacked truncations", c, true);
    chain_free(c);
}

static void a_new_turn_on_a_kept_slot_continues_like_a_cold_one(void **state)
{
    struct chain_options options = {.quant_sim = DS4_OFF};
    struct chain *c = chain_new(&options);
    float *want = take_floats(SUFFIX_TOK * text.n_value);
    float *got = take_floats(SUFFIX_TOK * text.n_value);
    struct ds4_seq_open turn = chain_greedy(0, 77, 2, 210);
    struct chain_part part = {.base_pos = 200, .n_tok = SUFFIX_TOK, .token = text.ids + SUFFIX_AT};

    (void)state;
    open_slot(c, 0, 1, text.ids, 200);
    run_suffix(c, 200, want);
    chain_form(c);
    open_slot(c, 0, 1, text.ids, 310);
    chain_step(c, &turn, 1, &part, 1);
    chain_residual(c, SUFFIX_TOK, got);
    check_rows("new turn", got, want, SUFFIX_TOK, text.n_value);
    free(got);
    free(want);
    chain_free(c);
}

/* ---- devices ------------------------------------------------------------------------------------- */

/* A device's products follow from the number of rows, so its promise is narrower than the CPU's: equal
 * steps give equal bits on every partition, in every run, recorded or not. */
static void check_equal_steps(const char *what, const struct chain_options *mode, int32_t chunk,
                              int32_t n)
{
    static const int32_t odd[] = {1, 5, 2};
    static const struct {
        int32_t n_stage;
        const int32_t *partition;
    } cut[] = {{1, NULL}, {1, NULL}, {3, odd}, {2, NULL}, {8, NULL}};
    float *want = take_floats((size_t)n * text.n_value);
    const size_t bytes = (size_t)n * text.n_value * sizeof(float);

    for (size_t i = 0; i < sizeof(cut) / sizeof(cut[0]); i++) {
        struct chain_options options = *mode;
        struct chain *c;

        options.n_stage = cut[i].n_stage;
        options.partition = cut[i].partition;
        c = chain_new(&options);
        run_text(c, 0, n, chunk);
        if (i == 0)
            memcpy(want, text.got, bytes);
        check_rows(what, text.got, want, n, text.n_value);
        chain_free(c);
    }
    free(want);
}

static void check_cuts(const char *what, const struct chain_options *mode)
{
    print_message("%s\n", what);
    check_equal_steps(what, mode, BIG_CHUNK, text.n);
    check_equal_steps(what, mode, 64, text.n);
    check_equal_steps(what, mode, 7, EARLY_TOK);
    check_equal_steps(what, mode, 1, KEPT_TOK);
}

static void equal_steps_give_equal_bits_on_every_partition(void **state)
{
    struct chain_options options = {.quant_sim = DS4_OFF};

    (void)state;
    check_cuts("exact products", &options);
    options.quant_sim = DS4_ON;
    check_cuts("exact products, rounded caches", &options);
    options.products = DS4_PRODUCTS_FAST;
    check_cuts("fast products, rounded caches", &options);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest device_tests[] = {
        cmocka_unit_test(equal_steps_give_equal_bits_on_every_partition),
    };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_equal_the_whole),
        cmocka_unit_test(single_tokens_equal_the_whole),
        cmocka_unit_test(partitions_equal_one_stage),
        cmocka_unit_test(instruction_sets_threads_and_loading_do_not_matter),
        cmocka_unit_test(neighbours_do_not_matter),
        cmocka_unit_test(rounded_caches_keep_the_promise_too),
        cmocka_unit_test(fast_products_and_bf16_streams_keep_the_promise_too),
        cmocka_unit_test(a_truncated_sequence_continues_like_a_cold_one),
        cmocka_unit_test(stacked_truncations_leave_no_trace),
        cmocka_unit_test(a_new_turn_on_a_kept_slot_continues_like_a_cold_one),
    };

    chain_take_args(argc, argv);
    return chain_on_cpu() ? cmocka_run_group_tests(tests, run_references, free_references)
                          : cmocka_run_group_tests(device_tests, run_references, free_references);
}

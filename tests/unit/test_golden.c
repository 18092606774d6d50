/* The forward pass against outputs of an independent implementation (Hugging Face transformers, float32,
 * on the weights of ds4-tiny, no cache rounding).  Tolerances: relative L2 2e-5, about five times what
 * two exact-order implementations in f32 differ by; with bf16 streams 3e-2, with fast products, which round the
 * inputs of every product, more; in both the same best token wherever its margin is above 0.5. */
#include "tests/support/chain.h"
#include "tests/support/golden.h"
#include "worker/embed_head.h"
#include "worker/stage_state.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define GOLDEN          "tests/data/model/ds4-tiny-golden.safetensors"
#define MAX_REL_L2      2e-5
#define MAX_NLL         2e-4 /* at any position */
#define MEAN_NLL        2e-5
#define SURE_MARGIN     1e-3 /* below it two f32 implementations may disagree on the best token */
#define BF16_REL_L2     3e-2
#define FAST_REL_L2     0.12 /* int8 inputs of every product: 0.066 on the CPU */
#define FAST_MARGIN     0.5
#define WHOLE_TOK       2600
#define WHOLE_CHUNK     512
#define BEGINNING_TOK   300
#define BEGINNING_CHUNK 37

static const struct chain_options plain = {.quant_sim = DS4_AUTO};

static double check_within(double allowed, const char *what, int64_t index, const float *got,
                           const float *want, size_t n)
{
    double rel = golden_rel_l2(got, want, n);

    if (!(rel <= allowed))
        fail_msg("%s %ld: relative L2 %g, allowed %g", what, (long)index, rel, allowed);
    return rel;
}

static void check_close(const char *what, int64_t index, const float *got, const float *want,
                        size_t n)
{
    (void)check_within(MAX_REL_L2, what, index, got, want, n);
}

static void hidden_states_match_at_every_layer(void **state)
{
    struct golden *g = golden_open(GOLDEN);
    struct golden_tensor ids = golden_get(g, "short_ids", "I32");
    struct golden_tensor hidden = golden_get(g, "short_hidden", "F32"); /* [8, 48, 1024] */
    size_t per_layer = hidden.n / (size_t)hidden.shape[0];
    struct chain_options options = plain;
    struct ds4_seq_open open = chain_greedy(0, 1, 1, (int32_t)ids.n);
    struct chain_part part = {.n_tok = (int32_t)ids.n, .token = ids.data};
    struct ds4_err err = {0};
    struct chain *c;

    (void)state;
    options.n_stage =
        (int32_t)hidden.shape[0]; /* one layer each: what a stage receives is golden */
    c = chain_new(&options);
    assert_int_equal(c->row_bytes, (size_t)hidden.shape[2] * sizeof(float));
    chain_step(c, &open, 1, &part, 1);
    for (int32_t l = 1; l < options.n_stage; l++)
        check_close("layer", l, c->rows[l], (const float *)hidden.data + (size_t)l * per_layer,
                    per_layer);

    chain_form(c);
    assert_int_equal(ds4_stage_begin(c->stage[0], chain_build(c, &open, 1, &part, 1), &err), 0);
    c->stage[0]->backend->begin(c->stage[0]->dev, &c->stage[0]->batch);
    ds4_embed_forward(c->stage[0]);
    c->stage[0]->backend->download(c->stage[0]->dev, c->rows[0], c->stage[0]->buf.x,
                                   per_layer * sizeof(float));
    check_close("layer", 0, c->rows[0], hidden.data, per_layer);
    chain_free(c);
    golden_close(g);
}

static void logits_match_at_every_position_of_a_short_prompt(void **state)
{
    struct golden *g = golden_open(GOLDEN);
    struct golden_tensor ids = golden_get(g, "short_ids", "I32");
    struct golden_tensor want = golden_get(g, "short_logits", "F32"); /* [48, 4096] */
    struct chain *c = chain_new(&plain);
    size_t n_vocab = (size_t)chain_n_vocab(c);
    struct ds4_seq_open open = chain_greedy(0, 1, 1, (int32_t)ids.n);
    struct chain_part part = {.n_tok = (int32_t)ids.n, .token = ids.data};
    float *logits = calloc(want.n, sizeof(*logits));

    (void)state;
    assert_non_null(logits);
    assert_int_equal(want.n, ids.n * n_vocab);
    chain_step(c, &open, 1, &part, 1);
    chain_logits(c, (int32_t)ids.n, logits);
    for (size_t t = 0; t < ids.n; t++)
        check_close("position", (int64_t)t, logits + t * n_vocab,
                    (const float *)want.data + t * n_vocab, n_vocab);
    free(logits);
    chain_free(c);
    golden_close(g);
}

static double nll_of(const float *logits, size_t n_vocab, int32_t token)
{
    double max = (double)logits[0];
    double sum = 0;

    for (size_t i = 1; i < n_vocab; i++)
        if ((double)logits[i] > max)
            max = (double)logits[i];
    for (size_t i = 0; i < n_vocab; i++)
        sum += exp((double)logits[i] - max);
    return max + log(sum) - (double)logits[token];
}

static int32_t argmax_of(const float *logits, size_t n_vocab)
{
    size_t best = 0;

    for (size_t i = 1; i < n_vocab; i++)
        if (logits[i] > logits[best])
            best = i;
    return (int32_t)best;
}

/* A pass over the first n tokens of the long text: logits of every position, kept for the tests below.
 * Made by the first test that asks. */
struct long_pass {
    struct golden *g;
    const int32_t *ids;
    int32_t n;
    size_t n_vocab;
    float *logits; /* [n, n_vocab] */
};

static struct long_pass whole_pass, beginning_pass;

static const struct long_pass *run_pass(struct long_pass *pass, const struct chain_options *options,
                                        int32_t n, int32_t chunk)
{
    struct chain *c;
    struct ds4_seq_open open;
    struct golden_tensor ids;

    if (pass->g != NULL)
        return pass;
    c = chain_new(options);
    pass->g = golden_open(GOLDEN);
    ids = golden_get(pass->g, "long_ids", "I32");
    pass->ids = ids.data;
    pass->n = n;
    assert_true((size_t)n <= ids.n);
    pass->n_vocab = (size_t)chain_n_vocab(c);
    pass->logits = calloc((size_t)n * pass->n_vocab, sizeof(*pass->logits));
    assert_non_null(pass->logits);
    open = chain_greedy(0, 1, 1, pass->n);
    for (int32_t base = 0; base < pass->n; base += chunk) {
        struct chain_part part = {.base_pos = base, .token = pass->ids + base};

        part.n_tok = pass->n - base < chunk ? pass->n - base : chunk;
        chain_step(c, &open, base == 0 ? 1 : 0, &part, 1);
        chain_logits(c, part.n_tok, pass->logits + (size_t)base * pass->n_vocab);
    }
    chain_free(c);
    return pass;
}

static const struct long_pass *whole(void)
{
    return run_pass(&whole_pass, &plain, WHOLE_TOK, WHOLE_CHUNK);
}

/* Long enough for every kind of layer to look at rows that left the window. */
static const struct long_pass *beginning(void)
{
    return run_pass(&beginning_pass, &plain, BEGINNING_TOK, BEGINNING_CHUNK);
}

static void free_pass(struct long_pass *pass)
{
    free(pass->logits);
    if (pass->g != NULL)
        golden_close(pass->g);
}

static int free_passes(void **state)
{
    (void)state;
    free_pass(&whole_pass);
    free_pass(&beginning_pass);
    return 0;
}

/* The largest distance at the end of a prefix. */
static double check_prefixes(const struct long_pass *pass, double allowed)
{
    static const int32_t length[] = {1,   3,   4,   5,   127, 128,  129,
                                     130, 256, 511, 513, 900, 1500, 2600};
    double largest = 0;

    for (size_t i = 0; i < sizeof(length) / sizeof(length[0]); i++) {
        char name[32];
        struct golden_tensor want;
        double rel;

        if (length[i] > pass->n)
            break;
        snprintf(name, sizeof(name), "long%d_last", length[i]);
        want = golden_get(pass->g, name, "F32");
        rel =
            check_within(allowed, "prefix", length[i],
                         pass->logits + (size_t)(length[i] - 1) * pass->n_vocab, want.data, want.n);
        largest = rel > largest ? rel : largest;
    }
    return largest;
}

static void check_nll(const struct long_pass *pass)
{
    struct golden_tensor want = golden_get(pass->g, "long_nll", "F32");
    size_t n = want.n < (size_t)pass->n ? want.n : (size_t)pass->n;
    double sum = 0;

    for (size_t t = 0; t < n; t++) {
        double nll = nll_of(pass->logits + t * pass->n_vocab, pass->n_vocab, pass->ids[t + 1]);
        double diff = fabs(nll - (double)((const float *)want.data)[t]);

        if (!(diff <= MAX_NLL))
            fail_msg("position %zu: nll %g, off by %g", t, nll, diff);
        sum += diff;
    }
    print_message("mean nll difference %.2e\n", sum / (double)n);
    assert_true(sum / (double)n <= MEAN_NLL);
}

/* How many positions have a margin above `sure`; the best token is right there. */
static size_t check_best(const struct long_pass *pass, double sure)
{
    struct golden_tensor best = golden_get(pass->g, "long_argmax", "I32");
    struct golden_tensor margin = golden_get(pass->g, "long_margin", "F32");
    size_t n = best.n < (size_t)pass->n ? best.n : (size_t)pass->n, n_clear = 0;

    for (size_t t = 0; t < n; t++) {
        if (!((double)((const float *)margin.data)[t] > sure))
            continue;
        n_clear++;
        if (argmax_of(pass->logits + t * pass->n_vocab, pass->n_vocab) !=
            ((const int32_t *)best.data)[t])
            fail_msg("position %zu: another best token", t);
    }
    return n_clear;
}

static void three_hundred_tokens_match_in_small_chunks(void **state)
{
    (void)state;
    check_prefixes(beginning(), MAX_REL_L2);
    check_nll(beginning());
    assert_true(check_best(beginning(), SURE_MARGIN) > BEGINNING_TOK * 9 / 10);
}

static void logits_match_at_the_end_of_every_long_prefix(void **state)
{
    (void)state;
    check_prefixes(whole(), MAX_REL_L2);
}

static void nll_matches_at_every_long_position(void **state)
{
    (void)state;
    check_nll(whole());
}

static void the_best_token_matches_wherever_the_margin_is_clear(void **state)
{
    (void)state;
    assert_true(check_best(whole(), SURE_MARGIN) > WHOLE_TOK * 9 / 10);
}

/* Chunks of few, some and many rows: products of a card have a way for each. */
static void check_mode(const struct chain_options *mode, double allowed)
{
    static const int32_t chunk[] = {BEGINNING_CHUNK, 6, 1, WHOLE_CHUNK};
    const size_t n = chain_on_cpu() ? 1 : sizeof(chunk) / sizeof(chunk[0]);

    for (size_t i = 0; i < n; i++) {
        struct long_pass pass = {0};
        const int32_t n_tok = chunk[i] == WHOLE_CHUNK ? WHOLE_TOK : BEGINNING_TOK;
        double largest;
        size_t n_sure;

        run_pass(&pass, mode, n_tok, chunk[i]);
        largest = check_prefixes(&pass, allowed);
        n_sure = check_best(&pass, FAST_MARGIN);
        print_message(
            "chunks of %d: relative L2 up to %.1e, best token right at %zu sure ones of %d\n",
            (int)chunk[i], largest, n_sure, (int)n_tok);
        assert_true(n_sure > (size_t)n_tok / 4);
        free_pass(&pass);
    }
}

static void bf16_streams_stay_close(void **state)
{
    const struct chain_options mode = {.quant_sim = DS4_AUTO, .stream = DS4_STREAM_BF16};

    (void)state;
    check_mode(&mode, BF16_REL_L2);
}

static void fast_products_stay_close(void **state)
{
    const struct chain_options mode = {
        .quant_sim = DS4_AUTO, .products = DS4_PRODUCTS_FAST, .stream = DS4_STREAM_BF16};

    (void)state;
    check_mode(&mode, FAST_REL_L2);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hidden_states_match_at_every_layer),
        cmocka_unit_test(logits_match_at_every_position_of_a_short_prompt),
        cmocka_unit_test(three_hundred_tokens_match_in_small_chunks),
        cmocka_unit_test(logits_match_at_the_end_of_every_long_prefix),
        cmocka_unit_test(nll_matches_at_every_long_position),
        cmocka_unit_test(the_best_token_matches_wherever_the_margin_is_clear),
        cmocka_unit_test(bf16_streams_stay_close),
        cmocka_unit_test(fast_products_stay_close),
    };

    chain_take_args(argc, argv);
    return cmocka_run_group_tests(tests, NULL, free_passes);
}

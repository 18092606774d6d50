/* Drafts on real stages: whatever is proposed, the text is that of a run without drafts, and the state after
 * it is that of tokens that were never in doubt (T25; upstream vllm-ascend #17149: rows of rejected drafts
 * stayed in the cache of all stages but the last). */
#include "tests/support/chain.h"

#include "worker/stage_state.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define K        DS4_MAX_DRAFT
#define N_PROMPT 70
#define N_NEW    60 /* crosses position 128, where blocks of both kinds close */
#define MAX_TEXT 256

/* A text: prompt and what the model says to it without drafts. */
struct text {
    int32_t token[MAX_TEXT];
    int32_t n;
};

/* Proposes the text's own tokens up to a depth, then a wrong one and the text's again. */
struct oracle {
    const struct text *text;
    int32_t depth;   /* of the newest proposal */
    int32_t wrong;   /* < 0: the token after the right one, else this id */
    int32_t n_vocab; /* */
    int32_t n_asked;
};

static void no_start(void *owner, int32_t slot, int32_t from)
{
    (void)owner;
    (void)slot;
    (void)from;
}

static void no_note(void *owner, int32_t slot, const int32_t *history, int32_t n)
{
    (void)owner;
    (void)slot;
    (void)history;
    (void)n;
}

static int32_t propose(void *owner, int32_t slot, const int32_t *history, int32_t n, int32_t max,
                       int32_t *draft)
{
    struct oracle *o = owner;

    (void)slot;
    assert_memory_equal(history, o->text->token, (size_t)n * sizeof(*history));
    o->depth = o->n_asked++ % (K + 1);
    for (int32_t i = 0; i < max; i++)
        draft[i] = n + i < o->text->n ? o->text->token[n + i] : 1;
    if (o->depth < max && n + o->depth < o->text->n)
        draft[o->depth] = o->wrong >= 0 ? o->wrong : (draft[o->depth] + 1) % o->n_vocab;
    return max;
}

static struct ds4_drafter drafter_of(struct oracle *o)
{
    return (struct ds4_drafter){o, no_start, no_note, no_note, propose};
}

static struct ds4_seq_open open_for(const struct chain *c, int32_t max_draft, bool seeded)
{
    struct ds4_seq_open open = chain_greedy(0, 5, c->generation, N_PROMPT);

    open.max_pos = N_PROMPT + N_NEW;
    open.max_draft = max_draft;
    if (!seeded)
        return open;
    open.sampling.temperature = 0.9f;
    open.sampling.top_p = 0.95f;
    open.sampling.seed = 77;
    open.sampling.presence_penalty = 0.4f;
    open.sampling.frequency_penalty = 0.3f;
    open.sampling.repetition_penalty = 1.1f;
    open.sampling.min_new_tok = 8;
    open.sampling.n_logprobs = 2;
    open.n_stop = 0;
    return open;
}

static void begin(struct chain *c, const struct ds4_seq_open *open, const struct text *prompt)
{
    struct chain_part part = {.n_tok = N_PROMPT, .token = prompt->token, .sample = true};

    chain_step(c, open, 1, &part, 1);
}

static void append(struct text *text, const struct ds4_token_entry *out)
{
    for (int32_t t = 0; t < out->n_token; t++) {
        assert_true(text->n < MAX_TEXT);
        text->token[text->n++] = out->token[t];
    }
}

/* The text without drafts, and the log-probabilities of its new tokens where they are asked for. */
static struct text plain_text(struct chain *c, bool seeded, struct ds4_logprob logprob[N_NEW][3])
{
    struct ds4_seq_open open = open_for(c, 0, seeded);
    struct text text = {.n = N_PROMPT};
    int32_t k = 0;

    for (int32_t t = 0; t < N_PROMPT; t++)
        text.token[t] = t == 0 ? 0 : (t * 37 + t / 9) % 900 + 10;
    begin(c, &open, &text);
    for (;;) {
        struct chain_part part = {
            .base_pos = text.n, .n_tok = 1, .from_step = c->step_no - 1, .sample = true};

        if (logprob != NULL)
            memcpy(logprob[k++], c->out.entry[0].logprob, sizeof(logprob[0]));
        append(&text, &c->out.entry[0]);
        if ((c->out.entry[0].flags & DS4_TOKEN_ENDED) != 0)
            return text;
        part.base_pos = text.n - 1;
        chain_step(c, NULL, 0, &part, 1);
    }
}

/* Generates with drafts up to the end; every entry must have kept what the oracle had right. */
static void run_with_drafts(struct chain *c, struct oracle *o, bool seeded,
                            struct ds4_logprob logprob[N_NEW][3])
{
    struct ds4_seq_open open = open_for(c, K, seeded);
    struct text said = {.n = N_PROMPT};
    bool seen[K + 1] = {false};
    int32_t at_least = N_PROMPT;

    memcpy(said.token, o->text->token, sizeof(said.token));
    begin(c, &open, o->text);
    append(&said, &c->out.entry[0]);
    while ((c->out.entry[0].flags & DS4_TOKEN_ENDED) == 0) {
        struct chain_part part = {.base_pos = at_least++, /* what the router would know */
                                  .n_tok = 1,
                                  .from_step = c->step_no - 1,
                                  .n_draft = K,
                                  .sample = true};
        int32_t room = open.max_pos - 1 - said.n;
        int32_t n_draft = room < K ? room : K;
        int32_t n_right = o->depth < n_draft ? o->depth : n_draft;
        const struct ds4_token_entry *out = &c->out.entry[0];
        int32_t before = said.n;

        chain_step(c, NULL, 0, &part, 1);
        append(&said, out);
        assert_int_equal(out->n_token, n_right + 1);
        assert_int_equal(out->n_undone, n_draft - n_right);
        assert_int_equal(out->pos, said.n - 1);
        seen[n_right] = true;
        for (int32_t t = 0; logprob != NULL && t < out->n_token; t++)
            assert_memory_equal(out->logprob + t * out->n_logprob, logprob[before + t - N_PROMPT],
                                sizeof(logprob[0]));
    }
    assert_int_equal(said.n, o->text->n);
    assert_memory_equal(said.token, o->text->token, (size_t)said.n * sizeof(*said.token));
    for (int32_t d = 0; d <= K; d++)
        assert_true(seen[d]);
}

static struct text greedy, seeded;
static struct ds4_logprob seeded_logprob[N_NEW][3];

static int say_without_drafts(void **state)
{
    struct chain_options options = {0};
    struct chain *c = chain_new(&options);

    (void)state;
    greedy = plain_text(c, false, NULL);
    assert_int_equal(greedy.n, N_PROMPT + N_NEW);
    chain_form(c);
    seeded = plain_text(c, true, seeded_logprob);
    chain_free(c);
    return 0;
}

static void wrong_drafts_at_every_depth_change_nothing_on_any_split(void **state)
{
    static const int32_t n_stage[] = {1, 2, 4, 8};

    (void)state;
    for (size_t i = 0; i < sizeof(n_stage) / sizeof(n_stage[0]); i++) {
        struct chain_options options = {.n_stage = n_stage[i], .max_draft = K};
        struct chain *c = chain_new(&options);
        struct oracle o = {.wrong = -1, .n_vocab = chain_n_vocab(c)};

        c->stage[c->n_stage - 1]->draft.by = drafter_of(&o);
        o.text = &greedy;
        run_with_drafts(c, &o, false, NULL);
        if (n_stage[i] == 4) {
            chain_form(c);
            o.text = &seeded;
            run_with_drafts(c, &o, true, seeded_logprob);
        }
        chain_free(c);
    }
}

/* ---- the state after drafts ---------------------------------------------------------------------- */

/* One more entry with `part`'s drafts; true if the sequence goes on. */
static bool verify(struct chain *c, int32_t base, int32_t n_draft)
{
    struct chain_part part = {.base_pos = base,
                              .n_tok = 1,
                              .from_step = c->step_no - 1,
                              .n_draft = n_draft,
                              .sample = true};

    chain_step(c, NULL, 0, &part, 1);
    return (c->out.entry[0].flags & DS4_TOKEN_ENDED) == 0;
}

/* Cut at every distance into what drafts brought and took: the next rows are those of a cold run. */
static void a_cut_behind_drafts_is_exact(void **state)
{
    struct chain_options options = {.n_stage = 2, .max_draft = K};
    struct chain *c = chain_new(&options), *cold = chain_new(&options);
    struct oracle o = {.wrong = -1, .n_vocab = chain_n_vocab(c)};
    size_t n_vocab = (size_t)chain_n_vocab(c);
    float *a = calloc(2 * n_vocab, sizeof(*a)), *b = a + n_vocab;
    struct text text = greedy;
    struct ds4_seq_open open;
    int32_t end, more[3] = {17, 400, 23};

    (void)state;
    assert_non_null(a);
    o.text = &text;
    c->stage[1]->draft.by = drafter_of(&o);
    open = open_for(c, K, false);
    begin(c, &open, &text);
    while (c->out.entry[0].pos < 125)
        assert_true(verify(c, N_PROMPT, K));
    end = c->out.entry[0].pos;
    for (int32_t m = end; m > end - 20; m -= 7) {
        struct chain_part again = {.base_pos = m, .n_tok = 3, .token = more};
        struct ds4_seq_open first = open_for(cold, 0, false);

        chain_step(c, NULL, 0, &again, 1);
        chain_logits(c, 1, a);
        chain_form(cold);
        first.n_prompt = m + 3;
        {
            struct chain_part whole = {.n_tok = m, .token = text.token};
            struct chain_part rest = {.base_pos = m, .n_tok = 3, .token = more};

            chain_step(cold, &first, 1, &whole, 1);
            chain_step(cold, NULL, 0, &rest, 1);
        }
        chain_logits(cold, 1, b);
        assert_true(chain_same_rows(a, b, n_vocab));
    }
    free(a);
    chain_free(cold);
    chain_free(c);
}

/* A point that is saved beside drafts holds nothing of them: who starts from it says what a cold run says. */
static void a_point_saved_beside_wrong_drafts_holds_none_of_them(void **state)
{
    struct chain_options options = {.n_stage = 2, .max_draft = K};
    struct chain *c = chain_new(&options);
    struct oracle o = {.wrong = -1, .n_vocab = chain_n_vocab(c)};
    struct ds4_seq_open open, other;
    struct text text = greedy;
    int32_t pos;

    (void)state;
    o.text = &text;
    c->stage[1]->draft.by = drafter_of(&o);
    open = open_for(c, K, false);
    begin(c, &open, &text);
    while (c->out.entry[0].pos < 120)
        assert_true(verify(c, N_PROMPT, K));
    pos = c->out.entry[0].pos;
    chain_save(c, 0, pos, 9); /* with the next entry, whose drafts are wrong somewhere */
    assert_true(verify(c, pos, K));
    other = open_for(c, 0, false);
    other.slot = 1;
    other.seq = 6;
    /* the same blocks: rows below pos are the sequence's own */
    memcpy(c->table[1], c->table[0], sizeof(c->table[1]));
    {
        struct ds4_kv_op *op = &c->op[c->n_op++];

        *op = (struct ds4_kv_op){.kind = DS4_KV_PARK, .seq = open.seq, .epoch = open.epoch};
        chain_install(c, 1, pos, 9);
    }
    for (struct chain_part part =
             {.slot = 1, .base_pos = pos, .n_tok = 1, .token = text.token + pos, .sample = true};
         part.base_pos + 1 < text.n; part.base_pos++, part.token++) {
        chain_step(c, &other, part.base_pos == pos ? 1 : 0, &part, 1);
        assert_int_equal(c->out.entry[0].token[0], text.token[part.base_pos + 1]);
    }
    chain_free(c);
}

/* ---- ends ---------------------------------------------------------------------------------------- */

static void a_stop_id_among_right_drafts_ends_the_sequence_there(void **state)
{
    struct chain_options options = {.n_stage = 2, .max_draft = K};
    struct chain *c = chain_new(&options);
    struct oracle o = {.wrong = -1, .n_vocab = chain_n_vocab(c)};
    struct ds4_seq_open open;
    struct text text = greedy;

    (void)state;
    o.text = &text;
    o.n_asked = K; /* the first proposal is right to its end */
    c->stage[1]->draft.by = drafter_of(&o);
    open = open_for(c, K, false);
    open.n_stop = 1;
    open.stop_id[0] = text.token[N_PROMPT + 3];
    for (int32_t t = 0; t < 3; t++)
        assert_int_not_equal(text.token[N_PROMPT + t], open.stop_id[0]);
    begin(c, &open, &text);
    assert_false(verify(c, N_PROMPT, K));
    assert_int_equal(c->out.entry[0].n_token, 3);
    assert_int_equal(c->out.entry[0].n_undone, K - 2);
    assert_int_equal(c->out.entry[0].pos, N_PROMPT + 3);
    /* posted ahead of that: a no-op on both stages */
    assert_true(verify(c, N_PROMPT + 1, K));
    assert_int_equal(c->out.entry[0].flags, DS4_TOKEN_SKIPPED);
    assert_int_equal(c->out.entry[0].pos, N_PROMPT + 3);
    chain_free(c);
}

/* A device whose logits have NaN in one row of each step. */
static const struct ds4_backend *real;
static int32_t nan_row;
static size_t row_values;

static void download_nan(struct ds4_device *dev, void *to, const void *from, size_t bytes)
{
    size_t values = bytes / sizeof(float);

    real->download(dev, to, from, bytes);
    if (values % row_values == 0 && values / row_values == K + 1)
        ((float *)to)[(size_t)nan_row * row_values + 7] = NAN;
}

static void a_row_that_is_no_number_ends_what_reaches_it_and_nothing_else(void **state)
{
    struct chain_options options = {.max_draft = K};
    struct chain *c = chain_new(&options);
    struct oracle o = {.wrong = -1, .n_vocab = chain_n_vocab(c)};
    struct ds4_backend broken = *c->stage[0]->backend;
    struct text text = greedy;
    struct ds4_seq_open open;
    const int32_t depth = 4; /* of the wrong draft: rows 0 to 4 count */

    (void)state;
    real = c->stage[0]->backend;
    broken.download = download_nan;
    row_values = (size_t)chain_n_vocab(c);
    for (nan_row = 0; nan_row <= K; nan_row += 2) {
        const struct ds4_token_entry *out;

        chain_form(c);
        o.text = &text;
        o.n_asked = depth;
        c->stage[0]->draft.by = drafter_of(&o);
        c->stage[0]->backend = real;
        open = open_for(c, K, false);
        begin(c, &open, &text);
        c->stage[0]->backend = &broken;
        out = &c->out.entry[0];
        if (verify(c, N_PROMPT, K)) {
            assert_true(nan_row > depth);
            assert_int_equal(out->n_token, depth + 1);
            assert_int_equal(out->n_undone, K - depth);
            assert_int_equal(out->n_nan_draft, 1);
            continue;
        }
        assert_true(nan_row <= depth);
        assert_int_equal(out->n_token, nan_row); /* of the rows before */
        assert_int_equal(out->flags & DS4_TOKEN_NONFINITE, DS4_TOKEN_NONFINITE);
        assert_int_equal(out->flags & DS4_TOKEN_SAMPLED, nan_row > 0 ? DS4_TOKEN_SAMPLED : 0);
        assert_int_equal(out->pos, N_PROMPT + nan_row + 1);
        assert_int_equal(out->n_undone, K - nan_row);
        assert_memory_equal(out->token, text.token + N_PROMPT + 1,
                            (size_t)nan_row * sizeof(*out->token));
    }
    c->stage[0]->backend = real;
    chain_free(c);
}

static void an_id_outside_the_vocabulary_is_dropped_with_all_behind_it(void **state)
{
    struct chain_options options = {.max_draft = K};
    struct chain *c = chain_new(&options);
    struct oracle o = {.wrong = chain_n_vocab(c), .n_vocab = chain_n_vocab(c)};
    struct text text = greedy;
    struct ds4_seq_open open;

    (void)state;
    chain_form(c);
    o.text = &text;
    o.n_asked = 2;
    c->stage[0]->draft.by = drafter_of(&o);
    open = open_for(c, K, false);
    begin(c, &open, &text);
    assert_int_equal(c->out.entry[0].n_bad_draft, 1);
    assert_true(verify(c, N_PROMPT, K));
    assert_int_equal(c->out.entry[0].n_token, 3);
    assert_int_equal(c->out.entry[0].n_undone, 0); /* rows that were never made */
    chain_free(c);
}

static void a_stage_without_a_drafter_refuses_drafts(void **state)
{
    struct chain_options options = {0};
    struct chain *c = chain_new(&options);
    struct text text = greedy;
    struct ds4_seq_open open;
    struct chain_part part = {
        .base_pos = N_PROMPT, .n_tok = 1, .from_step = 0, .n_draft = 2, .sample = true};

    (void)state;
    chain_form(c);
    open = open_for(c, 0, false);
    begin(c, &open, &text);
    chain_refuse(c, chain_build(c, NULL, 0, &part, 1), DS4_E_PROTOCOL);
    chain_free(c);
}

/* ---- T22: widths beside each other ---------------------------------------------------------------- */

/* Sequences with drafts and without, first decodes and prompts in one step: each says what it says alone. */
static void steps_of_mixed_widths_say_what_lone_steps_say(void **state)
{
    enum { N = 4 };
    struct chain_options options = {.n_stage = 2, .max_draft = K};
    struct chain *c = chain_new(&options);
    struct oracle o = {.wrong = -1, .n_vocab = chain_n_vocab(c)};
    struct text text = greedy, said[N];
    int64_t from[N];
    int32_t n_step = 0;

    (void)state;
    o.text = &text;
    c->stage[1]->draft.by = drafter_of(&o);
    for (int32_t s = 0; s < N; s++) {
        said[s].n = N_PROMPT;
        memcpy(said[s].token, text.token, sizeof(said[s].token));
        from[s] = -1;
    }
    for (bool more = true; more; n_step++) {
        struct chain_part part[N];
        struct ds4_seq_open open[N];
        int32_t who[N], n_part = 0, n_open = 0;

        more = false;
        for (int32_t s = 0; s < N; s++) {
            struct chain_part *p = &part[n_part];

            if (said[s].n == text.n)
                continue;
            more = true;
            if (n_step < 3 * s)
                continue; /* comes later */
            *p = (struct chain_part){.slot = s, .sample = true};
            if (from[s] < 0) {
                open[n_open] = open_for(c, s == 0 ? 0 : K, false);
                open[n_open].slot = s;
                open[n_open++].seq = 50 + (uint64_t)s;
                p->n_tok = N_PROMPT;
                p->token = text.token;
            } else {
                p->base_pos = said[s].n - 1;
                p->n_tok = 1;
                p->from_step = from[s];
                p->n_draft = s == 0 ? 0 : 1 + (n_step + s) % K;
            }
            who[n_part++] = s;
        }
        if (n_part == 0)
            continue;
        chain_step(c, open, n_open, part, n_part);
        for (int32_t e = 0; e < n_part; e++) {
            append(&said[who[e]], &c->out.entry[e]);
            from[who[e]] = c->step_no - 1;
        }
    }
    for (int32_t s = 0; s < N; s++)
        assert_memory_equal(said[s].token, text.token, (size_t)text.n * sizeof(*text.token));
    chain_free(c);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_drafts_at_every_depth_change_nothing_on_any_split),
        cmocka_unit_test(a_cut_behind_drafts_is_exact),
        cmocka_unit_test(a_point_saved_beside_wrong_drafts_holds_none_of_them),
        cmocka_unit_test(a_stop_id_among_right_drafts_ends_the_sequence_there),
        cmocka_unit_test(a_row_that_is_no_number_ends_what_reaches_it_and_nothing_else),
        cmocka_unit_test(an_id_outside_the_vocabulary_is_dropped_with_all_behind_it),
        cmocka_unit_test(a_stage_without_a_drafter_refuses_drafts),
        cmocka_unit_test(steps_of_mixed_widths_say_what_lone_steps_say),
    };

    chain_take_args(argc, argv);
    return cmocka_run_group_tests(tests, say_without_drafts, NULL);
}

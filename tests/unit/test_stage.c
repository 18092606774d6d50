/* Tests of worker/stage: what begin refuses, tokens that come from records, ends, greedy texts. */
#include "tests/support/chain.h"
#include "tests/support/golden.h"

#include "common/json.h"
#include "worker/plan.h"
#include "worker/stage_state.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define GREEDY  "tests/data/model/ds4-tiny-greedy.json"
#define MAX_IDS 512

static const int32_t some_ids[] = {0, 4080, 1078, 4081, 4083, 17, 18, 19, 20, 21, 22, 23};
#define N_SOME 12

/* ---- greedy texts ------------------------------------------------------------------------------- */

struct sample_text {
    int32_t prompt[MAX_IDS];
    int32_t n_prompt;
    int32_t output[MAX_IDS];
    int32_t n_output;
};

static int32_t read_ids(const struct ds4_json *list, int32_t *ids)
{
    size_t n = ds4_json_len(list);

    assert_true(n > 0 && n <= MAX_IDS);
    for (size_t i = 0; i < n; i++)
        ids[i] = (int32_t)ds4_json_int(ds4_json_at(list, i));
    return (int32_t)n;
}

static int32_t read_texts(struct sample_text *texts, int32_t max)
{
    struct ds4_str bytes;
    struct ds4_json *doc;
    size_t n;
    char *raw = golden_read_file(GREEDY, &n);

    bytes.ptr = raw;
    bytes.len = n;
    doc = ds4_json_parse(bytes, NULL);
    assert_non_null(doc);
    assert_in_range(ds4_json_len(doc), 1, max);
    n = ds4_json_len(doc);
    for (size_t i = 0; i < n; i++) {
        const struct ds4_json *text = ds4_json_at(doc, i);

        texts[i].n_prompt = read_ids(ds4_json_find(text, "prompt_ids"), texts[i].prompt);
        texts[i].n_output = read_ids(ds4_json_find(text, "output_ids"), texts[i].output);
    }
    ds4_json_free(doc);
    free(raw);
    return (int32_t)n;
}

/* All texts at once: prompts in chunks one after the other, then every sequence decodes FROM_RING, one
 * step beyond the newest known token, as the router posts them.  The sequence that stops gets one more
 * entry, which must be a no-op. */
static void generate(struct chain *c, const struct sample_text *texts, int32_t n_text)
{
    int32_t n_done[CHAIN_SEQS] = {0};
    int32_t pos[CHAIN_SEQS];
    int64_t from[CHAIN_SEQS];
    bool ended[CHAIN_SEQS] = {false};
    int32_t n_live = n_text;

    assert_true(n_text <= CHAIN_SEQS);
    for (int32_t s = 0; s < n_text; s++) {
        struct ds4_seq_open open =
            chain_greedy(s, 10 + (uint64_t)s, c->generation, texts[s].n_prompt);
        struct chain_part none = {.slot = s, .n_tok = 1, .token = texts[s].prompt};

        open.n_stop = 1;
        open.stop_id[0] = 1;
        open.max_pos = texts[s].n_prompt + 80; /* as the golden texts were cut */
        chain_step(c, &open, 1, &none, 1);
        assert_int_equal(chain_feed(c, s, texts[s].prompt, 1, texts[s].n_prompt - 1, 128, true),
                         texts[s].output[0]);
        ended[s] = (c->out.entry[0].flags & DS4_TOKEN_ENDED) != 0;
        n_done[s] = 1;
        pos[s] = texts[s].n_prompt;
        from[s] = c->step_no - 1;
    }
    while (n_live > 0) {
        struct chain_part part[CHAIN_SEQS];
        int32_t n_part = 0;

        for (int32_t s = 0; s < n_text; s++)
            if (from[s] >= 0)
                part[n_part++] = (struct chain_part){.slot = s,
                                                     .base_pos = pos[s],
                                                     .n_tok = 1,
                                                     .from_step = from[s],
                                                     .sample = true};
        chain_step(c, NULL, 0, part, n_part);
        for (int32_t e = 0; e < n_part; e++) {
            const struct ds4_token_entry *out = &c->out.entry[e];
            int32_t s = part[e].slot;

            if (ended[s]) {
                assert_int_equal(out->flags, DS4_TOKEN_SKIPPED);
                assert_int_equal(out->n_token, 0);
                assert_int_equal(out->pos, pos[s]);
                assert_int_equal(n_done[s], texts[s].n_output);
                from[s] = -1;
                n_live--;
                continue;
            }
            assert_int_equal(out->n_token, 1);
            assert_true(n_done[s] < texts[s].n_output);
            assert_int_equal(out->token[0], texts[s].output[n_done[s]]);
            n_done[s]++;
            pos[s]++;
            assert_int_equal(out->pos, pos[s]);
            from[s] = c->step_no - 1;
            ended[s] = (out->flags & DS4_TOKEN_ENDED) != 0;
        }
    }
}

static void greedy_texts_match_on_any_number_of_stages(void **state)
{
    static const int32_t n_stage[] = {1, 2, 4, 8};
    struct sample_text *texts = calloc(16, sizeof(*texts));
    int32_t n_text;

    (void)state;
    assert_non_null(texts);
    n_text = read_texts(texts, 16);
    assert_int_equal(n_text, 10);
    for (size_t i = 0; i < sizeof(n_stage) / sizeof(n_stage[0]); i++) {
        struct chain_options options = {.n_stage = n_stage[i], .quant_sim = DS4_AUTO};
        struct chain *c = chain_new(&options);

        generate(c, texts, n_text / 2);
        chain_form(c);
        generate(c, texts + n_text / 2, n_text - n_text / 2);
        chain_free(c);
    }
    free(texts);
}

/* ---- what begin refuses ------------------------------------------------------------------------- */

static int new_chain(void **state)
{
    struct chain_options options = {.n_stage = 2};

    *state = chain_new(&options);
    return 0;
}

static int free_chain(void **state)
{
    chain_free(*state);
    return 0;
}

static struct ds4_step *good_step(struct chain *c)
{
    struct ds4_seq_open open = chain_greedy(0, 5, 1, N_SOME);
    struct chain_part part = {.n_tok = N_SOME, .token = some_ids, .sample = true};

    return chain_build(c, &open, 1, &part, 1);
}

/* Begin must refuse, by name, and the generation must be over. */
static void refuses(struct chain *c, const struct ds4_step *step, const char *reason)
{
    struct ds4_stage *last = c->stage[c->n_stage - 1];
    struct ds4_err err = {0};

    assert_int_equal(ds4_stage_begin(last, step, &err), -1);
    assert_int_equal(err.code, DS4_E_PROTOCOL);
    if (strstr(err.msg, reason) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", err.msg, reason);
    assert_int_equal(ds4_stage_begin(last, good_step(c), &err), -1);
    chain_form(c);
}

static void a_step_out_of_order_is_refused(void **state)
{
    struct chain *c = *state;
    struct ds4_step *step = good_step(c);

    step->step_no = 1;
    refuses(c, step, "expected step 0");
    step = good_step(c);
    step->generation++;
    refuses(c, step, "of generation");
    chain_run(c, good_step(c));
    step = good_step(c);
    step->step_no = 0; /* a duplicate */
    refuses(c, step, "expected step 1");
}

static void entries_that_do_not_add_up_are_refused(void **state)
{
    struct chain *c = *state;
    struct ds4_step *step = good_step(c);

    step->n_tok++;
    refuses(c, step, "the entries have");
    step = good_step(c);
    step->entry[0].first_tok = 1;
    refuses(c, step, "expected row 0");
    step = good_step(c);
    step->entry[0].n_tok = N_SOME + 1;
    refuses(c, step, "rows from row");
    step = good_step(c);
    step->entry[0].n_tok = 0;
    refuses(c, step, "rows from row");
    step = good_step(c);
    step->n_entry = CHAIN_SEQS + 1;
    refuses(c, step, "formed for");
    step = good_step(c);
    step->n_tok = -1;
    refuses(c, step, "formed for");
}

static void a_token_outside_the_vocabulary_is_refused(void **state)
{
    struct chain *c = *state;
    int32_t bad[N_SOME];

    for (int32_t i = 0; i < 2; i++) {
        struct ds4_step *step = good_step(c);

        memcpy(bad, some_ids, sizeof(bad));
        bad[N_SOME - 1] = i == 0 ? chain_n_vocab(c) : -1;
        step->token = bad;
        refuses(c, step, "token id");
    }
}

static void a_lease_that_does_not_cover_the_rows_is_refused(void **state)
{
    struct chain *c = *state;
    struct ds4_step *step = good_step(c);

    step->entry[0].cap_tok = N_SOME - 1;
    refuses(c, step, "the lease ends at");
    step = good_step(c);
    step->entry[0].epoch = 9;
    refuses(c, step, "belongs to");
    step = good_step(c);
    step->entry[0].base_pos = 1;
    refuses(c, step, "the sequence is at 0");
    step = good_step(c);
    step->n_open = 0;
    refuses(c, step, "not in use");
}

static void one_slot_cannot_be_in_a_step_twice(void **state)
{
    struct chain *c = *state;
    struct ds4_seq_open open = chain_greedy(0, 5, 1, N_SOME);
    struct chain_part part[2] = {{.n_tok = 3, .token = some_ids},
                                 {.base_pos = 3, .n_tok = 3, .token = some_ids + 3}};

    refuses(c, chain_build(c, &open, 1, part, 2), "already in entry 0");
}

static void a_close_of_a_free_slot_is_refused(void **state)
{
    static const int32_t slot[] = {3};
    struct chain *c = *state;
    struct ds4_step *step = good_step(c);

    step->n_close = 1;
    step->close_slot = slot;
    refuses(c, step, "not in use");
}

static void closes_come_before_opens(void **state)
{
    static const int32_t slot[] = {0};
    struct chain *c = *state;
    struct ds4_step *step;

    chain_run(c, good_step(c));
    step = good_step(c); /* the same slot, sequence and epoch: only legal after the close */
    step->n_close = 1;
    step->close_slot = slot;
    chain_run(c, step);
    assert_int_equal(c->out.entry[0].pos, N_SOME);
}

static void a_truncation_below_the_hot_window_is_refused(void **state)
{
    struct chain *c = *state;
    int32_t ids[200] = {0};
    struct ds4_seq_open open = chain_greedy(0, 5, 1, 200);
    struct chain_part part = {.n_tok = 200, .token = ids};

    chain_step(c, &open, 1, &part, 1);
    part.base_pos = 200 - DS4_HOT_WINDOW_TOK - 1;
    part.n_tok = 1;
    refuses(c, chain_build(c, NULL, 0, &part, 1), "cannot truncate");
}

/* ---- records ------------------------------------------------------------------------------------ */

static void a_token_of_a_step_without_one_is_refused(void **state)
{
    struct chain *c = *state;
    struct ds4_seq_open open = chain_greedy(0, 5, 1, N_SOME);
    struct chain_part first = {.n_tok = N_SOME, .token = some_ids};
    struct chain_part next = {.base_pos = N_SOME, .n_tok = 1, .from_step = 0, .sample = true};

    chain_step(c, &open, 1, &first, 1); /* does not sample */
    refuses(c, chain_build(c, NULL, 0, &next, 1), "sampled nothing");
    chain_run(c, good_step(c));
    next.from_step = 5;
    refuses(c, chain_build(c, NULL, 0, &next, 1), "newest record");
}

static void records_are_needed_once_and_noted_in_order(void **state)
{
    struct chain *c = *state;
    struct ds4_stage *first = c->stage[0];
    struct chain_part next = {.base_pos = N_SOME, .n_tok = 1, .from_step = 0, .sample = true};
    struct ds4_token_record record;
    struct ds4_err err = {0};
    struct ds4_step *step;

    chain_run(c, good_step(c));
    step = chain_build(c, NULL, 0, &next, 1);
    assert_int_equal(ds4_stage_needs_record(c->stage[1], step),
                     -1); /* the last stage has its own */
    assert_int_equal(ds4_stage_needs_record(first, step), 0);
    record = c->record[0];
    record.step_no = 1;
    assert_int_equal(ds4_stage_note_record(first, &record, &err), -1);
    assert_int_equal(err.code, DS4_E_PROTOCOL);
    record = c->record[0];
    record.generation++;
    assert_int_equal(ds4_stage_note_record(first, &record, &err), -1);
    record = c->record[0];
    record.entry[0].token[0] = chain_n_vocab(c);
    assert_int_equal(ds4_stage_note_record(first, &record, &err), -1);
    assert_int_equal(ds4_stage_note_record(first, &c->record[0], &err), 0);
    assert_int_equal(ds4_stage_needs_record(first, step), -1);
}

/* The last position ends the sequence; what the router had posted ahead runs as a no-op and leaves no
 * trace: the sequence then continues from the same position. */
static void an_entry_posted_past_the_end_is_a_no_op(void **state)
{
    struct chain *c = *state;
    struct ds4_seq_open open = chain_greedy(0, 5, 1, N_SOME);
    struct chain_part part = {.n_tok = N_SOME, .token = some_ids, .sample = true};
    struct chain_part ahead = {.base_pos = N_SOME, .n_tok = 1, .sample = true};
    struct chain_part more = {.base_pos = N_SOME, .n_tok = 3, .token = some_ids, .sample = true};
    struct ds4_token_entry want;

    open.max_pos = N_SOME + 1;
    chain_step(c, &open, 1, &part, 1);
    assert_int_equal(c->out.entry[0].flags, DS4_TOKEN_SAMPLED | DS4_TOKEN_ENDED);
    chain_step(c, NULL, 0, &ahead, 1);
    assert_int_equal(c->out.entry[0].flags, DS4_TOKEN_SKIPPED);
    assert_int_equal(c->out.entry[0].pos, N_SOME);
    ahead.from_step = 1; /* posted from the no-op: still one */
    chain_step(c, NULL, 0, &ahead, 1);
    assert_int_equal(c->out.entry[0].flags, DS4_TOKEN_SKIPPED);
    chain_step(c, NULL, 0, &more, 1);
    want = c->out.entry[0];

    chain_form(c);
    chain_step(c, &open, 1, &part, 1);
    chain_step(c, NULL, 0, &more, 1);
    assert_int_equal(c->out.entry[0].token[0], want.token[0]);
    assert_int_equal(c->out.entry[0].pos, want.pos);
}

/* ---- numbers of the model ----------------------------------------------------------------------- */

static void a_row_that_is_not_finite_ends_its_sequence_only(void **state)
{
    struct chain *c = *state;
    struct ds4_seq_open open[2] = {chain_greedy(0, 5, 1, N_SOME), chain_greedy(1, 6, 1, N_SOME)};
    struct chain_part part[2] = {{.slot = 0, .n_tok = N_SOME, .token = some_ids, .sample = true},
                                 {.slot = 1, .n_tok = N_SOME, .token = some_ids, .sample = true}};
    struct chain_part next[2] = {{.slot = 0, .base_pos = N_SOME, .n_tok = 1, .sample = true},
                                 {.slot = 1, .base_pos = N_SOME, .n_tok = 1, .sample = true}};
    const struct ds4_ring *ring = &c->stage[0]->kv.layer[0].window;
    struct ds4_health health = {0};
    float nan = NAN;
    int32_t good;

    chain_step(c, open, 2, part, 2);
    good = c->out.entry[1].token[0];
    assert_int_equal(c->out.entry[0].token[0], good); /* the same prompt */
    c->stage[0]->backend->upload(c->stage[0]->dev, (uint8_t *)ring->data + 3 * ring->row_bytes,
                                 &nan, sizeof(nan)); /* slot 0, position 3 */
    chain_step(c, NULL, 0, next, 2);
    assert_int_equal(c->out.entry[0].flags, DS4_TOKEN_NONFINITE | DS4_TOKEN_ENDED);
    assert_int_equal(c->out.entry[0].n_token, 0);
    assert_int_equal(c->out.entry[1].flags, DS4_TOKEN_SAMPLED);
    ds4_stage_health(c->stage[1], &health);
    assert_int_equal(health.nonfinite_rows, 1);
    next[0].from_step = next[1].from_step = 1;
    next[0].base_pos = next[1].base_pos = N_SOME + 1;
    chain_step(c, NULL, 0, next, 2);
    assert_int_equal(c->out.entry[0].flags, DS4_TOKEN_SKIPPED);
    assert_int_equal(c->out.entry[1].flags, DS4_TOKEN_SAMPLED);
}

/* ---- start and generations ---------------------------------------------------------------------- */

static void forming_beyond_the_offer_is_refused(void **state)
{
    struct chain *c = *state;
    struct ds4_hello hello = {0};
    struct ds4_form good = {.generation = 99, .n_stage = 2, .max_seqs = 2, .max_step_tok = 64};
    struct ds4_err err = {0};
    struct ds4_form bad;

    ds4_stage_hello(c->stage[0], &hello);
    assert_int_equal(hello.first_layer, 0);
    assert_int_equal(hello.last_layer, 4);
    assert_int_equal(hello.n_layer, 8);
    assert_string_equal(hello.backend, c->stage[0]->backend->name);
    good.n_blocks = hello.max_blocks;
    good.n_slots = hello.max_slots;
    good.context_tok = hello.max_context;
    assert_int_equal(ds4_stage_form(c->stage[0], &good, &err), 0);
#define REFUSED(change)                                                                            \
    do {                                                                                           \
        bad = good;                                                                                \
        change;                                                                                    \
        assert_int_equal(ds4_stage_form(c->stage[0], &bad, &err), -1);                             \
        assert_int_equal(err.code, DS4_E_PROTOCOL);                                                \
    } while (0)
    REFUSED(bad.n_blocks++);
    REFUSED(bad.n_slots++);
    REFUSED(bad.n_slots = 0);
    REFUSED(bad.context_tok++);
    REFUSED(bad.max_seqs = CHAIN_SEQS + 1);
    REFUSED(bad.max_step_tok = CHAIN_STEP_TOK + 1);
    REFUSED(bad.n_stage = 3);
    REFUSED(bad.generation = 0);
#undef REFUSED
}

static void all_stages_of_one_file_have_one_digest(void **state)
{
    struct chain *c = *state;
    struct ds4_hello a = {0};
    struct ds4_hello b = {0};
    uint8_t zero[DS4_ID_BYTES] = {0};

    ds4_stage_hello(c->stage[0], &a);
    ds4_stage_hello(c->stage[1], &b);
    assert_memory_equal(a.model_digest, b.model_digest, DS4_ID_BYTES);
    assert_memory_not_equal(a.model_digest, zero, DS4_ID_BYTES);
}

static void count_progress(void *arg, int64_t loaded, int64_t total)
{
    int64_t *newest = arg;

    assert_true(loaded >= newest[0] && loaded <= total);
    newest[0] = loaded;
    newest[1] = total;
    newest[2]++;
}

static void loading_reports_every_layer_and_ends_at_the_total(void **state)
{
    struct chain_options options = {.n_stage = 2};
    struct ds4_stage_config config = chain_config(&options, 1);
    int64_t progress[3] = {0};
    struct ds4_health health = {0};
    struct ds4_stage *st = ds4_stage_new(&config, count_progress, progress, NULL);

    (void)state;
    assert_non_null(st);
    ds4_stage_health(st, &health);
    assert_int_equal(progress[0], progress[1]);
    assert_int_equal(progress[1], health.weights_bytes);
    assert_true(progress[2] >= 4);
    ds4_stage_free(st);
}

static void settings_that_cannot_work_are_refused(void **state)
{
    static const int32_t wrong_sum[] = {4, 5};
    struct chain_options options = {.n_stage = 2};
    struct ds4_stage_config good = chain_config(&options, 0);
    struct ds4_stage_config bad;
    struct ds4_plan plan;
    struct ds4_weights_size size;
    struct ds4_model_shape model;
    size_t total;
    struct ds4_err err = {0};

    (void)state;
    assert_int_equal(ds4_stage_plan(&good, &plan, &size, &model, &total, &err), 0);
    assert_int_equal(plan.part.end_layer, 4);
#define REFUSED(change)                                                                            \
    do {                                                                                           \
        bad = good;                                                                                \
        err.code = DS4_OK;                                                                         \
        change;                                                                                    \
        assert_null(ds4_stage_new(&bad, NULL, NULL, &err));                                        \
        assert_int_not_equal(err.code, DS4_OK);                                                    \
        assert_int_not_equal(err.code, DS4_E_BUG);                                                 \
    } while (0)
    REFUSED(bad.model_path = "tests/data/none.gguf");
    REFUSED(bad.model_path = "tests/data/README.md");
    REFUSED(bad.stage = 2);
    REFUSED(bad.n_stage = 9; bad.stage = 0);
    REFUSED(bad.partition = wrong_sum; bad.n_partition = 2);
    REFUSED(bad.backend = "abacus");
    REFUSED(bad.context_tok = 1 << 20);
    REFUSED(bad.max_seqs = 0);
    REFUSED(bad.max_step_tok = DS4_MAX_STEP_TOK + 1);
    REFUSED(bad.n_blocks = 1);
#undef REFUSED
}

#define CHAIN_TEST(name) cmocka_unit_test_setup_teardown(name, new_chain, free_chain)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        CHAIN_TEST(a_step_out_of_order_is_refused),
        CHAIN_TEST(entries_that_do_not_add_up_are_refused),
        CHAIN_TEST(a_token_outside_the_vocabulary_is_refused),
        CHAIN_TEST(a_lease_that_does_not_cover_the_rows_is_refused),
        CHAIN_TEST(one_slot_cannot_be_in_a_step_twice),
        CHAIN_TEST(a_close_of_a_free_slot_is_refused),
        CHAIN_TEST(closes_come_before_opens),
        CHAIN_TEST(a_truncation_below_the_hot_window_is_refused),
        CHAIN_TEST(a_token_of_a_step_without_one_is_refused),
        CHAIN_TEST(records_are_needed_once_and_noted_in_order),
        CHAIN_TEST(an_entry_posted_past_the_end_is_a_no_op),
        CHAIN_TEST(a_row_that_is_not_finite_ends_its_sequence_only),
        CHAIN_TEST(forming_beyond_the_offer_is_refused),
        CHAIN_TEST(all_stages_of_one_file_have_one_digest),
        cmocka_unit_test(loading_reports_every_layer_and_ends_at_the_total),
        cmocka_unit_test(settings_that_cannot_work_are_refused),
        cmocka_unit_test(greedy_texts_match_on_any_number_of_stages),
    };

    chain_take_args(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* The scenarios of kv-cache.md 6 that need no model: each is named by the symptom it had somewhere. */
#include "router/sched/engine.h"
#include "tests/support/sched_asserts.h"
#include "tests/support/sched_rig.h"

#include <inttypes.h>
#include <malloc.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const struct ds4_rig_shape roomy = {
    .n_stage = 2,
    .n_blocks = 400,
    .n_slots = 6,
    .context_tok = 32768,
    .n_points = 400,
    .config = {.max_seqs = 4, .chunk_tok = 512},
};

/* Runs it alone; returns how many prompt tokens were not computed. */
static int32_t ask(struct ds4_rig *rig, const int32_t *token, int32_t n, int32_t max_new)
{
    struct ds4_rig_client *client = submit(ds4_rig_client_of(rig, token, n, max_new));
    int32_t cached;

    ds4_rig_run(rig);
    assert_int_equal(client->result.err.code, DS4_OK);
    assert_true(ds4_rig_is_right(client, max_new));
    cached = client->cached;
    ds4_rig_client_free(client);
    assert_clean(rig);
    return cached;
}

static void change(int32_t *token, int32_t at)
{
    token[at] = (token[at] + 1) % DS4_RIG_VOCAB;
}

/* T02: whatever the place, the state after a cut is that of a fresh run, and what is computed again is
 * nothing within the hot window and less than an anchor's step beyond it. */
static void a_cut_at_every_position_costs_at_most_an_anchor_step(void **state)
{
    int32_t *token = tokens(1, 800);
    const struct ds4_rig_shape dense = {
        .n_stage = 1,
        .n_blocks = 40,
        .n_slots = 4,
        .context_tok = 4096,
        .n_points = 60,
        .config = {.max_seqs = 2, .chunk_tok = 128},
    };

    (void)state;
    for (int32_t m = 1; m <= 700; m++) {
        struct ds4_rig rig;
        int32_t cached;

        ds4_rig_open(&rig, &dense);
        ask(&rig, token, 700, 1);
        change(token, m);
        cached = ask(&rig, token, m + 9, 3);
        assert_true(cached <= m);
        assert_true(m - cached <= (700 - m <= 120 ? 0 : 127));
        change(token, m);
        token[m] = (token[m] + DS4_RIG_VOCAB - 2) % DS4_RIG_VOCAB;
        ds4_rig_close(&rig);
    }
    free(token);
}

/* Chunks of 512 left an anchor at each end only, so that a deep cut cost up to 511 tokens more. */
static void a_deep_cut_below_long_chunks_costs_less_than_an_anchor_step(void **state)
{
    int32_t *token = tokens(3, 9000);
    uint32_t x = 5;

    (void)state;
    for (int32_t i = 0; i < 12; i++) {
        struct ds4_rig rig;
        int32_t cut, cached;

        x = x * 1664525u + 1013904223u;
        cut = 1 + (int32_t)(x >> 12) % 8800;
        ds4_rig_open(&rig, &roomy);
        ask(&rig, token, 9000, 1);
        change(token, cut);
        cached = ask(&rig, token, cut + 9, 3);
        assert_true(cached <= cut);
        assert_true(cut - cached <= 127);
        ds4_rig_close(&rig);
    }
    free(token);
}

/* Without a single point a deep cut computed the whole prompt again although its rows were all there. */
static void rows_without_a_point_are_gone_on_with_after_a_replay(void **state)
{
    struct ds4_rig_shape shape = roomy;
    int32_t *token = tokens(90, 9000);
    struct ds4_rig_client *client;
    struct ds4_rig rig;

    (void)state;
    shape.n_points = 0;
    shape.replay_tok = 1270; /* ten layers */
    ds4_rig_open(&rig, &shape);
    ask(&rig, token, 9000, 2);
    for (int32_t cut = 8700; cut > 1280; cut -= 1111) {
        int32_t cached;

        change(token, cut);
        cached = ask(&rig, token, cut + 30, 3);
        assert_int_equal(cached, (cut - 1270) / 128 * 128);
        assert_true(rig.stage.n_replays > 0);
    }
    change(token, 1000); /* where a replay would be longer than the prefix */
    assert_int_equal(ask(&rig, token, 1100, 2), 0);
    /* The client goes away while the rings are being filled: they are nobody's state. */
    change(token, 5000);
    client = submit(ds4_rig_client_of(&rig, token, 6000, 4));
    while (client->n_admitted == 0)
        ds4_rig_turn(&rig);
    ds4_rig_turn(&rig);
    ds4_sched_cancel(rig.sched, client->req, DS4_CANCEL_DISCONNECT, rig.now_ns);
    ds4_rig_client_free(client);
    ds4_rig_run(&rig);
    assert_clean(&rig);
    ask(&rig, token, 6000, 4);
    free(token);
    ds4_rig_close(&rig);
}

/* T03: cuts compose; what one of them destroyed is known to the next. */
static void fifty_cuts_in_a_row_are_neither_refused_nor_wrong(void **state)
{
    int32_t *token = tokens(2, 4000);
    int32_t n = 1500;
    uint32_t x = 3;
    struct ds4_rig rig;

    (void)state;
    ds4_rig_open(&rig, &roomy);
    ask(&rig, token, n, 1);
    for (int32_t i = 0; i < 50; i++) {
        int32_t cut, cached;

        x = x * 1664525u + 1013904223u;
        cut = n - 1 - (int32_t)(x >> 20) % 20;
        change(token, cut);
        n = cut + 1 + (int32_t)(x >> 12) % 30;
        cached = ask(&rig, token, n, 1);
        assert_true(cut - cached <= 127);
    }
    free(token);
    ds4_rig_close(&rig);
}

/* T06: the second and third of equal prompts start from the first one's rows and answer alike. */
static void equal_prompts_of_three_sessions_get_equal_answers(void **state)
{
    int32_t *token = tokens(4, 7700);
    struct ds4_rig_client *c[3];
    struct ds4_rig rig;

    (void)state;
    ds4_rig_open(&rig, &roomy);
    assert_int_equal(ask(&rig, token, 7700, 8), 0);
    for (int32_t i = 0; i < 3;
         i++) /* beside each other: one may take the slot, the others cannot */
        c[i] = submit(ds4_rig_client_of(&rig, token, 7700, 8));
    ds4_rig_run(&rig);
    for (int32_t i = 0; i < 3; i++) {
        assert_true(ds4_rig_is_right(c[i], 8));
        assert_true(c[i]->cached >= 7699);
        ds4_rig_client_free(c[i]);
    }
    assert_clean(&rig);
    free(token);
    ds4_rig_close(&rig);
}

/* T08: resending a prompt never computes it again, not after a long answer, nor after an abort. */
static void a_regenerated_answer_costs_one_row_even_after_300_tokens(void **state)
{
    int32_t *token = tokens(5, 3000);
    struct ds4_rig_client *client;
    struct ds4_rig rig;

    (void)state;
    ds4_rig_open(&rig, &roomy);
    client = ds4_rig_client_of(&rig, token, 3000, 300);
    client->req->n_stop_id = 0;
    client->req->n_model_stop_id = 0;
    assert_int_equal(ds4_rig_submit(client, NULL, NULL), 0);
    ds4_rig_run(&rig);
    assert_int_equal(client->out.len, 300);
    ds4_rig_client_free(client);
    assert_int_equal(ask(&rig, token, 3000, 4), 2999);
    /* The client goes away in the middle of the answer. */
    client = submit(ds4_rig_client_of(&rig, token, 3000, 300));
    client->req->n_stop_id = 0;
    while (client->out.len < 40)
        ds4_rig_turn(&rig);
    ds4_sched_cancel(rig.sched, client->req, DS4_CANCEL_DISCONNECT, rig.now_ns);
    ds4_rig_client_free(client);
    ds4_rig_run(&rig);
    assert_int_equal(ask(&rig, token, 3000, 4), 2999);
    free(token);
    ds4_rig_close(&rig);
}

/* T09: a client that compacts keeps what the two histories share. */
static void a_compaction_starts_from_the_shared_system_prompt(void **state)
{
    int32_t *token = tokens(6, 28000), *other = tokens(7, 6000);
    struct ds4_rig rig;
    int32_t cached;

    (void)state;
    ds4_rig_open(&rig, &roomy);
    ask(&rig, token, 28000, 4);
    memcpy(other, token, 3000 * sizeof(*token));
    cached = ask(&rig, other, 6000, 4);
    assert_true(cached <= 3000 && cached > 3000 - 128);
    free(token);
    free(other);
    ds4_rig_close(&rig);
}

/* T10, T14: what was refused has touched nothing, and the next one is served. */
static void a_refused_request_writes_nothing(void **state)
{
    int32_t *token = tokens(8, 2000);
    struct ds4_rig_client *big;
    enum ds4_reason reason;
    struct ds4_err err = {0};
    struct ds4_rig rig;
    uint64_t before, rows;

    (void)state;
    ds4_rig_open(&rig, &roomy);
    ask(&rig, token, 1000, 2);
    before = ds4_budget_digest(rig.sched->budget);
    rows = rig.stage.n_rows;
    big = ds4_rig_client_of(&rig, token, 2000, 10);
    rig.sched->form.context_tok = 1 << 20; /* so that only the cache says no */
    big->req->max_new = 401 * DS4_BLOCK_TOK;
    assert_int_equal(ds4_rig_submit(big, &reason, &err), -1);
    assert_int_equal(err.code, DS4_E_INVALID);
    assert_int_equal(reason, DS4_REASON_KV_CAPACITY);
    assert_non_null(strstr(err.msg, "cache blocks"));
    assert_true(before == ds4_budget_digest(rig.sched->budget) && rows == rig.stage.n_rows);
    ds4_rig_client_free(big);
    rig.sched->form.context_tok = 32768;
    assert_true(ask(&rig, token, 1001, 2) >= 1000);
    free(token);
    ds4_rig_close(&rig);
}

/* T11, refusal storm: 1,400 requests of which most are refused leave the books as they were. */
static void a_storm_of_refusals_leaves_the_books_balanced(void **state)
{
    struct ds4_rig_shape shape = roomy;
    struct ds4_rig_client *held[8];
    int32_t *token = tokens(9, 3000);
    int32_t n_held = 0, n_refused = 0;
    uint64_t digest;
    size_t heap = 0;
    struct ds4_rig rig;

    (void)state;
    shape.config.queue_max = 4;
    shape.config.queue_ms = 1000000;
    ds4_rig_open(&rig, &shape);
    for (int32_t i = 0; i < 8; i++)
        held[n_held++] = submit(ds4_rig_client_of(&rig, token, 2000 + i, 200)),
        i < 4 ? ds4_rig_turn(&rig) : false;
    for (int32_t i = 0; i < 20; i++)
        ds4_sched_pump(rig.sched, rig.now_ns);
    digest = ds4_budget_digest(rig.sched->budget);
    for (int32_t i = 0; i < 1372; i++) {
        struct ds4_rig_client *client = ds4_rig_client_of(&rig, token, 1 + i % 50 * 30, 50);
        enum ds4_reason reason;
        struct ds4_err err = {0};

        if (i % 3 == 0)
            client->req->max_new = 1 << 20;
        n_refused += ds4_rig_submit(client, &reason, &err) != 0;
        assert_int_equal(err.code, DS4_E_BUSY);
        assert_true(digest == ds4_budget_digest(rig.sched->budget));
        ds4_rig_client_free(client);
        /* Bytes in use, of the whole program: what one refusal kept would show 1,372 times. */
        if (i == 300) /* like every 150th: the same request, and the allocator has all its caches */
            heap = mallinfo2().uordblks;
        if (i > 300 && i % 150 == 0)
            assert_int_equal(mallinfo2().uordblks, heap);
    }
    assert_int_equal(n_refused, 1372);
    ds4_rig_run(&rig);
    for (int32_t i = 0; i < n_held; i++) {
        assert_true(ds4_rig_is_right(held[i], 200));
        ds4_rig_client_free(held[i]);
    }
    assert_clean(&rig);
    free(token);
    ds4_rig_close(&rig);
}

/* T12: deep conversations give way to cold ones, blocks and slots, and nothing is mixed up. */
static void two_deep_conversations_give_way_to_cold_ones(void **state)
{
    struct ds4_rig_shape shape = roomy;
    int32_t *a = tokens(10, 20000), *b = tokens(11, 20000), *c = tokens(12, 20000),
            *d = tokens(13, 20000);
    struct ds4_rig_client *cold[2];
    struct ds4_rig rig;

    (void)state;
    shape.n_blocks = 170; /* two of them and a little */
    shape.n_slots = 3;
    shape.config.max_seqs = 2;
    ds4_rig_open(&rig, &shape);
    ask(&rig, a, 20000, 4);
    ask(&rig, b, 20000, 4);
    cold[0] = submit(ds4_rig_client_of(&rig, c, 20000, 4));
    cold[1] = submit(ds4_rig_client_of(&rig, d, 20000, 4));
    ds4_rig_run(&rig);
    for (int32_t i = 0; i < 2; i++) {
        assert_true(ds4_rig_is_right(cold[i], 4));
        ds4_rig_client_free(cold[i]);
    }
    assert_clean(&rig);
    ask(&rig, a, 20000, 4);
    free(a);
    free(b);
    free(c);
    free(d);
    ds4_rig_close(&rig);
}

/* T13: prompts fit, prompts with their answers do not: the excess waits, nobody is cut short. */
static void answers_are_promised_their_room(void **state)
{
    struct ds4_rig_shape shape = roomy;
    struct ds4_rig_client *c[6];
    struct ds4_rig rig;

    (void)state;
    shape.n_blocks = 16;
    shape.context_tok = 3000;
    ds4_rig_open(&rig, &shape);
    for (uint32_t i = 0; i < 6; i++) {
        c[i] = ds4_rig_client(&rig, 20 + i, 300, 1200);
        c[i]->req->n_stop_id = 0;
        c[i]->req->n_model_stop_id = 0;
        assert_int_equal(ds4_rig_submit(c[i], NULL, NULL), 0);
    }
    ds4_rig_run(&rig);
    for (int32_t i = 0; i < 6; i++) {
        assert_int_equal(c[i]->result.end, DS4_END_LENGTH);
        assert_int_equal(c[i]->out.len, 1200);
        ds4_rig_client_free(c[i]);
    }
    assert_clean(&rig);
    ds4_rig_close(&rig);
}

/* T19: what a shared system prompt begins with survives a flood of foreign conversations. */
static void a_shared_system_prompt_survives_twenty_foreign_ones(void **state)
{
    struct ds4_rig_shape shape = roomy;
    int32_t *token = tokens(30, 4000);
    struct ds4_rig rig;

    (void)state;
    shape.n_points = 60;
    shape.config.n_boundary_id = 1;
    shape.config.boundary_id[0] = 63;
    ds4_rig_open(&rig, &shape);
    for (int32_t t = 0; t < 4000; t++)
        token[t] = token[t] == 63 ? 62 : token[t];
    token[2000] = 63; /* the first message after the system prompt */
    ask(&rig, token, 4000, 2);
    for (uint32_t i = 0; i < 20; i++) {
        int32_t *other = tokens(40 + i, 3000);

        for (int32_t t = 0; t < 3000; t++)
            other[t] = other[t] == 63 ? 62 : other[t];
        ask(&rig, other, 3000, 2);
        free(other);
    }
    assert_true(rig.sched->points.n_thinned > 0);
    change(token, 2001);
    assert_int_equal(ask(&rig, token, 4000, 2), 2000 / 128 * 128);
    free(token);
    ds4_rig_close(&rig);
}

/* T21: a side request that shares a trifle does not take the long conversation's slot. */
static void a_side_request_does_not_steal_the_slot(void **state)
{
    struct ds4_rig_shape shape = roomy;
    int32_t *token = tokens(60, 30000), *side = tokens(61, 300);
    struct ds4_rig rig;

    (void)state;
    shape.n_slots = 3; /* one is the probe's */
    shape.config.max_seqs = 2;
    ds4_rig_open(&rig, &shape);
    ask(&rig, token, 30000, 2);
    memcpy(side, token, 27 * sizeof(*token));
    ask(&rig, side, 300, 2);
    assert_int_equal(rig.sched->prefix.hot.len, 2);
    assert_true(ask(&rig, token, 30000, 2) >= 29999);
    free(token);
    free(side);
    ds4_rig_close(&rig);
}

/* T26: beside a prompt of half a million tokens a newcomer has its first chunk within 2 S steps. */
static void a_newcomer_starts_within_two_rounds_beside_a_giant(void **state)
{
    struct ds4_rig_shape shape = roomy;
    struct ds4_rig_client *giant, *small;
    int32_t *token = tokens(70, 500000);
    int64_t step;
    struct ds4_rig rig;

    (void)state;
    shape.n_stage = 4;
    shape.n_blocks = 2100;
    shape.context_tok = 524288;
    ds4_rig_open(&rig, &shape);
    rig.stage.check_cells = false;
    giant = submit(ds4_rig_client_of(&rig, token, 500000, 2));
    for (int32_t i = 0; i < 50; i++)
        ds4_rig_turn(&rig);
    small = ds4_rig_client(&rig, 71, 200, 2);
    assert_int_equal(ds4_rig_submit(small, NULL, NULL), 0);
    step = rig.sched->next_step;
    while (small->n_done == 0)
        ds4_rig_turn(&rig);
    assert_true(giant->n_done == 0);
    assert_true(rig.sched->next_step - step <= 2 * 4 + 2 * 4); /* admitted, and two tokens said */
    ds4_sched_cancel(rig.sched, giant->req, DS4_CANCEL_API, rig.now_ns);
    ds4_rig_run(&rig);
    ds4_rig_client_free(small);
    ds4_rig_client_free(giant);
    assert_clean(&rig);
    free(token);
    ds4_rig_close(&rig);
}

/* T29: hits are as long as what is common, whatever the length. */
static void short_prompts_hit_to_the_last_token(void **state)
{
    (void)state;
    for (int32_t n = 40; n <= 4096; n = n * 3 / 2 + 1) {
        int32_t *token = tokens(80 + (uint32_t)n, n + 1);
        struct ds4_rig rig;

        ds4_rig_open(&rig, &roomy);
        ask(&rig, token, n, 1);
        assert_int_equal(ask(&rig, token, n + 1, 1), n);
        free(token);
        ds4_rig_close(&rig);
    }
}

/* More conversations than slots stay cached: a slot is given back, blocks and points stay. */
static void more_conversations_than_slots_stay_cached(void **state)
{
    int32_t *token[20];
    struct ds4_rig rig;

    (void)state;
    ds4_rig_open(&rig, &roomy);
    for (uint32_t i = 0; i < 20; i++) {
        token[i] = tokens(100 + i, 2001);
        ask(&rig, token[i], 2000, 1);
    }
    for (int32_t i = 0; i < 20; i++) {
        assert_true(ask(&rig, token[i], 2001, 1) >= 1999);
        free(token[i]);
    }
    assert_true(rig.stage.n_installs >= 14);
    ds4_rig_close(&rig);
}

/* Two prompts with a common beginning, at once: the second uses the first one's blocks while it runs. */
static void a_fork_shares_the_blocks_of_a_running_sequence(void **state)
{
    int32_t *token = tokens(130, 5000);
    struct ds4_rig_client *a, *b;
    struct ds4_budget_sums sums;
    struct ds4_rig rig;

    (void)state;
    ds4_rig_open(&rig, &roomy);
    a = ds4_rig_client_of(&rig, token, 4000, 500);
    a->req->n_stop_id = 0;
    a->req->n_model_stop_id = 0;
    assert_int_equal(ds4_rig_submit(a, NULL, NULL), 0);
    while (a->out.len < 10)
        ds4_rig_turn(&rig);
    b = submit(ds4_rig_client_of(&rig, token, 5000, 3));
    while (b->n_done == 0)
        ds4_rig_turn(&rig);
    assert_int_equal(b->cached, 3999);
    assert_true(a->n_done == 0);
    ds4_budget_sums(rig.sched->budget, &sums);
    assert_true(sums.live + sums.cached <= 20 + 6); /* not 16 + 20 */
    ds4_rig_run(&rig);
    assert_true(ds4_rig_is_right(b, 3));
    assert_int_equal(a->out.len, 500);
    ds4_rig_client_free(a);
    ds4_rig_client_free(b);
    assert_clean(&rig);
    free(token);
    ds4_rig_close(&rig);
}

/* Two clients that give up the same prompt half-way do not cost two prefills. */
static void a_cancelled_prefill_is_found_by_the_next(void **state)
{
    int32_t *token = tokens(140, 9000);
    struct ds4_rig_client *a;
    struct ds4_rig rig;

    (void)state;
    ds4_rig_open(&rig, &roomy);
    a = submit(ds4_rig_client_of(&rig, token, 9000, 3));
    while (a->progress < 5000)
        ds4_rig_turn(&rig);
    ds4_sched_cancel(rig.sched, a->req, DS4_CANCEL_DISCONNECT, rig.now_ns);
    ds4_rig_client_free(a);
    ds4_rig_run(&rig);
    assert_true(ask(&rig, token, 9000, 3) >= 5000);
    free(token);
    ds4_rig_close(&rig);
}

static struct ds4_rig_client *submit_for(struct ds4_rig *rig, uint64_t tenant, uint32_t seed)
{
    struct ds4_rig_client *client = ds4_rig_client(rig, seed, 1000, 3);

    client->req->tenant = tenant;
    assert_int_equal(ds4_rig_submit(client, NULL, NULL), 0);
    return client;
}

static void a_busy_tenant_does_not_hold_up_another(void **state)
{
    struct ds4_rig_shape shape = roomy;
    struct ds4_rig_client *busy[20], *other;
    int32_t before = 0;
    struct ds4_rig rig;

    (void)state;
    shape.config.max_seqs = 1;
    ds4_rig_open(&rig, &shape);
    for (uint32_t i = 0; i < 20; i++)
        busy[i] = submit_for(&rig, 1, 200 + i);
    while (busy[3]->n_done == 0)
        ds4_rig_turn(&rig);
    other = submit_for(&rig, 2, 300);
    while (other->n_done == 0)
        ds4_rig_turn(&rig);
    for (int32_t i = 0; i < 20; i++)
        before += busy[i]->n_done;
    assert_true(before <= 6); /* the one that ran, not the sixteen that waited longer */
    ds4_rig_run(&rig);
    for (int32_t i = 0; i < 20; i++) {
        assert_int_equal(busy[i]->n_done, 1);
        ds4_rig_client_free(busy[i]);
    }
    ds4_rig_client_free(other);
    assert_clean(&rig);
    ds4_rig_close(&rig);
}

static void one_refused_for_memory_hears_so_when_its_time_is_up(void **state)
{
    struct ds4_rig_shape shape = roomy;
    struct ds4_rig_client *a, *b;
    struct ds4_rig rig;

    (void)state;
    shape.n_blocks = 20;
    shape.context_tok = 4800;
    shape.config.queue_ms = 200;
    ds4_rig_open(&rig, &shape);
    a = ds4_rig_client(&rig, 1, 3000, 1000);
    a->req->n_stop_id = 0;
    a->req->n_model_stop_id = 0;
    assert_int_equal(ds4_rig_submit(a, NULL, NULL), 0);
    ds4_rig_turn(&rig);
    b = ds4_rig_client(&rig, 2, 3000, 1000);
    assert_int_equal(ds4_rig_submit(b, NULL, NULL), 0);
    while (b->n_done == 0)
        ds4_rig_turn(&rig);
    assert_int_equal(b->result.reason, DS4_REASON_KV_CAPACITY);
    assert_int_equal(b->result.err.code, DS4_E_BUSY);
    assert_non_null(strstr(b->result.err.msg, "need 16 cache blocks"));
    assert_non_null(strstr(b->result.err.msg, "promised"));
    assert_non_null(strstr(b->result.err.msg, "reclaimable"));
    ds4_rig_run(&rig);
    assert_int_equal(a->out.len, 1000);
    ds4_rig_client_free(a);
    ds4_rig_client_free(b);
    ds4_rig_close(&rig);
}

/* ---- lost generations -------------------------------------------------------------------------------- */

static void lose(struct ds4_rig *rig)
{
    struct ds4_err why = {.code = DS4_E_UNAVAILABLE, .msg = "stage 1 is silent"};

    ds4_sched_stop(rig->sched, DS4_REASON_RESTARTED, &why, rig->now_ns);
}

static void a_replayed_answer_is_the_undisturbed_one(void **state)
{
    struct ds4_rig_shape shape = roomy;

    (void)state;
    shape.config.replay = true;
    for (int32_t at = 0; at < 40; at += 3) {
        struct ds4_rig_client *c[3];
        struct ds4_rig rig;

        ds4_rig_open(&rig, &shape);
        for (uint32_t i = 0; i < 3; i++) {
            c[i] = ds4_rig_client(&rig, 400 + i, 700 + 300 * (int32_t)i, 60);
            assert_int_equal(ds4_rig_submit(c[i], NULL, NULL), 0);
        }
        for (int32_t i = 0; i < at; i++)
            ds4_rig_turn(&rig);
        lose(&rig);
        ds4_rig_start(&rig);
        ds4_rig_run(&rig);
        for (int32_t i = 0; i < 3; i++) {
            assert_int_equal(c[i]->n_done, 1);
            assert_true(c[i]->n_admitted <= 1);
            assert_true(ds4_rig_is_right(c[i], 60));
            ds4_rig_client_free(c[i]);
        }
        assert_clean(&rig);
        ds4_rig_close(&rig);
    }
}

static void a_prompt_at_two_losses_is_poison_for_ten_minutes(void **state)
{
    struct ds4_rig_shape shape = roomy;
    struct ds4_rig_client *c;
    enum ds4_reason reason;
    struct ds4_err err = {0};
    int32_t wait_ms = 0;
    struct ds4_rig rig;

    (void)state;
    shape.config.replay = true;
    ds4_rig_open(&rig, &shape);
    c = ds4_rig_client(&rig, 1, 500, 400);
    c->req->n_stop_id = 0;
    c->req->n_model_stop_id = 0;
    assert_int_equal(ds4_rig_submit(c, NULL, NULL), 0);
    while (c->out.len < 5)
        ds4_rig_turn(&rig);
    lose(&rig);
    assert_int_equal(c->n_done, 0);
    ds4_rig_start(&rig);
    while (c->out.len < 10)
        ds4_rig_turn(&rig);
    lose(&rig);
    assert_int_equal(c->n_done, 1);
    assert_int_equal(c->result.reason, DS4_REASON_POISONED);
    ds4_rig_client_free(c);
    ds4_rig_start(&rig);
    c = ds4_rig_client(&rig, 1, 500, 4);
    assert_int_equal(ds4_sched_submit(rig.sched, c->req, rig.now_ns, &reason, &wait_ms, &err), -1);
    assert_int_equal(err.code, DS4_E_UNAVAILABLE);
    assert_int_equal(reason, DS4_REASON_POISONED);
    assert_true(wait_ms > 590000 && wait_ms <= 600000);
    ds4_rig_client_free(c);
    c = ds4_rig_client(&rig, 2, 500, 4); /* others are served */
    assert_int_equal(ds4_rig_submit(c, NULL, NULL), 0);
    ds4_rig_run(&rig);
    assert_true(ds4_rig_is_right(c, 4));
    ds4_rig_client_free(c);
    rig.now_ns += INT64_C(601) * 1000000000;
    c = ds4_rig_client(&rig, 1, 500, 4);
    assert_int_equal(ds4_rig_submit(c, NULL, NULL), 0);
    ds4_rig_run(&rig);
    assert_true(ds4_rig_is_right(c, 4));
    ds4_rig_client_free(c);
    ds4_rig_close(&rig);
}

/* The same words from several clients, and one loss: nobody's prompt was there twice. */
static void equal_prompts_at_one_loss_are_all_replayed(void **state)
{
    struct ds4_rig_shape shape = roomy;
    struct ds4_rig_client *c[3];
    struct ds4_rig rig;

    (void)state;
    shape.config.replay = true;
    ds4_rig_open(&rig, &shape);
    for (int32_t i = 0; i < 3; i++) {
        c[i] = ds4_rig_client(&rig, 7, 500, 40);
        assert_int_equal(ds4_rig_submit(c[i], NULL, NULL), 0);
    }
    for (int32_t i = 0; i < 12; i++)
        ds4_rig_turn(&rig);
    lose(&rig);
    ds4_rig_start(&rig);
    ds4_rig_run(&rig);
    for (int32_t i = 0; i < 3; i++) {
        assert_int_equal(c[i]->result.reason, DS4_REASON_NONE);
        assert_true(ds4_rig_is_right(c[i], 40));
        ds4_rig_client_free(c[i]);
    }
    ds4_rig_close(&rig);
}

/* Its rows are there and the slot that could go on with them is not: they are no reason to wait. */
static void a_prompt_does_not_wait_for_its_own_rows_to_go_away(void **state)
{
    const struct ds4_rig_shape tight = {
        .n_stage = 1,
        .n_blocks = 12,
        .n_slots = 3,
        .context_tok = 2560,
        .config = {.max_seqs = 1, .chunk_tok = 512},
    };
    int32_t *a = tokens(20, 1500), *b = tokens(21, 100), *c = tokens(22, 100);
    struct ds4_rig rig;

    (void)state;
    ds4_rig_open(&rig, &tight);
    ask(&rig, a, 1500, 4);
    ask(&rig, b, 100, 4);
    ask(&rig, c, 100, 4); /* takes the slot of a */
    assert_int_equal(ask(&rig, a, 1500, 900), 0);
    free(a);
    free(b);
    free(c);
    ds4_rig_close(&rig);
}

/* A step forgets so many points and no more, and saves none before their memory is free; the rings do
 * not wait. */
static void a_flood_of_dropped_points_saves_none_too_late(void **state)
{
    struct ds4_rig_shape shape = roomy;
    int32_t *a = tokens(23, 15000), *b = tokens(24, 15000), *c = tokens(25, 30000);
    struct ds4_rig rig;

    (void)state;
    shape.n_blocks = 130;
    shape.config.chunk_tok = 128;
    ds4_rig_open(&rig, &shape);
    ask(&rig, a, 15000, 4);
    ask(&rig, b, 15000, 4);
    ask(&rig, c, 30000, 4);
    ask(&rig, c, 30000, 4);
    free(a);
    free(b);
    free(c);
    ds4_rig_close(&rig);
}

/* The last token's row is not finite while a point of the answer still waits for its step. */
static void a_spoiled_answer_drops_a_point_it_has_not_saved_once(void **state)
{
    struct ds4_rig_client *client;
    struct ds4_rig rig;

    (void)state;
    ds4_rig_open(&rig, &roomy);
    client = ds4_rig_client(&rig, 26, 120, 10);
    client->req->ignore_stop = true;
    assert_int_equal(ds4_rig_submit(client, NULL, NULL), 0);
    while (client->out.len < 9)
        assert_true(ds4_rig_turn(&rig));
    assert_int_equal(rig.sched->points.wanted.len, 1);
    rig.stage.nonfinite_seq = client->req->seq;
    ds4_rig_run(&rig);
    assert_int_equal(client->result.err.code, DS4_E_CORRUPT);
    assert_clean(&rig);
    ds4_rig_client_free(client);
    ds4_rig_close(&rig);
}

/* Rows that follow in the very step that saves a point count against the rings too. */
static void a_splice_drops_a_point_that_it_overtakes(void **state)
{
    int32_t *text = tokens(27, 140);
    struct ds4_rig_shape shape = roomy;
    struct ds4_rig_client *client;
    struct ds4_rig rig;

    (void)state;
    shape.n_stage = 1;
    ds4_rig_open(&rig, &shape);
    client = ds4_rig_client(&rig, 28, 120, 400);
    client->req->ignore_stop = true;
    assert_int_equal(ds4_rig_submit(client, NULL, NULL), 0);
    while (rig.sched->points.wanted.len == 0 || client->out.len == 0)
        assert_true(ds4_rig_turn(&rig));
    assert_int_equal(rig.sched->points.wanted.ptr[0].point->pos, 128);
    assert_true(ds4_engine_splice(rig.sched, rig.sched->seqs.ptr[0], 0, text, 140, NULL));
    ds4_rig_run(&rig);
    assert_clean(&rig);
    ds4_rig_client_free(client);
    free(text);
    ds4_rig_close(&rig);
}

/* The last stage counts repetitions over all tokens that ran in the slot; those before a point did not. */
static void a_repetition_penalty_does_not_start_from_a_point(void **state)
{
    int32_t *a = tokens(29, 1000), *b = tokens(30, 1000);
    struct ds4_rig_shape shape = roomy;
    struct ds4_rig_client *client;
    struct ds4_rig rig;

    (void)state;
    shape.n_slots = 2;
    shape.config.max_seqs = 1;
    ds4_rig_open(&rig, &shape);
    ask(&rig, a, 1000, 4);
    ask(&rig, b, 1000, 4); /* takes the only slot */
    for (int32_t turn = 0; turn < 2; turn++) {
        assert_int_equal(ask(&rig, a, 1000, 1), 999); /* the slot stands on a point from now on */
        client = ds4_rig_client_of(&rig, a, 1000, 1);
        client->req->sampling.repetition_penalty = 1.5F;
        assert_int_equal(ds4_rig_submit(client, NULL, NULL), 0);
        ds4_rig_run(&rig);
        assert_int_equal(client->cached, 0);
        ds4_rig_client_free(client);
        client = ds4_rig_client_of(&rig, a, 1000, 1);
        client->req->sampling.repetition_penalty = 1.5F;
        assert_int_equal(ds4_rig_submit(client, NULL, NULL), 0);
        ds4_rig_run(&rig);
        assert_int_equal(client->cached, 999); /* and on itself again */
        ds4_rig_client_free(client);
        ask(&rig, b, 1000, 4);
    }
    assert_clean(&rig);
    free(a);
    free(b);
    ds4_rig_close(&rig);
}

/* Splices had made it longer than prompt and answer, and the caches are smaller now. */
static void a_replayed_answer_that_has_no_room_left_ends_alone(void **state)
{
    struct ds4_rig_shape shape = roomy;
    struct ds4_rig_client *c;
    struct ds4_rig rig;

    (void)state;
    shape.config.replay = true;
    ds4_rig_open(&rig, &shape);
    c = ds4_rig_client(&rig, 31, 120, 20);
    c->req->ignore_stop = true;
    assert_int_equal(ds4_rig_submit(c, NULL, NULL), 0);
    while (c->out.len < 5)
        ds4_rig_turn(&rig);
    lose(&rig);
    while (c->req->history.len < 141)
        assert_int_equal(DS4_VEC_PUSH(&c->req->history, 1), 0);
    ds4_rig_start(&rig);
    ds4_rig_run(&rig);
    assert_int_equal(c->result.reason, DS4_REASON_RESTARTED);
    assert_clean(&rig);
    ds4_rig_client_free(c);
    ds4_rig_close(&rig);
}

/* The only slot is kept for its state, which nothing but a step saves, and nobody runs. */
static void a_slot_whose_state_is_to_be_saved_is_not_waited_for_in_idleness(void **state)
{
    struct ds4_rig_shape shape = roomy;
    int32_t *a = tokens(32, 300), *b = tokens(33, 300);
    struct ds4_rig rig;
    int64_t since_ns;

    (void)state;
    shape.n_slots = 2;
    shape.config.max_seqs = 1;
    ds4_rig_open(&rig, &shape);
    ask(&rig, a, 300, 4);
    since_ns = rig.now_ns;
    ask(&rig, b, 300, 4);
    assert_true(rig.now_ns - since_ns < INT64_C(100) * 1000000);
    assert_int_equal(ask(&rig, a, 300, 4), 299);
    free(a);
    free(b);
    ds4_rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_cut_at_every_position_costs_at_most_an_anchor_step),
        cmocka_unit_test(a_deep_cut_below_long_chunks_costs_less_than_an_anchor_step),
        cmocka_unit_test(rows_without_a_point_are_gone_on_with_after_a_replay),
        cmocka_unit_test(fifty_cuts_in_a_row_are_neither_refused_nor_wrong),
        cmocka_unit_test(equal_prompts_of_three_sessions_get_equal_answers),
        cmocka_unit_test(a_regenerated_answer_costs_one_row_even_after_300_tokens),
        cmocka_unit_test(a_compaction_starts_from_the_shared_system_prompt),
        cmocka_unit_test(a_refused_request_writes_nothing),
        cmocka_unit_test(a_storm_of_refusals_leaves_the_books_balanced),
        cmocka_unit_test(two_deep_conversations_give_way_to_cold_ones),
        cmocka_unit_test(answers_are_promised_their_room),
        cmocka_unit_test(a_shared_system_prompt_survives_twenty_foreign_ones),
        cmocka_unit_test(a_side_request_does_not_steal_the_slot),
        cmocka_unit_test(a_newcomer_starts_within_two_rounds_beside_a_giant),
        cmocka_unit_test(short_prompts_hit_to_the_last_token),
        cmocka_unit_test(more_conversations_than_slots_stay_cached),
        cmocka_unit_test(a_fork_shares_the_blocks_of_a_running_sequence),
        cmocka_unit_test(a_cancelled_prefill_is_found_by_the_next),
        cmocka_unit_test(a_busy_tenant_does_not_hold_up_another),
        cmocka_unit_test(one_refused_for_memory_hears_so_when_its_time_is_up),
        cmocka_unit_test(a_replayed_answer_is_the_undisturbed_one),
        cmocka_unit_test(a_prompt_at_two_losses_is_poison_for_ten_minutes),
        cmocka_unit_test(equal_prompts_at_one_loss_are_all_replayed),
        cmocka_unit_test(a_replayed_answer_that_has_no_room_left_ends_alone),
        cmocka_unit_test(a_slot_whose_state_is_to_be_saved_is_not_waited_for_in_idleness),
        cmocka_unit_test(a_prompt_does_not_wait_for_its_own_rows_to_go_away),
        cmocka_unit_test(a_flood_of_dropped_points_saves_none_too_late),
        cmocka_unit_test(a_spoiled_answer_drops_a_point_it_has_not_saved_once),
        cmocka_unit_test(a_splice_drops_a_point_that_it_overtakes),
        cmocka_unit_test(a_repetition_penalty_does_not_start_from_a_point),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

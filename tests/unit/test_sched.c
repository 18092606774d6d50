/* The engine on a scripted stage: every token right, nothing lost, nothing freed too early. */
#include "router/sched/sched.h"

#include "common/clock.h"
#include "router/sched/engine.h"
#include "tests/support/sched_asserts.h"
#include "tests/support/sched_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

static const struct ds4_rig_shape small = {
    .n_stage = 2,
    .n_blocks = 40,
    .n_slots = 6,
    .context_tok = 4096,
    .config = {.max_seqs = 4, .chunk_tok = 256},
};

static void one_request_gets_the_tokens_of_the_model(void **state)
{
    struct ds4_rig rig;
    struct ds4_rig_client *client;

    (void)state;
    ds4_rig_open(&rig, &small);
    client = submit(ds4_rig_client(&rig, 1, 700, 50));
    ds4_rig_run(&rig);
    assert_int_equal(client->n_done, 1);
    assert_int_equal(client->n_admitted, 1);
    assert_true(ds4_rig_is_right(client, 50));
    assert_int_equal(client->result.usage.prompt_tok, 700);
    assert_int_equal(client->result.usage.completion_tok, (int)client->out.len);
    assert_int_equal(client->n_progress, 2); /* chunks of 256, 256, and the one that samples */
    assert_clean(&rig);
    ds4_rig_client_free(client);
    ds4_rig_close(&rig);
}

static void the_answer_ends_at_max_new_and_says_length(void **state)
{
    struct ds4_rig rig;
    int32_t seen[2] = {0};

    (void)state;
    ds4_rig_open(&rig, &small);
    for (uint32_t seed = 0; seed < 12; seed++) {
        struct ds4_rig_client *client =
            submit(ds4_rig_client(&rig, seed, 30, 1 + (int32_t)seed * 6));
        bool stopped;

        ds4_rig_run(&rig);
        assert_true(ds4_rig_is_right(client, 1 + (int32_t)seed * 6));
        stopped = client->out.ptr[client->out.len - 1] == DS4_RIG_STOP_ID;
        assert_int_equal(client->result.end, stopped ? DS4_END_EOS : DS4_END_LENGTH);
        assert_int_equal(client->result.stop_id, stopped ? DS4_RIG_STOP_ID : -1);
        seen[stopped]++;
        ds4_rig_client_free(client);
    }
    assert_true(seen[0] > 0 && seen[1] > 0);
    assert_clean(&rig);
    ds4_rig_close(&rig);
}

static void sixteen_sequences_equal_solo_runs_on_one_to_four_stages(void **state)
{
    struct ds4_rig rig;
    struct ds4_rig_client *client[16];

    (void)state;
    for (int32_t n_stage = 1; n_stage <= 4; n_stage++) {
        struct ds4_rig_shape shape = {
            .n_stage = n_stage,
            .n_blocks = 200,
            .n_slots = 18,
            .context_tok = 4096,
            .config = {.max_seqs = 16, .chunk_tok = 128 * n_stage},
        };

        ds4_rig_open(&rig, &shape);
        for (uint32_t c = 0; c < 16; c++)
            client[c] =
                submit(ds4_rig_client(&rig, c / 3, 10 + (int32_t)c * 61, 3 + (int32_t)c * 9));
        ds4_rig_run(&rig);
        for (int32_t c = 0; c < 16; c++) {
            assert_int_equal(client[c]->n_done, 1);
            assert_true(ds4_rig_is_right(client[c], 3 + c * 9));
            ds4_rig_client_free(client[c]);
        }
        assert_int_equal(rig.stage.max_queued, n_stage < 2 ? 2 : n_stage);
        assert_clean(&rig);
        ds4_rig_close(&rig);
    }
}

/* The tokens from number `from` on are what the model says after `known`, to a stop id, to max_new
 * tokens in all, or to the last position. */
static bool goes_on_from(const struct ds4_rig_client *client, size_t from, struct ds4_tokens *known,
                         int32_t max_new, int32_t max_pos)
{
    int32_t token = -1;
    size_t i = from;

    while (token != DS4_RIG_STOP_ID && i < (size_t)max_new && (int32_t)known->len < max_pos) {
        token = ds4_scripted_next(DS4_RIG_VOCAB, known->ptr, (int32_t)known->len);
        if (i >= client->out.len || client->out.ptr[i++] != token)
            return false;
        assert_int_equal(DS4_VEC_PUSH(known, token), 0);
    }
    return i == client->out.len;
}

static void copy_tokens(struct ds4_tokens *to, const struct ds4_seq *seq)
{
    to->len = 0;
    for (size_t t = 0; t < seq->token.len; t++)
        assert_int_equal(DS4_VEC_PUSH(to, seq->token.ptr[t]), 0);
}

/* Splices again and again, at any moment, with and without run-ahead in flight and with tokens taken
 * back, beside sequences that must not notice. */
static void a_splice_goes_on_from_exactly_its_tokens(void **state)
{
    static const int32_t nudge[] = {9, 8, 7, 6, 40, 41, 42};
    int32_t n_cut = 0, n_in_flight = 0, n_stopped = 0;

    (void)state;
    for (uint32_t seed = 0; seed < 60; seed++) {
        struct ds4_rig_client *client, *other;
        struct ds4_tokens known = {0};
        struct ds4_rig rig;
        struct ds4_err err = {0};
        size_t from = 0;
        int32_t max_pos = 0;

        ds4_rig_open(&rig, &small);
        rig.sched->config.hot_window_tok = seed % 5 == 0 ? 1 : 120;
        other = submit(ds4_rig_client(&rig, seed + 1000, 300, 60));
        client = submit(ds4_rig_client(&rig, seed, 240 + (int32_t)seed, 80));
        for (int32_t turn = 0; client->n_done == 0; turn++) {
            struct ds4_seq *seq = NULL;
            int32_t drop = (turn + (int32_t)seed) % 4, len;
            bool due;

            if (turn % 3 == 0)
                ds4_sched_pump(rig.sched, rig.now_ns); /* run-ahead is posted */
            for (size_t i = 0; i < rig.sched->seqs.len; i++)
                if (rig.sched->seqs.ptr[i]->req == client->req)
                    seq = rig.sched->seqs.ptr[i];
            due = seq != NULL && seq->state == DS4_SEQ_DECODE &&
                  turn % (7 + (int32_t)seed % 9) == 0 && client->out.len > 4;
            len = due ? (int32_t)seq->token.len : 0;
            n_in_flight += due && seq->n_flight > 0;
            drop = due && len - drop < seq->n_prompt ? 0 : drop;
            if (due &&
                ds4_engine_splice(rig.sched, seq, drop, nudge, 1 + (int32_t)seed % 7, &err)) {
                n_cut += (int32_t)seq->token.len < len + 1 + (int32_t)seed % 7;
                from = client->out.len;
                max_pos = seq->max_pos;
                copy_tokens(&known, seq);
            }
            ds4_rig_turn(&rig);
        }
        ds4_rig_run(&rig);
        if (known.len > 0)
            assert_true(goes_on_from(client, from, &known, 80, max_pos));
        n_stopped += client->result.end == DS4_END_EOS;
        assert_true(client->result.end == DS4_END_EOS || client->result.end == DS4_END_LENGTH);
        assert_true(ds4_rig_is_right(other, 60));
        assert_clean(&rig);

        /* What is kept for the prefix is what was run. */
        if (known.len > 0) {
            struct ds4_rig_client *next =
                ds4_rig_client_of(&rig, known.ptr, (int32_t)known.len, 20);

            assert_int_equal(ds4_rig_submit(next, NULL, &err), 0);
            ds4_rig_run(&rig);
            assert_true(ds4_rig_is_right(next, 20));
            assert_true(next->cached >= (int32_t)known.len - 2);
            ds4_rig_client_free(next);
        }
        assert_clean(&rig);
        DS4_VEC_DEINIT(&known);
        ds4_rig_client_free(client);
        ds4_rig_client_free(other);
        ds4_rig_close(&rig);
    }
    assert_true(n_cut > 5 && n_in_flight > 20 && n_stopped > 0);
}

static void answers_that_come_late_change_nothing(void **state)
{
    struct ds4_rig rig;
    struct ds4_rig_client *client[6];
    uint32_t x = 7;

    (void)state;
    ds4_rig_open(&rig, &small);
    for (uint32_t c = 0; c < 6; c++)
        client[c] = submit(ds4_rig_client(&rig, c, 200, 40));
    for (int32_t turn = 0; turn < 2000; turn++) {
        x = x * 1664525u + 1013904223u;
        if (x >> 30 == 0)
            ds4_rig_turn(&rig);
        else
            ds4_sched_pump(rig.sched, rig.now_ns);
    }
    ds4_rig_run(&rig);
    for (int32_t c = 0; c < 6; c++) {
        assert_true(ds4_rig_is_right(client[c], 40));
        ds4_rig_client_free(client[c]);
    }
    assert_int_equal(rig.stage.max_queued, 2);
    assert_clean(&rig);
    ds4_rig_close(&rig);
}

static void a_step_posted_beyond_the_end_is_a_no_op(void **state)
{
    struct ds4_rig rig;
    struct ds4_rig_client *client;

    (void)state;
    ds4_rig_open(&rig, &small);
    for (uint32_t seed = 0; rig.stage.n_skipped == 0 && seed < 50; seed++) {
        client = submit(ds4_rig_client(&rig, seed, 20, 100));
        ds4_rig_run(&rig);
        assert_true(ds4_rig_is_right(client, 100));
        ds4_rig_client_free(client);
    }
    assert_true(rig.stage.n_skipped > 0);
    assert_clean(&rig);
    ds4_rig_close(&rig);
}

/* The conversation so far plus n more tokens. */
static struct ds4_rig_client *next_turn(struct ds4_rig *rig, const struct ds4_rig_client *before,
                                        int32_t n_more, int32_t max_new)
{
    struct ds4_rig_client *client;
    int32_t n = (int32_t)(before->prompt.len + before->out.len);
    int32_t *token = malloc(((size_t)n + (size_t)n_more) * sizeof(*token));
    struct ds4_err err = {0};

    memcpy(token, before->prompt.ptr, before->prompt.len * sizeof(*token));
    memcpy(token + before->prompt.len, before->out.ptr, before->out.len * sizeof(*token));
    for (int32_t t = 0; t < n_more; t++)
        token[n + t] = (t * 7 + 3) % DS4_RIG_VOCAB;
    client = ds4_rig_client_of(rig, token, n + n_more, max_new);
    free(token);
    assert_int_equal(ds4_rig_submit(client, NULL, &err), 0);
    return client;
}

static void the_next_turn_computes_only_what_is_new(void **state)
{
    struct ds4_rig rig;
    struct ds4_rig_client *turn[10];
    uint64_t rows;

    (void)state;
    ds4_rig_open(&rig, &small);
    turn[0] = submit(ds4_rig_client(&rig, 3, 500, 20));
    ds4_rig_run(&rig);
    for (int32_t i = 1; i < 10; i++) {
        int32_t known = (int32_t)(turn[i - 1]->prompt.len + turn[i - 1]->out.len);

        rows = rig.stage.n_rows;
        turn[i] = next_turn(&rig, turn[i - 1], 15, 20);
        ds4_rig_run(&rig);
        /* The newest token of an answer was sampled but never run. */
        assert_int_equal(turn[i]->cached, known - 1);
        assert_int_equal(turn[i]->result.usage.cached_tok, known - 1);
        assert_true(rig.stage.n_rows - rows <= 16 + 20);
        assert_true(ds4_rig_is_right(turn[i], 20));
    }
    for (int32_t i = 0; i < 10; i++)
        ds4_rig_client_free(turn[i]);
    assert_clean(&rig);
    ds4_rig_close(&rig);
}

static void a_turn_sent_at_once_waits_for_the_last_steps_of_the_one_before(void **state)
{
    struct ds4_rig rig;
    struct ds4_rig_client *a, *b;
    int32_t n_waited = 0;

    (void)state;
    for (uint32_t seed = 0; seed < 20; seed++) {
        struct ds4_sched_stats stats;

        ds4_rig_open(&rig, &small);
        a = submit(ds4_rig_client(&rig, seed, 400, 300));
        while (a->n_done == 0)
            ds4_rig_turn(&rig);
        ds4_sched_stats(rig.sched, &stats);
        n_waited += stats.draining;
        b = next_turn(&rig, a, 10, 5);
        ds4_rig_run(&rig);
        assert_int_equal(b->cached, (int)(a->prompt.len + a->out.len) - 1);
        assert_true(ds4_rig_is_right(b, 5));
        assert_clean(&rig);
        ds4_rig_client_free(a);
        ds4_rig_client_free(b);
        ds4_rig_close(&rig);
    }
    assert_true(n_waited > 0);
}

static void a_regenerated_answer_runs_one_prompt_token(void **state)
{
    struct ds4_rig rig;
    struct ds4_rig_client *a, *b;

    (void)state;
    ds4_rig_open(&rig, &small);
    a = submit(ds4_rig_client(&rig, 9, 1000, 60));
    ds4_rig_run(&rig);
    b = submit(ds4_rig_client(&rig, 9, 1000, 60));
    ds4_rig_run(&rig);
    assert_int_equal(b->cached, 999);
    assert_true(ds4_rig_is_right(b, 60));
    assert_clean(&rig);
    ds4_rig_client_free(a);
    ds4_rig_client_free(b);
    ds4_rig_close(&rig);
}

static void a_cut_below_the_hot_window_starts_over(void **state)
{
    struct ds4_rig rig;
    struct ds4_rig_client *a, *b;

    (void)state;
    ds4_rig_open(&rig, &small);
    a = submit(ds4_rig_client(&rig, 4, 1000, 10));
    ds4_rig_run(&rig);
    a->prompt.ptr[800] ^= 1;
    b = ds4_rig_client_of(&rig, a->prompt.ptr, 1000, 10);
    assert_int_equal(ds4_rig_submit(b, NULL, NULL), 0);
    ds4_rig_run(&rig);
    assert_int_equal(b->cached, 0);
    assert_true(ds4_rig_is_right(b, 10));
    assert_clean(&rig);
    ds4_rig_client_free(a);
    ds4_rig_client_free(b);
    ds4_rig_close(&rig);
}

static void a_cancelled_decode_is_told_at_once_and_freed_after_its_steps(void **state)
{
    struct ds4_rig rig;
    struct ds4_rig_client *client;
    struct ds4_sched_stats stats;
    int32_t live;

    (void)state;
    ds4_rig_open(&rig, &small);
    client = submit(ds4_rig_client(&rig, 2, 300, 1000));
    for (int32_t i = 0; i < 8; i++)
        ds4_rig_turn(&rig);
    ds4_sched_pump(rig.sched, rig.now_ns);
    ds4_sched_stats(rig.sched, &stats);
    assert_int_equal(stats.inflight, 2);
    live = stats.blocks_live + stats.blocks_promised;
    ds4_sched_cancel(rig.sched, client->req, DS4_CANCEL_DISCONNECT, rig.now_ns);
    assert_int_equal(client->n_done, 1);
    assert_int_equal(client->result.end, DS4_END_CANCELLED);
    ds4_sched_stats(rig.sched, &stats);
    assert_int_equal(stats.draining, 1);
    assert_int_equal(stats.blocks_live + stats.blocks_promised, live);
    ds4_rig_turn(&rig);
    ds4_rig_turn(&rig);
    ds4_sched_stats(rig.sched, &stats);
    assert_int_equal(stats.draining, 0);
    assert_int_equal(stats.idle, 1);
    assert_int_equal(stats.blocks_promised, 0);
    assert_clean(&rig);
    ds4_rig_client_free(client);
    ds4_rig_close(&rig);
}

static void a_cancelled_prefill_leaves_its_chunks_to_the_next_request(void **state)
{
    struct ds4_rig rig;
    struct ds4_rig_client *a, *b;

    (void)state;
    ds4_rig_open(&rig, &small);
    a = submit(ds4_rig_client(&rig, 2, 2000, 10));
    ds4_rig_turn(&rig);
    ds4_rig_turn(&rig);
    ds4_sched_pump(rig.sched, rig.now_ns);
    ds4_sched_cancel(rig.sched, a->req, DS4_CANCEL_DISCONNECT, rig.now_ns);
    ds4_rig_run(&rig);
    b = submit(ds4_rig_client(&rig, 2, 2000, 10));
    ds4_rig_run(&rig);
    assert_int_equal(b->cached, 4 * 256); /* two acknowledged, two were posted */
    assert_true(ds4_rig_is_right(b, 10));
    assert_clean(&rig);
    ds4_rig_client_free(a);
    ds4_rig_client_free(b);
    ds4_rig_close(&rig);
}

static void callbacks_may_cancel_themselves_and_others(void **state)
{
    struct ds4_rig rig;
    struct ds4_rig_client *client[4];

    (void)state;
    ds4_rig_open(&rig, &small);
    for (uint32_t c = 0; c < 4; c++)
        client[c] = submit(ds4_rig_client(&rig, 20 + c, 40, 200));
    client[0]->cancel_after = 3;
    client[1]->cancel_other = client[2];
    client[3]->cancel_other = client[1];
    ds4_rig_run(&rig);
    for (int32_t c = 0; c < 4; c++)
        assert_int_equal(client[c]->n_done, 1);
    assert_int_equal(client[0]->result.end, DS4_END_CANCELLED);
    assert_int_equal((int)client[0]->out.len, 3);
    assert_int_equal(client[2]->result.end, DS4_END_CANCELLED);
    assert_int_equal(client[1]->result.end, DS4_END_CANCELLED);
    assert_true(ds4_rig_is_right(client[3], 200));
    for (int32_t c = 0; c < 4; c++)
        ds4_rig_client_free(client[c]);
    assert_clean(&rig);
    ds4_rig_close(&rig);
}

static void a_full_queue_refuses_and_a_late_one_times_out(void **state)
{
    struct ds4_rig_shape shape = small;
    struct ds4_rig rig;
    struct ds4_rig_client *client[4];
    enum ds4_reason reason;
    struct ds4_err err = {0};
    int32_t wait_ms = 0;

    (void)state;
    shape.config.max_seqs = 1;
    shape.config.queue_max = 2;
    shape.config.queue_ms = 5000;
    ds4_rig_open(&rig, &shape);
    client[0] = submit(ds4_rig_client(&rig, 1, 100, 3000));
    ds4_rig_turn(&rig);
    client[1] = submit(ds4_rig_client(&rig, 2, 100, 10));
    client[2] = submit(ds4_rig_client(&rig, 3, 100, 10));
    client[3] = ds4_rig_client(&rig, 4, 100, 10);
    assert_int_equal(
        ds4_sched_submit(rig.sched, client[3]->req, rig.now_ns, &reason, &wait_ms, &err), -1);
    assert_int_equal(reason, DS4_REASON_QUEUE_FULL);
    assert_int_equal(err.code, DS4_E_BUSY);
    assert_true(wait_ms >= 1000);
    rig.now_ns += 5 * DS4_NS_PER_SEC;
    ds4_sched_pump(rig.sched, rig.now_ns);
    assert_int_equal(client[1]->n_done, 1);
    assert_int_equal(client[1]->result.reason, DS4_REASON_QUEUE_TIMEOUT);
    assert_int_equal(client[1]->result.err.code, DS4_E_TIMEOUT);
    assert_int_equal(client[3]->n_done, 0);
    ds4_sched_cancel(rig.sched, client[0]->req, DS4_CANCEL_API, rig.now_ns);
    ds4_rig_run(&rig);
    for (int32_t c = 0; c < 4; c++)
        ds4_rig_client_free(client[c]);
    assert_clean(&rig);
    ds4_rig_close(&rig);
}

static void what_can_never_run_is_refused_at_once_with_the_right_name(void **state)
{
    struct ds4_rig_shape shape = small;
    struct ds4_rig rig;
    struct ds4_rig_client *client;
    enum ds4_reason reason;
    struct ds4_err err = {0};

    (void)state;
    shape.n_blocks = 10; /* the context says 4096 tokens, the cache holds 2560 */
    ds4_rig_open(&rig, &shape);
    client = ds4_rig_client(&rig, 1, 2000, 1000);
    assert_int_equal(ds4_rig_submit(client, &reason, &err), -1);
    assert_int_equal(reason, DS4_REASON_KV_CAPACITY);
    assert_int_equal(err.code, DS4_E_INVALID);
    assert_non_null(strstr(err.msg, "needs 12 cache blocks"));
    ds4_rig_client_free(client);

    client = ds4_rig_client(&rig, 1, 4096, 1);
    assert_int_equal(ds4_rig_submit(client, &reason, &err), -1);
    assert_int_equal(reason, DS4_REASON_CONTEXT);
    assert_int_equal(err.code, DS4_E_TOO_LONG);
    ds4_rig_client_free(client);

    client = ds4_rig_client(&rig, 1, 10, 1);
    client->prompt.ptr[3] = DS4_RIG_VOCAB;
    assert_int_equal(ds4_request_set_prompt(client->req, client->prompt.ptr, 10, &err), 0);
    assert_int_equal(ds4_rig_submit(client, &reason, &err), -1);
    assert_int_equal(reason, DS4_REASON_INVALID);
    ds4_rig_client_free(client);
    assert_clean(&rig);
    ds4_rig_close(&rig);
}

static void max_new_is_cut_to_the_context_and_the_end_says_so(void **state)
{
    struct ds4_rig rig;
    struct ds4_rig_client *client;

    (void)state;
    for (uint32_t seed = 0;; seed++) {
        ds4_rig_open(&rig, &small);
        client = submit(ds4_rig_client(&rig, seed, 4094, 384000));
        assert_true(client->req->max_new_reduced);
        assert_int_equal(client->req->max_new, 2);
        ds4_rig_run(&rig);
        assert_true(ds4_rig_is_right(client, 2));
        if (client->out.len == 2 && client->out.ptr[1] != DS4_RIG_STOP_ID)
            break;
        ds4_rig_client_free(client);
        ds4_rig_close(&rig);
    }
    assert_int_equal(client->result.end, DS4_END_CONTEXT);
    assert_clean(&rig);
    ds4_rig_client_free(client);
    ds4_rig_close(&rig);
}

static void waiting_for_blocks_is_not_an_error(void **state)
{
    struct ds4_rig_shape shape = small;
    struct ds4_rig rig;
    struct ds4_rig_client *client[5];
    struct ds4_sched_stats stats;
    uint64_t digest;

    (void)state;
    shape.n_blocks = 9; /* two requests of four blocks and the probe */
    ds4_rig_open(&rig, &shape);
    for (uint32_t c = 0; c < 5; c++)
        client[c] = submit(ds4_rig_client(&rig, c, 600, 400));
    ds4_sched_pump(rig.sched, rig.now_ns);
    ds4_sched_stats(rig.sched, &stats);
    assert_int_equal(stats.queued, 3);
    assert_int_equal(stats.prefilling, 2);
    digest = ds4_budget_digest(rig.sched->budget);
    assert_true(rig.sched->head_waits);
    rig.sched->head_waits = false;
    ds4_sched_pump(rig.sched, rig.now_ns); /* refused again: nothing moves */
    assert_true(rig.sched->head_waits);
    assert_true(digest == ds4_budget_digest(rig.sched->budget));
    ds4_rig_run(&rig);
    for (int32_t c = 0; c < 5; c++) {
        assert_true(ds4_rig_is_right(client[c], 400));
        ds4_rig_client_free(client[c]);
    }
    assert_clean(&rig);
    ds4_rig_close(&rig);
}

static void a_row_that_is_not_finite_ends_that_sequence_only(void **state)
{
    struct ds4_rig rig;
    struct ds4_rig_client *a, *b;
    struct ds4_sched_stats stats;

    (void)state;
    ds4_rig_open(&rig, &small);
    a = submit(ds4_rig_client(&rig, 31, 50, 300));
    b = submit(ds4_rig_client(&rig, 32, 50, 300));
    for (int32_t i = 0; i < 6; i++)
        ds4_rig_turn(&rig);
    rig.stage.nonfinite_seq = a->req->seq;
    ds4_rig_run(&rig);
    assert_int_equal(a->result.end, DS4_END_ERROR);
    assert_int_equal(a->result.reason, DS4_REASON_INTERNAL);
    assert_int_equal(a->result.err.code, DS4_E_CORRUPT);
    assert_true(ds4_rig_is_right(b, 300));
    ds4_sched_stats(rig.sched, &stats);
    assert_int_equal(stats.idle, 1); /* spoiled rows are not kept */
    assert_clean(&rig);
    ds4_rig_client_free(a);
    ds4_rig_client_free(b);
    ds4_rig_close(&rig);
}

static void a_lost_generation_fails_the_running_and_keeps_the_waiting(void **state)
{
    struct ds4_rig_shape shape = small;
    struct ds4_rig rig;
    struct ds4_rig_client *a, *b, *c;
    struct ds4_err why = {.code = DS4_E_UNAVAILABLE, .msg = "stage 1 is lost"};
    struct ds4_sched_stats stats;

    (void)state;
    shape.config.max_seqs = 2;
    ds4_rig_open(&rig, &shape);
    a = submit(ds4_rig_client(&rig, 41, 100, 500)); /* will be decoding */
    for (int32_t i = 0; i < 5; i++)
        ds4_rig_turn(&rig);
    b = submit(ds4_rig_client(&rig, 42, 3000, 10)); /* will be in prefill */
    c = submit(ds4_rig_client(&rig, 43, 100, 30));  /* will be waiting */
    ds4_rig_turn(&rig);
    ds4_sched_stop(rig.sched, DS4_REASON_RESTARTED, &why, rig.now_ns);
    assert_int_equal(a->n_done, 1);
    assert_int_equal(b->n_done, 1);
    assert_int_equal(c->n_done, 0);
    assert_int_equal(a->result.reason, DS4_REASON_RESTARTED);
    assert_string_equal(b->result.err.msg, "stage 1 is lost");
    ds4_sched_pump(rig.sched, rig.now_ns);
    ds4_sched_stats(rig.sched, &stats);
    assert_int_equal(stats.queued, 1);
    ds4_rig_start(&rig);
    ds4_rig_run(&rig);
    assert_int_equal(c->n_done, 1);
    assert_true(ds4_rig_is_right(c, 30));
    assert_clean(&rig);
    ds4_rig_client_free(a);
    ds4_rig_client_free(b);
    ds4_rig_client_free(c);
    ds4_rig_close(&rig);
}

/* The record is checked entry by entry, and the last one is wrong: tokens of those before it were taken, and
 * nobody was told. */
static void tokens_of_a_refused_record_are_not_missing_after_a_replay(void **state)
{
    const struct ds4_err why = {.code = DS4_E_UNAVAILABLE, .msg = "the stages disagree"};
    struct ds4_rig_shape shape = small;
    struct ds4_rig_client *client[2];
    struct ds4_token_entry entry[2];
    struct ds4_tokens_out out = {0};
    struct ds4_err err = {0};
    struct ds4_rig rig;

    (void)state;
    shape.n_stage = 1; /* both decode in one step */
    shape.max_draft = 4;
    shape.config.replay = true;
    ds4_rig_open(&rig, &shape);
    client[0] = submit(ds4_rig_client(&rig, 41, 100, 60));
    client[1] = submit(ds4_rig_client(&rig, 42, 100, 60));
    for (int32_t turn = 0; turn < 6; turn++)
        assert_true(ds4_rig_turn(&rig));
    do {
        ds4_sched_pump(rig.sched, rig.now_ns);
        if (out.n_entry == 1)
            assert_int_equal(ds4_sched_tokens(rig.sched, &out, rig.now_ns, &err), 0);
        assert_true(ds4_scripted_answer(&rig.stage, &out));
    } while (out.n_entry == 1);
    assert_int_equal(out.n_entry, 2);
    assert_true(out.entry[0].n_token > 0);
    memcpy(entry, out.entry, sizeof(entry));
    entry[1].epoch++;
    out.entry = entry;
    assert_int_equal(ds4_sched_tokens(rig.sched, &out, rig.now_ns, &err), -1);
    ds4_sched_stop(rig.sched, DS4_REASON_RESTARTED, &why, rig.now_ns);
    ds4_rig_start(&rig);
    ds4_rig_run(&rig);
    assert_clean(&rig);
    for (int32_t i = 0; i < 2; i++) {
        assert_int_equal(client[i]->n_done, 1);
        assert_true(ds4_rig_is_right(client[i], 60));
        ds4_rig_client_free(client[i]);
    }
    ds4_rig_close(&rig);
}

static void an_answer_that_was_not_asked_for_is_a_broken_protocol(void **state)
{
    struct ds4_rig rig;
    struct ds4_rig_client *client;
    struct ds4_tokens_out out, bad;
    struct ds4_token_entry entry;
    struct ds4_err err = {0};

    (void)state;
    ds4_rig_open(&rig, &small);
    client = submit(ds4_rig_client(&rig, 1, 20, 20));
    ds4_sched_pump(rig.sched, rig.now_ns);
    assert_true(ds4_scripted_answer(&rig.stage, &out));
    entry = out.entry[0];
    bad = out;
    bad.entry = &entry;

    bad.step_no = out.step_no + 1;
    assert_int_equal(ds4_sched_tokens(rig.sched, &bad, rig.now_ns, &err), -1);
    bad.step_no = out.step_no;
    bad.generation++;
    assert_int_equal(ds4_sched_tokens(rig.sched, &bad, rig.now_ns, &err), -1);
    bad.generation--;
    bad.n_entry = 2;
    assert_int_equal(ds4_sched_tokens(rig.sched, &bad, rig.now_ns, &err), -1);
    bad.n_entry = 1;
    entry.pos++;
    assert_int_equal(ds4_sched_tokens(rig.sched, &bad, rig.now_ns, &err), -1);
    entry.pos--;
    entry.epoch++;
    assert_int_equal(ds4_sched_tokens(rig.sched, &bad, rig.now_ns, &err), -1);
    entry.epoch--;
    entry.token[0] = DS4_RIG_VOCAB;
    assert_int_equal(ds4_sched_tokens(rig.sched, &bad, rig.now_ns, &err), -1);
    assert_int_equal(err.code, DS4_E_PROTOCOL);
    assert_int_equal((int)client->out.len, 0);
    entry.token[0] = out.entry[0].token[0];
    assert_int_equal(ds4_sched_tokens(rig.sched, &bad, rig.now_ns, &err), 0);
    assert_int_equal(ds4_sched_tokens(rig.sched, &bad, rig.now_ns, &err), -1); /* twice */
    ds4_rig_run(&rig);
    assert_true(ds4_rig_is_right(client, 20));
    ds4_rig_client_free(client);
    ds4_rig_close(&rig);
}

static void a_newcomer_is_served_beside_a_long_prompt(void **state)
{
    struct ds4_rig_shape shape = small;
    struct ds4_rig rig;
    struct ds4_rig_client *hog, *late;
    struct ds4_sched_stats before, after;

    (void)state;
    shape.n_stage = 4;
    shape.n_blocks = 300;
    shape.context_tok = 65536;
    ds4_rig_open(&rig, &shape);
    hog = submit(ds4_rig_client(&rig, 1, 50000, 10));
    for (int32_t i = 0; i < 20; i++)
        ds4_rig_turn(&rig);
    late = submit(ds4_rig_client(&rig, 2, 60, 10));
    ds4_sched_stats(rig.sched, &before);
    while (late->out.len == 0)
        ds4_rig_turn(&rig);
    ds4_sched_stats(rig.sched, &after);
    assert_true(after.steps_done - before.steps_done <= 3 * 4); /* in flight, its turn, its way */
    ds4_rig_run(&rig);
    assert_true(ds4_rig_is_right(hog, 10));
    assert_true(ds4_rig_is_right(late, 10));
    assert_clean(&rig);
    ds4_rig_client_free(hog);
    ds4_rig_client_free(late);
    ds4_rig_close(&rig);
}

static void an_idle_cluster_is_probed_every_ten_seconds(void **state)
{
    struct ds4_rig rig;
    struct ds4_sched_stats stats;
    struct ds4_rig_client *client;

    (void)state;
    ds4_rig_open(&rig, &small);
    assert_true(ds4_rig_turn(&rig)); /* the first at once */
    assert_false(ds4_rig_turn(&rig));
    ds4_sched_stats(rig.sched, &stats);
    assert_int_equal(stats.last_token_ns, rig.now_ns - DS4_NS_PER_MS);
    rig.now_ns += 9 * DS4_NS_PER_SEC;
    assert_false(ds4_rig_turn(&rig));
    for (int32_t i = 0; i < 5; i++) {
        rig.now_ns += 10 * DS4_NS_PER_SEC;
        assert_true(ds4_rig_turn(&rig));
        assert_false(ds4_rig_turn(&rig));
    }
    client = submit(ds4_rig_client(&rig, 1, 100, 20));
    ds4_rig_run(&rig);
    assert_true(ds4_rig_is_right(client, 20));
    assert_clean(&rig);
    ds4_rig_client_free(client);
    ds4_rig_close(&rig);
}

static void a_paused_sequence_waits_and_goes_on(void **state)
{
    struct ds4_sched_stats stats;
    struct ds4_rig rig;
    struct ds4_rig_client *a, *b;
    size_t len;

    (void)state;
    ds4_rig_open(&rig, &small);
    a = submit(ds4_rig_client(&rig, 51, 50, 100));
    b = submit(ds4_rig_client(&rig, 52, 50, 100));
    for (int32_t i = 0; i < 6; i++)
        ds4_rig_turn(&rig);
    ds4_sched_pause(rig.sched, a->req, true);
    for (int32_t i = 0; i < 3; i++)
        ds4_rig_turn(&rig);
    len = a->out.len;
    for (int32_t i = 0; i < 10; i++)
        ds4_rig_turn(&rig);
    assert_int_equal((int)a->out.len, (int)len);
    ds4_sched_stats(rig.sched, &stats);
    assert_int_equal(stats.parked, 1); /* what stands still is not counted as decoding */
    assert_int_equal(stats.decoding, 1);
    ds4_sched_pause(rig.sched, a->req, false);
    ds4_rig_run(&rig);
    assert_true(ds4_rig_is_right(a, 100));
    assert_true(ds4_rig_is_right(b, 100));
    assert_clean(&rig);
    ds4_rig_client_free(a);
    ds4_rig_client_free(b);
    ds4_rig_close(&rig);
}

static void a_step_without_answer_is_noticed(void **state)
{
    struct ds4_rig rig;
    struct ds4_rig_client *client;
    struct ds4_err err = {0};

    (void)state;
    ds4_rig_open(&rig, &small);
    client = submit(ds4_rig_client(&rig, 1, 20, 20));
    ds4_sched_pump(rig.sched, rig.now_ns);
    rig.now_ns += 119 * DS4_NS_PER_SEC;
    assert_int_equal(ds4_sched_check_step(rig.sched, rig.now_ns, &err), 0);
    rig.now_ns += 1 * DS4_NS_PER_SEC;
    assert_int_equal(ds4_sched_check_step(rig.sched, rig.now_ns, &err), -1);
    assert_int_equal(err.code, DS4_E_TIMEOUT);
    ds4_sched_cancel(rig.sched, client->req, DS4_CANCEL_API, rig.now_ns);
    ds4_rig_client_free(client);
    ds4_rig_close(&rig);
}

static void a_step_that_cannot_be_sent_ends_the_generation(void **state)
{
    struct ds4_rig rig;
    struct ds4_rig_client *client;
    struct ds4_err err = {0};

    (void)state;
    ds4_rig_open(&rig, &small);
    client = submit(ds4_rig_client(&rig, 1, 20, 20));
    rig.stage.fail_sends = 1;
    ds4_sched_pump(rig.sched, rig.now_ns);
    assert_int_equal(ds4_sched_check_step(rig.sched, rig.now_ns, &err), -1);
    assert_int_equal(err.code, DS4_E_IO);
    ds4_sched_stop(rig.sched, DS4_REASON_RESTARTED, &err, rig.now_ns);
    assert_int_equal(client->n_done, 1);
    ds4_rig_client_free(client);
    ds4_rig_close(&rig);
}

static void a_side_request_does_not_push_out_a_long_conversation(void **state)
{
    struct ds4_rig rig;
    struct ds4_rig_client *a, *side, *b;

    (void)state;
    ds4_rig_open(&rig, &small);
    a = submit(ds4_rig_client(&rig, 61, 3000, 10));
    ds4_rig_run(&rig);
    side = ds4_rig_client_of(&rig, a->prompt.ptr, 27, 10);
    assert_int_equal(ds4_rig_submit(side, NULL, NULL), 0);
    ds4_rig_run(&rig);
    b = next_turn(&rig, a, 20, 10);
    ds4_rig_run(&rig);
    assert_int_equal(b->cached, (int)(a->prompt.len + a->out.len) - 1);
    assert_true(ds4_rig_is_right(b, 10));
    assert_clean(&rig);
    ds4_rig_client_free(a);
    ds4_rig_client_free(side);
    ds4_rig_client_free(b);
    ds4_rig_close(&rig);
}

/* Everything at once for a long time: random lengths, shared prefixes, cancels, pauses, lost
 * generations, a cache that is always too small. */
static void churn_keeps_the_books_and_the_tokens_right(void **state)
{
    struct ds4_rig_shape shape = {
        .n_stage = 3,
        .n_blocks = 30,
        .n_slots = 8,
        .context_tok = 4096,
        .config = {.max_seqs = 5, .chunk_tok = 384, .queue_max = 6},
    };
    struct ds4_rig_client *client[8] = {0};
    int32_t max_new[8] = {0};
    bool broken[8] = {false};
    struct ds4_err why = {.code = DS4_E_UNAVAILABLE};
    struct ds4_sched_stats stats;
    struct ds4_rig rig;
    uint32_t x = 99;
    int32_t n_done = 0, n_cached = 0;

    (void)state;
    ds4_rig_open(&rig, &shape);
    for (int32_t turn = 0; turn < 30000; turn++) {
        int32_t c;

        x = x * 1664525u + 1013904223u;
        c = (int32_t)(x >> 8) % 8;
        if (c < 0)
            c = -c;
        if (client[c] == NULL) {
            int32_t n = 1 + (int32_t)(x >> 12) % 1500;

            max_new[c] = 1 + (int32_t)(x >> 5) % 120;
            client[c] = ds4_rig_client(&rig, (x >> 20) % 3, n, max_new[c]);
            broken[c] = ds4_rig_submit(client[c], NULL, NULL) != 0;
            if (broken[c])
                client[c]->n_done = 1;
        } else if (client[c]->n_done == 1) {
            n_cached += client[c]->cached > 0;
            if (!broken[c] && client[c]->result.end < DS4_END_ERROR) {
                assert_true(ds4_rig_is_right(client[c], max_new[c]));
                n_done++;
            }
            ds4_rig_client_free(client[c]);
            client[c] = NULL;
        } else if (x >> 27 == 0) {
            ds4_sched_cancel(rig.sched, client[c]->req, DS4_CANCEL_DISCONNECT, rig.now_ns);
        } else if (x >> 27 == 1) {
            ds4_sched_pause(rig.sched, client[c]->req, (x >> 9) % 2 == 0);
        }
        if (turn % 7000 == 6999) {
            ds4_sched_stop(rig.sched, DS4_REASON_RESTARTED, &why, rig.now_ns);
            ds4_rig_start(&rig);
        }
        if ((x >> 16) % 3 != 0)
            ds4_rig_turn(&rig);
        if (turn % 16 == 0)
            assert_clean(&rig);
    }
    for (int32_t c = 0; c < 8; c++)
        if (client[c] != NULL) {
            if (client[c]->n_done == 0)
                ds4_sched_cancel(rig.sched, client[c]->req, DS4_CANCEL_SHUTDOWN, rig.now_ns);
            ds4_rig_client_free(client[c]);
        }
    ds4_rig_run(&rig);
    ds4_sched_stats(rig.sched, &stats);
    assert_int_equal(stats.blocks_promised, 0);
    assert_int_equal(stats.blocks_live, 1); /* the probe's */
    assert_int_equal(
        stats.blocks_free + stats.blocks_cached + stats.blocks_live + stats.blocks_promised, 30);
    assert_true(n_done > 300);
    assert_true(n_cached > 30);
    assert_clean(&rig);
    ds4_rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_request_gets_the_tokens_of_the_model),
        cmocka_unit_test(the_answer_ends_at_max_new_and_says_length),
        cmocka_unit_test(sixteen_sequences_equal_solo_runs_on_one_to_four_stages),
        cmocka_unit_test(a_splice_goes_on_from_exactly_its_tokens),
        cmocka_unit_test(answers_that_come_late_change_nothing),
        cmocka_unit_test(a_step_posted_beyond_the_end_is_a_no_op),
        cmocka_unit_test(the_next_turn_computes_only_what_is_new),
        cmocka_unit_test(a_turn_sent_at_once_waits_for_the_last_steps_of_the_one_before),
        cmocka_unit_test(a_regenerated_answer_runs_one_prompt_token),
        cmocka_unit_test(a_cut_below_the_hot_window_starts_over),
        cmocka_unit_test(a_cancelled_decode_is_told_at_once_and_freed_after_its_steps),
        cmocka_unit_test(a_cancelled_prefill_leaves_its_chunks_to_the_next_request),
        cmocka_unit_test(callbacks_may_cancel_themselves_and_others),
        cmocka_unit_test(a_full_queue_refuses_and_a_late_one_times_out),
        cmocka_unit_test(what_can_never_run_is_refused_at_once_with_the_right_name),
        cmocka_unit_test(max_new_is_cut_to_the_context_and_the_end_says_so),
        cmocka_unit_test(waiting_for_blocks_is_not_an_error),
        cmocka_unit_test(a_row_that_is_not_finite_ends_that_sequence_only),
        cmocka_unit_test(a_lost_generation_fails_the_running_and_keeps_the_waiting),
        cmocka_unit_test(tokens_of_a_refused_record_are_not_missing_after_a_replay),
        cmocka_unit_test(an_answer_that_was_not_asked_for_is_a_broken_protocol),
        cmocka_unit_test(a_newcomer_is_served_beside_a_long_prompt),
        cmocka_unit_test(an_idle_cluster_is_probed_every_ten_seconds),
        cmocka_unit_test(a_paused_sequence_waits_and_goes_on),
        cmocka_unit_test(a_step_without_answer_is_noticed),
        cmocka_unit_test(a_step_that_cannot_be_sent_ends_the_generation),
        cmocka_unit_test(a_side_request_does_not_push_out_a_long_conversation),
        cmocka_unit_test(churn_keeps_the_books_and_the_tokens_right),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Overcommit and who gives way (router/sched/grow.c), and what each fault of room leads to. */
#include "common/fault.h"
#include "router/sched/engine.h"
#include "tests/support/sched_asserts.h"
#include "tests/support/sched_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define N_CLIENT   6
#define PROMPT_TOK 200
#define ANSWER_TOK 1200

static const struct ds4_rig_shape tight = {
    .n_stage = 2,
    .n_blocks = 16,
    .n_slots = 8,
    .context_tok = 3000,
    .n_points = 400,
    .config = {.max_seqs = N_CLIENT, .chunk_tok = 512, .overcommit = 200},
};

static struct ds4_rig_client *endless(struct ds4_rig *rig, uint32_t seed)
{
    struct ds4_rig_client *client = ds4_rig_client(rig, seed, PROMPT_TOK, ANSWER_TOK);

    client->req->n_stop_id = 0;
    client->req->n_model_stop_id = 0;
    assert_int_equal(ds4_rig_submit(client, NULL, NULL), 0);
    return client;
}

/* Every so manieth token against the model: a wrong one changes all behind it. */
static void assert_right(const struct ds4_rig_client *client)
{
    static int32_t all[PROMPT_TOK + ANSWER_TOK];

    memcpy(all, client->prompt.ptr, PROMPT_TOK * sizeof(*all));
    memcpy(all + PROMPT_TOK, client->out.ptr, client->out.len * sizeof(*all));
    for (int32_t t = 0; t < (int32_t)client->out.len; t += 171)
        assert_int_equal(ds4_scripted_next(DS4_RIG_VOCAB, all, PROMPT_TOK + t), client->out.ptr[t]);
}

static uint64_t count_parked(const struct ds4_rig *rig)
{
    uint64_t n = 0;

    for (const struct ds4_request *req = rig->sched->head; req != NULL; req = req->next)
        n += req->parked;
    return n;
}

static void answers_that_outgrow_the_cache_wait_and_are_never_cut(void **state)
{
    struct ds4_rig_shape shape = tight;
    struct ds4_rig_client *c[N_CLIENT];
    uint64_t n_parked;
    struct ds4_rig rig;

    (void)state;
    for (shape.n_points = 0; shape.n_points <= 400; shape.n_points += 400) {
        shape.config.queue_ms = 50; /* who gave way waits for as long as it takes */
        ds4_rig_open(&rig, &shape);
        n_parked = 0;
        for (uint32_t i = 0; i < N_CLIENT; i++)
            c[i] = endless(&rig, 20 + i);
        do {
            n_parked += count_parked(&rig);
            assert_clean(&rig);
        } while (ds4_rig_turn(&rig));
        for (int32_t i = 0; i < N_CLIENT; i++) {
            assert_int_equal(c[i]->n_admitted, 1); /* said once */
            assert_int_equal(c[i]->result.end, DS4_END_LENGTH);
            assert_int_equal(c[i]->out.len, ANSWER_TOK);
            assert_right(c[i]);
            ds4_rig_client_free(c[i]);
        }
        ds4_rig_run(&rig);
        assert_clean(&rig);
        ds4_rig_close(&rig);
        assert_true(n_parked > 0);
    }
}

/* The same with clients that leave at odd moments, waiting ones too, and a generation that is lost while
 * somebody waits. */
static void who_waits_for_room_may_leave_or_see_another_generation(void **state)
{
    const struct ds4_err why = {.code = DS4_E_UNAVAILABLE, .msg = "lost"};
    struct ds4_rig_shape shape = tight;
    struct ds4_rig_client *c[N_CLIENT];
    uint32_t x = 7, n_left_waiting = 0;
    struct ds4_rig rig;

    (void)state;
    shape.config.replay = true;
    for (uint32_t round = 0; round < 12; round++) {
        ds4_rig_open(&rig, &shape);
        for (uint32_t i = 0; i < N_CLIENT; i++)
            c[i] = endless(&rig, 100 * round + i);
        for (int32_t turn = 0; ds4_rig_turn(&rig); turn++) {
            uint32_t who;

            x = x * 1664525u + 1013904223u;
            who = (x >> 20) % N_CLIENT;
            if (turn > 300 && (x >> 9) % 400 == 0 && c[who]->n_done == 0) {
                n_left_waiting += c[who]->req->parked;
                ds4_sched_cancel(rig.sched, c[who]->req, DS4_CANCEL_DISCONNECT, rig.now_ns);
            }
            if (round % 3 == 0 && turn == 2000 + (int32_t)round) {
                ds4_sched_stop(rig.sched, DS4_REASON_RESTARTED, &why, rig.now_ns);
                ds4_rig_start(&rig);
            }
            assert_clean(&rig);
        }
        ds4_rig_run(&rig);
        assert_clean(&rig);
        for (int32_t i = 0; i < N_CLIENT; i++) {
            assert_int_equal(c[i]->n_done, 1);
            assert_true(c[i]->result.end == DS4_END_CANCELLED || c[i]->out.len == ANSWER_TOK);
            assert_right(c[i]);
            ds4_rig_client_free(c[i]);
        }
        ds4_rig_close(&rig);
    }
    assert_true(n_left_waiting > 0);
}

/* Off, as it is unless asked for: nothing is promised twice. */
static void without_overcommit_nobody_ever_gives_way(void **state)
{
    struct ds4_rig_shape shape = tight;
    struct ds4_rig_client *c[N_CLIENT];
    struct ds4_rig rig;

    (void)state;
    shape.config.overcommit = 0;
    ds4_rig_open(&rig, &shape);
    for (uint32_t i = 0; i < N_CLIENT; i++)
        c[i] = endless(&rig, 20 + i);
    do {
        struct ds4_budget_sums sums;

        ds4_budget_sums(rig.sched->budget, &sums);
        assert_int_equal(sums.over, 0);
        assert_int_equal(count_parked(&rig), 0);
    } while (ds4_rig_turn(&rig));
    for (int32_t i = 0; i < N_CLIENT; i++) {
        assert_right(c[i]);
        ds4_rig_client_free(c[i]);
    }
    ds4_rig_close(&rig);
}

#ifdef DS4_FAULTS

static void set_fault(const char *text)
{
    struct ds4_err err = {0};

    assert_int_equal(ds4_fault_set(text, DS4_FAULT_ROUTER, &err), 0);
}

/* Three conversations, each continued from the middle of a block; whatever fails once, all answers are right
 * and the ledger balances. */
static void a_fault_of_room_costs_time_and_nothing_else(void **state)
{
    static const char *const fault[] = {
        "reserve_fail:2:router", "reserve_fail:3:router", "reserve_fail:5:router",
        "grow_fail:1:router",    "grow_fail:4:router",    "grow_fail:9:router",
        "cow_fail:1:router",     "cow_fail:2:router",     "cow_fail:1+:router",
    };

    (void)state;
    for (size_t f = 0; f < sizeof(fault) / sizeof(fault[0]); f++) {
        struct ds4_rig_shape shape = tight;
        struct ds4_rig rig;

        shape.config.overcommit = 0;
        set_fault(NULL);
        ds4_rig_open(&rig, &shape);
        set_fault(fault[f]);
        for (int32_t round = 0; round < 4; round++) {
            struct ds4_rig_client *c[3];

            for (uint32_t i = 0; i < 3; i++) { /* two of them the same, at once: one has to copy */
                c[i] = ds4_rig_client(&rig, 1 + i / 2, PROMPT_TOK + round * 37, 30);
                assert_int_equal(ds4_rig_submit(c[i], NULL, NULL), 0);
            }
            ds4_rig_run(&rig);
            for (int32_t i = 0; i < 3; i++) {
                assert_int_equal(c[i]->result.err.code, DS4_OK);
                assert_true(ds4_rig_is_right(c[i], 30));
                ds4_rig_client_free(c[i]);
            }
            assert_clean(&rig);
        }
        ds4_rig_close(&rig);
    }
    set_fault(NULL);
}

/* A request that finds no room although nothing runs is tried again, or hears so with the numbers. */
static void a_lone_request_that_is_refused_room_hears_so(void **state)
{
    struct ds4_rig_shape shape = tight;
    struct ds4_rig_client *client;
    struct ds4_rig rig;

    (void)state;
    shape.config.queue_ms = 30000;
    set_fault(NULL);
    ds4_rig_open(&rig, &shape);
    set_fault("reserve_fail:1+:router");
    client = ds4_rig_client(&rig, 1, PROMPT_TOK, 30);
    assert_int_equal(ds4_rig_submit(client, NULL, NULL), 0);
    for (int32_t i = 0; client->n_done == 0 && i < 1000; i++) {
        rig.now_ns += 100 * INT64_C(1000000);
        ds4_rig_turn(&rig);
    }
    assert_int_equal(client->result.reason, DS4_REASON_KV_CAPACITY);
    assert_non_null(strstr(client->result.err.msg, "need 1 cache blocks"));
    ds4_rig_client_free(client);
    set_fault(NULL);
    ds4_rig_run(&rig);
    assert_clean(&rig);
    ds4_rig_close(&rig);
}

#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_that_outgrow_the_cache_wait_and_are_never_cut),
        cmocka_unit_test(who_waits_for_room_may_leave_or_see_another_generation),
        cmocka_unit_test(without_overcommit_nobody_ever_gives_way),
#ifdef DS4_FAULTS
        cmocka_unit_test(a_fault_of_room_costs_time_and_nothing_else),
        cmocka_unit_test(a_lone_request_that_is_refused_room_hears_so),
#endif
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

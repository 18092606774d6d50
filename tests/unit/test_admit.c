/* Prompts with a common beginning that arrive together (router/sched/admit.c): one computes it, the others wait
 * for that, and nobody waits for ever.  And what is checked of every entry before it is posted. */
#include "common/metrics.h"
#include "router/sched/engine.h"
#include "tests/support/sched_asserts.h"
#include "tests/support/sched_rig.h"

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

static void change(int32_t *token, int32_t at)
{
    token[at] = (token[at] + 1) % DS4_RIG_VOCAB;
}

/* Equal prompts that arrive together: each computed all of it, as many times as there were places. */
static void prompts_that_arrive_together_are_computed_once(void **state)
{
    int32_t *token = tokens(14, 6000);
    struct ds4_rig_client *c[5], *other;
    struct ds4_rig rig;

    (void)state;
    ds4_rig_open(&rig, &roomy);
    for (int32_t i = 0; i < 3; i++)
        c[i] = submit(ds4_rig_client_of(&rig, token, 6000, 20));
    other = ds4_rig_client(&rig, 15, 300, 4); /* has nothing in common: does not wait */
    assert_int_equal(ds4_rig_submit(other, NULL, NULL), 0);
    c[3] = submit(ds4_rig_client_of(&rig, token, 3000, 20)); /* a part of it */
    change(token, 4500);
    c[4] = submit(ds4_rig_client_of(&rig, token, 5000, 20)); /* goes another way */
    while (other->n_done == 0)
        ds4_rig_turn(&rig);
    assert_true(c[0]->out.len < 20);
    ds4_rig_run(&rig);
    for (int32_t i = 0; i < 5; i++) {
        assert_true(ds4_rig_is_right(c[i], 20));
        ds4_rig_client_free(c[i]);
    }
    assert_true(ds4_rig_is_right(other, 4));
    ds4_rig_client_free(other);
    /* 6000 once, two rows of its twins, what lies behind an anchor, what differs, and the answers. */
    assert_true(rig.stage.n_rows < 6000 + 300 + 2 * 128 + 500 + 6 * 22);
    assert_clean(&rig);
    free(token);
    ds4_rig_close(&rig);
}

/* Who is waited for may go away, or take too long: the other one computes for itself. */
static void a_prompt_that_waits_for_another_does_not_wait_for_ever(void **state)
{
    struct ds4_rig_shape shape = roomy;
    int32_t *token = tokens(16, 8000);
    struct ds4_rig_client *c[2];
    struct ds4_rig rig;

    (void)state;
    shape.config.queue_ms = 1000;
    for (int32_t gone = 0; gone < 2; gone++) {
        ds4_rig_open(&rig, &shape);
        for (int32_t i = 0; i < 2; i++)
            c[i] = submit(ds4_rig_client_of(&rig, token, 8000, 8));
        for (int32_t i = 0; i < 4; i++)
            ds4_rig_turn(&rig);
        assert_int_equal(c[1]->n_admitted, 0);
        if (gone)
            ds4_sched_cancel(rig.sched, c[0]->req, DS4_CANCEL_DISCONNECT, rig.now_ns);
        else
            rig.now_ns += 600 * INT64_C(1000000);
        for (int32_t i = 0; i < 12 && c[1]->n_admitted == 0; i++)
            ds4_rig_turn(&rig);
        assert_int_equal(c[1]->n_admitted, 1);
        assert_true(c[1]->cached >= 1024); /* with what was there by then */
        ds4_rig_run(&rig);
        assert_true(ds4_rig_is_right(c[1], 8));
        assert_clean(&rig);
        for (int32_t i = 0; i < 2; i++)
            ds4_rig_client_free(c[i]);
        ds4_rig_close(&rig);
    }
    free(token);
}

/* They have places: a full queue is one of requests that wait for a place. */
static void who_waits_for_rows_does_not_fill_the_queue(void **state)
{
    struct ds4_rig_shape shape = roomy;
    int32_t *token = tokens(17, 4000);
    struct ds4_rig_client *c[5], *late;
    struct ds4_err err = {0};
    struct ds4_rig rig;

    (void)state;
    shape.config.queue_max = 2;
    ds4_rig_open(&rig, &shape);
    for (int32_t i = 0; i < 4; i++) {
        c[i] = submit(ds4_rig_client_of(&rig, token, 4000 - i, 8));
        ds4_sched_pump(rig.sched, rig.now_ns);
    }
    assert_int_equal(rig.sched->n_running, 1);
    c[4] = ds4_rig_client(&rig, 18, 100, 8);
    assert_int_equal(ds4_rig_submit(c[4], NULL, &err), 0);
    late = ds4_rig_client(&rig, 19, 100, 8);
    assert_int_equal(ds4_rig_submit(late, NULL, &err), 0);
    ds4_rig_run(&rig);
    for (int32_t i = 0; i < 5; i++) {
        assert_true(ds4_rig_is_right(c[i], 8));
        ds4_rig_client_free(c[i]);
    }
    assert_true(ds4_rig_is_right(late, 8));
    ds4_rig_client_free(late);
    assert_clean(&rig);
    free(token);
    ds4_rig_close(&rig);
}

/* The slot of an answer that has just ended could not be given up before the next step: a session's next prompt
 * pushed out another session instead. */
static void an_idle_rig_soon_saves_the_state_of_its_slots(void **state)
{
    struct ds4_rig_client *client;
    int32_t *token = tokens(21, 500);
    struct ds4_rig rig;
    int64_t step;

    (void)state;
    ds4_rig_open(&rig, &roomy);
    client = submit(ds4_rig_client_of(&rig, token, 500, 3));
    ds4_rig_run(&rig);
    ds4_rig_client_free(client);
    assert_true(rig.sched->points.wanted.len > 0);
    rig.now_ns += 30 * INT64_C(1000000);
    while (ds4_rig_turn(&rig))
        ;
    assert_int_equal(rig.sched->points.wanted.len, 0);
    step = rig.sched->next_step;
    rig.now_ns += 500 * INT64_C(1000000);
    while (ds4_rig_turn(&rig)) /* and that was all */
        ;
    assert_true(rig.sched->next_step == step);
    assert_clean(&rig);
    free(token);
    ds4_rig_close(&rig);
}

/* Each is wrong on purpose: the step is not sent, the generation is over, and it is counted. */
static void a_broken_invariant_stops_the_step_and_is_counted(void **state)
{
    static const char *const id[] = {"I2", "I7", "I8"};

    (void)state;
    for (size_t i = 0; i < sizeof(id) / sizeof(id[0]); i++) {
        struct ds4_rig_shape shape = roomy;
        struct ds4_rig_client *client;
        struct ds4_err err = {0};
        struct ds4_seq *seq;
        struct ds4_rig rig;
        int64_t sent;

        shape.config.metrics = ds4_metrics_new("m", &err);
        assert_non_null(shape.config.metrics);
        ds4_rig_open(&rig, &shape);
        client = ds4_rig_client(&rig, 30, 300, 400);
        client->req->n_stop_id = 0;
        client->req->n_model_stop_id = 0;
        assert_int_equal(ds4_rig_submit(client, NULL, NULL), 0);
        while (client->out.len < 8)
            ds4_rig_turn(&rig);
        assert_int_equal(ds4_sched_check_step(rig.sched, rig.now_ns, &err), 0);
        seq = rig.sched->batch.group[0].member.ptr[0];
        if (i == 0)
            ((struct ds4_kv_lease *)seq->lease)->state = DS4_LEASE_HOT; /* the slot was given up */
        if (i == 1)
            rig.sched->form.context_tok = seq->n_posted;
        if (i == 2)
            seq->hi = seq->n_posted + 121;
        sent = rig.stage.next_step;
        ds4_sched_pump(rig.sched, rig.now_ns);
        assert_true(rig.stage.next_step == sent);
        assert_int_equal(ds4_sched_check_step(rig.sched, rig.now_ns, &err), -1);
        assert_non_null(strstr(err.msg, id[i]));
        assert_true(ds4_metric_value(shape.config.metrics, DS4_M_KV_INVARIANT_FAILURES,
                                     ds4_metric_labels(id[i])) == 1);
        ds4_rig_close(&rig); /* the request ends with it */
        assert_int_equal(client->n_done, 1);
        ds4_rig_client_free(client);
        ds4_metrics_free(shape.config.metrics);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prompts_that_arrive_together_are_computed_once),
        cmocka_unit_test(a_prompt_that_waits_for_another_does_not_wait_for_ever),
        cmocka_unit_test(who_waits_for_rows_does_not_fill_the_queue),
        cmocka_unit_test(an_idle_rig_soon_saves_the_state_of_its_slots),
        cmocka_unit_test(a_broken_invariant_stops_the_step_and_is_counted),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

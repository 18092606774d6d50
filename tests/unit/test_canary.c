/* The canary: asked when it should be, disturbs nobody, and notices answers that change. */
#include "router/canary.h"

#include "common/clock.h"
#include "common/metrics.h"
#include "router/cluster.h"
#include "tests/support/sched_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#define IDLE_S 60
#define BUSY_S 600

/* One worker that forms at once; its stage is the scripted one. */
struct world {
    struct ds4_rig rig; /* its clock, stage and scheduler */
    struct ds4_cluster *cluster;
    struct ds4_canary *canary;
    struct ds4_metrics *metrics;
    struct ds4_peer peer;
    uint32_t generation;
    int32_t n_lie; /* so many tokens of the canary come back changed */
    bool frozen;   /* steps are not executed */
    int32_t n_stop, n_drain;
    int32_t probe; /* what the worker found its device to be */
};

static int on_welcome(void *owner, const struct ds4_peer *to)
{
    (void)owner;
    (void)to;
    return 0;
}

static void on_form(void *owner, const struct ds4_peer *to, const struct ds4_form *form)
{
    struct world *w = owner;

    (void)to;
    w->generation = form->generation;
    ds4_scripted_form(&w->rig.stage, form, DS4_RIG_VOCAB, 120);
}

static void on_abort(void *owner, const struct ds4_peer *to, uint32_t generation)
{
    (void)to;
    (void)generation;
    ((struct world *)owner)->generation = 0;
}

static void on_drain(void *owner, const struct ds4_peer *to, uint32_t generation)
{
    (void)to;
    (void)generation;
    ((struct world *)owner)->n_drain++;
}

static void hello(struct world *w)
{
    struct ds4_hello h = {
        .n_stage = 1,
        .last_layer = 4,
        .n_layer = 4,
        .max_blocks = 8,
        .max_slots = 3,
        .max_context = 1024,
        .backend = "cpu",
    };

    w->peer.boot_id[0]++;
    memcpy(h.boot_id, w->peer.boot_id, DS4_ID_BYTES);
    ds4_cluster_hello(w->cluster, &w->peer, &h, w->rig.now_ns);
}

/* `ms` pass; then heartbeat, tick, and everything that is posted. */
static void turn(struct world *w, int64_t ms)
{
    struct ds4_tokens_out out;
    struct ds4_health h;

    w->rig.now_ns += ms * DS4_NS_PER_MS;
    h = (struct ds4_health){.generation = w->generation,
                            .state = w->n_drain > 0       ? DS4_WORKER_DRAINING
                                     : w->generation == 0 ? DS4_WORKER_IDLE
                                                          : DS4_WORKER_READY,
                            .step_no = -1,
                            .probe = w->probe};
    ds4_cluster_health(w->cluster, &w->peer, &h, w->rig.now_ns);
    ds4_cluster_tick(w->cluster, w->rig.now_ns);
    if (w->generation != 0)
        ds4_cluster_formed(w->cluster, &w->peer, w->generation, w->rig.now_ns);
    ds4_canary_tick(w->canary, w->rig.now_ns);
    ds4_cluster_tick(w->cluster, w->rig.now_ns);
    while (!w->frozen && ds4_scripted_answer(&w->rig.stage, &out)) {
        for (int32_t i = 0; i < out.n_entry && w->n_lie > 0; i++)
            if (out.entry[i].n_token > 0 && out.entry[i].pos >= DS4_CANARY_PROMPT_TOK) {
                out.entry[i].token[0] ^= 1;
                w->n_lie--;
            }
        ds4_cluster_tokens(w->cluster, &w->peer, &out, w->rig.now_ns);
        ds4_cluster_tick(w->cluster, w->rig.now_ns);
    }
}

static void idle(struct world *w, int32_t seconds)
{
    for (int32_t i = 0; i < seconds; i++)
        turn(w, 1000);
}

static double answers(const struct world *w, const char *result)
{
    return ds4_metric_value(w->metrics, DS4_M_CANARY, ds4_metric_labels(result));
}

static const struct ds4_cluster_view *look(struct world *w)
{
    static struct ds4_cluster_view view;

    ds4_cluster_view(w->cluster, w->rig.now_ns, &view);
    return &view;
}

static void open_world(struct world *w, const struct ds4_canary_config *more)
{
    const struct ds4_sched_config sched = {.vocab = DS4_RIG_VOCAB, .chunk_tok = 256, .max_seqs = 2};
    const struct ds4_sched_port sched_port = {.owner = &w->rig.stage,
                                              .send_step = ds4_scripted_send};
    const struct ds4_cluster_port port = {
        .owner = w,
        .send_welcome = on_welcome,
        .send_form = on_form,
        .send_abort = on_abort,
        .send_drain = on_drain,
    };
    struct ds4_canary_config canary = *more;
    struct ds4_sched_config with = sched;
    struct ds4_cluster_config cluster = {.n_stage = 1};
    struct ds4_err err = {0};
    int32_t prompt[DS4_CANARY_PROMPT_TOK];

    *w = (struct world){.rig.now_ns = 5000 * DS4_NS_PER_SEC};
    w->metrics = ds4_metrics_new("m", &err);
    assert_non_null(w->metrics);
    for (int32_t t = 0; t < DS4_CANARY_PROMPT_TOK; t++)
        prompt[t] = t % 7;
    with.metrics = w->metrics;
    w->rig.sched = ds4_sched_new(&with, &sched_port, &err);
    assert_non_null(w->rig.sched);
    cluster.metrics = w->metrics;
    w->cluster = ds4_cluster_new(&cluster, &port, w->rig.sched, &err);
    assert_non_null(w->cluster);
    canary.idle_ms = IDLE_S * 1000;
    canary.busy_ms = BUSY_S * 1000;
    canary.metrics = w->metrics;
    w->canary = ds4_canary_new(&canary, prompt, w->rig.sched, w->cluster, &err);
    assert_non_null(w->canary);
    ds4_cluster_watch_canary(w->cluster, ds4_canary_status(w->canary));
    hello(w);
    for (int32_t i = 0; i < 4; i++)
        turn(w, 100);
    assert_true(look(w)->ready);
}

static void start(struct world *w)
{
    const struct ds4_canary_config plain = {0};

    open_world(w, &plain);
}

static void end(struct world *w)
{
    assert_string_equal(w->rig.stage.err.msg, "");
    ds4_rig_close(&w->rig);
    ds4_canary_free(w->canary);
    ds4_cluster_free(w->cluster);
    ds4_metrics_free(w->metrics);
}

static void the_first_answer_is_recorded_and_asked_again_every_minute(void **state)
{
    struct world w;

    (void)state;
    start(&w);
    assert_true(ds4_canary_status(w.canary)->known);
    assert_int_equal(answers(&w, "ok"), 1);
    idle(&w, 10 * IDLE_S);
    assert_in_range((int)answers(&w, "ok"), 10, 12);
    assert_int_equal(answers(&w, "mismatch"), 0);
    assert_int_equal(look(&w)->state, DS4_CLUSTER_READY);
    assert_in_range(look(&w)->canary_age_ms, 0, IDLE_S * 1000);
    end(&w);
}

static void one_wrong_answer_is_asked_again_and_two_degrade(void **state)
{
    struct world w;

    (void)state;
    start(&w);
    w.n_lie = 1;
    idle(&w, IDLE_S + 3);
    assert_int_equal(answers(&w, "mismatch"), 1);
    assert_int_equal(answers(&w, "ok"), 2); /* asked again at once */
    assert_int_equal(look(&w)->state, DS4_CLUSTER_READY);
    w.n_lie = 1000;
    idle(&w, IDLE_S + 5);
    assert_int_equal(answers(&w, "mismatch"), 3);
    assert_int_equal(look(&w)->state, DS4_CLUSTER_DEGRADED);
    assert_true(look(&w)->ready); /* it serves, and says that somebody should look */
    assert_string_equal(look(&w)->reasons[0], "the canary's answer is not the known one");
    w.n_lie = 0;
    idle(&w, IDLE_S + 5);
    assert_int_equal(look(&w)->state, DS4_CLUSTER_READY);
    end(&w);
}

static void a_fatal_canary_ends_the_generation_once_a_minute_at_most(void **state)
{
    const struct ds4_canary_config fatal = {.fatal = true};
    struct world w;

    (void)state;
    open_world(&w, &fatal);
    w.n_lie = 1000000;
    assert_int_equal(ds4_cluster_generation(w.cluster), 1);
    idle(&w, IDLE_S + 10);
    assert_int_equal(ds4_cluster_generation(w.cluster), 2);
    w.n_lie = 0;
    idle(&w, 2 * IDLE_S);
    assert_int_equal(look(&w)->state, DS4_CLUSTER_READY);
    end(&w);
}

static void an_answer_given_by_the_settings_is_the_known_one(void **state)
{
    const int32_t expect[DS4_CANARY_ANSWER_TOK] = {1, 2, 3, 4, 5, 6, 7, 8};
    const struct ds4_canary_config given = {.n_expect = DS4_CANARY_ANSWER_TOK, .expect = expect};
    const struct ds4_canary_config few = {.n_expect = 3, .expect = expect};
    int32_t prompt[DS4_CANARY_PROMPT_TOK] = {0};
    struct ds4_err err = {0};
    struct world w;

    (void)state;
    open_world(&w, &given);
    turn(&w, 100);
    turn(&w, 100);
    assert_int_equal(look(&w)->state, DS4_CLUSTER_DEGRADED);
    assert_null(ds4_canary_new(&few, prompt, w.rig.sched, w.cluster, &err));
    assert_int_equal(err.code, DS4_E_INVALID);
    end(&w);
}

static void a_card_on_its_power_brake_degrades(void **state)
{
    struct world w;

    (void)state;
    start(&w);
    w.probe = 2; /* locked by its maker: that is how it is */
    idle(&w, 2);
    assert_int_equal(look(&w)->state, DS4_CLUSTER_READY);
    w.probe = 3;
    idle(&w, 2);
    assert_int_equal(look(&w)->state, DS4_CLUSTER_DEGRADED);
    assert_true(look(&w)->ready);
    assert_string_equal(look(&w)->reasons[0], "stage 0 runs with its power brake on");
    end(&w);
}

static void it_is_not_counted_and_evicts_nothing(void **state)
{
    struct ds4_rig_client *a, *b;
    struct ds4_sched_stats before, after;
    struct world w;

    (void)state;
    start(&w);
    a = ds4_rig_client(&w.rig, 1, 40, 4);
    b = ds4_rig_client(&w.rig, 2, 40, 4);
    assert_int_equal(ds4_rig_submit(a, NULL, NULL), 0);
    assert_int_equal(ds4_rig_submit(b, NULL, NULL), 0);
    turn(&w, 100);
    assert_int_equal(a->n_done + b->n_done, 2);
    ds4_sched_stats(w.rig.sched, &before);
    assert_int_equal(before.slots_free, 0); /* two kept prefixes, and the probe's */
    idle(&w, IDLE_S + 1);
    assert_int_equal(answers(&w, "ok"), 2);
    ds4_sched_stats(w.rig.sched, &after);
    assert_int_equal(after.idle, before.idle);
    assert_int_equal(after.blocks_cached, before.blocks_cached);
    assert_int_equal(after.blocks_free, before.blocks_free);
    assert_int_equal(after.generated_tok, before.generated_tok);
    assert_int_equal(ds4_metric_value(w.metrics, DS4_M_REQUESTS_STARTED, ds4_metric_labels("chat")),
                     2);
    assert_int_equal(
        ds4_metric_value(w.metrics, DS4_M_REQUESTS_STARTED, ds4_metric_labels("completions")), 0);
    assert_int_equal(
        ds4_metric_value(w.metrics, DS4_M_REQUESTS, ds4_metric_labels("completions", "completed")),
        0);
    ds4_rig_client_free(a);
    ds4_rig_client_free(b);
    end(&w);
}

/* Both places are taken and the queue is never empty. */
static void under_load_it_gets_the_next_place_that_is_free(void **state)
{
    struct ds4_rig_client *client[6];
    struct world w;
    double before;

    (void)state;
    start(&w);
    before = answers(&w, "ok");
    w.frozen = true;
    for (uint32_t i = 0; i < 6; i++) {
        client[i] = ds4_rig_client(&w.rig, i + 1, 30, 400);
        assert_int_equal(ds4_rig_submit(client[i], NULL, NULL), 0);
        turn(&w, 100);
    }
    w.frozen = false;
    for (int32_t i = 0; i < 3000; i++) {
        struct ds4_tokens_out out;

        w.rig.now_ns += BUSY_S * DS4_NS_PER_SEC / 3000;
        ds4_cluster_tick(w.cluster, w.rig.now_ns);
        ds4_canary_tick(w.canary, w.rig.now_ns);
        ds4_cluster_tick(w.cluster, w.rig.now_ns);
        if (ds4_scripted_answer(&w.rig.stage, &out))
            ds4_cluster_tokens(w.cluster, &w.peer, &out, w.rig.now_ns);
        turn(&w, 0);
    }
    assert_true(answers(&w, "ok") >= before + 1);
    for (int32_t i = 0; i < 6; i++)
        ds4_rig_client_free(client[i]);
    end(&w);
}

static void a_planned_restart_waits_for_what_runs_and_holds_the_queue(void **state)
{
    struct ds4_rig_client *runs, *waits;
    struct ds4_err err = {0};
    struct world w;

    (void)state;
    start(&w);
    w.frozen = true;
    runs = ds4_rig_client(&w.rig, 1, 30, 5);
    waits = ds4_rig_client(&w.rig, 2, 30, 5);
    assert_int_equal(ds4_rig_submit(runs, NULL, NULL), 0);
    turn(&w, 100);
    assert_int_equal(ds4_cluster_restart_stage(w.cluster, 3, w.rig.now_ns, &err), -1);
    assert_int_equal(err.code, DS4_E_INVALID);
    assert_int_equal(ds4_cluster_restart_stage(w.cluster, 0, w.rig.now_ns, &err), 0);
    assert_false(look(&w)->ready);
    assert_int_equal(look(&w)->reason, DS4_REASON_RESTARTED);
    assert_int_equal(ds4_cluster_restart_stage(w.cluster, 0, w.rig.now_ns, &err), -1);
    assert_int_equal(err.code, DS4_E_UNAVAILABLE);
    assert_int_equal(ds4_rig_submit(waits, NULL, NULL), 0);
    turn(&w, 100);
    assert_int_equal(w.n_drain, 0);
    w.frozen = false;
    turn(&w, 100);
    turn(&w, 100);
    assert_int_equal(runs->n_done, 1);
    assert_int_not_equal(runs->result.end, DS4_END_ERROR);
    assert_int_equal(w.n_drain, 1);
    assert_int_equal(waits->n_done, 0);
    ds4_cluster_bye(w.cluster, &w.peer, w.rig.now_ns);
    w.n_drain = 0;
    hello(&w);
    for (int32_t i = 0; i < 4; i++)
        turn(&w, 100);
    assert_true(look(&w)->ready);
    assert_int_equal(waits->n_done, 1);
    assert_int_not_equal(waits->result.end, DS4_END_ERROR);
    ds4_rig_client_free(runs);
    ds4_rig_client_free(waits);
    end(&w);
}

static void an_operators_drain_can_be_taken_back(void **state)
{
    struct ds4_rig_client *client;
    enum ds4_reason reason;
    struct ds4_err err = {0};
    struct world w;

    (void)state;
    start(&w);
    client = ds4_rig_client(&w.rig, 1, 30, 5);
    assert_int_equal(ds4_cluster_rest(w.cluster, true, w.rig.now_ns, &err), 0);
    assert_int_equal(look(&w)->state, DS4_CLUSTER_DRAINING);
    assert_false(ds4_cluster_is_ready(w.cluster, w.rig.now_ns));
    assert_int_equal(ds4_rig_submit(client, &reason, &err), -1);
    assert_int_equal(reason, DS4_REASON_DRAINING);
    assert_int_equal(ds4_cluster_rest(w.cluster, false, w.rig.now_ns, &err), 0);
    assert_true(look(&w)->ready);
    ds4_cluster_drain(w.cluster);
    assert_int_equal(ds4_cluster_rest(w.cluster, false, w.rig.now_ns, &err), -1);
    assert_int_equal(look(&w)->state, DS4_CLUSTER_DRAINING);
    ds4_rig_client_free(client);
    end(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_answer_is_recorded_and_asked_again_every_minute),
        cmocka_unit_test(one_wrong_answer_is_asked_again_and_two_degrade),
        cmocka_unit_test(a_fatal_canary_ends_the_generation_once_a_minute_at_most),
        cmocka_unit_test(an_answer_given_by_the_settings_is_the_known_one),
        cmocka_unit_test(a_card_on_its_power_brake_degrades),
        cmocka_unit_test(it_is_not_counted_and_evicts_nothing),
        cmocka_unit_test(under_load_it_gets_the_next_place_that_is_free),
        cmocka_unit_test(a_planned_restart_waits_for_what_runs_and_holds_the_queue),
        cmocka_unit_test(an_operators_drain_can_be_taken_back),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

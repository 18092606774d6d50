/* The worker table: who may join, what loses a generation, and that nothing dead looks ready. */
#include "router/cluster.h"

#include "common/clock.h"
#include "common/metrics.h"
#include "tests/support/sched_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define N_STAGE 3

/* Three workers that do as they are told; their last stage is the scripted one. */
struct world {
    struct ds4_rig rig; /* only its clock, stage and scheduler are used */
    struct ds4_cluster *cluster;
    struct ds4_peer peer[N_STAGE];
    uint32_t generation[N_STAGE]; /* as the worker sees it */
    struct ds4_form form[N_STAGE];
    bool cut[N_STAGE];     /* has no connection */
    bool mute[N_STAGE];    /* sends no heartbeats */
    bool deaf[N_STAGE];    /* never forms */
    bool refuses[N_STAGE]; /* answers FORM with FORM_FAILED */
    bool frozen;           /* steps are not executed */
    int32_t n_abort, n_stop, n_welcome, n_refused, n_form;
    bool ready_at_abort; /* what /health said while the first abort went out */
    int32_t n_pipe_id[N_STAGE];
    char why[256];
};

static int on_welcome(void *owner, const struct ds4_peer *to)
{
    struct world *w = owner;

    w->n_welcome++;
    return w->cut[to->stage] ? -1 : 0;
}

static void on_refused(void *owner, const struct ds4_peer *to, const char *why)
{
    struct world *w = owner;

    (void)to;
    w->n_refused++;
    snprintf(w->why, sizeof(w->why), "%s", why);
}

static void on_form(void *owner, const struct ds4_peer *to, const struct ds4_form *form)
{
    struct world *w = owner;

    w->n_form++;
    if (!w->deaf[to->stage])
        w->form[to->stage] = *form;
}

static void on_pipe_id(void *owner, const struct ds4_peer *to, uint32_t generation,
                       const struct ds4_pipe_id *id)
{
    struct world *w = owner;

    assert_int_equal(generation, ds4_cluster_generation(w->cluster));
    assert_int_equal(id->byte[0], 77);
    w->n_pipe_id[to->stage]++;
}

static void on_abort(void *owner, const struct ds4_peer *to, uint32_t generation)
{
    struct world *w = owner;

    if (w->n_abort++ == 0)
        w->ready_at_abort = ds4_cluster_is_ready(w->cluster, w->rig.now_ns);
    if (w->generation[to->stage] == generation)
        w->generation[to->stage] = 0;
}

static void on_stop(void *owner, const struct ds4_peer *to, uint32_t generation)
{
    (void)to;
    (void)generation;
    ((struct world *)owner)->n_stop++;
}

static struct ds4_hello hello_of(int32_t stage)
{
    return (struct ds4_hello){
        .stage = stage,
        .n_stage = N_STAGE,
        .first_layer = stage * 4,
        .last_layer = stage * 4 + 4,
        .n_layer = N_STAGE * 4,
        .max_blocks = 40 + stage,
        .max_slots = 8,
        .max_context = 4096,
        .backend = "cpu",
    };
}

static void hello(struct world *w, int32_t stage)
{
    struct ds4_hello h = hello_of(stage);

    memcpy(h.boot_id, w->peer[stage].boot_id, DS4_ID_BYTES);
    ds4_cluster_hello(w->cluster, &w->peer[stage], &h, w->rig.now_ns);
}

/* A new process for the stage. */
static void reboot(struct world *w, int32_t stage)
{
    w->peer[stage].stage = stage;
    w->peer[stage].boot_id[0]++;
    w->generation[stage] = 0;
    w->form[stage].generation = 0;
    hello(w, stage);
}

static void world_open_with(struct world *w, struct ds4_metrics *metrics)
{
    struct ds4_sched_config config = {.vocab = DS4_RIG_VOCAB, .chunk_tok = 256, .max_seqs = 4};
    struct ds4_sched_port sched_port = {.owner = &w->rig.stage, .send_step = ds4_scripted_send};
    struct ds4_cluster_port port = {
        .owner = w,
        .send_welcome = on_welcome,
        .send_refused = on_refused,
        .send_form = on_form,
        .send_pipe_id = on_pipe_id,
        .send_abort = on_abort,
        .send_stop = on_stop,
    };
    struct ds4_cluster_config cluster = {.n_stage = N_STAGE, .metrics = metrics};
    struct ds4_err err = {0};

    *w = (struct world){.rig.now_ns = 5000 * DS4_NS_PER_SEC};
    w->rig.sched = ds4_sched_new(&config, &sched_port, &err);
    assert_non_null(w->rig.sched);
    w->cluster = ds4_cluster_new(&cluster, &port, w->rig.sched, &err);
    assert_non_null(w->cluster);
}

static void world_open(struct world *w)
{
    world_open_with(w, NULL);
}

static void world_close(struct world *w)
{
    assert_string_equal(w->rig.stage.err.msg, "");
    ds4_rig_close(&w->rig);
    ds4_cluster_free(w->cluster);
}

static void beat(struct world *w, int32_t stage)
{
    struct ds4_health h = {
        .stage = stage,
        .generation = w->generation[stage],
        .state = w->generation[stage] == 0 ? DS4_WORKER_IDLE : DS4_WORKER_READY,
        .step_no = -1,
    };

    ds4_cluster_health(w->cluster, &w->peer[stage], &h, w->rig.now_ns);
}

/* The workers' side of FORM. */
static void answer_form(struct world *w, int32_t stage)
{
    uint32_t generation = w->form[stage].generation;

    if (generation == 0)
        return;
    w->form[stage].generation = 0;
    if (w->refuses[stage]) {
        ds4_cluster_form_failed(w->cluster, &w->peer[stage], generation, "no pipe", w->rig.now_ns);
        return;
    }
    if (stage == N_STAGE - 1) {
        struct ds4_form form = w->form[stage];

        form.generation = generation;
        ds4_scripted_form(&w->rig.stage, &form, DS4_RIG_VOCAB, 120);
    }
    w->generation[stage] = generation;
    ds4_cluster_formed(w->cluster, &w->peer[stage], generation, w->rig.now_ns);
}

/* 100 ms: heartbeats, formation, all posted steps. */
static void turn(struct world *w)
{
    struct ds4_tokens_out out;

    w->rig.now_ns += 100 * DS4_NS_PER_MS;
    for (int32_t s = 0; s < N_STAGE; s++)
        if (!w->mute[s])
            beat(w, s);
    ds4_cluster_tick(w->cluster, w->rig.now_ns);
    for (int32_t s = 0; s < N_STAGE; s++)
        answer_form(w, s);
    ds4_cluster_tick(w->cluster, w->rig.now_ns);
    while (!w->frozen && ds4_scripted_answer(&w->rig.stage, &out))
        ds4_cluster_tokens(w->cluster, &w->peer[N_STAGE - 1], &out, w->rig.now_ns);
}

static void turns(struct world *w, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        turn(w);
}

static struct ds4_cluster_view *look(struct world *w)
{
    static struct ds4_cluster_view view;

    ds4_cluster_view(w->cluster, w->rig.now_ns, &view);
    assert_int_equal(view.ready, ds4_cluster_is_ready(w->cluster, w->rig.now_ns));
    return &view;
}

static void start(struct world *w)
{
    world_open(w);
    turn(w);
    for (int32_t s = 0; s < N_STAGE; s++)
        reboot(w, s);
    turns(w, 3);
    assert_true(look(w)->ready);
}

static void it_becomes_ready_when_a_step_has_come_back(void **state)
{
    struct world w;

    (void)state;
    world_open(&w);
    turn(&w);
    assert_int_equal(look(&w)->state, DS4_CLUSTER_STARTING);
    assert_int_equal(look(&w)->reason, DS4_REASON_LOADING);
    reboot(&w, 0);
    reboot(&w, 1);
    turns(&w, 5);
    assert_int_equal(look(&w)->state, DS4_CLUSTER_STARTING);
    assert_int_equal(w.n_form, 0);
    reboot(&w, 2);
    assert_int_equal(look(&w)->state, DS4_CLUSTER_LOADING);
    w.frozen = true;
    turns(&w, 3);
    assert_int_equal(w.n_form, N_STAGE);
    assert_int_equal(look(&w)->state, DS4_CLUSTER_FORMING); /* formed, but no token yet */
    assert_false(look(&w)->ready);
    w.frozen = false;
    turn(&w);
    assert_int_equal(look(&w)->state, DS4_CLUSTER_READY);
    assert_int_equal(look(&w)->generation, 1);
    assert_int_equal(look(&w)->context_tok, 4096);
    assert_int_equal(w.rig.stage.form.n_blocks, 40);
    assert_true(w.n_welcome >= N_STAGE);
    world_close(&w);
}

static void it_stays_ready_while_idle(void **state)
{
    struct world w;

    (void)state;
    start(&w);
    for (int32_t i = 0; i < 600; i++) {
        turn(&w);
        assert_true(look(&w)->ready);
        assert_true(look(&w)->last_token_age_ms <= 10100);
    }
    world_close(&w);
}

/* Starts a decode and a prefill, breaks something, expects the one reaction to every failure. */
static void assert_recovers(struct world *w, struct ds4_rig_client *decode,
                            struct ds4_rig_client *prefill, int32_t stage)
{
    assert_false(look(w)->ready);
    assert_int_equal(look(w)->state, DS4_CLUSTER_RECOVERING);
    assert_int_equal(look(w)->reason, DS4_REASON_RESTARTED);
    assert_false(w->ready_at_abort);
    assert_int_equal(decode->n_done, 1);
    assert_int_equal(prefill->n_done, 1);
    assert_int_equal(decode->result.reason, DS4_REASON_RESTARTED);
    w->frozen = false;
    w->mute[stage] = false;
    reboot(w, stage);
    turns(w, 3);
    assert_true(look(w)->ready);
    assert_int_equal(look(w)->generation, 2);
}

static void begin(struct world *w, struct ds4_rig_client **decode, struct ds4_rig_client **prefill)
{
    start(w);
    w->frozen = true;
    *decode = ds4_rig_client(&w->rig, 1, 20, 2000);
    *prefill = ds4_rig_client(&w->rig, 2, 3000, 10);
    assert_int_equal(ds4_rig_submit(*decode, NULL, NULL), 0);
    for (int32_t i = 0; i < 6; i++)
        ds4_rig_turn(&w->rig);
    assert_int_equal(ds4_rig_submit(*prefill, NULL, NULL), 0);
    ds4_rig_turn(&w->rig);
    assert_true((*decode)->out.len > 0);
    w->n_abort = 0;
}

static void end(struct world *w, struct ds4_rig_client *decode, struct ds4_rig_client *prefill)
{
    ds4_rig_client_free(decode);
    ds4_rig_client_free(prefill);
    world_close(w);
}

static void a_fatal_report_leaves_ready_at_once(void **state)
{
    struct ds4_fatal_report report = {.stage = 1, .exit_code = 70, .layer = 5};
    struct ds4_rig_client *decode, *prefill;
    struct world w;

    (void)state;
    begin(&w, &decode, &prefill);
    ds4_cluster_fatal(w.cluster, &w.peer[1], &report, w.rig.now_ns);
    assert_int_equal(w.n_abort, N_STAGE - 1); /* the survivors */
    assert_recovers(&w, decode, prefill, 1);
    assert_int_equal(look(&w)->stage[1].restarts, 1);
    end(&w, decode, prefill);
}

static void a_silent_worker_is_lost_after_three_seconds(void **state)
{
    struct ds4_rig_client *decode, *prefill;
    struct world w;

    (void)state;
    begin(&w, &decode, &prefill);
    w.mute[0] = true;
    turns(&w, 29);
    assert_int_equal(decode->n_done, 0);
    turns(&w, 2);
    assert_recovers(&w, decode, prefill, 0);
    end(&w, decode, prefill);
}

/* It was stopped for a while and does not know that it was given up: nobody starts it again. */
static void a_worker_that_was_silent_and_speaks_again_is_taken_back(void **state)
{
    struct ds4_rig_client *decode, *prefill;
    struct world w;

    (void)state;
    begin(&w, &decode, &prefill);
    w.mute[0] = true;
    turns(&w, 31);
    assert_false(look(&w)->ready);
    w.frozen = false;
    w.mute[0] = false;
    w.generation[0] = 0;
    turns(&w, 5);
    assert_true(look(&w)->ready);
    assert_int_equal(look(&w)->generation, 2);
    assert_int_equal(look(&w)->stage[0].restarts, 0);
    end(&w, decode, prefill);
}

static void a_cut_connection_is_noticed_without_waiting_for_heartbeats(void **state)
{
    struct ds4_rig_client *decode, *prefill;
    struct world w;

    (void)state;
    begin(&w, &decode, &prefill);
    w.cut[1] = true;
    turns(&w, 3); /* 300 ms */
    w.cut[1] = false;
    assert_recovers(&w, decode, prefill, 1);
    end(&w, decode, prefill);
}

static void goodbye_and_another_boot_are_losses_too(void **state)
{
    struct ds4_rig_client *decode, *prefill;
    struct world w;

    (void)state;
    begin(&w, &decode, &prefill);
    ds4_cluster_bye(w.cluster, &w.peer[2], w.rig.now_ns);
    assert_recovers(&w, decode, prefill, 2);
    end(&w, decode, prefill);

    begin(&w, &decode, &prefill);
    reboot(&w, 2);
    assert_recovers(&w, decode, prefill, 2);
    end(&w, decode, prefill);
}

static void a_worker_whose_stage_another_process_took_is_told_to_leave(void **state)
{
    struct ds4_rig_client *decode, *prefill;
    struct ds4_health health = {.stage = 2, .state = DS4_WORKER_IDLE, .step_no = -1};
    struct ds4_peer old;
    struct world w;

    (void)state;
    begin(&w, &decode, &prefill);
    old = w.peer[2];
    reboot(&w, 2);
    assert_recovers(&w, decode, prefill, 2);
    assert_int_equal(w.n_refused, 0);
    ds4_cluster_health(w.cluster, &old, &health, w.rig.now_ns);
    assert_int_equal(w.n_refused, 1);
    assert_non_null(strstr(w.why, "stage 2 is another process now"));
    assert_true(look(&w)->ready);
    end(&w, decode, prefill);
}

static void a_stuck_step_ends_the_generation(void **state)
{
    struct ds4_rig_client *decode, *prefill;
    struct world w;

    (void)state;
    begin(&w, &decode, &prefill);
    turns(&w, 160);
    assert_false(look(&w)->ready); /* no token for 15 s: not ready, long before the step's limit */
    assert_int_equal(decode->n_done, 0);
    for (int32_t i = 0; i < 1060 && decode->n_done == 0; i++)
        turn(&w);
    assert_recovers(&w, decode, prefill, 1);
    end(&w, decode, prefill);
}

static void a_contradicting_record_ends_the_generation(void **state)
{
    struct ds4_rig_client *decode, *prefill;
    struct ds4_tokens_out out;
    struct world w;

    (void)state;
    begin(&w, &decode, &prefill);
    assert_true(ds4_scripted_answer(&w.rig.stage, &out));
    out.entry[0].pos++;
    ds4_cluster_tokens(w.cluster, &w.peer[2], &out, w.rig.now_ns);
    assert_recovers(&w, decode, prefill, 0);
    end(&w, decode, prefill);
}

static void records_of_strangers_and_old_generations_are_dropped(void **state)
{
    struct ds4_rig_client *decode, *prefill;
    struct ds4_tokens_out out;
    struct ds4_peer old;
    struct world w;

    (void)state;
    begin(&w, &decode, &prefill);
    assert_true(ds4_scripted_answer(&w.rig.stage, &out));
    old = w.peer[2];
    old.boot_id[5] = 9;
    ds4_cluster_tokens(w.cluster, &old, &out, w.rig.now_ns);
    old.stage = 77;
    ds4_cluster_tokens(w.cluster, &old, &out, w.rig.now_ns);
    out.generation--;
    ds4_cluster_tokens(w.cluster, &w.peer[2], &out, w.rig.now_ns);
    assert_true(look(&w)->ready);
    out.generation++;
    ds4_cluster_tokens(w.cluster, &w.peer[2], &out, w.rig.now_ns);
    assert_true(look(&w)->ready);
    w.frozen = false;
    ds4_sched_cancel(w.rig.sched, decode->req, DS4_CANCEL_API, w.rig.now_ns);
    turns(&w, 30);
    assert_int_equal(prefill->n_done, 1);
    assert_true(ds4_rig_is_right(prefill, 10));
    end(&w, decode, prefill);
}

static void a_formation_that_fails_is_tried_again_with_new_names(void **state)
{
    struct ds4_form first;
    struct world w;

    (void)state;
    world_open(&w);
    turn(&w);
    for (int32_t s = 0; s < N_STAGE; s++)
        reboot(&w, s);
    w.refuses[1] = true;
    turn(&w);
    first = w.form[2];
    turns(&w, 8);
    assert_int_equal(w.n_form, N_STAGE); /* one second of patience */
    assert_false(look(&w)->ready);
    turns(&w, 5);
    assert_int_equal(w.n_form, 2 * N_STAGE);
    w.refuses[1] = false;
    w.deaf[0] = true; /* the third try is never answered by stage 0 */
    turns(&w, 25);
    assert_int_equal(w.n_form, 3 * N_STAGE);
    turns(&w, 300);
    assert_false(look(&w)->ready);
    w.deaf[0] = false;
    turns(&w, 60);
    assert_true(look(&w)->ready);
    assert_true(look(&w)->generation >= 4);
    assert_memory_not_equal(first.pipe_key, w.rig.stage.form.pipe_key, DS4_ID_BYTES);
    world_close(&w);
}

static void stages_that_do_not_make_one_model_never_form(void **state)
{
    struct world w;
    struct ds4_hello h;

    (void)state;
    world_open(&w);
    turn(&w);
    for (int32_t s = 0; s < N_STAGE; s++)
        reboot(&w, s);
    h = hello_of(1);
    h.first_layer = 5;
    ds4_cluster_hello(w.cluster, &w.peer[1], &h, w.rig.now_ns);
    turns(&w, 5);
    assert_int_equal(w.n_form, 0);
    assert_int_equal(look(&w)->state, DS4_CLUSTER_FAILED);
    assert_non_null(strstr(look(&w)->reasons[0], "stage 1 has layers 5 to 7"));
    h.first_layer = 4;
    h.model_digest[3] = 1;
    ds4_cluster_hello(w.cluster, &w.peer[1], &h, w.rig.now_ns);
    turns(&w, 5);
    assert_int_equal(w.n_form, 0);
    assert_non_null(strstr(look(&w)->reasons[0], "another model file"));
    hello(&w, 1);
    turns(&w, 3);
    assert_true(look(&w)->ready);
    h = hello_of(1);
    h.n_stage = N_STAGE + 1;
    ds4_cluster_hello(w.cluster, &w.peer[1], &h, w.rig.now_ns);
    assert_int_equal(w.n_refused, 1);
    assert_true(look(&w)->ready);
    world_close(&w);
}

static void a_stage_that_holds_nothing_fails_the_plan(void **state)
{
    struct ds4_hello h = hello_of(1);
    struct world w;

    (void)state;
    world_open(&w);
    turn(&w);
    for (int32_t s = 0; s < N_STAGE; s++)
        reboot(&w, s);
    h.max_blocks = 0;
    ds4_cluster_hello(w.cluster, &w.peer[1], &h, w.rig.now_ns);
    turns(&w, 5);
    assert_int_equal(w.n_form, 0);
    assert_int_equal(look(&w)->state, DS4_CLUSTER_FAILED);
    assert_non_null(strstr(look(&w)->reasons[0], "too few"));
    world_close(&w);
}

static void a_stage_that_stays_away_fails_the_cluster_and_the_queue(void **state)
{
    struct ds4_rig_client *client;
    struct world w;

    (void)state;
    start(&w);
    w.mute[1] = true;
    turns(&w, 40);
    client = ds4_rig_client(&w.rig, 1, 20, 20);
    assert_int_equal(ds4_rig_submit(client, NULL, NULL), 0);
    turns(&w, 100);
    assert_int_equal(client->n_done, 0); /* kept for hold_ms */
    turns(&w, 110);
    assert_int_equal(client->n_done, 1);
    assert_int_equal(client->result.reason, DS4_REASON_RESTARTED);
    turns(&w, 1000);
    assert_int_equal(look(&w)->state, DS4_CLUSTER_FAILED);
    assert_int_equal(look(&w)->reason, DS4_REASON_STAGE_DOWN);
    assert_string_equal(look(&w)->reasons[0], "stage 1 is missing");
    ds4_rig_client_free(client);
    world_close(&w);
}

static void workers_of_an_earlier_router_are_freed_and_counted_past(void **state)
{
    struct world w;

    (void)state;
    world_open(&w);
    turn(&w);
    for (int32_t s = 0; s < N_STAGE; s++) {
        reboot(&w, s);
        w.generation[s] = 41;
    }
    turns(&w, 4);
    assert_true(look(&w)->ready);
    assert_int_equal(look(&w)->generation, 42);
    assert_true(w.n_abort >= N_STAGE);
    world_close(&w);
}

static void a_draining_cluster_is_not_ready_and_finishes_its_work(void **state)
{
    struct ds4_rig_client *client, *late;
    enum ds4_reason reason;
    struct world w;

    (void)state;
    start(&w);
    client = ds4_rig_client(&w.rig, 1, 20, 20);
    assert_int_equal(ds4_rig_submit(client, NULL, NULL), 0);
    ds4_cluster_drain(w.cluster);
    assert_int_equal(look(&w)->state, DS4_CLUSTER_DRAINING);
    late = ds4_rig_client(&w.rig, 2, 20, 20);
    assert_int_equal(ds4_rig_submit(late, &reason, NULL), -1);
    assert_int_equal(reason, DS4_REASON_DRAINING);
    turns(&w, 30);
    assert_true(ds4_rig_is_right(client, 20));
    ds4_cluster_stop_workers(w.cluster);
    assert_int_equal(w.n_stop, N_STAGE);
    ds4_rig_client_free(client);
    ds4_rig_client_free(late);
    world_close(&w);
}

static void where_the_pipe_is_goes_from_stage_0_to_the_others_of_its_formation(void **state)
{
    const struct ds4_pipe_id id = {.n_byte = 1, .byte = {77}};
    struct world w;
    uint32_t generation;

    (void)state;
    world_open(&w);
    for (int32_t s = 0; s < N_STAGE; s++) {
        w.deaf[s] = true;
        reboot(&w, s);
    }
    turns(&w, 2);
    generation = ds4_cluster_generation(w.cluster);
    assert_true(w.n_form >= N_STAGE);
    ds4_cluster_pipe_offer(w.cluster, &w.peer[1], generation, &id, w.rig.now_ns);
    ds4_cluster_pipe_offer(w.cluster, &w.peer[0], generation - 1, &id, w.rig.now_ns);
    assert_int_equal(w.n_pipe_id[1], 0);
    ds4_cluster_pipe_offer(w.cluster, &w.peer[0], generation, &id, w.rig.now_ns);
    assert_int_equal(w.n_pipe_id[0], 0);
    for (int32_t s = 1; s < N_STAGE; s++)
        assert_int_equal(w.n_pipe_id[s], 1);
    world_close(&w);
}

static double metric(struct ds4_metrics *m, enum ds4_metric id, const char *stage,
                     const char *label)
{
    return ds4_metric_value(m, id, ds4_metric_labels(stage, label));
}

static void assert_shown(struct world *w, struct ds4_metrics *m, const char *series, bool shown)
{
    struct ds4_buf text;

    ds4_buf_init(&text, 4 << 20);
    ds4_cluster_export(w->cluster, w->rig.now_ns);
    assert_int_equal(ds4_metrics_render(m, DS4_METRICS_PROMETHEUS, &text), 0);
    assert_int_equal(ds4_buf_append(&text, "", 1), 0);
    if ((strstr(text.ptr, series) != NULL) != shown)
        fail_msg("%s is %s", series, shown ? "missing" : "shown");
    ds4_buf_deinit(&text);
}

static void what_the_driver_says_of_a_card_is_shown_while_its_stage_is_up(void **state)
{
    struct ds4_err err = {0};
    struct ds4_metrics *m = ds4_metrics_new("m", &err);
    struct ds4_health h = {.stage = 1, .state = DS4_WORKER_IDLE, .step_no = -1, .card.told = true};
    struct world w;

    (void)state;
    assert_non_null(m);
    world_open_with(&w, m);
    w.peer[1].stage = 1;
    hello(&w, 1);
    assert_shown(&w, m, "ds4_gpu_xid_total{", false); /* no card told anything yet */
    for (int32_t i = 0; i < DS4_N_CARD_SENSOR; i++)
        h.card.value[i] = 100 + i;
    h.card.value[DS4_CARD_MEMORY_C] = DS4_CARD_NOT_TOLD;
    h.card.value[DS4_CARD_SLOW_HEAT] = 0;
    h.card.value[DS4_CARD_USED_BYTES] = 1000;
    h.weights_bytes = 500;
    h.kv_bytes = 300;
    h.link_bytes_per_s = 8e8;
    h.link_latency_s = 25e-6;
    h.card.xid[DS4_XID_154] = 2;
    h.card.xid[DS4_XID_OTHER] = 1;
    ds4_cluster_health(w.cluster, &w.peer[1], &h, w.rig.now_ns);
    assert_shown(&w, m, "ds4_gpu_temperature_celsius{model=\"m\",stage=\"1\",sensor=\"core\"} 100",
                 true);
    assert_shown(&w, m, "ds4_gpu_temperature_celsius{model=\"m\",stage=\"1\",sensor=\"memory\"}",
                 false);
    assert_shown(&w, m, "ds4_gpu_throttle{model=\"m\",stage=\"1\",reason=\"thermal\"} 0", true);
    assert_shown(&w, m, "ds4_gpu_xid_total{model=\"m\",stage=\"1\",code=\"31\"} 0", true);
    assert_shown(&w, m, "ds4_gpu_xid_total{model=\"m\",stage=\"1\",code=\"154\"} 2", true);
    assert_shown(&w, m, "ds4_gpu_xid_total{model=\"m\",stage=\"1\",code=\"other\"} 1", true);
    assert_float_equal(metric(m, DS4_M_GPU_POWER, "1", NULL), 100 + DS4_CARD_WATT, 0);
    assert_float_equal(metric(m, DS4_M_GPU_CLOCK, "1", "memory"), 100 + DS4_CARD_MEMORY_HZ, 0);
    assert_float_equal(metric(m, DS4_M_GPU_MEMORY, "1", "free"), 100 + DS4_CARD_FREE_BYTES, 0);
    assert_float_equal(metric(m, DS4_M_GPU_MEMORY, "1", "kv"), 300, 0);
    assert_float_equal(metric(m, DS4_M_GPU_MEMORY, "1", "other"), 200, 0);
    assert_float_equal(metric(m, DS4_M_LINK_BANDWIDTH, "1", NULL), 8e8, 0);
    assert_shown(&w, m, "ds4_link_latency_seconds{model=\"m\",stage=\"1\"} 2.5e-05", true);
    assert_shown(&w, m, "ds4_link_latency_seconds{model=\"m\",stage=\"0\"}", false);
    assert_float_equal(metric(m, DS4_M_PCIE_REPLAYS, "1", NULL), 100 + DS4_CARD_REPLAYS, 0);
    ds4_cluster_bye(w.cluster, &w.peer[1], w.rig.now_ns);
    assert_shown(&w, m, "ds4_gpu_memory_bytes{", false);
    assert_shown(&w, m, "ds4_link_latency_seconds{", false);
    assert_shown(&w, m, "ds4_gpu_temperature_celsius{", false); /* nobody can vouch for it */
    assert_shown(&w, m, "ds4_gpu_xid_total{model=\"m\",stage=\"1\",code=\"154\"} 2", true);
    world_close(&w);
    ds4_metrics_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_becomes_ready_when_a_step_has_come_back),
        cmocka_unit_test(it_stays_ready_while_idle),
        cmocka_unit_test(a_fatal_report_leaves_ready_at_once),
        cmocka_unit_test(a_silent_worker_is_lost_after_three_seconds),
        cmocka_unit_test(a_worker_that_was_silent_and_speaks_again_is_taken_back),
        cmocka_unit_test(a_cut_connection_is_noticed_without_waiting_for_heartbeats),
        cmocka_unit_test(goodbye_and_another_boot_are_losses_too),
        cmocka_unit_test(a_worker_whose_stage_another_process_took_is_told_to_leave),
        cmocka_unit_test(a_stuck_step_ends_the_generation),
        cmocka_unit_test(a_contradicting_record_ends_the_generation),
        cmocka_unit_test(records_of_strangers_and_old_generations_are_dropped),
        cmocka_unit_test(a_formation_that_fails_is_tried_again_with_new_names),
        cmocka_unit_test(where_the_pipe_is_goes_from_stage_0_to_the_others_of_its_formation),
        cmocka_unit_test(stages_that_do_not_make_one_model_never_form),
        cmocka_unit_test(a_stage_that_holds_nothing_fails_the_plan),
        cmocka_unit_test(a_stage_that_stays_away_fails_the_cluster_and_the_queue),
        cmocka_unit_test(workers_of_an_earlier_router_are_freed_and_counted_past),
        cmocka_unit_test(what_the_driver_says_of_a_card_is_shown_while_its_stage_is_up),
        cmocka_unit_test(a_draining_cluster_is_not_ready_and_finishes_its_work),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

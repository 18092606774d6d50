/* The bus over a real socket: a worker of one stage joins, runs steps, and is lost. */
#include "router/bus.h"

#include "common/clock.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "tests/support/sched_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <uv.h>
#include <zmq.h>

#include <cmocka.h>

struct fixture {
    char dir[64];
    uv_loop_t loop;
    struct ds4_bus *bus;
    struct ds4_sched *sched;
    struct ds4_cluster *cluster;
    void *context;
    void *dealer;
    uint64_t sequence;
    uint32_t generation;
    struct ds4_scripted_stage stage;
    struct ds4_arena arena;
    int32_t n_welcome, n_form, n_step, n_abort, n_stop, n_refused;
};

static const struct ds4_hello good_hello = {
    .stage = 0,
    .n_stage = 1,
    .first_layer = 0,
    .last_layer = 4,
    .n_layer = 4,
    .boot_id = {0xab, 0x01},
    .max_blocks = 40,
    .max_slots = 6,
    .max_context = 4096,
    .pid = 1,
    .backend = "cpu",
};

static void connect_as(struct fixture *f, const char *name)
{
    char endpoint[128];
    int zero = 0;

    if (f->dealer != NULL)
        zmq_close(f->dealer);
    f->dealer = zmq_socket(f->context, ZMQ_DEALER);
    assert_non_null(f->dealer);
    zmq_setsockopt(f->dealer, ZMQ_IDENTITY, name, strlen(name));
    zmq_setsockopt(f->dealer, ZMQ_LINGER, &zero, sizeof(zero));
    snprintf(endpoint, sizeof(endpoint), "ipc://%s/router.sock", f->dir);
    assert_int_equal(zmq_connect(f->dealer, endpoint), 0);
    f->sequence = 0;
}

static void send_payload(struct fixture *f, enum ds4_frame_kind kind, struct ds4_str payload)
{
    struct ds4_frame frame = {
        .kind = kind,
        .generation = f->generation,
        .sequence = f->sequence++,
        .payload_bytes = (uint32_t)payload.len,
    };
    uint8_t envelope[DS4_ENVELOPE_BYTES];

    ds4_frame_write(&frame, envelope);
    assert_true(zmq_send(f->dealer, envelope, sizeof(envelope), ZMQ_SNDMORE) > 0);
    assert_true(zmq_send(f->dealer, payload.ptr, payload.len, 0) >= 0);
}

static void say_hello(struct fixture *f, const struct ds4_hello *hello)
{
    struct ds4_buf buf;

    ds4_buf_init(&buf, DS4_MAX_FRAME_BYTES);
    assert_int_equal(ds4_codec_encode_hello(hello, &buf, NULL), 0);
    send_payload(f, DS4_FRAME_HELLO, ds4_buf_view(&buf));
    ds4_buf_deinit(&buf);
}

static void say_health(struct fixture *f, enum ds4_worker_state state)
{
    struct ds4_health health = {.state = state, .step_no = -1};
    struct ds4_buf buf;

    ds4_buf_init(&buf, DS4_MAX_FRAME_BYTES);
    assert_int_equal(ds4_codec_encode_health(&health, &buf, NULL), 0);
    send_payload(f, DS4_FRAME_HEALTH, ds4_buf_view(&buf));
    ds4_buf_deinit(&buf);
}

static void say_tokens(struct fixture *f)
{
    struct ds4_tokens_out out;
    struct ds4_buf buf;

    while (ds4_scripted_answer(&f->stage, &out)) {
        struct ds4_arena_mark mark = ds4_arena_mark(&f->arena);

        ds4_buf_init(&buf, DS4_MAX_FRAME_BYTES);
        assert_int_equal(ds4_codec_encode_tokens(&out, &f->arena, &buf, NULL), 0);
        send_payload(f, DS4_FRAME_TOKENS, ds4_buf_view(&buf));
        ds4_buf_deinit(&buf);
        ds4_arena_reset(&f->arena, mark);
    }
}

/* The worker's reaction to one frame. */
static void obey(struct fixture *f, const struct ds4_frame *frame, struct ds4_str payload)
{
    struct ds4_form form;
    struct ds4_step step;
    struct ds4_err err = {0};

    if (frame->kind == DS4_FRAME_WELCOME) {
        f->n_welcome++;
    } else if (frame->kind == DS4_FRAME_REFUSED) {
        f->n_refused++;
    } else if (frame->kind == DS4_FRAME_ABORT) {
        f->n_abort++;
        f->generation = 0;
    } else if (frame->kind == DS4_FRAME_STOP) {
        f->n_stop++;
    } else if (frame->kind == DS4_FRAME_FORM) {
        assert_int_equal(ds4_codec_decode_form(payload, &f->arena, &form, &err), 0);
        ds4_scripted_form(&f->stage, &form, DS4_RIG_VOCAB, 120);
        f->n_form++;
        f->generation = form.generation;
        send_payload(f, DS4_FRAME_FORMED, DS4_STR(""));
    } else if (frame->kind == DS4_FRAME_STEP) {
        assert_int_equal(ds4_codec_decode_step(payload, frame->generation, &f->arena, &step, &err),
                         0);
        assert_int_equal(ds4_scripted_send(&f->stage, &step, &err), 0);
        f->n_step++;
        say_tokens(f);
    }
}

/* One turn of the loop and everything the router said since. */
static void turn(struct fixture *f)
{
    static char envelope[64], payload[1 << 16];
    zmq_pollitem_t item = {.socket = f->dealer, .events = ZMQ_POLLIN};

    /* The worker is this thread as well: no sleeping in the loop.  What was sent is on its way
     * through the library's own thread. */
    uv_run(&f->loop, UV_RUN_NOWAIT);
    zmq_poll(&item, 1, 2);
    for (;;) {
        struct ds4_frame frame;
        struct ds4_err err = {0};
        int n_payload, n = zmq_recv(f->dealer, envelope, sizeof(envelope), ZMQ_DONTWAIT);

        if (n < 0)
            return;
        n_payload = zmq_recv(f->dealer, payload, sizeof(payload), 0);
        assert_true(n_payload >= 0);
        assert_int_equal(
            ds4_frame_read(envelope, (size_t)n, (size_t)n_payload, DS4_FROM_ROUTER, &frame, &err),
            0);
        obey(f, &frame, (struct ds4_str){payload, (size_t)n_payload});
    }
}

/* Turns until *what reaches `least`; on an idle machine forty seconds at most. */
static void await(struct fixture *f, const int32_t *what, int32_t least)
{
    for (int32_t i = 0; i < 20000 && *what < least; i++)
        turn(f);
    assert_true(*what >= least);
}

static void open_all(struct fixture *f)
{
    struct ds4_sched_config sched = {.vocab = DS4_RIG_VOCAB};
    struct ds4_cluster_config cluster = {.n_stage = 1};
    struct ds4_sched_port sched_port;
    struct ds4_cluster_port port;
    struct ds4_err err = {0};

    *f = (struct fixture){.dir = "/tmp/ds4-test-bus-XXXXXX"};
    assert_non_null(mkdtemp(f->dir));
    assert_int_equal(uv_loop_init(&f->loop), 0);
    f->bus = ds4_bus_open(&f->loop, &(struct ds4_bus_config){.endpoint_dir = f->dir}, &err);
    assert_string_equal(err.msg, "");
    assert_non_null(f->bus);
    sched_port = ds4_bus_sched_port(f->bus);
    port = ds4_bus_cluster_port(f->bus);
    f->sched = ds4_sched_new(&sched, &sched_port, &err);
    f->cluster = ds4_cluster_new(&cluster, &port, f->sched, &err);
    assert_non_null(f->cluster);
    ds4_bus_attach(f->bus, f->cluster);
    f->context = zmq_ctx_new();
    ds4_arena_init(&f->arena, DS4_CODEC_ARENA_BYTES);
    connect_as(f, "stage-0-ab010000000000000000000000000000");
}

static void close_all(struct fixture *f)
{
    char path[128];

    assert_string_equal(f->stage.err.msg, "");
    ds4_bus_close(f->bus);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
    ds4_cluster_free(f->cluster);
    ds4_sched_free(f->sched);
    zmq_close(f->dealer);
    zmq_ctx_term(f->context);
    ds4_scripted_deinit(&f->stage);
    ds4_arena_deinit(&f->arena);
    snprintf(path, sizeof(path), "%s/router.lock", f->dir);
    unlink(path);
    snprintf(path, sizeof(path), "%s/router.sock", f->dir);
    unlink(path);
    assert_int_equal(rmdir(f->dir), 0);
}

static void a_worker_joins_runs_and_is_aborted(void **state)
{
    struct ds4_rig rig = {.now_ns = ds4_clock_ns()};
    struct ds4_rig_client *client;
    struct fixture f;

    (void)state;
    open_all(&f);
    say_hello(&f, &good_hello);
    await(&f, &f.n_welcome, 1);
    say_health(&f, DS4_WORKER_IDLE);
    await(&f, &f.n_form, 1);
    await(&f, &f.n_step, 1); /* the probe */
    for (int32_t i = 0; i < 20000 && !ds4_cluster_is_ready(f.cluster, ds4_clock_ns()); i++)
        turn(&f);
    assert_true(ds4_cluster_is_ready(f.cluster, ds4_clock_ns()));

    rig.sched = f.sched;
    client = ds4_rig_client(&rig, 1, 1000, 40);
    assert_int_equal(ds4_rig_submit(client, NULL, NULL), 0);
    await(&f, &client->n_done, 1);
    assert_true(ds4_rig_is_right(client, 40));

    say_health(&f, DS4_WORKER_FAILED);
    await(&f, &f.n_abort, 1);
    assert_false(ds4_cluster_is_ready(f.cluster, ds4_clock_ns()));
    say_health(&f, DS4_WORKER_IDLE);
    await(&f, &f.n_form, 2);
    ds4_cluster_stop_workers(f.cluster);
    await(&f, &f.n_stop, 1);
    ds4_rig_client_free(client);
    close_all(&f);
}

static void what_is_no_valid_frame_never_reaches_the_cluster(void **state)
{
    static const char *const names[] = {
        "stage-0-AB010000000000000000000000000000",  "stage-0-ab01",
        "stage-00-ab010000000000000000000000000000", "stage-64-ab010000000000000000000000000000",
        "stage--ab010000000000000000000000000000",   "somebody",
    };
    struct ds4_hello hello = good_hello;
    struct ds4_cluster_view view;
    struct fixture f;

    (void)state;
    open_all(&f);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        connect_as(&f, names[i]);
        say_hello(&f, &good_hello);
        for (int32_t turns = 0; turns < 10; turns++)
            turn(&f);
    }
    connect_as(&f, "stage-0-ab010000000000000000000000000000");
    say_health(&f, DS4_WORKER_IDLE); /* before HELLO */
    hello.boot_id[0] = 7;            /* not what the name says */
    say_hello(&f, &hello);
    send_payload(&f, DS4_FRAME_HELLO, DS4_STR("\xff\xff\xff"));
    send_payload(&f, DS4_FRAME_STEP, DS4_STR("")); /* only a router may */
    zmq_send(f.dealer, "one part", 8, 0);
    zmq_send(f.dealer, "1", 1, ZMQ_SNDMORE);
    zmq_send(f.dealer, "2", 1, ZMQ_SNDMORE);
    zmq_send(f.dealer, "3", 1, ZMQ_SNDMORE);
    zmq_send(f.dealer, "4", 1, 0);
    for (int32_t i = 0; i < 50; i++)
        turn(&f);
    ds4_cluster_view(f.cluster, ds4_clock_ns(), &view);
    assert_false(view.stage[0].present);
    assert_int_equal(f.n_welcome, 0);
    say_hello(&f, &good_hello);
    await(&f, &f.n_welcome, 1);
    hello = good_hello;
    hello.n_stage = 2;
    hello.n_layer = 8;
    say_hello(&f, &hello);
    await(&f, &f.n_refused, 1);
    close_all(&f);
}

static void a_folder_is_served_by_one_router_and_closed_to_others(void **state)
{
    struct ds4_err err = {0};
    struct fixture f;
    char open_dir[] = "/tmp/ds4-test-bus-XXXXXX";
    char long_dir[200] = "/tmp/";

    (void)state;
    open_all(&f);
    assert_null(ds4_bus_open(&f.loop, &(struct ds4_bus_config){.endpoint_dir = f.dir}, &err));
    assert_int_equal(err.code, DS4_E_BUSY);
    assert_non_null(mkdtemp(open_dir));
    assert_int_equal(chmod(open_dir, 0755), 0);
    assert_null(ds4_bus_open(&f.loop, &(struct ds4_bus_config){.endpoint_dir = open_dir}, &err));
    assert_int_equal(err.code, DS4_E_INVALID);
    assert_int_equal(rmdir(open_dir), 0);
    memset(long_dir + 5, 'x', sizeof(long_dir) - 6);
    assert_null(ds4_bus_open(&f.loop, &(struct ds4_bus_config){.endpoint_dir = long_dir}, &err));
    assert_int_equal(err.code, DS4_E_INVALID);
    assert_int_equal(rmdir(long_dir), 0);
    close_all(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_worker_joins_runs_and_is_aborted),
        cmocka_unit_test(what_is_no_valid_frame_never_reaches_the_cluster),
        cmocka_unit_test(a_folder_is_served_by_one_router_and_closed_to_others),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

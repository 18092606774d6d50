/* worker/bus.c against a ROUTER socket: the link's comings and goings, malformed frames, CURVE keys. */
#include "worker/bus.h"

#include "common/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <zmq.h>

#include <cmocka.h>

#define WAIT_MS 10000

struct rig {
    char folder[32];
    char endpoint[128];
    void *context;
    void *router;
    struct ds4_buf payload;
};

static int set_up(void **state)
{
    struct rig *rig = calloc(1, sizeof(*rig));

    snprintf(rig->folder, sizeof(rig->folder), "/tmp/ds4-wbus-XXXXXX");
    if (mkdtemp(rig->folder) == NULL)
        return -1;
    snprintf(rig->endpoint, sizeof(rig->endpoint), "ipc://%s/s", rig->folder);
    rig->context = zmq_ctx_new();
    rig->router = zmq_socket(rig->context, ZMQ_ROUTER);
    zmq_setsockopt(rig->router, ZMQ_LINGER, &(int){0}, sizeof(int));
    zmq_setsockopt(rig->router, ZMQ_RCVTIMEO, &(int){WAIT_MS}, sizeof(int));
    ds4_buf_init(&rig->payload, DS4_MAX_FRAME_BYTES);
    *state = rig;
    return 0;
}

static void remove_file(const struct rig *rig, const char *name)
{
    char path[64];

    snprintf(path, sizeof(path), "%s/%s", rig->folder, name);
    unlink(path);
}

static int tear_down(void **state)
{
    struct rig *rig = *state;

    if (rig->router != NULL)
        zmq_close(rig->router);
    zmq_ctx_term(rig->context);
    remove_file(rig, "s");
    remove_file(rig, "router.public");
    remove_file(rig, "worker.secret");
    rmdir(rig->folder);
    ds4_buf_deinit(&rig->payload);
    free(rig);
    return 0;
}

static struct ds4_wbus *open_bus(const struct rig *rig, const char *curve_dir)
{
    struct ds4_wbus_config config = {
        .endpoint = rig->endpoint, .stage = 12, .boot_id = {0x0f}, .curve_dir = curve_dir};
    struct ds4_err err = {0};
    struct ds4_wbus *bus = ds4_wbus_open(&config, &err);

    if (bus == NULL)
        fail_msg("%s", err.msg);
    return bus;
}

static void expect_link(struct ds4_wbus *bus, enum ds4_wbus_link want)
{
    struct ds4_deadline deadline = ds4_deadline_in_ms(WAIT_MS);
    enum ds4_wbus_link link;

    while ((link = ds4_wbus_next_link(bus)) == DS4_WBUS_SAME && !ds4_deadline_passed(deadline))
        ds4_wbus_wait(bus, NULL, 0, 20);
    assert_int_equal(link, want);
}

/* The name, envelope and payload of the next message; returns the payload's size. */
static size_t router_recv(struct rig *rig, char name[64], uint8_t envelope[DS4_ENVELOPE_BYTES])
{
    char payload[64];
    int n = zmq_recv(rig->router, name, 63, 0);

    assert_true(n > 0);
    name[n] = 0;
    assert_int_equal(zmq_recv(rig->router, envelope, DS4_ENVELOPE_BYTES, 0), DS4_ENVELOPE_BYTES);
    n = zmq_recv(rig->router, payload, sizeof(payload), 0);
    assert_true(n >= 0);
    return (size_t)n;
}

static int bus_recv(struct rig *rig, struct ds4_wbus *bus, struct ds4_frame *frame,
                    struct ds4_err *err)
{
    struct ds4_deadline deadline = ds4_deadline_in_ms(WAIT_MS);
    int rc;

    while ((rc = ds4_wbus_recv(bus, frame, &rig->payload, err)) == 0 &&
           !ds4_deadline_passed(deadline))
        ds4_wbus_wait(bus, NULL, 0, 20);
    return rc;
}

static void expect_exchange(struct rig *rig, struct ds4_wbus *bus)
{
    struct ds4_frame frame = {DS4_FRAME_STEP, 5, 77, 3};
    uint8_t envelope[DS4_ENVELOPE_BYTES];
    struct ds4_err err = {0};
    char name[64];

    for (uint64_t i = 0; i < 2; i++) {
        assert_int_equal(ds4_wbus_send(bus, DS4_FRAME_FORMED, 5, DS4_STR(""), &err), 0);
        assert_int_equal(router_recv(rig, name, envelope), 0);
        assert_string_equal(name, "stage-12-0f000000000000000000000000000000");
        assert_int_equal(envelope[12], i); /* counts from 0 on each link */
    }
    ds4_frame_write(&frame, envelope);
    zmq_send(rig->router, name, strlen(name), ZMQ_SNDMORE);
    zmq_send(rig->router, envelope, sizeof(envelope), ZMQ_SNDMORE);
    zmq_send(rig->router, "abc", 3, 0);
    memset(&frame, 0, sizeof(frame));
    assert_int_equal(bus_recv(rig, bus, &frame, &err), 1);
    assert_int_equal(frame.kind, DS4_FRAME_STEP);
    assert_int_equal(frame.sequence, 77);
    assert_true(ds4_str_equal(ds4_buf_view(&rig->payload), DS4_STR("abc")));
}

static void without_a_router_nothing_is_queued(void **state)
{
    struct rig *rig = *state;
    struct ds4_wbus *bus = open_bus(rig, NULL);
    struct ds4_err err = {0};

    assert_int_equal(ds4_wbus_send(bus, DS4_FRAME_BYE, 0, DS4_STR(""), &err), -1);
    assert_int_equal(err.code, DS4_E_UNAVAILABLE);
    assert_int_equal(zmq_bind(rig->router, rig->endpoint), 0); /* late: the bus keeps trying */
    expect_link(bus, DS4_WBUS_UP);
    expect_exchange(rig, bus);
    ds4_wbus_close(bus, 0);
}

static void a_link_that_comes_back_counts_from_zero(void **state)
{
    struct rig *rig = *state;
    struct ds4_wbus *bus = open_bus(rig, NULL);

    assert_int_equal(zmq_bind(rig->router, rig->endpoint), 0);
    expect_link(bus, DS4_WBUS_UP);
    expect_exchange(rig, bus);
    zmq_close(rig->router);
    expect_link(bus, DS4_WBUS_DOWN);
    rig->router = zmq_socket(rig->context, ZMQ_ROUTER);
    zmq_setsockopt(rig->router, ZMQ_LINGER, &(int){0}, sizeof(int));
    zmq_setsockopt(rig->router, ZMQ_RCVTIMEO, &(int){WAIT_MS}, sizeof(int));
    while (zmq_bind(rig->router, rig->endpoint) != 0) /* closing is asynchronous */
        usleep(1000);
    expect_link(bus, DS4_WBUS_UP);
    expect_exchange(rig, bus);
    ds4_wbus_close(bus, 0);
}

static void malformed_messages_are_errors_and_are_consumed(void **state)
{
    static const struct {
        const char *part[3];
        const char *word;
    } rows[] = {
        {{"x", NULL, NULL}, "frame of 1 parts"},
        {{"x", "y", "z"}, "frame of 3 parts"},
        {{"", "", NULL}, "envelope of 0 bytes"},
        {{"a long envelope of many more than twenty-four bytes", "y", NULL},
         "envelope of 51 bytes"},
    };
    struct rig *rig = *state;
    struct ds4_wbus *bus = open_bus(rig, NULL);
    uint8_t envelope[DS4_ENVELOPE_BYTES];
    struct ds4_frame frame;
    struct ds4_err err = {0};
    char name[64];

    assert_int_equal(zmq_bind(rig->router, rig->endpoint), 0);
    expect_link(bus, DS4_WBUS_UP);
    assert_int_equal(ds4_wbus_send(bus, DS4_FRAME_BYE, 0, DS4_STR(""), &err), 0);
    router_recv(rig, name, envelope);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        zmq_send(rig->router, name, strlen(name), ZMQ_SNDMORE);
        for (int p = 0; p < 3 && rows[i].part[p] != NULL; p++)
            zmq_send(rig->router, rows[i].part[p], strlen(rows[i].part[p]),
                     p < 2 && rows[i].part[p + 1] != NULL ? ZMQ_SNDMORE : 0);
        assert_int_equal(bus_recv(rig, bus, &frame, &err), -1);
        assert_int_equal(err.code, DS4_E_PROTOCOL);
        if (strstr(err.msg, rows[i].word) == NULL)
            fail_msg("%s", err.msg);
        assert_int_equal(ds4_wbus_recv(bus, &frame, &rig->payload, &err), 0);
    }
    ds4_wbus_close(bus, 0);
}

/* ---- keys ---- */

static void write_key(const struct rig *rig, const char *name, const char *key)
{
    char path[64];
    FILE *file;

    snprintf(path, sizeof(path), "%s/%s", rig->folder, name);
    file = fopen(path, "w");
    assert_non_null(file);
    fprintf(file, "%s\n", key);
    fclose(file);
}

static void expect_refused(const struct rig *rig, const char *endpoint, const char *word)
{
    struct ds4_wbus_config config = {.endpoint = endpoint, .curve_dir = rig->folder};
    struct ds4_err err = {0};

    if (strcmp(word, "needs CURVE keys") == 0)
        config.curve_dir = "";
    assert_null(ds4_wbus_open(&config, &err));
    if (strstr(err.msg, word) == NULL)
        fail_msg("%s", err.msg);
}

static void tcp_needs_keys_and_whole_ones(void **state)
{
    struct rig *rig = *state;

    expect_refused(rig, "tcp://127.0.0.1:1", "needs CURVE keys");
    expect_refused(rig, "tcp://127.0.0.1:1", "router.public");
    write_key(rig, "router.public", "too short");
    expect_refused(rig, "tcp://127.0.0.1:1", "no key of 40 characters");
}

static void with_keys_a_worker_reaches_its_router_over_tcp_and_only_it(void **state)
{
    struct rig *rig = *state;
    char router_public[41], router_secret[41], worker_public[41], worker_secret[41];
    size_t n = sizeof(rig->endpoint);
    struct ds4_wbus *bus;

    if (!zmq_has("curve"))
        skip();
    assert_int_equal(zmq_curve_keypair(router_public, router_secret), 0);
    assert_int_equal(zmq_curve_keypair(worker_public, worker_secret), 0);
    zmq_setsockopt(rig->router, ZMQ_CURVE_SERVER, &(int){1}, sizeof(int));
    zmq_setsockopt(rig->router, ZMQ_CURVE_SECRETKEY, router_secret, sizeof(router_secret));
    assert_int_equal(zmq_bind(rig->router, "tcp://127.0.0.1:*"), 0);
    assert_int_equal(zmq_getsockopt(rig->router, ZMQ_LAST_ENDPOINT, rig->endpoint, &n), 0);
    write_key(rig, "worker.secret", worker_secret);

    write_key(rig, "router.public", worker_public); /* not this router's */
    bus = open_bus(rig, rig->folder);
    for (int i = 0; i < 10; i++) {
        ds4_wbus_wait(bus, NULL, 0, 20);
        assert_int_not_equal(ds4_wbus_next_link(bus), DS4_WBUS_UP);
    }
    ds4_wbus_close(bus, 0);

    write_key(rig, "router.public", router_public);
    bus = open_bus(rig, rig->folder);
    expect_link(bus, DS4_WBUS_UP);
    expect_exchange(rig, bus);
    ds4_wbus_close(bus, 0);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(without_a_router_nothing_is_queued),
        TEST(a_link_that_comes_back_counts_from_zero),
        TEST(malformed_messages_are_errors_and_are_consumed),
        TEST(tcp_needs_keys_and_whole_ones),
        TEST(with_keys_a_worker_reaches_its_router_over_tcp_and_only_it),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* worker/control.c, bus.c and fatal.c: a whole worker in a child process, this test as its router over
 * ipc, and as its service manager where that is asked. */
#include "worker/control.h"

#include "common/service.h"
#include "proto/codec.h"
#include "tests/support/chain.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <zmq.h>

#include <cmocka.h>

#define WAIT_MS      20000
#define HEARTBEAT_MS 50
#define CONTEXT_TOK  3072
#define N_BLOCKS     (CONTEXT_TOK / DS4_BLOCK_TOK)
#define HOST_BYTES   (4 << 20)
#define POINT        21
#define PROMPT_TOK   5
#define ANSWER_ID                                                                                  \
    1093 /* first greedy token after the prompt, tests/data/model/ds4-tiny-greedy.json */

static const int32_t prompt[PROMPT_TOK] = {0, 4080, 1078, 4081, 4083};

struct rig {
    char folder[32];
    char endpoint[64];
    char disk[48];
    void *context;
    void *socket; /* ROUTER */
    pid_t pid;    /* of the worker */
    char identity[64];
    size_t n_identity;
    uint64_t sequence;
    struct ds4_frame_gate gate;
    struct ds4_arena arena;
    struct ds4_buf payload; /* of the newest frame */
    struct ds4_buf out;
    int64_t generation;
};

/* ---- the router's side ---- */

static void bind_router(struct rig *rig)
{
    rig->context = zmq_ctx_new();
    rig->socket = zmq_socket(rig->context, ZMQ_ROUTER);
    zmq_setsockopt(rig->socket, ZMQ_LINGER, &(int){0}, sizeof(int));
    zmq_setsockopt(rig->socket, ZMQ_RCVTIMEO, &(int){WAIT_MS}, sizeof(int));
    zmq_setsockopt(rig->socket, ZMQ_ROUTER_HANDOVER, &(int){1}, sizeof(int));
    assert_int_equal(zmq_bind(rig->socket, rig->endpoint), 0);
    rig->sequence = 0;
}

static void unbind_router(struct rig *rig)
{
    zmq_close(rig->socket);
    zmq_ctx_term(rig->context);
}

static bool recv_part(struct rig *rig, struct ds4_buf *buf)
{
    zmq_msg_t part;
    bool more;

    zmq_msg_init(&part);
    if (zmq_msg_recv(&part, rig->socket, 0) < 0)
        fail_msg("nothing from the worker: %s", zmq_strerror(errno));
    ds4_buf_clear(buf);
    ds4_buf_append(buf, zmq_msg_data(&part), zmq_msg_size(&part));
    more = zmq_msg_more(&part) != 0;
    zmq_msg_close(&part);
    return more;
}

static struct ds4_frame next_frame(struct rig *rig)
{
    struct ds4_buf envelope;
    struct ds4_frame frame;
    struct ds4_err err = {0};

    ds4_buf_init(&envelope, 4096);
    assert_true(recv_part(rig, &envelope));
    assert_true(envelope.len < sizeof(rig->identity));
    memcpy(rig->identity, envelope.ptr, envelope.len);
    rig->identity[rig->n_identity = envelope.len] = 0;
    assert_true(recv_part(rig, &envelope));
    assert_false(recv_part(rig, &rig->payload));
    if (ds4_frame_read(envelope.ptr, envelope.len, rig->payload.len, DS4_FROM_WORKER, &frame, &err))
        fail_msg("%s", err.msg);
    if (frame.kind == DS4_FRAME_HELLO)
        assert_int_equal(frame.sequence, 0);
    ds4_frame_admit(&rig->gate, &frame);
    assert_int_equal(rig->gate.n_lost, 0);
    ds4_buf_deinit(&envelope);
    return frame;
}

/* Reads on until that kind. */
static struct ds4_frame expect_frame(struct rig *rig, enum ds4_frame_kind kind)
{
    int64_t start_ns = ds4_clock_ns();
    struct ds4_frame frame;

    do {
        frame = next_frame(rig);
        if (ds4_clock_ns() - start_ns > WAIT_MS * DS4_NS_PER_MS)
            fail_msg("no %s", ds4_frame_kind_name(kind));
    } while (frame.kind != kind);
    return frame;
}

static struct ds4_health expect_health(struct rig *rig, enum ds4_worker_state state)
{
    struct ds4_health health;
    struct ds4_err err = {0};
    int64_t start_ns = ds4_clock_ns();

    do {
        struct ds4_frame frame = expect_frame(rig, DS4_FRAME_HEALTH);

        if (ds4_codec_decode_health(ds4_buf_view(&rig->payload), frame.generation, &rig->arena,
                                    &health, &err))
            fail_msg("%s", err.msg);
        if (ds4_clock_ns() - start_ns > WAIT_MS * DS4_NS_PER_MS)
            fail_msg("state %d, expected %d", (int)health.state, (int)state);
    } while (health.state != state);
    return health;
}

/* HELLO, and then the state in which a worker takes a FORM. */
static struct ds4_hello expect_hello(struct rig *rig)
{
    struct ds4_hello hello;
    struct ds4_err err = {0};

    expect_frame(rig, DS4_FRAME_HELLO);
    if (ds4_codec_decode_hello(ds4_buf_view(&rig->payload), &rig->arena, &hello, &err))
        fail_msg("%s", err.msg);
    expect_health(rig, DS4_WORKER_IDLE); /* loaded */
    return hello;
}

static void send_envelope(struct rig *rig, const uint8_t *envelope, struct ds4_str payload)
{
    assert_true(zmq_send(rig->socket, rig->identity, rig->n_identity, ZMQ_SNDMORE) >= 0);
    assert_true(zmq_send(rig->socket, envelope, DS4_ENVELOPE_BYTES, ZMQ_SNDMORE) >= 0);
    assert_true(zmq_send(rig->socket, payload.ptr, payload.len, 0) >= 0);
}

static void send_frame(struct rig *rig, enum ds4_frame_kind kind, uint32_t generation,
                       struct ds4_str payload)
{
    struct ds4_frame frame = {kind, generation, rig->sequence++, (uint32_t)payload.len};
    uint8_t envelope[DS4_ENVELOPE_BYTES];

    ds4_frame_write(&frame, envelope);
    send_envelope(rig, envelope, payload);
}

static void send_form(struct rig *rig, uint32_t generation)
{
    struct ds4_form form = {.generation = generation,
                            .n_stage = 1,
                            .n_blocks = N_BLOCKS,
                            .n_slots = 1,
                            .max_seqs = 1,
                            .max_step_tok = 2000,
                            .context_tok = CONTEXT_TOK,
                            .host_bytes = HOST_BYTES};
    struct ds4_err err = {0};

    ds4_buf_clear(&rig->out);
    if (ds4_codec_encode_form(&form, &rig->out, &err))
        fail_msg("%s", err.msg);
    send_frame(rig, DS4_FRAME_FORM, generation, ds4_buf_view(&rig->out));
}

/* Opens slot 0 with n_tok tokens, the prompt's or a ramp, and saves a point behind them. */
static void send_prompt(struct rig *rig, uint32_t generation, int64_t step_no, int32_t n_tok)
{
    static int32_t token[2000];
    int32_t block[N_BLOCKS];
    struct ds4_seq_open open = chain_greedy(0, 7, 1, n_tok);
    struct ds4_step_entry entry = {.seq = 7,
                                   .epoch = 1,
                                   .kind = DS4_ENTRY_PREFILL,
                                   .n_tok = n_tok,
                                   .sample = true,
                                   .from_step = -1,
                                   .cap_tok = CONTEXT_TOK,
                                   .n_block = N_BLOCKS,
                                   .block = block};
    struct ds4_kv_op save = {
        .kind = DS4_KV_POINT_SAVE, .seq = 7, .epoch = 1, .pos = n_tok, .point = POINT};
    struct ds4_step step = {.generation = generation,
                            .step_no = step_no,
                            .n_open = 1,
                            .open = &open,
                            .n_op = 1,
                            .op = &save,
                            .n_entry = 1,
                            .entry = &entry,
                            .n_tok = n_tok,
                            .token = token};
    struct ds4_err err = {0};

    for (int32_t i = 0; i < n_tok; i++)
        token[i] = i < PROMPT_TOK ? prompt[i] : 10 + i;
    for (int32_t i = 0; i < N_BLOCKS; i++)
        block[i] = i;
    ds4_buf_clear(&rig->out);
    if (ds4_codec_encode_step(&step, &rig->arena, &rig->out, &err))
        fail_msg("%s", err.msg);
    send_frame(rig, DS4_FRAME_STEP, generation, ds4_buf_view(&rig->out));
}

static void form(struct rig *rig, uint32_t generation)
{
    send_form(rig, generation);
    assert_int_equal(expect_frame(rig, DS4_FRAME_FORMED).generation, generation);
}

static void expect_answer(struct rig *rig, uint32_t generation, int64_t step_no)
{
    struct ds4_frame frame = expect_frame(rig, DS4_FRAME_TOKENS);
    struct ds4_tokens_out out;
    struct ds4_err err = {0};

    assert_int_equal(frame.generation, generation);
    if (ds4_codec_decode_tokens(ds4_buf_view(&rig->payload), generation, &rig->arena, &out, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(out.step_no, step_no);
    assert_int_equal(out.n_entry, 1);
    assert_int_equal(out.entry[0].pos, PROMPT_TOK);
    assert_int_equal(out.entry[0].token[0], ANSWER_ID);
}

/* ---- the worker ---- */

/* In a process of its own, started by exec: one forked beside libzmq's threads would inherit their locks
 * as they are at that moment, held for ever. */
static int run_worker(const char *endpoint, const char *disk, const char *prefill_ms)
{
    struct chain_options options = {
        .n_thread = 1, .context_tok = CONTEXT_TOK, .host_bytes = HOST_BYTES, .disk_dir = disk};
    struct ds4_control_config config = {
        .bus = {.endpoint = endpoint, .boot_id = {0xab, 1}},
        .loop = {.stage = chain_config(&options, 0),
                 .pipe = &ds4_pipe_shm,
                 .depth = 3,
                 .form_ms = WAIT_MS,
                 .check_ms = HEARTBEAT_MS,
                 .pipe_wait_ms = WAIT_MS},
        .heartbeat_ms = HEARTBEAT_MS,
        .step_ms = WAIT_MS,
        .prefill_ms = (int32_t)strtol(prefill_ms, NULL, 10),
    };
    struct ds4_err err = {0};

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    return ds4_control_run(&config, &err);
}

static void start_worker(struct rig *rig, int32_t prefill_ms, const char *notify)
{
    char limit[16];

    snprintf(limit, sizeof(limit), "%d", (int)prefill_ms);
    if (notify != NULL)
        setenv("NOTIFY_SOCKET", notify, 1);
    rig->pid = fork();
    assert_true(rig->pid >= 0);
    if (rig->pid == 0) {
        execl("/proc/self/exe", "test_control", "--worker", rig->endpoint, rig->disk, limit,
              (char *)NULL);
        _exit(1);
    }
    unsetenv("NOTIFY_SOCKET");
}

static void expect_exit(struct rig *rig, int code)
{
    int status;

    assert_int_equal(waitpid(rig->pid, &status, 0), rig->pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != code)
        fail_msg("wait status 0x%x, expected exit %d", (unsigned)status, code);
    rig->pid = 0;
}

static void expect_fatal(struct rig *rig, int code, const char *word)
{
    struct ds4_frame frame = expect_frame(rig, DS4_FRAME_FATAL);
    struct ds4_fatal_report report;
    struct ds4_err err = {0};

    if (ds4_codec_decode_fatal(ds4_buf_view(&rig->payload), frame.generation, &rig->arena, &report,
                               &err))
        fail_msg("%s", err.msg);
    assert_int_equal(report.exit_code, code);
    if (strstr(report.message, word) == NULL)
        fail_msg("%s", report.message);
    expect_exit(rig, code);
}

static int set_up(void **state)
{
    struct rig *rig = calloc(1, sizeof(*rig));

    snprintf(rig->folder, sizeof(rig->folder), "/tmp/ds4-control-XXXXXX");
    if (mkdtemp(rig->folder) == NULL)
        return -1;
    snprintf(rig->endpoint, sizeof(rig->endpoint), "ipc://%s/router.sock", rig->folder);
    snprintf(rig->disk, sizeof(rig->disk), "%s/kv", rig->folder);
    ds4_arena_init(&rig->arena, 2 * DS4_CODEC_ARENA_BYTES);
    ds4_buf_init(&rig->payload, DS4_MAX_FRAME_BYTES);
    ds4_buf_init(&rig->out, DS4_MAX_FRAME_BYTES);
    bind_router(rig);
    *state = rig;
    return 0;
}

static int tear_down(void **state)
{
    struct rig *rig = *state;
    char path[64];

    if (rig->pid > 0) {
        kill(rig->pid, SIGKILL);
        waitpid(rig->pid, NULL, 0);
    }
    unbind_router(rig);
    snprintf(path, sizeof(path), "%s/router.sock", rig->folder);
    unlink(path);
    if (fork() == 0) {
        execlp("rm", "rm", "-rf", rig->folder, (char *)NULL);
        _exit(1);
    }
    wait(NULL);
    ds4_arena_deinit(&rig->arena);
    ds4_buf_deinit(&rig->payload);
    ds4_buf_deinit(&rig->out);
    free(rig);
    return 0;
}

/* ---- tests ---- */

static void a_worker_says_hello_forms_answers_and_leaves(void **state)
{
    struct rig *rig = *state;
    struct ds4_hello hello;
    struct ds4_health health;

    start_worker(rig, WAIT_MS, NULL);
    hello = expect_hello(rig);
    assert_string_equal(rig->identity, "stage-0-ab010000000000000000000000000000");
    assert_int_equal(hello.n_stage, 1);
    assert_int_equal(hello.first_layer, 0);
    assert_int_equal(hello.last_layer, hello.n_layer);
    assert_int_equal(hello.pid, rig->pid);
    assert_string_equal(hello.backend, "cpu");
    assert_true(hello.max_blocks >= N_BLOCKS);
    assert_int_equal(hello.boot_id[0], 0xab);
    health = expect_health(rig, DS4_WORKER_IDLE);
    assert_int_equal(health.generation, 0);
    assert_int_equal(health.step_no, -1);
    assert_true(health.rss_bytes > 0);
    send_frame(rig, DS4_FRAME_WELCOME, 0, DS4_STR(""));
    form(rig, 3);
    assert_int_equal(expect_health(rig, DS4_WORKER_READY).generation, 3);
    send_prompt(rig, 3, 0, PROMPT_TOK);
    expect_answer(rig, 3, 0);
    do {
        health = expect_health(rig, DS4_WORKER_READY);
    } while (health.steps_done != 1);
    assert_int_equal(health.step_no, 0);
    assert_true(health.busy_seconds > 0);
    assert_true(health.kv_bytes > 0);
    kill(rig->pid, SIGTERM);
    expect_health(rig, DS4_WORKER_DRAINING);
    send_frame(rig, DS4_FRAME_DRAIN, 3, DS4_STR(""));
    expect_frame(rig, DS4_FRAME_BYE);
    expect_exit(rig, DS4_EXIT_OK);
}

static void a_stage_that_is_stopped_goes_on_until_the_router_lets_go(void **state)
{
    struct rig *rig = *state;

    start_worker(rig, WAIT_MS, NULL);
    expect_hello(rig);
    form(rig, 3);
    kill(rig->pid, SIGTERM);
    expect_health(rig, DS4_WORKER_DRAINING);
    send_prompt(rig, 3, 0, PROMPT_TOK);
    expect_answer(rig, 3, 0);
    send_frame(rig, DS4_FRAME_ABORT, 3, DS4_STR("")); /* also the end of a generation is one */
    expect_frame(rig, DS4_FRAME_BYE);
    expect_exit(rig, DS4_EXIT_OK);
}

static void a_second_signal_ends_a_stage_that_waits(void **state)
{
    struct rig *rig = *state;

    start_worker(rig, WAIT_MS, NULL);
    expect_hello(rig);
    form(rig, 3);
    kill(rig->pid, SIGTERM);
    expect_health(rig, DS4_WORKER_DRAINING);
    kill(rig->pid, SIGTERM);
    expect_frame(rig, DS4_FRAME_BYE);
    expect_exit(rig, DS4_EXIT_OK);
}

static void stop_ends_a_worker_and_drain_asks_to_be_started_again(void **state)
{
    struct rig *rig = *state;
    static const enum ds4_frame_kind kind[] = {DS4_FRAME_STOP, DS4_FRAME_DRAIN};

    for (int i = 0; i < 2; i++) {
        start_worker(rig, WAIT_MS, NULL);
        rig->sequence = 0;
        expect_hello(rig);
        form(rig, 3);
        send_prompt(rig, 3, 0, PROMPT_TOK);
        if (kind[i] == DS4_FRAME_STOP)
            expect_answer(rig, 3, 0);
        send_frame(rig, kind[i], 3, DS4_STR(""));
        if (kind[i] == DS4_FRAME_DRAIN)
            expect_answer(rig, 3, 0);
        expect_frame(rig, DS4_FRAME_BYE);
        expect_exit(rig, kind[i] == DS4_FRAME_DRAIN ? DS4_EXIT_TEMPORARY : DS4_EXIT_OK);
    }
}

static struct ds4_kv_done expect_done(struct rig *rig, uint64_t job)
{
    struct ds4_frame frame = expect_frame(rig, DS4_FRAME_KV_DONE);
    struct ds4_kv_done done;
    struct ds4_err err = {0};

    if (ds4_codec_decode_kv_done(ds4_buf_view(&rig->payload), frame.generation, &rig->arena, &done,
                                 &err))
        fail_msg("%s", err.msg);
    assert_int_equal(done.job, job);
    return done;
}

static void jobs_of_the_disk_tier_are_answered(void **state)
{
    struct rig *rig = *state;
    int32_t block = 0;
    struct ds4_kv_write write = {.generation = 3,
                                 .job = 11,
                                 .key = {1},
                                 .kind = DS4_KV_TAIL,
                                 .end = PROMPT_TOK,
                                 .point = POINT,
                                 .n_block = 1,
                                 .block = &block};
    struct ds4_kv_part_ref ref = {.first_layer = 0};
    struct ds4_kv_read read = {.generation = 3,
                               .job = 12,
                               .staging = 1,
                               .key = {1},
                               .kind = DS4_KV_TAIL,
                               .end = PROMPT_TOK,
                               .n_part = 1,
                               .part = &ref};
    struct ds4_kv_unlink gone = {.generation = 3, .job = 13, .key = {1}, .kind = DS4_KV_TAIL};
    struct ds4_hello hello;
    struct ds4_kv_done done;
    struct ds4_err err = {0};

    start_worker(rig, WAIT_MS, NULL);
    hello = expect_hello(rig);
    assert_true(hello.disk);
    form(rig, 3);
    send_prompt(rig, 3, 0, PROMPT_TOK);
    ds4_buf_clear(&rig->out); /* posted behind the step: the point exists when it runs */
    assert_int_equal(ds4_codec_encode_kv_write(&write, &rig->out, &err), 0);
    send_frame(rig, DS4_FRAME_KV_WRITE, 2, ds4_buf_view(&rig->out)); /* another generation */
    send_frame(rig, DS4_FRAME_KV_WRITE, 3, ds4_buf_view(&rig->out));
    expect_answer(rig, 3, 0);
    done = expect_done(rig, 11);
    assert_int_equal(done.reason, DS4_KV_OK);
    assert_true(done.bytes > 0 && done.duration_ns > 0);

    ref.last_layer = hello.n_layer;
    ref.bytes = done.bytes;
    memcpy(ref.digest, done.digest, sizeof(ref.digest));
    ds4_buf_clear(&rig->out);
    assert_int_equal(ds4_codec_encode_kv_read(&read, &rig->arena, &rig->out, &err), 0);
    send_frame(rig, DS4_FRAME_KV_READ, 3, ds4_buf_view(&rig->out));
    assert_int_equal(expect_done(rig, 12).reason, DS4_KV_OK);

    gone.last_layer = hello.n_layer;
    ds4_buf_clear(&rig->out);
    assert_int_equal(ds4_codec_encode_kv_unlink(&gone, &rig->out, &err), 0);
    send_frame(rig, DS4_FRAME_KV_UNLINK, 3, ds4_buf_view(&rig->out));
    assert_int_equal(expect_done(rig, 13).reason, DS4_KV_OK);
    send_frame(rig, DS4_FRAME_STOP, 3, DS4_STR(""));
    expect_frame(rig, DS4_FRAME_BYE);
    expect_exit(rig, DS4_EXIT_OK);
}

static void steps_of_another_generation_are_dropped(void **state)
{
    struct rig *rig = *state;

    start_worker(rig, WAIT_MS, NULL);
    expect_hello(rig);
    send_prompt(rig, 2, 0, PROMPT_TOK); /* none formed */
    form(rig, 3);
    send_prompt(rig, 2, 0, PROMPT_TOK);
    send_prompt(rig, 4, 0, PROMPT_TOK);
    send_prompt(rig, 3, 0, PROMPT_TOK);
    expect_answer(rig, 3, 0);
}

static void abort_drops_the_generation_and_the_next_one_works(void **state)
{
    struct rig *rig = *state;
    struct ds4_health health;

    start_worker(rig, WAIT_MS, NULL);
    expect_hello(rig);
    form(rig, 3);
    send_frame(rig, DS4_FRAME_ABORT, 2, DS4_STR("")); /* not ours: no effect */
    send_prompt(rig, 3, 0, PROMPT_TOK);
    expect_answer(rig, 3, 0);
    send_frame(rig, DS4_FRAME_ABORT, 3, DS4_STR(""));
    health = expect_health(rig, DS4_WORKER_IDLE);
    assert_int_equal(health.generation, 0);
    assert_string_equal(health.message, "aborted by the router");
    form(rig, 4);
    send_prompt(rig, 4, 0, PROMPT_TOK);
    expect_answer(rig, 4, 0);
    form(rig, 5); /* a FORM alone ends the generation before it */
    send_prompt(rig, 5, 0, PROMPT_TOK);
    expect_answer(rig, 5, 0);
}

static void a_generation_it_cannot_join_is_reported(void **state)
{
    struct rig *rig = *state;
    struct ds4_form wrong = {.generation = 3, .n_stage = 2, .n_blocks = 1, .n_slots = 1};
    struct ds4_note note;
    struct ds4_err err = {0};

    start_worker(rig, WAIT_MS, NULL);
    expect_hello(rig);
    wrong.max_seqs = wrong.max_step_tok = wrong.context_tok = 1;
    ds4_buf_clear(&rig->out);
    assert_int_equal(ds4_codec_encode_form(&wrong, &rig->out, &err), 0);
    send_frame(rig, DS4_FRAME_FORM, 3, ds4_buf_view(&rig->out));
    assert_int_equal(expect_frame(rig, DS4_FRAME_FORM_FAILED).generation, 3);
    assert_int_equal(ds4_codec_decode_note(ds4_buf_view(&rig->payload), &rig->arena, &note, &err),
                     0);
    assert_non_null(strstr(note.text, "2 stages"));
    assert_int_equal(expect_health(rig, DS4_WORKER_IDLE).generation, 0);
    form(rig, 4);
}

static void a_router_that_comes_back_gets_hello_and_no_old_generation(void **state)
{
    struct rig *rig = *state;
    struct ds4_health health;

    start_worker(rig, WAIT_MS, NULL);
    expect_hello(rig);
    form(rig, 3);
    unbind_router(rig);
    bind_router(rig);
    expect_hello(rig);
    health = expect_health(rig, DS4_WORKER_IDLE);
    assert_int_equal(health.generation, 0);
    form(rig, 1); /* the new router counts from its own start */
    send_prompt(rig, 1, 0, PROMPT_TOK);
    expect_answer(rig, 1, 0);
}

static void a_gap_in_steps_is_fatal_and_reported(void **state)
{
    struct rig *rig = *state;

    start_worker(rig, WAIT_MS, NULL);
    expect_hello(rig);
    form(rig, 3);
    send_prompt(rig, 3, 1, PROMPT_TOK);
    expect_fatal(rig, DS4_EXIT_PROTOCOL, "step 1 of generation 3 arrived, expected 0");
}

static void a_malformed_step_is_fatal_and_reported(void **state)
{
    struct rig *rig = *state;

    start_worker(rig, WAIT_MS, NULL);
    expect_hello(rig);
    form(rig, 3);
    send_frame(rig, DS4_FRAME_STEP, 3, DS4_STR("\x22\x01"));
    expect_fatal(rig, DS4_EXIT_PROTOCOL, "malformed step");
}

static void a_router_of_another_version_is_refused_by_name(void **state)
{
    struct rig *rig = *state;
    uint8_t envelope[DS4_ENVELOPE_BYTES];
    struct ds4_frame frame = {.kind = DS4_FRAME_WELCOME};

    start_worker(rig, WAIT_MS, NULL);
    expect_hello(rig);
    ds4_frame_write(&frame, envelope);
    envelope[4] = 9;
    send_envelope(rig, envelope, DS4_STR(""));
    expect_fatal(rig, DS4_EXIT_PROTOCOL, "router speaks wire version 9");
}

static void a_refused_worker_leaves_as_misconfigured(void **state)
{
    struct rig *rig = *state;
    struct ds4_note note = {"another model file"};
    struct ds4_err err = {0};

    start_worker(rig, WAIT_MS, NULL);
    expect_hello(rig);
    ds4_buf_clear(&rig->out);
    assert_int_equal(ds4_codec_encode_note(&note, &rig->out, &err), 0);
    send_frame(rig, DS4_FRAME_REFUSED, 0, ds4_buf_view(&rig->out));
    expect_exit(rig, DS4_EXIT_CONFIG);
}

static void a_step_that_computes_too_long_ends_with_71(void **state)
{
    struct rig *rig = *state;

    start_worker(rig, 1, NULL);
    expect_hello(rig);
    form(rig, 3);
    send_prompt(rig, 3, 0, 2000); /* takes many heartbeats; the limit is 1 ms */
    expect_fatal(rig, DS4_EXIT_STUCK, "step 0 computes for");
}

static void an_idle_worker_sleeps(void **state)
{
    struct rig *rig = *state;
    unsigned long user = 0, system = 0, user_after = 0, system_after = 0;
    int64_t start_ns;
    char path[64];
    FILE *file;

    start_worker(rig, WAIT_MS, NULL);
    expect_hello(rig);
    form(rig, 3);
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)rig->pid);
    for (int i = 0; i < 2; i++) {
        start_ns = ds4_clock_ns();
        while (i == 1 && ds4_clock_ns() - start_ns < 600 * DS4_NS_PER_MS)
            expect_health(rig, DS4_WORKER_READY);
        file = fopen(path, "r");
        assert_non_null(file);
        assert_int_equal(fscanf(file, "%*d %*s %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu",
                                &user_after, &system_after),
                         2);
        fclose(file);
        if (i == 0) {
            user = user_after;
            system = system_after;
        }
    }
    /* In ticks: a thread that spins would have used all of the time. */
    assert_true((int64_t)(user_after - user + system_after - system) * DS4_NS_PER_SEC <
                (ds4_clock_ns() - start_ns) / 3 * sysconf(_SC_CLK_TCK));
}

/* ---- the service manager's side ---- */

static int open_notify(const struct rig *rig, char *path, size_t n)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval timeout = {.tv_sec = WAIT_MS / 1000};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

    snprintf(path, n, "%s/notify", rig->folder);
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    return fd;
}

static bool next_note(int fd, int flags, const char *word)
{
    char text[512];
    ssize_t n = recv(fd, text, sizeof(text) - 1, flags);

    if (n < 0)
        return false;
    text[n] = 0;
    return strstr(text, word) != NULL;
}

static void ready_is_said_after_the_router_answered_and_stopping_at_the_end(void **state)
{
    struct rig *rig = *state;
    char path[64], byte;
    int fd = open_notify(rig, path, sizeof(path));

    start_worker(rig, WAIT_MS, path);
    expect_hello(rig);
    for (int i = 0; i < 3; i++)
        expect_health(rig, DS4_WORKER_IDLE);
    while (recv(fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK) > 0)
        assert_false(next_note(fd, MSG_DONTWAIT, "READY=1"));
    send_frame(rig, DS4_FRAME_WELCOME, 0, DS4_STR(""));
    while (!next_note(fd, 0, "READY=1"))
        continue;
    kill(rig->pid, SIGTERM);
    while (!next_note(fd, 0, "STOPPING=1"))
        continue;
    expect_exit(rig, DS4_EXIT_OK);
    close(fd);
    unlink(path);
}

int main(int argc, char **argv)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(a_worker_says_hello_forms_answers_and_leaves),
        TEST(a_stage_that_is_stopped_goes_on_until_the_router_lets_go),
        TEST(a_second_signal_ends_a_stage_that_waits),
        TEST(stop_ends_a_worker_and_drain_asks_to_be_started_again),
        TEST(jobs_of_the_disk_tier_are_answered),
        TEST(steps_of_another_generation_are_dropped),
        TEST(abort_drops_the_generation_and_the_next_one_works),
        TEST(a_generation_it_cannot_join_is_reported),
        TEST(a_router_that_comes_back_gets_hello_and_no_old_generation),
        TEST(a_gap_in_steps_is_fatal_and_reported),
        TEST(a_malformed_step_is_fatal_and_reported),
        TEST(a_router_of_another_version_is_refused_by_name),
        TEST(a_refused_worker_leaves_as_misconfigured),
        TEST(a_step_that_computes_too_long_ends_with_71),
        TEST(an_idle_worker_sleeps),
        TEST(ready_is_said_after_the_router_answered_and_stopping_at_the_end),
    };

    if (argc == 5 && strcmp(argv[1], "--worker") == 0)
        return run_worker(argv[2], argv[3], argv[4]);
    chain_take_args(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

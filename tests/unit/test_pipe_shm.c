/* worker/pipe_shm.c and worker/shm_ring.c: stages as threads where order is tested, as processes where
 * death is. */
#include "worker/pipe.h"
#include "worker/shm_ring.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define ROW_BYTES 48
#define MAX_ROWS  40
#define MAX_SEQS  6
#define LONG_MS   20000

static const struct ds4_pipe_ops *const ops = &ds4_pipe_shm;

static struct ds4_pipe_config config_of(int32_t stage, int32_t n_stage, uint32_t generation)
{
    struct ds4_pipe_config config = {
        .stage = stage,
        .n_stage = n_stage,
        .generation = generation,
        .row_bytes = ROW_BYTES,
        .max_step_tok = MAX_ROWS,
        .max_seqs = MAX_SEQS,
        .depth = n_stage,
    };

    memset(config.key, 0x5a, sizeof(config.key));
    snprintf((char *)config.key, sizeof(config.key), "%d", (int)getpid());
    return config;
}

static uint32_t mix(uint32_t x)
{
    x ^= x >> 16;
    x *= 0x7feb352dU;
    x ^= x >> 15;
    x *= 0x846ca68bU;
    return x ^ (x >> 16);
}

static int32_t rows_of(int64_t step)
{
    return (int32_t)(1 + mix((uint32_t)step) % MAX_ROWS);
}

static uint8_t byte_of(int64_t step, int32_t hop, size_t i)
{
    return (uint8_t)mix((uint32_t)step * 131 + (uint32_t)hop * 7 + (uint32_t)i);
}

static void fill_record(struct ds4_token_record *record, uint32_t generation, int64_t step)
{
    memset(record, 0, sizeof(*record));
    record->generation = generation;
    record->step_no = step;
    record->n_entry = (uint32_t)(step % (MAX_SEQS + 1));
    for (uint32_t i = 0; i < record->n_entry; i++)
        record->entry[i] = (struct ds4_record_entry){
            .seq = i, .n_token = 1, .token = {(int32_t)mix((uint32_t)step + i) & 0xffff}};
}

static int ring_files(void)
{
    DIR *dir = opendir("/dev/shm");
    char prefix[64] = "ds4-";
    struct dirent *entry;
    struct ds4_pipe_config config = config_of(0, 1, 1);
    int n = 0;

    for (int i = 0; i < DS4_ID_BYTES; i++)
        snprintf(prefix + 4 + 2 * i, 3, "%02x", config.key[i]);
    while (dir != NULL && (entry = readdir(dir)) != NULL)
        n += strncmp(entry->d_name, prefix, strlen(prefix)) == 0;
    if (dir != NULL)
        closedir(dir);
    return n;
}

/* ---- one stage of a run of n_step steps, checked on every hop ---- */

struct stage_run {
    struct ds4_pipe_config config;
    int64_t n_step;
    struct ds4_err err;
    int rc;
};

static int run_step(const struct stage_run *run, struct ds4_pipe *pipe, int64_t step,
                    int64_t *taken, struct ds4_err *err)
{
    const struct ds4_pipe_config *c = &run->config;
    struct ds4_deadline deadline = ds4_deadline_in_ms(LONG_MS);
    struct ds4_token_record got, want;
    uint8_t rows[MAX_ROWS * ROW_BYTES];
    size_t n = (size_t)rows_of(step) * ROW_BYTES;

    while (c->stage < c->n_stage - 1 && *taken < step - c->depth) {
        if (ops->take(pipe, &got, deadline, err))
            return -1;
        fill_record(&want, c->generation, ++*taken);
        want.crc = got.crc;
        if (memcmp(&got, &want,
                   offsetof(struct ds4_token_record, entry) + MAX_SEQS * sizeof(got.entry[0])) != 0)
            return ds4_fail(err, DS4_E_BUG, "record %lld differs", (long long)*taken);
    }
    if (c->stage > 0) {
        if (ops->recv(pipe, step, rows, rows_of(step), deadline, err))
            return -1;
        for (size_t i = 0; i < n; i++)
            if (rows[i] != byte_of(step, c->stage - 1, i))
                return ds4_fail(err, DS4_E_BUG, "byte %zu of step %lld differs", i,
                                (long long)step);
    }
    for (size_t i = 0; i < n; i++)
        rows[i] = byte_of(step, c->stage, i);
    if (c->stage < c->n_stage - 1)
        return ops->send(pipe, step, rows, rows_of(step), deadline, err);
    fill_record(&got, c->generation, step);
    return ops->publish(pipe, &got, deadline, err);
}

static void *run_stage(void *arg)
{
    struct stage_run *run = arg;
    struct ds4_pipe *pipe = ops->open(&run->config, ds4_deadline_in_ms(LONG_MS), &run->err);
    int64_t taken = -1;

    run->rc = pipe == NULL ? -1 : 0;
    for (int64_t step = 0; run->rc == 0 && step < run->n_step; step++)
        run->rc = run_step(run, pipe, step, &taken, &run->err);
    ops->close(pipe);
    return NULL;
}

static void run_stages(int32_t n_stage, int64_t n_step)
{
    struct stage_run run[4];
    pthread_t thread[4];

    for (int32_t s = 0; s < n_stage; s++) {
        run[s] = (struct stage_run){.config = config_of(s, n_stage, 7), .n_step = n_step};
        assert_int_equal(pthread_create(&thread[s], NULL, run_stage, &run[s]), 0);
    }
    for (int32_t s = 0; s < n_stage; s++)
        pthread_join(thread[s], NULL);
    for (int32_t s = 0; s < n_stage; s++)
        if (run[s].rc != 0)
            fail_msg("stage %d: %s", (int)s, run[s].err.msg);
    assert_int_equal(ring_files(), 0);
}

static void rows_and_records_arrive_unchanged_over_two_to_four_stages(void **state)
{
    (void)state;
    for (int32_t n_stage = 2; n_stage <= 4; n_stage++)
        run_stages(n_stage, 500);
}

static void one_stage_alone_needs_no_peers(void **state)
{
    struct ds4_pipe_config config = config_of(0, 1, 1);
    struct ds4_err err = {0};
    struct ds4_pipe *pipe = ops->open(&config, ds4_deadline_in_ms(0), &err);
    struct ds4_token_record record;

    (void)state;
    assert_non_null(pipe);
    fill_record(&record, 1, 0);
    assert_int_equal(ops->publish(pipe, &record, ds4_deadline_in_ms(0), &err), 0);
    assert_int_equal(ops->take(pipe, &record, ds4_deadline_in_ms(0), &err), -1);
    assert_int_equal(err.code, DS4_E_BUG);
    ops->close(pipe);
}

/* ---- two ends in one process ---- */

struct pair {
    struct ds4_pipe *pipe[2];
};

struct opening {
    struct ds4_pipe_config config;
    struct ds4_pipe *pipe;
    struct ds4_err err;
};

static void *open_one(void *arg)
{
    struct opening *opening = arg;

    opening->pipe = ops->open(&opening->config, ds4_deadline_in_ms(LONG_MS), &opening->err);
    return NULL;
}

static void open_pair(struct pair *pair)
{
    struct opening opening = {.config = config_of(1, 2, 9)};
    struct ds4_pipe_config config = config_of(0, 2, 9);
    struct ds4_err err = {0};
    pthread_t thread;

    assert_int_equal(pthread_create(&thread, NULL, open_one, &opening), 0);
    pair->pipe[0] = ops->open(&config, ds4_deadline_in_ms(LONG_MS), &err);
    pthread_join(thread, NULL);
    pair->pipe[1] = opening.pipe;
    if (pair->pipe[0] == NULL || pair->pipe[1] == NULL)
        fail_msg("%s %s", err.msg, opening.err.msg);
}

static void close_pair(struct pair *pair)
{
    ops->close(pair->pipe[0]);
    ops->close(pair->pipe[1]);
    assert_int_equal(ring_files(), 0);
}

static void expect(int rc, const struct ds4_err *err, enum ds4_code code, const char *word)
{
    assert_int_equal(rc, -1);
    if (err->code != code || strstr(err->msg, word) == NULL)
        fail_msg("%s: %s", ds4_code_text(err->code), err->msg);
}

static void waits_end_at_their_deadline_and_name_the_stage(void **state)
{
    struct pair pair;
    struct ds4_token_record record;
    struct ds4_err err = {0};
    uint8_t rows[MAX_ROWS * ROW_BYTES] = {0};
    int64_t start_ns;
    int rc = 0;

    (void)state;
    open_pair(&pair);
    start_ns = ds4_clock_ns();
    rc = ops->recv(pair.pipe[1], 0, rows, 1, ds4_deadline_in_ms(30), &err);
    expect(rc, &err, DS4_E_TIMEOUT, "stage 0");
    assert_true(ds4_clock_ns() - start_ns >= 29 * DS4_NS_PER_MS);
    rc = ops->take(pair.pipe[0], &record, ds4_deadline_in_ms(0), &err);
    expect(rc, &err, DS4_E_TIMEOUT, "stage 1");
    /* depth 2: three steps fit, the fourth waits for the receiver */
    for (int64_t step = 0; step < 3; step++)
        assert_int_equal(ops->send(pair.pipe[0], step, rows, MAX_ROWS, ds4_deadline_in_ms(0), &err),
                         0);
    rc = ops->send(pair.pipe[0], 3, rows, 1, ds4_deadline_in_ms(10), &err);
    expect(rc, &err, DS4_E_TIMEOUT, "stage 1");
    assert_int_equal(ops->recv(pair.pipe[1], 0, rows, MAX_ROWS, ds4_deadline_in_ms(0), &err), 0);
    assert_int_equal(ops->send(pair.pipe[0], 3, rows, 1, ds4_deadline_in_ms(0), &err), 0);
    close_pair(&pair);
}

static void another_step_or_row_count_is_a_protocol_error(void **state)
{
    struct pair pair;
    struct ds4_err err = {0};
    uint8_t rows[MAX_ROWS * ROW_BYTES] = {0};
    int rc;

    (void)state;
    open_pair(&pair);
    assert_int_equal(ops->send(pair.pipe[0], 5, rows, 3, ds4_deadline_in_ms(0), &err), 0);
    rc = ops->recv(pair.pipe[1], 4, rows, 3, ds4_deadline_in_ms(0), &err);
    expect(rc, &err, DS4_E_PROTOCOL, "step 5");
    rc = ops->recv(pair.pipe[1], 5, rows, 2, ds4_deadline_in_ms(0), &err);
    expect(rc, &err, DS4_E_PROTOCOL, "144 bytes");
    rc = ops->recv(pair.pipe[1], 5, rows, MAX_ROWS + 1, ds4_deadline_in_ms(0), &err);
    expect(rc, &err, DS4_E_BUG, "rows");
    rc = ops->recv(pair.pipe[0], 5, rows, 1, ds4_deadline_in_ms(0), &err);
    expect(rc, &err, DS4_E_BUG, "no neighbour");
    close_pair(&pair);
}

static void records_out_of_order_or_of_another_generation_are_refused(void **state)
{
    struct pair pair;
    struct ds4_token_record record;
    struct ds4_err err = {0};
    int rc;

    (void)state;
    open_pair(&pair);
    fill_record(&record, 8, 0);
    rc = ops->publish(pair.pipe[1], &record, ds4_deadline_in_ms(0), &err);
    expect(rc, &err, DS4_E_BUG, "generation 8");
    fill_record(&record, 9, 1);
    assert_int_equal(ops->publish(pair.pipe[1], &record, ds4_deadline_in_ms(0), &err), 0);
    rc = ops->take(pair.pipe[0], &record, ds4_deadline_in_ms(0), &err);
    expect(rc, &err, DS4_E_PROTOCOL, "step 1");
    close_pair(&pair);
}

static void *abort_soon(void *arg)
{
    usleep(20000);
    ops->abort(arg);
    return NULL;
}

static void abort_ends_a_wait_and_all_later_ones(void **state)
{
    struct pair pair;
    struct ds4_err err = {0};
    uint8_t rows[ROW_BYTES] = {0};
    pthread_t thread;
    int rc;

    (void)state;
    open_pair(&pair);
    assert_int_equal(ops->send(pair.pipe[0], 0, rows, 1, ds4_deadline_in_ms(0), &err), 0);
    assert_int_equal(ops->recv(pair.pipe[1], 0, rows, 1, ds4_deadline_in_ms(0), &err), 0);
    assert_int_equal(pthread_create(&thread, NULL, abort_soon, pair.pipe[1]), 0);
    rc = ops->recv(pair.pipe[1], 1, rows, 1, ds4_deadline_in_ms(LONG_MS), &err);
    pthread_join(thread, NULL);
    expect(rc, &err, DS4_E_CANCELLED, "aborted");
    assert_int_equal(ops->send(pair.pipe[0], 1, rows, 1, ds4_deadline_in_ms(0), &err), 0);
    rc = ops->recv(pair.pipe[1], 1, rows, 1, ds4_deadline_in_ms(LONG_MS), &err);
    expect(rc, &err, DS4_E_CANCELLED, "aborted");
    close_pair(&pair);
}

static void *set_flag_soon(void *arg)
{
    usleep(20000);
    atomic_store((atomic_bool *)arg, true);
    return NULL;
}

static void open_gives_up_when_cancelled(void **state)
{
    struct ds4_pipe_config config = config_of(0, 2, 3);
    struct ds4_err err = {0};
    atomic_bool cancel;
    pthread_t thread;

    (void)state;
    atomic_init(&cancel, false);
    config.cancel = &cancel;
    assert_int_equal(pthread_create(&thread, NULL, set_flag_soon, &cancel), 0);
    assert_null(ops->open(&config, ds4_deadline_in_ms(LONG_MS), &err));
    pthread_join(thread, NULL);
    assert_int_equal(err.code, DS4_E_CANCELLED);
    assert_int_equal(ring_files(), 0);
}

static void open_names_the_stage_that_did_not_come(void **state)
{
    struct ds4_err err = {0};

    (void)state;
    for (int32_t stage = 0; stage < 2; stage++) {
        struct ds4_pipe_config config = config_of(stage, 2, 3);

        assert_null(ops->open(&config, ds4_deadline_in_ms(20), &err));
        expect(-1, &err, DS4_E_TIMEOUT, stage == 0 ? "stage 1 did not join" : "stage 0 did not");
        assert_int_equal(ring_files(), 0);
    }
}

static void stages_of_another_shape_do_not_meet(void **state)
{
    struct opening opening = {.config = config_of(1, 2, 9)};
    struct ds4_pipe_config config = config_of(0, 2, 9);
    struct ds4_err err = {0};
    pthread_t thread;

    (void)state;
    opening.config.row_bytes = 2 * ROW_BYTES;
    assert_int_equal(pthread_create(&thread, NULL, open_one, &opening), 0);
    assert_null(ops->open(&config, ds4_deadline_in_ms(500), &err));
    pthread_join(thread, NULL);
    assert_null(opening.pipe);
    assert_int_equal(opening.err.code, DS4_E_PROTOCOL);
    assert_int_equal(ring_files(), 0);
}

static void a_stage_that_leaves_is_noticed_after_what_it_sent(void **state)
{
    struct pair pair;
    struct ds4_token_record record;
    struct ds4_err err = {0};
    uint8_t rows[ROW_BYTES] = {1};
    int rc;

    (void)state;
    open_pair(&pair);
    assert_int_equal(ops->send(pair.pipe[0], 0, rows, 1, ds4_deadline_in_ms(0), &err), 0);
    ops->close(pair.pipe[0]);
    assert_int_equal(ops->recv(pair.pipe[1], 0, rows, 1, ds4_deadline_in_ms(LONG_MS), &err), 0);
    rc = ops->recv(pair.pipe[1], 1, rows, 1, ds4_deadline_in_ms(LONG_MS), &err);
    expect(rc, &err, DS4_E_UNAVAILABLE, "stage 0 left");
    rc = 0;
    for (int64_t step = 0; step < 5 && rc == 0; step++) {
        fill_record(&record, 9, step);
        rc = ops->publish(pair.pipe[1], &record, ds4_deadline_in_ms(LONG_MS), &err);
    }
    expect(rc, &err, DS4_E_UNAVAILABLE, "stage 0 left");
    ops->close(pair.pipe[1]);
}

/* ---- processes that die ---- */

/* A child that opens `stage` of n_stage, says so on the socket, and sleeps until it is killed. */
static pid_t start_peer(int32_t stage, int32_t n_stage, uint32_t generation, int *ready)
{
    struct ds4_pipe_config config = config_of(stage, n_stage, generation);
    int fd[2];
    pid_t pid;

    assert_int_equal(pipe(fd), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct ds4_pipe *peer;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        peer = ops->open(&config, ds4_deadline_in_ms(LONG_MS), NULL);

        if (peer == NULL || write(fd[1], "r", 1) != 1)
            _exit(1);
        for (;;)
            pause();
    }
    close(fd[1]);
    *ready = fd[0];
    return pid;
}

static void kill_peer(pid_t pid)
{
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

static void killed_peers_are_noticed_within_a_second_and_leave_no_files(void **state)
{
    (void)state;
    for (int32_t dying = 0; dying < 2; dying++) {
        struct ds4_pipe_config config = config_of(1 - dying, 2, 20 + (uint32_t)dying);
        struct ds4_token_record record;
        struct ds4_err err = {0};
        struct ds4_pipe *pipe;
        uint8_t rows[ROW_BYTES] = {0};
        char byte;
        int ready, rc;
        pid_t pid = start_peer(dying, 2, config.generation, &ready);

        pipe = ops->open(&config, ds4_deadline_in_ms(LONG_MS), &err);
        if (pipe == NULL)
            fail_msg("%s", err.msg);
        assert_int_equal(read(ready, &byte, 1), 1);
        close(ready);
        assert_int_equal(ring_files(), 0); /* unlinked while both live */
        assert_int_equal(ops->check(pipe, &err), 0);
        kill_peer(pid);
        if (dying == 0) {
            rc = ops->recv(pipe, 0, rows, 1, ds4_deadline_in_ms(LONG_MS), &err);
            expect(rc, &err, DS4_E_UNAVAILABLE, "stage 0 died");
        } else {
            rc = ops->take(pipe, &record, ds4_deadline_in_ms(LONG_MS), &err);
            expect(rc, &err, DS4_E_UNAVAILABLE, "stage 1 died");
            rc = 0;
            for (int64_t step = 0; step < 4 && rc == 0; step++)
                rc = ops->send(pipe, step, rows, 1, ds4_deadline_in_ms(LONG_MS), &err);
            expect(rc, &err, DS4_E_UNAVAILABLE, "stage 1 died");
        }
        rc = ops->check(pipe, &err);
        expect(rc, &err, DS4_E_UNAVAILABLE, "died");
        ops->close(pipe);
    }
}

static void a_peer_killed_in_the_middle_of_a_wait_ends_it(void **state)
{
    struct ds4_pipe_config config = config_of(1, 2, 30);
    struct ds4_err err = {0};
    uint8_t rows[ROW_BYTES];
    int ready, rc;
    char byte;
    pid_t pid = start_peer(0, 2, 30, &ready), killer;
    struct ds4_pipe *pipe = ops->open(&config, ds4_deadline_in_ms(LONG_MS), &err);

    (void)state;
    assert_non_null(pipe);
    assert_int_equal(read(ready, &byte, 1), 1);
    close(ready);
    killer = fork();
    if (killer == 0) {
        usleep(150000);
        kill(pid, SIGKILL);
        _exit(0);
    }
    rc = ops->recv(pipe, 0, rows, 1, ds4_deadline_in_ms(LONG_MS), &err);
    expect(rc, &err, DS4_E_UNAVAILABLE, "stage 0 died");
    waitpid(killer, NULL, 0);
    waitpid(pid, NULL, 0);
    ops->close(pipe);
}

static void what_a_producer_killed_while_opening_leaves_is_swept(void **state)
{
    struct ds4_pipe_config config = config_of(0, 2, 40);
    struct ds4_err err = {0};
    int ready;
    pid_t pid = start_peer(0, 2, 40, &ready);

    (void)state;
    for (int i = 0; i < LONG_MS && ring_files() == 0; i++)
        usleep(1000);
    assert_int_equal(ring_files(), 1);
    kill_peer(pid);
    close(ready);
    assert_int_equal(ring_files(), 1);
    config.generation = 41;
    assert_null(ops->open(&config, ds4_deadline_in_ms(1), &err)); /* sweeps, then finds no peer */
    assert_int_equal(ring_files(), 0);
}

static void a_living_producer_is_not_swept(void **state)
{
    struct ds4_pipe_config config = config_of(0, 2, 51);
    struct ds4_err err = {0};
    int ready;
    pid_t pid = start_peer(0, 2, 50, &ready);

    (void)state;
    for (int i = 0; i < LONG_MS && ring_files() == 0; i++)
        usleep(1000);
    assert_null(ops->open(&config, ds4_deadline_in_ms(1), &err));
    assert_int_equal(ring_files(), 1);
    kill_peer(pid);
    close(ready);
    assert_null(ops->open(&config, ds4_deadline_in_ms(1), &err));
    assert_int_equal(ring_files(), 0);
}

/* ---- a peer that lies ---- */

static struct ds4_shm_ring_config ring_config(void)
{
    struct ds4_shm_ring_config config = {
        .generation = 1, .first_consumer_stage = 1, .n_consumer = 1, .n_slot = 3, .slot_bytes = 64};

    snprintf(config.name, sizeof(config.name), "ds4-test-%d", (int)getpid());
    return config;
}

static void impossible_sizes_in_the_segment_are_refused(void **state)
{
    struct ds4_shm_ring_config config = ring_config();
    struct ds4_err err = {0};
    struct ds4_shm_ring *producer = ds4_shm_ring_create(&config, &err);
    struct ds4_shm_ring *consumer;
    int64_t tag;
    size_t bytes;

    (void)state;
    assert_non_null(producer);
    consumer = ds4_shm_ring_join(&config, 0, ds4_deadline_in_ms(0), &err);
    assert_non_null(consumer);
    assert_int_equal(ds4_shm_ring_meet(producer, ds4_deadline_in_ms(0), &err), 0);
    assert_non_null(ds4_shm_ring_reserve(producer, ds4_deadline_in_ms(0), &err));
    ds4_shm_ring_commit(producer, 1, 65); /* more than a slot */
    assert_null(ds4_shm_ring_peek(consumer, &tag, &bytes, ds4_deadline_in_ms(0), &err));
    assert_int_equal(err.code, DS4_E_PROTOCOL);
    for (int i = 0; i < 3; i++)
        ds4_shm_ring_commit(producer, 1, 1); /* past the ring, without reserving */
    assert_null(ds4_shm_ring_peek(consumer, &tag, &bytes, ds4_deadline_in_ms(0), &err));
    assert_non_null(strstr(err.msg, "4 slots in a ring of 3"));
    for (int i = 0; i < 5; i++)
        ds4_shm_ring_release(consumer); /* more than was sent */
    assert_null(ds4_shm_ring_reserve(producer, ds4_deadline_in_ms(0), &err));
    assert_int_equal(err.code, DS4_E_PROTOCOL);
    ds4_shm_ring_close(consumer);
    ds4_shm_ring_close(producer);
}

static void a_segment_of_another_size_is_not_mapped(void **state)
{
    struct ds4_shm_ring_config config = ring_config();
    struct ds4_err err = {0};
    struct ds4_shm_ring *producer = ds4_shm_ring_create(&config, &err);
    char path[128];

    (void)state;
    assert_non_null(producer);
    snprintf(path, sizeof(path), "/dev/shm/%s", config.name);
    assert_int_equal(truncate(path, 4096), 0);
    assert_null(ds4_shm_ring_join(&config, 0, ds4_deadline_in_ms(0), &err));
    assert_int_equal(err.code, DS4_E_PROTOCOL);
    assert_int_equal(truncate(path, 1 << 20), 0); /* so that close can touch the head */
    ds4_shm_ring_close(producer);
}

static void a_stage_joins_once(void **state)
{
    struct ds4_shm_ring_config config = ring_config();
    struct ds4_err err = {0};
    struct ds4_shm_ring *producer = ds4_shm_ring_create(&config, &err);
    struct ds4_shm_ring *consumer = ds4_shm_ring_join(&config, 0, ds4_deadline_in_ms(0), &err);

    (void)state;
    assert_non_null(consumer);
    assert_null(ds4_shm_ring_join(&config, 0, ds4_deadline_in_ms(0), &err));
    expect(-1, &err, DS4_E_PROTOCOL, "joined as stage 1");
    ds4_shm_ring_close(consumer);
    ds4_shm_ring_close(producer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_and_records_arrive_unchanged_over_two_to_four_stages),
        cmocka_unit_test(one_stage_alone_needs_no_peers),
        cmocka_unit_test(waits_end_at_their_deadline_and_name_the_stage),
        cmocka_unit_test(another_step_or_row_count_is_a_protocol_error),
        cmocka_unit_test(records_out_of_order_or_of_another_generation_are_refused),
        cmocka_unit_test(abort_ends_a_wait_and_all_later_ones),
        cmocka_unit_test(open_gives_up_when_cancelled),
        cmocka_unit_test(open_names_the_stage_that_did_not_come),
        cmocka_unit_test(stages_of_another_shape_do_not_meet),
        cmocka_unit_test(a_stage_that_leaves_is_noticed_after_what_it_sent),
        cmocka_unit_test(killed_peers_are_noticed_within_a_second_and_leave_no_files),
        cmocka_unit_test(a_peer_killed_in_the_middle_of_a_wait_ends_it),
        cmocka_unit_test(what_a_producer_killed_while_opening_leaves_is_swept),
        cmocka_unit_test(a_living_producer_is_not_swept),
        cmocka_unit_test(impossible_sizes_in_the_segment_are_refused),
        cmocka_unit_test(a_segment_of_another_size_is_not_mapped),
        cmocka_unit_test(a_stage_joins_once),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

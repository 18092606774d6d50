/* A pipe between stages that are processes: rows and records arrive as sent, waits end, it forms anew.
 *
 *   check_pipe [PIPE [BACKEND [STAGES]]]      nccl cuda 2; stage N takes card N, counted round
 *
 * A plain program, because machines lent for GPU work have no test library.  Every case forks its
 * stages before the device is opened; they share one page, through which they agree and which stands in
 * for the router (the pipe's id, "abort now").  One line a case, last "N passed, N failed". */
#include "common/crc32c.h"
#include "worker/pipe.h"

#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define ROW_BYTES 32768 /* four bf16 streams of 4096 */
#define MAX_ROWS  2048
#define MAX_SEQS  8
#define DEPTH     4
#define N_STEP    200
#define WAIT_MS   20000
#define CASE_S    60
#define SEED      12345

static const struct ds4_pipe_ops *ops;
static const struct ds4_backend *backend;
static int32_t n_stage = 2;

static struct shared {
    atomic_uint id_generation; /* whose id this is */
    struct ds4_pipe_id id;
    atomic_int arrived[64]; /* at barrier k */
    atomic_int gone;        /* a stage is dead */
} * shared;

/* What a stage has. */
struct stage {
    int32_t number;
    struct ds4_device *dev;
    void *area;
    uint8_t *dev_rows;
    uint8_t *host_rows;
    struct ds4_pipe *pipe;
    int64_t step; /* next */
    int64_t record;
    int n_barrier;
};

static void die(const char *what, const struct ds4_err *err)
{
    fprintf(stderr, "check_pipe: %s: %s\n", what, err == NULL ? "" : err->msg);
    _exit(1);
}

static void must(int rc, const char *what, const struct ds4_err *err)
{
    if (rc != 0)
        die(what, err);
}

static void want(bool ok, const char *what)
{
    if (!ok)
        die(what, NULL);
}

static struct ds4_deadline soon(void)
{
    return ds4_deadline_in_ms(WAIT_MS);
}

static void barrier(struct stage *st, int32_t n)
{
    struct ds4_deadline deadline = soon();
    int k = st->n_barrier++;

    atomic_fetch_add(&shared->arrived[k], 1);
    while (atomic_load(&shared->arrived[k]) < n) {
        want(!ds4_deadline_passed(deadline), "barrier");
        usleep(1000);
    }
}

/* ---- stand-ins for the router ---- */

static int offer(void *owner, const struct ds4_pipe_id *id, struct ds4_err *err)
{
    (void)err;
    shared->id = *id;
    atomic_store(&shared->id_generation, *(const uint32_t *)owner);
    return 0;
}

static int await(void *owner, struct ds4_pipe_id *id, struct ds4_deadline deadline,
                 struct ds4_err *err)
{
    while (atomic_load(&shared->id_generation) != *(const uint32_t *)owner) {
        if (ds4_deadline_passed(deadline))
            return ds4_fail(err, DS4_E_TIMEOUT, "stage 0 did not say where the pipe is");
        usleep(1000);
    }
    *id = shared->id;
    return 0;
}

static void *abort_later(void *arg)
{
    usleep(200000);
    ops->abort(arg);
    return NULL;
}

static void *abort_when_told(void *arg)
{
    while (atomic_load(&shared->gone) == 0)
        usleep(1000);
    ops->abort(arg);
    return NULL;
}

/* ---- stages ---- */

static bool is_last(const struct stage *st)
{
    return st->number == n_stage - 1;
}

static struct ds4_pipe_config config_of(const struct stage *st, uint32_t generation)
{
    struct ds4_pipe_config config = {.stage = st->number,
                                     .n_stage = n_stage,
                                     .generation = generation,
                                     .row_bytes = ROW_BYTES,
                                     .max_step_tok = MAX_ROWS,
                                     .max_seqs = MAX_SEQS,
                                     .depth = DEPTH,
                                     .backend = backend,
                                     .dev = st->dev,
                                     .dev_area = st->area};

    snprintf((char *)config.key, sizeof(config.key), "check%d", (int)getppid());
    return config;
}

static void open_device(struct stage *st, int32_t number)
{
    struct ds4_device_config config = {.ordinal = number, .n_thread = 1};
    struct ds4_pipe_config pipe;
    struct ds4_err err = {0};
    size_t bytes;

    *st = (struct stage){.number = number};
    st->dev = backend->open(&config, &err);
    if (st->dev == NULL)
        die("device", &err);
    pipe = config_of(st, 1);
    bytes = ops->area_bytes(&pipe);
    st->area = backend->alloc(st->dev, bytes < 1 ? 1 : bytes, "pipe", &err);
    st->dev_rows = backend->alloc(st->dev, (size_t)MAX_ROWS * ROW_BYTES, "rows", &err);
    st->host_rows = malloc((size_t)MAX_ROWS * ROW_BYTES);
    if (st->area == NULL || st->dev_rows == NULL || st->host_rows == NULL)
        die("memory", &err);
}

static struct ds4_pipe *try_open(struct stage *st, uint32_t generation, int64_t ms,
                                 struct ds4_err *err)
{
    struct ds4_pipe_exchange exchange = {&generation, offer, await};
    struct ds4_pipe_config config = config_of(st, generation);

    config.exchange = &exchange;
    st->step = 0;
    st->record = 0;
    return ops->open(&config, ds4_deadline_in_ms(ms), err);
}

static void form(struct stage *st, uint32_t generation)
{
    struct ds4_err err = {0};

    st->pipe = try_open(st, generation, WAIT_MS, &err);
    if (st->pipe == NULL)
        die("open", &err);
}

static void leave(struct stage *st)
{
    ops->close(st->pipe);
    st->pipe = NULL;
}

/* A stage that leaves takes along what is still under way to others. */
static void leave_together(struct stage *st)
{
    barrier(st, n_stage);
    leave(st);
}

/* The same on every stage. */
static uint32_t mix(uint32_t a, uint32_t b)
{
    uint32_t x = (a * 2654435761u) ^ (b * 2246822519u) ^ SEED;

    x ^= x >> 15;
    x *= 2246822519u;
    return x ^ (x >> 13);
}

static int32_t rows_of(int64_t step)
{
    uint32_t x = mix((uint32_t)step, 1);

    if (step % 50 == 7)
        return MAX_ROWS;
    return step % 3 == 0 ? (int32_t)(x % 200) + 1 : (int32_t)(x % 6) + 1;
}

static void fill(uint8_t *at, size_t n, int64_t step)
{
    uint32_t x = mix((uint32_t)step, 2);

    for (size_t i = 0; i + 4 <= n; i += 4) {
        x = x * 1664525u + 1013904223u;
        memcpy(at + i, &x, 4);
    }
}

static uint32_t crc_of_step(int64_t step, size_t n)
{
    static uint8_t *copy;

    if (copy == NULL)
        copy = malloc((size_t)MAX_ROWS * ROW_BYTES);
    want(copy != NULL, "memory");
    fill(copy, n, step);
    return ds4_crc32c(0, copy, n);
}

static void take_record(struct stage *st)
{
    struct ds4_token_record record = {0};
    struct ds4_err err = {0};

    must(ops->take(st->pipe, &record, soon(), &err), "take", &err);
    want(record.step_no == st->record &&
             record.entry[0].token[0] == (int32_t)mix((uint32_t)st->record, 3),
         "record of another step");
    st->record++;
}

static void publish(struct stage *st, uint32_t generation)
{
    struct ds4_token_record record = {.generation = generation, .n_entry = 1, .step_no = st->step};
    struct ds4_err err = {0};

    record.entry[0].token[0] = (int32_t)mix((uint32_t)st->step, 3);
    must(ops->publish(st->pipe, &record, soon(), &err), "publish", &err);
}

/* One step of this stage; `next_known`: its successor may be announced. */
static void run_step(struct stage *st, uint32_t generation, bool next_known)
{
    int32_t n_row = rows_of(st->step);
    size_t bytes = (size_t)n_row * ROW_BYTES;
    struct ds4_err err = {0};

    if (!is_last(st) && st->step >= DEPTH)
        take_record(st);
    if (st->number == 0) {
        fill(st->host_rows, bytes, st->step);
        backend->upload(st->dev, st->dev_rows, st->host_rows, bytes);
    } else {
        must(ops->recv(st->pipe, st->step, st->dev_rows, n_row, soon(), &err), "recv", &err);
        if (next_known)
            must(ops->expect(st->pipe, st->step + 1, rows_of(st->step + 1), &err), "expect", &err);
        backend->download(st->dev, st->host_rows, st->dev_rows, bytes);
        want(ds4_crc32c(0, st->host_rows, bytes) == crc_of_step(st->step, bytes), "other rows");
    }
    if (is_last(st))
        publish(st, generation);
    else
        must(ops->send(st->pipe, st->step, st->dev_rows, n_row, soon(), &err), "send", &err);
    st->step++;
}

static void run_steps(struct stage *st, uint32_t generation, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        run_step(st, generation, i + 1 < n && mix((uint32_t)i, 4) % 2 == 0);
    while (!is_last(st) && st->record < st->step)
        take_record(st);
}

/* ---- cases: what every stage does ---- */

static void rows_and_records_arrive_as_sent(struct stage *st)
{
    form(st, 1);
    run_steps(st, 1, N_STEP);
    leave_together(st);
}

/* Whatever a stage waits for here never comes. */
static void wait_in_vain(struct stage *st)
{
    struct ds4_token_record record;
    struct ds4_err err = {0};
    int rc = is_last(st) ? ops->recv(st->pipe, st->step, st->dev_rows, 1, soon(), &err)
                         : ops->take(st->pipe, &record, soon(), &err);

    want(rc == -1, "a wait for what never comes ended well");
    if (err.code != DS4_E_CANCELLED && err.code != DS4_E_UNAVAILABLE)
        die("not cancelled", &err);
}

static void abort_ends_every_wait_and_the_next_generation_works(struct stage *st)
{
    for (uint32_t generation = 1; generation <= 4; generation++) {
        pthread_t thread;
        int64_t begin_ns;

        form(st, generation);
        run_steps(st, generation, 10);
        begin_ns = ds4_clock_ns();
        want(pthread_create(&thread, NULL, abort_later, st->pipe) == 0, "thread");
        wait_in_vain(st);
        pthread_join(thread, NULL);
        want(ds4_clock_ns() - begin_ns < 5 * DS4_NS_PER_SEC, "an abort took 5 s");
        leave(st);
        barrier(st, n_stage);
    }
}

static void a_missing_stage_is_a_timeout_and_coming_later_helps(struct stage *st)
{
    struct ds4_err err = {0};

    if (!is_last(st)) {
        st->pipe = try_open(st, 1, 1500, &err);
        want(st->pipe == NULL, "a pipe without its last stage opened");
        if (err.code != DS4_E_TIMEOUT)
            die("not a timeout", &err);
    }
    barrier(st, n_stage);
    form(st, 2);
    run_steps(st, 2, 20);
    leave_together(st);
}

static void a_peer_of_another_step_is_found_out(struct stage *st)
{
    struct ds4_err err = {0};

    form(st, 1);
    if (st->number == 0)
        must(ops->send(st->pipe, 5, st->dev_rows, 1, soon(), &err), "send", &err);
    if (st->number == 1) {
        want(ops->recv(st->pipe, 4, st->dev_rows, 1, soon(), &err) == -1, "step 5 for step 4");
        if (err.code != DS4_E_PROTOCOL)
            die("not a violation", &err);
    }
    barrier(st, n_stage);
    leave(st);
}

/* The last stage dies; generation 2 is formed with its successor. */
static void survivors_of_a_killed_stage_form_again(struct stage *st)
{
    pthread_t thread;

    if (is_last(st) && atomic_load(&shared->gone) == 0) {
        form(st, 1);
        run_steps(st, 1, 10);
        raise(SIGKILL);
    }
    if (!is_last(st)) {
        form(st, 1);
        run_steps(st, 1, 10);
        want(pthread_create(&thread, NULL, abort_when_told, st->pipe) == 0, "thread");
        wait_in_vain(st);
        pthread_join(thread, NULL);
        leave(st);
    }
    form(st, 2);
    run_steps(st, 2, 20);
    leave_together(st);
}

struct check {
    const char *name;
    void (*stage)(struct stage *st);
    bool last_dies;
};

static pid_t start(const struct check *c, int32_t number)
{
    pid_t pid = fork();
    struct stage st;

    if (pid != 0)
        return pid;
    alarm(CASE_S); /* a hang is a failure, not a hang */
    open_device(&st, number);
    c->stage(&st);
    _exit(0);
}

static bool run(const struct check *c)
{
    pid_t pid[DS4_MAX_STAGES];
    bool ok = true;
    int status;

    memset(shared, 0, sizeof(*shared));
    for (int32_t s = 0; s < n_stage; s++)
        pid[s] = start(c, s);
    if (c->last_dies) {
        ok = waitpid(pid[n_stage - 1], &status, 0) > 0 && WIFSIGNALED(status) &&
             WTERMSIG(status) == SIGKILL;
        atomic_store(&shared->gone, 1);
        pid[n_stage - 1] = start(c, n_stage - 1);
    }
    for (int32_t s = 0; s < n_stage; s++)
        if (waitpid(pid[s], &status, 0) < 0 || status != 0)
            ok = false;
    return ok;
}

int main(int argc, char **argv)
{
    static const struct check checks[] = {
#define CHECK(name, dies) {#name, name, dies}
        CHECK(rows_and_records_arrive_as_sent, false),
        CHECK(abort_ends_every_wait_and_the_next_generation_works, false),
        CHECK(a_missing_stage_is_a_timeout_and_coming_later_helps, false),
        CHECK(a_peer_of_another_step_is_found_out, false),
        CHECK(survivors_of_a_killed_stage_form_again, true),
    };
    int n_passed = 0, n_failed = 0;

    ops = ds4_pipe_find(argc > 1 ? argv[1] : "nccl");
    backend = ds4_backend_find(argc > 2 ? argv[2] : "cuda");
    n_stage = argc > 3 ? (int32_t)strtol(argv[3], NULL, 10) : 2;
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (ops == NULL || backend == NULL || n_stage < 2 || n_stage > DS4_MAX_STAGES ||
        shared == MAP_FAILED) {
        fprintf(stderr, "check_pipe [PIPE [BACKEND [STAGES]]] of those built in\n");
        return 2;
    }
    for (size_t i = 0; i < sizeof(checks) / sizeof(checks[0]); i++) {
        int64_t begin_ns = ds4_clock_ns();
        bool ok = run(&checks[i]);

        printf("%s  %s (%.1f s)\n", ok ? "ok  " : "FAIL", checks[i].name,
               (double)(ds4_clock_ns() - begin_ns) / (double)DS4_NS_PER_SEC);
        fflush(stdout);
        n_passed += ok;
        n_failed += !ok;
    }
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed != 0;
}

/* Hops between stages: latency and bandwidth of rows, latency of token records.
 *
 *   bench_pipe [PIPE [BACKEND [STAGES [REPEATS]]]]      shm cpu 2 2000
 *
 * STAGES processes play a pipeline; with cuda, stage N takes card N, counted round.  NCCL's settings are
 * its environment (NCCL_P2P_DISABLE and so on).  The clock is one for all processes.
 *
 * rows     latency: from the call of send() on one stage to the moment the next one's device has the
 *          rows, one step under way at a time; the mean over the hops of a step.  Bandwidth: the same
 *          rows sent without waiting, received one step ahead, over the slowest hop.
 * record   from publish() on the last stage to the return of take(), on the stage that is last to have it.
 *
 * Printed are the median and the 10th and 90th percentile; nothing is asserted. */
#include "common/clock.h"
#include "worker/pipe.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define ROW_BYTES   32768 /* four bf16 streams of 4096 */
#define MAX_ROWS    2048
#define MAX_SEQS    16
#define MAX_REPEATS 5000
#define MAX_STAGES  8
#define WAIT_MS     60000
#define N_WARM      5

static const int32_t row_counts[] = {1, 6, 64, MAX_ROWS};
#define N_SIZE (sizeof(row_counts) / sizeof(row_counts[0]))

enum phase { ONE_BY_ONE, STREAM, N_PHASE };

static const struct ds4_pipe_ops *ops;
static const struct ds4_backend *backend;
static int32_t n_stage = 2, repeats = 2000;

/* Written by the stages, read by the parent; also carries the pipe's id. */
static struct results {
    atomic_bool have_id;
    struct ds4_pipe_id id;
    _Atomic int64_t sent_ns[MAX_STAGES]; /* by stage: begin of its newest send */
    _Atomic int64_t published_ns;
    int64_t hop_ns[MAX_STAGES][N_SIZE][MAX_REPEATS];    /* by receiving stage */
    int64_t record_ns[MAX_STAGES][N_SIZE][MAX_REPEATS]; /* by taking stage */
    int64_t stream_ns[MAX_STAGES][N_SIZE];
} * results;

struct stage {
    int32_t number;
    struct ds4_device *dev;
    void *area;
    uint8_t *rows;
    struct ds4_pipe *pipe;
    int64_t step;
    int64_t record;
};

static void check(int rc, const struct ds4_err *err)
{
    if (rc == 0)
        return;
    fprintf(stderr, "%s\n", err->msg);
    _exit(1);
}

static int offer(void *owner, const struct ds4_pipe_id *id, struct ds4_err *err)
{
    (void)owner;
    (void)err;
    results->id = *id;
    atomic_store(&results->have_id, true);
    return 0;
}

static int await(void *owner, struct ds4_pipe_id *id, struct ds4_deadline deadline,
                 struct ds4_err *err)
{
    (void)owner;
    while (!atomic_load(&results->have_id)) {
        if (ds4_deadline_passed(deadline))
            return ds4_fail(err, DS4_E_TIMEOUT, "stage 0 did not say where the pipe is");
        usleep(1000);
    }
    *id = results->id;
    return 0;
}

static void open_stage(struct stage *st, int32_t number)
{
    struct ds4_device_config device = {.ordinal = number, .n_thread = 1};
    struct ds4_pipe_exchange exchange = {NULL, offer, await};
    struct ds4_pipe_config config = {.stage = number,
                                     .n_stage = n_stage,
                                     .generation = 1,
                                     .row_bytes = ROW_BYTES,
                                     .max_step_tok = MAX_ROWS,
                                     .max_seqs = MAX_SEQS,
                                     .depth = n_stage + 1,
                                     .backend = backend,
                                     .exchange = &exchange};
    struct ds4_err err = {0};

    *st = (struct stage){.number = number, .dev = backend->open(&device, &err)};
    check(st->dev == NULL ? -1 : 0, &err);
    st->area = backend->alloc(st->dev, ops->area_bytes(&config) + 1, "pipe", &err);
    check(st->area == NULL ? -1 : 0, &err);
    st->rows = backend->alloc(st->dev, (size_t)MAX_ROWS * ROW_BYTES, "rows", &err);
    check(st->rows == NULL ? -1 : 0, &err);
    config.dev = st->dev;
    config.dev_area = st->area;
    snprintf((char *)config.key, sizeof(config.key), "bench%d", (int)getppid());
    st->pipe = ops->open(&config, ds4_deadline_in_ms(WAIT_MS), &err);
    check(st->pipe == NULL ? -1 : 0, &err);
}

static int32_t repeats_of(size_t size)
{
    int32_t n = repeats / (row_counts[size] / 16 + 1);

    return n < 20 ? 20 : n;
}

/* The step's rows at this stage, on to the next; returns when they were complete here.  *hop_ns, which
 * may be NULL: since the stage before sent them. */
static int64_t move_rows(struct stage *st, int32_t n_row, bool ahead, int64_t *hop_ns)
{
    struct ds4_deadline deadline = ds4_deadline_in_ms(WAIT_MS);
    struct ds4_err err = {0};
    int64_t now_ns;

    if (st->number > 0) {
        check(ops->recv(st->pipe, st->step, st->rows, n_row, deadline, &err), &err);
        if (ahead)
            check(ops->expect(st->pipe, st->step + 1, n_row, &err), &err);
        if (hop_ns != NULL)
            backend->sync(st->dev);
    }
    now_ns = ds4_clock_ns();
    if (hop_ns != NULL && st->number > 0) /* now: once we send, the next step may begin */
        *hop_ns = now_ns - atomic_load(&results->sent_ns[st->number - 1]);
    if (st->number < n_stage - 1) {
        atomic_store(&results->sent_ns[st->number], ds4_clock_ns());
        check(ops->send(st->pipe, st->step, st->rows, n_row, deadline, &err), &err);
    }
    st->step++;
    return now_ns;
}

static int64_t exchange_record(struct stage *st)
{
    struct ds4_token_record record = {.generation = 1, .n_entry = MAX_SEQS};
    struct ds4_deadline deadline = ds4_deadline_in_ms(WAIT_MS);
    struct ds4_err err = {0};

    record.step_no = st->record++;
    if (st->number < n_stage - 1) {
        check(ops->take(st->pipe, &record, deadline, &err), &err);
        return ds4_clock_ns() - atomic_load(&results->published_ns);
    }
    atomic_store(&results->published_ns, ds4_clock_ns());
    check(ops->publish(st->pipe, &record, deadline, &err), &err);
    return 0;
}

static void run_one_by_one(struct stage *st, size_t size)
{
    for (int32_t i = -N_WARM; i < repeats_of(size); i++) {
        int64_t hop_ns = 0, record_ns;

        move_rows(st, row_counts[size], false, &hop_ns);
        record_ns = exchange_record(st);

        if (i < 0)
            continue;
        results->hop_ns[st->number][size][i] = hop_ns;
        results->record_ns[st->number][size][i] = record_ns;
    }
}

/* A record at the end only: the stage before waits for nothing but free slots. */
static void run_stream(struct stage *st, size_t size)
{
    int32_t n = repeats_of(size);
    int64_t first_ns = 0, here_ns = 0, unused;

    for (int32_t i = 0; i < n; i++) {
        here_ns = move_rows(st, row_counts[size], i + 1 < n, i + 1 == n || i == 0 ? &unused : NULL);
        if (i == 0)
            first_ns = here_ns;
    }
    results->stream_ns[st->number][size] = here_ns - first_ns;
    (void)exchange_record(st);
}

static void run_stage(int32_t number)
{
    struct stage st;

    open_stage(&st, number);
    for (size_t size = 0; size < N_SIZE; size++) {
        run_one_by_one(&st, size);
        run_stream(&st, size);
    }
    ops->close(st.pipe);
    backend->close(st.dev);
    _exit(0);
}

/* ---- the parent ---- */

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

    return (x > y) - (x < y);
}

static void print_latency(const char *what, size_t bytes, int64_t *ns, int32_t n, double gb_per_s)
{
    qsort(ns, (size_t)n, sizeof(*ns), compare);
    printf("%-8s %10zu %8d %12.1f %12.1f %12.1f", what, bytes, (int)n, (double)ns[n / 2] / 1e3,
           (double)ns[n / 10] / 1e3, (double)ns[n - 1 - n / 10] / 1e3);
    if (gb_per_s > 0)
        printf(" %10.2f", gb_per_s);
    printf("\n");
}

static void print_size(size_t size)
{
    int32_t n = repeats_of(size);
    size_t bytes = (size_t)row_counts[size] * ROW_BYTES;
    int64_t slowest_ns = 1, *mean = results->hop_ns[0][size];

    for (int32_t i = 0; i < n; i++) {
        mean[i] = 0;
        for (int32_t s = 1; s < n_stage; s++)
            mean[i] += results->hop_ns[s][size][i];
        mean[i] /= n_stage - 1;
    }
    for (int32_t s = 1; s < n_stage; s++)
        if (results->stream_ns[s][size] > slowest_ns)
            slowest_ns = results->stream_ns[s][size];
    print_latency("rows", bytes, mean, n, (double)bytes * (n - 1) / (double)slowest_ns);
}

static void print_records(void)
{
    int32_t n = repeats_of(0);
    int64_t *last = results->record_ns[0][0];

    for (int32_t i = 0; i < n; i++)
        for (int32_t s = 1; s < n_stage - 1; s++)
            if (results->record_ns[s][0][i] > last[i])
                last[i] = results->record_ns[s][0][i];
    print_latency("record",
                  offsetof(struct ds4_token_record, entry) +
                      MAX_SEQS * sizeof(struct ds4_record_entry),
                  last, n, 0);
}

int main(int argc, char **argv)
{
    pid_t pid[MAX_STAGES];
    bool ok = true;
    int status;

    ops = ds4_pipe_find(argc > 1 ? argv[1] : "shm");
    backend = ds4_backend_find(argc > 2 ? argv[2] : "cpu");
    if (argc > 3)
        n_stage = (int32_t)strtol(argv[3], NULL, 10);
    if (argc > 4)
        repeats = (int32_t)strtol(argv[4], NULL, 10);
    results =
        mmap(NULL, sizeof(*results), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (results == MAP_FAILED || ops == NULL || backend == NULL || n_stage < 2 ||
        n_stage > MAX_STAGES || repeats < 1 || repeats > MAX_REPEATS) {
        fprintf(stderr, "bench_pipe [PIPE [BACKEND [STAGES of 2 to %d [REPEATS of 1 to %d]]]]\n",
                MAX_STAGES, MAX_REPEATS);
        return 1;
    }
    for (int32_t s = 0; s < n_stage; s++) {
        pid[s] = fork();
        if (pid[s] == 0)
            run_stage(s);
    }
    for (int32_t s = 0; s < n_stage; s++) {
        if (wait(&status) > 0 && status == 0)
            continue;
        for (int32_t other = 0; ok && other < n_stage; other++)
            kill(pid[other], SIGKILL); /* they would wait for the one that failed */
        ok = false;
    }
    if (!ok)
        return 1;
    printf("%s, %s, %d stages\n", ops->name, backend->name, (int)n_stage);
    printf("%-8s %10s %8s %12s %12s %12s %10s\n", "what", "bytes", "n", "median_us", "p10_us",
           "p90_us", "GB/s");
    for (size_t size = 0; size < N_SIZE; size++)
        print_size(size);
    print_records();
    return 0;
}

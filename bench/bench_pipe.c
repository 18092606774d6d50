/* Hops between stages over shared memory: latency and bandwidth of rows, latency of token records.
 *
 *   bench_pipe [REPEATS]
 *
 * Two processes play stage 0 and 1.  Latency: the sender puts its clock into the rows (or the record),
 * the receiver subtracts it from its own after the call returned; the clock is one for all processes.
 * One message is under way at a time.  Bandwidth: the same rows sent without waiting.  Printed are the
 * median and the 10th and 90th percentile; nothing is asserted. */
#include "common/clock.h"
#include "worker/pipe.h"

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
#define WAIT_MS     60000

static const int32_t row_counts[] = {1, 6, 64, MAX_ROWS};
#define N_SIZE (sizeof(row_counts) / sizeof(row_counts[0]))

/* Written by the receiving side, read by the parent. */
struct results {
    int64_t hop_ns[N_SIZE][MAX_REPEATS];
    int64_t stream_ns[N_SIZE];
    int64_t token_ns[MAX_REPEATS];
};

static struct ds4_pipe *open_stage(int32_t stage)
{
    struct ds4_pipe_config config = {.stage = stage,
                                     .n_stage = 2,
                                     .generation = 1,
                                     .row_bytes = ROW_BYTES,
                                     .max_step_tok = MAX_ROWS,
                                     .max_seqs = MAX_SEQS,
                                     .depth = 2};
    struct ds4_err err = {0};
    struct ds4_pipe *pipe;

    snprintf((char *)config.key, sizeof(config.key), "bench%d",
             (int)(stage == 0 ? getppid() : getpid()));
    pipe = ds4_pipe_shm.open(&config, ds4_deadline_in_ms(WAIT_MS), &err);
    if (pipe == NULL) {
        fprintf(stderr, "%s\n", err.msg);
        _exit(1);
    }
    return pipe;
}

static void check(int rc, const struct ds4_err *err)
{
    if (rc == 0)
        return;
    fprintf(stderr, "%s\n", err->msg);
    _exit(1);
}

static int32_t repeats_of(size_t size, int32_t repeats)
{
    int32_t n = repeats / (row_counts[size] / 16 + 1);

    return n < 20 ? 20 : n;
}

/* Stage 0: sends rows; the record of each step is its acknowledgement. */
static void run_sender(struct results *results, char *rows, int32_t repeats)
{
    struct ds4_pipe *pipe = open_stage(0);
    struct ds4_token_record record;
    struct ds4_err err = {0};
    int64_t step = 0;
    int n_token = 0;

    for (size_t size = 0; size < N_SIZE; size++)
        for (int phase = 0; phase < 2; phase++)
            for (int32_t i = 0; i < repeats_of(size, repeats); i++, step++) {
                int64_t now_ns = ds4_clock_ns();

                memcpy(rows, &now_ns, sizeof(now_ns));
                check(ds4_pipe_shm.send(pipe, step, rows, row_counts[size],
                                        ds4_deadline_in_ms(WAIT_MS), &err),
                      &err);
                if (phase == 1 && i + 1 < repeats_of(size, repeats))
                    continue; /* stream: one acknowledgement at the end, below */
                do
                    check(ds4_pipe_shm.take(pipe, &record, ds4_deadline_in_ms(WAIT_MS), &err),
                          &err);
                while (record.entry[0].token[0] == 0);
                now_ns = ds4_clock_ns() - (int64_t)record.entry[0].seq;
                if (size == 0 && phase == 0 && n_token < MAX_REPEATS)
                    results->token_ns[n_token++] = now_ns;
            }
    ds4_pipe_shm.close(pipe);
    _exit(0);
}

static void run_receiver(struct results *results, char *rows, int32_t repeats)
{
    struct ds4_pipe *pipe = open_stage(1);
    struct ds4_token_record record = {.generation = 1, .n_entry = MAX_SEQS};
    struct ds4_err err = {0};
    int64_t step = 0, record_no = 0, start_ns = 0, sent_ns;

    for (size_t size = 0; size < N_SIZE; size++)
        for (int phase = 0; phase < 2; phase++) {
            int32_t n = repeats_of(size, repeats);

            for (int32_t i = 0; i < n; i++, step++) {
                check(ds4_pipe_shm.recv(pipe, step, rows, row_counts[size],
                                        ds4_deadline_in_ms(WAIT_MS), &err),
                      &err);
                memcpy(&sent_ns, rows, sizeof(sent_ns));
                if (phase == 0)
                    results->hop_ns[size][i] = ds4_clock_ns() - sent_ns;
                else if (i == 0)
                    start_ns = sent_ns;
                if (phase == 1 && i + 1 < n)
                    continue;
                results->stream_ns[size] = ds4_clock_ns() - start_ns;
                record.step_no = record_no++;
                record.entry[0].token[0] = 1;
                record.entry[0].seq = (uint64_t)ds4_clock_ns();
                check(ds4_pipe_shm.publish(pipe, &record, ds4_deadline_in_ms(WAIT_MS), &err), &err);
            }
        }
    ds4_pipe_shm.close(pipe);
}

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

int main(int argc, char **argv)
{
    int32_t repeats = argc > 1 ? (int32_t)strtol(argv[1], NULL, 10) : 2000;
    struct results *results =
        mmap(NULL, sizeof(*results), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    char *rows = calloc(MAX_ROWS, ROW_BYTES);
    int status;
    pid_t pid;

    if (results == MAP_FAILED || rows == NULL || repeats < 1 || repeats > MAX_REPEATS) {
        fprintf(stderr, "bench_pipe [REPEATS of 1 to %d]\n", MAX_REPEATS);
        return 1;
    }
    memset(rows, 1, (size_t)MAX_ROWS * ROW_BYTES);
    pid = fork();
    if (pid == 0)
        run_sender(results, rows, repeats);
    run_receiver(results, rows, repeats);
    if (waitpid(pid, &status, 0) != pid || status != 0)
        return 1;
    printf("%-8s %10s %8s %12s %12s %12s %10s\n", "what", "bytes", "n", "median_us", "p10_us",
           "p90_us", "GB/s");
    for (size_t size = 0; size < N_SIZE; size++) {
        int32_t n = repeats_of(size, repeats);
        size_t bytes = (size_t)row_counts[size] * ROW_BYTES;

        print_latency("rows", bytes, results->hop_ns[size], n,
                      (double)bytes * n / (double)results->stream_ns[size]);
    }
    print_latency("tokens",
                  offsetof(struct ds4_token_record, entry) +
                      MAX_SEQS * sizeof(struct ds4_record_entry),
                  results->token_ns, repeats_of(0, repeats), 0);
    return 0;
}

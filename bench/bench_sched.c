/* Cost of the scheduler per step: pump, build, post, and book the answer, at 1, 64 and 512 sequences, with
 * an empty index and with a million cached tokens; and of admitting a prompt beside those.
 *
 * A scripted last stage answers at once.  Its answering is not in the numbers; that it checks and copies
 * each posted step is, in the place of encoding and sending it.  One line per case. */
#include "common/clock.h"
#include "router/sched/sched.h"
#include "tests/support/sched_rig.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define BENCH_PROMPT_TOK 64
#define BENCH_MAX_NEW    4000
#define BENCH_TALKS      64    /* cached conversations */
#define BENCH_TALK_TOK   16384 /* of so many tokens: a million in all */

/* Processor time of this thread: what else runs on the machine is not the scheduler's. */
static int64_t cpu_ns(void)
{
    struct timespec t;

    if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t) != 0)
        abort();
    return (int64_t)t.tv_sec * DS4_NS_PER_SEC + t.tv_nsec;
}

/* A million tokens of finished conversations. */
static void fill_index(struct ds4_rig *rig)
{
    for (uint32_t t = 0; t < BENCH_TALKS; t++) {
        struct ds4_rig_client *client = ds4_rig_client(rig, 100000 + t, BENCH_TALK_TOK, 1);

        if (ds4_rig_submit(client, NULL, NULL) != 0)
            abort();
        ds4_rig_run(rig);
        ds4_rig_client_free(client);
    }
}

/* Admits the next turns of those conversations: look-up, lease, first step. */
static void admit(struct ds4_rig *rig)
{
    int64_t took_ns = 0, worst_ns = 0, cached = 0;

    for (uint32_t t = 0; t < BENCH_TALKS; t++) {
        struct ds4_rig_client *client = ds4_rig_client(rig, 100000 + t, BENCH_TALK_TOK, 1);
        int64_t begin;

        if (ds4_rig_submit(client, NULL, NULL) != 0)
            abort();
        begin = cpu_ns();
        ds4_sched_pump(rig->sched, rig->now_ns);
        begin = cpu_ns() - begin;
        took_ns += begin;
        worst_ns = begin > worst_ns ? begin : worst_ns;
        ds4_rig_run(rig);
        cached += client->cached;
        ds4_rig_client_free(client);
    }
    printf("admitting a prompt of %d tokens, %.2f %% of it cached: %.0f us, worst %.0f us\n",
           BENCH_TALK_TOK, 100.0 * (double)cached / BENCH_TALKS / BENCH_TALK_TOK,
           (double)took_ns / BENCH_TALKS / 1e3, (double)worst_ns / 1e3);
}

static void run(int32_t n_seq, int32_t n_stage, int64_t n_step, bool full)
{
    const struct ds4_rig_shape shape = {
        .n_stage = n_stage,
        .n_blocks = n_seq * 17 + 1 + (full ? BENCH_TALKS * (BENCH_TALK_TOK / 256 + 2) : 0),
        .n_slots = n_seq + 2,
        .context_tok = full ? BENCH_TALK_TOK + 2 : BENCH_PROMPT_TOK + BENCH_MAX_NEW + 1,
        .n_points = full ? 5000 : 0,
        .config = {.max_seqs = n_seq, .queue_max = n_seq, .chunk_tok = 2048},
    };
    struct ds4_rig_client **client = calloc((size_t)n_seq, sizeof(struct ds4_rig_client *));
    struct ds4_sched_stats stats;
    struct ds4_rig rig;
    int64_t sched_ns = 0, worst_ns = 0;
    int64_t rows = 0;

    if (client == NULL)
        abort();
    ds4_rig_open(&rig, &shape);
    rig.stage.check_cells = false;
    if (full) {
        fill_index(&rig);
        if (n_seq == 1)
            admit(&rig);
    }
    for (int32_t c = 0; c < n_seq; c++) {
        client[c] = ds4_rig_client(&rig, (uint32_t)c, BENCH_PROMPT_TOK, BENCH_MAX_NEW);
        client[c]->req->n_stop_id = 0;
        client[c]->req->n_model_stop_id = 0;
        if (ds4_rig_submit(client[c], NULL, NULL) != 0)
            abort();
    }
    do { /* until everybody decodes */
        ds4_rig_turn(&rig);
        ds4_sched_stats(rig.sched, &stats);
    } while (stats.decoding < n_seq);
    for (int64_t step = 0; step < n_step; step++) {
        struct ds4_tokens_out out;
        struct ds4_err err = {0};
        int64_t begin, took;

        if (!ds4_scripted_answer(&rig.stage, &out))
            abort();
        rows += out.n_entry;
        begin = cpu_ns();
        if (ds4_sched_tokens(rig.sched, &out, rig.now_ns, &err) != 0)
            abort();
        ds4_sched_pump(rig.sched, rig.now_ns);
        took = cpu_ns() - begin;
        sched_ns += took;
        worst_ns = took > worst_ns ? took : worst_ns;
    }
    printf("%4d sequences  %d stages  %7" PRId64 " cached  %6" PRId64
           " steps  %8.1f us/step  %6.0f ns/row  worst %.0f us\n",
           n_seq, n_stage, stats.index_tok, n_step, (double)sched_ns / (double)n_step / 1e3,
           (double)sched_ns / (double)rows, (double)worst_ns / 1e3);
    for (int32_t c = 0; c < n_seq; c++) {
        if (client[c]->n_done == 0)
            ds4_sched_cancel(rig.sched, client[c]->req, DS4_CANCEL_SHUTDOWN, rig.now_ns);
        ds4_rig_client_free(client[c]);
    }
    free(client);
    ds4_rig_close(&rig);
}

int main(void)
{
    printf("scheduler: one acknowledged step in, one step out (the copy the scripted stage keeps "
           "included)\n");
    for (int full = 0; full < 2; full++) {
        run(1, 1, 3000, full);
        run(1, 4, 3000, full);
        run(64, 1, 3000, full);
        run(64, 4, 3000, full);
        run(512, 2, 3000, full);
        run(512, 4, 3000, full);
    }
    return 0;
}

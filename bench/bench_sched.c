/* Cost of the scheduler per step: pump, build, post, and book the answer, at 1, 64 and 512 sequences.
 *
 * A scripted last stage answers at once.  Its answering is not in the numbers; that it checks and copies
 * each posted step is, in the place of encoding and sending it.  One line per case. */
#include "common/clock.h"
#include "router/sched/sched.h"
#include "tests/support/sched_rig.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define BENCH_PROMPT_TOK 64
#define BENCH_MAX_NEW    4000

static void run(int32_t n_seq, int32_t n_stage, int64_t n_step)
{
    const struct ds4_rig_shape shape = {
        .n_stage = n_stage,
        .n_blocks = n_seq * 17 + 1,
        .n_slots = n_seq + 2,
        .context_tok = BENCH_PROMPT_TOK + BENCH_MAX_NEW + 1,
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
        begin = ds4_clock_ns();
        if (ds4_sched_tokens(rig.sched, &out, begin, &err) != 0)
            abort();
        ds4_sched_pump(rig.sched, begin);
        took = ds4_clock_ns() - begin;
        sched_ns += took;
        worst_ns = took > worst_ns ? took : worst_ns;
    }
    printf("%4d sequences  %d stages  %6" PRId64
           " steps  %8.1f us/step  %6.0f ns/row  worst %.0f us\n",
           n_seq, n_stage, n_step, (double)sched_ns / (double)n_step / 1e3,
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
    run(1, 1, 3000);
    run(1, 4, 3000);
    run(64, 1, 3000);
    run(64, 4, 3000);
    run(512, 2, 3000);
    run(512, 4, 3000);
    return 0;
}

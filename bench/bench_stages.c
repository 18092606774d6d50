/* A model over stages, without the router: the step threads of the worker, driven from here.
 *
 *   bench_stages MODEL [NAME=VALUE...]
 *
 *   stages=2 pipe=shm backend=cpu      as in bench_pipe; stage N takes card N, counted round
 *   prompt=2048 chunk=2048             prefill: tokens of a prompt, rows per step
 *   decode=64 streams=1                then so many tokens each for so many sequences, one row a step
 *   rounds=3                           the whole again with other prompts
 *   logprobs=0                         of each token; makes the digest one of bits, and decoding slower
 *   stream=auto                        residual streams: auto, f32, bf16
 *   products=auto                      exact, fast; auto as the worker's: exact on cpu, fast on cuda
 *
 * Every stage builds the same steps, as the router would send them, and keeps as many posted as the
 * router does; tokens go from step to step through the records.  Prefill: from the first step's posting to
 * the last prompt's first token.  Decode: from there to the last token.  The digest is over all tokens
 * and log probabilities: equal digests are equal bits. */
#include "common/clock.h"
#include "common/crc32c.h"
#include "common/log.h"
#include "proto/codec.h"
#include "worker/loop.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_STAGES  8
#define MAX_STREAMS 64
#define MAX_ROUNDS  32
#define MAX_SECONDS 600
#define FORM_MS     60000
#define SPARE_TOK   64
#define N_IDS       200 /* prompts use the first ids, which every vocabulary has */

static struct options {
    const char *model;
    const char *backend;
    const char *pipe;
    const char *stream;
    const char *products;
    int32_t stages, prompt, chunk, decode, streams, rounds, logprobs;
} opt = {.backend = "cpu",
         .pipe = "shm",
         .stream = "auto",
         .products = "auto",
         .stages = 2,
         .prompt = 2048,
         .chunk = 2048,
         .decode = 64,
         .streams = 1,
         .rounds = 3};

static struct shared {
    atomic_int arrived[MAX_ROUNDS + 2];
    atomic_bool have_id;
    struct ds4_pipe_id id;
    struct ds4_hello hello[MAX_STAGES];
    double prefill_tok_s[MAX_ROUNDS];
    double decode_tok_s[MAX_ROUNDS];
    double busy[MAX_STAGES]; /* share of the time that a stage computed */
    uint32_t digest;
} * shared;

struct stage {
    int32_t number;
    struct ds4_loop *loop;
    int64_t step; /* next to post */
    int32_t n_barrier;
    int64_t last_step[MAX_STREAMS]; /* what each sequence's next token comes from */
    int32_t seq_blocks;
    int64_t first_token_ns; /* of the last prompt of the round */
    int64_t last_token_ns;
    int64_t prefill_end;      /* step of that token */
    struct ds4_arena scratch; /* of decoding answers */
};

static void check(int rc, const struct ds4_err *err)
{
    if (rc == 0)
        return;
    fprintf(stderr, "bench_stages: %s\n", err->msg);
    _exit(1);
}

static void barrier(struct stage *st)
{
    int k = st->n_barrier++;

    atomic_fetch_add(&shared->arrived[k], 1);
    while (atomic_load(&shared->arrived[k]) < opt.stages)
        usleep(200);
}

/* ---- answers ---- */

static void take_tokens(struct stage *st, struct ds4_loop_event *event)
{
    struct ds4_arena_mark mark = ds4_arena_mark(&st->scratch);
    struct ds4_tokens_out out;
    struct ds4_err err = {0};

    st->last_token_ns = ds4_clock_ns();
    check(ds4_codec_decode_tokens(ds4_buf_view(&event->payload), event->generation, &st->scratch,
                                  &out, &err),
          &err);
    if (out.step_no == st->prefill_end)
        st->first_token_ns = st->last_token_ns;
    for (int32_t e = 0; e < out.n_entry; e++) {
        const struct ds4_token_entry *entry = &out.entry[e];

        if ((entry->flags & DS4_TOKEN_NONFINITE) != 0)
            fprintf(stderr, "bench_stages: step %lld is not finite\n", (long long)out.step_no);
        shared->digest = ds4_crc32c(shared->digest, entry->token,
                                    (size_t)entry->n_token * sizeof(entry->token[0]));
        shared->digest = ds4_crc32c(shared->digest, entry->logprob,
                                    (size_t)entry->n_logprob * sizeof(entry->logprob[0]));
    }
    ds4_arena_reset(&st->scratch, mark);
}

/* Handles what came until `kind` came, or, for DS4_LOOP_STOPPED, what is there now. */
static void take_events(struct stage *st, enum ds4_loop_event_kind kind)
{
    struct pollfd fd = {.fd = ds4_loop_event_fd(st->loop), .events = POLLIN};
    struct ds4_loop_event event;
    bool seen = kind == DS4_LOOP_STOPPED;

    do {
        (void)poll(&fd, 1, 1);
        if (atomic_load(&shared->have_id) && st->number > 0)
            ds4_loop_give_pipe_id(st->loop, 1, &shared->id);
        while (ds4_loop_next_event(st->loop, &event)) {
            struct ds4_arena_mark mark = ds4_arena_mark(&st->scratch);

            if (event.kind == DS4_LOOP_LOAD_FAILED || event.kind == DS4_LOOP_FORM_FAILED ||
                event.kind == DS4_LOOP_IDLE)
                check(-1, &event.err);
            if (event.kind == DS4_LOOP_PLANNED)
                shared->hello[st->number] = event.hello;
            if (event.kind == DS4_LOOP_TOKENS)
                take_tokens(st, &event);
            if (event.kind == DS4_LOOP_OFFER) {
                check(ds4_codec_decode_pipe_id(ds4_buf_view(&event.payload), &st->scratch,
                                               &shared->id, &event.err),
                      &event.err);
                atomic_store(&shared->have_id, true);
            }
            ds4_arena_reset(&st->scratch, mark);
            ds4_buf_deinit(&event.payload);
            seen = seen || event.kind == kind;
        }
    } while (!seen);
}

/* ---- steps ---- */

static void must_have(const void *memory)
{
    if (memory == NULL) {
        fprintf(stderr, "bench_stages: no memory for a step\n");
        _exit(1);
    }
}

/* As many steps under way as the router keeps. */
static void wait_for_room(struct stage *st, int64_t under_way)
{
    struct ds4_loop_status status;

    for (;;) {
        take_events(st, DS4_LOOP_STOPPED);
        ds4_loop_get_status(st->loop, &status);
        if (st->step - (int64_t)status.steps_done < under_way)
            return;
    }
}

static struct ds4_seq_open *opening(struct ds4_arena *arena, int32_t slot, int32_t round)
{
    struct ds4_seq_open *open = ds4_arena_take_array(arena, 1, sizeof(*open));

    must_have(open);
    *open = (struct ds4_seq_open){.seq = (uint64_t)round * MAX_STREAMS + (uint64_t)slot + 1,
                                  .slot = slot,
                                  .epoch = (uint32_t)round + 1,
                                  .n_prompt = opt.prompt,
                                  .max_pos = opt.prompt + opt.decode + SPARE_TOK,
                                  .ignore_stop = true,
                                  .sampling = {.top_p = 1,
                                               .repetition_penalty = 1,
                                               .n_logprobs = opt.logprobs - 1,
                                               .think_close_id = -1,
                                               .force_close_at = -1,
                                               .forced_after_id = -1}};
    return open;
}

/* One sequence's step: n_tok prompt tokens from base_pos on, or, with from_step >= 0, the next one. */
static void post_step(struct stage *st, int32_t slot, int32_t round, int32_t base_pos,
                      int32_t n_tok, int64_t from_step)
{
    struct ds4_step_packet *packet;
    struct ds4_step_entry *entry;
    struct ds4_err err = {0};
    int32_t *token, *block, *closed;

    wait_for_room(st, opt.stages + 1);
    packet = ds4_loop_take_packet(st->loop);
    must_have(packet);
    entry = ds4_arena_take_array(&packet->arena, 1, sizeof(*entry));
    token = ds4_arena_take_array(&packet->arena, (size_t)n_tok, sizeof(*token));
    block = ds4_arena_take_array(&packet->arena, (size_t)st->seq_blocks, sizeof(*block));
    closed = ds4_arena_take_array(&packet->arena, 1, sizeof(*closed));
    must_have(entry);
    must_have(token);
    must_have(block);
    must_have(closed);
    for (int32_t t = 0; t < n_tok; t++)
        token[t] =
            from_step >= 0
                ? 0
                : (int32_t)((uint32_t)(base_pos + t + 977 * slot + 7919 * round) * 2654435761u >>
                            16) %
                      N_IDS;
    for (int32_t b = 0; b < st->seq_blocks; b++)
        block[b] = slot * st->seq_blocks + b;
    *closed = slot;
    *entry = (struct ds4_step_entry){.seq = (uint64_t)round * MAX_STREAMS + (uint64_t)slot + 1,
                                     .slot = slot,
                                     .epoch = (uint32_t)round + 1,
                                     .kind = from_step >= 0 ? DS4_ENTRY_DECODE : DS4_ENTRY_PREFILL,
                                     .base_pos = base_pos,
                                     .n_tok = n_tok,
                                     .sample = base_pos + n_tok >= opt.prompt,
                                     .from_step = from_step,
                                     .cap_tok = st->seq_blocks * DS4_BLOCK_TOK,
                                     .n_block = st->seq_blocks,
                                     .block = block};
    packet->step = (struct ds4_step){.generation = 1,
                                     .step_no = st->step,
                                     .n_entry = 1,
                                     .entry = entry,
                                     .n_tok = n_tok,
                                     .token = token};
    if (base_pos == 0) {
        packet->step.n_open = 1;
        packet->step.open = opening(&packet->arena, slot, round);
        packet->step.n_close = round > 0;
        packet->step.close_slot = closed;
    }
    st->last_step[slot] = st->step++;
    check(ds4_loop_post_step(st->loop, packet, &err), &err);
}

static void run_round(struct stage *st, int32_t round)
{
    int32_t n_chunk = (opt.prompt + opt.chunk - 1) / opt.chunk;
    int64_t begin_ns;

    st->prefill_end = st->step + (int64_t)n_chunk * opt.streams - 1;
    barrier(st);
    begin_ns = ds4_clock_ns();
    for (int32_t slot = 0; slot < opt.streams; slot++)
        for (int32_t pos = 0; pos < opt.prompt; pos += opt.chunk)
            post_step(st, slot, round, pos,
                      opt.prompt - pos < opt.chunk ? opt.prompt - pos : opt.chunk, -1);
    for (int32_t t = 0; t < opt.decode; t++)
        for (int32_t slot = 0; slot < opt.streams; slot++)
            post_step(st, slot, round, opt.prompt + t, 1, st->last_step[slot]);
    wait_for_room(st, 1);
    if (st->number < opt.stages - 1)
        return;
    shared->prefill_tok_s[round] =
        1e9 * (double)opt.prompt * opt.streams / (double)(st->first_token_ns - begin_ns);
    shared->decode_tok_s[round] =
        1e9 * (double)opt.decode * opt.streams / (double)(st->last_token_ns - st->first_token_ns);
}

/* ---- a stage's life ---- */

static void form(struct stage *st, int32_t context)
{
    struct ds4_form form = {.generation = 1,
                            .n_stage = opt.stages,
                            .n_slots = opt.streams,
                            .max_seqs = opt.streams,
                            .max_step_tok = opt.chunk > opt.streams ? opt.chunk : opt.streams,
                            .context_tok = context};
    struct ds4_err err = {0};

    st->seq_blocks = context / DS4_BLOCK_TOK;
    form.n_blocks = st->seq_blocks * opt.streams;
    snprintf((char *)form.pipe_key, sizeof(form.pipe_key), "stages%d", (int)getppid());
    check(ds4_loop_post_form(st->loop, &form, &err), &err);
    take_events(st, DS4_LOOP_FORMED);
}

static void run_stage(int32_t number)
{
    int32_t context =
        (opt.prompt + opt.decode + SPARE_TOK + DS4_BLOCK_TOK - 1) / DS4_BLOCK_TOK * DS4_BLOCK_TOK;
    struct ds4_loop_config config = {
        .stage = {.model_path = opt.model,
                  .stage = number,
                  .n_stage = opt.stages,
                  .backend = opt.backend,
                  .device = {.ordinal = number},
                  .context_tok = context,
                  .max_seqs = opt.streams,
                  .max_step_tok = opt.chunk > opt.streams ? opt.chunk : opt.streams},
        .pipe = ds4_pipe_find(opt.pipe),
        .depth = opt.stages + 2,
        .form_ms = FORM_MS,
        .pipe_wait_ms = MAX_SECONDS * 1000,
    };
    struct stage st = {.number = number};
    struct ds4_loop_status before, after;
    int64_t begin_ns;
    struct ds4_err err = {0};

    alarm(MAX_SECONDS);
    ds4_log_set_level(DS4_LOG_WARN);
    if (strcmp(opt.stream, "f32") == 0)
        config.stage.stream = DS4_STREAM_F32;
    else if (strcmp(opt.stream, "bf16") == 0)
        config.stage.stream = DS4_STREAM_BF16;
    if (strcmp(opt.products, "fast") == 0 ||
        (strcmp(opt.products, "auto") == 0 && strcmp(opt.backend, "cuda") == 0))
        config.stage.device.products = DS4_PRODUCTS_FAST;
    ds4_arena_init(&st.scratch, (size_t)2 * DS4_CODEC_ARENA_BYTES);
    st.loop = ds4_loop_new(&config, &err);
    check(st.loop == NULL ? -1 : 0, &err);
    begin_ns = ds4_clock_ns();
    take_events(&st, DS4_LOOP_LOADED);
    fprintf(stderr, "stage %d: loaded in %.1f s\n", (int)number,
            (double)(ds4_clock_ns() - begin_ns) / 1e9);
    barrier(&st);
    form(&st, context);
    ds4_loop_get_status(st.loop, &before);
    begin_ns = ds4_clock_ns();
    for (int32_t round = 0; round < opt.rounds; round++)
        run_round(&st, round);
    ds4_loop_get_status(st.loop, &after);
    shared->busy[number] =
        1e9 * (after.busy_seconds - before.busy_seconds) / (double)(ds4_clock_ns() - begin_ns);
    barrier(&st);
    _exit(0);
}

/* ---- the parent ---- */

static bool read_option(const char *text)
{
    const struct {
        const char *name;
        int32_t *number;
        const char **word;
    } names[] = {
        {"stages", &opt.stages, NULL},     {"prompt", &opt.prompt, NULL},
        {"chunk", &opt.chunk, NULL},       {"decode", &opt.decode, NULL},
        {"streams", &opt.streams, NULL},   {"rounds", &opt.rounds, NULL},
        {"logprobs", &opt.logprobs, NULL}, {"backend", NULL, &opt.backend},
        {"pipe", NULL, &opt.pipe},         {"stream", NULL, &opt.stream},
        {"products", NULL, &opt.products},
    };
    const char *equal = strchr(text, '=');

    for (size_t i = 0; equal != NULL && i < sizeof(names) / sizeof(names[0]); i++) {
        if (strlen(names[i].name) != (size_t)(equal - text) ||
            strncmp(names[i].name, text, (size_t)(equal - text)) != 0)
            continue;
        if (names[i].word != NULL)
            *names[i].word = equal + 1;
        else
            *names[i].number = (int32_t)strtol(equal + 1, NULL, 10);
        return true;
    }
    return false;
}

static bool read_options(int argc, char **argv)
{
    if (argc < 2)
        return false;
    opt.model = argv[1];
    for (int i = 2; i < argc; i++)
        if (!read_option(argv[i]))
            return false;
    return opt.stages >= 1 && opt.stages <= MAX_STAGES && opt.prompt >= 1 && opt.chunk >= 1 &&
           opt.chunk <= DS4_MAX_STEP_TOK && opt.decode >= 1 && opt.streams >= 1 &&
           opt.streams <= MAX_STREAMS && opt.rounds >= 1 && opt.rounds <= MAX_ROUNDS &&
           opt.logprobs >= 0 && opt.logprobs <= DS4_MAX_TOP_LOGPROBS &&
           ds4_pipe_find(opt.pipe) != NULL && ds4_backend_find(opt.backend) != NULL;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void print_rate(const char *what, double *rate)
{
    qsort(rate, (size_t)opt.rounds, sizeof(*rate), compare);
    printf("%s %.1f (%.1f..%.1f) tok/s  ", what, rate[opt.rounds / 2], rate[0],
           rate[opt.rounds - 1]);
}

int main(int argc, char **argv)
{
    pid_t pid[MAX_STAGES];
    bool ok = true;
    int status;

    if (!read_options(argc, argv)) {
        fprintf(stderr, "bench_stages MODEL [NAME=VALUE...], see the head of its source\n");
        return 2;
    }
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 1;
    for (int32_t s = 0; s < opt.stages; s++) {
        pid[s] = fork();
        if (pid[s] == 0)
            run_stage(s);
    }
    for (int32_t s = 0; s < opt.stages; s++) {
        if (wait(&status) > 0 && status == 0)
            continue;
        for (int32_t other = 0; ok && other < opt.stages; other++)
            kill(pid[other], SIGKILL); /* they would wait for the one that failed */
        ok = false;
    }
    if (!ok)
        return 1;
    printf("%s %s stages=%d pipe=%s prompt=%d chunk=%d streams=%d: ", opt.model, opt.backend,
           (int)opt.stages, opt.pipe, (int)opt.prompt, (int)opt.chunk, (int)opt.streams);
    print_rate("prefill", shared->prefill_tok_s);
    print_rate("decode", shared->decode_tok_s);
    printf("busy");
    for (int32_t s = 0; s < opt.stages; s++)
        printf(" %.0f%%", 100 * shared->busy[s]);
    printf("  digest %08x\n", shared->digest);
    return 0;
}

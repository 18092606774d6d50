/* Speed of a whole stage: prefill in chunks and decode steps of 1, 6, 16 and 64 rows.
 *
 *   bench_stage [MODEL [BACKEND [FIRST_LAYER [CONTEXT...]]]] [rows=1,6,16,64] [again=1]
 *
 * MODEL is a file or synth:SHAPE:QUANT:SEED (default synth:tiny:q8:1 on cpu); with FIRST_LAYER the stage is
 * the last of two and holds only the layers from there on and the head, for models that do not fit one
 * card; its rows are drawn.  One sequence is prefilled for real; the other rows of a decode step are
 * sequences that share its cached blocks and write blocks of their own.  "device" is the step's operations
 * alone, replayed from the same batch; "step" includes taking the logits to the host and sampling there.
 * Medians; with again=N the median of N prefills and how far they differ.  rows=0: prefill only. */
#include "common/clock.h"
#include "common/dtype.h"
#include "common/log.h"
#include "common/synth.h"
#include "worker/stage_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK     2048
#define MAX_SEQS  64
#define ROUNDS    15
#define OWN       2 /* blocks a sequence writes itself */
#define MAX_BLOCK 512
#define MAX_AGAIN 15
#define MAX_ROWS  8

struct options {
    int32_t rows[MAX_ROWS]; /* of the decode steps */
    int32_t n_rows;
    int32_t again; /* prefills of each context */
};

static struct ds4_stage *st;
static struct ds4_step step;
static struct ds4_step_entry entry[MAX_SEQS];
static struct ds4_seq_open opens[MAX_SEQS];
static int32_t token[CHUNK], table[MAX_SEQS][MAX_BLOCK];
static int64_t step_no;
static uint32_t seed = 1;

static void die(const char *what)
{
    fprintf(stderr, "bench_stage: %s\n", what);
    exit(2);
}

static int32_t random_token(void)
{
    seed = seed * 1664525u + 1013904223u;
    return (int32_t)((seed >> 4) % (uint32_t)st->model.n_vocab);
}

static void open_stage(const char *model, const char *backend, int32_t first_layer, int32_t context)
{
    struct ds4_stage_config config = {.model_path = model,
                                      .load = DS4_LOAD_MMAP,
                                      .n_stage = 1,
                                      .backend = backend,
                                      .device = {.products = DS4_PRODUCTS_FAST},
                                      .context_tok = context,
                                      .max_seqs = MAX_SEQS,
                                      .max_step_tok = CHUNK};
    struct ds4_err err = {0};
    int32_t layers[2];

    if (first_layer > 0) {
        struct ds4_model_shape shape;

        if (ds4_synth_shape(strstr(model, "flash") != NULL ? "flash" : "tiny", &shape, &err) != 0)
            die(err.msg);
        layers[0] = first_layer, layers[1] = shape.n_layer - first_layer;
        config.stage = 1, config.n_stage = 2, config.n_partition = 2, config.partition = layers;
    }
    st = ds4_stage_new(&config, NULL, NULL, &err);
    if (st == NULL)
        die(err.msg);
}

static void form(void)
{
    static uint32_t generation;
    struct ds4_hello hello = {0};
    struct ds4_err err = {0};
    struct ds4_form f = {.generation = ++generation,
                         .n_stage = st->n_stage,
                         .max_seqs = MAX_SEQS,
                         .max_step_tok = CHUNK};

    ds4_stage_hello(st, &hello);
    f.n_blocks = hello.max_blocks, f.n_slots = hello.max_slots, f.context_tok = hello.max_context;
    if (ds4_stage_form(st, &f, &err) != 0)
        die(err.msg);
    step.generation = generation;
    step_no = 0;
}

static void open_sequence(int32_t slot)
{
    opens[slot] = (struct ds4_seq_open){.seq = (uint64_t)slot + 1,
                                        .slot = slot,
                                        .epoch = 1,
                                        .n_prompt = 1,
                                        .max_pos = 1 << 20,
                                        .ignore_stop = true,
                                        .sampling = {.top_p = 1,
                                                     .repetition_penalty = 1,
                                                     .n_logprobs = -1,
                                                     .think_close_id = -1,
                                                     .force_close_at = -1,
                                                     .forced_after_id = -1}};
}

/* What a stage before this one would have sent: rows that differ, in a step and from step to step.  Equal
 * ones would all choose the same experts. */
static void hand_over(int32_t n_row)
{
    const size_t row = ds4_stage_row_bytes(st);
    const bool f32 = st->plan.stream == DS4_DTYPE_F32;
    const size_t n = 2 * CHUNK * row / (f32 ? 4 : 2);
    static unsigned char *rows;

    if (rows == NULL) {
        rows = malloc(2 * CHUNK * row);
        if (rows == NULL)
            die("no memory for rows");
        for (size_t i = 0; i < n; i++) {
            seed = seed * 1664525u + 1013904223u;
            float x = (float)(seed >> 8) * 0x1p-23F - 1.0F;
            if (f32)
                memcpy(rows + 4 * i, &x, sizeof(x));
            else
                memcpy(rows + 2 * i, &(uint16_t){ds4_bf16_from_f32(x)}, sizeof(uint16_t));
        }
    }
    st->backend->upload(st->dev, ds4_stage_handoff(st), rows + (size_t)(step_no * 7 % CHUNK) * row,
                        (size_t)n_row * row);
    st->backend->sync(st->dev);
}

/* One step of n entries of n_tok rows each at base; returns its seconds. */
static double run(int32_t n, int32_t n_tok, int32_t base, bool sample, int32_t n_open)
{
    static struct ds4_token_record record;
    struct ds4_tokens_out out;
    struct ds4_err err = {0};
    const int32_t n_block = (base + n_tok) / DS4_BLOCK_TOK + 1;
    int64_t start;
    double seconds;

    for (int32_t e = 0; e < n; e++) {
        entry[e] = (struct ds4_step_entry){.seq = (uint64_t)e + 1,
                                           .slot = e,
                                           .epoch = 1,
                                           .kind = DS4_ENTRY_PREFILL,
                                           .base_pos = base,
                                           .n_tok = n_tok,
                                           .sample = sample,
                                           .from_step = -1,
                                           .first_tok = e * n_tok,
                                           .cap_tok = n_block * DS4_BLOCK_TOK,
                                           .n_block = n_block,
                                           .block = table[e]};
        for (int32_t t = 0; t < n_tok; t++)
            token[e * n_tok + t] = random_token();
    }
    step.step_no = step_no++;
    step.n_open = n_open, step.open = opens;
    step.n_entry = n, step.entry = entry;
    step.n_tok = n * n_tok, step.token = token;
    if (ds4_stage_begin(st, &step, &err) != 0)
        die(err.msg);
    if (!st->first)
        hand_over(step.n_tok);
    start = ds4_clock_ns();
    if (ds4_stage_forward(st, &step, NULL, &record, &out, &err) != 0)
        die(err.msg);
    seconds = (double)(ds4_clock_ns() - start) * 1e-9;
    if (ds4_stage_finish(st, &step, NULL, &err) != 0)
        die(err.msg);
    return seconds;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* The batch of the last step, its operations alone. */
static double device_seconds(void)
{
    double s[ROUNDS];

    for (int r = -1; r < ROUNDS; r++) {
        int64_t start;

        st->backend->sync(st->dev);
        start = ds4_clock_ns();
        st->backend->begin(st->dev, &st->batch);
        if (!st->backend->enter(st->dev)) {
            st->backend->leave(st->dev);
            return 0.0;
        }
        st->backend->leave(st->dev);
        st->backend->sync(st->dev);
        if (r >= 0)
            s[r] = (double)(ds4_clock_ns() - start) * 1e-9;
    }
    qsort(s, ROUNDS, sizeof(s[0]), compare);
    return s[ROUNDS / 2];
}

static double experts_per_step(void)
{
    static uint64_t before[2];
    uint64_t count[2];
    double mean;

    st->backend->download(st->dev, count, st->buf.spread, sizeof(count));
    mean = count[0] > before[0] ? (double)(count[1] - before[1]) / (double)(count[0] - before[0])
                                : 0.0;
    memcpy(before, count, sizeof(before));
    return mean;
}

static void decode(int32_t n, int32_t context)
{
    double s[ROUNDS], device;
    int32_t pos = context;

    (void)experts_per_step();
    for (int r = -3; r < ROUNDS; r++) {
        double t = run(n, 1, pos++, true, 0);

        if (r >= 0)
            s[r] = t;
    }
    qsort(s, ROUNDS, sizeof(s[0]), compare);
    device = device_seconds();
    printf("decode %2d rows at %6d: device %8.3f ms %7.0f tok/s, step %8.3f ms (%.3f..%.3f) %7.0f "
           "tok/s, %.1f experts\n",
           n, context, device * 1e3, device > 0.0 ? n / device : 0.0, s[ROUNDS / 2] * 1e3,
           s[0] * 1e3, s[ROUNDS - 1] * 1e3, n / s[ROUNDS / 2], experts_per_step());
    fflush(stdout);
}

/* Sequence 0 for real; the others own only the blocks from `context` on.  Seconds of the chunks, the first
 * and the last. */
static double fill(int32_t context, double *first, double *last)
{
    const int32_t shared = context / DS4_BLOCK_TOK;
    int32_t at = 0, next_block = shared + OWN;
    double all = 0.0;

    form();
    for (int32_t s = 0; s < MAX_SEQS; s++) {
        open_sequence(s);
        for (int32_t b = 0; b < shared + OWN; b++)
            table[s][b] = s == 0 || b < shared ? b : next_block++;
    }
    for (; at < context; at += CHUNK) {
        *last = run(1, CHUNK, at, false, at == 0 ? MAX_SEQS : 0);
        st->backend->sync(st->dev);
        *first = at == 0 ? *last : *first;
        all += *last;
    }
    for (int32_t s = 1; s < MAX_SEQS; s++)
        st->kv.slot[s].pos = st->kv.slot[s].hi = context;
    return all;
}

static void prefill(int32_t context, int32_t again)
{
    double s[MAX_AGAIN], first = 0.0, last = 0.0;

    for (int32_t r = 0; r < again; r++)
        s[r] = fill(context, &first, &last);
    qsort(s, (size_t)again, sizeof(s[0]), compare);
    printf("prefill to %6d: first chunk %.0f tok/s, last %.0f tok/s, all %.0f tok/s (%.0f..%.0f)\n",
           context, CHUNK / first, CHUNK / last, context / s[again / 2], context / s[again - 1],
           context / s[0]);
    fflush(stdout);
}

/* "1,6" -> {1, 6}; what is no number of rows is left out. */
static int32_t parse_rows(const char *text, int32_t *rows)
{
    int32_t n = 0;

    while (n < MAX_ROWS && *text != 0) {
        char *end;
        const long v = strtol(text, &end, 10);

        if (v > 0 && v <= MAX_SEQS)
            rows[n++] = (int32_t)v;
        if (end == text)
            die("rows=N,N,...");
        text = *end == ',' ? end + 1 : end;
    }
    return n;
}

/* Takes NAME=VALUE words out of argv; returns how many others there are. */
static int take_options(int argc, char **argv, struct options *options)
{
    int n = 0;

    for (int i = 0; i < argc; i++) {
        if (strncmp(argv[i], "rows=", 5) == 0)
            options->n_rows = parse_rows(argv[i] + 5, options->rows);
        else if (strncmp(argv[i], "again=", 6) == 0)
            options->again = (int32_t)strtol(argv[i] + 6, NULL, 10);
        else
            argv[n++] = argv[i];
    }
    if (options->again < 1 || options->again > MAX_AGAIN)
        die("again=1 to 15");
    return n;
}

int main(int argc, char **argv)
{
    struct options options = {.rows = {1, 6, 16, 64}, .n_rows = 4, .again = 1};
    int n_arg = take_options(argc, argv, &options);
    const char *model = n_arg > 1 ? argv[1] : "synth:tiny:q8:1";
    const char *backend = n_arg > 2 ? argv[2] : "cpu";
    int32_t context[4] = {2048}, n_context = n_arg > 4 ? 0 : 1, most;

    for (int i = 4; i < n_arg && n_context < 4; i++)
        context[n_context++] = (int32_t)strtol(argv[i], NULL, 10) / CHUNK * CHUNK;
    most = context[n_context - 1];
    ds4_log_set_level(DS4_LOG_WARN);
    open_stage(model, backend, n_arg > 3 ? (int32_t)strtol(argv[3], NULL, 10) : 0, most + 512);
    printf("%s on %s: %d layers, %.2f GB of weights, commit %s\n", model,
           st->backend->describe(st->dev), st->weights.n_layer,
           (double)(st->plan.weights_bytes + st->plan.mapped_bytes) * 1e-9, DS4_COMMIT);
    if ((most / DS4_BLOCK_TOK + OWN * MAX_SEQS) > st->plan.kv.n_block ||
        most / DS4_BLOCK_TOK + OWN > MAX_BLOCK)
        die("the cache has too few blocks");
    prefill(CHUNK, 1); /* modules load, libraries choose */
    for (int32_t c = 0; c < n_context; c++) {
        prefill(context[c], options.again);
        for (int32_t i = 0; i < options.n_rows; i++)
            decode(options.rows[i], context[c]);
    }
    ds4_stage_free(st);
    return 0;
}

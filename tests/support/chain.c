/* In-process stages; see chain.h. */
#include "tests/support/chain.h"

#include "common/log.h"
#include "worker/embed_head.h"
#include "worker/stage_state.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define CONTEXT_TOK 3072
#define HOST_BYTES  (16 << 20)

static void must(int result, const struct ds4_err *err)
{
    if (result != 0)
        fail_msg("%s: %s", ds4_code_text(err->code), err->msg);
}

static const char *backend = "cpu";

void chain_take_args(int argc, char **argv)
{
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--backend") == 0)
            backend = argv[i + 1];
        else if (strcmp(argv[i], "--only") == 0)
            cmocka_set_test_filter(argv[i + 1]);
    }
}

bool chain_on_cpu(void)
{
    return strcmp(backend, "cpu") == 0;
}

bool chain_same_rows(const float *a, const float *b, size_t n)
{
    double far = 0, size = 0;

    if (chain_on_cpu())
        return memcmp(a, b, n * sizeof(*a)) == 0;
    for (size_t i = 0; i < n; i++) {
        far += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        size += (double)b[i] * b[i];
    }
    return far <= 0.02 * 0.02 * size; /* false for a NaN */
}

struct ds4_stage_config chain_config(const struct chain_options *options, int32_t stage)
{
    struct ds4_stage_config config = {
        .model_path = options->model == NULL ? CHAIN_MODEL : options->model,
        .load = options->load,
        .stage = stage,
        .n_stage = options->n_stage > 0 ? options->n_stage : 1,
        .partition = options->partition,
        .backend = backend,
        .quant_sim = options->quant_sim,
        .max_seqs = CHAIN_SEQS,
        .max_step_tok = options->max_step_tok > 0 ? options->max_step_tok : CHAIN_STEP_TOK};

    config.max_draft = options->max_draft;
    config.draft_min_match = 3;
    config.n_partition = options->partition != NULL ? config.n_stage : 0;
    config.context_tok = options->context_tok > 0 ? options->context_tok : CONTEXT_TOK;
    config.host_bytes = options->host_bytes > 0 ? options->host_bytes : HOST_BYTES;
    config.disk_dir = options->disk_dir;
    config.memory_limit_bytes = options->memory_limit_bytes;
    config.offload = options->offload;
    config.device.isa = options->isa;
    config.device.n_thread = options->n_thread > 0 ? options->n_thread : 1;
    config.device.products = options->products;
    config.stream = options->stream != DS4_STREAM_AUTO ? options->stream : DS4_STREAM_F32;
    return config;
}

static void note_answer(void *arg, const struct ds4_kv_done *done)
{
    struct chain_answers *a = arg;

    pthread_mutex_lock(&a->lock);
    if (a->n < CHAIN_ANSWERS)
        a->done[a->n++] = *done;
    pthread_cond_signal(&a->told);
    pthread_mutex_unlock(&a->lock);
}

struct ds4_kv_done chain_await(struct chain *c, int32_t stage, uint64_t job)
{
    struct chain_answers *a = &c->answers[stage];
    struct ds4_kv_done done = {0};
    bool found = false;

    pthread_mutex_lock(&a->lock);
    while (!found) {
        for (int32_t i = 0; i < a->n && !found; i++)
            if (a->done[i].job == job) {
                done = a->done[i];
                a->done[i] = a->done[--a->n];
                found = true;
            }
        if (!found)
            pthread_cond_wait(&a->told, &a->lock);
    }
    pthread_mutex_unlock(&a->lock);
    return done;
}

struct chain *chain_new(const struct chain_options *options)
{
    struct chain *c = calloc(1, sizeof(*c));
    struct ds4_err err = {0};

    assert_non_null(c);
    ds4_log_set_level(DS4_LOG_WARN); /* the plan's table once per stage hides the test's output */
    c->n_stage = options->n_stage > 0 ? options->n_stage : 1;
    assert_true(c->n_stage <= CHAIN_MAX);
    for (int32_t s = 0; s < c->n_stage; s++) {
        struct ds4_stage_config config = chain_config(options, s);

        pthread_mutex_init(&c->answers[s].lock, NULL);
        pthread_cond_init(&c->answers[s].told, NULL);
        config.kv_done = note_answer;
        config.kv_done_arg = &c->answers[s];
        c->stage[s] = ds4_stage_new(&config, NULL, NULL, &err);
        if (c->stage[s] == NULL)
            must(-1, &err);
        c->row_bytes = ds4_stage_row_bytes(c->stage[s]);
        c->rows[s] = calloc(CHAIN_STEP_TOK, c->row_bytes);
        assert_non_null(c->rows[s]);
    }
    c->seq_blocks = c->stage[0]->plan.kv.table_blocks;
    assert_true(c->seq_blocks <= CHAIN_BLOCKS);
    chain_form(c);
    return c;
}

void chain_free(struct chain *c)
{
    for (int32_t s = 0; s < c->n_stage; s++) {
        ds4_stage_free(c->stage[s]);
        free(c->rows[s]);
    }
    free(c->record);
    free(c);
}

void chain_form(struct chain *c)
{
    struct ds4_form form = {.generation = ++c->generation,
                            .n_stage = c->n_stage,
                            .max_seqs = CHAIN_SEQS,
                            .max_step_tok = c->stage[0]->plan.max_step_tok};
    struct ds4_err err = {0};

    for (int32_t s = 0; s < c->n_stage; s++) {
        struct ds4_hello hello = {0};

        ds4_stage_hello(c->stage[s], &hello);
        form.n_blocks = hello.max_blocks;
        form.n_slots = hello.max_slots;
        form.context_tok = hello.max_context;
        form.host_bytes = hello.host_bytes;
        must(ds4_stage_form(c->stage[s], &form, &err), &err);
        c->noted[s] = 0;
    }
    c->step_no = 0;
    c->n_record = 0;
    memset(c->owner, 0, sizeof(c->owner));
    c->n_op = 0;
    for (int32_t s = 0; s < CHAIN_SLOTS; s++)
        for (int32_t b = 0; b < c->seq_blocks; b++)
            c->table[s][b] = s * c->seq_blocks + b;
}

struct ds4_seq_open chain_greedy(int32_t slot, uint64_t seq, uint32_t epoch, int32_t n_prompt)
{
    struct ds4_seq_open open = {.seq = seq,
                                .slot = slot,
                                .epoch = epoch,
                                .n_prompt = n_prompt,
                                .max_pos = 1 << 20,
                                .sampling = {.top_p = 1,
                                             .repetition_penalty = 1,
                                             .n_logprobs = -1,
                                             .think_close_id = -1,
                                             .force_close_at = -1,
                                             .forced_after_id = -1}};
    return open;
}

struct ds4_step *chain_build(struct chain *c, const struct ds4_seq_open *opens, int32_t n_open,
                             const struct chain_part *part, int32_t n_part)
{
    static struct ds4_step step;
    static struct ds4_step_entry entry[CHAIN_SEQS];
    static struct ds4_seq_open open[CHAIN_SEQS];
    static struct ds4_kv_op op[CHAIN_OPS];
    static int32_t token[CHAIN_STEP_TOK];
    static int32_t block[CHAIN_SEQS][CHAIN_BLOCKS];
    int32_t n_tok = 0;

    assert_true(n_part <= CHAIN_SEQS && n_open <= CHAIN_SEQS && c->seq_blocks <= CHAIN_BLOCKS);
    for (int32_t i = 0; i < n_open; i++) {
        open[i] = opens[i];
        c->owner[opens[i].slot].seq = opens[i].seq;
        c->owner[opens[i].slot].epoch = opens[i].epoch;
    }
    for (int32_t i = 0; i < c->n_op; i++) {
        op[i] = c->op[i];
        if (op[i].kind == DS4_KV_POINT_SAVE || op[i].kind == DS4_KV_INSTALL) {
            op[i].seq = c->owner[op[i].slot].seq;
            op[i].epoch = c->owner[op[i].slot].epoch;
        }
    }
    for (int32_t e = 0; e < n_part; e++) {
        const struct chain_part *p = &part[e];
        int32_t n_row = p->n_tok + p->n_draft;

        assert_true(n_tok + n_row <= CHAIN_STEP_TOK);
        for (int32_t b = 0; b < c->seq_blocks; b++)
            block[e][b] = c->table[p->slot][b];
        entry[e] = (struct ds4_step_entry){.seq = c->owner[p->slot].seq,
                                           .slot = p->slot,
                                           .epoch = c->owner[p->slot].epoch,
                                           .kind = p->token != NULL ? DS4_ENTRY_PREFILL
                                                   : p->n_draft > 0 ? DS4_ENTRY_VERIFY
                                                                    : DS4_ENTRY_DECODE,
                                           .base_pos = p->base_pos,
                                           .n_tok = n_row,
                                           .sample = p->sample,
                                           .from_step = p->token != NULL ? -1 : p->from_step,
                                           .first_tok = n_tok,
                                           .cap_tok = c->seq_blocks * DS4_BLOCK_TOK,
                                           .n_block = c->seq_blocks,
                                           .block = block[e]};
        for (int32_t t = 0; t < n_row; t++)
            token[n_tok + t] = p->token != NULL ? p->token[t] : 0;
        n_tok += n_row;
    }
    step = (struct ds4_step){.generation = c->generation,
                             .step_no = c->step_no,
                             .n_open = n_open,
                             .open = open,
                             .n_op = c->n_op,
                             .op = op,
                             .n_entry = n_part,
                             .entry = entry,
                             .n_tok = n_tok,
                             .token = token};
    c->n_op = 0;
    return &step;
}

static struct ds4_token_record *next_record(struct chain *c)
{
    if (c->n_record == c->cap_record) {
        c->cap_record = c->cap_record == 0 ? 64 : 2 * c->cap_record;
        c->record = realloc(c->record, (size_t)c->cap_record * sizeof(*c->record));
        assert_non_null(c->record);
    }
    return &c->record[c->n_record++];
}

void chain_run(struct chain *c, struct ds4_step *step)
{
    struct ds4_err err = {0};
    int32_t last = c->n_stage - 1;
    uint32_t digest = 0;

    for (int32_t s = 0; s < c->n_stage; s++) {
        struct ds4_stage *st = c->stage[s];
        struct ds4_token_record *record = NULL;
        struct ds4_step_done done;

        while (ds4_stage_needs_record(st, step) >= 0) {
            assert_true(s < last && c->noted[s] < c->n_record);
            must(ds4_stage_note_record(st, &c->record[c->noted[s]++], &err), &err);
        }
        must(ds4_stage_begin(st, step, &err), &err);
        if (s == last)
            record = next_record(c);
        if (s > 0 && s < last)
            memcpy(c->rows[s + 1], c->rows[s], (size_t)ds4_stage_n_row(st) * c->row_bytes);
        /* A middle stage works on the copy, so that rows[s] keeps what it received. */
        must(ds4_stage_forward(st, step, s == last ? c->rows[s] : c->rows[s + 1], record,
                               s == last ? &c->out : NULL, &err),
             &err);
        must(ds4_stage_finish(st, step, &done, &err), &err);
        digest = s == 0 ? done.pos_digest : digest;
        assert_int_equal(done.pos_digest, digest); /* all stages stand at the same places */
    }
    c->step_no++;
}

void chain_step(struct chain *c, const struct ds4_seq_open *opens, int32_t n_open,
                const struct chain_part *part, int32_t n_part)
{
    chain_run(c, chain_build(c, opens, n_open, part, n_part));
}

static struct ds4_kv_op *next_op(struct chain *c, enum ds4_kv_op_kind kind, uint64_t point)
{
    struct ds4_kv_op *op = &c->op[c->n_op++];

    assert_true(c->n_op <= CHAIN_OPS);
    *op = (struct ds4_kv_op){.kind = kind, .point = point};
    return op;
}

void chain_save(struct chain *c, int32_t slot, int32_t pos, uint64_t point)
{
    struct ds4_kv_op *op = next_op(c, DS4_KV_POINT_SAVE, point);

    op->slot = slot;
    op->pos = pos;
}

void chain_install(struct chain *c, int32_t slot, int32_t pos, uint64_t point)
{
    struct ds4_kv_op *op = next_op(c, DS4_KV_INSTALL, point);

    op->slot = slot;
    op->pos = pos;
}

void chain_drop(struct chain *c, uint64_t point)
{
    next_op(c, DS4_KV_POINT_DROP, point);
}

void chain_copy_block(struct chain *c, int32_t src, int32_t dst)
{
    struct ds4_kv_op *op = next_op(c, DS4_KV_BLOCK_COPY, 0);

    op->block_src = src;
    op->block_dst = dst;
}

void chain_refuse(struct chain *c, struct ds4_step *step, enum ds4_code code)
{
    struct ds4_err err = {0};

    assert_int_equal(ds4_stage_begin(c->stage[0], step, &err), -1);
    if (err.code != code)
        fail_msg("refused with %s: %s", ds4_code_text(err.code), err.msg);
}

int32_t chain_feed(struct chain *c, int32_t slot, const int32_t *ids, int32_t base, int32_t n,
                   int32_t chunk, bool sample)
{
    for (int32_t done = 0; done < n; done += chunk) {
        int32_t n_tok = n - done < chunk ? n - done : chunk;
        bool final = done + n_tok == n;
        struct chain_part part = {.slot = slot,
                                  .base_pos = base + done,
                                  .n_tok = n_tok,
                                  .token = ids + base + done,
                                  .sample = sample && final};

        chain_step(c, NULL, 0, &part, 1);
    }
    return sample && c->out.entry[0].n_token > 0 ? c->out.entry[0].token[0] : -1;
}

void chain_logits(struct chain *c, int32_t n_row, float *out)
{
    struct ds4_stage *last = c->stage[c->n_stage - 1];
    size_t n_vocab = (size_t)last->model.n_vocab;
    int32_t first = last->batch.n_tok - n_row;

    assert_true(first >= 0);
    for (int32_t done = 0; done < n_row; done += CHAIN_SEQS) {
        int32_t row[CHAIN_SEQS];
        int32_t n = n_row - done < CHAIN_SEQS ? n_row - done : CHAIN_SEQS;

        for (int32_t i = 0; i < n; i++)
            row[i] = first + done + i;
        last->batch.n_out = n;
        last->batch.out_row = row;
        ds4_head_forward(last);
        last->backend->download(last->dev, out + (size_t)done * n_vocab, last->buf.logits,
                                (size_t)n * n_vocab * sizeof(*out));
    }
}

int32_t chain_n_vocab(const struct chain *c)
{
    return c->stage[0]->model.n_vocab;
}

void chain_residual(struct chain *c, int32_t n_row, void *out)
{
    const struct ds4_stage *last = c->stage[c->n_stage - 1];
    int32_t first = last->batch.n_tok - n_row;

    assert_true(first >= 0);
    last->backend->download(last->dev, out,
                            (const uint8_t *)last->buf.x + (size_t)first * c->row_bytes,
                            (size_t)n_row * c->row_bytes);
}

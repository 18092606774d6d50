/* Range checks of the wire structs (steps 6, 7 and 12 of the request's way).
 *
 * One helper per kind of range keeps each check one line and its message uniform: "entry n_tok is 0,
 * must be 1 to 8192".  Two rules are about more than one field: the entries of a step share out its
 * tokens without gap or overlap, and a slot is opened, closed and used at most once per step, which
 * makes the order opens/entries within a step irrelevant. */
#include "proto/check.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define MAX_STAGE_BLOCKS (INT32_C(1) << 24)
#define MAX_LAYERS       INT32_C(1024)
#define MAX_PART_BYTES   (INT64_C(1) << 30)
#define MAX_UNIT_BYTES   (INT32_C(1) << 24)
#define MAX_TEMPERATURE  100.0F
#define MAX_PENALTY      100.0F

static int in_range(const char *what, int64_t value, int64_t min, int64_t max, struct ds4_err *err)
{
    if (value >= min && value <= max)
        return 0;
    return ds4_fail(err, DS4_E_PROTOCOL, "%s is %" PRId64 ", must be %" PRId64 " to %" PRId64, what,
                    value, min, max);
}

/* Written so that NaN fails. */
static int in_real_range(const char *what, double value, double min, double max,
                         struct ds4_err *err)
{
    if (value >= min && value <= max)
        return 0;
    return ds4_fail(err, DS4_E_PROTOCOL, "%s is %g, must be %g to %g", what, value, min, max);
}

static int all_in_range(const char *what, const int32_t *value, int32_t n, int32_t max,
                        struct ds4_err *err)
{
    if (n > 0 && value == NULL)
        return ds4_fail(err, DS4_E_PROTOCOL, "%s: %d values announced, none given", what, (int)n);
    for (int32_t i = 0; i < n; i++)
        if (in_range(what, value[i], 0, max, err))
            return -1;
    return 0;
}

static int is_text(const char *what, const char *text, size_t cap, struct ds4_err *err)
{
    size_t len = strnlen(text, cap);

    if (len == cap)
        return ds4_fail(err, DS4_E_PROTOCOL, "%s is longer than %zu bytes", what, cap - 1);
    for (size_t i = 0; i < len; i++)
        if (text[i] < ' ' || text[i] > '~')
            return ds4_fail(err, DS4_E_PROTOCOL, "%s holds byte 0x%02x, must be printable ASCII",
                            what, (unsigned char)text[i]);
    return 0;
}

struct slot_set {
    uint64_t bit[DS4_MAX_SLOTS / 64];
};

static int mark_slot(struct slot_set *set, const char *what, int32_t slot, struct ds4_err *err)
{
    uint64_t bit;

    if (in_range(what, slot, 0, DS4_MAX_SLOTS - 1, err))
        return -1;
    bit = UINT64_C(1) << (slot % 64);
    if (set->bit[slot / 64] & bit)
        return ds4_fail(err, DS4_E_PROTOCOL, "%s %d occurs twice in one step", what, (int)slot);
    set->bit[slot / 64] |= bit;
    return 0;
}

static int check_sampling(const struct ds4_sampling *s, struct ds4_err *err)
{
    if (in_real_range("temperature", s->temperature, 0, MAX_TEMPERATURE, err) ||
        in_range("top_k", s->top_k, 0, INT32_MAX, err) ||
        in_real_range("top_p", s->top_p, 0, 1, err) ||
        in_real_range("min_p", s->min_p, 0, 1, err) ||
        in_real_range("presence_penalty", s->presence_penalty, -MAX_PENALTY, MAX_PENALTY, err) ||
        in_real_range("frequency_penalty", s->frequency_penalty, -MAX_PENALTY, MAX_PENALTY, err) ||
        in_real_range("repetition_penalty", s->repetition_penalty, 0, MAX_PENALTY, err))
        return -1;
    if (s->repetition_penalty <= 0)
        return ds4_fail(err, DS4_E_PROTOCOL, "repetition_penalty is %g, must be above 0",
                        (double)s->repetition_penalty);
    if (in_range("n_logprobs", s->n_logprobs, -1, DS4_MAX_TOP_LOGPROBS, err) ||
        in_range("n_bias", s->n_bias, 0, DS4_MAX_LOGIT_BIAS, err) ||
        in_range("n_allowed", s->n_allowed, 0, DS4_MAX_ALLOWED_IDS, err) ||
        all_in_range("bias_id", s->bias_id, s->n_bias, INT32_MAX, err) ||
        all_in_range("allowed_id", s->allowed_id, s->n_allowed, INT32_MAX, err) ||
        in_range("min_new_tok", s->min_new_tok, 0, DS4_MAX_POS, err) ||
        in_range("think_close_id", s->think_close_id, -1, INT32_MAX, err) ||
        in_range("think_close_guard", s->think_close_guard, 0, DS4_MAX_POS, err) ||
        in_range("force_close_at", s->force_close_at, -1, DS4_MAX_POS, err) ||
        in_range("n_forced", s->n_forced, 0, DS4_MAX_FORCED_IDS, err) ||
        all_in_range("forced_id", s->forced_id, s->n_forced, INT32_MAX, err) ||
        in_range("forced_after_id", s->forced_after_id, -1, INT32_MAX, err))
        return -1;
    if (s->n_bias > 0 && s->bias == NULL)
        return ds4_fail(err, DS4_E_PROTOCOL, "bias: %d values announced, none given",
                        (int)s->n_bias);
    for (int32_t i = 0; i < s->n_bias; i++)
        if (!isfinite(s->bias[i]))
            return ds4_fail(err, DS4_E_PROTOCOL, "bias of id %d is not finite", (int)s->bias_id[i]);
    return 0;
}

static int check_open(const struct ds4_seq_open *open, struct slot_set *opened, struct ds4_err *err)
{
    if (mark_slot(opened, "open slot", open->slot, err) ||
        in_range("n_prompt", open->n_prompt, 1, DS4_MAX_POS, err) ||
        in_range("max_pos", open->max_pos, 1, DS4_MAX_POS, err) ||
        in_range("n_stop", open->n_stop, 0, DS4_MAX_STOP_IDS, err) ||
        in_range("max_draft", open->max_draft, 0, DS4_MAX_DRAFT, err) ||
        all_in_range("stop_id", open->stop_id, open->n_stop, INT32_MAX, err))
        return -1;
    return check_sampling(&open->sampling, err);
}

static int check_entry(const struct ds4_step *step, const struct ds4_step_entry *entry,
                       int32_t next_tok, struct ds4_err *err)
{
    int32_t max_tok = DS4_MAX_STEP_TOK;

    if (in_range("entry kind", entry->kind, DS4_ENTRY_PREFILL, DS4_ENTRY_VERIFY, err))
        return -1;
    if (entry->kind == DS4_ENTRY_DECODE)
        max_tok = 1;
    else if (entry->kind == DS4_ENTRY_VERIFY)
        max_tok = 1 + DS4_MAX_DRAFT;
    if (in_range("entry n_tok", entry->n_tok, 1, max_tok, err) ||
        in_range("entry first_tok", entry->first_tok, next_tok, next_tok, err) ||
        in_range("entry first_tok + n_tok", (int64_t)entry->first_tok + entry->n_tok, 1,
                 step->n_tok, err) ||
        in_range("cap_tok", entry->cap_tok, 1, DS4_MAX_POS, err) ||
        in_range("base_pos", entry->base_pos, 0, entry->cap_tok - entry->n_tok, err) ||
        in_range("from_step", entry->from_step, -1, step->step_no - 1, err) ||
        in_range("first_block", entry->first_block, 0, DS4_MAX_SEQ_BLOCKS, err) ||
        in_range("n_block", entry->n_block, 0, DS4_MAX_SEQ_BLOCKS - entry->first_block, err) ||
        all_in_range("block", entry->block, entry->n_block, MAX_STAGE_BLOCKS, err))
        return -1;
    if (entry->from_step >= 0 && entry->kind == DS4_ENTRY_PREFILL)
        return ds4_fail(err, DS4_E_PROTOCOL, "from_step is %" PRId64 " in a prefill entry",
                        entry->from_step);
    if (entry->kind == DS4_ENTRY_VERIFY && (entry->from_step < 0 || !entry->sample))
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "a verify entry that names no step of drafts, or is not sampled");
    return 0;
}

static int check_slot_op(const struct ds4_kv_op *op, int32_t min_pos, struct ds4_err *err)
{
    if (op->point == 0)
        return ds4_fail(err, DS4_E_PROTOCOL, "an operation names point 0");
    if (in_range("operation slot", op->slot, 0, DS4_MAX_SLOTS - 1, err) ||
        in_range("operation pos", op->pos, min_pos, DS4_MAX_POS, err))
        return -1;
    return 0;
}

static int check_staged_op(const struct ds4_kv_op *op, struct ds4_err *err)
{
    if (op->staging == 0)
        return ds4_fail(err, DS4_E_PROTOCOL, "an operation names staging 0");
    if (in_range("operation first_block", op->first_block, 0, DS4_MAX_SEQ_BLOCKS, err) ||
        in_range("operation n_block", op->n_block, 0, DS4_PART_BLOCKS, err) ||
        all_in_range("operation block", op->block, op->n_block, MAX_STAGE_BLOCKS, err))
        return -1;
    return 0;
}

static int check_op(const struct ds4_kv_op *op, struct ds4_err *err)
{
    switch (op->kind) {
    case DS4_KV_POINT_SAVE:
    case DS4_KV_INSTALL:
        return check_slot_op(op, 1, err);
    case DS4_KV_POINT_DROP:
        if (op->point == 0)
            return ds4_fail(err, DS4_E_PROTOCOL, "an operation names point 0");
        return 0;
    case DS4_KV_BLOCK_COPY:
        if (in_range("block_src", op->block_src, 0, MAX_STAGE_BLOCKS, err) ||
            in_range("block_dst", op->block_dst, 0, MAX_STAGE_BLOCKS, err))
            return -1;
        if (op->block_src == op->block_dst)
            return ds4_fail(err, DS4_E_PROTOCOL, "block %d is copied onto itself",
                            (int)op->block_src);
        return 0;
    case DS4_KV_PARK:
        return in_range("operation slot", op->slot, 0, DS4_MAX_SLOTS - 1, err);
    case DS4_KV_REPLAY:
        if (in_range("operation slot", op->slot, 0, DS4_MAX_SLOTS - 1, err) ||
            in_range("operation pos", op->pos, 1, DS4_MAX_POS, err) ||
            in_range("operation from_pos", op->from_pos, 0, op->pos - 1, err))
            return -1;
        return 0;
    case DS4_KV_STAGED_INSTALL:
    case DS4_KV_STAGED_DROP:
        return check_staged_op(op, err);
    }
    return ds4_fail(err, DS4_E_PROTOCOL, "unknown kind of operation %d", (int)op->kind);
}

int ds4_check_step(const struct ds4_step *step, struct ds4_err *err)
{
    struct slot_set opened = {0}, closed = {0}, used = {0};
    int32_t next_tok = 0;

    if (in_range("generation", step->generation, 1, UINT32_MAX, err) ||
        in_range("step_no", step->step_no, 0, INT64_MAX, err) ||
        in_range("n_open", step->n_open, 0, DS4_MAX_STEP_ENTRIES, err) ||
        in_range("n_close", step->n_close, 0, DS4_MAX_SLOTS, err) ||
        in_range("n_entry", step->n_entry, 0, DS4_MAX_STEP_ENTRIES, err) ||
        in_range("n_tok", step->n_tok, 0, DS4_MAX_STEP_TOK, err) ||
        all_in_range("token", step->token, step->n_tok, INT32_MAX, err) ||
        all_in_range("close slot", step->close_slot, step->n_close, DS4_MAX_SLOTS - 1, err))
        return -1;
    if (in_range("n_op", step->n_op, 0, DS4_MAX_STEP_OPS, err))
        return -1;
    if ((step->n_open > 0 && step->open == NULL) || (step->n_entry > 0 && step->entry == NULL) ||
        (step->n_op > 0 && step->op == NULL))
        return ds4_fail(err, DS4_E_PROTOCOL, "opens, entries or operations announced, none given");
    for (int32_t i = 0; i < step->n_close; i++)
        if (mark_slot(&closed, "close slot", step->close_slot[i], err))
            return -1;
    for (int32_t i = 0; i < step->n_open; i++)
        if (check_open(&step->open[i], &opened, err))
            return -1;
    for (int32_t i = 0; i < step->n_op; i++)
        if (check_op(&step->op[i], err))
            return -1;
    for (int32_t i = 0; i < step->n_entry; i++) {
        if (mark_slot(&used, "entry slot", step->entry[i].slot, err) ||
            check_entry(step, &step->entry[i], next_tok, err))
            return -1;
        next_tok += step->entry[i].n_tok;
    }
    if (next_tok != step->n_tok)
        return ds4_fail(err, DS4_E_PROTOCOL, "the step has %d tokens, its entries take %d",
                        (int)step->n_tok, (int)next_tok);
    return 0;
}

int ds4_check_step_done(const struct ds4_step_done *done, struct ds4_err *err)
{
    if (in_range("generation", done->generation, 1, UINT32_MAX, err) ||
        in_range("step_no", done->step_no, 0, INT64_MAX, err))
        return -1;
    return 0;
}

static int check_token_entry(const struct ds4_token_entry *entry, struct ds4_err *err)
{
    const uint32_t known = DS4_TOKEN_SAMPLED | DS4_TOKEN_ENDED | DS4_TOKEN_SKIPPED |
                           DS4_TOKEN_NONFINITE | DS4_TOKEN_QUENCHED;

    if (in_range("pos", entry->pos, 0, DS4_MAX_POS, err) ||
        in_range("n_token", entry->n_token, 0, 1 + DS4_MAX_DRAFT, err) ||
        all_in_range("token", entry->token, entry->n_token, INT32_MAX, err) ||
        in_range("n_undone", entry->n_undone, 0, DS4_MAX_DRAFT, err) ||
        in_range("n_bad_draft", entry->n_bad_draft, 0, DS4_MAX_DRAFT, err) ||
        in_range("n_nan_draft", entry->n_nan_draft, 0, entry->n_undone, err) ||
        in_range("n_logprob", entry->n_logprob, 0,
                 entry->n_token > 0 ? 1 + DS4_MAX_TOP_LOGPROBS : 0, err))
        return -1;
    if (entry->flags & ~known)
        return ds4_fail(err, DS4_E_PROTOCOL, "flags are 0x%x, known are 0x%x",
                        (unsigned)entry->flags, (unsigned)known);
    if (((entry->flags & DS4_TOKEN_SAMPLED) != 0) != (entry->n_token > 0))
        return ds4_fail(err, DS4_E_PROTOCOL, "flags are 0x%x with %d tokens",
                        (unsigned)entry->flags, (int)entry->n_token);
    for (int32_t i = 0; i < entry->n_token * entry->n_logprob; i++) {
        if (in_range("logprob token", entry->logprob[i].token, 0, INT32_MAX, err))
            return -1;
        if (!isfinite(entry->logprob[i].logprob))
            return ds4_fail(err, DS4_E_PROTOCOL, "logprob of token %d is not finite",
                            (int)entry->logprob[i].token);
    }
    return 0;
}

int ds4_check_tokens(const struct ds4_tokens_out *tokens, struct ds4_err *err)
{
    if (in_range("generation", tokens->generation, 1, UINT32_MAX, err) ||
        in_range("step_no", tokens->step_no, 0, INT64_MAX, err) ||
        in_range("n_entry", tokens->n_entry, 0, DS4_MAX_STEP_ENTRIES, err) ||
        in_range("compute_ns", tokens->compute_ns, 0, INT64_MAX, err))
        return -1;
    if (tokens->n_entry > 0 && tokens->entry == NULL)
        return ds4_fail(err, DS4_E_PROTOCOL, "entries announced, none given");
    for (int32_t i = 0; i < tokens->n_entry; i++)
        if (check_token_entry(&tokens->entry[i], err))
            return -1;
    return 0;
}

static int check_hello_kv(const struct ds4_hello *hello, struct ds4_err *err)
{
    const struct ds4_point_shape *point = &hello->point;

    if (in_range("hot_tok", hello->hot_tok, 0, DS4_MAX_POS, err) ||
        in_range("host_bytes", hello->host_bytes, 0, INT64_MAX / 2, err) ||
        in_range("unit_bytes", hello->unit_bytes, hello->host_bytes > 0 ? 1 : 0, MAX_UNIT_BYTES,
                 err) ||
        in_range("block_bytes", hello->block_bytes, 0, MAX_PART_BYTES, err) ||
        in_range("point window_tok", point->window_tok, hello->host_bytes > 0 ? 1 : 0, DS4_MAX_POS,
                 err) ||
        in_range("point row_bytes", point->row_bytes, 0, MAX_PART_BYTES, err) ||
        in_range("point fixed_bytes", point->fixed_bytes, 0, MAX_PART_BYTES, err) ||
        in_range("point groups", point->n_group, 0, DS4_POINT_GROUPS, err))
        return -1;
    if ((hello->unit_bytes & (hello->unit_bytes - 1)) != 0)
        return ds4_fail(err, DS4_E_PROTOCOL, "unit_bytes is %d, must be a power of two",
                        (int)hello->unit_bytes);
    for (int32_t g = 0; g < point->n_group; g++)
        if (in_range("point ratio", point->group[g].ratio, 1, DS4_MAX_POS, err) ||
            in_range("point prev_bytes", point->group[g].prev_bytes, 0, MAX_PART_BYTES, err) ||
            in_range("point open_bytes", point->group[g].open_bytes, 0, MAX_PART_BYTES, err))
            return -1;
    return 0;
}

int ds4_check_hello(const struct ds4_hello *hello, struct ds4_err *err)
{
    if (in_range("n_stage", hello->n_stage, 1, DS4_MAX_STAGES, err) ||
        in_range("stage", hello->stage, 0, hello->n_stage - 1, err) ||
        in_range("n_layer", hello->n_layer, 1, MAX_LAYERS, err) ||
        in_range("first_layer", hello->first_layer, 0, hello->n_layer - 1, err) ||
        in_range("last_layer", hello->last_layer, hello->first_layer + 1, hello->n_layer, err) ||
        in_range("max_blocks", hello->max_blocks, 0, MAX_STAGE_BLOCKS, err) ||
        in_range("max_slots", hello->max_slots, 0, DS4_MAX_SLOTS, err) ||
        in_range("max_context", hello->max_context, 0, DS4_MAX_POS, err) ||
        in_range("pid", hello->pid, 1, INT32_MAX, err) ||
        in_range("max_draft", hello->max_draft, 0, DS4_MAX_DRAFT, err) ||
        is_text("backend", hello->backend, sizeof(hello->backend), err) ||
        is_text("device", hello->device, sizeof(hello->device), err) ||
        is_text("host", hello->host, sizeof(hello->host), err))
        return -1;
    return check_hello_kv(hello, err);
}

int ds4_check_form(const struct ds4_form *form, struct ds4_err *err)
{
    if (in_range("generation", form->generation, 1, UINT32_MAX, err) ||
        in_range("n_stage", form->n_stage, 1, DS4_MAX_STAGES, err) ||
        in_range("n_blocks", form->n_blocks, 1, MAX_STAGE_BLOCKS, err) ||
        in_range("n_slots", form->n_slots, 1, DS4_MAX_SLOTS, err) ||
        in_range("max_seqs", form->max_seqs, 1, DS4_MAX_STEP_ENTRIES, err) ||
        in_range("max_step_tok", form->max_step_tok, 1, DS4_MAX_STEP_TOK, err) ||
        in_range("context_tok", form->context_tok, 1, DS4_MAX_POS, err) ||
        in_range("max_draft", form->max_draft, 0, DS4_MAX_DRAFT, err) ||
        in_range("host_bytes", form->host_bytes, 0, INT64_MAX / 2, err))
        return -1;
    return 0;
}

static int check_card(const struct ds4_card_state *card, struct ds4_err *err)
{
    const double most = 1e18;

    for (int32_t i = 0; card->told && i < DS4_N_CARD_SENSOR; i++)
        if (in_real_range("card", card->value[i], DS4_CARD_NOT_TOLD, most, err))
            return -1;
    return 0;
}

int ds4_check_health(const struct ds4_health *health, struct ds4_err *err)
{
    const double max_seconds = 1e12;
    const double max_rate = 1e18;

    if (in_range("stage", health->stage, 0, DS4_MAX_STAGES - 1, err) ||
        in_range("state", health->state, DS4_WORKER_STARTING, DS4_WORKER_FAILED, err) ||
        in_range("step_no", health->step_no, -1, INT64_MAX, err) ||
        in_range("step_age_ms", health->step_age_ms, 0, INT64_MAX, err) ||
        in_range("loaded_bytes", health->loaded_bytes, 0, INT64_MAX, err) ||
        in_range("total_bytes", health->total_bytes, 0, INT64_MAX, err) ||
        in_real_range("busy_seconds", health->busy_seconds, 0, max_seconds, err) ||
        in_real_range("wait_recv_seconds", health->wait_recv_seconds, 0, max_seconds, err) ||
        in_real_range("wait_token_seconds", health->wait_token_seconds, 0, max_seconds, err) ||
        in_real_range("wait_command_seconds", health->wait_command_seconds, 0, max_seconds, err) ||
        in_real_range("wait_send_seconds", health->wait_send_seconds, 0, max_seconds, err) ||
        in_real_range("prefill_seconds", health->step_time[DS4_TIMED_PREFILL].seconds, 0,
                      max_seconds, err) ||
        in_real_range("decode_seconds", health->step_time[DS4_TIMED_DECODE].seconds, 0, max_seconds,
                      err) ||
        in_real_range("cpu_seconds", health->cpu_seconds, 0, max_seconds, err) ||
        in_range("started_unix_s", health->started_unix_s, 0, INT64_MAX, err) ||
        in_range("probe", health->probe, 0, DS4_MAX_PROBE, err) ||
        in_real_range("memory_bytes_per_s", health->memory_bytes_per_s, 0, max_rate, err) ||
        in_real_range("link_bytes_per_s", health->link_bytes_per_s, 0, max_rate, err) ||
        in_real_range("link_latency_s", health->link_latency_s, 0, max_seconds, err) ||
        in_real_range("flops", health->flops, 0, max_rate, err) || check_card(&health->card, err) ||
        is_text("message", health->message, sizeof(health->message), err))
        return -1;
    return 0;
}

int ds4_check_fatal(const struct ds4_fatal_report *report, struct ds4_err *err)
{
    if (in_range("stage", report->stage, 0, DS4_MAX_STAGES - 1, err) ||
        in_range("exit_code", report->exit_code, 0, UINT8_MAX, err) ||
        in_range("step_no", report->step_no, -1, INT64_MAX, err) ||
        in_range("layer", report->layer, -1, MAX_LAYERS, err) ||
        is_text("message", report->message, sizeof(report->message), err))
        return -1;
    return 0;
}

int ds4_check_pipe_id(const struct ds4_pipe_id *id, struct ds4_err *err)
{
    if (id->n_byte < 1 || id->n_byte > DS4_MAX_PIPE_ID)
        return ds4_fail(err, DS4_E_PROTOCOL, "pipe id of %d bytes, must be 1 to %d",
                        (int)id->n_byte, DS4_MAX_PIPE_ID);
    return 0;
}

int ds4_check_note(const struct ds4_note *note, struct ds4_err *err)
{
    return is_text("note", note->text, sizeof(note->text), err);
}

/* ---- disk tier ---- */

static int check_part(enum ds4_kv_part_kind kind, int32_t begin, int32_t end, struct ds4_err *err)
{
    if (in_range("part kind", kind, DS4_KV_EXTENT, DS4_KV_TAIL, err) ||
        in_range("part begin", begin, 0, DS4_MAX_POS, err))
        return -1;
    if (begin % DS4_EXTENT_TOK != 0)
        return ds4_fail(err, DS4_E_PROTOCOL, "part begin is %d, must be a multiple of %d",
                        (int)begin, DS4_EXTENT_TOK);
    if (kind == DS4_KV_EXTENT)
        return in_range("part end", end, begin + DS4_EXTENT_TOK, begin + DS4_EXTENT_TOK, err);
    return in_range("part end", end, begin == 0 ? 1 : begin, begin + DS4_EXTENT_TOK - 1, err);
}

int ds4_check_kv_write(const struct ds4_kv_write *write, struct ds4_err *err)
{
    if (in_range("generation", write->generation, 1, UINT32_MAX, err) ||
        check_part(write->kind, write->begin, write->end, err) ||
        in_range("flags", write->flags, 0, 0, err) ||
        in_range("n_block", write->n_block, 0, DS4_PART_BLOCKS, err) ||
        all_in_range("block", write->block, write->n_block, MAX_STAGE_BLOCKS, err))
        return -1;
    if ((write->kind == DS4_KV_EXTENT) != (write->point == 0))
        return ds4_fail(err, DS4_E_PROTOCOL, "a part of kind %d with point %" PRIu64,
                        (int)write->kind, write->point);
    return 0;
}

int ds4_check_kv_read(const struct ds4_kv_read *read, struct ds4_err *err)
{
    if (in_range("generation", read->generation, 1, UINT32_MAX, err) ||
        check_part(read->kind, read->begin, read->end, err) ||
        in_range("n_part", read->n_part, 1, DS4_MAX_STAGES, err))
        return -1;
    if (read->staging == 0 || read->part == NULL)
        return ds4_fail(err, DS4_E_PROTOCOL, "a read into staging 0, or of parts not given");
    for (int32_t i = 0; i < read->n_part; i++) {
        const struct ds4_kv_part_ref *part = &read->part[i];

        if (in_range("part first_layer", part->first_layer, 0, MAX_LAYERS - 1, err) ||
            in_range("part last_layer", part->last_layer, part->first_layer + 1, MAX_LAYERS, err) ||
            in_range("part bytes", part->bytes > INT64_MAX ? -1 : (int64_t)part->bytes, 0,
                     MAX_PART_BYTES, err))
            return -1;
    }
    return 0;
}

int ds4_check_kv_unlink(const struct ds4_kv_unlink *unlink, struct ds4_err *err)
{
    if (in_range("generation", unlink->generation, 1, UINT32_MAX, err) ||
        in_range("part kind", unlink->kind, DS4_KV_EXTENT, DS4_KV_TAIL, err) ||
        in_range("part first_layer", unlink->first_layer, 0, MAX_LAYERS - 1, err) ||
        in_range("part last_layer", unlink->last_layer, unlink->first_layer + 1, MAX_LAYERS, err))
        return -1;
    return 0;
}

int ds4_check_kv_done(const struct ds4_kv_done *done, struct ds4_err *err)
{
    if (in_range("generation", done->generation, 1, UINT32_MAX, err) ||
        in_range("reason", done->reason, DS4_KV_OK, DS4_KV_N_REASON - 1, err) ||
        in_range("bytes", done->bytes > INT64_MAX ? -1 : (int64_t)done->bytes, 0, MAX_PART_BYTES,
                 err) ||
        in_range("duration_ns", done->duration_ns, 0, INT64_MAX, err) ||
        is_text("text", done->text, sizeof(done->text), err))
        return -1;
    return 0;
}

/* Structs <-> protobuf (steps 6, 7 and 12); with codec_kv.c the only reader of generated code.
 *
 * Unpacking runs on an allocator over the caller's arena: the whole message tree is dropped by one
 * reset, hostile bytes cannot take more memory than the arena's maximum, and int32 arrays of the
 * decoded struct point straight into the unpacked tree.  Conversion checks only what it needs to be
 * memory-safe (counts against fixed arrays, missing parts); every range is proto/check.c's.
 *
 * Freeing is a no-op on purpose: after a failed unpack protobuf-c walks the partial tree. */
#include "proto/codec.h"

#include "proto/check.h"
#include "proto/codec_parts.h"

#include "proto/ds4.pb-c.h"

#include <inttypes.h>
#include <string.h>

/* ---- step ---- */

static void put_sampling(const struct ds4_sampling *from, Ds4__Wire__Sampling *to)
{
    *to = (Ds4__Wire__Sampling)DS4__WIRE__SAMPLING__INIT;
    to->temperature = from->temperature;
    to->top_k = from->top_k;
    to->top_p = from->top_p;
    to->min_p = from->min_p;
    to->presence_penalty = from->presence_penalty;
    to->frequency_penalty = from->frequency_penalty;
    to->repetition_penalty = from->repetition_penalty;
    to->seed = from->seed;
    to->n_logprobs = from->n_logprobs;
    to->n_bias_id = to->n_bias = (size_t)from->n_bias;
    to->bias_id = (int32_t *)(uintptr_t)from->bias_id;
    to->bias = (float *)(uintptr_t)from->bias;
    to->n_allowed_id = (size_t)from->n_allowed;
    to->allowed_id = (int32_t *)(uintptr_t)from->allowed_id;
    to->min_new_tok = from->min_new_tok;
    to->think_close_id = from->think_close_id;
    to->think_close_guard = from->think_close_guard;
    to->force_close_at = from->force_close_at;
    to->n_forced_id = (size_t)from->n_forced;
    to->forced_id = (int32_t *)(uintptr_t)from->forced_id;
    to->forced_after_id = from->forced_after_id;
}

static int get_sampling(const Ds4__Wire__Sampling *from, struct ds4_sampling *to,
                        struct ds4_err *err)
{
    if (from == NULL)
        return ds4_fail(err, DS4_E_PROTOCOL, "a sequence is opened without sampling");
    if (from->n_bias != from->n_bias_id)
        return ds4_fail(err, DS4_E_PROTOCOL, "%zu bias ids with %zu values", from->n_bias_id,
                        from->n_bias);
    if (ds4_codec_get_count("bias", from->n_bias, DS4_MAX_LOGIT_BIAS, &to->n_bias, err) ||
        ds4_codec_get_count("allowed ids", from->n_allowed_id, DS4_MAX_ALLOWED_IDS, &to->n_allowed,
                            err) ||
        ds4_codec_get_count("forced ids", from->n_forced_id, DS4_MAX_FORCED_IDS, &to->n_forced,
                            err))
        return -1;
    to->temperature = from->temperature;
    to->top_k = from->top_k;
    to->top_p = from->top_p;
    to->min_p = from->min_p;
    to->presence_penalty = from->presence_penalty;
    to->frequency_penalty = from->frequency_penalty;
    to->repetition_penalty = from->repetition_penalty;
    to->seed = from->seed;
    to->n_logprobs = from->n_logprobs;
    to->bias_id = from->bias_id;
    to->bias = from->bias;
    to->allowed_id = from->allowed_id;
    to->min_new_tok = from->min_new_tok;
    to->think_close_id = from->think_close_id;
    to->think_close_guard = from->think_close_guard;
    to->force_close_at = from->force_close_at;
    to->forced_id = from->forced_id;
    to->forced_after_id = from->forced_after_id;
    return 0;
}

static void put_open(const struct ds4_seq_open *from, Ds4__Wire__SeqOpen *to,
                     Ds4__Wire__Sampling *sampling)
{
    *to = (Ds4__Wire__SeqOpen)DS4__WIRE__SEQ_OPEN__INIT;
    to->seq = from->seq;
    to->slot = from->slot;
    to->epoch = from->epoch;
    to->n_prompt = from->n_prompt;
    to->max_pos = from->max_pos;
    to->ignore_stop = from->ignore_stop;
    to->n_stop_id = (size_t)from->n_stop;
    to->stop_id = (int32_t *)(uintptr_t)from->stop_id;
    put_sampling(&from->sampling, sampling);
    to->max_draft = from->max_draft;
    to->sampling = sampling;
}

static int get_open(const Ds4__Wire__SeqOpen *from, struct ds4_seq_open *to, struct ds4_err *err)
{
    to->seq = from->seq;
    to->slot = from->slot;
    to->epoch = from->epoch;
    to->n_prompt = from->n_prompt;
    to->max_pos = from->max_pos;
    to->ignore_stop = from->ignore_stop != 0;
    to->max_draft = from->max_draft;
    if (ds4_codec_get_count("stop ids", from->n_stop_id, DS4_MAX_STOP_IDS, &to->n_stop, err))
        return -1;
    if (to->n_stop > 0)
        memcpy(to->stop_id, from->stop_id, from->n_stop_id * sizeof(to->stop_id[0]));
    return get_sampling(from->sampling, &to->sampling, err);
}

static void put_entry(const struct ds4_step_entry *from, Ds4__Wire__StepEntry *to)
{
    *to = (Ds4__Wire__StepEntry)DS4__WIRE__STEP_ENTRY__INIT;
    to->seq = from->seq;
    to->slot = from->slot;
    to->epoch = from->epoch;
    to->kind = (uint32_t)from->kind;
    to->base_pos = from->base_pos;
    to->n_tok = from->n_tok;
    to->sample = from->sample;
    to->from_step = from->from_step;
    to->cap_tok = from->cap_tok;
    to->first_block = from->first_block;
    to->n_block = (size_t)from->n_block;
    to->block = (int32_t *)(uintptr_t)from->block;
}

static int get_entry(const Ds4__Wire__StepEntry *from, struct ds4_step_entry *to,
                     struct ds4_err *err)
{
    to->seq = from->seq;
    to->slot = from->slot;
    to->epoch = from->epoch;
    if (from->kind > DS4_ENTRY_VERIFY)
        return ds4_fail(err, DS4_E_PROTOCOL, "unknown entry kind %" PRIu32, from->kind);
    to->kind = (enum ds4_entry_kind)from->kind;
    to->base_pos = from->base_pos;
    to->n_tok = from->n_tok;
    to->sample = from->sample != 0;
    to->from_step = from->from_step;
    to->cap_tok = from->cap_tok;
    to->first_block = from->first_block;
    to->block = from->block;
    return ds4_codec_get_count("blocks", from->n_block, DS4_MAX_SEQ_BLOCKS, &to->n_block, err);
}

static void put_op(const struct ds4_kv_op *from, Ds4__Wire__KvOp *to)
{
    *to = (Ds4__Wire__KvOp)DS4__WIRE__KV_OP__INIT;
    to->kind = (uint32_t)from->kind;
    to->seq = from->seq;
    to->slot = from->slot;
    to->epoch = from->epoch;
    to->pos = from->pos;
    to->from_pos = from->from_pos;
    to->point = from->point;
    to->staging = from->staging;
    to->block_src = from->block_src;
    to->block_dst = from->block_dst;
    to->first_block = from->first_block;
    to->n_block = (size_t)from->n_block;
    to->block = (int32_t *)(uintptr_t)from->block;
}

static int get_op(const Ds4__Wire__KvOp *from, struct ds4_kv_op *to, struct ds4_err *err)
{
    if (from->kind > DS4_KV_REPLAY)
        return ds4_fail(err, DS4_E_PROTOCOL, "unknown kind of operation %" PRIu32, from->kind);
    *to = (struct ds4_kv_op){
        .kind = (enum ds4_kv_op_kind)from->kind,
        .seq = from->seq,
        .slot = from->slot,
        .epoch = from->epoch,
        .pos = from->pos,
        .from_pos = from->from_pos,
        .point = from->point,
        .staging = from->staging,
        .block_src = from->block_src,
        .block_dst = from->block_dst,
        .first_block = from->first_block,
        .block = from->block,
    };
    return ds4_codec_get_count("blocks of an operation", from->n_block, DS4_PART_BLOCKS,
                               &to->n_block, err);
}

static int encode_step(const struct ds4_step *step, struct ds4_arena *scratch, struct ds4_buf *out,
                       struct ds4_err *err)
{
    Ds4__Wire__Step wire = DS4__WIRE__STEP__INIT;
    size_t n_open = (size_t)step->n_open, n_entry = (size_t)step->n_entry;
    size_t n_op = (size_t)step->n_op;
    Ds4__Wire__SeqOpen *open = ds4_arena_take_array(scratch, n_open, sizeof(*open));
    Ds4__Wire__Sampling *sampling = ds4_arena_take_array(scratch, n_open, sizeof(*sampling));
    Ds4__Wire__StepEntry *entry = ds4_arena_take_array(scratch, n_entry, sizeof(*entry));
    Ds4__Wire__KvOp *op = ds4_arena_take_array(scratch, n_op, sizeof(*op));

    wire.open = ds4_arena_take_array(scratch, n_open, sizeof(wire.open[0]));
    wire.entry = ds4_arena_take_array(scratch, n_entry, sizeof(wire.entry[0]));
    wire.op = ds4_arena_take_array(scratch, n_op, sizeof(wire.op[0]));
    if (!open || !sampling || !entry || !op || !wire.open || !wire.entry || !wire.op)
        return ds4_codec_no_memory("step", err);
    for (size_t i = 0; i < n_open; i++) {
        put_open(&step->open[i], &open[i], &sampling[i]);
        wire.open[i] = &open[i];
    }
    for (size_t i = 0; i < n_entry; i++) {
        put_entry(&step->entry[i], &entry[i]);
        wire.entry[i] = &entry[i];
    }
    for (size_t i = 0; i < n_op; i++) {
        put_op(&step->op[i], &op[i]);
        wire.op[i] = &op[i];
    }
    wire.step_no = step->step_no;
    wire.n_open = n_open;
    wire.n_entry = n_entry;
    wire.n_op = n_op;
    wire.n_close_slot = (size_t)step->n_close;
    wire.close_slot = (int32_t *)(uintptr_t)step->close_slot;
    wire.n_token = (size_t)step->n_tok;
    wire.token = (int32_t *)(uintptr_t)step->token;
    return ds4_codec_pack(&wire.base, "step", out, err);
}

int ds4_codec_encode_step(const struct ds4_step *step, struct ds4_arena *scratch,
                          struct ds4_buf *out, struct ds4_err *err)
{
    struct ds4_arena_mark mark = ds4_arena_mark(scratch);
    int rc;

    if (ds4_check_step(step, err))
        return ds4_err_wrap(err, "step");
    rc = encode_step(step, scratch, out, err);
    ds4_arena_reset(scratch, mark);
    return rc;
}

int ds4_codec_decode_step(struct ds4_str payload, uint32_t generation, struct ds4_arena *arena,
                          struct ds4_step *out, struct ds4_err *err)
{
    const Ds4__Wire__Step *wire =
        ds4_codec_unpack(&ds4__wire__step__descriptor, "step", payload, arena, err);
    int64_t next_tok = 0;

    if (wire == NULL)
        return -1;
    *out = (struct ds4_step){.generation = generation, .step_no = wire->step_no};
    if (ds4_codec_get_count("opens", wire->n_open, DS4_MAX_STEP_ENTRIES, &out->n_open, err) ||
        ds4_codec_get_count("closes", wire->n_close_slot, DS4_MAX_SLOTS, &out->n_close, err) ||
        ds4_codec_get_count("entries", wire->n_entry, DS4_MAX_STEP_ENTRIES, &out->n_entry, err) ||
        ds4_codec_get_count("operations", wire->n_op, DS4_MAX_STEP_OPS, &out->n_op, err) ||
        ds4_codec_get_count("tokens", wire->n_token, DS4_MAX_STEP_TOK, &out->n_tok, err))
        return ds4_err_wrap(err, "step");
    out->close_slot = wire->close_slot;
    out->token = wire->token;
    out->open = ds4_arena_take_array(arena, wire->n_open, sizeof(out->open[0]));
    out->entry = ds4_arena_take_array(arena, wire->n_entry, sizeof(out->entry[0]));
    out->op = ds4_arena_take_array(arena, wire->n_op, sizeof(out->op[0]));
    if (out->open == NULL || out->entry == NULL || out->op == NULL)
        return ds4_codec_no_memory("step", err);
    for (int32_t i = 0; i < out->n_open; i++)
        if (get_open(wire->open[i], &out->open[i], err))
            return ds4_err_wrap(err, "step");
    for (int32_t i = 0; i < out->n_op; i++)
        if (get_op(wire->op[i], &out->op[i], err))
            return ds4_err_wrap(err, "step");
    for (int32_t i = 0; i < out->n_entry; i++) {
        if (get_entry(wire->entry[i], &out->entry[i], err))
            return ds4_err_wrap(err, "step");
        if (out->entry[i].n_tok < 0 || next_tok > out->n_tok)
            return ds4_fail(err, DS4_E_PROTOCOL, "step: entries take more than its %d tokens",
                            (int)out->n_tok);
        out->entry[i].first_tok = (int32_t)next_tok;
        next_tok += out->entry[i].n_tok;
    }
    if (ds4_check_step(out, err))
        return ds4_err_wrap(err, "step");
    return 0;
}

/* ---- tokens ---- */

static int put_token_entry(const struct ds4_token_entry *from, struct ds4_arena *scratch,
                           Ds4__Wire__TokenEntry *to, struct ds4_err *err)
{
    size_t n = (size_t)from->n_logprob * (size_t)from->n_token;

    *to = (Ds4__Wire__TokenEntry)DS4__WIRE__TOKEN_ENTRY__INIT;
    to->seq = from->seq;
    to->epoch = from->epoch;
    to->pos = from->pos;
    to->flags = from->flags;
    to->n_token = (size_t)from->n_token;
    to->token = (int32_t *)(uintptr_t)from->token;
    to->n_undone = from->n_undone;
    to->n_bad_draft = from->n_bad_draft;
    to->n_nan_draft = from->n_nan_draft;
    if (n == 0)
        return 0;
    to->logprob_token = ds4_arena_take_array(scratch, n, sizeof(to->logprob_token[0]));
    to->logprob = ds4_arena_take_array(scratch, n, sizeof(to->logprob[0]));
    if (to->logprob_token == NULL || to->logprob == NULL)
        return ds4_codec_no_memory("token entry", err);
    to->n_logprob_token = to->n_logprob = n;
    for (size_t i = 0; i < n; i++) {
        to->logprob_token[i] = from->logprob[i].token;
        to->logprob[i] = from->logprob[i].logprob;
    }
    return 0;
}

static int get_token_entry(const Ds4__Wire__TokenEntry *from, struct ds4_token_entry *to,
                           struct ds4_err *err)
{
    const size_t most = (1 + DS4_MAX_DRAFT) * (1 + DS4_MAX_TOP_LOGPROBS);
    int32_t n = 0;

    to->seq = from->seq;
    to->epoch = from->epoch;
    to->pos = from->pos;
    to->flags = from->flags;
    to->n_undone = from->n_undone;
    to->n_bad_draft = from->n_bad_draft;
    to->n_nan_draft = from->n_nan_draft;
    if (from->n_logprob != from->n_logprob_token)
        return ds4_fail(err, DS4_E_PROTOCOL, "%zu logprob ids with %zu values",
                        from->n_logprob_token, from->n_logprob);
    if (ds4_codec_get_count("tokens", from->n_token, 1 + DS4_MAX_DRAFT, &to->n_token, err) ||
        ds4_codec_get_count("logprobs", from->n_logprob, most, &n, err))
        return -1;
    if (n > 0 && (to->n_token == 0 || n % to->n_token != 0))
        return ds4_fail(err, DS4_E_PROTOCOL, "%d logprobs for %d tokens", (int)n, (int)to->n_token);
    to->n_logprob = n > 0 ? n / to->n_token : 0;
    for (int32_t i = 0; i < to->n_token; i++)
        to->token[i] = from->token[i];
    for (int32_t i = 0; i < n; i++)
        to->logprob[i] = (struct ds4_logprob){from->logprob_token[i], from->logprob[i]};
    return 0;
}

static int encode_tokens(const struct ds4_tokens_out *tokens, struct ds4_arena *scratch,
                         struct ds4_buf *out, struct ds4_err *err)
{
    Ds4__Wire__Tokens wire = DS4__WIRE__TOKENS__INIT;
    size_t n = (size_t)tokens->n_entry;
    Ds4__Wire__TokenEntry *entry = ds4_arena_take_array(scratch, n, sizeof(*entry));

    wire.entry = ds4_arena_take_array(scratch, n, sizeof(wire.entry[0]));
    if (entry == NULL || wire.entry == NULL)
        return ds4_codec_no_memory("tokens message", err);
    for (size_t i = 0; i < n; i++) {
        if (put_token_entry(&tokens->entry[i], scratch, &entry[i], err))
            return -1;
        wire.entry[i] = &entry[i];
    }
    wire.n_entry = n;
    wire.step_no = tokens->step_no;
    wire.compute_ns = tokens->compute_ns;
    return ds4_codec_pack(&wire.base, "tokens message", out, err);
}

int ds4_codec_encode_tokens(const struct ds4_tokens_out *tokens, struct ds4_arena *scratch,
                            struct ds4_buf *out, struct ds4_err *err)
{
    struct ds4_arena_mark mark = ds4_arena_mark(scratch);
    int rc;

    if (ds4_check_tokens(tokens, err))
        return ds4_err_wrap(err, "tokens message");
    rc = encode_tokens(tokens, scratch, out, err);
    ds4_arena_reset(scratch, mark);
    return rc;
}

int ds4_codec_decode_tokens(struct ds4_str payload, uint32_t generation, struct ds4_arena *arena,
                            struct ds4_tokens_out *out, struct ds4_err *err)
{
    const Ds4__Wire__Tokens *wire =
        ds4_codec_unpack(&ds4__wire__tokens__descriptor, "tokens message", payload, arena, err);

    if (wire == NULL)
        return -1;
    *out = (struct ds4_tokens_out){
        .generation = generation,
        .step_no = wire->step_no,
        .compute_ns = wire->compute_ns,
    };
    if (ds4_codec_get_count("entries", wire->n_entry, DS4_MAX_STEP_ENTRIES, &out->n_entry, err))
        return ds4_err_wrap(err, "tokens message");
    out->entry = ds4_arena_take_array(arena, wire->n_entry, sizeof(out->entry[0]));
    if (out->entry == NULL)
        return ds4_codec_no_memory("tokens message", err);
    for (int32_t i = 0; i < out->n_entry; i++)
        if (get_token_entry(wire->entry[i], &out->entry[i], err))
            return ds4_err_wrap(err, "tokens message");
    if (ds4_check_tokens(out, err))
        return ds4_err_wrap(err, "tokens message");
    return 0;
}

/* ---- hello, form ---- */

/* Into group and at, which live as long as *to. */
static void put_hello_kv(const struct ds4_hello *from, Ds4__Wire__Hello *to,
                         Ds4__Wire__PointGroup *group, Ds4__Wire__PointGroup **at)
{
    to->kv_fingerprint = ds4_codec_put_id(from->kv_fingerprint);
    to->hot_tok = from->hot_tok;
    to->host_bytes = from->host_bytes;
    to->unit_bytes = from->unit_bytes;
    to->block_bytes = from->block_bytes;
    to->point_window_tok = from->point.window_tok;
    to->point_row_bytes = from->point.row_bytes;
    to->point_fixed_bytes = from->point.fixed_bytes;
    to->n_point_group = (size_t)from->point.n_group;
    to->point_group = at;
    to->disk = from->disk;
    for (int32_t g = 0; g < from->point.n_group; g++) {
        group[g] = (Ds4__Wire__PointGroup)DS4__WIRE__POINT_GROUP__INIT;
        group[g].ratio = from->point.group[g].ratio;
        group[g].prev_bytes = from->point.group[g].prev_bytes;
        group[g].open_bytes = from->point.group[g].open_bytes;
        at[g] = &group[g];
    }
}

static int get_hello_kv(const Ds4__Wire__Hello *from, struct ds4_hello *to, struct ds4_err *err)
{
    to->hot_tok = from->hot_tok;
    to->host_bytes = from->host_bytes;
    to->unit_bytes = from->unit_bytes;
    to->block_bytes = from->block_bytes;
    to->point.window_tok = from->point_window_tok;
    to->point.row_bytes = from->point_row_bytes;
    to->point.fixed_bytes = from->point_fixed_bytes;
    to->disk = from->disk != 0;
    if (ds4_codec_get_count("point groups", from->n_point_group, DS4_POINT_GROUPS,
                            &to->point.n_group, err))
        return -1;
    for (int32_t g = 0; g < to->point.n_group; g++)
        to->point.group[g] =
            (struct ds4_point_group){from->point_group[g]->ratio, from->point_group[g]->prev_bytes,
                                     from->point_group[g]->open_bytes};
    return ds4_codec_get_id("kv_fingerprint", from->kv_fingerprint, to->kv_fingerprint, err);
}

int ds4_codec_encode_hello(const struct ds4_hello *hello, struct ds4_buf *out, struct ds4_err *err)
{
    Ds4__Wire__Hello wire = DS4__WIRE__HELLO__INIT;
    Ds4__Wire__PointGroup group[DS4_POINT_GROUPS], *at[DS4_POINT_GROUPS];
    struct ds4_hello h = *hello;

    wire.stage = h.stage;
    wire.n_stage = h.n_stage;
    wire.first_layer = h.first_layer;
    wire.last_layer = h.last_layer;
    wire.n_layer = h.n_layer;
    wire.boot_id = ds4_codec_put_id(h.boot_id);
    wire.model_digest = ds4_codec_put_id(h.model_digest);
    wire.max_blocks = h.max_blocks;
    wire.max_slots = h.max_slots;
    wire.max_context = h.max_context;
    wire.pid = h.pid;
    wire.backend = ds4_codec_put_text(h.backend, sizeof(h.backend));
    wire.device = ds4_codec_put_text(h.device, sizeof(h.device));
    wire.host = ds4_codec_put_text(h.host, sizeof(h.host));
    wire.max_draft = h.max_draft;
    if (ds4_check_hello(&h, err))
        return ds4_err_wrap(err, "hello");
    put_hello_kv(&h, &wire, group, at);
    return ds4_codec_pack(&wire.base, "hello", out, err);
}

static int get_hello(const Ds4__Wire__Hello *wire, struct ds4_hello *out, struct ds4_err *err)
{
    *out = (struct ds4_hello){
        .stage = wire->stage,
        .n_stage = wire->n_stage,
        .first_layer = wire->first_layer,
        .last_layer = wire->last_layer,
        .n_layer = wire->n_layer,
        .max_blocks = wire->max_blocks,
        .max_slots = wire->max_slots,
        .max_context = wire->max_context,
        .pid = wire->pid,
        .max_draft = wire->max_draft,
    };
    if (ds4_codec_get_id("boot_id", wire->boot_id, out->boot_id, err) ||
        ds4_codec_get_id("model_digest", wire->model_digest, out->model_digest, err) ||
        ds4_codec_get_text("backend", wire->backend, out->backend, sizeof(out->backend), err) ||
        ds4_codec_get_text("device", wire->device, out->device, sizeof(out->device), err) ||
        ds4_codec_get_text("host", wire->host, out->host, sizeof(out->host), err) ||
        get_hello_kv(wire, out, err))
        return -1;
    return ds4_check_hello(out, err);
}

int ds4_codec_decode_hello(struct ds4_str payload, struct ds4_arena *scratch, struct ds4_hello *out,
                           struct ds4_err *err)
{
    struct ds4_arena_mark mark = ds4_arena_mark(scratch);
    const Ds4__Wire__Hello *wire =
        ds4_codec_unpack(&ds4__wire__hello__descriptor, "hello", payload, scratch, err);
    int rc = -1;

    if (wire != NULL && get_hello(wire, out, err))
        ds4_err_wrap(err, "hello");
    else if (wire != NULL)
        rc = 0;
    ds4_arena_reset(scratch, mark);
    return rc;
}

int ds4_codec_encode_form(const struct ds4_form *form, struct ds4_buf *out, struct ds4_err *err)
{
    Ds4__Wire__Form wire = DS4__WIRE__FORM__INIT;

    if (ds4_check_form(form, err))
        return ds4_err_wrap(err, "form");
    wire.generation = form->generation;
    wire.n_stage = form->n_stage;
    wire.n_blocks = form->n_blocks;
    wire.n_slots = form->n_slots;
    wire.max_seqs = form->max_seqs;
    wire.max_step_tok = form->max_step_tok;
    wire.context_tok = form->context_tok;
    wire.max_draft = form->max_draft;
    wire.pipe_key = ds4_codec_put_id(form->pipe_key);
    wire.host_bytes = form->host_bytes;
    return ds4_codec_pack(&wire.base, "form", out, err);
}

static int get_form(const Ds4__Wire__Form *wire, struct ds4_form *out, struct ds4_err *err)
{
    *out = (struct ds4_form){
        .generation = wire->generation,
        .n_stage = wire->n_stage,
        .n_blocks = wire->n_blocks,
        .n_slots = wire->n_slots,
        .max_seqs = wire->max_seqs,
        .max_step_tok = wire->max_step_tok,
        .context_tok = wire->context_tok,
        .max_draft = wire->max_draft,
        .host_bytes = wire->host_bytes,
    };
    if (ds4_codec_get_id("pipe_key", wire->pipe_key, out->pipe_key, err))
        return -1;
    return ds4_check_form(out, err);
}

int ds4_codec_decode_form(struct ds4_str payload, struct ds4_arena *scratch, struct ds4_form *out,
                          struct ds4_err *err)
{
    struct ds4_arena_mark mark = ds4_arena_mark(scratch);
    const Ds4__Wire__Form *wire =
        ds4_codec_unpack(&ds4__wire__form__descriptor, "form", payload, scratch, err);
    int rc = -1;

    if (wire != NULL && get_form(wire, out, err))
        ds4_err_wrap(err, "form");
    else if (wire != NULL)
        rc = 0;
    ds4_arena_reset(scratch, mark);
    return rc;
}

/* ---- pipe id ---- */

int ds4_codec_encode_pipe_id(const struct ds4_pipe_id *id, struct ds4_buf *out, struct ds4_err *err)
{
    Ds4__Wire__PipeId wire = DS4__WIRE__PIPE_ID__INIT;

    if (ds4_check_pipe_id(id, err))
        return -1;
    wire.id = (ProtobufCBinaryData){(size_t)id->n_byte, (uint8_t *)(uintptr_t)id->byte};
    return ds4_codec_pack(&wire.base, "pipe id", out, err);
}

int ds4_codec_decode_pipe_id(struct ds4_str payload, struct ds4_arena *scratch,
                             struct ds4_pipe_id *out, struct ds4_err *err)
{
    struct ds4_arena_mark mark = ds4_arena_mark(scratch);
    const Ds4__Wire__PipeId *wire =
        ds4_codec_unpack(&ds4__wire__pipe_id__descriptor, "pipe id", payload, scratch, err);
    int rc = -1;

    *out = (struct ds4_pipe_id){0};
    if (wire != NULL &&
        ds4_codec_get_count("pipe id bytes", wire->id.len, DS4_MAX_PIPE_ID, &out->n_byte, err) ==
            0 &&
        ds4_check_pipe_id(out, err) == 0) {
        memcpy(out->byte, wire->id.data, wire->id.len);
        rc = 0;
    }
    ds4_arena_reset(scratch, mark);
    return rc;
}

/* ---- health, fatal, note ---- */

int ds4_codec_encode_health(const struct ds4_health *health, struct ds4_buf *out,
                            struct ds4_err *err)
{
    Ds4__Wire__Health wire = DS4__WIRE__HEALTH__INIT;
    struct ds4_health h = *health;

    wire.stage = h.stage;
    wire.state = (uint32_t)h.state;
    wire.step_no = h.step_no;
    wire.step_age_ms = h.step_age_ms;
    wire.loaded_bytes = h.loaded_bytes;
    wire.total_bytes = h.total_bytes;
    wire.steps_done = h.steps_done;
    wire.busy_seconds = h.busy_seconds;
    wire.wait_recv_seconds = h.wait_recv_seconds;
    wire.wait_token_seconds = h.wait_token_seconds;
    wire.wait_command_seconds = h.wait_command_seconds;
    wire.wait_send_seconds = h.wait_send_seconds;
    wire.n_prefill_steps = DS4_STEP_BUCKETS;
    wire.prefill_steps = h.step_time[DS4_TIMED_PREFILL].bucket;
    wire.prefill_seconds = h.step_time[DS4_TIMED_PREFILL].seconds;
    wire.n_decode_steps = DS4_STEP_BUCKETS;
    wire.decode_steps = h.step_time[DS4_TIMED_DECODE].bucket;
    wire.decode_seconds = h.step_time[DS4_TIMED_DECODE].seconds;
    wire.sent_bytes = h.sent_bytes;
    wire.received_bytes = h.received_bytes;
    wire.cpu_seconds = h.cpu_seconds;
    wire.started_unix_s = h.started_unix_s;
    wire.nonfinite_rows = h.nonfinite_rows;
    wire.rss_bytes = h.rss_bytes;
    wire.weights_bytes = h.weights_bytes;
    wire.kv_bytes = h.kv_bytes;
    wire.expert_steps = h.expert_steps;
    wire.experts_touched = h.experts_touched;
    wire.probe = (uint32_t)h.probe;
    wire.memory_bytes_per_s = h.memory_bytes_per_s;
    wire.link_bytes_per_s = h.link_bytes_per_s;
    wire.link_latency_s = h.link_latency_s;
    wire.flops = h.flops;
    wire.uses_on_device = h.uses_on_device;
    wire.uses_streamed = h.uses_streamed;
    wire.uses_on_host = h.uses_on_host;
    wire.experts_moved = h.experts_moved;
    if (h.card.told) {
        wire.n_card = DS4_N_CARD_SENSOR;
        wire.card = h.card.value;
        wire.n_xid = DS4_N_XID;
        wire.xid = h.card.xid;
    }
    wire.message = ds4_codec_put_text(h.message, sizeof(h.message));
    if (ds4_check_health(&h, err))
        return ds4_err_wrap(err, "health");
    return ds4_codec_pack(&wire.base, "health", out, err);
}

static int get_step_times(size_t n, const uint64_t *bucket, double seconds,
                          struct ds4_step_times *out, struct ds4_err *err)
{
    if (n != 0 && n != DS4_STEP_BUCKETS)
        return ds4_fail(err, DS4_E_PROTOCOL, "%zu buckets of step times, must be %d", n,
                        DS4_STEP_BUCKETS);
    if (n != 0)
        memcpy(out->bucket, bucket, sizeof(out->bucket));
    out->seconds = seconds;
    return 0;
}

static int get_card(const Ds4__Wire__Health *wire, struct ds4_card_state *out, struct ds4_err *err)
{
    if (wire->n_card == 0 && wire->n_xid == 0)
        return 0;
    if (wire->n_card != DS4_N_CARD_SENSOR || wire->n_xid != DS4_N_XID)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "%zu values and %zu counts of a card, must be %d and %d", wire->n_card,
                        wire->n_xid, DS4_N_CARD_SENSOR, DS4_N_XID);
    out->told = true;
    memcpy(out->value, wire->card, sizeof(out->value));
    memcpy(out->xid, wire->xid, sizeof(out->xid));
    return 0;
}

static int get_health(const Ds4__Wire__Health *wire, uint32_t generation, struct ds4_health *out,
                      struct ds4_err *err)
{
    if (wire->state > DS4_WORKER_FAILED)
        return ds4_fail(err, DS4_E_PROTOCOL, "unknown state %" PRIu32, wire->state);
    *out = (struct ds4_health){
        .stage = wire->stage,
        .generation = generation,
        .state = (enum ds4_worker_state)wire->state,
        .step_no = wire->step_no,
        .step_age_ms = wire->step_age_ms,
        .loaded_bytes = wire->loaded_bytes,
        .total_bytes = wire->total_bytes,
        .steps_done = wire->steps_done,
        .busy_seconds = wire->busy_seconds,
        .wait_recv_seconds = wire->wait_recv_seconds,
        .wait_token_seconds = wire->wait_token_seconds,
        .wait_command_seconds = wire->wait_command_seconds,
        .wait_send_seconds = wire->wait_send_seconds,
        .sent_bytes = wire->sent_bytes,
        .received_bytes = wire->received_bytes,
        .cpu_seconds = wire->cpu_seconds,
        .started_unix_s = wire->started_unix_s,
        .nonfinite_rows = wire->nonfinite_rows,
        .rss_bytes = wire->rss_bytes,
        .weights_bytes = wire->weights_bytes,
        .kv_bytes = wire->kv_bytes,
        .expert_steps = wire->expert_steps,
        .experts_touched = wire->experts_touched,
        .probe = wire->probe > DS4_MAX_PROBE ? -1 : (int32_t)wire->probe,
        .memory_bytes_per_s = wire->memory_bytes_per_s,
        .link_bytes_per_s = wire->link_bytes_per_s,
        .link_latency_s = wire->link_latency_s,
        .flops = wire->flops,
        .uses_on_device = wire->uses_on_device,
        .uses_streamed = wire->uses_streamed,
        .uses_on_host = wire->uses_on_host,
        .experts_moved = wire->experts_moved,
    };
    if (ds4_codec_get_text("message", wire->message, out->message, sizeof(out->message), err) ||
        get_step_times(wire->n_prefill_steps, wire->prefill_steps, wire->prefill_seconds,
                       &out->step_time[DS4_TIMED_PREFILL], err) ||
        get_step_times(wire->n_decode_steps, wire->decode_steps, wire->decode_seconds,
                       &out->step_time[DS4_TIMED_DECODE], err) ||
        get_card(wire, &out->card, err))
        return -1;
    return ds4_check_health(out, err);
}

int ds4_codec_decode_health(struct ds4_str payload, uint32_t generation, struct ds4_arena *scratch,
                            struct ds4_health *out, struct ds4_err *err)
{
    struct ds4_arena_mark mark = ds4_arena_mark(scratch);
    const Ds4__Wire__Health *wire =
        ds4_codec_unpack(&ds4__wire__health__descriptor, "health", payload, scratch, err);
    int rc = -1;

    if (wire != NULL && get_health(wire, generation, out, err))
        ds4_err_wrap(err, "health");
    else if (wire != NULL)
        rc = 0;
    ds4_arena_reset(scratch, mark);
    return rc;
}

int ds4_codec_encode_fatal(const struct ds4_fatal_report *report, struct ds4_buf *out,
                           struct ds4_err *err)
{
    Ds4__Wire__FatalReport wire = DS4__WIRE__FATAL_REPORT__INIT;
    struct ds4_fatal_report r = *report;

    wire.stage = r.stage;
    wire.exit_code = r.exit_code;
    wire.step_no = r.step_no;
    wire.layer = r.layer;
    wire.message = ds4_codec_put_text(r.message, sizeof(r.message));
    if (ds4_check_fatal(&r, err))
        return ds4_err_wrap(err, "fatal report");
    return ds4_codec_pack(&wire.base, "fatal report", out, err);
}

static int get_fatal(const Ds4__Wire__FatalReport *wire, uint32_t generation,
                     struct ds4_fatal_report *out, struct ds4_err *err)
{
    *out = (struct ds4_fatal_report){
        .stage = wire->stage,
        .generation = generation,
        .exit_code = wire->exit_code,
        .step_no = wire->step_no,
        .layer = wire->layer,
    };
    if (ds4_codec_get_text("message", wire->message, out->message, sizeof(out->message), err))
        return -1;
    return ds4_check_fatal(out, err);
}

int ds4_codec_decode_fatal(struct ds4_str payload, uint32_t generation, struct ds4_arena *scratch,
                           struct ds4_fatal_report *out, struct ds4_err *err)
{
    struct ds4_arena_mark mark = ds4_arena_mark(scratch);
    const Ds4__Wire__FatalReport *wire = ds4_codec_unpack(&ds4__wire__fatal_report__descriptor,
                                                          "fatal report", payload, scratch, err);
    int rc = -1;

    if (wire != NULL && get_fatal(wire, generation, out, err))
        ds4_err_wrap(err, "fatal report");
    else if (wire != NULL)
        rc = 0;
    ds4_arena_reset(scratch, mark);
    return rc;
}

int ds4_codec_encode_note(const struct ds4_note *note, struct ds4_buf *out, struct ds4_err *err)
{
    Ds4__Wire__Note wire = DS4__WIRE__NOTE__INIT;
    struct ds4_note n = *note;

    n.text[sizeof(n.text) - 1] = 0;
    wire.text = ds4_codec_put_text(n.text, sizeof(n.text));
    return ds4_codec_pack(&wire.base, "note", out, err);
}

int ds4_codec_decode_note(struct ds4_str payload, struct ds4_arena *scratch, struct ds4_note *out,
                          struct ds4_err *err)
{
    struct ds4_arena_mark mark = ds4_arena_mark(scratch);
    const Ds4__Wire__Note *wire =
        ds4_codec_unpack(&ds4__wire__note__descriptor, "note", payload, scratch, err);
    int rc = -1;

    if (wire != NULL &&
        ds4_codec_get_text("note", wire->text, out->text, sizeof(out->text), err) == 0 &&
        ds4_check_note(out, err) == 0)
        rc = 0;
    ds4_arena_reset(scratch, mark);
    return rc;
}

/* Memory plan of a stage (before step 8 of the house list).
 *
 * Weights, ring slots, step buffers and scratch are fixed by shape and settings; what is left becomes
 * cache blocks.  A context that the settings do not name shrinks until one full sequence fits; one they
 * do name is kept or refused.  Growing at run time is what upstream forks do, and an extent that was
 * not grown is then written: here nothing grows.
 *
 * Invariant: ds4_plan_total <= free_bytes for every plan that is handed out. */
#include "worker/plan.h"

#include "common/log.h"
#include "proto/message.h"
#include "worker/draft.h"
#include "worker/kv_keep.h"
#include "worker/kv_point.h"
#include "worker/offload.h"
#include "worker/sampler.h"

#include <inttypes.h>
#include <string.h>

#define ALIGN         256
#define TOY_D_MODEL   1024 /* narrower models were not trained with the cache rounding */
#define SPARE_PART    32   /* of a host's memory is left to others ... */
#define SPARE_MAX     ((size_t)512 << 20) /* ... but no more than this */
#define MIN_CONTEXT   DS4_BLOCK_TOK
#define OVERRUN_TOK   (1 + DS4_MAX_DRAFT) /* rows past the context that a run-ahead step may write */
#define BYTES_PER_MIB ((double)(1 << 20))

static size_t align_up(size_t n)
{
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}

/* Hands out the next area; with base NULL only counts. */
static void *carve(uint8_t *base, size_t *used, size_t rows, size_t row_values, size_t value_bytes)
{
    void *at = base == NULL ? NULL : base + *used;

    *used += align_up(rows * row_values * value_bytes);
    return at;
}

static int32_t max_expert(const struct ds4_model_shape *m)
{
    int32_t most = 0;

    for (int32_t l = 0; l < m->n_layer; l++)
        if (m->n_expert[l] > most)
            most = m->n_expert[l];
    return most;
}

size_t ds4_step_buffers_carve(struct ds4_step_buffers *buf, const struct ds4_model_shape *model,
                              enum ds4_dtype stream, int32_t max_tok, int32_t head_rows, bool last,
                              void *base)
{
    const struct ds4_model_shape *m = model;
    size_t n = (size_t)max_tok;
    size_t d = (size_t)m->d_model;
    size_t hyper = (size_t)m->n_hyper;
    size_t heads = (size_t)m->n_head * (size_t)m->d_head;
    size_t index = (size_t)m->n_index_head * (size_t)m->d_index;
    size_t comp = 2 * (size_t)(m->d_head > m->d_index ? m->d_head : m->d_index);
    size_t n_head_row = last ? (size_t)head_rows : 0;
    const size_t f = sizeof(float);
    size_t used = 0;

    buf->x = carve(base, &used, n, hyper * d, stream == DS4_DTYPE_BF16 ? 2 : 4);
    buf->h = carve(base, &used, n, d, f);
    buf->y = carve(base, &used, n, d, f);
    buf->post = carve(base, &used, n, hyper, f);
    buf->comb = carve(base, &used, n, hyper * hyper, f);
    buf->q_rank = carve(base, &used, n, (size_t)m->q_rank, f);
    buf->q = carve(base, &used, n, heads, f);
    buf->kv = carve(base, &used, n, (size_t)m->d_head, f);
    buf->comp_k = carve(base, &used, n, comp, f);
    buf->comp_g = carve(base, &used, n, comp, f);
    buf->index_q = carve(base, &used, n, index, f);
    buf->index_w = carve(base, &used, n, (size_t)m->n_index_head, f);
    buf->sel = carve(base, &used, n, (size_t)m->index_topk, sizeof(int32_t));
    buf->n_sel = carve(base, &used, n, 1, sizeof(int32_t));
    buf->o = carve(base, &used, n, heads, f);
    buf->o_rank = carve(base, &used, n, (size_t)m->n_group * (size_t)m->o_rank, f);
    buf->route_logit = carve(base, &used, n, (size_t)max_expert(m), f);
    buf->route_id = carve(base, &used, n, (size_t)m->n_expert_used, sizeof(int32_t));
    buf->route_weight = carve(base, &used, n, (size_t)m->n_expert_used, f);
    buf->spread = carve(base, &used, 2, 1, sizeof(uint64_t));
    buf->head_h = carve(base, &used, n_head_row, d, f);
    buf->logits = carve(base, &used, n_head_row, (size_t)m->n_vocab, f);
    return used;
}

/* ---- sizes -------------------------------------------------------------------------------------- */

static void set_limits(struct ds4_plan *plan, const struct ds4_model_shape *m)
{
    int32_t heads = m->n_head * m->d_head;
    int32_t widest = m->n_hyper * m->d_model;

    if (widest < heads)
        widest = heads;
    if (widest < m->n_group * m->o_rank)
        widest = m->n_group * m->o_rank;
    if (widest < m->d_expert)
        widest = m->d_expert;
    plan->limits = (struct ds4_limits){.max_tok = plan->max_step_tok,
                                       .max_context = plan->kv.table_blocks * DS4_BLOCK_TOK,
                                       .d_model = m->d_model,
                                       .n_hyper = m->n_hyper,
                                       .n_head = m->n_head,
                                       .d_head = m->d_head,
                                       .n_index_head = m->n_index_head,
                                       .d_index = m->d_index,
                                       .top_k = m->index_topk,
                                       .n_expert = max_expert(m),
                                       .n_used = m->n_expert_used,
                                       .d_expert = m->d_expert,
                                       .max_cols = widest};
}

int32_t ds4_plan_seq_blocks(int32_t context_tok)
{
    return (context_tok + OVERRUN_TOK + DS4_BLOCK_TOK - 1) / DS4_BLOCK_TOK;
}

/* Sizes of everything but the pages, for a context. */
static void size_fixed(struct ds4_plan *plan, const struct ds4_plan_request *rq,
                       int32_t context_tok)
{
    size_t slots = (size_t)plan->kv.n_slot;
    size_t vocab_row = (size_t)rq->model->n_vocab * sizeof(float);
    struct ds4_draft_config drafts;
    struct ds4_step_buffers buf;

    plan->context_tok = context_tok;
    plan->kv.table_blocks = ds4_plan_seq_blocks(context_tok);
    set_limits(plan, rq->model);
    drafts = (struct ds4_draft_config){
        .max = plan->max_draft, .n_slot = plan->kv.n_slot, .max_context = plan->limits.max_context};
    plan->rings_bytes = ds4_kv_rings_bytes(&plan->kv);
    plan->steps_bytes = ds4_step_buffers_carve(&buf, rq->model, rq->stream, rq->max_step_tok,
                                               plan->head_rows, rq->part.head, NULL);
    plan->scratch_bytes = align_up(rq->scratch_bytes(rq->scratch_arg, &plan->limits));
    plan->host_bytes = slots * (size_t)plan->kv.table_blocks * sizeof(int32_t);
    if (rq->part.head)
        plan->host_bytes += ds4_sampler_bytes(rq->model->n_vocab, plan->kv.n_slot) +
                            (size_t)plan->head_rows * vocab_row +
                            slots * (size_t)plan->limits.max_context * sizeof(int32_t) +
                            ds4_draft_bytes(&drafts);
}

static size_t fixed_bytes(const struct ds4_plan *plan)
{
    return plan->weights_bytes + plan->mapped_bytes + plan->rings_bytes + plan->points_bytes +
           plan->steps_bytes + plan->scratch_bytes + plan->pipe_bytes + plan->offload_bytes +
           plan->spare_bytes;
}

size_t ds4_plan_row_bytes(const struct ds4_model_shape *model, enum ds4_dtype stream)
{
    return (size_t)model->n_hyper * (size_t)model->d_model * (stream == DS4_DTYPE_BF16 ? 2 : 4);
}

size_t ds4_plan_total(const struct ds4_plan *plan)
{
    return fixed_bytes(plan) + plan->pages_bytes;
}

size_t ds4_plan_slack(const struct ds4_plan *plan)
{
    return (size_t)plan->kv.n_layer * 2 * ALIGN;
}

/* Blocks that fit beside the rest; INT32_MAX where blocks cost nothing (window layers only). */
static int32_t blocks_that_fit(const struct ds4_plan *plan)
{
    size_t block = ds4_kv_block_bytes(&plan->kv);
    size_t fixed = fixed_bytes(plan) + ds4_plan_slack(plan);
    size_t n;

    if (fixed >= plan->free_bytes)
        return 0;
    if (block == 0)
        return INT32_MAX;
    n = (plan->free_bytes - fixed) / block;
    return n > INT32_MAX ? INT32_MAX : (int32_t)n;
}

static int does_not_fit(const struct ds4_plan *plan, int32_t need_blocks, struct ds4_err *err)
{
    size_t pages = (size_t)need_blocks * ds4_kv_block_bytes(&plan->kv);
    size_t need = fixed_bytes(plan) + pages;
    int32_t fit = blocks_that_fit(plan);
    int32_t context = fit > 0 ? (int32_t)((int64_t)fit * DS4_BLOCK_TOK > plan->context_tok
                                              ? plan->context_tok
                                              : (int64_t)fit * DS4_BLOCK_TOK - OVERRUN_TOK)
                              : 0;

    if (context >= MIN_CONTEXT && context < plan->context_tok)
        return ds4_fail(
            err, DS4_E_NOMEM,
            "the plan needs %zu bytes and %zu are free: a context of %d tokens would fit", need,
            plan->free_bytes, context / DS4_BLOCK_TOK * DS4_BLOCK_TOK);
    if (fit > 0)
        return ds4_fail(err, DS4_E_NOMEM,
                        "the plan needs %zu bytes and %zu are free: %d cache blocks would fit",
                        need, plan->free_bytes, fit);
    return ds4_fail(
        err, DS4_E_NOMEM,
        "the plan needs %zu bytes and %zu are free: weights of layers %d to %d alone take "
        "%zu; fewer layers on this stage, fewer rows per step or fewer sequences would fit",
        need, plan->free_bytes, plan->part.first_layer, plan->part.end_layer - 1,
        plan->weights_bytes + plan->mapped_bytes);
}

/* ---- decisions ---------------------------------------------------------------------------------- */

static int check_request(const struct ds4_plan_request *rq, struct ds4_err *err)
{
    if (rq->max_seqs < 1 || rq->max_seqs > DS4_MAX_STEP_ENTRIES)
        return ds4_fail(err, DS4_E_INVALID, "%d sequences per step, must be in [1, %d]",
                        rq->max_seqs, DS4_MAX_STEP_ENTRIES);
    if (rq->max_step_tok < rq->max_seqs || rq->max_step_tok > DS4_MAX_STEP_TOK)
        return ds4_fail(err, DS4_E_INVALID, "%d rows per step, must be in [%d, %d]",
                        rq->max_step_tok, rq->max_seqs, DS4_MAX_STEP_TOK);
    if (rq->context_tok != 0 &&
        (rq->context_tok < MIN_CONTEXT || rq->context_tok > rq->model->context_tok))
        return ds4_fail(err, DS4_E_INVALID, "a context of %d tokens, must be in [%d, %d]",
                        rq->context_tok, MIN_CONTEXT, rq->model->context_tok);
    if (rq->n_blocks < 0)
        return ds4_fail(err, DS4_E_INVALID, "%d cache blocks", rq->n_blocks);
    if (rq->max_draft < 0 || rq->max_draft > DS4_MAX_DRAFT)
        return ds4_fail(err, DS4_E_INVALID, "%d drafts at once, must be in [0, %d]", rq->max_draft,
                        DS4_MAX_DRAFT);
    if (rq->max_draft > (rq->hot_tok > 0 ? rq->hot_tok : DS4_HOT_WINDOW_TOK))
        return ds4_fail(err, DS4_E_INVALID,
                        "%d drafts at once, a hot window of %d tokens cannot undo them",
                        rq->max_draft, rq->hot_tok);
    return 0;
}

static size_t spare_of(const struct ds4_plan_request *rq)
{
    if (rq->own_memory)
        return DS4_PLAN_CARD_SPARE;
    return rq->total_bytes / SPARE_PART < SPARE_MAX ? rq->total_bytes / SPARE_PART : SPARE_MAX;
}

static void set_shape(struct ds4_plan *plan, const struct ds4_plan_request *rq)
{
    const struct ds4_model_shape *m = rq->model;

    memset(plan, 0, sizeof(*plan));
    plan->part = rq->part;
    plan->stream = rq->stream;
    plan->row_bytes = ds4_plan_row_bytes(m, rq->stream);
    plan->max_seqs = rq->max_seqs;
    plan->max_step_tok = rq->max_step_tok;
    plan->max_draft = rq->max_draft;
    plan->head_rows = ds4_head_rows(rq->max_seqs, rq->max_draft);
    plan->weights_bytes = rq->weights_device_bytes;
    plan->mapped_bytes = rq->weights_mapped_bytes;
    plan->pipe_bytes = align_up(rq->pipe_bytes);
    plan->n_resident = rq->n_resident;
    plan->offload_bytes = align_up(rq->offload_bytes);
    plan->host_expert_bytes = rq->host_expert_bytes;
    plan->free_bytes = rq->free_bytes;
    plan->spare_bytes = spare_of(rq);
    for (int32_t id = rq->part.first_layer; id < rq->part.end_layer; id++)
        plan->layer[id - rq->part.first_layer] =
            (struct ds4_kv_layer_shape){.ratio = m->ratio[id],
                                        .overlap = ds4_model_compressor_width(m->ratio[id]) == 2,
                                        .indexer = ds4_model_layer_kind(m, id) == DS4_LAYER_CSA};
    plan->kv = (struct ds4_kv_shape){.n_layer = rq->part.end_layer - rq->part.first_layer,
                                     .layer = plan->layer,
                                     .d_head = m->d_head,
                                     .d_rope = m->d_rope,
                                     .d_index = m->d_index,
                                     .window_tok = m->window_tok,
                                     .hot_tok = rq->hot_tok > 0 ? rq->hot_tok : DS4_HOT_WINDOW_TOK,
                                     .row_format = rq->quant_sim ? DS4_ROW_FP8 : rq->plain_format,
                                     .index_format = rq->quant_sim ? DS4_ROW_FP4 : rq->plain_format,
                                     .n_slot = rq->max_seqs + DS4_PLAN_SPARE_SLOTS};
}

/* Host memory for points and stagings, and the device area they are gathered in. */
static int size_points(struct ds4_plan *plan, int64_t host_budget, struct ds4_err *err)
{
    struct ds4_point_shape point;
    int64_t n_unit;

    if (ds4_kv_point_shape(&plan->kv, &point, err) != 0)
        return -1;
    plan->unit_bytes = (size_t)ds4_kv_unit_bytes(&point);
    n_unit = host_budget / (int64_t)plan->unit_bytes;
    plan->n_unit = n_unit > INT32_MAX / 2 ? INT32_MAX / 2 : (int32_t)n_unit;
    plan->points_bytes = ds4_kv_store_area_bytes(&plan->kv); /* replays need it without points */
    if (plan->n_unit > 0)
        plan->points_bytes += ds4_kv_keeper_bytes(&plan->kv, plan->max_step_tok);
    return 0;
}

/* The longest context of whole blocks that fits, or -1. */
static int shrink_context(struct ds4_plan *plan, const struct ds4_plan_request *rq,
                          struct ds4_err *err)
{
    while (blocks_that_fit(plan) < plan->kv.table_blocks) {
        int32_t fit = blocks_that_fit(plan);
        /* Scratch falls with the context, so the next try can only fit better. */
        int32_t context = (fit - 1) * DS4_BLOCK_TOK;

        if (fit < 2 || context < MIN_CONTEXT)
            return does_not_fit(plan, ds4_plan_seq_blocks(MIN_CONTEXT), err);
        size_fixed(plan, rq, context);
    }
    return 0;
}

void ds4_plan_request_of(const struct ds4_stage_config *config, const struct ds4_model_shape *model,
                         bool own_memory, struct ds4_plan_request *out)
{
    bool f32 = config->stream == DS4_STREAM_F32;

    *out = (struct ds4_plan_request){
        .model = model,
        .part = ds4_model_all(model),
        .quant_sim = config->quant_sim == DS4_ON ||
                     (config->quant_sim == DS4_AUTO && model->d_model >= TOY_D_MODEL),
        /* Memory of its own is what a GPU is short of, unless f32 streams ask for exact numbers; a host
         * computes in f32 and keeps it. */
        .plain_format = !own_memory || f32 ? DS4_ROW_F32 : DS4_ROW_BF16,
        .stream =
            config->stream == DS4_STREAM_BF16 || (config->stream == DS4_STREAM_AUTO && own_memory)
                ? DS4_DTYPE_BF16
                : DS4_DTYPE_F32,
        .context_tok = config->context_tok,
        .max_seqs = config->max_seqs,
        .max_step_tok = config->max_step_tok,
        .n_blocks = config->n_blocks,
        .hot_tok = config->hot_window_tok,
        .max_draft = config->max_draft,
        .host_budget = config->host_bytes,
        .own_memory = own_memory,
    };
}

int ds4_plan_make(struct ds4_plan *plan, const struct ds4_plan_request *request,
                  struct ds4_err *err)
{
    const struct ds4_plan_request *rq = request;
    int64_t wanted;
    int32_t fit;

    if (check_request(rq, err) != 0)
        return -1;
    set_shape(plan, rq);
    if (ds4_kv_check_shape(&plan->kv, err) != 0 || size_points(plan, rq->host_budget, err) != 0)
        return -1;
    size_fixed(plan, rq, rq->context_tok > 0 ? rq->context_tok : rq->model->context_tok);
    if (rq->context_tok == 0 && shrink_context(plan, rq, err) != 0)
        return -1;

    fit = blocks_that_fit(plan);
    wanted = rq->n_blocks > 0 ? rq->n_blocks : (int64_t)rq->max_seqs * plan->kv.table_blocks;
    if (fit < plan->kv.table_blocks)
        return does_not_fit(plan, plan->kv.table_blocks, err);
    if (rq->n_blocks > 0 && rq->n_blocks < plan->kv.table_blocks)
        return ds4_fail(err, DS4_E_INVALID,
                        "%d cache blocks cannot hold one sequence of %d tokens, which takes %d",
                        rq->n_blocks, plan->context_tok, plan->kv.table_blocks);
    if (rq->n_blocks > fit)
        return does_not_fit(plan, rq->n_blocks, err);
    plan->kv.n_block = (int32_t)(wanted < fit ? wanted : fit);
    plan->pages_bytes = ds4_kv_pages_bytes(&plan->kv);
    return 0;
}

/* One try with n_resident experts per layer (0: all). */
static int try_resident(struct ds4_plan *plan, struct ds4_plan_request *rq, int32_t n_resident,
                        ds4_plan_measure_fn measure, const void *arg, struct ds4_weights_size *size,
                        struct ds4_err *err)
{
    if (measure(arg, n_resident, size, err) != 0)
        return -1;
    rq->n_resident = n_resident;
    rq->weights_device_bytes = size->device_bytes;
    rq->weights_mapped_bytes = size->mapped_bytes;
    rq->offload_bytes = 0;
    rq->host_expert_bytes = 0;
    if (n_resident > 0) {
        rq->offload_bytes = ds4_offload_device_bytes(rq->model, rq->max_step_tok, size->slab_bytes);
        rq->host_expert_bytes =
            size->host_bytes + ds4_offload_host_bytes(rq->model, rq->max_step_tok);
    }
    return ds4_plan_make(plan, rq, err);
}

int ds4_plan_fit(struct ds4_plan *plan, struct ds4_plan_request *rq, bool offload,
                 ds4_plan_measure_fn measure, const void *arg, struct ds4_weights_size *size,
                 struct ds4_err *err)
{
    struct ds4_err why = {DS4_OK, ""};
    int32_t low = rq->model->n_expert_used;
    int32_t high = max_expert(rq->model) - 1;

    if (try_resident(plan, rq, 0, measure, arg, size, &why) == 0)
        return 0;
    if (!offload || why.code != DS4_E_NOMEM || low > high) {
        if (err != NULL)
            *err = why;
        return -1;
    }
    if (rq->context_tok == 0)
        rq->context_tok = rq->model->context_tok < DS4_PLAN_OFFLOAD_TOK ? rq->model->context_tok
                                                                        : DS4_PLAN_OFFLOAD_TOK;
    if (rq->n_blocks == 0)
        rq->n_blocks = rq->max_seqs * ds4_plan_seq_blocks(rq->context_tok);
    if (try_resident(plan, rq, low, measure, arg, size, err) != 0)
        return ds4_err_wrap(err, "even with %d experts per layer on the device", low);
    while (low < high) {
        int32_t middle = (low + high + 1) / 2;

        if (try_resident(plan, rq, middle, measure, arg, size, NULL) == 0)
            low = middle;
        else
            high = middle - 1;
    }
    return try_resident(plan, rq, low, measure, arg, size, err);
}

/* ---- table -------------------------------------------------------------------------------------- */

static void log_line(const char *part, size_t bytes, const char *note)
{
    ds4_log(DS4_LOG_INFO, "plan.part", "part=%s mib=%.1f bytes=%zu %s", part,
            (double)bytes / BYTES_PER_MIB, bytes, note);
}

void ds4_plan_log(const struct ds4_plan *plan)
{
    ds4_log(
        DS4_LOG_INFO, "plan",
        "layers=%d-%d context=%d slots=%d blocks=%d block_tok=%d block_bytes=%zu rows_per_step=%d "
        "sequences_per_step=%d hot_window=%d row_bytes=%zu",
        plan->part.first_layer, plan->part.end_layer - 1, plan->context_tok, plan->kv.n_slot,
        plan->kv.n_block, DS4_BLOCK_TOK, ds4_kv_block_bytes(&plan->kv), plan->max_step_tok,
        plan->max_seqs, plan->kv.hot_tok, plan->row_bytes);
    log_line("weights_device", plan->weights_bytes, "");
    log_line("weights_mapped", plan->mapped_bytes, "where=page_cache");
    log_line("cache_blocks", plan->pages_bytes, "");
    log_line("cache_rings", plan->rings_bytes, "");
    log_line("cache_points", plan->points_bytes, "");
    log_line("step_buffers", plan->steps_bytes, "");
    log_line("scratch", plan->scratch_bytes, "");
    log_line("pipe", plan->pipe_bytes, "");
    log_line("offload", plan->offload_bytes, "");
    log_line("spare", plan->spare_bytes, "");
    log_line("total", ds4_plan_total(plan), "");
    log_line("free", plan->free_bytes, "");
    log_line("host", plan->host_bytes, "where=host");
    if (plan->n_resident > 0)
        ds4_log(DS4_LOG_INFO, "plan.offload", "experts_per_layer=%d host_mib=%zu", plan->n_resident,
                plan->host_expert_bytes >> 20);
    log_line("host_points", (size_t)plan->n_unit * plan->unit_bytes, "where=host");
}

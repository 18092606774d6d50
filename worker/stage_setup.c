/* Bringing a stage up (before step 8 of the house list): model file, device, plan, memory, weights, in
 * this order, so that what cannot work is refused before anything large is allocated or read.
 *
 * All memory of a stage is taken here; forming a generation and running steps allocate nothing.  The
 * struct is freed as a whole by ds4_stage_free, which accepts any half-built state. */
#include "worker/stage.h"

#include "common/log.h"
#include "common/model_tensors.h"
#include "common/service.h"
#include "common/weights_digest.h"
#include "worker/fatal.h"
#include "worker/kv_fingerprint.h"
#include "worker/rig.h"
#include "worker/self_test.h"
#include "worker/stage_state.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int resolve_part(struct ds4_stage *st, const struct ds4_stage_config *config,
                        struct ds4_err *err)
{
    struct ds4_partition partition;

    if (config->n_stage < 1 || config->n_stage > DS4_MAX_STAGES || config->stage < 0 ||
        config->stage >= config->n_stage)
        return ds4_fail(err, DS4_E_INVALID, "stage %d of %d", config->stage, config->n_stage);
    if (config->n_partition == 0 && config->n_card > 0) {
        if (ds4_rig_propose(st->file, &st->model, config, &partition, err) != 0)
            return -1;
    } else if (config->n_partition == 0) {
        if (ds4_partition_even(st->model.n_layer, config->n_stage, &partition, err) != 0)
            return -1;
    } else if (ds4_partition_set(config->partition, config->n_partition, &partition, err) != 0 ||
               ds4_partition_check(&partition, st->model.n_layer, err) != 0) {
        return -1;
    }
    if (partition.n_stage != config->n_stage)
        return ds4_fail(err, DS4_E_INVALID, "the partition has %d stages, the cluster %d",
                        partition.n_stage, config->n_stage);
    st->stage = config->stage;
    st->n_stage = config->n_stage;
    st->first = config->stage == 0;
    st->last = config->stage == config->n_stage - 1;
    st->plan.part = ds4_partition_part(&partition, config->stage);
    return 0;
}

static int open_model(struct ds4_stage *st, const struct ds4_stage_config *config,
                      struct ds4_err *err)
{
    st->file =
        ds4_weights_open(config->model_path,
                         config->load == DS4_LOAD_MMAP ? DS4_WEIGHTS_MMAP : DS4_WEIGHTS_PREAD, err);
    if (st->file == NULL || ds4_model_read(st->file, &st->model, err) != 0 ||
        resolve_part(st, config, err) != 0 ||
        ds4_model_require(st->file, &st->model, &st->plan.part, err) != 0)
        return -1;
    return ds4_weights_digest(st->file, st->model_digest, err);
}

static int open_device(struct ds4_stage *st, const struct ds4_stage_config *config,
                       struct ds4_err *err)
{
    st->backend = ds4_backend_find(config->backend);
    if (st->backend == NULL)
        return ds4_fail(err, DS4_E_INVALID, "backend \"%s\" is not built in", config->backend);
    st->dev = st->backend->open(&config->device, err);
    return st->dev == NULL ? -1 : 0;
}

static size_t scratch_of(const void *arg, const struct ds4_limits *limits)
{
    const struct ds4_stage *st = arg;

    return st->backend->scratch_bytes(st->dev, limits);
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* What the device has, within the limit of the settings: a card held to 8 GiB plans as an 8 GiB card. */
static void memory_of(const struct ds4_stage *st, const struct ds4_stage_config *config,
                      size_t *free_bytes, size_t *total_bytes)
{
    size_t limit = config->memory_limit_bytes;

    st->backend->memory(st->dev, free_bytes, total_bytes);
    if (limit == 0)
        return;
    *total_bytes = least(*total_bytes, limit);
    if (!st->backend->host_weights)
        limit = ds4_card_usable_bytes(limit);
    *free_bytes = least(*free_bytes, limit);
}

static struct ds4_weights_request weights_request(const struct ds4_stage *st,
                                                  const struct ds4_model_part *part,
                                                  enum ds4_load load, int32_t n_resident)
{
    struct ds4_weights_request rq = {.model = &st->model,
                                     .file = st->file,
                                     .part = *part,
                                     .in_place = st->backend->host_weights && load == DS4_LOAD_MMAP,
                                     .n_resident = n_resident,
                                     .host_area = st->host_experts,
                                     .host = st->host,
                                     .host_dev = st->host_dev};
    return rq;
}

static size_t pipe_bytes(const struct ds4_stage *st, const struct ds4_stage_config *config,
                         enum ds4_dtype stream)
{
    struct ds4_pipe_config pipe = {
        .stage = st->stage,
        .n_stage = st->n_stage,
        .row_bytes = ds4_plan_row_bytes(&st->model, stream),
        .max_step_tok = config->max_step_tok,
        .max_seqs = config->max_seqs,
        .depth = config->depth,
    };

    return config->pipe == NULL ? 0 : config->pipe->area_bytes(&pipe);
}

struct measure_arg {
    const struct ds4_stage *st;
    struct ds4_model_part part;
    enum ds4_load load;
};

static int measure_weights(const void *arg, int32_t n_resident, struct ds4_weights_size *size,
                           struct ds4_err *err)
{
    const struct measure_arg *m = arg;
    struct ds4_weights_request rq = weights_request(m->st, &m->part, m->load, n_resident);

    return ds4_stage_weights_measure(&rq, size, err);
}

/* Opens model and device and fills *plan. */
static int make_plan(struct ds4_stage *st, const struct ds4_stage_config *config,
                     struct ds4_weights_size *size, struct ds4_plan *plan, struct ds4_err *err)
{
    struct measure_arg measure = {.st = st, .load = config->load};
    struct ds4_plan_request rq;

    if (open_model(st, config, err) != 0 || open_device(st, config, err) != 0)
        return -1;
    ds4_plan_request_of(config, &st->model, !st->backend->host_weights, &rq);
    rq.part = st->plan.part;
    measure.part = st->plan.part;
    rq.pipe_bytes = pipe_bytes(st, config, rq.stream);
    rq.scratch_bytes = scratch_of;
    rq.scratch_arg = st;
    memory_of(st, config, &rq.free_bytes, &rq.total_bytes);
    return ds4_plan_fit(plan, &rq, config->offload, measure_weights, &measure, size, err);
}

int ds4_stage_plan(const struct ds4_stage_config *config, struct ds4_plan *plan,
                   struct ds4_weights_size *size, struct ds4_model_shape *model,
                   size_t *total_bytes, struct ds4_err *err)
{
    struct ds4_stage *st = calloc(1, sizeof(*st));
    size_t free_bytes;
    int result;

    *total_bytes = 0;
    if (st == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for a stage");
    result = make_plan(st, config, size, plan, err);
    *model = st->model;
    if (st->dev != NULL)
        memory_of(st, config, &free_bytes, total_bytes);
    ds4_stage_free(st);
    return result;
}

/* ---- memory ------------------------------------------------------------------------------------- */

/* *area = bytes of device memory; nothing for 0. */
static int take_device(struct ds4_stage *st, size_t bytes, const char *what, void **area,
                       struct ds4_err *err)
{
    *area = NULL;
    if (bytes == 0)
        return 0;
    *area = st->backend->alloc(st->dev, bytes, what, err);
    return *area == NULL ? -1 : 0;
}

/* Memory that lies is no error of settings: an operator must look at the card. */
static void test_memory(struct ds4_stage *st, const struct ds4_area *area, int32_t n_area)
{
    struct ds4_err err = {DS4_OK, ""};

    if (ds4_self_test_memory(st->backend, st->dev, area, n_area, &err) != 0)
        ds4_fatal_leave(DS4_EXIT_OPERATOR, "%s", err.msg);
}

static int alloc_device(struct ds4_stage *st, bool self_test, void **weights_area,
                        void **offload_area, struct ds4_err *err)
{
    const struct ds4_plan *plan = &st->plan;
    void *rings, *pages, *points, *steps, *scratch;
    size_t arena_bytes = (size_t)plan->n_unit * plan->unit_bytes;

    if (take_device(st, plan->weights_bytes, "weights", weights_area, err) != 0 ||
        take_device(st, plan->rings_bytes, "cache rings", &rings, err) != 0 ||
        take_device(st, plan->pages_bytes, "cache blocks", &pages, err) != 0 ||
        take_device(st, plan->points_bytes, "cache points", &points, err) != 0 ||
        take_device(st, plan->steps_bytes, "step buffers", &steps, err) != 0 ||
        take_device(st, plan->scratch_bytes, "scratch", &scratch, err) != 0 ||
        take_device(st, plan->pipe_bytes, "pipe", &st->pipe_area, err) != 0 ||
        take_device(st, plan->offload_bytes, "offload", offload_area, err) != 0)
        return -1;
    if (self_test && !st->backend->host_weights) {
        const struct ds4_area area[] = {{"weights", *weights_area, plan->weights_bytes},
                                        {"cache rings", rings, plan->rings_bytes},
                                        {"cache blocks", pages, plan->pages_bytes},
                                        {"cache points", points, plan->points_bytes},
                                        {"step buffers", steps, plan->steps_bytes},
                                        {"scratch", scratch, plan->scratch_bytes},
                                        {"pipe", st->pipe_area, plan->pipe_bytes},
                                        {"offload", *offload_area, plan->offload_bytes}};

        test_memory(st, area, (int32_t)(sizeof(area) / sizeof(area[0])));
    }
    if (st->probe.link_bytes_per_s > 0 && plan->scratch_bytes > 0)
        st->link_latency_s = ds4_self_test_latency(st->backend, st->dev, scratch);
    st->backend->set_scratch(st->dev, scratch, plan->scratch_bytes);
    ds4_step_buffers_carve(&st->buf, &st->model, plan->stream, plan->max_step_tok, plan->head_rows,
                           st->last, steps);
    if (ds4_kv_init(&st->kv, &plan->kv, rings, pages, err) != 0)
        return -1;
    if (arena_bytes > 0) {
        st->host_arena = st->backend->alloc_host(st->dev, arena_bytes, "points", err);
        if (st->host_arena == NULL)
            return -1;
    }
    if (ds4_kv_store_init(&st->store, st->backend, st->dev, &st->kv, points, st->host_arena,
                          plan->n_unit, err) != 0)
        return -1;
    ds4_kv_keeper_init(&st->keeper, &st->store,
                       plan->n_unit == 0 ? NULL
                                         : (uint8_t *)points + ds4_kv_store_area_bytes(&plan->kv),
                       plan->max_step_tok);
    return 0;
}

static int open_tier(struct ds4_stage *st, const struct ds4_stage_config *config,
                     struct ds4_err *err)
{
    const struct ds4_kv_numerics numerics = {.backend = st->backend->name,
                                             .products = config->device.products,
                                             .stream = st->plan.stream,
                                             .row_format = st->plan.kv.row_format,
                                             .index_format = st->plan.kv.index_format};
    struct ds4_kv_tier_config tier = {.store = &st->store,
                                      .dir = config->disk_dir,
                                      .write_mbps = config->disk_write_mbps,
                                      .first_layer = st->plan.part.first_layer,
                                      .done = config->kv_done,
                                      .done_arg = config->kv_done_arg};

    ds4_kv_fingerprint(&st->model, st->model_digest, &numerics, st->kv_fingerprint);
    memcpy(tier.fingerprint, st->kv_fingerprint, sizeof(tier.fingerprint));
    st->tier = ds4_kv_tier_open(&tier, err);
    return st->tier == NULL ? -1 : 0;
}

static int alloc_host(struct ds4_stage *st, const struct ds4_stage_config *config,
                      struct ds4_err *err)
{
    size_t n_tok = (size_t)st->plan.max_step_tok;
    size_t n_seq = (size_t)st->plan.max_seqs;
    size_t n_slot = (size_t)st->plan.kv.n_slot;
    size_t n_head = (size_t)st->plan.head_rows;
    const struct ds4_draft_config drafts = {.max = st->plan.max_draft,
                                            .min_match = config->draft_min_match,
                                            .n_slot = st->plan.kv.n_slot,
                                            .max_context = st->plan.limits.max_context,
                                            .n_vocab = st->model.n_vocab};

    st->given = calloc(n_slot, sizeof(*st->given));
    st->ran_step = calloc(n_slot, sizeof(*st->ran_step));
    st->token = calloc(n_tok, sizeof(*st->token));
    st->pos = calloc(n_tok, sizeof(*st->pos));
    st->entry_of = calloc(n_tok, sizeof(*st->entry_of));
    st->entry = calloc(n_seq, sizeof(*st->entry));
    if (st->given == NULL || st->ran_step == NULL || st->token == NULL || st->pos == NULL ||
        st->entry_of == NULL || st->entry == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for steps of %zu rows", n_tok);
    st->batch.token = st->token;
    st->batch.pos = st->pos;
    st->batch.entry_of = st->entry_of;
    st->batch.entry = st->entry;
    if (!st->last)
        return 0;
    st->history = calloc(n_slot * (size_t)st->plan.limits.max_context, sizeof(*st->history));
    st->host_logits = calloc(n_head * (size_t)st->model.n_vocab, sizeof(*st->host_logits));
    st->head_row = calloc(n_head, sizeof(*st->head_row));
    st->drafts = calloc(n_seq, sizeof(*st->drafts));
    st->out_entry = calloc(n_seq, sizeof(*st->out_entry));
    if (st->history == NULL || st->host_logits == NULL || st->head_row == NULL ||
        st->drafts == NULL || st->out_entry == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for histories of %zu sequences", n_slot);
    if (ds4_draft_init(&st->draft, &drafts, err) != 0)
        return -1;
    return ds4_sampler_init(&st->sampler, st->model.n_vocab, (int32_t)n_slot, err);
}

/* The host's side of offloaded experts: their memory, and the CPU backend with scratch of its own. */
static int open_host(struct ds4_stage *st, const struct ds4_stage_config *config,
                     const struct ds4_weights_size *size, struct ds4_err *err)
{
    size_t bytes;
    void *scratch;

    if (st->plan.n_resident == 0)
        return 0;
    st->host = ds4_backend_find("cpu");
    st->host_dev = st->host->open(&config->device, err);
    if (st->host_dev == NULL)
        return -1;
    bytes = st->host->scratch_bytes(st->host_dev, &st->plan.limits);
    scratch = st->host->alloc(st->host_dev, bytes, "scratch for offloaded experts", err);
    if (scratch == NULL)
        return -1;
    st->host->set_scratch(st->host_dev, scratch, bytes);
    st->host_expert_bytes = size->host_bytes;
    st->host_experts = st->backend->alloc_host(st->dev, size->host_bytes, "offloaded experts", err);
    return st->host_experts == NULL ? -1 : 0;
}

static int open_offload(struct ds4_stage *st, const struct ds4_weights_size *size, void *area,
                        struct ds4_err *err)
{
    const struct ds4_offload_config config = {.model = &st->model,
                                              .weights = &st->weights,
                                              .n_resident = st->plan.n_resident,
                                              .max_tok = st->plan.max_step_tok,
                                              .slab_bytes = size->slab_bytes,
                                              .backend = st->backend,
                                              .dev = st->dev,
                                              .area = area,
                                              .host = st->host,
                                              .host_dev = st->host_dev};

    if (st->plan.n_resident == 0)
        return 0;
    st->offload = ds4_offload_new(&config, err);
    return st->offload == NULL ? -1 : 0;
}

/* ---- public ------------------------------------------------------------------------------------- */

struct ds4_stage *ds4_stage_new(const struct ds4_stage_config *config, ds4_progress_fn progress,
                                void *progress_arg, struct ds4_err *err)
{
    struct ds4_stage *st = calloc(1, sizeof(*st));
    const struct ds4_weights_progress report = {progress, progress_arg};
    struct ds4_weights_request weights;
    struct ds4_weights_size size;
    void *area, *offload_area;

    if (st == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for a stage");
        return NULL;
    }
    st->sync_layers = config->sync_layers;
    atomic_init(&st->nonfinite_rows, 0);
    atomic_init(&st->running_layer, -1);
    atomic_init(&st->spread_steps, 0);
    atomic_init(&st->spread_experts, 0);
    atomic_init(&st->uses_on_device, 0);
    atomic_init(&st->uses_streamed, 0);
    atomic_init(&st->uses_on_host, 0);
    atomic_init(&st->experts_moved, 0);
    if (make_plan(st, config, &size, &st->plan, err) != 0)
        goto fail;
    ds4_plan_log(&st->plan);
    ds4_self_test_probe(st->backend, st->dev, &st->probe);
    if (alloc_device(st, config->self_test, &area, &offload_area, err) != 0 ||
        alloc_host(st, config, err) != 0 || open_tier(st, config, err) != 0 ||
        open_host(st, config, &size, err) != 0)
        goto fail;
    if (config->planned != NULL)
        config->planned(config->planned_arg, st);
    weights = weights_request(st, &st->plan.part, config->load, st->plan.n_resident);
    if (ds4_stage_weights_load(&st->weights, &weights, &size, st->backend, st->dev, area, &report,
                               err) != 0 ||
        open_offload(st, &size, offload_area, err) != 0)
        goto fail;
    return st;
fail:
    ds4_stage_free(st);
    return NULL;
}

void ds4_stage_free(struct ds4_stage *st)
{
    if (st == NULL)
        return;
    ds4_sampler_deinit(&st->sampler);
    ds4_draft_deinit(&st->draft);
    free(st->drafts);
    free(st->out_entry);
    free(st->head_row);
    free(st->host_logits);
    free(st->history);
    free(st->entry);
    free(st->entry_of);
    free(st->pos);
    free(st->token);
    free(st->ran_step);
    free(st->given);
    ds4_kv_tier_close(st->tier);
    if (st->host_arena != NULL)
        st->backend->free_host(st->dev, st->host_arena,
                               (size_t)st->plan.n_unit * st->plan.unit_bytes);
    ds4_kv_store_deinit(&st->store);
    ds4_kv_deinit(&st->kv);
    ds4_offload_free(st->offload);
    ds4_stage_weights_deinit(&st->weights);
    if (st->host_experts != NULL)
        st->backend->free_host(st->dev, st->host_experts, st->host_expert_bytes);
    if (st->host_dev != NULL)
        st->host->close(st->host_dev);
    if (st->dev != NULL)
        st->backend->close(st->dev);
    ds4_weights_close(st->file);
    free(st);
}

void ds4_stage_hello(const struct ds4_stage *st, struct ds4_hello *hello)
{
    hello->stage = st->stage;
    hello->n_stage = st->n_stage;
    hello->first_layer = st->plan.part.first_layer;
    hello->last_layer = st->plan.part.end_layer;
    hello->n_layer = st->model.n_layer;
    memcpy(hello->model_digest, st->model_digest, sizeof(hello->model_digest));
    hello->max_blocks = st->plan.kv.n_block;
    hello->max_slots = st->plan.kv.n_slot;
    hello->max_context = st->plan.context_tok;
    hello->hot_tok = st->plan.kv.hot_tok;
    hello->max_draft = st->plan.max_draft;
    hello->host_bytes = (int64_t)st->plan.n_unit * (int64_t)st->plan.unit_bytes;
    hello->unit_bytes = (int32_t)st->plan.unit_bytes;
    hello->block_bytes = (int64_t)ds4_kv_block_bytes(&st->plan.kv);
    hello->point = st->store.shape;
    hello->disk = ds4_kv_tier_has_disk(st->tier);
    memcpy(hello->kv_fingerprint, st->kv_fingerprint, sizeof(hello->kv_fingerprint));
    snprintf(hello->backend, sizeof(hello->backend), "%s", st->backend->name);
    snprintf(hello->device, sizeof(hello->device), "%s", st->backend->describe(st->dev));
}

void ds4_stage_card(const struct ds4_stage *st, char text[DS4_CARD_ADDRESS_BYTES])
{
    st->backend->address(st->dev, text, DS4_CARD_ADDRESS_BYTES);
}

void ds4_stage_health(const struct ds4_stage *st, struct ds4_health *health)
{
    health->weights_bytes = st->plan.weights_bytes + st->plan.mapped_bytes;
    health->kv_bytes = st->plan.rings_bytes + st->plan.pages_bytes;
    health->uses_on_device = atomic_load_explicit(&st->uses_on_device, memory_order_relaxed);
    health->uses_streamed = atomic_load_explicit(&st->uses_streamed, memory_order_relaxed);
    health->uses_on_host = atomic_load_explicit(&st->uses_on_host, memory_order_relaxed);
    health->experts_moved = atomic_load_explicit(&st->experts_moved, memory_order_relaxed);
    health->probe = (int32_t)st->probe.verdict;
    health->memory_bytes_per_s = st->probe.memory_bytes_per_s;
    health->link_bytes_per_s = st->probe.link_bytes_per_s;
    health->link_latency_s = st->link_latency_s;
    health->flops = st->probe.flops;
    health->expert_steps = atomic_load_explicit(&st->spread_steps, memory_order_relaxed);
    health->experts_touched = atomic_load_explicit(&st->spread_experts, memory_order_relaxed);
    health->nonfinite_rows =
        (uint64_t)atomic_load_explicit(&st->nonfinite_rows, memory_order_relaxed);
}

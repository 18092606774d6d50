/* Settings -> configuration of stage, pipe, bus and watchdog.
 *
 * max_seqs and max_step_tok follow the same rule as the router's (chunk rows beside one decode row per
 * sequence): a stage refuses a generation that asks for more than it planned for. */
#include "worker/settings.h"

#include "common/choices.h"
#include "worker/rig.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#define MIN_INFLIGHT  2 /* one step runs while the next waits */
#define PIPE_SLACK_MS 10000

static int32_t smaller(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

static int32_t larger(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

/* What the gpu section says of this stage; a list of one value is for all of them. */
static int fill_card(const struct ds4_config *config, int32_t stage, struct ds4_stage_config *out,
                     struct ds4_err *err)
{
    const struct ds4_config_texts *device = &config->gpu.device;
    const struct ds4_config_ints *limit = &config->gpu.memory_limit_mb;
    const struct ds4_config_texts *cards = &config->gpu.cards;

    out->device.ordinal = stage;
    if (device->n > 0)
        out->device.card = device->v[device->n == 1 ? 0 : stage];
    if (limit->n > 0)
        out->memory_limit_bytes = (size_t)limit->v[limit->n == 1 ? 0 : stage] << 20;
    for (int32_t s = 0; s < cards->n; s++) {
        struct ds4_card one[DS4_MAX_STAGES];
        int32_t n = ds4_cards_parse(cards->v[s], one, err);

        if (n != 1)
            return n < 0 ? ds4_err_wrap(err, "gpu.cards")
                         : ds4_fail(err, DS4_E_INVALID,
                                    "gpu.cards: \"%.64s\" must be one card, as in {\"64\", \"80\"}",
                                    cards->v[s]);
        out->card[s] = one[0];
    }
    out->n_card = cards->n;
    return 0;
}

static int fill_stage(const struct ds4_config *config, int32_t stage, int32_t n_stage,
                      struct ds4_stage_config *out, struct ds4_err *err)
{
    int32_t max_seqs = smaller(config->sched.max_seqs, DS4_MAX_STEP_ENTRIES);

    *out = (struct ds4_stage_config){
        .model_path = config->model.path,
        .load = (enum ds4_load)config->worker.load,
        .stage = stage,
        .n_stage = n_stage,
        .n_partition = config->cluster.partition.n,
        .partition = config->cluster.partition.v,
        .backend = config->worker.backend == DS4_BACKEND_CUDA ? "cuda" : "cpu",
        .device = {.n_thread = config->worker.threads,
                   .isa = (enum ds4_isa)config->worker.isa,
                   .products = (enum ds4_products)config->numerics.products},
        .quant_sim = (enum ds4_auto_switch)config->kv.quant_sim,
        .stream = (enum ds4_stream_dtype)config->numerics.stream,
        .context_tok = config->model.context,
        .max_seqs = max_seqs,
        .max_step_tok = smaller(config->sched.chunk_tok, DS4_MAX_STEP_TOK - max_seqs) + max_seqs,
        .n_blocks = config->kv.blocks,
        .hot_window_tok = config->kv.hot_window,
    };
    return fill_card(config, stage, out, err);
}

static int fill_endpoint(const struct ds4_config *config, struct ds4_worker_settings *out,
                         struct ds4_err *err)
{
    int n;

    if (config->cluster.steps_endpoint[0] != 0)
        n = snprintf(out->endpoint, sizeof(out->endpoint), "%s", config->cluster.steps_endpoint);
    else
        n = snprintf(out->endpoint, sizeof(out->endpoint), "ipc://%s/router.sock",
                     config->cluster.endpoint_dir);
    if ((size_t)n >= sizeof(out->endpoint))
        return ds4_fail(err, DS4_E_INVALID, "cluster.endpoint_dir is longer than %zu bytes",
                        sizeof(out->endpoint) - 1);
    return 0;
}

static int fill_boot_id(uint8_t id[DS4_ID_BYTES], struct ds4_err *err)
{
    if (getrandom(id, DS4_ID_BYTES, 0) != DS4_ID_BYTES)
        return ds4_fail(err, DS4_E_IO, "could not draw a boot id: %s", strerror(errno));
    return 0;
}

int ds4_worker_settings_fill(const struct ds4_config *config, int32_t stage,
                             struct ds4_worker_settings *out, struct ds4_err *err)
{
    int32_t n_stage = ds4_config_stages(config);
    int32_t inflight = larger(config->sched.inflight, larger(n_stage, MIN_INFLIGHT));
    struct ds4_control_config *control = &out->control;

    *out = (struct ds4_worker_settings){0};
    if (stage < 0 || stage >= n_stage)
        return ds4_fail(err, DS4_E_INVALID, "--stage is %d, the cluster has stages 0 to %d",
                        (int)stage, (int)n_stage - 1);
    if (config->model.path[0] == 0)
        return ds4_fail(err, DS4_E_INVALID, "model.path is not set");
    if (config->cluster.pipe == DS4_PIPE_NCCL)
        return ds4_fail(err, DS4_E_INVALID, "cluster.pipe = nccl is not in this build");
    if (fill_stage(config, stage, n_stage, &out->stage, err) != 0)
        return -1;
    control->loop = (struct ds4_loop_config){
        .stage = out->stage,
        .pipe = &ds4_pipe_shm,
        .depth = smaller(inflight + 1, DS4_MAX_STAGES),
        .form_ms = config->cluster.form_ms,
        .check_ms = config->cluster.heartbeat_ms,
        /* Every stage before this one may take as long as the watchdog lets it. */
        .pipe_wait_ms = smaller(config->watchdog.prefill_s, INT32_MAX / 2000 / DS4_MAX_STAGES) *
                            1000 * n_stage +
                        PIPE_SLACK_MS,
    };
    control->heartbeat_ms = config->cluster.heartbeat_ms;
    control->step_ms = config->watchdog.step_s * 1000;
    control->prefill_ms = config->watchdog.prefill_s * 1000;
    control->bus.stage = stage;
    control->bus.endpoint = out->endpoint;
    control->bus.curve_dir = config->cluster.curve_dir;
    if (fill_endpoint(config, out, err))
        return -1;
    return fill_boot_id(control->bus.boot_id, err);
}

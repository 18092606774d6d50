/* Settings -> configuration of stage, pipe, bus and watchdog.
 *
 * max_seqs and max_step_tok follow the same rule as the router's (chunk rows beside what sequences decode,
 * drafts included): a stage refuses a generation that asks for more than it planned for. */
#include "worker/settings.h"

#include "common/choices.h"
#include "worker/rig.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

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

static const char *backend_name(const struct ds4_config *config)
{
    return config->worker.backend == DS4_BACKEND_CUDA ? "cuda" : "cpu";
}

static bool has_gpu_each(const struct ds4_config *config, int32_t n_stage)
{
    const struct ds4_config_texts *device = &config->gpu.device;

    if (config->worker.backend != DS4_BACKEND_CUDA || n_stage < 2)
        return false;
    if (device->n == 0)
        return ds4_backend_n_device("cuda") >= n_stage;
    for (int32_t a = 0; a < device->n; a++)
        for (int32_t b = 0; b < a; b++)
            if (strcmp(device->v[a], device->v[b]) == 0)
                return false;
    return device->n >= n_stage;
}

static const struct ds4_pipe_ops *choose_pipe(const struct ds4_config *config, int32_t n_stage,
                                              struct ds4_err *err)
{
    const struct ds4_pipe_ops *nccl = ds4_pipe_find("nccl");

    if (config->cluster.pipe == DS4_PIPE_AUTO)
        return nccl != NULL && has_gpu_each(config, n_stage) ? nccl : ds4_pipe_find("shm");
    if (config->cluster.pipe == DS4_PIPE_SHM)
        return ds4_pipe_find("shm");
    if (nccl == NULL)
        ds4_fail(err, DS4_E_INVALID,
                 "cluster.pipe = nccl is not in this build, which has no NCCL: make CUDA=1");
    else if (config->worker.backend != DS4_BACKEND_CUDA)
        ds4_fail(err, DS4_E_INVALID, "cluster.pipe = nccl needs worker.backend = cuda");
    else
        return nccl;
    return NULL;
}

/* What the gpu section says of this stage; a list of one value is for all of them. */
static int fill_card(const struct ds4_config *config, int32_t stage, struct ds4_stage_config *out,
                     struct ds4_err *err)
{
    const struct ds4_config_texts *device = &config->gpu.device;
    const struct ds4_config_ints *limit = &config->gpu.memory_limit_mb;
    const struct ds4_config_texts *cards = &config->gpu.cards;

    out->device.ordinal = stage;
    out->self_test = config->gpu.self_test;
    out->offload = config->gpu.offload;
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

/* This stage's part of kv.host_mb.  Several stages may run on this host, so each takes no more than its
 * part of half the host's memory. */
static int64_t host_share(int32_t host_mb, int32_t n_stage)
{
    int64_t half = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE) / 2;
    int64_t bytes = (int64_t)host_mb << 20;

    return (bytes < half ? bytes : half) / n_stage;
}

/* Exact products answer to the bit on every processor; a card would be several times slower with them. */
static enum ds4_products products_of(const struct ds4_config *config)
{
    switch ((enum ds4_products_choice)config->numerics.products) {
    case DS4_PRODUCTS_CHOICE_EXACT:
        return DS4_PRODUCTS_EXACT;
    case DS4_PRODUCTS_CHOICE_FAST:
        return DS4_PRODUCTS_FAST;
    case DS4_PRODUCTS_CHOICE_AUTO:
        break;
    }
    return config->worker.backend == DS4_BACKEND_CUDA ? DS4_PRODUCTS_FAST : DS4_PRODUCTS_EXACT;
}

static int fill_stage(const struct ds4_config *config, int32_t stage, int32_t n_stage,
                      struct ds4_stage_config *out, struct ds4_err *err)
{
    int32_t max_seqs = smaller(config->sched.max_seqs, DS4_MAX_STEP_ENTRIES);
    int32_t max_draft = config->spec.method == DS4_SPEC_NONE ? 0 : config->spec.k;
    int32_t head_rows = ds4_head_rows(max_seqs, max_draft);

    *out = (struct ds4_stage_config){
        .model_path = config->model.path,
        .load = (enum ds4_load)config->worker.load,
        .stage = stage,
        .n_stage = n_stage,
        .n_partition = config->cluster.partition.n,
        .partition = config->cluster.partition.v,
        .backend = backend_name(config),
        .device = {.n_thread = config->worker.threads,
                   .isa = (enum ds4_isa)config->worker.isa,
                   .products = products_of(config)},
        .quant_sim = (enum ds4_auto_switch)config->kv.quant_sim,
        .stream = (enum ds4_stream_dtype)config->numerics.stream,
        .context_tok = config->model.context,
        .max_seqs = max_seqs,
        .max_step_tok = smaller(config->sched.chunk_tok, DS4_MAX_STEP_TOK - head_rows) + head_rows,
        .n_blocks = config->kv.blocks,
        .hot_window_tok = config->kv.hot_window,
        .max_draft = max_draft,
        .draft_min_match = config->spec.min_match,
        .sync_layers = config->gpu.sync_layers,
        .host_bytes = host_share(config->kv.host_mb, n_stage),
        .disk_dir = config->kv.disk_mb > 0 ? config->kv.disk_dir : NULL,
        .disk_write_mbps = config->kv.disk_write_mbps,
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
    const struct ds4_pipe_ops *pipe;

    *out = (struct ds4_worker_settings){0};
    if (stage < 0 || stage >= n_stage)
        return ds4_fail(err, DS4_E_INVALID, "--stage is %d, the cluster has stages 0 to %d",
                        (int)stage, (int)n_stage - 1);
    if (config->model.path[0] == 0)
        return ds4_fail(err, DS4_E_INVALID, "model.path is not set");
    pipe = choose_pipe(config, n_stage, err);
    if (pipe == NULL || fill_stage(config, stage, n_stage, &out->stage, err) != 0)
        return -1;
    out->stage.pipe = pipe;
    out->stage.depth = smaller(inflight + 1, DS4_MAX_STAGES);
    control->loop = (struct ds4_loop_config){
        .stage = out->stage,
        .pipe = pipe,
        .depth = out->stage.depth,
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

static int set_variable(const char *name, const char *value, struct ds4_err *err)
{
    if (setenv(name, value, 0) != 0)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for %s in the environment", name);
    return 0;
}

int ds4_worker_settings_environment(const struct ds4_config *config, struct ds4_err *err)
{
    char channels[12];
    const struct {
        const char *name;
        const char *value; /* "": not set */
    } variables[] = {
        {"NCCL_P2P_DISABLE", config->nccl.p2p ? "" : "1"},
        {"NCCL_SHM_DISABLE", config->nccl.shm ? "" : "1"},
        {"NCCL_SOCKET_IFNAME", config->nccl.interface},
        {"NCCL_MAX_CTAS", config->nccl.channels > 0 ? channels : ""},
        {"NCCL_DEBUG", config->nccl.debug},
        /* The target cards break virtual memory management, have no InfiniBand, and no multicast. */
        {"NCCL_CUMEM_ENABLE", "0"},
        {"NCCL_CUMEM_HOST_ENABLE", "0"},
        {"NCCL_IB_DISABLE", "1"},
        {"NCCL_NVLS_ENABLE", "0"},
        /* Connections are made while forming, not in the first step. */
        {"NCCL_RUNTIME_CONNECT", "0"},
    };

    snprintf(channels, sizeof(channels), "%d", (int)config->nccl.channels);
    for (size_t i = 0; i < sizeof(variables) / sizeof(variables[0]); i++)
        if (variables[i].value[0] != 0 && set_variable(variables[i].name, variables[i].value, err))
            return -1;
    return 0;
}

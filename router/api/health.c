/* Readiness is derived from the workers, never from this process being alive: a server whose device is
 * dead answers 503 everywhere a client or a supervisor looks (state list and rules in router/cluster).
 *
 * Everything shown is a copy of what the loop thread already knows: no waiting, no worker round trip. */
#include "router/api/health.h"

#include "common/clock.h"
#include "common/json_write.h"
#include "common/metrics.h"
#include "router/api/context.h"
#include "router/cluster.h"
#include "router/sched/sched.h"

#include <stdio.h>
#include <stdlib.h>

#define DS4_HEALTH_BYTES  ((size_t)256 << 10)
#define DS4_METRICS_BYTES ((size_t)8 << 20)

static const char *status_word(enum ds4_cluster_state state)
{
    switch (state) {
    case DS4_CLUSTER_STARTING:
    case DS4_CLUSTER_LOADING:
    case DS4_CLUSTER_FORMING:
        return "loading";
    case DS4_CLUSTER_READY:
        return "ok";
    case DS4_CLUSTER_DEGRADED:
        return "degraded";
    case DS4_CLUSTER_RECOVERING:
        return "recovering";
    case DS4_CLUSTER_DRAINING:
        return "draining";
    case DS4_CLUSTER_FAILED:
        break;
    }
    return "failed";
}

static void write_stage(const struct ds4_stage_view *stage, struct ds4_jw *w)
{
    char layers[32];

    ds4_jw_object(w);
    ds4_jw_key(w, "stage");
    ds4_jw_int(w, stage->stage);
    ds4_jw_key(w, "state");
    ds4_jw_text(w, stage->up ? ds4_worker_state_text(stage->health.state) : "down");
    ds4_jw_key(w, "heartbeat_age_ms");
    ds4_jw_int(w, stage->heartbeat_age_ms);
    ds4_jw_key(w, "gpu");
    ds4_jw_text(w, stage->hello.device);
    ds4_jw_key(w, "layers");
    if (stage->hello.last_layer > stage->hello.first_layer) {
        (void)snprintf(layers, sizeof(layers), "%d-%d", stage->hello.first_layer,
                       stage->hello.last_layer - 1);
        ds4_jw_text(w, layers);
    } else {
        ds4_jw_null(w);
    }
    ds4_jw_key(w, "steps");
    ds4_jw_int(w, (int64_t)stage->health.steps_done);
    ds4_jw_key(w, "weights_bytes");
    ds4_jw_int(w, (int64_t)stage->health.weights_bytes);
    ds4_jw_key(w, "kv_bytes");
    ds4_jw_int(w, (int64_t)stage->health.kv_bytes);
    ds4_jw_key(w, "restarts");
    ds4_jw_int(w, stage->restarts);
    ds4_jw_end(w);
}

static void write_health(const struct ds4_cluster_view *view, struct ds4_jw *w)
{
    char message[160];

    ds4_jw_object(w);
    ds4_jw_key(w, "status");
    ds4_jw_text(w, view->ready                        ? status_word(view->state)
                   : view->state == DS4_CLUSTER_READY ? "recovering"
                                                      : status_word(view->state));
    ds4_jw_key(w, "generation");
    ds4_jw_int(w, view->generation);
    ds4_jw_key(w, "stages");
    ds4_jw_array(w);
    for (int32_t i = 0; i < view->n_stage; i++)
        write_stage(&view->stage[i], w);
    ds4_jw_end(w);
    ds4_jw_key(w, "last_token_age_ms");
    ds4_jw_int(w, view->last_token_age_ms);
    ds4_jw_key(w, "canary_age_ms");
    if (view->canary_age_ms < 0)
        ds4_jw_null(w);
    else
        ds4_jw_int(w, view->canary_age_ms);
    ds4_jw_key(w, "queue");
    ds4_jw_int(w, view->queue);
    ds4_jw_key(w, "load_fraction");
    ds4_jw_double(w, view->load_fraction);
    ds4_jw_key(w, "reasons");
    ds4_jw_array(w);
    for (int32_t i = 0; i < view->n_reason; i++)
        ds4_jw_text(w, view->reasons[i]);
    ds4_jw_end(w);
    if (!view->ready) {
        (void)snprintf(message, sizeof(message), "%s%s%s", ds4_cluster_state_text(view->state),
                       view->n_reason > 0 ? ": " : "", view->n_reason > 0 ? view->reasons[0] : "");
        ds4_jw_key(w, "error");
        ds4_jw_object(w);
        ds4_jw_key(w, "code");
        ds4_jw_int(w, 503);
        ds4_jw_key(w, "message");
        ds4_jw_text(w, view->state <= DS4_CLUSTER_FORMING ? "Loading model" : message);
        ds4_jw_key(w, "type");
        ds4_jw_text(w, "unavailable_error");
        ds4_jw_end(w);
    }
    ds4_jw_end(w);
}

void ds4_ready_handle(struct ds4_exchange *x, void *context)
{
    const struct ds4_api_context *api = context;
    struct ds4_cluster_view *view = calloc(1, sizeof(*view));
    struct ds4_buf body;
    struct ds4_jw w;
    char seconds[16];

    if (view == NULL) {
        ds4_exchange_reply(x, 503, "application/json", DS4_STR("{\"status\":\"failed\"}"));
        return;
    }
    ds4_cluster_view(api->cluster, ds4_clock_ns(), view);
    ds4_buf_init(&body, DS4_HEALTH_BYTES);
    ds4_jw_init(&w, &body);
    write_health(view, &w);
    if (!view->ready) {
        (void)snprintf(seconds, sizeof(seconds), "%d",
                       view->retry_after_ms > 1000 ? view->retry_after_ms / 1000 : 1);
        ds4_exchange_set_header(x, "retry-after", seconds);
    }
    ds4_exchange_reply(x, view->ready ? 200 : 503, "application/json", ds4_buf_view(&body));
    ds4_buf_deinit(&body);
    free(view);
}

void ds4_livez_handle(struct ds4_exchange *x, void *context)
{
    (void)context;
    ds4_exchange_reply(x, 200, "application/json", DS4_STR("{\"status\":\"alive\"}"));
}

void ds4_health_handle(struct ds4_exchange *x, void *context)
{
    const struct ds4_api_context *api = context;

    if (api->config->health.mode == DS4_HEALTH_LIVE)
        ds4_livez_handle(x, context);
    else
        ds4_ready_handle(x, context);
}

void ds4_version_handle(struct ds4_exchange *x, void *context)
{
    const struct ds4_api_context *api = context;
    struct ds4_buf body;
    struct ds4_jw w;

    ds4_buf_init(&body, DS4_HEALTH_BYTES);
    ds4_jw_init(&w, &body);
    ds4_jw_object(&w);
    ds4_jw_key(&w, "version");
    ds4_jw_text(&w, DS4_VERSION);
    ds4_jw_key(&w, "system_fingerprint");
    ds4_jw_text(&w, api->fingerprint);
    ds4_jw_key(&w, "model");
    ds4_jw_text(&w, api->model_name);
    ds4_jw_key(&w, "release");
    ds4_jw_text(&w, ds4_config_choice("model.release", api->release));
    ds4_jw_end(&w);
    ds4_exchange_reply(x, 200, "application/json", ds4_buf_view(&body));
    ds4_buf_deinit(&body);
}

void ds4_metrics_handle(struct ds4_exchange *x, void *context)
{
    const struct ds4_api_context *api = context;
    struct ds4_str accept = ds4_exchange_header(x, "accept");
    bool open_format =
        ds4_str_find(accept, DS4_STR("application/openmetrics-text"), 0) != DS4_STR_NONE;
    struct ds4_buf body;
    struct ds4_err err = {0};

    ds4_buf_init(&body, DS4_METRICS_BYTES);
    ds4_metrics_read_process(api->metrics);
    ds4_cluster_export(api->cluster, ds4_clock_ns());
    (void)ds4_metrics_render(api->metrics,
                             open_format ? DS4_METRICS_OPENMETRICS : DS4_METRICS_PROMETHEUS, &body);
    if (ds4_buf_check(&body, "metrics", &err) != 0)
        ds4_exchange_reply(x, 500, "text/plain", ds4_str_view(err.msg));
    else
        ds4_exchange_reply(x, 200,
                           open_format
                               ? "application/openmetrics-text; version=1.0.0; charset=utf-8"
                               : "text/plain; version=0.0.4; charset=utf-8",
                           ds4_buf_view(&body));
    ds4_buf_deinit(&body);
}

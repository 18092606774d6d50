/* The rig for people: what /health and /metrics know, put together the way it is looked at.
 *
 * Nothing here is measured: states and events are the cluster's, rates those of router/stats, sums those
 * of the metrics.  No prompt text, no keys, no paths. */
#include "router/api/stats.h"

#include "common/clock.h"
#include "common/json_write.h"
#include "common/metrics.h"
#include "router/api/context.h"
#include "router/cluster.h"
#include "router/sched/budget.h"
#include "router/sched/sched.h"
#include "router/stats.h"

#include <stdlib.h>

#define DS4_STATS_BYTES ((size_t)1 << 20)

/* Everything at one moment; large, so on the heap. */
struct snapshot {
    int64_t now_ns;
    struct ds4_cluster_view view;
    struct ds4_sched_stats sched;
    struct ds4_rates rates;
    struct ds4_second second[DS4_STATS_HISTORY];
};

static void put_int(struct ds4_jw *w, const char *key, int64_t value)
{
    ds4_jw_key(w, key);
    ds4_jw_int(w, value);
}

static void put_text(struct ds4_jw *w, const char *key, const char *text)
{
    ds4_jw_key(w, key);
    ds4_jw_text(w, text);
}

/* A negative number means that nothing can be said. */
static void put_number(struct ds4_jw *w, const char *key, double value)
{
    ds4_jw_key(w, key);
    if (value < 0)
        ds4_jw_null(w);
    else
        ds4_jw_double(w, value);
}

static void put_age(struct ds4_jw *w, const char *key, int64_t age_ms)
{
    put_number(w, key, age_ms < 0 ? -1 : (double)age_ms / 1e3);
}

static void write_state(const struct ds4_api_context *api, const struct snapshot *s,
                        struct ds4_jw *w)
{
    const struct ds4_cluster_view *view = &s->view;

    put_text(w, "model", api->model_name);
    put_text(w, "release", ds4_config_choice("model.release", api->release));
    put_text(w, "version", DS4_VERSION);
    put_int(w, "uptime_seconds", ds4_clock_unix_ns() / DS4_NS_PER_SEC - api->started_unix_s);
    put_text(w, "state", ds4_cluster_state_text(view->state));
    ds4_jw_key(w, "ready");
    ds4_jw_bool(w, view->ready);
    ds4_jw_key(w, "reasons");
    ds4_jw_array(w);
    for (int32_t i = 0; i < view->n_reason; i++)
        ds4_jw_text(w, view->reasons[i]);
    ds4_jw_end(w);
    put_int(w, "generation", view->generation);
    put_int(w, "context_tokens", view->context_tok);
    put_number(w, "load_fraction", view->load_fraction);
    put_age(w, "last_token_age_seconds", view->last_token_age_ms);
    put_age(w, "canary_age_seconds", view->canary_age_ms);
}

static void write_work(const struct snapshot *s, struct ds4_jw *w)
{
    const struct ds4_sched_stats *sched = &s->sched;

    put_int(w, "queued", sched->queued);
    put_age(w, "oldest_queued_seconds",
            sched->oldest_queued_ns == 0 ? -1
                                         : (s->now_ns - sched->oldest_queued_ns) / DS4_NS_PER_MS);
    put_int(w, "prefilling", sched->prefilling);
    put_int(w, "decoding", sched->decoding);
    put_int(w, "parked", sched->parked);
    put_int(w, "max_running", sched->max_seqs);
    put_number(w, "generated_tokens_per_second", s->rates.generated_tok_per_s);
    put_number(w, "prefilled_tokens_per_second", s->rates.prefilled_tok_per_s);
    put_number(w, "steps_per_second", s->rates.steps_per_s);
    put_number(w, "bubble_ratio", s->rates.bubble);
    ds4_jw_key(w, "cache");
    ds4_jw_object(w);
    put_int(w, "block_tokens", DS4_BLOCK_TOK);
    put_int(w, "free", sched->blocks_free);
    put_int(w, "promised", sched->blocks_promised);
    put_int(w, "live", sched->blocks_live);
    put_int(w, "cached", sched->blocks_cached);
    put_int(w, "total", sched->blocks_total);
    put_int(w, "prefixes", sched->idle);
    ds4_jw_end(w);
}

static double outcome(const struct ds4_api_context *api, const char *text)
{
    double sum = 0;

    for (int a = 0; a < DS4_N_API; a++)
        sum += ds4_metric_value(api->metrics, DS4_M_REQUESTS,
                                ds4_metric_labels(ds4_api_text((enum ds4_api)a), text));
    return sum;
}

static void write_totals(const struct ds4_api_context *api, struct ds4_jw *w)
{
    static const char *const outcomes[] = {"completed", "failed", "refused", "cancelled",
                                           "timeout"};
    const struct {
        const char *key;
        enum ds4_metric id;
    } sums[] = {
        {"effort_downgrades", DS4_M_EFFORT_DOWNGRADES},
        {"tool_calls", DS4_M_TOOL_CALLS},
        {"parser_recoveries", DS4_M_PARSER_RECOVERIES},
        {"parser_leaks", DS4_M_PARSER_LEAKS},
        {"tripwires", DS4_M_TRIPWIRES},
        {"prompt_tokens", DS4_M_PROMPT_TOKENS_SOURCE},
        {"cached_tokens", DS4_M_KV_HIT_TOKENS},
        {"generated_tokens", DS4_M_GENERATED_TOKENS},
    };

    ds4_jw_key(w, "totals");
    ds4_jw_object(w);
    for (size_t i = 0; i < sizeof(outcomes) / sizeof(outcomes[0]); i++)
        put_number(w, outcomes[i], outcome(api, outcomes[i]));
    for (size_t i = 0; i < sizeof(sums) / sizeof(sums[0]); i++)
        put_number(w, sums[i].key, ds4_metric_sum(api->metrics, sums[i].id));
    ds4_jw_end(w);
}

/* What the driver says of the stage's card; null where nobody can ask. */
static void write_card(const struct ds4_stage_view *v, struct ds4_jw *w)
{
    const double *value = v->health.card.value;

    ds4_jw_key(w, "card");
    if (!v->up || !v->health.card.told) {
        ds4_jw_null(w);
        return;
    }
    ds4_jw_object(w);
    put_number(w, "core_celsius", value[DS4_CARD_CORE_C]);
    put_number(w, "memory_celsius", value[DS4_CARD_MEMORY_C]);
    put_number(w, "watts", value[DS4_CARD_WATT]);
    ds4_jw_key(w, "slowed_by_heat");
    ds4_jw_bool(w, value[DS4_CARD_SLOW_HEAT] > 0);
    ds4_jw_key(w, "slowed_by_power_brake");
    ds4_jw_bool(w, value[DS4_CARD_SLOW_BRAKE] > 0);
    ds4_jw_end(w);
}

static void write_stage(const struct ds4_stage_view *v, const struct ds4_stage_rates *rates,
                        struct ds4_jw *w)
{
    ds4_jw_object(w);
    put_int(w, "stage", v->stage);
    put_text(w, "state", v->up ? ds4_worker_state_text(v->health.state) : "down");
    put_age(w, "heartbeat_age_seconds", v->heartbeat_age_ms);
    put_text(w, "backend", v->hello.backend);
    put_text(w, "device", v->hello.device);
    put_text(w, "host", v->hello.host);
    put_int(w, "first_layer", v->hello.first_layer);
    put_int(w, "last_layer", v->hello.last_layer - 1);
    put_int(w, "layers", v->hello.n_layer);
    put_int(w, "weights_bytes", (int64_t)v->health.weights_bytes);
    put_int(w, "cache_bytes", (int64_t)v->health.kv_bytes);
    put_int(w, "resident_bytes", (int64_t)v->health.rss_bytes);
    put_number(w, "load_fraction",
               v->health.total_bytes > 0
                   ? (double)v->health.loaded_bytes / (double)v->health.total_bytes
                   : -1);
    put_int(w, "steps", (int64_t)v->health.steps_done);
    put_int(w, "restarts", v->restarts);
    put_number(w, "decode_step_seconds", rates->decode_step_s);
    put_number(w, "prefill_step_seconds", rates->prefill_step_s);
    put_number(w, "busy_ratio", rates->busy);
    put_number(w, "wait_receive_ratio", rates->wait_recv);
    put_number(w, "wait_token_ratio", rates->wait_token);
    put_number(w, "wait_send_ratio", rates->wait_send);
    put_number(w, "sent_bytes_per_second", rates->sent_bytes_per_s);
    put_text(w, "message", v->health.message);
    write_card(v, w);
    ds4_jw_end(w);
}

static void write_history(const struct ds4_api_context *api, struct snapshot *s, struct ds4_jw *w)
{
    int32_t n = ds4_stats_history(api->stats, s->second);

    ds4_jw_key(w, "history");
    ds4_jw_object(w);
    ds4_jw_key(w, "generated_tokens_per_second");
    ds4_jw_array(w);
    for (int32_t i = 0; i < n; i++)
        ds4_jw_double(w, s->second[i].generated_tok_per_s);
    ds4_jw_end(w);
    ds4_jw_key(w, "prefilled_tokens_per_second");
    ds4_jw_array(w);
    for (int32_t i = 0; i < n; i++)
        ds4_jw_double(w, s->second[i].prefilled_tok_per_s);
    ds4_jw_end(w);
    ds4_jw_key(w, "running");
    ds4_jw_array(w);
    for (int32_t i = 0; i < n; i++)
        ds4_jw_int(w, s->second[i].running);
    ds4_jw_end(w);
    ds4_jw_end(w);
}

static void write_events(const struct ds4_api_context *api, const struct snapshot *s,
                         struct ds4_jw *w)
{
    const struct ds4_cluster_event *event;

    ds4_jw_key(w, "events");
    ds4_jw_array(w);
    for (int32_t i = 0; (event = ds4_cluster_event(api->cluster, i)) != NULL; i++) {
        ds4_jw_object(w);
        put_age(w, "age_seconds", (s->now_ns - event->at_ns) / DS4_NS_PER_MS);
        ds4_jw_key(w, "bad");
        ds4_jw_bool(w, event->bad);
        put_text(w, "text", event->text);
        ds4_jw_end(w);
    }
    ds4_jw_end(w);
}

static void write_all(const struct ds4_api_context *api, struct snapshot *s, struct ds4_jw *w)
{
    ds4_jw_object(w);
    write_state(api, s, w);
    write_work(s, w);
    write_totals(api, w);
    ds4_jw_key(w, "stages");
    ds4_jw_array(w);
    for (int32_t i = 0; i < s->view.n_stage; i++)
        write_stage(&s->view.stage[i], &s->rates.stage[i], w);
    ds4_jw_end(w);
    write_history(api, s, w);
    write_events(api, s, w);
    ds4_jw_end(w);
}

void ds4_stats_handle(struct ds4_exchange *x, void *context)
{
    const struct ds4_api_context *api = context;
    struct snapshot *s = calloc(1, sizeof(*s));
    struct ds4_buf body;
    struct ds4_err err = {0};
    struct ds4_jw w;

    ds4_buf_init(&body, DS4_STATS_BYTES);
    if (s != NULL) {
        s->now_ns = ds4_clock_ns();
        ds4_cluster_view(api->cluster, s->now_ns, &s->view);
        ds4_sched_stats(api->sched, &s->sched);
        ds4_stats_rates(api->stats, &s->rates);
        ds4_jw_init(&w, &body);
        write_all(api, s, &w);
    }
    ds4_exchange_set_header(x, "cache-control", "no-store");
    if (s == NULL || ds4_buf_check(&body, "statistics", &err) != 0)
        ds4_exchange_reply(x, 500, "text/plain", DS4_STR("no memory for the statistics\n"));
    else
        ds4_exchange_reply(x, 200, "application/json", ds4_buf_view(&body));
    ds4_buf_deinit(&body);
    free(s);
}

/* What is shown of the cluster: /health, /metrics, "may a request come in".
 *
 * Everything is derived at the moment of asking from what workers said and from tokens that came back,
 * never from a stored flag: a flag that nobody lowers is how a dead server looks alive.  Copies only, no
 * waiting, no allocation. */
#include "common/clock.h"
#include "common/metrics.h"
#include "router/canary.h"
#include "router/cluster_state.h"
#include "router/sched/sched.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define DS4_RETRY_LOADING_MS 10000
#define DS4_RETRY_AWAY_MS    120000
#define DS4_RETRY_SOON_MS    5000
#define DS4_PROBE_IS_BRAKE   3 /* struct ds4_health.probe */

const char *ds4_cluster_state_text(enum ds4_cluster_state state)
{
    static const char *const text[DS4_N_CLUSTER_STATE] = {
        "starting", "loading", "forming", "ready", "degraded", "recovering", "draining", "failed"};

    return (unsigned)state < DS4_N_CLUSTER_STATE ? text[state] : "?";
}

const char *ds4_worker_state_text(enum ds4_worker_state state)
{
    static const char *const text[] = {"starting", "loading",  "idle",  "forming",
                                       "ready",    "draining", "failed"};

    return (unsigned)state < sizeof(text) / sizeof(text[0]) ? text[state] : "?";
}

static int64_t age_ms(int64_t since_ns, int64_t now_ns)
{
    return since_ns == 0 ? -1 : (now_ns - since_ns) / DS4_NS_PER_MS;
}

bool ds4_cluster_unfit(const struct ds4_cluster *c, int64_t now_ns, struct ds4_err *why)
{
    struct ds4_sched_stats stats;

    for (int32_t s = 0; s < c->config.n_stage; s++)
        if (now_ns - c->worker[s].heard_ns >= c->config.lost_ms * DS4_NS_PER_MS) {
            ds4_fail(why, DS4_E_UNAVAILABLE, "stage %d is silent", s);
            return true;
        }
    if (ds4_sched_check_step(c->sched, now_ns, why) != 0)
        return true;
    ds4_sched_stats(c->sched, &stats);
    if (stats.last_token_ns == 0) {
        ds4_fail(why, DS4_E_UNAVAILABLE, "no step has come back yet");
        return true;
    }
    if (now_ns - stats.last_token_ns >= c->config.fresh_ms * DS4_NS_PER_MS) {
        ds4_fail(why, DS4_E_UNAVAILABLE, "no step has come back for %" PRId64 " ms",
                 age_ms(stats.last_token_ns, now_ns));
        return true;
    }
    return false;
}

bool ds4_cluster_is_ready(const struct ds4_cluster *c, int64_t now_ns)
{
    return c->bond == DS4_BOND_TOGETHER && !c->draining && !c->resting && c->leaving < 0 &&
           !ds4_cluster_unfit(c, now_ns, NULL);
}

uint32_t ds4_cluster_generation(const struct ds4_cluster *c)
{
    return c->generation;
}

static void add_reason(struct ds4_cluster_view *view, const char *text)
{
    if (view->n_reason < DS4_MAX_REASONS && text[0] != '\0')
        snprintf(view->reasons[view->n_reason++], DS4_REASON_BYTES, "%.*s", DS4_REASON_BYTES - 1,
                 text);
}

static void refuse(struct ds4_cluster_view *view, enum ds4_cluster_state state,
                   enum ds4_reason reason, int32_t retry_after_ms)
{
    view->state = state;
    view->reason = reason;
    view->retry_after_ms = retry_after_ms;
}

/* Not TOGETHER: which of the reasons for that is the one to tell. */
static void view_apart(const struct ds4_cluster *c, int64_t now_ns, struct ds4_cluster_view *view)
{
    bool all_present = true, all_loaded = true, away = false;
    char text[64];

    for (int32_t s = 0; s < c->config.n_stage; s++) {
        const struct ds4_worker *w = &c->worker[s];

        if (!w->present) {
            all_present = false;
            away |= now_ns - w->gone_ns >= c->config.away_ms * DS4_NS_PER_MS;
            snprintf(text, sizeof(text), "stage %d is missing", s);
            add_reason(view, text);
        } else if (w->health.state < DS4_WORKER_IDLE) {
            all_loaded = false;
        }
    }
    add_reason(view, c->plan_problem);
    if (c->was_ready)
        add_reason(view, c->last_problem);
    if (c->plan_problem[0] != '\0' || (away && c->born_ns != 0))
        refuse(view, DS4_CLUSTER_FAILED, DS4_REASON_STAGE_DOWN, DS4_RETRY_AWAY_MS);
    else if (c->was_ready)
        refuse(view, DS4_CLUSTER_RECOVERING, DS4_REASON_RESTARTED, DS4_RETRY_LOADING_MS);
    else if (!all_present)
        refuse(view, DS4_CLUSTER_STARTING, DS4_REASON_LOADING, DS4_RETRY_LOADING_MS);
    else if (!all_loaded)
        refuse(view, DS4_CLUSTER_LOADING, DS4_REASON_LOADING, DS4_RETRY_LOADING_MS);
    else
        refuse(view, DS4_CLUSTER_FORMING, DS4_REASON_LOADING, DS4_RETRY_SOON_MS);
}

/* What holds a stage's card down: as the probe found it at the start, and as the driver says now. */
static const char *held_down_by(const struct ds4_health *health)
{
    const double *value = health->card.value;

    if (health->probe == DS4_PROBE_IS_BRAKE ||
        (health->card.told && value[DS4_CARD_SLOW_BRAKE] > 0))
        return "runs with its power brake on";
    return health->card.told && value[DS4_CARD_SLOW_HEAT] > 0 ? "is slowed down by heat" : NULL;
}

/* The canary and stages on their way out: it serves, but somebody should look. */
static void view_degraded(const struct ds4_cluster *c, int64_t now_ns,
                          struct ds4_cluster_view *view)
{
    char text[64], trouble[DS4_TROUBLE_BYTES];
    const char *held;

    (void)ds4_sched_disk_state(c->sched, trouble);
    if (trouble[0] != '\0') {
        view->state = DS4_CLUSTER_DEGRADED;
        add_reason(view, trouble);
    }
    for (int32_t s = 0; s < c->config.n_stage; s++)
        if (c->worker[s].health.state == DS4_WORKER_DRAINING) {
            view->state = DS4_CLUSTER_DEGRADED;
            snprintf(text, sizeof(text), "stage %d is leaving", s);
            add_reason(view, text);
        }
    for (int32_t s = 0; s < c->config.n_stage; s++) {
        held = held_down_by(&c->worker[s].health);
        if (held != NULL) {
            view->state = DS4_CLUSTER_DEGRADED;
            snprintf(text, sizeof(text), "stage %d %s", s, held);
            add_reason(view, text);
        }
    }
    if (c->canary == NULL)
        return;
    if (c->canary->wrong) {
        view->state = DS4_CLUSTER_DEGRADED;
        add_reason(view, "the canary's answer is not the known one");
    } else if (ds4_canary_is_late(c->canary, now_ns)) {
        view->state = DS4_CLUSTER_DEGRADED;
        add_reason(view, "the canary is late");
    }
}

static void view_together(const struct ds4_cluster *c, int64_t now_ns,
                          struct ds4_cluster_view *view)
{
    struct ds4_err why = {0};
    char text[64];

    if (c->leaving >= 0) {
        snprintf(text, sizeof(text), "stage %d is about to be restarted", c->leaving);
        add_reason(view, text);
        refuse(view, DS4_CLUSTER_RECOVERING, DS4_REASON_RESTARTED, DS4_RETRY_LOADING_MS);
        return;
    }
    if (ds4_cluster_unfit(c, now_ns, &why)) {
        add_reason(view, why.msg);
        if (view->last_token_age_ms < 0 && c->generation == c->config.first_generation + 1)
            refuse(view, DS4_CLUSTER_FORMING, DS4_REASON_LOADING, DS4_RETRY_SOON_MS);
        else
            refuse(view, DS4_CLUSTER_RECOVERING, DS4_REASON_RESTARTED, DS4_RETRY_SOON_MS);
        return;
    }
    view->state = DS4_CLUSTER_READY;
    view->ready = true;
    view_degraded(c, now_ns, view);
}

static void view_stages(const struct ds4_cluster *c, int64_t now_ns, struct ds4_cluster_view *view)
{
    int64_t loaded = 0, total = 0;

    for (int32_t s = 0; s < c->config.n_stage; s++) {
        const struct ds4_worker *w = &c->worker[s];

        view->stage[s] = (struct ds4_stage_view){
            .stage = s,
            .present = w->present,
            .up = w->present && now_ns - w->heard_ns < c->config.lost_ms * DS4_NS_PER_MS,
            .heartbeat_age_ms = age_ms(w->heard_ns, now_ns),
            .hello = w->hello,
            .health = w->health,
            .restarts = w->restarts,
        };
        if (w->present) {
            loaded += w->health.loaded_bytes;
            total += w->health.total_bytes;
        }
    }
    view->load_fraction = total > 0 ? (double)loaded / (double)total : 0;
}

void ds4_cluster_view(const struct ds4_cluster *c, int64_t now_ns, struct ds4_cluster_view *view)
{
    struct ds4_sched_stats stats;

    *view = (struct ds4_cluster_view){.generation = c->generation, .n_stage = c->config.n_stage};
    ds4_sched_stats(c->sched, &stats);
    view->last_token_age_ms =
        c->bond == DS4_BOND_TOGETHER ? age_ms(stats.last_token_ns, now_ns) : -1;
    view->canary_age_ms = c->canary == NULL ? -1 : age_ms(c->canary->good_ns, now_ns);
    view->queue = stats.queued;
    view->context_tok = c->form.context_tok;
    view_stages(c, now_ns, view);
    if (c->bond == DS4_BOND_TOGETHER)
        view_together(c, now_ns, view);
    else
        view_apart(c, now_ns, view);
    if (c->draining || c->resting) {
        view->ready = false;
        refuse(view, DS4_CLUSTER_DRAINING, DS4_REASON_DRAINING, DS4_RETRY_SOON_MS);
    }
}

/* ---- metrics ------------------------------------------------------------------------------------- */

static const char *const probe_text[DS4_MAX_PROBE + 1] = {"none", "full", "throttled", "brake"};

/* Which sensor is which series. */
static const struct {
    enum ds4_card_sensor sensor;
    enum ds4_metric metric;
    const char *label; /* beside the stage; NULL = none */
    bool counter;
} card_series[] = {
    {DS4_CARD_CORE_C, DS4_M_GPU_TEMPERATURE, "core", false},
    {DS4_CARD_MEMORY_C, DS4_M_GPU_TEMPERATURE, "memory", false},
    {DS4_CARD_CORE_LIMIT_C, DS4_M_GPU_TEMPERATURE_LIMIT, "core", false},
    {DS4_CARD_MEMORY_LIMIT_C, DS4_M_GPU_TEMPERATURE_LIMIT, "memory", false},
    {DS4_CARD_WATT, DS4_M_GPU_POWER, NULL, false},
    {DS4_CARD_LIMIT_WATT, DS4_M_GPU_POWER_LIMIT, NULL, false},
    {DS4_CARD_SM_HZ, DS4_M_GPU_CLOCK, "sm", false},
    {DS4_CARD_MEMORY_HZ, DS4_M_GPU_CLOCK, "memory", false},
    {DS4_CARD_LINK_GENERATION, DS4_M_GPU_LINK_GENERATION, NULL, false},
    {DS4_CARD_LINK_WIDTH, DS4_M_GPU_LINK_WIDTH, NULL, false},
    {DS4_CARD_REPLAYS, DS4_M_PCIE_REPLAYS, NULL, true},
    {DS4_CARD_ECC_ERRORS, DS4_M_GPU_ECC_ERRORS, NULL, true},
    {DS4_CARD_SLOW_HEAT, DS4_M_GPU_THROTTLE, "thermal", false},
    {DS4_CARD_SLOW_BRAKE, DS4_M_GPU_THROTTLE, "power_brake", false},
    {DS4_CARD_SLOW_POWER, DS4_M_GPU_THROTTLE, "power_cap", false},
    {DS4_CARD_FREE_BYTES, DS4_M_GPU_MEMORY, "free", false},
};

static const char *const xid_text[DS4_N_XID] = {
#define XID_TEXT(number, lasting, meaning) #number,
    DS4_XIDS(XID_TEXT)
#undef XID_TEXT
        "other"};

/* Of what is used, by whom. */
static void export_card_memory(struct ds4_metrics *m, const char *stage, const struct ds4_health *h)
{
    double used = h->card.value[DS4_CARD_USED_BYTES];
    double other = used - (double)h->weights_bytes - (double)h->kv_bytes;

    if (used < 0)
        return;
    ds4_metric_set(m, DS4_M_GPU_MEMORY, (double)h->weights_bytes, stage, "weights");
    ds4_metric_set(m, DS4_M_GPU_MEMORY, (double)h->kv_bytes, stage, "kv");
    ds4_metric_set(m, DS4_M_GPU_MEMORY, other > 0 ? other : 0, stage, "other");
}

/* What the driver does not tell has no series; what it told of a stage that is away is hidden, counters
 * stay. */
static void export_card(struct ds4_metrics *m, const char *stage, const struct ds4_card_state *card,
                        bool up)
{
    double value;

    for (size_t i = 0; card->told && i < sizeof(card_series) / sizeof(card_series[0]); i++) {
        value = card->value[card_series[i].sensor];
        if (value >= 0 && (up || card_series[i].counter))
            ds4_metric_set(m, card_series[i].metric, value, stage, card_series[i].label);
        else if (!card_series[i].counter)
            ds4_metric_hide(m, card_series[i].metric, stage, card_series[i].label);
    }
    for (int32_t i = 0; card->told && i < DS4_N_XID; i++)
        ds4_metric_set(m, DS4_M_GPU_XID, (double)card->xid[i], stage, xid_text[i]);
}

static void export_stage(const struct ds4_cluster *c, const struct ds4_stage_view *v)
{
    struct ds4_metrics *m = c->config.metrics;
    const char *stage = ds4_metric_stage(v->stage);
    const struct ds4_health *h = &v->health;

    ds4_metric_set(m, DS4_M_WORKER_UP, v->up ? 1 : 0, stage);
    ds4_metric_choose(m, DS4_M_WORKER_STATE, stage, ds4_worker_state_text(h->state));
    if (v->heartbeat_age_ms < 0)
        return;
    ds4_metric_set(m, DS4_M_WORKER_HEARTBEAT_AGE, (double)v->heartbeat_age_ms / 1e3, stage);
    ds4_metric_set(m, DS4_M_STAGE_BUSY, h->busy_seconds, stage);
    ds4_metric_set(m, DS4_M_STAGE_WAIT, h->wait_recv_seconds, stage, "recv");
    ds4_metric_set(m, DS4_M_STAGE_WAIT, h->wait_token_seconds, stage, "token");
    ds4_metric_set(m, DS4_M_STAGE_WAIT, h->wait_command_seconds, stage, "command");
    ds4_metric_set(m, DS4_M_STAGE_WAIT, h->wait_send_seconds, stage, "send");
    ds4_metric_set_histogram(m, DS4_M_STAGE_STEP_SECONDS, h->step_time[DS4_TIMED_PREFILL].bucket,
                             DS4_STEP_BUCKETS, h->step_time[DS4_TIMED_PREFILL].seconds,
                             ds4_metric_labels(stage, "prefill"));
    ds4_metric_set_histogram(m, DS4_M_STAGE_STEP_SECONDS, h->step_time[DS4_TIMED_DECODE].bucket,
                             DS4_STEP_BUCKETS, h->step_time[DS4_TIMED_DECODE].seconds,
                             ds4_metric_labels(stage, "decode"));
    ds4_metric_set(m, DS4_M_STAGE_BYTES, (double)h->sent_bytes, stage, "next");
    ds4_metric_set(m, DS4_M_STAGE_BYTES, (double)h->received_bytes, stage, "prev");
    ds4_metric_set(m, DS4_M_WORKER_CPU, h->cpu_seconds, stage);
    if (h->started_unix_s > 0)
        ds4_metric_set(m, DS4_M_WORKER_START_TIME, (double)h->started_unix_s, stage);
    ds4_metric_set(m, DS4_M_STAGE_STEPS, (double)h->steps_done, stage);
    ds4_metric_set(m, DS4_M_EXPERT_STEPS, (double)h->expert_steps, stage);
    ds4_metric_set(m, DS4_M_EXPERTS_TOUCHED, (double)h->experts_touched, stage);
    ds4_metric_set(m, DS4_M_EXPERT_USES, (double)h->uses_on_device, stage, "device");
    ds4_metric_set(m, DS4_M_EXPERT_USES, (double)h->uses_streamed, stage, "streamed");
    ds4_metric_set(m, DS4_M_EXPERT_USES, (double)h->uses_on_host, stage, "host");
    ds4_metric_set(m, DS4_M_EXPERTS_MOVED, (double)h->experts_moved, stage);
    ds4_metric_set(m, DS4_M_NONFINITE_ROWS, (double)h->nonfinite_rows, stage, "target");
    export_card(m, stage, &h->card, v->up);
    if (!v->up) {
        /* Gauges nobody can vouch for any more are hidden, counters stay. */
        ds4_metric_hide(m, DS4_M_STAGE_MEMORY, stage, "weights");
        ds4_metric_hide(m, DS4_M_STAGE_MEMORY, stage, "kv");
        ds4_metric_hide(m, DS4_M_STAGE_MEMORY, stage, "rss");
        ds4_metric_hide(m, DS4_M_GPU_MEMORY, stage, "weights");
        ds4_metric_hide(m, DS4_M_GPU_MEMORY, stage, "kv");
        ds4_metric_hide(m, DS4_M_GPU_MEMORY, stage, "other");
        ds4_metric_hide(m, DS4_M_STAGE_BANDWIDTH, stage);
        ds4_metric_hide(m, DS4_M_LINK_BANDWIDTH, stage);
        ds4_metric_hide(m, DS4_M_LINK_LATENCY, stage);
        ds4_metric_hide(m, DS4_M_STAGE_FLOPS, stage);
        return;
    }
    ds4_metric_choose(m, DS4_M_STAGE_PROBE, stage, probe_text[h->probe]);
    if (h->card.told)
        export_card_memory(m, stage, h);
    ds4_metric_set(m, DS4_M_STAGE_BANDWIDTH, h->memory_bytes_per_s, stage);
    if (h->link_bytes_per_s > 0) /* a processor has none */
        ds4_metric_set(m, DS4_M_LINK_BANDWIDTH, h->link_bytes_per_s, stage);
    if (h->link_latency_s > 0)
        ds4_metric_set(m, DS4_M_LINK_LATENCY, h->link_latency_s, stage);
    ds4_metric_set(m, DS4_M_STAGE_FLOPS, h->flops, stage);
    ds4_metric_set(m, DS4_M_STAGE_MEMORY, (double)h->weights_bytes, stage, "weights");
    ds4_metric_set(m, DS4_M_STAGE_MEMORY, (double)h->kv_bytes, stage, "kv");
    ds4_metric_set(m, DS4_M_STAGE_MEMORY, (double)h->rss_bytes, stage, "rss");
}

static void export_sched(const struct ds4_cluster *c, int64_t now_ns)
{
    struct ds4_metrics *m = c->config.metrics;
    struct ds4_sched_stats s;

    ds4_sched_stats(c->sched, &s);
    ds4_metric_set(m, DS4_M_REQUESTS_INFLIGHT, s.queued, "queued");
    ds4_metric_set(m, DS4_M_REQUESTS_INFLIGHT, s.prefilling, "prefill");
    ds4_metric_set(m, DS4_M_REQUESTS_INFLIGHT, s.decoding, "decode");
    ds4_metric_set(m, DS4_M_REQUESTS_INFLIGHT, s.parked, "parked");
    ds4_metric_set(m, DS4_M_QUEUE_DEPTH, s.queued, NULL);
    ds4_metric_set(m, DS4_M_QUEUE_OLDEST_SECONDS,
                   s.oldest_queued_ns == 0 ? 0 : (double)(now_ns - s.oldest_queued_ns) / 1e9, NULL);
    ds4_metric_set(m, DS4_M_KV_BLOCKS, s.blocks_free, "free");
    ds4_metric_set(m, DS4_M_KV_BLOCKS, s.blocks_promised, "promised");
    ds4_metric_set(m, DS4_M_KV_BLOCKS, s.blocks_live, "live");
    ds4_metric_set(m, DS4_M_KV_BLOCKS, s.blocks_cached, "cached");
    ds4_metric_set(m, DS4_M_KV_BLOCKS, s.blocks_io, "io");
    ds4_metric_set(m, DS4_M_KV_POINTS, s.points, NULL);
    ds4_metric_set(m, DS4_M_KV_POINT_BYTES, (double)s.point_bytes, NULL);
    ds4_metric_set(m, DS4_M_KV_BYTES, (double)s.hbm_bytes, "hbm");
    ds4_metric_set(m, DS4_M_KV_BYTES, (double)s.host_bytes, "host");
    ds4_metric_set(m, DS4_M_KV_BYTES, (double)s.disk_bytes, "disk");
    ds4_metric_set(m, DS4_M_KV_DISK_COMMITS, s.commits, NULL);
    ds4_metric_choose(m, DS4_M_KV_DISK_STATE, ds4_sched_disk_state(c->sched, NULL));
    ds4_metric_set(m, DS4_M_KV_SLOTS, s.slots_free, "free");
    ds4_metric_set(m, DS4_M_KV_SLOTS, s.slots_used, "used");
    ds4_metric_set(m, DS4_M_KV_USAGE,
                   s.blocks_total == 0
                       ? 0
                       : (double)(s.blocks_promised + s.blocks_live) / (double)s.blocks_total,
                   NULL);
}

static double gauge(const struct ds4_metrics *m, enum ds4_metric id, const char *label)
{
    return ds4_metric_value(m, id, ds4_metric_labels(label));
}

/* FINISH over all dialects. */
static double ended(const struct ds4_metrics *m, enum ds4_end end)
{
    double sum = 0;

    for (int a = 0; a < DS4_N_API; a++)
        sum += ds4_metric_value(
            m, DS4_M_FINISH, ds4_metric_labels(ds4_api_text((enum ds4_api)a), ds4_end_text(end)));
    return sum;
}

/* What vLLM counts, from what we do; histograms are observed beside ours (sched/count.c), because its
 * buckets differ. */
static void export_aliases(struct ds4_metrics *m)
{
    double prompt = m == NULL ? 0 : ds4_metric_sum(m, DS4_M_PROMPT_TOKENS_SOURCE);

    if (m == NULL)
        return;
    ds4_metric_set(m, DS4_M_VLLM_RUNNING,
                   gauge(m, DS4_M_REQUESTS_INFLIGHT, "prefill") +
                       gauge(m, DS4_M_REQUESTS_INFLIGHT, "decode"),
                   NULL);
    ds4_metric_set(m, DS4_M_VLLM_WAITING, gauge(m, DS4_M_REQUESTS_INFLIGHT, "queued"), NULL);
    ds4_metric_set(m, DS4_M_VLLM_KV_USAGE, gauge(m, DS4_M_KV_USAGE, NULL), NULL);
    ds4_metric_set(m, DS4_M_VLLM_PROMPT, prompt, NULL);
    ds4_metric_set(m, DS4_M_VLLM_GENERATION,
                   ds4_metric_sum(m, DS4_M_GENERATED_TOKENS) -
                       gauge(m, DS4_M_GENERATED_TOKENS, "nudge"),
                   NULL);
    ds4_metric_set(m, DS4_M_VLLM_PREEMPTIONS, ds4_metric_sum(m, DS4_M_PREEMPTIONS), NULL);
    ds4_metric_set(m, DS4_M_VLLM_SPEC_DRAFTS, ds4_metric_sum(m, DS4_M_SPEC_DRAFTS), NULL);
    ds4_metric_set(m, DS4_M_VLLM_SPEC_DRAFT_TOKENS, ds4_metric_sum(m, DS4_M_SPEC_DRAFT_TOKENS),
                   NULL);
    ds4_metric_set(m, DS4_M_VLLM_SPEC_ACCEPTED_TOKENS,
                   ds4_metric_sum(m, DS4_M_SPEC_ACCEPTED_TOKENS), NULL);
    for (int32_t i = 0; i < DS4_MAX_DRAFT; i++) {
        char position[12];

        (void)snprintf(position, sizeof(position), "%d", (int)i);
        ds4_metric_set(
            m, DS4_M_VLLM_SPEC_ACCEPTED_PER_POS,
            ds4_metric_value(m, DS4_M_SPEC_ACCEPTED_PER_POS, ds4_metric_labels("ngram", position)),
            position);
    }
    ds4_metric_set(m, DS4_M_VLLM_CACHE_QUERIES, prompt, NULL);
    ds4_metric_set(m, DS4_M_VLLM_CACHE_HITS, gauge(m, DS4_M_PROMPT_TOKENS_SOURCE, "hbm"), NULL);
    ds4_metric_set(m, DS4_M_VLLM_EXTERNAL_QUERIES,
                   prompt - gauge(m, DS4_M_PROMPT_TOKENS_SOURCE, "hbm"), NULL);
    ds4_metric_set(m, DS4_M_VLLM_EXTERNAL_HITS,
                   gauge(m, DS4_M_PROMPT_TOKENS_SOURCE, "host") +
                       gauge(m, DS4_M_PROMPT_TOKENS_SOURCE, "disk"),
                   NULL);
    ds4_metric_set(m, DS4_M_VLLM_SUCCESS,
                   ended(m, DS4_END_EOS) + ended(m, DS4_END_STOP) + ended(m, DS4_END_TOOL_CALLS),
                   "stop");
    ds4_metric_set(m, DS4_M_VLLM_SUCCESS, ended(m, DS4_END_LENGTH) + ended(m, DS4_END_CONTEXT),
                   "length");
    ds4_metric_set(m, DS4_M_VLLM_SUCCESS, ended(m, DS4_END_CANCELLED), "abort");
    ds4_metric_set(m, DS4_M_VLLM_SUCCESS, ended(m, DS4_END_ERROR), "error");
    ds4_metric_set(m, DS4_M_VLLM_SUCCESS, ended(m, DS4_END_REPETITION), "repetition");
}

void ds4_cluster_export(const struct ds4_cluster *c, int64_t now_ns)
{
    struct ds4_metrics *m = c->config.metrics;
    struct ds4_cluster_view view;

    ds4_cluster_view(c, now_ns, &view);
    ds4_metric_set(m, DS4_M_READY, view.ready ? 1 : 0, NULL);
    ds4_metric_choose(m, DS4_M_STATE, ds4_cluster_state_text(view.state));
    ds4_metric_set(m, DS4_M_GENERATION, view.generation, NULL);
    if (view.canary_age_ms >= 0)
        ds4_metric_set(m, DS4_M_CANARY_AGE_SECONDS, (double)view.canary_age_ms / 1e3, NULL);
    for (int32_t s = 0; s < view.n_stage; s++)
        export_stage(c, &view.stage[s]);
    export_sched(c, now_ns);
    export_aliases(m);
}

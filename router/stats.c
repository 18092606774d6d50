/* Samples of totals in a ring, and the differences between them. */
#include "router/stats.h"

#include "common/clock.h"
#include "common/metrics.h"
#include "router/cluster.h"
#include "router/sched/sched.h"

#include <stdlib.h>

#define DS4_STATS_SAMPLES (DS4_STATS_HISTORY + 1)
#define DS4_BUBBLE_MIN_WORK_S                                                                      \
    0.2 /* less work than that in a window says nothing about the pipeline */

struct stage_sample {
    double busy, recv, token, command, send;
    double step_seconds[DS4_N_TIMED];
    double n_step[DS4_N_TIMED];
    double sent_bytes;
};

struct sample {
    int64_t at_ns;
    double work; /* seconds with a step under way */
    double generated_tok, prefilled_tok, steps;
    int32_t running, queued;
};

struct ds4_stats {
    struct ds4_sched *sched;
    struct ds4_cluster *cluster;
    struct ds4_metrics *metrics;
    int32_t n_stage;
    int64_t next_ns;
    uint64_t n_sample; /* ever; the newest is at (n_sample - 1) % DS4_STATS_SAMPLES */
    struct sample sample[DS4_STATS_SAMPLES];
    struct stage_sample *stage; /* [DS4_STATS_SAMPLES][n_stage] */
    struct ds4_cluster_view view;
};

struct ds4_stats *ds4_stats_new(struct ds4_sched *sched, struct ds4_cluster *cluster,
                                struct ds4_metrics *metrics, int32_t n_stage, struct ds4_err *err)
{
    struct ds4_stats *s = calloc(1, sizeof(*s));

    if (s != NULL)
        s->stage = calloc((size_t)DS4_STATS_SAMPLES * (size_t)n_stage, sizeof(*s->stage));
    if (s == NULL || s->stage == NULL) {
        free(s);
        ds4_fail(err, DS4_E_NOMEM, "no memory for statistics");
        return NULL;
    }
    s->sched = sched;
    s->cluster = cluster;
    s->metrics = metrics;
    s->n_stage = n_stage;
    return s;
}

void ds4_stats_free(struct ds4_stats *s)
{
    if (s == NULL)
        return;
    free(s->stage);
    free(s);
}

/* ---- sampling ------------------------------------------------------------------------------------ */

static void sample_stage(const struct ds4_health *h, struct stage_sample *to)
{
    *to = (struct stage_sample){
        .busy = h->busy_seconds,
        .recv = h->wait_recv_seconds,
        .token = h->wait_token_seconds,
        .command = h->wait_command_seconds,
        .send = h->wait_send_seconds,
        .sent_bytes = (double)h->sent_bytes,
    };
    for (int k = 0; k < DS4_N_TIMED; k++) {
        to->step_seconds[k] = h->step_time[k].seconds;
        for (int b = 0; b < DS4_STEP_BUCKETS; b++)
            to->n_step[k] += (double)h->step_time[k].bucket[b];
    }
}

static void show_bubble(const struct ds4_stats *s)
{
    struct ds4_rates rates;

    ds4_stats_rates(s, &rates);
    if (rates.bubble < 0)
        ds4_metric_hide(s->metrics, DS4_M_PIPELINE_BUBBLE, NULL);
    else
        ds4_metric_set(s->metrics, DS4_M_PIPELINE_BUBBLE, rates.bubble, NULL);
}

void ds4_stats_tick(struct ds4_stats *s, int64_t now_ns)
{
    size_t at = (size_t)(s->n_sample % DS4_STATS_SAMPLES);
    struct ds4_sched_stats now;
    int64_t work_ns;

    if (now_ns < s->next_ns)
        return;
    s->next_ns = now_ns + DS4_NS_PER_SEC;
    ds4_sched_stats(s->sched, &now);
    ds4_cluster_view(s->cluster, now_ns, &s->view);
    work_ns = now.at_work_ns + (now.work_began_ns == 0 ? 0 : now_ns - now.work_began_ns);
    s->sample[at] = (struct sample){
        .at_ns = now_ns,
        .work = (double)work_ns / (double)DS4_NS_PER_SEC,
        .generated_tok = (double)now.generated_tok,
        .prefilled_tok = (double)now.prefilled_tok,
        .steps = (double)now.steps_done,
        .running = now.prefilling + now.decoding + now.parked,
        .queued = now.queued,
    };
    for (int32_t i = 0; i < s->n_stage; i++)
        sample_stage(&s->view.stage[i].health, &s->stage[at * (size_t)s->n_stage + (size_t)i]);
    s->n_sample++;
    show_bubble(s);
}

/* ---- rates --------------------------------------------------------------------------------------- */

/* A total that went back belongs to another process: nothing can be said. */
static double grown(double from, double to)
{
    return to < from ? 0 : to - from;
}

static double share(double from, double to, double of)
{
    double part = of > 0 ? grown(from, to) / of : -1;

    return part > 1 ? 1 : part;
}

static double mean(const struct stage_sample *a, const struct stage_sample *b, int kind)
{
    double n = grown(a->n_step[kind], b->n_step[kind]);

    return n > 0 ? grown(a->step_seconds[kind], b->step_seconds[kind]) / n : -1;
}

static void stage_rates(const struct stage_sample *a, const struct stage_sample *b, double work_s,
                        double time_s, struct ds4_stage_rates *to)
{
    *to = (struct ds4_stage_rates){
        .busy = share(a->busy, b->busy, work_s),
        .wait_recv = share(a->recv, b->recv, work_s),
        .wait_token = share(a->token, b->token, work_s),
        .wait_command = share(a->command, b->command, work_s),
        .wait_send = share(a->send, b->send, work_s),
        .decode_step_s = mean(a, b, DS4_TIMED_DECODE),
        .prefill_step_s = mean(a, b, DS4_TIMED_PREFILL),
        .sent_bytes_per_s = grown(a->sent_bytes, b->sent_bytes) / time_s,
    };
}

void ds4_stats_rates(const struct ds4_stats *s, struct ds4_rates *rates)
{
    uint64_t back = s->n_sample <= DS4_STATS_WINDOW_S ? s->n_sample - 1 : DS4_STATS_WINDOW_S;
    const struct sample *a, *b;
    const struct stage_sample *from, *to;
    double time_s, work_s, busy = 0;

    *rates = (struct ds4_rates){.bubble = -1};
    for (int32_t i = 0; i < s->n_stage; i++)
        rates->stage[i] = (struct ds4_stage_rates){-1, -1, -1, -1, -1, -1, -1, 0};
    if (s->n_sample < 2)
        return;
    a = &s->sample[(s->n_sample - 1 - back) % DS4_STATS_SAMPLES];
    b = &s->sample[(s->n_sample - 1) % DS4_STATS_SAMPLES];
    from = &s->stage[(size_t)(a - s->sample) * (size_t)s->n_stage];
    to = &s->stage[(size_t)(b - s->sample) * (size_t)s->n_stage];
    time_s = (double)(b->at_ns - a->at_ns) / (double)DS4_NS_PER_SEC;
    work_s = grown(a->work, b->work);
    if (work_s < DS4_BUBBLE_MIN_WORK_S)
        work_s = 0;
    rates->generated_tok_per_s = grown(a->generated_tok, b->generated_tok) / time_s;
    rates->prefilled_tok_per_s = grown(a->prefilled_tok, b->prefilled_tok) / time_s;
    rates->steps_per_s = grown(a->steps, b->steps) / time_s;
    for (int32_t i = 0; i < s->n_stage; i++) {
        stage_rates(&from[i], &to[i], work_s, time_s, &rates->stage[i]);
        busy += grown(from[i].busy, to[i].busy);
    }
    if (work_s > 0)
        rates->bubble = 1 - share(0, busy, work_s * s->n_stage);
}

int32_t ds4_stats_history(const struct ds4_stats *s, struct ds4_second *second)
{
    uint64_t n = s->n_sample < DS4_STATS_SAMPLES ? s->n_sample : DS4_STATS_SAMPLES;
    int32_t made = 0;

    for (uint64_t i = s->n_sample - n + 1; n > 0 && i < s->n_sample; i++) {
        const struct sample *a = &s->sample[(i - 1) % DS4_STATS_SAMPLES];
        const struct sample *b = &s->sample[i % DS4_STATS_SAMPLES];
        double time_s = (double)(b->at_ns - a->at_ns) / (double)DS4_NS_PER_SEC;

        second[made++] = (struct ds4_second){
            .generated_tok_per_s = grown(a->generated_tok, b->generated_tok) / time_s,
            .prefilled_tok_per_s = grown(a->prefilled_tok, b->prefilled_tok) / time_s,
            .running = b->running,
            .queued = b->queued,
        };
    }
    return made;
}

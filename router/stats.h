/* Numbers for people: how fast the pipeline is right now and was in the last two minutes.
 *
 * Once a second the totals of scheduler and workers are sampled; a rate is the difference of two samples,
 * DS4_STATS_WINDOW_S apart.  Workers' totals are as old as their newest heartbeat, which cancels out.
 *
 * The bubble is the share of the stages' time in which steps were under way and a stage did not compute:
 *   1 - sum over stages of busy time / (stages * time with a step under way)
 * so an idle rig has none, and a router that answers late counts as one.  Loop thread only. */
#ifndef DS4_ROUTER_STATS_H
#define DS4_ROUTER_STATS_H

#include "common/err.h"
#include "proto/message.h"

#include <stdint.h>

#define DS4_STATS_HISTORY  120 /* seconds */
#define DS4_STATS_WINDOW_S 10

struct ds4_cluster;
struct ds4_metrics;
struct ds4_sched;
struct ds4_stats;

/* Shares and means over the window; negative where nothing can be said. */
struct ds4_stage_rates {
    double busy; /* computing time / time with a step under way */
    double wait_recv, wait_token, wait_command, wait_send; /* the same for what it waits for */
    double decode_step_s, prefill_step_s;                  /* mean computing time of a step */
    double sent_bytes_per_s;
};

struct ds4_rates {
    double generated_tok_per_s, prefilled_tok_per_s, steps_per_s;
    double bubble; /* -1: too little ran in the window */
    struct ds4_stage_rates stage[DS4_MAX_STAGES];
};

/* What one second was like. */
struct ds4_second {
    double generated_tok_per_s, prefilled_tok_per_s;
    int32_t running, queued;
};

/* Everything is borrowed; `metrics` (NULL = none) gets the bubble. */
struct ds4_stats *ds4_stats_new(struct ds4_sched *sched, struct ds4_cluster *cluster,
                                struct ds4_metrics *metrics, int32_t n_stage, struct ds4_err *err);
void ds4_stats_free(struct ds4_stats *stats);
/* Samples when a second has passed; call at least ten times a second. */
void ds4_stats_tick(struct ds4_stats *stats, int64_t now_ns);

void ds4_stats_rates(const struct ds4_stats *stats, struct ds4_rates *rates);
/* The newest seconds, oldest first; returns their number, at most DS4_STATS_HISTORY. */
int32_t ds4_stats_history(const struct ds4_stats *stats, struct ds4_second *second);

#endif

/* What the router knows about its workers: who is there, which generation runs, what "healthy" means.
 *
 *   STARTING -> LOADING -> FORMING -> READY <-> DEGRADED
 *                  ^          ^          |
 *                  |          |     a stage lost, FATAL, BYE, a step too late
 *                  |          |          v
 *                  +----------+------ RECOVERING          any -> DRAINING;  FAILED: a stage stays away
 *
 * Ready means: every stage formed this generation, every heartbeat is younger than lost_ms, and a step
 * (real or probe) came back within the last 15 s.  Leaving READY is the first thing a failure does.
 *
 * Pure logic on the loop thread: messages and time come in, commands go out through the port. */
#ifndef DS4_ROUTER_CLUSTER_H
#define DS4_ROUTER_CLUSTER_H

#include "common/err.h"
#include "proto/message.h"
#include "router/request.h"

#include <stdbool.h>
#include <stdint.h>

struct ds4_cluster;
struct ds4_sched;
struct ds4_metrics;

enum ds4_cluster_state {
    DS4_CLUSTER_STARTING, /* stages missing, none was ready before */
    DS4_CLUSTER_LOADING,  /* all said hello, weights are loading */
    DS4_CLUSTER_FORMING,
    DS4_CLUSTER_READY,
    DS4_CLUSTER_DEGRADED,
    DS4_CLUSTER_RECOVERING, /* was ready, a stage is lost or forming again */
    DS4_CLUSTER_DRAINING,
    DS4_CLUSTER_FAILED /* a stage has been away too long, or the plan does not fit */
};
#define DS4_N_CLUSTER_STATE 8
const char *ds4_cluster_state_text(enum ds4_cluster_state state);
const char *ds4_worker_state_text(enum ds4_worker_state state);

/* One process: a stage and the boot of it. */
struct ds4_peer {
    int32_t stage;
    uint8_t boot_id[DS4_ID_BYTES];
};

/* Commands; `to` and messages are borrowed for the call.  Those that return nothing may be lost: the
 * heartbeat rules make that good. */
struct ds4_cluster_port {
    void *owner;
    /* HELLO was accepted, or just "I am here": 0, or -1 if there is no connection to that boot. */
    int (*send_welcome)(void *owner, const struct ds4_peer *to);
    /* HELLO was not accepted, the worker must leave as misconfigured. */
    void (*send_refused)(void *owner, const struct ds4_peer *to, const char *why);
    void (*send_form)(void *owner, const struct ds4_peer *to, const struct ds4_form *form);
    void (*send_pipe_id)(void *owner, const struct ds4_peer *to, uint32_t generation,
                         const struct ds4_pipe_id *id);
    void (*send_abort)(void *owner, const struct ds4_peer *to, uint32_t generation);
    void (*send_stop)(void *owner, const struct ds4_peer *to, uint32_t generation);
    /* Leave as one that is to be started again. */
    void (*send_drain)(void *owner, const struct ds4_peer *to, uint32_t generation);
};

struct ds4_cluster_config {
    int32_t n_stage;     /* required */
    int32_t context_tok; /* model.context; 0 = what the workers allow */
    int32_t n_blocks;    /* kv.blocks; 0 = what the workers hold */
    int32_t lost_ms;     /* [3000] */
    int32_t ping_ms;  /* a worker is told so often that we are here; finds cut connections [250] */
    int32_t form_ms;  /* a formation may take so long [30000] */
    int32_t away_ms;  /* a stage gone for so long: FAILED [120000] */
    int32_t hold_ms;  /* what waits is kept so long for a cluster that is not up [20000] */
    int32_t fresh_ms; /* newest step must be younger [15000] */
    int32_t leave_ms; /* running requests get so long before a stage is restarted [30000] */
    uint32_t first_generation;   /* the first one is this + 1 */
    const char *generation_file; /* borrowed; keeps the newest one; NULL or "" = nowhere */
    struct ds4_metrics *metrics; /* borrowed; NULL = none */
};

/* `sched` is borrowed and must outlive the cluster; the cluster starts and stops it. */
struct ds4_cluster *ds4_cluster_new(const struct ds4_cluster_config *config,
                                    const struct ds4_cluster_port *port, struct ds4_sched *sched,
                                    struct ds4_err *err);
void ds4_cluster_free(struct ds4_cluster *cluster);

/* Messages from workers.  Bad content never stops the router: it is counted, logged and, where it
 * breaks the generation, ends that generation. */
void ds4_cluster_hello(struct ds4_cluster *cluster, const struct ds4_peer *from,
                       const struct ds4_hello *hello, int64_t now_ns);
void ds4_cluster_health(struct ds4_cluster *cluster, const struct ds4_peer *from,
                        const struct ds4_health *health, int64_t now_ns);
void ds4_cluster_formed(struct ds4_cluster *cluster, const struct ds4_peer *from,
                        uint32_t generation, int64_t now_ns);
void ds4_cluster_form_failed(struct ds4_cluster *cluster, const struct ds4_peer *from,
                             uint32_t generation, const char *message, int64_t now_ns);
/* Stage 0's offer of where to meet goes to all others of the formation; any other is dropped. */
void ds4_cluster_pipe_offer(struct ds4_cluster *cluster, const struct ds4_peer *from,
                            uint32_t generation, const struct ds4_pipe_id *id, int64_t now_ns);
void ds4_cluster_tokens(struct ds4_cluster *cluster, const struct ds4_peer *from,
                        const struct ds4_tokens_out *out, int64_t now_ns);
void ds4_cluster_step_done(struct ds4_cluster *cluster, const struct ds4_peer *from,
                           const struct ds4_step_done *done, int64_t now_ns);
void ds4_cluster_kv_done(struct ds4_cluster *cluster, const struct ds4_peer *from,
                         const struct ds4_kv_done *done, int64_t now_ns);
void ds4_cluster_fatal(struct ds4_cluster *cluster, const struct ds4_peer *from,
                       const struct ds4_fatal_report *report, int64_t now_ns);
void ds4_cluster_bye(struct ds4_cluster *cluster, const struct ds4_peer *from, int64_t now_ns);

/* Deadlines and heartbeats, formations, then ds4_sched_pump; once per turn of the loop and at least ten
 * times a second. */
void ds4_cluster_tick(struct ds4_cluster *cluster, int64_t now_ns);

/* Stop taking requests for good; running ones go on.  ds4_cluster_stop_workers tells the workers to
 * leave. */
void ds4_cluster_drain(struct ds4_cluster *cluster);
void ds4_cluster_stop_workers(struct ds4_cluster *cluster);
/* The same until it is taken back: an operator's drain.  -1 with DS4_E_UNAVAILABLE when the router is
 * stopping anyway. */
int ds4_cluster_rest(struct ds4_cluster *cluster, bool rest, int64_t now_ns,
                     struct ds4_err *err) DS4_MUST_CHECK;

/* Lets what runs finish (leave_ms at most; nothing is admitted meanwhile), then asks the stage to leave
 * as one that its supervisor starts again.  DS4_E_INVALID: no such stage; DS4_E_UNAVAILABLE: it is not
 * there, or another restart is under way. */
int ds4_cluster_restart_stage(struct ds4_cluster *cluster, int32_t stage, int64_t now_ns,
                              struct ds4_err *err) DS4_MUST_CHECK;
/* Ends the generation, if there is one, and forms another with the same workers. */
void ds4_cluster_restart(struct ds4_cluster *cluster, const struct ds4_err *why, int64_t now_ns);

/* What happened lately, for people; a copy of `text` is kept, bad = somebody may want to look.  Losses,
 * formations and restarts are noted by the cluster itself. */
void ds4_cluster_note(struct ds4_cluster *cluster, bool bad, const char *text, int64_t now_ns);
#define DS4_CLUSTER_EVENTS 16
struct ds4_cluster_event {
    int64_t at_ns;
    bool bad;
    char text[DS4_ERR_MSG_BYTES];
};
/* The i-th newest event, 0 the newest; NULL when there is none. */
const struct ds4_cluster_event *ds4_cluster_event(const struct ds4_cluster *cluster, int32_t i);

/* What the canary saw is part of health; `canary` is borrowed and must outlive the cluster. */
struct ds4_canary_status;
void ds4_cluster_watch_canary(struct ds4_cluster *cluster, const struct ds4_canary_status *canary);
/* Equal while weights, backends and devices of the stages are. */
uint64_t ds4_cluster_fingerprint(const struct ds4_cluster *cluster);

struct ds4_stage_view {
    int32_t stage;
    bool present;
    bool up;                  /* heartbeat younger than lost_ms */
    int64_t heartbeat_age_ms; /* -1 = never heard */
    struct ds4_hello hello;   /* zero when never heard */
    struct ds4_health health;
    uint32_t restarts;
};

#define DS4_MAX_REASONS  8
#define DS4_REASON_BYTES 128
struct ds4_cluster_view {
    enum ds4_cluster_state state;
    bool ready; /* READY or DEGRADED, and every rule above holds at this moment */
    uint32_t generation;
    int32_t n_stage;
    struct ds4_stage_view stage[DS4_MAX_STAGES];
    int64_t last_token_age_ms; /* -1 = none in this generation */
    int64_t canary_age_ms;     /* of its newest right answer; -1 = none yet */
    int32_t queue;
    int32_t context_tok;  /* of the generation; 0 = none formed yet */
    double load_fraction; /* 0..1 over all stages' weights */
    /* Why not ready, or why degraded; a refusal for `state` uses reason and retry_after_ms. */
    enum ds4_reason reason;
    int32_t retry_after_ms;
    int32_t n_reason;
    char reasons[DS4_MAX_REASONS][DS4_REASON_BYTES];
};
/* A copy of everything /health and /metrics show, true at now_ns.  No waiting, no allocation. */
void ds4_cluster_view(const struct ds4_cluster *cluster, int64_t now_ns,
                      struct ds4_cluster_view *view);
/* Sets the gauges that show the present: state, workers, queue, cache.  Call before rendering /metrics. */
void ds4_cluster_export(const struct ds4_cluster *cluster, int64_t now_ns);
/* The same truth as view.ready without the copy. */
bool ds4_cluster_is_ready(const struct ds4_cluster *cluster, int64_t now_ns);
uint32_t ds4_cluster_generation(const struct ds4_cluster *cluster);

#endif

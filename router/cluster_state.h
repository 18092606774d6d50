/* What cluster.c (messages, transitions) and cluster_view.c (what is shown of them) share. */
#ifndef DS4_ROUTER_CLUSTER_STATE_H
#define DS4_ROUTER_CLUSTER_STATE_H

#include "router/cluster.h"
#include "router/sched/point.h"

/* One stage's place in the table.  `present` from HELLO until it is lost; what it said last stays. */
struct ds4_worker {
    bool present;
    bool known; /* said hello at least once */
    bool formed;
    struct ds4_peer peer;
    struct ds4_hello hello;
    struct ds4_health health; /* of this boot; state STARTING until the first one */
    int64_t heard_ns;
    int64_t gone_ns;   /* since when it is absent */
    int32_t exit_code; /* of the boot before: from FATAL, 0 from BYE, -1 unknown */
    uint32_t restarts;
};

/* What the formation of workers is doing.
 *
 *   APART --all idle, plan good--> JOINING --all FORMED--> TOGETHER
 *     ^                              |                        |
 *     +------- failed, late ---------+------- lost -----------+ */
enum ds4_bond { DS4_BOND_APART, DS4_BOND_JOINING, DS4_BOND_TOGETHER };

struct ds4_cluster {
    struct ds4_cluster_config config;
    struct ds4_cluster_port port;
    struct ds4_sched *sched; /* borrowed */
    struct ds4_worker worker[DS4_MAX_STAGES];
    enum ds4_bond bond;
    struct ds4_form form; /* of the newest generation; host_bytes is each stage's own, in `host` */
    struct ds4_kv_host host;
    uint32_t generation;
    bool was_ready;                         /* a generation has run: its absence is a recovery */
    bool draining;                          /* the router stops */
    bool resting;                           /* an operator's drain */
    int32_t leaving;                        /* stage to be restarted once nothing runs, -1 none */
    int64_t leave_ns;                       /* but not later than this */
    const struct ds4_canary_status *canary; /* NULL = none */
    struct ds4_cluster_event event[DS4_CLUSTER_EVENTS];
    uint64_t n_event; /* ever; the newest is event[(n_event - 1) % DS4_CLUSTER_EVENTS] */
    char
        plan_problem[DS4_ERR_MSG_BYTES]; /* why these workers cannot work together; "" = they can */
    char last_problem[DS4_ERR_MSG_BYTES]; /* what ended the newest generation or formation */
    int64_t born_ns;
    int64_t apart_ns;     /* since when there is no generation */
    int64_t join_ns;      /* when the formation began */
    int64_t next_join_ns; /* not before */
    int64_t next_ping_ns;
    int32_t n_failed_joins; /* in a row */
};

/* Why a heartbeat, a step or a probe makes the cluster unfit although it is TOGETHER; false = fit. */
bool ds4_cluster_unfit(const struct ds4_cluster *cluster, int64_t now_ns, struct ds4_err *why);

#endif

/* The engine: turns the queue of requests and the workers' messages into steps (steps 4, 5, 12).
 *
 *   submit --> queue --admit--> sequences --batch--> step --port--> workers
 *                  (prefix, budget)            ^                       |
 *                                              +------ tokens ---------+
 *
 * Pure logic: no sockets, no clock of its own, no threads.  Time comes in as now_ns (monotonic).  Work
 * is done in ds4_sched_pump(), which the event loop calls once per turn, in ds4_sched_tokens() and in
 * ds4_sched_cancel(); only these call sinks.
 *
 * Invariants: at most `inflight` steps are posted and not acknowledged; a sequence has at most one
 * decode step beyond its newest known token; nothing a posted step refers to is freed before that step
 * is acknowledged; the ledger sums to n_blocks after every transition. */
#ifndef DS4_ROUTER_SCHED_SCHED_H
#define DS4_ROUTER_SCHED_SCHED_H

#include "common/err.h"
#include "proto/message.h"
#include "router/request.h"

#include <stdbool.h>
#include <stdint.h>

struct ds4_sched;
struct ds4_metrics;
struct ds4_kv_host; /* router/sched/point.h */

#define DS4_MAX_BOUNDARY_IDS 8

/* Settings; a value of 0 takes the default in brackets. */
struct ds4_sched_config {
    int32_t max_seqs;        /* running at once [8] */
    int32_t default_max_new; /* [16384] */
    int32_t queue_max;       /* requests waiting [64] */
    int32_t queue_ms;        /* longest wait [120000] */
    int32_t chunk_tok;       /* prompt tokens per step [512] */
    int32_t itl_ms;          /* aim for a step with decodes; 0 = none [0] */
    int32_t inflight;        /* steps posted at once [stages, at least 2] */
    int32_t overcommit;      /* cache blocks promised beyond those there are, in percent [0] */
    int32_t hot_window_tok;  /* a sequence can be cut back so far in place [120] */
    int32_t max_draft;     /* drafts per sequence and step, where the stages make some; 0 = none */
    int32_t vocab;         /* ids are 0 .. vocab - 1; required */
    int32_t step_ms;       /* a decode step may take so long [30000] */
    int32_t prefill_ms;    /* a step with prompt tokens [120000] */
    int32_t probe_ms;      /* idle so long: run a probe step [10000] */
    bool replay;           /* running requests survive a lost generation */
    int32_t n_boundary_id; /* a message begins with one of these ids: */
    int32_t boundary_id[DS4_MAX_BOUNDARY_IDS];
    struct ds4_metrics *metrics; /* borrowed; NULL = none */

    /* The disk tier: manifests here, parts at the stages.  0 bytes or NULL: none. */
    uint64_t disk_bytes;
    const char *disk_dir;         /* borrowed while ds4_sched_new runs */
    int32_t disk_ms;              /* a job of it that is silent for so long is late [30000] */
    bool disk_no_thread;          /* for tests: files are written in the caller's time */
    void (*disk_wake)(void *arg); /* called by the disk thread: pump soon; NULL = nobody */
    void *disk_wake_arg;
    int64_t unix_offset_ns; /* unix time less the time handed in */
};

/* Where steps go, and jobs of the disk tier (to all stages; NULL: there is none).  Messages are borrowed
 * for the call. */
struct ds4_sched_port {
    void *owner;
    int (*send_step)(void *owner, const struct ds4_step *step, struct ds4_err *err);
    int (*send_kv_write)(void *owner, const struct ds4_kv_write *write, struct ds4_err *err);
    int (*send_kv_read)(void *owner, const struct ds4_kv_read *read, struct ds4_err *err);
    int (*send_kv_unlink)(void *owner, const struct ds4_kv_unlink *unlink, struct ds4_err *err);
};

#define DS4_TROUBLE_BYTES 128

struct ds4_sched *ds4_sched_new(const struct ds4_sched_config *config,
                                const struct ds4_sched_port *port, struct ds4_err *err);
/* Requests still held end with DS4_REASON_DRAINING. */
void ds4_sched_free(struct ds4_sched *sched);

/* What a reload may change; requests that wait already keep their place.  All positive. */
void ds4_sched_set_limits(struct ds4_sched *sched, int32_t default_max_new, int32_t queue_max,
                          int32_t queue_ms);

/* What FORM says for the coming generation: max_seqs, max_draft (at most what it says already) and max_step_tok
 * from the settings. */
void ds4_sched_shape(const struct ds4_sched *sched, struct ds4_form *form);

/* A generation is formed: empty caches, full ledger, steps numbered from 0.  `host` is what the stages can
 * keep of restore points; NULL: none. */
int ds4_sched_start(struct ds4_sched *sched, const struct ds4_form *form,
                    const struct ds4_kv_host *host, int64_t now_ns,
                    struct ds4_err *err) DS4_MUST_CHECK;
/* The generation is lost: running requests end with *why and `reason`, or, with config.replay and
 * DS4_REASON_RESTARTED, wait to be computed again; the queue stays. */
void ds4_sched_stop(struct ds4_sched *sched, enum ds4_reason reason, const struct ds4_err *why,
                    int64_t now_ns);

/* Fails everything that waits (the cluster will not come back soon, or a shutdown). */
void ds4_sched_fail_queue(struct ds4_sched *sched, enum ds4_reason reason,
                          const struct ds4_err *why, int64_t now_ns);
/* Refuse new requests with DS4_REASON_DRAINING, or take them again; running and queued ones go on. */
void ds4_sched_drain(struct ds4_sched *sched, bool drained);
/* Held: nothing more is admitted, what waits goes on waiting, what runs finishes. */
void ds4_sched_hold(struct ds4_sched *sched, bool held);
/* Sequences with a request, the canary's included. */
int32_t ds4_sched_n_running(const struct ds4_sched *sched);

/* Runs an `internal` request on the slot that is kept for probes: no queue, no eviction, not counted,
 * and its rows are not kept.  On 0 like ds4_sched_submit.  DS4_E_BUSY: no place now; the next one that
 * becomes free is kept for the canary, so the caller only has to ask again. */
int ds4_sched_run_canary(struct ds4_sched *sched, struct ds4_request *req, int64_t now_ns,
                         struct ds4_err *err) DS4_MUST_CHECK;

/* Checks and queues.  On 0 the scheduler holds the request until `done`.  -1: refused, *reason (may be
 * NULL) says why and *retry_after_ms (may be NULL) when to come again:
 *   DS4_E_TOO_LONG      CONTEXT       prompt + 1 > context: "prompt has N tokens, context is M tokens"
 *   DS4_E_INVALID       KV_CAPACITY   more cache than there is in all, names need and total
 *   DS4_E_INVALID       INVALID       empty prompt, an id outside the vocabulary
 *   DS4_E_BUSY          QUEUE_FULL
 *   DS4_E_UNAVAILABLE   DRAINING
 *   DS4_E_UNAVAILABLE   POISONED      the prompt was there at two losses of a generation
 * Whether the cluster is ready is the caller's question (ds4_cluster_view); a request given while it
 * forms simply waits. */
int ds4_sched_submit(struct ds4_sched *sched, struct ds4_request *req, int64_t now_ns,
                     enum ds4_reason *reason, int32_t *retry_after_ms,
                     struct ds4_err *err) DS4_MUST_CHECK;

/* `done` is called with DS4_END_CANCELLED before this returns, or, when called from inside one of
 * the request's own callbacks, as soon as that callback has returned. */
void ds4_sched_cancel(struct ds4_sched *sched, struct ds4_request *req, enum ds4_cancel why,
                      int64_t now_ns);
/* A slow reader: a paused sequence keeps its lease but gets no further decode steps. */
void ds4_sched_pause(struct ds4_sched *sched, struct ds4_request *req, bool paused);

/* Deadlines, admission, posting; call once per turn of the event loop and at
 * least ten times a second. */
void ds4_sched_pump(struct ds4_sched *sched, int64_t now_ns);

/* TOKENS of the current generation.  -1 with DS4_E_PROTOCOL if it contradicts what was posted (wrong
 * step, entry, epoch, position): the caller ends the generation. */
int ds4_sched_tokens(struct ds4_sched *sched, const struct ds4_tokens_out *out, int64_t now_ns,
                     struct ds4_err *err) DS4_MUST_CHECK;

/* STEP_DONE of a stage other than the last: -1 with DS4_E_PROTOCOL if it stands elsewhere than others. */
int ds4_sched_step_done(struct ds4_sched *sched, int32_t stage, const struct ds4_step_done *done,
                        struct ds4_err *err) DS4_MUST_CHECK;

/* KV_DONE of a stage: -1 with DS4_E_PROTOCOL if nobody asked it. */
int ds4_sched_kv_done(struct ds4_sched *sched, int32_t stage, const struct ds4_kv_done *done,
                      int64_t now_ns, struct ds4_err *err) DS4_MUST_CHECK;
/* Before an end: conversations that are not on disk yet are saved now, as far as the pump is called until
 * nothing is left to save. */
void ds4_sched_save_all(struct ds4_sched *sched, int64_t now_ns);
bool ds4_sched_is_saving(const struct ds4_sched *sched);
/* How the disk tier is: off, opening, ready, stalled, lost, failing.  *trouble, if it is not NULL, is what to do something
 * about, in words; "" = nothing. */
const char *ds4_sched_disk_state(const struct ds4_sched *sched, char trouble[DS4_TROUBLE_BYTES]);
/* Ends the disk thread when it has done what it was asked for; nothing is kept on disk from then on. */
void ds4_sched_close_disk(struct ds4_sched *sched);

/* The oldest posted step is older than its limit: DS4_E_TIMEOUT naming step and age. */
int ds4_sched_check_step(const struct ds4_sched *sched, int64_t now_ns,
                         struct ds4_err *err) DS4_MUST_CHECK;

struct ds4_sched_stats {
    int32_t queued;
    int32_t prefilling;
    int32_t decoding;
    int32_t parked;      /* decoding, but paused for a slow reader */
    int32_t draining;    /* ended, waiting for their posted steps */
    int32_t idle;        /* finished sequences that have a slot still */
    int32_t points;      /* restore points */
    int64_t point_bytes; /* of the fullest stage */
    int64_t hbm_bytes;   /* rows in blocks that are not free, all stages; 0 without their sizes */
    int64_t host_bytes;  /* restore points and what is being read, all stages */
    int64_t index_tok;   /* tokens in the prefix index */
    int32_t commits;     /* on disk */
    uint64_t disk_bytes; /* of them, all stages */
    int32_t restoring;   /* requests that wait for the disk */
    int32_t inflight;
    int64_t steps_posted;
    int64_t steps_done;
    int64_t
        last_token_ns; /* newest acknowledged step (real or probe); 0 = none in this generation */
    int64_t oldest_queued_ns; /* 0 = none */
    int64_t at_work_ns;       /* time with a step under way, until now or work_began_ns if not 0 */
    int64_t work_began_ns;
    int32_t blocks_free, blocks_promised, blocks_live, blocks_cached, blocks_io, blocks_total;
    int32_t slots_free, slots_used;
    int32_t max_seqs;
    uint64_t generated_tok;
    uint64_t prompt_tok;
    uint64_t cached_tok;
    uint64_t prefilled_tok; /* prompt rows that came back */
};
void ds4_sched_stats(const struct ds4_sched *sched, struct ds4_sched_stats *stats);

#endif

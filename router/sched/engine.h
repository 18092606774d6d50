/* What the three parts of the engine share: sched.c (queue, admission, ends), step.c (posting and
 * acknowledging) and count.c (metrics).  Nobody else includes this. */
#ifndef DS4_ROUTER_SCHED_ENGINE_H
#define DS4_ROUTER_SCHED_ENGINE_H

#include "common/vec.h"
#include "router/sched/batch.h"
#include "router/sched/budget.h"
#include "router/sched/prefix.h"
#include "router/sched/sched.h"
#include "router/sched/seq.h"

#define DS4_MAX_INFLIGHT 64

struct ds4_posted_entry {
    struct ds4_seq *seq; /* alive as long as the entry is out: seq->n_flight > 0 */
    int32_t base_pos;
    int32_t n_tok;
    bool sample;
};

struct ds4_posted_step {
    int64_t step_no;
    int64_t posted_ns;
    bool prefill;
    int32_t n_entry;
    struct ds4_posted_entry *entry; /* [max_entry], owned */
};

struct ds4_sched_meters; /* count.c */

struct ds4_sched {
    struct ds4_sched_config config;
    struct ds4_sched_port port;
    struct ds4_sched_meters *meters; /* owned, NULL = none */
    bool started;
    bool drained; /* takes no new requests */
    bool failed;  /* `failure` says why no further step can be posted */
    struct ds4_err failure;
    struct ds4_form form; /* of the newest generation */

    /* Of one generation; all NULL or empty when not started. */
    struct ds4_budget *budget;
    struct ds4_prefix prefix;
    struct ds4_batch batch;
    struct ds4_seqs seqs; /* every sequence that is not only an idle prefix; owned, the probe too */
    struct ds4_seq *probe;                  /* in flight, else NULL */
    const struct ds4_kv_lease *probe_lease; /* held for the whole generation */
    bool *slot_open;                        /* [n_slots]: the stages hold rows for it */
    DS4_VEC(int32_t) close_slot;            /* to be closed by the next step */
    int32_t max_inflight;
    int32_t n_posted;
    int32_t first_posted; /* ring index of the oldest */
    struct ds4_posted_step posted[DS4_MAX_INFLIGHT];
    int64_t next_step;
    int64_t last_ack_ns;
    int64_t last_token_ns;

    /* The step under construction: arrays sized for the generation. */
    struct ds4_pick *pick;
    struct ds4_step_entry *entry;
    struct ds4_seq_open *open;
    int32_t *token;

    /* The queue, first come first served. */
    struct ds4_request *head, *tail;
    int32_t n_queued;

    uint64_t next_seq;
    int32_t n_running;        /* sequences with a request */
    int64_t done_interval_ns; /* smoothed time between two ends: what a place in the queue costs */
    int64_t last_done_ns;
    uint64_t generated_tok, prompt_tok, cached_tok;
};

/* Posts one step if there is one and room for it; true if it did. */
bool ds4_engine_post(struct ds4_sched *s, int64_t now_ns);

/* Ends the answer of a running sequence: `done` is called, the sequence drains. */
void ds4_engine_end(struct ds4_sched *s, struct ds4_seq *seq, enum ds4_end end,
                    enum ds4_reason reason, int32_t stop_id, int64_t now_ns,
                    const struct ds4_err *err);
/* The sequence has no posted entries left and its answer is over: keep it for its prefix or close. */
void ds4_engine_settle(struct ds4_sched *s, struct ds4_seq *seq, int64_t now_ns);
/* The slot's rows are to be dropped by the next step. */
void ds4_engine_close_slot(struct ds4_sched *s, int32_t slot);

/* Metrics; `meters` may be NULL in all of them. */
struct ds4_sched_meters *ds4_meters_new(struct ds4_metrics *metrics, struct ds4_err *err);
void ds4_meters_free(struct ds4_sched_meters *meters);
void ds4_meters_refused(struct ds4_sched_meters *meters, enum ds4_reason reason);
void ds4_meters_started(struct ds4_sched_meters *meters, const struct ds4_request *req);
void ds4_meters_admitted(struct ds4_sched_meters *meters, const struct ds4_request *req,
                         const struct ds4_prefix_hit *hit);
void ds4_meters_step(struct ds4_sched_meters *meters, int32_t n_decode, int32_t n_prefill_tok,
                     int32_t n_entry);
void ds4_meters_tokens(struct ds4_sched_meters *meters, int32_t n_token, int64_t gap_ns,
                       bool nonfinite);
void ds4_meters_evicted(struct ds4_sched_meters *meters, int32_t n_block);
void ds4_meters_done(struct ds4_sched_meters *meters, const struct ds4_request *req,
                     enum ds4_end end, enum ds4_request_state phase);

#endif

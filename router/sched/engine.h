/* What the parts of the engine share: sched.c (generations, requests, ends), queue.c, replay.c, admit.c, grow.c (who gives way), step.c (posting
 * and acknowledging), keep.c (what stays of a sequence), count.c (metrics).  Nobody else includes this. */
#ifndef DS4_ROUTER_SCHED_ENGINE_H
#define DS4_ROUTER_SCHED_ENGINE_H

#include "common/vec.h"
#include "router/sched/agree.h"
#include "router/sched/batch.h"
#include "router/sched/budget.h"
#include "router/sched/prefix.h"
#include "router/sched/sched.h"
#include "router/sched/seq.h"
#include "router/sched/tier.h"

#define DS4_MAX_INFLIGHT 64
#define DS4_N_ACCOUNT    256
#define DS4_N_SUSPECT    64
#define DS4_MAX_PARKS    256 /* of a step */

/* A prompt that was running when a generation was lost. */
struct ds4_suspect {
    uint64_t hash;
    int32_t n_crash;     /* 0 = nobody */
    uint32_t generation; /* the last one lost */
    int64_t last_ns;
};

struct ds4_posted_entry {
    struct ds4_pick pick; /* its sequence is alive as long as the entry is out: n_flight > 0 */
    bool stale;           /* a splice has overtaken it: its tokens belong to nobody */
};

struct ds4_posted_step {
    int64_t step_no;
    int64_t posted_ns;
    int32_t n_decode; /* entries that decode, with drafts or without */
    int32_t n_prompt_row;
    int32_t n_row;
    int32_t n_entry;
    struct ds4_posted_entry *entry; /* [max_entry], owned */
};

struct ds4_sched {
    struct ds4_sched_config config;
    struct ds4_sched_port port;
    bool started;
    bool drained; /* takes no new requests */
    bool held;    /* admits none */
    bool failed;  /* `failure` says why no further step can be posted */
    struct ds4_err failure;
    struct ds4_form form; /* of the newest generation */

    /* Of one generation; all NULL or empty when not started. */
    struct ds4_budget *budget;
    struct ds4_prefix prefix;
    struct ds4_points points;
    struct ds4_batch batch;
    struct ds4_agree agree;
    struct ds4_tier tier; /* the disk; outlives a generation */
    struct ds4_seqs seqs; /* every sequence that is not only an idle prefix; owned, the probe too */
    struct ds4_seq *probe;                  /* probe or canary in flight, else NULL */
    const struct ds4_kv_lease *probe_lease; /* held for the whole generation */
    bool canary_due;                        /* the next free place is for the canary */
    bool *slot_open;                        /* [n_slots]: the stages hold rows for it */
    struct ds4_seq **of_slot; /* [n_slots]: the sequence that has the slot's lease, or NULL */
    DS4_VEC(struct ds4_save)
    park;                        /* slots that kept their rings: the next step takes their blocks */
    DS4_VEC(int32_t) close_slot; /* to be closed by the next step */
    int32_t max_inflight;
    int32_t max_inner; /* points inside of the entries of a step, */
    int32_t n_inner;   /* and those of the one under construction */
    int32_t n_posted;
    int32_t first_posted; /* ring index of the oldest */
    struct ds4_posted_step posted[DS4_MAX_INFLIGHT];
    int64_t next_step;
    int64_t last_ack_ns;
    int64_t at_work_ns;    /* time with a step under way, over all generations, up to ... */
    int64_t work_began_ns; /* ... this moment; 0 = none is */
    int64_t last_token_ns;

    /* The step under construction: arrays sized for the generation. */
    struct ds4_pick *pick;
    struct ds4_step_entry *entry;
    struct ds4_seq_open *open;
    struct ds4_kv_op *op; /* [DS4_MAX_STEP_OPS] */
    int32_t *token;
    int32_t *shared; /* [blocks of the context]: of the prompt that is being admitted */

    /* The queue, in order of arrival (queue.c). */
    struct ds4_request *head, *tail;
    int32_t n_queued;
    bool head_waits; /* the next one could not be admitted and nothing has changed since */
    struct ds4_request *short_of; /* was refused for memory last, with these words */
    struct ds4_err shortage;
    int64_t spent_tok[DS4_N_ACCOUNT]; /* per tenant */
    int64_t spent_floor;              /* account of the newest admitted one */

    struct ds4_suspect suspect[DS4_N_SUSPECT];

    uint64_t next_seq;
    int32_t n_running;        /* sequences with a request */
    double row_ns;            /* smoothed cost of a prompt row beside decodes */
    double decode_ns;         /* and of a step without any */
    int64_t done_interval_ns; /* smoothed time between two ends: what a place in the queue costs */
    int64_t last_done_ns;
    uint64_t generated_tok, prompt_tok, cached_tok, prefilled_tok;
};

/* Posts one step if there is one and room for it; true if it did. */
bool ds4_engine_post(struct ds4_sched *s, int64_t now_ns);

/* Ends the answer of a running sequence: `done` is called, the sequence drains. */
void ds4_engine_end(struct ds4_sched *s, struct ds4_seq *seq, enum ds4_end end,
                    enum ds4_reason reason, int32_t stop_id, int64_t now_ns,
                    const struct ds4_err *err);
/* Replaces the newest n_drop known tokens of a running sequence by others and computes on from there:
 * what is in flight for it becomes stale.  False if no position is left for it. */
bool ds4_engine_splice(struct ds4_sched *s, struct ds4_seq *seq, int32_t n_drop,
                       const int32_t *token, int32_t n, struct ds4_err *err);
/* The sequence has no posted entries left and its answer is over: keep it for its prefix or close. */
void ds4_engine_settle(struct ds4_sched *s, struct ds4_seq *seq, int64_t now_ns);
/* The lease is the sequence's from now on. */
void ds4_engine_seat(struct ds4_sched *s, struct ds4_seq *seq, const struct ds4_kv_lease *lease);
/* Frees a sequence whose lease is gone. */
void ds4_engine_forget_seq(struct ds4_sched *s, struct ds4_seq *seq);
/* The next step closes or opens the slot, which takes its blocks anyhow. */
void ds4_engine_unpark(struct ds4_sched *s, int32_t slot);
/* The slot's rows are to be dropped by the next step. */
void ds4_engine_close_slot(struct ds4_sched *s, int32_t slot);

/* The request's last moments: flush, count, `done`.  It is gone afterwards. */
void ds4_engine_finish(struct ds4_sched *s, struct ds4_request *req, enum ds4_end end,
                       enum ds4_reason reason, int32_t stop_id, int64_t now_ns,
                       const struct ds4_err *err);
/* Those in the queue that wait for a place; who could have one, and waits for rows that are being made or gave
 * way, is not counted. */
int32_t ds4_engine_n_waiting(const struct ds4_sched *s, int64_t now_ns);
/* May it wait for rows that another one's prompt makes?  Not for longer than half of the time it has: that
 * prompt may be very long. */
bool ds4_engine_may_follow(const struct ds4_sched *s, const struct ds4_request *req,
                           int64_t now_ns);
/* Into the queue, out of it, and whose turn it is: NULL if nobody waits, or all for what others compute. */
void ds4_engine_queue(struct ds4_sched *s, struct ds4_request *req, int64_t now_ns);
void ds4_engine_unlink(struct ds4_sched *s, struct ds4_request *req);
struct ds4_request *ds4_engine_next(struct ds4_sched *s, int64_t now_ns);
/* The same, before all others: it was admitted already and lost its place through no fault of its own. */
void ds4_engine_queue_first(struct ds4_sched *s, struct ds4_request *req);
/* It is admitted: out of the queue, and its tenant pays the prompt tokens that are to be computed. */
void ds4_engine_take(struct ds4_sched *s, struct ds4_request *req, int32_t n_tok);
void ds4_engine_charge(struct ds4_sched *s, const struct ds4_request *req, int64_t n_tok);
/* The generation of this running sequence is lost: its request ends or is to be computed again. */
void ds4_engine_lose(struct ds4_sched *s, struct ds4_seq *seq, enum ds4_reason reason,
                     const struct ds4_err *why, int64_t now_ns);
/* -1: the prompt is refused for now, *wait_ms says for how long. */
int ds4_engine_check_poison(struct ds4_sched *s, const struct ds4_request *req, int64_t now_ns,
                            int32_t *wait_ms, struct ds4_err *err) DS4_MUST_CHECK;
/* Ends those that have waited too long. */
void ds4_engine_expire(struct ds4_sched *s, int64_t now_ns);
/* Fits the request into the context and the cache of the newest generation.  Idempotent; called at
 * submit, and again at admission because another generation may be smaller. */
int ds4_engine_fit(const struct ds4_sched *s, struct ds4_request *req, enum ds4_reason *reason,
                   struct ds4_err *err) DS4_MUST_CHECK;
/* Positions the request may come to use: prompt, answer, and what splices add, where context and cache
 * have room for them. */
int32_t ds4_engine_cap(const struct ds4_sched *s, const struct ds4_request *req);
/* Admits the next of the queue (or ends it for good); false if it has to wait. */
bool ds4_engine_admit(struct ds4_sched *s, int64_t now_ns);

/* It has what it goes on from: its usage, the metrics, its client are told.  May cancel it. */
void ds4_engine_admitted(struct ds4_sched *s, struct ds4_request *req,
                         const struct ds4_prefix_hit *hit, int64_t now_ns);

/* An operation of the step under construction. */
struct ds4_kv_op *ds4_engine_add_op(struct ds4_sched *s, struct ds4_step *step,
                                    enum ds4_kv_op_kind kind);

/* The posted entry's rows will pass places worth keeping: wants points of them. */
void ds4_engine_mark_points(struct ds4_sched *s, struct ds4_seq *seq, const struct ds4_pick *pick);
/* Rows of the sequence are acknowledged: what is full goes into the index, so that others can start
 * from it while this one runs. */
void ds4_engine_index(struct ds4_sched *s, struct ds4_seq *seq, int64_t now_ns);
/* Points that wait for their step, of sequences whose n_pick picks would leave them outside of the rings,
 * are not saved at all. */
void ds4_engine_drop_overtaken(struct ds4_sched *s, int32_t n_pick);
/* Where the prompt's messages begin, as marks of the sequence. */
void ds4_engine_find_marks(struct ds4_sched *s, struct ds4_seq *seq);
/* Points behind `keep` are of tokens that were taken back. */
void ds4_engine_cut_points(struct ds4_sched *s, struct ds4_seq *seq, int32_t keep);
/* The slot of a finished sequence is given up; its rows stay. */
void ds4_engine_drop_hot(struct ds4_sched *s, int32_t index);
/* Takes a victim of the index out, and the slots whose state hangs on it. */
void ds4_engine_evict(struct ds4_sched *s, struct ds4_prefix_node *victim);
/* Blocks for what the first n picks write (grow.c).  Where the cache was promised twice and runs out, the
 * newest sequence is put back into the queue with its tokens; returns how many picks are left. */
int32_t ds4_engine_grow(struct ds4_sched *s, int32_t n, int64_t now_ns);
/* Room for what `hit` leaves to be had, by eviction if needed.  -1 with DS4_E_BUSY: not now, and nothing was
 * touched.  Evicting may move hit->hot. */
int ds4_engine_make_room(struct ds4_sched *s, const struct ds4_kv_ask *ask, uint64_t affinity,
                         struct ds4_prefix_hit *hit, struct ds4_err *err) DS4_MUST_CHECK;

/* Metrics of the request path; a registry of NULL forgets them. */
void ds4_count_refused(struct ds4_metrics *m, enum ds4_api api, enum ds4_reason reason);
void ds4_count_started(struct ds4_metrics *m, const struct ds4_request *req);
void ds4_count_admitted(struct ds4_metrics *m, const struct ds4_request *req,
                        const struct ds4_prefix_hit *hit);
/* Of n_row rows that were run, n_prompt_row are prompts'. */
void ds4_count_step(struct ds4_metrics *m, int32_t n_entry, int32_t n_prompt_row, int32_t n_row,
                    int64_t took_ns);
/* What became of the drafts of an entry; the last of n_stage stages made and ran them. */
void ds4_count_drafts(struct ds4_metrics *m, int32_t n_stage, const struct ds4_token_entry *entry);
/* A sequence stands so near its end that there is no room for drafts. */
void ds4_count_no_room(struct ds4_metrics *m);
void ds4_count_trip(struct ds4_metrics *m, const struct ds4_request *req,
                    const struct ds4_accept *accept);
void ds4_count_burst(struct ds4_metrics *m, int32_t n_token, int64_t gap_ns);
/* A running sequence lost its place on the stages: "slow_client" (paused), "restart". */
void ds4_count_preempted(struct ds4_metrics *m, const char *reason);
/* One waits for a client that does not read, or gave way ("capacity"); counted as preempted too. */
void ds4_count_parked(struct ds4_metrics *m, const char *reason);
/* Invariant `id` of kv-cache.md 2.5 does not hold. */
void ds4_count_broken(struct ds4_metrics *m, const char *id);
void ds4_count_done(struct ds4_metrics *m, const struct ds4_request *req, enum ds4_end end,
                    enum ds4_reason reason, enum ds4_request_state phase);

#endif

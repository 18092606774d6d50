/* A scheduler on a scripted stage with fake time, and clients that remember what they were told. */
#ifndef DS4_TESTS_SUPPORT_SCHED_RIG_H
#define DS4_TESTS_SUPPORT_SCHED_RIG_H

#include "common/vec.h"
#include "router/request.h"
#include "router/sched/point.h"
#include "router/sched/sched.h"
#include "tests/support/scripted_stage.h"

#define DS4_RIG_VOCAB       64
#define DS4_RIG_STOP_ID     5
#define DS4_RIG_BLOCK_BYTES 2048 /* 8 a row, as the scripted disk writes them */

struct ds4_rig_client {
    struct ds4_rig *rig;
    struct ds4_request *req; /* NULL after done */
    DS4_VEC(int32_t) prompt;
    DS4_VEC(int32_t) out; /* tokens */
    int32_t n_admitted, cached;
    int32_t n_progress, progress;
    int32_t n_done;
    struct ds4_request_result result;
    int32_t cancel_after; /* > 0: cancels itself from inside the callback of that token */
    struct ds4_rig_client *cancel_other; /* at the first token: cancels that one */
};

struct ds4_rig {
    struct ds4_sched *sched;
    struct ds4_scripted_stage stage;
    struct ds4_form form;
    struct ds4_kv_host host;
    int64_t now_ns;
};

struct ds4_rig_shape {
    int32_t n_stage, n_blocks, n_slots, context_tok;
    int32_t
        n_points; /* anchors the stages have host memory for; a tail weighs as much as up to three */
    int32_t replay_tok;             /* as of struct ds4_kv_host */
    int32_t max_draft;              /* drafts per sequence and step */
    struct ds4_scripted_disk *disk; /* borrowed; NULL: none */
    struct ds4_sched_config config; /* vocab is filled in */
};

/* Aborts the program when memory is out: a test cannot go on then. */
void ds4_rig_open(struct ds4_rig *rig, const struct ds4_rig_shape *shape);
void ds4_rig_close(struct ds4_rig *rig);
/* The next generation on the same scheduler. */
void ds4_rig_start(struct ds4_rig *rig);

/* A client with a prompt of n tokens derived from `seed`: equal seeds have equal prefixes. */
struct ds4_rig_client *ds4_rig_client(struct ds4_rig *rig, uint32_t seed, int32_t n,
                                      int32_t max_new);
/* The same with given tokens. */
struct ds4_rig_client *ds4_rig_client_of(struct ds4_rig *rig, const int32_t *prompt, int32_t n,
                                         int32_t max_new);
int ds4_rig_submit(struct ds4_rig_client *client, enum ds4_reason *reason, struct ds4_err *err);
void ds4_rig_client_free(struct ds4_rig_client *client);

/* Answers of the disk tier that are due. */
void ds4_rig_disk(struct ds4_rig *rig);
/* pump, then one answer; false when nothing was posted.  1 ms passes. */
bool ds4_rig_turn(struct ds4_rig *rig);
/* Turns until nothing is queued, running or draining. */
void ds4_rig_run(struct ds4_rig *rig);

/* What a lone run must give: tokens up to and including a stop id, at most max_new. */
bool ds4_rig_is_right(const struct ds4_rig_client *client, int32_t max_new);

#endif

/* What every endpoint needs to know: the running router, borrowed by the handlers. */
#ifndef DS4_ROUTER_API_CONTEXT_H
#define DS4_ROUTER_API_CONTEXT_H

#include "common/config.h"
#include "common/model.h"

#include <stdbool.h>
#include <stdint.h>

struct uv_loop_s;
struct ds4_cluster;
struct ds4_sched;
struct ds4_metrics;
struct ds4_vocab;
struct ds4_bpe;
struct ds4_recovery;
struct ds4_tool_memory;
struct ds4_turn_memory;

struct ds4_stats;
struct ds4_answer;
struct ds4_text_store;

/* The answers that run; see ds4_answer_find. */
struct ds4_live_answers {
    struct ds4_answer *first;
};

struct ds4_api_context {
    struct uv_loop_s *loop;
    const struct ds4_config *config;
    const struct ds4_model_shape *shape;
    const struct ds4_vocab *vocab;
    struct ds4_bpe *bpe;                 /* the loop thread's encoder */
    struct ds4_tool_memory *tool_memory; /* NULL = off */
    struct ds4_turn_memory *turn_memory; /* NULL = off */
    const struct ds4_recovery *recovery; /* from repetition */
    struct ds4_cluster *cluster;
    struct ds4_sched *sched;
    struct ds4_metrics *metrics;
    const struct ds4_stats *stats;
    struct ds4_live_answers *live;
    struct ds4_text_store *responses; /* id -> what /v1/responses keeps */
    struct ds4_text_store *reasoning; /* opaque token -> reasoning that a client carries */
    enum ds4_release release;
    char model_name[128]; /* the served name */
    char fingerprint[64]; /* system_fingerprint: build and weights */
    int64_t started_unix_s;
};

#endif

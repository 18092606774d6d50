/* The registry's inside; only metrics.c (observing) and metrics_text.c (rendering) read it. */
#ifndef DS4_COMMON_METRICS_FAMILY_H
#define DS4_COMMON_METRICS_FAMILY_H

#include "common/metrics.h"
#include "common/vec.h"

#include <stdatomic.h>

enum ds4_metric_type {
    DS4_METRIC_COUNTER,
    DS4_METRIC_GAUGE,
    DS4_METRIC_HISTOGRAM,
    DS4_METRIC_INFO,
};

enum ds4_bucket_list {
    DS4_BUCKETS_NONE,
    DS4_BUCKETS_LATENCY,
    DS4_BUCKETS_INTER_TOKEN,
    DS4_BUCKETS_ACCEPT,
    DS4_BUCKETS_STEP,
    DS4_BUCKETS_TOKENS,
    /* vLLM's own lists: recording rules and boards made for it name them. */
    DS4_BUCKETS_VLLM_TTFT,
    DS4_BUCKETS_VLLM_TOKEN,
    DS4_BUCKETS_VLLM_REQUEST,
    DS4_BUCKETS_VLLM_LENGTH,
    DS4_BUCKETS_VLLM_N,
    DS4_BUCKETS_VLLM_STEP,
    DS4_BUCKETS_EXTRA, /* tokens, 0 a bucket of its own */
};

#define DS4_MAX_BUCKETS 24

struct ds4_buckets {
    double le[DS4_MAX_BUCKETS]; /* rising upper bounds, without +Inf */
    size_t n;
};
extern const struct ds4_buckets ds4_metric_buckets[];

struct ds4_label {
    const char *name;
    DS4_VEC(const char *) values;
};

struct ds4_family {
    const char *name, *help;
    enum ds4_metric_type type;
    const struct ds4_buckets *buckets;
    char *label_text; /* owns the texts of labels */
    struct ds4_label labels[DS4_METRIC_MAX_LABELS];
    size_t n_labels;
    size_t n_series;
    size_t first_slot, n_slots; /* n_slots per series; a histogram's are buckets, sum, count */
    _Atomic bool *touched;      /* [n_series]: to be shown */
};

struct ds4_info {
    enum ds4_metric id;
    int32_t stage; /* -1: none */
    char *labels;  /* name="value",..., escaped */
};

struct ds4_metrics {
    char *model;
    bool aliases; /* families named vllm:... are shown */
    struct ds4_family families[DS4_N_METRICS];
    _Atomic double *slots;
    DS4_VEC(struct ds4_info) infos;
};

#endif

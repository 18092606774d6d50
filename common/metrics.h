/* Counters, gauges and histograms with closed label sets, and their Prometheus text.
 *
 * The registry is fixed (common/metrics_table.h): every series has its place from the start, an
 * observation allocates nothing and takes no lock, and the number of series is bounded whatever
 * clients send.  Counters with few series are shown from the start at 0, so that the first event is a
 * rise; other series appear when first touched.
 *
 *   ds4_metric_add(m, DS4_M_FINISH, 1, "chat", "stop");
 *   ds4_metric_observe(m, DS4_M_QUEUE_SECONDS, 0.25, "chat");
 *
 * Label values are given as texts in the order of the table, all of them.  Any thread may observe;
 * a registry of NULL takes observations and forgets them (tests, tools). */
#ifndef DS4_COMMON_METRICS_H
#define DS4_COMMON_METRICS_H

#include "common/buf.h"
#include "common/err.h"
#include "common/metrics_table.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DS4_METRIC_MAX_LABELS 3
#define DS4_METRIC_MAX_STAGES 64

enum ds4_metric {
#define DS4_METRIC_ENUM(id, name, type, buckets, labels, help) DS4_M_##id,
    DS4_METRICS(DS4_METRIC_ENUM)
#undef DS4_METRIC_ENUM
        DS4_N_METRICS
};

struct ds4_metrics;

/* `model` becomes the label model="..." of every series; copied. */
struct ds4_metrics *ds4_metrics_new(const char *model, struct ds4_err *err) DS4_MUST_CHECK;
void ds4_metrics_free(struct ds4_metrics *m);

/* Whether the families that repeat what vLLM calls so (vllm:..., with its labels and buckets) are shown;
 * they are at first. */
void ds4_metrics_show_aliases(struct ds4_metrics *m, bool show);

#define ds4_metric_labels(...) ((const char *const[DS4_METRIC_MAX_LABELS + 1]){__VA_ARGS__})

/* Counter or gauge: += value. */
#define ds4_metric_add(m, id, value, ...)                                                          \
    ds4_metric_add_at((m), (id), (value), ds4_metric_labels(__VA_ARGS__))
/* Gauge, or a counter that somebody else counts (a worker's heartbeat): = value. */
#define ds4_metric_set(m, id, value, ...)                                                          \
    ds4_metric_set_at((m), (id), (value), ds4_metric_labels(__VA_ARGS__))
/* Histogram. */
#define ds4_metric_observe(m, id, value, ...)                                                      \
    ds4_metric_observe_at((m), (id), (value), ds4_metric_labels(__VA_ARGS__))
/* A histogram that somebody else fills (a worker's heartbeat): all its buckets (that of +Inf last), not
 * cumulative, and the sum.  n is that of the metric's bucket list plus one; anything else is ignored. */
void ds4_metric_set_histogram(struct ds4_metrics *m, enum ds4_metric id, const uint64_t *bucket,
                              size_t n, double sum, const char *const *labels);
/* Where a step's time belongs in such an array of DS4_METRIC_STEP_BUCKETS. */
#define DS4_METRIC_STEP_BUCKETS 20
size_t ds4_metric_step_bucket(double seconds);
/* A gauge whose last label is a state: 1 for the named value, 0 for its siblings. */
#define ds4_metric_choose(m, id, ...)                                                              \
    ds4_metric_choose_at((m), (id), ds4_metric_labels(__VA_ARGS__))
/* Hides one series until it is touched again: a gauge nobody can vouch for. */
#define ds4_metric_hide(m, id, ...) ds4_metric_hide_at((m), (id), ds4_metric_labels(__VA_ARGS__))

void ds4_metric_add_at(struct ds4_metrics *m, enum ds4_metric id, double value,
                       const char *const *labels);
void ds4_metric_set_at(struct ds4_metrics *m, enum ds4_metric id, double value,
                       const char *const *labels);
void ds4_metric_observe_at(struct ds4_metrics *m, enum ds4_metric id, double value,
                           const char *const *labels);
void ds4_metric_choose_at(struct ds4_metrics *m, enum ds4_metric id, const char *const *labels);
void ds4_metric_hide_at(struct ds4_metrics *m, enum ds4_metric id, const char *const *labels);

/* The series' value (a histogram's count); 0 if untouched or unknown. */
double ds4_metric_value(const struct ds4_metrics *m, enum ds4_metric id, const char *const *labels);

/* The sum over all series of a counter or gauge. */
double ds4_metric_sum(const struct ds4_metrics *m, enum ds4_metric id);

/* "0".."63" for a stage number; "" outside, which is no label value. */
const char *ds4_metric_stage(int32_t stage);

/* An _info metric: free label texts, value 1.  `stage` < 0 for one without the stage label.  Copied;
 * later calls replace it; only the thread that renders may call. */
struct ds4_metric_pair {
    const char *name;
    const char *value;
};
int ds4_metrics_set_info(struct ds4_metrics *m, enum ds4_metric id, int32_t stage,
                         const struct ds4_metric_pair *pairs, size_t n_pairs,
                         struct ds4_err *err) DS4_MUST_CHECK;

/* Reads CPU time, memory and descriptors of this process into process_*. */
void ds4_metrics_read_process(struct ds4_metrics *m);

enum ds4_metrics_format {
    DS4_METRICS_PROMETHEUS,  /* text/plain; version=0.0.4; charset=utf-8 */
    DS4_METRICS_OPENMETRICS, /* application/openmetrics-text; version=1.0.0; charset=utf-8 */
};
/* Appends the exposition.  0, or -1 when out is full. */
int ds4_metrics_render(const struct ds4_metrics *m, enum ds4_metrics_format format,
                       struct ds4_buf *out);

#endif

/* The registry as Prometheus text 0.0.4 or OpenMetrics 1.0.
 *
 * Families come in the order of the table, HELP and TYPE once each, families without a series to show
 * are left out.  The two formats differ in the family name of counters (OpenMetrics drops _total) and
 * in the closing # EOF. */
#include "common/json_write.h"
#include "common/metrics_family.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define DS4_METRIC_INFO_BYTES ((size_t)4096)
#define DS4_EXACT_INTEGER     0x1p53 /* integers below are exact in a double */

/* Most values are counts: this is a tenth of what printf takes, and a scrape holds up the loop. */
static void append_integer(struct ds4_buf *out, int64_t value)
{
    char text[24];
    size_t at = sizeof(text);
    uint64_t left = value < 0 ? (uint64_t)-value : (uint64_t)value;

    do
        text[--at] = (char)('0' + left % 10);
    while ((left /= 10) > 0);
    if (value < 0)
        text[--at] = '-';
    (void)ds4_buf_append(out, text + at, sizeof(text) - at);
}

static void append_value(struct ds4_buf *out, double value)
{
    if (value == floor(value) && fabs(value) < DS4_EXACT_INTEGER)
        append_integer(out, (int64_t)value);
    else if (isfinite(value))
        (void)ds4_jw_append_double(out, value);
    else
        (void)ds4_buf_append_text(out, isnan(value) ? "NaN" : value > 0 ? "+Inf" : "-Inf");
}

/* Backslash, quote and newline are escaped; nothing else may be. */
static void append_label_text(struct ds4_buf *out, const char *text)
{
    for (;;) {
        size_t plain = strcspn(text, "\n\\\"");

        (void)ds4_buf_append(out, text, plain);
        text += plain;
        if (*text == '\0')
            return;
        (void)ds4_buf_append_byte(out, '\\');
        (void)ds4_buf_append_byte(out, *text == '\n' ? 'n' : *text);
        text++;
    }
}

static void append_label(struct ds4_buf *out, const char *name, const char *value)
{
    (void)ds4_buf_append_text(out, name);
    (void)ds4_buf_append_text(out, "=\"");
    append_label_text(out, value);
    (void)ds4_buf_append_byte(out, '"');
}

int ds4_metrics_set_info(struct ds4_metrics *m, enum ds4_metric id, int32_t stage,
                         const struct ds4_metric_pair *pairs, size_t n_pairs, struct ds4_err *err)
{
    struct ds4_info info = {.id = id, .stage = stage};
    struct ds4_buf labels;
    size_t i = 0;

    if (m == NULL)
        return 0;
    ds4_buf_init(&labels, DS4_METRIC_INFO_BYTES);
    for (size_t p = 0; p < n_pairs; p++) {
        (void)ds4_buf_append_text(&labels, p == 0 ? "" : ",");
        append_label(&labels, pairs[p].name, pairs[p].value);
    }
    info.labels = ds4_buf_take(&labels, NULL);
    ds4_buf_deinit(&labels);
    if (info.labels == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for the labels of a metric");
    while (i < m->infos.len && (m->infos.ptr[i].id != id || m->infos.ptr[i].stage != stage))
        i++;
    if (i < m->infos.len) {
        free(m->infos.ptr[i].labels);
        m->infos.ptr[i] = info;
        return 0;
    }
    if (DS4_VEC_PUSH(&m->infos, info) != 0) {
        free(info.labels);
        return ds4_fail(err, DS4_E_NOMEM, "no memory for a metric");
    }
    return 0;
}

static bool is_alias(const char *name)
{
    return strncmp(name, "vllm:", 5) == 0;
}

static void append_model(const struct ds4_metrics *m, const char *name, struct ds4_buf *out)
{
    if (is_alias(name))
        (void)ds4_buf_append_text(out, "engine=\"0\",");
    append_label(out, is_alias(name) ? "model_name" : "model", m->model);
}

/* name{model="...",labels...,le="..."} value */
static void append_series(const struct ds4_metrics *m, const struct ds4_family *family,
                          size_t series, const char *suffix, const double *le, double value,
                          struct ds4_buf *out)
{
    size_t radix = family->n_series;

    (void)ds4_buf_append_text(out, family->name);
    (void)ds4_buf_append_text(out, suffix);
    (void)ds4_buf_append_byte(out, '{');
    append_model(m, family->name, out);
    for (size_t k = 0; k < family->n_labels; k++) {
        radix /= family->labels[k].values.len;
        (void)ds4_buf_append_byte(out, ',');
        append_label(out, family->labels[k].name,
                     family->labels[k].values.ptr[series / radix % family->labels[k].values.len]);
    }
    if (le != NULL) {
        (void)ds4_buf_append_text(out, ",le=\"");
        append_value(out, *le);
        (void)ds4_buf_append_byte(out, '"');
    }
    (void)ds4_buf_append_text(out, "} ");
    append_value(out, value);
    (void)ds4_buf_append_byte(out, '\n');
}

static double read_slot(const struct ds4_metrics *m, size_t slot)
{
    return atomic_load_explicit(&m->slots[slot], memory_order_relaxed);
}

static void append_histogram(const struct ds4_metrics *m, const struct ds4_family *family,
                             size_t series, struct ds4_buf *out)
{
    size_t slot = family->first_slot + series * family->n_slots;
    size_t n = family->buckets->n;
    double total = 0, infinite = INFINITY;
    double count = read_slot(m, slot + n + 1);

    for (size_t b = 0; b < n; b++) {
        total += read_slot(m, slot + b);
        append_series(m, family, series, "_bucket", &family->buckets->le[b],
                      total < count ? total : count, out);
    }
    append_series(m, family, series, "_bucket", &infinite, count, out);
    append_series(m, family, series, "_sum", NULL, read_slot(m, slot + n), out);
    append_series(m, family, series, "_count", NULL, count, out);
}

static void append_infos(const struct ds4_metrics *m, enum ds4_metric id, struct ds4_buf *out)
{
    const struct ds4_info *info;

    for (size_t i = 0; i < m->infos.len; i++) {
        info = &m->infos.ptr[i];
        if (info->id != id)
            continue;
        (void)ds4_buf_appendf(out, "%s{", m->families[id].name);
        append_model(m, m->families[id].name, out);
        if (info->stage >= 0)
            (void)ds4_buf_appendf(out, ",stage=\"%d\"", info->stage);
        (void)ds4_buf_appendf(out, "%s%s} 1\n", info->labels[0] == '\0' ? "" : ",", info->labels);
    }
}

static void append_head(const struct ds4_family *family, enum ds4_metrics_format format,
                        struct ds4_buf *out)
{
    static const char *const types[] = {
        [DS4_METRIC_COUNTER] = "counter",
        [DS4_METRIC_GAUGE] = "gauge",
        [DS4_METRIC_HISTOGRAM] = "histogram",
        [DS4_METRIC_INFO] = "gauge",
    };
    struct ds4_str name = ds4_str_view(family->name);

    if (format == DS4_METRICS_OPENMETRICS && family->type == DS4_METRIC_COUNTER)
        name.len -= strlen("_total");
    (void)ds4_buf_appendf(out, "# HELP %.*s %s\n# TYPE %.*s %s\n", DS4_STR_ARG(name), family->help,
                          DS4_STR_ARG(name), types[family->type]);
}

static bool has_info(const struct ds4_metrics *m, enum ds4_metric id)
{
    for (size_t i = 0; i < m->infos.len; i++) {
        if (m->infos.ptr[i].id == id)
            return true;
    }
    return false;
}

static void append_family(const struct ds4_metrics *m, enum ds4_metric id,
                          enum ds4_metrics_format format, struct ds4_buf *out)
{
    const struct ds4_family *family = &m->families[id];
    bool has_head = false;

    if (is_alias(family->name) && !m->aliases)
        return;
    if (family->type == DS4_METRIC_INFO) {
        if (has_info(m, id)) {
            append_head(family, format, out);
            append_infos(m, id, out);
        }
        return;
    }
    for (size_t s = 0; s < family->n_series; s++) {
        if (!atomic_load_explicit(&family->touched[s], memory_order_relaxed))
            continue;
        if (!has_head)
            append_head(family, format, out);
        has_head = true;
        if (family->type == DS4_METRIC_HISTOGRAM)
            append_histogram(m, family, s, out);
        else
            append_series(m, family, s, "", NULL,
                          read_slot(m, family->first_slot + s * family->n_slots), out);
    }
}

int ds4_metrics_render(const struct ds4_metrics *m, enum ds4_metrics_format format,
                       struct ds4_buf *out)
{
    for (int id = 0; id < DS4_N_METRICS; id++)
        append_family(m, (enum ds4_metric)id, format, out);
    if (format == DS4_METRICS_OPENMETRICS)
        (void)ds4_buf_append_text(out, "# EOF\n");
    return out->failed ? -1 : 0;
}

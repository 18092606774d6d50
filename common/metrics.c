/* The registry and its observations; rendering is in metrics_text.c.
 *
 * The table's label texts are split once into lists; a series is the mixed-radix number of its label
 * values, and its slots lie at family.first_slot + series * family.n_slots: one slot for counters and
 * gauges, buckets + sum + count for histograms.  A slot is a double in an atomic word; adding is a
 * compare-and-swap loop, which threads contend for at most per request or step.  `touched` marks the
 * series to show. */
#include "common/metrics_family.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define DS4_METRIC_EAGER_SERIES 16 /* counters with at most so many series start at 0 */

const struct ds4_buckets ds4_metric_buckets[] = {
    [DS4_BUCKETS_NONE] = {{0}, 0},
    [DS4_BUCKETS_LATENCY] = {{.005, .01, .025, .05, .1, .25, .5,  .75, 1,   2,    2.5,
                              5,    7.5, 10,   20,  30, 60,  120, 300, 600, 1200, 2560},
                             22},
    [DS4_BUCKETS_INTER_TOKEN] = {{.002, .005, .01, .015, .02, .025, .03, .04, .05, .075, .1, .15,
                                  .2, .3, .5, 1, 2.5, 5, 10},
                                 19},
    [DS4_BUCKETS_ACCEPT] = {{1, 2, 3, 4, 5, 6, 7, 8}, 8},
    [DS4_BUCKETS_STEP] = {{.001, .002, .004, .008, .012, .016, .024, .032, .048, .064, .096, .128,
                           .192, .256, .5, 1, 2, 5, 30},
                          19},
    [DS4_BUCKETS_EXTRA] = {{0, 1, 2, 8, 32, 64, 127, 255, 511, 1023, 2047, 4095, 8191, 32767,
                            131071},
                           15},
    [DS4_BUCKETS_TOKENS] = {{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000,
                             50000, 100000, 200000, 500000, 1048576},
                            19},
    [DS4_BUCKETS_VLLM_TTFT] = {{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5,  .75,
                                1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640, 2560},
                               22},
    [DS4_BUCKETS_VLLM_TOKEN] = {{.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5,
                                 10, 20, 40, 80},
                                19},
    [DS4_BUCKETS_VLLM_REQUEST] = {{.3, .5, .8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                   30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680},
                                  21},
    [DS4_BUCKETS_VLLM_LENGTH] = {{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000,
                                  20000, 50000, 100000, 200000, 500000, 1000000},
                                 19},
    [DS4_BUCKETS_VLLM_N] = {{1, 2, 5, 10, 20}, 5},
    [DS4_BUCKETS_VLLM_STEP] = {{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384},
                               13},
};

static const struct {
    const char *name, *labels, *help;
    enum ds4_metric_type type;
    enum ds4_bucket_list buckets;
} table[] = {
#define DS4_METRIC_ROW(id, name, type, buckets, labels, help)                                      \
    [DS4_M_##id] = {name, labels, help, DS4_METRIC_##type, DS4_BUCKETS_##buckets},
    DS4_METRICS(DS4_METRIC_ROW)
#undef DS4_METRIC_ROW
};

const char *ds4_metric_stage(int32_t stage)
{
    static const char digits[DS4_METRIC_MAX_STAGES][4] = {
        "0",  "1",  "2",  "3",  "4",  "5",  "6",  "7",  "8",  "9",  "10", "11", "12",
        "13", "14", "15", "16", "17", "18", "19", "20", "21", "22", "23", "24", "25",
        "26", "27", "28", "29", "30", "31", "32", "33", "34", "35", "36", "37", "38",
        "39", "40", "41", "42", "43", "44", "45", "46", "47", "48", "49", "50", "51",
        "52", "53", "54", "55", "56", "57", "58", "59", "60", "61", "62", "63",
    };

    return stage < 0 || stage >= DS4_METRIC_MAX_STAGES ? "" : digits[stage];
}

/* ---- building ------------------------------------------------------------------------------ */

/* Splits "name=a|b|c" in place. */
static int split_label(char *text, struct ds4_label *label)
{
    char *save = NULL;
    char *values = strchr(text, '=');

    *values++ = '\0';
    label->name = text;
    if (strcmp(values, "#") == 0) {
        for (int32_t i = 0; i < DS4_METRIC_MAX_STAGES; i++) {
            if (DS4_VEC_PUSH(&label->values, ds4_metric_stage(i)) != 0)
                return -1;
        }
        return 0;
    }
    for (char *v = strtok_r(values, "|", &save); v != NULL; v = strtok_r(NULL, "|", &save)) {
        if (DS4_VEC_PUSH(&label->values, v) != 0)
            return -1;
    }
    return label->values.len > 0 ? 0 : -1;
}

static int build_family(struct ds4_family *family, enum ds4_metric id, size_t *n_slots)
{
    char *save = NULL;

    family->name = table[id].name;
    family->help = table[id].help;
    family->type = table[id].type;
    family->buckets = &ds4_metric_buckets[table[id].buckets];
    family->first_slot = *n_slots;
    family->n_slots = family->type == DS4_METRIC_HISTOGRAM ? family->buckets->n + 2 : 1;
    family->n_series = 1;
    family->label_text = strdup(table[id].labels);
    if (family->label_text == NULL)
        return -1;
    for (char *part = strtok_r(family->label_text, ",", &save); part != NULL;
         part = strtok_r(NULL, ",", &save)) {
        if (split_label(part, &family->labels[family->n_labels]) != 0)
            return -1;
        family->n_series *= family->labels[family->n_labels++].values.len;
    }
    family->touched = calloc(family->n_series, sizeof(*family->touched));
    if (family->touched == NULL)
        return -1;
    if (family->type == DS4_METRIC_COUNTER && family->n_series <= DS4_METRIC_EAGER_SERIES)
        for (size_t s = 0; s < family->n_series; s++)
            atomic_store(&family->touched[s], true);
    *n_slots += family->n_series * family->n_slots;
    return 0;
}

struct ds4_metrics *ds4_metrics_new(const char *model, struct ds4_err *err)
{
    struct ds4_metrics *m = calloc(1, sizeof(*m));
    size_t n_slots = 0;

    if (m == NULL)
        goto fail;
    m->aliases = true;
    m->model = strdup(model);
    if (m->model == NULL)
        goto fail;
    for (int id = 0; id < DS4_N_METRICS; id++) {
        if (build_family(&m->families[id], (enum ds4_metric)id, &n_slots) != 0)
            goto fail;
    }
    m->slots = calloc(n_slots, sizeof(*m->slots));
    if (m->slots != NULL)
        return m;
fail:
    ds4_metrics_free(m);
    (void)ds4_fail(err, DS4_E_NOMEM, "no memory for metrics");
    return NULL;
}

void ds4_metrics_show_aliases(struct ds4_metrics *m, bool show)
{
    m->aliases = show;
}

void ds4_metrics_free(struct ds4_metrics *m)
{
    struct ds4_family *family;

    if (m == NULL)
        return;
    for (int id = 0; id < DS4_N_METRICS; id++) {
        family = &m->families[id];
        for (size_t k = 0; k < DS4_METRIC_MAX_LABELS; k++)
            DS4_VEC_DEINIT(&family->labels[k].values);
        free(family->label_text);
        free(family->touched);
    }
    for (size_t i = 0; i < m->infos.len; i++)
        free(m->infos.ptr[i].labels);
    DS4_VEC_DEINIT(&m->infos);
    free(m->slots);
    free(m->model);
    free(m);
}

/* ---- observing ----------------------------------------------------------------------------- */

/* The place of a value in the label's list, that of "other", or -1. */
static int64_t find_value(const struct ds4_label *label, const char *text)
{
    int64_t other = -1;

    for (size_t i = 0; text != NULL && i < label->values.len; i++) {
        if (strcmp(label->values.ptr[i], text) == 0)
            return (int64_t)i;
        if (strcmp(label->values.ptr[i], "other") == 0)
            other = (int64_t)i;
    }
    return text == NULL ? -1 : other;
}

static int64_t find_series(const struct ds4_metrics *m, enum ds4_metric id,
                           const char *const *labels)
{
    const struct ds4_family *family = &m->families[id];
    int64_t series = 0, value;

    for (size_t k = 0; k < family->n_labels; k++) {
        value = find_value(&family->labels[k], labels[k]);
        if (value < 0)
            return -1;
        series = series * (int64_t)family->labels[k].values.len + value;
    }
    return labels[family->n_labels] == NULL ? series : -1;
}

static void add_to_slot(struct ds4_metrics *m, size_t slot, double value)
{
    _Atomic double *word = &m->slots[slot];
    double old = atomic_load_explicit(word, memory_order_relaxed);

    while (!atomic_compare_exchange_weak_explicit(word, &old, old + value, memory_order_relaxed,
                                                  memory_order_relaxed))
        continue;
}

/* The first slot of the series to change, which it marks; -1 for labels outside the lists. */
static int64_t touch(struct ds4_metrics *m, enum ds4_metric id, const char *const *labels)
{
    struct ds4_family *family = &m->families[id];
    int64_t series = find_series(m, id, labels);

    if (series < 0) {
        add_to_slot(m, m->families[DS4_M_UNKNOWN_LABELS].first_slot, 1);
        return -1;
    }
    atomic_store_explicit(&family->touched[series], true, memory_order_relaxed);
    return (int64_t)family->first_slot + series * (int64_t)family->n_slots;
}

void ds4_metric_add_at(struct ds4_metrics *m, enum ds4_metric id, double value,
                       const char *const *labels)
{
    int64_t slot = m == NULL ? -1 : touch(m, id, labels);

    if (slot >= 0)
        add_to_slot(m, (size_t)slot, value);
}

void ds4_metric_set_at(struct ds4_metrics *m, enum ds4_metric id, double value,
                       const char *const *labels)
{
    int64_t slot = m == NULL ? -1 : touch(m, id, labels);

    if (slot >= 0)
        atomic_store_explicit(&m->slots[slot], value, memory_order_relaxed);
}

void ds4_metric_observe_at(struct ds4_metrics *m, enum ds4_metric id, double value,
                           const char *const *labels)
{
    const struct ds4_buckets *buckets;
    int64_t slot;
    size_t b = 0;

    if (m == NULL || value != value) /* a NaN would poison the sum for ever */
        return;
    slot = touch(m, id, labels);
    if (slot < 0)
        return;
    buckets = m->families[id].buckets;
    while (b < buckets->n && value > buckets->le[b])
        b++;
    if (b < buckets->n)
        add_to_slot(m, (size_t)slot + b, 1);
    add_to_slot(m, (size_t)slot + buckets->n, value);
    add_to_slot(m, (size_t)slot + buckets->n + 1, 1);
}

void ds4_metric_set_histogram(struct ds4_metrics *m, enum ds4_metric id, const uint64_t *bucket,
                              size_t n, double sum, const char *const *labels)
{
    double count = 0;
    int64_t slot;

    if (m == NULL || n != m->families[id].buckets->n + 1)
        return;
    slot = touch(m, id, labels);
    if (slot < 0)
        return;
    for (size_t b = 0; b < n; b++) {
        count += (double)bucket[b];
        if (b + 1 < n)
            atomic_store_explicit(&m->slots[(size_t)slot + b], (double)bucket[b],
                                  memory_order_relaxed);
    }
    atomic_store_explicit(&m->slots[(size_t)slot + n - 1], sum, memory_order_relaxed);
    atomic_store_explicit(&m->slots[(size_t)slot + n], count, memory_order_relaxed);
}

size_t ds4_metric_step_bucket(double seconds)
{
    const struct ds4_buckets *buckets = &ds4_metric_buckets[DS4_BUCKETS_STEP];
    size_t b = 0;

    while (b < buckets->n && seconds > buckets->le[b])
        b++;
    return b;
}

void ds4_metric_choose_at(struct ds4_metrics *m, enum ds4_metric id, const char *const *labels)
{
    const char *each[DS4_METRIC_MAX_LABELS + 1] = {NULL};
    const struct ds4_family *family;
    const struct ds4_label *last;

    if (m == NULL || m->families[id].n_labels == 0)
        return;
    family = &m->families[id];
    last = &family->labels[family->n_labels - 1];
    memcpy(each, labels, family->n_labels * sizeof(*labels));
    for (size_t i = 0; i < last->values.len; i++) {
        each[family->n_labels - 1] = last->values.ptr[i];
        ds4_metric_set_at(m, id, strcmp(last->values.ptr[i], labels[family->n_labels - 1]) == 0,
                          each);
    }
}

void ds4_metric_hide_at(struct ds4_metrics *m, enum ds4_metric id, const char *const *labels)
{
    int64_t series = m == NULL ? -1 : find_series(m, id, labels);

    if (series >= 0)
        atomic_store_explicit(&m->families[id].touched[series], false, memory_order_relaxed);
}

double ds4_metric_value(const struct ds4_metrics *m, enum ds4_metric id, const char *const *labels)
{
    const struct ds4_family *family = &m->families[id];
    int64_t series = find_series(m, id, labels);

    if (series < 0)
        return 0;
    return atomic_load_explicit(
        &m->slots[family->first_slot + (size_t)(series + 1) * family->n_slots - 1],
        memory_order_relaxed);
}

double ds4_metric_sum(const struct ds4_metrics *m, enum ds4_metric id)
{
    const struct ds4_family *family = &m->families[id];
    double sum = 0;

    for (size_t s = 0; s < family->n_series; s++)
        sum += atomic_load_explicit(&m->slots[family->first_slot + s * family->n_slots],
                                    memory_order_relaxed);
    return sum;
}

/* ---- this process -------------------------------------------------------------------------- */

static double seconds(struct timeval time)
{
    return (double)time.tv_sec + (double)time.tv_usec / 1e6;
}

/* Resident pages from /proc/self/statm: the second number. */
static double resident_bytes(void)
{
    FILE *file = fopen("/proc/self/statm", "re");
    long long total = 0, resident = 0;

    if (file == NULL)
        return 0;
    if (fscanf(file, "%lld %lld", &total, &resident) != 2)
        resident = 0;
    (void)fclose(file);
    return (double)resident * (double)sysconf(_SC_PAGESIZE);
}

static double open_descriptors(void)
{
    DIR *dir = opendir("/proc/self/fd");
    double n = -3; /* ".", ".." and the one that lists */

    if (dir == NULL)
        return 0;
    while (readdir(dir) != NULL)
        n++;
    (void)closedir(dir);
    return n;
}

/* Field 22 of /proc/self/stat, in clock ticks since boot, plus the boot time of /proc/stat. */
static double start_time(void)
{
    char line[1024], *rest;
    FILE *file = fopen("/proc/self/stat", "re");
    unsigned long long ticks = 0, boot = 0;

    if (file == NULL)
        return 0;
    rest = fgets(line, sizeof(line), file) == NULL ? NULL : strrchr(line, ')');
    (void)fclose(file);
    if (rest == NULL || sscanf(rest + 1,
                               " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d "
                               "%*d %*d %*d %*d %*d %llu",
                               &ticks) != 1)
        return 0;
    file = fopen("/proc/stat", "re");
    if (file == NULL)
        return 0;
    while (boot == 0 && fgets(line, sizeof(line), file) != NULL)
        (void)sscanf(line, "btime %llu", &boot);
    (void)fclose(file);
    return (double)boot + (double)ticks / (double)sysconf(_SC_CLK_TCK);
}

void ds4_metrics_read_process(struct ds4_metrics *m)
{
    struct rusage usage = {0};

    if (m == NULL)
        return;
    (void)getrusage(RUSAGE_SELF, &usage);
    ds4_metric_set(m, DS4_M_PROCESS_CPU, seconds(usage.ru_utime) + seconds(usage.ru_stime));
    ds4_metric_set(m, DS4_M_PROCESS_RSS, resident_bytes());
    ds4_metric_set(m, DS4_M_PROCESS_FDS, open_descriptors());
    ds4_metric_set(m, DS4_M_PROCESS_START, start_time());
}

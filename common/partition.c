/* Partition of a model's layers into pipeline stages: the last section of common/model.h but one.
 *
 * A partition is a list of layer counts in stage order; stages are contiguous.  Reading one and checking
 * it against a model are separate, because settings are read before the model is open. */
#include "common/model.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

int ds4_partition_set(const int32_t *n_layer, int32_t n_stage, struct ds4_partition *out,
                      struct ds4_err *err)
{
    struct ds4_partition p = {0};

    if (n_stage < 1 || n_stage > DS4_MAX_STAGES)
        return ds4_fail(err, DS4_E_INVALID, "a partition of %" PRId32 " stages, must be 1 to %d",
                        n_stage, DS4_MAX_STAGES);
    for (int32_t s = 0; s < n_stage; s++) {
        if (n_layer[s] < 1 || n_layer[s] > DS4_MAX_LAYERS)
            return ds4_fail(err, DS4_E_INVALID,
                            "partition: stage %" PRId32 " has %" PRId32 " layers, must be 1 to %d",
                            s, n_layer[s], DS4_MAX_LAYERS);
        p.n_layer[s] = n_layer[s];
    }
    p.n_stage = n_stage;
    *out = p;
    return 0;
}

static const char *skip_blanks(const char *p)
{
    while (*p == ' ' || *p == '\t')
        p++;
    return p;
}

/* A run of digits; returns the place behind it, NULL if there is none.  Stops counting at a value that
 * ds4_partition_set refuses anyway. */
static const char *read_count(const char *p, int32_t *out)
{
    const char *begin = p;
    int32_t value = 0;

    while (*p >= '0' && *p <= '9') {
        value = value > DS4_MAX_LAYERS ? value : value * 10 + (*p - '0');
        p++;
    }
    *out = value;
    return p == begin ? NULL : p;
}

int ds4_partition_parse(const char *text, struct ds4_partition *out, struct ds4_err *err)
{
    int32_t counts[DS4_MAX_STAGES];
    int32_t n = 0;
    const char *p = skip_blanks(text);
    bool brace = *p == '{';

    if (brace)
        p++;
    for (;;) {
        if (n == DS4_MAX_STAGES)
            return ds4_fail(err, DS4_E_INVALID, "a partition of more than %d stages",
                            DS4_MAX_STAGES);
        p = read_count(skip_blanks(p), &counts[n++]);
        if (p == NULL)
            break;
        p = skip_blanks(p);
        if (*p != ',')
            break;
        p++;
    }
    if (p != NULL && brace && *p == '}')
        p = skip_blanks(p + 1);
    else if (brace)
        p = NULL;
    if (p == NULL || *p != '\0')
        return ds4_fail(err, DS4_E_INVALID,
                        "partition \"%.64s\" must be layer counts like 15,15,13", text);
    return ds4_partition_set(counts, n, out, err);
}

/* "15+15+12", cut where the buffer ends. */
static void print_counts(const struct ds4_partition *p, char *out, size_t cap)
{
    size_t len = 0;
    int n;

    out[0] = '\0';
    for (int32_t s = 0; s < p->n_stage && len < cap; s++) {
        n = snprintf(out + len, cap - len, "%s%" PRId32, s == 0 ? "" : "+", p->n_layer[s]);
        len += n > 0 ? (size_t)n : 0;
    }
}

int ds4_partition_check(const struct ds4_partition *p, int32_t n_layer, struct ds4_err *err)
{
    char counts[96];
    int32_t sum = 0;

    for (int32_t s = 0; s < p->n_stage; s++) {
        if (p->n_layer[s] < 1)
            return ds4_fail(err, DS4_E_INVALID, "partition: stage %" PRId32 " has no layer", s);
        sum += p->n_layer[s];
    }
    if (sum != n_layer) {
        print_counts(p, counts, sizeof(counts));
        return ds4_fail(err, DS4_E_INVALID,
                        "partition %s has %" PRId32 " layers, the model has %" PRId32, counts, sum,
                        n_layer);
    }
    return 0;
}

int ds4_partition_even(int32_t n_layer, int32_t n_stage, struct ds4_partition *out,
                       struct ds4_err *err)
{
    struct ds4_partition p = {0};

    if (n_stage < 1 || n_stage > DS4_MAX_STAGES || n_stage > n_layer)
        return ds4_fail(err, DS4_E_INVALID,
                        "cannot split %" PRId32 " layers over %" PRId32 " stages, at most %d",
                        n_layer, n_stage, DS4_MAX_STAGES);
    p.n_stage = n_stage;
    for (int32_t s = 0; s < n_stage; s++)
        p.n_layer[s] = n_layer / n_stage + (s < n_layer % n_stage ? 1 : 0);
    *out = p;
    return 0;
}

struct ds4_model_part ds4_partition_part(const struct ds4_partition *p, int32_t stage)
{
    struct ds4_model_part part = {0, 0, stage == 0, stage == p->n_stage - 1};

    for (int32_t s = 0; s < stage; s++)
        part.first_layer += p->n_layer[s];
    part.end_layer = part.first_layer + p->n_layer[stage];
    return part;
}

/* Expert choice (step 9, paper 4.2): strengths s = sqrt(softplus(logit)); the bias moves the choice
 * only, never the weight; hash layers look the ids up by token and still weigh them with the gate.
 *
 * Whatever the logits hold, ids come out distinct and below n_expert (NaN ranks last); ids of a table
 * are a model file's numbers, and one out of range gets weight 0 and is skipped by the experts. */
#include "kernels/cpu/cpu.h"

#include "kernels/cpu/math.h"

/* Keeps the quotient finite if every chosen strength is 0; far below an ulp of any other sum. */
#define DS4_ROUTE_TINY 1e-20f

struct job {
    struct ds4_device *dev;
    const struct ds4_route_args *a;
    struct ds4_scratch scratch;
};

static void sort_ids(int32_t *id, int32_t n)
{
    for (int32_t i = 1; i < n; i++) {
        int32_t value = id[i], j = i;

        for (; j > 0 && id[j - 1] > value; j--)
            id[j] = id[j - 1];
        id[j] = value;
    }
}

static void choose(const struct ds4_route_args *a, int32_t t, const float *s, float *biased,
                   int32_t *id)
{
    int32_t n_expert = a->logits.shape[1];

    if (a->table != NULL) {
        const int32_t *row = a->table + (int64_t)a->batch->token[t] * a->n_used;

        for (int32_t i = 0; i < a->n_used; i++)
            id[i] = row[i];
        sort_ids(id, a->n_used);
        return;
    }
    for (int32_t e = 0; e < n_expert; e++)
        biased[e] = a->bias != NULL ? s[e] + a->bias[e] : s[e];
    ds4_cpu_top_k(biased, n_expert, a->n_used, id);
}

static void route_token(void *ctx, int32_t t, int32_t thread)
{
    const struct job *job = ctx;
    const struct ds4_route_args *a = job->a;
    int32_t n_expert = a->logits.shape[1];
    const float *logit = (const float *)a->logits.data + t * a->logits.stride[0];
    float *s = ds4_scratch_of(&job->scratch, thread); /* [n_expert] */
    int32_t *id = a->id + (int64_t)t * a->n_used;
    float *weight = a->weight + (int64_t)t * a->n_used;
    float sum = 0.0f;

    if (!ds4_cpu_active(a->batch, t))
        return;
    for (int32_t e = 0; e < n_expert; e++)
        s[e] = sqrtf(ds4_softplus(logit[e]));
    choose(a, t, s, s + n_expert, id);
    for (int32_t i = 0; i < a->n_used; i++) {
        weight[i] = id[i] >= 0 && id[i] < n_expert ? s[id[i]] : 0.0f;
        sum += weight[i];
    }
    for (int32_t i = 0; i < a->n_used; i++)
        weight[i] = weight[i] / (sum + DS4_ROUTE_TINY) * a->scale;
}

void ds4_cpu_route(struct ds4_device *dev, const struct ds4_route_args *a)
{
    struct ds4_need need = {.thread_bytes = 2 * (size_t)a->logits.shape[1] * sizeof(float)};
    struct job job = {dev, a, ds4_cpu_scratch(dev, need)};

    assert(a->logits.dtype == DS4_DTYPE_F32 && a->n_used <= a->logits.shape[1]);
    ds4_pool_run(dev->pool, a->batch->n_tok, route_token, &job);
}

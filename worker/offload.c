/* Experts in two places (house list, step 9).
 *
 * The host must see a layer's routing before it can do its part, so a step with offload waits for the
 * device once per layer; small beside what the host then multiplies.  Per layer: fetch ids, weights and
 * inputs; queue the resident uses; stream the groups that are worth it through STAGED slabs; compute the
 * rest here while the device works; upload those rows; join.
 *
 * Invariant: what is computed where follows from ids, residency and constants alone, never from a clock,
 * so that a run can be repeated to the bit. */
#include "worker/offload.h"

#include "worker/weights.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define ALIGN       256
#define STAGED      8   /* experts copied to the device at once */
#define STREAM_USES 8   /* an expert with so many uses in a step is copied, others are not ... */
#define DECODE_TOK  16  /* ... and none in steps of so few rows, which alone count as use */
#define HALVE_EVERY 256 /* decode steps after which old use counts half */
#define WORTH_MORE  4   /* uses by which an expert must lead to take a place */

struct layer {
    int32_t n_expert;
    int32_t *slot_of;   /* [n_expert] -1: not on the device */
    int32_t *expert_at; /* [n_resident] */
    uint32_t *count;    /* [n_expert] uses in decode steps, halved from time to time */
};

struct ds4_offload {
    struct ds4_offload_config c;
    int32_t d;
    int32_t n_used;
    struct layer *layer; /* [n_layer] */
    int32_t *dev_map;    /* device: [max_tok, n_used] slots of one pass */
    float *dev_part;     /* device: [max_tok, n_used, d] */
    uint8_t *dev_slab;   /* device: STAGED slabs */
    int32_t *id;         /* host, as all below: [max_tok, n_used] */
    float *weight;       /* [max_tok, n_used] */
    int32_t *map;        /* [max_tok, n_used] of one pass */
    float *x;            /* [max_tok, d] */
    float *part;         /* [max_tok, n_used, d] */
    void *host_block;    /* what the host's arrays lie in */
    size_t host_bytes;
    int32_t *uses;      /* [most experts] of the layer at hand */
    int32_t *staged;    /* [most experts] slab of an expert in this pass; -1 */
    int32_t next_layer; /* whose turn it is to adapt */
    int32_t decode_steps;
    bool decode;      /* the step at hand counts */
    bool map_travels; /* the device may not have read `map` yet */
    struct ds4_offload_stats stats;
};

/* ---- sizes -------------------------------------------------------------------------------------- */

static size_t align_up(size_t n)
{
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}

static void *carve(uint8_t *base, size_t *used, size_t n, size_t bytes)
{
    void *at = base == NULL ? NULL : base + *used;

    *used += align_up(n * bytes);
    return at;
}

static size_t carve_device(struct ds4_offload *o, const struct ds4_model_shape *m, int32_t max_tok,
                           size_t slab_bytes, uint8_t *base)
{
    size_t n_use = (size_t)max_tok * (size_t)m->n_expert_used;
    size_t used = 0;

    o->dev_map = carve(base, &used, n_use, sizeof(int32_t));
    o->dev_part = carve(base, &used, n_use * (size_t)m->d_model, sizeof(float));
    o->dev_slab = carve(base, &used, STAGED, align_up(slab_bytes));
    return used;
}

static size_t carve_host(struct ds4_offload *o, const struct ds4_model_shape *m, int32_t max_tok,
                         uint8_t *base)
{
    size_t n_use = (size_t)max_tok * (size_t)m->n_expert_used;
    size_t used = 0;

    o->id = carve(base, &used, n_use, sizeof(int32_t));
    o->weight = carve(base, &used, n_use, sizeof(float));
    o->map = carve(base, &used, n_use, sizeof(int32_t));
    o->x = carve(base, &used, (size_t)max_tok * (size_t)m->d_model, sizeof(float));
    o->part = carve(base, &used, n_use * (size_t)m->d_model, sizeof(float));
    return used;
}

size_t ds4_offload_device_bytes(const struct ds4_model_shape *model, int32_t max_tok,
                                size_t slab_bytes)
{
    struct ds4_offload o;

    return carve_device(&o, model, max_tok, slab_bytes, NULL);
}

size_t ds4_offload_host_bytes(const struct ds4_model_shape *model, int32_t max_tok)
{
    struct ds4_offload o;

    return carve_host(&o, model, max_tok, NULL);
}

/* ---- new and free ------------------------------------------------------------------------------- */

static int init_layer(struct layer *layer, int32_t n_expert, int32_t n_resident)
{
    layer->n_expert = n_expert;
    layer->slot_of = calloc((size_t)n_expert, sizeof(*layer->slot_of));
    layer->expert_at = calloc((size_t)n_resident, sizeof(*layer->expert_at));
    layer->count = calloc((size_t)n_expert, sizeof(*layer->count));
    if (layer->slot_of == NULL || layer->expert_at == NULL || layer->count == NULL)
        return -1;
    for (int32_t e = 0; e < n_expert; e++)
        layer->slot_of[e] = -1;
    for (int32_t i = 0; i < n_resident; i++) {
        layer->expert_at[i] = ds4_weights_resident(i, n_resident, n_expert);
        layer->slot_of[layer->expert_at[i]] = i;
    }
    return 0;
}

static int init_layers(struct ds4_offload *o)
{
    const struct ds4_stage_weights *w = o->c.weights;
    int32_t most = 0;

    o->layer = calloc((size_t)w->n_layer, sizeof(*o->layer));
    if (o->layer == NULL)
        return -1;
    for (int32_t l = 0; l < w->n_layer; l++) {
        int32_t n = w->layer[l].host_gate.n_stack;

        if (w->layer[l].host_gate.data == NULL) /* few enough to be all there */
            continue;
        if (init_layer(&o->layer[l], n, o->c.n_resident) != 0)
            return -1;
        most = n > most ? n : most;
    }
    o->uses = calloc((size_t)most + 1, sizeof(*o->uses));
    o->staged = calloc((size_t)most + 1, sizeof(*o->staged));
    return o->uses == NULL || o->staged == NULL ? -1 : 0;
}

struct ds4_offload *ds4_offload_new(const struct ds4_offload_config *config, struct ds4_err *err)
{
    const struct ds4_offload_config *c = config;
    struct ds4_offload *o = calloc(1, sizeof(*o));

    if (o == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for offloaded experts");
        return NULL;
    }
    o->c = *c;
    o->d = c->model->d_model;
    o->n_used = c->model->n_expert_used;
    carve_device(o, c->model, c->max_tok, c->slab_bytes, c->area);
    o->host_bytes = ds4_offload_host_bytes(c->model, c->max_tok);
    o->host_block = c->backend->alloc_host(c->dev, o->host_bytes, "offload buffers", err);
    if (o->host_block == NULL)
        goto fail;
    carve_host(o, c->model, c->max_tok, o->host_block);
    if (init_layers(o) != 0) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for the tables of offloaded experts");
        goto fail;
    }
    return o;
fail:
    ds4_offload_free(o);
    return NULL;
}

void ds4_offload_free(struct ds4_offload *o)
{
    if (o == NULL)
        return;
    for (int32_t l = 0; o->layer != NULL && l < o->c.weights->n_layer; l++) {
        free(o->layer[l].slot_of);
        free(o->layer[l].expert_at);
        free(o->layer[l].count);
    }
    free(o->layer);
    free(o->uses);
    free(o->staged);
    if (o->host_block != NULL)
        o->c.backend->free_host(o->c.dev, o->host_block, o->host_bytes);
    free(o);
}

/* ---- one layer ---------------------------------------------------------------------------------- */

/* Reads what the device routed, and the rows it goes by. */
static void fetch(struct ds4_offload *o, const struct ds4_moe_args *a, int32_t n_use)
{
    const struct ds4_backend *b = o->c.backend;
    size_t n = (size_t)n_use;

    b->fetch(o->c.dev, o->id, a->id, n * sizeof(*o->id));
    b->fetch(o->c.dev, o->weight, a->weight, n * sizeof(*o->weight));
    b->fetch(o->c.dev, o->x, a->x.data, (size_t)a->batch->n_tok * (size_t)o->d * sizeof(*o->x));
    b->sync(o->c.dev);
    o->map_travels = false;
}

static bool active(const struct ds4_batch *batch, int32_t t)
{
    return batch->entry[batch->entry_of[t]].active;
}

static bool is_expert(const struct layer *layer, int32_t id)
{
    return id >= 0 && id < layer->n_expert;
}

/* Uses per expert of the step.  Rows that are no-ops may hold anything; an id that is wrong stays, so that
 * the device sees it and says so. */
static void count_uses(struct ds4_offload *o, struct layer *layer, const struct ds4_batch *batch)
{
    memset(o->uses, 0, (size_t)layer->n_expert * sizeof(*o->uses));
    for (int32_t use = 0; use < batch->n_tok * o->n_used; use++) {
        int32_t e = o->id[use];

        if (!active(batch, use / o->n_used))
            o->id[use] = DS4_EXPERT_ELSEWHERE;
        else if (is_expert(layer, e)) {
            o->uses[e]++;
            layer->count[e] += o->decode;
        }
    }
}

/* Runs the uses of experts with a place on the device, in those stacks; returns their number. */
static uint64_t run_device(struct ds4_offload *o, const struct layer *layer, struct ds4_moe_args a,
                           const int32_t *place)
{
    int32_t n_use = a.batch->n_tok * o->n_used;
    uint64_t n = 0;

    if (o->map_travels)
        o->c.backend->sync(o->c.dev);
    for (int32_t use = 0; use < n_use; use++) {
        int32_t e = o->id[use];

        o->map[use] = !is_expert(layer, e) ? e : place[e] >= 0 ? place[e] : DS4_EXPERT_ELSEWHERE;
        n += o->map[use] != DS4_EXPERT_ELSEWHERE;
    }
    if (n == 0)
        return 0;
    o->c.backend->upload(o->c.dev, o->dev_map, o->map, (size_t)n_use * sizeof(*o->map));
    a.id = o->dev_map;
    a.part = o->dev_part;
    o->c.backend->moe_uses(o->c.dev, &a);
    o->map_travels = true;
    return n;
}

static size_t one_bytes(const struct ds4_weight *w)
{
    return (size_t)w->n_row * w->row_bytes;
}

static const uint8_t *host_expert(const struct ds4_weight *w, int32_t e)
{
    return (const uint8_t *)w->data + (size_t)e * one_bytes(w);
}

/* Stacks of STAGED experts in the slabs: all gates, then all ups, then all downs. */
static void stage_stacks(const struct ds4_offload *o, const struct ds4_layer_weights *w,
                         struct ds4_moe_args *a)
{
    uint8_t *at = o->dev_slab;

    a->gate = w->host_gate;
    a->up = w->host_up;
    a->down = w->host_down;
    a->gate.data = at;
    a->up.data = at + align_up(STAGED * one_bytes(&a->gate));
    a->down.data = (uint8_t *)a->up.data + align_up(STAGED * one_bytes(&a->up));
    a->gate.n_stack = a->up.n_stack = a->down.n_stack = STAGED;
}

static void copy_expert(struct ds4_offload *o, const struct ds4_weight *stack, int32_t slot,
                        const struct ds4_weight *from, int32_t e)
{
    o->c.backend->upload(o->c.dev,
                         (uint8_t *)(uintptr_t)stack->data + (size_t)slot * one_bytes(from),
                         host_expert(from, e), one_bytes(from));
}

/* Experts with many uses go through the slabs, STAGED at a time; their uses are done then. */
static void stream(struct ds4_offload *o, const struct layer *layer,
                   const struct ds4_layer_weights *w, struct ds4_moe_args a)
{
    int32_t n_use = a.batch->n_tok * o->n_used;

    stage_stacks(o, w, &a);
    for (int32_t e = 0; e < layer->n_expert;) {
        int32_t n = 0;

        for (int32_t k = 0; k < layer->n_expert; k++)
            o->staged[k] = -1;
        for (; e < layer->n_expert && n < STAGED; e++) {
            if (layer->slot_of[e] >= 0 || o->uses[e] < STREAM_USES)
                continue;
            copy_expert(o, &a.gate, n, &w->host_gate, e);
            copy_expert(o, &a.up, n, &w->host_up, e);
            copy_expert(o, &a.down, n, &w->host_down, e);
            o->staged[e] = n++;
        }
        if (n == 0)
            return;
        o->stats.streamed += run_device(o, layer, a, o->staged);
        for (int32_t use = 0; use < n_use; use++)
            if (is_expert(layer, o->id[use]) && o->staged[o->id[use]] >= 0)
                o->id[use] = DS4_EXPERT_ELSEWHERE;
    }
}

/* Rows that were made here, to their places on the device; neighbours in one piece. */
static void upload_parts(struct ds4_offload *o, int32_t n_use)
{
    size_t row = (size_t)o->d * sizeof(*o->part);

    for (int32_t use = 0; use < n_use; use++) {
        int32_t end = use;

        while (end < n_use && o->id[end] >= 0)
            end++;
        if (end == use)
            continue;
        o->c.backend->upload(o->c.dev, o->dev_part + (size_t)use * (size_t)o->d,
                             o->part + (size_t)use * (size_t)o->d, (size_t)(end - use) * row);
        use = end;
    }
}

/* What is left of the ids is computed by the host. */
static void run_host(struct ds4_offload *o, const struct ds4_layer_weights *w,
                     const struct ds4_moe_args *a)
{
    int32_t n_tok = a->batch->n_tok, n_use = n_tok * o->n_used;
    struct ds4_moe_args host = *a;
    uint64_t n = 0;

    for (int32_t use = 0; use < n_use; use++)
        n += o->id[use] >= 0;
    if (n == 0)
        return;
    host.x = ds4_tensor_2d(o->x, DS4_DTYPE_F32, n_tok, o->d);
    host.y = host.x; /* not written */
    host.id = o->id;
    host.weight = o->weight;
    host.gate = w->host_gate;
    host.up = w->host_up;
    host.down = w->host_down;
    host.part = o->part;
    o->c.host->moe_uses(o->c.host_dev, &host);
    upload_parts(o, n_use);
    o->stats.host += n;
}

void ds4_offload_moe(struct ds4_offload *o, int32_t l, const struct ds4_moe_args *args)
{
    const struct ds4_layer_weights *w = &o->c.weights->layer[l];
    struct layer *layer = &o->layer[l];
    struct ds4_moe_args a = *args;
    int32_t n_use = a.batch->n_tok * o->n_used;

    if (layer->slot_of == NULL) {
        o->c.backend->moe(o->c.dev, &a);
        return;
    }
    assert(a.batch->n_tok <= o->c.max_tok && a.x.stride[0] == o->d);
    o->decode = a.batch->n_tok <= DECODE_TOK;
    fetch(o, &a, n_use);
    count_uses(o, layer, a.batch);
    o->stats.resident += run_device(o, layer, a, layer->slot_of);
    for (int32_t use = 0; use < n_use; use++)
        if (!is_expert(layer, o->id[use]) || layer->slot_of[o->id[use]] >= 0)
            o->id[use] = DS4_EXPERT_ELSEWHERE; /* done */
    if (!o->decode)
        stream(o, layer, w, a);
    run_host(o, w, &a);
    a.part = o->dev_part;
    o->c.backend->moe_join(o->c.dev, &a);
}

/* ---- who is resident ---------------------------------------------------------------------------- */

static void move_in(struct ds4_offload *o, int32_t l, int32_t slot, int32_t e)
{
    const struct ds4_layer_weights *w = &o->c.weights->layer[l];
    struct layer *layer = &o->layer[l];

    copy_expert(o, &w->gate, slot, &w->host_gate, e);
    copy_expert(o, &w->up, slot, &w->host_up, e);
    copy_expert(o, &w->down, slot, &w->host_down, e);
    layer->slot_of[layer->expert_at[slot]] = -1;
    layer->expert_at[slot] = e;
    layer->slot_of[e] = slot;
    o->stats.moved++;
}

/* The layer's most used absent expert against its least used resident one. */
static void adapt_layer(struct ds4_offload *o, int32_t l)
{
    struct layer *layer = &o->layer[l];
    int32_t best = -1, worst = 0;

    for (int32_t e = 0; e < layer->n_expert; e++)
        if (layer->slot_of[e] < 0 && (best < 0 || layer->count[e] > layer->count[best]))
            best = e;
    for (int32_t i = 1; i < o->c.n_resident; i++)
        if (layer->count[layer->expert_at[i]] < layer->count[layer->expert_at[worst]])
            worst = i;
    if (best >= 0 && layer->count[best] >= layer->count[layer->expert_at[worst]] + WORTH_MORE)
        move_in(o, l, worst, best);
}

static void halve(struct ds4_offload *o)
{
    for (int32_t l = 0; l < o->c.weights->n_layer; l++)
        for (int32_t e = 0; o->layer[l].count != NULL && e < o->layer[l].n_expert; e++)
            o->layer[l].count[e] /= 2;
}

void ds4_offload_adapt(struct ds4_offload *o)
{
    if (!o->decode)
        return;
    if (++o->decode_steps % HALVE_EVERY == 0)
        halve(o);
    if (o->layer[o->next_layer].slot_of != NULL)
        adapt_layer(o, o->next_layer);
    o->next_layer = (o->next_layer + 1) % o->c.weights->n_layer;
}

void ds4_offload_stats(const struct ds4_offload *o, struct ds4_offload_stats *out)
{
    *out = o->stats;
}

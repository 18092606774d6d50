/* Loading one stage (before step 8 of the house list): file tensors -> struct ds4_stage_weights.
 *
 * Measuring and loading are one walk over the same list of tensors, so the plan cannot differ from what
 * is taken: a walk without an area adds up sizes, a walk with one copies.  The list below is the
 * catalogue of a DeepSeek V4 file in paper order.
 *
 * Names, shapes, types and the ids in hash tables have passed ds4_model_require before; what can still
 * fail here is reading. */
#include "worker/weights.h"

#include "common/log.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define TENSOR_ALIGN  256
#define STAGING_BYTES ((size_t)16 << 20)
#define PAGE_BYTES    4096

/* One walk.  area NULL: measure only. */
struct walk {
    const struct ds4_weights_request *rq;
    const struct ds4_backend *backend;
    struct ds4_device *dev;
    uint8_t *area;
    uint8_t *staging[2]; /* STAGING_BYTES host bytes each, for devices with their own memory */
    int turn;            /* the one to fill next; the other may still be on its way */
    struct ds4_weights_size used;
    size_t total_bytes;
    struct ds4_weights_progress progress;
    char prefix[32];             /* "blk.7." */
    enum ds4_tensor_class class; /* of the tensor at hand; DS4_N_CLASSES: a table of our own */
};

/* ---- single tensors ----------------------------------------------------------------------------- */

static const struct ds4_tensor_info *find(struct walk *k, const char *name, struct ds4_err *err)
{
    char full[DS4_TENSOR_NAME_BYTES];
    const struct ds4_tensor_info *info;

    snprintf(full, sizeof(full), "%s%s", k->prefix, name);
    info = ds4_weights_find(k->rq->file, full);
    if (info == NULL)
        ds4_fail(err, DS4_E_INVALID, "tensor %s is missing", full);
    else if (!info->usable)
        ds4_fail(err, DS4_E_INVALID, "tensor %s has GGUF type %" PRIu32 ", which is not supported",
                 full, info->gguf_type);
    else if (ds4_tensor_class_of(full, &k->class) != 0)
        k->class = DS4_N_CLASSES;
    return info != NULL && info->usable ? info : NULL;
}

static size_t align_up(size_t bytes)
{
    return (bytes + TENSOR_ALIGN - 1) / TENSOR_ALIGN * TENSOR_ALIGN;
}

static uint8_t *reserve(struct walk *k, size_t bytes)
{
    uint8_t *at = k->area == NULL ? NULL : k->area + k->used.device_bytes;

    bytes = align_up(bytes);
    k->used.device_bytes += bytes;
    k->used.class_bytes[k->class] += bytes;
    return at;
}

static void report(struct walk *k)
{
    if (k->area != NULL && k->progress.call != NULL)
        k->progress.call(k->progress.arg, (int64_t)(k->used.device_bytes + k->used.mapped_bytes),
                         (int64_t)k->total_bytes);
}

/* One buffer is filled from the file while the other travels: the slower of disk and link decides. */
static int copy_in(struct walk *k, const struct ds4_tensor_info *info, uint8_t *dst,
                   struct ds4_err *err)
{
    const struct ds4_synth_recipe *recipe = ds4_weights_recipe(k->rq->file, info);

    if (recipe != NULL) {
        k->backend->synth(k->dev, recipe, info->bytes / recipe->block_bytes, dst);
        k->backend->sync(k->dev);
        return 0;
    }
    if (k->backend->host_weights)
        return ds4_weights_read(k->rq->file, info, 0, (size_t)info->bytes, dst, err);
    for (uint64_t done = 0; done < info->bytes;) {
        size_t n =
            info->bytes - done < STAGING_BYTES ? (size_t)(info->bytes - done) : STAGING_BYTES;

        uint8_t *staging = k->staging[k->turn];

        if (ds4_weights_read(k->rq->file, info, done, n, staging, err) != 0)
            return -1;
        k->backend->sync(k->dev); /* the other buffer has arrived */
        k->backend->upload(k->dev, dst + done, staging, n);
        k->turn ^= 1;
        done += n;
    }
    return 0;
}

/* Asks the kernel to bring a mapped tensor in, so that the first request does not wait for the disk. */
static void will_need(const void *data, size_t bytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t from = (uintptr_t)data / page * page;

    madvise((void *)from, (uintptr_t)data + bytes - from, MADV_WILLNEED);
}

static int matrix(struct walk *k, const char *name, int64_t n_stack, int64_t n_row, int64_t n_col,
                  struct ds4_weight *w, struct ds4_err *err)
{
    const struct ds4_tensor_info *info = find(k, name, err);
    uint8_t *dst = NULL;
    bool in_place;

    if (info == NULL)
        return -1;
    in_place = k->rq->in_place && ds4_weights_recipe(k->rq->file, info) == NULL;
    *w = (struct ds4_weight){.dtype = info->dtype,
                             .n_stack = (int32_t)n_stack,
                             .n_row = (int32_t)n_row,
                             .n_col = (int32_t)n_col};
    if (ds4_dtype_row_bytes(info->dtype, n_col, &w->row_bytes, err) != 0)
        return ds4_err_wrap(err, "tensor %s", info->name);
    if (in_place) {
        k->used.mapped_bytes += (size_t)info->bytes;
        k->used.class_bytes[k->class] += (size_t)info->bytes;
    } else {
        dst = reserve(k, (size_t)info->bytes);
    }
    if (k->area == NULL)
        return 0;
    if (in_place) {
        w->data = ds4_weights_data(k->rq->file, info, err);
        if (w->data == NULL)
            return -1;
        will_need(w->data, (size_t)info->bytes);
    } else {
        if (copy_in(k, info, dst, err) != 0)
            return -1;
        w->data = dst;
    }
    report(k);
    return 0;
}

/* All experts into host memory. */
static int fill_host(struct walk *k, const struct ds4_tensor_info *info, uint8_t *dst,
                     struct ds4_err *err)
{
    const struct ds4_synth_recipe *recipe = ds4_weights_recipe(k->rq->file, info);

    if (recipe == NULL)
        return ds4_weights_read(k->rq->file, info, 0, (size_t)info->bytes, dst, err);
    k->rq->host->synth(k->rq->host_dev, recipe, info->bytes / recipe->block_bytes, dst);
    return 0;
}

/* A stack of n experts of which the device gets n_resident and the host all; *one is an expert's size. */
static int expert_stack(struct walk *k, const char *name, struct ds4_weight *w,
                        struct ds4_weight *host, size_t *one, struct ds4_err *err)
{
    const struct ds4_tensor_info *info = find(k, name, err);
    int32_t n_resident = k->rq->n_resident;
    uint8_t *dst, *at = NULL;

    if (info == NULL)
        return -1;
    host->dtype = info->dtype;
    if (ds4_dtype_row_bytes(info->dtype, host->n_col, &host->row_bytes, err) != 0)
        return ds4_err_wrap(err, "tensor %s", info->name);
    *w = *host;
    w->n_stack = n_resident;
    *one = (size_t)host->n_row * host->row_bytes;
    dst = reserve(k, (size_t)n_resident * *one);
    if (k->area != NULL)
        at = k->rq->host_area + k->used.host_bytes;
    k->used.host_bytes += align_up((size_t)info->bytes);
    if (k->area == NULL)
        return 0;
    if (fill_host(k, info, at, err) != 0)
        return -1;
    for (int32_t i = 0; i < n_resident; i++)
        k->backend->upload(k->dev, dst + (size_t)i * *one,
                           at + (size_t)ds4_weights_resident(i, n_resident, host->n_stack) * *one,
                           *one);
    k->backend->sync(k->dev);
    w->data = dst;
    host->data = at;
    report(k);
    return 0;
}

static int expert_stacks(struct walk *k, struct ds4_layer_weights *w, int32_t n,
                         struct ds4_err *err)
{
    const struct ds4_model_shape *m = k->rq->model;
    size_t gate, up, down, slab;

    if (k->rq->n_resident == 0 || k->rq->n_resident >= n) {
        if (matrix(k, "ffn_gate_exps.weight", n, m->d_expert, m->d_model, &w->gate, err) != 0 ||
            matrix(k, "ffn_up_exps.weight", n, m->d_expert, m->d_model, &w->up, err) != 0)
            return -1;
        return matrix(k, "ffn_down_exps.weight", n, m->d_model, m->d_expert, &w->down, err);
    }
    w->host_gate = (struct ds4_weight){.n_stack = n, .n_row = m->d_expert, .n_col = m->d_model};
    w->host_up = w->host_gate;
    w->host_down = (struct ds4_weight){.n_stack = n, .n_row = m->d_model, .n_col = m->d_expert};
    if (expert_stack(k, "ffn_gate_exps.weight", &w->gate, &w->host_gate, &gate, err) != 0 ||
        expert_stack(k, "ffn_up_exps.weight", &w->up, &w->host_up, &up, err) != 0 ||
        expert_stack(k, "ffn_down_exps.weight", &w->down, &w->host_down, &down, err) != 0)
        return -1;
    slab = align_up(gate) + align_up(up) + align_up(down);
    if (slab > k->used.slab_bytes)
        k->used.slab_bytes = slab;
    return 0;
}

static float scalar_at(enum ds4_dtype dtype, const uint8_t *raw, int64_t i)
{
    uint16_t half;
    float x;

    if (dtype == DS4_DTYPE_F32) {
        memcpy(&x, raw + 4 * i, sizeof(x));
        return x;
    }
    memcpy(&half, raw + 2 * i, sizeof(half));
    return dtype == DS4_DTYPE_F16 ? ds4_f32_from_f16(half) : ds4_f32_from_bf16(half);
}

/* A vector of n scalars as f32.  *v stays NULL while measuring. */
static int vector(struct walk *k, const char *name, int64_t n, const float **v, struct ds4_err *err)
{
    const struct ds4_tensor_info *info = find(k, name, err);
    uint8_t *dst;
    uint8_t *raw;
    float *host;
    int result = -1;

    if (info == NULL)
        return -1;
    if (info->dtype != DS4_DTYPE_F32 && info->dtype != DS4_DTYPE_F16 &&
        info->dtype != DS4_DTYPE_BF16)
        return ds4_fail(err, DS4_E_INVALID,
                        "tensor %s has type %s, a vector must be F32, F16 or BF16", info->name,
                        ds4_dtype_name(info->dtype));
    dst = reserve(k, (size_t)n * sizeof(float));
    if (k->area == NULL)
        return 0;
    raw = malloc((size_t)info->bytes);
    host = malloc((size_t)n * sizeof(float));
    if (raw == NULL || host == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory to read tensor %s", info->name);
        goto out;
    }
    if (ds4_weights_read(k->rq->file, info, 0, (size_t)info->bytes, raw, err) != 0)
        goto out;
    for (int64_t i = 0; i < n; i++) {
        host[i] = scalar_at(info->dtype, raw, i);
        if (!isfinite(host[i])) {
            ds4_fail(err, DS4_E_CORRUPT, "tensor %s element %" PRId64 " is not finite", info->name,
                     i);
            goto out;
        }
    }
    k->backend->upload(k->dev, dst, host, (size_t)n * sizeof(float));
    k->backend->sync(k->dev);
    *v = (const float *)dst;
    result = 0;
out:
    free(host);
    free(raw);
    return result;
}

/* Hash layers: the expert ids of every token, [n_vocab, n_used]. */
static int route_table(struct walk *k, const int32_t **table, struct ds4_err *err)
{
    const struct ds4_tensor_info *info = find(k, "ffn_gate_tid2eid.weight", err);
    uint8_t *dst;
    int32_t *host;
    int result = -1;

    if (info == NULL)
        return -1;
    dst = reserve(k, (size_t)info->bytes);
    if (k->area == NULL)
        return 0;
    host = malloc((size_t)info->bytes);
    if (host == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory to read tensor %s", info->name);
    if (ds4_weights_read(k->rq->file, info, 0, (size_t)info->bytes, host, err) != 0)
        goto out;
    k->backend->upload(k->dev, dst, host, (size_t)info->bytes);
    k->backend->sync(k->dev);
    *table = (const int32_t *)dst;
    report(k);
    result = 0;
out:
    free(host);
    return result;
}

/* ---- rotation ----------------------------------------------------------------------------------- */

/* Pair where a wavelength of the trained length makes `rotations` turns (YaRN). */
static double yarn_pair(const struct ds4_model_shape *m, double rotations)
{
    const double two_pi = 6.283185307179586;

    return m->d_rope * log(m->yarn_orig_tok / (two_pi * rotations)) /
           (2 * log((double)m->compress_rope_base));
}

/* Frequencies in the f32 steps of the checkpoint's code: 1 / base^(2i/d), then for layers with
 * compressed rows the YaRN blend of f / factor and f.  No magnitude factor anywhere (paper 3.4). */
static void rope_frequencies(const struct ds4_model_shape *m, bool yarn, float *freq)
{
    double base = (double)(yarn ? m->compress_rope_base : m->rope_base);
    double low = floor(yarn_pair(m, m->yarn_beta_fast));
    double high = ceil(yarn_pair(m, m->yarn_beta_slow));

    if (low < 0)
        low = 0;
    if (high > m->d_rope - 1)
        high = m->d_rope - 1;
    if (high <= low)
        high = low + 0.001;
    for (int32_t i = 0; i < m->d_rope / 2; i++) {
        float exponent = (float)(2 * i) / (float)m->d_rope;
        float power = (float)pow(base, (double)exponent);
        float f = 1.0f / power;
        float ramp = ((float)i - (float)low) / (float)(high - low);
        float keep;

        if (yarn && m->yarn_factor > 1) {
            keep = 1.0f - (ramp < 0 ? 0.0f : ramp > 1 ? 1.0f : ramp);
            f = f / m->yarn_factor * (1.0f - keep) + f * keep;
        }
        freq[i] = f;
    }
}

static int rope_table(struct walk *k, bool yarn, struct ds4_rope *rope, struct ds4_err *err)
{
    const struct ds4_model_shape *m = k->rq->model;
    size_t bytes = (size_t)(m->d_rope / 2) * sizeof(float);
    uint8_t *dst;
    float *host;

    k->class = DS4_N_CLASSES;
    dst = reserve(k, bytes);
    rope->d_rope = m->d_rope;
    if (k->area == NULL)
        return 0;
    host = malloc(bytes);
    if (host == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for the rotary table");
    rope_frequencies(m, yarn, host);
    k->backend->upload(k->dev, dst, host, bytes);
    k->backend->sync(k->dev);
    free(host);
    rope->freq = (const float *)dst;
    return 0;
}

/* ---- a layer, in paper order -------------------------------------------------------------------- */

static int hyper(struct walk *k, const char *fn, const char *base, const char *scale,
                 struct ds4_hyper_weights *w, struct ds4_err *err)
{
    const struct ds4_model_shape *m = k->rq->model;
    int64_t n_mix = (2 + (int64_t)m->n_hyper) * m->n_hyper;

    if (matrix(k, fn, 1, n_mix, (int64_t)m->n_hyper * m->d_model, &w->fn, err) != 0 ||
        vector(k, base, n_mix, &w->base, err) != 0 || vector(k, scale, 3, &w->scale, err) != 0)
        return -1;
    return 0;
}

static int attention(struct walk *k, struct ds4_layer_weights *w, struct ds4_err *err)
{
    const struct ds4_model_shape *m = k->rq->model;
    int64_t d_out = (int64_t)m->n_group * m->o_rank;
    int64_t d_heads = (int64_t)m->n_head * m->d_head;

    if (vector(k, "attn_norm.weight", m->d_model, &w->attention_norm, err) != 0 ||
        matrix(k, "attn_q_a.weight", 1, m->q_rank, m->d_model, &w->q_a, err) != 0 ||
        vector(k, "attn_q_a_norm.weight", m->q_rank, &w->q_norm, err) != 0 ||
        matrix(k, "attn_q_b.weight", 1, d_heads, m->q_rank, &w->q_b, err) != 0 ||
        matrix(k, "attn_kv.weight", 1, m->d_head, m->d_model, &w->kv, err) != 0 ||
        vector(k, "attn_kv_a_norm.weight", m->d_head, &w->kv_norm, err) != 0 ||
        vector(k, "attn_sinks.weight", m->n_head, &w->sink, err) != 0 ||
        matrix(k, "attn_output_a.weight", 1, d_out, d_heads / m->n_group, &w->out_a, err) != 0 ||
        matrix(k, "attn_output_b.weight", 1, m->d_model, d_out, &w->out_b, err) != 0)
        return -1;
    return rope_table(k, w->ratio > 0, &w->rope, err);
}

static int compressor(struct walk *k, const char *stem, int32_t ratio, int64_t width, int64_t d,
                      struct ds4_compressor_weights *w, struct ds4_err *err)
{
    const struct ds4_model_shape *m = k->rq->model;
    char name[4][48];
    static const char *const part[4] = {"kv", "gate", "ape", "norm"};

    for (int i = 0; i < 4; i++)
        snprintf(name[i], sizeof(name[i]), "%s_%s.weight", stem, part[i]);
    if (matrix(k, name[0], 1, width, m->d_model, &w->kv, err) != 0 ||
        matrix(k, name[1], 1, width, m->d_model, &w->gate, err) != 0 ||
        matrix(k, name[2], 1, ratio, width, &w->ape, err) != 0 ||
        vector(k, name[3], d, &w->norm, err) != 0)
        return -1;
    return 0;
}

static int indexer(struct walk *k, struct ds4_layer_weights *w, int64_t n_half, struct ds4_err *err)
{
    const struct ds4_model_shape *m = k->rq->model;

    if (matrix(k, "indexer.attn_q_b.weight", 1, (int64_t)m->n_index_head * m->d_index, m->q_rank,
               &w->index_q, err) != 0 ||
        matrix(k, "indexer.proj.weight", 1, m->n_index_head, m->d_model, &w->index_head, err) != 0)
        return -1;
    return compressor(k, "indexer_compressor", w->ratio, n_half * m->d_index, m->d_index,
                      &w->index_compressor, err);
}

static int experts(struct walk *k, struct ds4_layer_weights *w, struct ds4_err *err)
{
    const struct ds4_model_shape *m = k->rq->model;
    int64_t n = m->n_expert[w->id];

    if (vector(k, "ffn_norm.weight", m->d_model, &w->experts_norm, err) != 0 ||
        matrix(k, "ffn_gate_inp.weight", 1, n, m->d_model, &w->router, err) != 0 ||
        expert_stacks(k, w, m->n_expert[w->id], err) != 0 ||
        matrix(k, "ffn_gate_shexp.weight", 1, m->d_expert, m->d_model, &w->shared_gate, err) != 0 ||
        matrix(k, "ffn_up_shexp.weight", 1, m->d_expert, m->d_model, &w->shared_up, err) != 0 ||
        matrix(k, "ffn_down_shexp.weight", 1, m->d_model, m->d_expert, &w->shared_down, err) != 0)
        return -1;
    w->clamp = m->clamp[w->id];
    w->shared_clamp = m->clamp_shared[w->id];
    if (w->id < m->n_hash_layer)
        return route_table(k, &w->route_table, err);
    return vector(k, "exp_probs_b.bias", n, &w->route_bias, err);
}

static int layer(struct walk *k, int32_t id, struct ds4_layer_weights *w, struct ds4_err *err)
{
    const struct ds4_model_shape *m = k->rq->model;
    int64_t n_half = ds4_model_compressor_width(m->ratio[id]);

    snprintf(k->prefix, sizeof(k->prefix), "blk.%" PRId32 ".", id);
    w->id = id;
    w->ratio = m->ratio[id];
    w->indexer = ds4_model_layer_kind(m, id) == DS4_LAYER_CSA;
    if (hyper(k, "hc_attn_fn.weight", "hc_attn_base.weight", "hc_attn_scale.weight",
              &w->hyper_attention, err) != 0 ||
        attention(k, w, err) != 0)
        return -1;
    if (w->ratio > 0 && compressor(k, "attn_compressor", w->ratio, n_half * m->d_head, m->d_head,
                                   &w->compressor, err) != 0)
        return -1;
    if (w->indexer && indexer(k, w, n_half, err) != 0)
        return -1;
    if (hyper(k, "hc_ffn_fn.weight", "hc_ffn_base.weight", "hc_ffn_scale.weight", &w->hyper_experts,
              err) != 0)
        return -1;
    return experts(k, w, err);
}

static int head(struct walk *k, struct ds4_head_weights *w, struct ds4_err *err)
{
    const struct ds4_model_shape *m = k->rq->model;

    if (matrix(k, "output_hc_fn.weight", 1, m->n_hyper, (int64_t)m->n_hyper * m->d_model, &w->fn,
               err) != 0 ||
        vector(k, "output_hc_base.weight", m->n_hyper, &w->base, err) != 0 ||
        vector(k, "output_hc_scale.weight", 1, &w->scale, err) != 0 ||
        vector(k, "output_norm.weight", m->d_model, &w->norm, err) != 0 ||
        matrix(k, "output.weight", 1, m->n_vocab, m->d_model, &w->out, err) != 0)
        return -1;
    return 0;
}

static int walk_stage(struct walk *k, struct ds4_stage_weights *w, struct ds4_err *err)
{
    const struct ds4_weights_request *rq = k->rq;

    k->prefix[0] = '\0';
    if (rq->part.embed && matrix(k, "token_embd.weight", 1, rq->model->n_vocab, rq->model->d_model,
                                 &w->embed, err) != 0)
        return -1;
    for (int32_t id = rq->part.first_layer; id < rq->part.end_layer; id++)
        if (layer(k, id, &w->layer[id - rq->part.first_layer], err) != 0)
            return -1;
    k->prefix[0] = '\0';
    if (rq->part.head && head(k, &w->head, err) != 0)
        return -1;
    report(k);
    return 0;
}

/* ---- public ------------------------------------------------------------------------------------- */

static int alloc_layers(struct ds4_stage_weights *w, const struct ds4_weights_request *rq,
                        struct ds4_err *err)
{
    memset(w, 0, sizeof(*w));
    w->n_layer = rq->part.end_layer - rq->part.first_layer;
    w->layer = calloc((size_t)w->n_layer, sizeof(*w->layer));
    if (w->layer == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for the tables of %d layers", w->n_layer);
    return 0;
}

int ds4_stage_weights_measure(const struct ds4_weights_request *request,
                              struct ds4_weights_size *size, struct ds4_err *err)
{
    struct walk k = {.rq = request};
    struct ds4_stage_weights w;
    int result;

    if (alloc_layers(&w, request, err) != 0)
        return -1;
    result = walk_stage(&k, &w, err);
    *size = k.used;
    ds4_stage_weights_deinit(&w);
    return result;
}

int ds4_stage_weights_load(struct ds4_stage_weights *w, const struct ds4_weights_request *request,
                           const struct ds4_weights_size *size, const struct ds4_backend *backend,
                           struct ds4_device *dev, void *area,
                           const struct ds4_weights_progress *progress, struct ds4_err *err)
{
    struct walk k = {.rq = request,
                     .backend = backend,
                     .dev = dev,
                     .area = area,
                     .total_bytes = size->device_bytes + size->mapped_bytes,
                     .progress = *progress};
    int result;

    if (alloc_layers(w, request, err) != 0)
        return -1;
    k.staging[0] = aligned_alloc(PAGE_BYTES, 2 * STAGING_BYTES);
    if (k.staging[0] == NULL) {
        ds4_stage_weights_deinit(w);
        return ds4_fail(err, DS4_E_NOMEM, "no memory for the loading buffers");
    }
    k.staging[1] = k.staging[0] + STAGING_BYTES;
    backend->pin(dev, k.staging[0], 2 * STAGING_BYTES);
    result = walk_stage(&k, w, err);
    backend->sync(dev);
    backend->unpin(dev, k.staging[0]);
    free(k.staging[0]);
    if (result != 0)
        ds4_stage_weights_deinit(w);
    return result;
}

void ds4_stage_weights_deinit(struct ds4_stage_weights *w)
{
    free(w->layer);
    memset(w, 0, sizeof(*w));
}

/* What ranges of layers cost, and the best cut of a model over cards.
 *
 * What a range needs does not depend on the card, so it is asked of ds4_plan_make once per range and
 * context; cutting is then arithmetic: best[s][l], the best way to give layers [0, l) to the first s
 * cards, from best[s - 1][.].  The best has the fastest slowest stage; among equals the fullest card
 * has the most left. */
#include "worker/rig_cut.h"

#include "worker/offload.h"

#include <stdlib.h>

#define LEAST_CONTEXT DS4_BLOCK_TOK
#define MIB           ((size_t)1 << 20)

/* ---- what ranges of layers cost ----------------------------------------------------------------- */

/* Best way to give layers [0, l) to the first s cards. */
struct way {
    double worst;     /* seconds of the slowest stage; < 0: there is none */
    size_t least_gap; /* bytes left on the fullest card */
    int32_t from;     /* where the last stage begins */
};

struct ds4_cut {
    const struct ds4_weights_file *file;
    const struct ds4_model_shape *model;
    const struct ds4_stage_config *config;
    const struct ds4_backend *cuda;  /* NULL: not built in */
    const struct ds4_pipe_ops *pipe; /* between cards; NULL: there is only one */
    int32_t n_card;
    struct ds4_weights_size layer[DS4_MAX_LAYERS];
    struct ds4_weights_size least[DS4_MAX_LAYERS]; /* with as few experts as offload allows */
    size_t expert_read[DS4_MAX_LAYERS + 1]; /* of one token's reads, those of routed experts */
    bool offloads;                          /* `need` is of that kind */
    struct ds4_weights_size embed;
    struct ds4_weights_size head;
    size_t read[DS4_MAX_LAYERS + 1]; /* bytes of one token in layers [0, l) */
    size_t head_read;
    int32_t model_tok;
    size_t need[DS4_MAX_LAYERS][DS4_MAX_LAYERS + 1]; /* [first][end], at a context */
    struct way best[DS4_MAX_STAGES + 1][DS4_MAX_LAYERS + 1];
};

/* An upper bound for builds without the CUDA backend, which alone knows: rows packed as f32, the rooms of
 * its matrix products, and an expert chunk's middle values. */
static size_t guess_scratch(const struct ds4_limits *l)
{
    size_t n = (size_t)l->max_tok;
    size_t products = n * (size_t)l->max_cols * 5;
    size_t experts = n * (size_t)l->n_used * ((size_t)l->d_expert * 12 + (size_t)l->d_model * 4);
    size_t index = (size_t)l->max_context * 16;
    size_t most = products > experts ? products : experts;

    return (most > index ? most : index) + 128 * MIB;
}

static size_t scratch_of(const void *arg, const struct ds4_limits *limits)
{
    const struct ds4_cut *c = arg;

    return c->cuda != NULL ? c->cuda->scratch_bytes(NULL, limits) : guess_scratch(limits);
}

static void add_size(struct ds4_weights_size *sum, const struct ds4_weights_size *add)
{
    sum->device_bytes += add->device_bytes;
    sum->mapped_bytes += add->mapped_bytes;
    sum->host_bytes += add->host_bytes;
    if (add->slab_bytes > sum->slab_bytes)
        sum->slab_bytes = add->slab_bytes;
    for (int i = 0; i <= DS4_N_CLASSES; i++)
        sum->class_bytes[i] += add->class_bytes[i];
}

/* Tensors are placed one after the other at fixed alignment, so parts add up. */
static struct ds4_weights_size sum_part(const struct ds4_cut *c, const struct ds4_model_part *part,
                                        const struct ds4_weights_size *layer)
{
    struct ds4_weights_size sum = {0};

    if (part->embed)
        add_size(&sum, &c->embed);
    for (int32_t l = part->first_layer; l < part->end_layer; l++)
        add_size(&sum, &layer[l]);
    if (part->head)
        add_size(&sum, &c->head);
    return sum;
}

struct ds4_weights_size ds4_cut_size(const struct ds4_cut *c, const struct ds4_model_part *part)
{
    return sum_part(c, part, c->layer);
}

static struct ds4_model_part part_of(const struct ds4_cut *c, int32_t first, int32_t end)
{
    return (struct ds4_model_part){first, end, first == 0, end == c->model->n_layer};
}

/* Cache bytes one query reads in a layer at a context of `tok`. */
static size_t cache_read(const struct ds4_model_shape *m, const struct ds4_plan_request *rq,
                         int32_t l, int32_t tok)
{
    enum ds4_row_format rows = rq->quant_sim ? DS4_ROW_FP8 : rq->plain_format;
    enum ds4_row_format keys = rq->quant_sim ? DS4_ROW_FP4 : rq->plain_format;
    size_t row = ds4_row_bytes(rows, m->d_head, m->d_rope);
    size_t n = (size_t)(tok < m->window_tok ? tok : m->window_tok);
    size_t compressed = m->ratio[l] > 0 ? (size_t)(tok / m->ratio[l]) : 0;

    if (ds4_model_layer_kind(m, l) != DS4_LAYER_CSA)
        return (n + compressed) * row;
    if (compressed > (size_t)m->index_topk)
        n += (size_t)m->index_topk;
    else
        n += compressed;
    return n * row + compressed * ds4_row_bytes(keys, m->d_index, 0);
}

/* Bytes of the weights that one token reads: all but the experts it does not use, and of the tables
 * only a row. */
static size_t weights_read(const struct ds4_weights_size *size, int32_t n_used, int32_t n_expert)
{
    size_t experts = size->class_bytes[DS4_CLASS_GATE_UP] + size->class_bytes[DS4_CLASS_DOWN];
    size_t dense = size->device_bytes + size->mapped_bytes - experts -
                   size->class_bytes[DS4_CLASS_HASH] - size->class_bytes[DS4_CLASS_EMBED];

    return dense + experts / (size_t)n_expert * (size_t)n_used;
}

static int measure(const struct ds4_cut *c, const struct ds4_model_part *part, int32_t n_resident,
                   struct ds4_weights_size *size, struct ds4_err *err)
{
    const struct ds4_weights_request rq = {
        .model = c->model, .file = c->file, .part = *part, .n_resident = n_resident};

    return ds4_stage_weights_measure(&rq, size, err);
}

static int measure_all(struct ds4_cut *c, struct ds4_err *err)
{
    const struct ds4_model_shape *m = c->model;
    struct ds4_plan_request rq;
    struct ds4_model_part part = {.embed = true};

    ds4_plan_request_of(c->config, m, true, &rq);
    if (measure(c, &part, 0, &c->embed, err) != 0)
        return -1;
    part = (struct ds4_model_part){.head = true};
    if (measure(c, &part, 0, &c->head, err) != 0)
        return -1;
    c->head_read = weights_read(&c->head, 1, 1);
    for (int32_t l = 0; l < m->n_layer; l++) {
        part = (struct ds4_model_part){.first_layer = l, .end_layer = l + 1};
        if (measure(c, &part, 0, &c->layer[l], err) != 0 ||
            measure(c, &part, m->n_expert_used, &c->least[l], err) != 0)
            return -1;
        c->expert_read[l + 1] =
            c->expert_read[l] +
            (c->layer[l].class_bytes[DS4_CLASS_GATE_UP] + c->layer[l].class_bytes[DS4_CLASS_DOWN]) /
                (size_t)m->n_expert[l] * (size_t)m->n_expert_used;
        c->read[l + 1] = c->read[l] + weights_read(&c->layer[l], m->n_expert_used, m->n_expert[l]) +
                         cache_read(m, &rq, l, c->model_tok);
    }
    return 0;
}

struct ds4_cut *ds4_cut_new(const struct ds4_weights_file *file,
                            const struct ds4_model_shape *model,
                            const struct ds4_stage_config *config, int32_t n_card,
                            struct ds4_err *err)
{
    struct ds4_cut *c = calloc(1, sizeof(*c));

    if (c == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory to plan a rig");
        return NULL;
    }
    c->file = file;
    c->model = model;
    c->config = config;
    c->cuda = ds4_backend_find("cuda");
    c->n_card = n_card;
    c->pipe = ds4_pipe_find("nccl"); /* what cards with a stage each use, where it is built in */
    if (c->pipe == NULL)
        c->pipe = config->pipe;
    c->model_tok = DS4_CUT_MODEL_TOK < model->context_tok ? DS4_CUT_MODEL_TOK : model->context_tok;
    if (config->context_tok > 0 && config->context_tok < c->model_tok)
        c->model_tok = config->context_tok;
    if (measure_all(c, err) != 0) {
        free(c);
        return NULL;
    }
    return c;
}

size_t ds4_cut_read_bytes(const struct ds4_cut *c, int32_t first, int32_t end)
{
    return c->read[end] - c->read[first] + (end == c->model->n_layer ? c->head_read : 0);
}

/* What the pipe takes on the card of a stage: it tells the first and the last from those between. */
static size_t pipe_bytes(const struct ds4_cut *c, const struct ds4_plan_request *rq)
{
    const struct ds4_pipe_config pipe = {
        .stage = rq->part.embed  ? 0
                 : rq->part.head ? c->n_card - 1
                                 : 1,
        .n_stage = c->n_card,
        .row_bytes = ds4_plan_row_bytes(c->model, rq->stream),
        .max_step_tok = rq->max_step_tok,
        .max_seqs = rq->max_seqs,
        .depth = c->config->depth > c->n_card + 1 ? c->config->depth : c->n_card + 1,
    };

    return c->pipe == NULL ? 0 : c->pipe->area_bytes(&pipe);
}

size_t ds4_cut_expert_bytes(const struct ds4_cut *c, int32_t first, int32_t end)
{
    return c->expert_read[end] - c->expert_read[first];
}

struct measure_arg {
    const struct ds4_cut *c;
    struct ds4_model_part part;
};

/* The two kinds that a need table asks for are known; others are walked. */
static int measure_part(const void *arg, int32_t n_resident, struct ds4_weights_size *size,
                        struct ds4_err *err)
{
    const struct measure_arg *m = arg;

    if (n_resident == 0)
        *size = sum_part(m->c, &m->part, m->c->layer);
    else if (n_resident == m->c->model->n_expert_used)
        *size = sum_part(m->c, &m->part, m->c->least);
    else
        return measure(m->c, &m->part, n_resident, size, err);
    return 0;
}

static void fill_request(const struct ds4_cut *c, const struct ds4_model_part *part,
                         size_t total_bytes, size_t free_bytes, struct ds4_plan_request *rq)
{
    ds4_plan_request_of(c->config, c->model, true, rq);
    rq->part = *part;
    rq->pipe_bytes = pipe_bytes(c, rq);
    rq->total_bytes = total_bytes;
    rq->free_bytes = free_bytes;
    rq->scratch_bytes = scratch_of;
    rq->scratch_arg = c;
}

/* One stage: what ds4_stage_new would decide on a card with so much memory. */
int ds4_cut_plan(const struct ds4_cut *c, const struct ds4_model_part *part, size_t total_bytes,
                 size_t free_bytes, struct ds4_plan *plan, struct ds4_weights_size *size,
                 struct ds4_err *err)
{
    const struct measure_arg arg = {c, *part};
    struct ds4_plan_request rq;

    fill_request(c, part, total_bytes, free_bytes, &rq);
    return ds4_plan_fit(plan, &rq, c->config->offload, measure_part, &arg, size, err);
}

/* One range: with one sequence of context_tok, or what offload wants at least. */
static int need_of(const struct ds4_cut *c, const struct ds4_model_part *part, int32_t context_tok,
                   size_t *need, struct ds4_err *err)
{
    const struct ds4_weights_size size = sum_part(c, part, c->offloads ? c->least : c->layer);
    int32_t blocks = ds4_plan_seq_blocks(context_tok);
    struct ds4_plan_request rq;
    struct ds4_plan plan;

    fill_request(c, part, SIZE_MAX / 2, SIZE_MAX / 2, &rq);
    rq.context_tok = context_tok;
    if (c->offloads) {
        blocks *= c->config->max_seqs;
        rq.offload_bytes =
            ds4_offload_device_bytes(c->model, c->config->max_step_tok, size.slab_bytes);
    }
    rq.n_blocks = c->config->n_blocks > blocks ? c->config->n_blocks : blocks;
    rq.weights_device_bytes = size.device_bytes;
    rq.weights_mapped_bytes = size.mapped_bytes;
    if (ds4_plan_make(&plan, &rq, err) != 0)
        return -1;
    *need = ds4_plan_total(&plan) + ds4_plan_slack(&plan);
    return 0;
}

int ds4_cut_at(struct ds4_cut *c, int32_t context_tok, bool offloads, struct ds4_err *err)
{
    c->offloads = offloads;
    for (int32_t first = 0; first < c->model->n_layer; first++) {
        for (int32_t end = first + 1; end <= c->model->n_layer; end++) {
            const struct ds4_model_part part = part_of(c, first, end);

            if (need_of(c, &part, context_tok, &c->need[first][end], err) != 0)
                return -1;
        }
    }
    return 0;
}

/* ---- cutting ------------------------------------------------------------------------------------ */

static bool better(const struct way *a, const struct way *b)
{
    if (b->worst < 0 || a->worst < b->worst)
        return true;
    return a->worst <= b->worst && a->least_gap > b->least_gap;
}

/* The best cut of layers [0, end) whose last stage is on card s - 1. */
static struct way best_way(const struct ds4_cut *c, const struct ds4_card *card, int32_t s,
                           int32_t end)
{
    size_t usable = ds4_card_usable(&card[s - 1]);
    struct way best = {.worst = -1};

    for (int32_t first = s - 1; first < end; first++) {
        const struct way *before = &c->best[s - 1][first];
        double seconds = (double)ds4_cut_read_bytes(c, first, end) / (card[s - 1].gb_per_s * 1e9);
        size_t need = c->need[first][end];
        struct way way = {.from = first};

        if (before->worst < 0 || need > usable)
            continue;
        way.worst = seconds > before->worst ? seconds : before->worst;
        way.least_gap = usable - need < before->least_gap ? usable - need : before->least_gap;
        if (better(&way, &best))
            best = way;
    }
    return best;
}

/* Cuts the model over the cards at the context of `need`.  False: it does not fit. */
bool ds4_cut_layers(struct ds4_cut *c, const struct ds4_card *card, int32_t n_card,
                    struct ds4_partition *out)
{
    int32_t n = c->model->n_layer;
    int32_t end = n;

    if (n_card > n)
        return false;
    for (int32_t l = 0; l <= n; l++)
        c->best[0][l] = (struct way){.worst = l == 0 ? 0 : -1, .least_gap = SIZE_MAX};
    for (int32_t s = 1; s <= n_card; s++) {
        for (int32_t l = 0; l <= n; l++) {
            c->best[s][l].worst = -1;
            if (l >= s && l <= n - (n_card - s))
                c->best[s][l] = best_way(c, card, s, l);
        }
    }
    if (c->best[n_card][n].worst < 0)
        return false;
    out->n_stage = n_card;
    for (int32_t s = n_card; s > 0; s--) {
        out->n_layer[s - 1] = end - c->best[s][end].from;
        end = c->best[s][end].from;
    }
    return true;
}

/* Whole blocks, half as much each time. */
int32_t ds4_cut_half(int32_t context_tok)
{
    return context_tok / 2 / DS4_BLOCK_TOK * DS4_BLOCK_TOK;
}

/* The longest context from `context_tok` down, halved each time, at which a cut exists; 0: none. */
int32_t ds4_cut_find(struct ds4_cut *c, const struct ds4_card *card, int32_t n_card,
                     int32_t context_tok, struct ds4_partition *out, struct ds4_err *err)
{
    for (; context_tok >= LEAST_CONTEXT; context_tok = ds4_cut_half(context_tok)) {
        if (ds4_cut_at(c, context_tok, false, err) != 0)
            return -1;
        if (ds4_cut_layers(c, card, n_card, out))
            return context_tok;
    }
    return 0;
}

/* With a context in the settings only that one will do.  > 0: cut; 0: none fits; -1: error. */
int32_t ds4_cut_offload(struct ds4_cut *c, const struct ds4_card *card, int32_t n_card,
                        struct ds4_partition *out, struct ds4_err *err)
{
    int32_t context = c->config->context_tok;

    if (context == 0)
        context = c->model->context_tok < DS4_PLAN_OFFLOAD_TOK ? c->model->context_tok
                                                               : DS4_PLAN_OFFLOAD_TOK;
    if (ds4_cut_at(c, context, true, err) != 0)
        return -1;
    return ds4_cut_layers(c, card, n_card, out) ? context : 0;
}

int32_t ds4_cut_choose(struct ds4_cut *c, const struct ds4_card *card, int32_t n_card,
                       struct ds4_partition *out, struct ds4_err *err)
{
    int32_t context = c->config->context_tok;

    if (context == 0)
        context = ds4_cut_find(c, card, n_card, c->model->context_tok, out, err);
    else if (ds4_cut_at(c, context, false, err) != 0)
        context = -1;
    else if (!ds4_cut_layers(c, card, n_card, out))
        context = 0;
    if (context == 0 && c->config->offload)
        return ds4_cut_offload(c, card, n_card, out, err);
    return context;
}

void ds4_cut_free(struct ds4_cut *c)
{
    free(c);
}

const struct ds4_model_shape *ds4_cut_model(const struct ds4_cut *c)
{
    return c->model;
}

const struct ds4_stage_config *ds4_cut_config(const struct ds4_cut *c)
{
    return c->config;
}

bool ds4_cut_guesses(const struct ds4_cut *c)
{
    return c->cuda == NULL;
}

int32_t ds4_cut_model_tok(const struct ds4_cut *c)
{
    return c->model_tok;
}

/* Cutting a model for a list of cards (before step 8 of the house list; --plan, and the start when the
 * settings name cards but no partition).
 *
 * What a range of layers needs does not depend on the card, so it is asked of ds4_plan_make once per
 * range; cutting is then arithmetic: best[s][l], the best way to give layers [0, l) to the first s
 * cards, from best[s - 1][.].  A context that the settings leave open is halved from the model's until a
 * cut exists.
 *
 * Invariant: whatever is called fitting went through ds4_plan_make with that card's memory. */
#include "worker/rig.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CARD_MAX_GIB   4096
#define CONTEXT_BYTES  ((size_t)512 << 20) /* of the CUDA driver, per process and card */
#define LEAST_CONTEXT  DS4_BLOCK_TOK
#define ADVICE_CONTEXT 8192 /* what "would fit" must at least hold */
#define GIB            ((size_t)1 << 30)
#define MIB            ((size_t)1 << 20)

/* ---- cards -------------------------------------------------------------------------------------- */

/* Sustained reads by size.  8, 32, 64: the 4,096-bit mining card, 10 and 40: the 5,120-bit one at its
 * slower memory clock, as measured by those who run them; larger ones at about 90 % of the data sheet. */
static const struct {
    int32_t gib;
    double gb_per_s;
} classes[] = {{8, 1500},  {10, 1400}, {32, 1500}, {40, 1400},
               {64, 1500}, {80, 1850}, {96, 3000}, {141, 4200}};

#define N_CLASS ((int32_t)(sizeof(classes) / sizeof(classes[0])))

static double class_rate(int32_t gib)
{
    int32_t i = 0;

    while (i < N_CLASS - 1 && gib > classes[i].gib)
        i++;
    return classes[i].gb_per_s;
}

static int parse_card(const char *text, char **end, struct ds4_card *out)
{
    long gib = strtol(text, end, 10);

    if (*end == text || gib < 1 || gib > CARD_MAX_GIB)
        return -1;
    out->gib = (int32_t)gib;
    out->gb_per_s = class_rate(out->gib);
    if (**end == '@') {
        text = *end + 1;
        out->gb_per_s = strtod(text, end);
        if (*end == text || !(out->gb_per_s >= 1 && out->gb_per_s <= 1e6))
            return -1;
    }
    return 0;
}

int32_t ds4_cards_parse(const char *text, struct ds4_card *out, struct ds4_err *err)
{
    const char *p = text;
    char *end = NULL;
    int32_t n = 0;

    for (;;) {
        if (n == DS4_MAX_STAGES)
            return ds4_fail(err, DS4_E_INVALID, "more than %d cards", DS4_MAX_STAGES);
        if (parse_card(p, &end, &out[n++]) != 0 || (*end != ',' && *end != '\0'))
            return ds4_fail(err, DS4_E_INVALID,
                            "cards \"%.64s\" must be sizes in GiB like 8,8,10,80 or 80@3350 with "
                            "the read rate in GB/s",
                            text);
        if (*end == '\0')
            return n;
        p = end + 1;
    }
}

size_t ds4_card_usable_bytes(size_t total_bytes)
{
    return total_bytes > CONTEXT_BYTES ? total_bytes - CONTEXT_BYTES : 0;
}

static size_t card_usable(const struct ds4_card *card)
{
    return ds4_card_usable_bytes((size_t)card->gib * GIB);
}

/* ---- what ranges of layers cost ----------------------------------------------------------------- */

/* Best way to give layers [0, l) to the first s cards. */
struct cut {
    double worst;     /* seconds of the slowest stage; < 0: there is none */
    size_t least_gap; /* bytes left on the fullest card */
    int32_t from;     /* where the last stage begins */
};

struct costs {
    const struct ds4_weights_file *file;
    const struct ds4_model_shape *model;
    const struct ds4_stage_config *config;
    const struct ds4_backend *cuda;  /* NULL: not built in */
    const struct ds4_pipe_ops *pipe; /* between cards; NULL: there is only one */
    int32_t n_card;
    struct ds4_weights_size layer[DS4_MAX_LAYERS];
    struct ds4_weights_size embed;
    struct ds4_weights_size head;
    size_t read[DS4_MAX_LAYERS + 1]; /* bytes of one token in layers [0, l) */
    size_t head_read;
    int32_t model_tok;
    size_t need[DS4_MAX_LAYERS][DS4_MAX_LAYERS + 1]; /* [first][end], at a context */
    struct cut best[DS4_MAX_STAGES + 1][DS4_MAX_LAYERS + 1];
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
    const struct costs *c = arg;

    return c->cuda != NULL ? c->cuda->scratch_bytes(NULL, limits) : guess_scratch(limits);
}

static void add_size(struct ds4_weights_size *sum, const struct ds4_weights_size *add)
{
    sum->device_bytes += add->device_bytes;
    sum->mapped_bytes += add->mapped_bytes;
    for (int i = 0; i <= DS4_N_CLASSES; i++)
        sum->class_bytes[i] += add->class_bytes[i];
}

/* Tensors are placed one after the other at fixed alignment, so parts add up. */
static struct ds4_weights_size part_size(const struct costs *c, const struct ds4_model_part *part)
{
    struct ds4_weights_size sum = {0};

    if (part->embed)
        add_size(&sum, &c->embed);
    for (int32_t l = part->first_layer; l < part->end_layer; l++)
        add_size(&sum, &c->layer[l]);
    if (part->head)
        add_size(&sum, &c->head);
    return sum;
}

static struct ds4_model_part part_of(const struct costs *c, int32_t first, int32_t end)
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

static int measure(struct costs *c, const struct ds4_model_part *part,
                   struct ds4_weights_size *size, struct ds4_err *err)
{
    const struct ds4_weights_request rq = {.model = c->model, .file = c->file, .part = *part};

    return ds4_stage_weights_measure(&rq, size, err);
}

static int measure_all(struct costs *c, struct ds4_err *err)
{
    const struct ds4_model_shape *m = c->model;
    struct ds4_plan_request rq;
    struct ds4_model_part part = {.embed = true};

    ds4_plan_request_of(c->config, m, true, &rq);
    if (measure(c, &part, &c->embed, err) != 0)
        return -1;
    part = (struct ds4_model_part){.head = true};
    if (measure(c, &part, &c->head, err) != 0)
        return -1;
    c->head_read = weights_read(&c->head, 1, 1);
    for (int32_t l = 0; l < m->n_layer; l++) {
        part = (struct ds4_model_part){.first_layer = l, .end_layer = l + 1};
        if (measure(c, &part, &c->layer[l], err) != 0)
            return -1;
        c->read[l + 1] = c->read[l] + weights_read(&c->layer[l], m->n_expert_used, m->n_expert[l]) +
                         cache_read(m, &rq, l, c->model_tok);
    }
    return 0;
}

static struct costs *costs_new(const struct ds4_weights_file *file,
                               const struct ds4_model_shape *model,
                               const struct ds4_stage_config *config, int32_t n_card,
                               struct ds4_err *err)
{
    struct costs *c = calloc(1, sizeof(*c));

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
    c->model_tok = DS4_RIG_MODEL_TOK < model->context_tok ? DS4_RIG_MODEL_TOK : model->context_tok;
    if (config->context_tok > 0 && config->context_tok < c->model_tok)
        c->model_tok = config->context_tok;
    if (measure_all(c, err) != 0) {
        free(c);
        return NULL;
    }
    return c;
}

static size_t read_bytes(const struct costs *c, int32_t first, int32_t end)
{
    return c->read[end] - c->read[first] + (end == c->model->n_layer ? c->head_read : 0);
}

/* What the pipe takes on the card of a stage: it tells the first and the last from those between. */
static size_t pipe_bytes(const struct costs *c, const struct ds4_plan_request *rq)
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

/* One stage: what ds4_stage_new would decide on a card with so much memory. */
static int plan_part(const struct costs *c, const struct ds4_model_part *part, size_t total_bytes,
                     size_t free_bytes, int32_t context_tok, int32_t n_blocks,
                     struct ds4_plan *plan, struct ds4_err *err)
{
    struct ds4_weights_size size = part_size(c, part);
    struct ds4_plan_request rq;

    ds4_plan_request_of(c->config, c->model, true, &rq);
    rq.part = *part;
    rq.context_tok = context_tok;
    rq.n_blocks = n_blocks;
    rq.weights_device_bytes = size.device_bytes;
    rq.weights_mapped_bytes = size.mapped_bytes;
    rq.pipe_bytes = pipe_bytes(c, &rq);
    rq.total_bytes = total_bytes;
    rq.free_bytes = free_bytes;
    rq.scratch_bytes = scratch_of;
    rq.scratch_arg = c;
    return ds4_plan_make(plan, &rq, err);
}

/* need[first][end]: bytes of every range with one sequence of context_tok, spare included. */
static int fill_need(struct costs *c, int32_t context_tok, struct ds4_err *err)
{
    int32_t blocks = ds4_plan_seq_blocks(context_tok);
    struct ds4_plan plan;

    if (c->config->n_blocks > blocks)
        blocks = c->config->n_blocks;
    for (int32_t first = 0; first < c->model->n_layer; first++) {
        for (int32_t end = first + 1; end <= c->model->n_layer; end++) {
            const struct ds4_model_part part = part_of(c, first, end);

            if (plan_part(c, &part, SIZE_MAX / 2, SIZE_MAX / 2, context_tok, blocks, &plan, err) !=
                0)
                return -1;
            c->need[first][end] = ds4_plan_total(&plan) + ds4_plan_slack(&plan);
        }
    }
    return 0;
}

/* ---- cutting ------------------------------------------------------------------------------------ */

static bool better(const struct cut *a, const struct cut *b)
{
    if (b->worst < 0 || a->worst < b->worst)
        return true;
    return a->worst <= b->worst && a->least_gap > b->least_gap;
}

/* The best cut of layers [0, end) whose last stage is on card s - 1. */
static struct cut best_cut(const struct costs *c, const struct ds4_card *card, int32_t s,
                           int32_t end)
{
    size_t usable = card_usable(&card[s - 1]);
    struct cut best = {.worst = -1};

    for (int32_t first = s - 1; first < end; first++) {
        const struct cut *before = &c->best[s - 1][first];
        double seconds = (double)read_bytes(c, first, end) / (card[s - 1].gb_per_s * 1e9);
        size_t need = c->need[first][end];
        struct cut cut = {.from = first};

        if (before->worst < 0 || need > usable)
            continue;
        cut.worst = seconds > before->worst ? seconds : before->worst;
        cut.least_gap = usable - need < before->least_gap ? usable - need : before->least_gap;
        if (better(&cut, &best))
            best = cut;
    }
    return best;
}

/* Cuts the model over the cards at the context of `need`.  False: it does not fit. */
static bool cut_layers(struct costs *c, const struct ds4_card *card, int32_t n_card,
                       struct ds4_partition *out)
{
    int32_t n = c->model->n_layer;
    int32_t end = n;

    if (n_card > n)
        return false;
    for (int32_t l = 0; l <= n; l++)
        c->best[0][l] = (struct cut){.worst = l == 0 ? 0 : -1, .least_gap = SIZE_MAX};
    for (int32_t s = 1; s <= n_card; s++) {
        for (int32_t l = 0; l <= n; l++) {
            c->best[s][l].worst = -1;
            if (l >= s && l <= n - (n_card - s))
                c->best[s][l] = best_cut(c, card, s, l);
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
static int32_t half_context(int32_t context_tok)
{
    return context_tok / 2 / DS4_BLOCK_TOK * DS4_BLOCK_TOK;
}

/* The longest context from `context_tok` down, halved each time, at which a cut exists; 0: none. */
static int32_t find_cut(struct costs *c, const struct ds4_card *card, int32_t n_card,
                        int32_t context_tok, struct ds4_partition *out, struct ds4_err *err)
{
    for (; context_tok >= LEAST_CONTEXT; context_tok = half_context(context_tok)) {
        if (fill_need(c, context_tok, err) != 0)
            return -1;
        if (cut_layers(c, card, n_card, out))
            return context_tok;
    }
    return 0;
}

/* With a context in the settings only that one will do.  > 0: cut; 0: none fits; -1: error. */
static int32_t choose_cut(struct costs *c, const struct ds4_card *card, int32_t n_card,
                          struct ds4_partition *out, struct ds4_err *err)
{
    int32_t context = c->config->context_tok;

    if (context == 0)
        return find_cut(c, card, n_card, c->model->context_tok, out, err);
    if (fill_need(c, context, err) != 0)
        return -1;
    return cut_layers(c, card, n_card, out) ? context : 0;
}

/* ---- what would fit ----------------------------------------------------------------------------- */

static void print_counts(const struct ds4_partition *p, char *out, size_t cap)
{
    size_t len = 0;

    for (int32_t s = 0; s < p->n_stage && len < cap; s++)
        len +=
            (size_t)snprintf(out + len, cap - len, "%s%" PRId32, s == 0 ? "" : ", ", p->n_layer[s]);
}

static void advise(struct ds4_rig *rig, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void advise(struct ds4_rig *rig, const char *fmt, ...)
{
    va_list args;

    for (size_t i = 0; i < sizeof(rig->advice) / sizeof(rig->advice[0]); i++) {
        if (rig->advice[i][0] != '\0')
            continue;
        va_start(args, fmt);
        vsnprintf(rig->advice[i], sizeof(rig->advice[i]), fmt, args);
        va_end(args);
        return;
    }
}

/* More cards like the largest, and as many cards of the next class that does. */
static void advise_cards(struct ds4_rig *rig, struct costs *c, const struct ds4_card *card,
                         int32_t n_card, int32_t context_tok)
{
    struct ds4_card more[DS4_MAX_STAGES];
    struct ds4_partition p;
    struct ds4_card most = card[0];

    for (int32_t i = 0; i < n_card; i++) {
        more[i] = card[i];
        if (card[i].gib > most.gib)
            most = card[i];
    }
    for (int32_t n = n_card + 1; n <= DS4_MAX_STAGES && n <= c->model->n_layer; n++) {
        more[n - 1] = most;
        if (!cut_layers(c, more, n, &p))
            continue;
        advise(rig,
               "%" PRId32 " cards would: %" PRId32 " more of %" PRId32 " GB (context %" PRId32 ")",
               n, n - n_card, most.gib, context_tok);
        break;
    }
    for (int32_t i = 0; i < N_CLASS; i++) {
        for (int32_t k = 0; k < n_card; k++)
            more[k] = (struct ds4_card){classes[i].gib, classes[i].gb_per_s};
        if (!cut_layers(c, more, n_card, &p))
            continue;
        advise(rig, "%" PRId32 " card(s) of %" PRId32 " GB would (context %" PRId32 ")", n_card,
               classes[i].gib, context_tok);
        break;
    }
}

static int say_what_would_fit(struct ds4_rig *rig, struct costs *c, const struct ds4_card *card,
                              int32_t n_card, struct ds4_err *err)
{
    struct ds4_partition p;
    char counts[160] = "";
    int32_t wanted = c->config->context_tok;
    int32_t context = wanted == 0 || wanted > ADVICE_CONTEXT ? ADVICE_CONTEXT : wanted;
    int32_t fit = choose_cut(c, card, n_card, &p, err);
    struct ds4_weights_size all;
    struct ds4_model_part whole = ds4_model_all(c->model);

    if (fit == 0 && wanted > 0)
        fit = find_cut(c, card, n_card, half_context(wanted), &p, err);
    if (fit < 0)
        return -1;
    if (fit > 0) {
        print_counts(&p, counts, sizeof(counts));
        advise(rig, "cluster.partition = {%s} would, with a context of %" PRId32, counts, fit);
        return 0;
    }
    if (context > c->model->context_tok)
        context = c->model->context_tok;
    if (fill_need(c, wanted > 0 ? wanted : context, err) != 0)
        return -1;
    advise_cards(rig, c, card, n_card, wanted > 0 ? wanted : context);
    all = part_size(c, &whole);
    advise(rig,
           "the routed experts are %.1f of %.1f GiB; all of them must lie on the cards, none can "
           "stay in host memory",
           (double)(all.class_bytes[DS4_CLASS_GATE_UP] + all.class_bytes[DS4_CLASS_DOWN]) /
               (double)GIB,
           (double)(all.device_bytes + all.mapped_bytes) / (double)GIB);
    return 0;
}

/* ---- the rig ------------------------------------------------------------------------------------ */

/* Each stage decides by itself at start, so does it here; the rig has what all of them have. */
static void plan_stages(struct ds4_rig *rig, const struct costs *c, const struct ds4_card *card)
{
    struct ds4_err err = {DS4_OK, ""};

    rig->fits = true;
    rig->context_tok = c->model->context_tok;
    rig->n_block = INT32_MAX;
    for (int32_t s = 0; s < rig->partition.n_stage; s++) {
        struct ds4_rig_stage *stage = &rig->stage[s];
        const struct ds4_model_part part = ds4_partition_part(&rig->partition, s);

        stage->card = card[s];
        stage->total_bytes = (size_t)card[s].gib * GIB;
        stage->weights = part_size(c, &part);
        stage->token_bytes = read_bytes(c, part.first_layer, part.end_layer);
        stage->token_seconds = (double)stage->token_bytes / (card[s].gb_per_s * 1e9);
        stage->fits =
            plan_part(c, &part, stage->total_bytes, card_usable(&card[s]), c->config->context_tok,
                      c->config->n_blocks, &stage->plan, &err) == 0;
        rig->token_seconds += stage->token_seconds;
        if (stage->fits && stage->plan.context_tok < rig->context_tok)
            rig->context_tok = stage->plan.context_tok;
        if (stage->fits && stage->plan.kv.n_block < rig->n_block)
            rig->n_block = stage->plan.kv.n_block;
        if (!stage->fits && rig->fits)
            snprintf(rig->verdict, sizeof(rig->verdict),
                     "does not fit: stage %" PRId32 " on a card of %" PRId32 " GB: %.200s", s,
                     card[s].gib, err.msg);
        rig->fits = rig->fits && stage->fits;
    }
}

static int take_partition(struct ds4_rig *rig, struct costs *c, const struct ds4_card *card,
                          int32_t n_card, struct ds4_err *err)
{
    const struct ds4_stage_config *config = c->config;
    int32_t context;

    rig->given = config->n_partition > 0;
    if (rig->given) {
        if (ds4_partition_set(config->partition, config->n_partition, &rig->partition, err) != 0 ||
            ds4_partition_check(&rig->partition, c->model->n_layer, err) != 0)
            return -1;
        if (rig->partition.n_stage != n_card)
            return ds4_fail(err, DS4_E_INVALID,
                            "the partition has %" PRId32 " stages, there are %" PRId32 " cards",
                            rig->partition.n_stage, n_card);
        return 0;
    }
    context = choose_cut(c, card, n_card, &rig->partition, err);
    if (context == 0) /* something to show: nobody's fault in particular */
        return ds4_partition_even(c->model->n_layer, n_card, &rig->partition, err);
    return context < 0 ? -1 : 0;
}

static int plan_rig(struct ds4_rig *rig, struct costs *c, const struct ds4_card *card,
                    int32_t n_card, struct ds4_err *err)
{
    char counts[160] = "";

    if (take_partition(rig, c, card, n_card, err) != 0)
        return -1;
    rig->stage = calloc((size_t)n_card, sizeof(*rig->stage));
    if (rig->stage == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory to plan %" PRId32 " stages", n_card);
    rig->model = *c->model;
    rig->scratch_estimate = c->cuda == NULL;
    rig->model_tok = c->model_tok;
    plan_stages(rig, c, card);
    if (!rig->fits)
        return say_what_would_fit(rig, c, card, n_card, err);
    print_counts(&rig->partition, counts, sizeof(counts));
    snprintf(rig->verdict, sizeof(rig->verdict),
             "fits: cluster.partition = {%s}, a context of %" PRId32 " tokens, cache for %" PRId64,
             counts, rig->context_tok, (int64_t)rig->n_block * DS4_BLOCK_TOK);
    return 0;
}

/* Opens the model for planning: metadata and the tensor table, no weights. */
static struct ds4_weights_file *open_model(const struct ds4_stage_config *config,
                                           struct ds4_model_shape *model, struct ds4_err *err)
{
    struct ds4_weights_file *file = ds4_weights_open(config->model_path, DS4_WEIGHTS_PREAD, err);
    struct ds4_model_part all;

    if (file == NULL)
        return NULL;
    if (ds4_model_read(file, model, err) == 0) {
        all = ds4_model_all(model);
        if (ds4_model_require(file, model, &all, err) == 0)
            return file;
    }
    ds4_weights_close(file);
    return NULL;
}

int ds4_rig_plan(struct ds4_rig *rig, const struct ds4_stage_config *config,
                 const struct ds4_card *card, int32_t n_card, struct ds4_err *err)
{
    struct ds4_weights_file *file;
    struct ds4_model_shape model;
    struct costs *c;
    int rc = -1;

    memset(rig, 0, sizeof(*rig));
    file = open_model(config, &model, err);
    if (file == NULL)
        return -1;
    c = costs_new(file, &model, config, n_card, err);
    if (c != NULL)
        rc = plan_rig(rig, c, card, n_card, err);
    free(c);
    ds4_weights_close(file);
    return rc;
}

int ds4_rig_propose(const struct ds4_weights_file *file, const struct ds4_model_shape *model,
                    const struct ds4_stage_config *config, struct ds4_partition *out,
                    struct ds4_err *err)
{
    struct costs *c = costs_new(file, model, config, config->n_card, err);
    struct ds4_rig rig = {.fits = false};
    int rc = -1;

    if (c == NULL)
        return -1;
    if (plan_rig(&rig, c, config->card, config->n_card, err) == 0) {
        *out = rig.partition;
        rc = rig.fits ? 0 : ds4_fail(err, DS4_E_NOMEM, "%s; %s", rig.verdict, rig.advice[0]);
    }
    ds4_rig_deinit(&rig);
    free(c);
    return rc;
}

int ds4_rig_plan_here(struct ds4_rig *rig, const struct ds4_stage_config *config,
                      struct ds4_err *err)
{
    struct ds4_err why = {DS4_OK, ""};
    struct ds4_rig_stage *stage;

    memset(rig, 0, sizeof(*rig));
    rig->stage = calloc(1, sizeof(*rig->stage));
    if (rig->stage == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for a plan");
    stage = rig->stage;
    rig->here = true;
    rig->fits = ds4_stage_plan(config, &stage->plan, &stage->weights, &rig->model,
                               &stage->total_bytes, &why) == 0;
    if (!rig->fits && why.code != DS4_E_NOMEM) {
        *err = why;
        return -1;
    }
    stage->fits = rig->fits;
    stage->card.gib = (int32_t)((stage->total_bytes + GIB / 2) / GIB);
    rig->partition.n_stage = 1;
    rig->partition.n_layer[0] = stage->plan.part.end_layer - stage->plan.part.first_layer;
    rig->first_stage = config->stage;
    rig->context_tok = stage->plan.context_tok;
    rig->n_block = stage->plan.kv.n_block;
    if (rig->fits)
        snprintf(rig->verdict, sizeof(rig->verdict),
                 "fits: a context of %" PRId32 " tokens, cache for %" PRId64,
                 stage->plan.context_tok, (int64_t)rig->n_block * DS4_BLOCK_TOK);
    else
        snprintf(rig->verdict, sizeof(rig->verdict), "does not fit: %.240s", why.msg);
    return 0;
}

void ds4_rig_deinit(struct ds4_rig *rig)
{
    free(rig->stage);
    rig->stage = NULL;
}

/* The plan of a rig (before step 8 of the house list; --plan, and the start when the settings name cards
 * but no partition): the partition of the settings or the one worker/rig_cut.c finds, a plan per stage,
 * a verdict, and what would fit instead.
 *
 * Invariant: whatever is called fitting went through ds4_plan_make with that card's memory. */
#include "worker/rig.h"

#include "worker/rig_cut.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ADVICE_CONTEXT 8192 /* what "would fit" must at least hold */
#define GIB            ((size_t)1 << 30)

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
static void advise_cards(struct ds4_rig *rig, struct ds4_cut *c, const struct ds4_card *card,
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
    for (int32_t n = n_card + 1; n <= DS4_MAX_STAGES && n <= ds4_cut_model(c)->n_layer; n++) {
        more[n - 1] = most;
        if (!ds4_cut_layers(c, more, n, &p))
            continue;
        advise(rig,
               "%" PRId32 " cards would: %" PRId32 " more of %" PRId32 " GB (context %" PRId32 ")",
               n, n - n_card, most.gib, context_tok);
        break;
    }
    for (int32_t i = 0; ds4_card_class(i) != NULL; i++) {
        const struct ds4_card *sold = ds4_card_class(i);

        for (int32_t k = 0; k < n_card; k++)
            more[k] = *sold;
        if (!ds4_cut_layers(c, more, n_card, &p))
            continue;
        advise(rig, "%" PRId32 " card(s) of %" PRId32 " GB would (context %" PRId32 ")", n_card,
               sold->gib, context_tok);
        break;
    }
}

static int say_what_would_fit(struct ds4_rig *rig, struct ds4_cut *c, const struct ds4_card *card,
                              int32_t n_card, struct ds4_err *err)
{
    struct ds4_partition p;
    char counts[160] = "";
    int32_t wanted = ds4_cut_config(c)->context_tok;
    int32_t context = wanted == 0 || wanted > ADVICE_CONTEXT ? ADVICE_CONTEXT : wanted;
    int32_t fit = ds4_cut_choose(c, card, n_card, &p, err);
    struct ds4_weights_size all;
    struct ds4_model_part whole = ds4_model_all(ds4_cut_model(c));

    if (fit == 0 && wanted > 0)
        fit = ds4_cut_find(c, card, n_card, ds4_cut_half(wanted), &p, err);
    if (fit < 0)
        return -1;
    if (fit > 0) {
        print_counts(&p, counts, sizeof(counts));
        advise(rig, "cluster.partition = {%s} would, with a context of %" PRId32, counts, fit);
        return 0;
    }
    if (context > ds4_cut_model(c)->context_tok)
        context = ds4_cut_model(c)->context_tok;
    if (ds4_cut_at(c, wanted > 0 ? wanted : context, false, err) != 0)
        return -1;
    advise_cards(rig, c, card, n_card, wanted > 0 ? wanted : context);
    all = ds4_cut_size(c, &whole);
    fit = ds4_cut_config(c)->offload ? 0 : ds4_cut_offload(c, card, n_card, &p, err);
    if (fit < 0)
        return -1;
    print_counts(&p, counts, sizeof(counts));
    if (fit > 0)
        advise(
            rig,
            "gpu.offload = true would: {%s}, experts that do not fit (of %.1f GiB) in host memory",
            counts,
            (double)(all.class_bytes[DS4_CLASS_GATE_UP] + all.class_bytes[DS4_CLASS_DOWN]) /
                (double)GIB);
    else
        advise(rig, "the weights are %.1f GiB",
               (double)(all.device_bytes + all.mapped_bytes) / (double)GIB);
    return 0;
}

/* ---- the rig ------------------------------------------------------------------------------------ */

/* Reads of one token, at the rates of those who read.  Experts on the host are used as often as the
 * others: real routing prefers some, and those move to the card. */
static void estimate(struct ds4_rig_stage *stage, const struct ds4_cut *c)
{
    const struct ds4_model_part *part = &stage->plan.part;
    size_t experts = ds4_cut_expert_bytes(c, part->first_layer, part->end_layer);
    double absent = 0;

    if (stage->plan.n_resident > 0)
        absent = 1 - (double)stage->plan.n_resident / ds4_cut_model(c)->n_expert[part->first_layer];
    stage->host_bytes = (size_t)(absent * (double)experts);
    stage->token_seconds =
        (double)(stage->token_bytes - stage->host_bytes) / (stage->card.gb_per_s * 1e9);
    if (stage->host_bytes > 0)
        stage->token_seconds += (double)stage->host_bytes / (DS4_HOST_GB_PER_S * 1e9) +
                                (part->end_layer - part->first_layer) * DS4_HOST_TRIP_US * 1e-6;
}

/* Each stage decides by itself at start, so does it here; the rig has what all of them have. */
static void plan_stages(struct ds4_rig *rig, const struct ds4_cut *c, const struct ds4_card *card)
{
    struct ds4_err err = {DS4_OK, ""};

    rig->fits = true;
    rig->context_tok = ds4_cut_model(c)->context_tok;
    rig->n_block = INT32_MAX;
    for (int32_t s = 0; s < rig->partition.n_stage; s++) {
        struct ds4_rig_stage *stage = &rig->stage[s];
        const struct ds4_model_part part = ds4_partition_part(&rig->partition, s);

        stage->card = card[s];
        stage->total_bytes = (size_t)card[s].gib * GIB;
        stage->weights = ds4_cut_size(c, &part);
        stage->token_bytes = ds4_cut_read_bytes(c, part.first_layer, part.end_layer);
        stage->fits = ds4_cut_plan(c, &part, stage->total_bytes, ds4_card_usable(&card[s]),
                                   &stage->plan, &stage->weights, &err) == 0;
        estimate(stage, c);
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

static int take_partition(struct ds4_rig *rig, struct ds4_cut *c, const struct ds4_card *card,
                          int32_t n_card, struct ds4_err *err)
{
    const struct ds4_stage_config *config = ds4_cut_config(c);
    int32_t context;

    rig->given = config->n_partition > 0;
    if (rig->given) {
        if (ds4_partition_set(config->partition, config->n_partition, &rig->partition, err) != 0 ||
            ds4_partition_check(&rig->partition, ds4_cut_model(c)->n_layer, err) != 0)
            return -1;
        if (rig->partition.n_stage != n_card)
            return ds4_fail(err, DS4_E_INVALID,
                            "the partition has %" PRId32 " stages, there are %" PRId32 " cards",
                            rig->partition.n_stage, n_card);
        return 0;
    }
    context = ds4_cut_choose(c, card, n_card, &rig->partition, err);
    if (context == 0) /* something to show: nobody's fault in particular */
        return ds4_partition_even(ds4_cut_model(c)->n_layer, n_card, &rig->partition, err);
    return context < 0 ? -1 : 0;
}

static int plan_rig(struct ds4_rig *rig, struct ds4_cut *c, const struct ds4_card *card,
                    int32_t n_card, struct ds4_err *err)
{
    char counts[160] = "";

    if (take_partition(rig, c, card, n_card, err) != 0)
        return -1;
    rig->stage = calloc((size_t)n_card, sizeof(*rig->stage));
    if (rig->stage == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory to plan %" PRId32 " stages", n_card);
    rig->model = *ds4_cut_model(c);
    rig->scratch_estimate = ds4_cut_guesses(c);
    rig->model_tok = ds4_cut_model_tok(c);
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
    struct ds4_cut *c;
    int rc = -1;

    memset(rig, 0, sizeof(*rig));
    file = open_model(config, &model, err);
    if (file == NULL)
        return -1;
    c = ds4_cut_new(file, &model, config, n_card, err);
    if (c != NULL)
        rc = plan_rig(rig, c, card, n_card, err);
    ds4_cut_free(c);
    ds4_weights_close(file);
    return rc;
}

int ds4_rig_propose(const struct ds4_weights_file *file, const struct ds4_model_shape *model,
                    const struct ds4_stage_config *config, struct ds4_partition *out,
                    struct ds4_err *err)
{
    struct ds4_cut *c = ds4_cut_new(file, model, config, config->n_card, err);
    struct ds4_rig rig = {.fits = false};
    int rc = -1;

    if (c == NULL)
        return -1;
    if (plan_rig(&rig, c, config->card, config->n_card, err) == 0) {
        *out = rig.partition;
        rc = rig.fits ? 0 : ds4_fail(err, DS4_E_NOMEM, "%s; %s", rig.verdict, rig.advice[0]);
    }
    ds4_rig_deinit(&rig);
    ds4_cut_free(c);
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

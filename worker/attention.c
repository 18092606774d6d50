/* Attention of one layer (house list, step 9; paper 3).
 *
 * Order inside a step: compressors first (they emit the rows that tokens of this step complete), then
 * select and attend, and only then the window ring takes the step's rows: while the step runs, the ring
 * holds its history and the step's own rows come from the buffer, so a chunk may be longer than the
 * ring.  Keys are values: one row per token serves both, for all heads.
 *
 * Everything in a layer rotates with that layer's table; the output is rotated back because values
 * carry the rotation. */
#include "worker/attention.h"

#include "common/fault.h"
#include "worker/stage_state.h"

/* h -> q_rank [n, q_rank], normed: the indexer reads it too; and kv [n, d_head]: normed, rotated, rounded as
 * the window stores it. */
static void make_rows(struct ds4_stage *st, const struct ds4_layer_weights *w,
                      const struct ds4_kv_layer *cache)
{
    const struct ds4_model_shape *m = &st->model;
    struct ds4_latent_args latent = {.batch = &st->batch,
                                     .q = ds4_stage_rows(st, st->buf.q_rank, m->q_rank),
                                     .q_norm = w->q_norm,
                                     .kv = ds4_stage_rows(st, st->buf.kv, m->d_head),
                                     .kv_norm = w->kv_norm,
                                     .eps = m->rms_eps,
                                     .rope = w->rope,
                                     .format = cache->window.format};

    ds4_stage_products(st, &w->q_a, &w->kv, st->buf.h, st->buf.q_rank, st->buf.kv, false);
    st->backend->latent(st->dev, &latent);
}

/* q_rank -> q [n, n_head, d_head], rotated. */
static void make_queries(struct ds4_stage *st, const struct ds4_layer_weights *w)
{
    const struct ds4_model_shape *m = &st->model;
    struct ds4_rope_args rotate = {.batch = &st->batch,
                                   .x = ds4_stage_heads(st, st->buf.q, m->n_head, m->d_head),
                                   .rope = w->rope,
                                   .unit_rms = true,
                                   .eps = m->rms_eps};

    ds4_stage_product(st, &w->q_b, st->buf.q_rank, st->buf.q, 1, false);
    st->backend->rope(st->dev, &rotate);
}

/* Pools the blocks that close in this step into `pages`.  Serves main rows and indexer keys. */
static void compress(struct ds4_stage *st, int32_t l, bool index)
{
    const struct ds4_layer_weights *w = &st->weights.layer[l];
    const struct ds4_kv_layer *cache = &st->kv.layer[l];
    const struct ds4_compressor_weights *cw = index ? &w->index_compressor : &w->compressor;
    const struct ds4_pages *pages = index ? &cache->index_rows : &cache->rows;
    int32_t width = cw->kv.n_row; /* c * d, c = 2 with overlap */
    struct ds4_compress_args a = {.batch = &st->batch,
                                  .k = ds4_stage_rows(st, st->buf.comp_k, width),
                                  .g = ds4_stage_rows(st, st->buf.comp_g, width),
                                  .ape = cw->ape,
                                  .ratio = w->ratio,
                                  .overlap = width == 2 * pages->d,
                                  .norm = cw->norm,
                                  .eps = st->model.rms_eps,
                                  .rope = w->rope,
                                  .ring_k = index ? cache->index_k : cache->comp_k,
                                  .ring_g = index ? cache->index_g : cache->comp_g,
                                  .pages = *pages};

    ds4_stage_products(st, &cw->kv, &cw->gate, st->buf.h, st->buf.comp_k, st->buf.comp_g, true);
    ds4_kv_keeper_inputs(&st->keeper, l, index, a.k, a.g, &cw->ape);
    st->backend->compress(st->dev, &a);
}

/* Chooses the compressed rows each query may read.  The reference scales the head weights by
 * (d_index * n_index_head)^-0.5; a positive factor common to all scores cannot change their order, so it
 * is left out. */
static void select_rows(struct ds4_stage *st, const struct ds4_layer_weights *w,
                        const struct ds4_kv_layer *cache)
{
    const struct ds4_model_shape *m = &st->model;
    struct ds4_index_args a = {
        .batch = &st->batch,
        .q = ds4_stage_heads(st, st->buf.index_q, m->n_index_head, m->d_index),
        .rope = w->rope,
        .w = ds4_stage_rows(st, st->buf.index_w, m->n_index_head),
        .pages = cache->index_rows,
        .ratio = w->ratio,
        .top_k = m->index_topk,
        .sel = st->buf.sel,      /* [n, index_topk] */
        .n_sel = st->buf.n_sel}; /* [n] */

    ds4_stage_product(st, &w->index_q, st->buf.q_rank, st->buf.index_q, 1, false);
    st->backend->index(st->dev, &a);
    if (DS4_FAULT_POINT(TOPK_OOB))
        ds4_stage_break_index(st, st->buf.sel + (st->batch.n_tok - 1) * m->index_topk);
}

/* q, kv, ring and pages -> o [n, n_head, d_head], rotated back; then the ring takes kv. */
static void attend(struct ds4_stage *st, int32_t l)
{
    const struct ds4_layer_weights *w = &st->weights.layer[l];
    const struct ds4_kv_layer *cache = &st->kv.layer[l];
    const struct ds4_model_shape *m = &st->model;
    struct ds4_attention_args a = {.batch = &st->batch,
                                   .q = ds4_stage_heads(st, st->buf.q, m->n_head, m->d_head),
                                   .kv = ds4_stage_rows(st, st->buf.kv, m->d_head),
                                   .ring = cache->window,
                                   .pages = cache->rows,
                                   .ratio = w->ratio,
                                   .window_tok = m->window_tok,
                                   .sel = w->indexer ? st->buf.sel : NULL,
                                   .n_sel = w->indexer ? st->buf.n_sel : NULL,
                                   .top_k = w->indexer ? m->index_topk : 0,
                                   .sink = w->sink,
                                   .rope = w->rope,
                                   .store = true,
                                   .o = ds4_stage_heads(st, st->buf.o, m->n_head, m->d_head)};

    ds4_kv_keeper_window(&st->keeper, l, a.kv); /* before the ring changes */
    st->backend->attention(st->dev, &a);
}

void ds4_attention_forward(struct ds4_stage *st, int32_t l)
{
    const struct ds4_layer_weights *w = &st->weights.layer[l];
    const struct ds4_kv_layer *cache = &st->kv.layer[l];
    bool beside = st->keeper.n == 0;

    /* The compressors need only h, the indexer q_rank besides: beside the queries, unless points take rows from
     * between them. */
    if (w->ratio > 0) {
        if (beside)
            st->backend->side(st->dev, DS4_SIDE_START);
        compress(st, l, false);
        if (w->indexer) {
            compress(st, l, true);
            ds4_stage_product(st, &w->index_head, st->buf.h, st->buf.index_w, 1, true);
        }
        if (beside)
            st->backend->side(st->dev, DS4_SIDE_BACK);
    }
    make_rows(st, w, cache);
    if (w->indexer) {
        if (beside)
            st->backend->side(st->dev, DS4_SIDE_START);
        select_rows(st, w, cache);
        if (beside)
            st->backend->side(st->dev, DS4_SIDE_BACK);
    }
    make_queries(st, w);
    if (w->ratio > 0 && beside)
        st->backend->side(st->dev, DS4_SIDE_JOIN);
    attend(st, l);
    ds4_stage_product(st, &w->out_a, st->buf.o, st->buf.o_rank, st->model.n_group, false);
    ds4_stage_product(st, &w->out_b, st->buf.o_rank, st->buf.y, 1, false);
}

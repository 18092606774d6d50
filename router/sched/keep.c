/* What stays of a sequence: its rows in the index, its slot while nobody else needs it, and the points from
 * which it can be gone on with (step 4).
 *
 * Points of a prompt are wanted when a chunk is posted, because the chunks behind it run before it is
 * acknowledged and the rings move on, those inside of it with the chunk itself; points of an answer when its rows are acknowledged, because a posted
 * decode may turn out to be a no-op.  An exact tail is kept one token before the end of the prompt, from
 * where the same prompt needs one row, and at the end of the turn.
 * Invariant: what was refused has evicted nothing. */
#include "common/log.h"
#include "common/metrics.h"
#include "router/sched/engine.h"

#include <assert.h>
#include <inttypes.h>

#define DS4_BOUNDARY_GAP_TOK 512 /* between two message boundaries worth a point */

/* ---- points ---------------------------------------------------------------------------------------- */

static struct ds4_point *point_at(const struct ds4_seq *seq, int32_t pos)
{
    for (size_t i = 0; i < seq->point.len; i++)
        if (seq->point.ptr[i]->pos == pos)
            return seq->point.ptr[i];
    return NULL;
}

static bool want(struct ds4_sched *s, struct ds4_seq *seq, int32_t pos, enum ds4_point_class class)
{
    const struct ds4_save from = {
        .seq = seq->id,
        .slot = seq->lease->slot,
        .epoch = seq->lease->epoch,
    };
    struct ds4_point *point;

    if (point_at(seq, pos) != NULL || pos <= seq->install_pos ||
        DS4_VEC_RESERVE(&seq->point, seq->point.len + 1) != 0)
        return false;
    point = ds4_points_want(&s->points, &from, pos, class);
    if (point != NULL)
        seq->point.ptr[seq->point.len++] = point;
    return point != NULL;
}

/* The newest multiple of the anchor step in (base, end] that the rings still hold at `end`. */
static int32_t newest_anchor(const struct ds4_sched *s, int32_t base, int32_t end)
{
    int32_t pos = end / DS4_ANCHOR_TOK * DS4_ANCHOR_TOK;

    return pos > base && end - pos <= s->config.hot_window_tok ? pos : 0;
}

static bool is_mark(const struct ds4_seq *seq, int32_t pos)
{
    for (size_t i = 0; i < seq->mark.len; i++)
        if (seq->mark.ptr[i] == pos)
            return true;
    return false;
}

/* Anchors that the entry passes by (POINT_SAVE inside of it), of the two kinds: where messages begin, and
 * others that will still be wanted when the whole prompt is there.  As many as a step may have. */
static void want_inner(struct ds4_sched *s, struct ds4_seq *seq, int32_t base, int32_t end,
                       bool marks)
{
    for (int32_t pos = (base / DS4_ANCHOR_TOK + 1) * DS4_ANCHOR_TOK;
         pos < end && s->n_inner < s->max_inner; pos += DS4_ANCHOR_TOK) {
        enum ds4_point_class class = marks ? DS4_POINT_BOUNDARY : ds4_point_class_at(pos);

        if (is_mark(seq, pos) != marks)
            continue;
        if (end - pos <= s->config.hot_window_tok && seq->hi <= end)
            continue; /* the newest anchor: the rings have it */
        if (class == DS4_POINT_DENSE && pos <= seq->n_prompt - DS4_ANCHOR_DENSE_TOK)
            continue;
        if (want(s, seq, pos, class))
            s->n_inner++;
    }
}

void ds4_engine_mark_points(struct ds4_sched *s, struct ds4_seq *seq, const struct ds4_pick *pick)
{
    int32_t end = pick->base_pos + pick->n_tok;
    int32_t pos = newest_anchor(s, pick->base_pos, end);

    if (pick->kind != DS4_ENTRY_PREFILL || seq->req == NULL || seq == s->probe ||
        end > seq->n_prompt)
        return;
    want_inner(s, seq, pick->base_pos, end, true);
    want_inner(s, seq, pick->base_pos, end, false);
    /* Rows written before a cut count: they have overwritten what lies too far below them. */
    if (pos > 0 && (seq->hi < pos || seq->hi - pos <= s->config.hot_window_tok))
        (void)want(s, seq, pos, is_mark(seq, pos) ? DS4_POINT_BOUNDARY : ds4_point_class_at(pos));
    if (end == seq->n_prompt && end - 1 > pick->base_pos &&
        seq->hi - (end - 1) <= s->config.hot_window_tok)
        (void)want(s, seq, end - 1, DS4_POINT_TAIL);
}

void ds4_engine_find_marks(struct ds4_sched *s, struct ds4_seq *seq)
{
    int32_t last = seq->n_posted;

    for (int32_t t = seq->n_posted + 1; t < seq->n_prompt && s->config.n_boundary_id > 0; t++) {
        int32_t pos = t / DS4_ANCHOR_TOK * DS4_ANCHOR_TOK;
        bool boundary = false;

        for (int32_t i = 0; i < s->config.n_boundary_id; i++)
            boundary |= seq->token.ptr[t] == s->config.boundary_id[i];
        if (!boundary || pos - last < DS4_BOUNDARY_GAP_TOK)
            continue;
        if (DS4_VEC_PUSH(&seq->mark, pos) != 0)
            return;
        last = pos;
    }
}

static struct ds4_seq *running(const struct ds4_sched *s, const struct ds4_save *save)
{
    struct ds4_seq *seq = s->of_slot[save->slot];

    return seq != NULL && seq->id == save->seq ? seq : NULL;
}

/* One past the highest position written once the first n_pick picks, not booked yet, have run. */
static int32_t hi_after(const struct ds4_sched *s, const struct ds4_seq *seq, int32_t n_pick)
{
    int32_t hi = ds4_seq_reach(seq);

    for (int32_t i = 0; i < n_pick; i++)
        if (s->pick[i].seq == seq && s->pick[i].reach > hi)
            hi = s->pick[i].reach;
    return hi;
}

void ds4_engine_cut_points(struct ds4_sched *s, struct ds4_seq *seq, int32_t keep)
{
    size_t n = 0;

    for (size_t i = 0; i < seq->point.len; i++) {
        if (seq->point.ptr[i]->pos > keep)
            ds4_points_drop(&s->points, seq->point.ptr[i]);
        else
            seq->point.ptr[n++] = seq->point.ptr[i];
    }
    seq->point.len = n;
}

/* Does one of the picks pass by this place: its rows are at hand while that entry runs. */
static bool passes(const struct ds4_sched *s, const struct ds4_seq *seq, int32_t n_pick,
                   int32_t pos)
{
    for (int32_t i = 0; i < n_pick && pos % DS4_ANCHOR_TOK == 0; i++)
        if (s->pick[i].seq == seq && s->pick[i].kind == DS4_ENTRY_PREFILL &&
            s->pick[i].base_pos < pos && pos < s->pick[i].base_pos + s->pick[i].n_tok)
            return true;
    return false;
}

void ds4_engine_drop_overtaken(struct ds4_sched *s, int32_t n_pick)
{
    for (size_t i = s->points.wanted.len; i > 0; i--) {
        struct ds4_point *point = s->points.wanted.ptr[i - 1].point;
        struct ds4_seq *seq = running(s, &s->points.wanted.ptr[i - 1]);

        if (seq == NULL || hi_after(s, seq, n_pick) - point->pos <= s->config.hot_window_tok ||
            passes(s, seq, n_pick, point->pos))
            continue; /* the rings of one that is over stand still */
        for (size_t j = seq->point.len; j > 0; j--)
            if (seq->point.ptr[j - 1] == point)
                seq->point.ptr[j - 1] = seq->point.ptr[--seq->point.len];
        ds4_points_drop(&s->points, point);
    }
}

/* Hangs the sequence's points at or below pos on the path that ends in `node`. */
static void hang_points(struct ds4_sched *s, struct ds4_seq *seq, struct ds4_prefix_node *node,
                        int32_t pos)
{
    size_t n = 0;

    for (size_t i = 0; i < seq->point.len; i++) {
        if (seq->point.ptr[i]->pos <= pos)
            ds4_prefix_attach(&s->prefix, node, seq->point.ptr[i]);
        else
            seq->point.ptr[n++] = seq->point.ptr[i];
    }
    seq->point.len = n;
}

/* ---- rows ------------------------------------------------------------------------------------------ */

/* Rows below n_tok go into the index; the node that has the last of them, NULL if that failed. */
static struct ds4_prefix_node *put(struct ds4_sched *s, struct ds4_seq *seq, int32_t n_tok,
                                   bool odd_end, int64_t now_ns)
{
    const struct ds4_prefix_put what = {
        .token = seq->token.ptr,
        .n_tok = n_tok,
        .block = seq->lease->block,
        .maker = seq->id,
        .now_ns = now_ns,
        .odd_end = odd_end,
    };
    struct ds4_prefix_node *node;
    struct ds4_err err = {0};

    if (seq->stand == NULL)
        return NULL;
    node = ds4_prefix_put(&s->prefix, &seq->stand, &what, &err);
    if (node == NULL) {
        ds4_log(DS4_LOG_ERROR, "sched.index", "seq=%" PRIu64 " error=\"%s\"", seq->id, err.msg);
        return NULL;
    }
    seq->n_put = n_tok;
    hang_points(s, seq, node, odd_end ? n_tok : n_tok / DS4_CHUNK_TOK * DS4_CHUNK_TOK);
    return node;
}

void ds4_engine_index(struct ds4_sched *s, struct ds4_seq *seq, int64_t now_ns)
{
    int32_t known = seq->n_acked < seq->n_prompt ? seq->n_acked : seq->n_prompt;
    int32_t anchor;

    if (seq->spoiled || seq->req == NULL || seq == s->probe)
        return;
    if (known > seq->n_put &&
        (known == seq->n_prompt || known / DS4_CHUNK_TOK > seq->n_put / DS4_CHUNK_TOK)) {
        struct ds4_prefix_node *node = put(s, seq, known, known == seq->n_prompt, now_ns);

        if (node != NULL)
            ds4_prefix_thin(&s->prefix, node, known, false);
        s->head_waits = false; /* somebody may wait for these rows */
    }
    /* Of the answer: rows that are there for certain, and still in the rings. */
    anchor = newest_anchor(s, seq->n_prompt, seq->n_acked);
    if (anchor > seq->n_anchor && seq->state != DS4_SEQ_DRAINING &&
        ds4_seq_reach(seq) - anchor <= s->config.hot_window_tok)
        (void)want(s, seq, anchor, ds4_point_class_at(anchor));
    seq->n_anchor = anchor > seq->n_anchor ? anchor : seq->n_anchor;
}

/* Nothing of it can be used by others. */
static void close_seq(struct ds4_sched *s, struct ds4_seq *seq)
{
    ds4_engine_cut_points(s, seq, -1); /* before the slot takes those away that it was to save */
    ds4_engine_close_slot(s, seq->lease->slot);
    ds4_budget_release(s->budget, &seq->lease);
}

/* The slot stays as it is until somebody needs it; an exact tail replaces it then. */
static void keep_slot(struct ds4_sched *s, struct ds4_seq *seq, struct ds4_prefix_node *node,
                      int64_t now_ns)
{
    struct ds4_hot hot = {
        .lease = seq->lease,
        .node = node,
        .seq = seq->id,
        .pos = seq->n_acked,
        .hi = seq->hi,
        .install_pos = seq->install_pos,
        .affinity = seq->affinity,
        .used_ns = now_ns,
    };
    struct ds4_point *end;
    struct ds4_err err = {0};

    if (s->park.len >= DS4_MAX_PARKS || ds4_prefix_keep_hot(&s->prefix, &hot, &err) != 0) {
        close_seq(s, seq);
        return;
    }
    if (seq->hi - seq->n_acked <= s->config.hot_window_tok)
        (void)want(s, seq, seq->n_acked,
                   seq->n_acked % DS4_ANCHOR_TOK == 0 ? ds4_point_class_at(seq->n_acked)
                                                      : DS4_POINT_TAIL);
    end = point_at(seq, seq->n_acked);
    if (end != NULL)
        end->turn_end = true;
    hang_points(s, seq, node, seq->n_acked);
    s->park.ptr[s->park.len++] =
        (struct ds4_save){.seq = seq->id, .slot = seq->lease->slot, .epoch = seq->lease->epoch};
    ds4_budget_park(s->budget, seq->lease);
    seq->lease = NULL;
}

void ds4_engine_settle(struct ds4_sched *s, struct ds4_seq *seq, int64_t now_ns)
{
    struct ds4_prefix_node *node = NULL;

    if (seq->n_flight != 0 || seq->req != NULL) { /* I11: its blocks are in use; nothing is freed */
        ds4_count_broken(s->config.metrics, "I11");
        s->failed = true;
        ds4_fail(&s->failure, DS4_E_BUG, "sequence %" PRIu64 " is freed with %d entries posted",
                 seq->id, seq->n_flight);
        return;
    }
    s->head_waits = false;
    if (seq == s->probe) {
        s->probe = NULL;
        ds4_engine_forget_seq(s, seq);
        return;
    }
    if (seq->install != NULL)
        ds4_points_unpin(&s->points, seq->install);
    seq->install = NULL;
    /* Only tokens that were run have state; the newest sampled one usually has none yet. */
    if (!seq->spoiled && seq->opened && seq->n_acked > 0 && seq->n_acked >= seq->install_pos &&
        (size_t)seq->n_acked <= seq->token.len)
        node = put(s, seq, seq->n_acked, true, now_ns);
    if (node != NULL) {
        ds4_prefix_thin(&s->prefix, node, seq->n_prompt - 1, true);
        keep_slot(s, seq, node, now_ns);
    } else {
        close_seq(s, seq);
    }
    ds4_engine_cut_points(s, seq, -1);
    if (seq->spoiled)
        ds4_prefix_unmake(&s->prefix, seq->stand, seq->id);
    else
        ds4_prefix_leave(&s->prefix, seq->stand);
    ds4_engine_forget_seq(s, seq);
}

void ds4_engine_unpark(struct ds4_sched *s, int32_t slot)
{
    for (size_t i = s->park.len; i > 0; i--)
        if (s->park.ptr[i - 1].slot == slot)
            s->park.ptr[i - 1] = s->park.ptr[--s->park.len];
}

void ds4_engine_drop_hot(struct ds4_sched *s, int32_t index)
{
    struct ds4_hot hot = ds4_prefix_take_hot(&s->prefix, index);

    ds4_engine_close_slot(s, hot.lease->slot);
    ds4_budget_release(s->budget, &hot.lease);
}

/* ---- room ------------------------------------------------------------------------------------------ */

void ds4_engine_evict(struct ds4_sched *s, struct ds4_prefix_node *victim)
{
    struct ds4_budget_sums before, after;
    int32_t hot;

    ds4_budget_sums(s->budget, &before);
    while ((hot = ds4_prefix_hot_on(&s->prefix, victim)) >= 0)
        ds4_engine_drop_hot(s, hot);
    ds4_prefix_evict(&s->prefix, victim);
    ds4_budget_sums(s->budget, &after);
    ds4_metric_add(s->config.metrics, DS4_M_KV_EVICTIONS, 1, "hbm", "capacity");
    ds4_metric_add(s->config.metrics, DS4_M_KV_EVICTED_BYTES,
                   (double)((after.free - before.free) * ds4_points_block_bytes(&s->points)), "hbm",
                   "capacity");
}

int ds4_engine_make_room(struct ds4_sched *s, const struct ds4_kv_ask *ask, uint64_t affinity,
                         struct ds4_prefix_hit *hit, struct ds4_err *err)
{
    const struct ds4_kv_lease *mine = hit->hot >= 0 ? s->prefix.hot.ptr[hit->hot].lease : NULL;
    int32_t lacking = ds4_budget_short(s->budget, ask), spare = 0;
    struct ds4_budget_sums sums;
    struct ds4_prefix_node *victim;

    ds4_budget_sums(s->budget, &sums);
    if (lacking > 0) {
        spare = ds4_prefix_reclaimable(&s->prefix);
        if (lacking > spare && ds4_save_yield(s))
            spare = ds4_prefix_reclaimable(&s->prefix);
    }
    if (lacking > spare ||
        (mine == NULL && sums.slots_free == 0 && ds4_prefix_coldest(&s->prefix, -1, affinity) < 0))
        return ds4_fail(err, DS4_E_BUSY,
                        "need %d cache blocks and a slot: %d blocks free, %d promised, %d "
                        "reclaimable, %d of %d slots free",
                        ds4_budget_need(s->budget, ask), sums.free, sums.promised + sums.over,
                        spare, sums.slots_free + sums.slots_hot, sums.slots_total);
    while (ds4_budget_short(s->budget, ask) > 0 && (victim = ds4_prefix_victim(&s->prefix)) != NULL)
        ds4_engine_evict(s, victim);
    ds4_budget_sums(s->budget, &sums);
    if (mine == NULL && sums.slots_free == 0) {
        int32_t hot = ds4_prefix_coldest(&s->prefix, -1, affinity);

        if (hot >= 0)
            ds4_engine_drop_hot(s, hot);
    }
    /* What was dropped may have moved the one we want. */
    for (int32_t i = 0; mine != NULL && i < (int32_t)s->prefix.hot.len; i++)
        if (s->prefix.hot.ptr[i].lease == mine)
            hit->hot = i;
    return 0;
}

/* Experts (step 9, paper 4.3): y = sum over chosen experts, ids rising, of
 * w2_e (silu(min(g, clamp)) * bound(u, -clamp, clamp) * weight_e), then the shared expert.
 *
 * Tokens are grouped by expert: a touched expert's weights are read once per call, dequantised once
 * per DS4_TILE_INPUTS of its tokens.  Phase 1 makes the middle rows, split over (expert, tile of rows of w1 and
 * w3); phase 2 multiplies by w2, split over tiles of output rows only: one item adds all experts in
 * rising order to its part of y, so a token's sum does not depend on who else is in the step.  The
 * shared expert runs afterwards as one group of all active tokens and reuses the middle rows' space,
 * some tokens at a time if it is wide. */
#include "kernels/cpu/cpu.h"

#include "kernels/cpu/math.h"

#include <string.h>

/* One (token, expert) use; its middle row has the same index. */
struct pair {
    int32_t token;
    int32_t use; /* token * n_used + i */
    float weight;
};

/* The uses of one expert: pair[first .. first + n). */
struct group {
    int32_t expert;
    int32_t first;
    int32_t n;
};

struct job {
    struct ds4_device *dev;
    const struct ds4_moe_args *a;
    struct ds4_scratch scratch;
    const struct ds4_weight *gate, *up, *down;
    enum ds4_act_kind gate_kind, up_kind, down_kind;
    float clamp;
    bool in_parts; /* down rows stay apart, one per use */
    int32_t
        first_token; /* activation blocks are kept for first_token .. first_token + n_token - 1 */
    int32_t n_token;
    struct pair *pair; /* from here on in shared scratch */
    struct group *group;
    int32_t n_group;
    int32_t *start;                     /* [n_expert + 1] while grouping */
    float *middle;                      /* [n_pair, d_expert] */
    uint8_t *gate_act, *up_act, *m_act; /* [n_token], [n_token], [n_pair] rows of blocks */
};

/* ---- scratch ------------------------------------------------------------------------------------ */

static size_t act_row_bytes(int32_t n)
{
    size_t a = ds4_cpu_act_bytes(DS4_ACT_32, n), b = ds4_cpu_act_bytes(DS4_ACT_256, n);

    return ds4_cpu_align(a > b ? a : b);
}

struct parts {
    size_t pair, group, start, middle, gate_act, up_act, m_act, end;
};

static struct parts lay_out(int32_t n_tok, int32_t n_used, int32_t n_expert, int32_t d,
                            int32_t d_expert)
{
    size_t n_pair = (size_t)n_tok * (size_t)n_used, tok = (size_t)n_tok;
    struct parts p;

    p.pair = 0;
    p.group = p.pair + ds4_cpu_align(n_pair * sizeof(struct pair));
    p.start = p.group + ds4_cpu_align((size_t)n_expert * sizeof(struct group));
    p.middle = p.start + ds4_cpu_align(((size_t)n_expert + 1) * sizeof(int32_t));
    p.gate_act = p.middle + ds4_cpu_align(n_pair * (size_t)d_expert * sizeof(float));
    p.up_act = p.gate_act + tok * act_row_bytes(d);
    p.m_act = p.up_act + tok * act_row_bytes(d);
    p.end = p.m_act + n_pair * act_row_bytes(d_expert);
    return p;
}

static struct ds4_need need_of(int32_t n_tok, int32_t n_used, int32_t n_expert, int32_t d,
                               int32_t d_expert, int32_t d_shared)
{
    size_t routed = lay_out(n_tok, n_used, n_expert, d, d_expert).end;
    size_t shared = lay_out(1, 1, 1, d, d_shared).end;
    struct ds4_need need = {.shared_bytes = routed > shared ? routed : shared};

    return need;
}

struct ds4_need ds4_cpu_moe_need(int32_t n_tok, const struct ds4_limits *l)
{
    return need_of(n_tok, l->n_used, l->n_expert, l->d_model, l->d_expert, l->max_cols);
}

static void place(struct job *job, int32_t n_tok, int32_t n_used)
{
    struct parts p = lay_out(n_tok, n_used, job->gate->n_stack, job->gate->n_col, job->gate->n_row);
    uint8_t *base = job->scratch.shared;

    job->pair = (struct pair *)(void *)(base + p.pair);
    job->group = (struct group *)(void *)(base + p.group);
    job->start = (int32_t *)(void *)(base + p.start);
    job->middle = (float *)(void *)(base + p.middle);
    job->gate_act = base + p.gate_act;
    job->up_act = base + p.up_act;
    job->m_act = base + p.m_act;
}

/* ---- inputs: f32 rows, or int8 blocks where the product is fast ------------------------------------ */

static const float *x_row(const struct job *job, int32_t token)
{
    return (const float *)job->a->x.data + token * job->a->x.stride[0];
}

static const void *x_input(const struct job *job, enum ds4_act_kind kind, const uint8_t *act,
                           int32_t pair)
{
    int32_t token = job->pair[pair].token;

    if (kind == DS4_ACT_NONE)
        return x_row(job, token);
    return act + (size_t)(token - job->first_token) * act_row_bytes(job->gate->n_col);
}

static float *middle_row(const struct job *job, int32_t pair)
{
    return job->middle + (int64_t)pair * job->gate->n_row;
}

static uint8_t *middle_act(const struct job *job, int32_t pair)
{
    return job->m_act + (size_t)pair * act_row_bytes(job->down->n_col);
}

static void quantise_x(void *ctx, int32_t i, int32_t thread)
{
    const struct job *job = ctx;
    int32_t token = job->first_token + i, d = job->gate->n_col;

    (void)thread;
    if (!ds4_cpu_active(job->a->batch, token))
        return;
    ds4_cpu_act_quantise(job->gate_kind, x_row(job, token), d,
                         job->gate_act + (size_t)i * act_row_bytes(d));
    ds4_cpu_act_quantise(job->up_kind, x_row(job, token), d,
                         job->up_act + (size_t)i * act_row_bytes(d));
}

static void quantise_middle(void *ctx, int32_t pair, int32_t thread)
{
    const struct job *job = ctx;

    (void)thread;
    ds4_cpu_act_quantise(job->down_kind, middle_row(job, pair), job->down->n_col,
                         middle_act(job, pair));
}

/* ---- phases ------------------------------------------------------------------------------------- */

static float middle_value(float g, float u, float clamp, float weight)
{
    g = g > clamp ? clamp : g; /* from above only */
    u = u > clamp ? clamp : u;
    u = u < -clamp ? -clamp : u;
    return ds4_silu(g) * u * weight;
}

static int32_t n_tiles(const struct ds4_weight *w)
{
    return (w->n_row + DS4_TILE_ROWS - 1) / DS4_TILE_ROWS;
}

static struct ds4_rows tile_of(const struct ds4_weight *w, int32_t expert, int32_t index)
{
    int32_t row = index * DS4_TILE_ROWS, n = w->n_row - row;

    return ds4_cpu_rows(w, expert, row, n < DS4_TILE_ROWS ? n : DS4_TILE_ROWS);
}

static void make_middle(void *ctx, int32_t item, int32_t thread)
{
    const struct job *job = ctx;
    const struct ds4_simd *simd = job->dev->simd;
    const struct group *group = &job->group[item / n_tiles(job->gate)];
    int32_t index = item % n_tiles(job->gate), end = group->first + group->n;
    struct ds4_rows gate = tile_of(job->gate, group->expert, index);
    struct ds4_rows up = tile_of(job->up, group->expert, index);

    (void)thread;
    for (int32_t p = group->first; p < end; p += DS4_TILE_INPUTS) {
        int32_t n = end - p < DS4_TILE_INPUTS ? end - p : DS4_TILE_INPUTS;
        const void *gate_in[DS4_TILE_INPUTS], *up_in[DS4_TILE_INPUTS];
        float g[DS4_TILE_INPUTS][DS4_TILE_ROWS], u[DS4_TILE_INPUTS][DS4_TILE_ROWS];

        for (int32_t j = 0; j < n; j++) {
            gate_in[j] = x_input(job, job->gate_kind, job->gate_act, p + j);
            up_in[j] = x_input(job, job->up_kind, job->up_act, p + j);
        }
        ds4_cpu_multiply(simd, job->gate_kind, &gate, gate_in, n, g);
        ds4_cpu_multiply(simd, job->up_kind, &up, up_in, n, u);
        for (int32_t j = 0; j < n; j++) {
            float *m = middle_row(job, p + j) + index * DS4_TILE_ROWS;

            for (int32_t r = 0; r < gate.n_row; r++)
                m[r] = middle_value(g[j][r], u[j][r], job->clamp, job->pair[p + j].weight);
        }
    }
}

/* n values of a use's down row, from value `first` on: into the token's sum, or apart. */
static void put_down(const struct job *job, const struct pair *pair, int32_t first,
                     const float *out, int32_t n)
{
    const struct ds4_moe_args *a = job->a;
    float *y = job->in_parts ? a->part + (int64_t)pair->use * job->down->n_row
                             : (float *)a->y.data + pair->token * a->y.stride[0];

    y += first;
    for (int32_t r = 0; r < n; r++)
        y[r] = job->in_parts ? out[r] : y[r] + out[r];
}

static void add_down(void *ctx, int32_t item, int32_t thread)
{
    const struct job *job = ctx;

    (void)thread;
    for (int32_t i = 0; i < job->n_group; i++) {
        const struct group *group = &job->group[i];
        struct ds4_rows down = tile_of(job->down, group->expert, item);
        int32_t end = group->first + group->n;

        for (int32_t p = group->first; p < end; p += DS4_TILE_INPUTS) {
            int32_t n = end - p < DS4_TILE_INPUTS ? end - p : DS4_TILE_INPUTS;
            const void *in[DS4_TILE_INPUTS];
            float out[DS4_TILE_INPUTS][DS4_TILE_ROWS];

            for (int32_t j = 0; j < n; j++)
                in[j] = job->down_kind == DS4_ACT_NONE ? (const void *)middle_row(job, p + j)
                                                       : middle_act(job, p + j);
            ds4_cpu_multiply(job->dev->simd, job->down_kind, &down, in, n, out);
            for (int32_t j = 0; j < n; j++)
                put_down(job, &job->pair[p + j], item * DS4_TILE_ROWS, out[j], down.n_row);
        }
    }
}

static void run_groups(struct job *job, int32_t n_pair)
{
    struct ds4_pool *pool = job->dev->pool;

    if (job->gate_kind != DS4_ACT_NONE || job->up_kind != DS4_ACT_NONE)
        ds4_pool_run(pool, job->n_token, quantise_x, job);
    ds4_pool_run(pool, job->n_group * n_tiles(job->gate), make_middle, job);
    if (job->down_kind != DS4_ACT_NONE)
        ds4_pool_run(pool, n_pair, quantise_middle, job);
    ds4_pool_run(pool, n_tiles(job->down), add_down, job);
}

/* ---- grouping ----------------------------------------------------------------------------------- */

static bool usable(struct job *job, int32_t use)
{
    const struct ds4_moe_args *a = job->a;
    int32_t id = a->id[use];

    if (!ds4_cpu_active(a->batch, use / a->n_used) || id == DS4_EXPERT_ELSEWHERE)
        return false;
    if (id >= 0 && id < a->gate.n_stack)
        return true;
    atomic_store(&job->dev->wrong, "an expert id is out of range");
    return false;
}

/* Counting sort of the uses by expert, tokens rising within one. */
static int32_t group_uses(struct job *job)
{
    const struct ds4_moe_args *a = job->a;
    int32_t n_use = a->batch->n_tok * a->n_used, n_expert = a->gate.n_stack;
    int32_t *start = job->start;

    memset(start, 0, ((size_t)n_expert + 1) * sizeof(*start));
    for (int32_t i = 0; i < n_use; i++) {
        if (usable(job, i))
            start[a->id[i] + 1]++;
    }
    for (int32_t e = 0; e < n_expert; e++) {
        if (start[e + 1] > 0)
            job->group[job->n_group++] = (struct group){e, start[e], start[e + 1]};
        start[e + 1] += start[e];
    }
    for (int32_t i = 0; i < n_use; i++) {
        if (usable(job, i))
            job->pair[start[a->id[i]]++] = (struct pair){i / a->n_used, i, a->weight[i]};
    }
    return job->n_group > 0 ? job->group[job->n_group - 1].first + job->group[job->n_group - 1].n
                            : 0;
}

static void choose_kinds(struct job *job)
{
    bool fast = job->dev->products == DS4_PRODUCTS_FAST;

    job->gate_kind = fast ? ds4_cpu_act_kind(job->gate->dtype) : DS4_ACT_NONE;
    job->up_kind = fast ? ds4_cpu_act_kind(job->up->dtype) : DS4_ACT_NONE;
    job->down_kind = fast ? ds4_cpu_act_kind(job->down->dtype) : DS4_ACT_NONE;
}

static void run_routed(struct job *job)
{
    const struct ds4_moe_args *a = job->a;
    int32_t n_tok = a->batch->n_tok;

    job->gate = &a->gate;
    job->up = &a->up;
    job->down = &a->down;
    job->clamp = a->clamp;
    job->first_token = 0;
    job->n_token = n_tok;
    choose_kinds(job);
    place(job, n_tok, a->n_used);
    run_groups(job, group_uses(job));
}

static void run_shared(struct job *job, size_t shared_bytes)
{
    const struct ds4_moe_args *a = job->a;
    int32_t n_tok = a->batch->n_tok, chunk = n_tok;

    job->gate = &a->shared_gate;
    job->up = &a->shared_up;
    job->down = &a->shared_down;
    job->clamp = a->shared_clamp;
    choose_kinds(job);
    while (chunk > 1 && lay_out(chunk, 1, 1, job->gate->n_col, job->gate->n_row).end > shared_bytes)
        chunk = (chunk + 1) / 2;
    for (int32_t t = 0; t < n_tok; t += chunk) {
        int32_t n_pair = 0;

        job->first_token = t;
        job->n_token = n_tok - t < chunk ? n_tok - t : chunk;
        place(job, job->n_token, 1);
        for (int32_t i = t; i < t + job->n_token; i++) {
            if (ds4_cpu_active(a->batch, i))
                job->pair[n_pair++] = (struct pair){i, i, 1.0f};
        }
        job->group[0] = (struct group){0, 0, n_pair};
        job->n_group = 1;
        run_groups(job, n_pair);
    }
}

static struct ds4_need need_here(const struct ds4_moe_args *a)
{
    assert(a->x.dtype == DS4_DTYPE_F32 && a->y.dtype == DS4_DTYPE_F32);
    assert(a->down.n_col == a->gate.n_row && a->up.n_row == a->gate.n_row);
    return need_of(a->batch->n_tok, a->n_used, a->gate.n_stack, a->gate.n_col, a->gate.n_row,
                   a->shared_gate.n_row);
}

void ds4_cpu_moe(struct ds4_device *dev, const struct ds4_moe_args *a)
{
    struct ds4_need need = need_here(a);
    struct job job = {.dev = dev, .a = a, .scratch = ds4_cpu_scratch(dev, need)};

    for (int32_t t = 0; t < a->batch->n_tok; t++) {
        if (ds4_cpu_active(a->batch, t))
            memset((float *)a->y.data + t * a->y.stride[0], 0,
                   (size_t)a->down.n_row * sizeof(float));
    }
    run_routed(&job);
    run_shared(&job, need.shared_bytes);
}

void ds4_cpu_moe_uses(struct ds4_device *dev, const struct ds4_moe_args *a)
{
    struct job job = {
        .dev = dev, .a = a, .scratch = ds4_cpu_scratch(dev, need_here(a)), .in_parts = true};

    run_routed(&job);
}

static void join_token(void *ctx, int32_t t, int32_t thread)
{
    const struct ds4_moe_args *a = ctx;
    float *y = (float *)a->y.data + t * a->y.stride[0];

    (void)thread;
    if (!ds4_cpu_active(a->batch, t))
        return;
    memset(y, 0, (size_t)a->down.n_row * sizeof(float));
    for (int32_t i = 0; i < a->n_used; i++) {
        int32_t use = t * a->n_used + i;
        const float *part = a->part + (int64_t)use * a->down.n_row;

        for (int32_t r = 0; a->id[use] >= 0 && r < a->down.n_row; r++)
            y[r] += part[r];
    }
}

void ds4_cpu_moe_join(struct ds4_device *dev, const struct ds4_moe_args *a)
{
    struct ds4_need need = need_here(a);
    struct job job = {.dev = dev, .a = a, .scratch = ds4_cpu_scratch(dev, need)};

    ds4_pool_run(dev->pool, a->batch->n_tok, join_token, (void *)a);
    run_shared(&job, need.shared_bytes);
}

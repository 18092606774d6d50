/* Experts (step 9, paper 4.3): y = sum over chosen experts, ids rising, of
 * w2_e (silu(min(g, clamp)) * bound(u, -clamp, clamp) * weight_e), then the shared expert.
 *
 * The host never sees the routing.  One block per expert counts and lists its uses (a counting sort: the
 * slots of an expert are consecutive, tokens rising), touched experts move to the front of the group
 * list, and every launch below has the size of the worst routing; blocks of absent groups leave at once.
 * Each touched expert's weights are read once per tile of its uses.  Down products go to one row per
 * slot; a last kernel adds a token's slots in rising order (= rising expert id), then the shared row:
 * no atomics, the same bits every run.
 * Bytes: touched experts as stored; the rows between the launches stay in L2 for decode steps. */
#include "kernels/cuda/act.cuh"
#include "kernels/cuda/experts_args.cuh"
#include "kernels/cuda/product.cuh"

#define THREADS         256
#define MAX_CHUNK       2048 /* tokens at once: bounds scratch */
#define STREAM_MAX_ROWS 64   /* tokens up to which experts stream (a few uses each) */
#define MAX_USED        64

/* Scratch of one chunk, all device memory. */
struct room {
    struct ds4_dev_group *group; /* [n_expert], touched ones first */
    int32_t *n_slot;             /* [1] slots in use */
    int32_t *token;              /* [n_use] of a slot, within the chunk */
    float *weight;               /* [n_use] of a slot */
    int32_t *slot_of;            /* [n_use] of a use; -1: none */
    uint8_t *x;                  /* packed inputs: */
    struct ds4_packed packed;    /*   what it holds now, */
    enum ds4_form packed_form;   /*   in this form, */
    const void *packed_from;     /*   of these rows; NULL: nothing */
    int32_t n_packed;
    float *gate, *up;      /* [slots, d_expert], or the shared expert's */
    uint8_t *middle;       /* packed */
    float *part;           /* [n_use, d] */
    float *shared;         /* [n_tok, d] */
    int64_t middle_values; /* values that gate, up and middle each have room for */
    size_t used;
};

/* ---- grouping ---------------------------------------------------------------------------------------- */

/* Expert of a use, -1 if it must not run. */
static __device__ __forceinline__ int32_t expert_of(const struct ds4_dev_batch &batch,
                                                    const int32_t *id, int32_t tok0, int32_t use,
                                                    int32_t n_used, int32_t n_expert)
{
    const int32_t e = id[use];

    if (!batch.entry[batch.entry_of[tok0 + use / n_used]].active || e == DS4_EXPERT_ELSEWHERE)
        return -1;
    if (e < 0 || e >= n_expert) {
        *batch.wrong = DS4_DEV_WRONG_EXPERT;
        return -1;
    }
    return e;
}

/* Sum over the block's threads; `shared` holds THREADS / 32 words. */
static __device__ __forceinline__ int32_t block_count(int32_t v, int32_t *shared)
{
    int32_t sum = 0;

    v = __reduce_add_sync(0xffffffffu, v);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = v;
    __syncthreads();
    for (int i = 0; i < THREADS / 32; i++)
        sum += shared[i];
    return sum;
}

/* Lists the uses of expert e in rising order from slot `at` on. */
static __device__ void list_uses(const struct ds4_dev_batch &batch, const int32_t *id,
                                 const float *weight, int32_t tok0, int32_t n_use, int32_t n_used,
                                 int32_t e, int32_t at, const struct room &r, int32_t *shared)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    for (int32_t base = 0; base < n_use; base += THREADS) {
        const int32_t use = base + threadIdx.x;
        const bool mine = use < n_use && expert_of(batch, id, tok0, use, n_used, gridDim.x) == e;
        const uint32_t vote = __ballot_sync(0xffffffffu, mine);
        int32_t slot = at + __popc(vote & ((1u << lane) - 1));

        __syncthreads();
        if (lane == 0)
            shared[warp] = __popc(vote);
        __syncthreads();
        for (int i = 0; i < THREADS / 32; i++) {
            slot += i < warp ? shared[i] : 0;
            at += shared[i];
        }
        if (mine) {
            r.token[slot] = use / n_used;
            r.weight[slot] = weight[use];
            r.slot_of[use] = slot;
        }
    }
}

/* Block e makes group entry, slots and look-ups of expert e. */
static __global__ void group_kernel(struct ds4_dev_batch batch, const int32_t *id,
                                    const float *weight, int32_t tok0, int32_t n_use,
                                    int32_t n_used, struct room r)
{
    ds4_take_turn();
    extern __shared__ uint32_t touched[]; /* one bit per expert */
    __shared__ int32_t shared[THREADS / 32];
    const int32_t e = blockIdx.x, n_expert = gridDim.x, n_word = (n_expert + 31) / 32;
    int32_t below = 0, mine = 0, rank = 0, all = 0;

    for (int32_t i = threadIdx.x; i < n_word; i += THREADS)
        touched[i] = 0;
    __syncthreads();
    for (int32_t use = threadIdx.x; use < n_use; use += THREADS) {
        const int32_t v = expert_of(batch, id, tok0, use, n_used, n_expert);

        if (v >= 0) {
            below += v < e;
            mine += v == e;
            atomicOr(&touched[v / 32], 1u << v % 32);
        } else if (e == 0) {
            r.slot_of[use] = -1;
        }
    }
    below = block_count(below, shared);
    mine = block_count(mine, shared);
    if (threadIdx.x == 0) {
        for (int32_t i = 0; i < n_word; i++) {
            all += __popc(touched[i]);
            rank += i < e / 32    ? __popc(touched[i])
                    : i == e / 32 ? __popc(touched[i] & ((1u << e % 32) - 1))
                                  : 0;
        }
        /* Untouched experts fill the end of the list, so that every entry is written. */
        r.group[mine > 0 ? rank : all + e - rank] = ds4_dev_group{e, below, mine};
        if (e == n_expert - 1)
            *r.n_slot = below + mine;
    }
    if (mine > 0)
        list_uses(batch, id, weight, tok0, n_use, n_used, e, below, r, shared);
}

/* ---- between the products ------------------------------------------------------------------------- */

/* Middle rows, packed for the down product.  Block (x: values, y: slot). */
template <int FORM>
static __global__ void middle_kernel(const float *gate, const float *up, const float *weight,
                                     const int32_t *n_slot, int32_t d, float clamp,
                                     struct ds4_packed dst)
{
    ds4_take_turn();
    const int32_t i = blockIdx.x * THREADS + threadIdx.x, slot = blockIdx.y;
    uint8_t *row = (uint8_t *)dst.data + slot * dst.row_bytes;
    float v = 0.0f;

    if (n_slot != NULL && slot >= *n_slot)
        return;
    if (i < d)
        v = ds4_middle_value(gate[(int64_t)slot * d + i], up[(int64_t)slot * d + i], clamp,
                             weight != NULL ? weight[slot] : 1.0f);
    if (FORM == DS4_FORM_INT8) {
        if (i / 32 < dst.part) /* whole warps */
            ds4_pack_unit(v, i / 32, dst.part, row);
    } else if (i < dst.part) {
        if (FORM == DS4_FORM_EXACT)
            ((float *)row)[i] = v;
        else
            ((__nv_bfloat16 *)row)[i] = __float2bfloat16_rn(v);
    }
}

/* y = a token's down rows in rising slots, then the shared row.  Block (x: quads of values, y: token). */
static __global__ void combine_kernel(struct ds4_dev_batch batch, int32_t tok0,
                                      const int32_t *slot_of, int32_t n_used, const float *part,
                                      const float *shared_row, int32_t d, struct ds4_dev_mat y)
{
    ds4_take_turn();
    __shared__ int32_t slot[MAX_USED];
    __shared__ int32_t n_slot;
    const int32_t i = 4 * (blockIdx.x * THREADS + threadIdx.x), t = blockIdx.y;
    float sum[4] = {};

    if (!batch.entry[batch.entry_of[tok0 + t]].active)
        return;
    if (threadIdx.x == 0) {
        int n = 0;

        for (int k = 0; k < n_used; k++) {
            const int32_t s = slot_of[t * n_used + k];
            int at = n;

            if (s < 0)
                continue;
            for (; at > 0 && slot[at - 1] > s; at--)
                slot[at] = slot[at - 1];
            slot[at] = s;
            n++;
        }
        n_slot = n;
    }
    __syncthreads();
    if (d % 4 == 0 && i < d) {
        const float4 last = *(const float4 *)(shared_row + (int64_t)t * d + i);

#pragma unroll 6
        for (int k = 0; k < n_slot; k++) {
            const float4 v = *(const float4 *)(part + (int64_t)slot[k] * d + i);

            sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
        }
        sum[0] += last.x, sum[1] += last.y, sum[2] += last.z, sum[3] += last.w;
        if (!y.bf16 && y.stride % 4 == 0 && (uintptr_t)y.data % 16 == 0) {
            *(float4 *)((float *)y.data + (int64_t)(tok0 + t) * y.stride + i) =
                make_float4(sum[0], sum[1], sum[2], sum[3]);
            return;
        }
        for (int c = 0; c < 4; c++)
            ds4_mat_set(y, tok0 + t, i + c, sum[c]);
        return;
    }
    for (int c = i; c < i + 4 && c < d; c++) {
        float one = 0.0f;

        for (int k = 0; k < n_slot; k++)
            one += part[(int64_t)slot[k] * d + c];
        ds4_mat_set(y, tok0 + t, c, one + shared_row[(int64_t)t * d + c]);
    }
}

/* y = the shared row, then a token's down rows in rising slots.  Block (x: values, y: token). */
static __global__ void sum_kernel(struct ds4_dev_batch batch, const int32_t *slot_of,
                                  int32_t n_used, const float *part, const float *shared_row,
                                  int32_t d, struct ds4_dev_mat y)
{
    ds4_take_turn();
    __shared__ int32_t slots[MAX_USED];
    const int32_t i = blockIdx.x * THREADS + threadIdx.x, t = blockIdx.y, k = threadIdx.x;
    int32_t n = 0;
    float sum = 0.0f;

    if (!batch.entry[batch.entry_of[t]].active)
        return;
    if (k < n_used) {
        const int32_t mine = slot_of[t * n_used + k];
        int32_t rank = 0;

        for (int32_t u = 0; u < n_used; u++) {
            const int32_t other = slot_of[t * n_used + u];

            rank += other >= 0 && other < mine;
        }
        if (mine >= 0)
            slots[rank] = mine;
    }
    for (int32_t u = 0; u < n_used; u++)
        n += slot_of[t * n_used + u] >= 0;
    __syncthreads();
    if (i >= d)
        return;
    sum += shared_row[(int64_t)t * d + i];
    for (int32_t u = 0; u < n; u++)
        sum += part[(int64_t)slots[u] * d + i];
    ds4_mat_set(y, t, i, sum);
}

static struct ds4_packed make_middle(struct ds4_device *dev, enum ds4_form form,
                                     const struct room *r, const float *weight,
                                     const int32_t *n_slot, int32_t n, int32_t d, float clamp)
{
    const struct ds4_packed p = ds4_cuda_packed_at(form, 1, d, r->middle);
    const dim3 grid(ds4_div_up(ds4_pad(d, 64), THREADS), n);

    switch (form) {
    case DS4_FORM_DIGITS: /* dense products only */
    case DS4_FORM_EXACT:
        DS4_CHAIN(middle_kernel<DS4_FORM_EXACT>, grid, THREADS, 0, dev, r->gate, r->up, weight,
                  n_slot, d, clamp, p);
        break;
    case DS4_FORM_INT8:
        DS4_CHAIN(middle_kernel<DS4_FORM_INT8>, grid, THREADS, 0, dev, r->gate, r->up, weight,
                  n_slot, d, clamp, p);
        break;
    case DS4_FORM_TILE:
        DS4_CHAIN(middle_kernel<DS4_FORM_TILE>, grid, THREADS, 0, dev, r->gate, r->up, weight,
                  n_slot, d, clamp, p);
        break;
    }
    return p;
}

/* ---- scratch ----------------------------------------------------------------------------------------- */

static int64_t middle_values(int64_t n_use, int32_t d_expert, int32_t d_shared)
{
    const int64_t routed = n_use * ds4_pad(d_expert, 64), one = ds4_pad(d_shared, 64);

    return routed > one ? routed : one;
}

static struct room carve(struct ds4_device *dev, int32_t n, int32_t n_used, int32_t n_expert,
                         int32_t d, int32_t d_expert, int32_t d_shared)
{
    const int64_t n_use = (int64_t)n * n_used;
    struct room r = {};

    r.middle_values = middle_values(n_use, d_expert, d_shared);
    r.group = DS4_CARVE(dev, struct ds4_dev_group, n_expert, &r.used);
    r.n_slot = DS4_CARVE(dev, int32_t, 1, &r.used);
    r.token = DS4_CARVE(dev, int32_t, n_use, &r.used);
    r.weight = DS4_CARVE(dev, float, n_use, &r.used);
    r.slot_of = DS4_CARVE(dev, int32_t, n_use, &r.used);
    r.x = (uint8_t *)ds4_dev_carve(dev, ds4_cuda_packed_bytes(n, 1, d), &r.used);
    r.gate = DS4_CARVE(dev, float, r.middle_values, &r.used);
    r.up = DS4_CARVE(dev, float, r.middle_values, &r.used);
    r.middle = (uint8_t *)ds4_dev_carve(dev, 4 * (size_t)r.middle_values, &r.used);
    r.part = DS4_CARVE(dev, float, n_use *d, &r.used);
    r.shared = DS4_CARVE(dev, float, (int64_t)n *d, &r.used);
    return r;
}

static int32_t chunk_of(int32_t n_tok, int32_t n_used)
{
    int32_t most = 65535 / (n_used > 0 ? n_used : 1); /* slots are a grid's y */

    most = most < MAX_CHUNK ? most : MAX_CHUNK;
    return n_tok < most ? n_tok : most;
}

size_t ds4_cuda_moe_scratch(const struct ds4_device *dev, const struct ds4_limits *l)
{
    const size_t n = (size_t)chunk_of(l->max_tok, l->n_used), n_use = n * (size_t)l->n_used;
    const size_t values = (size_t)middle_values((int64_t)n_use, l->d_expert, l->max_cols);

    (void)dev;
    return (size_t)l->n_expert * sizeof(struct ds4_dev_group) + n_use * 12 +
           ds4_cuda_packed_bytes((int64_t)n, 1, l->d_model) + 12 * values +
           4 * (size_t)l->d_model * (n_use + n) + DS4_WEIGHT_ROOM + DS4_BLAS_ROOM + 16 * 256;
}

/* ---- the operation ----------------------------------------------------------------------------------- */

/* n rows of x in `form`; routed and shared experts mostly want the same. */
static struct ds4_packed pack_x(struct ds4_device *dev, struct room *r, enum ds4_form form,
                                struct ds4_dev_mat x, int32_t n, int32_t n_col)
{
    if (r->packed_from != x.data || r->n_packed != n || r->packed_form != form) {
        r->packed = ds4_cuda_pack(dev, form, x, n, 1, n_col, r->x);
        r->packed_from = x.data;
        r->n_packed = n;
        r->packed_form = form;
    }
    return r->packed;
}

static ds4_slab_fn slab_fn(enum ds4_dtype dtype)
{
    switch (dtype) {
#define DS4_CASE(name, type)                                                                       \
    case type:                                                                                     \
        return ds4_cuda_slab_##name;
        DS4_EXPERT_FNS(DS4_CASE)
#undef DS4_CASE
    default:
        return NULL;
    }
}

/* A product over groups; many tokens of the usual formats have a kernel of their own. */
static void grouped(struct ds4_device *dev, enum ds4_form form, const struct ds4_product *p,
                    size_t used)
{
    const ds4_slab_fn slab = slab_fn(p->dtype);
    const struct ds4_slab a = {*p, 0.0f, NULL, {}};

    if (p->group != NULL && form == DS4_FORM_TILE && slab != NULL)
        slab(dev, &a);
    else
        ds4_cuda_product(dev, form, p, used);
}

/* p with what gate and up have in common. */
static void describe(struct ds4_product *p, const struct ds4_weight *gate,
                     const struct ds4_weight *up)
{
    p->dtype = gate->dtype;
    p->w[0] = (const uint8_t *)gate->data;
    p->w[1] = (const uint8_t *)up->data;
    p->row_bytes = gate->row_bytes;
    p->n_row = gate->n_row;
    p->n_col = gate->n_col;
    p->part_bytes = (size_t)gate->n_row * gate->row_bytes;
    p->y_stride = gate->n_row;
    p->n_w = up->dtype == gate->dtype && up->row_bytes == gate->row_bytes ? 2 : 1;
}

/* Gate and up products of n_x rows of x (experts: of r's slots) into r->gate and r->up. */
static void gate_and_up(struct ds4_device *dev, struct room *r, struct ds4_product p,
                        const struct ds4_weight *gate, const struct ds4_weight *up,
                        struct ds4_dev_mat x, int32_t n_x, enum ds4_form form,
                        enum ds4_form up_form)
{
    describe(&p, gate, up);
    p.y[0] = r->gate;
    p.y[1] = r->up;
    p.x = pack_x(dev, r, form, x, n_x, p.n_col);
    grouped(dev, form, &p, r->used);
    if (p.n_w == 2)
        return;
    p.dtype = up->dtype;
    p.w[0] = p.w[1];
    p.y[0] = r->up;
    p.row_bytes = up->row_bytes;
    p.part_bytes = (size_t)up->n_row * up->row_bytes;
    p.x = pack_x(dev, r, up_form, x, n_x, p.n_col);
    grouped(dev, up_form, &p, r->used);
}

static void down(struct ds4_device *dev, const struct room *r, struct ds4_product p,
                 const struct ds4_weight *w, struct ds4_packed x, enum ds4_form form, float *y)
{
    p.dtype = w->dtype;
    p.w[0] = (const uint8_t *)w->data;
    p.n_w = 1;
    p.row_bytes = w->row_bytes;
    p.n_row = w->n_row;
    p.n_col = w->n_col;
    p.part_bytes = (size_t)w->n_row * w->row_bytes;
    p.src = NULL; /* one packed middle row per slot */
    p.x = x;
    p.y[0] = y;
    p.y_stride = w->n_row;
    grouped(dev, form, &p, r->used);
}

/* Gate, up and middle of r's slots in one launch; false if their formats differ or have no such kernel. */
static bool slab_middle(struct ds4_device *dev, const struct ds4_moe_args *a, struct room *r,
                        const struct ds4_product *p, struct ds4_dev_mat x, int32_t n,
                        struct ds4_packed *middle)
{
    const ds4_slab_fn slab = slab_fn(a->gate.dtype);
    struct ds4_slab s = {*p, a->clamp, r->weight, {}};

    describe(&s.p, &a->gate, &a->up);
    if (slab == NULL || s.p.n_w != 2)
        return false;
    s.p.x = pack_x(dev, r, DS4_FORM_TILE, x, n, s.p.n_col);
    s.middle = ds4_cuda_packed_at(DS4_FORM_TILE, 1, s.p.n_row, r->middle);
    slab(dev, &s);
    *middle = s.middle;
    return true;
}

static void run_routed(struct ds4_device *dev, const struct ds4_moe_args *a, struct room *r,
                       struct ds4_dev_mat x, int32_t tok0, int32_t n, bool exact)
{
    const int32_t n_use = n * a->n_used, n_expert = a->gate.n_stack;
    const enum ds4_form down_form = ds4_cuda_form(a->down.dtype, n, STREAM_MAX_ROWS, exact);
    struct ds4_product p = {};
    struct ds4_packed middle;

    DS4_CHAIN(group_kernel, n_expert, THREADS, sizeof(uint32_t) * (size_t)ds4_div_up(n_expert, 32),
              dev, dev->batch, a->id + (size_t)tok0 * a->n_used,
              a->weight + (size_t)tok0 * a->n_used, tok0, n_use, a->n_used, *r);
    p.n_part = n_expert < n_use ? n_expert : n_use;
    p.n = n_use;
    p.group = r->group;
    p.src = r->token;
    if (down_form != DS4_FORM_TILE || !slab_middle(dev, a, r, &p, x, n, &middle)) {
        gate_and_up(dev, r, p, &a->gate, &a->up, x, n,
                    ds4_cuda_form(a->gate.dtype, n, STREAM_MAX_ROWS, exact),
                    ds4_cuda_form(a->up.dtype, n, STREAM_MAX_ROWS, exact));
        middle =
            make_middle(dev, down_form, r, r->weight, r->n_slot, n_use, a->gate.n_row, a->clamp);
    }
    down(dev, r, p, &a->down, middle, down_form, r->part);
}

/* All rows, active or not: nothing of an inactive row is used afterwards. */
static void run_shared(struct ds4_device *dev, const struct ds4_moe_args *a, struct room *r,
                       struct ds4_dev_mat x, int32_t n, bool exact)
{
    const int64_t fit = r->middle_values / ds4_pad(a->shared_gate.n_row, 64);
    const int32_t step = fit < n ? (int32_t)fit : n; /* a wide one goes some tokens at a time */
    const enum ds4_form gate_form =
        ds4_cuda_form(a->shared_gate.dtype, n, DS4_GEMV_MAX_ROWS, exact);
    const enum ds4_form up_form = ds4_cuda_form(a->shared_up.dtype, n, DS4_GEMV_MAX_ROWS, exact);
    const enum ds4_form down_form =
        ds4_cuda_form(a->shared_down.dtype, n, DS4_GEMV_MAX_ROWS, exact);

    for (int32_t i = 0; i < n; i += step) {
        struct ds4_product p = {};
        struct ds4_dev_mat rows = x;
        struct ds4_packed middle;

        rows.data = (uint8_t *)x.data + i * x.stride * (x.bf16 ? 2 : 4);
        p.n_part = 1;
        p.n = n - i < step ? n - i : step;
        gate_and_up(dev, r, p, &a->shared_gate, &a->shared_up, rows, p.n, gate_form, up_form);
        middle =
            make_middle(dev, down_form, r, NULL, NULL, p.n, a->shared_gate.n_row, a->shared_clamp);
        down(dev, r, p, &a->shared_down, middle, down_form,
             r->shared + (int64_t)i * a->shared_down.n_row);
    }
}

/* ---- few tokens, int8 products: two launches for everything ------------------------------------------- */

static ds4_experts_fn experts_fn(enum ds4_dtype dtype, bool gate)
{
    switch (dtype) {
#define DS4_CASE(name, type)                                                                       \
    case type:                                                                                     \
        return gate ? ds4_cuda_gate_##name : ds4_cuda_down_##name;
        DS4_EXPERT_FNS(DS4_CASE)
#undef DS4_CASE
    default:
        return NULL;
    }
}

static bool can_fuse(const struct ds4_moe_args *a, int32_t n)
{
    return n <= DS4_EXPERTS_MAX_TOK && experts_fn(a->gate.dtype, true) != NULL &&
           experts_fn(a->down.dtype, false) != NULL && a->up.dtype == a->gate.dtype &&
           a->up.row_bytes == a->gate.row_bytes && a->shared_gate.dtype == DS4_DTYPE_Q8_0 &&
           a->shared_up.dtype == DS4_DTYPE_Q8_0 && a->shared_down.dtype == DS4_DTYPE_Q8_0 &&
           a->gate.n_row % 32 == 0;
}

/* Room of the unfused path, used otherwise: part for the shared products, gate for its middle rows. */
static bool fits_fused(const struct ds4_moe_args *a, const struct room *r, int32_t n)
{
    const int64_t d_shared = a->shared_gate.n_row;

    return 2 * n * d_shared <= (int64_t)n * a->n_used * a->down.n_row &&
           n * d_shared <= r->middle_values;
}

/* The shared expert's two products go first: they need no routing. */
static void run_fused(struct ds4_device *dev, const struct ds4_moe_args *a, struct room *r,
                      struct ds4_dev_mat x, int32_t n)
{
    const int32_t n_use = n * a->n_used, n_expert = a->gate.n_stack;
    const int32_t d_shared = a->shared_gate.n_row;
    float *const gate = r->part, *const up = gate + (int64_t)n * d_shared;
    struct ds4_experts p = {};
    struct ds4_product shared = {};

    p.x = pack_x(dev, r, DS4_FORM_INT8, x, n, a->gate.n_col);
    shared.dtype = a->shared_gate.dtype;
    shared.w[0] = (const uint8_t *)a->shared_gate.data;
    shared.w[1] = (const uint8_t *)a->shared_up.data;
    shared.n_w = 2;
    shared.row_bytes = a->shared_gate.row_bytes;
    shared.n_row = d_shared;
    shared.n_col = a->shared_gate.n_col;
    shared.n_part = 1;
    shared.n = n;
    shared.x = p.x;
    shared.y[0] = gate;
    shared.y[1] = up;
    shared.y_stride = d_shared;
    ds4_cuda_product(dev, DS4_FORM_INT8, &shared, r->used);
    if (n == 1 && a->n_used <= DS4_ONE_SLOTS) {
        p.id = a->id;
        p.id_weight = a->weight;
    } else {
        DS4_CHAIN(group_kernel, n_expert, THREADS,
                  sizeof(uint32_t) * (size_t)ds4_div_up(n_expert, 32), dev, dev->batch, a->id,
                  a->weight, 0, n_use, a->n_used, *r);
    }
    p.n_used = a->n_used;
    p.n_expert = n_expert;
    p.batch = dev->batch;
    p.n_tok = n;
    p.d = a->down.n_row;
    p.d_expert = a->gate.n_row;
    p.d_shared = d_shared;
    p.group = r->group;
    p.n_group = n_expert < n_use ? n_expert : n_use;
    p.token = r->token;
    p.weight = r->weight;
    p.gate = (const uint8_t *)a->gate.data;
    p.up = (const uint8_t *)a->up.data;
    p.gate_row_bytes = a->gate.row_bytes;
    p.clamp = a->clamp;
    p.middle = ds4_cuda_packed_at(DS4_FORM_INT8, 1, a->gate.n_row, r->middle);
    p.down = (const uint8_t *)a->down.data;
    p.down_row_bytes = a->down.row_bytes;
    p.shared_gate = gate;
    p.shared_up = up;
    p.shared_clamp = a->shared_clamp;
    p.shared_middle = ds4_cuda_packed_at(DS4_FORM_INT8, 1, d_shared, r->gate);
    p.shared_down = (const uint8_t *)a->shared_down.data;
    p.shared_row_bytes = a->shared_down.row_bytes;
    p.y = ds4_dev_mat_of(&a->y);
    p.part = r->part;
    experts_fn(a->gate.dtype, true)(dev, &p);
    if (p.id == NULL) {
        shared.n_part = 1;
        down(dev, r, shared, &a->shared_down, p.shared_middle, DS4_FORM_INT8, r->shared);
    }
    experts_fn(a->down.dtype, false)(dev, &p);
    if (p.id == NULL)
        DS4_CHAIN(sum_kernel, dim3(ds4_div_up(p.d, THREADS), n), THREADS, 0, dev, dev->batch,
                  r->slot_of, a->n_used, r->part, r->shared, p.d, p.y);
}

void ds4_cuda_moe(struct ds4_device *dev, const struct ds4_moe_args *a)
{
    const int32_t n_tok = dev->batch.n_tok, d = a->down.n_row, step = chunk_of(n_tok, a->n_used);
    const bool exact = dev->products == DS4_PRODUCTS_EXACT;

    if (a->n_used > MAX_USED)
        ds4_cuda_fatal(__FILE__, __LINE__, "moe", "more experts per token than the kernel sorts");
    ds4_dev_spoil(dev, &a->y);
    for (int32_t i = 0; i < n_tok; i += step) {
        const int32_t n = n_tok - i < step ? n_tok - i : step;
        struct room r = carve(dev, n, a->n_used, a->gate.n_stack, a->gate.n_col, a->gate.n_row,
                              a->shared_gate.n_row);
        struct ds4_dev_mat x = ds4_dev_mat_of(&a->x);

        x.data = (uint8_t *)x.data + i * x.stride * (x.bf16 ? 2 : 4);
        if (!exact && step == n_tok && can_fuse(a, n) && fits_fused(a, &r, n)) {
            run_fused(dev, a, &r, x, n);
            return;
        }
        run_routed(dev, a, &r, x, i, n, exact);
        run_shared(dev, a, &r, x, n, exact);
        DS4_CHAIN(combine_kernel, dim3(ds4_div_up(d, 4 * THREADS), n), THREADS, 0, dev, dev->batch,
                  i, r.slot_of, a->n_used, r.part, r.shared, d, ds4_dev_mat_of(&a->y));
    }
}

/* ---- in pieces: some experts lie elsewhere -------------------------------------------------------------- */

/* Down rows from their slots to their uses.  Block (x: values, y: use). */
static __global__ void part_kernel(const int32_t *slot_of, const float *rows, int32_t d,
                                   float *part)
{
    const int32_t i = blockIdx.x * THREADS + threadIdx.x, use = blockIdx.y, slot = slot_of[use];

    if (i < d && slot >= 0)
        part[(int64_t)use * d + i] = rows[(int64_t)slot * d + i];
}

/* y = a token's parts in rising uses, then the shared row.  Block (x: values, y: token). */
static __global__ void join_kernel(struct ds4_dev_batch batch, int32_t tok0, const int32_t *id,
                                   int32_t n_used, const float *part, const float *shared_row,
                                   int32_t d, struct ds4_dev_mat y)
{
    const int32_t i = blockIdx.x * THREADS + threadIdx.x, t = blockIdx.y;
    float sum = 0.0f;

    if (i >= d || !batch.entry[batch.entry_of[tok0 + t]].active)
        return;
    for (int k = 0; k < n_used; k++) {
        const int64_t use = (int64_t)(tok0 + t) * n_used + k;

        if (id[use] >= 0)
            sum += part[use * d + i];
    }
    ds4_mat_set(y, tok0 + t, i, sum + shared_row[(int64_t)t * d + i]);
}

static struct ds4_dev_mat rows_from(const struct ds4_moe_args *a, int32_t tok0)
{
    struct ds4_dev_mat x = ds4_dev_mat_of(&a->x);

    x.data = (uint8_t *)x.data + tok0 * x.stride * (x.bf16 ? 2 : 4);
    return x;
}

static struct room carve_for(struct ds4_device *dev, const struct ds4_moe_args *a, int32_t n)
{
    return carve(dev, n, a->n_used, a->gate.n_stack, a->gate.n_col, a->gate.n_row,
                 a->shared_gate.n_row);
}

void ds4_cuda_moe_uses(struct ds4_device *dev, const struct ds4_moe_args *a)
{
    const int32_t n_tok = dev->batch.n_tok, d = a->down.n_row, step = chunk_of(n_tok, a->n_used);
    const bool exact = dev->products == DS4_PRODUCTS_EXACT;

    for (int32_t i = 0; i < n_tok; i += step) {
        const int32_t n = n_tok - i < step ? n_tok - i : step;
        struct room r = carve_for(dev, a, n);

        run_routed(dev, a, &r, rows_from(a, i), i, n, exact);
        DS4_LAUNCH(part_kernel, dim3(ds4_div_up(d, THREADS), n * a->n_used), THREADS, 0,
                   dev->stream, r.slot_of, r.part, d, a->part + (int64_t)i * a->n_used * d);
    }
}

void ds4_cuda_moe_join(struct ds4_device *dev, const struct ds4_moe_args *a)
{
    const int32_t n_tok = dev->batch.n_tok, d = a->down.n_row, step = chunk_of(n_tok, a->n_used);
    const bool exact = dev->products == DS4_PRODUCTS_EXACT;

    ds4_dev_spoil(dev, &a->y);
    for (int32_t i = 0; i < n_tok; i += step) {
        const int32_t n = n_tok - i < step ? n_tok - i : step;
        struct room r = carve_for(dev, a, n);

        run_shared(dev, a, &r, rows_from(a, i), n, exact);
        DS4_LAUNCH(join_kernel, dim3(ds4_div_up(d, THREADS), n), THREADS, 0, dev->stream,
                   dev->batch, i, a->id, a->n_used, a->part, r.shared, d, ds4_dev_mat_of(&a->y));
    }
}

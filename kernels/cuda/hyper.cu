/* Hyper-connections: mixes, Sinkhorn, read, write, and the head's last read.
 *
 * The mixing matrix (0.79 MB in f16 for Flash) is the traffic of a decode step: the state of 16,384
 * values is cut into slices of 512, one block each, so that 32 blocks a token read it side by side.  A slice
 * of four streams is the same 128 columns of each, so that the write of the row before happens on the way
 * to the slice.  A second kernel adds the partial sums in slice order; one block a row forms, norms and
 * packs u, another does the 4 x 4 Sinkhorn beside it.  Everything that is a weight is on its way before
 * the state is there.  Sums are f32 in a fixed order, so a row's bits depend on the row alone. */
#include "kernels/cuda/act.cuh"
#include "kernels/cuda/hyper_few.cuh"
#include "kernels/cuda/hyper_rows.cuh"
#include "kernels/cuda/rows.cuh"

#define HYPER_SLICE   512
#define HYPER_THREADS 256
#define HYPER_MAX     8
#define HYPER_MAX_MIX (HYPER_MAX * (HYPER_MAX + 2))
#define ANY           (-1)
#define HYPER_WARPS   (HYPER_THREADS / 32)
#define HYPER_ROUNDS  4   /* mixes a warp has under way */
#define HYPER_COLUMNS 128 /* of each of four streams in a slice */

/* The streams of all tokens: x[t][k][i]. */
struct streams {
    struct ds4_dev_mat mat; /* stride = between tokens; a token's streams are contiguous */
    int32_t n_hyper;
    int32_t d;
};

static struct streams streams_of(const struct ds4_tensor *x)
{
    struct streams s = {
        {x->data, x->stride[0], x->dtype == DS4_DTYPE_BF16}, x->shape[1], x->shape[2]};

    return s;
}

/* Values 4i .. 4i + 3 of a row of fn whose rows are aligned for one load. */
template <int D> static __device__ __forceinline__ float4 fn_quad(const uint8_t *row, int32_t i)
{
    if constexpr (D == DS4_DTYPE_F32) {
        return __ldg((const float4 *)row + i);
    } else {
        const uint2 v = __ldg((const uint2 *)row + i);

        if constexpr (D == DS4_DTYPE_BF16)
            return make_float4(ds4_bits_f32(v.x << 16), ds4_bits_f32(v.x & 0xffff0000u),
                               ds4_bits_f32(v.y << 16), ds4_bits_f32(v.y & 0xffff0000u));
        else
            return make_float4(__half2float(__ushort_as_half((unsigned short)v.x)),
                               __half2float(__ushort_as_half((unsigned short)(v.x >> 16))),
                               __half2float(__ushort_as_half((unsigned short)v.y)),
                               __half2float(__ushort_as_half((unsigned short)(v.y >> 16))));
    }
}

/* The write half. */
struct write_args {
    struct ds4_dev_mat o;
    const float *post;
    const float *comb;
    bool on;
};

/* Two of the four streams at this thread's column of a slice, written first if the step says so. */
struct column {
    float old[4];
    float out;
    float post[4];
    float comb[16];
};

__device__ __forceinline__ void load_column(const struct streams &x, const struct write_args &w,
                                            int32_t t, int32_t c, struct column *v)
{
#pragma unroll
    for (int j = 0; j < 4; j++)
        v->old[j] = ds4_mat_get(x.mat, t, (int64_t)j * x.d + c);
    if (!w.on)
        return;
    v->out = ds4_mat_get(w.o, t, c);
#pragma unroll
    for (int j = 0; j < 4; j++)
        v->post[j] = w.post[4 * (int64_t)t + j];
#pragma unroll
    for (int j = 0; j < 16; j++)
        v->comb[j] = w.comb[16 * (int64_t)t + j];
}

/* The slice of row t in shared memory: value i is global value index_of(i).  Every thread has one column
 * of two streams.  Waits for all until the slice is there. */
__device__ __forceinline__ void take_slice(const struct streams &x, const struct write_args &w,
                                           int32_t t, int32_t c0, float *mine)
{
    const int32_t column = threadIdx.x % HYPER_COLUMNS, k0 = threadIdx.x / HYPER_COLUMNS * 2;
    struct column v;

    load_column(x, w, t, c0 + column, &v);
    __syncthreads(); /* the row before has been read, and the old streams of this one */
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float now = v.old[k];

        if (k / 2 != k0 / 2)
            continue;
        if (w.on) {
            now = ds4_hyper_value(v.post, v.comb, 4, k, v.out, v.old);
            if (x.mat.bf16)
                now = ds4_dev_bf16(now);
            ds4_mat_set(x.mat, t, (int64_t)k * x.d + c0 + column, now);
        }
        mine[k * HYPER_COLUMNS + column] = now;
    }
    __syncthreads();
}

/* partial[t][slice][m] = sum over the slice of fn[m] * x, and of x^2 at m = n_mix.  A warp has every
 * eighth m; its weights are on their way before the state is there.  D: the dtype of fn, aligned rows of
 * a multiple of four values, or ANY.  FOUR: four streams of whole slices of columns. */
template <int D, bool FOUR>
static __global__ void __launch_bounds__(HYPER_THREADS)
    mix_kernel(struct streams x, const int32_t *rows, struct write_args write, const uint8_t *fn,
               enum ds4_dtype dtype, size_t row_bytes, int32_t n_mix, int32_t n_row, float *partial)
{
    __shared__ float4 mine[HYPER_SLICE / 4];
    const int32_t slice = blockIdx.x, n_slice = gridDim.x;
    const int32_t n = x.n_hyper * x.d, first = slice * (FOUR ? HYPER_COLUMNS : HYPER_SLICE);
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t width = FOUR ? HYPER_SLICE : min(HYPER_SLICE, n - first);
    float4 w[HYPER_ROUNDS][HYPER_SLICE / 128];

    ds4_release_next();
    for (int32_t m0 = 0; m0 <= n_mix; m0 += HYPER_ROUNDS * HYPER_WARPS) {
#pragma unroll
        for (int r = 0; r < HYPER_ROUNDS; r++) {
#pragma unroll
            for (int c = 0; c < HYPER_SLICE / 128; c++) {
                const int32_t m = m0 + warp + r * HYPER_WARPS, at = 32 * c + lane;

                w[r][c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if constexpr (D != ANY) {
                    if (m < n_mix && 4 * at < width)
                        w[r][c] = fn_quad<D>(fn + (size_t)m * row_bytes,
                                             FOUR ? (c * x.d + first) / 4 + lane : first / 4 + at);
                }
            }
        }
        ds4_wait_previous();
        for (int32_t i = blockIdx.y; i < n_row; i += gridDim.y) {
            const int32_t t = rows != NULL ? rows[i] : i;

            if constexpr (FOUR) {
                take_slice(x, write, t, first, (float *)mine);
            } else {
                __syncthreads(); /* the row before has been read */
                for (int32_t c = threadIdx.x; c < HYPER_SLICE; c += blockDim.x)
                    ((float *)mine)[c] = c < width ? ds4_mat_get(x.mat, t, first + c) : 0.0f;
                __syncthreads();
            }
#pragma unroll
            for (int r = 0; r < HYPER_ROUNDS; r++) {
                const int32_t m = m0 + warp + r * HYPER_WARPS;
                float sum = 0.0f;

                if (D == ANY && m < n_mix) {
                    for (int32_t c = lane; c < width; c += 32)
                        sum += ((const float *)mine)[c] *
                               ds4_dq(dtype, fn + (size_t)m * row_bytes, first + c);
                } else {
#pragma unroll
                    for (int c = 0; c < HYPER_SLICE / 128; c++) {
                        const float4 v = mine[32 * c + lane], k = m == n_mix ? v : w[r][c];

                        sum += v.x * k.x;
                        sum += v.y * k.y;
                        sum += v.z * k.z;
                        sum += v.w * k.w;
                    }
                }
                for (int o = 16; o > 0; o /= 2)
                    sum += __shfl_xor_sync(0xffffffffu, sum, o);
                if (lane == 0 && m <= n_mix)
                    partial[((int64_t)i * n_slice + slice) * (n_mix + 1) + m] = sum;
            }
        }
    }
}

__device__ __forceinline__ void column_step(float *c, int32_t n, float eps)
{
    for (int32_t k = 0; k < n; k++) {
        float sum = 0.0f;

        for (int32_t j = 0; j < n; j++)
            sum += c[j * n + k];
        for (int32_t j = 0; j < n; j++)
            c[j * n + k] /= sum + eps;
    }
}

/* Row softmax plus eps and a column step, then rows and columns in turn; one thread. */
__device__ void sinkhorn(float *c, int32_t n, int32_t iters, float eps)
{
    for (int32_t j = 0; j < n; j++) {
        float top = c[j * n], sum = 0.0f;

        for (int32_t k = 1; k < n; k++)
            top = fmaxf(top, c[j * n + k]);
        for (int32_t k = 0; k < n; k++) {
            c[j * n + k] = expf(c[j * n + k] - top);
            sum += c[j * n + k];
        }
        for (int32_t k = 0; k < n; k++)
            c[j * n + k] = c[j * n + k] / sum + eps;
    }
    column_step(c, n, eps);
    for (int32_t i = 1; i < iters; i++) {
        for (int32_t j = 0; j < n; j++) {
            float sum = 0.0f;

            for (int32_t k = 0; k < n; k++)
                sum += c[j * n + k];
            for (int32_t k = 0; k < n; k++)
                c[j * n + k] /= sum + eps;
        }
        column_step(c, n, eps);
    }
}

/* By value: what follows the mixes.  post and comb NULL: the head, with n_hyper mixes only. */
struct read_args {
    const float *partial;
    int32_t n_slice;
    int32_t n_mix;
    const float *base;
    const float *scale;
    int32_t iters;
    float hyper_eps;
    float rms_eps;
    const float *norm;
    float *post;
    float *comb;
    struct ds4_dev_mat u;
    uint8_t *packed; /* u once more, for int8 products; NULL: not */
};

#define READ_THREADS 512
#define READ_EACH    16 /* values of u a thread keeps: d to 8192 */
#define READ_GROUPS  8  /* of slices whose sums are formed side by side */

/* mix[m] = the finished mix m of row i: scaled by the row's norm, by its scale, plus its base.  Weights
 * first, then the turn. */
__device__ __forceinline__ void finish_sums(const struct read_args &a, int32_t i, int32_t n,
                                            int32_t d, float (*group)[HYPER_MAX_MIX + 1],
                                            float *mix)
{
    const int32_t m = threadIdx.x, n_sum = a.n_mix + 1;
    const float *partial = a.partial + (int64_t)i * a.n_slice * n_sum;
    float base = 0.0f, scale = 0.0f, sum = 0.0f, square = 0.0f;

    if (m < a.n_mix) {
        base = __ldg(a.base + m);
        scale = __ldg(a.scale + (m < n ? 0 : m < 2 * n ? 1 : 2));
    }
    ds4_wait_previous();
    for (int32_t k = threadIdx.x; k < READ_GROUPS * n_sum; k += READ_THREADS) {
        const int32_t g = k / n_sum;
        float part = 0.0f;

#pragma unroll 4
        for (int32_t s = g; s < a.n_slice; s += READ_GROUPS)
            part += partial[s * n_sum + k % n_sum];
        group[g][k % n_sum] = part;
    }
    __syncthreads();
    if (m < a.n_mix) {
#pragma unroll
        for (int g = 0; g < READ_GROUPS; g++) {
            sum += group[g][m];
            square += group[g][a.n_mix];
        }
        mix[m] = sum * (1.0f / sqrtf(square / (float)(n * d) + a.rms_eps)) * scale + base;
    }
    __syncthreads();
}

/* post and comb of row i; the whole block calls. */
__device__ __forceinline__ void write_mixes(const struct read_args &a, int32_t i, int32_t n,
                                            float *mix)
{
    const int32_t lane = threadIdx.x;

    if (lane >= 32)
        return;
    if (lane < n)
        a.post[(int64_t)i * n + lane] = 2.0f * ds4_sigmoid(mix[n + lane]);
    if (n == 4) {
        float c[16];

#pragma unroll
        for (int j = 0; j < 16; j++)
            c[j] = mix[8 + j];
        ds4_sinkhorn4(c, a.iters, a.hyper_eps);
#pragma unroll
        for (int j = 0; j < 16; j++)
            if (lane == j)
                a.comb[(int64_t)i * 16 + j] = c[j];
        return;
    }
    if (lane > 0)
        return;
    sinkhorn(mix + 2 * n, n, a.iters, a.hyper_eps);
    for (int32_t j = 0; j < n * n; j++)
        a.comb[(int64_t)i * n * n + j] = mix[2 * n + j];
}

/* Block (x: row i of the result, y: 0 u, 1 post and comb).  N: streams, 0 for any number.  Loops stay short: a
 * kernel that runs once on one SM waits for its instructions. */
template <int N>
static __global__ void __launch_bounds__(READ_THREADS)
    read_kernel(struct streams x, const int32_t *rows, struct read_args a)
{
    __shared__ float group[READ_GROUPS][HYPER_MAX_MIX + 1];
    __shared__ float mix[HYPER_MAX_MIX + 1];
    __shared__ float shared[32];
    __shared__ float u[READ_EACH * READ_THREADS];
    const int32_t i = blockIdx.x, n = N > 0 ? N : x.n_hyper, me = (int32_t)threadIdx.x;
    float square = 0.0f, factor = 1.0f, pre[N > 0 ? N : HYPER_MAX];
    int32_t t;

    ds4_release_next();
    finish_sums(a, i, n, x.d, group, mix);
    if (blockIdx.y == 1) {
        write_mixes(a, i, n, mix);
        return;
    }
    t = rows != NULL ? rows[i] : i;
#pragma unroll
    for (int j = 0; j < (N > 0 ? N : HYPER_MAX); j++)
        pre[j] = j < n ? ds4_sigmoid(mix[j]) + a.hyper_eps : 0.0f;
#pragma unroll 4
    for (int32_t c = me; c < x.d; c += READ_THREADS) {
        float sum = 0.0f;

#pragma unroll
        for (int j = 0; j < (N > 0 ? N : HYPER_MAX); j++)
            if (j < n)
                sum += pre[j] * ds4_mat_get(x.mat, t, (int64_t)j * x.d + c);
        u[c] = sum;
        square += sum * sum;
    }
    if (a.norm != NULL)
        factor = 1.0f / sqrtf(ds4_block_sum(square, shared) / (float)x.d + a.rms_eps);
#pragma unroll 1
    for (int32_t c = me; c < x.d; c += READ_THREADS) {
        const float out = a.norm != NULL ? __ldg(a.norm + c) * (u[c] * factor) : u[c];

        ds4_mat_set(a.u, i, c, out);
        if (a.packed != NULL) /* whole warps: d is a multiple of 32 */
            ds4_pack_unit(out, c / DS4_UNIT_VALUES, x.d / DS4_UNIT_VALUES,
                          a.packed + i * ds4_packed_row_bytes(x.d / DS4_UNIT_VALUES));
    }
}

/* N: streams, 0 for any number. */
template <int N> static __global__ void write_kernel(struct streams x, struct write_args w)
{
    const int32_t t = blockIdx.y, n = N > 0 ? N : x.n_hyper;
    const int32_t c = blockIdx.x * blockDim.x + threadIdx.x;
    float old[N > 0 ? N : HYPER_MAX], out;

    ds4_take_turn();
    if (c >= x.d)
        return;
    for (int32_t j = 0; j < n; j++)
        old[j] = ds4_mat_get(x.mat, t, (int64_t)j * x.d + c);
    out = ds4_mat_get(w.o, t, c);
    for (int32_t k = 0; k < n; k++)
        ds4_mat_set(
            x.mat, t, (int64_t)k * x.d + c,
            ds4_hyper_value(w.post + (int64_t)t * n, w.comb + (int64_t)t * n * n, n, k, out, old));
}

static int32_t n_slices(int32_t n_hyper, int32_t d)
{
    return ds4_div_up((int64_t)n_hyper * d, HYPER_SLICE);
}

size_t ds4_cuda_hyper_scratch(const struct ds4_device *dev, const struct ds4_limits *limits)
{
    const size_t n_mix = (size_t)limits->n_hyper * (size_t)(limits->n_hyper + 2);

    (void)dev;
    return (size_t)limits->max_tok * (size_t)n_slices(limits->n_hyper, limits->d_model) *
               (n_mix + 1) * sizeof(float) +
           (size_t)limits->max_tok * 4 * sizeof(float) + 1024;
}

typedef void (*mix_fn)(struct streams x, const int32_t *rows, struct write_args write,
                       const uint8_t *fn, enum ds4_dtype dtype, size_t row_bytes, int32_t n_mix,
                       int32_t n_row, float *partial);

static void write_rows(struct ds4_device *dev, const struct streams *x, int32_t n_row,
                       const struct write_args *w)
{
    const dim3 grid((unsigned)ds4_div_up(x->d, HYPER_THREADS), (unsigned)n_row);

    if (n_row == 0)
        return;
    if (x->n_hyper == 4)
        DS4_CHAIN(write_kernel<4>, grid, HYPER_THREADS, 0, dev, *x, *w);
    else
        DS4_CHAIN(write_kernel<0>, grid, HYPER_THREADS, 0, dev, *x, *w);
}

static void read_rows(struct ds4_device *dev, const struct streams *x, const int32_t *rows,
                      int32_t n_row, const struct ds4_weight *fn, struct write_args write,
                      struct read_args *a)
{
    const int32_t n_slice = n_slices(x->n_hyper, x->d), n_mix = fn->n_row;
    /* Many rows: a block keeps its weights for several. */
    const dim3 grid((unsigned)n_slice, (unsigned)(n_row > 128 ? 128 : n_row));
    const dim3 reads((unsigned)n_row, a->post != NULL ? 2 : 1);
    size_t used = 0;
    float *partial;
    mix_fn mix = mix_kernel<ANY, false>;

    if (n_row == 0)
        return;
    if (x->n_hyper == 4 && rows == NULL && n_mix == 24) {
        const struct ds4_hyper_few few = {
            x->mat,       n_row,         x->d,    write.o,  (const uint8_t *)fn->data,
            fn->dtype,    fn->row_bytes, a->base, a->scale, a->iters,
            a->hyper_eps, a->rms_eps,    a->norm, a->post,  a->comb,
            a->u,         a->packed};

        if (ds4_cuda_can_hyper_few(dev, &few)) {
            ds4_cuda_hyper_few(dev, &few);
            return;
        }
    }
    if (x->n_hyper > HYPER_MAX || x->d > READ_EACH * READ_THREADS)
        ds4_cuda_fatal(__FILE__, __LINE__, "hyper",
                       "more or wider streams than the kernel is sized for");
    partial = DS4_CARVE(dev, float, (int64_t)n_row *n_slice *(n_mix + 1), &used);
    if (x->n_hyper == 4 && rows == NULL && a->post != NULL) {
        const struct ds4_hyper_rows many = {x->mat,
                                            n_row,
                                            x->d,
                                            write.on,
                                            write.o,
                                            (const uint8_t *)fn->data,
                                            fn->dtype,
                                            fn->row_bytes,
                                            a->base,
                                            a->scale,
                                            a->iters,
                                            a->hyper_eps,
                                            a->rms_eps,
                                            a->norm,
                                            a->post,
                                            a->comb,
                                            a->u,
                                            partial,
                                            DS4_CARVE(dev, float, 4 * (int64_t)n_row, &used)};

        if (ds4_cuda_can_hyper_rows(&many)) {
            ds4_cuda_hyper_rows(dev, &many);
            return;
        }
    }
    a->partial = partial;
    a->n_slice = n_slice;
    a->n_mix = n_mix;
    if (fn->row_bytes % 16 == 0 && (uintptr_t)fn->data % 16 == 0 && x->n_hyper == 4 &&
        x->d % HYPER_COLUMNS == 0 && n_mix < HYPER_ROUNDS * HYPER_WARPS) {
        if (fn->dtype == DS4_DTYPE_F16)
            mix = mix_kernel<DS4_DTYPE_F16, true>;
        else if (fn->dtype == DS4_DTYPE_BF16)
            mix = mix_kernel<DS4_DTYPE_BF16, true>;
        else if (fn->dtype == DS4_DTYPE_F32)
            mix = mix_kernel<DS4_DTYPE_F32, true>;
    }
    if (write.on && mix == mix_kernel<ANY, false>) {
        write_rows(dev, x, n_row, &write);
        write.on = false;
    }
    DS4_CHAIN(mix, grid, HYPER_THREADS, 0, dev, *x, rows, write, (const uint8_t *)fn->data,
              fn->dtype, fn->row_bytes, n_mix, n_row, partial);
    if (x->n_hyper == 4)
        DS4_CHAIN(read_kernel<4>, reads, READ_THREADS, 0, dev, *x, rows, *a);
    else
        DS4_CHAIN(read_kernel<0>, reads, READ_THREADS, 0, dev, *x, rows, *a);
}

void ds4_cuda_hyper_read(struct ds4_device *dev, const struct ds4_hyper_read_args *a)
{
    const struct streams x = streams_of(&a->x);
    struct write_args write = {{}, a->post, a->comb, a->o.data != NULL};
    struct read_args read = {
        NULL,         0,          0,       a->base, a->scale, a->sinkhorn_iters,
        a->hyper_eps, a->rms_eps, a->norm, a->post, a->comb,  ds4_dev_mat_of(&a->u),
        NULL};

    if (write.on)
        write.o = ds4_dev_mat_of(&a->o);
    ds4_dev_spoil(dev, &a->u);
    read.packed = ds4_dev_keep(dev, DS4_DEV_KEEP_HIDDEN, &a->u);
    read_rows(dev, &x, NULL, a->x.shape[0], &a->fn, write, &read);
}

void ds4_cuda_hyper_head(struct ds4_device *dev, const struct ds4_hyper_head_args *a)
{
    const struct streams x = streams_of(&a->x);
    struct read_args read = {
        NULL,         0,          0,    a->base, a->scale, 0,
        a->hyper_eps, a->rms_eps, NULL, NULL,    NULL,     ds4_dev_mat_of(&a->h),
        NULL};
    const int32_t *rows = a->row == dev->host_out_row && a->n_row == dev->shape.n_out
                              ? dev->batch.out_row
                              : ds4_dev_put_ids(dev, a->row, a->n_row);

    ds4_dev_spoil(dev, &a->h);
    read_rows(dev, &x, rows, a->n_row, &a->fn, write_args{}, &read);
}

void ds4_cuda_hyper_write(struct ds4_device *dev, const struct ds4_hyper_write_args *a)
{
    const struct streams x = streams_of(&a->x);
    const struct write_args w = {ds4_dev_mat_of(&a->o), a->post, a->comb, true};

    write_rows(dev, &x, a->x.shape[0], &w);
}

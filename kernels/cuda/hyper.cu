/* Hyper-connections: mixes, Sinkhorn, read, write, and the head's last read.
 *
 * The mixing matrix (0.79 MB in f16 for Flash) is the traffic of a decode step: the state of 16,384
 * values is cut into slices of 512, one block each, so that 32 blocks a token read it side by side; the
 * partial sums are added in slice order by the second kernel, which also does the 4 x 4 Sinkhorn in one
 * warp and forms u.  Sums are f32 in a fixed order, so a row's bits depend on the row alone. */
#include "kernels/cuda/rows.cuh"

#define HYPER_SLICE   512
#define HYPER_THREADS 256
#define HYPER_MAX     8
#define HYPER_MAX_MIX (HYPER_MAX * (HYPER_MAX + 2))
#define ANY           (-1)
#define HYPER_WARPS   (HYPER_THREADS / 32)
#define HYPER_ROUNDS  4 /* mixes a warp has under way */

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

/* partial[t][slice][m] = sum over the slice of fn[m] * x, and of x^2 at m = n_mix.  A warp has every
 * eighth m; its weights are on their way before the state is there.  D: the dtype of fn, aligned rows of
 * a multiple of four values, or ANY. */
template <int D>
static __global__ void __launch_bounds__(HYPER_THREADS)
    mix_kernel(struct streams x, const int32_t *rows, const uint8_t *fn, enum ds4_dtype dtype,
               size_t row_bytes, int32_t n_mix, int32_t n_row, float *partial)
{
    __shared__ float4 mine[HYPER_SLICE / 4];
    const int32_t slice = blockIdx.x, n_slice = gridDim.x;
    const int32_t n = x.n_hyper * x.d, first = slice * HYPER_SLICE;
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t width = min(HYPER_SLICE, n - first);
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
                        w[r][c] = fn_quad<D>(fn + (size_t)m * row_bytes, first / 4 + at);
                }
            }
        }
        ds4_wait_previous();
        for (int32_t i = blockIdx.y; i < n_row; i += gridDim.y) {
            __syncthreads(); /* the row before has been read */
            for (int32_t c = threadIdx.x; c < HYPER_SLICE; c += blockDim.x)
                ((float *)mine)[c] =
                    c < width ? ds4_mat_get(x.mat, rows != NULL ? rows[i] : i, first + c) : 0.0f;
            __syncthreads();
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

__device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
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

/* The same for four streams on the lanes of a warp: lane 4j + k holds c[j][k], lanes from 16 on repeat. */
__device__ float sinkhorn4(float c, int32_t iters, float eps)
{
    float top = fmaxf(c, __shfl_xor_sync(0xffffffffu, c, 1)), sum;

    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    c = expf(c - top);
    for (int32_t i = 0; i < iters; i++) {
        sum = c + __shfl_xor_sync(0xffffffffu, c, 1); /* a row */
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        c = i == 0 ? c / sum + eps : c / (sum + eps);
        sum = c + __shfl_xor_sync(0xffffffffu, c, 4); /* a column */
        sum += __shfl_xor_sync(0xffffffffu, sum, 8);
        c /= sum + eps;
    }
    return c;
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
};

/* The first warp turns the mixes into post and comb while the others form u. */
__device__ void finish_mixes(const struct read_args &a, int32_t i, int32_t n, float *mix)
{
    const int lane = threadIdx.x;

    if (lane < n)
        a.post[(int64_t)i * n + lane] =
            2.0f * sigmoid(mix[n + lane] * a.scale[1] + a.base[n + lane]);
    if (n == 4) {
        const int at = 2 * n + lane % 16;
        const float c = sinkhorn4(mix[at] * a.scale[2] + a.base[at], a.iters, a.hyper_eps);

        if (lane < 16)
            a.comb[(int64_t)i * 16 + lane] = c;
        return;
    }
    if (lane > 0)
        return;
    for (int32_t j = 0; j < n * n; j++)
        mix[2 * n + j] = mix[2 * n + j] * a.scale[2] + a.base[2 * n + j];
    sinkhorn(mix + 2 * n, n, a.iters, a.hyper_eps);
    for (int32_t j = 0; j < n * n; j++)
        a.comb[(int64_t)i * n * n + j] = mix[2 * n + j];
}

#define READ_THREADS 544 /* one warp for the mixes, sixteen for u */
#define READ_COLUMNS (READ_THREADS - 32)
#define READ_EACH    16 /* values of u a thread keeps: d to 8192 */

/* Block i: row i of the result.  N: streams, 0 for any number.  The state's values are on their way
 * while the mixes are added up. */
template <int N>
static __global__ void __launch_bounds__(READ_THREADS)
    read_kernel(struct streams x, const int32_t *rows, struct read_args a)
{
    __shared__ float mix[HYPER_MAX_MIX + 1];
    __shared__ float pre[HYPER_MAX];
    __shared__ float shared[32];
    constexpr int each = N == 4 ? READ_EACH / 2 : READ_EACH; /* kept as they are */
    const int32_t i = blockIdx.x, n = N > 0 ? N : x.n_hyper, me = (int32_t)threadIdx.x - 32;
    const float *partial = a.partial + (int64_t)i * a.n_slice * (a.n_mix + 1);
    float u[READ_EACH], v[each][N > 0 ? N : 1], square = 0.0f, factor = 1.0f;
    int32_t t;

    ds4_take_turn();
    t = rows != NULL ? rows[i] : i;
    if (N > 0 && me >= 0) {
#pragma unroll
        for (int k = 0; k < each; k++) {
            const int32_t c = me + k * READ_COLUMNS;

#pragma unroll
            for (int j = 0; j < N; j++)
                v[k][j] = c < x.d ? ds4_mat_get(x.mat, t, (int64_t)j * x.d + c) : 0.0f;
        }
    }
    for (int32_t m = threadIdx.x; m <= a.n_mix; m += blockDim.x) {
        float sum = 0.0f;

#pragma unroll 16
        for (int32_t s = 0; s < a.n_slice; s++)
            sum += partial[s * (a.n_mix + 1) + m];
        mix[m] = sum;
    }
    __syncthreads();
    if (threadIdx.x < (unsigned)a.n_mix)
        mix[threadIdx.x] *= 1.0f / sqrtf(mix[a.n_mix] / (float)(n * x.d) + a.rms_eps);
    __syncthreads();
    if (threadIdx.x < (unsigned)n)
        pre[threadIdx.x] =
            sigmoid(mix[threadIdx.x] * a.scale[0] + a.base[threadIdx.x]) + a.hyper_eps;
    __syncthreads();
    if (me < 0 && a.post != NULL)
        finish_mixes(a, i, n, mix);
#pragma unroll
    for (int k = 0; k < READ_EACH; k++) {
        const int32_t c = me + k * READ_COLUMNS;

        u[k] = 0.0f;
        if (me < 0 || c >= x.d)
            continue;
        for (int32_t j = 0; j < n; j++)
            u[k] += pre[j] * (N > 0 && k < each ? v[k < each ? k : 0][j]
                                                : ds4_mat_get(x.mat, t, (int64_t)j * x.d + c));
        square += u[k] * u[k];
    }
    if (a.norm != NULL)
        factor = 1.0f / sqrtf(ds4_block_sum(square, shared) / (float)x.d + a.rms_eps);
#pragma unroll
    for (int k = 0; k < READ_EACH; k++) {
        const int32_t c = me + k * READ_COLUMNS;

        if (me >= 0 && c < x.d)
            ds4_mat_set(a.u, i, c, a.norm != NULL ? a.norm[c] * (u[k] * factor) : u[k]);
    }
}

/* N: streams, 0 for any number. */
template <int N>
static __global__ void write_kernel(struct streams x, struct ds4_dev_mat o, const float *post,
                                    const float *comb)
{
    const int32_t t = blockIdx.y, n = N > 0 ? N : x.n_hyper;
    const int32_t c = blockIdx.x * blockDim.x + threadIdx.x;
    float old[N > 0 ? N : HYPER_MAX], out;

    ds4_take_turn();
    if (c >= x.d)
        return;
    post += (int64_t)t * n;
    comb += (int64_t)t * n * n;
    for (int32_t j = 0; j < n; j++)
        old[j] = ds4_mat_get(x.mat, t, (int64_t)j * x.d + c);
    out = ds4_mat_get(o, t, c);
    for (int32_t k = 0; k < n; k++) {
        float sum = post[k] * out;

        for (int32_t j = 0; j < n; j++)
            sum += comb[j * n + k] * old[j];
        ds4_mat_set(x.mat, t, (int64_t)k * x.d + c, sum);
    }
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
           512;
}

typedef void (*mix_fn)(struct streams x, const int32_t *rows, const uint8_t *fn,
                       enum ds4_dtype dtype, size_t row_bytes, int32_t n_mix, int32_t n_row,
                       float *partial);

static void read_rows(struct ds4_device *dev, const struct streams *x, const int32_t *rows,
                      int32_t n_row, const struct ds4_weight *fn, struct read_args *a)
{
    const int32_t n_slice = n_slices(x->n_hyper, x->d), n_mix = fn->n_row;
    /* Many rows: a block keeps its weights for several. */
    const dim3 grid((unsigned)n_slice, (unsigned)(n_row > 128 ? 128 : n_row));
    size_t used = 0;
    float *partial;
    bool wide;
    mix_fn mix = mix_kernel<ANY>;

    if (n_row == 0)
        return;
    if (x->n_hyper > HYPER_MAX || x->d > READ_EACH * READ_COLUMNS)
        ds4_cuda_fatal(__FILE__, __LINE__, "hyper",
                       "more or wider streams than the kernel is sized for");
    partial = DS4_CARVE(dev, float, (int64_t)n_row *n_slice *(n_mix + 1), &used);
    a->partial = partial;
    a->n_slice = n_slice;
    a->n_mix = n_mix;
    wide = fn->row_bytes % 16 == 0 && (uintptr_t)fn->data % 16 == 0 && x->n_hyper * x->d % 4 == 0;
    if (wide && fn->dtype == DS4_DTYPE_F16)
        mix = mix_kernel<DS4_DTYPE_F16>;
    else if (wide && fn->dtype == DS4_DTYPE_BF16)
        mix = mix_kernel<DS4_DTYPE_BF16>;
    else if (wide && fn->dtype == DS4_DTYPE_F32)
        mix = mix_kernel<DS4_DTYPE_F32>;
    DS4_CHAIN(mix, grid, HYPER_THREADS, 0, dev, *x, rows, (const uint8_t *)fn->data, fn->dtype,
              fn->row_bytes, n_mix, n_row, partial);
    if (x->n_hyper == 4)
        DS4_CHAIN(read_kernel<4>, n_row, READ_THREADS, 0, dev, *x, rows, *a);
    else
        DS4_CHAIN(read_kernel<0>, n_row, READ_THREADS, 0, dev, *x, rows, *a);
}

void ds4_cuda_hyper_read(struct ds4_device *dev, const struct ds4_hyper_read_args *a)
{
    const struct streams x = streams_of(&a->x);
    struct read_args read = {
        NULL,         0,          0,       a->base, a->scale, a->sinkhorn_iters,
        a->hyper_eps, a->rms_eps, a->norm, a->post, a->comb,  ds4_dev_mat_of(&a->u)};

    read_rows(dev, &x, NULL, a->x.shape[0], &a->fn, &read);
}

void ds4_cuda_hyper_head(struct ds4_device *dev, const struct ds4_hyper_head_args *a)
{
    const struct streams x = streams_of(&a->x);
    struct read_args read = {
        NULL,         0,          0,    a->base, a->scale, 0,
        a->hyper_eps, a->rms_eps, NULL, NULL,    NULL,     ds4_dev_mat_of(&a->h)};
    const int32_t *rows = a->row == dev->host_out_row && a->n_row == dev->shape.n_out
                              ? dev->batch.out_row
                              : ds4_dev_put_ids(dev, a->row, a->n_row);

    read_rows(dev, &x, rows, a->n_row, &a->fn, &read);
}

void ds4_cuda_hyper_write(struct ds4_device *dev, const struct ds4_hyper_write_args *a)
{
    const struct streams x = streams_of(&a->x);
    const dim3 grid((unsigned)ds4_div_up(x.d, HYPER_THREADS), (unsigned)a->x.shape[0]);

    if (a->x.shape[0] == 0)
        return;
    if (x.n_hyper == 4)
        DS4_CHAIN(write_kernel<4>, grid, HYPER_THREADS, 0, dev, x, ds4_dev_mat_of(&a->o), a->post,
                  a->comb);
    else
        DS4_CHAIN(write_kernel<0>, grid, HYPER_THREADS, 0, dev, x, ds4_dev_mat_of(&a->o), a->post,
                  a->comb);
}

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

/* partial[t][slice][m] = sum over the slice of fn[m] * x, and of x^2 at m = n_mix. */
static __global__ void mix_kernel(struct streams x, const int32_t *rows, const uint8_t *fn,
                                  enum ds4_dtype dtype, size_t row_bytes, int32_t n_mix,
                                  float *partial)
{
    __shared__ float mine[HYPER_SLICE];
    const int32_t slice = blockIdx.x, i = blockIdx.y, n_slice = gridDim.x;
    const int32_t t = rows != NULL ? rows[i] : i, n = x.n_hyper * x.d;
    const int32_t first = slice * HYPER_SLICE, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t width = min(HYPER_SLICE, n - first);
    float *out = partial + ((int64_t)i * n_slice + slice) * (n_mix + 1);

    for (int32_t c = threadIdx.x; c < width; c += blockDim.x)
        mine[c] = ds4_mat_get(x.mat, t, first + c);
    __syncthreads();
    for (int32_t m = warp; m <= n_mix; m += HYPER_THREADS / 32) {
        float sum = 0.0f;

        for (int32_t c = lane; c < width; c += 32)
            sum += mine[c] *
                   (m < n_mix ? ds4_dq(dtype, fn + (size_t)m * row_bytes, first + c) : mine[c]);
        for (int o = 16; o > 0; o /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, o);
        if (lane == 0)
            out[m] = sum;
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
    float *post;
    float *comb;
    struct ds4_dev_mat u;
};

/* Thread 0 turns the mixes into pre, post and comb. */
__device__ void finish_mixes(const struct read_args &a, int32_t i, int32_t n, float *mix,
                             float *pre)
{
    for (int32_t j = 0; j < n; j++)
        pre[j] = sigmoid(mix[j] * a.scale[0] + a.base[j]) + a.hyper_eps;
    if (a.post == NULL)
        return;
    for (int32_t j = 0; j < n; j++)
        a.post[(int64_t)i * n + j] = 2.0f * sigmoid(mix[n + j] * a.scale[1] + a.base[n + j]);
    for (int32_t j = 0; j < n * n; j++)
        mix[2 * n + j] = mix[2 * n + j] * a.scale[2] + a.base[2 * n + j];
    sinkhorn(mix + 2 * n, n, a.iters, a.hyper_eps);
    for (int32_t j = 0; j < n * n; j++)
        a.comb[(int64_t)i * n * n + j] = mix[2 * n + j];
}

static __global__ void read_kernel(struct streams x, const int32_t *rows, struct read_args a)
{
    __shared__ float mix[HYPER_MAX_MIX + 1];
    __shared__ float pre[HYPER_MAX];
    const int32_t i = blockIdx.x, t = rows != NULL ? rows[i] : i, n = x.n_hyper;
    const float *partial = a.partial + (int64_t)i * a.n_slice * (a.n_mix + 1);

    for (int32_t m = threadIdx.x; m <= a.n_mix; m += blockDim.x) {
        float sum = 0.0f;

        for (int32_t s = 0; s < a.n_slice; s++)
            sum += partial[s * (a.n_mix + 1) + m];
        mix[m] = sum;
    }
    __syncthreads();
    if (threadIdx.x < (unsigned)a.n_mix)
        mix[threadIdx.x] *= 1.0f / sqrtf(mix[a.n_mix] / (float)(n * x.d) + a.rms_eps);
    __syncthreads();
    if (threadIdx.x == 0)
        finish_mixes(a, i, n, mix, pre);
    __syncthreads();
    for (int32_t c = threadIdx.x; c < x.d; c += blockDim.x) {
        float sum = 0.0f;

        for (int32_t j = 0; j < n; j++)
            sum += pre[j] * ds4_mat_get(x.mat, t, (int64_t)j * x.d + c);
        ds4_mat_set(a.u, i, c, sum);
    }
}

static __global__ void write_kernel(struct streams x, struct ds4_dev_mat o, const float *post,
                                    const float *comb)
{
    const int32_t t = blockIdx.y, n = x.n_hyper;
    const int32_t c = blockIdx.x * blockDim.x + threadIdx.x;
    float old[HYPER_MAX], out;

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

static void read_rows(struct ds4_device *dev, const struct streams *x, const int32_t *rows,
                      int32_t n_row, const struct ds4_weight *fn, struct read_args *a)
{
    const int32_t n_slice = n_slices(x->n_hyper, x->d), n_mix = fn->n_row;
    const dim3 grid((unsigned)n_slice, (unsigned)n_row);
    size_t used = 0;
    float *partial;

    if (n_row == 0)
        return;
    if (x->n_hyper > HYPER_MAX)
        ds4_cuda_fatal(__FILE__, __LINE__, "hyper", "more streams than the kernel is sized for");
    partial = DS4_CARVE(dev, float, (int64_t)n_row *n_slice *(n_mix + 1), &used);
    a->partial = partial;
    a->n_slice = n_slice;
    a->n_mix = n_mix;
    DS4_LAUNCH(mix_kernel, grid, HYPER_THREADS, 0, dev->stream, *x, rows, (const uint8_t *)fn->data,
               fn->dtype, fn->row_bytes, n_mix, partial);
    DS4_LAUNCH(read_kernel, n_row, HYPER_THREADS, 0, dev->stream, *x, rows, *a);
}

void ds4_cuda_hyper_read(struct ds4_device *dev, const struct ds4_hyper_read_args *a)
{
    const struct streams x = streams_of(&a->x);
    struct read_args read = {NULL,
                             0,
                             0,
                             a->base,
                             a->scale,
                             a->sinkhorn_iters,
                             a->hyper_eps,
                             a->rms_eps,
                             a->post,
                             a->comb,
                             ds4_dev_mat_of(&a->u)};

    read_rows(dev, &x, NULL, a->x.shape[0], &a->fn, &read);
}

void ds4_cuda_hyper_head(struct ds4_device *dev, const struct ds4_hyper_head_args *a)
{
    const struct streams x = streams_of(&a->x);
    struct read_args read = {NULL,
                             0,
                             0,
                             a->base,
                             a->scale,
                             0,
                             a->hyper_eps,
                             a->rms_eps,
                             NULL,
                             NULL,
                             ds4_dev_mat_of(&a->h)};

    read_rows(dev, &x, ds4_dev_put_ids(dev, a->row, a->n_row), a->n_row, &a->fn, &read);
}

void ds4_cuda_hyper_write(struct ds4_device *dev, const struct ds4_hyper_write_args *a)
{
    const struct streams x = streams_of(&a->x);
    const dim3 grid((unsigned)ds4_div_up(x.d, HYPER_THREADS), (unsigned)a->x.shape[0]);

    if (a->x.shape[0] == 0)
        return;
    DS4_LAUNCH(write_kernel, grid, HYPER_THREADS, 0, dev->stream, x, ds4_dev_mat_of(&a->o), a->post,
               a->comb);
}

/* The CUDA device: open, memory, copies, the step's batch, and the table of operations.
 *
 * Memory is taken once at start-up with plain cudaMalloc (no virtual-memory tricks, no managed memory),
 * zeroed, and freed together at close.  Uploads of weights go through the pageable path in large pieces:
 * the link, not the copy, is the limit at start-up. */
#include "common/fault.h"
#include "kernels/cuda/digits.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- open and close --------------------------------------------------------------------------- */

/* Code made for sm_90 waits for its predecessor itself, and has clusters; code made for sm_80, which the driver
 * translates for newer cards, does neither.  Only the code knows what it was made for. */
static __global__ void made_for_kernel(int32_t *arch)
{
#ifdef __CUDA_ARCH__
    *arch = __CUDA_ARCH__;
#else
    *arch = 0;
#endif
}

static bool can_overlap(struct ds4_device *dev)
{
    int32_t arch;

    DS4_LAUNCH(made_for_kernel, 1, 1, 0, dev->stream, dev->batch.wrong);
    DS4_CUDA(cudaStreamSynchronize(dev->stream));
    arch = *dev->wrong;
    *dev->wrong = DS4_DEV_WRONG_NONE;
    return arch >= 900;
}

static int choose_device(const struct ds4_device_config *config, struct ds4_device *dev,
                         struct ds4_err *err)
{
    cudaDeviceProp prop;
    char what[32];

    if (ds4_cuda_find_card(config, &dev->ordinal, err) != 0)
        return -1;
    snprintf(what, sizeof(what), "CUDA card %d", dev->ordinal);
    /* cudaFree makes the context, where a card that others hold says so. */
    if (ds4_cuda_refused(cudaSetDevice(dev->ordinal), what, err) != 0 ||
        ds4_cuda_refused(cudaGetDeviceProperties(&prop, dev->ordinal), what, err) != 0 ||
        ds4_cuda_refused(cudaFree(NULL), what, err) != 0)
        return -1;
    dev->cc = prop.major * 10 + prop.minor;
    if (dev->cc < 80)
        return ds4_fail(err, DS4_E_INVALID,
                        "%s has compute capability %d.%d, at least 8.0 is needed", prop.name,
                        prop.major, prop.minor);
    dev->n_sm = prop.multiProcessorCount;
    snprintf(dev->name, sizeof(dev->name), "card %d, %s, sm_%d, %d SMs", dev->ordinal, prop.name,
             dev->cc, dev->n_sm);
    return 0;
}

/* The pinned image: token, pos, entry_of, entries, blocks, and room for row lists. */
static size_t batch_image_bytes(void)
{
    return sizeof(int32_t) * (5 * (size_t)DS4_DEV_MAX_TOK + DS4_DEV_MAX_BLOCKS) +
           sizeof(struct ds4_dev_entry) * DS4_DEV_MAX_ENTRY;
}

static struct ds4_device *cuda_open(const struct ds4_device_config *config, struct ds4_err *err)
{
    struct ds4_device *dev = (struct ds4_device *)calloc(1, sizeof(*dev));

    if (dev == NULL) {
        (void)ds4_fail(err, DS4_E_NOMEM, "no memory for the device");
        return NULL;
    }
    dev->products = config->products;
    if (choose_device(config, dev, err) != 0) {
        free(dev);
        return NULL;
    }
    dev->replays = true;
    dev->batch_bytes = batch_image_bytes();
    DS4_CUDA(cudaStreamCreateWithFlags(&dev->main_stream, cudaStreamNonBlocking));
    DS4_CUDA(cudaStreamCreateWithFlags(&dev->side_stream, cudaStreamNonBlocking));
    DS4_CUDA(cudaEventCreateWithFlags(&dev->side_event, cudaEventDisableTiming));
    dev->stream = dev->main_stream;
    DS4_CUBLAS(cublasCreate(&dev->blas));
    DS4_CUBLAS(cublasSetStream(dev->blas, dev->stream));
    /* Plain f32 stays f32: no TF32 anywhere. */
    DS4_CUBLAS(cublasSetMathMode(dev->blas, CUBLAS_PEDANTIC_MATH));
    DS4_CUDA(cudaHostAlloc((void **)&dev->host_batch, dev->batch_bytes, cudaHostAllocDefault));
    DS4_CUDA(cudaMalloc((void **)&dev->dev_batch, dev->batch_bytes));
    DS4_CUDA(cudaHostAlloc((void **)&dev->wrong, sizeof(*dev->wrong), cudaHostAllocMapped));
    DS4_CUDA(cudaHostGetDevicePointer((void **)&dev->batch.wrong, (void *)dev->wrong, 0));
    *dev->wrong = DS4_DEV_WRONG_NONE;
    dev->overlap = can_overlap(dev);
    DS4_CUDA(cudaEventCreateWithFlags(&dev->batch_taken, cudaEventDisableTiming));
    return dev;
}

static void cuda_close(struct ds4_device *dev)
{
    if (dev == NULL)
        return;
    DS4_CUDA(cudaSetDevice(dev->ordinal));
    DS4_CUDA(cudaStreamSynchronize(dev->stream));
    ds4_cuda_forget(dev);
    for (int32_t i = 0; i < dev->n_alloc; i++)
        DS4_CUDA(cudaFree(dev->alloc[i]));
    DS4_CUDA(cudaFree(dev->dev_batch));
    DS4_CUDA(cudaFreeHost((void *)dev->wrong));
    DS4_CUDA(cudaFreeHost(dev->host_batch));
    DS4_CUDA(cudaEventDestroy(dev->batch_taken));
    DS4_CUBLAS(cublasDestroy(dev->blas));
    DS4_CUDA(cudaEventDestroy(dev->side_event));
    DS4_CUDA(cudaStreamDestroy(dev->side_stream));
    DS4_CUDA(cudaStreamDestroy(dev->main_stream));
    free(dev);
}

static const char *cuda_describe(const struct ds4_device *dev)
{
    return dev->name;
}

static void cuda_address(const struct ds4_device *dev, char *text, size_t size)
{
    DS4_CUDA(cudaDeviceGetPCIBusId(text, (int)size, dev->ordinal));
}

static const char *cuda_wrong(const struct ds4_device *dev)
{
    switch (*dev->wrong) {
    case DS4_DEV_WRONG_NONE:
        return NULL;
    case DS4_DEV_WRONG_EXPERT:
        return "an expert id is out of range";
    case DS4_DEV_WRONG_ROW:
        return "a selected row is out of range";
    default:
        return "the word for wrong indices is overwritten";
    }
}

static int32_t cuda_n_device(void)
{
    int n = 0;

    return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}

static void cuda_memory(struct ds4_device *dev, size_t *free_bytes, size_t *total_bytes)
{
    (void)dev;
    DS4_CUDA(cudaMemGetInfo(free_bytes, total_bytes));
}

/* ---- memory ------------------------------------------------------------------------------------- */

static void *cuda_alloc(struct ds4_device *dev, size_t bytes, const char *what, struct ds4_err *err)
{
    void *data = NULL;
    cudaError_t rc;

    if (dev->n_alloc == DS4_DEV_MAX_ALLOCS) {
        (void)ds4_fail(err, DS4_E_BUG, "%s: more than %d device allocations", what,
                       DS4_DEV_MAX_ALLOCS);
        return NULL;
    }
    rc = cudaMalloc(&data, bytes == 0 ? 1 : bytes);
    if (rc == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError(); /* the one error that is an answer, not a fault */
        (void)ds4_fail(err, DS4_E_NOMEM, "%s: the device has no %zu bytes left", what, bytes);
        return NULL;
    }
    DS4_CUDA(rc);
    DS4_CUDA(cudaMemsetAsync(data, 0, bytes, dev->stream));
    dev->alloc[dev->n_alloc++] = data;
    return data;
}

static void cuda_upload(struct ds4_device *dev, void *dst, const void *host_src, size_t bytes)
{
    ds4_dev_spoil_bytes(dev, dst, bytes);
    DS4_CUDA(cudaMemcpyAsync(dst, host_src, bytes, cudaMemcpyHostToDevice, dev->stream));
}

static void cuda_download(struct ds4_device *dev, void *host_dst, const void *src, size_t bytes)
{
    DS4_CUDA(cudaMemcpyAsync(host_dst, src, bytes, cudaMemcpyDeviceToHost, dev->stream));
    DS4_CUDA(cudaStreamSynchronize(dev->stream));
}

static void cuda_sync(struct ds4_device *dev)
{
    DS4_CUDA(cudaStreamSynchronize(dev->stream));
}

/* Refusals (a locked-memory limit, memory pinned already) are answers; the error must not stay. */
static void cuda_pin(struct ds4_device *dev, void *host, size_t bytes)
{
    (void)dev;
    if (cudaHostRegister(host, bytes, cudaHostRegisterPortable) != cudaSuccess)
        (void)cudaGetLastError();
}

static void cuda_unpin(struct ds4_device *dev, void *host)
{
    (void)dev;
    if (cudaHostUnregister(host) != cudaSuccess)
        (void)cudaGetLastError();
}

static void *cuda_queue(struct ds4_device *dev, int32_t *ordinal)
{
    *ordinal = dev->ordinal;
    return dev->stream;
}

/* ---- scratch -------------------------------------------------------------------------------------- */

void *ds4_dev_carve(struct ds4_device *dev, size_t bytes, size_t *used)
{
    size_t at = (*used + 255) / 256 * 256;

    if (bytes > dev->scratch_bytes || at > dev->scratch_bytes - bytes)
        ds4_cuda_fatal(__FILE__, __LINE__, "scratch", "smaller than the operation needs");
    *used = at + bytes;
    return dev->scratch + at;
}

static size_t cuda_scratch_bytes(const struct ds4_device *dev, const struct ds4_limits *limits)
{
    size_t (*const needs[])(const struct ds4_device *, const struct ds4_limits *) = {
        ds4_cuda_gemm_scratch,     ds4_cuda_moe_scratch,   ds4_cuda_hyper_scratch,
        ds4_cuda_compress_scratch, ds4_cuda_index_scratch, ds4_cuda_attention_scratch,
    };
    size_t most = 1 << 20;

    for (size_t i = 0; i < sizeof(needs) / sizeof(needs[0]); i++) {
        size_t bytes = needs[i](dev, limits);

        if (bytes > most)
            most = bytes;
    }
    return DS4_DEV_N_KEEP * DS4_DEV_KEEP_BYTES + (most + 255) / 256 * 256 + 2 * DS4_DIGITS_ROOM;
}

/* Kept rows come first, digits last. */
static void cuda_set_scratch(struct ds4_device *dev, void *scratch, size_t bytes)
{
    for (int i = 0; i < DS4_DEV_N_KEEP; i++)
        dev->kept[i] = ds4_dev_kept{NULL, 0, 0, (uint8_t *)scratch + i * DS4_DEV_KEEP_BYTES};
    dev->scratch = (unsigned char *)scratch + DS4_DEV_N_KEEP * DS4_DEV_KEEP_BYTES;
    dev->scratch_bytes =
        (bytes - DS4_DEV_N_KEEP * DS4_DEV_KEEP_BYTES - 2 * DS4_DIGITS_ROOM) / 256 * 256;
}

/* ---- the step's batch ------------------------------------------------------------------------------ */

/* Appends n items to the pinned image; returns the device address they will have. */
static void *put(struct ds4_device *dev, const void *host, size_t bytes, size_t *used)
{
    size_t at = (*used + 15) / 16 * 16;

    if (bytes > dev->batch_bytes || at > dev->batch_bytes - bytes)
        ds4_cuda_fatal(__FILE__, __LINE__, "batch", "larger than the fixed image");
    if (bytes > 0)
        memcpy(dev->host_batch + at, host, bytes);
    *used = at + bytes;
    return dev->dev_batch + at;
}

/* What a wrong address in a kernel does: the fault of the faults build is a real one. */
static __global__ void write_nowhere(volatile int *nowhere)
{
    *nowhere = 1;
}

static void break_device(struct ds4_device *dev)
{
    DS4_LAUNCH(write_nowhere, 1, 1, 0, dev->stream, (volatile int *)16);
}

/* Steps whose products stream only: they read the inputs as they are, or as they are kept, and need no
 * scratch.  What else needs some on the side takes it from the second half. */
#define SIDE_MAX_TOK 16

/* Full order behind an event: a kernel that overlaps its predecessor knows only one. */
static __global__ void meet_kernel(int nothing)
{
    (void)nothing;
}

static void cuda_side(struct ds4_device *dev, enum ds4_side side)
{
    if (dev->shape.n_tok > SIDE_MAX_TOK)
        return;
    switch (side) {
    case DS4_SIDE_START:
        DS4_CUDA(cudaEventRecord(dev->side_event, dev->main_stream));
        dev->stream = dev->side_stream;
        DS4_CUDA(cudaStreamWaitEvent(dev->stream, dev->side_event, 0));
        DS4_LAUNCH(meet_kernel, 1, 32, 0, dev->stream, 0);
        break;
    case DS4_SIDE_BACK:
        DS4_CUDA(cudaEventRecord(dev->side_event, dev->side_stream));
        dev->stream = dev->main_stream;
        break;
    case DS4_SIDE_JOIN:
        DS4_CUDA(cudaStreamWaitEvent(dev->stream, dev->side_event, 0));
        DS4_LAUNCH(meet_kernel, 1, 32, 0, dev->stream, 0);
        break;
    }
}

static struct ds4_dev_shape shape_of(const struct ds4_batch *b)
{
    struct ds4_dev_shape s = {b->n_tok, b->n_entry, b->n_out, 0, 1024};

    for (int32_t i = 0; i < b->n_entry; i++) {
        const struct ds4_batch_entry *e = &b->entry[i];

        s.max_row = e->n_row > s.max_row ? e->n_row : s.max_row;
        while (e->active && s.horizon <= INT32_MAX / 2 && s.horizon < e->base_pos + e->n_row)
            s.horizon *= 2;
    }
    return s;
}

static void cuda_begin(struct ds4_device *dev, const struct ds4_batch *b)
{
    struct ds4_dev_entry entries[DS4_DEV_MAX_ENTRY];
    const size_t rows = sizeof(int32_t) * (size_t)b->n_tok;
    size_t used = 0;
    int32_t n_block = 0;

    if (DS4_FAULT_POINT(CUDA_STICKY_ERROR))
        break_device(dev);
    if (b->n_tok > DS4_DEV_MAX_TOK || b->n_entry > DS4_DEV_MAX_ENTRY)
        ds4_cuda_fatal(__FILE__, __LINE__, "batch", "more rows or entries than a step may have");
    DS4_CUDA(cudaEventSynchronize(dev->batch_taken));
    dev->shape = shape_of(b);
    for (int i = 0; i < DS4_DEV_N_KEEP; i++)
        dev->kept[i].from = NULL;
    dev->host_out_row = b->out_row;
    dev->batch.n_tok = b->n_tok;
    dev->batch.n_entry = b->n_entry;
    dev->batch.token = (const int32_t *)put(dev, b->token, rows, &used);
    dev->batch.pos = (const int32_t *)put(dev, b->pos, rows, &used);
    dev->batch.entry_of = (const int32_t *)put(dev, b->entry_of, rows, &used);
    for (int32_t i = 0; i < b->n_entry; i++) {
        const struct ds4_batch_entry *e = &b->entry[i];

        entries[i] = ds4_dev_entry{e->slot,    e->base_pos, e->first_row, e->n_row, e->active,
                                   e->cap_tok, e->seal_tok, e->n_block,   n_block};
        n_block += e->n_block;
    }
    dev->batch.entry = (const struct ds4_dev_entry *)put(
        dev, entries, sizeof(entries[0]) * (size_t)b->n_entry, &used);
    dev->batch.out_row =
        (const int32_t *)put(dev, b->out_row, sizeof(int32_t) * (size_t)b->n_out, &used);
    used = (used + 15) / 16 * 16;
    dev->batch.block = (const int32_t *)(dev->dev_batch + used);
    for (int32_t i = 0; i < b->n_entry; i++) {
        size_t bytes = sizeof(int32_t) * (size_t)b->entry[i].n_block;

        if (bytes > dev->batch_bytes - used)
            ds4_cuda_fatal(__FILE__, __LINE__, "batch", "block tables larger than the fixed image");
        if (bytes > 0)
            memcpy(dev->host_batch + used, b->entry[i].block, bytes);
        used += bytes;
    }
    DS4_CUDA(cudaMemcpyAsync(dev->dev_batch, dev->host_batch, used, cudaMemcpyHostToDevice,
                             dev->stream));
    DS4_CUDA(cudaEventRecord(dev->batch_taken, dev->stream));
    dev->batch_used = used;
}

const int32_t *ds4_dev_put_ids(struct ds4_device *dev, const int32_t *host, int32_t n)
{
    size_t at = (dev->batch_used + 15) / 16 * 16;
    const void *there = put(dev, host, sizeof(int32_t) * (size_t)n, &dev->batch_used);

    DS4_CUDA(cudaMemcpyAsync(dev->dev_batch + at, dev->host_batch + at, dev->batch_used - at,
                             cudaMemcpyHostToDevice, dev->stream));
    DS4_CUDA(cudaEventRecord(dev->batch_taken, dev->stream));
    return (const int32_t *)there;
}

extern "C" const struct ds4_backend ds4_backend_cuda;
const struct ds4_backend ds4_backend_cuda = {
    .name = "cuda",
    .host_weights = false,
    .open = cuda_open,
    .close = cuda_close,
    .describe = cuda_describe,
    .address = cuda_address,
    .n_device = cuda_n_device,
    .memory = cuda_memory,
    .alloc = cuda_alloc,
    .upload = cuda_upload,
    .download = cuda_download,
    .sync = cuda_sync,
    .alloc_host = ds4_cuda_alloc_host,
    .free_host = ds4_cuda_free_host,
    .fetch = ds4_cuda_fetch,
    .copy_rows = ds4_cuda_copy_rows,
    .synth = ds4_cuda_synth,
    .wrong = cuda_wrong,
    .pin = cuda_pin,
    .unpin = cuda_unpin,
    .queue = cuda_queue,
    .probe = ds4_cuda_probe,
    .pattern_write = ds4_cuda_pattern_write,
    .pattern_check = ds4_cuda_pattern_check,
    .scratch_bytes = cuda_scratch_bytes,
    .set_scratch = cuda_set_scratch,
    .begin = cuda_begin,
    .enter = ds4_cuda_enter,
    .leave = ds4_cuda_leave,
    .embed = ds4_cuda_embed,
    .rmsnorm = ds4_cuda_rmsnorm,
    .hyper_read = ds4_cuda_hyper_read,
    .hyper_write = ds4_cuda_hyper_write,
    .hyper_head = ds4_cuda_hyper_head,
    .gemm = ds4_cuda_gemm,
    .rope = ds4_cuda_rope,
    .latent = ds4_cuda_latent,
    .round = ds4_cuda_round,
    .ring_write = ds4_cuda_ring_write,
    .keep = ds4_cuda_keep,
    .compress = ds4_cuda_compress,
    .index = ds4_cuda_index,
    .attention = ds4_cuda_attention,
    .route = ds4_cuda_route,
    .moe = ds4_cuda_moe,
    .moe_uses = ds4_cuda_moe_uses,
    .moe_join = ds4_cuda_moe_join,
    .spread = ds4_cuda_spread,
    .side = cuda_side,
};

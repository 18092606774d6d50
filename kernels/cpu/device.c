/* The CPU backend's device: threads, memory, scratch, and the table of operations.
 *
 * Operations finish before they return, so sync() has nothing to do.  Memory comes from anonymous
 * mappings: zeroed, page aligned, and resident only once it is touched. */
#include "common/fault.h"
#include "kernels/cpu/cpu.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define DS4_MAX_CPU_THREADS 1024
#define DS4_KIB             1024

struct ds4_cpu_block {
    struct ds4_cpu_block *next;
    void *data;
    size_t bytes;
};

static int32_t usable_cores(void)
{
    cpu_set_t set;
    long online;

    if (sched_getaffinity(0, sizeof(set), &set) == 0)
        return CPU_COUNT(&set);
    online = sysconf(_SC_NPROCESSORS_ONLN);
    return online < 1 ? 1 : (int32_t)online;
}

/* "model name" of /proc/cpuinfo, or "cpu". */
static void processor_name(char *out, size_t bytes)
{
    char line[256];
    FILE *f = fopen("/proc/cpuinfo", "re");

    snprintf(out, bytes, "cpu");
    while (f != NULL && fgets(line, sizeof(line), f) != NULL) {
        const char *colon = strchr(line, ':');

        if (strncmp(line, "model name", 10) != 0 || colon == NULL || colon[1] == '\0')
            continue;
        snprintf(out, bytes, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
        break;
    }
    if (f != NULL)
        fclose(f);
}

static struct ds4_device *cpu_open(const struct ds4_device_config *config, struct ds4_err *err)
{
    static const char *const isa_name[] = {"auto", "scalar", "avx2", "avx512"};
    int32_t n_thread = config->n_thread == 0 ? usable_cores() : config->n_thread;
    struct ds4_device *dev;
    char name[100];

    if (n_thread < 1 || n_thread > DS4_MAX_CPU_THREADS) {
        ds4_fail(err, DS4_E_INVALID, "%d compute threads, must be 0 to %d", config->n_thread,
                 DS4_MAX_CPU_THREADS);
        return NULL;
    }
    dev = calloc(1, sizeof(*dev));
    if (dev == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for the cpu device");
        return NULL;
    }
    dev->products = config->products;
    dev->simd = ds4_simd_find(config->isa);
    if (dev->simd == NULL) {
        ds4_fail(err, DS4_E_INVALID, "this machine lacks instruction set %s",
                 (unsigned int)config->isa < 4 ? isa_name[config->isa] : "?");
        free(dev);
        return NULL;
    }
    dev->pool = ds4_pool_new(n_thread, err);
    if (dev->pool == NULL) {
        free(dev);
        return NULL;
    }
    processor_name(name, sizeof(name));
    snprintf(dev->about, sizeof(dev->about), "%s, %s, %d threads", name, dev->simd->name, n_thread);
    return dev;
}

static void cpu_close(struct ds4_device *dev)
{
    if (dev == NULL)
        return;
    ds4_pool_free(dev->pool);
    while (dev->blocks != NULL) {
        struct ds4_cpu_block *block = dev->blocks;

        dev->blocks = block->next;
        munmap(block->data, block->bytes);
        free(block);
    }
    free(dev);
}

static const char *cpu_describe(const struct ds4_device *dev)
{
    return dev->about;
}

static void cpu_address(const struct ds4_device *dev, char *text, size_t size)
{
    (void)dev;
    if (size > 0)
        text[0] = '\0';
}

static void cpu_memory(struct ds4_device *dev, size_t *free_bytes, size_t *total_bytes)
{
    unsigned long long kib;
    char line[128];
    FILE *f = fopen("/proc/meminfo", "re");

    (void)dev;
    *free_bytes = 0;
    *total_bytes = 0;
    while (f != NULL && fgets(line, sizeof(line), f) != NULL) {
        if (sscanf(line, "MemTotal: %llu", &kib) == 1)
            *total_bytes = (size_t)kib * DS4_KIB;
        else if (sscanf(line, "MemAvailable: %llu", &kib) == 1)
            *free_bytes = (size_t)kib * DS4_KIB;
    }
    if (f != NULL)
        fclose(f);
}

static void *cpu_alloc(struct ds4_device *dev, size_t bytes, const char *what, struct ds4_err *err)
{
    struct ds4_cpu_block *block = malloc(sizeof(*block));

    if (block == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for %s (%zu bytes)", what, bytes);
        return NULL;
    }
    block->bytes = bytes == 0 ? 1 : bytes;
    block->data =
        mmap(NULL, block->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block->data == MAP_FAILED) {
        free(block);
        ds4_fail(err, DS4_E_NOMEM, "no memory for %s (%zu bytes)", what, bytes);
        return NULL;
    }
    block->next = dev->blocks;
    dev->blocks = block;
    return block->data;
}

static void cpu_upload(struct ds4_device *dev, void *dst, const void *host_src, size_t bytes)
{
    (void)dev;
    memcpy(dst, host_src, bytes);
}

static void cpu_download(struct ds4_device *dev, void *host_dst, const void *src, size_t bytes)
{
    (void)dev;
    memcpy(host_dst, src, bytes);
}

static void *cpu_alloc_host(struct ds4_device *dev, size_t bytes, const char *what,
                            struct ds4_err *err)
{
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    (void)dev;
    if (data != MAP_FAILED)
        return data;
    ds4_fail(err, DS4_E_NOMEM, "%s: the host has no %zu bytes left", what, bytes);
    return NULL;
}

static void cpu_free_host(struct ds4_device *dev, void *data, size_t bytes)
{
    (void)dev;
    if (data != NULL)
        munmap(data, bytes);
}

static void cpu_copy_rows(struct ds4_device *dev, void *dst, size_t dst_pitch, const void *src,
                          size_t src_pitch, size_t row_bytes, int32_t n_row)
{
    (void)dev;
    for (size_t r = 0; r < (size_t)n_row; r++)
        memcpy((uint8_t *)dst + r * dst_pitch, (const uint8_t *)src + r * src_pitch, row_bytes);
}

static void cpu_sync(struct ds4_device *dev)
{
    (void)dev;
}

/* ---- scratch ------------------------------------------------------------------------------------ */

static size_t need_bytes(const struct ds4_device *dev, struct ds4_need need)
{
    return ds4_cpu_align(need.shared_bytes) +
           (size_t)ds4_pool_threads(dev->pool) * ds4_cpu_align(need.thread_bytes);
}

static size_t cpu_scratch_bytes(const struct ds4_device *dev, const struct ds4_limits *l)
{
    const struct ds4_need need[] = {
        ds4_cpu_gemm_need(l->max_tok, l->max_cols, l->max_cols),
        ds4_cpu_hyper_need(l->max_tok, l->n_hyper, l->d_model),
        ds4_cpu_compress_need(l->d_head > l->d_index ? l->d_head : l->d_index),
        ds4_cpu_index_need(l->max_context, l->d_index),
        /* The window and the compressed rows of one query: each below the context. */
        ds4_cpu_attention_need(2 * l->max_context, l->d_head),
        ds4_cpu_moe_need(l->max_tok, l),
    };
    size_t most = 0;

    for (size_t i = 0; i < sizeof(need) / sizeof(need[0]); i++) {
        size_t bytes = need_bytes(dev, need[i]);

        most = bytes > most ? bytes : most;
    }
    return most;
}

static void cpu_set_scratch(struct ds4_device *dev, void *scratch, size_t bytes)
{
    dev->scratch = scratch;
    dev->scratch_bytes = bytes;
}

struct ds4_scratch ds4_cpu_scratch(struct ds4_device *dev, struct ds4_need need)
{
    struct ds4_scratch out = {.shared = dev->scratch,
                              .thread_bytes = ds4_cpu_align(need.thread_bytes)};

    if (need_bytes(dev, need) > dev->scratch_bytes) {
        fprintf(stderr, "cpu backend: an operation needs %zu bytes of scratch, planned were %zu\n",
                need_bytes(dev, need), dev->scratch_bytes);
        abort();
    }
    out.thread = dev->scratch + ds4_cpu_align(need.shared_bytes);
    return out;
}

/* ---- rows of tensors ---------------------------------------------------------------------------- */

const float *ds4_cpu_load(const struct ds4_tensor *t, int64_t offset, int32_t n, float *buf)
{
    const uint16_t *half = (const uint16_t *)t->data + offset;

    if (t->dtype == DS4_DTYPE_F32)
        return (const float *)t->data + offset;
    assert(t->dtype == DS4_DTYPE_BF16 || t->dtype == DS4_DTYPE_F16);
    for (int32_t i = 0; i < n; i++)
        buf[i] =
            t->dtype == DS4_DTYPE_BF16 ? ds4_f32_from_bf16(half[i]) : ds4_f32_from_f16(half[i]);
    return buf;
}

void ds4_cpu_store(const struct ds4_tensor *t, int64_t offset, int32_t n, const float *x)
{
    uint16_t *half = (uint16_t *)t->data + offset;

    if (t->dtype == DS4_DTYPE_F32) {
        memmove((float *)t->data + offset, x, (size_t)n * sizeof(*x));
        return;
    }
    assert(t->dtype == DS4_DTYPE_BF16 || t->dtype == DS4_DTYPE_F16);
    for (int32_t i = 0; i < n; i++)
        half[i] = t->dtype == DS4_DTYPE_BF16 ? ds4_bf16_from_f32(x[i]) : ds4_f16_from_f32(x[i]);
}

struct ds4_rows ds4_cpu_rows(const struct ds4_weight *w, int32_t stack, int32_t row, int32_t n_row)
{
    struct ds4_rows rows = {w->dtype, ds4_weight_row(w, stack, row), w->row_bytes, n_row, w->n_col};

    return rows;
}

void ds4_cpu_multiply(const struct ds4_simd *simd, enum ds4_act_kind kind, const struct ds4_rows *w,
                      const void *const *x, int32_t n_x, float (*out)[DS4_TILE_ROWS])
{
    if (kind == DS4_ACT_NONE)
        simd->product(w, x, n_x, out);
    else
        simd->product_act(w, x, n_x, out);
}

/* Host memory is device memory here: the batch needs no mirror. */
static const char *cpu_wrong(const struct ds4_device *dev)
{
    return atomic_load(&dev->wrong);
}

static int32_t cpu_n_device(void)
{
    return 1;
}

static void cpu_pin(struct ds4_device *dev, void *host, size_t bytes)
{
    (void)dev;
    (void)host;
    (void)bytes;
}

static void cpu_unpin(struct ds4_device *dev, void *host)
{
    (void)dev;
    (void)host;
}

static void *cpu_queue(struct ds4_device *dev, int32_t *ordinal)
{
    (void)dev;
    *ordinal = -1;
    return NULL;
}

static void cpu_begin(struct ds4_device *dev, const struct ds4_batch *batch)
{
    (void)dev;
    (void)batch;
    if (DS4_FAULT_POINT(CUDA_STICKY_ERROR))
        ds4_backend_fault(__FILE__, __LINE__, "begin", "an injected fault");
}

/* Calls are steps: nothing is recorded. */
static bool cpu_enter(struct ds4_device *dev)
{
    (void)dev;
    return false;
}

static void cpu_leave(struct ds4_device *dev)
{
    (void)dev;
}

static void cpu_side(struct ds4_device *dev, enum ds4_side side)
{
    (void)dev;
    (void)side;
}

extern const struct ds4_backend ds4_backend_cpu;
const struct ds4_backend ds4_backend_cpu = {
    .name = "cpu",
    .host_weights = true,
    .open = cpu_open,
    .close = cpu_close,
    .describe = cpu_describe,
    .address = cpu_address,
    .n_device = cpu_n_device,
    .memory = cpu_memory,
    .alloc = cpu_alloc,
    .upload = cpu_upload,
    .download = cpu_download,
    .sync = cpu_sync,
    .alloc_host = cpu_alloc_host,
    .free_host = cpu_free_host,
    .fetch = cpu_download,
    .copy_rows = cpu_copy_rows,
    .synth = ds4_cpu_synth,
    .wrong = cpu_wrong,
    .pin = cpu_pin,
    .unpin = cpu_unpin,
    .queue = cpu_queue,
    .probe = ds4_cpu_probe,
    .pattern_write = ds4_cpu_pattern_write,
    .pattern_check = ds4_cpu_pattern_check,
    .scratch_bytes = cpu_scratch_bytes,
    .set_scratch = cpu_set_scratch,
    .begin = cpu_begin,
    .enter = cpu_enter,
    .leave = cpu_leave,
    .side = cpu_side,
    .embed = ds4_cpu_embed,
    .rmsnorm = ds4_cpu_rmsnorm,
    .hyper_read = ds4_cpu_hyper_read,
    .hyper_write = ds4_cpu_hyper_write,
    .hyper_head = ds4_cpu_hyper_head,
    .gemm = ds4_cpu_gemm,
    .rope = ds4_cpu_rope,
    .latent = ds4_cpu_latent,
    .round = ds4_cpu_round,
    .ring_write = ds4_cpu_ring_write,
    .keep = ds4_cpu_keep,
    .compress = ds4_cpu_compress,
    .index = ds4_cpu_index,
    .attention = ds4_cpu_attention,
    .route = ds4_cpu_route,
    .moe = ds4_cpu_moe,
    .moe_uses = ds4_cpu_moe_uses,
    .moe_join = ds4_cpu_moe_join,
    .spread = ds4_cpu_spread,
};

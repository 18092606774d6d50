/* Start-up measurements: what this card really does, and patterns for the memory test.
 *
 * Mining cards come with arithmetic fused down to 1/16 or 1/32 and with boards that brake; neither shows
 * in what the driver reports, so a few kernels measure it: fused multiply-adds (eight chains a thread,
 * eight blocks of 256 per processor), one warp's chain of bf16 tensor products (24-35 cycles, or about
 * 256 when locked: cycles do not depend on clocks or power limits), dp4a against dp2a (only the first is
 * throttled), reads of 512 MiB, and the link with 4 MiB of pinned memory.  About 20 ms; 90 on a locked
 * card with the narrowest link. */
#include "kernels/cuda/device.cuh"

#include <string.h>

#define PROBE_THREADS  256
#define BLOCKS_PER_SM  8
#define CHAINS         8
#define FFMA_ROUNDS    4096
#define DOT_ROUNDS     1024
#define WARM_ROUNDS    64
#define MMA_ROUNDS     256
#define READ_BYTES     ((size_t)512 << 20)
#define READ_PASSES    5
#define LINK_BYTES     ((size_t)4 << 20)
#define LINK_PASSES    3
#define LOCKED_CYCLES  100.0 /* of a tensor product */
#define LOCKED_SHARE   0.25 /* of the multiply-adds that 64 lanes per processor and cycle would do */
#define LANES_PER_SM   64.0
#define PASSES         3       /* the best counts: other stages may be at work on the card */
#define BRAKE_CLOCK_HZ 1.2e9   /* braked boards stay at 1,140 MHz under load ... */
#define BRAKE_READ     0.75e12 /* ... and read about 0.6 TB/s */

/* ---- kernels ------------------------------------------------------------------------------------- */

static __device__ unsigned long long now_ns(void)
{
    unsigned long long t;

    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

/* clocks [2]: cycles and nanoseconds of one thread, for the clock's rate. */
static __global__ void ffma_kernel(int rounds, float a, float b, float *out,
                                   unsigned long long *clocks)
{
    const unsigned long long t0 = now_ns();
    const long long c0 = clock64();
    float x[CHAINS];

    for (int i = 0; i < CHAINS; i++)
        x[i] = (float)(threadIdx.x + i);
    for (int r = 0; r < rounds; r++)
#pragma unroll
        for (int i = 0; i < CHAINS; i++)
            x[i] = __fmaf_rn(x[i], a, b);
    for (int i = 1; i < CHAINS; i++)
        x[0] += x[i];
    if (x[0] == 12345.678f) /* never: keeps the chains */
        *out = x[0];
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        clocks[0] = (unsigned long long)(clock64() - c0);
        clocks[1] = now_ns() - t0;
    }
}

template <bool FOUR> static __global__ void dot_kernel(int rounds, int a, int b, int *out)
{
    int x[CHAINS];

    for (int i = 0; i < CHAINS; i++)
        x[i] = (int)threadIdx.x + i;
    for (int r = 0; r < rounds; r++)
#pragma unroll
        for (int i = 0; i < CHAINS; i++)
            x[i] = FOUR ? __dp4a(a, b, x[i]) : __dp2a_lo(a, b, x[i]);
    for (int i = 1; i < CHAINS; i++)
        x[0] ^= x[i];
    if (x[0] == 0x12345678)
        *out = x[0];
}

static __global__ void mma_kernel(unsigned long long *cycles)
{
    float d0 = 0, d1 = 0, d2 = 0, d3 = 0;
    const unsigned a = 0x3f803f80u, b = threadIdx.x & 1 ? 0x3f803f80u : 0;
    long long begin = 0;

    for (int r = 0; r < 2 * MMA_ROUNDS; r++) {
        if (r == MMA_ROUNDS)
            begin = clock64();
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0, %1, %2, %3}, {%4, %4, %4, %4}, {%5, %5}, {%0, %1, %2, %3};"
                     : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
                     : "r"(a), "r"(b));
    }
    if (threadIdx.x == 0)
        cycles[0] = (unsigned long long)(clock64() - begin) / MMA_ROUNDS + (d0 + d1 + d2 + d3 < 0);
}

static __global__ void read_kernel(const uint4 *data, size_t n, unsigned *out)
{
    const size_t step = (size_t)gridDim.x * blockDim.x;
    unsigned sum = 0;

    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const uint4 v = __ldcs(data + i);

        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x12345678u)
        *out = sum;
}

/* ---- rates --------------------------------------------------------------------------------------- */

struct bench {
    struct ds4_device *dev;
    cudaEvent_t from, to;
    unsigned long long *word; /* device: where kernels put what keeps them honest */
    int grid;
};

static void begin(struct bench *b)
{
    DS4_CUDA(cudaEventRecord(b->from, b->dev->stream));
}

static double seconds(struct bench *b)
{
    float ms = 0;

    DS4_CUDA(cudaEventRecord(b->to, b->dev->stream));
    DS4_CUDA(cudaEventSynchronize(b->to));
    DS4_CUDA(cudaEventElapsedTime(&ms, b->from, b->to));
    return ms > 0 ? ms * 1e-3 : 1e-6;
}

/* *share: of a full processor's multiply-adds per cycle.  Cycles count only what ran: unlike the rate
 * they are the same whatever the clock, the power limit, and others on the card. */
static void measure_ffma(struct bench *b, struct ds4_probe *out, double *share)
{
    const double per_sm = (double)CHAINS * FFMA_ROUNDS * PROBE_THREADS * BLOCKS_PER_SM;

    for (int pass = 0; pass <= PASSES; pass++) {
        const int rounds = pass == 0 ? WARM_ROUNDS : FFMA_ROUNDS;
        unsigned long long clocks[2];
        double rate;

        begin(b);
        DS4_LAUNCH(ffma_kernel, b->grid, PROBE_THREADS, 0, b->dev->stream, rounds, 1.0001f, 0.5f,
                   (float *)(b->word + 2), b->word);
        rate = 2.0 * CHAINS * rounds * b->grid * PROBE_THREADS / seconds(b);
        DS4_CUDA(cudaMemcpy(clocks, b->word, sizeof(clocks), cudaMemcpyDeviceToHost));
        if (pass == 0 || clocks[0] == 0)
            continue;
        out->flops = rate > out->flops ? rate : out->flops;
        rate = per_sm / (double)clocks[0] / LANES_PER_SM;
        *share = rate > *share ? rate : *share;
        out->clock_hz = clocks[1] > 0 ? (double)clocks[0] * 1e9 / (double)clocks[1] : 0;
        if (out->flops < 1e12) /* a locked card is slow enough to know at once */
            break;
    }
}

static void measure_mma(struct bench *b, struct ds4_probe *out)
{
    for (int pass = 0; pass < PASSES; pass++) {
        unsigned long long cycles = 0;

        DS4_LAUNCH(mma_kernel, 1, 32, 0, b->dev->stream, b->word);
        DS4_CUDA(cudaMemcpyAsync(&cycles, b->word, sizeof(cycles), cudaMemcpyDeviceToHost,
                                 b->dev->stream));
        DS4_CUDA(cudaStreamSynchronize(b->dev->stream));
        if (pass == 0 || (double)cycles < out->mma_cycles)
            out->mma_cycles = (double)cycles;
    }
}

static void measure_dots(struct bench *b, struct ds4_probe *out)
{
    double four = 0, two = 0;

    for (int rounds = WARM_ROUNDS; rounds <= DOT_ROUNDS; rounds += DOT_ROUNDS - WARM_ROUNDS) {
        begin(b);
        DS4_LAUNCH(dot_kernel<true>, b->grid, PROBE_THREADS, 0, b->dev->stream, rounds, 0x01020304,
                   0x04030201, (int *)b->word);
        four = seconds(b);
        begin(b);
        DS4_LAUNCH(dot_kernel<false>, b->grid, PROBE_THREADS, 0, b->dev->stream, rounds, 0x01020304,
                   0x04030201, (int *)b->word);
        two = seconds(b);
    }
    out->dp4a_per_dp2a = two / four;
}

/* Memory beyond the plan, from what it leaves free; a card without so much is not measured. */
static void measure_memory(struct bench *b, struct ds4_probe *out)
{
    void *data = NULL;

    if (cudaMalloc(&data, READ_BYTES) != cudaSuccess) {
        (void)cudaGetLastError();
        return;
    }
    DS4_CUDA(cudaMemsetAsync(data, 1, READ_BYTES, b->dev->stream));
    for (int pass = 0; pass < READ_PASSES; pass++) {
        double rate;

        begin(b);
        DS4_LAUNCH(read_kernel, b->grid, PROBE_THREADS, 0, b->dev->stream, (const uint4 *)data,
                   READ_BYTES / sizeof(uint4), (unsigned *)b->word);
        rate = (double)READ_BYTES / seconds(b);
        out->memory_bytes_per_s = rate > out->memory_bytes_per_s ? rate : out->memory_bytes_per_s;
    }
    DS4_CUDA(cudaFree(data));
}

static void measure_link(struct bench *b, struct ds4_probe *out)
{
    void *host = NULL, *data = NULL;

    if (cudaHostAlloc(&host, LINK_BYTES, cudaHostAllocDefault) != cudaSuccess ||
        cudaMalloc(&data, LINK_BYTES) != cudaSuccess) {
        (void)cudaGetLastError();
        goto out;
    }
    memset(host, 1, LINK_BYTES);
    for (int pass = 0; pass < LINK_PASSES; pass++) {
        double there, back;

        begin(b);
        DS4_CUDA(cudaMemcpyAsync(data, host, LINK_BYTES, cudaMemcpyHostToDevice, b->dev->stream));
        there = (double)LINK_BYTES / seconds(b);
        begin(b);
        DS4_CUDA(cudaMemcpyAsync(host, data, LINK_BYTES, cudaMemcpyDeviceToHost, b->dev->stream));
        back = (double)LINK_BYTES / seconds(b);
        out->link_bytes_per_s = there > out->link_bytes_per_s ? there : out->link_bytes_per_s;
        out->back_bytes_per_s = back > out->back_bytes_per_s ? back : out->back_bytes_per_s;
    }
out:
    if (data != NULL)
        DS4_CUDA(cudaFree(data));
    if (host != NULL)
        DS4_CUDA(cudaFreeHost(host));
}

static enum ds4_probe_verdict judge(const struct ds4_probe *p, double ffma_share)
{
    if (p->mma_cycles > LOCKED_CYCLES || ffma_share < LOCKED_SHARE)
        return DS4_PROBE_THROTTLED;
    if (p->memory_bytes_per_s > 0 && p->memory_bytes_per_s < BRAKE_READ && p->clock_hz > 0 &&
        p->clock_hz < BRAKE_CLOCK_HZ)
        return DS4_PROBE_BRAKE;
    return DS4_PROBE_FULL;
}

void ds4_cuda_probe(struct ds4_device *dev, struct ds4_probe *out)
{
    struct bench b = {};
    double ffma_share = 0;

    memset(out, 0, sizeof(*out));
    b.dev = dev;
    b.grid = dev->n_sm * BLOCKS_PER_SM;
    DS4_CUDA(cudaEventCreate(&b.from));
    DS4_CUDA(cudaEventCreate(&b.to));
    DS4_CUDA(cudaMalloc((void **)&b.word, 4 * sizeof(*b.word)));
    measure_ffma(&b, out, &ffma_share);
    measure_mma(&b, out);
    measure_dots(&b, out);
    measure_memory(&b, out);
    measure_link(&b, out);
    DS4_CUDA(cudaFree(b.word));
    DS4_CUDA(cudaEventDestroy(b.to));
    DS4_CUDA(cudaEventDestroy(b.from));
    out->verdict = judge(out, ffma_share);
}

/* ---- patterns ------------------------------------------------------------------------------------ */

/* Every word its own value, so that memory that answers for another address shows. */
static __device__ unsigned long long word_of(unsigned long long seed, unsigned long long i)
{
    unsigned long long z = (seed + i) * 0x9e3779b97f4a7c15ull;

    if (seed == 0)
        return 0;
    z = (z ^ z >> 32) * 0xd6e8feb86659fd93ull;
    return z ^ z >> 32;
}

static __global__ void write_kernel(ulonglong2 *data, size_t n, unsigned long long seed)
{
    const size_t step = (size_t)gridDim.x * blockDim.x;

    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        data[i] = make_ulonglong2(word_of(seed, 2 * i), word_of(seed, 2 * i + 1));
}

static __global__ void check_kernel(const ulonglong2 *data, size_t n, unsigned long long seed,
                                    struct ds4_memory_faults *faults)
{
    const size_t step = (size_t)gridDim.x * blockDim.x;

    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const ulonglong2 v = __ldcs(data + i);

        for (int k = 0; k < 2; k++) {
            unsigned long long at;

            if ((k == 0 ? v.x : v.y) == word_of(seed, 2 * i + k))
                continue;
            at = atomicAdd((unsigned long long *)&faults->n, 1ull);
            if (at < DS4_MEMORY_FAULTS_KEPT)
                faults->at[at] = (2 * i + k) * sizeof(unsigned long long);
        }
    }
}

/* The last word of an odd number: one thread's work. */
static __global__ void last_kernel(unsigned long long *word, size_t i, unsigned long long seed,
                                   struct ds4_memory_faults *faults)
{
    if (faults == NULL) {
        word[i] = word_of(seed, i);
    } else if (word[i] != word_of(seed, i)) {
        if (faults->n < DS4_MEMORY_FAULTS_KEPT)
            faults->at[faults->n] = i * sizeof(unsigned long long);
        faults->n++;
    }
}

void ds4_cuda_pattern_write(struct ds4_device *dev, void *area, size_t bytes, uint64_t seed)
{
    const size_t n = bytes / sizeof(unsigned long long);

    DS4_LAUNCH(write_kernel, dev->n_sm * BLOCKS_PER_SM, PROBE_THREADS, 0, dev->stream,
               (ulonglong2 *)area, n / 2, seed);
    if (n % 2 == 1)
        DS4_LAUNCH(last_kernel, 1, 1, 0, dev->stream, (unsigned long long *)area, n - 1, seed,
                   (struct ds4_memory_faults *)NULL);
}

void ds4_cuda_pattern_check(struct ds4_device *dev, const void *area, size_t bytes, uint64_t seed,
                            struct ds4_memory_faults *faults)
{
    const size_t n = bytes / sizeof(unsigned long long);
    struct ds4_memory_faults *found = NULL;

    DS4_CUDA(cudaMalloc((void **)&found, sizeof(*found)));
    DS4_CUDA(cudaMemcpyAsync(found, faults, sizeof(*found), cudaMemcpyHostToDevice, dev->stream));
    DS4_LAUNCH(check_kernel, dev->n_sm * BLOCKS_PER_SM, PROBE_THREADS, 0, dev->stream,
               (const ulonglong2 *)area, n / 2, seed, found);
    if (n % 2 == 1)
        DS4_LAUNCH(last_kernel, 1, 1, 0, dev->stream, (unsigned long long *)area, n - 1, seed,
                   found);
    DS4_CUDA(cudaMemcpyAsync(faults, found, sizeof(*found), cudaMemcpyDeviceToHost, dev->stream));
    DS4_CUDA(cudaStreamSynchronize(dev->stream));
    DS4_CUDA(cudaFree(found));
}

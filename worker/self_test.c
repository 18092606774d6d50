/* Tests of a device at start (before step 8 of the house list).
 *
 * The cards this is for have no ECC: memory that is too hot or too fast returns other data without an
 * error, in whole bursts and from the first second on, and only under full bandwidth.  So every word of
 * the planned memory is written and read at full speed, three times; some tens of milliseconds per 16 GiB.
 * Their makers also lock arithmetic to a fraction, which the driver does not report: it is measured. */
#include "worker/self_test.h"

#include "common/clock.h"
#include "common/log.h"
#include "worker/plan.h"

#include <inttypes.h>
#include <stdio.h>

#define GIB        ((size_t)1 << 30)
#define PIECE      GIB /* one card in two cannot give all its memory in one piece */
#define ALIGN      256
#define BYTES_GIGA 1e9

#define LATENCY_PASSES 32 /* the best counts: other stages may be at work on the link */

static const uint64_t seeds[] = {UINT64_C(0x5deece66d1234567), UINT64_C(0xa21131992edcba98), 0};

const char *ds4_probe_text(enum ds4_probe_verdict verdict)
{
    static const char *const texts[] = {"none", "full", "throttled", "brake"};

    return (unsigned int)verdict < sizeof(texts) / sizeof(texts[0]) ? texts[verdict] : "?";
}

void ds4_self_test_probe(const struct ds4_backend *backend, struct ds4_device *dev,
                         struct ds4_probe *out)
{
    int64_t begin_ns = ds4_clock_ns();

    backend->probe(dev, out);
    ds4_log(out->verdict == DS4_PROBE_FULL ? DS4_LOG_INFO : DS4_LOG_WARN, "probe",
            "verdict=%s memory_gb_s=%.1f to_device_gb_s=%.2f to_host_gb_s=%.2f tflops=%.3f "
            "mma_cycles=%.0f dp4a_per_dp2a=%.2f clock_mhz=%.0f took_ms=%.1f",
            ds4_probe_text(out->verdict), out->memory_bytes_per_s / BYTES_GIGA,
            out->link_bytes_per_s / BYTES_GIGA, out->back_bytes_per_s / BYTES_GIGA,
            out->flops / 1e12, out->mma_cycles, out->dp4a_per_dp2a, out->clock_hz / 1e6,
            (double)(ds4_clock_ns() - begin_ns) / 1e6);
}

double ds4_self_test_latency(const struct ds4_backend *backend, struct ds4_device *dev,
                             const void *word)
{
    uint64_t *host = backend->alloc_host(dev, sizeof(*host), "the link's probe", NULL);
    int64_t best_ns = INT64_MAX;

    if (host == NULL)
        return 0;
    backend->sync(dev);
    for (int pass = 0; pass < LATENCY_PASSES; pass++) {
        int64_t took_ns = ds4_clock_ns();

        backend->fetch(dev, host, word, sizeof(*host));
        backend->sync(dev);
        took_ns = ds4_clock_ns() - took_ns;
        if (took_ns < best_ns)
            best_ns = took_ns;
    }
    backend->free_host(dev, host, sizeof(*host));
    ds4_log(DS4_LOG_INFO, "probe.link", "latency_us=%.1f", (double)best_ns / 1e3);
    return (double)best_ns / DS4_NS_PER_SEC;
}

/* Areas differ too, but for zeros. */
static uint64_t seed_of(uint64_t seed, int32_t area)
{
    return seed == 0 ? 0 : seed + (uint64_t)area * PIECE;
}

/* One pattern over all areas.  Counts of one area at a time, so that a place has a name. */
static int test_pattern(const struct ds4_backend *backend, struct ds4_device *dev,
                        const struct ds4_area *area, int32_t n_area, uint64_t seed,
                        struct ds4_err *err)
{
    uint64_t n = 0;
    int rc = 0;

    for (int32_t i = 0; i < n_area; i++)
        if (area[i].bytes > 0)
            backend->pattern_write(dev, area[i].data, area[i].bytes, seed_of(seed, i));
    for (int32_t i = 0; i < n_area; i++) {
        struct ds4_memory_faults faults = {.n = 0};

        if (area[i].bytes == 0)
            continue;
        backend->pattern_check(dev, area[i].data, area[i].bytes, seed_of(seed, i), &faults);
        n += faults.n;
        for (uint64_t k = 0; k < faults.n && k < DS4_MEMORY_FAULTS_KEPT; k++)
            ds4_log(DS4_LOG_ERROR, "memory.fault", "area=%s offset=%" PRIu64 " pattern=%" PRIx64,
                    area[i].name, faults.at[k], seed);
        if (faults.n > 0 && rc == 0)
            rc = ds4_fail(err, DS4_E_CORRUPT,
                          "the card's memory returned %" PRIu64
                          " wrong words of 8 bytes, the first ones in %s at offset %" PRIu64,
                          faults.n, area[i].name, faults.at[0]);
    }
    if (n > 0)
        ds4_log(DS4_LOG_ERROR, "memory.faults", "words=%" PRIu64, n);
    return rc;
}

int ds4_self_test_memory(const struct ds4_backend *backend, struct ds4_device *dev,
                         const struct ds4_area *area, int32_t n_area, struct ds4_err *err)
{
    int64_t begin_ns = ds4_clock_ns();
    size_t bytes = 0;

    for (size_t i = 0; i < sizeof(seeds) / sizeof(seeds[0]); i++)
        if (test_pattern(backend, dev, area, n_area, seeds[i], err) != 0)
            return -1;
    for (int32_t i = 0; i < n_area; i++)
        bytes += area[i].bytes;
    ds4_log(DS4_LOG_INFO, "memory.tested", "mib=%zu patterns=%zu took_ms=%.1f", bytes >> 20,
            sizeof(seeds) / sizeof(seeds[0]), (double)(ds4_clock_ns() - begin_ns) / 1e6);
    return 0;
}

/* Takes bytes in pieces; what the device does not give any more is left out. */
static int32_t take_pieces(const struct ds4_backend *backend, struct ds4_device *dev, size_t bytes,
                           struct ds4_area area[DS4_MAX_AREAS])
{
    int32_t n = 0;

    for (size_t taken = 0; taken < bytes && n < DS4_MAX_AREAS; n++) {
        size_t piece = bytes - taken < PIECE ? (bytes - taken) / ALIGN * ALIGN : PIECE;

        area[n] = (struct ds4_area){.name = "free memory", .bytes = piece};
        area[n].data = piece == 0 ? NULL : backend->alloc(dev, piece, "self-test", NULL);
        if (area[n].data == NULL)
            break;
        taken += piece;
    }
    return n;
}

int ds4_self_test_device(const char *backend_name, const struct ds4_device_config *config,
                         size_t limit_bytes, struct ds4_err *err)
{
    const struct ds4_backend *backend = ds4_backend_find(backend_name);
    struct ds4_area area[DS4_MAX_AREAS];
    struct ds4_device *dev;
    struct ds4_probe probe;
    size_t free_bytes, total_bytes;
    int rc;

    if (backend == NULL)
        return ds4_fail(err, DS4_E_INVALID, "backend \"%s\" is not built in", backend_name);
    dev = backend->open(config, err);
    if (dev == NULL)
        return -1;
    ds4_log(DS4_LOG_INFO, "device", "name=\"%s\"", backend->describe(dev));
    ds4_self_test_probe(backend, dev, &probe);
    backend->memory(dev, &free_bytes, &total_bytes);
    free_bytes = free_bytes > DS4_PLAN_CARD_SPARE ? free_bytes - DS4_PLAN_CARD_SPARE : 0;
    if (limit_bytes > 0 && limit_bytes < free_bytes)
        free_bytes = limit_bytes;
    rc = ds4_self_test_memory(backend, dev, area, take_pieces(backend, dev, free_bytes, area), err);
    backend->close(dev);
    return rc;
}

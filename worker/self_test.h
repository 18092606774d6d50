/* What a stage finds out about its device before it trusts it: rates, and whether memory keeps what is
 * written. */
#ifndef DS4_WORKER_SELF_TEST_H
#define DS4_WORKER_SELF_TEST_H

#include "common/err.h"
#include "kernels/backend.h"

#include <stddef.h>
#include <stdint.h>

/* "none", "full", "throttled", "brake". */
const char *ds4_probe_text(enum ds4_probe_verdict verdict);

/* Measures the device and logs the figures; a warning if it is held down. */
void ds4_self_test_probe(const struct ds4_backend *backend, struct ds4_device *dev,
                         struct ds4_probe *out);

/* Seconds from asking for a word of device memory to having it in pinned host memory, the best of several
 * times: what every small exchange with the card costs.  0 without memory for it.  Logged.
 *
 *   word   8 bytes on the device, left as they are */
double ds4_self_test_latency(const struct ds4_backend *backend, struct ds4_device *dev,
                             const void *word);

struct ds4_area {
    const char *name;
    void *data; /* NULL: nothing there */
    size_t bytes;
};

#define DS4_MAX_AREAS 512

/* Writes each area full of words that name their place, then their opposite, then zeros, and reads all
 * of it back each time; the areas hold zeros afterwards.  Everything is written before anything is read,
 * so that an address that answers for another shows.  -1 with DS4_E_CORRUPT: how many words, where. */
int ds4_self_test_memory(const struct ds4_backend *backend, struct ds4_device *dev,
                         const struct ds4_area *area, int32_t n_area,
                         struct ds4_err *err) DS4_MUST_CHECK;

/* For --self-test: opens the device, takes all its free memory but what a plan leaves alone (at most
 * limit_bytes; 0: no limit), probes and tests it.  DS4_E_CORRUPT for memory that is wrong. */
int ds4_self_test_device(const char *backend, const struct ds4_device_config *config,
                         size_t limit_bytes, struct ds4_err *err) DS4_MUST_CHECK;

#endif

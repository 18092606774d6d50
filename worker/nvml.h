/* What the driver's library says of one card: temperatures, power, clocks, link, counters, Xids.
 *
 * The library (NVML) is loaded when the card is opened, never linked: a machine without a driver runs the
 * same worker.  Calls go through the driver and may hang with it, so they belong on a thread that nobody
 * waits for (worker/card_watch.h).  Not thread-safe. */
#ifndef DS4_WORKER_NVML_H
#define DS4_WORKER_NVML_H

#include "common/err.h"
#include "proto/message.h"

#include <stdbool.h>
#include <stdint.h>

#define DS4_NVML_LIBRARY "libnvidia-ml.so.1"

struct ds4_nvml;

/* The card at a PCI address ("0000:01:00.0").  `library` is DS4_NVML_LIBRARY; NULL takes the functions from
 * the program itself.  NULL with DS4_E_UNAVAILABLE: no library, no driver, no such card. */
struct ds4_nvml *ds4_nvml_open(const char *library, const char *pci_address,
                               struct ds4_err *err) DS4_MUST_CHECK;
void ds4_nvml_close(struct ds4_nvml *nvml);

/* Fills *value [DS4_N_CARD_SENSOR], below 0 what this card or driver does not tell.  -1 with
 * DS4_E_UNAVAILABLE if the card has fallen off the bus. */
int ds4_nvml_read(const struct ds4_nvml *nvml, double *value, struct ds4_err *err) DS4_MUST_CHECK;

/* Whether this driver tells the card's Xids. */
bool ds4_nvml_tells_xids(const struct ds4_nvml *nvml);

/* The next Xid of the card, or 0 after at most wait_ms; returns at once where there are no events. */
uint64_t ds4_nvml_next_xid(const struct ds4_nvml *nvml, uint32_t wait_ms);

#endif

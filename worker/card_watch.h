/* Watches one card in a thread of its own: a driver that hangs must not hold up heartbeats.
 *
 * Sensors are read every 5 s; Xids, the driver's reports of faults, are counted as they come.  Most faults
 * also end the process from within (a device fault, exit 70); some say that no restart can help, and those
 * are what ds4_card_watch_get fails with (exit 79). */
#ifndef DS4_WORKER_CARD_WATCH_H
#define DS4_WORKER_CARD_WATCH_H

#include "common/err.h"
#include "proto/message.h"

struct ds4_card_watch;

/* `library` (static storage) and `pci_address` (copied) as in worker/nvml.h.  Returns before the driver has
 * answered; where there is nothing to watch with, the log says so and no value is ever told.  NULL with
 * DS4_E_NOMEM. */
struct ds4_card_watch *ds4_card_watch_new(const char *library, const char *pci_address,
                                          struct ds4_err *err) DS4_MUST_CHECK;
/* Ends the thread; one that hangs in the driver for longer than 2.5 s is left to the end of the process. */
void ds4_card_watch_free(struct ds4_card_watch *watch);

/* The newest values and counts; after 15 s without any (the driver hangs) the values are "not told".  -1
 * with DS4_E_CORRUPT and the reason if the card needs an operator; *card is filled all the same.  Never
 * waits for the driver. */
int ds4_card_watch_get(struct ds4_card_watch *watch, struct ds4_card_state *card,
                       struct ds4_err *err) DS4_MUST_CHECK;

#endif

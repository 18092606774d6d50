/* A card as far as planning goes: its size and how fast it reads. */
#ifndef DS4_WORKER_CARD_H
#define DS4_WORKER_CARD_H

#include "common/err.h"
#include "common/model.h"

#include <stddef.h>
#include <stdint.h>

struct ds4_card {
    int32_t gib;     /* as it is sold: 8, 10, 32, 40, 64, 80 */
    double gb_per_s; /* sustained reads */
};

/* "8,8,10,80" or "80@3350": GiB, optionally with GB/s where the class's figure does not fit.  Returns the
 * number of cards, at most DS4_MAX_STAGES, or -1 with DS4_E_INVALID. */
int32_t ds4_cards_parse(const char *text, struct ds4_card *out, struct ds4_err *err) DS4_MUST_CHECK;

/* What the host reads per second while it multiplies with experts that stayed there, two channels of
 * DDR4, and what a layer's trip there and back costs besides. */
#define DS4_HOST_GB_PER_S 35.0
#define DS4_HOST_TRIP_US  60.0

/* What a process can use of a card: its size less the driver's context. */
size_t ds4_card_usable_bytes(size_t total_bytes);
size_t ds4_card_usable(const struct ds4_card *card);

/* The sizes that are sold, small to large; NULL after the last. */
const struct ds4_card *ds4_card_class(int32_t i);

#endif

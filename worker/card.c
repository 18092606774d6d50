/* Cards by their size: the sizes rigs have, and what they read per second. */
#include "worker/card.h"

#include <inttypes.h>
#include <stdlib.h>

#define MAX_GIB       4096
#define CONTEXT_BYTES ((size_t)512 << 20) /* of the CUDA driver, per process and card */
#define GIB           ((size_t)1 << 30)

/* Sustained reads by size.  8, 32, 64: the 4,096-bit mining card, 10 and 40: the 5,120-bit one at its
 * slower memory clock, as measured by those who run them; larger ones at about 90 % of the data sheet. */
static const struct ds4_card classes[] = {{8, 1500},  {10, 1400}, {32, 1500}, {40, 1400},
                                          {64, 1500}, {80, 1850}, {96, 3000}, {141, 4200}};

#define N_CLASS ((int32_t)(sizeof(classes) / sizeof(classes[0])))

const struct ds4_card *ds4_card_class(int32_t i)
{
    return i < 0 || i >= N_CLASS ? NULL : &classes[i];
}

static double class_rate(int32_t gib)
{
    int32_t i = 0;

    while (i < N_CLASS - 1 && gib > classes[i].gib)
        i++;
    return classes[i].gb_per_s;
}

static int parse_card(const char *text, char **end, struct ds4_card *out)
{
    long gib = strtol(text, end, 10);

    if (*end == text || gib < 1 || gib > MAX_GIB)
        return -1;
    out->gib = (int32_t)gib;
    out->gb_per_s = class_rate(out->gib);
    if (**end == '@') {
        text = *end + 1;
        out->gb_per_s = strtod(text, end);
        if (*end == text || !(out->gb_per_s >= 1 && out->gb_per_s <= 1e6))
            return -1;
    }
    return 0;
}

int32_t ds4_cards_parse(const char *text, struct ds4_card *out, struct ds4_err *err)
{
    const char *p = text;
    char *end = NULL;
    int32_t n = 0;

    for (;;) {
        if (n == DS4_MAX_STAGES)
            return ds4_fail(err, DS4_E_INVALID, "more than %d cards", DS4_MAX_STAGES);
        if (parse_card(p, &end, &out[n++]) != 0 || (*end != ',' && *end != '\0'))
            return ds4_fail(err, DS4_E_INVALID,
                            "cards \"%.64s\" must be sizes in GiB like 8,8,10,80 or 80@3350 with "
                            "the read rate in GB/s",
                            text);
        if (*end == '\0')
            return n;
        p = end + 1;
    }
}

size_t ds4_card_usable_bytes(size_t total_bytes)
{
    return total_bytes > CONTEXT_BYTES ? total_bytes - CONTEXT_BYTES : 0;
}

size_t ds4_card_usable(const struct ds4_card *card)
{
    return ds4_card_usable_bytes((size_t)card->gib * GIB);
}

/* Which card: by number, PCI address or UUID, or the next in turn.
 *
 * Numbers depend on the order the driver lists cards in, addresses on the slot, UUIDs on nothing: a rig
 * whose cards differ should name UUIDs.  A card that is not there is a mistake in the settings; a card or
 * driver that is busy is worth another try later. */
#include "kernels/cuda/device.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UUID_TEXT 41 /* "GPU-" and 36 characters, with the NUL */
#define PCI_TEXT  20

static void uuid_text(const cudaUUID_t *uuid, char out[UUID_TEXT])
{
    const unsigned char *b = (const unsigned char *)uuid->bytes;
    size_t at = (size_t)snprintf(out, UUID_TEXT, "GPU");

    for (int i = 0; i < 16; i++)
        at += (size_t)snprintf(out + at, UUID_TEXT - at, "%s%02x",
                               i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", b[i]);
}

/* The only card whose UUID begins so, as the driver's own variable takes them; -1: none or several. */
static int by_uuid(const char *text, int n)
{
    int found = -1;

    for (int i = 0; i < n; i++) {
        cudaDeviceProp prop;
        char uuid[UUID_TEXT];

        if (cudaGetDeviceProperties(&prop, i) != cudaSuccess)
            continue;
        uuid_text(&prop.uuid, uuid);
        if (strncmp(uuid, text, strlen(text)) != 0)
            continue;
        if (found >= 0)
            return -1;
        found = i;
    }
    return found;
}

static int by_number(const char *text, int n)
{
    char *end;
    long number = strtol(text, &end, 10);

    return *end == '\0' && number >= 0 && number < n ? (int)number : -1;
}

static int by_address(const char *text)
{
    int found = -1;

    if (cudaDeviceGetByPCIBusId(&found, text) == cudaSuccess)
        return found;
    (void)cudaGetLastError(); /* an answer, not a fault */
    return -1;
}

static int not_there(const char *card, int n, struct ds4_err *err)
{
    char list[160] = "";
    size_t at = 0;

    for (int i = 0; i < n && i < 4; i++) {
        char pci[PCI_TEXT] = "?";

        (void)cudaDeviceGetPCIBusId(pci, sizeof(pci), i);
        at += (size_t)snprintf(list + at, sizeof(list) - at, "%s%d at %s", i == 0 ? "" : ", ", i,
                               pci);
    }
    return ds4_fail(err, DS4_E_INVALID, "there is no CUDA card \"%.48s\", there are %d: %s%s", card,
                    n, list, n > 4 ? ", ..." : "");
}

/* 0 or -1 with why a CUDA call said no: DS4_E_BUSY where waiting may help. */
int ds4_cuda_refused(cudaError_t rc, const char *what, struct ds4_err *err)
{
    const bool busy = rc == cudaErrorDevicesUnavailable || rc == cudaErrorMemoryAllocation ||
                      rc == cudaErrorSystemNotReady || rc == cudaErrorInitializationError;

    if (rc == cudaSuccess)
        return 0;
    (void)cudaGetLastError();
    return ds4_fail(err, busy ? DS4_E_BUSY : DS4_E_UNAVAILABLE, "%s: %s", what,
                    cudaGetErrorString(rc));
}

int ds4_cuda_find_card(const struct ds4_device_config *config, int32_t *ordinal,
                       struct ds4_err *err)
{
    const char *card = config->card == NULL ? "" : config->card;
    int n = 0, found;

    if (ds4_cuda_refused(cudaGetDeviceCount(&n), "CUDA cards", err) != 0)
        return -1;
    if (n == 0)
        return ds4_fail(err, DS4_E_INVALID, "there is no CUDA card");
    if (*card == '\0')
        found = config->ordinal >= 0 ? config->ordinal % n : -1;
    else if (strncmp(card, "GPU-", 4) == 0)
        found = by_uuid(card, n);
    else if (strchr(card, ':') != NULL)
        found = by_address(card);
    else
        found = by_number(card, n);
    if (found < 0)
        return not_there(card, n, err);
    *ordinal = found;
    return 0;
}

/* Any bytes as an envelope: no crash, and what is read writes the same bytes. */
#include "proto/frame.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t again[DS4_ENVELOPE_BYTES];
    struct ds4_frame frame;
    struct ds4_frame_gate gate = {.generation = 7};
    size_t n_payload = 0;

    if (size >= DS4_ENVELOPE_BYTES)
        n_payload =
            data[20] | (size_t)data[21] << 8 | (size_t)data[22] << 16 | (size_t)data[23] << 24;
    if (ds4_frame_read(data, size, n_payload, DS4_FROM_WORKER, &frame, NULL) != 0 &&
        ds4_frame_read(data, size, n_payload, DS4_FROM_ROUTER, &frame, NULL) != 0)
        return 0;
    ds4_frame_write(&frame, again);
    if (memcmp(again, data, sizeof(again)) != 0)
        abort();
    if (ds4_frame_admit(&gate, &frame) && frame.kind == DS4_FRAME_STEP && frame.generation != 7)
        abort();
    return 0;
}

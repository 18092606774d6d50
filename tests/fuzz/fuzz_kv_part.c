/* Any bytes as the header of a part file: no crash, and what is accepted has sections inside the file and
 * comes back the same when written.  The checksum is put right first, or nothing would get past it. */
#include "common/crc32c.h"
#include "worker/kv_part.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MAX_SECTION 600

static struct ds4_kv_part_section first_section[MAX_SECTION], second_section[MAX_SECTION];

static void check_accepted(const struct ds4_kv_part *part, size_t header, uint64_t file_bytes)
{
    uint8_t *again = malloc(header);
    struct ds4_kv_part second = {.section = second_section};
    enum ds4_kv_reason reason;
    uint64_t payload = 0, end = header;

    if (again == NULL)
        return;
    for (int32_t s = 0; s < part->n_section; s++) {
        if (part->section[s].offset < end || part->section[s].bytes > file_bytes ||
            part->section[s].offset > file_bytes - part->section[s].bytes)
            abort();
        end = part->section[s].offset + part->section[s].bytes;
        payload += part->section[s].bytes;
    }
    if (payload != part->payload_bytes || part->first_layer >= part->last_layer ||
        part->begin > part->end)
        abort();
    ds4_kv_part_write(part, again);
    if (ds4_kv_part_read(again, header, file_bytes, MAX_SECTION, &second, &reason, NULL) != 0 ||
        ds4_kv_part_match(&second, part, &reason, NULL) != 0 ||
        second.n_section != part->n_section ||
        memcmp(first_section, second_section, (size_t)part->n_section * sizeof(first_section[0])) !=
            0)
        abort();
    free(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ds4_kv_part part = {.section = first_section};
    enum ds4_kv_reason reason;
    uint8_t *bytes;
    size_t header;
    uint32_t crc;

    if (size > (size_t)1 << 20)
        return 0;
    bytes = malloc(size + 1);
    if (bytes == NULL)
        return 0;
    memcpy(bytes, data, size);
    header = ds4_kv_part_peek(bytes, size, &reason, NULL);
    if (header > 0 && header <= size) {
        uint64_t file_bytes = header + (uint64_t)bytes[header - 5] * 4096; /* as any other byte */

        crc = ds4_crc32c(0, bytes, header - 4);
        for (int i = 0; i < 4; i++)
            bytes[header - 4 + (size_t)i] = (uint8_t)(crc >> (8 * i));
        memset(first_section, 0, sizeof(first_section));
        memset(second_section, 0, sizeof(second_section));
        if (ds4_kv_part_read(bytes, header, file_bytes, MAX_SECTION, &part, &reason, NULL) == 0)
            check_accepted(&part, header, file_bytes);
    }
    free(bytes);
    return 0;
}

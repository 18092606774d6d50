/* Any bytes as a manifest: no crash, no count that lies, and what is accepted comes back the same when written.
 * The checksums are put right first, or nothing would get past them. */
#include "common/crc32c.h"
#include "router/disk/manifest.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void put_right(uint8_t *bytes, size_t size)
{
    enum ds4_kv_reason reason;
    size_t head = ds4_manifest_peek(bytes, size, size, &reason, NULL);
    uint32_t crc;

    if (head == 0 || head > size)
        return;
    crc = ds4_crc32c(0, bytes, head - 4);
    memcpy(bytes + head - 4, &crc, 4);
    crc = ds4_crc32c(0, bytes + head, size - head - 4);
    memcpy(bytes + size - 4, &crc, 4);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *bytes = malloc(size + 1);
    enum ds4_kv_reason reason = DS4_KV_OK;
    struct ds4_manifest m;
    struct ds4_buf out;

    if (bytes == NULL)
        return 0;
    memcpy(bytes, data, size);
    put_right(bytes, size);
    if (ds4_manifest_read(bytes, size, &m, &reason, NULL) != 0) {
        free(bytes);
        return 0;
    }
    for (int32_t i = 0; i < m.n_object; i++)
        if (m.object[i].n_file < 1 || m.object[i].first_file + m.object[i].n_file > m.n_file)
            abort();
    ds4_buf_init(&out, DS4_MANIFEST_MAX_BYTES);
    if (m.token != NULL && (ds4_manifest_write(&m, &out, NULL) != 0 || out.len != size ||
                            memcmp(out.ptr, bytes, 12) != 0))
        abort();
    ds4_buf_deinit(&out);
    ds4_manifest_deinit(&m);
    free(bytes);
    return 0;
}

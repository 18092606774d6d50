/* Whose state is on the disk: everything that decides the values of a cache row. */
#ifndef DS4_WORKER_KV_FINGERPRINT_H
#define DS4_WORKER_KV_FINGERPRINT_H

#include "common/choices.h"
#include "common/dtype.h"
#include "common/model.h"
#include "kernels/backend.h"
#include "proto/message.h"

#include <stdint.h>

struct ds4_kv_numerics {
    const char *backend; /* rows of cpu and cuda differ in the last bits */
    enum ds4_products products;
    enum ds4_dtype stream;
    enum ds4_row_format row_format;
    enum ds4_row_format index_format;
};

/* The same on every stage of a model, whatever its partition. */
void ds4_kv_fingerprint(const struct ds4_model_shape *model,
                        const uint8_t model_digest[DS4_ID_BYTES],
                        const struct ds4_kv_numerics *numerics, uint8_t out[DS4_ID_BYTES]);

#endif

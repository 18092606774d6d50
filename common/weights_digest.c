/* Digest of a model file by samples: reading 80 GB at every start would cost minutes.  Another
 * quantisation shows in the table, another training run in nearly every tensor and so in the samples;
 * a patch to a few tensors may go unseen.  Tensors are
 * taken in the order of their names, so the way a set is split does not matter. */
#include "common/weights_digest.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define SAMPLE_BYTES ((size_t)1 << 20)

static int by_name(const void *a, const void *b)
{
    const struct ds4_tensor_info *const *x = a;
    const struct ds4_tensor_info *const *y = b;

    return strcmp((*x)->name, (*y)->name);
}

static int add_sample(const struct ds4_weights_file *wf, const struct ds4_tensor_info *info,
                      uint8_t *sample, XXH3_state_t *state, struct ds4_err *err)
{
    size_t n = info->bytes < SAMPLE_BYTES ? (size_t)info->bytes : SAMPLE_BYTES;

    if (ds4_weights_read(wf, info, 0, n, sample, err) != 0)
        return -1;
    XXH3_128bits_update(state, sample, n);
    return 0;
}

static void add_table_row(const struct ds4_tensor_info *info, XXH3_state_t *state)
{
    XXH3_128bits_update(state, info->name, strlen(info->name) + 1);
    XXH3_128bits_update(state, &info->gguf_type, sizeof(info->gguf_type));
    XXH3_128bits_update(state, info->ne, (size_t)info->n_dims * sizeof(info->ne[0]));
}

int ds4_weights_digest(const struct ds4_weights_file *wf, uint8_t digest[DS4_WEIGHTS_DIGEST_BYTES],
                       struct ds4_err *err)
{
    size_t n_tensor = ds4_weights_n_tensor(wf);
    size_t stride = (n_tensor + DS4_WEIGHTS_SAMPLES - 1) / DS4_WEIGHTS_SAMPLES;
    const struct ds4_tensor_info **order = calloc(n_tensor + 1, sizeof(*order));
    uint8_t *sample = malloc(SAMPLE_BYTES);
    XXH3_state_t *state = XXH3_createState();
    XXH128_canonical_t canonical;
    int result = -1;

    if (order == NULL || sample == NULL || state == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for the digest of %zu tensors", n_tensor);
        goto out;
    }
    for (size_t i = 0; i < n_tensor; i++)
        order[i] = ds4_weights_at(wf, i);
    qsort(order, n_tensor, sizeof(*order), by_name);
    XXH3_128bits_reset(state);
    for (size_t i = 0; i < n_tensor; i++) {
        add_table_row(order[i], state);
        if (i % stride == 0 && add_sample(wf, order[i], sample, state, err) != 0)
            goto out;
    }
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state));
    memcpy(digest, canonical.digest, DS4_WEIGHTS_DIGEST_BYTES);
    result = 0;
out:
    XXH3_freeState(state);
    free(sample);
    free(order);
    return result;
}

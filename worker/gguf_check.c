/* The checker behind `ds4-gguf check`.
 *
 * Everything but the scan of the weights is what the loader itself does, called so that it goes on after
 * a finding.  The scan walks each tensor block by block and looks only at the fields that can be no
 * number: f16 scales, e8m0 scales, and scalar values. */
#include "worker/gguf_check.h"

#include <inttypes.h>
#include <stdlib.h>

#define CHUNK_BYTES ((size_t)4 << 20)
#define NO_FIELD    -1

/* Byte offsets of the f16 scales in a block. */
static const struct {
    int16_t d;
    int16_t dmin;
} scales[DS4_N_DTYPES] = {
    [DS4_DTYPE_F32] = {NO_FIELD, NO_FIELD},
    [DS4_DTYPE_F16] = {0, NO_FIELD},
    [DS4_DTYPE_BF16] = {NO_FIELD, NO_FIELD},
    [DS4_DTYPE_I8] = {NO_FIELD, NO_FIELD},
    [DS4_DTYPE_I32] = {NO_FIELD, NO_FIELD},
    [DS4_DTYPE_Q8_0] = {0, NO_FIELD},
    [DS4_DTYPE_Q4_0] = {0, NO_FIELD},
    [DS4_DTYPE_Q2_K] = {80, 82},
    [DS4_DTYPE_Q3_K] = {108, NO_FIELD},
    [DS4_DTYPE_Q4_K] = {0, 2},
    [DS4_DTYPE_Q5_K] = {0, 2},
    [DS4_DTYPE_Q6_K] = {208, NO_FIELD},
    [DS4_DTYPE_IQ2_XXS] = {0, NO_FIELD},
    [DS4_DTYPE_MXFP4] = {NO_FIELD, NO_FIELD},
};

struct check {
    const struct ds4_weights_file *wf;
    ds4_finding_fn report;
    void *arg;
    int32_t n_finding;
};

static void found(struct check *c, const struct ds4_err *err)
{
    c->n_finding++;
    c->report(c->arg, err);
}

static bool bad_f16(const uint8_t *p)
{
    return (p[1] & 0x7c) == 0x7c; /* all exponent bits: infinity or NaN */
}

static bool bad_block(enum ds4_dtype dtype, const uint8_t *block)
{
    switch (dtype) {
    case DS4_DTYPE_F32:
        return (block[3] & 0x7f) == 0x7f && (block[2] & 0x80) != 0;
    case DS4_DTYPE_BF16:
        return (block[1] & 0x7f) == 0x7f && (block[0] & 0x80) != 0;
    case DS4_DTYPE_MXFP4:
        return block[0] == 0xff;
    default:
        return (scales[dtype].d != NO_FIELD && bad_f16(block + scales[dtype].d)) ||
               (scales[dtype].dmin != NO_FIELD && bad_f16(block + scales[dtype].dmin));
    }
}

/* One finding per tensor: the first bad block and how many there are. */
static void scan_tensor(struct check *c, const struct ds4_tensor_info *info, uint8_t *chunk)
{
    const struct ds4_dtype_info *type = ds4_dtype_info(info->dtype);
    uint64_t block_bytes = (uint64_t)type->block_bytes;
    uint64_t n_block = info->bytes / block_bytes;
    uint64_t per_chunk = CHUNK_BYTES / block_bytes;
    uint64_t n_bad = 0;
    uint64_t first_bad = 0;
    struct ds4_err err = {DS4_OK, ""};

    for (uint64_t at = 0; at < n_block; at += per_chunk) {
        uint64_t n = n_block - at < per_chunk ? n_block - at : per_chunk;

        if (ds4_weights_read(c->wf, info, at * block_bytes, (size_t)(n * block_bytes), chunk,
                             &err)) {
            found(c, &err);
            return;
        }
        for (uint64_t i = 0; i < n; i++) {
            if (!bad_block(info->dtype, chunk + i * block_bytes))
                continue;
            first_bad = n_bad == 0 ? at + i : first_bad;
            n_bad++;
        }
    }
    if (n_bad == 0)
        return;
    ds4_fail(&err, DS4_E_CORRUPT,
             "tensor %s: %s %" PRIu64 " is NaN or infinite (%" PRIu64 " of %" PRIu64 " are)",
             info->name, type->block_elems == 1 ? "value" : "the scale of block", first_bad, n_bad,
             n_block);
    found(c, &err);
}

static void scan_tensors(struct check *c)
{
    struct ds4_err err = {DS4_OK, ""};
    uint8_t *chunk = malloc(CHUNK_BYTES);

    if (chunk == NULL) {
        ds4_fail(&err, DS4_E_NOMEM, "out of memory for a chunk");
        found(c, &err);
        return;
    }
    for (size_t i = 0; i < ds4_weights_n_tensor(c->wf); i++) {
        const struct ds4_tensor_info *info = ds4_weights_at(c->wf, i);

        if (info->usable)
            scan_tensor(c, info, chunk);
    }
    free(chunk);
}

static void check_model(struct check *c)
{
    struct ds4_err err = {DS4_OK, ""};
    struct ds4_model_shape shape;
    enum ds4_release release;

    if (ds4_model_read(c->wf, &shape, &err)) {
        found(c, &err);
    } else {
        c->n_finding += ds4_model_check_tensors(c->wf, &shape, &shape.present, c->report, c->arg);
        /* ds4_model_read checks a vocabulary that is there; here it must be. */
        if (!ds4_gguf_has(ds4_weights_meta(c->wf), "tokenizer.ggml.tokens") &&
            ds4_model_check_vocab(c->wf, shape.n_vocab, &err))
            found(c, &err);
    }
    if (ds4_gguf_has(ds4_weights_meta(c->wf), "general.architecture") &&
        ds4_model_release_of(c->wf, &release, NULL, &err))
        found(c, &err);
}

int32_t ds4_gguf_check(const char *path, bool tensors, ds4_finding_fn report, void *arg)
{
    struct ds4_err err = {DS4_OK, ""};
    struct check c = {.report = report, .arg = arg};
    struct ds4_weights_file *wf = ds4_weights_open(path, DS4_WEIGHTS_PREAD, &err);

    if (wf == NULL) {
        report(arg, &err);
        return 1;
    }
    c.wf = wf;
    check_model(&c);
    if (tensors)
        scan_tensors(&c);
    ds4_weights_close(wf);
    return c.n_finding;
}

/* Streams a synthetic model to disk.
 *
 * common/synth_gguf.c lays out the header; here the catalogue is walked once more for the data, which is
 * generated a few MiB at a time (a Flash layer is 2 GB). */
#include "worker/gguf_synth.h"

#include "common/buf.h"
#include "common/progress.h"
#include "common/synth_gguf.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define CHUNK_BYTES ((size_t)4 << 20)

struct writer {
    const struct ds4_synth *synth;
    int fd;
    uint64_t next; /* where the next tensor begins in the file */
    uint8_t *chunk;
    struct ds4_progress progress;
    struct ds4_err *err;
};

static int write_at(int fd, const void *bytes, size_t n, uint64_t at, struct ds4_err *err)
{
    const uint8_t *from = bytes;
    ssize_t put_bytes;

    while (n > 0) {
        put_bytes = pwrite(fd, from, n, (off_t)at);
        if (put_bytes < 0 && errno == EINTR)
            continue;
        if (put_bytes <= 0)
            return ds4_fail(err, DS4_E_IO, "could not write at %" PRIu64 ": %s", at,
                            put_bytes == 0 ? "nothing written" : strerror(errno));
        from += put_bytes;
        at += (uint64_t)put_bytes;
        n -= (size_t)put_bytes;
    }
    return 0;
}

static int write_tensor(void *arg, const struct ds4_tensor_want *want)
{
    struct writer *w = arg;
    enum ds4_dtype dtype = ds4_synth_dtype(want->class, w->synth->quant);
    uint64_t block_bytes = (uint64_t)ds4_dtype_info(dtype)->block_bytes;
    uint64_t n = ds4_synth_blocks(want, dtype);
    uint64_t per_chunk = CHUNK_BYTES / block_bytes;
    struct ds4_synth_recipe recipe;

    ds4_synth_recipe_of(w->synth->seed, want, dtype, &recipe);
    for (uint64_t at = 0; at < n; at += per_chunk) {
        uint64_t part = n - at < per_chunk ? n - at : per_chunk;

        ds4_synth_fill(&recipe, at, part, w->chunk);
        if (write_at(w->fd, w->chunk, (size_t)(part * block_bytes), w->next + at * block_bytes,
                     w->err))
            return -1;
        ds4_progress_update(&w->progress, (int64_t)(w->next + (at + part) * block_bytes));
    }
    w->next = ds4_synth_align(w->next + n * block_bytes);
    return 0;
}

/* ---- the file ---------------------------------------------------------------------------------- */

static int check_request(const struct ds4_gguf_synth *request, struct ds4_synth *synth,
                         struct ds4_model_part *part, struct ds4_err *err)
{
    const struct ds4_model_shape *shape = &synth->shape;
    int32_t last;

    if (ds4_synth_quant(request->quant, &synth->quant, err) ||
        ds4_synth_shape(request->shape, &synth->shape, err))
        return -1;
    synth->seed = request->seed;
    last = request->last_layer < 0 ? shape->n_layer - 1 : request->last_layer;
    if (request->first_layer < 0 || request->first_layer > last || last >= shape->n_layer)
        return ds4_fail(err, DS4_E_INVALID,
                        "layers %" PRId32 "-%" PRId32 " of shape %s, must lie in 0-%" PRId32,
                        request->first_layer, last, request->shape, shape->n_layer - 1);
    part->first_layer = request->first_layer;
    part->end_layer = last + 1;
    part->embed = part->first_layer == 0;
    part->head = part->end_layer == shape->n_layer;
    return 0;
}

static int write_file(struct writer *w, const struct ds4_buf *header, uint64_t data_bytes,
                      const struct ds4_model_part *part)
{
    w->next = header->len;
    ds4_progress_begin(&w->progress, "writing a model", (int64_t)(header->len + data_bytes));
    /* Paddings stay holes; the last tensor is padded as well, some readers insist. */
    if (ftruncate(w->fd, (off_t)(header->len + data_bytes)) != 0)
        return ds4_fail(w->err, DS4_E_IO, "could not size the file: %s", strerror(errno));
    if (write_at(w->fd, header->ptr, header->len, 0, w->err) ||
        ds4_model_each_tensor(&w->synth->shape, part, write_tensor, w))
        return -1;
    ds4_progress_end(&w->progress);
    if (fsync(w->fd) != 0)
        return ds4_fail(w->err, DS4_E_IO, "could not write: %s", strerror(errno));
    return 0;
}

/* The new file takes the name by rename(), which would as well replace a device. */
static int check_target(const char *path, struct ds4_err *err)
{
    struct stat st;

    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return ds4_fail(err, DS4_E_INVALID, "%s exists and is no regular file", path);
    return 0;
}

int ds4_gguf_synth_write(const struct ds4_gguf_synth *request, const char *path,
                         struct ds4_err *err)
{
    struct ds4_synth synth;
    struct writer w = {.synth = &synth, .fd = -1, .err = err};
    struct ds4_model_part part;
    struct ds4_buf header;
    uint64_t data_bytes;
    char *partial = NULL;
    int rc = -1;

    ds4_buf_init(&header, DS4_SYNTH_HEADER_MAX_BYTES);
    if (check_request(request, &synth, &part, err) || check_target(path, err) ||
        ds4_synth_header(&synth, &part, &header, &data_bytes, err))
        goto out;
    w.chunk = malloc(CHUNK_BYTES);
    if (w.chunk == NULL || asprintf(&partial, "%s.partial", path) < 0) {
        partial = NULL;
        ds4_fail(err, DS4_E_NOMEM, "out of memory for a chunk");
        goto out;
    }
    w.fd = open(partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (w.fd < 0) {
        ds4_fail(err, DS4_E_IO, "could not create %s: %s", partial, strerror(errno));
        goto out;
    }
    rc = write_file(&w, &header, data_bytes, &part);
    if (rc == 0 && rename(partial, path) != 0)
        rc = ds4_fail(err, DS4_E_IO, "could not rename to %s: %s", path, strerror(errno));
    if (rc != 0)
        unlink(partial);
out:
    if (w.fd >= 0)
        close(w.fd);
    free(partial);
    free(w.chunk);
    ds4_buf_deinit(&header);
    return rc;
}

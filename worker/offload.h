/* Experts that do not fit on the card: they stay in host memory.
 *
 * Every layer has n_resident experts on the device, in slots; all of them lie in host memory as well.
 * Uses of resident experts run on the device.  Of the others, those that many rows of a step use are
 * copied to the device, a group at a time; the rest is computed by the CPU backend where it lies,
 * meanwhile: over a narrow link copying a weight costs more than multiplying by it.  Each use leaves its
 * row apart, and the rows are added in the order of expert ids, so that what is where changes no sum:
 * with the CPU on both sides the bits are those of a stage without offload.
 *
 * Which experts are resident follows use: decode steps count, and now and then the most used one that
 * is not there takes the place of the least used one that is.
 *
 * All calls from the step thread. */
#ifndef DS4_WORKER_OFFLOAD_H
#define DS4_WORKER_OFFLOAD_H

#include "common/err.h"
#include "common/model.h"
#include "kernels/backend.h"

#include <stddef.h>
#include <stdint.h>

struct ds4_offload;
struct ds4_stage_weights;

/* Bytes of device buffers and of host buffers (but the experts themselves) for steps of max_tok rows;
 * slab_bytes: struct ds4_weights_size. */
size_t ds4_offload_device_bytes(const struct ds4_model_shape *model, int32_t max_tok,
                                size_t slab_bytes);
size_t ds4_offload_host_bytes(const struct ds4_model_shape *model, int32_t max_tok);

struct ds4_offload_config {
    const struct ds4_model_shape *model;
    struct ds4_stage_weights *weights; /* loaded with n_resident */
    int32_t n_resident;
    int32_t max_tok;
    size_t slab_bytes;
    const struct ds4_backend *backend; /* the device's ... */
    struct ds4_device *dev;
    void *area;                     /* ... and ds4_offload_device_bytes of its memory */
    const struct ds4_backend *host; /* the cpu's, with scratch set for max_tok rows */
    struct ds4_device *host_dev;
};

/* Borrows everything in the config until ds4_offload_free.  DS4_E_NOMEM. */
struct ds4_offload *ds4_offload_new(const struct ds4_offload_config *config,
                                    struct ds4_err *err) DS4_MUST_CHECK;
void ds4_offload_free(struct ds4_offload *o);

/* backend->moe of layer l of the stage, whose weights `a` need not name: id and weight lie on the device,
 * ids rising within a token.  Waits for the device. */
void ds4_offload_moe(struct ds4_offload *o, int32_t l, const struct ds4_moe_args *a);
/* Between two steps: at most one expert changes its place. */
void ds4_offload_adapt(struct ds4_offload *o);

/* Uses since the start, by where they were served. */
struct ds4_offload_stats {
    uint64_t resident;
    uint64_t streamed;
    uint64_t host;
    uint64_t moved; /* experts that became resident */
};
void ds4_offload_stats(const struct ds4_offload *o, struct ds4_offload_stats *out);

#endif

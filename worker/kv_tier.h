/* Between the cache and the disk: jobs of the router become copies and files; what was read waits here
 * until a step installs it.
 *
 * A write copies block rows into host memory of its own at once (in the order of the steps), then the disk
 * thread has it; a tail's point is read where it lies, since the router keeps it.  A read fills host memory
 * of the budget that points share.  Called by the step thread; `done` is called on either thread. */
#ifndef DS4_WORKER_KV_TIER_H
#define DS4_WORKER_KV_TIER_H

#include "common/err.h"
#include "proto/message.h"
#include "worker/kv_disk.h"
#include "worker/kv_point.h"

struct ds4_kv_tier;

struct ds4_kv_tier_config {
    struct ds4_kv_store *store; /* borrowed */
    const char *dir;            /* NULL or "": no disk; jobs are refused */
    int32_t write_mbps;
    uint8_t fingerprint[DS4_ID_BYTES];
    int32_t first_layer; /* of the stage */
    ds4_kv_done_fn done; /* NULL: nobody listens */
    void *done_arg;
};

/* DS4_E_IO, DS4_E_NOMEM. */
struct ds4_kv_tier *ds4_kv_tier_open(const struct ds4_kv_tier_config *config,
                                     struct ds4_err *err) DS4_MUST_CHECK;
void ds4_kv_tier_close(struct ds4_kv_tier *tier);
/* The end of a generation: no job is left, nothing is staged.  Before ds4_kv_store_reset. */
void ds4_kv_tier_reset(struct ds4_kv_tier *tier);
bool ds4_kv_tier_has_disk(const struct ds4_kv_tier *tier);

/* What cannot be done is answered by `done` at once. */
void ds4_kv_tier_write(struct ds4_kv_tier *tier, const struct ds4_kv_write *write);
void ds4_kv_tier_read(struct ds4_kv_tier *tier, const struct ds4_kv_read *read);
void ds4_kv_tier_unlink(struct ds4_kv_tier *tier, const struct ds4_kv_unlink *unlink);

/* STAGED_INSTALL and STAGED_DROP.  DS4_E_PROTOCOL: no such staging (a drop of one that this stage failed to
 * read is fine), still being read, other blocks than it holds, a block that a sequence uses. */
int ds4_kv_tier_install(struct ds4_kv_tier *tier, const struct ds4_kv_op *op,
                        struct ds4_err *err) DS4_MUST_CHECK;
int ds4_kv_tier_drop(struct ds4_kv_tier *tier, uint64_t staging,
                     struct ds4_err *err) DS4_MUST_CHECK;

#endif

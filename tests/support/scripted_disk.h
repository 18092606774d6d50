/* The disk tier of a scripted pipeline: parts in memory, which outlive generations and routers as files do.
 *
 * A part has the cells of its rows, read through the blocks a KV_WRITE names at the place in the order of
 * steps where it came, and for a tail the hash of its point.  What is read back becomes cells and points of
 * the scripted stage, so that a wrong block, a stale row or another conversation's tail changes the output.
 * Every stage answers every job; tests say which of them does not, and why. */
#ifndef DS4_TESTS_SUPPORT_SCRIPTED_DISK_H
#define DS4_TESTS_SUPPORT_SCRIPTED_DISK_H

#include "common/vec.h"
#include "proto/message.h"

#include <stdbool.h>
#include <stdint.h>

struct ds4_scripted_stage;

struct ds4_scripted_part {
    uint8_t key[DS4_ID_BYTES];
    bool tail;
    int32_t begin, end;
    uint64_t *cell; /* [end - begin], owned */
    uint64_t hash;  /* tails: of the point */
    uint8_t digest[DS4_ID_BYTES];
    uint64_t bytes; /* as a file of one stage */
};

struct ds4_scripted_staging {
    uint64_t id;
    struct ds4_scripted_part part; /* a copy */
    int64_t held_bytes;
};

struct ds4_scripted_job {
    enum ds4_kv_job_of { DS4_SCRIPTED_WRITE, DS4_SCRIPTED_READ, DS4_SCRIPTED_UNLINK } kind;
    int64_t after_step; /* runs when all steps before this one have run */
    struct ds4_kv_write write;
    struct ds4_kv_read read;
    struct ds4_kv_unlink unlink;
    int32_t block[DS4_PART_BLOCKS];
    struct ds4_kv_part_ref ref[DS4_MAX_STAGES];
};

struct ds4_scripted_owed {
    int32_t stage;
    struct ds4_kv_done done;
};

struct ds4_scripted_disk {
    struct ds4_scripted_stage *stage; /* of the generation that runs */
    int64_t block_bytes;              /* what a staged block holds of the host's memory */
    DS4_VEC(struct ds4_scripted_part) part;
    DS4_VEC(struct ds4_scripted_staging) staging;
    DS4_VEC(struct ds4_scripted_job) queue;
    int64_t staged_bytes;
    uint64_t n_written, n_read, n_existed, n_unlinked; /* parts */
    uint64_t rows_written;
    bool silent;   /* jobs stay undone */
    uint64_t mute; /* bit per stage: what it did it does not say before the bit is gone ... */
    DS4_VEC(struct ds4_scripted_owed) owed; /* ... in this order */
    /* The next job of that kind fails on that stage for that reason; DS4_KV_OK: none does. */
    enum ds4_kv_job_of fail_kind;
    int32_t fail_after; /* jobs of the kind that go well first */
    int32_t fail_stage;
    enum ds4_kv_reason fail_reason;
};

/* A new generation: stagings and jobs are gone, parts stay. */
void ds4_scripted_disk_form(struct ds4_scripted_disk *disk, struct ds4_scripted_stage *stage);
void ds4_scripted_disk_deinit(struct ds4_scripted_disk *disk);

/* The scheduler's port; owner is the stage, whose `disk` is this one. */
int ds4_scripted_kv_write(void *stage, const struct ds4_kv_write *write, struct ds4_err *err);
int ds4_scripted_kv_read(void *stage, const struct ds4_kv_read *read, struct ds4_err *err);
int ds4_scripted_kv_unlink(void *stage, const struct ds4_kv_unlink *unlink, struct ds4_err *err);

/* STAGED_INSTALL and STAGED_DROP; a text if it cannot be done. */
const char *ds4_scripted_disk_op(struct ds4_scripted_disk *disk, const struct ds4_kv_op *op);

/* Runs the oldest job that may run; done[n_stage] are the answers of the stages.  False: none. */
bool ds4_scripted_disk_run(struct ds4_scripted_disk *disk, int32_t n_stage,
                           struct ds4_kv_done *done);

#endif

/* The disk tier of one stage: parts are written, read and verified by one thread of its own.
 *
 * A job brings its memory along: sections of blobs (worker/kv_host.h) that the step thread filled, or took
 * for filling.  Nothing goes from disk to the device: a read ends in host memory, whole and verified, or not
 * at all.  A write ends with a file of the final name, synced with its folder, or with none.
 *
 * The step thread prepares jobs; the thread here runs them in order and says so by `done`, which it calls
 * on its own thread.  Jobs come from a fixed pool; nothing is allocated after open. */
#ifndef DS4_WORKER_KV_DISK_H
#define DS4_WORKER_KV_DISK_H

#include "common/err.h"
#include "proto/message.h"
#include "worker/kv_host.h"
#include "worker/kv_part.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct ds4_kv_disk;

typedef void (*ds4_kv_done_fn)(void *arg, const struct ds4_kv_done *done);

struct ds4_kv_disk_config {
    const char *dir; /* copied; made with mode 0700 if it is not there */
    uint8_t fingerprint[DS4_ID_BYTES];
    uint32_t row_format; /* enum ds4_kv_row_format */
    int32_t first_layer; /* of the stage */
    int32_t last_layer;  /* exclusive */
    int32_t max_section; /* of the stage's own parts */
    int32_t write_mbps;  /* MB per second; 0: no limit */
    ds4_kv_done_fn done;
    void *done_arg;
};

enum ds4_kv_job_kind { DS4_KV_JOB_WRITE, DS4_KV_JOB_READ, DS4_KV_JOB_UNLINK };

/* A section and where its bytes are: at `offset` of blob 0 or 1. */
struct ds4_kv_job_section {
    int32_t layer; /* of the model */
    int32_t kind;
    int32_t rows;
    size_t bytes;
    int32_t blob;
    size_t offset;
    bool filled; /* read: done */
};

enum ds4_kv_staged_state { DS4_KV_STAGED_LOADING, DS4_KV_STAGED_READY, DS4_KV_STAGED_FAILED };

struct ds4_kv_job {
    enum ds4_kv_job_kind kind;
    uint32_t generation;
    uint64_t id;
    struct ds4_kv_part part; /* names the object; `section` is the thread's */
    bool quarantine;         /* unlink */
    int32_t n_ref;           /* read */
    struct ds4_kv_part_ref ref[DS4_MAX_STAGES];
    struct ds4_kv_host *host[2];
    struct ds4_kv_blob blob[2];
    int32_t n_section;
    struct ds4_kv_job_section *section; /* [max_section] */
    /* Blobs given back when the job is over: a write's rows always, a read's both if it failed. */
    bool give[2];
    atomic_int *state; /* read: set to READY or FAILED before `done`; else NULL */
};

/* Makes the folder and starts the thread, which first removes old temporary files.  DS4_E_IO if the folder
 * cannot be made or written. */
struct ds4_kv_disk *ds4_kv_disk_open(const struct ds4_kv_disk_config *config,
                                     struct ds4_err *err) DS4_MUST_CHECK;
/* Drops waiting reads, does the writes and removals it was asked for, joins. */
void ds4_kv_disk_close(struct ds4_kv_disk *disk);

/* An empty job, or NULL when DS4_MAX_KV_JOBS are under way.  Submit it or give it back. */
struct ds4_kv_job *ds4_kv_disk_take(struct ds4_kv_disk *disk);
void ds4_kv_disk_put(struct ds4_kv_disk *disk, struct ds4_kv_job *job);
void ds4_kv_disk_submit(struct ds4_kv_disk *disk, struct ds4_kv_job *job);

/* Drops waiting jobs without a word and interrupts the running one; returns when none is left. */
void ds4_kv_disk_cancel(struct ds4_kv_disk *disk);

#endif

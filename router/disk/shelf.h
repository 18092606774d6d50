/* The router's disk thread: changes of the manifests' folder in the order they were asked for, so that the
 * loop never waits for an fsync.  A LOAD comes before all that waits: it is of a commit that is there and pinned.
 *
 * A job is taken, filled, submitted, and comes back through ds4_shelf_next with its answer.  With
 * `no_thread` it is done inside submit: for tests, whose time is not real. */
#ifndef DS4_ROUTER_DISK_SHELF_H
#define DS4_ROUTER_DISK_SHELF_H

#include "common/err.h"
#include "router/disk/folder.h"

#include <stdbool.h>
#include <stdint.h>

struct ds4_shelf;

enum ds4_shelf_kind {
    DS4_SHELF_OPEN, /* fingerprint, local: opens the folder and scans it; `scan`.  Makes it the first time; after that
                       * kv.disk_dir must be there (common/store_dir.h) */
    DS4_SHELF_INTEND, /* id, bytes */
    DS4_SHELF_COMMIT, /* id, bytes */
    DS4_SHELF_RETIRE, /* id, quarantine */
    DS4_SHELF_FORGET, /* id */
    DS4_SHELF_LOAD,   /* id; `manifest`, reason */
    DS4_SHELF_USES    /* bytes: n structs ds4_commit_use */
};

struct ds4_shelf_job {
    enum ds4_shelf_kind kind;
    uint8_t id[DS4_ID_BYTES]; /* of the commit, or the fingerprint */
    bool local;
    bool quarantine;
    void *bytes; /* owned: malloc'ed by whoever filled the job */
    size_t n;
    uint64_t tag; /* the asker's */

    int rc;    /* 0, or -1 with err */
    bool gone; /* the folder is not there any more: nothing works before it is opened again */
    struct ds4_err err;
    enum ds4_kv_reason reason;
    struct ds4_manifest manifest; /* owned until taken (zero it then) */
    struct ds4_folder_scan scan;  /* the same */
    struct ds4_shelf_job *next;
};

struct ds4_shelf_config {
    const char *dir; /* copied */
    bool no_thread;
    void (*wake)(void *arg); /* called by the thread when an answer is there; NULL = nobody waits */
    void *wake_arg;
};

/* NULL with DS4_E_NOMEM, DS4_E_IO. */
struct ds4_shelf *ds4_shelf_new(const struct ds4_shelf_config *config, struct ds4_err *err);
/* Does what is still queued, but scans and loads, and ends the thread. */
void ds4_shelf_free(struct ds4_shelf *shelf);

/* An empty job, or NULL when memory is out. */
struct ds4_shelf_job *ds4_shelf_job_new(enum ds4_shelf_kind kind, const uint8_t *id, uint64_t tag);
void ds4_shelf_submit(struct ds4_shelf *shelf, struct ds4_shelf_job *job);
/* The next job that is done, for the caller to free; NULL = none now. */
struct ds4_shelf_job *ds4_shelf_next(struct ds4_shelf *shelf);
void ds4_shelf_job_free(struct ds4_shelf_job *job);
/* Jobs submitted that have not come back. */
int32_t ds4_shelf_n_open(const struct ds4_shelf *shelf);

#endif

/* The disk tier as the scheduler runs it: what is saved, what is read back, what is cleaned up.
 *
 * Saving (save.c): a restore point of the index, with the rows below it, becomes a commit.  The stages write one
 * part each of every object that is not there yet; when all said "done", and only then, the manifest is
 * stored.  One commit at a time, at most DS4_MAX_KV_WRITES parts under way.
 *
 *   point ready --worth it--> queued --> saving --all parts--> storing --manifest there--> in the catalogue
 *                               |           +----- any refusal, timeout, lost generation ----> garbage
 *                               +-- the room is needed: dropped
 *
 * Restoring (restore.c): a request whose prompt a commit has more of than the index.  First the lease of
 * all its blocks and the stages' host memory, then the manifest, then the parts, then, when every
 * stage has verified all of them, one step installs them and runs on.  Anything else: the lease goes
 * back, and the request is admitted again as if there were no disk.
 *
 * Health (tier_watch.c).  A folder that is gone (removed, unmounted) is opened and scanned again, until then
 * nothing is kept or found.  A stage that is silent with jobs before it is late.  Its jobs are kept in the list,
 * for it may still be at them, but nobody waits: saves come to nothing, requests go on cold, nothing more is
 * asked for until it has answered.
 *
 * Garbage (tier.c): objects of commits that were dropped, and of saves that came to nothing; the stages
 * remove the files, then the .w file that lists them goes.  It outlives a generation.
 *
 * Only the scheduler's files include this. */
#ifndef DS4_ROUTER_SCHED_TIER_H
#define DS4_ROUTER_SCHED_TIER_H

#include "common/vec.h"
#include "proto/message.h"
#include "router/disk/catalog.h"
#include "router/disk/shelf.h"
#include "router/sched/prefix.h"

#include <stdbool.h>
#include <stdint.h>

#define DS4_RESTORE_MIN_TOK   256 /* a commit must have so many tokens more than the index */
#define DS4_RESTORE_MAX_PARTS 512 /* operations of a step that one restore may take */
#define DS4_MAX_STAGED_DROP   64  /* of a step */
#define DS4_SAVE_QUEUE        32  /* points waiting to be saved */

#define DS4_DISK_TEXT 120

struct ds4_sched;
struct ds4_seq;
struct ds4_request;
struct ds4_step;

enum ds4_transfer_kind { DS4_TRANSFER_WRITE, DS4_TRANSFER_READ, DS4_TRANSFER_UNLINK };

/* A job all stages were told, until the last of them has answered. */
struct ds4_transfer {
    uint64_t job;
    enum ds4_transfer_kind kind;
    uint64_t answered;         /* bit per stage */
    void *owner;               /* struct ds4_saving, ds4_restore or ds4_garbage; NULL: given up */
    int32_t object;            /* of the owner's */
    enum ds4_kv_reason reason; /* of the first stage that could not */
    int32_t stage;             /* that stage */
    char text[128];
    int64_t after_step;           /* the steps before it come before it at every stage */
    int64_t reached_ns;           /* when those were done; 0: they are not */
    bool late;                    /* nobody waits for it, but a stage may still be at it */
    struct ds4_point *point;      /* of a late write: pinned, for it may still be read */
    uint64_t bytes;               /* written anew, or read */
    struct ds4_kv_part_ref *file; /* write: [n_stage], owned */
    int32_t n_block;              /* write: pinned */
    int32_t block[DS4_PART_BLOCKS];
};

struct ds4_garbage {
    uint8_t id[DS4_ID_BYTES]; /* of the .w file */
    struct ds4_disk_objects object;
    size_t next;  /* object */
    int32_t file; /* and file of it that is to be removed next */
    int32_t n_flight;
    bool failed; /* a stage could not: tried again by a later start */
};

struct ds4_saving {
    struct ds4_manifest m;         /* id, keys, tokens; files once they are known */
    XXH128_hash_t root;            /* of its chain */
    struct ds4_disk_object **held; /* [m.n_object] references; NULL: still to be written */
    struct ds4_point *point;       /* pinned, hangs on its node; NULL once all is written */
    int32_t next;                  /* object to be written next */
    int32_t n_flight;
    int64_t reserved_bytes;
    uint64_t written_bytes;
    bool noted; /* the .w file is there: parts may be written */
    bool failed;
    bool storing;
    int64_t begun_ns;
    char why[DS4_DISK_TEXT]; /* the disk's reason; "" = it is not the disk's fault */
};

struct ds4_restore {
    struct ds4_seq *seq;       /* waits for it, has the lease; NULL: nobody does any more */
    struct ds4_commit *commit; /* pinned */
    struct ds4_prefix_hit hit; /* as it will be counted */
    int32_t first;             /* objects before are rows the index has */
    int32_t next;              /* object to be read next */
    int32_t n_flight;
    int32_t n_read;
    uint64_t *staging; /* [objects], owned; 0: not asked for */
    bool checked;      /* the manifest has the prompt's tokens */
    bool failed;
    bool ready; /* its sequence is in the batch: the next step installs */
    enum ds4_kv_reason reason;
    char text[128];
    uint64_t bytes, total_bytes;
    int64_t held_bytes[DS4_MAX_STAGES]; /* of the stages' host memory */
    int64_t begun_ns, logged_ns;
};

struct ds4_tier {
    struct ds4_shelf *shelf; /* NULL: there is no tier */
    struct ds4_catalog *catalog;
    uint64_t max_bytes;
    bool works;                        /* the stages of this generation can, the folder is open */
    bool opening;                      /* a scan is under way */
    bool scanned;                      /* the catalogue is that of `fingerprint` */
    bool shrinking;                    /* and above the cap: nothing is saved before it is not */
    uint8_t fingerprint[DS4_ID_BYTES]; /* of the folder that is open */
    int64_t heard_ns[DS4_MAX_STAGES];  /* when each stage answered last */
    int64_t shelf_ns;                  /* when the folder's thread did, or had nothing to do */
    int32_t n_late;                    /* transfers that are */
    int32_t late_stage;                /* of the newest of them */
    bool shelf_late;
    bool lost;                   /* the folder is gone, or could not be opened */
    bool was_late;               /* in the last turn */
    int64_t now_ns;              /* of this turn */
    int64_t retry_ns, wait_ns;   /* when the folder is opened again */
    int64_t save_ns;             /* no save is begun before */
    int32_t n_failed;            /* saves in a row, for reasons of the disk */
    int64_t pardon_ns;           /* when what could not be read is tried again */
    char trouble[DS4_DISK_TEXT]; /* of the lost folder, or the last failed save */
    uint64_t next_job, next_staging;
    DS4_VEC(struct ds4_transfer *) transfer;
    int32_t n_write; /* of them */
    DS4_VEC(struct ds4_garbage *) garbage;
    DS4_VEC(struct ds4_restore *) restore;
    DS4_VEC(uint64_t) drop;            /* stagings the next step drops */
    int64_t drop_held[DS4_MAX_STAGES]; /* what they hold, until then */
    DS4_VEC(struct ds4_point *) queue; /* pinned, to be saved, in this order */
    struct ds4_saving *saving;
    struct ds4_commit *suspect; /* pinned; installed last, until its first step came back ... */
    uint64_t suspect_seq;       /* ... for this sequence */
    bool flush;                 /* the end is near: what can be saved is saved now */
    int64_t extent_bytes;       /* of all stages, as written last; 0 = none yet */
    bool uses_dirty;
    int64_t uses_ns; /* of the newest note */
};

/* Life; `config` is the scheduler's. */
int ds4_tier_init(struct ds4_sched *s, struct ds4_err *err) DS4_MUST_CHECK;
void ds4_tier_deinit(struct ds4_sched *s);
/* A generation begins, after its ledger was made, or ends, before. */
void ds4_tier_start(struct ds4_sched *s);
void ds4_tier_stop(struct ds4_sched *s, bool lost);
/* Once per turn of the loop. */
void ds4_tier_tick(struct ds4_sched *s, int64_t now_ns);

/* The commit leaves the catalogue, its manifest the folder (quarantine: as .bad, for people); files that only
 * it needed become garbage. */
void ds4_tier_drop_commit(struct ds4_sched *s, struct ds4_commit *commit, bool quarantine);
/* The same for room under the cap, counted. */
void ds4_tier_evict(struct ds4_sched *s, struct ds4_commit *commit);
/* Objects whose files are to be removed; takes the list.  The .w file of `id` goes with them. */
void ds4_tier_discard(struct ds4_sched *s, const uint8_t *id, struct ds4_disk_objects *object);
/* A job for all stages; NULL if it cannot be sent now. */
struct ds4_transfer *ds4_tier_transfer(struct ds4_sched *s, enum ds4_transfer_kind kind,
                                       void *owner, int32_t object);
void ds4_tier_forget_transfer(struct ds4_sched *s, struct ds4_transfer *transfer);
/* Room for one more job at the stages? */
bool ds4_tier_can_ask(const struct ds4_sched *s);
void ds4_tier_count_reject(struct ds4_sched *s, enum ds4_kv_reason reason);

/* tier_watch.c */

/* Once per turn, before the rest: who is late, and who is not any more. */
void ds4_tier_watch(struct ds4_sched *s, int64_t now_ns);
/* A stage or the folder is late, or the folder is gone: nothing new is asked for, and what was is not waited
 * for. */
bool ds4_tier_is_down(const struct ds4_sched *s);
bool ds4_tier_is_late(const struct ds4_sched *s);
/* The folder is gone, or could not be opened: everything in it is unknown until it can. */
void ds4_tier_lost(struct ds4_sched *s, const char *why);
/* It is open and known. */
void ds4_tier_found(struct ds4_sched *s);
/* A save ended: well (NULL), or why the disk could not.  After the second in a row there are pauses. */
void ds4_tier_saved(struct ds4_sched *s, const char *why);
/* Opens the folder of the stages' fingerprint and scans it (tier.c); nothing may be under way. */
void ds4_tier_open(struct ds4_sched *s);

/* save.c */

/* A part of it is late: the save comes to nothing, the transfer is nobody's. */
void ds4_save_late(struct ds4_sched *s, struct ds4_transfer *transfer);
void ds4_save_consider(struct ds4_sched *s, int64_t now_ns);
void ds4_save_tick(struct ds4_sched *s, int64_t now_ns);
void ds4_save_answered(struct ds4_sched *s, struct ds4_transfer *transfer, int64_t now_ns);
void ds4_save_noted(struct ds4_sched *s, const struct ds4_shelf_job *job);
void ds4_save_stored(struct ds4_sched *s, const struct ds4_shelf_job *job, int64_t now_ns);
void ds4_save_stop(struct ds4_sched *s);
/* The catalogue is about to be freed: a save whose manifest is being stored is not waited for. */
void ds4_save_abandon(struct ds4_sched *s);
/* What waits to be saved lets go of the index's rows; true if anything did. */
bool ds4_save_yield(struct ds4_sched *s);
bool ds4_save_is_busy(const struct ds4_sched *s);

/* restore.c */

/* A commit with more of these tokens than the hit has: then *hit is what the request would have with it.  Looks
 * only; NULL: none.  The result is begun, or cancelled. */
struct ds4_restore *ds4_restore_look(struct ds4_sched *s, struct ds4_request *req,
                                     const int32_t *token, int32_t n_tok,
                                     struct ds4_prefix_hit *hit, int64_t now_ns);
/* Tokens whose rows the index has: the lease begins behind them. */
int32_t ds4_restore_rows(const struct ds4_restore *r);
/* The stages' host memory for it; false: there is too little. */
bool ds4_restore_hold(struct ds4_sched *s, struct ds4_restore *r);
void ds4_restore_cancel(struct ds4_sched *s, struct ds4_restore *r, bool held);
/* The sequence has its lease and waits; false without memory. */
bool ds4_restore_begin(struct ds4_sched *s, struct ds4_restore *r, struct ds4_seq *seq);
/* A request that waits may come to need this one's commit: it is not evicted meanwhile. */
void ds4_restore_want(struct ds4_sched *s, const struct ds4_request *req, int64_t now_ns);
/* A step of the sequence came back. */
void ds4_restore_acked(struct ds4_sched *s, const struct ds4_seq *seq, bool finite);
void ds4_restore_tick(struct ds4_sched *s, int64_t now_ns);
void ds4_restore_answered(struct ds4_sched *s, struct ds4_transfer *transfer);
void ds4_restore_loaded(struct ds4_sched *s, struct ds4_shelf_job *job);
void ds4_restore_stop(struct ds4_sched *s, bool lost);
/* The sequence is gone. */
void ds4_restore_forget_seq(struct ds4_sched *s, const struct ds4_seq *seq);
/* Operations that the first step of this sequence needs for it. */
int32_t ds4_restore_n_ops(const struct ds4_sched *s, const struct ds4_seq *seq);
/* The operations that put it on the device, and those that drop what nobody wants. */
int ds4_restore_add_ops(struct ds4_sched *s, struct ds4_seq *seq, struct ds4_step *step,
                        struct ds4_err *err) DS4_MUST_CHECK;
void ds4_restore_add_drops(struct ds4_sched *s, struct ds4_step *step);

#endif

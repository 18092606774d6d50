/* Deliberate faults, for the build that has them (make FAULTS=1) and no other.
 *
 * The environment variable DS4_FAULT=<point>:<nth>:<stage> chooses one: the point acts the nth time the
 * program comes by it (1 = the first) in the worker of that stage, or in the router if <stage> is
 * "router".  "<nth>+" acts from then on every time.  Several are separated by commas.  A name that is
 * not in the table stops the start: a test whose fault never happens must not pass.
 *
 *     if (DS4_FAULT_POINT(PART_BAD_CRC))
 *         crc ^= 1;
 *
 * Without DS4_FAULTS the condition is the constant false, and nothing of this is in the program. */
#ifndef DS4_COMMON_FAULT_H
#define DS4_COMMON_FAULT_H

#include "common/err.h"

#include <stdbool.h>
#include <stdint.h>

/* X(NAME, "name in DS4_FAULT").  Every point stands somewhere in the code (checked by lint). */
#define DS4_FAULT_TABLE(X)                                                                         \
    X(CLOCK_JUMP, "clock_jump") /* the clock of people and files leaps back an hour */             \
    X(CUDA_STICKY_ERROR, "cuda_sticky_error") /* the device faults: exit 70 */                     \
    X(CARD_XID, "card_xid")     /* the driver says that the card fell off the bus: exit 79 */      \
    X(EXPERT_OOB, "expert_oob") /* an expert id is out of range */                                 \
    X(TOPK_OOB, "topk_oob")     /* a selected row is out of range */                               \
    X(NAN_LOGITS, "nan_logits") /* a logits row is not finite */                                   \
    X(OOV_DRAFT, "oov_draft")   /* a draft is no id of the vocabulary */                           \
    X(NCCL_PEER_EXIT, "nccl_peer_exit") /* the process is killed before it sends */                \
    X(NCCL_HANG, "nccl_hang")           /* a step's rows or record are never sent */               \
    X(ROWS_HEADER, "rows_header")       /* rows say that they are another step's */                \
    X(RECORD_HEADER, "record_header")   /* a token record says so */                               \
    X(TOKEN_DELAY_MS, "token_delay_ms") /* a step's tokens return 50 ms later */                   \
    X(RESERVE_FAIL, "reserve_fail")     /* a request finds no room although there is */            \
    X(GROW_FAIL, "grow_fail")           /* a running one finds no block */                         \
    X(COW_FAIL, "cow_fail")             /* a block cannot be copied for who goes on inside it */   \
    X(HOST_ANCHOR_ALLOC_FAIL, "host_anchor_alloc_fail") /* a point finds no memory */              \
    X(INSTALL_COPY_FAIL, "install_copy_fail")           /* a point does not reach the rings */     \
    X(PART_SHORT_READ, "part_short_read")               /* a part ends too early */                \
    X(PART_BAD_CRC, "part_bad_crc")                     /* a section's checksum is wrong */        \
    X(PART_WRONG_FINGERPRINT, "part_wrong_fingerprint") /* a part of another model */              \
    X(PART_DELAY_MS, "part_delay_ms")                   /* a read takes 300 ms longer */           \
    X(WRITE_ENOSPC, "write_enospc")                     /* the disk is full */                     \
    X(FSYNC_EIO, "fsync_eio")                           /* the disk loses what it took */          \
    X(RENAME_FAIL, "rename_fail")                       /* a part does not get its name */         \
    X(KILL_BEFORE_RENAME, "kill_before_rename") /* the process dies with a whole temporary file */ \
    X(KILL_AFTER_PART_BEFORE_MANIFEST, "kill_after_part_before_manifest") /* or with the part */   \
    X(KILL_AFTER_MANIFEST, "kill_after_manifest")       /* with the manifest: router */            \
    X(MANIFEST_MISSING_STAGE, "manifest_missing_stage") /* it leaves a stage's part out: router */ \
    X(STEP_MSG_DROP, "step_msg_drop")     /* a step never arrives: exit 72 at the next */          \
    X(STEP_MSG_DUP, "step_msg_dup")       /* a step arrives twice: exit 72 */                      \
    X(STALE_EPOCH_MSG, "stale_epoch_msg") /* a step of another generation: dropped, counted */

enum ds4_fault_point {
#define DS4_FAULT_ENUM(name, text) DS4_FAULT_##name,
    DS4_FAULT_TABLE(DS4_FAULT_ENUM)
#undef DS4_FAULT_ENUM
        DS4_FAULT_N_POINT
};

#define DS4_FAULT_ROUTER (-1) /* `stage` of the router */

#ifdef __cplusplus
extern "C" {
#endif

#ifdef DS4_FAULTS
#define DS4_FAULT_POINT(name) ds4_fault_hit(DS4_FAULT_##name)
#define DS4_FAULT_BUILD       true /* faults may come between any two calls */

/* Reads DS4_FAULT; once, before other threads.  DS4_E_INVALID if it is there and cannot be read. */
int ds4_fault_init(int32_t stage, struct ds4_err *err) DS4_MUST_CHECK;
/* The same from text, NULL = no faults; for tests. */
int ds4_fault_set(const char *text, int32_t stage, struct ds4_err *err) DS4_MUST_CHECK;
/* Counts this passage; true if the point acts.  Any thread. */
bool ds4_fault_hit(enum ds4_fault_point point);
#else
#define DS4_FAULT_POINT(name) false
#define DS4_FAULT_BUILD       false

static inline int ds4_fault_init(int32_t stage, struct ds4_err *err)
{
    (void)stage;
    (void)err;
    return 0;
}
#endif

#ifdef __cplusplus
}
#endif

#endif

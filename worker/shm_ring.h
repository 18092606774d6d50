/* A ring of fixed slots in shared memory: one producer, up to DS4_MAX_STAGES consumers that each see
 * every slot.  Both channels of pipe_shm are such rings: activations (one consumer) and token records
 * (all stages but the last).
 *
 * Every wait sleeps on a futex, has a deadline, and ends early with
 *   DS4_E_CANCELLED    ds4_shm_ring_abort was called here, or *cancel became true
 *   DS4_E_UNAVAILABLE  the peer left or died, named as "stage N"; noticed within 0.2 s
 *   DS4_E_TIMEOUT      the deadline passed; names the stage waited for
 *   DS4_E_PROTOCOL     the peer's counters or sizes are impossible
 * Slots that a peer filled before it left are still delivered.
 *
 * One thread uses a ring; only ds4_shm_ring_abort may come from others. */
#ifndef DS4_WORKER_SHM_RING_H
#define DS4_WORKER_SHM_RING_H

#include "common/clock.h"
#include "common/err.h"
#include "proto/message.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define DS4_SHM_RING_NAME_BYTES 96

struct ds4_shm_ring_config {
    char name[DS4_SHM_RING_NAME_BYTES]; /* file name below /dev/shm, begins with "ds4-" */
    uint8_t key[DS4_ID_BYTES];          /* both sides must agree on all that follows */
    uint32_t generation;
    int32_t producer_stage;
    int32_t first_consumer_stage; /* consumer k is stage first + k */
    int32_t n_consumer;
    int32_t n_slot;
    size_t slot_bytes;
    const atomic_bool *cancel; /* may be NULL; borrowed for the life of the ring */
};

struct ds4_shm_ring;

/* Producer: creates the segment with all its memory; it becomes visible under its name complete and
 * locked.  Also removes segments of producers that died before theirs was joined. */
struct ds4_shm_ring *ds4_shm_ring_create(const struct ds4_shm_ring_config *config,
                                         struct ds4_err *err) DS4_MUST_CHECK;
/* Producer: waits until all consumers have joined, then removes the name: from then on nothing is left
 * behind however the processes end. */
int ds4_shm_ring_meet(struct ds4_shm_ring *ring, struct ds4_deadline deadline,
                      struct ds4_err *err) DS4_MUST_CHECK;
/* Consumer: waits for the segment to appear and joins it. */
struct ds4_shm_ring *ds4_shm_ring_join(const struct ds4_shm_ring_config *config, int32_t consumer,
                                       struct ds4_deadline deadline,
                                       struct ds4_err *err) DS4_MUST_CHECK;
/* Tells the peers that this side left.  NULL is fine. */
void ds4_shm_ring_close(struct ds4_shm_ring *ring);
/* 0, or -1 with DS4_E_UNAVAILABLE if a peer left or died.  Never waits. */
int ds4_shm_ring_check(struct ds4_shm_ring *ring, struct ds4_err *err) DS4_MUST_CHECK;
void ds4_shm_ring_abort(struct ds4_shm_ring *ring);

/* Producer: the next slot, slot_bytes to fill, when every consumer has released it; commit makes it
 * visible.  `tag` is the caller's (a step number). */
void *ds4_shm_ring_reserve(struct ds4_shm_ring *ring, struct ds4_deadline deadline,
                           struct ds4_err *err) DS4_MUST_CHECK;
void ds4_shm_ring_commit(struct ds4_shm_ring *ring, int64_t tag, size_t bytes);

/* The memory of all slots, page-aligned; for pinning. */
void *ds4_shm_ring_slots(struct ds4_shm_ring *ring, size_t *bytes);

/* Consumer: the oldest slot not yet released; *bytes <= slot_bytes.  The content is the peer's:
 * validate a copy. */
const void *ds4_shm_ring_peek(struct ds4_shm_ring *ring, int64_t *tag, size_t *bytes,
                              struct ds4_deadline deadline, struct ds4_err *err) DS4_MUST_CHECK;
void ds4_shm_ring_release(struct ds4_shm_ring *ring);

#endif

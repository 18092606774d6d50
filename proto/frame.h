/* The envelope of every message between router and workers.
 *
 * A frame is a ZeroMQ multipart message of two parts: an envelope of DS4_ENVELOPE_BYTES and a payload
 * (proto/codec.h), empty for kinds that need none.  The envelope's fixed form never changes; what
 * follows does so with DS4_WIRE_VERSION, and sides of different versions refuse each other by name.
 *
 *   offset 0   magic "DS4W"
 *          4   wire version   u16, all numbers little-endian
 *          6   kind           u16
 *          8   generation     u32   0 = none yet
 *         12   sequence       u64   0, 1, 2, ... per sender and connection
 *         20   payload bytes  u32 */
#ifndef DS4_PROTO_FRAME_H
#define DS4_PROTO_FRAME_H

#include "common/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DS4_ENVELOPE_BYTES  24
#define DS4_MAX_FRAME_BYTES ((size_t)4 << 20) /* of a payload */

/* X(name, text, number, sender).  W = worker to router, R = router to worker.
 *
 *   HELLO        ds4_hello; first frame of a connection
 *   HEALTH       ds4_health; every 500 ms and at every change of state
 *   FORMED       empty; this stage has joined the envelope's generation
 *   FORM_FAILED  ds4_note; it could not
 *   TOKENS       ds4_tokens_out; last stage only
 *   STEP_DONE    ds4_step_done; every other stage
 *   KV_DONE      ds4_kv_done; answers KV_WRITE, KV_READ, KV_UNLINK
 *   FATAL        ds4_fatal_report; the worker is leaving
 *   BYE          empty; the worker leaves as asked
 *   PIPE_OFFER   ds4_pipe_id; stage 0 only, for the others
 *   WELCOME      empty; HELLO was accepted.  Any other frame from the router says so as well
 *   REFUSED      ds4_note; HELLO was not accepted, the worker exits as misconfigured
 *   FORM         ds4_form
 *   STEP         ds4_step
 *   KV_WRITE     ds4_kv_write
 *   KV_READ      ds4_kv_read
 *   KV_UNLINK    ds4_kv_unlink
 *   ABORT        empty; drop the envelope's generation, keep the weights
 *   DRAIN        empty; finish the posted steps, then leave with exit 75: to be started again
 *   STOP         empty; leave after the running step
 *   PIPE_ID      ds4_pipe_id; stage 0's offer of the envelope's generation */
#define DS4_FRAME_KINDS(X)                                                                         \
    X(DS4_FRAME_HELLO, "HELLO", 1, W)                                                              \
    X(DS4_FRAME_HEALTH, "HEALTH", 2, W)                                                            \
    X(DS4_FRAME_FORMED, "FORMED", 3, W)                                                            \
    X(DS4_FRAME_FORM_FAILED, "FORM_FAILED", 4, W)                                                  \
    X(DS4_FRAME_TOKENS, "TOKENS", 5, W)                                                            \
    X(DS4_FRAME_FATAL, "FATAL", 6, W)                                                              \
    X(DS4_FRAME_BYE, "BYE", 7, W)                                                                  \
    X(DS4_FRAME_STEP_DONE, "STEP_DONE", 8, W)                                                      \
    X(DS4_FRAME_KV_DONE, "KV_DONE", 9, W)                                                          \
    X(DS4_FRAME_PIPE_OFFER, "PIPE_OFFER", 10, W)                                                   \
    X(DS4_FRAME_WELCOME, "WELCOME", 65, R)                                                         \
    X(DS4_FRAME_REFUSED, "REFUSED", 66, R)                                                         \
    X(DS4_FRAME_FORM, "FORM", 67, R)                                                               \
    X(DS4_FRAME_STEP, "STEP", 68, R)                                                               \
    X(DS4_FRAME_ABORT, "ABORT", 69, R)                                                             \
    X(DS4_FRAME_DRAIN, "DRAIN", 70, R)                                                             \
    X(DS4_FRAME_STOP, "STOP", 71, R)                                                               \
    X(DS4_FRAME_KV_WRITE, "KV_WRITE", 72, R)                                                       \
    X(DS4_FRAME_KV_READ, "KV_READ", 73, R)                                                         \
    X(DS4_FRAME_KV_UNLINK, "KV_UNLINK", 74, R)                                                     \
    X(DS4_FRAME_PIPE_ID, "PIPE_ID", 75, R)

enum ds4_frame_kind {
#define DS4_FRAME_ENUM(kind, text, number, sender) kind = (number),
    DS4_FRAME_KINDS(DS4_FRAME_ENUM)
#undef DS4_FRAME_ENUM
};

enum ds4_frame_sender { DS4_FROM_WORKER, DS4_FROM_ROUTER };

struct ds4_frame {
    enum ds4_frame_kind kind;
    uint32_t generation;
    uint64_t sequence;
    uint32_t payload_bytes;
};

/* "STEP"; "?" for a number outside the table. */
const char *ds4_frame_kind_name(enum ds4_frame_kind kind);

/* Writes the envelope with this build's wire version. */
void ds4_frame_write(const struct ds4_frame *frame, uint8_t envelope[DS4_ENVELOPE_BYTES]);

/* Reads and validates an envelope of `n` bytes that came with a payload of `n_payload` bytes: size,
 * magic, version, kind, that a peer of kind `sender` may send it, announced against real payload
 * size, the maximum.  -1 with DS4_E_PROTOCOL and *out untouched if anything is wrong. */
int ds4_frame_read(const void *envelope, size_t n, size_t n_payload, enum ds4_frame_sender sender,
                   struct ds4_frame *out, struct ds4_err *err) DS4_MUST_CHECK;

/* What a receiver remembers about one peer.  All zero at first. */
struct ds4_frame_gate {
    uint32_t generation;    /* the receiver's own, set by its owner; 0 = none */
    uint64_t next_sequence; /* expected from the peer */
    uint64_t n_stale;       /* frames of another generation, dropped: see ds4_frame_admit */
    uint64_t n_lost;        /* frames that never came, by sequence numbers */
};

/* True if the frame is to be handled; false if it is to be dropped, which is counted: a frame of another
 * generation and of a kind that means something within one only (STEP, TOKENS, STEP_DONE, KV_*).  Other
 * kinds always pass, their handlers look at the generation.  Sequence 0 starts a new count (a peer that came back); gaps are counted, and what they
 * mean is left to the step numbers, where a gap is a violation. */
bool ds4_frame_admit(struct ds4_frame_gate *gate, const struct ds4_frame *frame);

#endif

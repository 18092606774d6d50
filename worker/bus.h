/* The worker's ZeroMQ socket: one DEALER to the router's ROUTER, and what happened to the link.
 *
 * Connects and reconnects by itself; nothing is queued while there is no router (a frame for a dead
 * router would reach the next one).  Used by the control thread only. */
#ifndef DS4_WORKER_BUS_H
#define DS4_WORKER_BUS_H

#include "common/buf.h"
#include "common/err.h"
#include "common/str.h"
#include "proto/frame.h"
#include "proto/message.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ds4_wbus;

struct ds4_wbus_config {
    const char *endpoint; /* "ipc:///run/ds4/router.sock" | "tcp://10.0.0.1:7000" */
    int32_t stage;        /* with boot_id the socket's identity: "stage-2-<hex>" */
    uint8_t boot_id[DS4_ID_BYTES];
    /* Folder with router.public and worker.secret (Z85, 40 characters each); required for tcp. */
    const char *curve_dir;
};

struct ds4_wbus *ds4_wbus_open(const struct ds4_wbus_config *config,
                               struct ds4_err *err) DS4_MUST_CHECK;
/* Waits up to linger_ms for what was sent to leave. */
void ds4_wbus_close(struct ds4_wbus *bus, int32_t linger_ms);

#define DS4_WBUS_MAX_FDS 4
/* Sleeps until a frame, a change of the link, one of `fd`, or timeout_ms. */
void ds4_wbus_wait(struct ds4_wbus *bus, const int *fd, size_t n_fd, int32_t timeout_ms);

enum ds4_wbus_link { DS4_WBUS_SAME, DS4_WBUS_UP, DS4_WBUS_DOWN };
/* The next change of the link, in order; DS4_WBUS_SAME when there is none.  A new link begins a new
 * count of sequence numbers on both sides. */
enum ds4_wbus_link ds4_wbus_next_link(struct ds4_wbus *bus);

/* The next frame from the router: 1, 0 if there is none, -1 with DS4_E_PROTOCOL for one that is
 * malformed (it is consumed).  `payload` is replaced; its maximum must be DS4_MAX_FRAME_BYTES. */
int ds4_wbus_recv(struct ds4_wbus *bus, struct ds4_frame *frame, struct ds4_buf *payload,
                  struct ds4_err *err) DS4_MUST_CHECK;
/* Never waits.  -1 with DS4_E_UNAVAILABLE when there is no router. */
int ds4_wbus_send(struct ds4_wbus *bus, enum ds4_frame_kind kind, uint32_t generation,
                  struct ds4_str payload, struct ds4_err *err) DS4_MUST_CHECK;

#endif

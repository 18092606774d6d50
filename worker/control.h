/* The control thread: everything a worker does besides computing.  It owns the ZeroMQ socket, answers
 * the router, reports health every heartbeat and at every change of state, watches the running step,
 * and talks to the service manager.
 *
 *                 loaded           FORM            formed
 *   LOADING ----------------> IDLE -----> FORMING --------> READY
 *                              ^             |                |
 *                              +-------------+----------------+   failed, pipe broke, ABORT, router gone
 *   any --- SIGTERM, STOP ---> DRAINING ---> exit 0;   DRAIN: exit 75, which a supervisor starts again
 *
 * A READY worker goes on through DRAINING after SIGTERM: until the router lets go (DRAIN, exit 0), the
 * generation or the link ends, 60 s have passed, or a second signal comes. */
#ifndef DS4_WORKER_CONTROL_H
#define DS4_WORKER_CONTROL_H

#include "common/err.h"
#include "worker/bus.h"
#include "worker/loop.h"

#include <stdint.h>

struct ds4_control_config {
    struct ds4_wbus_config bus;
    struct ds4_loop_config loop;
    int32_t heartbeat_ms;
    int32_t step_ms;    /* a step that computes for longer is stuck: exit 71 */
    int32_t prefill_ms; /* the same for a step with a prefill entry */
    /* SIGHUP: reads the settings anew and applies what needs no restart; may be NULL.  On the control
     * thread. */
    void (*reload)(void *arg);
    void *reload_arg;
};

/* Runs a worker on the calling thread until it is to leave, and returns its exit code (enum ds4_exit)
 * with the reason in *err if it is not 0.  Call before any other thread was started. */
int ds4_control_run(const struct ds4_control_config *config, struct ds4_err *err) DS4_MUST_CHECK;

#endif

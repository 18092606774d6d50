/* How a worker leaves when it must not go on: device fault (70), stuck step (71), broken protocol (72).
 *
 * A fault ends the process at once: no device teardown, nothing saved, no answer after it.  Before
 * that, one error line with the reason, one line per step of the recent past (a device reports late, so
 * the cause is usually an earlier step), and a best-effort report to the router.
 *
 * All functions may be called from any thread. */
#ifndef DS4_WORKER_FATAL_H
#define DS4_WORKER_FATAL_H

#include "proto/message.h"
#include "worker/stage.h"

#include <stdint.h>
#include <stdnoreturn.h>

/* Sends the report to the router; returns within half a second.  Called at most once. */
typedef void (*ds4_fatal_report_fn)(void *arg, const struct ds4_fatal_report *report);

/* Once, before the step thread runs.  From here on a device fault leaves with DS4_EXIT_DEVICE. */
void ds4_fatal_init(int32_t stage);
/* NULL stops reporting (its owner is going away). */
void ds4_fatal_set_report(ds4_fatal_report_fn report, void *arg);

/* The step that begins now: what a later report names, kept for the last DS4_FATAL_STEPS. */
#define DS4_FATAL_STEPS 64
void ds4_fatal_note_step(const struct ds4_step *step);
/* Where a report finds the layer that runs; NULL before the stage is freed. */
void ds4_fatal_set_stage(const struct ds4_stage *stage);

/* Leaves with `exit_code` (enum ds4_exit).  The first caller decides; others wait for the end. */
noreturn void ds4_fatal_leave(int exit_code, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

#endif

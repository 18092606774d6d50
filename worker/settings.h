/* From the settings file to what the parts of a worker take. */
#ifndef DS4_WORKER_SETTINGS_H
#define DS4_WORKER_SETTINGS_H

#include "common/config.h"
#include "common/err.h"
#include "worker/control.h"
#include "worker/stage.h"

#include <stdint.h>

/* Everything a worker is started with.  Borrows texts and lists of the config, points into itself: do
 * not copy. */
struct ds4_worker_settings {
    struct ds4_stage_config stage;
    struct ds4_control_config control;
    char endpoint[512];
};

/* Checks that the settings make sense for `stage` and fills *out; draws a new boot id.  -1 with
 * DS4_E_INVALID naming the setting. */
int ds4_worker_settings_fill(const struct ds4_config *config, int32_t stage,
                             struct ds4_worker_settings *out, struct ds4_err *err) DS4_MUST_CHECK;

/* The environment of libraries that are told nothing otherwise: NCCL_* from the settings nccl.*, and
 * what the house wants of NCCL.  Variables that are set stay as they are.  Before other threads. */
int ds4_worker_settings_environment(const struct ds4_config *config,
                                    struct ds4_err *err) DS4_MUST_CHECK;

#endif

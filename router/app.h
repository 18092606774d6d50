/* The running router: owns its parts and wires them (main.c reads arguments and settings). */
#ifndef DS4_ROUTER_APP_H
#define DS4_ROUTER_APP_H

#include "common/config.h"
#include "common/err.h"

struct ds4_app;

/* Reads the settings anew into `fresh`, which is not initialised; called at SIGHUP.  -1 leaves it good
 * for ds4_config_deinit only. */
typedef int (*ds4_app_load_fn)(void *arg, struct ds4_config *fresh, struct ds4_err *err);

struct ds4_app_config {
    struct ds4_config *config; /* the app's own for its life: a reload changes it */
    ds4_app_load_fn load;
    void *load_arg;
    int signal_fd; /* ds4_service_open_signals; borrowed */
};

/* Opens model metadata, vocabulary, scheduler, bus and HTTP listener, in this order; the listener is
 * the service manager's if it passed one in.  NULL with *err; *exit_code says how the process should
 * end: 78 for settings and model, 75 for a port or folder that is taken. */
struct ds4_app *ds4_app_open(const struct ds4_app_config *from, int *exit_code,
                             struct ds4_err *err);

/* Serves until SIGTERM or SIGINT has drained it (a second signal ends it at once); returns the exit
 * code. */
int ds4_app_run(struct ds4_app *app);
void ds4_app_close(struct ds4_app *app);

#endif

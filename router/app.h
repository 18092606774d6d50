/* The running router: owns its parts and wires them (main.c reads arguments and settings). */
#ifndef DS4_ROUTER_APP_H
#define DS4_ROUTER_APP_H

#include "common/config.h"
#include "common/err.h"

struct ds4_app;

/* Opens model metadata, vocabulary, scheduler, bus and HTTP listener, in this order.  `config` is
 * borrowed for the app's life; signal_fd (ds4_service_open_signals) as well.  NULL with *err;
 * *exit_code says how the process should end: 78 for settings and model, 75 for a port or folder that
 * is taken. */
struct ds4_app *ds4_app_open(const struct ds4_config *config, int signal_fd, int *exit_code,
                             struct ds4_err *err);

/* Serves until SIGTERM or SIGINT has drained it (a second signal ends it at once); returns the exit
 * code. */
int ds4_app_run(struct ds4_app *app);
void ds4_app_close(struct ds4_app *app);

#endif

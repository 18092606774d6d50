/* What a program of the house owes its service manager: signals, readiness, watchdog, exit codes.
 *
 * Without systemd every notification is a no-op, so programs run the same from a shell. */
#ifndef DS4_COMMON_SERVICE_H
#define DS4_COMMON_SERVICE_H

#include "common/err.h"

#include <stdint.h>

/* X(name, value, meaning).  The units restart on all but 78 and 79. */
#define DS4_EXITS(X)                                                                               \
    X(DS4_EXIT_OK, 0, "clean")                                                                     \
    X(DS4_EXIT_DEVICE, 70, "device fault")                                                         \
    X(DS4_EXIT_STUCK, 71, "step stuck")                                                            \
    X(DS4_EXIT_PROTOCOL, 72, "protocol or generation violation")                                   \
    X(DS4_EXIT_TEMPORARY, 75, "temporary: port or device busy")                                    \
    X(DS4_EXIT_CONFIG, 78, "configuration, plan or model error")                                   \
    X(DS4_EXIT_OPERATOR, 79, "the card needs an operator")

enum ds4_exit {
#define DS4_EXIT_ENUM(name, value, text) name = value,
    DS4_EXITS(DS4_EXIT_ENUM)
#undef DS4_EXIT_ENUM
};
/* The meaning; "unknown" for any other code. */
const char *ds4_exit_text(int code);

/* Blocks SIGTERM, SIGINT and SIGHUP for this thread and those it starts, ignores SIGPIPE, and returns
 * a descriptor that becomes readable when one arrives: for uv_poll, zmq_poll or poll.  Call before the
 * first thread starts.  The caller closes it.  -1 with DS4_E_IO on failure. */
int ds4_service_open_signals(struct ds4_err *err) DS4_MUST_CHECK;
/* The next signal that has arrived, or 0; never waits. */
int ds4_service_next_signal(int fd);

/* As many open files as this process may have: the soft limit is raised to the hard one.  A client's
 * connection takes two. */
void ds4_service_raise_files(void);

/* READY=1: the caller's promise to answer is kept from now on. */
void ds4_service_ready(void);
void ds4_service_stopping(void);
/* STATUS=...: one line for systemctl status. */
void ds4_service_status(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* The start takes up to ms longer than the unit says; repeat before it runs out. */
void ds4_service_extend_start(int64_t ms);

/* How often to call ds4_service_ping (a third of the unit's WatchdogSec); 0 = no watchdog.  The ping
 * must come from the loop that does the work, never from a timer of its own. */
int64_t ds4_service_watchdog_ms(void);
void ds4_service_ping(void);

/* *fd = the one listening socket that systemd passed in, or -1 if none.  DS4_E_INVALID if several. */
int ds4_service_listen_fd(int *fd, struct ds4_err *err) DS4_MUST_CHECK;
/* Where that socket listens, as the settings write it ("127.0.0.1", 8000).  DS4_E_INVALID if it is not
 * a TCP socket that listens. */
#define DS4_SERVICE_ADDRESS_BYTES 64
int ds4_service_listen_address(int fd, char address[DS4_SERVICE_ADDRESS_BYTES], int32_t *port,
                               struct ds4_err *err) DS4_MUST_CHECK;

#endif

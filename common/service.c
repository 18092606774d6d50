/* libsystemd behind the house's words.
 *
 * Signals arrive through a signalfd: the loop reads them between two pieces of work, so there are no
 * handlers and no restarted system calls to think of. */
#include "common/service.h"

#include <systemd/sd-daemon.h>

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define DS4_SERVICE_STATUS_BYTES   512
#define DS4_SERVICE_PINGS_PER_TERM 3
#define DS4_USEC_PER_MS            1000

const char *ds4_exit_text(int code)
{
    switch (code) {
#define DS4_EXIT_TEXT(name, value, text)                                                           \
    case value:                                                                                    \
        return text;
        DS4_EXITS(DS4_EXIT_TEXT)
#undef DS4_EXIT_TEXT
    default:
        return "unknown";
    }
}

int ds4_service_open_signals(struct ds4_err *err)
{
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    sigset_t set;
    int fd, rc;

    (void)sigemptyset(&set);
    (void)sigaddset(&set, SIGTERM);
    (void)sigaddset(&set, SIGINT);
    (void)sigaddset(&set, SIGHUP);
    rc = pthread_sigmask(SIG_BLOCK, &set, NULL);
    if (rc == 0 && sigaction(SIGPIPE, &ignore, NULL) != 0)
        rc = errno;
    if (rc != 0)
        return ds4_fail(err, DS4_E_IO, "could not set up signals: %s", strerror(rc));
    fd = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
    if (fd < 0)
        return ds4_fail(err, DS4_E_IO, "could not open a signal descriptor: %s", strerror(errno));
    return fd;
}

int ds4_service_next_signal(int fd)
{
    struct signalfd_siginfo info;
    ssize_t n;

    do {
        n = read(fd, &info, sizeof(info));
    } while (n < 0 && errno == EINTR);
    return n == (ssize_t)sizeof(info) ? (int)info.ssi_signo : 0;
}

void ds4_service_raise_files(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max)
        return;
    limit.rlim_cur = limit.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &limit); /* refused: fewer clients at once, nothing worse */
}

void ds4_service_ready(void)
{
    (void)sd_notify(0, "READY=1");
}

void ds4_service_stopping(void)
{
    (void)sd_notify(0, "STOPPING=1");
}

void ds4_service_status(const char *fmt, ...)
{
    char text[DS4_SERVICE_STATUS_BYTES];
    va_list args;

    va_start(args, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    /* A newline would start another assignment of the protocol. */
    text[strcspn(text, "\n")] = '\0';
    (void)sd_notifyf(0, "STATUS=%s", text);
}

void ds4_service_extend_start(int64_t ms)
{
    (void)sd_notifyf(0, "EXTEND_TIMEOUT_USEC=%" PRId64, ms * DS4_USEC_PER_MS);
}

int64_t ds4_service_watchdog_ms(void)
{
    uint64_t usec = 0;

    if (sd_watchdog_enabled(0, &usec) <= 0)
        return 0;
    usec /= (uint64_t)DS4_SERVICE_PINGS_PER_TERM * DS4_USEC_PER_MS;
    return usec == 0 ? 1 : (int64_t)usec;
}

void ds4_service_ping(void)
{
    (void)sd_notify(0, "WATCHDOG=1");
}

int ds4_service_listen_fd(int *fd, struct ds4_err *err)
{
    int n = sd_listen_fds(0);

    *fd = -1;
    if (n < 0)
        return ds4_fail(err, DS4_E_IO, "could not take over sockets: %s", strerror(-n));
    if (n > 1)
        return ds4_fail(err, DS4_E_INVALID, "%d sockets were passed in, one is expected", n);
    if (n == 1)
        *fd = SD_LISTEN_FDS_START;
    return 0;
}

int ds4_service_listen_address(int fd, char address[DS4_SERVICE_ADDRESS_BYTES], int32_t *port,
                               struct ds4_err *err)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
        struct sockaddr_storage room;
    } at = {0};
    socklen_t size = sizeof(at);
    const void *host = &at.v4.sin_addr;

    if (sd_is_socket(fd, AF_UNSPEC, SOCK_STREAM, 1) <= 0 || getsockname(fd, &at.any, &size) != 0 ||
        (at.any.sa_family != AF_INET && at.any.sa_family != AF_INET6))
        return ds4_fail(err, DS4_E_INVALID,
                        "the socket that was passed in is not a TCP socket that listens");
    *port = ntohs(at.any.sa_family == AF_INET ? at.v4.sin_port : at.v6.sin6_port);
    if (at.any.sa_family == AF_INET6)
        host = &at.v6.sin6_addr;
    (void)inet_ntop(at.any.sa_family, host, address, DS4_SERVICE_ADDRESS_BYTES);
    return 0;
}

/* Signals, notifications as systemd would receive them, watchdog interval, exit codes. */
#include "common/service.h"

#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* The manager's end of the notification socket, in the abstract name space. */
static int open_manager(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char name[64];
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int n = snprintf(name, sizeof(name), "@ds4-test-notify-%d", (int)getpid());

    memcpy(address.sun_path, name, (size_t)n);
    address.sun_path[0] = '\0';
    assert_int_equal(bind(fd, (struct sockaddr *)&address,
                          (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (size_t)n)),
                     0);
    assert_int_equal(setenv("NOTIFY_SOCKET", name, 1), 0);
    return fd;
}

static const char *next_message(int fd)
{
    static char text[1024];
    ssize_t n = recv(fd, text, sizeof(text) - 1, MSG_DONTWAIT);

    text[n < 0 ? 0 : n] = '\0';
    return text;
}

static void notifications_arrive_as_the_protocol_says(void **state)
{
    int fd = open_manager();

    (void)state;
    ds4_service_ready();
    assert_string_equal(next_message(fd), "READY=1");
    ds4_service_status("loading %d %%\nREADY=1", 37);
    assert_string_equal(next_message(fd), "STATUS=loading 37 %");
    ds4_service_extend_start(60000);
    assert_string_equal(next_message(fd), "EXTEND_TIMEOUT_USEC=60000000");
    ds4_service_ping();
    assert_string_equal(next_message(fd), "WATCHDOG=1");
    ds4_service_stopping();
    assert_string_equal(next_message(fd), "STOPPING=1");
    assert_int_equal(unsetenv("NOTIFY_SOCKET"), 0);
    ds4_service_ready();
    assert_string_equal(next_message(fd), "");
    assert_int_equal(close(fd), 0);
}

static void the_watchdog_is_fed_three_times_per_term(void **state)
{
    (void)state;
    assert_int_equal(ds4_service_watchdog_ms(), 0);
    assert_int_equal(setenv("WATCHDOG_USEC", "20000000", 1), 0);
    assert_int_equal(ds4_service_watchdog_ms(), 6666);
    assert_int_equal(setenv("WATCHDOG_USEC", "900", 1), 0);
    assert_int_equal(ds4_service_watchdog_ms(), 1);
    assert_int_equal(unsetenv("WATCHDOG_USEC"), 0);
}

static void signals_become_readable(void **state)
{
    struct ds4_err err = {0};
    int fd = ds4_service_open_signals(&err);
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};

    (void)state;
    assert_true(fd >= 0);
    assert_int_equal(ds4_service_next_signal(fd), 0);
    assert_int_equal(kill(getpid(), SIGTERM), 0);
    assert_int_equal(poll(&poll_fd, 1, 1000), 1);
    assert_int_equal(ds4_service_next_signal(fd), SIGTERM);
    assert_int_equal(kill(getpid(), SIGHUP), 0);
    assert_int_equal(ds4_service_next_signal(fd), SIGHUP);
    assert_int_equal(ds4_service_next_signal(fd), 0);
    assert_int_equal(kill(getpid(), SIGPIPE), 0); /* ignored: the test goes on */
    assert_int_equal(close(fd), 0);
}

static void exit_codes_have_meanings(void **state)
{
    (void)state;
    assert_string_equal(ds4_exit_text(0), "clean");
    assert_string_equal(ds4_exit_text(DS4_EXIT_STUCK), "step stuck");
    assert_string_equal(ds4_exit_text(79), "the card needs an operator");
    assert_string_equal(ds4_exit_text(1), "unknown");
}

static void passed_sockets_are_counted(void **state)
{
    char pid[16];
    int fd = 0;
    struct ds4_err err = {0};

    (void)state;
    assert_int_equal(ds4_service_listen_fd(&fd, NULL), 0);
    assert_int_equal(fd, -1);
    (void)snprintf(pid, sizeof(pid), "%d", (int)getpid());
    assert_int_equal(setenv("LISTEN_PID", pid, 1), 0);
    assert_int_equal(setenv("LISTEN_FDS", "2", 1), 0);
    /* Descriptors 3 and 4 must exist for libsystemd to mark them close-on-exec. */
    assert_true(dup2(STDERR_FILENO, 3) == 3 && dup2(STDERR_FILENO, 4) == 4);
    assert_int_equal(ds4_service_listen_fd(&fd, &err), -1);
    assert_string_equal(err.msg, "2 sockets were passed in, one is expected");
    assert_int_equal(setenv("LISTEN_FDS", "1", 1), 0);
    assert_int_equal(ds4_service_listen_fd(&fd, NULL), 0);
    assert_int_equal(fd, 3);
    assert_int_equal(unsetenv("LISTEN_FDS"), 0);
}

static void a_passed_socket_says_where_it_listens(void **state)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    char address[DS4_SERVICE_ADDRESS_BYTES];
    int32_t port = 0;
    struct ds4_err err = {0};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int fd6 = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);

    (void)state;
    assert_int_equal(bind(fd, (struct sockaddr *)&v4, sizeof(v4)), 0);
    assert_int_equal(ds4_service_listen_address(fd, address, &port, &err), -1); /* not yet */
    assert_int_equal(err.code, DS4_E_INVALID);
    assert_int_equal(listen(fd, 1), 0);
    assert_int_equal(ds4_service_listen_address(fd, address, &port, NULL), 0);
    assert_string_equal(address, "127.0.0.1");
    assert_in_range(port, 1, 65535);
    assert_int_equal(ds4_service_listen_address(STDIN_FILENO, address, &port, NULL), -1);
    if (fd6 >= 0 && bind(fd6, (struct sockaddr *)&v6, sizeof(v6)) == 0 && listen(fd6, 1) == 0) {
        assert_int_equal(ds4_service_listen_address(fd6, address, &port, NULL), 0);
        assert_string_equal(address, "::1");
    }
    (void)close(fd);
    (void)close(fd6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(notifications_arrive_as_the_protocol_says),
        cmocka_unit_test(the_watchdog_is_fed_three_times_per_term),
        cmocka_unit_test(signals_become_readable),
        cmocka_unit_test(exit_codes_have_meanings),
        cmocka_unit_test(passed_sockets_are_counted),
        cmocka_unit_test(a_passed_socket_says_where_it_listens),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

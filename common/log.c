/* One event, one line, one write(2).
 *
 * A line is formatted on the stack and written whole, so that lines of several threads (and of
 * several processes on one stderr) never mix.  Under journald the priority prefix "<N>" of
 * sd-daemon(3) replaces time and level, which the journal keeps itself; elsewhere the line begins
 * with UTC time and level.  Whether stderr is the journal is read from the socket's peer address: no
 * environment variable, which a wrapper may have passed on to a process that redirected stderr. */
#include "common/log.h"

#include "common/clock.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define DS4_LOG_LINE_BYTES  4096
#define DS4_LOG_JOURNAL     "/run/systemd/journal/stdout"
#define DS4_LOG_CUT         "..."
#define DS4_LOG_FIRST_PRINT 0x20 /* bytes below are control bytes; 0x7f is DEL */
#define DS4_LOG_DEL         0x7f

static const struct {
    const char *text;
    int priority; /* of sd-daemon(3) */
} levels[] = {
    [DS4_LOG_ERROR] = {"error", 3},
    [DS4_LOG_WARN] = {"warn", 4},
    [DS4_LOG_INFO] = {"info", 6},
    [DS4_LOG_DEBUG] = {"debug", 7},
};

static _Atomic int threshold = DS4_LOG_INFO;
static const char *_Atomic process_name;

/* Guards every struct ds4_log_limit: a call site's static may be reached by several threads. */
static pthread_mutex_t limit_lock = PTHREAD_MUTEX_INITIALIZER;

int ds4_log_parse_level(const char *text, enum ds4_log_level *level)
{
    for (size_t i = 0; i < sizeof(levels) / sizeof(levels[0]); i++) {
        if (strcmp(text, levels[i].text) == 0) {
            *level = (enum ds4_log_level)i;
            return 0;
        }
    }
    return -1;
}

void ds4_log_set_level(enum ds4_log_level level)
{
    atomic_store(&threshold, (int)level);
}

bool ds4_log_enabled(enum ds4_log_level level)
{
    return (int)level <= atomic_load_explicit(&threshold, memory_order_relaxed);
}

void ds4_log_set_name(const char *name)
{
    atomic_store(&process_name, name);
}

static bool stderr_is_journal(void)
{
    struct sockaddr_un peer = {0};
    socklen_t len = sizeof(peer) - 1; /* keeps sun_path terminated */

    return getpeername(STDERR_FILENO, (struct sockaddr *)&peer, &len) == 0 &&
           peer.sun_family == AF_UNIX && strcmp(peer.sun_path, DS4_LOG_JOURNAL) == 0;
}

static size_t format_head(char *line, size_t cap, enum ds4_log_level level, const char *event)
{
    const char *name = atomic_load(&process_name);
    const char *space = name == NULL ? "" : " ";
    int64_t now_ns;
    time_t now_sec;
    struct tm utc = {0};
    int n;

    if (name == NULL)
        name = "";
    if (stderr_is_journal()) {
        n = snprintf(line, cap, "<%d>%s%s%s", levels[level].priority, name, space, event);
    } else {
        now_ns = ds4_clock_unix_ns();
        now_sec = (time_t)(now_ns / DS4_NS_PER_SEC);
        (void)gmtime_r(&now_sec, &utc);
        n = snprintf(line, cap, "%04d-%02d-%02dT%02d:%02d:%02d.%03dZ %s %s%s%s", utc.tm_year + 1900,
                     utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec,
                     (int)(now_ns % DS4_NS_PER_SEC / DS4_NS_PER_MS), levels[level].text, name,
                     space, event);
    }
    if (n < 0)
        return 0;
    return (size_t)n < cap ? (size_t)n : cap - 1;
}

static void write_line(const char *line, size_t len)
{
    ssize_t n;

    /* A short write or a full pipe loses the rest: logging must neither block twice nor fail a
     * request. */
    do {
        n = write(STDERR_FILENO, line, len);
    } while (n < 0 && errno == EINTR);
}

__attribute__((format(printf, 3, 0))) static void vlog(enum ds4_log_level level, const char *event,
                                                       const char *fmt, va_list args)
{
    char line[DS4_LOG_LINE_BYTES];
    size_t cap = sizeof(line) - 1; /* one byte for the newline */
    size_t used = format_head(line, cap, level, event);
    unsigned char c;
    int n = 0;

    if (fmt[0] != '\0' && used + 1 < cap) {
        line[used++] = ' ';
        n = vsnprintf(line + used, cap - used, fmt, args);
        if (n > 0 && (size_t)n >= cap - used) {
            used = cap - 1;
            (void)stpcpy(line + used - strlen(DS4_LOG_CUT), DS4_LOG_CUT);
        } else if (n > 0) {
            used += (size_t)n;
        }
    }
    for (size_t i = 0; i < used; i++) {
        c = (unsigned char)line[i];
        if (c < DS4_LOG_FIRST_PRINT || c == DS4_LOG_DEL)
            line[i] = '?';
    }
    line[used++] = '\n';
    write_line(line, used);
}

void ds4_log(enum ds4_log_level level, const char *event, const char *fmt, ...)
{
    va_list args;

    if (!ds4_log_enabled(level))
        return;
    va_start(args, fmt);
    vlog(level, event, fmt, args);
    va_end(args);
}

/* Counts one event of the site; true when its line may be written.  *left_out gets the number of
 * lines the window before this one suppressed, once. */
static bool enter_window(struct ds4_log_limit *limit, uint32_t burst, uint64_t *left_out)
{
    int64_t now = ds4_clock_ns();
    bool allowed;

    *left_out = 0;
    pthread_mutex_lock(&limit_lock);
    if (limit->in_window == 0 || now - limit->window_start_ns >= DS4_NS_PER_SEC) {
        *left_out = limit->left_out;
        *limit = (struct ds4_log_limit){.window_start_ns = now};
    }
    allowed = limit->in_window < burst;
    if (allowed)
        limit->in_window++;
    else
        limit->left_out++;
    pthread_mutex_unlock(&limit_lock);
    return allowed;
}

void ds4_log_limited(struct ds4_log_limit *limit, uint32_t burst, enum ds4_log_level level,
                     const char *event, const char *fmt, ...)
{
    uint64_t left_out;
    va_list args;
    bool allowed;

    if (!ds4_log_enabled(level))
        return;
    allowed = enter_window(limit, burst, &left_out);
    if (left_out > 0)
        ds4_log(level, event, "left_out=%" PRIu64, left_out);
    if (!allowed)
        return;
    va_start(args, fmt);
    vlog(level, event, fmt, args);
    va_end(args);
}

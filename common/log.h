/* Levelled key=value lines to stderr, one line per event, readable by people and journald alike.
 *
 *   ds4_log(DS4_LOG_WARN, "kv.refuse", "seq=%" PRIu64 " need_bytes=%zu", seq, need);
 *
 * The event name is stable and comes first.  Error = a human must act; warn = a request suffered;
 * info = state changes; debug = per step.  Never prompt text or keys above debug.  Control bytes in
 * the formatted text are replaced, so a client cannot forge lines.  Thread-safe. */
#ifndef DS4_COMMON_LOG_H
#define DS4_COMMON_LOG_H

#include "common/err.h"

#include <stdbool.h>
#include <stdint.h>

enum ds4_log_level { DS4_LOG_ERROR, DS4_LOG_WARN, DS4_LOG_INFO, DS4_LOG_DEBUG };

/* "error" | "warn" | "info" | "debug" -> level; -1 on any other text. */
int ds4_log_parse_level(const char *text, enum ds4_log_level *level);
void ds4_log_set_level(enum ds4_log_level level);
bool ds4_log_enabled(enum ds4_log_level level);
/* Puts "<name> " before every line's event, e.g. "router" or "stage0"; borrowed for the process. */
void ds4_log_set_name(const char *name);

void ds4_log(enum ds4_log_level level, const char *event, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* For events a peer can cause: at most `burst` lines per second for this site, then one line with
 * the count of those left out.  `limit` is a static of the call site. */
struct ds4_log_limit {
    int64_t window_start_ns;
    uint32_t in_window;
    uint64_t left_out;
};
void ds4_log_limited(struct ds4_log_limit *limit, uint32_t burst, enum ds4_log_level level,
                     const char *event, const char *fmt, ...) __attribute__((format(printf, 5, 6)));

#endif

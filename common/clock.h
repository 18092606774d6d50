/* Monotonic time in nanoseconds and deadlines on it. */
#ifndef DS4_COMMON_CLOCK_H
#define DS4_COMMON_CLOCK_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define DS4_NS_PER_MS  INT64_C(1000000)
#define DS4_NS_PER_SEC INT64_C(1000000000)

/* CLOCK_MONOTONIC now. */
int64_t ds4_clock_ns(void);
/* CLOCK_REALTIME now: only for what people and files see. */
int64_t ds4_clock_unix_ns(void);

struct ds4_deadline {
    int64_t at_ns; /* INT64_MAX = never */
};

struct ds4_deadline ds4_deadline_in_ms(int64_t ms); /* ms < 0: never */
bool ds4_deadline_passed(struct ds4_deadline deadline);
/* For what waits until a time of CLOCK_MONOTONIC. */
struct timespec ds4_deadline_timespec(struct ds4_deadline deadline);
/* Milliseconds left, rounded up, 0 when passed, clamped to INT32_MAX. */
int32_t ds4_deadline_left_ms(struct ds4_deadline deadline);

#endif

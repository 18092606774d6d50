/* Monotonic time and deadlines.  One place for it, so that tests can replace ds4_clock_ns by linking
 * their own (fake time, no sleeps). */
#include "common/clock.h"

#include "common/fault.h"

static int64_t read_clock_ns(clockid_t id)
{
    struct timespec now = {0};

    (void)clock_gettime(id, &now);
    return (int64_t)now.tv_sec * DS4_NS_PER_SEC + now.tv_nsec;
}

int64_t ds4_clock_ns(void)
{
    return read_clock_ns(CLOCK_MONOTONIC);
}

int64_t ds4_clock_unix_ns(void)
{
    int64_t now_ns = read_clock_ns(CLOCK_REALTIME);

    if (DS4_FAULT_POINT(CLOCK_JUMP))
        now_ns -= 3600 * DS4_NS_PER_SEC;
    return now_ns;
}

struct ds4_deadline ds4_deadline_in_ms(int64_t ms)
{
    int64_t now = ds4_clock_ns();

    if (ms < 0 || ms > (INT64_MAX - now) / DS4_NS_PER_MS)
        return (struct ds4_deadline){INT64_MAX};
    return (struct ds4_deadline){now + ms * DS4_NS_PER_MS};
}

bool ds4_deadline_passed(struct ds4_deadline deadline)
{
    return deadline.at_ns != INT64_MAX && ds4_clock_ns() >= deadline.at_ns;
}

struct timespec ds4_deadline_timespec(struct ds4_deadline deadline)
{
    return (struct timespec){.tv_sec = (time_t)(deadline.at_ns / DS4_NS_PER_SEC),
                             .tv_nsec = (long)(deadline.at_ns % DS4_NS_PER_SEC)};
}

int32_t ds4_deadline_left_ms(struct ds4_deadline deadline)
{
    int64_t left;

    if (deadline.at_ns == INT64_MAX)
        return INT32_MAX;
    left = (deadline.at_ns - ds4_clock_ns() + DS4_NS_PER_MS - 1) / DS4_NS_PER_MS;
    if (left < 0)
        return 0;
    return left > INT32_MAX ? INT32_MAX : (int32_t)left;
}

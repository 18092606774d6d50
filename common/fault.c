/* Deliberate faults: reads DS4_FAULT, counts passages.
 *
 * Each point has one armed number and one counter, both atomic: points lie on step, control and disk
 * threads.  The file is empty in a build without DS4_FAULTS.  This is the one variable of the
 * environment the house reads itself: a fault must reach a worker that a service manager starts. */
#include "common/fault.h"

#ifdef DS4_FAULTS

#include "common/log.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define MAX_NTH 1000000000L

static const char *const names[DS4_FAULT_N_POINT] = {
#define FAULT_NAME(name, text) text,
    DS4_FAULT_TABLE(FAULT_NAME)
#undef FAULT_NAME
};

static struct {
    atomic_long nth; /* 0 = not armed */
    atomic_bool every;
    atomic_long passed;
} points[DS4_FAULT_N_POINT];

static int find_point(const char *text, size_t n)
{
    for (int p = 0; p < DS4_FAULT_N_POINT; p++)
        if (strlen(names[p]) == n && memcmp(names[p], text, n) == 0)
            return p;
    return -1;
}

/* Reads digits; NULL if there are none or they are too large, else where they end. */
static const char *read_number(const char *text, long *number)
{
    char *end = NULL;

    if (*text < '0' || *text > '9')
        return NULL;
    *number = strtol(text, &end, 10);
    return *number > MAX_NTH ? NULL : end;
}

/* <stage> up to a comma or the end; NULL if it is neither a number nor "router". */
static const char *read_stage(const char *text, int32_t *stage)
{
    long number;

    if (strncmp(text, "router", 6) == 0) {
        *stage = DS4_FAULT_ROUTER;
        return text + 6;
    }
    text = read_number(text, &number);
    *stage = (int32_t)number;
    return text;
}

/* One <point>:<nth>[+]:<stage>; returns where it ends, NULL if it is wrong. */
static const char *arm_one(const char *text, int32_t own_stage)
{
    const char *colon = strchr(text, ':');
    int point = colon == NULL ? -1 : find_point(text, (size_t)(colon - text));
    bool every = false;
    int32_t stage;
    long nth;

    if (point < 0)
        return NULL;
    text = read_number(colon + 1, &nth);
    if (text == NULL || nth < 1)
        return NULL;
    if (*text == '+') {
        every = true;
        text++;
    }
    if (*text != ':')
        return NULL;
    text = read_stage(text + 1, &stage);
    if (text == NULL || (*text != 0 && *text != ','))
        return NULL;
    if (stage == own_stage) {
        atomic_store(&points[point].every, every);
        atomic_store(&points[point].nth, nth);
        ds4_log(DS4_LOG_WARN, "fault.armed", "point=%s nth=%ld every=%d", names[point], nth, every);
    }
    return text;
}

int ds4_fault_set(const char *text, int32_t stage, struct ds4_err *err)
{
    for (int p = 0; p < DS4_FAULT_N_POINT; p++) {
        atomic_store(&points[p].nth, 0);
        atomic_store(&points[p].passed, 0);
    }
    for (const char *at = text; at != NULL;) {
        const char *end = arm_one(at, stage);

        if (end == NULL)
            return ds4_fail(err, DS4_E_INVALID,
                            "DS4_FAULT is \"%s\", must be <point>:<nth>:<stage> of known points",
                            text);
        at = *end == ',' ? end + 1 : NULL;
    }
    return 0;
}

int ds4_fault_init(int32_t stage, struct ds4_err *err)
{
    return ds4_fault_set(getenv("DS4_FAULT"), stage, err);
}

bool ds4_fault_hit(enum ds4_fault_point point)
{
    static _Thread_local bool telling; /* the log reads the clock, which has a point */
    long nth = atomic_load(&points[point].nth);
    long passed;

    if (nth == 0 || telling)
        return false;
    passed = atomic_fetch_add(&points[point].passed, 1) + 1;
    if (passed != nth && !(passed > nth && atomic_load(&points[point].every)))
        return false;
    telling = true;
    ds4_log(DS4_LOG_WARN, "fault.acts", "point=%s passage=%ld", names[point], passed);
    telling = false;
    return true;
}

#endif

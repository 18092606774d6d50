/* worker/nvml.c and worker/card_watch.c over a driver's library of the test's own: this program exports
 * what that library would. */
#include "worker/card_watch.h"

#include "common/clock.h"
#include "worker/nvml.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#define ADDRESS       "0000:01:00.0"
#define NOT_SUPPORTED 3
#define TIMED_OUT     10
#define IS_LOST       15
#define WAIT_MS       20000

/* ---- the driver's library, with the vendor's names and structures ---- */

struct memory {
    unsigned long long total, free, used;
};
struct event {
    void *device;
    unsigned long long type, data;
    unsigned int instance[2];
};
struct field {
    unsigned int id, scope;
    long long timestamp, latency;
    unsigned int type;
    int status;
    unsigned long long value;
};

static struct {
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t changed;
    unsigned long long xid[4];
    int n_xid;
    unsigned long long reasons;
    int temperature_status;
    int n_init, n_shutdown;
    bool hangs, hangs_at_once;
} driver = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static char card;

int nvmlInit_v2(void);
int nvmlInit_v2(void)
{
    pthread_mutex_lock(&driver.lock);
    driver.n_init++;
    while (driver.hangs_at_once)
        pthread_cond_wait(&driver.changed, &driver.lock);
    pthread_mutex_unlock(&driver.lock);
    return 0;
}

int nvmlShutdown(void);
int nvmlShutdown(void)
{
    driver.n_shutdown++;
    return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device);
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device)
{
    *device = &card;
    return strcmp(address, ADDRESS) == 0 ? 0 : 6;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *c);
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *c)
{
    assert_ptr_equal(device, &card);
    *c = 71;
    return sensor == 0 ? driver.temperature_status : NOT_SUPPORTED;
}

int nvmlDeviceGetTemperatureThreshold(void *device, int which, unsigned int *c);
int nvmlDeviceGetTemperatureThreshold(void *device, int which, unsigned int *c)
{
    (void)device;
    *c = which == 1 ? 85 : 95;
    return which == 1 || which == 2 ? 0 : NOT_SUPPORTED;
}

int nvmlDeviceGetFieldValues(void *device, int n, struct field *field);
int nvmlDeviceGetFieldValues(void *device, int n, struct field *field)
{
    (void)device;
    field->type = 1;
    field->status = n == 1 && field->id == 82 ? 0 : NOT_SUPPORTED;
    field->value = 80;
    return 0;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned int *mw);
int nvmlDeviceGetPowerUsage(void *device, unsigned int *mw)
{
    (void)device;
    *mw = 148250;
    return 0;
}

int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned int *mw);
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned int *mw)
{
    (void)device;
    *mw = 150000;
    return 0;
}

int nvmlDeviceGetClockInfo(void *device, int which, unsigned int *mhz);
int nvmlDeviceGetClockInfo(void *device, int which, unsigned int *mhz)
{
    (void)device;
    *mhz = which == 1 ? 1410 : 1458;
    return which == 1 || which == 2 ? 0 : NOT_SUPPORTED;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *bits);
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *bits)
{
    (void)device;
    *bits = driver.reasons;
    return 0;
}

int nvmlDeviceGetCurrPcieLinkGeneration(void *device, unsigned int *n);
int nvmlDeviceGetCurrPcieLinkGeneration(void *device, unsigned int *n)
{
    (void)device;
    *n = 1;
    return 0;
}

int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned int *n);
int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned int *n)
{
    (void)device;
    *n = 4;
    return 0;
}

int nvmlDeviceGetPcieReplayCounter(void *device, unsigned int *n);
int nvmlDeviceGetPcieReplayCounter(void *device, unsigned int *n)
{
    (void)device;
    *n = 12;
    return 0;
}

/* ECC is off on the cards of most rigs. */
int nvmlDeviceGetTotalEccErrors(void *device, int type, int counter, unsigned long long *n);
int nvmlDeviceGetTotalEccErrors(void *device, int type, int counter, unsigned long long *n)
{
    (void)device;
    (void)type;
    (void)counter;
    *n = 99;
    return NOT_SUPPORTED;
}

int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory);
int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory)
{
    (void)device;
    *memory = (struct memory){64ULL << 30, 10ULL << 30, 54ULL << 30};
    return 0;
}

int nvmlEventSetCreate(void **set);
int nvmlEventSetCreate(void **set)
{
    *set = &driver;
    return 0;
}

int nvmlEventSetFree(void *set);
int nvmlEventSetFree(void *set)
{
    (void)set;
    return 0;
}

int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set);
int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set)
{
    (void)set;
    assert_ptr_equal(device, &card);
    return types == 8 ? 0 : NOT_SUPPORTED;
}

int nvmlEventSetWait_v2(void *set, struct event *event, unsigned int ms);
int nvmlEventSetWait_v2(void *set, struct event *event, unsigned int ms)
{
    /* Early: the watch takes the rest of its turn itself, and that ends with it at once. */
    struct timespec until = ds4_deadline_timespec(ds4_deadline_in_ms(ms / 20));
    int status = TIMED_OUT;

    assert_ptr_equal(set, &driver);
    pthread_mutex_lock(&driver.lock);
    while (driver.hangs)
        pthread_cond_wait(&driver.changed, &driver.lock);
    while (driver.n_xid == 0 &&
           pthread_cond_clockwait(&driver.changed, &driver.lock, CLOCK_MONOTONIC, &until) == 0)
        continue;
    if (driver.n_xid > 0) {
        *event = (struct event){&card, 8, driver.xid[--driver.n_xid], {0, 0}};
        status = 0;
    }
    pthread_mutex_unlock(&driver.lock);
    return status;
}

static void report_xid(unsigned long long xid)
{
    pthread_mutex_lock(&driver.lock);
    driver.xid[driver.n_xid++] = xid;
    pthread_cond_signal(&driver.changed);
    pthread_mutex_unlock(&driver.lock);
}

/* ---- tests ---- */

static int fresh_driver(void **state)
{
    (void)state;
    driver.n_xid = 0;
    driver.reasons = 0;
    driver.temperature_status = 0;
    driver.n_init = driver.n_shutdown = 0;
    return 0;
}

static struct ds4_card_watch *watch_it(void)
{
    struct ds4_err err = {0};
    struct ds4_card_watch *watch = ds4_card_watch_new(NULL, ADDRESS, &err);

    if (watch == NULL)
        fail_msg("%s", err.msg);
    return watch;
}

/* Waits for the first values; returns what get returned then. */
static int wait_values(struct ds4_card_watch *watch, struct ds4_card_state *got,
                       struct ds4_err *err)
{
    struct ds4_deadline limit = ds4_deadline_in_ms(WAIT_MS);
    int rc;

    do {
        rc = ds4_card_watch_get(watch, got, err);
        if (got->told)
            return rc;
        usleep(1000);
    } while (!ds4_deadline_passed(limit));
    fail_msg("no values came");
    return 0;
}

/* Waits until the watch has counted a fault; returns what get returned then. */
static int wait_xid(struct ds4_card_watch *watch, enum ds4_xid kind, struct ds4_err *err)
{
    struct ds4_deadline limit = ds4_deadline_in_ms(WAIT_MS);
    struct ds4_card_state state;
    int rc;

    do {
        rc = ds4_card_watch_get(watch, &state, err);
        if (state.xid[kind] > 0)
            return rc;
        usleep(1000);
    } while (!ds4_deadline_passed(limit));
    fail_msg("the fault was not counted");
    return 0;
}

static void sensors_come_in_base_units_and_what_is_not_told_says_so(void **state)
{
    struct ds4_card_watch *watch;
    struct ds4_card_state got;
    struct ds4_err err = {0};

    (void)state;
    driver.reasons = 0x4 | 0x40;
    watch = watch_it();
    assert_int_equal(wait_values(watch, &got, &err), 0);
    assert_float_equal(got.value[DS4_CARD_CORE_C], 71, 0);
    assert_float_equal(got.value[DS4_CARD_MEMORY_C], 80, 0);
    assert_float_equal(got.value[DS4_CARD_CORE_LIMIT_C], 85, 0);
    assert_float_equal(got.value[DS4_CARD_MEMORY_LIMIT_C], 95, 0);
    assert_float_equal(got.value[DS4_CARD_WATT], 148.25, 1e-9);
    assert_float_equal(got.value[DS4_CARD_LIMIT_WATT], 150, 1e-9);
    assert_float_equal(got.value[DS4_CARD_SM_HZ], 1.41e9, 1);
    assert_float_equal(got.value[DS4_CARD_MEMORY_HZ], 1.458e9, 1);
    assert_float_equal(got.value[DS4_CARD_LINK_GENERATION], 1, 0);
    assert_float_equal(got.value[DS4_CARD_LINK_WIDTH], 4, 0);
    assert_float_equal(got.value[DS4_CARD_REPLAYS], 12, 0);
    assert_float_equal(got.value[DS4_CARD_ECC_ERRORS], DS4_CARD_NOT_TOLD, 0);
    assert_float_equal(got.value[DS4_CARD_SLOW_HEAT], 1, 0);
    assert_float_equal(got.value[DS4_CARD_SLOW_BRAKE], 0, 0);
    assert_float_equal(got.value[DS4_CARD_SLOW_POWER], 1, 0);
    assert_float_equal(got.value[DS4_CARD_FREE_BYTES], 10.0 * (1 << 30), 0);
    assert_float_equal(got.value[DS4_CARD_USED_BYTES], 54.0 * (1 << 30), 0);
    ds4_card_watch_free(watch);
    assert_int_equal(driver.n_init, 1);
    assert_int_equal(driver.n_shutdown, 1);
}

static void without_the_library_or_the_card_there_is_nothing_to_watch_with(void **state)
{
    struct ds4_card_watch *watch;
    struct ds4_card_state got;
    struct ds4_err err = {0};

    (void)state;
    assert_null(ds4_nvml_open("libds4-no-such-library.so.1", ADDRESS, &err));
    assert_int_equal(err.code, DS4_E_UNAVAILABLE);
    assert_non_null(strstr(err.msg, "libds4-no-such-library.so.1"));
    assert_null(ds4_nvml_open("libc.so.6", ADDRESS, &err)); /* a library of something else */
    assert_int_equal(err.code, DS4_E_UNAVAILABLE);
    assert_null(ds4_nvml_open(NULL, "0000:99:00.0", &err));
    assert_int_equal(err.code, DS4_E_UNAVAILABLE);
    assert_non_null(strstr(err.msg, "0000:99:00.0"));
    assert_int_equal(driver.n_init, driver.n_shutdown);
    watch = ds4_card_watch_new("libds4-no-such-library.so.1", ADDRESS, &err);
    assert_non_null(watch);
    assert_int_equal(ds4_card_watch_get(watch, &got, &err), 0);
    assert_false(got.told);
    ds4_card_watch_free(watch);
}

static void a_fault_that_a_restart_mends_is_counted_and_no_more(void **state)
{
    struct ds4_card_watch *watch = watch_it();
    struct ds4_err err = {0};

    (void)state;
    report_xid(31);
    assert_int_equal(wait_xid(watch, DS4_XID_31, &err), 0);
    report_xid(45);
    assert_int_equal(wait_xid(watch, DS4_XID_45, &err), 0);
    ds4_card_watch_free(watch);
}

static void a_fault_that_needs_an_operator_fails_for_good_and_names_itself(void **state)
{
    struct ds4_card_watch *watch = watch_it();
    struct ds4_card_state got;
    struct ds4_err err = {0};

    (void)state;
    report_xid(79);
    assert_int_equal(wait_xid(watch, DS4_XID_79, &err), -1);
    assert_int_equal(err.code, DS4_E_CORRUPT);
    assert_non_null(strstr(err.msg, "Xid 79"));
    report_xid(13);
    assert_int_equal(wait_xid(watch, DS4_XID_13, &err), -1);
    assert_int_equal(ds4_card_watch_get(watch, &got, &err), -1);
    assert_int_equal(got.xid[DS4_XID_79], 1);
    ds4_card_watch_free(watch);
}

static void a_fault_nobody_knows_needs_an_operator_too(void **state)
{
    struct ds4_card_watch *watch = watch_it();
    struct ds4_err err = {0};

    (void)state;
    report_xid(1234);
    assert_int_equal(wait_xid(watch, DS4_XID_OTHER, &err), -1);
    assert_non_null(strstr(err.msg, "Xid 1234"));
    ds4_card_watch_free(watch);
}

static void a_card_that_fell_off_the_bus_needs_an_operator(void **state)
{
    struct ds4_card_watch *watch;
    struct ds4_card_state got;
    struct ds4_err err = {0};

    (void)state;
    driver.temperature_status = IS_LOST;
    watch = watch_it();
    assert_int_equal(wait_values(watch, &got, &err), -1);
    assert_float_equal(got.value[DS4_CARD_WATT], DS4_CARD_NOT_TOLD, 0);
    ds4_card_watch_free(watch);
}

/* The last two: their threads stay in the driver until the process ends. */
static void a_driver_that_is_dead_at_the_start_holds_nobody_up(void **state)
{
    struct ds4_card_watch *watch;
    struct ds4_card_state got;
    struct ds4_err err = {0};

    (void)state;
    driver.hangs_at_once = true;
    watch = watch_it();
    assert_int_equal(ds4_card_watch_get(watch, &got, &err), 0);
    assert_false(got.told);
    ds4_card_watch_free(watch);
    assert_int_equal(driver.n_shutdown, 0);
}

static void a_driver_that_hangs_holds_nobody_up(void **state)
{
    struct ds4_card_watch *watch;
    struct ds4_card_state got;
    struct ds4_err err = {0};

    (void)state;
    driver.hangs = true;
    watch = watch_it();
    assert_int_equal(wait_values(watch, &got, &err), 0);
    ds4_card_watch_free(watch);
    assert_int_equal(driver.n_shutdown, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(sensors_come_in_base_units_and_what_is_not_told_says_so,
                               fresh_driver),
        cmocka_unit_test_setup(without_the_library_or_the_card_there_is_nothing_to_watch_with,
                               fresh_driver),
        cmocka_unit_test_setup(a_fault_that_a_restart_mends_is_counted_and_no_more, fresh_driver),
        cmocka_unit_test_setup(a_fault_that_needs_an_operator_fails_for_good_and_names_itself,
                               fresh_driver),
        cmocka_unit_test_setup(a_fault_nobody_knows_needs_an_operator_too, fresh_driver),
        cmocka_unit_test_setup(a_card_that_fell_off_the_bus_needs_an_operator, fresh_driver),
        cmocka_unit_test_setup(a_driver_that_hangs_holds_nobody_up, fresh_driver),
        cmocka_unit_test_setup(a_driver_that_is_dead_at_the_start_holds_nobody_up, fresh_driver),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

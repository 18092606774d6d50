/* Tests of worker/self_test: memory that keeps what is written passes, memory that does not is named. */
#include "worker/self_test.h"

#include "common/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define BYTES ((size_t)3 << 20)

static const struct ds4_backend *cpu;
static struct ds4_device *dev;

static int open_device(void **state)
{
    const struct ds4_device_config config = {.n_thread = 2};

    (void)state;
    cpu = ds4_backend_find("cpu");
    dev = cpu->open(&config, NULL);
    return dev == NULL ? -1 : 0;
}

static int close_device(void **state)
{
    (void)state;
    cpu->close(dev);
    return 0;
}

/* ---- memory that is damaged --------------------------------------------------------------------- */

/* What happens to area[0] between write and read. */
static enum { KEEPS, FLIPS_A_BIT, ANSWERS_FOR_ANOTHER, STICKS_AT_ONE } damage;
static uint8_t *victim;

static void check_damaged(struct ds4_device *device, const void *area, size_t bytes, uint64_t seed,
                          struct ds4_memory_faults *faults)
{
    if (area == victim && damage == FLIPS_A_BIT && seed != 0)
        victim[1000] ^= 4;
    if (area == victim && damage == ANSWERS_FOR_ANOTHER)
        memcpy(victim + 65536, victim + 131072, 64);
    if (area == victim && damage == STICKS_AT_ONE)
        victim[2000] |= 1;
    cpu->pattern_check(device, area, bytes, seed, faults);
}

static int run(struct ds4_err *err)
{
    struct ds4_backend backend = *cpu;
    struct ds4_area area[3] = {{"weights", malloc(BYTES), BYTES},
                               {"nothing", NULL, 0},
                               {"scratch", malloc(BYTES), BYTES - 8}};
    const uint8_t *first = area[0].data;
    int rc;

    backend.pattern_check = check_damaged;
    victim = area[0].data;
    rc = ds4_self_test_memory(&backend, dev, area, 3, err);
    for (size_t i = 0; rc == 0 && i < BYTES; i++)
        assert_int_equal(first[i], 0);
    free(area[0].data);
    free(area[2].data);
    return rc;
}

static void good_memory_passes_and_is_left_zero(void **state)
{
    (void)state;
    damage = KEEPS;
    assert_int_equal(run(NULL), 0);
}

static void a_flipped_bit_is_found_and_its_place_named(void **state)
{
    struct ds4_err err = {0};

    (void)state;
    damage = FLIPS_A_BIT;
    assert_int_equal(run(&err), -1);
    assert_int_equal(err.code, DS4_E_CORRUPT);
    assert_non_null(strstr(err.msg, "1 wrong words"));
    assert_non_null(strstr(err.msg, "in weights at offset 1000"));
}

static void an_address_that_answers_for_another_is_found(void **state)
{
    struct ds4_err err = {0};

    (void)state;
    damage = ANSWERS_FOR_ANOTHER;
    assert_int_equal(run(&err), -1);
    assert_non_null(strstr(err.msg, "8 wrong words"));
}

/* Whatever a word should be, one of the patterns has a zero there: zeros at the latest. */
static void a_bit_that_sticks_is_found_by_some_pattern(void **state)
{
    struct ds4_err err = {0};

    (void)state;
    damage = STICKS_AT_ONE;
    assert_int_equal(run(&err), -1);
    assert_non_null(strstr(err.msg, "offset 2000"));
}

static void more_faults_than_are_kept_are_counted(void **state)
{
    struct ds4_memory_faults faults = {.n = 3};
    uint64_t *area = malloc(BYTES);

    (void)state;
    memset(area, 0x55, BYTES);
    cpu->pattern_check(dev, area, BYTES, 0, &faults);
    assert_int_equal(faults.n, 3 + BYTES / 8);
    free(area);
}

/* ---- rates -------------------------------------------------------------------------------------- */

static void the_probe_measures_and_says_so(void **state)
{
    struct ds4_probe probe;

    (void)state;
    ds4_self_test_probe(cpu, dev, &probe);
    assert_int_equal(probe.verdict, DS4_PROBE_FULL);
    /* Rates of a loaded host are noisy; wrong units are not. */
    assert_true(probe.memory_bytes_per_s > 1e7 && probe.memory_bytes_per_s < 1e14);
    assert_true(probe.flops > 1e6 && probe.flops < 1e15);
    assert_string_equal(ds4_probe_text(probe.verdict), "full");
    assert_string_equal(ds4_probe_text(DS4_PROBE_BRAKE), "brake");
}

static void a_device_is_tested_whole_and_a_wrong_name_refused(void **state)
{
    const struct ds4_device_config config = {.n_thread = 2};
    struct ds4_err err = {0};

    (void)state;
    assert_int_equal(ds4_self_test_device("cpu", &config, BYTES, &err), 0);
    assert_int_equal(ds4_self_test_device("tpu", &config, BYTES, &err), -1);
    assert_int_equal(err.code, DS4_E_INVALID);
}

/* ---- latency ------------------------------------------------------------------------------------ */

static uint64_t sleeps_ns;

static void fetch_slowly(struct ds4_device *device, void *host_dst, const void *src, size_t bytes)
{
    int64_t until_ns = ds4_clock_ns() + (int64_t)sleeps_ns;

    while (ds4_clock_ns() < until_ns)
        continue;
    sleeps_ns = 200000;
    cpu->fetch(device, host_dst, src, bytes);
}

static void *no_host_memory(struct ds4_device *device, size_t bytes, const char *what,
                            struct ds4_err *err)
{
    (void)device;
    (void)bytes;
    (void)ds4_fail(err, DS4_E_NOMEM, "%s", what);
    return NULL;
}

static void the_latency_is_that_of_the_quickest_exchange(void **state)
{
    struct ds4_backend backend = *cpu;
    const uint64_t word = 7;
    double seconds;

    (void)state;
    backend.fetch = fetch_slowly;
    sleeps_ns = 20000000; /* a first exchange of 20 ms, later ones of 0.2 ms */
    seconds = ds4_self_test_latency(&backend, dev, &word);
    assert_true(seconds >= 200e-6 && seconds < 20e-3);
    backend.alloc_host = no_host_memory;
    assert_true(ds4_self_test_latency(&backend, dev, &word) == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_memory_passes_and_is_left_zero),
        cmocka_unit_test(a_flipped_bit_is_found_and_its_place_named),
        cmocka_unit_test(an_address_that_answers_for_another_is_found),
        cmocka_unit_test(a_bit_that_sticks_is_found_by_some_pattern),
        cmocka_unit_test(more_faults_than_are_kept_are_counted),
        cmocka_unit_test(the_probe_measures_and_says_so),
        cmocka_unit_test(a_device_is_tested_whole_and_a_wrong_name_refused),
        cmocka_unit_test(the_latency_is_that_of_the_quickest_exchange),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}

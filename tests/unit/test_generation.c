/* The generation file: numbers survive, nonsense is told. */
#include "router/generation.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

static void a_number_survives_and_nonsense_is_told(void **state)
{
    static const char *const bad[] = {"", "7", "-1\n", "7 \n", "4294967296\n", " 7\n", "x\n"};
    char dir[] = "/tmp/ds4-generation-XXXXXX", path[64];
    struct ds4_err err = {0};
    uint32_t got = 1;

    (void)state;
    assert_non_null(mkdtemp(dir));
    (void)snprintf(path, sizeof(path), "%s/generation", dir);
    assert_int_equal(ds4_generation_load(path, &got, &err), 0);
    assert_int_equal(got, 0);
    for (uint32_t n = 1; n != 0; n = n > UINT32_MAX / 7 ? 0 : n * 7) {
        assert_int_equal(ds4_generation_store(path, n, &err), 0);
        assert_int_equal(ds4_generation_load(path, &got, &err), 0);
        assert_int_equal(got, n);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        FILE *f = fopen(path, "we");

        assert_non_null(f);
        assert_true(fputs(bad[i], f) >= 0 && fclose(f) == 0);
        assert_int_equal(ds4_generation_load(path, &got, &err), -1);
        assert_int_equal(err.code, DS4_E_CORRUPT);
        assert_int_equal(got, 0);
    }
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(dir), 0);
    assert_int_equal(ds4_generation_store(path, 1, &err), -1);
    assert_int_equal(err.code, DS4_E_IO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_number_survives_and_nonsense_is_told)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* common/crc32c.c: known values (RFC 3720 appendix B.4 and the usual check value), both paths equal. */
#include "common/crc32c.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static void known_values(void **state)
{
    uint8_t bytes[32];

    (void)state;
    assert_int_equal(ds4_crc32c(0, "123456789", 9), 0xe3069283);
    assert_int_equal(ds4_crc32c(0, "", 0), 0);
    memset(bytes, 0, sizeof(bytes));
    assert_int_equal(ds4_crc32c(0, bytes, sizeof(bytes)), 0x8a9136aa);
    memset(bytes, 0xff, sizeof(bytes));
    assert_int_equal(ds4_crc32c(0, bytes, sizeof(bytes)), 0x62a8ab43);
    for (int i = 0; i < 32; i++)
        bytes[i] = (uint8_t)i;
    assert_int_equal(ds4_crc32c(0, bytes, sizeof(bytes)), 0x46dd794e);
    assert_int_equal(ds4_crc32c_table(0, bytes, sizeof(bytes)), 0x46dd794e);
}

static void table_and_instruction_agree_at_every_length_and_offset(void **state)
{
    uint8_t bytes[128];

    (void)state;
    for (size_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = (uint8_t)(i * 151 + (i >> 3));
    for (size_t from = 0; from < 9; from++)
        for (size_t n = 0; from + n <= sizeof(bytes); n++)
            assert_int_equal(ds4_crc32c(7, bytes + from, n), ds4_crc32c_table(7, bytes + from, n));
}

static void parts_continue_to_the_same_value(void **state)
{
    static const char text[] = "the quick brown fox jumps over the lazy dog";
    size_t n = sizeof(text) - 1;

    (void)state;
    for (size_t cut = 0; cut <= n; cut++)
        assert_int_equal(ds4_crc32c(ds4_crc32c(0, text, cut), text + cut, n - cut),
                         ds4_crc32c(0, text, n));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_values),
        cmocka_unit_test(table_and_instruction_agree_at_every_length_and_offset),
        cmocka_unit_test(parts_continue_to_the_same_value),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

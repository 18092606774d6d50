/* CRC-32C, by instruction or by table.
 *
 * The table form handles four bits per look-up: 16 entries, written out below, no initialisation at
 * run time and no 1 KiB in the cache.  It is the slow path of processors older than 2008; the
 * instruction form takes eight bytes at a time. */
#include "common/crc32c.h"

#include <stdbool.h>
#include <string.h>

/* table[i]: i times x^28..x^31 reduced by the reflected polynomial 0x82f63b78 */
static const uint32_t table[16] = {
    0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3, 0x61c69362, 0x7198540d,
    0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9, 0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75};

uint32_t ds4_crc32c_table(uint32_t crc, const void *bytes, size_t n)
{
    const uint8_t *at = bytes;

    crc = ~crc;
    for (size_t i = 0; i < n; i++) {
        crc ^= at[i];
        crc = (crc >> 4) ^ table[crc & 15];
        crc = (crc >> 4) ^ table[crc & 15];
    }
    return ~crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t by_instruction(uint32_t crc, const uint8_t *at,
                                                                 size_t n)
{
    uint64_t wide = ~crc, eight;

    for (; n >= sizeof(eight); n -= sizeof(eight), at += sizeof(eight)) {
        memcpy(&eight, at, sizeof(eight));
        wide = __builtin_ia32_crc32di(wide, eight);
    }
    crc = (uint32_t)wide;
    for (; n > 0; n--, at++)
        crc = __builtin_ia32_crc32qi(crc, *at);
    return ~crc;
}

static bool have_instruction(void)
{
    return __builtin_cpu_supports("sse4.2") != 0;
}
#else
static uint32_t by_instruction(uint32_t crc, const uint8_t *at, size_t n)
{
    return ds4_crc32c_table(crc, at, n);
}

static bool have_instruction(void)
{
    return false;
}
#endif

uint32_t ds4_crc32c(uint32_t crc, const void *bytes, size_t n)
{
    return have_instruction() ? by_instruction(crc, bytes, n) : ds4_crc32c_table(crc, bytes, n);
}

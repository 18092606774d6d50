/* CRC-32C (Castagnoli): polynomial 0x1edc6f41, reflected, initial and final value all ones; the
 * checksum of token records, and of what is kept on disk. */
#ifndef DS4_COMMON_CRC32C_H
#define DS4_COMMON_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* The checksum of `n` bytes; `crc` is 0, or the result over the bytes before to continue.
 * "123456789" gives 0xe3069283.  Uses the processor's instruction (SSE 4.2) where there is one. */
uint32_t ds4_crc32c(uint32_t crc, const void *bytes, size_t n);

/* The same by table; here for the test that both agree. */
uint32_t ds4_crc32c_table(uint32_t crc, const void *bytes, size_t n);

#endif

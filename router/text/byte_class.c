/* The classes of the 256 bytes, written out (steps 13 and 14).
 *
 * Blanks are those of C: space and \t to \r. */
#include "router/text/byte_class.h"

#define VISIBLE DS4_BYTE_VISIBLE
#define CONTROL (DS4_BYTE_VISIBLE | DS4_BYTE_ESCAPED)
#define BLANK   DS4_BYTE_ESCAPED

const uint8_t ds4_byte_class[256] = {
    [0 ... 8] = CONTROL,
    ['\t'] = BLANK,
    ['\n'] = BLANK | DS4_BYTE_NEWLINE,
    [11 ... 13] = BLANK,
    [14 ... 31] = CONTROL,
    [' '] = 0,
    ['!'] = VISIBLE,
    ['"'] = CONTROL,
    ['#' ... ';'] = VISIBLE,
    ['<'] = VISIBLE | DS4_BYTE_LT,
    ['=' ... 'C'] = VISIBLE,
    ['D'] = VISIBLE | DS4_BYTE_D,
    ['E' ... '['] = VISIBLE,
    ['\\'] = CONTROL,
    [']' ... 0xff] = VISIBLE,
};

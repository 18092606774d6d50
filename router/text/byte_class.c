/* The classes of the 256 bytes, written out (steps 13 and 14).
 *
 * Blanks are those of C: space and \t to \r.  MARK are the first bytes of think, tool_calls, invoke,
 * parameter, calls, function_calls and DSML, and of the four bars that may stand before it. */
#include "router/text/byte_class.h"

#define VISIBLE DS4_BYTE_VISIBLE
#define CONTROL (DS4_BYTE_VISIBLE | DS4_BYTE_ESCAPED)
#define BLANK   DS4_BYTE_ESCAPED
#define MARK    (DS4_BYTE_VISIBLE | DS4_BYTE_MARK)

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
    ['D'] = MARK | DS4_BYTE_D,
    ['E' ... '['] = VISIBLE,
    ['\\'] = CONTROL,
    [']' ... 'b'] = VISIBLE,
    ['c'] = MARK,
    ['d' ... 'e'] = VISIBLE,
    ['f'] = MARK,
    ['g' ... 'h'] = VISIBLE,
    ['i'] = MARK,
    ['j' ... 'o'] = VISIBLE,
    ['p'] = MARK,
    ['q' ... 's'] = VISIBLE,
    ['t'] = MARK,
    ['u' ... '{'] = VISIBLE,
    ['|'] = MARK,
    ['}' ... 0xe1] = VISIBLE,
    [0xe2] = MARK,
    [0xe3 ... 0xee] = VISIBLE,
    [0xef] = MARK,
    [0xf0 ... 0xff] = VISIBLE,
};

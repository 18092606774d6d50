/* Keys of CURVE, the encryption between router and workers on other hosts, as files of a folder. */
#ifndef DS4_COMMON_CURVE_KEY_H
#define DS4_COMMON_CURVE_KEY_H

#include "common/err.h"

#define DS4_CURVE_KEY_CHARS 40 /* Z85 text of 32 bytes */

/* The text of dir/name, NUL-terminated; what follows it in the file is ignored.  DS4_E_IO if it cannot be
 * read, DS4_E_INVALID if it is no key's length. */
int ds4_curve_key_read(const char *dir, const char *name, char key[DS4_CURVE_KEY_CHARS + 1],
                       struct ds4_err *err) DS4_MUST_CHECK;

#endif

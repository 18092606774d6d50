/* What a byte of the model's output makes its readers look out for.
 *
 * A text has the classes of all its bytes.  The vocabulary knows those of each token, so that the parser
 * looks at no byte of most of them. */
#ifndef DS4_ROUTER_TEXT_BYTE_CLASS_H
#define DS4_ROUTER_TEXT_BYTE_CLASS_H

#include "common/str.h"

#include <stdint.h>

enum ds4_byte_class {
    DS4_BYTE_LT = 1,      /* a tag may begin */
    DS4_BYTE_NEWLINE = 2, /* a line ends */
    DS4_BYTE_VISIBLE = 4, /* no blank */
    DS4_BYTE_ESCAPED = 8, /* JSON does not take it as it is */
    DS4_BYTE_D = 16,      /* DSML may begin */
};

extern const uint8_t ds4_byte_class[256];

static inline unsigned ds4_byte_classes(struct ds4_str text)
{
    unsigned classes = 0;

    for (size_t i = 0; i < text.len; i++)
        classes |= ds4_byte_class[(unsigned char)text.ptr[i]];
    return classes;
}

#endif

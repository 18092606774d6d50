/* Any line for `ds4-text render`: an answer that is JSON, or a refusal with a message. */
#include "common/json_text.h"
#include "router/text_encode.h"

#include <stdlib.h>

#define MAX_BYTES ((size_t)256 << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ds4_err err = {0};
    struct ds4_buf answer;

    ds4_buf_init(&answer, MAX_BYTES);
    if (ds4_text_render((struct ds4_str){(const char *)data, size}, &answer, &err) == 0) {
        if (!ds4_jt_valid(ds4_buf_view(&answer), DS4_JT_MAX_DEPTH))
            abort();
    } else if (err.code == DS4_OK || err.code == DS4_E_BUG || err.msg[0] == '\0') {
        abort();
    }
    ds4_buf_deinit(&answer);
    return 0;
}

/* Any sequence of ids -> valid UTF-8 at every moment, and nothing held back at the end. */
#include "common/utf8.h"
#include "router/text/detok.h"
#include "router/text/vocab_load.h"

#include <stdlib.h>

#define MAX_BYTES ((size_t)64 << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct ds4_vocab *vocab;
    struct ds4_detok detok;
    struct ds4_buf out;

    if (vocab == NULL)
        vocab = ds4_vocab_load("tests/data/model/ds4-tiny.tokenizer.json", NULL, NULL);
    if (vocab == NULL)
        abort();
    ds4_buf_init(&out, MAX_BYTES);
    ds4_detok_init(&detok, vocab, size % 2);
    for (size_t i = 0; i + 1 < size; i += 2) {
        int32_t id = (int32_t)(data[i] << 8 | data[i + 1]); /* some lie outside the vocabulary */

        if ((ds4_detok_push(&detok, id, &out, NULL) == 0) != ds4_vocab_has(vocab, id) ||
            !ds4_utf8_valid(ds4_buf_view(&out)))
            abort();
    }
    if (ds4_detok_finish(&detok, &out, NULL) != 0 || detok.n_held != 0 ||
        !ds4_utf8_valid(ds4_buf_view(&out)))
        abort();
    ds4_buf_deinit(&out);
    return 0;
}

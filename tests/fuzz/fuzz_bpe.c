/* Any bytes -> ids -> the same bytes, whatever the cache holds and however long a piece is. */
#include "router/text/bpe.h"
#include "router/text/vocab_load.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct ds4_bpe *bpe;
    struct ds4_str text = {(const char *)data, size};
    struct ds4_ids ids = {0};
    size_t n = 0;

    if (bpe == NULL) {
        const struct ds4_vocab *vocab =
            ds4_vocab_load("tests/data/model/ds4-tiny.tokenizer.json", NULL, NULL);

        if (vocab == NULL || (bpe = ds4_bpe_new(vocab, NULL)) == NULL)
            abort();
    }
    if (ds4_bpe_encode(bpe, text, size % 2 ? DS4_BPE_SPECIAL : DS4_BPE_PLAIN, &ids, NULL) != 0)
        abort();
    for (size_t i = 0; i < ids.len; i++) {
        struct ds4_str piece = ds4_vocab_piece(ds4_bpe_vocab(bpe), ids.ptr[i]);

        if (piece.len == 0 || piece.len > size - n || memcmp(piece.ptr, data + n, piece.len) != 0)
            abort();
        n += piece.len;
    }
    if (n != size)
        abort();
    DS4_VEC_DEINIT(&ids);
    return 0;
}

/* Vector files and the real vocabulary for the tests of router/text. */
#include "tests/support/text_vectors.h"

#include "router/text/vocab_load.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define VOCAB_PATH   "build/vocab/tokenizer.json"
#define NONE_PATH    "build/vocab/NONE"
#define OVERLAY_PATH "tests/data/encoding/tokenizer_v4.json"
#define N_RELEASE    3

static struct ds4_vocab *loaded[N_RELEASE];

struct ds4_json *text_vectors_open(const char *path)
{
    struct ds4_err err = {0};
    struct ds4_json *doc = NULL;
    FILE *file = fopen(path, "rb");
    char *text = NULL;
    long n = 0;

    if (file == NULL) {
        fprintf(stderr, "could not open %s\n", path);
        return NULL;
    }
    fseek(file, 0, SEEK_END);
    n = ftell(file);
    rewind(file);
    text = malloc((size_t)n + 1);
    if (text != NULL && fread(text, 1, (size_t)n, file) == (size_t)n)
        doc = ds4_json_parse((struct ds4_str){text, (size_t)n}, &err);
    if (doc == NULL)
        fprintf(stderr, "%s: %s\n", path, err.msg);
    free(text);
    fclose(file);
    return doc;
}

const struct ds4_vocab *text_vectors_vocab(enum text_vectors_release release, bool *skip)
{
    struct ds4_vocab_overlay overlay = {OVERLAY_PATH, release == TEXT_VECTORS_V41};
    struct ds4_err err = {0};

    *skip = false;
    if (loaded[release] != NULL)
        return loaded[release];
    if (access(VOCAB_PATH, R_OK) != 0) {
        *skip = access(NONE_PATH, F_OK) == 0;
        fprintf(stderr, "%s is missing: `make vocab` fetches it%s\n", VOCAB_PATH,
                *skip ? " (skipped: " NONE_PATH " exists)" : ", VOCAB=none does without");
        return NULL;
    }
    loaded[release] =
        ds4_vocab_load(VOCAB_PATH, release == TEXT_VECTORS_V3 ? NULL : &overlay, &err);
    if (loaded[release] == NULL)
        fprintf(stderr, "%s\n", err.msg);
    return loaded[release];
}

void text_vectors_free(void)
{
    for (int r = 0; r < N_RELEASE; r++) {
        ds4_vocab_free(loaded[r]);
        loaded[r] = NULL;
    }
}

static int hex_digit(char c)
{
    return c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10;
}

size_t text_vectors_unhex(struct ds4_str hex, char *out, size_t max_bytes)
{
    size_t n = 0;

    for (; n < max_bytes && 2 * n + 1 < hex.len; n++)
        out[n] = (char)(hex_digit(hex.ptr[2 * n]) << 4 | hex_digit(hex.ptr[2 * n + 1]));
    return n;
}

/* Vector files and the real vocabulary for the tests of router/text. */
#include "tests/support/text_vectors.h"

#include "router/text/vocab_load.h"
#include "router/text_encode.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define VOCAB_PATH   "build/vocab/tokenizer.json"
#define NONE_PATH    "build/vocab/NONE"
#define OVERLAY_PATH "tests/data/encoding/tokenizer_v4.json"
#define N_RELEASE    3
#define ARENA_BYTES  ((size_t)256 << 20)
#define ANSWER_BYTES ((size_t)64 << 20)

static struct ds4_vocab *loaded[N_RELEASE];

/* The whole file, to be freed; NULL when it cannot be read. */
static char *read_file(const char *path, size_t *n_bytes)
{
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
    if (text != NULL && fread(text, 1, (size_t)n, file) != (size_t)n) {
        free(text);
        text = NULL;
    }
    *n_bytes = (size_t)n;
    fclose(file);
    return text;
}

struct ds4_json *text_vectors_open(const char *path)
{
    struct ds4_err err = {0};
    size_t n = 0;
    char *text = read_file(path, &n);
    struct ds4_json *doc = text == NULL ? NULL : ds4_json_parse((struct ds4_str){text, n}, &err);

    if (doc == NULL)
        fprintf(stderr, "%s: %s\n", path, err.msg);
    free(text);
    return doc;
}

bool text_cases_open(struct text_cases *file, const char *path)
{
    struct ds4_err err = {0};
    size_t n = 0;

    ds4_arena_init(&file->arena, ARENA_BYTES);
    file->root = NULL;
    file->text = read_file(path, &n);
    if (file->text != NULL)
        file->root =
            ds4_jt_parse((struct ds4_str){file->text, n}, DS4_JT_MAX_DEPTH, &file->arena, &err);
    file->cases = ds4_jt_find(file->root, "cases");
    if (file->root == NULL)
        fprintf(stderr, "%s: %s\n", path, err.msg);
    return file->cases != NULL;
}

void text_cases_close(struct text_cases *file)
{
    ds4_arena_deinit(&file->arena);
    free(file->text);
}

static bool same_str(const struct ds4_jt_node *a, const struct ds4_jt_node *b)
{
    return a != NULL && b != NULL && a->type == DS4_JT_STRING && b->type == DS4_JT_STRING &&
           ds4_str_equal(a->str, b->str);
}

/* The members of the expected effort report, compared as JSON text. */
static bool same_effort(const struct ds4_jt_node *got, const struct ds4_jt_node *want)
{
    if (want == NULL)
        return true;
    for (const struct ds4_jt_node *m = want->first; m != NULL; m = m->next) {
        const struct ds4_jt_node *other = ds4_jt_find_str(got, m->key);

        if (other == NULL || !ds4_str_equal(other->raw, m->raw))
            return false;
    }
    return got != NULL && got->n_children == want->n_children;
}

static bool render_passes(const struct ds4_jt_node *c)
{
    struct ds4_err err = {0};
    struct ds4_buf answer;
    struct ds4_arena arena;
    const struct ds4_jt_node *got;
    bool ok;

    ds4_buf_init(&answer, ANSWER_BYTES);
    ds4_arena_init(&arena, ARENA_BYTES);
    if (ds4_text_render(c->raw, &answer, &err) != 0) {
        ok = ds4_jt_find(c, "error") != NULL && err.code == DS4_E_INVALID && err.msg[0] != '\0';
    } else {
        got = ds4_jt_parse(ds4_buf_view(&answer), DS4_JT_MAX_DEPTH, &arena, NULL);
        ok = ds4_jt_find(c, "error") == NULL &&
             same_str(ds4_jt_find(got, "prompt"), ds4_jt_find(c, "prompt")) &&
             same_effort(ds4_jt_find(got, "effort"), ds4_jt_find(c, "effort"));
    }
    if (!ok)
        fprintf(stderr, "%.*s: got %s %s\n", DS4_STR_ARG(ds4_jt_find(c, "id")->str),
                answer.ptr == NULL ? "" : answer.ptr, err.msg);
    ds4_buf_deinit(&answer);
    ds4_arena_deinit(&arena);
    return ok;
}

size_t text_vectors_render(const char *path, size_t *n_case)
{
    struct text_cases file;
    size_t n_failed = 0;

    *n_case = 0;
    if (text_cases_open(&file, path)) {
        for (const struct ds4_jt_node *c = file.cases->first; c != NULL; c = c->next) {
            n_failed += !render_passes(c);
            (*n_case)++;
        }
    }
    text_cases_close(&file);
    return n_failed;
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
        fprintf(stderr, "%s is missing: `make check` fetches it%s\n", VOCAB_PATH,
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

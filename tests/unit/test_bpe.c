/* Byte-pair encoding against ids made by the Hugging Face tokenizer, and against itself. */
#include "router/text/bpe.h"

#include "common/buf.h"
#include "common/utf8.h"
#include "router/text/detok.h"
#include "tests/support/text_vectors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#define TEXT_BYTES     ((size_t)16 << 20)
#define N_RANDOM       2000
#define MAX_HEX_BYTES  64
#define LONG_RUN_BYTES 200000

static bool ids_equal(const struct ds4_ids *ids, const struct ds4_json *want)
{
    if (ids->len != ds4_json_len(want))
        return false;
    for (size_t i = 0; i < ids->len; i++)
        if (ids->ptr[i] != ds4_json_int(ds4_json_at(want, i)))
            return false;
    return true;
}

/* Encodes and compares; a mismatch is printed with the case's id. */
static bool case_passes(struct ds4_bpe *bpe, struct ds4_str text, const struct ds4_json *want,
                        const char *name)
{
    struct ds4_ids ids = {0};
    struct ds4_err err = {0};
    bool ok = ds4_bpe_encode(bpe, text, DS4_BPE_SPECIAL, &ids, &err) == 0 && ids_equal(&ids, want);

    if (!ok) {
        fprintf(stderr, "%s: got", name);
        for (size_t i = 0; i < ids.len; i++)
            fprintf(stderr, " %d", ids.ptr[i]);
        fprintf(stderr, "\n");
    }
    DS4_VEC_DEINIT(&ids);
    return ok;
}

/* Runs all cases of a file; `ids_key` names the expected ids.  A second round meets a warm cache. */
static void run_cases(const char *path, enum text_vectors_release release, const char *ids_key,
                      size_t min_cases)
{
    bool absent;
    const struct ds4_vocab *vocab = text_vectors_vocab(release, &absent);
    struct ds4_json *doc;
    const struct ds4_json *cases;
    struct ds4_bpe *bpe;
    size_t n_failed = 0, n_run = 0;

    if (absent)
        skip();
    assert_non_null(vocab);
    doc = text_vectors_open(path);
    assert_non_null(doc);
    bpe = ds4_bpe_new(vocab, NULL);
    assert_non_null(bpe);
    cases = ds4_json_find(doc, "cases");
    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < ds4_json_len(cases); i++) {
            const struct ds4_json *c = ds4_json_at(cases, i);
            const struct ds4_json *want = ds4_json_find(c, ids_key);

            if (want == NULL)
                continue;
            n_run++;
            n_failed += !case_passes(bpe, ds4_json_str(ds4_json_find(c, "text")), want,
                                     ds4_json_str(ds4_json_find(c, "id")).ptr);
        }
    }
    assert_true(n_run >= 2 * min_cases);
    assert_int_equal(n_failed, 0);
    ds4_bpe_free(bpe);
    ds4_json_free(doc);
}

static void base_vocabulary_gives_the_reference_ids(void **state)
{
    (void)state;
    run_cases("tests/data/encoding/tokenizer_v3.json", TEXT_VECTORS_V3, "ids", 329);
}

static void v4_vocabulary_gives_the_reference_ids(void **state)
{
    (void)state;
    run_cases("tests/data/encoding/tokenizer_v4.json", TEXT_VECTORS_V4, "ids", 50);
}

static void v41_vocabulary_gives_the_reference_ids(void **state)
{
    (void)state;
    run_cases("tests/data/encoding/tokenizer_v4.json", TEXT_VECTORS_V41, "ids_v41", 30);
}

static void invalid_utf8_is_replaced_and_then_encoded(void **state)
{
    bool absent;
    const struct ds4_vocab *vocab = text_vectors_vocab(TEXT_VECTORS_V3, &absent);
    struct ds4_json *doc;
    const struct ds4_json *cases;
    struct ds4_bpe *bpe;

    (void)state;
    if (absent)
        skip();
    assert_non_null(vocab);
    doc = text_vectors_open("tests/data/encoding/tokenizer_v3.json");
    assert_non_null(doc);
    bpe = ds4_bpe_new(vocab, NULL);
    cases = ds4_json_find(doc, "invalid_utf8");
    assert_true(ds4_json_len(cases) >= 12);
    for (size_t i = 0; i < ds4_json_len(cases); i++) {
        const struct ds4_json *c = ds4_json_at(cases, i);
        struct ds4_str hex = ds4_json_str(ds4_json_find(c, "bytes_hex"));
        char bytes[MAX_HEX_BYTES];
        size_t n = text_vectors_unhex(hex, bytes, sizeof(bytes));
        struct ds4_buf text;

        ds4_buf_init(&text, TEXT_BYTES);
        assert_int_equal(ds4_utf8_append_replaced(&text, (struct ds4_str){bytes, n}), 0);
        assert_true(ds4_str_equal(ds4_buf_view(&text), ds4_json_str(ds4_json_find(c, "replaced"))));
        assert_true(case_passes(bpe, ds4_buf_view(&text), ds4_json_find(c, "ids"), hex.ptr));
        ds4_buf_deinit(&text);
    }
    ds4_bpe_free(bpe);
    ds4_json_free(doc);
}

static void plain_mode_never_gives_an_added_token(void **state)
{
    bool absent;
    const struct ds4_vocab *vocab = text_vectors_vocab(TEXT_VECTORS_V4, &absent);
    struct ds4_str text = DS4_STR("<｜User｜></think>｜DSML｜<｜begin▁of▁sentence｜><think>");
    struct ds4_ids ids = {0};
    struct ds4_bpe *bpe;

    (void)state;
    if (absent)
        skip();
    assert_non_null(vocab);
    bpe = ds4_bpe_new(vocab, NULL);
    assert_int_equal(ds4_bpe_encode(bpe, text, DS4_BPE_PLAIN, &ids, NULL), 0);
    assert_true(ids.len > 5);
    for (size_t i = 0; i < ids.len; i++)
        assert_int_equal(vocab->kind[ids.ptr[i]], DS4_TOKEN_NORMAL);
    DS4_VEC_DEINIT(&ids);
    ds4_bpe_free(bpe);
}

static void decode_back(const struct ds4_vocab *vocab, const struct ds4_ids *ids,
                        struct ds4_buf *out)
{
    struct ds4_detok detok;

    ds4_detok_init(&detok, vocab, false);
    for (size_t i = 0; i < ids->len; i++)
        assert_int_equal(ds4_detok_push(&detok, ids->ptr[i], out, NULL), 0);
    assert_int_equal(ds4_detok_finish(&detok, out, NULL), 0);
}

/* Characters from all classes of the pre-tokenizer, several widths, unassigned ones too. */
static size_t random_text(unsigned *seed, char *out, size_t max_bytes)
{
    static const uint32_t pool[] = {'a',    'Z',    ' ',    ' ',    '\n',   '\r',    '\t',   '.',
                                    '<',    '/',    '{',    '1',    '9',    0xE9,    0x301,  0x4E2D,
                                    0x3042, 0x30FB, 0xFF5C, 0x2581, 0x661,  0x1F600, 0x200D, 0x85,
                                    0x3000, 0xAC00, 0x378,  0xE000, 0x2028, 0,       0x1D7D8};
    size_t n = 0;

    while (n + DS4_UTF8_MAX_BYTES <= max_bytes) {
        uint32_t code = pool[(unsigned)rand_r(seed) % (sizeof(pool) / sizeof(pool[0]))];

        if (rand_r(seed) % 16 == 0)
            code = (unsigned)rand_r(seed) % 0x3000;
        n += ds4_utf8_encode(code, out + n);
        if (rand_r(seed) % 64 == 0)
            break;
    }
    return n;
}

static void decoding_inverts_encoding_for_any_text(void **state)
{
    bool absent;
    const struct ds4_vocab *vocab = text_vectors_vocab(TEXT_VECTORS_V4, &absent);
    struct ds4_bpe *bpe;
    unsigned seed = 20260801;
    char text[2048];

    (void)state;
    if (absent)
        skip();
    assert_non_null(vocab);
    bpe = ds4_bpe_new(vocab, NULL);
    for (int round = 0; round < N_RANDOM; round++) {
        struct ds4_str in = {text, random_text(&seed, text, sizeof(text))};
        struct ds4_ids ids = {0};
        struct ds4_buf out;

        ds4_buf_init(&out, TEXT_BYTES);
        assert_int_equal(ds4_bpe_encode(bpe, in, (enum ds4_bpe_specials)(round % 2), &ids, NULL),
                         0);
        decode_back(vocab, &ids, &out);
        assert_true(ds4_str_equal(in, ds4_buf_view(&out)));
        DS4_VEC_DEINIT(&ids);
        ds4_buf_deinit(&out);
    }
    ds4_bpe_free(bpe);
}

/* The definition, done naively: lowest rank first, leftmost, over the whole piece. */
static void merge_by_definition(const struct ds4_vocab *vocab, struct ds4_str piece,
                                struct ds4_ids *ids)
{
    for (size_t i = 0; i < piece.len; i++)
        assert_int_equal(DS4_VEC_PUSH(ids, vocab->byte_id[(uint8_t)piece.ptr[i]]), 0);
    for (;;) {
        uint32_t best = DS4_NO_RANK;
        size_t at = 0;

        for (size_t i = 0; i + 1 < ids->len; i++) {
            uint32_t rank = ds4_vocab_rank(vocab, ids->ptr[i], ids->ptr[i + 1]);

            if (rank < best) {
                best = rank;
                at = i;
            }
        }
        if (best == DS4_NO_RANK)
            return;
        ids->ptr[at] = vocab->merges[best].result;
        memmove(ids->ptr + at + 1, ids->ptr + at + 2, (ids->len - at - 2) * sizeof(*ids->ptr));
        ids->len--;
    }
}

static void long_pieces_merge_as_the_definition_says(void **state)
{
    bool absent;
    const struct ds4_vocab *vocab = text_vectors_vocab(TEXT_VECTORS_V4, &absent);
    struct ds4_bpe *bpe;
    unsigned seed = 7;
    char text[600];

    (void)state;
    if (absent)
        skip();
    assert_non_null(vocab);
    bpe = ds4_bpe_new(vocab, NULL);
    for (size_t n = 2; n <= sizeof(text); n += n < 110 ? 1 : 37) {
        struct ds4_ids got = {0}, want = {0};

        for (size_t i = 0; i < n; i++) /* one word: letters only */
            text[i] = "etaoinshrdlEA"[rand_r(&seed) % (n % 3 == 0 ? 2 : 13)];
        assert_int_equal(ds4_bpe_encode(bpe, (struct ds4_str){text, n}, DS4_BPE_PLAIN, &got, NULL),
                         0);
        merge_by_definition(vocab, (struct ds4_str){text, n}, &want);
        assert_int_equal(got.len, want.len);
        assert_memory_equal(got.ptr, want.ptr, got.len * sizeof(*got.ptr));
        DS4_VEC_DEINIT(&got);
        DS4_VEC_DEINIT(&want);
    }
    ds4_bpe_free(bpe);
}

/* A quadratic encoder needs minutes for this. */
static void a_huge_piece_of_one_letter_is_encoded(void **state)
{
    bool absent;
    const struct ds4_vocab *vocab = text_vectors_vocab(TEXT_VECTORS_V4, &absent);
    struct ds4_ids ids = {0};
    struct ds4_buf out;
    struct ds4_bpe *bpe;
    char *text;

    (void)state;
    if (absent)
        skip();
    assert_non_null(vocab);
    text = malloc(LONG_RUN_BYTES);
    assert_non_null(text);
    memset(text, 'a', LONG_RUN_BYTES);
    bpe = ds4_bpe_new(vocab, NULL);
    ds4_buf_init(&out, TEXT_BYTES);
    assert_int_equal(
        ds4_bpe_encode(bpe, (struct ds4_str){text, LONG_RUN_BYTES}, DS4_BPE_PLAIN, &ids, NULL), 0);
    decode_back(vocab, &ids, &out);
    assert_int_equal(out.len, LONG_RUN_BYTES);
    assert_memory_equal(out.ptr, text, LONG_RUN_BYTES);
    DS4_VEC_DEINIT(&ids);
    ds4_buf_deinit(&out);
    ds4_bpe_free(bpe);
    free(text);
}

static int free_vocabularies(void **state)
{
    (void)state;
    text_vectors_free();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(base_vocabulary_gives_the_reference_ids),
        cmocka_unit_test(v4_vocabulary_gives_the_reference_ids),
        cmocka_unit_test(v41_vocabulary_gives_the_reference_ids),
        cmocka_unit_test(invalid_utf8_is_replaced_and_then_encoded),
        cmocka_unit_test(plain_mode_never_gives_an_added_token),
        cmocka_unit_test(decoding_inverts_encoding_for_any_text),
        cmocka_unit_test(long_pieces_merge_as_the_definition_says),
        cmocka_unit_test(a_huge_piece_of_one_letter_is_encoded),
    };

    return cmocka_run_group_tests_name("bpe", tests, NULL, free_vocabularies);
}

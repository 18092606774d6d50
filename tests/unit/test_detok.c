/* The detokenizer releases whole characters only, whatever the token borders. */
#include "router/text/detok.h"

#include "common/utf8.h"
#include "router/text/byte_class.h"
#include "tests/support/text_vectors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#define N_BYTE    256
#define ID_BOS    256
#define ID_THINK  257
#define MAX_BYTES ((size_t)1 << 20)
#define N_RANDOM  20000

/* A vocabulary of single bytes, so that a test chooses the token borders. */
static struct ds4_vocab *byte_vocab(void)
{
    static char text[N_BYTE][4];
    static struct ds4_vocab_entry entries[N_BYTE + 2];
    int shifted = 0x100;

    for (int byte = 0; byte < N_BYTE; byte++) {
        bool printable = (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);

        text[byte][ds4_utf8_encode((uint32_t)(printable ? byte : shifted++), text[byte])] = '\0';
        entries[byte] = (struct ds4_vocab_entry){ds4_str_view(text[byte]), DS4_TOKEN_NORMAL};
    }
    entries[ID_BOS] = (struct ds4_vocab_entry){DS4_STR("<｜begin▁of▁sentence｜>"), DS4_TOKEN_ADDED};
    entries[ID_THINK] = (struct ds4_vocab_entry){DS4_STR("<think>"), DS4_TOKEN_ADDED};
    return ds4_vocab_new(entries, N_BYTE + 2, NULL, 0, NULL);
}

static int make(void **state)
{
    *state = byte_vocab();
    return *state == NULL ? -1 : 0;
}

static int drop(void **state)
{
    ds4_vocab_free(*state);
    text_vectors_free();
    return 0;
}

/* Both ways to take a token's text give the same, and leave the same behind. */
static void push(struct ds4_detok *detok, int32_t id, struct ds4_buf *out)
{
    struct ds4_detok other = *detok;
    struct ds4_detok_text next;
    struct ds4_buf scratch;
    size_t before = out->len;

    ds4_buf_init(&scratch, MAX_BYTES);
    assert_int_equal(ds4_detok_push(detok, id, out, NULL), 0);
    assert_int_equal(ds4_detok_next(&other, id, &scratch, &next, NULL), 0);
    assert_true(ds4_str_equal(next.text, ds4_str_skip(ds4_buf_view(out), before)));
    if (next.text.len > 0)
        assert_int_equal(next.classes, ds4_byte_classes(next.text));
    assert_int_equal(other.n_held, detok->n_held);
    assert_memory_equal(other.held, detok->held, detok->n_held);
    ds4_buf_deinit(&scratch);
}

static void a_character_comes_out_with_its_last_byte(void **state)
{
    struct ds4_detok detok;
    struct ds4_buf out;

    ds4_detok_init(&detok, *state, true);
    ds4_buf_init(&out, MAX_BYTES);
    push(&detok, 0xF0, &out);
    push(&detok, 0x9F, &out);
    push(&detok, 0x98, &out);
    assert_int_equal(out.len, 0);
    push(&detok, 0x80, &out);
    assert_string_equal(out.ptr, "😀");
    ds4_buf_deinit(&out);
}

static void a_broken_character_becomes_one_replacement_and_the_next_byte_counts(void **state)
{
    struct ds4_detok detok;
    struct ds4_buf out;

    ds4_detok_init(&detok, *state, true);
    ds4_buf_init(&out, MAX_BYTES);
    push(&detok, 0xE4, &out);
    push(&detok, 0xBD, &out);
    push(&detok, 'x', &out);
    assert_string_equal(out.ptr, "\xEF\xBF\xBDx");
    push(&detok, 0xC3, &out);
    assert_int_equal(ds4_detok_finish(&detok, &out, NULL), 0);
    assert_string_equal(out.ptr, "\xEF\xBF\xBDx\xEF\xBF\xBD");
    ds4_buf_deinit(&out);
}

static void added_tokens_pass_and_hidden_ones_do_not(void **state)
{
    struct ds4_detok detok;
    struct ds4_buf out;

    ds4_detok_init(&detok, *state, true);
    ds4_buf_init(&out, MAX_BYTES);
    push(&detok, ID_BOS, &out);
    push(&detok, ID_THINK, &out);
    assert_string_equal(out.ptr, "<think>");
    ds4_buf_clear(&out);
    ds4_detok_init(&detok, *state, false);
    push(&detok, ID_BOS, &out);
    assert_string_equal(out.ptr, "<｜begin▁of▁sentence｜>");
    ds4_buf_deinit(&out);
}

static void ids_outside_the_vocabulary_are_refused(void **state)
{
    struct ds4_detok detok;
    struct ds4_buf out;
    struct ds4_err err = {0};

    ds4_detok_init(&detok, *state, true);
    ds4_buf_init(&out, MAX_BYTES);
    assert_int_equal(ds4_detok_push(&detok, -1, &out, &err), -1);
    assert_int_equal(ds4_detok_push(&detok, N_BYTE + 2, &out, &err), -1);
    assert_int_equal(err.code, DS4_E_CORRUPT);
    assert_int_equal(out.len, 0);
    ds4_buf_deinit(&out);
}

static void byte_by_byte_equals_replacing_the_whole(void **state)
{
    static const uint8_t pool[] = {'a',  0x80, 0xBF, 0xC2, 0xC3, 0xE0, 0xA0, 0xE2, 0x82,
                                   0xED, 0x9F, 0xF0, 0x90, 0xF4, 0x8F, 0xFF, 0xC0};
    unsigned seed = 3;

    for (int round = 0; round < N_RANDOM; round++) {
        struct ds4_detok detok;
        struct ds4_buf got, want;
        char bytes[12];
        size_t n = (size_t)rand_r(&seed) % sizeof(bytes);

        ds4_detok_init(&detok, *state, true);
        ds4_buf_init(&got, MAX_BYTES);
        ds4_buf_init(&want, MAX_BYTES);
        for (size_t i = 0; i < n; i++) {
            bytes[i] = (char)pool[(size_t)rand_r(&seed) % sizeof(pool)];
            push(&detok, (uint8_t)bytes[i], &got);
            assert_true(ds4_utf8_valid(ds4_buf_view(&got)));
        }
        assert_int_equal(ds4_detok_finish(&detok, &got, NULL), 0);
        ds4_utf8_append_replaced(&want, (struct ds4_str){bytes, n});
        assert_true(ds4_str_equal(ds4_buf_view(&got), ds4_buf_view(&want)));
        ds4_buf_deinit(&got);
        ds4_buf_deinit(&want);
    }
}

static void assert_decodes(const struct ds4_vocab *vocab, const struct ds4_json *c)
{
    const struct ds4_json *ids = ds4_json_find(c, "ids");
    const struct ds4_json *pieces = ds4_json_find(c, "piece_hex");
    struct ds4_detok detok;
    struct ds4_buf out;

    ds4_detok_init(&detok, vocab, false);
    ds4_buf_init(&out, MAX_BYTES);
    for (size_t i = 0; i < ds4_json_len(ids); i++) {
        int32_t id = (int32_t)ds4_json_int(ds4_json_at(ids, i));
        char bytes[64];

        push(&detok, id, &out);
        if (pieces != NULL) {
            size_t n =
                text_vectors_unhex(ds4_json_str(ds4_json_at(pieces, i)), bytes, sizeof(bytes));

            assert_true(ds4_str_equal(ds4_vocab_piece(vocab, id), (struct ds4_str){bytes, n}));
        }
    }
    assert_int_equal(ds4_detok_finish(&detok, &out, NULL), 0);
    assert_true(ds4_str_equal(ds4_buf_view(&out), ds4_json_str(ds4_json_find(c, "text"))));
    ds4_buf_deinit(&out);
}

static void reference_ids_decode_to_their_text_and_pieces(void **state)
{
    static const char *const lists[] = {"cases", "decode"};
    bool absent;
    const struct ds4_vocab *vocab = text_vectors_vocab(TEXT_VECTORS_V3, &absent);
    struct ds4_json *doc;

    (void)state;
    if (absent)
        skip();
    assert_non_null(vocab);
    doc = text_vectors_open("tests/data/encoding/tokenizer_v3.json");
    assert_non_null(doc);
    for (int l = 0; l < 2; l++) {
        const struct ds4_json *cases = ds4_json_find(doc, lists[l]);

        assert_true(ds4_json_len(cases) >= 10);
        for (size_t i = 0; i < ds4_json_len(cases); i++)
            assert_decodes(vocab, ds4_json_at(cases, i));
    }
    ds4_json_free(doc);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_character_comes_out_with_its_last_byte),
        cmocka_unit_test(a_broken_character_becomes_one_replacement_and_the_next_byte_counts),
        cmocka_unit_test(added_tokens_pass_and_hidden_ones_do_not),
        cmocka_unit_test(ids_outside_the_vocabulary_are_refused),
        cmocka_unit_test(byte_by_byte_equals_replacing_the_whole),
        cmocka_unit_test(reference_ids_decode_to_their_text_and_pieces),
    };

    return cmocka_run_group_tests_name("detok", tests, make, drop);
}

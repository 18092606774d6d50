/* The vocabulary's tables, and how damaged ones are refused. */
#include "router/text/vocab.h"

#include "router/text/bpe.h"
#include "router/text/vocab_load.h"
#include "tests/support/text_vectors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#define N_BYTE      256
#define MAX_ENTRIES 300
#define TINY_JSON   "tests/data/model/ds4-tiny.tokenizer.json"
#define TINY_GGUF   "tests/data/ds4-tiny.gguf"

/* A hand-made table: the 256 bytes at ids 0..255, then what a test adds. */
struct table {
    char bytes[N_BYTE][4];
    struct ds4_vocab_entry entries[MAX_ENTRIES];
    size_t n_entry;
    struct ds4_vocab_pair pairs[8];
    size_t n_pair;
};

static void add(struct table *t, const char *text, enum ds4_token_kind kind)
{
    t->entries[t->n_entry++] = (struct ds4_vocab_entry){ds4_str_view(text), kind};
}

static void add_pair(struct table *t, const char *left, const char *right)
{
    t->pairs[t->n_pair++] = (struct ds4_vocab_pair){ds4_str_view(left), ds4_str_view(right)};
}

/* The byte alphabet written out independently of vocab.c: printable bytes stand for themselves. */
static void init_table(struct table *t)
{
    int shifted = 0x100;

    memset(t, 0, sizeof(*t));
    for (int byte = 0; byte < N_BYTE; byte++) {
        bool printable = (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);
        int c = printable ? byte : shifted++;

        if (c < 0x80) {
            t->bytes[byte][0] = (char)c;
        } else {
            t->bytes[byte][0] = (char)(0xC0 | c >> 6);
            t->bytes[byte][1] = (char)(0x80 | (c & 0x3F));
        }
        add(t, t->bytes[byte], DS4_TOKEN_NORMAL);
    }
}

static struct ds4_vocab *build(struct table *t, struct ds4_err *err)
{
    return ds4_vocab_new(t->entries, t->n_entry, t->pairs, t->n_pair, err);
}

static void refused(struct table *t, const char *words)
{
    struct ds4_err err = {0};

    assert_null(build(t, &err));
    assert_int_equal(err.code, DS4_E_CORRUPT);
    if (strstr(err.msg, words) == NULL)
        fail_msg("\"%s\" lacks \"%s\"", err.msg, words);
}

static void bytes_stand_for_themselves(void **state)
{
    struct table t;
    struct ds4_vocab *vocab;

    (void)state;
    init_table(&t);
    vocab = build(&t, NULL);
    assert_non_null(vocab);
    for (int byte = 0; byte < N_BYTE; byte++) {
        assert_int_equal(vocab->byte_id[byte], byte);
        assert_int_equal(ds4_vocab_piece(vocab, byte).len, 1);
        assert_int_equal((uint8_t)ds4_vocab_piece(vocab, byte).ptr[0], byte);
    }
    assert_int_equal(ds4_vocab_piece(vocab, -1).len, 0);
    assert_int_equal(ds4_vocab_piece(vocab, N_BYTE).len, 0);
    assert_false(ds4_vocab_has(vocab, N_BYTE));
    ds4_vocab_free(vocab);
}

static void merges_find_their_result(void **state)
{
    struct table t;
    struct ds4_vocab *vocab;

    (void)state;
    init_table(&t);
    add(&t, "ab", DS4_TOKEN_NORMAL);
    add(&t, "abc", DS4_TOKEN_NORMAL);
    add_pair(&t, "a", "b");
    add_pair(&t, "ab", "c");
    vocab = build(&t, NULL);
    assert_non_null(vocab);
    assert_int_equal(ds4_vocab_rank(vocab, 'a', 'b'), 0);
    assert_int_equal(ds4_vocab_rank(vocab, 256, 'c'), 1);
    assert_int_equal(vocab->merges[1].result, 257);
    assert_int_equal(ds4_vocab_rank(vocab, 'b', 'a'), DS4_NO_RANK);
    ds4_vocab_free(vocab);
}

static void damaged_tables_are_refused_by_index(void **state)
{
    struct table t;

    (void)state;
    init_table(&t);
    add(&t, "a", DS4_TOKEN_NORMAL);
    refused(&t, "token 256 repeats token 97");
    init_table(&t);
    t.entries[7].kind = DS4_TOKEN_ABSENT;
    refused(&t, "no token for the byte 0x07");
    init_table(&t);
    add(&t, "", DS4_TOKEN_NORMAL);
    refused(&t, "token 256 is empty");
    init_table(&t);
    add_pair(&t, "a", "b");
    refused(&t, "merge 0: its result is no token");
    init_table(&t);
    add(&t, "ab", DS4_TOKEN_ADDED);
    add_pair(&t, "a", "b");
    refused(&t, "merge 0: its result is no token");
    init_table(&t);
    add(&t, "ab", DS4_TOKEN_NORMAL);
    add_pair(&t, "a", "b");
    add_pair(&t, "a", "b");
    refused(&t, "merge 1 repeats");
    init_table(&t);
    add_pair(&t, "xy", "b");
    refused(&t, "merge 0: its left side is no token");
    init_table(&t);
    add_pair(&t, "a", "｜");
    refused(&t, "merge 0 has a side outside the byte alphabet");
    init_table(&t);
    t.n_entry = 0;
    refused(&t, "out of range");
}

static void longest_added_token_wins(void **state)
{
    struct table t;
    struct ds4_vocab *vocab;
    int32_t id = -1;

    (void)state;
    init_table(&t);
    add(&t, "<a", DS4_TOKEN_ADDED);
    add(&t, "<abc>", DS4_TOKEN_ADDED);
    add(&t, "<abd>", DS4_TOKEN_ADDED);
    vocab = build(&t, NULL);
    assert_non_null(vocab);
    assert_int_equal(ds4_vocab_match_added(vocab, "<abc>!", 6, &id), 5);
    assert_int_equal(id, 257);
    assert_int_equal(ds4_vocab_match_added(vocab, "<abx>", 5, &id), 2);
    assert_int_equal(id, 256);
    assert_int_equal(ds4_vocab_match_added(vocab, "<abc", 4, &id), 2);
    assert_int_equal(ds4_vocab_match_added(vocab, "<", 1, &id), 0);
    assert_int_equal(ds4_vocab_find_added(vocab, DS4_STR("<ab")), -1);
    ds4_vocab_free(vocab);
}

static void special_tokens_are_found_by_text_whatever_their_kind(void **state)
{
    struct table t;
    struct ds4_vocab *vocab;
    struct ds4_err err = {0};

    (void)state;
    init_table(&t);
    add(&t, "<｜begin▁of▁sentence｜>", DS4_TOKEN_ADDED);
    add(&t, "<think>", DS4_TOKEN_NORMAL);
    add(&t, "<｜place▁holder▁no▁0｜>", DS4_TOKEN_NORMAL);
    add(&t, "unused", DS4_TOKEN_ABSENT);
    vocab = build(&t, NULL);
    assert_non_null(vocab);
    assert_int_equal(ds4_vocab_special(vocab, DS4_SPECIAL_BOS), 256);
    assert_int_equal(ds4_vocab_special(vocab, DS4_SPECIAL_THINK_OPEN), 257);
    assert_int_equal(ds4_vocab_special(vocab, DS4_SPECIAL_USER), -1);
    assert_true(ds4_vocab_is_hidden(vocab, 256));
    assert_false(ds4_vocab_is_hidden(vocab, 257));
    assert_true(ds4_vocab_is_hidden(vocab, 258));
    assert_int_equal(ds4_vocab_piece(vocab, 259).len, 0);
    assert_int_equal(ds4_vocab_require_chat(vocab, false, &err), -1);
    assert_non_null(strstr(err.msg, "<｜end▁of▁sentence｜>"));
    ds4_vocab_free(vocab);
}

static void tiny_vocabulary_has_what_a_chat_needs(void **state)
{
    struct ds4_err err = {0};
    struct ds4_vocab *vocab = ds4_vocab_load(TINY_JSON, NULL, &err);

    (void)state;
    assert_string_equal(err.msg, "");
    assert_non_null(vocab);
    assert_int_equal(ds4_vocab_has(vocab, 4095), true);
    assert_int_equal(ds4_vocab_has(vocab, 4096), false);
    assert_int_equal(ds4_vocab_require_chat(vocab, false, &err), 0);
    assert_int_equal(ds4_vocab_require_chat(vocab, true, &err), -1);
    assert_int_equal(ds4_vocab_special(vocab, DS4_SPECIAL_USER), 4080);
    assert_false(ds4_vocab_is_hidden(vocab, ds4_vocab_special(vocab, DS4_SPECIAL_DSML)));
    ds4_vocab_free(vocab);
}

/* Encodes `text` with both vocabularies; the ids must be the same and decode to the text. */
static void assert_same_ids(struct ds4_bpe *a, struct ds4_bpe *b, struct ds4_str text)
{
    struct ds4_ids x = {0}, y = {0};

    assert_int_equal(ds4_bpe_encode(a, text, DS4_BPE_SPECIAL, &x, NULL), 0);
    assert_int_equal(ds4_bpe_encode(b, text, DS4_BPE_SPECIAL, &y, NULL), 0);
    assert_int_equal(x.len, y.len);
    if (x.len > 0)
        assert_memory_equal(x.ptr, y.ptr, x.len * sizeof(*x.ptr));
    DS4_VEC_DEINIT(&x);
    DS4_VEC_DEINIT(&y);
}

static void gguf_and_tokenizer_json_give_the_same_ids(void **state)
{
    struct ds4_err err = {0};
    struct ds4_vocab *gguf = ds4_vocab_load(TINY_GGUF, NULL, &err);
    struct ds4_vocab *json = ds4_vocab_load(TINY_JSON, NULL, &err);
    struct ds4_bpe *a, *b;
    struct text_cases file;

    (void)state;
    assert_string_equal(err.msg, "");
    assert_non_null(gguf);
    assert_non_null(json);
    a = ds4_bpe_new(gguf, NULL);
    b = ds4_bpe_new(json, NULL);
    assert_true(text_cases_open(&file, "tests/data/encoding/render_v4.json"));
    for (const struct ds4_jt_node *c = file.cases->first; c != NULL; c = c->next)
        if (ds4_jt_find(c, "prompt") != NULL)
            assert_same_ids(a, b, ds4_jt_find(c, "prompt")->str);
    text_cases_close(&file);
    ds4_bpe_free(a);
    ds4_bpe_free(b);
    ds4_vocab_free(gguf);
    ds4_vocab_free(json);
}

static void added_tokens_cannot_be_laid_over_a_gguf(void **state)
{
    struct ds4_vocab_overlay overlay = {"tests/data/encoding/tokenizer_v4.json", false};
    struct ds4_err err = {0};

    (void)state;
    assert_null(ds4_vocab_load(TINY_GGUF, &overlay, &err));
    assert_int_equal(err.code, DS4_E_INVALID);
}

static void missing_and_foreign_files_are_refused(void **state)
{
    struct ds4_err err = {0};

    (void)state;
    assert_null(ds4_vocab_load("tests/data/no-such-file", NULL, &err));
    assert_int_equal(err.code, DS4_E_IO);
    assert_null(ds4_vocab_load("tests/data/encoding/literals.json", NULL, &err));
    assert_int_equal(err.code, DS4_E_CORRUPT);
    assert_null(ds4_vocab_load("LICENSE", NULL, &err));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_stand_for_themselves),
        cmocka_unit_test(merges_find_their_result),
        cmocka_unit_test(damaged_tables_are_refused_by_index),
        cmocka_unit_test(longest_added_token_wins),
        cmocka_unit_test(special_tokens_are_found_by_text_whatever_their_kind),
        cmocka_unit_test(tiny_vocabulary_has_what_a_chat_needs),
        cmocka_unit_test(gguf_and_tokenizer_json_give_the_same_ids),
        cmocka_unit_test(added_tokens_cannot_be_laid_over_a_gguf),
        cmocka_unit_test(missing_and_foreign_files_are_refused),
    };

    return cmocka_run_group_tests_name("vocab", tests, NULL, NULL);
}

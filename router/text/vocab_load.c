/* Vocabulary files.  Runs once at start, before step 1.
 *
 * Both formats end in the same two lists, entries by id and merge pairs in rank order, which
 * vocab.c checks and indexes.  Nothing else of the files is believed: add_bos_token, chat templates
 * and post-processors are ignored (repacks carry wrong ones); the split rules belong to the model. */
#include "router/text/vocab_load.h"

#include "common/buf.h"
#include "common/json.h"
#include "common/synth.h"
#include "common/weights_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define MAX_FILE_BYTES ((size_t)256 << 20)
#define READ_BYTES     ((size_t)1 << 20)
#define MAX_ID         ((1 << 24) - 1)
#define MAGIC          "GGUF"
#define MAGIC_BYTES    4
#define KEY_BYTES      128

/* tokenizer.ggml.token_type */
enum {
    GGUF_NORMAL = 1,
    GGUF_CONTROL = 3,
    GGUF_USER_DEFINED = 4,
    GGUF_BYTE = 6,
};

struct lists {
    DS4_VEC(struct ds4_vocab_entry) entries;
    DS4_VEC(struct ds4_vocab_pair) pairs;
};

static void lists_deinit(struct lists *lists)
{
    DS4_VEC_DEINIT(&lists->entries);
    DS4_VEC_DEINIT(&lists->pairs);
}

static int read_file(const char *path, size_t max_bytes, struct ds4_buf *buf, struct ds4_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = -1;

    if (fd < 0)
        return ds4_fail(err, DS4_E_IO, "could not open %s: %s", path, strerror(errno));
    while (buf->len < max_bytes) {
        size_t want = max_bytes - buf->len < READ_BYTES ? max_bytes - buf->len : READ_BYTES;
        char *room = ds4_buf_reserve(buf, want);

        if (room == NULL)
            break;
        n = read(fd, room, want);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        ds4_buf_commit(buf, (size_t)n);
    }
    close(fd);
    if (n < 0)
        return ds4_fail(err, DS4_E_IO, "could not read %s: %s", path, strerror(errno));
    return ds4_buf_check(buf, path, err);
}

static struct ds4_json *read_json(const char *path, struct ds4_err *err)
{
    struct ds4_buf text;
    struct ds4_json *doc = NULL;

    ds4_buf_init(&text, MAX_FILE_BYTES);
    if (read_file(path, MAX_FILE_BYTES, &text, err) == 0)
        doc = ds4_json_parse(ds4_buf_view(&text), err);
    ds4_buf_deinit(&text);
    return doc;
}

/* Puts an entry at `id`, growing the list; holes are DS4_TOKEN_ABSENT. */
static int put_entry(struct lists *lists, int64_t id, struct ds4_str text, enum ds4_token_kind kind,
                     struct ds4_err *err)
{
    if (id < 0 || id > MAX_ID)
        return ds4_fail(err, DS4_E_CORRUPT, "token id %lld is out of range", (long long)id);
    if (DS4_VEC_RESERVE(&lists->entries, (size_t)id + 1) != 0)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for %lld tokens", (long long)id + 1);
    while (lists->entries.len <= (size_t)id)
        lists->entries.ptr[lists->entries.len++] = (struct ds4_vocab_entry){0};
    lists->entries.ptr[id] = (struct ds4_vocab_entry){text, kind};
    return 0;
}

/* "left right": exactly one space, which the byte alphabet never contains. */
static int put_merge(struct lists *lists, size_t rank, struct ds4_str text, struct ds4_err *err)
{
    size_t space = ds4_str_find(text, DS4_STR(" "), 0);
    struct ds4_vocab_pair pair;

    if (space == DS4_STR_NONE || ds4_str_find(text, DS4_STR(" "), space + 1) != DS4_STR_NONE)
        return ds4_fail(err, DS4_E_CORRUPT, "merge %zu must have exactly one space", rank);
    pair.left = ds4_str_head(text, space);
    pair.right = ds4_str_skip(text, space + 1);
    if (DS4_VEC_PUSH(&lists->pairs, pair) != 0)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for merge %zu", rank);
    return 0;
}

/* ---- tokenizer.json --------------------------------------------------------------------------- */

static int put_json_merges(struct lists *lists, const struct ds4_json *merges, struct ds4_err *err)
{
    for (size_t r = 0; r < ds4_json_len(merges); r++) {
        const struct ds4_json *merge = ds4_json_at(merges, r);
        struct ds4_vocab_pair pair = {0};

        if (ds4_json_type(merge) == DS4_JSON_STRING) {
            if (put_merge(lists, r, ds4_json_str(merge), err))
                return -1;
            continue;
        }
        if (ds4_json_type(merge) != DS4_JSON_ARRAY || ds4_json_len(merge) != 2)
            return ds4_fail(err, DS4_E_CORRUPT, "merge %zu must be a string or a pair", r);
        pair.left = ds4_json_str(ds4_json_at(merge, 0));
        pair.right = ds4_json_str(ds4_json_at(merge, 1));
        if (DS4_VEC_PUSH(&lists->pairs, pair) != 0)
            return ds4_fail(err, DS4_E_NOMEM, "no memory for merge %zu", r);
    }
    return 0;
}

static int put_added(struct lists *lists, const struct ds4_json *list, const char *path,
                     const char *text_key, struct ds4_err *err)
{
    for (size_t i = 0; i < ds4_json_len(list); i++) {
        const struct ds4_json *token = ds4_json_at(list, i);
        struct ds4_str text = {0};
        int64_t id = -1;

        if (ds4_json_get_int(token, path, "id", 0, MAX_ID, &id, err) ||
            ds4_json_get_str(token, path, text_key, &text, err))
            return ds4_err_wrap(err, "entry %zu", i);
        if (id < 0 || text.len == 0)
            return ds4_fail(err, DS4_E_CORRUPT, "%s[%zu] lacks an id or a text", path, i);
        if (put_entry(lists, id, text, DS4_TOKEN_ADDED, err))
            return -1;
    }
    return 0;
}

static int put_json(struct lists *lists, const struct ds4_json *doc, struct ds4_err *err)
{
    const struct ds4_json *model = ds4_json_find(doc, "model");
    const struct ds4_json *vocab = ds4_json_find(model, "vocab");
    const struct ds4_json *merges = ds4_json_find(model, "merges");
    const struct ds4_json *added = NULL;

    if (!ds4_str_equal(ds4_json_str(ds4_json_find(model, "type")), DS4_STR("BPE")) ||
        ds4_json_type(vocab) != DS4_JSON_OBJECT || ds4_json_type(merges) != DS4_JSON_ARRAY)
        return ds4_fail(err, DS4_E_CORRUPT, "no BPE model with vocab and merges in the file");
    if (ds4_json_bool(ds4_json_find(model, "byte_fallback")) ||
        ds4_json_bool(ds4_json_find(model, "ignore_merges")))
        return ds4_fail(err, DS4_E_CORRUPT, "byte_fallback and ignore_merges are not supported");
    for (struct ds4_json_member m = ds4_json_first(vocab); m.value != NULL; m = ds4_json_next(m)) {
        if (ds4_json_type(m.value) != DS4_JSON_INT)
            return ds4_fail(err, DS4_E_CORRUPT, "vocab: the id of \"%.*s\" is no integer",
                            DS4_STR_ARG(m.key));
        if (put_entry(lists, ds4_json_int(m.value), m.key, DS4_TOKEN_NORMAL, err))
            return ds4_err_wrap(err, "vocab");
    }
    if (ds4_json_get_array(doc, "", "added_tokens", &added, err))
        return -1;
    if (put_added(lists, added, "added_tokens", "content", err))
        return -1;
    return put_json_merges(lists, merges, err);
}

/* ---- overlay ---------------------------------------------------------------------------------- */

/* `range`: {"text_format": "PREFIX%04dSUFFIX with n=FIRST..LAST", "first_id": N}.  The texts go to
 * `scratch`, which must outlive the lists. */
static int put_range(struct lists *lists, const struct ds4_json *range, struct ds4_buf *scratch,
                     struct ds4_err *err)
{
    struct ds4_str format = {0};
    struct ds4_str prefix, suffix;
    int64_t first_id = -1;
    long first = 0, last = -1;
    size_t hole, with;
    size_t text_bytes;

    if (ds4_json_get_str(range, "overlay_v4.range", "text_format", &format, err) ||
        ds4_json_get_int(range, "overlay_v4.range", "first_id", 0, MAX_ID, &first_id, err))
        return -1;
    hole = ds4_str_find(format, DS4_STR("%04d"), 0);
    with = ds4_str_find(format, DS4_STR(" with n="), 0);
    if (first_id < 0 || hole == DS4_STR_NONE || with == DS4_STR_NONE || with < hole + 4 ||
        sscanf(format.ptr + with, " with n=%ld..%ld", &first, &last) != 2 || first < 0 ||
        last < first || last > 9999)
        return ds4_fail(err, DS4_E_CORRUPT, "overlay_v4.range is not understood");
    prefix = ds4_str_head(format, hole);
    suffix = (struct ds4_str){format.ptr + hole + 4, with - hole - 4};
    text_bytes = prefix.len + 4 + suffix.len;
    if (ds4_buf_reserve(scratch, text_bytes * (size_t)(last - first + 1)) == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for the overlay");
    for (long n = first; n <= last; n++) {
        char *start = scratch->ptr + scratch->len; /* reserved above: never moves */

        ds4_buf_append_str(scratch, prefix);
        ds4_buf_appendf(scratch, "%04ld", n);
        ds4_buf_append_str(scratch, suffix);
        if (put_entry(lists, first_id + (n - first), (struct ds4_str){start, text_bytes},
                      DS4_TOKEN_ADDED, err))
            return -1;
    }
    return 0;
}

static int put_overlay(struct lists *lists, const struct ds4_json *doc, bool v41,
                       struct ds4_buf *scratch, struct ds4_err *err)
{
    const struct ds4_json *v4 = ds4_json_find(doc, "overlay_v4");
    const struct ds4_json *changes = ds4_json_find(doc, "overlay_v41");
    const struct ds4_json *retired = NULL;

    if (v4 == NULL || (v41 && changes == NULL))
        return ds4_fail(err, DS4_E_CORRUPT, "the overlay file lacks overlay_v4%s",
                        v41 ? " or overlay_v41" : "");
    if (put_added(lists, ds4_json_find(v4, "named"), "overlay_v4.named", "text", err))
        return -1;
    if (ds4_json_find(v4, "range") != NULL &&
        put_range(lists, ds4_json_find(v4, "range"), scratch, err))
        return -1;
    if (!v41)
        return 0;
    if (put_added(lists, ds4_json_find(changes, "changed"), "overlay_v41.changed", "text", err) ||
        ds4_json_get_array(changes, "overlay_v41", "retired_to_placeholder_names_unknown", &retired,
                           err))
        return -1;
    for (size_t i = 0; i < ds4_json_len(retired); i++)
        if (put_entry(lists, ds4_json_int(ds4_json_at(retired, i)), (struct ds4_str){0},
                      DS4_TOKEN_ABSENT, err))
            return -1;
    return 0;
}

static struct ds4_vocab *load_json(const char *path, const struct ds4_vocab_overlay *overlay,
                                   struct ds4_err *err)
{
    struct ds4_json *doc = read_json(path, err);
    struct ds4_json *overlay_doc = NULL;
    struct lists lists = {0};
    struct ds4_buf scratch;
    struct ds4_vocab *vocab = NULL;

    ds4_buf_init(&scratch, READ_BYTES);
    if (doc == NULL || put_json(&lists, doc, err))
        goto out;
    if (overlay != NULL) {
        overlay_doc = read_json(overlay->path, err);
        if (overlay_doc == NULL || put_overlay(&lists, overlay_doc, overlay->v41, &scratch, err))
            goto out;
    }
    vocab =
        ds4_vocab_new(lists.entries.ptr, lists.entries.len, lists.pairs.ptr, lists.pairs.len, err);
out:
    lists_deinit(&lists);
    ds4_buf_deinit(&scratch);
    ds4_json_free(overlay_doc);
    ds4_json_free(doc);
    if (vocab == NULL)
        ds4_err_wrap(err, "%s", path);
    return vocab;
}

/* ---- GGUF ---------------------------------------------------------------------------------------- */

static enum ds4_token_kind gguf_kind(int64_t type)
{
    switch (type) {
    case GGUF_NORMAL:
    case GGUF_BYTE:
        return DS4_TOKEN_NORMAL;
    case GGUF_CONTROL:
    case GGUF_USER_DEFINED:
        return DS4_TOKEN_ADDED;
    default:
        return DS4_TOKEN_ABSENT;
    }
}

/* The sizes and ids that the file states must agree with its token list. */
static int check_gguf(const struct ds4_gguf *meta, uint64_t n_token, struct ds4_err *err)
{
    static const char *const ids[] = {
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.padding_token_id",
    };
    struct ds4_str arch = {0};
    char key[KEY_BYTES];
    int64_t value;

    for (size_t i = 0; i < sizeof(ids) / sizeof(ids[0]); i++)
        if (ds4_gguf_has(meta, ids[i]) &&
            ds4_gguf_get_i64(meta, ids[i], 0, (int64_t)n_token - 1, &value, err))
            return -1;
    if (!ds4_gguf_has(meta, "general.architecture"))
        return 0;
    if (ds4_gguf_get_str(meta, "general.architecture", &arch, err))
        return -1;
    snprintf(key, sizeof(key), "%.*s.vocab_size", (int)(arch.len < 64 ? arch.len : 64), arch.ptr);
    if (!ds4_gguf_has(meta, key))
        return 0;
    if (ds4_gguf_get_i64(meta, key, 1, MAX_ID, &value, err))
        return -1;
    if ((uint64_t)value != n_token)
        return ds4_fail(err, DS4_E_CORRUPT, "%s is %lld, but tokenizer.ggml.tokens has %llu", key,
                        (long long)value, (unsigned long long)n_token);
    return 0;
}

static int put_gguf(struct lists *lists, const struct ds4_gguf *meta, struct ds4_err *err)
{
    const struct ds4_gguf_kv *tokens = ds4_gguf_get_strings(meta, "tokenizer.ggml.tokens", err);
    const struct ds4_gguf_kv *types = NULL;
    const struct ds4_gguf_kv *merges = NULL;

    if (tokens != NULL)
        types = ds4_gguf_get_ints(meta, "tokenizer.ggml.token_type", err);
    if (types != NULL)
        merges = ds4_gguf_get_strings(meta, "tokenizer.ggml.merges", err);
    if (merges == NULL)
        return -1;
    if (types->n != tokens->n)
        return ds4_fail(err, DS4_E_CORRUPT,
                        "tokenizer.ggml.token_type has %llu entries for %llu tokens",
                        (unsigned long long)types->n, (unsigned long long)tokens->n);
    if (check_gguf(meta, tokens->n, err))
        return -1;
    for (uint64_t i = 0; i < tokens->n; i++)
        if (put_entry(lists, (int64_t)i, ds4_gguf_str_at(tokens, i),
                      gguf_kind(ds4_gguf_int_at(types, i)), err))
            return -1;
    for (uint64_t i = 0; i < merges->n; i++)
        if (put_merge(lists, i, ds4_gguf_str_at(merges, i), err))
            return -1;
    return 0;
}

static struct ds4_vocab *load_gguf(const char *path, struct ds4_err *err)
{
    struct ds4_weights_file *file = ds4_weights_open(path, DS4_WEIGHTS_PREAD, err);
    struct lists lists = {0};
    struct ds4_vocab *vocab = NULL;

    if (file == NULL)
        return NULL;
    if (put_gguf(&lists, ds4_weights_meta(file), err) == 0)
        vocab = ds4_vocab_new(lists.entries.ptr, lists.entries.len, lists.pairs.ptr,
                              lists.pairs.len, err);
    if (vocab == NULL)
        ds4_err_wrap(err, "%s", path);
    lists_deinit(&lists);
    ds4_weights_close(file);
    return vocab;
}

struct ds4_vocab *ds4_vocab_load(const char *path, const struct ds4_vocab_overlay *overlay,
                                 struct ds4_err *err)
{
    struct ds4_buf head;
    bool is_gguf;

    if (ds4_synth_is_path(path) && overlay == NULL)
        return load_gguf(path, err);
    ds4_buf_init(&head, MAGIC_BYTES);
    if (read_file(path, MAGIC_BYTES, &head, err)) {
        ds4_buf_deinit(&head);
        return NULL;
    }
    is_gguf = ds4_str_equal(ds4_buf_view(&head), DS4_STR(MAGIC));
    ds4_buf_deinit(&head);
    if (!is_gguf)
        return load_json(path, overlay, err);
    if (overlay != NULL) {
        ds4_fail(err, DS4_E_INVALID, "%s has all its tokens: added tokens cannot be laid over it",
                 path);
        return NULL;
    }
    return load_gguf(path, err);
}

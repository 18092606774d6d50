/* Files that break the container format: each is refused, and the message names what is wrong.
 *
 * The rule ids G01..G17 are those of the loader's robustness list.  Every case starts from bytes that
 * would be fine and breaks one thing. */
#include "common/gguf.h"

#include "common/weights_file.h"
#include "tests/support/gguf_writer.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#define MAX_BYTES ((size_t)1 << 28)
#define F32       0
#define Q8_0      8

static void expect_refused(const void *bytes, size_t n, const char *words)
{
    struct ds4_err err = {0};
    struct ds4_weights_file *wf;
    char path[32];
    int fd;

    ds4_gguf_memory_file(bytes, n, path, &fd);
    wf = ds4_weights_open(path, DS4_WEIGHTS_MMAP, &err);
    close(fd);
    if (wf != NULL)
        fail_msg("accepted; expected \"%s\"", words);
    assert_int_equal(err.code, DS4_E_CORRUPT);
    if (strstr(err.msg, words) == NULL)
        fail_msg("\"%s\" does not contain \"%s\"", err.msg, words);
}

static void expect_accepted(const void *bytes, size_t n)
{
    struct ds4_err err = {0};
    struct ds4_weights_file *wf;
    char path[32];
    int fd;

    ds4_gguf_memory_file(bytes, n, path, &fd);
    wf = ds4_weights_open(path, DS4_WEIGHTS_MMAP, &err);
    close(fd);
    if (wf == NULL)
        fail_msg("refused: %s", err.msg);
    ds4_weights_close(wf);
}

/* One metadata entry written by hand after the prefix; what follows is up to the caller. */
static struct ds4_buf one_kv(const char *key, uint32_t type)
{
    struct ds4_buf b;

    ds4_buf_init(&b, MAX_BYTES);
    ds4_gguf_put_prefix(&b, 0, 1);
    ds4_gguf_put_text(&b, key);
    ds4_gguf_put_u32(&b, type);
    return b;
}

static void refuse(struct ds4_buf *b, const char *words)
{
    expect_refused(b->ptr, b->len, words);
    ds4_buf_deinit(b);
}

static void accept(struct ds4_buf *b)
{
    expect_accepted(b->ptr, b->len);
    ds4_buf_deinit(b);
}

/* A tensor record by hand.  The file is padded with `tail` zero bytes. */
struct record {
    const char *name;
    uint32_t n_dims;
    uint64_t ne[6];
    uint32_t type;
    uint64_t offset;
};

static struct ds4_buf with_records(const struct record *r, size_t n, size_t tail)
{
    struct ds4_buf b;

    ds4_buf_init(&b, MAX_BYTES);
    ds4_gguf_put_prefix(&b, n, 0);
    for (size_t i = 0; i < n; i++) {
        ds4_gguf_put_text(&b, r[i].name);
        ds4_gguf_put_u32(&b, r[i].n_dims);
        for (uint32_t d = 0; d < r[i].n_dims && d < 6; d++)
            ds4_gguf_put_u64(&b, r[i].ne[d]);
        ds4_gguf_put_u32(&b, r[i].type);
        ds4_gguf_put_u64(&b, r[i].offset);
    }
    while (b.len % DS4_GGUF_ALIGNMENT != 0)
        assert_int_equal(ds4_buf_append_byte(&b, 0), 0);
    for (size_t i = 0; i < tail; i++)
        assert_int_equal(ds4_buf_append_byte(&b, 0), 0);
    return b;
}

static void refuse_record(struct record r, const char *words)
{
    struct ds4_buf b = with_records(&r, 1, 4096);

    refuse(&b, words);
}

/* ---- the cases --------------------------------------------------------------------------------- */

/* Metadata of every kind and two tensors: 0 bytes to one less than the header must all be refused. */
static void g01_every_truncation_is_refused(void **state)
{
    static const int64_t ne[] = {32, 3};
    static const int32_t numbers[] = {1, 2, 3};
    static const char *const texts[] = {"one", "", "three"};
    struct ds4_gguf_writer w;
    struct ds4_buf b;

    (void)state;
    ds4_gguf_writer_init(&w);
    ds4_gguf_write_u32(&w, "general.alignment", 32);
    ds4_gguf_write_text(&w, "general.name", "cut me");
    ds4_gguf_write_i32s(&w, "numbers", numbers, 3);
    ds4_gguf_write_texts(&w, "texts", texts, 3);
    ds4_gguf_write_bool(&w, "yes", 1);
    ds4_gguf_write_tensor(&w, "a.weight", F32, 2, ne);
    ds4_gguf_write_tensor(&w, "b.weight", Q8_0, 2, ne);
    ds4_buf_init(&b, MAX_BYTES);
    ds4_gguf_writer_header(&w, &b);
    for (size_t n = 0; n < b.len; n++)
        expect_refused(b.ptr, n, n < DS4_GGUF_PREFIX_BYTES ? "truncated at header" : "truncated");
    for (uint64_t i = 0; i < w.last_bytes; i++)
        assert_int_equal(ds4_buf_append_byte(&b, 0), 0);
    expect_accepted(b.ptr, b.len);
    expect_refused(b.ptr, b.len - 1, "b.weight");
    ds4_buf_deinit(&b);
    ds4_gguf_writer_deinit(&w);
}

static void g01_truncation_names_the_entry(void **state)
{
    struct ds4_buf b = one_kv("general.name", DS4_GGUF_U64);

    (void)state;
    ds4_gguf_put_u32(&b, 7); /* half of a u64 */
    refuse(&b, "metadata entry general.name: truncated at its value");
}

static void g02_magic_and_version(void **state)
{
    static const struct {
        const char *magic;
        uint32_t version;
        const char *words;
    } cases[] = {
        {"GGML", 3, "bad magic"},
        {"GGUF", 0, "version 0"},
        {"GGUF", 1, "version 1"},
        {"GGUF", 4, "version 4"},
        {"GGUF", 0x03000000, "byte-swapped"},
        {"GGUF", 0x02000000, "byte-swapped"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct ds4_buf b;

        ds4_buf_init(&b, MAX_BYTES);
        assert_int_equal(ds4_buf_append(&b, cases[i].magic, 4), 0);
        ds4_gguf_put_u32(&b, cases[i].version);
        ds4_gguf_put_u64(&b, 0);
        ds4_gguf_put_u64(&b, 0);
        refuse(&b, cases[i].words);
    }
}

static void version_2_has_the_same_layout(void **state)
{
    struct ds4_buf b = one_kv("general.name", DS4_GGUF_STRING);

    (void)state;
    ds4_gguf_put_text(&b, "old");
    b.ptr[4] = 2;
    accept(&b);
}

static void g03_huge_counts_are_refused_before_allocation(void **state)
{
    static const uint64_t counts[] = {UINT64_MAX, UINT64_C(1) << 63, UINT64_C(1) << 40, 1000000};

    (void)state;
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        struct ds4_buf b;

        ds4_buf_init(&b, MAX_BYTES);
        ds4_gguf_put_prefix(&b, counts[i], 0);
        refuse(&b, "tensor_count");
        ds4_buf_init(&b, MAX_BYTES);
        ds4_gguf_put_prefix(&b, 0, counts[i]);
        refuse(&b, "kv_count");
    }
}

static void g04_string_lengths(void **state)
{
    static const uint64_t lengths[] = {100, UINT64_MAX, UINT64_C(1) << 62};
    struct ds4_buf b;
    char path[32];
    struct ds4_err err = {0};
    int fd;

    (void)state;
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        b = one_kv("general.name", DS4_GGUF_STRING);
        ds4_gguf_put_u64(&b, lengths[i]);
        ds4_gguf_put_u64(&b, 0);
        refuse(&b, "general.name");
    }
    /* Above the limit although the (sparse) file is long enough. */
    b = one_kv("general.name", DS4_GGUF_STRING);
    ds4_gguf_put_u64(&b, DS4_GGUF_MAX_STRING_BYTES + 1u);
    ds4_gguf_memory_file(b.ptr, b.len, path, &fd);
    assert_int_equal(ftruncate(fd, (off_t)DS4_GGUF_MAX_STRING_BYTES + 4096), 0);
    assert_null(ds4_weights_open(path, DS4_WEIGHTS_PREAD, &err));
    assert_non_null(strstr(err.msg, "the limit is"));
    close(fd);
    ds4_buf_deinit(&b);
}

static void g05_keys(void **state)
{
    struct ds4_buf b = one_kv("", DS4_GGUF_U8);
    char *longest;

    (void)state;
    ds4_gguf_put_u64(&b, 0);
    refuse(&b, "key is empty");
    b = one_kv("caf\xc3\xa9", DS4_GGUF_U8);
    ds4_gguf_put_u64(&b, 0);
    refuse(&b, "printable ASCII");
    b = one_kv("new\nline", DS4_GGUF_U8);
    ds4_gguf_put_u64(&b, 0);
    refuse(&b, "printable ASCII");
    longest = calloc(1, DS4_GGUF_MAX_KEY_BYTES + 2);
    assert_non_null(longest);
    memset(longest, 'k', DS4_GGUF_MAX_KEY_BYTES + 1);
    b = one_kv(longest, DS4_GGUF_U8);
    ds4_gguf_put_u64(&b, 0);
    refuse(&b, "the key has a length of 65536 bytes, the limit is 65535");
    longest[DS4_GGUF_MAX_KEY_BYTES] = '\0';
    b = one_kv(longest, DS4_GGUF_U8);
    assert_int_equal(ds4_buf_append_byte(&b, 0), 0);
    accept(&b);
    free(longest);
}

static void g06_value_types(void **state)
{
    static const uint32_t types[] = {13, 0xffffffff};
    struct ds4_buf b;

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        b = one_kv("odd", types[i]);
        ds4_gguf_put_u64(&b, 0);
        refuse(&b, "odd: the value type is");
        b = one_kv("odd", DS4_GGUF_ARRAY);
        ds4_gguf_put_u32(&b, types[i]);
        ds4_gguf_put_u64(&b, 0);
        refuse(&b, "odd: the element type is");
    }
    b = one_kv("odd", DS4_GGUF_ARRAY);
    ds4_gguf_put_u32(&b, DS4_GGUF_ARRAY);
    ds4_gguf_put_u64(&b, 0);
    refuse(&b, "odd: arrays of arrays");
    b = one_kv("odd", DS4_GGUF_BOOL);
    assert_int_equal(ds4_buf_append_byte(&b, 2), 0);
    refuse(&b, "odd: a bool has the value 2");
    b = one_kv("odd", DS4_GGUF_ARRAY);
    ds4_gguf_put_u32(&b, DS4_GGUF_BOOL);
    ds4_gguf_put_u64(&b, 2);
    assert_int_equal(ds4_buf_append(&b, "\1\377", 2), 0);
    refuse(&b, "odd: a bool has the value 255");
}

static void g07_array_counts(void **state)
{
    static const uint64_t counts[] = {UINT64_MAX, UINT64_C(1) << 61, 5};
    static const uint32_t types[] = {DS4_GGUF_U64, DS4_GGUF_STRING, DS4_GGUF_F64};

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        for (size_t k = 0; k < 3; k++) {
            struct ds4_buf b = one_kv("list", DS4_GGUF_ARRAY);

            ds4_gguf_put_u32(&b, types[k]);
            ds4_gguf_put_u64(&b, counts[i]);
            ds4_gguf_put_u64(&b, 0); /* room for one element only */
            refuse(&b, "metadata entry list:");
        }
    }
}

static void g08_duplicate_key(void **state)
{
    struct ds4_gguf_writer w;
    struct ds4_buf b;

    (void)state;
    ds4_gguf_writer_init(&w);
    ds4_gguf_write_u32(&w, "twice", 1);
    ds4_gguf_write_u32(&w, "once", 1);
    ds4_gguf_write_text(&w, "twice", "2");
    ds4_buf_init(&b, MAX_BYTES);
    ds4_gguf_writer_header(&w, &b);
    refuse(&b, "key twice occurs twice");
    ds4_gguf_writer_deinit(&w);
}

static void g09_alignment(void **state)
{
    static const uint32_t values[] = {0, 1, 4, 24, 33, 131072, 0x80000000};
    static const uint32_t good[] = {8, 16, 64, 65536};
    struct ds4_buf b;

    (void)state;
    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
        b = one_kv("general.alignment", DS4_GGUF_U32);
        ds4_gguf_put_u32(&b, values[i]);
        refuse(&b, "general.alignment is");
    }
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        b = one_kv("general.alignment", DS4_GGUF_U32);
        ds4_gguf_put_u32(&b, good[i]);
        accept(&b);
    }
    b = one_kv("general.alignment", DS4_GGUF_U64);
    ds4_gguf_put_u64(&b, 32);
    refuse(&b, "general.alignment must be u32");
}

static void g10_number_of_dimensions(void **state)
{
    (void)state;
    refuse_record((struct record){"none", 0, {0}, F32, 0}, "tensor none: it has 0 dimensions");
    refuse_record((struct record){"five", 5, {1, 1, 1, 1, 1}, F32, 0}, "tensor five: it has 5");
    refuse_record((struct record){"huge", 0xffffffff, {1}, F32, 0}, "tensor huge: it has");
}

static void g11_dimensions(void **state)
{
    (void)state;
    refuse_record((struct record){"zero", 2, {4, 0}, F32, 0}, "tensor zero: dimension 1 is 0");
    refuse_record((struct record){"sign", 1, {UINT64_C(1) << 63}, F32, 0},
                  "tensor sign: dimension");
    refuse_record((struct record){"product", 3, {1u << 31, 1u << 31, 1u << 31}, F32, 0},
                  "tensor product: the number of its elements overflows");
    refuse_record((struct record){"bytes", 2, {UINT64_C(1) << 40, 1u << 22}, 28 /* F64 */, 0},
                  "tensor bytes: ");
}

static void g12_rows_are_whole_blocks(void **state)
{
    (void)state;
    refuse_record((struct record){"odd", 2, {33, 2}, Q8_0, 0},
                  "tensor odd: its rows of 33 values are no multiple of Q8_0's block of 32");
    refuse_record((struct record){"small", 1, {128}, 10, 0}, "Q2_K");
}

/* Such a tensor is listed, but unusable: only a model that needs it fails. */
static void g13_unknown_types_are_unusable_not_fatal(void **state)
{
    static const uint32_t types[] = {4, 5, 31, 33, 36, 38, 40, 42, 43, 1000, 0xffffffff};
    struct ds4_err err = {0};

    (void)state;
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        struct record r = {"odd", 1, {7}, types[i], 0};
        struct ds4_buf b = with_records(&r, 1, 64);
        const struct ds4_tensor_info *info;
        struct ds4_weights_file *wf;
        char path[32];
        int fd;

        ds4_gguf_memory_file(b.ptr, b.len, path, &fd);
        wf = ds4_weights_open(path, DS4_WEIGHTS_MMAP, &err);
        assert_non_null(wf);
        info = ds4_weights_find(wf, "odd");
        assert_non_null(info);
        assert_false(info->usable);
        assert_int_equal(info->bytes, 0);
        assert_null(ds4_weights_data(wf, info, &err));
        assert_non_null(strstr(err.msg, "tensor odd"));
        ds4_weights_close(wf);
        close(fd);
        ds4_buf_deinit(&b);
    }
}

static void g14_offsets(void **state)
{
    (void)state;
    refuse_record((struct record){"shift", 1, {8}, F32, 8}, "tensor shift: its offset 8");
    refuse_record((struct record){"wrap", 1, {8}, F32, UINT64_MAX - 31}, "tensor wrap: its offset");
    refuse_record((struct record){"past", 1, {1024}, F32, 32},
                  "tensor past: truncated: its 4096 bytes");
    refuse_record((struct record){"far", 1, {8}, F32, UINT64_C(1) << 40},
                  "tensor far: truncated: its 32");
    refuse_record((struct record){"unknown", 1, {8}, 99, UINT64_C(1) << 40}, "tensor unknown: ");
}

static void g15_overlaps(void **state)
{
    static const struct record same[] = {{"a", 1, {8}, F32, 0}, {"b", 1, {8}, F32, 0}};
    static const struct record inside[] = {{"big", 1, {64}, F32, 0}, {"in", 1, {8}, F32, 64}};
    static const struct record odd[] = {{"big", 1, {64}, F32, 0}, {"in", 1, {8}, 99, 64}};
    struct ds4_buf b = with_records(same, 2, 4096);

    (void)state;
    refuse(&b, "overlap");
    b = with_records(inside, 2, 4096);
    refuse(&b, "tensors big and in overlap");
    b = with_records(odd, 2, 4096);
    refuse(&b, "tensors big and in overlap");
}

static void holes_and_reordering_are_legal_and_counted(void **state)
{
    static const struct record r[] = {
        {"late", 1, {8}, F32, 1024},
        {"first", 1, {8}, F32, 0},
        {"second", 1, {3}, F32, 32},
    };
    struct ds4_buf b = with_records(r, 3, 2048);
    struct ds4_err err = {0};
    struct ds4_gguf gguf;
    char path[32];
    int fd;

    (void)state;
    ds4_gguf_memory_file(b.ptr, b.len, path, &fd);
    assert_int_equal(ds4_gguf_read(fd, &gguf, &err), 0);
    assert_int_equal(gguf.n_reordered, 1);
    assert_int_equal(gguf.n_holes, 1);
    ds4_gguf_deinit(&gguf);
    close(fd);
    ds4_buf_deinit(&b);
}

static void g16_names(void **state)
{
    static const struct record twice[] = {{"same", 1, {8}, F32, 0}, {"same", 1, {8}, F32, 32}};
    struct ds4_buf b = with_records(twice, 2, 4096);
    char name[DS4_TENSOR_NAME_BYTES + 1];

    (void)state;
    refuse(&b, "tensor same occurs twice");
    refuse_record((struct record){"", 1, {8}, F32, 0}, "tensor 0: the name is empty");
    refuse_record((struct record){"a\tb", 1, {8}, F32, 0}, "printable ASCII");
    memset(name, 'n', sizeof(name));
    name[DS4_TENSOR_NAME_BYTES] = '\0';
    refuse_record((struct record){name, 1, {8}, F32, 0}, "the name has a length of 64 bytes");
    name[DS4_TENSOR_NAME_BYTES - 1] = '\0';
    b = with_records(&(struct record){name, 1, {8}, F32, 0}, 1, 64);
    accept(&b);
}

/* The table is whole, but the file ends before the data section begins. */
static void g17_data_section_past_the_end(void **state)
{
    static const struct record r = {"a", 1, {8}, F32, 0};
    struct ds4_buf b = with_records(&r, 1, 0);

    (void)state;
    expect_refused(b.ptr, b.len - 1, "the data section begins at");
    refuse(&b, "tensor a");
}

static void a_file_without_tensors_is_legal(void **state)
{
    struct ds4_buf b;

    (void)state;
    ds4_buf_init(&b, MAX_BYTES);
    ds4_gguf_put_prefix(&b, 0, 0);
    accept(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(g01_every_truncation_is_refused),
        cmocka_unit_test(g01_truncation_names_the_entry),
        cmocka_unit_test(g02_magic_and_version),
        cmocka_unit_test(version_2_has_the_same_layout),
        cmocka_unit_test(g03_huge_counts_are_refused_before_allocation),
        cmocka_unit_test(g04_string_lengths),
        cmocka_unit_test(g05_keys),
        cmocka_unit_test(g06_value_types),
        cmocka_unit_test(g07_array_counts),
        cmocka_unit_test(g08_duplicate_key),
        cmocka_unit_test(g09_alignment),
        cmocka_unit_test(g10_number_of_dimensions),
        cmocka_unit_test(g11_dimensions),
        cmocka_unit_test(g12_rows_are_whole_blocks),
        cmocka_unit_test(g13_unknown_types_are_unusable_not_fatal),
        cmocka_unit_test(g14_offsets),
        cmocka_unit_test(g15_overlaps),
        cmocka_unit_test(holes_and_reordering_are_legal_and_counted),
        cmocka_unit_test(g16_names),
        cmocka_unit_test(g17_data_section_past_the_end),
        cmocka_unit_test(a_file_without_tensors_is_legal),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Model files as wholes: reading, split sets, files that shrink under the reader. */
#include "common/weights_file.h"

#include "tests/support/gguf_writer.h"

#include <fcntl.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define TINY      "tests/data/ds4-tiny.gguf"
#define N_SHARD   3
#define PATH_SIZE 256

/* A folder of its own per test. */
struct folder {
    char dir[64];
};

static int make_folder(void **state)
{
    struct folder *f = calloc(1, sizeof(*f));

    if (f == NULL)
        return -1;
    snprintf(f->dir, sizeof(f->dir), "/tmp/ds4-test-weights-XXXXXX");
    *state = f;
    return mkdtemp(f->dir) == NULL ? -1 : 0;
}

static int remove_folder(void **state)
{
    struct folder *f = *state;
    char path[PATH_SIZE];

    for (int i = 0; i <= N_SHARD; i++) {
        snprintf(path, sizeof(path), "%s/m-%05d-of-%05d.gguf", f->dir, i, N_SHARD);
        unlink(path);
    }
    snprintf(path, sizeof(path), "%s/one.gguf", f->dir);
    unlink(path);
    rmdir(f->dir);
    free(f);
    return 0;
}

static void shard_path(const struct folder *f, int number, char path[PATH_SIZE])
{
    snprintf(path, PATH_SIZE, "%s/m-%05d-of-%05d.gguf", f->dir, number, N_SHARD);
}

/* What one file of a set says and holds; the defaults make a correct set. */
struct shard_text {
    int no;
    int count;
    int total;
    const char *tensor[2];
};

static void write_shard(const struct folder *f, int number, const struct shard_text *text)
{
    static const int64_t ne[] = {32, 4};
    struct ds4_gguf_writer w;
    char path[PATH_SIZE];

    ds4_gguf_writer_init(&w);
    if (number == 1)
        ds4_gguf_write_text(&w, "general.name", "in three parts");
    ds4_gguf_write_u16(&w, "split.no", (uint16_t)text->no);
    ds4_gguf_write_u16(&w, "split.count", (uint16_t)text->count);
    ds4_gguf_write_i32(&w, "split.tensors.count", text->total);
    for (int i = 0; i < 2; i++) {
        if (text->tensor[i] != NULL)
            ds4_gguf_write_tensor(&w, text->tensor[i], 0, 2, ne);
    }
    shard_path(f, number, path);
    ds4_gguf_writer_save(&w, path);
    ds4_gguf_writer_deinit(&w);
}

static const struct shard_text good_set[N_SHARD] = {
    {0, N_SHARD, 3, {NULL, NULL}}, /* metadata only: legal */
    {1, N_SHARD, 3, {"a", "b"}},
    {2, N_SHARD, 3, {"c", NULL}},
};

static void write_set(const struct folder *f, const struct shard_text set[N_SHARD])
{
    for (int i = 0; i < N_SHARD; i++)
        write_shard(f, i + 1, &set[i]);
}

static void expect_open_fails(const char *path, const char *words)
{
    struct ds4_err err = {0};
    struct ds4_weights_file *wf = ds4_weights_open(path, DS4_WEIGHTS_MMAP, &err);

    if (wf != NULL)
        fail_msg("opened; expected \"%s\"", words);
    if (strstr(err.msg, words) == NULL)
        fail_msg("\"%s\" does not contain \"%s\"", err.msg, words);
}

/* ---- one file ---------------------------------------------------------------------------------- */

static void tiny_reads_the_same_mapped_and_by_pread(void **state)
{
    struct ds4_err err = {0};
    struct ds4_weights_file *mapped = ds4_weights_open(TINY, DS4_WEIGHTS_MMAP, &err);
    struct ds4_weights_file *plain = ds4_weights_open(TINY, DS4_WEIGHTS_PREAD, &err);
    const struct ds4_tensor_info *info;
    const uint8_t *data;
    uint8_t *copy;

    (void)state;
    assert_non_null(mapped);
    assert_non_null(plain);
    info = ds4_weights_find(mapped, "blk.3.attn_q_a.weight");
    assert_non_null(info);
    assert_true(info->usable);
    assert_int_equal(info->dtype, DS4_DTYPE_Q8_0);
    assert_int_equal(info->n_dims, 2);
    assert_int_equal(info->ne[0], 256);
    assert_int_equal(info->ne[1], 256);
    assert_int_equal(info->ne[2], 1);
    assert_int_equal(info->bytes, 256 * 256 / 32 * 34);
    data = ds4_weights_data(mapped, info, &err);
    assert_non_null(data);
    assert_int_equal((uintptr_t)data % 32, 0);
    copy = malloc((size_t)info->bytes);
    assert_non_null(copy);
    assert_int_equal(ds4_weights_read(plain, ds4_weights_find(plain, info->name), 0,
                                      (size_t)info->bytes, copy, &err),
                     0);
    assert_memory_equal(copy, data, (size_t)info->bytes);
    assert_int_equal(ds4_weights_read(plain, info, 100, 10, copy, &err), 0);
    assert_memory_equal(copy, data + 100, 10);
    assert_null(ds4_weights_data(plain, info, &err));
    assert_int_equal(err.code, DS4_E_BUG);
    free(copy);
    ds4_weights_close(mapped);
    ds4_weights_close(plain);
}

static void a_read_outside_the_tensor_is_refused(void **state)
{
    struct ds4_err err = {0};
    struct ds4_weights_file *wf = ds4_weights_open(TINY, DS4_WEIGHTS_PREAD, &err);
    const struct ds4_tensor_info *info;
    char byte[4];

    (void)state;
    assert_non_null(wf);
    info = ds4_weights_find(wf, "output_norm.weight");
    assert_non_null(info);
    assert_int_equal(ds4_weights_read(wf, info, info->bytes, 0, byte, &err), 0);
    assert_int_equal(ds4_weights_read(wf, info, info->bytes, 1, byte, &err), -1);
    assert_int_equal(ds4_weights_read(wf, info, info->bytes - 3, 4, byte, &err), -1);
    assert_int_equal(ds4_weights_read(wf, info, UINT64_MAX, 2, byte, &err), -1);
    assert_int_equal(err.code, DS4_E_INVALID);
    assert_non_null(strstr(err.msg, "output_norm.weight"));
    ds4_weights_close(wf);
}

static void names_are_found_exactly(void **state)
{
    struct ds4_err err = {0};
    struct ds4_weights_file *wf = ds4_weights_open(TINY, DS4_WEIGHTS_PREAD, &err);

    (void)state;
    assert_non_null(wf);
    for (size_t i = 0; i < ds4_weights_n_tensor(wf); i++) {
        const struct ds4_tensor_info *info = ds4_weights_at(wf, i);

        assert_ptr_equal(ds4_weights_find(wf, info->name), info);
    }
    assert_null(ds4_weights_find(wf, ""));
    assert_null(ds4_weights_find(wf, "blk.3.attn_q_a"));
    assert_null(ds4_weights_find(wf, "blk.3.attn_q_a.weight2"));
    assert_null(ds4_weights_find(wf, "zzz"));
    ds4_weights_close(wf);
}

static void token_strings_are_reached_by_index(void **state)
{
    struct ds4_err err = {0};
    struct ds4_weights_file *wf = ds4_weights_open(TINY, DS4_WEIGHTS_PREAD, &err);
    const struct ds4_gguf *meta;
    const struct ds4_gguf_kv *tokens;
    const struct ds4_gguf_kv *merges;

    (void)state;
    assert_non_null(wf);
    meta = ds4_weights_meta(wf);
    tokens = ds4_gguf_get_strings(meta, "tokenizer.ggml.tokens", &err);
    merges = ds4_gguf_get_strings(meta, "tokenizer.ggml.merges", &err);
    assert_non_null(tokens);
    assert_non_null(merges);
    assert_int_equal(tokens->n, 4096);
    assert_int_equal(merges->n, 3821);
    assert_true(ds4_str_equal(ds4_gguf_str_at(tokens, 0), DS4_STR("<｜begin▁of▁sentence｜>")));
    assert_true(ds4_str_equal(ds4_gguf_str_at(tokens, 3), DS4_STR("!")));
    assert_true(ds4_str_equal(ds4_gguf_str_at(merges, 0), DS4_STR("i n")));
    assert_true(ds4_str_equal(ds4_gguf_str_at(merges, 9), DS4_STR("r e")));
    ds4_weights_close(wf);
}

static void getters_take_any_width_and_name_the_key(void **state)
{
    static const int32_t list[] = {4, -5};
    static const float floats[] = {1.5f};
    struct ds4_err err = {0};
    struct ds4_gguf_writer w;
    struct ds4_buf b;
    struct ds4_gguf g;
    struct ds4_str s;
    char path[32];
    int32_t i32 = 7;
    int64_t i64;
    uint64_t u64;
    float f32;
    bool yes;
    int fd;

    (void)state;
    ds4_gguf_writer_init(&w);
    ds4_gguf_write_u16(&w, "u16", 65535);
    ds4_gguf_write_i32(&w, "i32", -3);
    ds4_gguf_write_u64(&w, "u64", UINT64_MAX);
    ds4_gguf_write_f32(&w, "f32", 0.5f);
    ds4_gguf_write_f32(&w, "nan", __builtin_nanf(""));
    ds4_gguf_write_bool(&w, "bool", 1);
    ds4_gguf_write_u32(&w, "one", 1);
    ds4_gguf_write_text(&w, "text", "t");
    ds4_gguf_write_i32s(&w, "ints", list, 2);
    ds4_gguf_write_f32s(&w, "floats", floats, 1);
    ds4_buf_init(&b, 1 << 20);
    ds4_gguf_writer_header(&w, &b);
    ds4_gguf_memory_file(b.ptr, b.len, path, &fd);
    assert_int_equal(ds4_gguf_read(fd, &g, &err), 0);

    assert_int_equal(ds4_gguf_get_i32(&g, "u16", 0, 65535, &i32, &err), 0);
    assert_int_equal(i32, 65535);
    assert_int_equal(ds4_gguf_get_i32(&g, "i32", -3, 0, &i32, &err), 0);
    assert_int_equal(i32, -3);
    assert_int_equal(ds4_gguf_get_i32(&g, "i32", 0, 9, &i32, &err), -1);
    assert_non_null(strstr(err.msg, "key i32 is -3, must be in [0, 9]"));
    assert_int_equal(i32, -3); /* untouched */
    assert_int_equal(ds4_gguf_get_i64(&g, "u64", 0, 100, &i64, &err), -1);
    assert_int_equal(ds4_gguf_get_u64(&g, "u64", &u64, &err), 0);
    assert_true(u64 == UINT64_MAX);
    assert_int_equal(ds4_gguf_get_u64(&g, "i32", &u64, &err), -1);
    assert_int_equal(ds4_gguf_get_f32(&g, "f32", &f32, &err), 0);
    assert_true(f32 == 0.5f);
    assert_int_equal(ds4_gguf_get_f32(&g, "nan", &f32, &err), -1);
    assert_non_null(strstr(err.msg, "nan"));
    assert_int_equal(ds4_gguf_get_f32(&g, "one", &f32, &err), -1);
    assert_int_equal(ds4_gguf_get_bool(&g, "bool", &yes, &err), 0);
    assert_true(yes);
    assert_int_equal(ds4_gguf_get_bool(&g, "one", &yes, &err), 0);
    assert_int_equal(ds4_gguf_get_bool(&g, "u16", &yes, &err), -1);
    assert_int_equal(ds4_gguf_get_str(&g, "text", &s, &err), 0);
    assert_true(ds4_str_equal(s, DS4_STR("t")));
    assert_int_equal(ds4_gguf_get_str(&g, "one", &s, &err), -1);
    assert_non_null(strstr(err.msg, "key one must be a string, is u32"));
    assert_int_equal(ds4_gguf_get_i32(&g, "ints", 0, 9, &i32, &err), -1);
    assert_non_null(ds4_gguf_get_ints(&g, "ints", &err));
    assert_int_equal(ds4_gguf_int_at(ds4_gguf_find(&g, "ints"), 1), -5);
    assert_null(ds4_gguf_get_ints(&g, "floats", &err));
    assert_null(ds4_gguf_get_strings(&g, "ints", &err));
    assert_true(ds4_gguf_float_at(ds4_gguf_get_floats(&g, "floats", &err), 0) == 1.5);
    assert_int_equal(ds4_gguf_get_i32(&g, "absent", 0, 9, &i32, &err), -1);
    assert_non_null(strstr(err.msg, "key absent is missing"));
    ds4_gguf_deinit(&g);
    ds4_buf_deinit(&b);
    ds4_gguf_writer_deinit(&w);
    close(fd);
}

static void what_is_no_file_is_refused(void **state)
{
    const struct folder *f = *state;
    char path[PATH_SIZE];

    expect_open_fails(f->dir, "no regular file");
    snprintf(path, sizeof(path), "%s/one.gguf", f->dir);
    expect_open_fails(path, "one.gguf: could not open");
    assert_int_equal(mkfifo(path, 0600), 0);
    expect_open_fails(path, "no regular file"); /* and does not hang */
}

/* ---- G22: the file shrinks --------------------------------------------------------------------- */

static void copy_tiny(const char *path)
{
    static uint8_t bytes[1 << 16];
    FILE *in = fopen(TINY, "rb");
    FILE *out = fopen(path, "wb");
    size_t n;

    assert_non_null(in);
    assert_non_null(out);
    while ((n = fread(bytes, 1, sizeof(bytes), in)) > 0)
        assert_int_equal(fwrite(bytes, 1, n, out), n);
    fclose(in);
    assert_int_equal(fclose(out), 0);
}

static void g22_a_shrunken_file_is_an_error_not_a_signal(void **state)
{
    const struct folder *f = *state;
    struct ds4_err err = {0};
    struct ds4_weights_file *wf;
    const struct ds4_tensor_info *info;
    static uint8_t bytes[64];
    char path[PATH_SIZE];

    snprintf(path, sizeof(path), "%s/one.gguf", f->dir);
    copy_tiny(path);
    wf = ds4_weights_open(path, DS4_WEIGHTS_MMAP, &err);
    assert_non_null(wf);
    info = ds4_weights_find(wf, "blk.7.ffn_down_shexp.weight"); /* the last in the file */
    assert_non_null(info);
    assert_int_equal(truncate(path, 1 << 20), 0);
    assert_null(ds4_weights_data(wf, info, &err));
    assert_int_equal(err.code, DS4_E_IO);
    assert_non_null(strstr(err.msg, "blk.7.ffn_down_shexp.weight: the file shrank"));
    assert_int_equal(ds4_weights_read(wf, info, 0, sizeof(bytes), bytes, &err), -1);
    assert_int_equal(err.code, DS4_E_IO);
    /* Metadata is a copy and survives. */
    assert_true(ds4_gguf_has(ds4_weights_meta(wf), "general.name"));
    ds4_weights_close(wf);
}

static void g22_a_fault_in_the_mapping_ends_the_process_with_78(void **state)
{
    const struct folder *f = *state;
    char path[PATH_SIZE];
    int status;
    pid_t child;

    snprintf(path, sizeof(path), "%s/one.gguf", f->dir);
    copy_tiny(path);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct ds4_err err = {0};
        struct ds4_weights_file *wf = ds4_weights_open(path, DS4_WEIGHTS_MMAP, &err);
        const struct ds4_tensor_info *info;
        const volatile uint8_t *data;

        if (wf == NULL || ds4_weights_sigbus_install(&err))
            _exit(1);
        info = ds4_weights_find(wf, "blk.7.ffn_down_shexp.weight");
        data = info == NULL ? NULL : ds4_weights_data(wf, info, &err);
        if (data == NULL || truncate(path, 1 << 20) != 0)
            _exit(2);
        (void)data[0]; /* SIGBUS */
        _exit(3);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), DS4_WEIGHTS_EXIT_SIGBUS);
}

/* ---- split sets (G23) -------------------------------------------------------------------------- */

static void any_file_of_a_set_opens_all_of_it(void **state)
{
    const struct folder *f = *state;
    struct ds4_err err = {0};
    char path[PATH_SIZE];
    struct ds4_str name;

    write_set(f, good_set);
    for (int number = 1; number <= N_SHARD; number++) {
        struct ds4_weights_file *wf;

        shard_path(f, number, path);
        wf = ds4_weights_open(path, DS4_WEIGHTS_MMAP, &err);
        if (wf == NULL)
            fail_msg("%s", err.msg);
        assert_int_equal(ds4_weights_n_shard(wf), N_SHARD);
        assert_int_equal(ds4_weights_n_tensor(wf), 3);
        assert_int_equal(ds4_weights_find(wf, "b")->shard, 1);
        assert_int_equal(ds4_weights_find(wf, "c")->shard, 2);
        assert_non_null(ds4_weights_data(wf, ds4_weights_find(wf, "c"), &err));
        assert_int_equal(ds4_gguf_get_str(ds4_weights_meta(wf), "general.name", &name, &err), 0);
        assert_true(ds4_str_equal(name, DS4_STR("in three parts")));
        ds4_weights_close(wf);
    }
}

static void g23_a_missing_file_of_the_set(void **state)
{
    const struct folder *f = *state;
    char first[PATH_SIZE];
    char third[PATH_SIZE];

    write_set(f, good_set);
    shard_path(f, 1, first);
    shard_path(f, 3, third);
    assert_int_equal(unlink(third), 0);
    expect_open_fails(first, "incomplete split set of 3 files: m-00003-of-00003.gguf");
}

static void g23_wrong_numbers_and_counts(void **state)
{
    const struct folder *f = *state;
    struct shard_text set[N_SHARD];
    char path[PATH_SIZE];

    shard_path(f, 1, path);
    memcpy(set, good_set, sizeof(set));
    set[2].no = 1;
    write_set(f, set);
    expect_open_fails(path, "m-00003-of-00003.gguf: split.no 1 of 3, expected 2 of 3");
    memcpy(set, good_set, sizeof(set));
    set[1].count = 4;
    write_set(f, set);
    expect_open_fails(path, "m-00002-of-00003.gguf: split.no 1 of 4, expected 1 of 3");
    set[1].count = 1;
    write_set(f, set);
    expect_open_fails(path, "m-00002-of-00003.gguf: split.no 0 of 1, expected 1 of 3");
    memcpy(set, good_set, sizeof(set));
    set[0].count = 2;
    write_set(f, set);
    expect_open_fails(path, "a set of 2 files, the name says 3");
    set[0].count = 5000;
    write_set(f, set);
    expect_open_fails(path, "split.count is 5000");
    set[0].count = 3;
    set[0].no = 3;
    write_set(f, set);
    expect_open_fails(path, "split.no is 3");
}

static void g23_wrong_total_and_duplicates(void **state)
{
    const struct folder *f = *state;
    struct shard_text set[N_SHARD];
    char path[PATH_SIZE];

    shard_path(f, 1, path);
    memcpy(set, good_set, sizeof(set));
    set[0].total = 4;
    write_set(f, set);
    expect_open_fails(path, "the split set has 3 tensors, split.tensors.count says 4");
    memcpy(set, good_set, sizeof(set));
    set[2].tensor[0] = "a";
    write_set(f, set);
    expect_open_fails(path, "tensor a occurs in files");
}

static void g23_a_set_needs_its_names(void **state)
{
    const struct folder *f = *state;
    char from[PATH_SIZE];
    char to[PATH_SIZE];

    write_set(f, good_set);
    shard_path(f, 1, from);
    snprintf(to, sizeof(to), "%s/one.gguf", f->dir);
    assert_int_equal(rename(from, to), 0);
    expect_open_fails(to, "one.gguf: the metadata says a set of 3 files");
}

#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, make_folder, remove_folder)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiny_reads_the_same_mapped_and_by_pread),
        cmocka_unit_test(a_read_outside_the_tensor_is_refused),
        cmocka_unit_test(names_are_found_exactly),
        cmocka_unit_test(token_strings_are_reached_by_index),
        cmocka_unit_test(getters_take_any_width_and_name_the_key),
        IN_FOLDER(what_is_no_file_is_refused),
        IN_FOLDER(g22_a_shrunken_file_is_an_error_not_a_signal),
        IN_FOLDER(g22_a_fault_in_the_mapping_ends_the_process_with_78),
        IN_FOLDER(any_file_of_a_set_opens_all_of_it),
        IN_FOLDER(g23_a_missing_file_of_the_set),
        IN_FOLDER(g23_wrong_numbers_and_counts),
        IN_FOLDER(g23_wrong_total_and_duplicates),
        IN_FOLDER(g23_a_set_needs_its_names),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

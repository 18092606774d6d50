/* The checker: silent on a good file, one finding per broken thing, all of them. */
#include "worker/gguf_check.h"

#include "tests/support/gguf_writer.h"
#include "worker/gguf_info.h"
#include "worker/gguf_synth.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#define TINY "tests/data/ds4-tiny.gguf"

static char path[64];

static int make_synth(void **state)
{
    struct ds4_gguf_synth request = {"tiny", "q2", 0, -1, 1};
    struct ds4_err err = {0};
    int fd;

    (void)state;
    snprintf(path, sizeof(path), "/tmp/ds4-test-check-XXXXXX");
    fd = mkstemp(path);
    if (fd < 0)
        return -1;
    close(fd);
    return ds4_gguf_synth_write(&request, path, &err);
}

static int remove_synth(void **state)
{
    (void)state;
    return unlink(path);
}

/* Findings, one per line. */
static void collect(void *arg, const struct ds4_err *finding)
{
    struct ds4_buf *out = arg;

    assert_int_equal(ds4_buf_appendf(out, "%s\n", finding->msg), 0);
}

static void expect_findings(int32_t n, bool tensors, const char *words)
{
    struct ds4_buf out;
    int32_t got;

    ds4_buf_init(&out, 1 << 20);
    got = ds4_gguf_check(path, tensors, collect, &out);
    if (got != n || (words != NULL && strstr(out.ptr, words) == NULL))
        fail_msg("%d findings, expected %d with \"%s\":\n%s", got, n, words == NULL ? "" : words,
                 out.ptr == NULL ? "" : out.ptr);
    ds4_buf_deinit(&out);
}

/* Overwrites bytes of a tensor. */
static void patch(const char *tensor, uint64_t offset, const void *bytes, size_t n)
{
    struct ds4_err err = {0};
    struct ds4_weights_file *wf = ds4_weights_open(path, DS4_WEIGHTS_PREAD, &err);
    const struct ds4_tensor_info *info;
    int fd = open(path, O_WRONLY);

    assert_non_null(wf);
    assert_true(fd >= 0);
    info = ds4_weights_find(wf, tensor);
    assert_non_null(info);
    assert_int_equal(pwrite(fd, bytes, n, (off_t)(info->offset + offset)), n);
    close(fd);
    ds4_weights_close(wf);
}

static void the_test_model_has_no_findings(void **state)
{
    (void)state;
    snprintf(path, sizeof(path), TINY);
    expect_findings(0, true, NULL);
}

/* One case per block format that the recipe has, and per field that can be no number. */
static void g24_scales_that_are_no_number(void **state)
{
    static const uint8_t nan16[] = {0x01, 0x7e};
    static const uint8_t inf16[] = {0x00, 0xfc};
    static const uint8_t nan32[] = {0x00, 0x00, 0xc0, 0x7f};
    static const uint8_t big32[] = {0xff, 0xff, 0x7f, 0x7f}; /* the largest number is one */

    (void)state;
    patch("blk.0.attn_norm.weight", 0, big32, 4);
    expect_findings(0, true, NULL);
    patch("blk.1.attn_norm.weight", 12, nan32, 4);
    expect_findings(1, true, "tensor blk.1.attn_norm.weight: value 3 is NaN or infinite (1 of 256");
    expect_findings(0, false, NULL); /* only when asked */
    patch("blk.2.attn_kv.weight", 34 * 7, inf16, 2);
    expect_findings(2, true, "tensor blk.2.attn_kv.weight: the scale of block 7");
    patch("blk.2.ffn_gate_exps.weight", 66 * 5, nan16, 2);
    expect_findings(3, true, "tensor blk.2.ffn_gate_exps.weight: the scale of block 5");
    patch("blk.2.ffn_down_exps.weight", 84 * 9 + 80, nan16, 2);
    patch("blk.2.ffn_down_exps.weight", 84 * 11 + 82, inf16, 2);
    expect_findings(4, true,
                    "tensor blk.2.ffn_down_exps.weight: the scale of block 9 is NaN or "
                    "infinite (2 of 2048");
    patch("token_embd.weight", 2 * 300, nan16, 2);
    expect_findings(5, true, "tensor token_embd.weight: value 300");
}

static void g24_codes_are_not_mistaken_for_scales(void **state)
{
    static const uint8_t ones[66 - 2] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff};

    (void)state;
    patch("blk.2.ffn_gate_exps.weight", 2, ones, sizeof(ones));
    patch("blk.2.ffn_down_exps.weight", 0, ones, sizeof(ones));
    patch("blk.2.attn_kv.weight", 2, ones, 32);
    expect_findings(0, true, NULL);
}

static void g24_e8m0_255(void **state)
{
    struct ds4_gguf_synth request = {"tiny", "mxfp4", 4, 4, 1};
    struct ds4_err err = {0};

    (void)state;
    assert_int_equal(ds4_gguf_synth_write(&request, path, &err), 0);
    expect_findings(0, true, NULL);
    patch("blk.4.ffn_up_exps.weight", 17 * 20, "\xff", 1);
    expect_findings(1, true, "tensor blk.4.ffn_up_exps.weight: the scale of block 20");
}

static void g25_hash_tables_are_checked_without_asking(void **state)
{
    static const uint8_t nine[] = {9, 0, 0, 0};

    (void)state;
    patch("blk.1.ffn_gate_tid2eid.weight", 4 * 77, nine, 4);
    expect_findings(1, false, "tensor blk.1.ffn_gate_tid2eid.weight: entry 77 is expert 9");
}

static void a_broken_container_is_one_finding(void **state)
{
    (void)state;
    assert_int_equal(truncate(path, 4096), 0);
    expect_findings(1, true, "truncated");
    assert_int_equal(truncate(path, 0), 0);
    expect_findings(1, true, "truncated at header");
}

static void a_file_of_another_kind_is_named(void **state)
{
    struct ds4_gguf_writer w;

    (void)state;
    ds4_gguf_writer_init(&w);
    ds4_gguf_write_text(&w, "general.architecture", "llama");
    ds4_gguf_writer_save(&w, path);
    ds4_gguf_writer_deinit(&w);
    expect_findings(1, false, "general.architecture is \"llama\"");
}

/* ---- info -------------------------------------------------------------------------------------- */

static char *print_info(const char *file)
{
    struct ds4_err err = {0};
    char *text = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&text, &n);

    assert_non_null(out);
    if (ds4_gguf_print_info(file, out, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(fclose(out), 0);
    return text;
}

static void info_shows_metadata_tensors_sums_and_release(void **state)
{
    char *text = print_info(TINY);

    (void)state;
    assert_non_null(strstr(text, "deepseek4.block_count = 8\n"));
    assert_non_null(strstr(text, "compress_ratios = i32[8] {0, 0, 4, 128, 4, 128, 4, 128}\n"));
    assert_non_null(
        strstr(text, "tokenizer.ggml.tokens = string[4096] {\"<｜begin▁of▁sentence｜>\""));
    assert_non_null(strstr(text, "blk.3.attn_compressor_ape.weight"));
    assert_non_null(strstr(text, "64x128"));
    assert_non_null(strstr(text, "release: the file does not say"));
    free(text);
}

static void info_escapes_what_a_terminal_would_obey(void **state)
{
    struct ds4_gguf_writer w;
    char *text;

    (void)state;
    ds4_gguf_writer_init(&w);
    ds4_gguf_write_text(&w, "general.name", "\033[2Jred\n");
    ds4_gguf_writer_save(&w, path);
    ds4_gguf_writer_deinit(&w);
    text = print_info(path);
    assert_null(strchr(text, '\033'));
    assert_non_null(strstr(text, "general.name = \"\\x1b[2Jred\\n\"\n"));
    free(text);
}

#define WITH_SYNTH(test) cmocka_unit_test_setup_teardown(test, make_synth, remove_synth)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_test_model_has_no_findings),
        WITH_SYNTH(g24_scales_that_are_no_number),
        WITH_SYNTH(g24_codes_are_not_mistaken_for_scales),
        WITH_SYNTH(g24_e8m0_255),
        WITH_SYNTH(g25_hash_tables_are_checked_without_asking),
        WITH_SYNTH(a_broken_container_is_one_finding),
        WITH_SYNTH(a_file_of_another_kind_is_named),
        cmocka_unit_test(info_shows_metadata_tensors_sums_and_release),
        WITH_SYNTH(info_escapes_what_a_terminal_would_obey),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Which release a file is: settled, confirmed, contradicted or silent. */
#include "common/model.h"

#include "common/weights_file.h"
#include "tests/support/gguf_writer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* What the file shows; zero means nothing. */
struct evidence {
    const char *arch; /* NULL: deepseek4 */
    const char *name;
    const char *token;
    const char *key;
    const char *tensor;
    int n_extra_ratios;
};

static struct ds4_weights_file *make(const struct evidence *e)
{
    static const int32_t ratios[16] = {0};
    static const int64_t ne[] = {8};
    const char *tokens[] = {"a", e->token};
    struct ds4_weights_file *wf;
    struct ds4_err err = {0};
    struct ds4_gguf_writer w;
    struct ds4_buf b;
    char path[32];
    int fd;

    ds4_gguf_writer_init(&w);
    ds4_gguf_write_text(&w, "general.architecture", e->arch != NULL ? e->arch : "deepseek4");
    ds4_gguf_write_u32(&w, "deepseek4.block_count", 8);
    ds4_gguf_write_i32s(&w, "deepseek4.attention.compress_ratios", ratios,
                        8 + (uint64_t)e->n_extra_ratios);
    if (e->name != NULL)
        ds4_gguf_write_text(&w, "general.name", e->name);
    ds4_gguf_write_texts(&w, "tokenizer.ggml.tokens", tokens, e->token != NULL ? 2 : 1);
    if (e->key != NULL)
        ds4_gguf_write_u32(&w, e->key, 5);
    if (e->tensor != NULL)
        ds4_gguf_write_tensor(&w, e->tensor, 0, 1, ne);
    ds4_buf_init(&b, 1 << 20);
    ds4_gguf_writer_header(&w, &b);
    for (int i = 0; i < 64; i++)
        assert_int_equal(ds4_buf_append_byte(&b, 0), 0);
    ds4_gguf_memory_file(b.ptr, b.len, path, &fd);
    wf = ds4_weights_open(path, DS4_WEIGHTS_PREAD, &err);
    close(fd);
    ds4_buf_deinit(&b);
    ds4_gguf_writer_deinit(&w);
    if (wf == NULL)
        fail_msg("%s", err.msg);
    return wf;
}

static void expect_release(const struct evidence *e, enum ds4_release configured,
                           enum ds4_release want)
{
    struct ds4_weights_file *wf = make(e);
    enum ds4_release got = DS4_RELEASE_UNSET;
    struct ds4_err err = {0};

    if (ds4_model_release(wf, configured, &got, &err))
        fail_msg("%s", err.msg);
    assert_string_equal(ds4_release_name(got), ds4_release_name(want));
    ds4_weights_close(wf);
}

static void expect_stop(const struct evidence *e, enum ds4_release configured, const char *words)
{
    struct ds4_weights_file *wf = make(e);
    enum ds4_release got = DS4_RELEASE_UNSET;
    struct ds4_err err = {0};

    assert_int_equal(ds4_model_release(wf, configured, &got, &err), -1);
    assert_int_equal(err.code, DS4_E_INVALID);
    if (strstr(err.msg, words) == NULL)
        fail_msg("\"%s\" does not contain \"%s\"", err.msg, words);
    ds4_weights_close(wf);
}

static void evidence_settles_the_release(void **state)
{
    static const struct {
        struct evidence evidence;
        enum ds4_release want;
    } cases[] = {
        {{.arch = "deepseek41"}, DS4_RELEASE_V41},
        {{.arch = "deepseek41", .name = "DeepSeek V4.1 Flash preview"}, DS4_RELEASE_V41},
        {{.token = "<｜System｜>"}, DS4_RELEASE_V41},
        {{.name = "DeepSeek-V4-Flash-0731"}, DS4_RELEASE_V4_0731},
        {{.name = "DeepSeek V4 Flash Preview"}, DS4_RELEASE_V4_PREVIEW},
        {{.key = "deepseek4.dspark.block_size"}, DS4_RELEASE_V4_0731},
        {{.key = "dspark.target_layer_ids.0"}, DS4_RELEASE_V4_0731},
        {{.tensor = "dspark.0.attn_norm.weight"}, DS4_RELEASE_V4_0731},
        {{.n_extra_ratios = 3}, DS4_RELEASE_V4_0731},
        /* The preview trunk was published with the drafter, too. */
        {{.name = "V4 Flash preview", .key = "deepseek4.dspark.block_size"},
         DS4_RELEASE_V4_PREVIEW},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        expect_release(&cases[i].evidence, DS4_RELEASE_UNSET, cases[i].want);
        expect_release(&cases[i].evidence, cases[i].want, cases[i].want);
    }
}

static void a_silent_file_needs_the_setting(void **state)
{
    static const struct evidence silent = {.name = "DeepSeek V4 Flash", .n_extra_ratios = 1};

    (void)state;
    expect_stop(&silent, DS4_RELEASE_UNSET, "set model.release to v4_preview, v4_0731 or v41");
    expect_release(&silent, DS4_RELEASE_V4_PREVIEW, DS4_RELEASE_V4_PREVIEW);
    expect_release(&silent, DS4_RELEASE_V4_0731, DS4_RELEASE_V4_0731);
}

static void a_contradiction_stops_with_the_reason(void **state)
{
    static const struct evidence v41 = {.token = "<｜System｜>"};
    static const struct evidence v0731 = {.name = "Flash-0731"};
    static const struct evidence both = {.name = "0731 preview"};

    (void)state;
    expect_stop(&v41, DS4_RELEASE_V4_PREVIEW, "the vocabulary has <｜System｜>");
    expect_stop(&v0731, DS4_RELEASE_V4_PREVIEW,
                "model.release is v4_preview, but the model file "
                "is v4_0731");
    expect_stop(&v0731, DS4_RELEASE_V41, "choices: v4_preview, v4_0731 or v41");
    expect_stop(&both, DS4_RELEASE_UNSET, "cannot be both");
    expect_stop(&both, DS4_RELEASE_V4_0731, "cannot be both");
}

static void ds4_tiny_does_not_say(void **state)
{
    struct ds4_err err = {0};
    struct ds4_weights_file *wf =
        ds4_weights_open("tests/data/ds4-tiny.gguf", DS4_WEIGHTS_PREAD, &err);
    enum ds4_release got;

    (void)state;
    assert_non_null(wf);
    assert_int_equal(ds4_model_release_of(wf, &got, NULL, &err), 0);
    assert_int_equal(got, DS4_RELEASE_UNSET);
    ds4_weights_close(wf);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(evidence_settles_the_release),
        cmocka_unit_test(a_silent_file_needs_the_setting),
        cmocka_unit_test(a_contradiction_stops_with_the_reason),
        cmocka_unit_test(ds4_tiny_does_not_say),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

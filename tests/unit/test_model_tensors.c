/* The tensor catalogue against files: what is missing, misshapen or of a wrong type is named (rules G13,
 * G19, G25), and a part of a model needs only its own tensors. */
#include "common/model_tensors.h"

#include "tests/support/changed_model.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static int count(void *arg, const struct ds4_tensor_want *want)
{
    (void)want;
    ++*(int *)arg;
    return 0;
}

static void tiny_has_every_tensor_of_the_catalogue_and_no_other(void **state)
{
    struct ds4_err err = {0};
    struct ds4_model_shape s;
    struct ds4_model_part all;
    int n = 0;

    assert_int_equal(ds4_model_read(*state, &s, &err), 0);
    all = ds4_model_all(&s);
    if (ds4_model_require(*state, &s, &all, &err))
        fail_msg("%s", err.msg);
    ds4_model_each_tensor(&s, &all, count, &n);
    assert_int_equal(n, 240);
    assert_int_equal(ds4_weights_n_tensor(*state), 240);
}

static void g19_tensors_are_named_with_what_was_expected(void **state)
{
    static const struct {
        struct ds4_model_change change;
        const char *words;
    } cases[] = {
        {{.tensor = "blk.5.attn_kv.weight", .rename = ""},
         "tensor blk.5.attn_kv.weight [256, 64] is missing"},
        {{.tensor = "token_embd.weight", .rename = "embd"}, "tensor token_embd.weight"},
        {{.tensor = "output_hc_base.weight", .rename = ""}, "tensor output_hc_base.weight [4]"},
        {{.tensor = "blk.2.indexer.proj.weight", .rename = ""}, "blk.2.indexer.proj.weight"},
        {{.tensor = "blk.3.exp_probs_b.bias", .rename = ""}, "blk.3.exp_probs_b.bias [8]"},
        {{.tensor = "blk.0.ffn_gate_tid2eid.weight", .rename = ""},
         "blk.0.ffn_gate_tid2eid.weight"},
        {{.tensor = "blk.4.attn_q_a.weight", .ne0 = 512},
         "tensor blk.4.attn_q_a.weight is [512, 256], expected [256, 256]"},
        {{.tensor = "blk.4.ffn_down_exps.weight", .ne2 = 7},
         "tensor blk.4.ffn_down_exps.weight is [256, 256, 7], expected [256, 256, 8]"},
        {{.tensor = "blk.6.attn_norm.weight", .retype = true, .type = 27},
         "tensor blk.6.attn_norm.weight has type 27 (I64)"},
        {{.tensor = "blk.6.attn_q_b.weight", .retype = true, .type = 40}, /* G13 */
         "tensor blk.6.attn_q_b.weight has type 40 (unknown)"},
        {{.tensor = "blk.6.attn_q_b.weight", .retype = true, .type = 26},
         "tensor blk.6.attn_q_b.weight has type I32"},
        {{.tensor = "blk.1.ffn_gate_tid2eid.weight", .retype = true, .type = 0},
         "tensor blk.1.ffn_gate_tid2eid.weight has type F32, must be I32"},
        {{.tensor = "blk.1.ffn_up_exps.weight", .retype = true, .type = 39},
         "tensor blk.1.ffn_up_exps.weight is MXFP4, but blk.1.ffn_gate_exps.weight is Q8_0"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        ds4_expect_change_refused(*state, &cases[i].change, cases[i].words);
}

static void other_types_of_a_matrix_are_accepted(void **state)
{
    static const uint32_t types[] = {0, 1, 2, 8, 10, 11, 12, 13, 14, 16, 30, 39};
    struct ds4_model_shape s;

    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        struct ds4_model_change c = {
            .tensor = "blk.2.attn_q_b.weight", .retype = true, .type = types[i]};

        ds4_expect_change_accepted(*state, &c, &s);
    }
}

/* The same through the reporting door: all findings, not only the first. */
static void count_finding(void *arg, const struct ds4_err *finding)
{
    (void)finding;
    ++*(int *)arg;
}

static void every_finding_is_reported(void **state)
{
    struct ds4_err err = {0};
    struct ds4_model_shape s;
    struct ds4_model_part part;
    int n = 0;

    assert_int_equal(ds4_model_read(*state, &s, &err), 0);
    part = ds4_model_all(&s);
    assert_int_equal(ds4_model_check_tensors(*state, &s, &part, count_finding, &n), 0);
    s.d_model *= 2; /* now nearly every tensor is wrong */
    assert_true(ds4_model_check_tensors(*state, &s, &part, count_finding, &n) > 100);
    assert_true(n > 100);
}

static void a_part_checks_only_its_own_tensors(void **state)
{
    struct ds4_model_change c = {.tensor = "blk.5.attn_kv.weight", .rename = ""};
    struct ds4_model_part without = {0, 5, true, false};
    struct ds4_model_part with = {5, 8, false, true};
    struct ds4_model_part outside = {5, 9, false, true};
    struct ds4_err err = {0};
    struct ds4_model_shape s;
    struct ds4_weights_file *wf;

    wf = ds4_changed_model_open(*state, &c);
    assert_int_equal(ds4_model_read(wf, &s, &err), 0);
    assert_int_equal(ds4_model_require(wf, &s, &without, &err), 0);
    assert_int_equal(ds4_model_require(wf, &s, &with, &err), -1);
    assert_int_equal(ds4_model_require(wf, &s, &outside, &err), -1);
    assert_non_null(strstr(err.msg, "of a model of 8 layers"));
    ds4_weights_close(wf);
}

static void g25_hash_tables_name_existing_experts(void **state)
{
    static const int32_t bad[] = {8, -1, INT32_MAX};
    struct ds4_model_change none = {0};
    const struct ds4_tensor_info *info;
    struct ds4_weights_file *wf;
    struct ds4_model_shape s;
    struct ds4_err err = {0};
    const char *path;
    const int entry = 3 * 4096 - 1; /* the last one */
    int fd;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        path = ds4_changed_model_write(*state, &none);
        wf = ds4_weights_open(path, DS4_WEIGHTS_PREAD, &err);
        assert_non_null(wf);
        assert_int_equal(ds4_changed_model_read(wf, &s, &err), 0);
        info = ds4_weights_find(wf, "blk.2.ffn_gate_tid2eid.weight");
        assert_non_null(info);
        fd = open(path, O_WRONLY);
        assert_true(fd >= 0);
        assert_int_equal(pwrite(fd, &bad[i], 4, (off_t)(info->offset + (uint64_t)entry * 4)), 4);
        close(fd);
        assert_int_equal(ds4_changed_model_read(wf, &s, &err), -1);
        assert_non_null(strstr(err.msg, "tensor blk.2.ffn_gate_tid2eid.weight: entry 12287"));
        ds4_weights_close(wf);
        unlink(path);
    }
}

/* Pruned files: fewer experts in some layers, everything of the layer agreeing. */
static void a_layer_may_have_fewer_experts_than_announced(void **state)
{
    struct ds4_model_change c = {.tensor = "blk.4.ffn_gate_exps.weight", .ne2 = 6};

    ds4_expect_change_refused(*state, &c,
                              "tensor blk.4.ffn_gate_inp.weight is [256, 8], expected "
                              "[256, 6]");
    c.ne2 = 9;
    ds4_expect_change_refused(*state, &c, "has 9 experts, expert_count is 8");
}

static void add_synth_range(struct ds4_gguf_writer *w)
{
    ds4_gguf_write_u32(w, "ds4.synth.first_layer", 2);
    ds4_gguf_write_u32(w, "ds4.synth.last_layer", 4);
}

static void a_partial_file_says_what_it_holds(void **state)
{
    struct ds4_model_change c = {.add = add_synth_range};
    struct ds4_model_part all = {0, 8, true, true};
    struct ds4_err err = {0};
    struct ds4_model_shape s;
    struct ds4_weights_file *wf;

    wf = ds4_changed_model_open(*state, &c);
    assert_int_equal(ds4_model_read(wf, &s, &err), 0);
    assert_int_equal(s.n_layer, 8);
    assert_int_equal(s.present.first_layer, 2);
    assert_int_equal(s.present.end_layer, 5);
    assert_false(s.present.embed || s.present.head);
    assert_int_equal(ds4_model_require(wf, &s, &s.present, &err), 0);
    assert_int_equal(ds4_model_require(wf, &s, &all, &err), -1);
    assert_non_null(strstr(err.msg, "the file holds only layers [2, 5)"));
    ds4_weights_close(wf);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        DS4_WITH_TINY(tiny_has_every_tensor_of_the_catalogue_and_no_other),
        DS4_WITH_TINY(g19_tensors_are_named_with_what_was_expected),
        DS4_WITH_TINY(other_types_of_a_matrix_are_accepted),
        DS4_WITH_TINY(every_finding_is_reported),
        DS4_WITH_TINY(a_part_checks_only_its_own_tensors),
        DS4_WITH_TINY(g25_hash_tables_name_existing_experts),
        DS4_WITH_TINY(a_layer_may_have_fewer_experts_than_announced),
        DS4_WITH_TINY(a_partial_file_says_what_it_holds),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

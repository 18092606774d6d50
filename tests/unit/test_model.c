/* The shape of ds4-tiny, partitions, releases: facts of a real file against the reader. */
#include "common/model.h"

#include "common/model_tensors.h"
#include "common/weights_file.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#define TINY "tests/data/ds4-tiny.gguf"

static int open_tiny(void **state)
{
    struct ds4_err err = {0};

    *state = ds4_weights_open(TINY, DS4_WEIGHTS_MMAP, &err);
    if (*state == NULL)
        print_error("%s\n", err.msg);
    return *state == NULL ? -1 : 0;
}

static int close_tiny(void **state)
{
    ds4_weights_close(*state);
    return 0;
}

static void tiny_has_the_shape_its_readme_says(void **state)
{
    static const int32_t ratio[] = {0, 0, 4, 128, 4, 128, 4, 128};
    struct ds4_err err = {0};
    struct ds4_model_shape s;

    if (ds4_model_read(*state, &s, &err))
        fail_msg("%s", err.msg);
    assert_string_equal(s.name, "ds4-tiny");
    assert_int_equal(s.n_layer, 8);
    assert_int_equal(s.n_vocab, 4096);
    assert_int_equal(s.d_model, 256);
    assert_int_equal(s.n_head, 8);
    assert_int_equal(s.d_head, 64);
    assert_int_equal(s.d_rope, 16);
    assert_int_equal(s.q_rank, 256);
    assert_int_equal(s.o_rank, 128);
    assert_int_equal(s.n_group, 2);
    assert_int_equal(s.window_tok, 128);
    assert_int_equal(s.context_tok, 65536);
    assert_int_equal(s.n_index_head, 4);
    assert_int_equal(s.d_index, 32);
    assert_int_equal(s.index_topk, 64);
    assert_int_equal(s.n_hyper, 4);
    assert_int_equal(s.sinkhorn_iters, 20);
    assert_true(s.rms_eps == 1e-6f && s.hyper_eps == 1e-6f);
    assert_true(s.rope_base == 10000 && s.compress_rope_base == 160000);
    assert_true(s.yarn_factor == 16 && s.yarn_beta_fast == 32 && s.yarn_beta_slow == 1);
    assert_int_equal(s.yarn_orig_tok, 4096);
    assert_int_equal(s.n_expert_used, 3);
    assert_int_equal(s.n_shared, 1);
    assert_int_equal(s.d_expert, 256);
    assert_int_equal(s.n_hash_layer, 3);
    assert_true(s.route_scale == 1.5f);
    assert_int_equal(s.n_nextn, 0);
    for (int l = 0; l < 8; l++) {
        assert_int_equal(s.ratio[l], ratio[l]);
        assert_int_equal(s.n_expert[l], 8);
        assert_true(s.clamp[l] == 4 && s.clamp_shared[l] == 4);
    }
    assert_int_equal(ds4_model_layer_kind(&s, 1), DS4_LAYER_WINDOW);
    assert_int_equal(ds4_model_layer_kind(&s, 2), DS4_LAYER_CSA);
    assert_int_equal(ds4_model_layer_kind(&s, 3), DS4_LAYER_HCA);
}

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(tiny_has_the_shape_its_readme_says, open_tiny, close_tiny),
        cmocka_unit_test_setup_teardown(tiny_has_every_tensor_of_the_catalogue_and_no_other,
                                        open_tiny, close_tiny),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Tests of worker/plan: what is decided, what is refused, and that the numbers are those of Flash. */
#include "worker/plan.h"

#include "proto/message.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define GIB ((size_t)1 << 30)

/* V4 Flash, layers [first, end). */
static struct ds4_model_shape flash(void)
{
    struct ds4_model_shape m = {.n_layer = 43,
                                .n_vocab = 129280,
                                .d_model = 4096,
                                .n_head = 64,
                                .d_head = 512,
                                .d_rope = 64,
                                .q_rank = 1024,
                                .o_rank = 1024,
                                .n_group = 8,
                                .window_tok = 128,
                                .context_tok = 1048576,
                                .n_index_head = 64,
                                .d_index = 128,
                                .index_topk = 512,
                                .n_hyper = 4,
                                .n_expert_used = 6,
                                .d_expert = 2048};

    for (int32_t l = 0; l < m.n_layer; l++) {
        m.ratio[l] = l < 2 ? 0 : l % 2 == 0 ? 4 : 128;
        m.n_expert[l] = 256;
    }
    return m;
}

static size_t scratch_by_context(const void *arg, const struct ds4_limits *limits)
{
    (void)arg;
    return (size_t)limits->max_context * 16 + 1;
}

static struct ds4_model_shape model;

static struct ds4_plan_request request(void)
{
    struct ds4_plan_request rq = {
        .model = &model,
        .part = {.first_layer = 0, .end_layer = 43, .embed = true, .head = true},
        .quant_sim = true,
        .plain_format = DS4_ROW_BF16,
        .stream = DS4_DTYPE_BF16,
        .max_seqs = 8,
        .max_step_tok = 512,
        .weights_device_bytes = 80 * GIB,
        .free_bytes = 139 * GIB,
        .total_bytes = 140 * GIB,
        .scratch_bytes = scratch_by_context};

    model = flash();
    return rq;
}

static void flash_costs_what_the_layout_says(void **state)
{
    struct ds4_plan_request rq = request();
    struct ds4_plan plan;

    (void)state;
    rq.context_tok = 131072;
    assert_int_equal(ds4_plan_make(&plan, &rq, NULL), 0);
    /* 21 layers of 64 rows of 584 + 68 bytes and 20 of 2 rows of 584: 3514.25 bytes per token. */
    assert_int_equal(ds4_kv_block_bytes(&plan.kv), 899648);
    assert_int_equal(plan.row_bytes, 32768);
    /* Rings of a slot: window 256 rows, inputs of 128 and 256 tokens. */
    assert_int_equal(
        plan.rings_bytes,
        10 * (43 * 256 * (size_t)584 + 21 * 128 * (size_t)(8192 + 2048) + 20 * 256 * (size_t)4096));
    assert_int_equal(plan.kv.n_slot, 10);
    assert_int_equal(plan.context_tok, 131072);
    assert_int_equal(plan.kv.table_blocks, 513); /* 512 and one for the run-ahead rows */
    assert_int_equal(plan.kv.n_block, 8 * 513);
    assert_int_equal(plan.limits.max_context, 513 * DS4_BLOCK_TOK);
    assert_int_equal(plan.limits.max_cols, 64 * 512);
}

static void a_plan_never_exceeds_what_is_free(void **state)
{
    struct ds4_plan plan;

    (void)state;
    for (size_t gib = 84; gib <= 140; gib += 4) {
        struct ds4_plan_request rq = request();

        rq.free_bytes = gib * GIB;
        if (ds4_plan_make(&plan, &rq, NULL) != 0) {
            assert_true(gib < 90);
            continue;
        }
        assert_true(ds4_plan_total(&plan) <= rq.free_bytes);
        assert_true(plan.kv.n_block >= plan.kv.table_blocks);
    }
}

static void an_open_context_shrinks_to_what_fits(void **state)
{
    struct ds4_plan_request rq = request();
    struct ds4_plan plan;

    (void)state;
    rq.free_bytes = 84 * GIB; /* 1 Mi tokens take 3.4 GiB of blocks alone */
    assert_int_equal(ds4_plan_make(&plan, &rq, NULL), 0);
    assert_in_range(plan.context_tok, DS4_BLOCK_TOK, model.context_tok - 1);
    assert_int_equal(plan.context_tok % DS4_BLOCK_TOK, 0);
    assert_true(ds4_plan_total(&plan) <= rq.free_bytes);
    /* No block more would fit, beside what is left alone. */
    assert_true(ds4_plan_total(&plan) + 2 * ds4_kv_block_bytes(&plan.kv) + (1 << 20) >
                rq.free_bytes);
}

static void a_context_that_is_asked_for_is_kept_or_refused(void **state)
{
    struct ds4_plan_request rq = request();
    struct ds4_plan plan;
    struct ds4_err err = {0};
    int32_t would_fit;
    const char *said;

    (void)state;
    rq.free_bytes = 84 * GIB;
    rq.context_tok = 1048576;
    assert_int_equal(ds4_plan_make(&plan, &rq, &err), -1);
    assert_int_equal(err.code, DS4_E_NOMEM);
    said = strstr(err.msg, "a context of ");
    assert_non_null(said);
    would_fit = (int32_t)strtol(said + strlen("a context of "), NULL, 10);
    rq.context_tok = would_fit; /* what the message promises is true */
    assert_int_equal(ds4_plan_make(&plan, &rq, &err), 0);
    assert_int_equal(plan.context_tok, would_fit);
}

static void weights_that_do_not_fit_are_refused_with_both_sizes(void **state)
{
    struct ds4_plan_request rq = request();
    struct ds4_plan plan;
    struct ds4_err err = {0};

    (void)state;
    rq.free_bytes = 64 * GIB;
    assert_int_equal(ds4_plan_make(&plan, &rq, &err), -1);
    assert_int_equal(err.code, DS4_E_NOMEM);
    assert_non_null(strstr(err.msg, "68719476736 are free"));
    assert_non_null(strstr(err.msg, "85899345920"));
    assert_non_null(strstr(err.msg, "fewer layers"));
}

static void weights_in_place_count_as_well(void **state)
{
    struct ds4_plan_request rq = request();
    struct ds4_plan device;
    struct ds4_plan mapped;

    (void)state;
    assert_int_equal(ds4_plan_make(&device, &rq, NULL), 0);
    rq.weights_mapped_bytes = rq.weights_device_bytes;
    rq.weights_device_bytes = 0;
    assert_int_equal(ds4_plan_make(&mapped, &rq, NULL), 0);
    assert_int_equal(ds4_plan_total(&device), ds4_plan_total(&mapped));
}

static void blocks_that_are_asked_for_are_kept_or_refused(void **state)
{
    struct ds4_plan_request rq = request();
    struct ds4_plan plan;
    struct ds4_err err = {0};

    (void)state;
    rq.context_tok = 4096;
    rq.n_blocks = 20;
    assert_int_equal(ds4_plan_make(&plan, &rq, NULL), 0);
    assert_int_equal(plan.kv.n_block, 20);
    rq.n_blocks = 16; /* one sequence takes 17 */
    assert_int_equal(ds4_plan_make(&plan, &rq, &err), -1);
    assert_int_equal(err.code, DS4_E_INVALID);
    rq.n_blocks = 1 << 20;
    assert_int_equal(ds4_plan_make(&plan, &rq, &err), -1);
    assert_int_equal(err.code, DS4_E_NOMEM);
    assert_non_null(strstr(err.msg, "blocks would fit"));
}

static void a_stage_of_window_layers_alone_needs_no_pages(void **state)
{
    struct ds4_plan_request rq = request();
    struct ds4_plan plan;

    (void)state;
    rq.part = (struct ds4_model_part){.first_layer = 0, .end_layer = 2, .embed = true};
    rq.context_tok = 65536;
    assert_int_equal(ds4_plan_make(&plan, &rq, NULL), 0);
    assert_int_equal(plan.pages_bytes, 0);
    assert_int_equal(plan.kv.n_block, 8 * 257); /* so that it does not limit the others */
    assert_int_equal(plan.rings_bytes, 10 * 2 * 256 * (size_t)584);
}

static void step_buffers_do_not_overlap(void **state)
{
    struct ds4_plan_request rq = request();
    struct ds4_step_buffers buf;
    size_t n = 3;
    size_t bytes = ds4_step_buffers_carve(&buf, rq.model, DS4_DTYPE_F32, 3, 2, true, NULL);
    uint8_t *base = calloc(1, bytes);
    const uint8_t *end[2];

    (void)state;
    assert_non_null(base);
    assert_int_equal(ds4_step_buffers_carve(&buf, rq.model, DS4_DTYPE_F32, 3, 2, true, base),
                     bytes);
    assert_ptr_equal(buf.x, base);
    end[0] = (uint8_t *)buf.x + n * 4 * 4096 * sizeof(float);
    assert_true((uint8_t *)buf.h >= end[0]);
    end[1] = (uint8_t *)buf.q + n * 64 * 512 * sizeof(float);
    assert_true((uint8_t *)buf.kv >= end[1]);
    assert_true((uint8_t *)(buf.logits + 2 * (size_t)model.n_vocab) <= base + bytes);
    assert_int_equal((uintptr_t)((uint8_t *)buf.logits - base) % 256, 0);
    free(base);
}

static void settings_out_of_range_are_refused(void **state)
{
    struct ds4_plan_request rq;
    struct ds4_plan plan;
    struct ds4_err err = {0};

    (void)state;
#define REFUSED(change)                                                                            \
    do {                                                                                           \
        rq = request();                                                                            \
        change;                                                                                    \
        assert_int_equal(ds4_plan_make(&plan, &rq, &err), -1);                                     \
        assert_int_equal(err.code, DS4_E_INVALID);                                                 \
    } while (0)
    REFUSED(rq.max_seqs = 0);
    REFUSED(rq.max_seqs = DS4_MAX_STEP_ENTRIES + 1);
    REFUSED(rq.max_step_tok = 7);
    REFUSED(rq.max_step_tok = DS4_MAX_STEP_TOK + 1);
    REFUSED(rq.context_tok = 255);
    REFUSED(rq.context_tok = model.context_tok + 1);
    REFUSED(rq.n_blocks = -1);
    REFUSED(model.d_index = 96);
#undef REFUSED
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(flash_costs_what_the_layout_says),
        cmocka_unit_test(a_plan_never_exceeds_what_is_free),
        cmocka_unit_test(an_open_context_shrinks_to_what_fits),
        cmocka_unit_test(a_context_that_is_asked_for_is_kept_or_refused),
        cmocka_unit_test(weights_that_do_not_fit_are_refused_with_both_sizes),
        cmocka_unit_test(weights_in_place_count_as_well),
        cmocka_unit_test(blocks_that_are_asked_for_are_kept_or_refused),
        cmocka_unit_test(a_stage_of_window_layers_alone_needs_no_pages),
        cmocka_unit_test(step_buffers_do_not_overlap),
        cmocka_unit_test(settings_out_of_range_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

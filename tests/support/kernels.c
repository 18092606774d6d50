/* See kernels.h. */
#include "tests/support/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

const struct ds4_backend *ds4_test_cpu(void)
{
    const struct ds4_backend *backend = ds4_backend_find("cpu");

    assert_non_null(backend);
    return backend;
}

int ds4_test_open(struct ds4_test_dev *devs, enum ds4_products products)
{
    static const enum ds4_isa isa[] = {DS4_ISA_SCALAR, DS4_ISA_AVX2, DS4_ISA_AVX512};
    static const char *const name[] = {"scalar", "avx2", "avx512"};
    static const int32_t threads[] = {1, 3};
    static int said;
    const struct ds4_limits limits = {.max_tok = DS4_TEST_MAX_TOK,
                                      .max_context = 4096,
                                      .d_model = 2048,
                                      .n_hyper = 4,
                                      .n_head = 8,
                                      .d_head = 512,
                                      .n_index_head = 8,
                                      .d_index = 128,
                                      .top_k = 64,
                                      .n_expert = 64,
                                      .n_used = 6,
                                      .d_expert = 512,
                                      .max_cols = 8192};
    const struct ds4_backend *cpu = ds4_test_cpu();
    int n = 0;

    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 2; j++) {
            const struct ds4_device_config config = {
                .n_thread = threads[j], .isa = isa[i], .products = products};
            struct ds4_err err = {0};
            struct ds4_device *dev = cpu->open(&config, &err);
            size_t bytes;
            void *scratch;

            if (dev == NULL) {
                assert_int_equal(err.code, DS4_E_INVALID); /* the machine lacks it */
                assert_int_not_equal(isa[i], DS4_ISA_SCALAR);
                continue;
            }
            bytes = cpu->scratch_bytes(dev, &limits);
            scratch = cpu->alloc(dev, bytes, "scratch", &err);
            assert_non_null(scratch);
            cpu->set_scratch(dev, scratch, bytes);
            devs[n].dev = dev;
            snprintf(devs[n].name, sizeof(devs[n].name), "%s, %d thread(s)", name[i], threads[j]);
            if (!said)
                print_message("runs on: %s\n", devs[n].name);
            n++;
        }
    }
    said = 1;
    return n;
}

void ds4_test_close(struct ds4_test_dev *devs, int n)
{
    for (int i = 0; i < n; i++)
        ds4_test_cpu()->close(devs[i].dev);
}

uint32_t ds4_test_next(uint32_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

void ds4_test_fill(float *x, size_t n, uint32_t seed, float scale)
{
    uint32_t state = seed * 2654435761u + 12345u;

    for (size_t i = 0; i < n; i++)
        x[i] = ((float)(ds4_test_next(&state) >> 8) * 0x1p-23f - 1.0f) * scale;
}

void ds4_test_close_to(const float *got, const double *want, size_t n, double tolerance,
                       double floor, const char *what)
{
    for (size_t i = 0; i < n; i++) {
        double error = fabs((double)got[i] - want[i]);

        if (!(error <= tolerance * (fabs(want[i]) + floor)))
            fail_msg("%s[%zu]: %.9g, expected %.9g (error %.3g)", what, i, (double)got[i], want[i],
                     error);
    }
}

void ds4_test_same_bits(const float *got, const float *want, size_t n, const char *what)
{
    for (size_t i = 0; i < n; i++) {
        if (memcmp(&got[i], &want[i], sizeof(float)) != 0)
            fail_msg("%s[%zu]: %.9g and %.9g differ in their bits", what, i, (double)got[i],
                     (double)want[i]);
    }
}

void ds4_test_batch_init(struct ds4_test_batch *b)
{
    memset(b, 0, sizeof(*b));
    b->batch.token = b->token;
    b->batch.pos = b->pos;
    b->batch.entry_of = b->entry_of;
    b->batch.entry = b->entry;
}

struct ds4_batch_entry *ds4_test_batch_add(struct ds4_test_batch *b, int32_t slot, int32_t base_pos,
                                           int32_t n_row, const int32_t *block, int32_t n_block)
{
    int32_t e = b->batch.n_entry++, first = b->batch.n_tok;

    assert_true(e < DS4_TEST_MAX_ENTRY && first + n_row <= DS4_TEST_MAX_TOK);
    b->entry[e] = (struct ds4_batch_entry){.slot = slot,
                                           .base_pos = base_pos,
                                           .first_row = first,
                                           .n_row = n_row,
                                           .active = true,
                                           .cap_tok = base_pos + n_row,
                                           .block = block,
                                           .n_block = n_block};
    for (int32_t i = 0; i < n_row; i++) {
        b->token[first + i] = i;
        b->pos[first + i] = base_pos + i;
        b->entry_of[first + i] = e;
    }
    b->batch.n_tok += n_row;
    return &b->entry[e];
}

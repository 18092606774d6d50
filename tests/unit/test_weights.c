/* Tests of worker/weights: what reaches a device that has memory of its own. */
#include "worker/weights.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- a device that copies when it is waited for, not before --------------------------------------- */

static const struct ds4_backend *cpu;
static struct ds4_device *dev;
static struct {
    void *dst;
    const void *src;
    size_t bytes;
} queue[4];
static int n_queued, n_in_flight_at_most;

static void upload_later(struct ds4_device *device, void *dst, const void *src, size_t bytes)
{
    (void)device;
    assert_true(n_queued < 4);
    queue[n_queued].dst = dst;
    queue[n_queued].src = src;
    queue[n_queued++].bytes = bytes;
    n_in_flight_at_most = n_queued > n_in_flight_at_most ? n_queued : n_in_flight_at_most;
}

static void sync_now(struct ds4_device *device)
{
    (void)device;
    for (int i = 0; i < n_queued; i++)
        memcpy(queue[i].dst, queue[i].src, queue[i].bytes);
    n_queued = 0;
}

static int open_device(void **state)
{
    const struct ds4_device_config config = {.n_thread = 1};

    (void)state;
    cpu = ds4_backend_find("cpu");
    dev = cpu->open(&config, NULL);
    return dev == NULL ? -1 : 0;
}

static int close_device(void **state)
{
    (void)state;
    cpu->close(dev);
    return 0;
}

static struct ds4_weights_file *open_file(const char *path, struct ds4_model_shape *model)
{
    struct ds4_err err = {0};
    struct ds4_weights_file *file = ds4_weights_open(path, DS4_WEIGHTS_PREAD, &err);

    if (file == NULL || ds4_model_read(file, model, &err) != 0)
        fail_msg("%s", err.msg);
    return file;
}

/* The expert stacks of a layer, the largest tensors there are, as the device holds them. */
static void check_layer(const struct ds4_weights_file *file, const struct ds4_layer_weights *w)
{
    static const char *const stem[] = {"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"};
    const void *const data[] = {w->gate.data, w->up.data, w->down.data};

    for (int i = 0; i < 3; i++) {
        char name[64];
        const struct ds4_tensor_info *info;
        uint8_t *want;

        snprintf(name, sizeof(name), "blk.%d.%s.weight", w->id, stem[i]);
        info = ds4_weights_find(file, name);
        assert_non_null(info);
        want = malloc((size_t)info->bytes);
        assert_int_equal(ds4_weights_read(file, info, 0, (size_t)info->bytes, want, NULL), 0);
        if (memcmp(want, data[i], (size_t)info->bytes) != 0)
            fail_msg("%s differs", name);
        free(want);
    }
}

static void load(const char *path, bool generated)
{
    struct ds4_backend backend = *cpu;
    struct ds4_model_shape model;
    struct ds4_weights_file *file = open_file(path, &model);
    const struct ds4_weights_request rq = {
        .model = &model, .file = file, .part = ds4_model_all(&model)};
    const struct ds4_weights_progress nobody = {NULL, NULL};
    struct ds4_stage_weights w;
    struct ds4_weights_size size;
    struct ds4_err err = {0};
    uint8_t *area;

    backend.host_weights = false;
    backend.upload = upload_later;
    backend.sync = sync_now;
    n_in_flight_at_most = 0;
    assert_int_equal(ds4_stage_weights_measure(&rq, &size, &err), 0);
    assert_int_equal(size.mapped_bytes, 0);
    area = aligned_alloc(256, size.device_bytes);
    memset(area, 0xee, size.device_bytes);
    if (ds4_stage_weights_load(&w, &rq, &size, &backend, dev, area, &nobody, &err) != 0)
        fail_msg("%s", err.msg);
    assert_int_equal(n_queued, 0);              /* nothing travels from buffers that are gone */
    assert_in_range(n_in_flight_at_most, 1, 2); /* a vector may follow a matrix that travels */
    for (int32_t l = 0; l < w.n_layer; l++)
        check_layer(file, &w.layer[l]);
    assert_true(generated == (ds4_weights_recipe(file, ds4_weights_at(file, 0)) != NULL));
    ds4_stage_weights_deinit(&w);
    free(area);
    ds4_weights_close(file);
}

static void a_buffer_is_not_filled_again_before_it_has_travelled(void **state)
{
    (void)state;
    load("tests/data/ds4-tiny.gguf", false);
}

static void generated_weights_are_made_where_they_stay(void **state)
{
    (void)state;
    load("synth:tiny:q2:9", true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_buffer_is_not_filled_again_before_it_has_travelled),
        cmocka_unit_test(generated_weights_are_made_where_they_stay),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}

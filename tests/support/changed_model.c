/* Rewrites ds4-tiny entry by entry with one of them changed. */
#include "tests/support/changed_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

static char copy_path[64];

int ds4_changed_model_setup(void **state)
{
    struct ds4_err err = {0};

    *state = ds4_weights_open(DS4_TEST_TINY, DS4_WEIGHTS_MMAP, &err);
    if (*state == NULL)
        print_error("%s\n", err.msg);
    return *state == NULL ? -1 : 0;
}

int ds4_changed_model_teardown(void **state)
{
    ds4_weights_close(*state);
    return 0;
}

const char *ds4_changed_model_write(const struct ds4_weights_file *tiny,
                                    const struct ds4_model_change *c)
{
    const struct ds4_gguf *meta = ds4_weights_meta(tiny);
    struct ds4_gguf_writer w;
    int fd;

    ds4_gguf_writer_init(&w);
    for (size_t i = 0; i < meta->n_kv; i++) {
        if (c->drop_key == NULL || !ds4_str_equal(meta->kv[i].key, ds4_str_view(c->drop_key)))
            ds4_gguf_write_copy(&w, &meta->kv[i]);
    }
    if (c->add != NULL)
        c->add(&w);
    for (size_t i = 0; i < meta->n_tensor; i++) {
        struct ds4_tensor_info t = meta->tensor[i];
        const char *name = t.name;

        if (c->tensor != NULL && strcmp(name, c->tensor) == 0) {
            name = c->rename != NULL ? c->rename : name;
            t.gguf_type = c->retype ? c->type : t.gguf_type;
            t.ne[0] = c->ne0 != 0 ? c->ne0 : t.ne[0];
            t.ne[2] = c->ne2 != 0 ? c->ne2 : t.ne[2];
        }
        if (name[0] != '\0')
            ds4_gguf_write_tensor(&w, name, t.gguf_type, t.n_dims, t.ne);
    }
    snprintf(copy_path, sizeof(copy_path), "/tmp/ds4-test-model-XXXXXX");
    fd = mkstemp(copy_path);
    assert_true(fd >= 0);
    close(fd);
    ds4_gguf_writer_save(&w, copy_path);
    ds4_gguf_writer_deinit(&w);
    return copy_path;
}

struct ds4_weights_file *ds4_changed_model_open(const struct ds4_weights_file *tiny,
                                                const struct ds4_model_change *change)
{
    const char *path = ds4_changed_model_write(tiny, change);
    struct ds4_err err = {0};
    struct ds4_weights_file *wf = ds4_weights_open(path, DS4_WEIGHTS_MMAP, &err);

    unlink(path);
    if (wf == NULL)
        fail_msg("%s", err.msg);
    return wf;
}

int ds4_changed_model_read(const struct ds4_weights_file *wf, struct ds4_model_shape *shape,
                           struct ds4_err *err)
{
    if (ds4_model_read(wf, shape, err))
        return -1;
    return ds4_model_require(wf, shape, &shape->present, err);
}

void ds4_expect_change_refused(const struct ds4_weights_file *tiny,
                               const struct ds4_model_change *change, const char *words)
{
    struct ds4_weights_file *wf = ds4_changed_model_open(tiny, change);
    struct ds4_err err = {0};
    struct ds4_model_shape shape;
    int rc = ds4_changed_model_read(wf, &shape, &err);

    ds4_weights_close(wf);
    if (rc == 0)
        fail_msg("accepted; expected \"%s\"", words);
    assert_int_equal(err.code, DS4_E_INVALID);
    if (strstr(err.msg, words) == NULL)
        fail_msg("\"%s\" does not contain \"%s\"", err.msg, words);
}

void ds4_expect_change_accepted(const struct ds4_weights_file *tiny,
                                const struct ds4_model_change *change,
                                struct ds4_model_shape *shape)
{
    struct ds4_weights_file *wf = ds4_changed_model_open(tiny, change);
    struct ds4_err err = {0};

    if (ds4_changed_model_read(wf, shape, &err))
        fail_msg("%s", err.msg);
    ds4_weights_close(wf);
}

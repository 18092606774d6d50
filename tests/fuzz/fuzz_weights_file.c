/* Arbitrary bytes as a model file: opened, walked, checked as a model; nothing may crash or leak, and
 * what is accepted must be readable. */
#include "common/model.h"
#include "common/model_tensors.h"
#include "common/weights_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Reads every element, so that ASan sees a wrong bound. */
static uint64_t walk_metadata(const struct ds4_gguf *gguf)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < gguf->n_kv; i++) {
        const struct ds4_gguf_kv *kv = &gguf->kv[i];
        char key[DS4_TENSOR_NAME_BYTES];

        for (uint64_t k = 0; k < kv->n; k++) {
            if (kv->type == DS4_GGUF_STRING) {
                struct ds4_str s = ds4_gguf_str_at(kv, k);

                for (size_t b = 0; b < s.len; b++)
                    sum += (unsigned char)s.ptr[b];
            } else if (ds4_gguf_is_float(kv->type)) {
                sum += ds4_gguf_float_at(kv, k) > 0;
            } else {
                sum += (uint64_t)ds4_gguf_int_at(kv, k);
            }
        }
        if (kv->key.len < sizeof(key)) {
            memcpy(key, kv->key.ptr, kv->key.len);
            key[kv->key.len] = '\0';
            if (ds4_gguf_find(gguf, key) != kv)
                abort();
        }
    }
    return sum;
}

static void walk_tensors(const struct ds4_weights_file *wf)
{
    struct ds4_err err = {DS4_OK, ""};
    uint8_t byte;

    for (size_t i = 0; i < ds4_weights_n_tensor(wf); i++) {
        const struct ds4_tensor_info *info = ds4_weights_at(wf, i);

        if (ds4_weights_find(wf, info->name) != info)
            abort();
        if (info->bytes != 0 && (ds4_weights_read(wf, info, info->bytes - 1, 1, &byte, &err) ||
                                 ds4_weights_data(wf, info, &err) == NULL))
            abort();
    }
}

static void ignore(void *arg, const struct ds4_err *finding)
{
    (void)arg;
    (void)finding;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ds4_err err = {DS4_OK, ""};
    struct ds4_weights_file *wf;
    struct ds4_model_shape shape;
    enum ds4_release release;
    volatile uint64_t sum;
    char path[32];
    int fd = memfd_create("fuzz", MFD_CLOEXEC);

    if (fd < 0 || write(fd, data, size) != (ssize_t)size)
        abort();
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    wf = ds4_weights_open(path, DS4_WEIGHTS_MMAP, &err);
    if (wf == NULL && err.msg[0] == '\0')
        abort();
    if (wf != NULL) {
        sum = walk_metadata(ds4_weights_meta(wf));
        (void)sum;
        walk_tensors(wf);
        if (ds4_model_read(wf, &shape, &err) == 0)
            ds4_model_check_tensors(wf, &shape, &shape.present, ignore, NULL);
        if (ds4_model_release_of(wf, &release, NULL, &err) != 0 && err.msg[0] == '\0')
            abort();
    }
    ds4_weights_close(wf);
    close(fd);
    return 0;
}

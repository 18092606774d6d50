/* Tests of common/weights_digest: what changes the identity of a model file and what does not. */
#include "common/weights_digest.h"

#include "tests/support/golden.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define MODEL "tests/data/ds4-tiny.gguf"

static void digest_of(const char *path, enum ds4_weights_access access,
                      uint8_t digest[DS4_WEIGHTS_DIGEST_BYTES])
{
    struct ds4_err err = {0};
    struct ds4_weights_file *wf = ds4_weights_open(path, access, &err);

    if (wf == NULL)
        fail_msg("%s", err.msg);
    assert_int_equal(ds4_weights_digest(wf, digest, &err), 0);
    ds4_weights_close(wf);
}

/* Digest of a copy of the model in which one byte at `offset` is flipped. */
static void digest_of_patched(uint64_t offset, uint8_t digest[DS4_WEIGHTS_DIGEST_BYTES])
{
    char path[] = "/tmp/ds4-digest-XXXXXX";
    size_t n;
    char *bytes = golden_read_file(MODEL, &n);
    int fd = mkstemp(path);

    assert_true(fd >= 0);
    assert_true(offset < n);
    bytes[offset] ^= 1;
    assert_int_equal(write(fd, bytes, n), (ssize_t)n);
    close(fd);
    digest_of(path, DS4_WEIGHTS_PREAD, digest);
    unlink(path);
    free(bytes);
}

/* File offset of the first byte of a tensor. */
static uint64_t offset_of(const char *name)
{
    struct ds4_weights_file *wf = ds4_weights_open(MODEL, DS4_WEIGHTS_PREAD, NULL);
    const struct ds4_tensor_info *info;
    uint64_t offset;

    assert_non_null(wf);
    info = ds4_weights_find(wf, name);
    assert_non_null(info);
    offset = info->offset;
    ds4_weights_close(wf);
    return offset;
}

static void the_way_of_reading_does_not_matter(void **state)
{
    uint8_t a[DS4_WEIGHTS_DIGEST_BYTES];
    uint8_t b[DS4_WEIGHTS_DIGEST_BYTES];

    (void)state;
    digest_of(MODEL, DS4_WEIGHTS_MMAP, a);
    digest_of(MODEL, DS4_WEIGHTS_PREAD, b);
    assert_memory_equal(a, b, sizeof(a));
}

/* The tensor that comes first by name is always among the samples. */
static void a_changed_weight_in_a_sample_changes_it(void **state)
{
    uint8_t a[DS4_WEIGHTS_DIGEST_BYTES];
    uint8_t b[DS4_WEIGHTS_DIGEST_BYTES];

    (void)state;
    digest_of(MODEL, DS4_WEIGHTS_PREAD, a);
    digest_of_patched(offset_of("blk.0.attn_kv.weight"), b);
    assert_memory_not_equal(a, b, sizeof(a));
}

static void metadata_is_no_part_of_it(void **state)
{
    uint8_t a[DS4_WEIGHTS_DIGEST_BYTES];
    uint8_t b[DS4_WEIGHTS_DIGEST_BYTES];
    size_t n;
    char *bytes = golden_read_file(MODEL, &n);
    const char *name = memmem(bytes, n, "ds4-tiny", strlen("ds4-tiny"));

    (void)state;
    assert_non_null(name);
    digest_of(MODEL, DS4_WEIGHTS_PREAD, a);
    digest_of_patched((uint64_t)(name - bytes), b);
    assert_memory_equal(a, b, sizeof(a));
    free(bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_way_of_reading_does_not_matter),
        cmocka_unit_test(a_changed_weight_in_a_sample_changes_it),
        cmocka_unit_test(metadata_is_no_part_of_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

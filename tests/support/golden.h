/* Golden outputs: a small reader of safetensors files, for tests.  Every complaint ends the test. */
#ifndef DS4_TESTS_SUPPORT_GOLDEN_H
#define DS4_TESTS_SUPPORT_GOLDEN_H

#include <stddef.h>
#include <stdint.h>

#define GOLDEN_MAX_DIMS 4

struct golden; /* the file in memory */

struct golden_tensor {
    const void *data; /* borrowed, aligned for its type */
    int32_t n_dims;
    int64_t shape[GOLDEN_MAX_DIMS];
    size_t n; /* elements in all */
};

struct golden *golden_open(const char *path);
void golden_close(struct golden *g);

/* A tensor of 4-byte elements of that dtype ("F32" or "I32"). */
struct golden_tensor golden_get(const struct golden *g, const char *name, const char *dtype);

/* ||a - b|| / ||b||, in double. */
double golden_rel_l2(const float *a, const float *b, size_t n);

/* A whole file; *n its bytes.  Free with free(). */
char *golden_read_file(const char *path, size_t *n);

#endif

/* What the kernel tests share: a device for every instruction set and thread count the machine has,
 * seeded numbers, and comparison with double-precision references. */
#ifndef DS4_TESTS_SUPPORT_KERNELS_H
#define DS4_TESTS_SUPPORT_KERNELS_H

#include "kernels/backend.h"

#include <stddef.h>
#include <stdint.h>

#define DS4_TEST_MAX_DEVS 8

struct ds4_test_dev {
    struct ds4_device *dev;
    char name[40];
};

/* Opens one device per instruction set present and pool of 1 and 3 threads, each with scratch for
 * small shapes; returns how many.  Prints them the first time, so that a log says what was run. */
int ds4_test_open(struct ds4_test_dev *devs, enum ds4_products products);
void ds4_test_close(struct ds4_test_dev *devs, int n);

const struct ds4_backend *ds4_test_cpu(void);

/* Uniform in (-scale, scale), the same for the same seed on every machine. */
void ds4_test_fill(float *x, size_t n, uint32_t seed, float scale);
uint32_t ds4_test_next(uint32_t *state);

/* Fails unless |got - want| <= tolerance * (|want| + floor) for every value. */
void ds4_test_close_to(const float *got, const double *want, size_t n, double tolerance,
                       double floor, const char *what);
/* Fails unless the bytes agree; names the first differing float. */
void ds4_test_same_bits(const float *got, const float *want, size_t n, const char *what);

/* A batch of n_entry sequences in steps of their own slots, rows one after the other. */
#define DS4_TEST_MAX_TOK   512
#define DS4_TEST_MAX_ENTRY 4
struct ds4_test_batch {
    struct ds4_batch batch;
    int32_t token[DS4_TEST_MAX_TOK];
    int32_t pos[DS4_TEST_MAX_TOK];
    int32_t entry_of[DS4_TEST_MAX_TOK];
    struct ds4_batch_entry entry[DS4_TEST_MAX_ENTRY];
};
void ds4_test_batch_init(struct ds4_test_batch *b);
/* cap_tok covers the rows; the block table is given by the caller. */
struct ds4_batch_entry *ds4_test_batch_add(struct ds4_test_batch *b, int32_t slot, int32_t base_pos,
                                           int32_t n_row, const int32_t *block, int32_t n_block);

#endif

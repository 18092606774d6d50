/* Copies of ds4-tiny with one change, to see that the loader notices it.
 *
 * A copy has the metadata and tensor table of the original, but zeros (a hole) for data. */
#ifndef DS4_TESTS_CHANGED_MODEL_H
#define DS4_TESTS_CHANGED_MODEL_H

#include "common/model_tensors.h"
#include "tests/support/gguf_writer.h"

#define DS4_TEST_TINY "tests/data/ds4-tiny.gguf"

struct ds4_model_change {
    const char *drop_key; /* left out; `add` may write it anew */
    void (*add)(struct ds4_gguf_writer *w);
    const char *tensor; /* NULL, or: this one is ... */
    const char *rename; /* ... called so ("" leaves it out) */
    uint32_t type;      /* ... of this type, if retype */
    bool retype;
    int64_t ne0; /* ... with this row length, if not 0 */
    int64_t ne2;
};

/* Setup and teardown of a test whose state is the opened ds4-tiny. */
int ds4_changed_model_setup(void **state);
int ds4_changed_model_teardown(void **state);
#define DS4_WITH_TINY(test)                                                                        \
    cmocka_unit_test_setup_teardown(test, ds4_changed_model_setup, ds4_changed_model_teardown)

/* Writes the copy to a temporary file, which the caller unlinks; returns its path, valid until the next
 * call. */
const char *ds4_changed_model_write(const struct ds4_weights_file *tiny,
                                    const struct ds4_model_change *change);
/* Writes, opens and unlinks it; the caller closes. */
struct ds4_weights_file *ds4_changed_model_open(const struct ds4_weights_file *tiny,
                                                const struct ds4_model_change *change);

/* ds4_model_read and ds4_model_require of what the file says it holds. */
int ds4_changed_model_read(const struct ds4_weights_file *wf, struct ds4_model_shape *shape,
                           struct ds4_err *err);

/* Assertions: refused with DS4_E_INVALID and these words; accepted with this shape. */
void ds4_expect_change_refused(const struct ds4_weights_file *tiny,
                               const struct ds4_model_change *change, const char *words);
void ds4_expect_change_accepted(const struct ds4_weights_file *tiny,
                                const struct ds4_model_change *change,
                                struct ds4_model_shape *shape);

#endif

/* Looks up a backend by name and knows the sizes that both share.  The only file that sees whether
 * CUDA is built in. */
#include "kernels/backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern const struct ds4_backend ds4_backend_cpu;
#ifdef DS4_HAVE_CUDA
extern const struct ds4_backend ds4_backend_cuda;
#endif

const struct ds4_backend *ds4_backend_find(const char *name)
{
    if (strcmp(name, "cpu") == 0)
        return &ds4_backend_cpu;
#ifdef DS4_HAVE_CUDA
    if (strcmp(name, "cuda") == 0)
        return &ds4_backend_cuda;
#endif
    return NULL;
}

int32_t ds4_backend_n_device(const char *name)
{
    const struct ds4_backend *backend = ds4_backend_find(name);

    return backend == NULL ? 0 : backend->n_device();
}

const char *volatile ds4_backend_kernel = "none";
static ds4_device_fault_fn fault_hook; /* set before the first operation, then only read */

void ds4_backend_on_fault(ds4_device_fault_fn hook)
{
    fault_hook = hook;
}

void ds4_backend_fault(const char *file, int line, const char *what, const char *why)
{
    struct ds4_device_fault fault = {file, line, what, why, ds4_backend_kernel};

    if (fault_hook != NULL)
        fault_hook(&fault);
    fprintf(stderr, "%s:%d: %s: %s (kernel launched last: %s)\n", file, line, what, why,
            fault.kernel);
    abort();
}

size_t ds4_row_bytes(enum ds4_row_format format, int32_t d, int32_t d_rope)
{
    size_t nope = (size_t)(d - d_rope), packed;

    switch (format) {
    case DS4_ROW_F32:
        return 4 * (size_t)d;
    case DS4_ROW_BF16:
        return 2 * (size_t)d;
    case DS4_ROW_FP8:
        packed = nope + (nope + DS4_FP8_BLOCK - 1) / DS4_FP8_BLOCK;
        return packed + packed % 2 + 2 * (size_t)d_rope;
    case DS4_ROW_FP4:
        return (size_t)d / 2 + ((size_t)d + DS4_FP4_BLOCK - 1) / DS4_FP4_BLOCK;
    }
    return 0;
}

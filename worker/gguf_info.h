/* Prints what a model file holds. */
#ifndef DS4_WORKER_GGUF_INFO_H
#define DS4_WORKER_GGUF_INFO_H

#include "common/err.h"

#include <stdio.h>

/* Metadata, tensor table, bytes per class, flavour and release of the file (or set) to `out`.  Works for
 * any GGUF file; what only a V4 model has is left out for others.  Errors as ds4_weights_open. */
int ds4_gguf_print_info(const char *path, FILE *out, struct ds4_err *err) DS4_MUST_CHECK;

#endif
